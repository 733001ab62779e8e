/* How a program may end, without mojim_detach.
 *
 *     ends CONFIG show|exit|_exit
 *
 * Each run but `show` adds one to a counter that is never synced, in an ordinary
 * region and in one with MAP_ATOMIC, and to one that is synced with MS_ASYNC. */
#include <mojim.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long *plain;

/* Registered before the library is used: the program may store until its end. */
static void last_words(void) { plain[1] += 1; }

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, mojim_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    int shows = argc == 3 && strcmp(argv[2], "show") == 0;
    if (argc != 3 || (!shows && atexit(last_words) != 0))
        return 2;
    mojim_t *m = mojim_attach(argv[1], "a", NULL);
    if (!m)
        return failed("attach");
    plain = mojim_map(m, "plain", 20000, MOJIM_CREATE);
    long *atomic = mojim_map(m, "atomic", 20000, MOJIM_CREATE | MAP_ATOMIC);
    if (plain == MAP_FAILED || atomic == MAP_FAILED)
        return failed("map");
    if (shows) {
        printf("%ld %ld %ld %ld\n", plain[0], plain[1], atomic[0], atomic[9]);
        return mojim_detach(m) != 0;
    }
    atomic[9] += 1;
    if (mojim_msync(atomic, 20000, MS_ASYNC) != 0)
        return failed("msync");
    plain[0] += 1;
    atomic[0] += 1;
    if (strcmp(argv[2], "_exit") == 0)
        _exit(0);
    return 0;
}
