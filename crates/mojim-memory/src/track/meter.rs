//! How many pages a volume's regions hold beside their files, and how many more may be stored to.
//!
//! The threads that give pages back share it with the SIGSEGV handler that opens chunks.
//!
//! An open chunk counts as if all of it were held and stored to. Any page of it can be stored to
//! without a fault. A shut chunk counts as what was found in it then.
//!
//! Invariants:
//! 1. `held` and `unsaved` are the sums of what the chunks of all regions count as (`Counts`),
//!    except while one of these changes.
//! 2. A chunk is opened only when it counts as full. The pages that this adds to `unsaved`
//!    stay within the bound, if there is one. This bound has two exceptions:
//!    - `let_in`
//!    - a whole region that is opened for want of mappings
//! 3. The handler calls nothing that takes a lock or allocates.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

use mojim_env::event::Event;

/// No bound.
const ANY: i64 = i64::MAX;
/// Most bytes of the text that is printed when stores find no room.
pub(super) const MOST_TEXT: usize = 512;

/// What the chunks of a volume's regions hold, and may hold.
pub struct Meter {
    held: AtomicI64,
    unsaved: AtomicI64,
    /// Pages that may count as unsaved.
    most: AtomicI64,
    /// A store waits for room.
    asked: AtomicBool,
    /// Counts the events that may have made room; begins with 1.
    turn: AtomicU64,
    /// The turn in which it was found that there is no room.
    spent: AtomicU64,
    /// The text was printed since there was room last.
    told: AtomicBool,
    text: Box<[u8]>,
    work: Arc<Event>,
}

/// What one chunk counts as: the pages that are held in the lower half, those that may not be
/// committed in the upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub held: u16,
    pub unsaved: u16,
}

impl Counts {
    pub fn full(pages: usize) -> Counts {
        let pages = u16::try_from(pages).expect("a chunk has few pages");
        Counts {
            held: pages,
            unsaved: pages,
        }
    }

    pub fn of(packed: u32) -> Counts {
        Counts {
            held: packed as u16,
            unsaved: (packed >> 16) as u16,
        }
    }

    fn packed(self) -> u32 {
        u32::from(self.held) | u32::from(self.unsaved) << 16
    }
}

impl Meter {
    /// `most`: pages that may be stored to and not committed. `text`: printed on standard error if
    /// that is not enough, cut to 512 bytes. `work`: notified when room has to be made.
    pub fn new(most: Option<u64>, text: &str, work: Arc<Event>) -> Meter {
        Meter {
            held: AtomicI64::new(0),
            unsaved: AtomicI64::new(0),
            most: AtomicI64::new(most.map_or(ANY, |m| i64::try_from(m).unwrap_or(ANY))),
            asked: AtomicBool::new(false),
            turn: AtomicU64::new(1),
            spent: AtomicU64::new(0),
            told: AtomicBool::new(false),
            text: text.as_bytes()[..text.len().min(MOST_TEXT)].into(),
            work,
        }
    }

    /// Pages that are held beside the files, at most.
    pub fn held(&self) -> i64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Pages that may still be stored to, at least.
    pub fn room(&self) -> i64 {
        let most = self.most.load(Ordering::Relaxed);
        most.saturating_sub(self.unsaved.load(Ordering::Relaxed))
    }

    /// From now on stores are not bounded: no thread makes room any more.
    pub fn lift(&self) {
        self.most.store(ANY, Ordering::SeqCst);
    }

    /// Whether a store waits for room.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// Called when stores may have been committed, or undone.
    #[inline]
    pub fn next_turn(&self) {
        self.turn.fetch_add(1, Ordering::AcqRel);
    }

    /// The current turn; to be read before room is looked for.
    pub fn turn(&self) -> u64 {
        self.turn.load(Ordering::Acquire)
    }

    /// There is room again: stores that wait are tried again.
    pub fn grant(&self) {
        self.told.store(false, Ordering::Relaxed);
        self.asked.store(false, Ordering::Release);
    }

    /// No room was found by a thread that had read `turn` before: stores that wait are refused,
    /// until something is committed or undone.
    pub fn refuse(&self, turn: u64) {
        self.spent.store(turn, Ordering::SeqCst);
        self.asked.store(false, Ordering::Release);
    }

    /// Makes a chunk count as full, before it is opened. False if that is beyond the bound; then
    /// the chunk counts as before.
    pub(super) fn charge(&self, chunk: &AtomicU32, full: Counts) -> bool {
        loop {
            let old = chunk.load(Ordering::SeqCst);
            let was = Counts::of(old);
            let more = i64::from(full.unsaved) - i64::from(was.unsaved);
            if more > 0 {
                let before = self.unsaved.fetch_add(more, Ordering::SeqCst);
                if before.saturating_add(more) > self.most.load(Ordering::SeqCst) {
                    self.unsaved.fetch_sub(more, Ordering::SeqCst);
                    return false;
                }
            }
            let new = full.packed();
            let done = chunk.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst);
            if done.is_ok() {
                let more = i64::from(full.held) - i64::from(was.held);
                self.held.fetch_add(more, Ordering::SeqCst);
                return true;
            }
            self.unsaved.fetch_sub(more.max(0), Ordering::SeqCst);
        }
    }

    /// Makes a chunk count as `counts`, whatever the bound is.
    pub(super) fn set(&self, chunk: &AtomicU32, counts: Counts) {
        let was = Counts::of(chunk.swap(counts.packed(), Ordering::SeqCst));
        let delta = |new: u16, old: u16| i64::from(new) - i64::from(old);
        let (held, unsaved) = (
            delta(counts.held, was.held),
            delta(counts.unsaved, was.unsaved),
        );
        self.held.fetch_add(held, Ordering::SeqCst);
        self.unsaved.fetch_add(unsaved, Ordering::SeqCst);
    }

    /// Called by the handler for a store that finds no room. True if the store is to be refused.
    pub(super) fn ask(&self) -> bool {
        if self.spent.load(Ordering::SeqCst) == self.turn.load(Ordering::SeqCst) {
            return true;
        }
        self.asked.store(true, Ordering::SeqCst);
        // A futex at most: async-signal-safe.
        self.work.notify();
        false
    }

    /// Copies the text for a store that is refused to `to`, and returns its length; 0 if the text
    /// was printed already.
    pub(super) fn tell(&self, to: &mut [u8; MOST_TEXT]) -> usize {
        if self.told.swap(true, Ordering::Relaxed) {
            return 0;
        }
        to[..self.text.len()].copy_from_slice(&self.text);
        self.text.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_counts_as_full_or_as_it_did() {
        let meter = Meter::new(Some(100), "", Arc::default());
        let chunks = [const { AtomicU32::new(0) }; 3];
        let full = Counts::full(40);
        assert!(meter.charge(&chunks[0], full));
        assert!(meter.charge(&chunks[0], full));
        assert!(meter.charge(&chunks[1], full));
        assert!(!meter.charge(&chunks[2], full));
        assert_eq!((meter.held(), meter.room()), (80, 20));
        // Less was found in one of them.
        let found = Counts {
            held: 30,
            unsaved: 10,
        };
        meter.set(&chunks[0], found);
        assert_eq!((meter.held(), meter.room()), (70, 50));
        assert!(meter.charge(&chunks[2], full));
        // That it counted as full before makes no room.
        assert!(!meter.charge(&chunks[0], full));
        assert_eq!(
            Counts::of(chunks[0].load(Ordering::Relaxed)),
            Counts {
                held: 30,
                unsaved: 10
            }
        );
        meter.lift();
        assert!(meter.charge(&chunks[0], full));
        assert_eq!(meter.held(), 120);
    }

    #[test]
    fn who_is_refused_is_not_when_something_was_committed() {
        let meter = Meter::new(Some(0), "no room", Arc::default());
        assert!(!meter.ask());
        let turn = meter.turn();
        meter.next_turn();
        // Room was looked for before that.
        meter.refuse(turn);
        assert!(!meter.ask() && meter.is_asked());
        meter.refuse(meter.turn());
        assert!(meter.ask() && !meter.is_asked());
        let mut text = [0; MOST_TEXT];
        assert_eq!(meter.tell(&mut text), 7);
        assert_eq!(meter.tell(&mut text), 0);
    }
}
