/* Threads that are cancelled: none of libmojim's calls ends by it. Each thread asks for
 * its own end before its call, so that any place in the call where a thread can end
 * would end it. */
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

static const char *config;
static mojim_t *m, *second;
static char *p;
static long done;
static int forked;

static long attach(void) { return (second = mojim_attach(config, "a", "w")) ? 0 : -1; }
static long attach_twice(void) { return mojim_attach(config, "a", "v") == NULL && errno == EBUSY; }
static long create(void) { return mojim_create(m, "g"); }
static long truncate_it(void) { return mojim_truncate(m, "g", 5000); }
static long rename_it(void) { return mojim_rename(m, "g", "h"); }
static long size(void) { return mojim_size(m, "h") - 5000; }
static long map(void) { return (p = mojim_map(m, "f", 100000, MOJIM_CREATE | MOJIM_SHARED)) == MAP_FAILED; }
static long sync_all(void) { return mojim_msync(p, 100000, MS_SYNC); }
static long sync_begun(void) { return mojim_msync(p, 4, MS_ASYNC); }
static long sync_some(void) { struct msync_input in = {p, 8}; p[1]++; return gmsync(&in, 1, MS_MOJIM); }
static long fsync_it(void) { p[2]++; return mojim_fsync(m, "f"); }
static long settle(void) { return mojim_settle(m); }
static long fork_it(void) { return (forked = fork()) < 0; }
static long unmap(void) { return mojim_unmap(p, 100000); }
static long remove_it(void) { return mojim_remove(m, "h"); }
static long join(void) { return mojim_join(config, "a", "nothing") != NULL; }
static long detach(void) { return mojim_detach(second); }

static struct { const char *name; long (*call)(void); long result; } calls[] = {
    {"attach", attach, 0}, {"attach twice", attach_twice, 1}, {"create", create, 1},
    {"truncate", truncate_it, 0}, {"rename", rename_it, 0}, {"size", size, 0},
    {"map", map, 0}, {"msync", sync_all, 0}, {"async", sync_begun, 0},
    {"gmsync", sync_some, 0}, {"fsync", fsync_it, 0}, {"settle", settle, 0},
    {"fork", fork_it, 0}, {"unmap", unmap, 0}, {"remove", remove_it, 0},
    {"join", join, 0}, {"detach", detach, 0},
};

static void *cancelled(void *arg)
{
    pthread_cancel(pthread_self());
    done = calls[*(int *)arg].call();
    if (forked == 0)
        _exit(0);
    pthread_testcancel();
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    config = argv[1];
    CHECK(m = mojim_attach(config, "a", "v"));
    for (int i = 0; i < (int)(sizeof calls / sizeof *calls); i++) {
        pthread_t t;
        void *how;
        int status;
        done = -2;
        forked = -1;
        CHECK(pthread_create(&t, NULL, cancelled, &i) == 0);
        CHECK(pthread_join(t, &how) == 0);
        if (how != PTHREAD_CANCELED || done != calls[i].result) {
            fprintf(stderr, "%s: %ld, %s\n", calls[i].name, done,
                    how == PTHREAD_CANCELED ? "cancelled" : "went on");
            return 1;
        }
        if (forked > 0)
            CHECK(waitpid(forked, &status, 0) == forked && status == 0);
    }
    CHECK(mojim_create(m, "last") == 1 && mojim_detach(m) == 0);
    puts("all came back");
    return 0;
}
