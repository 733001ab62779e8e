/* RocksDB, each put synced before its number is printed; with "check" as the second word, how many are
 * there, the first of them without a gap. */
#include <rocksdb/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(char *error)
{
    if (error) {
        fprintf(stderr, "%s\n", error);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    char *error = NULL, key[16], value[2000];
    rocksdb_options_t *options = rocksdb_options_create();
    rocksdb_options_set_create_if_missing(options, 1);
    rocksdb_options_set_write_buffer_size(options, 1 << 18);
    rocksdb_t *db = rocksdb_open(options, argv[1], &error);
    must(error);
    memset(value, 'x', sizeof value);
    if (argc > 2) {
        rocksdb_iterator_t *i = rocksdb_create_iterator(db, rocksdb_readoptions_create());
        unsigned n = 0;
        for (rocksdb_iter_seek_to_first(i); rocksdb_iter_valid(i); rocksdb_iter_next(i)) {
            size_t length, bytes;
            const char *k = rocksdb_iter_key(i, &length), *v = rocksdb_iter_value(i, &bytes);
            snprintf(key, sizeof key, "%08u", ++n);
            if (length != 8 || memcmp(k, key, 8) || bytes != n % 2000 || memcmp(v, value, bytes))
                return fprintf(stderr, "%u is not as it was put\n", n), 1;
        }
        rocksdb_iter_get_error(i, &error);
        must(error);
        printf("%u\n", n);
        return 0;
    }
    rocksdb_writeoptions_t *synced = rocksdb_writeoptions_create();
    rocksdb_writeoptions_set_sync(synced, 1);
    for (unsigned n = 1;; n++) {
        snprintf(key, sizeof key, "%08u", n);
        rocksdb_put(db, synced, key, 8, value, n % 2000, &error);
        must(error);
        printf("%u\n", n);
        fflush(stdout);
    }
}
