//! Kills the primary's program and the mirror's node with SIGKILL at random
//! moments under load, in every mode, and checks every byte after each
//! recovery.
//!
//! Each campaign is one mode on fresh directories. A worker process with
//! several threads commits; beside the volume it notes in shared memory which
//! sync point each thread had begun and which was acknowledged. Thread `i`'s
//! sync point `n` writes its header (`n`) and a payload of its own size and
//! pattern into slot `n % SLOTS`, atomically. So after a recovery the header
//! `h` of each thread must be at least what was acknowledged and at most what
//! was begun, its last `SLOTS` payloads must be exactly those of `h` and the
//! ones before: a torn, lost or early byte shows.
//!
//! SIGKILL does not take the page cache away: what this rung cannot see, the
//! simulator sees (docs/reference/testing.md). The checker is checked: a byte changed
//! behind its back, and an acknowledgement too many, must be found.
//!
//! `CRASH_KILLS=240 cargo test --release -p mojim-testkit --test crash` is the long
//! form; without the variable it kills 28 times.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use mojim::{Error, MapFlags, Volume, gmsync};
use mojim_config::Config;
use mojim_env::{Address, Env};
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::request::Request;

use mojim_testkit::rng::Rng;
use mojim_testkit::{DEADLINE, Port, mojim_path};

const THREADS: usize = 3;
const SLOTS: u64 = 16;
const SLOT: usize = 12 << 10;
const AREA: usize = 4096 + SLOTS as usize * SLOT;
const LEN: usize = THREADS * AREA;
const MODES: [&str; 4] = ["unreplicated", "async", "sync", "sync-flush"];

fn payload_len(thread: usize, n: u64) -> usize {
    let r = Rng::new(n * 31 + thread as u64).next();
    match r % 4 {
        0 => 8,
        1 => 64,
        2 => 1024,
        _ => 4000 + (r >> 8) as usize % 8000,
    }
}

/// The bytes of a whole slot after sync point `n`, if it was zero before.
fn pattern(thread: usize, n: u64, out: &mut [u8]) {
    let mut r = Rng::new(n << 8 | thread as u64);
    for c in out.chunks_mut(8) {
        let v = r.next().to_le_bytes();
        c.copy_from_slice(&v[..c.len()]);
    }
}

/// What the worker did, in memory that outlives it.
struct Notes {
    map: *mut AtomicU64,
    path: PathBuf,
}

// SAFETY: a mapping that stays for the life of the process, used as atomics.
unsafe impl Sync for Notes {}

impl Notes {
    fn open(path: &Path) -> Notes {
        use std::os::fd::AsRawFd;
        let f = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .unwrap();
        f.set_len(4096).unwrap();
        // SAFETY: a new shared mapping of a file of 4096 bytes.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                f.as_raw_fd(),
                0,
            )
        };
        assert_ne!(p, libc::MAP_FAILED);
        Notes {
            map: p.cast(),
            path: path.to_owned(),
        }
    }
    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < 512);
        // SAFETY: inside the mapping, which is never unmapped.
        unsafe { &*self.map.add(i) }
    }
    fn begun(&self, thread: usize) -> &AtomicU64 {
        self.word(thread * 2)
    }
    fn acked(&self, thread: usize) -> &AtomicU64 {
        self.word(thread * 2 + 1)
    }
    fn total(&self) -> u64 {
        (0..THREADS).map(|t| self.acked(t).load(SeqCst)).sum()
    }
}

fn map(v: &Volume) -> usize {
    let flags = MapFlags {
        create: true,
        atomic: true,
        ..MapFlags::default()
    };
    let end = Instant::now() + DEADLINE;
    loop {
        match v.map("data", LEN, flags) {
            Ok(m) => return m.ptr as usize,
            // It makes the file, and waits for that and for what was adopted: half a second,
            // for which a busy machine may keep the mirror.
            Err(Error::Timeout(_)) if Instant::now() < end => {}
            Err(e) => panic!("map: {e}"),
        }
    }
}

/// The program under test: commits until it is killed.
fn worker(config: &Path, node: &str, notes: &Path) -> ! {
    let notes = Notes::open(notes);
    let v = Volume::attach(config, node, None).unwrap_or_else(|e| {
        eprintln!("worker: {e}");
        std::process::exit(3)
    });
    let base = map(&v);
    notes.word(100).store(1, SeqCst);
    std::thread::scope(|s| {
        for t in 0..THREADS {
            let notes = &notes;
            s.spawn(move || {
                let area = base + t * AREA;
                // SAFETY: this thread's own part of the region.
                let header = unsafe { &*(area as *const AtomicU64) };
                let mut n = header.load(SeqCst);
                loop {
                    n += 1;
                    let len = payload_len(t, n);
                    let slot = area + 4096 + (n % SLOTS) as usize * SLOT;
                    // SAFETY: as above.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(slot as *mut u8, len) };
                    pattern(t, n, bytes);
                    notes.begun(t).store(n, SeqCst);
                    header.store(n, SeqCst);
                    loop {
                        match gmsync(&[(area as *const u8, 8), (slot as *const u8, len)]) {
                            Ok(_) => break,
                            // In doubt: the same bytes again.
                            Err(Error::Timeout(_)) => {}
                            Err(e) => {
                                eprintln!("worker: {e}");
                                std::process::exit(4);
                            }
                        }
                    }
                    notes.acked(t).store(n, SeqCst);
                }
            });
        }
    });
    unreachable!("the threads do not end")
}

struct Proc(Child);

impl Proc {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Campaign {
    mode: &'static str,
    dir: PathBuf,
    shm: PathBuf,
    config: Config,
    file: PathBuf,
    addresses: [SocketAddr; 2],
    /// Nobody else's, also while a node is dead.
    _ports: [Port; 2],
    /// Which node is the primary's.
    primary: usize,
    nodes: [Option<Proc>; 2],
    boots: u32,
    log: Vec<String>,
}

const NAMES: [&str; 2] = ["a", "b"];

impl Campaign {
    fn new(mode: &'static str, number: usize, rng: &mut Rng) -> Campaign {
        let id = format!("mojim-crash-{}-{number}", std::process::id());
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&id);
        let shm = Path::new("/dev/shm").join(&id);
        for d in [&dir, &shm] {
            // Left behind by a run of the same number that failed.
            let _ = std::fs::remove_dir_all(d);
            std::fs::create_dir_all(d).unwrap();
        }
        let ports = [0, 1].map(|_| Port::new());
        let addresses = [0, 1].map(|i: usize| SocketAddr::from(([127, 0, 0, 1], ports[i].number)));
        let transport = if rng.below(3) == 0 { "shm" } else { "tcp" };
        let text = format!(
            r#"
cluster = "crash"
[volume.v]
mode = "{mode}"
primary = "a"
{}
connections = {}
transport = "{transport}"
resend_timeout = "100ms"
[node.a]
address = "{}"
directory = "{d}/a"
ring = "{s}/ra"
log = {{ medium = "disk", size = "1MiB" }}
[node.b]
address = "{}"
directory = "{d}/b"
ring = "{s}/rb"
log = {{ medium = "{}", size = "1MiB" }}
"#,
            if mode == "unreplicated" {
                ""
            } else {
                "mirror = \"b\""
            },
            1 + rng.below(3),
            addresses[0],
            addresses[1],
            if mode == "sync" && rng.below(2) == 0 || mode == "sync-flush" {
                "dram"
            } else {
                "disk"
            },
            d = dir.display(),
            s = shm.display(),
        );
        let file = dir.join("c.toml");
        std::fs::write(&file, &text).unwrap();
        let config = Config::load(&file).unwrap_or_else(|e| panic!("{e}\n{text}"));
        Campaign {
            mode,
            dir,
            shm,
            config,
            file,
            addresses,
            _ports: ports,
            primary: 0,
            nodes: [None, None],
            boots: 0,
            log: Vec::new(),
        }
    }

    fn replicated(&self) -> bool {
        self.mode != "unreplicated"
    }

    fn note(&mut self, what: impl Into<String>) {
        self.log.push(what.into());
    }

    fn mirror(&self) -> usize {
        1 - self.primary
    }

    /// Starts node `i`; `reboot`: as if its machine had been started anew.
    fn start_node(&mut self, i: usize, reboot: bool) {
        let exe = mojim_path();
        let mut c = if reboot {
            self.boots += 1;
            let id = self.dir.join(format!("boot{}", self.boots));
            let text = format!("{:08x}-0000-4000-8000-000000000000\n", self.boots);
            std::fs::write(&id, text).unwrap();
            let mut c = Command::new("unshare");
            c.args(["-m", "sh", "-c"])
                .arg("mount --bind \"$1\" /proc/sys/kernel/random/boot_id && shift && exec \"$@\"")
                .arg("sh")
                .arg(id)
                .arg(exe);
            c
        } else {
            Command::new(exe)
        };
        let child = c
            .args(["node", "--config"])
            .arg(&self.file)
            .args(["--name", NAMES[i]])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(
                std::fs::OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(self.dir.join(format!("node-{}.log", NAMES[i])))
                    .unwrap(),
            ))
            .spawn()
            .unwrap();
        self.nodes[i] = Some(Proc(child));
        let end = Instant::now() + DEADLINE;
        while TcpStream::connect(self.addresses[i]).is_err() {
            assert!(Instant::now() < end, "node {} did not start", NAMES[i]);
            let status = self.nodes[i].as_mut().unwrap().0.try_wait().unwrap();
            assert!(status.is_none(), "node {} ended: {status:?}", NAMES[i]);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn kill_node(&mut self, i: usize) {
        self.nodes[i] = None;
    }

    fn start_worker(&mut self, notes: &Notes) -> Proc {
        notes.word(100).store(0, SeqCst);
        let child = Command::new(std::env::current_exe().unwrap())
            .arg("worker")
            .arg(&self.file)
            .arg(NAMES[self.primary])
            .arg(&notes.path)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut p = Proc(child);
        let end = Instant::now() + DEADLINE;
        while notes.word(100).load(SeqCst) == 0 {
            assert!(Instant::now() < end, "the worker did not attach");
            if let Some(s) = p.0.try_wait().unwrap() {
                panic!("the worker ended: {s}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        p
    }

    /// Waits until the worker has had `more` sync points acknowledged.
    fn progress(&self, w: &mut Proc, notes: &Notes, more: u64) {
        let from = notes.total();
        let end = Instant::now() + DEADLINE;
        while notes.total() < from + more {
            assert!(
                Instant::now() < end,
                "no progress: {} of {more} sync points\n{}",
                notes.total() - from,
                self.log.join("\n")
            );
            if let Some(s) = w.0.try_wait().unwrap() {
                panic!("the worker ended: {s}");
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    fn ask(&self, node: usize, q: &Request) -> Result<serde_json::Value, Error> {
        // Orders are taken over the node's Unix socket only, without keys.
        let to = Address::Unix(self.dir.join(NAMES[node]).join(".mojim/node.sock"));
        let os = Os::new().map_err(|e| Error::io("starting", &e))?;
        let env: Arc<dyn Env> = Arc::new(os);
        Client::connect(&env, &to, "crash", Duration::from_secs(20))?.ask(q)
    }

    /// Until the mirror knows that it is a member of the program's view. Before that a
    /// primary commits by its own log too, and the mirror is not promoted.
    fn await_member(&self, w: &mut Proc) {
        let m = self.mirror();
        let (volume, register) = (None, false);
        let q = Request::Status { volume, register };
        let end = Instant::now() + DEADLINE;
        loop {
            let says = self.ask(m, &q).unwrap_or_default();
            let view = &says["volumes"][0]["view"];
            if view["primary"] == NAMES[self.primary] && view["mirror"] == NAMES[m] {
                return;
            }
            assert!(Instant::now() < end, "it is no member: {says}");
            if let Some(s) = w.0.try_wait().unwrap() {
                panic!("the worker ended: {s}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn promote(&mut self, i: usize) {
        let (volume, force) = ("v".to_owned(), false);
        let q = Request::Promote { volume, force };
        let end = Instant::now() + DEADLINE;
        loop {
            match self.ask(i, &q) {
                Ok(_) => break,
                // The primary was heard a moment ago; that passes.
                Err(e) => {
                    assert!(
                        Instant::now() < end,
                        "promote: {e}\n{}",
                        self.log.join("\n")
                    );
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
        self.primary = i;
    }

    /// Attaches, checks everything, detaches. Returns each thread's header.
    fn check(&mut self, notes: &Notes, acknowledged: bool) -> Result<(), String> {
        let end = Instant::now() + DEADLINE;
        let v = loop {
            match Volume::attach_with(&self.config, NAMES[self.primary], None, |_, _| {}) {
                Ok(v) => break v,
                Err(e) => {
                    if Instant::now() > end {
                        return Err(format!("attach: {e}"));
                    }
                    self.note(format!("attach again: {e}"));
                }
            }
        };
        let base = map(&v);
        let r = check_bytes(base, notes, acknowledged);
        mojim::unmap(base as *const u8, LEN).map_err(|e| e.to_string())?;
        v.detach().map_err(|e| format!("detach: {e}"))?;
        r
    }
}

impl Drop for Campaign {
    fn drop(&mut self) {
        self.nodes = [None, None];
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
        let _ = std::fs::remove_dir_all(&self.shm);
    }
}

/// Every thread's header and its last `SLOTS` payloads.
fn check_bytes(base: usize, notes: &Notes, acknowledged: bool) -> Result<(), String> {
    for t in 0..THREADS {
        let area = base + t * AREA;
        // SAFETY: the region is mapped and nobody stores.
        let h = unsafe { *(area as *const u64) };
        let (acked, begun) = (notes.acked(t).load(SeqCst), notes.begun(t).load(SeqCst));
        if h > begun {
            return Err(format!(
                "thread {t}: {h} is there, but only {begun} was begun"
            ));
        }
        if acknowledged && h < acked {
            return Err(format!(
                "thread {t}: {acked} was acknowledged, {h} is there"
            ));
        }
        for n in h.saturating_sub(SLOTS - 1).max(1)..=h {
            let len = payload_len(t, n);
            let slot = area + 4096 + (n % SLOTS) as usize * SLOT;
            let mut want = vec![0u8; len];
            pattern(t, n, &mut want);
            // SAFETY: as above.
            let have = unsafe { std::slice::from_raw_parts(slot as *const u8, len) };
            if have != want {
                let at = (0..len).find(|i| have[*i] != want[*i]).unwrap();
                return Err(format!(
                    "thread {t}: payload {n} of {h} is wrong at byte {at} of {len}"
                ));
            }
        }
        // What is there is what the next worker goes on from.
        notes.begun(t).store(h, SeqCst);
        notes.acked(t).store(h, SeqCst);
    }
    Ok(())
}

/// One campaign of `kills` kills. Returns how many of each kind.
fn campaign(mode: &'static str, number: usize, kills: usize, rng: &mut Rng) -> Vec<&'static str> {
    let mut c = Campaign::new(mode, number, rng);
    let notes = Notes::open(&c.shm.join("notes"));
    let mut done = Vec::new();
    if c.replicated() {
        c.start_node(1, false);
    }
    let fail = |c: &Campaign, e: String| -> ! {
        let logs: String = NAMES
            .iter()
            .map(|n| {
                std::fs::read_to_string(c.dir.join(format!("node-{n}.log"))).unwrap_or_default()
            })
            .collect();
        panic!(
            "campaign {number}, {mode}: {e}\nwhat happened:\n{}\nnodes:\n{logs}\nkept: {}",
            c.log.join("\n"),
            c.dir.display()
        )
    };
    while done.len() < kills {
        let mut w = c.start_worker(&notes);
        c.progress(&mut w, &notes, 1 + rng.below(60));
        if rng.below(3) == 0 {
            std::thread::sleep(Duration::from_micros(rng.below(20_000)));
        }
        let kind = if !c.replicated() {
            "primary"
        } else {
            match rng.below(7) {
                0 | 1 => "primary",
                2 => "mirror",
                3 => "both",
                4 => "primary, then mirror's node lost",
                5 => "mirror restarted, its log gone",
                _ => "primary, mirror promoted",
            }
        };
        c.note(format!("{kind}; primary {}", NAMES[c.primary]));
        let m = c.mirror();
        let mut acknowledged = true;
        match kind {
            "primary" => w.kill(),
            "mirror" => {
                c.kill_node(m);
                if rng.below(2) == 0 {
                    std::thread::sleep(Duration::from_millis(rng.below(200)));
                }
                c.start_node(m, false);
                // The same program goes on, over new links.
                c.progress(&mut w, &notes, 20);
                w.kill();
                done.push("primary");
            }
            "both" => {
                if rng.below(2) == 0 {
                    w.kill();
                    c.kill_node(m);
                } else {
                    c.kill_node(m);
                    w.kill();
                }
                done.push("primary");
                c.start_node(m, false);
            }
            "primary, then mirror's node lost" => {
                w.kill();
                c.kill_node(m);
                // Everything of it: data, logs, memory. The ring on the
                // primary's machine is what is left.
                std::fs::remove_dir_all(c.dir.join(NAMES[m])).unwrap();
                let _ = std::fs::remove_dir_all(c.shm.join(format!("r{}", NAMES[m])));
                c.start_node(m, false);
            }
            "mirror restarted, its log gone" => {
                c.kill_node(m);
                // SAFETY: geteuid has no preconditions.
                let reboot = unsafe { libc::geteuid() } == 0 && c.mode.starts_with("sync");
                let _ = std::fs::remove_dir_all(c.shm.join(format!("r{}", NAMES[m])));
                c.start_node(m, reboot);
                c.progress(&mut w, &notes, 20);
                w.kill();
                done.push("primary");
            }
            _ => {
                c.await_member(&mut w);
                w.kill();
                // Its machine is gone with it: node, ring and all.
                let p = c.primary;
                c.kill_node(p);
                c.promote(m);
                acknowledged = mode != "async";
            }
        }
        done.push(kind);
        if let Err(e) = c.check(&notes, acknowledged) {
            fail(&c, e);
        }
        if kind == "primary, mirror promoted" {
            // The old primary comes back as the mirror.
            let m = c.mirror();
            if c.nodes[m].is_none() {
                c.start_node(m, false);
            }
            // The new primary's node leaves the lock to its program; it may run.
        }
    }
    done
}

/// The checker must find a changed byte and a lost acknowledgement.
fn checker_is_checked(rng: &mut Rng) {
    let mut c = Campaign::new("unreplicated", 9999, rng);
    let notes = Notes::open(&c.shm.join("notes"));
    let mut w = c.start_worker(&notes);
    c.progress(&mut w, &notes, 100);
    w.kill();
    c.check(&notes, true)
        .unwrap_or_else(|e| panic!("sound, but: {e}"));
    notes.acked(1).fetch_add(1, SeqCst);
    let e = c
        .check(&notes, true)
        .expect_err("a lost acknowledgement was not noticed");
    assert!(e.contains("was acknowledged"), "{e}");
    notes.acked(1).fetch_sub(1, SeqCst);
    let file = c.dir.join("a/v/data");
    let mut bytes = std::fs::read(&file).unwrap();
    // On a busy machine one thread may have done everything.
    let last = |t: usize| u64::from_le_bytes(bytes[t * AREA..][..8].try_into().unwrap());
    let done = (0..THREADS).map(|t| (t, last(t)));
    let (t, n) = done.max_by_key(|(_, n)| *n).expect("there are threads");
    bytes[t * AREA + 4096 + (n % SLOTS) as usize * SLOT + 3] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let e = c
        .check(&notes, true)
        .expect_err("a changed byte was not noticed");
    assert!(e.contains("is wrong"), "{e}");
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "worker") {
        worker(Path::new(&args[2]), &args[3], Path::new(&args[4]));
    }
    if args.iter().any(|a| a == "--list") {
        return;
    }
    let number = |name: &str, d: u64| {
        std::env::var(name)
            .ok()
            .and_then(|v| v.parse().ok())
            .unwrap_or(d)
    };
    let kills = number("CRASH_KILLS", 28) as usize;
    let seed = number(
        "CRASH_SEED",
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64,
    );
    println!("seed {seed} (CRASH_SEED repeats the choices, not the timing)");
    let mut rng = Rng::new(seed);
    checker_is_checked(&mut rng);
    let mut counts = std::collections::BTreeMap::new();
    let mut total = 0;
    let mut i = 0;
    let start = Instant::now();
    while total < kills {
        let mode = MODES[i % MODES.len()];
        // The unreplicated mode has one kind of kill only.
        let n = if mode == "unreplicated" { 4 } else { 8 }
            .min(kills - total)
            .max(2);
        for kind in campaign(mode, i, n, &mut rng) {
            *counts.entry((mode, kind)).or_insert(0) += 1;
            total += 1;
        }
        i += 1;
        println!(
            "{total} of {kills} kills, {:.0} s",
            start.elapsed().as_secs_f64()
        );
    }
    for ((mode, kind), n) in counts {
        println!("{mode:14} {kind:34} {n}");
    }
    println!("nothing lost, nothing torn");
    println!("1 passed, 0 failed");
}
