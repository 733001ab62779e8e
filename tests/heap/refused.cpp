// What cannot persist is refused when it is compiled: with -DCASE=N the compiler says so.
#include <mojim.hpp>

#include <memory_resource>

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
Known *known(mojim::heap &h) { return h.find<Known>("k"); }
#elif CASE == 1
using T = Virtual;
#elif CASE == 2
using T = std::map<int, int>;
#elif CASE == 3
using T = mojim::vector<std::string>;
#elif CASE == 4
using T = std::function<void()>;
#elif CASE == 5
using T = mojim::map<int, std::shared_ptr<int>>;
#elif CASE == 6
using T = void (*)();
#elif CASE == 7
using T = std::mutex;
#elif CASE == 8
using T = std::pair<int, std::string>;
#elif CASE == 9
using T = mojim::vector<Virtual>;
#endif

T *make(mojim::heap &h) { return h.find<T>("t"); }
