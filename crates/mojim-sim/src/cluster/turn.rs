//! One turn of one of a node's threads.
//!
//! Owns the loops that a daemon and a program run around the engine: sessions, lanes,
//! copies, checkpoints, and the first words on links that arrive.

use std::sync::Arc;

use mojim_copy::stream::StreamIn;
use mojim_env::Error;
use mojim_env::wire::Wire;
use mojim_format::FrameKind;
use mojim_format::message::{CopyStream, Hello, Lane, Message, RefuseCode};
use mojim_replica::attach::{Attach, AttachPolicy, Attaching};
use mojim_replica::backup_progress::Source;
use mojim_replica::mirror::control::ControlIn;
use mojim_replica::mirror::lane::{LaneServer, Step};
use mojim_replica::mirror::{Refusal, refuse, superseded};
use mojim_replica::pace::Pace;

use super::node::{CLUSTER, Forwarding, Mir, NAMES, Prim, Role, VOLUME, node};
use super::setup::Mode;
use super::state::{Checked, Cluster};
use crate::nodes::SPARE;

impl Cluster {
    /// One turn of one of a node's threads. True if something moved.
    pub(super) fn turn(&mut self, n: usize) -> Checked<bool> {
        if self.setup.views
            && let Role::Primary(prim) = &self.nodes[n].role
            && self.rng.below(4) == 0
        {
            prim.errands.run(&*self.views(n));
        }
        let moved = match &self.nodes[n].role {
            Role::Down => return Ok(false),
            Role::Primary(_) => self.primary_turn(n)?,
            Role::Mirror(_) => self.mirror_turn(n),
        };
        self.count_copies(n);
        self.observe(n)?;
        Ok(moved)
    }

    /// One turn of a program: of its link, a thread that waits for a record, a lane's
    /// thread, or the background.
    fn primary_turn(&mut self, n: usize) -> Checked<bool> {
        let lanes = self.setup.lanes as u64;
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(false);
        };
        let p = prim.p.clone();
        match self.rng.below(8) {
            0..=2 => match self.setup.replicated() {
                true => {
                    let moved = prim.session.step();
                    let streams = prim.session.take_streams();
                    self.nodes[n].streams.extend(streams);
                    self.attach_step(n)?;
                    return Ok(moved);
                }
                false => return self.attach_unreplicated(n),
            },
            3..=5 if prim.epoch != 0 => {
                let _ = p.drive(self.rng.below(lanes) as usize);
            }
            6 if prim.epoch != 0 => {
                p.send(self.rng.below(lanes) as usize);
            }
            _ => {
                accept_busy(prim, n);
                if prim.epoch != 0 && self.rng.below(4) == 0 {
                    let _ = match pace(self.rng.below(6)).filter(|_| !self.calm) {
                        Some(pace) => p.checkpoint_step(pace).map(drop),
                        None => p.background_turn(&mut prim.pacer, false),
                    };
                }
            }
        }
        Ok(false)
    }

    /// One turn of a daemon: of its accepting thread, a link, a lane, or the background.
    fn mirror_turn(&mut self, n: usize) -> bool {
        let gone = self.gone();
        let Role::Mirror(m) = &mut self.nodes[n].role else {
            return false;
        };
        match self.rng.below(8) {
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
                    let _ = match pace(self.rng.below(6)).filter(|_| !self.calm) {
                        Some(pace) => m.m.checkpoint_step(pace).map(drop),
                        None => m.m.background_turn(&mut m.pacer),
                    };
                }
                false
            }
        }
    }

    fn count_copies(&mut self, n: usize) {
        let store = match &self.nodes[n].role {
            Role::Down => return,
            Role::Primary(p) => p.p.store.clone(),
            Role::Mirror(m) => m.m.store.clone(),
        };
        let now = store.progress.counts();
        if now[0] > self.counted[n][0] {
            self.check.copied(n, &store);
        }
        for (i, now) in now.into_iter().enumerate() {
            let before = &mut self.counted[n][i];
            // The count of a new process begins at zero.
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
        let begun = prim.p.begin_unreplicated(NAMES[n]);
        if begun.is_err() && prim.p.store.check_complete().is_err() {
            self.ask_operator(n)?;
        }
        Ok(true)
    }

    /// One step of a thread that waits until its program is attached. A program that gives
    /// up is started again at once.
    fn attach_step(&mut self, n: usize) -> Checked {
        let policy = self.attach_policy();
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let Some(attach) = &mut prim.attach else {
            return Ok(());
        };
        match attach.step(&mut prim.session, &mut |_, _| {}) {
            Ok(Attaching::Waits) => Ok(()),
            Ok(Attaching::Done) => {
                prim.attach = None;
                Ok(())
            }
            // A session or a copy that has failed is handled by `reopen`.
            Err(_) if prim.session.fatal().is_some() || prim.p.store.check().is_err() => Ok(()),
            Err(_) if prim.p.store.check_complete().is_err() => self.ask_operator(n),
            Err(_) => {
                prim.attach = Some(Attach::new(&mut prim.session, policy));
                Ok(())
            }
        }
    }

    /// The policy by which programs attach.
    pub(super) fn attach_policy(&self) -> AttachPolicy {
        let spec = self.primary_spec();
        AttachPolicy {
            asynchronous: self.setup.mode == Mode::Async,
            failure_limit: self.setup.views.then_some(self.setup.limit),
            patience: spec.resend_timeout * spec.resend_attempts,
            may_go_alone: true,
        }
    }

    /// As the daemon and the program do: forwards to each other node that holds the
    /// volume, as long as node `n` is the one that forwards.
    pub(super) fn forward(&mut self, n: usize, source: Arc<dyn Source>) {
        if !self.setup.backup {
            return;
        }
        for to in self.places.clone().into_iter().filter(|to| *to != n) {
            let forwarding = Forwarding::new(source.clone(), n, to);
            self.nodes[n].forwards.push(forwarding);
        }
    }

    /// One turn of one of the threads that forward.
    pub(super) fn forward_turn(&mut self, n: usize) -> Checked<bool> {
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
    pub(super) fn stream_turn(&mut self, n: usize) -> Checked<bool> {
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

    /// One turn of a node's background: at a pace that does not follow from those before if
    /// `pace` is given, as a caller's that waits for room.
    pub(super) fn checkpoint(&mut self, n: usize, pace: Option<Pace>) -> Checked {
        // The engine says itself what is wrong.
        let _ = match (&mut self.nodes[n].role, pace) {
            (Role::Down, _) => return Ok(()),
            (Role::Primary(p), _) if p.epoch == 0 => Ok(()),
            (Role::Primary(p), Some(pace)) => p.p.checkpoint_step(pace).map(drop),
            (Role::Primary(p), None) => p.p.background_turn(&mut p.pacer, false),
            (Role::Mirror(m), Some(pace)) => m.m.checkpoint_step(pace).map(drop),
            (Role::Mirror(m), None) => m.m.background_turn(&mut m.pacer),
        };
        self.observe(n)
    }

    /// Suspects the link, as a waiting thread does when no acknowledgement comes in time.
    pub(super) fn patience(&mut self) {
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
}

/// The pace of a turn of the background, drawn from 6 equally likely values: as a caller's
/// that waits for room, or as with another program's records. `None`: as the turns before
/// have it.
fn pace(n: u64) -> Option<Pace> {
    match n {
        0 => Some(Pace::Idle),
        1 => Some(Pace::Pressed),
        2 => Some(Pace::Quiet),
        3 => Some(Pace::Busy),
        _ => None,
    }
}

/// Tells each caller of a primary's node that it is busy.
fn accept_busy(prim: &mut Prim, n: usize) {
    while let Ok(Some(c)) = prim.listener.accept() {
        prim.fresh.push(Wire::new(c));
    }
    let view = prim.p.store.superblock().view;
    prim.fresh.retain_mut(|w| match w.take_frame() {
        Ok(None) => true,
        Err(_) => false,
        Ok(Some((f, body))) => {
            let no = Hello::decode(&body).ok();
            let no = no.and_then(|h| superseded(NAMES[n], &view, &h));
            let busy = || Refusal {
                code: RefuseCode::Busy,
                text: "this node is the primary".into(),
            };
            refuse(w, f.epoch, &no.unwrap_or_else(busy));
            w.conn.close();
            false
        }
    });
}

/// A mirror's accepting thread, and the first words on its links. `gone` has no place in
/// the volume any more; node `n` does not know this if it is `gone` itself.
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
                    let code = RefuseCode::UnknownPeer;
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
