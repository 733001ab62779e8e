/* Put before examples/bank.c by its test: what belongs together is committed by one sync
 * point for each range. A kill in between leaves half a transfer. */
#include <mojim.h>

static inline int apart(struct msync_input *input, int n, int flags)
{
    for (int i = 0; i < n; i++)
        if (mojim_msync(input[i].address, (size_t)input[i].length, flags) != 0)
            return -1;
    return 0;
}

#define gmsync apart
