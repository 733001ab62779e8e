//! The actions of an operator, and an application that ends.
//!
//! An operator promotes, gives up and stops.
//!
//! Owns the decisions on which copy goes on where no register decides.
//!
//! Invariants:
//!
//! - An operator gives up what is missing only after having looked at all nodes that run.
//! - Where there are backups, or a log is damaged, a copy with everything that is acknowledged goes
//!   on by force, if there is one. The refusal of an attach and `mojim status` say which nodes have
//!   more, and of which epoch. A node that is down is started first.

use std::sync::Arc;

use mojim_env::Error;
use mojim_format::State;
use mojim_protocol::promotion::{Asked, Other, judge};
use mojim_replica::mirror::Mirror;
use mojim_store::store::Store;

use super::node::{NAMES, Role};
use super::setup::Mode;
use super::state::{Checked, Cluster};
use crate::nodes::NODES;

impl Cluster {
    /// As `mojim promote --force` does after a refused attach: the operator has looked,
    /// and what is missing is lost for good.
    pub(super) fn go_on_by_word(&mut self, n: usize, store: Arc<Store>) -> Checked {
        // An attach asks its mirror by itself: if there is no other node, and no log is damaged, the
        // operator takes its word, and the checker notices if it was wrong.
        let may_lack = self.setup.backup || self.check.is_damaged(n);
        let has_less = |to: usize| may_lack && self.check.has_less(n, to);
        let down = |to: usize| matches!(self.nodes[to].role, Role::Down);
        if (0..NODES).any(|to| has_less(to) && down(to)) {
            // A node that has more is started first.
            self.nodes[n].word = true;
            drop(store);
            self.world.kill(NAMES[n]);
            return self.fallen(n);
        }
        let has_less = (0..NODES).any(has_less);
        self.check.word();
        // Node `n` may have nothing, or less than another node. Then the running node that has
        // the most goes on: of an older branch a higher LSN is not more.
        let whole = |to: usize| match &self.nodes[to].role {
            Role::Mirror(mir) if mir.m.store.superblock().state == State::Whole => {
                let most = (self.check.has_all(to), mir.m.tail());
                Some((most, to, mir.m.clone()))
            }
            _ => None,
        };
        let other = match store.superblock().state {
            State::Whole if !has_less => None,
            _ => (0..NODES).filter_map(whole).max_by_key(|(most, ..)| *most),
        };
        let others_run = self.places.iter().all(|to| *to == n || !down(*to));
        if other.is_none() && store.superblock().state != State::Whole && others_run {
            // Every copy is gone: an attach finds that, too.
            drop(store);
            self.world.kill(NAMES[n]);
            return self.fallen(n);
        }
        if let Some((_, to, m)) = other {
            drop(store);
            self.world.kill(NAMES[n]);
            self.fallen(n)?;
            return self.promote_by_word(to, m);
        }
        let m = Arc::new(Mirror::new(store, NAMES[n], self.setup.secondary));
        self.promote_by_word(n, m)
    }

    /// The latest view of the other nodes that are up: a promotion asks them.
    fn latest_of_others(&self, n: usize) -> u64 {
        let others = self.nodes.iter().enumerate().filter(|(i, _)| *i != n);
        let views = others.filter_map(|(_, node)| match &node.role {
            Role::Down => None,
            Role::Primary(p) => Some(p.p.store.superblock().view.epoch),
            Role::Mirror(m) => Some(m.m.store.superblock().view.epoch),
        });
        views.max().unwrap_or(0)
    }

    /// The answers of the running nodes other than `two`, the one given up and the one
    /// promoted.
    fn others_than(&self, two: [usize; 2]) -> Vec<Other> {
        let all = self.nodes.iter().enumerate();
        let others = all.filter(|(i, _)| !two.contains(i));
        let stores = others.filter_map(|(i, node)| match &node.role {
            Role::Down => None,
            Role::Primary(p) => Some((i, p.p.store.tail(), p.p.store.superblock(), None)),
            Role::Mirror(m) => {
                let sb = m.m.store.superblock();
                let knows = m.m.knows(&sb);
                Some((i, m.m.tail(), sb, knows))
            }
        });
        let answers = stores.map(|(i, tail, sb, known)| {
            let whole = sb.state == State::Whole;
            Other {
                node: NAMES[i].to_owned(),
                epoch: sb.view.epoch,
                leads: whole && sb.view.primary == NAMES[i],
                has: Some(tail).filter(|_| whole),
                known,
            }
        });
        answers.collect()
    }

    fn promote_by_word(&mut self, n: usize, m: Arc<Mirror>) -> Checked {
        let done = match self.setup.views {
            true => m.force(&*self.views(n)),
            false => m.promote(self.latest_of_others(n)).map(Some),
        };
        self.note(|| format!("node {} goes on by an operator's word: {done:?}", NAMES[n]));
        if let Ok(Some((epoch, tail))) = done
            && self.world.crashed(NAMES[n]).is_none()
        {
            self.word_of = epoch;
            self.promotions += 1;
            self.check.promoted(n, &m.store, tail, false)?;
            self.check.left_with(&m.store, tail);
            self.primary = n;
            m.close();
            if m.store.close_clean(tail).is_ok() {
                self.check.closed(n, &m.store)?;
            }
            return self.end(n);
        }
        self.nodes[n].word = true;
        drop(m);
        self.world.kill(NAMES[n]);
        self.fallen(n)
    }

    /// The program ends with an error, which an operator has to decide.
    pub(super) fn ask_operator(&mut self, n: usize) -> Checked {
        self.note(|| format!("node {} lacks what was acknowledged", NAMES[n]));
        self.nodes[n].word = true;
        self.world.kill(NAMES[n]);
        self.observe(n)
    }

    /// The operator gives the primary up and promotes the mirror.
    pub(super) fn promote(&mut self) -> Checked {
        let (old, n) = (self.primary, self.mirror());
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        let view = m.store.standing();
        let asked = Asked {
            force: false,
            rule: self.setup.rule(),
        };
        let others = self.others_than([old, n]);
        if let Err(why) = judge(&m.candidate(), false, &others, asked) {
            self.note(|| format!("node {} is not promoted: {why:?}", NAMES[n]));
            return Ok(());
        }
        // As in `Node::promote`: what a damaged log lacks is given up only by force,
        // except in `async` if the log has no hole.
        let missing = m.store.known_missing().is_some_and(|k| k > m.tail());
        if missing && (self.setup.mode != Mode::Async || m.store.has_hole()) {
            return Ok(());
        }
        // This node may still take itself for the primary of a view that the other node's
        // promotion ended unseen. The operator, who made that promotion, knows better.
        if view.primary == NAMES[n] {
            return Ok(());
        }
        // Nor does a copy go on that was left behind by the operator's last forced
        // promotion and does not know it: `mojim promote` asks the other node for its
        // view.
        if view.epoch < self.word_of {
            return Ok(());
        }
        self.note(|| format!("node {} is given up", NAMES[old]));
        self.world.kill(NAMES[old]);
        self.observe(old)?;
        self.nodes[old].gone = self.rng.coin();
        let promoted = m.promote(self.latest_of_others(n));
        self.note(|| format!("node {} is promoted: {promoted:?}", NAMES[n]));
        let Ok((_, tail)) = promoted.clone() else {
            drop(m);
            self.half_promoted = Some(n);
            return self.observe(n);
        };
        if self.world.crashed(NAMES[n]).is_some() {
            drop(m);
            return self.fallen(n);
        }
        self.promotions += 1;
        let lossy = self.setup.mode == Mode::Async;
        self.check.word();
        self.check.promoted(n, &m.store, tail, lossy)?;
        self.primary = n;
        m.close();
        let closed = m.store.close_clean(tail);
        if closed.is_ok() {
            self.check.closed(n, &m.store)?;
        }
        self.compare(n, &m.store)?;
        drop(m);
        self.end(n)
    }

    /// The application detaches, or the mirror's daemon stops.
    pub(super) fn detach(&mut self) -> Checked {
        if self.rng.coin() {
            let n = self.primary;
            if let Role::Primary(prim) = &mut self.nodes[n].role
                && prim.ready
            {
                prim.closing = true;
            }
            return self.close_primary();
        }
        self.stop_mirror(self.mirror())
    }

    /// A daemon stops cleanly.
    pub(super) fn stop_mirror(&mut self, n: usize) -> Checked {
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        self.note(|| format!("node {} stops", NAMES[n]));
        m.close();
        if m.store.superblock().state == State::Whole && m.store.poisoned().is_none() {
            // As in `Node::close_mirror`.
            let tail = m.tail();
            let limit = m.committed().min(tail);
            let _ = m.store.apply(limit, usize::MAX);
            let nothing_left =
                (0..self.setup.lanes).all(|i| m.store.last_of(i).0 <= m.store.applied());
            let done = m.store.checkpoint();
            if done.is_ok()
                && nothing_left
                && m.store.applied() == tail
                && m.store.close_clean(tail).is_ok()
            {
                self.check.closed(n, &m.store)?;
                drop(m);
                return self.end(n);
            }
        }
        drop(m);
        self.world.kill(NAMES[n]);
        self.observe(n)
    }

    /// As in `Inner::close`, once everything is committed.
    fn close_primary(&mut self) -> Checked {
        let n = self.primary;
        let Role::Primary(prim) = &self.nodes[n].role else {
            return Ok(());
        };
        let p = prim.p.clone();
        let last = p.last();
        let busy = p.committed() < last || !prim.spills.is_empty();
        if !prim.closing || busy || p.store.poisoned().is_some() {
            return Ok(());
        }
        self.observe(n)?;
        self.note(|| "detaches".into());
        let closed = p
            .store
            .persist_all()
            .and_then(|()| p.store.apply(last, usize::MAX))
            .and_then(|at| match at == last {
                true => p.store.close_clean(last),
                false => Err(Error::Busy("not applied".into())),
            });
        if closed.is_ok() {
            self.check.closed(n, &p.store)?;
            drop(p);
            return self.end(n);
        }
        self.note(|| format!("not closed: {closed:?}"));
        drop(p);
        self.world.kill(NAMES[n]);
        self.observe(n)
    }
}
