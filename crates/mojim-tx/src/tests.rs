//! The fate of a transaction whose commit fails, in each way in which the engine can fail.
//!
//! The engine's answers are the tests' own here ([`commit_exact`]). The code before and after
//! them is what programs run. One test at a time: what is given up is the process's.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::{Barrier, Mutex, MutexGuard};

use mojim::Failure;
use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_format::heap::{ROOT_LEN, root_at};
use mojim_heap::{Heap, HeapOptions, Nowhere};
use mojim_undo::Log;

use crate::commit::{captured, failed, forget, on_failure};
use crate::{abort, add, atomically, begin, commit, is_open, on_commit, set_root, thread_log};

thread_local! {
    /// What the next commits of the thread come to; all others succeed.
    static NEXT: RefCell<VecDeque<Failure>> = const { RefCell::new(VecDeque::new()) };
    /// The bytes of the last commit that succeeded.
    static COMMITTED: RefCell<Vec<Range<usize>>> = const { RefCell::new(Vec::new()) };
}

/// In place of the engine's.
pub(crate) fn commit_exact(ranges: &[Range<usize>]) -> Result<u64, Failure> {
    match NEXT.with_borrow_mut(VecDeque::pop_front) {
        Some(failure) => Err(failure),
        None => {
            COMMITTED.with_borrow_mut(|all| all.clone_from(&ranges.to_vec()));
            Ok(1)
        }
    }
}

fn fail_next(all: impl IntoIterator<Item = (Error, bool)>) {
    let all = all.into_iter();
    let all = all.map(|(error, begun)| Failure { error, begun });
    NEXT.with_borrow_mut(|next| next.extend(all));
}

fn left() -> usize {
    NEXT.with_borrow(VecDeque::len)
}

fn committed(word: &u64) -> bool {
    let at = std::ptr::from_ref(word) as usize;
    COMMITTED.with_borrow_mut(|all| std::mem::take(all).contains(&(at..at + 8)))
}

/// The only test, over a process that has given nothing up.
fn one() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let held = lock(&ONE);
    forget();
    on_failure(None, std::ptr::null_mut());
    held
}

fn silent() -> Error {
    Error::Timeout("the mirror is silent".into())
}

/// A disk or a log without room, where what was begun goes on by itself.
fn no_room() -> Error {
    Error::Io {
        what: "a spill file".into(),
        errno: libc::ENOSPC,
        error: "no space".into(),
    }
}

/// What ends all commits of a process.
fn ends() -> [Error; 3] {
    [
        Error::Stale("another node is primary".into()),
        Error::Poisoned("the log".into()),
        Error::Full("the log".into()),
    ]
}

fn set(word: &mut u64, value: u64) {
    // SAFETY: the test's own word, which outlives the transaction.
    unsafe { add((&raw mut *word).cast(), 8) }.unwrap();
    *word = value;
}

fn errno(done: Result<()>) -> i32 {
    done.map_or_else(|e| e.errno(), |()| 0)
}

/// A commit that timed out is in doubt until one succeeds, or the process can commit nothing any
/// more; a disk without room is neither.
#[test]
fn a_doubt_ends_when_it_is_known() {
    let _one = one();
    let mut word = 1;
    // Nothing was begun: it can be taken back at any time.
    for error in [silent(), no_room()].into_iter().chain(ends()) {
        begin().unwrap();
        set(&mut word, 2);
        let expected = error.errno();
        fail_next([(error, false)]);
        assert_eq!(errno(commit()), expected);
        assert!(is_open() && abort().is_ok());
        assert_eq!((word, is_open()), (1, false));
    }
    for begun in [false, true] {
        begin().unwrap();
        set(&mut word, 2);
        fail_next([(silent(), true), (no_room(), begun), (silent(), false)]);
        for expected in [libc::ETIMEDOUT, libc::ENOSPC, libc::ETIMEDOUT] {
            assert_eq!(errno(commit()), expected);
            assert_eq!(errno(abort()), libc::ETIMEDOUT);
            assert_eq!((word, is_open()), (2, true));
        }
        assert!(commit().is_ok() && committed(&word));
        word = 1;
    }
    for error in ends() {
        begin().unwrap();
        set(&mut word, 2);
        let expected = error.errno();
        fail_next([(silent(), true), (error, true)]);
        assert_eq!(errno(commit()), libc::ETIMEDOUT);
        assert_eq!(errno(commit()), expected);
        assert!(abort().is_ok() && word == 1, "{expected}");
    }
    assert_eq!(failed(), 0);
}

/// A call that is a transaction of its own gives up where it is in doubt and no further try is
/// of use. From then on all other transactions of the process are refused, and can be taken
/// back.
#[test]
fn who_gives_up_ends_the_transactions_of_the_process() {
    let _one = one();
    let mut word = 1;
    let own = |word: &mut u64| {
        atomically(|_| -> Result<()> {
            set(word, 2);
            Ok(())
        })
    };
    // Nothing was begun: the caller hears of it, and nothing has changed.
    for error in [silent(), no_room()] {
        let expected = error.errno();
        fail_next([(error, false)]);
        assert_eq!(errno(own(&mut word)), expected);
        assert_eq!((word, failed(), is_open()), (1, 0, false));
    }
    // In doubt: tried until it is known.
    fail_next([(silent(), true), (silent(), false), (silent(), true)]);
    assert!(own(&mut word).is_ok() && committed(&word));
    word = 1;
    // What others have open stays so.
    let mut other = 7;
    begin().unwrap();
    set(&mut other, 8);
    let at = (&raw mut word) as usize;
    let gives_up = std::thread::spawn(move || {
        fail_next([(silent(), true), (no_room(), false), (silent(), false)]);
        // SAFETY: the test waits for this thread, and does not touch the word meanwhile.
        let done = own(unsafe { &mut *(at as *mut u64) });
        (errno(done), left(), is_open())
    });
    assert_eq!(gives_up.join().unwrap(), (libc::ENOSPC, 1, false));
    assert_eq!((word, failed()), (2, libc::ENOSPC));
    let refused = commit().unwrap_err();
    assert_eq!(refused.errno(), libc::EOPNOTSUPP);
    assert!(refused.to_string().contains("mojim_tx_failed"), "{refused}");
    assert!(abort().is_ok() && other == 7);
    assert_eq!(errno(own(&mut other)), libc::EOPNOTSUPP);
    assert_eq!((other, is_open()), (7, false));
    // One that has stored nothing ends as ever.
    assert!(begin().is_ok() && commit().is_ok());
}

/// A block that gcc captured, which stores to the word; what the compiler calls at its end.
fn block(word: &mut u64, broken: i32) {
    let log = thread_log();
    // SAFETY: the thread's own log, and the test's word.
    unsafe {
        assert!(!Log::begin(log, true).is_null());
        assert!(Log::save::<8>(log, (&raw const *word).cast()));
        *word += 1;
        (*log).broken = broken;
        if !Log::end(log) {
            captured(log);
        }
        assert_eq!(((*log).depth, (*log).words()), (0, 0));
    }
}

/// A captured block is tried again while it can be committed, and given up otherwise: with its
/// stores in memory, and the reason for who asks.
#[test]
fn a_block_is_tried_again_or_given_up() {
    let mut word = 1;
    {
        let _one = one();
        fail_next([(silent(), true), (silent(), false)]);
        block(&mut word, 0);
        assert!(committed(&word) && left() == 0);
        assert_eq!((word, failed()), (2, 0));
    }
    for error in ends().into_iter().chain([no_room()]) {
        let _one = one();
        let expected = error.errno();
        fail_next([(silent(), true), (error, false), (silent(), false)]);
        let before = word;
        block(&mut word, 0);
        assert_eq!((word, failed(), left()), (before + 1, expected, 1));
        NEXT.take();
        // The next one is not tried.
        block(&mut word, 0);
        assert_eq!((word, failed()), (before + 2, expected));
        assert!(!committed(&word));
    }
}

/// Calls of the handler.
static ASKED: AtomicI32 = AtomicI32::new(0);

/// Has a commit repeated, but not for ever: the test ends.
unsafe extern "C-unwind" fn asked(_: c_int, _: *const c_char, most: *mut c_void) -> c_int {
    (ASKED.fetch_add(1, Relaxed) < most as i32).into()
}

/// A program's handler decides about what may be tried again, and is not asked about a block whose
/// log is broken, which no try can commit. (It was, and by the default such a block was tried for
/// ever.)
#[test]
fn a_broken_log_is_tried_once() {
    for broken in [libc::ENOMEM, libc::EOPNOTSUPP] {
        let _one = one();
        on_failure(Some(asked), 50 as *mut c_void);
        let mut word = 1;
        block(&mut word, broken);
        assert_eq!((ASKED.load(Relaxed), failed(), word), (0, broken, 2));
    }
    let _one = one();
    on_failure(Some(asked), 2 as *mut c_void);
    fail_next([(no_room(), false), (no_room(), false)]);
    let mut word = 1;
    block(&mut word, 0);
    assert!(committed(&word));
    assert_eq!((ASKED.swap(0, Relaxed), failed()), (2, 0));
    fail_next((0..5).map(|_| (no_room(), false)));
    block(&mut word, 0);
    assert_eq!((ASKED.swap(0, Relaxed), failed()), (3, libc::ENOSPC));
    assert_eq!(NEXT.take().len(), 2);
    on_failure(None, std::ptr::null_mut());
}

/// A thread that ends takes back what it has open, unless that is in doubt.
#[test]
fn a_thread_that_ends_in_doubt_takes_nothing_back() {
    let _one = one();
    for (begun, expected) in [(false, 1), (true, 2)] {
        let mut word = 1u64;
        let at = (&raw mut word) as usize;
        let thread = std::thread::spawn(move || {
            begin().unwrap();
            // SAFETY: the test waits for this thread, and does not touch the word meanwhile.
            set(unsafe { &mut *(at as *mut u64) }, 2);
            fail_next([(silent(), begun)]);
            assert_eq!(errno(commit()), libc::ETIMEDOUT);
        });
        thread.join().unwrap();
        assert_eq!(word, expected);
    }
    // Its object is another thread's next, and begins anew.
    let mut word = 1u64;
    let at = (&raw mut word) as usize;
    let thread = std::thread::spawn(move || {
        begin().unwrap();
        // SAFETY: as above.
        set(unsafe { &mut *(at as *mut u64) }, 2);
        assert!(abort().is_ok());
    });
    thread.join().unwrap();
    assert_eq!(word, 1);
}

/// Page faults of the calling thread.
fn faults() -> i64 {
    // SAFETY: a local struct, which the call fills.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &mut usage), 0);
        usage.ru_minflt
    }
}

/// A page that was never used is faulted in once, not first to be read and then to be stored to.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_new_page_is_faulted_in_once() {
    let _one = one();
    const PAGES: usize = 256;
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    let len = PAGES * 4096;
    // SAFETY: memory of the test's own, in which it stores.
    unsafe {
        let all = libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0);
        assert_ne!(all, libc::MAP_FAILED);
        libc::madvise(all, len, libc::MADV_NOHUGEPAGE);
        let all = all.cast::<u8>();
        begin().unwrap();
        // The log has its room from here on.
        let mut room = [0u8; 64 << 10];
        add(room.as_mut_ptr(), room.len()).unwrap();
        let before = faults();
        for (len, pages) in [(8, 0..PAGES / 2), (24, PAGES / 2..PAGES)] {
            for page in pages {
                let word = all.add(page * 4096 + 16);
                add(word, len).unwrap();
                word.write(1);
            }
        }
        let more = faults() - before;
        assert!(more < PAGES as i64 * 3 / 2, "{more} faults");
        abort().unwrap();
        libc::munmap(all.cast(), len);
    }
}

/// A root that a transaction has changed is as it was after an abort, also of an inner level and if it was
/// changed twice; and it is put back while no other thread reads or sets roots.
#[test]
fn an_abort_puts_a_root_back_under_the_lock_of_roots() {
    let _one = one();
    let options = HeapOptions::new(64 << 20, 0x2600_0000_0000);
    let heap =
        Heap::open_over(Box::new(Nowhere), "roots", (vec![0; 64 << 10], 0), &options).unwrap();
    let [p, q, r] = [0; 3].map(|_| heap.malloc(16).unwrap());
    heap.set_root("a", p, "k").unwrap();
    begin().unwrap();
    set_root(heap, "a", q, "k").unwrap();
    begin().unwrap();
    set_root(heap, "a", r, "k").unwrap();
    set_root(heap, "a", std::ptr::null_mut(), "k").unwrap();
    abort().unwrap();
    assert_eq!(heap.root("a", "k").unwrap(), q);
    abort().unwrap();
    assert_eq!(heap.root("a", "k").unwrap(), p);
    let (changed, goes) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|s| {
        s.spawn(|| {
            begin().unwrap();
            set_root(heap, "a", heap.base(), "k").unwrap();
            changed.wait();
            goes.wait();
            abort().unwrap();
        });
        changed.wait();
        let a = (heap.base() as usize + root_at(0)) as *const [u8; ROOT_LEN];
        // SAFETY: the first root of the heap.
        let look = || unsafe { a.read_volatile() };
        let mut log = |_, _| {
            let before = look();
            goes.wait();
            // The other thread aborts meanwhile, or has not come to it: then this shows nothing.
            let end = std::time::Instant::now() + std::time::Duration::from_millis(50);
            while std::time::Instant::now() < end {
                assert_eq!(look(), before, "a root was put back while another was set");
            }
            Ok(())
        };
        drop(heap.set_root_with("b", p, "k", &mut log).unwrap());
    });
    assert_eq!(heap.root("a", "k").unwrap(), p);
    heap.close().unwrap();
}

/// A block that a transaction freed is the heap's before the transaction is closed, from when on others may close
/// the heap: so also before anything is called that was to be called after the commit.
#[test]
fn a_freed_block_is_the_heaps_before_the_end_of_its_transaction() {
    unsafe extern "C-unwind" fn takes(arg: *mut c_void) {
        // SAFETY: what the test gave.
        let (heap, taken) = unsafe { &mut *arg.cast::<(Heap, usize)>() };
        *taken = heap.take(64, 1).unwrap().ptr as usize;
    }
    let _one = one();
    let options = HeapOptions::new(64 << 20, 0x2500_0000_0000);
    let heap =
        Heap::open_over(Box::new(Nowhere), "freed", (vec![0; 64 << 10], 0), &options).unwrap();
    let p = crate::malloc(heap, 64, 1).unwrap();
    let mut found = (heap, 0);
    begin().unwrap();
    // SAFETY: it lives until the commit.
    unsafe { on_commit(takes, (&raw mut found).cast()).unwrap() };
    crate::free(heap, p).unwrap();
    commit().unwrap();
    assert_eq!(found.1, p as usize);
    heap.close().unwrap();
}
