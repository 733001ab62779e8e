//! Several processes of one node on one volume: they see each other's stores, any of them calls
//! sync points, and one that dies takes nothing along that was acknowledged, and nobody else.
//!
//! The other processes are this test binary again, as [`peer`], told by lines what to do.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use mojim_config::Config;
use mojim_env::rng::Rng;
use mojim_node::Node;
use tracing_subscriber::fmt::TestWriter;

mod support;
use support::free_ports;

use mojim_engine::{
    Joined, MapFlags, Mapping, Volume, expect_forks, finish_all, gmsync, join, msync, msync_async,
    rollback, unmap,
};

const PAGE: usize = 4096;
const PAGES: usize = 64;
const LEN: usize = PAGES * PAGE;
const DIRECTORY: &str = "MOJIM_TEST_DIRECTORY";

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let d = std::env::temp_dir().join(format!("mojim-sharing-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&d);
        std::fs::create_dir_all(&d).unwrap();
        let dir = Dir(d);
        dir.configure("mode = \"unreplicated\"", "");
        dir
    }

    fn configure(&self, volume: &str, nodes: &str) {
        let text = format!(
            r#"
cluster = "test"
[volume.v]
{volume}
primary = "a"
[node.a]
address = "127.0.0.1:1"
directory = "{0}/a"
ring = "{0}"
log = {{ medium = "disk", size = "1MiB" }}
{nodes}
"#,
            self.0.display()
        );
        std::fs::write(self.0.join("mojim.toml"), text).unwrap();
    }

    /// With a mirror, whose daemon runs in this process, and which may stand still for five
    /// times `timeout`.
    fn mirrored(&self, mode: &str, timeout: &str) -> Arc<Node> {
        let [at] = free_ports();
        self.configure(
            &format!("mode = \"{mode}\"\nmirror = \"b\"\nresend_timeout = \"{timeout}\""),
            &format!(
                r#"
[node.b]
address = "{at}"
directory = "{0}/b"
ring = "{0}"
log = {{ medium = "disk", size = "1MiB" }}
"#,
                self.0.display()
            ),
        );
        // Its lines are shown where the test fails.
        let _ = tracing_subscriber::fmt()
            .with_writer(TestWriter::with_stderr)
            .try_init();
        Node::start(&config(&self.0), "b", None).unwrap()
    }

    /// The file's byte, once the owner says that what is committed is there.
    fn settled(&self, owner: &mut Peer, page: usize) -> u8 {
        owner.ask("settle");
        self.byte(page)
    }

    fn byte(&self, page: usize) -> u8 {
        std::fs::read(self.0.join("a/v/f")).unwrap()[page * PAGE]
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What the owner and its guests go by, written down for them.
fn config(dir: &Path) -> Config {
    Config::load(&dir.join("mojim.toml")).unwrap()
}

fn flags() -> MapFlags {
    MapFlags {
        create: true,
        shared: true,
        ..MapFlags::default()
    }
}

fn map(v: &Joined, flags: MapFlags) -> mojim_engine::Result<Mapping> {
    match v {
        Joined::Owner(v) => v.map("f", LEN, flags),
        Joined::Guest(g) => g.map("f", LEN, flags),
    }
}

fn store(m: Mapping, page: usize, byte: u8) {
    // SAFETY: inside the mapping; the other processes have other pages, or wait.
    unsafe { m.ptr.add(page * PAGE).write_volatile(byte) };
}

fn load(m: Mapping, page: usize) -> u8 {
    // SAFETY: inside the mapping.
    unsafe { m.ptr.add(page * PAGE).read_volatile() }
}

fn owner(dir: &Dir) -> Volume {
    match join(&config(&dir.0), "a", None).unwrap() {
        Joined::Owner(v) => v,
        Joined::Guest(_) => panic!("another owner"),
    }
}

/// An attach that failed at its end left its threads behind, and the lock with them: every
/// later one in that process found the volume in use, by itself.
#[test]
fn an_attach_that_cannot_be_shared_leaves_nothing_behind() {
    let dir = Dir::new("unshared");
    // A name that is there and is no socket.
    let config = || config(&dir.0);
    let socket = mojim_replica::layout::share_socket(config().node("a").unwrap(), "v");
    std::fs::create_dir_all(&socket).unwrap();
    for _ in 0..2 {
        let e = join(&config(), "a", None).map(|_| ()).unwrap_err();
        assert!(!matches!(e, mojim_engine::Error::Busy(_)), "{e}");
    }
    std::fs::remove_dir_all(&socket).unwrap();
    owner(&dir).detach().unwrap();
}

/// Another process.
struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    fn start(dir: &Dir) -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer", "--ignored", "--nocapture"])
            .env(DIRECTORY, &dir.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        Peer { child, to, from }
    }

    /// One that shares the volume, and has the file mapped.
    fn guest(dir: &Dir) -> Peer {
        Peer::guest_with(dir, "map")
    }

    /// `map`: how it maps the file.
    fn guest_with(dir: &Dir, map: &str) -> Peer {
        let mut p = Peer::start(dir);
        assert_eq!(p.ask("join"), "guest");
        p.ask(map);
        p
    }

    fn ask(&mut self, what: &str) -> String {
        self.tell(what);
        self.answer()
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.to, "{what}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let n = self.from.read_line(&mut line).unwrap();
            assert!(n > 0, "the peer has ended");
            // The test harness says things too.
            if let Some((_, answer)) = line.split_once('@') {
                return answer.trim().to_owned();
            }
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Forks; the child runs `f` and ends with what it gives.
fn fork(f: impl FnOnce() -> i32) -> libc::pid_t {
    // SAFETY: the child ends by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(99);
        // SAFETY: ends the child.
        unsafe { libc::_exit(status) };
    }
    pid
}

/// Descriptors of a child, and of a child of a child and so on: that of the last generation.
fn descriptors(generations: u32) -> i32 {
    wait_for(fork(move || match generations {
        1 => std::fs::read_dir("/proc/self/fd").unwrap().count() as i32,
        more => descriptors(more - 1),
    }))
}

fn wait_for(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    libc::WEXITSTATUS(status)
}

/// 0 where a sync point of the mapping was made.
fn synced(m: Mapping) -> i32 {
    match msync(m.ptr, m.len) {
        Ok(lsn) if lsn > 0 => 0,
        Ok(_) => 1,
        Err(e) => e.errno(),
    }
}

#[test]
#[ignore = "not a test: another process of one"]
fn peer() {
    let Some(dir) = std::env::var_os(DIRECTORY) else {
        return;
    };
    let config = config(Path::new(&dir));
    let mut volume = None;
    let mut m = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<usize>().unwrap();
        let answer = match words[0] {
            "join" => {
                let joined = join(&config, "a", None).unwrap();
                let answer = match &joined {
                    Joined::Owner(_) => "owner",
                    Joined::Guest(_) => "guest",
                };
                volume = Some(joined);
                answer.to_owned()
            }
            "map" => {
                m = Some(map(volume.as_ref().unwrap(), flags()).unwrap());
                String::new()
            }
            "map-to-read" => {
                let flags = MapFlags {
                    read_only: true,
                    ..flags()
                };
                m = Some(map(volume.as_ref().unwrap(), flags).unwrap());
                String::new()
            }
            "msync-fails" => {
                let m = m.unwrap();
                msync(m.ptr, m.len).is_err().to_string()
            }
            "gmsync-fails" => {
                let at = m.unwrap().ptr.cast_const();
                let halves = [(at, PAGE), (at.wrapping_add(PAGE), PAGE)];
                gmsync(&halves).is_err().to_string()
            }
            "store" => {
                store(m.unwrap(), number(1), number(2) as u8);
                String::new()
            }
            "load" => load(m.unwrap(), number(1)).to_string(),
            "msync" => synced(m.unwrap()).to_string(),
            "exact" => {
                let m = m.unwrap();
                let at = m.ptr.wrapping_add(number(1) * PAGE);
                msync(at, 8).unwrap().to_string()
            }
            "unmap" => {
                let m = m.take().unwrap();
                unmap(m.ptr, m.len).unwrap();
                String::new()
            }
            // In a process of its own: elsewhere another test's region may take the place.
            "unmap-msync" => {
                let m = m.take().unwrap();
                unmap(m.ptr, m.len).unwrap();
                msync(m.ptr, 8).is_err().to_string()
            }
            // An answer with a descriptor, for which there is no room.
            "no-room" => {
                // SAFETY: the process's own limit, given back at once.
                unsafe {
                    let mut before: libc::rlimit = std::mem::zeroed();
                    libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before);
                    let few = libc::rlimit {
                        rlim_cur: 3,
                        ..before
                    };
                    assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few), 0);
                    let failed = map(volume.as_ref().unwrap(), flags()).unwrap_err();
                    libc::setrlimit(libc::RLIMIT_NOFILE, &raw const before);
                    failed.errno().to_string()
                }
            }
            // A child stores; then it commits, or dies as it is.
            "fork" => {
                let (m, sync) = (m.unwrap(), words[3] == "sync");
                let (page, byte) = (number(1), number(2) as u8);
                let pid = fork(move || {
                    store(m, page, byte);
                    if sync { synced(m) } else { 0 }
                });
                wait_for(pid).to_string()
            }
            // A child attaches, and its parent after it.
            "fork-first" => {
                expect_forks();
                let child = fork(|| {
                    let v = join(&config, "a", None).unwrap();
                    i32::from(synced(map(&v, flags()).unwrap()) > 1)
                });
                wait_for(child).to_string()
            }
            // A child of a process that has detached attaches, and so does a child of its own.
            "fork-last" => {
                let attach = || match join(&config, "a", None) {
                    Ok(v) => {
                        let synced = synced(map(&v, flags()).unwrap());
                        match v {
                            Joined::Owner(v) => v.detach().unwrap(),
                            Joined::Guest(g) => g.detach().unwrap(),
                        }
                        i32::from(synced > 1)
                    }
                    Err(e) => e.errno(),
                };
                let child = fork(|| match attach() {
                    0 => wait_for(fork(attach)),
                    e => e,
                });
                wait_for(child).to_string()
            }
            "descriptors" => format!("{} {}", descriptors(1), descriptors(4)),
            "settle" => {
                match volume.as_ref().unwrap() {
                    Joined::Owner(v) => v.settle().unwrap(),
                    Joined::Guest(g) => g.settle().unwrap(),
                }
                String::new()
            }
            "finish" => match finish_all() {
                Ok(()) => String::new(),
                Err(e) => e.to_string(),
            },
            // Stores and commits for as long as it lives: a byte in a page, then the next.
            "run" => {
                let m = m.unwrap();
                for round in 1u64.. {
                    let page = number(1) + round as usize % number(2);
                    store(m, page, round as u8);
                    msync(m.ptr, m.len).unwrap();
                    println!("@{page} {}", round as u8);
                }
                String::new()
            }
            "detach" => match volume.as_ref().unwrap() {
                Joined::Owner(v) => v
                    .detach()
                    .map_or_else(|e| e.to_string(), |()| String::new()),
                Joined::Guest(g) => g
                    .detach()
                    .map_or_else(|e| e.to_string(), |()| String::new()),
            },
            // A copy of this process that no handler knows of, and which keeps all descriptors.
            "copy" => {
                // SAFETY: as vfork(2) without its sharing; the copy only waits, for a while.
                unsafe {
                    let pid = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
                    if pid == 0 {
                        libc::alarm(180);
                        loop {
                            libc::pause();
                        }
                    }
                    pid.to_string()
                }
            }
            // As daemon(3): the parent is gone before the child does anything.
            "daemon" => {
                let m = m.unwrap();
                // SAFETY: both end by `_exit`.
                unsafe {
                    let parent = libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0);
                    assert!(parent >= 0);
                    if libc::fork() != 0 {
                        libc::_exit(0);
                    }
                    // All of it: what its threads had begun to commit is in doubt.
                    let mut gone = libc::pollfd {
                        fd: parent as libc::c_int,
                        events: libc::POLLIN,
                        revents: 0,
                    };
                    while libc::poll(&mut gone, 1, -1) != 1 {}
                    store(m, 5, 50);
                    let (synced, loaded) = (synced(m), load(m, 5));
                    let unmapped = unmap(m.ptr, m.len).is_ok();
                    println!("@{synced} {loaded} {unmapped}");
                    libc::_exit(0);
                }
            }
            other => panic!("{other}"),
        };
        println!("@{answer}");
    }
}

#[test]
fn processes_see_each_others_stores_and_any_commits_them() {
    let dir = Dir::new("commits");
    let v = owner(&dir);
    let m = v.map("f", LEN, flags()).unwrap();
    let mut p = Peer::guest(&dir);
    let mut q = Peer::guest(&dir);
    store(m, 1, 10);
    p.ask("store 2 20");
    q.ask("store 3 30");
    assert_eq!((load(m, 2), load(m, 3)), (20, 30));
    assert_eq!(p.ask("load 1") + " " + &q.ask("load 2"), "10 20");
    // Each commits what the others have stored.
    assert_eq!(synced(m), 0);
    v.settle().unwrap();
    assert_eq!([1, 2, 3].map(|page| dir.byte(page)), [10, 20, 30]);
    assert_eq!(synced(m), 1, "nothing is left");
    assert_eq!(p.ask("msync"), "1");
    store(m, 1, 11);
    q.ask("store 1 12");
    q.ask("store 40 13");
    assert_eq!(p.ask("msync"), "0");
    v.settle().unwrap();
    assert_eq!([1, 40].map(|page| dir.byte(page)), [12, 13]);
    // Exact ranges, and mappings that go.
    q.ask("store 5 50");
    assert_ne!(q.ask("exact 5"), "0");
    p.ask("store 6 60");
    p.ask("unmap");
    v.settle().unwrap();
    assert_eq!([5, 6].map(|page| dir.byte(page)), [50, 60]);
    p.ask("map");
    assert_eq!(p.ask("load 6"), "60");
    v.detach().unwrap();
}

#[test]
fn what_a_process_stored_before_it_was_killed_is_committed_by_the_others() {
    // The page tables of the dead are empty: the next sync point found nothing.
    let dir = Dir::new("killed");
    let v = owner(&dir);
    let m = v.map("f", LEN, flags()).unwrap();
    let mut p = Peer::guest(&dir);
    p.ask("store 7 70");
    p.ask("msync");
    p.ask("store 8 80");
    p.kill();
    assert_eq!(synced(m), 0);
    v.settle().unwrap();
    assert_eq!([7, 8].map(|page| dir.byte(page)), [70, 80]);
    // Another takes its place.
    let mut q = Peer::guest(&dir);
    assert_eq!(q.ask("load 8"), "80");
    q.ask("store 8 81");
    assert_eq!(q.ask("msync"), "0");
    v.settle().unwrap();
    assert_eq!(dir.byte(8), 81);
    v.detach().unwrap();
}

#[test]
fn processes_that_commit_at_once_and_are_killed_lose_nothing_acknowledged() {
    at_once_and_killed(&Dir::new("at-once"));
}

#[test]
fn so_it_is_with_a_mirror() {
    let dir = Dir::new("mirror");
    let b = dir.mirrored("sync", "2s");
    at_once_and_killed(&dir);
    b.stop();
    let file = |node: &str| std::fs::read(dir.0.join(node).join("v/f")).unwrap();
    assert!(file("a") == file("b"));
}

/// A guest that had nothing to commit itself was told at once that all is committed, by msync
/// and at its end, while what another process had begun was in doubt (by reading); gmsync of
/// two ranges that are only read told it so for longer (by reading, too).
#[test]
fn a_guest_with_nothing_to_commit_waits_for_what_was_begun() {
    let dir = Dir::new("begun");
    let b = dir.mirrored("sync", "700ms");
    let v = owner(&dir);
    let m = v.map("f", LEN, flags()).unwrap();
    let mut guest = Peer::guest_with(&dir, "map-to-read");
    assert_eq!(guest.ask("msync-fails"), "false");
    assert_eq!(guest.ask("gmsync-fails"), "false");
    b.stop();
    store(m, 0, 7);
    msync_async(m.ptr, m.len).unwrap();
    assert_eq!(guest.ask("msync-fails"), "true");
    assert_eq!(guest.ask("gmsync-fails"), "true");
    assert_ne!(guest.ask("detach"), "");
    drop(guest);
    assert!(v.detach().is_err());
}

fn at_once_and_killed(dir: &Dir) {
    let v = owner(dir);
    let m = v.map("f", LEN, flags()).unwrap();
    let mut acknowledged = [0u8; PAGES];
    for round in 0..6 {
        let mut peers = [Peer::guest(dir), Peer::guest(dir)];
        peers[0].tell("run 0 20");
        peers[1].tell("run 30 20");
        let mut mine = 0;
        for _ in 0..10 + round {
            for p in &mut peers {
                let answer = p.answer();
                let (page, byte) = answer.split_once(' ').unwrap();
                acknowledged[page.parse::<usize>().unwrap()] = byte.parse().unwrap();
            }
            mine += 1;
            store(m, 60, mine);
            msync(m.ptr, m.len).unwrap();
            acknowledged[60] = mine;
        }
        // In the middle of whatever they do.
        for mut p in peers {
            p.child.kill().unwrap();
            p.child.wait().unwrap();
            let mut rest = String::new();
            while p.from.read_line(&mut rest).unwrap() > 0 {
                if let Some((_, answer)) = rest.trim().split_once('@')
                    && let Some((page, byte)) = answer.split_once(' ')
                    && let (Ok(page), Ok(byte)) = (page.parse::<usize>(), byte.parse())
                    && rest.ends_with('\n')
                {
                    acknowledged[page] = byte;
                }
                rest.clear();
            }
        }
        v.settle().unwrap();
        let file = std::fs::read(dir.0.join("a/v/f")).unwrap();
        for (page, byte) in acknowledged.iter().enumerate() {
            // One more may have been committed than was said.
            let is = file[page * PAGE];
            assert!(is == *byte || is == load(m, page), "{page}: {is}, {byte}");
        }
        msync(m.ptr, m.len).unwrap();
        v.settle().unwrap();
        let file = std::fs::read(dir.0.join("a/v/f")).unwrap();
        // SAFETY: all of the mapping; nobody else has it now.
        let memory = unsafe { std::slice::from_raw_parts(m.ptr.cast_const(), LEN) };
        assert!(file == memory);
    }
    v.detach().unwrap();
}

#[test]
fn a_forked_child_stores_into_the_same_memory() {
    let dir = Dir::new("forked");
    // The owner's children, in a process that has nothing else to do.
    let mut p = Peer::start(&dir);
    assert_eq!(p.ask("join"), "owner");
    p.ask("map");
    assert_eq!(p.ask("fork 1 10 sync"), "0");
    assert_eq!(p.ask("load 1"), "10");
    assert_eq!(dir.settled(&mut p, 1), 10);
    // A child that dies leaves its stores to the parent.
    assert_eq!(p.ask("fork 2 20 die"), "0");
    assert_eq!(p.ask("msync"), "0");
    assert_eq!(dir.settled(&mut p, 2), 20);
    // A guest's children are guests of the same owner.
    let mut g = Peer::guest(&dir);
    assert_eq!(g.ask("fork 3 30 sync"), "0");
    assert_eq!(g.ask("fork 4 40 die"), "0");
    assert_eq!(p.ask("msync"), "0");
    assert_eq!(dir.settled(&mut p, 3), 30);
    assert_eq!(dir.settled(&mut p, 4), 40);
}

/// Each generation of forked children kept the descriptors of all before it, until there were no
/// more to be had.
#[test]
fn children_of_children_have_no_more_descriptors_than_children() {
    let dir = Dir::new("generations");
    let v = owner(&dir);
    let mut p = Peer::guest(&dir);
    let answer = p.ask("descriptors");
    let (first, fourth) = answer.split_once(' ').unwrap();
    assert_eq!(first, fourth);
    drop(p);
    v.detach().unwrap();
}

/// Only who was forked from a process that had attached is refused, however early it is known that
/// there will be forks.
#[test]
fn a_child_that_was_forked_before_attaches() {
    let dir = Dir::new("forked-first");
    let mut p = Peer::start(&dir);
    assert_eq!(p.ask("fork-first"), "0");
    assert_eq!(p.ask("join"), "owner");
    p.ask("map");
    assert_eq!(p.ask("fork 1 10 sync"), "0");
}

/// A process had attached and detached: no child of it could ever attach (EOPNOTSUPP), and servers that
/// look at the volume first and fork their workers then had none that worked.
#[test]
fn a_child_of_a_process_that_has_detached_attaches() {
    let dir = Dir::new("forked-last");
    let mut p = Peer::start(&dir);
    for _ in 0..2 {
        assert_eq!(p.ask("join"), "owner");
        p.ask("map");
        assert_eq!(p.ask("store 1 10"), "");
        assert_eq!(p.ask("detach"), "");
        assert_eq!(p.ask("fork-last"), "0");
    }
    // Of one that was a guest, too.
    let mut o = Peer::start(&dir);
    assert_eq!(o.ask("join"), "owner");
    assert_eq!(p.ask("join"), "guest");
    p.ask("map");
    assert_eq!(p.ask("detach"), "");
    assert_eq!(p.ask("fork-last"), "0");
}

#[test]
fn of_those_who_come_at_once_one_owns_the_volume() {
    let dir = Dir::new("at-the-start");
    let mut all: Vec<Peer> = (0..4).map(|_| Peer::start(&dir)).collect();
    all.iter_mut().for_each(|p| p.tell("join"));
    let mut answers: Vec<String> = all.iter_mut().map(Peer::answer).collect();
    answers.sort();
    assert_eq!(answers, ["guest", "guest", "guest", "owner"]);
    for (i, p) in all.iter_mut().enumerate() {
        p.ask("map");
        p.ask(&format!("store {i} {}", i + 1));
    }
    assert_eq!(all[3].ask("msync"), "0");
    all[0].ask("settle");
    assert_eq!([0, 1, 2, 3].map(|page| dir.byte(page)), [1, 2, 3, 4]);
}

#[test]
fn what_a_guest_was_told_is_committed_survives_the_owners_death() {
    let dir = Dir::new("owner-killed");
    let mut o = Peer::start(&dir);
    assert_eq!(o.ask("join"), "owner");
    let mut p = Peer::guest(&dir);
    let mut q = Peer::guest(&dir);
    p.ask("store 1 10");
    assert_eq!(q.ask("msync"), "0");
    p.ask("store 2 20");
    o.kill();
    p.ask("store 3 30");
    assert_eq!(q.ask("load 3"), "30", "the memory stays");
    assert_eq!(q.ask("msync"), libc::ESTALE.to_string());
    let mut r = Peer::start(&dir);
    assert_eq!(r.ask("join"), "owner");
    r.ask("map");
    let bytes = [1, 2, 3].map(|page| r.ask(&format!("load {page}")));
    assert_eq!(bytes, ["10", "0", "0"]);
    // Those of before are not guests of the new owner, until they come again.
    assert_eq!(p.ask("msync"), libc::ESTALE.to_string());
    assert_eq!(p.ask("detach"), "");
    assert_eq!(p.ask("join"), "guest");
    p.ask("map");
    assert_eq!(p.ask("load 1"), "10");
    p.ask("store 4 40");
    assert_eq!(r.ask("msync"), "0");
    r.ask("settle");
    assert_eq!(dir.byte(4), 40);
}

/// A guest waited for ever where a child of the owner had the owner's end of its line: one that
/// was forked at the moment when the line began.
#[test]
fn whoever_has_its_line_a_guest_is_told_of_the_owners_death() {
    let dir = Dir::new("line-kept");
    let mut o = Peer::start(&dir);
    assert_eq!(o.ask("join"), "owner");
    let mut p = Peer::guest(&dir);
    let copy: libc::pid_t = o.ask("copy").parse().unwrap();
    assert_eq!(p.ask("exact 1").parse::<u64>().map(|lsn| lsn > 0), Ok(true));
    o.kill();
    let told = p.ask("detach");
    // Not by the copy's end.
    let copys = std::fs::read_to_string(format!("/proc/{copy}/stat")).unwrap_or_default();
    // SAFETY: the copy, if it is there.
    unsafe { libc::kill(copy, libc::SIGKILL) };
    // Alive, whether it has run yet or not.
    let state = copys.rsplit(") ").next().and_then(|s| s.chars().next());
    assert!(matches!(state, Some('R' | 'S' | 'D')), "{copys:?}");
    assert!(told.contains("has ended"), "{told}");
    // It was told, and lets go.
    assert_eq!(p.ask("detach"), "");
}

/// A guest that lost its line unmapped without telling the owner, to which the pages that were gone
/// looked as if nobody had stored to them: the others' sync points left those stores out.
#[test]
fn what_a_guest_stored_that_lost_its_line_is_committed_by_the_others() {
    let dir = Dir::new("line-lost");
    let v = owner(&dir);
    let m = v.map("f", LEN, flags()).unwrap();
    let mut p = Peer::guest(&dir);
    assert_eq!(p.ask("no-room"), libc::EPROTO.to_string());
    p.ask("store 7 70");
    assert_eq!(p.ask("msync"), libc::ESTALE.to_string());
    p.ask("unmap");
    assert_eq!(synced(m), 0);
    v.settle().unwrap();
    assert_eq!(dir.byte(7), 70);
    // It comes again.
    assert_eq!(p.ask("detach"), "");
    assert_eq!(p.ask("join"), "guest");
    p.ask("map");
    p.ask("store 8 80");
    assert_eq!(p.ask("msync"), "0");
    v.settle().unwrap();
    assert_eq!(dir.byte(8), 80);
    drop(p);
    v.detach().unwrap();
}

/// A program that attached, and then blocked a signal to wait for it, died by it: it reached one of
/// the threads that answer guests, which did not block it.
#[test]
fn threads_that_answer_guests_take_no_signal_of_the_programs() {
    let dir = Dir::new("signals");
    let v = owner(&dir);
    let p = Peer::guest(&dir);
    let mut found = [0; 2];
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        // Threads of other tests come and go.
        let status = std::fs::read_to_string(task.unwrap().path().join("status"));
        let status = status.unwrap_or_default();
        let field = |name| status.lines().find_map(|l| l.strip_prefix(name));
        let name = field("Name:\t").unwrap_or_default();
        // Of one that has just ended nothing is told but the name.
        if field("Threads:\t") == Some("0") {
            continue;
        }
        let Some(i) = ["mojim-share", "mojim-guest"]
            .iter()
            .position(|n| *n == name)
        else {
            continue;
        };
        let blocked = u64::from_str_radix(field("SigBlk:\t").unwrap(), 16).unwrap();
        let is_blocked = |signal: i32| blocked & 1 << (signal - 1) != 0;
        assert!(is_blocked(libc::SIGTERM) && is_blocked(libc::SIGCHLD));
        assert!(!is_blocked(libc::SIGSEGV), "{name}");
        found[i] += 1;
    }
    assert!(found.iter().all(|n| *n > 0), "{found:?}");
    drop(p);
    v.detach().unwrap();
}

/// A parent that ended at once left its child with memory that could only be read: SIGSEGV at the
/// first store.
#[test]
fn a_child_outlives_its_parent() {
    let dir = Dir::new("daemon");
    let mut p = Peer::start(&dir);
    assert_eq!(p.ask("join"), "owner");
    p.ask("map");
    assert_eq!(p.ask("daemon"), format!("{} 50 true", libc::ESTALE));
    let mut g = Peer::start(&dir);
    assert_eq!(g.ask("join"), "owner");
    let mut h = Peer::guest(&dir);
    h.tell("daemon");
    assert_eq!(h.answer(), "0 50 true", "its owner is there");
}

/// A line to the owner, by which anything can be said.
struct Raw(libc::c_int);

impl Raw {
    fn connect(dir: &Dir) -> Raw {
        let path = dir.0.join("a/.mojim/v/share.sock");
        // SAFETY: system calls with a structure of the right size.
        unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            let mut at: libc::sockaddr_un = std::mem::zeroed();
            at.sun_family = libc::AF_UNIX as _;
            let bytes = path.as_os_str().as_encoded_bytes();
            for (to, from) in at.sun_path.iter_mut().zip(bytes) {
                *to = *from as _;
            }
            let len = size_of_val(&at) as libc::socklen_t;
            let done = libc::connect(fd, (&raw const at).cast(), len);
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            Raw(fd)
        }
    }

    /// The first byte of the answer: 1 done, 3 failed. `None` at the line's end.
    fn say(&self, what: &[u8]) -> Option<u8> {
        self.ask(what).map(|answer| answer[0])
    }

    fn ask(&self, what: &[u8]) -> Option<Vec<u8>> {
        let mut answer = vec![0u8; 1 << 16];
        // SAFETY: buffers of these lengths.
        unsafe {
            let sent = libc::send(self.0, what.as_ptr().cast(), what.len(), libc::MSG_NOSIGNAL);
            if sent < 0 {
                return None;
            }
            let got = libc::recv(self.0, answer.as_mut_ptr().cast(), answer.len(), 0);
            answer.truncate(got.max(0) as usize);
            (got > 0).then_some(answer)
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: our own.
        unsafe { libc::close(self.0) };
    }
}

/// The inode of the memory behind a mapping.
fn identity(m: Mapping) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let begin = format!("{:x}-", m.ptr as usize);
    let line = maps.lines().find(|l| l.starts_with(&begin)).unwrap();
    line.split_whitespace().nth(4).unwrap().parse().unwrap()
}

/// A forked child's window was taken for one of the memory that its file got later. The child's
/// stores were reported as committed, and were nowhere.
#[test]
fn whatever_a_guest_says_the_owner_goes_on() {
    let dir = Dir::new("garbage");
    let v = owner(&dir);
    let m = v.map("f", LEN, flags()).unwrap();
    let mut p = Peer::guest(&dir);
    let hello = [&[1, 1, 0, 0, 0, 1, 0][..], b"v"].concat();
    let raw = Raw::connect(&dir);
    assert_eq!(raw.say(&[14]), Some(3), "a request before the greeting");
    assert_eq!(raw.say(&[1, 9, 0, 0, 0, 1, 0, b'v']), Some(3), "a version");
    assert_eq!(raw.say(&[1, 1, 0, 0, 0, 1, 0, b'w']), Some(3), "a volume");
    assert_eq!(raw.say(&hello), Some(1));
    // Numbers at the edges, in every place of a message where one can be.
    let edges = [
        0,
        1,
        4095,
        4096,
        LEN as u64,
        u64::MAX / 2,
        u64::MAX - 4095,
        u64::MAX,
    ];
    let memory = identity(m);
    let show = |file: u32, [offset, len, base]: [u64; 3], memory: u64| {
        let mut show = [&[3][..], &file.to_le_bytes()].concat();
        for n in [offset, len, base, memory] {
            show.extend_from_slice(&n.to_le_bytes());
        }
        show.extend_from_slice(&[1, 1, 0]);
        show
    };
    // A window that was of the file's memory until all unmapped it, and one mapped it again: what
    // was stored there was said to be committed.
    let shown = [0, LEN as u64, m.ptr as u64];
    let mut map = vec![2];
    for n in [0, LEN as u64] {
        map.extend_from_slice(&n.to_le_bytes());
    }
    map.extend_from_slice(&[0, 0, 1, 0, b'f']);
    let lent = raw.ask(&map).unwrap();
    let id = u32::from_le_bytes(lent[9..13].try_into().unwrap());
    assert_eq!(raw.say(&show(id, shown, memory + 1)), Some(3), "another");
    assert_eq!(raw.say(&show(id, shown, memory)), Some(1));
    for file in [0u32, 1, id, u32::MAX] {
        for offset in edges {
            for len in edges {
                let shown = [offset, len, offset];
                assert!(raw.say(&show(file, shown, memory)).is_some());
                let mut map = vec![2];
                map.extend_from_slice(&offset.to_le_bytes());
                map.extend_from_slice(&len.to_le_bytes());
                map.extend_from_slice(&[0, 0, 1, 0, b'f']);
                assert!(raw.say(&map).is_some());
            }
        }
    }
    for window in 0..600u64 {
        for kind in [5u8, 6] {
            let mut part = vec![kind];
            part.extend_from_slice(&[1][..usize::from(kind == 5)]);
            for n in [
                window,
                edges[window as usize % 8],
                edges[window as usize / 8 % 8],
            ] {
                part.extend_from_slice(&n.to_le_bytes());
            }
            assert!(raw.say(&part).is_some());
        }
        if window % 3 == 0 {
            assert!(
                raw.say(&[&[4][..], &window.to_le_bytes()].concat())
                    .is_some()
            );
        }
    }
    let mut rng = Rng::new(1);
    for _ in 0..3000 {
        let state = rng.next();
        // Not those that change names: they would be done.
        let kind = [2, 3, 4, 5, 6, 12, 15, 17, 255][state as usize % 9];
        let bytes: Vec<u8> = (0..state as usize / 16 % 60)
            .map(|i| (state >> (i % 57)) as u8)
            .collect();
        assert!(raw.say(&[&[kind][..], &bytes].concat()).is_some());
    }
    drop(raw);
    store(m, 1, 10);
    p.ask("store 2 20");
    assert_eq!(p.ask("msync"), "0");
    v.settle().unwrap();
    assert_eq!([1, 2].map(|page| dir.byte(page)), [10, 20]);
    drop(p);
    v.detach().unwrap();
}

#[test]
fn after_the_owners_end_the_memory_stays() {
    let dir = Dir::new("owner-ends");
    let v = owner(&dir);
    let m = v.map("f", LEN, flags()).unwrap();
    let mut p = Peer::guest(&dir);
    p.ask("store 1 10");
    assert_eq!(p.ask("msync"), "0");
    store(m, 2, 20);
    // Not atomic: the end is a sync point, of what is stored anywhere.
    p.ask("store 40 41");
    v.detach().unwrap();
    assert_eq!(p.ask("load 2"), "20");
    p.ask("store 3 30");
    assert_eq!(p.ask("load 3"), "30");
    assert_eq!(p.ask("msync"), libc::ESTALE.to_string());
    assert!(p.ask("finish").contains("has ended"));
    assert_eq!([1, 2, 40].map(|page| dir.byte(page)), [10, 20, 41]);
    // The next one begins with what was committed.
    let mut q = Peer::start(&dir);
    assert_eq!(q.ask("join"), "owner");
    q.ask("map");
    assert_eq!(q.ask("load 2") + " " + &q.ask("load 3"), "20 0");
}

#[test]
fn names_sizes_and_rollbacks_go_over_the_line() {
    let dir = Dir::new("names");
    let mut p = Peer::start(&dir);
    assert_eq!(p.ask("join"), "owner");
    p.ask("map");
    let Joined::Guest(g) = join(&config(&dir.0), "a", None).unwrap() else {
        panic!("two owners");
    };
    assert_eq!((g.name(), g.size("f").unwrap()), ("v", Some(LEN as u64)));
    assert_eq!(g.size("g").unwrap(), None);
    assert!(g.create("g").unwrap());
    assert!(!g.create("g").unwrap());
    g.truncate("g", 3 * PAGE as u64).unwrap();
    g.rename("g", "h").unwrap();
    assert_eq!(g.size("h").unwrap(), Some(3 * PAGE as u64));
    assert_eq!(g.remove("f").unwrap_err().errno(), libc::EBUSY);
    assert_eq!(g.fsync("nothing").unwrap_err().errno(), libc::ENOENT);
    let atomic = MapFlags {
        atomic: true,
        offset: PAGE as u64,
        ..flags()
    };
    let h = g.map("h", 0, atomic).unwrap();
    assert_eq!(h.len, 2 * PAGE);
    store(h, 0, 1);
    let lsn = g.fsync("h").unwrap();
    assert!(lsn > 0 && g.copies(lsn).unwrap().len() == 1);
    g.wait(lsn).unwrap();
    store(h, 0, 2);
    store(h, 1, 3);
    assert!(rollback(h.ptr, h.len).unwrap());
    assert_eq!((load(h, 0), load(h, 1)), (1, 0));
    let low = MapFlags {
        offset: 5,
        ..atomic
    };
    assert_eq!(g.map("h", 0, low).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(msync(h.ptr, 3 * PAGE).unwrap_err().errno(), libc::EINVAL);
    assert!(unmap(h.ptr, PAGE).is_err());
    unmap(h.ptr, h.len).unwrap();
    let mut q = Peer::guest(&dir);
    assert_eq!(q.ask("unmap-msync"), "true");
    drop(q);
    g.remove("h").unwrap();
    // Larger than its file.
    let m = g.map("f", 2 * LEN, flags()).unwrap();
    assert_eq!(g.size("f").unwrap(), Some(2 * LEN as u64));
    store(m, 2 * PAGES - 1, 9);
    g.detach().unwrap();
    g.settle().unwrap_err();
    p.ask("settle");
    assert_eq!(dir.byte(2 * PAGES - 1), 9);
}

/// What a mapping at an address of a region did: the one it lay over committed its bytes into
/// its own file, and took it away when it was unmapped. Here of a guest, and of an owner.
#[test]
fn a_mapping_in_place_of_a_region_is_refused() {
    // Where the kernel puts nothing of the other tests' once it is given back: in the place of
    // some memory of theirs the last mapping ended the process, or was refused.
    let own = MapFlags {
        fixed_at: 0x2a4d_6f6a_0000,
        ..flags()
    };
    let refused = |v: &Joined, byte| {
        let m = map(v, own).unwrap();
        store(m, 5, byte);
        let start = m.ptr as usize;
        for (at, len) in [
            (start, LEN),
            (start + PAGE, PAGE),
            (start + LEN - PAGE, 2 * PAGE),
            (start - PAGE, PAGE + 1),
            (start - PAGE, 0),
        ] {
            for file in ["f", "g", "new"] {
                let over = MapFlags {
                    fixed_at: at,
                    ..flags()
                };
                // SAFETY: nobody else has these addresses.
                let done = unsafe {
                    match v {
                        Joined::Owner(v) => v.map_over(file, len, over),
                        Joined::Guest(g) => g.map_over(file, len, over),
                    }
                };
                let e = done.expect_err("it is a region");
                // A file that was only made has no bytes.
                let want = match (len, file) {
                    (0, "new") => libc::EINVAL,
                    _ => libc::EBUSY,
                };
                assert_eq!(e.errno(), want, "{e}");
            }
        }
        // Nor does a safe call take the place of other memory.
        let other = Box::new([byte; 3 * PAGE]);
        let over = MapFlags {
            fixed_at: (other.as_ptr() as usize).next_multiple_of(PAGE),
            ..flags()
        };
        let done = match v {
            Joined::Owner(v) => v.map("g", PAGE, over),
            Joined::Guest(g) => g.map("g", PAGE, over),
        };
        assert_eq!(done.unwrap_err().errno(), libc::EBUSY);
        assert!(other.iter().all(|b| *b == byte));
        // Nothing came of it, but for what was given back.
        assert_eq!((load(m, 5), synced(m)), (byte, 0));
        unmap(m.ptr, m.len).unwrap();
        let again = map(v, own).unwrap();
        assert_eq!((again.ptr as usize, load(again, 5)), (start, byte));
        unmap(again.ptr, again.len).unwrap();
    };
    let dir = Dir::new("fixed");
    let v = Joined::Owner(owner(&dir));
    let Joined::Owner(own) = &v else {
        unreachable!()
    };
    own.create("g").unwrap();
    own.truncate("g", LEN as u64).unwrap();
    refused(&v, 7);
    own.detach().unwrap();
    let mut p = Peer::start(&dir);
    assert_eq!(p.ask("join"), "owner");
    let g = join(&config(&dir.0), "a", None).unwrap();
    assert!(matches!(g, Joined::Guest(_)));
    refused(&g, 8);
}
