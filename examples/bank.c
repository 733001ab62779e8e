/* A small bank: transfers between accounts, whose total never changes.
 *
 * The money leaves one account and comes to another in one sync point (gmsync), with the
 * number of transfers. So whenever the program is killed, and whichever node is lost, the
 * total is right, and no transfer that was said to be done is missing.
 *
 *     cc examples/bank.c -Iinclude -Ltarget/release -lmojim -Wl,-rpath,$PWD/target/release -o bank
 *     ./bank mojim.toml a [TRANSFERS]
 *
 * checks the total, makes that many transfers (default 10,000), and prints a line after
 * each thousandth of all that were ever made. The same bank, on the same file: bank.py,
 * bank_mmap.c (an ordinary program that knows nothing of Mojim).
 */
#include <mojim.h>
#include <stdio.h>
#include <stdlib.h>

enum { ACCOUNTS = 64, OPENED_WITH = 1000 };

struct bank {
    long transfers; /* ever made; 0: not opened yet */
    long account[ACCOUNTS];
};

static int fail(const char *where)
{
    fprintf(stderr, "%s: %s\n", where, mojim_last_error());
    return 1;
}

static int transfer(struct bank *b)
{
    long *from = &b->account[rand() % ACCOUNTS], *to = &b->account[rand() % ACCOUNTS];
    long money = rand() % 100;
    *from -= money;
    *to += money;
    b->transfers += 1;
    struct msync_input changed[] = {
        {from, sizeof *from}, {to, sizeof *to}, {&b->transfers, sizeof b->transfers}};
    return gmsync(changed, 3, MS_SYNC); /* all three, or none */
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return fprintf(stderr, "usage: %s CONFIG NODE [TRANSFERS]\n", argv[0]), 2;
    long todo = argc > 3 ? atol(argv[3]) : 10000;
    mojim_t *m = mojim_attach(argv[1], argv[2], NULL);
    if (m == NULL)
        return fail("attach");
    struct bank *b = mojim_map(m, "bank", sizeof *b, MOJIM_CREATE | MAP_ATOMIC);
    if (b == MAP_FAILED)
        return fail("map");
    if (b->transfers == 0) {
        for (int i = 0; i < ACCOUNTS; i++)
            b->account[i] = OPENED_WITH;
        b->transfers = 1;
        if (mojim_msync(b, sizeof *b, MS_SYNC) != 0)
            return fail("msync");
    }
    long total = 0;
    for (int i = 0; i < ACCOUNTS; i++)
        total += b->account[i];
    if (total != ACCOUNTS * OPENED_WITH)
        return printf("total %ld wrong\n", total), 1;
    printf("total %ld ok\n", total);
    fflush(stdout);
    srand((unsigned)b->transfers);
    while (todo-- > 0) {
        if (transfer(b) != 0)
            return fail("gmsync");
        if (b->transfers % 1000 == 0) {
            printf("transfer %ld\n", b->transfers);
            fflush(stdout);
        }
    }
    return mojim_detach(m) != 0;
}
