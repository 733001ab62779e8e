//! The world: nodes, time, faults and crashes.
//!
//! Owns what a test does to the world as a whole: it lets time pass, crashes nodes, cuts
//! links, and looks at what is left. Invariant: time moves in [`World::advance`] only.

use crate::ctx::{Ctx, Faults};
use crate::failures::{Failure, Only, Takes};
use crate::net::Net;
use mojim_env::Address;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

mod env;
mod file;
mod link;
mod state;

pub use env::SimEnv;
pub use link::{SimConn, SimListener};
pub use state::{CrashKind, is_crash};
use state::{HandleOwner, Shared, State, crashed};

/// A simulated world; clones are handles of the same world.
#[derive(Clone)]
pub struct World {
    shared: Shared,
}

impl World {
    /// A world without nodes, at time zero.
    pub fn new(seed: u64, faults: Faults) -> World {
        World {
            shared: Shared(Arc::new(Mutex::new(State {
                ctx: Ctx::new(seed, faults),
                nodes: Vec::new(),
                names: BTreeMap::new(),
                net: Net::default(),
            }))),
        }
    }

    /// The environment of the node's running process. If none runs, a process is started,
    /// on a machine that is switched on if need be. A node of a new name is made.
    pub fn env(&self, node: &str) -> Arc<SimEnv> {
        let mut state = self.shared.lock();
        let n = state.node(node);
        let st = &mut *state;
        if !st.nodes[n].running {
            let node = &mut st.nodes[n];
            node.incarnation += 1;
            node.running = true;
            node.powered = true;
            node.crash = None;
            st.net.restart(n, &mut st.ctx);
            st.trace(n, || "starts".to_string());
        }
        Arc::new(SimEnv {
            place: HandleOwner {
                shared: self.shared.clone(),
                node: n,
                incarnation: st.nodes[n].incarnation,
            },
            boot_id: st.nodes[n].boot_id,
        })
    }

    /// The time.
    pub fn now(&self) -> Duration {
        self.shared.lock().ctx.now
    }

    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        let st = &mut *self.shared.lock();
        st.ctx.now += by;
        st.net.run(&mut st.ctx);
    }

    /// When the next bytes, ends or connections arrive somewhere, if any are
    /// on their way.
    pub fn next_event(&self) -> Option<Duration> {
        let st = &*self.shared.lock();
        st.net.next_event(st.ctx.now)
    }

    /// Changes the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.shared.lock().ctx.faults = faults;
    }

    /// Crashes the node in the middle of its `after`-th operation from now (1
    /// is the next). Operations are those that change its disk: writes, syncs,
    /// changes of length or names, reservations, and flushes of persistent
    /// memory. It may be armed before the process starts.
    pub fn arm_crash(&self, node: &str, after: u64, kind: CrashKind) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].armed = Some((after.max(1), kind));
    }

    /// Crashes the node in its `after`-th send from now: none, some or all of
    /// the bytes are sent.
    pub fn arm_crash_on_send(&self, node: &str, after: u64, kind: CrashKind) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].armed_send = Some((after.max(1), kind));
    }

    /// Cancels an armed crash.
    pub fn disarm(&self, node: &str) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].armed = None;
        st.nodes[n].armed_send = None;
    }

    /// How many operations and sends the node has done.
    pub fn operations(&self, node: &str) -> (u64, u64) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        (st.nodes[n].operations, st.nodes[n].sends)
    }

    /// How the node's last process ended, until the next one starts.
    pub fn crashed(&self, node: &str) -> Option<CrashKind> {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].crash
    }

    /// The node's process dies now, if one runs.
    pub fn kill(&self, node: &str) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        if st.nodes[n].running {
            st.crash(n, CrashKind::Kill);
        }
    }

    /// The node loses power now, unless it has none.
    pub fn power_loss(&self, node: &str) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        if st.nodes[n].powered {
            st.crash(n, CrashKind::Power);
        }
    }

    /// Blocks the network from `a` to `b`, and back unless `oneway`; or, with
    /// `on` false, lets it pass again.
    pub fn partition(&self, a: &str, b: &str, oneway: bool, on: bool) {
        let st = &mut *self.shared.lock();
        let (a, b) = (st.node(a), st.node(b));
        st.trace(a, || format!("partition to {b}, oneway {oneway}: {on}"));
        st.net.partition(a, b, on, &mut st.ctx);
        if !oneway {
            st.net.partition(b, a, on, &mut st.ctx);
        }
    }

    /// Whether nothing gets from one node to the other, or nothing back.
    pub fn is_partitioned(&self, a: &str, b: &str) -> bool {
        let st = &mut *self.shared.lock();
        let (a, b) = (st.node(a), st.node(b));
        st.net.is_partitioned(a, b) || st.net.is_partitioned(b, a)
    }

    /// Resets every connection between two nodes.
    pub fn reset_connections(&self, a: &str, b: &str) {
        let st = &mut *self.shared.lock();
        let (a, b) = (st.node(a), st.node(b));
        st.net.reset(a, b, &mut st.ctx);
    }

    /// Listens for TCP, as the node's running process.
    pub fn listen(&self, node: &str, at: SocketAddr) -> io::Result<SimListener> {
        self.listen_at(node, &Address::Tcp(at))
    }

    /// Listens at any address; Unix paths are the same on all nodes.
    pub fn listen_at(&self, node: &str, at: &Address) -> io::Result<SimListener> {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        if !st.nodes[n].running {
            return Err(crashed());
        }
        Ok(SimListener {
            place: HandleOwner {
                shared: self.shared.clone(),
                node: n,
                incarnation: st.nodes[n].incarnation,
            },
            at: at.clone(),
            id: st.net.listen(n, at)?,
        })
    }

    /// Limits the bytes that the node's files may take; `None` for no limit.
    pub fn set_quota(&self, node: &str, quota: Option<u64>) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.set_quota(quota);
    }

    /// Limits the node's files to `pages` more pages than they take now.
    pub fn fill(&self, node: &str, pages: u64) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        let disk = &mut st.nodes[n].disk;
        disk.set_quota(Some((disk.used() + pages) * crate::memory::PAGE as u64));
    }

    /// Flips a bit of a file, in the cache and on the medium; `bit` counts
    /// from the file's start. False if there is no such byte.
    pub fn flip_bit(&self, node: &str, path: &Path, bit: u64) -> bool {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        let flip = |b: &mut u8| *b ^= 1 << (bit % 8);
        let done = st.nodes[n].disk.corrupt(path, bit / 8, flip);
        st.ctx.add("flipped bits", u64::from(done));
        st.trace(n, || format!("flip bit {bit} of {}", path.display()));
        done
    }

    /// Keeps what the node's disk has durably now, for [`World::put_back`].
    pub fn keep(&self, node: &str) {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].kept = st.nodes[n].disk.keep();
        st.trace(n, || "its disk is kept".into());
    }

    /// Puts back what was kept last of the disk of a node that has lost its power: all of
    /// it, or only these files.
    pub fn put_back(&self, node: &str, only: Option<&[PathBuf]>) {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        let node = &mut st.nodes[n];
        assert!(!node.powered);
        node.disk.put_back(&node.kept, only);
        st.ctx.hit("disks put back");
        st.trace(n, || format!("put back: {only:?}"));
    }

    /// Lets the next durable write to a file go to offset `to` of it, and
    /// succeed. False if there is no such file.
    pub fn misdirect_next_write(&self, node: &str, path: &Path, to: u64) -> bool {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.misdirect(path, to)
    }

    /// Whether a node's memory of this name is there.
    pub fn has_memory(&self, node: &str, path: &Path) -> bool {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].memories.contains_key(path)
    }

    /// A file as a process would read it; for a crashed node, what is left of it.
    pub fn contents(&self, node: &str, path: &Path) -> Option<Vec<u8>> {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.contents(path)
    }

    /// Somebody puts a symbolic link onto a node's disk, to a file elsewhere with these bytes:
    /// they are its [`World::contents`].
    pub fn put_link(&self, node: &str, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.put_link(path, bytes, &mut st.ctx)
    }

    /// Whether such a link lies there.
    pub fn is_link(&self, node: &str, path: &Path) -> bool {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.is_link(path)
    }

    /// The names of all files of a node.
    pub fn files(&self, node: &str) -> Vec<PathBuf> {
        let mut st = self.shared.lock();
        let n = st.node(node);
        st.nodes[n].disk.files()
    }

    /// How often each fault has happened.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.shared.lock().ctx.counts()
    }

    /// Of the failures drawn from now on, lets only these happen.
    pub fn only_failures(&self, only: Only) {
        self.shared.lock().ctx.failures.only(only);
    }

    /// Draws a failure of a node; returns whether it happens.
    pub fn fails(&self, node: &str, takes: Takes) -> bool {
        let st = &mut *self.shared.lock();
        let n = st.node(node);
        st.ctx.failures.draw(&st.nodes[n].name, takes)
    }

    /// The failures that happened.
    pub fn failures(&self) -> Vec<Failure> {
        self.shared.lock().ctx.failures.happened()
    }

    /// Begins to record what happens: the latest 20,000 events.
    pub fn trace_on(&self) {
        self.shared.lock().ctx.trace_on();
    }

    /// Adds a line of the caller's own to the record.
    pub fn note(&self, text: impl FnOnce() -> String) {
        self.shared.lock().ctx.trace(text);
    }

    /// The record, oldest first.
    pub fn trace(&self) -> Vec<String> {
        self.shared.lock().ctx.traced()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::tests::{CACHED, DURABLE, Sectors};
    use crate::rng::Rng;
    use mojim_env::{Conn, Env, Locker, Memory};
    use std::io::{ErrorKind, IoSlice, IoSliceMut};

    /// Reads and writes the memory's bytes.
    fn store(memory: &Memory, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= memory.len());
        // SAFETY: in range, and only this thread uses the memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.ptr().add(at), bytes.len()) };
    }

    fn load(memory: &Memory) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(memory.ptr(), memory.len()).to_vec() }
    }

    /// One long random script over all of the world; what it saw, in one string.
    fn script(seed: u64) -> String {
        let mut rng = Rng::new(seed);
        let world = World::new(seed, Faults::draw(&mut rng));
        world.trace_on();
        let at: SocketAddr = "10.0.0.1:7".parse().unwrap();
        let to = Address::Tcp(at);
        let mut seen = String::new();
        let names = ["a", "b"];
        let mut envs = names.map(|n| world.env(n));
        let mut listener = world.listen("a", at).unwrap();
        let mut conns: Vec<Arc<dyn Conn>> = Vec::new();
        let data = Sectors::new(8, 0xab);
        let mut buf = vec![0; 10_000];
        for _ in 0..400 {
            let n = rng.below(2) as usize;
            let env = envs[n].clone();
            let path = PathBuf::from(format!("/d/{}", rng.below(3)));
            let result: io::Result<usize> = (|| {
                env.create_dir_all(Path::new("/d"))?;
                match rng.below(12) {
                    0 => env
                        .open(&path, DURABLE)?
                        .write_at(&data, 512 * rng.below(9))?,
                    1 => env
                        .open(&path, CACHED)?
                        .write_at(&[7; 3000], rng.below(9999))?,
                    2 => env.open(&path, CACHED)?.sync()?,
                    3 => env.open(&path, CACHED)?.set_len(rng.below(20_000))?,
                    4 => env.rename(&path, Path::new("/d/0"))?,
                    5 => env.remove(&path)?,
                    6 => env.sync_dir(Path::new("/d"))?,
                    7 => {
                        let memory = env.persistent_memory(Path::new("/d/pm"), 8192)?;
                        store(
                            &memory,
                            rng.below(8000) as usize,
                            &[rng.below(256) as u8; 90],
                        );
                        env.flush(&memory, rng.below(4096) as usize, 4096);
                    }
                    8 => conns.push(env.connect(&to)?),
                    9 => conns.extend(listener.accept()?),
                    10 if !conns.is_empty() => {
                        return rng.pick(&conns).send(&[IoSlice::new(&buf)]);
                    }
                    11 if !conns.is_empty() => {
                        return rng.pick(&conns).recv(&mut [IoSliceMut::new(&mut buf)]);
                    }
                    _ => {}
                }
                Ok(0)
            })();
            seen += &format!("{result:?} {}\n", env.random());
            match rng.below(60) {
                0 => world.kill(names[n]),
                1 => world.power_loss(names[n]),
                2 => world.arm_crash(names[n], rng.below(5), CrashKind::Power),
                3 => world.partition("a", "b", rng.coin(), true),
                4 => world.partition("a", "b", false, false),
                _ => {}
            }
            if world.crashed(names[n]).is_some() {
                envs[n] = world.env(names[n]);
                if n == 0 {
                    listener = world.listen("a", at).unwrap();
                }
            }
            world.advance(Duration::from_micros(rng.below(5000)));
        }
        for n in names {
            for path in world.files(n) {
                seen += &format!("{path:?} {:?}\n", world.contents(n, &path));
            }
        }
        seen + &format!("{:?}\n{:?}", world.counts(), world.trace())
    }

    #[test]
    fn a_seed_fixes_the_run() {
        for seed in 0..20 {
            assert_eq!(script(seed), script(seed), "seed {seed}");
        }
        assert_ne!(script(1), script(2));
    }

    #[test]
    fn every_kind_of_fault_can_be_drawn_and_so_can_none() {
        let mut rng = Rng::new(3);
        let drawn: Vec<Faults> = (0..200).map(|_| Faults::draw(&mut rng)).collect();
        assert!(drawn.contains(&Faults::none()));
        let reached = |f: &dyn Fn(&Faults) -> u32| drawn.iter().any(|d| f(d) > 0);
        assert!(reached(&|f| f.sync_error) && reached(&|f| f.half_open) && reached(&|f| f.reset));
    }

    #[test]
    fn a_kill_keeps_memory_and_power_takes_it() {
        let world = World::new(1, Faults::none());
        let (shm, cached) = (Path::new("/dev/shm/ring"), Path::new("/file"));
        let old = world.env("a");
        let memory = old.memory(shm, 5000).unwrap();
        store(&memory, 4990, b"kept");
        let file = old.open(cached, CACHED).unwrap();
        file.write_at(b"cached", 0).unwrap();
        world.kill("a");
        assert_eq!(world.crashed("a"), Some(CrashKind::Kill));
        // The dead process still stores; no other process sees it.
        store(&memory, 0, b"late");
        assert!(is_crash(&file.write_at(b"late", 0).unwrap_err()));
        assert!(is_crash(&old.memory(shm, 5000).err().unwrap()));

        let new = world.env("a");
        assert_eq!(world.crashed("a"), None);
        assert_eq!(new.boot_id(), old.boot_id());
        assert!(!old.alive() && new.alive());
        let memory = new.memory(shm, 5000).unwrap();
        assert_eq!(&load(&memory)[4990..4994], b"kept");
        assert_eq!(&load(&memory)[..4], [0; 4]);
        assert_eq!(world.contents("a", cached).unwrap(), b"cached");

        world.power_loss("a");
        let new = world.env("a");
        assert_ne!(new.boot_id(), old.boot_id());
        assert!(
            load(&new.memory(shm, 5000).unwrap())
                .iter()
                .all(|b| *b == 0)
        );
        // With another length, it is made anew.
        store(&new.memory(shm, 5000).unwrap(), 0, b"x");
        assert_eq!(load(&new.memory(shm, 10).unwrap()), [0; 10]);
    }

    #[test]
    fn flushed_words_stay_and_others_may_go_eight_bytes_at_a_time() {
        let path = Path::new("/pm/log");
        let (mut all, mut none, mut some) = (0, 0, 0);
        for seed in 0..60 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            env.create_dir_all(Path::new("/pm")).unwrap();
            let memory = env.persistent_memory(path, 8192).unwrap();
            env.sync_dir(Path::new("/pm")).unwrap();
            store(&memory, 0, &[1; 4096]);
            env.flush(&memory, 0, 4096);
            store(&memory, 4096, &[2; 4096]);
            store(&memory, 0, &[3; 64]);
            world.power_loss("a");
            store(&memory, 100, b"stored by the dead");
            let left = load(&world.env("a").persistent_memory(path, 8192).unwrap());
            assert!(left[64..4096].iter().all(|b| *b == 1));
            let words = left[4096..].chunks(8);
            assert!(words.clone().all(|w| w == [2; 8] || w == [0; 8]));
            assert!(left[..64].chunks(8).all(|w| w == [1; 8] || w == [3; 8]));
            match words.filter(|w| *w == [2; 8]).count() {
                0 => none += 1,
                512 => all += 1,
                _ => some += 1,
            }
        }
        assert!(all > 0 && none > 0 && some > 0);
    }

    #[test]
    fn persistent_memory_survives_a_kill_whole_and_a_torn_flush_in_lines() {
        let path = Path::new("/pm");
        let mut torn = false;
        for seed in 0..40 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            let memory = env.persistent_memory(path, 4096).unwrap();
            env.sync_dir(Path::new("/")).unwrap();
            store(&memory, 0, &[5; 4096]);
            world.kill("a");
            store(&memory, 0, &[6; 4096]);
            let env = world.env("a");
            let memory = env.persistent_memory(path, 4096).unwrap();
            assert_eq!(load(&memory), [5; 4096]);
            world.arm_crash("a", 1, CrashKind::Power);
            env.flush(&memory, 0, 4096);
            assert_eq!(world.crashed("a"), Some(CrashKind::Power));
            let left = load(&world.env("a").persistent_memory(path, 4096).unwrap());
            torn |= left.contains(&5) && left.contains(&0);
        }
        assert!(torn);
    }

    #[test]
    fn a_lock_ends_with_its_value_or_its_process() {
        let world = World::new(1, Faults::none());
        let path = Path::new("/lock");
        let env = world.env("a");
        let lock = env.lock(path, Locker::Program).unwrap();
        let error = env.lock(path, Locker::Program).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert!(error.to_string().contains("locked by a"));
        world.env("b").lock(path, Locker::Program).unwrap();
        drop(lock);
        let lock = env.lock(path, Locker::Program).unwrap();
        world.kill("a");
        let env = world.env("a");
        let new = env.lock(path, Locker::Program).unwrap();
        // The dead process's value is not the new one's.
        drop(lock);
        assert!(env.lock(path, Locker::Program).is_err());
        drop(new);
        env.lock(path, Locker::Program).unwrap();
    }

    #[test]
    fn a_crash_comes_at_the_operation_it_was_armed_for() {
        let world = World::new(1, Faults::none());
        world.arm_crash("a", 3, CrashKind::Kill);
        let env = world.env("a");
        let file = env.open(Path::new("/f"), CACHED).unwrap();
        file.write_at(b"1", 0).unwrap();
        assert!(is_crash(&file.sync().unwrap_err()));
        assert_eq!(world.crashed("a"), Some(CrashKind::Kill));
        assert_eq!(world.operations("a").0, 3);
        assert!(is_crash(&file.len().unwrap_err()));
        assert!(is_crash(&env.list(Path::new("/")).unwrap_err()));
        assert!(is_crash(&env.sector(Path::new("/")).unwrap_err()));
        world.env("a").list(Path::new("/")).unwrap();
    }

    #[test]
    fn random_is_never_zero_and_differs_between_nodes() {
        let world = World::new(1, Faults::none());
        let (a, b) = (world.env("a"), world.env("b"));
        assert!((0..1000).all(|_| a.random() != 0));
        assert_ne!(a.random(), b.random());
        assert_eq!(a.node(), "a");
    }

    #[test]
    fn a_trace_tells_what_happened() {
        let world = World::new(1, Faults::none());
        world.trace_on();
        let env = world.env("a");
        env.open(Path::new("/f"), CACHED).unwrap();
        world.note(|| "here".to_string());
        let trace = world.trace().join("\n");
        assert!(
            trace.contains("a#1 create /f") && trace.contains("here"),
            "{trace}"
        );
    }
}
