/* __transaction_relaxed blocks, in two runs. One that calls what can be taken back is a block as
 * any other. One that calls what cannot runs, and is not committed, nor is anything after it.
 *
 *   relaxed CONFIG whole|part    where the call is made in any case; where the block has made it
 *   relaxed CONFIG abort         in an explicit transaction, which is taken back
 *   relaxed CONFIG check         only what came before it is there */
#define _GNU_SOURCE
#include <errno.h>
#include <mojim_tx.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    fprintf(stderr, "line %d: %s (%s)\n", line, what, mojim_last_error());
    _exit(1);
}

static long *words;
static int part;

/* What the block must not be optimized away for, and nothing can take back. */
__attribute__((noinline)) static void unsafe(long n)
{
    CHECK(dprintf(1, "unsafe %ld\n", n) > 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    mojim_t *m = mojim_attach(argv[1], "a", "v");
    CHECK(m);
    words = mojim_map(m, "relaxed", 4096, MOJIM_CREATE | MAP_ATOMIC);
    CHECK(words != MAP_FAILED);
    if (strcmp(argv[2], "check") == 0) {
        CHECK(words[0] == 1 && words[1] == 0 && words[2] == 0 && words[3] == 0);
        return mojim_detach(m) != 0;
    }
    part = strcmp(argv[2], "part") == 0;
    __transaction_relaxed { words[0] = 1; }
    CHECK(mojim_tx_failed() == 0);
    if (strcmp(argv[2], "abort") == 0) {
        /* What the block has stored without a note stays in memory: nothing may build on it. */
        CHECK(mojim_tx_begin() == 0);
        __transaction_relaxed {
            unsafe(2);
            words[1] = 2;
        }
        CHECK(mojim_tx_commit() == -1 && errno == EOPNOTSUPP && mojim_tx_failed() == 0);
        CHECK(mojim_tx_abort() == -1 && errno == EOPNOTSUPP && words[1] == 2);
        words[2] = 3;
    } else if (part) {
        __transaction_relaxed {
            words[1] = 2;
            if (words[0] == 1)
                unsafe(words[1]);
            words[2] = 3;
        }
    } else {
        __transaction_relaxed {
            unsafe(2);
            words[1] = 2;
            words[2] = 3;
        }
    }
    /* It ran. */
    CHECK(words[1] == 2 && words[2] == 3);
    CHECK(mojim_tx_failed() == EOPNOTSUPP && mojim_tx_is_open() == 0);
    __transaction_atomic { words[3] = 4; }
    CHECK(words[3] == 4);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set((uint64_t *)&words[3], 5) == 0);
    CHECK(mojim_tx_commit() == -1 && errno == EOPNOTSUPP);
    CHECK(strstr(mojim_last_error(), "mojim_tx_failed"));
    CHECK(mojim_tx_abort() == 0 && words[3] == 4);
    _exit(0);
}
