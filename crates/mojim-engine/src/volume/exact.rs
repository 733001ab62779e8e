//! Exact sync points: of the bytes that a transaction stored, and of no others.
//!
//! Owns the way from addresses, which may lie in regions or elsewhere, to one record. Nothing is
//! looked up twice, compared or searched, whatever the ranges' sizes, and buffers are the
//! thread's: a commit allocates nothing.
//!
//! Invariants: as those of `sync_point`, whose steps it takes: enter, announce, take turns, begin,
//! note, wait.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, MutexGuard};

use crate::last;
use crate::share::guest;
use mojim_config::Rounding;
use mojim_env::{Context, Error, Result, reserve};
use mojim_memory::committed::{Images, ImagesGuard};
use mojim_memory::fork::check_fork;
use mojim_memory::quiescence::User;
use mojim_memory::region::Region;
use mojim_replica::piece::Piece;
use mojim_replica::primary::Begun;

use super::attached::Inner;
use super::sync_point::{Until, end, gmsync, note, push_piece};
use super::table::{Mapped, TABLE};
use super::windows::is_region;

/// A sync point that failed.
#[doc(hidden)]
#[derive(Debug)]
pub struct Failure {
    /// Why.
    pub error: Error,
    /// Whether it has its LSN: then it may be there, or come to be there, whole.
    pub begun: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure {
            error,
            begun: false,
        }
    }
}

/// Bytes of a window: its number among those of the sync point, and the bytes relative to its
/// region.
type Bytes = (usize, Range<usize>);

#[derive(Default)]
struct Buffers {
    windows: Vec<Arc<Mapped>>,
    bytes: Vec<Bytes>,
    announced: Vec<bool>,
    pieces: Vec<Piece<'static>>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// One atomic sync point of those of the ranges' bytes that lie in regions: ascending ranges of
/// addresses that do not overlap. Returns its LSN; 0 if there are none.
///
/// # Errors
/// As [`gmsync`](crate::gmsync). `Unsupported` where the volume rounds to pages: others' bytes
/// would be committed.
#[doc(hidden)]
pub fn commit_exact(ranges: &[Range<usize>]) -> Result<u64, Failure> {
    if ranges.is_empty() {
        return Ok(0);
    }
    if guest::any() {
        return as_guest(ranges);
    }
    check_fork()?;
    let with = |buffers: &mut Buffers| {
        let done = commit(ranges, buffers);
        // What is remembered would keep the windows' memory.
        buffers.windows.clear();
        if reserve::is_short() {
            *buffers = Buffers::default();
        }
        done
    };
    let tried = BUFFERS.try_with(|b| b.try_borrow_mut().ok().map(|mut b| with(&mut b)));
    // While the thread ends, its buffers may be gone already.
    tried
        .ok()
        .flatten()
        .unwrap_or_else(|| with(&mut Buffers::default()))
}

/// A process that shares the volume has its sync points made by the owner.
fn as_guest(ranges: &[Range<usize>]) -> Result<u64, Failure> {
    let mine = ranges.iter().filter(|r| is_region(r.start));
    let all: Vec<_> = mine.map(|r| (r.start as *const u8, r.len())).collect();
    if all.is_empty() {
        return Ok(0);
    }
    gmsync(&all).map_err(|error| Failure {
        // The owner does not say how far it came.
        begun: !matches!(error, Error::Invalid(_) | Error::Unsupported(_)),
        error,
    })
}

fn no_memory() -> String {
    "listing what was stored".into()
}

/// Finds the windows in which the ranges lie, in one look at the table.
fn locate(ranges: &[Range<usize>], to: &mut Buffers) -> Result<()> {
    to.windows.clear();
    to.bytes.clear();
    TABLE.read(|all| {
        let mut at = 0;
        for range in ranges {
            let mut from = range.start;
            if at < all.len() && all[at].window.span.end <= from {
                at += all[at..].partition_point(|m| m.window.span.end <= from);
            }
            let mut next = at;
            while let Some(m) = all.get(next)
                && m.window.span.start < range.end
            {
                let span = &m.window.span;
                from = from.max(span.start);
                let until = range.end.min(span.end);
                if m.window.write && m.region.write && from < until {
                    if to.windows.last().is_none_or(|w| !Arc::ptr_eq(w, m)) {
                        reserve::room(&mut to.windows, 1).context(no_memory)?;
                        to.windows.push(m.clone());
                    }
                    reserve::room(&mut to.bytes, 1).context(no_memory)?;
                    let part = m.part(from, until - from);
                    to.bytes.push((to.windows.len() - 1, part));
                }
                if range.end <= span.end {
                    break;
                }
                next += 1;
            }
        }
        Ok(())
    })
}

fn check(windows: &[Arc<Mapped>]) -> Result<()> {
    let first = &windows[0].volume;
    if windows.iter().any(|m| !Arc::ptr_eq(&m.volume, first)) {
        return Err(Error::Invalid(
            "the transaction stored into regions of different volumes; atomicity spans one volume"
                .into(),
        ));
    }
    if first.volume.rounding == Rounding::Page {
        return Err(Error::Unsupported(format!(
            "volume {} rounds sync points to pages (msync_rounding = \"page\"): a transaction would commit what others are storing beside it",
            first.volume.name
        )));
    }
    first.check_attached()
}

/// Has all windows' regions in use, and leaves out what lies behind a file's end.
fn enter<'a>(windows: &'a [Arc<Mapped>], bytes: &mut [Bytes]) -> Result<(User<'a>, Vec<User<'a>>)> {
    let volume = &windows[0].volume;
    loop {
        let sizes = volume.sizes();
        let first = windows[0].region.enter()?;
        let rest = windows[1..].iter().map(|m| m.region.enter());
        let rest: Vec<_> = rest.collect::<Result<_>>()?;
        let valid = |i: usize| windows[i].region.valid.load(SeqCst);
        let cut = bytes.iter().find(|(i, range)| range.end > valid(*i));
        match cut {
            Some((i, _)) if !volume.is_end(sizes) => {
                let file = &windows[*i].region.name;
                drop((first, rest));
                volume.wait_for_sizes(file)?;
            }
            Some(_) => {
                for (i, range) in bytes {
                    range.end = range.end.min(valid(*i)).max(range.start);
                }
                return Ok((first, rest));
            }
            None => return Ok((first, rest)),
        }
    }
}

/// The buffer of another call, empty: the lifetime of what was in it does not matter.
fn emptied<'a>(mut pieces: Vec<Piece<'_>>) -> Vec<Piece<'a>> {
    pieces.clear();
    pieces.into_iter().map(|_| unreachable!()).collect()
}

fn commit(ranges: &[Range<usize>], buffers: &mut Buffers) -> Result<u64, Failure> {
    locate(ranges, buffers)?;
    let Buffers {
        windows,
        bytes,
        announced,
        pieces: kept,
    } = buffers;
    if windows.is_empty() {
        return Ok(0);
    }
    check(windows)?;
    let volume = &*windows[0].volume;
    let users = enter(windows, bytes)?;
    bytes.retain(|(_, range)| !range.is_empty());
    let mut pieces = emptied(std::mem::take(kept));
    for (i, range) in &*bytes {
        let region = &windows[*i].region;
        let at = region.copy.base().wrapping_add(range.start);
        push_piece(&mut pieces, region, range.clone(), at).context(no_memory)?;
    }
    if pieces.is_empty() {
        return Ok(0);
    }
    announced.clear();
    reserve::room(announced, bytes.len()).context(no_memory)?;
    announced.extend((bytes.iter()).map(|(i, range)| windows[*i].region.committed.announce(range)));
    let turns = turns(volume, windows, &pieces);
    let begun: Result<Begun> = volume.primary.begin_commit(&pieces);
    for ((i, range), announced) in bytes.iter().zip(&*announced) {
        note(&windows[*i].region, range.clone(), &begun, *announced);
    }
    drop((turns, users));
    *kept = emptied(pieces);
    let begun = begun?;
    let done = end(volume, &begun, Until::Committed);
    volume.made_room(None);
    match done {
        Ok(()) => {
            last::set(begun.lsn);
            Ok(begun.lsn)
        }
        Err(error) => Err(Failure { error, begun: true }),
    }
}

/// What a sync point holds while it gets its LSN, where another one compares, or it spills.
type Turns<'a> = (Vec<MutexGuard<'a, Images>>, Vec<ImagesGuard<'a>>);

fn turns<'a>(volume: &Inner, windows: &'a [Arc<Mapped>], pieces: &[Piece<'_>]) -> Turns<'a> {
    let (mut turns, mut held) = (Vec::new(), Vec::new());
    let regions = || {
        let mut all: Vec<&'a Region> = windows.iter().map(|m| &*m.region).collect();
        all.sort_by_key(|r| std::ptr::from_ref(*r) as usize);
        all.dedup_by_key(|r| std::ptr::from_ref(*r) as usize);
        all.into_iter()
    };
    if volume.primary.must_spill(pieces) {
        held.extend(regions().map(|r| r.committed.take(r.committed.lock())));
    } else if windows.iter().any(|m| m.region.committed.is_taken()) {
        turns.extend(regions().map(|r| r.committed.lock()));
    }
    (turns, held)
}
