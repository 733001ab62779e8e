//! The authority of a cluster, and the certificates that it gives to its nodes and clients.
//!
//! Owns the contents of certificates. The caller writes them to files, and `mojim-linux` decides
//! which to believe.
//!
//! Invariants:
//!
//! - A certificate carries exactly one name, that of `mojim_format::certificate`.
//! - A client's certificate is valid neither as a server's nor as a node's.
//! - An authority signs for one cluster only, and no further authorities.
//!
//! Only `mojim-cli` and `mojim-bench` use this crate.

use std::time::{Duration, SystemTime};

use mojim_format::certificate::Subject;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};

/// How long an authority is valid.
pub const AUTHORITY_DAYS: u32 = 10 * 365;
/// How long a certificate is valid by default.
pub const DAYS: u32 = 825;
/// A clock that is this far behind still finds a new certificate valid.
const SKEW: Duration = Duration::from_secs(3600);

/// A certificate could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key of the authority cannot be read.
    #[error("this is no authority's key: {0}")]
    Key(rcgen::Error),
    /// A certificate cannot be made from these names and times.
    #[error("making a certificate for {who}: {error}")]
    Make {
        /// Whose certificate.
        who: String,
        /// Why.
        error: rcgen::Error,
    },
}

/// A cluster's authority.
pub struct Authority {
    cluster: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A new authority.
pub struct NewAuthority {
    /// The authority itself.
    pub authority: Authority,
    /// Its certificate, which every node must have (PEM).
    pub certificate: String,
    /// Its key, with which certificates are made: no node needs it (PEM).
    pub key: String,
}

/// When a certificate is valid.
#[derive(Debug, Clone, Copy)]
pub struct Validity {
    /// From then on.
    pub from: SystemTime,
    /// Until then.
    pub to: SystemTime,
}

impl Validity {
    /// From now on, for some days.
    pub fn days(days: u32) -> Validity {
        let now = SystemTime::now();
        Validity {
            from: now - SKEW,
            to: now + Duration::from_secs(u64::from(days) * 24 * 3600),
        }
    }

    fn apply(self, p: &mut CertificateParams) {
        p.not_before = self.from.into();
        p.not_after = self.to.into();
    }
}

fn authority_params() -> CertificateParams {
    let mut p = CertificateParams::default();
    p.distinguished_name = DistinguishedName::new();
    p.distinguished_name
        .push(DnType::CommonName, "Mojim cluster authority");
    p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    p.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    p
}

impl Authority {
    /// Makes a new authority for a cluster.
    pub fn make(cluster: &str) -> Result<NewAuthority, Error> {
        let failed = |error| Error::Make {
            who: "the authority".into(),
            error,
        };
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = authority_params();
        Validity::days(AUTHORITY_DAYS).apply(&mut params);
        let certificate = params.self_signed(&key).map_err(failed)?.pem();
        let pem = key.serialize_pem();
        Ok(NewAuthority {
            authority: Authority {
                cluster: cluster.to_owned(),
                issuer: Issuer::new(params, key),
            },
            certificate,
            key: pem,
        })
    }

    /// The authority whose key this is.
    pub fn from_key(cluster: &str, key: &str) -> Result<Authority, Error> {
        let key = KeyPair::from_pem(key).map_err(Error::Key)?;
        Ok(Authority {
            cluster: cluster.to_owned(),
            issuer: Issuer::new(authority_params(), key),
        })
    }

    /// A certificate for a subject and its new key, one after the other (PEM).
    pub fn issue(&self, subject: &Subject, validity: Validity) -> Result<String, Error> {
        let failed = |error| Error::Make {
            who: subject.to_string(),
            error,
        };
        let name = subject.dns_name(&self.cluster);
        let mut p = CertificateParams::default();
        p.distinguished_name = DistinguishedName::new();
        p.distinguished_name
            .push(DnType::CommonName, subject.to_string());
        let name = name.try_into().map_err(failed)?;
        p.subject_alt_names = vec![SanType::DnsName(name)];
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if let Subject::Node(_) = subject {
            p.extended_key_usages
                .push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        p.use_authority_key_identifier_extension = true;
        validity.apply(&mut p);
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = p.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(certificate.pem() + &key.serialize_pem())
    }
}
