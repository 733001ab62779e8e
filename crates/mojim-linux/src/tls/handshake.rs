//! The handshake of one connection, by rustls, a record at a time.
//!
//! Owns a connection until both ends have proved their names. Invariants:
//! - Never blocks, and holds at most [`MOST`] bytes of what an unknown peer sent.
//! - No byte behind the handshake is received here: it belongs to `records`.
//! - The handshake counts as done only when the kernel has all that this end sends in it.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use mojim_env::wire::unfit;
use mojim_format::certificate::Subject;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::pki_types::{IpAddr, Ipv4Addr, ServerName};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, UnbufferedConnectionCommon, UnbufferedStatus,
};
use rustls::{ClientConfig, ConnectionTrafficSecrets, ServerConfig};

use super::keys::{ENCRYPTED, Keys, PLAIN};
use super::records::{HEADER, MAX_RECORD, Rx, Tx};
use super::words;
use crate::error;
use crate::net::Socket;
use mojim_env::Conn;

/// Most bytes that a whole handshake may have in one direction; ours have two
/// thousand.
const MOST: usize = 32 << 10;

/// A fatal alert, "unexpected message": the answer to bytes that are not TLS. It tells a
/// node without keys that this one has some.
const NO_TLS: [u8; 7] = [ALERT, 3, 3, 0, 2, 2, 10];

/// Content types that a handshake's first record can have.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// What derives the next keys.
pub(super) enum Secrets {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Secrets {
    pub(super) fn next(
        &mut self,
        to_send: bool,
    ) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        let (_, next) = match (self, to_send) {
            (Secrets::Client(k), true) => k.update_tx_secret(),
            (Secrets::Client(k), false) => k.update_rx_secret(),
            (Secrets::Server(k), true) => k.update_tx_secret(),
            (Secrets::Server(k), false) => k.update_rx_secret(),
        }?;
        Ok(next)
    }
}

/// A connection whose two ends know each other.
pub(super) struct Proved {
    pub secrets: Secrets,
    pub tx: Tx,
    pub rx: Rx,
    pub peer: Subject,
    pub encrypted: bool,
}

/// A handshake under way.
pub(super) struct Handshake {
    side: Option<Side>,
    incoming: Vec<u8>,
    /// Bytes of the record that is being received: received, and wanted.
    record: (usize, usize),
    received: usize,
    outgoing: Vec<u8>,
    sent: usize,
    /// Why it failed: every later call returns this.
    failed: Option<(io::ErrorKind, String)>,
    /// rustls has nothing more to do.
    done: bool,
}

fn tls(e: rustls::Error) -> io::Error {
    let (kind, before) = match &e {
        rustls::Error::InvalidCertificate(_) => (
            io::ErrorKind::PermissionDenied,
            format!("{}: ", unfit::CERTIFICATE),
        ),
        rustls::Error::AlertReceived(_) => (
            io::ErrorKind::PermissionDenied,
            format!("the other end {}: ", unfit::LINK),
        ),
        rustls::Error::NoCertificatesPresented => (io::ErrorKind::PermissionDenied, String::new()),
        _ => (io::ErrorKind::InvalidData, String::new()),
    };
    error(kind, format!("{before}{}", words::of(&e)))
}

/// What both sides have in common.
trait Process {
    type Data;
    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

impl Process for UnbufferedConnectionCommon<ClientConnectionData> {
    type Data = ClientConnectionData;
    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }
}

impl Process for UnbufferedConnectionCommon<ServerConnectionData> {
    type Data = ServerConnectionData;
    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }
}

/// Lets rustls read what has come and write what it has to send. True if the whole
/// handshake is over.
fn process(
    conn: &mut impl Process,
    incoming: &mut Vec<u8>,
    outgoing: &mut Vec<u8>,
) -> io::Result<bool> {
    let mut failed = None;
    loop {
        let UnbufferedStatus { discard, state, .. } = conn.process(incoming);
        let mut over = None;
        match state {
            Ok(ConnectionState::EncodeTlsData(mut data)) => {
                let at = outgoing.len();
                let need = match data.encode(&mut []) {
                    Err(EncodeError::InsufficientSize(e)) => e.required_size,
                    other => other.map_err(io::Error::other)?,
                };
                outgoing.resize(at + need, 0);
                let n = data.encode(&mut outgoing[at..]).map_err(io::Error::other)?;
                outgoing.truncate(at + n);
            }
            // Sent from `outgoing`, once.
            Ok(ConnectionState::TransmitTlsData(data)) => data.done(),
            Ok(ConnectionState::BlockedHandshake) => over = Some(false),
            Ok(ConnectionState::WriteTraffic(_)) => over = Some(true),
            Ok(_) => {
                return Err(error(
                    io::ErrorKind::InvalidData,
                    "it said something else instead of a handshake",
                ));
            }
            // Goes on: rustls still writes the alert that says why.
            Err(e) if failed.is_none() => failed = Some(tls(e)),
            Err(_) => over = Some(false),
        }
        incoming.drain(..discard);
        match (over, &mut failed) {
            (Some(_), Some(_)) => return Err(failed.expect("just seen")),
            (Some(done), None) => return Ok(done),
            (None, _) => {}
        }
    }
}

impl Handshake {
    fn new(side: Side) -> Handshake {
        Handshake {
            side: Some(side),
            incoming: Vec::new(),
            record: (0, HEADER),
            received: 0,
            outgoing: Vec::new(),
            sent: 0,
            failed: None,
            done: false,
        }
    }

    /// The connecting side.
    pub(super) fn connect(config: Arc<ClientConfig>) -> io::Result<Handshake> {
        // `config` has the expected node; rustls only needs some name here.
        let nobody = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::from([0, 0, 0, 0])));
        let mut conn = UnbufferedClientConnection::new(config, nobody).map_err(tls)?;
        let mut hello = Vec::new();
        process(&mut *conn, &mut Vec::new(), &mut hello)?;
        let mut h = Handshake::new(Side::Client(conn));
        h.outgoing = hello;
        Ok(h)
    }

    /// The listening side.
    pub(super) fn accept(config: Arc<ServerConfig>) -> io::Result<Handshake> {
        let conn = UnbufferedServerConnection::new(config).map_err(tls)?;
        Ok(Handshake::new(Side::Server(conn)))
    }

    /// Whether it waits for room to send.
    pub(super) fn wants_to_send(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Goes on as far as it gets; `WouldBlock` until it is done. The result is returned
    /// only once.
    pub(super) fn step(&mut self, socket: &Socket, keys: &Keys) -> io::Result<Proved> {
        if let Some((kind, text)) = &self.failed {
            return Err(error(*kind, text.clone()));
        }
        let r = self.try_step(socket, keys);
        if let Err(e) = &r
            && e.kind() != io::ErrorKind::WouldBlock
        {
            // Sends the alert, as far as the socket takes it.
            let _ = self.flush(socket);
            self.failed = Some((e.kind(), e.to_string()));
            (self.side, self.incoming, self.outgoing) = (None, Vec::new(), Vec::new());
        }
        r
    }

    fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        while self.sent < self.outgoing.len() {
            self.sent += socket.send(&[IoSlice::new(&self.outgoing[self.sent..])])?;
        }
        Ok(())
    }

    fn try_step(&mut self, socket: &Socket, keys: &Keys) -> io::Result<Proved> {
        loop {
            if !self.done {
                let side = self.side.as_mut().expect("it has not failed or ended");
                let (i, o) = (&mut self.incoming, &mut self.outgoing);
                self.done = match side {
                    Side::Client(c) => process(&mut **c, i, o)? && !c.is_handshaking(),
                    Side::Server(c) => process(&mut **c, i, o)? && !c.is_handshaking(),
                };
            }
            self.flush(socket)?;
            if self.done {
                return self.finish(keys);
            }
            self.receive(socket)?;
        }
    }

    /// Receives the next record, whole, and no more.
    fn receive(&mut self, socket: &Socket) -> io::Result<()> {
        while self.record.0 < self.record.1 {
            let at = self.incoming.len();
            self.incoming.resize(at + self.record.1 - self.record.0, 0);
            let r = socket.recv(&mut [IoSliceMut::new(&mut self.incoming[at..])]);
            self.incoming.truncate(at + *r.as_ref().unwrap_or(&0));
            let n = r?;
            if n == 0 {
                return Err(error(
                    io::ErrorKind::UnexpectedEof,
                    "the link was closed before both ends had shown their certificates",
                ));
            }
            self.record.0 += n;
            self.received += n;
            if self.record == (HEADER, HEADER) {
                let header = &self.incoming[self.incoming.len() - HEADER..];
                if self.received == HEADER && ![HANDSHAKE, ALERT].contains(&header[0]) {
                    self.outgoing.extend_from_slice(&NO_TLS);
                    return Err(error(
                        io::ErrorKind::InvalidData,
                        format!("it {}: has it no keys?", unfit::SPEAKS_NO_TLS),
                    ));
                }
                let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
                if HEADER + len > MAX_RECORD || self.received + len > MOST {
                    return Err(error(
                        io::ErrorKind::InvalidData,
                        "it sent more than a handshake has",
                    ));
                }
                self.record.1 += len;
            }
        }
        self.record = (0, HEADER);
        Ok(())
    }

    fn finish(&mut self, keys: &Keys) -> io::Result<Proved> {
        let side = self.side.take().expect("it ends once");
        let common = match &side {
            Side::Client(c) => (c.peer_certificates(), c.alpn_protocol()),
            Side::Server(c) => (c.peer_certificates(), c.alpn_protocol()),
        };
        let certificate = common.0.and_then(|all| all.first());
        let certificate = certificate
            .ok_or_else(|| error(io::ErrorKind::PermissionDenied, "it showed no certificate"))?;
        let peer = keys.name_in(certificate)?;
        let encrypted = match common.1 {
            Some(ENCRYPTED) => true,
            Some(PLAIN) => false,
            _ => return Err(error(io::ErrorKind::InvalidData, "it speaks no Mojim")),
        };
        let (extracted, secrets) = match side {
            Side::Client(c) => {
                let (e, k) = c.dangerous_into_kernel_connection().map_err(tls)?;
                (e, Secrets::Client(k))
            }
            Side::Server(c) => {
                let (e, k) = c.dangerous_into_kernel_connection().map_err(tls)?;
                (e, Secrets::Server(k))
            }
        };
        (self.incoming, self.outgoing) = (Vec::new(), Vec::new());
        Ok(Proved {
            tx: Tx::new(&extracted.tx, encrypted)?,
            rx: Rx::new(&extracted.rx, encrypted)?,
            secrets,
            peer,
            encrypted,
        })
    }
}
