//! The name in a certificate: the cluster, and the node or client that the
//! holder may speak as.
//!
//! Owns the form of the one DNS name that a certificate carries.
//!
//! Invariants:
//! - Only names that [`Subject::dns_name`] writes are accepted.
//! - No two subjects of any clusters share a name (node and cluster names have no dot).

/// The holder that a certificate names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Subject {
    /// The node of this name: the holder may speak as this node, and as no other.
    Node(String),
    /// An operator's tool: may send requests, and is not a node.
    Client,
}

/// The last part of every name, which is not a public domain.
const DOMAIN: &str = "mojim";

/// The longest cluster or node name that fits a certificate: one DNS label.
pub const MAX_LABEL: usize = 63;

impl Subject {
    /// The subject's name in a certificate of `cluster`: `NODE.node.CLUSTER.mojim` or
    /// `client.CLUSTER.mojim`.
    pub fn dns_name(&self, cluster: &str) -> String {
        match self {
            Subject::Node(node) => format!("{node}.node.{cluster}.{DOMAIN}"),
            Subject::Client => format!("client.{cluster}.{DOMAIN}"),
        }
    }

    /// The subject that `name` means in `cluster`; `None` if it is not a name of that cluster.
    pub fn parse(name: &str, cluster: &str) -> Option<Subject> {
        let parts: Vec<&str> = name.split('.').collect();
        let subject = match parts[..] {
            [node, "node", _, DOMAIN] if !node.is_empty() => Subject::Node(node.to_owned()),
            ["client", _, DOMAIN] => Subject::Client,
            _ => return None,
        };
        (subject.dns_name(cluster) == name).then_some(subject)
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Subject::Node(node) => write!(f, "node {node}"),
            Subject::Client => f.write_str("a client"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written_and_no_other_way() {
        let a = Subject::Node("a".into());
        assert_eq!(a.dns_name("c"), "a.node.c.mojim");
        assert_eq!(Subject::parse("a.node.c.mojim", "c"), Some(a));
        assert_eq!(Subject::parse("client.c.mojim", "c"), Some(Subject::Client));
        // A node of this name is not a client.
        assert_eq!(
            Subject::parse("client.node.c.mojim", "c"),
            Some(Subject::Node("client".into()))
        );
        for bad in [
            "",
            "a",
            "a.node.d.mojim",
            "A.node.c.mojim.",
            ".node.c.mojim",
            "a.b.node.c.mojim",
            "a.node.c",
            "client.d.mojim",
            "client.c.example",
            "a.node.C.mojim",
        ] {
            assert_eq!(Subject::parse(bad, "c"), None, "{bad}");
        }
    }
}
