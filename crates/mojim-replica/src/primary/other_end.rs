//! The node at the other end of the link, as it has described itself.
//!
//! Owns its name, its level, its limits and its room, and the times of the link to it. Invariant: what
//! one mirror has said stays until the same or another one says something else.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering::*};
use std::time::Duration;

use mojim_env::turns::Mutex;
use mojim_env::turns::lock;
use mojim_env::{Longest, Space};
use mojim_format::Level;

use crate::handshake::Limits;

/// What is known of the mirror.
pub(crate) struct OtherEnd {
    /// The node that the session is with.
    name: Mutex<String>,
    level: AtomicU16,
    /// The most bytes that a file can have there, by its last Welcome.
    max_file: AtomicU64,
    /// The longest names there: of a part in the upper half, of a path in the lower.
    names: AtomicU32,
    /// What was last said of its room, over the present link or the last one, and up to which LSN
    /// that counts what is applied there.
    room: Mutex<Option<(u64, Space)>>,
    /// Silence after which the link counts as broken, in nanoseconds.
    silence: AtomicU64,
    /// The usual round trip over the link, in nanoseconds; 0: not known yet.
    round_trip: AtomicU64,
    /// A whole copy is on its way to it, or from it.
    copying: AtomicBool,
}

impl Default for OtherEnd {
    /// A node that has not spoken yet limits nothing.
    fn default() -> OtherEnd {
        OtherEnd {
            name: Mutex::default(),
            level: AtomicU16::new(0),
            max_file: AtomicU64::new(u64::MAX),
            names: AtomicU32::new(u32::MAX),
            room: Mutex::default(),
            silence: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
            copying: AtomicBool::new(false),
        }
    }
}

impl OtherEnd {
    /// Its name; empty if there is none.
    pub(super) fn name(&self) -> MutexGuard<'_, String> {
        lock(&self.name)
    }

    /// It is at this level, as a Welcome or an acknowledgement says.
    #[inline]
    pub(crate) fn is_at(&self, level: u16) {
        // Checked first: it seldom changes, and lies beside what every thread reads.
        if self.level.load(Relaxed) != level {
            self.level.store(level, Relaxed);
        }
    }

    pub(super) fn level(&self) -> Option<Level> {
        Level::from_u16(self.level.load(Relaxed))
    }

    pub(super) fn max_file(&self) -> u64 {
        self.max_file.load(Acquire)
    }

    pub(super) fn longest_names(&self) -> Longest {
        let both = self.names.load(Acquire);
        let (part, path) = ((both >> 16) as u16, both as u16);
        Longest { part, path }
    }

    /// It says what files it can have.
    pub(crate) fn has_limits(&self, limits: Limits) {
        let Longest { part, path } = limits.names;
        let both = u32::from(part) << 16 | u32::from(path);
        self.names.store(both, Release);
        self.max_file.store(limits.size, Release);
    }

    pub(super) fn room(&self) -> Option<(u64, Space)> {
        *lock(&self.room)
    }

    /// It has told its room.
    pub(crate) fn has_room(&self, applied: u64, space: Space) {
        *lock(&self.room) = Some((applied, space));
    }

    /// Silence after which the link counts as broken.
    pub(super) fn silence(&self) -> Duration {
        Duration::from_nanos(self.silence.load(Relaxed))
    }

    pub(super) fn may_be_silent_for(&self, silence: Duration) {
        self.silence.store(silence.as_nanos() as u64, Relaxed);
    }

    /// The usual round trip; zero until one was measured.
    pub(super) fn round_trip(&self) -> Duration {
        Duration::from_nanos(self.round_trip.load(Relaxed))
    }

    /// Whether a whole copy goes over the link. Its own standstill ends the link.
    pub(crate) fn is_copying(&self) -> bool {
        self.copying.load(Relaxed)
    }

    pub(crate) fn set_copying(&self, copying: bool) {
        self.copying.store(copying, Relaxed);
    }

    /// A round trip over the link took `took`. Returns the usual time.
    pub(crate) fn measured(&self, took: Duration) -> Duration {
        let took = took.as_nanos() as u64;
        let usual = match self.round_trip.load(Relaxed) {
            0 => took,
            usual => usual - usual / 8 + took / 8,
        };
        self.round_trip.store(usual, Relaxed);
        Duration::from_nanos(usual)
    }
}
