//! Working copies: the memory that a program stores into, and how what it has
//! changed is found.

pub mod available;
pub mod committed;
pub mod diff;
mod file_pages;
pub mod fork;
pub mod page_lsns;
pub mod places;
pub mod quiescence;
pub mod region;
pub mod shared;
pub mod track;
pub mod uffd;
