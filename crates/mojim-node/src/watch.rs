//! When a primary is gone, and what its mirror does then. If so configured, also what a
//! backup does when both are gone.
//!
//! Owns the suspicion: how long nothing was heard, from the session and from the daemons.
//! A mirror's suspicion may be wrong at no risk: the register decides, and a primary that
//! is alive finds out that it no longer is the primary. A backup's suspicion (`fallback`)
//! may not be wrong: what the others acknowledged beyond the backup is given up. So the backup
//! waits for several limits. A primary that is alive stops acknowledging sooner than that.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::requests::speaks_otherwise;
use super::{Node, is_full, wait_for_last};
use mojim_config::{Fallback, Volume};
use mojim_env::{Address, Error, Result};
use mojim_protocol::view::Register;
use mojim_replica::client::Client;
use mojim_replica::fallback_timer::FallbackTimer;
use mojim_replica::layout;
use mojim_replica::mirror::Mirror;
use mojim_replica::register::ViewRegister;
use mojim_replica::request::{CopyState, Request, Standing};
use mojim_replica::told::Told;
use tracing::warn;

/// Between two openings of a copy that has failed.
const AGAIN: Duration = Duration::from_secs(1);

/// What the watch over a primary knows of it.
struct Watch {
    /// Longest silence. It exceeds `failure_limit`, so that a primary that lost its
    /// mirror asks the register first: that primary goes on without a break, a new one
    /// does not.
    limit: Duration,
    /// When the primary was heard last.
    heard: Duration,
    /// A connection to the daemon of the primary's node, with the node's name.
    client: Option<(String, Client)>,
    /// The error that was told last.
    said: String,
    /// Whether a take-over that the register had agreed to was cut off.
    unknown: bool,
    /// A promotion by an operator failed, and the register may still agree to it. It is
    /// asked every `limit` until a primary is heard.
    doubt: bool,
    /// When it is asked next for that.
    look: Duration,
    timer: FallbackTimer,
    /// Whether any node of the view was ever heard: a node that was just started may be
    /// the first of all to come back.
    met: bool,
    /// When a copy that failed may be opened again: what it failed for may last.
    again: Duration,
}

impl Node {
    /// Watches over the primary of a volume for as long as this node runs.
    pub(super) fn watch_loop(self: Arc<Node>, v: &Volume, views: &dyn ViewRegister) {
        let beat = self.config.heartbeat;
        let mut w = Watch {
            limit: self.config.failure_limit + beat * 2,
            heard: self.env.now(),
            client: None,
            said: String::new(),
            unknown: true,
            doubt: false,
            look: Duration::ZERO,
            timer: FallbackTimer::default(),
            met: false,
            again: Duration::ZERO,
        };
        while !self.stopping.load(std::sync::atomic::Ordering::Acquire) {
            std::thread::sleep(beat);
            let Some(m) = self.watched(v, &mut w) else {
                continue;
            };
            w.doubt |= std::mem::take(&mut self.of(v).known().doubt);
            if m.live_primary().is_some() {
                w.timer.heard();
                // It is in an epoch that what the register may still do does not outdo.
                w.doubt = false;
                self.stays(v, &mut w, None);
            }
            let now = self.env.now();
            if w.doubt && now >= w.look {
                w.unknown = true;
                w.look = now + w.limit;
            }
            if self.is_there(&m, &mut w.client) {
                w.heard = self.env.now();
                w.timer.heard();
                w.met = true;
                if !w.unknown {
                    self.stays(v, &mut w, None);
                    continue;
                }
            }
            if !w.unknown && self.env.now() - w.heard < w.limit {
                continue;
            }
            self.take_place(v, views, m, &mut w);
        }
    }

    /// The copy that follows the primary, opened again if it failed. `None`: look again
    /// later.
    fn watched(self: &Arc<Node>, v: &Volume, w: &mut Watch) -> Option<Arc<Mirror>> {
        let Some(m) = self.of(v).mirror() else {
            w.heard = self.env.now();
            // A copy that could not be opened, for instance because its disk was full.
            if w.heard >= w.again && self.found_no_room(v) {
                let _ = self.mirror(v);
                w.again = self.env.now() + AGAIN;
            }
            return None;
        };
        // The time at which the primary spoke, not that of this look: the register may
        // have taken so long to answer that the primary is gone again.
        if let Some(when) = m.last_heard() {
            w.met = true;
            w.heard = w.heard.max(when);
            w.timer.heard_at(when);
        }
        if m.store.poisoned().is_none() {
            return Some(m);
        }
        // A copy that was handed over is closed before it is poisoned.
        if m.is_closed() || self.env.now() < w.again {
            return None;
        }
        w.again = self.env.now() + AGAIN;
        drop(m);
        self.mirror(v).ok()
    }

    /// The primary is silent, or it is not known what the register has agreed to: this node
    /// becomes primary, if the register lets it.
    fn take_place(&self, v: &Volume, views: &dyn ViewRegister, m: Arc<Mirror>, w: &mut Watch) {
        // The register names this node a mirror only after a primary has spoken to it. That
        // may have happened since this thread looked last.
        let (heard, limit, unknown) = (w.heard, w.limit, w.unknown);
        let silent = Cell::new(Duration::ZERO);
        let suspect = || {
            let spoke = m.last_heard().unwrap_or_default();
            silent.set(self.env.now().saturating_sub(heard.max(spoke)));
            !unknown && silent.get() >= limit
        };
        suspect();
        let ask = |reg: &Register| self.ask_followers(v, reg, self.prompt());
        let mut taken = m.try_take_over(views, layout::rule(v), suspect, ask);
        let silent = silent.get();
        let lost = w.met && silent >= w.limit && v.fallback == Fallback::Automatic;
        if matches!(taken, Ok(None)) && lost {
            taken = self.try_fall_back(v, views, &m, &mut w.timer, w.limit);
        }
        let handed = match taken {
            Ok(Some((epoch, last))) => self.hand_over(v, m, last).map(|()| Some((epoch, last))),
            nothing => nothing,
        };
        match handed {
            Ok(Some((epoch, last))) => {
                warn!(
                    node = %self.me.name, volume = %v.name, code = "took_over",
                    "its primary was silent for {} ms; this node is primary from epoch {epoch}, last LSN {last}",
                    silent.as_millis()
                );
                w.unknown = false;
                self.stays(v, w, None);
            }
            Ok(None) => {
                // Not this node's to take; look again after another limit.
                // A look at what the register may have agreed to is no word of the primary's:
                // silence still counts, and so does what keeps this node from its place.
                if !w.unknown {
                    w.heard = self.env.now();
                    self.stays(v, w, None);
                }
                w.unknown = false;
            }
            Err(e) => {
                // The register may have agreed all the same.
                w.unknown = true;
                self.stays(v, w, Some(e));
            }
        }
    }

    /// Takes down why this node does not become primary, if anything keeps it from that.
    fn stays(&self, v: &Volume, w: &mut Watch, why: Option<Error>) {
        let text = why.as_ref().map_or(String::new(), Error::to_string);
        if text == w.said {
            return;
        }
        if !text.is_empty() {
            warn!(node = %self.me.name, volume = %v.name, "{text}");
        }
        // Of the voters `mojim status` says more itself.
        let refused = matches!(why, Some(Error::Invalid(_)));
        self.of(v).known().stays = refused.then(|| text.clone());
        w.said = text;
    }

    /// What the nodes beside the register's primary, which is silent, know to have been
    /// acknowledged, as far as they answer within `patience`. All are asked at once.
    pub(super) fn ask_followers(
        &self,
        v: &Volume,
        reg: &Register,
        patience: Duration,
    ) -> Vec<Told> {
        let silent = reg.primary.as_ref().map_or("", |p| &p.node);
        let nodes = v.data_nodes().into_iter();
        let others = nodes.filter(|n| *n != self.me.name && *n != silent);
        let ask = |n: &str| {
            let volume = v.name.clone();
            let mut c = self.reach(n, patience)?;
            let said: Standing = c.ask_for(&Request::Standing { volume }).ok()?;
            Told::of(n, &said)
        };
        std::thread::scope(|s| {
            let asked = others.filter_map(|n| {
                let thread = std::thread::Builder::new().name("mojim-ask".into());
                // Without a thread for it, a node counts as one that does not answer.
                thread.spawn_scoped(s, move || ask(n)).ok()
            });
            let asked: Vec<_> = asked.collect();
            let told = asked.into_iter().filter_map(|t| t.join().ok().flatten());
            told.collect()
        })
    }

    /// Whether this copy follows, and the last try to open it failed for a reason that
    /// may pass: no room, or links that had not ended. Other damage does not pass, so it
    /// is not retried.
    fn found_no_room(&self, v: &Volume) -> bool {
        let passes = {
            let known = self.of(v).known();
            known.copy_error.as_ref().is_some_and(|(_, e)| is_full(e)) || known.unopened.is_some()
        };
        passes && self.follows(v).unwrap_or(false) && !self.in_use(v)
    }

    /// Whether the daemon of the primary's node answers: then its machine is
    /// there, and a program that ended will be started again on it.
    fn is_there(&self, m: &Mirror, client: &mut Option<(String, Client)>) -> bool {
        let primary = m.store.superblock().view.primary;
        let Some(other) = self.config.nodes.get(&primary) else {
            return false;
        };
        let mut c = match client.take() {
            Some((who, c)) if who == primary => c,
            _ => match self.client(&Address::Tcp(other.address), self.prompt()) {
                Ok(c) => c,
                Err(_) => return false,
            },
        };
        match c.ask(&Request::Pulse) {
            Ok(_) => {
                *client = Some((primary, c));
                true
            }
            Err(_) => false,
        }
    }

    /// For several limits this backup has heard neither primary nor mirror: as
    /// configured, it goes on with what it has, if it followed the present view. A live
    /// primary that reaches the voters changes the register's version all the time; one
    /// that does not reach them acknowledges nothing more after one limit
    /// (`Session::leased`).
    fn try_fall_back(
        &self,
        v: &Volume,
        views: &dyn ViewRegister,
        m: &Mirror,
        timer: &mut FallbackTimer,
        limit: Duration,
    ) -> Result<Option<(u64, u64)>> {
        let reg = views.read(&v.name)?;
        // Taken after the read: a version that is new counts from then.
        let now = self.env.now();
        let members = [&reg.primary, &reg.mirror];
        let names = || members.into_iter().flatten().map(|m| m.node.as_str());
        if !FallbackTimer::concerns(m, &reg) || names().any(|n| self.answers(n)) {
            timer.heard();
            return Ok(None);
        }
        let last = m.tail();
        let better = v.data_nodes().into_iter().any(|n| {
            let other = n != self.me.name && names().all(|m| m != n);
            other && self.has_more(v, n, reg.epoch, last)
        });
        if !timer.is_over(&reg, now, limit, better) {
            return Ok(None);
        }
        // The primary may have come back meanwhile.
        if m.live_primary().is_some() {
            timer.heard();
            return Ok(None);
        }
        let lost = names().collect::<Vec<_>>().join(" and ");
        let Some((epoch, last)) = m.force_from(&reg, views)? else {
            return Err(Error::Protocol("the view changed meanwhile".into()));
        };
        warn!(
            node = %self.me.name, volume = %v.name, code = "fell_back",
            "nothing is heard of {lost}; this backup goes on as configured (`fallback`), and what they acknowledged after LSN {last} is given up"
        );
        Ok(Some((epoch, last)))
    }

    /// A connection to another node, with `patience` as the limit for each answer.
    pub(super) fn client(&self, to: &Address, patience: Duration) -> Result<Client> {
        Client::connect(&self.env, to, &self.config.cluster, patience)
    }

    /// How soon a node answers that is there: within two heartbeats.
    fn prompt(&self) -> Duration {
        (self.config.heartbeat * 2).max(Duration::from_millis(100))
    }

    /// A connection to a node that is to answer within `patience`.
    fn reach(&self, node: &str, patience: Duration) -> Option<Client> {
        let address = Address::Tcp(self.config.nodes.get(node)?.address);
        self.client(&address, patience).ok()
    }

    /// Whether a node's daemon answers now.
    fn answers(&self, node: &str) -> bool {
        let client = self.reach(node, self.prompt());
        client.is_some_and(|mut c| c.ask(&Request::Pulse).is_ok())
    }

    /// Whether another backup that follows the view of `epoch` has received more than up
    /// to `last`, or as much and comes first by name. A backup of another view does not
    /// go on by itself, whatever it has.
    fn has_more(&self, v: &Volume, node: &str, epoch: u64, last: u64) -> bool {
        let volume = v.name.clone();
        let q = Request::Standing { volume };
        let ask = || match self.reach(node, self.prompt())?.ask_for::<Standing>(&q) {
            Err(e) if !speaks_otherwise(&e) => None,
            theirs => Some(theirs),
        };
        // One answer may be late.
        let theirs = match (0..3).find_map(|_| ask()) {
            None => return false,
            Some(Ok(theirs)) => theirs,
            // Of another version: what it has is not known, so it may be more.
            Some(Err(_)) => return true,
        };
        let first = theirs.last_lsn == last && node < self.me.name.as_str();
        let is_whole = theirs.state == CopyState::Whole && !theirs.distrusted;
        let follows = is_whole && theirs.epoch == epoch;
        follows && (theirs.last_lsn > last || first)
    }

    /// Closes the copy of a node that has become primary, for the program.
    pub(super) fn hand_over(&self, v: &Volume, m: Arc<Mirror>, last: u64) -> Result<()> {
        m.close();
        if !v.backups.is_empty() {
            // A thread that forwards still reads the ring, which the program writes to.
            *self.of(v).place() = None;
            let closed = m.store.close_clean(last);
            let closed = closed.and_then(|()| wait_for_last(m));
            self.handed.fetch_add(1, SeqCst);
            self.posts.notify();
            return closed;
        }
        let closed = m.store.close_for_next(last);
        let mut place = self.of(v).place();
        // Links and threads that have not ended yet find the copy closed.
        m.store.release_lock();
        *place = None;
        drop(place);
        self.handed.fetch_add(1, SeqCst);
        self.posts.notify();
        closed
    }
}
