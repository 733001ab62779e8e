/* mojim_persistent.h - variables that keep their values from run to run, regions that keep
 * their address, and logs.
 *
 * This header is the manual. docs/reference/variables.md has examples. mojim.h has the
 * conventions (errors, threads, ownership), which hold here too.
 * Source: Mnemosyne, "Programming model".
 *
 * CAVEATS FIRST
 *
 * 1. Nothing is durable before it is committed: by mojim_variables_sync, by mojim_msync or
 *    gmsync of a variable, or by a transaction (mojim_tx.h). The rest is gone at the end.
 * 2. Variables have other addresses in the next run. No pointer to one may lie in persistent
 *    memory. Pointers into a heap (mojim_heap.h) stay valid.
 * 3. A program whose variables changed cannot use the file: see "Layout".
 */
#ifndef MOJIM_PERSISTENT_H
#define MOJIM_PERSISTENT_H

#include <mojim_heap.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- variables ------------------------------------------------------------------
 *
 * MOJIM_PERSISTENT int counter = 0;
 *
 * declares a variable whose value is kept in a file of a volume, from the call of
 * mojim_variables on. Before that call it is an ordinary variable with its initial value.
 *
 *   - It has any type of plain data: numbers, arrays, structs, pointers that are NULL at
 *     first.
 *   - It is declared at file scope, or static in a function. `static` may stand before it.
 *   - Several source files of a program have one section of variables together, and so one
 *     file.
 *   - A shared library has its own section. It calls mojim_variables itself, with another
 *     file.
 *
 * Refused by the compiler:
 *   - const, thread-local: "causes a section type conflict with 'mojim_first_'".
 *   - C++, an initial value computed at the start: "does not have a constant initializer".
 *     (A constructor that runs at the start would run in every program.) Needs GCC 10 or
 *     clang 12, or later.
 *   - C++, an inline variable, or a static one in an inline function: "section type
 *     conflict" (GCC).
 * Refused by mojim_variables (EINVAL, the text has the variable's name):
 *   - An initial value that is an address (of a variable, function, string, vtable). In a
 *     program linked with -no-pie: eight aligned bytes that look like an address in it.
 *   - Two variables of one name. Static variables, in functions too, need names of their
 *     own.
 *   - A variable that a shared library exports: the program may get a copy in its place.
 *     Declare it static, or with __attribute__((visibility("hidden"))).
 * Not found out:
 *   - C++: a static member of a class template, a variable template, a static variable in a
 *     template's function. GCC ignores the section there, without a warning. The variable
 *     is an ordinary one, and its value is lost.
 *   - A destructor.
 *   - A type that holds addresses which it gets later (std::string).
 *   - A type that changes and keeps its size.
 *
 * Layout. The file keeps the name, offset and size of each variable.
 *   - A program with a variable more or less, or with another name, size or order, is
 *     refused: EINVAL, and the text names the change. (Another compiler or another -O may
 *     change the order.)
 *   - Initial values may change: the file's values count.
 *   - The names are those of the symbol table. A program may be stripped of it (strip, -s).
 *     Then only one build of it is accepted: the very build that made the file, or last
 *     used it with names. strip -g keeps the names.
 *
 * Tested: x86-64 and GCC, with PIE, -no-pie, -flto, shared libraries, ld.bfd, gold, lld. */

#if defined(__has_attribute)
#if __has_attribute(retain)
#define MOJIM_RETAIN_ , retain
#endif
#endif
#ifndef MOJIM_RETAIN_
#define MOJIM_RETAIN_
#endif
#if defined(__cplusplus) && defined(__clang__)
#define MOJIM_CONSTANT_ __attribute__((require_constant_initialization))
#elif defined(__cplusplus)
#define MOJIM_CONSTANT_ __constinit
#else
#define MOJIM_CONSTANT_
#endif

#define MOJIM_PERSISTENT \
    MOJIM_CONSTANT_ __attribute__((section("mojim_persistent"), used MOJIM_RETAIN_))

/* The section begins with a page, and what lies behind it (.bss) with another. */
__extension__ static char mojim_first_[0]
    __attribute__((section("mojim_persistent"), aligned(4096), used MOJIM_RETAIN_));
static char mojim_behind_ __attribute__((aligned(4096), used MOJIM_RETAIN_));
extern char __start_mojim_persistent[] __attribute__((visibility("hidden")));
extern char __stop_mojim_persistent[] __attribute__((visibility("hidden")));

/* The section of the caller's program or library. */
#define MOJIM_VARIABLES_START ((void *)__start_mojim_persistent)
#define MOJIM_VARIABLES_BYTES \
    ((size_t)(__stop_mojim_persistent - __start_mojim_persistent))

int mojim_variables_of(mojim_t *m, const char *file, void *start, void *stop);

/* Makes the variables of the calling program, or shared library, persistent.
 *
 *   - The first time, their initial values become the file's first state, committed when
 *     the call returns. Later the variables have the file's values.
 *   - Call it once, before other threads use the variables.
 *   - The mapping is one with MAP_ATOMIC.
 *   - mojim_detach makes them ordinary variables again, which keep their last values. So
 *     does an error.
 *   - A library with persistent variables is never unloaded.
 *
 * -1 on error:
 *   EINVAL      refused, as above
 *   EUCLEAN     the file holds something else, or is damaged
 *   EBUSY       these variables are persistent already, or the file is mapped (by a library,
 *               say, that gives the same name)
 *   EOPNOTSUPP  the program's own file cannot be read. Or the handle is of mojim_join, for
 *               another process's volume. Or the caller is a child made by fork
 *   EROFS       the handle is of mojim_attach_reader
 *   and those of mojim_map. */
static inline int mojim_variables(mojim_t *m, const char *file)
{
    return mojim_variables_of(m, file, MOJIM_VARIABLES_START, __stop_mojim_persistent);
}

/* Commits all variables of the calling program, or shared library, atomically together, as
 * mojim_msync with MS_SYNC does. */
static inline int mojim_variables_sync(void)
{
    return mojim_msync(MOJIM_VARIABLES_START, MOJIM_VARIABLES_BYTES, MS_SYNC);
}

/* ---- regions made at run time ------------------------------------------------------ */

/* Maps a persistent region: `size` bytes of a file of the volume, at the same address in
 * every run. So pointers between its bytes stay valid.
 *
 * A region that is not there is made, of zeros. Its address is chosen by chance between
 * 0x2000'0000'0000 and 0x3000'0000'0000. `size` is used then. Later it is the same, or 0.
 * The mapping is one with MAP_ATOMIC, for mojim_msync and gmsync. (In the volume the file
 * has 64 KiB more.)
 *
 * MAP_FAILED on error:
 *   EINVAL             the region has another size
 *   EADDRINUSE         the addresses are taken in this process
 *   EUCLEAN            the file is no region, or is damaged
 *   EBUSY              the file is mapped
 *   EOPNOTSUPP, EROFS  as for mojim_variables */
void *mojim_pmap(mojim_t *m, const char *file, size_t size);

/* Ends a region, given by its address. Stores that were not committed are thrown away. The
 * file stays: mojim_remove removes it. EINVAL if no region of mojim_pmap begins there. */
int mojim_punmap(void *addr);

/* ---- one variable -------------------------------------------------------------------- */

/* Stores eight bytes, atomically, and makes them durable before it returns. `p` is a
 * multiple of 8 (EINVAL).
 *
 *   - In a region of a volume (a persistent variable, a heap), by one sync point of these
 *     eight bytes, with the mode's promises. On error the value is in memory, and in doubt.
 *   - In other memory, by a store past the cache (movnti) between two fences. It is durable
 *     where that memory is persistent itself: a file on DAX, mapped by the program with
 *     MAP_SYNC. In any other memory it is not. Earlier stores of the calling thread that it
 *     flushed, or made past the cache, are durable before it.
 *
 * It is the last step of a shadow update: allocate, fill and commit the new, then swing the
 * pointer (examples/shadow.c). */
int mojim_store8(uint64_t *p, uint64_t value);

/* ---- logs ---------------------------------------------------------------------------- */

/* A log has records of any length, in a ring of a fixed size.
 *   - A record that was appended is there after a crash, whole. One whose append did not
 *     return is there whole or not at all.
 *   - Any thread may make every call at any time: threads of one log wait for each other,
 *     and share no write. Not in a child made by fork (EOPNOTSUPP).
 *   - One process has a log open. */
typedef struct mojim_log mojim_log_t;

/* How the end of a log is found after a crash. `mojim bench log` tells the costs.
 *   TORN_BIT    63 bits of each word are data. One says in which pass over the ring the word
 *               was stored. One fence an append. Damaged bytes are not noticed
 *   TWO_FENCES  the end is stored, and fenced, behind each record. Damaged bytes are not
 *               noticed
 *   CHECKSUM    16 bytes a record. One fence an append. A damaged record ends the log
 * In a volume an append is one sync point in each of them. */
#define MOJIM_LOG_TORN_BIT 1
#define MOJIM_LOG_TWO_FENCES 2
#define MOJIM_LOG_CHECKSUM 3

/* Opens a log in a file of a volume, and makes it if it is not there. An append, and a
 * truncation, is one sync point.
 *
 *   `size`      bytes of the ring, up to 1 TiB
 *   `encoding`  MOJIM_LOG_TORN_BIT, MOJIM_LOG_TWO_FENCES or MOJIM_LOG_CHECKSUM
 * Both are used when the log is made. Later both may be 0.
 *
 * NULL on error:
 *   EINVAL             the log has another encoding. Or it is new and lacks a size or an
 *                      encoding
 *   EUCLEAN            the file holds something else, or its header is damaged
 *   EBUSY              it is open
 *   EOPNOTSUPP, EROFS  as for mojim_variables
 *   and those of mojim_map. */
mojim_log_t *mojim_log_open(mojim_t *m, const char *file, size_t size, int encoding);

/* Opens a log in persistent memory, outside any volume and not replicated. `path` is a file
 * on DAX. Or it is one on tmpfs, which stands for persistent memory and is lost with the
 * power. Stores go past the cache, and are fenced.
 *
 * `delay_ns`: nanoseconds that calls of this log wait after each store of 8 bytes, as slower
 * memory would (the poster's emulation: 150).
 *
 * Errors: EBUSY where a process has it open, EOPNOTSUPP on another file system. */
mojim_log_t *mojim_log_open_pmem(const char *path, size_t size, int encoding,
                                 unsigned delay_ns);

/* Appends a record, durably. `position`, unless NULL, gets the record's position. -1 on
 * error:
 *   - ENOBUFS: the ring has no room. Nothing has changed. See mojim_log_truncate.
 *   - The errors of a sync point, ENOSPC (the disk is full) among them. The record is in
 *     doubt, and within the log's ends. Do not append it again: a later append that
 *     succeeds makes it durable, too. */
int mojim_log_append(mojim_log_t *log, const void *data, size_t n, uint64_t *position);

/* Reads the record at *position into `out`, which has room for n bytes. Sets *position to
 * that of the next one. Returns the record's length in bytes. -1 on error:
 *   ENOENT  the end
 *   ERANGE  the record is longer than n. The text says how long. *position stays
 *   EINVAL  no record begins there */
ssize_t mojim_log_read(mojim_log_t *log, uint64_t *position, void *out, size_t n);

/* Discards the records before `position`, by one store of 8 bytes. `position` is that of a
 * record, or the end (EINVAL). */
int mojim_log_truncate(mojim_log_t *log, uint64_t position);

/* The position of the oldest record, and that behind the last. Either may be NULL. */
int mojim_log_ends(mojim_log_t *log, uint64_t *first, uint64_t *end);

/* Closes a log. No other call may be using it. mojim_detach does not close logs: after it,
 * you can only close them. */
int mojim_log_close(mojim_log_t *log);

#ifdef __cplusplus
}
#endif

#endif
