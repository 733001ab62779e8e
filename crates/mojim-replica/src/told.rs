//! Reports of other nodes on what was acknowledged, before this one leads.
//!
//! Owns which of it counts, and the advice that follows from it.
//!
//! Invariant: nobody is told to go on with the copy of a node that has less itself than it claims
//! to know.

use mojim_protocol::{Acknowledged, Holding, WORD};

use crate::request::Standing;

/// What another node said before an attach, a takeover or a promotion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Its name.
    pub node: String,
    /// What it knows to have been acknowledged.
    pub known: Acknowledged,
    /// What it has.
    pub has: u64,
}

/// What an operator does about node `node`, which may claim to know more than it can.
pub fn disbelieved(node: &str) -> String {
    format!(
        "If node {node} cannot know this, take it out of `backups` (docs/how-to/false-claim.md)"
    )
}

impl Standing {
    /// Whether the view that the node names can be one: to a node that knows the view of `begun`.
    pub fn is_credible(&self, begun: u64) -> bool {
        self.epoch <= begun.saturating_add(WORD)
    }

    /// What the node says to have been acknowledged. Nothing was in a view that it does not know.
    pub fn claim(&self) -> Option<Acknowledged> {
        let known = self.known.filter(|k| k.epoch <= self.epoch);
        known.map(Into::into)
    }
}

impl Told {
    /// What `node` has said of its copy, if that has such a claim.
    pub fn of(node: &str, standing: &Standing) -> Option<Told> {
        Some(Told {
            node: node.to_owned(),
            known: standing.claim()?,
            has: standing.last_lsn,
        })
    }

    /// Of what was `told`, the most that `kept` lacks. `agreed`: the register's epoch, if it was
    /// ever written.
    pub fn most<'a>(
        told: impl IntoIterator<Item = &'a Told>,
        kept: &Holding,
        agreed: Option<u64>,
    ) -> Option<&'a Told> {
        let begun = kept.history.last_epoch();
        let lacks = |t: &&Told| t.known.is_credible(begun, agreed) && t.known.is_missing_from(kept);
        told.into_iter().filter(lacks).max_by_key(|t| t.known.lsn)
    }

    /// How a volume goes on, on another node than `me`, which has less than this node knows of.
    pub fn way_out(&self, volume: &str, me: &str) -> String {
        let node = &self.node;
        let most = match self.has >= self.known.lsn {
            true => format!(
                "Go on with that of node {node}: `mojim promote --force --volume {volume} --name {node}`, and start the program there"
            ),
            // It may not even be true.
            false => format!(
                "Node {node} itself has LSN {} only: go on with the node that has most by `mojim status`",
                self.has
            ),
        };
        format!(
            "{most}; `mojim promote --force --volume {volume} --name {me}` gives the others up. {}",
            disbelieved(node)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{CopyState, WireAcknowledged};

    /// One node's word for an absurd epoch kept the volume from being attached.
    #[test]
    fn a_word_counts_with_an_epoch_that_can_have_been_begun() {
        let says = |epoch, known| Standing {
            state: CopyState::Whole,
            epoch,
            primary: "c".into(),
            last_lsn: 5,
            checkpoint: 5,
            persistent: true,
            attached: None,
            distrusted: false,
            error: None,
            known: Some(WireAcknowledged {
                volume_id: 1,
                lsn: 9,
                epoch: known,
            }),
        };
        assert!(says(3 + WORD, 0).is_credible(3) && !says(4 + WORD, 0).is_credible(3));
        assert!(says(u64::MAX, 0).is_credible(u64::MAX));
        // Nothing was acknowledged in an epoch that the node itself does not know.
        assert!(says(3, 3).claim().is_some() && says(3, 4).claim().is_none());
    }
}
