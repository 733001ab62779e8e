/* What the preload library promises, one function for each promise.
 *
 *     probe NAME DIRECTORY-OF-THE-VOLUME
 *
 * Exits with 0 if all holds; else says which line does not.
 */
#define _GNU_SOURCE
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <mojim.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(c)                                                               \
    do {                                                                       \
        if (!(c)) {                                                            \
            fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __func__, __LINE__,  \
                    #c, errno, strerror(errno));                               \
            exit(1);                                                           \
        }                                                                      \
    } while (0)
#define FAILS(call, error) CHECK((errno = 0, (long)(call) == -1 && errno == (error)))

static const char *dir;

static const char *in(const char *name)
{
    static char path[4][4096];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", dir, name);
    return p;
}

static int open_new(const char *name)
{
    int fd = open(in(name), O_CREAT | O_RDWR, 0644);
    CHECK(fd >= 0);
    return fd;
}

static char *map(int fd, size_t len)
{
    char *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(p != MAP_FAILED);
    CHECK(mojim_is_region(p));
    return p;
}

static void until_killed(void)
{
    int fd = open_new("kill");
    long *p = (void *)map(fd, 8192);
    p[0] += 1;
    CHECK(msync(p, sizeof *p, MS_SYNC) == 0);
    p[600] += 1;
    struct msync_input both[] = {{&p[600], sizeof *p}, {&p[1], sizeof *p}};
    CHECK(gmsync(both, 2, MS_MOJIM) == 0);
    p[2] = 99; /* not synced, though its neighbours are */
    puts("synced");
    fflush(stdout);
    pause();
}

static void show(void)
{
    int fd = open(in("kill"), O_RDWR);
    CHECK(fd >= 0);
    long *p = (void *)map(fd, 8192);
    printf("%ld %ld %ld\n", p[0], p[600], p[2]);
}

static void opening(void)
{
    struct stat st;
    FAILS(open(in("missing"), O_RDWR), ENOENT);
    FAILS(open(in("nodir/file"), O_CREAT | O_RDWR, 0644), ENOENT);
    int fd = open_new("file");
    FAILS(open(in("file"), O_CREAT | O_EXCL | O_RDWR, 0644), EEXIST);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 0);
    CHECK((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR);
    CHECK(ftruncate(fd, 5000) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 5000);
    CHECK(lseek(fd, 0, SEEK_END) == 5000);
    CHECK(truncate(in("file"), 6000) == 0);
    CHECK(stat(in("file"), &st) == 0 && st.st_size == 6000);
    CHECK(posix_fallocate(fd, 0, 7000) == 0 && posix_fallocate(fd, 0, 10) == 0);
    CHECK(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 9000) == 0);
    FAILS(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), EOPNOTSUPP);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 7000);
    CHECK(close(fd) == 0);
    FAILS(read(fd, &st, 1), EBADF);
    fd = open(in("file"), O_RDONLY);
    CHECK(fd >= 0);
    FAILS(ftruncate(fd, 1), EINVAL);
    FAILS(write(fd, "x", 1), EBADF);
    FAILS(mmap(NULL, 7000, PROT_WRITE, MAP_SHARED, fd, 0), EACCES);
    CHECK(close(fd) == 0);
    /* What would be written anew is refused before anything is cut or made. */
    FAILS(open(in("file"), O_RDWR | O_TRUNC), EOPNOTSUPP);
    FAILS(open(in("file"), O_WRONLY | O_TRUNC), EOPNOTSUPP);
    FAILS(open(in("file"), O_WRONLY | O_APPEND), EOPNOTSUPP);
    FAILS(open(in("file"), O_WRONLY | O_CREAT | O_EXCL, 0644), EOPNOTSUPP);
    FAILS(creat(in("file"), 0644), EOPNOTSUPP);
    CHECK(stat(in("file"), &st) == 0 && st.st_size == 7000);
    FAILS(creat(in("second"), 0600), EOPNOTSUPP);
    FAILS(open(in("second"), O_CREAT | O_WRONLY | O_APPEND, 0600), EOPNOTSUPP);
    CHECK(stat(in("second"), &st) == -1);
    /* As touch(1) and truncate(1) do, and who recreates a file that is empty. */
    fd = open(in("second"), O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 10) == 0);
    FAILS(ftruncate(fd, 0), EOPNOTSUPP); /* as vim begins to write a file anew */
    CHECK(close(fd) == 0 && truncate(in("second"), 0) == 0);
    fd = open(in("second"), O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    int d = open(dir, O_RDONLY | O_DIRECTORY);
    CHECK(d >= 0);
    fd = openat(d, "second", O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK(close(fd) == 0 && close(d) == 0);
    fd = open(dir, O_TMPFILE | O_RDWR, 0600);
    if (fd >= 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        FAILS(linkat(AT_FDCWD, path, AT_FDCWD, in("named"), AT_SYMLINK_FOLLOW), EOPNOTSUPP);
    }
}

static void syncing(void)
{
    int fd = open_new("file");
    char *p = map(fd, 12288);
    CHECK(msync(p + 1001, 777, MS_SYNC) == 0); /* not aligned */
    uint64_t lsn = mojim_last_lsn();
    CHECK(lsn > 0);
    p[5000] = 1;
    CHECK(msync(p, 12288, MS_ASYNC) == 0 && mojim_last_lsn() > lsn);
    CHECK(msync(p, 12288, MS_SYNC | MS_INVALIDATE) == 0);
    p[5001] = 2; /* stays: nothing is rolled back without MAP_ATOMIC */
    CHECK(msync(p, 12288, MS_INVALIDATE) == 0 && p[5001] == 2);
    FAILS(msync(p, 12288, MS_SYNC | MS_ASYNC), EINVAL);
    FAILS(msync(p + 8192, 8192, MS_SYNC), EINVAL);  /* half outside */
    FAILS(msync(p - 4096, 8192, MS_SYNC), EINVAL);  /* the other half */
    struct msync_input bad[] = {{p, 8}, {&bad, 8}};
    FAILS(gmsync(bad, 2, MS_MOJIM), EINVAL);
    bad[1].address = p;
    bad[1].length = -1;
    FAILS(gmsync(bad, 2, MS_MOJIM), EINVAL);
    CHECK(strlen(mojim_last_error()) > 0);
    /* not a region: the kernel's affair */
    char *q = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(q != MAP_FAILED && !mojim_is_region(q));
    CHECK(msync(q, 4096, MS_SYNC) == 0);
    FAILS(msync(q + 1, 4096, MS_SYNC), EINVAL);
    CHECK(munmap(q, 4096) == 0);
    FAILS(msync(q, 4096, MS_SYNC), ENOMEM);
    p[9000] = 7;
    CHECK(fsync(fd) == 0);
    p[9001] = 8;
    CHECK(fdatasync(fd) == 0);
    CHECK(munmap(p, 12288) == 0 && !mojim_is_region(p));
    p = map(fd, 12288);
    CHECK(p[9000] == 7 && p[9001] == 8 && p[5000] == 1);
}

static void partial_pages(void)
{
    /* As on Linux: a mapping rounded up to pages does not make the file larger. */
    struct stat st;
    int fd = open_new("file");
    CHECK(ftruncate(fd, 5000) == 0);
    char *p = map(fd, 8192);
    p[4999] = 1;
    CHECK(msync(p, 8192, MS_SYNC) == 0);
    CHECK(munmap(p, 8192) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 5000);
    p = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(p != MAP_FAILED && p[4999] == 1);
    CHECK(munmap(p, 5000) == 0);
    /* A part of a file, at an address of the program's. */
    CHECK(ftruncate(fd, 65536) == 0);
    char *hole = mmap(NULL, 32768, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(hole != MAP_FAILED);
    p = mmap(hole + 8192, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 16384);
    CHECK(p == hole + 8192);
    p[1] = 3;
    FAILS(mmap(hole, 16384, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), EOPNOTSUPP);
    FAILS(mmap(p, 8192, PROT_READ, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0), EEXIST);
    CHECK(munmap(hole, 32768) == 0); /* a region and what is around it */
    CHECK(!mojim_is_region(p));
    CHECK(pread(fd, &st, 1, 16385) == 1 && *(char *)&st == 3);
}

static void shrinking(void)
{
    /* Memory beyond the new end is gone; sync points do not touch it. */
    struct stat st;
    int fd = open_new("file");
    char *p = map(fd, 40000);
    memset(p, 'x', 40000);
    CHECK(ftruncate(fd, 5000) == 0);
    FAILS(pwrite(fd, "beyond", 6, 30000), EOPNOTSUPP);
    FAILS(pwrite(fd, "beyond", 6, 4998), EOPNOTSUPP);
    CHECK(msync(p, 40000, MS_SYNC) == 0);
    CHECK(msync(p + 36000, 8, MS_SYNC) == 0);
    CHECK(fsync(fd) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 5000);
    CHECK(ftruncate(fd, 40000) == 0);
    CHECK(p[4999] == 'x' && p[5000] == 0 && p[36000] == 0);
    p[36000] = 'y';
    CHECK(msync(p, 40000, MS_SYNC) == 0);
    CHECK(ftruncate(fd, 4096) == 0 && ftruncate(fd, 37000) == 0);
    CHECK(p[36000] == 0);
    p[36000] = 'z';
    CHECK(munmap(p, 40000) == 0);
    p = map(fd, 37000);
    CHECK(p[0] == 'x' && p[4095] == 'x' && p[4096] == 0 && p[36000] == 'z');
    CHECK(ftruncate(fd, 0) == 0); /* and so at the end of the program */
}

static void refusals(void)
{
    int fd = open_new("file");
    FAILS(write(fd, "hello", 5), EOPNOTSUPP);
    FAILS(write(fd, "again", 5), EOPNOTSUPP); /* said once */
    char *p = map(fd, 16384);
    FAILS(mremap(p, 16384, 32768, MREMAP_MAYMOVE), EOPNOTSUPP);
    FAILS(munmap(p, 4096), EINVAL);
    FAILS(munmap(p + 4096, 12288), EINVAL);
    FAILS(mprotect(p, 16384, PROT_NONE), EOPNOTSUPP);
    CHECK(mprotect(p, 16384, PROT_READ | PROT_WRITE) == 0);
    p[0] = 5;
    CHECK(madvise(p, 16384, MADV_DONTNEED) == 0 && p[0] == 5);
    FAILS(unlink(in("file")), EBUSY);
    FAILS(link(in("file"), in("other")), EOPNOTSUPP);
    CHECK(fopen(in("file"), "r+") == NULL && errno == EOPNOTSUPP);
    CHECK(fopen(in("fresh"), "w") == NULL && errno == EOPNOTSUPP);
    int other = open("/dev/zero", O_RDONLY);
    FAILS(sendfile(fd, other, NULL, 10), EOPNOTSUPP);
    FAILS(copy_file_range(other, NULL, fd, NULL, 10, 0), EOPNOTSUPP);
    FAILS(rename(in("file"), "/tmp/elsewhere"), EXDEV);
    CHECK(p[0] == 5 && msync(p, 1, MS_SYNC) == 0); /* all that did no harm */
}

/* A second descriptor, a mapping of all and one of a part: POSIX's MAP_SHARED. */
static void aliases(void)
{
    int fd = open_new("file"), again = open(in("file"), O_RDWR);
    char *p = map(fd, 16384), *q = map(again, 16384);
    char *r = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 4096);
    CHECK(q != MAP_FAILED && r != MAP_FAILED);
    strcpy(p + 4096, "one");
    CHECK(strcmp(q + 4096, "one") == 0 && strcmp(r, "one") == 0);
    CHECK(pwrite(again, "two", 4, 4096) == 4 && strcmp(p + 4096, "two") == 0);
    CHECK(msync(q, 16384, MS_SYNC) == 0);
    CHECK(munmap(p, 16384) == 0 && munmap(q, 16384) == 0);
    CHECK(strcmp(r, "two") == 0 && munmap(r, 4096) == 0);
    p = map(fd, 16384);
    CHECK(strcmp(p + 4096, "two") == 0);
}

/* As before there were shared working copies. */
static void private_copy(void)
{
    int fd = open_new("file");
    char *p = map(fd, 16384);
    FAILS(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 4096), EBUSY);
    p[0] = 1;
    if (fork() == 0) {
        p[0] = 2;
        FAILS(msync(p, 1, MS_SYNC), EOPNOTSUPP);
        _exit(0);
    }
    int status;
    CHECK(wait(&status) > 0 && status == 0 && p[0] == 1);
}

static void coherence(void)
{
    char buf[64] = "";
    int fd = open_new("file");
    char *p = map(fd, 8192);
    strcpy(p + 4090, "uncommitted");
    CHECK(pread(fd, buf, 12, 4090) == 12 && strcmp(buf, "uncommitted") == 0);
    CHECK(lseek(fd, 4090, SEEK_SET) == 4090);
    CHECK(read(fd, buf, 2) == 2 && lseek(fd, 0, SEEK_CUR) == 4092);
    struct iovec v[] = {{buf, 3}, {buf + 3, 7}};
    CHECK(readv(fd, v, 2) == 10 && memcmp(buf, "committed", 10) == 0);
    CHECK(preadv(fd, v, 2, 4090) == 10 && memcmp(buf, "uncommitte", 10) == 0);
    CHECK(pread(fd, buf, 64, 8190) == 2 && pread(fd, buf, 64, 8192) == 0);
    /* writes go to the memory */
    CHECK(pwrite(fd, "written", 8, 100) == 8 && strcmp(p + 100, "written") == 0);
    CHECK(lseek(fd, 200, SEEK_SET) == 200 && write(fd, "too", 4) == 4);
    CHECK(strcmp(p + 200, "too") == 0 && lseek(fd, 0, SEEK_CUR) == 204);
    FAILS(pwrite(fd, "beyond", 6, 8190), EOPNOTSUPP);
    CHECK(fsync(fd) == 0);
    CHECK(munmap(p, 8192) == 0);
    CHECK(pread(fd, buf, 8, 100) == 8 && strcmp(buf, "written") == 0);
    FILE *f = fopen(in("file"), "r");
    CHECK(f && fseek(f, 4090, SEEK_SET) == 0 && fread(buf, 12, 1, f) == 1);
    CHECK(strcmp(buf, "uncommitted") == 0 && fclose(f) == 0);
    p = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(p != MAP_FAILED && !mojim_is_region(p) && strcmp(p + 200, "too") == 0);
}

static void descriptors(void)
{
    char c = 0;
    int fd = open_new("file");
    CHECK(ftruncate(fd, 4096) == 0);
    int two = dup(fd), three = fcntl(fd, F_DUPFD_CLOEXEC, 100), four = dup2(fd, 200);
    CHECK(two >= 0 && three >= 100 && four == 200 && close(fd) == 0);
    char *p = map(three, 4096);
    p[9] = 'm';
    CHECK(close(three) == 0); /* the mapping stays */
    CHECK(pread(two, &c, 1, 9) == 1 && c == 'm');
    CHECK(pread(four, &c, 1, 9) == 1 && c == 'm');
    CHECK(munmap(p, 4096) == 0);
    /* a number that is used again for another file is that file's */
    int other = open("/dev/null", O_WRONLY);
    CHECK(dup2(other, two) == two && write(two, "x", 1) == 1);
    CHECK(close_range(200, 200, 0) == 0 && dup2(other, 200) == 200 && write(200, "x", 1) == 1);
    struct flock lock = {.l_type = F_WRLCK};
    fd = open(in("file"), O_RDWR);
    CHECK(fcntl(fd, F_SETLK, &lock) == 0);
}

static void names(void)
{
    struct stat st;
    int fd = open_new("a");
    char *p = map(fd, 4096);
    p[0] = 'a';
    CHECK(rename(in("a"), in("b")) == 0);
    CHECK(stat(in("a"), &st) == -1 && stat(in("b"), &st) == 0);
    CHECK(msync(p, 1, MS_SYNC) == 0 && munmap(p, 4096) == 0);
    p = map(fd, 4096); /* the descriptor follows its file */
    CHECK(p[0] == 'a' && munmap(p, 4096) == 0);
    CHECK(close(open_new("c")) == 0);
    CHECK(rename(in("b"), in("c")) == 0);
    CHECK(pread(fd, &st, 1, 0) == 1 && *(char *)&st == 'a');
    FAILS(rename(in("b"), in("d")), ENOENT);
    CHECK(unlink(in("c")) == 0);
    FAILS(unlink(in("c")), ENOENT);
    FAILS(open(in("c"), O_RDWR), ENOENT);
    CHECK(pread(fd, &st, 1, 0) == 1); /* as of any removed file */
    FAILS(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0), EOPNOTSUPP);
    CHECK(close(open_new("e")) == 0 && remove(in("e")) == 0);
    CHECK(mkdir(in("sub"), 0755) == 0);
    fd = open_new("sub/file");
    CHECK(munmap(map(fd, 4096), 4096) == 0 && unlink(in("sub/file")) == 0);
    CHECK(rmdir(in("sub")) == 0);
}

static void atomic_map(void)
{
    int fd = open_new("file");
    char *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ATOMIC, fd, 0);
    CHECK(p != MAP_FAILED);
    p[0] = 1;
    CHECK(msync(p, 1, MS_SYNC) == 0);
    p[1] = 1;
    CHECK(munmap(p, 4096) == 0);
    p = map(fd, 4096);
    CHECK(p[0] == 1 && p[1] == 0);
    p[2] = 1; /* committed by the end of the program */
    int other = open_new("other");
    p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ATOMIC, other, 0);
    p[3] = 1; /* not */
}

static void atomic_show(void)
{
    char c[4];
    int fd = open(in("file"), O_RDONLY), other = open(in("other"), O_RDONLY);
    CHECK(pread(fd, c, 3, 0) == 3 && c[0] == 1 && c[1] == 0 && c[2] == 1);
    CHECK(pread(other, c, 4, 0) == 4 && c[3] == 0);
}

/* Whether all of [from, to) is `byte`. */
static int are(const char *p, int from, int to, char byte)
{
    while (from < to && p[from] == byte)
        from++;
    return from == to;
}

static char *map_atomic(int fd, size_t len)
{
    char *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ATOMIC, fd, 0);
    CHECK(p != MAP_FAILED && mojim_is_region(p));
    return p;
}

static void flags(void)
{
    enum { LEN = 100000 };
    char buf[4];
    int fd = open_new("atomic");
    char *p = map_atomic(fd, LEN);
    memset(p, 'a', LEN);
    CHECK(msync(p, LEN, MS_SYNC) == 0);
    memset(p, 'b', LEN);
    CHECK(msync(p + 1000, 3001, MS_INVALIDATE) == 0); /* these bytes, and no others */
    CHECK(are(p, 0, 1000, 'b') && are(p, 1000, 4001, 'a') && are(p, 4001, LEN, 'b'));
    CHECK(msync(p + 8190, 4100, MS_SYNC | MS_INVALIDATE) == 0); /* commits */
    CHECK(msync(p, LEN, MS_INVALIDATE) == 0);
    CHECK(are(p, 0, 8190, 'a') && are(p, 8190, 12290, 'b') && are(p, 12290, LEN, 'a'));
    uint64_t lsn = mojim_last_lsn();
    memset(p + 50000, 'c', 100);
    CHECK(msync(p, LEN, MS_ASYNC) == 0 && mojim_last_lsn() > lsn);
    memset(p + 50000, 'd', 200); /* not in it */
    CHECK(msync(p, LEN, MS_INVALIDATE) == 0);
    CHECK(are(p, 50000, 50100, 'c') && are(p, 50100, LEN, 'a'));
    lsn = mojim_last_lsn();
    p[0] = 'e';
    CHECK(msync(p, 10, MS_ASYNC | MS_INVALIDATE) == 0 && mojim_last_lsn() == lsn + 1);
    CHECK(msync(p, 10, 0) == 0 && mojim_last_lsn() == lsn + 2); /* as Linux takes 0 */
    FAILS(msync(p, 10, MS_SYNC | MS_ASYNC | MS_INVALIDATE), EINVAL);
    p[1] = 'f';
    CHECK(fsync(fd) == 0);
    p[2] = 'g';
    CHECK(fdatasync(fd) == 0);
    p[3] = 'h';
    CHECK(msync(p, LEN, MS_INVALIDATE) == 0 && memcmp(p, "efga", 4) == 0);
    p[3] = 'h';
    CHECK(munmap(p, LEN) == 0);
    CHECK(fsync(fd) == 0 && fdatasync(fd) == 0); /* of no mapping */
    CHECK(pread(fd, buf, 4, 0) == 4 && memcmp(buf, "efga", 4) == 0);
}

static void rounded(void)
{
    char *p = map_atomic(open_new("atomic"), 12288);
    memset(p, 'b', 12288);
    CHECK(msync(p + 5000, 8, MS_INVALIDATE) == 0);
    CHECK(are(p, 0, 4096, 'b') && are(p, 4096, 8192, 0) && are(p, 8192, 12288, 'b'));
}

/* Whatever else than msync and fsync promises that bytes are durable: what it names
 * is not taken back by MS_INVALIDATE. */
static void durable(void)
{
    enum { LEN = 16384 };
    char buf[4] = "wxyz";
    int fd = open_new("file"), other = open_new("other");
    char *p = map_atomic(fd, LEN), *q = map_atomic(other, LEN), *again = map_atomic(fd, LEN);
    int data = open(in("file"), O_RDWR | O_DSYNC), all = open(in("file"), O_WRONLY | O_SYNC);
    CHECK(data >= 0 && all >= 0 && again != MAP_FAILED);
    CHECK((fcntl(data, F_GETFL) & O_SYNC) == O_DSYNC);
    CHECK((fcntl(all, F_GETFL) & (O_SYNC | O_ACCMODE)) == (O_SYNC | O_WRONLY));
    uint64_t lsn = mojim_last_lsn();
    p[10] = 1; /* nobody says a word of it */
    CHECK(pwrite(data, "one", 3, 100) == 3 && mojim_last_lsn() == lsn + 1);
    CHECK(pwrite(all, "two", 3, 8190) == 3);
    struct iovec v[] = {{buf, 2}, {buf + 2, 2}};
    int copy = dup(data);
    lsn = mojim_last_lsn();
    CHECK(copy >= 0 && pwritev(copy, v, 2, 5000) == 4 && mojim_last_lsn() == lsn + 1);
    CHECK(lseek(data, 6000, SEEK_SET) == 6000 && write(data, "three", 5) == 5);
    CHECK(pwritev2(fd, v, 1, 7000, RWF_DSYNC) == 2 && pwritev2(fd, v, 1, 7002, RWF_SYNC) == 2);
    FAILS(pwritev2(fd, v, 1, 7000, RWF_APPEND), EOPNOTSUPP);
    CHECK(pwrite(fd, "not", 3, 9000) == 3);
    CHECK(msync(p, LEN, MS_INVALIDATE) == 0);
    CHECK(p[10] == 0 && p[9000] == 0 && memcmp(p + 100, "one", 3) == 0);
    CHECK(memcmp(p + 8190, "two", 3) == 0 && memcmp(p + 5000, "wxyz", 4) == 0);
    CHECK(memcmp(p + 6000, "three", 5) == 0 && memcmp(p + 7000, "wxwx", 4) == 0);
    struct aiocb cb = {.aio_fildes = fd};
    const struct aiocb *list[] = {&cb};
    for (int i = 0; i < 5; i++) {
        p[0] = i + 1;
        q[0] = 10 * (i + 1);
        lsn = mojim_last_lsn();
        switch (i) {
        case 0:
            sync(); /* of both files, and one sync point */
            CHECK(mojim_last_lsn() == lsn + 1);
            break;
        case 1: {
            int d = open(dir, O_RDONLY | O_DIRECTORY); /* by any file of the file system */
            CHECK(d >= 0 && syncfs(d) == 0 && close(d) == 0);
            break;
        }
        case 2:
            CHECK(syncfs(fd) == 0);
            break;
        case 3:
            CHECK(sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE) == 0);
            CHECK(sync_file_range(other, 0, 4096, SYNC_FILE_RANGE_WAIT_AFTER) == 0);
            FAILS(sync_file_range(fd, -1, 0, SYNC_FILE_RANGE_WRITE), EINVAL);
            break;
        default:
            CHECK(aio_fsync(O_DSYNC, &cb) == 0 && aio_suspend(list, 1, NULL) == 0);
            CHECK(aio_error(&cb) == 0 && aio_return(&cb) == 0);
            cb.aio_fildes = other;
            CHECK(aio_fsync(O_SYNC, &cb) == 0 && aio_suspend(list, 1, NULL) == 0);
        }
        CHECK(msync(p, LEN, MS_INVALIDATE) == 0 && msync(q, LEN, MS_INVALIDATE) == 0);
        CHECK(p[0] == i + 1 && q[0] == 10 * (i + 1));
    }
}

static void another_root(void)
{
    FAILS(chroot(dir), EPERM);
    CHECK(open(in("file"), O_RDWR) >= 0);
}

/* Waits for a child, which exits with this. */
static void ends(pid_t child, int code)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == code);
}

/* Every way of executing a program: the static one is refused, others keep the
 * library, whatever the environment that they are given. */
static void executes(void)
{
    static const char *script = "test \"$A$B\" = 12 && case $LD_PRELOAD in *libmojim_preload*) "
                                "test -n \"$MOJIM_CONFIG\" && exit 42;; esac; exit 1";
    char *is[] = {"static", NULL}, *sh[] = {"sh", "-c", (char *)script, NULL};
    char *bare[] = {"A=1", "B=2", "LD_PRELOAD=", NULL}, *none[] = {NULL};
    pid_t child;
    FAILS(execv("./static", is), EACCES);
    FAILS(execve("./static", is, none), EACCES);
    FAILS(execve("./script", is, none), EACCES);
    FAILS(execvp("./static", is), EACCES);
    FAILS(execl("./static", "static", (char *)NULL), EACCES);
    FAILS(execle("./static", "static", (char *)NULL, none), EACCES);
    FAILS(execveat(AT_FDCWD, "./static", is, none, 0), EACCES);
    int fd = open("./static", O_RDONLY), shell = open("/bin/sh", O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && shell >= 0);
    FAILS(fexecve(fd, is, none), EACCES);
    FAILS(execveat(fd, "", is, none, AT_EMPTY_PATH), EACCES);
    CHECK(posix_spawn(&child, "./static", NULL, NULL, is, none) == EACCES);
    FAILS(execl("./nothing", "nothing", (char *)NULL), ENOENT);
    CHECK(setenv("A", "1", 1) == 0 && setenv("B", "2", 1) == 0);
    char old[4096];
    snprintf(old, sizeof old, "%s:.", getenv("PATH"));
    CHECK(setenv("PATH", old, 1) == 0);
    FAILS(execlp("static", "static", (char *)NULL), EACCES);
    CHECK(posix_spawnp(&child, "static", NULL, NULL, is, none) == EACCES);
    CHECK(posix_spawn(&child, "/bin/sh", NULL, NULL, sh, bare) == 0);
    ends(child, 42);
    CHECK(posix_spawnp(&child, "sh", NULL, NULL, sh, bare) == 0);
    ends(child, 42);
    for (int i = 0; i < 10; i++) {
        child = i % 2 ? vfork() : fork();
        if (child == 0) {
            switch (i / 2) {
            case 0:
                execve("/bin/sh", sh, bare);
                break;
            case 1:
                execvpe("sh", sh, bare);
                break;
            case 2:
                execle("/bin/sh", "sh", "-c", script, "0", "1", "2", "3", "4", "5", "6",
                       (char *)NULL, bare);
                break;
            case 3:
                fexecve(shell, sh, bare);
                break;
            default:
                execlp("sh", "sh", "-c", script, "0", "1", "2", "3", "4", (char *)NULL);
            }
            _exit(1);
        }
        ends(child, 42);
    }
    CHECK(unsetenv("LD_PRELOAD") == 0 && unsetenv("MOJIM_CONFIG") == 0);
    int status = system(script);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    CHECK(unsetenv("LD_PRELOAD") == 0);
    FILE *f = popen(script, "r");
    CHECK(f != NULL);
    status = pclose(f);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
}

/* Two mappings of one file are one sync point. */
static void two_mappings(void)
{
    int fd = open_new("two");
    CHECK(ftruncate(fd, 65536) == 0);
    char *p = map_atomic(fd, 32768);
    char *q = mmap(NULL, 32768, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ATOMIC, fd, 32768);
    CHECK(q != MAP_FAILED);
    p[0] = q[0] = 1;
    uint64_t lsn = mojim_last_lsn();
    CHECK(fsync(fd) == 0 && mojim_last_lsn() == lsn + 1);
    p[0] = q[0] = 2;
    CHECK(msync(p, 32768, MS_INVALIDATE) == 0 && p[0] == 1 && q[0] == 2);
    CHECK(msync(q, 32768, MS_INVALIDATE) == 0 && q[0] == 1);
}

static void async_until_killed(void)
{
    long *p = (void *)map_atomic(open_new("async"), 65536);
    p[0] += 1;
    CHECK(msync(p, sizeof *p, MS_ASYNC) == 0);
    p[0] += 100; /* not in it */
    p[1] += 1;
    p[5000] += 1;
    CHECK(msync(p + 1, 65528, MS_ASYNC) == 0);
    p[5000] += 100;
    puts("begun");
    fflush(stdout);
    pause();
}

static void async_show(void)
{
    long *p = (void *)map(open_new("async"), 65536);
    printf("%ld %ld %ld\n", p[0], p[1], p[5000]);
}

static void forking(void)
{
    int status, fd = open_new("file");
    char *p = map(fd, 4096);
    p[0] = 1;
    pid_t child = fork();
    if (child == 0) {
        p[0] = 2;
        FAILS(msync(p, 1, MS_SYNC), EOPNOTSUPP);
        FAILS(open(in("new"), O_CREAT | O_RDWR, 0644), EOPNOTSUPP);
        exit(0); /* and its end commits nothing */
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(p[0] == 1 && msync(p, 1, MS_SYNC) == 0); /* as it was */
    CHECK(system("true") == 0);
    child = vfork();
    if (child == 0) {
        close(fd); /* the child's; the parent's table stays */
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(pread(fd, p + 100, 1, 0) == 1 && p[100] == 1);
}

/* A child of a process with shared working copies is a process like any other. */
static void forking_shares(void)
{
    int status, fd = open_new("file"), two[2];
    char *p = map(fd, 16384);
    p[0] = 1;
    CHECK(pipe(two) == 0);
    pid_t child = fork();
    if (child == 0) {
        char c;
        CHECK(p[0] == 1);
        p[4096] = 2;
        CHECK(msync(p, 16384, MS_SYNC) == 0);
        uint64_t lsn = mojim_last_lsn();
        CHECK(lsn > 0 && fsync(fd) == 0 && mojim_last_lsn() > lsn);
        char *q = map(open_new("new"), 4096), *r = map(fd, 16384);
        r[1] = q[0] = 3;
        CHECK(p[1] == 3 && pread(fd, &c, 1, 1) == 1 && c == 3);
        CHECK(munmap(r, 16384) == 0 && msync(q, 4096, MS_SYNC) == 0);
        p[2] = 4;
        pid_t grandchild = fork();
        if (grandchild == 0) {
            p[12288] = 6;
            _exit(0); /* no sync point */
        }
        CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0);
        exit(0); /* what it stored is its parent's to commit */
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(p[0] == 1 && p[4096] == 2 && p[1] == 3 && p[2] == 4 && p[12288] == 6);
    child = fork();
    if (child == 0) {
        p[8192] = 7;
        CHECK(write(two[1], "x", 1) == 1);
        pause();
    }
    char c;
    CHECK(read(two[0], &c, 1) == 1 && p[8192] == 7);
    CHECK(msync(p, 16384, MS_SYNC) == 0); /* what a living child has stored, too */
    p[8192] = 8;
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    p[0] = 9;
    /* a child that becomes another program shares nothing any more */
    CHECK(system("true") == 0);
    child = fork();
    if (child == 0) {
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(munmap(p, 16384) == 0);
    p = map(fd, 16384);
    CHECK(p[0] == 9 && p[4096] == 2 && p[2] == 4 && p[8192] == 8 && p[12288] == 6);
}

static int lock(int fd, int cmd, int type, off_t start)
{
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = 1};
    return fcntl(fd, cmd, &l) ? -1 : l.l_type;
}

static void said(int from)
{
    char c;
    CHECK(read(from, &c, 1) == 1);
}

static void say(int to)
{
    CHECK(write(to, "x", 1) == 1);
}

/* Two processes, each of which opens and maps the file by itself. */
static void sharing(void)
{
    int ab[2], ba[2], status;
    CHECK(pipe(ab) == 0 && pipe(ba) == 0);
    pid_t a = fork();
    if (a == 0) {
        close(ba[1]);
        int fd = open_new("file");
        char *p = map(fd, 16384);
        p[0] = 1;
        CHECK(lock(fd, F_SETLK, F_WRLCK, 5) == F_WRLCK);
        say(ab[1]);
        said(ba[0]);
        CHECK(p[4096] == 2 && msync(p, 16384, MS_SYNC) == 0);
        p[1] = 7; /* committed by the other */
        say(ab[1]);
        said(ba[0]);
        int other = open(in("file"), O_RDONLY);
        CHECK(other >= 0 && close(other) == 0); /* and its locks go, as POSIX has it */
        say(ab[1]);
        said(ba[0]);
        exit(0);
    }
    pid_t b = fork();
    if (b == 0) {
        close(ab[1]);
        said(ab[0]);
        int fd = open_new("file");
        char *p = map(fd, 16384);
        CHECK(p[0] == 1);
        p[4096] = 2;
        CHECK(lock(fd, F_GETLK, F_WRLCK, 5) == F_WRLCK);
        CHECK(lock(fd, F_SETLK, F_WRLCK, 5) == -1 && (errno == EAGAIN || errno == EACCES));
        CHECK(lock(fd, F_SETLK, F_WRLCK, 6) == F_WRLCK);
        say(ba[1]);
        said(ab[0]);
        char c;
        CHECK(p[1] == 7 && pread(fd, &c, 1, 1) == 1 && c == 7);
        CHECK(msync(p, 16384, MS_SYNC) == 0);
        struct stat st;
        CHECK(unlink(in("file")) == -1 && errno == EBUSY);
        CHECK(ftruncate(fd, 20000) == 0 && fstat(fd, &st) == 0 && st.st_size == 20000);
        say(ba[1]);
        said(ab[0]);
        CHECK(lock(fd, F_SETLK, F_WRLCK, 5) == F_WRLCK);
        say(ba[1]);
        CHECK(read(ab[0], &c, 1) == 0); /* the other, the owner, has ended */
        p[2] = 3;
        FAILS(msync(p, 16384, MS_SYNC), ESTALE);
        CHECK(p[0] == 1 && p[2] == 3);
        _exit(0);
    }
    close(ab[1]);
    close(ba[1]);
    CHECK(waitpid(a, &status, 0) == a && status == 0);
    CHECK(waitpid(b, &status, 0) == b && status == 0);
    char *p = map(open_new("file"), 20000);
    CHECK(p[0] == 1 && p[4096] == 2 && p[1] == 7 && p[2] == 0);
}

/* One process stores into a part of the file, another, which has mapped a part
 * that is elsewhere, calls fsync; then both are killed. */
static void fsync_of_others(void)
{
    enum { PAGE = 4096 };
    int ab[2], ba[2], status;
    char c;
    CHECK(pipe(ab) == 0 && pipe(ba) == 0);
    pid_t a = fork();
    if (a == 0) {
        close(ba[1]);
        int fd = open_new("file");
        CHECK(ftruncate(fd, 101 * PAGE) == 0);
        char *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 100 * PAGE);
        CHECK(p != MAP_FAILED);
        p[9] = 1;
        say(ab[1]);
        pause();
    }
    pid_t b = fork();
    if (b == 0) {
        close(ab[1]);
        said(ab[0]);
        int fd = open_new("file");
        char *p = map(fd, PAGE);
        p[9] = 2;
        CHECK(fsync(fd) == 0);
        p[10] = 2; /* not in it */
        say(ba[1]);
        pause();
    }
    close(ab[1]);
    close(ba[1]);
    ssize_t got = read(ba[0], &c, 1);
    CHECK(kill(a, SIGKILL) == 0 && kill(b, SIGKILL) == 0);
    CHECK(waitpid(a, &status, 0) == a && waitpid(b, &status, 0) == b && got == 1);
    char *p = map(open_new("file"), 101 * PAGE);
    CHECK(p[9] == 2 && p[10] == 0 && p[100 * PAGE + 9] == 1);
}

/* A file is replaced, and another renamed and removed, by another process than
 * the one that has them open. */
static void replaced_by_another(void)
{
    int ab[2], ba[2], status;
    struct stat st;
    char c = 0;
    CHECK(pipe(ab) == 0 && pipe(ba) == 0);
    pid_t other = fork();
    if (other == 0) {
        close(ab[1]);
        said(ab[0]);
        int fd = open_new("file.tmp");
        CHECK(ftruncate(fd, 9000) == 0);
        CHECK(rename(in("file.tmp"), in("file")) == 0);
        CHECK(rename(in("from"), in("to")) == 0);
        say(ba[1]);
        said(ab[0]);
        CHECK(unlink(in("to")) == 0);
        say(ba[1]);
        said(ab[0]);
        exit(0);
    }
    close(ba[1]);
    int fd = open_new("file"), from = open_new("from");
    CHECK(ftruncate(fd, 100) == 0 && ftruncate(from, 100) == 0);
    say(ab[1]);
    said(ba[0]);
    FAILS(ftruncate(fd, 0), ESTALE); /* not the file that has its name now */
    FAILS(mmap(NULL, 100, PROT_READ, MAP_SHARED, fd, 0), ESTALE);
    CHECK(posix_fallocate(fd, 0, 20000) == ESTALE);
    CHECK(stat(in("file"), &st) == 0 && st.st_size == 9000);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 100);
    CHECK(fsync(fd) == 0); /* nothing is left of it */
    int again = open(in("file"), O_RDWR);
    char *p = map(again, 9000);
    p[0] = 'n';
    CHECK(pread(again, &c, 1, 0) == 1 && c == 'n');
    CHECK(pread(fd, &c, 1, 0) == 1 && c == 0); /* that is the old one's still */
    CHECK(munmap(p, 9000) == 0);
    CHECK(ftruncate(from, 200) == 0 && fsync(from) == 0); /* it has another name */
    int to = open(in("to"), O_RDWR);
    CHECK(fstat(to, &st) == 0 && st.st_size == 200);
    say(ab[1]);
    said(ba[0]);
    FAILS(ftruncate(to, 0), ESTALE);
    CHECK(fsync(to) == 0);
    say(ab[1]);
    CHECK(waitpid(other, &status, 0) == other && status == 0);
}

static void opening_fails(void)
{
    struct stat st;
    struct rlimit old, none;
    int fd = open_new("file");
    CHECK(ftruncate(fd, 5000) == 0);
    CHECK(getrlimit(RLIMIT_NOFILE, &old) == 0);
    none = old;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    FAILS(open(in("file"), O_RDWR), EMFILE);
    CHECK(setrlimit(RLIMIT_NOFILE, &old) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 5000);
    if (old.rlim_max > 1 << 16) { /* beyond what this library can tell apart */
        none.rlim_cur = (1 << 16) + 100;
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
        int next, null = open("/dev/null", O_RDONLY);
        do {
            CHECK((next = dup(null)) >= 0);
        } while (next < (1 << 16) - 1);
        FAILS(open(in("file"), O_RDWR), EMFILE);
        CHECK(fstat(fd, &st) == 0 && st.st_size == 5000);
    }
}

static void fixed_over_a_region(void)
{
    int fd = open_new("file");
    char *p = map(fd, 8192);
    p[1] = 1;
    FAILS(mmap(p, 8192, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0), EOPNOTSUPP);
    FAILS(mmap(p + 4096, 4096, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0), EOPNOTSUPP);
    p[2] = 2; /* the region is there still */
    CHECK(p[1] == 1 && msync(p, 8192, MS_SYNC) == 0 && munmap(p, 8192) == 0);
}

static struct {
    int fd, other, jump;
    char *p, *trap;
    sigjmp_buf back;
    volatile int line; /* the first check that failed */
} handled;

#define EXPECT(c)                                                              \
    do {                                                                       \
        if (!(c) && handled.line == 0)                                         \
            handled.line = __LINE__;                                           \
    } while (0)
#define DEADLK(call) EXPECT((errno = 0, (long)(call) == -1 && errno == EDEADLK))

static void on_fault(int sig)
{
    int fd = handled.fd, before = errno;
    char c, *p = handled.p;
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 6, .l_len = 1};
    (void)sig;
    if (handled.jump)
        siglongjmp(handled.back, 1);
    DEADLK(fsync(fd));
    DEADLK(fdatasync(fd));
    DEADLK(msync(p, 8192, MS_SYNC));
    DEADLK(msync(p, 1, MS_ASYNC));
    DEADLK(pread(fd, &c, 1, 0));
    DEADLK(pwrite(fd, "x", 1, 4096));
    DEADLK(ftruncate(fd, 1));
    EXPECT(posix_fallocate(fd, 0, 1) == EDEADLK); /* which returns its error */
    DEADLK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0));
    DEADLK(mmap(p, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
    DEADLK(munmap(p, 8192));
    DEADLK(mprotect(p, 8192, PROT_NONE));
    DEADLK(madvise(p, 8192, MADV_DONTNEED));
    DEADLK(fcntl(fd, F_SETLK, &l));
    EXPECT(close(handled.other) == 0); /* which is allowed in a handler */
    EXPECT(mprotect(handled.trap, 4096, PROT_READ | PROT_WRITE) == 0);
    errno = before;
}

/* A handler that interrupts a call: write(2) reads memory that is not there. */
static void in_a_handler(void)
{
    int ab[2], ends[2], status;
    CHECK(pipe(ab) == 0 && pipe(ends) == 0);
    pid_t locker = fork();
    if (locker == 0) {
        close(ab[1]);
        said(ab[0]);
        int fd = open_new("file");
        CHECK(lock(fd, F_SETLK, F_WRLCK, 5) == F_WRLCK); /* the handler's close let go */
        exit(0);
    }
    pid_t child = fork();
    if (child == 0) {
        char c;
        alarm(20); /* ends a child that hangs */
        close(ends[1]);
        struct sigaction act = {.sa_handler = on_fault};
        int fd = handled.fd = open_new("file");
        char *p = handled.p = map(fd, 8192);
        handled.other = open(in("file"), O_RDONLY);
        handled.trap = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(handled.other >= 0 && handled.trap != MAP_FAILED);
        CHECK(lock(fd, F_SETLK, F_WRLCK, 5) == F_WRLCK);
        p[1] = 1;
        CHECK(sigaction(SIGSEGV, &act, NULL) == 0);
        CHECK(pwrite(fd, handled.trap, 1, 0) == 1);
        if (handled.line) {
            fprintf(stderr, "in the handler: line %d does not hold\n", handled.line);
            exit(1);
        }
        CHECK(p[1] == 1 && p[4096] == 0 && fsync(fd) == 0); /* as if it had not been */
        say(ab[1]);
        CHECK(read(ends[0], &c, 1) == 0); /* until the other has ended, which may be a guest */
        CHECK(mprotect(handled.trap, 4096, PROT_NONE) == 0);
        handled.jump = 1;
        if (sigsetjmp(handled.back, 1) == 0) {
            pwrite(fd, handled.trap, 1, 0);
            exit(1);
        }
        p[2] = 2;
        FAILS(fsync(fd), EDEADLK); /* nobody knows what was left half-way */
        FAILS(msync(p, 8192, MS_SYNC), EDEADLK);
        exit(0);
    }
    close(ab[1]);
    close(ends[1]);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(waitpid(locker, &status, 0) == locker && status == 0);
}

/* Other ways to a file of the volume than its path. */
static void ways_back(void)
{
    struct stat st;
    char path[64];
    int fd = open_new("file"), null = open("/dev/null", O_RDWR);
    CHECK(null >= 0 && ftruncate(fd, 5000) == 0);
    static const char *const ways[] = {"/proc/self/fd/%d", "/proc/thread-self/fd/%d", "/dev/fd/%d"};
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, ways[i], fd);
        int again = open(path, O_RDWR);
        CHECK(again >= 0);
        FAILS(write(again, "x", 1), EOPNOTSUPP); /* as by any other descriptor */
        CHECK(fopen(path, "r+") == NULL && errno == EOPNOTSUPP);
        CHECK(close(again) == 0);
        snprintf(path, sizeof path, ways[i], null);
        CHECK((again = open(path, O_RDWR)) >= 0 && write(again, "x", 1) == 1 && close(again) == 0);
    }
    CHECK(chdir(dir) == 0);
    int again = open("/proc/self/cwd/file", O_RDWR);
    CHECK(again >= 0);
    FAILS(write(again, "x", 1), EOPNOTSUPP);
    CHECK(dup2(again, 0) == 0);
    again = open("/dev/stdin", O_RDWR);
    CHECK(again >= 0);
    FAILS(write(again, "x", 1), EOPNOTSUPP);
    FILE *f = fopen(in("file"), "r");
    CHECK(f && freopen(NULL, "r+", f) == NULL && errno == EOPNOTSUPP);
    f = fopen(in("file"), "r");
    CHECK(f && (f = freopen(NULL, "r", f)) && fgetc(f) == 0 && fclose(f) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_size == 5000);
}

static sem_t forks;

static void about_to_fork(void)
{
    CHECK(sem_post(&forks) == 0);
}

static void *first_use(void *arg)
{
    FAILS(truncate(arg, 0), ENOENT); /* which the library must look at */
    return NULL;
}

static void *forks_meanwhile(void *arg)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        alarm(20); /* ends a child that hangs */
        FAILS(truncate(arg, 0), ENOENT);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return NULL;
}

/* The configuration is a pipe here, and lies beside as `.real`: so one thread is in
 * the middle of reading it while another forks. The main thread's calls are the
 * kernel's own, since the library would wait as well. */
static void fork_amid_start(void)
{
    char real[4096], text[1 << 19], *missing = strdup(in("missing"));
    const char *config = getenv("MOJIM_CONFIG");
    pthread_t one, two;
    snprintf(real, sizeof real, "%s.real", config);
    CHECK(sem_init(&forks, 0, 0) == 0 && pthread_atfork(about_to_fork, NULL, NULL) == 0);
    CHECK(pthread_create(&one, NULL, first_use, missing) == 0);
    int to = syscall(SYS_openat, AT_FDCWD, config, O_WRONLY); /* until it is read */
    CHECK(to >= 0);
    int from = syscall(SYS_openat, AT_FDCWD, real, O_RDONLY);
    CHECK(from >= 0 && syscall(SYS_rename, real, config) == 0);
    CHECK(pthread_create(&two, NULL, forks_meanwhile, missing) == 0);
    CHECK(sem_wait(&forks) == 0);
    /* A comment that takes a while: a fork that does not wait is through by then. */
    memset(text, '#', sizeof text);
    text[sizeof text - 1] = '\n';
    CHECK(write(to, text, sizeof text) == sizeof text);
    ssize_t n = read(from, text, sizeof text);
    CHECK(n > 0 && write(to, text, n) == n && close(to) == 0 && close(from) == 0);
    CHECK(pthread_join(one, NULL) == 0 && pthread_join(two, NULL) == 0);
}

/* The same for the lock of a descriptor's position: a thread reads all the time. */
static void *reads_on(void *arg)
{
    char c[4096];
    int fd = ((int *)arg)[1]; /* its position is the children's, too */
    while (!*(volatile int *)arg)
        CHECK(lseek(fd, 0, SEEK_SET) == 0 && read(fd, c, sizeof c) >= 0);
    return NULL;
}

static void fork_amid_reads(void)
{
    pthread_t t;
    int status, args[2] = {0, open_new("file")};
    char *p = map(args[1], 4096), c;
    CHECK(pthread_create(&t, NULL, reads_on, args) == 0);
    for (int i = 0; i < 200; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20); /* ends a child that hangs */
            CHECK(read(args[1], &c, 1) >= 0);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    args[0] = 1;
    CHECK(pthread_join(t, NULL) == 0 && munmap(p, 4096) == 0);
}

static void fork_first(void)
{
    int status, null = open("/dev/null", O_RDWR);
    CHECK(null >= 0 && access(in("file"), F_OK) == -1);
    FAILS(open(in("file/x"), O_PATH), ENOENT);
    pid_t child = fork();
    if (child == 0) {
        int fd = open_new("file");
        char *p = map(fd, 4096);
        p[0] = 42;
        CHECK(msync(p, 1, MS_SYNC) == 0);
        p[1] = 43;
        exit(0); /* a sync point, since the child attached itself */
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    char *p = map(open_new("file"), 4096);
    CHECK(p[0] == 42 && p[1] == 43);
}

enum { THREADS = 4, ROUNDS = 200 };

static void *thread(void *arg)
{
    int me = *(int *)arg;
    char name[16];
    snprintf(name, sizeof name, "t%d", me);
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, O_CREAT | O_RDWR, 0644);
    CHECK(fd >= 0);
    char *p = map(fd, 8192);
    for (int i = 1; i <= ROUNDS; i++) {
        int got = 0;
        memcpy(p + 4094, &i, sizeof i);
        CHECK(msync(p + 4094, sizeof i, MS_SYNC) == 0);
        CHECK(pread(fd, &got, sizeof got, 4094) == sizeof got && got == i);
        int d = dup(fd);
        CHECK(d >= 0 && close(d) == 0);
        char *q = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(q != MAP_FAILED && munmap(q, 4096) == 0);
        if (i % 50 == 0) {
            CHECK(munmap(p, 8192) == 0);
            p = map(fd, 8192);
            memcpy(&got, p + 4094, sizeof got);
            CHECK(got == i);
        }
    }
    return NULL;
}

static void threads(void)
{
    pthread_t t[THREADS];
    int id[THREADS];
    for (int i = 0; i < THREADS; i++) {
        id[i] = i;
        CHECK(pthread_create(&t[i], NULL, thread, &id[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(t[i], NULL) == 0);
}

static volatile int over;

static void *stores_and_syncs(void *arg)
{
    char *p = arg;
    while (!over) {
        for (int i = 0; i < 65536; i += 4096)
            p[i] += 1;
        CHECK(msync(p, 65536, MS_SYNC) == 0);
        p[7] += 1;
        CHECK(msync(p + 7, 1, MS_SYNC) == 0);
    }
    return NULL;
}

static void amid(int shared)
{
    /* Whatever other threads hold at the fork, the child waits for nothing. */
    pthread_t t[THREADS];
    char *p = map(open_new("file"), THREADS * 65536L);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&t[i], NULL, stores_and_syncs, p + i * 65536L) == 0);
    for (int i = 0; i < 100; i++) {
        int status;
        pid_t child = fork();
        if (child == 0) {
            alarm(100); /* ends a child that hangs */
            if (shared)
                CHECK(msync(p, THREADS * 65536L, MS_SYNC) == 0);
            else
                FAILS(msync(p, THREADS * 65536L, MS_SYNC), EOPNOTSUPP);
            CHECK(munmap(p, 4096) == -1);
            CHECK(mojim_is_region(p));
            if (i % 2)
                exit(0);
            execl("/bin/true", "true", (char *)NULL);
            _exit(1);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    over = 1;
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(t[i], NULL) == 0);
    CHECK(munmap(p, THREADS * 65536L) == 0);
}

static void forking_amid(void)
{
    amid(0);
}

static void forking_amid_shared(void)
{
    amid(1);
}

/* A thread that asked for its end before it uses a file of the volume ends behind
 * that; one that waits elsewhere, in a call that passes, ends there. */
static int used;

static void *uses_then_ends(void *unused)
{
    (void)unused;
    const char *name = in("cancelled"), *to = in("renamed");
    pthread_cancel(pthread_self());
    int fd = open_new("cancelled");
    CHECK(ftruncate(fd, 8192) == 0);
    char *p = map(fd, 8192);
    p[1] = 1;
    CHECK(msync(p, 8192, MS_SYNC) == 0 && fsync(fd) == 0);
    CHECK(pwrite(fd, "x", 1, 5) == 1 && pread(fd, p + 9, 1, 5) == 1);
    CHECK(munmap(p, 8192) == 0 && rename(name, to) == 0 && unlink(to) == 0);
    used++;
    close(fd); /* ends in here */
    return NULL;
}

static void *waits_elsewhere(void *pipe)
{
    char c;
    CHECK(read(*(int *)pipe, &c, 1) == -1); /* ends in here */
    return NULL;
}

static void *opens_elsewhere(void *unused)
{
    pthread_cancel(pthread_self());
    CHECK(open("/dev/null", O_RDONLY) < 0);
    return unused;
}

static void cancelled(void)
{
    pthread_t t;
    void *how;
    int ends[2];
    CHECK(pipe(ends) == 0);
    CHECK(pthread_create(&t, NULL, uses_then_ends, NULL) == 0);
    CHECK(pthread_join(t, &how) == 0 && how == PTHREAD_CANCELED && used == 1);
    CHECK(pthread_create(&t, NULL, waits_elsewhere, ends) == 0);
    CHECK(pthread_cancel(t) == 0);
    CHECK(pthread_join(t, &how) == 0 && how == PTHREAD_CANCELED);
    CHECK(pthread_create(&t, NULL, opens_elsewhere, NULL) == 0);
    CHECK(pthread_join(t, &how) == 0 && how == PTHREAD_CANCELED);
    CHECK(access(in("renamed"), F_OK) == -1 && open_new("later") >= 0);
}

/* How many numbers from 3 to below the engine's are taken. */
static int taken(void)
{
    int n = 0;
    for (int fd = 3; fd < 512; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* The same descriptor, out of the way. */
static int moved(int fd)
{
    int to = fcntl(fd, F_DUPFD, 30);
    CHECK(to >= 30 && close(fd) == 0);
    return to;
}

static _Atomic int names_stop;

/* Opens nothing itself: what it opened would be at the numbers that others use. */
static void *names_change(void *unused)
{
    for (long i = 0; !names_stop; i++) {
        CHECK(rename(in("one"), in("two")) == 0);
        CHECK(truncate(in("two"), 4096 + i % 4096) == 0);
        CHECK(rename(in("two"), in("one")) == 0);
    }
    return unused;
}

/* Numbers below the engine's are the program's: nobody else's stays there, none is
 * kept by a call that waits, and dup2 to one hits nothing of the engine's while that
 * opens and closes. */
static void numbers(void)
{
    pthread_t t;
    int own = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
    CHECK(own >= 0 && write(own, "mine", 4) == 4);
    own = moved(own);
    int before = taken();
    /* Free when the engine's threads begin. */
    CHECK(close(0) == 0);
    int fd = moved(open_new("file"));
    CHECK(ftruncate(fd, 8192) == 0 && close(open_new("one")) == 0);
    char *p = map(fd, 8192);
    p[0] = 1;
    CHECK(msync(p, 1, MS_SYNC) == 0);
    struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fcntl(fd, F_SETLK, &all) == 0);
    /* Its threads have one of these for a moment only. */
    for (int i = 0; taken() != before + 1; i++, sched_yield())
        CHECK(i < 100000);
    CHECK(pthread_create(&t, NULL, names_change, NULL) == 0);
    for (int i = 0; i < 3000; i++) {
        struct stat is, put;
        int n = i % 2 ? 0 : 20;
        /* As a shell does, which saves what is there. */
        FAILS(fcntl(n, F_DUPFD, 40), EBADF);
        FAILS(close(n), EBADF);
        CHECK(dup2(own, n) == n);
        CHECK(fstat(own, &is) == 0 && fstat(n, &put) == 0 && is.st_ino == put.st_ino);
        CHECK(dup2(own, n) == n && close(n) == 0);
        if (i % 8 == 0)
            sched_yield();
    }
    FAILS(dup2(999, 20), EBADF);
    FAILS(dup3(own, own, 0), EINVAL);
    FAILS(dup3(own, 20, 1), EINVAL);
    CHECK(dup2(own, own) == own);
    names_stop = 1;
    CHECK(pthread_join(t, NULL) == 0);
    char bytes[5] = "";
    CHECK(pread(own, bytes, 5, 0) == 4 && strcmp(bytes, "mine") == 0);
    p[0] = 2;
    CHECK(msync(p, 1, MS_SYNC) == 0);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } all[] = {
        {"until_killed", until_killed}, {"show", show},
        {"opening", opening},           {"syncing", syncing},
        {"partial_pages", partial_pages}, {"refusals", refusals},
        {"coherence", coherence},       {"aliases", aliases},
        {"private_copy", private_copy},       {"descriptors", descriptors},
        {"names", names},               {"atomic_map", atomic_map},
        {"atomic_show", atomic_show},   {"forking", forking},
        {"threads", threads},           {"shrinking", shrinking},
        {"fork_first", fork_first},     {"flags", flags},
        {"rounded", rounded},           {"two_mappings", two_mappings},
        {"durable", durable},           {"another_root", another_root},
        {"executes", executes},
        {"async_show", async_show},     {"async_until_killed", async_until_killed},
        {"forking_amid", forking_amid}, {"forking_amid_shared", forking_amid_shared},
        {"forking_shares", forking_shares}, {"sharing", sharing},
        {"fsync_of_others", fsync_of_others}, {"replaced_by_another", replaced_by_another},
        {"opening_fails", opening_fails}, {"fixed_over_a_region", fixed_over_a_region},
        {"in_a_handler", in_a_handler}, {"ways_back", ways_back},
        {"fork_amid_start", fork_amid_start}, {"fork_amid_reads", fork_amid_reads},
        {"cancelled", cancelled},       {"numbers", numbers},
    };
    if (argc != 3)
        return 2;
    dir = argv[2];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(argv[1], all[i].name) == 0) {
            all[i].run();
            return 0;
        }
    return 2;
}
