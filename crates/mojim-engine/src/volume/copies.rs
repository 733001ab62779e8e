//! Which nodes have a sync point, and how safe it is there.
//!
//! Owns the answer of [`Volume::copies`]: what this node and its mirror have, as the primary
//! knows, and what each backup reports when it is asked.

use std::time::Duration;

use mojim_config::MediumKind;
use mojim_env::Address;
use mojim_format::Level;
use mojim_replica::client::Client;
use mojim_replica::layout;
use mojim_replica::request::{CopyState, Request, Standing};

use super::attached::{Inner, Volume};

/// How long a backup's answer is waited for.
const BACKUP_PATIENCE: Duration = Duration::from_secs(1);

/// Where the bytes of a sync point are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyReport {
    /// The node.
    pub node: String,
    /// How safe they are there; `None` if they are not there, or not known to be.
    pub level: Option<Level>,
}

impl Volume {
    /// Which node has `lsn`, and how safe it is there: this node, the mirror, and the
    /// backups. Each backup is asked, for at most a second.
    pub fn copies(&self, lsn: u64) -> Vec<CopyReport> {
        let (own, mirror) = self.0.primary.copies(lsn);
        let mut out = vec![CopyReport {
            node: self.0.node.name.clone(),
            level: own,
        }];
        let name = self.0.primary.mirror();
        if !name.is_empty() {
            out.push(CopyReport {
                node: name,
                level: mirror,
            });
        }
        for node in &self.0.volume.backups {
            if out.iter().all(|c| c.node != *node) {
                out.push(CopyReport {
                    node: node.clone(),
                    level: self.0.level_on(node, lsn),
                });
            }
        }
        out
    }
}

impl Inner {
    /// How safe `lsn` is on a backup, as that node reports now.
    fn level_on(&self, name: &str, lsn: u64) -> Option<Level> {
        let node = self.config.nodes.get(name)?;
        let to = Address::Tcp(node.address);
        let (cluster, volume) = (&self.config.cluster, self.volume.name.clone());
        let mut c = Client::connect(&self.env, &to, cluster, BACKUP_PATIENCE).ok()?;
        let said: Standing = c.ask_for(&Request::Standing { volume }).ok()?;
        let follows = said.state == CopyState::Whole
            && said.error.is_none()
            && said.epoch == self.primary.epoch();
        if !follows || said.last_lsn < lsn {
            return None;
        }
        let durable = said.checkpoint >= lsn || said.persistent;
        let medium = layout::logs(&self.config, node, &self.volume)
            .first()?
            .medium;
        Some(match medium {
            MediumKind::Disk if durable => Level::Disk,
            MediumKind::Pmem if durable => Level::Pmem,
            _ => Level::Received,
        })
    }
}
