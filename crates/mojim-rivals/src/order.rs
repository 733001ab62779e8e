//! The first words on a replica's links: who it is in its scheme.
//!
//! A replica is given one link by the primary, on which its [`Order`] comes
//! first, and in a chain, but for the first replica, one by the replica before
//! it, on which a frame without a body comes first. When all links are there, it
//! says so to the primary. Whichever link is made first does not matter.

use std::sync::Arc;
use std::time::Duration;

use mojim::env::{Conn, Env};
use mojim::link::Wire;
use mojim::{Error, Result};
use mojim_format::{Frame, FrameKind};
use serde::{Deserialize, Serialize};

use crate::EPOCH;

/// A run is set up on one host: who does not answer for so long will not.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// What one replica is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The volume's number, random for each run.
    pub volume: u64,
    /// Records come by the link that this order came by; else by another.
    pub first: bool,
    /// The address of the replica to which they are passed on.
    pub next: Option<String>,
    /// What is in the log is acknowledged to the primary.
    pub answers: bool,
}

/// Says a frame with this body.
pub(crate) fn say(wire: &mut Wire, env: &dyn Env, kind: FrameKind, body: &[u8]) -> Result<()> {
    wire.queue(kind, EPOCH, 0, 0, body);
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

fn wait(conn: &Arc<dyn Conn>, env: &dyn Env, to_send: bool, end: Duration) -> Result<()> {
    let left = end.saturating_sub(env.now());
    let came = conn.wait(to_send, left);
    match came.map_err(|e| Error::io(format!("link to {}", conn.peer()), &e))? {
        true => Ok(()),
        false => Err(Error::Timeout(format!("{} does not answer", conn.peer()))),
    }
}
