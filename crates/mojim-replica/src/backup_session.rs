//! Backups: a node's copy, forwarded to one of them in the background.
//!
//! Owns one backup's lanes, as seen from the node that forwards (the mirror, Mojim 4.2). It also
//! owns what a link (`peer_link.rs`) does for a peer that nothing waits for but a log that is full.
//! The backup's end is the same as a mirror's (`mirror`): it applies only what is known to be
//! committed, so its data area is at every moment the result of whole sync points.
//!
//! Invariants:
//! - Nothing of a term that is over is sent: what was received under it may have been
//!   dropped since.
//! - From the backup's first answer to the end of its session, every record
//!   that it lacks stays in the logs.
//! - While a copy is read, what changes in the data area is sent again
//!   (`copy`), or the copy is given up.
//! - A backup that followed holds the logs' writers back, and what it lacks
//!   stays, also while its session is made anew, for [`SILENCE`] at most.
//! - No record is sent that makes a file which the backup cannot have: it would pass over that, and
//!   count the record as applied.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use mojim_format::message::{Hello, Refuse, RefuseCode, Start, Started, Welcome};
use mojim_protocol::{Holding, Plan, Prefix, reconcile};

use crate::backup_progress::{Progress, Source, Term};
use crate::handshake::{Limits, exceeds, makes_too_much, theirs};
use crate::holders::Peer;
use crate::link::{COPY_AGAIN, COPY_SILENCE, Rx, SILENCE, Tx};
use crate::peer_link::{FIRST_PAUSE, OpenLane, PeerLink, Phase, Policy};
use crate::spill_out::{SpillFile, SpillOut};
use mojim_copy::stream::StreamThreads;
use mojim_env::{Address, Context, Error, OpenHow, Result};
use mojim_store::area::{named_spill, spill_path};
use mojim_store::log::Log;
use mojim_store::store::{Hold, Store};

/// Most LSNs that a backup may acknowledge out of order.
const WINDOW: usize = 1 << 17;
/// The sending side of one open lane.
struct Out {
    tx: Tx,
    rx: Rx,
    acked: u64,
    /// Records before this position were looked through: for spill files, and for what the backup
    /// cannot have.
    seen: u64,
}

/// The backup cannot have a file of this volume.
fn no_backup(why: &str) -> Error {
    Error::Invalid(format!("{why}: it is no backup of this volume"))
}

impl Out {
    /// Looks through the records of `log` up to the next one that names a spill file:
    /// where it is, and the file's number and length. An error if `peer` cannot have what one of
    /// them makes.
    fn find_spill(
        &mut self,
        (store, log): (&Store, &Log),
        peer: &str,
        limits: Limits,
    ) -> Result<Option<(u64, u64, u64)>> {
        for r in log.records(self.seen) {
            if let Some(why) = makes_too_much(store, &r, peer, limits) {
                return Err(no_backup(&why));
            }
            if let Some((id, len)) = named_spill(&r)? {
                return Ok(Some((r.at, id, len)));
            }
            self.seen = r.next;
        }
        Ok(None)
    }

    /// Takes what the backup acknowledges; true if anything came.
    fn take_acks(&mut self) -> Result<bool> {
        let mut came = false;
        while let Some(ack) = self.rx.poll()? {
            self.acked = self.acked.max(ack.lsn);
            came = true;
        }
        Ok(came)
    }

    /// Counts the lane's acknowledged records, which are in `log`, in `all`; true if there
    /// were any.
    fn count_acked(&mut self, log: &Log, all: &Prefix) -> bool {
        let had = self.rx.acked_at;
        let acked = |lsn| lsn <= self.acked && all.has_room(lsn);
        let mut records = log.records(had);
        while let Some(r) = records.next_if(|r| acked(r.header.lsn)) {
            all.mark(r.header.lsn);
        }
        self.rx.acked_at = records.position();
        self.rx.acked_at != had
    }
}

/// Forwards one source to one backup.
pub type BackupSession = PeerLink<ToBackup>;

/// What a link to a backup has besides.
pub struct ToBackup {
    source: Arc<dyn Source>,
    term: Option<Term>,
    /// The open lanes, while records flow.
    lanes: Vec<Out>,
    acked: Prefix,
    hold: Arc<Hold>,
    progress: Arc<Progress>,
    /// The lane whose next record names the spill file that is being sent.
    spill_lane: usize,
    /// The last session ended because nothing moved: no writer waits for this backup
    /// before something does.
    stalled: bool,
    /// What files the backup can have.
    limits: Limits,
    /// When the files that are here were last compared with that.
    checked: Duration,
    /// Before records flow: the positions in the logs before which all was compared with that, or
    /// is in the files.
    ahead: Vec<u64>,
    /// The records up to this LSN lie before these positions.
    looked: u64,
}

impl Policy for ToBackup {
    const LONGEST_PAUSE: Duration = Duration::from_secs(2);

    fn store(&self) -> &Arc<Store> {
        self.source.store()
    }

    fn epoch(&self) -> u64 {
        self.term.as_ref().map_or(0, |t| t.epoch)
    }

    fn acked(&self) -> u64 {
        self.acked.get()
    }

    fn prepare(s: &mut BackupSession, now: Duration) -> Result<Option<bool>> {
        s.prepare(now).map(|()| Some(false))
    }

    fn try_again(s: &mut BackupSession, now: Duration) -> Result<bool> {
        let source = &s.policy.source;
        match source.term().filter(|_| source.serves(&s.peer.name)) {
            Some(term) => s.greet(term, now).map(|()| true),
            None => Ok(false),
        }
    }

    fn agree(s: &mut BackupSession, welcome: Welcome) -> Result<()> {
        s.agree(welcome)
    }

    fn refused(s: &mut BackupSession, refuse: Refuse) -> Error {
        s.refused(refuse)
    }

    fn copy_has(s: &mut BackupSession, lsn: u64) {
        // What is in the copy by its end is not needed from the logs, but for the look at it.
        s.policy.hold.advance(lsn.min(s.policy.looked));
    }

    fn copy_refused(s: &mut BackupSession, why: &Error) -> Error {
        s.backoff = COPY_AGAIN;
        Error::Protocol(format!("node {} refused: {why}", s.peer.name))
    }

    fn copied(s: &mut BackupSession, lsn: u64) -> Result<()> {
        s.start(lsn);
        Ok(())
    }

    fn started(s: &mut BackupSession, started: Started, resume: u64) -> Result<()> {
        s.begin_lanes(started.session, resume)
    }

    fn activate(s: &mut BackupSession, lanes: Vec<OpenLane>, _: Duration) {
        s.activate(lanes);
    }

    fn spill_arrived(s: &mut BackupSession, id: u64) {
        s.spill_arrived(id);
    }

    fn beat(s: &mut BackupSession, _: Duration) -> Result<(u64, bool)> {
        let committed = if s.is_active() { s.committed() } else { 0 };
        Ok((committed, false))
    }

    fn carry(s: &mut BackupSession, now: Duration) -> Result<bool> {
        s.check_limits(now)?;
        Ok(s.pump_lanes(now)? | s.pump_spill()?.moved)
    }

    fn patience(s: &BackupSession) -> Duration {
        // The lane stands still behind the record that names the file.
        match s.confirms_spill() {
            true => COPY_SILENCE,
            false => s.silence,
        }
    }

    fn fail(s: &mut BackupSession, e: Error) {
        s.policy.stalled |= matches!(e, Error::Timeout(_));
        if let Error::Invalid(_) = e {
            // What an operator has to look at does not pass by itself.
            s.backoff = COPY_AGAIN;
        }
        s.force_copy |= s.disagrees(&e) && s.policy.is_same_term();
        s.last_error = Some(e.to_string());
        s.end();
        s.pause();
    }

    fn leave(s: &mut BackupSession) {
        s.end();
        s.policy.source.backups().leave(&s.policy.progress);
    }
}

impl ToBackup {
    fn is_same_term(&self) -> bool {
        self.term == self.source.term()
    }
}

impl BackupSession {
    /// From `source` on node `me` to node `peer`.
    pub fn new(source: Arc<dyn Source>, me: &str, peer: &str, address: Address) -> BackupSession {
        let store = source.store();
        let progress = source.backups().join(peer);
        let to = ToBackup {
            term: None,
            lanes: Vec::new(),
            acked: Prefix::new(WINDOW, 0),
            // Not firm before the backup has answered: records are kept only while there is
            // room.
            hold: store.hold(store.checkpointed()),
            progress,
            spill_lane: 0,
            stalled: false,
            limits: Limits::UNKNOWN,
            checked: Duration::ZERO,
            ahead: Vec::new(),
            looked: 0,
            source,
        };
        let peer = Peer {
            name: peer.to_owned(),
            address: address.clone(),
            tcp: address,
            shared: false,
        };
        PeerLink::idle(to, me, peer)
    }

    /// What is forwarded.
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.policy.source
    }

    /// Whether something is under way that needs no more than another step:
    /// an acknowledgement is due, or a handshake.
    pub fn is_busy(&self) -> bool {
        match &self.phase {
            Phase::Idle(_) => false,
            Phase::Active => self.policy.acked.get() < self.policy.source.received(),
            _ => true,
        }
    }

    /// The last word of a source that ends in order: what it has, and what of
    /// it is committed; waits for at most half a second.
    fn farewell(&mut self) {
        let env = self.policy.source.store().env().clone();
        let end = env.now() + Duration::from_millis(500);
        while self.is_active() && self.is_busy() && env.now() < end {
            if !self.step()
                && let Some(c) = self.conn()
            {
                let _ = c.wait(false, Duration::from_millis(1));
            }
        }
        if self.is_active() {
            self.beat = 0;
            // If this fails, the next session tells the backup.
            let _ = self.keep_alive(env.now()).and_then(|()| self.flush());
        }
    }

    /// Ends the session, if there is one.
    pub fn end(&mut self) {
        let now = self.now();
        self.policy.lanes.iter().for_each(|l| l.rx.close());
        self.policy.lanes.clear();
        if self.is_active() && self.policy.progress.counts() {
            // Most sessions end because another begins in a moment.
            let seen = self.heard.min(self.moved);
            self.policy.progress.counts_until(seen + SILENCE);
        }
        self.close();
        self.policy.term = None;
        self.policy.progress.active.store(false, Release);
        self.policy.hold.set_firm(self.policy.progress.counts());
        self.forget_late(now);
    }

    /// A backup whose session ended holds writers back no longer than one that is silent,
    /// and not at all if this node forwards no more.
    fn forget_late(&mut self, now: Duration) {
        let source = &self.policy.source;
        let goes_on =
            source.serves(&self.peer.name) && (source.term().is_some() || source.is_settling());
        if self.is_active() || goes_on && !self.policy.progress.is_overdue(now) {
            return;
        }
        self.forget();
    }

    /// No writer waits for this backup any more.
    fn forget(&mut self) {
        self.policy.progress.counts_until(Duration::ZERO);
        self.policy.source.backups().refresh();
        if let Phase::Idle(_) = self.phase {
            self.policy.hold.set_firm(false);
        }
    }

    /// What is due whatever the phase: writers wait no longer than they may, and a link of a
    /// term that is over ends.
    fn prepare(&mut self, now: Duration) -> Result<()> {
        let store = self.policy.source.store().clone();
        if self.policy.progress.counts() {
            self.forget_late(now);
        }
        if let Phase::Idle(_) = self.phase {
            return Ok(());
        }
        let across = store.mutations.forward_across_terms.is_on();
        let goes_on = self.policy.is_same_term() && self.policy.source.serves(&self.peer.name);
        if !goes_on && !across {
            self.backoff = FIRST_PAUSE;
            return Err(Error::Stale("what is forwarded begins anew".into()));
        }
        // A copy that failed halfway must not be a source.
        store.check()
    }

    fn tail(&self) -> u64 {
        self.policy
            .source
            .store()
            .whole(self.policy.source.received())
    }

    fn greet(&mut self, term: Term, now: Duration) -> Result<()> {
        let store = self.policy.source.store();
        let sb = store.superblock();
        let hello = Hello {
            cluster: sb.cluster,
            volume: sb.volume,
            from: self.me.clone(),
            to: self.peer.name.clone(),
            volume_id: sb.volume_id,
            view: sb.view.epoch,
            epoch: term.epoch,
            attach: false,
            backup: true,
            lanes: store.logs().len() as u16,
            tail: self.tail(),
            history: store.history().entries().to_vec(),
        };
        let conn = self.connect()?;
        self.send_hello(conn, &hello, now);
        self.policy.term = Some(term);
        Ok(())
    }

    fn committed(&self) -> u64 {
        let broken = &self.policy.source.store().mutations;
        if broken.forward_uncommitted.is_on() {
            return self.policy.source.received();
        }
        self.policy.source.committed()
    }

    fn refused(&mut self, r: Refuse) -> Error {
        // A copy takes long; and what an operator has to look at does not pass by itself.
        if self.is_copying_out() || matches!(r.code, RefuseCode::UnknownPeer | RefuseCode::Foreign)
        {
            self.backoff = COPY_AGAIN;
        }
        if r.code == RefuseCode::StaleEpoch {
            let backups = self.policy.source.backups();
            backups.outbid_by(r.epoch, self.policy.epoch());
        }
        Error::Refused {
            code: r.code,
            text: format!("node {} refused: {}", self.peer.name, r.text),
        }
    }

    /// The backup has the spill file: the record that names it may follow.
    fn spill_arrived(&mut self, id: u64) {
        if self
            .spill
            .take_if(|out| out.id() == id && out.is_ended())
            .is_none()
        {
            return;
        }
        self.moved = self.now();
        let i = self.policy.spill_lane;
        let log = &self.policy.source.store().logs()[i];
        let lane = &mut self.policy.lanes[i];
        if let Some(r) = log.record(lane.seen) {
            lane.seen = r.next;
        }
    }

    /// A backup that cannot have one of the files would pass over its size, and the bytes
    /// that are written there: it follows no node.
    fn check_sizes(&self) -> Result<()> {
        let (store, limits) = (self.policy.source.store(), self.policy.limits);
        match exceeds(store, &self.peer.name, limits) {
            Some(why) => Err(no_backup(&why)),
            None => Ok(()),
        }
    }

    /// Whether the backup can still have all files, however full the link is: now and then those
    /// that are here. What comes is looked at when its record is about to be sent; before records
    /// flow, here.
    fn check_limits(&mut self, now: Duration) -> Result<()> {
        if let Phase::Idle(_) | Phase::Greeting = self.phase {
            return Ok(());
        }
        if now.saturating_sub(self.policy.checked) >= self.heartbeat {
            self.policy.checked = now;
            self.check_sizes()?;
        }
        match self.is_active() {
            true => Ok(()),
            false => self.look_ahead(),
        }
    }

    /// Looks through what has come into the logs since the last look. While a copy is read, a
    /// change of sizes is not applied, and all that comes behind it waits: not for a backup that
    /// cannot have it.
    fn look_ahead(&mut self) -> Result<()> {
        let (source, limits) = (&self.policy.source, self.policy.limits);
        // Before the look: all of it is seen.
        let looked = source.received();
        let store = source.store();
        for (log, at) in store.logs().iter().zip(&mut self.policy.ahead) {
            let mut records = log.records(*at);
            let why = records.find_map(|r| makes_too_much(store, &r, &self.peer.name, limits));
            if let Some(why) = why {
                return Err(no_backup(&why));
            }
            *at = records.position();
        }
        self.policy.looked = looked;
        Ok(())
    }

    /// Whether the backup can have what the records above `from` make, which the logs have.
    fn fits_since(&self, from: u64) -> bool {
        let (store, limits) = (self.policy.source.store(), self.policy.limits);
        let logs = store.logs().iter().enumerate();
        let mut records = logs.flat_map(|(i, log)| log.records(store.seek(i, from)));
        records.all(|r| makes_too_much(store, &r, &self.peer.name, limits).is_none())
    }

    fn agree(&mut self, w: Welcome) -> Result<()> {
        self.policy.limits = Limits::of(&w);
        let store = self.policy.source.store().clone();
        let applied = store.applied();
        self.check_sizes()?;
        self.policy.checked = self.now();
        let theirs = theirs(&w)?;
        // First keep what the backup may lack, then see what the logs still have.
        let ours = store.holding(self.tail());
        let common = ours.history.common(ours.tail, &theirs.history, theirs.tail);
        let oldest = store.hold_from(&self.policy.hold, common.unwrap_or(0));
        let lanes = 0..store.logs().len();
        self.policy.ahead = lanes.map(|i| store.seek(i, applied)).collect();
        self.look_ahead()?;
        let epoch_at = |h: &Holding| h.history.epoch_at(ours.tail + 1);
        if common == Some(ours.tail)
            && theirs.tail > ours.tail
            && epoch_at(&theirs) == epoch_at(&ours)
        {
            // The backup received more of this epoch than this node, which is still
            // catching up. A copy would take those records away.
            return Err(Error::Busy(format!(
                "{} is at LSN {}, ahead of this node at {}",
                self.peer.name, theirs.tail, ours.tail
            )));
        }
        match reconcile(&ours, &theirs, oldest, false) {
            // What was too large for it may have been cut since: then the files fit.
            Plan::Resend { from } if !self.force_copy && self.fits_since(from) => {
                self.start(from);
                Ok(())
            }
            Plan::Resend { .. } | Plan::CopyTo => self.copy_out(),
            plan => Err(Error::Invalid(format!(
                "node {} holds another volume of this name, or neither copy can be used ({plan:?}); remove its copy (its directory and its part of .mojim) to have this one forwarded there",
                self.peer.name
            ))),
        }
    }

    fn copy_out(&mut self) -> Result<()> {
        let store = self.policy.source.store().clone();
        let watch = store.watch();
        if !store.is_exact() {
            // The backup would show half a sync point, and for good if this node is lost
            // before it sends the rest.
            return Err(Error::Busy(
                "this copy was not closed and is not up to date yet".into(),
            ));
        }
        self.policy.progress.copies.fetch_add(1, Relaxed);
        self.forget();
        // Records above are forwarded after the copy.
        store.hold_from(&self.policy.hold, store.applied());
        self.send_copy(Some(watch));
        Ok(())
    }

    /// Sends the terms: the backup has everything up to `resume`, and drops what it has
    /// beyond.
    fn start(&mut self, resume: u64) {
        let term = self.policy.term.clone().expect("of this session");
        let store = self.policy.source.store();
        let start = Start {
            epoch: term.epoch,
            primary: term.primary,
            volume_id: store.superblock().volume_id,
            member: false,
            keep: resume,
            history: store.history().entries().to_vec(),
        };
        self.policy.acked.reset(resume);
        self.send_start(&start, resume);
    }

    /// All lanes are open: records flow.
    fn activate(&mut self, lanes: Vec<OpenLane>) {
        for (i, (conn, carrier, at)) in lanes.into_iter().enumerate() {
            self.policy.progress.reached(i, at);
            self.policy.lanes.push(Out {
                tx: Tx::new(conn.clone(), carrier.clone(), at),
                rx: Rx::new(conn, carrier, at),
                acked: 0,
                seen: at,
            });
        }
        self.policy
            .progress
            .acked
            .store(self.policy.acked.get(), Release);
        self.policy.progress.sessions.fetch_add(1, AcqRel);
        self.policy.progress.active.store(true, Release);
        if !self.policy.stalled {
            self.follows();
        }
    }

    /// Writers wait for this backup from here on.
    fn follows(&mut self) {
        self.policy.stalled = false;
        self.backoff = FIRST_PAUSE;
        self.policy.progress.follows();
        self.policy.source.backups().refresh();
    }

    /// Sends what the logs hold, takes what the backup acknowledges.
    fn pump_lanes(&mut self, now: Duration) -> Result<bool> {
        if !self.is_active() {
            return Ok(false);
        }
        let (epoch, committed) = (self.policy.epoch(), self.committed());
        let store = self.policy.source.store();
        let mut moved = false;
        let (mut came, mut due) = (false, false);
        for (i, (lane, log)) in self.policy.lanes.iter_mut().zip(store.logs()).enumerate() {
            // A record that names a spill file waits until the file is there.
            let wait = self.spill.is_some() && self.policy.spill_lane == i;
            let found = match wait {
                true => None,
                false => lane.find_spill((store, log), &self.peer.name, self.policy.limits)?,
            };
            // One file at a time; those of other lanes have their turn later.
            if let Some((at, id, len)) = found.filter(|_| self.spill.is_none()) {
                let path = spill_path(&store.spec().meta, id);
                let file = store.env().open(&path, OpenHow::default()).map_err(|e| {
                    // A whole copy brings the bytes of the file's sync point.
                    self.force_copy |= self.policy.term == self.policy.source.term();
                    Error::io(format!("opening {}", path.display()), &e)
                })?;
                self.spill = Some(SpillOut::new(SpillFile { id, len, file }));
                self.policy.spill_lane = i;
                lane.seen = at;
                moved = true;
            }
            let before = lane.tx.sent();
            let limit = match self.spill.is_some() && self.policy.spill_lane == i {
                true => lane.seen,
                false => lane.seen.max(before),
            };
            lane.tx
                .pump_until(log, limit, epoch, committed)
                .context(|| format!("sending to node {}", self.peer.name))?;
            moved |= lane.tx.sent() != before;
            moved |= lane.take_acks()?;
            came |= lane.count_acked(log, &self.policy.acked);
            due |= lane.rx.acked_at < log.head();
            self.policy.progress.reached(i, lane.rx.acked_at);
        }
        self.note_acks(now, came, due);
        Ok(moved)
    }

    /// Counts the lanes' acknowledgements for the writers that wait. `came`: some came;
    /// `due`: some are still to come.
    fn note_acks(&mut self, now: Duration, came: bool, due: bool) {
        if came {
            let acked = self.policy.acked.get();
            self.policy.hold.advance(acked);
            self.policy.progress.acked.store(acked, Release);
        }
        if !came && due {
            return;
        }
        self.moved = now;
        if came && !self.policy.stalled {
            self.policy.source.backups().refresh();
        } else if self.policy.stalled {
            self.follows();
        }
    }
}

/// Forwards `source`, on node `me`, to one backup until `stop`: the body of a thread.
/// `say` receives a text for each change.
pub fn run(
    source: &Arc<dyn Source>,
    me: &str,
    peer: &str,
    address: &Address,
    stop: impl Fn() -> bool,
    say: impl Fn(&str),
) {
    // The backup hears of this node by this thread, and gives it up after a silence.
    mojim_env::threads::yield_at_wakeups();
    let work = &source.backups().work;
    let mut said = None;
    let mut active = false;
    let mut streams = StreamThreads::default();
    // One for all terms: what the backup lacks is kept from one to the next.
    let mut forward = BackupSession::new(source.clone(), me, peer, address.clone());
    while !stop() {
        let moved = forward.step();
        streams.start(forward.take_streams());
        if forward.is_active() != active {
            active = !active;
            let not = if active { "" } else { "not " };
            say(&format!("{not}forwarding to node {peer}"));
        }
        if forward.last_error != said {
            if let Some(e) = &forward.last_error {
                say(&format!("forwarding to node {peer}: {e}"));
            }
            said = forward.last_error.clone();
        }
        if moved {
            continue;
        }
        if let Some(c) = forward.conn().filter(|_| !forward.is_active()) {
            // An error shows at the next step.
            let _ = c.wait(false, Duration::from_millis(10));
        } else if forward.is_active() && forward.is_busy() {
            work.wait_unless(&stop, Duration::from_micros(200));
        } else {
            let had = (source.received(), source.committed());
            let more = || (source.received(), source.committed()) != had;
            work.wait_unless(|| stop() || more(), Duration::from_millis(20));
        }
    }
    forward.farewell();
    drop(forward);
    streams.join();
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_config::WriteBack;

    /// A backup whose disk failed while it took a spill file in, or that had promised another
    /// epoch, got a whole copy afterwards, though it lacked a few records.
    #[test]
    fn only_who_disagrees_about_what_is_sent_gets_a_whole_copy() {
        for (code, copies) in [
            (RefuseCode::Protocol, true),
            (RefuseCode::Poisoned, false),
            (RefuseCode::StaleEpoch, false),
            (RefuseCode::Busy, false),
        ] {
            let (p, dir) = crate::primary::tests::alone("whole", WriteBack::Auto);
            let source: Arc<dyn Source> = Arc::new(p);
            let nowhere = Address::Tcp(([127, 0, 0, 1], 9).into());
            let mut s = BackupSession::new(source, "a", "b", nowhere);
            s.policy.term = s.policy.source.term();
            s.phase = Phase::Active;
            let refuse = Refuse {
                code,
                epoch: 1,
                text: "a spill file".into(),
            };
            let e = s.refused(refuse);
            ToBackup::fail(&mut s, e);
            assert_eq!(s.force_copy, copies, "{code:?}");
            drop(s);
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}
