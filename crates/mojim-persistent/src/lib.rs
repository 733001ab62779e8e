//! Persistent variables, regions made at run time, and logs.
//!
//! Source: Mnemosyne, "Persistent memory regions" and "Consistent updates".

mod file;
mod image;
pub mod variables;
