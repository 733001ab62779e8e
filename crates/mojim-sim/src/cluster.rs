//! Two nodes, in many seeds a third and a fourth one, an application and an
//! operator, driven step by step.
//!
//! With a register of views, each of three or four nodes may be primary, mirror and
//! backup; without one the third and the fourth are the backups.
//!
//! Owns what real threads and people would do: appending sync points, moving
//! lanes, sessions and checkpoints, accepting links, failing, restarting,
//! promoting. One thread, every choice drawn from the seed. What it observes
//! goes to [`crate::check::Checker`].

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_config::{MediumKind, WriteBack};
use mojim_env::Error;
use mojim_env::{Address, Env};
use mojim_format::message::{CopyStream, Hello, Lane, Message, RefuseCode};
use mojim_format::{FrameKind, State};
use mojim_protocol::pairing::may_promote;
use mojim_protocol::view::{Member, Register};
use mojim_protocol::{AckRule, Lacks, Loss};
use mojim_replica::backup_progress::Source;
use mojim_replica::backup_session::BackupSession;
use mojim_replica::fallback_timer::FallbackTimer;
use mojim_replica::holders::Holders;
use mojim_replica::link::Wire;
use mojim_replica::mirror::control::ControlIn;
use mojim_replica::mirror::lane::{LaneServer, Step};
use mojim_replica::mirror::{Mirror, Refusal, refuse};
use mojim_replica::primary::{Pace, Primary, PrimarySpec};
use mojim_replica::register::ViewRegister;
use mojim_replica::session::Session;
use mojim_replica::stream::{StreamIn, StreamOut};
use mojim_replica::view_client::ViewClient;
use mojim_store::log::{Log, LogSpec};
use mojim_store::store::{Store, StoreSpec, read_superblock};

use crate::check::{BACKUP, Change, Checker, Files, NODES, SECOND, SPARE, Violation};
use crate::failures::Takes;
use crate::rng::Rng;
use crate::rot::{self, Rot};
use crate::shrink::Nobody;
use crate::views::{SimRegister, SimRegisterCalls, SimViews, lock};
use crate::world::{CrashKind, Faults, SimListener, World};

mod replace;
mod spill;

pub use replace::Replacements;
pub use spill::Spills;

const NAMES: [&str; NODES] = ["a", "b", "c", "d", "e"];
const CLUSTER: &str = "sim";
const VOLUME: &str = "v";
const MS: Duration = Duration::from_millis(1);
/// Seeds with this bit may replace a node (`mojim-sim --replacements`).
pub const REPLACES: u64 = 1 << 62;

type Checked<T = ()> = Result<T, Violation>;

/// The modes that the engine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One node.
    Unreplicated,
    /// The mirror follows behind.
    Async,
    /// The mirror's log counts.
    Sync,
    /// The mirror's log and the own count.
    SyncFlush,
}

/// One invariant switched off in the engine (`Store::mutations`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Invariant 1.
    ApplyBeforeLog,
    /// Invariant 2.
    AckEarly,
    /// Invariant 6.
    IgnoreFailedSync,
    /// A copy is replaced only by a whole one.
    ReplaceEarly,
    /// Views: acknowledged while alone without a view.
    AloneWithoutView,
    /// Views: an amnesiac mirror is promoted.
    AmnesiacMember,
    /// Views: a stale mirror is promoted.
    StaleMember,
    /// Views: the epoch check is dropped.
    NoFence,
    /// Views: rejoined without the pause.
    AdmitEarly,
    /// LSN n acknowledged with n-1 missing.
    AckGap,
    /// Applied before it is committed, and not fetched again.
    ApplyUncommitted,
    /// Views: the program begins before its mirror is in the view.
    ReadyEarly,
    /// A page that differs is not copied.
    KeepDifference,
    /// Backups: told that all that was received is committed.
    ForwardUncommitted,
    /// Backups: what one lacks is released.
    IgnoreHold,
    /// Backups: forwarded on, though a term is over.
    ForwardAcrossTerms,
    /// Backups: records are taken, however much one lacks.
    NoBackPressure,
    /// Backups: the data area changes while it is copied.
    IgnorePause,
    /// Backups: nobody is held back between two sessions with one.
    ForgetFloors,
    /// Backups: what changes while a copy is read is not sent again.
    ForgetChanges,
    /// Backups: what changes while a copy is read is sent again before its first
    /// sending has arrived.
    Overtake,
    /// Succession: the new mirror's session begins in the old epoch.
    KeepEpoch,
    /// Succession: an attach speaks to the configured mirror.
    AskConfigured,
    /// Fallback: a primary commits, whatever its lease.
    IgnoreLease,
    /// Fallback: a primary's signs of life leave no trace.
    LookSilently,
    /// A primary does not remember that its ring was lost.
    ForgetRing,
    /// Views: a primary goes on alone with what only its ring has.
    AloneInRing,
    /// A log's room is released before the superblock is durable.
    ReleaseEarly,
    /// A promise is given before it is durable.
    PromiseEarly,
    /// No checksum is looked at on receipt.
    TrustWire,
    /// Views: a primary begins another life at each attach.
    OtherLife,
    /// A log that is damaged before its end is taken for a shorter one.
    ForgetMissing,
    /// A spill file is confirmed before it is durable.
    SpillUnsynced,
    /// A spill file goes ahead of its record once, whatever became of it.
    SpillOnce,
    /// Replacement: a primary calls its old mirror, though another has its place.
    CallReplaced,
}

impl Mutation {
    /// All of them, with their names.
    pub const ALL: [(Mutation, &'static str); 35] = [
        (Mutation::ApplyBeforeLog, "apply_before_log (invariant 1)"),
        (Mutation::AckEarly, "ack_early (invariant 2)"),
        (
            Mutation::IgnoreFailedSync,
            "ignore_failed_sync (invariant 6)",
        ),
        (
            Mutation::ReplaceEarly,
            "replace_early (a copy is replaced only by a whole one)",
        ),
        (Mutation::AloneWithoutView, "alone_without_view"),
        (Mutation::AmnesiacMember, "amnesiac_member"),
        (Mutation::StaleMember, "stale_member"),
        (Mutation::NoFence, "no_fence"),
        (Mutation::AdmitEarly, "admit_early"),
        (Mutation::AckGap, "ack_gap"),
        (Mutation::ApplyUncommitted, "apply_uncommitted"),
        (Mutation::ReadyEarly, "ready_early"),
        (
            Mutation::KeepDifference,
            "keep_difference (a copy by difference has every page that differs)",
        ),
        (Mutation::ForwardUncommitted, "forward_uncommitted"),
        (Mutation::IgnoreHold, "ignore_hold"),
        (Mutation::ForwardAcrossTerms, "forward_across_terms"),
        (Mutation::NoBackPressure, "no_back_pressure"),
        (Mutation::IgnorePause, "ignore_pause"),
        (Mutation::ForgetFloors, "forget_floors"),
        (Mutation::ForgetChanges, "forget_changes"),
        (
            Mutation::Overtake,
            "overtake (pages are sent again when what streams carry is staged)",
        ),
        (Mutation::KeepEpoch, "keep_epoch"),
        (Mutation::AskConfigured, "ask_configured"),
        (Mutation::IgnoreLease, "ignore_lease"),
        (Mutation::LookSilently, "look_silently"),
        (
            Mutation::ForgetRing,
            "forget_ring (what a lost ring held may be on the mirror alone)",
        ),
        (Mutation::AloneInRing, "alone_in_ring"),
        (
            Mutation::ReleaseEarly,
            "release_early (a log's room is released when the superblock is durable)",
        ),
        (Mutation::PromiseEarly, "promise_early"),
        (Mutation::TrustWire, "trust_wire"),
        (
            Mutation::OtherLife,
            "other_life (a primary that lost nothing is who it was)",
        ),
        (
            Mutation::ForgetMissing,
            "forget_missing (a damaged log is given up by an operator alone)",
        ),
        (
            Mutation::SpillUnsynced,
            "spill_unsynced (a spill file is confirmed when it is durable)",
        ),
        (
            Mutation::SpillOnce,
            "spill_once (a spill file goes ahead of its record in every session)",
        ),
        (Mutation::CallReplaced, "call_replaced"),
    ];

    /// A seed at which one that few seeds notice was noticed: it is tried first.
    pub fn seen_at(self) -> Option<u64> {
        match self {
            Mutation::ForgetRing => Some(1430),
            Mutation::PromiseEarly => Some(15_382),
            Mutation::SpillUnsynced => Some(2857),
            Mutation::NoFence => Some(792),
            Mutation::Overtake => Some(554),
            Mutation::ForwardAcrossTerms => Some(369),
            Mutation::ReleaseEarly => Some(239),
            _ => None,
        }
    }

    /// Whether it breaks a rule of views.
    fn is_of_views(self) -> bool {
        matches!(
            self,
            Mutation::AloneWithoutView
                | Mutation::AmnesiacMember
                | Mutation::StaleMember
                | Mutation::NoFence
                | Mutation::AdmitEarly
                | Mutation::ReadyEarly
                | Mutation::AloneInRing
                | Mutation::OtherLife
                | Mutation::CallReplaced
        ) || self.is_of_succession()
    }

    /// Whether it breaks a rule by which a backup takes a mirror's place.
    fn is_of_succession(self) -> bool {
        matches!(self, Mutation::KeepEpoch | Mutation::AskConfigured) || self.is_of_fallback()
    }

    /// Whether it breaks a rule by which a backup goes on for both.
    fn is_of_fallback(self) -> bool {
        matches!(self, Mutation::IgnoreLease | Mutation::LookSilently)
    }

    /// Whether it breaks a rule of backups.
    fn is_of_backups(self) -> bool {
        matches!(
            self,
            Mutation::ForwardUncommitted
                | Mutation::IgnoreHold
                | Mutation::ForwardAcrossTerms
                | Mutation::NoBackPressure
                | Mutation::IgnorePause
                | Mutation::ForgetFloors
                | Mutation::ForgetChanges
                | Mutation::Overtake
                | Mutation::CallReplaced
        ) || self.is_of_succession()
    }

    /// Whether it breaks a rule of spill files.
    fn is_of_spills(self) -> bool {
        matches!(self, Mutation::SpillUnsynced | Mutation::SpillOnce)
    }

    /// What the checker's reports of it begin with: bytes that a failed sync
    /// did not make durable show up as a loss or as a copy that differs.
    pub fn breaks(self) -> &'static [&'static str] {
        match self {
            Mutation::ApplyBeforeLog => &["1:"],
            Mutation::AckEarly => &["2:"],
            Mutation::IgnoreFailedSync => &["3:", "4:"],
            Mutation::ReplaceEarly => &["3:"],
            Mutation::AckGap => &["2:"],
            // Then nothing brings the copies together again.
            Mutation::KeepDifference => &["1:", "3:", "4:"],
            Mutation::ApplyUncommitted => &["1:", "4:", "live:", "backup:"],
            Mutation::ReadyEarly => &["view:"],
            Mutation::ForwardUncommitted
            | Mutation::IgnoreHold
            | Mutation::NoBackPressure
            | Mutation::ForgetFloors => &["backup:"],
            Mutation::ForwardAcrossTerms => &["backup:", "4:"],
            Mutation::IgnorePause | Mutation::ForgetChanges | Mutation::Overtake => &["4:"],
            // Somebody waits for a node that does not take part.
            Mutation::KeepEpoch | Mutation::AskConfigured => &["live:", "3:"],
            Mutation::IgnoreLease | Mutation::LookSilently => &["3:"],
            Mutation::ForgetRing => &["3:"],
            Mutation::AloneInRing => &["2:"],
            // What the end of a run says by itself, other failures excuse.
            Mutation::OtherLife => &["shrunk:"],
            Mutation::ForgetMissing => &["3:"],
            Mutation::TrustWire => &["1:", "3:", "4:"],
            Mutation::SpillUnsynced => &["3:"],
            Mutation::CallReplaced => &["replaced:"],
            // Its record is refused for ever.
            Mutation::SpillOnce => &["live:"],
            Mutation::ReleaseEarly => &["1:", "2:", "3:", "4:"],
            _ => &["2:", "3:"],
        }
    }
}

/// What a primary's background sees, of 6 that are equally likely.
fn pace(n: u64) -> Pace {
    match n {
        0 => Pace::Idle,
        1 => Pace::Pressed,
        2 | 3 => Pace::Quiet,
        _ => Pace::Busy,
    }
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
    /// When they are applied.
    pub write_back: WriteBack,
    /// Pages that may wait with [`WriteBack::Async`].
    pub write_back_pages: u64,
    /// Steps of the phase with faults.
    pub steps: u64,
    /// Chance of a crash or the like, in 100,000 per step.
    pub trouble: u64,
    /// The view lies in a register, and changes by itself.
    pub views: bool,
    /// Silence after which a mirror counts as failed.
    pub limit: Duration,
    /// The volume has a backup.
    pub backup: bool,
    /// And another one.
    pub second: bool,
    /// One of the nodes may be lost for good, and another one takes its place.
    pub spare: bool,
    /// Bytes that may wait for it (`secondary_threshold`).
    pub secondary: u64,
    /// No disk fails.
    pub sound: bool,
    /// A backup goes on by itself when primary and mirror are lost.
    pub fallback: bool,
    /// Streams of a copy.
    pub copy_streams: usize,
    /// Of so many turns of their receiving ends one is taken.
    pub stream_pace: u64,
}

impl Setup {
    /// Draws one.
    pub fn draw(rng: &mut Rng) -> Setup {
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
        };
        // Of numbers of its own, as what it is about a backup.
        let mut own = rng.clone();
        setup.write_back = *own.pick(&[WriteBack::Eager, WriteBack::Async, WriteBack::Auto]);
        setup.write_back_pages = *own.pick(&[1, 16, 128]);
        setup
    }

    /// Draws what it is about a backup, from numbers of its own: seeds without
    /// one stay as they are.
    fn draw_backup(&mut self, rng: &mut Rng, always: bool) {
        use MediumKind::{Disk, Dram, Pmem};
        if !self.replicated() || !(rng.below(3) == 0 || always || self.views && rng.coin()) {
            return;
        }
        self.backup = true;
        if self.views {
            // Time enough for a mirror to be given up and replaced, and again.
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

    /// Draws whether a node is replaced, by one with a log as large as any.
    fn draw_spare(&mut self, rng: &mut Rng, always: bool) {
        use MediumKind::{Disk, Dram, Pmem};
        if !self.backup || rng.below(5) != 0 && !always {
            return;
        }
        self.spare = true;
        self.log[SPARE] = self.log.into_iter().max().unwrap_or(0);
        self.medium[SPARE] = *rng.pick(&[Disk, Dram, Pmem]);
    }

    /// How many nodes there are at first.
    fn nodes(&self) -> usize {
        match (self.backup, self.second) {
            (false, _) => 2,
            (true, false) => 3,
            (true, true) => 4,
        }
    }

    fn rule(&self) -> AckRule {
        match self.mode {
            Mode::Unreplicated | Mode::Async => AckRule::LOCAL,
            Mode::Sync => AckRule::MIRROR,
            Mode::SyncFlush => AckRule::BOTH,
        }
    }

    fn persistent(&self) -> [bool; NODES] {
        self.medium.map(|m| m != MediumKind::Dram)
    }

    fn replicated(&self) -> bool {
        self.mode != Mode::Unreplicated
    }
}

struct Prim {
    p: Arc<Primary>,
    /// The newest point that it appended or adopted.
    head: usize,
    epoch: u64,
    pending: VecDeque<Pending>,
    /// Those whose bytes stand in a spill file and that have no record yet.
    spills: Vec<spill::Spill>,
    session: Session,
    errands: SimRegisterCalls,
    holders: Arc<Holders>,
    since: Duration,
    /// When records flowed to its mirror for the first time, or it went alone.
    begun: Option<Duration>,
    /// Whether they flowed when it was last looked at.
    linked: bool,
    listener: SimListener,
    fresh: Vec<Wire>,
    ready: bool,
    closing: bool,
}

struct Mir {
    m: Arc<Mirror>,
    listener: SimListener,
    fresh: Vec<Wire>,
    control: Vec<ControlIn>,
    lanes: Vec<LaneServer>,
    streams: Vec<StreamIn>,
}

enum Role {
    Down,
    Primary(Box<Prim>),
    Mirror(Box<Mir>),
}

struct Node {
    role: Role,
    /// When it starts again.
    restart: Duration,
    /// Not before the fault-free phase.
    gone: bool,
    /// It does not go on by itself: an operator promotes it when it starts.
    word: bool,
    /// Its copy was replaced or cut back in the step in which it crashed.
    replaced: bool,
    /// It took over, up to this LSN, and has not closed its copy yet: its other
    /// threads may still run.
    taken: Option<u64>,
    /// To its backups.
    forwards: Vec<Forwarding>,
    /// As a backup, over those whom it follows; and when it looks next.
    fallback: FallbackTimer,
    next_look: Duration,
    /// It asked the register to go on for primary and mirror.
    falls_back: Fallback,
    /// Of the copies that it sends.
    streams: Vec<StreamOut>,
}

/// How far a backup is that goes on for primary and mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fallback {
    No,
    /// The register was asked, and may do it at any time.
    Asked,
    /// The register says so.
    Agreed,
}

/// One backup as a node forwards to it.
struct Forwarding {
    to: usize,
    forward: BackupSession,
    active: bool,
    /// Sessions that had begun when it was last looked at.
    sessions: u64,
    /// Whole copies begun when it was last active.
    copies: u64,
    /// What it lacked when it was last looked at.
    lag: Option<u64>,
}

/// What backups did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backups {
    /// Seeds with two of them.
    pub pairs: u64,
    /// Sessions that began with a whole copy.
    pub copies: u64,
    /// Sessions that began with what the logs still had.
    pub by_log: u64,
    /// Records that were not taken, since a backup lacked too much.
    pub stalls: u64,
    /// Openings of a log that began with what was kept for a backup.
    pub held: u64,
    /// Backups that took the place of a mirror.
    pub mirrors: u64,
    /// Of these, the ones that then became primary.
    pub primaries: u64,
    /// Backups that went on in the place of both.
    pub fallbacks: u64,
}

/// A sync point whose outcome the application awaits.
struct Pending {
    point: usize,
    since: Duration,
    /// It went through a spill file.
    spilled: bool,
}

/// The simulated cluster of one seed.
pub struct Cluster {
    /// Its world.
    pub world: World,
    /// What holds and what must.
    pub check: Checker,
    /// Sync points appended.
    pub appended: u64,
    /// Promotions.
    pub promotions: u64,
    /// Of these, the ones after an attach that only an operator could settle.
    pub words: u64,
    /// The epoch of the last of these.
    word_of: u64,
    /// Restarts of processes.
    pub starts: u64,
    /// Copies that could not be opened, since their data areas had more than their
    /// damaged logs, and runs at whose end copies differ for that.
    pub unopened: u64,
    /// See `unopened`.
    pub differ: u64,
    /// Whole copies taken in, and those that rest partly on older files.
    pub copies: [u64; 2],
    /// What the processes of each node have counted of them.
    counted: [[u64; 2]; NODES],
    /// What backups did.
    pub backups: Backups,
    /// What became of spill files.
    pub spilled: Spills,
    /// What became of nodes that were replaced.
    pub replaced: Replacements,
    /// What was drawn.
    pub setup: Setup,
    rng: Rng,
    nodes: [Node; NODES],
    /// The longest record so far, with what may lie before it in a ring.
    longest: u64,
    /// The nodes that hold the volume, by their place in the configuration: primary,
    /// mirror, backups.
    places: Vec<usize>,
    /// Each node's place at first, or that of the node that it replaced.
    rank: [u64; NODES],
    /// A node may be replaced, if that is there.
    replacing: Option<replace::Replacing>,
    /// The register has left the one that was.
    left_gone: bool,
    /// Which of several backups a step is about.
    which: Rng,
    /// Where the program runs: as the operator wants it, or as the register says.
    primary: usize,
    /// The last primary that had a mirror, and the mirror.
    pair: [usize; 2],
    /// The mirror, if it was a backup before.
    risen: Option<usize>,
    register: Arc<Mutex<SimRegister>>,
    /// The register as it was last looked at.
    seen: Register,
    /// Draws when a mirror's copy is to be made anew.
    anew: Rng,
    /// That mirror, which takes over if its primary is dead by the next trouble.
    suspects: Option<usize>,
    /// Disks become full, if there is one.
    full: Option<Rng>,
    /// Bits rot on disks, if there is one.
    rot: Option<Rot>,
    /// Sync points larger than the log are made, if there is one.
    spills: Option<Rng>,
    mutation: Option<Mutation>,
    calm: bool,
    /// Nothing is left that could go on by itself: whose copies must have lost
    /// something for it.
    nobody: Option<Vec<usize>>,
    /// How often a node had lost its power when the register first named this
    /// life of its copy.
    named: BTreeMap<(usize, u64), u32>,
    /// The register's version, and how often each had lost its power when it came: who
    /// was named by the next one may have lost it while that was asked for.
    version: (u64, [u32; NODES]),
    /// A node whose promotion failed at its end: it may have happened.
    half_promoted: Option<usize>,
    names: u64,
}

/// The node of this name.
fn node(name: &str) -> usize {
    let n = NAMES.iter().position(|x| *x == name);
    n.expect("one of them")
}

fn address(n: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, n as u8 + 1], 7000))
}

fn takes(kind: CrashKind) -> Takes {
    match kind {
        CrashKind::Kill => Takes::Process,
        CrashKind::Power => Takes::Power,
    }
}

fn crash_text(kind: CrashKind) -> &'static str {
    match kind {
        CrashKind::Kill => "killed",
        CrashKind::Power => "lost power",
    }
}

impl Cluster {
    /// A cluster that has not started.
    pub fn new(seed: u64, mutation: Option<Mutation>) -> Cluster {
        let replaces = seed & REPLACES != 0 || mutation == Some(Mutation::CallReplaced);
        let seed = seed & !REPLACES;
        let mut rng = Rng::new(seed ^ 0x6d6f_6a69_6d00);
        let mut setup = Setup::draw(&mut rng);
        let of_backups = mutation.is_some_and(Mutation::is_of_backups);
        if of_backups && !setup.replicated() {
            setup.mode = Mode::Sync;
        }
        if mutation.is_some_and(Mutation::is_of_views) {
            setup.mode = Mode::Sync;
            setup.views = true;
        }
        let mut streams = Rng::new(seed ^ 0x7374_7265_616d);
        setup.copy_streams = streams.between(1, 4) as usize;
        setup.stream_pace = *streams.pick(&[1, 4, 30]);
        if mutation == Some(Mutation::Overtake) {
            setup.copy_streams = 2;
            setup.stream_pace = 30;
        }
        setup.draw_backup(&mut Rng::new(seed ^ 0x6261_636b), of_backups);
        setup.draw_second(&mut Rng::new(seed ^ 0x7477_6f00));
        let mut spare = Rng::new(seed ^ 0x7370_6172_6500);
        if replaces {
            setup.draw_spare(&mut spare, mutation == Some(Mutation::CallReplaced));
        }
        setup.fallback |= mutation.is_some_and(Mutation::is_of_fallback);
        let mut faults = Faults::draw(&mut rng);
        if setup.sound {
            faults.read_error = 0;
            faults.write_error = 0;
            faults.sync_error = 0;
        }
        let mut spills = Rng::new(seed ^ 0x7370_696c_6c00);
        let spills = (spills.below(6) == 0 || mutation.is_some_and(Mutation::is_of_spills))
            .then_some(spills);
        if spills.is_some() {
            setup.log = setup.log.map(|size| size.min(spill::LOG));
        }
        let mut full = Rng::new(seed ^ 0x6675_6c6c);
        let full = (full.below(8) == 0 && !setup.sound).then_some(full);
        // By a generator of its own, so that the other seeds stay what they were.
        let mut rot = Rng::new(seed ^ 0x0072_6f74);
        if rot.below(8) == 0 || mutation == Some(Mutation::TrustWire) {
            faults.rot = rot.between(1, 5) as u32;
        }
        let damage = Rot::draw(seed, mutation == Some(Mutation::ForgetMissing));
        // What an operator does who replaces a node whose copy is damaged is not modelled.
        let damage = damage.filter(|_| !setup.spare);
        match mutation {
            Some(Mutation::IgnoreFailedSync) => {
                faults.sync_error = faults.sync_error.max(30);
                setup.trouble = setup.trouble.max(400);
            }
            Some(_) => setup.trouble = setup.trouble.max(400),
            None => {}
        }
        let places = (0..setup.nodes()).collect();
        let register = SimRegister::new(rng.next_u64());
        // While the first copies are made, nothing fails: that is setting up.
        let node = || Node {
            role: Role::Down,
            restart: Duration::ZERO,
            gone: false,
            word: false,
            replaced: false,
            taken: None,
            forwards: Vec::new(),
            fallback: FallbackTimer::default(),
            next_look: Duration::ZERO,
            falls_back: Fallback::No,
            streams: Vec::new(),
        };
        Cluster {
            world: World::new(seed, faults),
            check: Checker::default(),
            appended: 0,
            promotions: 0,
            words: 0,
            word_of: 0,
            starts: 0,
            unopened: 0,
            differ: 0,
            copies: [0; 2],
            counted: [[0; 2]; NODES],
            backups: Backups {
                pairs: u64::from(setup.second),
                ..Backups::default()
            },
            spilled: Spills {
                seeds: u64::from(spills.is_some()),
                ..Spills::default()
            },
            replaced: Replacements {
                seeds: u64::from(setup.spare),
                ..Replacements::default()
            },
            replacing: setup.spare.then(|| replace::Replacing::new(spare)),
            left_gone: false,
            rank: std::array::from_fn(|n| n as u64),
            setup,
            rng,
            nodes: std::array::from_fn(|_| node()),
            longest: 0,
            places,
            which: Rng::new(seed ^ 0x7365_636f_6e64),
            primary: 0,
            pair: [0, 1],
            risen: None,
            register: Arc::new(Mutex::new(register)),
            seen: Register::default(),
            anew: Rng::new(seed ^ 0x616e_6577),
            suspects: None,
            full,
            rot: damage,
            spills,
            mutation,
            calm: false,
            nobody: None,
            named: BTreeMap::new(),
            version: (0, [0; NODES]),
            half_promoted: None,
            names: 0,
        }
    }

    fn note(&self, text: impl FnOnce() -> String) {
        self.world.note(|| format!("--- {}", text()));
    }

    /// The whole run: trouble, then calm.
    pub fn run(&mut self) -> Checked {
        self.note(|| format!("{:?}", self.setup));
        for _ in 0..self.setup.steps {
            self.step()?;
            if self.nobody.is_some() {
                return Ok(());
            }
        }
        self.settle()
    }

    /// Where an append goes: to the primary; of two that both take themselves
    /// for it, to either.
    fn runs(&self, n: usize) -> usize {
        match &self.nodes[n].role {
            Role::Primary(_) => n,
            _ => self.primary,
        }
    }

    fn views(&self, n: usize) -> Arc<dyn ViewRegister> {
        Arc::new(SimViews {
            node: n,
            register: self.register.clone(),
            world: self.world.env(NAMES[n]),
            note: self.world.clone(),
        })
    }

    /// Who is primary by the register, if there is one.
    fn follow_register(&mut self) {
        if self.setup.views {
            let reg = lock(&self.register).now.clone();
            if let Some(p) = reg.primary {
                self.primary = node(&p.node);
            }
        }
    }

    /// Whether every node may be anything.
    fn is_free(&self) -> bool {
        self.setup.views && self.setup.backup
    }

    /// Whom the configuration names beside node `n`.
    fn peer(&self, n: usize) -> usize {
        match self.places[0] == n {
            true => self.places[1],
            false => self.places[0],
        }
    }

    /// The mirror, or who is to be it: the register's, or whom the primary
    /// speaks to.
    fn mirror(&self) -> usize {
        let named = lock(&self.register).now.mirror.clone();
        let named = named.map(|m| node(&m.node));
        if let Some(n) = named.filter(|n| *n != self.primary) {
            return n;
        }
        match &self.nodes[self.primary].role {
            Role::Primary(p) => node(p.session.peer()),
            _ => self.peer(self.primary),
        }
    }

    /// Who is neither primary nor mirror.
    fn backups(&self) -> Vec<usize> {
        let pair = [self.primary, self.mirror()];
        let mut others = self.places.clone();
        others.retain(|n| self.setup.backup && !pair.contains(n));
        others
    }

    /// One of them.
    fn backup(&mut self) -> usize {
        let all = self.backups();
        match all[..] {
            [only] => only,
            _ => *self.which.pick(&all),
        }
    }

    /// One of the nodes that may be primary.
    fn some_node(&mut self) -> usize {
        let most = match self.is_free() {
            true => self.places.len() as u64,
            false => 2,
        };
        self.places[self.rng.below(most) as usize]
    }

    /// What the checker is to know of the view.
    fn follow_view(&mut self) {
        let reg = lock(&self.register).now.clone();
        if reg.version != self.version.0 {
            let before = self.version.1;
            for m in [&reg.primary, &reg.mirror].into_iter().flatten() {
                let n = node(&m.node);
                self.named.entry((n, m.incarnation)).or_insert(before[n]);
            }
            self.version = (reg.version, self.check.failures());
            // Another one took over from who went on alone.
            let primary = reg.primary.as_ref().map(|m| node(&m.node));
            let sole = self.check.sole;
            self.check.sole = sole.filter(|s| primary.is_none_or(|p| p == *s));
        }
        if !self.is_free() {
            return;
        }
        let Some(primary) = reg.primary else {
            return;
        };
        let primary = node(&primary.node);
        self.check.view = std::array::from_fn(|n| n == primary);
        let Some(mirror) = reg.mirror.map(|m| node(&m.node)) else {
            return;
        };
        self.check.view[mirror] = true;
        if !self.pair.contains(&mirror) {
            self.note(|| format!("the backup {} is the mirror", NAMES[mirror]));
            self.backups.mirrors += 1;
            self.risen = Some(mirror);
        } else if self.risen != Some(mirror) {
            self.risen = None;
        }
        self.pair = [primary, mirror];
    }

    fn store_spec(&self, n: usize) -> StoreSpec {
        let root = PathBuf::from("/").join(NAMES[n]);
        let medium = self.setup.medium[n];
        let logs = (0..self.setup.lanes)
            .map(|lane| LogSpec {
                lane,
                medium,
                path: match medium {
                    MediumKind::Dram => PathBuf::from(format!("/shm/log.{lane}")),
                    _ => root.join(format!("logs/log.{lane}")),
                },
                ring: PathBuf::from(format!("/shm/ring.{lane}")),
                size: self.setup.log[n],
            })
            .collect();
        StoreSpec {
            cluster: CLUSTER.into(),
            volume: VOLUME.into(),
            node: NAMES[n].into(),
            dir: root.join("data"),
            meta: root.join("meta"),
            logs,
            rank: self.rank[n],
            holders: self.setup.nodes() as u64,
            max_open: 3,
            copy_streams: self.setup.copy_streams,
            by_hand: !self.setup.views,
        }
    }

    fn primary_spec(&self) -> PrimarySpec {
        let s = &self.setup;
        let smallest = match s.replicated() {
            true => s.log[..s.nodes()].iter().copied().min().unwrap_or(0),
            false => s.log[0],
        };
        PrimarySpec {
            rule: s.rule(),
            background_send: s.mode == Mode::Async,
            spin: Duration::ZERO,
            resend_timeout: 200 * MS,
            resend_attempts: 5,
            max_record: Log::max_record(smallest),
            smallest_log: smallest,
            secondary_threshold: s.secondary,
            checkpoint_threshold: s.threshold,
            write_back: s.write_back,
            write_back_pages: s.write_back_pages,
        }
    }

    /// Tries to start node `n` in the role that the operator gave it.
    fn start(&mut self, n: usize) -> Checked {
        self.starts += 1;
        self.note(|| format!("node {} starts", NAMES[n]));
        let env: Arc<dyn Env> = self.world.env(NAMES[n]);
        self.check.opening(n, self.setup.persistent()[n]);
        let spec = self.store_spec(n);
        let before = match self.setup.backup {
            true => read_superblock(&*env, &spec.meta).ok().flatten(),
            false => None,
        };
        self.read_damage(n, &spec)?;
        let store = match Store::open(&env, spec) {
            // A crash in a flush, which cannot say so.
            Ok(_) if self.world.crashed(NAMES[n]).is_some() => return self.fallen(n),
            Ok(s) => Arc::new(s),
            Err(e) => return self.failed_start(n, &e),
        };
        if let Some(m) = self.mutation {
            let switch = match m {
                Mutation::ApplyBeforeLog => &store.mutations.apply_before_log,
                Mutation::AckEarly => &store.mutations.ack_early,
                Mutation::IgnoreFailedSync => &store.mutations.ignore_failed_sync,
                Mutation::ReplaceEarly => &store.mutations.replace_early,
                Mutation::AloneWithoutView => &store.mutations.alone_without_view,
                Mutation::AmnesiacMember => &store.mutations.amnesiac_member,
                Mutation::StaleMember => &store.mutations.stale_member,
                Mutation::NoFence => &store.mutations.no_fence,
                Mutation::AdmitEarly => &store.mutations.admit_early,
                Mutation::AckGap => &store.mutations.ack_gap,
                Mutation::ApplyUncommitted => &store.mutations.apply_uncommitted,
                Mutation::ReadyEarly => &store.mutations.ready_early,
                Mutation::KeepDifference => &store.mutations.keep_difference,
                Mutation::ForwardUncommitted => &store.mutations.forward_uncommitted,
                Mutation::IgnoreHold => &store.mutations.ignore_hold,
                Mutation::ForwardAcrossTerms => &store.mutations.forward_across_terms,
                Mutation::NoBackPressure => &store.mutations.no_back_pressure,
                Mutation::IgnorePause => &store.mutations.ignore_pause,
                Mutation::ForgetFloors => &store.mutations.forget_floors,
                Mutation::ForgetChanges => &store.mutations.forget_changes,
                Mutation::Overtake => &store.mutations.overtake,
                Mutation::KeepEpoch => &store.mutations.keep_epoch,
                Mutation::AskConfigured => &store.mutations.ask_configured,
                Mutation::IgnoreLease => &store.mutations.ignore_lease,
                Mutation::LookSilently => &store.mutations.look_silently,
                Mutation::ForgetRing => &store.mutations.forget_ring,
                Mutation::AloneInRing => &store.mutations.alone_in_ring,
                Mutation::ReleaseEarly => &store.mutations.release_early,
                Mutation::PromiseEarly => &store.mutations.promise_early,
                Mutation::TrustWire => &store.mutations.trust_wire,
                Mutation::OtherLife => &store.mutations.other_life,
                Mutation::ForgetMissing => &store.mutations.forget_missing,
                Mutation::SpillUnsynced => &store.mutations.spill_unsynced,
                Mutation::SpillOnce => &store.mutations.spill_once,
                Mutation::CallReplaced => &store.mutations.call_replaced,
            };
            switch.set(true);
        }
        self.note(|| {
            format!(
                "node {} opened: {:?}, tail {}, checkpoint {}, {:?}",
                NAMES[n],
                store.superblock().state,
                store.tail(),
                store.checkpointed(),
                store.history().entries(),
            )
        });
        if let Some(sb) = before.filter(|sb| sb.logs != 0 && sb.state == State::Whole) {
            let kept = |(log, start): (&Log, &u64)| log.start() > *start;
            self.backups.held += u64::from(store.logs().iter().zip(&sb.starts).any(kept));
        }
        let replaced = std::mem::take(&mut self.nodes[n].replaced);
        self.check.opened(n, &store, replaced)?;
        if let Some(rot) = &mut self.rot {
            rot.opened(n, self.check.failures()[n]);
        }
        if self.half_promoted == Some(n) {
            self.half_promoted = None;
            if store.superblock().view.primary == NAMES[n] && n != self.primary {
                self.promotions += 1;
                let lossy = self.setup.mode == Mode::Async;
                // Where it lost its copy as well, it attaches to the other's.
                if store.superblock().state == State::Whole {
                    self.check.word();
                    self.check.promoted(n, &store, store.tail(), lossy)?;
                }
                // The other node may have come back as the primary it was.
                let other = self.peer(n);
                self.world.kill(NAMES[other]);
                self.observe(other)?;
                self.primary = n;
            }
        }
        let listener = match self.world.listen(NAMES[n], address(n)) {
            Ok(l) => l,
            Err(_) => return self.observe(n),
        };
        self.follow_register();
        if std::mem::take(&mut self.nodes[n].word) && n == self.primary {
            drop(listener);
            return self.go_on_by_word(n, store);
        }
        if n != self.primary {
            let m = Arc::new(Mirror::new(store, NAMES[n], self.setup.secondary));
            self.forward(n, m.clone());
            self.nodes[n].role = Role::Mirror(Box::new(Mir {
                m,
                listener,
                fresh: Vec::new(),
                control: Vec::new(),
                lanes: Vec::new(),
                streams: Vec::new(),
            }));
            return self.observe(n);
        }
        let p = Arc::new(Primary::new(store, self.primary_spec()));
        self.check.follows(n, false);
        let session = Session::attach(p.clone(), NAMES[n], replace::peer(self.peer(n)));
        let others = self.places.iter().filter(|to| **to != n);
        let holders = Holders::new(others.map(|to| replace::peer(*to)).collect());
        let errands = SimRegisterCalls::default();
        let session = match self.setup.views {
            false => session,
            true => {
                let carried = Box::new(errands.clone());
                let claim = ViewClient::new(self.views(n), carried, self.setup.limit);
                match session.with_views(claim, holders.clone()) {
                    Ok(s) if self.setup.fallback => s.leased(),
                    Ok(s) => s,
                    Err(e) => return self.failed_start(n, &e),
                }
            }
        };
        self.nodes[n].role = Role::Primary(Box::new(Prim {
            p,
            head: 0,
            epoch: 0,
            pending: VecDeque::new(),
            spills: Vec::new(),
            session,
            errands,
            holders,
            since: self.world.now(),
            begun: None,
            linked: false,
            listener,
            fresh: Vec::new(),
            ready: false,
            closing: false,
        }));
        self.observe(n)
    }

    /// What node `n` is about to read of its logs, if they are damaged.
    fn read_damage(&mut self, n: usize, spec: &StoreSpec) -> Checked {
        let failures = self.check.failures()[n];
        let shows = |r: &Rot| r.shows(&self.world, (n, NAMES[n]), spec, failures);
        if self.rot.as_ref().is_some_and(shows)
            && let Some(left) = rot::readable(&self.world, NAMES[n], spec)
        {
            self.note(|| format!("node {}: {left:?} of a damaged log", NAMES[n]));
            self.check.damaged(n, left.tail, left.told)?;
        }
        Ok(())
    }

    /// Something rots on the disk of node `n`.
    fn rot(&mut self, n: usize) {
        let spec = self.store_spec(n);
        let down = matches!(self.nodes[n].role, Role::Down);
        let dark = self.world.crashed(NAMES[n]) == Some(CrashKind::Power);
        if let Some(rot) = &mut self.rot {
            rot.strike(&self.world, (n, NAMES[n]), &spec, (down, down && dark));
        }
    }

    /// As `mojim promote --force` does where an attach was refused: the operator has
    /// looked, and what is missing is lost for good.
    fn go_on_by_word(&mut self, n: usize, store: Arc<Store>) -> Checked {
        let has_less = |to: usize| self.check.has_less(n, to);
        let down = |to: usize| matches!(self.nodes[to].role, Role::Down);
        if (0..NODES).any(|to| has_less(to) && down(to)) {
            // Whoever has more is started first.
            self.nodes[n].word = true;
            drop(store);
            self.world.kill(NAMES[n]);
            return self.fallen(n);
        }
        let has_less = (0..NODES).any(has_less);
        self.check.word();
        // It may have nothing, or less than another one does, its log being damaged: then
        // whoever has the most of those that run.
        let whole = |to: usize| match &self.nodes[to].role {
            Role::Mirror(mir) if mir.m.store.superblock().state == State::Whole => {
                Some((mir.m.tail(), to, mir.m.clone()))
            }
            _ => None,
        };
        let other = match store.superblock().state {
            State::Whole if !has_less => None,
            _ => (0..NODES).filter_map(whole).max_by_key(|(tail, ..)| *tail),
        };
        if let Some((_, to, m)) = other {
            drop(store);
            self.world.kill(NAMES[n]);
            self.fallen(n)?;
            return self.promote_by_word(to, m);
        }
        let m = Arc::new(Mirror::new(store, NAMES[n], self.setup.secondary));
        self.promote_by_word(n, m)
    }

    /// The latest view of the other nodes that are up: whoever promotes asks them.
    fn latest_of_others(&self, n: usize) -> u64 {
        let others = self.nodes.iter().enumerate().filter(|(i, _)| *i != n);
        let views = others.filter_map(|(_, node)| match &node.role {
            Role::Down => None,
            Role::Primary(p) => Some(p.p.store.superblock().view.epoch),
            Role::Mirror(m) => Some(m.m.store.superblock().view.epoch),
        });
        views.max().unwrap_or(0)
    }

    fn promote_by_word(&mut self, n: usize, m: Arc<Mirror>) -> Checked {
        let done = match self.setup.views {
            true => m.force(&*self.views(n)),
            false => m.promote(self.latest_of_others(n)).map(Some),
        };
        self.note(|| format!("node {} goes on by an operator's word: {done:?}", NAMES[n]));
        if let Ok(Some((epoch, tail))) = done
            && self.world.crashed(NAMES[n]).is_none()
        {
            self.word_of = epoch;
            self.promotions += 1;
            self.words += 1;
            self.check.promoted(n, &m.store, tail, false)?;
            self.primary = n;
            m.close();
            if m.store.close_clean(tail).is_ok() {
                self.check.closed(n, &m.store)?;
            }
            return self.end(n);
        }
        self.nodes[n].word = true;
        drop(m);
        self.world.kill(NAMES[n]);
        self.fallen(n)
    }

    /// As the daemon and the program do: to each other node that holds the
    /// volume, as long as this one is who forwards.
    fn forward(&mut self, n: usize, source: Arc<dyn Source>) {
        if !self.setup.backup {
            return;
        }
        for to in self.places.clone().into_iter().filter(|to| *to != n) {
            let there = Address::Tcp(address(to));
            self.nodes[n].forwards.push(Forwarding {
                to,
                forward: BackupSession::new(source.clone(), NAMES[n], NAMES[to], there),
                active: false,
                sessions: 0,
                copies: 0,
                lag: None,
            });
        }
    }

    fn failed_start(&mut self, n: usize, e: &Error) -> Checked {
        self.note(|| format!("node {} does not start: {e}", NAMES[n]));
        match self.world.crashed(NAMES[n]) {
            Some(_) => self.fallen(n),
            // A file is not as the last checkpoint left it, since more was applied, and the log
            // that would tell it cannot be read, or was given up: the copy has to be removed.
            None if matches!(e, Error::Damaged { .. })
                && (self.check.is_damaged(n) || self.check.blurred) =>
            {
                self.unopened += 1;
                self.nobody = Some(Vec::new());
                Ok(())
            }
            None if matches!(e, Error::Damaged { .. }) => {
                Err(format!("3: node {n} does not open: {e}"))
            }
            None if self.calm => Err(format!("live: node {n} does not open: {e}")),
            None => {
                self.world.kill(NAMES[n]);
                self.fallen(n)
            }
        }
    }

    /// The node's process ended, one way or another.
    fn fallen(&mut self, n: usize) -> Checked {
        self.follow_view();
        let kind = self.world.crashed(NAMES[n]).unwrap_or(CrashKind::Kill);
        self.note(|| format!("node {} {}", NAMES[n], crash_text(kind)));
        if let Role::Primary(p) = &self.nodes[n].role {
            // What it told others in its last step.
            let settled = self.check.before(p.head, committed(&p.p));
            if p.epoch != 0 {
                self.check.settled(settled);
            }
        }
        let node = &mut self.nodes[n];
        node.forwards.clear();
        node.streams.clear();
        let role = std::mem::replace(&mut node.role, Role::Down);
        node.taken = None;
        node.replaced |= match &role {
            Role::Mirror(m) => self.check.regressed(n, &m.m.store, m.m.received.get()),
            Role::Primary(p) if p.epoch == 0 => {
                self.check.regressed(n, &p.p.store, p.p.store.tail())
            }
            _ => false,
        };
        let limit = match &role {
            Role::Down => None,
            Role::Primary(p) => {
                let limit = p.p.apply_limit().max(p.p.store.tail()).min(p.p.last());
                Some((limit, p.p.store.history()))
            }
            Role::Mirror(m) => Some((m.m.received.get(), m.m.store.history())),
        };
        let limit = limit.and_then(|(lsn, h)| {
            (0..=lsn)
                .rev()
                .take(64)
                .find_map(|l| self.check.exact(&h, l))
        });
        let had = match &role {
            Role::Mirror(m) => {
                let h = m.m.store.history();
                let lsn = m.m.received.get();
                (0..=lsn)
                    .rev()
                    .take(64)
                    .find_map(|l| self.check.exact(&h, l))
            }
            _ => None,
        };
        drop(role);
        let wait = match self.rng.below(4) {
            0 => Duration::ZERO,
            1 => 4000 * MS,
            _ => MS * self.rng.between(1, 500) as u32,
        };
        let wait = match self.is_free() {
            true => wait.min(self.setup.limit * 2),
            false => wait,
        };
        self.nodes[n].restart = self.world.now() + wait;
        self.check.crashed(n, kind, limit, had)?;
        // While nobody looks, more often than at any other time.
        if !self.calm
            && let Some(rot) = &mut self.rot
            && rot.is_due(30_000)
        {
            self.rot(n);
        }
        Ok(())
    }

    /// A running primary that leaves its mirror has all that was acknowledged in a
    /// log that outlives its power, if it has one.
    fn watch_register(&mut self) -> Checked {
        let now = lock(&self.register).now.clone();
        let was = std::mem::replace(&mut self.seen, now.clone());
        let leaves = was.mirror.is_some() && now.mirror.is_none();
        match &now.primary {
            Some(p) if leaves && was.primary == now.primary && was.epoch == now.epoch => {
                let n = node(&p.node);
                match self.setup.persistent()[n] {
                    true => self.check.alone(n),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// After anything that node `n` did: what do we see?
    fn observe(&mut self, n: usize) -> Checked {
        self.watch_register()?;
        self.follow_fallback()?;
        self.follow_view();
        // What a dead process believes it did is not seen by anyone.
        if self.world.crashed(NAMES[n]).is_none() {
            return self.look(n);
        }
        if !matches!(self.nodes[n].role, Role::Down) {
            return self.fallen(n);
        }
        Ok(())
    }

    /// What a node's backups lack.
    fn look_at_backups(&mut self, n: usize) -> Checked {
        let lanes = self.setup.lanes as u64;
        let (threshold, longest) = (self.setup.secondary, self.longest);
        let node = &mut self.nodes[n];
        let Some(source) = node.forwards.first().map(|f| f.forward.source().clone()) else {
            return Ok(());
        };
        let (store, backups) = (source.store(), source.backups());
        // A record may not fit before the ring's end, and begins at a multiple of
        // up to 4096 bytes.
        let most = threshold.saturating_add(lanes * (2 * longest + 4096));
        for f in &mut node.forwards {
            let to = NAMES[f.to];
            let progress = backups.progress();
            let p = progress.iter().find(|p| p.name == to).expect("it joined");
            let active = f.forward.is_active();
            let mut had = f.lag.take();
            let sessions = p.sessions.load(Relaxed);
            if std::mem::replace(&mut f.sessions, sessions) != sessions {
                // It may lack any part of what the logs have, also if it ended at once.
                had = None;
            }
            if active && !f.active {
                let copies = p.copies.load(Relaxed);
                match copies == f.copies {
                    true => self.backups.by_log += 1,
                    false => self.backups.copies += 1,
                }
                f.copies = copies;
                self.world
                    .note(|| format!("--- node {} forwards to {to}, {copies} copies", NAMES[n]));
            }
            f.active = active;
            let acked = p.acked.load(Relaxed);
            if active && store.poisoned().is_none() && store.oldest() > acked + 1 {
                return Err(format!(
                    "backup: {to} has LSN {acked}, but the logs of {} begin at {}",
                    NAMES[n],
                    store.oldest()
                ));
            }
            // Also between two sessions.
            if !p.counts() {
                continue;
            }
            let lag = p.lag(store);
            if lag > most && had.is_some_and(|had| lag > had) {
                return Err(format!(
                    "backup: {to} lacks {lag} bytes of {}'s, {most} at most may wait",
                    NAMES[n]
                ));
            }
            f.lag = Some(lag);
        }
        Ok(())
    }

    fn look(&mut self, n: usize) -> Checked {
        self.look_at_backups(n)?;
        match &mut self.nodes[n].role {
            Role::Down => Ok(()),
            Role::Mirror(m) => {
                if !m.lanes.is_empty() {
                    self.check.resumed(n);
                }
                let m = m.m.clone();
                if !m.greeted().is_empty() {
                    self.check.follows(n, m.is_backup());
                }
                let logs = m.store.logs();
                let persisted = m.store.level().is_persistent()
                    && logs.iter().all(|l| l.persisted() >= l.head());
                self.check
                    .received(n, &m.store, m.received.get(), persisted)?;
                self.compare(n, &m.store)
            }
            Role::Primary(prim) => {
                let p = prim.p.clone();
                let begins = p.epoch() != prim.epoch && prim.epoch == 0;
                if begins {
                    self.fell_back(n, &p.store, p.last())?;
                }
                let Role::Primary(prim) = &mut self.nodes[n].role else {
                    unreachable!("it is one");
                };
                if p.epoch() != prim.epoch {
                    // A running primary may raise its own.
                    if begins {
                        prim.head = self.check.began(n, &p.store, p.last())?;
                    }
                    prim.epoch = p.epoch();
                    let epoch = prim.epoch;
                    self.world
                        .note(|| format!("--- epoch {epoch} begins behind LSN {}", p.last()));
                }
                let (head, epoch) = (prim.head, prim.epoch);
                if epoch == 0 {
                    if p.store.superblock().state != State::Whole {
                        return self.check.received(n, &p.store, 0, false);
                    }
                    return self.check.received(n, &p.store, p.store.tail(), false);
                }
                if p.store.level().is_persistent() {
                    self.check.persisted(n, head, p.persisted.get());
                }
                let settled = self.check.before(head, committed(&p));
                self.check.settled(settled);
                if p.store.poisoned().is_some() {
                    return Ok(());
                }
                self.check.looked(n, &p.store)?;
                self.compare(n, &p.store)?;
                self.acknowledge(n)
            }
        }
    }

    fn compare(&mut self, n: usize, store: &Store) -> Checked {
        if self.calm || self.rng.below(8) == 0 {
            self.check.compare(n, store, &self.world, NAMES[n])?;
        }
        Ok(())
    }

    /// What the application's waiting threads would see now.
    fn acknowledge(&mut self, n: usize) -> Checked {
        self.watch_attach(n)?;
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let (p, persistent) = (prim.p.clone(), self.setup.persistent());
        let mut rule = p.rule();
        let pair = [n, node(prim.session.peer())];
        if self.setup.fallback {
            // What counted within a lease goes on counting, also when the mirror is
            // asked for what comes next: it is no member before it has that too.
            let reg = lock(&self.register).now.clone();
            if reg.mirror.is_none() && reg.primary.is_some_and(|p| p.node == NAMES[n]) {
                rule = AckRule::LOCAL;
            }
        }
        let became = p.is_ready() && !prim.ready;
        if became {
            // What was adopted is shown to the application from now on.
            prim.ready = true;
            self.world.note(|| "--- attached".into());
            let adopted = self.check.before(prim.head, p.last());
            let adopted = match prim.pending.front() {
                None => adopted,
                Some(_) => return Err("attached with sync points under way".into()),
            };
            self.check.by_itself(n, adopted)?;
            self.check.acked(pair, adopted, rule, persistent)?;
        }
        if became {
            self.forward(n, p.clone());
        }
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let committed = p.committed();
        while let Some(f) = prim.pending.front()
            && self.check.points[f.point].last <= committed
        {
            let (point, spilled) = (f.point, f.spilled);
            prim.pending.pop_front();
            self.spilled.acked += u64::from(spilled);
            self.check.acked(pair, point, rule, persistent)?;
            self.check.acks += 1;
        }
        Ok(())
    }

    /// A program that begins with a link to its mirror: the register names the
    /// mirror, or another primary already, or the limit has passed.
    fn watch_attach(&mut self, n: usize) -> Checked {
        let now = self.world.now();
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let linked = std::mem::replace(&mut prim.linked, prim.session.is_active());
        if prim.session.is_attaching() {
            return Ok(());
        }
        // A link that is back only now may be another one, of a mirror that was
        // given up before.
        let same = prim.linked && (linked || prim.begun.is_none());
        let waited = now - *prim.begun.get_or_insert(now);
        let became = prim.p.is_ready() && !prim.ready;
        if !self.setup.views || !became || !same || waited >= self.setup.limit {
            return Ok(());
        }
        let (me, mirror) = (NAMES[n], prim.session.peer());
        let reg = lock(&self.register).now.clone();
        let is = |m: &Option<Member>, name| m.as_ref().is_some_and(|m| m.node == name);
        if is(&reg.primary, me) && !is(&reg.mirror, mirror) {
            return Err(format!(
                "view: {me} has attached, linked to {mirror}, which {reg:?} does not name"
            ));
        }
        Ok(())
    }

    /// One random step of the phase with faults.
    fn step(&mut self) -> Checked {
        let roll = self.rng.below(100);
        let n = self.some_node();
        match roll {
            0..=24 => self.append(self.runs(n))?,
            25..=54 => drop(self.turn(self.primary)?),
            55..=84 => drop(self.turn(self.mirror())?),
            85..=95 => self.pass()?,
            96 => self.checkpoint(n, self.rng.clone().below(3) == 0)?,
            97 => self.patience(),
            _ => self.restarts()?,
        }
        for n in 0..NODES {
            self.stream_turn(n)?;
            self.spill_turn(n)?;
        }
        if self.setup.backup {
            self.backup_step()?;
        }
        self.replace_step()?;
        if self.setup.views && self.is_time_for_trouble() {
            // A suspicion, wrong more often than not.
            self.take_over(self.mirror())?;
        }
        if self.is_time_for_trouble() {
            self.trouble()?;
        }
        self.fill();
        let (nodes, trouble) = (self.setup.nodes(), self.setup.trouble);
        if let Some(rot) = &mut self.rot
            && rot.is_due(trouble / 2)
        {
            let n = rot.node(nodes);
            self.rot(n);
        }
        Ok(())
    }

    /// Disks become full, and have room again.
    fn fill(&mut self) {
        let Some(rng) = &mut self.full else {
            return;
        };
        if rng.below(20_000) >= self.setup.trouble {
            return;
        }
        let n = rng.below(3.max(self.setup.nodes() as u64)) as usize;
        let room = match rng.coin() {
            true => None,
            false => Some(rng.below(8)),
        };
        self.note(|| format!("node {}: room for {room:?} pages", NAMES[n]));
        match room {
            Some(pages) if self.world.fails(NAMES[n], Takes::Room) => {
                self.world.fill(NAMES[n], pages);
            }
            Some(_) => {}
            None => self.world.set_quota(NAMES[n], None),
        }
    }

    /// Where the nodes change places most of the trouble is of that kind, and
    /// there is something to lose first.
    fn is_time_for_trouble(&mut self) -> bool {
        let of = match self.is_free() {
            true if self.appended == 0 => return false,
            true => 400_000,
            false => 100_000,
        };
        self.rng.below(of) < self.setup.trouble
    }

    /// What backups add to a step.
    fn backup_step(&mut self) -> Checked {
        match self.rng.below(20) {
            0..=7 => {
                for n in self.backups() {
                    self.turn(n)?;
                }
            }
            8..=12 => drop(self.forward_turn(self.primary)?),
            13..=17 => drop(self.forward_turn(self.mirror())?),
            18 => {
                let n = self.backup();
                self.checkpoint(n, self.rng.clone().below(3) == 0)?;
            }
            _ => {
                let n = self.backup();
                self.forward_turn(n)?;
            }
        }
        if self.is_time_for_trouble() {
            self.backup_trouble()?;
        }
        if !self.is_free() {
            return Ok(());
        }
        // A session takes hundreds of turns to begin.
        for _ in 0..self.places.len() {
            let n = self.some_node();
            self.turn(n)?;
            self.forward_turn(n)?;
        }
        if self.appended > 0 && self.rng.below(100_000) < self.setup.trouble {
            self.succession()?;
        }
        if self.setup.fallback {
            for n in 0..NODES {
                self.keep_vigil(n)?;
            }
            if self.appended > 0 && self.rng.below(100_000) < self.setup.trouble {
                self.lose_both()?;
            }
        }
        Ok(())
    }

    /// As `Node::watch_loop`, for a backup.
    fn keep_vigil(&mut self, n: usize) -> Checked {
        let now = self.world.now();
        let Role::Mirror(mir) = &self.nodes[n].role else {
            self.nodes[n].fallback.heard();
            return Ok(());
        };
        let m = mir.m.clone();
        if m.live_primary().is_some() {
            self.nodes[n].fallback.heard();
        } else if now >= self.nodes[n].next_look && m.store.poisoned().is_none() {
            self.nodes[n].next_look = now + self.setup.limit;
            return self.fall_back(n, m);
        }
        Ok(())
    }

    fn fall_back(&mut self, n: usize, m: Arc<Mirror>) -> Checked {
        let views = self.views(n);
        let Ok(reg) = views.read(VOLUME) else {
            return Ok(());
        };
        let now = self.world.now();
        let members = [&reg.primary, &reg.mirror].into_iter().flatten();
        let up = |o: usize| !matches!(self.nodes[o].role, Role::Down);
        let answers = |o: usize| up(o) && !self.world.is_partitioned(NAMES[o], NAMES[n]);
        let mut others: Vec<usize> = members.map(|m| node(&m.node)).collect();
        others.retain(|o| *o != n);
        // An answer may be late.
        let heard = others.iter().any(|o| answers(*o)) && self.rng.below(8) != 0;
        let fallback = &mut self.nodes[n].fallback;
        if !FallbackTimer::concerns(&m, &reg) || heard {
            fallback.heard();
            return Ok(());
        }
        if !fallback.is_over(&reg, now, self.setup.limit, false) {
            return Ok(());
        }
        self.nodes[n].falls_back = Fallback::Asked;
        let taken = m.force_from(&reg, &*views);
        self.note(|| format!("node {} goes on: {taken:?}", NAMES[n]));
        self.rise(n, m, taken)
    }

    /// Whether a backup has gone on by the register, as far as it was not seen
    /// before. What the others have told their applications by then is given
    /// up, and they tell them nothing from then on.
    fn follow_fallback(&mut self) -> Checked {
        let primary = lock(&self.register).now.primary.clone();
        let Some(n) = primary.map(|p| node(&p.node)) else {
            return Ok(());
        };
        if self.nodes[n].falls_back != Fallback::Asked {
            return Ok(());
        }
        self.nodes[n].falls_back = Fallback::Agreed;
        for o in self.places.clone().into_iter().filter(|o| *o != n) {
            if self.world.crashed(NAMES[o]).is_none() {
                self.acknowledge(o)?;
            }
        }
        self.check.given_up(n);
        Ok(())
    }

    /// Node `n` begins a view; whether as a backup that goes on for both.
    fn fell_back(&mut self, n: usize, store: &Store, tail: u64) -> Checked<bool> {
        let fell = self.nodes[n].falls_back == Fallback::Agreed;
        if fell {
            self.nodes[n].falls_back = Fallback::No;
            self.backups.fallbacks += 1;
            self.check.fell_back(n, store, tail)?;
        }
        Ok(fell)
    }

    /// Primary and mirror are lost to the backup: dead for long, or cut off from
    /// it, with the voters or without.
    fn lose_both(&mut self) -> Checked {
        let pair = [self.primary, self.mirror()];
        let backups = self.backups();
        let how = self.rng.below(4);
        for n in pair {
            let away = self.setup.limit * self.rng.between(1, 12) as u32;
            match how {
                0 => {
                    match self.rng.coin() {
                        true => self.kill(n),
                        false => self.lose_power(n)?,
                    }
                    self.observe(n)?;
                    let node = &mut self.nodes[n];
                    node.restart = node.restart.max(self.world.now() + away);
                }
                _ => {
                    for backup in &backups {
                        self.world.partition(NAMES[n], NAMES[*backup], false, true);
                    }
                    if how != 1 {
                        lock(&self.register).cut[n] = true;
                    }
                }
            }
        }
        Ok(())
    }

    /// The mirror or the primary goes, for longer than anybody waits for it.
    fn succession(&mut self) -> Checked {
        let (mirror, primary) = (self.mirror(), self.primary);
        let most = match self.risen == Some(mirror) {
            true => 2,
            false => 5,
        };
        let lost = match self.rng.below(most) {
            0 => primary,
            _ => mirror,
        };
        match self.rng.coin() {
            true => self.kill(lost),
            false => self.lose_power(lost)?,
        }
        self.observe(lost)?;
        let away = self.setup.limit * self.rng.between(1, 12) as u32;
        let node = &mut self.nodes[lost];
        node.restart = node.restart.max(self.world.now() + away);
        match lost == primary {
            true => self.take_over(mirror),
            false => Ok(()),
        }
    }

    /// One turn of one of the threads that forward.
    fn forward_turn(&mut self, n: usize) -> Checked<bool> {
        let forwards = &mut self.nodes[n].forwards;
        if forwards.is_empty() {
            return Ok(false);
        }
        let i = self.rng.below(forwards.len() as u64) as usize;
        let was = forwards[i].forward.last_error.clone();
        let moved = forwards[i].forward.step();
        self.nodes[n]
            .streams
            .extend(forwards[i].forward.take_streams());
        let f = &forwards[i];
        if let Some(e) = f
            .forward
            .last_error
            .as_ref()
            .filter(|e| was.as_ref() != Some(e))
        {
            self.world
                .note(|| format!("--- node {} to {}: {e}", NAMES[n], NAMES[f.to]));
        }
        self.observe(n)?;
        Ok(moved)
    }

    /// One turn of one of the threads that carry a part of a copy.
    fn stream_turn(&mut self, n: usize) -> Checked<bool> {
        let node = &mut self.nodes[n];
        let out = node.streams.len();
        let came = match &mut node.role {
            Role::Mirror(m) => &mut m.streams,
            _ => &mut Vec::new(),
        };
        if out + came.len() == 0 {
            return Ok(false);
        }
        let i = self.rng.below((out + came.len()) as u64) as usize;
        let late = self.setup.stream_pace;
        let moved = match i.checked_sub(out) {
            Some(_) if !self.calm && self.rng.below(late) != 0 => false,
            None => {
                let moved = node.streams[i].step();
                if node.streams[i].is_over() {
                    node.streams.remove(i);
                }
                moved
            }
            Some(i) => came[i].step().unwrap_or_else(|_| {
                came.remove(i);
                true
            }),
        };
        self.observe(n)?;
        Ok(moved)
    }

    /// Time passes.
    fn pass(&mut self) -> Checked {
        let now = self.world.now();
        let by = match self.rng.below(10) {
            0..=4 => Duration::from_micros(self.rng.between(1, 200)),
            5..=7 => self
                .world
                .next_event()
                .map_or(MS, |t| t - now)
                .min(1000 * MS),
            8 => MS * self.rng.between(1, 50) as u32,
            _ => MS * self.rng.between(50, 400) as u32,
        };
        let most = match self.is_free() {
            // Longer is a failure of every link.
            true => self.setup.limit / 4,
            false => Duration::MAX,
        };
        self.world.advance(by.min(most));
        Ok(())
    }

    /// A process that has ended, or whose store failed, starts again.
    fn restarts(&mut self) -> Checked {
        self.follow_register();
        for n in 0..NODES {
            self.hand_over(n)?;
        }
        if self.setup.views && matches!(self.nodes[self.primary].role, Role::Mirror(_)) {
            // The register's answer was lost: it is the primary already.
            self.take_over(self.primary)?;
        }
        for n in self.places.clone() {
            if n == 1 && !self.setup.replicated() {
                continue;
            }
            let poisoned = match &self.nodes[n].role {
                Role::Down => false,
                Role::Primary(p) => p.p.store.poisoned().is_some() || p.session.fatal().is_some(),
                Role::Mirror(m) => m.m.store.poisoned().is_some(),
            };
            if poisoned {
                if let Role::Primary(p) = &self.nodes[n].role
                    && let Some(e) = p.session.fatal()
                {
                    let e = e.to_string();
                    self.note(|| format!("node {} cannot attach: {e}", NAMES[n]));
                    // The mirror began a promotion that failed: attach again.
                    let catching_up = Loss::Copy(Lacks::CatchingUp);
                    let refused = p.session.loss().is_some_and(|l| l != catching_up);
                    let again = refused
                        || e.contains("is promised")
                        || e.contains("cannot be made")
                        || n != self.primary;
                    // No copy is complete: a person has to decide, and the run ends.
                    let lost =
                        p.session.loss() == Some(catching_up) || e.contains("no usable copy");
                    let memory = !self.setup.persistent()[n] && self.check.failures()[n] > 0;
                    if lost && (self.check.has_lost() || memory) {
                        self.nobody = Some(vec![n]);
                        return Ok(());
                    }
                    if !again && !self.check.all_lost() {
                        return Err(format!("live: node {n} cannot attach: {e}"));
                    }
                    self.nodes[n].word |= refused && n == self.primary;
                }
                self.note(|| format!("node {} is reopened", NAMES[n]));
                self.world.kill(NAMES[n]);
                self.fallen(n)?;
            }
            let node = &self.nodes[n];
            if matches!(node.role, Role::Down)
                && node.restart <= self.world.now()
                && (!node.gone || self.calm)
            {
                self.start(n)?;
            }
        }
        Ok(())
    }

    /// One turn of one of a node's threads. True if something moved.
    fn turn(&mut self, n: usize) -> Checked<bool> {
        let lanes = self.setup.lanes as u64;
        let gone = self.gone();
        if self.setup.views
            && let Role::Primary(prim) = &self.nodes[n].role
            && self.rng.below(4) == 0
        {
            prim.errands.run(&*self.views(n));
        }
        let moved = match &mut self.nodes[n].role {
            Role::Down => return Ok(false),
            Role::Primary(prim) => {
                let p = prim.p.clone();
                match self.rng.below(8) {
                    0..=2 => match self.setup.replicated() {
                        true => {
                            let moved = prim.session.step();
                            let streams = prim.session.take_streams();
                            self.nodes[n].streams.extend(streams);
                            self.attach_alone(n)?;
                            moved
                        }
                        false => self.attach_unreplicated(n)?,
                    },
                    3..=5 if prim.epoch != 0 => {
                        let _ = p.drive(self.rng.below(lanes) as usize);
                        false
                    }
                    6 if prim.epoch != 0 => {
                        p.send(self.rng.below(lanes) as usize);
                        false
                    }
                    _ => {
                        accept_busy(prim, n);
                        if prim.epoch != 0 && self.rng.below(4) == 0 {
                            let _ = p.checkpoint_step(pace(self.rng.below(6)));
                        }
                        false
                    }
                }
            }
            Role::Mirror(m) => match self.rng.below(8) {
                0 => accept(m, n, gone),
                1 | 2 => {
                    let mut moved = false;
                    m.control.retain_mut(|c| match c.step() {
                        Ok(b) => {
                            moved |= b;
                            true
                        }
                        Err(_) => {
                            moved = true;
                            c.end();
                            false
                        }
                    });
                    moved
                }
                3..=6 if !m.lanes.is_empty() => {
                    let i = self.rng.below(m.lanes.len() as u64) as usize;
                    match m.lanes[i].step() {
                        Ok(s) => {
                            if s == Step::Held {
                                self.backups.stalls += 1;
                            }
                            s == Step::Moved
                        }
                        Err(_) => {
                            m.lanes.remove(i);
                            true
                        }
                    }
                }
                _ => {
                    if self.rng.below(4) == 0 {
                        let _ = m.m.checkpoint_step(self.rng.below(6) == 0);
                    }
                    false
                }
            },
        };
        self.count_copies(n);
        self.observe(n)?;
        Ok(moved)
    }

    fn count_copies(&mut self, n: usize) {
        let now = match &self.nodes[n].role {
            Role::Down => return,
            Role::Primary(p) => p.p.store.progress.counts(),
            Role::Mirror(m) => m.m.store.progress.counts(),
        };
        for (i, now) in now.into_iter().enumerate() {
            let before = &mut self.counted[n][i];
            // Another process begins at zero.
            self.copies[i] += now.saturating_sub(*before);
            *before = now;
        }
    }

    fn attach_unreplicated(&mut self, n: usize) -> Checked<bool> {
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(false);
        };
        if prim.p.is_ready() {
            return Ok(false);
        }
        if prim.p.store.check_complete().is_err() {
            self.ask_operator(n)?;
            return Ok(true);
        }
        if prim.p.begin_unreplicated(NAMES[n]).is_ok() {
            let tail = prim.p.last();
            let _ = prim.p.store.apply(tail, usize::MAX);
        }
        Ok(true)
    }

    /// The program ends, and says why.
    fn ask_operator(&mut self, n: usize) -> Checked {
        self.note(|| format!("node {} lacks what was acknowledged", NAMES[n]));
        self.nodes[n].word = true;
        self.world.kill(NAMES[n]);
        self.observe(n)
    }

    /// As `Volume::attach` does: a primary that is alone by its last view
    /// does not wait for long.
    fn attach_alone(&mut self, n: usize) -> Checked {
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let asynchronous = self.setup.mode == Mode::Async;
        let sb = prim.p.store.superblock();
        let may = sb.state == State::Whole
            && sb.view.epoch > 0
            && (sb.view.mirror.is_empty() || asynchronous);
        let may = match self.setup.views {
            false => may,
            true => {
                sb.state == State::Whole
                    && prim.epoch == 0
                    && self.world.now() - prim.since > self.setup.limit
                    && matches!(prim.session.may_attach_alone(), Some(Ok(true)))
            }
        };
        if may
            && prim.session.is_attaching()
            && !prim.p.is_ready()
            && !prim.session.is_active()
            && (self.setup.views || self.world.now() - prim.since > 500 * MS)
            && prim.session.fatal().is_none()
            && prim.epoch == 0
        {
            self.world.note(|| "--- goes alone".into());
            if prim.p.store.check_complete().is_err() {
                return self.ask_operator(n);
            }
            if prim.session.go_alone().is_ok() {
                let tail = prim.p.last();
                let _ = prim.p.store.apply(tail, usize::MAX);
            }
        }
        Ok(())
    }

    fn checkpoint(&mut self, n: usize, idle: bool) -> Checked {
        match &self.nodes[n].role {
            Role::Down => return Ok(()),
            Role::Primary(p) if p.epoch != 0 => {
                let pace = if idle { Pace::Idle } else { Pace::Quiet };
                let _ = p.p.checkpoint_step(pace);
            }
            Role::Primary(_) => {}
            Role::Mirror(m) => {
                let _ = m.m.checkpoint_step(idle);
            }
        }
        self.observe(n)
    }

    /// What a waiting thread does when nothing comes.
    fn patience(&mut self) {
        let now = self.world.now();
        for node in &mut self.nodes {
            if let Role::Primary(prim) = &mut node.role
                && let Some(f) = prim.pending.front_mut()
                && now - f.since > prim.p.resend_after()
            {
                f.since = now;
                if !prim.p.is_held_back(now) && prim.p.is_linked() && prim.p.rule().mirror {
                    prim.p
                        .suspect(Error::Protocol("no acknowledgement in time".into()));
                }
            }
        }
    }

    fn append(&mut self, n: usize) -> Checked {
        let Role::Primary(prim) = &self.nodes[n].role else {
            return Ok(());
        };
        if !prim.ready || prim.closing || prim.p.store.poisoned().is_some() {
            return Ok(());
        }
        let p = prim.p.clone();
        let (head, epoch) = (prim.head, prim.epoch);
        let spilling = !prim.spills.is_empty();
        if self.is_time_for_spill() {
            return self.begin_spill(n);
        }
        let files = self.check.points[head].files.clone();
        let changes = self.changes(&files);
        if spilling && !spill::is_plain(&changes) {
            return Ok(());
        }
        let pieces: Vec<_> = changes.iter().map(Change::piece).collect();
        let before = p.last();
        let heads = || p.store.logs().iter().map(Log::head).collect::<Vec<_>>();
        let from = heads();
        let lane = self.rng.below(self.setup.lanes as u64) as usize;
        match p.try_append_now(&pieces, lane) {
            Ok(Some((last, lane))) => {
                self.appended += 1;
                self.longest = self.longest.max(heads()[lane] - from[lane]);
                let point = self
                    .check
                    .appended(n, head, epoch, before + 1, last, &changes)?;
                let since = self.world.now();
                self.note(|| format!("appended LSN {}..={last} on lane {lane}", before + 1));
                if let Role::Primary(prim) = &mut self.nodes[n].role {
                    prim.head = point;
                    prim.pending.push_back(Pending {
                        point,
                        since,
                        spilled: false,
                    });
                }
            }
            Ok(None) => {
                if p.backups.is_full(&p.store) {
                    self.backups.stalls += 1;
                }
                // As `wait_for_room`.
                for l in 0..self.setup.lanes {
                    let _ = p.drive(l);
                }
                let _ = p.checkpoint_step(Pace::Busy);
            }
            Err(Error::Invalid(_)) => {}
            Err(e) => self.note(|| format!("append failed: {e}")),
        }
        self.observe(n)
    }

    fn changes(&mut self, files: &Files) -> Vec<Change> {
        let rng = &mut self.rng;
        let mut out = Vec::new();
        let roll = rng.below(100);
        let some = |rng: &mut Rng| {
            let i = rng.below(files.len() as u64) as usize;
            *files.keys().nth(i).expect("below its length")
        };
        let name = |rng: &mut Rng| match rng.below(3) {
            0 => format!("d/f{}", rng.below(3)),
            _ => format!("f{}", rng.below(6)),
        };
        let size = |rng: &mut Rng| match rng.below(6) {
            0 => 0,
            1 => rng.between(1, 600),
            5 => rng.between(1, 40_000),
            _ => rng.between(1, 9000),
        };
        if files.is_empty() || roll < 6 && files.len() < 6 {
            let name = name(rng);
            if files.values().all(|f| f.name != name) {
                self.names += 1;
                let file = (self.names as u32).wrapping_mul(0x9e37_79b1);
                out.push(Change::Create { file, name });
                if rng.coin() {
                    let size = size(rng);
                    out.push(Change::Resize { file, size });
                    if size > 0 && rng.coin() {
                        out.push(write(rng, file, size));
                    }
                }
                return out;
            }
        }
        if files.is_empty() {
            return out;
        }
        let file = some(rng);
        match roll {
            6..=10 => {
                let size = size(rng);
                if size > 0 && rng.coin() && !files[&file].data.is_empty() {
                    out.push(write(rng, file, files[&file].data.len() as u64));
                }
                out.push(Change::Resize { file, size });
                if size > 0 && rng.coin() {
                    out.push(write(rng, file, size));
                }
            }
            11 | 12 => out.push(Change::Remove { file }),
            13..=15 => {
                let name = name(rng);
                if files[&file].name != name {
                    out.push(Change::Rename { file, name });
                }
            }
            _ => {
                for _ in 0..rng.between(1, 5) {
                    let file = some(rng);
                    let len = files[&file].data.len() as u64;
                    if len > 0 {
                        out.push(write(rng, file, len));
                    }
                }
            }
        }
        out
    }

    /// Something goes wrong, or someone intervenes.
    fn trouble(&mut self) -> Checked {
        let pair = [self.primary, self.mirror()];
        if self.anew.below(16) == 0
            && let Role::Mirror(m) = &self.nodes[pair[1]].role
        {
            // As `mojim repair --anew`; its primary dies, perhaps before the new copy
            // has all that the old one had.
            self.note(|| format!("node {} is to be copied anew", NAMES[pair[1]]));
            m.m.distrust();
            let after = self.anew.between(1, 60);
            self.arm_on_send(pair[0], after, CrashKind::Kill);
            self.suspects = Some(pair[1]);
            return Ok(());
        }
        if let Some(n) = self.suspects.take()
            && self.setup.views
            && matches!(self.nodes[self.primary].role, Role::Down)
        {
            return self.take_over(n);
        }
        let i = self.rng.below(2) as usize;
        let (n, other) = (pair[i], pair[1 - i]);
        let name = NAMES[n];
        let kind = match self.rng.coin() {
            true => CrashKind::Kill,
            false => CrashKind::Power,
        };
        let oneway = self.rng.coin();
        let after = match self.rng.coin() {
            true => self.rng.between(1, 20),
            false => self.rng.between(1, 200),
        };
        match self.rng.below(20) {
            0..=2 => {
                self.kill(n);
                return self.observe(n);
            }
            3 | 4 => {
                return self.lose_power(n);
            }
            5..=8 => self.arm(n, after, kind),
            9 => self.arm_on_send(n, after.min(30), kind),
            10 => {
                self.world.partition(name, NAMES[other], oneway, true);
                if self.setup.views && self.rng.coin() {
                    lock(&self.register).cut[n] = true;
                }
            }
            11..=13 => {
                self.world.partition(name, NAMES[other], false, false);
                lock(&self.register).cut = std::array::from_fn(|n| self.gone() == Some(n));
            }
            14 => self.world.reset_connections(name, NAMES[other]),
            15 | 16 if self.setup.views => return self.take_over(other),
            15 | 16 => return self.promote(),
            17 | 18 => return self.detach(),
            _ => {
                for n in pair {
                    self.kill(n);
                    self.observe(n)?;
                }
            }
        }
        Ok(())
    }

    /// The process of node `n` is killed.
    fn kill(&self, n: usize) {
        if self.world.fails(NAMES[n], Takes::Process) {
            self.world.kill(NAMES[n]);
        }
    }

    /// Node `n` crashes in an operation to come, or in a send.
    fn arm(&self, n: usize, after: u64, kind: CrashKind) {
        if self.world.fails(NAMES[n], takes(kind)) {
            self.world.arm_crash(NAMES[n], after, kind);
        }
    }

    fn arm_on_send(&self, n: usize, after: u64, kind: CrashKind) {
        if self.world.fails(NAMES[n], takes(kind)) {
            self.world.arm_crash_on_send(NAMES[n], after, kind);
        }
    }

    fn lose_power(&mut self, n: usize) -> Checked {
        if !self.world.fails(NAMES[n], Takes::Power) {
            return Ok(());
        }
        self.world.power_loss(NAMES[n]);
        match self.nodes[n].role {
            Role::Down => self.check.crashed(n, CrashKind::Power, None, None),
            _ => self.observe(n),
        }
    }

    /// Something goes wrong with the backup or its links.
    fn backup_trouble(&mut self) -> Checked {
        let n = self.backup();
        let name = NAMES[n];
        let pair = [self.primary, self.mirror()];
        let other = *self.rng.pick(&pair);
        let kind = match self.rng.coin() {
            true => CrashKind::Kill,
            false => CrashKind::Power,
        };
        let after = match self.rng.coin() {
            true => self.rng.between(1, 20),
            false => self.rng.between(1, 200),
        };
        match self.rng.below(16) {
            0..=2 => {
                self.kill(n);
                self.observe(n)?;
            }
            3 | 4 => {
                self.lose_power(n)?;
            }
            5..=7 => self.arm(n, after, kind),
            8 => {
                let oneway = self.rng.coin();
                let (from, to) = match self.rng.coin() {
                    true => (name, NAMES[other]),
                    false => (NAMES[other], name),
                };
                self.world.partition(from, to, oneway, true);
            }
            9 => {
                // Cut off for good, or until somebody mends it.
                for other in pair {
                    self.world.partition(name, NAMES[other], false, true);
                }
            }
            10..=12 => {
                for other in pair {
                    self.world.partition(name, NAMES[other], false, false);
                }
            }
            13 => self.world.reset_connections(name, NAMES[other]),
            // While it forwards, as likely as not.
            14 => self.arm_on_send(other, after.min(30), kind),
            _ => self.stop_mirror(n)?,
        }
        Ok(())
    }

    /// The operator gives the primary up and promotes the mirror.
    fn promote(&mut self) -> Checked {
        let (old, n) = (self.primary, self.mirror());
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        let sb = m.store.superblock();
        let view = m.store.standing();
        if may_promote(NAMES[n], &view, sb.state, false).is_err() {
            return Ok(());
        }
        // As `Node::promote`: a log that is damaged is given up by force alone, but in
        // `async` one whose lanes end where they were cut.
        let missing = m.store.known_missing().is_some_and(|k| k > m.tail());
        if missing && (self.setup.mode != Mode::Async || m.store.has_hole()) {
            return Ok(());
        }
        // It may still take itself for the primary of a view that the other
        // node's promotion ended unseen. The operator, who promoted that one,
        // knows better.
        if view.primary == NAMES[n] {
            return Ok(());
        }
        // Nor does a copy go on that was left behind by a word of that operator, and does
        // not know it: `mojim promote` asks the other node for its view.
        if view.epoch < self.word_of {
            return Ok(());
        }
        self.note(|| format!("node {} is given up", NAMES[old]));
        self.world.kill(NAMES[old]);
        self.observe(old)?;
        self.nodes[old].gone = self.rng.coin();
        let promoted = m.promote(self.latest_of_others(n));
        self.note(|| format!("node {} is promoted: {promoted:?}", NAMES[n]));
        let Ok((_, tail)) = promoted.clone() else {
            drop(m);
            self.half_promoted = Some(n);
            return self.observe(n);
        };
        if self.world.crashed(NAMES[n]).is_some() {
            drop(m);
            return self.fallen(n);
        }
        self.promotions += 1;
        let lossy = self.setup.mode == Mode::Async;
        self.check.word();
        self.check.promoted(n, &m.store, tail, lossy)?;
        self.primary = n;
        m.close();
        let closed = m.store.close_clean(tail);
        if closed.is_ok() {
            self.check.closed(n, &m.store)?;
        }
        self.compare(n, &m.store)?;
        drop(m);
        self.end(n)
    }

    /// Node `n` takes its primary for dead, rightly or not: that is never
    /// unsafe where a register decides.
    fn take_over(&mut self, n: usize) -> Checked {
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        let taken = m.take_over(&*self.views(n));
        self.note(|| format!("node {} takes over: {taken:?}", NAMES[n]));
        self.rise(n, m, taken)
    }

    /// Node `n` is the register's primary, if `taken` says so.
    fn rise(
        &mut self,
        n: usize,
        m: Arc<Mirror>,
        taken: mojim_env::Result<Option<(u64, u64)>>,
    ) -> Checked {
        let Ok(Some((_, tail))) = taken else {
            drop(m);
            return self.observe(n);
        };
        if self.world.crashed(NAMES[n]).is_some() {
            drop(m);
            return self.fallen(n);
        }
        self.promotions += 1;
        self.backups.primaries += u64::from(self.risen.take_if(|m| *m == n).is_some());
        self.follow_fallback()?;
        match self.fell_back(n, &m.store, tail)? {
            true => {}
            false => {
                self.check.promoted(n, &m.store, tail, false)?;
                self.check.took_over(n)?;
            }
        }
        self.primary = n;
        self.nodes[n].taken = Some(tail);
        drop(m);
        match self.rng.coin() {
            true => Ok(()),
            false => self.hand_over(n),
        }
    }

    /// As `Node::hand_over`: the program attaches next.
    fn hand_over(&mut self, n: usize) -> Checked {
        let Some(tail) = self.nodes[n].taken.take() else {
            return Ok(());
        };
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        m.close();
        let closed = match self.setup.backup {
            // Who forwards still reads the ring.
            true => m.store.close_clean(tail),
            false => m.store.close_for_next(tail),
        };
        if closed.is_ok() {
            self.check.closed(n, &m.store)?;
        }
        self.compare(n, &m.store)?;
        drop(m);
        self.end(n)
    }

    /// Ends a node's process in good order: its stores were closed.
    fn end(&mut self, n: usize) -> Checked {
        if self.world.crashed(NAMES[n]).is_some() {
            return self.fallen(n);
        }
        self.nodes[n].forwards.clear();
        self.nodes[n].streams.clear();
        self.nodes[n].role = Role::Down;
        self.nodes[n].restart = self.world.now();
        self.world.kill(NAMES[n]);
        Ok(())
    }

    /// The application detaches, or the mirror's daemon stops.
    fn detach(&mut self) -> Checked {
        if self.rng.coin() {
            let n = self.primary;
            if let Role::Primary(prim) = &mut self.nodes[n].role
                && prim.ready
            {
                prim.closing = true;
            }
            return self.close_primary();
        }
        self.stop_mirror(self.mirror())
    }

    /// A daemon stops in good order.
    fn stop_mirror(&mut self, n: usize) -> Checked {
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        self.note(|| format!("node {} stops", NAMES[n]));
        m.close();
        if m.store.superblock().state == State::Whole && m.store.poisoned().is_none() {
            // As `Node::close_mirror`.
            let tail = m.tail();
            let limit = m.committed().min(tail);
            let _ = m.store.apply(limit, usize::MAX);
            let nothing_left =
                (0..self.setup.lanes).all(|i| m.store.last_of(i).0 <= m.store.applied());
            let done = m.store.checkpoint();
            if done.is_ok()
                && nothing_left
                && m.store.applied() == tail
                && m.store.close_clean(tail).is_ok()
            {
                self.check.closed(n, &m.store)?;
                drop(m);
                return self.end(n);
            }
        }
        drop(m);
        self.world.kill(NAMES[n]);
        self.observe(n)
    }

    /// As `Inner::close`, once everything is committed.
    fn close_primary(&mut self) -> Checked {
        let n = self.primary;
        let Role::Primary(prim) = &self.nodes[n].role else {
            return Ok(());
        };
        let p = prim.p.clone();
        let last = p.last();
        let busy = p.committed() < last || !prim.spills.is_empty();
        if !prim.closing || busy || p.store.poisoned().is_some() {
            return Ok(());
        }
        self.observe(n)?;
        self.note(|| "detaches".into());
        let closed = p
            .store
            .persist_all()
            .and_then(|()| p.store.apply(last, usize::MAX))
            .and_then(|at| match at == last {
                true => p.store.close_clean(last),
                false => Err(Error::Busy("not applied".into())),
            });
        if closed.is_ok() {
            self.check.closed(n, &p.store)?;
            drop(p);
            return self.end(n);
        }
        self.note(|| format!("not closed: {closed:?}"));
        drop(p);
        self.world.kill(NAMES[n]);
        self.observe(n)
    }

    /// Faults stop, everything restarts: it must become whole again.
    fn settle(&mut self) -> Checked {
        self.note(|| "calm".into());
        self.calm = true;
        self.world.set_faults(Faults::none());
        let most = match self.setup.spare {
            true => NODES,
            false => self.setup.nodes().max(3),
        };
        for y in 0..most {
            for x in 0..y {
                self.world.partition(NAMES[x], NAMES[y], false, false);
            }
        }
        {
            let mut r = lock(&self.register);
            r.cut = std::array::from_fn(|n| self.gone() == Some(n));
            r.lost = 0;
        }
        for n in 0..most {
            self.world.set_quota(NAMES[n], None);
            self.world.disarm(NAMES[n]);
            self.nodes[n].restart = self.world.now();
            self.check.look_again(n);
        }
        if let Role::Primary(p) = &mut self.nodes[self.primary].role {
            p.closing = false;
        }
        self.find_new_mirror()?;
        let start = self.world.now();
        let mut asked = 0;
        let mut rounds = 0u64;
        loop {
            rounds += 1;
            self.restarts()?;
            if self.nobody.is_some() {
                return Ok(());
            }
            let mut moved = false;
            for _ in 0..12 {
                for n in 0..NODES {
                    moved |= self.stream_turn(n)?;
                    self.spill_turn(n)?;
                }
                moved |= self.turn(self.primary)?;
                if self.setup.replicated() {
                    moved |= self.turn(self.mirror())?;
                }
                self.replace_step()?;
                if self.setup.backup {
                    for n in self.backups() {
                        moved |= self.turn(n)?;
                    }
                    for n in 0..NODES {
                        moved |= self.forward_turn(n)?;
                    }
                }
            }
            self.patience();
            for n in 0..NODES {
                self.checkpoint(n, rounds.is_multiple_of(4))?;
            }
            if asked < 3
                && let Role::Primary(p) = &self.nodes[self.primary].role
                && p.ready
            {
                asked += 1;
                self.append(self.primary)?;
            }
            let quiet = asked == 3 && self.is_settled();
            if quiet {
                break;
            }
            self.ask_holders(self.primary);
            let now = self.world.now();
            if now - start > Duration::from_secs(20) && self.nobody_may()? {
                return Ok(());
            }
            // A link that goes silent at a copy's very end is noticed late.
            if now - start > Duration::from_secs(300) || rounds > 30_000 {
                return Err(format!("live: stuck: {}", self.state()));
            }
            let by = match moved {
                true => Duration::from_micros(50),
                false => self
                    .world
                    .next_event()
                    .map_or(20 * MS, |t| t - now)
                    .min(20 * MS),
            };
            self.world.advance(by);
        }
        self.count_members();
        self.finally()
    }

    /// Every node that the register names has begun another life since: a
    /// person has to decide what is given up. That is so only where each of them
    /// lost what its power took with it.
    fn nobody_may(&mut self) -> Checked<bool> {
        let reg = lock(&self.register).now.clone();
        let lives = self.nodes.iter().enumerate().filter_map(|(n, node)| {
            let store = match &node.role {
                Role::Down => return None,
                Role::Primary(p) => &p.p.store,
                Role::Mirror(m) => &m.m.store,
            };
            Some((NAMES[n], store.superblock().life))
        });
        let lives: Vec<_> = lives.collect();
        // It went on for both, was killed before it began, and its log is damaged.
        let damaged = |m: &Member| match &self.nodes[node(&m.node)].role {
            Role::Mirror(mir) => {
                let missing = mir.m.store.known_missing();
                self.setup.fallback && missing.is_some_and(|k| k > mir.m.tail())
            }
            _ => false,
        };
        if reg.primary.as_ref().is_some_and(damaged) {
            self.nobody = Some(Vec::new());
            return Ok(true);
        }
        let gone = self.gone();
        let lost = |m: &Member| {
            gone == Some(node(&m.node))
                || lives
                    .iter()
                    .any(|(n, l)| *n == m.node && *l != m.incarnation)
        };
        // The operator wanted the mirror's copy made anew, so its word does not count.
        let distrusted = |m: &Member| match &self.nodes[node(&m.node)].role {
            Role::Mirror(mir) => mir.m.is_distrusted(),
            _ => false,
        };
        let given_up = reg.mirror.as_ref().is_some_and(distrusted);
        let nobody = self.setup.views
            && reg.primary.as_ref().is_some_and(lost)
            && (given_up || reg.mirror.as_ref().is_none_or(lost));
        let mirror = reg.mirror.as_ref().filter(|_| !given_up);
        if !nobody {
            return Ok(false);
        }
        for (m, leads) in [(reg.primary.as_ref(), true), (mirror, false)] {
            let Some(m) = m else { continue };
            let n = node(&m.node);
            if gone == Some(n) {
                continue;
            }
            let before = self.named.get(&(n, m.incarnation)).copied().unwrap_or(0);
            // With a persistent log only the ring of a pair's primary goes, whose mirror
            // alone counts; one that has just begun to go on alone may be taken for it,
            // since its superblock says so later than the register.
            let ring = leads && self.setup.mode == Mode::Sync;
            let may_lose = ring || !self.setup.persistent()[n];
            if !may_lose || self.check.failures()[n] == before {
                return Err(format!(
                    "live: nobody may go on, but {} had no cause to begin another life: {reg:?}, {}",
                    m.node,
                    self.state()
                ));
            }
        }
        let members = reg.primary.iter().chain(mirror);
        self.nobody = Some(members.map(|m| node(&m.node)).collect());
        Ok(true)
    }

    /// How the run ended, where nobody may go on.
    pub fn nobody(&self) -> Option<Nobody> {
        let needs = self.nobody.as_ref()?;
        Some(Nobody {
            needs: needs.iter().map(|n| NAMES[*n]).collect(),
            failures: self.world.failures(),
        })
    }

    /// A backup has what the primary has. One of another volume waits for a
    /// person, who removes it.
    fn backup_is_settled(&self, n: usize, p: &Primary) -> bool {
        let Role::Mirror(c) = &self.nodes[n].role else {
            return false;
        };
        let sb = c.m.store.superblock();
        self.is_foreign(n, p)
            || sb.state == State::Whole
                && c.m.received.get() == p.last()
                && c.m.store.applied() == p.last()
    }

    fn is_foreign(&self, n: usize, p: &Primary) -> bool {
        let Role::Mirror(c) = &self.nodes[n].role else {
            return false;
        };
        let sb = c.m.store.superblock();
        sb.state == State::Whole && sb.volume_id != p.store.superblock().volume_id
    }

    fn is_settled(&self) -> bool {
        let Role::Primary(prim) = &self.nodes[self.primary].role else {
            return false;
        };
        let (p, last) = (&prim.p, prim.p.last());
        let own = prim.ready
            && prim.pending.is_empty()
            && prim.spills.is_empty()
            && p.committed() == last
            && p.store.applied() == last
            && self.backups().iter().all(|n| self.backup_is_settled(*n, p));
        if !self.setup.replicated() {
            return own;
        }
        let mirror = self.mirror();
        let Role::Mirror(mir) = &self.nodes[mirror].role else {
            return false;
        };
        own && prim.session.is_active()
            && prim.session.is_member()
            && p.acked.get() == last
            && mir.m.received.get() == last
            && mir.m.store.applied() == last
            && mir.m.store.superblock().view.mirror == NAMES[mirror]
    }

    fn state(&self) -> String {
        let mut out = String::new();
        for (n, node) in self.nodes.iter().enumerate() {
            out += &match &node.role {
                Role::Down => format!("{}: down; ", NAMES[n]),
                Role::Primary(p) => format!(
                    "{}: primary, ready {}, active {}, member {}, last {}, committed {}, acked {}, persisted {}, applied {}, pending {}, rule {:?}, error {:?}, poison {:?}, fullness {}; ",
                    NAMES[n],
                    p.ready,
                    p.session.is_active(),
                    p.session.is_member(),
                    p.p.last(),
                    p.p.committed(),
                    p.p.acked.get(),
                    p.p.persisted.get(),
                    p.p.store.applied(),
                    p.pending.len(),
                    p.p.rule(),
                    p.session.last_error,
                    p.p.store.poisoned(),
                    p.p.store.fullness(),
                ),
                Role::Mirror(m) => format!(
                    "{}: mirror, {:?}, received {}, committed {}, applied {}, view {:?}, lanes {}, controls {}, poison {:?}, fullness {}; ",
                    NAMES[n],
                    m.m.store.superblock().state,
                    m.m.received.get(),
                    m.m.committed(),
                    m.m.store.applied(),
                    m.m.store.superblock().view,
                    m.lanes.len(),
                    m.control.len(),
                    m.m.store.poisoned(),
                    m.m.store.fullness(),
                ),
            };
            for f in &node.forwards {
                out += &format!(
                    "{} to {}: active {}, error {:?}; ",
                    NAMES[n], NAMES[f.to], f.active, f.forward.last_error
                );
            }
        }
        out
    }

    /// The copies are the same, byte for byte.
    fn finally(&mut self) -> Checked {
        let mut areas: Vec<BTreeMap<String, Vec<u8>>> = Vec::new();
        for n in self.places.clone() {
            if let Role::Primary(p) = &self.nodes[self.primary].role
                && self.backups().contains(&n)
                && self.is_foreign(n, &p.p)
            {
                continue;
            }
            let store = match &self.nodes[n].role {
                Role::Down => continue,
                Role::Primary(p) => p.p.store.clone(),
                Role::Mirror(m) => m.m.store.clone(),
            };
            self.check.look_again(n);
            self.check.compare(n, &store, &self.world, NAMES[n])?;
            let area = store.area();
            let mut area_files = BTreeMap::new();
            for f in area.files() {
                let bytes = self.world.contents(NAMES[n], &area.path(&f.name));
                area_files.insert(f.name.clone(), bytes.unwrap_or_default());
            }
            let dir = store.spec().dir.clone();
            let known: Vec<_> = area_files.keys().map(|f| dir.join(f)).collect();
            let there = self.world.files(NAMES[n]);
            if let Some(f) = there
                .iter()
                .find(|f| f.starts_with(&dir) && !known.contains(f))
            {
                return Err(format!(
                    "4: node {n}: {} lies in the directory, not in the catalogue",
                    f.display()
                ));
            }
            areas.push(area_files);
        }
        match areas.windows(2).all(|w| w[0] == w[1]) {
            true => Ok(()),
            false if self.check.blurred => {
                self.differ += 1;
                Ok(())
            }
            false => Err("4: the copies differ at the end".into()),
        }
    }
}

/// What `p` may have told others is committed. While its view has no mirror
/// that is what its own log has, though it may take a mirror back in the same
/// step and then wait for that.
fn committed(p: &Primary) -> u64 {
    let view = p.store.superblock().view;
    match view.mirror.is_empty() && view.epoch == p.epoch() {
        true => p.committed().max(p.persisted.get()),
        false => p.committed(),
    }
}

fn write(rng: &mut Rng, file: u32, size: u64) -> Change {
    let most = match rng.below(40) {
        0 => 20_000,
        1..=6 => 3000,
        7..=15 => 600,
        _ => 64,
    };
    let len = rng.between(1, size.min(most));
    let offset = rng.between(0, size - len);
    let mut bytes = vec![0; len as usize];
    rng.fill(&mut bytes);
    Change::Write {
        file,
        offset,
        bytes,
    }
}

/// Whoever calls a primary's node is told so.
fn accept_busy(prim: &mut Prim, n: usize) {
    while let Ok(Some(c)) = prim.listener.accept() {
        prim.fresh.push(Wire::new(c));
    }
    let view = prim.p.store.superblock().view;
    prim.fresh.retain_mut(|w| match w.take_frame() {
        Ok(None) => true,
        Err(_) => false,
        Ok(Some((f, body))) => {
            let code = match Hello::decode(&body) {
                Ok(h) if view.primary == NAMES[n] && view.epoch > h.view => RefuseCode::Superseded,
                _ => RefuseCode::Busy,
            };
            let text = "this node is the primary".into();
            refuse(w, f.epoch, &Refusal { code, text });
            w.conn.close();
            false
        }
    });
}

/// A mirror's accepting thread and the first words on its links; `gone` has no part in
/// the volume any more, but where it is `n` that does not know it.
fn accept(mir: &mut Mir, n: usize, gone: Option<usize>) -> bool {
    while let Ok(Some(c)) = mir.listener.accept() {
        mir.fresh.push(Wire::new(c));
    }
    let mut moved = false;
    let mut rest = Vec::new();
    for mut w in std::mem::take(&mut mir.fresh) {
        let (f, body) = match w.take_frame() {
            Ok(None) => {
                rest.push(w);
                continue;
            }
            Err(_) => continue,
            Ok(Some(x)) => x,
        };
        moved = true;
        match f.kind {
            FrameKind::Hello => {
                let Ok(h) = Hello::decode(&body) else {
                    w.conn.close();
                    continue;
                };
                assert!(h.cluster == CLUSTER && h.volume == VOLUME && h.to == NAMES[n]);
                let from = Some(node(&h.from));
                if gone != Some(n) && gone == from || gone == Some(n) && from == Some(SPARE) {
                    let code = RefuseCode::Stranger;
                    let text = format!("volume {VOLUME} has no node {:?}", h.from);
                    refuse(&mut w, f.epoch, &Refusal { code, text });
                    w.conn.close();
                    continue;
                }
                match ControlIn::answer(mir.m.clone(), w, &h) {
                    Ok(c) => mir.control.push(c),
                    Err((mut w, no)) => {
                        refuse(&mut w, mir.m.store.superblock().promised, &no);
                        w.conn.close();
                    }
                }
            }
            FrameKind::Lane => {
                let Ok(l) = Lane::decode(&body) else {
                    w.conn.close();
                    continue;
                };
                match LaneServer::accept(mir.m.clone(), w, f.epoch, &l) {
                    Ok(s) => mir.lanes.push(s),
                    Err((mut w, no)) => {
                        refuse(&mut w, f.epoch, &no);
                        w.conn.close();
                    }
                }
            }
            FrameKind::CopyStream => {
                let Ok(s) = CopyStream::decode(&body) else {
                    w.conn.close();
                    continue;
                };
                let stream = StreamIn::accept(&mir.m.store, w, f.epoch, &s);
                mir.streams.extend(stream);
            }
            k => panic!("a link begins with {k:?}"),
        }
    }
    mir.fresh = rest;
    moved
}
