//! Links that are slow or long, or can be cut: TCP connections carried by threads of the
//! test, which end with them, at the latest with the test.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

/// Listens, and carries each connection to `to` by the two functions: what goes
/// there, and what comes back. Returns the port.
fn carry(
    to: String,
    there: impl Fn(TcpStream, TcpStream) + Copy + Send + 'static,
    back: impl Fn(TcpStream, TcpStream) + Copy + Send + 'static,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(&to) else {
                continue;
            };
            for s in [&near, &far] {
                s.set_nodelay(true).unwrap();
            }
            let (n, f) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            spawn(move || there(n, f));
            spawn(move || back(far, near));
        }
    });
    port
}

/// Passes everything on, at most `most` bytes each `pause`.
fn pump(from: TcpStream, to: TcpStream, most: usize, pause: Duration) {
    pump_counted(from, to, most, pause, &AtomicU64::new(0));
}

/// A link that takes at most `burst` bytes towards `to` each `pause`; answers
/// are not slowed down.
pub fn slow(to: String, burst: usize, pause: Duration) -> u16 {
    carry(
        to,
        move |from, to| pump(from, to, burst, pause),
        |from, to| pump(from, to, 64 << 10, Duration::ZERO),
    )
}

/// A link to `to` on which everything takes `delay`, each way.
pub fn long(to: String, delay: Duration) -> u16 {
    let pass = move |mut from: TcpStream, mut to: TcpStream| {
        let (send, receive) = mpsc::channel::<(Instant, Vec<u8>)>();
        spawn(move || {
            for (due, bytes) in receive {
                sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&bytes).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
        let mut bytes = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            if send
                .send((Instant::now() + delay, bytes[..n].to_vec()))
                .is_err()
            {
                break;
            }
        }
    };
    carry(to, pass, pass)
}

/// A way between two nodes that can be cut; its connections end with that, its
/// listener with the process.
pub struct Way {
    cut: Arc<Mutex<Option<Vec<Weak<Ends>>>>>,
}

/// The two ends of a connection, closed when the threads that carry it have ended.
type Ends = [TcpStream; 2];

impl Way {
    /// To `to`, and the port that leads there.
    pub fn new(to: u16) -> (Way, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cut = Arc::new(Mutex::new(Some(Vec::new())));
        let way = Way { cut: cut.clone() };
        spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else {
                    continue;
                };
                // One that is cut accepts, and closes; its port stays nobody else's.
                let mut open = cut.lock().unwrap();
                let Some(open) = &mut *open else { continue };
                let ends: Arc<Ends> = Arc::new([near, far]);
                for s in &*ends {
                    s.set_nodelay(true).unwrap();
                }
                open.retain(|e: &Weak<Ends>| e.strong_count() > 0);
                open.push(Arc::downgrade(&ends));
                for (from, into) in [(0, 1), (1, 0)] {
                    let ends = ends.clone();
                    spawn(move || {
                        let _ = std::io::copy(&mut &ends[from], &mut &ends[into]);
                        for s in &*ends {
                            let _ = s.shutdown(Shutdown::Both);
                        }
                    });
                }
            }
        });
        (way, port)
    }

    pub fn cut(&self) {
        let open = self.cut.lock().unwrap().take();
        for ends in open.iter().flatten().filter_map(Weak::upgrade) {
            for s in &*ends {
                let _ = s.shutdown(Shutdown::Both);
            }
        }
    }
}

/// A way on which what was sent can be kept, come late, and come again.
pub struct Late {
    to: u16,
    links: Arc<Mutex<Vec<Arc<Kept>>>>,
}

/// One connection on it.
struct Kept {
    near: TcpStream,
    far: TcpStream,
    /// What was sent there, and how much of it was passed on; whether nothing
    /// more is.
    sent: Mutex<(Vec<u8>, usize, bool)>,
}

impl Kept {
    fn pump_there(&self) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(n @ 1..) = (&self.near).read(&mut bytes) {
            let mut sent = self.sent.lock().unwrap();
            sent.0.extend_from_slice(&bytes[..n]);
            if !sent.2 {
                sent.1 += n;
                let _ = (&self.far).write_all(&bytes[..n]);
            }
        }
        // The other end does not hear of it while something is on its way.
        if !self.sent.lock().unwrap().2 {
            let _ = self.far.shutdown(Shutdown::Both);
        }
    }

    fn pump_back(&self) {
        let _ = std::io::copy(&mut &self.far, &mut &self.near);
        let _ = self.near.shutdown(Shutdown::Both);
    }
}

impl Late {
    /// To `to`, and the port that leads there.
    pub fn new(to: u16) -> (Late, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let links = Arc::new(Mutex::new(Vec::new()));
        let late = Late {
            to,
            links: links.clone(),
        };
        spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else {
                    continue;
                };
                for s in [&near, &far] {
                    s.set_nodelay(true).unwrap();
                }
                let kept = Arc::new(Kept {
                    near,
                    far,
                    sent: Mutex::default(),
                });
                links.lock().unwrap().push(kept.clone());
                let there = kept.clone();
                spawn(move || there.pump_there());
                spawn(move || kept.pump_back());
            }
        });
        (late, port)
    }

    /// What is sent from now on, over the connections that there are, stays on
    /// the way; so do their ends. New connections are as always.
    pub fn keep(&self) {
        for k in self.links.lock().unwrap().iter() {
            k.sent.lock().unwrap().2 = true;
        }
    }

    /// It comes now; how many bytes.
    pub fn deliver(&self) -> usize {
        let mut late = 0;
        for k in self.links.lock().unwrap().iter() {
            let mut sent = k.sent.lock().unwrap();
            let (bytes, passed, kept) = &mut *sent;
            if std::mem::take(kept) {
                late += bytes.len() - *passed;
                let _ = (&k.far).write_all(&bytes[*passed..]);
                *passed = bytes.len();
            }
        }
        late
    }

    /// Everything that was ever sent comes again, each connection's over a new
    /// one; they end when all was said. How many bytes.
    pub fn repeat(&self) -> usize {
        let links: Vec<_> = self.links.lock().unwrap().clone();
        let mut again = 0;
        let mut open = Vec::new();
        for k in links {
            let bytes = k.sent.lock().unwrap().0.clone();
            again += bytes.len();
            let mut link = TcpStream::connect(("127.0.0.1", self.to)).unwrap();
            let mut back = link.try_clone().unwrap();
            let heard = spawn(move || std::io::copy(&mut back, &mut std::io::sink()));
            // It may be closed before all is said.
            let _ = link.write_all(&bytes);
            open.push((link, heard));
        }
        for (link, heard) in open {
            let _ = link.shutdown(Shutdown::Write);
            let _ = heard.join();
        }
        again
    }
}

/// A way to a node on which what each connection carried there is counted, and
/// the busiest can be cut off.
pub struct Tap {
    carried: Arc<Mutex<Vec<Carried>>>,
}

struct Carried {
    bytes: Arc<AtomicU64>,
    near: TcpStream,
}

impl Tap {
    /// To `to`, and the port that leads there. Each connection takes at most
    /// `burst` bytes every `pause`.
    pub fn new(to: String, burst: usize, pause: Duration) -> (Tap, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let carried = Arc::new(Mutex::new(Vec::new()));
        let tap = Tap {
            carried: carried.clone(),
        };
        spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(&to) else {
                    continue;
                };
                for s in [&near, &far] {
                    s.set_nodelay(true).unwrap();
                }
                let bytes = Arc::new(AtomicU64::new(0));
                carried.lock().unwrap().push(Carried {
                    bytes: bytes.clone(),
                    near: near.try_clone().unwrap(),
                });
                let (n, f) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                spawn(move || pump_counted(n, f, burst, pause, &bytes));
                spawn(move || pump(far, near, 64 << 10, Duration::ZERO));
            }
        });
        (tap, port)
    }

    /// How many bytes each connection has carried.
    pub fn carried(&self) -> Vec<u64> {
        let all = self.carried.lock().unwrap();
        all.iter().map(|c| c.bytes.load(Relaxed)).collect()
    }

    /// How many connections have carried at least so much.
    pub fn busy(&self, least: u64) -> usize {
        self.carried().iter().filter(|n| **n >= least).count()
    }

    /// Ends the connection that has carried most, once one has carried `least`.
    pub fn cut_busiest(&self, least: u64) -> bool {
        let all = self.carried.lock().unwrap();
        let most = all.iter().max_by_key(|c| c.bytes.load(Relaxed));
        let Some(c) = most.filter(|c| c.bytes.load(Relaxed) >= least) else {
            return false;
        };
        c.near.shutdown(Shutdown::Both).is_ok()
    }
}

/// As `pump`, and adds up what was passed on.
fn pump_counted(
    mut from: TcpStream,
    mut to: TcpStream,
    most: usize,
    pause: Duration,
    total: &AtomicU64,
) {
    let mut bytes = vec![0; most];
    let mut pace = Pace::new(pause.div_f64(most as f64));
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
        total.fetch_add(n as u64, Relaxed);
        pace.keep(n);
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// What a link takes in a second, whatever else the machine does: a thread that slept
/// too long makes up for it.
struct Pace {
    byte: Duration,
    /// When the next byte may pass.
    due: Instant,
}

impl Pace {
    /// The most that is made up for: after that, the link was idle.
    const LATE: Duration = Duration::from_millis(100);

    fn new(byte: Duration) -> Pace {
        let due = Instant::now();
        Pace { byte, due }
    }

    /// `n` bytes have passed: waits until others may.
    fn keep(&mut self, n: usize) {
        let now = Instant::now();
        let late = now.checked_sub(Self::LATE).unwrap_or(now);
        self.due = self.due.max(late) + self.byte.mul_f64(n as f64);
        sleep(self.due.saturating_duration_since(now));
    }
}
