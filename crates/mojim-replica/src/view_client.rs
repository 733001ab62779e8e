//! A primary's calls to the register of views.
//!
//! Owns:
//!
//! - the register as this primary last knew it,
//! - the life of the mirror that it is linked to,
//! - the one change that it has asked for and has no answer to yet,
//! - the account of how long its mirror kept it from acknowledging.
//!
//! A change is one read, one decision (`view` of mojim-protocol) and one swap. It is done
//! elsewhere (`register::RegisterCalls`) while the links are served. The session decides what
//! the answer means for the link.
//!
//! Invariants:
//! - The register is read before it is swapped, and nothing relies on a swap whose
//!   outcome is not known: the next try reads again.
//! - One change is on its way at a time.
//! - A primary that is not in the register any more says so (`Error::Stale`)
//!   and never tries again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_protocol::view::{Member, Refusal, Register};

use crate::register::{RegisterCalls, ViewRegister};
use mojim_env::{Error, Result};
use mojim_store::store::Store;

/// How often what failed is tried again.
const AGAIN: Duration = Duration::from_millis(100);
/// A mirror that failed for a while is forgiven once it has worked for this many times as
/// long. So a mirror that comes and goes keeps a primary from acknowledging for at most
/// one part in `FORGIVE + 1` of the time; beyond that it is given up.
const FORGIVE: u32 = 8;

/// A primary's hold on the register.
pub struct ViewClient {
    /// For calls that may block, at a time when there is no link to serve.
    views: Arc<dyn ViewRegister>,
    errands: Box<dyn RegisterCalls>,
    /// Silence after which a mirror counts as failed.
    pub(crate) limit: Duration,
    /// The register as last read or written.
    pub(crate) register: Register,
    /// The mirror on the present link.
    pub(crate) peer: Option<Member>,
    /// All that the view's mirror holds is here.
    pub(crate) adopted: bool,
    asked: Option<Asked>,
    stall: Stall,
    next_try: Duration,
    /// When the register was last asked, and when it was last asked for a change that it
    /// made.
    asked_at: Duration,
    pub(crate) confirmed: Duration,
}

/// A change of the view that a primary asks for.
#[derive(Debug, Clone)]
pub(crate) enum ViewChange {
    /// The primary attaches in `epoch`. `peer`: the node on the link; `member`: it is to
    /// be the view's mirror; `adopted`: all that it holds is here.
    Attach {
        epoch: u64,
        peer: Option<Member>,
        member: bool,
        adopted: bool,
    },
    /// The primary goes on without its mirror.
    Alone,
    /// The mirror holds everything.
    Admit(Member),
    /// The primary begins this greater epoch: a node has promised one above its own, or
    /// another node is to be the mirror.
    Raise(u64),
    /// Changes nothing but the version, which tells a backup that its primary lives.
    Look,
}

/// The outcome of a change.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The register as it then stood, if that is known.
    register: Option<Register>,
    /// The register may have been changed, whatever the result says.
    pub(crate) swapped: bool,
    /// It was changed by this call.
    written: bool,
    pub(crate) result: Result<()>,
}

struct Asked {
    change: ViewChange,
    outcome: Arc<Mutex<Option<Outcome>>>,
}

/// How long the mirror kept its primary from acknowledging, less what it has
/// made good since.
#[derive(Debug, Default)]
struct Stall {
    total: Duration,
    seen: Duration,
}

impl Stall {
    fn pass(&mut self, now: Duration, up: bool) {
        let passed = now.saturating_sub(std::mem::replace(&mut self.seen, now));
        self.total = match up {
            true => self.total.saturating_sub(passed / FORGIVE),
            false => self.total + passed,
        };
    }
}

/// This node as a member, in the life of its copy.
pub fn member(store: &Store) -> Member {
    let sb = store.superblock();
    Member {
        node: sb.node,
        incarnation: sb.life,
    }
}

/// The primary that asks for a change.
#[derive(Debug, Clone)]
struct Claimant {
    volume: String,
    me: Member,
    /// The epoch of the view that its own copy knows.
    view: u64,
    /// A mutation: a sign of life leaves no trace.
    silent: bool,
}

impl Claimant {
    fn of(store: &Store) -> Claimant {
        Claimant {
            volume: store.spec().volume.clone(),
            me: member(store),
            view: store.superblock().view.epoch,
            silent: store.mutations.look_silently.is_on(),
        }
    }

    fn refused(&self, r: &Register, why: Refusal) -> Error {
        let primary = r.primary.as_ref().map_or("nobody", |p| &p.node);
        match why {
            Refusal::NotPrimary if self.view > r.epoch => Error::Stale(format!(
                "this node's copy of volume {} is of epoch {}, the register of views knows epoch {} and node {primary} as primary: the views were changed by hand while `failover` was manual. `mojim promote --force` on the node that is to go on settles it",
                self.volume, self.view, r.epoch
            )),
            Refusal::NotPrimary => Error::Stale(format!(
                "node {primary} is the primary of volume {} since epoch {}; run the program there",
                self.volume, r.epoch
            )),
            Refusal::NotMember => Error::Protocol(format!(
                "this node's copy of volume {} lost what it held as node of the view; it waits for {}",
                self.volume,
                r.mirror
                    .as_ref()
                    .map_or("`mojim promote --force`", |m| &m.node)
            )),
            Refusal::OldEpoch => {
                Error::Protocol(format!("epoch {} is in the register already", r.epoch))
            }
        }
    }

    /// The register after `change`; `None` if it is so already.
    fn decide(&self, reg: &Register, change: &ViewChange) -> Result<Option<Register>, Refusal> {
        let me = &self.me;
        match change {
            ViewChange::Attach {
                epoch,
                peer,
                member,
                adopted,
            } => {
                // What the view's mirror holds was compared with this copy only if that
                // mirror is the node on the link.
                let adopted = *adopted && reg.mirror.is_some() && reg.mirror == *peer;
                let mirror = peer.as_ref().filter(|_| *member);
                reg.attach(me, mirror, *epoch, adopted).map(Some)
            }
            // Even if the register says so already: an admission whose answer was lost may
            // still be on its way to the register, and fails from now on.
            ViewChange::Alone => reg.alone(me).map(Some),
            ViewChange::Admit(peer) if reg.is_primary(me) && reg.is_mirror(peer) => Ok(None),
            // It follows in the epoch that this node's copy has begun.
            ViewChange::Admit(peer) => reg.admit(me, peer, self.view).map(Some),
            ViewChange::Raise(epoch) if reg.is_primary(me) && reg.epoch == *epoch => Ok(None),
            ViewChange::Raise(epoch) => reg.raise(me, *epoch).map(Some),
            ViewChange::Look => reg.look(me).map(Some),
        }
    }

    fn carry_out(&self, views: &dyn ViewRegister, change: &ViewChange) -> Outcome {
        let reg = match views.read(&self.volume) {
            Ok(reg) => reg,
            Err(e) => {
                return Outcome {
                    register: None,
                    swapped: false,
                    written: false,
                    result: Err(e),
                };
            }
        };
        let mut written = false;
        let (register, swapped, result) = match self.decide(&reg, change) {
            Err(why) => {
                let e = self.refused(&reg, why);
                (reg, false, Err(e))
            }
            Ok(None) => (reg, true, Ok(())),
            Ok(Some(_)) if self.silent && matches!(change, ViewChange::Look) => {
                written = true;
                (reg, false, Ok(()))
            }
            Ok(Some(new)) => match views.swap(&self.volume, &new) {
                Ok(true) => {
                    written = true;
                    (new, true, Ok(()))
                }
                Ok(false) => {
                    let e = Error::Protocol("the view changed meanwhile".into());
                    (reg, true, Err(e))
                }
                Err(e) => (reg, true, Err(e)),
            },
        };
        Outcome {
            register: Some(register),
            swapped,
            written,
            result,
        }
    }
}

impl ViewClient {
    /// A client that knows nothing of the register yet. `limit`: silence after which a
    /// mirror counts as failed.
    pub fn new(
        views: Arc<dyn ViewRegister>,
        errands: Box<dyn RegisterCalls>,
        limit: Duration,
    ) -> ViewClient {
        ViewClient {
            views,
            errands,
            limit,
            register: Register::default(),
            peer: None,
            adopted: false,
            asked: None,
            stall: Stall::default(),
            next_try: Duration::ZERO,
            asked_at: Duration::ZERO,
            confirmed: Duration::ZERO,
        }
    }

    fn read(&mut self, store: &Store) -> Result<Register> {
        self.register = self.views.read(&store.spec().volume)?;
        Ok(self.register.clone())
    }

    /// Whether this node may attach without asking its mirror, by the register.
    pub fn may_attach_alone(&mut self, store: &Store) -> Result<bool> {
        let me = member(store);
        Ok(self.read(store)?.is_primary(&me))
    }

    /// The epoch of the view in which this node is to attach; an error if another node is
    /// its primary. Waits for the register.
    pub(crate) fn view_to_attach(&mut self, store: &Store) -> Result<u64> {
        let reg = self.read(store)?;
        match &reg.primary {
            Some(p) if p.node != store.spec().node => {
                Err(Claimant::of(store).refused(&reg, Refusal::NotPrimary))
            }
            _ => Ok(reg.epoch),
        }
    }

    /// Whether an attach may make this node's copy the mirror's: the register would
    /// refuse it to a node that is its primary by name only.
    pub(crate) fn check_copy_to(&self, store: &Store) -> Result<()> {
        let (reg, me) = (&self.register, member(store));
        match reg.version == 0 || reg.is_primary(&me) {
            true => Ok(()),
            false => Err(Claimant::of(store).refused(reg, Refusal::NotMember)),
        }
    }

    /// An attach without a mirror begins `epoch`. Waits for the register.
    pub(crate) fn attach_alone(&mut self, store: &Store, epoch: u64) -> Result<()> {
        assert!(!self.is_asking());
        let change = ViewChange::Attach {
            epoch,
            peer: self.peer.clone(),
            member: false,
            adopted: self.adopted,
        };
        self.asked_at = store.env().now();
        let outcome = Claimant::of(store).carry_out(&*self.views, &change);
        self.heard(&outcome);
        outcome.result
    }

    fn heard(&mut self, outcome: &Outcome) {
        if let Some(r) = &outcome.register {
            self.register = r.clone();
        }
        if outcome.written {
            self.confirmed = self.asked_at;
        }
    }

    /// Asks for a change; `answer` returns its outcome.
    pub(crate) fn ask(&mut self, store: &Store, change: ViewChange) {
        assert!(!self.is_asking());
        self.asked_at = store.env().now();
        let outcome = Arc::new(Mutex::new(None));
        let (who, what, told) = (Claimant::of(store), change.clone(), outcome.clone());
        self.asked = Some(Asked { change, outcome });
        self.errands.send(Box::new(move |views| {
            let done = who.carry_out(views, &what);
            *lock(&told) = Some(done);
        }));
    }

    /// Whether a change is on its way.
    pub(crate) fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether the change on its way is a new epoch: no link is made before it.
    pub(crate) fn is_raising(&self) -> bool {
        matches!(&self.asked, Some(a) if matches!(a.change, ViewChange::Raise(_)))
    }

    /// The outcome of the change that was asked for, if it is here at `now`.
    pub(crate) fn answer(&mut self, now: Duration) -> Option<(ViewChange, Outcome)> {
        let asked = self.asked.as_ref()?;
        // In this order: a call stores its outcome before it ends.
        let ended = Arc::strong_count(&asked.outcome) == 1;
        let told = lock(&asked.outcome).take();
        let outcome = match told {
            Some(told) => told,
            None if ended => Outcome {
                register: None,
                swapped: true,
                written: false,
                result: Err(Error::Timeout("nobody asks the register of views".into())),
            },
            None => return None,
        };
        self.heard(&outcome);
        if outcome.result.is_err() {
            self.next_try = now + AGAIN;
        }
        Some((self.asked.take()?.change, outcome))
    }

    /// Whether it is time to ask for something that may have failed before.
    pub(crate) fn may_try(&self, now: Duration) -> bool {
        !self.is_asking() && now >= self.next_try
    }

    /// Whether it is time to look whether anything has changed.
    pub(crate) fn should_look(&self, now: Duration) -> bool {
        self.may_try(now) && now.saturating_sub(self.asked_at) >= self.limit / 4
    }

    /// Counts the time up to `now`, while the mirror is needed. `up`: the link works.
    pub(crate) fn watch(&mut self, now: Duration, up: bool) {
        self.stall.pass(now, up);
    }

    /// The link had been of no use for `quiet` when that was noticed.
    pub(crate) fn missed(&mut self, quiet: Duration) {
        self.stall.total += quiet;
    }

    /// Nothing waits for a mirror at `now`.
    pub(crate) fn needs_none(&mut self, now: Duration) {
        self.stall = Stall {
            total: Duration::ZERO,
            seen: now,
        };
    }

    /// Whether the mirror has kept this primary from acknowledging for so long
    /// that the view should change.
    pub(crate) fn is_due(&self) -> bool {
        self.stall.total >= self.limit
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Nobody asks it.
    pub(crate) struct Mute;

    impl ViewRegister for Mute {
        fn read(&self, _: &str) -> Result<Register> {
            Err(Error::Timeout("mute".into()))
        }
        fn swap(&self, _: &str, _: &Register) -> Result<bool> {
            Err(Error::Timeout("mute".into()))
        }
        fn hear(&self, _: crate::request::RaftCall) -> Result<serde_json::Value> {
            Err(Error::Timeout("mute".into()))
        }
    }

    impl RegisterCalls for Mute {
        fn send(&mut self, _: crate::register::RegisterCall) {}
    }

    /// A lease counts from when the register was asked, not from the answer, nor a limit
    /// later; what was not written renews none.
    #[test]
    fn a_lease_counts_from_the_question() {
        let mut c = ViewClient::new(Arc::new(Mute), Box::new(Mute), 1000 * MS);
        let mut answered = |asked_at, written| {
            c.asked_at = asked_at;
            c.heard(&Outcome {
                register: Some(Register::default()),
                swapped: written,
                written,
                result: Ok(()),
            });
            c.confirmed
        };
        assert_eq!(answered(5000 * MS, true), 5000 * MS);
        assert_eq!(answered(9000 * MS, false), 5000 * MS);
    }

    /// When a mirror that works for `up` and fails for `down`, over and over,
    /// is given up, with a limit of one second.
    fn given_up(up: Duration, down: Duration) -> Option<Duration> {
        let mut stall = Stall::default();
        let mut now = Duration::ZERO;
        for _ in 0..2000 {
            for (time, works) in [(up, true), (down, false)] {
                let end = now + time;
                while now < end {
                    now += MS;
                    stall.pass(now, works);
                    if stall.total >= 1000 * MS {
                        return Some(now);
                    }
                }
            }
        }
        None
    }

    /// A mirror came back and failed again within `failure_limit`, over and
    /// over; each time the clock began anew, and sync points stalled for ever.
    #[test]
    fn a_mirror_that_comes_and_goes_is_given_up() {
        assert_eq!(given_up(Duration::ZERO, 5000 * MS), Some(1000 * MS));
        let half = given_up(500 * MS, 500 * MS).expect("it stalls half of the time");
        assert!(half < 3000 * MS, "{half:?}");
        let worst = given_up(2000 * MS, 400 * MS).expect("it stalls a sixth of the time");
        assert!(worst < 20_000 * MS, "{worst:?}");
        // A short break now and then is no failure.
        assert_eq!(given_up(10_000 * MS, 900 * MS), None);
        assert_eq!(given_up(1000 * MS, 100 * MS), None);
    }
}
