//! The choices that a seed makes before it starts: mode, nodes, sizes and faults.
//!
//! Owns how this is drawn. Invariant: features that were added later are drawn from
//! generators of their own, so that all seeds without them stay as they were.

use std::time::Duration;

use mojim_config::{MediumKind, WriteBack};
use mojim_protocol::AckRule;

use super::mutation::Mutation;
use crate::ctx::Faults;
use crate::nodes::{BACKUP, NODES, SECOND, SPARE};
use crate::rng::Rng;

pub(super) const MS: Duration = Duration::from_millis(1);

/// Seeds with this bit may replace a node (`mojim-sim --replacements`).
pub const REPLACES: u64 = 1 << 62;

/// Log size of a seed with spill files, in bytes.
pub(super) const SPILL_LOG: u64 = 64 << 10;

/// The modes that the engine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One node.
    Unreplicated,
    /// The mirror follows behind.
    Async,
    /// The mirror's log counts.
    Sync,
    /// The mirror's log and the primary's own log count.
    SyncFlush,
}

/// What a seed decides before it starts.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The mode.
    pub mode: Mode,
    /// Lanes.
    pub lanes: usize,
    /// Bytes of each log, by node.
    pub log: [u64; NODES],
    /// Media of the logs, by node.
    pub medium: [MediumKind; NODES],
    /// Committed records that make a checkpoint due.
    pub threshold: u64,
    /// When committed records are applied.
    pub write_back: WriteBack,
    /// Pages that may wait with [`WriteBack::Async`].
    pub write_back_pages: u64,
    /// Steps of the phase with faults.
    pub steps: u64,
    /// Chance of a crash or the like, in 100,000 per step.
    pub trouble: u64,
    /// The view is in a register, and changes by itself.
    pub views: bool,
    /// Silence after which a mirror counts as failed.
    pub limit: Duration,
    /// The volume has a backup.
    pub backup: bool,
    /// The volume has a second backup.
    pub second: bool,
    /// One of the nodes may be lost for good, and another one takes its place.
    pub spare: bool,
    /// Bytes that may wait for a backup (`secondary_threshold`).
    pub secondary: u64,
    /// No disk fails.
    pub sound: bool,
    /// A backup goes on by itself when primary and mirror are lost.
    pub fallback: bool,
    /// Streams of a copy.
    pub copy_streams: usize,
    /// One of this many turns of the copies' receiving ends is taken.
    pub stream_pace: u64,
    /// A mirror whose log is damaged suspects its primary as soon as it is started.
    pub hasty: bool,
}

impl Setup {
    /// The setup of `seed`, in which `mutation` can be noticed; `rng` is the cluster's.
    pub(super) fn of_seed(seed: u64, mutation: Option<Mutation>, rng: &mut Rng) -> Setup {
        let mut setup = Setup::draw(rng);
        let of_backups = mutation.is_some_and(Mutation::is_of_backups);
        if of_backups && !setup.replicated() {
            setup.mode = Mode::Sync;
        }
        if mutation.is_some_and(Mutation::is_of_views) {
            setup.mode = Mode::Sync;
            setup.views = true;
        }
        let by_hand = mutation.is_some_and(Mutation::is_of_pairs);
        if by_hand {
            (setup.mode, setup.views) = (Mode::Sync, false);
        }
        let mut streams = Rng::new(seed ^ 0x7374_7265_616d);
        setup.copy_streams = streams.between(1, 4) as usize;
        setup.stream_pace = *streams.pick(&[1, 4, 30]);
        if mutation == Some(Mutation::Overtake) {
            setup.copy_streams = 2;
            setup.stream_pace = 30;
        }
        // A backup makes runs long, and trouble rare.
        let alone = by_hand || mutation.is_some_and(Mutation::needs_no_backup);
        if !alone {
            setup.draw_backup(&mut Rng::new(seed ^ 0x6261_636b), of_backups);
        }
        setup.draw_second(&mut Rng::new(seed ^ 0x7477_6f00));
        setup.hasty = mutation == Some(Mutation::AskNobody);
        setup.fallback |= mutation.is_some_and(Mutation::is_of_fallback);
        if mutation.is_some() {
            setup.trouble = setup.trouble.max(match by_hand {
                true => 1000,
                false => 400,
            });
        }
        setup
    }

    /// Draws what goes wrong with calls and links.
    pub(super) fn draw_faults(
        &self,
        seed: u64,
        mutation: Option<Mutation>,
        rng: &mut Rng,
    ) -> Faults {
        let mut faults = Faults::draw(rng);
        if self.sound {
            faults.read_error = 0;
            faults.write_error = 0;
            faults.sync_error = 0;
        }
        if mutation == Some(Mutation::IgnoreFailedSync) {
            faults.sync_error = faults.sync_error.max(30);
        }
        // Drawn from a generator of its own, so that the other seeds stay what they were.
        let mut rot = Rng::new(seed ^ 0x0072_6f74);
        if rot.below(8) == 0 || mutation == Some(Mutation::TrustWire) {
            faults.rot = rot.between(1, 5) as u32;
        }
        faults
    }

    /// Draws whether there are spill files, for which the logs are small; if so, returns
    /// the generator of their sizes.
    pub(super) fn draw_spills(&mut self, seed: u64, mutation: Option<Mutation>) -> Option<Rng> {
        let mut spills = Rng::new(seed ^ 0x7370_696c_6c00);
        let wanted = mutation.is_some_and(Mutation::is_of_spills);
        let spills = (spills.below(6) == 0 || wanted).then_some(spills);
        if spills.is_some() {
            self.log = self.log.map(|size| size.min(SPILL_LOG));
        }
        spills
    }

    /// Draws the basic setup.
    fn draw(rng: &mut Rng) -> Setup {
        use MediumKind::{Disk, Dram, Pmem};
        let mode = *rng.pick(&[
            Mode::Unreplicated,
            Mode::Async,
            Mode::Async,
            Mode::Sync,
            Mode::Sync,
            Mode::Sync,
            Mode::SyncFlush,
            Mode::SyncFlush,
        ]);
        let first = match mode {
            Mode::Sync => *rng.pick(&[Disk, Dram, Pmem]),
            _ => *rng.pick(&[Disk, Disk, Pmem]),
        };
        let mut setup = Setup {
            mode,
            lanes: rng.between(1, 3) as usize,
            log: std::array::from_fn(|n| match n < BACKUP {
                false => 0,
                true => *rng.pick(&[64, 64, 128, 256]) << 10,
            }),
            medium: [first, *rng.pick(&[Disk, Dram, Pmem]), Disk, Disk, Disk],
            threshold: *rng.pick(&[1, 1, 10, 1000]),
            write_back: WriteBack::Eager,
            write_back_pages: 0,
            steps: rng.between(300, 2500),
            trouble: *rng.pick(&[0, 100, 400, 1000]),
            views: matches!(mode, Mode::Sync | Mode::SyncFlush) && rng.coin(),
            limit: *rng.pick(&[20 * MS, 300 * MS, 5000 * MS]),
            backup: false,
            second: false,
            spare: false,
            secondary: u64::MAX,
            sound: false,
            fallback: false,
            copy_streams: 1,
            stream_pace: 1,
            hasty: false,
        };
        // Drawn from a copy of the generator, so that seeds stay as they are.
        let mut own = rng.clone();
        setup.write_back = *own.pick(&[WriteBack::Eager, WriteBack::Async, WriteBack::Auto]);
        setup.write_back_pages = *own.pick(&[1, 16, 128]);
        setup
    }

    /// Draws whether there is a backup, and its parameters, from a generator of its own:
    /// seeds without a backup stay as they are.
    fn draw_backup(&mut self, rng: &mut Rng, always: bool) {
        use MediumKind::{Disk, Dram, Pmem};
        if !self.replicated() || !(rng.below(3) == 0 || always || self.views && rng.coin()) {
            return;
        }
        self.backup = true;
        if self.views {
            // Long enough for a mirror to be given up and replaced, more than once.
            self.limit = *rng.pick(&[20 * MS, 50 * MS, 100 * MS, 300 * MS]);
            self.steps += rng.between(1000, 10_000);
            self.trouble = *rng.pick(&[0, 100, 200, 400]);
            self.sound = rng.below(4) != 0;
            self.fallback = rng.clone().below(3) == 0;
        }
        self.log[BACKUP] = *rng.pick(&[64, 64, 128, 256]) << 10;
        self.medium[BACKUP] = *rng.pick(&[Disk, Dram, Pmem]);
        self.secondary = *rng.pick(&[u64::MAX, 32 << 10, 8 << 10, 1 << 10]);
    }

    /// Draws a second backup beside the first.
    fn draw_second(&mut self, rng: &mut Rng) {
        use MediumKind::{Disk, Dram, Pmem};
        if !self.backup || rng.coin() {
            return;
        }
        self.second = true;
        self.log[SECOND] = *rng.pick(&[64, 64, 128, 256]) << 10;
        self.medium[SECOND] = *rng.pick(&[Disk, Dram, Pmem]);
    }

    /// Draws whether a node is replaced. The new node has the largest log size.
    pub(super) fn draw_spare(&mut self, rng: &mut Rng, always: bool) {
        use MediumKind::{Disk, Dram, Pmem};
        if !self.backup || rng.below(5) != 0 && !always {
            return;
        }
        self.spare = true;
        self.log[SPARE] = self.log.into_iter().max().unwrap_or(0);
        self.medium[SPARE] = *rng.pick(&[Disk, Dram, Pmem]);
    }

    /// How many nodes there are at the start.
    pub(super) fn nodes(&self) -> usize {
        match (self.backup, self.second) {
            (false, _) => 2,
            (true, false) => 3,
            (true, true) => 4,
        }
    }

    pub(super) fn rule(&self) -> AckRule {
        match self.mode {
            Mode::Unreplicated | Mode::Async => AckRule::LOCAL,
            Mode::Sync => AckRule::MIRROR,
            Mode::SyncFlush => AckRule::BOTH,
        }
    }

    pub(super) fn persistent(&self) -> [bool; NODES] {
        self.medium.map(|m| m != MediumKind::Dram)
    }

    pub(super) fn replicated(&self) -> bool {
        self.mode != Mode::Unreplicated
    }
}
