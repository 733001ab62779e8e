/* Put before examples/transfers.c by its test: looks at every state that is
 * committed, and steps in where a transfer is half done.
 *
 * With WITHOUT_LOCK nobody takes the lock, and a sync point is made when a transfer
 * is half done. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <mojim.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* DATA_FILE comes from the compiler's command line. */
static const char *const data_file = DATA_FILE;

static void look(mojim_t *m)
{
    static char bytes[1 << 20];
    int fd = open(data_file, O_RDONLY);
    ssize_t n;
    long sum = 0;
    if (mojim_settle(m) != 0 || fd < 0 || (n = read(fd, bytes, sizeof bytes)) <= 0) {
        fprintf(stderr, "%s: %s\n", data_file, mojim_last_error());
        exit(3);
    }
    close(fd);
    for (ssize_t at = 4096; at < n; at += 4096)
        sum += *(long *)(void *)(bytes + at);
    printf("is %lu sum %ld\n", *(unsigned long *)(void *)bytes, sum);
}

static mojim_t *attached;
static mojim_t *noted_attach(const char *config, const char *node, const char *volume)
{
    return attached = mojim_attach(config, node, volume);
}
#define mojim_attach noted_attach

#ifdef WITHOUT_LOCK
static int no_lock(pthread_rwlock_t *lock)
{
    (void)lock;
    return 0;
}
#define pthread_rwlock_rdlock no_lock
#define pthread_rwlock_wrlock no_lock
#define pthread_rwlock_unlock no_lock

/* Sync points made: the first is of what the accounts begin with, before there are
 * threads, and the second waits until a transfer is half done, which waits for it. */
static atomic_int made;
static atomic_bool half_done;
static void between(void)
{
    atomic_store(&half_done, 1);
    while (atomic_load(&made) < 2)
        sched_yield();
}
static void before(void)
{
    while (atomic_load(&made) == 1 && !atomic_load(&half_done))
        sched_yield();
}
static void after(void) { atomic_fetch_add(&made, 1); }
#else
static void between(void) { sched_yield(); }
static void before(void) {}
static void after(void) {}
#endif

static int looking_msync(void *addr, size_t len, int flags)
{
    before();
    int done = mojim_msync(addr, len, flags);
    if (done == 0)
        look(attached);
    after();
    return done;
}
#define mojim_msync looking_msync

/* Between the two halves of a transfer. */
static long sub(atomic_long *of, long n)
{
    long before = __atomic_fetch_sub((long *)of, n, __ATOMIC_SEQ_CST);
    between();
    return before;
}
#undef atomic_fetch_sub
#define atomic_fetch_sub sub
