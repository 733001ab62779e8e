//! libmojim_preload.so: an unmodified program's files in a volume's directory,
//! opened, mapped and synced through Mojim.
//!
//! Owns the interposed system calls of a process, the table of descriptors that stand for a
//! volume's files (`table`), and the table of regions (`regions`). It is a client of libmojim
//! (`api`). `mojim run --preload` sets `LD_PRELOAD`, MOJIM_CONFIG, MOJIM_NODE and, if there are
//! several volumes, MOJIM_VOLUME. With `--read` it sets MOJIM_READ: then the volume is only read,
//! on a node that follows.
//!
//! The program gets a real descriptor of a volume's data file, opened for reading
//! also where the program asked for more. So sizes, positions and reads are right, and a write
//! reaches the file only through a record.
//!
//! # Tour
//!
//! Calls on names and descriptors are in `files.rs`, reads, writes and syncs in `rw.rs`.
//! `streams.rs` has stdio, `memory.rs` mmap and msync, `locks.rs` locks. `made.rs` refuses
//! directories and links to a program that only reads. `exec.rs` has programs that the program
//! executes.
//!
//! `path.rs` tells a volume's paths, `names.rs` the names of open files. `process.rs` attaches,
//! `settings.rs` has what `mojim run` said. `inside.rs` marks threads in here. `real.rs` has the
//! functions behind the interposed ones.
//!
//! Invariants:
//! - Without MOJIM_CONFIG, and for all that is not a volume's, a call does what it does
//!   without this library. On a descriptor that costs a load and a branch.
//! - Calls that an allocator makes (mmap, munmap, madvise, mprotect) take no
//!   lock and allocate nothing unless they touch a region.
//! - While a thread is inside this library or the engine, its calls pass through. Calls
//!   on a volume's descriptor or a region fail with EDEADLK (`inside::enter`): only a
//!   signal handler that interrupted the thread makes them, since the engine makes its
//!   own past this library.
//! - No panic leaves this library: it becomes EIO. This library ends the process only
//!   before main, if the configuration cannot be read.
//! - While the configuration cannot be read, a volume's path cannot be told from any other: calls
//!   fail. All that the program executes runs with this library, or not at all (`exec`).
//! - A call that cannot be done right is refused with an errno and one line on standard error, not
//!   done halfway.
//!
//! `program.rs`, which decides whether a program can run with this library, is compiled into the
//! command `mojim` too.

#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!(
    "the variadic open, openat, fcntl and mremap are defined with fixed arguments, \
     which is right on Linux for x86-64 and AArch64 only"
);

mod api;
mod exec;
mod files;
mod inside;
mod locks;
mod made;
mod memory;
mod names;
mod path;
mod process;
mod program;
mod real;
mod regions;
mod rw;
mod settings;
#[allow(dead_code)]
#[path = "../../mojim-format/src/shown.rs"]
mod shown;
mod streams;
mod table;
