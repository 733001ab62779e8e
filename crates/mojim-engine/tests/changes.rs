//! A sync point of much memory sends what was changed, and only that.
//!
//! In between, memory is applied, synced by exact ranges, made shorter or synced by other threads.
//! The file still has what was committed and nothing else. A rollback gives memory the same.

// Seen to fail, each by a defect made on purpose or found:
// - outstanding records taken for applied
// - images and notes left out
// - no thread waiting for another
// - pages read before they are protected again
// - a rollback that does not wait, or not for the file, or takes whole pages, or rolls back an
//   ordinary map
// - sync points without a waiting caller for which nothing waits (three ways)
// - an fsync of one region of two
// - a new mapping that does not wait

use std::cell::Cell;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::*};

use mojim_config::Config;
use mojim_engine::{
    Error, Level, MapFlags, Volume, gmsync, gmsync_async, msync, msync_async, rollback, unmap,
};
use mojim_env::rng::Rng;
use mojim_format::RecordView;

mod support;
use support::{Dir, alone, map, random};

fn config(dir: &Path, tracker: &str, more: &str) -> Config {
    config_with(dir, tracker, more, "1MiB")
}

fn config_with(dir: &Path, tracker: &str, more: &str, log: &str) -> Config {
    alone(dir, &format!("tracker = \"{tracker}\"\n{more}"), log)
}

/// The file's bytes, once everything that is committed is in it.
fn file(v: &Volume) -> Vec<u8> {
    v.settle().unwrap();
    std::fs::read(v.directory().join("f")).unwrap()
}

/// Bytes of the records in the log: nothing is released from it here.
fn logged(config: &Config) -> usize {
    let volume = config.volume(None).unwrap();
    let spec = mojim_replica::layout::store(
        config,
        config.node("a").unwrap(),
        volume,
        mojim_env::Locker::Program,
    );
    let bytes = std::fs::read(&spec.logs[0].path).unwrap();
    (0..bytes.len())
        .step_by(512)
        .filter_map(|at| RecordView::decode(&bytes[at..]).ok())
        .map(|r| r.header.len as usize)
        .sum()
}

/// Bytes that are the same but for few are found in a page that was written,
/// also where records are outstanding; a page without a change costs nothing.
#[test]
fn what_was_changed_is_what_is_sent() {
    for tracker in ["uffd", "mprotect"] {
        let dir = Dir::new(tracker);
        // Nothing is applied but when it is asked for.
        let config = config(&dir.0, tracker, "checkpoint_threshold = 1000000");
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let len = 1 << 20;
        let m = map(&v, len);
        // SAFETY: inside the mapping, which only this thread uses.
        let store = |at: usize, byte: u8| unsafe { m.ptr.add(at).write(byte) };
        let mut model = vec![0u8; len];
        let sent = || logged(&config);
        // The first finds out what it can rely on.
        store(0, 1);
        model[0] = 1;
        assert!(msync(m.ptr, len).unwrap() > 0);
        for (round, settle) in [false, true, false, false].into_iter().enumerate() {
            if settle {
                v.settle().unwrap();
            }
            let before = sent();
            for page in 0..10 {
                let at = (page * 7919 + round) * 8 % len;
                store(at, round as u8 + 10);
                model[at] = round as u8 + 10;
            }
            assert!(msync(m.ptr, len).unwrap() > 0);
            let bytes = sent() - before;
            assert!(bytes < 10 * 100 + 512, "{tracker}: {bytes} bytes were sent");
            // The same bytes once more: the pages were written, and are as they were.
            for page in 0..10 {
                let at = (page * 7919 + round) * 8 % len;
                store(at, round as u8 + 10);
            }
            assert_eq!(msync(m.ptr, len).unwrap(), 0, "{tracker}");
            assert_eq!(sent(), before + bytes);
            // Nor does one that was rolled back.
            store(round * 50_000, 99);
            assert!(rollback(m.ptr, len).unwrap());
            assert_eq!(msync(m.ptr, len).unwrap(), 0, "{tracker}");
            assert_eq!(sent(), before + bytes);
        }
        assert_eq!(file(&v), model);
        v.detach().unwrap();
    }
}

/// A region large enough for two levels: what is stored to here and there, at
/// the borders of chunks too, is found, and the kernel's own writes are
/// refused rather than lost.
#[test]
fn a_large_region_in_two_levels() {
    let dir = Dir::new("two-level");
    let config = config(&dir.0, "two-level", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let len = (80 << 20) + 100;
    let m = map(&v, len);
    let mut model = vec![0u8; len];
    let mut rng = Rng::new(1);
    let mut refused = 0;
    for round in 0..300u64 {
        for _ in 0..round % 4 {
            let random = rng.next();
            let border = (random >> 8) as usize % (len >> 18) * (256 << 10);
            let at = (border + (random & 15) as usize).saturating_sub(8);
            // SAFETY: inside the mapping, which only this thread uses.
            unsafe { m.ptr.add(at).write(round as u8) };
            model[at] = round as u8;
        }
        // SAFETY: as above.
        let word = unsafe { std::slice::from_raw_parts_mut(m.ptr.add(40 << 20), 8) };
        let bytes = round.to_le_bytes();
        match pipe_into(&bytes, word) {
            Ok(()) => model[40 << 20..][..8].copy_from_slice(&bytes),
            Err(_) => refused += 1,
        }
        msync(m.ptr, len).unwrap();
    }
    assert!(refused > 0, "nothing was closed");
    assert!(file(&v) == model);
    v.detach().unwrap();
}

/// Bytes that the kernel writes to memory.
fn pipe_into(bytes: &[u8], to: &mut [u8]) -> std::io::Result<()> {
    use std::io::{Read, Write};
    let (mut from, mut into) = std::io::pipe()?;
    into.write_all(bytes)?;
    from.read_exact(to)
}

/// Stores, sync points of all kinds, rollbacks, and changes of the file's size,
/// against the bytes that must be in the file and in memory.
#[test]
fn the_file_has_what_was_committed_and_nothing_else() {
    let rounds = 40;
    for seed in 0..rounds {
        let dir = Dir::new(&format!("model-{seed}"));
        let tracker = ["uffd", "mprotect"][seed as usize % 2];
        let threshold = [1, 3, 20, 1_000_000][seed as usize / 2 % 4];
        let write_back = ["auto", "eager", "async"][seed as usize % 3];
        let working = ["private", "shared"][seed as usize / 8 % 2];
        let config = config(
            &dir.0,
            tracker,
            &format!(
                "checkpoint_threshold = {threshold}\nwrite_back = \"{write_back}\"\nwrite_back_pages = 4\nworking = \"{working}\""
            ),
        );
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let mut next = random(seed + 1);
        // Little memory, few places and few values: so that bytes often are what
        // they were one or two sync points ago.
        let mut len = 6 * 4096 + next(4096);
        let full = len;
        let m = map(&v, len);
        // Shared, a file is seen in two places.
        let aliases = match working {
            "shared" => vec![m, map(&v, len)],
            _ => vec![m],
        };
        let turn = Cell::new(0);
        let mut memory = vec![0u8; len];
        let mut committed = vec![0u8; len];
        let ptr = |at: usize| {
            turn.set(turn.get() + 1);
            // SAFETY: every place is inside the mapping, which only this thread uses.
            unsafe { aliases[turn.get() % aliases.len()].ptr.add(at) }
        };
        let mut last = 0;
        for step in 0..400 {
            let what = next(100);
            let at = if next(4) > 0 {
                next(30) * 900
            } else {
                next(len)
            };
            let at = at.min(len - 1);
            let n = (1 + next(3 * 4096)).min(len - at);
            let from = next(len - EXACT);
            let large = from..from + EXACT + next(len - from - EXACT + 1);
            // SAFETY: all of the mapping.
            let bytes = || unsafe { std::slice::from_raw_parts(m.ptr.cast_const(), full) };
            if what < 50 {
                let n = n.min(1 + next(24));
                let byte = next(2) as u8;
                memory[at..at + n].fill(byte);
                // SAFETY: inside the mapping.
                unsafe { ptr(at).write_bytes(byte, n) };
            } else if what < 58 {
                // Back to what is committed, as a program does that undoes.
                let n = n.min(1 + next(64));
                let old = &committed[at..at + n];
                memory[at..at + n].copy_from_slice(old);
                // SAFETY: inside the mapping.
                unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), ptr(at), n) };
            } else if what < 64 {
                msync(ptr(at), n).unwrap();
                committed[at..at + n].copy_from_slice(&memory[at..at + n]);
            } else if what < 70 {
                msync(m.ptr, len).unwrap();
                committed.copy_from_slice(&memory);
            } else if what < 78 {
                // A large part and a small one, which may overlap.
                let (x, y) = (ptr(large.start), ptr(at));
                let both = [(x.cast_const(), large.len()), (y.cast_const(), n)];
                match next(2) {
                    0 => drop(gmsync(&both).unwrap()),
                    _ => last = gmsync_async(&both).unwrap().max(last),
                }
                for r in [large, at..at + n] {
                    committed[r.clone()].copy_from_slice(&memory[r]);
                }
            } else if what < 84 {
                let part = [0..len, at..at + n, large][next(3)].clone();
                last = msync_async(ptr(part.start), part.len()).unwrap().max(last);
                committed[part.clone()].copy_from_slice(&memory[part]);
            } else if what < 92 {
                let part = [0..len, at..at + n, large][next(3)].clone();
                assert!(rollback(ptr(part.start), part.len()).unwrap());
                memory[part.clone()].copy_from_slice(&committed[part.clone()]);
                let wrong = (0..len).find(|i| bytes()[*i] != memory[*i]);
                assert_eq!(wrong, None, "seed {seed}, step {step}: {part:?}");
            } else if what < 94 {
                let size = full - next(full / 4);
                v.truncate("f", size as u64).unwrap();
                if next(2) == 0 {
                    assert!(rollback(m.ptr, full).unwrap());
                    memory[..size].copy_from_slice(&committed[..size]);
                }
                // What is beyond the end is gone, and so is the rest of its page
                // in memory.
                let end = size.next_multiple_of(4096).min(full);
                v.truncate("f", full as u64).unwrap();
                memory[size.min(len)..end].fill(0);
                committed[size.min(len)..].fill(0);
                len = full;
                if size < full {
                    // Pages that were stored to keep their bytes in memory: they
                    // are not committed any more. Untouched ones show the file.
                    memory[end..].copy_from_slice(&bytes()[end..]);
                    assert!(bytes()[..end] == memory[..end], "seed {seed}, step {step}");
                }
            } else {
                v.wait(last).unwrap();
                let bytes = file(&v);
                let wrong = (0..len).find(|i| bytes[*i] != committed[*i]);
                assert_eq!(wrong, None, "seed {seed}, step {step}");
            }
        }
        msync(m.ptr, len).unwrap();
        assert!(file(&v) == memory, "seed {seed}, at the end");
        v.detach().unwrap();
    }
}

/// What is committed and not applied is not what the file has: by a sync point
/// before the first comparison; of more pages than are looked after at a time.
/// Each was once stored to, and is stored to again so that it is as in the file.
#[test]
fn what_is_not_applied_counts_however_it_was_committed() {
    let dir = Dir::new("outstanding");
    let config = config(&dir.0, "auto", "checkpoint_threshold = 1000000");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let pages = 700;
    let len = pages * 4096;
    let m = map(&v, len);
    // SAFETY: inside the mapping, which only this thread uses.
    let store = |page: usize, byte: u8| unsafe { m.ptr.add(page * 4096 + 9).write(byte) };
    let expect = |byte: u8| {
        let bytes = file(&v);
        let wrong = (0..pages).find(|page| bytes[page * 4096 + 9] != byte);
        assert_eq!(wrong, None);
    };
    store(0, 1);
    msync(m.ptr, 100).unwrap();
    store(0, 0);
    assert!(msync(m.ptr, len).unwrap() > 0);
    expect(0);
    for bytes in [[1, 0], [1, 2], [1, 0], [3, 0]] {
        for byte in bytes {
            (0..pages).for_each(|page| store(page, byte));
            assert!(msync(m.ptr, len).unwrap() > 0);
        }
        assert_eq!(msync(m.ptr, len).unwrap(), 0);
        expect(bytes[1]);
    }
    v.detach().unwrap();
}

/// A sync point whose call did not wait has the bytes of that moment, is
/// committed with no other call, and before what waits.
#[test]
fn what_was_begun_is_committed_by_itself_and_in_order() {
    let dir = Dir::new("begun");
    let config = config(&dir.0, "auto", "checkpoint_threshold = 1000000");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let m = map(&v, 64 << 10);
    // SAFETY: inside the mapping, which only this thread uses.
    let store = |at: usize, byte: u8| unsafe { m.ptr.add(at).write(byte) };
    // SAFETY: as above.
    let load = |at: usize| unsafe { m.ptr.add(at).read() };
    for (len, byte) in [(m.len, 1), (100, 3)] {
        store(7, byte);
        let lsn = msync_async(m.ptr, len).unwrap();
        assert_eq!(mojim_engine::last_lsn(), lsn);
        store(7, byte + 1);
        let start = std::time::Instant::now();
        while v.copies(lsn)[0].level != Some(Level::Disk) {
            assert!(start.elapsed().as_secs() < 60, "it does not go on");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(file(&v)[7], byte);
        // Memory that was stored to since goes back to it.
        assert!(rollback(m.ptr, m.len).unwrap());
        assert_eq!(load(7), byte);
    }
    // Who finds nothing waits for what others began.
    for round in 0..50u8 {
        store(9, round | 1);
        store(40_000, round | 1);
        let lsn = msync_async(m.ptr, 100).unwrap();
        let last = msync_async(m.ptr, m.len).unwrap();
        assert!(last > lsn);
        match round % 3 {
            0 => assert_eq!(msync(m.ptr, m.len).unwrap(), 0),
            1 => assert_eq!(v.fsync("f").unwrap(), 0),
            _ => v.wait(last).unwrap(),
        }
        assert_eq!(v.copies(last)[0].level, Some(Level::Disk));
    }
    // Also where nothing of the file is mapped any more.
    v.create("g").unwrap();
    store(9, 77);
    let last = msync_async(m.ptr, 100).unwrap();
    assert_eq!(v.fsync("g").unwrap(), 0);
    assert_eq!(v.copies(last)[0].level, Some(Level::Disk));
    store(9, 78);
    msync_async(m.ptr, 100).unwrap();
    store(9, 79);
    v.detach().unwrap();
    assert_eq!(std::fs::read(v.directory().join("f")).unwrap()[9], 78);
}

/// More than the log has room for: the calls wait for room, and nothing else.
#[test]
fn what_is_begun_is_bounded_by_the_log() {
    let dir = Dir::new("bounded");
    let config = config_with(&dir.0, "auto", "", "1MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let m = map(&v, 64 << 10);
    for i in 0..6000usize {
        let at = i % 60 * 1024;
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { m.ptr.add(at).write_bytes((i / 60) as u8, 1024) };
        // SAFETY: inside the mapping.
        msync_async(unsafe { m.ptr.add(at) }, 1024).unwrap();
    }
    v.fsync("f").unwrap();
    assert!(file(&v)[..60 * 1024].iter().all(|b| *b == 99));
    v.detach().unwrap();
}

/// Threads whose words share pages sync and roll back each its own, while one
/// does so with much memory that begins in the middle of such a page.
#[test]
fn a_rollback_leaves_what_others_store_and_sync_beside_it() {
    for (tracker, threshold) in [("uffd", 1), ("mprotect", 1), ("uffd", 1_000_000)] {
        let dir = Dir::new(&format!("beside-{tracker}-{threshold}"));
        let more = format!("checkpoint_threshold = {threshold}");
        let config = config(&dir.0, tracker, &more);
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let m = map(&v, 64 << 10);
        const WORDS: usize = 3;
        let word = |page: usize, t: usize| m.ptr.wrapping_add(page * 4096 + t * 8).cast::<u64>();
        let start = Barrier::new(WORDS + 1);
        std::thread::scope(|s| {
            for t in 0..WORDS {
                let start = &start;
                let word = &word;
                let mine = [
                    word(0, t) as usize,
                    word(1, t) as usize,
                    word(2, t) as usize,
                ];
                s.spawn(move || {
                    let mut next = random(t as u64 + 1);
                    let mut committed = [0u64; 3];
                    start.wait();
                    for i in 1..=400u64 {
                        let which = next(3);
                        let at = mine[which] as *mut u64;
                        // SAFETY: inside the mapping; the word is this thread's.
                        unsafe { at.write_volatile(i) };
                        match next(3) {
                            0 => {
                                msync(at.cast(), 8).unwrap();
                                committed[which] = i;
                            }
                            1 => {
                                msync_async(at.cast(), 8).unwrap();
                                committed[which] = i;
                            }
                            _ => {
                                assert!(rollback(at.cast(), 8).unwrap());
                                // SAFETY: as above.
                                let now = unsafe { at.read_volatile() };
                                assert_eq!(now, committed[which], "thread {t}, turn {i}");
                            }
                        }
                    }
                    for (at, committed) in mine.into_iter().zip(committed) {
                        assert!(rollback(at as *const u8, 8).unwrap());
                        // SAFETY: as above.
                        assert_eq!(unsafe { (at as *const u64).read() }, committed);
                    }
                });
            }
            // The rest, from the middle of page 2 on.
            let from = 2 * 4096 + 2048;
            let rest = m.ptr.wrapping_add(from);
            let len = m.len - from;
            let mut next = random(99);
            let mut memory = vec![0u8; len];
            let mut committed = memory.clone();
            start.wait();
            for turn in 0..300 {
                for _ in 0..5 {
                    let at = next(len);
                    memory[at] = turn as u8;
                    // SAFETY: inside the mapping; this part is this thread's.
                    unsafe { rest.add(at).write(turn as u8) };
                }
                match next(3) {
                    0 => drop(msync(rest, len).unwrap()),
                    1 => drop(msync_async(rest, len).unwrap()),
                    _ => {
                        assert!(rollback(rest, len).unwrap());
                        memory.copy_from_slice(&committed);
                        // SAFETY: as above.
                        let now = unsafe { std::slice::from_raw_parts(rest, len) };
                        assert!(now == memory, "turn {turn}");
                    }
                }
                committed.copy_from_slice(&memory);
            }
        });
        // Everybody has rolled back what it had not committed, or committed it.
        // SAFETY: all of the mapping; the threads have ended.
        let now = unsafe { std::slice::from_raw_parts(m.ptr, m.len) }.to_vec();
        v.fsync("f").unwrap();
        assert!(file(&v) == now);
        v.detach().unwrap();
    }
}

/// Once, a region was taken for one of the file that it was mapped as: where
/// another file had that name meanwhile, `fsync` synced the wrong one, and said
/// that nothing had changed.
#[test]
fn fsync_is_of_the_file_that_has_the_name_now() {
    let dir = Dir::new("renamed");
    let config = config(&dir.0, "auto", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let map = |file: &str| {
        let flags = MapFlags {
            create: true,
            atomic: true,
            ..MapFlags::default()
        };
        v.map(file, 8192, flags).unwrap()
    };
    let (old, new) = (map("f"), map("f.new"));
    v.rename("f", "f.1").unwrap();
    v.rename("f.new", "f").unwrap();
    for (m, byte) in [(old, 1), (new, 2)] {
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { m.ptr.write(byte) };
    }
    let before = mojim_engine::last_lsn();
    assert_eq!(v.fsync("f").unwrap(), before + 1);
    assert!(matches!(
        v.fsync("f.new"),
        Err(mojim_engine::Error::NotFound(_))
    ));
    let first = |file: &str| {
        v.settle().unwrap();
        std::fs::read(v.directory().join(file)).unwrap()[0]
    };
    assert_eq!([first("f"), first("f.1")], [2, 0]);
    assert_eq!(v.fsync("f.1").unwrap(), before + 2);
    assert_eq!([first("f"), first("f.1")], [2, 1]);
    v.detach().unwrap();
}

/// Once, the engine's threads took signals that the program waited for elsewhere
/// (blocked in its own threads after it had attached), and it ended by them.
#[test]
fn the_programs_signals_are_not_for_the_engines_threads() {
    let dir = Dir::new("signals");
    let config = config(&dir.0, "auto", "working = \"shared\"");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    map(&v, 8192);
    // A thread has its name when it first runs: after the attach, on a busy machine.
    let start = std::time::Instant::now();
    loop {
        let mut seen = 0;
        for thread in std::fs::read_dir("/proc/self/task").unwrap() {
            let thread = thread.unwrap().path();
            // Other tests' threads end meanwhile.
            let Ok(status) = std::fs::read_to_string(thread.join("status")) else {
                continue;
            };
            let of = |key: &str| {
                let line = status.lines().find_map(|l| l.strip_prefix(key)).unwrap();
                line.trim().to_string()
            };
            // Of one that has just ended nothing is told but the name.
            if !of("Name:").starts_with("mojim-") || of("Threads:") == "0" {
                continue;
            }
            let blocked = u64::from_str_radix(&of("SigBlk:"), 16).unwrap();
            for signal in [libc::SIGTERM, libc::SIGALRM, libc::SIGUSR1, libc::SIGCHLD] {
                assert!(blocked >> (signal - 1) & 1 == 1, "{status}");
            }
            seen += 1;
        }
        // A thread of checkpoints, one of other processes.
        if seen >= 2 {
            break;
        }
        assert!(start.elapsed().as_secs() < 60, "{seen} threads");
        std::thread::yield_now();
    }
    v.detach().unwrap();
}

/// Once, the memory of a region could go while a sync point of another thread read
/// it: that thread died of it, or what came to that address was committed.
#[test]
fn memory_stays_while_a_sync_point_reads_it() {
    const LEN: usize = 1 << 20;
    let dir = Dir::new("reads");
    let config = config_with(&dir.0, "auto", "", "8MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    // Where the kernel puts nothing of the other tests' while this one has nothing there: it
    // once took their memory, and a process died of it.
    let place = std::ptr::without_provenance_mut::<u8>(0x2a4d_6f6a_0000);
    let other = || {
        let (rw, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let flags = private | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: in the place of what this test has there.
        let p = unsafe { libc::mmap(place.cast(), LEN, rw, flags, -1, 0) };
        assert_ne!(p, libc::MAP_FAILED);
        // SAFETY: memory that was just mapped.
        unsafe { p.cast::<u8>().write_bytes(99, LEN) };
    };
    other();
    let flags = MapFlags {
        create: true,
        atomic: true,
        fixed_at: place as usize,
        ..MapFlags::default()
    };
    let at = place as usize;
    let meet = Barrier::new(2);
    let mut random = random(7);
    let mut synced = 0;
    std::thread::scope(|s| {
        let syncs = s.spawn(|| {
            let mut synced = 0;
            for round in 0..200 {
                meet.wait();
                // All of it, or exactly these parts.
                let done = match round % 2 {
                    0 => msync(at as *const u8, LEN),
                    _ => {
                        let parts = (0..64).map(|i| ((at + i * (LEN / 64)) as *const u8, LEN / 64));
                        gmsync(&parts.collect::<Vec<_>>())
                    }
                };
                synced += usize::from(done.is_ok());
                meet.wait();
            }
            synced
        });
        for round in 0..200u8 {
            // SAFETY: this test's memory, which nobody uses.
            let m = unsafe { v.map_over("f", LEN, flags) }.unwrap();
            // SAFETY: inside the mapping; nobody syncs it yet.
            unsafe { m.ptr.write_bytes(round % 50, LEN) };
            meet.wait();
            for _ in 0..random(20_000) {
                std::hint::spin_loop();
            }
            match round % 4 {
                // The same of memory behind the file's end.
                0 | 1 => v.truncate("f", 0).unwrap(),
                _ => unmap(m.ptr, LEN).unwrap(),
            }
            if round % 4 > 1 {
                other();
            }
            meet.wait();
            if round % 4 <= 1 {
                unmap(m.ptr, LEN).unwrap();
                other();
            }
            assert!(file(&v).iter().all(|b| *b < 50), "round {round}");
        }
        synced = syncs.join().unwrap();
    });
    assert!(synced > 0);
    v.detach().unwrap();
    // SAFETY: this test's memory.
    unsafe { libc::munmap(place.cast(), LEN) };
}

/// A mapping at an address took the place of whatever memory the process had there: a program
/// without `unsafe` overwrote its own.
#[test]
fn a_safe_call_maps_over_no_memory_of_the_process() {
    let d = Dir::new("over");
    let v = Volume::attach_with(&config(&d.0, "auto", ""), "a", None, |_, _| {}).unwrap();
    let len = rustix::param::page_size();
    let bytes = vec![7u8; 3 * len];
    for (shared, length) in [(false, len), (true, len), (false, 1), (true, 0)] {
        let flags = MapFlags {
            create: true,
            shared,
            fixed_at: (bytes.as_ptr() as usize).next_multiple_of(len),
            ..MapFlags::default()
        };
        let file = if shared { "shared" } else { "private" };
        if length == 0 {
            v.truncate(file, len as u64).unwrap();
        }
        let before = v.size(file).unwrap();
        let e = v.map(file, length, flags).expect_err("there is memory");
        assert!(matches!(e, Error::Busy(_)), "{e}");
        assert!(bytes.iter().all(|b| *b == 7));
        if length > 0 {
            // Before anything had changed.
            assert_eq!(v.size(file).unwrap(), before);
            v.create(file).unwrap();
        }
    }
    // Where nothing is.
    for shared in [false, true, false] {
        let flags = MapFlags {
            create: true,
            shared,
            fixed_at: 0x2a4d_6f6c_0000,
            ..MapFlags::default()
        };
        let file = if shared { "shared" } else { "private" };
        let m = v.map(file, len + 1, flags).unwrap();
        assert_eq!(m.ptr as usize, flags.fixed_at);
        // SAFETY: inside the mapping.
        unsafe { m.ptr.add(len).write(9) };
        assert!(msync(m.ptr, m.len).unwrap() > 0);
        unmap(m.ptr, m.len).unwrap();
    }
    v.detach().unwrap();
}

const SPARSE: &str = "MOJIM_TEST_SPARSE";
/// Much more than fits any memory here.
const VAST: usize = 512 << 30;

/// A process that was killed while it mapped a sparse region of 512 GiB held the volume for minutes: every
/// page had a marker in the page tables (1 GiB of them), which the kernel removes one by one.
#[test]
fn a_vast_sparse_region_takes_no_page_tables_for_what_is_not_touched() {
    let d = Dir::new("sparse");
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_with_a_vast_region", "--nocapture"])
        .env(SPARSE, &d.0)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let out = std::io::BufReader::new(child.stdout.take().unwrap());
    let said = |l: &String| l == "synced";
    let found = std::io::BufRead::lines(out)
        .map_while(Result::ok)
        .any(|l| said(&l));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(found);
    let v = Volume::attach_with(&config(&d.0, "auto", ""), "a", None, |_, _| {}).unwrap();
    let m = map(&v, VAST);
    for (at, byte) in TOUCHED {
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { m.ptr.add(at).read() }, byte, "{at:#x}");
    }
    v.detach().unwrap();
}

/// Where the process stores, and what.
const TOUCHED: [(usize, u8); 4] = [
    (5, 1),
    (VAST / 2, 2),
    (VAST / 2 + (20 << 10), 3),
    (VAST - 1, 4),
];

#[test]
fn child_with_a_vast_region() {
    let Some(dir) = std::env::var_os(SPARSE) else {
        return;
    };
    let config = config(Path::new(&dir), "auto", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let m = map(&v, VAST);
    for (at, byte) in TOUCHED {
        // What is only read, beside it, is found once and sent never.
        // SAFETY: inside the mapping.
        unsafe {
            std::hint::black_box(m.ptr.add(at ^ (64 << 10)).read());
            m.ptr.add(at).write(byte);
        }
        assert!(msync(m.ptr, m.len).unwrap() > 0, "{at:#x}");
        assert_eq!(msync(m.ptr, m.len).unwrap(), 0, "{at:#x}");
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let tables = status.lines().find_map(|l| l.strip_prefix("VmPTE:"));
    let kib: usize = tables
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    assert!(kib < 64 << 10, "page tables: {kib} KiB");
    println!("synced");
    // Until it is killed.
    let _ = std::io::stdin().read_line(&mut String::new());
    std::thread::sleep(std::time::Duration::from_secs(600));
}

const CANNOT_BEGIN: &str = "MOJIM_TEST_CANNOT_BEGIN";

/// A sync point collects what was stored, and marks it clean, before it has its LSN. One that gets
/// none (here: its spill file has no room) must mark all of it as stored again: else the program
/// calls once more, is told that nothing had changed, and loses it at the next kill.
#[test]
fn what_could_not_be_begun_is_committed_by_the_next_call() {
    for kind in ["private", "shared", "several"] {
        let d = Dir::new("cannot-begin");
        // A process of its own, which has the limit, and does not end in order.
        let out = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_cannot_begin", "--nocapture"])
            .env(CANNOT_BEGIN, &d.0)
            .env("MOJIM_TEST_KIND", kind)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(said.contains("all is committed"), "{kind}: {said}{text}");
        let v = Volume::attach_with(
            &config_with(&d.0, "auto", "", "256KiB"),
            "a",
            None,
            |_, _| {},
        )
        .unwrap();
        v.settle().unwrap();
        let bytes = file(&v);
        assert_eq!(bytes.len(), MUCH);
        assert!(bytes.iter().all(|b| *b == 1), "{kind}");
        v.detach().unwrap();
    }
}

/// More than a log holds.
const MUCH: usize = 4 << 20;

#[test]
fn child_that_cannot_begin() {
    let Some(dir) = std::env::var_os(CANNOT_BEGIN) else {
        return;
    };
    let kind = std::env::var("MOJIM_TEST_KIND").unwrap();
    let config = config_with(Path::new(&dir), "auto", "", "256KiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let flags = MapFlags {
        create: true,
        atomic: true,
        shared: kind == "shared",
        ..MapFlags::default()
    };
    let m = v.map("f", MUCH, flags).unwrap();
    // SAFETY: inside the mapping.
    unsafe { m.ptr.write_bytes(1, MUCH) };
    let sync = || match kind == "several" {
        false => msync(m.ptr, MUCH),
        // Some are sent without a look at the page tables.
        true => {
            let (small, at) = (10 << 10, |i: usize| m.ptr.wrapping_add(i).cast_const());
            let half = MUCH / 2;
            gmsync(&[
                (at(0), small),
                (at(small), half),
                (at(small + half), half - small),
            ])
        }
    };
    let limit = |soft| {
        let mut all = rustix::process::getrlimit(rustix::process::Resource::Fsize);
        let before = std::mem::replace(&mut all.current, soft);
        rustix::process::setrlimit(rustix::process::Resource::Fsize, all).unwrap();
        before
    };
    // SAFETY: changes the disposition of a signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let before = limit(Some(1 << 20));
    for _ in 0..2 {
        assert_eq!(sync().expect_err("no room").errno(), libc::EFBIG);
    }
    limit(before);
    assert!(sync().unwrap() > 0, "it is told that nothing had changed");
    println!("all is committed");
    // SAFETY: ends this process as a kill does.
    unsafe { libc::_exit(0) };
}

/// One sync point, of all regions of the file and of no other.
#[test]
fn fsync_is_one_sync_point_of_a_files_regions() {
    let dir = Dir::new("fsync");
    let config = config(&dir.0, "auto", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let map = |file: &str, offset| {
        let flags = MapFlags {
            create: true,
            atomic: true,
            offset,
            ..MapFlags::default()
        };
        v.map(file, 8192, flags).unwrap()
    };
    let all = [map("f", 0), map("f", 65536), map("g", 0)];
    for m in all {
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { m.ptr.write(5) };
    }
    let before = mojim_engine::last_lsn();
    assert_eq!(v.fsync("f").unwrap(), before + 1);
    assert!(matches!(
        v.fsync("none"),
        Err(mojim_engine::Error::NotFound(_))
    ));
    v.detach().unwrap();
    let first = |file: &str, at| std::fs::read(v.directory().join(file)).unwrap()[at];
    assert_eq!([first("f", 0), first("f", 65536), first("g", 0)], [5, 5, 0]);
}

/// The thread that applies and checkpoints had the lowest priority, and held locks for which rollbacks and
/// sync points wait: beside busy programs these took up to a second.
#[test]
fn no_thread_that_callers_wait_for_has_a_lower_priority() {
    let d = Dir::new("priority");
    let v = Volume::attach_with(&config(&d.0, "auto", ""), "a", None, |_, _| {}).unwrap();
    let nice = |id: u32| {
        // SAFETY: a question about a thread of this process.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, id) }
    };
    let own = nice(0);
    let threads = || {
        let all = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let name = |e: &std::fs::DirEntry| std::fs::read_to_string(e.path().join("comm"));
        let mut found = all.filter(|e| name(e).is_ok_and(|n| n.trim_end() == "mojim-checkpoin"));
        let ids = found
            .by_ref()
            .filter_map(|e| e.file_name().to_str()?.parse().ok());
        ids.collect::<Vec<u32>>()
    };
    let ids = threads();
    assert!(!ids.is_empty());
    // It is said at the thread's start: until then it has the priority of the test.
    v.create("f").unwrap();
    v.settle().unwrap();
    for id in ids {
        assert_eq!(nice(id), own);
    }
    v.detach().unwrap();
}

/// Without `atomic` nothing is rolled back, as on Linux.
#[test]
fn only_an_atomic_region_is_rolled_back() {
    let dir = Dir::new("plain");
    let config = config(&dir.0, "auto", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let m = v.map("f", 8192, flags).unwrap();
    // SAFETY: inside the mapping, which only this thread uses.
    unsafe { m.ptr.write(5) };
    assert!(!rollback(m.ptr, m.len).unwrap());
    // SAFETY: as above.
    assert_eq!(unsafe { m.ptr.read() }, 5);
    v.detach().unwrap();
    assert_eq!(std::fs::read(v.directory().join("f")).unwrap()[0], 5);
}

/// More than this is compared (`mojim_memory::region::EXACT_MAX`).
const EXACT: usize = mojim_memory::region::EXACT_MAX + 1;

/// Two threads that sync the same memory once lost each other: one found the
/// page clean that the other had just collected, and returned before anything
/// of it was committed.
#[test]
fn who_finds_nothing_waits_for_whoever_found_it() {
    let dir = Dir::new("threads");
    let config = config(&dir.0, "auto", "checkpoint_threshold = 1");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    const THREADS: usize = 4;
    let len = 64 << 10;
    let m = map(&v, len);
    let turns = AtomicU64::new(0);
    let nothing = AtomicU64::new(0);
    let start = Barrier::new(THREADS);
    std::thread::scope(|s| {
        for t in 0..THREADS {
            let (v, m, turns, start, nothing) = (&v, &m, &turns, &start, &nothing);
            s.spawn(move || {
                let fd = std::fs::File::open(v.directory().join("f")).unwrap();
                start.wait();
                for i in 1..=300u64 {
                    // Everybody's words share their cache lines and pages.
                    for page in [0, 3, 9] {
                        let at = page * 4096 + t * 8;
                        // SAFETY: inside the mapping; this word is this thread's.
                        unsafe { m.ptr.add(at).cast::<u64>().write_volatile(i) };
                    }
                    if msync(m.ptr, m.len).unwrap() == 0 {
                        nothing.fetch_add(1, Relaxed);
                    }
                    v.settle().unwrap();
                    for page in [0u64, 3, 9] {
                        let mut word = [0; 8];
                        let at = page * 4096 + t as u64 * 8;
                        std::os::unix::fs::FileExt::read_exact_at(&fd, &mut word, at).unwrap();
                        assert_eq!(u64::from_le_bytes(word), i, "thread {t}, page {page}");
                    }
                    turns.fetch_add(1, Relaxed);
                }
            });
        }
    });
    assert_eq!(turns.load(Relaxed), 300 * THREADS as u64);
    v.detach().unwrap();
}

/// Words that the file has otherwise than memory has them.
fn lost(v: &Volume, words: &[AtomicU64]) -> Vec<usize> {
    let bytes = file(v);
    let at = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap());
    let all = 0..words.len();
    all.filter(|i| at(*i) != words[*i].load(SeqCst)).collect()
}

/// Ends threads that look at it, also where what they are for has failed.
struct Over<'a>(&'a AtomicU64);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(1, SeqCst);
    }
}

/// What is stored while a sync point runs is in it or is not, and if not it is
/// found by the next one, whatever kinds of sync points there were before. What
/// was stored before the call is in it.
#[test]
fn stores_during_a_sync_point_are_committed_by_the_next() {
    const THREADS: usize = 3;
    const PAGES: usize = 24;
    for tracker in ["uffd", "mprotect"] {
        for threshold in [1, 1_000_000] {
            let dir = Dir::new(&format!("during-{tracker}-{threshold}"));
            let more = format!("checkpoint_threshold = {threshold}");
            let config = config_with(&dir.0, tracker, &more, "8MiB");
            let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
            let m = map(&v, PAGES * 4096);
            // SAFETY: all of the mapping, which stays; it is used by atomics alone.
            let words = unsafe { std::slice::from_raw_parts(m.ptr.cast(), m.len / 8) };
            let words: &[AtomicU64] = words;
            // Word `n` of a thread: another page each time.
            let place = |t: usize, n: usize| n % PAGES * 512 + n / PAGES * 64 + t;
            let counts: [AtomicU64; THREADS] = Default::default();
            let over = AtomicU64::new(0);
            std::thread::scope(|s| {
                for t in 0..THREADS {
                    let (count, over) = (&counts[t], &over);
                    s.spawn(move || {
                        for i in 1.. {
                            // All its words have `i` or `i - 1`.
                            for n in 0..PAGES * 8 {
                                words[place(t, n)].store(i, SeqCst);
                            }
                            count.store(i, SeqCst);
                            if over.load(SeqCst) != 0 {
                                return;
                            }
                        }
                    });
                }
                let _over = Over(&over);
                let mut next = random(threshold);
                for round in 0..60 {
                    let least = counts.each_ref().map(|c| c.load(SeqCst));
                    // Parts first: what they leave is for the whole.
                    for _ in 0..next(3) {
                        let (x, y) = (next(m.len - 20_000), next(m.len - 20_000));
                        // SAFETY: inside the mapping.
                        let part = |at| unsafe { m.ptr.add(at) }.cast_const();
                        gmsync(&[(part(x), 1 + next(20_000)), (part(y), 1 + next(300))]).unwrap();
                        msync(part(y), 1 + next(9000)).unwrap();
                    }
                    msync(m.ptr, m.len).unwrap();
                    let bytes = file(&v);
                    for (t, least) in least.into_iter().enumerate() {
                        let most = counts[t].load(SeqCst) + 1;
                        for n in 0..PAGES * 8 {
                            let at = place(t, n) * 8;
                            let is = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                            let right = (least..=most).contains(&is);
                            assert!(right, "{tracker} {round}: {is}, {least} to {most}");
                        }
                    }
                }
            });
            msync(m.ptr, m.len).unwrap();
            assert_eq!(lost(&v, words), Vec::<usize>::new(), "{tracker}");
            // One store that no sync point follows is seen to be missing.
            words[place(1, 5)].store(0, SeqCst);
            assert_eq!(lost(&v, words), [place(1, 5)]);
            v.detach().unwrap();
        }
    }
}

/// A region was unmapped with a sync point on its way, and mapped again before that was
/// committed: the new mapping had the bytes of before, and its next sync point brought them
/// back.
#[test]
fn a_new_mapping_has_what_an_earlier_one_has_begun_to_commit() {
    let dir = Dir::new("again");
    let config = config(&dir.0, "auto", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let flags = MapFlags {
        create: true,
        atomic: true,
        ..MapFlags::default()
    };
    let len = 64 << 10;
    for round in 1..=200u8 {
        let m = v.map("again", len, flags).unwrap();
        // SAFETY: inside the mapping, which only this thread uses.
        assert_eq!(unsafe { m.ptr.read() }, round - 1);
        // SAFETY: as above.
        unsafe { m.ptr.write(round) };
        msync_async(m.ptr, len).unwrap();
        unmap(m.ptr, len).unwrap();
    }
    v.detach().unwrap();
}

/// Two mappings of a file and two of a part of it, stored to in turn: every load sees
/// what was stored last, a sync point through any of them commits all, and the last that
/// goes takes along what was not committed.
#[test]
fn all_mappings_of_a_shared_working_copy_show_the_same() {
    for tracker in ["uffd", "mprotect", "two-level"] {
        let dir = Dir::new(&format!("aliases-{tracker}"));
        let config = config(&dir.0, tracker, "");
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let flags = MapFlags {
            create: true,
            atomic: true,
            shared: true,
            ..MapFlags::default()
        };
        let (len, half) = (64 << 10, 32 << 10);
        let late = MapFlags {
            offset: half as u64,
            ..flags
        };
        let all: Vec<_> = [(flags, len), (late, half), (flags, len), (late, half)]
            .into_iter()
            .map(|(flags, len)| (v.map("f", len, flags).unwrap(), flags.offset as usize))
            .collect();
        let private = v.map("f", len, MapFlags::default()).unwrap_err();
        assert!(matches!(private, mojim_engine::Error::Busy(_)), "{private}");
        v.remove("f").unwrap_err();
        let mut byte = 0;
        for (by, _) in &all {
            for (to, begin) in &all {
                byte += 1;
                let at = half + 4096 * (byte as usize % 8);
                // SAFETY: inside the mappings, which only this thread uses.
                unsafe {
                    to.ptr.add(at - begin).write(byte);
                    for (from, begin) in &all {
                        assert_eq!(from.ptr.add(at - begin).read(), byte);
                    }
                }
                assert!(msync(by.ptr, by.len).unwrap() > 0, "{tracker} {byte}");
                assert_eq!(file(&v)[at], byte);
                assert_eq!(msync(by.ptr, by.len).unwrap(), 0);
            }
        }
        // What was stored through one that goes is the others' to commit.
        let (last, others) = all.split_last().unwrap();
        // SAFETY: as above.
        unsafe { last.0.ptr.write(200) };
        unmap(last.0.ptr, last.0.len).unwrap();
        assert_ne!(file(&v)[half], 200);
        assert!(msync(all[0].0.ptr, len).unwrap() > 0);
        assert_eq!(file(&v)[half], 200);
        // The file grows and shrinks under them.
        v.truncate("f", half as u64 + 10).unwrap();
        v.truncate("f", 2 * len as u64).unwrap();
        let more = v.map("f", 2 * len, flags).unwrap();
        // SAFETY: as above.
        unsafe {
            assert_eq!(others[1].0.ptr.read(), 200);
            assert_eq!(others[1].0.ptr.add(10).read(), 0);
            more.ptr.add(2 * len - 1).write(7);
            all[0].0.ptr.write(9);
        }
        assert!(v.fsync("f").unwrap() > 0);
        assert_eq!((file(&v)[0], file(&v)[2 * len - 1]), (9, 7));
        // SAFETY: as above.
        unsafe { more.ptr.write(5) };
        for (m, _) in others.iter().chain([&(more, 0)]) {
            unmap(m.ptr, m.len).unwrap();
        }
        let again = v.map("f", len, MapFlags::default()).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { again.ptr.read() }, 9);
        v.detach().unwrap();
    }
}

/// Threads store through mappings of their own to bytes of their own, while one more commits
/// through its own: what each stored before it said so is in the file.
#[test]
fn threads_with_mappings_of_their_own_miss_no_store() {
    let dir = Dir::new("mappings");
    let config = config(&dir.0, "auto", "working = \"shared\"");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let len = 1 << 20;
    let m = map(&v, len);
    const THREADS: usize = 4;
    let (start, end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    let committed = AtomicU64::new(0);
    std::thread::scope(|s| {
        for t in 0..THREADS {
            let (v, start, end) = (&v, &start, &end);
            s.spawn(move || {
                let mut next = random(t as u64 + 7);
                for round in 1..=60u64 {
                    // A mapping that comes and goes with what it stored.
                    let mine = map(v, len);
                    start.wait();
                    for _ in 0..40 {
                        let word = next(len / 8 / THREADS) * THREADS + t;
                        // SAFETY: inside the mapping; this thread's word.
                        unsafe { mine.ptr.cast::<u64>().add(word).write(round) };
                    }
                    if next(2) == 0 {
                        unmap(mine.ptr, len).unwrap();
                        end.wait();
                    } else {
                        end.wait();
                        unmap(mine.ptr, len).unwrap();
                    }
                }
            });
        }
        for _ in 1..=60 {
            start.wait();
            // Beside the stores, and after them.
            msync(m.ptr, len).unwrap();
            end.wait();
            committed.fetch_max(msync(m.ptr, len).unwrap(), Relaxed);
            // SAFETY: all of the mapping; the threads wait for the next round.
            let memory = unsafe { std::slice::from_raw_parts(m.ptr.cast_const(), len) };
            let file = file(&v);
            let wrong = (0..len).find(|i| file[*i] != memory[*i]);
            assert_eq!(wrong, None);
        }
    });
    assert!(committed.into_inner() > 0);
    v.detach().unwrap();
}

/// What was stored behind the end of a file, in its last page, appeared when the file
/// grew, and was committed. A file too large for the addresses that a small one gets
/// could not be mapped at all.
#[test]
fn a_shared_working_copy_grows_by_zeros_and_starts_at_any_size() {
    let dir = Dir::new("grows");
    let config = config(&dir.0, "auto", "working = \"shared\"");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let m = map(&v, 5000);
    // SAFETY: inside the last page of the mapping, which only this thread uses.
    unsafe { m.ptr.add(6000).write(9) };
    let more = map(&v, 40_000);
    // SAFETY: inside the mapping.
    assert_eq!(unsafe { more.ptr.add(6000).read() }, 0);
    msync(more.ptr, more.len).unwrap();
    assert!(file(&v).iter().all(|b| *b == 0));
    // The page where a short window ends is the file's, as in any shared mapping.
    // SAFETY: as above.
    unsafe { m.ptr.add(7000).write(5) };
    msync(m.ptr, 8192).unwrap();
    assert_eq!(file(&v)[7000], 5);
    v.create("large").unwrap();
    v.truncate("large", 100 << 30).unwrap();
    let flags = MapFlags {
        read_only: true,
        ..MapFlags::default()
    };
    let large = v.map("large", 100 << 30, flags).unwrap();
    // SAFETY: inside the mapping.
    assert_eq!(unsafe { large.ptr.add((100 << 30) - 1).read() }, 0);
    v.detach().unwrap();
}

/// A thread that had made a sync point and made no more kept the region's memory, and its
/// volume with all its files open, after it was unmapped and detached by another. So did, for
/// moments, the background of any other volume, which took hold of all windows of the process
/// to find its own: the tests beside this one have such volumes.
#[test]
fn what_one_thread_unmaps_no_other_keeps() {
    for working in ["private", "shared"] {
        let dir = Dir::new(&format!("kept-{working}"));
        let config = config(&dir.0, "auto", &format!("working = \"{working}\""));
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let m = map(&v, 64 << 10);
        let (synced, gone) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|s| {
            let (m, synced, gone) = (&m, &synced, &gone);
            s.spawn(move || {
                msync(m.ptr, 100).unwrap();
                synced.wait();
                gone.wait();
            });
            synced.wait();
            v.detach().unwrap();
            drop(v);
            let open = std::fs::read_dir("/proc/self/fd").unwrap();
            let of_volume: Vec<_> = open
                .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
                .filter(|path| path.starts_with(&dir.0))
                .collect();
            gone.wait();
            assert!(of_volume.is_empty(), "{working}: {of_volume:?}");
        });
    }
}

/// One thread commits its word by exact sync points, while another commits all of the region. The
/// latter took its bytes before it took its number: a word that it had looked at, and that was
/// stored to and committed meanwhile with a lower number, went back to what it had been, in the
/// log and after a crash, though its sync point had returned.
#[test]
fn what_an_exact_sync_point_commits_no_larger_one_undoes() {
    let dir = Dir::new("order");
    let config = config_with(&dir.0, "auto", "", "4MiB");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let pages = 2048;
    let m = &map(&v, pages * 4096);
    msync(m.ptr, m.len).unwrap();
    let mut value = 0u64;
    for round in 0..150u64 {
        for page in 1..pages {
            // SAFETY: inside the mapping; the other thread is not there yet.
            unsafe { m.ptr.add(page * 4096).cast::<u64>().write(round + 1) };
        }
        let start = Barrier::new(2);
        std::thread::scope(|s| {
            let (all, start) = (m, &start);
            s.spawn(move || {
                start.wait();
                msync(all.ptr, all.len).unwrap();
            });
            start.wait();
            // Few: more of them would mend what an earlier one lost.
            for _ in 0..1 + round % 4 {
                value += 1;
                // SAFETY: inside the mapping; nobody else stores there.
                unsafe { m.ptr.cast::<u64>().write_volatile(value) };
                // Together with another place, in half of the rounds.
                let word = (m.ptr.cast_const(), 8);
                match round % 2 {
                    0 => msync(word.0, word.1).unwrap(),
                    _ => gmsync(&[word, (m.ptr.wrapping_add(64), 8)]).unwrap(),
                };
            }
        });
        let bytes = file(&v);
        let is = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(is, value, "round {round}");
    }
    v.detach().unwrap();
}

/// The same of a sync point of exact ranges that is larger than its log: it goes through a spill
/// file, and gets its number when that is written.
#[test]
fn what_an_exact_sync_point_commits_no_spilled_one_undoes() {
    let dir = Dir::new("spilled");
    let config = config(&dir.0, "auto", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let m = &map(&v, 1 << 20);
    let part = 16 << 10;
    for round in 1..=40u64 {
        let start = &Barrier::new(2);
        std::thread::scope(|s| {
            s.spawn(move || {
                let all = m.ptr.cast_const();
                let ranges = (0..64).map(|i| (all.wrapping_add(i * part), part));
                let ranges: Vec<_> = ranges.collect();
                start.wait();
                gmsync(&ranges).unwrap();
            });
            start.wait();
            for value in [2 * round, 2 * round + 1] {
                // SAFETY: inside the mapping; nobody else stores there.
                unsafe { m.ptr.cast::<u64>().write_volatile(value) };
                msync(m.ptr, 8).unwrap();
            }
        });
        let is = u64::from_ne_bytes(file(&v)[..8].try_into().unwrap());
        assert_eq!(is, 2 * round + 1, "round {round}");
    }
    v.detach().unwrap();
}

/// A file that somebody has put into the directory is taken in by pieces: of a sparse one
/// only what is there. One of 8 TiB ended the program, which asked for that much memory.
#[test]
fn a_sparse_file_is_taken_in_by_what_it_has() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let dir = Dir::new("sparse");
    let config = config(&dir.0, "auto", "");
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    // Few bytes go in a record, more of them by a spill file.
    for (name, bytes) in [("few", 100usize), ("many", 3 << 20), ("none", 0)] {
        let path = v.directory().join(name);
        let f = std::fs::File::create_new(&path).unwrap();
        let sizes = [8u64 << 40, 1 << 40, 1 << 30];
        let size = sizes.into_iter().find(|s| f.set_len(*s).is_ok()).unwrap();
        let mut next = random(bytes as u64);
        let data: Vec<u8> = (0..bytes).map(|_| next(256) as u8).collect();
        let places = [0, size / 3 + 17, size - bytes as u64];
        places
            .iter()
            .for_each(|at| f.write_all_at(&data, *at).unwrap());
        drop(f);
        assert_eq!(v.size(name).unwrap(), None);
        v.truncate(name, size).unwrap();
        assert_eq!(v.size(name).unwrap(), Some(size));
        v.settle().unwrap();
        let f = std::fs::File::open(&path).unwrap();
        let meta = f.metadata().unwrap();
        assert_eq!(meta.len(), size);
        assert!(meta.blocks() * 512 < 16 << 20, "{} blocks", meta.blocks());
        for at in places {
            let mut got = vec![0; bytes];
            f.read_exact_at(&mut got, at).unwrap();
            assert!(got == data, "{name} at {at}");
        }
        let mut beside = [1; 8];
        f.read_exact_at(&mut beside, size / 3 + 9).unwrap();
        assert_eq!(beside, [0; 8]);
    }
    v.detach().unwrap();
    let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    assert!(v.size("many").unwrap().is_some());
    v.detach().unwrap();
}
