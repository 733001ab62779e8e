//! The first words on a replica's links: who it is in its scheme.
//!
//! A replica is given one link by the primary, on which its [`Order`] comes
//! first, and in a chain, but for the first replica, one by the replica before
//! it. Behind the first words, over shared memory, come the log from which
//! records are to be copied and the pages with the positions. When all is
//! there, the replica says so to the primary. Whichever link is made first does
//! not matter.

use std::sync::Arc;
use std::time::Duration;

use mojim_env::{Conn, Env, Memory};
use mojim_env::{Error, Result};
use mojim_format::{Frame, FrameKind};
use mojim_replica::link::Wire;
use mojim_store::log::Log;
use serde::{Deserialize, Serialize};

use crate::EPOCH;

/// A run is set up on one host: who does not answer for so long will not.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// What carries records and acknowledgements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Streams.
    Tcp,
    /// The sender's log itself, and a page beside it; streams only make the link.
    Shm,
}

/// The shape of a log that is shared.
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

/// What one replica is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The volume's number, random for each run.
    pub volume: u64,
    /// What carries records from whoever sends them, and to the next.
    pub transport: Transport,
    /// Records come by the link that this order came by; else by another.
    pub first: bool,
    /// The address of the replica to which they are passed on.
    pub next: Option<String>,
    /// What is in the log is acknowledged to the primary.
    pub answers: bool,
}

/// Says a frame with these words.
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

/// The next frame.
pub(crate) fn hear(wire: &mut Wire, env: &dyn Env) -> Result<(Frame, Vec<u8>)> {
    let end = env.now() + LIMIT;
    loop {
        if let Some(frame) = wire.take_frame()? {
            return Ok(frame);
        }
        wait(&wire.conn, env, false, end)?;
    }
}

/// What a frame says.
pub(crate) fn words<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|e| Error::Protocol(format!("first words: {e}")))
}

/// Passes memory to the other end.
pub(crate) fn pass(conn: &dyn Conn, memory: &Memory) -> Result<()> {
    conn.send_memory(memory)
        .map_err(|e| Error::io("passing shared memory", &e))
}

/// Takes what was passed.
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
