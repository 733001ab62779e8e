//! The files of a voter: openraft's own suite, and what a power failure, a bad
//! sector or a failed sync do to them.

use std::path::Path;
use std::sync::Arc;

use mojim_env::Env;
use mojim_env::{Error, Result};
use mojim_linux::Os;
use openraft::testing::{StoreBuilder, Suite};
use openraft::{EntryPayload, LeaderId};

use super::failing::Failing;
use super::{Temp, register};
use crate::disk::{Disk, Saved};
use crate::store::{LogStore, Machine};
use crate::types::{
    Agreed, Entry, LogId, RegisterCommand, Registers, SnapshotMeta, StorageError, Swap, TypeConfig,
    Vote, number,
};

fn os() -> Arc<dyn Env> {
    Arc::new(Os::new().unwrap())
}

fn open(dir: &Path) -> Result<Disk> {
    Disk::open(os(), dir, "c", "me")
}

struct Stores;

impl StoreBuilder<TypeConfig, LogStore, Machine, Temp> for Stores {
    async fn build(&self) -> std::result::Result<(Temp, LogStore, Machine), StorageError> {
        let dir = Temp::new();
        let disk = Arc::new(open(dir.path()).unwrap());
        let machine = Machine::new(disk.clone()).unwrap();
        Ok((dir, LogStore::new(disk, 1000), machine))
    }
}

type Tests = Suite<TypeConfig, LogStore, Machine, Stores, Temp>;

/// All of openraft's suite but `get_initial_state_membership_from_log_and_sm`,
/// which appends entry 1 to a log that ends with entry 2, and then entry 3 to
/// one that ends with 1: this store's log has no holes.
#[test]
fn what_openraft_expects_of_a_store() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_time()
        .build()
        .unwrap();
    // Some of it sleeps for a second: all at one time.
    let mut all = tokio::task::JoinSet::new();
    macro_rules! suite {
        ($($test:ident)*) => {$(
            all.spawn_on(async {
                let (_dir, log, machine) = Stores.build().await.unwrap();
                let r = Tests::$test(log, machine).await;
                (stringify!($test), r)
            }, runtime.handle());
        )*};
    }
    suite! {
        last_membership_in_log_initial
        last_membership_in_log
        last_membership_in_log_multi_step
        get_membership_initial
        get_membership_from_log_and_empty_sm
        get_membership_from_empty_log_and_sm
        get_membership_from_log_le_sm_last_applied
        get_membership_from_log_gt_sm_last_applied_1
        get_membership_from_log_gt_sm_last_applied_2
        get_initial_state_without_init
        get_initial_state_with_state
        get_initial_state_last_log_gt_sm
        get_initial_state_last_log_lt_sm
        get_initial_state_log_ids
        get_initial_state_re_apply_committed
        save_vote
        get_log_entries
        limited_get_log_entries
        try_get_log_entry
        initial_logs
        get_log_state
        get_log_id
        last_id_in_log
        last_applied_state
        purge_logs_upto_0
        purge_logs_upto_5
        purge_logs_upto_20
        delete_logs_since_11
        delete_logs_since_0
        append_to_log
        snapshot_meta
        apply_single
        apply_multiple
    }
    all.spawn_on(
        async { ("transfer_snapshot", Tests::transfer_snapshot(&Stores).await) },
        runtime.handle(),
    );
    runtime.block_on(async {
        while let Some(ended) = all.join_next().await {
            let (test, r) = ended.unwrap();
            r.unwrap_or_else(|e| panic!("{test}: {e}"));
        }
    });
}

fn id(term: u64, index: u64) -> LogId {
    LogId::new(LeaderId::new(term, 7), index)
}

fn entry(index: u64) -> Entry {
    Entry {
        log_id: id(1, index),
        payload: EntryPayload::Normal(RegisterCommand::Swap(Swap {
            volume: "v".into(),
            new: register(index, "somebody"),
        })),
    }
}

fn indices(d: &Disk) -> Vec<u64> {
    d.kept(|k| k.entries.keys().copied().collect()).unwrap()
}

fn saved(last: LogId) -> Saved {
    Saved {
        meta: SnapshotMeta {
            last_log_id: Some(last),
            ..SnapshotMeta::default()
        },
        agreed: Agreed {
            registers: Registers::from([("v".into(), register(last.index, "somebody"))]),
            ..Agreed::default()
        },
    }
}

/// A directory with a vote and three appends: of entries 0 and 1, of 2, of 3
/// and 4. And where the frames of its log begin, the last is its end.
fn written() -> (Temp, Vec<usize>) {
    let dir = Temp::new();
    let d = open(dir.path()).unwrap();
    let mut at = vec![len(dir.path())];
    d.vote(Vote::new(1, 7)).unwrap();
    for batch in [0..2, 2..3, 3..5] {
        d.append(batch.map(entry).collect()).unwrap();
        at.push(len(dir.path()));
    }
    (dir, at)
}

fn len(dir: &Path) -> usize {
    std::fs::metadata(dir.join("log")).unwrap().len() as usize
}

/// The directory, with another log.
fn with_log(dir: &Path, log: &[u8]) -> Result<Disk> {
    std::fs::write(dir.join("log"), log).unwrap();
    open(dir)
}

fn is_damaged(r: Result<Disk>, file: &Path, what: &str) {
    match r.err().expect("it is refused") {
        Error::Damaged { path, what: said } => {
            assert_eq!(path, file);
            assert!(said.contains(what), "{said}");
        }
        e => panic!("{e}"),
    }
}

#[test]
fn what_was_written_is_there_again() {
    let (dir, _) = written();
    let d = open(dir.path()).unwrap();
    assert_eq!(indices(&d), [0, 1, 2, 3, 4]);
    let (vote, last, e) = d
        .kept(|k| (k.vote, k.last(), k.entries[&2].payload.clone()))
        .unwrap();
    assert_eq!((vote, last), (Some(Vote::new(1, 7)), Some(id(1, 4))));
    assert!(
        matches!(e, EntryPayload::Normal(RegisterCommand::Swap(s)) if s.new == register(2, "somebody"))
    );

    d.truncate(4).unwrap();
    d.append(vec![entry(4), entry(5)]).unwrap();
    d.snapshot(saved(id(1, 3))).unwrap();
    d.purge(id(1, 2)).unwrap();
    d.append(vec![entry(6)]).unwrap();
    // Neither goes back.
    d.purge(id(1, 1)).unwrap();
    d.snapshot(saved(id(1, 2))).unwrap();
    drop(d);
    let d = open(dir.path()).unwrap();
    assert_eq!(indices(&d), [3, 4, 5, 6]);
    d.kept(|k| {
        assert_eq!(k.purged, Some(id(1, 2)));
        assert_eq!(k.snapshot, Some(saved(id(1, 3))));
    })
    .unwrap();

    // A snapshot that came from the leader, ahead of the log.
    d.vote(Vote::new_committed(3, 7)).unwrap();
    d.snapshot(saved(id(3, 90))).unwrap();
    d.purge(id(3, 90)).unwrap();
    drop(d);
    let d = open(dir.path()).unwrap();
    assert_eq!(indices(&d), [0; 0]);
    assert_eq!(d.kept(|k| k.last()).unwrap(), Some(id(3, 90)));
    d.append(vec![entry(91)]).unwrap();
}

#[test]
fn a_torn_end_is_cut_off() {
    let (dir, at) = written();
    let log = std::fs::read(dir.path().join("log")).unwrap();
    for cut in at[2]..at[3] {
        let d = with_log(dir.path(), &log[..cut]).unwrap();
        assert_eq!(indices(&d), [0, 1, 2], "cut at {cut}");
        drop(d);
        let cut_off = std::fs::read(dir.path().join("log")).unwrap();
        assert_eq!(indices(&open(dir.path()).unwrap()), [0, 1, 2]);
        assert_eq!(std::fs::read(dir.path().join("log")).unwrap(), cut_off);
    }
    // Any sectors of it may be missing while the length is there.
    for hole in at[2]..at[3] {
        let mut torn = log.clone();
        torn[hole..].fill(0);
        let d = with_log(dir.path(), &torn).unwrap();
        assert_eq!(indices(&d), [0, 1, 2], "zero from {hole}");
        let mut torn = log.clone();
        torn[at[2]..=hole].fill(0);
        drop(d);
        let d = with_log(dir.path(), &torn).unwrap();
        assert_eq!(indices(&d), [0, 1, 2], "zero up to {hole}");
    }
    // It goes on from there.
    let d = open(dir.path()).unwrap();
    d.append(vec![entry(3)]).unwrap();
    drop(d);
    assert_eq!(indices(&open(dir.path()).unwrap()), [0, 1, 2, 3]);
}

#[test]
fn a_damaged_middle_is_refused() {
    let (dir, at) = written();
    let path = dir.path().join("log");
    let log = std::fs::read(&path).unwrap();
    for i in 0..at[2] {
        let mut bad = log.clone();
        bad[i] ^= 0x10;
        let r = with_log(dir.path(), &bad);
        let what = match i {
            _ if i < at[0] => "the log's first frame".to_owned(),
            _ if i < at[1] => format!("the frame at byte {}, with entry 0, is damaged", at[0]),
            _ => format!("the frame at byte {}, with entry 2, is damaged", at[1]),
        };
        is_damaged(r, &path, &what);
        // And left as it is.
        assert_eq!(std::fs::read(&path).unwrap(), bad);
    }
    // A frame that is whole and does not belong there.
    let without = [&log[..at[1]], &log[at[2]..]].concat();
    is_damaged(with_log(dir.path(), &without), &path, "holds entry 3");
}

#[test]
fn a_vote_survives_and_cannot_be_lost() {
    let (dir, _) = written();
    let path = dir.path().join("vote");
    let d = open(dir.path()).unwrap();
    d.vote(Vote::new_committed(4, 9)).unwrap();
    drop(d);
    let d = open(dir.path()).unwrap();
    let vote = || d.kept(|k| k.vote).unwrap();
    assert_eq!(vote(), Some(Vote::new_committed(4, 9)));
    // Our own office ends with the process.
    d.vote(Vote::new_committed(5, number("me"))).unwrap();
    assert_eq!(vote(), Some(Vote::new_committed(5, number("me"))));
    drop(d);
    let d = open(dir.path()).unwrap();
    assert_eq!(
        d.kept(|k| k.vote).unwrap(),
        Some(Vote::new(5, number("me")))
    );
    drop(d);

    // A new one that was never renamed.
    std::fs::write(dir.path().join("vote.new"), b"half").unwrap();
    drop(open(dir.path()).unwrap());
    let whole = std::fs::read(&path).unwrap();
    for bad in [&whole[..whole.len() - 1], &[&whole[..], b"x"].concat(), b""] {
        std::fs::write(&path, bad).unwrap();
        is_damaged(open(dir.path()), &path, "the vote is not whole");
    }
    std::fs::remove_file(&path).unwrap();
    is_damaged(open(dir.path()), &path, "the log's last entry is of T1-N7");
}

#[test]
fn files_that_are_missing_or_not_ours() {
    let (dir, _) = written();
    let d = open(dir.path()).unwrap();
    let taken = open(dir.path()).err().unwrap();
    assert!(matches!(taken, Error::Busy(_)), "{taken}");
    d.snapshot(saved(id(1, 3))).unwrap();
    d.purge(id(1, 3)).unwrap();
    drop(d);
    for (cluster, node) in [("c", "you"), ("d", "me")] {
        let e = Disk::open(os(), dir.path(), cluster, node).err().unwrap();
        assert!(matches!(e, Error::Config(_)), "{e}");
    }
    let snapshot = dir.path().join("snapshot");
    std::fs::remove_file(&snapshot).unwrap();
    is_damaged(open(dir.path()), &snapshot, "not in the snapshot");
    let log = dir.path().join("log");
    std::fs::remove_file(&log).unwrap();
    is_damaged(open(dir.path()), &log, "there is no log");
}

#[test]
fn after_a_failed_sync_nothing_works() {
    type Op = fn(&Disk) -> Result<()>;
    let ops: [Op; 5] = [
        |d| d.append(vec![entry(d.kept(|k| k.last().unwrap().index)? + 1)]),
        |d| d.vote(Vote::new(9, 9)),
        |d| d.truncate(4),
        |d| d.purge(id(1, 1)),
        |d| d.snapshot(saved(id(1, 4))),
    ];
    for first in ops {
        let (dir, _) = written();
        let env = Arc::new(Failing::default());
        let d = Disk::open(env.clone(), dir.path(), "c", "me").unwrap();
        env.fail(true);
        let e = first(&d).unwrap_err();
        assert!(matches!(e, Error::Poisoned(_)), "{e}");
        // The disk is well again, but what it has is not known.
        env.fail(false);
        for op in ops {
            assert!(matches!(op(&d), Err(Error::Poisoned(_))));
        }
        assert!(matches!(d.kept(|_| ()), Err(Error::Poisoned(_))));
        assert!(d.poison().get().is_some());
        drop(d);
        // A real failed sync may have left either; here the write was done.
        let d = open(dir.path()).unwrap();
        assert!(indices(&d).starts_with(&[0, 1, 2, 3, 4]));
    }
}

/// One frame, and its place in a file.
fn frame(body: &serde_json::Value) -> Vec<u8> {
    let body = body.to_string().into_bytes();
    let mut head = [0xF7, b'M', b'J', b'V', 0, 0, 0, 0];
    head[4..].copy_from_slice(&(body.len() as u32).to_le_bytes());
    let crc = mojim_format::crc32c(&[&head[..], &body].concat());
    [&head[..], &crc.to_le_bytes(), &body].concat()
}

/// Makes of a directory what a node of format 1 would have: the same entries and registers.
pub(super) fn as_format_1(dir: &Path) {
    let bodies = |name: &str| -> Vec<serde_json::Value> {
        let bytes = std::fs::read(dir.join(name)).unwrap();
        let mut rest = &bytes[..];
        let mut all = Vec::new();
        while !rest.is_empty() {
            let len = u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
            all.push(serde_json::from_slice(&rest[12..12 + len]).unwrap());
            rest = &rest[12 + len..];
        }
        all
    };
    let mut log = bodies("log");
    log[0]["format"] = 1.into();
    log[0].as_object_mut().unwrap().remove("incarnation");
    for e in log[1..].iter_mut().flat_map(|f| f.as_array_mut().unwrap()) {
        if let Some(normal) = e["payload"].get_mut("Normal") {
            *normal = match normal.get_mut("swap") {
                Some(swap) => swap.take(),
                // Directories are not named there. This swap does nothing, as it does not follow.
                None => serde_json::to_value(Swap {
                    volume: "v".into(),
                    new: register(u64::MAX, "nobody"),
                })
                .unwrap(),
            };
        }
    }
    let log: Vec<u8> = log.iter().flat_map(frame).collect();
    std::fs::write(dir.join("log"), log).unwrap();
    if dir.join("snapshot").exists() {
        let mut saved = bodies("snapshot").remove(0);
        saved["registers"] = saved["agreed"]["registers"].take();
        saved.as_object_mut().unwrap().remove("agreed");
        std::fs::write(dir.join("snapshot"), frame(&saved)).unwrap();
    }
}

/// After an upgrade a voter refused its own directory, and nothing said what to do.
#[test]
fn a_directory_of_format_1_is_read() {
    let (dir, _) = written();
    let d = open(dir.path()).unwrap();
    d.snapshot(saved(id(1, 2))).unwrap();
    d.purge(id(1, 1)).unwrap();
    let before = d.incarnation();
    drop(d);
    as_format_1(dir.path());
    let d = open(dir.path()).unwrap();
    assert_eq!(indices(&d), [2, 3, 4]);
    d.kept(|k| {
        assert_eq!(k.snapshot, Some(saved(id(1, 2))));
        assert_eq!(k.entries[&3], entry(3));
    })
    .unwrap();
    // It is another directory from then on, and stays that one.
    let now = d.incarnation();
    assert_ne!(now, before);
    drop(d);
    // A crash between the snapshot and the log of the first opening.
    let snapshot = std::fs::read(dir.path().join("snapshot")).unwrap();
    assert_eq!(open(dir.path()).unwrap().incarnation(), now);
    as_format_1(dir.path());
    std::fs::write(dir.path().join("snapshot"), snapshot).unwrap();
    assert_eq!(indices(&open(dir.path()).unwrap()), [2, 3, 4]);
    let log = frame(&serde_json::json!({ "format": 3 }));
    let e = with_log(dir.path(), &log).err().unwrap();
    assert!(matches!(e, Error::Unsupported(_)), "{e}");
    let log =
        frame(&serde_json::json!({ "format": 2, "cluster": "c", "node": "me", "purged": null }));
    is_damaged(
        with_log(dir.path(), &log),
        &dir.path().join("log"),
        "no incarnation",
    );
}

/// What is given up stays given up, whatever else is written.
#[test]
fn a_directory_that_was_given_up_says_so() {
    let (dir, _) = written();
    let d = open(dir.path()).unwrap();
    let promised = d.kept(|k| k.promised()).unwrap();
    assert_eq!((promised.term, promised.node, promised.entries), (1, 7, 5));
    assert_eq!(d.kept(|k| k.outdated.clone()).unwrap(), None);
    d.give_up("it is old").unwrap();
    d.append(vec![entry(5)]).unwrap();
    d.truncate(3).unwrap();
    drop(d);
    let d = open(dir.path()).unwrap();
    assert_eq!(
        d.kept(|k| k.outdated.clone()).unwrap().unwrap(),
        "it is old"
    );
    assert_eq!(indices(&d), [0, 1, 2]);
}
