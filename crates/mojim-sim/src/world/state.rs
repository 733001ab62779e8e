//! The state that all handles of a world share: its nodes, its net, and the owner of each handle.
//!
//! Owns crashes.
//!
//! Invariants:
//! - A handle belongs to one incarnation of one node's process. After that
//!   incarnation crashed, each of its calls fails with [`is_crash`]'s error and
//!   changes nothing.
//! - A disk change in the middle of which a node crashes was made entirely, or not at
//!   all.

use crate::ctx::Ctx;
use crate::disk::{Disk, Kept};
use crate::memory::Region;
use crate::net::Net;
use crate::rng::Rng;
use mojim_env::Locker;
use mojim_env::locks::lock;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

const CRASH: &str = "simulated crash";

/// How a node's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CrashKind {
    /// The process died. Its machine, with cache and memory, lives.
    Kill,
    /// The machine lost power: only what is durable is left.
    Power,
}

/// Whether an error is that of a call on a crashed process.
pub fn is_crash(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|e| e.to_string() == CRASH)
}

pub(super) fn crashed() -> io::Error {
    io::Error::other(CRASH)
}

/// A machine, and the process that runs on it.
pub(super) struct Node {
    pub(super) name: Arc<str>,
    pub(super) disk: Disk,
    /// What its disk had when it was kept.
    pub(super) kept: Kept,
    pub(super) memories: BTreeMap<PathBuf, Arc<Region>>,
    pub(super) boot_id: [u8; 16],
    /// For `Env::random`; separate, so that faults do not change what processes draw.
    pub(super) rng: Rng,
    /// Dead processes draw from this generator.
    pub(super) dead_rng: Rng,
    pub(super) incarnation: u64,
    pub(super) running: bool,
    pub(super) powered: bool,
    pub(super) crash: Option<CrashKind>,
    pub(super) armed: Option<(u64, CrashKind)>,
    pub(super) armed_send: Option<(u64, CrashKind)>,
    pub(super) operations: u64,
    pub(super) sends: u64,
    pub(super) locks: BTreeMap<PathBuf, Locker>,
}

/// The whole world.
pub(super) struct State {
    pub(super) ctx: Ctx,
    pub(super) nodes: Vec<Node>,
    pub(super) names: BTreeMap<String, usize>,
    pub(super) net: Net,
}

fn boot_id(rng: &mut Rng) -> [u8; 16] {
    let mut id = [0; 16];
    rng.fill(&mut id);
    id
}

impl State {
    pub(super) fn node(&mut self, name: &str) -> usize {
        if let Some(n) = self.names.get(name) {
            return *n;
        }
        let n = self.nodes.len();
        self.names.insert(name.to_string(), n);
        self.net.add_node();
        self.nodes.push(Node {
            name: name.into(),
            disk: Disk::default(),
            kept: Kept::default(),
            memories: BTreeMap::new(),
            boot_id: boot_id(&mut self.ctx.rng),
            rng: self.ctx.rng.fork(),
            dead_rng: self.ctx.rng.fork(),
            incarnation: 0,
            running: false,
            powered: true,
            crash: None,
            armed: None,
            armed_send: None,
            operations: 0,
            sends: 0,
            locks: BTreeMap::new(),
        });
        n
    }

    pub(super) fn trace(&mut self, n: usize, text: impl FnOnce() -> String) {
        let node = &self.nodes[n];
        self.ctx
            .trace(|| format!("{}#{} {}", node.name, node.incarnation, text()));
    }

    /// Counts an operation; tells whether the node crashes in its middle.
    pub(super) fn step(&mut self, n: usize, text: impl FnOnce() -> String) -> Option<CrashKind> {
        self.trace(n, text);
        let node = &mut self.nodes[n];
        node.operations += 1;
        due(&mut node.armed)
    }

    pub(super) fn crash(&mut self, n: usize, kind: CrashKind) {
        self.trace(n, || format!("crash: {kind:?}"));
        let (node, ctx) = (&mut self.nodes[n], &mut self.ctx);
        node.running = false;
        node.crash = Some(kind);
        node.armed = None;
        node.armed_send = None;
        node.locks.clear();
        match kind {
            CrashKind::Kill => {
                ctx.hit("kills");
                // The dead process's threads may still store: into the old memory, which
                // no other process maps by name.
                for region in node.memories.values_mut() {
                    if Arc::strong_count(region) > 1 {
                        *region = region.copy();
                    }
                }
                node.disk.kill();
                self.net.kill(n, ctx);
            }
            CrashKind::Power => {
                ctx.hit("power losses");
                node.powered = false;
                node.memories.clear();
                node.disk.power_loss(ctx);
                node.boot_id = boot_id(&mut ctx.rng);
                self.net.power_loss(n, ctx);
            }
        }
    }

    /// Makes a change to which a crash can come only before or after.
    pub(super) fn change<T>(
        &mut self,
        n: usize,
        text: impl FnOnce() -> String,
        change: impl FnOnce(&mut Disk, &mut Ctx, &Arc<str>) -> io::Result<T>,
    ) -> io::Result<T> {
        if let Some(kind) = self.step(n, text) {
            if self.ctx.rng.coin() {
                let node = &mut self.nodes[n];
                let _ = change(&mut node.disk, &mut self.ctx, &node.name);
            }
            self.crash(n, kind);
            return Err(crashed());
        }
        let node = &mut self.nodes[n];
        change(&mut node.disk, &mut self.ctx, &node.name)
    }
}

pub(super) fn due(armed: &mut Option<(u64, CrashKind)>) -> Option<CrashKind> {
    let (left, kind) = armed.as_mut()?;
    *left = left.saturating_sub(1);
    let kind = *kind;
    (*left == 0).then(|| {
        *armed = None;
        kind
    })
}

#[derive(Clone)]
pub(super) struct Shared(pub(super) Arc<Mutex<State>>);

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of the engine in a test must not hide behind a second one.
        lock(&self.0)
    }
}

/// The owner of a handle.
#[derive(Clone)]
pub(super) struct HandleOwner {
    pub(super) shared: Shared,
    pub(super) node: usize,
    pub(super) incarnation: u64,
}

impl HandleOwner {
    pub(super) fn enter(&self) -> io::Result<MutexGuard<'_, State>> {
        let st = self.shared.lock();
        let node = &st.nodes[self.node];
        if node.running && node.incarnation == self.incarnation {
            Ok(st)
        } else {
            Err(crashed())
        }
    }
}
