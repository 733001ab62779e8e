//! A sync point of much memory sends what was changed, and only that; whatever
//! is applied, synced by exact ranges, made shorter or synced by other threads
//! in between, the file has what was committed and nothing else.

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::*};

use mojim::config::Config;
use mojim::{MapFlags, Mapping, Volume, gmsync, msync};
use mojim_format::RecordView;

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let d = std::env::temp_dir().join(format!("mojim-changes-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&d);
        std::fs::create_dir_all(&d).unwrap();
        Dir(d)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(dir: &Path, tracker: &str, more: &str) -> Config {
    config_with(dir, tracker, more, "1MiB")
}

fn config_with(dir: &Path, tracker: &str, more: &str, log: &str) -> Config {
    let text = format!(
        r#"
cluster = "test"
[volume.v]
mode = "unreplicated"
primary = "a"
tracker = "{tracker}"
{more}
[node.a]
address = "127.0.0.1:1"
directory = "{0}/a"
ring = "{0}"
log = {{ medium = "disk", size = "{log}" }}
"#,
        dir.display()
    );
    Config::parse(&text, dir).unwrap()
}

fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |n| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 11) as usize % n
    }
}

fn map(v: &Volume, len: usize) -> Mapping {
    let flags = MapFlags {
        create: true,
        atomic: true,
        ..MapFlags::default()
    };
    v.map("f", len, flags).unwrap()
}

/// The file's bytes, once everything that is committed is in it.
fn file(v: &Volume) -> Vec<u8> {
    v.settle().unwrap();
    std::fs::read(v.directory().join("f")).unwrap()
}

/// Bytes of the records in the log: nothing is released from it here.
fn logged(config: &Config) -> usize {
    let volume = config.volume(None).unwrap();
    let spec = mojim::layout::store(config, config.node("a").unwrap(), volume);
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
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut refused = 0;
    for round in 0..300u64 {
        for _ in 0..round % 4 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
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

/// Stores, sync points of all kinds, and changes of the file's size, against
/// the bytes that must be in the file.
#[test]
fn the_file_has_what_was_committed_and_nothing_else() {
    let rounds = 40;
    for seed in 0..rounds {
        let dir = Dir::new(&format!("model-{seed}"));
        let tracker = ["uffd", "mprotect"][seed as usize % 2];
        let threshold = [1, 3, 20, 1_000_000][seed as usize / 2 % 4];
        let config = config(
            &dir.0,
            tracker,
            &format!("checkpoint_threshold = {threshold}"),
        );
        let v = Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
        let mut next = random(seed + 1);
        // Little memory, few places and few values: so that bytes often are what
        // they were one or two sync points ago.
        let mut len = 6 * 4096 + next(4096);
        let full = len;
        let m = map(&v, len);
        let mut memory = vec![0u8; len];
        let mut committed = vec![0u8; len];
        // SAFETY: every place is inside the mapping, which only this thread uses.
        let ptr = |at: usize| unsafe { m.ptr.add(at) };
        for step in 0..400 {
            let what = next(100);
            let at = if next(4) > 0 {
                next(30) * 900
            } else {
                next(len)
            };
            let at = at.min(len - 1);
            let n = (1 + next(3 * 4096)).min(len - at);
            if what < 55 {
                let n = n.min(1 + next(24));
                let byte = next(2) as u8;
                memory[at..at + n].fill(byte);
                // SAFETY: inside the mapping.
                unsafe { ptr(at).write_bytes(byte, n) };
            } else if what < 65 {
                // Back to what is committed, as a program does that undoes.
                let n = n.min(1 + next(64));
                let old = &committed[at..at + n];
                memory[at..at + n].copy_from_slice(old);
                // SAFETY: inside the mapping.
                unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), ptr(at), n) };
            } else if what < 75 {
                msync(ptr(at), n).unwrap();
                committed[at..at + n].copy_from_slice(&memory[at..at + n]);
            } else if what < 85 {
                msync(m.ptr, len).unwrap();
                committed.copy_from_slice(&memory);
            } else if what < 92 {
                // A large part and a small one, which may overlap.
                let from = next(len - EXACT);
                let large = EXACT + next(len - from - EXACT + 1);
                let (x, y) = (ptr(from), ptr(at));
                gmsync(&[(x.cast_const(), large), (y.cast_const(), n)]).unwrap();
                for r in [from..from + large, at..at + n] {
                    committed[r.clone()].copy_from_slice(&memory[r]);
                }
            } else if what < 94 {
                let size = full - next(full / 4);
                v.truncate("f", size as u64).unwrap();
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
                    // SAFETY: all of the mapping.
                    let bytes = unsafe { std::slice::from_raw_parts(m.ptr, full) };
                    memory[end..].copy_from_slice(&bytes[end..]);
                    assert!(bytes[..end] == memory[..end], "seed {seed}, step {step}");
                }
            } else {
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

/// More than this is compared (`mojim::region::EXACT_MAX`).
const EXACT: usize = mojim::region::EXACT_MAX + 1;

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
