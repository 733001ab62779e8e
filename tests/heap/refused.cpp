// What cannot persist is refused when it is compiled: with -DCASE=N the compiler says so.
#include <mojim.hpp>

#include <filesystem>
#include <memory_resource>
#include <mutex>
#include <queue>
#include <shared_mutex>
#include <thread>

struct Virtual {
    virtual ~Virtual() {}
};
#if CASE == 0
using T = mojim::map<mojim::string, mojim::unordered_map<mojim::string, long>>; // This one persists.
template <class U> struct Stateless : std::allocator<U> {
    template <class V> struct rebind {
        using other = Stateless<V>;
    };
};
struct Known : Virtual {};
template <> struct mojim::persists<Known> : std::true_type {};
static_assert(!mojim::persists<std::vector<int, Stateless<int>>>::value);
static_assert(!mojim::persists<std::pmr::vector<int>>::value);
static_assert(mojim::persists<mojim::vector<Known>>::value);

template <class... T> constexpr bool all_persist = (mojim::persists<T>::value && ...);
template <class... T> constexpr bool none_persists = !(mojim::persists<T>::value || ...);
using F = void (*)();
using Less = bool (*)(int, int);
struct Own {
    bool operator()(int a, int b) const { return a < b; }
};
static_assert(all_persist<int, const int, volatile int, int *, int[3], const int[3], Own, std::pair<const int, int>,
                          std::tuple<int, mojim::string>, std::array<mojim::string, 2>, std::optional<int>,
                          std::variant<int, mojim::string>, std::atomic<int>, const mojim::string,
                          mojim::set<int, Own>, mojim::map<int, std::array<int *, 2>>,
                          std::priority_queue<int, mojim::vector<int>>, mojim::unordered_map<int, mojim::string>,
                          mojim::unordered_set<mojim::string>, mojim::vector<bool>, mojim::deque<mojim::list<int>>>);
static_assert(none_persists<Virtual, mojim::vector<Virtual>, F, int (Virtual::*)(), F[3], const F, int &, std::array<F, 3>, std::atomic<F>,
                            mojim::vector<F>, mojim::map<int, F>, mojim::map<int, F const>>);
static_assert(none_persists<mojim::set<int, Less>, mojim::map<int, int, Less>, mojim::set<int, std::function<bool(int, int)>>,
                            mojim::unordered_set<int, std::size_t (*)(int)>, mojim::unordered_map<int, int, std::hash<int>, Less>>);
static_assert(none_persists<std::array<std::string, 2>, std::optional<std::string>, std::tuple<int, std::string>,
                            std::variant<int, std::string>, std::filesystem::path, std::any, std::priority_queue<int>,
                            mojim::vector<std::array<std::string, 1>>, mojim::unordered_map<int, std::string>,
                            std::pair<const int, std::string>, const std::string, std::string[2], const std::string[2]>);
static_assert(none_persists<std::mutex, std::recursive_mutex, std::timed_mutex, std::recursive_timed_mutex, std::shared_mutex,
                            std::shared_timed_mutex, std::unique_lock<std::mutex>, std::condition_variable,
                            std::condition_variable_any, std::thread, std::future<int>, std::shared_future<int>,
                            std::promise<int>, std::packaged_task<int()>>);
static_assert(none_persists<const std::function<void()>, std::pair<const std::function<void()>, int>, std::reference_wrapper<int>,
                            std::function<void()>, mojim::map<int, std::shared_ptr<int>>, std::pair<int, std::string>, std::map<int, int>,
                            const std::shared_ptr<int>, std::weak_ptr<int>, volatile std::mutex, std::exception_ptr,
                            std::initializer_list<int>, std::string_view, std::unique_ptr<int>>);
Known *known(mojim::heap &h) { return h.find<Known>("k"); }

// Members of aggregates, at any depth.
template <class... T> constexpr bool all_deep = (mojim::detail::all_persists<T>::value && ...);
template <class... T> constexpr bool none_deep = !(mojim::detail::all_persists<T>::value || ...);
struct Person { std::string name; int age; };
struct Kept { mojim::string name; char code[40]; double *next; };
struct Outer { Kept kept; std::array<Kept *, 4> all; int last; };
struct Tree { mojim::vector<Tree> children; Outer what; };
struct BadTree { mojim::vector<BadTree> children; Person what; };
struct Base { std::string name; };
struct Derived : Base { int more; };
struct Many { int first[3]; std::string last; };
struct Calls { int first; std::function<void()> last; };
struct Shares { std::shared_ptr<int> only; };
struct Bits { unsigned a : 3, b : 5; const mojim::string name; };
struct Either { union { int i; float f; } u; std::atomic<int> x; };
struct Maybe { std::optional<int> first; int second; };
struct Built { explicit Built(int) {} std::string name; }; // No aggregate: not seen.
struct Holder { int first; mojim::map<mojim::string, Person> all; };
struct Trusted { std::string name; };
template <> struct mojim::persists<Trusted> : std::true_type {};
struct TrustsIt { Trusted trusted; };
struct Nothing {};
struct Address { int zip; std::string street; };
struct Resident { mojim::string name; Address address; }; // The unfit one is the last of the last.
struct Later : Many {};
struct Two { int a; std::array<Address, 2> both; };
struct Row { int a; Address all[1]; };
struct One { explicit One(int) {} };
struct Full { int a[33]; One one; };
struct Guarded {
protected:
    Guarded() = default;
};
struct Guards : Guarded { int a; mojim::string s; };
struct Grid { int a[2][3]; mojim::string s; };
static_assert(none_deep<Resident, mojim::vector<Resident>, Later, Two, Row>);
static_assert(all_deep<Full, Grid>);
#ifdef __clang__
static_assert(all_deep<Guards>);
#endif
static_assert(all_deep<int, int *, Kept, const Kept, Kept[3], Outer, Tree, Bits, Either, Maybe, Built, Nothing, Trusted, TrustsIt,
                       mojim::vector<Outer>, std::pair<const int, Outer>, std::variant<int, Kept>, mojim::string>);
static_assert(none_deep<Person, const Person, Person[2], BadTree, Derived, Many, Calls, Shares, Holder, mojim::vector<Person>,
                        mojim::map<int, Many>, std::optional<Person>, std::array<Person, 2>, std::tuple<int, Person>,
                        std::variant<int, Person>, std::pair<const int, Person>, std::string>);
#elif CASE == 1
using T = Virtual;
#elif CASE == 2
using T = std::map<int, int>;
#elif CASE == 3
using T = mojim::vector<std::string>;
#elif CASE == 4
struct T { std::string name; };
#elif CASE == 5
using T = int;
void commit(const mojim::vector<int> &v) { mojim::sync(v); } // Its elements would not be committed.
#endif

T *make(mojim::heap &h) { return h.find<T>("t"); }
