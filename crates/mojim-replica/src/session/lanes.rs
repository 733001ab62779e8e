//! The lanes of a session: opened when both ends agree, and watched.

use super::*;
use mojim_env::turns::lock;

impl Session {
    /// All lanes are open: records flow.
    pub(super) fn activate(&mut self, lanes: Vec<OpenLane>) {
        self.policy.primary.forget_waits(self.silence);
        self.policy.primary.link_up.store(true, SeqCst);
        self.policy.primary.store.freeze(false);
        for (lane, (conn, carrier, at)) in self.policy.primary.lanes.iter().zip(lanes) {
            // The mirror may have got records whose acknowledgement was lost,
            // but nothing before `at` is missing there.
            let mut slot = lock(&lane.rx);
            slot.install(Rx::new(conn.clone(), carrier.clone(), at));
            lane.acked_at.store(at, Relaxed);
            drop(slot);
            *lock(&lane.tx) = Some(Tx::new(conn, carrier, at));
        }
        self.backoff = FIRST_PAUSE;
        *lock(&self.policy.primary.link_error) = None;
        if std::mem::take(&mut self.policy.attach)
            && let Some(views) = &mut self.policy.views
        {
            views.admit_by = self.policy.primary.store.env().now() + views.client.limit;
        }
        for i in 0..self.policy.primary.lanes.len() {
            self.policy.primary.send(i);
        }
        if self.policy.member {
            // A mirror that is still a member has all that it acknowledged.
            self.policy.primary.update_risk(true);
        }
        self.policy.primary.wake_all();
    }

    /// Notes when something moved on the lanes, or nothing was due there. A mirror that says
    /// that it waits for a backup is not stuck, nor is that its stall.
    pub(super) fn watch_lanes(&mut self, now: Duration) {
        if !self.is_active() {
            return;
        }
        let p = &self.policy.primary;
        let reached = [p.acked.get(), p.handed()];
        let waits = p.lacks_acks();
        if !waits || reached != self.policy.reached || p.is_held_back(now) {
            self.moved = now;
            self.policy.reached = reached;
        }
    }
}
