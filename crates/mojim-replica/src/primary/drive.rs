//! One turn of a lane: sending, writing the own log, receiving, each by one thread for all.
//!
//! Owns what a turn does to the prefixes. Invariant: no thread waits here for another one
//! that is at the same work, except in `persist_wait`.

use super::*;
use mojim_env::turns;

/// What a look at a link found.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Came {
    /// An acknowledgement.
    pub(super) any: bool,
    /// One that moved the prefix: whoever waits for it is to be woken.
    pub(super) advanced: bool,
}

impl Primary {
    /// Bytes of the logs that the streams to the mirror have taken, without lanes on
    /// which a thread is sending right now.
    pub(crate) fn handed(&self) -> u64 {
        let lanes = self.lanes.iter();
        let sent = lanes.filter_map(|l| turns::try_lock(&l.tx)?.as_ref().map(Tx::taken));
        sent.sum()
    }

    /// Sends what lane `lane` has to send, unless another thread is at it.
    #[inline]
    pub fn send(&self, lane: usize) {
        if let Some(mut t) = turns::try_lock(&self.lanes[lane].tx)
            && let Some(tx) = &mut *t
            && tx.is_behind(self.log(lane))
        {
            let committed = self.committed_whole();
            if let Err(e) = tx.pump(self.log(lane), self.epoch(), committed) {
                *t = None;
                drop(t);
                self.suspect(Error::Protocol(format!("sending to the mirror: {e}")));
            }
        }
    }

    /// Makes lane `lane` persistent up to its head, unless another thread is at it.
    #[inline]
    pub(crate) fn persist(&self, lane: usize) -> Result<()> {
        match turns::try_lock(&self.lanes[lane].persist) {
            Some(guard) => self.persist_held(lane, guard),
            None => Ok(()),
        }
    }

    /// As `persist`, but waits for a thread that is at it.
    pub fn persist_wait(&self, lane: usize) -> Result<()> {
        let guard = turns::lock(&self.lanes[lane].persist);
        self.persist_held(lane, guard)
    }

    /// As `persist`, for the thread that has the lock.
    pub(super) fn persist_held(
        &self,
        lane: usize,
        mut at: std::sync::MutexGuard<'_, u64>,
    ) -> Result<()> {
        let log = self.log(lane);
        let head = log.head();
        if *at == head {
            drop(at);
            self.pass_on(lane);
            return Ok(());
        }
        self.store.check()?;
        let mut r = log.persist(head);
        if self.store.mutations.count_failed.is_on() {
            log.count_persisted(head);
            r = Ok(());
        }
        if let Err(e) = self.store.fail(r) {
            drop(at);
            // Nothing will be committed any more: nobody waits for it.
            self.wake_all();
            return Err(e);
        }
        let mut marks = Marks::of(&self.persisted);
        let mut records = log.records(*at);
        while let Some(r) = records.next_if(|r| r.next <= head) {
            marks.add(r.header.lsn);
        }
        *at = records.position();
        let advanced = marks.end();
        drop(at);
        self.pass_on(lane);
        if advanced {
            self.wake();
        }
        Ok(())
    }

    /// Receives what has arrived on lane `lane`, unless another thread is at it. True if
    /// an acknowledgement came.
    #[inline]
    pub fn receive(&self, lane: usize) -> bool {
        let Some(mut slot) = turns::try_lock(&self.lanes[lane].rx) else {
            return false;
        };
        let came = self.receive_held(lane, &mut slot);
        drop(slot);
        self.pass_on(lane);
        if came.advanced {
            self.wake();
        }
        came.any || came.advanced
    }

    /// As `receive`, for the thread that has the receiving end; it wakes the others.
    #[inline]
    pub(super) fn receive_held(&self, lane: usize, slot: &mut RxSlot) -> Came {
        let Some(rx) = &mut slot.rx else {
            return Came::default();
        };
        let any = match rx.poll() {
            Ok(None) if !slot.held => return Came::default(),
            Ok(None) => false,
            Ok(Some(ack)) => {
                self.other_end.is_at(ack.level);
                slot.acked = slot.acked.max(ack.lsn);
                let at = match ack.waits {
                    true => self.store.env().now().as_nanos() as u64,
                    false => 0,
                };
                let waits = &self.lanes[lane].waits;
                if waits.load(Relaxed) != at {
                    waits.store(at, Relaxed);
                }
                true
            }
            Err(e) => {
                slot.rx = None;
                self.suspect(e);
                return Came::default();
            }
        };
        let log = self.log(lane);
        let mut marks = Marks::of(&self.acked);
        slot.held = false;
        while let Some(r) = log.record(rx.acked_at) {
            if r.header.lsn > slot.acked {
                break;
            }
            if self.store.mutations.ack_gap.is_on() {
                self.acked.advance(r.header.lsn);
            }
            if !self.acked.has_room(r.header.lsn) {
                marks.flush();
            }
            if !self.acked.has_room(r.header.lsn) {
                // Another lane is far behind: this one waits for it.
                slot.held = true;
                break;
            }
            marks.add(r.header.lsn);
            rx.acked_at = r.next;
        }
        let advanced = marks.end();
        self.lanes[lane].acked_at.store(rx.acked_at, Relaxed);
        Came { any, advanced }
    }

    /// Whether the mirror waits for a backup, and said so within the silence after which
    /// its link would count as broken. Then neither the mirror nor the link to it is at
    /// fault.
    pub fn is_held_back(&self, now: Duration) -> bool {
        let silence = self.other_end.silence().as_nanos() as u64;
        let now = now.as_nanos() as u64;
        self.lanes.iter().any(|l| {
            let said = l.waits.load(Relaxed);
            said != 0 && now.saturating_sub(said) < silence
        })
    }

    /// A link is over: a sync point that waits for the next link is not held back. Links
    /// count as broken after `silence`.
    pub(crate) fn forget_waits(&self, silence: Duration) {
        self.other_end.may_be_silent_for(silence);
        for lane in &self.lanes {
            lane.waits.store(0, Relaxed);
        }
    }

    /// One turn of everything on a lane that does not block for the network.
    pub fn drive(&self, lane: usize) -> Result<()> {
        self.send(lane);
        if self.rule().local {
            self.persist(lane)?;
        }
        self.receive(lane);
        Ok(())
    }
}
