/* The two loads of failure-atomic msync, Section 5.4, on server.cpp beside it.
 *
 *     c++ -std=c++17 -O2 -pthread examples/kvserver/load.cpp -o load
 *     ./load [--json] [--seconds S] SERVER WAY=DIRECTORY...
 *
 * For each argument it starts SERVER with WAY on a new file in DIRECTORY. `light` is one client that
 * thinks 10 ms between requests; `high` is four that do not think. Each step of a load, which are
 * inserts, replaces and removes of records of 1 KB, lasts S seconds (2). A row has the requests a
 * second of all clients, and the mean time until an answer. `--json` prints rows as objects.
 */
#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <netinet/tcp.h>
#include <random>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t VALUE = 1024;

pid_t server = -1;

[[noreturn]] void fail(const std::string &what)
{
    std::fprintf(stderr, "%s\n", what.c_str());
    if (server > 0)
        kill(server, SIGKILL);
    _exit(1);
}

void check(bool done, const std::string &what)
{
    if (!done)
        fail(what + ": " + std::strerror(errno));
}

/* One connection, and what it measured in a step. */
struct Client {
    int fd;
    std::string name, noise; /* a value is VALUE bytes of the noise, from anywhere */
    std::mt19937 random;
    unsigned keys = 0, done = 0; /* inserted; in this step */
    double took = 0, waited = 0;

    Client(int port, const std::string &n) : fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), name(n)
    {
        sockaddr_in at{};
        at.sin_family = AF_INET;
        at.sin_port = htons(in_port_t(port));
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const int one = 1;
        check(fd >= 0 && connect(fd, reinterpret_cast<sockaddr *>(&at), sizeof at) == 0 &&
                  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0,
              "connect");
        for (char &c : noise = std::string(64 * VALUE, 0))
            c = char('a' + random() % 26);
    }

    void request(const std::string &line)
    {
        check(send(fd, line.data(), line.size(), MSG_NOSIGNAL) == ssize_t(line.size()), "send");
        char got[3];
        const ssize_t n = recv(fd, got, sizeof got, MSG_WAITALL);
        check(n >= 0, "receive");
        if (std::string(got, size_t(n)) != "ok\n")
            fail("the server " + (n == 0 ? "ended" : "answers " + std::string(got, size_t(n))));
    }

    /* Removes end early if they are faster than the inserts were. */
    void step(const std::string &what, double seconds, std::chrono::milliseconds think)
    {
        done = 0, waited = 0;
        const auto begin = Clock::now();
        while (took = Seconds(Clock::now() - begin).count(), took < seconds) {
            if (what == "remove" && done == keys)
                break;
            const std::string key = name + std::to_string(what == "replace" ? random() % keys : done);
            const std::string value = noise.substr(random() % (noise.size() - VALUE), VALUE);
            const std::string line = what == "remove" ? "remove " + key : "set " + key + " " + value;
            const auto asked = Clock::now();
            request(line + "\n");
            waited += Seconds(Clock::now() - asked).count();
            done++;
            std::this_thread::sleep_for(think);
        }
        if (what == "insert")
            keys = done;
        if (done == 0)
            fail(what + ": nothing in " + std::to_string(seconds) + " s");
    }
};

/* Starts the server on the file, and gives its port. */
int start(const char *program, const std::string &way, const std::string &file)
{
    int said[2];
    check(pipe(said) == 0, "pipe");
    check((server = fork()) >= 0, "fork");
    if (server == 0) {
        dup2(said[1], 1);
        close(said[0]);
        close(said[1]);
        execl(program, program, way.c_str(), file.c_str(), nullptr);
        std::perror(program);
        _exit(127);
    }
    close(said[1]);
    int port;
    FILE *const f = fdopen(said[0], "r");
    if (f == nullptr || std::fscanf(f, "port %d", &port) != 1)
        fail("the server does not start");
    std::fclose(f);
    return port;
}

void load(int port, const std::string &way, const std::string &directory, bool high, double seconds, bool json)
{
    std::vector<Client> clients;
    for (int i = 0; i < (high ? 4 : 1); i++)
        clients.emplace_back(port, (high ? "high" : "light") + std::to_string(i) + "-");
    for (const char *what : {"insert", "replace", "remove"}) {
        std::vector<std::thread> threads;
        for (Client &c : clients)
            threads.emplace_back([&] { c.step(what, seconds, std::chrono::milliseconds(high ? 0 : 10)); });
        double rate = 0, waited = 0, done = 0;
        for (size_t i = 0; i < clients.size(); i++) {
            threads[i].join();
            rate += clients[i].done / clients[i].took;
            waited += clients[i].waited;
            done += clients[i].done;
        }
        std::printf(json ? "{\"way\": \"%s\", \"directory\": \"%s\", \"load\": \"%s\", \"operation\": \"%s\", "
                           "\"requests_per_second\": %.1f, \"response_ms\": %.4f}\n"
                         : "%-12s %-24s %-6s %-9s %10.1f %12.3f\n",
                    way.c_str(), directory.c_str(), high ? "high" : "light", what, rate, 1000 * waited / done);
        std::fflush(stdout);
    }
    for (Client &c : clients)
        close(c.fd);
}

} // namespace

int main(int argc, char **argv)
{
    bool json = false;
    double seconds = 2;
    int at = 1;
    for (; at < argc && argv[at][0] == '-'; at++)
        if (std::strcmp(argv[at], "--json") == 0)
            json = true;
        else
            seconds = std::strcmp(argv[at], "--seconds") == 0 && at + 1 < argc ? std::atof(argv[++at]) : 0;
    if (argc - at < 2 || !(seconds > 0)) {
        std::fprintf(stderr, "usage: %s [--json] [--seconds S] SERVER WAY=DIRECTORY...\n", argv[0]);
        return 2;
    }
    if (!json)
        std::puts("way          directory                load   operation requests/s response, ms");
    for (int i = at + 1; i < argc; i++) {
        const std::string both = argv[i];
        const size_t mark = both.find('=');
        if (mark == std::string::npos)
            fail(both + ": not WAY=DIRECTORY");
        const std::string way = both.substr(0, mark), directory = both.substr(mark + 1);
        const std::string file = directory + "/load-" + std::to_string(getpid()) + ".kch";
        const int port = start(argv[at], way, file);
        for (const bool high : {false, true})
            load(port, way, directory, high, seconds, json);
        int status = 0;
        check(kill(server, SIGTERM) == 0 && waitpid(server, &status, 0) == server, "the server's end");
        server = -1;
        if (status != 0)
            fail("the server failed");
        check(unlink(file.c_str()) == 0, file);
    }
}
