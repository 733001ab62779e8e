//! Whether the disks of both nodes have room for what programs write and make.
//!
//! A sync point that finds no room when it is applied stops its node, long after the call that
//! asked for too much. So that call has to fail, as it does on a disk's file system.
//!
//! Owns the account of what programs were given and the disks do not show yet, on each node for
//! itself. The account has two parts:
//!
//! - what is not begun (bytes of files, and names),
//! - what is begun and not applied.
//!
//! It counts what a file system takes: blocks, files, directories, and the catalogue, which is
//! written whole beside the old one.
//!
//! Invariant: room that was taken counts until the disk shows it. A look at a disk leaves out what
//! the account has behind the LSN that is applied there.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use mojim_env::Space;
use mojim_env::locks::lock;
use rustix::io::Errno;

use crate::overlay::BLOCK;

/// The part of what is free that is given out before it is looked again: others write to the
/// disks, too.
const PART: u64 = 8;
/// Most that is given out before it is looked again.
const MOST_GIVEN: Need = Need {
    bytes: 8 << 20,
    files: 64,
};
/// It is looked again after so long, whatever was given out.
const FRESH: Duration = Duration::from_millis(100);
/// Of so many blocks in a row that are written apart, one more is needed to say where they are.
const BLOCKS_A_MAP: u64 = 64;
/// Most sync points that are counted each for itself.
const MOST_BEGUN: usize = 4096;

/// What something takes of a file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) bytes: u64,
    pub(crate) files: u64,
}

impl Need {
    fn and(self, other: Need) -> Need {
        Need {
            bytes: self.bytes.saturating_add(other.bytes),
            files: self.files.saturating_add(other.files),
        }
    }
}

/// A [`Need`] that many threads change.
#[derive(Debug, Default)]
struct Sum {
    bytes: AtomicU64,
    files: AtomicU64,
}

impl Sum {
    fn get(&self) -> Need {
        let (bytes, files) = (self.bytes.load(SeqCst), self.files.load(SeqCst));
        Need { bytes, files }
    }

    fn set(&self, n: Need) {
        self.bytes.store(n.bytes, SeqCst);
        self.files.store(n.files, SeqCst);
    }

    fn add(&self, n: Need) {
        self.bytes.fetch_add(n.bytes, SeqCst);
        self.files.fetch_add(n.files, SeqCst);
    }

    /// Takes all of it, or nothing.
    fn take(&self, n: Need) -> bool {
        let from = |sum: &AtomicU64, n| {
            let rest = |all: u64| all.checked_sub(n);
            sum.fetch_update(SeqCst, SeqCst, rest).is_ok()
        };
        if !from(&self.bytes, n.bytes) {
            return false;
        }
        let all = from(&self.files, n.files);
        if !all {
            self.bytes.fetch_add(n.bytes, SeqCst);
        }
        all
    }
}

#[derive(Debug)]
pub(crate) struct Room {
    /// What was seen to be free, and may be given out without another look.
    given: Sum,
    made: Instant,
    /// When that was seen, in milliseconds since `made`.
    looked: AtomicU64,
    /// Blocks of bytes that are not begun.
    blocks: AtomicU64,
    /// What names take that are not begun. Changed under the lock of the mount's state.
    names: Sum,
    /// What each sync point takes that is not applied everywhere, by ascending LSN.
    begun: Mutex<VecDeque<(u64, Need)>>,
    /// The unit in which files take bytes, on the node where it is largest.
    block: AtomicU64,
    /// Up to where the mirror had last applied, or more than nothing; 0: there was none.
    mirror: AtomicU64,
    /// A mirror has told its room, or was waited for.
    pub(crate) told: AtomicBool,
    /// When a call had waited last for what was begun, in vain, and the last sync point of that.
    vain: Mutex<Option<(Instant, u64)>>,
}

type Result<T> = std::result::Result<T, Errno>;

impl Default for Room {
    fn default() -> Room {
        Room {
            given: Sum::default(),
            made: Instant::now(),
            looked: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            names: Sum::default(),
            begun: Mutex::default(),
            block: AtomicU64::new(0),
            mirror: AtomicU64::new(0),
            told: AtomicBool::new(false),
            vain: Mutex::default(),
        }
    }
}

impl Room {
    /// What so many blocks take.
    pub(crate) fn of_blocks(&self, blocks: u64) -> Need {
        let block = self.block.load(SeqCst).max(BLOCK);
        let bytes = (blocks + blocks.div_ceil(BLOCKS_A_MAP)) * block;
        Need { bytes, files: 0 }
    }

    /// What is not begun.
    fn not_begun(&self) -> Need {
        let blocks = self.of_blocks(self.blocks.load(SeqCst));
        blocks.and(self.names.get())
    }

    /// What is begun and not applied where everything up to `applied` is.
    fn not_applied(&self, applied: u64) -> Need {
        let begun = lock(&self.begun);
        let waits = begun.iter().filter(|(lsn, _)| *lsn > applied);
        waits.fold(Need::default(), |sum, (_, n)| sum.and(*n))
    }

    /// What is left of what `rooms` have, on the fuller node. Each comes with the LSN up to which
    /// it counts what is applied.
    pub(crate) fn left(&self, rooms: impl Iterator<Item = (u64, Space)>) -> Need {
        let mut least = Need {
            bytes: u64::MAX,
            files: u64::MAX,
        };
        for (applied, space) in rooms {
            self.block.fetch_max(space.block.into(), SeqCst);
            let waits = self.not_begun().and(self.not_applied(applied));
            let left = |free: u64, waits| match free {
                u64::MAX => free,
                free => free.saturating_sub(waits),
            };
            least.bytes = least.bytes.min(left(space.bytes, waits.bytes));
            least.files = least.files.min(left(space.files, waits.files));
        }
        least
    }

    /// Gives out `n`, of what `rooms` have if what was seen before does not suffice.
    ///
    /// # Errors
    /// ENOSPC: one of them has too little.
    pub(crate) fn take<I>(&self, n: Need, rooms: impl FnOnce() -> I) -> Result<()>
    where
        I: Iterator<Item = (u64, Space)>,
    {
        let now = self.made.elapsed().as_millis() as u64;
        let is_fresh = now - self.looked.load(SeqCst).min(now) < FRESH.as_millis() as u64;
        if is_fresh && self.given.take(n) {
            return Ok(());
        }
        let left = self.left(rooms());
        let bytes = left.bytes.checked_sub(n.bytes).ok_or(Errno::NOSPC)?;
        let files = left.files.checked_sub(n.files).ok_or(Errno::NOSPC)?;
        self.given.set(Need {
            bytes: (bytes / PART).min(MOST_GIVEN.bytes),
            files: (files / PART).min(MOST_GIVEN.files),
        });
        self.looked.store(now, SeqCst);
        Ok(())
    }

    /// A file has `after` blocks that are not begun, where it had `before`.
    pub(crate) fn count(&self, before: usize, after: usize) {
        match after >= before {
            true => self.blocks.fetch_add((after - before) as u64, SeqCst),
            false => self.blocks.fetch_sub((before - after) as u64, SeqCst),
        };
    }

    /// The sync point `lsn` has `blocks` of what was not begun, and all names.
    pub(crate) fn begun(&self, lsn: u64, blocks: usize) {
        let need = self.of_blocks(blocks as u64).and(self.names.get());
        let mut begun = lock(&self.begun);
        begun.push_back((lsn, need));
        self.count(blocks, 0);
        self.names.set(Need::default());
        if begun.len() > MOST_BEGUN {
            // While the mirror is away, or stands still: two count as one.
            let pairs: Vec<_> = begun.drain(..).collect();
            let both = |p: &[(u64, Need)]| {
                p.iter()
                    .fold((0, Need::default()), |s, p| (p.0, s.1.and(p.1)))
            };
            begun.extend(pairs.chunks(2).map(both));
        }
    }

    /// Everything up to `lsn` is applied on both nodes.
    pub(crate) fn applied(&self, lsn: u64) {
        let mut begun = lock(&self.begun);
        while begun.front().is_some_and(|(first, _)| *first <= lsn) {
            begun.pop_front();
        }
    }

    /// Up to where all is applied on all nodes that follow, of which `applied` has the own first:
    /// also on the mirror, if it is away.
    pub(crate) fn everywhere(&self, mut applied: impl Iterator<Item = u64>) -> u64 {
        let own = applied.next().unwrap_or(0);
        if let Some(told) = applied.next() {
            self.mirror.store(told.max(1), SeqCst);
        }
        match self.mirror.load(SeqCst) {
            0 => own,
            told => own.min(told),
        }
    }

    /// The last sync point that is not applied everywhere; 0: there is none.
    fn last(&self) -> u64 {
        lock(&self.begun).back().map_or(0, |(lsn, _)| *lsn)
    }

    /// Whether a sync point behind `applied` waits to be applied.
    pub(crate) fn waits(&self, applied: u64) -> bool {
        self.last() > applied
    }

    /// A call has waited for what was begun, and found no room.
    pub(crate) fn looked_in_vain(&self) {
        *lock(&self.vain) = Some((Instant::now(), self.last()));
    }

    /// Whether a call has waited so for the same sync points, within the last `time`: others need not.
    pub(crate) fn was_vain_within(&self, time: Duration) -> bool {
        let vain = *lock(&self.vain);
        vain.is_some_and(|(at, last)| at.elapsed() < time && last == self.last())
    }

    /// A name was given that takes so much. Called under the lock of the mount's state.
    pub(crate) fn named(&self, need: Need) {
        self.names.add(need);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(bytes: u64, files: u64) -> Space {
        Space {
            bytes,
            files,
            block: 4096,
        }
    }

    fn need(bytes: u64, files: u64) -> Need {
        Need { bytes, files }
    }

    /// What waits was left out of the account: more was given than there is, and the sync points
    /// found no room when they were applied, on the primary or on the mirror.
    #[test]
    fn what_waits_counts_until_it_is_applied_on_each_node() {
        let room = Room::default();
        let disks = |own: u64, mirror: u64| {
            move || [(own, space(1 << 20, 100)), (mirror, space(1 << 20, 100))].into_iter()
        };
        let names = need(400 << 10, 10);
        room.named(names);
        let all = need((1 << 20) - (400 << 10), 90);
        assert_eq!(room.left(disks(0, 0)()), all);
        assert_eq!(
            room.take(need(all.bytes + 1, 0), disks(0, 0)),
            Err(Errno::NOSPC)
        );
        assert_eq!(room.take(need(0, 91), disks(0, 0)), Err(Errno::NOSPC));
        room.begun(7, 0);
        assert_eq!(room.left(disks(6, 7)()), all, "the own disk lacks it");
        assert_eq!(room.left(disks(7, 6)()), all, "the mirror's lacks it");
        assert_eq!(room.left(disks(7, 7)()), need(1 << 20, 100));
        room.count(0, 64);
        let blocks = room.of_blocks(64);
        assert_eq!(blocks.bytes, 65 * 4096);
        assert_eq!(room.left(disks(7, 7)()).bytes, (1 << 20) - blocks.bytes);
        room.begun(8, 64);
        assert_eq!(room.left(disks(8, 7)()).bytes, (1 << 20) - blocks.bytes);
        room.applied(8);
        assert!(!room.waits(7));
        assert_eq!(room.left(disks(7, 7)()), need(1 << 20, 100));
    }

    /// What was given out without a look is not given twice, and counts once it waits.
    #[test]
    fn no_more_is_given_than_there_is() {
        let room = Room::default();
        let disk = || [(0, space(1 << 20, 64))].into_iter();
        let (mut blocks, mut names) = (0, 0);
        while room.take(room.of_blocks(1), disk).is_ok() {
            room.count(blocks, blocks + 1);
            blocks += 1;
        }
        assert!((200..=256).contains(&blocks), "{blocks}");
        room.begun(1, blocks);
        room.applied(1);
        while room.take(need(0, 1), disk).is_ok() {
            room.named(need(0, 1));
            names += 1;
        }
        assert_eq!(names, 64);
    }

    /// Sync points that are counted together count in full.
    #[test]
    fn many_sync_points_count_in_full() {
        let room = Room::default();
        let many = 3 * MOST_BEGUN as u64;
        for lsn in 1..=many {
            room.named(need(10, 1));
            room.begun(lsn, 0);
        }
        assert!(lock(&room.begun).len() <= MOST_BEGUN + 1);
        assert_eq!(room.not_applied(0), need(10 * many, many));
        assert_eq!(room.not_applied(many), Need::default());
        room.applied(many);
        assert!(!room.waits(0));
        // A mirror that is away lacks what it lacked.
        room.named(need(10, 1));
        room.begun(many + 1, 0);
        assert_eq!(room.everywhere([many + 1, many].into_iter()), many);
        room.applied(room.everywhere([many + 1].into_iter()));
        assert_eq!(room.not_applied(many), need(10, 1));
    }
}
