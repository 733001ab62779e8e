//! Opens a subject by its kind, and recovers what a subject has left.
//!
//! Owns the choice of the code for each kind. Invariant: the engine that recovers has no
//! fault, whatever fault the crashed one had.

use crate::Result;
use crate::heap::{self, Persistent};
use crate::naive::Naive;
use crate::redo::Redo;
use crate::shipped::Shipped;
use crate::subject::{Kind, Subject, SubjectPaths};

/// Opens a subject, creating what does not exist.
pub fn open(kind: Kind, place: &SubjectPaths, seed: u64) -> Result<Box<dyn Subject>> {
    std::fs::create_dir_all(&place.dir)?;
    Ok(match kind {
        Kind::Mojim(fault) => Box::new(Shipped::open(place, seed, fault, false)?),
        Kind::Naive => Box::new(Naive::open(place, seed)?),
        Kind::Nosync => Box::new(Redo::open(place, seed, false)?),
        Kind::Log => Box::new(Redo::open(place, seed, true)?),
        Kind::Heap(slip) => Box::new(Persistent::open(place, seed, slip)?),
    })
}

/// Recovers what a subject left when the power went, and returns the region.
/// `place.ring` must be new.
pub fn recover(kind: Kind, place: &SubjectPaths, seed: u64) -> Result<Vec<u8>> {
    std::fs::create_dir_all(&place.dir)?;
    match kind {
        // The engine that recovers has no fault.
        Kind::Mojim(_) => Shipped::open(place, seed, None, true)?.read(),
        Kind::Naive => Naive::read(place, seed),
        Kind::Heap(_) => heap::recover(place, seed),
        Kind::Nosync | Kind::Log => Redo::open(place, seed, true)?.read(),
    }
}
