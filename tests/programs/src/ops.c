/* Operations on files of a directory, each as often as SECONDS allow: ops DIRECTORY CASE SECONDS. Prints
 * the number, the operations a second, and the median and the 99th percentile in microseconds. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, MIB = 1 << 20, SIZE = 64 << 20, MOST = 4000000, SCATTERED = 64 };

static char path[4096], *map, buffer[MIB];
static int file;
static unsigned long long state = 88172645463325252ULL;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static unsigned random_page(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % (SIZE / PAGE);
}

static void must(int ok, const char *what)
{
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void write_fsync(long n)
{
    memset(buffer, (int)n, PAGE);
    must(pwrite(file, buffer, PAGE, (off_t)random_page() * PAGE) == PAGE, "pwrite");
    must(fsync(file) == 0, "fsync");
}

static void append_fdatasync(long n)
{
    memset(buffer, (int)n, 256);
    must(pwrite(file, buffer, 256, SIZE + n * 256) == 256, "pwrite");
    must(fdatasync(file) == 0, "fdatasync");
}

static void msync_1(long n)
{
    char *p = map + (size_t)random_page() * PAGE;
    p[n % PAGE] = (char)n;
    must(msync(p, PAGE, MS_SYNC) == 0, "msync");
}

static void msync_64(long n)
{
    for (int i = 0; i < SCATTERED; i++)
        map[(size_t)random_page() * PAGE + n % PAGE] = (char)(n + i);
    must(msync(map, SIZE, MS_SYNC) == 0, "msync");
}

static void read_1m(long n)
{
    must(pread(file, buffer, MIB, n % (SIZE / MIB) * MIB) == MIB, "pread");
}

static void read_4k(long n)
{
    (void)n;
    must(pread(file, buffer, PAGE, (off_t)random_page() * PAGE) == PAGE, "pread");
}

static void write_1m(long n)
{
    must(pwrite(file, buffer, MIB, n % (SIZE / MIB) * MIB) == MIB, "pwrite");
}

static void write_4k(long n)
{
    buffer[0] = (char)n;
    must(pwrite(file, buffer, PAGE, (off_t)random_page() * PAGE) == PAGE, "pwrite");
}

static void create_fsync_rename(long n)
{
    char new[4200];
    snprintf(new, sizeof new, "%s.new", path);
    int f = open(new, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    must(f >= 0 && pwrite(f, &n, sizeof n, 0) == sizeof n && fsync(f) == 0 && close(f) == 0, new);
    must(rename(new, path) == 0, "rename");
}

static const struct {
    const char *name;
    void (*op)(long);
} cases[] = {
    {"write+fsync", write_fsync}, {"append+fdatasync", append_fdatasync},
    {"msync-1", msync_1}, {"msync-64", msync_64}, {"read-1m", read_1m}, {"read-4k", read_4k},
    {"write-1m", write_1m}, {"write-4k", write_4k}, {"create+fsync+rename", create_fsync_rename},
};

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    void (*op)(long) = NULL;
    for (size_t i = 0; argc == 4 && i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, argv[2]))
            op = cases[i].op;
    if (!op)
        return fprintf(stderr, "ops DIRECTORY CASE SECONDS\n"), 2;
    snprintf(path, sizeof path, "%s/ops", argv[1]);
    file = open(path, O_RDWR | O_CREAT, 0644);
    must(file >= 0, path);
    memset(buffer, 'x', sizeof buffer);
    if (op != create_fsync_rename) {
        for (off_t at = 0; at < SIZE; at += MIB)
            must(pwrite(file, buffer, MIB, at) == MIB, path);
        must(fsync(file) == 0, path);
        map = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        must(map != MAP_FAILED, "mmap");
        for (size_t at = 0; at < SIZE; at += PAGE)
            *(volatile char *)(map + at);
    }
    float *took = malloc(MOST * sizeof *took);
    long n = 0;
    double begin = now(), end = begin + atof(argv[3]) * 1e6, at = begin;
    while (at < end && n < MOST) {
        op(n + 1);
        double after = now();
        took[n++] = (float)(after - at);
        at = after;
    }
    qsort(took, n, sizeof *took, by_size);
    printf("%ld %.1f %.2f %.2f\n", n, n / ((at - begin) / 1e6), took[n / 2], took[n * 99 / 100]);
    unlink(path);
    return 0;
}
