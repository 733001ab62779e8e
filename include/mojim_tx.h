/* mojim_tx.h - durable transactions: several stores, all of them or none.
 *
 * A transaction changes memory in place and commits its changes as one sync point:
 * whole or not at all after any failure, durable and replicated as the volume's
 * mode says. An abort gives the memory what it had.
 *
 * This header is the manual. docs/reference/transactions.md has examples, and the
 * blocks that the compiler captures (gcc -fgnu-tm). mojim.h has the conventions.
 * Source: Mnemosyne, "Durable memory transactions".
 *
 * CAVEATS FIRST
 *
 * 1. There is no concurrency control. A transaction belongs to the thread that
 *    began it. Threads have theirs at the same time, and each commit has its own
 *    thread's bytes only. The program needs a lock of its own where two
 *    transactions change the same bytes, or one reads what another has not
 *    committed. Hold it from before the first such access until the commit has
 *    returned.
 * 2. Add before you store. A store without mojim_tx_add before it is neither
 *    committed nor taken back.
 * 3. Map regions with MAP_ATOMIC (heaps are). Without it, an unmap, a detach and the
 *    program's end commit the region as it is, with half of an open transaction.
 *      - Unmap and detach fail with EBUSY where the thread's own open transaction
 *        has bytes of the region.
 *      - They wait for the transactions of other threads, 3 s at most. Then they
 *        fail with EBUSY, too.
 * 4. mojim_msync and gmsync do not know of transactions. Of a range in which one is
 *    open they commit half of it. mojim_heap_sync waits for open ones.
 * 5. Signal handlers may not call these functions, nor store to bytes that a
 *    transaction changes.
 *      - A longjmp out of a transaction leaves it open: abort it where the jump
 *        lands. One out of a captured block is undefined.
 *      - A thread that ends (pthread_exit, cancellation) aborts its open
 *        transaction. A process that ends commits nothing of it.
 * 6. In a child made by fork mojim_tx_begin fails with EOPNOTSUPP. The child can
 *    abort the transactions that its parent had open, in its copy of the memory.
 * 7. All regions of one transaction are of one volume. Else the commit fails with
 *    EINVAL. An abort takes back stores to other memory (a stack, malloc's). No
 *    commit has them. A volume that rounds to pages (msync_rounding = "page") is
 *    refused at the commit, with EOPNOTSUPP.
 */
#ifndef MOJIM_TX_H
#define MOJIM_TX_H

#include <mojim_heap.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A function that a __transaction_atomic block may call as it is. */
#if defined(__GNUC__) && !defined(__clang__)
#define MOJIM_TX_PURE __attribute__((transaction_pure))
#else
#define MOJIM_TX_PURE
#endif

/* ---- explicit transactions ------------------------------------------------ */

/* Begins a transaction. Inside one, it begins a level of it. Waits while another thread is
 * in mojim_heap_sync. 0, or -1 on error: EOPNOTSUPP in a forked child, ENOMEM. */
int mojim_tx_begin(void);

/* Notes `len` bytes anywhere, before you store to them. An abort gives them their present
 * contents back. The commit commits the contents that they have then.
 *
 * The bytes must be writable. Adding bytes twice does no harm, and costs their length
 * again. -1 on error: EINVAL where no transaction is open, ENOMEM (then do not store). */
MOJIM_TX_PURE int mojim_tx_add(void *addr, size_t len);

/* The same for bytes that hold nothing yet. An abort leaves them as they are, so they are
 * not copied. */
MOJIM_TX_PURE int mojim_tx_add_new(void *addr, size_t len);

/* mojim_tx_add of 8 bytes, and the store. */
MOJIM_TX_PURE int mojim_tx_set(uint64_t *place, uint64_t value);

/* Ends the innermost level.
 *   - An inner level's changes become the outer one's.
 *   - The outermost commits all bytes that were added, exactly, as one sync point.
 *
 * -1 on error, with the errno of gmsync, or ENOMEM. The transaction stays open with its
 * stores in memory. Call again, or abort. Once it failed with ETIMEDOUT, or after that
 * with ENOSPC, it may be in doubt: then only call again. Stores between two tries are in
 * the later try. The earlier one may be committed by itself. */
int mojim_tx_commit(void);

/* Takes the innermost level back, and ends it. -1 on error:
 *   ETIMEDOUT           it is in doubt: it may be committed
 *   EOPNOTSUPP, ENOMEM  it made stores that nobody noted: in a __transaction_relaxed block
 *                       with an unsafe call, or when memory ran out in a captured block.
 *                       It has ended. Those stores stay in memory, and mojim_tx_failed()
 *                       is not 0 from here on
 *
 * After a commit that failed with ESTALE or EIO, it is taken back in memory, where nothing
 * can be committed any more. An attach then shows the volume's state. Bytes that were
 * added in frames of functions that have returned are left as they are. */
int mojim_tx_abort(void);

/* How many levels the thread has open. 0: no transaction. */
MOJIM_TX_PURE int mojim_tx_is_open(void);

/* Register a call of `f` with `arg`.
 *
 * mojim_tx_on_commit: `f` is called after the outermost level's commit, when the
 * transaction is closed, in the order of these calls.
 *
 * mojim_tx_on_abort: `f` is called when this level is taken back, in the reverse order, in
 * its turn among the stores. (Roots are taken back behind all of that.) Then `f` begins
 * and ends no transaction.
 *
 * `f` does not throw. */
MOJIM_TX_PURE int mojim_tx_on_commit(void (*f)(void *arg), void *arg);
MOJIM_TX_PURE int mojim_tx_on_abort(void (*f)(void *arg), void *arg);

/* ---- allocation ------------------------------------------------------------- */

/* Sets *pointer to a new block of `size` bytes, in the same commit as the allocation. A
 * crash leaves both or neither. (Mnemosyne's pmalloc.)
 *
 *   - The heap is `h`. NULL: the one that `pointer` lies in, or the one opened first.
 *   - `pointer` may lie anywhere.
 *   - Inside a transaction, the call is part of it. Else it is one of its own.
 *   - The transaction commits the block's bytes as they are when it commits.
 *   - While a transaction of its own is in doubt, the call tries again, as a captured
 *     block does.
 *
 * -1 on error: ENOMEM, EINVAL, and the errors of mojim_tx_commit. Nothing has changed
 * then. */
MOJIM_TX_PURE int mojim_pmalloc(mojim_heap_t *h, size_t size, void **pointer);

/* Frees the block at *pointer, and sets that to NULL, likewise. */
MOJIM_TX_PURE int mojim_pfree(void **pointer);

/* ---- captured blocks ------------------------------------------------------------ */

/* A __transaction_atomic block (gcc -fgnu-tm, linked with -lmojim_itm -lmojim) cannot
 * return an error. When its commit fails:
 *
 *   - By default ETIMEDOUT and ENOMEM are tried again, for ever: the block ends when it is
 *     committed. After any other error it is given up. Its stores stay in memory, and no
 *     transaction of the process is committed any more. A line on standard error says so,
 *     and mojim_tx_failed. The program goes on.
 *   - With a handler: it is called in the thread, with the errno and the text. It returns
 *     not 0 to try again, 0 to give up. It calls nothing of Mojim but mojim_last_error.
 *     A handler of NULL restores the default. */
typedef int (*mojim_tx_handler)(int error, const char *text, void *arg);
void mojim_tx_on_failure(mojim_tx_handler handler, void *arg);

/* The errno for which a block of this process was given up. 0: none was. */
MOJIM_TX_PURE int mojim_tx_failed(void);

/* For libmojim_itm.so alone. */
void *mojim_tx_thread_2(void);

#ifdef __cplusplus
}
#endif

#endif
