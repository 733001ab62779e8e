/* mojim_persistent.h - persistent variables, regions and logs. */
#ifndef MOJIM_PERSISTENT_H
#define MOJIM_PERSISTENT_H
#include <mojim_heap.h>
#endif
