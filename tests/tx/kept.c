/* Variables, one variable of eight bytes, and logs in each encoding, that are killed at any moment.
 *
 *   kept CONFIG NODE   checks, prints "open" and the last round; then goes on for ever, and prints each
 *                      round's number after it
 *
 * A round is some sync points in a row: of two variables together, of a record in each log, of the eight
 * bytes. So after a crash each of them has the round that the eight bytes name, or the next one. */
#include <errno.h>
#include <mojim_persistent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOGS 3
#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

MOJIM_PERSISTENT static uint64_t first = 0;
MOJIM_PERSISTENT static uint64_t between[600] = {0};
MOJIM_PERSISTENT static uint64_t second = 0;
MOJIM_PERSISTENT static uint64_t rounds = 0;

struct entry {
    uint64_t number;
    unsigned char text[88];
};

static mojim_log_t *logs[LOGS];

static void fail(const char *what, int line)
{
    printf("torn: line %d: %s (%s)\n", line, what, mojim_last_error());
    exit(1);
}

static size_t make(struct entry *e, uint64_t number)
{
    e->number = number;
    memset(e->text, (int)number, sizeof e->text);
    return 8 + number % 80;
}

/* The number of the last record; 0: there is none. */
static uint64_t last_of(mojim_log_t *log)
{
    uint64_t at, number = 0;
    struct entry e, expected;
    ssize_t n;
    CHECK(mojim_log_ends(log, &at, NULL) == 0);
    while ((n = mojim_log_read(log, &at, &e, sizeof e)) >= 0) {
        CHECK(number == 0 || e.number == number + 1);
        number = e.number;
        CHECK((size_t)n == make(&expected, number) && memcmp(&e, &expected, (size_t)n) == 0);
    }
    CHECK(errno == ENOENT);
    return number;
}

static void append(mojim_log_t *log, uint64_t number)
{
    struct entry e;
    const size_t n = make(&e, number);
    uint64_t at, end;
    const uint64_t before = mojim_last_lsn();
    if (mojim_log_append(log, &e, n, NULL) == 0) {
        /* Replicated, an append is one sync point. */
        CHECK(mojim_last_lsn() == before + 1);
        return;
    }
    CHECK(errno == ENOBUFS && mojim_log_ends(log, &at, &end) == 0);
    for (const uint64_t half = at + (end - at) / 2; at < half;)
        CHECK(mojim_log_read(log, &at, &e, sizeof e) >= 0);
    CHECK(mojim_log_truncate(log, at) == 0);
    CHECK(mojim_log_append(log, &e, make(&e, number), NULL) == 0);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(argc == 3);
    mojim_t *m = mojim_attach(argv[1], argv[2], "v");
    if (!m) /* the node is not primary yet */
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    CHECK(mojim_variables(m, "kept") == 0);
    CHECK(first == second && (first == rounds || first == rounds + 1));
    CHECK(between[0] == 0 && between[599] == 0);
    for (int i = 0; i < LOGS; i++) {
        char name[] = {'l', 'o', 'g', (char)('1' + i), 0};
        CHECK((logs[i] = mojim_log_open(m, name, 8192, i + 1)));
        const uint64_t last = last_of(logs[i]);
        CHECK(last == rounds || last == rounds + 1);
        if (last == rounds + 1 && i == 0)
            CHECK(first == rounds + 1);
    }
    printf("open %lu\n", (unsigned long)rounds);
    for (;;) {
        const uint64_t n = rounds + 1;
        first = second = n;
        CHECK(mojim_variables_sync() == 0);
        for (int i = 0; i < LOGS; i++)
            if (last_of(logs[i]) < n)
                append(logs[i], n);
        CHECK(mojim_store8(&rounds, n) == 0);
        printf("%lu\n", (unsigned long)n);
    }
}
