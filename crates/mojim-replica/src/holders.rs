//! Which other nodes hold a volume, and where they are reached.
//!
//! Owns the list that a running primary goes by. It is the configuration's, and
//! changes where a node is replaced: then the daemon beside the program, which
//! has read the new configuration, knows.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::Client;
use mojim_env::{Address, Env, Error, Result};

/// How long the daemon may take to say who they are.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A node that holds the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The node's name.
    pub name: String,
    /// Where a primary reaches it as its mirror.
    pub address: Address,
    /// Where it is forwarded to.
    pub tcp: Address,
    /// Whether a mirror's lanes are shared memory.
    pub shared: bool,
}

/// The other nodes that hold the volume.
#[derive(Debug, Default)]
pub struct Holders(Mutex<Vec<Peer>>);

impl Holders {
    /// These, until further notice.
    pub fn new(all: Vec<Peer>) -> Arc<Holders> {
        Arc::new(Holders(Mutex::new(all)))
    }

    fn all(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The one of this name.
    pub fn find(&self, name: &str) -> Option<Peer> {
        self.all().iter().find(|p| p.name == name).cloned()
    }

    /// Others from now on; those that were not among them before.
    pub fn replace(&self, all: Vec<Peer>) -> Vec<Peer> {
        let mut now = self.all();
        let before = std::mem::replace(&mut *now, all);
        let new = now.iter().filter(|p| !before.contains(p));
        new.cloned().collect()
    }

    /// One that nothing was done about counts as new again.
    pub fn forget(&self, name: &str) {
        self.all().retain(|p| p.name != name);
    }
}

/// Those that the daemon at `daemon` knows of.
pub fn ask(env: &Arc<dyn Env>, daemon: &Address, cluster: &str, volume: &str) -> Result<Vec<Peer>> {
    let q = json!({ "what": "holders", "cluster": cluster, "volume": volume });
    let answer = Client::connect(env, daemon, TIMEOUT)?.ask(&q)?;
    let peers = answer.as_array().and_then(|all| {
        let peers = all.iter().map(from_json);
        peers.collect::<Option<Vec<Peer>>>()
    });
    peers.ok_or_else(|| Error::Protocol("not a list of nodes".into()))
}

/// As the daemon tells it.
pub fn to_json(p: &Peer) -> Value {
    let socket = match &p.address {
        Address::Unix(path) => Some(path.display().to_string()),
        Address::Tcp(_) => None,
    };
    let Address::Tcp(address) = &p.tcp else {
        unreachable!("it is a TCP address");
    };
    json!({ "node": p.name, "address": address.to_string(), "socket": socket })
}

fn from_json(v: &Value) -> Option<Peer> {
    let tcp = Address::Tcp(v["address"].as_str()?.parse::<SocketAddr>().ok()?);
    let socket = v["socket"].as_str().map(PathBuf::from);
    Some(Peer {
        name: v["node"].as_str()?.to_owned(),
        shared: socket.is_some(),
        address: socket.map_or_else(|| tcp.clone(), Address::Unix),
        tcp,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(from_json(&to_json(&p)), Some(p));
        }
        for bad in [json!({}), json!({ "node": "b", "address": "x" }), json!(1)] {
            assert_eq!(from_json(&bad), None);
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
