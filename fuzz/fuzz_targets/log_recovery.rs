//! A log's ring with valid records, pads, leftovers and damage in it:
//! `Log::recover` neither panics nor returns anything but valid, ascending
//! records of their epoch, and without damage it returns all of them.
//!
//! The input is a script: a line of settings, steps that fill the ring, and
//! after a zero byte bytes that are changed in it.

#![no_main]

use std::path::PathBuf;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use mojim_config::MediumKind;
use mojim_env::Env;
use mojim_store::log::{CONTROL_LEN, LogIdentity, Log, LogSpec};
use mojim_format::pad::Pad;
use mojim_format::{EpochStart, Op, OpKind, RecordView, RecordWriter};
use mojim_protocol::History;
use mojim_sim::{Faults, World};

const SIZE: usize = 8192;
const VOLUME: u64 = 9;

thread_local! {
    static ENV: Arc<dyn Env> = World::new(1, Faults::none()).env("a");
}

struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<usize> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first as usize)
    }
}

fuzz_target!(|data: &[u8]| {
    ENV.with(|env| run(env, data));
});

fn run(env: &Arc<dyn Env>, data: &[u8]) {
    let mut s = Script(data);
    let mut set = [0usize; 6];
    for x in &mut set {
        *x = s.byte().unwrap_or(0);
    }
    let align = if set[0] % 2 == 0 { 64 } else { 512 };
    let lap = set[0] / 2 % 3;
    let start = (lap * SIZE + set[1] * 64 % SIZE / align * align) as u64;
    let checkpoint = set[2] as u64;
    let second = checkpoint + 1 + set[3] as u64 % 8;
    let history = History::from_entries(&[
        EpochStart { epoch: 1, first_lsn: 1 },
        EpochStart { epoch: 3, first_lsn: second },
    ])
    .expect("ascending");
    let spec = LogSpec {
        lane: 0,
        medium: MediumKind::Dram,
        path: PathBuf::from("/log"),
        ring: PathBuf::from("/ring"),
        size: SIZE as u64,
    };
    let known = LogIdentity {
        incarnation: 7,
        nonce: 1,
        or: 0,
    };
    let (log, _) = Log::open(env, spec, align as u64, known, start, None).expect("it opens");
    // SAFETY: the ring's bytes; nothing else uses this log's memory here.
    let ring = unsafe { std::slice::from_raw_parts_mut(log.memory().ptr().add(CONTROL_LEN), SIZE) };
    ring.fill(set[4] as u8);

    let mut at = start as usize;
    let end = start as usize + SIZE;
    let mut lsn = checkpoint;
    let mut placed = Vec::new();
    let mut sound = true;
    while let Some(step) = s.byte() {
        if step == 0 {
            break;
        }
        let how = s.byte().unwrap_or(0);
        let off = at % SIZE;
        match step % 8 {
            // A record as the log would have it, at times a leftover.
            1..=5 => {
                let n = how * 8;
                let len = RecordWriter::len_for(1, n);
                let need = len.next_multiple_of(align);
                let mut to = at;
                if off + need > SIZE {
                    to = at + SIZE - off;
                }
                if to + need > end {
                    break;
                }
                let new = match step % 8 {
                    4 => lsn.saturating_sub(how as u64 % 4).max(1),
                    _ => lsn + 1 + (step as u64 / 8) % 3,
                };
                let epoch = match step % 8 {
                    5 => 2,
                    _ => history.epoch_at(new).expect("from 1"),
                };
                let volume = if step == 0xF9 { VOLUME + 1 } else { VOLUME };
                if to != at {
                    Pad { volume: VOLUME, lsn: new }.encode(&mut ring[off..]);
                }
                let o = to % SIZE;
                let mut w = RecordWriter::new(&mut ring[o..o + len], 1);
                w.op(Op { file: 1, kind: OpKind::Write, offset: 0, len: n as u32 });
                w.payload_mut(n).fill(how as u8);
                w.finish(volume, new, epoch, 0, true, new - 1);
                let good = new > lsn && step % 8 != 5 && volume == VOLUME;
                sound &= good;
                if sound {
                    placed.push(new);
                }
                lsn = lsn.max(new);
                at = to + need;
            }
            // A pad where none belongs.
            6 => {
                sound = false;
                let pad = Pad { volume: VOLUME, lsn: lsn + how as u64 % 3 };
                pad.encode(&mut ring[off..]);
                at += align;
            }
            // A hole.
            _ => {
                sound = false;
                at += align * (1 + how % 4);
            }
        }
        if at >= end {
            break;
        }
    }
    let mut damaged = false;
    while let (Some(hi), Some(lo), Some(v)) = (s.byte(), s.byte(), s.byte()) {
        damaged = true;
        ring[(hi * 256 + lo) % SIZE] = v as u8;
    }

    let found = log.recover(VOLUME, &history, checkpoint);
    assert!(log.start() >= start);
    let (mut last, mut next) = (checkpoint, log.start());
    for f in &found {
        assert!(f.lsn > last && f.at >= next && f.next <= start + SIZE as u64);
        assert!(f.at % align as u64 == 0 && f.next % align as u64 == 0);
        let off = (f.at % SIZE as u64) as usize;
        let r = RecordView::decode(&ring[off..]).expect("what is found is valid");
        assert_eq!((r.header.lsn, r.header.volume), (f.lsn, VOLUME));
        assert_eq!(history.epoch_at(f.lsn), Some(r.header.epoch));
        (last, next) = (f.lsn, f.next);
    }
    assert_eq!(log.head(), next);
    if !damaged {
        let lsns: Vec<u64> = found.iter().map(|f| f.lsn).collect();
        assert!(lsns.starts_with(&placed), "{lsns:?} lacks some of {placed:?}");
    }
    // Reading what was recovered sees the same records.
    let mut at = log.start();
    for f in &found {
        let (r, here, next) = log.record(at).expect("it was found");
        assert_eq!((r.header.lsn, here, next), (f.lsn, f.at, f.next));
        at = next;
    }
    assert!(log.record(at).is_none());
    // Again, it finds the same. Where nothing was found, the start has gone
    // behind what was passed over, and with it went the knowledge of its order:
    // a leftover of the same LSN right behind it (seed `passed_over`), which no
    // log has that is written in laps, then looks like the first record.
    if !found.is_empty() || log.start() == start {
        assert_eq!(log.recover(VOLUME, &history, checkpoint), found);
    }
    // The look behind the head: nothing there was found, and it ends.
    let known = log.beyond(VOLUME, &history, checkpoint);
    assert!(damaged || known <= lsn);
}
