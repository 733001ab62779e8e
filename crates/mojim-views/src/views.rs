//! A voter's part in the register of views.
//!
//! Owns the openraft node and the threads it runs on. Callers are ordinary
//! threads: what they want runs as a task there, and they wait for its answer
//! for a bounded time.
//!
//! Reads and swaps go to the leader, this node or another. A read is answered once a
//! majority has confirmed the leader since the read began, and from all that was
//! committed before. A swap is proposed once: if its fate cannot be told, the caller is
//! told that.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_env::{Address, Env};
use mojim_env::{Error, Result};
use mojim_protocol::view::Register;
use mojim_replica::register::ViewRegister;
use mojim_replica::request::{RaftCall, Retired};
use openraft::error::{CheckIsLeaderError, Fatal, InitializeError, RaftError};
use openraft::raft::{AppendEntriesRequest, VoteRequest};
use openraft::{ChangeMembers, Config, SnapshotPolicy};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::disk::Disk;
use crate::net::{
    Asked, Links, Network, Room, Said, check_snapshot, check_vote, from_value, numbered,
    unhex_snapshot,
};
use crate::store::{LogStore, Machine, Now};
use crate::types::{
    Membership, Promised, Raft, RegisterCommand, Swap, TypeConfig, Vote, Voter, number,
};

/// Threads that tasks run on. They never block.
const WORKERS: usize = 2;

/// Threads that wait for the disk and for other voters' answers.
const BLOCKING: usize = 128;

/// Reads and swaps that may wait for the leader's answer at one time; the
/// voters' own questions and the disk must not run out of threads.
const FORWARDS: usize = 64;

/// How much longer than its bound a call may take in a task before the caller goes on
/// without it.
const GRACE: Duration = Duration::from_millis(100);

/// Entries after which a snapshot is made, and entries that stay behind it.
const SNAPSHOT_EVERY: u64 = 1000;
const STAY: u64 = 200;

/// What a voter needs to know.
#[derive(Debug, Clone)]
pub struct Options {
    /// The cluster's name.
    pub cluster: String,
    /// This node's name, one of `voters`.
    pub me: String,
    /// Where every voter's daemon listens, by name. The names are the same at
    /// every voter, forever, but for those that are replaced.
    pub voters: BTreeMap<String, Address>,
    /// For voters that replaced others, the names that had their place before, the first
    /// first. If there are any, the cluster is not new: a voter that has no log waits
    /// until a leader sends it the others', and begins none. A leader makes voters of the
    /// nodes that replace voters.
    pub replaced: BTreeMap<String, Vec<String>>,
    /// The volumes that have a register; no other is written.
    pub volumes: BTreeSet<String>,
    /// Where this voter's files lie; made if missing.
    pub dir: PathBuf,
    /// This process voted from there before: without files there, it is not a new voter.
    pub again: bool,
    /// How often a leader is heard, more or less; also how long a voter may
    /// take to answer it, its disk included.
    pub heartbeat: Duration,
    /// A voter asks to be leader after hearing none for the greater of these plus a
    /// random time between them.
    pub election: (Duration, Duration),
    /// How long `read` and `swap` try at most.
    pub timeout: Duration,
}

/// A voter's part in the register of views. [`RaftViews::stop`] ends it.
pub struct RaftViews {
    inner: Arc<Inner>,
    runtime: Mutex<Option<Runtime>>,
}

struct Inner {
    id: u64,
    raft: Raft,
    links: Arc<Links>,
    /// Openraft's; its end frees the files.
    disk: Weak<Disk>,
    volumes: BTreeSet<String>,
    room: Room,
    now: Now,
    poison: Arc<OnceLock<String>>,
    forwards: Arc<Semaphore>,
    heartbeat: Duration,
    timeout: Duration,
}

/// The outcome of an operation at a voter that may not be the leader.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Here<T> {
    Done(T),
    /// It was not done, and will not be. The text says why.
    Elsewhere(String),
}

fn fate_unknown(why: impl std::fmt::Display) -> Error {
    Error::Timeout(format!(
        "cannot find out whether the view was changed ({why}): `mojim status` says which node is the primary now"
    ))
}

fn millis(what: &str, d: Duration) -> Result<u64> {
    match u64::try_from(d.as_millis()) {
        // Bounded, so that sums of a few of them do not overflow.
        Ok(ms) if (1..1 << 40).contains(&ms) => Ok(ms),
        _ => Err(Error::Config(format!("{what} of {d:?}"))),
    }
}

/// Begins the register with these voters, unless this one has something of it: openraft logs an error if
/// it is asked once more. Every other voter begins it with the same ones, and so makes the same first
/// entry.
async fn begin(raft: &Raft, members: BTreeMap<u64, Voter>) -> Result<()> {
    let poisoned = |e: &dyn std::fmt::Display| Error::Poisoned(e.to_string());
    if raft.is_initialized().await.map_err(|e| poisoned(&e))? {
        return Ok(());
    }
    match raft.initialize(members).await {
        Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(()),
        Err(e) => Err(poisoned(&e)),
    }
}

/// The threads of the register.
fn runtime() -> Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .thread_name("mojim-views")
        .enable_time()
        .build()
        .map_err(|e| Error::io("starting the register's threads", &e))
}

/// Starts what goes on beside openraft: voters that are replaced, admitted, or wait for that.
fn watch_voters(runtime: &Runtime, raft: &Raft, links: &Arc<Links>, now: &Now, o: &Options) {
    let both = || (raft.clone(), links.clone());
    let (every, election) = (o.heartbeat, o.election.1);
    let (r, l) = both();
    runtime.spawn(replace_voters(r, l, every));
    let (r, l) = both();
    runtime.spawn(admit_voters(r, l, now.clone(), every, election));
    let (r, l) = both();
    runtime.spawn(stand_where_admitted(r, l, every, election));
}

impl RaftViews {
    /// Starts this node's part, as the node that `env` proves to be: opens its directory,
    /// and takes part in choosing a leader. Does not wait for one. Answers of the other
    /// voters come through [`ViewRegister::hear`], so the daemon should listen already,
    /// or soon.
    pub fn start(env: Arc<dyn Env>, o: Options) -> Result<Arc<RaftViews>> {
        RaftViews::start_on(env, o, (SNAPSHOT_EVERY, STAY))
    }

    /// `(every, stay)`: see [`SNAPSHOT_EVERY`] and [`STAY`].
    pub(crate) fn start_on(
        env: Arc<dyn Env>,
        o: Options,
        (every, stay): (u64, u64),
    ) -> Result<Arc<RaftViews>> {
        if !o.voters.contains_key(&o.me) {
            return Err(Error::Config(format!("node {} is not a voter", o.me)));
        }
        let voters = numbered(&o.voters)?;
        let links = Links::new(&env, &o.cluster, &o.me, voters, &o.replaced);
        let room = links.room()?;
        let config = raft_config(&o, &room, every, stay)?;
        let disk = Arc::new(Disk::open_as(env, &o.dir, &o.cluster, &o.me, o.again)?);
        let links = Arc::new(links.of_directory(disk.incarnation(), disk.lives()));
        let members = links.members();
        let stored = disk.kept(|k| k.membership())?;
        if let Some(m) = &stored {
            check_places(m, &links, &o)?;
        }
        // A leader tells this voter who the voters are. A voter that lost its log must
        // not make a cluster with one that is new.
        let joins = stored.is_none() && !o.replaced.is_empty();
        match disk.kept(|k| k.outdated.clone())? {
            Some(why) => links.give_up(&why),
            // A new directory has promised nothing.
            None if disk.kept(|k| k.promised())? == Promised::default() => links.confirm(),
            None => {}
        }
        let machine = Machine::new(disk.clone())?;
        let (now, poison) = (machine.now(), disk.poison());
        let of_disk = Arc::downgrade(&disk);
        let store = LogStore::new(disk, room.entries);
        let network = Network {
            links: links.clone(),
            pause: o.heartbeat,
        };
        let runtime = runtime()?;
        let id = number(&o.me);
        let started = async move {
            let raft = Raft::new(id, Arc::new(config), network, store, machine)
                .await
                .map_err(|e| Error::Poisoned(e.to_string()))?;
            if !joins {
                begin(&raft, members).await?;
            }
            Ok(raft)
        };
        // Without a bound: this waits for the disk alone.
        let raft = wait(runtime.handle(), None, started)?;
        watch_voters(&runtime, &raft, &links, &now, &o);
        let heard = ask_heard(links.clone(), of_disk.clone(), o.heartbeat, o.election.0);
        runtime.spawn(heard);
        Ok(Arc::new(RaftViews {
            inner: Arc::new(Inner {
                id,
                raft,
                links,
                disk: of_disk,
                volumes: o.volumes,
                room,
                now,
                poison,
                forwards: Arc::new(Semaphore::new(FORWARDS)),
                heartbeat: o.heartbeat,
                timeout: o.timeout,
            }),
            runtime: Mutex::new(Some(runtime)),
        }))
    }

    /// The voter that leads, as far as this one knows.
    pub fn leader(&self) -> Option<String> {
        let leader = self.inner.leader()?;
        Some(self.inner.links.name(leader).to_owned())
    }

    /// Why this voter no longer takes part.
    pub(crate) fn failed(&self) -> Option<Error> {
        self.inner.check().err()
    }

    /// Ends this node's part: then its files are free, unless the disk hangs, and waiting
    /// calls end with an error. Waits for the disk and for other voters' answers, about
    /// the `timeout` at most; not to be called by a task of an async runtime.
    pub fn stop(&self) {
        let Some(runtime) = lock(&self.runtime).take() else {
            return;
        };
        let raft = self.inner.raft.clone();
        let ended = async move {
            // It fails if it had ended already.
            let _ = raft.shutdown().await;
            Ok(())
        };
        let _ = wait(runtime.handle(), Some(self.inner.timeout), ended);
        runtime.shutdown_timeout(self.inner.timeout);
    }

    /// Runs `f` and waits for it, with a bound.
    fn run<T: Send + 'static>(
        &self,
        f: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (handle, bound) = match &*lock(&self.runtime) {
            Some(r) => (r.handle().clone(), self.inner.timeout + GRACE),
            None => return Err(stopped()),
        };
        wait(&handle, Some(bound), f)
    }
}

impl Drop for RaftViews {
    fn drop(&mut self) {
        if let Some(runtime) = lock(&self.runtime).take() {
            runtime.shutdown_background();
        }
    }
}

fn raft_config(o: &Options, room: &Room, every: u64, stay: u64) -> Result<Config> {
    let config = Config {
        cluster_name: o.cluster.clone(),
        heartbeat_interval: millis("a heartbeat", o.heartbeat)?,
        election_timeout_min: millis("an election timeout", o.election.0)?,
        election_timeout_max: millis("an election timeout", o.election.1)?,
        install_snapshot_timeout: millis("a timeout", o.timeout)?,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(every),
        snapshot_max_chunk_size: room.chunk as u64,
        max_in_snapshot_log_to_keep: stay,
        ..Config::default()
    };
    config.validate().map_err(|e| Error::Config(e.to_string()))
}

/// Fails unless the voters that a directory names are those of the configuration, or had
/// their places before: with other voters the file would make another cluster.
fn check_places(m: &Membership, links: &Links, o: &Options) -> Result<()> {
    if is_of_places(m, links) {
        return Ok(());
    }
    let names = |all: Vec<&str>| all.join(", ");
    Err(Error::Config(format!(
        "{}: the voters here are {}, those of the configuration are {}; they change by `mojim replace` alone. Take the configuration file of the other nodes",
        o.dir.display(),
        names(m.nodes().map(|(_, v)| &*v.name).collect()),
        names(o.voters.keys().map(|n| &**n).collect()),
    )))
}

/// Whether the voters of a log are those of the configuration, or had their places
/// before.
fn is_of_places(m: &Membership, links: &Links) -> bool {
    let votes = |id: &u64| m.voter_ids().any(|v| v == *id);
    let voters = m.nodes().filter(|(id, _)| votes(id));
    let places: Option<BTreeSet<u64>> = voters.map(|(_, v)| links.place_of(&v.name)).collect();
    places.is_some_and(|p| p.iter().eq(links.members().keys()))
}

/// What a leader has to propose next, so that the voters become those of the
/// configuration; `None` if nothing is left to do, or possible now.
fn next_change(now: &Metrics, links: &Links) -> Option<ChangeMembers<u64, Voter>> {
    let members = links.members();
    let m = &now.membership_config;
    if now.current_leader != Some(now.id) || !is_of_places(m, links) {
        return None;
    }
    let votes = |id: &u64| m.voter_ids().any(|v| v == *id);
    let is_known = |id: &u64| m.nodes().any(|(n, _)| n == id);
    if let Some((id, v)) = members.iter().find(|(id, _)| !is_known(id)) {
        return Some(ChangeMembers::AddNodes([(*id, v.clone())].into()));
    }
    // A replacement that was never started keeps no other one out.
    let sent = |id: &u64| now.replication.as_ref()?.get(id).copied().flatten();
    let has_all = |id: &u64| sent(id).is_some_and(|l| Some(l.index + STAY) >= now.last_log_index);
    let before = |id: u64| {
        let mut voters = m.nodes().filter(|(n, _)| votes(n));
        voters.find(|(_, v)| links.place_of(&v.name) == Some(id))
    };
    let wanted = members.keys().map(|id| match votes(id) || has_all(id) {
        true => *id,
        false => before(*id).map_or(*id, |(n, _)| *n),
    });
    let wanted: BTreeSet<u64> = wanted.collect();
    if m.membership().get_joint_config().as_slice() != [wanted.clone()] {
        return Some(ChangeMembers::ReplaceAllVoters(wanted));
    }
    // Learners of a replacement that was given up for another one.
    let strays = m.nodes().map(|(id, _)| *id);
    let strays: BTreeSet<u64> = strays
        .filter(|id| !votes(id) && !members.contains_key(id))
        .collect();
    (!strays.is_empty()).then_some(ChangeMembers::RemoveNodes(strays))
}

/// Whenever this voter leads, replaces voters by those of the configuration. Each of
/// these is sent the log before it counts.
async fn replace_voters(raft: Raft, links: Arc<Links>, heartbeat: Duration) {
    let mut metrics = raft.metrics();
    loop {
        let now = metrics.borrow_and_update().clone();
        let proposed = match next_change(&now, &links) {
            // The voters that are left out do not stay as learners.
            Some(change) => match raft.change_membership(change, false).await {
                Ok(_) => true,
                Err(RaftError::Fatal(_)) => return,
                Err(RaftError::APIError(_)) => false,
            },
            None => true,
        };
        if !proposed {
            // Another leads, or a change is under way.
            tokio::time::sleep(heartbeat).await;
        } else if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// Whenever this voter leads, admits the voters under whose names no directory votes, once
/// that is committed. The first time a majority of all is admitted at once; until then
/// nothing is read or swapped.
/// A voter that is not admitted helps nobody when another one is lost, so at first all are
/// waited for, `grace` long.
async fn admit_voters(
    raft: Raft,
    links: Arc<Links>,
    applied: Now,
    heartbeat: Duration,
    grace: Duration,
) {
    let mut metrics = raft.metrics();
    let mut since = Instant::now();
    let mut refusing = BTreeSet::new();
    loop {
        let now = metrics.borrow_and_update().clone();
        let m = &now.membership_config;
        let nodes = m.nodes().map(|(id, _)| *id);
        let unknown: Vec<u64> = nodes
            .filter(|id| links.is_vacant(links.name(*id), &applied))
            .collect();
        if now.current_leader != Some(now.id) || unknown.is_empty() {
            since = Instant::now();
            match metrics.changed().await {
                Ok(()) => continue,
                Err(_) => return,
            }
        }
        let mut met = meet(&links, unknown, heartbeat * 4, &mut refusing).await;
        // The log may have grown meanwhile.
        met.retain(|name, _| links.is_vacant(name, &applied));
        let votes = |name: &String| m.voter_ids().any(|v| v == number(name));
        let all = m.voter_ids().count();
        let most = match since.elapsed() < grace {
            true => all,
            false => all / 2 + 1,
        };
        let enough = met.keys().filter(|n| votes(n)).count() >= most;
        if may_write(&links, &met, &refusing, all, enough) {
            let met = met.into_iter().map(|(n, s)| (n, s.incarnation)).collect();
            // If another leads by now, or too few answer, it is for a later look.
            let _ = raft.client_write(RegisterCommand::Admit(met)).await;
        }
        tokio::time::sleep(heartbeat).await;
        if raft.metrics().borrow().running_state.is_err() {
            return;
        }
    }
}

/// Asks these voters, all at one time, with which directories they vote. Those that do not
/// answer are left out. `refusing` are those that have said that this voter does not count, and
/// nothing else since: who is silent now has not changed its mind.
pub(crate) async fn meet(
    links: &Arc<Links>,
    all: Vec<u64>,
    patience: Duration,
    refusing: &mut BTreeSet<u64>,
) -> BTreeMap<String, Said> {
    let asked = all.into_iter().map(|id| {
        let links = links.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let name = links.name(id);
            let said = links.who(id, patience)?;
            let may = links.may_admit(name, said.incarnation);
            Ok(may.then(|| (name.to_owned(), said)))
        });
        (id, asked)
    });
    let asked: Vec<_> = asked.collect();
    let mut met = BTreeMap::new();
    for (id, a) in asked {
        match a.await {
            Ok(Ok(one)) => {
                refusing.remove(&id);
                met.extend(one);
            }
            Ok(Err(Error::Stale(_))) => drop(refusing.insert(id)),
            Ok(Err(_)) | Err(_) => {}
        }
    }
    met
}

/// Whether this voter, which leads, may admit those that it has met; `enough`: they may begin the
/// register of `all` voters, if there is none. What refuses it is not asked of `links`: while it
/// leads it forgets again and again that it was refused, since that may have been one with
/// entries that nobody committed.
pub(crate) fn may_write(
    links: &Links,
    met: &BTreeMap<String, Said>,
    refusing: &BTreeSet<u64>,
    all: usize,
    enough: bool,
) -> bool {
    let may_begin = || refusing.is_empty() && enough && !links.is_beside(met, all / 2 + 1);
    !met.is_empty() && (!links.is_founding() || may_begin())
}

/// Gives this voter's directory up if it promises less than `teller` has heard of it.
fn compare(links: &Links, disk: &Weak<Disk>, heard: Promised, teller: &str) -> Result<()> {
    let disk = disk.upgrade().ok_or_else(stopped)?;
    if links.is_outdated() || disk.kept(|k| k.promised())? >= heard {
        return Ok(());
    }
    let why = links.outdated(teller);
    links.give_up(&why);
    disk.give_up(&why)
}

/// Asks the other voters, after the start, what they have heard of this one's directory: each
/// until it has answered. This voter takes part once all have, or after `patience`: a voter
/// that is away keeps no other one away.
async fn ask_heard(links: Arc<Links>, disk: Weak<Disk>, heartbeat: Duration, patience: Duration) {
    let mut silent = links.others();
    let begun = Instant::now();
    while !silent.is_empty() {
        let asked = silent.iter().map(|id| {
            let (links, disk, id) = (links.clone(), disk.clone(), *id);
            tokio::task::spawn_blocking(move || {
                let heard = links.ask_heard(id, heartbeat * 4);
                let Ok(heard) = heard else { return Some(id) };
                // If it cannot be noted, the disk has failed: then this voter ends.
                let _ = heard.map(|h| compare(&links, &disk, h, links.name(id)));
                None
            })
        });
        let asked: Vec<_> = asked.collect();
        let all = async {
            let mut left = Vec::new();
            for a in asked {
                left.extend(a.await.ok().flatten());
            }
            left
        };
        tokio::pin!(all);
        silent = match timeout_at(begun + patience, &mut all).await {
            Ok(left) => left,
            Err(_) => {
                links.confirm();
                all.await
            }
        };
        if !silent.is_empty() {
            tokio::time::sleep(heartbeat).await;
        }
    }
    links.confirm();
}

/// Elections of the longest kind after which a voter without a log, which others have told
/// to wait, begins one with whoever answers: they may be gone.
const OUTSIDE: u32 = 10;

/// Has this voter ask to lead only while it may. What may have been begun meanwhile does no
/// harm: it is one term.
async fn stand_where_admitted(raft: Raft, links: Arc<Links>, heartbeat: Duration, most: Duration) {
    loop {
        let now = raft.metrics().borrow().clone();
        if now.running_state.is_err() {
            return;
        }
        // One voter with entries that nobody committed may have said that it does not count.
        if now.current_leader == Some(now.id) {
            links.counts_again();
        }
        raft.runtime_config().elect(links.may_stand(most * OUTSIDE));
        tokio::time::sleep(heartbeat).await;
    }
}

/// Why a voter that leads answers nothing yet.
const FOUNDING: &str = "no majority of the voters has met yet";

fn stopped() -> Error {
    Error::Busy("the register of views is stopped here".into())
}

/// Runs `f` as a task and waits for it: unlike `block_on`, from any thread.
fn wait<T: Send + 'static>(
    on: &Handle,
    bound: Option<Duration>,
    f: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (tx, rx) = mpsc::sync_channel(1);
    on.spawn(async move {
        // Its caller may have gone on.
        let _ = tx.send(f.await);
    });
    let got = match bound {
        Some(bound) => rx.recv_timeout(bound),
        None => rx.recv().map_err(|_| RecvTimeoutError::Disconnected),
    };
    match got {
        Ok(r) => r,
        Err(RecvTimeoutError::Timeout) => Err(Error::Timeout(format!(
            "the register of views did not answer within {:?}",
            bound.unwrap_or_default()
        ))),
        Err(RecvTimeoutError::Disconnected) => Err(stopped()),
    }
}

impl Inner {
    fn leader(&self) -> Option<u64> {
        self.raft.metrics().borrow().current_leader
    }

    fn fatal(&self, e: &Fatal<u64>) -> Error {
        match (self.poison.get(), e) {
            (Some(why), _) => Error::Poisoned(why.clone()),
            (None, Fatal::Stopped) => stopped(),
            (None, e) => Error::Poisoned(format!("the register of views: {e}")),
        }
    }

    /// Whether this voter still takes part.
    fn check(&self) -> Result<()> {
        if let Some(why) = self.poison.get() {
            return Err(Error::Poisoned(why.clone()));
        }
        match &self.raft.metrics().borrow().running_state {
            Ok(()) => Ok(()),
            Err(e) => Err(self.fatal(e)),
        }
    }

    fn nobody(&self, why: &str) -> Error {
        Error::Timeout(format!(
            "the register of views was not reached within {:?}: {why}{}",
            self.timeout,
            self.links.troubles()
        ))
    }

    /// Waits until a leader other than `seen` is known, or for a heartbeat.
    async fn pause(&self, seen: Option<u64>, deadline: Instant) {
        let until = deadline.min(Instant::now() + self.heartbeat);
        // If the metrics have ended, the next check says why.
        let _ = timeout_at(until, self.leader_changed(seen)).await;
    }

    async fn leader_changed(&self, seen: Option<u64>) {
        let mut metrics = self.raft.metrics();
        while metrics.borrow_and_update().current_leader == seen {
            if metrics.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    async fn read_here(&self, volume: &str) -> Result<Here<Register>> {
        if self.links.is_founding() {
            return Ok(Here::Elsewhere(FOUNDING.into()));
        }
        match self.raft.ensure_linearizable().await {
            Ok(_) => Ok(Here::Done(self.now.read(volume))),
            Err(RaftError::APIError(CheckIsLeaderError::QuorumNotEnough(q))) => {
                Ok(Here::Elsewhere(self.too_few(q.got.len())))
            }
            Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(_))) => {
                Ok(Here::Elsewhere("this voter leads no more".into()))
            }
            Err(RaftError::Fatal(e)) => Err(self.fatal(&e)),
        }
    }

    /// A message that no majority confirms the leader. `got`: how many did, itself among
    /// them.
    fn too_few(&self, got: usize) -> String {
        let metrics = self.raft.metrics().borrow().clone();
        let all = metrics.membership_config.voter_ids().count();
        // While a voter is replaced both sets count, so the needed voters are not one number.
        format!(
            "{got} of {all} voters answer node {}, which leads them: too few",
            self.links.name(self.id)
        )
    }

    async fn swap_here(&self, s: Swap) -> Result<Here<bool>> {
        if !self.volumes.contains(&s.volume) {
            return Err(Error::Invalid(format!(
                "there is no volume {:?} with a register",
                s.volume
            )));
        }
        self.room.check(&s)?;
        let now = self.now.read(&s.volume);
        if !now.is_near(s.new.epoch) {
            return Err(Error::Invalid(format!(
                "epoch {} does not follow on epoch {} of volume {:?}: nobody can have come as far",
                s.new.epoch, now.epoch, s.volume
            )));
        }
        // openraft would refuse, too, but with the error that it also gives for an entry
        // that it lost with the leadership, and that may come back.
        if self.leader() != Some(self.id) {
            return Ok(Here::Elsewhere("this voter does not lead".into()));
        }
        if self.links.is_founding() {
            return Ok(Here::Elsewhere(FOUNDING.into()));
        }
        self.write(RegisterCommand::Swap(s)).await.map(Here::Done)
    }

    async fn write(&self, c: RegisterCommand) -> Result<bool> {
        match self.raft.client_write(c).await {
            Ok(r) => Ok(r.data),
            Err(RaftError::APIError(_)) => Err(fate_unknown("this voter leads no more")),
            Err(RaftError::Fatal(e)) => Err(self.fatal(&e)),
        }
    }

    /// Has the log say that the directory with which `voter` was admitted is lost. Nobody
    /// counts the voter from then on, so a majority without it has that entry before
    /// another directory is admitted.
    async fn retire_here(&self, voter: &str) -> Result<Here<Retired>> {
        if self.leader() != Some(self.id) {
            return Ok(Here::Elsewhere("this voter does not lead".into()));
        }
        let id = number(voter);
        if !self.links.members().contains_key(&id) {
            return Err(Error::NotFound(format!("node {voter} does not vote")));
        }
        let Some(incarnation) = self.links.present(voter) else {
            return Ok(Here::Done(Retired::Waits));
        };
        let (links, patience) = (self.links.clone(), self.heartbeat * 4);
        let who = tokio::task::spawn_blocking(move || links.who(id, patience)).await;
        if who.is_ok_and(|w| w.is_ok_and(|said| said.incarnation == incarnation)) {
            return Ok(Here::Done(Retired::Votes));
        }
        let voter = voter.to_owned();
        let retire = RegisterCommand::Retire { voter, incarnation };
        Ok(Here::Done(match self.write(retire).await? {
            true => Retired::Now,
            false => Retired::Waits,
        }))
    }

    /// Asks the leader. Ends early if it no longer leads.
    async fn forward(
        &self,
        to: u64,
        rpc: &'static str,
        mut body: Value,
        deadline: Instant,
    ) -> Asked {
        // The semaphore is never closed.
        let Ok(permit) = self.forwards.clone().acquire_owned().await else {
            return Asked::NotSent(stopped());
        };
        let left = deadline.saturating_duration_since(Instant::now());
        body["ms"] = json!(left.as_millis() as u64);
        let links = self.links.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            links.ask_once(to, rpc, body, left)
        });
        tokio::select! {
            r = asked => r.unwrap_or_else(|e| Asked::Unknown(Error::Protocol(e.to_string()))),
            () = self.leader_changed(Some(to)) => Asked::Unknown(Error::Protocol(format!(
                "voter {} leads no more",
                self.links.name(to)
            ))),
        }
    }

    async fn read(&self, volume: &str) -> Result<Register> {
        let deadline = Instant::now() + self.timeout;
        let mut why = "no voter leads".to_owned();
        loop {
            self.check()?;
            let leader = self.leader();
            let attempt = async {
                match leader {
                    Some(id) if id == self.id => self.read_here(volume).await,
                    Some(id) => {
                        let q = json!({ "volume": volume });
                        match self.forward(id, "forward-read", q, deadline).await {
                            Asked::Answer(v) => match elsewhere(&v) {
                                Some(why) => Ok(Here::Elsewhere(why)),
                                None => Ok(Here::Done(from_value(&v["done"])?)),
                            },
                            Asked::NotSent(e) | Asked::Unknown(e) => {
                                Ok(Here::Elsewhere(e.to_string()))
                            }
                        }
                    }
                    None => Ok(Here::Elsewhere("no voter leads".into())),
                }
            };
            match timeout_at(deadline, attempt).await {
                Ok(Ok(Here::Done(r))) => return Ok(r),
                Ok(Ok(Here::Elsewhere(w))) => why = w,
                Ok(Err(e)) => return Err(e),
                Err(_) => return Err(self.nobody(&why)),
            }
            self.pause(leader, deadline).await;
            if Instant::now() >= deadline {
                return Err(self.nobody(&why));
            }
        }
    }

    /// Asking again changes nothing: what is retired is named by its incarnation.
    async fn retire(&self, voter: &str) -> Result<Retired> {
        let deadline = Instant::now() + self.timeout;
        loop {
            self.check()?;
            let leader = self.leader();
            let attempt = async {
                match leader {
                    Some(id) if id == self.id => self.retire_here(voter).await,
                    Some(id) => {
                        let q = json!({ "voter": voter });
                        match self.forward(id, "forward-retire", q, deadline).await {
                            Asked::Answer(v) => match elsewhere(&v) {
                                Some(why) => Ok(Here::Elsewhere(why)),
                                None => Ok(Here::Done(from_value(&v["done"])?)),
                            },
                            Asked::NotSent(e) => Ok(Here::Elsewhere(e.to_string())),
                            Asked::Unknown(e) => Err(e),
                        }
                    }
                    None => Ok(Here::Elsewhere("no voter leads".into())),
                }
            };
            let why = match timeout_at(deadline, attempt).await {
                Ok(Ok(Here::Done(done))) => return Ok(done),
                Ok(Ok(Here::Elsewhere(why))) => why,
                // A refusal. Whatever else kept the answer away may not do so again.
                Ok(Err(e @ (Error::NotFound(_) | Error::Invalid(_) | Error::Stale(_)))) => {
                    return Err(e);
                }
                Ok(Err(e)) => e.to_string(),
                Err(_) => return Err(self.nobody("too few voters agree")),
            };
            self.pause(leader, deadline).await;
            if Instant::now() >= deadline {
                return Err(self.nobody(&why));
            }
        }
    }

    /// The voters' names, as far as this voter knows; during a change, both sets.
    async fn voters(&self) -> Result<Vec<String>> {
        self.check()?;
        if let Some(why) = self.links.refused() {
            return Err(Error::Stale(why));
        }
        let metrics = self.raft.metrics().borrow().clone();
        let m = metrics.membership_config;
        let votes = |id: &u64| m.voter_ids().any(|v| v == *id);
        let names = m.nodes().filter(|(id, _)| votes(id));
        Ok(names.map(|(_, v)| v.name.clone()).collect())
    }

    async fn swap(&self, s: Swap) -> Result<bool> {
        let deadline = Instant::now() + self.timeout;
        loop {
            self.check()?;
            self.room.check(&s)?;
            let leader = self.leader();
            let attempt = async {
                match leader {
                    Some(id) if id == self.id => self.swap_here(s.clone()).await,
                    Some(id) => {
                        let q = json!({ "volume": s.volume, "new": s.new });
                        match self.forward(id, "forward-swap", q, deadline).await {
                            Asked::Answer(v) => match (elsewhere(&v), v["done"].as_bool()) {
                                (Some(why), _) => Ok(Here::Elsewhere(why)),
                                (None, Some(done)) => Ok(Here::Done(done)),
                                (None, None) => Err(fate_unknown("the leader's answer is none")),
                            },
                            Asked::NotSent(e) => Ok(Here::Elsewhere(e.to_string())),
                            Asked::Unknown(e) => Err(fate_unknown(e)),
                        }
                    }
                    None => Ok(Here::Elsewhere("no voter leads".into())),
                }
            };
            let why = match timeout_at(deadline, attempt).await {
                Ok(Ok(Here::Done(done))) => return Ok(done),
                Ok(Ok(Here::Elsewhere(why))) => why,
                Ok(Err(e)) => return Err(e),
                Err(_) => return Err(fate_unknown(self.nobody("no answer"))),
            };
            self.pause(leader, deadline).await;
            if Instant::now() >= deadline {
                return Err(self.nobody(&why));
            }
        }
    }

    /// A question of Raft's tells how its sender has voted, in the sender's own name, and what
    /// the sender has heard of this voter's directory.
    fn exchange(&self, call: &RaftCall) -> Result<()> {
        if let Some(heard) = call.body.get("heard") {
            compare(&self.links, &self.disk, from_value(heard)?, &call.from)?;
            self.links.check_part()?;
        }
        let vote: Vote = from_value(&call.body["vote"])?;
        check_vote(&vote, &call.from)?;
        if let Some(life) = call.life {
            let promised = Promised::new(&vote, None);
            self.links.hear(number(&call.from), life, promised);
        }
        Ok(())
    }

    async fn answer(&self, call: RaftCall) -> Result<Value> {
        self.links.check(&call)?;
        self.check()?;
        let body = &call.body;
        let deadline = Instant::now() + self.timeout;
        let asked = body["ms"]
            .as_u64()
            .map_or(self.timeout, Duration::from_millis);
        let soon = deadline.min(Instant::now() + asked.min(self.timeout));
        let late = |_| Error::Timeout(format!("not within {asked:?}"));
        if let "append" | "vote" | "snapshot" | "who" = &*call.rpc
            && let Some(no) = self.links.check_lives(&call)?
        {
            return Ok(no);
        }
        if let "append" | "vote" | "snapshot" = &*call.rpc {
            self.exchange(&call)?;
        }
        match &*call.rpc {
            "who" => self.links.say_who(body),
            "heard" => {
                let heard = call.life.map(|l| self.links.heard(number(&call.from), l));
                Ok(json!({ "heard": heard.flatten() }))
            }
            "append" => {
                let q: AppendEntriesRequest<TypeConfig> = from_value(body)?;
                told(&self.raft.append_entries(q).await)
            }
            "vote" => {
                let q: VoteRequest<u64> = from_value(body)?;
                told(&self.raft.vote(q).await)
            }
            "snapshot" => {
                let q = unhex_snapshot(body)?;
                check_snapshot(&q)?;
                told(&self.raft.install_snapshot(q).await)
            }
            "forward-read" => {
                let volume = body["volume"].as_str().unwrap_or("");
                let read = timeout_at(soon, self.read_here(volume)).await;
                told(&read.map_err(late)??)
            }
            "forward-swap" => {
                let swap = timeout_at(soon, self.swap_here(from_value(body)?)).await;
                told(&swap.map_err(late)??)
            }
            "forward-retire" => {
                let voter = body["voter"].as_str().unwrap_or("");
                let retired = timeout_at(soon, self.retire_here(voter)).await;
                told(&retired.map_err(late)??)
            }
            rpc => Err(Error::Invalid(format!("no voter answers {rpc:?}"))),
        }
    }
}

/// Why a voter did not do what it was asked.
fn elsewhere(answer: &Value) -> Option<String> {
    Some(answer.get("elsewhere")?.as_str()?.to_owned())
}

fn told<T: Serialize>(v: &T) -> Result<Value> {
    serde_json::to_value(v).map_err(|e| Error::Protocol(e.to_string()))
}

impl ViewRegister for RaftViews {
    fn read(&self, volume: &str) -> Result<Register> {
        let (inner, volume) = (self.inner.clone(), volume.to_owned());
        self.run(async move { inner.read(&volume).await })
    }

    fn swap(&self, volume: &str, new: &Register) -> Result<bool> {
        let inner = self.inner.clone();
        let s = Swap {
            volume: volume.to_owned(),
            new: new.clone(),
        };
        self.run(async move { inner.swap(s).await })
    }

    fn voters(&self) -> Result<Vec<String>> {
        let inner = self.inner.clone();
        self.run(async move { inner.voters().await })
    }

    fn retire(&self, voter: &str) -> Result<Retired> {
        let (inner, voter) = (self.inner.clone(), voter.to_owned());
        self.run(async move { inner.retire(&voter).await })
    }

    fn hear(&self, call: RaftCall) -> Result<Value> {
        let inner = self.inner.clone();
        self.run(async move { inner.answer(call).await })
    }
}

#[cfg(test)]
impl RaftViews {
    /// Waits until the node's metrics are as `f` wants.
    pub(crate) fn until(&self, f: impl Fn(&Metrics) -> bool + Send + 'static) {
        let raft = self.inner.raft.clone();
        let seen = async move {
            let wait = raft.wait(Some(Duration::from_secs(180)));
            let seen = wait.metrics(f, "a test").await;
            seen.map_err(|e| Error::Timeout(e.to_string()))
        };
        let handle = lock(&self.runtime).as_ref().unwrap().handle().clone();
        wait(&handle, None, seen).unwrap();
    }

    /// The node's metrics.
    pub(crate) fn metrics(&self) -> Metrics {
        self.inner.raft.metrics().borrow().clone()
    }

    /// Whether its log names directories of all of these voters.
    pub(crate) fn knows(&self, all: &[String]) -> bool {
        all.iter().all(|n| self.inner.links.present(n).is_some())
    }

    /// This voter's own register, old as it may be.
    pub(crate) fn here(&self, volume: &str) -> Register {
        self.inner.now.read(volume)
    }
}

type Metrics = openraft::RaftMetrics<u64, Voter>;
