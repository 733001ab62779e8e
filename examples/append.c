/* A log: numbered records that are appended, read again, and discarded when there are many.
 *
 * ./append CONFIGURATION NODE ENCODING ROUNDS [FILE]: in a volume, or, with a FILE, in
 * persistent memory (or on tmpfs, which stands for it). ENCODING is 1, 2 or 3. */
#include <mojim_persistent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    uint64_t number;
    unsigned char text[80];
};

static int failed(void)
{
    fprintf(stderr, "%s\n", mojim_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc < 5)
        return fprintf(stderr, "usage: append CONFIGURATION NODE ENCODING ROUNDS [FILE]\n"), 2;
    mojim_t *m = NULL;
    mojim_log_t *log;
    if (argc == 5) {
        m = mojim_attach(argv[1], argv[2], NULL);
        log = m ? mojim_log_open(m, "journal", 8192, atoi(argv[3])) : NULL;
    } else {
        log = mojim_log_open_pmem(argv[5], 8192, atoi(argv[3]), 0);
    }
    if (!log)
        return failed();

    /* What is there: numbers in a row, each with a text of its own. */
    uint64_t at, number = 0, count = 0;
    struct entry e;
    ssize_t n;
    mojim_log_ends(log, &at, NULL);
    while ((n = mojim_log_read(log, &at, &e, sizeof e)) >= 0) {
        if ((number && e.number != number + 1) || n != 8 + (ssize_t)(e.number % 80))
            return fprintf(stderr, "record %llu after %llu\n", (unsigned long long)e.number,
                           (unsigned long long)number), 1;
        for (ssize_t i = 8; i < n; i++)
            if (e.text[i - 8] != (unsigned char)(e.number + i))
                return fprintf(stderr, "record %llu is torn\n", (unsigned long long)e.number), 1;
        number = e.number;
        count++;
    }
    if (errno != ENOENT)
        return failed();
    printf("found %llu records up to %llu\n", (unsigned long long)count,
           (unsigned long long)number);
    fflush(stdout);

    for (uint64_t end = number + strtoull(argv[4], NULL, 10); number < end;) {
        e.number = ++number;
        size_t bytes = 8 + number % 80;
        for (size_t i = 8; i < bytes; i++)
            e.text[i - 8] = (unsigned char)(number + i);
        if (mojim_log_append(log, &e, bytes, NULL) != 0) {
            uint64_t last;
            if (errno != ENOBUFS)
                return failed();
            /* Full: the older half goes. */
            mojim_log_ends(log, &at, &last);
            uint64_t half = at + (last - at) / 2;
            struct entry old;
            while (at < half)
                if (mojim_log_read(log, &at, &old, sizeof old) < 0)
                    return failed();
            if (mojim_log_truncate(log, at) != 0 || mojim_log_append(log, &e, bytes, NULL) != 0)
                return failed();
        }
        printf("appended %llu\n", (unsigned long long)number);
        fflush(stdout);
    }
    if (mojim_log_close(log) != 0 || (m && mojim_detach(m) != 0))
        return failed();
    return 0;
}
