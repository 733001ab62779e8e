/* What the programs share. Each works on 4 KiB of memory by blocks, from a random seed.
 *
 * Compiled three ways:
 *   -DMODEL    without transactions: a block copies the memory when it begins, and a
 *              cancel copies it back
 *   -DDURABLE  the memory is a file; `check` as the second argument prints what the file has
 *   neither    the memory is an array: for libitm
 * All print the same lines. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BYTES 4096

static unsigned char *M;
static long globals[16];
static uint64_t random_state;

struct snap {
    unsigned char m[BYTES];
    long globals[16];
    uint64_t random_state;
};

#ifdef MODEL
static void save(struct snap *s)
{
    memcpy(s->m, M, BYTES);
    memcpy(s->globals, globals, sizeof globals);
    s->random_state = random_state;
}
static void restore(struct snap *s)
{
    memcpy(M, s->m, BYTES);
    memcpy(globals, s->globals, sizeof globals);
    random_state = s->random_state;
}
#define BEGIN(n) { struct snap *s_##n = (struct snap *)malloc(sizeof *s_##n); save(s_##n); {
#define CANCEL(n) do { restore(s_##n); goto end_##n; } while (0)
#define END(n) } goto end_##n; end_##n: free(s_##n); }
#define SAFE
#else
#define BEGIN(n) __transaction_atomic { {
#define CANCEL(n) __transaction_cancel
#define END(n) } }
#define SAFE __attribute__((transaction_safe))
#endif

SAFE static unsigned next(unsigned below)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % below;
}

typedef void program(void);
struct named {
    const char *name;
    program *run;
};
#ifdef __cplusplus
extern "C" {
#endif
extern const struct named programs[];
#ifdef __cplusplus
}
#endif

#ifdef DURABLE
#include <mojim_tx.h>
#endif

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    int only_looks = argc > 2 && strcmp(argv[2], "check") == 0;
#ifdef DURABLE
    mojim_t *m = mojim_attach(argv[3], "a", "v");
    if (!m)
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
#else
    M = (unsigned char *)aligned_alloc(64, BYTES);
#endif
    for (int i = 0; programs[i].name; i++) {
#ifdef DURABLE
        M = (unsigned char *)mojim_map(m, programs[i].name, BYTES, MOJIM_CREATE | MAP_ATOMIC);
        if (M == MAP_FAILED)
            return fprintf(stderr, "%s\n", mojim_last_error()), 1;
#else
        memset(M, 0, BYTES);
#endif
        memset(globals, 0, sizeof globals);
        random_state = seed + (uint64_t)i;
        if (!only_looks)
            programs[i].run();
        uint64_t h = 14695981039346656037u;
        for (int j = 0; j < BYTES; j++)
            h = (h ^ M[j]) * 1099511628211u;
        printf("%s %016llx", programs[i].name, (unsigned long long)h);
        if (!only_looks && !getenv("MEMORY_ONLY"))
            for (int j = 0; j < 16; j++)
                printf(" %ld", globals[j]);
        printf("\n");
    }
    fflush(stdout);
    _exit(0); /* without a detach */
}
