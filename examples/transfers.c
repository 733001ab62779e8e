/* Many threads and sync points: the reader-writer lock recipe (failure-atomic
 * msync, Section 3.3).
 *
 * Threads move money between accounts. Each holds the lock shared while it changes
 * data; who calls mojim_msync holds it exclusively, so that no change is half done
 * in what is committed: whenever the program is killed, the sum of all accounts is
 * what it was. (The threads do not wait for each other: for them the accounts are
 * atomic. Threads that change the same bytes need locks of their own beside.)
 *
 *     cc -pthread examples/transfers.c -Iinclude -Ltarget/release -lmojim -Wl,-rpath,$PWD/target/release -o transfers
 *     ./transfers mojim.toml a THREADS POINTS
 *
 * checks the sum, makes that many sync points while so many threads work, and
 * prints a line after each.
 */
#include <mojim.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define ACCOUNTS 64
#define OPENED_WITH 1000

struct bank {
    atomic_ulong points; /* sync points that were made */
    /* Each account in a page of its own: a transfer changes two pages. */
    struct {
        _Alignas(4096) atomic_long money;
    } account[ACCOUNTS];
};

static struct bank *bank;
static atomic_bool over;
static pthread_rwlock_t changes;

static void *clerk(void *number)
{
    unsigned seed = (unsigned)(size_t)number;
    while (!atomic_load(&over)) {
        long n = 1 + rand_r(&seed) % 100;
        int from = rand_r(&seed) % ACCOUNTS, to = rand_r(&seed) % ACCOUNTS;
        pthread_rwlock_rdlock(&changes);
        atomic_fetch_sub(&bank->account[from].money, n);
        atomic_fetch_add(&bank->account[to].money, n);
        pthread_rwlock_unlock(&changes);
    }
    return NULL;
}

static int commit(void)
{
    pthread_rwlock_wrlock(&changes);
    atomic_fetch_add(&bank->points, 1);
    int done = mojim_msync(bank, sizeof *bank, MS_SYNC);
    pthread_rwlock_unlock(&changes);
    return done;
}

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, mojim_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: %s CONFIG NODE THREADS POINTS\n", argv[0]);
        return 2;
    }
    int threads = atoi(argv[3]), points = atoi(argv[4]);
    mojim_t *m = mojim_attach(argv[1], argv[2], NULL);
    if (m == NULL)
        return fail("attach");
    /* MAP_ATOMIC: nothing is committed but by mojim_msync. */
    bank = mojim_map(m, "bank", sizeof *bank, MOJIM_CREATE | MAP_ATOMIC);
    if (bank == MAP_FAILED)
        return fail("map");
    /* The default lock of glibc lets readers in before a writer that waits. */
    pthread_rwlockattr_t kind;
    pthread_rwlockattr_init(&kind);
#ifdef __GLIBC__
    pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    pthread_rwlock_init(&changes, &kind);
    if (bank->points == 0) {
        for (int i = 0; i < ACCOUNTS; i++)
            atomic_store(&bank->account[i].money, OPENED_WITH);
        if (commit() != 0)
            return fail("msync");
    }
    long sum = 0;
    for (int i = 0; i < ACCOUNTS; i++)
        sum += bank->account[i].money;
    printf("found %lu sum %ld of %d\n", (unsigned long)bank->points, sum,
           ACCOUNTS * OPENED_WITH);
    fflush(stdout);
    if (sum != ACCOUNTS * OPENED_WITH)
        return 1;

    pthread_t *clerks = calloc((size_t)threads + 1, sizeof *clerks);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&clerks[i], NULL, clerk, (void *)(size_t)(i + 1)) != 0)
            return perror("a thread"), 1;
    for (int i = 0; i < points; i++) {
        if (commit() != 0)
            return fail("msync");
        printf("committed %lu\n", (unsigned long)bank->points);
        fflush(stdout);
    }
    atomic_store(&over, 1);
    for (int i = 0; i < threads; i++)
        pthread_join(clerks[i], NULL);
    if (mojim_detach(m) != 0)
        return fail("detach");
    return 0;
}
