//! Working copies: the memory that a program stores into, and how what it has
//! changed is found.

pub mod available;
pub mod committed;
pub mod diff;
pub mod fork;
pub mod notes;
mod peek;
pub mod places;
pub mod region;
pub mod shared;
pub mod track;
pub mod uffd;
pub mod users;
