//! A cluster whose every node is in a network namespace of its own.
//!
//! A node is its daemon and, where it holds data, a program under `mojim run`.
//!
//! Owns the processes, the directories and the clients' journals. `tick` does the work of an init
//! system: it starts `mojim run` again when it ended.
//!
//! Killing a node is killing all its processes at once. A node that loses its power loses its
//! shared memory too, and comes back with another boot id. Each node has a boot id of its own.
//! The page cache stays.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mojim_env::{Address, Env};
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::request::Request;
use serde_json::Value;

use crate::history::{History, Sound};
use crate::network::{Network, Slow, address};
use crate::rng::Rng;
use crate::{Process, interface, libraries, mojim, mojim_path, temporary, text};

/// Longer than anything here takes, also on a machine with much else to do.
const STUCK: Duration = Duration::from_secs(90);
/// How long a fault lasts after which the same must still serve: more than two
/// of `failure_limit`.
const LASTING: Duration = Duration::from_millis(2500);
const PORT: u16 = 7400;
/// Microseconds between two entries: while faults happen, and otherwise.
const BUSY: u64 = 400;
const CALM: u64 = 4000;

/// The clients' control words (`client.c`).
struct Control(*mut AtomicU64);

impl Control {
    fn new(path: &Path) -> Control {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap();
        file.set_len(4096).unwrap();
        // SAFETY: a new shared mapping of a file of 4,096 bytes.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(p, libc::MAP_FAILED);
        Control(p.cast())
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < 512);
        // SAFETY: inside the mapping, which lives as long as this.
        unsafe { &*self.0.add(i) }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and no word is borrowed any more.
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}

/// One node.
struct Node {
    name: &'static str,
    daemon: Option<Process>,
    /// `mojim run`, on a node with data.
    run: Option<Process>,
    /// Whether `mojim run` is to be there.
    wanted: bool,
    /// How far its journal was read.
    read: u64,
    /// How often its machine was started.
    boots: u32,
}

/// The nodes that store data come first.
const DATA: usize = 2;

/// The cluster: `a`, `b`, and as many witnesses as are asked for.
pub struct Nodes {
    pub net: Network,
    /// The volume's mode, and the medium of its logs.
    pub kind: (&'static str, &'static str),
    /// What happened, with the time.
    pub story: Vec<String>,
    /// Every choice of a test is drawn from it.
    pub rng: Rng,
    dir: PathBuf,
    memory: PathBuf,
    nodes: Vec<Node>,
    control: Control,
    history: History,
    begin: Instant,
}

const NAMES: [&str; 5] = ["a", "b", "w1", "w2", "w3"];

/// The client, and the libraries that `mojim run` puts before it.
fn client() -> &'static Path {
    static CLIENT: OnceLock<PathBuf> = OnceLock::new();
    CLIENT.get_or_init(|| {
        libraries();
        let to = temporary().join("mojim-client");
        let source = "crates/mojim-testkit/programs/client.c";
        interface::compile(source, &to, &["-O2"], false);
        to
    })
}

/// Said also by a test that passes.
pub fn notice(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn kill(pid: u64, signal: i32) {
    // SAFETY: sends a signal to a process that `pid_of` has just seen to be
    // this cluster's client.
    unsafe { libc::kill(pid as i32, signal) };
}

/// The configuration of `count` nodes, with directories in `dir` and rings in `memory`.
fn configuration(kind: (&str, &str), count: usize, dir: &Path, memory: &Path) -> String {
    let (mode, medium) = kind;
    let mut t = format!(
        "cluster = \"partitions\"\ninsecure_network = true\n\
         heartbeat = \"50ms\"\nfailure_limit = \"1s\"\n\
         [volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nmirror = \"b\"\nresend_timeout = \"50ms\"\n\
         transport = \"tcp\"\nconnections = 2\n"
    );
    for (i, name) in NAMES.iter().take(count).enumerate() {
        let (at, d, m) = (address(i), dir.display(), memory.display());
        t += &format!("[node.{name}]\naddress = \"{at}:{PORT}\"\ndirectory = \"{d}/{name}\"\n");
        t += &if i < DATA {
            fs::create_dir_all(memory.join(name)).unwrap();
            format!("ring = \"{m}/{name}\"\nlog = {{ medium = \"{medium}\", size = \"4MiB\" }}\n")
        } else {
            "role = \"witness\"\n".to_owned()
        };
    }
    t
}

impl Nodes {
    /// All nodes, started; nothing if there can be no networks here.
    pub fn start(witnesses: usize, kind: (&'static str, &'static str), seed: u64) -> Option<Nodes> {
        let (mode, medium) = kind;
        // Built before this thread has a network of its own.
        mojim_path();
        libraries();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let net = match Network::new(DATA + witnesses) {
            Ok(net) => net,
            Err(why) => {
                notice(&format!(
                    "SKIPPED: no network of namespaces can be made here: {why}"
                ));
                return None;
            }
        };
        let name = format!(
            "mojim-nodes-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, SeqCst)
        );
        let dir = temporary().join(&name);
        let memory = Path::new("/dev/shm").join(&name);
        for d in [&dir, &memory] {
            let _ = fs::remove_dir_all(d);
            fs::create_dir_all(d).unwrap();
        }
        let t = configuration(kind, DATA + witnesses, &dir, &memory);
        fs::write(dir.join("mojim.toml"), t).unwrap();
        let control = Control::new(&dir.join("control"));
        control.word(1).store(CALM, SeqCst);
        let mut nodes = Nodes {
            net,
            kind,
            story: vec![format!(
                "{} nodes, {mode}, logs on {medium}, PARTITION_SEED={seed}",
                DATA + witnesses
            )],
            rng: Rng::new(seed),
            nodes: NAMES[..DATA + witnesses]
                .iter()
                .map(|name| Node {
                    name,
                    daemon: None,
                    run: None,
                    wanted: false,
                    read: 0,
                    boots: 0,
                })
                .collect(),
            dir,
            memory,
            control,
            history: History::default(),
            begin: Instant::now(),
        };
        (0..nodes.count()).for_each(|i| nodes.boot(i));
        let mut probe = Command::new("true");
        nodes.put(0, &mut probe);
        if let Err(why) = probe.status() {
            notice(&format!(
                "SKIPPED: a node cannot have a boot id of its own here: {why}"
            ));
            return None;
        }
        for i in 0..nodes.count() {
            nodes.start_node(i);
        }
        nodes.converge();
        Some(nodes)
    }

    /// How many nodes there are.
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// The nodes that store no data.
    pub fn witnesses(&self) -> std::ops::Range<usize> {
        DATA..self.count()
    }

    /// The name of node `i`.
    pub fn name(&self, i: usize) -> &'static str {
        self.nodes[i].name
    }

    /// Says what happens, for whoever reads a failure.
    pub fn say(&mut self, what: impl Into<String>) {
        let at = self.begin.elapsed().as_secs_f64();
        self.story.push(format!("{at:8.3} {}", what.into()));
    }

    fn file(&self) -> String {
        self.dir.join("mojim.toml").to_str().unwrap().to_owned()
    }

    fn errors(&self, what: &str) -> PathBuf {
        self.dir.join(format!("{what}.txt"))
    }

    // ---- processes ---------------------------------------------------------

    /// The machine of node `i` is started: it has another boot id.
    fn boot(&mut self, i: usize) {
        let node = &mut self.nodes[i];
        node.boots += 1;
        let id = format!("{i:08x}-{:04x}-4000-8000-000000000000\n", node.boots);
        fs::write(self.dir.join(format!("{}.boot", node.name)), id).unwrap();
    }

    /// The command will run on the machine of node `i`.
    fn put(&self, i: usize, command: &mut Command) {
        self.net.put(i, command);
        let file = self.dir.join(format!("{}.boot", self.nodes[i].name));
        let from = CString::new(file.into_os_string().into_encoded_bytes()).unwrap();
        let done = |result: i32| match result {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        };
        let private = (libc::MS_REC | libc::MS_PRIVATE, c"none", c"/");
        let bind = (libc::MS_BIND, from, c"/proc/sys/kernel/random/boot_id");
        // SAFETY: three system calls, with what was made before the fork.
        unsafe {
            command.pre_exec(move || {
                done(libc::unshare(libc::CLONE_NEWNS))?;
                let nothing = std::ptr::null();
                let (flags, from, to) = (private.0, private.1.as_ptr(), private.2.as_ptr());
                done(libc::mount(from, to, nothing, flags, nothing.cast()))?;
                let (flags, from, to) = (bind.0, bind.1.as_ptr(), bind.2.as_ptr());
                done(libc::mount(from, to, nothing, flags, nothing.cast()))
            });
        }
    }

    /// Everything on node `i` ends, and what was in its memory is gone.
    pub fn cut_power(&mut self, i: usize) {
        self.kill_node(i);
        let name = self.name(i);
        self.say(format!("{name} has lost its power"));
        if i < DATA {
            let memory = self.memory.join(name);
            fs::remove_dir_all(&memory).unwrap();
            fs::create_dir_all(&memory).unwrap();
        }
        self.boot(i);
    }

    /// Starts the daemon of node `i` and, on a data node, its program.
    pub fn start_node(&mut self, i: usize) {
        self.start_daemon(i);
        self.nodes[i].wanted = i < DATA;
        self.tick();
    }

    /// Starts the daemon of node `i` and waits until it answers.
    pub fn start_daemon(&mut self, i: usize) {
        let name = self.nodes[i].name;
        self.say(format!("daemon {name} starts"));
        let file = self.file();
        let args = ["node", "--config", &file, "--name", name];
        let mut p = Process::start_with(&args, &self.errors(name), |c| self.put(i, c));
        let line = p
            .line()
            .unwrap_or_else(|| panic!("node {name}: {}", p.errors()));
        assert!(line.contains("is ready at"), "{line}");
        self.nodes[i].daemon = Some(p);
    }

    /// What an init system does: `mojim run` is there where it is wanted.
    /// Takes in what the clients wrote, too.
    pub fn tick(&mut self) {
        for i in 0..DATA {
            if let Some(run) = &mut self.nodes[i].run
                && let Some(status) = run.child.try_wait().unwrap()
            {
                let name = self.nodes[i].name;
                self.nodes[i].run = None;
                self.say(format!("mojim run on {name} ended: {status}"));
            }
            if self.nodes[i].wanted && self.nodes[i].run.is_none() {
                let name = self.nodes[i].name;
                let (file, d) = (self.file(), self.dir.display());
                let log = format!("{d}/{name}/v/log");
                let (journal, control) = (format!("{d}/journal-{name}"), format!("{d}/control"));
                let args = [
                    "run",
                    "--config",
                    &file,
                    "--name",
                    name,
                    "--preload",
                    "--",
                    client().to_str().unwrap(),
                    "append",
                    &log,
                    &journal,
                    &control,
                    &i.to_string(),
                ];
                let errors = self.errors(&format!("run-{name}"));
                let run = Process::start_with(&args, &errors, |c| self.put(i, c));
                self.nodes[i].run = Some(run);
            }
        }
        for i in 0..DATA {
            let path = self.dir.join(format!("journal-{}", self.nodes[i].name));
            let Ok(mut f) = File::open(path) else {
                continue;
            };
            let mut bytes = Vec::new();
            f.seek(SeekFrom::Start(self.nodes[i].read)).unwrap();
            f.read_to_end(&mut bytes).unwrap();
            // Up to the last line that has an end.
            let len = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |e| e + 1);
            self.history.read(&text(&bytes[..len]));
            self.nodes[i].read += len as u64;
        }
    }

    /// The program on node `i`, while it runs.
    fn pid_of(&self, i: usize) -> Option<u64> {
        let pid = self.control.word(8 + i).load(SeqCst);
        let exe = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        (pid != 0 && exe == fs::canonicalize(client()).ok()?).then_some(pid)
    }

    /// SIGKILL for the program on node `i` alone.
    pub fn kill_program(&mut self, i: usize) {
        let name = self.name(i);
        self.say(format!("the program on {name} is killed"));
        if let Some(pid) = self.pid_of(i) {
            kill(pid, libc::SIGKILL);
        }
    }

    /// SIGKILL for the daemon of node `i` alone.
    pub fn kill_daemon(&mut self, i: usize) {
        let name = self.name(i);
        self.say(format!("the daemon of {name} is killed"));
        if let Some(mut p) = self.nodes[i].daemon.take() {
            p.kill();
        }
    }

    /// SIGKILL for everything on node `i`.
    pub fn kill_node(&mut self, i: usize) {
        self.kill_daemon(i);
        if i < DATA {
            self.nodes[i].wanted = false;
            // Its parent first, which would have it end in a gentler way.
            let program = self.pid_of(i);
            if let Some(run) = &self.nodes[i].run {
                run.signal("STOP");
            }
            self.kill_program(i);
            if let Some(mut p) = self.nodes[i].run.take() {
                p.kill();
            }
            let begin = Instant::now();
            while program.is_some() && self.pid_of(i) == program {
                assert!(begin.elapsed() < STUCK, "a killed program stays");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// SIGSTOP for everything on node `i`, or SIGCONT.
    pub fn stop_node(&mut self, i: usize, stop: bool) {
        let (name, signal) = (self.name(i), if stop { "STOP" } else { "CONT" });
        self.say(format!("node {name}: SIG{signal}"));
        self.signal_node(i, signal);
    }

    /// SIGSTOP or SIGCONT for everything on node `i`.
    pub fn signal_node(&self, i: usize, signal: &str) {
        let node = &self.nodes[i];
        for p in [&node.daemon, &node.run].into_iter().flatten() {
            p.signal(signal);
        }
        if i < DATA
            && let Some(pid) = self.pid_of(i)
        {
            let stop = signal == "STOP";
            kill(pid, if stop { libc::SIGSTOP } else { libc::SIGCONT });
        }
    }

    /// Has the program on node `p`, the primary, stand still while its mirror `m` is a member.
    /// From then on nobody changes the view for as long as the daemon of `p` lives. (On a busy
    /// machine a primary may give its mirror up between any two steps of a test.)
    pub fn hold(&mut self, p: usize, m: usize) {
        let name = self.name(m);
        for _ in 0..3 {
            self.await_member(m);
            let program = self.await_that("the primary's program", |n| n.pid_of(p));
            kill(program, libc::SIGSTOP);
            let r = self.await_that("the register", |n| {
                n.register(m).filter(|r| r["primary"].is_object())
            });
            if r["mirror"]["node"] == name {
                return;
            }
            kill(program, libc::SIGCONT);
        }
        panic!("{} gave its mirror up again and again", self.name(p));
    }

    /// Nobody of `side` hears anybody else, and the other way round. The nodes with data are
    /// cut off from each other last: each cut takes a while, and whoever does not hear the
    /// other, but still a majority, goes on alone.
    pub fn split(&mut self, side: &[usize]) {
        let others = |&j: &usize| !side.contains(&j);
        let others: Vec<usize> = (0..self.count()).filter(others).collect();
        let pairs = side
            .iter()
            .flat_map(|&i| others.iter().map(move |&j| (i, j)));
        let (last, first): (Vec<_>, Vec<_>) = pairs.partition(|&(i, j)| i < DATA && j < DATA);
        for (i, j) in first.into_iter().chain(last) {
            self.net.cut(i, j);
        }
    }

    /// The network becomes slow; false, and a notice, where that cannot be.
    pub fn slow(&mut self, how: Slow) -> bool {
        self.say(format!("{how:?}"));
        match self.net.slow(how, self.rng.next()) {
            Ok(()) => true,
            Err(why) => {
                notice(&format!("SKIPPED: links cannot be made slow here: {why}"));
                self.say(why);
                false
            }
        }
    }

    /// Whether the daemon of node `i` was started and not killed.
    pub fn is_up(&self, i: usize) -> bool {
        self.nodes[i].daemon.is_some()
    }

    // ---- waiting -----------------------------------------------------------

    /// Ticks until `f` gives something.
    pub fn await_that<T>(&mut self, what: &str, mut f: impl FnMut(&mut Nodes) -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            self.tick();
            if let Some(x) = f(self) {
                return x;
            }
            assert!(begin.elapsed() < STUCK, "{what} did not happen");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The clients hurry while the fault begins.
    pub fn busy(&mut self) {
        self.control.word(1).store(BUSY, SeqCst);
        self.await_more("some entries", 50, Duration::ZERO, None);
    }

    /// Lets the fault last. This is its length, and no wait for anything.
    pub fn last(&mut self, how_long: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < how_long {
            self.tick();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until `more` entries that were begun `later` than this call, or
    /// later still, were acknowledged, on node `by` if one is named.
    fn await_more(&mut self, what: &str, more: usize, later: Duration, by: Option<usize>) {
        let since = now() + later.as_nanos() as u64;
        self.await_that(what, |n| n.has_acked(more, since, by).then_some(()));
    }

    /// Whether `more` entries that were begun since then were acknowledged, on node `by` if
    /// one is named.
    fn has_acked(&self, more: usize, since: u64, by: Option<usize>) -> bool {
        let acks = self.history.acks.iter().rev();
        let new = acks.filter(|a| a.before >= since && by.is_none_or(|b| a.writer % 8 == b as u64));
        new.take(more).count() == more
    }

    /// Entries are acknowledged again, on node `by` if one is named, and still
    /// are when the fault has lasted for several limits.
    pub fn await_service(&mut self, by: Option<usize>) {
        self.await_answer(by);
        let who = by.map_or("anyone", |b| self.name(b));
        self.await_more(&format!("lasting service by {who}"), 20, LASTING, by);
    }

    /// Entries are acknowledged again, on node `by` if one is named.
    pub fn await_answer(&mut self, by: Option<usize>) {
        self.control.word(1).store(CALM, SeqCst);
        let who = by.map_or("anyone", |b| self.name(b));
        let begin = Instant::now();
        self.await_more(&format!("service by {who}"), 20, Duration::ZERO, by);
        let took = begin.elapsed().as_secs_f64();
        self.say(format!("served by {who} after {took:.3} s"));
    }

    /// Kills node `p`, the primary, and waits until its mirror `m`, a member, serves in its
    /// place. A primary may give its mirror up between the last look at the register and its
    /// own end: then nobody but itself may go on. It is started again, and killed again once
    /// the mirror is a member, but not for ever.
    pub fn succeed(&mut self, p: usize, m: usize) {
        for _ in 0..3 {
            self.await_member(m);
            if self.serves_instead(p, m) {
                return;
            }
            self.start_node(p);
            self.await_answer(Some(p));
        }
        panic!("{} gave its mirror up again and again", self.name(p));
    }

    /// Kills node `p`; whether `m` serves then, or `p` had given it up.
    fn serves_instead(&mut self, p: usize, m: usize) -> bool {
        self.kill_node(p);
        self.control.word(1).store(CALM, SeqCst);
        let (since, begin) = (now(), Instant::now());
        let (mut looked, mut looks) = (begin, 0);
        let what = format!("service by {} in place of {}", self.name(m), self.name(p));
        let serves = self.await_that(&what, |n| {
            if n.has_acked(20, since, Some(m)) {
                return Some(true);
            }
            // The first view that can be read after its end is the one that it left.
            if looks > 0 || looked.elapsed() < Duration::from_secs(1) {
                return None;
            }
            looked = Instant::now();
            let r = n.register(m)?;
            looks += 1;
            let is_alone = r["primary"]["node"] == n.name(p) && r["mirror"].is_null();
            is_alone.then_some(false)
        });
        let (m, took) = (self.name(m), begin.elapsed().as_secs_f64());
        self.say(match serves {
            true => format!("served by {m} after {took:.3} s"),
            false => format!("{m} had been given up"),
        });
        serves
    }

    /// While the fault lasts for several limits, nothing that was begun after
    /// this call is acknowledged.
    pub fn assert_no_service(&mut self) {
        // What was on its way to the journal.
        self.last(Duration::from_millis(20));
        let since = now();
        self.last(LASTING);
        self.tick();
        let ack = self.history.acks.iter().find(|a| a.before >= since);
        assert!(ack.is_none(), "served by a minority: {ack:?}");
        self.say("nobody serves");
    }

    /// The register of views, as the node says it.
    fn register(&self, i: usize) -> Option<Value> {
        let to = Address::Tcp(format!("{}:{PORT}", address(i)).parse().unwrap());
        let volume = "v".to_owned();
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let mut c = Client::connect(&env, &to, "partitions", Duration::from_secs(3)).ok()?;
        c.ask(&Request::ViewRead { volume }).ok()
    }

    /// The primary by the register, as a node with data says it.
    pub fn primary(&mut self) -> usize {
        self.await_that("a primary", |n| {
            let up = (0..DATA).find(|&i| n.is_up(i))?;
            let r = n.register(up)?;
            let name = r["primary"]["node"].as_str()?;
            n.nodes.iter().position(|n| n.name == name)
        })
    }

    /// The primary and its mirror by the register, as a node with data says it.
    pub fn pair(&mut self) -> (usize, usize) {
        self.await_that("a primary with its mirror", |n| {
            let up = (0..DATA).find(|&i| n.is_up(i))?;
            let r = n.register(up)?;
            let at = |who: &str| {
                let name = r[who]["node"].as_str();
                n.nodes.iter().position(|n| Some(n.name) == name)
            };
            Some((at("primary")?, at("mirror")?))
        })
    }

    /// Heals the network, starts what is not there, and waits until there is
    /// one primary with its program, its mirror is a member, and the copies
    /// are equal; then the history is checked, with the copies themselves.
    pub fn converge(&mut self) -> Sound {
        let begin = Instant::now();
        self.control.word(1).store(CALM, SeqCst);
        self.net.heal().unwrap();
        self.say("the network is whole");
        for i in 0..self.count() {
            if !self.is_up(i) {
                self.start_daemon(i);
            }
            self.nodes[i].wanted = i < DATA;
        }
        // Said twice, and in between the program that is there now served.
        loop {
            self.await_that("one primary with its mirror", |n| {
                n.is_whole().then_some(())
            });
            self.await_more("service by the primary", 5, Duration::ZERO, None);
            if self.is_whole() {
                break;
            }
        }
        // `mojim verify` compares copies that no program is using.
        self.control.word(0).store(1, SeqCst);
        let ended = self.primary();
        self.nodes[ended].wanted = false;
        self.await_that("the program's end", |n| {
            let live = (0..DATA).any(|i| n.pid_of(i).is_some());
            (!live && n.nodes[ended].run.is_none()).then_some(())
        });
        let out = mojim(&["verify", "--config", &self.file(), "--wait", "60"]);
        let said = text(&out.stdout) + &text(&out.stderr);
        assert_eq!(out.status.code(), Some(0), "{said}");
        for i in 0..DATA {
            let log = self.dir.join(self.nodes[i].name).join("v/log");
            let out = Command::new(client())
                .arg("read")
                .arg(log)
                .output()
                .unwrap();
            self.history.read(&text(&out.stdout));
            assert!(out.status.success() || !self.history.torn.is_empty());
        }
        let took = begin.elapsed().as_secs_f64();
        let sound = self.check();
        self.say(format!("whole again after {took:.3} s: {sound:?}"));
        self.control.word(0).store(0, SeqCst);
        self.nodes[ended].wanted = true;
        self.await_answer(None);
        sound
    }

    /// Node `m` is a member of the view as mirror again.
    pub fn await_member(&mut self, m: usize) {
        let name = self.name(m);
        self.await_that("the mirror's return", |n| {
            let r = n.register(m)?;
            (r["mirror"]["node"] == name).then_some(())
        });
        self.say(format!("{name} is a member again"));
    }

    /// Whether there is one primary, with its program, and its mirror is a
    /// member of the view and holds everything.
    pub fn is_whole(&mut self) -> bool {
        let out = mojim(&["status", "--config", &self.file(), "--json"]);
        let Ok(v) = serde_json::from_slice::<Value>(&out.stdout) else {
            return false;
        };
        let nodes = &v["volumes"][0]["nodes"];
        let register = &nodes[0]["register"];
        v["ok"] == true
            && register["primary"].is_object()
            && register["mirror"].is_object()
            && (0..DATA).any(|i| nodes[i]["attached"] == true)
            && (0..DATA).filter(|&i| self.pid_of(i).is_some()).count() == 1
    }

    /// Whether one log explains what the clients saw until now; the copies
    /// were read just before.
    fn check(&mut self) -> Sound {
        self.tick();
        match self.history.check() {
            Ok(s) => s,
            Err(w) => panic!("{w}"),
        }
    }

    fn logs(&self) -> String {
        let mut names: Vec<String> = self.nodes.iter().map(|n| n.name.to_owned()).collect();
        names.extend(["run-a".to_owned(), "run-b".to_owned()]);
        names
            .iter()
            .map(|n| {
                let t = fs::read_to_string(self.errors(n)).unwrap_or_default();
                format!("\n--- {n}\n{t}")
            })
            .collect()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}\n{}", self.story.join("\n"), self.logs());
            let status = mojim(&["status", "--config", &self.file()]);
            eprintln!("{}", text(&status.stdout));
            for i in 0..self.count() {
                let view = self.register(i).unwrap_or_default();
                eprintln!("the register by {}: {view}", self.name(i));
            }
        }
        for i in 0..self.count() {
            self.kill_node(i);
        }
        let _ = fs::remove_dir_all(&self.dir);
        let _ = fs::remove_dir_all(&self.memory);
    }
}
