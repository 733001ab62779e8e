//! The certificate with which this process proves its name, and which peers it believes.
//!
//! Owns the reading of certificate files and every decision about a peer's certificate.
//!
//! Invariants:
//!
//! - A peer is believed only if the cluster's authority signed its certificate, for this use, and
//!   it is valid now. The certificate must also carry exactly one name, of this cluster. A node
//!   must be one that the configuration has.
//! - A connection that was made to an address is to the node that the configuration has
//!   there, or it fails. A program that runs on while a node is replaced is told of the
//!   new one by the daemon beside it (`Keys::meet`).
//! - Connections are TLS 1.3 with one suite. Nothing is resumed, so each connection proves all of
//!   it anew, and a node keeps nothing for connections that are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, RwLock};

use mojim_env::locks;
use mojim_format::certificate::Subject;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme,
};

use zeroize::{Zeroize, Zeroizing};

use super::words;
use crate::{disk, error, trust};
use mojim_config::Config;

/// The longest certificate file.
const MAX_FILE: usize = 64 << 10;

/// What is asked for in the handshake (ALPN), and so bound to it: the connecting end
/// offers one, the listening end takes one that it knows.
pub(super) const ENCRYPTED: &[u8] = b"mojim/1";
/// The first bytes are sealed, what follows is plain.
pub(super) const PLAIN: &[u8] = b"mojim/1-plain";

/// The keys of one node, or of a client.
pub struct Keys {
    server: Option<Arc<ServerConfig>>,
    /// By address: the node there, and how to connect to it, encrypted or not.
    clients: RwLock<BTreeMap<SocketAddr, ToOne>>,
    cluster: Arc<Cluster>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

type ToOne = (String, [Arc<ClientConfig>; 2]);

/// Which peers may be believed.
#[derive(Debug)]
struct Cluster {
    name: String,
    nodes: RwLock<BTreeSet<String>>,
    roots: Arc<RootCertStore>,
    /// Checks the certificate chain of a connecting peer.
    chains: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
}

fn wrong(path: &Path, what: impl std::fmt::Display) -> io::Error {
    error(
        io::ErrorKind::InvalidData,
        format!("{}: {what}", path.display()),
    )
}

/// Reads a file that nobody else can change; a secret one must be closed to other users.
/// `get`: how to get the right one.
fn read(path: &Path, secret: bool, get: &str) -> io::Result<Vec<u8>> {
    let named = |e: io::Error| {
        let what = match e.kind() {
            io::ErrorKind::NotFound => format!("there is no such file. {get}"),
            io::ErrorKind::PermissionDenied => format!(
                "user {} may not read it. Give the file to that user (chown), or run this as the file's owner",
                rustix::process::geteuid().as_raw()
            ),
            _ => e.to_string(),
        };
        error(e.kind(), format!("{}: {what}", path.display()))
    };
    let stat = rustix::fs::stat(path).map_err(|e| named(e.into()))?;
    if secret {
        let mode = stat.st_mode & 0o777;
        if mode & 0o077 != 0 {
            let text = format!(
                "{}: others may use this key (mode {mode:03o}); chmod 600 it, and renew it if they may have",
                path.display()
            );
            return Err(error(io::ErrorKind::PermissionDenied, text));
        }
    }
    trust::check_key(path, &stat)?;
    let bytes = disk::read_start(path, MAX_FILE + 1).map_err(named)?;
    if bytes.len() > MAX_FILE {
        return Err(wrong(path, "too long for a certificate"));
    }
    Ok(bytes)
}

fn provider() -> Arc<CryptoProvider> {
    let all = ring::default_provider();
    Arc::new(CryptoProvider {
        cipher_suites: vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256],
        kx_groups: vec![ring::kx_group::X25519],
        ..all
    })
}

/// How to get the file of this subject.
fn how_to_get(config: &Config, subject: &Subject) -> String {
    let (renew, file) = match subject {
        Subject::Node(name) => (format!("--renew {name}"), format!("node.{name}.pem")),
        Subject::Client => ("--renew-client".to_owned(), "client.pem".to_owned()),
    };
    format!(
        "Where the certificates are made, `mojim keys --config {} {renew}` makes {file}: copy that file here",
        config.path.display()
    )
}

impl Drop for Keys {
    fn drop(&mut self) {
        // What rustls made of it goes with its configurations, as it is.
        self.key.zeroize();
    }
}

impl Keys {
    /// Reads the keys of `subject` in the configuration's directory of keys.
    pub(crate) fn load(config: &Config, dir: &Path, subject: &Subject) -> io::Result<Arc<Keys>> {
        let authority = mojim_config::key_files::authority(dir);
        let own = mojim_config::key_files::certificate(dir, subject);
        trust::check_keys(dir)?;
        let get = "Copy it from where the certificates are made";
        let mut roots = RootCertStore::empty();
        let text = read(&authority, false, get)?;
        let unfit = || wrong(&authority, format!("no certificate of an authority. {get}"));
        let root = CertificateDer::from_pem_slice(&text).map_err(|_| unfit())?;
        roots.add(root).map_err(|_| unfit())?;
        let get = how_to_get(config, subject);
        let text = Zeroizing::new(read(&own, true, &get)?);
        let unfit = |what: &str| wrong(&own, format!("{what}. {get}"));
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        let chain = chain.map_err(|_| unfit("it has no certificate that can be read"))?;
        let first = chain
            .first()
            .ok_or_else(|| unfit("it has no certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(&text);
        let key = key.map_err(|_| unfit("it has no key that can be read"))?;
        let (roots, provider) = (Arc::new(roots), provider());
        let chains =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let cluster = Arc::new(Cluster {
            name: config.cluster.clone(),
            nodes: RwLock::new(config.nodes.keys().cloned().collect()),
            roots,
            chains: chains.map_err(|e| wrong(&authority, e))?,
            provider,
        });
        // A wrong file is reported here, not as a refusal by every other node.
        let named = cluster.name_in(first);
        let named = named.map_err(|e| unfit(&words::of(&e)))?;
        if named != *subject {
            return Err(unfit(&format!("it is the certificate of {named}")));
        }
        cluster
            .chains
            .verify_client_cert(first, &chain[1..], UnixTime::now())
            .map_err(|e| unfit(&words::of(&e)))?;
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &cluster.provider)
            .map_err(|e| unfit(&words::of(&e)))?;

        let server = match subject {
            Subject::Client => None,
            Subject::Node(_) => Some(cluster.server(config, chain.clone(), key.clone_key())?),
        };
        let keys = Keys {
            server,
            clients: RwLock::default(),
            cluster,
            chain,
            key,
        };
        for n in config.nodes.values() {
            keys.meet(&n.name, n.address)?;
        }
        Ok(Arc::new(keys))
    }

    /// Adds a node of this cluster, and where it listens.
    pub(crate) fn meet(&self, name: &str, at: SocketAddr) -> io::Result<()> {
        let to = |protocol: &[u8]| {
            let (chain, key) = (self.chain.clone(), self.key.clone_key());
            self.cluster.client(name, protocol, chain, key)
        };
        let both = [to(ENCRYPTED)?, to(PLAIN)?];
        let mut nodes = locks::write(&self.cluster.nodes);
        nodes.insert(name.to_owned());
        drop(nodes);
        let mut clients = locks::write(&self.clients);
        clients.insert(at, (name.to_owned(), both));
        Ok(())
    }

    /// How to connect to the node at `to`; its name.
    pub(super) fn towards(
        &self,
        to: &SocketAddr,
        encrypt: bool,
    ) -> io::Result<(String, Arc<ClientConfig>)> {
        let clients = locks::read(&self.clients);
        let (name, both) = clients.get(to).ok_or_else(|| {
            let text = format!(
                "no node of cluster {} has the address {to}",
                self.cluster.name
            );
            error(io::ErrorKind::InvalidInput, text)
        })?;
        Ok((name.clone(), both[usize::from(!encrypt)].clone()))
    }

    /// How to answer a connecting peer; only nodes can.
    pub(super) fn server(&self) -> io::Result<Arc<ServerConfig>> {
        self.server.clone().ok_or_else(|| {
            error(
                io::ErrorKind::Unsupported,
                "a client's certificate is none to listen with",
            )
        })
    }

    /// The subject of a certificate that the handshake has accepted.
    pub(super) fn name_in(&self, certificate: &CertificateDer<'_>) -> io::Result<Subject> {
        self.cluster.name_in(certificate).map_err(io::Error::other)
    }
}

fn other(text: String) -> rustls::Error {
    let inner = Arc::new(io::Error::other(text));
    rustls::Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(inner)))
}

impl Cluster {
    /// The one name in a certificate, if it is of this cluster.
    fn name_in(&self, certificate: &CertificateDer<'_>) -> Result<Subject, rustls::Error> {
        let parsed = webpki::EndEntityCert::try_from(certificate)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let mut names = parsed.valid_dns_names();
        let (Some(name), None) = (names.next(), names.next()) else {
            return Err(other("a certificate must have one name".into()));
        };
        let subject = Subject::parse(name, &self.name)
            .ok_or_else(|| other(format!("{name:?} is no name of cluster {}", self.name)))?;
        let nodes = locks::read(&self.nodes);
        if let Subject::Node(n) = &subject
            && !nodes.contains(n)
        {
            return Err(other(format!("the configuration has no node {n:?}")));
        }
        Ok(subject)
    }

    fn server(
        self: &Arc<Cluster>,
        config: &Config,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> io::Result<Arc<ServerConfig>> {
        let verifier = Arc::new(FromMember(self.clone()));
        let mut c = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(io::Error::other)?;
        c.send_tls13_tickets = 0;
        c.session_storage = Arc::new(NoServerSessionStorage {});
        c.enable_secret_extraction = true;
        c.alpn_protocols = vec![ENCRYPTED.to_vec()];
        if config.volumes.values().any(|v| !v.encrypt) {
            c.alpn_protocols.push(PLAIN.to_vec());
        }
        Ok(Arc::new(c))
    }

    fn client(
        self: &Arc<Cluster>,
        to: &str,
        protocol: &[u8],
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> io::Result<Arc<ClientConfig>> {
        let verifier = Arc::new(ToNode {
            cluster: self.clone(),
            node: to.to_owned(),
        });
        let mut c = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(chain, key)
            .map_err(io::Error::other)?;
        c.resumption = Resumption::disabled();
        c.enable_sni = false;
        c.enable_secret_extraction = true;
        c.alpn_protocols = vec![protocol.to_vec()];
        Ok(Arc::new(c))
    }

    fn check_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let all = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, dss, all)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        let all = &self.provider.signature_verification_algorithms;
        all.supported_schemes()
    }
}

fn no_tls12() -> Result<HandshakeSignatureValid, rustls::Error> {
    Err(rustls::Error::PeerIncompatible(
        rustls::PeerIncompatible::Tls12NotOffered,
    ))
}

/// Believes only one node at the other end.
#[derive(Debug)]
struct ToNode {
    cluster: Arc<Cluster>,
    node: String,
}

impl ServerCertVerifier for ToNode {
    /// The name that is expected is this verifier's, not the handshake's.
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        rustls::client::verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.cluster.roots,
            between,
            now,
            self.cluster.provider.signature_verification_algorithms.all,
        )?;
        let expected = Subject::Node(self.node.clone());
        let named = self.cluster.name_in(certificate)?;
        if named != expected {
            return Err(other(format!("{named} answers where {expected} should")));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.cluster.check_signature(message, certificate, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.cluster.schemes()
    }
}

/// Believes a member of the cluster by the name in its certificate.
#[derive(Debug)]
struct FromMember(Arc<Cluster>);

impl ClientCertVerifier for FromMember {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A connecting peer has one certificate and needs no hint.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let yes = self
            .0
            .chains
            .verify_client_cert(certificate, between, now)?;
        self.0.name_in(certificate)?;
        Ok(yes)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.check_signature(message, certificate, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.schemes()
    }
}
