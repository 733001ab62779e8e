//! A cluster with keys, with real processes.
//!
//! The command makes it. It replicates over authenticated links, and is shut to everybody else.
//!
//! `mojim_linux::tls` decides which certificates are believed, and that is tested there. Here is
//! tested what a whole node does with whom. Owns its temporary directories, shared memory and
//! processes.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mojim_config::Config;
use mojim_env::{Address, Env};
use mojim_format::certificate::Subject;
use mojim_format::message::{Hello, Lane, Message};
use mojim_format::{FRAME_LEN, Frame, FrameKind};
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::request::{RaftCall, Request, Since};
use serde_json::Value;

use mojim_testkit::home::Home;
use mojim_testkit::{DEADLINE, Process, await_or, await_that, mojim, text};

/// Two nodes, `a` and `b`, with keys.
struct Pair {
    home: Home,
}

impl Pair {
    fn new(mode: &str, more: &str) -> Pair {
        let home = Home::new("keys", 2);
        let mut t = home.keys_line();
        t += &format!(
            "cluster = \"c\"\n[volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nmirror = \"b\"\n{more}\n"
        );
        for (name, port) in ["a", "b"].iter().zip(&home.ports) {
            t += &home.data_node(name, port.number, "medium = \"disk\", size = \"4MiB\"");
        }
        home.configure(&t);
        Pair { home }
    }

    fn keys(&self, more: &[&str]) -> std::process::Output {
        self.mojim("keys", more)
    }

    fn made(self) -> Pair {
        self.make_keys();
        self
    }

    fn config(&self) -> Config {
        Config::load(&self.file()).unwrap_or_else(|e| panic!("{e}"))
    }

    /// A program on `a` commits so many entries.
    fn commit(&self, entries: u64) {
        let (mut p, found) = self.program("a", &["--entries", &entries.to_string(), "--linger"]);
        p.acknowledged(found, found + entries);
        p.finish();
    }

    /// What a program left is known on both nodes a little later.
    fn await_well(&self) {
        await_or(
            "a volume that is well",
            || self.status().to_string(),
            || (self.status()["ok"] == true).then_some(()),
        );
    }

    fn os(&self, s: &Subject) -> Arc<dyn Env> {
        Arc::new(Os::of(&self.config(), s).unwrap_or_else(|e| panic!("{e}")))
    }

    fn client(&self, s: &Subject, to: &str) -> Client {
        let to = Address::Tcp(self.config().nodes[to].address);
        Client::connect(&self.os(s), &to, "c", DEADLINE).unwrap_or_else(|e| panic!("{e}"))
    }
}

impl Deref for Pair {
    type Target = Home;
    fn deref(&self) -> &Home {
        &self.home
    }
}

const STATUS: Request = Request::Status {
    volume: None,
    register: true,
};

fn node(name: &str) -> Subject {
    Subject::Node(name.into())
}

#[test]
fn the_command_makes_keys_and_overwrites_none() {
    let c = Pair::new("sync", "");
    let dir = c.dir.join("keys");
    let out = c.keys(&["--json"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["files"].as_array().unwrap().len(), 5);
    let mode = |p: &Path| fs::metadata(p).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    let mut names = Vec::new();
    for f in fs::read_dir(&dir).unwrap() {
        let f = f.unwrap();
        assert_eq!(mode(&f.path()), 0o600, "{}", f.path().display());
        names.push(f.file_name().into_string().unwrap());
    }
    names.sort();
    let all = [
        "authority.key",
        "authority.pem",
        "client.pem",
        "node.a.pem",
        "node.b.pem",
    ];
    assert_eq!(names, all);
    let before = fs::read(dir.join("node.a.pem")).unwrap();
    let out = c.keys(&[]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("is not empty. Nothing was written"));
    assert_eq!(fs::read(dir.join("node.a.pem")).unwrap(), before);
    // One node's anew: the others still believe it.
    let out = c.keys(&["--renew", "a", "--days", "2"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_ne!(fs::read(dir.join("node.a.pem")).unwrap(), before);
    assert_eq!(mode(&dir.join("node.a.pem")), 0o600);
    c.os(&node("a"));
    let before = fs::read(dir.join("client.pem")).unwrap();
    assert_eq!(c.keys(&["--renew-client"]).status.code(), Some(0));
    assert_ne!(fs::read(dir.join("client.pem")).unwrap(), before);
    assert_eq!(c.keys(&["--renew", "x"]).status.code(), Some(2));
    fs::remove_file(dir.join("authority.key")).unwrap();
    let out = c.keys(&["--renew", "a"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("authority.key"));
    // Without a place for them there are none.
    let t = fs::read_to_string(c.file()).unwrap();
    let without = c.dir.join("without.toml");
    let lines: Vec<&str> = t.lines().filter(|l| !l.starts_with("keys")).collect();
    fs::write(&without, lines.join("\n")).unwrap();
    let out = mojim(&["keys", "--config", without.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("add keys ="));
}

/// `mojim status` without a certificate said that no node answers, and ended as with a finding. A
/// daemon without its own ended as one that failed.
#[test]
fn own_keys_that_cannot_be_used_are_a_mistake_of_the_configuration() {
    let c = Pair::new("sync", "").made();
    for file in ["client.pem", "node.a.pem", "node.b.pem"] {
        fs::remove_file(c.dir.join("keys").join(file)).unwrap();
    }
    for (command, more, file, renew) in [
        ("status", &[][..], "client.pem", "--renew-client"),
        ("node", &["--name", "a"], "node.a.pem", "--renew a"),
    ] {
        let out = c.mojim(command, more);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{said}");
        let path = c.dir.join("keys").join(file);
        let says = [
            format!("{}: there is no such file", path.display()),
            c.advised("keys", renew),
        ];
        assert!(says.iter().all(|s| said.contains(s)), "{said}");
    }
}

fn replicates(mode: &str, more: &str) {
    let c = Pair::new(mode, more).made();
    let mut a = c.node("a");
    let _b = c.node("b");
    c.commit(300);
    let out = c.mojim("verify", &["--json", "--wait", "60"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    // The operator's tools, as on a node: with its certificate.
    fs::remove_file(c.dir.join("keys/client.pem")).unwrap();
    c.await_well();
    a.kill();
    // A mirror that has not seen yet that the program's link ended refuses.
    await_that("the promotion", || {
        let out = c.mojim("promote", &["--name", "b"]);
        (out.status.code() == Some(0)).then_some(())
    });
}

#[test]
fn sync_replicates_with_keys() {
    replicates("sync", "connections = 2");
}

#[test]
fn sync_flush_replicates_with_keys() {
    replicates("sync-flush", "");
}

#[test]
fn sync_replicates_without_encryption() {
    replicates("sync", "encrypt = false\nconnections = 2");
}

#[test]
fn shared_memory_replicates_beside_keys() {
    replicates("sync", "transport = \"shm\"");
}

/// Says `bytes` over a connection of `s` to node `to`, and returns what the
/// node refuses them with.
fn refused(c: &Pair, s: &Subject, encrypt: bool, kind: FrameKind, body: &[u8]) -> String {
    let os = Os::of(&c.config(), s).unwrap_or_else(|e| panic!("{e}"));
    let to = Address::Tcp(c.config().nodes["b"].address);
    let conn = os.encrypting(encrypt).connect(&to).unwrap();
    let mut wire = mojim_env::wire::Wire::new(conn);
    wire.queue(kind, 1, 0, 0, body);
    loop {
        let sent = wire.flush().unwrap_or_else(|e| panic!("{e}"));
        if let Some((f, body)) = wire.take_frame().unwrap_or_else(|e| panic!("{e}")) {
            assert_eq!(f.kind, FrameKind::Refuse);
            return mojim_format::message::Refuse::decode(&body).unwrap().text;
        }
        assert!(wire.conn.wait(!sent, DEADLINE).unwrap());
    }
}

fn hello(from: &str) -> Vec<u8> {
    Hello {
        cluster: "c".into(),
        volume: "v".into(),
        from: from.into(),
        to: "b".into(),
        volume_id: 7,
        view: 1,
        epoch: 1,
        attach: true,
        lanes: 1,
        tail: 0,
        backup: false,
        history: Vec::new(),
    }
    .encode()
}

fn lane() -> Vec<u8> {
    Lane {
        cluster: "c".into(),
        volume: "v".into(),
        lane: 0,
        session: 1,
        position: 0,
        ring: 0,
        align: 64,
    }
    .encode()
}

/// With a certificate of the cluster, but not the one for what is said.
#[test]
fn a_member_speaks_as_itself_only() {
    let c = Pair::new("sync", "").made();
    let _b = c.node("b");
    // The volume's session is node a's.
    c.commit(10);
    let client = Subject::Client;
    for (s, said, why) in [
        // Node b's own certificate is no passport for node a's name.
        (&node("b"), hello("a"), "speaks as \"a\""),
        (&client, hello("a"), "is no node's"),
        (&client, hello("b"), "has no node"),
    ] {
        let text = refused(&c, s, true, FrameKind::Hello, &said);
        assert!(text.contains(why), "{text}");
    }
    for (s, why) in [(&node("b"), "speaks as \"a\""), (&client, "is no node's")] {
        let text = refused(&c, s, true, FrameKind::Lane, &lane());
        assert!(text.contains(why), "{text}");
    }
    // No volume of this cluster is without encryption: nobody gets that far.
    let os = Os::of(&c.config(), &node("a")).unwrap();
    let to = Address::Tcp(c.config().nodes["b"].address);
    let conn = os.encrypting(false).connect(&to).unwrap();
    let e = loop {
        match conn.send(&[std::io::IoSlice::new(b"x")]) {
            Ok(_) => panic!("the link was made"),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                assert!(conn.wait(false, DEADLINE).unwrap());
            }
            Err(e) => break e.to_string(),
        }
    };
    assert!(e.contains("refused"), "{e}");
    // A client asks, but does not vote.
    let mut asking = c.client(&client, "b");
    let raft = |from: &str| {
        Request::Raft(RaftCall {
            to: "b".into(),
            from: from.into(),
            voters: 0,
            life: Some(1),
            knows: None,
            rpc: "vote".into(),
            body: Value::Null,
        })
    };
    assert!(asking.ask(&STATUS).is_ok());
    let to = Address::Tcp(c.config().nodes["b"].address);
    let mut lost = Client::connect(&c.os(&client), &to, "d", DEADLINE).unwrap();
    let e = lost.ask(&STATUS).unwrap_err();
    assert!(e.to_string().contains("this is cluster \"c\""), "{e}");
    let (volume, new) = ("v".into(), Default::default());
    for q in [raft("a"), Request::ViewSwap { volume, new }] {
        let e = asking.ask(&q).unwrap_err();
        assert_eq!(e.errno(), libc::EACCES, "{e}");
    }
    // A node votes as itself.
    let mut other = c.client(&node("a"), "b");
    let e = other.ask(&raft("b")).unwrap_err();
    assert_eq!(e.errno(), libc::EACCES, "{e}");
    let e = other.ask(&raft("a")).unwrap_err();
    assert!(e.to_string().contains("does not vote"), "{e}");
    // And reads what it holds.
    let page = |volume: &str| Request::Page {
        volume: volume.into(),
        id: 0,
        offset: 0,
        since: Since::default(),
    };
    let e = other.ask(&page("another")).unwrap_err();
    assert_eq!(e.errno(), libc::EACCES, "{e}");
    let e = other.ask(&page("v"));
    assert!(e.is_ok() || e.unwrap_err().errno() != libc::EACCES);
}

/// Where one volume's links are in plain, the others' are not, nor requests.
#[test]
fn plain_links_are_for_what_says_so() {
    let c = Pair::new(
        "sync",
        "[volume.w]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\nencrypt = false",
    )
    .made();
    let _b = c.node("b");
    let text = refused(&c, &node("a"), false, FrameKind::Hello, &hello("a"));
    assert!(text.contains("are encrypted"), "{text}");
    let plain = Os::of(&c.config(), &node("a")).unwrap().encrypting(false);
    let plain: Arc<dyn Env> = Arc::new(plain);
    let to = Address::Tcp(c.config().nodes["b"].address);
    let mut asking = Client::connect(&plain, &to, "c", DEADLINE).unwrap();
    let e = asking.ask(&STATUS);
    assert_eq!(e.unwrap_err().errno(), libc::EACCES);
}

/// Without TLS to a node with keys, and with TLS to one without. An operator was advised to end the
/// first node's daemon, and to start that of the second one, which ran.
#[test]
fn both_ends_need_keys() {
    let c = Pair::new("sync", "").made();
    let mut b = c.node("b");
    let address = c.config().nodes["b"].address;
    let plain: Arc<dyn Env> = Arc::new(Os::new().unwrap());
    let mut asking = Client::connect(&plain, &Address::Tcp(address), "c", DEADLINE).unwrap();
    let e = asking.ask(&STATUS);
    let e = e.unwrap_err().to_string();
    assert!(e.contains("both need `keys`"), "{e}");
    await_that("the node's word on it", || {
        b.errors().contains("does not speak TLS").then_some(())
    });
    // What an unknown peer is answered: an alert, no frame, and the end.
    let mut peer = TcpStream::connect(address).unwrap();
    peer.set_read_timeout(Some(DEADLINE)).unwrap();
    let frame = Frame {
        kind: FrameKind::Request,
        flags: 0,
        epoch: 0,
        lsn: 0,
        body: 0,
    };
    peer.write_all(&frame.encode()).unwrap();
    let mut answer = Vec::new();
    let _ = peer.read_to_end(&mut answer);
    assert!(answer.len() < FRAME_LEN, "{answer:?}");
    // A command without keys, and one with keys of another authority.
    let t = fs::read_to_string(c.file()).unwrap();
    let lines = || t.lines().filter(|l| !l.starts_with("keys"));
    let without = c.dir.join("without.toml");
    fs::write(&without, lines().collect::<Vec<_>>().join("\n")).unwrap();
    let other = c.dir.join("other.toml");
    let keys = format!("keys = {:?}", c.dir.join("other"));
    let all: Vec<&str> = std::iter::once(&*keys).chain(lines()).collect();
    fs::write(&other, all.join("\n")).unwrap();
    let of = |file: &Path, what: &str| mojim(&[what, "--config", file.to_str().unwrap()]);
    let made = of(&other, "keys");
    assert!(made.status.success(), "{}", text(&made.stderr));
    let renew = format!("`mojim keys --config {} --renew b`", other.display());
    for (file, advice) in [
        (&without, "use the file that the nodes have"),
        (&other, &*renew),
    ] {
        let said = text(&of(file, "status").stdout);
        assert!(said.contains(advice), "{said}");
    }
    b.signal("TERM");
    assert_eq!(b.wait(), Some(0));
    // The same node without its keys.
    let args = ["node", "--config", without.to_str().unwrap(), "--name", "b"];
    let mut b = Process::start(&args, &c.dir.join("b.txt"));
    assert!(b.line().is_some());
    let out = c.mojim("status", &[]);
    let advice = "this command's configuration names `keys`";
    assert!(
        text(&out.stdout).contains("has it no keys") && text(&out.stdout).contains(advice),
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
}

/// Unknown peers hold all of a node's half-open places; its primary works on, and
/// a new link is made all the same.
#[test]
fn unknown_peers_stop_no_link() {
    let c = Pair::new("sync", "resend_timeout = \"2s\"").made();
    let _a = c.node("a");
    let b = c.node("b");
    let address = c.config().nodes["b"].address;
    c.commit(50);
    let held: Vec<TcpStream> = (0..400)
        .filter_map(|_| TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok())
        .collect();
    c.commit(50);
    c.await_well();
    // It says so once a second.
    await_or(
        "a word of the unknown peers",
        || b.errors(),
        || b.errors().contains("half open").then_some(()),
    );
    drop(held);
}
