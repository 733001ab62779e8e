/* What the sanitizers must report: `planted CONFIG WHAT`. Those whose names begin with `library` are in
 * the library, which the program has read, or change, what it must not. */
#include <mojim_tx.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t *words;

static void *stores(void *arg)
{
    (void)arg;
    for (int i = 0; i < 100000; i++)
        words[0]++;
    return NULL;
}

static void *adds(void *arg)
{
    (void)arg;
    for (int i = 0; i < 1000; i++) {
        mojim_tx_begin();
        mojim_tx_add(words, 24);
        mojim_tx_abort();
    }
    return NULL;
}

/* Two threads that change the same word; in the library it is a transaction that takes it back. */
static int race(void *(*other)(void *))
{
    pthread_t t[2];
    if (pthread_create(&t[0], NULL, stores, NULL) || pthread_create(&t[1], NULL, other, NULL))
        return 2;
    return pthread_join(t[0], NULL) || pthread_join(t[1], NULL);
}

int main(int argc, char **argv)
{
    mojim_t *m = argc == 3 ? mojim_attach(argv[1], "a", "v") : NULL;
    if (!m || (words = mojim_map(m, "words", 4096, MOJIM_CREATE | MAP_ATOMIC)) == MAP_FAILED)
        return 2;
    const char *what = argv[2];
    char *p = malloc(16);
    if (strcmp(what, "overflow") == 0) {
        return ((volatile char *)p)[16 + argc - 3];
    } else if (strcmp(what, "library-overflow") == 0) {
        /* Eight bytes are read by code of the library's own, not by memcpy. */
        return mojim_tx_begin() || mojim_tx_add(p + 16, 8) || mojim_tx_abort();
    } else if (strcmp(what, "misaligned") == 0) {
        return *(volatile int *)(p + argc - 2) != 0;
    } else if (strcmp(what, "race") == 0) {
        return race(stores);
    } else if (strcmp(what, "library-race") == 0) {
        return race(adds);
    }
    return 2;
}
