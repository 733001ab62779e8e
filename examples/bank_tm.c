/* The bank of bank.c with blocks that the compiler captures: a transfer is three plain
 * statements in a __transaction_atomic block, which is atomic and durable.
 *
 *     gcc -fgnu-tm examples/bank_tm.c -Iinclude -Ltarget/release -lmojim_itm -lmojim -Wl,-rpath,$PWD/target/release -o bank_tm
 *     ./bank_tm mojim.toml a [TRANSFERS]
 */
#include <mojim_tx.h>
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

static void transfer(struct bank *b)
{
    int from = rand() % ACCOUNTS, to = rand() % ACCOUNTS;
    long money = rand() % 100;
    __transaction_atomic {
        b->account[from] -= money;
        b->account[to] += money;
        b->transfers += 1;
    } /* durable and replicated here */
}

static void open_it(struct bank *b)
{
    __transaction_atomic {
        for (int i = 0; i < ACCOUNTS; i++)
            b->account[i] = OPENED_WITH;
        b->transfers = 1;
    }
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
    if (b->transfers == 0)
        open_it(b);
    long total = 0;
    for (int i = 0; i < ACCOUNTS; i++)
        total += b->account[i];
    if (total != ACCOUNTS * OPENED_WITH)
        return printf("total %ld wrong\n", total), 1;
    printf("total %ld ok\n", total);
    fflush(stdout);
    srand((unsigned)b->transfers);
    while (todo-- > 0) {
        transfer(b);
        if (mojim_tx_failed() != 0) /* it could not be committed; standard error says why */
            return 1;
        if (b->transfers % 1000 == 0) {
            printf("transfer %ld\n", b->transfers);
            fflush(stdout);
        }
    }
    return mojim_detach(m) != 0;
}
