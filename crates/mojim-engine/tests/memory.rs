//! Memory that is bounded: regions many times larger than what they may keep are changed. Nothing
//! of what the program sees, or of what is committed, is other than without the bound.

// Seen to fail, each by a defect made on purpose or found:
// - stores not kept out while a page is given back
// - handlers not waited for
// - no check of what was opened since
// - no comparison
// - records not awaited
// - pages not protected again
// - shut chunks not searched, or only in part
// - a rollback that waits for room
// - no thread that helps

use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::{Duration, Instant};

use mojim_engine::{MapFlags, Mapping, Volume, gmsync, msync, msync_async, rollback};

mod support;
use support::{Dir, alone, map, random};

/// False, with a notice, where this kernel cannot.
fn possible() -> bool {
    let can = mojim_memory::track::uffd_available();
    if !can {
        eprintln!("skipped: this kernel has no write tracking by userfaultfd");
    }
    can
}

/// Bytes of a mapping that are copies, by what the kernel says of it.
fn copied(m: &Mapping) -> usize {
    let (mut inside, mut sum) = (false, 0);
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next().unwrap(), words.next());
        if let Some((from, _)) = first.split_once('-')
            && let Ok(from) = usize::from_str_radix(from, 16)
        {
            inside = (m.ptr as usize..m.ptr as usize + m.len).contains(&from);
        } else if inside && first == "Anonymous:" {
            sum += second.unwrap().parse::<usize>().unwrap() << 10;
        }
    }
    sum
}

/// Ends another thread of a test, also when this one panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

const MIB: usize = 1 << 20;
/// Only a fault takes so long.
const DEADLINE: Duration = Duration::from_secs(60);
/// Enough to be compared rather than taken as it is.
const LARGE: usize = mojim_memory::region::EXACT_MAX + 1;

/// Stores, sync points of all kinds and rollbacks all over a region of which a
/// tenth may be kept: memory and file are what a model says.
#[test]
fn memory_and_file_are_as_without_a_bound() {
    if !possible() {
        return;
    }
    for seed in 0..6 {
        let dir = Dir::new(&format!("model-{seed}"));
        // The last as late as can be.
        let policy = ["auto", "eager", "async"][seed as usize % 3];
        let more =
            format!("memory = \"1MiB\"\nwrite_back = \"{policy}\"\nwrite_back_pages = 1000000");
        let config = alone(&dir.0, &more, "8MiB");
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let mut next = random(seed + 1);
        let len = 10 * MIB + next(4096);
        let m = map(&v, len);
        let mut memory = vec![0u8; len];
        let mut committed = vec![0u8; len];
        // SAFETY: every place is inside the mapping, which only this thread uses.
        let ptr = |at: usize| unsafe { m.ptr.add(at) };
        // SAFETY: all of the mapping.
        let bytes = || unsafe { std::slice::from_raw_parts(m.ptr.cast_const(), len) };
        let mut last = 0;
        for step in 0..600 {
            let at = next(len);
            let n = (1 + next(3 * 4096)).min(len - at);
            let from = next(len - LARGE);
            let large = from..from + LARGE + next((2 * MIB).min(len - from - LARGE) + 1);
            match next(100) {
                // Few values: bytes often are what they were before.
                0..40 => {
                    for _ in 0..next(30) {
                        let at = next(len / 4096) * 4096 + next(3) * 8;
                        let byte = next(2) as u8;
                        memory[at] = byte;
                        // SAFETY: inside the mapping.
                        unsafe { ptr(at).write(byte) };
                    }
                }
                40..50 => {
                    let byte = next(3) as u8;
                    memory[large.clone()].fill(byte);
                    // SAFETY: inside the mapping.
                    unsafe { ptr(large.start).write_bytes(byte, large.len()) };
                }
                50..65 => {
                    msync(ptr(at), n).unwrap();
                    committed[at..at + n].copy_from_slice(&memory[at..at + n]);
                }
                65..80 => {
                    msync(m.ptr, len).unwrap();
                    committed.copy_from_slice(&memory);
                    // What is over is given back before the call returns, but for
                    // what is stored to just now; or the checkpoint thread is at it,
                    // which may be kept from its processor.
                    let begin = Instant::now();
                    while copied(&m) > 2 * MIB {
                        assert!(begin.elapsed() < DEADLINE, "step {step}: {}", copied(&m));
                        msync(m.ptr, len).unwrap();
                    }
                }
                80..85 => {
                    let both = [
                        (ptr(large.start).cast_const(), large.len()),
                        (ptr(at).cast_const(), n),
                    ];
                    gmsync(&both).unwrap();
                    for r in [large, at..at + n] {
                        committed[r.clone()].copy_from_slice(&memory[r]);
                    }
                }
                85..92 => {
                    let part = [0..len, at..at + n, large][next(3)].clone();
                    last = msync_async(ptr(part.start), part.len()).unwrap().max(last);
                    committed[part.clone()].copy_from_slice(&memory[part]);
                }
                92..97 => {
                    let part = [0..len, at..at + n, large][next(3)].clone();
                    assert!(rollback(ptr(part.start), part.len()).unwrap());
                    memory[part.clone()].copy_from_slice(&committed[part]);
                }
                _ => {
                    v.wait(last).unwrap();
                    v.settle().unwrap();
                    let file = std::fs::read(v.directory().join("f")).unwrap();
                    let wrong = (0..len).find(|i| file[*i] != committed[*i]);
                    assert_eq!(wrong, None, "seed {seed}, step {step}: the file");
                }
            }
            if step % 20 == 0 {
                let wrong = (0..len).find(|i| bytes()[*i] != memory[*i]);
                assert_eq!(wrong, None, "seed {seed}, step {step}: memory");
            }
        }
        assert!(bytes() == memory, "seed {seed}, at the end");
        v.detach().unwrap();
    }
}

/// A program that commits exact ranges only, so that no page is ever found clean
/// by a sync point: its memory is given back too, also from several threads, of
/// which each finds its own stores.
#[test]
fn exact_ranges_of_many_threads_are_given_back() {
    if !possible() {
        return;
    }
    let dir = Dir::new("exact");
    // What is uncommitted never is so much, but what is open is.
    let more = "memory = \"1MiB\"\nmax_uncommitted = \"8MiB\"\nconnections = 2";
    let config = alone(&dir.0, more, "8MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let len = 24 * MIB;
    let m = map(&v, len);
    let stop = AtomicBool::new(false);
    let whole = &m;
    std::thread::scope(|s| {
        for thread in 0..3usize {
            let (stop, m) = (&stop, whole);
            s.spawn(move || {
                let _stop = Stop(stop);
                let mut next = random(thread as u64 + 5);
                let mut model = vec![0u8; len / 4096];
                for n in 0..8000 {
                    let page = [next(model.len()), next(64) * 64][n % 2];
                    // SAFETY: this thread's byte of the page.
                    let at = unsafe { m.ptr.add(page * 4096 + thread * 100) };
                    // Few values, and often back: what is on its way is not what
                    // memory and file have.
                    for again in 0..1 + next(2) {
                        // SAFETY: as above.
                        assert_eq!(unsafe { at.read_volatile() }, model[page]);
                        model[page] = 1 - model[page];
                        // SAFETY: as above.
                        unsafe { at.write_volatile(model[page]) };
                        if again == 0 && n % 8 != 7 {
                            msync_async(at, 1).unwrap();
                        }
                    }
                }
                for (page, byte) in model.iter().enumerate() {
                    // SAFETY: as above.
                    let at = unsafe { m.ptr.add(page * 4096 + thread * 100) };
                    // SAFETY: as above.
                    assert_eq!(unsafe { at.read_volatile() }, *byte);
                }
            });
        }
        s.spawn(|| {
            while !stop.load(Relaxed) {
                let m = whole;
                msync(m.ptr, len).unwrap();
            }
        });
    });
    msync(m.ptr, len).unwrap();
    msync(m.ptr, 8).unwrap();
    let copied = copied(&m);
    assert!(copied <= 2 * MIB, "{copied}");
    v.settle().unwrap();
    let file = std::fs::read(v.directory().join("f")).unwrap();
    // SAFETY: nobody stores any more.
    assert!(file == unsafe { std::slice::from_raw_parts(m.ptr, len) });
    v.detach().unwrap();
}

/// A bound on what is not committed stops nobody who commits, however often all
/// of it is used up.
#[test]
fn who_commits_is_not_stopped() {
    if !possible() {
        return;
    }
    for exact in [false, true] {
        let dir = Dir::new(&format!("bound-{exact}"));
        let config = alone(&dir.0, "max_uncommitted = \"1MiB\"", "8MiB");
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let len = 16 * MIB;
        let m = map(&v, len);
        for round in 1..4u8 {
            for at in (0..len).step_by(8192) {
                // SAFETY: inside the mapping, which only this thread uses.
                unsafe { m.ptr.add(at).write_bytes(round, 8192) };
                if exact {
                    // SAFETY: as above.
                    msync(unsafe { m.ptr.add(at) }, 8192).unwrap();
                } else if at % (512 << 10) == 0 {
                    msync(m.ptr, len).unwrap();
                }
            }
            msync(m.ptr, len).unwrap();
            // What is undone makes room too.
            for _ in 0..6 {
                // SAFETY: as above.
                unsafe { m.ptr.write_bytes(9, 700 << 10) };
                assert!(rollback(m.ptr, len).unwrap());
            }
        }
        msync(m.ptr, len).unwrap();
        v.settle().unwrap();
        let file = std::fs::read(v.directory().join("f")).unwrap();
        // SAFETY: as above.
        assert!(file == unsafe { std::slice::from_raw_parts(m.ptr, len) });
        v.detach().unwrap();
    }
}

/// A rollback stores to memory that was shut while there is no room for another
/// store, and is not kept waiting for room, which only it makes.
#[test]
fn a_rollback_needs_no_room() {
    if !possible() {
        return;
    }
    let dir = Dir::new("rollback");
    let config = alone(&dir.0, "max_uncommitted = \"1MiB\"", "8MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let len = 4 * MIB;
    let m = map(&v, len);
    let chunk = 256 << 10;
    // SAFETY: inside the mapping, which only this thread uses.
    let fill = |at: usize, n: usize| unsafe { m.ptr.add(at).write_bytes(5, n) };
    // Half of each of four chunks, which count as whole as long as they are open;
    // then there is room when it is looked for, for two more.
    (0..4).for_each(|c| fill(c * chunk, chunk / 2));
    (4..6).for_each(|c| fill(c * chunk, chunk));
    assert!(rollback(m.ptr, len).unwrap());
    // SAFETY: as above.
    let bytes = unsafe { std::slice::from_raw_parts(m.ptr.cast_const(), len) };
    assert!(bytes.iter().all(|b| *b == 0));
    fill(8 * chunk, 3 * chunk);
    assert!(msync(m.ptr, len).unwrap() > 0);
    v.detach().unwrap();
}

/// A file becomes shorter while there is no room for a store: what lies behind its
/// end in its last page reads as zeros, though nobody stored there lately.
#[test]
fn a_file_becomes_shorter_without_room() {
    if !possible() {
        return;
    }
    let dir = Dir::new("shorter");
    let config = alone(&dir.0, "max_uncommitted = \"1MiB\"", "8MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let len = 4 * MIB;
    let m = map(&v, len);
    let chunk = 256 << 10;
    // SAFETY: inside the mapping, which only this thread uses.
    let fill = |at: usize, n: usize| unsafe { m.ptr.add(at).write_bytes(5, n) };
    fill(10 * chunk, 8192);
    msync(m.ptr, len).unwrap();
    // All that may be uncommitted; room for the last is found by shutting the first.
    fill(0, 4 * chunk);
    let size = 10 * chunk + 100;
    v.truncate("f", size as u64).unwrap();
    // SAFETY: as above, with the page in which the file ends.
    let bytes = unsafe { std::slice::from_raw_parts(m.ptr.cast_const(), 10 * chunk + 4096) };
    assert!(bytes[..4 * chunk].iter().all(|b| *b == 5));
    assert!(bytes[10 * chunk..size].iter().all(|b| *b == 5));
    assert!(bytes[size..].iter().all(|b| *b == 0));
    assert!(msync(m.ptr, size).unwrap() > 0);
    fill(5 * chunk, 2 * chunk);
    msync(m.ptr, size).unwrap();
    v.settle().unwrap();
    let file = std::fs::read(v.directory().join("f")).unwrap();
    assert!(file == bytes[..size]);
    v.detach().unwrap();
}

/// Regions, of two files, come and go, and files change their size, while pages of
/// theirs are given back.
#[test]
fn regions_come_and_go() {
    if !possible() {
        return;
    }
    let dir = Dir::new("come");
    let config = alone(&dir.0, "memory = \"1MiB\"", "8MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let len = 3 * MIB;
    for round in 1..30u8 {
        let files = ["f", "g"].map(|name| v.map(name, len, flags).unwrap());
        for (i, m) in files.iter().enumerate() {
            // SAFETY: inside the mapping, which only this thread uses.
            let bytes = unsafe { std::slice::from_raw_parts_mut(m.ptr, len) };
            let before = round - 1;
            let kept = if before == 0 { 0 } else { len / 2 };
            assert!(bytes[..kept].iter().all(|b| *b == before + i as u8));
            assert!(bytes[kept..].iter().all(|b| *b == 0));
            bytes.fill(round + i as u8);
            match i {
                0 => drop(msync(m.ptr, len).unwrap()),
                _ => drop(msync_async(m.ptr, len).unwrap()),
            }
        }
        for (name, m) in ["f", "g"].iter().zip(&files) {
            // Half of it goes, mapped still or not.
            if round % 2 == 0 {
                v.truncate(name, len as u64 / 2).unwrap();
            }
            mojim_engine::unmap(m.ptr, len).unwrap();
            v.truncate(name, len as u64 / 2).unwrap();
        }
    }
    v.detach().unwrap();
}
