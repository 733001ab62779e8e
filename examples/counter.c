/* A counter that survives: cc examples/counter.c -Iinclude -Ltarget/release -lmojim -Wl,-rpath,$PWD/target/release -o counter */
#include <mojim.h>
#include <stdio.h>

int main(void)
{
    mojim_t *m = mojim_attach("mojim.toml", "a", NULL);
    long *n = m ? mojim_map(m, "counter", sizeof *n, MOJIM_CREATE) : MAP_FAILED;
    if (n == MAP_FAILED)
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    *n += 1;
    if (mojim_msync(n, sizeof *n, MS_SYNC) != 0) /* atomic, durable, replicated */
        return fprintf(stderr, "%s\n", mojim_last_error()), 1;
    printf("run %ld\n", *n);
    return mojim_detach(m) != 0;
}
