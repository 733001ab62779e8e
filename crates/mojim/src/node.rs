//! The node daemon: listens, follows primaries, answers questions.
//!
//! Owns the threads of a node: one that accepts per socket, one per link, one
//! that checkpoints per volume it mirrors, one that looks after the rings of
//! programs that died. What they do is in `mirror` and `session`; this file
//! only drives it and blocks.
//!
//! Invariants:
//! - Whoever connects is given `FIRST_WORD` to say something valid, of at most
//!   4 KiB, and there are at most `MAX_LINKS` links: a stranger costs no more.
//! - A volume's copy is open here only while this node follows, or while a
//!   question needs it; a primary on this node takes it over by its lock.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use mojim_format::message::{Hello, Lane, Message, RefuseCode, checked};
use mojim_format::{Frame, FrameKind, State};
use mojim_protocol::pairing::{PromoteRefusal, may_promote};
use serde_json::{Value, json};

use crate::client::Client;
use crate::config::{Config, Node as NodeConfig, Volume};
use crate::env::{Address, Conn, Env, OpenHow};
use crate::error::{Context, Error, Result};
use crate::layout;
use crate::link::Wire;
use crate::log::{LIVE_AT, Live};
use crate::mirror::{ControlIn, LaneServer, Mirror, No, Step, refuse};
use crate::os::{Listener, Os, guard_sigbus};
use crate::spinner::Spinner;
use crate::store::{Store, read_superblock};

/// How long a new link may take to say who it is.
const FIRST_WORD: Duration = Duration::from_secs(5);
/// Most links at once.
const MAX_LINKS: usize = 512;

/// A running node.
pub struct Node {
    config: Config,
    me: NodeConfig,
    env: Arc<dyn Env>,
    mirrors: Mutex<HashMap<String, Arc<Mirror>>>,
    links: AtomicUsize,
    stopping: AtomicBool,
    listeners: Vec<Listener>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// What happened, for the daemon's own output.
    report: Box<dyn Fn(&str) + Send + Sync>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Node {
    /// Starts node `name`: makes its directories, listens, opens the copies it
    /// keeps for others.
    pub fn start(
        config: &Config,
        name: &str,
        report: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Arc<Node>> {
        let me = config
            .node(name)
            .map_err(|e| Error::Config(e.to_string()))?
            .clone();
        config
            .check_media(name)
            .map_err(|e| Error::Config(e.to_string()))?;
        guard_sigbus();
        let env: Arc<dyn Env> = Arc::new(Os::new().context(|| "starting".into())?);
        let meta = me.directory.join(".mojim");
        env.create_dir_all(&meta)
            .context(|| format!("making {}", meta.display()))?;
        let listen =
            |at: Address| Listener::bind(&at).context(|| format!("node {name}: listening on {at}"));
        let listeners = vec![
            listen(Address::Tcp(me.address))?,
            listen(Address::Unix(layout::socket(&me)))?,
        ];
        let node = Arc::new(Node {
            config: config.clone(),
            me,
            env,
            mirrors: Mutex::new(HashMap::new()),
            links: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            listeners,
            threads: Mutex::new(Vec::new()),
            report: Box::new(report),
        });
        for v in node.volumes() {
            // A copy that waits for its primary is opened at once, so that
            // damage shows now and a promotion finds it ready.
            match node.follows(&v) {
                Ok(true) => {
                    if let Err(e) = node.mirror(&v) {
                        node.say(&format!("volume {}: {e}", v.name));
                    }
                }
                Ok(false) => {}
                Err(e) => node.say(&format!("volume {}: {e}", v.name)),
            }
        }
        for i in 0..node.listeners.len() {
            let n = node.clone();
            node.spawn("accept", move || n.accept_loop(i))?;
        }
        let n = node.clone();
        node.spawn("rings", move || n.ring_loop())?;
        Ok(node)
    }

    fn spawn(&self, name: &str, f: impl FnOnce() + Send + 'static) -> Result<()> {
        let t = std::thread::Builder::new()
            .name(format!("mojim-{name}"))
            .spawn(f)
            .context(|| "starting a thread".into())?;
        let mut threads = lock(&self.threads);
        threads.retain(|t| !t.is_finished());
        threads.push(t);
        Ok(())
    }

    fn say(&self, text: &str) {
        (self.report)(text);
    }

    /// The volumes that this node holds.
    fn volumes(&self) -> Vec<Volume> {
        self.config
            .volumes
            .values()
            .filter(|v| v.primary == self.me.name || v.mirror.as_ref() == Some(&self.me.name))
            .cloned()
            .collect()
    }

    /// Whether this node's copy waits for a primary elsewhere.
    fn follows(&self, v: &Volume) -> Result<bool> {
        let meta = layout::meta_dir(&self.me, &v.name);
        Ok(match read_superblock(&*self.env, &meta)? {
            Some(sb) if sb.view.epoch > 0 => sb.view.primary != self.me.name,
            _ => v.primary != self.me.name && v.mirror.is_some(),
        })
    }

    /// The addresses at which it listens.
    pub fn addresses(&self) -> Vec<Address> {
        self.listeners.iter().map(Listener::local_address).collect()
    }

    /// Stops accepting, ends every link, drains what may be drained, closes
    /// the copies cleanly.
    pub fn stop(&self) {
        self.stopping.store(true, SeqCst);
        for l in &self.listeners {
            l.close();
        }
        let mirrors: Vec<_> = lock(&self.mirrors).drain().collect();
        for (name, m) in mirrors {
            if let Err(e) = self.close_mirror(&m) {
                self.say(&format!("volume {name}: closing: {e}"));
            }
        }
        let me = std::thread::current().id();
        let threads: Vec<_> = lock(&self.threads).drain(..).collect();
        for t in threads {
            if t.thread().id() != me {
                // A thread that panicked has said so.
                let _ = t.join();
            }
        }
    }

    /// A mirror's logs hold what may be acknowledged but not committed; it is
    /// applied only if it is known to be committed, so the close is clean only
    /// when nothing else is left.
    fn close_mirror(&self, m: &Arc<Mirror>) -> Result<()> {
        m.close();
        if m.store.superblock().state != State::Whole {
            return Ok(());
        }
        let tail = m.tail();
        let limit = m.committed().min(tail);
        while m.store.applied() < limit {
            let before = m.store.applied();
            if m.store.apply(limit, 1 << 20)? == before {
                break;
            }
        }
        let nothing_left = m
            .store
            .logs()
            .iter()
            .enumerate()
            .all(|(i, _)| m.store.last_of(i).0 <= m.store.applied());
        m.store.checkpoint()?;
        if nothing_left && m.store.applied() == tail {
            m.store.close_clean(tail)?;
        }
        Ok(())
    }

    /// The copy of a volume that this node keeps for a primary elsewhere.
    fn mirror(self: &Arc<Node>, v: &Volume) -> Result<Arc<Mirror>> {
        let mut mirrors = lock(&self.mirrors);
        if let Some(m) = mirrors.get(&v.name) {
            if m.store.poisoned().is_none() {
                return Ok(m.clone());
            }
            // Opened again, it is verified again (invariant 6).
            self.say(&format!(
                "volume {}: reopening a copy that failed: {}",
                v.name,
                m.store.poisoned().expect("just seen")
            ));
            m.close();
            let old = mirrors.remove(&v.name).expect("just seen");
            wait_for_last(old)?;
        }
        let store = Arc::new(Store::open(
            &self.env,
            layout::store(&self.config, &self.me, v),
        )?);
        if store.superblock().state == State::Empty {
            self.say(&format!("volume {}: no usable copy here yet", v.name));
        } else {
            self.say(&format!(
                "volume {}: copy opened, last LSN {}",
                v.name,
                store.tail()
            ));
        }
        let m = Arc::new(Mirror::new(store, &self.me.name));
        mirrors.insert(v.name.clone(), m.clone());
        drop(mirrors);
        let worker = m.clone();
        let node = self.clone();
        self.spawn("checkpoint", move || node.checkpoint_loop(&worker))?;
        Ok(m)
    }

    fn checkpoint_loop(&self, m: &Mirror) {
        crate::os::yield_to_others();
        let mut quiet = 0u32;
        while !m.is_closed() {
            // After 50 turns of 1 ms without work the system counts as idle
            // (Mojim 4.2, "when the system is idle").
            match m.checkpoint_step(quiet == 50) {
                Ok(true) => quiet = 0,
                Ok(false) => quiet = quiet.saturating_add(1),
                Err(e) => {
                    self.say(&format!("volume {}: {e}", m.store.spec().volume));
                    return;
                }
            }
            if quiet > 50 {
                let applied = m.store.applied();
                m.checkpoint_work.wait_unless(
                    || m.is_closed() || m.committed().min(m.received.get()) > applied,
                    Duration::from_secs(1),
                );
                quiet = quiet.min(100);
                if m.committed().min(m.received.get()) > applied {
                    quiet = 0;
                }
            } else if quiet > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn accept_loop(self: Arc<Node>, which: usize) {
        while !self.stopping.load(Acquire) {
            let conn = match self.listeners[which].accept(Duration::from_millis(500)) {
                Ok(Some(c)) => c,
                Ok(None) => continue,
                Err(_) if self.stopping.load(Acquire) => return,
                Err(e) => {
                    self.say(&format!("accepting: {e}"));
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            if self.links.fetch_add(1, AcqRel) >= MAX_LINKS {
                self.links.fetch_sub(1, AcqRel);
                conn.close();
                continue;
            }
            let node = self.clone();
            let started = self.spawn("link", move || {
                node.serve(conn);
                node.links.fetch_sub(1, AcqRel);
            });
            if let Err(e) = started {
                self.links.fetch_sub(1, AcqRel);
                self.say(&e.to_string());
            }
        }
    }

    /// One link, from its first word to its end.
    fn serve(self: &Arc<Node>, conn: Arc<dyn Conn>) {
        let mut wire = Wire::new(conn);
        // Strangers say little, and are believed less.
        wire.limit = 4096;
        let deadline = self.env.now() + FIRST_WORD;
        let first = loop {
            match wire.take_frame() {
                Ok(Some(f)) => break Ok(f),
                Ok(None) => {
                    let left = deadline.saturating_sub(self.env.now());
                    if left.is_zero() || self.stopping.load(Acquire) {
                        break Err(Error::Timeout("nothing was said".into()));
                    }
                    let _ = wire.conn.wait(false, left.min(Duration::from_millis(500)));
                }
                Err(e) => break Err(e),
            }
        };
        let (f, body) = match first {
            Ok(x) => x,
            Err(e @ Error::Protocol(_)) => {
                let no = No {
                    code: RefuseCode::Stranger,
                    text: e.to_string(),
                };
                refuse(&mut wire, 0, &no);
                wire.conn.close();
                return;
            }
            Err(_) => {
                wire.conn.close();
                return;
            }
        };
        if f.kind == FrameKind::Hello {
            wire.limit = mojim_format::frame::MAX_BODY;
        }
        match f.kind {
            FrameKind::Hello => self.serve_control(wire, f, &body),
            FrameKind::Lane => self.serve_lane(wire, f, &body),
            FrameKind::Request => self.serve_requests(wire, f, body),
            k => {
                let no = No {
                    code: RefuseCode::Protocol,
                    text: format!("a link does not begin with {k:?}"),
                };
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
            }
        }
    }

    fn stranger(&self, text: String) -> No {
        No {
            code: RefuseCode::Stranger,
            text,
        }
    }

    /// The volume that a peer means, if it means one of this node's.
    fn meant(&self, cluster: &str, volume: &str) -> Result<Volume, No> {
        if cluster != self.config.cluster {
            return Err(self.stranger(format!(
                "this is cluster {:?}, not {cluster:?}",
                self.config.cluster
            )));
        }
        self.volumes()
            .into_iter()
            .find(|v| v.name == volume)
            .ok_or_else(|| self.stranger(format!("node {} has no volume {volume:?}", self.me.name)))
    }

    fn serve_control(self: &Arc<Node>, mut wire: Wire, f: Frame, body: &[u8]) {
        let answer = (|| -> Result<(Arc<Mirror>, Hello), No> {
            let h = Hello::decode(body).map_err(|e| self.stranger(e.to_string()))?;
            let v = self.meant(&h.cluster, &h.volume)?;
            if h.to != self.me.name {
                return Err(self.stranger(format!(
                    "this is node {}, not {:?}: two nodes share an address",
                    self.me.name, h.to
                )));
            }
            let other = self.config.peer_of(&v, &self.me.name).map(|n| &n.name);
            if other != Some(&h.from) {
                return Err(self.stranger(format!(
                    "volume {} has no node {:?} besides {}",
                    v.name, h.from, self.me.name
                )));
            }
            // A newer view that this node itself made comes before the lock.
            if let Ok(Some(sb)) = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name))
                && sb.view.primary == self.me.name
                && sb.view.epoch > h.view
            {
                return Err(No {
                    code: RefuseCode::Superseded,
                    text: format!(
                        "node {} is itself the primary of volume {}, since epoch {}; node {} knows epoch {} only",
                        self.me.name, v.name, sb.view.epoch, h.from, h.view
                    ),
                });
            }
            let m = self.mirror(&v).map_err(No::from)?;
            Ok((m, h))
        })();
        let (mirror, hello) = match answer {
            Ok(x) => x,
            Err(no) => {
                self.say(&format!("refused {}: {}", wire.conn.peer(), no.text));
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
                return;
            }
        };
        let mut control = match ControlIn::answer(mirror.clone(), wire, &hello) {
            Ok(c) => c,
            Err((mut wire, no)) => {
                self.say(&format!("refused node {}: {}", hello.from, no.text));
                let epoch = mirror.store.superblock().promised;
                refuse(&mut wire, epoch, &no);
                wire.conn.close();
                return;
            }
        };
        self.say(&format!(
            "volume {}: following node {}, epoch {}",
            hello.volume, hello.from, hello.epoch
        ));
        loop {
            match control.step() {
                Ok(true) => {}
                Ok(false) => {
                    let _ = control
                        .conn()
                        .wait(control.wants_to_send(), Duration::from_millis(50));
                }
                Err(e) => {
                    self.say(&format!(
                        "volume {}: node {} is gone: {e}",
                        hello.volume, hello.from
                    ));
                    break;
                }
            }
            if self.stopping.load(Acquire) {
                break;
            }
        }
        control.end();
    }

    fn serve_lane(self: &Arc<Node>, mut wire: Wire, f: Frame, body: &[u8]) {
        let found = (|| -> Result<(Arc<Mirror>, Lane, Duration), No> {
            let l = Lane::decode(body).map_err(|e| self.stranger(e.to_string()))?;
            let v = self.meant(&l.cluster, &l.volume)?;
            let m = lock(&self.mirrors).get(&v.name).cloned();
            let m = m.ok_or_else(|| No {
                code: RefuseCode::StaleEpoch,
                text: "there is no session".into(),
            })?;
            Ok((m, l, v.spin))
        })();
        let accepted = match found {
            Ok((m, l, spin)) => {
                LaneServer::accept(m.clone(), wire, f.epoch, &l).map(|s| (m, s, spin))
            }
            Err(no) => {
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
                return;
            }
        };
        let (mirror, mut lane, spin) = match accepted {
            Ok(x) => x,
            Err((mut wire, no)) => {
                refuse(&mut wire, f.epoch, &no);
                wire.conn.close();
                return;
            }
        };
        let mut spinner = Spinner::new(spin);
        let ended = loop {
            match lane.step() {
                Ok(Step::Moved) => spinner.hit(),
                Ok(Step::Nothing) => {
                    if spinner.spin(&*self.env) {
                        std::hint::spin_loop();
                    } else if let Err(e) = lane.wait(Duration::from_millis(200)) {
                        break e;
                    }
                }
                Ok(Step::Full) => {
                    // This thread waits anyway, and the checkpoint's own gives
                    // way to everybody: help.
                    match mirror.checkpoint_step(true) {
                        Ok(true) => {}
                        Ok(false) => {
                            let full = mirror.store.fullness();
                            mirror.room.wait_unless(
                                || mirror.store.fullness() < full,
                                Duration::from_millis(1),
                            );
                        }
                        Err(e) => break e,
                    }
                }
                Err(e) => break e,
            }
            if self.stopping.load(Acquire) || mirror.is_closed() {
                break Error::Busy("this node is stopping".into());
            }
        };
        if let Error::Protocol(_) | Error::Poisoned(_) = ended {
            self.say(&format!("lane of {}: {ended}", lane.conn().peer()));
        }
        lane.conn().close();
    }

    /// Programs that died leave what they committed in their ring: it is made
    /// persistent here (DESIGN.md, "Records, order, acknowledgement").
    fn ring_loop(self: Arc<Node>) {
        let mut settled: HashMap<String, u64> = HashMap::new();
        while !self.stopping.load(Acquire) {
            for v in self.volumes() {
                let meta = layout::meta_dir(&self.me, &v.name);
                let Ok(Some(sb)) = read_superblock(&*self.env, &meta) else {
                    continue;
                };
                let unclean = sb.logs != 0 && sb.view.primary == self.me.name;
                if !unclean
                    || settled.get(&v.name) == Some(&sb.sequence)
                    || lock(&self.mirrors).contains_key(&v.name)
                {
                    continue;
                }
                match Store::open(&self.env, layout::store(&self.config, &self.me, &v)) {
                    Ok(s) => {
                        let before = s.tail();
                        match s.persist_all() {
                            Ok(()) => self.say(&format!(
                                "volume {}: a program ended without detaching; its records up to LSN {before} are persistent",
                                v.name
                            )),
                            Err(e) => self.say(&format!("volume {}: {e}", v.name)),
                        }
                        settled.insert(v.name.clone(), s.superblock().sequence);
                    }
                    Err(Error::Busy(_)) => {}
                    Err(e) => {
                        self.say(&format!("volume {}: {e}", v.name));
                        settled.insert(v.name.clone(), sb.sequence);
                    }
                }
            }
            for _ in 0..10 {
                if self.stopping.load(Acquire) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    fn serve_requests(self: &Arc<Node>, mut wire: Wire, f: Frame, body: Vec<u8>) {
        let mut next = Some((f, body));
        let mut idle = 0;
        loop {
            let (f, body) = match next.take() {
                Some(x) => x,
                None => match wire.take_frame() {
                    Ok(Some(x)) => x,
                    Ok(None) => {
                        // Who asks nothing for a minute gives its place to others.
                        idle += 1;
                        if self.stopping.load(Acquire) || idle > 120 {
                            break;
                        }
                        if wire
                            .conn
                            .wait(false, Duration::from_millis(500))
                            .unwrap_or(true)
                        {
                            idle = 0;
                        }
                        continue;
                    }
                    Err(_) => break,
                },
            };
            let answer = match checked(&body)
                .ok()
                .and_then(|b| serde_json::from_slice::<Value>(b).ok())
            {
                Some(q) if f.kind == FrameKind::Request => match self.answer(&q) {
                    Ok(v) => json!({ "ok": v }),
                    Err(e) => json!({ "error": e.to_string(), "errno": e.errno() }),
                },
                _ => json!({ "error": "not a request", "errno": libc::EPROTO }),
            };
            let mut bytes = answer.to_string().into_bytes();
            let crc = mojim_format::crc32c(&bytes);
            bytes.extend_from_slice(&crc.to_le_bytes());
            wire.queue(FrameKind::Response, 0, 0, 0, &bytes);
            loop {
                match wire.flush() {
                    Ok(true) => break,
                    Ok(false) => {
                        let _ = wire.conn.wait(true, Duration::from_millis(500));
                        if self.stopping.load(Acquire) {
                            return;
                        }
                    }
                    Err(_) => return,
                }
            }
        }
        wire.conn.close();
    }

    fn answer(self: &Arc<Node>, q: &Value) -> Result<Value> {
        let text = |k: &str| q.get(k).and_then(Value::as_str).unwrap_or("");
        let number = |k: &str| q.get(k).and_then(Value::as_u64).unwrap_or(0);
        if text("cluster") != self.config.cluster {
            return Err(Error::Invalid(format!(
                "this is cluster {:?}, not {:?}",
                self.config.cluster,
                text("cluster")
            )));
        }
        let volume = |name: &str| {
            self.volumes()
                .into_iter()
                .find(|v| v.name == name)
                .ok_or_else(|| {
                    Error::NotFound(format!("node {} has no volume {name:?}", self.me.name))
                })
        };
        match text("what") {
            "status" => {
                let all: Result<Vec<Value>> =
                    self.volumes().iter().map(|v| self.status(v)).collect();
                Ok(json!({ "node": self.me.name, "volumes": all? }))
            }
            "promote" => self.promote(&volume(text("volume"))?),
            "files" => self.files(&volume(text("volume"))?),
            "sums" => {
                let chunk = number("chunk").clamp(1, 16 << 20);
                let len = number("len").min(chunk.saturating_mul(8192)).min(1 << 30);
                self.sums(
                    &volume(text("volume"))?,
                    text("file"),
                    number("offset"),
                    len,
                    chunk,
                )
            }
            other => Err(Error::Invalid(format!("unknown request {other:?}"))),
        }
    }

    /// Live figures of the program attached here, from its ring's memory.
    fn live(&self, v: &Volume) -> Option<[u64; 16]> {
        let spec = &layout::logs(&self.config, &self.me, v)[0];
        let path = match spec.medium {
            crate::config::MediumKind::Disk => &spec.ring,
            _ => &spec.path,
        };
        let f = self.env.open(path, OpenHow::default()).ok()?;
        let mut b = [0u8; 128];
        (f.read_at(&mut b, LIVE_AT as u64).ok()? == 128)
            .then(|| std::array::from_fn(|i| mojim_format::bytes::u64_at(&b, i * 8)))
    }

    /// Whether a program is attached here as primary: it holds the lock.
    fn attached(&self, v: &Volume) -> bool {
        if lock(&self.mirrors).contains_key(&v.name) {
            return false;
        }
        let path = layout::meta_dir(&self.me, &v.name).join("lock");
        match self.env.lock(&path) {
            Ok(_) => false,
            Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
        }
    }

    fn status(&self, v: &Volume) -> Result<Value> {
        let meta = layout::meta_dir(&self.me, &v.name);
        let sb = read_superblock(&*self.env, &meta)?;
        let mirror = lock(&self.mirrors).get(&v.name).cloned();
        let mut out = json!({
            "volume": v.name,
            "mode": v.mode.to_string(),
            "node": self.me.name,
        });
        let Some(sb) = sb else {
            out["role"] = json!(if v.primary == self.me.name {
                "primary"
            } else {
                "mirror"
            });
            out["state"] = json!("new");
            return Ok(out);
        };
        let is_primary =
            sb.view.primary == self.me.name || (sb.view.epoch == 0 && v.primary == self.me.name);
        out["role"] = json!(if is_primary { "primary" } else { "mirror" });
        out["epoch"] = json!(sb.view.epoch);
        out["promised"] = json!(sb.promised);
        out["view"] = json!({ "primary": sb.view.primary, "mirror": sb.view.mirror });
        let loading = mirror.as_ref().is_some_and(|m| m.store.is_loading());
        out["state"] = json!(match sb.state {
            _ if loading => "loading",
            State::Empty => "empty",
            State::Whole => "whole",
            State::Switching => "switching",
        });
        out["checkpoint"] = json!(sb.checkpoint);
        if let Some(m) = mirror {
            let committed = m.committed();
            out["last_lsn"] = json!(m.received.get());
            out["committed"] = json!(committed);
            out["applied"] = json!(m.store.applied());
            out["attached"] = json!(false);
            out["level"] = json!(if m.store.level().is_persistent() {
                "persistent"
            } else {
                "received"
            });
            match m.live_primary() {
                Some((ago, who)) => {
                    out["link"] =
                        json!({ "up": true, "primary": who, "heard_ms": ago.as_millis() as u64 });
                }
                None => out["link"] = json!({ "up": false }),
            }
            if let Some(e) = m.store.poisoned() {
                out["error"] = json!(e.to_string());
            }
        } else {
            let attached = self.attached(v);
            out["attached"] = json!(attached);
            out["last_lsn"] = json!(sb.checkpoint);
            if sb.logs != 0
                && let Some(l) = self.live(v)
                && l[Live::Last as usize] >= sb.checkpoint
            {
                out["last_lsn"] = json!(l[Live::Last as usize]);
                out["committed"] = json!(l[Live::Committed as usize]);
                out["acked"] = json!(l[Live::Acked as usize]);
                out["persisted"] = json!(l[Live::Persisted as usize]);
                out["applied"] = json!(l[Live::Applied as usize]);
                if attached {
                    out["pid"] = json!(l[Live::Pid as usize]);
                    out["bytes_behind"] = json!(l[Live::BytesBehind as usize]);
                    out["link"] = json!({
                        "up": l[Live::LinkUp as usize] == 1,
                        "round_trip_us": l[Live::RoundTrip as usize] as f64 / 1000.0,
                    });
                }
            }
        }
        Ok(out)
    }

    fn promote(self: &Arc<Node>, v: &Volume) -> Result<Value> {
        let meta = layout::meta_dir(&self.me, &v.name);
        let sb = read_superblock(&*self.env, &meta)?.ok_or_else(|| {
            Error::NotFound(format!(
                "node {} has no copy of volume {}",
                self.me.name, v.name
            ))
        })?;
        if sb.view.primary == self.me.name && sb.view.mirror.is_empty() {
            // Only a damaged log is left to be given up, on the operator's word.
            let whole = match Store::open(&self.env, layout::store(&self.config, &self.me, v)) {
                Ok(s) => s.check_complete().is_ok(),
                Err(Error::Busy(_)) => true,
                Err(e) => return Err(e),
            };
            if whole {
                return Ok(
                    json!({ "epoch": sb.view.epoch, "already": true, "last_lsn": sb.checkpoint }),
                );
            }
        }
        let m = match self.mirror(v) {
            Ok(m) => m,
            Err(Error::Busy(who)) => {
                return Err(Error::Busy(format!(
                    "node {} is the primary and a program is attached ({who}): there is nothing to promote",
                    self.me.name
                )));
            }
            Err(e) => return Err(e),
        };
        let alive = m.live_primary();
        if alive.is_none() {
            self.ask_other_node(v)?;
        }
        if let Err(why) = may_promote(
            &self.me.name,
            &m.store.standing(),
            sb.state,
            alive.is_some(),
        ) {
            return Err(match why {
                PromoteRefusal::PrimaryAlive => {
                    let (ago, who) = alive.expect("it is the reason");
                    Error::Busy(format!(
                        "primary {who} of volume {} is alive: it was heard {} ms ago in epoch {}, and LSN {} is acknowledged. End it first",
                        v.name,
                        ago.as_millis(),
                        sb.view.epoch,
                        m.received.get()
                    ))
                }
                PromoteRefusal::NotWhole => Error::Invalid(format!(
                    "node {} has no whole copy of volume {}: it was lost or a transfer was interrupted. Start the other node and let it be copied",
                    self.me.name, v.name
                )),
                PromoteRefusal::NotMember => Error::Invalid(format!(
                    "node {} was still catching up with volume {}: acknowledged sync points may be missing from it",
                    self.me.name, v.name
                )),
            });
        }
        let (epoch, last) = m.promote()?;
        lock(&self.mirrors).remove(&v.name);
        m.close();
        m.store.close_clean(last)?;
        wait_for_last(m)?;
        self.say(&format!(
            "volume {}: this node is primary from epoch {epoch}, last LSN {last}",
            v.name
        ));
        Ok(json!({ "epoch": epoch, "last_lsn": last }))
    }

    /// A primary whose link to this node is down may still be alive: its own
    /// node knows. If that does not answer, the operator's word counts.
    fn ask_other_node(&self, v: &Volume) -> Result<()> {
        let Some(other) = self.config.peer_of(v, &self.me.name) else {
            return Ok(());
        };
        let q = json!({ "what": "status", "cluster": self.config.cluster });
        let Ok(mut c) = Client::connect(&Address::Tcp(other.address), Duration::from_secs(1))
        else {
            return Ok(());
        };
        let Ok(answer) = c.ask(&q) else {
            return Ok(());
        };
        let theirs = answer["volumes"]
            .as_array()
            .and_then(|a| a.iter().find(|s| s["volume"] == v.name.as_str()));
        if let Some(s) = theirs
            && s["attached"] == true
        {
            return Err(Error::Busy(format!(
                "primary {} of volume {} is alive: process {} is attached there, last LSN {}, though no link to this node is up. End it first",
                other.name, v.name, s["pid"], s["last_lsn"]
            )));
        }
        Ok(())
    }

    /// Runs `f` on this node's copy of a volume, wherever it is open.
    fn with_store<T>(
        self: &Arc<Node>,
        v: &Volume,
        f: impl FnOnce(&Store, u64) -> Result<T>,
    ) -> Result<T> {
        if let Some(m) = lock(&self.mirrors).get(&v.name).cloned() {
            let limit = m.committed().min(m.received.get());
            while m.store.applied() < limit {
                let before = m.store.applied();
                if m.store.apply(limit, 1 << 20)? == before {
                    break;
                }
            }
            return f(&m.store, m.tail());
        }
        let meta = layout::meta_dir(&self.me, &v.name);
        let clean = match read_superblock(&*self.env, &meta)? {
            Some(sb) => sb.logs == 0,
            None => {
                return Err(Error::NotFound(format!(
                    "node {} has no copy of volume {} yet",
                    self.me.name, v.name
                )));
            }
        };
        let store = Store::open(&self.env, layout::store(&self.config, &self.me, v))?;
        // Nobody is attached. What the primary's ring holds counts; what is
        // not yet applied is compared by LSN.
        let tail = store.tail();
        let r = f(&store, tail)?;
        if clean {
            // A look does not leave the copy as a dead program does.
            store.close_clean(tail)?;
        }
        Ok(r)
    }

    fn files(self: &Arc<Node>, v: &Volume) -> Result<Value> {
        self.with_store(v, |s, last| {
            let files: Vec<Value> = s
                .area()
                .files()
                .map(|f| json!({ "name": f.name, "size": f.size }))
                .collect();
            Ok(json!({
                "applied": s.applied(),
                "last_lsn": last,
                "state": format!("{:?}", s.superblock().state).to_lowercase(),
                "files": files,
            }))
        })
    }

    fn sums(
        self: &Arc<Node>,
        v: &Volume,
        file: &str,
        offset: u64,
        len: u64,
        chunk: u64,
    ) -> Result<Value> {
        self.with_store(v, |s, _| {
            let mut area = s.area();
            let id = area.find(file).map(|f| f.id).ok_or_else(|| {
                Error::NotFound(format!("volume {} has no file {file:?}", v.name))
            })?;
            let mut sums = Vec::new();
            let mut buf = vec![0u8; chunk as usize];
            let mut at = offset;
            let end = offset.saturating_add(len);
            while at < end {
                let n = chunk.min(end - at) as usize;
                let got = area.read(id, at, &mut buf[..n])?;
                if got == 0 {
                    break;
                }
                sums.push(mojim_format::crc32c(&buf[..got]));
                at += got as u64;
            }
            Ok(json!({ "sums": sums }))
        })
    }
}

/// Waits until nobody else uses this copy, so that its lock is free.
fn wait_for_last(m: Arc<Mirror>) -> Result<()> {
    let mut m = m;
    for _ in 0..1000 {
        match Arc::try_unwrap(m) {
            Ok(_) => return Ok(()),
            Err(back) => {
                m = back;
                m.room.notify();
                m.checkpoint_work.notify();
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    Err(Error::Busy("links to this copy did not end".into()))
}
