//! The persistent heap: blocks of a file of a volume, at a fixed address.
//!
//! Source: FAMS, Section 4.1; Mnemosyne, "Persistent heap".
