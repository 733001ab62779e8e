//! Mounts whose requests come over io_uring: what is not so over /dev/fuse. The other tests of mounts go
//! over both (`MOJIM_URING`).

// Seen to fail, each by a defect made on purpose or found:
// - a queue all of whose entries may be kept: its processor was served no more
// - ENOMEM beside 960 calls that wait

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::mount::{Mount, has_uring};
use mojim_testkit::{await_or, await_that, continue_all, stop_all};
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2};
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::thread::{CpuSet, gettid, sched_setaffinity};

const PAGE: usize = 4096;
const OVER: &str = "requests come over io_uring";

/// Keeps the calling thread on one processor: all its requests come to one queue.
fn stay() {
    let mut one = CpuSet::new();
    one.set(0);
    sched_setaffinity(None, &one).unwrap();
}

fn sleeps(task: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{task}/stat")).unwrap();
    let state = stat.rsplit(") ").next().and_then(|s| s.chars().next());
    matches!(state, Some('S' | 'D'))
}

/// Has a mirror that was stopped go on, also where the test fails.
struct Stopped(u32);

impl Drop for Stopped {
    fn drop(&mut self) {
        continue_all(&[self.0]);
    }
}

/// A call that waits keeps its entry of the queue. Those of a few dozen had all there were, and nobody else
/// on that processor was served; later those of 960, and further ones failed with ENOMEM.
#[test]
fn more_sync_points_of_one_processor_than_it_had_entries_wait_and_others_are_served() {
    if !has_uring() {
        return;
    }
    let c = Cluster::new(SYNC);
    c.configure(&c.patient_text(SYNC));
    let _a = c.node("a");
    let b = c.node("b");
    let args = ["--commit-interval", "never", "--uring", "on"];
    let m = Mount::new(&c, "a", &args);
    assert!(m.process.errors().contains(OVER), "{}", m.process.errors());
    const MANY: usize = 1500;
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let known = m.at.join("known");
    fs::write(&known, [3; PAGE]).unwrap();
    let files = (0..MANY).map(|n| {
        let mut how = OpenOptions::new();
        let f = how.write(true).create(true).truncate(false);
        f.open(m.at.join(n.to_string())).unwrap()
    });
    let files: Vec<File> = files.collect();
    File::open(&known).unwrap().sync_all().unwrap();
    stop_all(&[b.child.id()]);
    let ended = AtomicU64::new(0);
    let threads = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|s| {
        let stopped = Stopped(b.child.id());
        for f in &files {
            let (ended, threads) = (&ended, &threads);
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            let work = move || {
                stay();
                f.write_all_at(b"mine", 0).unwrap();
                let me = gettid().as_raw_nonzero().get();
                threads.lock().unwrap().push(me);
                f.sync_all().unwrap();
                ended.fetch_add(1, SeqCst);
            };
            thread.spawn_scoped(s, work).unwrap();
        }
        await_that("sync points that wait", || {
            let all = threads.lock().unwrap();
            (all.len() == MANY && all.iter().all(|t| sleeps(*t))).then_some(())
        });
        let look = s.spawn(|| {
            stay();
            let mut direct = OpenOptions::new();
            let direct = direct.read(true).custom_flags(libc::O_DIRECT);
            let f = direct.open(&known).unwrap();
            let mut whole = vec![0; 2 * PAGE];
            let skip = whole.as_ptr().align_offset(PAGE);
            for n in 0..200 {
                f.read_exact_at(&mut whole[skip..skip + PAGE], 0).unwrap();
                assert!(whole[skip..skip + PAGE].iter().all(|b| *b == 3));
                assert!(fs::metadata(m.at.join(format!("nobody-{n}"))).is_err());
            }
        });
        look.join().unwrap();
        assert_eq!(ended.load(SeqCst), 0, "the mirror stood still");
        drop(stopped);
    });
    assert_eq!(ended.into_inner(), MANY as u64);
    drop(files);
    m.end();
    c.assert_equal();
}

/// What came to a queue while all its entries were kept stayed there until one of those calls was answered,
/// though the queue got more entries. Where its thread came late, on a busy machine, a write waited so for a
/// mirror that was silent.
#[test]
fn what_came_to_a_full_queue_is_served_beside_calls_that_wait() {
    if !has_uring() {
        return;
    }
    let c = Cluster::new(SYNC);
    c.configure(&c.patient_text(SYNC));
    let _a = c.node("a");
    let b = c.node("b");
    let args = ["--commit-interval", "never", "--uring", "on"];
    let m = Mount::new(&c, "a", &args);
    const MANY: usize = 1200;
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let make = |n: usize| {
        let f = File::create(m.at.join(n.to_string())).unwrap();
        f.write_all_at(b"mine", 0).unwrap();
        f
    };
    let files: Vec<File> = (0..MANY).map(make).collect();
    stop_all(&[b.child.id(), m.process.child.id()]);
    let threads = std::sync::Mutex::new(Vec::new());
    let wait_for = |count: usize| {
        await_that("calls that wait", || {
            let all = threads.lock().unwrap();
            (all.len() == count && all.iter().all(|t| sleeps(*t))).then_some(())
        });
    };
    let begins = || {
        stay();
        let me = gettid().as_raw_nonzero().get();
        threads.lock().unwrap().push(me);
    };
    let ended = AtomicU64::new(0);
    std::thread::scope(|s| {
        let (stopped, late) = (Stopped(b.child.id()), Stopped(m.process.child.id()));
        for f in &files {
            let (ended, begins) = (&ended, &begins);
            let work = move || {
                begins();
                f.sync_all().unwrap();
                ended.fetch_add(1, SeqCst);
            };
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            thread.spawn_scoped(s, work).unwrap();
        }
        wait_for(MANY);
        let look = s.spawn(|| {
            begins();
            fs::metadata(m.at.join("nobody")).is_err()
        });
        wait_for(MANY + 1);
        drop(late);
        assert!(look.join().unwrap());
        assert_eq!(ended.load(SeqCst), 0, "the mirror stood still");
        drop(stopped);
    });
    assert_eq!(ended.into_inner(), MANY as u64);
    drop(files);
    m.end();
    c.assert_equal();
}

/// Reads that the disk keeps waiting are made by other threads than those that serve. Bytes come from the
/// kernel's memory, from the disk, and from what is not applied, side by side.
#[test]
fn cold_reads_of_many_threads_of_one_processor_are_made_beside_each_other() {
    if !has_uring() {
        return;
    }
    const PAGES: usize = 2048;
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let m = Mount::new(&c, "a", &["--uring", "on"]);
    let of = |page: usize| [(page % 251) as u8 + 1; PAGE];
    let all: Vec<u8> = (0..PAGES).flat_map(of).collect();
    fs::write(m.at.join("f"), &all).unwrap();
    File::open(m.at.join("f")).unwrap().sync_all().unwrap();
    // The data file has all of it, and memory has none.
    let data = await_that("the data file", || {
        let data = File::open(c.dir.join("a/v/f")).ok()?;
        let mut there = Vec::new();
        (&data).read_to_end(&mut there).ok()?;
        (there == all).then_some(data)
    });
    data.sync_all().unwrap();
    fadvise(&data, 0, None, Advice::DontNeed).unwrap();
    let mut page = [0; PAGE];
    let cold = (0..PAGES).any(|n| {
        let mut page = [IoSliceMut::new(&mut page)];
        let read = preadv2(&data, &mut page, (n * PAGE) as u64, ReadWriteFlags::NOWAIT);
        read == Err(Errno::AGAIN)
    });
    fadvise(&data, 0, None, Advice::DontNeed).unwrap();
    let write = OpenOptions::new().write(true).open(m.at.join("f")).unwrap();
    std::thread::scope(|s| {
        for t in 0..40 {
            let m = &m;
            s.spawn(move || {
                stay();
                let mut direct = OpenOptions::new();
                let direct = direct.read(true).custom_flags(libc::O_DIRECT);
                let f = direct.open(m.at.join("f")).unwrap();
                let mut whole = vec![0; 2 * PAGE];
                let skip = whole.as_ptr().align_offset(PAGE);
                for n in 0..50 {
                    let page = (t * 577 + n * 131) % PAGES;
                    let at = (page * PAGE) as u64;
                    f.read_exact_at(&mut whole[skip..skip + PAGE], at).unwrap();
                    assert!(whole[skip..skip + PAGE] == of(page), "page {page}");
                }
            });
        }
        s.spawn(|| {
            for page in (0..PAGES).step_by(64) {
                write.write_all_at(&of(page), (page * PAGE) as u64).unwrap();
                write.sync_data().unwrap();
            }
        });
    });
    // Whoever takes one of those reads has another thread made for the next one.
    let readers = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", m.process.child.id())).unwrap();
        let name = |t: fs::DirEntry| fs::read_to_string(t.path().join("comm")).ok();
        let names = tasks.filter_map(|t| name(t.unwrap()));
        names.filter(|n| n.trim() == "mojim-reads").count()
    };
    if cold {
        assert!(readers() > 1);
    }
    drop(write);
    m.end();
    c.assert_equal();
}

/// A mount that was taken away serves who still has files open, and ends with the last of them.
#[test]
fn who_has_a_file_open_is_served_after_the_mount_was_taken_away() {
    if !has_uring() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let mut m = Mount::new(&c, "a", &["--uring", "on"]);
    let f = File::create(m.at.join("f")).unwrap();
    let mut umount = Command::new("umount");
    assert!(umount.arg("-l").arg(&m.at).status().unwrap().success());
    for n in 0..100 {
        f.write_all_at(&[n; PAGE], 0).unwrap();
        f.sync_all().unwrap();
    }
    drop(f);
    assert_eq!(m.process.wait(), Some(0), "{}", m.process.errors());
    m.over = true;
    // What it says comes behind what the last one said.
    let said = |m: &Mount| m.process.errors().matches(OVER).count();
    assert_eq!(said(&m), 1);
    let m = Mount::new(&c, "a", &["--uring", "off"]);
    assert_eq!(said(&m), 1);
    assert_eq!(fs::read(m.at.join("f")).unwrap(), [99; PAGE]);
    m.end();
    c.assert_equal();
}

/// Large requests use more of an entry than small ones: nothing of one is seen in another.
#[test]
fn large_and_small_requests_of_many_threads_do_not_mix() {
    if !has_uring() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let m = Mount::new(&c, "a", &["--uring", "on"]);
    std::thread::scope(|s| {
        for t in 0..24u8 {
            let at = m.at.join(t.to_string());
            s.spawn(move || {
                for round in 0..6u8 {
                    let len = match (t + round) % 3 {
                        0 => 3 << 20,
                        1 => 200_000,
                        _ => 100,
                    };
                    let bytes = vec![t * 7 + round; len];
                    fs::write(&at, &bytes).unwrap();
                    let mut direct = OpenOptions::new();
                    let f = direct.read(true).custom_flags(libc::O_DIRECT).open(&at);
                    let f = f.unwrap();
                    let mut whole = vec![0; (4 << 20) + PAGE];
                    let skip = whole.as_ptr().align_offset(PAGE);
                    let n = f.read_at(&mut whole[skip..skip + (4 << 20)], 0).unwrap();
                    assert!(whole[skip..skip + n] == bytes, "{t} {round}");
                    f.sync_all().unwrap();
                }
            });
        }
    });
    m.end();
    c.assert_equal();
}

/// Its process is killed: calls fail, and the next mount has what was synced.
#[test]
fn a_killed_mount_lets_its_callers_go() {
    if !has_uring() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let b = c.node("b");
    let m = Mount::new(&c, "a", &["--uring", "on"]);
    let f = File::create(m.at.join("f")).unwrap();
    f.write_all_at(b"synced", 0).unwrap();
    f.sync_all().unwrap();
    f.write_all_at(b"waits!", 0).unwrap();
    stop_all(&[b.child.id()]);
    let task = AtomicU64::new(0);
    std::thread::scope(|s| {
        let _stopped = Stopped(b.child.id());
        let waits = s.spawn(|| {
            let me = gettid().as_raw_nonzero().get();
            task.store(me as u64, SeqCst);
            f.sync_all()
        });
        await_that("a sync point that waits", || {
            let id = task.load(SeqCst) as i32;
            (id != 0 && sleeps(id)).then_some(())
        });
        m.kill();
        let e = waits.join().unwrap().unwrap_err();
        let ended = [libc::ENOTCONN, libc::ECONNABORTED];
        assert!(ended.contains(&e.raw_os_error().unwrap()), "{e}");
    });
    drop(f);
    let m = await_or(
        "the next mount",
        || c.logs(),
        || Some(Mount::new(&c, "a", &["--uring", "on"])),
    );
    let found = fs::read(m.at.join("f")).unwrap();
    assert!(found == b"synced" || found == b"waits!", "{found:?}");
    m.end();
}
