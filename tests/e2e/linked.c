/* A program that is linked with libmojim, for tests of `mojim run`.
 *
 *     linked files PATH       opens and maps a file of the volume's directory, as Figure 1 does
 *     linked attach FILE      attaches the volume that `mojim run` names, and maps a file of it
 *
 * The file is made and has its size by being mapped. Two numbers on two pages are the same whenever
 * nothing runs: each round adds one to both, commits them together, and prints them. A third number
 * is stored to and never committed. Exits with 3 if what it finds is not so. SIGUSR1 is ignored.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <mojim.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZE 40960

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, mojim_last_error());
    perror(what);
    return 1;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    signal(SIGUSR1, SIG_IGN);
    long *n;
    if (strcmp(argv[1], "attach") == 0) {
        mojim_t *m = mojim_attach(getenv("MOJIM_CONFIG"), getenv("MOJIM_NODE"), NULL);
        if (m == NULL)
            return fail("attach");
        n = mojim_map(m, argv[2], SIZE, MOJIM_CREATE | MAP_ATOMIC);
    } else {
        int fd = open(argv[2], O_CREAT | O_RDWR, 0644);
        if (fd < 0)
            return fail("open");
        n = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (n == MAP_FAILED)
        return fail("map");
    if (n[0] != n[1000] || n[2] != 0) {
        fprintf(stderr, "found %ld, %ld and %ld\n", n[0], n[1000], n[2]);
        return 3;
    }
    for (;;) {
        n[2]++;
        n[0]++;
        n[1000]++;
        struct msync_input both[2] = {{&n[0], sizeof *n}, {&n[1000], sizeof *n}};
        if (gmsync(both, 2, MS_MOJIM) != 0)
            return fail("gmsync");
        printf("%ld\n", n[0]);
        fflush(stdout);
    }
}
