//! Voters in one process: each with a listener that answers requests as a
//! node's daemon does, on a free port, and links that a test can cut.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mojim_env::locks::lock;
use mojim_env::wire::Wire;
use mojim_env::{Address, Conn, Env, Error};
use mojim_format::FrameKind;
use mojim_format::message::checked;
use mojim_linux::{Listener, Os};
use mojim_replica::register::ViewRegister;
use mojim_replica::request::{Question, RaftCall};
use serde_json::json;

use super::Temp;
use crate::views::{Options, RaftViews};

/// What happens to the questions of one voter to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cut {
    /// The connection is closed.
    Closed,
    /// Nothing is answered: a lost node, or network.
    Silent,
}

/// What all listeners share.
#[derive(Default)]
struct World {
    cuts: Mutex<HashMap<(String, String), Cut>>,
    voters: Mutex<HashMap<String, Arc<RaftViews>>>,
    /// For a link, another voter that answers instead.
    twins: Mutex<HashMap<(String, String), Arc<RaftViews>>>,
    ending: AtomicBool,
}

/// The voters of a cluster.
pub struct Daemons {
    world: Arc<World>,
    listeners: Vec<Arc<Listener>>,
    threads: Vec<JoinHandle<()>>,
    pub options: Options,
    dir: Temp,
    /// Entries after which a snapshot is made, and that stay.
    pub snapshots: (u64, u64),
}

impl Daemons {
    /// Listens for each of them, and starts none.
    pub fn new(names: &[&str]) -> Daemons {
        let dir = Temp::new();
        let world = Arc::new(World::default());
        let mut voters = BTreeMap::new();
        let mut listeners = Vec::new();
        let mut threads = Vec::new();
        for name in names {
            // On an address of these tests' own: other processes' tests knock at ports of
            // 127.0.0.1 at which their nodes were, and which may be anybody's by now.
            let host = [127, 78, 1, (std::process::id() % 250) as u8 + 1];
            let listener = Arc::new(Listener::bind(&Address::Tcp((host, 0).into())).unwrap());
            voters.insert(name.to_string(), listener.local_address());
            let (world, l, me) = (world.clone(), listener.clone(), name.to_string());
            threads.push(std::thread::spawn(move || accept(&world, &l, &me)));
            listeners.push(listener);
        }
        let options = Options {
            cluster: "test".into(),
            me: String::new(),
            voters,
            replaced: BTreeMap::new(),
            volumes: ["v", "w"].map(String::from).into(),
            dir: dir.path().to_owned(),
            again: false,
            heartbeat: Duration::from_millis(100),
            election: (Duration::from_millis(500), Duration::from_millis(900)),
            timeout: Duration::from_secs(20),
        };
        Daemons {
            world,
            listeners,
            threads,
            options,
            dir,
            snapshots: (1000, 200),
        }
    }

    /// Listens for each of them, and starts all.
    pub fn started(names: &[&str]) -> Daemons {
        let d = Daemons::new(names);
        d.start_all();
        d
    }

    pub fn names(&self) -> Vec<String> {
        self.options.voters.keys().cloned().collect()
    }

    pub fn options_of(&self, name: &str) -> Options {
        Options {
            me: name.into(),
            dir: self.dir.path().join(name),
            ..self.options.clone()
        }
    }

    pub fn start(&self, name: &str) -> Arc<RaftViews> {
        self.start_on(Arc::new(Os::new().unwrap()), name)
    }

    /// Starts a voter with a disk of the test's.
    pub fn start_on(&self, env: Arc<dyn Env>, name: &str) -> Arc<RaftViews> {
        let begun = Instant::now();
        let v = loop {
            let options = self.options_of(name);
            match RaftViews::start_on(env.clone(), options, self.snapshots) {
                // A stop does not wait longer than the options say; on a busy machine the files
                // may be in use for some time after it.
                Err(Error::Busy(_)) if begun.elapsed() < Duration::from_secs(180) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                r => break r.unwrap(),
            }
        };
        lock(&self.world.voters).insert(name.into(), v.clone());
        v
    }

    /// Starts all, and waits until they are admitted.
    pub fn start_all(&self) {
        let names = self.names();
        names.iter().for_each(|n| drop(self.start(n)));
        self.await_admitted(&names);
    }

    /// Waits until each of these voters knows all of them by its log: a voter that is not
    /// admitted does not stand in for another.
    pub fn await_admitted(&self, names: &[String]) {
        let begun = Instant::now();
        while names.iter().any(|n| !self.at(n).knows(names)) {
            assert!(begun.elapsed() < Duration::from_secs(180));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A voter's end; it stays reachable by those who hold it.
    pub fn stop(&self, name: &str) {
        let v = lock(&self.world.voters).remove(name).unwrap();
        v.stop();
    }

    pub fn stop_all(&self) {
        let names: Vec<String> = lock(&self.world.voters).keys().cloned().collect();
        for name in names {
            self.stop(&name);
        }
    }

    pub fn at(&self, name: &str) -> Arc<RaftViews> {
        lock(&self.world.voters)[name].clone()
    }

    /// Cuts all links of a voter, both ways.
    pub fn isolate(&self, name: &str, how: Cut) {
        let mut cuts = lock(&self.world.cuts);
        for other in self.options.voters.keys().filter(|n| *n != name) {
            cuts.insert((name.into(), other.clone()), how);
            cuts.insert((other.clone(), name.into()), how);
        }
    }

    /// From now on `from` reaches `twin` instead of `to`, though the link be cut.
    pub fn mislead(&self, from: &str, to: &str, twin: Arc<RaftViews>) {
        lock(&self.world.twins).insert((from.into(), to.into()), twin);
    }

    /// Every voter reaches every other one.
    pub fn heal(&self) {
        lock(&self.world.cuts).clear();
        lock(&self.world.twins).clear();
    }

    /// Waits for a leader that all running voters, but `without`, know.
    pub fn leader(&self, without: &str) -> String {
        let mut all: Vec<_> = lock(&self.world.voters)
            .iter()
            .filter(|(n, _)| *n != without)
            .map(|(n, v)| (n.clone(), v.clone()))
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        loop {
            for (_, v) in &all {
                let without = crate::types::number(without);
                v.until(move |m| m.current_leader.is_some_and(|l| l != without));
            }
            let mut leaders: Vec<_> = all.iter().map(|(_, v)| v.leader()).collect();
            leaders.dedup();
            if let [Some(one)] = &leaders[..] {
                return one.clone();
            }
        }
    }

    /// A voter that does not lead.
    pub fn follower(&self) -> String {
        let leader = self.leader("");
        self.names().into_iter().find(|n| *n != leader).unwrap()
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        self.stop_all();
        self.world.ending.store(true, SeqCst);
        for l in &self.listeners {
            l.close();
        }
        for t in self.threads.drain(..) {
            let ended = t.join();
            if !std::thread::panicking() {
                ended.unwrap();
            }
        }
    }
}

fn accept(world: &Arc<World>, listener: &Listener, me: &str) {
    let mut threads = Vec::new();
    while !world.ending.load(SeqCst) {
        if let Ok(Some(conn)) = listener.accept(Duration::from_millis(500)) {
            let (world, me) = (world.clone(), me.to_owned());
            threads.push(std::thread::spawn(move || serve(&world, conn, &me)));
        }
    }
    for t in threads {
        t.join().unwrap();
    }
}

/// As `Node::serve_requests`.
fn serve(world: &World, conn: Arc<dyn Conn>, me: &str) {
    let mut wire = Wire::new(conn);
    wire.limit = 4096;
    while !world.ending.load(SeqCst) {
        let (f, body) = match wire.take_frame() {
            Ok(Some(x)) => x,
            Ok(None) => {
                let _ = wire.conn.wait(false, Duration::from_millis(100));
                continue;
            }
            Err(_) => break,
        };
        assert_eq!(f.kind, FrameKind::Request);
        let q: Question<RaftCall> = serde_json::from_slice(checked(&body).unwrap()).unwrap();
        let call = q.request;
        let link = (call.from.clone(), me.to_owned());
        let cut = lock(&world.cuts).get(&link).copied();
        let twin = lock(&world.twins).get(&link).cloned();
        let (cut, voter) = match twin {
            Some(twin) => (None, Some(twin)),
            None => (cut, lock(&world.voters).get(me).cloned()),
        };
        let (None, Some(voter)) = (cut, voter) else {
            if cut == Some(Cut::Silent) {
                continue;
            }
            break;
        };
        let answer = match voter.hear(call) {
            Ok(v) => json!({ "ok": v }),
            Err(e) => json!({ "error": e.to_string(), "errno": e.errno() }),
        };
        let mut bytes = answer.to_string().into_bytes();
        let crc = mojim_format::crc32c(&bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        wire.queue(FrameKind::Response, 0, 0, 0, &bytes);
        while let Ok(false) = wire.flush() {
            let _ = wire.conn.wait(true, Duration::from_millis(100));
        }
    }
    wire.conn.close();
}
