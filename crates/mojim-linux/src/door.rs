//! Where connections come in: unknown peers are turned away here.
//!
//! Owns connections that have not proved a name yet, in a cluster with keys.
//! One thread sees to all of them and never waits for one. Invariants:
//! - At most [`HALF_OPEN`] connections are half open, each for at most
//!   [`PATIENCE`], each with a handshake's bounded memory.
//! - A flood shuts out only itself: a connection beyond the limit takes the place of the
//!   oldest one of the addresses with the most. A member needs two round trips, and keeps
//!   its place unless it becomes that oldest one meanwhile.
//! - Only a connection that has proved its name is given out.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::net::Listener;
use super::now;
use super::tls::{Keys, Tls};
use mojim_env::futex::timespec;
use mojim_env::{Address, Conn};

/// Connections that have not proved a name, at most.
pub const HALF_OPEN: usize = 128;
/// How long a connection may take to prove one.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Connections accepted in a row before those inside are seen to.
const ROW: usize = 32;
/// How often refusals are reported, so that a flood does not fill the disk.
const TELL: Duration = Duration::from_secs(1);

struct Knocking {
    conn: Tls,
    source: Option<IpAddr>,
    since: Duration,
}

/// A listener, and the connections that wait before it.
pub struct Door<'a> {
    listener: &'a Listener,
    /// Over TCP in a cluster with keys: what peers are checked against.
    keys: Option<Arc<Keys>>,
    /// The oldest first.
    waiting: Vec<Knocking>,
    refused: Refusals,
}

/// Refusals that are not reported yet: a peer that knocks again and again, from any port and with any
/// words, makes a line a second.
#[derive(Default)]
pub struct Refusals {
    count: u64,
    last: String,
    told: Option<Duration>,
}

impl Refusals {
    /// Notes that a peer was refused.
    pub fn note(&mut self, peer: &str, why: &dyn std::fmt::Display) {
        self.count += 1;
        self.last = format!("{peer}: {why}");
    }

    /// What was refused since the last call, from time to time.
    pub fn take(&mut self) -> Option<String> {
        if self.count == 0 || self.told.is_some_and(|t| now() < t + TELL) {
            return None;
        }
        let more = match self.count {
            1 => String::new(),
            n => format!(", and {} others since the last message", n - 1),
        };
        let text = format!("refused {}{more}", self.last);
        (self.count, self.told) = (0, Some(now()));
        Some(text)
    }
}

impl<'a> Door<'a> {
    /// Guards a listener. Unix sockets are guarded by the kernel.
    pub fn new(listener: &'a Listener, keys: Option<Arc<Keys>>) -> Door<'a> {
        let tcp = matches!(listener.local_address(), Address::Tcp(_));
        Door {
            listener,
            keys: keys.filter(|_| tcp),
            waiting: Vec::new(),
            refused: Refusals::default(),
        }
    }

    /// The next connection that has proved a name (any, without keys); `None`
    /// after `timeout`.
    pub fn next(&mut self, timeout: Duration) -> io::Result<Option<Arc<dyn Conn>>> {
        let Some(keys) = self.keys.clone() else {
            return self.listener.accept(timeout);
        };
        let deadline = now().saturating_add(timeout);
        loop {
            let ready = self.wait(deadline.saturating_sub(now()))?;
            // Before a connection leaves the list: `ready` holds indexes into it.
            if let Some(conn) = self.hear(&ready) {
                return Ok(Some(Arc::new(conn)));
            }
            self.turn_out_late();
            for _ in 0..ROW {
                let Some(socket) = self.listener.try_accept()? else {
                    break;
                };
                let source = socket.source();
                if self.waiting.len() >= HALF_OPEN {
                    self.make_room(source);
                }
                self.waiting.push(Knocking {
                    conn: Tls::accept(&keys, socket)?,
                    source,
                    since: now(),
                });
            }
            if now() >= deadline {
                return Ok(None);
            }
        }
    }

    /// What was refused since the last call, from time to time.
    pub fn refusals(&mut self) -> Option<String> {
        self.refused.take()
    }

    #[cfg(test)]
    pub(super) fn half_open(&self) -> usize {
        self.waiting.len()
    }

    /// Waits until a new connection comes or waiting ones can go on: the indexes of
    /// these.
    fn wait(&self, timeout: Duration) -> io::Result<Vec<usize>> {
        let first = self.waiting.first();
        let late = first.map_or(timeout, |k| (k.since + PATIENCE).saturating_sub(now()));
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.fd(), PollFlags::IN)];
        for k in &self.waiting {
            let room = match k.conn.wants_to_send() {
                true => PollFlags::OUT,
                false => PollFlags::empty(),
            };
            fds.push(PollFd::from_borrowed_fd(
                k.conn.socket().fd(),
                PollFlags::IN | room,
            ));
        }
        match poll(&mut fds, Some(&timespec(timeout.min(late)))) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(e) => return Err(e.into()),
        }
        let ready = fds[1..].iter().enumerate();
        Ok(ready
            .filter(|(_, f)| !f.revents().is_empty())
            .map(|(i, _)| i)
            .collect())
    }

    fn turn_out_late(&mut self) {
        // They are in the order in which they came, and all have the same limit.
        let late = |k: &Knocking| k.since + PATIENCE <= now();
        let n = self.waiting.iter().take_while(|k| late(k)).count();
        for k in self.waiting.drain(..n) {
            self.refused.note(
                &k.conn.socket().peer(),
                &"it took too long to prove its name",
            );
            k.conn.close();
        }
    }

    /// Goes on with the connections in `ready`. The first that has proved its name is
    /// returned; the others are served at the next call.
    fn hear(&mut self, ready: &[usize]) -> Option<Tls> {
        let mut gone = Vec::new();
        let mut found = None;
        for &i in ready {
            match self.waiting[i].conn.prove() {
                Ok(()) => {
                    found = Some(i);
                    break;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => {
                    let peer = self.waiting[i].conn.socket().peer();
                    self.refused.note(&peer, &e);
                    gone.push(i);
                }
            }
        }
        let proved = found.map(|i| self.waiting.remove(i).conn);
        // Indexes below `found` are still right.
        for i in gone.into_iter().rev() {
            self.waiting.remove(i).conn.close();
        }
        proved
    }

    /// Closes the oldest connection of the addresses with the most, counting `next`.
    fn make_room(&mut self, next: Option<IpAddr>) {
        let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::from([(next, 1)]);
        for k in &self.waiting {
            *counts.entry(k.source).or_default() += 1;
        }
        let most = *counts.values().max().expect("there is one");
        let oldest = self.waiting.iter().position(|k| counts[&k.source] == most);
        // The newcomer may be the only one of the most: then anyone.
        let k = self.waiting.remove(oldest.unwrap_or(0));
        self.refused.note(
            &k.conn.socket().peer(),
            &"too many connections are half open",
        );
        k.conn.close();
    }
}
