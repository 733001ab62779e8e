//! Pages that are given back: what they hold stays, also if threads store meanwhile.

use std::collections::VecDeque;
use std::os::unix::fs::FileExt;

use super::*;

/// Pages of a chunk: so few that most tests have several.
const CHUNK: usize = 3;

fn metered(map: &Map, most: Option<u64>) -> (Box<dyn Tracker>, Arc<Meter>) {
    let meter = Arc::new(Meter::new(most, "no room\n", Arc::default()));
    // SAFETY: every test drops the tracker before the map.
    let t = unsafe { two_level::of_chunks(map.base as usize, map.len, CHUNK, Some(&meter)) };
    (t.unwrap(), meter)
}

/// The map's file, to write to as an applied record does.
fn file_of(map: &Map) -> std::fs::File {
    map.file.as_ref().unwrap().0.try_clone().unwrap().into()
}

/// Gives back the pages of `chunks` that are what the file has. Returns how many.
fn give_back(map: &Map, t: &dyn GivesBack, chunks: &[usize]) -> usize {
    let file = file_of(map);
    let mut given = 0;
    for &c in chunks {
        let mut copies = Vec::new();
        t.copies(c, &mut copies).unwrap();
        let mut same = Vec::new();
        for at in copies.into_iter().flat_map(|r| r.step_by(page())) {
            let mut bytes = vec![0; page()];
            file.read_exact_at(&mut bytes, at as u64).unwrap();
            if (0..page()).all(|i| map.load(at + i) == bytes[i]) {
                same.push(at..at + page());
            }
        }
        // SAFETY: they were compared after the chunk was shut; the tests apply before they ask.
        if unsafe { t.discard(c, &same).unwrap() } {
            given += same.len();
        }
        t.put_back(c);
    }
    given
}

fn all(t: &dyn GivesBack) -> Vec<usize> {
    t.take(usize::MAX, usize::MAX).0
}

/// The life of one page: it is given back when the file has what it holds, not before. Then it
/// shows the file, does not count as stored to, and is found when it is stored to again.
#[test]
fn a_page_is_given_back_and_found_again() {
    let _few = few_mappings();
    if !uffd_available() {
        return;
    }
    let map = Map::file(&std::env::temp_dir(), 20 * page());
    let (t, meter) = metered(&map, None);
    let r = t.metered().unwrap();
    for at in [4, 5, 19] {
        map.store(at * page(), 7);
    }
    assert_eq!(meter.held(), 2 * CHUNK as i64 - 1);
    r.shut().unwrap();
    assert_eq!(meter.held(), 3);
    let chunks = all(r);
    assert_eq!(chunks, [1, 6]);
    assert_eq!(give_back(&map, r, &chunks), 0, "the file has none of it");
    // The chunks were shut without a scan: a collect finds their pages.
    assert_eq!(
        collect(&*t, 0..map.len, false),
        [pages(4..6), pages(19..20)]
    );
    let file = file_of(&map);
    file.write_all_at(&[7], 5 * page() as u64).unwrap();
    let chunks = all(r);
    assert_eq!(give_back(&map, r, &chunks), 1);
    assert_eq!(meter.held(), 2);
    assert_eq!(map.load(5 * page()), 7);
    // A page that was given back and read does not count as stored to.
    assert_eq!(collect(&*t, 0..map.len, true), [pages(4..5), pages(19..20)]);
    assert_eq!(collect(&*t, 0..map.len, true), []);
    // It shows the file, and is the program's again when it stores.
    file.write_all_at(&[8], 5 * page() as u64 + 1).unwrap();
    assert_eq!(map.load(5 * page() + 1), 8);
    map.store(5 * page() + 2, 9);
    assert_eq!(collect(&*t, 0..map.len, true), [pages(5..6)]);
    // A chunk that was opened since it was shut is left alone.
    r.shut().unwrap();
    map.store(4 * page(), 0);
    let chunks = all(r);
    assert_eq!(give_back(&map, r, &chunks), 0);
    assert_eq!(collect(&*t, 0..map.len, true), [pages(4..5)]);
    drop(t);
    assert_eq!(meter.held(), 0);
}

/// Threads store while pages are committed, applied some time later, and given back. Each thread
/// has words of its own, and must find in them what it stored last, all the time; few values, so
/// that memory often is what the file has while a record with other bytes is on its way.
#[test]
fn no_store_is_lost_while_pages_are_given_back() {
    let _few = few_mappings();
    const THREADS: usize = 2;
    const CHUNKS: usize = 40;
    if !uffd_available() {
        return;
    }
    let map = Map::file(&std::env::temp_dir(), CHUNKS * CHUNK * page());
    let (t, meter) = metered(&map, None);
    let r = t.metered().unwrap();
    let words = map.words();
    let file = file_of(&map);
    let per_page = page() / 8;
    // Few words of each page.
    let places: Vec<usize> = (0..map.len / page())
        .flat_map(|p| (0..2 * THREADS).map(move |i| p * per_page + i * 100))
        .collect();
    let stop = AtomicBool::new(false);
    let stores = AtomicU64::new(0);
    let mut pending = VecDeque::<(usize, Vec<u8>)>::new();
    let commit = |pending: &mut VecDeque<_>, range: Range<usize>| {
        let found = collect(&*t, range, true).into_iter();
        for at in found.flat_map(|r| r.step_by(page())) {
            let words = words[at / 8..at / 8 + per_page].iter();
            let bytes = words.map(|w| w.load(Ordering::Relaxed).to_ne_bytes());
            pending.push_back((at, bytes.flatten().collect()));
        }
    };
    let apply = |pending: &mut VecDeque<(usize, Vec<u8>)>, n: usize| {
        for (at, bytes) in pending.drain(..n) {
            file.write_all_at(&bytes, at as u64).unwrap();
        }
    };
    let store = |thread: usize| {
        let mut random = Rng::new(0x9E37_79B9_7F4A_7C15 ^ (thread as u64) << 40);
        let mut mine = vec![0; places.len()];
        while !stop.load(Ordering::Relaxed) {
            let n = random.next() as usize % (places.len() / THREADS) * THREADS + thread;
            let word = &words[places[n]];
            assert_eq!(word.load(Ordering::Relaxed), mine[n], "a store was lost");
            mine[n] = random.next() % 2;
            word.store(mine[n], Ordering::Relaxed);
            stores.fetch_add(1, Ordering::Relaxed);
            // So that some chunks are not stored to for a while.
            for _ in 0..random.next() % 1000 {
                std::hint::spin_loop();
            }
        }
        let mut own = (thread..places.len()).step_by(THREADS);
        own.find(|&n| words[places[n]].load(Ordering::Relaxed) != mine[n])
    };
    std::thread::scope(|s| {
        let _stop = Stop(&stop);
        let store = &store;
        let storing: Vec<_> = (0..THREADS)
            .map(|thread| s.spawn(move || store(thread)))
            .collect();
        let mut random = Rng::new(5);
        let (mut rounds, mut given) = (0, 0);
        while (rounds < 500 || stores.load(Ordering::Relaxed) < 100_000 || given < 5000)
            && storing.iter().all(|t| !t.is_finished())
        {
            rounds += 1;
            let pages = map.len / page();
            let from = random.next() as usize % pages;
            match random.next() % 4 {
                0 => {}
                1 => commit(&mut pending, from * page()..map.len),
                _ => commit(&mut pending, 0..map.len),
            }
            r.shut().unwrap();
            let begun = pending.len();
            if random.next().is_multiple_of(4) {
                commit(&mut pending, 0..from * page());
            }
            apply(&mut pending, begun);
            given += give_back(&map, r, &all(r));
        }
        stop.store(true, Ordering::Relaxed);
        for t in storing {
            assert_eq!(t.join().unwrap(), None, "a store was lost");
        }
    });
    commit(&mut pending, 0..map.len);
    let n = pending.len();
    apply(&mut pending, n);
    let mut bytes = vec![0; map.len];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let lost = (0..map.len).find(|&i| map.load(i) != bytes[i]);
    assert_eq!(lost.map(|i| i / page()), None, "a page was not reported");
    // All of it is the file's now, and can be given back.
    r.shut().unwrap();
    give_back(&map, r, &all(r));
    assert_eq!(meter.held(), 0);
    assert_eq!(collect(&*t, 0..map.len, true), []);
}

/// A chunk that a sync point scans in part stays unseen for others.
#[test]
fn a_chunk_that_is_shut_is_looked_through_as_a_whole() {
    let _few = few_mappings();
    if !uffd_available() {
        return;
    }
    let map = Map::file(&std::env::temp_dir(), 9 * page());
    let (t, _) = metered(&map, None);
    let r = t.metered().unwrap();
    for at in [3, 5] {
        map.store(at * page(), 1);
    }
    r.shut().unwrap();
    assert_eq!(collect(&*t, pages(2..4), true), [pages(3..4)]);
    assert_eq!(collect(&*t, pages(4..9), true), [pages(5..6)]);
    map.store(4 * page(), 1);
    r.shut().unwrap();
    assert_eq!(collect(&*t, 0..map.len, true), [pages(4..5)]);
}

/// A child that is forked while pages are given back stores as it likes: no thread in it ends what
/// its parent's threads were doing.
#[test]
fn a_forked_child_does_not_wait() {
    let _few = few_mappings();
    if !uffd_available() {
        return;
    }
    let map = Map::file(&std::env::temp_dir(), 30 * page());
    let (t, _) = metered(&map, Some(4));
    let r = t.metered().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let _stop = Stop(&stop);
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                map.store(0, 0);
                r.shut().unwrap();
                give_back(&map, r, &all(r));
            }
        });
        for _ in 0..100 {
            let status = in_child(|| {
                for at in 0..30 {
                    // More than the parent may.
                    map.store(at * page(), 5);
                }
                i32::from((0..30).any(|at| map.load(at * page()) != 5))
            });
            assert_eq!(status, 0);
        }
    });
}

/// A store for which there is no room waits until there is some, or gets SIGBUS, with the address,
/// if it was found that there is none.
#[test]
fn a_store_without_room_waits_or_is_refused() {
    let _few = few_mappings();
    if !uffd_available() {
        return;
    }
    let map = Map::file(&std::env::temp_dir(), 30 * page());
    let (t, meter) = metered(&map, Some(7));
    map.store(0, 1);
    map.store(CHUNK * page(), 1);
    std::thread::scope(|s| {
        let waiting = s.spawn(|| map.store(20 * page(), 1));
        while !meter.is_asked() {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished());
        // Once the chunks are counted, only pages that were stored to count.
        t.metered().unwrap().shut().unwrap();
        meter.grant();
        waiting.join().unwrap();
    });
    // No more than one chunk.
    assert_eq!(meter.room(), 2);
    let (read, write) = std::io::pipe().unwrap();
    let status = {
        // A process of its own that maps and stores: a child of this one is not counted.
        // SAFETY: what the child does is safe after a fork (as `in_child`).
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop(read);
            refused_child(&write);
        }
        drop(write);
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        status
    };
    let mut said = String::new();
    io::Read::read_to_string(&mut { read }, &mut said).unwrap();
    assert_eq!(said, "no room\nheard");
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS);
}

/// Where the refused store of the child goes, and whether its handler has run.
static REFUSED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_bus(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's siginfo; write, signal are async-signal-safe.
    unsafe {
        if (*info).si_addr() as usize == REFUSED.load(Ordering::Relaxed) {
            libc::write(2, c"heard".as_ptr().cast(), 5);
        }
        // The store runs again; then the program ignores the signal.
        libc::signal(libc::SIGBUS, libc::SIG_IGN);
    }
}

fn refused_child(stderr: &std::io::PipeWriter) -> ! {
    let body = || {
        let map = Map::file(&std::env::temp_dir(), 30 * page());
        let (_t, meter) = metered(&map, Some(4));
        map.store(0, 1);
        let at = 20 * page();
        REFUSED.store(map.base as usize + at, Ordering::Relaxed);
        // SAFETY: of this process.
        unsafe {
            libc::dup2(std::os::fd::AsRawFd::as_raw_fd(stderr), 2);
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_bus;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
        if let Some((_, path)) = &map.file {
            // No other code removes the file.
            rustix::fs::unlink(path).unwrap();
        }
        meter.refuse(meter.turn());
        map.store(at, 1);
    };
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    // SAFETY: ends the child.
    unsafe { libc::_exit(1) }
}
