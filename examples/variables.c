/* Persistent variables: a counter, and a table beside it, that keep their values.
 *
 * ./variables CONFIGURATION NODE ROUNDS: counts that many rounds further, and prints what it
 * found and what it committed. Each round changes two variables, in one sync point. */
#include <mojim_persistent.h>
#include <stdio.h>
#include <stdlib.h>

MOJIM_PERSISTENT long counter = 0;
static MOJIM_PERSISTENT long table[100] = {7};

static int failed(void)
{
    fprintf(stderr, "%s\n", mojim_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return fprintf(stderr, "usage: variables CONFIGURATION NODE ROUNDS\n"), 2;
    mojim_t *m = mojim_attach(argv[1], argv[2], NULL);
    if (!m || mojim_variables(m, "variables") != 0)
        return failed();
    printf("found %ld %ld %ld\n", counter, table[0], table[counter % 100]);
    fflush(stdout);
    long end = counter + atol(argv[3]);
    while (counter < end) {
        counter += 1;
        table[counter % 100] = counter;
        struct msync_input both[] = {
            {&counter, sizeof counter},
            {&table[counter % 100], sizeof table[0]},
        };
        if (gmsync(both, 2, MS_MOJIM) != 0)
            return failed();
        printf("committed %ld\n", counter);
        fflush(stdout);
    }
    if (mojim_detach(m) != 0)
        return failed();
    printf("end %ld\n", counter); /* an ordinary variable again */
    return 0;
}
