//! The attached volume: what a program uses.
//!
//! Owns how an attachment of one process to one volume as its primary begins and ends, and
//! its background threads (link, forwarding, holders, checkpoint). Every call may be made
//! from any thread.
//!
//! The files below import downwards only, and none imports this one. From the top:
//!
//! 1. `children`
//! 2. `owner`
//! 3. `windows`
//! 4. `exact`
//! 5. `sync_point`
//! 6. `names`, `batch`, `remembered`
//! 7. `table`, `copies`
//! 8. `attached`
//! 9. `memory`, `place`
//!
//! Invariants:
//! - A forked child can commit nothing itself.
//! - A copy is marked clean only after the threads have ended.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::share::{Guest, guest};
use mojim_config::{Config, Failover, Mode, Working};
use mojim_copy::stream::StreamThreads;
use mojim_emulate::Emulated;
use mojim_env::locks::lock;
use mojim_env::threads::SignalsWait;
use mojim_env::{Address, Context, Env, Error, Result};
use mojim_linux::Os;
use mojim_memory::committed;
use mojim_memory::fork::{check_fork, is_other_process, watch_forks};
use mojim_replica::backup_progress::Source;
use mojim_replica::backup_session;
use mojim_replica::holders::{self, Holders, Peer};
use mojim_replica::layout;
use mojim_replica::pace::{Pace, Pacer};
use mojim_replica::primary::Primary;
use mojim_replica::session::Session;
use mojim_store::store::AT_ONCE;

mod attach_target;
mod attached;
mod batch;
mod children;
mod copies;
mod exact;
mod memory;
mod names;
mod owner;
mod remembered;
mod sync_point;
mod table;
mod windows;

use attach_target::{AttachTarget, Attacher};
pub use attached::Volume;
use attached::{ATTACHED, Inner};
#[doc(hidden)]
pub use batch::{Batch, Change};
#[doc(hidden)]
pub use children::expect_forks;
pub use copies::CopyReport;
#[doc(hidden)]
pub use exact::{Failure, commit_exact};
#[doc(hidden)]
pub use mojim_replica::primary::RoomWait;
pub use sync_point::{gmsync, gmsync_async, msync, msync_async, prepare_thread, rollback};
pub use windows::{is_region, leave_memory, populate, span_of, unmap};

/// How often a primary that is alone asks which nodes hold its volume.
const HOLDERS_EVERY: Duration = Duration::from_secs(1);

/// How long what is committed waits between two looks whether there is room for it.
const SHORT_PAUSE: Duration = Duration::from_millis(50);

/// How long a process waits for the process that holds a volume to share it.
const JOIN_PATIENCE: Duration = Duration::from_secs(3);

/// Calls [`Volume::finish`] for every attached volume, at the end of the process:
/// without this or a detach, exit commits nothing. Tries all volumes, and returns the
/// first error. Does nothing in a forked child.
pub fn finish_all() -> Result<()> {
    let shared = guest::finish_all();
    if is_other_process() {
        return shared;
    }
    let all: Vec<_> = lock(&ATTACHED).iter().filter_map(Weak::upgrade).collect();
    let all = all.into_iter();
    all.map(|v| Volume(v).finish()).fold(shared, Result::and)
}

/// A volume of this node, attached by this process or by another one.
pub enum Joined {
    /// This process has attached it.
    Owner(Volume),
    /// Another process has attached it, and shares it with this one.
    Guest(Guest),
}

/// Attaches this process to a volume as its primary, as [`Volume::attach`] does. If another process
/// of the node has joined the volume as its primary (or has attached it, and the configuration says
/// `working = "shared"`), shares it with that process instead: all see the same memory, and any of
/// them can call sync points.
///
/// # Errors
/// Those of [`Volume::attach`]; `Busy` if another process has attached the volume and does not
/// share it.
pub fn join(config: &Config, node: &str, volume: Option<&str>) -> Result<Joined> {
    check_fork()?;
    let _watch = watch_forks();
    expect_forks();
    let wrong = |e: mojim_config::ConfigError| Error::Config(e.to_string());
    let private = config.volume(volume).map_err(wrong)?.working == Working::Private;
    let since = std::time::Instant::now();
    loop {
        if let Some(guest) = Guest::attach(config, node, volume)? {
            return Ok(Joined::Guest(guest));
        }
        match Volume::attach_with(config, node, volume, |_, _| {}) {
            Ok(v) => {
                let shared = if private { Ok(()) } else { v.0.share() };
                if let Err(e) = shared {
                    // The caller gets no handle by which to end it.
                    let _ = v.detach();
                    let _ = v.0.close();
                    return Err(e);
                }
                return Ok(Joined::Owner(v));
            }
            // The process that holds the volume may be about to share it.
            Err(Error::Busy(_)) if !private && since.elapsed() < JOIN_PATIENCE => {}
            Err(e) => return Err(e),
        }
    }
}

/// What makes a node's environment of this machine's.
fn of_node(config: &Config, node: &str) -> impl FnOnce(Os) -> Arc<dyn Env> + use<> {
    // An unknown name is an error later.
    let node = config.node(node).cloned();
    move |os| node.map(|n| Emulated::of(&n)).unwrap_or_default().over(os)
}

impl Volume {
    /// Attaches this process to a volume as its primary, on node `node`.
    ///
    /// Reads the configuration at `config`; `volume` may be left out where it
    /// has only one. Recovers the node's copy, takes a new epoch, agrees with
    /// the mirror (in the modes that have one) and adopts what it holds.
    ///
    /// # Errors
    /// `Busy` if another process is attached; `Stale` if another node is
    /// primary; `Timeout` if the mirror does not answer; `Config`, `Damaged`,
    /// `Io` as their names say.
    pub fn attach(config: &Path, node: &str, volume: Option<&str>) -> Result<Volume> {
        let config = mojim_linux::trust::load(config)?;
        Volume::attach_with(&config, node, volume, |_, _| {})
    }

    /// [`Volume::attach`] with a configuration in memory. While a whole copy is
    /// made, `progress` is called with the bytes done and the bytes in all.
    pub fn attach_with(
        config: &Config,
        node: &str,
        volume: Option<&str>,
        progress: impl FnMut(u64, u64),
    ) -> Result<Volume> {
        Volume::attach_over(config, node, volume, of_node(config, node), progress)
    }

    /// [`Volume::attach`], which ends with `Busy` as soon as `given_up` returns true.
    #[doc(hidden)]
    pub fn attach_unless(
        config: &Config,
        node: &str,
        volume: &str,
        given_up: &dyn Fn() -> bool,
    ) -> Result<Volume> {
        let over = of_node(config, node);
        let who = Attacher {
            is_program: true,
            given_up,
        };
        Volume::attach_as(config, node, Some(volume), over, |_, _| {}, who)
    }

    /// [`Volume::attach`] for a node's daemon, which brings the mirror up to date while no
    /// program is attached. It never begins alone a volume that was not alone, shares
    /// nothing, and ends with `Busy` as soon as `gives_way` returns true.
    #[doc(hidden)]
    pub fn attach_to_heal(
        config: &Config,
        node: &str,
        volume: &str,
        gives_way: &dyn Fn() -> bool,
    ) -> Result<Volume> {
        let mut config = config.clone();
        if let Some(v) = config.volumes.get_mut(volume) {
            v.working = Working::Private;
        }
        let over = of_node(&config, node);
        let who = Attacher {
            is_program: false,
            given_up: gives_way,
        };
        Volume::attach_as(&config, node, Some(volume), over, |_, _| {}, who)
    }

    /// Whether the mirror follows and has everything.
    #[doc(hidden)]
    pub fn is_level(&self) -> bool {
        let p = &self.0.primary;
        let view = p.store.superblock().view;
        p.link_up.load(Acquire) && view.mirror == p.mirror() && p.acked.get() >= p.last()
    }

    /// A number that grows while the mirror is brought up to date.
    #[doc(hidden)]
    pub fn mirror_has(&self) -> u64 {
        let p = &self.0.primary;
        let moved = p
            .store
            .progress
            .get(self.0.env.now())
            .map_or(0, |c| c.moved);
        p.acked.get().wrapping_add(moved)
    }

    /// [`Volume::attach_with`] over an environment that `over` makes of this
    /// machine's: for tests of failures of a machine.
    #[doc(hidden)]
    pub fn attach_over(
        config: &Config,
        node: &str,
        volume: Option<&str>,
        over: impl FnOnce(Os) -> Arc<dyn Env>,
        progress: impl FnMut(u64, u64),
    ) -> Result<Volume> {
        let who = Attacher {
            is_program: true,
            given_up: &|| false,
        };
        Volume::attach_as(config, node, volume, over, progress, who)
    }

    fn attach_as(
        config: &Config,
        node: &str,
        volume: Option<&str>,
        over: impl FnOnce(Os) -> Arc<dyn Env>,
        mut progress: impl FnMut(u64, u64),
        who: Attacher,
    ) -> Result<Volume> {
        check_fork()?;
        let watch = watch_forks();
        let place = AttachTarget::of(config, node, volume, over)?;
        let store = Arc::new(place.open(who)?);
        let primary = Arc::new(Primary::new(
            store.clone(),
            layout::primary(config, &place.node, &place.volume),
        ));
        let holders = Holders::new(layout::others(config, &place.node, &place.volume));
        let session = place.begin(&primary, &holders, &mut progress, who)?;
        store.area().check_sizes()?;
        let inner = Arc::new(Inner::new(place, primary, holders, watch));
        let started = inner.start_threads(session);
        expect_forks();
        let shared = started.and_then(|()| match inner.volume.working {
            Working::Shared => inner.share(),
            // The first process that joins, or a fork, shares it, if any does.
            Working::Auto | Working::Private => Ok(()),
        });
        if let Err(e) = shared {
            // The threads hold `inner`, and nothing else would end them.
            let _ = inner.close();
            return Err(e);
        }
        let mut attached = lock(&ATTACHED);
        attached.retain(|v| v.strong_count() > 0);
        attached.push(Arc::downgrade(&inner));
        drop(attached);
        Ok(Volume(inner))
    }

    /// Ends the attachment: commits the regions (those without `MAP_ATOMIC`) and
    /// unmaps them, and drains what was acknowledged to the mirror and to this
    /// node's data area. Commits also what guests have stored; from then on
    /// their calls fail with `Stale`. If something could not be committed, fails
    /// and stays attached (without guests).
    pub fn detach(&self) -> Result<()> {
        self.end(true)
    }

    /// As [`Volume::detach`], but leaves the memory mapped: for the end of the
    /// process, while other threads may still run. What they store from now on
    /// is not kept. Does nothing if the attachment has ended already.
    pub fn finish(&self) -> Result<()> {
        match self.0.detached.load(Acquire) {
            true => Ok(()),
            false => self.end(false),
        }
    }

    fn end(&self, unmap: bool) -> Result<()> {
        check_fork()?;
        let inner = &self.0;
        inner.check_attached()?;
        let done = inner.unshare();
        let done = match done {
            Err(e) if unmap => Err(e),
            done => self.end_own(unmap, done),
        };
        if done.is_err() && !inner.detached.load(Acquire) {
            inner.share_again()?;
        }
        done
    }

    /// Ends this process's own use. `done`: the result of ending the guests'.
    fn end_own(&self, unmap: bool, mut done: Result<()>) -> Result<()> {
        let inner = &self.0;
        // While `names` is held no region comes or goes.
        let mut names = lock(&inner.names);
        match inner.finish_names(&mut names) {
            Err(e) if unmap => return Err(e),
            settled => done = done.and(settled),
        }
        inner.apply_now();
        let mine = inner.windows();
        for m in mine.iter().filter(|m| !m.window.atomic) {
            let mut range = m.all();
            // If the file's end is in doubt, the nearer one: bytes behind it may not be the file's.
            range.end = range.end.min(m.region.valid.load(Acquire)).max(range.start);
            let synced = m.sync(range);
            match synced.map(drop) {
                // The volume stays attached.
                Err(e) if unmap => return Err(e),
                // At the end of the process one failure must not keep the other regions
                // from being committed.
                synced => done = done.and(synced),
            }
        }
        if unmap {
            inner.wait_for(inner.unawaited.load(Acquire))?;
            for m in &mine {
                windows::close(m)?;
            }
        }
        drop(names);
        done.and(inner.close())
    }
}

impl Inner {
    /// Stops the threads and marks the copy clean, if all is committed.
    fn close(&self) -> Result<()> {
        if self.detached.swap(true, AcqRel) {
            return Ok(());
        }
        let p = &self.primary;
        let last = p.close_appends();
        let waited = if last > 0 { p.wait(last) } else { Ok(()) };
        // In `async` the mirror gets one `patience` (a second at least) to catch up.
        let patience = self.volume.resend_timeout * self.volume.resend_attempts;
        let start = self.env.now();
        while self.volume.mode == Mode::Async
            && p.link_up.load(Acquire)
            && p.acked.get() < last
            && self.env.now() - start < patience.max(Duration::from_secs(1))
        {
            p.link_work.notify();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stop.store(true, SeqCst);
        p.link_work.notify();
        p.checkpoint_work.notify();
        p.store.hurry();
        p.backups.work.notify();
        self.stopped.notify();
        for t in lock(&self.threads).drain(..) {
            // A thread that panicked has reported it.
            let _ = t.join();
        }
        let store = &p.store;
        let closed = waited.and_then(|()| {
            store.persist_all()?;
            store.apply_all(last)?;
            store.close_clean(last)
        });
        store.release_lock();
        // A child that is forked from here on has nothing of this volume.
        lock(&self.watch).take();
        closed
    }

    fn start_threads(self: &Arc<Inner>, session: Option<Session>) -> Result<()> {
        let mut threads = lock(&self.threads);
        // These threads, and those that they start, run no signal handler of the program:
        // a handler that stores to a region might wait for one of them. Nor does a signal
        // that the program awaits in another thread end the program in one of them.
        let _quiet = SignalsWait::begin_but_faults();
        let spawn = |name: &str, f: Box<dyn FnOnce() + Send>| {
            let started = mojim_env::threads::start(&format!("mojim-{name}"), f);
            started.context(|| "starting a thread".into())
        };
        if let Some(mut s) = session {
            let me = self.clone();
            threads.push(spawn("link", Box::new(move || me.link_loop(&mut s)))?);
        }
        if !self.volume.backups.is_empty() {
            for peer in layout::others(&self.config, &self.node, &self.volume) {
                let me = self.clone();
                threads.push(spawn("forward", Box::new(move || me.forward_to(&peer)))?);
            }
        }
        if self.volume.failover == Failover::Automatic {
            let me = self.clone();
            threads.push(spawn("holders", Box::new(move || me.holders_loop()))?);
        }
        let me = self.clone();
        threads.push(spawn("names", Box::new(move || me.names_loop()))?);
        let me = self.clone();
        threads.push(spawn("checkpoint", Box::new(move || me.checkpoint_loop()))?);
        Ok(())
    }

    /// Forwards records to `peer`, while that node holds the volume and this primary is alone.
    fn forward_to(&self, peer: &Peer) {
        let source: Arc<dyn Source> = self.primary.clone();
        let gone = || self.holders.find(&peer.name).as_ref() != Some(peer);
        let stop = || self.stop.load(Acquire) || gone();
        backup_session::run(
            &source,
            &self.node.name,
            &peer.name,
            &peer.tcp,
            stop,
            |_| {},
        );
    }

    /// If another node has replaced a node that held the volume, a primary that
    /// is alone forwards to the new one, until that can become its mirror.
    fn holders_loop(self: &Arc<Inner>) {
        let daemon = Address::Unix(layout::socket(&self.node));
        let (cluster, volume) = (&self.config.cluster, &self.volume.name);
        let mut threads: HashMap<String, JoinHandle<()>> = HashMap::new();
        while !self.stop.load(Acquire) {
            self.stopped
                .wait_unless(|| self.stop.load(Acquire), HOLDERS_EVERY);
            if self.stop.load(Acquire) || !self.primary.store.superblock().view.mirror.is_empty() {
                continue;
            }
            // A daemon that does not answer is asked again.
            let Ok(all) = holders::ask(&self.env, &daemon, cluster, volume) else {
                continue;
            };
            for peer in self.holders.replace(all) {
                let (me, name) = (self.clone(), peer.name.clone());
                if let Some(t) = threads.remove(&name) {
                    // That thread forwards to another address, and ends. If it
                    // panicked, it has reported that.
                    let _ = t.join();
                }
                let met = self.os.meet(&name, &peer.tcp);
                let started = met.and_then(|()| {
                    let forward = move || me.forward_to(&peer);
                    let begun = mojim_env::threads::start("mojim-forward", forward);
                    begun.context(|| "starting a thread".into())
                });
                match started {
                    Ok(t) => drop(threads.insert(name, t)),
                    // The next answer names the node again.
                    Err(_) => self.holders.forget(&name),
                }
            }
        }
        for t in threads.into_values() {
            // A thread that panicked has reported it.
            let _ = t.join();
        }
    }

    fn link_loop(&self, s: &mut Session) {
        let p = &self.primary;
        let mut stuck_at = u64::MAX;
        let mut streams = StreamThreads::default();
        while !self.stop.load(Acquire) {
            let moved = s.step();
            streams.start(s.take_streams());
            let mut busy = moved;
            let acked = p.acked.get();
            let behind = acked < p.last();
            // In `async` only this thread sends. In the other modes it sends what a failed
            // sync point left, and does not disturb threads that send their own records.
            let mine = self.volume.mode == Mode::Async || stuck_at == acked;
            stuck_at = if behind { acked } else { u64::MAX };
            if behind && mine && p.link_up.load(Acquire) {
                for lane in 0..p.lanes.len() {
                    p.send(lane);
                    busy |= p.receive(lane);
                }
            }
            if busy {
                continue;
            }
            let tick = if self.volume.mode == Mode::Async && behind && p.link_up.load(Acquire) {
                Duration::from_micros(200)
            } else if s.is_active() {
                Duration::from_millis(20)
            } else {
                Duration::from_millis(2)
            };
            if s.awaits_answer()
                && let Some(c) = s.conn()
            {
                // Seen as soon as it comes, so that the measured round trip is the link's.
                let _ = c.wait(false, tick.min(Duration::from_millis(2)));
                continue;
            }
            if let (Some(to_send), Some(c)) = (s.copies(), s.conn()) {
                let _ = c.wait(to_send, tick);
                continue;
            }
            let last = p.last();
            p.link_work.wait_unless(
                || {
                    self.stop.load(Acquire)
                        || p.suspect.load(Acquire)
                        || self.volume.mode == Mode::Async && p.last() != last
                },
                tick,
            );
        }
        s.farewell();
        streams.join();
    }

    fn checkpoint_loop(&self) {
        // Rollbacks, changes of sizes and names, and sync points wait for its locks.
        mojim_env::threads::yield_at_wakeups();
        self.checkpoint_turns();
        if let Some(memory) = &self.memory {
            memory.end();
        }
    }

    /// Applies changes of names when many wait. They take long, and callers wait for room
    /// meanwhile: not at the checkpoint thread's priority.
    fn names_loop(&self) {
        let p = &self.primary;
        let stopped = || self.stop.load(Acquire);
        while !stopped() {
            if p.store.await_hurry(stopped, Duration::from_secs(1)) {
                // If the store is poisoned, every sync point fails with that.
                let _ = p.checkpoint_step(Pace::Idle);
            }
        }
    }

    fn checkpoint_turns(&self) {
        let p = &self.primary;
        let mut pacer = Pacer::of_primary();
        while !self.stop.load(Acquire) {
            let before = p.last();
            let many = committed::are_many();
            if p.store.count_names(u64::MAX) {
                p.store.hurry();
            } else {
                match p.background_turn(&mut pacer, many) {
                    Ok(()) => {}
                    // What is committed waits for room on the disk.
                    Err(_) if p.store.poisoned().is_none() => std::thread::sleep(SHORT_PAUSE),
                    // The store is poisoned, and every sync point fails with that.
                    Err(_) => return,
                }
            }
            if committed::are_many() {
                self.sweep();
            }
            if self
                .memory
                .as_ref()
                .is_some_and(|m| m.turn(&|| self.regions()))
            {
                continue;
            }
            let asked = || self.memory.as_ref().is_some_and(|m| m.meter().is_asked());
            // A store that waits for room may need other threads to run: sleep.
            if !pacer.rests() || asked() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            p.checkpoint_work.wait_unless(
                || self.stop.load(Acquire) || p.last() != before || asked(),
                Duration::from_millis(20),
            );
        }
    }

    /// Frees the images of pages whose records are all applied, also in regions
    /// that no thread syncs any more.
    fn sweep(&self) {
        let applied = self.primary.store.applied();
        for region in self.regions() {
            region.committed.sweep(applied);
        }
    }

    /// Applies the committed records that can be applied at once: a page with records
    /// not yet applied cannot be compared with its file, and would be sent whole.
    fn apply_now(&self) {
        let p = &self.primary;
        // An error is reported by the sync point that follows.
        let persisted = (0..p.lanes.len()).try_for_each(|lane| p.persist_wait(lane));
        // Not beyond this limit: other threads may go on committing without end.
        let limit = p.apply_limit();
        let mut before = None;
        while persisted.is_ok() && before != Some(p.store.applied()) {
            before = Some(p.store.applied());
            if p.store.apply(limit, AT_ONCE).is_err() {
                return;
            }
        }
    }
}
