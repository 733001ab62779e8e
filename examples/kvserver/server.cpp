/* A key-value server over Kyoto Cabinet (failure-atomic msync, Section 4.2).
 *
 *     c++ -std=c++17 -O2 -pthread examples/kvserver/server.cpp -o server -lkyotocabinet
 *     ./server WAY FILE [PORT]
 *
 * serves FILE on 127.0.0.1, says on which port, and whether Kyoto Cabinet had to repair FILE. Each
 * line of a connection is a request, and has one line as its answer:
 *
 *     set KEY VALUE    ok
 *     get KEY          value VALUE, or none
 *     remove KEY       ok, or none
 *
 * WAY is what stands between a change and its answer:
 *
 *     synchronize      msync of the file. On a disk's file system the kernel also writes pages back
 *                      whenever it likes, so after a power failure the file can be torn.
 *     transaction      Kyoto Cabinet's own undo log, synced before the file: safe, and slower.
 *     no-sync          nothing.
 *
 * Mojim's way is `synchronize` with FILE in a volume: msync is atomic there, so on the node that goes
 * on after a failure FILE is what one of these calls committed, and needs no repair. No line of this
 * file differs. (With `--commit-interval never`: otherwise half a change may be committed in between.)
 *
 * One lock owns the order: who changes the file holds it alone until the change is committed. So
 * nothing is answered that is not committed, no `get` shows such a thing, and no change of another
 * connection is half done in what is committed. If a commit fails, the server ends without an answer:
 * that change is in doubt, and those before it are committed.
 */
#include <arpa/inet.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kchashdb.h>
#include <mutex>
#include <netinet/tcp.h>
#include <shared_mutex>
#include <string>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace {

enum class Way { no_sync, synchronize, transaction };

constexpr size_t LONGEST = 1 << 20; /* of a request */

struct Db : kyotocabinet::HashDB {
    bool repaired() { return reorganized() || recovered(); }
};

Way way;
Db db;
std::shared_mutex order;

/* Without destructors: other threads still use what they would destroy. */
[[noreturn]] void fail(const char *what, const char *why)
{
    std::fprintf(stderr, "%s: %s\n", what, why);
    _exit(1);
}

[[noreturn]] void fail_db(const char *what) { fail(what, db.error().message()); }

/* Makes and commits a change. False: there is no such key, and nothing changed. */
template <typename Change> bool commit(Change change)
{
    std::unique_lock alone(order);
    if (way == Way::transaction && !db.begin_transaction(true))
        fail_db("begin_transaction");
    const bool changed = change();
    if (!changed && db.error() != kyotocabinet::BasicDB::Error::NOREC)
        fail_db("a change");
    if (way == Way::transaction && !db.end_transaction(true))
        fail_db("end_transaction");
    if (way == Way::synchronize && changed && !db.synchronize(true))
        fail_db("synchronize");
    return changed;
}

/* The first word of a line, which is taken from it. */
std::string word(std::string &line)
{
    const size_t end = line.find(' ');
    std::string first = line.substr(0, end);
    line.erase(0, end == std::string::npos ? end : end + 1);
    return first;
}

std::string answer(std::string line)
{
    const std::string what = word(line), key = word(line), &value = line;
    if (what == "set" && !key.empty()) {
        commit([&] { return db.set(key, value); });
        return "ok";
    }
    if (what == "get" && !key.empty() && value.empty()) {
        std::shared_lock shared(order);
        std::string found;
        if (db.get(key, &found))
            return "value " + found;
        if (db.error() != kyotocabinet::BasicDB::Error::NOREC)
            fail_db("get");
        return "none";
    }
    if (what == "remove" && !key.empty() && value.empty())
        return commit([&] { return db.remove(key); }) ? "ok" : "none";
    return "error: set KEY VALUE, get KEY or remove KEY";
}

bool send_all(int fd, const std::string &text)
{
    for (size_t sent = 0; sent < text.size();) {
        const ssize_t n = send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
        if (n < 0)
            return false;
        sent += size_t(n);
    }
    return true;
}

/* A connection, to its end. */
void serve(int fd)
{
    std::string got;
    char part[65536];
    ssize_t n;
    for (bool open = true; open && got.size() <= LONGEST && (n = recv(fd, part, sizeof part, 0)) > 0;) {
        got.append(part, size_t(n));
        size_t begin = 0;
        for (size_t end; open && (end = got.find('\n', begin)) != std::string::npos; begin = end + 1)
            open = send_all(fd, answer(got.substr(begin, end - begin)) + "\n");
        got.erase(0, begin);
    }
    close(fd);
}

void accept_all(int listener)
{
    for (;;) {
        const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), one = 1;
        if (fd < 0 && errno == ECONNABORTED)
            continue;
        if (fd < 0)
            fail("accept", std::strerror(errno));
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        try {
            std::thread(serve, fd).detach();
        } catch (const std::system_error &) { /* no thread for one more */
            close(fd);
        }
    }
}

int listen_on(in_port_t port)
{
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(port);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    auto *const address = reinterpret_cast<sockaddr *>(&at);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 || bind(fd, address, size) != 0 ||
        listen(fd, 64) != 0 || getsockname(fd, address, &size) != 0)
        fail("the port", std::strerror(errno));
    std::printf("port %d %s\n", ntohs(at.sin_port), db.repaired() ? "repaired" : "clean");
    std::fflush(stdout);
    return fd;
}

} // namespace

int main(int argc, char **argv)
{
    const std::string name = argc > 1 ? argv[1] : "";
    if ((argc != 3 && argc != 4) || (name != "synchronize" && name != "transaction" && name != "no-sync")) {
        std::fprintf(stderr, "usage: %s synchronize|transaction|no-sync FILE [PORT]\n", argv[0]);
        return 2;
    }
    way = name == "synchronize" ? Way::synchronize : name == "transaction" ? Way::transaction : Way::no_sync;
    /* Blocked in all threads: this one waits for them. */
    sigset_t ends;
    sigemptyset(&ends);
    for (int one : {SIGTERM, SIGINT})
        sigaddset(&ends, one);
    pthread_sigmask(SIG_BLOCK, &ends, nullptr);
    if (!db.open(argv[2], Db::OWRITER | Db::OCREATE))
        fail_db(argv[2]);
    std::thread(accept_all, listen_on(in_port_t(argc > 3 ? std::atoi(argv[3]) : 0))).detach();
    int signal;
    sigwait(&ends, &signal);
    order.lock(); /* to the end: nothing is answered any more */
    if (!db.close())
        fail_db("close");
    _exit(0);
}
