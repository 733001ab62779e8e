/* A block whose runtime is not libmojim_itm: linked with libitm, as gcc does by itself. `foreign CONFIG` */
#include <errno.h>
#include <mojim_tx.h>
#include <stdio.h>
#include <string.h>

static long stored; /* gcc leaves out a block that stores nothing */

int main(int argc, char **argv)
{
    mojim_t *m = argc == 2 ? mojim_attach(argv[1], "a", "v") : NULL;
    mojim_heap_t *h = m ? mojim_heap_open(m, "heap", 0, NULL, 0) : NULL;
    if (!h)
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    void *p = NULL;
    int done = 0;
    __transaction_atomic { stored++; done = mojim_pmalloc(h, 100, &p); }
    if (done != -1 || errno != EOPNOTSUPP || p || !strstr(mojim_last_error(), "-lmojim_itm"))
        return fprintf(stderr, "in a block: %d %d %s\n", done, errno, mojim_last_error()), 1;
    if (mojim_pmalloc(h, 100, &p) != 0)
        return fprintf(stderr, "outside: %s\n", mojim_last_error()), 1;
    __transaction_atomic { stored++; done = mojim_pfree(&p); }
    if (done != -1 || !p || mojim_pfree(&p) != 0)
        return fprintf(stderr, "free: %s\n", mojim_last_error()), 1;
    return mojim_detach(m) != 0;
}
