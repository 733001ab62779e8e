/* mojim_persistent.h - variables that keep their values from run to run.
 *
 * mojim.h has the conventions (errors, threads, ownership), which hold here too.
 * Source: Mnemosyne, "Programming model".
 *
 * CAVEATS FIRST
 *
 * 1. Nothing is durable before it is committed: by mojim_variables_sync, mojim_msync or gmsync
 *    of a variable, or a transaction (mojim_tx.h). What was not committed at the end is gone.
 * 2. Variables have other addresses in the next run: no pointer to one may lie in persistent
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
 * Any type of plain data: numbers, arrays, structs, pointers that are NULL at first. At file
 * scope, or static in a function; `static` may stand before it. Several source files of a
 * program have one section of variables together, and so one file. A shared library has its
 * own section: it calls mojim_variables itself, with another file.
 *
 * Refused by the compiler:
 *   const, thread-local   "causes a section type conflict with 'mojim_first_'"
 *   C++: an initial value "does not have a constant initializer" (a constructor that runs at
 *   computed at start     the start would run in every program). By GCC 10 and clang 12 on
 * Refused by mojim_variables (EINVAL, the text has the variable's name):
 *   - an initial value that is an address (of a variable, function, string, vtable). In a
 *     program linked with -no-pie: eight aligned bytes that look like an address in it
 *   - two variables of one name: static variables, in functions too, need names of their own
 *   - a variable that a shared library exports: the program may get a copy in its place.
 *     Declare it static, or with __attribute__((visibility("hidden")))
 * Not found out: a destructor, a type that holds addresses which it gets later (std::string),
 * a type that changes and keeps its size.
 *
 * Layout. The file keeps the name, offset and size of each variable. A program with a variable
 * more or less, or with another name, size or order, is refused: EINVAL, and the text names what
 * changed. (Another compiler or another -O may change the order.) Initial values may change: the
 * file's values count. The names are those of the symbol table: of a program that was stripped
 * of it (strip, -s) only the very build that made the file, or last used it with names, is
 * accepted. strip -g keeps the names.
 *
 * Tested: x86-64, GCC; PIE, -no-pie, -flto, shared libraries; ld.bfd, gold, lld. */

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
    MOJIM_CONSTANT_ __attribute__((section("mojim_variables"), used MOJIM_RETAIN_))

/* The section begins with a page, and what lies behind it (.bss) with another. */
__extension__ static char mojim_first_[0]
    __attribute__((section("mojim_variables"), aligned(4096), used MOJIM_RETAIN_));
static char mojim_behind_ __attribute__((aligned(4096), used MOJIM_RETAIN_));
extern char __start_mojim_variables[] __attribute__((visibility("hidden")));
extern char __stop_mojim_variables[] __attribute__((visibility("hidden")));

/* The section of the caller's program or library. */
#define MOJIM_VARIABLES_START ((void *)__start_mojim_variables)
#define MOJIM_VARIABLES_BYTES \
    ((size_t)(__stop_mojim_variables - __start_mojim_variables))

int mojim_variables_of(mojim_t *m, const char *file, void *start, void *stop);

/* Makes the variables of the calling program, or shared library, persistent. The first time
 * their initial values become the file's first state, committed when the call returns. Later
 * the variables have the file's values. To be called once, before other threads use them. The
 * mapping is one with MAP_ATOMIC. mojim_detach makes them ordinary variables again, which keep
 * their last values; so does an error. A library with persistent variables is never unloaded.
 *
 * -1 on error: EINVAL (above); EUCLEAN where the file holds something else, or is damaged;
 * EBUSY where these variables are persistent already, or the file is mapped (by a library,
 * say, that gives the same name); EOPNOTSUPP where the program's own file cannot be read, with
 * mojim_join's handle of another process's volume, and in a child made by fork; EROFS with
 * mojim_attach_reader's; and those of mojim_map. */
static inline int mojim_variables(mojim_t *m, const char *file)
{
    return mojim_variables_of(m, file, MOJIM_VARIABLES_START, __stop_mojim_variables);
}

/* Commits all variables of the calling program, or shared library, atomically together: as
 * mojim_msync with MS_SYNC. */
static inline int mojim_variables_sync(void)
{
    return mojim_msync(MOJIM_VARIABLES_START, MOJIM_VARIABLES_BYTES, MS_SYNC);
}

#ifdef __cplusplus
}
#endif

#endif
