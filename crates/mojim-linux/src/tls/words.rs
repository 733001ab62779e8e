//! Why keys do not fit, in an operator's words.
//!
//! Owns the words for rustls' errors and for the alerts of TLS. The caller adds the advice, since it
//! knows the file, or the node.

use rustls::{AlertDescription, CertificateError, Error};

/// Why a certificate or a link is refused at this end.
pub(super) fn of(e: &Error) -> String {
    match e {
        Error::InvalidCertificate(why) => certificate(why),
        Error::InconsistentKeys(_) => "its key is not the one of its certificate".into(),
        Error::NoCertificatesPresented => "it showed no certificate".into(),
        Error::AlertReceived(why) => alert(*why),
        e => e.to_string(),
    }
}

/// What is wrong with a certificate.
pub(super) fn certificate(e: &CertificateError) -> String {
    use CertificateError::*;
    match e {
        Expired => "it has expired, by this machine's clock".into(),
        ExpiredContext { time, not_after } => {
            let since = time.as_secs().saturating_sub(not_after.as_secs());
            format!("it expired {} ago, by this machine's clock", long(since))
        }
        NotValidYet => "it is not valid yet, by this machine's clock".into(),
        NotValidYetContext { time, not_before } => {
            let until = not_before.as_secs().saturating_sub(time.as_secs());
            let until = long(until);
            format!("it is not valid for another {until}, by this machine's clock")
        }
        UnknownIssuer
        | BadSignature
        | UnsupportedSignatureAlgorithmContext { .. }
        | UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "another authority made it than the one of authority.pem here".into()
        }
        NotValidForName | NotValidForNameContext { .. } => "it has another name".into(),
        InvalidPurpose | InvalidPurposeContext { .. } => {
            "it is for another use: a node needs a node's certificate, not a client's".into()
        }
        BadEncoding => "it cannot be read".into(),
        Other(why) => why.0.to_string(),
        e => e.to_string(),
    }
}

/// Why the other end refuses, as far as its alert says so.
pub(super) fn alert(why: AlertDescription) -> String {
    use AlertDescription as A;
    let text = match why {
        A::CertificateExpired => {
            "by its clock, this end's certificate has expired, or is not valid yet"
        }
        A::UnknownCA | A::DecryptError => {
            "another authority made this end's certificate than the one of its authority.pem"
        }
        A::UnsupportedCertificate => "this end's certificate is for another use",
        A::CertificateRequired => "this end showed no certificate",
        // A name that its configuration does not have, or of another cluster.
        A::CertificateUnknown | A::AccessDenied => {
            "its configuration has no member of the name in this end's certificate, or expects \
             another one here"
        }
        A::BadCertificate => "it cannot read this end's certificate",
        A::NoApplicationProtocol => "it speaks another protocol, or does not allow plain links",
        A::UnexpectedMessage => "it received something else than it expected",
        why => return format!("TLS alert {}", u8::from(why)),
    };
    text.into()
}

/// A time in words.
fn long(seconds: u64) -> String {
    let (n, what) = match seconds {
        0..120 => (seconds, "second"),
        120..7200 => (seconds / 60, "minute"),
        7200..172_800 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {what}{s}")
}
