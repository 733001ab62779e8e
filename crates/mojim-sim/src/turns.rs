//! Real threads of the engine, one at a time, in an order drawn from a seed.
//!
//! Owns the turn: of all threads of a [`Scheduler`] exactly one runs. A thread may lose
//! its turn wherever an interleaving could matter: at each operation on a file or a
//! connection, at each reading of the clock, at each lock, and at each wait. Time moves
//! when a thread reads the clock, or when all threads wait.
//!
//! Invariants:
//! - The same seed and the same threads, begun in the same order, give the same run:
//!   neither the machine's clock nor its scheduler decides anything.
//! - A waiting thread goes on when what it waits for has come, or when its time is over. Now
//!   and then it goes on spuriously, as with futexes and streams.
//! - No lock of the simulated world is held while another thread runs.

use std::io::{self, IoSlice, IoSliceMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use mojim_env::{Address, Conn, Env, File, Memory, OpenHow, Proof};

use crate::disk::SECTOR;
use crate::run::panic_text;
use crate::world::{CrashKind, World};
use crate::{Rng, SimEnv};

/// A run with more turns than this is taken for one that does not end.
const MOST_TURNS: u64 = 400_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Runs,
    /// Waits until this time, or until a condition that the thread checks itself.
    Waits(Duration),
    Ended,
}

struct Inner {
    rng: Rng,
    threads: Vec<State>,
    /// The thread whose turn it is.
    turn: usize,
    turns: u64,
    /// The turn at which this node crashes.
    crash: Option<(u64, &'static str, CrashKind)>,
    /// The run was broken off: every wait ends at once, so that all threads end.
    over: bool,
    failures: Vec<String>,
}

/// Runs the threads of one run, one at a time.
pub struct Scheduler {
    world: Arc<World>,
    inner: Mutex<Inner>,
    /// One condition variable for each thread.
    wake: Vec<Condvar>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Scheduler {
    /// A scheduler for at most `most` threads of `world`, in an order drawn from `rng`.
    pub fn new(world: Arc<World>, rng: Rng, most: usize) -> Arc<Scheduler> {
        Arc::new(Scheduler {
            world,
            inner: Mutex::new(Inner {
                rng,
                threads: Vec::new(),
                turn: usize::MAX,
                turns: 0,
                crash: None,
                over: false,
                failures: Vec::new(),
            }),
            wake: (0..most).map(|_| Condvar::new()).collect(),
            handles: Mutex::default(),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no thread panics with it")
    }

    /// Whether the run was broken off: its threads are to end.
    pub fn is_over(&self) -> bool {
        self.inner().over
    }

    /// Makes a node crash at turn number `turn`.
    pub fn crash_at(&self, turn: u64, node: &'static str, kind: CrashKind) {
        self.inner().crash = Some((turn, node, kind));
    }

    /// Adds a thread; it runs once [`play`](Scheduler::play) is called.
    pub fn thread(self: &Arc<Scheduler>, name: &str, body: impl FnOnce() + Send + 'static) {
        let mut inner = self.inner();
        let me = inner.threads.len();
        assert!(me < self.wake.len(), "more threads than were announced");
        inner.threads.push(State::Runs);
        drop(inner);
        let scheduler = self.clone();
        let text = name.to_owned();
        let work = move || {
            ME.with(|m| m.set(me));
            mojim_env::turns::follow(Arc::new(Me {
                scheduler: scheduler.clone(),
                me,
            }));
            drop(scheduler.until_mine(me, scheduler.inner()));
            let result = catch_unwind(AssertUnwindSafe(body));
            let mut inner = scheduler.inner();
            if let Err(p) = result {
                let why = format!("panic: {text}: {}", panic_text(&*p));
                inner.failures.push(why);
                inner.over = true;
            }
            inner.threads[me] = State::Ended;
            scheduler.pass(me, inner, false);
        };
        let named = std::thread::Builder::new().name(name.into());
        let handle = named.spawn(work).expect("a thread");
        self.handles.lock().expect("as above").push(handle);
    }

    /// Runs all threads to their ends. Returns the number of turns, and the failures of
    /// threads and of the run itself.
    pub fn play(&self) -> (u64, Vec<String>) {
        let mut inner = self.inner();
        inner.turn = 0;
        drop(inner);
        self.wake[0].notify_one();
        let handles = std::mem::take(&mut *self.handles.lock().expect("as above"));
        for h in handles {
            h.join().expect("its panics are caught");
        }
        let mut inner = self.inner();
        (inner.turns, std::mem::take(&mut inner.failures))
    }

    fn until_mine<'a>(&self, me: usize, mut inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        while inner.turn != me {
            inner = self.wake[me].wait(inner).expect("as above");
        }
        inner
    }

    /// Draws the next turn. Returns when it is `me`'s turn again, unless `me` ends.
    fn pass<'a>(
        &'a self,
        me: usize,
        mut inner: MutexGuard<'a, Inner>,
        again: bool,
    ) -> Option<MutexGuard<'a, Inner>> {
        inner.turns += 1;
        let turns = inner.turns;
        if let Some((_, node, kind)) = inner.crash.take_if(|(at, ..)| *at <= turns) {
            match kind {
                CrashKind::Kill => self.world.kill(node),
                CrashKind::Power => self.world.power_loss(node),
            }
        }
        if inner.turns == MOST_TURNS {
            let (now, threads) = (self.world.now(), &inner.threads);
            let why = format!("live: the threads come to no end at {now:?}: {threads:?}");
            inner.failures.push(why);
            inner.over = true;
        }
        let next = self.draw(&mut inner);
        let Some(next) = next else {
            assert!(!again, "who calls this has not ended");
            return None;
        };
        inner.turn = next;
        if next != me {
            self.wake[next].notify_one();
        }
        again.then(|| self.until_mine(me, inner))
    }

    /// Draws the thread that goes on; time moves if all of them wait.
    fn draw(&self, inner: &mut Inner) -> Option<usize> {
        let alive: Vec<usize> = (0..inner.threads.len())
            .filter(|t| inner.threads[*t] != State::Ended)
            .collect();
        if alive.is_empty() {
            return None;
        }
        if inner.over || inner.rng.below(16) == 0 {
            return Some(*inner.rng.pick(&alive));
        }
        let due = |inner: &Inner, now: Duration| -> Vec<usize> {
            let able = |t: &usize| match inner.threads[*t] {
                State::Waits(until) => until <= now,
                state => state == State::Runs,
            };
            alive.iter().copied().filter(able).collect()
        };
        let now = self.world.now();
        let able = due(inner, now);
        if !able.is_empty() {
            return Some(*inner.rng.pick(&able));
        }
        let first = alive.iter().filter_map(|t| match inner.threads[*t] {
            State::Waits(until) => Some(until),
            _ => None,
        });
        let first = first.min().expect("all of them wait");
        let event = self.world.next_event().filter(|at| *at < first);
        let to = event.unwrap_or(first).max(now + Duration::from_nanos(1));
        self.world.advance(to - now);
        // Any of the threads may wait for what arrived.
        let able = match event {
            Some(_) => alive,
            None => due(inner, to),
        };
        Some(*inner.rng.pick(&able))
    }

    /// The calling thread may lose its turn here, one time in `n`.
    fn perhaps(&self, me: usize, n: u64) {
        let mut inner = self.inner();
        if inner.rng.below(n) == 0 {
            drop(self.pass(me, inner, true));
        }
    }

    fn wait(&self, me: usize, ready: &dyn Fn() -> bool, timeout: Duration) -> bool {
        let until = self.world.now() + timeout;
        loop {
            if ready() {
                return true;
            }
            let mut inner = self.inner();
            if inner.over {
                let ends = inner.turns < MOST_TURNS + 50_000;
                // The threads on which this one waits may end first.
                drop(self.pass(me, inner, true));
                // Who waits without a limit for a record that is never made would wait again.
                assert!(ends, "it waits without end");
                return false;
            }
            if self.world.now() >= until {
                return false;
            }
            inner.threads[me] = State::Waits(until);
            let mut inner = self.pass(me, inner, true).expect("it has not ended");
            inner.threads[me] = State::Runs;
            // A spurious wakeup, now and then.
            if inner.rng.below(8) == 0 {
                return true;
            }
        }
    }
}

/// The calling thread, as the engine sees it.
struct Me {
    scheduler: Arc<Scheduler>,
    me: usize,
}

impl mojim_env::turns::Turns for Me {
    fn number(&self) -> usize {
        self.me
    }

    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) -> bool {
        self.scheduler.wait(self.me, ready, timeout)
    }
}

thread_local! {
    static ME: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
}

/// Suspends the calling thread, if it is a scheduler's, until `ready`, or for `timeout`.
pub fn sleep(ready: &dyn Fn() -> bool, timeout: Duration) {
    if let Some(turns) = mojim_env::turns::current() {
        turns.sleep(ready, timeout);
    }
}

/// A node's environment; at each of its operations another thread may get its turn.
pub struct TurnEnv {
    env: Arc<SimEnv>,
    scheduler: Arc<Scheduler>,
    /// Defect: a durable write reaches its file only with the next one.
    late: bool,
}

impl TurnEnv {
    /// Wraps `env`. With `late`, durable writes return before they are done.
    pub fn new(env: Arc<SimEnv>, scheduler: Arc<Scheduler>, late: bool) -> Arc<TurnEnv> {
        Arc::new(TurnEnv {
            env,
            scheduler,
            late,
        })
    }
}

/// A connection at whose operations another thread may get its turn.
pub fn wrap(scheduler: &Arc<Scheduler>, conn: Arc<dyn Conn>) -> Arc<dyn Conn> {
    Arc::new(TurnConn {
        conn,
        scheduler: scheduler.clone(),
    })
}

/// Another thread may get its turn, if the calling thread is one of the scheduler's.
fn perhaps(scheduler: &Scheduler, n: u64) {
    let me = ME.with(|m| m.get());
    if me != usize::MAX {
        scheduler.perhaps(me, n);
    }
}

/// Bytes, aligned as durable writes require.
#[derive(Clone)]
#[repr(align(512))]
struct Sector([u8; SECTOR]);

/// A write that returned but was not done: its sectors, and their offset.
type Late = (Vec<Sector>, u64);

struct TurnFile {
    file: Arc<dyn File>,
    scheduler: Arc<Scheduler>,
    /// `None`: writes are done when they return.
    late: Option<Mutex<Option<Late>>>,
}

impl TurnFile {
    /// Delays a durable write until the next one.
    fn write_late(&self, late: &Mutex<Option<Late>>, buf: &[u8], offset: u64) -> io::Result<()> {
        let chunks = buf.chunks_exact(SECTOR);
        let sectors = chunks
            .map(|c| Sector(c.try_into().expect("a sector")))
            .collect();
        let before = late.lock().expect("no panic").replace((sectors, offset));
        let Some((sectors, mut at)) = before else {
            return Ok(());
        };
        for s in &sectors {
            self.file.write_at(&s.0, at)?;
            at += SECTOR as u64;
        }
        Ok(())
    }
}

impl File for TurnFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        perhaps(&self.scheduler, 4);
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        perhaps(&self.scheduler, 1);
        let done = match &self.late {
            Some(late) => self.write_late(late, buf, offset),
            None => self.file.write_at(buf, offset),
        };
        perhaps(&self.scheduler, 1);
        done
    }

    fn sync(&self) -> io::Result<()> {
        perhaps(&self.scheduler, 2);
        let done = self.file.sync();
        perhaps(&self.scheduler, 2);
        done
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        perhaps(&self.scheduler, 2);
        self.file.set_len(len)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.file.allocate(len)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<std::ops::Range<u64>>> {
        self.file.next_data(offset)
    }
}

struct TurnConn {
    conn: Arc<dyn Conn>,
    scheduler: Arc<Scheduler>,
}

impl Conn for TurnConn {
    fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        perhaps(&self.scheduler, 2);
        self.conn.send(bufs)
    }

    fn recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        perhaps(&self.scheduler, 2);
        self.conn.recv(bufs)
    }

    fn wait(&self, to_send: bool, timeout: Duration) -> io::Result<bool> {
        let ready = || !matches!(self.conn.wait(to_send, Duration::ZERO), Ok(false));
        sleep(&ready, timeout);
        self.conn.wait(to_send, Duration::ZERO)
    }

    fn close(&self) {
        self.conn.close();
    }

    fn peer(&self) -> String {
        self.conn.peer()
    }

    fn proof(&self) -> Proof {
        self.conn.proof()
    }

    fn send_memory(&self, memory: &Memory) -> io::Result<()> {
        self.conn.send_memory(memory)
    }

    fn recv_memory(&self, len: usize, write: bool) -> io::Result<Memory> {
        // Waits as a socket would, and no longer: a machine without power sends nothing
        // (seed 5344).
        let slice = Duration::from_millis(1);
        let end = self.scheduler.world.now() + Duration::from_secs(1);
        let came = std::cell::RefCell::new(None);
        let ready = || {
            let got = self.conn.recv_memory(len, write);
            let more = matches!(&got, Err(e) if e.kind() == io::ErrorKind::WouldBlock);
            *came.borrow_mut() = Some(got);
            !more
        };
        while !ready() && !self.scheduler.is_over() && self.scheduler.world.now() < end {
            sleep(&|| false, slice);
        }
        came.into_inner().expect("it was asked")
    }
}

impl Env for TurnEnv {
    fn now(&self) -> Duration {
        let me = ME.with(|m| m.get());
        if me != usize::MAX {
            self.scheduler.world.advance(Duration::from_nanos(300));
            self.scheduler.perhaps(me, 4);
        }
        self.env.now()
    }

    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        let late = self.late && how.durable;
        Ok(Arc::new(TurnFile {
            file: self.env.open(path, how)?,
            scheduler: self.scheduler.clone(),
            late: late.then(Mutex::default),
        }))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        perhaps(&self.scheduler, 2);
        self.env.remove(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        perhaps(&self.scheduler, 2);
        self.env.rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        perhaps(&self.scheduler, 2);
        self.env.sync_dir(path)
    }

    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        perhaps(&self.scheduler, 2);
        self.env.flush(memory, offset, len);
    }

    fn connect(&self, to: &Address) -> io::Result<Arc<dyn Conn>> {
        Ok(wrap(&self.scheduler, self.env.connect(to)?))
    }

    mojim_env::forward_env!(
        env,
        boot_id,
        random,
        sector,
        create_dir_all,
        file_system,
        list,
        lock,
        locker,
        memory,
        remove_memory,
        anonymous_memory,
        persistent_memory
    );
}
