//! Locks of files.
//!
//! Owns the mappings that hold them. Invariant: a lock is released by its holder's end only,
//! whatever else is opened, closed or forked.

use super::disk::{FILE_MODE, read_start, read_start_of, with_reserve};
use super::error;
use mojim_env::threads::SignalsWait;
use mojim_env::{Locker, descriptors};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::fs::{self, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use std::io;
use std::path::Path;

/// Bytes of stack of the thread that takes a lock.
const STACK: usize = 128 << 10;

/// A file that only one holder in one process has locked.
///
/// It is an open file description lock (`F_OFD_SETLK`), and a mapping of one page that no child
/// inherits is all that keeps the description. So the lock belongs to exactly this process's
/// memory: it is released with this value, with the process, and by `exec`, and by nothing else.
/// - A POSIX record lock would go as soon as any code of the process closes any descriptor of the
///   file, as a backup does that reads the node's directory.
/// - Held by a descriptor, the lock would outlive a killed process in a forked child that has the
///   descriptor, too.
///
/// The two kinds exclude each other: a node of an older build, which takes a record lock, is refused,
/// and refuses.
///
/// The descriptor is open for a moment only, in a thread with a table of descriptors of its own: a
/// process that another thread forks meanwhile does not get it. What is left is a fork between the
/// two calls that map the page and exclude it from children: until such a child ends or
/// becomes another program, it keeps the lock.
///
/// The lock's length says which kind of holder has it ([`Locker`]), so that this is known as long as,
/// and no longer than, the lock itself is held.
#[derive(Debug)]
pub(super) struct Lock {
    /// Never read.
    page: *mut std::ffi::c_void,
    pid: i32,
}

// SAFETY: an address that nobody reads or writes.
unsafe impl Send for Lock {}
// SAFETY: as above.
unsafe impl Sync for Lock {}

fn our_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// The name of a process, as `ps` shows it.
fn process_name(pid: i32) -> Option<String> {
    let name = read_start(Path::new(&format!("/proc/{pid}/comm")), 64).ok()?;
    let name = String::from_utf8_lossy(&name).trim_end().to_owned();
    (!name.is_empty()).then_some(name)
}

/// How many bytes a holder locks, from the first one on; 0 are all. Any two of them exclude each other.
fn locked_len(locker: Locker) -> i64 {
    match locker {
        Locker::Program => 0,
        Locker::Node => 1 << 62,
    }
}

/// What came of trying to lock a file.
enum Tried {
    Locked(Lock),
    /// The process with a record lock, if it is one; and what the file says.
    Held(Option<i32>, Vec<u8>),
    /// It was removed before it was locked: others would lock another file of this name.
    Removed,
}

impl Lock {
    pub(super) fn take(path: &Path, locker: Locker) -> io::Result<Lock> {
        let pid = our_pid();
        let text = format!("{pid} {}\n", process_name(pid).unwrap_or_default());
        loop {
            match Lock::try_apart(path, &text, locker)? {
                Tried::Locked(lock) => return Ok(lock),
                Tried::Held(pid, text) => return Err(contended(pid, &text)),
                Tried::Removed => {}
            }
        }
    }

    /// Who has the lock. Only looks: whoever wants the lock meanwhile gets it.
    pub(super) fn locker(path: &Path) -> io::Result<Option<Locker>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let open = || retry_on_intr(|| fs::open(path, flags, Mode::empty()));
        let fd = match with_reserve(|| descriptors::open(open)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            fd => fd?,
        };
        let held = ofd(fd.as_fd(), libc::F_OFD_GETLK, 0)?;
        let is_node = held.l_len == locked_len(Locker::Node);
        Ok(
            (held.l_type != libc::F_UNLCK as i16).then_some(match is_node {
                true => Locker::Node,
                // Also the record lock of an older build.
                false => Locker::Program,
            }),
        )
    }

    /// One attempt, in a thread with its own table of descriptors if that can be had.
    fn try_apart(path: &Path, text: &str, locker: Locker) -> io::Result<Tried> {
        let apart = || Lock::attempt(path, text, locker, Lock::own_table().is_ok());
        let done = std::thread::scope(|s| {
            // It runs no signal handler of the program.
            let _quiet = SignalsWait::begin_but_faults();
            let thread = std::thread::Builder::new().stack_size(STACK);
            let thread = thread.spawn_scoped(s, apart).ok()?;
            Some(thread.join().expect("an attempt does not panic"))
        });
        done.unwrap_or_else(|| Lock::attempt(path, text, locker, false))
    }

    /// Gives this thread, which has opened nothing, an empty table of descriptors.
    fn own_table() -> io::Result<()> {
        let all = libc::c_uint::MAX;
        // SAFETY: closes nothing of another thread's: the table becomes this one's first.
        match unsafe { libc::syscall(libc::SYS_close_range, 0, all, libc::CLOSE_RANGE_UNSHARE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// `apart`: the calling thread has a table of descriptors of its own, which ends with it. A
    /// descriptor of such a table is not closed through the C library: under an interposer its
    /// number would be taken for one of the program's. It is closed before the thread ends: the kernel
    /// wakes who waits for a thread before it drops the thread's table.
    fn attempt(path: &Path, text: &str, locker: Locker, apart: bool) -> io::Result<Tried> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = || retry_on_intr(|| fs::open(path, flags, FILE_MODE));
        if apart {
            let fd = std::mem::ManuallyDrop::new(open()?);
            let tried = Lock::try_on(fd.as_fd(), path, text, locker);
            // SAFETY: a descriptor of this thread's own table, which nobody uses any more.
            unsafe { libc::syscall(libc::SYS_close, fd.as_raw_fd()) };
            return tried;
        }
        let fd = with_reserve(|| descriptors::open(open))?;
        Lock::try_on(fd.as_fd(), path, text, locker)
    }

    fn try_on(fd: BorrowedFd, path: &Path, text: &str, locker: Locker) -> io::Result<Tried> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        let len = rustix::param::page_size();
        // SAFETY: a new mapping, which nobody reads: the file may be empty.
        let page = unsafe {
            let (none, private) = (ProtFlags::empty(), MapFlags::PRIVATE);
            mmap(std::ptr::null_mut(), len, none, private, fd, 0)?
        };
        let pid = our_pid();
        let lock = Lock { page, pid };
        // SAFETY: the mapping that was just made.
        unsafe { madvise(page, len, Advice::LinuxDontFork)? };
        match ofd(fd, libc::F_OFD_SETLK, locked_len(locker)) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => {
                let held = ofd(fd, libc::F_OFD_GETLK, 0)?;
                let by_record = held.l_type != libc::F_UNLCK as i16 && held.l_pid > 0;
                let pid = by_record.then_some(held.l_pid);
                return Ok(Tried::Held(pid, read_start_of(fd, 64).unwrap_or_default()));
            }
            Err(e) => return Err(e.into()),
        }
        let own = fs::fstat(fd)?;
        match fs::lstat(path) {
            Ok(s) if (s.st_dev, s.st_ino) == (own.st_dev, own.st_ino) => {}
            Ok(_) | Err(Errno::NOENT) => return Ok(Tried::Removed),
            Err(e) => return Err(e.into()),
        }
        fs::ftruncate(fd, 0)?;
        rustix::io::pwrite(fd, text.as_bytes(), 0)?;
        Ok(Tried::Locked(lock))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // In a forked child the page is not there, and its address may be another's.
        if self.pid == our_pid() {
            // SAFETY: our own mapping.
            let done = unsafe { rustix::mm::munmap(self.page, rustix::param::page_size()) };
            debug_assert!(done.is_ok(), "a mapping of our own: {done:?}");
        }
    }
}

/// A command for locks of open file descriptions, on the first `len` bytes; 0 are all. By a raw call: an
/// interposer answers the program's own.
fn ofd(fd: BorrowedFd, command: libc::c_int, len: i64) -> Result<libc::flock, Errno> {
    // SAFETY: may be all zeros; `l_pid` must be.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_len = len;
    // SAFETY: a descriptor that is open, and a lock of ours.
    match unsafe { libc::syscall(libc::SYS_fcntl, fd.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Who holds the lock that we did not get. `pid`: of a record lock, as this process sees it.
fn contended(pid: Option<i32>, text: &[u8]) -> io::Error {
    let text = String::from_utf8_lossy(text);
    let (written, name) = text.trim_end().split_once(' ').unwrap_or(("", ""));
    let written = written.parse::<i32>().ok();
    match (pid, written) {
        // The kernel does not tell of other holders; what they wrote is their own view, which may
        // be of another pid name space or host.
        (None, Some(_)) => taken(written, Some(name.to_owned())),
        (Some(pid), Some(w)) if w == pid => taken(Some(pid), Some(name.to_owned())),
        (Some(pid), _) => taken(Some(pid), process_name(pid)),
        (None, None) => taken(None, None),
    }
}

fn taken(pid: Option<i32>, name: Option<String>) -> io::Error {
    let text = match (pid, name) {
        (Some(pid), Some(name)) if !name.is_empty() => format!("held by process {pid} ({name})"),
        (Some(pid), _) => format!("held by process {pid}"),
        (None, _) => "held by another process".to_owned(),
    };
    error(io::ErrorKind::WouldBlock, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Os;
    use mojim_env::Env;
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, ChildStdout, Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use tempfile::TempDir;

    fn must_be_taken(path: &Path, pid: u32) {
        let e = Os::new()
            .unwrap()
            .lock(path, Locker::Program)
            .expect_err("the lock is held");
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
        let name = process_name(pid as i32).unwrap();
        assert_eq!(e.to_string(), format!("held by process {pid} ({name})"));
    }

    #[test]
    fn a_lock_excludes_within_the_process() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let path = dir.path().join("lock");
        let held = os.lock(&path, Locker::Program).unwrap();
        must_be_taken(&path, std::process::id());
        // By another name of the same file, too.
        fs::link(&path, dir.path().join("alias")).unwrap();
        must_be_taken(&dir.path().join("alias"), std::process::id());
        must_be_taken(&path, std::process::id());
        drop(held);
        drop(os.lock(&path, Locker::Program).unwrap());
        fs::symlink(&path, dir.path().join("symlink")).unwrap();
        assert!(
            os.lock(&dir.path().join("symlink"), Locker::Program)
                .is_err()
        );
    }

    /// The thread that took the lock kept its descriptor until the kernel dropped its table, which may be
    /// after it was waited for: whoever took the lock, dropped it, and took it again was told that it was
    /// held, by itself. Here the thread lives on.
    #[test]
    fn a_lock_that_was_dropped_is_free_at_once() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let twice = || {
            Lock::own_table().unwrap();
            for _ in 0..2 {
                let tried = Lock::attempt(&path, "1 test\n", Locker::Program, true).unwrap();
                assert!(
                    matches!(tried, Tried::Locked(_)),
                    "the first attempt has it"
                );
            }
        };
        std::thread::scope(|s| s.spawn(twice).join().unwrap());
    }

    const HELPER: &str = "MOJIM_TEST_LOCK";
    /// A node asked whether a program had its copy by taking the lock itself for a moment: two that asked
    /// at once took each other for a program, and so did a copy that the node had just opened.
    #[test]
    fn a_look_at_a_lock_says_who_has_it_and_takes_nothing() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let os = Os::new().unwrap();
        let locker = || os.locker(&path).unwrap();
        assert_eq!(locker(), None, "there is no such file");
        for by in [Locker::Node, Locker::Program] {
            let held = os.lock(&path, by).unwrap();
            assert_eq!(locker(), Some(by));
            for other in [Locker::Node, Locker::Program] {
                assert!(
                    os.lock(&path, other).is_err(),
                    "{by:?} has it, not {other:?}"
                );
            }
            drop(held);
            assert_eq!(locker(), None, "{by:?} has dropped it");
        }
        for kind in ["", "record"] {
            let program = Elsewhere::lock_as(kind, &path);
            assert_eq!(locker(), Some(Locker::Program), "{kind}");
            program.kill();
            assert_eq!(locker(), None, "{kind}");
        }
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    os.locker(&path).unwrap();
                }
            });
            for _ in 0..200 {
                drop(os.lock(&path, Locker::Program).expect("nobody has it"));
            }
            over.store(true, Relaxed);
        });
    }

    /// "record": a record lock, as earlier builds took it. "forks": a child that lives on is made.
    const KIND: &str = "MOJIM_TEST_LOCK_KIND";

    /// Not a test by itself: the other process of the tests below.
    #[test]
    fn helper_process() {
        let Some(path) = std::env::var_os(HELPER) else {
            return;
        };
        let path = Path::new(&path);
        let kind = std::env::var(KIND).unwrap_or_default();
        let got: io::Result<Box<dyn std::any::Any>> = match kind.as_str() {
            // As earlier builds took it.
            "record" => {
                let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
                let done = fs::fcntl_lock(&file, fs::FlockOperation::NonBlockingLockExclusive);
                done.map(|()| Box::new(file) as _).map_err(Into::into)
            }
            _ => Os::new()
                .unwrap()
                .lock(path, Locker::Program)
                .map(|l| Box::new(l) as _),
        };
        if kind == "forks" {
            // By the system call: no handler of the C library runs.
            // SAFETY: the child only calls pause, which is async-signal-safe.
            let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            if child == 0 {
                loop {
                    // SAFETY: has no arguments.
                    unsafe { libc::pause() };
                }
            }
            println!("\nlock: {child}");
        }
        println!(
            "\nlock: {}",
            got.as_ref().err().map_or("ok".into(), |e| e.to_string())
        );
        let _ = io::stdin().read_line(&mut String::new());
        drop(got);
    }

    /// A process that locks `path` until its input ends or it is killed.
    struct Elsewhere {
        child: Child,
        said: String,
        /// Kept, so that it can go on printing.
        _output: BufReader<ChildStdout>,
    }

    impl Elsewhere {
        fn lock(path: &Path) -> Elsewhere {
            Elsewhere::lock_as("", path)
        }

        fn lock_as(kind: &str, path: &Path) -> Elsewhere {
            let name = module_path!().split_once("::").unwrap().1;
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args([&format!("{name}::helper_process"), "--exact", "--nocapture"])
                .env(HELPER, path)
                .env(KIND, kind)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut output = BufReader::new(child.stdout.take().unwrap());
            let said = output
                .by_ref()
                .lines()
                .map(Result::unwrap)
                .find_map(|l| l.strip_prefix("lock: ").map(String::from))
                .expect("the helper says what it got");
            Elsewhere {
                child,
                said,
                _output: output,
            }
        }

        fn kill(mut self) -> String {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
            self.said
        }

        fn end(mut self) -> String {
            drop(self.child.stdin.take());
            assert!(self.child.wait().unwrap().success());
            self.said
        }
    }

    #[test]
    fn a_lock_excludes_between_processes_and_ends_with_them() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let path = dir.path().join("lock");
        let other = Elsewhere::lock(&path);
        assert_eq!(other.said, "ok");
        must_be_taken(&path, other.child.id());
        must_be_taken(&path, other.child.id());
        other.kill();
        let held = os.lock(&path, Locker::Program).unwrap();
        let said = Elsewhere::lock(&path).end();
        let pid = std::process::id();
        assert!(
            said.starts_with(&format!("held by process {pid} (")),
            "{said}"
        );
        // Its failed attempt did not release ours.
        let said = Elsewhere::lock(&path).end();
        assert!(said.starts_with("held by process"), "{said}");
        drop(held);
        assert_eq!(Elsewhere::lock(&path).end(), "ok");
    }

    /// The lock was a record lock, which goes when the process closes any descriptor of the file: a
    /// backup in the process that read the node's directory was enough. Then a second process
    /// attached, and overwrote the first one's acknowledged records.
    #[test]
    fn a_lock_stays_when_its_file_is_opened_and_closed_in_the_process() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let held = Os::new().unwrap().lock(&path, Locker::Program).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&format!("{} ", std::process::id())));
        drop(std::fs::OpenOptions::new().write(true).open(&path).unwrap());
        let said = Elsewhere::lock(&path).end();
        assert!(said.starts_with("held by process"), "{said}");
        must_be_taken(&path, std::process::id());
        drop(held);
        assert_eq!(Elsewhere::lock(&path).end(), "ok");
    }

    /// A node of an earlier build takes a record lock.
    #[test]
    fn a_lock_excludes_the_kind_that_earlier_builds_took() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let held = Os::new().unwrap().lock(&path, Locker::Program).unwrap();
        assert_ne!(Elsewhere::lock_as("record", &path).end(), "ok");
        drop(held);
        let other = Elsewhere::lock_as("record", &path);
        assert_eq!(other.said, "ok");
        must_be_taken(&path, other.child.id());
        other.kill();
        drop(Os::new().unwrap().lock(&path, Locker::Program).unwrap());
    }

    /// No handler of the C library has run in the child, and it lives on.
    #[test]
    fn a_child_of_a_killed_process_does_not_keep_the_lock() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let other = Elsewhere::lock_as("forks", &path);
        let child: i32 = other.said.parse().unwrap();
        other.kill();
        let free = Os::new().unwrap().lock(&path, Locker::Program);
        // SAFETY: the child is nobody's who would wait for it, and lives: so its id is its own.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        free.unwrap();
    }

    #[test]
    fn a_forked_child_does_not_keep_the_lock() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let held = Os::new().unwrap().lock(&path, Locker::Program).unwrap();
        // SAFETY: the child only calls pause, which is async-signal-safe.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: has no arguments.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0);
        drop(held);
        let other = Elsewhere::lock(&path);
        // SAFETY: a child of ours that was not waited for; so its id is its own.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(other.kill(), "ok");
    }
}
