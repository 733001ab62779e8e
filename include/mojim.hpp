// mojim.hpp - Mojim for C++17: RAII handles, and containers in a persistent heap.
//
// This header is the manual. It stands on mojim.h, mojim_heap.h and mojim_tx.h, which have the
// promises, limits and thread rules. It is all inline: link with -lmojim.
// Source: FAMS, Section 4.1 ("Persistent Heap and C++ STL").
//
//   mojim::volume v{"mojim.toml", "a"};
//   mojim::heap h{v, "people"};
//   auto &ages = h.root<mojim::map<mojim::string, int>>("ages");   // made if it is not there
//   mojim::atomically(h, [&] { ages["Ada"] = 36; });               // durable, replicated or undone
//
// CAVEATS FIRST
//
// 1. Every byte of a value that persists must lie in the heap. Use containers with
//    mojim::allocator (the aliases below), and keep no pointer or reference out of the heap. The
//    compiler refuses types that cannot persist, where it can see them (mojim::persists):
//      - classes with virtual functions, function pointers, references,
//      - std::function, std::shared_ptr, std::unique_ptr, std::any,
//      - mutexes, threads, futures,
//      - containers whose allocator knows no heap (std::allocator, std::pmr).
//    It also looks here:
//      - at a container's element, comparator or hash,
//      - into a pair, tuple, variant, optional or array,
//      - at members of an aggregate (a class without constructors and private members): up to its
//        first member that is an optional, and the 32nd (an array counts by its elements).
//    It does not see these:
//      - members of other classes, and unions,
//      - std::any and references in a class,
//      - the memory to which a plain pointer leads.
//    A class may fail to compile here for its own constructors. Specialise mojim::persists for it:
//    then it is not looked into.
// 2. A container that is made without an allocator, also one within another container or class,
//    has one of these heaps:
//      - the heap whose mojim::atomically, root() or make() the thread is in,
//      - elsewhere the heap that was opened first.
//    A copy is in the heap of its original. Between heaps copy elements, not containers.
//    A mojim::string on the stack that was made outside of mojim::atomically must not live on
//    after its rollback: the string's memory may be another block's then.
// 3. Layouts are the compiler's. A root keeps the name and size of its type and the standard
//    library's kind, and refuses another one. It does not see that you have changed a class's
//    members without its size.
// 4. mojim::atomically commits the whole heap, or rolls it back. root() does so, too, where it
//    makes a root. Call them from one thread at a time, under a lock of yours if there are more.
//    They wait for other threads' transactions of mojim_tx.h. Mojim gives no isolation between
//    threads.
#ifndef MOJIM_HPP
#define MOJIM_HPP

#if __cplusplus < 201703L
#error "mojim.hpp needs C++17"
#endif
#ifndef __cpp_exceptions
#error "mojim.hpp needs exceptions: it cannot be used with -fno-exceptions"
#endif

#include <any>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <initializer_list>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include <mojim.h>
#include <mojim_tx.h>

namespace mojim {

/// A call failed: its errno as the code, the C library's text as `what()`.
class error : public std::system_error {
public:
    explicit error(int number)
        : error(number, mojim_last_error()) {}
    error(int number, const char *text)
        : std::system_error(number, std::generic_category()), text_(text) {}
    const char *what() const noexcept override { return text_.c_str(); }
    /// As mojim.h lists them.
    int number() const noexcept { return code().value(); }

private:
    std::string text_;
};

namespace detail {
[[noreturn]] inline void fail() { throw error(errno); }

// An allocator that holds nothing does not know a heap (std::allocator, Boost's new_allocator). The
// allocator of std::pmr holds the address of an object with virtual functions.
template <class A, class = void>
struct knows_no_heap : std::allocator_traits<A>::is_always_equal {};
template <class A>
struct knows_no_heap<A, std::void_t<decltype(std::declval<A>().resource())>> : std::true_type {};

template <class T, class = void> struct allocates_elsewhere : std::false_type {};
template <class T>
struct allocates_elsewhere<T, std::void_t<typename T::allocator_type>>
    : knows_no_heap<typename T::allocator_type> {};

// A lock waits for threads of this run: all mutexes, and guards of them.
template <class T, class = void> struct is_lock : std::false_type {};
template <class T>
struct is_lock<T, std::void_t<decltype(std::declval<T &>().lock()), decltype(std::declval<T &>().unlock())>>
    : std::true_type {};
// Threads, condition variables.
template <class T, class = void> struct is_of_system : std::false_type {};
template <class T>
struct is_of_system<T, std::void_t<typename T::native_handle_type>> : std::true_type {};

template <class T> struct points_elsewhere : std::disjunction<is_lock<T>, is_of_system<T>> {};
template <class S> struct points_elsewhere<std::function<S>> : std::true_type {};
template <class T> struct points_elsewhere<std::reference_wrapper<T>> : std::true_type {};
template <class T> struct points_elsewhere<std::initializer_list<T>> : std::true_type {};
template <class T> struct points_elsewhere<std::shared_ptr<T>> : std::true_type {};
template <class T> struct points_elsewhere<std::weak_ptr<T>> : std::true_type {};
template <class T, class D> struct points_elsewhere<std::unique_ptr<T, D>> : std::true_type {};
template <class T> struct points_elsewhere<std::future<T>> : std::true_type {};
template <class T> struct points_elsewhere<std::shared_future<T>> : std::true_type {};
template <class T> struct points_elsewhere<std::promise<T>> : std::true_type {};
template <class S> struct points_elsewhere<std::packaged_task<S>> : std::true_type {};
template <class C, class S>
struct points_elsewhere<std::basic_string_view<C, S>> : std::true_type {};
template <> struct points_elsewhere<std::any> : std::true_type {};
template <> struct points_elsewhere<std::exception_ptr> : std::true_type {};
template <> struct points_elsewhere<std::condition_variable_any> : std::true_type {};
} // namespace detail

/// Whether a value of type T can be kept, as far as the compiler can see. Specialise it as
/// std::true_type for a type of yours that it refuses wrongly.
template <class T, class = void> struct persists;

namespace detail {
// The types that a container says it holds. (std::filesystem::path has a string_type.)
#define MOJIM_PART_(part)                                                                           \
    template <class T, class = void> struct part##_persists : std::true_type {};                    \
    template <class T> struct part##_persists<T, std::void_t<typename T::part>> : persists<typename T::part> {};
MOJIM_PART_(key_compare)
MOJIM_PART_(hasher)
MOJIM_PART_(key_equal)
MOJIM_PART_(container_type)
MOJIM_PART_(string_type)
#undef MOJIM_PART_

template <class T, class = void> struct elements_persist : std::true_type {};
template <class T>
struct elements_persist<T, std::void_t<typename T::allocator_type, typename T::value_type>>
    : persists<typename T::value_type> {};

template <class T> struct parts_persist
    : std::conjunction<elements_persist<T>, key_compare_persists<T>, hasher_persists<T>,
                       key_equal_persists<T>, container_type_persists<T>, string_type_persists<T>> {};
template <class A, class B>
struct parts_persist<std::pair<A, B>> : std::conjunction<persists<A>, persists<B>> {};
template <class... T> struct parts_persist<std::tuple<T...>> : std::conjunction<persists<T>...> {};
template <class... T> struct parts_persist<std::variant<T...>> : std::conjunction<persists<T>...> {};
template <class T> struct parts_persist<std::optional<T>> : persists<T> {};
template <class T> struct parts_persist<std::atomic<T>> : persists<T> {};
template <class T, std::size_t N> struct parts_persist<std::array<T, N>> : persists<T> {};

template <class T>
constexpr bool is_plain_pointer_out =
    std::is_member_function_pointer_v<T> ||
    (std::is_pointer_v<T> && std::is_function_v<std::remove_pointer_t<T>>);

template <class T, bool = std::is_class_v<T>> struct class_persists : std::true_type {};
template <class T>
struct class_persists<T, true>
    : std::bool_constant<!std::is_polymorphic_v<T> && !allocates_elsewhere<T>::value &&
                         !points_elsewhere<T>::value && parts_persist<T>::value> {};

// T is neither const nor volatile.
template <class T>
struct plain_persists : std::bool_constant<!std::is_reference_v<T> && !is_plain_pointer_out<T> &&
                                           class_persists<T>::value> {};
} // namespace detail

template <class T, class>
struct persists : std::conditional_t<std::is_same_v<T, std::remove_cv_t<T>>, detail::plain_persists<T>,
                                     persists<std::remove_cv_t<T>>> {};
template <class T, std::size_t N> struct persists<T[N]> : persists<T> {};

namespace detail {
// Stands for a member's value of any type, but not for that of the class that has the member.
template <class Class> struct any_value {
    template <class T, class = std::enable_if_t<!std::is_same_v<T, Class>>> operator T() const noexcept;
};
template <class T, class... Outer> struct all_persists;
// The same, for types that persist with all that they hold.
template <class Class, class... Outer> struct kept_value {
    template <class T, class = std::enable_if_t<!std::is_same_v<T, Class> &&
                                                all_persists<T, Class, Outer...>::value>>
    operator T() const noexcept;
};
// Stands for any type, but may throw where that type does not persist. Otherwise a class that does
// not persist would be filled member by member, its last ones with nothing.
template <class Class, class... Outer> struct told_value {
    template <class T, class = std::enable_if_t<!std::is_same_v<T, Class>>>
    operator T() const noexcept(all_persists<T, Class, Outer...>::value);
};

template <class T, class Value, class Numbers, class = void> struct takes_values : std::false_type {};
template <class T, class Value, std::size_t... I>
struct takes_values<T, Value, std::index_sequence<I...>, std::void_t<decltype(T{(void(I), Value{})...})>>
    : std::true_type {
    static constexpr bool throws = !noexcept(T{(void(I), Value{})...});
};

// The most values, up to n, that an aggregate takes.
template <class T, std::size_t n = 32> constexpr std::size_t members() {
    if constexpr (n == 0 || takes_values<T, any_value<T>, std::make_index_sequence<n>>::value)
        return n;
    else
        return members<T, n - 1>();
}

template <class T, bool has_members, class... Outer> struct held_persists : std::true_type {};
template <class T, class... Outer> constexpr bool members_persist() {
    // A class with protected bases and the like is no aggregate to code that does not know it.
    if constexpr (members<T>() == 0) {
        return true;
    } else {
        using numbers = std::make_index_sequence<members<T>()>;
        if constexpr (!takes_values<T, kept_value<T, Outer...>, numbers>::value)
            return false;
        else if constexpr (takes_values<T, told_value<T, Outer...>, numbers>::value)
            return takes_values<T, any_value<T>, numbers>::throws ||
                   !takes_values<T, told_value<T, Outer...>, numbers>::throws;
        else
            return true;
    }
}
template <class T, class... Outer>
struct held_persists<T, true, Outer...> : std::bool_constant<members_persist<T, Outer...>()> {};
template <class A, class B, class... Outer>
struct held_persists<std::pair<A, B>, false, Outer...>
    : std::conjunction<all_persists<A, Outer...>, all_persists<B, Outer...>> {};
template <class... T, class... Outer>
struct held_persists<std::tuple<T...>, false, Outer...> : std::conjunction<all_persists<T, Outer...>...> {};
template <class... T, class... Outer>
struct held_persists<std::variant<T...>, false, Outer...> : std::conjunction<all_persists<T, Outer...>...> {};
template <class T, class... Outer>
struct held_persists<std::optional<T>, false, Outer...> : all_persists<T, Outer...> {};
template <class T, std::size_t N, class... Outer>
struct held_persists<std::array<T, N>, false, Outer...> : all_persists<T, Outer...> {};

template <class T, class V, class... Outer> struct elements_held_persist : std::true_type {};
template <class T, class... Outer>
struct elements_held_persist<T, std::void_t<typename T::allocator_type, typename T::value_type>, Outer...>
    : all_persists<typename T::value_type, T, Outer...> {};

template <class T> struct is_array : std::false_type {};
template <class T, std::size_t N> struct is_array<std::array<T, N>> : std::true_type {};
template <class T>
constexpr bool has_members = std::is_class_v<T> && std::is_aggregate_v<T> && !is_array<T>::value;
// A type for which the program has specialised mojim::persists is not looked into.
template <class T> constexpr bool is_looked_into =
    std::is_base_of_v<plain_persists<T>, persists<T>> && persists<T>::value;

// Whether T persists with the members of all aggregates in it. Outer: the types that T is in, for a
// type may hold itself by a container.
template <class T, class... Outer>
struct all_persists
    : std::conditional_t<(std::is_same_v<T, Outer> || ...), std::true_type,
          std::conditional_t<!is_looked_into<T>, persists<T>,
              std::conjunction<elements_held_persist<T, void, Outer...>,
                               held_persists<T, has_members<T>, Outer...>>>> {};
template <class T, class... Outer> struct all_persists<const T, Outer...> : all_persists<T, Outer...> {};
template <class T, class... Outer> struct all_persists<volatile T, Outer...> : all_persists<T, Outer...> {};
template <class T, class... Outer>
struct all_persists<const volatile T, Outer...> : all_persists<T, Outer...> {};
template <class T, std::size_t N, class... Outer>
struct all_persists<T[N], Outer...> : all_persists<T, Outer...> {};
template <class T, std::size_t N, class... Outer>
struct all_persists<const T[N], Outer...> : all_persists<T, Outer...> {};

template <class T> constexpr void check_persists() {
    static_assert(!persists<T>::value || all_persists<T>::value,
                  "mojim: a member of this class, or of what it holds, points out of the heap or allocates "
                  "outside of it, and cannot persist: mojim::string in place of std::string, for example");
    static_assert(persists<T>::value || !std::is_polymorphic_v<T>,
                  "mojim: a class with virtual functions holds an address of the program, and cannot persist");
    static_assert(persists<T>::value || !allocates_elsewhere<T>::value,
                  "mojim: this container allocates outside of the heap: give it a mojim::allocator");
    static_assert(persists<T>::value,
                  "mojim: this type, or what it holds, points out of the heap or allocates outside of it, and "
                  "cannot persist: mojim::string in place of std::string, for example");
}

inline std::uint64_t hash(std::string_view text) {
    std::uint64_t h = 0xcbf29ce484222325u;
    for (unsigned char c : text)
        h = (h ^ c) * 0x100000001b3u;
    return h;
}

/// The text that a root keeps of its type: the size, the kind of standard library, a hash of the
/// whole name, and as much of the name as fits.
template <class T> std::string tag() {
    std::string_view name = __PRETTY_FUNCTION__;
    const auto from = name.find("T = ");
    if (from != name.npos)
        name.remove_prefix(from + 4);
    name = name.substr(0, name.find(';'));
    if (!name.empty() && name.back() == ']')
        name.remove_suffix(1);
    const char *library =
#if defined(_LIBCPP_VERSION)
        "libc++";
#elif defined(_GLIBCXX_DEBUG)
        "libstdc++-debug";
#elif defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
        "libstdc++-old-abi";
#elif defined(__GLIBCXX__)
        "libstdc++";
#else
        "another-library";
#endif
    char head[64];
    std::snprintf(head, sizeof head, "%zu/%zu %s %016llx ", sizeof(T), alignof(T), library,
                  static_cast<unsigned long long>(hash(name)));
    std::string all = head;
    return all.append(name.substr(0, 127 - all.size()));
}
class block;

// While an object of this type lives, containers without an allocator are made in the heap.
struct within {
    explicit within(mojim_heap_t *h) noexcept : before(mojim_heap_within(h)) {}
    ~within() { mojim_heap_within(before); }
    within(const within &) = delete;
    within &operator=(const within &) = delete;
    mojim_heap_t *before;
};
} // namespace detail

/// No memory in a heap, with the C library's text as `what()`.
class bad_alloc : public std::bad_alloc {
public:
    bad_alloc() noexcept { std::snprintf(text_, sizeof text_, "%s", mojim_last_error()); }
    const char *what() const noexcept override { return text_; }

private:
    char text_[256];
};

/// An attachment (mojim_attach). It ends with the object, which detaches. An error of that detach
/// is lost: call detach() to see it.
class volume {
public:
    /// Attaches. Throws mojim::error. `name` may be left out where the configuration has one
    /// volume.
    explicit volume(const std::string &config, const std::string &node, const std::string &name = {})
        : handle_(mojim_attach(config.c_str(), node.c_str(), name.empty() ? nullptr : name.c_str())) {
        if (!handle_)
            detail::fail();
    }
    /// Takes over a handle of the C interface, that of a primary.
    explicit volume(mojim_t *handle) noexcept : handle_(handle) {}
    volume(volume &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)), reads_(other.reads_) {}
    volume &operator=(volume &&other) noexcept {
        std::swap(handle_, other.handle_);
        std::swap(reads_, other.reads_);
        return *this;
    }
    ~volume() {
        if (handle_)
            mojim_detach(handle_);
    }
    /// An attachment for reading only, on a node that follows (mojim_attach_reader). Throws
    /// mojim::error.
    static volume reader(const std::string &config, const std::string &node, const std::string &name = {}) {
        mojim_t *m = mojim_attach_reader(config.c_str(), node.c_str(), name.empty() ? nullptr : name.c_str());
        if (!m)
            detail::fail();
        volume v(m);
        v.reads_ = true;
        return v;
    }
    /// Detaches, and throws if that fails. The volume is still attached then.
    void detach() {
        if (handle_ && mojim_detach(handle_) != 0)
            detail::fail();
        handle_ = nullptr;
    }
    mojim_t *get() const noexcept { return handle_; }

private:
    friend class heap;
    mojim_t *handle_;
    bool reads_ = false; // of reader()
};

/// A file of a volume, mapped as an array of T. The object's end unmaps it (mojim_unmap). This is
/// a sync point, unless `flags` had MAP_ATOMIC. Its errors are lost then: call unmap() to see them.
template <class T> class mapping {
    static_assert(std::is_trivially_copyable_v<T>, "mojim: a mapped file is plain bytes");

public:
    mapping(volume &v, const std::string &file, std::size_t n, int flags = MOJIM_CREATE) {
        if (n > SIZE_MAX / sizeof(T))
            throw error(EINVAL, "mojim: more elements than memory can have");
        void *p = mojim_map(v.get(), file.c_str(), n * sizeof(T), flags);
        if (p == MAP_FAILED)
            detail::fail();
        data_ = static_cast<T *>(p);
        n_ = n;
    }
    mapping(mapping &&o) noexcept : data_(std::exchange(o.data_, nullptr)), n_(o.n_) {}
    mapping &operator=(mapping &&o) noexcept {
        std::swap(data_, o.data_);
        std::swap(n_, o.n_);
        return *this;
    }
    ~mapping() {
        if (data_)
            mojim_unmap(data_, n_ * sizeof(T));
    }
    void unmap() {
        if (data_ && mojim_unmap(data_, n_ * sizeof(T)) != 0)
            detail::fail();
        data_ = nullptr;
    }
    T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return n_; }
    T &operator[](std::size_t i) const noexcept { return data_[i]; }
    T *begin() const noexcept { return data_; }
    T *end() const noexcept { return data_ + n_; }
    /// Commits n elements from the first on. If n is left out, all to the end.
    void sync(std::size_t first = 0, std::size_t n = SIZE_MAX) {
        if (first > n_ || (n != SIZE_MAX && n > n_ - first))
            throw error(EINVAL, "mojim: the mapping has fewer elements");
        if (n == SIZE_MAX)
            n = n_ - first;
        if (mojim_msync(data_ + first, n * sizeof(T), MS_SYNC) != 0)
            detail::fail();
    }

private:
    T *data_ = nullptr;
    std::size_t n_ = 0;
};

/// Commits several objects of one volume, atomically together (gmsync). It commits their own bytes,
/// so the compiler refuses an object that is not plain bytes. A container's elements lie elsewhere:
/// commit its heap.
template <class... T> void sync(const T &...objects) {
    static_assert((std::is_trivially_copyable_v<T> && ...),
                  "mojim: sync() commits an object's own bytes, and this one has others: commit its heap");
    static_assert(((sizeof(T) <= INT_MAX) && ...), "mojim: too large for gmsync: use mojim::mapping");
    msync_input all[] = {{const_cast<void *>(static_cast<const volatile void *>(std::addressof(objects))),
                          static_cast<int>(sizeof objects)}...};
    if (gmsync(all, sizeof...(objects), MS_SYNC) != 0)
        detail::fail();
}

/// A persistent heap (mojim_heap_open). It is closed with the object. With MOJIM_HEAP_EXACT only
/// transactions of mojim_tx.h change it. A container cannot, for it does not tell its stores.
class heap {
public:
    explicit heap(volume &v, const std::string &file, std::size_t capacity = 0, void *address = nullptr,
                  int flags = 0)
        : handle_(mojim_heap_open(v.get(), file.c_str(), capacity, address, flags)),
          exact_((flags & MOJIM_HEAP_EXACT) != 0), reads_(v.reads_) {
        if (!handle_)
            detail::fail();
    }
    heap(heap &&other) noexcept
        : handle_(std::exchange(other.handle_, nullptr)), exact_(other.exact_), reads_(other.reads_),
          in_block_(other.in_block_) {}
    heap &operator=(heap &&other) noexcept {
        std::swap(handle_, other.handle_);
        std::swap(exact_, other.exact_);
        std::swap(reads_, other.reads_);
        std::swap(in_block_, other.in_block_);
        return *this;
    }
    ~heap() {
        if (handle_)
            mojim_heap_close(handle_);
    }
    mojim_heap_t *get() const noexcept { return handle_; }

    /// Commits all stores in the heap (mojim_heap_sync). EINVAL within mojim::atomically, of which
    /// it would commit half.
    void sync() {
        check_outside();
        if (mojim_heap_sync(handle_) != 0)
            detail::fail();
    }
    /// Undoes all stores since the last commit (mojim_heap_rollback).
    void rollback() {
        check_outside();
        if (mojim_heap_rollback(handle_) != 0)
            detail::fail();
    }
    /// The root of this name, or null. Throws if it is of another type.
    template <class T> T *find(const std::string &name) const {
        detail::check_persists<T>();
        void *p = mojim_root(handle_, name.c_str(), detail::tag<T>().c_str());
        if (!p && errno != ENOENT)
            detail::fail();
        return static_cast<T *>(p);
    }
    /// The root of this name. If it is not there, it is made from `arguments`:
    ///   - Within mojim::atomically of this heap, or an open transaction, it is a part of that.
    ///   - Elsewhere it is committed at once, with all earlier stores in the heap (with
    ///     MOJIM_HEAP_EXACT: alone). So no rollback takes it away. If that commit fails the call
    ///     throws. The root is there then, and the next commit has it.
    template <class T, class... A> T &root(const std::string &name, A &&...arguments);
    /// Makes an object. A container in it gets the heap as its allocator's.
    template <class T, class... A> T *make(A &&...arguments);
    /// Ends an object that make() made.
    template <class T> void destroy(T *p) {
        if (p) {
            p->~T();
            if (mojim_free(p) != 0)
                detail::fail();
        }
    }
    /// Takes a root away, and ends the object.
    template <class T> void remove_root(const std::string &name) {
        if (T *p = find<T>(name)) {
            if (mojim_root_set(handle_, name.c_str(), nullptr, nullptr) != 0)
                detail::fail();
            destroy(p);
        }
    }

private:
    friend class detail::block;
    template <class T, class... A> T &make_root(const std::string &name, A &&...arguments);
    void check_outside() const {
        if (in_block_)
            throw error(EINVAL, "mojim: within mojim::atomically of this heap");
    }
    mojim_heap_t *handle_;
    bool exact_ = false;
    bool reads_ = false;
    bool in_block_ = false; // of mojim::atomically
};

/// An allocator for containers of the standard library and of Boost. It allocates in a heap, and
/// throws mojim::bad_alloc. A container keeps it. It holds the heap's address, which is the same in
/// each run. Made without arguments, it has one of these heaps:
///   - the heap whose mojim::atomically, root() or make() the thread is in,
///   - else the heap that was opened first.
template <class T> class allocator {
public:
    using value_type = T;
    // Containers written before C++11 (Google's dense hash map) ask the allocator itself for these.
    using pointer = T *;
    using const_pointer = const T *;
    using reference = std::add_lvalue_reference_t<T>;
    using const_reference = std::add_lvalue_reference_t<const T>;
    using size_type = std::size_t;
    using difference_type = std::ptrdiff_t;
    template <class U> struct rebind {
        using other = allocator<U>;
    };
    using propagate_on_container_copy_assignment = std::false_type;
    using propagate_on_container_move_assignment = std::false_type;
    using propagate_on_container_swap = std::true_type;
    using is_always_equal = std::false_type;

    allocator() : base_(mojim_heap_base(mojim_heap_of(nullptr))) {}
    allocator(const heap &h) : base_(mojim_heap_base(h.get())) {}
    template <class U> allocator(const allocator<U> &other) noexcept : base_(other.base()) {}

    T *allocate(std::size_t n) {
        if (n > SIZE_MAX / sizeof(T))
            throw std::bad_array_new_length();
        mojim_heap_t *h = mojim_heap_of(base_);
        void *p = alignof(T) > 16 ? mojim_aligned_alloc(h, alignof(T), n * sizeof(T))
                                  : mojim_malloc(h, n * sizeof(T));
        if (!p)
            throw bad_alloc();
        return static_cast<T *>(p);
    }
    /// A pointer to no block is ignored: a destructor cannot throw.
    void deallocate(T *p, std::size_t) noexcept { mojim_free(p); }
    size_type max_size() const noexcept { return PTRDIFF_MAX / sizeof(T); }
    /// The heap's address.
    void *base() const noexcept { return base_; }
    /// The copy of a container is in the same heap.
    allocator select_on_container_copy_construction() const { return *this; }

private:
    void *base_;
};

template <class T, class U> bool operator==(const allocator<T> &a, const allocator<U> &b) noexcept {
    return a.base() == b.base();
}
template <class T, class U> bool operator!=(const allocator<T> &a, const allocator<U> &b) noexcept {
    return !(a == b);
}

using string = std::basic_string<char, std::char_traits<char>, allocator<char>>;
template <class T> using vector = std::vector<T, allocator<T>>;
template <class T> using deque = std::deque<T, allocator<T>>;
template <class T> using list = std::list<T, allocator<T>>;
template <class K, class V, class C = std::less<K>>
using map = std::map<K, V, C, allocator<std::pair<const K, V>>>;
template <class K, class V, class C = std::less<K>>
using multimap = std::multimap<K, V, C, allocator<std::pair<const K, V>>>;
template <class K, class C = std::less<K>> using set = std::set<K, C, allocator<K>>;
template <class K, class V, class H = std::hash<K>, class E = std::equal_to<K>>
using unordered_map = std::unordered_map<K, V, H, E, allocator<std::pair<const K, V>>>;
template <class K, class H = std::hash<K>, class E = std::equal_to<K>>
using unordered_set = std::unordered_set<K, H, E, allocator<K>>;

template <class T, class... A> T *heap::make(A &&...arguments) {
    detail::check_persists<T>();
    detail::within here(handle_);
    void *p = alignof(T) > 16 ? mojim_aligned_alloc(handle_, alignof(T), sizeof(T))
                              : mojim_malloc(handle_, sizeof(T));
    if (!p)
        detail::fail();
    try {
        if constexpr (std::uses_allocator_v<T, allocator<char>> &&
                      std::is_constructible_v<T, A..., const allocator<char> &>)
            return ::new (p) T(std::forward<A>(arguments)..., allocator<char>(*this));
        else
            return ::new (p) T(std::forward<A>(arguments)...);
    } catch (...) {
        mojim_free(p);
        throw;
    }
}

template <class T, class... A> T &heap::make_root(const std::string &name, A &&...arguments) {
    T *p = make<T>(std::forward<A>(arguments)...);
    if (mojim_root_set(handle_, name.c_str(), p, detail::tag<T>().c_str()) != 0) {
        const error why(errno);
        destroy(p);
        throw why;
    }
    return *p;
}

template <class T, class... A> T &heap::root(const std::string &name, A &&...arguments) {
    if (T *p = find<T>(name))
        return *p;
    if (!exact_) {
        T &made = make_root<T>(name, std::forward<A>(arguments)...);
        // The caller has a reference to the root: a rollback must not end it.
        if (!in_block_ && !mojim_tx_is_open())
            sync();
        return made;
    }
    if (mojim_tx_begin() != 0)
        detail::fail();
    T *p;
    try {
        p = &make_root<T>(name, std::forward<A>(arguments)...);
    } catch (...) {
        mojim_tx_abort();
        throw;
    }
    while (mojim_tx_commit() != 0) {
        const error why(errno);
        // A transaction in doubt cannot be aborted: then the commit is tried again.
        if (mojim_tx_abort() == 0 || errno != ETIMEDOUT)
            throw why;
    }
    return *p;
}

namespace detail {
// One run of mojim::atomically.
class block {
public:
    explicit block(heap &h) : heap_(h), here_(h.get()) {
        h.check_outside();
        if (h.reads_)
            throw error(EROFS, "mojim: the heap was opened with mojim::volume::reader, to be read only");
        if (h.exact_)
            throw error(EOPNOTSUPP,
                        "mojim: a heap with MOJIM_HEAP_EXACT is changed by the transactions of mojim_tx.h");
        if (mojim_tx_is_open())
            throw error(EINVAL, "mojim: a transaction of mojim_tx.h is open");
        h.in_block_ = true;
    }
    ~block() { heap_.in_block_ = false; }
    block(const block &) = delete;
    block &operator=(const block &) = delete;
    void commit() {
        if (mojim_heap_sync(heap_.get()) != 0)
            fail();
    }
    // Called within a handler. Open transactions were begun within the block.
    [[noreturn]] void undo() {
        while (mojim_tx_is_open() && mojim_tx_abort() == 0) {
        }
        if (mojim_heap_rollback(heap_.get()) != 0)
            std::throw_with_nested(error(errno));
        throw;
    }

private:
    heap &heap_;
    within here_;
};
} // namespace detail

/// Runs `f`, then commits the heap. When this returns, all that `f` did is durable and replicated.
/// After a crash all of it is there, or none. Returns the result of `f`, a reference where that is
/// one. One thread at a time.
///   - If `f` throws, all stores in the heap since its last commit are undone, and the exception
///     goes on. If the undoing fails, a mojim::error is thrown, in which the exception is nested
///     (std::rethrow_if_nested). The stores of `f` may be there still, and the next commit commits
///     them. After EIO the heap can only be closed.
///   - If the commit fails it throws, and memory stays as `f` left it. The next one commits it.
///   - After ETIMEDOUT it may be committed already: do not do it again, but call sync() until it
///     succeeds.
///   - These errors are thrown before `f` runs. EINVAL: within itself (of the same heap), or in a
///     transaction of mojim_tx.h, also one of another heap. EOPNOTSUPP: with MOJIM_HEAP_EXACT.
///     EROFS: for a reader's heap.
template <class F> auto atomically(heap &h, F &&f) -> decltype(std::forward<F>(f)()) {
    using R = decltype(std::forward<F>(f)());
    detail::block b(h);
    auto run = [&]() -> R {
        try {
            return std::forward<F>(f)();
        } catch (...) {
            b.undo();
        }
    };
    if constexpr (std::is_void_v<R>) {
        run();
        b.commit();
    } else {
        R result = run();
        b.commit();
        return static_cast<R &&>(result);
    }
}

} // namespace mojim

/// The hash is that of a std::string. (The standard library, before that of GCC 13, hashes strings
/// of std::allocator only.)
template <> struct std::hash<mojim::string> {
    std::size_t operator()(const mojim::string &s) const noexcept {
        return std::hash<std::string_view>()({s.data(), s.size()});
    }
};

#endif
