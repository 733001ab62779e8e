//! The answers of a node: status, views, and which request a peer may make.
//!
//! Owns the meaning of requests (`docs/reference/requests.md`, "Requests"). `lib.rs` accepts their
//! links. Other files have these requests:
//!
//! - `contents`: those about the bytes of data files.
//! - `readers`: those of readers.
//! - `promote`: `promote`.
//! - `heal`: `decide_open_tail` and `give_way`.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::time::Duration;

use mojim_format::message::checked;
use mojim_format::{Frame, FrameKind, State, Superblock};
use mojim_protocol::view::{Member, Register};
use serde_json::{Value, json};

use super::{Node, is_full};
use mojim_config::Volume;
use mojim_env::wire::Wire;
use mojim_env::{Error, Locker, OpenHow, Proof, Result, Space};
use mojim_replica::layout;
use mojim_replica::mirror::Mirror;
use mojim_replica::register::ViewRegister;
use mojim_replica::request::{CopyState, Holder, Post, Question, Request, Standing};
use mojim_store::area::Area;
use mojim_store::log::{LIVE_AT, LIVE_COUNT, Live};
use mojim_store::room;
use mojim_store::store::read_superblock;

/// How long a request may wait for its answer to change.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(1);

/// Most bytes of what a mount has left word of.
const MOST_SAID: u64 = 1024;

/// Whether a node did answer, but does not know the request or uses another form of
/// answer.
pub(super) fn speaks_otherwise(e: &Error) -> bool {
    match e {
        Error::Answered { errno, .. } => *errno == libc::EINVAL,
        Error::Protocol(_) => true,
        _ => false,
    }
}

/// Whether node `who` may ask for the view `new` in the place of `now`: the primary for every
/// change in which it stays the primary, any other node for none but that it leads alone (it
/// takes over, or is forced to by an operator or by `fallback`).
fn may_swap(now: &Register, new: &Register, who: &str) -> bool {
    let is = |m: &Option<Member>| m.as_ref().is_some_and(|m| m.node == who);
    let leads = now.version == 0 || is(&now.primary);
    is(&new.primary) && (leads || new.mirror.is_none())
}

fn copy_state(state: State) -> CopyState {
    match state {
        State::Empty => CopyState::Empty,
        State::Whole => CopyState::Whole,
        State::Switching => CopyState::Switching,
    }
}

impl Node {
    pub(super) fn serve_requests(self: &Arc<Node>, mut wire: Wire, f: Frame, body: Vec<u8>) {
        let mut next = Some((f, body));
        let mut idle = 0;
        loop {
            let (f, body) = match next.take() {
                Some(x) => x,
                None => match wire.take_frame() {
                    Ok(Some(x)) => x,
                    Ok(None) => {
                        // A link without a request for a minute makes room for others.
                        idle += 1;
                        if self.stopping.load(Acquire) || idle > 120 {
                            break;
                        }
                        if wire
                            .conn
                            .wait(false, Duration::from_millis(500))
                            .unwrap_or(true)
                        {
                            idle = 0;
                        }
                        continue;
                    }
                    Err(_) => break,
                },
            };
            // Bytes that follow the answer's text.
            let mut more = Vec::new();
            let asked = checked(&body).ok().filter(|_| f.kind == FrameKind::Request);
            let answer = match asked.map(serde_json::from_slice::<Question>) {
                Some(Ok(q)) => match self.answer(q, &wire.conn.proof(), &mut more) {
                    Ok(v) => json!({ "ok": v }),
                    Err(e) => json!({ "error": e.to_string(), "errno": e.errno() }),
                },
                Some(Err(e)) if e.is_data() => {
                    json!({ "error": format!("no such request: {e}"), "errno": libc::EINVAL })
                }
                _ => json!({ "error": "not a request", "errno": libc::EPROTO }),
            };
            let mut bytes = answer.to_string().into_bytes();
            if !more.is_empty() {
                bytes.push(0);
                bytes.extend_from_slice(&more);
            }
            let crc = mojim_format::crc32c(&bytes);
            bytes.extend_from_slice(&crc.to_le_bytes());
            wire.queue(FrameKind::Response, 0, 0, 0, &bytes);
            loop {
                match wire.flush() {
                    Ok(true) => break,
                    Ok(false) => {
                        let _ = wire.conn.wait(true, Duration::from_millis(500));
                        if self.stopping.load(Acquire) {
                            return;
                        }
                    }
                    Err(_) => return,
                }
            }
        }
        wire.conn.close();
    }

    /// Whether a peer may make this request. The name that it gives itself must be the
    /// one that it has proved.
    pub(super) fn may_ask(&self, q: &Request, proof: &Proof) -> Result<()> {
        let no = |why: String| {
            Err(Error::Io {
                what: "refused".into(),
                errno: libc::EACCES,
                error: why,
            })
        };
        let holds = |name: &str, volume: &str| {
            let volume = self.config.volumes.get(volume);
            volume.is_some_and(|v| v.data_nodes().contains(&name))
        };
        match (q, proof) {
            (
                _,
                Proof::Node {
                    encrypted: false, ..
                }
                | Proof::Client { encrypted: false },
            ) => no("requests are asked over encrypted links".into()),
            (Request::Raft(_) | Request::ViewSwap { .. }, Proof::Client { .. }) => {
                no("this is for nodes, and a client's certificate asks".into())
            }
            // Whoever is on this host reaches its loopback; the kernel says who is at a Unix socket.
            (q, Proof::Nothing) if q.is_order() && self.me.address.ip().is_loopback() => {
                no(format!(
                    "without keys, node {} takes this over {} only, from its own user or root",
                    self.me.name,
                    layout::socket(&self.me).display()
                ))
            }
            (Request::Read(_), proof) if *proof != Proof::Local => no(
                "readers are served over the node's Unix socket only: run them on the node".into(),
            ),
            // Repeated requests would keep the daemon from healing.
            (Request::GiveWay { .. }, proof) if *proof != Proof::Local => {
                no("a daemon gives way to programs of its own node".into())
            }
            (Request::Raft(call), Proof::Node { name, .. }) if *name != call.from => no(format!(
                "node {name}, by its certificate, speaks as {:?}",
                call.from
            )),
            (
                Request::ViewSwap { volume, .. } | Request::Page { volume, .. },
                Proof::Node { name, .. },
            ) if !holds(name, volume) => no(format!("node {name} holds no copy of {volume:?}")),
            _ => Ok(()),
        }
    }

    fn answer(self: &Arc<Node>, q: Question, proof: &Proof, more: &mut Vec<u8>) -> Result<Value> {
        self.may_ask(&q.request, proof)?;
        if q.cluster != self.config.cluster {
            return Err(Error::Invalid(format!(
                "this is cluster {:?}, not {:?}",
                self.config.cluster, q.cluster
            )));
        }
        match q.request {
            Request::Pulse => Ok(json!(true)),
            Request::Status { volume, register } => {
                // If a volume is named, only its register is read.
                let asked = match volume {
                    Some(volume) => vec![self.held(&volume)?],
                    None => self.volumes(),
                };
                self.status_of(&asked, register)
            }
            Request::Standing { volume } => Ok(json!(self.standing(&self.held(&volume)?))),
            Request::Settle { volume } => {
                self.decide_open_tail(&self.held(&volume)?).map(Value::Bool)
            }
            Request::Post { volume, wait } => {
                let wait = Duration::from_millis(wait).min(MAX_WAIT);
                Ok(json!(self.await_post(&self.held(&volume)?, wait)?))
            }
            Request::ViewRead { volume } => {
                let v = self.known(&volume)?;
                Ok(json!(self.voted(&v)?.read(&v.name)?))
            }
            Request::ViewSwap { volume, new } => {
                let v = self.known(&volume)?;
                self.check_members(&v, &new, proof)?;
                Ok(json!(self.voted(&v)?.swap(&v.name, &new)?))
            }
            Request::Holders { volume } => Ok(json!(self.holders(&self.held(&volume)?))),
            Request::Voters => Ok(json!(self.voters()?.voters()?)),
            Request::Retire { voter } => Ok(json!(self.voters()?.retire(&voter)?)),
            Request::Reload { sum } => self.reload(sum),
            Request::Raft(call) => match &self.views {
                Some(views) => views.hear(call),
                None => Err(Error::Invalid(format!("{} does not vote", self.me.name))),
            },
            Request::Promote { volume, force } => self.promoted(&self.held(&volume)?, force),
            Request::Files {
                volume,
                since,
                part,
            } => self.files(&self.held(&volume)?, since, part),
            Request::Sums {
                volume,
                id,
                offset,
                pages,
            } => self.sums(&self.held(&volume)?, id, offset, pages),
            Request::Page {
                volume,
                id,
                offset,
                since,
            } => self.page(&self.held(&volume)?, id, offset, since),
            Request::Read(q) => self.read(&self.held(&q.volume)?, &q, more),
            Request::Rewrite { volume, id, offset } => {
                self.rewrite(&self.held(&volume)?, id, offset)
            }
            Request::GiveWay { volume } => Ok(json!(self.give_way(&self.held(&volume)?))),
            Request::CopyAnew { volume, epoch } => self.copy_anew(&self.held(&volume)?, epoch),
        }
    }

    /// The voters, where there are enough for a register.
    fn voters(&self) -> Result<&Arc<dyn ViewRegister>> {
        let none = || Error::Invalid("fewer than three nodes vote".into());
        self.views.as_ref().ok_or_else(none)
    }

    /// A volume that this node holds.
    fn held(&self, name: &str) -> Result<Volume> {
        let held = self.held.get(name).map(|h| h.volume.clone());
        held.ok_or_else(|| Error::NotFound(format!("node {} has no volume {name:?}", self.me.name)))
    }

    /// A volume of the cluster, whichever nodes hold it.
    fn known(&self, name: &str) -> Result<Volume> {
        let volume = self.config.volumes.get(name).cloned();
        volume.ok_or_else(|| Error::NotFound(format!("there is no volume {name:?}")))
    }

    /// The status of this node and of the volumes `asked`. `register`: also what the
    /// register says of them; a caller that leaves this out does not wait for the end of
    /// an election.
    fn status_of(&self, asked: &[Volume], register: bool) -> Result<Value> {
        let all = asked.iter().map(|v| self.status(v, register));
        let all: Result<Vec<Value>> = all.collect();
        let sum = self.config.sum();
        let mut out = json!({
            "node": self.me.name,
            "config": sum,
            "failure_limit_ms": self.config.failure_limit.as_millis() as u64,
            "free": mojim_linux::free_bytes(&self.me.directory).ok(),
            "volumes": all?,
        });
        if let Some(why) = self.votes_not() {
            out["vote_error"] = json!(why);
        }
        Ok(out)
    }

    /// Why this node's part in the register of views does not take part now.
    fn votes_not(&self) -> Option<String> {
        match self.views.as_ref()?.voters() {
            Err(e @ (Error::Poisoned(_) | Error::Full(_) | Error::Stale(_))) => Some(e.cause()),
            _ => None,
        }
    }

    /// Fails unless `new` can be a view of the volume.
    fn check_members(&self, v: &Volume, new: &Register, proof: &Proof) -> Result<()> {
        let members = [&new.primary, &new.mirror];
        let names = || members.into_iter().flatten().map(|m| &*m.node);
        let mut known = names().all(|n| v.data_nodes().contains(&n));
        if !known && names().all(|n| self.config.held(v, n)) {
            // A node that was replaced may stay in a view, but not enter one.
            let now = self.voted(v)?.read(&v.name)?;
            let stays = |new: &Option<Member>, now: &Option<Member>| {
                new.as_ref()
                    .is_none_or(|m| v.data_nodes().contains(&&*m.node) || Some(m) == now.as_ref())
            };
            known = stays(&new.primary, &now.primary) && stays(&new.mirror, &now.mirror);
        }
        let mut may = true;
        if let Proof::Node { name, .. } = proof {
            let now = self.voted(v)?.read(&v.name)?;
            may = may_swap(&now, new, name);
        }
        match known {
            true if may => Ok(()),
            true => Err(Error::Invalid(format!(
                "a view of volume {} is not changed so by a node that is not in it",
                v.name
            ))),
            false => Err(Error::Invalid(format!(
                "this cannot be a view of volume {}",
                v.name
            ))),
        }
    }

    /// The other nodes that hold a volume, by this daemon's configuration: for a program
    /// that attached before one of them was replaced.
    fn holders(&self, v: &Volume) -> Vec<Holder> {
        let peers = layout::others(&self.config, &self.me, v);
        peers.iter().map(Holder::from).collect()
    }

    /// Reads the configuration file again, and reloads if its contents have this sum.
    fn reload(&self, sum: u64) -> Result<Value> {
        let path = &self.config.path;
        let new = mojim_linux::trust::load(path)?;
        if u64::from(new.sum()) != sum {
            return Err(Error::Config(format!(
                "{} on node {} is another configuration; copy the new one there first",
                path.display(),
                self.me.name
            )));
        }
        if new == self.config {
            return Ok(json!({ "reloads": false }));
        }
        match self.reloads.get() {
            Some(f) => f(new),
            None => return Err(Error::Invalid("this node does not reload".into())),
        }
        Ok(json!({ "reloads": true }))
    }

    /// The register of a volume, which must have one.
    fn voted(&self, v: &Volume) -> Result<Arc<dyn ViewRegister>> {
        self.register(v).ok_or_else(|| {
            Error::Invalid(format!(
                "the views of volume {} are not in a register: `failover` is manual, or there are fewer than three voters",
                v.name
            ))
        })
    }

    /// [`Node::post`] as soon as a program may start here, or after `wait`.
    fn await_post(&self, v: &Volume, wait: Duration) -> Result<Post> {
        let end = self.env.now() + wait;
        loop {
            let seen = self.handed.load(SeqCst);
            let post = self.post(v)?;
            let left = end.saturating_sub(self.env.now());
            if post.ready || left.is_zero() || self.stopping.load(Acquire) {
                return Ok(post);
            }
            let changed = || self.handed.load(SeqCst) != seen || self.stopping.load(Acquire);
            self.posts.wait_unless(changed, left);
        }
    }

    /// Whether a program may start here: the register names this node, and its
    /// copy is free and of that view.
    fn post(&self, v: &Volume) -> Result<Post> {
        let reg = self.voted(v)?.read(&v.name)?;
        let primary = reg.primary.as_ref().map(|p| p.node.clone());
        let meta = layout::meta_dir(&self.me, &v.name);
        let sb = read_superblock(&*self.env, &meta)?;
        let view = sb.map(|sb| sb.view).filter(|view| view.epoch > 0);
        let ready = match (&primary, view) {
            (Some(p), Some(view)) => {
                *p == self.me.name && view.primary == self.me.name && !self.of(v).is_open()
            }
            // This node is the register's primary, but its copy is gone: an attach
            // fetches the mirror's. If the configuration names another node, this node
            // has its copy open to follow.
            (Some(p), None) => *p == self.me.name && v.primary == *p,
            (None, _) => v.primary == self.me.name,
        };
        Ok(Post { primary, ready })
    }

    /// Live figures of the program attached here, from its ring's memory.
    pub(super) fn live(&self, v: &Volume) -> Option<[u64; LIVE_COUNT]> {
        let spec = &layout::logs(&self.config, &self.me, v)[0];
        let path = match spec.medium {
            mojim_config::MediumKind::Disk => &spec.ring,
            _ => &spec.path,
        };
        let f = self.env.open(path, OpenHow::default()).ok()?;
        let mut b = [0u8; 8 * LIVE_COUNT];
        (f.read_at(&mut b, LIVE_AT as u64).ok()? == b.len())
            .then(|| std::array::from_fn(|i| mojim_format::bytes::u64_at(&b, i * 8)))
    }

    /// Whether a program is attached here as primary: it holds the lock. This node itself opens and
    /// closes the copy at any time, so only the lock says which of the two has it.
    pub(super) fn attached(&self, v: &Volume) -> bool {
        self.locker(v) == Some(Locker::Program)
    }

    /// Whether this node's copy cannot be opened now: a program is attached, or this node
    /// has a look at it.
    pub(super) fn in_use(&self, v: &Volume) -> bool {
        !self.of(v).is_open() && self.locker(v).is_some()
    }

    /// Which kind of holder has this node's copy.
    pub(super) fn locker(&self, v: &Volume) -> Option<Locker> {
        let path = layout::meta_dir(&self.me, &v.name).join("lock");
        self.env.locker(&path).ok().flatten()
    }

    /// This node's role in the volume, by its superblock and the primary that it follows.
    pub(super) fn role(
        &self,
        v: &Volume,
        sb: Option<&Superblock>,
        m: Option<&Mirror>,
    ) -> &'static str {
        let view = sb.map(|sb| &sb.view).filter(|view| view.epoch > 0);
        let primary = view.map_or(&v.primary, |view| &view.primary);
        let mirror = view.map(|view| &view.mirror);
        if *primary == self.me.name {
            "primary"
        } else if mirror == Some(&self.me.name) {
            "mirror"
        } else if v.backups.contains(&self.me.name)
            || m.is_some_and(|m| m.is_backup())
            // The view has another mirror.
            || mirror.is_some_and(|m| !m.is_empty())
        {
            "backup"
        } else {
            "mirror"
        }
    }

    /// Adds what is free for the volume's data files, and what of that programs do not get.
    /// Adds nothing if the file system counts no blocks.
    fn status_of_room(&self, v: &Volume, out: &mut Value) {
        let path = &self.me.directory;
        let space = self.env.space(path).unwrap_or(Space::UNBOUNDED);
        if space.bytes == u64::MAX {
            return;
        }
        let needs = room::reserve(&*self.env, &layout::meta_dir(&self.me, &v.name));
        let path = path.display().to_string();
        out["room"] = json!({ "free": space.bytes, "needs": needs, "path": path });
        if space.files < u64::MAX {
            out["room"]["files"] = json!(space.files);
            out["room"]["needs_files"] = json!(room::RESERVED_FILES);
        }
    }

    /// What a look from outside finds wrong with a copy that nobody has open. Until a
    /// program needs it, nobody else opens a copy that was closed in order.
    fn seen_damaged(&self, v: &Volume, sb: &Superblock) -> Option<String> {
        if sb.state != State::Whole {
            return None;
        }
        let spec = self.spec(v);
        let clean = sb.logs == 0;
        let seen = Area::look(
            &self.env,
            &spec.dir,
            &spec.meta,
            (sb.volume_id, sb.checkpoint),
            clean,
        );
        let why = seen.err()?.to_string();
        // A process may use the copy, or have used it meanwhile.
        let now = read_superblock(&*self.env, &spec.meta).ok().flatten();
        let same = now.is_some_and(|now| now.sequence == sb.sequence);
        (same && !self.in_use(v)).then_some(why)
    }

    /// What this node's copy has.
    fn standing(&self, v: &Volume) -> Standing {
        let mirror = self.of(v).mirror();
        let sb = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name));
        self.standing_of(v, &sb, mirror.as_deref())
    }

    fn standing_of(
        &self,
        v: &Volume,
        sb: &Result<Option<Superblock>>,
        mirror: Option<&Mirror>,
    ) -> Standing {
        let none = Standing {
            state: CopyState::New,
            epoch: 0,
            primary: String::new(),
            last_lsn: 0,
            checkpoint: 0,
            persistent: false,
            attached: None,
            distrusted: false,
            error: None,
            known: None,
        };
        match sb {
            Ok(Some(sb)) => match mirror {
                Some(m) => self.standing_of_open(sb, m),
                None => self.standing_of_closed(v, sb),
            },
            Ok(None) => Standing {
                error: self.noted(v, None).map(|e| e.cause()),
                ..none
            },
            // This node answers all the same, also for its other volumes.
            Err(e) => Standing {
                state: CopyState::Damaged,
                error: Some(e.to_string()),
                ..none
            },
        }
    }

    /// The standing of a copy that this node has open to follow.
    fn standing_of_open(&self, sb: &Superblock, m: &Mirror) -> Standing {
        let state = match sb.state {
            _ if m.store.is_loading() => CopyState::Loading,
            state => copy_state(state),
        };
        Standing {
            state,
            epoch: sb.view.epoch,
            primary: sb.view.primary.clone(),
            last_lsn: m.tail(),
            checkpoint: sb.checkpoint,
            persistent: m.store.level().is_persistent(),
            attached: None,
            distrusted: m.is_distrusted(),
            error: m.store.check().err().map(|e| e.cause()),
            known: m.knows(sb).map(Into::into),
        }
    }

    /// The standing of a copy that a program has open, or nobody.
    fn standing_of_closed(&self, v: &Volume, sb: &Superblock) -> Standing {
        // That this node heals is noted before it attaches, and for a moment after it has detached: by then
        // a program may have the copy.
        let attached = self.attached(v);
        let healing = self.is_healing(v);
        let copy_error = || {
            let noted = self.noted(v, Some(sb.sequence)).map(|e| e.cause());
            noted.or_else(|| self.seen_damaged(v, sb))
        };
        let left = sb.logs != 0 && !attached && !healing;
        let left_tail = self.left_tail(v, sb.sequence).flatten().filter(|_| left);
        let live = self.live(v).filter(|_| sb.logs != 0);
        let live = |what: Live| live.map(|l| l[what as usize]);
        let last = live(Live::Last).filter(|last| *last >= sb.checkpoint);
        Standing {
            state: copy_state(sb.state),
            epoch: sb.view.epoch,
            primary: sb.view.primary.clone(),
            last_lsn: left_tail.or(last).unwrap_or(sb.checkpoint),
            checkpoint: sb.checkpoint,
            persistent: false,
            attached: attached.then(|| last.and_then(|_| live(Live::Pid)).unwrap_or(0)),
            distrusted: false,
            error: (!attached && !healing).then(copy_error).flatten(),
            known: None,
        }
    }

    /// All that is known of a volume here, for `mojim status`.
    fn status(&self, v: &Volume, register: bool) -> Result<Value> {
        // A copy that is kept open for the next look counts as used: its files could not be
        // compared with its catalogue, and `verify`, which asks this last, named no unmanaged files.
        self.end_look(v);
        let mirror = self.of(v).mirror();
        let sb = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name));
        let s = self.standing_of(v, &sb, mirror.as_deref());
        let sb = sb.ok().flatten();
        let mut out = json!({
            "volume": v.name,
            "mode": v.mode.to_string(),
            "settings": {
                "connections": v.connections, "primary": v.primary, "mirror": v.mirror,
            },
            "node": self.me.name,
            "role": self.role(v, sb.as_ref(), mirror.as_deref()),
            "state": s.state,
        });
        self.status_of_room(v, &mut out);
        if let Some(why) = self.run_failed(v) {
            out["run_failed"] = json!(why);
        }
        if let Some(e) = s.error {
            out["error"] = json!(e);
            let sequence = sb.as_ref().map(|sb| sb.sequence);
            let why = match &mirror {
                Some(m) => m.store.check().err(),
                None => self.noted(v, sequence),
            };
            // A copy that follows goes on by itself when there is room.
            let follows = out["role"] != "primary" && s.state != CopyState::Damaged;
            if follows && why.is_some_and(|e| is_full(&e)) {
                out["full"] = json!(true);
            }
        }
        out["since"] = self.of(v).known().conditions.since();
        let Some(sb) = sb else {
            return Ok(out);
        };
        if sb.state == State::Whole
            && out["error"].is_null()
            && let Some(unmanaged_files) = self.unmanaged_files(v)
        {
            out["strangers"] = unmanaged_files;
        }
        out["epoch"] = json!(sb.view.epoch);
        out["promised"] = json!(sb.promised);
        out["life"] = json!(sb.life);
        out["ring_lost"] = json!(sb.ring_lost);
        out["view"] = json!({ "primary": sb.view.primary, "mirror": sb.view.mirror });
        out["checkpoint"] = json!(sb.checkpoint);
        out["last_lsn"] = json!(s.last_lsn);
        out["attached"] = json!(s.attached.is_some());
        if s.distrusted {
            out["distrusted"] = json!(true);
        }
        if register && let Some(views) = self.register(v) {
            out["register"] = match views.read(&v.name) {
                Ok(r) => json!(r),
                Err(e) => json!({ "error": e.to_string() }),
            };
        }
        match mirror {
            Some(m) => self.status_of_open(v, &m, &sb, &mut out),
            None => self.status_of_closed(v, &sb, s.attached, &mut out),
        }
        Ok(out)
    }

    /// What the last mount of programs under `mojim run` could not commit, or of what it died, until
    /// the next one is made.
    fn run_failed(&self, v: &Volume) -> Option<String> {
        use std::io::Read;
        let path = layout::runs_dir(&self.me, &v.name).join(layout::RUN_FAILED);
        let mut text = Vec::new();
        let file = std::fs::File::open(path).ok()?;
        file.take(MOST_SAID).read_to_end(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    fn status_of_open(&self, v: &Volume, m: &Mirror, sb: &Superblock, out: &mut Value) {
        if let Some(c) = m.store.progress.get(self.env.now()) {
            out["copy"] = json!({
                "running": c.running,
                "direction": if c.incoming { "in" } else { "out" },
                "done": c.done,
                "total": c.total,
                "moved": c.moved,
                "kept": c.kept,
                "seconds": c.time.as_secs_f64(),
            });
        }
        if let Some(why) = &self.of(v).known().stays {
            out["take_over_error"] = json!(why);
        }
        out["committed"] = json!(m.committed());
        out["applied"] = json!(m.store.applied());
        out["level"] = json!(if m.store.level().is_persistent() {
            "persistent"
        } else {
            "received"
        });
        out["link"] = match m.live_primary() {
            Some((ago, who)) => {
                json!({
                    "up": true,
                    "primary": who,
                    "from": m.greeted(),
                    "heard_ms": ago.as_millis() as u64,
                })
            }
            None => json!({ "up": false }),
        };
        let uncopied = self.of(v).known().uncopied.clone();
        if let Some((when, why)) = uncopied
            && out["link"]["up"] == false
            && !m.store.is_loading()
        {
            let ago = self.env.now().saturating_sub(when).as_secs();
            out["copy_error"] = json!({ "text": why, "seconds_ago": ago });
        }
        let mut backups = m.backups.progress();
        backups.retain(|b| b.name != sb.view.primary);
        // Only the mirror forwards; other followers report no backups.
        if !backups.is_empty() && out["role"] == "mirror" {
            let rows = backups.iter().map(|b| {
                json!({
                    "node": b.name,
                    "active": b.active.load(Acquire),
                    "counts": b.counts(),
                    "acked": b.acked.load(Acquire),
                    "copies": b.copies.load(Acquire),
                    "lag": b.lag(&m.store),
                })
            });
            out["backups"] = rows.collect();
            out["backup_lag"] = json!(m.backups.lag(&m.store));
        }
    }

    fn status_of_closed(
        &self,
        v: &Volume,
        sb: &Superblock,
        attached: Option<u64>,
        out: &mut Value,
    ) {
        let healing = attached.is_none() && self.is_healing(v);
        if healing {
            out["healing"] = json!(true);
        }
        let unhealed = self.of(v).known().unhealed.clone();
        if let Some(why) = unhealed {
            out["heal_error"] = json!(why);
        }
        if sb.logs == 0 {
            return;
        }
        if attached.is_none() && !healing {
            match self.left_tail(v, sb.sequence) {
                // The `rings` thread has not looked yet at what a program left.
                None => out["settling"] = json!(true),
                Some(Some(_)) => return,
                Some(None) => {}
            }
        }
        let Some(l) = self.live(v) else { return };
        let live = |what: Live| l[what as usize];
        if live(Live::Last) < sb.checkpoint {
            return;
        }
        out["committed"] = json!(live(Live::Committed));
        out["acked"] = json!(live(Live::Acked));
        out["persisted"] = json!(live(Live::Persisted));
        out["applied"] = json!(live(Live::Applied));
        if live(Live::Losses) != 0 {
            out["last_risk"] = json!({
                "bytes": live(Live::LastRisk),
                "milliseconds": live(Live::LastRiskTime) as f64 / 1000.0,
            });
        }
        let Some(pid) = attached else { return };
        if live(Live::Failed) != 0 {
            out["failed"] = json!(true);
        }
        if live(Live::NoRoom) != 0 {
            out["waits_for_room"] = json!(true);
        }
        match pid {
            0 => out["attaching"] = json!(true),
            _ => out["pid"] = json!(pid),
        }
        if live(Live::AtRisk) != 0 {
            out["at_risk_bytes"] = json!(live(Live::AtRisk));
        }
        out["bytes_behind"] = json!(live(Live::BytesBehind));
        out["link"] = json!({
            "up": live(Live::LinkUp) == 1,
            "round_trip_us": live(Live::RoundTrip) as f64 / 1000.0,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A backup's certificate was as good as the mirror's: it could put any two nodes of the
    /// volume into the view.
    #[test]
    fn a_node_changes_no_view_but_its_own() {
        let m = |n: &str| {
            Some(Member {
                node: n.into(),
                incarnation: 1,
            })
        };
        let view = |version, epoch, primary, mirror| Register {
            version,
            epoch,
            primary,
            mirror,
            promised: 0,
        };
        let now = view(3, 4, m("a"), m("b"));
        // The primary goes on alone, raises and admits.
        for new in [view(4, 4, m("a"), None), view(4, 9, m("a"), m("c"))] {
            assert!(may_swap(&now, &new, "a"));
            assert!(!may_swap(&now, &new, "b") && !may_swap(&now, &new, "c"));
        }
        // The mirror takes over; a backup is forced.
        assert!(may_swap(&now, &view(4, 9, m("b"), None), "b"));
        assert!(may_swap(&now, &view(4, 9, m("c"), None), "c"));
        assert!(!may_swap(&now, &view(4, 9, m("c"), m("a")), "c"));
    }

    /// A primary's node of an earlier version, which does not know `standing`, counted as
    /// silent: its mirror was promoted beside it.
    #[test]
    fn a_node_of_another_version_is_there() {
        let answered = |errno| Error::Answered {
            errno,
            text: "unknown request \"standing\"".into(),
        };
        assert!(speaks_otherwise(&answered(libc::EINVAL)));
        assert!(speaks_otherwise(&Error::Protocol("other words".into())));
        // It has no such volume, is not reached, or is late.
        assert!(!speaks_otherwise(&answered(libc::ENOENT)));
        assert!(!speaks_otherwise(&Error::Timeout("late".into())));
        let refused = std::io::Error::from_raw_os_error(libc::ECONNREFUSED);
        assert!(!speaks_otherwise(&Error::io("connecting", &refused)));
    }
}
