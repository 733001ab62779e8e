//! Promotion of this node by `mojim promote`: through the register, or without one.
//!
//! Owns the request `promote` (`docs/reference/requests.md`, "Requests"): what it asks the other
//! nodes, and what it checks here. `mojim_protocol::promotion` judges whether a promotion
//! without a register is allowed.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use mojim_format::{State, Superblock};
use mojim_protocol::promotion::{Asked, Candidate, Other, Refusal, contested, judge, outdone};
use mojim_protocol::view::{Member, Register};
use serde_json::{Value, json};
use tracing::{info, warn};

use super::requests::speaks_otherwise;
use super::volume_state::Promotion;
use super::{Node, wait_for_last};
use mojim_config::Volume;
use mojim_env::{Error, Locker, Result};
use mojim_replica::holders::Peer;
use mojim_replica::layout;
use mojim_replica::mirror::Mirror;
use mojim_replica::mirror::promote::check_primary;
use mojim_replica::register::ViewRegister;
use mojim_replica::request::{CopyState, Request, Standing};
use mojim_replica::told::disbelieved;
use mojim_store::log::Live;
use mojim_store::store::{Store, read_superblock};

/// How long to wait for a copy that a program has open without serving it.
const OPEN_PATIENCE: Duration = Duration::from_secs(5);

/// The same where this node itself looks at it, for instance while it makes a dead program's
/// records persistent: as long as its disk takes.
const LOOK_PATIENCE: Duration = Duration::from_secs(60);

/// How often a node that is there, and late, is asked what it has.
const TRIES: usize = 3;

/// How long a copy must have been open before it counts as served. Until then its ring
/// may still hold the figures of a dead program.
const SERVED_AFTER: Duration = Duration::from_secs(2);

/// A node's own copy, to be checked.
enum Own {
    /// The copy that this node has open to follow.
    Kept(Arc<Mirror>),
    Opened(Box<Store>),
}

/// What this node's own copy knows of its part in the newest view.
enum OwnRole {
    /// It is the primary, and a program is attached.
    Used,
    /// It is the primary.
    Primary,
    /// Another node is, or nobody has been yet.
    Other,
}

/// How long the request to promote waits for the promotion; then it says how far that is.
const ANSWER_AFTER: Duration = Duration::from_secs(5);
/// How long the outcome of a promotion is kept for whoever asks again.
const KEPT: Duration = Duration::from_secs(30);

impl Node {
    /// Promotes, or goes on with a promotion that was asked for before. The answer says how far
    /// it is, if it is not over soon: before a node can be primary it applies what waits, which
    /// may take longer than anybody waits for an answer.
    pub(super) fn promoted(self: &Arc<Node>, v: &Volume, force: bool) -> Result<Value> {
        let p = self.promotion(v, force)?;
        let is_over = || p.outcome().is_some() || self.stopping.load(Acquire);
        let end = self.env.now() + ANSWER_AFTER;
        while !is_over() && self.env.now() < end {
            p.over.wait_unless(is_over, Duration::from_millis(100));
        }
        if let Some((_, done)) = p.outcome() {
            let mut known = self.of(v).known();
            // Unless another one was begun meanwhile.
            known.promotion.take_if(|now| Arc::ptr_eq(now, &p));
            return done;
        }
        let m = self.of(v).mirror_now();
        Ok(json!({
            "promoting": true,
            "applied": m.as_ref().map(|m| m.store.applied()),
            "last_lsn": m.as_ref().map(|m| m.tail()),
        }))
    }

    /// The promotion of a volume: the one that goes on, or whose outcome nobody has asked for yet,
    /// or a new one, in a thread of its own.
    fn promotion(self: &Arc<Node>, v: &Volume, force: bool) -> Result<Arc<Promotion>> {
        let mut known = self.of(v).known();
        let now = self.env.now();
        let is_old = |p: &Promotion| p.outcome().is_some_and(|(at, _)| now - at >= KEPT);
        if let Some(p) = known.promotion.as_ref().filter(|p| !is_old(p)) {
            if p.force == force {
                return Ok(p.clone());
            }
            if p.outcome().is_none() {
                return Err(Error::Busy(
                    "another promotion of this volume goes on; look again".into(),
                ));
            }
        }
        let p = Arc::new(Promotion::new(force));
        known.promotion = Some(p.clone());
        drop(known);
        let (node, volume, its) = (self.clone(), v.clone(), p.clone());
        let begun = self.spawn("promote", move || {
            its.end(node.env.now(), node.promote(&volume, force));
        });
        if let Err(e) = begun {
            p.end(now, Err(e));
        }
        Ok(p)
    }

    /// Makes this node primary through the register. `force`: also if it is not a member
    /// of the view, on the operator's word.
    fn promote_by_register(
        self: &Arc<Node>,
        v: &Volume,
        views: &dyn ViewRegister,
        force: bool,
    ) -> Result<Value> {
        let reg = views.read(&v.name).map_err(|e| self.unread(v, force, &e))?;
        let mine = reg.primary.as_ref().is_some_and(|p| p.node == self.me.name);
        let meta = layout::meta_dir(&self.me, &v.name);
        let begun =
            read_superblock(&*self.env, &meta)?.is_some_and(|sb| sb.view.epoch >= reg.epoch);
        if mine && begun && !force {
            self.check_own(v, |s| check_primary(&reg, s, layout::rule(v).local))?;
            return Ok(json!({ "epoch": reg.epoch, "already": true }));
        }
        let opened = !self.of(v).is_open() && !self.follows(v)?;
        let m = self.mirror_unserved(v)?;
        // No reference to the copy is kept here: it is handed over once the last one is
        // dropped.
        let done = self.promote_mirror(v, views, &reg, m, force, mine);
        let m = self.of(v).mirror();
        if let Some(m) = m.filter(|_| opened && done.is_err()) {
            self.let_go_of_mirror(v, m);
        }
        done
    }

    /// Why nobody is promoted while the register cannot be read.
    fn unread(&self, v: &Volume, force: bool, why: &Error) -> Error {
        let meta = layout::meta_dir(&self.me, &v.name);
        let view = read_superblock(&*self.env, &meta).ok().flatten();
        let view = view.map(|sb| sb.view).filter(|view| view.epoch > 0);
        let primary = view.map(|view| view.primary);
        let led = primary.as_ref() == Some(&self.me.name);
        let own = match led {
            true if self.attached(v) => OwnRole::Used,
            true => OwnRole::Primary,
            false => OwnRole::Other,
        };
        Error::Timeout(unread(&self.me.name, &own, force, primary.as_deref(), why))
    }

    /// Opens this node's own copy with `open`, after waiting for a process that has it
    /// open without serving it. `None`: a program is attached and serves the copy, which
    /// must be whole for that. `Busy`: a process still has it open without serving it,
    /// and may be about to find that it is not whole.
    fn open_unserved<T>(
        &self,
        v: &Volume,
        mut open: impl FnMut() -> Result<T>,
    ) -> Result<Option<T>> {
        let is_served = || self.live(v).is_some_and(|l| l[Live::Pid as usize] != 0);
        // The figures in the ring may be a dead program's: while this node looks at it nobody serves it.
        let is_looked_at = || self.locker(v) == Some(Locker::Node) && !self.is_healing(v);
        let begin = self.env.now();
        let mut open_since = begin;
        loop {
            let who = match open() {
                Err(Error::Busy(who)) => who,
                r => return r.map(Some),
            };
            let (now, stops) = (self.env.now(), self.stopping.load(Acquire));
            if is_looked_at() {
                if now - begin >= LOOK_PATIENCE || stops {
                    return Err(Error::Busy(format!(
                        "{who}, the daemon itself, which looks at it. Look again"
                    )));
                }
                // A program that comes afterwards has its own time.
                open_since = now;
            }
            let waited = now - open_since;
            if waited >= SERVED_AFTER && is_served() {
                return Ok(None);
            }
            if waited >= OPEN_PATIENCE || stops {
                return Err(Error::Busy(format!(
                    "{who}, and is not served yet. End the program that waits here, or look again"
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs `check` on this node's own copy, and checks that its log is complete. A copy
    /// that a program serves passes.
    fn check_own(&self, v: &Volume, check: impl FnOnce(&Store) -> Result<()>) -> Result<()> {
        let open = || {
            let kept = self.of(v).mirror();
            kept.map_or_else(
                || Ok(Own::Opened(Box::new(self.open_noted(v)?))),
                |m| Ok(Own::Kept(m)),
            )
        };
        match self.open_unserved(v, open)? {
            None => Ok(()),
            Some(Own::Kept(m)) => {
                check(&m.store).and_then(|()| m.store.check_complete_at(m.tail()))
            }
            Some(Own::Opened(s)) => {
                let found = check(&s).and_then(|()| s.check_complete());
                if s.was_clean() {
                    s.close_clean(s.tail())?;
                }
                found
            }
        }
    }

    /// This node's own copy, to be promoted.
    fn mirror_unserved(self: &Arc<Node>, v: &Volume) -> Result<Arc<Mirror>> {
        self.open_unserved(v, || self.mirror(v))?.ok_or_else(|| {
            Error::Busy(format!(
                "node {} is the primary and a program is attached, or about to be: there is nothing to promote",
                self.me.name
            ))
        })
    }

    fn promote_mirror(
        self: &Arc<Node>,
        v: &Volume,
        views: &dyn ViewRegister,
        reg: &Register,
        m: Arc<Mirror>,
        force: bool,
        mine: bool,
    ) -> Result<Value> {
        let named = |m: &Option<Member>| m.as_ref().map_or("none".to_owned(), |m| m.node.clone());
        if !force && !mine {
            if let Some((ago, who)) = m.live_primary() {
                let mirror = reg.mirror.as_ref().map_or("", |m| &*m.node);
                let alive = heard(&m, &who, ago, reg.epoch);
                return Err(self.refusal_beside_living(v, &who, mirror, &alive));
            }
            self.ask_others(v)?;
            if !m.is_member(reg) {
                let instead = match (&reg.primary, &reg.mirror) {
                    (_, Some(m)) => format!(
                        "`mojim promote --name {}`, the mirror, if the primary is dead",
                        m.node
                    ),
                    (Some(p), None) => format!(
                        "Start the program on node {}, the primary, which has everything",
                        p.node
                    ),
                    (None, None) => "Start the program on the primary".to_owned(),
                };
                return Err(Error::Invalid(format!(
                    "node {} is not the mirror of the view (primary {}, mirror {}), so acknowledged sync points may be missing from it. {instead}. If the others are lost for good, and ended or fenced, `mojim promote --force` gives up sync points that only they held",
                    self.me.name,
                    named(&reg.primary),
                    named(&reg.mirror)
                )));
            }
        }
        let done = if force {
            m.force(views)
        } else {
            let rule = layout::rule(v);
            if mine {
                check_primary(reg, &m.store, rule.local)?;
            }
            let told = match rule.mirror {
                true => self.ask_followers(v, reg, Duration::from_secs(1)),
                false => Vec::new(),
            };
            m.take_over(views, &told)
        };
        if done.is_err() {
            // The register may have agreed all the same, or do so later: the watch asks it.
            self.of(v).known().doubt = true;
        }
        let Some((epoch, last)) = done? else {
            return Err(Error::Busy("the view changed meanwhile; look again".into()));
        };
        self.hand_over(v, m, last)?;
        info!(
            node = %self.me.name, volume = %v.name, code = "promoted",
            "this node is primary from epoch {epoch}, last LSN {last}: an operator promoted it"
        );
        Ok(json!({ "epoch": epoch, "last_lsn": last, "forced": force }))
    }

    /// Makes this node primary.
    fn promote(self: &Arc<Node>, v: &Volume, force: bool) -> Result<Value> {
        if let Some(views) = self.register(v) {
            return self.promote_by_register(v, &*views, force);
        }
        let opened = !self.of(v).is_open() && !self.follows(v)?;
        let done = self.promote_by_hand(v, force);
        let m = self.of(v).mirror();
        if let Some(m) = m.filter(|_| opened && done.is_err()) {
            self.let_go_of_mirror(v, m);
        }
        done
    }

    /// Closes a copy that was opened for one request, unless a session feeds it, so that
    /// a program of this node can attach again.
    pub(super) fn let_go_of_mirror(&self, v: &Volume, m: Arc<Mirror>) {
        // Until it is closed its lock is held, but by no program.
        let _look = self.of(v).look();
        let mut place = self.of(v).place();
        let is_it = place.as_ref().is_some_and(|now| Arc::ptr_eq(now, &m));
        if !is_it || m.has_session() {
            return;
        }
        *place = None;
        drop(place);
        if let Err(e) = self.close_mirror(&m).and_then(|()| wait_for_last(m)) {
            warn!(node = %self.me.name, volume = %v.name, "closing a copy: {e}");
        }
    }

    fn promote_by_hand(self: &Arc<Node>, v: &Volume, force: bool) -> Result<Value> {
        let meta = layout::meta_dir(&self.me, &v.name);
        let sb = read_superblock(&*self.env, &meta)?.ok_or_else(|| {
            Error::NotFound(format!(
                "node {} has no copy of volume {}",
                self.me.name, v.name
            ))
        })?;
        let others = self.ask_others(v);
        let led = sb.view.primary == self.me.name;
        let is_contested = others
            .as_ref()
            .is_ok_and(|all| contested(&sb.view, all).is_some());
        let alone = led && sb.view.mirror.is_empty() && others.is_ok() && !is_contested;
        if alone || !force {
            let is_whole = self.check_log(v, &sb, force)?;
            if alone && is_whole {
                let unasked = self.unasked(v, &others?);
                return Ok(
                    json!({ "epoch": sb.view.epoch, "already": true, "last_lsn": sb.checkpoint, "unasked": unasked }),
                );
            }
        }
        let m = self.mirror_unserved(v)?;
        let mut alive = m.live_primary();
        let (mut others, mut unasked) = (Vec::new(), Vec::new());
        if alive.is_none() {
            // Asked again: a program may have attached since. Asking takes time, in which
            // a primary may have begun to feed this copy.
            others = self.ask_others(v)?;
            unasked = self.unasked(v, &others);
            alive = m.live_primary();
        }
        let copy = m.candidate();
        let rule = layout::rule(v);
        let asked = Asked { force, rule };
        if let Err(why) = judge(&copy, alive.is_some(), &others, asked) {
            return Err(self.not_promoted(v, &m, &copy, alive, why));
        }
        let (epoch, last) = m.promote(outdone(&copy, &others))?;
        self.hand_over(v, m, last)?;
        info!(
            node = %self.me.name, volume = %v.name, code = "promoted",
            "this node is primary from epoch {epoch}, last LSN {last}"
        );
        Ok(json!({ "epoch": epoch, "last_lsn": last, "unasked": unasked }))
    }

    /// The nodes with a copy whose daemons are not among `others`, which have answered. If one of them was
    /// promoted, nobody here can know it.
    fn unasked(&self, v: &Volume, others: &[Other]) -> Vec<String> {
        let names = layout::others(&self.config, &self.me, v).into_iter();
        names
            .map(|p| p.name)
            .filter(|name| others.iter().all(|o| o.node != *name))
            .collect()
    }

    /// Whether this node's own copy is whole and its log is complete. An error if
    /// something is missing that this promotion may not give up.
    fn check_log(&self, v: &Volume, sb: &Superblock, force: bool) -> Result<bool> {
        let led = sb.view.primary == self.me.name;
        // If success never meant this copy, its log may end anywhere: any promotion gives
        // up what only the lost memory had, and in mode `async` a mirror's lanes end
        // where they were cut.
        let rule = layout::rule(v);
        let mut expected = false;
        // The first process that opens a copy after its memory was lost finds that out.
        let mut lost = false;
        let look = |s: &Store| {
            lost = s.superblock().state != State::Whole;
            let lags = !rule.mirror && !led && !s.has_hole();
            expected = lags || led && !rule.local && s.superblock().ring_lost;
            Ok(())
        };
        match self.check_own(v, look) {
            Ok(()) => Ok(!lost),
            // The rest of a damaged log is given up on the operator's word.
            Err(Error::Damaged { .. }) if force || expected => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The refusal of a promotion beside a primary, `who`, or a node that follows it, that is
    /// heard: `alive` says which. `mirror`: the view's, or empty if it has none.
    fn refusal_beside_living(&self, v: &Volume, who: &str, mirror: &str, alive: &str) -> Error {
        let (me, volume) = (&self.me.name, &v.name);
        let alive = format!("volume {volume}: {alive}");
        if mirror == me {
            return Error::Busy(format!(
                "{alive}. End it first: its program, or, if none is attached, its daemon. The daemon may be bringing this copy up to date: then look again in a few seconds"
            ));
        }
        let instead = match mirror {
            "" => "There is no mirror now: wait until a node has become it".to_owned(),
            _ => format!(
                "End the program on node {who}, if one is attached, then `mojim promote --name {mirror}`, the mirror"
            ),
        };
        // By hand nothing lifts this refusal.
        let lost = match self.register(v) {
            Some(_) => format!(
                "If primary and mirror are lost for good, `mojim promote --force --name {me}` goes on with what is here, and gives up what only they have"
            ),
            None => format!(
                "If primary and mirror are lost for good, end their programs and daemons: then node {me} can be promoted with what is here"
            ),
        };
        let is = match v.backups.contains(me) {
            true => "a backup",
            false => "not the mirror now",
        };
        Error::Busy(format!("node {me} is {is}; {alive}. {instead}. {lost}"))
    }

    /// Why a copy is not promoted, in words. `alive`: how long ago its primary was heard,
    /// and the primary's name.
    fn not_promoted(
        &self,
        v: &Volume,
        m: &Mirror,
        copy: &Candidate,
        alive: Option<(Duration, String)>,
        why: Refusal,
    ) -> Error {
        let (me, volume) = (&self.me.name, &v.name);
        let (view, tail) = (&copy.view, copy.holding.tail);
        match why {
            Refusal::PrimaryAlive => {
                let (ago, who) = alive.expect("it is the reason");
                let alive = heard(m, &who, ago, view.epoch);
                let from = m.greeted();
                let mirror = match view.mirror.is_empty() {
                    // A backup's copy need not know it; a mirror forwards to it.
                    true if m.is_backup() && from != who => &from,
                    true if who == v.primary => v.mirror.as_deref().unwrap_or(""),
                    _ => &view.mirror,
                };
                self.refusal_beside_living(v, &who, mirror, &alive)
            }
            Refusal::Contested(o) => {
                let what = match o.epoch > view.epoch {
                    true => "knows a later view",
                    false => "was promoted too, and leads a view",
                };
                let then = match o.has {
                    Some(_) if o.leads && (view.primary == *me || o.epoch <= view.epoch) => {
                        "`mojim promote --force` on the node that is to go on, while both daemons run, gives up what the other one has"
                    }
                    Some(_) => {
                        "Start the program there, or wait until `mojim status` says that this node follows it; `mojim promote --force` here gives it up"
                    }
                    None => {
                        "It has no whole copy now: `mojim promote --force` goes on with what is here"
                    }
                };
                Error::Invalid(format!(
                    "node {} {what} of volume {volume} (epoch {}, this node knows {} only): what was acknowledged in it may be missing here. {then}",
                    o.node, o.epoch, view.epoch
                ))
            }
            Refusal::Behind(o, lsn) => behind(me, volume, copy, o, lsn),
            Refusal::Promised(promised) => Error::Invalid(format!(
                "node {me} was about to be brought up to date with a view of volume {volume} that another node was promoted to (epoch {promised}, this node's view is of {}): what was acknowledged in it may be missing here. If that node is lost for good, `mojim promote --force` gives it up",
                view.epoch
            )),
            Refusal::NotWhole => Error::Invalid(format!(
                "node {me} has no whole copy of volume {volume}: it was lost or a transfer was interrupted. Start the other node and let it be copied"
            )),
            Refusal::NotMember if v.backups.contains(me) => Error::Invalid(format!(
                "node {me} is a backup of volume {volume}: what primary and mirror acknowledged after LSN {} is missing from it. If they are lost for good, and ended or fenced, `mojim promote --force` gives that up",
                tail
            )),
            Refusal::NotMember => Error::Invalid(format!(
                "node {me} was still catching up with volume {volume}, so acknowledged sync points may be missing from it. If the others are lost for good, and ended or fenced, `mojim promote --force` gives up sync points that only they held"
            )),
        }
    }

    /// What the other nodes' daemons say of their copies. A node that does not answer is
    /// left out: for it the operator's word counts. An error if a program is attached
    /// there: a primary whose link to this node is down may still be alive.
    fn ask_others(&self, v: &Volume) -> Result<Vec<Other>> {
        let ask_once = |peer: &Peer| -> Result<Standing> {
            let mut c = self.client(&peer.tcp, Duration::from_secs(1))?;
            let volume = v.name.clone();
            c.ask_for(&Request::Standing { volume })
        };
        let ask = |peer: Peer| -> Option<(String, Result<Standing>)> {
            let mut asked = (0..TRIES).map(|_| ask_once(&peer));
            // One answer may be late; who refuses the connection is not there.
            match asked.find(|s| !matches!(s, Err(Error::Timeout(_))))? {
                // A node of another version is alive, and what it has is not known.
                Err(e) if !speaks_otherwise(&e) => None,
                theirs => Some((peer.name, theirs)),
            }
        };
        let peers = layout::others(&self.config, &self.me, v).into_iter();
        let mut others = Vec::new();
        for (node, s) in peers.filter_map(ask) {
            let s = match s {
                Ok(s) => s,
                Err(e) => {
                    return Err(Error::Busy(format!(
                        "node {node} is there, and does not say what it has of volume {} ({e}): it runs another version of mojim, or is of another cluster. Bring both nodes to one version, or end its daemon and what is attached there",
                        v.name
                    )));
                }
            };
            if let Some(pid) = s.attached {
                let who = match pid {
                    0 => "a program".to_owned(),
                    pid => format!("process {pid}"),
                };
                return Err(Error::Busy(format!(
                    "primary {node} of volume {} is alive: {who} is attached there, last LSN {}, though no link to this node is up. End it first",
                    v.name, s.last_lsn
                )));
            }
            // Another node's numbers may be absurd.
            let sane = |n: u64| Some(n).filter(|n| *n < u64::MAX / 4);
            let whole = s.state == CopyState::Whole;
            others.push(Other {
                epoch: sane(s.epoch).unwrap_or(0),
                leads: whole && s.primary == node && sane(s.epoch).is_some(),
                has: sane(s.last_lsn).filter(|_| whole),
                known: s.claim(),
                node,
            });
        }
        Ok(others)
    }
}

/// The refusal to promote node `me` with its copy, since node `o` has more, or knows of it.
fn behind(me: &str, volume: &str, copy: &Candidate, o: &Other, lsn: u64) -> Error {
    let (node, tail) = (&o.node, copy.holding.tail);
    let then = match o.has {
        Some(has) if has >= lsn && copy.view.primary == me => {
            format!("Start the program here, which takes them over, or promote node {node}")
        }
        Some(has) if has >= lsn => {
            format!("`mojim promote --force --name {node}` goes on with them")
        }
        has => format!(
            "It has LSN {} only itself. Go on with the node that has most by `mojim status`",
            has.unwrap_or(0)
        ),
    };
    Error::Invalid(format!(
        "node {node} has sync points of volume {volume} up to LSN {lsn}, or knows of them, this node up to LSN {tail} only. {then}; `mojim promote --force` here gives them up. {}",
        disbelieved(node)
    ))
}

/// Why node `me`, whose own copy knows `own`, and `primary` as the view's, is not promoted
/// while the register cannot be read.
fn unread(me: &str, own: &OwnRole, force: bool, primary: Option<&str>, why: &Error) -> String {
    let needs = match own {
        OwnRole::Used => format!(
            "node {me} is the primary by its copy, and a program is attached, or about to be: there is nothing to promote, unless another node has become primary meanwhile. That is not known, for the register of views cannot be read"
        ),
        OwnRole::Primary => format!(
            "node {me} is the primary by its copy; a majority of the voters has to agree that it still is, and the register of views cannot be read"
        ),
        OwnRole::Other => format!(
            "a majority of the voters has to agree that node {me} becomes primary, and the register of views cannot be read"
        ),
    };
    let force = match force {
        true => {
            let lost = match primary.filter(|p| *p != me) {
                Some(p) => format!(
                    "sync points that only node {p} (the primary by this copy) or a later primary acknowledged are lost then"
                ),
                None => "sync points that only other nodes acknowledged are lost then".to_owned(),
            };
            format!(
                ". --force needs a majority too. If too few voters are left for good, docs/how-to/backups.md says how to go on with `failover = \"manual\"`: {lost}"
            )
        }
        false => String::new(),
    };
    // Voters that all answer may just be choosing who leads them.
    format!(
        "{needs}: {why}. Look again in a few seconds. If it stays so, `mojim status` says which voters are down: start them, then promote again{force}"
    )
}

/// Whom the copy `m`, which knows `who` as primary, has heard `ago`.
fn heard(m: &Mirror, who: &str, ago: Duration, epoch: u64) -> String {
    let (from, ms) = (m.greeted(), ago.as_millis());
    match m.is_backup() && from != who {
        // What it forwards tells nothing of the primary.
        true => format!(
            "it follows node {from}, which is alive: it was heard {ms} ms ago in epoch {epoch}, whose primary is node {who}"
        ),
        false => format!("primary {who} is alive: it was heard {ms} ms ago in epoch {epoch}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A primary with its program was to become primary, voters that answered were called
    /// down, and `--force` was silent about the majority that it needs (a new user).
    #[test]
    fn what_a_promotion_lacks_without_the_register_is_said() {
        let why = Error::Timeout("no voter leads".into());
        let said = unread("a", &OwnRole::Used, false, Some("a"), &why);
        assert!(
            said.contains("there is nothing to promote") && !said.contains("has to agree"),
            "{said}"
        );
        assert!(!said.contains("--force"), "{said}");
        let said = unread("a", &OwnRole::Primary, false, Some("a"), &why);
        assert!(
            said.starts_with("node a is the primary by its copy"),
            "{said}"
        );
        let said = unread("b", &OwnRole::Other, true, Some("a"), &why);
        assert!(
            said.starts_with("a majority of the voters has to agree that node b becomes")
                && said.contains("no voter leads. Look again in a few seconds. If it stays so")
                && said.contains("--force needs a majority too. If too few voters are left for good, docs/how-to/backups.md says how to go on with `failover = \"manual\"`: sync points that only node a (the primary by this copy)"),
            "{said}"
        );
    }
}
