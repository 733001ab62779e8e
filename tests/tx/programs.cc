// Programs in C++ with blocks; see program.h.
#include "program.h"

// Virtual functions, called by pointers in a block.
struct Shape {
    long *at;
    explicit Shape(long *p) : at(p) {}
    SAFE virtual long area() const { return 0; }
    SAFE virtual void grow(long by) { *at += by; }
};

struct Square : Shape {
    using Shape::Shape;
    SAFE long area() const override { return *at * *at; }
};

struct Line : Shape {
    using Shape::Shape;
    SAFE long area() const override { return at[0] + at[1]; }
    SAFE void grow(long by) override { at[1] += by * 2; }
};

static void virtuals()
{
    long *w = reinterpret_cast<long *>(M);
    for (int i = 0; i < 60; i++) {
        Square s(w + next(100));
        Line l(w + next(100));
        Shape *all[2] = {&s, &l};
        Shape *one = all[next(2)];
        BEGIN(a)
        one->grow(static_cast<long>(next(10)));
        w[200 + next(50)] += one->area() & 1023;
        if (next(3) == 0)
            CANCEL(a);
        END(a)
    }
}

// An exception that leaves a block: the block commits.
static void throws()
{
    long *w = reinterpret_cast<long *>(M);
    for (int i = 0; i < 40; i++) {
        try {
            BEGIN(a)
            w[next(100)] += 1;
            w[100]++;
            if (next(3) == 0)
                throw i;
            w[101] += 2;
            if (next(4) == 0)
                CANCEL(a);
            END(a)
        } catch (int n) {
            globals[0] += n;
        }
    }
}

// new and delete in a block, with a constructor and a destructor.
struct Item {
    long value;
    Item *next_one;
    SAFE Item(long v, Item *n) : value(v), next_one(n) {}
    SAFE ~Item() { globals[1]++; }
};

static void allocates()
{
    long *w = reinterpret_cast<long *>(M);
    for (int i = 0; i < 40; i++) {
        BEGIN(a)
        Item *first = nullptr;
        for (int j = 0; j < 6; j++)
            first = new Item(static_cast<long>(next(200)), first);
        while (first) {
            Item *then = first->next_one;
            w[first->value] += first->value;
            delete first;
            first = then;
        }
        int *many = new int[8];
        many[3] = i;
        w[300] += many[3];
        delete[] many;
        if (next(3) == 0)
            CANCEL(a);
        END(a)
    }
}

// An exception that is caught inside.
static void catches()
{
    long *w = reinterpret_cast<long *>(M);
    for (int i = 0; i < 40; i++) {
        BEGIN(a)
        unsigned at = next(100);
        try {
            w[at] += 5;
            if (at % 2)
                throw 1L;
            w[at + 1] += 7;
        } catch (...) {
            w[at + 2] += 9;
            if (at % 5 == 0)
                CANCEL(a);
        }
        w[at]++;
        END(a)
    }
}

// A template over the memory.
template <typename T> struct Stack {
    T *items;
    unsigned *count;
    SAFE void push(const T &v) { items[(*count)++ % 64] = v; }
    SAFE T pop() { return items[--*count % 64]; }
};

static void templates()
{
    Stack<double> d = {reinterpret_cast<double *>(M + 64), reinterpret_cast<unsigned *>(M)};
    Stack<short> s = {reinterpret_cast<short *>(M + 2048), reinterpret_cast<unsigned *>(M + 8)};
    for (int i = 0; i < 80; i++) {
        BEGIN(a)
        d.push(next(100) * 0.25);
        s.push(static_cast<short>(next(1000)));
        if (next(3) == 0) {
            double x = d.pop() + s.pop();
            d.push(x);
        }
        if (next(4) == 0)
            CANCEL(a);
        END(a)
    }
}

const struct named programs[] = {
    {"virtuals", virtuals}, {"throws", throws},       {"allocates_cc", allocates},
    {"templates", templates}, {"catches", catches}, {nullptr, nullptr},
};
