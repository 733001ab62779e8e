//! The contents that the volume must hold: every sync point ever made, what was acknowledged, and
//! what each copy must still have after which failure.
//!
//! Owns the history ([`Points`]), the acknowledged floor, and each node's hold. It learns
//! of the engine's claims only where the application would (a sync point returned), and
//! looks at the copies themselves for the rest. Every violation of an invariant of
//! `docs/reference/invariants.md` is returned as text that begins with the invariant's number.

use mojim_format::State;
use mojim_protocol::AckRule;
use mojim_store::store::Store;
use std::collections::BTreeMap;

use crate::model::ModelOp;
use crate::nodes::{BACKUP, NAMES, NODES};
use crate::points::{Acked, Points};
use crate::world::{CrashKind, World};

/// What a copy must recover to, at least; `None` if it need not recover anything.
#[derive(Debug, Clone, Copy, Default)]
struct Hold {
    /// After its process dies.
    kill: Option<usize>,
    /// After its power is lost.
    power: Option<usize>,
}

/// One copy as the checker knows it.
#[derive(Debug, Default)]
struct Copy {
    hold: Hold,
    /// The point that the copy had at each of its failures, since its acknowledgements
    /// may still be on their way; with it, how often the copy had lost its power before.
    was: Vec<(usize, u32)>,
    /// How often it has lost its power, its log was damaged, or it was replaced. A process
    /// that is killed loses nothing: ring, memory and disk stay.
    failures: u32,
    /// The highest point that was seen applied to the data area.
    applied: usize,
    /// Up to where the data area may have been changed before the last crash. Below this
    /// point its content is a mixture that replay has to repair.
    mixed: usize,
    /// The point that was applied at the last comparison.
    compared: Option<usize>,
    /// For a backup: the point that was applied when it became one.
    backup: Option<usize>,
    /// Its log was damaged: the LSN up to which the readable part tells what was
    /// acknowledged.
    told: Option<u64>,
    /// What the log told that was damaged last, whether the copy was replaced since or not.
    knew: u64,
    /// A start read this from its damaged log, and has not opened the copy since.
    is_unopened: bool,
    /// It was put back as of an earlier time, and has not begun an epoch since.
    earlier: bool,
    /// Its logs alone were, so that its data files may show more than they do.
    ahead: bool,
    /// The LSN up to which the nodes that answered its last start knew what was acknowledged.
    answered: u64,
    /// Another node has replaced it: how many points there were then.
    gone: Option<usize>,
}

/// The history of one volume.
pub struct Checker {
    /// Every sync point.
    pub points: Points,
    /// The newest point that the application was told is safe.
    pub floor: usize,
    copies: [Copy; NODES],
    /// The point from which a backup went on in the place of primary and mirror: whatever
    /// is acknowledged from then on is behind this point.
    left: usize,
    /// The backup that went on, or will once its view begins, by decision of the
    /// register: no other node acknowledges anything.
    pub sole: Option<usize>,
    /// The last acknowledged point known to be lost to more failures than the mode
    /// survives: no node goes on with less before an operator says so.
    lost: Option<usize>,
    /// The node whose damaged log alone told of `lost`.
    lost_by: Option<usize>,
    /// The nodes of the view.
    pub view: [bool; NODES],
    /// Sync points acknowledged.
    pub acks: u64,
    /// Times that acknowledged sync points were lost to more failures than
    /// the mode promises to survive.
    pub excused: u64,
    /// Comparisons of a whole data area.
    pub compared: u64,
    /// Damaged logs that cost their copies something.
    pub damaged: u64,
    /// A node went on with a damaged log, and with a data area into which part of what
    /// was given up may have been applied. Nothing then determines what the files are;
    /// they may differ between nodes, and may not fit the catalogue.
    pub blurred: bool,
    /// Times that a node took over without points of which its damaged log does not tell.
    pub untold: u64,
}

/// A broken invariant.
pub type Violation = String;
type Checked<T = ()> = Result<T, Violation>;

impl Default for Checker {
    fn default() -> Self {
        let mut copies: [Copy; NODES] = Default::default();
        for c in &mut copies[BACKUP..] {
            c.backup = Some(0);
        }
        Checker {
            points: Points::default(),
            floor: 0,
            copies,
            left: 0,
            sole: None,
            lost: None,
            lost_by: None,
            view: std::array::from_fn(|n| n < BACKUP),
            acks: 0,
            excused: 0,
            compared: 0,
            damaged: 0,
            blurred: false,
            untold: 0,
        }
    }
}

impl Checker {
    /// A sync point was appended behind `parent` by node `n`.
    pub fn appended(
        &mut self,
        n: usize,
        parent: usize,
        epoch: u64,
        first: u64,
        last: u64,
        changes: &[ModelOp],
    ) -> Checked<usize> {
        let id = self.points.append(parent, epoch, first, last, changes)?;
        // The record lies in a ring that outlives the process before its acknowledgement
        // is awaited.
        self.copies[n].hold.kill = Some(id);
        Ok(id)
    }

    /// A store is about to be opened: a clean copy whose log is in memory depends on this
    /// boot from now on.
    pub fn opening(&mut self, n: usize, persistent: bool) {
        if !persistent {
            self.copies[n].hold.power = None;
        }
    }

    /// A store was closed with everything in its data area.
    pub fn closed(&mut self, n: usize, store: &Store) -> Checked {
        let p = self.points.exact(&store.history(), store.applied());
        let Some(p) = p else {
            return Err(format!("4: node {n} closed at LSN {}", store.applied()));
        };
        self.copies[n].hold = Hold {
            kill: Some(p),
            power: Some(p),
        };
        self.covered()
    }

    /// A store was opened after the last process ended for any reason: it must have what
    /// its medium had to keep. `replaced`: the copy was replaced or cut back in the last
    /// step, which was not observed otherwise; then only what was acknowledged counts.
    pub fn opened(&mut self, n: usize, store: &Store, replaced: bool) -> Checked {
        let state = store.superblock().state;
        let hold = self.copies[n].hold;
        if state != State::Whole {
            if let Some(h) = hold.kill
                && h != 0
            {
                return Err(format!(
                    "3: node {n} opens {state:?}, but must hold {}",
                    self.points.text(h)
                ));
            }
            self.forget(n);
            return self.lower();
        }
        let history = store.history();
        let Some(tail) = self.points.exact(&history, store.tail()) else {
            return Err(format!(
                "3: node {n} recovers LSN {}, which ends no sync point ({:?})",
                store.tail(),
                history.entries()
            ));
        };
        self.told(n, store, tail)?;
        self.copies[n].is_unopened = false;
        if let Some(h) = hold.kill
            && !self.points.is_within(h, tail)
            && replaced
        {
            self.forget(n);
            self.copies[n].hold.kill = Some(tail);
            self.copies[n].mixed = tail;
            if store.level().is_persistent() {
                self.copies[n].hold.power = self.points.exact(&history, store.checkpointed());
            }
            self.lower()?;
        } else if let Some(h) = hold.kill
            && !self.points.is_within(h, tail)
        {
            return Err(format!(
                "3: node {n} recovers {}, but must hold {}",
                self.points.text(tail),
                self.points.text(h)
            ));
        }
        let applied = self.copies[n].applied;
        // A copy of another branch, begun and ended between two looks, replaced this one.
        let point = &self.points[applied];
        let replaced = history
            .epoch_at(point.last)
            .is_some_and(|e| e != point.epoch);
        if replaced {
            self.copies[n].applied = tail;
        } else if !self.points.is_within(applied, tail) {
            return Err(format!(
                "1: node {n} recovers {}, but its data area had {}",
                self.points.text(tail),
                self.points.text(applied)
            ));
        }
        let c = &mut self.copies[n];
        c.hold.kill = Some(tail);
        c.compared = None;
        // A record that was being applied when the process ended may be in the data area.
        if self.points[tail].last > self.points[c.mixed].last {
            c.mixed = tail;
        }
        self.looked(n, store)
    }

    /// A node that refuses to go on, because its log tells of more that was acknowledged,
    /// must name the end of a sync point: no part of a sync point was ever acknowledged.
    fn told(&self, n: usize, store: &Store, tail: usize) -> Checked {
        if store.has_part() && !self.is_damaged(n) {
            return Err(format!(
                "told: node {n} recovers {}, and finds that its log lacks what its files show, but no log of it was damaged",
                self.points.text(tail)
            ));
        }
        match store.known_missing() {
            Some(known) if self.points.exact(&store.history(), known).is_none() => Err(format!(
                "told: node {n} recovers {}, and its log tells that LSN {known} was committed, which ends no sync point",
                self.points.text(tail)
            )),
            _ => Ok(()),
        }
    }

    /// Whether a dead process's store, as it was in memory, has less than the copy held
    /// before, because the copy was being replaced or cut back to a fork.
    pub fn regressed(&self, n: usize, store: &Store, tail: u64) -> bool {
        let Some(hold) = self.copies[n].hold.kill else {
            return false;
        };
        let now = self.points.rounded(&store.history(), tail);
        store.is_switching() || now.is_none_or(|p| !self.points.is_within(hold, p))
    }

    /// The copy is being replaced, or was discarded.
    fn forget(&mut self, n: usize) {
        let c = &mut self.copies[n];
        c.hold = Hold::default();
        c.applied = 0;
        c.mixed = 0;
        c.compared = None;
        c.told = None;
        (c.earlier, c.ahead) = (false, false);
    }

    /// A whole copy came in the place of node `n`'s, perhaps within one step, and as of an earlier
    /// sync point than that to which node `n` had applied its records: these come again.
    pub fn copied(&mut self, n: usize, store: &Store) {
        if let Some(p) = self.points.exact(&store.history(), store.applied()) {
            self.copies[n].applied = p;
        }
    }

    /// Node `n`'s process ended. It may have been applying up to `limit`; `had` is what
    /// it had received.
    pub fn crashed(
        &mut self,
        n: usize,
        kind: CrashKind,
        limit: Option<usize>,
        had: Option<usize>,
    ) -> Checked {
        let c = &mut self.copies[n];
        if let Some(had) = had {
            c.was.push((had, c.failures));
        }
        if kind == CrashKind::Power {
            c.failures += 1;
            c.hold.kill = c.hold.power;
        }
        if let Some(l) = limit {
            self.mix(n, l);
        }
        self.lower()
    }

    /// A damaged log of node `n` is about to be read. Everything up to `left` can be read,
    /// and the readable records tell that everything up to `told` was acknowledged. This
    /// copy has lost what is behind `left`, as it loses a log in memory with the power; but
    /// here the copy knows of the loss, up to `told`.
    pub fn damaged(&mut self, n: usize, left: u64, told: u64) -> Checked {
        let Some(hold) = self.copies[n].hold.kill else {
            return Ok(());
        };
        if self.points[hold].last <= left {
            self.tells_less(n, told.max(left));
            self.tells_more(n, left, told);
            return Ok(());
        }
        let p = self.points.before(hold, left);
        let applied = self.points.before(self.copies[n].applied, left);
        let c = &mut self.copies[n];
        c.hold.kill = Some(p);
        c.hold.power = c.hold.power.map(|_| p);
        c.applied = applied;
        c.failures += 1;
        c.told = Some(told.max(left));
        c.knew = told.max(left);
        c.is_unopened = true;
        self.damaged += 1;
        if self.lost_by == Some(n) {
            // What the log told before, it may tell no more: it was damaged again.
            self.lost = self.lost.map(|l| self.points.before(l, told.max(left)));
        }
        self.lower()
    }

    /// The damaged log of node `n` is read again, and tells of `told`. The start that read it
    /// before ended before it had opened the copy, so what the log told then was not made durable:
    /// records that were never acknowledged may be gone with the power.
    fn tells_less(&mut self, n: usize, told: u64) {
        let c = &mut self.copies[n];
        if !c.is_unopened || c.told.is_none_or(|t| t <= told) {
            return;
        }
        (c.told, c.knew) = (Some(told), told);
        if self.lost_by == Some(n) {
            self.lost = self.lost.map(|l| self.points.before(l, told));
        }
    }

    /// The damaged log of node `n` has lost nothing that the copy was known to have made durable. But
    /// a failure cut off the step that made more durable, up to `told`, of which `left` can be read.
    fn tells_more(&mut self, n: usize, left: u64, told: u64) {
        let c = &mut self.copies[n];
        if told <= left || c.told.is_some() {
            return;
        }
        (c.told, c.knew, c.is_unopened) = (Some(told), told, true);
        self.damaged += 1;
    }

    /// Node `n` lost its power, and has now what it had at `p`, which is of an earlier time;
    /// `logs_alone`: its data files are not.
    /// A node that runs knows that everything up to LSN `known` was acknowledged.
    pub fn put_back(&mut self, n: usize, p: usize, logs_alone: bool, known: u64) -> Checked {
        let applied = self.points.common(self.copies[n].applied, p);
        if logs_alone {
            self.mix(n, self.copies[n].applied);
        }
        self.mix(n, p);
        let c = &mut self.copies[n];
        c.hold = Hold {
            kill: Some(p),
            power: Some(p),
        };
        c.applied = applied;
        c.compared = None;
        c.told = None;
        (c.earlier, c.ahead) = (true, logs_alone);
        c.failures += 1;
        let before = self.floor;
        self.lower()?;
        let known = self.points.before(before, known);
        let had = self.lost.map_or(0, |l| self.points[l].last);
        if !self.points.is_within(known, self.floor) && self.points[known].last > had {
            (self.lost, self.lost_by) = (Some(known), None);
        }
        Ok(())
    }

    /// Whether node `n`'s log is damaged, and the node has not yet got back what it held.
    pub fn is_damaged(&self, n: usize) -> bool {
        self.copies[n].told.is_some() || self.copies[n].earlier
    }

    /// Whether node `n` lacks acknowledged points, while node `other`, up or down, has them.
    pub fn has_less(&self, n: usize, other: usize) -> bool {
        !self.has_all(n) && self.has_all(other)
    }

    /// Whether node `n`'s copy is bound to have everything that is acknowledged.
    pub fn has_all(&self, n: usize) -> bool {
        self.holds(n, self.floor)
    }

    /// Whether node `n`'s log is damaged, and the node may lack acknowledged points for that.
    pub fn lacks(&self, n: usize) -> bool {
        self.is_damaged(n) && !self.holds(n, self.floor)
    }

    /// Node `n` goes on with `p`, which has all that its damaged log tells of. Points of
    /// which the log does not tell look as if they were never written, so the node goes
    /// on as if it had everything (a limit, `docs/reference/protocol.md`).
    fn look_for_untold(&mut self, n: usize, p: usize) {
        let known = |t| self.points.is_within(self.points.before(self.floor, t), p);
        if !self.points.is_within(self.floor, p) && self.copies[n].told.is_some_and(known) {
            self.untold += 1;
            let left = self.points.common(self.floor, p);
            self.settle(left);
        }
    }

    /// Before node `n` starts, others told it that everything up to LSN `known` was
    /// acknowledged.
    pub fn answered(&mut self, n: usize, known: u64) {
        self.copies[n].answered = known;
    }

    /// Node `n`, which was put back as of an earlier time, goes on with `p`, without a mirror: it
    /// has all that any node that answered knew of. It cannot know of more (a limit,
    /// `docs/reference/protocol.md`). With a mirror that has more, it would have taken that.
    fn look_for_unanswered(&mut self, n: usize, p: usize) {
        let c = &self.copies[n];
        let known = self.points.before(self.floor, c.answered);
        if c.earlier && !self.points.is_within(self.floor, p) && self.points.is_within(known, p) {
            self.untold += 1;
            let left = self.points.common(self.floor, p);
            self.settle(left);
        }
    }

    /// Node `n` begins an epoch behind `p`; its data area may have been changed beyond
    /// `p`.
    fn begins_behind(&mut self, n: usize, p: usize) {
        let c = &mut self.copies[n];
        let beyond = self.points[c.mixed].last > self.points[p].last;
        c.earlier = false;
        let is_behind = c.told.take().is_some() | std::mem::take(&mut c.ahead);
        self.blurred |= is_behind && beyond;
    }

    /// The data area may have been changed up to `limit`.
    fn mix(&mut self, n: usize, limit: usize) {
        let mixed = self.copies[n].mixed;
        if self.points[limit].last > self.points[mixed].last {
            self.copies[n].mixed = limit;
        }
    }

    /// The copies on which the acknowledged points rest: those of the present view, and
    /// of the view in which the floor was acknowledged. A backup's copy is none of these.
    fn members(&self) -> impl Iterator<Item = &Copy> {
        let nodes = (0..NODES).filter(|n| self.is_member(*n));
        nodes.map(|n| &self.copies[n])
    }

    fn is_member(&self, n: usize) -> bool {
        let acked = self.points[self.floor].acked;
        self.copies[n].gone.is_none()
            && (self.view[n] || acked.is_some_and(|a| a.pair.contains(&n)))
    }

    /// Node `old` is lost for good, and `new` takes its place, also in the view unless
    /// `free` says that the view follows the register. This is one failure; the other
    /// nodes must have what was acknowledged.
    pub fn replaced(&mut self, old: usize, new: usize, free: bool) -> Checked {
        self.copies[old].gone = Some(self.points.len());
        self.copies[old].failures += 1;
        if !free && std::mem::take(&mut self.view[old]) {
            self.view[new] = true;
        }
        self.covered()
    }

    /// Whether node `n`'s copy is bound to hold `p`.
    fn holds(&self, n: usize, p: usize) -> bool {
        let hold = self.copies[n].hold.kill;
        hold.is_some_and(|h| self.points.is_within(p, h))
    }

    fn is_covered(&self) -> bool {
        (0..NODES).any(|n| self.is_member(n) && self.holds(n, self.floor))
    }

    /// No protocol step may leave an acknowledged point without a copy.
    fn covered(&self) -> Checked {
        if self.floor == 0 || self.is_covered() {
            return Ok(());
        }
        Err(format!(
            "3: acknowledged {} is on no copy any more, without a failure: {:?}",
            self.points.text(self.floor),
            self.members()
                .map(|c| c.hold.kill.map(|h| self.points.text(h)))
                .collect::<Vec<_>>()
        ))
    }

    /// After a failure: lowers the floor to what is left, if the loss is excused.
    ///
    /// | acknowledged under | survives, at least |
    /// |---|---|
    /// | own log only, on a disk or pmem | any failures of this node |
    /// | own log only, in memory (alone after a promotion) | kills |
    /// | mirror's log (and own, in sync-flush) | kills, and the loss of any one node's power |
    ///
    /// What is left may have been acknowledged in an earlier view, with other members,
    /// and may be lost to the same failures.
    fn lower(&mut self) -> Checked {
        let before = self.floor;
        while self.floor != 0 && !self.is_covered() {
            self.lose()?;
        }
        self.excused += u64::from(self.floor != before);
        Ok(())
    }

    /// The floor is on no copy: checks that this is excused, and lowers the floor to what
    /// is left of it.
    fn lose(&mut self) -> Checked {
        let lost = self.floor;
        let left = self
            .members()
            .filter_map(|c| c.hold.kill)
            .map(|h| self.points.common(lost, h))
            .max_by_key(|p| self.points[*p].last)
            .unwrap_or(0);
        let a = self.points[lost].acked.expect("the floor is acknowledged");
        let failed = |n: usize| self.copies[n].failures > a.failures[n];
        let excused = if a.rule.mirror {
            a.pair.into_iter().all(failed)
        } else {
            // The primary's hold on a persistent medium only shrinks when its copy is
            // replaced, which `covered` watches. So the log was in memory, or the other
            // node's copy was the last.
            failed(a.pair[0])
        };
        if !excused {
            return Err(format!(
                "3: acknowledged {} is lost, though not both lost their power; {} is left",
                self.points.text(lost),
                self.points.text(left)
            ));
        }
        let last = |p: Option<usize>| p.map_or(0, |p| self.points[p].last);
        // A node cannot know that it lacks a point of which its damaged log does not
        // tell: the log's last records look like torn ones.
        let counted = a.pair.into_iter().take(1 + usize::from(a.rule.mirror));
        let told = counted.filter_map(|n| Some((self.copies[n].told?, n)));
        let told = told.min();
        let known = told.map_or(lost, |(t, _)| self.points.before(lost, t));
        let is_known = a.rule == AckRule::MIRROR || told.is_some();
        if is_known && self.points[known].last > last(self.lost) {
            self.lost = Some(known);
            self.lost_by = told.map(|(_, n)| n);
        }
        self.settle(left);
        Ok(())
    }

    /// An operator, or the configuration, lets a node go on with what is left.
    pub fn word(&mut self) {
        self.lost = None;
    }

    /// Node `n` goes on with `p` and asked nobody: it needs all that was ever
    /// acknowledged.
    pub fn by_itself(&mut self, n: usize, p: usize) -> Checked {
        match self.lost.take() {
            Some(lost) if !self.points.is_within(lost, p) => Err(format!(
                "3: node {n} goes on by itself with {}, but {} was acknowledged",
                self.points.text(p),
                self.points.text(lost)
            )),
            _ => Ok(()),
        }
    }

    /// The view says that node `n`, whose log is on a medium that survives a power loss,
    /// is alone: what was acknowledged rests on that log. A node whose disk was put back since
    /// had asked for this view before.
    pub fn alone(&self, n: usize) -> Checked {
        let hold = self.copies[n].hold.power;
        let earlier = self.copies[n].earlier;
        if self.floor == 0 || earlier || hold.is_some_and(|h| self.points.is_within(self.floor, h))
        {
            return Ok(());
        }
        Err(format!(
            "2: node {n} is alone by the view, but acknowledged {} is not persistent in its log",
            self.points.text(self.floor)
        ))
    }

    /// The floor is now `p`, after a loss that is excused.
    fn settle(&mut self, p: usize) {
        // A point that was not acknowledged itself is as safe as the copies that have it.
        let holders = (0..NODES).filter(|n| self.is_member(*n) && self.holds(*n, p));
        let holders: Vec<_> = holders.collect();
        self.floor = p;
        let failures = self.failures();
        if self.points[p].acked.is_none()
            && let (Some(first), Some(last)) = (holders.first(), holders.last())
        {
            self.points[p].acked = Some(Acked {
                rule: AckRule::BOTH,
                pair: [*first, *last],
                failures,
            });
        }
    }

    /// How often each copy has failed, as `Copy::failures` counts.
    pub fn failures(&self) -> [u32; NODES] {
        std::array::from_fn(|n| self.copies[n].failures)
    }

    /// A primary began an epoch with `tail`: it must have every acknowledged
    /// sync point.
    pub fn began(&mut self, n: usize, store: &Store, tail: u64) -> Checked<usize> {
        let history = store.history();
        let Some(p) = self.points.exact(&history, tail) else {
            return Err(format!(
                "3: epoch begins behind LSN {tail}, which ends no sync point"
            ));
        };
        self.look_for_untold(n, p);
        if store.superblock().view.mirror.is_empty() {
            self.look_for_unanswered(n, p);
        }
        if !self.points.is_within(self.floor, p) {
            return Err(format!(
                "3: epoch {} begins behind {}, but {} is acknowledged",
                history.last_epoch(),
                self.points.text(p),
                self.points.text(self.floor)
            ));
        }
        self.begins_behind(n, p);
        self.copies[n].hold.kill = Some(p);
        if store.level().is_persistent() {
            self.copies[n].hold.power = Some(p);
        }
        self.settled(p);
        self.looked(n, store)?;
        Ok(p)
    }

    /// An operator promoted node `n`. `lossy`: the mode allows that this loses what had
    /// not arrived.
    pub fn promoted(&mut self, n: usize, store: &Store, tail: u64, lossy: bool) -> Checked {
        let history = store.history();
        let Some(p) = self.points.exact(&history, tail) else {
            return Err(format!(
                "3: promoted at LSN {tail}, which ends no sync point"
            ));
        };
        self.sole = self.sole.filter(|s| *s == n);
        self.look_for_untold(n, p);
        self.begins_behind(n, p);
        self.copies[n].hold.kill = Some(p);
        if store.level().is_persistent() {
            self.copies[n].hold.power = Some(p);
        }
        self.settled(p);
        if !self.points.is_within(self.floor, p) {
            if !lossy {
                return Err(format!(
                    "3: promoted with {}, but {} is acknowledged",
                    self.points.text(p),
                    self.points.text(self.floor)
                ));
            }
            self.excused += 1;
            let left = self.points.common(self.floor, p);
            self.settle(left);
        }
        self.looked(n, store)
    }

    /// Node `n` goes on with `tail`, by an operator's word or in a view of its own: from now on
    /// nothing is acknowledged on another branch.
    pub fn left_with(&mut self, store: &Store, tail: u64) {
        let p = self.points.exact(&store.history(), tail);
        self.left = p.expect("it was looked up");
    }

    /// Node `n` was promoted by the register alone.
    pub fn took_over(&mut self, n: usize) -> Checked {
        let p = self.copies[n].hold.kill.expect("it was promoted with it");
        self.by_itself(n, p)
    }

    /// The register agreed that the backup `n` goes on with what it has. What the other
    /// nodes acknowledged beyond that is given up, and from now on they acknowledge
    /// nothing.
    pub fn given_up(&mut self, n: usize) {
        self.word();
        self.sole = Some(n);
        let p = self.copies[n].hold.kill.unwrap_or(0);
        if !self.points.is_within(self.floor, p) {
            self.excused += 1;
            let left = self.points.common(self.floor, p);
            self.settle(left);
        }
        self.rests_on(n);
    }

    /// From now on the acknowledged points rest on node `n` alone.
    fn rests_on(&mut self, n: usize) {
        if self.floor != 0 {
            let failures = self.failures();
            self.points[self.floor].acked = Some(Acked {
                rule: AckRule::LOCAL,
                pair: [n, n],
                failures,
            });
        }
    }

    /// The backup `n` began its view.
    pub fn fell_back(&mut self, n: usize, store: &Store, tail: u64) -> Checked {
        self.promoted(n, store, tail, true)?;
        self.left_with(store, tail);
        self.rests_on(n);
        Ok(())
    }

    /// `p` and its ancestors will stay, as far as their primary knows.
    pub fn settled(&mut self, mut p: usize) {
        while !self.points[p].settled {
            self.points[p].settled = true;
            p = self.points[p].parent;
        }
    }

    /// The application on node `pair[0]` learned that `p` is safe; `pair[1]` is the
    /// mirror.
    pub fn acked(
        &mut self,
        pair: [usize; 2],
        p: usize,
        rule: AckRule,
        persistent: [bool; NODES],
    ) -> Checked {
        self.may_acknowledge(pair, p, rule)?;
        let failures = self.failures_at_ack(pair, p, rule, persistent)?;
        if !self.points.is_within(p, self.left) && !self.points.is_within(self.left, p) {
            return Err(format!(
                "3: {} is acknowledged, but a backup had gone on with {}",
                self.points.text(p),
                self.points.text(self.left)
            ));
        }
        self.points[p].acked = Some(Acked {
            rule,
            pair,
            failures,
        });
        // A node whose acknowledgement counts has everything again.
        let [n, mirror] = pair;
        for (n, counts) in [(n, rule.local), (mirror, rule.mirror)] {
            if counts {
                let c = &mut self.copies[n];
                (c.told, c.knew) = (None, 0);
                (c.earlier, c.ahead) = (false, false);
            }
        }
        self.raise_floor(p)
    }

    /// Checks that no other node went on without the one that acknowledges `p`, and that
    /// neither of the pair was replaced before.
    fn may_acknowledge(&self, pair: [usize; 2], p: usize, rule: AckRule) -> Checked {
        let [n, mirror] = pair;
        if let Some(s) = self.sole.filter(|s| *s != n) {
            return Err(format!(
                "3: {} is acknowledged by node {n}, but node {s} had gone on without it",
                self.points.text(p)
            ));
        }
        // An acknowledgement of what the node had before it was replaced may have been on
        // its way.
        let late = |n: usize| self.copies[n].gone.is_some_and(|at| p >= at);
        if late(n) || rule.mirror && late(mirror) {
            return Err(format!(
                "replaced: {} is acknowledged by {pair:?}, one of whom was replaced before",
                self.points.text(p)
            ));
        }
        Ok(())
    }

    /// Checks that the logs on which `rule` relies have `p`. Returns how often each node
    /// had failed when it had `p`.
    fn failures_at_ack(
        &self,
        [n, mirror]: [usize; 2],
        p: usize,
        rule: AckRule,
        persistent: [bool; NODES],
    ) -> Checked<[u32; NODES]> {
        let has = |c: &Copy, persistent: bool| {
            let h = if persistent {
                c.hold.power
            } else {
                c.hold.kill
            };
            h.is_some_and(|h| self.points.is_within(p, h))
        };
        if rule.local && !has(&self.copies[n], persistent[n]) {
            return Err(format!(
                "2: {} is acknowledged, but not in the own log",
                self.points.text(p)
            ));
        }
        let mut failures = self.failures();
        let mut was = self.copies[mirror].was.iter().rev();
        if !rule.mirror || has(&self.copies[mirror], persistent[mirror]) {
        } else if let Some(&(_, before)) = was.find(|(had, _)| self.points.is_within(p, *had)) {
            // The mirror failed after it acknowledged.
            failures[mirror] = before;
        } else {
            return Err(format!(
                "2: {} is acknowledged, but not in the mirror's log, which has {:?}",
                self.points.text(p),
                self.copies[mirror].hold
            ));
        }
        Ok(failures)
    }

    /// `p` is acknowledged: the floor rises to it, unless it is higher already.
    fn raise_floor(&mut self, p: usize) -> Checked {
        if self.points[p].last > self.points[self.floor].last {
            if !self.points.is_within(self.floor, p) {
                return Err(format!(
                    "3: {} is acknowledged on another branch",
                    self.points.text(p)
                ));
            }
            self.floor = p;
        } else if !self.points.is_within(p, self.floor) {
            return Err(format!(
                "3: {} is acknowledged on a branch that was left",
                self.points.text(p)
            ));
        }
        Ok(())
    }

    /// The primary's own log is persistent up to `lsn`.
    pub fn persisted(&mut self, n: usize, head: usize, lsn: u64) {
        let p = self.points.before(head, lsn);
        self.copies[n].hold.power = Some(p);
    }

    /// The mirror has received up to `lsn`; `persisted` if all of its logs
    /// are persistent to their ends.
    pub fn received(&mut self, n: usize, store: &Store, lsn: u64, persisted: bool) -> Checked {
        if store.superblock().state != State::Whole {
            self.forget(n);
            // The source may have failed after its copy began to replace this one.
            return self.lower();
        }
        let history = store.history();
        let Some(p) = self.points.rounded(&history, lsn) else {
            return Err(format!(
                "3: node {n} has received LSN {lsn}, which nobody sent"
            ));
        };
        let hold = self.copies[n].hold;
        let mut power = match hold.power {
            _ if persisted => Some(p),
            Some(h) => Some(self.points.common(h, p)),
            None => None,
        };
        if store.level().is_persistent()
            && let Some(c) = self.points.exact(&history, store.checkpointed())
            && power.is_none_or(|h| self.points[h].last < self.points[c].last)
        {
            power = Some(c);
        }
        self.copies[n].hold = Hold {
            kill: Some(p),
            power,
        };
        if hold.kill != Some(p) {
            // A primary whose log does not tell of what it lost (a limit, see `look_for_untold`)
            // makes the other copy equal to its own before it begins.
            let by = store.superblock().view.primary;
            if !self.is_covered()
                && let Some(m) = NAMES
                    .iter()
                    .position(|name| *name == by)
                    .filter(|m| *m != n)
                && let Some(has) = self.copies[m].hold.kill
                && self.points[has].last >= self.copies[n].knew
            {
                self.look_for_untold(m, has);
            }
            self.covered()?;
        }
        self.looked(n, store)
    }

    /// A new session has begun with node `n`: the primary forgets what the node
    /// acknowledged in an earlier life.
    pub fn resumed(&mut self, n: usize) {
        self.copies[n].was.clear();
    }

    /// Node `n` follows, as a backup or as a mirror, or is a primary. A mirror may have
    /// applied records that were not committed, when it gave its copy to a primary that
    /// then did not come up. As a backup it keeps these until it is told otherwise.
    pub fn follows(&mut self, n: usize, backup: bool) {
        let c = &mut self.copies[n];
        c.backup = backup.then_some(c.backup.unwrap_or(c.applied));
    }

    /// Records and checks what is applied.
    pub fn looked(&mut self, n: usize, store: &Store) -> Checked {
        let history = store.history();
        let Some(a) = self.points.exact(&history, store.applied()) else {
            return Err(format!(
                "4: node {n} has applied up to LSN {}, which ends no sync point",
                store.applied()
            ));
        };
        let backup = self.copies[n].backup;
        if backup.is_some_and(|had| !self.points[a].settled && !self.points.is_within(a, had)) {
            return Err(format!(
                "backup: {} is applied, but was never committed",
                self.points.text(a)
            ));
        }
        let c = &mut self.copies[n];
        if self.points[a].last > self.points[c.applied].last {
            c.applied = a;
        }
        if let Some(h) = c.hold.kill
            && !self.points.is_within(a, h)
        {
            return Err(format!(
                "1: node {n} has applied {}, but holds {}",
                self.points.text(a),
                self.points.text(h)
            ));
        }
        Ok(())
    }

    /// Compares a data area with the model at its applied LSN (invariant 4), if this LSN
    /// is past the mixture that a crash, or a disk without room, left and was not compared yet.
    pub fn compare(&mut self, n: usize, store: &Store, world: &World, node: &str) -> Checked {
        let is_whole = store.superblock().state == State::Whole;
        if !is_whole || store.poisoned().is_some() || !store.is_exact() {
            return Ok(());
        }
        let history = store.history();
        let Some(p) = self.points.exact(&history, store.applied()) else {
            return Err(format!(
                "4: node {n}: LSN {} ends no sync point",
                store.applied()
            ));
        };
        let c = &mut self.copies[n];
        let mixed = self.points[p].last < self.points[c.mixed].last;
        if c.compared == Some(p) || mixed || self.blurred {
            return Ok(());
        }
        c.compared = Some(p);
        self.compared += 1;
        let model = self.points[p].files.clone();
        let at = self.points.text(p);
        let found: BTreeMap<u32, (String, u64)> = store
            .area()
            .files()
            .map(|f| (f.id, (f.name.clone(), f.size)))
            .collect();
        let wanted: BTreeMap<u32, (String, u64)> = model
            .iter()
            .map(|(id, f)| (*id, (f.name.clone(), f.data.len() as u64)))
            .collect();
        if found != wanted {
            return Err(format!(
                "4: node {n} at {at}: its catalogue has {found:?}, not {wanted:?}"
            ));
        }
        for (id, f) in model.iter() {
            let path = store.spec().dir.join(&f.name);
            let Some(bytes) = world.contents(node, &path) else {
                return Err(format!(
                    "4: node {n} at {at}: file {id} {} is not there",
                    f.name
                ));
            };
            if bytes != *f.data {
                let first = bytes.iter().zip(f.data.iter()).position(|(a, b)| a != b);
                return Err(format!(
                    "4: node {n} at {at}: file {id} {} differs at byte {first:?}; {} bytes, {} in the model",
                    f.name,
                    bytes.len(),
                    f.data.len()
                ));
            }
        }
        Ok(())
    }

    /// Whether no copy is bound to hold anything.
    pub fn all_lost(&self) -> bool {
        self.members().all(|c| c.hold.kill.is_none())
    }

    /// Whether something acknowledged was lost to failures that no mode
    /// survives.
    pub fn has_lost(&self) -> bool {
        self.excused > 0 || self.all_lost()
    }

    /// Forgets the last comparison, so that the next call compares again.
    pub fn look_again(&mut self, n: usize) {
        self.copies[n].compared = None;
    }
}
