//! Tests of both kinds of tracker against the real kernel.
//!
//! With mprotect a report may hold more than was written, since other tests of this process
//! use up the run budget. So exact reports are asked of uffd only.

#![allow(clippy::single_range_in_vec_init)] // lists of ranges are what is tested

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{RwLock, RwLockReadGuard};

use mojim_env::rng::Rng;
use rustix::fs::{Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::*;
use mojim_env::locks;

mod release;

fn page() -> usize {
    rustix::param::page_size()
}

/// A private mapping, unmapped when dropped.
struct Map {
    base: *mut u8,
    len: usize,
    file: Option<(OwnedFd, PathBuf)>,
}

// SAFETY: tests share it between threads through the volatile and atomic accesses below.
unsafe impl Sync for Map {}
// SAFETY: as above.
unsafe impl Send for Map {}

impl Map {
    fn anonymous(len: usize) -> Map {
        // SAFETY: a fresh mapping.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Map {
            base: base.unwrap().cast(),
            len,
            file: None,
        }
    }

    /// A mapping of a sparse file in `dir`.
    fn file(dir: &Path, len: usize) -> Map {
        static N: AtomicUsize = AtomicUsize::new(0);
        let n = N.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("mojim-track-{}-{n}", std::process::id()));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)).unwrap();
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        // SAFETY: a fresh mapping.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
                &fd,
                0,
            )
        };
        Map {
            base: base.unwrap().cast(),
            len,
            file: Some((fd, path)),
        }
    }

    fn attach(&self, kind: Kind) -> Box<dyn Tracker> {
        // SAFETY: every test drops the tracker before the map.
        unsafe {
            match kind {
                // In chunks so small that most tests have several, and cross their borders.
                Kind::TwoLevel => two_level::of_chunks(self.base as usize, self.len, 3, None),
                kind => attach(self.base, self.len, kind, false),
            }
        }
        .unwrap()
    }

    fn store(&self, offset: usize, value: u8) {
        assert!(offset < self.len);
        // SAFETY: within the mapping.
        unsafe { self.base.add(offset).write_volatile(value) }
    }

    fn load(&self, offset: usize) -> u8 {
        assert!(offset < self.len);
        // SAFETY: within the mapping.
        unsafe { self.base.add(offset).read_volatile() }
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped, aligned, and accessed as atomics only by those who call this.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len / 8) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the tests are done with it.
        unsafe { rustix::mm::munmap(self.base.cast(), self.len).unwrap() };
        if let Some((_, path)) = &self.file {
            rustix::fs::unlink(path).unwrap();
        }
    }
}

/// The kinds that this kernel has.
fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::Mprotect];
    if uffd_available() {
        kinds.extend([Kind::Uffd, Kind::TwoLevel]);
    } else {
        eprintln!("no userfaultfd WP_ASYNC here: testing mprotect only");
    }
    kinds
}

/// One mapping of each sort.
fn maps(len: usize) -> Vec<Map> {
    let mut maps = vec![Map::anonymous(len), Map::file(&std::env::temp_dir(), len)];
    if Path::new("/dev/shm").is_dir() {
        maps.push(Map::file(Path::new("/dev/shm"), len));
    }
    maps
}

fn collect(t: &dyn Tracker, range: Range<usize>, rearm: bool) -> Vec<Range<usize>> {
    let mut out = Vec::new();
    t.collect(range.start, range.end, rearm, &mut out).unwrap();
    check_shape(&out, &range);
    out
}

/// Ascending, apart from one another, page aligned, within the range.
fn check_shape(out: &[Range<usize>], range: &Range<usize>) {
    for r in out {
        assert!(r.start < r.end && (r.start | r.end) % page() == 0, "{r:?}");
        assert!(
            range.start <= r.start && r.end <= range.end,
            "{r:?} in {range:?}"
        );
    }
    for pair in out.windows(2) {
        assert!(pair[0].end < pair[1].start, "{pair:?}");
    }
}

/// `got` is `want`, or for mprotect at least that.
fn assert_report(t: &dyn Tracker, got: &[Range<usize>], want: &[Range<usize>]) {
    if t.kind() != "mprotect" {
        assert_eq!(got, want);
        return;
    }
    for w in want {
        assert!(
            got.iter().any(|g| g.start <= w.start && w.end <= g.end),
            "{w:?} not in {got:?}"
        );
    }
}

fn pages(r: Range<usize>) -> Range<usize> {
    r.start * page()..r.end * page()
}

#[test]
fn life_of_pages() {
    for kind in kinds() {
        for map in maps(100 * page()) {
            let all = 0..map.len;
            map.store(7 * page(), 1); // before the attach: not reported
            let t = map.attach(kind);
            assert_eq!(collect(&*t, all.clone(), true), []);
            // Reading is not writing, of populated pages or others.
            assert_eq!((map.load(7 * page()), map.load(50 * page())), (1, 0));
            assert_eq!(collect(&*t, all.clone(), false), []);

            for p in [0, 7, 8, 9, 63, 64, 99] {
                map.store(p * page() + p, 3);
            }
            let want = [pages(0..1), pages(7..10), pages(63..65), pages(99..100)];
            // Without rearm they stay.
            assert_report(&*t, &collect(&*t, all.clone(), false), &want);
            map.store(20 * page(), 4);
            let want = [
                pages(0..1),
                pages(7..10),
                pages(20..21),
                pages(63..65),
                pages(99..100),
            ];
            assert_report(&*t, &collect(&*t, all.clone(), false), &want);
            // A part of the range, with rearm: the rest stays.
            let got = collect(&*t, pages(8..64), true);
            assert_report(&*t, &got, &[pages(8..10), pages(20..21), pages(63..64)]);
            assert_eq!(collect(&*t, pages(8..64), true), []);
            let want = [pages(0..1), pages(7..8), pages(64..65), pages(99..100)];
            assert_report(&*t, &collect(&*t, all.clone(), true), &want);
            assert_eq!(collect(&*t, all.clone(), true), []);
            // Stores after a collect, to pages known and new.
            map.store(8 * page(), 5);
            map.store(30 * page(), 5);
            let want = [pages(8..9), pages(30..31)];
            assert_report(&*t, &collect(&*t, all.clone(), true), &want);
            assert_eq!(collect(&*t, all.clone(), true), []);
            assert_eq!(map.load(8 * page()), 5);

            drop(t);
            map.store(8 * page(), 6);
            // And again on the same mapping.
            let t = map.attach(kind);
            assert_eq!(collect(&*t, all.clone(), true), []);
            map.store(31 * page(), 6);
            assert_report(&*t, &collect(&*t, all, true), &[pages(31..32)]);
        }
    }
}

#[test]
fn appends_and_marks() {
    for kind in kinds() {
        let map = Map::anonymous(20 * page());
        let t = map.attach(kind);
        map.store(page(), 1);
        // Merges with nothing that was there before.
        let mut out = vec![0..page()];
        t.collect(0, map.len, true, &mut out).unwrap();
        assert_eq!(out[0], 0..page());
        assert_report(&*t, &out[1..], &[pages(1..2)]);
        // The sync point failed.
        t.mark(page() + 5, page() + 6);
        t.mark(15 * page(), usize::MAX);
        map.store(2 * page(), 1);
        assert_report(
            &*t,
            &collect(&*t, 0..map.len, false),
            &[pages(1..3), pages(15..20)],
        );
        assert_report(
            &*t,
            &collect(&*t, pages(2..16), true),
            &[pages(2..3), pages(15..16)],
        );
        assert_report(
            &*t,
            &collect(&*t, 0..map.len, true),
            &[pages(1..2), pages(16..20)],
        );
        assert_eq!(collect(&*t, 0..map.len, true), []);
    }
}

#[test]
fn refuses_bad_ranges() {
    let p = page();
    let map = Map::anonymous(8 * p);
    for kind in kinds() {
        let t = map.attach(kind);
        for (start, end) in [(1, p), (0, p + 1), (2 * p, p), (0, 9 * p)] {
            let mut out = Vec::new();
            let e = t.collect(start, end, true, &mut out).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EINVAL));
        }
        assert_eq!(collect(&*t, 3 * p..3 * p, true), []);
        drop(t);
        // SAFETY: refused before anything is touched.
        unsafe {
            assert!(attach(map.base.add(1), p, kind, false).is_err());
            assert!(attach(map.base, p + 1, kind, false).is_err());
            assert!(attach(map.base, 0, kind, false).is_err());
        }
    }
}

#[test]
fn huge_pages() {
    const HUGE: usize = 2 << 20;
    for kind in kinds() {
        for populated in [false, true] {
            let map = Map::anonymous(8 * HUGE);
            // SAFETY: advice about our own mapping.
            unsafe {
                let advice = Advice::LinuxHugepage;
                let _ = rustix::mm::madvise(map.base.cast(), map.len, advice);
            }
            if populated {
                for offset in (0..map.len).step_by(HUGE) {
                    map.store(offset, 1);
                }
            }
            let t = map.attach(kind);
            assert_eq!(collect(&*t, 0..map.len, true), []);
            for round in 0..3 {
                let p = 3 * HUGE / page() + 5 + round;
                map.store(p * page(), 2);
                map.store(6 * HUGE, 2);
                let want = [pages(p..p + 1), 6 * HUGE..6 * HUGE + page()];
                assert_report(&*t, &collect(&*t, 0..map.len, true), &want);
                assert_eq!(collect(&*t, 0..map.len, true), []);
            }
        }
    }
}

#[test]
fn large_and_sparse() {
    let len = 256 << 20;
    for kind in kinds() {
        for map in maps(len) {
            let t = map.attach(kind);
            assert_eq!(collect(&*t, 0..len, true), []);
            // More runs than one call's vector holds, in and out of order.
            let n = 2000;
            let step = len / n / page() * page();
            for i in (0..n).rev() {
                map.store(i * step + i, 1);
            }
            let want: Vec<_> = (0..n).map(|i| i * step..i * step + page()).collect();
            assert_report(&*t, &collect(&*t, 0..len, false), &want);
            assert_report(&*t, &collect(&*t, 0..len, true), &want);
            assert_eq!(collect(&*t, 0..len, true), []);
            for i in 0..n {
                assert_eq!(map.load(i * step + i), 1);
            }
        }
    }
}

#[test]
fn reading_into_the_region() {
    let source = Map::file(&std::env::temp_dir(), 4 * page());
    let (fd, _) = source.file.as_ref().unwrap();
    for kind in kinds() {
        for map in maps(8 * page()) {
            let t = map.attach(kind);
            // SAFETY: the target is within the mapping.
            let buf =
                unsafe { std::slice::from_raw_parts_mut(map.base.add(3 * page() + 9), 2 * page()) };
            let read = rustix::io::pread(fd, &mut *buf, 0);
            match t.kind() {
                "uffd" => {
                    assert_eq!(read, Ok(2 * page()));
                    assert_eq!(collect(&*t, 0..map.len, true), [pages(3..6)]);
                }
                _ => {
                    assert_eq!(read, Err(rustix::io::Errno::FAULT));
                    assert_eq!(collect(&*t, 0..map.len, true), []);
                }
            }
        }
    }
}

#[test]
fn dontneed_loses_nothing() {
    for kind in kinds() {
        for map in maps(4 << 20) {
            let t = map.attach(kind);
            map.store(5 * page(), 1);
            collect(&*t, 0..map.len, true);
            // SAFETY: our own mapping, that nobody has references into.
            unsafe {
                rustix::mm::madvise(map.base.cast(), map.len, Advice::LinuxDontNeed).unwrap();
            }
            map.store(5 * page(), 2);
            map.store(600 * page(), 2);
            let got = collect(&*t, 0..map.len, true);
            for p in [5, 600] {
                let want = pages(p..p + 1);
                assert!(
                    got.iter()
                        .any(|g| g.start <= want.start && want.end <= g.end)
                );
            }
            collect(&*t, 0..map.len, true);
            assert_eq!(collect(&*t, 0..map.len, true), []);
        }
    }
}

/// Ends the other threads of a test, also if it panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Threads store to random words while another copies what is reported into a shadow. When they
/// are done, one more collect must make the shadow equal to the memory.
fn shadow_follows(map: &Map, t: &dyn Tracker, rounds: usize, partial: bool) {
    let words = map.words();
    let mut shadow: Vec<u64> = words.iter().map(|w| w.load(Ordering::Relaxed)).collect();
    let stop = AtomicBool::new(false);
    let stores = AtomicU64::new(0);
    let copy = |shadow: &mut [u64], out: &[Range<usize>]| {
        for r in out {
            for i in r.start / 8..r.end / 8 {
                shadow[i] = words[i].load(Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|s| {
        let _stop = Stop(&stop);
        for thread in 0..4u64 {
            let (stop, stores) = (&stop, &stores);
            s.spawn(move || {
                let mut random = Rng::new(0x9E37_79B9_7F4A_7C15 ^ thread << 40);
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..64 {
                        let at = random.next() as usize % words.len();
                        words[at].store(random.next(), Ordering::Relaxed);
                    }
                    stores.fetch_add(64, Ordering::Relaxed);
                }
            });
        }
        let mut random = Rng::new(77);
        let mut out = Vec::new();
        let total = map.len / page();
        let mut round = 0;
        // On a busy machine the other threads may be slow.
        while round < rounds || stores.load(Ordering::Relaxed) < 10_000 {
            round += 1;
            let (mut a, mut b) = (0, total);
            if partial {
                a = random.next() as usize % total;
                b = a + 1 + random.next() as usize % (total - a);
            }
            out.clear();
            t.collect(a * page(), b * page(), true, &mut out).unwrap();
            check_shape(&out, &pages(a..b));
            copy(&mut shadow, &out);
        }
    });
    let out = collect(t, 0..map.len, true);
    copy(&mut shadow, &out);
    let lost = (0..words.len()).find(|&i| words[i].load(Ordering::Relaxed) != shadow[i]);
    assert_eq!(
        lost.map(|i| i * 8 / page()),
        None,
        "{} lost a page",
        t.kind()
    );
}

#[test]
fn no_store_is_lost_under_concurrent_collects() {
    for kind in kinds() {
        for map in maps(64 * page()) {
            shadow_follows(&map, &*map.attach(kind), 1000, false);
        }
        // Few pages: every collect meets a handler at work.
        let map = Map::anonymous(2 * page());
        shadow_follows(&map, &*map.attach(kind), 1000, false);
        // Parts of a larger region, and other collectors at the same time.
        let map = Map::file(&std::env::temp_dir(), 600 * page());
        shadow_follows(&map, &*map.attach(kind), 1000, true);
        let map = Map::anonymous(200 * page());
        let t = map.attach(kind);
        let done = AtomicBool::new(false);
        std::thread::scope(|s| {
            let stop = Stop(&done);
            let peeks = s.spawn(|| {
                let mut n = 0;
                while !done.load(Ordering::Relaxed) {
                    collect(&*t, 0..map.len, false);
                    n += 1;
                }
                n
            });
            shadow_follows(&map, &*t, 1000, true);
            drop(stop);
            assert!(peeks.join().unwrap() > 0);
        });
    }
}

/// Threads store at the borders of chunks, few at a time, so that chunks are closed and opened all
/// the time; after every burst nothing may be missing.
#[test]
fn no_store_is_lost_while_chunks_open_and_close() {
    let _few = few_mappings();
    const CHUNK: usize = 3;
    const CHUNKS: usize = 400;
    const BURSTS: usize = 400;
    if !uffd_available() {
        return;
    }
    for map in maps((CHUNKS * CHUNK - 1) * page()) {
        let t = map.attach(Kind::TwoLevel);
        let words = map.words();
        let chunk = CHUNK * page() / 8;
        let border = |random: &mut Rng| {
            let first = random.next() as usize % CHUNKS * chunk;
            match random.next() % 2 {
                0 => first,
                _ => (first + chunk).min(words.len()) - 1,
            }
        };
        let shadow = std::cell::RefCell::new(vec![0u64; words.len()]);
        let gather = |range: Range<usize>| {
            for r in collect(&*t, range, true) {
                let r = r.start / 8..r.end / 8;
                let mut shadow = shadow.borrow_mut();
                for (mine, word) in shadow[r.clone()].iter_mut().zip(&words[r]) {
                    *mine = word.load(Ordering::Relaxed);
                }
            }
        };
        let missing = || {
            let shadow = shadow.borrow();
            (0..words.len()).find(|&i| words[i].load(Ordering::Relaxed) != shadow[i])
        };
        let turn = std::sync::Barrier::new(4);
        let storing = AtomicUsize::new(0);
        let mut lost = None;
        std::thread::scope(|s| {
            for thread in 0..3u64 {
                let (turn, storing, border) = (&turn, &storing, &border);
                s.spawn(move || {
                    let mut random = Rng::new(0x2545_F491_4F6C_DD1D ^ thread << 20);
                    for _ in 0..BURSTS {
                        turn.wait();
                        for _ in 0..20 {
                            words[border(&mut random)].store(random.next(), Ordering::Relaxed);
                        }
                        storing.fetch_sub(1, Ordering::Relaxed);
                        turn.wait();
                    }
                });
            }
            let mut random = Rng::new(9);
            for burst in 0..BURSTS {
                storing.store(3, Ordering::Relaxed);
                turn.wait();
                while storing.load(Ordering::Relaxed) > 0 {
                    // Now and then a part, whose ends lie within chunks.
                    let pages = map.len / page();
                    match random.next() % 4 {
                        0 => {
                            let from = random.next() as usize % pages;
                            let to = from + 1 + random.next() as usize % (pages - from);
                            gather(from * page()..to * page());
                        }
                        _ => gather(0..map.len),
                    }
                }
                turn.wait();
                gather(0..map.len);
                lost = lost.or(missing().map(|i| (burst, i * 8 / page())));
            }
        });
        assert_eq!(lost, None, "a burst and a page that was lost");
        // Without stores, this many collects close all chunks: then the kernel may not write
        // there.
        for _ in 0..CHUNKS {
            gather(0..map.len);
        }
        assert!(is_closed(&map, 0..map.len));
        // A chunk that counts as changed again is reported, open or not.
        t.mark(7 * page(), 8 * page());
        assert_eq!(collect(&*t, 0..map.len, true), [pages(7..8)]);
        assert!(is_closed(&map, 0..map.len));
    }
}

/// A collect does not close a chunk that lies only partly in its range: the rest was not scanned.
#[test]
fn a_chunk_in_part_stays_open() {
    let _few = few_mappings();
    if !uffd_available() {
        return;
    }
    let map = Map::anonymous(9 * page());
    let t = map.attach(Kind::TwoLevel);
    map.store(2 * page(), 1);
    assert_eq!(collect(&*t, 0..map.len, true), [pages(2..3)]);
    map.store(2 * page(), 2);
    for _ in 0..5 {
        assert_eq!(collect(&*t, pages(0..2), true), []);
    }
    assert_eq!(collect(&*t, 0..map.len, true), [pages(2..3)]);
}

/// Whether the kernel may write into none of these pages.
fn is_closed(map: &Map, range: Range<usize>) -> bool {
    let zero = std::fs::File::open("/dev/zero").unwrap();
    range.step_by(page()).all(|at| {
        // SAFETY: within the mapping; what it holds stays as it is, or the answer is no.
        let word = unsafe { std::slice::from_raw_parts_mut(map.base.add(at + 64), 8) };
        rustix::io::read(&zero, word) == Err(rustix::io::Errno::FAULT)
    })
}

/// A store that a thread has made is in the report of the collect that the same thread then makes,
/// whichever thread opened the page.
#[test]
fn own_stores_are_reported_at_once() {
    for kind in kinds() {
        let map = Map::anonymous(4 * page());
        let t = map.attach(kind);
        let words = map.words();
        let lock = std::sync::Mutex::new(());
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let _stop = Stop(&stop);
            for _ in 0..2 {
                s.spawn(|| {
                    let mut n = 0;
                    while !stop.load(Ordering::Relaxed) {
                        n += 1;
                        words[1].store(n, Ordering::Relaxed);
                    }
                });
            }
            for n in 0..50_000 {
                let _guard = lock.lock();
                words[0].store(n, Ordering::Relaxed);
                assert!(
                    !collect(&*t, 0..map.len, true).is_empty(),
                    "{} {n}",
                    t.kind()
                );
            }
        });
    }
}

#[test]
fn dropped_while_others_store() {
    for kind in kinds() {
        let map = Map::anonymous(256 * page());
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let _stop = Stop(&stop);
            for thread in 0..4u64 {
                let (map, stop) = (&map, &stop);
                s.spawn(move || {
                    let mut random = Rng::new(5 + thread);
                    while !stop.load(Ordering::Relaxed) {
                        map.store(random.next() as usize % map.len, 1);
                    }
                });
            }
            let rounds = if kind == Kind::Uffd { 300 } else { 3000 };
            for _ in 0..rounds {
                let t = map.attach(kind);
                std::hint::black_box(collect(&*t, 0..map.len, true));
                drop(t);
            }
        });
    }
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count()
}

/// One test uses as many mappings as a process may have: then many chunks are opened at a time, so
/// tests that check which are open wait for it.
static MAPPINGS: RwLock<()> = RwLock::new(());

fn few_mappings() -> RwLockReadGuard<'static, ()> {
    locks::read(&MAPPINGS)
}

/// More separate pages than the kernel allows mappings, alternating, twice.
#[test]
fn many_scattered_pages() {
    let _alone = locks::write(&MAPPINGS);
    let n = 70_000;
    let len = 2 * n * page();
    for kind in kinds() {
        for map in maps(len) {
            let before = mappings();
            let t = map.attach(kind);
            for round in 1..3 {
                for i in 0..n {
                    map.store(2 * i * page(), round);
                }
                // Room is left for the program.
                assert!(mappings() < before + 40_000, "{}", mappings());
                let want: Vec<_> = (0..n).map(|i| pages(2 * i..2 * i + 1)).collect();
                let got = collect(&*t, 0..len, true);
                let mut got = got.iter();
                let mut at = 0..0;
                for w in &want {
                    while at.end < w.end {
                        at = got.next().unwrap().clone();
                    }
                    assert!(at.start <= w.start, "{w:?}");
                }
                if t.kind() == "uffd" {
                    assert!(got.next().is_none());
                }
                // The mappings have merged again (those of other tests come and go).
                assert!(mappings() < before + 15_000, "{} {before}", mappings());
                assert_eq!(collect(&*t, 0..len, true), []);
            }
            // One by one, in an order that splits: reports may repeat, but none fails.
            for i in 0..n {
                map.store(2 * i * page(), 9);
                map.store((2 * i + 1) * page(), 9);
            }
            for i in (0..n).step_by(3) {
                let page = pages(2 * i..2 * i + 1);
                assert_eq!(collect(&*t, page.clone(), true), [page]);
            }
            collect(&*t, 0..len, true);
        }
    }
}

/// Runs `child` in a fork and gives its wait status. It must not use what threads may hold.
fn in_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls async-signal-safe functions, glibc's malloc (safe after fork) and
    // _exit.
    unsafe {
        let pid = libc::fork();
        assert!(pid >= 0);
        if pid == 0 {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            libc::_exit(code.unwrap_or(99));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        status
    }
}

#[test]
fn a_forked_child_is_refused() {
    for kind in kinds() {
        let map = Map::anonymous(16 * page());
        let t = map.attach(kind);
        map.store(0, 1);
        let status = in_child(|| {
            let mut out = Vec::new();
            // Stores work, open page or not.
            map.store(0, 2);
            map.store(5 * page(), 2);
            t.mark(0, 1);
            let refused =
                |e: io::Result<()>| e.is_err_and(|e| e.kind() == io::ErrorKind::Unsupported);
            if !refused(t.collect(0, map.len, true, &mut out))
                || !refused(t.collect(0, map.len, false, &mut out))
            {
                return 1;
            }
            // Memory of its own can be tracked.
            let own = Map::anonymous(4 * page());
            let tracker = own.attach(kind);
            own.store(2 * page(), 1);
            if tracker.collect(0, own.len, true, &mut out).is_err() || out.is_empty() {
                return 2;
            }
            drop(tracker);
            0
        });
        assert_eq!(status, 0);
        // Nothing of it is seen here, and tracking goes on.
        assert_eq!(map.load(5 * page()), 0);
        assert_report(&*t, &collect(&*t, 0..map.len, true), &[pages(0..1)]);
        map.store(5 * page(), 3);
        assert_report(&*t, &collect(&*t, 0..map.len, true), &[pages(5..6)]);
    }
}

#[test]
fn a_tracker_dropped_in_a_child_stays_in_the_parent() {
    for kind in kinds() {
        let map = Map::anonymous(16 * page());
        let mut t = Some(map.attach(kind));
        let status = in_child(|| {
            drop(t.take());
            map.store(3 * page(), 1);
            0
        });
        assert_eq!(status, 0);
        let t = t.unwrap();
        map.store(4 * page(), 1);
        assert_report(&*t, &collect(&*t, 0..map.len, true), &[pages(4..5)]);
    }
}

/// A wild store elsewhere still kills, as does one to protected memory that is not ours, and a
/// signal that was sent.
#[test]
fn other_faults_still_kill() {
    let map = Map::anonymous(4 * page());
    let t = map.attach(Kind::Mprotect);
    let other = Map::anonymous(page());
    // SAFETY: our own mapping, not used but by the child.
    unsafe {
        rustix::mm::mprotect(other.base.cast(), page(), rustix::mm::MprotectFlags::READ).unwrap();
    }
    let stores: [&dyn Fn(); 3] = [
        // SAFETY: it is meant to crash.
        &|| unsafe { std::ptr::without_provenance_mut::<u8>(64).write_volatile(1) },
        &|| other.store(0, 1),
        // SAFETY: sends a signal to this process.
        &|| unsafe {
            libc::kill(libc::getpid(), libc::SIGSEGV);
            // Rust's own handler, which we chain to, takes the first one as a reason to step
            // aside.
            libc::kill(libc::getpid(), libc::SIGSEGV);
        },
    ];
    for store in stores {
        let status = in_child(|| {
            map.store(0, 1); // the handler works in the child
            store();
            0
        });
        assert!(
            libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV,
            "{status}"
        );
    }
    drop(t);
}

static CHAINED: AtomicUsize = AtomicUsize::new(0);
static CHAINED_MASK_OK: AtomicBool = AtomicBool::new(false);

extern "C" fn program_handler(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's siginfo; the page at the address is the test's own; the mask is only
    // read.
    unsafe {
        let addr = (*info).si_addr() as usize;
        CHAINED.store(addr, Ordering::SeqCst);
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
        let blocked = |s| libc::sigismember(&mask, s) == 1;
        CHAINED_MASK_OK.store(
            blocked(libc::SIGSEGV) && blocked(libc::SIGUSR2) && !blocked(libc::SIGUSR1),
            Ordering::SeqCst,
        );
        let start = (addr & !(rustix::param::page_size() - 1)) as *mut std::ffi::c_void;
        let flags = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        rustix::mm::mprotect(start, rustix::param::page_size(), flags).unwrap();
    }
}

/// The body of `chains_to_the_programs_handler`, in a process of its own.
#[test]
#[ignore = "run by chains_to_the_programs_handler"]
fn chain_body() {
    // SAFETY: installs the handler above, which suits the faults below.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = program_handler;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaddset(&mut action.sa_mask, libc::SIGUSR2);
        assert_eq!(
            libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()),
            0
        );
    }
    let map = Map::anonymous(4 * page());
    let t = map.attach(Kind::Mprotect);
    let other = Map::anonymous(page());
    // SAFETY: our own mapping.
    unsafe {
        rustix::mm::mprotect(other.base.cast(), page(), rustix::mm::MprotectFlags::READ).unwrap();
    }
    map.store(page(), 1);
    assert_eq!(CHAINED.load(Ordering::SeqCst), 0);
    other.store(9, 1);
    assert_eq!(CHAINED.load(Ordering::SeqCst), other.base as usize + 9);
    assert!(CHAINED_MASK_OK.load(Ordering::SeqCst));
    map.store(2 * page(), 1);
    assert_eq!(collect(&*t, 0..map.len, true), [pages(1..3)]);
    drop(t);
    // After the drop the range is the program's again, late faults or not.
    // SAFETY: our own mapping.
    unsafe {
        rustix::mm::mprotect(map.base.cast(), page(), rustix::mm::MprotectFlags::READ).unwrap();
    }
    map.store(7, 1);
    assert_eq!(CHAINED.load(Ordering::SeqCst), map.base as usize + 7);
}

#[test]
fn chains_to_the_programs_handler() {
    let name = concat!(module_path!(), "::chain_body");
    let name = name.split_once("::").unwrap().1;
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn lost_tracking_is_an_error() {
    if !uffd_available() {
        return;
    }
    // Moved away by mremap: the new place is not tracked, and says so.
    for kind in [Kind::Uffd, Kind::TwoLevel] {
        let map = Map::anonymous(4 * page());
        let t = map.attach(kind);
        // SAFETY: unmaps the mapping and puts an untracked one in its place, which `map` unmaps.
        unsafe {
            rustix::mm::mmap_anonymous(
                map.base.cast(),
                map.len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED,
            )
            .unwrap();
        }
        let mut out = vec![1..2];
        let e = t.collect(0, map.len, true, &mut out).unwrap_err();
        let found = (e.raw_os_error(), out);
        assert_eq!(found, (Some(libc::EPERM), vec![1..2]), "{kind:?}");
    }
}
