/* Figure 1 with libmojim itself, no interposition: the same log, the same file.
 *
 *     cc examples/log.c -Iinclude -Ltarget/release -lmojim -Wl,-rpath,$PWD/target/release -o log
 *     ./log mojim.toml a [file]
 */
#include <mojim.h>
#include <stdio.h>

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, mojim_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: %s CONFIG NODE [FILE]\n", argv[0]);
        return 2;
    }
    mojim_t *m = mojim_attach(argv[1], argv[2], NULL);
    if (m == NULL)
        return fail("attach");
    char *base = mojim_map(m, argc > 3 ? argv[3] : "mmapfile", 40960, MOJIM_CREATE);
    if (base == MAP_FAILED)
        return fail("map");
    unsigned long *access_count = (unsigned long *)(void *)base;
    unsigned long *log_size = access_count + 1;
    int *log = (int *)(void *)(access_count + 2);

    *access_count += 1;
    if (mojim_msync(access_count, sizeof *access_count, MS_SYNC) != 0)
        return fail("msync");

    int *entry = &log[*log_size];
    *entry = 24;
    *log_size += 1;
    struct msync_input both[2] = {
        {entry, sizeof *entry},
        {log_size, sizeof *log_size},
    };
    if (gmsync(both, 2, MS_MOJIM) != 0)
        return fail("gmsync");
    printf("access %lu, %lu entries, LSN %llu\n", *access_count, *log_size,
           (unsigned long long)mojim_last_lsn());
    if (mojim_detach(m) != 0)
        return fail("detach");
    return 0;
}
