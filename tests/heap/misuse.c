/* What a program does wrong with a heap has an errno and a text; nothing crashes. */
#include <errno.h>
#include <mojim_tx.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define REFUSED(call, failed, with)                                                        \
    do {                                                                                   \
        errno = 0;                                                                         \
        if ((call) != (failed) || errno != (with) || !*mojim_last_error()) {               \
            printf("%d: %s: errno %d, %s\n", __LINE__, #call, errno, mojim_last_error());  \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

/* Where the heap lies. */
#ifndef AT
#define AT 0x222200000000
#endif

#define DONE(call)                                                                         \
    do {                                                                                   \
        if (!(call)) {                                                                     \
            printf("%d: %s: errno %d, %s\n", __LINE__, #call, errno, mojim_last_error());  \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

/* The file and the memory of an open heap are its own: renamed, the heap grew into a file of the old name, and
 * all later commits were lost; MS_INVALIDATE had it hand one block out twice. */
static void is_its_own(mojim_t *m)
{
    mojim_heap_t *h;
    char *p, *base;
    DONE(h = mojim_heap_open(m, "own", 0, NULL, 0));
    DONE(p = mojim_malloc(h, 100));
    DONE(base = mojim_heap_base(h));
    REFUSED(mojim_rename(m, "own", "other"), -1, EBUSY);
    DONE(mojim_create(m, "file") == 1);
    REFUSED(mojim_rename(m, "file", "own"), -1, EBUSY);
    REFUSED(mojim_truncate(m, "own", 4096), -1, EBUSY);
    REFUSED(mojim_remove(m, "own"), -1, EBUSY);
    REFUSED(mojim_map(m, "own", 4096, 0), MAP_FAILED, EBUSY);
    REFUSED(mojim_map_at(m, "own", 48 << 20, 0, 16 << 20, NULL), MAP_FAILED, EBUSY);
    REFUSED(mojim_unmap(base, 16 << 20), -1, EINVAL);
    REFUSED(mojim_unmap(p, 1), -1, EINVAL);
    REFUSED(mojim_msync(base, 1 << 20, MS_INVALIDATE), -1, EOPNOTSUPP);
    REFUSED(mojim_map_at(m, "file", 4096, MOJIM_CREATE, 0, base + (200 << 20)), MAP_FAILED, EADDRINUSE);
    REFUSED(mojim_map_at(m, "file", 8192, MOJIM_CREATE, 0, base - 4096), MAP_FAILED, EADDRINUSE);
    for (int i = 0; i < 20; i++)
        DONE(mojim_malloc(h, 1000000));
    DONE(mojim_heap_sync(h) == 0);
    DONE(mojim_heap_close(h) == 0);
    DONE(mojim_rename(m, "own", "other") == 0);
    DONE(h = mojim_heap_open(m, "other", 0, NULL, 0));
    DONE(mojim_heap_close(h) == 0);
    DONE(mojim_remove(m, "other") == 0);
}

static void blocks(mojim_heap_t *h)
{
    char *p, *q;
    DONE(p = mojim_malloc(h, 100));
    DONE(mojim_usable_size(p) >= 100);
    REFUSED(mojim_free(p + 16), -1, EINVAL);
    REFUSED(mojim_free(p + 1), -1, EINVAL);
    REFUSED(mojim_free(&h), -1, EINVAL);
    REFUSED(mojim_usable_size(p + 8), 0, EINVAL);
    DONE(mojim_free(p) == 0);
    REFUSED(mojim_free(p), -1, EINVAL);
    REFUSED(mojim_usable_size(p), 0, EINVAL);
    DONE(mojim_free(NULL) == 0);
    DONE(p = mojim_malloc(h, 0));
    DONE(mojim_free(p) == 0);
    DONE(p = mojim_malloc(h, 1000000));
    memset(p, 7, 1000000);
    REFUSED(mojim_free(p + 16384), -1, EINVAL);
    DONE(p = mojim_realloc(h, p, 3000000));
    DONE(p[999999] == 7);
    DONE(p = mojim_realloc(h, p, 10));
    DONE(p[9] == 7);
    DONE(mojim_free(p) == 0);
    REFUSED(mojim_realloc(h, p, 5), NULL, EINVAL);
    REFUSED(mojim_malloc(h, SIZE_MAX), NULL, ENOMEM);
    REFUSED(mojim_malloc(h, SIZE_MAX / 2 + 1), NULL, ENOMEM);
    REFUSED(mojim_malloc(h, (size_t)1 << 40), NULL, ENOMEM);
    REFUSED(mojim_calloc(h, SIZE_MAX / 2, 3), NULL, ENOMEM);
    for (size_t align = 1; align <= 1 << 20; align *= 2) {
        DONE(p = mojim_aligned_alloc(h, align, 50));
        DONE((uintptr_t)p % align == 0);
        DONE(q = mojim_aligned_alloc(h, align, 50000));
        DONE((uintptr_t)q % align == 0);
        DONE(mojim_free(p) == 0 && mojim_free(q) == 0);
    }
    /* No bytes at a large alignment were a slab of no units: the heap could not be opened again. */
    DONE(p = mojim_aligned_alloc(h, 65536, 0));
    DONE((uintptr_t)p % 65536 == 0 && mojim_free(p) == 0);
    for (size_t align = 1; align <= 1 << 20; align *= 16) {
        REFUSED(mojim_aligned_alloc(h, align, SIZE_MAX), NULL, ENOMEM);
        REFUSED(mojim_aligned_alloc(h, align, SIZE_MAX - 9), NULL, ENOMEM);
        REFUSED(mojim_aligned_alloc(h, align, SIZE_MAX / 2 + 2), NULL, ENOMEM);
    }
    REFUSED(mojim_aligned_alloc(h, 0, 50), NULL, EINVAL);
    REFUSED(mojim_aligned_alloc(h, 3, 50), NULL, EINVAL);
    REFUSED(mojim_aligned_alloc(h, 48, 50), NULL, EINVAL);
    REFUSED(mojim_aligned_alloc(h, 1 << 21, 50), NULL, EINVAL);
}

static void roots(mojim_heap_t *h)
{
    char name[65], *p;
    memset(name, 'x', 64);
    name[64] = 0;
    DONE(p = mojim_malloc(h, 8));
    REFUSED(mojim_root(h, "none", NULL), NULL, ENOENT);
    REFUSED(mojim_root(h, NULL, NULL), NULL, EINVAL);
    REFUSED(mojim_root_set(h, "", p, NULL), -1, EINVAL);
    REFUSED(mojim_root_set(h, name, p, NULL), -1, EINVAL);
    REFUSED(mojim_root_set(h, "r", &p, NULL), -1, EINVAL);
    DONE(mojim_root_set(h, "r", p, "struct a") == 0);
    REFUSED(mojim_root(h, "r", "struct b"), NULL, EINVAL);
    DONE(strstr(mojim_last_error(), "struct a") && strstr(mojim_last_error(), "struct b"));
    DONE(mojim_root(h, "r", "struct a") == p);
    DONE(mojim_root_set(h, "r", NULL, NULL) == 0);
    REFUSED(mojim_root(h, "r", "struct a"), NULL, ENOENT);
    for (int i = 0; i < 128; i++) {
        snprintf(name, sizeof name, "root %d", i);
        DONE(mojim_root_set(h, name, p, NULL) == 0);
    }
    REFUSED(mojim_root_set(h, "one more", p, NULL), -1, EINVAL);
    DONE(mojim_free(p) == 0);
}

int main(int argc, char **argv)
{
    (void)argc;
    mojim_t *m;
    mojim_heap_t *h, *other;
    void *at = (void *)AT;
    DONE(m = mojim_attach(argv[1], "a", NULL));
    is_its_own(m);
    REFUSED(mojim_heap_open(NULL, "h", 0, NULL, 0), NULL, EINVAL);
    REFUSED(mojim_heap_open(m, NULL, 0, NULL, 0), NULL, EINVAL);
    REFUSED(mojim_heap_open(m, "h", 0, NULL, 64), NULL, EINVAL);
    REFUSED(mojim_heap_open(m, "h", 0, (void *)4096, 0), NULL, EINVAL);
    REFUSED(mojim_heap_open(m, "h", (size_t)1 << 47, NULL, 0), NULL, ENOMEM);
    /* Another program's file is not taken for a heap. */
    char *strange;
    DONE((strange = mojim_map(m, "other", 4096, MOJIM_CREATE)) != MAP_FAILED);
    REFUSED(mojim_heap_open(m, "other", 0, NULL, 0), NULL, EBUSY);
    strange[100] = 1;
    DONE(mojim_unmap(strange, 4096) == 0);
    REFUSED(mojim_heap_open(m, "other", 0, NULL, 0), NULL, EUCLEAN);
    DONE(h = mojim_heap_open(m, "h", 200 << 20, at, 0));
    DONE(mojim_heap_of(at) == h && mojim_heap_of(NULL) == h && mojim_heap_of(&h) == NULL);
    REFUSED(mojim_heap_open(m, "h", 0, NULL, 0), NULL, EBUSY);
    REFUSED(mojim_heap_open(m, "i", 200 << 20, at, 0), NULL, EADDRINUSE);
    blocks(h);
    roots(h);
    DONE(mojim_heap_sync(h) == 0);
    /* All of its capacity. */
    void *last = NULL, *p;
    while ((p = mojim_malloc(h, 10 << 20)))
        last = p;
    DONE(errno == ENOMEM && last);
    DONE(mojim_free(last) == 0);
    DONE(mojim_malloc(h, 9 << 20) == last);
    /* So that the thread has such blocks at hand. */
    void *small = mojim_malloc(h, 16);
    DONE(small && mojim_free(mojim_malloc(h, 16)) == 0);
    pid_t child = fork();
    if (child == 0) {
        REFUSED(mojim_heap_sync(h), -1, EOPNOTSUPP);
        REFUSED(mojim_malloc(h, 60000), NULL, EOPNOTSUPP);
        REFUSED(mojim_malloc(h, 16), NULL, EOPNOTSUPP);
        REFUSED(mojim_free(small), -1, EOPNOTSUPP);
        REFUSED(mojim_root_set(h, "child", small, NULL), -1, EOPNOTSUPP);
        /* Before a lock that a thread of the parent may have held. */
        REFUSED(mojim_usable_size(small), 0, EOPNOTSUPP);
        REFUSED(mojim_root(h, "root 5", NULL), NULL, EOPNOTSUPP);
        _exit(0);
    }
    int status;
    DONE(waitpid(child, &status, 0) == child && status == 0);
    DONE(mojim_heap_close(h) == 0);
    REFUSED(mojim_heap_close(h), -1, EINVAL);
    REFUSED(mojim_malloc(h, 8), NULL, EINVAL);
    REFUSED(mojim_heap_sync(h), -1, EINVAL);
    REFUSED(mojim_free(last), -1, EINVAL);
    /* The same addresses again; and those of a mapping of the program. */
    DONE(other = mojim_heap_open(m, "i", 200 << 20, at, 0));
    REFUSED(mojim_heap_open(m, "h", 0, NULL, 0), NULL, EADDRINUSE);
    DONE(mojim_heap_close(other) == 0);
    DONE(mmap((char *)at + (100 << 20), 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
              -1, 0) != MAP_FAILED);
    REFUSED(mojim_heap_open(m, "h", 0, NULL, 0), NULL, EADDRINUSE);
    DONE(munmap((char *)at + (100 << 20), 4096) == 0);
    DONE(h = mojim_heap_open(m, "h", 0, NULL, 0));
    DONE(mojim_root(h, "root 5", NULL));
    REFUSED(mojim_root(h, "r", NULL), NULL, ENOENT);
    /* A detach that is refused leaves the heap open. */
    DONE(mojim_tx_begin() == 0 && mojim_malloc(h, 64));
    REFUSED(mojim_detach(m), -1, EBUSY);
    DONE(mojim_tx_abort() == 0 && mojim_root(h, "root 5", NULL) && mojim_heap_sync(h) == 0);
    DONE(mojim_detach(m) == 0);
    REFUSED(mojim_heap_sync(h), -1, EINVAL);
    printf("all refused\n");
    return 0;
}
