//! Tests of a primary alone.

use std::cell::RefCell;
use std::rc::Rc;

use super::rule::OTHERS;
use super::*;
use crate::pace::Pace;
use crate::piece::{OtherFile, encode};
use mojim_config::MediumKind;
use mojim_env::OpenHow;
use mojim_env::turns::{Turns, follow};
use mojim_linux::Os;
use mojim_store::log::LogSpec;
use mojim_store::store::StoreSpec;

/// A primary without a mirror, of a volume in a directory of its own.
pub(crate) fn alone(name: &str, write_back: WriteBack) -> (Primary, std::path::PathBuf) {
    alone_on(name, write_back, MediumKind::Dram)
}

fn alone_on(
    name: &str,
    write_back: WriteBack,
    medium: MediumKind,
) -> (Primary, std::path::PathBuf) {
    let dir = std::env::temp_dir().join(format!("mojim-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let env: Arc<dyn mojim_env::Env> = Arc::new(Os::new().unwrap());
    let log = LogSpec {
        lane: 0,
        medium,
        path: dir.join("log"),
        ring: dir.join("ring"),
        size: LOG,
    };
    let spec = StoreSpec {
        cluster: "c".into(),
        volume: "v".into(),
        node: "a".into(),
        dir: dir.join("data"),
        meta: dir.join("meta"),
        logs: vec![log],
        rank: 0,
        holders: 2,
        max_open: 16,
        copy_streams: 1,
        by_hand: true,
        locker: mojim_env::Locker::Program,
    };
    let store = Arc::new(Store::open(&env, spec).unwrap());
    let spec = PrimarySpec {
        rule: AckRule::LOCAL,
        background_send: false,
        spin: Duration::ZERO,
        resend_timeout: Duration::from_secs(1),
        resend_attempts: 1,
        max_record: 4096,
        checkpoint_threshold: 2,
        write_back,
        write_back_pages: 5,
        smallest_log: LOG,
        secondary_threshold: 0,
    };
    (Primary::new(store, spec), dir)
}

const LOG: u64 = 16 << 20;

/// A thread that was about to acknowledge stood still between its look at the rule and
/// its looks at the prefixes, while the mirror was given up and another one began to
/// join. It then acknowledged, by the new mirror alone, what the view says is committed
/// only in the own log. The test runs every interleaving of one thread's looks with such
/// a history, with and without a lease.
#[test]
fn nothing_is_committed_that_was_at_no_instant() {
    type Step = fn(&Primary);
    let history: &[Step] = &[
        // Its mirror is silent.
        |p| p.set_rule(AckRule::BOTH),
        |p| p.persisted.advance(10),
        // The view says that it is alone.
        |p| p.set_rule(AckRule::LOCAL),
        |p| p.acked.reset(4),
        // The mirror joins, and has what is not in the own log yet.
        |p| p.set_rule(AckRule::BOTH),
        |p| p.acked.advance(12),
        // It is lost again, and comes back without what it had.
        |p| p.set_rule(AckRule::LOCAL),
        |p| p.acked.reset(5),
        |p| p.persisted.advance(11),
        |p| p.set_rule(AckRule::BOTH),
        |p| p.acked.advance(13),
        |p| p.persisted.advance(13),
        // It is a member.
        |p| p.set_rule(AckRule::MIRROR),
        |p| p.acked.advance(14),
    ];
    let (p, dir) = alone("interleavings", WriteBack::Eager);
    let p = Arc::new(p);
    // All ways to have some of the history done before, and some at each point.
    let n = history.len();
    let mut looks = 0;
    for leased in [false, true] {
        for begin in 0..n {
            for first in begin..=n {
                for second in first..=n {
                    for third in second..=n {
                        p.persisted.reset(5);
                        p.acked.reset(7);
                        p.rule.reset(AckRule::MIRROR);
                        history[..begin].iter().for_each(|step| step(&p));
                        if leased {
                            p.lease_until(Duration::MAX / 2);
                            // What it held before is not looked at here.
                            p.rule.forget_held();
                        }
                        let at = |p: &Primary| p.rule().committed(p.persisted.get(), p.acked.get());
                        let seen = Rc::new(RefCell::new(vec![at(&p)]));
                        let mut ends = vec![third, second, first];
                        let (mut done, others) = (begin, (p.clone(), seen.clone()));
                        OTHERS.set(Some(Box::new(move || {
                            let (p, seen) = &others;
                            let end = ends.pop().unwrap_or(done);
                            for step in &history[done..end] {
                                step(p);
                                seen.borrow_mut().push(at(p));
                            }
                            done = end;
                        })));
                        let committed = p.committed();
                        OTHERS.take();
                        let seen = seen.borrow();
                        // It may be less than at the end, and more than at none.
                        let most = seen.iter().max().expect("the first");
                        assert!(
                            committed <= *most,
                            "{committed} of {seen:?}; {begin}, {first}, {second}, {third}"
                        );
                        looks += 1;
                    }
                }
            }
        }
    }
    assert!(looks > 5_000, "{looks}");
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// What each policy applies, by what waits and what the program does.
#[test]
fn what_waits_is_written_back_by_the_policy() {
    use WriteBack::{Async, Auto, Eager};
    let store_of = |write_back: WriteBack| {
        let (p, dir) = alone(&format!("write-back-{write_back}"), write_back);
        p.store.make_new().unwrap();
        p.begin(1, mojim_format::View::default()).unwrap();
        p.ready.store(true, Release);
        (p, dir)
    };
    let bytes = vec![1u8; 2000];
    let append = |p: &Primary, offset: u64, len: usize| {
        let ptr = bytes.as_ptr();
        let file = 1;
        p.append(&[Piece::Write {
            file,
            offset,
            ptr,
            len,
        }])
        .unwrap();
    };
    let step = |p: &Primary, pace| {
        p.checkpoint_step(pace).unwrap();
        p.last() - p.store.applied()
    };
    for policy in [Eager, Async, Auto] {
        let (p, dir) = store_of(policy);
        // One record of one page.
        append(&p, 0, 8);
        assert_eq!(step(&p, Pace::Busy), 1, "{policy}");
        assert_eq!(step(&p, Pace::Quiet), 1, "{policy}: below the threshold");
        // Two of three pages.
        append(&p, 4090, 8);
        let left = step(&p, Pace::Busy);
        assert_eq!(left, if policy == Eager { 0 } else { 2 }, "{policy}");
        let left = step(&p, Pace::Quiet);
        assert_eq!(left, if policy == Async { 2 } else { 0 }, "{policy}");
        // Three of five.
        append(&p, 4090, 8);
        let left = step(&p, Pace::Busy);
        assert_eq!(left, if policy == Async { 0 } else { 1 }, "{policy}");
        assert_eq!(step(&p, Pace::Pressed), 0, "{policy}");
        assert_eq!(p.store.checkpointed(), 0, "{policy}");
        // Applied ones do not count again.
        append(&p, 0, 8);
        assert_eq!(step(&p, Pace::Busy), 1, "{policy}");
        assert_eq!(step(&p, Pace::Idle), 0, "{policy}");
        assert_eq!(p.store.checkpointed(), p.last(), "{policy}");
        // Half of the log.
        if policy == Async {
            while p.store.pressure() <= 0.5 {
                append(&p, 0, 0);
            }
            step(&p, Pace::Busy);
            assert_eq!(p.store.checkpointed(), p.store.applied());
            assert!(p.store.pressure() < 0.5);
        }
        // Much, of few pages.
        if policy == Auto {
            let before = p.store.applied();
            while p.store.waiting_bytes() < LOG / 8 {
                assert_eq!(p.store.applied(), before);
                append(&p, 0, bytes.len());
                if p.store.waiting_bytes() < LOG / 8 {
                    step(&p, Pace::Busy);
                }
            }
            assert_eq!(step(&p, Pace::Busy), 0);
        }
        drop(p);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// The background wrote the log beside threads that wait for it, and may lose its processor
/// with the lock: four threads had 24,000 sync points a second instead of 28,000.
#[test]
fn the_background_leaves_the_log_to_threads_that_write_it() {
    let (p, dir) = alone_on("left", WriteBack::Async, MediumKind::Disk);
    p.store.make_new().unwrap();
    p.begin(1, mojim_format::View::default()).unwrap();
    p.ready.store(true, Release);
    let bytes = [1u8; 8];
    let append = || {
        let ptr = bytes.as_ptr();
        let (file, offset, len) = (1, 0, bytes.len());
        let piece = Piece::Write {
            file,
            offset,
            ptr,
            len,
        };
        p.append(&[piece]).unwrap();
        p.log(0).head()
    };
    let after = |pace| {
        p.checkpoint_step(pace).unwrap();
        p.log(0).persisted()
    };
    // Nobody waits.
    let head = append();
    assert_eq!(after(Pace::Busy), head);
    p.lanes[0].sleeping.store(1, SeqCst);
    // Threads write it: it moves between two turns.
    for _ in 0..3 {
        p.persist(0).unwrap();
        let head = append();
        assert!(after(Pace::Busy) < head);
    }
    // They do not get to it.
    assert_eq!(after(Pace::Busy), p.log(0).head());
    // Or the program waits for room.
    p.persist(0).unwrap();
    append();
    assert_eq!(after(Pace::Idle), p.log(0).head());
    drop(p);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// The operator could not see how much would have been lost with the primary's power, and
/// until when. And all of the log counted as missing at a mirror that was gone.
#[test]
fn what_a_lost_mirror_acknowledged_is_at_risk_until_the_own_log_has_it() {
    let (p, dir) = alone_on("risk", WriteBack::Async, MediumKind::Disk);
    p.store.make_new().unwrap();
    p.begin(1, mojim_format::View::default()).unwrap();
    p.ready.store(true, Release);
    p.set_rule(AckRule::MIRROR);
    let bytes = [1u8; 8];
    let append = || {
        let ptr = bytes.as_ptr();
        let (file, offset, len) = (1, 0, bytes.len());
        p.append(&[Piece::Write {
            file,
            offset,
            ptr,
            len,
        }])
        .unwrap();
        p.log(0).head()
    };
    let start = p.log(0).persisted();
    append();
    let acked_at = append();
    let head = append();
    p.lanes[0].acked_at.store(acked_at, Relaxed);
    // Once, a lane on which a thread waited for the mirror was left out.
    let waits = p.lanes[0].rx.lock().unwrap();
    assert_eq!(p.bytes_behind(), head - acked_at);
    drop(waits);
    let live = |l| p.store.logs()[0].live(l).load(Relaxed);
    let told = || [Live::AtRisk, Live::LastRisk, Live::Losses].map(live);
    let lost = || p.mirror_lost(p.store.env().now());
    let bytes_at_risk = acked_at - start;
    lost();
    assert_eq!(told(), [bytes_at_risk, 0, 0]);
    std::thread::sleep(Duration::from_millis(2));
    // A second link that breaks is the same loss.
    lost();
    p.checkpoint_step(Pace::Busy).unwrap();
    assert_eq!(told(), [0, bytes_at_risk, 1]);
    assert!(live(Live::LastRiskTime) >= 2000);
    lost();
    assert_eq!(told(), [0, 0, 2]);
    // Or until a mirror is back that has all of it.
    p.lanes[0].acked_at.store(append(), Relaxed);
    lost();
    assert!(live(Live::AtRisk) > 0);
    p.update_risk(true);
    assert_eq!(told()[0], 0);
    assert_eq!(live(Live::Losses), 3);
    // What counted is in the own log by the rule.
    p.set_rule(AckRule::BOTH);
    lost();
    assert_eq!(live(Live::Losses), 3);
    p.pair_with("another");
    assert_eq!(p.bytes_behind(), p.log(0).head() - p.log(0).start());
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// Only the program itself knew that its copy had failed.
#[test]
fn a_copy_that_fails_says_so_where_others_look() {
    let (p, dir) = alone("failed", WriteBack::Eager);
    let failed = || p.store.logs()[0].live(Live::Failed).load(Relaxed);
    assert_eq!(failed(), 0);
    let e = Error::Poisoned("no room".into());
    assert!(p.store.fail::<()>(Err(e)).is_err());
    assert_eq!(failed(), 1);
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// A mirror had all parts of a sync point but the last one when both nodes lost their
/// power, and a record of another lane, which was made then, told that those parts were
/// committed. So the mirror's log seemed to lack what was acknowledged: the program was
/// refused, and `mojim promote --force`, which the refusal names, gave up what was
/// acknowledged in truth (`mojim-crash cluster`, twice in 5,000 states on a busy machine).
#[test]
fn what_a_record_tells_was_committed_ends_a_sync_point() {
    let (p, dir) = alone("stamp", WriteBack::Auto);
    p.begin_unreplicated("a").unwrap();
    p.set_rule(AckRule::MIRROR);
    let bytes = [1u8; 9000];
    let append = |len: usize| {
        let (file, offset, ptr) = (1, 0, bytes.as_ptr());
        let write = Piece::Write {
            file,
            offset,
            ptr,
            len,
        };
        p.append(&[write]).unwrap().lsn
    };
    let told = |lsn: u64| {
        let log = p.log(0);
        let found = log.records(log.start()).find(|r| r.header.lsn == lsn);
        found.expect("it was appended").header.committed
    };
    let before = append(8);
    let last = append(bytes.len());
    assert_eq!(last, before + 3, "three parts");
    for (acked, whole) in [
        (before - 1, before - 1),
        (before, before),
        (last - 2, before),
        (last - 1, before),
        (last, last),
    ] {
        p.acked.advance(acked);
        assert_eq!(told(append(8)), whole, "{acked} of {last}");
    }
    // By another rule less is committed; what was committed once stays so.
    p.acked.reset(last - 2);
    assert!(p.committed() < last);
    assert_eq!(told(append(8)), last);
    p.acked.advance(p.last());
    // Two at once, and of one's own parts the first ones.
    let first = append(bytes.len());
    let second = append(bytes.len());
    p.acked.advance(second - 2);
    assert_eq!(told(append(8)), first);
    p.acked.advance(second);
    assert_eq!(told(append(8)), second);
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// Only the session's thread looked at the lease: a thread that slept with it, or ran
/// while it waited for a disk, acknowledged what a backup had given up.
#[test]
fn what_comes_after_a_lease_is_not_committed_whoever_looks() {
    let (p, dir) = alone("lease", WriteBack::Eager);
    let env = p.store.env().clone();
    let hour = Duration::from_secs(3600);
    p.lease_until(env.now() + hour);
    p.persisted.reset(5);
    assert_eq!(p.committed(), 5);
    // It ends, and no other thread has noticed.
    p.lease_until(env.now());
    p.persisted.reset(9);
    assert_eq!(p.committed(), 5);
    // Renewed, but held for another reason; then not.
    p.lease_until(env.now() + hour);
    p.hold();
    assert_eq!(p.committed(), 5);
    p.let_go();
    assert_eq!(p.committed(), 9);
    drop(p);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A thread that waited while another one wrote the log for both, and the disk stood still
/// for longer than a mirror may: it said that the mirror had not moved on, where there is
/// none.
#[test]
fn a_log_that_takes_long_is_no_silent_mirror() {
    let (mut p, dir) = alone_on("slow-log", WriteBack::Eager, MediumKind::Disk);
    p.spec.resend_timeout = Duration::from_millis(5);
    p.begin_unreplicated("a").unwrap();
    std::thread::scope(|s| {
        let writes = p.lanes[0].persist.lock().unwrap();
        let waits = s.spawn(|| p.commit(&[Piece::Create { file: 1, name: "f" }]));
        // Many times as long as its patience.
        while p.last() == 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(p.patience().limit() * 20);
        assert!(!waits.is_finished(), "{:?}", waits.join());
        drop(writes);
        assert_eq!(waits.join().unwrap().unwrap(), 1);
    });
    let _ = std::fs::remove_dir_all(dir);
}

/// Once a write of the log had taken longer than a slice, every thread that waited for it stood in line
/// for the log's lock. There nobody is told that its record is written: each got the lock in its turn,
/// wrote what few had appended meanwhile, and so kept the others waiting for longer than a slice. 32
/// threads had half of the sync points that the disk allows, and beside busy processors a tenth.
#[test]
fn who_waits_for_a_log_that_takes_long_is_told_when_it_is_written() {
    let (p, dir) = alone_on("told-log", WriteBack::Eager, MediumKind::Disk);
    p.begin_unreplicated("a").unwrap();
    std::thread::scope(|s| {
        // Another thread writes, and has the lock again before anybody else.
        let mut writes = p.lanes[0].persist.lock().unwrap();
        let waits = s.spawn(|| p.commit(&[Piece::Create { file: 1, name: "f" }]));
        let begun = std::time::Instant::now();
        let until = |what: &str, done: &dyn Fn() -> bool| {
            while !done() {
                assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
                std::thread::yield_now();
            }
        };
        until("sleeps for another slice", &|| p.waiters.naps() >= 2);
        let head = p.log(0).head();
        p.log(0).persist(head).unwrap();
        *writes = head;
        p.persisted.advance(1);
        p.wake();
        until("is told", &|| waits.is_finished());
        drop(writes);
        assert_eq!(waits.join().unwrap().unwrap(), 1);
    });
    let _ = std::fs::remove_dir_all(dir);
}

/// While a primary leaned on its own log, or its mirror caught up, less was committed by the new
/// rule than callers had been told: a wait for the data files ended before they had it (seen once
/// in 40 runs: a file read right after the wait lacked the last acknowledged bytes).
#[test]
fn a_change_of_the_rule_takes_back_nothing_of_what_was_told() {
    let (p, dir) = alone("told", WriteBack::Eager);
    p.set_rule(AckRule::MIRROR);
    p.persisted.reset(5);
    p.acked.reset(12);
    assert_eq!(p.acknowledged(), 12);
    p.set_rule(AckRule::BOTH);
    assert_eq!((p.committed(), p.acknowledged()), (5, 12));
    p.set_rule(AckRule::LOCAL);
    p.persisted.reset(20);
    p.set_rule(AckRule::BOTH);
    assert_eq!((p.committed(), p.acknowledged()), (12, 20));
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// A thread that panicked while its record was made left an LSN without a record: nothing that
/// came later was committed, by any thread. Now records that change nothing take its place, and
/// all of them where it had several.
#[test]
fn a_thread_that_ends_in_its_record_stops_no_other() {
    let (p, dir) = alone("dies", WriteBack::Eager);
    p.begin_unreplicated("a").unwrap();
    let (size, bytes) = (20_000, [7u8; 9000]);
    let made = [
        Piece::Create { file: 1, name: "f" },
        Piece::Resize { file: 1, size },
    ];
    p.commit(&made).unwrap();
    let env = p.store.env();
    let how = OpenHow {
        create: true,
        write: true,
        ..OpenHow::default()
    };
    let other = env.open(&dir.join("other"), how).unwrap();
    let write = |len| Piece::Write {
        file: 1,
        offset: 0,
        ptr: bytes.as_ptr(),
        len,
    };
    // Its bytes are read for spill files only.
    let unread = Piece::Copy {
        file: 1,
        offset: 0,
        len: 8,
        from: OtherFile(&*other),
    };
    let text = b"after";
    let after = Piece::Write {
        file: 1,
        offset: 10,
        ptr: text.as_ptr(),
        len: text.len(),
    };
    for (len, records) in [(8, 1), (9000, 3)] {
        let before = p.last();
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            p.begin_commit(&[write(len), unread])
        }));
        assert!(died.is_err());
        assert_eq!(p.commit(&[after]).unwrap(), before + records + 1);
    }
    assert_eq!(p.last_with_records(), p.last());
    // They are what a mirror takes, and a node that starts.
    let (log, mut last) = (p.log(0), 0);
    for r in log.records(log.start()) {
        let r = mojim_format::RecordView::decode(r.bytes()).unwrap();
        assert!(r.header.end && r.header.part == 0);
        last = r.header.lsn;
    }
    assert_eq!(last, p.last());
    p.store.apply_all(last).unwrap();
    let mut found = vec![1; size as usize];
    p.store.area().read(1, 0, &mut found).unwrap();
    assert_eq!(&found[10..15], text);
    found[10..15].fill(0);
    assert!(found.iter().all(|b| *b == 0), "of those that died");
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// A thread that waits when this says, and says so.
#[derive(Default)]
struct Waiter {
    waits: AtomicBool,
    goes: AtomicBool,
}

impl Turns for Waiter {
    fn number(&self) -> usize {
        0
    }

    fn sleep(&self, _: &dyn Fn() -> bool, _: Duration) -> bool {
        self.waits.store(true, SeqCst);
        while !self.goes.load(SeqCst) {
            std::thread::yield_now();
        }
        true
    }
}

/// Between the LSN and its record the epoch may change. The record belongs to the epoch in which its LSN
/// was taken: a mirror refuses any other, and recovery ends at it.
#[test]
fn an_epoch_begins_when_the_records_of_the_one_before_are_there() {
    let (p, dir) = alone("raise", WriteBack::Eager);
    p.begin_unreplicated("a").unwrap();
    let before = p.epoch();
    let waiter = Arc::new(Waiter::default());
    let lens = [RecordWriter::len_for(0, 0)];
    std::thread::scope(|s| {
        let mut room = p.reserve(&lens, 0).unwrap();
        let raises = s.spawn(|| {
            follow(waiter.clone());
            p.raise(before + 1)
        });
        while !waiter.waits.load(SeqCst) {
            assert!(!raises.is_finished(), "it waits for no record");
            std::thread::yield_now();
        }
        assert_eq!(p.epoch(), before);
        let (volume, epoch) = (p.volume.load(Relaxed), p.epoch());
        room.fill(|_, lsn, slot| {
            encode(slot, &[], volume, lsn, epoch, 0, true, 0);
        });
        room.join();
        waiter.goes.store(true, SeqCst);
        raises.join().unwrap().unwrap();
    });
    assert_eq!(p.epoch(), before + 1);
    p.append(&[]).unwrap();
    let (log, history) = (p.log(0), p.store.history());
    let mut epochs = Vec::new();
    for r in log.records(log.start()) {
        assert_eq!(history.epoch_at(r.header.lsn), Some(r.header.epoch));
        epochs.push(r.header.epoch);
    }
    assert_eq!(epochs, [before, before + 1]);
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// A sync point whose call does not wait outlives the program from its success on: the next attach
/// finds its record. It lay behind one that another thread was making, and that a program which ended
/// then never made: the log ended before both.
#[test]
fn what_is_begun_and_not_waited_for_lies_behind_no_hole() {
    let (p, dir) = alone("outlives", WriteBack::Eager);
    p.begin_unreplicated("a").unwrap();
    let waiter = Arc::new(Waiter::default());
    let lens = [RecordWriter::len_for(0, 0)];
    std::thread::scope(|s| {
        let mut room = p.reserve(&lens, 0).unwrap();
        let begins = s.spawn(|| {
            let begun = p.begin_commit(&[]).unwrap();
            follow(waiter.clone());
            p.start_async(&begun);
            // Now it may end, and the program with it.
            assert_eq!(last_in_log(&p), begun.lsn);
        });
        while !waiter.waits.load(SeqCst) && !begins.is_finished() {
            std::thread::yield_now();
        }
        let (volume, epoch) = (p.volume.load(Relaxed), p.epoch());
        room.fill(|_, lsn, slot| {
            encode(slot, &[], volume, lsn, epoch, 0, true, 0);
        });
        room.join();
        waiter.goes.store(true, SeqCst);
        begins.join().unwrap();
    });
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// It waited for whatever was taken when it looked, also behind its own: with several threads one is
/// nearly always copying, and each call slept for others' records, of which it needed none.
#[test]
fn what_is_begun_and_not_waited_for_waits_for_nothing_behind_it() {
    let (p, dir) = alone("behind-it", WriteBack::Eager);
    p.begin_unreplicated("a").unwrap();
    let waiter = Arc::new(Waiter::default());
    let lens = [RecordWriter::len_for(0, 0)];
    let begun = p.begin_commit(&[]).unwrap();
    std::thread::scope(|s| {
        let room = p.reserve(&lens, 0).unwrap();
        let begins = s.spawn(|| {
            follow(waiter.clone());
            p.start_async(&begun);
        });
        while !waiter.waits.load(SeqCst) && !begins.is_finished() {
            std::thread::yield_now();
        }
        let waited = waiter.waits.load(SeqCst);
        drop(room);
        waiter.goes.store(true, SeqCst);
        assert!(!waited, "for a record behind its own");
    });
    assert!(last_in_log(&p) > begun.lsn);
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

fn last_in_log(p: &Primary) -> u64 {
    p.store.last_of(0).0
}

/// A thread stood still while it copied what it syncs, and those behind it said that the mirror did
/// not move on, where there is none.
#[test]
fn who_waits_for_another_ones_record_says_so() {
    let (mut p, dir) = alone("behind", WriteBack::Eager);
    p.spec.resend_timeout = Duration::from_millis(5);
    p.spec.resend_attempts = 3;
    p.begin_unreplicated("a").unwrap();
    // As with a mirror that is well.
    p.link_up.store(true, SeqCst);
    let lens = [RecordWriter::len_for(0, 0)];
    let room = p.reserve(&lens, 0).unwrap();
    let begun = p.begin_commit(&[]).unwrap();
    // A copy that a backup gets puts nothing off.
    p.store.progress.begin(p.store.env().now(), false, 1 << 20);
    let limit = Duration::from_secs(10);
    let error = p.finish_commit_within(&begun, limit).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("another thread of this process"), "{error}");
    assert!(!p.suspect.load(Acquire), "nobody else is at fault");
    // It ends: a record that changes nothing is in its place.
    drop(room);
    p.finish_commit(&begun).unwrap();
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// A question is answered, also where a thread of the program stands still in its record.
#[test]
fn what_is_being_made_is_not_known_to_be_there() {
    let (p, dir) = alone("asked", WriteBack::Eager);
    p.begin_unreplicated("a").unwrap();
    let lens = [RecordWriter::len_for(0, 0)];
    let room = p.reserve(&lens, 0).unwrap();
    let begun = p.begin_commit(&[]).unwrap();
    assert_eq!(p.copies(begun.lsn).0, None);
    drop(room);
    assert_eq!(p.copies(begun.lsn).0, Some(Level::Received));
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}

/// Where all places of reservations are taken, the next thread waits for those that have them. It took
/// the log for full, wrote everything to the disk and freed room, again and again.
#[test]
fn more_records_than_places_are_waited_for() {
    let (p, dir) = alone("places", WriteBack::Eager);
    p.begin_unreplicated("a").unwrap();
    let waiter = Arc::new(Waiter::default());
    let lens = [RecordWriter::len_for(0, 0)];
    std::thread::scope(|s| {
        let mut rooms = Vec::new();
        // A batch of places is taken when the one four before it is over.
        while rooms.len() < 256 {
            rooms.push(p.reserve(&lens, 0).unwrap());
        }
        let appends = s.spawn(|| {
            follow(waiter.clone());
            p.reserve(&lens, 0).is_some()
        });
        while !waiter.waits.load(SeqCst) {
            assert!(!appends.is_finished(), "it waits for nobody");
            std::thread::yield_now();
        }
        drop(rooms);
        waiter.goes.store(true, SeqCst);
        assert!(appends.join().unwrap());
    });
    assert_eq!(p.last(), p.last_with_records());
    drop(p);
    std::fs::remove_dir_all(dir).unwrap();
}
