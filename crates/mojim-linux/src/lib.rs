//! The engine's environment over Linux.
//!
//! `mojim-store` and `mojim-replica` open here whatever they open. Memory without a name, and the
//! line between a node's processes, are opened where they are used. `tls/` and `door.rs` prove
//! names.

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
