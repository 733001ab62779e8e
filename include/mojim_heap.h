/* mojim_heap.h - malloc whose memory is also a file.
 *
 * A heap lies in one file of a volume, always at the same address. So pointers
 * between its blocks stay valid from run to run.
 *
 * This header is the manual. docs/reference/c.md has an example. mojim.h has the
 * conventions (errors, threads, ownership), which hold here too.
 * Source: FAMS, Section 4.1, and Mnemosyne ("pmalloc").
 *
 * CAVEATS FIRST
 *
 * 1. Nothing is durable before it is committed. mojim_heap_sync commits all stores in
 *    the heap. A transaction (mojim_tx.h) commits its own stores. A crash takes the
 *    heap back to the last commits.
 * 2. mojim_heap_sync commits the whole heap as it is. No thread may be in the
 *    middle of a change then: the program holds a lock. It waits for open
 *    transactions of other threads.
 * 3. No pointer out of the heap is valid in the next run: none to a function, a
 *    vtable, a string constant, another allocator's memory.
 * 4. One process at a time has a heap open. A mutex that lies in a heap must be
 *    initialised anew after each open. A child made by fork can read its copy of
 *    the memory, but it commits nothing: calls that change the heap fail with
 *    EOPNOTSUPP, and so do mojim_root and mojim_usable_size.
 * 5. Some blocks are allocated outside of a transaction. Call mojim_heap_sync before
 *    a transaction frees such a block, stores into it, or stores a pointer to it.
 *    Until then committed data may still have the block under its former use. And
 *    after a crash a committed pointer to it may lead to a free block with other
 *    contents.
 */
#ifndef MOJIM_HEAP_H
#define MOJIM_HEAP_H

#include <mojim.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mojim_heap mojim_heap_t;

/* Only transactions (mojim_tx.h) change the heap. It notes no dirty pages, which makes a
 * first store to a page cheaper. mojim_heap_sync fails with EOPNOTSUPP. A mojim_malloc or
 * mojim_free outside a transaction is one of its own. */
#define MOJIM_HEAP_EXACT 0x1

/* Opens the heap in a file of the volume, and makes it if the file is not there.
 *
 *   `capacity`  bytes of addresses to reserve, used at creation only. 16 MiB at least. 0:
 *               64 GiB. The file grows as needed
 *   `address`   the heap's first address, used at creation only. A multiple of 1 MiB.
 *               NULL: chosen by chance between 0x2000'0000'0000 and 0x3000'0000'0000
 *   `flags`     0 or MOJIM_HEAP_EXACT
 *
 * With mojim_attach_reader's handle the heap is read-only, as the node's copy shows it.
 *
 * NULL on error:
 *   EADDRINUSE  the addresses are taken in this process. The text says by which mapping.
 *               `mojim heap move` gives the heap other ones
 *   EBUSY       the heap is open
 *   EUCLEAN     the file is no heap, or is damaged
 *   EOPNOTSUPP  the volume rounds to pages (msync_rounding = "page"), or shares working
 *               copies
 *
 * While the heap is open, its file and its memory are the heap's. These calls fail:
 *   EBUSY       mojim_map, mojim_rename, mojim_truncate and mojim_remove of the file
 *   EINVAL      mojim_unmap
 *   EOPNOTSUPP  MS_INVALIDATE alone
 *   EADDRINUSE  mojim_map_at within its capacity */
mojim_heap_t *mojim_heap_open(mojim_t *m, const char *file, size_t capacity,
                              void *address, int flags);

/* Closes a heap. Stores that were not committed are thrown away. The call waits for open
 * transactions of other threads. EINVAL inside one.
 *
 *   - Pointers into the heap end here. Leave no transaction open over it.
 *   - mojim_detach, if it succeeds, closes the heaps that were opened through its handle.
 *     It waits for transactions as for those of regions (mojim_tx.h, caveat 3).
 *   - Some 4 KB of each closed heap stay in the process. */
int mojim_heap_close(mojim_heap_t *h);

/* As malloc, calloc, realloc, aligned_alloc and free, in a heap. Blocks are aligned to 16
 * bytes. `alignment` is a power of two, at most 1 MiB.
 *
 * NULL, or -1, on error:
 *   ENOMEM  the capacity is used up
 *   EINVAL  another alignment, or a pointer that is no block's, or that was freed before
 *
 * An allocation commits a few bytes of its own when the heap grows, or begins another
 * slab. So it may wait, and fail, as gmsync. On a full disk it waits half a minute, then
 * fails with ENOSPC. Nothing is lost, and it succeeds where there is room again. With
 * MOJIM_HEAP_EXACT, the zeros of mojim_calloc are committed with the block.
 *
 * Inside a transaction the calls are part of it. An abort undoes them. A block that it
 * freed is used again after its commit only. */
void *mojim_malloc(mojim_heap_t *h, size_t size);
void *mojim_calloc(mojim_heap_t *h, size_t n, size_t size);
void *mojim_realloc(mojim_heap_t *h, void *p, size_t size);
void *mojim_aligned_alloc(mojim_heap_t *h, size_t alignment, size_t size);
int mojim_free(void *p);

/* Bytes of the block that can be used. 0, with EINVAL, for no block. EROFS through a
 * reader, which does not hear of blocks. */
size_t mojim_usable_size(const void *p);

/* The heap in whose addresses p lies, or NULL. With NULL as p: the heap of
 * mojim_heap_within in this thread, else the one that was opened first. NULL if none is
 * open. */
mojim_heap_t *mojim_heap_of(const void *p);

/* Names the heap that mojim_heap_of(NULL) gives in the calling thread from here on. NULL:
 * none. Returns the heap that was named before: name it again at the end. A heap that was
 * closed meanwhile is passed over. The call serves containers that are made without
 * naming their heap (mojim.hpp). */
mojim_heap_t *mojim_heap_within(mojim_heap_t *h);

/* Roots are the names by which a program finds its data again. A name has 1 to 63 bytes, a
 * heap 128 roots. `type` is a text of at most 127 bytes that says what the root points to.
 * NULL is "".
 *
 * mojim_root_set names the address `p`. NULL removes the root. It changes memory as any
 * store does: it is durable with the next commit. Inside a transaction, that is the
 * transaction's. EBUSY while a transaction that another thread has open changes the same
 * root. Each of several transactions can change others.
 *
 * mojim_root returns the address. NULL on error:
 *   ENOENT     there is no such root
 *   EINVAL     it has another type. The text shows both
 *   ETIMEDOUT  through a reader: the heap changes for 10 s faster than it can be read
 * Through a reader all roots are as of one moment, about now. The memory that they point
 * to is mapped. */
int mojim_root_set(mojim_heap_t *h, const char *name, void *p, const char *type);
void *mojim_root(mojim_heap_t *h, const char *name, const char *type);

/* Commits all stores in the heap since its last commit, atomically (FAMS, Section 4.1).
 * EINVAL inside a transaction. */
int mojim_heap_sync(mojim_heap_t *h);

/* Takes the heap back to its last commits. Every store since is undone, and blocks and
 * roots are as they were.
 *
 *   - No other thread may be using the heap.
 *   - The call waits for open transactions of other threads. EINVAL inside one.
 *   - It costs as much as MS_INVALIDATE of the whole heap (mojim.h): microseconds, or
 *     hundreds of milliseconds right after sync points.
 *   - After an error with errno EIO the heap can only be closed.
 *   - EOPNOTSUPP with MOJIM_HEAP_EXACT. */
int mojim_heap_rollback(mojim_heap_t *h);

/* The heap's first address. */
void *mojim_heap_base(const mojim_heap_t *h);

#ifdef __cplusplus
}
#endif

#endif
