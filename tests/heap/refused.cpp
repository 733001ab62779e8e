// What cannot persist is refused when it is compiled: with -DCASE=N the compiler says so.
#include <mojim.hpp>

struct Virtual {
    virtual ~Virtual() {}
};
#if CASE == 0
using T = mojim::map<mojim::string, mojim::vector<mojim::string>>; // This one persists.
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
