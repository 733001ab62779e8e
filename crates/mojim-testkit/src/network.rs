//! A network of its own for a test, and what can go wrong on it.
//!
//! Each node has a namespace, joined by veth pairs to a bridge in another.
//!
//! Owns the namespaces, which have no names: they are gone when the last
//! process and descriptor in them is, however the test ends. The thread that
//! makes a network is in the bridge's namespace from then on, and so is what
//! it starts and does not put elsewhere.
//!
//! Cuts are rules of nft where packets arrive. A slow network is another way between the nodes. It
//! consists of a TUN device in each and a thread that passes packets on late, at a rate, or not at
//! all. It needs no module of the kernel's.

use std::collections::{BTreeSet, BinaryHeap};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::rng::Rng;

/// A network namespace.
struct Namespace(Arc<File>);

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Namespace {
    fn new() -> io::Result<Namespace> {
        // Another thread goes into it and ends; the descriptor keeps it.
        let made = std::thread::spawn(|| {
            // SAFETY: changes the network namespace of this thread only.
            check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
            File::open("/proc/thread-self/ns/net")
        });
        let file = made.join().map_err(|_| io::Error::other("a panic"))??;
        Ok(Namespace(Arc::new(file)))
    }

    /// This thread goes into it.
    fn enter(&self) -> io::Result<()> {
        // SAFETY: the descriptor is open; this thread only changes.
        check(unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) })
    }

    /// The command will run in it, and not longer than the thread that starts it.
    pub fn put(&self, command: &mut Command) {
        let file = self.0.clone();
        // SAFETY: two system calls on what is open since before the fork.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                check(libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET))
            });
        }
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    fn run(&self, command: &str, input: &str) -> Result<(), String> {
        let mut words = command.split(' ');
        let mut c = Command::new(words.next().expect("a command"));
        c.args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        self.put(&mut c);
        let mut child = c.spawn().map_err(|e| format!("{command}: {e}"))?;
        let mut to = child.stdin.take().expect("it is a pipe");
        let _ = to.write_all(input.as_bytes());
        drop(to);
        let out = child.wait_with_output().map_err(|e| e.to_string())?;
        if out.status.success() {
            return Ok(());
        }
        Err(format!(
            "{command}: {}{input}",
            String::from_utf8_lossy(&out.stderr)
        ))
    }
}

/// How a slow network is slow, in each direction of each pair of nodes.
#[derive(Debug, Clone, Copy)]
pub struct Slow {
    /// The least time on the way.
    pub delay: Duration,
    /// What may come on top of it, at random: packets overtake each other.
    pub jitter: Duration,
    /// Of 1,000 packets, how many are lost.
    pub loss: u64,
    /// Of 1,000 packets, how many come twice.
    pub twice: u64,
    /// Bytes a second.
    pub rate: u64,
}

/// The nodes' network.
pub struct Network {
    hub: Namespace,
    nodes: Vec<Namespace>,
    /// What node `.0` sends does not reach node `.1`.
    cuts: BTreeSet<(usize, usize)>,
    relay: Option<Relay>,
}

impl Network {
    /// A network of `n` nodes, or why there cannot be one here.
    pub fn new(n: usize) -> Result<Network, String> {
        let new = || Namespace::new().map_err(|e| format!("a network namespace: {e}"));
        let hub = new()?;
        let nodes: Vec<Namespace> = (0..n).map(|_| new()).collect::<Result<_, _>>()?;
        hub.run("ip link add hub type bridge", "")?;
        hub.run("ip link set hub up", "")?;
        hub.run("ip address add 10.77.0.254/24 dev hub", "")?;
        for (i, ns) in nodes.iter().enumerate() {
            let at = ns.path();
            hub.run(
                &format!("ip link add p{i} type veth peer name eth0 netns {at}"),
                "",
            )?;
            hub.run(&format!("ip link set p{i} master hub up"), "")?;
            ns.run("ip link set lo up", "")?;
            let address = address(i);
            ns.run(&format!("ip address add {address}/24 dev eth0"), "")?;
            ns.run("ip link set eth0 up", "")?;
        }
        let mut network = Network {
            hub,
            nodes,
            cuts: BTreeSet::new(),
            relay: None,
        };
        network.heal()?;
        network.hub.enter().map_err(|e| e.to_string())?;
        Ok(network)
    }

    /// The command will run on node `i`.
    pub fn put(&self, i: usize, command: &mut Command) {
        self.nodes[i].put(command);
    }

    /// What `from` sends does not reach `to` any more.
    pub fn cut_one_way(&mut self, from: usize, to: usize) {
        self.cuts.insert((from, to));
        self.apply(to).unwrap();
    }

    /// Neither hears the other.
    pub fn cut(&mut self, a: usize, b: usize) {
        self.cut_one_way(a, b);
        self.cut_one_way(b, a);
    }

    /// Node `i` is alone.
    pub fn isolate(&mut self, i: usize) {
        for j in 0..self.nodes.len() {
            if j != i {
                self.cut(i, j);
            }
        }
    }

    /// Nobody of `side` hears anybody else, and the other way round.
    pub fn split(&mut self, side: &[usize]) {
        for &i in side {
            for j in 0..self.nodes.len() {
                if !side.contains(&j) {
                    self.cut(i, j);
                }
            }
        }
    }

    /// From now on packets take the slow way.
    pub fn slow(&mut self, how: Slow, seed: u64) -> Result<(), String> {
        self.fast();
        let relay = Relay::start(&self.nodes, how, seed);
        self.relay = Some(relay.map_err(|e| format!("/dev/net/tun: {e}"))?);
        for (i, ns) in self.nodes.iter().enumerate() {
            ns.run("ip link set slow0 up", "")?;
            for to in (0..self.nodes.len()).filter(|&j| j != i).map(address) {
                ns.run(&format!("ip route replace {to}/32 dev slow0"), "")?;
            }
        }
        Ok(())
    }

    fn fast(&mut self) {
        // The devices go with the descriptors, the routes with the devices.
        self.relay = None;
    }

    /// Everything is well again.
    pub fn heal(&mut self) -> Result<(), String> {
        self.fast();
        self.cuts.clear();
        (0..self.nodes.len()).try_for_each(|i| self.apply(i))
    }

    fn apply(&self, i: usize) -> Result<(), String> {
        let mut rules = String::from(
            "flush ruleset\ntable ip mojim {\nchain in {\ntype filter hook input priority 0; policy accept;\n",
        );
        for (from, _) in self.cuts.iter().filter(|c| c.1 == i) {
            rules += &format!("ip saddr {} drop\n", address(*from));
        }
        rules += "}\n}\n";
        self.nodes[i].run("nft -f -", &rules)
    }

    /// Every connection between the two ends at once, loudly.
    pub fn reset(&mut self, a: usize, b: usize) {
        let rule = format!(
            "add rule ip mojim in ip saddr {} meta l4proto tcp reject with tcp reset\n",
            address(a)
        );
        if self.nodes[b].run("nft -f -", &rule).is_err() {
            self.cut(a, b);
        }
    }
}

/// The address of node `i`.
pub fn address(i: usize) -> String {
    format!("10.77.0.{}", i + 1)
}

/// A packet on its way: the one that is due first is the greatest.
#[derive(PartialEq, Eq)]
struct Packet {
    due: Instant,
    number: u64,
    to: usize,
    bytes: Vec<u8>,
}

impl Ord for Packet {
    fn cmp(&self, other: &Packet) -> std::cmp::Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for Packet {
    fn partial_cmp(&self, other: &Packet) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The thread that passes packets on.
struct Relay {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The longest queue of a link in time: what comes on top is dropped.
const QUEUE: Duration = Duration::from_millis(400);

impl Relay {
    fn start(nodes: &[Namespace], how: Slow, seed: u64) -> io::Result<Relay> {
        let mut devices = Vec::new();
        for ns in nodes {
            let ns = Namespace(ns.0.clone());
            let made = std::thread::spawn(move || {
                ns.enter()?;
                tun("slow0")
            });
            devices.push(made.join().map_err(|_| io::Error::other("a panic"))??);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        let thread = std::thread::spawn(move || pass_on(&devices, how, Rng::new(seed), &asked));
        Ok(Relay {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

fn tun(name: &str) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: an all-zero request is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = CString::new(name).expect("no zero byte");
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request outlives the call, which writes the name into it.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) })?;
    // SAFETY: sets a flag of our own descriptor.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
    Ok(file)
}

fn pass_on(devices: &[File], how: Slow, mut rng: Rng, stop: &AtomicBool) {
    let mut on_the_way = BinaryHeap::new();
    // When each link has sent what it was given.
    let mut free = vec![vec![Instant::now(); devices.len()]; devices.len()];
    let mut number = 0;
    let mut buffer = vec![0; 65536];
    let fds: Vec<RawFd> = devices.iter().map(File::as_raw_fd).collect();
    while !stop.load(Ordering::Acquire) {
        let now = Instant::now();
        while on_the_way.peek().is_some_and(|p: &Packet| p.due <= now) {
            let p = on_the_way.pop().expect("just seen");
            let _ = (&devices[p.to]).write(&p.bytes);
        }
        let next = on_the_way.peek().map(|p| p.due);
        let wait = next.map_or(Duration::from_millis(20), |d| {
            d.saturating_duration_since(now)
                .min(Duration::from_millis(20))
        });
        let mut polled: Vec<libc::pollfd> = fds
            .iter()
            .map(|&fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        let wait = libc::timespec {
            tv_sec: 0,
            tv_nsec: wait.subsec_nanos().into(),
        };
        // SAFETY: the list and the time outlive the call.
        unsafe {
            libc::ppoll(
                polled.as_mut_ptr(),
                polled.len() as libc::nfds_t,
                &wait,
                std::ptr::null(),
            )
        };
        for (from, device) in devices.iter().enumerate() {
            while let Ok(len) = (&*device).read(&mut buffer) {
                // IPv4: the destination, of which the last byte tells the node.
                let Some(to) = (len >= 20 && buffer[0] >> 4 == 4)
                    .then(|| usize::from(buffer[19]).wrapping_sub(1))
                    .filter(|&to| to < devices.len() && to != from)
                else {
                    continue;
                };
                let now = Instant::now();
                let begin = free[from][to].max(now);
                if rng.below(1000) < how.loss || begin - now > QUEUE {
                    continue;
                }
                let sent =
                    begin + Duration::from_nanos(len as u64 * 1_000_000_000 / how.rate.max(1));
                free[from][to] = sent;
                let times = if rng.below(1000) < how.twice { 2 } else { 1 };
                for _ in 0..times {
                    let more = rng.below(how.jitter.as_nanos() as u64 + 1);
                    number += 1;
                    on_the_way.push(Packet {
                        due: sent + how.delay + Duration::from_nanos(more),
                        number,
                        to,
                        bytes: buffer[..len].to_vec(),
                    });
                }
            }
        }
    }
}
