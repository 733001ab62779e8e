// Containers in a heap beside twins in plain memory. `containers CONFIG NODE`: opens the heap, makes the
// twins anew by the same random numbers up to the round that is there, compares, prints "open ROUND";
// then changes both for ever, and prints the number of each round that is committed. Some rounds end
// with an exception, which must undo them. With a third argument it stops after so many rounds; "wrong":
// it does what is wrong instead, which must be refused before anything changes.
#include <mojim.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

struct Plain {
    template <class T> using A = std::allocator<T>;
};
struct Kept {
    template <class T> using A = mojim::allocator<T>;
};

template <class W> struct World {
    template <class T> using A = typename W::template A<T>;
    using string = std::basic_string<char, std::char_traits<char>, A<char>>;
    struct Hash {
        size_t operator()(const string &s) const { return std::hash<std::string_view>()(std::string_view(s)); }
    };
    std::map<string, int, std::less<string>, A<std::pair<const string, int>>> map;
    std::set<long, std::less<long>, A<long>> set;
    std::vector<string, A<string>> vector;
    std::list<std::vector<int, A<int>>, A<std::vector<int, A<int>>>> list;
    std::deque<double, A<double>> deque;
    std::unordered_map<string, string, Hash, std::equal_to<string>, A<std::pair<const string, string>>> hashed;
    string text;
    unsigned long round = 0;

    static string word(std::mt19937 &r) {
        return string(r() % 60, static_cast<char>('a' + r() % 26));
    }

    void step(std::mt19937 &r) {
        switch (r() % 12) {
        case 0: case 1: map[word(r)] += 1; break;
        case 2: if (!map.empty()) map.erase(map.begin()); break;
        case 3: set.insert(r() % 1000); break;
        case 4: set.erase(r() % 1000); break;
        case 5: vector.push_back(word(r)); if (vector.size() > 300) vector.erase(vector.begin(), vector.begin() + 200); break;
        case 6: if (!vector.empty()) vector.insert(vector.begin() + r() % vector.size(), word(r)); break;
        case 7: list.emplace_front(r() % 200, static_cast<int>(r())); if (list.size() > 30) list.pop_back(); break;
        case 8: deque.push_back(r()); if (r() % 2) deque.pop_front(); break;
        case 9: { auto k = word(r); hashed[k] = word(r); break; }
        case 10: if (!hashed.empty()) hashed.erase(word(r)); if (hashed.size() > 500) hashed.clear(); break;
        case 11: text += word(r); if (text.size() > 40000) text.clear(); break;
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

template <class A, class B> bool same(const A &a, const B &b) { return a == b; }
template <class A, class B> bool same_text(const A &a, const B &b) { return std::string_view(a) == std::string_view(b); }

static const char *differs(const World<Kept> &k, const World<Plain> &p) {
    auto pair = [](auto &a, auto &b) { return same_text(a.first, b.first) && a.second == b.second; };
    if (!std::equal(k.map.begin(), k.map.end(), p.map.begin(), p.map.end(), pair)) return "map";
    if (!std::equal(k.set.begin(), k.set.end(), p.set.begin(), p.set.end())) return "set";
    if (!std::equal(k.vector.begin(), k.vector.end(), p.vector.begin(), p.vector.end(), [](auto &a, auto &b) { return same_text(a, b); })) return "vector";
    if (!std::equal(k.list.begin(), k.list.end(), p.list.begin(), p.list.end(),
                    [](auto &a, auto &b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); })) return "list";
    if (!std::equal(k.deque.begin(), k.deque.end(), p.deque.begin(), p.deque.end())) return "deque";
    if (k.hashed.size() != p.hashed.size()) return "unordered_map";
    for (auto &[key, value] : p.hashed) {
        auto found = k.hashed.find(World<Kept>::string(key.data(), key.size()));
        if (found == k.hashed.end() || !same_text(found->second, value)) return "unordered_map";
    }
    return same_text(k.text, p.text) ? nullptr : "string";
}

struct Account {
    long a, b;
};

static int wrongs = 0;
static void must(bool holds, int line) {
    if (!holds)
        wrongs++, std::printf("line %d\n", line);
}
#define MUST(holds) must(holds, __LINE__)
template <class F> static bool refused(int number, F f) {
    try {
        f();
    } catch (const mojim::error &e) {
        return e.number() == number && *e.what();
    }
    return false;
}

// A heap that only transactions change: a root is durable with its object, or neither is.
static void exact(mojim::volume &v) {
    {
        mojim::heap h{v, "exact", std::size_t{1} << 30, nullptr, MOJIM_HEAP_EXACT};
        h.root<Account>("account", Account{7, 8});
        h.root<mojim::vector<int>>("numbers", 50, 3);
        bool ran = false;
        MUST(refused(EOPNOTSUPP, [&] { mojim::atomically(h, [&] { ran = true; }); }) && !ran);
        MUST(mojim_tx_begin() == 0);
        h.root<Account>("other");
        MUST(mojim_tx_abort() == 0 && !h.find<Account>("other"));
    }
    mojim::heap h{v, "exact"};
    const Account *x = h.find<Account>("account");
    MUST(x && x->a == 7 && x->b == 8);
    auto *n = h.find<mojim::vector<int>>("numbers");
    MUST(n && *n == mojim::vector<int>(50, 3, h));
}

static void nested(mojim::volume &v) {
    mojim::heap h{v, "plain"}, other{v, "beside"};
    auto &x = h.root<Account>("x"), &y = other.root<Account>("y");
    h.sync();
    try {
        mojim::atomically(h, [&] {
            x.a = 1;
            MUST(refused(EINVAL, [&] { mojim::atomically(h, [&] { x.b = 1; }); }) && x.b == 0);
            MUST(refused(EINVAL, [&] { h.sync(); }) && refused(EINVAL, [&] { h.rollback(); }));
            mojim::atomically(other, [&] { y.a = 5; });
            throw 1;
        });
    } catch (int) {
    }
    MUST(x.a == 0 && x.b == 0 && y.a == 5);
    MUST(mojim_tx_begin() == 0);
    MUST(refused(EINVAL, [&] { mojim::atomically(h, [&] { x.a = 2; throw 1; }); }) && x.a == 0);
    MUST(mojim_tx_abort() == 0);
    // A transaction that is left open in the block goes with it.
    try {
        mojim::atomically(h, [&] {
            MUST(mojim_tx_begin() == 0 && mojim_tx_add(&x, sizeof x) == 0);
            x = {3, 3};
            throw 1;
        });
    } catch (int) {
    }
    MUST(x.a == 0 && x.b == 0 && !mojim_tx_is_open());
    auto &&r = mojim::atomically(h, [&]() -> Account & { x.b = 4; return x; });
    MUST(&r == &x && x.b == 4);
    auto moved = mojim::atomically(h, [&] { return std::make_unique<int>(5); });
    MUST(*moved == 5);
    // What cannot be undone is not told as undone.
    try {
        mojim::atomically(h, [&] {
            MUST(mojim_heap_close(h.get()) == 0);
            throw 1;
        });
    } catch (const mojim::error &e) {
        try {
            std::rethrow_if_nested(e);
        } catch (int n) {
            MUST(n == 1);
            return;
        }
    } catch (int) {
    }
    MUST(false);
}

struct Item {
    mojim::string text;
};

// A root that was made outside of a block was lost when the first block threw: its reference led to memory that
// was free, and what later blocks stored there was acknowledged, and gone in the next run.
static void made_outside(mojim::volume &v) {
    {
        mojim::heap h{v, "outside"};
        auto &items = h.root<mojim::vector<int>>("items");
        try {
            mojim::atomically(h, [&] {
                h.root<mojim::vector<int>>("inside", 3, 3);
                items.at(5) = 1;
            });
        } catch (const std::out_of_range &) {
        }
        MUST(h.find<mojim::vector<int>>("items") == &items && !h.find<mojim::vector<int>>("inside"));
        mojim::atomically(h, [&] { items.push_back(1); });
    }
    mojim::heap h{v, "outside"};
    auto *items = h.find<mojim::vector<int>>("items");
    MUST(items && items->size() == 1);
    // In a transaction it is a part of that.
    MUST(mojim_tx_begin() == 0);
    h.root<Account>("other");
    MUST(mojim_tx_abort() == 0 && !h.find<Account>("other"));
}

// Strings in a heap's containers were in the heap that was opened first: the next run, which opened the other one
// alone, followed pointers to nowhere.
static void two_heaps(mojim::volume &v) {
    mojim::heap first{v, "first"}, second{v, "second"};
    auto in = [](const mojim::heap &h, const mojim::string &s) {
        return s.get_allocator().base() == mojim_heap_base(h.get()) && mojim_heap_of(s.data()) == h.get();
    };
    const std::string text(100, 'x');
    auto &items = second.root<mojim::vector<Item>>("items");
    auto &names = second.root<mojim::map<mojim::string, mojim::string>>("names");
    mojim::atomically(second, [&] {
        items.emplace_back().text = text;
        names[mojim::string(text)] = text;
        mojim::atomically(first, [&] { MUST(in(first, mojim::string(text))); });
        MUST(in(second, mojim::string(text)));
    });
    MUST(in(second, items[0].text) && in(second, names.begin()->first) && in(second, names.begin()->second));
    MUST(in(second, second.root<Item>("item", Item{mojim::string(text, second)}).text));
    MUST(in(first, mojim::string(text)));
    try {
        mojim::string none(std::size_t{1} << 60, 'x');
        MUST(false);
    } catch (const std::bad_alloc &e) {
        MUST(std::strlen(e.what()) > 20);
    }
}

static int wrong(mojim::volume &v) {
    exact(v);
    made_outside(v);
    two_heaps(v);
    nested(v);
    MUST(refused(EINVAL, [&] { mojim::mapping<long>(v, "big", (std::size_t{1} << 61) + 512); }));
    mojim::mapping<long> few(v, "few", 10);
    MUST(refused(EINVAL, [&] { few.sync(11); }) && refused(EINVAL, [&] { few.sync(5, 6); }));
    few.sync(9);
    return wrongs != 0;
}

int main(int argc, char **argv) try {
    if (argc < 3)
        return 2;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    mojim::volume v{argv[1], argv[2]};
    if (argc > 3 && !std::strcmp(argv[3], "wrong"))
        return wrong(v);
    mojim::heap h{v, "containers", std::size_t{1} << 30};
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
