/* Figure 1 of the Mojim paper: appends a number to a log in a mapped file.
 *
 * As printed, but for the include lines, the path, and the mode that O_CREAT
 * needs. The path is the first argument, else $FIG1_FILE, else the paper's; it
 * lies in a volume's directory. Run it with
 *
 *     cc examples/fig1.c -Iinclude -Ltarget/release -lmojim -Wl,-rpath,$PWD/target/release -o fig1
 *     mojim run ... -- ./fig1 <directory of the volume>/mmapfile
 */
#define _GNU_SOURCE
#define MOJIM_NO_STRUCT /* the figure declares struct msync_input itself */
#include <fcntl.h>
#include <mojim.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : getenv("FIG1_FILE");
    int fd = open(path ? path : "/mnt/mmapfile", O_CREAT | O_RDWR, 0644);
    /* an ordinary open; the file is one of a volume's */
    void *base = mmap(NULL, 40960, PROT_WRITE, MAP_SHARED, fd, 0);
    /* 40 KiB of it; a new file grows to that */
    if (base == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    unsigned long *access_count_p = base;
    /* how often the log was used */
    unsigned long *log_size_p = base + sizeof(unsigned long);
    /* how many entries it has */
    int *log = base + 2 * sizeof(unsigned long);
    /* the entries */
    *access_count_p = *access_count_p + 1;
    /* loads and stores, as in any memory */
    if (msync(access_count_p, sizeof(unsigned long), MS_SYNC) != 0) {
        perror("msync");
        return 1;
    }
    /* the first sync point: the plain system call's interface */
    int beautiful_num = 24;
    unsigned long curr_log_pos = *log_size_p;
    log[curr_log_pos] = beautiful_num;
    *log_size_p = *log_size_p + 1;
    struct msync_input { void *address; int length; };
    struct msync_input input[2];
    input[0].address = &(log[curr_log_pos]);
    input[0].length = sizeof(int);
    input[1].address = log_size_p;
    input[1].length = sizeof(unsigned long);
    if (gmsync(input, 2, MS_MOJIM) != 0) {
        perror("gmsync");
        return 1;
    }
    /* the second: the entry and the new size, both or neither */
    return 0;
}
