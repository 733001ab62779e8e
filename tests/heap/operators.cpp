// operator new and delete on a persistent heap, to be linked with suites that others wrote: MOJIM_CONFIG
// says where, the heap is made anew. A free of what is no block, or was freed, ends the process.
// suites_heap is that heap. It is open before the constructors of the suite's objects run.
#include <mojim_heap.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>

extern "C" mojim_heap_t *suites_heap() {
    static mojim_heap_t *const opened = [] {
        mojim_t *m = mojim_attach(std::getenv("MOJIM_CONFIG"), "a", nullptr);
        mojim_heap_t *h = nullptr;
        if (m && (mojim_remove(m, "operators") == 0 || errno == ENOENT))
            h = mojim_heap_open(m, "operators", 0, nullptr, 0);
        if (!h) {
            std::fprintf(stderr, "operators.cpp: %s\n", mojim_last_error());
            std::_Exit(99);
        }
        return h;
    }();
    return opened;
}

__attribute__((constructor(101))) static void first() { suites_heap(); }

static void *get(std::size_t n, std::size_t align) noexcept {
    return align > 16 ? mojim_aligned_alloc(suites_heap(), align, n) : mojim_malloc(suites_heap(), n);
}

static void *need(std::size_t n, std::size_t align) {
    for (;;) {
        if (void *p = get(n, align))
            return p;
        std::new_handler h = std::get_new_handler();
        if (!h)
            throw std::bad_alloc();
        h();
    }
}

static void give(void *p) noexcept {
    if (mojim_free(p) != 0) {
        std::fprintf(stderr, "operators.cpp: %s\n", mojim_last_error());
        std::abort();
    }
}

void *operator new(std::size_t n) { return need(n, 1); }
void *operator new[](std::size_t n) { return need(n, 1); }
void *operator new(std::size_t n, const std::nothrow_t &) noexcept { return get(n, 1); }
void *operator new[](std::size_t n, const std::nothrow_t &) noexcept { return get(n, 1); }
void operator delete(void *p) noexcept { give(p); }
void operator delete[](void *p) noexcept { give(p); }
void operator delete(void *p, std::size_t) noexcept { give(p); }
void operator delete[](void *p, std::size_t) noexcept { give(p); }
void operator delete(void *p, const std::nothrow_t &) noexcept { give(p); }
void operator delete[](void *p, const std::nothrow_t &) noexcept { give(p); }
#if __cplusplus >= 201703L
void *operator new(std::size_t n, std::align_val_t a) { return need(n, static_cast<std::size_t>(a)); }
void *operator new[](std::size_t n, std::align_val_t a) { return need(n, static_cast<std::size_t>(a)); }
void operator delete(void *p, std::align_val_t) noexcept { give(p); }
void operator delete[](void *p, std::align_val_t) noexcept { give(p); }
void operator delete(void *p, std::size_t, std::align_val_t) noexcept { give(p); }
void operator delete[](void *p, std::size_t, std::align_val_t) noexcept { give(p); }
#endif
