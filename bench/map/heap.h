// A heap in mapped memory: what the standard library's containers allocate from.
//
// All its state lies in the memory itself, so that one sync point of all of it
// commits an allocation, what was stored there, and who points to it, together.
// Pointers are plain ones: the memory must be mapped at the same address each time.
//
// Blocks of one size lie together (64 KiB at a time), so that small nodes share
// pages. A freed block is the head of its size's list.
//
// Each thread has a heap of its own, at an address of its own; nothing here synchronises
// or commits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>

class Heap {
public:
    // Where heap `number` is mapped: far from what Linux uses by itself.
    static void *address(std::size_t number)
    {
        return reinterpret_cast<void *>(0x2000'0000'0000 + (std::uintptr_t(number) << 36));
    }

    // Takes memory of `size` bytes, all zero or a heap from before, for the calling
    // thread's heap. Returns whether it was one.
    static bool open(void *memory, std::size_t size)
    {
        now = static_cast<Heap *>(memory);
        if (now->magic == known) {
            if (now->self != now || now->size != size)
                throw std::runtime_error("the heap was elsewhere, or of another size");
            return true;
        }
        now->magic = known;
        now->self = now;
        now->size = size;
        now->used = (sizeof(Heap) + slab - 1) / slab * slab;
        return false;
    }

    static Heap &get() { return *now; }

    void *allocate(std::size_t n)
    {
        Class &c = classes[class_of(n)];
        if (Free *f = c.free) {
            c.free = f->next;
            return f;
        }
        std::size_t bytes = size_of(class_of(n));
        if (c.rest < bytes) {
            std::size_t more = bytes > slab ? bytes : slab;
            if (size - used < more)
                throw std::bad_alloc();
            c.begin = reinterpret_cast<char *>(this) + used;
            c.rest = more;
            used += more;
        }
        void *p = c.begin;
        c.begin += bytes;
        c.rest -= bytes;
        return p;
    }

    void deallocate(void *p, std::size_t n)
    {
        Class &c = classes[class_of(n)];
        Free *f = static_cast<Free *>(p);
        f->next = c.free;
        c.free = f;
    }

    // What the program finds everything else from.
    void *root;

private:
    struct Free {
        Free *next;
    };
    struct Class {
        Free *free;
        char *begin; // of a slab: what was never given out
        std::size_t rest;
    };

    static constexpr std::uint64_t known = 0x6d6f6a696d686561;
    static constexpr std::size_t slab = 64 << 10;
    static constexpr std::size_t step = 16, small = 128;

    // Multiples of 16 up to 2 KiB, powers of two from there on.
    static std::size_t class_of(std::size_t n)
    {
        if (n <= step * small)
            return n == 0 ? 0 : (n - 1) / step;
        std::size_t c = small;
        while (size_of(c) < n)
            c += 1;
        return c;
    }

    static std::size_t size_of(std::size_t c)
    {
        return c < small ? (c + 1) * step : step * small << (c - small + 1);
    }

    static inline thread_local Heap *now;

    std::uint64_t magic;
    Heap *self;
    std::size_t size, used;
    Class classes[small + 40];
};

template <class T>
struct InHeap {
    using value_type = T;
    InHeap() = default;
    template <class U>
    InHeap(const InHeap<U> &)
    {
    }
    T *allocate(std::size_t n) { return static_cast<T *>(Heap::get().allocate(n * sizeof(T))); }
    void deallocate(T *p, std::size_t n) { Heap::get().deallocate(p, n * sizeof(T)); }
    template <class U>
    bool operator==(const InHeap<U> &) const
    {
        return true;
    }
    template <class U>
    bool operator!=(const InHeap<U> &) const
    {
        return false;
    }
};
