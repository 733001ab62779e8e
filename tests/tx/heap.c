/* Blocks of a heap in transactions, in two runs. */
#define _GNU_SOURCE
#include <errno.h>
#include <mojim_tx.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    fprintf(stderr, "line %d: %s (%s)\n", line, what, mojim_last_error());
    _exit(1);
}

struct root {
    char *kept, *freed, *grown;
    char *own[4];
    uint64_t halves[2];
};

static struct root *r;
static mojim_heap_t *h;

static void aborted(void)
{
    CHECK(mojim_tx_begin() == 0);
    char *p = mojim_malloc(h, 100);
    CHECK(p && mojim_usable_size(p) >= 100);
    strcpy(p, "gone");
    CHECK(mojim_tx_abort() == 0);
    CHECK(mojim_usable_size(p) == 0 && errno == EINVAL);
    /* With blocks at hand that the thread has freed outside of transactions: these are handed out, and come
       back, without a lock, which no abort would undo. */
    void *own = mojim_malloc(h, 100), *freed = mojim_malloc(h, 100);
    CHECK(own && freed && mojim_free(freed) == 0);
    CHECK(mojim_tx_begin() == 0 && (p = mojim_malloc(h, 100)) && mojim_tx_abort() == 0);
    CHECK(mojim_usable_size(p) == 0 && errno == EINVAL);
    CHECK(mojim_tx_begin() == 0 && mojim_free(own) == 0 && mojim_tx_abort() == 0);
    CHECK(mojim_usable_size(own) >= 100 && mojim_free(own) == 0);
    CHECK(mojim_free(p) == -1 && errno == EINVAL);
}

static void committed(void)
{
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_pmalloc(NULL, 100, (void **)&r->kept) == 0);
    strcpy(r->kept, "kept");
    CHECK(mojim_pmalloc(h, 40, (void **)&r->freed) == 0);
    CHECK(mojim_tx_add(&r->grown, 8) == 0 && (r->grown = mojim_calloc(h, 1, 30)));
    strcpy(r->grown, "grown");
    CHECK(mojim_tx_commit() == 0);
    /* By themselves. */
    CHECK(mojim_pmalloc(NULL, 64, (void **)&r->own[0]) == 0);
    CHECK(mojim_pmalloc(NULL, 64, (void **)&r->own[1]) == 0 && r->own[0] != r->own[1]);
    CHECK(mojim_pfree((void **)&r->own[1]) == 0 && r->own[1] == NULL);
    CHECK(mojim_pfree((void **)&r->own[1]) == 0);

    char *was = r->freed;
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_pfree((void **)&r->freed) == 0 && r->freed == NULL);
    CHECK(mojim_free(was) == -1 && errno == EINVAL);
    CHECK(mojim_tx_begin() == 0);
    char *other = mojim_malloc(h, 40);
    CHECK(other && other != was); /* until the commit */
    CHECK(mojim_tx_abort() == 0);
    CHECK(mojim_heap_sync(h) == -1 && errno == EINVAL);
    CHECK(mojim_tx_commit() == 0);

    CHECK(mojim_tx_begin() == 0 && mojim_tx_add(&r->grown, 8) == 0);
    char *before = r->grown;
    CHECK((r->grown = mojim_realloc(h, before, 5000)) && strcmp(r->grown, "grown") == 0);
    CHECK(mojim_tx_abort() == 0 && r->grown == before && strcmp(before, "grown") == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_add(&r->grown, 8) == 0);
    CHECK((r->grown = mojim_realloc(h, before, 5000)));
    CHECK(mojim_tx_commit() == 0 && mojim_usable_size(before) == 0);
}

/* How many transactions there were. */
static uint64_t ended;

static void *changes(void *arg)
{
    (void)arg;
    for (;;) {
        CHECK(mojim_tx_begin() == 0);
        CHECK(mojim_tx_set(&r->halves[0], r->halves[0] + 1) == 0);
        CHECK(mojim_tx_set(&r->halves[1], r->halves[1] + 1) == 0);
        if (r->halves[0] % 3 == 0)
            CHECK(mojim_tx_abort() == 0);
        else
            CHECK(mojim_tx_commit() == 0);
        if (r->halves[0] % 3 == 2) {
            CHECK(mojim_tx_begin() == 0);
            CHECK(mojim_tx_set(&r->halves[0], r->halves[0] + 2) == 0);
            CHECK(mojim_tx_set(&r->halves[1], r->halves[1] + 2) == 0);
            CHECK(mojim_tx_commit() == 0);
        }
        __atomic_fetch_add(&ended, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

/* A sync of the heap commits half of no transaction: the program dies right after one. */
static void syncs(void)
{
    pthread_t t;
    CHECK(pthread_create(&t, NULL, changes, NULL) == 0);
    for (int i = 0; i < 40 || __atomic_load_n(&ended, __ATOMIC_RELAXED) < 40; i++)
        CHECK(mojim_heap_sync(h) == 0);
}

static void *takes_all(void *arg)
{
    (void)arg;
    CHECK(mojim_tx_begin() == 0 && mojim_root_set(h, "gone", r, "b") == 0);
    CHECK(mojim_root_set(h, "new", r, "b") == 0 && mojim_tx_abort() == 0);
    return NULL;
}

static void *other_roots(void *arg)
{
    (void)arg;
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_root_set(h, "gone", r, "b") == -1 && errno == EBUSY);
    CHECK(mojim_root_set(h, "new", NULL, NULL) == -1 && errno == EBUSY);
    CHECK(mojim_root_set(h, "mine", r, "c") == 0 && mojim_root_set(h, "r", r, "root") == 0);
    CHECK(mojim_tx_commit() == 0);
    CHECK(mojim_root_set(h, "gone", r, "b") == -1 && errno == EBUSY);
    return NULL;
}

/* Two transactions change roots at once: the place of a root that one has removed is taken by
 * no other, and they change no root of one name. */
static void roots(int commit)
{
    pthread_t t;
    CHECK(mojim_tx_begin() == 0 && mojim_root_set(h, "gone", r, "a") == 0);
    CHECK(mojim_tx_commit() == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_root_set(h, "gone", NULL, NULL) == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_root_set(h, "inner", r, "d") == 0);
    CHECK(mojim_tx_abort() == 0 && mojim_root_set(h, "new", r, "e") == 0);
    CHECK(pthread_create(&t, NULL, other_roots, NULL) == 0 && pthread_join(t, NULL) == 0);
    CHECK((commit ? mojim_tx_commit() : mojim_tx_abort()) == 0);
    CHECK((mojim_root(h, "gone", "a") == r) == !commit && mojim_root(h, "mine", "c") == r);
    CHECK((mojim_root(h, "new", "e") == r) == commit && !mojim_root(h, "inner", "d"));
    /* Nothing is held any more. */
    CHECK(mojim_tx_begin() == 0 && mojim_root_set(h, "inner", NULL, NULL) == 0);
    CHECK(mojim_root_set(h, "mine", NULL, NULL) == 0 && mojim_tx_commit() == 0);
    CHECK(pthread_create(&t, NULL, takes_all, NULL) == 0 && pthread_join(t, NULL) == 0);
}

static int step;

static void *syncs_once(void *arg)
{
    (void)arg;
    CHECK(mojim_heap_sync(h) == 0);
    return NULL;
}

static void *is_cancelled(void *arg)
{
    (void)arg;
    CHECK(mojim_tx_begin() == 0 && mojim_tx_abort() == 0);
    __atomic_store_n(&step, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&step, __ATOMIC_ACQUIRE) < 2)
        sched_yield();
    CHECK(pthread_cancel(pthread_self()) == 0);
    CHECK(mojim_tx_begin() == 0);
    pthread_testcancel();
    return NULL;
}

/* Another thread syncs the heap, and waits for this one's transaction. Meanwhile this one's sync fails at
 * once (both waited for ever), and a thread that begins a transaction is cancelled while it waits (the next
 * sync waited for it for ever). */
static void waits(void)
{
    pthread_t cancelled, t;
    void *end;
    alarm(60);
    CHECK(pthread_create(&cancelled, NULL, is_cancelled, NULL) == 0);
    while (__atomic_load_n(&step, __ATOMIC_ACQUIRE) < 1)
        sched_yield();
    CHECK(mojim_tx_begin() == 0 && pthread_create(&t, NULL, syncs_once, NULL) == 0);
    for (int i = 0; i < 2000 && sched_yield() == 0; i++)
        CHECK(mojim_heap_sync(h) == -1 && errno == EINVAL);
    __atomic_store_n(&step, 2, __ATOMIC_RELEASE);
    for (int i = 0; i < 2000; i++)
        sched_yield();
    CHECK(mojim_tx_abort() == 0 && pthread_join(t, NULL) == 0);
    CHECK(pthread_join(cancelled, &end) == 0 && end == PTHREAD_CANCELED);
    CHECK(mojim_heap_sync(h) == 0);
    alarm(0);
}

static void *takes_large(void *arg)
{
    while (!__atomic_load_n((int *)arg, __ATOMIC_RELAXED))
        CHECK(mojim_tx_begin() == 0 && mojim_malloc(h, 100000) && mojim_tx_abort() == 0);
    return NULL;
}

/* A forked child aborts what its parent had open, whichever lock another thread held. */
static void children(void)
{
    int stop = 0, status;
    pthread_t t;
    CHECK(pthread_create(&t, NULL, takes_large, &stop) == 0);
    for (int i = 0; i < 30; i++) {
        CHECK(mojim_tx_begin() == 0 && mojim_malloc(h, 100000));
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            _exit(mojim_tx_abort() != 0);
        }
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
        CHECK(mojim_tx_abort() == 0);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(t, NULL) == 0);
}

/* Outside of a transaction the zeros of a block are committed with it. */
static void zeros(mojim_heap_t *exact)
{
    void *former = NULL;
    CHECK(mojim_tx_begin() == 0 && mojim_pmalloc(exact, 64, &former) == 0);
    memset(former, 'x', 64);
    CHECK(mojim_tx_commit() == 0 && mojim_free(former) == 0);
    CHECK(mojim_calloc(exact, 4, 16) == former);
    CHECK(mojim_root_set(exact, "zeros", former, NULL) == 0);
}

static void are_zeros(mojim_heap_t *exact)
{
    char *p = mojim_root(exact, "zeros", NULL);
    CHECK(p);
    for (int i = 0; i < 64; i++)
        CHECK(p[i] == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    mojim_t *m = mojim_attach(argv[1], "a", "v");
    mojim_heap_t *exact;
    CHECK(m && (h = mojim_heap_open(m, "heap", 0, NULL, 0)));
    CHECK((exact = mojim_heap_open(m, "exact", 0, NULL, MOJIM_HEAP_EXACT)));
    if (strcmp(argv[2], "first") == 0) {
        CHECK(mojim_tx_begin() == 0);
        CHECK((r = mojim_calloc(h, 1, sizeof *r)) && mojim_root_set(h, "r", r, "root") == 0);
        CHECK(mojim_tx_commit() == 0);
        aborted();
        committed();
        roots(0);
        roots(1);
        waits();
        children();
        zeros(exact);
        syncs();
        _exit(0);
    }
    CHECK((r = mojim_root(h, "r", "root")));
    CHECK(strcmp(r->kept, "kept") == 0 && r->freed == NULL && strcmp(r->grown, "grown") == 0);
    CHECK(mojim_usable_size(r->grown) >= 5000 && mojim_usable_size(r->own[0]) >= 64);
    CHECK(r->own[1] == NULL);
    CHECK(!mojim_root(h, "gone", "a") && mojim_root(h, "new", "e") == r);
    CHECK(r->halves[0] > 0 && r->halves[0] == r->halves[1]);
    are_zeros(exact);
    return mojim_detach(m) != 0;
}
