/* The hash table of Mnemosyne's poster, in plain C: it keeps its entries from run to run.
 *
 *   gcc -fgnu-tm examples/hashtable.c -Iinclude -Ltarget/release -lmojim_itm -lmojim \
 *       -Wl,-rpath,$PWD/target/release -o hashtable
 *   ./hashtable mojim.toml a put colour blue; ./hashtable mojim.toml a get colour
 *
 * A kill at any moment leaves each update whole or not there. (The poster leaves out the type of
 * `hash` and the unlock.) */
#include <mojim_persistent.h>
#include <mojim_tx.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define N 1024

struct bucket {
    struct bucket *next;
    char key[32];
    char value[88];
};

MOJIM_PERSISTENT struct bucket **hash = NULL;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static unsigned slot_of(const char *key)
{
    unsigned h = 5381;
    while (*key)
        h = h * 33 + (unsigned char)*key++;
    return h % N;
}

static struct bucket *find(const char *key)
{
    struct bucket *b = hash[slot_of(key)];
    while (b && strcmp(b->key, key) != 0)
        b = b->next;
    return b;
}

/* strcpy has no form that a block may call. */
__attribute__((transaction_safe)) static void copy(char *to, const char *from, int n)
{
    int i = 0;
    for (; i < n - 1 && from[i]; i++)
        to[i] = from[i];
    to[i] = 0;
}

static int update_hash(const char *key, const char *value)
{
    int failed = 0;
    pthread_mutex_lock(&mutex); /* there is no concurrency control in a block */
    struct bucket *bucket = find(key);
    unsigned slot = slot_of(key);
    __transaction_atomic {
        if (!bucket) {
            failed = mojim_pmalloc(NULL, sizeof *bucket, (void **)&bucket) != 0;
            if (!failed) {
                copy(bucket->key, key, sizeof bucket->key);
                bucket->next = hash[slot];
                hash[slot] = bucket;
            }
        }
        if (!failed)
            copy(bucket->value, value, sizeof bucket->value);
    }
    pthread_mutex_unlock(&mutex);
    return failed ? -1 : 0;
}

static int fail(void)
{
    fprintf(stderr, "%s\n", mojim_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc < 5)
        return fprintf(stderr, "hashtable CONFIG NODE put KEY VALUE | get KEY\n"), 2;
    mojim_t *m = mojim_attach(argv[1], argv[2], NULL);
    /* Transactions alone change the heap. */
    if (!m || !mojim_heap_open(m, "buckets", 0, NULL, MOJIM_HEAP_EXACT))
        return fail();
    if (mojim_variables(m, "hash") != 0)
        return fail();
    if (!hash) {
        __transaction_atomic {
            if (mojim_pmalloc(NULL, N * sizeof *hash, (void **)&hash) != 0)
                __transaction_cancel;
            memset(hash, 0, N * sizeof *hash);
        }
        if (!hash)
            return fail();
    }
    if (strcmp(argv[3], "put") == 0 && argc == 6) {
        if (update_hash(argv[4], argv[5]) != 0)
            return fail();
    } else {
        struct bucket *b = find(argv[4]);
        printf("%s\n", b ? b->value : "(none)");
    }
    return mojim_detach(m) != 0;
}
