/* Threads whose transactions are killed at any moment.
 *
 *   crash CONFIG NODE run [halves]   prints a line when it has begun, and goes on until it is killed
 *   crash CONFIG NODE check          each thread's transactions are there whole; prints "nodes" and how
 *                                    many blocks there are beside one
 *   crash CONFIG NODE                checks, prints "open" and the first thread's number; then all threads
 *                                    go on, and the first one prints each number after its commit
 *
 * A transaction of a thread sets its words, which lie in several pages, to the next number, puts a
 * block with the number into its list, and frees the block that is 8 behind. With `halves` (a
 * mutation) it is committed in two. */
#define _GNU_SOURCE
#include <mojim_tx.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 3
#define WORDS 12
#define STRIDE 700
#define KEPT 8

#define CHECK(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    fprintf(stderr, "line %d: %s (%s)\n", line, what, mojim_last_error());
    _exit(1);
}

struct node {
    struct node *next;
    uint64_t number;
    char text[48];
};

struct mine {
    struct node *first;
    uint64_t words[WORDS * STRIDE];
};

static struct mine *all[THREADS];
static int halves;

static void text_of(char *to, int thread, uint64_t number)
{
    snprintf(to, 48, "transaction %lu of thread %d", (unsigned long)number, thread);
}

static void step(int thread, struct mine *m, uint64_t n, int aborts)
{
    struct node *e = NULL;
    CHECK(mojim_tx_begin() == 0);
    for (int i = 0; i < WORDS; i++) {
        CHECK(mojim_tx_set(&m->words[i * STRIDE], n) == 0);
        if (halves && i == WORDS / 2)
            CHECK(mojim_tx_commit() == 0 && mojim_tx_begin() == 0);
    }
    CHECK(mojim_pmalloc(NULL, sizeof *e, (void **)&e) == 0);
    e->number = n;
    text_of(e->text, thread, n);
    e->next = m->first;
    CHECK(mojim_tx_add(&m->first, sizeof m->first) == 0);
    m->first = e;
    struct node *last = e;
    for (int i = 1; i < KEPT && last; i++)
        last = last->next;
    if (last && last->next)
        CHECK(mojim_pfree((void **)&last->next) == 0);
    CHECK((aborts ? mojim_tx_abort() : mojim_tx_commit()) == 0);
}

static void next(int thread)
{
    struct mine *m = all[thread];
    uint64_t n = m->words[0] + 1;
    if (!halves && n % 3 == 0)
        step(thread, m, n, 1);
    step(thread, m, n, 0);
}

static void *runs(void *arg)
{
    for (;;)
        next((int)(intptr_t)arg);
    return NULL;
}

/* How many blocks it has. */
static int check(int thread, struct mine *m)
{
    uint64_t n = m->words[0];
    for (int i = 0; i < WORDS; i++)
        CHECK(m->words[i * STRIDE] == n);
    int length = 0;
    uint64_t last = n + 1;
    for (struct node *e = m->first; e; e = e->next) {
        char text[48];
        text_of(text, thread, e->number);
        CHECK(e->number < last && strcmp(e->text, text) == 0);
        CHECK(length > 0 || e->number == n);
        CHECK(mojim_usable_size(e) >= sizeof *e);
        last = e->number;
        length++;
    }
    CHECK(length <= KEPT && (n == 0 || length > 0));
    return length + 1;
}

int main(int argc, char **argv)
{
    CHECK(argc >= 3);
    halves = argc > 4;
    mojim_t *m = mojim_attach(argv[1], argv[2], "v");
    CHECK(m);
    mojim_heap_t *h = mojim_heap_open(m, "heap", 0, NULL, 0);
    CHECK(h);
    for (int i = 0; i < THREADS; i++) {
        char name[8] = {'t', (char)('0' + i)};
        if (!(all[i] = mojim_root(h, name, "mine"))) {
            CHECK(mojim_tx_begin() == 0);
            CHECK((all[i] = mojim_calloc(h, 1, sizeof *all[i])));
            CHECK(mojim_root_set(h, name, all[i], "mine") == 0);
            CHECK(mojim_tx_commit() == 0);
        }
    }
    int blocks = 0;
    if (argc == 3 || strcmp(argv[3], "check") == 0)
        for (int i = 0; i < THREADS; i++)
            blocks += check(i, all[i]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    pthread_t t[THREADS];
    if (argc == 3) {
        printf("open %lu\n", (unsigned long)all[0]->words[0]);
        for (int i = 1; i < THREADS; i++)
            CHECK(pthread_create(&t[i], NULL, runs, (void *)(intptr_t)i) == 0);
        for (;;) {
            next(0);
            printf("%lu\n", (unsigned long)all[0]->words[0]);
        }
    }
    if (strcmp(argv[3], "check") == 0) {
        printf("nodes %d\n", blocks - 1);
        return mojim_detach(m) != 0;
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&t[i], NULL, runs, (void *)(intptr_t)i) == 0);
    puts("running");
    pthread_join(t[0], NULL);
    return 1;
}
