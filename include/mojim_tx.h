/* mojim_tx.h - durable transactions. */
#ifndef MOJIM_TX_H
#define MOJIM_TX_H
#include <mojim_heap.h>
#endif
