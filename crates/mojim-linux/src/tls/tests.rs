//! Members of a cluster speak over TLS, and unknown peers of every kind knock.

use std::collections::VecDeque;
use std::io::{BufRead, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

use rustix::net::SendFlags;

use mojim_keys::{Authority, NewAuthority, Validity};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use super::*;
use crate::door::{Door, HALF_OPEN};
use crate::{Listener, Os};
use mojim_config::Config;
use mojim_config::key_files;
use mojim_env::Env;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(60);
static NOT_ASKED: AtomicBool = AtomicBool::new(false);

/// An address of these tests' own: other processes' tests knock at ports of 127.0.0.1 at
/// which their nodes were.
fn own_host() -> Ipv4Addr {
    Ipv4Addr::new(127, 78, 4, (std::process::id() % 250) as u8 + 1)
}

fn any_port() -> Address {
    Address::Tcp((own_host(), 0).into())
}

/// A cluster with nodes `a` and `b`; `a` listens.
struct Cluster {
    dir: TempDir,
    listener: Listener,
    config: Config,
    authority: Authority,
}

fn node(name: &str) -> Subject {
    Subject::Node(name.into())
}

fn put(dir: &Path, name: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

impl Cluster {
    fn new() -> Cluster {
        let dir = TempDir::new().unwrap();
        let listener = Listener::bind(&any_port()).unwrap();
        let NewAuthority {
            authority,
            certificate,
            ..
        } = Authority::make("c").unwrap();
        put(
            dir.path(),
            &key_files::authority(Path::new("")),
            &certificate,
        );
        let text = format!(
            "cluster = \"c\"\nkeys = '{d}'\n\
             [volume.v]\nprimary = \"b\"\nmirror = \"a\"\nencrypt = false\n\
             [node.a]\naddress = \"{}\"\ndirectory = '{d}/a'\n\
             [node.b]\naddress = \"127.0.0.1:1\"\ndirectory = '{d}/b'\n",
            listener.local_address(),
            d = dir.path().display()
        );
        let config = Config::parse(&text, Path::new("test.toml")).unwrap_or_else(|e| panic!("{e}"));
        let c = Cluster {
            dir,
            listener,
            config,
            authority,
        };
        for s in [node("a"), node("b"), Subject::Client] {
            c.give(&s, &c.issue(&s));
        }
        c
    }

    fn issue(&self, s: &Subject) -> String {
        self.authority.issue(s, Validity::days(1)).unwrap()
    }

    fn give(&self, s: &Subject, pem: &str) {
        let name = key_files::certificate(Path::new(""), s);
        put(self.dir.path(), &name, pem);
    }

    fn os(&self, s: &Subject) -> Os {
        Os::of(&self.config, s).unwrap_or_else(|e| panic!("{e}"))
    }

    fn door(&self) -> Door<'_> {
        Door::new(&self.listener, self.os(&node("a")).keys())
    }

    fn at(&self) -> SocketAddr {
        let Address::Tcp(at) = self.listener.local_address() else {
            unreachable!("bound so");
        };
        at
    }

    /// Node b, or a client, connected to node a: both ends, proved.
    fn pair(&self, s: &Subject, encrypt: bool) -> (Arc<dyn Conn>, Arc<dyn Conn>) {
        let mut door = self.door();
        let from = self
            .os(s)
            .encrypting(encrypt)
            .connect(&self.listener.local_address())
            .unwrap();
        std::thread::scope(|scope| {
            let theirs = scope.spawn(|| door.next(LONG).unwrap().unwrap());
            assert!(until_proved(&*from).is_ok());
            (from.clone(), theirs.join().unwrap())
        })
    }
}

/// Drives a handshake to its end.
fn until_proved(conn: &dyn Conn) -> io::Result<()> {
    loop {
        match conn.send(&[]) {
            Ok(_) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                assert!(conn.wait(false, LONG)?);
            }
            Err(e) => return Err(e),
        }
    }
}

fn recv(conn: &dyn Conn, buf: &mut [u8]) -> io::Result<usize> {
    loop {
        match conn.recv(&mut [IoSliceMut::new(buf)]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                assert!(conn.wait(false, LONG)?);
            }
            other => return other,
        }
    }
}

fn send_all(conn: &dyn Conn, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // In pieces that are no record's, as frames are.
        let (a, b) = bytes.split_at(bytes.len().min(7001));
        match conn.send(&[IoSlice::new(a), IoSlice::new(b)]) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                assert!(conn.wait(true, LONG).unwrap());
            }
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn members_know_each_other() {
    let c = Cluster::new();
    for encrypt in [true, false] {
        let (from, to) = c.pair(&node("b"), encrypt);
        let name = |name: &str| Proof::Node {
            name: name.into(),
            encrypted: encrypt,
        };
        assert_eq!(from.proof(), name("a"));
        assert_eq!(to.proof(), name("b"));
        assert!(
            to.peer().starts_with("node b at 127.0.0.1:"),
            "{}",
            to.peer()
        );
        send_all(&*from, b"hello");
        let mut b = [0; 9];
        assert_eq!(recv(&*to, &mut b[..2]).unwrap(), 2);
        // The rest is here already: nobody must wait for it.
        assert!(to.wait(false, Duration::ZERO).unwrap());
        assert_eq!(recv(&*to, &mut b[2..]).unwrap(), 3);
        assert_eq!(&b[..5], b"hello");
        from.close();
        assert_eq!(recv(&*to, &mut b).unwrap(), 0);
    }
    let (_, to) = c.pair(&Subject::Client, true);
    assert_eq!(to.proof(), Proof::Client { encrypted: true });
}

#[test]
fn many_bytes_both_ways_and_new_keys() {
    let c = Cluster::new();
    for encrypt in [true, false] {
        let (a, b) = c.pair(&node("b"), encrypt);
        let bytes: Vec<u8> = (0..5_000_000u32).map(|i| (i ^ (i >> 9)) as u8).collect();
        std::thread::scope(|s| {
            for (one, other) in [(&a, &b), (&b, &a)] {
                let bytes = &bytes;
                s.spawn(move || send_all(&**one, bytes));
                s.spawn(move || {
                    let mut got = vec![0; bytes.len()];
                    let mut at = 0;
                    while at < got.len() {
                        let end = got.len().min(at + 100_000);
                        at += recv(&**other, &mut got[at..end]).unwrap();
                    }
                    assert!(got == *bytes);
                });
            }
        });
    }
}

/// rustls's own connection, with its own records, at the other end.
struct Foreign(rustls::StreamOwned<rustls::ClientConnection, TcpStream>);

/// Believes everyone: what is tested is the other side.
#[derive(Debug)]
struct Anyone(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        unreachable!("TLS 1.3 only")
    }
    fn verify_tls13_signature(
        &self,
        m: &[u8],
        c: &CertificateDer<'_>,
        d: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        let all = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(m, c, d, all)
    }
    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

impl Foreign {
    /// Connects with a certificate and key, or without.
    fn connect(at: SocketAddr, pem: Option<&str>, protocol: &[u8]) -> Foreign {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anyone(provider)));
        let mut config = match pem {
            None => config.with_no_client_auth(),
            Some(pem) => {
                let chain = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap();
                config.with_client_auth_cert(vec![chain], key).unwrap()
            }
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        let name = ServerName::try_from("whoever").unwrap();
        let conn = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Foreign(rustls::StreamOwned::new(conn, stream))
    }
}

#[test]
fn the_records_are_those_of_tls() {
    let c = Cluster::new();
    let mut door = c.door();
    let pem = c.issue(&node("b"));
    std::thread::scope(|s| {
        let at = c.at();
        let foreign = s.spawn(move || {
            let mut f = Foreign::connect(at, Some(&pem), keys::ENCRYPTED);
            f.0.write_all(b"ping").unwrap();
            let mut got = vec![0; 40_000];
            f.0.read_exact(&mut got).unwrap();
            f.0.conn.refresh_traffic_keys().unwrap();
            f.0.write_all(&got).unwrap();
            // The answer comes under the new key that was asked for.
            f.0.read_exact(&mut got[..4]).unwrap();
            assert_eq!(&got[..4], b"pong");
            f.0.conn.send_close_notify();
            f.0.flush().unwrap();
        });
        let ours = door.next(LONG).unwrap().unwrap();
        let mut b = vec![0; 40_000];
        assert_eq!(recv(&*ours, &mut b).unwrap(), 4);
        assert_eq!(&b[..4], b"ping");
        let long: Vec<u8> = (0..40_000u32).map(|i| (i * 7) as u8).collect();
        send_all(&*ours, &long);
        let mut at = 0;
        while at < b.len() {
            at += recv(&*ours, &mut b[at..]).unwrap();
        }
        assert!(b == long);
        send_all(&*ours, b"pong");
        assert_eq!(recv(&*ours, &mut b).unwrap(), 0, "it said that it ends");
        foreign.join().unwrap();
    });
}

/// Both directions of a connection, as made by rustls for a real handshake.
fn directions(encrypt: bool) -> (Tx, Rx, Mutex<Secrets>, Mutex<Secrets>) {
    let c = Cluster::new();
    let socket = Socket::connect(&c.listener.local_address()).unwrap();
    let (b, a) = (c.os(&node("b")), c.os(&node("a")));
    let (b, a) = (b.keys().unwrap(), a.keys().unwrap());
    let (_, config) = b.towards(&c.at(), encrypt).unwrap();
    let mut one = Handshake::connect(config).unwrap();
    let accepted = loop {
        match c.listener.try_accept().unwrap() {
            Some(s) => break s,
            None => assert!(socket.wait(true, LONG).unwrap()),
        }
    };
    let mut other = Handshake::accept(a.server().unwrap()).unwrap();
    let (mut p, mut q) = (None, None);
    while p.is_none() || q.is_none() {
        if p.is_none() {
            p = one.step(&socket, &b).ok();
        }
        if q.is_none() {
            q = other.step(&accepted, &a).ok();
        }
    }
    let (p, q) = (p.unwrap(), q.unwrap());
    (p.tx, q.rx, Mutex::new(p.secrets), Mutex::new(q.secrets))
}

/// A link: a receiver gets what a sender left here.
struct Wire(Vec<u8>);

impl Wire {
    fn send(&mut self, tx: &mut Tx, secrets: &Mutex<Secrets>, text: &[u8]) {
        let next = || lock(secrets).next(true);
        let n = tx.send(&[IoSlice::new(text)], &NOT_ASKED, &next, &mut |b| {
            self.0.extend_from_slice(b);
            Ok(b.len())
        });
        assert_eq!(n.unwrap(), text.len());
    }

    fn receive(&mut self, rx: &mut Rx, secrets: &Mutex<Secrets>) -> io::Result<Vec<u8>> {
        let mut b = [0; 64];
        let next = || lock(secrets).next(false);
        rx.receive(
            &mut [IoSliceMut::new(&mut b)],
            &NOT_ASKED,
            &next,
            &mut |to| match self.0.len() {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                n => {
                    to[..n].copy_from_slice(&self.0);
                    self.0.clear();
                    Ok(n)
                }
            },
        )
        .map(|n| b[..n].to_vec())
    }
}

#[test]
fn records_are_changed_by_nobody() {
    let damaged = |why: &str, damage: &dyn Fn(&mut Vec<u8>)| {
        let (mut tx, mut rx, s, r) = directions(true);
        let mut wire = Wire(Vec::new());
        wire.send(&mut tx, &s, b"first");
        assert!(!wire.0.windows(5).any(|w| w == b"first"));
        assert_eq!(wire.receive(&mut rx, &r).unwrap(), b"first");
        wire.send(&mut tx, &s, b"second");
        damage(&mut wire.0);
        let e = wire.receive(&mut rx, &r).expect_err(why);
        assert_eq!(e.kind(), io::ErrorKind::InvalidData, "{why}");
        // Nothing is believed after that.
        wire.0.clear();
        wire.send(&mut tx, &s, b"third");
        assert!(wire.receive(&mut rx, &r).is_err(), "{why}");
    };
    for at in [0, 1, 4, 5, 9, 15, 26] {
        damaged(&format!("byte {at}"), &|wire| wire[at] ^= 1);
    }
    // One record left out, and one that comes twice.
    let (mut tx, mut rx, s, r) = directions(true);
    let mut wire = Wire(Vec::new());
    wire.send(&mut tx, &s, b"first");
    wire.0.clear();
    wire.send(&mut tx, &s, b"second");
    assert!(wire.receive(&mut rx, &r).is_err());
    let (mut tx, mut rx, s, r) = directions(true);
    wire.0.clear();
    wire.send(&mut tx, &s, b"first");
    wire.0 = [wire.0.clone(), wire.0.clone()].concat();
    assert_eq!(wire.receive(&mut rx, &r).unwrap(), b"first");
    assert!(wire.receive(&mut rx, &r).is_err());
}

/// A peer with a key could keep this end busy for ever: with records that have no content, and with new
/// keys, of which each costs a derivation. Records with more than 2^14 bytes were taken.
#[test]
fn records_that_no_sound_peer_sends_are_refused() {
    const KEY_UPDATE: &[u8] = &[24, 0, 0, 1, 0];
    let refused = |why: &str, alert: u8, send: &dyn Fn(&mut Tx, &Mutex<Secrets>) -> Vec<u8>| {
        let (mut tx, mut rx, s, r) = directions(true);
        let mut wire = Wire(send(&mut tx, &s));
        let e = wire.receive(&mut rx, &r).expect_err(why);
        assert!(e.to_string().contains(why), "{e}");
        assert_eq!(
            (rx.take_alert(), rx.take_alert()),
            (Some(alert), None),
            "{why}"
        );
    };
    refused("too long", 22, &|tx, _| {
        tx.seal_any(&[1; (1 << 14) + 1], 23)
    });
    refused("without content", 10, &|tx, _| {
        (0..33).flat_map(|_| tx.seal_any(&[], 23)).collect()
    });
    refused("without content", 10, &|tx, s| {
        let mut all = Vec::new();
        for _ in 0..33 {
            all.extend(tx.seal_any(KEY_UPDATE, 22));
            tx.take_key(&lock(s).next(true).unwrap());
        }
        all
    });
    refused("changed on its way", 20, &|tx, _| {
        let mut record = tx.seal_any(b"x", 23);
        record[7] ^= 1;
        record
    });
    // As much as is allowed.
    let (mut tx, mut rx, s, r) = directions(true);
    let mut wire = Wire(tx.seal_any(&[1; 1 << 14], 23));
    assert_eq!(wire.receive(&mut rx, &r).unwrap(), [1; 64]);
    while rx.is_ready() {
        wire.receive(&mut rx, &r).unwrap();
    }
    for _ in 0..3 {
        let idle = (0..32).flat_map(|_| tx.seal_any(&[], 23));
        wire.0 = idle.collect();
        wire.0.extend(tx.seal_any(b"x", 23));
        assert_eq!(wire.receive(&mut rx, &r).unwrap(), b"x");
    }
    drop(s);
}

/// Who errs is told, by an alert over the same connection.
#[test]
fn an_error_sends_an_alert() {
    let c = Cluster::new();
    let keys = c.os(&node("b")).keys().unwrap();
    let ours = Tls::connect(&keys, c.at(), true).unwrap();
    let mut door = c.door();
    let theirs = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| door.next(LONG).unwrap().unwrap());
        until_proved(&ours).unwrap();
        theirs.join().unwrap()
    });
    ours.socket
        .send(&[IoSlice::new(b"no record of TLS")])
        .unwrap();
    assert!(recv(&*theirs, &mut [0; 8]).is_err());
    let e = recv(&ours, &mut [0; 8]).unwrap_err().to_string();
    assert!(e.contains("something else than it expected"), "{e}");
}

#[test]
fn keys_change_at_both_ends() {
    let (mut tx, mut rx, s, r) = directions(true);
    tx.age(1 << 23);
    rx.age(1 << 23);
    let mut wire = Wire(Vec::new());
    wire.send(&mut tx, &s, b"one ");
    wire.send(&mut tx, &s, b"two");
    assert_eq!(wire.receive(&mut rx, &r).unwrap(), b"one two");
}

/// Without encryption the first words are sealed, and the stream behind them
/// is bare, wherever it is cut.
#[test]
fn a_plain_link_seals_its_first_words() {
    let (mut tx, mut rx, s, r) = directions(false);
    let mut wire = Wire(Vec::new());
    wire.send(&mut tx, &s, b"hello");
    assert!(!wire.0.windows(5).any(|w| w == b"hello"));
    assert!(tx.is_bare());
    wire.0.extend_from_slice(b"and so on");
    assert_eq!(wire.receive(&mut rx, &r).unwrap(), b"helloand so on");
    assert!(rx.is_bare());
    let (mut tx, mut rx, s, r) = directions(false);
    wire.send(&mut tx, &s, b"hello");
    wire.0[7] ^= 1;
    assert!(wire.receive(&mut rx, &r).is_err());
    assert!(!rx.is_bare(), "what was refused leads nowhere");
}

/// Bytes that the link did not take count as sent only once it has them, and are not
/// sealed twice.
#[test]
fn what_is_not_taken_comes_again() {
    let (mut tx, mut rx, ..) = directions(true);
    let none: records::Next<'_> = &|| unreachable!("the keys are young");
    let text = [7u8; 1000];
    let bufs = [IoSlice::new(&text[..10]), IoSlice::new(&text[10..])];
    let mut wire = Vec::new();
    let mut calls = 0;
    loop {
        calls += 1;
        let mut room = 100;
        let r = tx.send(&bufs, &NOT_ASKED, none, &mut |b| {
            let n = b.len().min(room);
            room -= n;
            wire.extend_from_slice(&b[..n]);
            match n {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                n => Ok(n),
            }
        });
        match r {
            Ok(n) => {
                assert_eq!(n, 1000);
                break;
            }
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
        }
    }
    assert!(calls > 5, "{calls}");
    let mut b = [0; 2000];
    let n = rx.receive(
        &mut [IoSliceMut::new(&mut b)],
        &NOT_ASKED,
        none,
        &mut |to| {
            to[..wire.len()].copy_from_slice(&wire);
            Ok(wire.len())
        },
    );
    assert_eq!(n.unwrap(), 1000);
    assert!(b[..1000] == text);
}

/// Lets `knock` run against node a's door: nobody comes in, and this is why.
fn turned_away(c: &Cluster, knock: impl FnOnce() + Send) -> String {
    let mut door = c.door();
    std::thread::scope(|s| {
        let done = s.spawn(knock);
        loop {
            let came = door.next(Duration::from_millis(20)).unwrap();
            assert!(came.is_none(), "{}", came.unwrap().peer());
            if let Some(text) = door.refusals() {
                done.join().unwrap();
                return text;
            }
        }
    })
}

/// An unknown peer that speaks TLS is told that it is refused, and reads nothing.
fn refused(c: &Cluster, pem: Option<&str>, protocol: &[u8]) -> String {
    turned_away(c, || {
        let mut f = Foreign::connect(c.at(), pem, protocol);
        let mut b = [0; 1];
        let r =
            f.0.write_all(b"let me in")
                .and_then(|()| f.0.read_exact(&mut b));
        assert!(r.is_err());
    })
}

#[test]
fn unknown_peers_are_turned_away() {
    let c = Cluster::new();
    let check = |why: String, expected: &str| assert!(why.contains(expected), "{why}");
    check(refused(&c, None, keys::ENCRYPTED), "no certificate");
    // Another cluster's authority, for the same names.
    let other = Authority::make("c").unwrap().authority;
    let pem = other.issue(&node("b"), Validity::days(1)).unwrap();
    check(
        refused(&c, Some(&pem), keys::ENCRYPTED),
        "its certificate is refused: another authority made it",
    );
    // This authority, misused for another cluster's name, and for a node that
    // the configuration does not have.
    let key = Authority::make("c").unwrap();
    let elsewhere = Cluster::of(key);
    let pem = elsewhere.misnamed("d").issue(&node("b"), Validity::days(1));
    check(
        refused(&elsewhere, Some(&pem.unwrap()), keys::ENCRYPTED),
        "no name of cluster c",
    );
    let pem = c.issue(&node("x"));
    check(refused(&c, Some(&pem), keys::ENCRYPTED), "no node \"x\"");
    // Over, and not yet.
    let now = SystemTime::now();
    let day = Duration::from_secs(24 * 3600);
    for (from, to, says) in [
        (now - 2 * day, now - day, "it expired 24 hours ago"),
        (
            now + 5 * day / 2,
            now + 3 * day,
            "it is not valid for another 2 days",
        ),
    ] {
        let pem = c.authority.issue(&node("b"), Validity { from, to });
        let why = refused(&c, Some(&pem.unwrap()), keys::ENCRYPTED);
        check(why, &format!("its certificate is refused: {says}"));
    }
    // Another protocol over the same keys.
    let pem = c.issue(&node("b"));
    check(refused(&c, Some(&pem), b"h2"), "refused");
    // No TLS at all.
    let plain = |bytes: Vec<u8>| {
        turned_away(&c, || {
            let mut s = TcpStream::connect(c.at()).unwrap();
            s.write_all(&bytes).unwrap();
            // Whatever it is answered, it ends.
            let _ = s.read_to_end(&mut Vec::new());
        })
    };
    check(plain(b"MJMF and so on".to_vec()), "does not speak TLS");
    check(
        plain(vec![22, 3, 1, 0xff, 0xff, 0, 0]),
        "more than a handshake",
    );
    check(
        plain([vec![22, 3, 1, 0, 9], vec![0; 9]].concat()),
        "refused",
    );
}

impl Cluster {
    fn of(new: NewAuthority) -> Cluster {
        let mut c = Cluster::new();
        put(
            c.dir.path(),
            &key_files::authority(Path::new("")),
            &new.certificate,
        );
        put(
            c.dir.path(),
            &key_files::authority_key(Path::new("")),
            &new.key,
        );
        c.authority = new.authority;
        for s in [node("a"), node("b")] {
            c.give(&s, &c.issue(&s));
        }
        c
    }

    /// Its authority, as if it were another cluster's.
    fn misnamed(&self, cluster: &str) -> Authority {
        let path = key_files::authority_key(self.dir.path());
        Authority::from_key(cluster, &std::fs::read_to_string(path).unwrap()).unwrap()
    }
}

/// Who connects believes the node that it expects, and no other.
#[test]
fn impostors_are_not_believed() {
    let c = Cluster::new();
    let listen_as = |pem: Option<String>, what: &str| {
        // Node a's place is taken by somebody else.
        if let Some(pem) = &pem {
            c.give(&node("b"), pem);
        }
        let keys = c.os(&node("b")).keys();
        let from = c.os(&Subject::Client).connect(&c.listener.local_address());
        let from = from.unwrap();
        let over = AtomicBool::new(false);
        let why = std::thread::scope(|s| {
            s.spawn(|| {
                let mut door = Door::new(&c.listener, keys);
                while !over.load(Ordering::Relaxed) {
                    let _ = door.next(Duration::from_millis(20)).unwrap();
                }
            });
            let why = until_proved(&*from).unwrap_err().to_string();
            over.store(true, Ordering::Relaxed);
            why
        });
        assert!(why.contains(what), "{why}");
        assert!(why.contains("node a"), "{why}");
        assert_eq!(from.proof(), Proof::Nothing);
    };
    listen_as(None, "node b answers where node a should");
    // A client's certificate is for no server: it does not even load as one,
    // so it is shown by rustls itself.
    let pem = c.issue(&Subject::Client);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap();
    let mut server = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![chain], key)
        .unwrap();
    server.alpn_protocols = vec![keys::ENCRYPTED.to_vec()];
    let listener = std::net::TcpListener::bind((own_host(), 0)).unwrap();
    let mut config = c.config.clone();
    config.nodes.get_mut("a").unwrap().address = listener.local_addr().unwrap();
    let from = Os::of(&config, &node("b")).unwrap();
    let from = from.connect(&Address::Tcp(listener.local_addr().unwrap()));
    let from = from.unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut conn = rustls::ServerConnection::new(Arc::new(server)).unwrap();
            assert!(conn.complete_io(&mut stream).is_err());
        });
        let e = until_proved(&*from).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{e}");
    });
    // A node without keys answers in its own way.
    let listener = Listener::bind(&any_port()).unwrap();
    let Address::Tcp(at) = listener.local_address() else {
        unreachable!("bound so");
    };
    config.nodes.get_mut("a").unwrap().address = at;
    let from = Os::of(&config, &node("b")).unwrap();
    let from = from.connect(&Address::Tcp(at)).unwrap();
    let plain = listener.accept(LONG).unwrap().unwrap();
    plain.send(&[IoSlice::new(b"MJMF and so on")]).unwrap();
    let e = until_proved(&*from).unwrap_err().to_string();
    assert!(e.contains("has it no keys"), "{e}");
}

/// A directory of keys, and `authority.pem`, to which others could write, were used.
#[test]
fn keys_that_cannot_work_are_refused_at_the_start() {
    use std::os::unix::fs::PermissionsExt;
    let c = Cluster::new();
    let why = |s: &Subject| match Os::of(&c.config, s) {
        Ok(_) => panic!("they were taken"),
        Err(e) => e.to_string(),
    };
    let path = key_files::certificate(c.dir.path(), &node("b"));
    let mode = |path: &Path, m| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(m)).unwrap();
    };
    for m in [0o640, 0o604, 0o620, 0o602] {
        mode(&path, m);
        assert!(why(&node("b")).contains("others may use this key"));
    }
    mode(&path, 0o600);
    Os::of(&c.config, &node("b")).unwrap();
    // Who can put another authority there can be any node.
    for there in [key_files::authority(c.dir.path()), c.dir.path().to_owned()] {
        let before = std::fs::metadata(&there).unwrap().permissions();
        mode(&there, before.mode() | 0o020);
        assert!(why(&node("b")).contains("others may write to it"));
        std::fs::set_permissions(&there, before).unwrap();
    }
    Os::of(&c.config, &node("b")).unwrap();
    c.give(&node("b"), &c.issue(&node("a")));
    assert!(why(&node("b")).contains("is the certificate of node a"));
    let other = Authority::make("c").unwrap().authority;
    c.give(
        &node("b"),
        &other.issue(&node("b"), Validity::days(1)).unwrap(),
    );
    assert!(
        why(&node("b")).contains("--renew b`"),
        "{}",
        why(&node("b"))
    );
    c.give(&node("b"), "no PEM");
    assert!(why(&node("b")).contains("node.b.pem"));
    std::fs::remove_file(path).unwrap();
    assert!(why(&node("b")).contains("node.b.pem"));
}

/// A command without its `client.pem` ended as one that had failed (exit code 1), with "No such
/// file" alone. A key that was not its certificate's was found by the first link.
#[test]
fn keys_that_cannot_be_used_are_mistakes_of_the_configuration() {
    let c = Cluster::new();
    let why = |s: &Subject| match Os::of(&c.config, s) {
        Ok(_) => panic!("they were taken"),
        Err(mojim_env::Error::Config(text)) => text,
        Err(e) => panic!("not of the configuration: {e}"),
    };
    let own = |s: &Subject| key_files::certificate(c.dir.path(), s);
    let says = |s: &Subject, what: &str| {
        let text = why(s);
        let file = own(s).display().to_string();
        assert!(text.contains(&format!("{file}: {what}. Where")), "{text}");
        let renew = "`mojim keys --config test.toml --renew";
        assert!(text.contains(renew), "{text}");
    };
    std::fs::remove_file(own(&Subject::Client)).unwrap();
    says(&Subject::Client, "there is no such file");
    assert!(why(&Subject::Client).contains("--renew-client` makes client.pem: copy"));
    let b = node("b");
    let [one, other] = [c.issue(&b), c.issue(&b)];
    let end = "-----END CERTIFICATE-----\n";
    let at = |pem: &str| pem.find(end).unwrap() + end.len();
    let mixed = format!("{}{}", &one[..at(&one)], &other[at(&other)..]);
    c.give(&b, &mixed);
    says(&b, "its key is not the one of its certificate");
    c.give(&b, &one[..at(&one)]);
    says(&b, "it has no key that can be read");
    c.give(&b, "no PEM");
    says(&b, "it has no certificate");
    c.give(&b, &c.issue(&node("a")));
    says(&b, "it is the certificate of node a");
    let authority = Authority::make("c").unwrap().authority;
    let theirs = authority.issue(&b, Validity::days(1));
    c.give(&b, &theirs.unwrap());
    let than = "another authority made it than the one of authority.pem here";
    says(&b, than);
    let now = SystemTime::now();
    let day = Duration::from_secs(24 * 3600);
    let (from, to) = (now - 9 * day, now - 5 * day);
    let over = c.authority.issue(&b, Validity { from, to }).unwrap();
    c.give(&b, &over);
    says(&b, "it expired 5 days ago, by this machine's clock");
    std::fs::remove_file(key_files::authority(c.dir.path())).unwrap();
    let text = why(&b);
    let says = "authority.pem: there is no such file. Copy it from where";
    assert!(text.contains(says), "{text}");
}

/// What the other end refuses was told as `DecryptError` and `UnknownCA`.
#[test]
fn a_refusal_by_the_other_end_is_told_in_words() {
    let (c, mut other) = (Cluster::new(), Cluster::new());
    other.config.nodes.get_mut("a").unwrap().address = c.at();
    let why = turned_away(&c, || {
        let from = other.os(&node("b")).connect(&c.listener.local_address());
        let e = until_proved(&*from.unwrap()).unwrap_err().to_string();
        let says = "its certificate is refused: another authority made it than";
        assert!(e.contains(says), "{e}");
    });
    let says = "refused the link: another authority made this end's certificate";
    assert!(why.contains(says), "{why}");
}

/// Which part of the test below a process is.
const PART: &str = "MOJIM_TEST_PART";
/// Where its unknown peers knock.
const AT: &str = "MOJIM_TEST_AT";
/// Unknown peers' connections from one address: ports do not run out.
const OF_ONE: usize = 10_000;
/// Who knocks at one time.
const PEERS: usize = 16;
/// Members that must come in while unknown peers knock.
const MEMBERS: usize = 20;
/// What the door may cost at most, in KiB: 128 handshakes.
const ROOM: u64 = 32 << 10;

/// How many unknown peers knock.
fn knocks() -> usize {
    let given = std::env::var("HALF_OPEN").ok();
    given.map_or(20_000, |n| n.parse().expect("HALF_OPEN is a number"))
}

/// This test, once more, in a process of its own.
fn part(name: &str) -> Command {
    let test = concat!(module_path!(), "::half_open_connections_shut_nobody_out");
    let (_, test) = test.split_once("::").unwrap();
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["--exact", "--nocapture", test]).env(PART, name);
    c
}

/// What a process has: KiB of memory, descriptors, threads.
#[derive(Debug, Clone, Copy)]
struct Has {
    memory: u64,
    descriptors: usize,
    threads: u64,
}

impl Has {
    fn now() -> Has {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let number = |what: &str| -> u64 {
            let line = status.lines().find_map(|l| l.strip_prefix(what)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        Has {
            memory: number("VmRSS:"),
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            threads: number("Threads:"),
        }
    }

    /// What there is once there are so many threads, or after a while: the kernel counts one
    /// that was joined until it has ended it, which takes a busy machine a moment.
    fn once_of(threads: u64) -> Has {
        let end = Instant::now() + LONG;
        loop {
            let has = Has::now();
            if has.threads == threads || Instant::now() > end {
                return has;
            }
            std::thread::yield_now();
        }
    }
}

/// Peers that connect and then say nothing, or half of something, shut out nobody else,
/// and cost the node no more than the places that its door has: 20,000 of them, or as
/// many as HALF_OPEN says, for example 1000000. Unknown peers keep their connections open to
/// the end, as far as their process may have so many descriptors; so what one holds here
/// must be given back without its doing anything.
///
/// The node is a process, so that what it has can be counted; the unknown peers are
/// another, so that theirs does not count.
#[test]
fn half_open_connections_shut_nobody_out() {
    match std::env::var(PART).as_deref() {
        Ok("node") => flooded(),
        Ok(_) => unknown_peers(),
        Err(_) => {
            let out = part("node").output().unwrap();
            let said = String::from_utf8_lossy(&out.stdout);
            print!("{said}");
            // A name that is no test's any more runs nothing, and succeeds.
            assert!(
                out.status.success() && said.contains("1 passed"),
                "{said} {}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
    }
}

/// Connects from an address of this host.
fn connect_from(from: Ipv4Addr, to: SocketAddr) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let kind = (AddressFamily::INET, SocketType::STREAM);
    let fd = rustix::net::socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
    // The port is chosen at the connect: it may be in use towards other destinations.
    let one: libc::c_int = 1;
    // SAFETY: the option's value is one int, which outlives the call.
    let set = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_BIND_ADDRESS_NO_PORT,
            (&raw const one).cast(),
            size_of_val(&one) as _,
        )
    };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::net::bind(&fd, &SocketAddr::from((from, 0)))?;
    rustix::net::connect(&fd, &to)?;
    Ok(fd)
}

/// The unknown peers' process: knocks as often as it was told, says so, and goes on
/// until nobody listens to it any more.
fn unknown_peers() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let (knocks, at) = (knocks(), std::env::var(AT).unwrap().parse().unwrap());
    let want = knocks as u64 + 1000;
    let before = getrlimit(Resource::Nofile);
    let limit = |maximum| Rlimit {
        current: maximum,
        maximum,
    };
    // Raises the limit, if this process may; else it is used as it is.
    let _ = setrlimit(
        Resource::Nofile,
        limit(Some(want.max(before.maximum.unwrap_or(0)))),
    )
    .or_else(|_| setrlimit(Resource::Nofile, limit(before.maximum)));
    let most = getrlimit(Resource::Nofile)
        .current
        .map_or(knocks, |n| n as usize);
    // Some are the process's own, and each peer may add one at a time.
    let most = knocks.min(most.saturating_sub(100));
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (over, open) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|s| {
        for _ in 0..PEERS {
            s.spawn(|| {
                // Those that are open, the oldest first.
                let mut mine = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let k = i / OF_ONE % 60_000;
                    // The first come from the members' addresses.
                    let from = Ipv4Addr::new(127, 0, (k / 250) as u8, (1 + k % 250) as u8);
                    if open.load(Ordering::Relaxed) >= most && mine.pop_front().is_some() {
                        open.fetch_sub(1, Ordering::Relaxed);
                    }
                    // The door may have closed it before it has said anything.
                    match connect_from(from, at) {
                        Ok(fd) => {
                            if i % 2 == 0 {
                                let half = [22, 3, 1, 2, 0, 1];
                                let _ = rustix::net::send(&fd, &half, SendFlags::NOSIGNAL);
                            }
                            mine.push_back(fd);
                            open.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(_) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    if i + 1 == knocks {
                        let (open, failed) = (&open, &failed);
                        println!("knocked: {open:?} open at one time, {failed:?} refused");
                    }
                }
            });
        }
        // The end of it.
        let _ = io::stdin().read(&mut [0]);
        over.store(true, Ordering::Relaxed);
    });
}

/// The node's process.
fn flooded() {
    let c = Cluster::new();
    let (over, met) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut door = c.door();
    // Makes what is needed once before it counts.
    let threads = Has::now().threads;
    drop(c.pair(&node("b"), true));
    let before = Has::once_of(threads);
    let mut peak = before;
    let mut flood = part("peers")
        .env(AT, c.at().to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (says, ends) = (flood.stdout.take().unwrap(), flood.stdin.take().unwrap());
    let begin = Instant::now();
    let mut knocked = None;
    std::thread::scope(|s| {
        let (c, over, met) = (&c, &over, &met);
        let flood = s.spawn(move || {
            let mut lines = io::BufReader::new(says).lines().map(Result::unwrap);
            let said = lines.find(|l| l.contains("knocked: ")).expect("they knock");
            // Until enough members came in beside them.
            while met.load(Ordering::Relaxed) < MEMBERS && !over.load(Ordering::Relaxed) {
                std::thread::park_timeout(LONG);
            }
            let took = begin.elapsed();
            over.store(true, Ordering::Relaxed);
            drop(ends);
            // Until they are gone.
            let _ = lines.count();
            (said, took)
        });
        let wake = flood.thread().clone();
        let (turn, turns) = std::sync::mpsc::sync_channel(1);
        let members = s.spawn(move || {
            let os = c.os(&node("b"));
            let (mut came_in, mut tries) = (0, 0);
            // Where unknown peers alone were at the door for a while: members are few.
            while turns.recv().is_ok() && !over.load(Ordering::Relaxed) {
                tries += 1;
                let asked = os.connect(&c.listener.local_address()).and_then(|conn| {
                    until_proved(&*conn)?;
                    let _ = conn.send(&[IoSlice::new(b"?")])?;
                    recv(&*conn, &mut [0])
                });
                came_in += usize::from(matches!(asked, Ok(1)));
                met.store(came_in, Ordering::Relaxed);
                wake.unpark();
                // One that is shut out tries this often for nothing.
                if tries > 1000 * (came_in + 20) {
                    over.store(true, Ordering::Relaxed);
                    wake.unpark();
                }
            }
            (came_in, tries)
        });
        let mut inside = VecDeque::new();
        let mut looks = 0u64;
        while !members.is_finished() || !flood.is_finished() || door.half_open() > 0 {
            match door.next(Duration::from_millis(20)).unwrap() {
                Some(conn) => {
                    assert!(matches!(conn.proof(), Proof::Node { .. }));
                    let _ = conn.send(&[IoSlice::new(b"!")]);
                    inside.push_back(conn);
                    if inside.len() > 8 {
                        inside.pop_front();
                    }
                }
                // One is on its way, or its thread has ended.
                None => drop(turn.try_send(())),
            }
            assert!(door.half_open() <= HALF_OPEN);
            let _ = door.refusals();
            looks += 1;
            if looks.is_multiple_of(16) {
                let now = Has::now();
                peak.memory = peak.memory.max(now.memory);
                peak.descriptors = peak.descriptors.max(now.descriptors);
                peak.threads = peak.threads.max(now.threads);
            }
        }
        knocked = Some((flood.join().unwrap(), members.join().unwrap()));
    });
    assert!(flood.wait().unwrap().success());
    let after = Has::once_of(before.threads);
    let ((said, took), (came_in, tries)) = knocked.unwrap();
    println!(
        "{} unknown peers in {took:.0?}; {said}; {came_in} members came in beside them, in {tries} \
         tries; before {before:?}, at most {peak:?}, after {after:?}",
        knocks()
    );
    assert!(came_in >= MEMBERS, "shut out");
    assert!(peak.memory <= before.memory + ROOM);
    // The members' own ends, and what reads /proc and the unknown peers' words.
    assert!(peak.descriptors <= before.descriptors + HALF_OPEN + 8 + 8);
    assert!(peak.threads <= before.threads + 2);
    assert_eq!(after.descriptors, before.descriptors);
    assert_eq!(after.threads, before.threads);
    assert!(after.memory <= before.memory + ROOM);
}
