/* Says "ready", counts each SIGINT, and says "over" and ends at SIGUSR1: for tests of `mojim run`. */
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
    for (int said = 0; !ends || said < interrupts;) {
        if (said == interrupts)
            sigsuspend(&before);
        for (; said < interrupts; fflush(stdout))
            printf("interrupted %d times\n", ++said);
    }
    puts("over");
    return 0;
}
