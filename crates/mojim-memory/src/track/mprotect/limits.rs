//! How many runs of writable pages there are, and how many there may be: "Number of mappings" of
//! `mprotect.rs`.
//!
//! Invariant: what the handler calls takes no lock and allocates nothing.

use std::sync::OnceLock;
use std::sync::atomic::AtomicI64;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Runs of writable pages in all regions: an estimate, corrected now and then.
pub(super) static RUNS: AtomicI64 = AtomicI64::new(0);

/// The rule of "Number of mappings", in runs.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) single: i64,
    pub(super) small: i64,
    pub(super) whole: i64,
}

pub(super) static LIMITS: OnceLock<Limits> = OnceLock::new();

impl Limits {
    fn of(max_map_count: i64) -> Limits {
        Limits {
            single: max_map_count / 8,
            small: max_map_count * 3 / 16,
            whole: max_map_count / 4,
        }
    }

    /// Async-signal-safe: a load, once the handler is installed.
    pub(super) fn get() -> Limits {
        LIMITS.get().copied().unwrap_or(Limits::of(65_530))
    }

    pub(super) fn read() -> Limits {
        let read = || -> rustix::io::Result<i64> {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let path = "/proc/sys/vm/max_map_count";
            let file =
                mojim_env::descriptors::open(|| rustix::fs::open(path, flags, Mode::empty()))?;
            let mut text = [0u8; 24];
            let n = rustix::io::read(&file, &mut text)?;
            let text = std::str::from_utf8(&text[..n]).map_err(|_| Errno::INVAL)?;
            text.trim().parse().map_err(|_| Errno::INVAL)
        };
        Limits::of(read().unwrap_or(65_530).min(1 << 40))
    }
}
