/* SETs of 100 bytes in a Redis server, by connections that each wait for one before the next: sets PORT
 * CONNECTIONS SECONDS REPLICAS. With REPLICAS, a WAIT for so many goes out behind each SET, in the same
 * write, and both are answered before the next. Prints the SETs a second. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, TIMEOUT_MS = 60000 };

static struct pollfd at[MOST];
static char said[MOST][64], op[256];
static size_t got[MOST], length;
static int replicas;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void must(int ok, const char *what)
{
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void ask(int i)
{
    got[i] = 0;
    must(write(at[i].fd, op, length) == (ssize_t)length, "write");
}

/* Whether all that this connection asked for is answered; another answer than the right one ends. */
static int answered(int i)
{
    ssize_t more = read(at[i].fd, said[i] + got[i], sizeof said[i] - 1 - got[i]);
    must(more > 0, "read");
    got[i] += more;
    said[i][got[i]] = 0;
    char *first = strchr(said[i], '\n'), *second = first ? strchr(first + 1, '\n') : NULL;
    if (!(replicas ? second : first))
        return 0;
    if (strncmp(said[i], "+OK\r\n", 5) || (replicas && (first[1] != ':' || atoi(first + 2) < replicas))) {
        fprintf(stderr, "answered: %s\n", said[i]);
        exit(1);
    }
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 5 || atoi(argv[2]) > MOST || atoi(argv[4]) > 9)
        return fprintf(stderr, "sets PORT CONNECTIONS SECONDS REPLICAS\n"), 2;
    int connections = atoi(argv[2]), one = 1;
    replicas = atoi(argv[4]);
    length = snprintf(op, sizeof op, "*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$100\r\n%0100d\r\n", 0);
    if (replicas)
        length += snprintf(op + length, sizeof op - length, "*3\r\n$4\r\nWAIT\r\n$1\r\n%d\r\n$1\r\n0\r\n", replicas);
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < connections; i++) {
        at[i].fd = socket(AF_INET, SOCK_STREAM, 0), at[i].events = POLLIN;
        must(connect(at[i].fd, (void *)&server, sizeof server) == 0, "connect");
        must(setsockopt(at[i].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "TCP_NODELAY");
    }
    long n = 0;
    double begin = now(), end = begin + atof(argv[3]);
    for (int i = 0; i < connections; i++)
        ask(i);
    while (now() < end) {
        must(poll(at, connections, TIMEOUT_MS) > 0, "poll");
        for (int i = 0; i < connections; i++)
            if (at[i].revents && answered(i))
                n++, ask(i);
    }
    printf("%.1f\n", n / (now() - begin));
    return 0;
}
