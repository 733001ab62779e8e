// Containers of several threads in one heap: `containers CONFIG`. Each thread changes containers of its own
// without a lock, and a map that all share under one; all of it is committed, or rolled back, in between.
#include <mojim.hpp>

#include <cstdio>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>

struct World {
    mojim::map<mojim::string, int> map;
    mojim::vector<mojim::string> vector;
    mojim::list<int> list;
    mojim::unordered_map<int, mojim::string> hashed;
    mojim::deque<double> deque;

    void step(std::mt19937 &r) {
        const mojim::string word(r() % 80, static_cast<char>('a' + r() % 26));
        const int n = static_cast<int>(r() % 100);
        switch (r() % 7) {
        case 0: map[word] += n; break;
        case 1: if (!map.empty()) map.erase(map.begin()); break;
        case 2: vector.push_back(word); if (vector.size() > 100) vector.clear(); break;
        case 3: list.push_front(n); break;
        case 4: if (list.size() > 50) list.clear(); break;
        case 5: hashed[n] = word; break;
        case 6: deque.push_back(n); if (deque.size() > 200) deque.clear(); break;
        }
    }
};

constexpr int THREADS = 3;

struct All {
    World own[THREADS];
    World shared;
};

int main(int argc, char **argv) try {
    if (argc < 2)
        return 2;
    mojim::volume v{argv[1], "a"};
    mojim::heap h{v, "worlds"};
    auto &all = h.root<All>("all");
    h.sync();
    std::mutex one;
    std::shared_mutex changes;
    auto thread = [&](int me) {
        std::mt19937 r(static_cast<unsigned>(me));
        for (int i = 0; i < 60; i++) {
            std::shared_lock<std::shared_mutex> changing(changes);
            for (int n = 0; n < 20; n++)
                all.own[me].step(r);
            std::lock_guard<std::mutex> locked(one);
            all.shared.step(r);
        }
    };
    std::vector<std::thread> threads;
    for (int me = 0; me < THREADS; me++)
        threads.emplace_back(thread, me);
    for (int i = 0; i < 20; i++) {
        std::unique_lock<std::shared_mutex> alone(changes);
        std::mt19937 r(static_cast<unsigned>(1000 + i));
        try {
            mojim::atomically(h, [&] {
                all.shared.step(r);
                if (i % 5 == 4)
                    throw i;
            });
        } catch (int) {
        }
    }
    for (auto &t : threads)
        t.join();
    h.sync();
    std::puts("well");
    return 0;
} catch (const mojim::error &e) {
    std::printf("%s\n", e.what());
    return 1;
}
