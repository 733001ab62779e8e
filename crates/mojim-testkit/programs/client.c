/* The program of the partition tests: appends numbered entries to a log in a
 * mapped file and notes each acknowledged sync point in a journal outside.
 *
 *     client append LOG JOURNAL CONTROL NODE    runs until it is ended
 *     client read LOG                           prints what LOG holds, and ends
 *
 * LOG: at 0 the number of entries and the last one's writer; from BIG on
 * a ring of large blocks, of which every eighth entry fills one; from SLOTS on
 * a slot of 64 bytes for each entry. An entry is one gmsync of all its parts,
 * so whoever reads can tell whether one is there in part. Every byte follows
 * from the entry's number and its writer, a number that no other process has.
 *
 * JOURNAL, one record a line, times of CLOCK_MONOTONIC in nanoseconds:
 *     S writer node begin end entries : writer from to , ... ;   found when it started
 *     A writer entry before after ;                              acknowledged
 *     E writer entry before after errno ;                        failed
 *     T writer what ;                                            damage found
 *
 * CONTROL: words in shared memory: 0 whether to end, 1 microseconds between two
 * entries, 8 + NODE the process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BIG = 4096, BLOCK = 8192, BLOCKS = 8, SLOTS = BIG + BLOCK * BLOCKS, SLOT = 64 };
#define CAPACITY (UINT64_C(1) << 17)
#define LENGTH (SLOTS + CAPACITY * SLOT)

struct range { void *address; int length; };

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A slot or block: number, writer, and words that follow from both. */
static void fill(uint64_t *w, size_t bytes, uint64_t n, uint64_t writer)
{
    uint64_t x = (n * UINT64_C(0x9e3779b97f4a7c15)) ^ writer;
    w[0] = n;
    w[1] = writer;
    for (size_t i = 2; i < bytes / 8; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        w[i] = x;
    }
}

static int is(const uint64_t *w, size_t bytes, uint64_t n, uint64_t writer)
{
    uint64_t want[BLOCK / 8];
    fill(want, bytes, n, writer);
    return memcmp(w, want, bytes) == 0;
}

static uint64_t *slot(char *base, uint64_t n)
{
    return (uint64_t *)(base + SLOTS + (n - 1) * SLOT);
}

static uint64_t *block(char *base, uint64_t n)
{
    return (uint64_t *)(base + BIG + n / 8 % BLOCKS * BLOCK);
}

/* Why the log is not whole entries and nothing else; null if it is. */
static const char *damage(char *base)
{
    static char why[100];
    uint64_t n = *(uint64_t *)base;
    if (n > CAPACITY)
        return "the number of entries is none";
    for (uint64_t i = 1; i <= n; i++) {
        uint64_t *s = slot(base, i);
        if (!is(s, SLOT, i, s[1])) {
            snprintf(why, sizeof why, "of %lu entries, entry %lu is not whole", n, i);
            return why;
        }
    }
    if (n > 0 && ((uint64_t *)base)[1] != slot(base, n)[1])
        return "the last entry's writer is another than the head says";
    /* Beyond the end nothing was ever committed alone. */
    for (uint64_t i = n + 1; i <= CAPACITY && i <= n + 1000; i++)
        if (slot(base, i)[0] != 0) {
            snprintf(why, sizeof why, "of %lu entries, but a part of entry %lu is there", n, i);
            return why;
        }
    for (uint64_t k = 0; k < BLOCKS; k++) {
        uint64_t i = n / 8 * 8;
        while (i > 0 && i / 8 % BLOCKS != k)
            i -= 8;
        uint64_t *b = (uint64_t *)(base + BIG + k * BLOCK);
        if (i == 0 ? b[0] != 0 : !is(b, BLOCK, i, slot(base, i)[1])) {
            snprintf(why, sizeof why, "of %lu entries, the block of entry %lu is not whole", n, i);
            return why;
        }
    }
    return NULL;
}

/* One write, so that a record is there whole or is the last. */
static void note(int fd, const char *text, size_t len)
{
    while (len > 0) {
        ssize_t n = write(fd, text, len);
        if (n < 0 && errno != EINTR)
            _exit(70);
        if (n > 0) {
            text += n;
            len -= (size_t)n;
        }
    }
}

static void note_found(int fd, char *base, uint64_t writer, int node, uint64_t begin)
{
    const char *torn = damage(base);
    char *text;
    size_t len;
    FILE *f = open_memstream(&text, &len);
    if (torn) {
        fprintf(f, "\nT %lu %s ;", writer, torn);
    } else {
        uint64_t n = *(uint64_t *)base;
        fprintf(f, "\nS %lu %d %lu %lu %lu :", writer, node, begin, now(), n);
        for (uint64_t i = 1, j; i <= n; i = j) {
            uint64_t who = slot(base, i)[1];
            for (j = i; j <= n && slot(base, j)[1] == who; j++)
                ;
            fprintf(f, " %lu %lu %lu ,", who, i, j - 1);
        }
        fprintf(f, " ;");
    }
    fputc('\n', f);
    fclose(f);
    note(fd, text, len);
    free(text);
    if (torn)
        exit(9);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "read") == 0) {
        uint64_t begin = now();
        int fd = open(argv[2], O_RDONLY);
        struct stat st;
        if (fd < 0 || fstat(fd, &st) != 0 || (uint64_t)st.st_size < LENGTH)
            return perror(argv[2]), 1;
        char *base = mmap(0, LENGTH, PROT_READ, MAP_PRIVATE, fd, 0);
        if (base == MAP_FAILED)
            return perror("mmap"), 1;
        note_found(1, base, 0, -1, begin);
        return 0;
    }
    if (argc != 6)
        return fprintf(stderr, "client append LOG JOURNAL CONTROL NODE\n"), 2;
    int (*gmsync)(struct range *, int, int) = (int (*)(struct range *, int, int))dlsym(RTLD_DEFAULT, "gmsync");
    if (!gmsync)
        return fprintf(stderr, "not under `mojim run`\n"), 2;
    int node = atoi(argv[5]);
    uint64_t begin = now(), writer = begin * 8 + (uint64_t)node;
    int journal = open(argv[3], O_WRONLY | O_CREAT | O_APPEND, 0644);
    int c = open(argv[4], O_RDWR);
    volatile uint64_t *control = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, c, 0);
    if (journal < 0 || control == MAP_FAILED)
        return perror("journal or control"), 2;
    control[8 + node] = (uint64_t)getpid();

    int fd = open(argv[2], O_RDWR | O_CREAT, 0644);
    if (fd < 0)
        return perror(argv[2]), 1;
    char *base = mmap(0, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return perror("mmap"), 1;
    note_found(journal, base, writer, node, begin);
    uint64_t *head = (uint64_t *)base;
    while (!control[0] && head[0] < CAPACITY) {
        uint64_t n = head[0] + 1;
        fill(slot(base, n), SLOT, n, writer);
        head[0] = n;
        head[1] = writer;
        struct range r[3] = { { head, 16 }, { slot(base, n), SLOT }, { block(base, n), BLOCK } };
        if (n % 8 == 0)
            fill(block(base, n), BLOCK, n, writer);
        uint64_t before = now();
        for (;;) {
            char text[160];
            int failed = gmsync(r, n % 8 == 0 ? 3 : 2, 0x100 /* MS_MOJIM */) != 0 ? errno : 0;
            uint64_t after = now();
            if (!failed) {
                note(journal, text, (size_t)sprintf(text, "\nA %lu %lu %lu %lu ;\n", writer, n, before, after));
                break;
            }
            note(journal, text, (size_t)sprintf(text, "\nE %lu %lu %lu %lu %d ;\n", writer, n, before, after, failed));
            /* In doubt: the same bytes again. Anything else is final. */
            if (failed != ETIMEDOUT)
                return fprintf(stderr, "entry %lu: %s\n", n, strerror(failed)), 1;
        }
        if (control[1])
            usleep((useconds_t)control[1]);
    }
    /* The kernel ends the mapping, and Mojim the attachment. */
    return 0;
}
