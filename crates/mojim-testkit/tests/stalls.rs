//! A mount whose mirror, or whose disk, stands still: calls that have to wait do so alone.

// Seen to fail, each by a defect made on purpose or found:
// - names and bytes bounded each for itself, so that a spill file kept all calls waiting

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::disk::{Disk, Work};
use mojim_testkit::mount::Mount;
use mojim_testkit::{await_that, continue_all, stop_all};
use rustix::fs::{AtFlags, CWD, FallocateFlags, StatxFlags, fallocate, statx};

const PAGE: usize = 4096;

fn open(at: &Path) -> File {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true).open(at).unwrap()
}

/// Threads of this process that are to stand still in a call.
#[derive(Default)]
struct Threads(Mutex<Vec<i32>>);

impl Threads {
    /// Called by each.
    fn join(&self) {
        let me = rustix::thread::gettid().as_raw_nonzero().get();
        self.0.lock().unwrap().push(me);
    }

    /// Whether so many sleep.
    fn asleep(&self, many: usize) -> bool {
        let all = self.0.lock().unwrap();
        let sleep = |id: &&i32| sleeps(&format!("self/task/{id}"));
        all.len() == many && all.iter().filter(sleep).count() == many
    }

    /// Each of them gets a signal.
    fn signal(&self, signal: i32) {
        for id in self.0.lock().unwrap().iter() {
            // SAFETY: a system call that takes numbers alone.
            let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *id, signal) };
            assert_eq!(sent, 0);
        }
    }
}

fn sleeps(task: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{task}/stat")).unwrap();
    // The state comes behind the name, which is in brackets.
    let state = stat.rsplit(") ").next().and_then(|s| s.chars().next());
    matches!(state, Some('S' | 'D'))
}

/// A program, killed on drop. Its end is not waited for then: where a test fails, that may take long.
struct Program(Child);

impl Program {
    fn start(program: &str, args: &[&str], at: &Path) -> Program {
        let mut command = Command::new(program);
        let command = command.args(args).arg(at).stderr(Stdio::null());
        Program(command.spawn().unwrap())
    }

    /// Whether it has the file open and sleeps: with a file on the mount, in a call on that.
    fn waits_at(&self, at: &Path) -> bool {
        let id = self.0.id();
        let open = fs::read_dir(format!("/proc/{id}/fd")).unwrap().flatten();
        let mut open = open.filter_map(|fd| fs::read_link(fd.path()).ok());
        let at = at.canonicalize().unwrap();
        open.any(|file| file == at) && sleeps(&id.to_string())
    }

    /// It gets a signal, and is gone by it.
    fn end_by(&mut self, signal: i32) {
        // SAFETY: a system call that takes numbers alone. The process was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
        let ended = await_that("the end of a program", || self.0.try_wait().unwrap());
        assert_eq!(ended.signal(), Some(signal));
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// Has a mirror that was stopped go on, also where the test fails.
struct Stopped(u32);

impl Drop for Stopped {
    fn drop(&mut self) {
        continue_all(&[self.0]);
    }
}

/// Tells threads that it is over, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Calls that the kernel does not answer from memory, and that need no sync point.
fn look_around(at: &Path) {
    let mut how = OpenOptions::new();
    let known = how
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(at.join("known"));
    let known = known.unwrap();
    let mut whole = vec![0; 64 * PAGE + PAGE];
    let skip = whole.as_ptr().align_offset(PAGE);
    for _ in 0..50 {
        let to = &mut whole[skip..skip + 64 * PAGE];
        known.read_exact_at(to, 0).unwrap();
        assert!(to.iter().all(|b| *b == 3));
        assert!(fs::read_dir(at).unwrap().count() > 0);
        assert!(fs::metadata(at.join("nobody")).is_err());
        assert_eq!(size(&at.join("known")), 64 * PAGE as u64);
    }
}

/// The size that the mount gives, not what the kernel knows.
fn size(at: &Path) -> u64 {
    let how = AtFlags::STATX_FORCE_SYNC;
    statx(CWD, at, how, StatxFlags::BASIC_STATS)
        .unwrap()
        .stx_size
}

/// Each fsync that waited for the mirror kept one of eight threads from all other calls. With eight of
/// them a read took as long as the mirror was away.
#[test]
fn a_read_beside_sync_points_that_wait_does_not_wait() {
    let c = Cluster::new(SYNC);
    c.configure(&c.patient_text(SYNC));
    let _a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let many = 64;
    let known = open(&m.at.join("known"));
    known.write_all_at(&[3; 64 * PAGE], 0).unwrap();
    let files: Vec<File> = (0..many).map(|n| open(&m.at.join(n.to_string()))).collect();
    // The kernel keeps a directory locked that is being synced.
    fs::create_dir(m.at.join("made")).unwrap();
    let dir = File::open(m.at.join("made")).unwrap();
    known.sync_all().unwrap();
    stop_all(&[b.child.id()]);
    let (threads, ended) = (Threads::default(), AtomicU64::new(0));
    std::thread::scope(|s| {
        let stopped = Stopped(b.child.id());
        for (n, f) in files.iter().enumerate() {
            let (threads, ended, dir, at) = (&threads, &ended, &dir, &m.at);
            s.spawn(move || {
                // So that the sync point of a directory has something to wait for.
                open(&at.join(format!("new-{n}")));
                f.write_all_at(&[n as u8; PAGE], 0).unwrap();
                threads.join();
                let of = if n % 8 == 0 { dir } else { f };
                of.sync_all().unwrap();
                ended.fetch_add(1, SeqCst);
            });
        }
        await_that("sync points that wait", || {
            threads.asleep(many).then_some(())
        });
        look_around(&m.at);
        let ended = ended.load(SeqCst);
        drop(stopped);
        assert_eq!(ended, 0);
    });
    drop((known, files, dir));
    m.end();
    c.assert_equal();
}

/// The same of calls that wait until the log has room: of bytes, of names, of zeros. Eight of `fallocate`
/// kept all threads, and as many writes beyond those that had a quarter of a log.
///
/// Where this test failed, it left the mirror stopped. Each of 18 threads that make names in one directory
/// waited for it in turn, for two minutes: the run was ended before it could say why.
#[test]
fn a_read_beside_calls_that_find_no_room_does_not_wait() {
    let c = Cluster::new(SYNC);
    c.configure(&c.patient_text(SYNC).replace("4MiB", "1MiB"));
    let _a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let known = open(&m.at.join("known"));
    known.write_all_at(&[3; 64 * PAGE], 0).unwrap();
    // The kernel keeps a directory locked in which a name is being made.
    let made = m.at.join("made");
    fs::create_dir(&made).unwrap();
    let files: Vec<File> = (0..72).map(|n| open(&made.join(n.to_string()))).collect();
    for f in files.iter().skip(3).step_by(4) {
        f.write_all_at(&[4; 4 * PAGE], 0).unwrap();
        f.sync_all().unwrap();
    }
    known.sync_all().unwrap();
    stop_all(&[b.child.id()]);
    let many = files.len();
    let (threads, done, over) = (
        Threads::default(),
        AtomicU64::new(0),
        AtomicBool::new(false),
    );
    std::thread::scope(|s| {
        let _over = Over(&over);
        let stopped = Stopped(b.child.id());
        for (n, f) in files.iter().enumerate() {
            let (threads, done, over, at) = (&threads, &done, &over, &made);
            s.spawn(move || {
                threads.join();
                for i in (0..).take_while(|_| !over.load(SeqCst)) {
                    match n % 4 {
                        0 => f
                            .write_all_at(&[n as u8; 4 * PAGE], i % 64 * PAGE as u64)
                            .unwrap(),
                        3 => {
                            let zeros = FallocateFlags::ZERO_RANGE;
                            fallocate(f, zeros, 0, 4 * PAGE as u64).unwrap();
                        }
                        1 => symlink("t".repeat(4000), at.join(format!("{n}-{i}"))).unwrap(),
                        _ => {
                            f.write_all_at(&[n as u8; 3 * PAGE], i % 64 * PAGE as u64)
                                .unwrap();
                            f.sync_all().unwrap();
                        }
                    }
                    done.fetch_add(1, SeqCst);
                }
            });
        }
        // What has begun goes on, on a busy machine for some time, until there is no more room: they
        // are looked at again until all of them waited from before the look to its end.
        let still = await_that("a look while calls wait", || {
            let before = done.load(SeqCst);
            if !threads.asleep(many) {
                return None;
            }
            look_around(&m.at);
            (done.load(SeqCst) == before && threads.asleep(many)).then_some(before)
        });
        drop(stopped);
        await_that("the others", || {
            (done.load(SeqCst) > still + 100).then_some(())
        });
    });
    drop((known, files));
    m.end();
    c.assert_equal();
}

/// Names that wait counted less than they take: links of 4,000 bytes as 128 each. Their sync point was larger
/// than the log takes, went through a spill file, and kept all other calls waiting for the mirror.
#[test]
fn a_read_beside_links_that_find_no_room_does_not_wait() {
    let c = Cluster::new(SYNC);
    c.configure(&c.patient_text(SYNC).replace("4MiB", "1MiB"));
    let _a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let known = open(&m.at.join("known"));
    known.write_all_at(&[3; 64 * PAGE], 0).unwrap();
    known.sync_all().unwrap();
    let made = m.at.join("made");
    fs::create_dir(&made).unwrap();
    stop_all(&[b.child.id()]);
    let (threads, done, many) = (Threads::default(), AtomicU64::new(0), 1000);
    std::thread::scope(|s| {
        let stopped = Stopped(b.child.id());
        let links = s.spawn(|| {
            threads.join();
            for n in 0..many {
                symlink("t".repeat(4000), made.join(n.to_string())).unwrap();
                done.fetch_add(1, SeqCst);
            }
            File::open(&made).unwrap().sync_all().unwrap();
        });
        let looks = s.spawn(|| {
            await_that("links that wait", || {
                let (before, waits) = (done.load(SeqCst), threads.asleep(1));
                look_around(&m.at);
                let still = before > 0 && done.load(SeqCst) == before;
                (waits && still && threads.asleep(1)).then_some(())
            });
        });
        await_that("looks", || looks.is_finished().then_some(()));
        looks.join().unwrap();
        assert!(!links.is_finished());
        drop(stopped);
        links.join().unwrap();
    });
    drop(known);
    assert_eq!(fs::read_dir(&made).unwrap().count(), many);
    m.end();
    c.assert_equal();
}

/// Whoever applies records holds a lock while the disk syncs, and a call that needed a data file, be it for
/// its size on the disk, waited for it in a thread that serves. Eight such calls kept all others waiting, and
/// one alone all that had to do with its file.
#[test]
fn a_look_beside_a_disk_that_stands_still_does_not_wait() {
    let c = Cluster::new(SYNC);
    let Some(disk) = Disk::mount_or_skip(&c.dir.join("a")) else {
        return;
    };
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    // The store opens all of them when it is attached, and closes them when they are too many.
    let (many, all) = (64, 300);
    let at = m.at.clone();
    let path = |n: usize| at.join(n.to_string());
    (0..all).for_each(|n| fs::write(path(n), [n as u8; PAGE]).unwrap());
    fs::write(m.at.join("known"), [3; 64 * PAGE]).unwrap();
    m.end();
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    look_around(&m.at);
    let (threads, ended) = (Threads::default(), AtomicU64::new(0));
    std::thread::scope(|s| {
        let held = disk.hold(Work::Sync, "catalog.new");
        open(&at.join("made")).sync_all().unwrap();
        await_that("the applier", || disk.is_holding().then_some(()));
        for n in 0..many {
            let (threads, ended, path) = (&threads, &ended, &path);
            s.spawn(move || {
                threads.join();
                assert_eq!(fs::read(path(n)).unwrap(), [n as u8; PAGE]);
                ended.fetch_add(1, SeqCst);
            });
        }
        await_that("reads that wait", || threads.asleep(many).then_some(()));
        let looks = s.spawn(|| {
            look_around(&at);
            (0..many).for_each(|n| assert_eq!(size(&path(n)), PAGE as u64));
        });
        await_that("looks", || looks.is_finished().then_some(()));
        looks.join().unwrap();
        assert!(disk.is_holding());
        assert_eq!(ended.load(SeqCst), 0);
        drop(held);
    });
    m.end();
    c.assert_equal();
}

/// An fsync says that all is committed that was begun before it, also what another call began, or the
/// clock: with nothing to commit of its own it waits for that.
#[test]
fn an_fsync_waits_for_what_others_began() {
    let c = Cluster::new(SYNC);
    let text = c.text(SYNC, "e2e");
    c.configure(&text.replace("\"5s\"", "\"100ms\"\nresend_attempts = 2"));
    let _a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "0.01"]);
    let [f, g] = ["f", "g"].map(|n| open(&m.at.join(n)));
    let dir = File::open(&m.at).unwrap();
    for of in [&f, &g, &dir] {
        // The mirror may be late: it gets a fifth of a second.
        await_that("a sync point", || of.sync_all().ok());
    }
    stop_all(&[b.child.id()]);
    for n in 0..5 {
        f.write_all_at(&[n; PAGE], 0).unwrap();
        // Whoever of these, or the clock, begins it: all of them wait for it.
        for of in [&f, &g, &dir, &f] {
            let failed = of.sync_all().map_err(|e| e.raw_os_error());
            assert_eq!(failed, Err(Some(libc::ETIMEDOUT)));
        }
    }
    continue_all(&[b.child.id()]);
    await_that("the mirror's return", || g.sync_all().ok());
    c.assert_equal();
    drop((f, g, dir));
    m.end();
    c.assert_equal();
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_signal(_: i32) {
    SIGNALS.fetch_add(1, SeqCst);
}

/// A program that was killed while it waited in fsync was there until the call was answered: with the
/// mirror away for minutes, until the sync point failed. Another program, which only gets signals that it
/// handles, is not told by an error of fsync: it would take its bytes for lost.
#[test]
fn a_program_that_waits_for_a_sync_point_can_be_killed() {
    let c = Cluster::new(SYNC);
    c.configure(&c.patient_text(SYNC));
    let _a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let paths = ["f", "g", "h"].map(|n| m.at.join(n));
    let files = paths.each_ref().map(|p| open(p));
    files.iter().for_each(|f| f.sync_all().unwrap());
    // SAFETY: the handler only adds to an atomic number. Without SA_RESTART, calls would tell of it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count_signal as *const () as usize;
        assert_eq!(
            libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()),
            0
        );
    }
    let threads = Threads::default();
    std::thread::scope(|s| {
        stop_all(&[b.child.id()]);
        let stopped = Stopped(b.child.id());
        for (n, f) in (1..).zip(&files) {
            f.write_all_at(&[n; PAGE], 0).unwrap();
        }
        let lives = s.spawn(|| {
            threads.join();
            // Not that of the standard library, which calls again after EINTR.
            rustix::fs::fsync(&files[0])
        });
        await_that("a thread that waits", || threads.asleep(1).then_some(()));
        let [mut killed, mut ended] = [1, 2].map(|n| Program::start("sync", &[], &paths[n]));
        let waits = || killed.waits_at(&paths[1]) && ended.waits_at(&paths[2]);
        await_that("programs that wait", || waits().then_some(()));
        for _ in 0..20 {
            threads.signal(libc::SIGUSR1);
        }
        // Whoever looks for these looks at the thread, too, which has signals pending by now.
        killed.end_by(libc::SIGKILL);
        ended.end_by(libc::SIGTERM);
        assert!(!lives.is_finished());
        threads.signal(libc::SIGUSR1);
        drop(stopped);
        assert_eq!(lives.join().unwrap(), Ok(()));
        assert!(SIGNALS.load(SeqCst) > 0);
    });
    files.iter().for_each(|f| f.sync_all().unwrap());
    drop(files);
    m.end();
    c.assert_equal();
    // What was begun for those that were killed went on.
    let m = Mount::new(&c, "a", &[]);
    for (n, p) in (1..).zip(&paths) {
        assert_eq!(fs::read(p).unwrap(), [n; PAGE]);
    }
    m.end();
}

/// The same of programs that wait until the log has room: the one whose call is made again and again, and
/// one whose call comes behind it.
#[test]
fn a_program_that_finds_no_room_can_be_killed() {
    let c = Cluster::new(SYNC);
    c.configure(&c.patient_text(SYNC).replace("4MiB", "1MiB"));
    let _a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let [f, g] = ["f", "g"].map(|n| m.at.join(n));
    for at in [&f, &g] {
        let file = open(at);
        file.write_all_at(&[4; 4 * PAGE], 0).unwrap();
        file.sync_all().unwrap();
    }
    stop_all(&[b.child.id()]);
    let stopped = Stopped(b.child.id());
    let of = format!("of={}", f.display());
    let args = ["if=/dev/zero", "bs=16k", "conv=notrunc", &of];
    let mut writes = Program::start("dd", &args, Path::new("count=100000"));
    let stands_still = |p: &Program, at: &Path| {
        let before = size(&f);
        std::thread::sleep(std::time::Duration::from_millis(500));
        (p.waits_at(at) && size(&f) == before).then_some(())
    };
    await_that("a write that waits", || stands_still(&writes, &f));
    let args = ["--zero-range", "--length", "16k"];
    let mut behind = Program::start("fallocate", &args, &g);
    await_that("another call", || stands_still(&behind, &g));
    behind.end_by(libc::SIGKILL);
    writes.end_by(libc::SIGKILL);
    let written = size(&f);
    assert_eq!(fs::read(&g).unwrap(), [4; 4 * PAGE]);
    drop(stopped);
    let file = open(&f);
    file.sync_all().unwrap();
    assert_eq!(fs::read(&f).unwrap(), vec![0; written as usize]);
    file.write_all_at(&[5; PAGE], written).unwrap();
    file.sync_all().unwrap();
    drop(file);
    m.end();
    c.assert_equal();
}
