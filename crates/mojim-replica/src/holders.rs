//! Which other nodes hold a volume, and where they are reached.
//!
//! Owns the list that a running primary goes by: the configuration's. When a node is
//! replaced, the daemon beside the program, which has read the new configuration, knows.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::client::Client;
use crate::request::{Holder, Request};
use mojim_env::locks::lock;
use mojim_env::{Address, Env, Result};

/// How long the daemon may take to answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A node that holds the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The node's name.
    pub name: String,
    /// Where a primary reaches it as its mirror.
    pub address: Address,
    /// Where records are forwarded to it.
    pub tcp: Address,
    /// Whether a mirror's lanes are shared memory.
    pub shared: bool,
}

/// The other nodes that hold the volume.
#[derive(Debug, Default)]
pub struct Holders(Mutex<Vec<Peer>>);

impl Holders {
    /// Holds these nodes, until `replace`.
    pub fn new(all: Vec<Peer>) -> Arc<Holders> {
        Arc::new(Holders(Mutex::new(all)))
    }

    fn all(&self) -> MutexGuard<'_, Vec<Peer>> {
        lock(&self.0)
    }

    /// The node of this name.
    pub fn find(&self, name: &str) -> Option<Peer> {
        self.all().iter().find(|p| p.name == name).cloned()
    }

    /// Replaces the list; returns the nodes that were not in it before.
    pub fn replace(&self, all: Vec<Peer>) -> Vec<Peer> {
        let mut now = self.all();
        let before = std::mem::replace(&mut *now, all);
        let new = now.iter().filter(|p| !before.contains(p));
        new.cloned().collect()
    }

    /// Removes a node that nothing was done about, so that it counts as new again.
    pub fn forget(&self, name: &str) {
        self.all().retain(|p| p.name != name);
    }
}

/// The nodes that the daemon at `daemon` knows of.
pub fn ask(env: &Arc<dyn Env>, daemon: &Address, cluster: &str, volume: &str) -> Result<Vec<Peer>> {
    let mut client = Client::connect(env, daemon, cluster, TIMEOUT)?;
    let volume = volume.to_owned();
    let all: Vec<Holder> = client.ask_for(&Request::Holders { volume })?;
    Ok(all.into_iter().map(Peer::from).collect())
}

impl From<&Peer> for Holder {
    fn from(p: &Peer) -> Holder {
        let Address::Tcp(address) = p.tcp else {
            unreachable!("a node's own address is one of TCP");
        };
        Holder {
            node: p.name.clone(),
            address,
            socket: match &p.address {
                Address::Unix(path) => Some(path.clone()),
                Address::Tcp(_) => None,
            },
        }
    }
}

impl From<Holder> for Peer {
    fn from(h: Holder) -> Peer {
        let tcp = Address::Tcp(h.address);
        Peer {
            name: h.node,
            shared: h.socket.is_some(),
            address: h.socket.map_or_else(|| tcp.clone(), Address::Unix),
            tcp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json, to_value};
    use std::net::SocketAddr;

    fn peer(name: &str, port: u16, socket: Option<&str>) -> Peer {
        let tcp = Address::Tcp(SocketAddr::from(([127, 0, 0, 1], port)));
        Peer {
            name: name.into(),
            shared: socket.is_some(),
            address: socket.map_or(tcp.clone(), |s| Address::Unix(s.into())),
            tcp,
        }
    }

    #[test]
    fn a_daemon_tells_what_the_configuration_says() {
        for p in [peer("b", 7, None), peer("c", 9, Some("/x/node.sock"))] {
            let told: Value = to_value(Holder::from(&p)).unwrap();
            assert_eq!(Peer::from(from_value::<Holder>(told).unwrap()), p);
        }
        for bad in [json!({}), json!({ "node": "b", "address": "x" }), json!(1)] {
            assert!(from_value::<Holder>(bad).is_err());
        }
    }

    #[test]
    fn who_is_new_is_told() {
        let (b, c, d) = (peer("b", 1, None), peer("c", 2, None), peer("d", 3, None));
        let h = Holders::new(vec![b.clone(), c.clone()]);
        assert_eq!(h.replace(vec![d.clone(), c.clone()]), vec![d.clone()]);
        assert_eq!(h.replace(vec![d.clone(), c]), []);
        assert_eq!((h.find("b"), h.find("d")), (None, Some(d)));
    }
}
