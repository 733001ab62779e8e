/* Threads that share no lock of the program's: `unlocked CONFIG`. First calls outside of transactions,
 * blocks of other threads freed, threads that end and begin; then transactions beside syncs of the heap
 * and looks at its roots; then a heap that only transactions change, logs, and variables. What a thread
 * passes to another goes through one atomic word, so that all else that one sees of the other is what
 * the library does. */
#include <mojim_persistent.h>
#include <mojim_tx.h>
#include <pthread.h>
#include <stdint.h>
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

enum { THREADS = 4, KEPT = 200, PASSED = 16, RECORDS = 150 };

static mojim_t *m;
static mojim_heap_t *heap;
static unsigned long rounds = 6000;
static void *passed[PASSED];
static int finished;

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
    return next(r, 50) ? next(r, 200) + 16 : next(r, 60000) + 16;
}

static void in_threads(void *(*f)(void *))
{
    pthread_t t[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&t[i], NULL, f, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(t[i], NULL) == 0);
}

/* Whoever has a block finds in it what was stored last. */
static void *filled(void *p, size_t n)
{
    CHECK(p && mojim_usable_size(p) >= n);
    memset(p, (int)n, n);
    memcpy(p, &n, sizeof n);
    return p;
}

static void freed(void *p)
{
    size_t n;
    if (!p)
        return;
    memcpy(&n, p, sizeof n);
    CHECK(((unsigned char *)p)[n - 1] == (unsigned char)n && mojim_free(p) == 0);
}

static void *outside(void *arg)
{
    struct random r = {(uintptr_t)arg + 1};
    void *mine[KEPT] = {0};
    for (unsigned long i = 0; i < rounds; i++) {
        void **at = &mine[next(&r, KEPT)];
        size_t n = size(&r);
        if (!*at)
            *at = filled(mojim_malloc(heap, n), n);
        else if (next(&r, 4))
            freed(*at), *at = NULL;
        else if (next(&r, 2))
            *at = filled(mojim_realloc(heap, *at, n), n);
        else
            *at = __atomic_exchange_n(&passed[next(&r, PASSED)], *at, __ATOMIC_ACQ_REL);
    }
    for (int i = 0; i < KEPT; i++)
        freed(mine[i]);
    return NULL;
}

struct own {
    uint64_t words[8];
    void *block;
    char rest[56];
};

static struct own *own;

static void *transactions(void *arg)
{
    struct own *o = &own[(uintptr_t)arg];
    struct random r = {(uintptr_t)arg + 7};
    char name[20], kind[20];
    for (unsigned long i = 0; i < rounds / 20; i++) {
        int aborts = next(&r, 3) == 0;
        CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&o->words[0], o->words[0] + 1) == 0);
        CHECK(mojim_tx_add(o->rest, sizeof o->rest) == 0);
        memset(o->rest, (int)i, sizeof o->rest);
        size_t n = size(&r);
        if (!o->block)
            CHECK(mojim_pmalloc(heap, n, &o->block) == 0 && filled(o->block, n));
        else
            CHECK(mojim_pfree(&o->block) == 0);
        if (next(&r, 4) == 0) {
            snprintf(name, sizeof name, "r%lu of %d", next(&r, 3), (int)(o - own));
            snprintf(kind, sizeof kind, "k%lu", i);
            void *to = next(&r, 3) ? o : NULL;
            CHECK(mojim_root_set(heap, name, to, kind) == 0);
        }
        CHECK((aborts ? mojim_tx_abort() : mojim_tx_commit()) == 0);
        if (aborts || !o->block || next(&r, 2))
            continue;
        /* A block that is committed, for another thread to free. */
        CHECK(mojim_tx_begin() == 0 && mojim_tx_add(&o->block, sizeof o->block) == 0);
        void *p = o->block;
        o->block = NULL;
        CHECK(mojim_tx_commit() == 0);
        p = __atomic_exchange_n(&passed[next(&r, PASSED)], p, __ATOMIC_ACQ_REL);
        if (p)
            CHECK(mojim_pfree(&p) == 0);
    }
    return NULL;
}

static void *looks(void *arg)
{
    char name[20];
    for (unsigned long i = 0; !__atomic_load_n(&finished, __ATOMIC_ACQUIRE); i++) {
        snprintf(name, sizeof name, "r%lu of %lu", i % 3, i % THREADS);
        /* Of another kind, or there is none. */
        CHECK(!mojim_root(heap, name, "strange"));
        CHECK(!strstr(mojim_last_error(), "damaged") && mojim_root(heap, "own", NULL) == own);
        if (arg)
            CHECK(mojim_heap_sync(heap) == 0);
    }
    return NULL;
}

static MOJIM_PERSISTENT uint64_t counters[THREADS][8];
static uint64_t *words;
static mojim_log_t *shared_log;

/* Each with a log of its own, and all with one more. */
static void *logs(void *arg)
{
    uintptr_t me = (uintptr_t)arg;
    char name[20], record[200], out[200];
    snprintf(name, sizeof name, "log%d", (int)me);
    mojim_log_t *log = mojim_log_open(m, name, 16 << 10, (int)(1 + me % 3));
    CHECK(log);
    uint64_t first, at, end;
    CHECK(mojim_log_ends(log, &first, NULL) == 0);
    for (unsigned i = 0; i < RECORDS; i++) {
        memset(record, (int)i, sizeof record);
        CHECK(mojim_log_append(log, record, i + 1, &at) == 0);
        CHECK(mojim_log_append(shared_log, record, me + 1, &at) == 0);
        end = at;
        /* Another thread may have discarded it. */
        int there = mojim_log_read(shared_log, &at, out, sizeof out) == (ssize_t)me + 1;
        uint64_t oldest;
        CHECK(mojim_log_ends(shared_log, &oldest, NULL) == 0);
        CHECK(there ? out[0] == record[0] : oldest > at);
        CHECK(mojim_log_read(log, &first, out, sizeof out) == i + 1 && out[i] == record[i]);
        if (i % 10 == 0)
            CHECK(mojim_log_truncate(log, first) == 0);
        if (me == 0 && i % 10 == 0)
            CHECK(mojim_log_truncate(shared_log, end) == 0);
        CHECK(mojim_store8(&counters[me][0], i) == 0);
        counters[me][1] = words[512 * me] = i;
        struct msync_input both[] = {{&counters[me][1], 8}, {&words[512 * me], 8}};
        CHECK(gmsync(both, 2, MS_MOJIM) == 0);
    }
    CHECK(mojim_log_close(log) == 0);
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    if (argc > 2)
        rounds = strtoul(argv[2], NULL, 0);
    CHECK((m = mojim_attach(argv[1], "a", "v")) && (heap = mojim_heap_open(m, "outside", 0, NULL, 0)));
    for (int i = 0; i < 3; i++) {
        in_threads(outside);
        CHECK(mojim_heap_sync(heap) == 0);
    }
    for (int i = 0; i < PASSED; i++)
        freed(passed[i]), passed[i] = NULL;
    CHECK(mojim_heap_sync(heap) == 0 && mojim_heap_close(heap) == 0);

    pthread_t reader, syncs;
    for (int exact = 0; exact < 2; exact++) {
        CHECK((heap = mojim_heap_open(m, exact ? "exact" : "transactions", 0, NULL,
                                      exact ? MOJIM_HEAP_EXACT : 0)));
        CHECK(mojim_tx_begin() == 0 && (own = mojim_calloc(heap, THREADS, sizeof *own)));
        CHECK(mojim_root_set(heap, "own", own, NULL) == 0 && mojim_tx_commit() == 0);
        finished = 0;
        CHECK(pthread_create(&reader, NULL, looks, NULL) == 0);
        CHECK(exact || pthread_create(&syncs, NULL, looks, "") == 0);
        in_threads(transactions);
        __atomic_store_n(&finished, 1, __ATOMIC_RELEASE);
        CHECK(pthread_join(reader, NULL) == 0 && (exact || pthread_join(syncs, NULL) == 0));
        for (int i = 0; i < PASSED; i++)
            CHECK(!passed[i] || mojim_pfree(&passed[i]) == 0);
        if (exact) {
            rounds /= 20;
            in_threads(outside);
            memset(passed, 0, sizeof passed);
        }
        CHECK(mojim_heap_close(heap) == 0);
    }

    CHECK(mojim_variables(m, "variables") == 0);
    words = mojim_map(m, "words", 64 << 10, MOJIM_CREATE | MAP_ATOMIC);
    CHECK(words != MAP_FAILED && (shared_log = mojim_log_open(m, "log", 64 << 10, MOJIM_LOG_CHECKSUM)));
    in_threads(logs);
    for (int i = 0; i < THREADS; i++)
        CHECK(counters[i][0] == RECORDS - 1 && words[512 * i] == RECORDS - 1);
    CHECK(mojim_log_close(shared_log) == 0 && mojim_detach(m) == 0);
    puts("well");
}
