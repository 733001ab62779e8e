//! Where a cluster's certificates and keys lie in its directory of keys.

use std::path::{Path, PathBuf};

use mojim_format::certificate::Subject;

/// The certificate of a cluster's authority, in its directory of keys.
pub fn authority(keys: &Path) -> PathBuf {
    keys.join("authority.pem")
}

/// The authority's key: kept where certificates are made, and on no node.
pub fn authority_key(keys: &Path) -> PathBuf {
    keys.join("authority.key")
}

/// A subject's certificate and its key.
pub fn certificate(keys: &Path, subject: &Subject) -> PathBuf {
    keys.join(match subject {
        Subject::Node(name) => format!("node.{name}.pem"),
        Subject::Client => "client.pem".into(),
    })
}
