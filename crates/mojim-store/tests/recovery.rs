//! What is read back from logs that are shorter than they were, or that hold leftovers of an
//! earlier epoch; and what stays beside a log for as long as it is needed.
//!
//! Owns its temporary directories.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use mojim_config::MediumKind;
use mojim_env::Env;
use mojim_format::{EpochStart, Op, OpKind, RecordWriter, View};
use mojim_protocol::History;
use mojim_store::area::spill_path;
use mojim_store::log::{CONTROL_LEN, Known, Log, LogSpec};
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
    };
    Store::open(&env(), spec).unwrap()
}

/// A new volume of one epoch.
fn begin(store: &Store) -> u64 {
    store.make_new().unwrap();
    store.begin_epoch(2, 1, View::default()).unwrap();
    store.superblock().volume_id
}

/// Appends a record of one operation, and returns where it lies.
fn append(log: &Log, (volume, epoch): (u64, u64), lsn: u64, kind: OpKind, payload: &[u8]) -> u64 {
    let len = RecordWriter::len_for(1, payload.len());
    let head = log.head();
    let at = log.place(head, len).unwrap();
    // SAFETY: this thread alone appends, at the place found for the present head.
    let slot = unsafe { log.slot(head, at, len, volume, lsn) };
    let mut w = RecordWriter::new(slot, 1);
    w.op(Op {
        file: 1,
        kind,
        offset: 0,
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
    let known = Known {
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
