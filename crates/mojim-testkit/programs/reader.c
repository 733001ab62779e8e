/* A program that reads, and knows nothing of Mojim; with -DAPI one that uses
 * its C interface.
 *
 *     reader watch F G       looks at the counters of both files in a loop without
 *                            a call; prints "seen N" after each 200 states, and
 *                            "mixed ..." if what it sees was never committed
 *     reader refused F NEW DIR tries to write, in every way
 *     reader api CONFIG NODE the same as watch, through mojim.h (-DAPI)
 *
 * Each page of 4,096 bytes has a counter (8 bytes) at its beginning. A sync
 * point changes all of them, in both files, to the next number.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef API
#include <mojim_heap.h>
#endif

#define PAGE 4096
#define CHECK(c)                                                               \
    do {                                                                       \
        if (!(c)) {                                                            \
            printf("line %d: %s: %s\n", __LINE__, #c, strerror(errno));        \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

struct file {
    const volatile char *base;
    size_t pages;
};

static uint64_t counter(struct file f, size_t page)
{
    return *(const volatile uint64_t *)(f.base + page * PAGE);
}

/* The counters never go back. Where the first is the same before and after all
 * others were read, everything between was of one state. */
static int watch(struct file f, struct file g)
{
    uint64_t last = 0, known = 0, states = 0;
    for (;;) {
        uint64_t before = counter(f, 0), low = before, high = before, after, x;
        for (size_t i = 0; i < f.pages || i < g.pages; i++) {
            if (i < g.pages) {
                x = counter(g, g.pages - 1 - i);
                low = x < low ? x : low;
                high = x > high ? x : high;
            }
            if (i < f.pages) {
                x = counter(f, i);
                low = x < low ? x : low;
                high = x > high ? x : high;
            }
        }
        after = counter(f, 0);
        if (before < last || low < before || high > after) {
            printf("mixed: %ju to %ju, while the first was %ju, %ju, %ju\n",
                   (uintmax_t)low, (uintmax_t)high, (uintmax_t)last,
                   (uintmax_t)before, (uintmax_t)after);
            return 1;
        }
        last = after;
        if (before != after || before == known)
            continue;
        known = before;
        if (++states % 200 == 0) {
            printf("seen %ju at %ju\n", (uintmax_t)states, (uintmax_t)after);
            fflush(stdout);
        }
    }
}

static struct file map(const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    CHECK(fstat(fd, &st) == 0 && st.st_size >= PAGE);
    void *p = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(p != MAP_FAILED);
    CHECK(close(fd) == 0);
    return (struct file){p, st.st_size / PAGE};
}

static sigjmp_buf back;

static void on_signal(int signal)
{
    siglongjmp(back, signal);
}

static int refused(const char *path, const char *other, const char *directory)
{
    CHECK(open(path, O_RDWR) == -1 && errno == EROFS);
    CHECK(open(path, O_WRONLY) == -1 && errno == EROFS);
    CHECK(open(path, O_RDONLY | O_TRUNC) == -1 && errno == EROFS);
    CHECK(open(other, O_RDWR | O_CREAT, 0644) == -1 && errno == EROFS);
    CHECK(open(other, O_RDONLY) == -1 && errno == ENOENT);
    CHECK(truncate(path, 1) == -1 && errno == EROFS);
    CHECK(unlink(path) == -1 && errno == EROFS);
    CHECK(rename(path, other) == -1 && errno == EROFS);
    CHECK(fopen(path, "r") == NULL && errno == EOPNOTSUPP);
    CHECK(mkdir(other, 0755) == -1 && errno == EROFS);
    CHECK(mkdirat(AT_FDCWD, other, 0755) == -1 && errno == EROFS);
    CHECK(mkdir(path, 0755) == -1 && errno == EEXIST);
    CHECK(symlink(path, other) == -1 && errno == EROFS);
    CHECK(mkfifo(other, 0644) == -1 && errno == EROFS);
    CHECK(mknod(other, S_IFREG | 0644, 0) == -1 && errno == EROFS);
    CHECK(rmdir(other) == -1 && errno == ENOENT);
    CHECK(rmdir(directory) == -1 && errno == EROFS);
    CHECK(unlinkat(AT_FDCWD, directory, AT_REMOVEDIR) == -1 && errno == EROFS);
    int fd = open(path, O_RDONLY | O_CREAT, 0644);
    CHECK(fd >= 0);
    CHECK(write(fd, "x", 1) == -1 && errno == EBADF);
    CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EACCES);
    CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0) == MAP_FAILED && errno == EACCES);
    char *p = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(p != MAP_FAILED);
    uint64_t first, again;
    CHECK(pread(fd, &first, sizeof first, 0) == sizeof first && first > 0);
    memcpy(&again, p, sizeof again);
    CHECK(again >= first);
    CHECK(read(fd, &again, sizeof again) == sizeof again && again >= first);
    CHECK(lseek(fd, 0, SEEK_CUR) == sizeof again);
    CHECK(fsync(fd) == 0);
    CHECK(mprotect(p, PAGE, PROT_READ | PROT_WRITE) == -1 && errno == EOPNOTSUPP);
    CHECK(msync(p, PAGE, MS_SYNC) == -1 && errno == EROFS);
    CHECK(madvise(p, PAGE, MADV_DONTNEED) == 0);
    /* Zeros never. */
    CHECK(*(volatile uint64_t *)p >= again);
    struct sigaction action = {.sa_handler = on_signal};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    int got = sigsetjmp(back, 1);
    if (got == 0)
        *(volatile char *)p = 1;
    CHECK(got == SIGSEGV);
    CHECK(munmap(p, PAGE) == 0);
    CHECK(close(fd) == 0);
    puts("refused");
    return 0;
}

#ifdef API
/* Two readers of one node: the end of one leaves the other its heap. */
static void heaps(mojim_t *m, mojim_t *other)
{
    mojim_heap_t *one = mojim_heap_open(m, "one", 0, NULL, 0);
    mojim_heap_t *two = mojim_heap_open(other, "two", 0, NULL, 0);
    CHECK(one && two);
    char *first = mojim_root(one, "name", "char"), *second = mojim_root(two, "name", "char");
    CHECK(first && second && strcmp(first, "one") == 0 && strcmp(second, "two") == 0);
    CHECK(mojim_usable_size(first) == 0 && errno == EROFS);
    CHECK(mojim_free(first) == -1 && errno == EROFS);
    CHECK(mojim_detach(other) == 0);
    CHECK(!mojim_root(two, "name", "char") && errno == EINVAL);
    CHECK(mojim_root(one, "name", "char") == first && strcmp(first, "one") == 0);
    CHECK(mojim_heap_close(one) == 0);
}

static int by_interface(const char *config, const char *node)
{
    mojim_t *m = mojim_attach_reader(config, node, NULL);
    if (!m) {
        printf("%s\n", mojim_last_error());
        return 1;
    }
    mojim_t *other = mojim_attach_reader(config, node, NULL);
    CHECK(other);
    heaps(m, other);
    struct file f = {mojim_map(m, "f", 0, MOJIM_RDONLY), 0};
    struct file g = {mojim_map(m, "dir/g", 0, 0), 0};
    CHECK(f.base != MAP_FAILED && g.base != MAP_FAILED);
    f.pages = mojim_size(m, "f") / PAGE;
    g.pages = mojim_size(m, "dir/g") / PAGE;
    CHECK(f.pages > 1 && g.pages > 1);
    CHECK(mojim_following(m) == 0);
    CHECK(mojim_is_region((void *)f.base) == 1);
    CHECK(mojim_map(m, "new", PAGE, MOJIM_CREATE) == MAP_FAILED && errno == EROFS);
    CHECK(mojim_create(m, "new") == -1 && errno == EROFS);
    CHECK(mojim_truncate(m, "f", 0) == -1 && errno == EROFS);
    CHECK(mojim_copies(m, 1, NULL, 0) == -1 && errno == EROFS);
    CHECK(mojim_msync((void *)f.base, PAGE, MS_SYNC) == -1 && errno == EROFS);
    CHECK(mojim_size(m, "new") == -1 && errno == ENOENT);
    uint64_t first;
    CHECK(mojim_read(m, "f", &first, sizeof first, 0) == sizeof first && first > 0);
    /* What mojim_shown says twice was there between. */
    int64_t lsn = mojim_shown(m);
    CHECK(lsn > 0 && mojim_wait(m, lsn) == 0);
    for (int same = 0; same < 200;) {
        int64_t before = mojim_shown(m);
        uint64_t x = counter(f, f.pages - 1), y = counter(g, 0), z = counter(f, 0);
        int64_t after = mojim_shown(m);
        CHECK(before >= lsn && after >= before);
        lsn = after;
        if (before == after) {
            CHECK(x == y && y == z && z >= first);
            same++;
        }
    }
    void *part = mojim_map_at(m, "f", PAGE, 0, PAGE, NULL);
    CHECK(part != MAP_FAILED);
    CHECK(*(volatile uint64_t *)part >= first);
    CHECK(mojim_unmap(part, PAGE) == 0 && mojim_is_region(part) == 0);
    return watch(f, g);
}
#endif

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "watch") == 0)
        return watch(map(argv[2]), map(argv[3]));
    if (argc == 5 && strcmp(argv[1], "refused") == 0)
        return refused(argv[2], argv[3], argv[4]);
#ifdef API
    if (argc == 4 && strcmp(argv[1], "api") == 0)
        return by_interface(argv[2], argv[3]);
#endif
    return 2;
}
