//! The node daemon: listens, follows primaries, answers requests.
//!
//! Owns the threads of a node:
//!
//! - one for each socket that accepts,
//! - one for each link,
//! - one for each mirrored volume that checkpoints,
//! - one for each backup that it forwards to,
//! - one that makes the rings of dead programs persistent,
//! - up to two for each volume: `heal` brings its mirror up to date, `watch` decides when its
//!   primary is gone.
//!
//! `mojim_replica` has the threads' work on links. This file only drives it and blocks. `requests`
//! answers requests, `readers` those of readers.
//!
//! Invariants:
//!
//! - In a cluster with keys, a peer that connects over TCP first proves its name
//!   (`mojim_linux::Door`). Only then has it a thread and a link, and it can speak under no other
//!   name.
//! - A new link has `FIRST_WORD` to say something valid, of at most 4 KiB.
//! - There are at most `MAX_LINKS` links.
//! - A volume's copy is open here only while this node follows, a request needs it, or the `rings`
//!   or `heal` thread works on it. A primary on this node takes it over by its lock.
//! - Each log line names its node, and its volume if it is about one. The node's threads have the
//!   `tracing` subscriber of the thread that started them.
//!
//! # What becomes of sync points at an unclean end
//!
//! - **The program dies.** Nobody takes over while its daemon answers, also with a register. The
//!   daemon makes its ring persistent (`left.rs`). The next attach, or a heal, commits every whole
//!   sync point of the prefix, acknowledged or not (`Primary::begin`). A heal comes where the
//!   mirror is behind, or copies are compared.
//! - **The node dies.** With a register the mirror takes over (`watch.rs`). It suspects a primary
//!   of which neither session nor daemon is heard for `failure_limit` and two heartbeats. So a
//!   program that died alone is not replaced. Without a register a person runs `mojim promote`.
//! - **The node comes back after its power went.** Its ring is lost (`store/open.rs` of
//!   `mojim-store`). The attach takes the mirror's copy where that goes further. It is refused where
//!   acknowledged sync points may be missing (`loss` in `pairing.rs` of `mojim-protocol`). With a
//!   register it is no member any more, and the mirror takes over.
//!
//! # Tour
//!
//! `serve` here reads a link's first frame, which says what the link is for. A primary that the
//! register does not name is refused here (`may_greet`). `volume_state.rs` is what a node has of
//! one volume, with its locks. `serve_lane` and `checkpoint_loop` here step a mirror's lanes and
//! checkpoints. `conditions.rs` has the events that last. `promote.rs` answers `mojim promote`.
//! `readers.rs` answers pages and records as of one LSN. `contents.rs` answers sums for
//! `mojim verify`. `unmanaged_files.rs` finds files that are in no catalogue. `speaks_as` asks for
//! the proof of a name on links, `requests.rs` on requests. There is a register for volumes with
//! `failover = "automatic"` (`register` here). The daemon imports the engine, to heal a copy as a
//! program would. The command `mojim` hands it the register (`node.rs` of `mojim-cli`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_format::certificate::Subject;
use mojim_format::message::{CopyStream, Hello, Lane, Message, RefuseCode};
use mojim_format::{Frame, FrameKind, State};

mod conditions;
pub mod contents;
mod heal;
mod left;
mod promote;
pub mod readers;
mod requests;
#[cfg(test)]
mod tests;
mod unmanaged_files;
mod volume_state;
mod watch;

use mojim_config::{Config, Failover, Node as NodeConfig, Volume};
use mojim_copy::stream::StreamIn;
use mojim_emulate::Emulated;
use mojim_env::event::Event;
use mojim_env::wire::Wire;
use mojim_env::{Address, Conn, Context, Env, Error, Locker, Proof, Result};
use mojim_linux::rings;
use mojim_linux::{Door, Listener, Os, Refusals, guard_sigbus, trust};
use mojim_protocol::may_promise;
use mojim_protocol::view::{Member, Register};
use mojim_replica::backup_progress::Source;
use mojim_replica::backup_session;
use mojim_replica::layout;
use mojim_replica::mirror::control::ControlIn;
use mojim_replica::mirror::lane::{LaneServer, Step};
use mojim_replica::mirror::{Mirror, Refusal, refuse, superseded};
use mojim_replica::pace::{Pace, Pacer};
use mojim_replica::register::ViewRegister;
use mojim_replica::spinner::Spinner;
use mojim_replica::yield_policy::YieldPolicy;
use mojim_store::store::{Store, StoreSpec, read_superblock};

use tracing::{dispatcher, error, info, warn};
use volume_state::VolumeState;

/// How long a new link may take to say who it is.
const FIRST_WORD: Duration = Duration::from_secs(5);
/// Most links at once.
const MAX_LINKS: usize = 512;
/// Most of them that may be streams of copies: there is always room for others.
const MAX_STREAMS: usize = MAX_LINKS / 4;

/// How long what is committed waits between two looks whether there is room for it.
const SHORT_PAUSE: Duration = Duration::from_millis(100);

/// A running node.
pub struct Node {
    config: Config,
    me: NodeConfig,
    env: Arc<dyn Env>,
    /// This machine, from which `over` makes the environments of single volumes. It holds
    /// the keys that connections over TCP are checked against.
    os: Os,
    /// The volumes that this node holds, by name.
    held: BTreeMap<String, VolumeState>,
    /// The register of views, in a cluster with enough voters.
    views: Option<Arc<dyn ViewRegister>>,
    /// Wakes the threads that heal: this node stops, or a program asks it to give way.
    heals: Event,
    /// Greetings that were refused, and are not told yet.
    refusals: Mutex<Refusals>,
    links: AtomicUsize,
    streams: AtomicUsize,
    stopping: AtomicBool,
    /// Counts the copies that were handed over to a program.
    handed: AtomicU64,
    /// Wakes the requests of programs that wait until they may start here.
    posts: Event,
    listeners: Vec<Listener>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Makes the environment of a volume's copy from this machine's.
    over: Box<dyn Fn(Os) -> Arc<dyn Env> + Send + Sync>,
    /// Has the daemon restart this node with another configuration.
    reloads: OnceLock<Box<dyn Fn(Config) + Send + Sync>>,
}

/// Makes a node's own directory, and checks that nobody else can write to the directories
/// that it trusts: its own, and those of the volumes that it holds. Called before
/// anything else is put there.
pub fn make_directories(config: &Config, me: &NodeConfig, env: &dyn Env) -> Result<()> {
    let meta = me.directory.join(".mojim");
    env.create_dir_all(&meta)
        .context(|| format!("making {}", meta.display()))?;
    let held = config.volumes.values();
    let held: Vec<_> = held
        .filter(|v| v.data_nodes().contains(&me.name.as_str()))
        .collect();
    for v in &held {
        trust::check_bare(&layout::data_dir(me, &v.name))
            .context(|| format!("node {}", me.name))?;
    }
    let dirs = held.iter().flat_map(|v| layout::own_dirs(me, &v.name));
    let dirs: Vec<_> = [me.directory.clone(), meta]
        .into_iter()
        .chain(dirs)
        .collect();
    trust::check(&dirs).context(|| format!("node {}", me.name))?;
    if !dirs[2..].is_empty() {
        rings::note(config, me)?;
    }
    Ok(())
}

impl Node {
    /// Starts node `name`: makes its directories, listens, opens the copies it
    /// keeps for others. `views`: the register of views, where there is one.
    ///
    /// What happens is told by `tracing`, with the node's name and the volume's, to the
    /// subscriber that the caller's thread has.
    pub fn start(
        config: &Config,
        name: &str,
        views: Option<Arc<dyn ViewRegister>>,
    ) -> Result<Arc<Node>> {
        let emulated = config.node(name).map(Emulated::of).unwrap_or_default();
        Node::start_over(config, name, views, move |os| emulated.over(os))
    }

    /// [`Node::start`] over an environment that `over` makes from this machine's: for
    /// tests that change what the machine does.
    #[doc(hidden)]
    pub fn start_over(
        config: &Config,
        name: &str,
        views: Option<Arc<dyn ViewRegister>>,
        over: impl Fn(Os) -> Arc<dyn Env> + Send + Sync + 'static,
    ) -> Result<Arc<Node>> {
        let me = config
            .node(name)
            .map_err(|e| Error::Config(e.to_string()))?
            .clone();
        config
            .check_media(name)
            .map_err(|e| Error::Config(e.to_string()))?;
        guard_sigbus();
        let os = Os::of(config, &Subject::Node(me.name.clone()))?;
        let env = over(os.clone());
        make_directories(config, &me, &*env)?;
        let listen =
            |at: Address| Listener::bind(&at).context(|| format!("node {name}: listening on {at}"));
        let listeners = vec![
            listen(Address::Tcp(me.address))?,
            listen(Address::Unix(layout::socket(&me)))?,
        ];
        let held = config.volumes.values().cloned();
        let held = held.filter(|v| v.data_nodes().contains(&name));
        let node = Arc::new(Node {
            config: config.clone(),
            me,
            env,
            os,
            held: held
                .map(|v| (v.name.clone(), VolumeState::new(v)))
                .collect(),
            heals: Event::default(),
            views,
            refusals: Mutex::default(),
            links: AtomicUsize::new(0),
            streams: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            handed: AtomicU64::new(0),
            posts: Event::default(),
            listeners,
            threads: Mutex::new(Vec::new()),
            over: Box::new(over),
            reloads: OnceLock::new(),
        });
        node.open_followed();
        node.start_threads()?;
        Ok(node)
    }

    /// A copy that waits for its primary is opened at once, so that damage shows now and a
    /// promotion finds it ready.
    fn open_followed(self: &Arc<Node>) {
        for v in self.volumes() {
            match self.follows(&v) {
                Ok(true) => {
                    if let Err(e) = self.mirror(&v) {
                        error!(node = %self.me.name, volume = %v.name, "{}", e.cause());
                    }
                }
                Ok(false) => {}
                Err(e) => error!(node = %self.me.name, volume = %v.name, "{e}"),
            }
        }
    }

    fn start_threads(self: &Arc<Node>) -> Result<()> {
        for i in 0..self.listeners.len() {
            let n = self.clone();
            self.spawn("accept", move || n.accept_loop(i))?;
        }
        let n = self.clone();
        self.spawn("rings", move || n.ring_loop())?;
        for v in self.volumes() {
            // The tests of a single node play its peers, which are not to be healed.
            if v.mirror.is_some() && !cfg!(test) {
                let (n, v) = (self.clone(), v.clone());
                self.spawn("heal", move || n.heal_loop(&v))?;
            }
            if let Some(views) = self.register(&v) {
                let n = self.clone();
                self.spawn("watch", move || n.watch_loop(&v, &*views))?;
            }
        }
        Ok(())
    }

    fn spawn(&self, name: &str, f: impl FnOnce() + Send + 'static) -> Result<()> {
        let lines = dispatcher::get_default(Clone::clone);
        let t = std::thread::Builder::new()
            .name(format!("mojim-{name}"))
            .spawn(move || dispatcher::with_default(&lines, f))
            .context(|| "starting a thread".into())?;
        let mut threads = lock(&self.threads);
        threads.retain(|t| !t.is_finished());
        threads.push(t);
        Ok(())
    }

    /// Remembers for status requests whether this node's copy could be used. `Busy`
    /// changes nothing: it only says that another process uses the copy.
    fn note<T>(&self, v: &Volume, how: &Result<T>) {
        let copy_error = match how {
            Ok(_) => None,
            Err(Error::Busy(_)) => return,
            Err(e) => {
                let found = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name));
                let sequence = found.ok().flatten().map(|sb| sb.sequence);
                Some((sequence, e.clone()))
            }
        };
        self.of(v).known().copy_error = copy_error;
    }

    /// Opens a copy that nobody uses, for a look. An error is noted: opening voids what was noted
    /// before.
    fn open_noted(&self, v: &Volume) -> Result<Store> {
        let spec = self.spec(v);
        let opened = Store::open(&self.env, spec.clone());
        let opened = opened.map_err(|e| self.with_way_out(v, &spec, e));
        if opened.is_err() {
            self.note(v, &opened);
        }
        opened
    }

    /// A volume's copy, as this node itself opens it.
    fn spec(&self, v: &Volume) -> StoreSpec {
        layout::store(&self.config, &self.me, v, Locker::Node)
    }

    /// What this node has of a volume that it holds.
    fn of(&self, v: &Volume) -> &VolumeState {
        &self.held[&v.name]
    }

    /// Up to which LSN this node found records in a copy that a program left. `None` if
    /// it has not looked since the copy was last used, `Some(None)` if it could not look.
    fn left_tail(&self, v: &Volume, sequence: u64) -> Option<Option<u64>> {
        let (at, found) = self.of(v).known().left_tail?;
        (at == sequence).then_some(found)
    }

    /// The error that was noted for a copy, if nobody has used the copy since.
    fn noted(&self, v: &Volume, sequence: Option<u64>) -> Option<Error> {
        let known = self.of(v).known();
        let (at, why) = known.copy_error.as_ref()?;
        (*at == sequence).then(|| why.clone())
    }

    /// The volumes that this node holds.
    fn volumes(&self) -> Vec<Volume> {
        self.held.values().map(|h| h.volume.clone()).collect()
    }

    /// The register of a volume's views, if they change through it.
    fn register(&self, v: &Volume) -> Option<Arc<dyn ViewRegister>> {
        let automatic = v.failover == Failover::Automatic;
        self.views.clone().filter(|_| automatic)
    }

    /// Whether this node's copy waits for a primary elsewhere.
    fn follows(&self, v: &Volume) -> Result<bool> {
        let meta = layout::meta_dir(&self.me, &v.name);
        Ok(match read_superblock(&*self.env, &meta)? {
            Some(sb) if sb.view.epoch > 0 => sb.view.primary != self.me.name,
            _ => v.primary != self.me.name && v.mirror.is_some(),
        })
    }

    /// Sets what the request `reload` calls, on a link's thread, with the new
    /// configuration. `f` must return at once, and see to it that this node is stopped
    /// and another one is started with that configuration.
    pub fn reload_by(&self, f: impl Fn(Config) + Send + Sync + 'static) {
        // The first one stays.
        let _ = self.reloads.set(Box::new(f));
    }

    /// The addresses at which this node listens.
    pub fn addresses(&self) -> Vec<Address> {
        self.listeners.iter().map(Listener::local_address).collect()
    }

    /// Stops accepting, ends every link, drains what may be drained, closes
    /// the copies cleanly.
    pub fn stop(&self) {
        self.stopping.store(true, SeqCst);
        self.posts.notify();
        self.heals.notify();
        for l in &self.listeners {
            l.close();
        }
        for held in self.held.values() {
            self.end_look(&held.volume);
            let m = held.place().take();
            if let Some(m) = m
                && let Err(e) = self.close_mirror(&m)
            {
                warn!(node = %self.me.name, volume = %held.volume.name, "closing: {e}");
            }
        }
        let me = std::thread::current().id();
        loop {
            // A thread that ends may have started another.
            let threads: Vec<_> = lock(&self.threads).drain(..).collect();
            if threads.is_empty() {
                return;
            }
            for t in threads {
                if t.thread().id() != me {
                    // A thread that panicked has said so.
                    let _ = t.join();
                }
            }
        }
    }

    /// A mirror's logs may hold records that are acknowledged but not known to be
    /// committed. These are not applied, so the close is clean only if there are none.
    fn close_mirror(&self, m: &Arc<Mirror>) -> Result<()> {
        m.close();
        if m.store.superblock().state != State::Whole {
            return Ok(());
        }
        let tail = m.tail();
        let limit = m.committed().min(tail);
        while m.store.applied() < limit {
            let before = m.store.applied();
            if m.store.apply(limit, 1 << 20)? == before {
                break;
            }
        }
        let nothing_left = m
            .store
            .logs()
            .iter()
            .enumerate()
            .all(|(i, _)| m.store.last_of(i).0 <= m.store.applied());
        m.store.checkpoint()?;
        // If records are known to be missing, the next process to open the copy must
        // learn it.
        let whole = m.store.known_missing().is_none_or(|known| known <= tail);
        if nothing_left && whole && m.store.applied() == tail {
            m.store.close_clean(tail)?;
        }
        Ok(())
    }

    /// The copy of a volume that this node keeps for a primary elsewhere.
    fn mirror(self: &Arc<Node>, v: &Volume) -> Result<Arc<Mirror>> {
        let held = self.of(v);
        let mut place = held.place();
        self.end_look(v);
        // `stop` closes the mirror that is there when it takes the lock.
        if self.stopping.load(SeqCst) {
            return Err(Error::Busy("this node is stopping".into()));
        }
        let mut unapplied = None;
        if let Some(m) = &*place {
            if m.store.poisoned().is_none() {
                return Ok(m.clone());
            }
            // Opening verifies the copy again (invariant 6).
            let why = m.store.poisoned().expect("just seen").cause();
            warn!(node = %self.me.name, volume = %v.name, "reopening a copy that failed: {why}");
            m.close();
            let old = place.take().expect("just seen");
            unapplied = old.store.unapplied();
            if let Err(e) = wait_for_last(old) {
                held.known().unopened = Some(unapplied);
                return Err(e);
            }
        }
        // What an earlier try to reopen it knew.
        let earlier = held.known().unopened.take();
        if let Some(known) = earlier {
            unapplied = unapplied.max(known);
        }
        // The copy forwards over this volume's links, which may be unencrypted.
        let env = (self.over)(self.os.clone().encrypting(v.encrypt));
        let spec = self.spec(v);
        let opened = Store::open(&env, spec.clone());
        let opened = opened.map_err(|e| self.with_way_out(v, &spec, e));
        self.note(v, &opened);
        let store = Arc::new(opened?);
        if store.superblock().state == State::Empty {
            info!(node = %self.me.name, volume = %v.name, "no usable copy here yet");
        } else {
            let last = store.tail();
            info!(node = %self.me.name, volume = %v.name, "copy opened, last LSN {last}");
        }
        if let Some(lsn) = unapplied.filter(|lsn| *lsn <= store.tail())
            && store.superblock().state == State::Whole
            && let Err(e) = store.apply_known(lsn)
        {
            // The copy acknowledges nothing more and cannot take over. It says so to the
            // next node that greets it, and is opened again then.
            error!(
                node = %self.me.name, volume = %v.name,
                "this copy cannot apply what it acknowledged: {}", e.cause()
            );
            store.note_unapplied(lsn);
        }
        let mut m = Mirror::new(store, &self.me.name, v.secondary_threshold);
        m.checkpoint_threshold = v.checkpoint_threshold;
        if v.failover == Failover::Automatic {
            m.silence = m.silence.min(self.config.failure_limit);
        }
        let m = Arc::new(m);
        *place = Some(m.clone());
        drop(place);
        let worker = m.clone();
        let node = self.clone();
        self.spawn("checkpoint", move || node.checkpoint_loop(&worker))?;
        let (worker, node) = (m.clone(), self.clone());
        self.spawn("haste", move || node.haste_loop(&worker))?;
        if !v.backups.is_empty() {
            for peer in layout::others(&self.config, &self.me, v) {
                let (node, m) = (self.clone(), m.clone());
                self.spawn("forward", move || {
                    node.forward_loop(m, &peer.name, &peer.tcp)
                })?;
            }
        }
        Ok(m)
    }

    /// Why a copy could not be opened, with the command that has it made anew where it follows.
    fn with_way_out(&self, v: &Volume, spec: &StoreSpec, e: Error) -> Error {
        match e {
            Error::Damaged { path, what } if Store::followed(&*self.env, spec).is_ok() => {
                let command = format!(
                    "mojim repair --anew --name {} --volume {}",
                    self.me.name, v.name
                );
                let what = format!(
                    "{what}. While a program runs on the primary, `{command}` gives this copy up for one of that"
                );
                Error::Damaged { path, what }
            }
            e => e,
        }
    }

    /// Forwards a copy to one backup, while this node is the volume's mirror.
    fn forward_loop(&self, m: Arc<Mirror>, name: &str, address: &Address) {
        let volume = &m.store.spec().volume;
        let source: Arc<dyn Source> = m.clone();
        let stop = || m.is_closed() || self.stopping.load(Acquire);
        let me = &self.me.name;
        let well = format!("forwarding to node {name}");
        backup_session::run(&source, me, name, address, stop, |what| {
            if what == well {
                info!(node = %me, volume = %volume, "{what}");
            } else {
                warn!(node = %me, volume = %volume, "{what}");
            }
        });
    }

    /// Applies for those who wait for it.
    fn haste_loop(&self, m: &Mirror) {
        while !m.is_closed() {
            if m.store
                .await_hurry(|| m.is_closed(), Duration::from_secs(1))
            {
                // Another thread has said why, and whoever waits sees it.
                let _ = m.checkpoint_step(Pace::Idle);
                m.room.notify();
            }
        }
    }

    fn checkpoint_loop(&self, m: &Mirror) {
        // Readers, a primary whose record finds no room, and who takes over wait for its locks.
        mojim_env::threads::yield_at_wakeups();
        let mut pacer = Pacer::of_mirror();
        // What is committed found no room.
        let mut full = false;
        while !m.is_closed() {
            let limit = m.apply_limit();
            if m.store.count_names(limit) {
                // Names take long: the other thread applies them, and this one goes on asking.
                m.store.hurry();
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if let Err(e) = m.background_turn(&mut pacer) {
                // It follows, and goes on by itself when there is room.
                let why = e.cause();
                let waits = m.store.poisoned().is_none();
                if !(waits && std::mem::replace(&mut full, waits)) {
                    error!(node = %self.me.name, volume = %m.store.spec().volume, "{why}");
                }
                if !waits {
                    return;
                }
                std::thread::sleep(SHORT_PAUSE);
                continue;
            }
            if std::mem::take(&mut full) {
                info!(node = %self.me.name, volume = %m.store.spec().volume, "there is room again");
            }
            if !pacer.rests() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let most = Duration::from_millis(if m.is_due() { 20 } else { 1000 });
            m.checkpoint_work
                .wait_unless(|| m.is_closed() || m.apply_limit() != limit, most);
        }
    }

    fn accept_loop(self: Arc<Node>, which: usize) {
        let mut door = Door::new(&self.listeners[which], self.os.keys());
        while !self.stopping.load(Acquire) {
            let next = door.next(Duration::from_millis(500));
            if let Some(text) = door.refusals() {
                warn!(node = %self.me.name, code = "refused", "{text}");
            }
            self.tell_refusals();
            let conn = match next {
                Ok(Some(c)) => c,
                Ok(None) => continue,
                Err(_) if self.stopping.load(Acquire) => return,
                Err(e) => {
                    warn!(node = %self.me.name, "accepting: {e}");
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            if self.links.fetch_add(1, AcqRel) >= MAX_LINKS {
                self.links.fetch_sub(1, AcqRel);
                conn.close();
                continue;
            }
            let node = self.clone();
            let started = self.spawn("link", move || {
                node.serve(conn);
                node.links.fetch_sub(1, AcqRel);
            });
            if let Err(e) = started {
                self.links.fetch_sub(1, AcqRel);
                warn!(node = %self.me.name, "{e}");
            }
        }
    }

    /// One link, from its first word to its end.
    fn serve(self: &Arc<Node>, conn: Arc<dyn Conn>) {
        let mut wire = Wire::new(conn);
        // The peer is unknown as yet: read little from it.
        wire.limit = 4096;
        let deadline = self.env.now() + FIRST_WORD;
        let first = loop {
            match wire.take_frame() {
                Ok(Some(f)) => break Ok(f),
                Ok(None) => {
                    let left = deadline.saturating_sub(self.env.now());
                    if left.is_zero() || self.stopping.load(Acquire) {
                        break Err(Error::Timeout("nothing was said".into()));
                    }
                    let _ = wire.conn.wait(false, left.min(Duration::from_millis(500)));
                }
                Err(e) => break Err(e),
            }
        };
        let (f, body) = match first {
            Ok(x) => x,
            Err(e @ Error::Protocol(_)) => {
                let no = Refusal {
                    code: RefuseCode::UnknownPeer,
                    text: e.to_string(),
                };
                refuse(&mut wire, 0, &no);
                wire.conn.close();
                return;
            }
            Err(_) => {
                wire.conn.close();
                return;
            }
        };
        if f.kind == FrameKind::Hello {
            wire.limit = mojim_format::frame::MAX_BODY;
        }
        match f.kind {
            FrameKind::Hello => self.serve_control(wire, f, &body),
            FrameKind::Lane => self.serve_lane(wire, f, &body),
            FrameKind::CopyStream => {
                // The sender does without a stream that is not opened.
                match self.streams.fetch_add(1, AcqRel) < MAX_STREAMS {
                    true => self.serve_stream(wire, f, &body),
                    false => wire.conn.close(),
                }
                self.streams.fetch_sub(1, AcqRel);
            }
            FrameKind::Request => self.serve_requests(wire, f, body),
            k => {
                let no = Refusal {
                    code: RefuseCode::Protocol,
                    text: format!("a link does not begin with {k:?}"),
                };
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
            }
        }
    }

    /// Tells of refused greetings, unless it has told of others just now.
    fn tell_refusals(&self) {
        let text = lock(&self.refusals).take();
        if let Some(text) = text {
            warn!(node = %self.me.name, code = "refused", "{text}");
        }
    }

    fn unknown_peer(&self, text: String) -> Refusal {
        Refusal {
            code: RefuseCode::UnknownPeer,
            text,
        }
    }

    /// Whether a link may carry a volume's data for node `name`.
    fn speaks_as(&self, conn: &dyn Conn, name: &str, v: &Volume) -> Result<(), Refusal> {
        match conn.proof() {
            Proof::Nothing | Proof::Local => Ok(()),
            Proof::Node { name: proved, .. } if proved != name => Err(self.unknown_peer(format!(
                "node {proved}, by its certificate, speaks as {name:?}"
            ))),
            Proof::Node { encrypted, .. } if v.encrypt && !encrypted => {
                Err(self.unknown_peer(format!("the links of volume {} are encrypted", v.name)))
            }
            Proof::Node { .. } => Ok(()),
            Proof::Client { .. } => {
                Err(self.unknown_peer("a client's certificate is no node's".into()))
            }
        }
    }

    /// The volume that a peer names, if this node holds it.
    fn meant(&self, cluster: &str, volume: &str) -> Result<Volume, Refusal> {
        if cluster != self.config.cluster {
            return Err(self.unknown_peer(format!(
                "this is cluster {:?}, not {cluster:?}",
                self.config.cluster
            )));
        }
        self.held
            .get(volume)
            .map(|h| h.volume.clone())
            .ok_or_else(|| {
                self.unknown_peer(format!("node {} has no volume {volume:?}", self.me.name))
            })
    }

    fn serve_control(self: &Arc<Node>, mut wire: Wire, f: Frame, body: &[u8]) {
        let (mirror, hello, led) = match self.greeted(&*wire.conn, body) {
            Ok(x) => x,
            Err(no) => {
                lock(&self.refusals).note(&wire.conn.peer(), &no.text);
                self.tell_refusals();
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
                return;
            }
        };
        let mut control = match ControlIn::answer(mirror.clone(), wire, &hello) {
            Ok(c) => c,
            Err((mut wire, no)) => {
                warn!(
                    node = %self.me.name, volume = %hello.volume, code = "refused",
                    "refused node {}: {}", hello.from, no.text
                );
                let epoch = mirror.store.superblock().promised;
                refuse(&mut wire, epoch, &no);
                wire.conn.close();
                if let Some(v) = led {
                    self.let_go_of_mirror(&v, mirror);
                }
                return;
            }
        };
        if led.is_some() {
            warn!(
                node = %self.me.name, volume = %hello.volume, code = "superseded",
                "this node led the volume until node {} did, from epoch {}", hello.from, hello.epoch
            );
        }
        info!(
            node = %self.me.name, volume = %hello.volume, code = "following",
            "following node {}, epoch {}", hello.from, hello.epoch
        );
        self.follow(&mut control, &mirror, &hello);
        control.end();
    }

    /// The copy that is to follow the greeting node, the node's Hello, and the volume if
    /// this node leads the copy and opened it only for a node that may replace it.
    #[allow(clippy::type_complexity, reason = "what a greeting is answered from")]
    fn greeted(
        self: &Arc<Node>,
        conn: &dyn Conn,
        body: &[u8],
    ) -> Result<(Arc<Mirror>, Hello, Option<Volume>), Refusal> {
        let h = Hello::decode(body).map_err(|e| self.unknown_peer(e.to_string()))?;
        let v = self.meant(&h.cluster, &h.volume)?;
        if h.to != self.me.name {
            return Err(self.unknown_peer(format!(
                "this is node {}, not {:?}: two nodes share an address",
                self.me.name, h.to
            )));
        }
        if h.from == self.me.name || !v.data_nodes().contains(&h.from.as_str()) {
            return Err(self.unknown_peer(format!(
                "volume {} has no node {:?} besides {}",
                v.name, h.from, self.me.name
            )));
        }
        self.speaks_as(conn, &h.from, &v)?;
        // Before the lock is tried: a newer view that this node made refuses the Hello.
        if let Ok(Some(sb)) = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name))
            && let Some(no) = superseded(&self.me.name, &sb.view, &h)
        {
            return Err(no);
        }
        let agreed = self.check_role(&v, &h)?;
        // A copy that this node leads is opened for a node that may replace it.
        let led = !self.of(&v).is_open() && !self.follows(&v)?;
        let m = self.mirror(&v).map_err(Refusal::from)?;
        m.learn_epoch(agreed.unwrap_or(0));
        Ok((m, h, led.then_some(v)))
    }

    /// Checks that the greeting node is the primary of the view, or, for a backup, one of the
    /// two that forward: by the register, where there is one. Without a register no node knows
    /// which of the others an operator has promoted. Returns the register's epoch, where it
    /// was read.
    fn check_role(&self, v: &Volume, h: &Hello) -> Result<Option<u64>, Refusal> {
        let Some(views) = self.register(v) else {
            return Ok(None);
        };
        let sb = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name));
        let sb = sb.ok().flatten();
        let promised = sb.as_ref().map_or(0, |sb| sb.promised);
        let view = sb.map(|sb| sb.view).unwrap_or_default();
        let named = |n: &str| n == v.primary || v.mirror.as_deref() == Some(n);
        let before = self.of(v).mirror().map(|m| m.greeted());
        let follows = view.primary == h.from
            || h.backup && (named(&h.from) || before.as_ref() == Some(&h.from));
        // A link that is made again in the view that is followed here needs no majority.
        if view.epoch > 0 && view.epoch == h.epoch && promised == h.epoch && follows {
            return Ok(None);
        }
        let reg = match views.read(&v.name) {
            Ok(reg) => reg,
            // Nothing can be begun by it: the register has to agree before.
            Err(_) if follows => return Ok(None),
            Err(e) => {
                let text = format!(
                    "cannot find out whether node {} is the primary: {e}",
                    h.from
                );
                return Err(Refusal {
                    code: RefuseCode::Busy,
                    text,
                });
            }
        };
        let begun = reg.epoch.max(view.epoch);
        if !may_promise(h.epoch, begun, promised) {
            return Err(self.unknown_peer(format!(
                "epoch {} was asked for; nobody can have come as far from epoch {begun}",
                h.epoch
            )));
        }
        if reg.version == 0 || may_greet(&reg, &h.from, h.backup) {
            return Ok(Some(reg.epoch));
        }
        let primary = reg.primary.as_ref().map_or("none", |p| &p.node);
        let code = match h.backup {
            _ if reg.epoch > h.view => RefuseCode::Superseded,
            true => RefuseCode::Busy,
            false => RefuseCode::UnknownPeer,
        };
        Err(Refusal {
            code,
            text: format!(
                "node {} is not the primary of volume {}{}: by the register that is node {primary}, since epoch {}",
                h.from,
                v.name,
                if h.backup { ", nor its mirror" } else { "" },
                reg.epoch
            ),
        })
    }

    /// Follows a primary until its link ends or this node stops.
    fn follow(&self, control: &mut ControlIn, m: &Mirror, hello: &Hello) {
        let (mut runs, mut gives) = (false, false);
        loop {
            let stepped = control.step();
            if control.is_giving() && !gives {
                gives = true;
                info!(
                    node = %self.me.name, volume = %hello.volume,
                    "node {} has LSN {} when it attaches, this node LSN {}: it takes this node's copy",
                    hello.from, hello.tail, m.tail()
                );
            }
            match stepped {
                // The session runs, so everything that was missing has come.
                Ok(_) if !runs && m.has_session() => {
                    runs = true;
                    self.held[&hello.volume].known().uncopied = None;
                }
                Ok(true) => {}
                Ok(false) => {
                    let _ = control
                        .conn()
                        .wait(control.wants_to_send(), Duration::from_millis(50));
                }
                Err(e) => {
                    // A poisoned copy reports its error itself.
                    if is_full(&e) && m.store.check().is_ok() {
                        let said = (self.env.now(), e.cause());
                        self.held[&hello.volume].known().uncopied = Some(said);
                    }
                    if control.said_farewell() {
                        info!(
                            node = %self.me.name, volume = %hello.volume, code = "primary_ended",
                            "the program of node {} has ended in order", hello.from
                        );
                    } else {
                        warn!(
                            node = %self.me.name, volume = %hello.volume, code = "primary_lost",
                            "node {} is gone: {}", hello.from, e.cause()
                        );
                    }
                    break;
                }
            }
            if self.stopping.load(Acquire) {
                break;
            }
        }
    }

    /// The copy whose session a further link joins.
    fn joined(
        &self,
        conn: &dyn Conn,
        cluster: &str,
        volume: &str,
    ) -> Result<(Arc<Mirror>, Volume), Refusal> {
        let v = self.meant(cluster, volume)?;
        let m = self.of(&v).mirror();
        let m = m.ok_or_else(|| Refusal {
            code: RefuseCode::StaleEpoch,
            text: "there is no session".into(),
        })?;
        self.speaks_as(conn, &m.greeted(), &v)?;
        Ok((m, v))
    }

    fn serve_lane(self: &Arc<Node>, mut wire: Wire, f: Frame, body: &[u8]) {
        let found = (|| -> Result<(Arc<Mirror>, Lane, Duration), Refusal> {
            let l = Lane::decode(body).map_err(|e| self.unknown_peer(e.to_string()))?;
            let (m, v) = self.joined(&*wire.conn, &l.cluster, &l.volume)?;
            Ok((m, l, v.spin))
        })();
        let accepted = match found {
            Ok((m, l, spin)) => {
                LaneServer::accept(m.clone(), wire, f.epoch, &l).map(|s| (m, s, spin))
            }
            Err(no) => {
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
                return;
            }
        };
        let (mirror, mut lane, spin) = match accepted {
            Ok(x) => x,
            Err((mut wire, no)) => {
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
                return;
            }
        };
        let mut spinner = Spinner::learning(spin);
        let yield_policy = YieldPolicy::default();
        let ended = loop {
            match lane.step() {
                Ok(Step::Moved) => spinner.hit(&*self.env),
                Ok(Step::Nothing) => {
                    if spinner.spin(&*self.env) {
                        if spinner.gives_way() || lane.gives_way() {
                            yield_policy.give_way(&*self.env);
                        }
                        std::hint::spin_loop();
                    } else if let Err(e) = lane.wait(Duration::from_millis(200)) {
                        break e;
                    }
                }
                Ok(Step::Full) => {
                    mirror.store.hurry();
                    if let Err(e) = mirror.store.check() {
                        break e;
                    }
                    let full = mirror.store.fullness();
                    mirror
                        .room
                        .wait_unless(|| mirror.store.fullness() < full, Duration::from_millis(1));
                }
                Ok(Step::Held) => {
                    if mirror.store.is_laden() {
                        mirror.store.hurry();
                    }
                    if let Err(e) = mirror.store.check() {
                        break e;
                    }
                    // A backup is behind, and its thread does not notify.
                    mirror.room.wait_unless(|| false, Duration::from_millis(1));
                }
                Err(e) => break e,
            }
            if self.stopping.load(Acquire) || mirror.is_closed() {
                break Error::Busy("this node is stopping".into());
            }
        };
        if let Error::Protocol(_) | Error::Poisoned(_) | Error::Full(_) = ended {
            let (me, volume) = (&self.me.name, &mirror.store.spec().volume);
            warn!(node = %me, volume = %volume, "lane of {}: {ended}", lane.conn().peer());
        }
        lane.conn().close();
    }

    fn serve_stream(self: &Arc<Node>, mut wire: Wire, f: Frame, body: &[u8]) {
        let found = (|| -> Result<(Arc<Mirror>, CopyStream), Refusal> {
            let s = CopyStream::decode(body).map_err(|e| self.unknown_peer(e.to_string()))?;
            let (m, _) = self.joined(&*wire.conn, &s.cluster, &s.volume)?;
            Ok((m, s))
        })();
        // Dropped after the stream, which holds the store: `wait_for_last` waits for the
        // mirror only.
        let (mirror, first) = match found {
            Ok(x) => x,
            Err(no) => {
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
                return;
            }
        };
        let Ok(mut stream) = StreamIn::accept(&mirror.store, wire, f.epoch, &first) else {
            return;
        };
        while !self.stopping.load(Acquire) && !mirror.is_closed() {
            match stream.step() {
                Ok(true) => {}
                Ok(false) => {
                    let to_send = stream.wants_to_send();
                    let _ = stream.conn().wait(to_send, Duration::from_millis(50));
                }
                Err(e) => {
                    if !matches!(e, Error::Stale(_) | Error::Timeout(_)) {
                        let (me, volume) = (&self.me.name, &mirror.store.spec().volume);
                        let peer = stream.conn().peer();
                        let why = e.cause();
                        warn!(node = %me, volume = %volume, "a copy's stream from {peer}: {why}");
                    }
                    break;
                }
            }
        }
        stream.conn().close();
    }
}

/// Whether node `from` leads in this view, or forwards in it to a backup.
fn may_greet(reg: &Register, from: &str, backup: bool) -> bool {
    let is = |m: &Option<Member>| m.as_ref().is_some_and(|m| m.node == from);
    is(&reg.primary) || backup && is(&reg.mirror)
}

/// Whether something failed for want of room alone.
fn is_full(e: &Error) -> bool {
    [libc::ENOSPC, libc::EDQUOT].contains(&e.errno())
}

/// Waits until nobody else uses this copy, so that its lock is free.
fn wait_for_last(m: Arc<Mirror>) -> Result<()> {
    let mut m = m;
    for _ in 0..1000 {
        match Arc::try_unwrap(m) {
            Ok(_) => return Ok(()),
            Err(back) => {
                m = back;
                m.room.notify();
                m.checkpoint_work.notify();
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    Err(Error::Busy("links to this copy did not end".into()))
}
