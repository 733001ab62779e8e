//! Primary, mirror and backups: the state machines of their sessions, copies of
//! whole volumes, and who is who by the register of views.

pub mod claim;
pub mod client;
pub mod copy;
pub mod forward;
pub mod holders;
pub mod layout;
pub mod link;
pub mod mirror;
pub mod outflow;
pub mod pass;
pub mod primary;
pub mod request;
pub mod session;
pub mod spinner;
pub mod stream;
pub mod views;
pub mod vigil;
