//! Mutations of the engine, for the simulator.
//!
//! Without the cargo feature `mutations`, which the simulator asks for, every switch is
//! off for good and costs nothing: no program that is shipped has one.

#[cfg(feature = "mutations")]
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// One mutation, on or off.
#[derive(Debug, Default)]
pub struct Switch(#[cfg(feature = "mutations")] AtomicBool);

impl Switch {
    /// Whether the mutation is on: the invariant is broken.
    #[inline(always)]
    pub fn is_on(&self) -> bool {
        #[cfg(feature = "mutations")]
        return self.0.load(Relaxed);
        #[cfg(not(feature = "mutations"))]
        false
    }

    /// Turns the mutation on or off.
    #[cfg(feature = "mutations")]
    pub fn set(&self, on: bool) {
        self.0.store(on, Relaxed);
    }
}

/// Each mutation breaks one invariant; a test shows that the simulator notices.
#[derive(Debug, Default)]
pub struct Mutations {
    /// Invariant 1: records reach the data area before they are in the log.
    pub apply_before_log: Switch,
    /// Invariant 2: the primary does not wait for the mirror.
    pub ack_early: Switch,
    /// Invariant 6: a failed sync is taken for a success.
    pub ignore_failed_sync: Switch,
    /// A copy is discarded when another one begins to come.
    pub replace_early: Switch,
    /// A primary goes on without its mirror, whatever the register says.
    pub alone_without_view: Switch,
    /// A node that lost its copy is taken for the member that it was.
    pub amnesiac_member: Switch,
    /// A node that is still catching up becomes primary.
    pub stale_member: Switch,
    /// A mirror that becomes primary goes on listening to the old one.
    pub no_fence: Switch,
    /// A primary whose mirror may have been admitted goes on alone as before.
    pub admit_in_doubt: Switch,
    /// A mirror becomes a member before it has everything.
    pub admit_early: Switch,
    /// An acknowledgement counts although one before it is missing.
    pub ack_gap: Switch,
    /// A mirror applies what is not known to be committed.
    pub apply_uncommitted: Switch,
    /// One page that differs from the copy's is taken for equal.
    pub keep_difference: Switch,
    /// A backup is told that everything received is committed.
    pub forward_uncommitted: Switch,
    /// Records that a backup lacks are released.
    pub ignore_hold: Switch,
    /// Pages that were applied to while a copy was read are not sent again.
    pub forget_changes: Switch,
    /// Pages are sent again before the bytes on streams are staged.
    pub overtake: Switch,
    /// A backup stops holding sync points back as soon as its session ends.
    pub forget_floors: Switch,
    /// Forwarding goes on, although the records may have changed.
    pub forward_across_terms: Switch,
    /// Records are accepted, however much a backup lacks.
    pub no_back_pressure: Switch,
    /// The data area changes while it is copied to a backup.
    pub ignore_pause: Switch,
    /// A backup becomes the mirror in the epoch that the lost mirror knows.
    pub keep_epoch: Switch,
    /// An attach speaks to the configured mirror, whichever node is the view's mirror.
    pub ask_configured: Switch,
    /// A primary commits, whatever its lease.
    pub ignore_lease: Switch,
    /// A primary's sign of life changes nothing in the register.
    pub look_silently: Switch,
    /// An attach is over before the mirror on its link is a member.
    pub ready_early: Switch,
    /// A primary whose ring was lost does not remember it.
    pub forget_ring: Switch,
    /// A primary treats its ring as lost at each attach.
    pub other_life: Switch,
    /// A primary goes on alone with what only its ring has.
    pub alone_in_ring: Switch,
    /// Room of a log is released before the superblock that says so is durable.
    pub release_early: Switch,
    /// A promise is given before it is durable.
    pub promise_early: Switch,
    /// A mirror accepts a record whose checksum it did not check.
    pub trust_wire: Switch,
    /// A log that is damaged before its end is taken for a shorter one.
    pub forget_missing: Switch,
    /// A mirror's greeting tells what the mirror knew when its copy was opened.
    pub tell_old: Switch,
    /// A mirror takes over and asks no other node what was acknowledged.
    pub ask_nobody: Switch,
    /// A mirror takes over, however much less it has promised than the register says.
    pub forget_promise: Switch,
    /// A mirror of an earlier epoch counts as one of the present epoch when it is greeted.
    pub forget_miss: Switch,
    /// A record says that a part of a sync point was committed.
    pub stamp_parts: Switch,
    /// A mirror confirms a spill file that it did not sync.
    pub spill_unsynced: Switch,
    /// A session does not send the spill files of the records that the mirror lacks.
    pub spill_once: Switch,
    /// A primary takes back as its mirror a node that was replaced.
    pub call_replaced: Switch,
    /// A thread that is woken to work for others takes its own sync point for committed.
    pub wake_early: Switch,
    /// A group counts as persistent, although the last write of it failed.
    pub count_failed: Switch,
    /// Records are part of the log although room before them is not filled.
    pub send_hole: Switch,
    /// The room of a thread that comes to its end is never filled.
    pub keep_hole: Switch,
    /// Of a sync point in parts whose thread comes to its end, the parts that are there stay.
    pub tear_group: Switch,
    /// Who waits for what others append does not wait for their records.
    pub settle_early: Switch,
}

impl Mutations {
    /// A point at which others may go on, in the simulator.
    #[inline(always)]
    pub fn let_others(&self) {
        #[cfg(feature = "mutations")]
        if mojim_env::turns::current().is_some() {
            mojim_env::threads::give_way();
        }
    }
}
