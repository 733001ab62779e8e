//! The log: what the memory had before the transaction's stores, and the levels of nesting.
//!
//! An entry is a row of 8-byte words, with its end last, since the log is read backwards only:
//!
//! | kind | words |
//! |---|---|
//! | old bytes | the bytes (rounded up to words), address, length * 4 |
//! | fresh bytes, which an abort does not restore | address, length * 4 + 1 |
//! | a call at an abort | argument, function, 2 |
//!
//! Invariants:
//!
//! - `base <= top <= end`.
//! - A level's mark is a number of words from `base`.
//! - Every word below `top` was written.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{Ordering::*, compiler_fence};

use crate::open::Mark;

/// The kinds of entries, in the two lowest bits of an entry's last word.
const OLD: usize = 0;
const FRESH: usize = 1;
const CALL: usize = 2;

const WORD: usize = 8;

/// What libmojim_itm.so has libmojim.so do.
#[repr(C)]
pub struct Slow {
    /// Makes room for so many words more. False if there is no memory.
    pub grow: unsafe extern "C-unwind" fn(*mut Log, usize) -> bool,
    /// Makes room for one more level. False if there is no memory.
    pub deepen: unsafe extern "C-unwind" fn(*mut Log) -> bool,
    /// Waits until transactions may begin again ([`crate::alone`]), with the mark down
    /// meanwhile.
    pub wait: unsafe extern "C-unwind" fn(*mut Log),
    /// Commits the outermost level of a captured block, whatever it takes; the log is empty
    /// afterwards.
    pub commit: unsafe extern "C-unwind" fn(*mut Log),
    /// Takes back what was begun after the level's mark, and ends the level. `sp`: the
    /// stack below which nothing is restored.
    pub abort: unsafe extern "C-unwind" fn(*mut Log, usize),
    /// Has a function called after the commit.
    pub on_commit: unsafe extern "C-unwind" fn(
        *mut Log,
        unsafe extern "C-unwind" fn(*mut c_void),
        *mut c_void,
    ),
    /// The transaction cannot be committed: errno, and a text that ends with a zero byte.
    pub fail: unsafe extern "C-unwind" fn(*mut Log, i32, *const std::ffi::c_char),
}

/// A level of nesting.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Level {
    /// Of a captured block: the registers to go on with after an abort. The first is the stack
    /// pointer.
    pub registers: [usize; 8],
    /// Words in the log when it began.
    pub mark: usize,
    /// Entries of the list of what happens later when it began.
    pub later: u32,
    /// 1: a captured block. 0: `mojim_tx_begin`.
    pub captured: u32,
    /// Exceptions that were being caught when it began.
    pub catches: u32,
    /// The transaction's number; of the outermost level.
    pub number: u32,
}

/// Which of its caches of heaps a thread uses without a lock. Only the thread uses it.
#[repr(C)]
pub struct Cached {
    /// The one that it used last; none while a transaction of the thread is open.
    pub now: *mut u8,
    /// The one that it used last.
    pub last: *mut u8,
    /// None.
    pub none: *mut u8,
}

/// A thread's transaction, as both libraries know it.
#[repr(C)]
pub struct Log {
    top: *mut u64,
    end: *mut u64,
    base: *mut u64,
    levels: *mut Level,
    /// Open levels. 0: no transaction.
    pub depth: u32,
    /// Levels that there is room for.
    room: u32,
    /// Whether a transaction is open, for other threads.
    pub mark: Mark,
    /// Entries of the list of what happens later: libmojim.so's.
    pub later: u32,
    /// Not 0: it cannot be committed, for this reason (an errno).
    pub broken: i32,
    /// Exceptions that are being caught in it.
    pub catches: u32,
    /// Transactions that this thread has begun.
    pub begun: u32,
    /// An exception that is allocated and not yet thrown.
    pub unthrown: *mut c_void,
    /// Where libmojim_itm.so has noted the log for the thread, or null.
    pub noted: *mut *mut Log,
    /// What libmojim.so does.
    pub slow: &'static Slow,
    /// The thread's word of its caches, or null.
    pub cached: *mut Cached,
}

/// An entry of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// These bytes were, or will be, stored to.
    Bytes {
        /// The first.
        addr: usize,
        /// How many.
        len: usize,
    },
    /// A call at an abort.
    Call,
}

impl Log {
    /// An empty log without room.
    pub const fn new(slow: &'static Slow) -> Log {
        Log {
            top: std::ptr::null_mut(),
            end: std::ptr::null_mut(),
            base: std::ptr::null_mut(),
            levels: std::ptr::null_mut(),
            depth: 0,
            room: 0,
            mark: Mark::new(),
            later: 0,
            broken: 0,
            catches: 0,
            begun: 0,
            unthrown: std::ptr::null_mut(),
            noted: std::ptr::null_mut(),
            slow,
            cached: std::ptr::null_mut(),
        }
    }

    /// Words in the log.
    pub fn words(&self) -> usize {
        (self.top as usize - self.base as usize) / WORD
    }

    /// Words that there is room for.
    pub fn capacity(&self) -> usize {
        (self.end as usize - self.base as usize) / WORD
    }

    /// The open levels, outermost first.
    pub fn levels(&self) -> &[Level] {
        match self.depth {
            0 => &[],
            // SAFETY: so many were written, and there is room for at least these.
            n => unsafe { std::slice::from_raw_parts(self.levels, n as usize) },
        }
    }

    /// Gives the log other room: `capacity` words, to which the caller has copied the words
    /// there are. Returns the former room.
    ///
    /// # Safety
    /// `base` begins such memory, which the caller leaves to the log.
    pub unsafe fn replace(&mut self, base: *mut u64, capacity: usize) -> (*mut u64, usize) {
        let (words, old) = (self.words(), (self.base, self.capacity()));
        assert!(words <= capacity);
        self.base = base;
        self.top = base.wrapping_add(words);
        self.end = base.wrapping_add(capacity);
        old
    }

    /// As [`Log::replace`], for the levels.
    ///
    /// # Safety
    /// `levels` begins memory for `room` levels, to which the caller has copied those there
    /// are, and which it leaves to the log.
    pub unsafe fn replace_levels(&mut self, levels: *mut Level, room: u32) -> (*mut Level, u32) {
        assert!(self.depth <= room);
        let old = (self.levels, self.room);
        (self.levels, self.room) = (levels, room);
        old
    }

    /// The first word, for whoever copies the log.
    pub fn base(&self) -> *mut u64 {
        self.base
    }

    /// Begins a level, and a transaction if there is none. Null if there is no memory.
    ///
    /// # Safety
    /// `log` is the calling thread's.
    #[inline(always)]
    pub unsafe fn begin(log: *mut Log, captured: bool) -> *mut Level {
        // SAFETY: the caller's promise; `deepen` makes room for the level, and nothing that is
        // called holds a reference into the log beyond its call.
        unsafe {
            let depth = (*log).depth;
            if depth == (*log).room && !((*log).slow.deepen)(log) {
                return std::ptr::null_mut();
            }
            if depth == 0 {
                (*log).mark.raise();
                if (*log).mark.is_held() {
                    ((*log).slow.wait)(log);
                }
                (*log).begun = (*log).begun.wrapping_add(1);
                if let Some(cached) = (*log).cached.as_mut() {
                    cached.now = cached.none;
                }
            }
            let level = (*log).levels.add(depth as usize);
            (*level).mark = ((*log).top as usize - (*log).base as usize) / WORD;
            (*level).later = (*log).later;
            (*level).captured = captured as u32;
            (*level).catches = (*log).catches;
            (*level).number = (*log).begun;
            (*log).depth = depth + 1;
            level
        }
    }

    /// Ends the innermost level; what it has stored is the outer level's. False if it is the
    /// outermost one and there is something to commit: then nothing has changed.
    ///
    /// # Safety
    /// `log` is the calling thread's, and a level is open.
    #[inline(always)]
    pub unsafe fn end(log: *mut Log) -> bool {
        // SAFETY: the caller's promise.
        unsafe {
            let depth = (*log).depth;
            if depth == 1 {
                let something = (*log).top != (*log).base || (*log).later != 0;
                if something || (*log).broken != 0 {
                    return false;
                }
                (*log).depth = 0;
                (*log).ended();
                return true;
            }
            (*log).depth = depth - 1;
            true
        }
    }

    #[inline(always)]
    fn ended(&mut self) {
        // SAFETY: the word of the thread whose log it is.
        if let Some(cached) = unsafe { self.cached.as_mut() } {
            cached.now = cached.last;
        }
        self.mark.lower();
    }

    /// Nothing is open any more.
    pub fn close(&mut self) {
        self.top = self.base;
        (self.depth, self.later, self.broken) = (0, 0, 0);
        self.ended();
    }

    /// Ends the innermost level, after it was taken back.
    pub fn drop_level(&mut self) {
        self.depth -= 1;
        if self.depth == 0 {
            self.close();
        }
    }

    /// Room for `words`; null if there is no memory for them.
    ///
    /// # Safety
    /// `log` is the calling thread's.
    #[inline(always)]
    unsafe fn room(log: *mut Log, words: usize) -> *mut u64 {
        // SAFETY: the caller's promise.
        unsafe {
            let top = (*log).top;
            if (((*log).end as usize - top as usize) / WORD) < words {
                return Log::room_grown(log, words);
            }
            top
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn room_grown(log: *mut Log, words: usize) -> *mut u64 {
        // SAFETY: the caller's promise, as in `room`.
        unsafe {
            match ((*log).slow.grow)(log, words) {
                true => (*log).top,
                false => std::ptr::null_mut(),
            }
        }
    }

    /// Notes the `N` bytes at `addr`, which are about to be stored to. False if there is no
    /// memory for it.
    ///
    /// # Safety
    /// `log` is the calling thread's, and the bytes can be read. `N` is 1, 2, 4, 8 or a
    /// multiple of 8.
    #[inline(always)]
    pub unsafe fn save<const N: usize>(log: *mut Log, addr: *const u8) -> bool {
        // SAFETY: the caller's promise; there is room for the words that are written.
        unsafe {
            let words = N.div_ceil(WORD);
            let at = Log::room(log, words + 2);
            if at.is_null() {
                return false;
            }
            match N {
                1 => at.write(u64::from(addr.read())),
                2 => at.write(u64::from(addr.cast::<u16>().read_unaligned())),
                4 => at.write(u64::from(addr.cast::<u32>().read_unaligned())),
                8 => at.write(addr.cast::<u64>().read_unaligned()),
                _ => std::ptr::copy_nonoverlapping(addr, at.cast(), N),
            }
            Log::finish(log, at, words, addr as usize, N * 4 + OLD);
            true
        }
    }

    /// As [`Log::save`], for any number of bytes.
    ///
    /// # Safety
    /// `log` is the calling thread's, and the bytes can be read.
    pub unsafe fn save_bytes(log: *mut Log, addr: *const u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        // SAFETY: the caller's promise; there is room for the words that are written.
        unsafe {
            let words = len.div_ceil(WORD);
            let at = Log::room(log, words + 2);
            if at.is_null() {
                return false;
            }
            at.add(words - 1).write(0);
            std::ptr::copy_nonoverlapping(addr, at.cast(), len);
            Log::finish(log, at, words, addr as usize, len * 4 + OLD);
            true
        }
    }

    /// Notes bytes that hold nothing yet: they are committed, and not restored by an abort.
    ///
    /// # Safety
    /// `log` is the calling thread's.
    pub unsafe fn fresh(log: *mut Log, addr: *const u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        // Memory of so many bytes there is none: the length would not fit its word.
        if len > usize::MAX >> 3 {
            return false;
        }
        // SAFETY: the caller's promise; there is room for the words that are written.
        unsafe {
            let at = Log::room(log, 2);
            if at.is_null() {
                return false;
            }
            Log::finish(log, at, 0, addr as usize, len * 4 + FRESH);
            true
        }
    }

    /// Has an abort call `f` when it has taken back what comes later.
    ///
    /// # Safety
    /// `log` is the calling thread's; `f` may be called with `arg` then.
    pub unsafe fn on_abort(
        log: *mut Log,
        f: unsafe extern "C-unwind" fn(*mut c_void),
        arg: *mut c_void,
    ) -> bool {
        // SAFETY: the caller's promise; there is room for the words that are written.
        unsafe {
            let at = Log::room(log, 3);
            if at.is_null() {
                return false;
            }
            at.write(arg as u64);
            Log::finish(log, at, 1, f as usize, CALL);
            true
        }
    }

    /// # Safety
    /// There is room for `words + 2` words at `at`, the log's top.
    #[inline(always)]
    unsafe fn finish(log: *mut Log, at: *mut u64, words: usize, addr: usize, last: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            at.add(words).write(addr as u64);
            at.add(words + 1).write(last as u64);
            // A handler of a signal that looks at the log finds whole entries.
            compiler_fence(Release);
            (*log).top = at.add(words + 2);
        }
    }

    /// The entry that ends at the `end`th word, and where it begins.
    ///
    /// # Safety
    /// An entry ends there.
    unsafe fn entry(&self, end: usize) -> (usize, Entry, usize) {
        // SAFETY: the words of an entry.
        let (addr, last) = unsafe {
            let at = self.base.add(end);
            (at.sub(2).read() as usize, at.sub(1).read() as usize)
        };
        let (len, kind) = (last / 4, last % 4);
        match kind {
            OLD => (
                end - 2 - len.div_ceil(WORD),
                Entry::Bytes { addr, len },
                kind,
            ),
            FRESH => (end - 2, Entry::Bytes { addr, len }, kind),
            _ => (end - 3, Entry::Call, kind),
        }
    }

    /// All entries, the latest first.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let mut end = self.words();
        std::iter::from_fn(move || {
            if end == 0 {
                return None;
            }
            // SAFETY: entries fill the log, and `end` is where one ends.
            let (begin, entry, _) = unsafe { self.entry(end) };
            end = begin;
            Some(entry)
        })
    }

    /// Takes back everything down to `mark`: the memory has what it had, but for the bytes
    /// whose address is in `dead` (frames of the stack that are gone).
    ///
    /// # Safety
    /// `log` is the calling thread's; the bytes can be written; `mark` is a level's.
    pub unsafe fn take_back(log: *mut Log, mark: usize, dead: Range<usize>) {
        // SAFETY: the caller's promise. An entry is gone before its call, which may append
        // (and so move the log) or look at it.
        unsafe {
            loop {
                let end = (*log).words();
                if end <= mark {
                    break;
                }
                let (begin, entry, kind) = (*log).entry(end);
                let at = (*log).base.add(begin);
                (*log).top = at;
                match (entry, kind) {
                    (Entry::Bytes { addr, len }, OLD) => {
                        restore(at.cast(), addr, len, &dead);
                    }
                    (Entry::Bytes { .. }, _) => {}
                    (Entry::Call, _) => {
                        let arg = at.read() as *mut c_void;
                        // A function again by way of a pointer: a number has no provenance.
                        let f = at.add(1).read() as *const ();
                        let f: unsafe extern "C-unwind" fn(*mut c_void) = std::mem::transmute(f);
                        f(arg);
                    }
                }
            }
        }
    }
}

/// # Safety
/// The bytes can be written, but for those in `dead`.
#[inline]
unsafe fn restore(from: *const u8, addr: usize, len: usize, dead: &Range<usize>) {
    let to = addr as *mut u8;
    // SAFETY: the caller's promise.
    unsafe {
        if addr >= dead.end || addr + len <= dead.start {
            match len {
                8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read()),
                _ => std::ptr::copy_nonoverlapping(from, to, len),
            }
            return;
        }
        // A range may begin in a frame that is gone and end above it.
        for i in 0..len {
            if !dead.contains(&(addr + i)) {
                to.add(i).write(from.add(i).read());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C-unwind" fn grow(log: *mut Log, words: usize) -> bool {
        // SAFETY: the test's own log.
        unsafe {
            let used = (*log).words();
            let capacity = ((*log).capacity() * 2).max(used + words).max(16);
            let mut room = vec![0u64; capacity].into_boxed_slice();
            if used > 0 {
                std::ptr::copy_nonoverlapping((*log).base(), room.as_mut_ptr(), used);
            }
            let base = Box::into_raw(room).cast::<u64>();
            free((*log).replace(base, capacity));
        }
        true
    }

    unsafe fn free((old, capacity): (*mut u64, usize)) {
        if capacity > 0 {
            // SAFETY: made by `grow`.
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(old, capacity)) });
        }
    }

    unsafe extern "C-unwind" fn deepen(log: *mut Log) -> bool {
        // SAFETY: the test's own log.
        unsafe {
            let levels = vec![std::mem::zeroed::<Level>(); 4].into_boxed_slice();
            (*log).replace_levels(Box::into_raw(levels).cast(), 4);
        }
        true
    }

    unsafe extern "C-unwind" fn nothing(_: *mut Log) {}
    unsafe extern "C-unwind" fn no_abort(_: *mut Log, _: usize) {}
    unsafe extern "C-unwind" fn later(
        _: *mut Log,
        _: unsafe extern "C-unwind" fn(*mut c_void),
        _: *mut c_void,
    ) {
    }
    unsafe extern "C-unwind" fn fail(_: *mut Log, _: i32, _: *const std::ffi::c_char) {}

    static SLOW: Slow = Slow {
        grow,
        deepen,
        wait: nothing,
        commit: nothing,
        abort: no_abort,
        on_commit: later,
        fail,
    };

    struct Owned(*mut Log);

    impl Owned {
        fn new() -> Owned {
            Owned(Box::into_raw(Box::new(Log::new(&SLOW))))
        }
    }

    impl Drop for Owned {
        fn drop(&mut self) {
            // SAFETY: made by `new`, `grow` and `deepen`.
            unsafe {
                free((*self.0).replace_empty());
                let (levels, room) = ((*self.0).levels, (*self.0).room as usize);
                if room > 0 {
                    drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(
                        levels, room,
                    )));
                }
                drop(Box::from_raw(self.0));
            }
        }
    }

    impl Log {
        fn replace_empty(&mut self) -> (*mut u64, usize) {
            self.close();
            // SAFETY: no words are left, so no room is needed.
            unsafe { self.replace(std::ptr::null_mut(), 0) }
        }
    }

    unsafe extern "C-unwind" fn count(arg: *mut c_void) {
        // SAFETY: the test's counter.
        unsafe { *arg.cast::<u32>() += 1 };
    }

    /// While a transaction is open, at any depth and however it ends, the thread uses no cache of a heap
    /// without a lock: what it would free there, no abort would take back.
    #[test]
    fn no_cache_is_used_within_a_transaction() {
        let [mut cache, mut zeros] = [0u8; 2];
        let (last, none) = (&raw mut cache, &raw mut zeros);
        let word = Box::into_raw(Box::new(Cached {
            now: last,
            last,
            none,
        }));
        let log = Owned::new();
        // SAFETY: the test's own log and word.
        unsafe {
            (*log.0).cached = word;
            Log::begin(log.0, true);
            assert_eq!((*word).now, none);
            Log::begin(log.0, false);
            assert!(Log::end(log.0));
            assert_eq!((*word).now, none);
            assert!(Log::end(log.0));
            assert_eq!((*word).now, last);
            Log::begin(log.0, true);
            Log::begin(log.0, true);
            (*log.0).drop_level();
            assert_eq!((*word).now, none);
            (*log.0).drop_level();
            assert_eq!((*word).now, last);
            Log::begin(log.0, false);
            (*log.0).close();
            assert_eq!((*word).now, last);
            (*log.0).cached = std::ptr::null_mut();
            drop(Box::from_raw(word));
        }
    }

    /// Both libraries lay a log out alike, or do not load together: the number in the name of the
    /// function by which one gets it from the other is that of this layout. So after a change here
    /// the name gets the next number: in the header, in mojim-c, in mojim-itm, and in this test.
    #[test]
    #[cfg_attr(miri, ignore = "it reads files")]
    fn a_layout_has_its_number() {
        use std::mem::offset_of;
        const NUMBER: u32 = 2;
        let log = [
            offset_of!(Log, top),
            offset_of!(Log, end),
            offset_of!(Log, base),
            offset_of!(Log, levels),
            offset_of!(Log, depth),
            offset_of!(Log, room),
            offset_of!(Log, mark),
            offset_of!(Log, later),
            offset_of!(Log, broken),
            offset_of!(Log, catches),
            offset_of!(Log, begun),
            offset_of!(Log, unthrown),
            offset_of!(Log, noted),
            offset_of!(Log, slow),
            offset_of!(Log, cached),
            size_of::<Log>(),
        ];
        let expected = [
            0, 8, 16, 24, 32, 36, 40, 56, 60, 64, 68, 72, 80, 88, 96, 104,
        ];
        assert_eq!(log, expected);
        let level = [
            offset_of!(Level, registers),
            offset_of!(Level, mark),
            offset_of!(Level, later),
            offset_of!(Level, captured),
            offset_of!(Level, catches),
            offset_of!(Level, number),
            size_of::<Level>(),
        ];
        assert_eq!(level, [0, 64, 72, 76, 80, 84, 88]);
        let slow = [
            offset_of!(Slow, grow),
            offset_of!(Slow, deepen),
            offset_of!(Slow, wait),
            offset_of!(Slow, commit),
            offset_of!(Slow, abort),
            offset_of!(Slow, on_commit),
            offset_of!(Slow, fail),
            size_of::<Slow>(),
        ];
        assert_eq!(slow, [0, 8, 16, 24, 32, 40, 48, 56]);
        assert_eq!(Mark::layout(), [0, 4, 8, 16]);
        assert_eq!([OLD, FRESH, CALL, WORD], [0, 1, 2, 8]);
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for file in [
            "include/mojim_tx.h",
            "crates/mojim-c/src/tx.rs",
            "crates/mojim-itm/src/thread.rs",
        ] {
            let text = std::fs::read_to_string(root.join(file)).unwrap();
            let name = format!("mojim_tx_thread_{NUMBER}()");
            let declared = format!("mojim_tx_thread_{NUMBER}(void)");
            assert!(text.contains(&name) || text.contains(&declared), "{file}");
        }
    }

    /// Stores of all sizes are taken back to any level's mark, the oldest bytes last, and calls
    /// happen in their place.
    #[test]
    fn what_was_stored_is_taken_back() {
        let log = Owned::new();
        let mut memory: Vec<u8> = (0..=255).collect();
        let mut calls = 0u32;
        let p = memory.as_mut_ptr();
        let mut models = Vec::new();
        // SAFETY: the test's own memory and log.
        unsafe {
            for round in 0..3u8 {
                let level = Log::begin(log.0, round % 2 == 0);
                models.push(((*level).mark, std::slice::from_raw_parts(p, 256).to_vec()));
                for i in 0..40usize {
                    let at = p.add(i * 5 % 200);
                    let len = match i % 6 {
                        0 => (Log::save::<1>(log.0, at), 1).1,
                        1 => (Log::save::<2>(log.0, at), 2).1,
                        2 => (Log::save::<4>(log.0, at), 4).1,
                        3 => (Log::save::<8>(log.0, at), 8).1,
                        4 => (Log::save::<32>(log.0, at), 32).1,
                        _ => (Log::save_bytes(log.0, at, 13), 13).1,
                    };
                    at.write_bytes(round.wrapping_mul(77) ^ i as u8, len);
                }
                assert!(Log::on_abort(log.0, count, (&raw mut calls).cast()));
                assert!(Log::fresh(log.0, p.add(250), 3));
            }
            assert_eq!((*log.0).levels().len(), 3);
            assert_eq!((*log.0).entries().count(), 3 * 42);
            for (n, (mark, model)) in models.iter().enumerate().rev() {
                Log::take_back(log.0, *mark, 0..0);
                assert_eq!(std::slice::from_raw_parts(p, 256), model);
                assert_eq!(calls, 3 - n as u32);
                (*log.0).drop_level();
            }
            assert_eq!(((*log.0).words(), (*log.0).depth), (0, 0));
        }
    }

    /// Bytes of frames that are gone stay as they are; their neighbours are restored.
    #[test]
    fn dead_frames_are_left_alone() {
        let log = Owned::new();
        let mut memory = [1u8; 32];
        let p = memory.as_mut_ptr();
        // SAFETY: the test's own memory and log.
        unsafe {
            Log::begin(log.0, true);
            assert!(Log::save::<16>(log.0, p.add(8)));
            p.write_bytes(2, 32);
            let dead = p as usize..p as usize + 12;
            Log::take_back(log.0, 0, dead);
            let now = std::slice::from_raw_parts(p, 32);
            assert_eq!(
                (&now[..12], &now[12..24], &now[24..]),
                (&[2; 12][..], &[1; 12][..], &[2; 8][..])
            );
        }
    }

    /// An empty transaction ends without a commit; one that has stored does not.
    #[test]
    fn only_what_was_stored_needs_a_commit() {
        let log = Owned::new();
        let x = 5u64;
        // SAFETY: the test's own memory and log.
        unsafe {
            Log::begin(log.0, true);
            Log::begin(log.0, true);
            assert!(Log::end(log.0));
            assert!(Log::end(log.0));
            assert_eq!((*log.0).depth, 0);
            Log::begin(log.0, true);
            assert!(Log::save::<8>(log.0, (&raw const x).cast()));
            assert!(!Log::end(log.0));
            assert_eq!((*log.0).depth, 1);
        }
    }
}
