// A map in a mapped file of Boost.Interprocess, synced before each number is printed; with "check" as
// the second word, how many are there, the first of them without a gap. (The library's own `flush`
// calls msync with MS_ASYNC, which promises nothing.)
#include <boost/interprocess/containers/map.hpp>
#include <boost/interprocess/managed_mapped_file.hpp>
#include <cstdio>
#include <cstdint>
#include <functional>
#include <sys/mman.h>
#include <utility>

namespace ip = boost::interprocess;
using Pair = std::pair<const unsigned, unsigned>;
using Allocator = ip::allocator<Pair, ip::managed_mapped_file::segment_manager>;
using Map = ip::map<unsigned, unsigned, std::less<unsigned>, Allocator>;

int main(int argc, char **argv)
{
    ip::managed_mapped_file file(ip::open_or_create, argv[1], 8 << 20);
    Map *map = file.find_or_construct<Map>("map")(std::less<unsigned>(), file.get_segment_manager());
    if (argc > 2) {
        unsigned n = 0;
        for (const Pair &p : *map)
            if (p.first != ++n || p.second != n * 7)
                return std::fprintf(stderr, "%u is not as it was put\n", n), 1;
        std::printf("%u\n", n);
        return !file.check_sanity();
    }
    for (unsigned n = 1; n <= 60000; n++) {
        map->emplace(n, n * 7);
        const auto begin = reinterpret_cast<std::uintptr_t>(file.get_address());
        const auto page = begin & ~std::uintptr_t{4095};
        if (msync(reinterpret_cast<void *>(page), file.get_size() + (begin - page), MS_SYNC) != 0)
            return std::perror("msync"), 1;
        std::printf("%u\n", n);
        std::fflush(stdout);
    }
}
