//! Which addresses of this process belong to regions, of whatever kind: a private
//! working copy, a window of a shared one, a reader's mapping.
//!
//! Owns the list of these addresses. A mapping at an address that the program gives (as
//! with `MAP_FIXED`) is checked against the list first: in place of a region, or of a
//! part of one, its bytes would be committed into that region's file. And it reserves the
//! addresses: in place of any other memory of the process it would break whoever has that.
//!
//! Invariants:
//! - A region is in the list until its addresses are given back: from before they are
//!   mapped if the program chose them, else from when the kernel has chosen them.
//! - Of two mappings at chosen addresses that overlap, made at the same moment, at most
//!   one succeeds.
//! - A claim's addresses are nobody's but the claim's, or the program's own by its promise
//!   ([`Claim::over`]): mapping there with `MAP_FIXED` is sound.
//! - Addresses that stay the program's when their region goes ([`leave_memory`]) are never without
//!   memory: nobody else can map there.
//! - No lock: a forked child may have been made while another thread was here.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::*};

use mojim_env::{Context, Error, Result};
use rustix::io::Errno;

/// An entry; it is never freed, but used again.
struct RangeEntry {
    /// The first address; [`FREE`], or [`TAKEN`] while `end` is not known yet.
    start: AtomicUsize,
    end: AtomicUsize,
    /// Ordinary memory takes the region's place: [`leave_memory`].
    stays: AtomicBool,
    next: *const RangeEntry,
}

// SAFETY: `next` is set before anyone else sees the entry, which is never freed.
unsafe impl Sync for RangeEntry {}

/// What new memory holds.
static ZEROS: [u8; 4096] = [0; 4096];

const FREE: usize = 0;
const TAKEN: usize = 1;

static FIRST: AtomicPtr<RangeEntry> = AtomicPtr::new(std::ptr::null_mut());

fn all() -> impl Iterator<Item = &'static RangeEntry> {
    let mut next = FIRST.load(SeqCst).cast_const();
    std::iter::from_fn(move || {
        // SAFETY: null, or an entry that is never freed.
        let place = unsafe { next.as_ref() }?;
        next = place.next;
        Some(place)
    })
}

impl RangeEntry {
    /// The entry's addresses, if it has any.
    fn span(&self) -> Option<(usize, usize)> {
        loop {
            let start = self.start.load(SeqCst);
            if start == FREE || start == TAKEN {
                return None;
            }
            let end = self.end.load(SeqCst);
            if self.start.load(SeqCst) == start {
                return Some((start, end));
            }
        }
    }
}

fn enter(start: usize, end: usize) -> &'static RangeEntry {
    let free = |p: &&RangeEntry| {
        p.start
            .compare_exchange(FREE, TAKEN, SeqCst, SeqCst)
            .is_ok()
    };
    let place = all().find(free).unwrap_or_else(|| {
        let new = Box::leak(Box::new(RangeEntry {
            start: AtomicUsize::new(TAKEN),
            end: AtomicUsize::new(0),
            stays: AtomicBool::new(false),
            next: std::ptr::null(),
        }));
        let mut first = FIRST.load(SeqCst);
        loop {
            new.next = first;
            match FIRST.compare_exchange(first, new, SeqCst, SeqCst) {
                Ok(_) => return new,
                Err(now) => first = now,
            }
        }
    });
    place.end.store(end, SeqCst);
    place.stays.store(false, SeqCst);
    place.start.store(start, SeqCst);
    place
}

/// The end of the last page of `len` bytes at `start`.
fn end_of(start: usize, len: usize) -> Option<usize> {
    start
        .checked_add(len)?
        .checked_next_multiple_of(rustix::param::page_size())
}

/// Addresses that a region will have; given back when this is dropped, unless it was
/// kept.
#[derive(Debug)]
pub struct Claim {
    at: usize,
    /// Bytes that were reserved here; 0: what is mapped there is the program's.
    reserved: usize,
}

impl Claim {
    /// Claims `len` bytes at `at` for a mapping of `file`, where nothing is mapped, and
    /// reserves them. `None` if the program gives no address (0), or the length is not known
    /// yet (0).
    ///
    /// # Errors
    /// `Busy` if anything is mapped there.
    pub fn of(file: &str, at: usize, len: usize) -> Result<Option<Claim>> {
        let Some(mut claim) = Claim::list(file, at, len)? else {
            return Ok(None);
        };
        let pages = len.next_multiple_of(rustix::param::page_size());
        reserve(at, pages).map_err(|e| match e {
            Errno::EXIST => Error::Busy(format!(
                "mapping {file}: {len} bytes at {at:#x} would take the place of other memory of this process"
            )),
            e => Error::io(format!("mapping {file}: {len} bytes at {at:#x}"), &e.into()),
        })?;
        claim.reserved = pages;
        Ok(Some(claim))
    }

    /// As [`Claim::of`], but in place of what is mapped there.
    ///
    /// # Errors
    /// `Busy` if any page of them belongs to a region.
    ///
    /// # Safety
    /// Nobody uses the memory there, and from here on it is whoever has the claim who maps there.
    pub unsafe fn over(file: &str, at: usize, len: usize) -> Result<Option<Claim>> {
        Claim::list(file, at, len)
    }

    /// Enters the addresses into the list.
    fn list(file: &str, at: usize, len: usize) -> Result<Option<Claim>> {
        if at == 0 || len == 0 {
            return Ok(None);
        }
        let Some(end) = end_of(at, len) else {
            return Err(Error::Invalid(format!(
                "mapping {file}: {len} bytes at {at:#x} reach beyond all addresses"
            )));
        };
        let own = enter(at, end);
        let mut others = all()
            .filter(|p| !std::ptr::eq(*p, own))
            .filter_map(RangeEntry::span);
        match others.find(|(s, e)| *s < end && at < *e) {
            None => Ok(Some(Claim { at, reserved: 0 })),
            Some((s, e)) => {
                own.start.store(FREE, SeqCst);
                Err(Error::Busy(format!(
                    "mapping {file}: {len} bytes at {at:#x} would take the place of a region, or of a part of one ({} bytes at {s:#x}); unmap it first",
                    e - s
                )))
            }
        }
    }

    /// The addresses are mapped now, and stay in the list.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.reserved > 0 {
            // SAFETY: reserved by this claim, and what was mapped there since is of no use.
            let done = unsafe { rustix::mm::munmap(self.at as *mut _, self.reserved) };
            debug_assert!(done.is_ok(), "a mapping of our own: {done:?}");
        }
        release(self.at);
    }
}

/// Maps nothing at these addresses, if nothing is mapped there.
fn reserve(at: usize, len: usize) -> Result<(), Errno> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: a new mapping, which replaces nothing.
    unsafe {
        let got = mmap_anonymous(at as *mut _, len, ProtFlags::empty(), flags)?;
        // Before Linux 4.17 the address is a hint.
        if got as usize != at {
            munmap(got, len)?;
            return Err(Errno::EXIST);
        }
    }
    Ok(())
}

/// The kernel has chosen these addresses for a region.
pub fn add(start: usize, len: usize) {
    enter(start, end_of(start, len).expect("it is mapped"));
}

/// Ordinary memory with the region's bytes takes its place when it is unmapped: these addresses
/// are variables of the program, or it may still have pointers to them.
pub fn leave_memory(start: usize) {
    if let Some(place) = all().find(|p| p.start.load(SeqCst) == start) {
        place.stays.store(true, SeqCst);
    }
}

/// Ends the mapping of `len` bytes, whole pages, of a region, and gives its addresses back.
///
/// # Errors
/// `Io`. Where ordinary memory was to take its place ([`leave_memory`]) the mapping stays.
///
/// # Safety
/// The mapping is the region's, and nobody uses it but the program its ordinary memory.
pub unsafe fn unmap(start: usize, len: usize) -> Result<()> {
    let place = all().find(|p| p.start.load(SeqCst) == start);
    let stays = place.is_some_and(|p| p.stays.load(SeqCst));
    // Before other mappings can get the addresses.
    release(start);
    let (at, what) = (start as *mut u8, || "unmapping".to_owned());
    if stays {
        // SAFETY: the caller's promise; a region's memory can be read.
        return unsafe { replace(at, std::slice::from_raw_parts(at, len)) };
    }
    // SAFETY: the caller's promise.
    let done = unsafe { rustix::mm::munmap(at.cast(), len) };
    done.map_err(std::io::Error::from).context(what)
}

/// Puts ordinary memory with these bytes in place of what is mapped at `at`; pages of zeros stay
/// untouched. At no moment is nothing mapped there: what another thread maps meanwhile gets other
/// addresses.
///
/// # Errors
/// `Io`; what is mapped there stays.
///
/// # Safety
/// The pages from `at` on that the bytes fill are the caller's, and nobody else uses them.
pub unsafe fn replace(at: *mut u8, bytes: &[u8]) -> Result<()> {
    use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};
    let what = || format!("making {} bytes at {at:p} ordinary memory", bytes.len());
    let len = bytes.len().next_multiple_of(rustix::param::page_size());
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, with room for the bytes, which the kernel then moves.
    unsafe {
        let new = mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::PRIVATE);
        let new = new.map_err(std::io::Error::from).context(what)?;
        for (page, at) in bytes.chunks(ZEROS.len()).zip((0..).step_by(ZEROS.len())) {
            if *page != ZEROS[..page.len()] {
                std::ptr::copy_nonoverlapping(page.as_ptr(), new.cast::<u8>().add(at), page.len());
            }
        }
        let moved = mremap_fixed(new, len, len, MremapFlags::MAYMOVE, at.cast());
        let moved = moved.map_err(std::io::Error::from).context(what);
        if moved.is_err() {
            let _ = munmap(new, len);
        }
        moved.map(drop)
    }
}

/// A region's addresses are given back.
pub fn release(start: usize) {
    let own = |p: &&RangeEntry| {
        p.start
            .compare_exchange(start, FREE, SeqCst, SeqCst)
            .is_ok()
    };
    let _ = all().find(own);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_refused_until_it_is_given_back() {
        let page = rustix::param::page_size();
        // Addresses that no other test has.
        let at = 1 << 60;
        // SAFETY: nothing is mapped there, nor will be.
        let claim = |at, len| unsafe { Claim::over("f", at, len) };
        let refused = |at, len| matches!(claim(at, len), Err(Error::Busy(_)));
        assert!(claim(0, 1).unwrap().is_none());
        assert!(claim(at, 0).unwrap().is_none());
        assert!(matches!(claim(at, usize::MAX), Err(Error::Invalid(_))));
        let first = claim(at, page + 1).unwrap().unwrap();
        assert!(refused(at, 1) && refused(at + page, 1) && refused(at - page, 8 * page));
        assert!(!refused(at + 2 * page, page) && !refused(at - page, page));
        drop(first);
        claim(at, 1).unwrap().unwrap().keep();
        assert!(refused(at, page));
        release(at);
        add(at, 3 * page);
        assert!(refused(at + 2 * page, page));
        release(at);
        assert!(!refused(at, 3 * page));
    }

    /// The addresses of variables were free from the end of their region to the end of the detach:
    /// another thread's memory got them, and was destroyed when the variables came back.
    #[test]
    fn a_region_over_variables_leaves_memory_with_its_bytes() {
        let page = rustix::param::page_size();
        let at = 0x2a4e_6f6b_0000;
        for stays in [true, false] {
            reserve(at, 2 * page).unwrap();
            // SAFETY: reserved just now.
            unsafe { replace(at as *mut u8, &vec![7; page + 1]).unwrap() };
            // SAFETY: nobody else uses these pages.
            unsafe { Claim::over("f", at, page + 1) }
                .unwrap()
                .unwrap()
                .keep();
            if stays {
                leave_memory(at);
            }
            // SAFETY: the mapping made above.
            unsafe { unmap(at, 2 * page).unwrap() };
            assert_eq!(reserve(at, page).is_err(), stays);
            if stays {
                // SAFETY: the memory that was left.
                let left = unsafe { std::slice::from_raw_parts(at as *const u8, page + 2) };
                assert!(left[..=page].iter().all(|b| *b == 7) && left[page + 1] == 0);
                // SAFETY: as above.
                unsafe { rustix::mm::munmap(at as *mut _, 2 * page).unwrap() };
            }
        }
        // Of the last round.
        // SAFETY: as above.
        unsafe { rustix::mm::munmap(at as *mut _, page).unwrap() };
    }

    #[test]
    fn of_two_at_the_same_moment_one_succeeds_at_most() {
        let at = 2 << 60;
        for _ in 0..200 {
            let both = std::thread::scope(|s| {
                let claim = || {
                    // SAFETY: nothing is mapped there, nor will be.
                    unsafe { Claim::over("f", at, 4096) }.is_ok_and(|c| {
                        c.unwrap().keep();
                        true
                    })
                };
                let other = s.spawn(claim);
                claim() && other.join().unwrap()
            });
            assert!(!both);
            release(at);
        }
    }

    /// What is claimed without a promise takes the place of nothing, and nothing takes its place.
    #[test]
    fn addresses_are_reserved_where_nothing_is_mapped() {
        let page = rustix::param::page_size();
        reserve(0x2a4d_6f6b_0000, page).unwrap();
        let at = 0x2a4d_6f6b_0000 - page;
        let busy = |at, len| matches!(Claim::of("f", at, len), Err(Error::Busy(_)));
        assert!(busy(at, page + 1) && busy(at + page, 1));
        let claim = Claim::of("f", at, page).unwrap().unwrap();
        assert_eq!(reserve(at, page), Err(Errno::EXIST));
        assert!(busy(at, page));
        drop(claim);
        drop(Claim::of("f", at, page).unwrap().unwrap());
    }
}
