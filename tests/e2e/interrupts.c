/* Says "ready", counts SIGINT, and at SIGUSR1 prints the count and ends: for tests of `mojim run`. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>

static volatile sig_atomic_t interrupts, ends;

static void take(int signal)
{
    if (signal == SIGINT)
        interrupts++;
    else
        ends = 1;
}

int main(void)
{
    sigset_t both, before;
    sigemptyset(&both);
    sigaddset(&both, SIGINT);
    sigaddset(&both, SIGUSR1);
    sigprocmask(SIG_BLOCK, &both, &before);
    struct sigaction action = {.sa_handler = take};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    puts("ready");
    fflush(stdout);
    while (!ends)
        sigsuspend(&before);
    printf("interrupted %d times\n", interrupts);
    return 0;
}
