//! A spill file on its way to a mirror or a backup, ahead of the record that names it.
//!
//! Invariant: the peer is asked to confirm the file when all of its bytes are sent, once.

use std::sync::Arc;

use mojim_format::FrameKind;
use mojim_format::message::CopyData;

use mojim_copy::copy_pass::{COPY_BACKLOG, COPY_CHUNK};
use mojim_env::wire::Wire;
use mojim_env::{Error, File, Result};

/// A spill file that is to be sent.
#[derive(Clone)]
pub(crate) struct SpillFile {
    /// Its number.
    pub id: u64,
    /// Its bytes.
    pub len: u64,
    pub file: Arc<dyn File>,
}

/// A spill file that is being sent.
pub(crate) struct SpillOut {
    spill: SpillFile,
    /// Bytes that were queued on the link.
    at: u64,
    /// Bytes that the link has taken.
    taken: u64,
    /// The request for the confirmation is queued.
    ended: bool,
    /// The link has taken that request too.
    confirming: bool,
}

/// What [`SpillOut::pump`] did.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    /// Something was handed to the link.
    pub moved: bool,
    /// The link has taken more than ever before.
    pub further: bool,
}

impl SpillOut {
    /// A file of which nothing is sent yet.
    pub fn new(spill: SpillFile) -> SpillOut {
        SpillOut {
            spill,
            at: 0,
            taken: 0,
            ended: false,
            confirming: false,
        }
    }

    /// Its number.
    pub fn id(&self) -> u64 {
        self.spill.id
    }

    /// Bytes that the link has taken.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether an answer that names the file can be the confirmation.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Whether everything is sent: the peer makes the file durable.
    pub fn is_confirming(&self) -> bool {
        self.confirming
    }

    /// Sends what the link takes now.
    pub fn pump(&mut self, wire: &mut Wire, epoch: u64) -> Result<Sent> {
        let mut sent = Sent::default();
        while !self.ended && wire.backlog() < COPY_BACKLOG {
            sent.moved = true;
            self.queue(wire, epoch)?;
        }
        wire.flush()?;
        let backlog = wire.backlog() as u64;
        let taken = self.at.saturating_sub(backlog);
        let confirming = self.ended && backlog == 0;
        sent.further = taken > self.taken || confirming && !self.confirming;
        if sent.further {
            self.taken = taken;
            self.confirming |= confirming;
        }
        Ok(sent)
    }

    /// Hands the next piece to the link, or asks for the confirmation.
    fn queue(&mut self, wire: &mut Wire, epoch: u64) -> Result<()> {
        let SpillFile { id, len, file } = &self.spill;
        if self.at >= *len {
            wire.queue(FrameKind::Spill, epoch, *id, 1, &[]);
            self.ended = true;
            return Ok(());
        }
        let n = (COPY_CHUNK as u64).min(len - self.at) as usize;
        let mut bytes = vec![0; n];
        let got = file
            .read_at(&mut bytes, self.at)
            .map_err(|e| Error::io("reading a spill file", &e))?;
        if got < n {
            return Err(Error::Poisoned("a spill file became shorter".into()));
        }
        let piece = CopyData {
            id: *id,
            offset: self.at,
            bytes,
        };
        wire.send(FrameKind::Spill, epoch, &piece);
        self.at += n as u64;
        Ok(())
    }
}
