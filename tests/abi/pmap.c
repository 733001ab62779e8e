/* A list in a persistent region, and the errors of mojim_pmap: tests/abi/persistent.rs. */
#include <mojim_persistent.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <errno.h>
struct node { struct node *next; long value; };
struct list { struct node *first; long used; struct node nodes[100]; };
static char record[60000];
static const char *name(int failed)
{
    int e = failed ? errno : 0;
    return !failed ? "done" : e == EINVAL ? "EINVAL" : e == EADDRINUSE ? "EADDRINUSE" : e == EUCLEAN ? "EUCLEAN"
        : e == EBUSY ? "EBUSY" : mojim_last_error();
}
int main(int argc, char **argv)
{
    (void)argc;
    mojim_t *m = mojim_attach(argv[1], "a", NULL);
    struct list *l = m ? mojim_pmap(m, "list", sizeof *l) : MAP_FAILED;
    if (l == MAP_FAILED)
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    if (!strcmp(argv[2], "list")) {
        struct node *n = &l->nodes[l->used++];
        n->next = l->first;
        l->first = n;
        if (mojim_msync(l, sizeof *l, MS_SYNC) != 0)
            return 1;
        long length = 0;
        for (n = l->first; n; n = n->next)
            length++;
        printf("%p %ld\n", (void *)l, length);
        return mojim_punmap(l) != 0 || mojim_detach(m) != 0;
    }
    printf("%s ", name(mojim_punmap(l) == 0 && mojim_pmap(m, "list", 10) == MAP_FAILED));
    mmap(l, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    printf("%s ", name(mojim_pmap(m, "list", 0) == MAP_FAILED));
    munmap(l, 4096);
    char *other = mojim_map(m, "other", 8192, MOJIM_CREATE);
    other[5000] = 1;
    mojim_unmap(other, 8192);
    printf("%s ", name(mojim_pmap(m, "other", 8192) == MAP_FAILED));
    mojim_pmap(m, "list", 0);
    printf("%s ", name(mojim_pmap(m, "list", 0) == MAP_FAILED));
    printf("%s ", name(mojim_punmap((char *)l + 4096) != 0));
    printf("%s ", name(mojim_pmap(m, "none", 0) == MAP_FAILED));
    /* What dies, or fails, half-way leaves zeros, of which the next one makes what it asks for. */
    other = mojim_map(m, "half", 1 << 20, MOJIM_CREATE | MAP_ATOMIC);
    mojim_unmap(other, 1 << 20);
    printf("%s ", name(mojim_pmap(m, "half", 0) == MAP_FAILED));
    printf("%s ", name(mojim_pmap(m, "half", 4096) == MAP_FAILED));
    printf("%s ", name(mojim_pmap(m, "much", SIZE_MAX) == MAP_FAILED));
    printf("%s ", mojim_size(m, "much") < 0 ? "none" : "left");
    printf("%s ", name(!mojim_log_open(m, "log", 4096, 0)));
    printf("%s ", mojim_size(m, "log") < 0 ? "none" : "left");
    for (int more = 4096; more <= 1 << 20; more *= 256) {
        mojim_unmap(mojim_map(m, "log", more, MOJIM_CREATE | MAP_ATOMIC), more);
        mojim_log_t *log = mojim_log_open(m, "log", 1 << 16, MOJIM_LOG_CHECKSUM);
        printf("%s ", name(!log || mojim_log_append(log, record, 60000, NULL) != 0));
        printf("%s%c", mojim_log_append(log, record, 16384, NULL) && errno == ENOBUFS ? "full" : "more",
               more == 4096 ? ' ' : '\n');
        mojim_log_close(log);
        mojim_remove(m, "log");
    }
    return mojim_detach(m) != 0;
}
