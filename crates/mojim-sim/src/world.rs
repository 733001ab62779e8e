//! The world: nodes, time, faults and crashes, and each process's view of it.
//!
//! Owns the state that all handles share. Invariants:
//! - A handle belongs to one incarnation of one node's process. After that
//!   incarnation crashed, each of its calls fails with [`is_crash`]'s error and
//!   changes nothing.
//! - Time moves in [`World::advance`] only.
//! - Each fault that happened is counted under its name.

use crate::disk::{Disk, MAX_FILE, eio};
use crate::failures::{Failure, Failures, Only, Takes};
use crate::memory::Region;
use crate::net::Net;
use crate::rng::Rng;
use mojim_env::{Address, Conn, Env, File, Memory, OpenHow};
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The unit of durable writes, in bytes.
pub const SECTOR: usize = 512;

const TRACED: usize = 20_000;
const CRASH: &str = "simulated crash";

/// What goes wrong, and how often. Rates are chances in 1000.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults {
    /// A read fails.
    pub read_error: u32,
    /// A write fails, with any part of it done.
    pub write_error: u32,
    /// A sync fails; what it did not write is never written.
    pub sync_error: u32,
    /// Before a cached write, the kernel writes some of what is dirty.
    pub write_back: u32,
    /// The least time that bytes are on their way.
    pub delay_min: Duration,
    /// The most time that bytes are on their way.
    pub delay_max: Duration,
    /// Bytes take 10 to 1000 times as long.
    pub slow: u32,
    /// A send is split into pieces that arrive apart.
    pub split: u32,
    /// A send takes a part of the bytes.
    pub short_send: u32,
    /// A receive gives a part of what is there.
    pub short_recv: u32,
    /// A send breaks its connection; both ends are reset.
    pub reset: u32,
    /// A send silences its connection, in one direction or both.
    pub half_open: u32,
    /// A connection attempt is refused.
    pub connect_refused: u32,
    /// One bit of a send is another when it arrives, and no checksum of the network's
    /// tells.
    pub rot: u32,
    /// Bytes that a connection holds in each direction.
    pub buffer: usize,
    /// How long bytes survive a partition.
    pub retransmit_limit: Duration,
}

impl Faults {
    /// Nothing goes wrong, and bytes always take 20 µs.
    pub fn none() -> Faults {
        Faults {
            read_error: 0,
            write_error: 0,
            sync_error: 0,
            write_back: 0,
            delay_min: Duration::from_micros(20),
            delay_max: Duration::from_micros(20),
            slow: 0,
            split: 0,
            short_send: 0,
            short_recv: 0,
            reset: 0,
            half_open: 0,
            connect_refused: 0,
            rot: 0,
            buffer: 256 << 10,
            retransmit_limit: Duration::from_secs(15),
        }
    }

    /// Draws a mixture: every kind is absent half of the time, and one world
    /// in eight has none at all.
    pub fn draw(rng: &mut Rng) -> Faults {
        let mut faults = Faults::none();
        if rng.below(8) == 0 {
            return faults;
        }
        let mut rate = |most: u64| match rng.coin() {
            true => 0,
            false => rng.between(1, most) as u32,
        };
        faults.read_error = rate(5);
        faults.write_error = rate(10);
        faults.sync_error = rate(10);
        faults.write_back = rate(100);
        faults.slow = rate(50);
        faults.split = rate(300);
        faults.short_send = rate(100);
        faults.short_recv = rate(300);
        faults.reset = rate(10);
        faults.half_open = rate(5);
        faults.connect_refused = rate(200);
        if rng.coin() {
            faults.delay_min = Duration::from_micros(rng.between(0, 50));
            faults.delay_max = faults.delay_min + Duration::from_micros(rng.between(0, 5000));
        }
        if rng.below(4) == 0 {
            faults.buffer = rng.between(1 << 10, 256 << 10) as usize;
        }
        faults
    }
}

/// How a node's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CrashKind {
    /// The process died. Its machine, with cache and memory, lives.
    Kill,
    /// The machine lost power: only what is durable is left.
    Power,
}

/// Whether an error is that of a call on a crashed process.
pub fn is_crash(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|e| e.to_string() == CRASH)
}

fn crashed() -> io::Error {
    io::Error::other(CRASH)
}

/// Chance, time and the record of both; what disks and the net draw on.
#[derive(Debug)]
pub(crate) struct Ctx {
    pub(crate) now: Duration,
    pub(crate) rng: Rng,
    pub(crate) faults: Faults,
    pub(crate) failures: Failures,
    counts: BTreeMap<&'static str, u64>,
    trace: Option<VecDeque<String>>,
}

impl Ctx {
    /// Counts a fault.
    pub(crate) fn hit(&mut self, name: &'static str) {
        self.add(name, 1);
    }

    /// Counts several.
    pub(crate) fn add(&mut self, name: &'static str, n: u64) {
        if n != 0 {
            *self.counts.entry(name).or_default() += n;
        }
    }

    /// Draws whether a fault happens, and counts it if so.
    pub(crate) fn fault(&mut self, rate: u32, name: &'static str) -> bool {
        let happens = self.rng.per_mille(rate);
        if happens {
            self.hit(name);
            self.trace(|| format!("fault: {name}"));
        }
        happens
    }

    /// The same of a fault of a node's disk, which is one of the run's failures.
    fn failure(&mut self, rate: u32, name: &'static str, node: &Arc<str>) -> bool {
        if !self.rng.per_mille(rate) || !self.failures.draw(node, Takes::Call) {
            return false;
        }
        self.hit(name);
        self.trace(|| format!("fault: {name}"));
        true
    }

    /// Of what is not durable, how many in 1000 survive this crash: none, all,
    /// or a mixture.
    pub(crate) fn keep(&mut self) -> u32 {
        match self.rng.below(3) {
            0 => 0,
            1 => 1000,
            _ => self.rng.between(1, 999) as u32,
        }
    }

    fn trace(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACED {
                trace.pop_front();
            }
            trace.push_back(format!("{:>12?} {}", self.now, text()));
        }
    }
}

struct Node {
    name: Arc<str>,
    disk: Disk,
    memories: BTreeMap<PathBuf, Arc<Region>>,
    boot_id: [u8; 16],
    /// For `Env::random`, so that faults do not change what processes draw.
    rng: Rng,
    /// What dead processes draw from.
    dead_rng: Rng,
    incarnation: u64,
    running: bool,
    powered: bool,
    crash: Option<CrashKind>,
    armed: Option<(u64, CrashKind)>,
    armed_send: Option<(u64, CrashKind)>,
    operations: u64,
    sends: u64,
    locks: BTreeMap<PathBuf, u64>,
    next_lock: u64,
}

struct State {
    ctx: Ctx,
    nodes: Vec<Node>,
    names: BTreeMap<String, usize>,
    net: Net,
}

fn boot_id(rng: &mut Rng) -> [u8; 16] {
    let mut id = [0; 16];
    rng.fill(&mut id);
    id
}

impl State {
    fn node(&mut self, name: &str) -> usize {
        if let Some(n) = self.names.get(name) {
            return *n;
        }
        let n = self.nodes.len();
        self.names.insert(name.to_string(), n);
        self.net.add_node();
        self.nodes.push(Node {
            name: name.into(),
            disk: Disk::default(),
            memories: BTreeMap::new(),
            boot_id: boot_id(&mut self.ctx.rng),
            rng: self.ctx.rng.fork(),
            dead_rng: self.ctx.rng.fork(),
            incarnation: 0,
            running: false,
            powered: true,
            crash: None,
            armed: None,
            armed_send: None,
            operations: 0,
            sends: 0,
            locks: BTreeMap::new(),
            next_lock: 0,
        });
        n
    }

    fn trace(&mut self, n: usize, text: impl FnOnce() -> String) {
        let node = &self.nodes[n];
        self.ctx
            .trace(|| format!("{}#{} {}", node.name, node.incarnation, text()));
    }

    /// Counts an operation; tells whether the node crashes in its middle.
    fn step(&mut self, n: usize, text: impl FnOnce() -> String) -> Option<CrashKind> {
        self.trace(n, text);
        let node = &mut self.nodes[n];
        node.operations += 1;
        due(&mut node.armed)
    }

    fn crash(&mut self, n: usize, kind: CrashKind) {
        self.trace(n, || format!("crash: {kind:?}"));
        let (node, ctx) = (&mut self.nodes[n], &mut self.ctx);
        node.running = false;
        node.crash = Some(kind);
        node.armed = None;
        node.armed_send = None;
        node.locks.clear();
        match kind {
            CrashKind::Kill => {
                ctx.hit("kills");
                // The dead process's threads may still store: into the old
                // memory, which nobody else maps by name.
                for region in node.memories.values_mut() {
                    if Arc::strong_count(region) > 1 {
                        *region = region.copy();
                    }
                }
                node.disk.kill();
                self.net.kill(n, ctx);
            }
            CrashKind::Power => {
                ctx.hit("power losses");
                node.powered = false;
                node.memories.clear();
                node.disk.power_loss(ctx);
                node.boot_id = boot_id(&mut ctx.rng);
                self.net.power_loss(n, ctx);
            }
        }
    }

    /// A change that a crash either precedes or follows.
    fn change<T>(
        &mut self,
        n: usize,
        text: impl FnOnce() -> String,
        change: impl FnOnce(&mut Disk, &mut Ctx, &Arc<str>) -> io::Result<T>,
    ) -> io::Result<T> {
        if let Some(kind) = self.step(n, text) {
            if self.ctx.rng.coin() {
                let node = &mut self.nodes[n];
                let _ = change(&mut node.disk, &mut self.ctx, &node.name);
            }
            self.crash(n, kind);
            return Err(crashed());
        }
        let node = &mut self.nodes[n];
        change(&mut node.disk, &mut self.ctx, &node.name)
    }
}

fn due(armed: &mut Option<(u64, CrashKind)>) -> Option<CrashKind> {
    let (left, kind) = armed.as_mut()?;
    *left = left.saturating_sub(1);
    let kind = *kind;
    (*left == 0).then(|| {
        *armed = None;
        kind
    })
}

#[derive(Clone)]
struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of the engine in a test must not hide behind a second one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A simulated world; clones are handles of the same one.
#[derive(Clone)]
pub struct World {
    shared: Shared,
}

impl World {
    /// A world without nodes, at time zero.
    pub fn new(seed: u64, faults: Faults) -> World {
        World {
            shared: Shared(Arc::new(Mutex::new(State {
                ctx: Ctx {
                    now: Duration::ZERO,
                    rng: Rng::new(seed),
                    faults,
                    failures: Failures::default(),
                    counts: BTreeMap::new(),
                    trace: None,
                },
                nodes: Vec::new(),
                names: BTreeMap::new(),
                net: Net::default(),
            }))),
        }
    }

    /// The surroundings of the node's process: of the running one, or, where
    /// none runs, of a new one, on a machine that is switched on if need be.
    /// The node is made if there is none of that name.
    pub fn env(&self, node: &str) -> Arc<SimEnv> {
        let mut state = self.shared.lock();
        let n = state.node(node);
        let st = &mut *state;
        if !st.nodes[n].running {
            let node = &mut st.nodes[n];
            node.incarnation += 1;
            node.running = true;
            node.powered = true;
            node.crash = None;
            st.net.restart(n, &mut st.ctx);
            st.trace(n, || "starts".to_string());
        }
        Arc::new(SimEnv {
            place: Place {
                shared: self.shared.clone(),
                node: n,
                incarnation: st.nodes[n].incarnation,
            },
            boot_id: st.nodes[n].boot_id,
        })
    }

    /// The time.
    pub fn now(&self) -> Duration {
        self.shared.lock().ctx.now
    }

    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        let st = &mut *self.shared.lock();
        st.ctx.now += by;
        st.net.run(&mut st.ctx);
    }

    /// When the next bytes, ends or connections arrive somewhere, if any are
    /// on their way.
    pub fn next_event(&self) -> Option<Duration> {
        let st = &*self.shared.lock();
        st.net.next_event(st.ctx.now)
    }

    /// The faults in force.
    pub fn faults(&self) -> Faults {
        self.shared.lock().ctx.faults.clone()
    }

    /// Changes them from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.shared.lock().ctx.faults = faults;
    }

    /// A generator for the test's own choices, independent of the world's.
    pub fn fork_rng(&self) -> Rng {
        self.shared.lock().ctx.rng.fork()
    }

    /// Crashes the node in the middle of its `after`-th operation from now (1
    /// is the next). Operations are those that change its disk: writes, syncs,
    /// changes of length or names, reservations, and flushes of persistent
    /// memory. It may be armed before the process starts.
    pub fn arm_crash(&self, node: &str, after: u64, kind: CrashKind) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].armed = Some((after.max(1), kind));
    }

    /// Crashes the node in its `after`-th send from now: none, some or all of
    /// the bytes are sent.
    pub fn arm_crash_on_send(&self, node: &str, after: u64, kind: CrashKind) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].armed_send = Some((after.max(1), kind));
    }

    /// Takes an armed crash back.
    pub fn disarm(&self, node: &str) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].armed = None;
        st.nodes[n].armed_send = None;
    }

    /// How many operations and sends the node has done.
    pub fn operations(&self, node: &str) -> (u64, u64) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        (st.nodes[n].operations, st.nodes[n].sends)
    }

    /// How the node's last process ended, until the next one starts.
    pub fn crashed(&self, node: &str) -> Option<CrashKind> {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].crash
    }

    /// The node's process dies now, if one runs.
    pub fn kill(&self, node: &str) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        if st.nodes[n].running {
            st.crash(n, CrashKind::Kill);
        }
    }

    /// The node loses power now, unless it has none.
    pub fn power_loss(&self, node: &str) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        if st.nodes[n].powered {
            st.crash(n, CrashKind::Power);
        }
    }

    /// Blocks the network from `a` to `b`, and back unless `oneway`; or, with
    /// `on` false, lets it pass again.
    pub fn partition(&self, a: &str, b: &str, oneway: bool, on: bool) {
        let st = &mut *self.shared.lock();
        let (a, b) = (st.node(a), st.node(b));
        st.trace(a, || format!("partition to {b}, oneway {oneway}: {on}"));
        st.net.partition(a, b, on, &mut st.ctx);
        if !oneway {
            st.net.partition(b, a, on, &mut st.ctx);
        }
    }

    /// Whether nothing gets from one node to the other, or nothing back.
    pub fn is_partitioned(&self, a: &str, b: &str) -> bool {
        let st = &mut *self.shared.lock();
        let (a, b) = (st.node(a), st.node(b));
        st.net.is_partitioned(a, b) || st.net.is_partitioned(b, a)
    }

    /// Resets every connection between two nodes.
    pub fn reset_connections(&self, a: &str, b: &str) {
        let st = &mut *self.shared.lock();
        let (a, b) = (st.node(a), st.node(b));
        st.net.reset(a, b, &mut st.ctx);
    }

    /// Listens for TCP, as the node's running process.
    pub fn listen(&self, node: &str, at: SocketAddr) -> io::Result<SimListener> {
        self.listen_at(node, &Address::Tcp(at))
    }

    /// Listens at any address; Unix paths are the same on all nodes.
    pub fn listen_at(&self, node: &str, at: &Address) -> io::Result<SimListener> {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        if !st.nodes[n].running {
            return Err(crashed());
        }
        Ok(SimListener {
            place: Place {
                shared: self.shared.clone(),
                node: n,
                incarnation: st.nodes[n].incarnation,
            },
            at: at.clone(),
            id: st.net.listen(n, at)?,
        })
    }

    /// Limits the bytes that the node's files may take.
    pub fn set_quota(&self, node: &str, quota: Option<u64>) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.set_quota(quota);
    }

    /// Leaves the node's files so many more pages than they take now.
    pub fn fill(&self, node: &str, pages: u64) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        let disk = &mut st.nodes[n].disk;
        disk.set_quota(Some((disk.used() + pages) * crate::memory::PAGE as u64));
    }

    /// Flips a bit of a file, in the cache and on the medium; `bit` counts
    /// from the file's start. False if there is no such byte.
    pub fn flip_bit(&self, node: &str, path: &Path, bit: u64) -> bool {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        let flip = |b: &mut u8| *b ^= 1 << (bit % 8);
        let done = st.nodes[n].disk.corrupt(path, bit / 8, flip);
        st.ctx.add("flipped bits", u64::from(done));
        st.trace(n, || format!("flip bit {bit} of {}", path.display()));
        done
    }

    /// Lets the next durable write to a file go to offset `to` of it, and
    /// succeed. False if there is no such file.
    pub fn misdirect_next_write(&self, node: &str, path: &Path, to: u64) -> bool {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.misdirect(path, to)
    }

    /// Whether a node's memory of this name is there.
    pub fn has_memory(&self, node: &str, path: &Path) -> bool {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].memories.contains_key(path)
    }

    /// A file as a process would read it; of a crashed node, what is left.
    pub fn contents(&self, node: &str, path: &Path) -> Option<Vec<u8>> {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.contents(path)
    }

    /// The names of all files of a node.
    pub fn files(&self, node: &str) -> Vec<PathBuf> {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.files()
    }

    /// How often each fault has happened.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.shared.lock().ctx.counts.clone()
    }

    /// Lets only these of the failures happen that are drawn from now on.
    pub fn only_failures(&self, only: Only) {
        self.shared.lock().ctx.failures.only(only);
    }

    /// A failure of a node was drawn: whether it happens.
    pub fn fails(&self, node: &str, takes: Takes) -> bool {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        st.ctx.failures.draw(&st.nodes[n].name, takes)
    }

    /// The failures that happened.
    pub fn failures(&self) -> Vec<Failure> {
        self.shared.lock().ctx.failures.happened()
    }

    /// Begins to record what happens: the latest 20,000 events.
    pub fn trace_on(&self) {
        self.shared
            .lock()
            .ctx
            .trace
            .get_or_insert_with(VecDeque::new);
    }

    /// Adds a line of the test's own to the record.
    pub fn note(&self, text: impl FnOnce() -> String) {
        self.shared.lock().ctx.trace(text);
    }

    /// The record, oldest first.
    pub fn trace(&self) -> Vec<String> {
        let st = self.shared.lock();
        st.ctx.trace.iter().flatten().cloned().collect()
    }
}

/// Whose handle something is.
#[derive(Clone)]
struct Place {
    shared: Shared,
    node: usize,
    incarnation: u64,
}

impl Place {
    fn enter(&self) -> io::Result<MutexGuard<'_, State>> {
        let st = self.shared.lock();
        let node = &st.nodes[self.node];
        if node.running && node.incarnation == self.incarnation {
            Ok(st)
        } else {
            Err(crashed())
        }
    }
}

/// The surroundings of one process: of one incarnation of a node.
#[derive(Clone)]
pub struct SimEnv {
    place: Place,
    boot_id: [u8; 16],
}

impl SimEnv {
    /// The node's name.
    pub fn node(&self) -> String {
        let st = self.place.shared.lock();
        st.nodes[self.place.node].name.to_string()
    }

    /// Whether the process still runs.
    pub fn alive(&self) -> bool {
        self.place.enter().is_ok()
    }
}

impl Env for SimEnv {
    fn now(&self) -> Duration {
        self.place.shared.lock().ctx.now
    }

    fn boot_id(&self) -> [u8; 16] {
        self.boot_id
    }

    fn random(&self) -> u64 {
        let mut st = self.place.shared.lock();
        let node = &mut st.nodes[self.place.node];
        let alive = node.running && node.incarnation == self.place.incarnation;
        let rng = match alive {
            true => &mut node.rng,
            false => &mut node.dead_rng,
        };
        loop {
            match rng.next_u64() {
                0 => {}
                n => return n,
            }
        }
    }

    fn sector(&self, _path: &Path) -> io::Result<usize> {
        self.place.enter().map(|_| SECTOR)
    }

    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        let mut st = self.place.enter()?;
        let n = self.place.node;
        let exists = st.nodes[n].disk.exists(path);
        let ino = if how.create && !exists {
            st.change(
                n,
                || format!("create {}", path.display()),
                |disk, _, _| disk.open(path, true),
            )?
        } else {
            st.nodes[n].disk.open(path, false)?
        };
        Ok(Arc::new(SimFile {
            place: self.place.clone(),
            path: path.to_path_buf(),
            ino,
            how,
        }))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("mkdir {}", path.display()),
            |disk, _, _| disk.create_dir_all(path),
        )
    }

    fn remove_empty_dirs(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("remove directories {}", path.display()),
            |disk, _, _| disk.remove_empty_dirs(path),
        )
    }

    fn max_file_size(&self, _dir: &Path) -> io::Result<u64> {
        self.place.enter().map(|_| MAX_FILE)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("remove {}", path.display()),
            |disk, _, _| disk.remove(path),
        )
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("rename {} to {}", from.display(), to.display()),
            |disk, _, _| disk.rename(from, to),
        )
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("sync directory {}", path.display()),
            |disk, ctx, node| {
                if ctx.failure(ctx.faults.sync_error, "sync errors", node) {
                    return Err(eio());
                }
                disk.sync_dir(path)
            },
        )
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.place.enter()?.nodes[self.place.node].disk.list(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn Any + Send + Sync>> {
        let mut st = self.place.enter()?;
        let node = &mut st.nodes[self.place.node];
        if node.locks.contains_key(path) {
            let text = format!(
                "{} is locked by {}, process {}",
                path.display(),
                node.name,
                node.incarnation
            );
            return Err(io::Error::new(ErrorKind::WouldBlock, text));
        }
        node.next_lock += 1;
        node.locks.insert(path.to_path_buf(), node.next_lock);
        Ok(Box::new(SimLock {
            place: self.place.clone(),
            path: path.to_path_buf(),
        }))
    }

    fn memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        let mut st = self.place.enter()?;
        let memories = &mut st.nodes[self.place.node].memories;
        match memories.get(path) {
            Some(region) if region.len() == len => Ok(region.memory()),
            _ => {
                let region = Region::new(len);
                memories.insert(path.to_path_buf(), region.clone());
                Ok(region.memory())
            }
        }
    }

    fn remove_memory(&self, path: &Path) -> io::Result<()> {
        let mut st = self.place.enter()?;
        match st.nodes[self.place.node].memories.remove(path) {
            Some(_) => Ok(()),
            None => Err(ErrorKind::NotFound.into()),
        }
    }

    fn anonymous_memory(&self, len: usize) -> io::Result<Memory> {
        self.place.enter().map(|_| Region::new(len).memory())
    }

    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        self.place.enter()?.change(
            self.place.node,
            || format!("pmem {} of {len}", path.display()),
            |disk, ctx, _| {
                let pmem = disk.pmem(path, len);
                if let Err(error) = &pmem
                    && error.kind() == ErrorKind::StorageFull
                {
                    ctx.hit("no space");
                }
                pmem.map(|p| p.region.memory())
            },
        )
    }

    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        assert!(
            offset <= memory.len() && len <= memory.len() - offset,
            "flush of {offset}+{len} in {} bytes",
            memory.len()
        );
        let Ok(mut st) = self.place.enter() else {
            return;
        };
        let n = self.place.node;
        let crash = st.step(n, || format!("flush {offset}+{len}"));
        let st = &mut *st;
        if let Some((pmem, at)) = st.nodes[n].disk.pmem_at(memory.ptr()) {
            match crash {
                None => pmem.flush(at + offset, len),
                Some(_) => {
                    st.ctx.hit("torn flushes");
                    pmem.flush_torn(at + offset, len, &mut st.ctx.rng);
                }
            }
        }
        if let Some(kind) = crash {
            st.crash(n, kind);
        }
    }

    fn connect(&self, to: &Address) -> io::Result<Arc<dyn Conn>> {
        let st = &mut *self.place.enter()?;
        st.trace(self.place.node, || format!("connect to {to}"));
        let id = st.net.connect(self.place.node, to, &mut st.ctx);
        Ok(Arc::new(SimConn {
            place: self.place.clone(),
            id,
            end: 0,
            peer: to.to_string(),
        }))
    }
}

struct SimLock {
    place: Place,
    path: PathBuf,
}

impl Drop for SimLock {
    fn drop(&mut self) {
        // After a crash the lock may be the next process's.
        if let Ok(mut st) = self.place.enter() {
            st.nodes[self.place.node].locks.remove(&self.path);
        }
    }
}

/// One handle on a file.
struct SimFile {
    place: Place,
    path: PathBuf,
    ino: u64,
    how: OpenHow,
}

impl SimFile {
    fn aligned(&self, buf: *const u8, len: usize, offset: u64) -> bool {
        !self.how.durable
            || ((buf as usize).is_multiple_of(SECTOR)
                && len.is_multiple_of(SECTOR)
                && offset.is_multiple_of(SECTOR as u64))
    }

    fn text(&self, what: &str, offset: u64, len: u64) -> String {
        let durable = if self.how.durable { " durable" } else { "" };
        format!("{what} {} {offset}+{len}{durable}", self.path.display())
    }

    fn writable(&self) -> io::Result<()> {
        match self.how.write {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(9)),
        }
    }
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let st = &mut *self.place.enter()?;
        if !self.aligned(buf.as_ptr(), buf.len(), offset) {
            return Err(io::Error::from_raw_os_error(22));
        }
        let (node, ctx) = (&mut st.nodes[self.place.node], &mut st.ctx);
        if ctx.failure(ctx.faults.read_error, "read errors", &node.name) {
            return Err(eio());
        }
        Ok(node.disk.read(self.ino, buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        assert!(
            self.aligned(buf.as_ptr(), buf.len(), offset),
            "durable write to {} of {:p}, {offset}+{}: not whole sectors",
            self.path.display(),
            buf.as_ptr(),
            buf.len()
        );
        let st = &mut *self.place.enter()?;
        self.writable()?;
        let (n, durable) = (self.place.node, self.how.durable);
        let crash = st.step(n, || self.text("write", offset, buf.len() as u64));
        let (node, ctx) = (&mut st.nodes[n], &mut st.ctx);
        let disk = &mut node.disk;
        if let Some(kind) = crash {
            let power = kind == CrashKind::Power;
            disk.write_torn(self.ino, buf, offset, durable, power, ctx);
            st.crash(n, kind);
            return Err(crashed());
        }
        if ctx.failure(ctx.faults.write_error, "write errors", &node.name) {
            disk.write_torn(self.ino, buf, offset, durable, true, ctx);
            return Err(eio());
        }
        disk.write(self.ino, buf, offset, durable, ctx)
    }

    fn sync(&self) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("sync {}", self.path.display()),
            |disk, ctx, node| {
                if ctx.failure(ctx.faults.sync_error, "sync errors", node) {
                    disk.sync_failed(self.ino, &mut ctx.rng);
                    return Err(eio());
                }
                disk.sync(self.ino);
                Ok(())
            },
        )
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut st = self.place.enter()?;
        self.writable()?;
        st.change(
            self.place.node,
            || self.text("set length", 0, len),
            |disk, ctx, _| no_space(disk.set_len(self.ino, len), ctx),
        )
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.place.enter()?.nodes[self.place.node]
            .disk
            .len(self.ino))
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let mut st = self.place.enter()?;
        self.writable()?;
        st.change(
            self.place.node,
            || self.text("allocate", 0, len),
            |disk, ctx, _| no_space(disk.allocate(self.ino, len), ctx),
        )
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let mut st = self.place.enter()?;
        Ok(st.nodes[self.place.node].disk.next_data(self.ino, offset))
    }
}

fn no_space(result: io::Result<()>, ctx: &mut Ctx) -> io::Result<()> {
    if let Err(error) = &result
        && error.kind() == ErrorKind::StorageFull
    {
        ctx.hit("no space");
    }
    result
}

impl Drop for SimFile {
    fn drop(&mut self) {
        if let Ok(mut st) = self.place.enter() {
            st.nodes[self.place.node].disk.close(self.ino);
        }
    }
}

/// Where connections arrive.
pub struct SimListener {
    place: Place,
    at: Address,
    id: u64,
}

impl SimListener {
    /// The next connection that has arrived, if there is one.
    pub fn accept(&self) -> io::Result<Option<Arc<dyn Conn>>> {
        let st = &mut *self.place.enter()?;
        let Some(id) = st.net.accept(&self.at, self.id)? else {
            return Ok(None);
        };
        Ok(Some(Arc::new(SimConn {
            place: self.place.clone(),
            id,
            end: 1,
            peer: format!("a caller of {}", self.at),
        })))
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        if let Ok(mut st) = self.place.enter() {
            let st = &mut *st;
            st.net.unlisten(&self.at, self.id, &mut st.ctx);
        }
    }
}

/// One end of a connection.
pub struct SimConn {
    place: Place,
    id: u64,
    end: usize,
    peer: String,
}

impl Conn for SimConn {
    fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let st = &mut *self.place.enter()?;
        let n = self.place.node;
        let node = &mut st.nodes[n];
        node.sends += 1;
        if let Some(kind) = due(&mut node.armed_send) {
            let all: usize = bufs.iter().map(|b| b.len()).sum();
            let some = match st.ctx.rng.below(3) {
                0 => 0,
                1 => all,
                _ => st.ctx.rng.between(0, all as u64) as usize,
            };
            let bytes: Vec<u8> = bufs.iter().flat_map(|b| b.iter().copied()).collect();
            let part = [IoSlice::new(&bytes[..some])];
            let _ = st.net.send(self.id, self.end, &part, &mut st.ctx);
            st.ctx.hit("crashes in send");
            st.crash(n, kind);
            return Err(crashed());
        }
        let sent = st.net.send(self.id, self.end, bufs, &mut st.ctx);
        st.trace(n, || format!("send on {}: {sent:?}", self.id));
        sent
    }

    fn recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let st = &mut *self.place.enter()?;
        let got = st.net.recv(self.id, self.end, bufs, &mut st.ctx);
        if !matches!(&got, Err(e) if e.kind() == ErrorKind::WouldBlock) {
            st.trace(self.place.node, || {
                format!("receive on {}: {got:?}", self.id)
            });
        }
        got
    }

    /// Never blocks: tells whether it would return at once.
    fn wait(&self, to_send: bool, _timeout: Duration) -> io::Result<bool> {
        let st = &mut *self.place.enter()?;
        st.net.ready(self.id, self.end, to_send, &mut st.ctx)
    }

    fn close(&self) {
        if let Ok(mut st) = self.place.enter() {
            let st = &mut *st;
            st.trace(self.place.node, || format!("close {}", self.id));
            st.net.close(self.id, self.end, &mut st.ctx);
        }
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn send_memory(&self, memory: &Memory) -> io::Result<()> {
        let st = &mut *self.place.enter()?;
        st.net.send_memory(self.id, self.end, memory, &mut st.ctx)
    }

    fn recv_memory(&self, len: usize, _write: bool) -> io::Result<Memory> {
        let st = &mut *self.place.enter()?;
        st.net.recv_memory(self.id, self.end, len, st.ctx.now)
    }
}

impl Drop for SimConn {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::tests::{CACHED, DURABLE, Sectors};

    /// Reads and writes the memory's bytes.
    fn store(memory: &Memory, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= memory.len());
        // SAFETY: in range, and only this thread uses the memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.ptr().add(at), bytes.len()) };
    }

    fn load(memory: &Memory) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(memory.ptr(), memory.len()).to_vec() }
    }

    /// One long random script over all of the world; what it saw, in one string.
    fn script(seed: u64) -> String {
        let mut rng = Rng::new(seed);
        let world = World::new(seed, Faults::draw(&mut rng));
        world.trace_on();
        let at: SocketAddr = "10.0.0.1:7".parse().unwrap();
        let to = Address::Tcp(at);
        let mut seen = String::new();
        let names = ["a", "b"];
        let mut envs = names.map(|n| world.env(n));
        let mut listener = world.listen("a", at).unwrap();
        let mut conns: Vec<Arc<dyn Conn>> = Vec::new();
        let data = Sectors::new(8, 0xab);
        let mut buf = vec![0; 10_000];
        for _ in 0..400 {
            let n = rng.below(2) as usize;
            let env = envs[n].clone();
            let path = PathBuf::from(format!("/d/{}", rng.below(3)));
            let result: io::Result<usize> = (|| {
                env.create_dir_all(Path::new("/d"))?;
                match rng.below(12) {
                    0 => env
                        .open(&path, DURABLE)?
                        .write_at(&data, 512 * rng.below(9))?,
                    1 => env
                        .open(&path, CACHED)?
                        .write_at(&[7; 3000], rng.below(9999))?,
                    2 => env.open(&path, CACHED)?.sync()?,
                    3 => env.open(&path, CACHED)?.set_len(rng.below(20_000))?,
                    4 => env.rename(&path, Path::new("/d/0"))?,
                    5 => env.remove(&path)?,
                    6 => env.sync_dir(Path::new("/d"))?,
                    7 => {
                        let memory = env.persistent_memory(Path::new("/d/pm"), 8192)?;
                        store(
                            &memory,
                            rng.below(8000) as usize,
                            &[rng.below(256) as u8; 90],
                        );
                        env.flush(&memory, rng.below(4096) as usize, 4096);
                    }
                    8 => conns.push(env.connect(&to)?),
                    9 => conns.extend(listener.accept()?),
                    10 if !conns.is_empty() => {
                        return rng.pick(&conns).send(&[IoSlice::new(&buf)]);
                    }
                    11 if !conns.is_empty() => {
                        return rng.pick(&conns).recv(&mut [IoSliceMut::new(&mut buf)]);
                    }
                    _ => {}
                }
                Ok(0)
            })();
            seen += &format!("{result:?} {}\n", env.random());
            match rng.below(60) {
                0 => world.kill(names[n]),
                1 => world.power_loss(names[n]),
                2 => world.arm_crash(names[n], rng.below(5), CrashKind::Power),
                3 => world.partition("a", "b", rng.coin(), true),
                4 => world.partition("a", "b", false, false),
                _ => {}
            }
            if world.crashed(names[n]).is_some() {
                envs[n] = world.env(names[n]);
                if n == 0 {
                    listener = world.listen("a", at).unwrap();
                }
            }
            world.advance(Duration::from_micros(rng.below(5000)));
        }
        for n in names {
            for path in world.files(n) {
                seen += &format!("{path:?} {:?}\n", world.contents(n, &path));
            }
        }
        seen + &format!("{:?}\n{:?}", world.counts(), world.trace())
    }

    #[test]
    fn a_seed_fixes_the_run() {
        for seed in 0..20 {
            assert_eq!(script(seed), script(seed), "seed {seed}");
        }
        assert_ne!(script(1), script(2));
    }

    #[test]
    fn every_kind_of_fault_can_be_drawn_and_so_can_none() {
        let mut rng = Rng::new(3);
        let drawn: Vec<Faults> = (0..200).map(|_| Faults::draw(&mut rng)).collect();
        assert!(drawn.contains(&Faults::none()));
        let reached = |f: &dyn Fn(&Faults) -> u32| drawn.iter().any(|d| f(d) > 0);
        assert!(reached(&|f| f.sync_error) && reached(&|f| f.half_open) && reached(&|f| f.reset));
    }

    #[test]
    fn a_kill_keeps_memory_and_power_takes_it() {
        let world = World::new(1, Faults::none());
        let (shm, cached) = (Path::new("/dev/shm/ring"), Path::new("/file"));
        let old = world.env("a");
        let memory = old.memory(shm, 5000).unwrap();
        store(&memory, 4990, b"kept");
        let file = old.open(cached, CACHED).unwrap();
        file.write_at(b"cached", 0).unwrap();
        world.kill("a");
        assert_eq!(world.crashed("a"), Some(CrashKind::Kill));
        // The dead process stores on; nobody sees it.
        store(&memory, 0, b"late");
        assert!(is_crash(&file.write_at(b"late", 0).unwrap_err()));
        assert!(is_crash(&old.memory(shm, 5000).err().unwrap()));

        let new = world.env("a");
        assert_eq!(world.crashed("a"), None);
        assert_eq!(new.boot_id(), old.boot_id());
        assert!(!old.alive() && new.alive());
        let memory = new.memory(shm, 5000).unwrap();
        assert_eq!(&load(&memory)[4990..4994], b"kept");
        assert_eq!(&load(&memory)[..4], [0; 4]);
        assert_eq!(world.contents("a", cached).unwrap(), b"cached");

        world.power_loss("a");
        let new = world.env("a");
        assert_ne!(new.boot_id(), old.boot_id());
        assert!(
            load(&new.memory(shm, 5000).unwrap())
                .iter()
                .all(|b| *b == 0)
        );
        // Of another length, it is made anew.
        store(&new.memory(shm, 5000).unwrap(), 0, b"x");
        assert_eq!(load(&new.memory(shm, 10).unwrap()), [0; 10]);
    }

    #[test]
    fn flushed_words_stay_and_others_may_go_eight_bytes_at_a_time() {
        let path = Path::new("/pm/log");
        let (mut all, mut none, mut some) = (0, 0, 0);
        for seed in 0..60 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            env.create_dir_all(Path::new("/pm")).unwrap();
            let memory = env.persistent_memory(path, 8192).unwrap();
            env.sync_dir(Path::new("/pm")).unwrap();
            store(&memory, 0, &[1; 4096]);
            env.flush(&memory, 0, 4096);
            store(&memory, 4096, &[2; 4096]);
            store(&memory, 0, &[3; 64]);
            world.power_loss("a");
            store(&memory, 100, b"stored by the dead");
            let left = load(&world.env("a").persistent_memory(path, 8192).unwrap());
            assert!(left[64..4096].iter().all(|b| *b == 1));
            let words = left[4096..].chunks(8);
            assert!(words.clone().all(|w| w == [2; 8] || w == [0; 8]));
            assert!(left[..64].chunks(8).all(|w| w == [1; 8] || w == [3; 8]));
            match words.filter(|w| *w == [2; 8]).count() {
                0 => none += 1,
                512 => all += 1,
                _ => some += 1,
            }
        }
        assert!(all > 0 && none > 0 && some > 0);
    }

    #[test]
    fn persistent_memory_survives_a_kill_whole_and_a_torn_flush_in_lines() {
        let path = Path::new("/pm");
        let mut torn = false;
        for seed in 0..40 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            let memory = env.persistent_memory(path, 4096).unwrap();
            env.sync_dir(Path::new("/")).unwrap();
            store(&memory, 0, &[5; 4096]);
            world.kill("a");
            store(&memory, 0, &[6; 4096]);
            let env = world.env("a");
            let memory = env.persistent_memory(path, 4096).unwrap();
            assert_eq!(load(&memory), [5; 4096]);
            world.arm_crash("a", 1, CrashKind::Power);
            env.flush(&memory, 0, 4096);
            assert_eq!(world.crashed("a"), Some(CrashKind::Power));
            let left = load(&world.env("a").persistent_memory(path, 4096).unwrap());
            torn |= left.contains(&5) && left.contains(&0);
        }
        assert!(torn);
    }

    #[test]
    fn a_lock_ends_with_its_value_or_its_process() {
        let world = World::new(1, Faults::none());
        let path = Path::new("/lock");
        let env = world.env("a");
        let lock = env.lock(path).unwrap();
        let error = env.lock(path).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert!(error.to_string().contains("locked by a"));
        world.env("b").lock(path).unwrap();
        drop(lock);
        let lock = env.lock(path).unwrap();
        world.kill("a");
        let env = world.env("a");
        let new = env.lock(path).unwrap();
        // The dead process's value is not the new one's.
        drop(lock);
        assert!(env.lock(path).is_err());
        drop(new);
        env.lock(path).unwrap();
    }

    #[test]
    fn a_crash_comes_at_the_operation_it_was_armed_for() {
        let world = World::new(1, Faults::none());
        world.arm_crash("a", 3, CrashKind::Kill);
        let env = world.env("a");
        let file = env.open(Path::new("/f"), CACHED).unwrap();
        file.write_at(b"1", 0).unwrap();
        assert!(is_crash(&file.sync().unwrap_err()));
        assert_eq!(world.crashed("a"), Some(CrashKind::Kill));
        assert_eq!(world.operations("a").0, 3);
        assert!(is_crash(&file.len().unwrap_err()));
        assert!(is_crash(&env.list(Path::new("/")).unwrap_err()));
        assert!(is_crash(&env.sector(Path::new("/")).unwrap_err()));
        world.env("a").list(Path::new("/")).unwrap();
    }

    #[test]
    fn random_is_never_zero_and_differs_between_nodes() {
        let world = World::new(1, Faults::none());
        let (a, b) = (world.env("a"), world.env("b"));
        assert!((0..1000).all(|_| a.random() != 0));
        assert_ne!(a.random(), b.random());
        assert_eq!(a.node(), "a");
    }

    #[test]
    fn a_trace_tells_what_happened() {
        let world = World::new(1, Faults::none());
        world.trace_on();
        let env = world.env("a");
        env.open(Path::new("/f"), CACHED).unwrap();
        world.note(|| "here".to_string());
        let trace = world.trace().join("\n");
        assert!(
            trace.contains("a#1 create /f") && trace.contains("here"),
            "{trace}"
        );
    }
}
