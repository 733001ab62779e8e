//! Memory that is bounded (`memory` and `max_uncommitted` of a volume).
//!
//! Owns when changed pages that are committed are given back to the system, and
//! what happens to stores for which there is no room. `track/two_level/release.rs` of
//! `mojim-memory` tells how a page is given back without losing a store. This file does what that
//! asks of its caller: learn which records were begun before a chunk was shut, wait
//! until the data files have them, and find the pages that equal the file's.
//!
//! The checkpoint thread does the work. If that is not enough, threads that have
//! made a sync point help, so that memory does not grow faster than it is given
//! back.
//!
//! Lock order: `Work`, then a region's images. A region whose images are held is
//! left for later: their holder may wait for what only this thread does.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use mojim_config::Volume as VolumeConfig;
use mojim_env::locks;
use mojim_env::locks::lock;
use mojim_env::threads::SignalsWait;
use mojim_env::{Env, Error, Result};
use mojim_memory::region::Region;
use mojim_memory::track::{self, Meter};
use mojim_replica::primary::Primary;

/// Chunks that are tried at once.
const AT_ONCE: usize = 128;
/// How long nothing is tried after all chunks were tried in vain. It is tried earlier
/// once sync points and rollbacks have found one part in `ENOUGH` of the pages that
/// may be held: each call may find few, and a try looks at everything that is held.
const REST: Duration = Duration::from_millis(100);
const ENOUGH: u64 = 16;
/// How long a store waits for room while it is not known whether there is any:
/// records are not committed yet, or a sync point of the region is under way.
/// Longer than a call waits for room in the log.
const LONGEST: Duration = Duration::from_secs(60);
/// Images of pages may take one part in so many of `memory`.
const IMAGES: u64 = 4;

/// Gives a volume's memory back.
pub(super) struct Memory {
    primary: Arc<Primary>,
    env: Arc<dyn Env>,
    meter: Arc<Meter>,
    /// Most pages that may be held.
    most: Option<i64>,
    /// Most pages that may be uncommitted.
    uncommitted: Option<u64>,
    work: Mutex<Work>,
    /// Nothing is tried before this time, in nanoseconds, except for a store that
    /// waits.
    rest: AtomicU64,
    /// It is tried earlier once `found` has reached this.
    enough: AtomicU64,
    /// Pages that sync points and rollbacks have found stored to, so that they are
    /// not uncommitted any more; each call counts as one page at least. (In the
    /// meter they stay uncommitted until they are counted again.)
    found: AtomicU64,
}

/// What is under way.
#[derive(Default)]
struct Work {
    /// Chunks that were shut, by region.
    taken: Vec<(Arc<Region>, Vec<usize>)>,
    /// LSN up to which records had been begun by then.
    upto: u64,
    since: Duration,
    /// If it is done for a store that waits: the meter's turn when it began.
    room: Option<u64>,
    /// Since when a store waits.
    asked: Option<Duration>,
    /// Chunks that were tried since the last page was given back.
    vain: usize,
    /// `Memory::found` before the first of them.
    found: u64,
    /// `Memory::found` before the first chunk that could not be tried, because another
    /// thread compared its region.
    skipped: Option<u64>,
    /// The region with which the next choice begins.
    first: usize,
    scratch: Vec<u64>,
    copies: Vec<Range<usize>>,
    same: Vec<Range<usize>>,
}

/// Returns the volume's regions. Called only when they are needed, since it is expensive.
type Regions<'a> = &'a dyn Fn() -> Vec<Arc<Region>>;

/// Regions whose open chunks have been shut.
struct Shut {
    regions: Vec<Arc<Region>>,
    /// LSN up to which records had been begun by then.
    upto: u64,
    /// They are all regions that can be stored to.
    all: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// There is nothing to do.
    Nothing,
    /// Something was done; there may be more to do.
    Done,
    /// Records are not applied yet, or another thread compares a region.
    Waits,
}

impl Memory {
    /// As the volume's configuration asks; none if it bounds nothing.
    pub fn of(volume: &VolumeConfig, primary: &Arc<Primary>, env: &Arc<dyn Env>) -> Option<Memory> {
        let page = rustix::param::page_size() as u64;
        if volume.memory.is_none() && volume.max_uncommitted.is_none() {
            return None;
        }
        if let Some(bytes) = volume.memory {
            mojim_memory::committed::bound_images((bytes / IMAGES) as usize);
        }
        let uncommitted = volume.max_uncommitted.map(|bytes| bytes / page);
        let text = format!(
            "mojim: volume {}: {} bytes of its memory were changed and are not committed, as many as max_uncommitted allows; a store to more gets SIGBUS. Call msync more often, or raise max_uncommitted\n",
            volume.name,
            volume.max_uncommitted.unwrap_or(0)
        );
        let work = primary.checkpoint_work.clone();
        Some(Memory {
            primary: primary.clone(),
            env: env.clone(),
            meter: Arc::new(Meter::new(uncommitted, &text, work)),
            most: volume.memory.map(|bytes| (bytes / page) as i64),
            uncommitted,
            work: Mutex::default(),
            rest: AtomicU64::new(0),
            enough: AtomicU64::new(0),
            found: AtomicU64::new(0),
        })
    }

    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Whether, as far as is known, too much is held, and it is worth a try.
    fn is_over(&self) -> bool {
        self.most.is_some_and(|most| self.meter.held() > most)
            && (self.found.load(Relaxed) >= self.enough.load(Relaxed)
                || self.env.now().as_nanos() as u64 >= self.rest.load(Relaxed))
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        lock(&self.work)
    }

    fn try_work(&self) -> Option<MutexGuard<'_, Work>> {
        locks::try_lock(&self.work)
    }

    /// A turn of the checkpoint thread. True if there is more to do at once.
    pub fn turn(&self, regions: Regions<'_>) -> bool {
        // A thread that made a sync point does the work.
        let Some(mut work) = self.try_work() else {
            return false;
        };
        if work.taken.is_empty() && !self.meter.is_asked() && !self.is_over() {
            return false;
        }
        self.step(&mut work, regions) == Step::Done
    }

    /// The calling thread has committed or undone something. `found`: the parts that
    /// it found stored to, if it searched.
    #[inline]
    pub fn after(&self, found: Option<&[Range<usize>]>, regions: Regions<'_>) {
        self.meter.next_turn();
        let Some(most) = self.most else {
            return;
        };
        if let Some(found) = found {
            let page = rustix::param::page_size();
            let pages: usize = found.iter().map(|r| r.len().div_ceil(page)).sum();
            self.found.fetch_add(pages.max(1) as u64, Relaxed);
        }
        if self.meter.held() > most {
            self.help(most, regions);
        }
    }

    /// Finishes the present round and does one more, no more: a single call must not
    /// pay for all that is held.
    #[cold]
    fn help(&self, most: i64, regions: Regions<'_>) {
        if !self.is_over() {
            return;
        }
        // A signal handler of the program on this thread could store, and wait for room
        // that no thread can make while this one holds `work`.
        let _quiet = SignalsWait::begin_but_faults();
        let mut work = match self.try_work() {
            Some(work) => work,
            // The checkpoint thread, which yields to all others, does not keep up.
            None if self.meter.held() > 2 * most => self.work(),
            None => return,
        };
        let mut begun = false;
        while self.is_over() {
            let begins = work.taken.is_empty();
            if begins && begun || self.step(&mut work, regions) != Step::Done {
                return;
            }
            begun |= begins;
        }
    }

    /// Ends giving back; from here on stores are not bounded.
    pub fn end(&self) {
        self.meter.lift();
        // The regions would keep the volume alive.
        self.work().taken.clear();
    }

    fn step(&self, work: &mut Work, regions: Regions<'_>) -> Step {
        if work.taken.is_empty() {
            return self.begin(work, regions);
        }
        // An error is reported elsewhere; here it only means: not yet.
        let is_applied = apply(&self.primary, work.upto).unwrap_or(false);
        // Committed records will be applied, however long that takes (while a whole copy
        // is made).
        let may_come = || {
            let is_committed = self.primary.committed() >= work.upto;
            is_committed || self.env.now() - work.since < LONGEST
        };
        // Other threads have committed since: counting again may show enough room.
        let stale = work.room.is_some_and(|turn| turn != self.meter.turn());
        let stale = stale && self.env.now() - work.since > REST;
        if !is_applied && may_come() && !stale {
            return Step::Waits;
        }
        let mut given = 0;
        let taken = std::mem::take(&mut work.taken);
        for (m, chunks) in &taken {
            if is_applied {
                let found = self.found.load(Relaxed);
                match give_back(m, chunks, work) {
                    Some(pages) => given += pages,
                    None => _ = work.skipped.get_or_insert(found),
                }
            }
            m.copy.metered(&mut |t| {
                chunks.iter().for_each(|c| t.put_back(*c));
            });
            work.vain += chunks.len();
        }
        if given > 0 {
            work.vain = 0;
        }
        if work.vain == 0 {
            work.skipped = None;
        }
        let mut holding = 0;
        each_region(regions, |m| {
            m.copy.metered(&mut |t| holding += t.holding());
        });
        if !is_applied || work.vain >= holding {
            work.vain = 0;
            let until = self.env.now() + REST;
            self.rest.store(until.as_nanos() as u64, Relaxed);
            // The thread that compared a skipped region adds to `found` when it is done.
            let enough = match work.skipped.take() {
                Some(found) => found + 1,
                None => work.found + (self.most.unwrap_or(0) as u64 / ENOUGH).max(1),
            };
            self.enough.store(enough, Relaxed);
        }
        if let Some(turn) = work.room.take() {
            match self.has_room(0) {
                true => self.grant(work),
                false if !is_applied && stale => {}
                false => self.refuse(work, turn),
            }
        }
        Step::Done
    }

    /// Whether there is room for a chunk, and for one part in `share` of
    /// `max_uncommitted` (0: of none).
    fn has_room(&self, share: u64) -> bool {
        let all = self.uncommitted.unwrap_or(0);
        let wanted = all.checked_div(share).unwrap_or(0) as i64;
        let chunk = track::CHUNK / rustix::param::page_size();
        self.meter.room() >= wanted.max(chunk as i64)
    }

    fn grant(&self, work: &mut Work) {
        work.asked = None;
        self.meter.grant();
    }

    fn refuse(&self, work: &mut Work, turn: u64) {
        work.asked = None;
        self.meter.refuse(turn);
    }

    /// Shuts the open chunks, and chooses the chunks to give back.
    fn begin(&self, work: &mut Work, regions: Regions<'_>) -> Step {
        let now = self.env.now();
        let asked = self.meter.is_asked();
        let turn = self.meter.turn();
        if asked {
            work.asked.get_or_insert(now);
        }
        if work.vain == 0 {
            work.found = self.found.load(Relaxed);
        }
        let Shut {
            regions: shut,
            upto,
            all,
        } = self.shut(asked, regions);
        if asked && self.has_room(4) {
            self.grant(work);
        } else if asked && work.asked.is_some_and(|since| now - since > LONGEST) {
            self.refuse(work, turn);
            return Step::Waits;
        } else if asked && !all {
            return Step::Waits;
        } else if asked {
            work.room = Some(turn);
        }
        self.take(work, shut);
        work.upto = upto;
        work.since = now;
        match work.taken.is_empty() {
            false => Step::Done,
            true => {
                if let Some(turn) = work.room.take() {
                    self.refuse(work, turn);
                }
                Step::Nothing
            }
        }
    }

    /// Shuts the open chunks of every region that no thread compares. `count`: counts again
    /// how much of it is uncommitted.
    fn shut(&self, count: bool, regions: Regions<'_>) -> Shut {
        let mut all = true;
        let mut shut = Vec::new();
        let mut upto = 0;
        each_region(regions, |m| {
            let Some(held) = m.committed.try_hold() else {
                all = false;
                return;
            };
            let mut done = false;
            m.copy.metered(&mut |t| {
                let counted = t.shut().and_then(|()| match count {
                    true => t.recount(),
                    false => Ok(()),
                });
                done = counted.is_ok();
            });
            // A record with bytes read from this region before now has at most this LSN;
            // bytes that are read from now on are as they are now.
            match self.primary.last_unless_spilling() {
                Some(last) if done => {
                    upto = upto.max(last);
                    shut.push(m.clone());
                }
                _ => all = false,
            }
            drop(held);
        });
        Shut {
            regions: shut,
            upto,
            all,
        }
    }

    /// Takes the chunks to give back from regions that were shut: `AT_ONCE` at most, to get an
    /// eighth below the bound; or all, for a store that waits.
    fn take(&self, work: &mut Work, mut shut: Vec<Arc<Region>>) {
        let mut wanted = match (work.room, self.most) {
            (Some(_), _) => usize::MAX,
            (None, Some(most)) => {
                let over = self.meter.held() - (most - most / 8);
                usize::try_from(over).unwrap_or(0)
            }
            (None, None) => 0,
        };
        let mut most = if work.room.is_some() {
            usize::MAX
        } else {
            AT_ONCE
        };
        work.first = (work.first + 1) % shut.len().max(1);
        shut.rotate_left(work.first);
        for m in shut {
            m.copy.metered(&mut |t| {
                let (chunks, held) = t.take(wanted, most);
                wanted = wanted.saturating_sub(held);
                most -= chunks.len();
                if !chunks.is_empty() {
                    work.taken.push((m.clone(), chunks));
                }
            });
        }
    }
}

fn each_region(regions: Regions<'_>, f: impl FnMut(&Arc<Region>)) {
    regions().iter().filter(|r| r.write).for_each(f);
}

/// Applies what can be applied. True if the data files have every record up to `upto`.
fn apply(p: &Primary, upto: u64) -> Result<bool> {
    while p.store.applied() < upto {
        for lane in 0..p.lanes.len() {
            p.persist_wait(lane)?;
        }
        let before = p.store.applied();
        p.store.apply(p.apply_limit(), 1 << 20)?;
        if p.store.applied() == before {
            break;
        }
    }
    Ok(p.store.applied() >= upto)
}

/// Gives back the pages of these chunks that equal the file's. Returns how many;
/// `None` if another thread compares the region.
fn give_back(region: &Region, chunks: &[usize], work: &mut Work) -> Option<usize> {
    let held = region.committed.try_hold()?;
    let page = rustix::param::page_size();
    // The page in which the file ends has bytes beyond the end: it stays.
    let end = region.valid.load(Acquire) / page * page;
    let mut given = 0;
    region.copy.metered(&mut |t| {
        for &c in chunks {
            let (copies, same) = (&mut work.copies, &mut work.same);
            copies.clear();
            same.clear();
            let found = t
                .copies(c, copies)
                .map_err(|e| Error::io("finding changed pages", &e));
            copies.retain_mut(|r| {
                r.end = r.end.min(end);
                r.start < r.end
            });
            let base = region.copy.base();
            let committed = &region.committed;
            // SAFETY: `base` is the region's, and `copies` are clipped to it.
            let same_pages =
                |()| unsafe { committed.same(&held, base, copies, &mut work.scratch, same) };
            let compared = found.and_then(same_pages);
            if compared.is_err() || same.is_empty() {
                continue;
            }
            // SAFETY: whole pages of the chunk that were found equal to the file's
            // after it was shut; the file has every record begun before that, and
            // keeps its length as long as `held` lives.
            if let Ok(true) = unsafe { t.discard(c, same) } {
                given += same.iter().map(Range::len).sum::<usize>() / page;
            }
        }
    });
    Some(given)
}
