// The bank of bank.c in C++: a container in a persistent heap, and a lambda whose changes are durable
// together, or undone.
//
//     c++ -std=c++17 examples/bank.cpp -Iinclude -Ltarget/release -lmojim -Wl,-rpath,$PWD/target/release -o bank
//     ./bank mojim.toml a [TRANSFERS]
#include <cstdlib>
#include <iostream>
#include <mojim.hpp>
#include <numeric>
#include <stdexcept>

constexpr int accounts = 64;
constexpr long opened_with = 1000;

struct bank {
    using allocator_type = mojim::allocator<char>;
    long transfers = 0;
    mojim::vector<long> account;
    explicit bank(const allocator_type &a) : account(accounts, opened_with, a) {}
};

struct refused : std::runtime_error {
    refused() : runtime_error("the account has not so much") {}
};

static void transfer(mojim::heap &h, bank &b) {
    long &from = b.account[std::rand() % accounts], &to = b.account[std::rand() % accounts];
    const long money = std::rand() % 100;
    mojim::atomically(h, [&] {
        b.transfers += 1;
        to += money;
        from -= money;
        if (money > 90 && from < 0)
            throw refused(); // all is as it was
    });
}

int main(int argc, char **argv) try {
    if (argc < 3) {
        std::cerr << "usage: " << argv[0] << " CONFIG NODE [TRANSFERS]\n";
        return 2;
    }
    mojim::volume v(argv[1], argv[2]);
    mojim::heap h(v, "bank.cpp.heap");
    bank *b = nullptr;
    mojim::atomically(h, [&] { b = &h.root<bank>("bank"); });
    const long total = std::accumulate(b->account.begin(), b->account.end(), 0L);
    const bool ok = total == accounts * opened_with;
    std::cout << "total " << total << (ok ? " ok" : " wrong") << std::endl;
    if (!ok)
        return 1;
    std::srand(static_cast<unsigned>(b->transfers));
    for (long todo = argc > 3 ? std::atol(argv[3]) : 10000; todo > 0; todo--) {
        try {
            transfer(h, *b);
        } catch (const refused &) {
            continue;
        }
        if (b->transfers % 1000 == 0)
            std::cout << "transfer " << b->transfers << std::endl;
    }
} catch (const std::exception &e) {
    std::cerr << e.what() << "\n";
    return 1;
}
