/* Blocks that the compiler captures, over a file, in two runs. */
#define _GNU_SOURCE
#include <mojim_tx.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    fprintf(stderr, "line %d: %s (%s)\n", line, what, mojim_last_error());
    _exit(1);
}

static long *words;

__attribute__((transaction_safe, noinline)) static void put(int i, long v)
{
    words[i] = v;
}

static int nested(void)
{
    int inner = 0;
    __transaction_atomic {
        put(0, 1);
        __transaction_atomic {
            put(0, 2);
            put(1, 2);
            inner++;
            __transaction_cancel;
        }
        put(2, 3);
        __transaction_atomic { put(3, 4); }
    }
    return inner;
}

static void cancelled(void)
{
    long local = 1;
    __transaction_atomic {
        put(4, 9);
        local = 2;
        char *p = malloc(100);
        if (p)
            p[0] = 1;
        __transaction_cancel;
    }
    CHECK(words[4] == 0 && local == 1);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    mojim_t *m = mojim_attach(argv[1], "a", "v");
    CHECK(m);
    words = mojim_map(m, "captured", 1 << 16, MOJIM_CREATE | MAP_ATOMIC);
    CHECK(words != MAP_FAILED);
    if (strcmp(argv[2], "first") == 0) {
        CHECK(nested() == 0);
        cancelled();
        words[5] = 7; /* in no block */
        CHECK(mojim_tx_failed() == 0);
        _exit(0);
    }
    CHECK(words[0] == 1 && words[1] == 0 && words[2] == 3 && words[3] == 4);
    CHECK(words[4] == 0 && words[5] == 0);
    return mojim_detach(m) != 0;
}
