/* mojim.h - memory that is also a file. Sync points commit it atomically, and
 * copy it to a second node before they return.
 *
 * This header is the manual of libmojim.so. Link with -lmojim. A first program
 * is in docs/tutorial/c.md, an overview with examples in docs/reference/c.md.
 *
 * CAVEATS FIRST
 *
 * 1. Stores during a sync point. Do not store into a range while a sync point of
 *    it runs (mojim_msync, gmsync). Whether such a store is committed is left to
 *    chance: see STORES DURING A SYNC POINT. Any thread may store into other
 *    ranges.
 * 2. Working copies. Memory is a working copy of the file. The file changes only
 *    at sync points.
 *      - Private (the default): one mapping per byte range. A second mapping of
 *        the same bytes fails with EBUSY. Stores need memory.
 *      - MOJIM_SHARED: any number of mappings of the same bytes. A sync point
 *        through any of them commits the stores through all. The whole file is
 *        in memory while it is mapped. ENOMEM if it would take more than half of
 *        the free memory.
 *    Never change a file of a volume by other means than this interface, whether
 *    a program is attached or not.
 * 3. fork. A child has a copy of private working copies. It can load and store,
 *    but it commits nothing: calls fail with EOPNOTSUPP. Attach after the fork. (If
 *    the process had detached all its volumes before the fork, the child is like
 *    any other process.)
 *    A child shares shared working copies, as a process that has joined
 *    (mojim_join):
 *      - It can store, and call everything. fork waits until it can.
 *      - It can only read, and standard error says so, if no descriptors are left
 *        or the owner does not answer within 5 seconds.
 *      - Its end, and its unmapping of what it has from its parent, commit nothing.
 *        The others commit its stores.
 *      - It cannot outlive the owner and go on. A program that becomes a daemon
 *        attaches afterwards.
 * 4. One process. One process at a time can be attached to a volume. Others get
 *    EBUSY, or share the volume (mojim_join), with shared working copies only.
 * 5. Doubt. A sync point that failed with ETIMEDOUT is in doubt: it is there whole,
 *    or not at all. Its bytes stay in memory and count as changed. Call again.
 *    A call that changes names or sizes can be in doubt, too. Until it is
 *    committed, other such calls and mojim_fsync fail, and so do sync points of
 *    memory behind a file's end.
 * 6. System calls. These break the noting of changes:
 *      - mprotect, mremap, madvise(MADV_DONTNEED) and MAP_FIXED over a region,
 *      - munmap in place of mojim_unmap,
 *      - closing descriptors that the program did not open.
 *    Mojim's descriptors lie beyond those of most programs as long as there is
 *    room: from 512 on, or from half of RLIMIT_NOFILE where that is less.
 *    Call mojim_dup3 in place of dup2 for a number under which the program has
 *    nothing open, while it is attached or other threads are in calls of Mojim.
 * 7. The end. A program that returns from main or calls exit ends as if it had
 *    called mojim_finish. If that fails, a line on standard error says why.
 *    Sudden death is a signal, _exit, exec or quick_exit, and the exit of a child
 *    made by fork for what it has from its parent. It loses the stores since the
 *    last sync point, and never a commit. Others that have a shared working copy
 *    mapped can still commit the stores into it (mojim_join), unless the dead
 *    process was the owner.
 * 8. chroot and setuid. Attach after them. A process that gives up its root or its
 *    user afterwards can commit what it has mapped. The volume's directory is out
 *    of its reach, so these fail (ENOENT, EACCES): changes of names and sizes, and
 *    sync points that do not fit in the log.
 *
 * CONVENTIONS
 *
 * 1. Errors. A function that fails returns -1, NULL or MAP_FAILED and sets errno.
 *    mojim_last_error has a text: why it failed, where, and what to do. A function
 *    that succeeds may change errno, like any of POSIX.
 * 2. Threads. Every function may be called from any thread at any time, with two
 *    exceptions: after mojim_detach and mojim_finish the handle is gone, and no
 *    other call may be using it then.
 *      - Signal handlers: only mojim_dup3 is safe. exit() is not, since it commits
 *        mapped regions. _exit() is safe.
 *      - No function is a cancellation point. A thread that is cancelled
 *        (pthread_cancel) in a call ends after it.
 *      - A call needs up to 128 KiB of stack, beside the thread's own variables.
 * 3. Ownership. The library copies the strings that it gets. It owns the strings
 *    that it gives. A handle belongs to the caller until mojim_detach.
 * 4. Names. A file is named by its path within the volume, without a leading '/':
 *    "log", "tables/a". Directories come and go with the names. ENAMETOOLONG for a
 *    name that this node or the mirror cannot have.
 * 5. NULL. Where a pointer is needed, NULL is EINVAL.
 * 6. Memory. A call that gets too little memory (RLIMIT_AS, say) fails with ENOMEM.
 *    It has begun nothing, and can be repeated. The bytes that it did not commit
 *    count as changed. The library reserves 32 MiB of addresses at the first
 *    attach. They take memory only while the system refuses other memory. An
 *    attach needs 32 MiB of addresses more.
 *
 * WHERE THE DATA IS WHEN A SYNC POINT HAS SUCCEEDED
 *
 *   mode           the bytes are                                  lost only if
 *   unreplicated   persistent on this node                        its disk is
 *   async          persistent on this node, handed to the link    its disk is, for
 *                  (or sent when the mirror is there again)       bytes not arrived
 *   sync           in the mirror's log (in its memory, or         both nodes fail
 *                  persistent, as its log's medium is), and
 *                  in this node's memory
 *   sync-flush     as sync, and persistent on this node           both disks are
 *   sync-disk      as sync. The mirror's log is in memory (dram   both nodes fail
 *                  or pmem), and nobody reads on the mirror
 *   sync-sec,      as sync. The mirror forwards to backups,       both nodes fail, for
 *   sync-seceth    which no sync point waits for until one lags   bytes no backup has
 *                  by more than secondary_threshold
 *
 * A primary is alone if its mirror was given up, or if it was promoted. While the
 * primary is alone, the bytes are persistent on itself, in every mode. They are
 * lost with its disk.
 *
 * In unreplicated a program that is started on a node whose disk is new begins an
 * empty volume. In every other mode a volume begins with its mirror.
 *
 * After any such failure the bytes of one sync point are there all, or none. A
 * medium "dram" is never persistent. mojim_copies tells where a sync point is.
 * docs/reference/guarantees.md has each mode, failure by failure.
 *
 * STORES DURING A SYNC POINT
 *
 * A sync point takes each byte of its ranges once, at some moment of the call. All
 * copies get the same bytes. Of the bytes in its ranges:
 *   - A store before the call is in it. The calling thread made it, or a thread
 *     that the program has ordered before it, as with a lock.
 *   - A store during the call may be in it or not, byte by byte: the later one of
 *     two stores alone, or half of one store.
 *   - A store that is not in it stays in memory and counts as changed. The next sync
 *     point of its range commits it. Nothing else is needed.
 * Where a half-done change must not be committed, threads take one of two locks:
 *   - A reader-writer lock: shared while they change data, exclusively while they call
 *     mojim_msync of all the data. It prefers writers, else the sync point may wait for
 *     ever (glibc: pthread_rwlockattr_setkind_np). examples/transfers.c does so.
 *   - A lock for each record: from the first store until gmsync of the whole change, or
 *     its transaction (mojim_tx.h), has succeeded. Threads commit at the same time then.
 *
 * errno values, for all functions:
 *   EINVAL      an argument, or the configuration, is wrong: also a node or volume
 *               that it does not have
 *   ENOENT      no such file
 *   EBUSY       one of these: another process is attached, the bytes are mapped
 *               already (privately), the file is mapped with the other kind of
 *               copy, a region is at the given address
 *   EOPNOTSUPP  Mojim cannot do this. The text names another way
 *   ETIMEDOUT   no acknowledgement in time (caveat 5): the mirror stood still for
 *               resend_timeout x resend_attempts (10 seconds by default), or for
 *               120 seconds while it syncs what was too large for the log
 *   ESTALE      another node is primary now. This one cannot commit any more.
 *               For a reader: this node is primary now
 *   EROFS       the handle, or the region, is a reader's
 *   EUCLEAN     stored bytes are not as they should be
 *   EPROTO      the other node does not speak as it should
 *   EIO         a log or data file failed, and nothing is acknowledged until the
 *               volume is attached again. Or an internal error
 *   ENOSPC      its disk is full. Where the text begins with "poisoned", nothing
 *               is acknowledged until there is room and the volume is attached again
 * and those of the system calls beneath (EACCES, ENOMEM, ...).
 */
#ifndef MOJIM_H
#define MOJIM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An attached volume. */
typedef struct mojim_attachment mojim_t;

/* ---- attach ------------------------------------------------------------ */

/* UNDER `mojim run` (docs/reference/run.md): the command starts a program that is linked
 * with this library on the node where the volume's primary is. With three voters, and
 * `mojim run` on both nodes, the program is started again on the other node when that
 * takes over. The volume is not mounted for the program. It has two ways to its data:
 *   - It attaches, as the only program, with the configuration $MOJIM_CONFIG and the node
 *     $MOJIM_NODE.
 *   - It opens files of the volume's directory, maps them with mmap and MAP_SHARED, and
 *     calls msync and gmsync (the paper's Figure 1: examples/fig1.c).
 * A script or an interpreter that starts or loads such a program needs
 * `mojim run --preload`. Over a mount an attach fails with EACCES. */

/* Attaches this process to a volume, as its primary.
 *
 * `config` is the configuration file, `node` a node in it. `volume` may be NULL where
 * there is only one. The call recovers the state that an earlier process left. In the
 * modes with a mirror, it waits for the mirror. In async it waits half a second, then
 * begins without it.
 *
 * NULL on error:
 *   EBUSY      another process is attached
 *   ESTALE     another node is primary
 *   ETIMEDOUT  the mirror does not answer
 *   and others of the list above. */
mojim_t *mojim_attach(const char *config, const char *node, const char *volume);

/* Attaches this process to a volume as a reader. The node follows the primary: it is
 * the mirror or a backup (in mode sync-disk a backup only). The node's daemon must run
 * on this host, under this process's user or root's. Readers do not exclude each other.
 *
 * Every region of the handle is read-only, and shows whole sync points only. At every
 * instant all regions together show everything up to one LSN (mojim_shown), and nothing
 * of a later one. They follow by themselves, with no call, also while the node writes a
 * checkpoint.
 *
 *   - Several bytes of one state. The regions may move on between two loads. Read
 *     mojim_shown before and after: if both are equal, the bytes were of one state.
 *   - Waiting. A page that was not touched yet waits for the node at its first load. So
 *     does every page while it is being changed, for some microseconds.
 *   - A node that does not answer. It was ended, or is not up to date yet after a crash,
 *     or became primary. Pages that were touched stay readable and stand still, and
 *     mojim_following says why. A page that is not there waits for 30 seconds, then gives
 *     SIGBUS until the node answers again.
 *   - Signals. A store gives SIGSEGV. Memory behind the file's end gives SIGBUS until the
 *     file has grown so far. All of it does so once the file was removed.
 *   - The shown state never goes back, unless the volume itself does. In mode async, or
 *     after `mojim promote --force`, a new primary may lack the last sync points. Its
 *     copy takes the place of the one that had them.
 *   - System calls. Most systems allow userfaultfd to unprivileged programs for their own
 *     faults only (vm.unprivileged_userfaultfd = 0). There a system call that is given a
 *     page which is not there fails with EFAULT. Load a byte of the page first, or use
 *     mojim_read. mlock of a region and MADV_POPULATE_READ are such calls (ENOMEM,
 *     EFAULT). In root's programs the calls wait.
 *   - Locked memory (mlockall, mlock) shows the same as any other. But a page that is
 *     changed, or is the oldest of too many, goes nevertheless. Its next load waits.
 *   - Signal handlers may load from a region. The handler waits while its thread is in a
 *     reader's map, size, read or unmap: for 30 seconds at most, where the node does not
 *     answer. It may wait for ever if it interrupted malloc or free, and loads from a
 *     page that is not there. The reason: the thread that answers its fault uses malloc,
 *     and may need the same arena. (glibc shares arenas among threads when there are more
 *     than eight for each processor.) Load the page before, or keep the signal back
 *     around malloc.
 *   - A child made by fork has none of the regions.
 *
 * These calls work on such a handle: mojim_map, mojim_map_at (without MOJIM_CREATE),
 * mojim_unmap, mojim_size, mojim_shown, mojim_following, mojim_wait, mojim_read,
 * mojim_detach and mojim_finish. Everything else fails with EROFS, and so does a sync
 * point of such a region.
 *
 * NULL on error:
 *   ESTALE        the node is the primary
 *   EINVAL        the node is the mirror in mode sync-disk
 *   EBUSY         the node has no copy to show yet
 *   ECONNREFUSED, ENOENT
 *                 its daemon does not run
 *   EOPNOTSUPP    the system has no userfaultfd (Linux 6.6) */
mojim_t *mojim_attach_reader(const char *config, const char *node,
                             const char *volume);

/* Attaches as mojim_attach does, or shares the volume with another process of this node,
 * its owner. It shares where that process has joined the volume, or has attached it and
 * the configuration says working = "shared". (With that key mojim_attach is the same as
 * this call.)
 *
 * All processes see the same memory (caveat 2):
 *   - The owner shares the files that it maps with MOJIM_SHARED, or all of them where the
 *     configuration says working = "shared". Others get EBUSY for files that it has
 *     mapped otherwise.
 *   - The others share everything.
 * Each process can call everything. The owner does the work: a sync point of another
 * process costs a message to the owner and one back more. Threads of one such process
 * wait for each other in sync points.
 *
 *   - A process dies. Its stores stay in the memory, not committed, where others have the
 *     file mapped. The next sync point commits them. That one looks at all of the file's
 *     pages that the process could store to.
 *   - The owner ends, in any way. The others' memory stays, but every call fails with
 *     ESTALE: nothing can be committed any more. Stores that nobody had committed are not
 *     kept. The others can detach, once a call has failed so (the detach may be that
 *     call), and join again. One of them is the owner then. A child made by fork while
 *     its parent was attached cannot join again.
 *   - Calls wait as long as the owner does. There is no other limit.
 *
 * One gmsync can have 2,728 ranges, one process 4,096 regions, and a volume 256 such
 * processes. NULL on error: EBUSY where another process has the volume for itself. This
 * takes some seconds, since that process may be about to end, or to share. */
mojim_t *mojim_join(const char *config, const char *node, const char *volume);

/* 1 if this process can use the handle. 0 in a child made by fork that shares no memory
 * with its parent. -1 on error. */
int mojim_usable(mojim_t *m);

/* Ends the attachment:
 *   1. Regions without MAP_ATOMIC are committed.
 *   2. All regions are unmapped, and heaps closed (mojim_heap.h).
 *   3. Committed bytes are written to their files.
 * On success the handle is gone. On error it stays valid where something could not be
 * committed. The regions and heaps are still there, and the call can be repeated. EBUSY
 * as for mojim_unmap. */
int mojim_detach(mojim_t *m);

/* mojim_detach for atexit handlers and destructors. It leaves the memory mapped, since
 * other threads may still use it. Their stores are not kept any more. */
int mojim_finish(mojim_t *m);

/* ---- regions ------------------------------------------------------------ */

/* Flags of mojim_map. */
#define MOJIM_CREATE 0x00800000 /* make the file if it is not there */
#define MOJIM_RDONLY 0x00400000 /* no stores */
/* A shared working copy (caveat 2), unless the configuration says otherwise
 * (`working`). `mojim run --preload` gives this to MAP_SHARED. */
#define MOJIM_SHARED 0x00200000
/* Stores that were not committed are thrown away at unmap and detach. Without this flag,
 * both are sync points. Plain mmap takes it under `mojim run --preload`, with MAP_SHARED.
 * Without Mojim, MAP_SHARED ignores it. (Bit 25 is the highest that Linux leaves free:
 * 26 to 31 hold the logarithm of a huge page's size.) */
#define MAP_ATOMIC 0x02000000

/* Maps `len` bytes from the start of a file. 0: all of it. A mapping that reaches beyond
 * the end of the file makes it larger (not with MOJIM_RDONLY: EINVAL).
 *
 * The address is another one in each run: keep indices or offsets in the file. Pointers
 * need mojim_pmap (mojim_persistent.h) or a heap (mojim_heap.h).
 *
 * MAP_FAILED on error: EBUSY if bytes of it are mapped (caveat 2), ENOMEM if a shared
 * working copy has no room. */
void *mojim_map(mojim_t *m, const char *file, size_t len, int flags);

/* The same from `offset`, a multiple of the page size.
 *
 * If `fixed` is not NULL, the mapping lies at this address, in place of the memory there
 * (as MAP_FIXED):
 *   - A region, or a part of one, of any volume or reader: EBUSY, and nothing has changed.
 *   - All other memory there is gone without a message, whether it is a heap, a stack or
 *     a library. It is gone also where the call fails. Reserve addresses first, by mmap
 *     with PROT_NONE. */
void *mojim_map_at(mojim_t *m, const char *file, size_t len, int flags,
                   off_t offset, void *fixed);

/* Ends a region, given by its address and length (which may be rounded up to whole
 * pages). The call is a sync point, unless the region was mapped with MAP_ATOMIC. If the
 * sync point fails, the region stays.
 *
 * A shared working copy has one state, whichever process stored it. Stores that are not
 * committed stay there for the other mappings. A sync point of any mapping commits them,
 * a rollback through any undoes them, and only the last mapping to go throws them away.
 *
 * Errors:
 *   EINVAL      no region begins there
 *   EOPNOTSUPP  it is a part of a region. Call mojim_msync for it, with MS_SYNC or
 *               MS_INVALIDATE
 *   EBUSY       the thread has a transaction open (mojim_tx.h) that changes the region,
 *               or another thread has any open for 3 s */
int mojim_unmap(void *addr, size_t len);

/* Keeps memory at the place of the region that begins at `addr`, for a program that
 * cannot tell whether its pointers are all gone. When the region goes (mojim_unmap,
 * mojim_detach), ordinary memory of this process takes its place, with the same bytes.
 *
 *   - This memory is not kept. At no moment is nothing mapped there. Stores meanwhile may
 *     be lost.
 *   - The bytes are copied (pages of zeros take no memory). All of them have to be the
 *     file's, which was not cut (mojim_truncate).
 *   - Where there is too little memory, the unmap or detach fails, and cannot be repeated
 *     for this region.
 *   - After mojim_finish, by contrast, the memory is still the file's. Another process
 *     may change bytes that were not stored to. Where it cuts the file, loads raise
 *     SIGBUS.
 *
 * Errors: EINVAL if no region begins there, or it is a heap's. EOPNOTSUPP for a reader's
 * region, and for one in the copy of another process (mojim_join). */
int mojim_leave_memory(void *addr);

/* 1 if the address lies in a region of this process, else 0. */
int mojim_is_region(const void *addr);

/* MEMORY. A page that was stored to stays in memory until its region is unmapped. Two
 * keys of the volume's section change this:
 *
 *   `memory`           the page stays only until it is committed and others need the room
 *   `max_uncommitted`  a store that would make more pages uncommitted gets SIGBUS on its
 *                      thread (si_code BUS_ADRERR, si_addr its address), after a message
 *                      on standard error. The process ends where SIGBUS is blocked or
 *                      ignored
 *
 * A program that goes on leaves its SIGBUS handler by siglongjmp, and commits or rolls
 * back then (neither is async-signal-safe). It may do so only where the store is its own.
 * A store inside a call of the C library or of mojim is not: that call's locks would stay
 * held. (write(2) is such a call under `mojim run --preload`.)
 *
 * With either key:
 *   - System calls that write into a region (read(2)) fail with EFAULT where the program
 *     did not store lately.
 *   - Memory into which a device writes by itself must not lie in a region (O_DIRECT
 *     reads, fixed buffers of io_uring, RDMA). The device has the pages from when it was
 *     told of them, and stores past their protection. A page that is given back meanwhile
 *     is the region's no more.
 *   - Threads that store do not block SIGSEGV (the process would end). A handler for it
 *     that is installed after the region was mapped calls the one before it for every
 *     fault that is not its own. */

/* ---- sync points --------------------------------------------------------- */

/* Commits the bytes [addr, addr + len) of one region: atomically, durably as the mode
 * says, and no byte beyond them (unless the volume is configured with
 * msync_rounding = "page"). Neither `addr` nor `len` need be aligned. Ranges up to 16 KiB
 * are sent as they are. Of larger ones, the changed bytes are sent. Where nothing was
 * changed, the call still waits until the sync points that other threads have begun for
 * the region are committed.
 *
 * flags, as for msync(2):
 *   MS_SYNC        commits, and waits.
 *   MS_ASYNC       begins to commit, and does not wait.
 *                    - The bytes are copied, so later stores are not in it. It is atomic,
 *                      and in order with all other sync points.
 *                    - mojim_last_lsn has its number, to give to mojim_wait.
 *                    - It goes on by itself (within milliseconds, unless the machine or
 *                      the link is busy). Until then it is in doubt: it outlives the
 *                      program, but not the node's power.
 *                    - If it cannot be committed, the next call that waits fails with the
 *                      reason, and so does every one until it is committed. Such calls
 *                      are an MS_SYNC, gmsync or mojim_fsync in the volume, mojim_wait,
 *                      mojim_detach.
 *                    - A full log, or a range larger than half of it, makes the call
 *                      wait. So do copies that other threads make at that moment, for as
 *                      long as they take.
 *   MS_INVALIDATE  alone, in a region with MAP_ATOMIC: rolls back these bytes, and no
 *                  others (but see msync_rounding), to their last committed state.
 *                    - Sync points that MS_ASYNC or other threads have begun are awaited
 *                      first, and are committed then.
 *                    - Where they cannot be (ETIMEDOUT, ESTALE, EIO), the memory stays as
 *                      it is.
 *                  In a region without MAP_ATOMIC it does nothing, as on Linux. With one
 *                  of the other flags it is ignored.
 *   MS_MOJIM       as MS_SYNC, unless MS_ASYNC is given.
 *
 * Errors:
 *   EINVAL  the flags have none of these, or both MS_SYNC and MS_ASYNC. Or the range
 *           reaches beyond its region (which may be rounded up to whole pages)
 *   ENOMEM  `addr` is in no region */
int mojim_msync(void *addr, size_t len, int flags);

/* Flag of gmsync. Not one of the kernel's MS_ flags. */
#define MS_MOJIM 0x100

/* Commits n ranges, of one or several regions of one volume, atomically together (Mojim,
 * Section 3.1). The ranges may overlap. flags: MS_MOJIM, MS_SYNC, or both. Or MS_ASYNC, as
 * for mojim_msync.
 *
 * EINVAL if a range is negative, in no region, beyond its region, or of another volume.
 * Nothing is committed then.
 *
 * The struct is the paper's. A program that declares it itself, as the paper's Figure 1
 * does, defines MOJIM_NO_STRUCT before it includes this header. */
#ifndef MOJIM_NO_STRUCT
struct msync_input {
    void *address;
    int length;
};
int gmsync(struct msync_input *input, int n, int flags);
#else
int gmsync(void *input, int n, int flags);
#endif

/* Commits the changes of a file in all its regions, atomically together. Waits for every
 * MS_ASYNC of the volume. It is this interface's fsync(2) and fdatasync(2). */
int mojim_fsync(mojim_t *m, const char *file);

/* ---- numbers --------------------------------------------------------------- */

/* The number (LSN) of the calling thread's last successful sync point or change of names
 * or sizes, also of one that MS_ASYNC began. 0 before the first. Numbers grow within a
 * volume. */
uint64_t mojim_last_lsn(void);

/* Waits until everything up to `lsn` is acknowledged by the mode's rule. For a reader:
 * until it is shown, at most 30 seconds (ETIMEDOUT). */
int mojim_wait(mojim_t *m, uint64_t lsn);

/* For a reader: the LSN of the state that its regions show. It costs a load and a branch,
 * no system call. */
int64_t mojim_shown(mojim_t *m);

/* For a reader: 0 if its node was heard at the last try. Else -1, and errno and the text
 * say why. The regions stand still then, and go on when the node is heard again. */
int mojim_following(mojim_t *m);

/* For a reader: reads up to n bytes of a file from `offset` on. Returns how many there
 * are. Each 64 KiB from a page's beginning are of one state: that of an LSN which is
 * shown when the call returns. */
ssize_t mojim_read(mojim_t *m, const char *file, void *buf, size_t n,
                   off_t offset);

/* How safe a sync point is on a node. */
#define MOJIM_NONE 0     /* not there, or not known to be */
#define MOJIM_RECEIVED 1 /* in the node's memory: survives processes, not power */
#define MOJIM_PMEM 2     /* in persistent memory */
#define MOJIM_DISK 3     /* on a disk */

struct mojim_copy {
    char node[68]; /* the node's name, ended by a zero byte */
    int level;     /* MOJIM_NONE ... MOJIM_DISK */
};

/* Tells on which nodes `lsn` is. Fills at most n entries of `out`: this node first, then
 * the mirror, then the backups. `out` may be NULL if n is 0. Each backup is asked over
 * the network, and its answer is awaited for at most a second. Returns the number of
 * nodes, which may be more than n. */
int mojim_copies(mojim_t *m, uint64_t lsn, struct mojim_copy *out, int n);

/* ---- files ------------------------------------------------------------------ */

/* Changes of names and sizes are sync points themselves: committed when they return, in
 * order with all others. A file that somebody put into the volume's directory while
 * nothing was attached is taken into the volume when it is first used. */

/* Makes an empty file. Returns 1 if it did, 0 if the file was there. */
int mojim_create(mojim_t *m, const char *file);

/* Removes a file. EBUSY while it is mapped. */
int mojim_remove(mojim_t *m, const char *file);

/* Gives a file another name, in place of a file of that name (EBUSY while that one is
 * mapped). Regions follow their file. */
int mojim_rename(mojim_t *m, const char *from, const char *to);

/* Sets a file's size, in bytes.
 *   - As with any file, memory beyond the new end must not be touched any more. After
 *     ETIMEDOUT this holds beyond the nearer of both ends.
 *   - Sync points leave memory beyond the end out. If all of a sync point lies there,
 *     nothing is committed.
 *   - Bytes between the end and the end of its page belong to no file. */
int mojim_truncate(mojim_t *m, const char *file, off_t size);

/* Size of a file in bytes. -1 with ENOENT if it is not there. */
off_t mojim_size(mojim_t *m, const char *file);

/* Waits until the volume's files, read by other means than a region, show everything that
 * was committed before this call. */
int mojim_settle(mojim_t *m);

/* As dup3(2): `from` equal to `to` is EINVAL. It takes a moment when no descriptor of
 * Mojim's has the number `to` on its way to one of its own. Needs no attachment.
 *
 * Signal handlers may call it. A child of vfork may not, and does not need it. It waits a
 * second at most. An open may hold the number for longer: then the call fails with EBUSY.
 * Returns `to`, or -1 with errno as dup3 sets it. */
int mojim_dup3(int from, int to, int flags);

/* Two calls for libraries that stand between a program and the C library, as
 * libmojim_preload.so does.
 *
 * mojim_is_yours: 1 if the program has a descriptor of this number. 0 if not, also where
 * Mojim has it for a moment. The rules are those of mojim_dup3.
 *
 * mojim_open_above: as open(2), close-on-exec, with a number among Mojim's own. */
int mojim_is_yours(int fd);
int mojim_open_above(const char *path, int flags, int mode);

/* Writes the path of the volume's directory to `out` (at most n bytes, with the zero
 * byte), without attaching. Returns the path's length. ERANGE if n is too small. */
int mojim_directory(const char *config, const char *node, const char *volume,
                    char *out, size_t n);

/* The same of a directory for locks. Programs of this node that share a volume may keep
 * locks on its files there: the files themselves are for reading only. The directory may
 * not be there yet. */
int mojim_locks(const char *config, const char *node, const char *volume,
                char *out, size_t n);

/* ---- texts ------------------------------------------------------------------- */

/* The text of the calling thread's last error. "" before the first. Valid until the
 * thread's next call of this library. */
const char *mojim_last_error(void);

/* The library's version, as "0.1.0". */
const char *mojim_version(void);

#ifdef __cplusplus
}
#endif

#endif
