/* Programs with blocks of all kinds; see program.h. */
#include "program.h"
#include <complex.h>

#define ROUNDS 60

/* Stores of every size, at any address. */
static void sizes(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        unsigned char *p = M + next(BYTES - 16);
        *p = (unsigned char)next(256);
        unsigned at = next(500) * 8;
        *(uint16_t *)(M + at) = (uint16_t)next(65536);
        *(uint32_t *)(M + at + 4) += next(1u << 30);
        *(uint64_t *)(M + next(500) * 8) ^= (uint64_t)next(1u << 30) << 20;
        if (next(3) == 0)
            CANCEL(a);
        END(a)
    }
}

/* float, double, long double and their complexes. (The bytes of a long double that
 * hold nothing are never looked at.) */
struct numbers {
    float f[8];
    double d[8];
    float complex cf[8];
    double complex cd[8];
};
static long double wide[8];
static long double complex wide_complex[8];

static void numbers(void)
{
    struct numbers *n = (struct numbers *)M;
    for (int i = 0; i < 8; i++)
        wide[i] = 0, wide_complex[i] = 0;
    for (int i = 0; i < ROUNDS; i++) {
        int j = (int)next(8), k = (int)next(8);
#ifdef MODEL
        long double was = wide[j];
        long double complex complex_was = wide_complex[k];
        int cancelled = 1;
#endif
        BEGIN(a)
        n->f[j] = n->f[k] + (float)next(100);
        n->d[k] += n->f[j] * 0.5;
        n->cf[j] = n->cf[k] + 1.0f;
        n->cd[k] = n->cd[j] * 2 + (double)next(10) * I;
        wide[j] = wide[j] + 1 + next(9);
        wide_complex[k] = wide_complex[k] + 2 + 1.0L * I;
        if (next(4) == 0)
            CANCEL(a);
        globals[0] += (long)wide[j];
        globals[1] += (long)creall(wide_complex[k]);
#ifdef MODEL
        cancelled = 0;
#endif
        END(a)
#ifdef MODEL
        if (cancelled)
            wide[j] = was, wide_complex[k] = complex_was;
#endif
    }
}

/* Inner blocks that are cancelled, in an outer one that may be, too. */
static void nested(void)
{
    long *w = (long *)M;
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        w[next(64)] += 1;
        for (int j = 0; j < 3; j++) {
            int at = (int)next(64), how = (int)next(3);
            BEGIN(b)
            w[at] += 10;
            w[(at + 7) % 64] = w[at];
            BEGIN(c)
            w[at] += 100;
            if (how == 2)
                CANCEL(c);
            END(c)
            if (how == 1)
                CANCEL(b);
            END(b)
            w[at] ^= 5;
        }
        if (next(5) == 0)
            CANCEL(a);
        END(a)
    }
}

/* A store that the compiler calls a second one, first in an inner block. */
static void twice(void)
{
    long *w = (long *)M;
    for (int i = 0; i < ROUNDS; i++) {
        int at = (int)next(500), cancels = (int)next(2);
        BEGIN(a)
        w[at] = i;
        w[at + 1] = w[at + 1] + 1;
        BEGIN(b)
        w[at] = i * 2;
        w[at + 1] = w[at + 1] * 3;
        if (cancels)
            CANCEL(b);
        END(b)
        w[at + 2] = w[at];
        END(a)
    }
}

/* memcpy, memmove over itself, memset. */
static void blocks(void)
{
    unsigned char own[128];
    for (int i = 0; i < 128; i++)
        own[i] = (unsigned char)i;
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        unsigned at = next(BYTES - 300), n = next(128);
        memset(M + at, (int)next(256), n);
        memcpy(M + next(BYTES - 128), own, n);
        memmove(M + at + 7, M + at, n);
        memmove(M + at, M + at + 3, n);
        memcpy(M + 2048, M + at % 1024, n);
        if (next(3) == 0)
            CANCEL(a);
        END(a)
    }
}

/* Structures by value. */
struct record {
    int a;
    char name[20];
    double d;
    struct { short x, y; } inner[4];
};

static void records(void)
{
    struct record *r = (struct record *)M;
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        struct record one = r[next(40)];
        one.a++;
        one.name[next(20)]++;
        one.inner[next(4)].y = (short)next(1000);
        r[next(40)] = one;
        r[next(40)].d += 1;
        if (next(4) == 0)
            CANCEL(a);
        END(a)
    }
}

/* Fields within a word, by masks. (gcc 12 compiles bit fields in a block wrongly at -O0 and
 * -O1: it stores a field's value over its neighbours.) */
static void bits(void)
{
    uint64_t *w = (uint64_t *)M;
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        uint64_t *x = &w[next(100)];
        *x = (*x & ~7ul) | ((*x + 1) & 7);
        *x ^= (uint64_t)next(100) << 3;
        *x = (*x & 0xffffff) | (*x << 1 & ~0xfffffful);
        if (next(3) == 0)
            CANCEL(a);
        END(a)
    }
}

/* A list through the memory, by numbers of its nodes. */
struct node {
    int next, prev, value, used;
};

SAFE static int new_node(struct node *n)
{
    for (int i = 1; i < 200; i++)
        if (!n[i].used)
            return n[i].used = 1, i;
    return 0;
}

static void list(void)
{
    struct node *n = (struct node *)M;
    for (int i = 0; i < ROUNDS * 3; i++) {
        BEGIN(a)
        if (next(3)) {
            int j = new_node(n);
            if (j == 0)
                CANCEL(a);
            n[j].value = (int)next(1000);
            n[j].next = n[0].next;
            n[j].prev = 0;
            n[n[0].next].prev = j;
            n[0].next = j;
        } else if (n[0].next) {
            int j = n[0].next;
            for (int k = (int)next(10); k > 0 && n[j].next; k--)
                j = n[j].next;
            n[n[j].prev].next = n[j].next;
            n[n[j].next].prev = n[j].prev;
            n[j].used = 0;
        }
        if (next(6) == 0)
            CANCEL(a);
        END(a)
    }
}

/* A tree, by recursion. */
struct leaf {
    unsigned key, left, right;
};

SAFE static unsigned insert(struct leaf *t, unsigned at, unsigned key)
{
    if (at == 0) {
        unsigned i = ++t[0].key;
        t[i].key = key;
        return i;
    }
    if (key < t[at].key)
        t[at].left = insert(t, t[at].left, key);
    else
        t[at].right = insert(t, t[at].right, key);
    return at;
}

static void tree(void)
{
    struct leaf *t = (struct leaf *)M;
    for (int i = 0; i < ROUNDS * 2; i++) {
        unsigned key = next(10000);
        BEGIN(a)
        t[0].left = insert(t, t[0].left, key);
        if (key % 3 == 0)
            CANCEL(a);
        END(a)
    }
}

/* A hash table with open addresses and graves. */
static void table(void)
{
    int *t = (int *)M;
    for (int i = 0; i < ROUNDS * 4; i++) {
        int key = (int)next(300) + 1, removes = (int)next(3) == 0;
        BEGIN(a)
        int at = key * 31 % 512, grave = -1, steps = 0;
        while (t[at] != 0 && t[at] != key && steps++ < 512) {
            if (t[at] < 0)
                grave = at;
            at = (at + 1) % 512;
        }
        if (removes) {
            if (t[at] != key)
                CANCEL(a);
            t[at] = -1;
        } else if (t[at] != key) {
            t[grave >= 0 ? grave : at] = key;
            t[1000]++;
        }
        END(a)
    }
}

/* A ring of entries of several sizes. */
static void ring(void)
{
    unsigned *head = (unsigned *)M, *tail = head + 1;
    unsigned char *r = M + 64;
    for (int i = 0; i < ROUNDS * 2; i++) {
        BEGIN(a)
        unsigned n = next(60) + 1;
        if (next(2) && *head - *tail + n + 1 <= 1024) {
            r[(*head)++ % 1024] = (unsigned char)n;
            for (unsigned j = 0; j < n; j++)
                r[(*head)++ % 1024] = (unsigned char)next(256);
        } else if (*head != *tail) {
            unsigned len = r[(*tail)++ % 1024];
            for (unsigned j = 0; j < len; j++)
                globals[2] += r[(*tail)++ % 1024];
        }
        if (next(5) == 0)
            CANCEL(a);
        END(a)
    }
}

/* A sort that is thrown away half of the times. */
static void sort(void)
{
    int *a = (int *)M;
    for (int i = 0; i < 12; i++) {
        BEGIN(a)
        for (int j = 0; j < 40; j++)
            a[j] = (int)next(1000) + a[j] / 2;
        for (int j = 1; j < 40; j++)
            for (int k = j; k > 0 && a[k] < a[k - 1]; k--) {
                int x = a[k];
                a[k] = a[k - 1];
                a[k - 1] = x;
            }
        if (i % 2)
            CANCEL(a);
        END(a)
    }
}

/* Calls by pointer. */
#ifdef MODEL
typedef void change(long *);
#else
typedef void change(long *) __attribute__((transaction_safe));
#endif
SAFE static void adds(long *p) { *p += 3; }
SAFE static void doubles(long *p) { *p *= 2; }
SAFE static void turns(long *p) { *p = ~*p; }
static change *volatile changes_there[] = {adds, doubles, turns};

static void pointers(void)
{
    long *w = (long *)M;
    for (int i = 0; i < ROUNDS; i++) {
        change *f = changes_there[next(3)], *g = changes_there[next(3)];
        BEGIN(a)
        f(&w[next(100)]);
        g(&w[next(100)]);
        if (next(4) == 0)
            CANCEL(a);
        END(a)
    }
}

/* Memory from malloc in a block. */
struct link {
    struct link *next;
    long value;
};

static void allocates(void)
{
    long *w = (long *)M;
    for (int i = 0; i < ROUNDS; i++) {
        int cancels = (int)next(3) == 0;
#ifdef MODEL
        struct link *first = NULL;
#endif
        BEGIN(a)
#ifndef MODEL
        struct link *first = NULL;
#endif
        for (int j = 0; j < 5; j++) {
            struct link *l = (struct link *)malloc(sizeof *l);
            if (l) {
                l->value = (long)next(100);
                l->next = first;
                first = l;
            }
        }
        struct link *l = first;
        while (l) {
            struct link *then = l->next;
            w[l->value] += l->value;
            free(l);
            l = then;
        }
        long *zero = (long *)calloc(4, sizeof *zero);
        if (zero)
            w[200] += zero[2] + 1;
        free(zero);
        if (cancels)
            CANCEL(a);
        END(a)
    }
}

/* Reads of what is stored to later, again and again. */
static void read_for_write(void)
{
    long *w = (long *)M;
    for (int i = 0; i < ROUNDS * 2; i++) {
        unsigned at = next(500);
        BEGIN(a)
        long x = w[at];
        w[at] = x + 1;
        x = w[at];
        if (x % 3 == 0)
            w[at + 1] = x;
        w[at] = w[at + 1] + x;
        if (i % 4 == 0)
            CANCEL(a);
        END(a)
    }
}

/* A product of matrices, in place. */
static void matrix(void)
{
    int (*m)[8] = (int (*)[8])M;
    for (int i = 0; i < 10; i++) {
        BEGIN(a)
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < 8; k++)
                m[j][k] += (int)next(5);
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < 8; k++) {
                int sum = 0;
                for (int l = 0; l < 8; l++)
                    sum += (m[j][l] * m[l][k]) & 1023;
                m[8 + j][k] = sum;
            }
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < 8; k++)
                m[j][k] = m[8 + j][k];
        if (i % 3 == 2)
            CANCEL(a);
        END(a)
    }
}

/* Transfers; those that an account cannot pay are cancelled behind the stores. */
static void bank(void)
{
    long *account = (long *)M;
    BEGIN(begin)
    for (int i = 0; i < 32; i++)
        account[i] = 100;
    END(begin)
    for (int i = 0; i < ROUNDS * 4; i++) {
        unsigned from = next(32), to = next(32);
        long sum = (long)next(80);
        BEGIN(a)
        account[from] -= sum;
        account[to] += sum;
        if (account[from] < 0)
            CANCEL(a);
        END(a)
    }
    for (int i = 0; i < 32; i++)
        globals[3] += account[i];
}

/* Characters, one by one. */
static void text(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        const char *word = i % 2 ? "persistent" : "memory";
        BEGIN(a)
        unsigned char *p = M + next(4000);
        for (int j = 0; word[j]; j++)
            p[j] = (unsigned char)(word[j] ^ (p[j] & 32));
        if (next(4) == 0)
            CANCEL(a);
        END(a)
    }
}

/* Vectors. */
typedef float four __attribute__((vector_size(16)));
typedef long pair __attribute__((vector_size(16)));

static void vectors(void)
{
    four *f = (four *)M;
    pair *p = (pair *)(M + 2048);
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        unsigned j = next(100), k = next(100);
        f[j] = f[k] + 1.5f;
        p[j] ^= p[k] + (long)next(100);
        p[k] = p[j];
        if (next(3) == 0)
            CANCEL(a);
        END(a)
    }
}

/* Levels by recursion. */
#ifdef MODEL
#define RECURSIVE
#else
#define RECURSIVE __attribute__((transaction_safe, noinline))
#endif
RECURSIVE static void deeper(int n)
{
    long *w = (long *)M;
    BEGIN(a)
    w[n] += n;
    w[n + 1] += 1;
    if (n < 20)
        deeper(n + 1);
    w[n + 2] ^= w[n];
    if (w[100] % 7 == n % 7)
        CANCEL(a);
    END(a)
}

static void deep(void)
{
    for (int i = 0; i < 20; i++) {
        BEGIN(a)
        ((long *)M)[100] = (long)next(1000);
        deeper(0);
        END(a)
    }
}

/* Variables of the program's own: taken back as the memory is. */
static void own(void)
{
    long *kept = &globals[12];
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        globals[4 + next(8)] += i;
        globals[0]++;
        kept[next(4)] += globals[0];
        ((long *)M)[next(100)] = globals[0];
        if (next(2))
            CANCEL(a);
        globals[1] += 2;
        END(a)
        globals[2] += 1;
    }
}

/* A loop of blocks without a cancel, which the compiler may treat in its own way. */
static void plain(void)
{
    long *w = (long *)M;
    for (int i = 0; i < ROUNDS; i++) {
        BEGIN(a)
        w[i % 50] = w[(i + 1) % 50] + i;
        globals[0] += w[i % 50];
        END(a)
    }
}

const struct named programs[] = {
    {"sizes", sizes}, {"numbers", numbers}, {"nested", nested}, {"twice", twice},
    {"blocks", blocks}, {"records", records}, {"bits", bits}, {"list", list},
    {"tree", tree}, {"table", table}, {"ring", ring}, {"sort", sort},
    {"pointers", pointers}, {"allocates", allocates}, {"read_for_write", read_for_write},
    {"matrix", matrix}, {"bank", bank}, {"text", text}, {"vectors", vectors},
    {"deep", deep}, {"own", own}, {"plain", plain}, {NULL, NULL},
};
