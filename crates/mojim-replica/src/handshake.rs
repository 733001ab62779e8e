//! How a session between two nodes begins, whether the peer is a mirror or a backup: the
//! answer to the greeting is checked, and the lanes are opened.
//!
//! Invariant: no lane carries a record before the peer has confirmed all lanes.

use std::sync::Arc;

use mojim_format::message::{Lane, Message, Refuse, Welcome};
use mojim_format::{FrameKind, Op, OpKind, RecordView};
use mojim_protocol::{History, Holding};

use crate::link::{Carrier, PAGE_LEN, Page};
use mojim_env::wire::Wire;
use mojim_env::{Conn, Error, Longest, Result};
use mojim_store::area::named_spill;
use mojim_store::log::CONTROL_LEN;
use mojim_store::store::{Store, find_in_spill};

/// What the peer's copy holds, by its answer.
pub(crate) fn theirs(w: &Welcome) -> Result<Holding> {
    let history = History::from_entries(&w.history)
        .ok_or_else(|| Error::Protocol("epochs out of order".into()))?;
    Ok(Holding {
        volume_id: w.volume_id,
        state: w.state,
        tail: w.tail,
        history,
    })
}

/// What files a peer can have.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// The largest one's bytes.
    pub size: u64,
    pub names: Longest,
}

impl Limits {
    /// Of a peer that has not answered yet.
    pub const UNKNOWN: Limits = Limits {
        size: u64::MAX,
        names: Longest::USUAL,
    };

    /// By the peer's answer.
    pub fn of(w: &Welcome) -> Limits {
        let (part, path) = (w.max_part, w.max_name);
        let names = Longest { part, path };
        let size = w.max_file;
        Limits { size, names }
    }
}

/// A name that a node cannot have, in messages.
pub(crate) fn too_long(name: &str, node: &str, most: Longest) -> String {
    let Longest { part, path } = most;
    format!(
        "file {name:?}: node {node} can have names of at most {path} bytes below its directory, and {part} between two slashes"
    )
}

/// Why node `peer` cannot have all files that are in `store`.
pub(crate) fn exceeds(store: &Store, peer: &str, limits: Limits) -> Option<String> {
    if let Some(name) = store.too_long(limits.names) {
        return Some(too_long(&name, peer, limits.names));
    }
    let too_large = |(_, size): &(String, u64)| *size > limits.size;
    let (name, size) = store.largest_file().filter(too_large)?;
    let most = at_most(peer, limits);
    Some(format!("file {name:?} has {size} bytes, {most}"))
}

/// Why node `peer` cannot have all files that record `r` of `store` makes, by itself or by the
/// spill file that it names.
pub(crate) fn makes_too_much(
    store: &Store,
    r: &RecordView<'_>,
    peer: &str,
    limits: Limits,
) -> Option<String> {
    let look = |op: &Op, payload: &[u8]| match op.kind {
        OpKind::Resize if op.offset > limits.size => {
            let (lsn, size, most) = (r.header.lsn, op.offset, at_most(peer, limits));
            Some(format!("LSN {lsn} makes a file of {size} bytes, {most}"))
        }
        OpKind::Create | OpKind::Rename => {
            let name = std::str::from_utf8(payload).ok()?;
            let takes = limits.names.takes(name);
            (!takes).then(|| too_long(name, peer, limits.names))
        }
        _ => None,
    };
    match named_spill(r) {
        // Without the file, the record is not sent either.
        Ok(Some((id, len))) => find_in_spill(&*store.open_spill(id).ok()?, len, look).ok()?,
        _ => r.ops().find_map(|(op, payload)| look(&op, payload)),
    }
}

fn at_most(peer: &str, limits: Limits) -> String {
    let most = limits.size;
    format!(
        "node {peer} can have files of at most {most} (its file system, or its limit RLIMIT_FSIZE)"
    )
}

/// The lanes of a session, while they are opened.
pub(crate) struct Opening(Vec<Link>);

/// The link of one lane.
struct Link {
    wire: Wire,
    carrier: Carrier,
    /// Position in the log from which records are sent.
    at: u64,
    is_open: bool,
}

impl Opening {
    /// Sends the first word of each lane of `store`, over a link of its own that
    /// `connect` makes. The peer has everything up to `resume`, and gave this `session`
    /// its number. `shared`: the lanes use shared memory.
    pub fn begin(
        store: &Store,
        (session, epoch): (u64, u64),
        resume: u64,
        shared: bool,
        connect: impl Fn() -> Result<Arc<dyn Conn>>,
    ) -> Result<Opening> {
        let sb = store.superblock();
        let mut lanes = Vec::new();
        for (i, log) in store.logs().iter().enumerate() {
            let mut wire = Wire::new(connect()?);
            let at = store.seek(i, resume);
            let lane = Lane {
                cluster: sb.cluster.clone(),
                volume: sb.volume.clone(),
                lane: i as u16,
                session,
                position: at,
                ring: if shared { log.size() } else { 0 },
                align: log.align() as u32,
            };
            wire.send(FrameKind::Lane, epoch, &lane);
            let carrier = if shared {
                let page = store.env().anonymous_memory(PAGE_LEN);
                Carrier::Shared(Page::new(page.map_err(|e| Error::io("shared page", &e))?))
            } else {
                Carrier::Stream
            };
            wire.flush()?;
            lanes.push(Link {
                wire,
                carrier,
                at,
                is_open: false,
            });
        }
        Ok(Opening(lanes))
    }

    /// Takes the peer's answers; true if any came.
    pub fn step(&mut self, store: &Store) -> Result<bool> {
        let mut moved = false;
        for (i, link) in self.0.iter_mut().enumerate() {
            link.wire.flush()?;
            while !link.is_open
                && let Some((f, body)) = link.wire.take_frame()?
            {
                moved = true;
                match f.kind {
                    // The peer asks for the ring, then confirms.
                    FrameKind::LaneOk if f.flags == 1 => link.pass(store, i)?,
                    FrameKind::LaneOk if f.flags == 0 => link.is_open = true,
                    FrameKind::Refuse => {
                        let text = Refuse::decode(&body).map_or_else(|e| e.to_string(), |r| r.text);
                        return Err(Error::Protocol(format!("lane {i} refused: {text}")));
                    }
                    k => return Err(Error::Protocol(format!("{k:?} on a lane"))),
                }
            }
        }
        Ok(moved)
    }

    /// Whether the peer has confirmed all lanes.
    pub fn is_done(&self) -> bool {
        self.0.iter().all(|link| link.is_open)
    }

    pub fn close(&self) {
        self.0.iter().for_each(|link| link.wire.conn.close());
    }

    /// For each lane the connection, what carries it, and the position from which records
    /// are sent.
    pub fn into_links(self) -> impl Iterator<Item = (Arc<dyn Conn>, Carrier, u64)> {
        let lanes = self.0.into_iter();
        lanes.map(|link| (link.wire.conn, link.carrier, link.at))
    }
}

impl Link {
    /// Passes the memory of lane `lane`'s ring to the peer.
    fn pass(&self, store: &Store, lane: usize) -> Result<()> {
        let ring = store.logs()[lane].memory();
        debug_assert!(ring.len() > CONTROL_LEN);
        let Carrier::Shared(page) = &self.carrier else {
            return Err(Error::Protocol("memory was asked for on a stream".into()));
        };
        let conn = &self.wire.conn;
        conn.send_memory(ring)
            .and_then(|()| conn.send_memory(page.memory()))
            .map_err(|e| Error::io("passing shared memory", &e))
    }
}
