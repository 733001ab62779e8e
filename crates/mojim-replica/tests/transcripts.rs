//! The messages between two nodes, as transcripts that read like a conversation.
//!
//! Both ends are the shipped machines. One is a primary's session, or a source that forwards. The
//! other is a mirror with its control link and lanes. Between them stands a tap that notes each
//! frame and passes it on. One thread steps all of it. The conversations lie beside this file, in
//! `transcripts/`. With `MOJIM_TRANSCRIPTS=write` they are written anew.
//!
//! The transcripts leave out all that differs from run to run:
//!
//! - signs of life, but the one that makes a mirror a member
//! - random numbers
//! - how many records one acknowledgement covers

use std::fmt::Write as _;
use std::io::{self, IoSlice, IoSliceMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mojim_config::Config;
use mojim_env::wire::Wire;
use mojim_env::{Address, Conn, Env, Error, Result};
use mojim_format::message::{
    CopyBegin, CopyFile, CopyHave, Hello, Lane, Message, Refuse, RefuseCode, Start, Welcome,
};
use mojim_format::{FRAME_LEN, Frame, FrameKind, RecordView};
use mojim_linux::{Listener, Os};
use mojim_protocol::view::{Member, Register};
use mojim_protocol::{AckRule, Acknowledged, FAR, LEAP, Lacks, Loss};
use mojim_replica::backup_progress::Source;
use mojim_replica::backup_session::BackupSession;
use mojim_replica::holders::{Holders, Peer};
use mojim_replica::layout;
use mojim_replica::mirror::control::ControlIn;
use mojim_replica::mirror::lane::LaneServer;
use mojim_replica::mirror::{Mirror, refuse};
use mojim_replica::piece::Piece;
use mojim_replica::primary::Primary;
use mojim_replica::register::{RegisterCall, RegisterCalls, ViewRegister};
use mojim_replica::request::RaftCall;
use mojim_replica::session::Session;
use mojim_replica::told::Told;
use mojim_replica::view_client::ViewClient;
use mojim_store::store::Store;

/// How long a conversation may take: far longer than any does.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a log: what is larger than half of it goes through a spill file.
const LOG: u64 = 64 << 10;

/// What a frame says, in a line; nothing for what differs from run to run.
fn words(f: &Frame, body: &[u8]) -> Option<String> {
    let epochs = |n: usize| match n {
        1 => "1 epoch".to_owned(),
        n => format!("{n} epochs"),
    };
    let text = match f.kind {
        FrameKind::Hello => {
            let h = Hello::decode(body).unwrap();
            let how = match (h.backup, h.attach) {
                (true, _) => "forwards",
                (_, true) => "attaches",
                _ => "is linked again",
            };
            format!(
                "{} {how}: view {}, epoch {}, LSN {}, {}",
                h.from,
                h.view,
                h.epoch,
                h.tail,
                epochs(h.history.len())
            )
        }
        FrameKind::Welcome => {
            let w = Welcome::decode(body).unwrap();
            let member = if w.member { ", a member" } else { "" };
            let of = epochs(w.history.len());
            format!("{:?}{member}, LSN {}, {of}", w.state, w.tail)
        }
        FrameKind::Refuse => {
            let r = Refuse::decode(body).unwrap();
            format!("{:?}: {}", r.code, r.text)
        }
        FrameKind::Start => {
            let s = Start::decode(body).unwrap();
            let as_what = if s.member { "a member" } else { "no member" };
            let keep = match s.keep {
                u64::MAX => "all is kept".to_owned(),
                n => format!("LSN {n} is kept"),
            };
            format!("epoch {} of {}, {as_what}, {keep}", s.epoch, s.primary)
        }
        FrameKind::Lane => format!("{}", Lane::decode(body).unwrap().lane),
        FrameKind::CopyBegin => {
            let c = CopyBegin::decode(body).unwrap();
            format!("as of LSN {}, files: {}", c.lsn, c.files)
        }
        FrameKind::CopyFile => {
            let c = CopyFile::decode(body).unwrap();
            format!("{:?}, {} bytes", c.name, c.size)
        }
        FrameKind::CopyHave => format!("{} bytes of it", CopyHave::decode(body).unwrap().size),
        FrameKind::CopyEnd | FrameKind::Copied => format!("as of LSN {}", f.lsn),
        FrameKind::Record => {
            let r = RecordView::decode(body).unwrap();
            let h = r.header;
            let part = match (h.part, h.end) {
                (0, true) => String::new(),
                (n, true) => format!(", part {n}, the last"),
                (n, false) => format!(", part {n}"),
            };
            format!("LSN {} of epoch {}{part}", h.lsn, h.epoch)
        }
        FrameKind::Spill => match f.flags {
            0 => "bytes".into(),
            1 => "that was all, is it durable?".into(),
            _ => "it is".into(),
        },
        FrameKind::Heartbeat | FrameKind::Ack => return None,
        _ => String::new(),
    };
    Some(match text.is_empty() {
        true => format!("{:?}", f.kind),
        false => format!("{:?}: {text}", f.kind),
    })
}

/// One direction of a link that is tapped.
#[derive(Default)]
struct Way {
    came: Vec<u8>,
    goes: Vec<u8>,
}

impl Way {
    /// Takes what came from `from`, and hands it to `to`; whole frames go to `note`, which may
    /// alter their bodies. False when `from` has ended.
    fn pump(
        &mut self,
        from: &dyn Conn,
        to: &dyn Conn,
        mut note: impl FnMut(&Frame, &mut Vec<u8>),
    ) -> bool {
        let mut open = true;
        let mut buf = [0; 16 << 10];
        loop {
            match from.recv(&mut [IoSliceMut::new(&mut buf)]) {
                Ok(0) => {
                    open = false;
                    break;
                }
                Ok(n) => self.came.extend_from_slice(&buf[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    open = false;
                    break;
                }
            }
        }
        while self.came.len() >= FRAME_LEN {
            let f = Frame::decode(&self.came).unwrap();
            let whole = FRAME_LEN + f.body as usize;
            if self.came.len() < whole {
                break;
            }
            let mut body = self.came[FRAME_LEN..whole].to_vec();
            self.came.drain(..whole);
            note(&f, &mut body);
            let len = body.len() as u32;
            self.goes.extend(Frame { body: len, ..f }.encode());
            self.goes.extend(body);
        }
        while !self.goes.is_empty() {
            match to.send(&[IoSlice::new(&self.goes)]) {
                Ok(n) => drop(self.goes.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => self.goes.clear(),
            }
        }
        open || !self.goes.is_empty()
    }
}

/// A link that is tapped: from whom it came, to whom it goes.
struct Tapped {
    ends: [Arc<dyn Conn>; 2],
    ways: [Way; 2],
}

/// What listens at the mirror's side of a link.
enum Served {
    New(Wire),
    Control(Box<ControlIn>),
    Lane(Box<LaneServer>),
    Over,
}

/// Changes the body of a frame.
type Alter = Box<dyn FnMut(&Frame, &mut Vec<u8>)>;

/// Two nodes, the tap between them, and what was said.
struct Nodes {
    dir: PathBuf,
    /// Bytes of a log.
    log: u64,
    env: Arc<dyn Env>,
    /// Where the mirror is reached: here the tap listens,
    tap: Listener,
    /// and here the mirror.
    door: Listener,
    links: Vec<Tapped>,
    served: Vec<Served>,
    mirror: Option<Arc<Mirror>>,
    /// The primary's node, and the mirror's.
    names: [&'static str; 2],
    /// A register says which node is primary.
    by_register: bool,
    /// What happens to frames on their way.
    alters: Option<Alter>,
    /// The mirror was told that it is a member,
    told: bool,
    /// and that is noted.
    noted: bool,
    said: String,
}

impl Nodes {
    fn new(name: &str) -> Nodes {
        let dir = std::env::temp_dir().join(format!("mojim-talk-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let listen = |at: &str| Listener::bind(&Address::Unix(dir.join(at))).unwrap();
        Nodes {
            env: Arc::new(Os::new().unwrap()),
            tap: listen("tap"),
            door: listen("door"),
            dir,
            log: LOG,
            links: Vec::new(),
            served: Vec::new(),
            mirror: None,
            names: ["a", "b"],
            by_register: false,
            alters: None,
            told: false,
            noted: false,
            said: String::new(),
        }
    }

    /// A line about what happens besides.
    fn tell(&mut self, what: &str) {
        let gap = if self.said.is_empty() { "" } else { "\n" };
        writeln!(self.said, "{gap}# {what}").unwrap();
    }

    fn config(&self) -> Config {
        let mut text = "cluster = \"c\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\n\
             mirror = \"b\"\nconnections = 1\ncopy_streams = 1\n"
            .to_owned();
        for (node, port) in [("a", 7401), ("b", 7402)] {
            let dir = self.dir.join(node);
            std::fs::create_dir_all(&dir).unwrap();
            let dir = dir.display();
            write!(
                text,
                "[node.{node}]\naddress = \"127.0.0.1:{port}\"\ndirectory = \"{dir}\"\n\
                 ring = \"{dir}/ring\"\nlog = {{ medium = \"disk\", size = \"{}\" }}\n",
                self.log
            )
            .unwrap();
        }
        Config::parse(&text, Path::new("mojim.toml")).unwrap()
    }

    fn store(&self, node: &str) -> Arc<Store> {
        let c = self.config();
        let mut spec = layout::store(&c, &c.nodes[node], &c.volumes["v"], mojim_env::Locker::Node);
        spec.by_hand = !self.by_register;
        Arc::new(Store::open(&self.env, spec).unwrap())
    }

    fn primary(&self) -> Arc<Primary> {
        let c = self.config();
        let me = self.names[0];
        let spec = layout::primary(&c, &c.nodes[me], &c.volumes["v"]);
        Arc::new(Primary::new(self.store(me), spec))
    }

    fn peer(&self) -> Peer {
        let address = Address::Unix(self.dir.join("tap"));
        Peer {
            name: self.names[1].into(),
            address: address.clone(),
            tcp: address,
            shared: false,
        }
    }

    fn session(&self, primary: &Arc<Primary>) -> Session {
        Session::attach(primary.clone(), self.names[0], self.peer())
    }

    /// The last LSN of the mirror.
    fn mirrors_tail(&self) -> u64 {
        self.mirror.as_ref().expect("it follows").tail()
    }

    /// The mirror's node follows whoever comes.
    fn follow(&mut self) {
        let me = self.names[1];
        self.mirror = Some(Arc::new(Mirror::new(self.store(me), me, 1 << 20)));
    }

    /// The mirror's process ends.
    fn kill(&mut self) {
        for link in self.links.drain(..) {
            link.ends.iter().for_each(|c| c.close());
        }
        self.served.clear();
        (self.told, self.noted) = (false, false);
        if let Some(m) = self.mirror.take() {
            m.close();
            m.store.release_lock();
        }
    }

    /// One turn of the tap and of the mirror's side.
    fn step(&mut self) {
        while let Some(from) = self.tap.accept(Duration::ZERO).unwrap() {
            let to = self
                .env
                .connect(&Address::Unix(self.dir.join("door")))
                .unwrap();
            let end = self.door.accept(PATIENCE).unwrap().expect("just connected");
            self.served.push(Served::New(Wire::new(end)));
            self.links.push(Tapped {
                ends: [from, to],
                ways: Default::default(),
            });
        }
        self.listen();
        let mirror = self.mirror.clone();
        for s in &mut self.served {
            let Some(mirror) = &mirror else {
                continue;
            };
            *s = serve(std::mem::replace(s, Served::Over), mirror);
        }
        self.listen();
    }

    /// Passes on what was said, and notes it.
    fn listen(&mut self) {
        let (said, told, [primary, mirror]) = (&mut self.said, &mut self.told, self.names);
        let alters = &mut self.alters;
        self.links.retain_mut(|link| {
            let Tapped { ends, ways } = link;
            let [there, back] = ways;
            let mut note = |who: &str, f: &Frame, body: &mut Vec<u8>| {
                if let Some(alters) = alters {
                    alters(f, body);
                }
                *told |= f.kind == FrameKind::Heartbeat && who == primary && *body == [1];
                if let Some(words) = words(f, body) {
                    writeln!(said, "{who}> {words}").unwrap();
                }
            };
            let open = there.pump(&*ends[0], &*ends[1], |f, b| note(primary, f, b))
                & back.pump(&*ends[1], &*ends[0], |f, b| note(mirror, f, b));
            if !open {
                ends.iter().for_each(|c| c.close());
            }
            open
        });
    }

    /// Steps all until `step` says that it is over.
    fn until(&mut self, what: &str, mut step: impl FnMut(&mut Nodes) -> bool) {
        let begun = Instant::now();
        while !step(self) {
            self.step();
            assert!(begun.elapsed() < PATIENCE, "{what}:\n{}", self.said);
        }
    }

    /// Until records flow, and the mirror has all of them.
    fn linked(&mut self, s: &mut Session, p: &Primary) {
        self.until("no session", |n| {
            s.step();
            p.send(0);
            p.receive(0);
            let level = s.is_active() && p.acked.get() >= p.last() && s.is_member();
            level && n.told
        });
        // When that is said is a matter of time.
        if !std::mem::replace(&mut self.noted, true) {
            let [primary, mirror] = self.names;
            writeln!(self.said, "{primary}> Heartbeat: {mirror} is a member").unwrap();
        }
    }

    /// Compares the conversation with the one that is known.
    fn over(self, name: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts");
        let path = path.join(format!("{name}.txt"));
        if std::env::var("MOJIM_TRANSCRIPTS").is_ok_and(|v| v == "write") {
            std::fs::write(&path, &self.said).unwrap();
            panic!("{} is written anew: see what has changed", path.display());
        }
        let known = std::fs::read_to_string(&path).unwrap();
        assert!(!known.is_empty());
        assert!(
            self.said == known,
            "{} has\n{known}\nand this was said:\n{}",
            path.display(),
            self.said
        );
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// One step of what listens at the mirror's side of a link.
fn serve(s: Served, mirror: &Arc<Mirror>) -> Served {
    match s {
        Served::New(mut wire) => match wire.take_frame() {
            Ok(None) => Served::New(wire),
            Err(_) => Served::Over,
            Ok(Some((f, body))) if f.kind == FrameKind::Hello => {
                let hello = Hello::decode(&body).unwrap();
                match ControlIn::answer(mirror.clone(), wire, &hello) {
                    Ok(control) => Served::Control(Box::new(control)),
                    Err((mut wire, no)) => {
                        refuse(&mut wire, mirror.store.superblock().promised, &no);
                        Served::Over
                    }
                }
            }
            Ok(Some((f, body))) => {
                let lane = Lane::decode(&body).unwrap();
                match LaneServer::accept(mirror.clone(), wire, f.epoch, &lane) {
                    Ok(lane) => Served::Lane(Box::new(lane)),
                    Err((mut wire, no)) => {
                        refuse(&mut wire, f.epoch, &no);
                        Served::Over
                    }
                }
            }
        },
        Served::Control(mut c) => match c.step() {
            Ok(_) => Served::Control(c),
            Err(_) => Served::Over,
        },
        Served::Lane(mut l) => match l.step() {
            Ok(_) => Served::Lane(l),
            Err(_) => Served::Over,
        },
        Served::Over => Served::Over,
    }
}

/// Appends a sync point of `len` bytes to file 1.
fn append(p: &Primary, len: usize) -> u64 {
    let bytes = vec![7u8; len];
    p.append(&[piece(&bytes)]).unwrap().lsn
}

fn piece(bytes: &[u8]) -> Piece<'_> {
    Piece::Write {
        file: 1,
        offset: 0,
        ptr: bytes.as_ptr(),
        len: bytes.len(),
    }
}

/// Gives the volume its file.
fn create(p: &Primary) {
    let (file, size) = (1, 1 << 20);
    let pieces = [
        Piece::Create { file, name: "f" },
        Piece::Resize { file, size },
    ];
    p.append(&pieces).unwrap();
}

/// A volume with a file, on both nodes, with records in both logs.
fn begun(name: &str) -> (Nodes, Arc<Primary>, Session) {
    let mut nodes = Nodes::new(name);
    nodes.follow();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.linked(&mut s, &p);
    create(&p);
    append(&p, 100);
    nodes.linked(&mut s, &p);
    (nodes, p, s)
}

/// The same, of which nothing is noted.
fn under_way(name: &str) -> (Nodes, Arc<Primary>, Session) {
    let (mut nodes, p, s) = begun(name);
    nodes.said.clear();
    (nodes, p, s)
}

#[test]
fn a_volume_begins_with_its_mirror() {
    let (mut nodes, p, mut s) = begun("begins");
    nodes.tell("a sync point in parts");
    append(&p, 20_000);
    nodes.linked(&mut s, &p);
    nodes.over("begins");
}

/// A mirror counted the names of a sync point that was still arriving. It held back the other parts
/// until fewer names wait, and could apply none of them before it had those parts: it stood still
/// for good, also when all of them were sent again.
#[test]
fn a_mirror_holds_back_no_part_of_a_sync_point_of_many_names() {
    let mut nodes = Nodes::new("names");
    nodes.log = 16 << 20;
    nodes.follow();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.linked(&mut s, &p);
    let names: Vec<_> = (1..=60_000).map(|n| (n, format!("{n:080}"))).collect();
    let create = |(file, name): &'static (u32, String)| Piece::Create { file: *file, name };
    let pieces: Vec<_> = names.leak().iter().map(create).collect();
    let before = p.last();
    p.append(&pieces).unwrap();
    // Parts with too many names, and more parts behind them.
    assert!(p.last() > before + 4);
    let m = nodes.mirror.clone().unwrap();
    nodes.until("it stands still", |_| {
        // As the mirror's node does.
        m.store.count_names(m.apply_limit());
        s.step();
        p.send(0);
        p.receive(0);
        p.acked.get() >= p.last()
    });
    // Once they can be applied, all of them count.
    m.store.count_names(p.last());
    assert!(m.store.is_laden());
}

#[test]
fn a_mirror_that_was_away_gets_what_it_lacks() {
    let (mut nodes, p, mut s) = under_way("away");
    nodes.tell("b's process is killed, and a goes on appending");
    nodes.kill();
    append(&p, 200);
    append(&p, 300);
    nodes.follow();
    nodes.linked(&mut s, &p);
    nodes.over("away");
}

#[test]
fn a_mirror_that_comes_back_empty_gets_a_copy_and_is_no_member_before() {
    let (mut nodes, p, mut s) = under_way("empty");
    nodes.tell("b's disk is lost");
    nodes.kill();
    std::fs::remove_dir_all(nodes.dir.join("b")).unwrap();
    nodes.follow();
    // Its own log has what was acknowledged: only then the mirror may be without it.
    p.persist_wait(0).unwrap();
    nodes.linked(&mut s, &p);
    nodes.over("empty");
}

#[test]
fn a_primary_whose_disk_is_new_takes_its_mirrors_copy() {
    let (mut nodes, p, s) = under_way("new-disk");
    nodes.tell("a's disk is lost, and its program starts again");
    drop(s);
    p.store.release_lock();
    drop(p);
    std::fs::remove_dir_all(nodes.dir.join("a")).unwrap();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    (nodes.told, nodes.noted) = (false, false);
    nodes.linked(&mut s, &p);
    nodes.over("new-disk");
}

/// Something lay in the way of a file of the mirror's copy. The attach said after a while that the
/// mirror could not be reached, and advised to go on without what the mirror has.
#[test]
fn what_is_in_the_way_of_a_copy_is_named() {
    let (mut nodes, p, s) = under_way("way");
    drop(s);
    p.store.release_lock();
    drop(p);
    std::fs::remove_dir_all(nodes.dir.join("a")).unwrap();
    std::fs::create_dir_all(nodes.dir.join("a/v/f/of-a-stranger")).unwrap();
    std::fs::write(nodes.dir.join("a/v/f/of-a-stranger/g"), "1").unwrap();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.until("the refusal", |_| {
        s.step();
        s.fatal().is_some()
    });
    let why = s.fatal().unwrap().to_string();
    for what in ["cannot be made", "a/v/f is in the way of a file"] {
        assert!(why.contains(what), "{what:?}: {why}");
    }
}

/// The primary's disk was new and the mirror's not mounted: an empty volume began. Once the
/// mirror was back with its disk, its copy, which lags in `async`, was taken for everything.
#[test]
fn a_volume_that_began_anew_does_not_take_a_copy_that_lags() {
    let (mut nodes, p, s) = under_way("anew");
    let away = nodes.dir.join("away");
    let ended = |p: Arc<Primary>, s: Session| {
        drop(s);
        p.store.release_lock();
        drop(p);
    };
    ended(p, s);
    nodes.kill();
    std::fs::remove_dir_all(nodes.dir.join("a")).unwrap();
    std::fs::rename(nodes.dir.join("b"), &away).unwrap();
    nodes.follow();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.linked(&mut s, &p);
    ended(p, s);
    nodes.kill();
    std::fs::remove_dir_all(nodes.dir.join("b")).unwrap();
    std::fs::rename(&away, nodes.dir.join("b")).unwrap();
    nodes.follow();
    let c = nodes.config();
    let mut spec = layout::primary(&c, &c.nodes["a"], &c.volumes["v"]);
    spec.rule = AckRule::LOCAL;
    let p = Arc::new(Primary::new(nodes.store("a"), spec));
    let mut s = nodes.session(&p);
    nodes.until("the refusal", |_| {
        s.step();
        assert!(!p.ready.load(Acquire), "it has begun");
        s.fatal().is_some()
    });
    assert_eq!(s.loss(), Some(Loss::Copy(Lacks::Behind)));
}

/// What primary `p` says to attach to `mirror`, `above` the epoch that this one has promised.
fn greeting(p: &Primary, mirror: &Mirror, above: u64) -> Hello {
    let sb = mirror.store.superblock();
    Hello {
        cluster: "c".into(),
        volume: "v".into(),
        from: "a".into(),
        to: "b".into(),
        volume_id: sb.volume_id,
        view: sb.view.epoch,
        epoch: sb.promised + above,
        attach: true,
        backup: false,
        lanes: 1,
        tail: p.last(),
        history: p.store.history().entries().to_vec(),
    }
}

#[test]
fn a_primary_is_refused_where_a_later_epoch_is_promised() {
    let (mut nodes, p, mut s) = under_way("refused");
    nodes.tell("b promises a later epoch, on another link");
    let mirror = nodes.mirror.clone().unwrap();
    let hello = greeting(&p, &mirror, 100);
    mirror.hello(&hello).map_err(|no| no.text).unwrap();
    nodes.until("it goes on", |_| {
        s.step();
        let why = s.last_error.as_deref().unwrap_or_default();
        why.contains("is promised")
    });
    assert!(!s.is_active());
    nodes.over("refused");
}

/// A mirror refused the terms of its session, which would have dropped what its files may show:
/// its primary offered the same terms again and again. Only a whole copy settles what the files
/// show.
#[test]
fn a_mirror_that_refuses_its_terms_gets_a_copy() {
    let (mut nodes, p, mut s) = under_way("terms");
    nodes
        .tell("b's process is killed; its files may show both records, and it is told to keep one");
    nodes.kill();
    nodes.follow();
    let mut is_first = true;
    nodes.alters = Some(Box::new(move |f, body| {
        if f.kind == FrameKind::Start && std::mem::take(&mut is_first) {
            let mut start = Start::decode(body).unwrap();
            start.keep = 1;
            *body = start.encode();
        }
    }));
    // Its own log has what was acknowledged: only then the mirror may be without it.
    p.persist_wait(0).unwrap();
    nodes.linked(&mut s, &p);
    nodes.over("terms");
}

/// While a frame was taken, a control link was in the stage behind the greeting, whatever it did,
/// and stayed there if that failed. A copy whose first word from its receiver was wrong was given
/// by nobody.
#[test]
fn a_copy_is_given_until_its_link_ends() {
    let (nodes, p, s) = under_way("gives");
    drop(s);
    let mirror = nodes.mirror.clone().unwrap();
    let hello = greeting(&p, &mirror, 1);
    let door = Address::Unix(nodes.dir.join("door"));
    let mut wire = Wire::new(nodes.env.connect(&door).unwrap());
    let end = nodes
        .door
        .accept(PATIENCE)
        .unwrap()
        .expect("just connected");
    let answered = ControlIn::answer(mirror, Wire::new(end), &hello);
    let mut control = answered.map_err(|(_, no)| no.text).unwrap();
    wire.queue(FrameKind::CopyRequest, hello.epoch, 0, 0, &[]);
    let wrong = CopyHave { id: 99, size: 0 };
    wire.send(FrameKind::CopyHave, hello.epoch, &wrong);
    assert!(wire.flush().unwrap());
    let begun = Instant::now();
    let e = loop {
        match control.step() {
            Ok(_) => assert!(begun.elapsed() < PATIENCE),
            Err(e) => break e.to_string(),
        }
    };
    assert!(e.contains("which was not asked for"), "{e}");
    assert!(control.is_giving());
}

/// The mirror goes on for its primary, which comes back with a record that nobody acknowledged: it
/// follows, with a copy in the place of its own, which may show that record.
#[test]
fn a_primary_that_was_replaced_follows_without_what_nobody_acknowledged() {
    let (mut nodes, p, s) = under_way("failover");
    nodes.tell("a appends a record, and fails before b has it: b is promoted");
    append(&p, 200);
    p.persist_wait(0).unwrap();
    drop(s);
    p.store.release_lock();
    drop(p);
    let mirror = nodes.mirror.clone().unwrap();
    mirror.promote(0).unwrap();
    nodes.kill();
    drop(mirror);
    nodes.tell("a comes back, and a program attaches on b");
    nodes.names = ["b", "a"];
    nodes.follow();
    assert_eq!(nodes.mirrors_tail(), 3);
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.linked(&mut s, &p);
    assert_eq!((nodes.mirrors_tail(), p.last()), (2, 2));
    nodes.tell("it appends");
    append(&p, 300);
    nodes.linked(&mut s, &p);
    assert_eq!(nodes.mirrors_tail(), 3);
    nodes.over("failover");
}

/// A primary runs on while its mirror is promoted: it is refused, and acknowledges nothing any more.
#[test]
fn a_primary_that_runs_on_beside_a_promoted_mirror_is_fenced() {
    let (mut nodes, p, mut s) = under_way("fenced");
    nodes.tell("b is promoted while a runs on, and appends");
    nodes.mirror.clone().unwrap().promote(0).unwrap();
    let lsn = append(&p, 200);
    nodes.until("it goes on", |_| {
        s.step();
        p.send(0);
        p.receive(0);
        s.fatal().is_some()
    });
    assert_eq!(s.fatal().unwrap().errno(), libc::ESTALE);
    let bytes = [1; 100];
    assert_eq!(
        p.commit(&[piece(&bytes)]).unwrap_err().errno(),
        libc::ESTALE
    );
    assert!(p.committed() < lsn, "{lsn} is acknowledged");
    nodes.over("fenced");
}

/// Who had a backup's key, or, without keys, any local user, greeted a mirror with epoch
/// 2^63 - 1. The mirror promised it, and no node could ever attach again.
#[test]
fn an_epoch_that_nobody_can_have_begun_is_not_promised() {
    let (nodes, p, _s) = under_way("far");
    let mirror = nodes.mirror.clone().unwrap();
    let before = mirror.store.superblock();
    let hello = |view, epoch| Hello {
        cluster: "c".into(),
        volume: "v".into(),
        from: "a".into(),
        to: "b".into(),
        volume_id: before.volume_id,
        view,
        epoch,
        attach: true,
        backup: false,
        lanes: 1,
        tail: p.last(),
        history: p.store.history().entries().to_vec(),
    };
    let (view, next) = (before.view.epoch, before.promised + 100);
    for far in [before.promised + FAR + 1, u64::MAX / 2, u64::MAX] {
        for h in [hello(view, far), hello(far, next), hello(far, far)] {
            let no = mirror.hello(&h).map(|_| ()).unwrap_err();
            assert!(
                no.text.contains("nobody can have come as far"),
                "{}",
                no.text
            );
        }
    }
    assert_eq!(mirror.store.superblock().promised, before.promised);
    mirror
        .hello(&hello(view, next))
        .map_err(|no| no.text)
        .unwrap();
}

/// The bound was relative to what the mirror had promised, which the same peer had just
/// raised: some Hellos one after another went as far as one that was refused.
#[test]
fn a_promise_carries_nobody_far() {
    let (nodes, p, _s) = under_way("climbs");
    let mirror = nodes.mirror.clone().unwrap();
    let before = mirror.store.superblock();
    let hello = |epoch| Hello {
        cluster: "c".into(),
        volume: "v".into(),
        from: "a".into(),
        to: "b".into(),
        volume_id: before.volume_id,
        view: before.view.epoch,
        epoch,
        attach: true,
        backup: false,
        lanes: 1,
        tail: p.last(),
        history: p.store.history().entries().to_vec(),
    };
    let says = |epoch| {
        mirror
            .hello(&hello(epoch))
            .map(|_| ())
            .map_err(|no| no.text)
    };
    let begun = before.view.epoch;
    // A thousand promotions that it has not seen.
    says(begun + 1000 * LEAP).unwrap();
    says(begun + FAR).unwrap();
    for _ in 0..2 {
        let why = says(mirror.store.superblock().promised + FAR).unwrap_err();
        assert!(why.contains("nobody can have come as far"), "{why}");
    }
    assert_eq!(mirror.store.superblock().promised, begun + FAR);
    // Whoever attaches after that, also on a promotion by hand, is followed.
    says(begun + FAR + 1).unwrap();
    says(begun + FAR + LEAP + 3).unwrap();
}

/// After two questions of an unknown peer's, the second one for a little more, no primary attached any
/// more: it believed no more than a mirror promises at once.
#[test]
fn a_primary_attaches_after_what_unknown_peers_had_promised() {
    let (mut nodes, p, s) = under_way("outbids");
    drop(s);
    p.persist_wait(0).unwrap();
    p.store.release_lock();
    drop(p);
    nodes.kill();
    let b = nodes.store("b");
    let begun = b.superblock().view.epoch;
    let promised = begun + FAR + 5;
    b.update(|sb| sb.promised = promised).unwrap();
    b.release_lock();
    drop(b);
    nodes.follow();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.until("the attach", |_| {
        s.step();
        assert!(s.fatal().is_none(), "{:?}", s.fatal());
        p.store.superblock().view.epoch > promised
    });
}

/// A session that ends since no node can have begun or promised what the mirror says.
fn refused(nodes: &mut Nodes, p: &Arc<Primary>) -> Session {
    let mut s = nodes.session(p);
    nodes.until("the refusal", |_| {
        s.step();
        s.fatal().is_some()
    });
    let why = s.fatal().unwrap().to_string();
    assert!(why.contains("docs/how-to/impossible-epoch.md"), "{why}");
    s
}

/// A mirror whose epochs were absurd was answered with a later one than there is: by wrong words,
/// or by an overflow.
#[test]
fn a_mirror_with_an_epoch_that_nobody_can_have_begun_is_not_followed() {
    for far in [FAR << 2, u64::MAX / 2, u64::MAX] {
        let (mut nodes, p, s) = under_way("absurd");
        drop(s);
        p.persist_wait(0).unwrap();
        p.store.release_lock();
        drop(p);
        nodes.kill();
        let b = nodes.store("b");
        let view = b.superblock().view;
        let promised = b.superblock().promised;
        b.begin_epoch(far, b.tail() + 1, view).unwrap();
        // It answers the greeting: its history alone tells of the epoch.
        b.update(|sb| sb.promised = promised).unwrap();
        b.release_lock();
        drop(b);
        nodes.follow();
        let p = nodes.primary();
        let s = refused(&mut nodes, &p);
        assert!(p.store.superblock().promised < FAR, "{:?}", s.fatal());
    }
}

/// The way out of docs/how-to/impossible-epoch.md: a mirror that promised an epoch which nobody can have
/// begun follows nobody. Its copy is given up, and it gets the primary's.
#[test]
fn a_mirror_that_promised_too_much_is_emptied_and_follows_again() {
    let (mut nodes, p, s) = under_way("too-much");
    drop(s);
    p.persist_wait(0).unwrap();
    p.store.release_lock();
    drop(p);
    nodes.kill();
    let b = nodes.store("b");
    b.update(|sb| sb.promised = u64::MAX / 2).unwrap();
    b.release_lock();
    drop(b);
    nodes.follow();
    // A promotion there would be one that no program could attach to.
    let e = nodes.mirror.as_ref().unwrap().promote(0).unwrap_err();
    assert!(e.to_string().contains("are used up"), "{e}");
    let p = nodes.primary();
    drop(refused(&mut nodes, &p));
    nodes.kill();
    std::fs::remove_dir_all(nodes.dir.join("b")).unwrap();
    nodes.follow();
    let mut s = nodes.session(&p);
    nodes.linked(&mut s, &p);
}

/// A register that can be cut off, at once or when it has done a swap that names a mirror.
#[derive(Default)]
struct Voted {
    now: Mutex<Register>,
    is_cut: AtomicBool,
    cut_after_admission: AtomicBool,
    reads: AtomicUsize,
}

impl Voted {
    fn mirror(&self) -> Option<String> {
        let now = self.now.lock().unwrap();
        now.mirror.as_ref().map(|m| m.node.clone())
    }
}

impl ViewRegister for Voted {
    fn read(&self, _: &str) -> Result<Register> {
        self.reads.fetch_add(1, SeqCst);
        match self.is_cut.load(SeqCst) {
            true => Err(Error::Timeout("no majority".into())),
            false => Ok(self.now.lock().unwrap().clone()),
        }
    }

    fn swap(&self, _: &str, new: &Register) -> Result<bool> {
        let mut now = self.now.lock().unwrap();
        let done = new.version == now.version + 1;
        if done {
            *now = new.clone();
        }
        if new.mirror.is_some() && self.cut_after_admission.load(SeqCst) {
            self.is_cut.store(true, SeqCst);
            return Err(Error::Timeout("the answer was lost".into()));
        }
        Ok(done)
    }

    fn hear(&self, _: RaftCall) -> Result<serde_json::Value> {
        Err(Error::Unsupported("nobody votes here".into()))
    }
}

/// Calls that are made at once.
struct AtOnce(Arc<Voted>);

impl RegisterCalls for AtOnce {
    fn send(&mut self, what: RegisterCall) {
        what(&*self.0);
    }
}

/// A primary was alone; its mirror came back, and was admitted, but the answer was lost, and
/// then the link. A primary that then goes on alone, as before, acknowledges what the mirror,
/// which may take over, does not have.
#[test]
fn an_admission_in_doubt_ends_going_on_alone() {
    let mut nodes = Nodes::new("doubt");
    nodes.follow();
    let p = nodes.primary();
    let views = Arc::new(Voted::default());
    let limit = Duration::from_millis(300);
    let calls = Box::new(AtOnce(views.clone()));
    let client = ViewClient::new(views.clone(), calls, limit);
    let candidates = Holders::new(vec![nodes.peer()]);
    let s = nodes.session(&p).with_views(client, candidates);
    let mut s = s.unwrap();
    nodes.linked(&mut s, &p);
    create(&p);
    nodes.linked(&mut s, &p);
    nodes.kill();
    let turn = |s: &mut Session| {
        s.step();
        p.persist_wait(0).unwrap();
        p.send(0);
        p.receive(0);
    };
    append(&p, 100);
    nodes.until("it goes on alone", |_| {
        turn(&mut s);
        views.mirror().is_none() && p.committed() >= p.last()
    });
    views.cut_after_admission.store(true, SeqCst);
    nodes.follow();
    nodes.until("b is admitted", |_| {
        turn(&mut s);
        views.mirror().is_some()
    });
    nodes.kill();
    nodes.until("the link is down", |_| {
        turn(&mut s);
        !s.is_active()
    });
    let lsn = append(&p, 200);
    for _ in 0..1000 {
        turn(&mut s);
        nodes.step();
    }
    assert!(p.committed() < lsn, "acknowledged beside a member");
    // The register can be reached again: it agrees that the primary is alone.
    views.cut_after_admission.store(false, SeqCst);
    views.is_cut.store(false, SeqCst);
    nodes.until("it goes on alone again", |_| {
        turn(&mut s);
        views.mirror().is_none() && p.committed() >= lsn
    });
}

/// A record was damaged on its way, the mirror refused it, and got a whole copy: its copy's life
/// in the register was over. The register could not be reached to name the new one, and the
/// primary lost its power: no node could go on, though the mirror had lost nothing.
#[test]
fn a_member_leaves_the_view_before_its_copy_is_replaced() {
    leaves_first(PATIENCE, false);
}

/// The same with a mirror that was away, so that its primary asked to go on alone, in vain.
#[test]
fn a_mirror_that_is_given_up_leaves_the_view_before_its_copy_is_replaced() {
    leaves_first(Duration::from_millis(300), true);
}

fn leaves_first(limit: Duration, is_given_up: bool) {
    let mut nodes = Nodes::new(&format!("leaves-{is_given_up}"));
    nodes.follow();
    let p = nodes.primary();
    let views = Arc::new(Voted::default());
    let calls = Box::new(AtOnce(views.clone()));
    let client = ViewClient::new(views.clone(), calls, limit);
    let candidates = Holders::new(vec![nodes.peer()]);
    let s = nodes.session(&p).with_views(client, candidates);
    let mut s = s.unwrap();
    let life = |n: &Nodes| n.mirror.as_ref().unwrap().store.superblock().life;
    let named = || {
        let now = views.now.lock().unwrap();
        now.mirror.as_ref().map(|m| m.incarnation)
    };
    nodes.linked(&mut s, &p);
    create(&p);
    nodes.until("it is named", |n| {
        s.step();
        p.send(0);
        p.receive(0);
        s.is_active() && s.is_member() && named() == Some(life(n))
    });
    let before = life(&nodes);
    views.is_cut.store(true, SeqCst);
    p.suspect(Error::Refused {
        code: RefuseCode::Protocol,
        text: "b refused a record".into(),
    });
    if is_given_up {
        s.step();
        nodes.kill();
        nodes.until("it is given up", |_| {
            s.step();
            !s.is_member()
        });
        nodes.follow();
    }
    nodes.until("the mirror's leave", |n| {
        s.step();
        let error = s.last_error.clone().unwrap_or_default();
        life(n) != before || error.contains("leaves the view first")
    });
    assert_eq!((life(&nodes), named()), (before, Some(before)));
    views.is_cut.store(false, SeqCst);
    nodes.until("its new copy is named", |n| {
        s.step();
        p.send(0);
        p.receive(0);
        life(n) != before && named() == Some(life(n))
    });
}

/// A node of a view, in a life of its copy.
fn member(node: &str, incarnation: u64) -> Option<Member> {
    let node = node.into();
    Some(Member { node, incarnation })
}

/// Greets `m` for node `a`, which has `p`, knows `view` and asks for `epoch`. Returns whether `m` then
/// calls itself a member.
fn counts_when_greeted(m: &Mirror, p: &Primary, view: u64, epoch: u64) -> bool {
    let hello = Hello {
        cluster: "c".into(),
        volume: "v".into(),
        from: "a".into(),
        to: "b".into(),
        volume_id: p.store.superblock().volume_id,
        view,
        epoch,
        attach: true,
        backup: false,
        lanes: 1,
        tail: p.last(),
        history: p.store.history().entries().to_vec(),
    };
    let answer = m.hello(&hello).map_err(|no| no.text);
    answer.unwrap().0.member
}

/// A backup that claimed to know of more in the present epoch kept the mirror from taking over
/// until the backup's daemon ended. The mirror acknowledges everything, so what it has followed
/// in one life of its process, it has.
#[test]
fn a_mirror_that_followed_the_epoch_takes_over_whatever_a_backup_claims() {
    for is_restarted in [false, true] {
        let (mut nodes, p, s) = under_way(&format!("claims-{is_restarted}"));
        drop(s);
        if is_restarted {
            nodes.kill();
            nodes.follow();
        }
        let m = nodes.mirror.clone().unwrap();
        let sb = m.store.superblock();
        let epoch = sb.view.epoch;
        let now = Register {
            version: 3,
            epoch,
            primary: member("a", p.store.superblock().life),
            mirror: member("b", sb.life),
            ..Register::default()
        };
        let views = Voted::default();
        *views.now.lock().unwrap() = now.clone();
        let claims = [Told {
            node: "c".into(),
            known: Acknowledged {
                volume_id: sb.volume_id,
                lsn: m.tail() + 9,
                epoch: Some(epoch),
            },
            has: 1,
        }];
        let taken = m.take_over_from(now, &views, &claims);
        match is_restarted {
            false => assert!(taken.unwrap().is_some_and(|(e, _)| e > epoch)),
            true => {
                let why = taken.unwrap_err().to_string();
                assert!(why.contains("node c knows that sync points"), "{why}");
                assert!(why.contains("take it out of `backups`"), "{why}");
                assert!(why.contains("promote --force --volume v --name b"), "{why}");
                assert_eq!(views.now.lock().unwrap().epoch, epoch);
            }
        }
    }
}

/// A mirror's copy was put back as of an earlier epoch. It did not take over, until its primary had
/// greeted it: by that it had promised as much as the register said again. Then the primary failed
/// before the copy had got anything, and the mirror took over with 0 of 41 sync points.
#[test]
fn a_greeting_makes_no_copy_of_an_earlier_epoch_a_mirror_again() {
    for is_of_earlier in [true, false] {
        let mut nodes = Nodes::new(&format!("missed-{is_of_earlier}"));
        nodes.by_register = true;
        nodes.follow();
        let p = nodes.primary();
        let mut s = nodes.session(&p);
        nodes.linked(&mut s, &p);
        create(&p);
        nodes.linked(&mut s, &p);
        drop(s);
        let sb = nodes.mirror.as_ref().unwrap().store.superblock();
        let next = sb.promised + 1;
        let reg = Register {
            version: 3,
            epoch: next,
            primary: member("a", p.store.superblock().life),
            mirror: member("b", sb.life),
            promised: next,
        };
        let views = Voted::default();
        *views.now.lock().unwrap() = reg.clone();
        let take_over = |nodes: &Nodes| {
            let m = nodes.mirror.as_ref().unwrap();
            m.take_over_from(reg.clone(), &views, &[])
        };
        let refuses = |nodes: &Nodes| {
            let why = take_over(nodes).unwrap_err().to_string();
            assert!(why.contains("of an earlier time"), "{why}");
        };
        let greet = |nodes: &Nodes, view, epoch| {
            let m = nodes.mirror.as_ref().unwrap();
            counts_when_greeted(m, &p, view, epoch)
        };
        if !is_of_earlier {
            // It was asked before the epoch was begun, so it is the mirror that the register names.
            assert!(greet(&nodes, sb.view.epoch, next));
            assert!(take_over(&nodes).unwrap().is_some());
            continue;
        }
        refuses(&nodes);
        // A running primary, and then one that attaches, greets it.
        for epoch in [next, next + 1] {
            assert!(!greet(&nodes, next, epoch));
            refuses(&nodes);
        }
        nodes.kill();
        nodes.follow();
        refuses(&nodes);
    }
}

/// The same with a copy of a time when the node led: it was called a member when it was greeted, the
/// register named it the mirror, and it took over. And a node whose copy was put back as of before it
/// became primary began that epoch a second time, with less.
#[test]
fn a_copy_of_when_the_node_led_counts_for_nothing_in_a_later_view() {
    let mut nodes = Nodes::new("led");
    nodes.by_register = true;
    nodes.follow();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.linked(&mut s, &p);
    drop(s);
    let m = nodes.mirror.clone().unwrap();
    let mut view = m.store.superblock().view;
    (view.primary, view.mirror) = ("b".into(), "a".into());
    m.store.update(|sb| sb.view = view).unwrap();
    let sb = m.store.superblock();
    let next = sb.promised + 5;
    let reg = Register {
        version: 3,
        epoch: next,
        primary: member("b", sb.life),
        mirror: None,
        promised: 0,
    };
    let views = Voted::default();
    *views.now.lock().unwrap() = reg.clone();
    let why = m.take_over_from(reg, &views, &[]).unwrap_err().to_string();
    assert!(why.contains("became primary in epoch"), "{why}");
    for epoch in [next, next + 1] {
        assert!(!counts_when_greeted(&m, &p, next, epoch));
    }
}

/// A mirror got its first copy for longer than its limit, in which no primary was heard. While it
/// asked the register, its primary spoke to it and named it the mirror: it took over from a primary
/// that was alive. So it asks again whether that is silent, after each wait.
#[test]
fn a_primary_that_speaks_meanwhile_keeps_its_place() {
    let mut nodes = Nodes::new("meanwhile");
    nodes.by_register = true;
    nodes.follow();
    let p = nodes.primary();
    let mut s = nodes.session(&p);
    nodes.linked(&mut s, &p);
    create(&p);
    nodes.linked(&mut s, &p);
    drop(s);
    let m = nodes.mirror.clone().unwrap();
    let sb = m.store.superblock();
    let views = Voted::default();
    *views.now.lock().unwrap() = Register {
        version: 3,
        epoch: sb.view.epoch,
        primary: member("a", p.store.superblock().life),
        mirror: member("b", sb.life),
        promised: sb.promised,
    };
    let rule = AckRule {
        local: false,
        mirror: true,
    };
    let asked = AtomicUsize::new(0);
    let take_over = |speaks_at: usize| {
        asked.store(0, SeqCst);
        views.reads.store(0, SeqCst);
        let waits = || views.reads.load(SeqCst) + asked.load(SeqCst);
        let ask = |_: &Register| {
            asked.fetch_add(1, SeqCst);
            Vec::new()
        };
        m.try_take_over(&views, rule, || waits() < speaks_at, ask)
    };
    assert_eq!(take_over(1).unwrap(), None, "it spoke meanwhile");
    assert_eq!(asked.load(SeqCst), 0, "nobody else was asked");
    assert_eq!(take_over(2).unwrap(), None, "it spoke meanwhile");
    assert_eq!(asked.load(SeqCst), 1);
    assert!(take_over(usize::MAX).unwrap().is_some());
}

/// Which mirrors lack what, the records of the primary's log tell only in part: an attach named a
/// mirror whose copy had been put back, before it had sent what that copy lacked.
#[test]
fn a_mirror_of_an_earlier_epoch_is_named_when_it_has_caught_up() {
    let mut nodes = Nodes::new("behind");
    nodes.by_register = true;
    let views = Arc::new(Voted::default());
    let attach = |nodes: &Nodes| {
        let p = nodes.primary();
        let calls = Box::new(AtOnce(views.clone()));
        let client = ViewClient::new(views.clone(), calls, Duration::from_secs(60));
        let candidates = Holders::new(vec![nodes.peer()]);
        let s = nodes.session(&p).with_views(client, candidates).unwrap();
        (p, s)
    };
    let (at, kept) = (nodes.dir.join("b"), nodes.dir.join("kept"));
    let copy = |from: &Path, to: &Path| {
        let _ = std::fs::remove_dir_all(to);
        let mut cp = std::process::Command::new("cp");
        assert!(cp.arg("-a").args([from, to]).status().unwrap().success());
    };
    for is_kept in [true, false] {
        nodes.follow();
        let (p, mut s) = attach(&nodes);
        nodes.linked(&mut s, &p);
        match is_kept {
            true => create(&p),
            false => drop(append(&p, 100)),
        }
        nodes.linked(&mut s, &p);
        assert_eq!(views.mirror().as_deref(), Some("b"));
        drop(s);
        p.persist_wait(0).unwrap();
        p.store.release_lock();
        drop(p);
        nodes.kill();
        if is_kept {
            copy(&at, &kept);
        }
    }
    copy(&kept, &at);
    nodes.follow();
    let (p, mut s) = attach(&nodes);
    let epoch = || views.now.lock().unwrap().epoch;
    let before = epoch();
    nodes.until("the attach", |_| {
        s.step();
        epoch() > before
    });
    assert_eq!(views.mirror(), None);
    nodes.linked(&mut s, &p);
    assert_eq!(views.mirror().as_deref(), Some("b"));
}

#[test]
fn a_large_sync_point_goes_ahead_of_its_record() {
    let (mut nodes, p, mut s) = under_way("spill");
    nodes.tell("a sync point that no log can hold");
    let bytes = vec![1u8; LOG as usize];
    let mut spilling = p.try_spill_now(&[piece(&bytes)]).unwrap();
    nodes.until("no record", |_| {
        s.step();
        p.spill_step(&mut spilling, 0).unwrap().is_some()
    });
    p.spill_over(&spilling, true);
    nodes.linked(&mut s, &p);
    nodes.over("spill");
}

#[test]
fn a_backup_gets_a_copy_and_then_records() {
    let mut nodes = Nodes::new("backup");
    let p = nodes.primary();
    p.begin_unreplicated("a").unwrap();
    create(&p);
    append(&p, 100);
    p.persist_wait(0).unwrap();
    p.store.apply(p.last(), usize::MAX).unwrap();
    nodes.follow();
    let source: Arc<dyn Source> = p.clone();
    let address = Address::Unix(nodes.dir.join("tap"));
    let mut s = BackupSession::new(source, "a", "b", address);
    let mirror = nodes.mirror.clone().unwrap();
    let mut level = |nodes: &mut Nodes| {
        nodes.until("the backup is behind", |_| {
            s.step();
            s.is_active() && mirror.tail() == p.last() && !s.is_busy()
        })
    };
    level(&mut nodes);
    nodes.tell("a sync point more");
    append(&p, 200);
    p.persist_wait(0).unwrap();
    level(&mut nodes);
    drop(s);
    nodes.over("backup");
}

/// A volume that is forwarded to a backup which can have files of 1 MiB, where a file has as much.
fn limited(name: &str) -> (Nodes, Arc<Primary>, BackupSession) {
    let mut nodes = Nodes::new(name);
    nodes.log = 16 << 20;
    let p = nodes.primary();
    p.begin_unreplicated("a").unwrap();
    create(&p);
    let bytes = vec![3; 1 << 20];
    p.append(&[piece(&bytes)]).unwrap();
    apply(&p);
    nodes.follow();
    nodes.alters = Some(Box::new(|f, body| {
        if f.kind == FrameKind::Welcome {
            let mut welcome = Welcome::decode(body).unwrap();
            welcome.max_file = 1 << 20;
            *body = welcome.encode();
        }
    }));
    let s = forwards(&nodes, &p);
    (nodes, p, s)
}

fn forwards(nodes: &Nodes, p: &Arc<Primary>) -> BackupSession {
    let address = Address::Unix(nodes.dir.join("tap"));
    BackupSession::new(p.clone(), "a", "b", address)
}

fn apply(p: &Primary) {
    p.persist_wait(0).unwrap();
    p.store.apply(p.last(), usize::MAX).unwrap();
}

fn resize(p: &Primary, size: u64) {
    p.append(&[Piece::Resize { file: 1, size }]).unwrap();
    p.persist_wait(0).unwrap();
}

fn is_refused(s: &BackupSession) -> bool {
    let why = s.last_error.as_deref().unwrap_or_default();
    why.contains("can have files of at most 1048576")
}

/// Whether a backup can have the volume's files was seen by the files of the node that forwards.
/// The record of a larger one was at the backup before it was applied here. The backup passed over
/// the size, and over what was written there, counted both as applied, and went on from there when
/// its limit was raised.
#[test]
fn what_a_backup_cannot_have_is_not_sent_to_it() {
    let (mut nodes, p, mut s) = limited("limited");
    let mirror = nodes.mirror.clone().unwrap();
    let level = |nodes: &mut Nodes, s: &mut BackupSession| {
        nodes.until("the backup is behind", |_| {
            s.step();
            s.is_active() && mirror.tail() == p.last() && !s.is_busy()
        })
    };
    level(&mut nodes, &mut s);
    let has = mirror.tail();
    resize(&p, 2 << 20);
    nodes.until("the end of the link", |_| {
        s.step();
        is_refused(&s) || mirror.tail() > has
    });
    assert_eq!(mirror.tail(), has);
    // It is cut again. The records still have it; the files do not.
    resize(&p, 1 << 20);
    apply(&p);
    drop(s);
    let mut s = forwards(&nodes, &p);
    level(&mut nodes, &mut s);
    let copies = |p: &Primary| p.backups.progress()[0].copies.load(SeqCst);
    assert_eq!(copies(&p), 1);
}

/// The same in a sync point that goes through a spill file, whose bytes the node that forwards does
/// not read.
#[test]
fn what_a_backup_cannot_have_is_found_in_a_spill_file() {
    let (mut nodes, p, mut s) = limited("unfit-spill");
    let mirror = nodes.mirror.clone().unwrap();
    let bytes = vec![5; 1 << 20];
    let with = |file, name, size| {
        let (ptr, len, offset) = (bytes.as_ptr(), bytes.len(), 0);
        // Behind much else.
        let pieces = [
            Piece::Write {
                file: 1,
                offset,
                ptr,
                len,
            },
            Piece::Create { file, name },
            Piece::Resize { file, size },
        ];
        p.begin_copied(&pieces).unwrap();
        p.persist_wait(0).unwrap();
    };
    with(2, "g", 1 << 20);
    nodes.until("the backup is behind", |_| {
        s.step();
        s.is_active() && mirror.tail() == p.last() && !s.is_busy()
    });
    let has = mirror.tail();
    with(3, "h", (1 << 20) + 1);
    nodes.until("the end of the link", |_| {
        s.step();
        is_refused(&s) || mirror.tail() > has
    });
    assert_eq!(mirror.tail(), has);
}

/// The same was seen with signs of life only, which are not sent while a copy fills its link. A
/// change of a size, and all behind it, waits until the copy has ended: the logs filled for the sake
/// of a backup that could not have it.
#[test]
fn a_copy_ends_when_a_file_becomes_too_large_for_its_receiver() {
    let (mut nodes, p, mut s) = limited("outgrown");
    let made = [
        Piece::Create { file: 2, name: "g" },
        Piece::Resize {
            file: 2,
            size: 1 << 20,
        },
        Piece::Create { file: 3, name: "h" },
        Piece::Resize {
            file: 3,
            size: 1 << 20,
        },
    ];
    p.append(&made).unwrap();
    let bytes = vec![4; 1 << 20];
    for file in [2, 3] {
        let (ptr, len) = (bytes.as_ptr(), bytes.len());
        let write = Piece::Write {
            file,
            offset: 0,
            ptr,
            len,
        };
        p.append(&[write]).unwrap();
    }
    apply(&p);
    let progress = || p.store.progress.get(p.store.env().now());
    nodes.until("no copy", |_| {
        s.step();
        progress().is_some_and(|c| c.moved > 1 << 20)
    });
    // Nobody takes what is sent.
    while s.step() {}
    assert!(progress().is_some_and(|c| c.running) && !is_refused(&s));
    resize(&p, 2 << 20);
    s.step();
    assert!(is_refused(&s), "{:?}", s.last_error);
    // What waited for the copy goes on.
    apply(&p);
    assert_eq!(p.store.applied(), p.last());
}
