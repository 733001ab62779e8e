//! When a primary is gone, and what its mirror does then.
//!
//! Owns the suspicion: how long nothing was heard, from the session and from
//! the primary's daemon. It may be wrong at no risk: the register decides, and
//! a primary that is alive finds out that it is none any more.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use serde_json::json;

use super::{Node, lock, wait_for_last};
use crate::client::Client;
use crate::config::Volume;
use crate::env::Address;
use crate::error::{Error, Result};
use crate::mirror::Mirror;
use crate::views::Views;

impl Node {
    /// Watches over the primary of a volume for as long as this node runs.
    pub(super) fn watch_loop(self: Arc<Node>, v: &Volume, views: &dyn Views) {
        let beat = self.config.heartbeat;
        // A primary that lost its mirror asks the register first: it goes on
        // without a break, a new one does not.
        let limit = self.config.failure_limit + beat * 2;
        let mut heard = self.env.now();
        let mut client = None;
        let mut said = String::new();
        // Whether a take-over that the register had agreed to was cut off.
        let mut unknown = true;
        while !self.stopping.load(std::sync::atomic::Ordering::Acquire) {
            std::thread::sleep(beat);
            let Some(mut m) = lock(&self.mirrors).get(&v.name).cloned() else {
                heard = self.env.now();
                continue;
            };
            // One that was handed over is closed before it is poisoned.
            if m.store.poisoned().is_some() && m.is_closed() {
                continue;
            }
            if m.store.poisoned().is_some() {
                drop(m);
                m = match self.mirror(v) {
                    Ok(m) => m,
                    Err(_) => continue,
                };
            }
            if let Some((ago, _)) = m.live_primary() {
                // When it spoke, not when that was looked up.
                heard = heard.max(self.env.now().saturating_sub(ago));
            }
            if !unknown && self.is_there(&m, &mut client) {
                heard = self.env.now();
                continue;
            }
            if !unknown && self.env.now() - heard < limit {
                continue;
            }
            let silent = self.env.now() - heard;
            match self.try_take_over(v, views, m, !unknown) {
                Ok(Some((epoch, last))) => {
                    self.say(&format!(
                        "volume {}: its primary was silent for {} ms; this node is primary from epoch {epoch}, last LSN {last}",
                        v.name,
                        silent.as_millis()
                    ));
                    unknown = false;
                    said.clear();
                }
                Ok(None) => {
                    // Not this node's to take; look again after another limit.
                    unknown = false;
                    heard = self.env.now();
                    said.clear();
                }
                Err(e) => {
                    // The register may have agreed all the same.
                    unknown = true;
                    let text = e.to_string();
                    if text != said {
                        self.say(&format!("volume {}: {text}", v.name));
                        said = text;
                    }
                }
            }
        }
    }

    /// Whether the daemon of the primary's node answers: then its machine is
    /// there, and a program that ended will be started again on it.
    fn is_there(&self, m: &Mirror, client: &mut Option<(String, Client)>) -> bool {
        let primary = m.store.superblock().view.primary;
        let Some(other) = self.config.nodes.get(&primary) else {
            return false;
        };
        let patience = (self.config.heartbeat * 2).max(Duration::from_millis(100));
        let mut c = match client.take() {
            Some((who, c)) if who == primary => c,
            _ => match Client::connect(&self.env, &Address::Tcp(other.address), patience) {
                Ok(c) => c,
                Err(_) => return false,
            },
        };
        let q = json!({ "what": "pulse", "cluster": self.config.cluster });
        match c.ask(&q) {
            Ok(_) => {
                *client = Some((primary, c));
                true
            }
            Err(_) => false,
        }
    }

    /// Becomes primary if the register agrees. `suspect`: the primary is
    /// silent; otherwise only what the register has agreed to is completed.
    fn try_take_over(
        self: &Arc<Node>,
        v: &Volume,
        views: &dyn Views,
        m: Arc<Mirror>,
        suspect: bool,
    ) -> Result<Option<(u64, u64)>> {
        let reg = views.read(&v.name)?;
        let mine = m.is_primary(&reg);
        if !(mine || suspect && m.is_member(&reg)) {
            return Ok(None);
        }
        let Some((epoch, last)) = m.take_over_from(reg, views)? else {
            return Err(Error::Protocol("the view changed meanwhile".into()));
        };
        self.hand_over(v, m, last)?;
        Ok(Some((epoch, last)))
    }

    /// The copy of a node that has become primary is closed, for the program.
    pub(super) fn hand_over(&self, v: &Volume, m: Arc<Mirror>, last: u64) -> Result<()> {
        m.close();
        if !v.backups.is_empty() {
            // Who forwards still reads the ring, which the program writes to.
            lock(&self.mirrors).remove(&v.name);
            let closed = m.store.close_clean(last);
            let closed = closed.and_then(|()| wait_for_last(m));
            self.handed.fetch_add(1, SeqCst);
            self.posts.notify();
            return closed;
        }
        let closed = m.store.close_for_next(last);
        let mut mirrors = lock(&self.mirrors);
        // Links and threads that have not ended yet find that it is.
        m.store.release_lock();
        mirrors.remove(&v.name);
        drop(mirrors);
        self.handed.fetch_add(1, SeqCst);
        self.posts.notify();
        closed
    }
}
