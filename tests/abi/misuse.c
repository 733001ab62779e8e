/* Wrong arguments, through libmojim: each gives its errno and a text. */
#define _GNU_SOURCE
#include <errno.h>
#include <mojim.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(c)                                                               \
    do {                                                                       \
        if (!(c)) {                                                            \
            fprintf(stderr, "line %d: %s (errno %d: %s)\n", __LINE__, #c,      \
                    errno, mojim_last_error());                                \
            exit(1);                                                           \
        }                                                                      \
    } while (0)
#define FAILS(call, error)                                                     \
    CHECK((errno = 0, (long)(call) == -1 && errno == (error) && *mojim_last_error()))

static void *text_of_another_thread(void *arg)
{
    (void)arg;
    CHECK(strcmp(mojim_last_error(), "") == 0);
    CHECK(mojim_last_lsn() == 0);
    return NULL;
}

int main(int argc, char **argv)
{
    struct mojim_copy copies[3];
    struct msync_input in[40];
    char path[4096];
    pthread_t t;
    CHECK(argc == 2);
    CHECK(strcmp(mojim_last_error(), "") == 0);
    CHECK(mojim_version()[0] >= '0' && mojim_version()[0] <= '9');
    CHECK(mojim_attach(NULL, "a", NULL) == NULL && errno == EINVAL);
    CHECK(mojim_attach(argv[1], NULL, NULL) == NULL && errno == EINVAL);
    CHECK(mojim_attach("/nonexistent", "a", NULL) == NULL && errno == EINVAL);
    CHECK(strstr(mojim_last_error(), "/nonexistent"));
    CHECK(mojim_attach(argv[1], "a", "w") == NULL && errno == EINVAL);
    FAILS(mojim_detach(NULL), EINVAL);
    FAILS(mojim_finish(NULL), EINVAL);
    FAILS(mojim_directory(argv[1], "a", NULL, path, 3), ERANGE);
    FAILS(mojim_directory(argv[1], "a", NULL, NULL, 0), EINVAL);
    CHECK(mojim_directory(argv[1], "a", NULL, path, sizeof path) == (int)strlen(path));

    mojim_t *m = mojim_attach(argv[1], "a", NULL);
    CHECK(m != NULL);
    CHECK(mojim_attach(argv[1], "a", NULL) == NULL && errno == EBUSY);
    CHECK(mojim_join(argv[1], "a", NULL) == NULL && errno == EBUSY);
    CHECK(mojim_join(NULL, "a", NULL) == NULL && errno == EINVAL);
    CHECK(mojim_usable(m) == 1);
    FAILS(mojim_usable(NULL), EINVAL);
    FAILS(mojim_locks(argv[1], "a", NULL, path, 3), ERANGE);
    CHECK(mojim_locks(argv[1], "a", NULL, path, sizeof path) == (int)strlen(path));
    FAILS(mojim_map(m, NULL, 1, 0), EINVAL);
    FAILS(mojim_map(m, "none", 1, 0), ENOENT);
    FAILS(mojim_map(m, "../up", 1, MOJIM_CREATE), EINVAL);
    FAILS(mojim_map(m, "\xff", 1, MOJIM_CREATE), EINVAL);
    FAILS(mojim_map(m, "f", 0, MOJIM_CREATE), EINVAL);
    FAILS(mojim_map(m, "f", 1, MAP_SHARED), EINVAL);
    FAILS(mojim_map(NULL, "f", 1, MOJIM_CREATE), EINVAL);
    FAILS(mojim_map(m, "f", (size_t)-1, MOJIM_CREATE), EINVAL);
    FAILS(mojim_map_at(m, "f", 1, MOJIM_CREATE, -4096, NULL), EINVAL);
    FAILS(mojim_map_at(m, "f", 1, MOJIM_CREATE, 1, NULL), EINVAL);
    FAILS(mojim_map_at(m, "f", 1, MOJIM_CREATE, 0, path + 1), EINVAL);

    char *p = mojim_map(m, "f", 10000, MOJIM_CREATE);
    CHECK(p != MAP_FAILED && mojim_is_region(p) && mojim_is_region(p + 9999));
    CHECK(!mojim_is_region(NULL) && !mojim_is_region(path));
    FAILS(mojim_map(m, "f", 1, 0), EBUSY);
    FAILS(mojim_remove(m, "f"), EBUSY);
    FAILS(mojim_unmap(p, 4096), EOPNOTSUPP);
    FAILS(mojim_unmap(path, 4096), EINVAL);
    FAILS(mojim_unmap(NULL, 0), EINVAL);
    FAILS(mojim_msync(NULL, 1, MS_SYNC), ENOMEM);
    FAILS(mojim_msync(p, (size_t)-1, MS_SYNC), EINVAL);
    FAILS(mojim_msync(p + 9999, 8192, MS_SYNC), EINVAL);
    FAILS(mojim_msync(p, 1, 0), EINVAL);
    FAILS(mojim_msync(p, 1, 0x1000), EINVAL);
    FAILS(mojim_msync(p, 1, MS_SYNC | MS_ASYNC), EINVAL);
    p[7] = 7;
    CHECK(mojim_msync(p, 10000, MS_INVALIDATE) == 0 && p[7] == 7); /* not MAP_ATOMIC */
    FAILS(mojim_msync(NULL, 1, MS_INVALIDATE), ENOMEM);
    FAILS(mojim_msync(p + 9999, 8192, MS_INVALIDATE), EINVAL);
    FAILS(mojim_msync(NULL, 1, MS_ASYNC), ENOMEM);
    FAILS(mojim_fsync(m, "none"), ENOENT);
    FAILS(mojim_fsync(m, NULL), EINVAL);
    FAILS(mojim_fsync(NULL, "f"), EINVAL);
    FAILS(gmsync(NULL, 1, MS_MOJIM), EINVAL);
    FAILS(gmsync(in, -1, MS_MOJIM), EINVAL);
    FAILS(gmsync(in, 1, 0), EINVAL);
    FAILS(gmsync(in, 1, MS_MOJIM | MS_INVALIDATE), EINVAL);
    FAILS(gmsync(in, 1, MS_SYNC | MS_ASYNC), EINVAL);
    CHECK(gmsync(NULL, 0, MS_MOJIM) == 0);
    for (int i = 0; i < 40; i++) {
        in[i].address = p + 100 * i;
        in[i].length = 50;
        p[100 * i] = (char)i;
    }
    CHECK(gmsync(in, 40, MS_MOJIM) == 0);
    uint64_t lsn = mojim_last_lsn();
    CHECK(lsn > 0 && mojim_wait(m, lsn) == 0);
    FAILS(mojim_wait(m, lsn + 1000), EINVAL);
    in[39].length = 10000;
    FAILS(gmsync(in, 40, MS_MOJIM), EINVAL);
    CHECK(mojim_last_lsn() == lsn);
    in[39].length = 0;
    CHECK(gmsync(&in[39], 1, MS_MOJIM) == 0);

    CHECK(mojim_copies(m, lsn, NULL, 0) == 1);
    CHECK(mojim_copies(m, lsn, copies, 3) == 1);
    CHECK(strcmp(copies[0].node, "a") == 0 && copies[0].level == MOJIM_DISK);
    CHECK(mojim_copies(m, lsn + 1000, copies, 3) == 1 && copies[0].level == MOJIM_NONE);
    FAILS(mojim_copies(m, lsn, NULL, 1), EINVAL);
    FAILS(mojim_copies(m, lsn, copies, -1), EINVAL);

    CHECK(mojim_size(m, "f") == 10000);
    FAILS(mojim_size(m, "none"), ENOENT);
    FAILS(mojim_truncate(m, "none", 1), ENOENT);
    FAILS(mojim_truncate(m, "f", -1), EINVAL);
    CHECK(mojim_create(m, "g") == 1 && mojim_create(m, "g") == 0);
    CHECK(mojim_rename(m, "g", "h") == 0);
    FAILS(mojim_rename(m, "g", "h"), ENOENT);
    FAILS(mojim_rename(m, "h", "f"), EBUSY);
    FAILS(mojim_rename(m, "h", ""), EINVAL);
    FAILS(mojim_rename(m, "h", NULL), EINVAL);
    CHECK(mojim_truncate(m, "h", 3) == 0 && mojim_size(m, "h") == 3);
    CHECK(mojim_remove(m, "h") == 0);
    FAILS(mojim_remove(m, "h"), ENOENT);
    CHECK(mojim_settle(m) == 0);
    CHECK(pthread_create(&t, NULL, text_of_another_thread, NULL) == 0);
    CHECK(pthread_join(t, NULL) == 0);

    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        CHECK(mojim_usable(m) == 0);
        FAILS(mojim_msync(p, 1, MS_SYNC), EOPNOTSUPP);
        FAILS(gmsync(in, 1, MS_MOJIM), EOPNOTSUPP);
        FAILS(mojim_msync(p, 1, MS_ASYNC), EOPNOTSUPP);
        FAILS(mojim_msync(p, 1, MS_INVALIDATE), EOPNOTSUPP);
        FAILS(mojim_fsync(m, "f"), EOPNOTSUPP);
        FAILS(mojim_map(m, "g", 1, MOJIM_CREATE), EOPNOTSUPP);
        FAILS(mojim_detach(m), EOPNOTSUPP);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    char *q = mojim_map(m, "atomic", 4096, MOJIM_CREATE | MAP_ATOMIC);
    CHECK(q != MAP_FAILED);
    q[0] = 1;
    q[1] = 2;
    CHECK(mojim_msync(q, 1, MS_INVALIDATE) == 0 && q[0] == 0 && q[1] == 2);
    in[0].address = q;
    in[0].length = 2;
    lsn = mojim_last_lsn();
    CHECK(gmsync(in, 1, MS_MOJIM | MS_ASYNC) == 0 && mojim_last_lsn() > lsn);
    CHECK(mojim_wait(m, mojim_last_lsn()) == 0);
    q[1] = 3;
    CHECK(mojim_msync(q, 4096, MS_INVALIDATE) == 0 && q[0] == 0 && q[1] == 2);
    q[1] = 0;
    CHECK(mojim_fsync(m, "atomic") == 0);
    q[0] = 1;
    CHECK(mojim_msync(q, 4096, MS_INVALIDATE) == 0 && q[0] == 0 && q[1] == 0);
    q[0] = 1;
    CHECK(mojim_unmap(q, 4096) == 0);
    q = mojim_map(m, "atomic", 0, MOJIM_RDONLY);
    CHECK(q != MAP_FAILED && q[0] == 0);
    CHECK(mojim_msync(q, 4096, MS_SYNC) == 0);
    CHECK(mojim_msync(q, 4096, MS_INVALIDATE) == 0);
    FAILS(mojim_map(m, "atomic2", 4096, MOJIM_RDONLY | MOJIM_CREATE), EINVAL);
    p[5] = 77;
    /* its bytes outlive it, in memory of ours */
    FAILS(mojim_leave_memory(p + 4096), EINVAL);
    FAILS(mojim_leave_memory(path), EINVAL);
    CHECK(mojim_leave_memory(p) == 0);
    CHECK(mojim_detach(m) == 0);
    CHECK(!mojim_is_region(p) && !mojim_is_region(q));
    CHECK(p[5] == 77 && p[3900] == 39);
    p[5] = 78;
    FAILS(mojim_leave_memory(p), EINVAL);
    FAILS(mojim_msync(p, 1, MS_SYNC), ENOMEM);

    m = mojim_attach(argv[1], "a", "v");
    CHECK(m != NULL);
    p = mojim_map(m, "f", 0, 0);
    CHECK(p != MAP_FAILED && p[5] == 77 && p[3900] == 39);
    CHECK(mojim_finish(m) == 0);
    CHECK(p[5] == 77);
    puts("all refused");
    return 0;
}
