//! The refusal of an attach that would begin with less than was acknowledged, or may have been.
//!
//! Owns the texts.
//!
//! Invariants:
//! - They name the node that lacks something.
//! - They name a command that goes on with the most there is.
//! - They name `--force` only where one of these holds:
//!   - Something that was acknowledged may be lost by it.
//!   - A plain promotion would be refused.

use super::*;

impl Session {
    /// What other nodes said of acknowledged sync points before the attach begins.
    pub fn with_told(mut self, told: Vec<Told>) -> Session {
        self.policy.told = told;
        self
    }

    /// Whether another node knows of acknowledged sync points that this node's copy lacks.
    pub fn was_told_of_more(&self) -> bool {
        let store = &self.policy.primary.store;
        Told::most(
            &self.policy.told,
            &store.holding(store.tail()),
            self.agreed(),
        )
        .is_some()
    }

    /// The register's epoch, if it was ever written.
    fn agreed(&self) -> Option<u64> {
        let register = &self.policy.views.as_ref()?.client.register;
        (register.version > 0).then_some(register.epoch)
    }

    /// Fails if another node that answers knows of acknowledged sync points which `kept`, the
    /// copy that the attach goes on with, lacks.
    pub(super) fn ask_told(&mut self, kept: &Holding) -> Result<()> {
        let Some(t) = Told::most(&self.policy.told, kept, self.agreed()) else {
            return Ok(());
        };
        let (volume, node, lsn) = (
            &self.policy.primary.store.spec().volume,
            &t.node,
            t.known.lsn,
        );
        let e = Error::Invalid(format!(
            "node {node} knows that sync points of volume {volume} up to LSN {lsn} were acknowledged; the attach would go on with LSN {}. The copy of node {} is of an earlier time, or its disk lost what it had made durable. {}",
            kept.tail,
            self.me,
            t.way_out(volume, &self.me)
        ));
        self.policy.loss = Some(Loss::Known(lsn));
        self.policy.fatal = Some(e.clone());
        Err(e)
    }

    /// Ends an attach that would begin with less than was acknowledged, or may have been:
    /// nothing is changed on either node before an operator says so.
    pub(super) fn refuse_loss(
        &mut self,
        lost: Option<Loss>,
        ours: &Holding,
        theirs: &Holding,
        w: &Welcome,
    ) -> Result<()> {
        let Some(lost) = lost else {
            return Ok(());
        };
        self.policy.loss = Some(lost);
        let e = match lost {
            Loss::Known(lsn) => self.known_is_lost(lsn, ours, theirs, w.member),
            Loss::Ring => self.ring_is_lost(ours, theirs),
            Loss::Copy(lacks) => self.copy_is_lost(lacks, ours, theirs),
        };
        self.policy.fatal = Some(e.clone());
        Err(e)
    }

    /// Sync points up to `lsn` were acknowledged, and the copy that both nodes would then have
    /// ends before. `member`: the mirror held everything when it was last linked.
    fn known_is_lost(&self, lsn: u64, ours: &Holding, theirs: &Holding, member: bool) -> Error {
        let store = &self.policy.primary.store;
        let (volume, me, peer) = (&store.spec().volume, &self.me, &self.peer.name);
        let same = theirs.state == State::Whole && theirs.volume_id == ours.volume_id;
        // This node's log is damaged: the error names the file.
        let damaged = match store.is_complete() {
            true => None,
            false => store.check_complete().err(),
        };
        if same && theirs.tail >= lsn {
            let force = if member { "" } else { " --force" };
            let why = match damaged {
                Some(Error::Damaged { path, .. }) => {
                    format!("the log {} of this node is damaged", path.display())
                }
                _ => format!("node {me} goes on otherwise from an earlier LSN"),
            };
            return Error::Invalid(format!(
                "sync points of volume {volume} up to LSN {lsn} were acknowledged: node {peer} has them, node {me} does not ({why}). Go on with the copy of node {peer}, which keeps them: `mojim promote{force} --volume {volume} --name {peer}`, and start the program there"
            ));
        }
        damaged.unwrap_or_else(|| {
            Error::Invalid(format!(
                "sync points of volume {volume} up to LSN {lsn} were acknowledged; node {me} has them up to LSN {} and node {peer} up to LSN {}. A log of one of them was damaged or cut, its disk lost what it had made durable, or its copy is of an earlier time. Restore what it had, or give the others up: `mojim promote --force --volume {volume} --name` with the node that is to go on",
                ours.tail, theirs.tail
            ))
        })
    }

    /// What only the lost ring held may have been acknowledged.
    fn ring_is_lost(&self, ours: &Holding, theirs: &Holding) -> Error {
        let (volume, peer) = (&self.policy.primary.store.spec().volume, &self.peer.name);
        let is = match theirs.state {
            State::Whole => "is not the one that acknowledged them",
            _ => "was lost too, or is new",
        };
        Error::Invalid(format!(
            "this node's memory was lost, with sync points that only node {peer}, the mirror of volume {volume}, may have too. Node {peer} answers, but its copy {is}, so acknowledged sync points behind LSN {} may be missing from both. If that copy can be found (its disk, or the node itself), start node {peer} with it. If it is lost for good, `mojim promote --volume {volume} --name {}` goes on without them",
            ours.tail, self.me
        ))
    }

    /// This node's copy is gone, and the mirror's may lack something.
    fn copy_is_lost(&self, lacks: Lacks, ours: &Holding, theirs: &Holding) -> Error {
        let (volume, peer) = (&self.policy.primary.store.spec().volume, &self.peer.name);
        // The other node's promotion needs `--force`, since this node's view is later.
        let (why, force) = match lacks {
            Lacks::CatchingUp => ("it was catching up when it was last linked", " --force"),
            Lacks::Alone => ("this node went on without it", " --force"),
            Lacks::Behind => ("no sync point waits for it", ""),
        };
        let ours = match ours.state {
            State::Whole => {
                format!("this node's copy of volume {volume} began anew and holds nothing")
            }
            _ => format!(
                "this node has no whole copy of volume {volume}: its disk is new, or its memory was lost"
            ),
        };
        Error::Invalid(format!(
            "{ours}. Node {peer}'s, up to LSN {}, may lack acknowledged sync points: {why}. Restore a copy, or go on with that one: `mojim promote{force} --volume {volume} --name {peer}`, and start the program there",
            theirs.tail
        ))
    }
}
