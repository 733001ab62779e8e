/* Included before a program for the thread sanitizer (-include), which refuses memory where heaps get
 * their addresses by chance: each new heap lies where it has its shadow. */
#include <mojim_heap.h>

/* For a program that chooses itself. */
#define AT 0x7e8800000000

/* How many heaps this source file has opened. */
static size_t opened_ __attribute__((unused));

/* Capacities that are too large for any heap stay so. */
#define mojim_heap_open(m, file, capacity, address, flags)                                       \
    (mojim_heap_open)(m, file, (capacity) ? (capacity) : (size_t)1 << 32,                        \
                      (address) || (capacity) > (size_t)1 << 32                                  \
                          ? (address)                                                            \
                          : (void *)(0x7e9000000000 + (opened_++ << 32)),                        \
                      flags)
