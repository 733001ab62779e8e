//! Sync points that change several names, applied with a crash at every step of the disk.
//!
//! A mount removes, renames and makes files in one record. Applied again after a crash, from its
//! first change, the record finds a catalogue and a directory that have some of the changes
//! already. A file that was removed stayed for ever. Or it was in the way of the next one, and the
//! copy could not be opened any more.

mod single;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mojim_config::MediumKind;
use mojim_env::Error;
use mojim_format::RecordView;
use mojim_replica::mirror::Mirror;
use mojim_replica::pace::Pace;
use mojim_replica::piece::Piece;
use mojim_replica::primary::Primary;
use mojim_sim::{CrashKind, Faults, World};
use mojim_store::store::Store;

const LOG: u64 = 256 << 10;

fn start(world: &World) -> mojim_env::Result<Primary> {
    single::start(world, MediumKind::Disk, LOG)
}

#[derive(Debug, Clone, Copy)]
enum To {
    /// Removed.
    Gone(u32),
    Renamed(u32, &'static str),
    /// With its number as its bytes.
    Made(u32, &'static str),
    /// As long, and never written to.
    Hole(u32, &'static str),
}
use To::*;

/// A file that takes several records.
const LONG: u32 = 9;

/// The bytes of file `n`.
fn bytes(n: u32) -> Vec<u8> {
    vec![n as u8; if n == LONG { 6000 } else { 1500 }]
}

fn pieces<'a>(all: &[To], bytes: &'a [Vec<u8>]) -> Vec<Piece<'a>> {
    let mut out = Vec::new();
    for to in all {
        match *to {
            Gone(file) => out.push(Piece::Remove { file }),
            Renamed(file, name) => out.push(Piece::Rename { file, name }),
            Hole(file, name) => {
                let size = bytes[file as usize].len() as u64;
                out.push(Piece::Create { file, name });
                out.push(Piece::Resize { file, size });
            }
            Made(file, name) => {
                let b = &bytes[file as usize];
                let size = b.len() as u64;
                out.push(Piece::Create { file, name });
                out.push(Piece::Resize { file, size });
                out.push(Piece::Write {
                    file,
                    offset: 0,
                    ptr: b.as_ptr(),
                    len: b.len(),
                });
            }
        }
    }
    out
}

/// The volume's files, as its directory has them.
fn there(world: &World) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = world.files("a");
    files.retain(|f| f.starts_with("/a/data") && !f.starts_with(LOST));
    let of = |f: PathBuf| {
        let bytes = world.contents("a", &f).unwrap();
        (f.strip_prefix("/a/data").unwrap().to_owned(), bytes)
    };
    files.into_iter().map(of).collect()
}

/// What links lead to that somebody puts into the directory.
const ELSEWHERE: &[u8] = b"nothing of the volume";
/// Where what is in the way goes.
const LOST: &str = "/a/data/.mojim-lost";

/// Every link that somebody put there is in [`LOST`], and what it leads to is as it was.
fn assert_aside(world: &World, links: usize, what: &str) {
    let mut files = world.files("a");
    files.retain(|f| f.starts_with(LOST));
    let as_it_was =
        |f: &PathBuf| world.is_link("a", f) && world.contents("a", f).as_deref() == Some(ELSEWHERE);
    assert!(files.iter().all(as_it_was), "{what}: {files:?}");
    assert_eq!(files.len(), links, "{what}: {files:?}");
}

/// Applies `then` to a volume with `first`, with a crash behind every operation of the disk.
fn every_crash(first: &[To], then: &[To], want: &[(u32, &str)]) {
    every_crash_beside(&[], first, &[then], want);
}

/// [`every_crash`], with several sync points that wait together.
fn every_crash_of_several(first: &[To], then: &[&[To]], want: &[(u32, &str)]) {
    every_crash_beside(&[], first, then, want);
}

/// Applies what waits, all at once or one sync point after the other.
fn apply(p: &Primary, singly: bool) -> mojim_env::Result<bool> {
    for lsn in p.store.applied()..=p.last() {
        if singly {
            p.store.apply(lsn, usize::MAX)?;
        }
    }
    p.checkpoint_step(Pace::Idle)
}

/// The same in the next process. One sync point after the other is allowed as for a mirror, which
/// learns bit by bit what is committed.
fn apply_again(world: &World, singly: bool) -> mojim_env::Result<bool> {
    if !singly {
        return start(world).and_then(|p| apply(&p, false));
    }
    let store = single::open(world, MediumKind::Disk, LOG)?;
    for lsn in store.applied()..=store.tail() {
        store.apply(lsn, usize::MAX)?;
    }
    assert_eq!(store.applied(), store.tail());
    store.checkpoint()?;
    Ok(true)
}

/// [`every_crash_of_several`], where somebody has put symbolic links of these names into the
/// directory.
fn every_crash_beside(links: &[&str], first: &[To], then: &[&[To]], want: &[(u32, &str)]) {
    let all: Vec<_> = (0..10).map(bytes).collect();
    let is_hole = |n| {
        let mut all = then.iter().copied().flatten();
        all.any(|to| matches!(to, Hole(file, _) if *file == n))
    };
    let has = |n| match is_hole(n) {
        true => vec![0; bytes(n).len()],
        false => bytes(n),
    };
    let want: BTreeMap<_, _> = want
        .iter()
        .map(|(file, name)| (PathBuf::from(name), has(*file)))
        .collect();
    // How it crashes, and whether each attempt applies one sync point after the other.
    let mut ways = vec![
        (CrashKind::Kill, [false; 2]),
        (CrashKind::Power, [false; 2]),
    ];
    if then.len() > 1 {
        ways.push((CrashKind::Kill, [false, true]));
        ways.push((CrashKind::Power, [true, false]));
    }
    for (kind, singly) in ways {
        // The second one comes while what the first cut off is applied again: behind every third
        // operation, and another one for each of the first.
        for after in 1.. {
            let mut is_over = (false, false);
            for again in (1 + after % 3..).step_by(3) {
                let what = format!("{then:?}, {kind:?} behind {after}, and behind {again}");
                let what = format!("{what}, {singly:?}");
                let world = World::new(after, Faults::none());
                let p = start(&world).unwrap();
                p.commit(&pieces(first, &all)).unwrap();
                p.checkpoint_step(Pace::Idle).unwrap();
                for link in links {
                    let path = Path::new("/a/data").join(link);
                    world.put_link("a", &path, ELSEWHERE).unwrap();
                }
                for then in then {
                    p.commit(&pieces(then, &all)).unwrap();
                }
                is_over.0 = crashes(&world, after, kind, || apply(&p, singly[0]));
                drop(p);
                // Others may wait together when they are applied again.
                is_over.1 = crashes(&world, again, kind, || apply_again(&world, singly[1]));
                // In the last attempt, too.
                if then.len() > 1 && after % 2 == 0 {
                    let done = apply_again(&world, !singly[1]);
                    done.unwrap_or_else(|e| panic!("{what}: {e}"));
                    world.kill("a");
                }
                let p = start(&world).unwrap_or_else(|e| panic!("{what}: {e}"));
                p.checkpoint_step(Pace::Idle)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                assert!(there(&world) == want, "{what}: {:?}", there(&world).keys());
                assert_aside(&world, links.len(), &what);
                let known = known(&p);
                let named: BTreeSet<_> = known.values().map(PathBuf::from).collect();
                assert!(named.iter().eq(want.keys()), "{what}: {known:?}");
                assert_eq!(known.len(), want.len(), "{what}");
                if is_over.0 || is_over.1 {
                    break;
                }
            }
            if is_over.0 {
                break;
            }
        }
    }
}

/// Node `a` crashes behind `after` operations of `work`. True if `work` ended before.
fn crashes<T>(
    world: &World,
    after: u64,
    kind: CrashKind,
    work: impl FnOnce() -> mojim_env::Result<T>,
) -> bool {
    world.arm_crash("a", after, kind);
    let done = work();
    let is_over = world.crashed("a").is_none();
    assert!(is_over || done.is_err(), "{kind:?} behind {after}");
    drop(done);
    world.disarm("a");
    world.kill("a");
    is_over
}

/// The names that the catalogue has.
fn known(p: &Primary) -> BTreeMap<u32, String> {
    let area = p.store.area();
    area.files().map(|f| (f.id, f.name.clone())).collect()
}

/// Flips a bit of each record in the log above `lsn`.
fn damage_above(world: &World, lsn: u64) {
    let path = Path::new("/a/logs/log");
    let log = world.contents("a", path).unwrap();
    for at in (0..log.len()).step_by(512) {
        if RecordView::decode(&log[at..]).is_ok_and(|r| r.header.lsn > lsn) {
            assert!(world.flip_bit("a", path, 8 * (at as u64 + 40)));
        }
    }
}

/// Applies `then` to a volume with `first`, with a loss of power behind every operation of the
/// disk; then the records of `then` turn out to be damaged. The copy is refused, or shows none of
/// `then`; or it shows all, when it did not need the records any more.
fn every_crash_with_damage(first: &[To], then: &[To]) {
    let all: Vec<_> = (0..10).map(bytes).collect();
    let mut refused = 0;
    for after in 1.. {
        let what = || format!("{then:?}, behind {after}");
        let world = World::new(after, Faults::none());
        let p = start(&world).unwrap();
        p.commit(&pieces(first, &all)).unwrap();
        p.checkpoint_step(Pace::Idle).unwrap();
        let (before, tail) = (known(&p), p.store.tail());
        p.commit(&pieces(then, &all)).unwrap();
        world.arm_crash("a", after, CrashKind::Power);
        let _ = p.checkpoint_step(Pace::Idle);
        let over = world.crashed("a").is_none();
        let done = known(&p);
        world.disarm("a");
        world.power_loss("a");
        drop(p);
        damage_above(&world, tail);
        match start(&world) {
            Err(Error::Damaged { what, .. }) => {
                refused += 1;
                // If it follows, records do not mend it; unless it cannot be opened at all.
                if what.contains("acknowledged") {
                    world.kill("a");
                    let store = single::open(&world, MediumKind::Disk, LOG).unwrap();
                    let m = Mirror::new(Arc::new(store), "a", 0);
                    assert!(m.is_distrusted() && !m.store.is_exact());
                }
            }
            Err(e) => panic!("{}: {e}", what()),
            Ok(p) if p.store.tail() == tail => assert_eq!(known(&p), before, "{}", what()),
            Ok(p) => assert_eq!(known(&p), done, "{}", what()),
        }
        if over {
            break;
        }
    }
    assert!(refused > 3, "{then:?}: {refused}");
}

/// The log's last records were damaged while they were being applied: the log seemed to end
/// before them, and the copy went on with a part of their names, which the catalogue had already,
/// or which the note of a renaming brought into it at the next start.
#[test]
fn no_part_of_damaged_records_counts_as_the_state_before() {
    every_crash_with_damage(&[Made(1, "x"), Made(2, "y")], &[Renamed(1, "z")]);
    every_crash_with_damage(
        &[Made(1, "a"), Made(2, "b")],
        &[Renamed(1, "c"), Gone(2), Made(LONG, "b"), Made(3, "d/e")],
    );
}

#[test]
fn a_removed_file_goes_also_if_another_is_made_in_the_same_record() {
    every_crash(
        &[Made(1, "A"), Made(2, "B")],
        &[Gone(1), Made(3, "z")],
        &[(2, "B"), (3, "z")],
    );
}

#[test]
fn files_take_the_places_of_directories_and_the_other_way_round() {
    every_crash(
        &[Made(1, "x"), Made(2, "d/f")],
        &[Gone(1), Gone(2), Made(3, "x"), Made(4, "d")],
        &[(3, "x"), (4, "d")],
    );
    every_crash(
        &[Made(1, "p"), Made(2, "q")],
        &[Gone(1), Renamed(2, "p/q")],
        &[(2, "p/q")],
    );
    every_crash(
        &[Made(1, "x"), Made(2, "d/f")],
        &[Gone(2), Renamed(1, "d")],
        &[(1, "d")],
    );
}

#[test]
fn files_change_places() {
    every_crash(
        &[Made(1, "a"), Made(2, "b"), Made(3, "c")],
        &[
            Renamed(1, "aside/1"),
            Renamed(2, "aside/2"),
            Renamed(1, "b"),
            Renamed(2, "a"),
            Made(4, "d"),
        ],
        &[(1, "b"), (2, "a"), (3, "c"), (4, "d")],
    );
}

/// The note of a record's removals was written over by that of the next record of the same sync
/// point, when the first had been applied before a crash: the file stayed in the directory for
/// ever.
#[test]
fn a_sync_point_of_several_records_removes_with_each() {
    every_crash(
        &[Made(1, "A"), Made(2, "B")],
        &[Gone(1), Made(LONG, "z"), Gone(2), Made(3, "y")],
        &[(LONG, "z"), (3, "y")],
    );
}

#[test]
fn many_files_are_made_at_once() {
    every_crash(
        &[Made(1, "a/b/old"), Made(2, "e")],
        &[
            Gone(2),
            Made(3, "a/b/c"),
            Made(4, "a/b/d"),
            Made(5, "e"),
            Made(6, "f/g"),
        ],
        &[
            (1, "a/b/old"),
            (3, "a/b/c"),
            (4, "a/b/d"),
            (5, "e"),
            (6, "f/g"),
        ],
    );
}

/// Files that a sync point makes and removes are never made, those that it makes and renames are
/// made under their last names: also where others had these names before, or in between.
#[test]
fn a_sync_point_makes_only_what_is_left_of_it() {
    every_crash(
        &[Made(1, "a"), Made(2, "d/x")],
        &[
            Made(3, "tmp"),
            Gone(1),
            Renamed(3, "a"),
            Made(4, "journal"),
            Gone(4),
            Made(5, "journal"),
            Gone(2),
            Made(6, "d"),
        ],
        &[(3, "a"), (5, "journal"), (6, "d")],
    );
    every_crash(&[Made(1, "a")], &[Made(2, "b"), Gone(2)], &[(1, "a")]);
    every_crash(
        &[Made(1, "a")],
        &[Made(2, "b"), Renamed(2, "c"), Made(3, "b"), Renamed(3, "c")],
        &[(1, "a"), (3, "c")],
    );
    every_crash(
        &[Made(1, "a")],
        &[Made(2, "b/1"), Renamed(2, "b"), Gone(1), Made(LONG, "a/2")],
        &[(2, "b"), (LONG, "a/2")],
    );
}

/// A mount puts a file that is replaced and still open aside, and removes it a moment later. Each
/// replacement was applied by itself, in steps: a program that saves by a rename filled the logs,
/// and a later write of another waited for tens of seconds, or failed.
#[test]
fn files_that_are_put_aside_and_removed_go_with_what_replaces_them() {
    every_crash_of_several(
        &[Made(1, "f")],
        &[
            &[Made(2, "f.new")],
            &[Renamed(1, "aside/1"), Renamed(2, "f")],
            &[Gone(1)],
            &[Made(3, "f.new")],
            &[Renamed(2, "aside/2"), Renamed(3, "f")],
            &[Gone(2)],
        ],
        &[(3, "f")],
    );
    // The last one is not removed yet.
    every_crash_of_several(
        &[Made(1, "f"), Made(4, "g")],
        &[
            &[Made(2, "f.new")],
            &[Renamed(1, "aside/1"), Renamed(2, "f")],
            &[Gone(1)],
            &[Renamed(4, "aside/4")],
        ],
        &[(2, "f"), (4, "aside/4")],
    );
}

/// Files that were there, and that are renamed, take names from each other, and from those that are
/// made.
#[test]
fn files_that_are_put_aside_leave_names_free_and_take_others() {
    // One that stays takes the name of one that goes.
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "b")],
        &[&[Renamed(1, "x"), Renamed(2, "a")], &[Gone(1)]],
        &[(2, "a")],
    );
    // One that goes has replaced another one before.
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "b"), Made(3, "c")],
        &[&[Renamed(1, "b")], &[Gone(1), Made(4, "a")]],
        &[(3, "c"), (4, "a")],
    );
    // One that was put aside is replaced there.
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "b")],
        &[&[Renamed(1, "x")], &[Renamed(2, "x")], &[Gone(2)]],
        &[],
    );
    every_crash_of_several(
        &[Made(1, "a")],
        &[&[Renamed(1, "x")], &[Made(2, "n"), Renamed(2, "x")]],
        &[(2, "x")],
    );
    // It is renamed twice, and its first name is another's by then.
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "b")],
        &[
            &[Renamed(1, "x"), Made(3, "a")],
            &[Renamed(1, "b"), Made(4, "x")],
            &[Gone(1)],
        ],
        &[(3, "a"), (4, "x")],
    );
    // In one sync point.
    every_crash(
        &[Made(1, "a"), Made(2, "b")],
        &[Renamed(1, "x"), Renamed(2, "x"), Gone(2)],
        &[],
    );
    every_crash(
        &[Made(1, "a")],
        &[Renamed(1, "x"), Made(2, "n"), Renamed(2, "x")],
        &[(2, "x")],
    );
    // It stays.
    every_crash(
        &[Made(1, "a")],
        &[Renamed(1, "x"), Made(2, "a")],
        &[(1, "x"), (2, "a")],
    );
    every_crash_of_several(
        &[Made(1, "a")],
        &[&[Made(3, "n")], &[Renamed(1, "x"), Renamed(3, "a")]],
        &[(1, "x"), (3, "a")],
    );
    // A directory comes where it lay, and it goes into one.
    every_crash_of_several(
        &[Made(1, "d")],
        &[
            &[Renamed(1, "e/1"), Made(2, "d/f")],
            &[Gone(1), Made(3, "e")],
        ],
        &[(2, "d/f"), (3, "e")],
    );
}

/// An earlier attempt, cut off by a crash, went step by step, and left other names than the next
/// one gives: a file stayed in the directory for ever, or had the wrong name.
#[test]
fn an_attempt_by_steps_leaves_nothing_in_the_way_of_the_next() {
    every_crash(
        &[Made(1, "a")],
        &[
            Made(5, "tmp"),
            Made(2, "b"),
            Renamed(2, "a"),
            Renamed(5, "j"),
        ],
        &[(2, "a"), (5, "j")],
    );
    every_crash(
        &[Made(1, "a")],
        &[
            Made(4, "j"),
            Made(5, "tmp"),
            Made(2, "b"),
            Renamed(2, "a"),
            Gone(4),
            Renamed(5, "j"),
        ],
        &[(2, "a"), (5, "j")],
    );
    every_crash(
        &[Made(1, "a"), Made(6, "keep")],
        &[Made(4, "a"), Gone(4), Made(5, "a/x"), Gone(5)],
        &[(6, "keep")],
    );
}

/// Each sync point that changed names wrote the catalogue and synced its directories, and each
/// file beyond those that may be open was synced for itself: a program that made and removed
/// 111,000 files in ten seconds left its nodes a minute of work. Those that wait together are
/// applied as one; after a crash others may be together.
#[test]
fn sync_points_that_wait_together_are_applied_as_one() {
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "b")],
        &[
            &[Made(3, "c"), Made(4, "d/c")],
            &[Gone(3), Made(5, "c")],
            &[Gone(1), Made(6, "a")],
            &[Gone(4), Gone(5)],
            &[Made(7, "d/c"), Made(LONG, "e")],
        ],
        &[(2, "b"), (6, "a"), (7, "d/c"), (LONG, "e")],
    );
    // Under another name in the next one, in the place of one that was there, or of its directory.
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "d/x")],
        &[
            &[Made(3, "tmp")],
            &[Renamed(3, "a"), Made(4, "tmp")],
            &[Renamed(4, "a"), Made(5, "j")],
            &[Gone(2), Made(6, "d")],
            &[Gone(5), Made(7, "tmp")],
        ],
        &[(4, "a"), (6, "d"), (7, "tmp")],
    );
    // One that is applied step by step is between others.
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "b")],
        &[
            &[Made(3, "x"), Gone(2)],
            &[Made(4, "b")],
            &[Renamed(1, "b"), Renamed(3, "a")],
            &[Made(5, "x")],
            &[Gone(5), Made(6, "b/c"), Gone(1)],
        ],
        &[(3, "a"), (6, "b/c")],
    );
    // More of them after the crash than before: what was begun to be removed goes, too.
    every_crash_of_several(
        &[Made(1, "a"), Made(2, "b")],
        &[&[Gone(1), Made(3, "c")], &[Gone(2)]],
        &[(3, "c")],
    );
}

/// Sync points that were begun as one were cut off by a crash, and those first of them were applied
/// alone then: only they were known to be committed. The catalogue had the names that the last ones
/// give. The copy stopped until it was opened again, or a file was lost.
#[test]
fn what_was_begun_together_is_applied_again_together() {
    every_crash_of_several(
        &[],
        &[&[Made(2, "d/f")], &[Gone(2)], &[Made(3, "d")]],
        &[(3, "d")],
    );
    every_crash_of_several(
        &[Made(1, "d/x")],
        &[
            &[Made(2, "n")],
            &[Gone(1), Made(3, "d")],
            &[Gone(2)],
            &[Gone(3), Made(4, "d/f")],
        ],
        &[(4, "d/f")],
    );
    every_crash_of_several(
        &[Made(1, "a")],
        &[
            &[Made(2, "n")],
            &[Gone(1), Renamed(2, "a/b")],
            &[Renamed(2, "m"), Made(3, "n/x")],
        ],
        &[(2, "m"), (3, "n/x")],
    );
    // One that was there is put aside.
    every_crash_of_several(
        &[Made(1, "a")],
        &[
            &[Renamed(1, "x"), Made(2, "n")],
            &[Made(3, "m")],
            &[Gone(3), Renamed(2, "m")],
            &[Gone(1)],
        ],
        &[(2, "m")],
    );
}

/// Node `a`'s copy, opened after a loss of power behind `after` operations of applying sync points
/// as one. `None` if that was over. `lost`: how many of them the log has lost.
fn cut_off(then: &[Vec<Piece>], after: u64, lost: usize) -> Option<(World, Store)> {
    let world = World::new(after, Faults::none());
    let p = start(&world).unwrap();
    let all: Vec<_> = (0..10).map(bytes).collect();
    p.commit(&pieces(&[Made(1, "a")], &all)).unwrap();
    p.checkpoint_step(Pace::Idle).unwrap();
    let ends: Vec<_> = then.iter().map(|one| p.commit(one).unwrap()).collect();
    if crashes(&world, after, CrashKind::Power, || apply(&p, false)) {
        return None;
    }
    drop(p);
    if lost > 0 {
        damage_above(&world, ends[ends.len() - 1 - lost]);
    }
    let store = single::open(&world, MediumKind::Disk, LOG).unwrap();
    Some((world, store))
}

/// A mirror learns late what is committed. It must not stop because it waits for that, nor hold up
/// those that bring the rest.
#[test]
fn what_was_begun_together_waits_until_all_of_it_is_known_to_be_committed() {
    let names: Vec<_> = (100..400).map(|n| (n, n.to_string())).collect();
    let made = names
        .iter()
        .map(|(file, name)| Piece::Create { file: *file, name });
    let then = [
        made.collect(),
        vec![Piece::Remove { file: 100 }],
        vec![Piece::Remove { file: 101 }],
    ];
    let mut held = 0;
    for after in 1.. {
        let Some((_, store)) = cut_off(&then, after, 0) else {
            break;
        };
        let (before, tail) = (store.applied(), store.tail());
        if store.area().cut_off(tail).is_none() {
            continue;
        }
        held += 1;
        for limit in before + 1..tail {
            assert_eq!(store.apply(limit, usize::MAX).unwrap(), before);
            store.apply_known(limit).unwrap();
            assert!(store.apply_all(limit).is_err() && !store.count_names(limit));
        }
        assert!(store.count_names(tail));
        // However few bytes may be applied at once.
        assert_eq!(store.apply(tail, 1).unwrap(), tail);
        let area = store.area();
        assert!(
            area.files()
                .map(|f| f.id)
                .eq(std::iter::once(1).chain(102..400))
        );
    }
    assert!(held > 3, "{held}");
}

/// The log lost the end of what was begun together, and an operator gives that up: the rest does
/// not wait for it, also where it finds no room at first.
#[test]
fn what_was_begun_together_does_not_wait_for_what_is_given_up() {
    let all: Vec<_> = (0..10).map(bytes).collect();
    let then = [&[Made(2, "n")][..], &[Made(3, "m")], &[Made(4, "o")]];
    let then = then.map(|one| pieces(one, &all));
    let mut given_up = 0;
    for after in 1.. {
        let Some((world, store)) = cut_off(&then, after, 2) else {
            break;
        };
        if !store.has_part() {
            continue;
        }
        given_up += 1;
        let tail = store.tail();
        store.truncate(tail).unwrap();
        world.fill("a", 0);
        let done = store.apply_last(tail);
        assert!(done.is_err_and(|e| e.lacks_room()), "behind {after}");
        world.set_quota("a", None);
        world.advance(Duration::from_secs(1));
        store.apply_last(tail).unwrap();
        assert_eq!(store.applied(), tail);
        assert_eq!(store.area().find("n").map(|f| f.size), Some(1500));
    }
    assert!(given_up > 3, "{given_up}");
}

/// What the disk does for sync points that wait together: not as much for each of them.
#[test]
fn a_burst_of_names_costs_a_few_syncs() {
    let steps = |count: u32| {
        let all: Vec<_> = (0..10).map(bytes).collect();
        let world = World::new(1, Faults::none());
        world.trace_on();
        let p = start(&world).unwrap();
        for n in 0..count {
            let names = [format!("{n}"), format!("d/{n}")];
            let (kept, passing) = (2 * n + 1, 2 * n + 2);
            let make = |file, name| Piece::Create { file, name };
            let data = (all[1].as_ptr(), all[1].len());
            let (file, offset, (ptr, len)) = (kept, 0, data);
            let size = len as u64;
            p.commit(&[
                make(kept, &names[0]),
                make(passing, &names[1]),
                Piece::Resize { file, size },
                Piece::Write {
                    file,
                    offset,
                    ptr,
                    len,
                },
            ])
            .unwrap();
            p.commit(&[Piece::Remove { file: passing }]).unwrap();
        }
        let syncs = || world.trace().iter().filter(|l| l.contains("sync")).count();
        let before = syncs();
        p.checkpoint_step(Pace::Idle).unwrap();
        assert_eq!(known(&p).len(), count as usize);
        assert!(world.files("a").iter().all(|f| !f.starts_with("/a/data/d")));
        syncs() - before
    };
    assert_eq!(steps(10), steps(40));
}

/// What the disk does for a file that is replaced again and again, each time with the one before
/// put aside and removed: not as much for each time.
#[test]
fn a_burst_of_replacements_costs_a_few_syncs() {
    let steps = |count: u32| {
        let world = World::new(1, Faults::none());
        world.trace_on();
        let p = start(&world).unwrap();
        let (name, new) = ("f", "f.new");
        p.commit(&[Piece::Create { file: 1, name }]).unwrap();
        p.checkpoint_step(Pace::Idle).unwrap();
        for before in 1..=count {
            let file = before + 1;
            p.commit(&[Piece::Create { file, name: new }]).unwrap();
            let aside = format!("aside/{before}");
            let moves = [(before, &aside[..]), (file, name)];
            p.commit(&moves.map(|(file, name)| Piece::Rename { file, name }))
                .unwrap();
            p.commit(&[Piece::Remove { file: before }]).unwrap();
        }
        let syncs = || world.trace().iter().filter(|l| l.contains("sync")).count();
        let before = syncs();
        p.checkpoint_step(Pace::Idle).unwrap();
        assert_eq!(known(&p), BTreeMap::from([(count + 1, name.to_owned())]));
        syncs() - before
    };
    assert_eq!(steps(10), steps(40));
}

/// The names that a node must apply before it takes over were bounded by the log alone: a minute
/// of work in 16 MiB.
#[test]
fn no_more_names_wait_than_are_applied_soon() {
    let world = World::new(1, Faults::none());
    let p = single::start(&world, MediumKind::Disk, 8 << 20).unwrap();
    let mut made = 0;
    let mut make = || {
        let names: Vec<_> = (made + 1..=made + 64).map(|n| (n, n.to_string())).collect();
        let create = |(file, name): &(u32, String)| Piece::Create {
            file: *file,
            name: name.clone().leak(),
        };
        let pieces: Vec<_> = names.iter().map(create).collect();
        let done = p.try_append_now(&pieces, 0).unwrap();
        made += done.map_or(0, |_| 64);
        p.store.count_names(u64::MAX);
        (done.is_some(), made)
    };
    while make().0 {}
    let (_, waiting) = make();
    assert!((32_000..33_000).contains(&waiting), "{waiting}");
    while p.store.is_laden() {
        assert!(p.checkpoint_step(Pace::Idle).unwrap());
    }
    assert!(make().0);
}

/// Whoever asked how far a copy is waited until records were applied, a mirror's lanes and its
/// greeting too: the primary took the node for dead.
#[test]
fn who_asks_how_far_a_copy_is_does_not_wait_for_who_applies() {
    let all: Vec<_> = (0..10).map(bytes).collect();
    let world = World::new(1, Faults::none());
    let p = start(&world).unwrap();
    let lsn = p.append(&pieces(&[Made(1, "a")], &all)).unwrap().lsn;
    let seen = p.store.standing_still(|_, _| {
        // As who applies has it. Whoever took the lock again here would wait for ever.
        let s = &p.store;
        Ok((s.whole(lsn), s.is_kept(0), s.pressure() > 0.0))
    });
    assert_eq!(seen.unwrap(), (lsn, false, true));
}

/// A file that took the place of another one was that one, cut. The cut was lost with the power
/// when the catalogue had the new file already: it had the bytes of the old one.
#[test]
fn a_new_file_has_nothing_of_the_one_in_whose_place_it_is() {
    every_crash(&[Made(1, "a")], &[Gone(1), Hole(2, "a")], &[(2, "a")]);
    every_crash(
        &[Made(1, "a")],
        &[Gone(1), Hole(2, "b"), Renamed(2, "a")],
        &[(2, "a")],
    );
}

/// A symbolic link that lay where a record made a file was followed: what it leads to was cut, and
/// had the volume's bytes. Now it is put aside, also if a crash comes in between, and the file is
/// made.
#[test]
fn no_link_in_the_place_of_a_new_file_is_followed() {
    every_crash_beside(
        &["x"],
        &[Made(1, "a")],
        &[&[Made(2, "x")]],
        &[(1, "a"), (2, "x")],
    );
    // Of one record, with names that were another's; names that are the same in `.mojim-lost`.
    every_crash_beside(
        &["d/x", "d_x"],
        &[Made(1, "a"), Made(2, "d/y")],
        &[&[Gone(1), Made(3, "d/x"), Made(4, "d_x"), Made(5, "a")]],
        &[(2, "d/y"), (3, "d/x"), (4, "d_x"), (5, "a")],
    );
    // Where a directory must be, and step by step.
    every_crash_beside(
        &["d", "e"],
        &[Made(1, "a")],
        &[&[Made(2, "d/x"), Made(3, "e"), Renamed(1, "d/y")]],
        &[(1, "d/y"), (2, "d/x"), (3, "e")],
    );
}

/// A mount asked the data area for a file's limit at each write that made it longer, and for the
/// open file at each read: both waited until a turn of applying had synced its directories.
#[test]
fn who_writes_and_reads_beside_applying_does_not_wait_for_it() {
    let all: Vec<_> = (0..10).map(bytes).collect();
    let world = World::new(1, Faults::none());
    let p = start(&world).unwrap();
    p.commit(&pieces(&[Made(1, "a")], &all)).unwrap();
    p.checkpoint_step(Pace::Idle).unwrap();
    // As who applies has it. Whoever took it again here would wait for ever.
    let area = p.store.area();
    p.check_size(1 << 20).unwrap();
    let mut byte = [0];
    let file = p.store.data_file(1).unwrap();
    assert_eq!((file.read_at(&mut byte, 0).unwrap(), byte), (1, [1]));
    drop(area);
}
