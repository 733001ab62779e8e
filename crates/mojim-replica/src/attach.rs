//! How a primary attaches: it waits for its mirror, or goes on without it if its view or
//! the register allows that.
//!
//! Owns the decision whether and when to go alone, and when to give up. One state
//! machine, stepped beside the session by its caller: a program's volume, a daemon that
//! heals, the simulator. It waits for nothing but the register's answer.
//! `docs/reference/protocol.md`, "Session".
//!
//! Invariants:
//!
//! - No node goes alone whose log lacks what it is known to have acknowledged.
//! - Without a register a node goes alone only if both hold:
//!   - Its last view is its own and not promised away.
//!   - It has no mirror, or no sync point waits for a mirror (`async`).
//! - With a register only the node that the register names the primary goes alone.

use std::time::Duration;

use mojim_env::{Error, Result};
use mojim_format::State;
use std::sync::atomic::Ordering::Acquire;

use crate::primary::Primary;
use crate::register::VIEW_TIMEOUT;
use crate::session::Session;

/// How long a primary that may go alone waits for a mirror first, without a register.
const SOON: Duration = Duration::from_millis(500);
/// How long a primary that may not go alone waits, at least.
const AT_LEAST: Duration = Duration::from_secs(5);

/// How the volume is attached.
#[derive(Debug, Clone, Copy)]
pub struct AttachPolicy {
    /// No sync point waits for the mirror.
    pub asynchronous: bool,
    /// Silence after which a node counts as failed (`failure_limit`); none without a
    /// register.
    pub failure_limit: Option<Duration>,
    /// How long a mirror may stand still before a sync point fails.
    pub patience: Duration,
    /// Whether to go alone at all: a daemon that attaches to bring the mirror up to date
    /// does not.
    pub may_go_alone: bool,
}

/// How far an attach is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attaching {
    /// The session is stepped on.
    Waits,
    /// The primary has begun its epoch, with its mirror or alone.
    Done,
}

/// A primary that attaches.
pub struct Attach {
    policy: AttachPolicy,
    /// What the copy was at the beginning.
    state: State,
    /// Whether its view allows it to go alone, if there is no register.
    by_view: bool,
    /// Silence after which it goes alone, or gives up.
    limit: Duration,
    /// Since when nothing has moved.
    since: Duration,
    copied: u64,
    spilled: u64,
}

impl Attach {
    /// Begins an attach, before the session's first step.
    pub fn new(session: &mut Session, policy: AttachPolicy) -> Attach {
        let primary = session.primary().clone();
        let store = &primary.store;
        let sb = store.superblock();
        let is_whole = sb.state == State::Whole;
        // Alone by its last view, or not bound to wait for the mirror.
        let by_view = is_whole
            && sb.view.epoch > 0
            && store.standing().primary == sb.view.primary
            && (sb.view.mirror.is_empty() || policy.asynchronous);
        let limit = match policy.failure_limit {
            Some(limit) => limit,
            None if by_view => SOON,
            None => policy.patience.max(AT_LEAST),
        };
        // A register that cannot be read now is asked again below. Where another node knows
        // of more, the mirror may have it.
        let limit = match session.is_alone_by_register() {
            Ok(true) if is_whole && !session.was_told_of_more() => Duration::ZERO,
            _ => limit,
        };
        Attach {
            policy,
            state: sb.state,
            by_view,
            limit,
            since: store.env().now(),
            copied: 0,
            spilled: primary.spills.moved(),
        }
    }

    /// After each step of the session. `progress` is told of a copy's bytes, done and in
    /// all. An error ends the attach: the session's own, the copy's, or that the mirror
    /// is not reached and nothing allows to go on without it (`ETIMEDOUT`).
    pub fn step(
        &mut self,
        session: &mut Session,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Attaching> {
        let primary = session.primary().clone();
        if let Some(e) = session.fatal() {
            return Err(e.clone());
        }
        primary.store.check()?;
        if primary.ready.load(Acquire) {
            return Ok(Attaching::Done);
        }
        let now = primary.store.env().now();
        self.look_for_progress(&primary, now, progress);
        let limit = primary.standstill(self.limit);
        // A primary that has begun goes on by itself, alone if need be.
        let stands_still =
            now - self.since > limit && !session.is_active() && session.is_attaching();
        if !stands_still || session.is_asking() {
            return Ok(Attaching::Waits);
        }
        self.without_mirror(session, &primary, now)
    }

    /// A copy that moves, or a spill file that goes ahead of its record, ends the
    /// silence.
    fn look_for_progress(
        &mut self,
        primary: &Primary,
        now: Duration,
        progress: &mut dyn FnMut(u64, u64),
    ) {
        if let Some(c) = primary.store.progress.get(now)
            && c.running
            && c.moved != self.copied
        {
            self.copied = c.moved;
            progress(c.done, c.total);
            self.since = now;
        }
        let spilled = primary.spills.moved();
        if std::mem::replace(&mut self.spilled, spilled) != spilled {
            self.since = now;
        }
    }

    /// The mirror is silent: goes alone, waits on, or gives up.
    fn without_mirror(
        &mut self,
        session: &mut Session,
        primary: &Primary,
        now: Duration,
    ) -> Result<Attaching> {
        // Leaves time for the register's answer.
        let is_patient = now - self.since < self.limit + VIEW_TIMEOUT * 2;
        let mut unknown = None;
        let may = match session.may_attach_alone() {
            None => self.by_view,
            Some(Ok(may)) => may && self.state == State::Whole,
            Some(Err(e)) => {
                unknown = Some(e);
                false
            }
        };
        if may && self.policy.may_go_alone {
            primary.store.check_complete()?;
            match session.go_alone() {
                // The register did not answer, or changed meanwhile.
                Err(Error::Timeout(_) | Error::Protocol(_)) if is_patient => {
                    return Ok(Attaching::Waits);
                }
                r => r?,
            }
            primary.store.apply_all(primary.store.tail())?;
            return Ok(Attaching::Done);
        }
        if self.policy.failure_limit.is_some() && is_patient {
            return Ok(Attaching::Waits);
        }
        Err(unknown.unwrap_or_else(|| self.unreachable(session, primary)))
    }

    fn unreachable(&self, session: &Session, primary: &Primary) -> Error {
        let spec = primary.store.spec();
        let what_then = match self.state {
            State::Whole => format!(
                "If the mirror is lost for good, and this machine has kept its power since the last sync point, promote this node. It then goes on alone: `mojim promote --name {}`. Otherwise the mirror may have acknowledged sync points that are missing here",
                spec.node
            ),
            _ => "This node has no whole copy: a volume begins with its mirror, which may have one"
                .to_owned(),
        };
        let (mirror, why) = (session.peer(), session.last_error.as_deref());
        Error::Timeout(format!(
            "volume {}: the mirror {mirror} cannot be reached ({}). Start its daemon with `mojim node --name {mirror}`. {what_then}",
            spec.volume,
            why.unwrap_or("no answer")
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mojim_config::WriteBack;
    use mojim_env::Address;
    use mojim_format::View;

    use super::*;
    use crate::holders::Peer;
    use crate::primary::tests::alone;

    /// A peer at an address where no node listens.
    fn silent(name: &str) -> Peer {
        let tcp = Address::Tcp(([127, 0, 0, 1], 9).into());
        Peer {
            name: name.into(),
            address: tcp.clone(),
            tcp,
            shared: false,
        }
    }

    /// Attaches until it is over, without a register and without waiting: the silence has
    /// passed.
    fn attach(primary: &Arc<Primary>, asynchronous: bool, may_go_alone: bool) -> Result<()> {
        let policy = AttachPolicy {
            asynchronous,
            failure_limit: None,
            patience: Duration::ZERO,
            may_go_alone,
        };
        let mut s = Session::attach(primary.clone(), "a", silent("b"));
        let mut a = Attach::new(&mut s, policy);
        a.limit = Duration::ZERO;
        loop {
            s.step();
            if a.step(&mut s, &mut |_, _| {})? == Attaching::Done {
                return Ok(());
            }
            std::thread::yield_now();
        }
    }

    fn of_view(name: &str, mirror: &str) -> (Arc<Primary>, std::path::PathBuf) {
        let (p, dir) = alone(name, WriteBack::Auto);
        p.begin_unreplicated("a").unwrap();
        let view = View {
            epoch: p.epoch(),
            primary: "a".into(),
            mirror: mirror.into(),
        };
        p.store.update(|s| s.view = view).unwrap();
        p.ready.store(false, std::sync::atomic::Ordering::Release);
        (Arc::new(p), dir)
    }

    /// The simulator's copy of this had no such condition: a node that had promised
    /// another node's epoch, and never received it, went on alone beside that node.
    #[test]
    fn who_has_promised_itself_to_another_does_not_go_alone() {
        let (p, dir) = of_view("attach-promised", "");
        attach(&p, false, true).unwrap();
        p.ready.store(false, std::sync::atomic::Ordering::Release);
        let other = p.store.superblock().promised + 1;
        assert!(!p.store.is_own(other));
        p.store.promise(other).unwrap();
        for asynchronous in [false, true] {
            let e = attach(&p, asynchronous, true).unwrap_err();
            assert!(matches!(e, Error::Timeout(_)), "{e}");
        }
        drop(p);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn who_counts_on_a_mirror_does_not_go_alone() {
        let (p, dir) = of_view("attach-mirror", "b");
        let e = attach(&p, false, true).unwrap_err();
        assert!(
            e.to_string().contains("the mirror b cannot be reached"),
            "{e}"
        );
        // No sync point waits for it.
        attach(&p, true, true).unwrap();
        drop(p);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// A daemon that brings the mirror up to date has nothing to do alone.
    #[test]
    fn who_heals_does_not_go_alone() {
        let (p, dir) = of_view("attach-heals", "");
        assert!(attach(&p, true, false).is_err());
        attach(&p, true, true).unwrap();
        drop(p);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
