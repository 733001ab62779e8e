/* The bank of bank.c with pointers: accounts are blocks of a persistent heap, and a transfer is
 * a transaction.
 *
 *     cc examples/bank_heap.c -Iinclude -Ltarget/release -lmojim -Wl,-rpath,$PWD/target/release -o bank_heap
 *     ./bank_heap mojim.toml a [TRANSFERS]
 */
#include <errno.h>
#include <mojim_tx.h>
#include <stdio.h>
#include <stdlib.h>

enum { ACCOUNTS = 64, OPENED_WITH = 1000 };

struct account {
    long money;
};

struct bank {
    long transfers;
    struct account *account[ACCOUNTS];
};

static int fail(const char *where)
{
    fprintf(stderr, "%s: %s\n", where, mojim_last_error());
    return 1;
}

/* A bank with its accounts: all of it, or nothing. */
static struct bank *found(mojim_heap_t *h)
{
    struct bank *b = mojim_calloc(h, 1, sizeof *b);
    for (int i = 0; b != NULL && i < ACCOUNTS; i++) {
        b->account[i] = mojim_malloc(h, sizeof(struct account));
        if (b->account[i] == NULL)
            return NULL;
        b->account[i]->money = OPENED_WITH;
    }
    if (b == NULL || mojim_root_set(h, "bank", b, "struct bank") != 0 || mojim_heap_sync(h) != 0)
        return NULL;
    return b;
}

static int transfer(struct bank *b)
{
    struct account *from = b->account[rand() % ACCOUNTS], *to = b->account[rand() % ACCOUNTS];
    long money = rand() % 100;
    if (mojim_tx_begin() != 0)
        return -1;
    if (mojim_tx_add(from, sizeof *from) != 0 || mojim_tx_add(to, sizeof *to) != 0 ||
        mojim_tx_add(&b->transfers, sizeof b->transfers) != 0)
        return mojim_tx_abort(), -1;
    from->money -= money;
    to->money += money;
    b->transfers += 1;
    if (money > 90 && from->money < 0)
        return mojim_tx_abort(); /* refused: all is as it was */
    return mojim_tx_commit();
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return fprintf(stderr, "usage: %s CONFIG NODE [TRANSFERS]\n", argv[0]), 2;
    long todo = argc > 3 ? atol(argv[3]) : 10000;
    mojim_t *m = mojim_attach(argv[1], argv[2], NULL);
    if (m == NULL)
        return fail("attach");
    mojim_heap_t *h = mojim_heap_open(m, "bank.heap", 0, NULL, 0);
    if (h == NULL)
        return fail("heap");
    struct bank *b = mojim_root(h, "bank", "struct bank");
    if (b == NULL && errno == ENOENT)
        b = found(h);
    if (b == NULL)
        return fail("the bank");
    long total = 0;
    for (int i = 0; i < ACCOUNTS; i++)
        total += b->account[i]->money;
    if (total != ACCOUNTS * OPENED_WITH)
        return printf("total %ld wrong\n", total), 1;
    printf("total %ld ok\n", total);
    fflush(stdout);
    srand((unsigned)b->transfers);
    while (todo-- > 0) {
        long before = b->transfers;
        if (transfer(b) != 0)
            return fail("transfer");
        if (b->transfers != before && b->transfers % 1000 == 0) {
            printf("transfer %ld\n", b->transfers);
            fflush(stdout);
        }
    }
    return mojim_detach(m) != 0;
}
