/* What captured blocks cost: a program of a user's, compiled by `mojim bench tx --case captured`.
 *
 *   captured CONFIG NODE ROUNDS OPS
 *
 * Of each case, what is compared takes turns in each round. A line of output: the case, bytes of
 * a transaction, what of it, and nanoseconds for one operation: the median of OPS transactions, or the
 * mean of as many blocks that store to no region, which are too short to be timed one by one. */
#define _GNU_SOURCE
#include "measure.h"
#include <mojim_tx.h>
#include <stdio.h>

#define PAGES 1024
#define MOST 100
#define STORES 1000

static uint64_t *region;
/* Not static: what is stored there could be read by others. */
uint64_t plain[STORES], one_word = 1;

static int fail(void)
{
    fprintf(stderr, "%s\n", mojim_last_error());
    return 1;
}

/* Keeps the compiler from leaving out, and from moving, what is measured. */
__attribute__((transaction_pure, noinline)) static void nothing(void)
{
    __asm__ volatile("" ::: "memory");
}

__attribute__((transaction_pure, noinline)) static void note(double *at)
{
    *at = now();
}

__attribute__((noinline)) static double reading_blocks(int n)
{
    uint64_t sum = 0;
    double from = now();
    for (int i = 0; i < n; i++) {
        uint64_t x;
        __transaction_atomic { x = one_word; }
        sum += x;
        nothing();
    }
    double took = now() - from;
    return sum == (uint64_t)n ? took / n : 0;
}

__attribute__((noinline)) static double plain_loads(int n)
{
    uint64_t sum = 0;
    double from = now();
    for (int i = 0; i < n; i++) {
        sum += *(volatile uint64_t *)&one_word;
        nothing();
    }
    double took = now() - from;
    return sum == (uint64_t)n ? took / n : 0;
}

/* Stores in a block that has begun and is not yet committed. */
__attribute__((noinline)) static double captured_stores(int n)
{
    double sum = 0, from = 0, until = 0;
    for (int i = 0; i < n; i++) {
        __transaction_atomic {
            note(&from);
            for (int k = 0; k < STORES; k++)
                plain[k] = (uint64_t)(i + k);
            note(&until);
        }
        sum += until - from;
    }
    return sum / n / STORES;
}

__attribute__((noinline)) static double plain_stores(int n)
{
    double sum = 0, from, until;
    for (int i = 0; i < n; i++) {
        note(&from);
        for (int k = 0; k < STORES; k++)
            /* One by one, as the block's are: not as many at once as the processor can. */
            *(volatile uint64_t *)&plain[k] = (uint64_t)(i + k);
        note(&until);
        sum += until - from;
    }
    return sum / n / STORES;
}

/* Words of the region, no two in a page; the same sequence for all who ask so often. */
struct places {
    unsigned page;
    uint64_t *at[MOST];
};

static void choose(struct places *p, int words)
{
    for (int i = 0; i < words; i++) {
        p->page = (p->page + 613) % PAGES;
        p->at[i] = &region[p->page * 512 + p->page % 500];
    }
}

/* Transactions by blocks or by hand; the median. */
__attribute__((noinline)) static double whole(int captured, struct places *p, int words, int n)
{
    double *took = malloc((size_t)n * sizeof *took);
    for (int i = 0; i < n; i++) {
        struct msync_input all[MOST];
        choose(p, words);
        double from = now();
        if (captured) {
            __transaction_atomic {
                for (int k = 0; k < words; k++)
                    *p->at[k] = (uint64_t)i;
            }
        } else {
            for (int k = 0; k < words; k++) {
                *p->at[k] = (uint64_t)i;
                all[k].address = p->at[k];
                all[k].length = 8;
            }
            if (gmsync(all, words, MS_SYNC) != 0)
                exit(fail());
        }
        took[i] = now() - from;
    }
    return median(took, n);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    int rounds = atoi(argv[3]), ops = atoi(argv[4]);
    mojim_t *m = mojim_attach(argv[1], argv[2], "v");
    region = m ? mojim_map(m, "captured", PAGES * 4096, MOJIM_CREATE | MAP_ATOMIC) : MAP_FAILED;
    if (region == MAP_FAILED)
        return fail();
    if (rounds > 1 && warm_log(m) != 0)
        return fail();
    for (int i = 0; i < PAGES; i++)
        region[i * 512] = 1;
    if (mojim_msync(region, PAGES * 4096, MS_SYNC) != 0)
        return fail();
    static const int words[] = {1, 10, 100};
    struct places a[3] = {0}, b[3] = {0};
    /* The first round warms up. */
    for (int r = 0; r <= rounds; r++) {
        double t[4], w[3][2];
        t[0] = reading_blocks(ops * 100);
        t[1] = plain_loads(ops * 100);
        t[2] = captured_stores(ops);
        t[3] = plain_stores(ops);
        for (int i = 0; i < 3; i++)
            for (int k = 0; k < 2; k++) {
                int captured = (r + k) % 2;
                w[i][!captured] = whole(captured, captured ? &a[i] : &b[i], words[i], ops);
            }
        if (r == 0)
            continue;
        printf("begin+commit 0 block %f\nbegin+commit 0 load %f\n", t[0], t[1]);
        printf("store 8 block %f\nstore 8 plain %f\n", t[2], t[3]);
        for (int i = 0; i < 3; i++)
            printf("whole %d block %f\nwhole %d gmsync %f\n", words[i] * 8, w[i][0], words[i] * 8,
                   w[i][1]);
    }
    if (mojim_tx_failed() != 0)
        return fprintf(stderr, "a block was given up\n"), 1;
    return mojim_detach(m) != 0 ? fail() : 0;
}
