/* Shadow updates: a page of a heap is never changed; a new one is allocated, filled and
 * committed, and then one store of eight bytes makes it the current one.
 *
 * ./shadow CONFIGURATION NODE ROUNDS: checks the page that it finds, and replaces it that many
 * times. Each step may be the last one before a crash: `next` and `old` tell the next run which
 * blocks are to be freed. */
#include <mojim_persistent.h>
#include <mojim_tx.h>
#include <stdio.h>
#include <stdlib.h>

struct page {
    uint64_t version;
    uint64_t words[60];
};

static MOJIM_PERSISTENT struct page *current, *next, *old;

static int set(struct page **place, struct page *to)
{
    return mojim_store8((uint64_t *)(void *)place, (uint64_t)(uintptr_t)to);
}

static int release(struct page **place)
{
    return *place ? mojim_pfree((void **)place) : 0;
}

/* Ends an update that a crash cut off. */
static int recover(void)
{
    if (next == current ? set(&next, NULL) != 0 : release(&next) != 0)
        return -1;
    return old == current ? set(&old, NULL) : release(&old);
}

static void fill(struct page *p, uint64_t version)
{
    p->version = version;
    for (int i = 0; i < 60; i++)
        p->words[i] = version * (uint64_t)(i + 7);
}

static int update(mojim_heap_t *heap)
{
    uint64_t version = current ? current->version + 1 : 1;
    if (mojim_pmalloc(heap, sizeof *next, (void **)&next) != 0) /* allocate */
        return -1;
    fill(next, version);
#ifndef NOT_FILLED
    if (mojim_msync(next, sizeof *next, MS_SYNC) != 0) /* fill */
        return -1;
#endif
    if (set(&old, current) != 0 || set(&current, next) != 0) /* swing */
        return -1;
    return set(&next, NULL) != 0 ? -1 : release(&old);
}

static int failed(void)
{
    fprintf(stderr, "%s\n", mojim_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return fprintf(stderr, "usage: shadow CONFIGURATION NODE ROUNDS\n"), 2;
    mojim_t *m = mojim_attach(argv[1], argv[2], NULL);
    mojim_heap_t *heap = m ? mojim_heap_open(m, "pages", 1 << 30, NULL, 0) : NULL;
    if (!heap || mojim_variables(m, "shadow") != 0 || recover() != 0)
        return failed();
    uint64_t version = current ? current->version : 0;
    struct page must;
    fill(&must, version);
    for (int i = 0; current && i < 60; i++)
        if (current->words[i] != must.words[i])
            return printf("torn page %llu\n", (unsigned long long)version), 1;
    printf("found %llu\n", (unsigned long long)version);
    fflush(stdout);
    for (uint64_t end = version + strtoull(argv[3], NULL, 10); version < end;) {
        if (update(heap) != 0)
            return failed();
        version = current->version;
        printf("updated %llu\n", (unsigned long long)version);
        fflush(stdout);
    }
    return mojim_detach(m) != 0 ? failed() : 0;
}
