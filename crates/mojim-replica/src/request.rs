//! Requests to a node, from programs, nodes and the command.
//!
//! `docs/reference/requests.md`, "Requests", describes them.
//!
//! Owns the requests, and the answers by which a node or program decides. Each is one
//! JSON object. Its field `what` names the request, and `cluster` names the cluster that is meant.
//! A missing field has the default that is given here, if any. An unknown field is passed
//! over, so that a newer node can ask an older one.

use std::net::SocketAddr;
use std::path::PathBuf;

use mojim_protocol::Acknowledged;
use mojim_protocol::view::Register;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A request as it travels.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Question<R = Request> {
    /// The cluster that is meant.
    pub cluster: String,
    /// What is asked.
    #[serde(flatten)]
    pub request: R,
}

/// What may be asked. LSNs, epochs, offsets (bytes) and numbers of files are plain
/// numbers; `volume` is a volume's name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
#[allow(
    missing_docs,
    reason = "the fields are those of docs/reference/requests.md"
)]
pub enum Request {
    /// Whether the daemon answers: `true`.
    Pulse,
    /// All that is known of one volume or of all, for people: a JSON document. No node
    /// decides by it.
    Status {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        volume: Option<String>,
        /// Whether the volumes' registers are read too, which takes long during an
        /// election.
        #[serde(default = "yes")]
        register: bool,
    },
    /// What the node's copy has: [`Standing`].
    Standing { volume: String },
    /// Has the node commit what a dead program left in its logs: whether it does.
    Settle { volume: String },
    /// Whether a program may start here: [`Post`], as soon as one may or after `wait`
    /// milliseconds, a second at most.
    Post { volume: String, wait: u64 },
    /// The register's value: [`Register`].
    ViewRead { volume: String },
    /// Changes the register to `new`: whether its version was the one before that of
    /// `new`.
    ViewSwap { volume: String, new: Register },
    /// Which other nodes hold the volume: a list of [`Holder`].
    Holders { volume: String },
    /// The names of the voters, by the register's log.
    Voters,
    /// Has the voters give up the directory with which a voter was admitted, which is lost, so
    /// that the voter is admitted with another one: [`Retired`].
    Retire { voter: String },
    /// Has the node read its configuration file again, if its text has this sum.
    Reload { sum: u64 },
    /// A voter's call to another voter.
    Raft(RaftCall),
    /// Has the node become primary.
    Promote {
        volume: String,
        #[serde(default)]
        force: bool,
    },
    /// The files of the node's copy, and what changed in the list ([`Since`]).
    Files {
        volume: String,
        #[serde(flatten)]
        since: Since,
        #[serde(flatten)]
        part: Part,
    },
    /// Checksums of pages.
    Sums {
        volume: String,
        id: u64,
        offset: u64,
        pages: u64,
    },
    /// The bytes of one page of 4 KiB, and which of them were written ([`Since`]).
    Page {
        volume: String,
        id: u64,
        offset: u64,
        #[serde(flatten)]
        since: Since,
    },
    /// A reader's request: what is new since what it shows, and pages of a file.
    Read(Read),
    /// Puts the primary's bytes in the place of one page.
    Rewrite {
        volume: String,
        id: u64,
        offset: u64,
    },
    /// A program is about to attach: the daemon ends what it does with the copy.
    GiveWay { volume: String },
    /// Has the node give its copy up as soon as the primary sends another.
    CopyAnew {
        volume: String,
        /// The epoch of the primary that is to send the copy, if a program is attached there;
        /// else 0.
        #[serde(default)]
        epoch: u64,
    },
}

impl Request {
    /// Whether it changes what a node is or has, by an operator's word.
    pub fn is_order(&self) -> bool {
        use Request::{CopyAnew, Promote, Reload, Retire, Rewrite};
        matches!(
            self,
            Promote { .. } | Reload { .. } | Rewrite { .. } | CopyAnew { .. } | Retire { .. }
        )
    }
}

fn yes() -> bool {
    true
}

/// What the asking program has seen on another node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Since {
    /// The answer says what records after this LSN changed, if the node can tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// The epoch in which `after` was born on that other node.
    #[serde(default)]
    pub after_born: u64,
    /// The node waits, for a bounded time, until its files have all records up to this
    /// LSN.
    #[serde(default)]
    pub since: u64,
}

/// A part of a list of files, by ascending number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// From this number on.
    #[serde(default)]
    pub from: u32,
    /// Below this number, if it is not 0.
    #[serde(default)]
    pub until: u32,
    /// With checksums of the pages of small files.
    #[serde(default)]
    pub sums: bool,
}

/// A voter's question to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RaftCall {
    /// The voter that is asked.
    pub to: String,
    /// The voter that asks.
    pub from: String,
    /// The checksum of all voters' names, as the asking node knows them.
    pub voters: u32,
    /// The incarnation of the asking voter's directory; an older version does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<u64>,
    /// The incarnation that votes under the name of the voter that is asked, by the asking
    /// voter's log; none where no voter was admitted yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knows: Option<u64>,
    /// Which of Raft's calls.
    pub rpc: String,
    /// Its arguments.
    pub body: Value,
}

/// What a reader shows and wants.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// The volume's name.
    pub volume: String,
    /// The LSN that it shows.
    #[serde(default)]
    pub after: u64,
    /// The epoch that this LSN was born in.
    #[serde(default)]
    pub epoch: u64,
    /// The `volume_id` of the copy that it shows.
    #[serde(default)]
    pub volume_id: u64,
    /// That copy's number for the bytes of its files: another one after they were
    /// rewritten without a record, and after each opening of the copy.
    #[serde(default)]
    pub rewritten: u64,
    /// Milliseconds to wait for something newer.
    #[serde(default)]
    pub wait: u64,
    /// The file whose pages are wanted, by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Or by its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u32>,
    /// Byte offset in the file.
    #[serde(default)]
    pub offset: u64,
    /// Pages of 4 KiB from there on.
    #[serde(default)]
    pub pages: u64,
    /// Instead of a file: the list of files, from this number on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u32>,
}

/// In what state a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyState {
    /// There is none.
    New,
    /// What describes it cannot be read.
    Damaged,
    /// It is being read into memory.
    Loading,
    /// It was lost, or never came.
    Empty,
    /// All of it is there.
    Whole,
    /// Another one is taking its place.
    Switching,
}

/// What a node's copy of a volume has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// The copy's state.
    pub state: CopyState,
    /// The epoch of the view that it knows; 0: none.
    pub epoch: u64,
    /// That view's primary.
    pub primary: String,
    /// It has every record up to this one, as far as is known.
    pub last_lsn: u64,
    /// All up to this one is in its data files, durably.
    pub checkpoint: u64,
    /// Whether what it acknowledges is durable.
    pub persistent: bool,
    /// The process that is attached here; 0: one that has not begun its epoch.
    pub attached: Option<u64>,
    /// The copy is to be made anew, by an operator's word.
    pub distrusted: bool,
    /// What keeps the copy from going on.
    pub error: Option<String>,
    /// What it knows now to have been acknowledged, if it follows with a whole copy. A node
    /// of an earlier version does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known: Option<WireAcknowledged>,
}

/// What a node knows to have been acknowledged, whether it has the records or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireAcknowledged {
    /// Identity of the volume.
    pub volume_id: u64,
    /// The last LSN.
    pub lsn: u64,
    /// The epoch in which that LSN was born; 0: older than what the copy remembers.
    pub epoch: u64,
}

impl From<Acknowledged> for WireAcknowledged {
    fn from(a: Acknowledged) -> WireAcknowledged {
        WireAcknowledged {
            volume_id: a.volume_id,
            lsn: a.lsn,
            epoch: a.epoch.unwrap_or(0),
        }
    }
}

impl From<WireAcknowledged> for Acknowledged {
    fn from(k: WireAcknowledged) -> Acknowledged {
        Acknowledged {
            volume_id: k.volume_id,
            lsn: k.lsn,
            epoch: Some(k.epoch).filter(|e| *e != 0),
        }
    }
}

/// Whether a program may start on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Post {
    /// The register's primary.
    pub primary: Option<String>,
    /// The register's primary is this node, and its copy is free and of that view.
    pub ready: bool,
}

/// What the voters know of a voter's directory that may be lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Retired {
    /// It was given up by this question.
    Now,
    /// There is none: the voter is admitted as soon as it answers.
    Waits,
    /// The voter runs with it: nothing is lost.
    Votes,
}

/// A node that holds a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its name.
    pub node: String,
    /// Its address.
    pub address: SocketAddr,
    /// Its socket, where it is reached on this host.
    pub socket: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn question(v: Value) -> Result<Request, String> {
        serde_json::from_value::<Question>(v)
            .map(|q| q.request)
            .map_err(|e| e.to_string())
    }

    /// The conversation of docs/reference/requests.md, as older builds speak it too.
    #[test]
    fn requests_are_what_the_protocol_says() {
        let volume = || "v".to_owned();
        let since = Since {
            after: Some(9),
            after_born: 3,
            since: 8,
        };
        for (said, meant) in [
            (json!({ "what": "pulse" }), Request::Pulse),
            (
                json!({ "what": "status", "register": true }),
                Request::Status {
                    volume: None,
                    register: true,
                },
            ),
            (
                json!({ "what": "promote", "volume": "v", "force": true }),
                Request::Promote {
                    volume: volume(),
                    force: true,
                },
            ),
            (
                json!({ "what": "page", "volume": "v", "id": 1, "offset": 4096,
                        "after": 9, "after_born": 3, "since": 8 }),
                Request::Page {
                    volume: volume(),
                    id: 1,
                    offset: 4096,
                    since,
                },
            ),
            (
                json!({ "what": "view-read", "volume": "v" }),
                Request::ViewRead { volume: volume() },
            ),
            (
                json!({ "what": "raft", "to": "b", "from": "a", "voters": 7, "life": 5,
                        "rpc": "vote", "body": { "n": u64::MAX } }),
                Request::Raft(RaftCall {
                    to: "b".into(),
                    from: "a".into(),
                    voters: 7,
                    life: Some(5),
                    knows: None,
                    rpc: "vote".into(),
                    body: json!({ "n": u64::MAX }),
                }),
            ),
        ] {
            let mut whole = said;
            whole["cluster"] = json!("c");
            let typed = Question {
                cluster: "c".into(),
                request: &meant,
            };
            assert_eq!(serde_json::to_value(&typed).unwrap(), whole);
            assert_eq!(question(whole).unwrap(), meant);
        }
    }

    /// What an older build leaves out has its default; what a newer one adds is passed over.
    #[test]
    fn what_is_missing_has_a_default() {
        let asked = json!({ "cluster": "c", "what": "promote", "volume": "v", "new": 1 });
        let volume = "v".to_owned();
        let force = false;
        assert_eq!(question(asked), Ok(Request::Promote { volume, force }));
        let asked = json!({ "cluster": "c", "what": "files", "volume": "v" });
        let Ok(Request::Files { since, .. }) = question(asked) else {
            panic!("not a request for files");
        };
        assert_eq!(since, Since::default());
        for wrong in [
            json!({ "cluster": "c", "what": "conquer" }),
            json!({ "cluster": "c" }),
            json!({ "what": "pulse" }),
            json!({ "cluster": "c", "what": "promote" }),
            json!({ "cluster": "c", "what": "reload", "sum": "x" }),
            json!([1]),
        ] {
            assert!(question(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
