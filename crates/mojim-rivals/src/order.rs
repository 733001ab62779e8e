//! The first messages on a replica's links, which give the replica its place in the
//! scheme.
//!
//! The primary makes one link to each replica, on which the replica's [`Order`] comes
//! first. In a chain, each replica but the first also gets a link from the replica before
//! it. Over shared memory, the first messages are followed by the log from which records
//! are to be copied, and by the pages with the positions. When everything is there, the
//! replica tells the primary. The links may be made in any order.

use std::sync::Arc;
use std::time::Duration;

use mojim_env::wire::Wire;
use mojim_env::{Conn, Env, Memory};
use mojim_env::{Error, Result};
use mojim_format::{Frame, FrameKind};
use mojim_store::log::Log;
use serde::{Deserialize, Serialize};

use crate::EPOCH;

/// A run is set up on one host: a node that has not answered for so long will not answer.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// What carries records and acknowledgements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP streams.
    Tcp,
    /// The sender's log itself, and a page beside it; streams only set up the link.
    Shm,
}

/// The layout of a shared log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ring {
    pub(crate) size: u64,
    pub(crate) align: u64,
}

impl Ring {
    pub(crate) fn of(log: &Log) -> Ring {
        Ring {
            size: log.size(),
            align: log.align(),
        }
    }
}

/// The instructions for one replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The volume's number, random for each run.
    pub volume: u64,
    /// What carries records from the sender to this replica, and from it to the next.
    pub transport: Transport,
    /// Whether records come by the link on which this order came; else by another link.
    pub first: bool,
    /// The address of the replica to which records are passed on.
    pub next: Option<String>,
    /// Whether this replica acknowledges to the primary what is in its log.
    pub answers: bool,
}

/// Sends a frame with these words as JSON.
pub(crate) fn say(
    wire: &mut Wire,
    env: &dyn Env,
    kind: FrameKind,
    words: &impl Serialize,
) -> Result<()> {
    let body = serde_json::to_vec(words).expect("plain structs");
    wire.queue(kind, EPOCH, 0, 0, &body);
    let end = env.now() + LIMIT;
    while !wire.flush()? {
        wait(&wire.conn, env, true, end)?;
    }
    Ok(())
}

/// Receives the next frame.
pub(crate) fn hear(wire: &mut Wire, env: &dyn Env) -> Result<(Frame, Vec<u8>)> {
    let end = env.now() + LIMIT;
    loop {
        if let Some(frame) = wire.take_frame()? {
            return Ok(frame);
        }
        wait(&wire.conn, env, false, end)?;
    }
}

/// Parses a frame's body.
pub(crate) fn words<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|e| Error::Protocol(format!("first words: {e}")))
}

/// Passes memory to the other end of the link.
pub(crate) fn pass(conn: &dyn Conn, memory: &Memory) -> Result<()> {
    conn.send_memory(memory)
        .map_err(|e| Error::io("passing shared memory", &e))
}

/// Receives memory that was passed.
pub(crate) fn take(conn: &dyn Conn, len: usize, write: bool) -> Result<Memory> {
    conn.recv_memory(len, write)
        .map_err(|e| Error::io("taking shared memory", &e))
}

fn wait(conn: &Arc<dyn Conn>, env: &dyn Env, to_send: bool, end: Duration) -> Result<()> {
    let left = end.saturating_sub(env.now());
    let came = conn.wait(to_send, left);
    match came.map_err(|e| Error::io(format!("link to {}", conn.peer()), &e))? {
        true => Ok(()),
        false => Err(Error::Timeout(format!("{} does not answer", conn.peer()))),
    }
}
