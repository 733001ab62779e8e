/* What the programs that `mojim bench tx` compiles share: the clock, medians, a log that is warm. */
#ifndef MEASURE_H
#define MEASURE_H

#include <mojim.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Nanoseconds. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of `n` figures of malloc's memory, which is freed. */
static double median(double *all, int n)
{
    qsort(all, (size_t)n, sizeof *all, ascending);
    double found = all[n / 2];
    free(all);
    return found;
}

/* Has the log gone round once, as it has soon in any program: 64 MiB. -1 as mojim_msync. */
static int warm_log(mojim_t *m)
{
    size_t len = 1 << 20;
    char *p = mojim_map(m, "warm", len, MOJIM_CREATE);
    if (p == MAP_FAILED)
        return -1;
    for (int i = 1; i <= 80; i++) {
        memset(p, i, len);
        if (mojim_msync(p, len, MS_SYNC) != 0)
            return -1;
    }
    return mojim_unmap(p, len);
}

#endif
