//! Logs against a list of records, also where memory is damaged.
//!
//! The simulator (`mojim-sim`, `shadow`) enumerates what a loss of power leaves.

use std::collections::VecDeque;

use super::*;
use mojim_env::Context;
use proptest::prelude::*;

/// Words in which everything is durable at once, unless the disk is full.
#[derive(Clone)]
struct Words(Vec<u64>, bool);

impl Medium for Words {
    fn load(&self, word: usize) -> u64 {
        self.0[word]
    }

    fn store(&mut self, word: usize, value: u64) {
        self.0[word] = value;
    }

    fn flush(&mut self, word: usize, words: usize) {
        assert!(word + words <= self.0.len());
    }

    fn fence(&mut self) -> Result<()> {
        match self.1 {
            false => Ok(()),
            true => Err(std::io::Error::from_raw_os_error(libc::ENOSPC)).context(|| "full".into()),
        }
    }
}

fn made(encoding: Encoding, ring: usize) -> Words {
    let mut words = Words(vec![0; LOG_RING_WORD + ring], false);
    Log::make(&mut words, LOG_RING_WORD + ring, encoding, 0x5a17).unwrap();
    words
}

fn open(words: &Words) -> Result<Log<Words>, String> {
    Log::open(words.clone(), words.0.len()).unwrap()
}

fn records(log: &Log<Words>) -> Vec<Vec<u8>> {
    let (mut at, mut all, mut out) = (log.head(), Vec::new(), Vec::new());
    while let Some(next) = log.read(at, &mut out).unwrap() {
        all.push(out.clone());
        at = next;
    }
    all
}

#[derive(Debug, Clone)]
enum Step {
    Append(Vec<u8>),
    Truncate(usize),
    Open,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => prop::collection::vec(any::<u8>(), 0..150).prop_map(Step::Append),
        3 => (0usize..6).prop_map(Step::Truncate),
        1 => Just(Step::Open),
    ];
    prop::collection::vec(step, 0..80)
}

fn which() -> impl Strategy<Value = Encoding> {
    (0usize..3).prop_map(|n| Encoding::ALL[n].0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_log_is_a_list(encoding in which(), ring in 16usize..90, steps in steps()) {
        let mut log = open(&made(encoding, ring)).unwrap();
        let mut model: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
        let mut out = Vec::new();
        for step in steps {
            match step {
                Step::Append(record) => match log.append(&record) {
                    Ok(at) => model.push_back((at, record)),
                    Err(e) => {
                        prop_assert_eq!(e.errno(), libc::ENOBUFS);
                        prop_assert!(record.len() > log.room() || record.is_empty());
                    }
                },
                Step::Truncate(n) => {
                    model.drain(..n.min(model.len()));
                    let to = model.front().map_or(log.tail(), |r| r.0);
                    log.truncate(to).unwrap();
                    prop_assert_eq!(log.head(), to);
                }
                Step::Open => {
                    let words = log.medium().clone();
                    log = open(&words).unwrap();
                }
            }
            // A record begins at the model's positions, and nowhere else.
            for at in log.head()..log.tail() {
                let (must, found) = (model.iter().find(|r| r.0 == at), log.read(at, &mut out));
                prop_assert_eq!(found.is_ok(), must.is_some(), "{}", at);
                prop_assert!(must.is_none_or(|r| r.1 == out));
            }
            let found: Vec<_> = records(&log);
            let must: Vec<_> = model.iter().map(|r| r.1.clone()).collect();
            prop_assert_eq!(found, must);
        }
    }

    /// Whatever the words are, the scan ends, and what it finds can be read and added to.
    #[test]
    fn damage_is_no_end(
        encoding in which(),
        steps in steps(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0u32..64), 1..9),
    ) {
        let mut log = open(&made(encoding, 70)).unwrap();
        for step in steps {
            match step {
                Step::Append(record) => drop(log.append(&record)),
                _ => log.truncate(log.tail()).unwrap(),
            }
        }
        let mut words = log.medium().clone();
        let mut counted = true;
        for (at, value, shift) in damage {
            let at = at.index(words.0.len());
            words.0[at] = value >> shift;
            counted &= at != LOG_OPENING_WORD;
        }
        if let Ok(mut log) = open(&words) {
            let before = records(&log);
            if log.append(b"more").is_ok() {
                let again = open(&log.medium().clone()).unwrap();
                let all = records(&again);
                prop_assert_eq!(&all[..before.len()], &before[..]);
                prop_assert!(all.len() == before.len() + 1 || !counted);
            }
        }
    }

    /// With a checksum, a record that was changed is not found, nor what follows it.
    #[test]
    fn a_checksum_finds_what_was_changed(at in 0usize..12, bit in 0u32..64) {
        let mut log = open(&made(Encoding::Checksum, 70)).unwrap();
        log.append(&[1; 32]).unwrap();
        log.append(&[2; 32]).unwrap();
        let mut words = log.medium().clone();
        words.0[LOG_RING_WORD + at] ^= 1 << bit;
        let found = records(&open(&words).unwrap());
        prop_assert_eq!(found.len(), at / 6);
    }
}

/// A record was damaged. The log ended before it, as it must. An append of the same length took
/// its place, and the records behind it, which the log had lost, were there again.
#[test]
fn records_behind_a_damaged_one_do_not_come_back() {
    for openings in [1, 2, 3] {
        let mut log = open(&made(Encoding::Checksum, 70)).unwrap();
        for n in 0..5u8 {
            log.append(&[n; 4]).unwrap();
        }
        let mut words = log.medium().clone();
        words.0[LOG_RING_WORD + 3 + 2] ^= 1;
        for _ in 0..openings {
            log = open(&words).unwrap();
            assert_eq!(records(&log), [vec![0; 4]]);
            words = log.medium().clone();
        }
        log.append(b"more").unwrap();
        let words = log.medium().clone();
        let mut again = open(&words).unwrap();
        assert_eq!(records(&again), [vec![0; 4], b"more".to_vec()]);
        // Nor does one more append bring them back, in yet another opening.
        again.append(b"less").unwrap();
        let all = records(&open(&again.medium().clone()).unwrap());
        assert_eq!(all.len(), 3);
    }
}

/// Openings are compared where their count begins anew, too, and a count that is damaged is not
/// believed where the log's records say that it is too low.
#[test]
fn openings_do_not_decrease() {
    let mut words = made(Encoding::Checksum, 70);
    words.0[LOG_OPENING_WORD] = (1 << 20) - 2;
    for n in 0..6u8 {
        let mut log = open(&words).unwrap();
        assert_eq!(records(&log).len(), usize::from(n));
        log.append(&[n; 4]).unwrap();
        words = log.medium().clone();
        match n {
            3 => words.0[LOG_OPENING_WORD] = u64::MAX,
            4 => words.0[LOG_OPENING_WORD] = 0,
            _ => {}
        }
    }
}

#[test]
fn positions_that_are_none_are_refused() {
    for (encoding, _) in Encoding::ALL {
        let mut log = open(&made(encoding, 64)).unwrap();
        let first = log.append(&[3; 20]).unwrap();
        let second = log.append(&[4; 20]).unwrap();
        let mut out = Vec::new();
        assert_eq!(log.read(first, &mut out).unwrap(), Some(second));
        assert_eq!(out, [3; 20]);
        for at in [log.tail() + 1, u64::MAX] {
            assert_eq!(log.read(at, &mut out).unwrap_err().errno(), libc::EINVAL);
            assert_eq!(log.truncate(at).unwrap_err().errno(), libc::EINVAL);
        }
        assert_eq!(log.truncate(second + 1).unwrap_err().errno(), libc::EINVAL);
        log.truncate(second).unwrap();
        assert!(log.read(first, &mut out).is_err());
        assert!(log.truncate(first).is_err());
        assert_eq!(records(&log), [[4; 20]]);
    }
}

/// A record began within another one: bytes that look like a record were read as one.
#[test]
#[cfg_attr(miri, ignore = "millions of positions: too many to interpret")]
fn no_record_begins_within_another() {
    for (encoding, _) in Encoding::ALL {
        // The ring wraps within a span, and the spans' slots are used again.
        let mut log = open(&made(encoding, 10_000)).unwrap();
        let mut all = VecDeque::new();
        for n in 0..6_000u64 {
            let record: Vec<u8> = [2 + n % 7; 8].map(u64::to_le_bytes).concat();
            while log.room() < 64 {
                all.drain(..100);
                log.truncate(all[0]).unwrap();
            }
            all.push_back(log.append(&record).unwrap());
        }
        let mut out = Vec::new();
        let begin = |log: &Log<Words>, out: &mut _| -> Vec<u64> {
            let every = log.head()..log.tail();
            every.filter(|at| log.read(*at, out).is_ok()).collect()
        };
        assert_eq!(all, begin(&log, &mut out), "{encoding:?}");
        let again = open(&log.medium().clone()).unwrap();
        assert_eq!(all, begin(&again, &mut out), "{encoding:?}");
    }
}

/// A full disk was told as a full ring, of which nothing changes: the record, appended again as
/// one may then, was there twice.
#[test]
fn a_full_disk_is_no_full_ring() {
    for (encoding, _) in Encoding::ALL {
        let mut log = open(&made(encoding, 64)).unwrap();
        let full = log.append(&[0; 1000]).unwrap_err().errno();
        assert_eq!(log.tail(), 0);
        log.medium().1 = true;
        let doubt = log.append(&[1; 8]).unwrap_err().errno();
        assert_eq!((full, doubt), (libc::ENOBUFS, libc::ENOSPC));
        // In doubt: the next one that succeeds makes it durable, too.
        log.medium().1 = false;
        log.append(&[2; 8]).unwrap();
        let again = open(&log.medium().clone()).unwrap();
        assert_eq!(records(&again), [[1; 8], [2; 8]]);
    }
}
