/* A list in a heap, whose nodes have all sizes. `list CONFIG NODE`: opens it, checks all of it,
 * prints "open ROUND", then changes and syncs it for ever; prints the number of each round
 * that is committed. `list CONFIG NODE end`: checks only, and prints the nodes too. */
#include <mojim_heap.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct node {
    struct node *next;
    size_t len;
    unsigned char with, bytes[];
};

struct list {
    struct node *first;
    unsigned long round, count, sum;
};

static int fail(const char *what)
{
    printf("%s: %s\n", what, mojim_last_error());
    return 1;
}

static int check(mojim_heap_t *h, const struct list *l)
{
    unsigned long count = 0, sum = 0;
    for (struct node *n = l->first; n; n = n->next, count++) {
        if (mojim_heap_of(n) != h || mojim_usable_size(n) < sizeof *n + n->len)
            return printf("node %lu is no block\n", count), 1;
        for (size_t i = 0; i < n->len; i++)
            if (n->bytes[i] != n->with)
                return printf("node %lu is torn\n", count), 1;
        sum += n->len;
    }
    if (count != l->count || sum != l->sum)
        return printf("%lu nodes of %lu, %lu bytes of %lu\n", count, l->count, sum, l->sum), 1;
    return 0;
}

static int step(mojim_heap_t *h, struct list *l)
{
    if (rand() % 5 < 3 || !l->first) {
        size_t len = rand() % 50 ? rand() % 600 : rand() % 90000;
        struct node *n = mojim_malloc(h, sizeof *n + len);
        if (!n)
            return fail("malloc");
        n->len = len;
        n->with = rand();
        memset(n->bytes, n->with, len);
        n->next = l->first;
        l->first = n;
        l->count++;
        l->sum += len;
        return 0;
    }
    struct node **at = &l->first;
    for (int k = rand() % 8; k && (*at)->next; k--)
        at = &(*at)->next;
    struct node *n = *at;
    *at = n->next;
    l->count--;
    l->sum -= n->len;
    return mojim_free(n) ? fail("free") : 0;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    mojim_t *m = argc > 2 ? mojim_attach(argv[1], argv[2], NULL) : NULL;
    mojim_heap_t *h = m ? mojim_heap_open(m, "list", 1 << 30, NULL, 0) : NULL;
    if (!h)
        return fail("open");
    struct list *l = mojim_root(h, "list", "struct list");
    if (!l) {
        l = mojim_calloc(h, 1, sizeof *l);
        if (!l || mojim_root_set(h, "list", l, "struct list") || mojim_heap_sync(h))
            return fail("begin");
    }
    if (check(h, l))
        return 1;
    printf("open %lu\n", l->round);
    if (argc > 3) {
        printf("nodes %lu\n", l->count);
        return mojim_detach(m) ? fail("detach") : 0;
    }
    srand(l->round + 1);
    for (;;) {
        for (int k = rand() % 40; k; k--)
            if (step(h, l))
                return 1;
        l->round++;
        if (mojim_heap_sync(h))
            return fail("sync");
        printf("%lu\n", l->round);
    }
}
