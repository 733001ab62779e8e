/* Transactions of libpmemobj, each ended before its number is printed; with "check" as the second word,
 * how many are there. */
#include <libpmemobj.h>
#include <stdio.h>
#include <string.h>

struct root {
    unsigned n;
    unsigned last[1024];
};

int main(int argc, char **argv)
{
    PMEMobjpool *pool = pmemobj_open(argv[1], "w");
    if (!pool && argc < 3)
        pool = pmemobj_create(argv[1], "w", PMEMOBJ_MIN_POOL, 0644);
    if (!pool)
        return fprintf(stderr, "%s\n", pmemobj_errormsg()), 1;
    PMEMoid oid = pmemobj_root(pool, sizeof(struct root));
    struct root *root = pmemobj_direct(oid);
    if (argc > 2) {
        for (unsigned k = root->n > 1024 ? root->n - 1023 : 1; k <= root->n; k++)
            if (root->last[k % 1024] != k)
                return fprintf(stderr, "%u is not as it was put\n", k), 1;
        printf("%u\n", root->n);
        return 0;
    }
    for (unsigned n = root->n + 1;; n++) {
        TX_BEGIN(pool) {
            pmemobj_tx_add_range_direct(&root->n, sizeof root->n);
            pmemobj_tx_add_range_direct(&root->last[n % 1024], sizeof n);
            root->n = n;
            root->last[n % 1024] = n;
        } TX_ONABORT {
            return fprintf(stderr, "%s\n", pmemobj_errormsg()), 1;
        } TX_END
        printf("%u\n", n);
        fflush(stdout);
    }
}
