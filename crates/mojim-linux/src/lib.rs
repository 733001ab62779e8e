//! The engine's environment over Linux.

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
pub use flush::{flush_kind, flush_range};
pub use linux::{Os, hide_memory};
pub use memory::{Mapping, guard_sigbus};
pub use net::{Listener, check_local_peer, unix_address};
pub use tls::Keys;

use linux::{error, now};
