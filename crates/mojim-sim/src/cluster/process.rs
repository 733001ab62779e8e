//! How a node's process starts, what it opens, and how it ends.
//!
//! Owns the configuration that each node is given. Invariant: however a process ended,
//! what it believed and told no other node is lost. The checker learns what may be left.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mojim_config::MediumKind;
use mojim_env::{Env, Error, Locker};
use mojim_format::{State, Superblock};
use mojim_protocol::{History, Lacks, Loss};
use mojim_replica::attach::Attach;
use mojim_replica::holders::Holders;
use mojim_replica::mirror::Mirror;
use mojim_replica::pace::Pacer;
use mojim_replica::primary::{Primary, PrimarySpec};
use mojim_replica::session::Session;
use mojim_replica::view_client::ViewClient;
use mojim_store::log::{Log, LogSpec};
use mojim_store::store::{Store, StoreSpec, read_superblock};

use super::node::{CLUSTER, Mir, NAMES, Prim, Role, VOLUME, address, committed, peer};
use super::setup::{MS, Mode};
use super::state::{Checked, Cluster};
use crate::nodes::NODES;
use crate::rot::{self, Rot};
use crate::views::SimRegisterCalls;
use crate::world::{CrashKind, SimListener};

impl Cluster {
    pub(super) fn store_spec(&self, n: usize) -> StoreSpec {
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
            locker: Locker::Program,
        }
    }

    pub(super) fn primary_spec(&self) -> PrimarySpec {
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
    pub(super) fn start(&mut self, n: usize) -> Checked {
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
            // A crash in a flush, which has no way to return an error.
            Ok(_) if self.world.crashed(NAMES[n]).is_some() => return self.fallen(n),
            Ok(s) => Arc::new(s),
            Err(e) => return self.failed_start(n, &e),
        };
        if let Some(m) = self.mutation {
            m.break_in(&store);
        }
        self.note_opened(n, &store, before);
        let replaced = std::mem::take(&mut self.nodes[n].replaced);
        self.check.opened(n, &store, replaced)?;
        if let Some(rot) = &mut self.rot {
            rot.opened(n, self.check.failures()[n]);
        }
        self.finish_promotion(n, &store)?;
        let listener = match self.world.listen(NAMES[n], address(n)) {
            Ok(l) => l,
            Err(_) => return self.observe(n),
        };
        self.follow_register();
        if std::mem::take(&mut self.nodes[n].word) && n == self.primary {
            drop(listener);
            return self.go_on_by_word(n, store);
        }
        match n == self.primary {
            true => self.start_primary(n, store, listener),
            false => self.start_mirror(n, store, listener),
        }?;
        match self.setup.hasty && !self.calm && n == self.mirror() && self.check.is_damaged(n) {
            true => self.take_over(n),
            false => Ok(()),
        }
    }

    /// Records what node `n` opened, for the trace and the counts. `before` is the
    /// superblock that it left, if there are backups for which its logs may have kept
    /// something.
    fn note_opened(&mut self, n: usize, store: &Store, before: Option<Superblock>) {
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
    }

    /// The promotion of node `n` failed at its end, and is found to have happened.
    fn finish_promotion(&mut self, n: usize, store: &Store) -> Checked {
        if self.half_promoted != Some(n) {
            return Ok(());
        }
        self.half_promoted = None;
        if store.superblock().view.primary == NAMES[n] && n != self.primary {
            self.promotions += 1;
            let lossy = self.setup.mode == Mode::Async;
            // If it lost its copy as well, it attaches to the other node's copy.
            if store.superblock().state == State::Whole {
                self.check.word();
                self.check.promoted(n, store, store.tail(), lossy)?;
            }
            // The other node may have come back as the primary that it was.
            let other = self.peer(n);
            self.world.kill(NAMES[other]);
            self.observe(other)?;
            self.primary = n;
        }
        Ok(())
    }

    /// The daemon keeps the copy, and waits for a sender.
    fn start_mirror(&mut self, n: usize, store: Arc<Store>, listener: SimListener) -> Checked {
        let m = Arc::new(Mirror::new(store, NAMES[n], self.setup.secondary));
        self.nodes[n].put_back = false;
        self.forward(n, m.clone());
        self.nodes[n].role = Role::Mirror(Box::new(Mir {
            m,
            listener,
            fresh: Vec::new(),
            control: Vec::new(),
            lanes: Vec::new(),
            streams: Vec::new(),
            pacer: Pacer::of_mirror(),
        }));
        self.observe(n)
    }

    /// The program attaches.
    fn start_primary(&mut self, n: usize, store: Arc<Store>, listener: SimListener) -> Checked {
        let p = Arc::new(Primary::new(store, self.primary_spec()));
        self.check.follows(n, false);
        let session = Session::attach(p.clone(), NAMES[n], peer(self.peer(n)));
        let session = session.with_told(self.told(n));
        self.check.answered(n, self.known_to_others(n));
        let others = self.places.iter().filter(|to| **to != n);
        let holders = Holders::new(others.map(|to| peer(*to)).collect());
        let errands = SimRegisterCalls::default();
        let mut session = match self.setup.views {
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
        let replicated = self.setup.replicated();
        let attach = replicated.then(|| Attach::new(&mut session, self.attach_policy()));
        self.nodes[n].role = Role::Primary(Box::new(Prim {
            p,
            head: 0,
            epoch: 0,
            pending: VecDeque::new(),
            spills: Vec::new(),
            session,
            attach,
            errands,
            holders,
            begun: None,
            linked: false,
            listener,
            fresh: Vec::new(),
            ready: false,
            closing: false,
            pacer: Pacer::of_primary(),
        }));
        self.observe(n)
    }

    /// Tells the checker what node `n` is about to read of its logs, if they are damaged.
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

    fn failed_start(&mut self, n: usize, e: &Error) -> Checked {
        self.note(|| format!("node {} does not start: {e}", NAMES[n]));
        match self.world.crashed(NAMES[n]) {
            Some(_) => self.fallen(n),
            // A file differs from the last checkpoint, since more was applied, but the
            // log that would repair it cannot be read, or was given up: the copy has to
            // be removed.
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

    /// The node's process ended, in any way.
    pub(super) fn fallen(&mut self, n: usize) -> Checked {
        self.follow_view();
        let kind = self.world.crashed(NAMES[n]).unwrap_or(CrashKind::Kill);
        self.note(|| format!("node {} {}", NAMES[n], crash_text(kind)));
        if let Role::Primary(p) = &self.nodes[n].role {
            // What it told other nodes in its last step.
            let settled = self.check.points.before(p.head, committed(&p.p));
            if p.epoch != 0 {
                self.check.settled(settled);
            }
        }
        if self.nodes.iter().any(|node| node.put_back) {
            // What it knew last, it may know no more when it starts again.
            self.check.word();
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
        // The newest point that the checker knows, among the last 64 LSNs.
        let newest = |lsn: u64, h: &History| {
            let mut back = (0..=lsn).rev().take(64);
            back.find_map(|l| self.check.points.exact(h, l))
        };
        let limit = match &role {
            Role::Down => None,
            Role::Primary(p) => {
                let limit = p.p.apply_limit().max(p.p.store.tail()).min(p.p.last());
                newest(limit, &p.p.store.history())
            }
            Role::Mirror(m) => newest(m.m.received.get(), &m.m.store.history()),
        };
        let had = match &role {
            Role::Mirror(_) => limit,
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
        // Damage is more frequent now, while the node is down.
        if !self.calm
            && let Some(rot) = &mut self.rot
            && rot.is_due(30_000)
        {
            self.rot(n);
        }
        Ok(())
    }

    /// Ends a node's process cleanly: its stores were closed.
    pub(super) fn end(&mut self, n: usize) -> Checked {
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

    /// Starts processes that have ended, or whose store failed, again.
    pub(super) fn restarts(&mut self) -> Checked {
        self.follow_register();
        for n in 0..NODES {
            self.hand_over(n)?;
        }
        if self.setup.views && matches!(self.nodes[self.primary].role, Role::Mirror(_)) {
            // The register's answer was lost: this node is the primary already.
            self.take_over(self.primary)?;
        }
        for n in self.places.clone() {
            if n == 1 && !self.setup.replicated() {
                continue;
            }
            if self.reopen(n)? {
                return Ok(());
            }
            let node = &self.nodes[n];
            if matches!(node.role, Role::Down)
                && node.restart <= self.world.now()
                && (!node.gone || self.calm)
                && self.is_answered(n)
            {
                self.start(n)?;
            }
        }
        Ok(())
    }

    /// Ends the process of node `n`, to be started again, if its store failed or its
    /// program cannot attach. True if it can never attach, which ends the run.
    fn reopen(&mut self, n: usize) -> Checked<bool> {
        let failed = match &self.nodes[n].role {
            Role::Down => false,
            // Also one that attaches and has no room.
            Role::Primary(p) => p.p.store.check().is_err() || p.session.fatal().is_some(),
            Role::Mirror(m) => m.m.store.poisoned().is_some(),
        };
        if !failed {
            return Ok(false);
        }
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
            let lost = p.session.loss() == Some(catching_up) || e.contains("no usable copy");
            let memory = !self.setup.persistent()[n] && self.check.failures()[n] > 0;
            if lost && (self.check.has_lost() || memory) {
                self.nobody = Some(vec![n]);
                return Ok(true);
            }
            if !again && !self.check.all_lost() {
                return Err(format!("live: node {n} cannot attach: {e}"));
            }
            self.nodes[n].word |= refused && n == self.primary;
        }
        self.note(|| format!("node {} is reopened", NAMES[n]));
        self.world.kill(NAMES[n]);
        self.fallen(n)?;
        Ok(false)
    }
}

fn crash_text(kind: CrashKind) -> &'static str {
    match kind {
        CrashKind::Kill => "killed",
        CrashKind::Power => "lost power",
    }
}
