//! Opens a subject by its kind, and recovers what one has left.
//!
//! Owns the choice of the code for each kind. Invariant: what recovers is whole,
//! whatever was broken in what is recovered.

use crate::Result;
use crate::naive::Naive;
use crate::redo::Redo;
use crate::shipped::Shipped;
use crate::subject::{Kind, Place, Subject};

/// Opens a subject, making what is not there.
pub fn open(kind: Kind, place: &Place, seed: u64) -> Result<Box<dyn Subject>> {
    std::fs::create_dir_all(&place.dir)?;
    Ok(match kind {
        Kind::Mojim(fault) => Box::new(Shipped::open(place, seed, fault, false)?),
        Kind::Naive => Box::new(Naive::open(place, seed)?),
        Kind::Nosync => Box::new(Redo::open(place, seed, false)?),
        Kind::Log => Box::new(Redo::open(place, seed, true)?),
    })
}

/// Recovers what a subject left when the power went, and returns the region.
/// `place.ring` must be new.
pub fn recover(kind: Kind, place: &Place, seed: u64) -> Result<Vec<u8>> {
    std::fs::create_dir_all(&place.dir)?;
    match kind {
        // Whatever broke it, what recovers it is whole.
        Kind::Mojim(_) => Shipped::open(place, seed, None, true)?.read(),
        Kind::Naive => Naive::read(place, seed),
        Kind::Nosync | Kind::Log => Redo::open(place, seed, true)?.read(),
    }
}
