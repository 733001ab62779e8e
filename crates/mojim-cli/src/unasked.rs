//! Why a node could not be asked, and what to do about that.
//!
//! Owns the causes that an operator mends in different ways: a daemon that does not run, and keys
//! that do not fit. A cause is known by the words of the end that found it.

use mojim_env::wire::unfit;

/// Why a node could not be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its daemon has keys, and this command has none.
    KeysThere,
    /// This command has keys, and who listens there has none.
    KeysHere,
    /// Both have keys, and one end does not take the other's.
    KeysDiffer,
    /// Another node of the cluster has that address.
    OtherNode,
    /// Nobody listens at its address.
    Silent,
}

/// Words of this command, and of the end that checks a certificate, about another node than the one
/// that was asked.
const OTHER: [&str; 2] = ["says that it is node", "answers where node"];

impl Cause {
    /// The cause of an error, by its text; `None` if it is another one.
    pub fn of(error: &str) -> Option<Cause> {
        let refused = format!("(os error {})", libc::ECONNREFUSED);
        let says = |words: &str| error.contains(words);
        if says(unfit::SPEAKS_TLS) {
            Some(Cause::KeysThere)
        } else if says(unfit::SPEAKS_NO_TLS) {
            Some(Cause::KeysHere)
        } else if OTHER.into_iter().any(says) {
            Some(Cause::OtherNode)
        } else if [unfit::CERTIFICATE, unfit::LINK, unfit::CERTIFICATE_OR_LINK]
            .into_iter()
            .any(says)
        {
            Some(Cause::KeysDiffer)
        } else {
            says(&refused).then_some(Cause::Silent)
        }
    }

    /// Whether the node may well be alive, and its program at work.
    pub fn is_of_keys(self) -> bool {
        self != Cause::Silent
    }

    /// What to do about node `name`.
    pub fn todo(self, name: &str) -> String {
        match self {
            Cause::KeysThere => format!(
                "the daemon of node {name} has `keys`, and this command's configuration names none: use the file that the nodes have. If the daemon's file is the wrong one, give it this one, and start it again: `mojim node --name {name}`"
            ),
            Cause::KeysHere => format!(
                "this command's configuration names `keys`, and the program at that address has none. Give node {name} the same file, authority.pem and node.{name}.pem, and start its daemon again: `mojim node --name {name}`. If another program has that address, end it, or change the address in the file"
            ),
            Cause::KeysDiffer => format!(
                "node {name} and this command have certificates of different authorities, or one has expired. Give both the same authority.pem. `mojim keys --renew {name}` makes the node's certificate, `mojim keys --renew-client` this command's. Then start the daemon of node {name} again: `mojim node --name {name}`"
            ),
            Cause::OtherNode => format!(
                "another node of this cluster has the address that this command's file gives to node {name}. Compare the addresses of all nodes in this file and in the nodes' files: two may be swapped. Give all nodes and this command the same file, then restart the daemons whose file changed: `mojim node --name {name}`"
            ),
            Cause::Silent => format!(
                "nobody listens at that address. Start the daemon of node {name} there: `mojim node --name {name}`. If it runs, its configuration has another address. If the node is lost for good, run `mojim replace --name {name} --with NEW --address IP:PORT`"
            ),
        }
    }
}
