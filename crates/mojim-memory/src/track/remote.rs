//! Tracking of another process's mapping: that process arms its pages, this one scans its page
//! tables.
//!
//! Several processes share one working copy. `uffd.rs` tells what the kernel promises. The other
//! process ([`arm`]) registers a userfaultfd of its own. It hands over a descriptor of its
//! `/proc/self/pagemap`. PAGEMAP_SCAN through it works on the memory of the process that opened it.
//! That is so also when it protects pages again (seen on Linux 6.18, as root and as an ordinary
//! user).
//!
//! Invariants:
//! 1. A [`Remote`] never fails: what cannot be found out counts as written.
//! 2. A scan of memory that is gone (the process died, or became another program) reports nothing,
//!    and no error. `pread` on the same descriptor gives 0 bytes from before the memory's teardown
//!    begins, so every scan is followed by one.
//! 3. A mapping that alone is gone (munmap) is reported as not written, too. So a process says
//!    first that it will unmap, and waits for the answer.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::process::Process;
use super::tracker::{Tracker, check_range, push};
use super::uffd::{Marks, Scan, Uffd, of_pages, pagemap, registered, scan};

/// A mapping of this process whose stores another process looks for. Dropping it makes the pages
/// ordinary memory again.
pub struct Armed(Uffd);

impl AsRawFd for Armed {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Arms a mapping; nothing in it counts as written at first.
///
/// # Safety
/// As [`attach`](super::attach), for a shared mapping.
pub unsafe fn arm(base: usize, len: usize) -> io::Result<Armed> {
    // SAFETY: the caller's promise.
    unsafe { of_pages(base, len) }.map(Armed)
}

/// Arms a mapping that a forked child has from its parent: what the child has stored already counts
/// as written. Takes no lock.
///
/// # Safety
/// As [`arm`].
pub unsafe fn arm_inherited(base: usize, len: usize) -> io::Result<Armed> {
    // SAFETY: the caller's promise.
    unsafe { registered(base, len) }.map(Armed)
}

/// This process's `/proc/self/pagemap`, to be handed over.
pub fn own_pagemap() -> io::Result<BorrowedFd<'static>> {
    let fd = pagemap(Process::current()?)?;
    // SAFETY: it is never closed by us.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Watches a mapping of another process.
pub struct Remote {
    pagemap: Arc<OwnedFd>,
    base: usize,
    len: usize,
    marks: Marks,
}

impl Remote {
    /// `base` and `len` are the mapping's in the process that opened `pagemap`.
    ///
    /// # Errors
    /// EINVAL where they are not a page-aligned range, or `pagemap` is not of `/proc`.
    pub fn new(pagemap: Arc<OwnedFd>, base: usize, len: usize) -> io::Result<Remote> {
        let page = rustix::param::page_size();
        let end = base.checked_add(len);
        let good = len > 0 && (base | len).is_multiple_of(page);
        // Addresses of programs are in the lower half.
        let good = good && end.is_some_and(|e| e <= isize::MAX as usize);
        let fs = rustix::fs::fstatfs(&*pagemap)?;
        if !good || fs.f_type != rustix::fs::PROC_SUPER_MAGIC {
            return Err(rustix::io::Errno::INVAL.into());
        }
        Ok(Remote {
            pagemap,
            base,
            len,
            marks: Marks::default(),
        })
    }

    /// Whether the teardown of the memory had not begun yet.
    fn is_there(&self) -> bool {
        let mut entry = [0u8; 8];
        let at = (self.base / rustix::param::page_size() * entry.len()) as u64;
        matches!(rustix::io::pread(&*self.pagemap, &mut entry, at), Ok(8))
    }
}

impl Tracker for Remote {
    fn collect(
        &self,
        start: usize,
        end: usize,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        check_range(start, end, self.len)?;
        if start == end {
            return Ok(());
        }
        let from = out.len();
        let fd = self.pagemap.as_fd();
        let how = Scan {
            rearm,
            is_sparse: false,
        };
        if scan(fd, self.base, start..end, how, out).is_ok() && self.is_there() {
            self.marks.report(start..end, rearm, out, from);
        } else {
            out.truncate(from);
            push(out, from, start..end);
            if rearm {
                // What was protected in vain is in this report. What comes is not known either.
                self.marks.report(start..end, true, &mut Vec::new(), 0);
            }
        }
        Ok(())
    }

    fn mark(&self, start: usize, end: usize) {
        let page = rustix::param::page_size();
        let start = start & !(page - 1);
        let end = end.min(self.len).next_multiple_of(page);
        if start < end {
            self.marks.add(start..end);
        }
    }

    fn kind(&self) -> &'static str {
        "remote"
    }
}

/// Stands for a mapping of another process that cannot be watched: all of it counts as written.
pub struct Unwatched;

impl Tracker for Unwatched {
    fn collect(
        &self,
        start: usize,
        end: usize,
        _: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        if start < end {
            push(out, out.len(), start..end);
        }
        Ok(())
    }

    fn mark(&self, _: usize, _: usize) {}

    fn kind(&self) -> &'static str {
        "unwatched"
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init)] // lists of ranges are what is tested

    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;

    const PAGES: usize = 64;

    fn page() -> usize {
        rustix::param::page_size()
    }

    fn pages(r: Range<usize>) -> Range<usize> {
        r.start * page()..r.end * page()
    }

    /// Shared memory, mapped here.
    struct Shared {
        base: *mut u8,
        _fd: OwnedFd,
    }

    impl Shared {
        fn new() -> Shared {
            let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, (PAGES * page()) as u64).unwrap();
            // SAFETY: a fresh mapping.
            let base = unsafe {
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    PAGES * page(),
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    &fd,
                    0,
                )
            };
            let base = base.unwrap().cast();
            Shared { base, _fd: fd }
        }

        fn len(&self) -> usize {
            PAGES * page()
        }

        fn store(&self, i: usize) {
            // SAFETY: inside the mapping.
            unsafe { self.base.add(i * page()).write_volatile(7) };
        }
    }

    impl Drop for Shared {
        fn drop(&mut self) {
            // SAFETY: our own mapping.
            let _ = unsafe { rustix::mm::munmap(self.base.cast(), PAGES * page()) };
        }
    }

    /// A forked child that does one step each time it is told to.
    struct Child {
        pid: libc::pid_t,
        line: UnixStream,
        pagemap: Option<OwnedFd>,
    }

    fn tell(line: &UnixStream) {
        rustix::io::write(line, &[1]).unwrap();
    }

    /// False once the other end is closed, or has said that this is the end.
    fn hear(line: &UnixStream) -> bool {
        let mut word = [0u8; 1];
        matches!(rustix::io::read(line, &mut word), Ok(1)) && word == [1]
    }

    impl Child {
        /// `step`: with 0 it arms itself; then 1 and so on. It must not panic.
        fn start(step: impl Fn(usize)) -> Child {
            let (here, there) = UnixStream::pair().unwrap();
            // SAFETY: the child calls `step` and system calls alone, and then ends.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0);
            if pid == 0 {
                drop(here);
                for n in 0.. {
                    step(n);
                    tell(&there);
                    if !hear(&there) {
                        break;
                    }
                }
                // SAFETY: ends this process.
                unsafe { libc::_exit(0) };
            }
            drop(there);
            assert!(hear(&here));
            let path = format!("/proc/{pid}/pagemap");
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
            let pagemap = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
            Child {
                pid,
                line: here,
                pagemap: Some(pagemap),
            }
        }

        fn next(&self) {
            tell(&self.line);
            assert!(hear(&self.line));
        }

        fn watch(&mut self, of: &Shared) -> Remote {
            let pagemap = self.pagemap.take().unwrap();
            Remote::new(Arc::new(pagemap), of.base as usize, of.len()).unwrap()
        }

        fn end(self) {
            // Said, and not only closed: a child that another test forked has a copy of this end,
            // and two that had each other's waited for ever. (It may have ended.)
            let _ = rustix::io::write(&self.line, &[0]);
            drop(self.line);
            // SAFETY: waits for our own child.
            unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
        }

        fn kill(self) {
            // SAFETY: our own child.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            self.end();
        }
    }

    fn collect(r: &Remote, range: Range<usize>, rearm: bool) -> Vec<Range<usize>> {
        let mut out = Vec::new();
        let range = pages(range);
        r.collect(range.start, range.end, rearm, &mut out).unwrap();
        out
    }

    fn armed(of: &Shared, inherited: bool) {
        let (base, len) = (of.base as usize, of.len());
        // SAFETY: the child's copy of the mapping, which stays until it ends.
        let armed = unsafe {
            match inherited {
                true => arm_inherited(base, len),
                false => arm(base, len),
            }
        };
        match armed {
            Ok(a) => std::mem::forget(a),
            // SAFETY: ends this process; the test sees that.
            Err(_) => unsafe { libc::_exit(1) },
        }
    }

    #[test]
    fn stores_of_another_process_are_found() {
        if !super::super::uffd_available() {
            return;
        }
        let m = Shared::new();
        let mut c = Child::start(|n| match n {
            0 => armed(&m, false),
            1 => {
                m.store(3);
                m.store(40);
            }
            _ => m.store(3),
        });
        let r = c.watch(&m);
        assert_eq!(collect(&r, 0..PAGES, true), []);
        c.next();
        m.store(9); // Ours is not its.
        let both = [pages(3..4), pages(40..41)];
        assert_eq!(collect(&r, 0..PAGES, false), both);
        assert_eq!(collect(&r, 0..20, true), [pages(3..4)]);
        assert_eq!(collect(&r, 0..PAGES, true), [pages(40..41)]);
        assert_eq!(collect(&r, 0..PAGES, true), []);
        r.mark(page() * 5, page() * 6);
        c.next();
        assert_eq!(
            collect(&r, 0..PAGES, true),
            [pages(3..4), pages(5..6)],
            "and what was marked"
        );
        assert_eq!(collect(&r, 0..PAGES, true), []);
        c.end();
    }

    #[test]
    fn what_the_dead_have_stored_counts_as_written() {
        // The page tables of a process that died are empty: its last stores would never have been
        // committed by the processes that live on.
        if !super::super::uffd_available() {
            return;
        }
        let m = Shared::new();
        let mut c = Child::start(|n| match n {
            0 => armed(&m, false),
            _ => m.store(n),
        });
        let r = c.watch(&m);
        c.next();
        c.kill();
        assert_eq!(collect(&r, 0..PAGES, true), [pages(0..PAGES)]);
        assert_eq!(collect(&r, 8..16, true), [pages(8..16)], "and later ones");
    }

    #[test]
    fn what_another_program_was_counts_as_written() {
        if !super::super::uffd_available() {
            return;
        }
        let m = Shared::new();
        let (ended, end) = UnixStream::pair().unwrap();
        let fd = ended.as_raw_fd();
        let mut c = Child::start(|n| match n {
            0 => armed(&m, false),
            _ => {
                m.store(n);
                // It waits for what never comes, until the line is closed.
                // SAFETY: C strings; the descriptor is the child's copy.
                unsafe {
                    libc::dup2(fd, 0);
                    let (path, arg) = (c"/bin/cat".as_ptr(), c"cat".as_ptr());
                    libc::execl(path, arg, std::ptr::null::<libc::c_char>());
                    libc::_exit(1);
                }
            }
        });
        let r = c.watch(&m);
        tell(&c.line);
        // Closed by the exec.
        assert!(!hear(&c.line));
        assert_eq!(collect(&r, 0..PAGES, true), [pages(0..PAGES)]);
        drop((ended, end));
        c.kill();
    }

    #[test]
    fn a_mapping_that_is_not_watched_any_more_counts_as_written() {
        if !super::super::uffd_available() {
            return;
        }
        let m = Shared::new();
        let mut c = Child::start(|n| match n {
            0 => armed(&m, false),
            _ => {
                // SAFETY: in place of the child's copy of the mapping.
                let _ = unsafe {
                    rustix::mm::mmap_anonymous(
                        m.base.cast(),
                        m.len(),
                        ProtFlags::READ | ProtFlags::WRITE,
                        MapFlags::PRIVATE | MapFlags::FIXED,
                    )
                };
            }
        });
        let r = c.watch(&m);
        assert_eq!(collect(&r, 0..PAGES, true), []);
        c.next();
        assert_eq!(collect(&r, 0..PAGES, true), [pages(0..PAGES)]);
        c.end();
    }

    #[test]
    fn a_child_that_stored_before_it_was_armed_is_found() {
        if !super::super::uffd_available() {
            return;
        }
        let m = Shared::new();
        // The parent's own tracking is not the child's.
        // SAFETY: the mapping outlives it.
        let _mine = unsafe { arm(m.base as usize, m.len()).unwrap() };
        let mut c = Child::start(|n| match n {
            0 => {
                m.store(5);
                armed(&m, true);
            }
            _ => m.store(20 + n),
        });
        let r = c.watch(&m);
        let found = collect(&r, 0..PAGES, true);
        assert!(found.iter().any(|r| r.contains(&(5 * page()))), "{found:?}");
        c.next();
        assert_eq!(collect(&r, 0..PAGES, true), [pages(21..22)]);
        c.end();
    }

    #[test]
    fn other_descriptors_and_ranges_are_refused() {
        let zero = || Arc::new(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()));
        let own = || Arc::new(own_pagemap().unwrap().try_clone_to_owned().unwrap());
        let p = page();
        assert!(Remote::new(zero(), p, p).is_err());
        for (base, len) in [(p, 0), (1, p), (p, 1), (usize::MAX - p + 1, p)] {
            assert!(Remote::new(own(), base, len).is_err(), "{base} {len}");
        }
        assert!(Remote::new(own(), p, p).is_ok());
    }
}
