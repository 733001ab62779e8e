//! Whole-machine crashes: takes the page cache, the disk's cache or the power
//! away from programs that acknowledge what they made durable, and compares
//! every byte of what they recover.
//!
//! Owns the workload, those who run it, and two rungs of `docs/testing.md`:
//! page-cache loss and block history. Invariant: a rung counts only if it finds
//! the broken controls and every broken Mojim, and finds nothing in `mojim` and
//! `log`.

pub mod acks;
pub mod machine;
mod naive;
pub mod plug;
mod redo;
mod shipped;
pub mod subject;
pub mod workload;

use acks::Acks;
use subject::{Kind, Place};
use workload::Model;

/// Whatever went wrong.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Makes steps 1 to `steps`, acknowledging each, and 0 when all is set up.
pub fn work(kind: Kind, place: &Place, seed: u64, steps: u64, acks: &Acks) -> Result<()> {
    let mut subject = subject::open(kind, place, seed)?;
    acks.put(0)?;
    for step in 1..=steps {
        if workload::reopens(seed, step) {
            subject.close()?;
            subject = subject::open(kind, place, seed)?;
        }
        subject.commit(&workload::changes(seed, step))?;
        acks.put(step)?;
    }
    subject.close()
}

/// Recovers, and says after which step all is as it was; it must be one from
/// `acknowledged` to `started`.
pub fn check(
    kind: Kind,
    place: &Place,
    model: &mut Model,
    acknowledged: u64,
    started: u64,
) -> std::result::Result<u64, String> {
    let found = subject::recover(kind, place, model.seed())
        .map_err(|e| format!("lost: it does not open any more: {e}"))?;
    workload::judge(model, &found, acknowledged, started)
}
