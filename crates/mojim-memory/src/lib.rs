//! Working copies: the memory that a program stores into, and how what it has
//! changed is found.
//!
//! # How changes are found
//!
//! Nothing of a **working copy** reaches the file by itself. A private one is a mapping of the data
//! file (`region.rs`). A shared one is memory that all mappings of the file show (`shared.rs`).
//!
//! A range of up to 16 KiB (`EXACT_MAX` in `region.rs`) is taken as given, after rounding to pages
//! where the volume says so. A larger one is looked up in the page tables (`track/`): only pages
//! that were written count. Of these pages only the words count that differ from the committed
//! bytes (`diff.rs`, `committed.rs`).
//!
//! | tracker | how it finds written pages |
//! |---|---|
//! | `track/uffd.rs` | userfaultfd write-protect and `PAGEMAP_SCAN` (Linux 6.7) |
//! | `track/mprotect.rs` | `mprotect` and a SIGSEGV handler |
//! | `track/two_level.rs` | chunks by `mprotect`, pages of open chunks by the page tables |
//! | `track/remote.rs` | the page tables of another process, a guest |
//! | `track/untracked.rs` | not at all: every page that was copied counts |
//!
//! `track/two_level/release.rs` gives pages back where memory is bounded. `available.rs` says
//! whether a shared working copy fits into memory. `page_lsns.rs` notes which sync point wrote to a
//! page last. An unmap, or a cut of a file, waits for the calls in it (`quiescence.rs`).
//! `places.rs` has the addresses of all regions. `file_pages.rs` reads many pages in one call.
//! `fork.rs` notices a fork.

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
