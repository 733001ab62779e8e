//! Logs against a list of records, also where memory is damaged.
//!
//! What a loss of power leaves is enumerated by the simulator (`mojim-sim`, `shadow`).

use std::collections::VecDeque;

use super::*;
use proptest::prelude::*;

/// Words in which everything is durable at once.
#[derive(Clone)]
struct Words(Vec<u64>);

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
        Ok(())
    }
}

fn made(encoding: Encoding, ring: usize) -> Words {
    let mut words = Words(vec![0; LOG_RING_WORD + ring]);
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
        for step in steps {
            match step {
                Step::Append(record) => match log.append(&record) {
                    Ok(at) => model.push_back((at, record)),
                    Err(e) => {
                        prop_assert_eq!(e.errno(), libc::ENOSPC);
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
        for (at, value, shift) in damage {
            let at = at.index(words.0.len());
            words.0[at] = value >> shift;
        }
        if let Ok(mut log) = open(&words) {
            let before = records(&log);
            if log.append(b"more").is_ok() {
                let again = open(&log.medium().clone()).unwrap();
                let all = records(&again);
                prop_assert_eq!(&all[..before.len()], &before[..]);
                prop_assert_eq!(all.len(), before.len() + 1);
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
