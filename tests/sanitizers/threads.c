/* Threads in one heap and in one region: `threads CONFIG`. Each has its own blocks and words, and its
 * own transactions; a lock guards what they share; the heap is synced and rolled back in between. */
#include <mojim_tx.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    fprintf(stderr, "line %d: %s (%s)\n", line, what, mojim_last_error());
    exit(1);
}

enum { THREADS = 3, ROUNDS = 400, KEPT = 40 };

static mojim_heap_t *heap;
static uint64_t *words;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t changes = PTHREAD_RWLOCK_INITIALIZER;
/* Blocks that one thread allocates and another frees. */
static void *passed;

struct random {
    unsigned long x;
};

static unsigned long next(struct random *r, unsigned long n)
{
    r->x = r->x * 6364136223846793005u + 1442695040888963407u;
    return (r->x >> 33) % n;
}

static size_t size(struct random *r)
{
    return next(r, 30) ? next(r, 300) + 1 : next(r, 100000) + 1;
}

/* Outside of transactions; no sync of the heap at the same time. */
static void blocks(void **mine, struct random *r)
{
    pthread_rwlock_rdlock(&changes);
    void **at = &mine[next(r, KEPT)];
    if (!*at) {
        size_t n = size(r);
        switch (next(r, 3)) {
        case 0: CHECK((*at = mojim_malloc(heap, n))); break;
        case 1: CHECK((*at = mojim_calloc(heap, 1, n))); break;
        default: CHECK((*at = mojim_aligned_alloc(heap, 64, n)));
        }
        CHECK(mojim_usable_size(*at) >= n);
        memset(*at, (int)n, n);
    } else if (next(r, 3) == 0) {
        size_t n = size(r);
        CHECK((*at = mojim_realloc(heap, *at, n)));
        memset(*at, 1, n);
    } else {
        pthread_mutex_lock(&lock);
        void *other = passed;
        passed = *at, *at = NULL;
        pthread_mutex_unlock(&lock);
        if (other)
            CHECK(mojim_free(other) == 0);
    }
    pthread_rwlock_unlock(&changes);
}

static void transaction(uint64_t *own, void **block, unsigned i, struct random *r)
{
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_set(&own[0], own[0] + 1) == 0);
    CHECK(mojim_tx_add(&own[1], 24) == 0);
    memset(&own[1], (int)i, 24);
    if (*block)
        CHECK(mojim_pfree(block) == 0);
    else
        CHECK(mojim_pmalloc(heap, size(r), block) == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&own[4], i) == 0);
    CHECK((i % 2 ? mojim_tx_abort() : mojim_tx_commit()) == 0);
    CHECK((i % 4 == 3 ? mojim_tx_abort() : mojim_tx_commit()) == 0);
    if (i % 8 == 0) {
        char name[20];
        snprintf(name, sizeof name, "r%d", (int)((own - words) / 512));
        CHECK(mojim_tx_begin() == 0 && mojim_root_set(heap, name, *block, NULL) == 0);
        CHECK(mojim_tx_commit() == 0);
    }
}

static void *thread(void *arg)
{
    struct random r = {(unsigned long)(uintptr_t)arg + 1};
    uint64_t *own = words + 512 * (uintptr_t)arg;
    void *mine[KEPT] = {0}, *block = NULL;
    for (unsigned i = 0; i < ROUNDS; i++) {
        blocks(mine, &r);
        transaction(own, &block, i, &r);
        if (i % 10 == 0) {
            own[6] = i;
            CHECK(mojim_msync(&own[6], 8, MS_SYNC) == 0);
        }
    }
    pthread_rwlock_rdlock(&changes);
    for (int i = 0; i < KEPT; i++)
        CHECK(!mine[i] || mojim_free(mine[i]) == 0);
    pthread_rwlock_unlock(&changes);
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    mojim_t *m = mojim_attach(argv[1], "a", "v");
    CHECK(m && (heap = mojim_heap_open(m, "threads", 0, NULL, 0)));
    words = mojim_map(m, "words", 64 << 10, MOJIM_CREATE | MAP_ATOMIC);
    CHECK(words != MAP_FAILED);
    pthread_t t[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&t[i], NULL, thread, (void *)i) == 0);
    for (int i = 0; i < 20; i++) {
        pthread_rwlock_wrlock(&changes);
        CHECK(mojim_heap_sync(heap) == 0);
        pthread_rwlock_unlock(&changes);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(t[i], NULL) == 0 && words[512 * i] > 0);
    CHECK(mojim_heap_sync(heap) == 0);
    void *p = mojim_malloc(heap, 100);
    CHECK(p && mojim_heap_rollback(heap) == 0 && mojim_usable_size(p) == 0);
    CHECK(mojim_heap_close(heap) == 0 && mojim_detach(m) == 0);
    puts("well");
}
