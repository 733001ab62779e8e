//! The engine's environment over Linux.
//!
//! `mojim-store` and `mojim-replica` open here all that they open. Memory without a name, and the
//! line between a node's processes, are opened where they are used.
//!
//! # Tour
//!
//! - `linux.rs` implements the trait `Env` of `mojim-env`.
//! - `disk.rs` has files, `in_memory.rs` those of a file system that is memory, `lock.rs` locks.
//! - `memory.rs` has shared and persistent memory, `rings.rs` the rings of volumes that are gone.
//! - `flush.rs` chooses the instruction that makes stores to persistent memory durable.
//! - `net.rs` has sockets. `tls/` and `door.rs` prove names.
//! - `trust.rs` tells directories that nobody else can change.

mod disk;
mod door;
mod flush;
mod in_memory;
mod linux;
mod lock;
mod memory;
mod net;
pub mod rings;
mod tls;
pub mod trust;

pub use disk::free_bytes;
pub use door::{Door, Refusals};
pub use flush::{FlushMode, flush_kind, flush_range, flush_range_by};
pub use linux::{Os, hide_memory};
pub use memory::{Mapping, guard_sigbus};
pub use net::{Listener, check_local_peer, unix_address};
pub use tls::Keys;

use linux::{error, now};
