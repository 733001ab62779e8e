/* A program whose transactions fail: it does what it is told, line by line, and prints what came
 * of it.
 *
 *   doubt CONFIG NODE
 *
 *   begin    a transaction, which sets words[0] to one more
 *   more     it sets 6 MiB too: more than a log has room for
 *   commit, abort
 *   block    a captured block in another thread, which sets words[8] to 1
 *   failed   0 until a block was given up
 *   own      an allocation that is a transaction of its own, as a call
 *   words    what words[0] and words[8] are
 *
 * A call that fails prints its errno. */
#define _GNU_SOURCE
#include <errno.h>
#include <mojim_tx.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define LARGE (6 << 20)

static uint64_t *words;
static void *block;
static mojim_heap_t *heap;

static void *captured(void *arg)
{
    (void)arg;
    __transaction_atomic { words[8] = 1; }
    return NULL;
}

static int begin(void)
{
    return mojim_tx_begin() || mojim_tx_set(&words[0], words[0] + 1);
}

static int more(void)
{
    if (mojim_tx_add_new(&words[512], LARGE) != 0)
        return -1;
    memset(&words[512], 1, LARGE);
    return 0;
}

static int in_a_thread(void)
{
    pthread_t t;
    if (pthread_create(&t, NULL, captured, NULL) != 0)
        return -1;
    return pthread_detach(t);
}

static int is(const char *line, const char *what)
{
    return strncmp(line, what, strlen(what)) == 0;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    mojim_t *m = mojim_attach(argv[1], argv[2], "v");
    if (m) {
        words = mojim_map(m, "words", 4096 + LARGE, MOJIM_CREATE | MAP_ATOMIC);
        heap = mojim_heap_open(m, "heap", 0, NULL, 0);
    }
    /* The heap has a slab of this size from here on. */
    if (!m || words == MAP_FAILED || !heap || mojim_pmalloc(heap, 64, &block) != 0)
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("open");
    char line[32];
    while (fgets(line, sizeof line, stdin)) {
        int done = 0;
        if (is(line, "words") || is(line, "failed")) {
            if (is(line, "words"))
                printf("%d %d\n", (int)words[0], (int)words[8]);
            else
                printf("%d\n", mojim_tx_failed());
            continue;
        }
        if (is(line, "begin"))
            done = begin();
        else if (is(line, "more"))
            done = more();
        else if (is(line, "commit"))
            done = mojim_tx_commit();
        else if (is(line, "abort"))
            done = mojim_tx_abort();
        else if (is(line, "block"))
            done = in_a_thread();
        else if (is(line, "own"))
            done = mojim_pmalloc(heap, 64, &block);
        printf("%d\n", done == 0 ? 0 : errno);
    }
    return 0;
}
