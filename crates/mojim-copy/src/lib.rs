//! Whole copies of a volume, from one node to another.
//!
//! Owns how a copy travels: in which order it is sent, over which links, and how the receiver
//! answers. Whether a copy is needed, who gives it, and what follows it is `mojim-replica`'s. Where
//! its bytes are staged is `mojim-store`'s.
//!
//! Out: `copy_out.rs`, `copy_pass.rs`. Both ends of the streams beside the session's link:
//! `stream.rs`. In: `copy_in.rs`, then `store/load.rs` and `stage.rs` of `mojim-store`.

pub mod copy_in;
pub mod copy_out;
pub mod copy_pass;
pub mod stream;
