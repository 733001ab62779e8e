/* mimalloc's names for the calls of a persistent heap: its own tests, test-api.c and test-stress.c, are
 * compiled with this header in place of mimalloc's, and linked with operators.cpp.
 *
 * What a persistent heap does not have: mi_malloc_aligned_at fails where the offset is not 0, and
 * mi_heap_new makes no heap: it is a list of blocks of the one heap, which mi_heap_destroy frees.
 * mi_collect commits. A free of what is no block, or was freed, ends the process. */
#ifndef SUITES_MIMALLOC_H
#define SUITES_MIMALLOC_H

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __cplusplus
#include <mojim.hpp>
#define mi_stl_allocator mojim::allocator
extern "C"
#else
#include <mojim_heap.h>
#endif
mojim_heap_t *suites_heap(void);

#define mi_option_disable(option) ((void)0)
#define mi_stats_reset() ((void)0)
#define mi_stats_print(out) ((void)0)

static inline void *mi_malloc(size_t n) { return mojim_malloc(suites_heap(), n); }
static inline void *mi_calloc(size_t n, size_t size) { return mojim_calloc(suites_heap(), n, size); }
static inline void *mi_realloc(void *p, size_t n) { return mojim_realloc(suites_heap(), p, n); }
static inline size_t mi_usable_size(const void *p) { return mojim_usable_size(p); }

static inline void mi_failed(void)
{
    fprintf(stderr, "mimalloc.h: %s\n", mojim_last_error());
    abort();
}

static inline void mi_free(void *p)
{
    if (mojim_free(p) != 0)
        mi_failed();
}

static inline void mi_collect(int force)
{
    if (force && mojim_heap_sync(suites_heap()) != 0)
        mi_failed();
}

static inline void *mi_reallocarray(void *p, size_t n, size_t size)
{
    return size && n > SIZE_MAX / size ? NULL : mi_realloc(p, n * size);
}

static inline void *mi_malloc_aligned(size_t n, size_t align)
{
    return mojim_aligned_alloc(suites_heap(), align, n);
}

static inline void *mi_memalign(size_t align, size_t n) { return mi_malloc_aligned(n, align); }

static inline void *mi_zalloc_aligned(size_t n, size_t align)
{
    void *p = mi_malloc_aligned(n, align);
    return p ? memset(p, 0, n) : p;
}

static inline void *mi_malloc_aligned_at(size_t n, size_t align, size_t offset)
{
    return offset ? NULL : mi_malloc_aligned(n, align);
}

static inline int mi_posix_memalign(void **p, size_t align, size_t n)
{
    if (align % sizeof(void *) != 0)
        return EINVAL;
    void *got = mi_malloc_aligned(n, align);
    if (!got)
        return errno;
    *p = got;
    return 0;
}

static inline char *mi_realpath(const char *name, char *to)
{
    char path[PATH_MAX];
    if (!realpath(name, path))
        return NULL;
    to = to ? to : (char *)mi_malloc(strlen(path) + 1);
    return to ? strcpy(to, path) : to;
}

typedef struct {
    void *blocks[8];
    int n;
} mi_heap_t;

static inline mi_heap_t *mi_heap_new(void) { return (mi_heap_t *)mojim_calloc(suites_heap(), 1, sizeof(mi_heap_t)); }

static inline void *mi_heap_malloc_aligned(mi_heap_t *h, size_t n, size_t align)
{
    return h->n == 8 ? NULL : (h->blocks[h->n++] = mi_malloc_aligned(n, align));
}

#define mi_heap_malloc_tp(h, type) ((type *)mi_heap_malloc_aligned(h, sizeof(type), 16))

static inline int mi_heap_contains_block(mi_heap_t *h, void *p)
{
    for (int i = 0; i < h->n; i++)
        if (h->blocks[i] == p)
            return p && mojim_heap_of(p) == suites_heap();
    return 0;
}

static inline void mi_heap_delete(mi_heap_t *h) { mi_free(h); }

static inline void mi_heap_destroy(mi_heap_t *h)
{
    while (h->n > 0)
        mi_free(h->blocks[--h->n]);
    mi_free(h);
}

#endif
