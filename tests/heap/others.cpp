// Containers of Google and Boost in a heap beside twins in plain memory, with the allocators that they
// have by themselves. Arguments, rounds and what is printed are those of containers.cpp.
#include <mojim.hpp>

#include <boost/container/flat_map.hpp>
#include <boost/container/list.hpp>
#include <boost/container/map.hpp>
#include <boost/container/stable_vector.hpp>
#include <boost/container/string.hpp>
#include <boost/container/vector.hpp>
#include <google/dense_hash_map>

#include <cstdio>
#include <cstdlib>
#include <random>

namespace bc = boost::container;

struct Plain {
    template <class T> using A = bc::new_allocator<T>;
    template <class T> using G = google::libc_allocator_with_realloc<T>;
};
struct Kept {
    template <class T> using A = mojim::allocator<T>;
    template <class T> using G = mojim::allocator<T>;
};

template <class W> struct World {
    template <class T> using A = typename W::template A<T>;
    using string = bc::basic_string<char, std::char_traits<char>, A<char>>;
    google::dense_hash_map<long, long, std::hash<long>, std::equal_to<long>,
                           typename W::template G<std::pair<const long, long>>>
        dense;
    bc::vector<string, A<string>> vector;
    bc::flat_map<long, string, std::less<long>, A<std::pair<long, string>>> flat;
    bc::map<string, int, std::less<string>, A<std::pair<const string, int>>> map;
    bc::list<bc::stable_vector<int, A<int>>, A<bc::stable_vector<int, A<int>>>> list;
    unsigned long round = 0;

    World() {
        dense.set_empty_key(-1);
        dense.set_deleted_key(-2);
    }

    static string word(std::mt19937 &r) {
        return string(r() % 60, static_cast<char>('a' + r() % 26));
    }

    void step(std::mt19937 &r) {
        switch (r() % 11) {
        case 0: case 1: dense[r() % 5000] += 1; break;
        case 2: dense.erase(r() % 5000); break;
        case 3: vector.push_back(word(r)); if (vector.size() > 300) vector.erase(vector.begin(), vector.begin() + 200); break;
        case 4: if (!vector.empty()) vector.insert(vector.begin() + r() % vector.size(), word(r)); break;
        case 5: flat[r() % 500] = word(r); break;
        case 6: flat.erase(r() % 500); break;
        case 7: map[word(r)] += 1; break;
        case 8: if (!map.empty()) map.erase(map.begin()); break;
        case 9: list.emplace_front(r() % 200, static_cast<int>(r())); if (list.size() > 30) list.pop_back(); break;
        case 10: if (dense.size() > 2000) dense.clear(); break;
        }
    }

    // The same random numbers for the same round, so a round that was undone can be left out.
    void play(unsigned long number) {
        std::mt19937 r(static_cast<unsigned>(number));
        for (int n = r() % 60; n; n--)
            step(r);
        round = number;
    }
};

template <class A, class B> bool same_text(const A &a, const B &b) {
    return std::string_view(a.data(), a.size()) == std::string_view(b.data(), b.size());
}

static const char *differs(const World<Kept> &k, const World<Plain> &p) {
    auto all = [](auto &a, auto &b, auto same) { return std::equal(a.begin(), a.end(), b.begin(), b.end(), same); };
    if (!all(k.dense, p.dense, [](auto &a, auto &b) { return a == b; })) return "dense_hash_map";
    if (!all(k.vector, p.vector, [](auto &a, auto &b) { return same_text(a, b); })) return "vector";
    if (!all(k.flat, p.flat, [](auto &a, auto &b) { return a.first == b.first && same_text(a.second, b.second); })) return "flat_map";
    if (!all(k.map, p.map, [](auto &a, auto &b) { return same_text(a.first, b.first) && a.second == b.second; })) return "map";
    auto numbers = [&](auto &a, auto &b) { return all(a, b, [](int x, int y) { return x == y; }); };
    return all(k.list, p.list, numbers) ? nullptr : "list";
}

int main(int argc, char **argv) try {
    if (argc < 3)
        return 2;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    mojim::volume v{argv[1], argv[2]};
    mojim::heap h{v, "others", std::size_t{1} << 30};
    auto &kept = h.root<World<Kept>>("world");
    World<Plain> twin;
    for (unsigned long n = 1; n <= kept.round; n++)
        twin.play(n);
    if (const char *what = differs(kept, twin))
        return std::printf("%s differs after round %lu\n", what, kept.round), 1;
    std::printf("open %lu\n", kept.round);
    long left = argc > 3 ? std::atol(argv[3]) : -1;
    for (; left; left--) {
        const unsigned long next = kept.round + 1;
        if (next % 7 == 0) {
            try {
                mojim::atomically(h, [&] {
                    kept.play(next + 1000000);
                    throw next;
                });
            } catch (unsigned long) {
            }
            if (const char *what = differs(kept, twin))
                return std::printf("%s differs after an undone round\n", what), 1;
        }
        mojim::atomically(h, [&] { kept.play(next); });
        twin.play(next);
        if (next % 16 == 0)
            if (const char *what = differs(kept, twin))
                return std::printf("%s differs in round %lu\n", what, next), 1;
        std::printf("%lu\n", next);
    }
    return 0;
} catch (const mojim::error &e) {
    std::printf("%s\n", e.what());
    return 1;
}
