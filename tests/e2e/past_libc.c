/* Writes a file as no library that is put before a program could see: linked statically, by system
 * calls of its own. It is told the file and what to write; says so when that is synced. With a third
 * word it waits for a byte of its input first, with a fourth below that directory as its root. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    if (argc > 4 && (chroot(argv[4]) != 0 || chdir("/") != 0))
        return perror(argv[4]), 1;
    if (argc > 3) {
        puts("waits");
        fflush(stdout);
        getchar();
    }
    long fd = syscall(SYS_openat, AT_FDCWD, argv[1], O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd < 0)
        return perror(argv[1]), 1;
    size_t n = strlen(argv[2]);
    if (syscall(SYS_write, fd, argv[2], n) != (long)n || syscall(SYS_fsync, fd) != 0)
        return perror(argv[1]), 1;
    puts("synced");
    return 0;
}
