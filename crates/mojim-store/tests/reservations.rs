//! Threads that take room in a log and fill it side by side.
//!
//! Owns the logs, in memory, that they append to.

use std::path::Path;
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::*};

use mojim_config::MediumKind;
use mojim_env::Env;
use mojim_format::{Op, OpKind, RecordWriter};
use mojim_protocol::History;
use mojim_store::log::{Log, LogIdentity, LogSpec};
use mojim_store::reservations::{Full, Reservations, Taken};

const SIZE: u64 = 64 << 10;
const VOLUME: u64 = 7;
const EPOCH: u64 = 1;

fn open(dir: &Path) -> Log {
    let env: Arc<dyn Env> = Arc::new(mojim_linux::Os::new().unwrap());
    let spec = LogSpec {
        lane: 0,
        medium: MediumKind::Dram,
        path: dir.join("log"),
        ring: dir.join("ring"),
        size: SIZE,
    };
    let known = LogIdentity {
        incarnation: 5,
        nonce: 6,
        or: 0,
    };
    let log = Log::open(&env, spec, 64, known, 0, None).unwrap().0;
    log.own(known);
    log
}

/// Makes the record of `lsn` in room that was taken for it alone.
fn fill(log: &Log, taken: Taken, lsn: u64, payload: &[u8]) {
    let len = RecordWriter::len_for(1, payload.len());
    let at = taken.at;
    assert_eq!(at, log.fit(taken.begin, len));
    // SAFETY: the room was taken for this record, and is not joined yet.
    let slot = unsafe { log.slot(taken.begin, at, len, VOLUME, lsn) };
    let mut w = RecordWriter::new(slot, 1);
    w.op(Op {
        file: 1,
        kind: OpKind::Write,
        offset: 0,
        len: payload.len() as u32,
    });
    w.payload(payload);
    w.finish(VOLUME, lsn, EPOCH, 0, true, 0);
}

fn len(payload: usize) -> [usize; 1] {
    [RecordWriter::len_for(1, payload)]
}

fn lsns(log: &Log) -> Vec<u64> {
    log.records(log.start()).map(|r| r.header.lsn).collect()
}

/// What is joined before its turn is no part of the log until everything before it is filled, and
/// whoever fills that joins it.
#[test]
fn what_lies_behind_a_hole_is_no_part_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path());
    let room = Reservations::new(log.head(), SIZE);
    let taken: Vec<_> = (0..4)
        .map(|_| room.turn().take(&log, &len(100)).unwrap())
        .collect();
    for (i, t) in taken.iter().enumerate() {
        fill(&log, *t, i as u64 + 1, &[1; 100]);
    }
    assert!(!room.join(&log, taken[3]));
    assert!(!room.join(&log, taken[1]));
    assert_eq!(lsns(&log), []);
    assert!(room.join(&log, taken[0]), "over another one's");
    assert_eq!(lsns(&log), [1, 2]);
    assert!(room.join(&log, taken[2]));
    assert_eq!(lsns(&log), [1, 2, 3, 4]);
    room.wait_filled(&log);
}

/// As many reservations as there are places: the next one gets none until the first ones are over,
/// and a note of an earlier use is not taken for its own.
#[test]
fn a_place_is_used_again_when_its_reservation_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path());
    let room = Reservations::new(log.head(), SIZE);
    let mut lsn = 0;
    for _ in 0..3 {
        let mut all = Vec::new();
        while let Ok(taken) = room.turn().take(&log, &len(8)) {
            all.push(taken);
        }
        assert!((150..=256).contains(&all.len()), "{}", all.len());
        let full = room.turn().take(&log, &len(8));
        assert_eq!(full, Err(Full::Places));
        for t in all.iter().rev() {
            // From the last one on: each but the first one leaves a note.
            let number = lsn + 1 + all.iter().position(|other| other == t).unwrap() as u64;
            fill(&log, *t, number, &[2; 8]);
            let is_first = *t == all[0];
            assert_eq!(room.join(&log, *t), is_first);
        }
        lsn += all.len() as u64;
        assert_eq!(lsns(&log).last(), Some(&lsn));
        log.release(log.head());
    }
    room.restart(&log);
    assert!(room.turn().take(&log, &len(8)).is_ok());
}

/// Threads take and fill room of several sizes, over the ring's end again and again, while one
/// reads what is part of the log: whole records, in the order of their LSNs.
#[test]
fn threads_fill_side_by_side() {
    let (threads, each) = if cfg!(miri) { (3, 40) } else { (4, 20_000) };
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path());
    let room = Reservations::new(log.head(), SIZE);
    let (next, begin) = (AtomicU64::new(1), Barrier::new(threads + 1));
    std::thread::scope(|s| {
        for t in 0..threads {
            let (log, room, next, begin) = (&log, &room, &next, &begin);
            s.spawn(move || {
                begin.wait();
                for i in 0..each {
                    let size = 8 + (i * 37 + t * 101) % 700;
                    let (taken, lsn) = loop {
                        let mut turn = room.turn();
                        if let Ok(taken) = turn.take(log, &len(size)) {
                            break (taken, next.fetch_add(1, SeqCst));
                        }
                        drop(turn);
                        std::thread::yield_now();
                    };
                    fill(log, taken, lsn, &vec![lsn as u8; size]);
                    room.join(log, taken);
                }
            });
        }
        begin.wait();
        let (mut records, mut last) = (log.records(0), 0);
        while last < (threads * each) as u64 {
            let Some(r) = records.next() else {
                std::thread::yield_now();
                continue;
            };
            let whole = mojim_format::RecordView::decode(r.bytes()).unwrap();
            assert_eq!(whole.header.lsn, last + 1);
            let (_, payload) = whole.ops().next().unwrap();
            assert!(payload.iter().all(|b| *b == (last + 1) as u8));
            last += 1;
            log.release(r.next);
        }
    });
    room.wait_filled(&log);
    assert_eq!(room.end(), log.head());
}

/// A process was killed while one of its threads made a record and others had made theirs behind
/// it. What lies before that one is taken, also where half of it is made. (`recovery.rs` has an older
/// record in its place.)
#[test]
fn the_next_process_takes_what_is_before_a_hole() {
    let dir = tempfile::tempdir().unwrap();
    let mut history = History::default();
    history.begin(EPOCH, 1, 0);
    for is_torn in [false, true] {
        let log = open(dir.path());
        let room = Reservations::new(log.head(), SIZE);
        let mut append = |lsn: u64| {
            let taken = room.turn().take(&log, &len(100)).unwrap();
            fill(&log, taken, lsn, &[lsn as u8; 100]);
            room.join(&log, taken);
        };
        (1..=3).for_each(&mut append);
        let hole = room.turn().take(&log, &len(100)).unwrap();
        if is_torn {
            fill(&log, hole, 4, &[4; 100]);
            let at = hole.begin as usize % SIZE as usize + 90;
            // SAFETY: inside the ring, where nobody else is.
            unsafe { *log.memory().ptr().add(mojim_store::log::CONTROL_LEN + at) ^= 1 };
        }
        append(5);
        drop(log);
        let log = open(dir.path());
        let found = log.recover(VOLUME, &history, 0);
        let found: Vec<_> = found.iter().map(|f| f.lsn).collect();
        assert_eq!(found, [1, 2, 3], "torn: {is_torn}");
    }
}
