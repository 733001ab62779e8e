/* Explicit transactions, in two runs over one file: the first ends without a detach, the
 * second looks at what was committed. */
#define _GNU_SOURCE
#include <errno.h>
#include <mojim_tx.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    fprintf(stderr, "line %d: %s (%s)\n", line, what, mojim_last_error());
    _exit(1);
}

static uint64_t *words;
static int calls[8], n_calls;

static void called(void *arg)
{
    calls[n_calls++] = (int)(intptr_t)arg;
}

static void one_level(void)
{
    CHECK(mojim_tx_commit() == -1 && errno == EINVAL);
    CHECK(mojim_tx_abort() == -1 && errno == EINVAL);
    CHECK(mojim_tx_add(words, 8) == -1 && errno == EINVAL);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_is_open() == 1);
    CHECK(mojim_tx_add(NULL, 8) == -1 && errno == EINVAL);
    CHECK(mojim_tx_set(&words[0], 1) == 0);
    CHECK(mojim_tx_add(&words[1], 16) == 0);
    words[1] = 2, words[2] = 3;
    words[3] = 99; /* not added: not committed */
    CHECK(mojim_tx_commit() == 0 && mojim_tx_is_open() == 0);

    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_set(&words[0], 7) == 0 && mojim_tx_set(&words[0], 8) == 0);
    CHECK(mojim_tx_abort() == 0 && words[0] == 1 && words[3] == 99);

    /* With nothing to commit. */
    CHECK(mojim_tx_begin() == 0 && mojim_tx_commit() == 0);
}

static void levels(void)
{
    uint64_t own = 5;
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_set(&words[8], 1) == 0 && mojim_tx_set(&own, 6) == 0);
    CHECK(mojim_tx_on_commit(called, (void *)1) == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_is_open() == 2);
    CHECK(mojim_tx_set(&words[8], 2) == 0 && mojim_tx_set(&words[9], 2) == 0);
    CHECK(mojim_tx_on_commit(called, (void *)2) == 0);
    CHECK(mojim_tx_on_abort(called, (void *)3) == 0);
    CHECK(mojim_tx_abort() == 0 && words[8] == 1 && words[9] == 0);
    CHECK(n_calls == 1 && calls[0] == 3);
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_set(&words[10], 4) == 0 && mojim_tx_on_commit(called, (void *)4) == 0);
    CHECK(mojim_tx_commit() == 0);
    CHECK(mojim_tx_commit() == 0 && own == 6);
    CHECK(n_calls == 3 && calls[1] == 1 && calls[2] == 4);

    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&own, 9) == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&words[10], 9) == 0);
    CHECK(mojim_tx_commit() == 0 && mojim_tx_abort() == 0);
    CHECK(own == 6 && words[10] == 4);
}

/* Larger than the log's first room, and than what is sent without a look. */
static void large(void)
{
    char *p = (char *)&words[4096];
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_add(p, 100000) == 0);
    memset(p, 1, 100000);
    CHECK(mojim_tx_abort() == 0 && p[0] == 0 && p[99999] == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_add_new(p + 1, 99998) == 0);
    memset(p, 2, 100000);
    CHECK(mojim_tx_commit() == 0);
    CHECK(mojim_tx_begin() == 0);
    for (int i = 0; i < 3000; i++)
        CHECK(mojim_tx_set(&words[100 + i % 1000], (uint64_t)i) == 0);
    CHECK(mojim_tx_commit() == 0);
}

/* Adds a frame that is gone before the abort. */
__attribute__((noinline)) static void adds_its_frame(void)
{
    uint64_t frame[512];
    memset(frame, 0x41, sizeof frame);
    CHECK(mojim_tx_add(frame, sizeof frame) == 0 && mojim_tx_set(&words[8], frame[0]) == 0);
}

/* An abort wrote what such a frame had had into its own frames. */
static void dead_frames(void)
{
    uint64_t own = 5;
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&own, 6) == 0);
#ifndef __SANITIZE_ADDRESS__ /* that has frames elsewhere, and reports one that is used when it is gone */
    adds_its_frame();
#endif
    CHECK(mojim_tx_abort() == 0 && own == 5 && words[8] == 1);
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_add_new(words, SIZE_MAX / 4) == -1);
    CHECK(mojim_tx_abort() == 0);
}

/* Each thread's commits have its own bytes only: the other half of each pair of words is
 * in a transaction that is never committed. */
static void *thread(void *arg)
{
    uint64_t *mine = &words[40000 + 4 * (intptr_t)arg];
    for (uint64_t i = 1; i <= 300; i++) {
        CHECK(mojim_tx_begin() == 0);
        CHECK(mojim_tx_set(&mine[0], i) == 0 && mojim_tx_set(&mine[2], i) == 0);
        CHECK(mojim_tx_commit() == 0);
    }
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&mine[0], 1000) == 0);
    return NULL; /* ends with its transaction open: taken back */
}

static void threads(void)
{
    pthread_t t[3];
    for (intptr_t i = 0; i < 3; i++)
        CHECK(pthread_create(&t[i], NULL, thread, (void *)i) == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_join(t[i], NULL) == 0);
        CHECK(words[40000 + 4 * i] == 300);
    }
}

static void child(void)
{
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&words[50], 1) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(mojim_tx_begin() == -1 && errno == EOPNOTSUPP);
        CHECK(mojim_tx_commit() == -1 && errno == EOPNOTSUPP);
        CHECK(mojim_tx_abort() == 0 && words[50] == 0);
        CHECK(mojim_tx_begin() == -1 && errno == EOPNOTSUPP);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(words[50] == 1 && mojim_tx_commit() == 0);
}

static void two_volumes(const char *config)
{
    mojim_t *m = mojim_attach(config, "a", "w");
    CHECK(m);
    uint64_t *other = mojim_map(m, "f", 4096, MOJIM_CREATE | MAP_ATOMIC);
    CHECK(other != MAP_FAILED);
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_set(other, 1) == 0 && mojim_tx_set(&words[60], 1) == 0);
    CHECK(mojim_tx_commit() == -1 && errno == EINVAL && mojim_tx_is_open() == 1);
    CHECK(mojim_tx_abort() == 0 && *other == 0 && words[60] == 0);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(other, 2) == 0 && mojim_tx_commit() == 0);
    CHECK(mojim_detach(m) == 0);
}

static uint64_t *going;
static pthread_barrier_t turns;

static void *changes(void *arg)
{
    (void)arg;
    CHECK(mojim_tx_begin() == 0);
    CHECK(mojim_tx_set(going, 5) == 0 && mojim_tx_set(&words[70], 6) == 0);
    pthread_barrier_wait(&turns);
    pthread_barrier_wait(&turns);
    CHECK(mojim_tx_commit() == 0);
    return NULL;
}

/* No region goes under a transaction, the thread's own or another's. */
static void unmapped(mojim_t *m)
{
    int flags = MOJIM_CREATE | MAP_ATOMIC;
    CHECK((going = mojim_map(m, "going", 4096, flags)) != MAP_FAILED);
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&going[1], 1) == 0);
    CHECK(mojim_unmap(going, 4096) == -1 && errno == EBUSY);
    CHECK(mojim_detach(m) == -1 && errno == EBUSY);
    CHECK(mojim_tx_commit() == 0 && mojim_tx_begin() == 0 && mojim_tx_set(&words[71], 1) == 0);
    CHECK(mojim_unmap(going, 4096) == 0 && mojim_tx_commit() == 0);

    pthread_t t;
    CHECK(pthread_barrier_init(&turns, NULL, 2) == 0);
    CHECK((going = mojim_map(m, "going", 4096, flags)) != MAP_FAILED && going[1] == 1);
    CHECK(pthread_create(&t, NULL, changes, NULL) == 0);
    pthread_barrier_wait(&turns);
    CHECK(mojim_unmap(going, 4096) == -1 && errno == EBUSY);
    CHECK(strstr(mojim_last_error(), "another thread"));
    /* Other transactions go on. */
    CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&words[71], 2) == 0);
    CHECK(mojim_unmap(going, 4096) == -1 && errno == EBUSY && mojim_tx_commit() == 0);
    pthread_barrier_wait(&turns);
    CHECK(pthread_join(t, NULL) == 0 && words[70] == 6);
    CHECK(mojim_unmap(going, 4096) == 0);
    CHECK((going = mojim_map(m, "going", 4096, flags)) != MAP_FAILED && going[0] == 5);
    CHECK(mojim_unmap(going, 4096) == 0);
}

static void second_run(void)
{
    CHECK(words[0] == 1 && words[1] == 2 && words[2] == 3 && words[3] == 0);
    CHECK(words[8] == 1 && words[9] == 0 && words[10] == 4);
    char *p = (char *)&words[4096];
    CHECK(p[0] == 0 && p[1] == 2 && p[99998] == 2 && p[99999] == 0);
    for (int i = 0; i < 1000; i++)
        CHECK(words[100 + i] == (uint64_t)(2000 + i));
    for (int i = 0; i < 3; i++) {
        uint64_t *w = &words[40000 + 4 * i];
        CHECK(w[0] == 300 && w[1] == 0 && w[2] == 300 && w[3] == 0);
    }
    CHECK(words[50] == 1 && words[60] == 0 && words[70] == 6 && words[71] == 2);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    mojim_t *m = mojim_attach(argv[1], "a", "v");
    CHECK(m);
    words = mojim_map(m, "words", 1 << 20, MOJIM_CREATE | MAP_ATOMIC);
    CHECK(words != MAP_FAILED);
    if (strcmp(argv[2], "first") == 0) {
        one_level();
        levels();
        dead_frames();
        large();
        for (int i = 0; i < 3; i++)
            words[40000 + 4 * i + 1] = 5; /* between a thread's words, and nobody's */
        threads();
        child();
        two_volumes(argv[1]);
        unmapped(m);
        CHECK(mojim_tx_begin() == 0 && mojim_tx_set(&words[0], 5) == 0);
        _exit(0);
    }
    second_run();
    return mojim_detach(m) != 0;
}
