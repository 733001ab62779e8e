//! Primary, mirror and backups: the state machines of their sessions,
//! and their roles by the register of views.

mod apart;
pub mod attach;
pub mod backup_progress;
pub mod backup_session;
pub mod client;
mod company;
pub mod courtesy;
pub mod fallback_timer;
mod handshake;
pub mod holders;
pub mod layout;
pub mod link;
pub mod mirror;
pub mod pace;
pub mod peer_link;
pub mod piece;
pub mod primary;
pub mod register;
pub mod request;
pub mod session;
mod spill_out;
pub mod spinner;
pub mod told;
pub mod view_client;
