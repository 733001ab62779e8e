//! Regions whose stores are not tracked (`MapFlags::untracked`): what is committed, rolled back and
//! refused is what a model says, and they hold no more memory than other regions.

use mojim_config::Config;

use mojim_engine::{
    Error, MapFlags, Volume, gmsync, msync, msync_async, populate, rollback, unmap,
};

mod support;
use support::{Dir, alone, random};

const UNTRACKED: MapFlags = MapFlags {
    create: true,
    atomic: true,
    untracked: true,
    read_only: false,
    shared: false,
    offset: 0,
    fixed_at: 0,
};
const LEN: usize = 1 << 20;
/// Enough to be compared rather than taken as it is.
const LARGE: usize = mojim_memory::region::EXACT_MAX + 1;

fn attach(config: &Config) -> Volume {
    Volume::attach_with(config, "a", None, |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// Steps of all kinds, by chance. `misses`: the model has not the commits of every tenth step.
fn as_a_model(seed: u64, flags: MapFlags, misses: bool) {
    let dir = Dir::new(&format!("untracked-{seed}-{}", misses));
    let policy = ["auto", "eager", "async"][seed as usize % 3];
    let more = format!("write_back = \"{policy}\"");
    let config = alone(&dir.0, &more, "8MiB");
    let v = attach(&config);
    let mut next = random(seed + 1);
    let m = v.map("f", LEN, flags).unwrap();
    let mut memory = vec![0u8; LEN];
    let mut committed = vec![0u8; LEN];
    let mut size = LEN;
    // SAFETY: every place is inside the mapping, and below the file's size; only this
    // thread uses it.
    let ptr = |at: usize| unsafe { m.ptr.add(at) };
    for step in 0..300 {
        let at = next(size - LARGE - 1);
        let n = 1 + next(3 * 4096);
        let large = at..(at + LARGE + next(LEN / 2)).min(size);
        let part = [0..size, at..at + n, large][next(3)].clone();
        match next(100) {
            0..40 => {
                for _ in 0..next(30) {
                    let at = next(size / 4096) * 4096 + next(3) * 8;
                    memory[at] = next(3) as u8;
                    // SAFETY: as above.
                    unsafe { ptr(at).write(memory[at]) };
                }
                continue;
            }
            40..45 => populate(ptr(part.start), part.len()).unwrap(),
            45..75 => {
                match next(3) {
                    0 => msync(ptr(part.start), part.len()),
                    1 => msync_async(ptr(part.start), part.len()),
                    _ => gmsync(&[
                        (ptr(part.start).cast_const(), part.len()),
                        (ptr(at).cast_const(), n),
                    ]),
                }
                .unwrap();
                msync(ptr(at), n).unwrap();
                for r in [part, at..at + n] {
                    if !misses || step % 10 != 0 {
                        committed[r.clone()].copy_from_slice(&memory[r]);
                    }
                }
            }
            75..85 => {
                assert!(rollback(ptr(part.start), part.len()).unwrap());
                memory[part.clone()].copy_from_slice(&committed[part]);
            }
            85..90 => {
                size = LEN / 2 + next(LEN / 2);
                let before = v.size("f").unwrap().unwrap() as usize;
                v.truncate("f", size as u64).unwrap();
                for bytes in [&mut memory, &mut committed] {
                    bytes[size.min(before)..].fill(0);
                }
            }
            _ => {
                v.wait(mojim_engine::last_lsn()).unwrap();
                v.settle().unwrap();
                let file = std::fs::read(v.directory().join("f")).unwrap();
                assert_eq!(file.len(), size);
                let wrong = (0..size).find(|i| file[*i] != committed[*i]);
                assert_eq!(wrong, None, "seed {seed}, step {step}: the file");
            }
        }
        // SAFETY: the part of the mapping that the file has.
        let bytes = unsafe { std::slice::from_raw_parts(m.ptr.cast_const(), size) };
        let wrong = (0..size).find(|i| bytes[*i] != memory[*i]);
        assert_eq!(wrong, None, "seed {seed}, step {step}: memory");
    }
    v.detach().unwrap();
    // What was not committed is gone.
    let v = attach(&config);
    let file = std::fs::read(v.directory().join("f")).unwrap();
    let wrong = (0..size).find(|i| file[*i] != committed[*i]);
    assert_eq!(wrong, None, "seed {seed}: the file, at the end");
    v.detach().unwrap();
}

#[test]
fn commits_and_rollbacks_are_what_a_model_says() {
    for seed in 0..6 {
        as_a_model(seed, UNTRACKED, false);
    }
}

/// The check is itself checked: a model that misses commits differs.
#[test]
#[should_panic(expected = "seed 1")]
fn a_model_that_misses_commits_differs() {
    as_a_model(1, UNTRACKED, true);
}

/// Where pages are tracked after all, and where nothing is populated, all is the same.
#[test]
fn bounded_memory_and_tracked_regions_are_as_ever() {
    let tracked = MapFlags {
        untracked: false,
        ..UNTRACKED
    };
    as_a_model(100, tracked, false);
    if !mojim_memory::track::uffd_available() {
        return;
    }
    let dir = Dir::new("untracked-bounded");
    let v = attach(&alone(&dir.0, "memory = \"1MiB\"", "8MiB"));
    let len = 16 << 20;
    let m = v.map("f", len, UNTRACKED).unwrap();
    populate(m.ptr, len).unwrap();
    for page in 0..len / 4096 {
        let at = m.ptr.wrapping_add(page * 4096);
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { at.write(page as u8) };
        msync_async(at, 1).unwrap();
    }
    // Of 16 MiB a few are held: the others have been given back.
    let held = || {
        let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:x}-", m.ptr as usize);
        let of = all.split_once(&begin).unwrap().1;
        let line = of.lines().find(|l| l.starts_with("Anonymous:")).unwrap();
        line.split_ascii_whitespace()
            .nth(1)
            .unwrap()
            .parse::<usize>()
            .unwrap()
            << 10
    };
    while held() > len / 2 {
        msync(m.ptr, 1).unwrap();
    }
    v.detach().unwrap();
}

#[test]
fn a_region_that_must_be_tracked_is_refused() {
    let refused = |more: &str, flags: MapFlags, says: &str| {
        let dir = Dir::new("untracked-refused");
        let v = attach(&alone(&dir.0, more, "1MiB"));
        match v.map("f", LEN, flags) {
            Err(Error::Invalid(text)) => assert!(text.contains(says), "{text}"),
            other => panic!("{more}: {other:?}"),
        }
        assert_eq!(v.size("f").unwrap(), None, "it made the file");
        v.detach().unwrap();
    };
    let not_atomic = MapFlags {
        atomic: false,
        ..UNTRACKED
    };
    let shared = MapFlags {
        shared: true,
        ..UNTRACKED
    };
    refused("", not_atomic, "MAP_ATOMIC");
    refused("", shared, "shared");
    refused("working = \"shared\"", UNTRACKED, "shared");
    refused("msync_rounding = \"page\"", UNTRACKED, "whole pages");
}

/// A file of which one byte in each page was stored to is mapped anew: what is not stored to is
/// not compared, and what `fsync` finds is what was stored.
#[test]
fn what_was_not_stored_to_is_not_looked_at() {
    let dir = Dir::new("untracked-sparse");
    let v = attach(&alone(&dir.0, "", "8MiB"));
    // If all of it were read, the test would not end.
    let len = 1 << 38;
    let m = v.map("f", len, UNTRACKED).unwrap();
    for at in [7, 1 << 30, len - 1] {
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { m.ptr.add(at).write(9) };
    }
    assert!(v.fsync("f").unwrap() > 0);
    // What is not applied yet may be committed again.
    v.settle().unwrap();
    assert_eq!(v.fsync("f").unwrap(), 0);
    // SAFETY: as above.
    unsafe { m.ptr.add(7).write(8) };
    assert!(rollback(m.ptr, len).unwrap());
    // SAFETY: as above.
    assert_eq!(unsafe { m.ptr.add(7).read() }, 9);
    unmap(m.ptr, len).unwrap();
    assert!(matches!(populate(m.ptr, 1), Err(Error::NotFound(_))));
    v.detach().unwrap();
}
