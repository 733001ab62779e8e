//! One node: what runs on it, and how the others name and reach it.
//!
//! Owns the names and addresses of all nodes.
//!
//! Invariants:
//!
//! - A node has one role at a time.
//! - Everything that a role's threads hold ends with the role.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mojim_copy::stream::{StreamIn, StreamOut};
use mojim_env::Address;
use mojim_env::wire::Wire;
use mojim_replica::attach::Attach;
use mojim_replica::backup_progress::Source;
use mojim_replica::backup_session::BackupSession;
use mojim_replica::fallback_timer::FallbackTimer;
use mojim_replica::holders::{Holders, Peer};
use mojim_replica::mirror::Mirror;
use mojim_replica::mirror::control::ControlIn;
use mojim_replica::mirror::lane::LaneServer;
use mojim_replica::pace::Pacer;
use mojim_replica::primary::{Primary, Spilling};
use mojim_replica::session::Session;

use crate::model::ModelOp;
use crate::views::SimRegisterCalls;
use crate::world::SimListener;

/// Indexed by a node's number.
pub(super) use crate::nodes::NAMES;
pub(super) const CLUSTER: &str = "sim";
pub(super) const VOLUME: &str = "v";

/// A node that may hold the volume.
pub(super) struct Node {
    pub(super) role: Role,
    /// When it starts again.
    pub(super) restart: Duration,
    /// It starts again only in the fault-free phase.
    pub(super) gone: bool,
    /// It does not go on by itself: an operator's word promotes it when it starts.
    pub(super) word: bool,
    /// Its copy was replaced or cut back in the step in which it crashed.
    pub(super) replaced: bool,
    /// Its disk was put back as of an earlier time, and it has not begun an epoch since.
    pub(super) put_back: bool,
    /// It took over, up to this LSN, but has not closed its copy yet: its other threads
    /// may still run.
    pub(super) taken: Option<u64>,
    /// The backups to which it forwards.
    pub(super) forwards: Vec<Forwarding>,
    /// For a backup: the timer over the nodes that it follows, and when it looks next.
    pub(super) fallback: FallbackTimer,
    pub(super) next_look: Duration,
    /// It asked the register to go on for primary and mirror.
    pub(super) falls_back: Fallback,
    /// The streams of the copies that it sends.
    pub(super) streams: Vec<StreamOut>,
}

impl Node {
    /// A node that has not started.
    pub(super) fn new() -> Node {
        Node {
            role: Role::Down,
            restart: Duration::ZERO,
            gone: false,
            word: false,
            replaced: false,
            put_back: false,
            taken: None,
            forwards: Vec::new(),
            fallback: FallbackTimer::default(),
            next_look: Duration::ZERO,
            falls_back: Fallback::No,
            streams: Vec::new(),
        }
    }
}

/// What runs on a node.
pub(super) enum Role {
    Down,
    Primary(Box<Prim>),
    Mirror(Box<Mir>),
}

/// A program with the volume, whose node is primary.
pub(super) struct Prim {
    pub(super) p: Arc<Primary>,
    /// The newest point that it appended or adopted.
    pub(super) head: usize,
    pub(super) epoch: u64,
    pub(super) pending: VecDeque<Pending>,
    /// Sync points whose bytes are in a spill file and that have no record yet.
    pub(super) spills: Vec<Spill>,
    pub(super) session: Session,
    /// Set until its epoch has begun.
    pub(super) attach: Option<Attach>,
    pub(super) errands: SimRegisterCalls,
    pub(super) holders: Arc<Holders>,
    /// When records first flowed to its mirror, or the primary went on alone.
    pub(super) begun: Option<Duration>,
    /// Whether records flowed at the last look.
    pub(super) linked: bool,
    pub(super) listener: SimListener,
    pub(super) fresh: Vec<Wire>,
    pub(super) ready: bool,
    pub(super) closing: bool,
    pub(super) pacer: Pacer,
}

/// A daemon, whose node is mirror or backup.
pub(super) struct Mir {
    pub(super) m: Arc<Mirror>,
    pub(super) listener: SimListener,
    pub(super) fresh: Vec<Wire>,
    pub(super) control: Vec<ControlIn>,
    pub(super) lanes: Vec<LaneServer>,
    pub(super) streams: Vec<StreamIn>,
    pub(super) pacer: Pacer,
}

/// A sync point for whose outcome the application waits.
pub(super) struct Pending {
    pub(super) point: usize,
    pub(super) since: Duration,
    /// It went through a spill file.
    pub(super) spilled: bool,
}

/// A sync point that is on its way through a spill file.
pub(super) struct Spill {
    pub(super) way: Spilling,
    pub(super) changes: Vec<ModelOp>,
}

impl Spill {
    pub(super) fn is_plain(&self) -> bool {
        is_plain(&self.changes)
    }
}

/// Whether no names and sizes change.
pub(super) fn is_plain(changes: &[ModelOp]) -> bool {
    changes.iter().all(|c| matches!(c, ModelOp::Write { .. }))
}

/// A backup, as the node that forwards to it sees it.
pub(super) struct Forwarding {
    pub(super) to: usize,
    pub(super) forward: BackupSession,
    pub(super) active: bool,
    /// Sessions that had begun when it was last looked at.
    pub(super) sessions: u64,
    /// Whole copies begun when it was last active.
    pub(super) copies: u64,
    /// What it lacked when it was last looked at.
    pub(super) lag: Option<u64>,
}

impl Forwarding {
    /// Node `n` begins to forward what `source` has to node `to`.
    pub(super) fn new(source: Arc<dyn Source>, n: usize, to: usize) -> Forwarding {
        let there = Address::Tcp(address(to));
        Forwarding {
            to,
            forward: BackupSession::new(source, NAMES[n], NAMES[to], there),
            active: false,
            sessions: 0,
            copies: 0,
            lag: None,
        }
    }
}

/// The progress of a backup that goes on for primary and mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fallback {
    No,
    /// The register was asked, and may agree at any time.
    Asked,
    /// The register has agreed.
    Agreed,
}

/// The last LSN that `p` may have told other nodes is committed. While its view has no
/// mirror this is what its own log has, even if `p` takes a mirror back in the same step
/// and then waits for this mirror.
pub(super) fn committed(p: &Primary) -> u64 {
    let view = p.store.superblock().view;
    match view.mirror.is_empty() && view.epoch == p.epoch() {
        true => p.committed().max(p.persisted.get()),
        false => p.committed(),
    }
}

/// The node of this name.
pub(super) fn node(name: &str) -> usize {
    let n = NAMES.iter().position(|x| *x == name);
    n.expect("one of them")
}

pub(super) fn address(n: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, n as u8 + 1], 7000))
}

/// How another node is reached.
pub(super) fn peer(to: usize) -> Peer {
    Peer {
        name: NAMES[to].into(),
        address: Address::Tcp(address(to)),
        tcp: Address::Tcp(address(to)),
        shared: false,
    }
}
