//! Durable transactions: an undo log in memory, stores in place, commit by exact ranges.
//!
//! Source: Mnemosyne, "Durable memory transactions".
