//! What other nodes say to have been acknowledged, before this one leads.
//!
//! Owns which of it counts, and the advice that follows from it. Invariant: nobody is told to go on
//! with the copy of a node that has less itself than it claims to know.

use mojim_protocol::{Acknowledged, Holding};

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

impl Told {
    /// What `node` has said of its copy, if that has such a claim.
    pub fn of(node: &str, standing: &Standing) -> Option<Told> {
        // Another node's numbers may be absurd.
        let known = standing.known.filter(|k| k.epoch <= standing.epoch)?;
        Some(Told {
            node: node.to_owned(),
            known: known.into(),
            has: standing.last_lsn,
        })
    }

    /// Of what was `told`, the most that `kept` lacks. `agreed`: the register's epoch, if it was
    /// ever written.
    pub fn most<'a>(told: &'a [Told], kept: &Holding, agreed: Option<u64>) -> Option<&'a Told> {
        let begun = kept.history.last_epoch();
        let lacks = |t: &&Told| t.known.is_credible(begun, agreed) && t.known.is_missing_from(kept);
        told.iter().filter(lacks).max_by_key(|t| t.known.lsn)
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
                "Node {node} itself has LSN {} only: go on with the node that has most by `mojim status`, or, if node {node} cannot know this, end its daemon",
                self.has
            ),
        };
        format!("{most}; `mojim promote --force --volume {volume} --name {me}` gives the others up")
    }
}
