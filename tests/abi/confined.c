/* What a program can do that gives up its root or its user after it attached.
 *
 *     confined CONFIG chroot DIR | setuid
 *     confined CONFIG look        what is committed then */
#define _GNU_SOURCE
#include <mojim.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LEN = 128 << 10 };

static void check(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "%s: errno %d: %s\n", what, errno, mojim_last_error());
        exit(1);
    }
}

static void refused(int failed, int number, const char *what)
{
    check(failed && errno == number && strstr(mojim_last_error(), "attach after chroot"), what);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    mojim_t *m = mojim_attach(argv[1], "a", "v");
    check(m != NULL, "attach");
    char *at = mojim_map(m, "r", LEN, MOJIM_CREATE);
    check(at != MAP_FAILED, "map");
    if (strcmp(argv[2], "look") == 0) {
        printf("%d %d\n", at[0], mojim_create(m, "new"));
        return mojim_detach(m) != 0;
    }
    at[0] = 1;
    check(mojim_msync(at, LEN, MS_SYNC) == 0, "msync");
    int number = EACCES;
    if (strcmp(argv[2], "chroot") == 0) {
        check(chroot(argv[3]) == 0 && chdir("/") == 0, "chroot");
        number = ENOENT;
    } else {
        check(setgid(65534) == 0 && setuid(65534) == 0, "setuid");
    }
    refused(mojim_create(m, "f") < 0, number, "create");
    refused(mojim_truncate(m, "r", 2 * LEN) < 0, number, "truncate");
    refused(mojim_rename(m, "r", "s") < 0, number, "rename");
    /* What is mapped can be committed still, many logs of it. */
    for (int i = 0; i < 10; i++) {
        memset(at, i, LEN);
        check(mojim_msync(at, LEN, MS_SYNC) == 0, "msync then");
    }
    at[0] = 2;
    check(mojim_msync(at, 1, MS_SYNC) == 0, "small msync");
    puts("only names and sizes are refused");
    fflush(stdout);
    _exit(0);
}
