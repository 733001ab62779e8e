/* The hash table of Mnemosyne's poster (examples/hashtable.c, with values of any size) beside
 * Berkeley DB: compiled by `mojim bench tx --case table`.
 *
 *   table CONFIG NODE ROUNDS OPS DIRECTORY
 *
 * Both have the same keys, of which each operation puts one; every fourth one first removes
 * another. Berkeley DB keeps its files in DIRECTORY: a hash database, with a cache that holds all of it,
 * and each transaction durable when its commit returns. Blocks of OPS operations take turns. A line of
 * output: "put", bytes of a value, whose, and the median of a block, in nanoseconds. */
#define _GNU_SOURCE
#include "measure.h"
#include <db.h>
#include <mojim_tx.h>
#include <stdio.h>

#define N 1024
#define KEYS 2048
#define KEY 32
#define LARGEST 4096

struct bucket {
    struct bucket *next;
    char key[KEY];
    char value[];
};

static mojim_heap_t *heap;
static struct bucket **hash;
static char value[LARGEST];

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, mojim_last_error());
    exit(1);
}

static unsigned slot_of(const char *key)
{
    unsigned h = 5381;
    while (*key)
        h = h * 33 + (unsigned char)*key++;
    return h % N;
}

static struct bucket **find(const char *key)
{
    struct bucket **b = &hash[slot_of(key)];
    while (*b && strcmp((*b)->key, key) != 0)
        b = &(*b)->next;
    return b;
}

static void table_put(const char *key, size_t size)
{
    struct bucket **at = find(key), *bucket = *at;
    int failed = 0;
    __transaction_atomic {
        if (!bucket) {
            failed = mojim_pmalloc(heap, sizeof *bucket + size, (void **)&bucket) != 0;
            if (!failed) {
                memcpy(bucket->key, key, KEY);
                bucket->next = NULL;
                *at = bucket;
            }
        }
        if (!failed)
            memcpy(bucket->value, value, size);
    }
    if (failed)
        fail("mojim_pmalloc");
}

static void table_remove(const char *key)
{
    struct bucket **at = find(key);
    if (!*at)
        return;
    int failed;
    __transaction_atomic {
        void *gone = *at;
        *at = (*at)->next;
        failed = mojim_pfree(&gone) != 0;
    }
    if (failed)
        fail("mojim_pfree");
}

static DB_ENV *env;
static DB *db;

static void check(int done, const char *what)
{
    if (done != 0) {
        fprintf(stderr, "Berkeley DB: %s: %s\n", what, db_strerror(done));
        exit(1);
    }
}

static void db_open(const char *dir, size_t size)
{
    char name[32];
    DB_TXN *t;
    check(db_env_create(&env, 0), "environment");
    check(env->set_cachesize(env, 0, 64 << 20, 1), "cache");
    check(env->set_lg_bsize(env, 4 << 20), "log's buffer");
    check(env->set_lg_max(env, 16 << 20), "log's file");
    /* One thread: no locks are needed. The log's files have their length before they are written. */
    check(env->log_set_config(env, DB_LOG_ZERO, 1), "log");
    check(env->log_set_config(env, DB_LOG_DSYNC, 1), "log");
    int flags = DB_CREATE | DB_INIT_MPOOL | DB_INIT_LOG | DB_INIT_TXN | DB_PRIVATE;
    check(env->open(env, dir, flags, 0600), "environment");
    check(db_create(&db, env, 0), "database");
    snprintf(name, sizeof name, "values-%zu", size);
    check(env->txn_begin(env, NULL, &t, 0), "begin");
    check(db->open(db, t, name, NULL, DB_HASH, DB_CREATE, 0600), "open");
    check(t->commit(t, DB_TXN_SYNC), "commit");
}

static void db_close(void)
{
    check(db->close(db, 0), "close");
    check(env->close(env, 0), "close");
}

static void db_put(char *key, size_t size)
{
    DBT k = {.data = key, .size = KEY}, v = {.data = value, .size = (u_int32_t)size};
    DB_TXN *t;
    check(env->txn_begin(env, NULL, &t, 0), "begin");
    check(db->put(db, t, &k, &v, 0), "put");
    check(t->commit(t, DB_TXN_SYNC), "commit");
}

static void db_remove(char *key)
{
    DBT k = {.data = key, .size = KEY};
    DB_TXN *t;
    check(env->txn_begin(env, NULL, &t, 0), "begin");
    int done = db->del(db, t, &k, 0);
    if (done == DB_NOTFOUND) {
        check(t->abort(t), "abort");
        return;
    }
    check(done, "del");
    check(t->commit(t, DB_TXN_SYNC), "commit");
}

/* One block of operations; `x`: the state of its chance. */
__attribute__((noinline)) static double block(int of_db, uint64_t *x, size_t size, int ops)
{
    double *took = malloc((size_t)ops * sizeof *took);
    for (int i = 0; i < ops; i++) {
        char put[KEY] = {0}, gone[KEY] = {0};
        *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
        snprintf(put, KEY, "key %d", (int)(*x >> 20) & (KEYS - 1));
        snprintf(gone, KEY, "key %d", (int)(*x >> 40) & (KEYS - 1));
        memset(value, (int)*x, size);
        if (i % 4 == 3)
            of_db ? db_remove(gone) : table_remove(gone);
        double from = now();
        of_db ? db_put(put, size) : table_put(put, size);
        took[i] = now() - from;
    }
    return median(took, ops);
}

/* Both have the same: the benchmark compares like with like. */
static void compare(size_t size)
{
    for (int i = 0; i < KEYS; i++) {
        char key[KEY] = {0};
        snprintf(key, KEY, "key %d", i);
        struct bucket *b = *find(key);
        DBT k = {.data = key, .size = KEY}, v = {0};
        int done = db->get(db, NULL, &k, &v, 0);
        if (done != DB_NOTFOUND)
            check(done, "get");
        if ((b == NULL) != (done == DB_NOTFOUND) || (b && memcmp(b->value, v.data, size) != 0)) {
            fprintf(stderr, "the tables differ at key %d\n", i);
            exit(1);
        }
    }
}

static void measure(const char *dir, size_t size, int rounds, int ops)
{
    uint64_t x[2] = {88172645463325252u, 88172645463325252u};
    hash = NULL;
    if (mojim_pmalloc(heap, N * sizeof *hash, (void **)&hash) != 0)
        fail("mojim_pmalloc");
    __transaction_atomic { memset(hash, 0, N * sizeof *hash); }
    db_open(dir, size);
    /* The first round warms up. */
    for (int r = 0; r <= rounds; r++) {
        double took[2];
        for (int k = 0; k < 2; k++) {
            int of_db = (r + k) % 2;
            took[of_db] = block(of_db, &x[of_db], size, ops);
        }
        if (r > 0)
            printf("put %zu table %f\nput %zu Berkeley-DB %f\n", size, took[0], size, took[1]);
    }
    compare(size);
    db_close();
}

int main(int argc, char **argv)
{
    if (argc != 6)
        return 2;
    mojim_t *m = mojim_attach(argv[1], argv[2], "v");
    /* Transactions alone change it: pages need not be noted at their first store. */
    heap = m ? mojim_heap_open(m, "table", 0, NULL, MOJIM_HEAP_EXACT) : NULL;
    if (!heap)
        fail("open");
    if (atoi(argv[3]) > 1 && warm_log(m) != 0)
        fail("warm");
    for (size_t size = 64; size <= LARGEST; size *= 4)
        measure(argv[5], size, atoi(argv[3]), atoi(argv[4]));
    if (mojim_tx_failed() != 0)
        return fprintf(stderr, "a block was given up\n"), 1;
    if (mojim_detach(m) != 0)
        fail("detach");
    return 0;
}
