//! Sync points that are applied to a disk without room, at every step of it.
//!
//! A write that found no room poisoned the copy, though its record was in the log. When there was
//! room, somebody had to begin anew. The attempt to apply the record is now given up, and made
//! again. Here the disk has room for no page, for one, for two and so on, until all of it is
//! applied at once.

mod single;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mojim_config::MediumKind;
use mojim_env::Result;
use mojim_replica::pace::Pace;
use mojim_replica::piece::Piece;
use mojim_replica::primary::{Primary, RoomWait};
use mojim_sim::{Faults, World};

const LOG: u64 = 256 << 10;
const SIZE: u64 = 20_000;

fn start(world: &World) -> Result<Primary> {
    single::start(world, MediumKind::Disk, LOG)
}

fn write(file: u32, offset: u64, bytes: &[u8]) -> Piece<'_> {
    Piece::Write {
        file,
        offset,
        ptr: bytes.as_ptr(),
        len: bytes.len(),
    }
}

fn make(p: &Primary, file: u32, name: &str, bytes: &[u8]) {
    let size = SIZE;
    let all = [
        Piece::Create { file, name },
        Piece::Resize { file, size },
        write(file, 0, bytes),
    ];
    p.commit(&all).unwrap();
}

/// The volume's files, as its directory has them: their names, and the first byte of each page.
fn there(world: &World) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = world.files("a");
    files.retain(|f| f.starts_with("/a/data"));
    let of = |f: PathBuf| {
        let bytes = world.contents("a", &f).unwrap();
        let bytes = bytes.iter().step_by(4096).copied().collect();
        (f.strip_prefix("/a/data").unwrap().to_owned(), bytes)
    };
    files.into_iter().map(of).collect()
}

/// Files that are applied, and not synced.
fn first(p: &Primary) {
    for (file, name) in [(1, "a"), (2, "d/f"), (3, "c")] {
        make(p, file, name, &[file as u8; 9000]);
    }
    p.store.persist_all().unwrap();
    p.store.apply(p.apply_limit(), usize::MAX).unwrap();
}

/// What is applied when there is no room: bytes into holes, names of all kinds, cuts.
fn then(p: &Primary) {
    p.commit(&[write(1, 12_288, &[7; 9]), write(3, 100, &[8; 9000])])
        .unwrap();
    let renamed = Piece::Rename {
        file: 2,
        name: "x/y",
    };
    p.commit(&[Piece::Remove { file: 1 }, renamed]).unwrap();
    make(p, 4, "d", &[4; 9000]);
    make(p, 5, "a/b", &[5; 9000]);
    p.commit(&[Piece::Remove { file: 5 }]).unwrap();
    let cut = |size| Piece::Resize { file: 3, size };
    p.commit(&[cut(5000), cut(30_000), write(3, 16_384, &[9; 5000])])
        .unwrap();
    p.store.persist_all().unwrap();
}

fn want() -> BTreeMap<PathBuf, Vec<u8>> {
    let files: [(&str, &[u8]); 3] = [
        ("c", &[3, 8, 0, 0, 9, 9, 0, 0]),
        ("d", &[4, 4, 4, 0, 0]),
        ("x/y", &[2, 2, 2, 0, 0]),
    ];
    files
        .map(|(name, bytes)| (PathBuf::from(name), bytes.to_vec()))
        .into()
}

/// How it goes on after there was no room.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ends {
    /// There is a little more, and then all.
    Comes,
    /// The power goes, and room comes.
    Dark,
}

#[test]
fn what_finds_no_room_is_applied_when_there_is_room() {
    for ends in [Ends::Comes, Ends::Dark] {
        let mut found_none = 0;
        for pages in 0.. {
            let what = format!("{ends:?}, room for {pages} pages");
            let world = World::new(pages + 1, Faults::none());
            let mut p = start(&world).unwrap();
            first(&p);
            then(&p);
            world.fill("a", pages);
            let done = p.checkpoint_step(Pace::Idle);
            let all = done.is_ok();
            if let Err(e) = done {
                found_none += 1;
                assert!(e.lacks_room(), "{what}: {e}");
                assert!(p.store.poisoned().is_none(), "{what}");
                // The log has room.
                p.commit(&[write(3, 0, &[3])]).unwrap();
                p.store.persist_all().unwrap();
            }
            match ends {
                Ends::Comes => {
                    world.advance(Duration::from_secs(1));
                    world.fill("a", pages % 4);
                    let _ = p.checkpoint_step(Pace::Idle);
                    world.advance(Duration::from_secs(1));
                }
                Ends::Dark => {
                    world.power_loss("a");
                    drop(p);
                    world.set_quota("a", None);
                    p = start(&world).unwrap_or_else(|e| panic!("{what}: {e}"));
                }
            }
            world.set_quota("a", None);
            p.checkpoint_step(Pace::Idle)
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(p.store.checkpointed(), p.last(), "{what}");
            assert_eq!(there(&world), want(), "{what}");
            // It is durable, too: also what was written before there was no room.
            world.power_loss("a");
            drop(p);
            let p = start(&world).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(there(&world), want(), "{what}");
            assert!(world.contents("a", Path::new("/a/data/a")).is_none());
            drop(p);
            if all {
                break;
            }
        }
        assert!(found_none > 5, "{found_none}");
    }
}

/// A backup's copy ended with half a sync point: what was written before room was lacking was not
/// noted, so nobody sent those pages again.
#[test]
fn a_copy_that_is_read_while_there_is_no_room_does_not_count() {
    let world = World::new(1, Faults::none());
    let p = start(&world).unwrap();
    first(&p);
    let watch = p.store.watch();
    // The first write finds a page, the second a hole.
    p.commit(&[write(1, 0, &[7; 4096]), write(1, 12_288, &[7; 9])])
        .unwrap();
    p.store.persist_all().unwrap();
    world.fill("a", 0);
    let e = p.checkpoint_step(Pace::Idle).unwrap_err();
    assert!(e.lacks_room(), "{e}");
    assert!(p.store.area().is_torn());
    assert!(!watch.holds());
}

/// A full log failed at once while the disk had no room for what is committed, although both may
/// have some a moment later.
#[test]
fn a_full_log_is_waited_for_while_what_is_committed_finds_no_room() {
    let world = World::new(1, Faults::none());
    let p = start(&world).unwrap();
    first(&p);
    world.fill("a", 0);
    let bytes = [7; 3000];
    // Into a hole.
    let append = || p.try_append_now(&[write(1, 12_288, &bytes)], 0).unwrap();
    while append().is_some() {}
    let mut wait = RoomWait::default();
    for _ in 0..10 {
        p.wait_for_room(&mut wait).unwrap();
        world.advance(Duration::from_millis(5));
    }
    assert!(p.store.lacks_room().is_some());
    assert!(append().is_none());
    world.set_quota("a", None);
    world.advance(Duration::from_secs(1));
    p.wait_for_room(&mut wait).unwrap();
    assert!(append().is_some());
}
