/* Calls while the process gets no more memory, and on small stacks.
 *
 *     memory CONFIG limit N   RLIMIT_AS leaves N KiB of addresses
 *     memory CONFIG full N    RLIMIT_AS leaves none, and of what the C library has, N KiB are free
 *     memory CONFIG stack N   each call on a thread with N KiB of stack
 *
 * A call may fail with ENOMEM, and then works once there is memory again. */
#include <mojim.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Every other page is stored to: a sync point then lists LEN / STEP ranges. */
enum { LEN = 64 << 20, STEP = 8192, STACK = 1 << 20, ROUNDS = 2 };

static const char *config;
static mojim_t *m;
static char *at;
static int refused, done, round_;
static size_t kib;
static struct rlimit limit;
static sem_t may_call;

static void fail(const char *what)
{
    fprintf(stderr, "%s: errno %d: %s\n", what, errno, mojim_last_error());
    exit(1);
}

static void check(int ok, const char *what)
{
    if (ok)
        done++;
    else if (errno == ENOMEM)
        refused++;
    else
        fail(what);
}

static void store(void)
{
    round_++;
    for (size_t i = 0; i < LEN; i += STEP)
        at[i] = (char)round_;
}

static void calls(void)
{
    struct msync_input some[64];
    char name[32];
    store();
    check(mojim_msync(at, LEN, MS_SYNC) == 0, "msync");
    store();
    for (int i = 0; i < 64; i++)
        some[i] = (struct msync_input){at + i * (LEN / 64), LEN / 64};
    check(gmsync(some, 64, MS_MOJIM) == 0, "gmsync");
    at[9]++;
    check(mojim_msync(at, 16, MS_SYNC) == 0, "small msync");
    at[9]++;
    check(mojim_msync(at, LEN, MS_ASYNC) == 0, "async msync");
    check(mojim_fsync(m, "r") == 0, "fsync");
    snprintf(name, sizeof name, "f%d", round_);
    int is_new = mojim_create(m, name) >= 0;
    check(is_new, "create");
    if (is_new) {
        check(mojim_truncate(m, name, 5000) == 0, "truncate");
        void *p = mojim_map(m, name, 5000, 0);
        check(p != MAP_FAILED, "map");
        if (p != MAP_FAILED)
            check(mojim_unmap(p, 5000) == 0, "unmap");
        check(mojim_rename(m, name, "other") == 0, "rename");
    }
}

/* The first call of a thread. */
static void *first(void *unused)
{
    sem_wait(&may_call);
    at[0]++;
    check(mojim_msync(at, LEN, MS_SYNC) == 0, "first msync");
    return unused;
}

/* Takes all memory that malloc gives, as a list. */
static void *take_all(void)
{
    void **all = NULL, **p;
    for (size_t size = 1 << 20; size >= 16; size /= 2)
        while ((p = malloc(size))) {
            *p = all;
            all = p;
        }
    return all;
}

static void free_all(void **all)
{
    while (all) {
        void **next = *all;
        free(all);
        all = next;
    }
}

static void limited(int full)
{
    char line[128];
    pthread_t thread;
    if (pthread_create(&thread, NULL, first, NULL))
        exit(2);
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || !fgets(line, sizeof line, f))
        exit(2);
    fclose(f);
    struct rlimit now = limit;
    now.rlim_cur = strtoul(line, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
    now.rlim_cur += full ? 0 : kib << 10;
    void *spare = full ? malloc(kib << 10) : NULL;
    setrlimit(RLIMIT_AS, &now);
    void *all = full ? take_all() : NULL;
    free(spare);
    sem_post(&may_call);
    pthread_join(thread, NULL);
    calls();
    mojim_t *second = mojim_attach(config, "a", "w");
    check(second != NULL, "attach");
    if (second)
        check(mojim_detach(second) == 0, "detach");
    setrlimit(RLIMIT_AS, &limit);
    free_all(all);
}

static void *attaching(void *unused)
{
    m = mojim_attach(config, "a", "v");
    if (!m)
        fail("attach");
    at = mojim_map(m, "r", LEN, MOJIM_CREATE);
    if (at == MAP_FAILED)
        fail("map");
    return unused;
}

static void *calling(void *unused)
{
    calls();
    return unused;
}

static void *detaching(void *unused)
{
    if (mojim_detach(m) != 0)
        fail("detach");
    return unused;
}

static void on_thread(void *(*f)(void *), size_t stack)
{
    pthread_attr_t a;
    pthread_t t;
    pthread_attr_init(&a);
    if (pthread_attr_setstacksize(&a, stack) || pthread_create(&t, &a, f, NULL))
        exit(2);
    pthread_join(t, NULL);
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    config = argv[1];
    kib = strtoul(argv[3], NULL, 10);
    getrlimit(RLIMIT_AS, &limit);
    sem_init(&may_call, 0, 0);
    int on_stack = strcmp(argv[2], "stack") == 0;
    size_t stack = on_stack ? kib << 10 : (size_t)STACK;
    on_thread(attaching, stack);
    for (int i = 0; i < ROUNDS && !on_stack; i++)
        limited(strcmp(argv[2], "full") == 0);
    int before = refused;
    /* With memory, all works. */
    on_thread(calling, stack);
    if (refused != before)
        fail("memory is there again");
    on_thread(detaching, stack);
    on_thread(attaching, stack);
    for (size_t i = 0; i < LEN; i += STEP)
        if (at[i] != (char)round_) {
            fprintf(stderr, "byte %zu is %d, not %d\n", i, at[i], (char)round_);
            return 3;
        }
    on_thread(detaching, stack);
    printf("%s refused, %s done\n", refused ? "some" : "none", done ? "some" : "none");
    return 0;
}
