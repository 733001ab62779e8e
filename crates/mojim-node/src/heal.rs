//! The daemon's own attach, which brings a mirror up to date while no program is attached.
//!
//! A primary's node does this while no program is attached and the mirror is behind:
//!
//! - after a take-over,
//! - after the loss of a copy,
//! - after a program's end while the mirror was away.
//!
//! It also does so if copies are compared, and a killed program has left open which records are
//! committed. The daemon attaches as a program does, brings the mirror up to date, and detaches.
//!
//! Owns the decision to do so, and to yield to a program that is about to attach and asks for it.
//!
//! Invariants:
//!
//! - It begins only if this node has the whole copy of the view's primary, and the other node
//!   answers that it is behind or equal.
//! - It never goes on alone.
//! - Everything that an attach refuses is refused here too, and said once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::Duration;

use super::Node;
use mojim_config::{Failover, Volume};
use mojim_env::Result;
use mojim_format::{State, Superblock, View};
use mojim_replica::holders::Peer;
use mojim_replica::layout;
use mojim_replica::request::{CopyState, Request, Standing};
use mojim_store::store::read_superblock;
use tracing::{info, warn};

/// How often the other node is asked.
const EVERY: Duration = Duration::from_secs(1);
/// After a try that failed, doubling.
const AGAIN: Duration = Duration::from_secs(5);
const AGAIN_MOST: Duration = Duration::from_secs(300);
/// A mirror that stands still for so long is tried again later.
const STANDSTILL: Duration = Duration::from_secs(30);

/// Why the mirror is brought up to date now, if it is. `found` says why it is behind, if it is;
/// `before`, that it was at the turn before this one; `asked`, that a comparison waits for it. One that
/// waits looks at this copy between two questions, and at a turn with such a look nothing is found.
fn due(found: Option<String>, before: bool, asked: bool) -> Option<String> {
    let left = || "the mirror may have what is not committed, after a program's end".to_owned();
    match asked {
        true => Some(found.unwrap_or_else(left)),
        false => found.filter(|_| before),
    }
}

impl Node {
    /// Looks after the mirror of a volume for as long as this node runs.
    pub(super) fn heal_loop(self: Arc<Node>, v: &Volume) {
        let (mut next, mut wait) = (Duration::ZERO, AGAIN);
        let (mut said, mut seen) = (String::new(), false);
        let held = self.of(v);
        while !self.stopping.load(Acquire) {
            self.heals
                .wait_unless(|| self.stopping.load(Acquire), EVERY);
            let asked = std::mem::take(&mut held.known().open_tail);
            let waits = self.env.now() < next;
            // A comparison does not shorten the wait after a failure.
            let asked = asked && !(waits && held.known().unhealed.is_some());
            if waits && !asked || self.stopping.load(Acquire) {
                continue;
            }
            // Twice: a program that ended may be about to be started again.
            let failed = held.known().unhealed.is_some();
            if asked || failed {
                // Not used is a copy that only this node itself looks at: a comparison that waits
                // for the healing looks again and again.
                self.end_look(v);
            }
            // Before the other node is asked: a comparison that waits may look again meanwhile.
            let unused = match asked || failed {
                true => self.leads_unused(v).ok().flatten(),
                false => None,
            };
            let before = seen;
            let found = self.behind(v);
            seen = found.is_some();
            // A comparison is not repeated after a failure: healing is tried again while
            // records are left open.
            let open = unused.is_some_and(|sb| asked || sb.logs != 0);
            if !seen && !open {
                held.known().unhealed = None;
            }
            let found = due(found, before, asked && open);
            let Some(behind) = found else {
                continue;
            };
            let done = self.heal(v, &behind);
            let now = self.env.now();
            match &done {
                Err(e) => held.known().unhealed = Some(e.to_string()),
                Ok(true) => held.known().unhealed = None,
                Ok(false) => {}
            }
            match done {
                Ok(true) => (wait, said) = (AGAIN, String::new()),
                // Another process has the copy, or is about to open it.
                Ok(false) => next = now + AGAIN,
                Err(e) => {
                    let text = e.to_string();
                    if text != said {
                        warn!(
                            node = %self.me.name, volume = %v.name,
                            "the mirror cannot be brought up to date without a program: {text}"
                        );
                        said = text;
                    }
                    next = now + wait;
                    wait = (wait * 2).min(AGAIN_MOST);
                }
            }
        }
    }

    /// This copy is compared with another, and one of the two does not know what is
    /// committed. If this copy leads and nobody uses it, that is decided soon; returns
    /// whether it is. This copy may be in order itself: a program that detaches as its
    /// link breaks has committed records of which the mirror never hears that they are.
    pub(super) fn decide_open_tail(&self, v: &Volume) -> Result<bool> {
        self.end_look(v);
        let open = v.mirror.is_some() && self.leads_unused(v)?.is_some();
        if open {
            self.of(v).known().open_tail = true;
        }
        Ok(open)
    }

    /// This copy's superblock, if the copy leads, is whole, and nobody uses it.
    fn leads_unused(&self, v: &Volume) -> Result<Option<Superblock>> {
        if self.of(v).is_open() || self.in_use(v) {
            return Ok(None);
        }
        let sb = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name))?;
        Ok(sb.filter(|sb| {
            let leads = sb.view.epoch > 0 && sb.view.primary == self.me.name;
            leads && sb.state == State::Whole
        }))
    }

    /// Why the mirror of a volume is to be brought up to date, if this node leads the
    /// volume and no program is attached.
    fn behind(&self, v: &Volume) -> Option<String> {
        let sb = self.leads_unused(v).ok()??;
        let peers = layout::others(&self.config, &self.me, v);
        let configured = layout::peer(&self.config, &self.me, v)?;
        // Without a register an attach knows only the configured mirror.
        let peer = match v.failover {
            Failover::Automatic => mirror_of(&sb.view, peers, configured),
            Failover::Manual => configured,
        };
        let mut c = self.client(&peer.tcp, Duration::from_secs(1)).ok()?;
        let volume = v.name.clone();
        let theirs = c.ask_for(&Request::Standing { volume }).ok()?;
        why_behind(&sb.view, sb.checkpoint, &theirs).map(|why| format!("node {} {why}", peer.name))
    }

    /// True if the mirror has everything, false if this node gave way or the mirror stood
    /// still.
    fn heal(&self, v: &Volume, behind: &str) -> Result<bool> {
        let asked = Arc::new(AtomicBool::new(false));
        self.of(v).known().healing = Some(asked.clone());
        // From here on no other look begins.
        self.end_look(v);
        let done = self.heal_until(v, behind, &|| {
            asked.load(Acquire) || self.stopping.load(Acquire)
        });
        self.of(v).known().healing = None;
        match done {
            Err(mojim_env::Error::Busy(_)) => Ok(false),
            done => done,
        }
    }

    fn heal_until(&self, v: &Volume, behind: &str, gives_way: &dyn Fn() -> bool) -> Result<bool> {
        let volume =
            mojim::Volume::attach_to_heal(&self.config, &self.me.name, &v.name, gives_way)?;
        let epoch = volume.epoch();
        info!(
            node = %self.me.name, volume = %v.name,
            "{behind}; it is brought up to date, from epoch {epoch}"
        );
        let (mut has, mut since) = (volume.mirror_has(), self.env.now());
        while !volume.is_level() && !gives_way() && self.env.now() - since < STANDSTILL {
            self.heals.wait_unless(gives_way, Duration::from_millis(20));
            if volume.mirror_has() != has {
                (has, since) = (volume.mirror_has(), self.env.now());
            }
        }
        let level = volume.is_level();
        volume.detach()?;
        if level {
            info!(node = %self.me.name, volume = %v.name, "the mirror is up to date");
        }
        Ok(level)
    }

    /// Ends healing for a program that is about to attach. Returns whether the program
    /// has to wait for that end, or for that of a look at what a program left.
    pub(super) fn give_way(&self, v: &Volume) -> bool {
        self.of(v).known().gave_way = Some(self.env.now());
        let looked = self.end_look(v);
        let known = self.of(v).known();
        let (healing, looks) = (known.healing.clone(), known.looks);
        drop(known);
        let Some(asked) = healing else {
            return looked || looks > 0;
        };
        asked.store(true, Release);
        self.heals.notify();
        true
    }

    /// Whether it is this node itself that is attached.
    pub(super) fn is_healing(&self, v: &Volume) -> bool {
        self.of(v).known().healing.is_some()
    }
}

/// The node that an attach would bring up to date: the view's mirror if it still holds
/// the volume, else the configured one.
fn mirror_of(view: &View, others: Vec<Peer>, configured: Peer) -> Peer {
    let mut others = others.into_iter();
    others.find(|p| p.name == view.mirror).unwrap_or(configured)
}

/// Why the other node is behind this copy, by its own answer; `None` if it is not.
fn why_behind(view: &View, checkpoint: u64, theirs: &Standing) -> Option<String> {
    if theirs.error.is_some() {
        return None;
    }
    if theirs.distrusted {
        return Some("is to have its copy made anew".into());
    }
    match theirs.state {
        CopyState::New | CopyState::Empty => return Some("has no copy".into()),
        CopyState::Whole => {}
        CopyState::Damaged | CopyState::Loading | CopyState::Switching => return None,
    }
    let epoch = theirs.epoch;
    if epoch > view.epoch {
        return None;
    }
    if epoch < view.epoch || theirs.primary != view.primary {
        return Some(format!("is of epoch {epoch}"));
    }
    let has = theirs.last_lsn;
    (has < checkpoint).then(|| format!("has sync points up to LSN {has}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_env::Address;

    /// `mojim verify` waited its whole time: it asked at one turn, at the next its own look at the copy
    /// hid that the mirror is behind, and so on. What was found had to be found at two turns in a row.
    #[test]
    fn whoever_asks_is_not_kept_waiting_by_its_own_looks() {
        let behind = || Some("b has less".to_owned());
        assert_eq!(due(behind(), false, true), behind());
        assert!(
            due(None, false, true).is_some(),
            "what is left open is decided"
        );
        // A program that ended may be about to be started again.
        assert_eq!(due(behind(), false, false), None);
        assert_eq!(due(behind(), true, false), behind());
        assert_eq!(due(None, true, false), None);
    }

    /// A backup had taken the mirror's place, and the configured mirror came back while no
    /// program ran: the primary's daemon attached every second for its sake, a view each time,
    /// and said of the true mirror that it is up to date (a new user).
    #[test]
    fn the_mirror_of_the_view_is_looked_after() {
        let peer = |name: &str| {
            let address = Address::Unix(format!("/{name}").into());
            Peer {
                name: name.into(),
                address: address.clone(),
                tcp: address,
                shared: false,
            }
        };
        let mut view = View {
            epoch: 5,
            primary: "a".into(),
            mirror: "c".into(),
        };
        let whom = |view: &View| mirror_of(view, vec![peer("b"), peer("c")], peer("b")).name;
        assert_eq!(whom(&view), "c");
        view.mirror.clear();
        assert_eq!(whom(&view), "b");
        // That mirror holds no copy any more.
        view.mirror = "d".into();
        assert_eq!(whom(&view), "b");
    }

    #[test]
    fn who_is_behind_is_known_by_what_it_says() {
        let view = View {
            epoch: 5,
            primary: "a".into(),
            mirror: "b".into(),
        };
        let level = Standing {
            state: CopyState::Whole,
            epoch: 5,
            primary: "a".into(),
            last_lsn: 10,
            checkpoint: 0,
            persistent: true,
            attached: None,
            distrusted: false,
            error: None,
            known: None,
        };
        let why = |change: &dyn Fn(&mut Standing)| {
            let mut theirs = level.clone();
            change(&mut theirs);
            why_behind(&view, 10, &theirs)
        };
        assert_eq!(why(&|_| {}), None);
        let behind: [&dyn Fn(&mut Standing); 6] = [
            &|s| s.state = CopyState::Empty,
            &|s| s.state = CopyState::New,
            &|s| s.epoch = 4,
            &|s| s.primary = "b".into(),
            &|s| s.last_lsn = 9,
            &|s| s.distrusted = true,
        ];
        for (i, change) in behind.into_iter().enumerate() {
            assert!(why(change).is_some(), "{i}");
        }
        // It has a later view, it is being copied, or nothing can be written there.
        let left: [&dyn Fn(&mut Standing); 3] =
            [&|s| s.epoch = 6, &|s| s.state = CopyState::Loading, &|s| {
                s.state = CopyState::Empty;
                s.error = Some("no room".into());
            }];
        for (i, change) in left.into_iter().enumerate() {
            assert_eq!(why(change), None, "{i}");
        }
    }
}
