//! A node alone, and its peers as each test has them answer.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mojim::{MapFlags, Volume};
use mojim_config::{Config, Mode};
use mojim_env::locks::lock;
use mojim_env::wire::Wire;
use mojim_env::{Address, Env, Error, Locker, Proof, Result};
use mojim_format::message::checked;
use mojim_format::{CatalogEntry, FrameKind, crc32c};
use mojim_linux::{Listener, Os};
use mojim_protocol::view::Register;
use mojim_protocol::{FAR, History, LEAP};
use mojim_replica::client::Client;
use mojim_replica::layout;
use mojim_replica::request::{
    CopyState, Part, Question, RaftCall, Read, Request, Since, Standing, WireAcknowledged,
};
use mojim_store::log::{LIVE_AT, LIVE_COUNT, Live};
use mojim_store::store::{Store, read_superblock};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Node;

/// Another node's daemon, which answers what the test has it say of its copy; it is down as
/// long as that is nothing.
struct Peer {
    at: Address,
    says: Arc<Mutex<Value>>,
    /// To how many links it says nothing first.
    late: Arc<AtomicU8>,
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Peer {
    fn new(at: SocketAddr) -> Peer {
        Peer {
            at: Address::Tcp(at),
            says: Arc::default(),
            late: Arc::default(),
            stop: Arc::default(),
            thread: Mutex::default(),
        }
    }

    fn serve(listener: &Listener, says: &Mutex<Value>, late: &AtomicU8, stop: &AtomicBool) {
        while !stop.load(SeqCst) {
            let Ok(Some(conn)) = listener.accept(Duration::from_millis(50)) else {
                continue;
            };
            let mut wire = Wire::new(conn);
            let word = lock(says).clone();
            let is_late = late
                .fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1))
                .is_ok();
            let _ = Peer::answer(&mut wire, (!is_late).then_some(&word), stop);
            wire.conn.close();
        }
        listener.close();
    }

    /// One question after the other, until the link ends; without a word they are heard only.
    fn answer(wire: &mut Wire, word: Option<&Value>, stop: &AtomicBool) -> Result<()> {
        while !stop.load(SeqCst) {
            let _ = wire.conn.wait(false, Duration::from_millis(50));
            let Some((f, body)) = wire.take_frame()? else {
                continue;
            };
            if f.kind != FrameKind::Request {
                break;
            }
            let asked: Question<Request> = serde_json::from_slice(checked(&body).unwrap()).unwrap();
            assert!(matches!(asked.request, Request::Standing { .. }));
            let Some(word) = word else { continue };
            let mut bytes = word.to_string().into_bytes();
            let crc = crc32c(&bytes);
            bytes.extend_from_slice(&crc.to_le_bytes());
            wire.queue(FrameKind::Response, 0, 0, 0, &bytes);
            while !wire.flush()? {
                let _ = wire.conn.wait(true, Duration::from_secs(5));
            }
        }
        Ok(())
    }

    fn says(&self, standing: &Standing) {
        self.says_raw(json!(standing));
    }

    fn says_raw(&self, what: Value) {
        *lock(&self.says) = json!({ "ok": what });
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let listener = Listener::bind(&self.at).unwrap();
            let (says, late, stop) = (self.says.clone(), self.late.clone(), self.stop.clone());
            stop.store(false, SeqCst);
            *thread = Some(thread::spawn(move || {
                Peer::serve(&listener, &says, &late, &stop);
            }));
        }
    }

    fn is_down(&self) {
        self.stop.store(true, SeqCst);
        if let Some(t) = lock(&self.thread).take() {
            let _ = t.join();
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.is_down();
    }
}

/// A node `a` of a volume `v` that `b` mirrors and `c` has a backup of, both played.
struct Place {
    config: Config,
    b: Peer,
    c: Peer,
    dir: TempDir,
    _shm: TempDir,
}

impl Place {
    fn new() -> Place {
        let (dir, shm) = (
            tempfile::tempdir().unwrap(),
            tempfile::tempdir_in("/dev/shm").unwrap(),
        );
        // An address of its own for each test: nobody else takes a port while it is free.
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let (n, pid) = (NEXT.fetch_add(1, SeqCst), std::process::id());
        let host = Ipv4Addr::new(127, 77, n, (pid % 250) as u8 + 1);
        let free = [(); 3].map(|()| TcpListener::bind((host, 0)).unwrap());
        let [a, b, c] = free.each_ref().map(|l| l.local_addr().unwrap());
        drop(free);
        let (b, c) = (Peer::new(b), Peer::new(c));
        let at = dir.path().display();
        let ring = shm.path().display();
        let text = format!(
            r#"
cluster = "test"
[volume.v]
mode = "async"
primary = "a"
mirror = "b"
backups = ["c"]
failover = "manual"
[node.a]
address = "{a}"
directory = "{at}/a"
ring = "{ring}"
log = {{ medium = "disk", size = "4MiB" }}
[node.b]
address = "{}"
directory = "{at}/b"
ring = "{ring}"
[node.c]
address = "{}"
directory = "{at}/c"
ring = "{ring}"
"#,
            b.at, c.at
        );
        let config = Config::parse(&text, Path::new("test.toml")).unwrap_or_else(|e| panic!("{e}"));
        Place {
            config,
            b,
            c,
            dir,
            _shm: shm,
        }
    }

    /// A program was there, before the volume got copies elsewhere, and has gone.
    fn has_a_copy(&self) {
        let mut alone = self.config.clone();
        let v = alone.volumes.get_mut("v").unwrap();
        (v.mode, v.mirror) = (Mode::Unreplicated, None);
        v.backups.clear();
        let v = Volume::attach_with(&alone, "a", None, |_, _| {}).unwrap();
        let create = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        v.map("file", 4096, create).unwrap();
        v.detach().unwrap();
    }

    fn start(&self) -> Running {
        self.start_as("a")
    }

    fn start_as(&self, name: &str) -> Running {
        self.run(name, |name| Node::start(&self.config, name, None).unwrap())
    }

    fn run(&self, name: &str, start: impl FnOnce(&str) -> Arc<Node>) -> Running {
        let node = start(name);
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let socket = Address::Unix(layout::socket(self.config.node(name).unwrap()));
        Running { node, env, socket }
    }
}

/// The node, while it runs.
struct Running {
    node: Arc<Node>,
    env: Arc<dyn Env>,
    socket: Address,
}

impl Running {
    fn ask(&self, request: &Request) -> Result<Value> {
        let patience = Duration::from_secs(30);
        Client::connect(&self.env, &self.socket, "test", patience)?.ask(request)
    }

    /// A promotion, to its end.
    fn promote(&self, force: bool) -> Result<Value> {
        loop {
            let volume = "v".to_owned();
            let answer = self.ask(&Request::Promote { volume, force })?;
            if answer["promoting"] != true {
                return Ok(answer);
            }
        }
    }

    /// The files of the copy, as they are listed.
    fn files(&self) -> Result<Value> {
        self.ask(&Request::Files {
            volume: "v".to_owned(),
            since: Since::default(),
            part: Part::default(),
        })
    }

    fn standing(&self) -> Standing {
        let volume = "v".to_owned();
        serde_json::from_value(self.ask(&Request::Standing { volume }).unwrap()).unwrap()
    }

    /// Asserts that a promotion is refused, in these words.
    fn is_refused(&self, force: bool, words: &str) {
        match self.promote(force) {
            Err(Error::Answered { text, .. }) => assert!(text.contains(words), "{text}"),
            other => panic!("{other:?} instead of {words:?}"),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.node.stop();
    }
}

/// What a node says of a whole copy, up to LSN 5, with the view of `epoch`.
fn whole(primary: &str, epoch: u64) -> Standing {
    Standing {
        state: CopyState::Whole,
        epoch,
        primary: primary.into(),
        last_lsn: 5,
        checkpoint: 5,
        persistent: true,
        attached: None,
        distrusted: false,
        error: None,
        known: None,
    }
}

#[test]
fn a_node_without_a_copy_says_so() {
    let p = Place::new();
    let a = p.start();
    let s = a.standing();
    assert_eq!((s.state, s.epoch, s.attached), (CopyState::New, 0, None));
    a.is_refused(false, "no copy");
    a.is_refused(true, "no copy");
    let elsewhere = a.ask(&Request::Standing { volume: "w".into() });
    assert!(matches!(elsewhere, Err(Error::Answered { errno, .. }) if errno == libc::ENOENT));
    assert!(p.dir.path().join("a").exists());
}

/// Two nodes were promoted without each other. A backup that knows this one's view said nothing
/// of the other's, and was heard in its place: a plain promotion went on, and what the other
/// had acknowledged was given up without a word.
#[test]
fn a_backup_hides_no_rival() {
    let p = Place::new();
    p.has_a_copy();
    let a = p.start();
    let first = a.standing().epoch;
    // Nobody else answers: this node led, and goes on.
    assert_eq!(a.promote(false).unwrap()["already"], true);
    p.c.says(&whole("c", LEAP));
    a.is_refused(false, "knows a later view");
    // On the operator's word, above all that is known.
    let view = a.promote(true).unwrap()["epoch"].as_u64().unwrap();
    assert!(view >= first + LEAP);
    p.c.says(&whole("a", view));
    assert_eq!(a.promote(false).unwrap()["already"], true);
    p.b.says(&whole("b", view));
    a.is_refused(false, "was promoted too");
    p.c.is_down();
    a.is_refused(false, "was promoted too");
    assert_eq!(a.standing().epoch, view);
    let last = a.promote(true).unwrap()["epoch"].as_u64().unwrap();
    assert!(last > view);
    p.c.says(&whole("a", view));
    assert_eq!(a.promote(false).unwrap()["already"], true);
}

#[test]
fn what_a_peer_says_keeps_from_a_promotion() {
    let p = Place::new();
    p.has_a_copy();
    let a = p.start();
    let view = a.standing().epoch;
    p.b.says(&whole("b", view + 1));
    a.is_refused(false, "knows a later view");
    let lost = Standing {
        state: CopyState::Empty,
        ..whole("b", view + 1)
    };
    p.b.says(&lost);
    a.is_refused(false, "It has no whole copy");
    let used = Standing {
        attached: Some(77),
        ..whole("a", view)
    };
    p.b.says(&used);
    a.is_refused(false, "process 77 is attached there");
    a.is_refused(true, "process 77 is attached there");
    // Another version's words.
    p.b.says_raw(json!({ "lsn": 5 }));
    a.is_refused(true, "runs another version");
    // A view that only one node tells of is no reason to begin one that no other node follows.
    p.b.says(&whole("b", view + FAR));
    a.is_refused(false, "knows a later view");
    let done = a.promote(true).unwrap();
    assert!(done["epoch"].as_u64().unwrap() < view + FAR / 2, "{done}");
    // Absurd numbers are ignored.
    p.b.says(&whole("b", u64::MAX));
    let done = a.promote(true).unwrap();
    assert!(done["epoch"].as_u64().unwrap() < u64::MAX / 4, "{done}");
}

/// A backup's word, which may be false, ends an attach. An absurd one ended it, too; and nothing
/// told how to go on but to end the backup's daemon, which may be another's.
#[test]
fn what_a_backup_claims_ends_an_attach_until_an_operator_disbelieves_it() {
    let p = Place::new();
    p.has_a_copy();
    let attach = |config: &Config| Volume::attach_with(config, "a", None, |_, _| {});
    let meta = layout::meta_dir(p.config.node("a").unwrap(), "v");
    let sb = || {
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        read_superblock(&*env, &meta).unwrap().unwrap()
    };
    let is_refused = |config: &Config| match attach(config) {
        Err(e) => e.to_string(),
        Ok(_) => panic!("attached"),
    };
    p.c.says(&whole("c", sb().view.epoch + 9));
    assert!(is_refused(&p.config).contains("as node c says"));
    p.c.says(&whole("c", u64::MAX / 8));
    attach(&p.config).unwrap().detach().unwrap();
    // It claims to know of more in the present epoch.
    let claims = || {
        let (volume_id, epoch) = (sb().volume_id, sb().view.epoch);
        let known = Some(WireAcknowledged {
            volume_id,
            lsn: 1 << 40,
            epoch,
        });
        p.c.says(&Standing {
            known,
            ..whole("a", epoch)
        });
    };
    claims();
    let why = is_refused(&p.config);
    assert!(
        why.contains("node c knows that sync points of volume v up to LSN 1099511627776")
            && why.contains("Node c itself has LSN 5 only")
            && why.contains("take it out of `backups`"),
        "{why}"
    );
    let mut without = p.config.clone();
    without.volumes.get_mut("v").unwrap().backups.clear();
    attach(&without).unwrap().detach().unwrap();
    // That one was given up by the epoch since.
    attach(&p.config).unwrap().detach().unwrap();
    claims();
    is_refused(&p.config);
}

/// What a peer may ask, by what it has proved.
/// A volume's copy that node `c` keeps, with one page of `byte`, as of `lsn`.
fn take_in(store: &Store, lsn: u64, byte: u8) {
    let entry = CatalogEntry {
        id: 7,
        size: 4096,
        name: "f".into(),
    };
    store.load_begin(u64::from(byte), 1, entry.size).unwrap();
    store.load_file(entry).unwrap();
    store.load_data(None, 7, 0, &[byte; 4096]).unwrap();
    store.load_end(lsn, &History::default()).unwrap();
}

/// A reader went on with the pages that it had after `mojim repair --anew`, and after its
/// node's daemon was started again: the LSN was the same, and so was the history.
#[test]
fn other_bytes_as_of_the_same_lsn_begin_readers_anew() {
    let p = Place::new();
    let c = p.start_as("c");
    let store = || c.node.mirror(&p.config.volumes["v"]).unwrap().store.clone();
    let read = |after: u64, mark: Option<&Value>| {
        let number = |k: &str| mark.map_or(0, |m| m[k].as_u64().unwrap());
        c.ask(&Request::Read(Read {
            volume: "v".into(),
            after,
            epoch: number("epoch"),
            volume_id: number("volume_id"),
            rewritten: number("rewritten"),
            wait: 1,
            ..Read::default()
        }))
    };
    take_in(&store(), 3, 1);
    let first = read(0, None).unwrap();
    assert_eq!(first["lsn"], 3);
    let goes_on = |mark: &Value| read(3, Some(mark)).unwrap().get("records").is_some();
    assert!(goes_on(&first));

    take_in(&store(), 3, 2);
    assert!(!goes_on(&first), "another copy");
    let second = read(3, Some(&first)).unwrap();
    assert!(goes_on(&second));

    // Opened again, as by a daemon that is started again; twice, without another copy.
    let opened = |shown: &Value| {
        let old = c.node.held["v"].place().take().unwrap();
        old.close();
        super::wait_for_last(old).unwrap();
        assert_eq!(store().applied(), 3);
        assert!(!goes_on(shown), "another opening");
        read(3, Some(shown)).unwrap()
    };
    let third = opened(&second);
    opened(&third);
    // What is shown does not go back within a history, whatever became of the bytes.
    let back = read(4, Some(&third));
    assert!(
        matches!(back, Err(Error::Answered { errno, .. }) if errno == libc::EBUSY),
        "{back:?}"
    );
}

/// One lock was held over all copies of a node while one of them was opened, which reads its
/// whole log: the node's other volumes were neither followed nor answered for meanwhile.
#[test]
fn a_copy_that_is_being_opened_holds_up_no_other_volume() {
    let mut p = Place::new();
    let mut w = p.config.volumes["v"].clone();
    w.name = "w".into();
    p.config.volumes.insert("w".into(), w);
    let (begun, begins) = mpsc::channel();
    let (go, goes) = mpsc::channel::<()>();
    let goes = Mutex::new(goes);
    let over = move |os: Os| -> Arc<dyn Env> {
        if thread::current().name() == Some("slow") {
            begun.send(()).unwrap();
            let _ = lock(&goes).recv();
        }
        Arc::new(os)
    };
    let c = p.run("c", |name| {
        Node::start_over(&p.config, name, None, over).unwrap()
    });
    let old = c.node.held["v"].place().take().unwrap();
    old.close();
    super::wait_for_last(old).unwrap();
    let (node, v) = (c.node.clone(), p.config.volumes["v"].clone());
    let slow = thread::Builder::new().name("slow".into());
    let slow = slow.spawn(move || node.mirror(&v).map(drop)).unwrap();
    begins.recv().unwrap();
    let other = c.ask(&Request::Standing { volume: "w".into() });
    drop(go);
    slow.join().unwrap().unwrap();
    assert!(other.is_ok(), "{other:?}");
}

#[test]
fn questions_need_a_proof() {
    let p = Place::new();
    let a = p.start();
    let node = |name: &str| Proof::Node {
        name: name.into(),
        encrypted: true,
    };
    let client = Proof::Client { encrypted: true };
    let volume = || "v".to_owned();
    let swap = Request::ViewSwap {
        volume: volume(),
        new: Register::default(),
    };
    let raft = Request::Raft(RaftCall {
        to: "a".into(),
        from: "b".into(),
        voters: 0,
        life: Some(1),
        knows: None,
        rpc: "vote".into(),
        body: Value::Null,
    });
    let page = Request::Page {
        volume: volume(),
        id: 1,
        offset: 0,
        since: Since::default(),
    };
    let read = Request::Read(Read {
        volume: volume(),
        ..Read::default()
    });
    let give_way = Request::GiveWay { volume: volume() };
    let standing = Request::Standing { volume: volume() };
    let (id, offset, epoch, force) = (1, 0, 0, false);
    let promote = Request::Promote {
        volume: volume(),
        force,
    };
    let rewrite = Request::Rewrite {
        volume: volume(),
        id,
        offset,
    };
    let anew = Request::CopyAnew {
        volume: volume(),
        epoch,
    };
    let rows = [
        (&standing, &client, true),
        (&standing, &node("x"), true),
        (&swap, &client, false),
        (&swap, &node("b"), true),
        (&swap, &node("x"), false),
        (&swap, &Proof::Local, true),
        (&raft, &client, false),
        (&raft, &node("b"), true),
        (&raft, &node("c"), false),
        (&page, &node("c"), true),
        (&page, &node("x"), false),
        (&read, &Proof::Local, true),
        (&read, &node("b"), false),
        (&read, &client, false),
        (&give_way, &Proof::Local, true),
        (&give_way, &node("b"), false),
        // Without keys, any user of this host could promote a node.
        (&promote, &Proof::Local, true),
        (&promote, &Proof::Nothing, false),
        (&rewrite, &Proof::Nothing, false),
        (&anew, &Proof::Nothing, false),
        (&Request::Reload { sum: 1 }, &Proof::Nothing, false),
        (&standing, &Proof::Nothing, true),
        (&promote, &client, true),
    ];
    for (q, proof, may) in rows {
        let found = a.node.may_ask(q, proof);
        assert_eq!(found.is_ok(), may, "{q:?} by {proof:?}: {found:?}");
    }
    // Nothing is asked over a link that others read.
    let bare = Proof::Node {
        name: "b".into(),
        encrypted: false,
    };
    for (q, _, _) in rows {
        assert!(a.node.may_ask(q, &bare).is_err(), "{q:?}");
        let bare = Proof::Client { encrypted: false };
        assert!(a.node.may_ask(q, &bare).is_err(), "{q:?}");
    }
}

/// A program that attached just after another one was killed was refused, where the daemon took more
/// than a second to make persistent what that one had left.
#[test]
fn a_program_waits_for_the_end_of_a_look() {
    let mut place = Place::new();
    place.has_a_copy();
    let v = place.config.volumes.get_mut("v").unwrap();
    (v.mode, v.mirror) = (Mode::Unreplicated, None);
    v.backups.clear();
    let v = v.clone();
    let a = place.start();
    let look = a.node.of(&v).look();
    assert!(a.node.give_way(&v), "it is told to wait");
    drop(look);
    assert!(!a.node.give_way(&v), "the holder is no daemon");
}

/// Of two nodes that had both been promoted, one opened its copy again and again to refuse the other, and
/// was asked just then: it told of a program that was attached, and nobody could be promoted.
#[test]
fn a_copy_that_the_node_itself_has_open_is_no_programs() {
    let place = Place::new();
    place.has_a_copy();
    let v = place.config.volumes["v"].clone();
    let a = place.start();
    let lock = layout::meta_dir(place.config.node("a").unwrap(), "v").join("lock");
    let held = |by| {
        let begun = std::time::Instant::now();
        loop {
            match a.node.env.lock(&lock, by) {
                Ok(held) => return held,
                Err(e) if begun.elapsed() > Duration::from_secs(60) => panic!("{e}"),
                // The node itself has a look.
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    };
    let own = held(Locker::Node);
    assert!(a.node.in_use(&v));
    assert!(!a.node.attached(&v), "nobody is attached");
    drop(own);
    let program = held(Locker::Program);
    assert!(a.node.in_use(&v) && a.node.attached(&v));
    drop(program);
    assert!(!a.node.attached(&v));
}

/// Each look of `verify` at a copy that no program used opened and recovered it anew: 90 openings
/// for 98 pages. A program that wants the copy gets it at once.
#[test]
fn a_copy_is_opened_once_for_many_looks() {
    let place = Place::new();
    place.has_a_copy();
    let a = place.start();
    let meta = layout::meta_dir(place.config.node("a").unwrap(), "v");
    let opened = || {
        a.files().unwrap();
        let sb = read_superblock(&*a.env, &meta).unwrap().unwrap();
        sb.nonce
    };
    // Another one where it took longer to ask again than the copy stays open.
    let all: Vec<_> = (0..20).map(|_| opened()).collect();
    assert!(all.windows(2).any(|w| w[0] == w[1]), "{all:?}");
    let volume = "v".to_owned();
    a.ask(&Request::GiveWay { volume }).unwrap();
    let sb = read_superblock(&*a.env, &meta).unwrap().unwrap();
    assert_eq!(sb.logs, 0, "it was closed cleanly");
    let busy = a.files().unwrap_err();
    assert_eq!(busy.errno(), libc::EBUSY, "{busy}");
}

/// The disk was full when a program died, so that its copy could not be opened: it was never looked at
/// again, and what the program had committed stayed in memory alone until another one came.
#[test]
fn a_copy_that_found_no_room_is_looked_at_again() {
    let place = Place::new();
    place.has_a_copy();
    let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
    let me = place.config.node("a").unwrap();
    let v = place.config.volumes["v"].clone();
    // Its program does not close it.
    drop(Store::open(&env, layout::store(&place.config, me, &v, Locker::Program)).unwrap());
    let a = place.start();
    let sequence = || {
        let sb = read_superblock(&*env, &layout::meta_dir(me, "v"));
        sb.unwrap().unwrap().sequence
    };
    let found = || a.node.left_tail(&v, sequence()).flatten();
    let within = |what: &str| {
        let begun = std::time::Instant::now();
        while found().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            thread::sleep(Duration::from_millis(10));
        }
    };
    within("a copy that was left is looked at");
    // As the look leaves it that fails for want of room, or for another reason.
    let failed = |errno: i32| {
        let e = Error::io("locking it", &std::io::Error::from_raw_os_error(errno));
        let mut known = a.node.of(&v).known();
        known.copy_error = Some((Some(sequence()), e));
        known.left_tail = Some((sequence(), None));
    };
    failed(libc::ENOSPC);
    within("a copy for which there was no room is looked at again");
    assert!(a.node.of(&v).known().copy_error.is_none());
}

/// A file that somebody had put there was not named in eight looks of eight: each checkpoint changes the
/// superblock, and what a look had found meanwhile was dropped.
#[test]
fn unmanaged_files_are_seen_while_the_superblock_changes() {
    let place = Place::new();
    place.has_a_copy();
    let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
    let me = place.config.node("a").unwrap();
    let v = place.config.volumes["v"].clone();
    let a = place.start();
    std::fs::write(layout::data_dir(me, "v").join("unmanaged"), "x").unwrap();
    let sequence = || {
        let sb = read_superblock(&*env, &layout::meta_dir(me, "v"));
        sb.unwrap().unwrap().sequence
    };
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            // Each opening changes it, as a checkpoint does.
            while !over.load(SeqCst) {
                let spec = layout::store(&place.config, me, &v, Locker::Program);
                drop(Store::open(&env, spec));
            }
        });
        let begun = std::time::Instant::now();
        let found = loop {
            let before = sequence();
            let found = a.node.unmanaged_files(&v).filter(|_| sequence() != before);
            if found.is_some() || begun.elapsed() > Duration::from_secs(60) {
                break found;
            }
        };
        over.store(true, SeqCst);
        assert_eq!(found.expect("it is seen")["unknown"], json!(["unmanaged"]));
    });
}

/// A former primary whose copy cannot be used gets no other one by `mojim repair`: the refusal said only that
/// this passes, and not what to do where it does not.
#[test]
fn a_former_primary_is_told_how_its_copy_is_made_anew() {
    let place = Place::new();
    place.has_a_copy();
    let a = place.start();
    let (volume, epoch) = ("v".to_owned(), 9);
    let e = a.ask(&Request::CopyAnew { volume, epoch }).unwrap_err();
    let me = place.config.node("a").unwrap();
    let way = format!(
        "end the daemon of node a, remove {} and all in {}",
        layout::data_dir(me, "v").display(),
        me.directory.join(".mojim").display()
    );
    assert!(e.to_string().contains(&way), "{e}");
}

/// The daemon noted that it heals a copy for a moment longer than it did: a program that had attached by then
/// was attached to nobody, and another node could be promoted beside it.
#[test]
fn a_program_that_comes_when_healing_ends_is_attached() {
    let place = Place::new();
    place.has_a_copy();
    let v = place.config.volumes["v"].clone();
    let lock = layout::meta_dir(place.config.node("a").unwrap(), "v").join("lock");
    let a = place.start();
    a.node.of(&v).known().healing = Some(Arc::default());
    let own = a.node.env.lock(&lock, Locker::Node).unwrap();
    assert!(a.standing().attached.is_none(), "it heals");
    drop(own);
    let program = a.node.env.lock(&lock, Locker::Program).unwrap();
    assert!(a.standing().attached.is_some());
    drop(program);
}

/// A look of the node's own at what a program had left took more than two seconds, as long as its disk does:
/// the figures of that program were taken for those of one that is attached and serves, and its copy was
/// vouched for without a look at its log.
#[test]
fn a_promotion_waits_for_the_nodes_own_look() {
    let place = Place::new();
    place.has_a_copy();
    let lock = layout::meta_dir(place.config.node("a").unwrap(), "v").join("lock");
    let a = place.start();
    let look = a.node.env.lock(&lock, Locker::Node).unwrap();
    let v = &place.config.volumes["v"];
    let ring = layout::logs(&place.config, place.config.node("a").unwrap(), v)
        .swap_remove(0)
        .ring;
    let mut figures = vec![0; LIVE_AT + 8 * LIVE_COUNT];
    figures[LIVE_AT + 8 * Live::Pid as usize] = 1;
    std::fs::create_dir_all(ring.parent().unwrap()).unwrap();
    std::fs::write(&ring, figures).unwrap();
    assert!(a.node.live(v).is_some());
    let (volume, force) = ("v".to_owned(), false);
    let answer = a.ask(&Request::Promote { volume, force }).unwrap();
    assert_eq!(answer["promoting"], true, "{answer}");
    std::fs::remove_file(ring).unwrap();
    drop(look);
    assert_eq!(a.promote(false).unwrap()["already"], true);
}

/// A node that was late with one answer counted as one that is not there: what it knew kept nobody from a
/// promotion.
#[test]
fn a_late_answer_is_waited_for_before_a_promotion() {
    let p = Place::new();
    p.has_a_copy();
    let a = p.start();
    let view = a.standing().epoch;
    p.b.late.store(1, SeqCst);
    p.b.says(&whole("b", view + 1));
    a.is_refused(false, "knows a later view");
    assert_eq!(p.b.late.load(SeqCst), 0);
}
