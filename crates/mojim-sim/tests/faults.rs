//! Single faults of a disk under the shipped engine, unreplicated, each at a
//! place of the test's choice: what random seeds reach seldom or never.

// Faults of storage and of the program, and the tests that cover them. `H` is the shadow durable
// image, `S` the simulator's seeds, `B` block history, `L` page-cache loss, `Q` the pulled plug
// (`mojim-crash blocks`, `cache-loss`, `plug`), `K` the kill loop, `X` this file, `A`
// `mojim-engine/tests/damage.rs`, `C` `mojim-engine/tests/changes.rs`, `E` `e2e.rs`, `D`
// `disks.rs`, `U` the unit tests of `mojim-linux`, `T` those of `track/`, `P`
// `tests/e2e/preload.rs` with the function of `probe.c`.
//
// - power cut at every log write: S (any disk operation, with torn writes), B, Q, on persistent
//   memory H.
// - power cut at every flush and fence: H, every subset or a sample, mutations `skip_flush`,
//   `skip_line`, `skip_fence`, U `every_line_of_a_range_is_written_back_before_the_fence`.
// - power cut during recovery, again and again: H (lives begin with a recovery that is checked,
//   another at one state of each fence), S (crashes while a node opens), B (one recovery in eight).
// - torn writes of 8 bytes: H, S (`pmem words dropped`).
// - torn writes of 64 bytes: H (lines are subsets of their words), S (`torn flushes`).
// - torn writes of 512 bytes: S (`torn sectors`), H (files), B.
// - torn writes of 4 KiB: B, S, as any set of sectors.
// - reordered and lost writes: S, H, B, Q, L: whatever was not flushed, in any order or never. A
//   sync that does nothing: H `skip_sync`. A log write that never comes to its place though the
//   disk said so: X `a_misdirected_write_of_the_log_is_noticed`.
// - misdirected writes: of the log: S, in one seed of eight, X, the same, unless the write was the
//   last of the log: then nothing tells that it was there. Of data files: no sums there, another
//   copy tells, `mojim verify` (E `a_difference_is_found_to_the_byte`).
// - a cut in the middle of wrapping or truncating the log: H (logs of 8 KiB, which wrap after some
//   dozens of sync points, control words, superblock, names), S (64 KiB).
// - a stale tail that looks valid: H and S: what was appended in one life and not acknowledged
//   lies, behind gaps too, where the next writes.
// - a bit flipped in the log: S, in one seed of eight, replicated too, mutation `forget_missing`, A
//   `bit_flipped_in_the_middle_of_the_log`, every bit of a record: `mojim-format`, fuzzed recovery
//   (`fuzz/`).
// - a bit flipped on the wire: S, in one seed of eight, mutation `trust_wire`, every bit of every
//   frame and record: `mojim-format`.
// - a bit flipped in data: with another copy, `mojim verify` and `repair`: E
//   `a_difference_is_found_to_the_byte`, with one copy alone nothing notices.
// - a bit flipped in superblock or catalogue: A `superblock`, `catalogue`, every bit:
//   `mojim-format`.
// - EIO once from write or fsync, then success: X `an_error_that_comes_once_is_not_taken_for_clean`
//   (log, data files, checkpoint, kill and power cut after), S, mutation `ignore_failed_sync`, D on
//   a mirror, `mojim-views` `failing.rs` for the register.
// - EIO from msync: the engine calls none on x86-64, a program's msync returns the result of its
//   sync point: A `a_full_disk`, and the next fails too, after one that could not begin, the next
//   call commits all: C `what_could_not_be_begun_is_committed_by_the_next_call`.
// - no space when a log grows: logs have their size from the start. None then: X
//   `no_space_for_a_log` (after each page), U `what_there_is_no_space_for_is_refused_at_once`.
// - no space when a file grows: A `a_full_disk`, X `no_space_for_a_file_that_grows`, S has none.
// - SIGBUS on a hole: rings and logs have their blocks before they are mapped: U
//   `what_there_is_no_space_for_…`, memory that a peer cuts off: U
//   `memory_cut_off_by_the_peer_reads_as_zeros`, others' faults stay:
//   `other_faults_still_end_the_process`, readers: `readers.rs`. A full disk under a sparse data
//   file: A `a_full_disk`.
// - a file truncated while mapped: by the program: P `shrinking`, C
//   `the_file_has_what_was_committed_…`, by another process: A
//   `data_file_cut_or_replaced_under_its_mapping`.
// - a file replaced while mapped: by the program (rename): P `names`, by another process: A, the
//   same. A file of the same length is believed, as any bytes that are changed from outside.
// - the application killed in the middle of a sync point: K (several threads, 240 kills), S,
//   `fig1.rs` `what_was_synced_survives_a_kill_…`, with a sparse region of 512 GiB: C
//   `a_vast_sparse_region_takes_no_page_tables_for_what_is_not_touched`.
// - one of several processes killed that share a volume: `sharing.rs`
//   `processes_that_commit_at_once_and_are_killed_lose_nothing_acknowledged`, its stores found by
//   the others: `what_the_dead_have_stored_counts_as_written`.
// - the application killed while other threads hold locks: K (each worker's threads are in sync
//   points at the kill), the lock file: U `a_lock_excludes_between_processes_and_ends_with_them`,
//   `a_lock_stays_when_its_file_is_opened_and_closed_in_the_process`,
//   `a_lock_excludes_the_kind_that_earlier_builds_took`.
// - fork: P `forking`, `fork_first`, of a process that shares memory: `forking_shares`,
//   `a_forked_child_stores_into_the_same_memory`, in the middle of other threads' sync points
//   `forking_amid`, C interface `misuse.c`, U `a_forked_child_does_not_keep_the_lock`,
//   `a_child_of_a_killed_process_does_not_keep_the_lock`,
//   `a_lock_that_was_dropped_is_free_at_once`, of one that has detached:
//   `a_child_of_a_process_that_has_detached_attaches`.
// - mremap, partial munmap, overlapping maps: P `refusals`, `partial_pages`, `misuse.c`: refused,
//   and no harm done, C `a_safe_call_maps_over_no_memory_of_the_process`.
// - threads storing during a sync point: C `who_finds_nothing_waits_for_whoever_found_it` (in the
//   same pages), T `no_store_is_lost_under_concurrent_collects`, P `threads`.

mod single;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mojim_config::MediumKind;
use mojim_env::Env;
use mojim_env::Error;
use mojim_replica::pace::Pace;
use mojim_replica::piece::Piece;
use mojim_replica::primary::{Begun, Primary};
use mojim_sim::{CrashKind, Faults, World};

const LOG: u64 = 64 << 10;
const FILE: u64 = 32 << 10;

fn log_path() -> PathBuf {
    PathBuf::from("/a/logs/log")
}

/// Starts node `a`'s program.
fn start(world: &World) -> mojim_env::Result<Primary> {
    start_on(world, MediumKind::Disk)
}

fn start_on(world: &World, medium: MediumKind) -> mojim_env::Result<Primary> {
    single::start(world, medium, LOG)
}

fn started(world: &World) -> Primary {
    make_file(start(world).unwrap())
}

fn make_file(p: Primary) -> Primary {
    if p.store.tail() == 0 {
        let made = [
            Piece::Create { file: 1, name: "f" },
            Piece::Resize {
                file: 1,
                size: FILE,
            },
        ];
        p.commit(&made).unwrap();
    }
    p
}

/// One sync point: number `n` in the first word and in one of its own.
fn commit(p: &Primary, n: u64) -> mojim_env::Result<u64> {
    let begun = begin(p, n)?;
    p.finish_commit(&begun)?;
    Ok(begun.lsn)
}

/// As `commit`, begun and not waited for.
fn begin(p: &Primary, n: u64) -> mojim_env::Result<Begun> {
    let word = n.to_le_bytes();
    let at = |offset| Piece::Write {
        file: 1,
        offset,
        ptr: word.as_ptr(),
        len: 8,
    };
    p.begin_commit(&[at(0), at(n * 8)])
}

fn commit_well(p: &Primary, n: u64) {
    commit(p, n).unwrap();
}

/// The last sync point, all before it whole.
fn last(p: &Primary) -> u64 {
    let mut bytes = vec![0; FILE as usize];
    p.store.area().read(1, 0, &mut bytes).unwrap();
    let words: Vec<_> = bytes
        .chunks(8)
        .map(|w| u64::from_le_bytes(w.try_into().unwrap()))
        .collect();
    for n in 1..words.len() as u64 {
        let want = if n <= words[0] { n } else { 0 };
        assert_eq!(words[n as usize], want, "sync point {n} of {}", words[0]);
    }
    words[0]
}

/// Ends the program without a word, and the machine with `power`.
fn end(world: &World, p: Primary, power: bool) {
    match power {
        true => world.power_loss("a"),
        false => world.kill("a"),
    }
    drop(p);
}

/// A log's write goes to another place of it and says that all is well: onto a
/// record that counts, into free space, or nowhere within reach. Whatever of the
/// acknowledged sync points cannot be read then is missed, by name.
#[test]
fn a_misdirected_write_of_the_log_is_noticed() {
    let mut noticed = 0;
    for seed in 0..60u64 {
        let world = World::new(seed, Faults::none());
        let p = started(&world);
        let before = 3 + seed % 5;
        (1..=before).for_each(|n| commit_well(&p, n));
        // Its own place now and then: nothing is wrong.
        let own = seed % 6 == 0;
        let slot = if own {
            before + 1
        } else {
            seed % 4 + seed % 13
        };
        let to = slot * 512;
        assert!(world.misdirect_next_write("a", &log_path(), to));
        (before + 1..=before + 6).for_each(|n| commit_well(&p, n));
        end(&world, p, true);
        match start(&world) {
            Ok(p) => {
                assert!(own || slot == before + 1, "seed {seed}: unnoticed");
                assert_eq!(last(&p), before + 6, "seed {seed}");
            }
            Err(Error::Damaged { path, .. }) => {
                assert_eq!(path, log_path());
                noticed += 1;
            }
            Err(e) => panic!("seed {seed}: {e}"),
        }
    }
    assert!((40..=50).contains(&noticed), "{noticed}");
}

/// The disk fails once and would succeed the next time: in the middle of a sync
/// point, of applying, of a checkpoint. What failed counts as failed, and so does
/// what comes after, until the copy was opened and read again.
#[test]
fn an_error_that_comes_once_is_not_taken_for_clean() {
    let broken = |f: &dyn Fn(&mut Faults)| {
        let mut faults = Faults::none();
        f(&mut faults);
        faults
    };
    let writes = broken(&|f| f.write_error = 1000);
    let syncs = broken(&|f| f.sync_error = 1000);
    for (name, faults, checkpoints) in [
        ("write of the log", &writes, false),
        ("write of a data file", &writes, true),
        ("sync of a data file", &syncs, true),
    ] {
        for power in [false, true] {
            let world = World::new(7, Faults::none());
            let p = started(&world);
            (1..=5).for_each(|n| commit_well(&p, n));
            world.set_faults(faults.clone());
            let failed = match checkpoints {
                true => p.checkpoint_step(Pace::Idle).map(drop),
                false => commit(&p, 6).map(drop),
            };
            assert!(
                matches!(failed, Err(Error::Poisoned(_))),
                "{name}: {failed:?}"
            );
            world.set_faults(Faults::none());
            for n in [6, 7] {
                let e = commit(&p, n).unwrap_err();
                assert!(matches!(e, Error::Poisoned(_)), "{name}: {e}");
            }
            assert!(p.checkpoint_step(Pace::Idle).is_err(), "{name}");
            assert!(p.store.checkpoint().is_err(), "{name}");
            end(&world, p, power);
            let p = started(&world);
            let found = last(&p);
            // The one that failed is there whole or not at all.
            assert!((5..=6).contains(&found), "{name}: {found}");
            commit(&p, found + 1).unwrap();
            p.checkpoint_step(Pace::Idle).unwrap();
            end(&world, p, true);
            assert_eq!(last(&started(&world)), found + 1, "{name}");
        }
    }
}

/// No room when the log is made: the text says so, nothing half made is taken
/// for a log later, and with room all is well.
#[test]
fn no_space_for_a_log() {
    let mut refused = 0;
    for pages in 0..24 {
        let world = World::new(pages, Faults::none());
        world.set_quota("a", Some(pages * 4096));
        match start(&world) {
            Ok(p) => drop(p),
            Err(e) => {
                refused += 1;
                let text = e.to_string().to_lowercase();
                assert!(text.contains("space"), "{pages} pages: {text}");
            }
        }
        world.kill("a");
        world.set_quota("a", None);
        let p = started(&world);
        assert_eq!(
            world.contents("a", &log_path()).map(|b| b.len() as u64),
            Some(LOG)
        );
        (1..=5).for_each(|n| commit_well(&p, n));
        end(&world, p, true);
        assert_eq!(last(&started(&world)), 5);
    }
    assert!(refused > 10, "{refused}");
}

/// No room when data files grow: what was acknowledged stays in the log, and is
/// applied once there is room.
#[test]
fn no_space_for_a_file_that_grows() {
    let world = World::new(1, Faults::none());
    let p = started(&world);
    let name = Path::new("/a/data/f");
    assert!(
        world
            .contents("a", name)
            .is_none_or(|b| b.len() as u64 <= FILE)
    );
    // The log has its room; nothing else does.
    world.set_quota("a", Some(0));
    let mut acked = 0;
    let failed = (1..FILE / 8).find_map(|n| {
        let done = commit(&p, n).and_then(|_| p.checkpoint_step(Pace::Idle));
        match done {
            Ok(_) => {
                acked = n;
                None
            }
            Err(e) => Some(e),
        }
    });
    let e = failed.expect("it does not fit");
    assert!(e.to_string().to_lowercase().contains("space"), "{e}");
    // It goes on in its log.
    commit_well(&p, acked + 2);
    end(&world, p, false);
    world.set_quota("a", None);
    let p = started(&world);
    let found = last(&p);
    assert_eq!(found, acked + 2);
}

/// What a spill file's confirmation rests on: after power is lost it has every byte.
/// Without the sync, pieces are missing, and the length alone tells nothing.
#[test]
fn a_spill_file_is_confirmed_when_it_is_durable() {
    let mut gone = 0;
    for seed in 0..40u64 {
        for unsynced in [false, true] {
            let world = World::new(seed, Faults::none());
            let p = started(&world);
            let store = &p.store;
            store.mutations.spill_unsynced.set(unsynced);
            let bytes = vec![7u8; 3 * 4096 + 100];
            for (i, piece) in bytes.chunks(4096).enumerate() {
                store.write_spill(9, i as u64 * 4096, piece).unwrap();
                assert_eq!(store.durable_spill(9), None, "seed {seed}");
            }
            store.sync_spill(9).unwrap();
            assert_eq!(store.durable_spill(9), Some(bytes.len() as u64));
            end(&world, p, true);
            let there = world.contents("a", Path::new("/a/meta/spill.9"));
            let whole = there.as_ref() == Some(&bytes);
            assert!(whole || unsynced, "seed {seed}");
            gone += u32::from(!whole);
            // No record names it: it goes.
            let p = started(&world);
            assert_eq!(p.store.durable_spill(9), None, "seed {seed}");
            assert_eq!(world.contents("a", Path::new("/a/meta/spill.9")), None);
            end(&world, p, false);
        }
    }
    assert!(gone > 0, "the mutation is not seen");
}

/// Version 1 of the superblock had no nonces, and neither had the log's memory. At the
/// first opening by a release that has them, a process that was killed between the
/// superblock with the first nonce and the ring that gets it took a log in memory for
/// another's, and with it discarded the copy.
#[test]
fn the_log_of_a_release_without_nonces_is_known() {
    let meta = Path::new("/a/meta/superblock");
    let mut steps = 0;
    for after in 1.. {
        let world = World::new(after, Faults::none());
        let p = make_file(start_on(&world, MediumKind::Dram).unwrap());
        (1..=5).for_each(|n| commit_well(&p, n));
        let ring = p.store.logs()[0].memory();
        // SAFETY: the nonce's word of the control page; nobody else uses it now.
        unsafe { ring.ptr().add(40).cast::<u64>().write(0) };
        end(&world, p, false);
        let env: Arc<dyn Env> = world.env("a");
        let how = mojim_env::OpenHow {
            write: true,
            ..Default::default()
        };
        let file = env.open(meta, how).unwrap();
        for slot in [0, 4096] {
            let mut b = vec![0; 4096];
            file.read_at(&mut b, slot).unwrap();
            let mut sb = mojim_format::Superblock::decode(&b).unwrap();
            (sb.version, sb.nonce, sb.nonce_before) = (1, 0, 0);
            file.write_at(&sb.encode()[..], slot).unwrap();
        }
        file.sync().unwrap();
        drop(file);
        world.arm_crash("a", after, mojim_sim::CrashKind::Kill);
        let first = start_on(&world, MediumKind::Dram);
        let crashed = world.crashed("a").is_some();
        drop(first);
        world.kill("a");
        world.disarm("a");
        let p = start_on(&world, MediumKind::Dram).unwrap();
        assert_eq!(last(&p), 5, "killed at its step {after}");
        drop(p);
        if !crashed {
            break;
        }
        steps = after;
    }
    assert!(steps > 3, "{steps}");
}

/// Six sync points go to the log in one write, or in two where the log's end comes between
/// them. It is torn at any of its sectors, by a loss of power or an error, or its process is
/// killed at any of its steps. What was acknowledged is there; what is there is whole, and a
/// prefix; after an error nothing is acknowledged any more.
#[test]
fn a_group_is_torn_at_any_sector_and_fails_at_any_step() {
    const GROUP: u64 = 6;
    // How many of a group were there afterwards, and how many groups failed at each step.
    let (mut there, mut failed) = ([0u32; GROUP as usize + 1], [0u32; 2]);
    for seed in 0..900u64 {
        let world = World::new(seed, Faults::none());
        let p = started(&world);
        let before = 110 + seed % 20;
        (1..=before).for_each(|n| commit_well(&p, n));
        let all: Vec<Begun> = (1..=GROUP)
            .map(|n| begin(&p, before + n).unwrap())
            .collect();
        let step = seed / 20 % 2;
        let crash = |kind| world.arm_crash("a", step + 1, kind);
        match seed % 3 {
            0 => crash(CrashKind::Power),
            1 => crash(CrashKind::Kill),
            _ => world.set_faults(Faults {
                write_error: 600,
                ..Faults::none()
            }),
        }
        // Whoever comes first works for all.
        let first = (seed % GROUP) as usize;
        let mut acked: Vec<bool> = vec![p.finish_commit(&all[first]).is_ok()];
        acked.extend(all.iter().map(|b| p.finish_commit(b).is_ok()));
        assert!(
            acked.iter().all(|ok| *ok == acked[0]),
            "seed {seed}: {acked:?}"
        );
        world.set_faults(Faults::none());
        world.disarm("a");
        end(&world, p, seed % 3 != 1);
        let found = last(&started(&world)) - before;
        assert!(found <= GROUP, "seed {seed}");
        if acked[0] {
            assert_eq!(found, GROUP, "seed {seed}");
            continue;
        }
        there[found as usize] += 1;
        failed[step as usize] += 1;
    }
    assert!(
        there.iter().chain(&failed).all(|n| *n > 2),
        "{there:?} {failed:?}"
    );
}
