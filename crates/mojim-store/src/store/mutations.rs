//! Mutations of the engine, for the simulator.

use std::sync::atomic::AtomicBool;

/// Each breaks one invariant, and a test shows
/// that the simulator notices. Always off in real use.
#[derive(Debug, Default)]
pub struct Mutations {
    /// Invariant 1: records reach the data area before they are in the log.
    pub apply_before_log: AtomicBool,
    /// Invariant 2: the primary does not wait for the mirror.
    pub ack_early: AtomicBool,
    /// Invariant 6: a failed sync is taken for a success.
    pub ignore_failed_sync: AtomicBool,
    /// A copy is discarded when another one begins to come.
    pub replace_early: AtomicBool,
    /// A primary goes on without its mirror, whatever the register says.
    pub alone_without_view: AtomicBool,
    /// A node that lost its copy is taken for the member that it was.
    pub amnesiac_member: AtomicBool,
    /// A node that is still catching up becomes primary.
    pub stale_member: AtomicBool,
    /// A mirror that becomes primary goes on listening to the old one.
    pub no_fence: AtomicBool,
    /// A mirror becomes a member before it has everything.
    pub admit_early: AtomicBool,
    /// An acknowledgement counts although one before it is missing.
    pub ack_gap: AtomicBool,
    /// A mirror applies what is not known to be committed.
    pub apply_uncommitted: AtomicBool,
    /// Of the pages that differ from a copy's, one is taken for equal.
    pub keep_difference: AtomicBool,
    /// A backup is told that all that was received is committed.
    pub forward_uncommitted: AtomicBool,
    /// What a backup lacks is released.
    pub ignore_hold: AtomicBool,
    /// Pages that were applied to while a copy was read are not sent again.
    pub forget_changes: AtomicBool,
    /// Pages are sent again before what streams carry is staged.
    pub overtake: AtomicBool,
    /// A backup ceases to hold anyone back as soon as its session ends.
    pub forget_floors: AtomicBool,
    /// What is forwarded goes on, though it may have changed.
    pub forward_across_terms: AtomicBool,
    /// Records are taken, however much a backup lacks.
    pub no_back_pressure: AtomicBool,
    /// The data area changes while it is copied to a backup.
    pub ignore_pause: AtomicBool,
    /// A backup becomes the mirror in the epoch that the lost one knows.
    pub keep_epoch: AtomicBool,
    /// An attach speaks to the configured mirror, whoever the view's is.
    pub ask_configured: AtomicBool,
    /// A primary commits, whatever its lease.
    pub ignore_lease: AtomicBool,
    /// A primary's sign of life changes nothing in the register.
    pub look_silently: AtomicBool,
    /// An attach is over before the mirror on its link is a member.
    pub ready_early: AtomicBool,
    /// A primary whose ring was lost does not remember it.
    pub forget_ring: AtomicBool,
    /// A primary takes its ring for lost at each attach.
    pub other_life: AtomicBool,
    /// A primary goes on alone with what only its ring has.
    pub alone_in_ring: AtomicBool,
    /// Room of a log is released before the superblock that says so is durable.
    pub release_early: AtomicBool,
    /// A promise is given before it is durable.
    pub promise_early: AtomicBool,
    /// A mirror takes a record whose checksum it did not look at.
    pub trust_wire: AtomicBool,
    /// A log that is damaged before its end is taken for a shorter one.
    pub forget_missing: AtomicBool,
    /// A mirror confirms a spill file that it did not sync.
    pub spill_unsynced: AtomicBool,
    /// A session does not send the spill files of the records that the mirror lacks.
    pub spill_once: AtomicBool,
    /// A primary takes a node back as its mirror that was replaced.
    pub call_replaced: AtomicBool,
}
