/* The runtime of captured blocks, driven by its published interface: gcc refuses sanitizers together
 * with -fgnu-tm. `itm CONFIG`: threads with blocks that are nested, cancelled, and that allocate; then
 * each way to store. The functions are declared as the compiler calls them. */
#include <mojim_tx.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    fprintf(stderr, "line %d: %s (%s)\n", line, what, mojim_last_error());
    exit(1);
}

enum { RUN = 1, ABORTED = 16, USER = 1, OUTER = 16 };

uint32_t _ITM_beginTransaction(uint32_t properties, ...) __attribute__((returns_twice));
void _ITM_commitTransaction(void);
void _ITM_abortTransaction(int reason) __attribute__((noreturn));
int _ITM_inTransaction(void);
void *_ITM_malloc(size_t);
void *_ITM_calloc(size_t, size_t);
void _ITM_free(void *);
void _ITM_addUserCommitAction(void (*)(void *), uint64_t, void *);
void _ITM_addUserUndoAction(void (*)(void *), void *);
void _ITM_LB(const void *, size_t);
void *_ITM_memcpyRtWt(void *, const void *, size_t);
void *_ITM_memcpyRnWt(void *, const void *, size_t);
void *_ITM_memmoveRtWt(void *, const void *, size_t);
void *_ITM_memsetW(void *, int, size_t);
#define TYPE(name, type)                                                                           \
    type _ITM_R##name(const type *);                                                               \
    type _ITM_RfW##name(const type *);                                                             \
    void _ITM_W##name(type *, type);                                                               \
    void _ITM_WaR##name(type *, type);                                                             \
    void _ITM_WaW##name(type *, type);
TYPE(U1, uint8_t)
TYPE(U2, uint16_t)
TYPE(U4, uint32_t)
TYPE(U8, uint64_t)
TYPE(F, float)
TYPE(D, double)

/* What properties gcc gives to a block that may be cancelled. */
#define BEGIN() _ITM_beginTransaction(RUN | 0x20)

enum { THREADS = 3, ROUNDS = 200 };

/* What a thread changes: its own words, and blocks that only it has. */
struct own {
    uint64_t words[6];
    char text[40];
    void *block;
};

static struct own *own;
static mojim_heap_t *heap;

static void count(void *arg)
{
    ++*(int *)arg;
}

/* One block that is cancelled in the middle of an inner one; all that it did is undone. */
static void cancelled(struct own *o, int reason)
{
    struct own before = *o;
    volatile int undone = 0;
    if (!(BEGIN() & ABORTED)) {
        _ITM_WU8(&o->words[0], 99);
        _ITM_addUserUndoAction(count, (void *)&undone);
        _ITM_memsetW(o->text, 'x', sizeof o->text);
        char *p = _ITM_malloc(100);
        _ITM_memcpyRnWt(p, "local", 6);
        if (!(BEGIN() & ABORTED)) {
            _ITM_WU4((uint32_t *)&o->words[1], 5);
            _ITM_abortTransaction(reason);
        }
        CHECK(reason == USER && o->words[1] == before.words[1] && o->words[0] == 99);
        _ITM_abortTransaction(USER);
    }
    CHECK(memcmp(o, &before, sizeof before) == 0 && undone == 1 && mojim_tx_is_open() == 0);
}

/* One block that is committed, with an inner one that is, and one that is not. */
static void committed(struct own *o, unsigned i)
{
    uint64_t sum = o->words[4];
    BEGIN();
    uint64_t at = _ITM_RfWU8(&o->words[0]);
    _ITM_WaWU8(&o->words[0], at + 1);
    uint64_t other = _ITM_RU8(&o->words[1]);
    _ITM_WaRU8(&o->words[1], other + 2);
    _ITM_LB(&o->words[4], 8);
    o->words[4]++;
    CHECK(_ITM_inTransaction() != 0);
    if (!(BEGIN() & ABORTED)) {
        _ITM_WU2((uint16_t *)o->text, (uint16_t)i);
        _ITM_memcpyRtWt(o->text + 20, o->text, 20);
        _ITM_memmoveRtWt(o->text + 5, o->text + 3, 20);
        _ITM_commitTransaction();
    }
    if (!(BEGIN() & ABORTED)) {
        _ITM_WU8(&o->words[2], 77);
        _ITM_abortTransaction(USER);
    }
    char *p = _ITM_calloc(3, 20), *q = _ITM_malloc(33);
    CHECK(p && q && p[59] == 0);
    _ITM_free(p);
    q[32] = 1;
    _ITM_free(q);
    if (o->block)
        CHECK(mojim_pfree(&o->block) == 0);
    else
        CHECK(mojim_pmalloc(heap, 16 + i % 300, &o->block) == 0);
    if (o->block)
        memset(o->block, (int)i, 16 + i % 300);
    _ITM_commitTransaction();
    CHECK(o->words[0] == at + 1 && o->words[1] == other + 2 && o->words[4] == sum + 1);
    CHECK(o->words[2] == 0);
}

static void *thread(void *arg)
{
    struct own *o = arg;
    for (unsigned i = 0; i < ROUNDS; i++) {
        committed(o, i);
        if (i % 5 == 0)
            cancelled(o, i % 2 ? USER : OUTER);
        if (i % 7 == 0) {
            CHECK(mojim_tx_begin() == 0 && mojim_tx_add(o->text, sizeof o->text) == 0);
            memset(o->text, 'e', sizeof o->text);
            CHECK((i % 2 ? mojim_tx_abort() : mojim_tx_commit()) == 0);
        }
    }
    return NULL;
}

/* Every type, each by all of its stores, aligned and not. */
static void types(char *p)
{
    static int done;
    BEGIN();
#define EACH(name, type)                                                                           \
    for (size_t at = 0; at < 3; at++) {                                                            \
        type *t = (type *)(p + at * 16);                                                           \
        _ITM_W##name(t, (type)3);                                                                  \
        CHECK(_ITM_R##name(t) == (type)3);                                                         \
        _ITM_WaW##name(t, (type)4);                                                                \
        _ITM_WaR##name(t, (type)(_ITM_RfW##name(t) + 1));                                          \
        CHECK(*t == (type)5);                                                                      \
    }
    EACH(U1, uint8_t)
    EACH(U2, uint16_t)
    EACH(U4, uint32_t)
    EACH(U8, uint64_t)
    EACH(F, float)
    EACH(D, double)
    _ITM_addUserCommitAction(count, 1, &done);
    _ITM_commitTransaction();
    CHECK(done == 1);
    /* More than the log has room for at first. */
    BEGIN();
    _ITM_memsetW(p, 7, 60000);
    _ITM_commitTransaction();
    CHECK(p[59999] == 7);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    mojim_t *m = mojim_attach(argv[1], "a", "v");
    CHECK(m && (heap = mojim_heap_open(m, "itm", 0, NULL, 0)));
    CHECK(mojim_tx_begin() == 0 && (own = mojim_calloc(heap, THREADS, sizeof *own)));
    char *p = mojim_calloc(heap, 1, 60000);
    CHECK(p && mojim_root_set(heap, "own", own, NULL) == 0 && mojim_tx_commit() == 0);
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&t[i], NULL, thread, &own[i]) == 0);
    for (int i = 0; i < 20; i++)
        CHECK(mojim_heap_sync(heap) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(t[i], NULL) == 0 && own[i].words[0] == ROUNDS);
    types(p);
    CHECK(mojim_tx_failed() == 0 && mojim_detach(m) == 0);
    puts("well");
}
