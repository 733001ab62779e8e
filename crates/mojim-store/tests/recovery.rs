//! Tests of recovery from damaged or reused logs, and of the files beside a log.
//!
//! The logs are shorter than they were, or hold leftovers of an earlier epoch: the tests check what
//! is read back from them. They also check what stays beside a log for as long as it is needed.
//!
//! Owns its temporary directories.

// Seen to fail, each by a defect made on purpose or found:
// - records of an older epoch taken
// - what records carry not counted as known
// - spill files removed at the checkpoint
// - a reset that leaves marks
// - the superblock's note left out

use std::fs;
use std::path::Path;
use std::sync::Arc;

use mojim_config::MediumKind;
use mojim_env::{Env, Locker, Result};
use mojim_format::{EpochStart, Op, OpKind, RecordWriter, View};
use mojim_protocol::History;
use mojim_store::area::spill_path;
use mojim_store::log::{CONTROL_LEN, Log, LogIdentity, LogSpec};
use mojim_store::reservations::Reservations;
use mojim_store::store::{Store, StoreSpec};

const SIZE: u64 = 64 << 10;

fn env() -> Arc<dyn Env> {
    Arc::new(mojim_linux::Os::new().unwrap())
}

/// A log in memory that outlives its process, as a file of `dir`.
fn log_spec(dir: &Path, lane: usize) -> LogSpec {
    LogSpec {
        lane,
        medium: MediumKind::Dram,
        path: dir.join(format!("log.{lane}")),
        ring: dir.join(format!("ring.{lane}")),
        size: SIZE,
    }
}

fn open(dir: &Path, lanes: usize) -> Store {
    try_open(dir, lanes).unwrap()
}

fn try_open(dir: &Path, lanes: usize) -> Result<Store> {
    let spec = StoreSpec {
        cluster: "c".into(),
        volume: "v".into(),
        node: "a".into(),
        dir: dir.join("data"),
        meta: dir.join("meta"),
        logs: (0..lanes).map(|lane| log_spec(dir, lane)).collect(),
        rank: 0,
        holders: 2,
        max_open: 16,
        copy_streams: 1,
        by_hand: true,
        locker: Locker::Program,
    };
    Store::open(&env(), spec)
}

/// A new volume of one epoch.
fn begin(store: &Store) -> u64 {
    store.make_new().unwrap();
    store.begin_epoch(2, 1, View::default()).unwrap();
    store.superblock().volume_id
}

/// Appends a record of one operation, and returns where it lies.
fn append(log: &Log, of: (u64, u64), lsn: u64, kind: OpKind, payload: &[u8]) -> u64 {
    append_to(log, of, lsn, (1, kind, 0), payload)
}

/// The same for an operation of any file and offset.
fn append_to(
    log: &Log,
    (volume, epoch): (u64, u64),
    lsn: u64,
    (file, kind, offset): (u32, OpKind, u64),
    payload: &[u8],
) -> u64 {
    let len = RecordWriter::len_for(1, payload.len());
    let head = log.head();
    let at = log.place(head, len).unwrap();
    // SAFETY: this thread alone appends, at the place found for the present head.
    let slot = unsafe { log.slot(head, at, len, volume, lsn) };
    let mut w = RecordWriter::new(slot, 1);
    w.op(Op {
        file,
        kind,
        offset,
        len: payload.len() as u32,
    });
    w.payload(payload);
    w.finish(volume, lsn, epoch, 0, true, lsn - 1);
    log.publish(at, len);
    at
}

/// Records 10 to 20 of epoch 1 were given up, and 10 to 12 of epoch 2 took the place of the first
/// of them, with the same sizes. The leftovers behind them ascend without a gap, and were read as
/// 13 to 20 if an older epoch passed for the present one.
#[test]
fn leftovers_of_an_older_epoch_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let known = LogIdentity {
        incarnation: 5,
        nonce: 6,
        or: 0,
    };
    let open = || {
        let spec = log_spec(dir.path(), 0);
        Log::open(&env(), spec, 64, known, 0, None).unwrap().0
    };
    let log = open();
    log.own(known);
    let mut ends = Vec::new();
    for lsn in 1..=20 {
        append(&log, (7, 1), lsn, OpKind::Write, &[lsn as u8; 100]);
        ends.push(log.head());
    }
    log.rewind(ends[8]);
    for lsn in 10..=12 {
        append(&log, (7, 2), lsn, OpKind::Write, &[lsn as u8; 100]);
        assert_eq!(log.head(), ends[lsn as usize - 1], "the same size");
    }
    drop(log);
    let entry = |epoch, first_lsn| EpochStart { epoch, first_lsn };
    let history = History::from_entries(&[entry(1, 1), entry(2, 10)]).unwrap();
    let log = open();
    let found = log.recover(7, &history, 0);
    let found: Vec<u64> = found.iter().map(|f| f.lsn).collect();
    assert_eq!(found, (1..=12).collect::<Vec<_>>());
    assert_eq!(log.head(), ends[11]);
    // Nor do they tell of anything that was acknowledged.
    assert_eq!(log.beyond(7, &history, 0), 0);
}

/// Of two lanes one lost its end, without a trace. Only the records of the other say that what is
/// missing was committed: no node goes on alone with less.
#[test]
fn a_lane_tells_what_the_other_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 2);
    let of = (begin(&store), 2);
    let mut cut = 0;
    for lsn in 1..=7 {
        let lane = (lsn + 1) as usize % 2;
        let at = append(&store.logs()[lane], of, lsn, OpKind::Write, b"x");
        if lsn == 4 {
            cut = at;
        }
    }
    drop(store);
    let path = log_spec(dir.path(), 1).path;
    let mut bytes = fs::read(&path).unwrap();
    bytes[CONTROL_LEN + cut as usize..].fill(0);
    fs::write(&path, bytes).unwrap();
    let store = open(dir.path(), 2);
    assert_eq!(store.tail(), 3);
    assert_eq!(store.known_missing(), Some(6));
    assert_eq!(store.known_acknowledged(), 6);
    assert!(!store.has_hole());
    assert!(store.check_complete().is_err());
}

/// The only log of a volume without a mirror was put back as of an earlier time: the volume began
/// with less, and nobody was told. The superblock says what the log had.
#[test]
fn a_log_of_an_earlier_time_is_known_by_the_superblock() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 1);
    let of = (begin(&store), 2);
    let mut cut = 0;
    for lsn in 1..=9 {
        let at = append(&store.logs()[0], of, lsn, OpKind::Write, b"x");
        if lsn == 6 {
            cut = at;
        }
    }
    store.persist_all().unwrap();
    store.note_logged(8).unwrap();
    // Not again so soon.
    store.note_logged(9).unwrap();
    assert_eq!(store.superblock().logged, 8);
    drop(store);
    let path = log_spec(dir.path(), 0).path;
    let mut bytes = fs::read(&path).unwrap();
    bytes[CONTROL_LEN + cut as usize..].fill(0);
    fs::write(&path, bytes).unwrap();
    let store = open(dir.path(), 1);
    assert_eq!((store.tail(), store.known_missing()), (5, Some(8)));
    let why = store.check_complete().unwrap_err().to_string();
    assert!(why.contains("log.0") && why.contains("LSN 8"), "{why}");
    // An operator goes on with what is there.
    store.truncate(5).unwrap();
    drop(store);
    let store = open(dir.path(), 1);
    store.check_complete().unwrap();
}

/// A record below the checkpoint that is kept for a backup may be sent again, with its spill file
/// ahead of it. The file once went with the checkpoint.
#[test]
fn a_spill_file_stays_as_long_as_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 1);
    let of = (begin(&store), 2);
    let there = || spill_path(&store.spec().meta, 9).exists();
    drop(store.spill_file(9).unwrap());
    store.sync_spill(9).unwrap();
    append(&store.logs()[0], of, 1, OpKind::Spill, &9u64.to_le_bytes());
    let hold = store.hold(0);
    store.hold_from(&hold, 0);
    store.persist_all().unwrap();
    assert_eq!(store.apply(1, usize::MAX).unwrap(), 1);
    store.checkpoint().unwrap();
    assert_eq!((store.checkpointed(), store.oldest()), (1, 1));
    assert!(there(), "a backup lacks its record");
    // The backup has it: with the next checkpoint the record goes, and the file.
    hold.advance(1);
    append(&store.logs()[0], of, 2, OpKind::Write, b"");
    store.persist_all().unwrap();
    store.apply(2, usize::MAX).unwrap();
    store.checkpoint().unwrap();
    assert!(store.oldest() > 1);
    assert!(!there());
}

/// While records waited to be applied, no file's size was looked at: one that was cut was missed
/// when a program attached, and a write behind the cut gave it its old size again, with zeros. A
/// size that records explain is none of that: after a crash a file may have any size that it had
/// since the checkpoint.
#[test]
fn a_size_is_wrong_unless_a_record_explains_it() {
    const SIZE: u64 = 8192;
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 1);
    let of = (begin(&store), 2);
    let mut lsn = 0;
    let mut record = |store: &Store, what: (u32, OpKind, u64), payload: &[u8]| {
        lsn += 1;
        append_to(&store.logs()[0], of, lsn, what, payload);
        lsn
    };
    for (file, name) in [(1, b"f"), (2, b"g"), (3, b"h")] {
        record(&store, (file, OpKind::Create, 0), name);
        record(&store, (file, OpKind::Resize, SIZE), b"");
    }
    let last = record(&store, (1, OpKind::Write, SIZE - 1), b"x");
    store.persist_all().unwrap();
    store.apply_all(last).unwrap();
    store.checkpoint().unwrap();
    // From here on these wait.
    record(&store, (2, OpKind::Write, SIZE - 1), b"x");
    record(&store, (3, OpKind::Resize, 100), b"");
    let tail = record(&store, (3, OpKind::Resize, 2 * SIZE), b"");
    store.persist_all().unwrap();
    drop(store);
    let size = |name: &str, size: u64| {
        let at = dir.path().join("data").join(name);
        let f = fs::File::options().write(true).open(at).unwrap();
        f.set_len(size).unwrap();
    };
    let damaged = |found: Result<()>, parts: &[&str]| {
        let said = found.expect_err("noticed").to_string();
        assert!(parts.iter().all(|p| said.contains(p)), "{said}");
    };
    let opened = || try_open(dir.path(), 1).map(drop);
    // Nothing waits for the one; of the other no size does.
    for name in ["f", "g"] {
        for other in [100, SIZE + 1] {
            size(name, other);
            damaged(opened(), &[&format!("data/{name}"), &other.to_string()]);
        }
        size(name, SIZE);
    }
    // As crashes leave it.
    for other in [SIZE, 100, 2 * SIZE] {
        size("h", other);
        opened().unwrap();
    }
    fs::remove_file(dir.path().join("data/h")).unwrap();
    damaged(opened(), &["data/h", "missing"]);
    fs::write(dir.path().join("data/h"), [0; 100]).unwrap();
    // Also later, of every file once all is applied.
    let store = open(dir.path(), 1);
    store.check_sizes().unwrap();
    size("f", 100);
    damaged(store.check_sizes(), &["data/f"]);
    size("f", SIZE);
    store.apply_all(tail).unwrap();
    store.check_sizes().unwrap();
    size("h", SIZE);
    damaged(store.check_sizes(), &["data/h"]);
}

/// A record that was applied in part is lost, and with it what explains a file's size: the log is
/// damaged, and another node may mend the copy. It could not be opened where no record was left.
#[test]
fn a_record_that_is_lost_may_have_changed_any_size() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 1);
    let of = (begin(&store), 2);
    let log = &store.logs()[0];
    append(log, of, 1, OpKind::Create, b"f");
    append_to(log, of, 2, (1, OpKind::Resize, 8192), b"");
    store.persist_all().unwrap();
    store.apply_all(2).unwrap();
    store.checkpoint().unwrap();
    let lost = append_to(log, of, 3, (1, OpKind::Resize, 100), b"");
    store.persist_all().unwrap();
    store.note_logged(3).unwrap();
    drop(store);
    let file = dir.path().join("data/f");
    let file = fs::File::options().write(true).open(file).unwrap();
    file.set_len(100).unwrap();
    let path = log_spec(dir.path(), 0).path;
    let mut bytes = fs::read(&path).unwrap();
    bytes[CONTROL_LEN + lost as usize..].fill(0);
    fs::write(&path, bytes).unwrap();
    let store = open(dir.path(), 1);
    assert_eq!((store.tail(), store.known_missing()), (2, Some(3)));
    let why = store.check_complete().unwrap_err().to_string();
    assert!(why.contains("log.0"), "{why}");
}

/// Where a name passes to another file, the one that had it may be gone from the directory, and
/// the other one there with its size.
#[test]
fn a_renaming_that_waits_explains_both_files() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 1);
    let of = (begin(&store), 2);
    let log = &store.logs()[0];
    for (lsn, file, kind, size, name) in [
        (1, 1, OpKind::Create, 0, &b"f"[..]),
        (2, 1, OpKind::Resize, 100, b""),
        (3, 2, OpKind::Create, 0, b"g"),
        (4, 2, OpKind::Resize, 200, b""),
    ] {
        append_to(log, of, lsn, (file, kind, size), name);
    }
    store.persist_all().unwrap();
    store.apply_all(4).unwrap();
    store.checkpoint().unwrap();
    append_to(log, of, 5, (2, OpKind::Rename, 0), b"f");
    store.persist_all().unwrap();
    drop(store);
    let at = |name: &str| dir.path().join("data").join(name);
    fs::copy(at("g"), at("f")).unwrap();
    let store = open(dir.path(), 1);
    store.apply_all(5).unwrap();
    store.check_sizes().unwrap();
    assert_eq!(fs::metadata(at("f")).unwrap().len(), 200);
}

/// A process was killed while a thread made a record, and others had made theirs behind it. In its
/// place lay a whole record of an earlier lap, as long as that one, in a log that was empty otherwise:
/// recovery passes over it and finds what lies behind. That is no part of the copy all the same, nor
/// of what comes later.
#[test]
fn what_lies_behind_a_record_that_was_never_made_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    // Records of 256 bytes: a lap ends with the ring, without a pad.
    let payload = [7u8; 176];
    let len = RecordWriter::len_for(1, payload.len());
    let most = SIZE / 256;
    let store = open(dir.path(), 1);
    let volume = begin(&store);
    let log = &store.logs()[0];
    for lsn in 1..=most {
        append(log, (volume, 2), lsn, OpKind::Write, &payload);
    }
    assert_eq!(log.head(), SIZE);
    store.apply_all(most).unwrap();
    store.checkpoint().unwrap();
    assert_eq!(log.start(), SIZE);
    let room = Reservations::new(log.head(), SIZE);
    let hole = room.turn().take(log, &[len]).unwrap();
    let behind = room.turn().take(log, &[len]).unwrap();
    assert_eq!((hole.at, behind.at), (SIZE, SIZE + 256));
    // SAFETY: the room was taken for this record, and is not joined yet.
    let slot = unsafe { log.slot(behind.begin, behind.at, len, volume, most + 2) };
    let mut w = RecordWriter::new(slot, 1);
    w.op(Op {
        file: 1,
        kind: OpKind::Write,
        offset: 0,
        len: payload.len() as u32,
    });
    w.payload(&payload);
    w.finish(volume, most + 2, 2, 0, true, most);
    assert!(!room.join(log, behind));
    drop(store);
    let store = open(dir.path(), 1);
    // The log is found to hold it, as what lies in the hole is passed over.
    assert_eq!(store.logs()[0].start(), SIZE + 256);
    assert_eq!(store.logs()[0].head(), SIZE + 512);
    assert_eq!(store.tail(), most);
    assert!(store.check_complete().is_ok(), "nothing is missing");
    store.truncate(most).unwrap();
    store.begin_epoch(3, most + 1, View::default()).unwrap();
    append(&store.logs()[0], (volume, 3), most + 1, OpKind::Write, &[1]);
    drop(store);
    let store = open(dir.path(), 1);
    assert_eq!(store.tail(), most + 1);
    assert_eq!(store.last_of(0), (most + 1, 0));
}
