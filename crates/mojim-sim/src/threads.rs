//! Several threads of a program call `Primary::commit` and wait, one at a time in an order drawn
//! from a seed. Meanwhile a link, a checkpoint and a mirror's lanes have threads of their own.
//!
//! Owns the programs and the results of their calls. A sync point counts as acknowledged
//! if its call returned success, not if the engine would say so when asked. Invariants
//! that are checked on each copy on which the mode's rule relies, after it has crashed:
//! - Each thread's last sync point lies between the last whose call returned success and
//!   the last that was begun, and is whole: two words, bytes between them, and a word in
//!   another file.
//! - A word to which several threads stored has the value of the greatest LSN among the
//!   sync points that are there.
//! - Without a fault no call fails, and all calls end. This holds also if a thread of the program
//!   comes to its end while it makes a record.
//! - A sync point whose call did not wait outlives the program, if its node keeps its power.
//! - All that was appended before others' records were waited for is in the logs after that.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_config::{MediumKind, WriteBack};
use mojim_env::{Address, Env, File, Locker};
use mojim_format::FrameKind;
use mojim_format::message::{Hello, Lane, Message};
use mojim_protocol::AckRule;
use mojim_replica::holders::Peer;
use mojim_replica::mirror::control::ControlIn;
use mojim_replica::mirror::lane::{LaneServer, Step};
use mojim_replica::mirror::{Mirror, refuse};
use mojim_replica::pace::Pace;
use mojim_replica::piece::{OtherFile, Piece};
use mojim_replica::primary::{Primary, PrimarySpec};
use mojim_replica::session::Session;
use mojim_store::log::{Log, LogSpec};
use mojim_store::store::{Store, StoreSpec};

use crate::turns::{Scheduler, TurnEnv, sleep, wrap};
use crate::{CrashKind, Faults, Rng, SimListener, World};

/// Bytes of each thread's part of the file.
const PART: u64 = 8 << 10;
/// The file with a part for each thread.
const PARTS: u32 = 1;
/// The file with a word for each thread, and one word that all threads store to.
const WORDS: u32 = 2;
/// The offset of the shared word.
const SHARED: u64 = 1024;
const MS: Duration = Duration::from_millis(1);

/// A defect that is put in on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// A durable write returns before it is done.
    LateWrite,
    /// The engine counts what was appended, not what is in the logs.
    AckEarly,
    /// An acknowledgement counts although another lane has a gap.
    AckGap,
    /// A thread that is woken to work for others returns instead.
    WakeEarly,
    /// A group of sync points counts as persistent, although its last write failed.
    CountFailed,
    /// What was appended is sent, although a record before it is not made yet.
    SendHole,
    /// The record of a thread that comes to its end is never made.
    KeepHole,
    /// Of a sync point whose thread comes to its end a part stays.
    TearGroup,
    /// Records that others are making are not waited for.
    SettleEarly,
}

impl Broken {
    /// All defects, with their names.
    pub const ALL: [(Broken, &'static str); 9] = [
        (Broken::LateWrite, "late_write"),
        (Broken::AckEarly, "ack_early"),
        (Broken::AckGap, "ack_gap"),
        (Broken::WakeEarly, "wake_early"),
        (Broken::CountFailed, "count_failed"),
        (Broken::SendHole, "send_hole"),
        (Broken::KeepHole, "keep_hole"),
        (Broken::TearGroup, "tear_group"),
        (Broken::SettleEarly, "settle_early"),
    ];
}

/// What one seed did.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// What was broken, if anything.
    pub failure: Option<String>,
    /// Turns of threads.
    pub turns: u64,
    /// Sync points begun.
    pub begun: u64,
    /// Of these, the ones whose calls returned success.
    pub acks: u64,
    /// Calls that failed after a fault.
    pub failed: u64,
    /// Whether the lanes were in shared memory, and a node crashed.
    pub shared: u64,
    /// Whether a node crashed while the threads ran.
    pub crashes: u64,
    /// Threads that came to their end while they made a record.
    pub deaths: u64,
}

struct Setup {
    rule: AckRule,
    lanes: usize,
    threads: usize,
    log: u64,
    shared: bool,
    /// The links are cut now and then.
    cuts: bool,
    faults: Faults,
    crash: Option<(u64, &'static str, CrashKind)>,
    /// A thread that comes to its end while it makes its record of this number.
    death: Option<(usize, u64)>,
    spin: Duration,
}

impl Setup {
    fn draw(rng: &mut Rng) -> Setup {
        let rule = *rng.pick(&[AckRule::LOCAL, AckRule::MIRROR, AckRule::BOTH]);
        let mut faults = Faults::none();
        if rng.below(4) == 0 {
            faults.write_error = rng.below(8) as u32;
            faults.sync_error = rng.below(8) as u32;
        }
        if rng.coin() {
            faults.split = 200;
            faults.short_recv = 200;
            faults.delay_max = Duration::from_micros(rng.between(20, 2000));
        }
        let nodes: &[&str] = if rule.mirror { &["a", "b"] } else { &["a"] };
        let node = *rng.pick(nodes);
        let kind = *rng.pick(&[CrashKind::Kill, CrashKind::Power]);
        // With links, threads take many turns to look at them.
        let most = if rule.mirror { 12_000 } else { 500 };
        let crash = (rng.below(4) != 0).then(|| (rng.between(20, most), node, kind));
        let threads = rng.between(2, 5) as usize;
        let death =
            (rng.below(3) == 0).then(|| (rng.below(threads as u64) as usize, rng.between(1, 10)));
        Setup {
            rule,
            lanes: rng.between(1, 3) as usize,
            threads,
            death,
            log: rng.between(4, 8) * (16 << 10),
            shared: rule.mirror && rng.below(3) == 0,
            cuts: rule.mirror && rng.below(3) == 0,
            faults,
            crash,
            spin: Duration::from_micros(*rng.pick(&[0, 5, 30])),
        }
    }

    fn has_faults(&self) -> bool {
        self.crash.is_some() || self.cuts || self.faults.write_error + self.faults.sync_error > 0
    }
}

/// What one thread of the program did, and the results of its calls.
#[derive(Default)]
struct Told {
    begun: AtomicU64,
    acked: AtomicU64,
    /// The last whose call returned success, waited or not: it outlives the program.
    kept: AtomicU64,
}

/// What all threads share.
struct Program {
    told: Vec<Told>,
    /// The LSN of each sync point's last record: its thread and number.
    lsns: Mutex<BTreeMap<u64, (usize, u64)>>,
    acks: AtomicU64,
    failed: AtomicU64,
    errors: Mutex<Vec<String>>,
    /// What was not in the logs and had to be.
    missed: Mutex<Option<String>>,
    deaths: AtomicU64,
    /// Threads that have not ended.
    left: AtomicU64,
    /// The threads beside the program's may end.
    over: AtomicBool,
    scheduler: Arc<Scheduler>,
}

impl Program {
    /// Whether the threads beside the program's are to end.
    fn is_over(&self) -> bool {
        self.over.load(SeqCst) || self.scheduler.is_over()
    }
}

/// The bytes of sync point `n` of thread `t`; their number is drawn too.
fn bytes(t: usize, n: u64, log: u64) -> Vec<u8> {
    let mut rng = Rng::new((t as u64) << 32 | n);
    let most = match rng.below(24) {
        0 => (log / 2 + log / 4).min(PART - 16),
        1 => 3000,
        _ => 200,
    };
    let mut b = vec![0; rng.between(1, most) as usize];
    rng.fill(&mut b);
    b
}

fn word_of(t: usize, n: u64) -> u64 {
    (t as u64 + 1) << 32 | n
}

fn store_spec(node: &str, setup: &Setup) -> StoreSpec {
    let root = PathBuf::from("/").join(node);
    let log = |lane: usize| LogSpec {
        lane,
        medium: MediumKind::Disk,
        path: root.join(format!("logs/log.{lane}")),
        ring: PathBuf::from(format!("/shm/ring.{lane}")),
        size: setup.log,
    };
    StoreSpec {
        cluster: "c".into(),
        volume: "v".into(),
        node: node.into(),
        dir: root.join("data"),
        meta: root.join("meta"),
        logs: (0..setup.lanes).map(log).collect(),
        rank: u64::from(node == "b"),
        holders: 2,
        max_open: 3,
        copy_streams: 1,
        by_hand: true,
        locker: Locker::Program,
    }
}

fn address() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 2], 7000))
}

fn primary(store: Arc<Store>, setup: &Setup) -> Arc<Primary> {
    let spec = PrimarySpec {
        rule: setup.rule,
        background_send: false,
        spin: setup.spin,
        resend_timeout: 50 * MS,
        resend_attempts: 10,
        max_record: Log::max_record(setup.log),
        checkpoint_threshold: 4,
        write_back: WriteBack::Auto,
        write_back_pages: 8,
        smallest_log: setup.log,
        secondary_threshold: 0,
    };
    Arc::new(Primary::new(store, spec))
}

/// One thread of the program.
fn work(
    p: &Primary,
    (program, world): (&Program, &World),
    t: usize,
    setup: &Setup,
    count: u64,
    seed: u64,
) {
    let mut rng = Rng::new(seed);
    let told = &program.told[t];
    // Sync points that no thread has waited for yet.
    let mut open = 0;
    for n in 1..=count {
        let b = bytes(t, n, setup.log);
        let (word, shared) = (n.to_le_bytes(), word_of(t, n).to_le_bytes());
        let at = PART * t as u64;
        let piece = |file, offset, bytes: &[u8]| Piece::Write {
            file,
            offset,
            ptr: bytes.as_ptr(),
            len: bytes.len(),
        };
        let pieces = [
            piece(PARTS, at, &word),
            piece(PARTS, at + 16, &b),
            piece(WORDS, 8 * t as u64, &word),
            piece(WORDS, SHARED, &shared),
            piece(PARTS, at + 8, &word),
        ];
        told.begun.store(n, SeqCst);
        if setup.death == Some((t, n)) {
            die(p, &pieces);
            program.deaths.fetch_add(1, SeqCst);
            return;
        }
        let result = p.begin_commit(&pieces).and_then(|begun| {
            let mut lsns = program.lsns.lock().expect("no panic");
            lsns.insert(begun.lsn, (t, n));
            drop(lsns);
            if rng.below(6) == 0 && n < count {
                p.start_async(&begun);
                open += 1;
                if world.crashed("a").is_none() {
                    told.kept.store(n, SeqCst);
                }
                return Ok(());
            }
            p.finish_commit(&begun)?;
            // A dead process learns of no acknowledgement. Its threads only run on in the
            // simulation, and with a lane in shared memory no call fails (seed 1325).
            if world.crashed("a").is_some() {
                return Ok(());
            }
            told.acked.store(n, SeqCst);
            told.kept.store(n, SeqCst);
            program
                .acks
                .fetch_add(1 + std::mem::take(&mut open), SeqCst);
            Ok(())
        });
        if let Err(e) = result {
            program.failed.fetch_add(1, SeqCst);
            let mut errors = program.errors.lock().expect("no panic");
            errors.push(format!("thread {t}, sync point {n}: {e}"));
            return;
        }
        if rng.below(8) == 0 {
            sleep(&|| false, MS * rng.below(4) as u32);
        }
    }
}

/// A file that nothing is read from.
struct Unread;

impl File for Unread {
    fn read_at(&self, _: &mut [u8], _: u64) -> std::io::Result<usize> {
        unreachable!("what is small is not read from files")
    }

    fn write_at(&self, _: &[u8], _: u64) -> std::io::Result<()> {
        unreachable!("as above")
    }

    fn sync(&self) -> std::io::Result<()> {
        unreachable!("as above")
    }

    fn set_len(&self, _: u64) -> std::io::Result<()> {
        unreachable!("as above")
    }

    fn len(&self) -> std::io::Result<u64> {
        unreachable!("as above")
    }

    fn allocate(&self, _: u64) -> std::io::Result<()> {
        unreachable!("as above")
    }

    fn next_data(&self, _: u64) -> std::io::Result<Option<std::ops::Range<u64>>> {
        unreachable!("as above")
    }
}

/// Begins a sync point of these pieces, too large for one record in a small log, and panics
/// before the last of them is there: bytes of a file are read for spill files only.
fn die(p: &Primary, pieces: &[Piece<'_>]) {
    let (mut pieces, many) = (pieces.to_vec(), vec![0xdd; PART as usize - 16]);
    let Some(&Piece::Write { file, offset, .. }) = pieces.last() else {
        unreachable!("a sync point ends with a word");
    };
    if let Piece::Write { ptr, len, .. } = &mut pieces[1] {
        (*ptr, *len) = (many.as_ptr(), many.len());
    }
    *pieces.last_mut().expect("as above") = Piece::Copy {
        file,
        offset,
        len: 8,
        from: OtherFile(&Unread),
    };
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| p.begin_commit(&pieces)));
    // An error: it came too late to take any room.
    assert!(!matches!(died, Ok(Ok(_))), "its record was made");
}

/// The thread that waits for others' records now and then, as a rollback does.
fn settles(scheduler: &Arc<Scheduler>, p: &Arc<Primary>, program: &Arc<Program>, seed: u64) {
    let (p, program) = (p.clone(), program.clone());
    scheduler.thread("settles", move || {
        let mut rng = Rng::new(seed);
        while !program.is_over() {
            if p.is_ready() {
                let last = p.last();
                p.last_with_records();
                let missed = missing(&p.store, last).filter(|_| !program.scheduler.is_over());
                if let Some(lsn) = missed {
                    let why = format!("5: LSN {lsn} of {last} was waited for and is in no log");
                    program.missed.lock().expect("no panic").get_or_insert(why);
                    return;
                }
            }
            sleep(&|| false, MS * rng.below(3) as u32 / 4);
        }
    });
}

/// The first LSN up to `last` that is neither applied nor in a log.
fn missing(store: &Store, last: u64) -> Option<u64> {
    let applied = store.applied();
    let mut there = BTreeSet::new();
    for log in store.logs() {
        there.extend(log.records(log.start()).map(|r| r.header.lsn));
    }
    (applied + 1..=last).find(|lsn| !there.contains(lsn))
}

/// The mirror's threads: the links, one for each lane, and one that applies.
fn follow(
    scheduler: &Arc<Scheduler>,
    m: &Arc<Mirror>,
    listener: SimListener,
    program: &Arc<Program>,
) {
    let waiting: Arc<Mutex<VecDeque<LaneServer>>> = Arc::default();
    for i in 0..m.store.logs().len() {
        let (waiting, program) = (waiting.clone(), program.clone());
        scheduler.thread(&format!("lane {i}"), move || {
            let mut mine: Option<LaneServer> = None;
            while !program.is_over() {
                if mine.is_none() {
                    mine = waiting.lock().expect("no panic").pop_front();
                }
                match mine.as_mut().map(LaneServer::step) {
                    None => sleep(&|| false, MS),
                    Some(Ok(Step::Moved)) => {}
                    Some(Ok(_)) => sleep(&|| false, MS / 10),
                    Some(Err(_)) => mine = None,
                }
            }
        });
    }
    let (m, program) = (m.clone(), program.clone());
    let inner = scheduler.clone();
    scheduler.thread("mirror", move || {
        let (mut fresh, mut control) = (Vec::new(), Vec::<ControlIn>::new());
        while !program.is_over() {
            while let Ok(Some(c)) = listener.accept() {
                fresh.push(mojim_env::wire::Wire::new(wrap(&inner, c)));
            }
            for mut w in std::mem::take(&mut fresh) {
                let (f, body) = match w.take_frame() {
                    Ok(None) => {
                        fresh.push(w);
                        continue;
                    }
                    Err(_) => continue,
                    Ok(Some(x)) => x,
                };
                match f.kind {
                    FrameKind::Hello => {
                        let h = Hello::decode(&body).expect("the engine's own");
                        match ControlIn::answer(m.clone(), w, &h) {
                            Ok(c) => control.push(c),
                            Err((mut w, no)) => refuse(&mut w, f.epoch, &no),
                        }
                    }
                    _ => {
                        let l = Lane::decode(&body).expect("the engine's own");
                        match LaneServer::accept(m.clone(), w, f.epoch, &l) {
                            Ok(s) => waiting.lock().expect("no panic").push_back(s),
                            Err((mut w, no)) => refuse(&mut w, f.epoch, &no),
                        }
                    }
                }
            }
            control.retain_mut(|c| {
                let goes_on = c.step().is_ok();
                if !goes_on {
                    c.end();
                }
                goes_on
            });
            let _ = m.checkpoint_step(Pace::Quiet);
            sleep(&|| false, MS / 10);
        }
    });
}

/// Runs one seed.
pub fn run(seed: u64, broken: Option<Broken>) -> Outcome {
    let mut rng = Rng::new(seed ^ 0x7468_7265_6164);
    let setup = Setup::draw(&mut rng);
    let world = Arc::new(World::new(rng.next_u64(), Faults::none()));
    let scheduler = Scheduler::new(world.clone(), rng.fork(), 16);
    let mut outcome = Outcome::default();
    let program = Arc::new(Program {
        told: (0..setup.threads).map(|_| Told::default()).collect(),
        lsns: Mutex::default(),
        acks: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        errors: Mutex::default(),
        missed: Mutex::default(),
        deaths: AtomicU64::new(0),
        left: AtomicU64::new(setup.threads as u64),
        over: AtomicBool::new(false),
        scheduler: scheduler.clone(),
    });
    if let Err(e) = play(
        &world,
        &scheduler,
        &setup,
        &program,
        broken,
        &mut rng,
        &mut outcome,
    ) {
        outcome.failure = Some(e);
        return outcome;
    }
    outcome.begun = program.told.iter().map(|t| t.begun.load(SeqCst)).sum();
    outcome.acks = program.acks.load(SeqCst);
    outcome.failed = program.failed.load(SeqCst);
    outcome.deaths = program.deaths.load(SeqCst);
    outcome.failure = judge(&world, &setup, &program, &mut rng).err();
    outcome
}

/// Makes the threads and lets them run.
fn play(
    world: &Arc<World>,
    scheduler: &Arc<Scheduler>,
    setup: &Setup,
    program: &Arc<Program>,
    broken: Option<Broken>,
    rng: &mut Rng,
    outcome: &mut Outcome,
) -> Result<(), String> {
    let text = |e: mojim_env::Error| e.to_string();
    let late = broken == Some(Broken::LateWrite);
    let env: Arc<dyn Env> = TurnEnv::new(world.env("a"), scheduler.clone(), late);
    let store = Arc::new(Store::open(&env, store_spec("a", setup)).map_err(text)?);
    let switches = &store.mutations;
    switches.ack_early.set(broken == Some(Broken::AckEarly));
    switches.ack_gap.set(broken == Some(Broken::AckGap));
    switches.wake_early.set(broken == Some(Broken::WakeEarly));
    switches
        .count_failed
        .set(broken == Some(Broken::CountFailed));
    switches.send_hole.set(broken == Some(Broken::SendHole));
    switches.keep_hole.set(broken == Some(Broken::KeepHole));
    switches.tear_group.set(broken == Some(Broken::TearGroup));
    switches
        .settle_early
        .set(broken == Some(Broken::SettleEarly));
    let p = primary(store, setup);
    if setup.rule.mirror {
        let env: Arc<dyn Env> = TurnEnv::new(world.env("b"), scheduler.clone(), late);
        let store = Arc::new(Store::open(&env, store_spec("b", setup)).map_err(text)?);
        let m = Arc::new(Mirror::new(store, "b", 0));
        let listener = world.listen("b", address()).map_err(|e| e.to_string())?;
        follow(scheduler, &m, listener, program);
        link(scheduler, &p, setup, program);
    } else {
        p.begin_unreplicated("a").map_err(text)?;
    }
    checkpoint(scheduler, &p, program, rng.next_u64());
    begin(world, scheduler, &p, setup, program, rng);
    // A record that is never made would be waited for without end.
    if broken != Some(Broken::KeepHole) {
        settles(scheduler, &p, program, rng.next_u64());
    }
    if setup.cuts {
        let (world, program, seed) = (world.clone(), program.clone(), rng.next_u64());
        scheduler.thread("cuts", move || {
            let mut rng = Rng::new(seed);
            while !program.is_over() {
                sleep(&|| program.is_over(), MS * rng.between(1, 40) as u32);
                world.reset_connections("a", "b");
            }
        });
    }
    if let Some((turn, node, kind)) = setup.crash {
        scheduler.crash_at(turn, node, kind);
    }
    drop(p);
    let (turns, failures) = scheduler.play();
    outcome.turns = turns;
    outcome.shared = u64::from(setup.shared);
    outcome.crashes = u64::from(setup.crash.is_some_and(|(at, ..)| at <= turns));
    world.set_faults(Faults::none());
    match failures.into_iter().next() {
        Some(f) => Err(f),
        None => Ok(()),
    }
}

/// The thread of the program's link to its mirror.
fn link(scheduler: &Arc<Scheduler>, p: &Arc<Primary>, setup: &Setup, program: &Arc<Program>) {
    let peer = Peer {
        name: "b".into(),
        address: Address::Tcp(address()),
        tcp: Address::Tcp(address()),
        shared: setup.shared,
    };
    let mut session = Session::attach(p.clone(), "a", peer);
    let program = program.clone();
    scheduler.thread("link", move || {
        while !program.is_over() {
            if !session.step() {
                sleep(&|| false, MS / 5);
            }
        }
    });
}

/// The thread that applies committed records, at a pace drawn from `seed`.
fn checkpoint(scheduler: &Arc<Scheduler>, p: &Arc<Primary>, program: &Arc<Program>, seed: u64) {
    let (p, program) = (p.clone(), program.clone());
    scheduler.thread("checkpoint", move || {
        let mut rng = Rng::new(seed);
        while !program.is_over() {
            if p.is_ready() {
                let pace = *rng.pick(&[Pace::Busy, Pace::Quiet, Pace::Idle, Pace::Pressed]);
                if p.checkpoint_step(pace).is_err() {
                    return;
                }
            }
            sleep(&|| false, MS);
        }
    });
}

/// The threads of the program: the first makes the files, and then all of them write.
fn begin(
    world: &Arc<World>,
    scheduler: &Arc<Scheduler>,
    p: &Arc<Primary>,
    setup: &Setup,
    program: &Arc<Program>,
    rng: &mut Rng,
) {
    let made = Arc::new(AtomicBool::new(false));
    for t in 0..setup.threads {
        let (p, program, made, world) = (p.clone(), program.clone(), made.clone(), world.clone());
        let (seed, count) = (rng.next_u64(), rng.between(10, 60));
        let setup = Setup {
            faults: setup.faults.clone(),
            ..*setup
        };
        scheduler.thread(&format!("program {t}"), move || {
            // Until the volume is ready, with a limit.
            for _ in 0..2_000 {
                if p.is_ready() || p.store.poisoned().is_some() {
                    break;
                }
                sleep(&|| false, MS);
            }
            if t == 0 {
                made.store(make_files(&p, &program, setup.threads), SeqCst);
                world.set_faults(setup.faults.clone());
            }
            for _ in 0..4_000 {
                if made.load(SeqCst) || program.failed.load(SeqCst) > 0 {
                    break;
                }
                sleep(&|| false, MS);
            }
            if made.load(SeqCst) {
                work(&p, (&program, &world), t, &setup, count, seed);
            }
            if program.left.fetch_sub(1, SeqCst) == 1 {
                program.over.store(true, SeqCst);
            }
        });
    }
}

/// Makes the files that all threads write to. False if that failed.
fn make_files(p: &Primary, program: &Program, threads: usize) -> bool {
    let result = p.commit(&[
        Piece::Create {
            file: PARTS,
            name: "parts",
        },
        Piece::Resize {
            file: PARTS,
            size: PART * threads as u64,
        },
        Piece::Create {
            file: WORDS,
            name: "words",
        },
        Piece::Resize {
            file: WORDS,
            size: 2 * SHARED,
        },
    ]);
    if let Err(e) = &result {
        let mut errors = program.errors.lock().expect("no panic");
        errors.push(format!("begin: {e}"));
        program.failed.fetch_add(1, SeqCst);
    }
    result.is_ok()
}

/// Checks each copy on which the rule relies, as it is after a crash.
fn judge(world: &World, setup: &Setup, program: &Program, rng: &mut Rng) -> Result<(), String> {
    if let Some(why) = &*program.missed.lock().expect("no panic") {
        return Err(why.clone());
    }
    let errors = program.errors.lock().expect("no panic");
    if !setup.has_faults() && !errors.is_empty() {
        return Err(format!("live: without a fault: {}", errors.join("; ")));
    }
    for (node, must) in [("a", setup.rule.local), ("b", setup.rule.mirror)] {
        let crashed = setup
            .crash
            .filter(|c| c.1 == node && world.crashed(node).is_some());
        // A primary that relies on its mirror has its records in its ring, which is lost
        // only with the power.
        let lost = crashed.is_some_and(|c| c.2 == CrashKind::Power);
        let power = must && rng.coin();
        if !must && (node == "b" || lost) {
            continue;
        }
        match power {
            true => world.power_loss(node),
            false => world.kill(node),
        }
        let env: Arc<dyn Env> = world.env(node);
        let store =
            Store::open(&env, store_spec(node, setup)).map_err(|e| format!("3: {node}: {e}"))?;
        store
            .check_complete()
            .map_err(|e| format!("3: {node}: {e}"))?;
        let tail = store.tail();
        store
            .apply_all(tail)
            .map_err(|e| format!("3: {node}: {e}"))?;
        // A program's ring outlives it, unless the power goes.
        let outlives = node == "a" && !power && !lost;
        look(&store, setup, program, outlives)
            .map_err(|e| format!("{e} (node {node}, tail {tail})"))?;
    }
    Ok(())
}

fn look(store: &Store, setup: &Setup, program: &Program, outlives: bool) -> Result<(), String> {
    let acks = program.acks.load(SeqCst);
    let read = |file, offset, len: usize| -> Result<Vec<u8>, String> {
        let mut b = vec![0; len];
        match store.area().read(file, offset, &mut b) {
            Ok(_) => Ok(b),
            // The file was not made, and no call returned success for it.
            Err(_) if acks == 0 => Ok(b),
            Err(e) => Err(format!("3: {e}")),
        }
    };
    let word = |file, offset| -> Result<u64, String> {
        let b = read(file, offset, 8)?;
        Ok(u64::from_le_bytes(b.try_into().expect("8 bytes")))
    };
    for (t, told) in program.told.iter().enumerate() {
        let at = PART * t as u64;
        let n = word(PARTS, at)?;
        let (acked, begun) = (told.acked.load(SeqCst), told.begun.load(SeqCst));
        if n < acked {
            return Err(format!(
                "2: thread {t}: {acked} was acknowledged, {n} is there"
            ));
        }
        let kept = told.kept.load(SeqCst);
        if outlives && n < kept {
            return Err(format!(
                "6: thread {t}: {kept} was to outlive the program, {n} is there"
            ));
        }
        if n > begun {
            return Err(format!("3: thread {t}: {n} is there, {begun} was begun"));
        }
        let others = [word(PARTS, at + 8)?, word(WORDS, 8 * t as u64)?];
        if others != [n; 2] {
            return Err(format!("3: thread {t}: {n} beside {others:?}"));
        }
        if n > 0 {
            let b = bytes(t, n, setup.log);
            if read(PARTS, at + 16, b.len())? != b {
                return Err(format!("3: thread {t}: bytes of {n}"));
            }
        }
    }
    // The last sync point among those that are there.
    let lsns = program.lsns.lock().expect("no panic");
    let there = |(_, (t, n)): &(&u64, &(usize, u64))| {
        word(PARTS, PART * *t as u64).is_ok_and(|last| *n <= last)
    };
    let last = lsns.iter().rfind(there);
    let has = word(WORDS, SHARED)?;
    let named = ((has >> 32) as usize, has & 0xffff_ffff);
    if let Some((_, (t, n))) = last {
        // A sync point whose call was cut off has no LSN in `lsns`.
        let known = lsns.values().any(|(t, n)| (t + 1, *n) == named);
        if known && named != (t + 1, *n) {
            return Err(format!("4: thread {t}'s {n} came last, {named:?} is there"));
        }
    }
    Ok(())
}

/// The first of `most` seeds at which the defect is caught, and how.
pub fn catch(broken: Broken, first: u64, most: u64) -> Option<(u64, String)> {
    (first..first.saturating_add(most)).find_map(|s| Some((s, run(s, Some(broken)).failure?)))
}
