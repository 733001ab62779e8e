/* Programs that use one file past each other, in every way that a page cache knows.
 *
 *     foreign check FILE IMAGE SEED PROCESSES STEPS   each process makes so many steps; then IMAGE
 *                                                     has the bytes that FILE must have
 *     foreign spoil FILE IMAGE SEED PROCESSES STEPS   the same, and now and then a process puts old
 *                                                     bytes back: that must be found
 *     foreign rate FILE DEPTH MILLISECONDS            prints how many writes of 4 KiB a second libaio
 *                                                     makes past the page cache, DEPTH at a time
 *
 * The model. A file has PAGES pages, a page SECTORS sectors. Each word of a sector says which sector
 * it is, and the number of the write that wrote it. A write takes the lock of each of its pages, so
 * two writes of one page never overlap; before it begins, its number is noted as `begun` of each of
 * its sectors, and once it has returned as `done`. Reads take no lock. Numbers grow, so a read must
 * find in each word at least what was `done` when it began, and at most what was `begun` when it ended.
 * That holds on every file system whose page cache is coherent, whatever way the bytes went.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 32, SECTOR = 512, SECTORS = PAGE / SECTOR, WORDS = SECTOR / 8, RUN = 4, DEEPEST = 64 };

#define CHECK(c)                                                               \
    do {                                                                       \
        if (!(c)) {                                                            \
            printf("line %d: %s: %s\n", __LINE__, #c, strerror(errno));        \
            fflush(stdout);                                                    \
            _exit(2);                                                          \
        }                                                                      \
    } while (0)

/* What all processes share. */
struct model {
    atomic_uint lock[PAGES];
    _Atomic uint64_t begun[PAGES * SECTORS], done[PAGES * SECTORS];
    _Atomic uint64_t next;
};

/* One process. */
struct user {
    struct model *m;
    const char *path;
    int cached, direct, ring;
    unsigned char *map;
    aio_context_t aio;
    uint64_t random;
    struct { _Atomic unsigned *head, *tail, *mask; unsigned *array; struct io_uring_sqe *sqes; } sq;
    struct { _Atomic unsigned *head, *tail, *mask; struct io_uring_cqe *cqes; } cq;
};

enum way { CACHED, SYNCED, DIRECT, LIBAIO, LIBAIO_CACHED, URING, URING_CACHED, MAPPED, OPENED, WAYS };
static const char *const names[] = { "cached", "cached with RWF_DSYNC", "O_DIRECT", "libaio and O_DIRECT",
    "libaio", "io_uring and O_DIRECT", "io_uring", "a mapping", "a new open" };

static unsigned pick(struct user *u, unsigned n)
{
    u->random ^= u->random << 13;
    u->random ^= u->random >> 7;
    u->random ^= u->random << 17;
    return (unsigned)((u->random >> 11) % n);
}

static uint64_t word(size_t sector, uint64_t number)
{
    return (uint64_t)sector << 40 | number;
}

static void fill(unsigned char *to, size_t sector, size_t n, uint64_t number)
{
    for (size_t s = 0; s < n; s++)
        for (size_t i = 0; i < WORDS; i++)
            ((uint64_t *)to)[s * WORDS + i] = word(sector + s, number);
}

static void open_ring(struct user *u)
{
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    u->ring = (int)syscall(SYS_io_uring_setup, DEEPEST, &p);
    if (u->ring < 0)
        return; /* Not allowed here: that way is left out. */
    size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    int both = PROT_READ | PROT_WRITE, how = MAP_SHARED | MAP_POPULATE;
    char *s = mmap(NULL, sq, both, how, u->ring, IORING_OFF_SQ_RING);
    char *c = mmap(NULL, cq, both, how, u->ring, IORING_OFF_CQ_RING);
    u->sq.sqes = mmap(NULL, p.sq_entries * sizeof(struct io_uring_sqe), both, how, u->ring, IORING_OFF_SQES);
    CHECK(s != MAP_FAILED && c != MAP_FAILED && (void *)u->sq.sqes != MAP_FAILED);
    u->sq.head = (void *)(s + p.sq_off.head);
    u->sq.tail = (void *)(s + p.sq_off.tail);
    u->sq.mask = (void *)(s + p.sq_off.ring_mask);
    u->sq.array = (void *)(s + p.sq_off.array);
    u->cq.head = (void *)(c + p.cq_off.head);
    u->cq.tail = (void *)(c + p.cq_off.tail);
    u->cq.mask = (void *)(c + p.cq_off.ring_mask);
    u->cq.cqes = (void *)(c + p.cq_off.cqes);
}

/* `n` transfers of one page each, that go at once; each is whole, or the program ends. */
static void by_ring(struct user *u, int fd, int writes, unsigned char *at, off_t offset, size_t len)
{
    unsigned n = 0;
    for (size_t done = 0; done < len; n++) {
        size_t part = len - done < PAGE ? len - done : PAGE;
        unsigned slot = (*u->sq.tail + n) & *u->sq.mask;
        struct io_uring_sqe *e = &u->sq.sqes[slot];
        memset(e, 0, sizeof *e);
        e->opcode = writes ? IORING_OP_WRITE : IORING_OP_READ;
        e->fd = fd;
        e->addr = (uintptr_t)(at + done);
        e->len = (unsigned)part;
        e->off = (uint64_t)offset + done;
        e->user_data = part;
        u->sq.array[slot] = slot;
        done += part;
    }
    atomic_fetch_add(u->sq.tail, n);
    for (unsigned came = 0, sent = 0; came < n;) {
        long r = syscall(SYS_io_uring_enter, u->ring, n - sent, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        CHECK(r >= 0 || errno == EINTR);
        sent += r > 0 ? (unsigned)r : 0;
        for (; *u->cq.head != *u->cq.tail; came++) {
            struct io_uring_cqe *e = &u->cq.cqes[*u->cq.head & *u->cq.mask];
            errno = e->res < 0 ? -e->res : 0;
            CHECK(e->res == (int)e->user_data);
            atomic_fetch_add(u->cq.head, 1);
        }
    }
}

static void by_libaio(struct user *u, int fd, int writes, unsigned char *at, off_t offset, size_t len)
{
    struct iocb all[RUN], *those[RUN];
    struct io_event came[RUN];
    long n = 0;
    for (size_t done = 0; done < len; n++) {
        size_t part = len - done < PAGE ? len - done : PAGE;
        memset(&all[n], 0, sizeof all[n]);
        all[n].aio_data = part;
        all[n].aio_lio_opcode = writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        all[n].aio_fildes = (unsigned)fd;
        all[n].aio_buf = (uintptr_t)(at + done);
        all[n].aio_nbytes = part;
        all[n].aio_offset = offset + (off_t)done;
        those[n] = &all[n];
        done += part;
    }
    CHECK(syscall(SYS_io_submit, u->aio, n, those) == n);
    CHECK(syscall(SYS_io_getevents, u->aio, n, n, came, NULL) == n);
    for (long i = 0; i < n; i++) {
        errno = came[i].res < 0 ? (int)-came[i].res : 0;
        CHECK(came[i].res == (long long)came[i].data);
    }
}

static void transfer(struct user *u, enum way way, int writes, unsigned char *at, off_t offset, size_t len)
{
    struct iovec v = { at, len };
    int fd;
    if (u->ring < 0 && (way == URING || way == URING_CACHED))
        way = CACHED;
    switch (way) {
    case SYNCED:
        if (writes) {
            CHECK(pwritev2(u->cached, &v, 1, offset, RWF_DSYNC) == (ssize_t)len);
            break;
        } /* fall through */
    case CACHED:
    case DIRECT:
        fd = way == DIRECT ? u->direct : u->cached;
        CHECK((writes ? pwrite(fd, at, len, offset) : pread(fd, at, len, offset)) == (ssize_t)len);
        break;
    case LIBAIO:
    case LIBAIO_CACHED:
        by_libaio(u, way == LIBAIO ? u->direct : u->cached, writes, at, offset, len);
        break;
    case URING:
    case URING_CACHED:
        by_ring(u, way == URING ? u->direct : u->cached, writes, at, offset, len);
        break;
    case MAPPED:
        for (size_t i = 0; i < len / 8; i++) {
            volatile uint64_t *there = (volatile uint64_t *)(u->map + offset) + i, *here = (uint64_t *)at + i;
            if (writes)
                *there = *here;
            else
                *here = *there;
        }
        if (writes && pick(u, 2))
            CHECK(msync(u->map + offset / PAGE * PAGE, ((size_t)offset % PAGE + len + PAGE - 1) / PAGE * PAGE, MS_SYNC) == 0);
        break;
    default:
        fd = open(u->path, O_RDWR);
        CHECK(fd >= 0);
        CHECK((writes ? pwrite(fd, at, len, offset) : pread(fd, at, len, offset)) == (ssize_t)len);
        close(fd);
    }
}

static void one_write(struct user *u, unsigned char *buffer, int spoils)
{
    struct model *m = u->m;
    size_t page = pick(u, PAGES), pages = 0, wanted = 1 + pick(u, RUN);
    while (pages < wanted && page + pages < PAGES && !atomic_exchange(&m->lock[page + pages], 1))
        pages++;
    if (!pages)
        return;
    enum way way = pick(u, WAYS);
    size_t from = page * SECTORS, n = pages * SECTORS;
    if (pick(u, 3) == 0) { /* Not all of it. */
        size_t skip = pick(u, (unsigned)n);
        from += skip;
        n = 1 + pick(u, (unsigned)(n - skip));
    }
    uint64_t number = atomic_fetch_add(&m->next, 1);
    for (size_t s = from; s < from + n; s++)
        atomic_store(&m->begun[s], number);
    fill(buffer, from, n, number);
    transfer(u, way, 1, buffer, (off_t)(from * SECTOR), n * SECTOR);
    if (spoils && pick(u, 50) == 0) {
        fill(buffer, from, n, 0);
        transfer(u, MAPPED, 1, buffer, (off_t)(from * SECTOR), n * SECTOR);
    }
    for (size_t s = from; s < from + n; s++)
        atomic_store(&m->done[s], number);
    for (size_t p = page; p < page + pages; p++)
        atomic_store(&m->lock[p], 0);
}

static int one_read(struct user *u, unsigned char *buffer)
{
    struct model *m = u->m;
    uint64_t low[RUN * SECTORS];
    size_t page = pick(u, PAGES), pages = 1 + pick(u, RUN);
    pages = pages < PAGES - page ? pages : PAGES - page;
    size_t from = page * SECTORS, n = pages * SECTORS;
    enum way way = pick(u, WAYS);
    for (size_t s = 0; s < n; s++)
        low[s] = atomic_load(&m->done[from + s]);
    transfer(u, way, 0, buffer, (off_t)(from * SECTOR), n * SECTOR);
    for (size_t s = 0; s < n; s++) {
        uint64_t high = atomic_load(&m->begun[from + s]);
        for (size_t i = 0; i < WORDS; i++) {
            uint64_t w = ((uint64_t *)buffer)[s * WORDS + i], number = w & ((UINT64_C(1) << 40) - 1);
            if (w >> 40 == from + s && low[s] <= number && number <= high)
                continue;
            printf("stale: read by %s, sector %zu, word %zu: of sector %ju, write %ju; written were %ju to %ju\n",
                   names[way], from + s, i, (uintmax_t)(w >> 40), (uintmax_t)number, (uintmax_t)low[s], (uintmax_t)high);
            return 1;
        }
    }
    return 0;
}

static void start(struct user *u, struct model *m, const char *path, uint64_t seed)
{
    memset(u, 0, sizeof *u);
    u->m = m;
    u->path = path;
    u->random = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    u->cached = open(path, O_RDWR);
    u->direct = open(path, O_RDWR | O_DIRECT);
    CHECK(u->cached >= 0 && u->direct >= 0);
    u->map = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, u->cached, 0);
    CHECK(u->map != MAP_FAILED);
    CHECK(syscall(SYS_io_setup, DEEPEST, &u->aio) == 0);
    open_ring(u);
}

static int work(struct model *m, const char *path, uint64_t seed, long steps, int spoils)
{
    struct user u;
    start(&u, m, path, seed);
    unsigned char *buffer = aligned_alloc(PAGE, RUN * PAGE);
    for (long i = 0; i < steps; i++) {
        switch (pick(&u, 20)) {
        case 0:
            CHECK(fsync(u.cached) == 0);
            break;
        case 1:
            posix_fadvise(u.cached, 0, 0, POSIX_FADV_DONTNEED);
            break;
        case 2: case 3: case 4: case 5: case 6: case 7: case 8: case 9: case 10:
            one_write(&u, buffer, spoils);
            break;
        default:
            if (one_read(&u, buffer))
                return 1;
        }
    }
    return 0;
}

static int check(char **argv, int spoils)
{
    const char *path = argv[2], *image = argv[3];
    uint64_t seed = strtoull(argv[4], NULL, 10);
    int n = atoi(argv[5]), bad = 0, status;
    long steps = atol(argv[6]);
    struct model *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    m->next = 1;
    static unsigned char all[PAGES * PAGE];
    fill(all, 0, PAGES * SECTORS, 0);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && pwrite(fd, all, sizeof all, 0) == sizeof all);
    for (int i = 0; i < n; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            int found = work(m, path, seed + (uint64_t)i, steps, spoils);
            fflush(stdout);
            _exit(found);
        }
    }
    while (wait(&status) > 0)
        bad = status > bad ? status : bad;
    CHECK(fsync(fd) == 0);
    for (size_t s = 0; s < PAGES * SECTORS; s++)
        fill(all + s * SECTOR, s, 1, m->done[s]);
    int out = open(image, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(out >= 0 && write(out, all, sizeof all) == sizeof all);
    printf("%ju writes\n", (uintmax_t)m->next - 1);
    return bad ? WIFEXITED(bad) ? WEXITSTATUS(bad) : 3 : 0;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int rate(char **argv)
{
    int fd = open(argv[2], O_RDWR | O_CREAT | O_DIRECT, 0644), depth = atoi(argv[3]);
    aio_context_t aio = 0;
    CHECK(fd >= 0 && depth > 0 && depth <= DEEPEST && syscall(SYS_io_setup, DEEPEST, &aio) == 0);
    unsigned char *buffer = aligned_alloc(PAGE, PAGE);
    memset(buffer, 5, PAGE);
    struct iocb all[DEEPEST], *one;
    struct io_event came;
    double begin = seconds(), end = begin + atof(argv[4]) / 1000;
    long n = 0;
    for (int out = 0; seconds() < end || out > 0; n++) {
        for (; out < depth && seconds() < end; out++) {
            one = &all[(n + out) % DEEPEST];
            memset(one, 0, sizeof *one);
            one->aio_lio_opcode = IOCB_CMD_PWRITE;
            one->aio_fildes = (unsigned)fd;
            one->aio_buf = (uintptr_t)buffer;
            one->aio_nbytes = PAGE;
            one->aio_offset = (long long)(unsigned)rand() % 1024 * PAGE;
            CHECK(syscall(SYS_io_submit, aio, 1, &one) == 1);
        }
        CHECK(syscall(SYS_io_getevents, aio, 1, 1, &came, NULL) == 1 && came.res == PAGE);
        out--;
    }
    printf("%.0f a second\n", (double)n / (seconds() - begin));
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 7 && !strcmp(argv[1], "check"))
        return check(argv, 0);
    if (argc == 7 && !strcmp(argv[1], "spoil"))
        return check(argv, 1);
    if (argc == 5 && !strcmp(argv[1], "rate"))
        return rate(argv);
    return 64;
}
