//! A TCP connection whose two ends have proved their names: [`Tls`] is a
//! `Conn` around a `Socket`.
//!
//! Owns the way of a connection from its handshake (`handshake`) to its records
//! (`records`), by the certificates in `keys`. `words` says why keys do not fit. Invariants:
//! - Before the handshake is done, no byte of the caller's is sent and none is given to it. Any
//!   call drives the handshake on, and none blocks for it.
//! - Sending and receiving take no lock in common.
//! - After the handshake neither allocates, nor makes a system call but the
//!   socket's own.

mod handshake;
mod keys;
mod records;
#[cfg(test)]
mod tests;
mod words;

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use handshake::{Handshake, Secrets};
pub use keys::Keys;
use mojim_env::locks::lock;
use mojim_format::certificate::Subject;
use records::{Rx, Tx};

use super::error;
use super::net::Socket;
use mojim_env::{Address, Conn, Proof};

/// A connection that proves who is at its ends.
pub(super) struct Tls {
    socket: Socket,
    keys: Arc<Keys>,
    /// The name of the node that it was connected to.
    expected: Option<String>,
    handshake: Mutex<Handshake>,
    proved: OnceLock<Open>,
    /// Whether something has been received that no `recv` has given out.
    ready: AtomicBool,
}

/// The state after the handshake.
struct Open {
    proof: Proof,
    secrets: Mutex<Secrets>,
    /// Whether the peer asked this end for a new key.
    asked: AtomicBool,
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
}

impl Tls {
    /// Begins to connect to the node at `to`.
    pub(super) fn connect(keys: &Arc<Keys>, to: SocketAddr, encrypt: bool) -> io::Result<Tls> {
        let (name, config) = keys.towards(&to, encrypt)?;
        let handshake = Handshake::connect(config)?;
        let socket = Socket::connect(&Address::Tcp(to))?;
        Ok(Tls::new(socket, keys, Some(name), handshake))
    }

    /// Answers a connection that was accepted.
    pub(super) fn accept(keys: &Arc<Keys>, socket: Socket) -> io::Result<Tls> {
        let handshake = Handshake::accept(keys.server()?)?;
        Ok(Tls::new(socket, keys, None, handshake))
    }

    fn new(
        socket: Socket,
        keys: &Arc<Keys>,
        expected: Option<String>,
        handshake: Handshake,
    ) -> Tls {
        Tls {
            socket,
            keys: keys.clone(),
            expected,
            handshake: Mutex::new(handshake),
            proved: OnceLock::new(),
            ready: AtomicBool::new(false),
        }
    }

    /// The socket, for polling several.
    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Whether the handshake waits for room to send.
    pub(super) fn wants_to_send(&self) -> bool {
        lock(&self.handshake).wants_to_send()
    }

    /// Goes on with the handshake; `WouldBlock` until it is done.
    pub(super) fn prove(&self) -> io::Result<()> {
        self.open().map(|_| ())
    }

    /// Tells the peer of an error of its own, unless this end sends just now.
    #[cold]
    fn tell(&self, open: &Open, what: u8) {
        if let Ok(mut tx) = open.tx.try_lock() {
            tx.alert(what, &mut |bytes| self.socket.send(&[IoSlice::new(bytes)]));
        }
    }

    #[inline]
    fn open(&self) -> io::Result<&Open> {
        match self.proved.get() {
            Some(open) => Ok(open),
            None => self.shake(),
        }
    }

    #[cold]
    fn shake(&self) -> io::Result<&Open> {
        let mut handshake = lock(&self.handshake);
        if let Some(open) = self.proved.get() {
            // The other thread of this connection was faster.
            return Ok(open);
        }
        let p = handshake.step(&self.socket, &self.keys).map_err(|e| {
            match (&self.expected, e.raw_os_error()) {
                (Some(name), None) if e.kind() != io::ErrorKind::WouldBlock => {
                    error(e.kind(), format!("node {name}: {e}"))
                }
                _ => e,
            }
        })?;
        Ok(self.proved.get_or_init(|| Open {
            proof: match p.peer {
                Subject::Node(name) => Proof::Node {
                    name,
                    encrypted: p.encrypted,
                },
                Subject::Client => Proof::Client {
                    encrypted: p.encrypted,
                },
            },
            secrets: Mutex::new(p.secrets),
            asked: AtomicBool::new(false),
            tx: Mutex::new(p.tx),
            rx: Mutex::new(p.rx),
        }))
    }
}

impl Conn for Tls {
    fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let open = self.open()?;
        let mut tx = lock(&open.tx);
        if tx.is_bare() {
            return self.socket.send(bufs);
        }
        let next = || lock(&open.secrets).next(true);
        tx.send(bufs, &open.asked, &next, &mut |bytes| {
            self.socket.send(&[IoSlice::new(bytes)])
        })
    }

    fn recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let open = self.open()?;
        let mut rx = lock(&open.rx);
        if rx.is_bare() {
            return self.socket.recv(bufs);
        }
        let next = || lock(&open.secrets).next(false);
        let r = rx.receive(bufs, &open.asked, &next, &mut |bytes| {
            self.socket.recv(&mut [IoSliceMut::new(bytes)])
        });
        self.ready.store(rx.is_ready(), Ordering::Release);
        if let Some(what) = rx.take_alert() {
            self.tell(open, what);
        }
        r
    }

    fn wait(&self, to_send: bool, timeout: Duration) -> io::Result<bool> {
        if self.ready.load(Ordering::Acquire) {
            return Ok(true);
        }
        let to_send = match self.proved.get() {
            Some(_) => to_send,
            // What the caller has to send waits for the handshake.
            None => self.wants_to_send(),
        };
        self.socket.wait(to_send, timeout)
    }

    fn processor(&self) -> Option<usize> {
        self.socket.processor()
    }

    fn close(&self) {
        // Without a closing alert: the receiver discards a frame that was cut off, and an
        // end between two frames means nothing.
        self.socket.close();
    }

    fn peer(&self) -> String {
        match self.proved.get().map(|o| &o.proof) {
            Some(Proof::Node { name, .. }) => format!("node {name} at {}", self.socket.peer()),
            Some(Proof::Client { .. }) => format!("a client at {}", self.socket.peer()),
            _ => self.socket.peer(),
        }
    }

    fn proof(&self) -> Proof {
        match self.proved.get() {
            Some(open) => open.proof.clone(),
            None => Proof::Nothing,
        }
    }
}
