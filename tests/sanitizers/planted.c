/* What the sanitizers must report: `planted CONFIG WHAT`. The last is in the library, which the program
 * makes read what it must not. */
#include <mojim_tx.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t *words;

int main(int argc, char **argv)
{
    mojim_t *m = argc == 3 ? mojim_attach(argv[1], "a", "v") : NULL;
    if (!m || (words = mojim_map(m, "words", 4096, MOJIM_CREATE | MAP_ATOMIC)) == MAP_FAILED)
        return 2;
    const char *what = argv[2];
    char *p = malloc(16);
    if (strcmp(what, "overflow") == 0) {
        return ((volatile char *)p)[16 + argc - 3];
    } else if (strcmp(what, "library-overflow") == 0) {
        return mojim_tx_begin() || mojim_tx_add(p, 24) || mojim_tx_abort();
    } else if (strcmp(what, "misaligned") == 0) {
        return *(volatile int *)(p + argc - 2) != 0;
    }
    return 2;
}
