/* A libmdbx database, each transaction synced (its default) before its number is printed; with "check" as
 * the second word, how many are there, the first of them without a gap. FLAGS: of mdbx_env_open. */
#include "mdbx.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(int error)
{
    if (error) {
        fprintf(stderr, "%s\n", mdbx_strerror(error));
        exit(1);
    }
}

static char key[16], value[2000];

/* What is put as `n`. Keys are in the order of the numbers. */
static void nth(unsigned n, MDBX_val *k, MDBX_val *v)
{
    snprintf(key, sizeof key, "%08u", n);
    memset(value, 'a' + n % 26, sizeof value);
    *k = (MDBX_val){key, 8};
    *v = (MDBX_val){value, n % sizeof value};
}

static int same(MDBX_val a, MDBX_val b)
{
    return a.iov_len == b.iov_len && memcmp(a.iov_base, b.iov_base, a.iov_len) == 0;
}

static int check(MDBX_env *env)
{
    MDBX_txn *txn;
    MDBX_dbi dbi;
    MDBX_cursor *cursor;
    MDBX_val k, v, put_k, put_v;
    unsigned n = 0;
    int error;
    must(mdbx_txn_begin(env, NULL, MDBX_TXN_RDONLY, &txn));
    must(mdbx_dbi_open(txn, NULL, 0, &dbi));
    must(mdbx_cursor_open(txn, dbi, &cursor));
    while ((error = mdbx_cursor_get(cursor, &k, &v, MDBX_NEXT)) == 0) {
        nth(++n, &put_k, &put_v);
        if (!same(k, put_k) || !same(v, put_v))
            return fprintf(stderr, "%u is not as it was put\n", n), 1;
    }
    if (error != MDBX_NOTFOUND)
        must(error);
    printf("%u\n", n);
    return 0;
}

int main(int argc, char **argv)
{
    MDBX_env *env;
    must(mdbx_env_create(&env));
    must(mdbx_env_set_geometry(env, -1, -1, 1 << 28, -1, -1, -1));
    must(mdbx_env_open(env, argv[1], MDBX_SYNC_DURABLE | FLAGS, 0644));
    if (argc > 2)
        return check(env);
    for (unsigned n = 1;; n++) {
        MDBX_txn *txn;
        MDBX_dbi dbi;
        MDBX_val k, v;
        nth(n, &k, &v);
        must(mdbx_txn_begin(env, NULL, 0, &txn));
        must(mdbx_dbi_open(txn, NULL, 0, &dbi));
        must(mdbx_put(txn, dbi, &k, &v, MDBX_NOOVERWRITE));
        must(mdbx_txn_commit(txn));
        printf("%u\n", n);
        fflush(stdout);
    }
}
