/* The bank of bank.c as an ordinary program: mmap and msync, and not a word of Mojim.
 *
 *     cc examples/bank_mmap.c -o bank_mmap
 *     mojim run --config mojim.toml --name a --preload -- ./bank_mmap DIRECTORY/bank [TRANSFERS]
 *
 * where DIRECTORY is the volume's. There each msync is atomic and on both nodes when it
 * returns. On a plain file a crash between the stores of a transfer may leave half of it:
 * the kernel writes a page back whenever it likes.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ACCOUNTS = 64, OPENED_WITH = 1000 };

struct bank {
    long transfers; /* ever made; 0: not opened yet */
    long account[ACCOUNTS];
};

int main(int argc, char **argv)
{
    if (argc < 2)
        return fprintf(stderr, "usage: %s FILE [TRANSFERS]\n", argv[0]), 2;
    long todo = argc > 2 ? atol(argv[2]) : 10000;
    int fd = open(argv[1], O_RDWR | O_CREAT, 0644);
    if (fd < 0 || ftruncate(fd, sizeof(struct bank)) != 0)
        return perror(argv[1]), 1;
    struct bank *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (b == MAP_FAILED)
        return perror("mmap"), 1;
    if (b->transfers == 0) {
        for (int i = 0; i < ACCOUNTS; i++)
            b->account[i] = OPENED_WITH;
        b->transfers = 1;
        if (msync(b, sizeof *b, MS_SYNC) != 0)
            return perror("msync"), 1;
    }
    long total = 0;
    for (int i = 0; i < ACCOUNTS; i++)
        total += b->account[i];
    if (total != ACCOUNTS * OPENED_WITH)
        return printf("total %ld wrong\n", total), 1;
    printf("total %ld ok\n", total);
    fflush(stdout);
    srand((unsigned)b->transfers);
    while (todo-- > 0) {
        long money = rand() % 100;
        b->account[rand() % ACCOUNTS] -= money;
        b->account[rand() % ACCOUNTS] += money;
        b->transfers += 1;
        if (msync(b, sizeof *b, MS_SYNC) != 0)
            return perror("msync"), 1;
        if (b->transfers % 1000 == 0) {
            printf("transfer %ld\n", b->transfers);
            fflush(stdout);
        }
    }
    return 0;
}
