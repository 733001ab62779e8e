//! The defects that the simulator puts into the engine on purpose, one invariant at a
//! time.
//!
//! Owns their names, which runs can notice each, and how the checker's reports of each
//! begin.

use mojim_store::store::{Mutations, Store, Switch};

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
    /// Views: alone as before, though the mirror may have been admitted.
    AdmitInDoubt,
    /// LSN n acknowledged with n-1 missing.
    AckGap,
    /// Records are applied before they are committed, and not fetched again.
    ApplyUncommitted,
    /// Views: the program begins before its mirror is in the view.
    ReadyEarly,
    /// A page that differs is not copied.
    KeepDifference,
    /// Backups: a backup is told that everything received is committed.
    ForwardUncommitted,
    /// Backups: records that a backup lacks are released.
    IgnoreHold,
    /// Backups: records are forwarded on, though a term is over.
    ForwardAcrossTerms,
    /// Backups: records are appended, however much a backup lacks.
    NoBackPressure,
    /// Backups: the data area changes while it is copied.
    IgnorePause,
    /// Backups: a backup holds no append back between two of its sessions.
    ForgetFloors,
    /// Backups: changes made while a copy is read are not sent again.
    ForgetChanges,
    /// Backups: changes made while a copy is read are sent again before the first sending
    /// has arrived.
    Overtake,
    /// Succession: the new mirror's session begins in the old epoch.
    KeepEpoch,
    /// Succession: an attach speaks to the configured mirror.
    AskConfigured,
    /// Fallback: a primary commits after its lease has ended.
    IgnoreLease,
    /// Fallback: the signs of life of a primary leave no trace.
    LookSilently,
    /// A primary does not remember that its ring was lost.
    ForgetRing,
    /// Views: a primary goes on alone with what only its ring has.
    AloneInRing,
    /// A log's room is released before the superblock is durable.
    ReleaseEarly,
    /// A promise is given before it is durable.
    PromiseEarly,
    /// Checksums are not verified on receipt.
    TrustWire,
    /// Views: a primary begins another life at each attach.
    OtherLife,
    /// A log that is damaged before its end is taken for a shorter log.
    ForgetMissing,
    /// A mirror's greeting tells what it knew when its copy was opened.
    TellOld,
    /// Views: a mirror takes over and asks no other node.
    AskNobody,
    /// Views: a mirror whose copy is of an earlier epoch takes over.
    ForgetPromise,
    /// Views: so does one that was greeted since.
    ForgetMiss,
    /// A record tells of a committed LSN that ends no sync point.
    StampParts,
    /// A spill file is confirmed before it is durable.
    SpillUnsynced,
    /// A spill file is sent ahead of its record only once, whatever became of it.
    SpillOnce,
    /// Replacement: a primary connects to its old mirror, though another node has
    /// replaced it.
    CallReplaced,
}

impl Mutation {
    /// All mutations, with their names.
    pub const ALL: [(Mutation, &'static str); 41] = [
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
        (Mutation::AdmitInDoubt, "admit_in_doubt"),
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
            Mutation::TellOld,
            "tell_old (a greeting tells what is known now)",
        ),
        (
            Mutation::AskNobody,
            "ask_nobody (a takeover asks the other holders)",
        ),
        (
            Mutation::ForgetPromise,
            "forget_promise (a copy of an earlier epoch does not take over)",
        ),
        (
            Mutation::ForgetMiss,
            "forget_miss (nor does it when it was greeted)",
        ),
        (
            Mutation::StampParts,
            "stamp_parts (what a record tells was committed are whole sync points)",
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

    /// For a mutation that few seeds notice: a seed that noticed it, which is tried
    /// first. Where a change of the simulator moves its runs, the search finds another.
    pub fn seen_at(self) -> Option<u64> {
        match self {
            Mutation::ApplyBeforeLog => Some(163),
            Mutation::ReplaceEarly => Some(131),
            Mutation::AmnesiacMember => Some(3203),
            Mutation::NoFence => Some(37),
            Mutation::AdmitEarly => Some(103),
            Mutation::AdmitInDoubt => Some(1650),
            Mutation::ForwardAcrossTerms => Some(65),
            Mutation::IgnorePause => Some(295),
            Mutation::Overtake => Some(3215),
            Mutation::KeepEpoch => Some(681),
            Mutation::AskConfigured => Some(402),
            Mutation::IgnoreLease => Some(689),
            Mutation::LookSilently => Some(142),
            Mutation::ForgetRing => Some(1435),
            Mutation::AloneInRing => Some(2029),
            Mutation::ReleaseEarly => Some(1538),
            Mutation::PromiseEarly => Some(16_659),
            Mutation::TrustWire => Some(175),
            Mutation::TellOld => Some(332),
            Mutation::AskNobody => Some(12_207),
            Mutation::ForgetPromise | Mutation::ForgetMiss => Some(914),
            Mutation::StampParts => Some(28_407),
            Mutation::SpillOnce => Some(130),
            _ => None,
        }
    }

    /// Whether it breaks a rule of views.
    pub(super) fn is_of_views(self) -> bool {
        matches!(
            self,
            Mutation::AloneWithoutView
                | Mutation::AmnesiacMember
                | Mutation::StaleMember
                | Mutation::NoFence
                | Mutation::AdmitEarly
                | Mutation::AdmitInDoubt
                | Mutation::ReadyEarly
                | Mutation::AloneInRing
                | Mutation::OtherLife
                | Mutation::CallReplaced
                | Mutation::AskNobody
                | Mutation::ForgetPromise
                | Mutation::ForgetMiss
        ) || self.is_of_succession()
    }

    /// Whether it breaks a rule by which a backup takes a mirror's place.
    pub(super) fn is_of_succession(self) -> bool {
        matches!(self, Mutation::KeepEpoch | Mutation::AskConfigured) || self.is_of_fallback()
    }

    /// Whether it breaks a rule by which a backup goes on for primary and mirror.
    pub(super) fn is_of_fallback(self) -> bool {
        matches!(self, Mutation::IgnoreLease | Mutation::LookSilently)
    }

    /// Whether it breaks a rule of backups.
    pub(super) fn is_of_backups(self) -> bool {
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
                | Mutation::AskNobody
        ) || self.is_of_succession()
    }

    /// Whether its story needs a pair without a register and backups, and many losses of power.
    pub(super) fn is_of_pairs(self) -> bool {
        matches!(
            self,
            Mutation::PromiseEarly | Mutation::SpillUnsynced | Mutation::ForgetRing
        )
    }

    /// Whether it breaks a rule of views, and is noticed sooner where there is no backup.
    pub(super) fn needs_no_backup(self) -> bool {
        self.is_of_views() && !self.is_of_backups() && self != Mutation::AdmitInDoubt
    }

    /// Whether its story begins with a damaged log.
    pub(super) fn needs_damage(self) -> bool {
        matches!(self, Mutation::ForgetMissing | Mutation::AskNobody)
    }

    /// Whether its story begins with a mirror's disk of an earlier epoch.
    pub(super) fn needs_earlier_mirror(self) -> bool {
        matches!(self, Mutation::ForgetPromise | Mutation::ForgetMiss)
    }

    /// Whether it breaks a rule of spill files.
    pub(super) fn is_of_spills(self) -> bool {
        matches!(self, Mutation::SpillUnsynced | Mutation::SpillOnce)
    }

    /// How the checker's reports of it begin. Bytes that a failed sync did not make
    /// durable show up as a loss, or as a copy that differs.
    pub fn breaks(self) -> &'static [&'static str] {
        match self {
            Mutation::ApplyBeforeLog => &["1:"],
            Mutation::AckEarly => &["2:"],
            Mutation::IgnoreFailedSync => &["3:", "4:"],
            Mutation::ReplaceEarly => &["3:"],
            Mutation::AckGap => &["2:"],
            // After this nothing makes the copies equal again.
            Mutation::KeepDifference => &["1:", "3:", "4:"],
            Mutation::ApplyUncommitted => &["1:", "4:", "live:", "backup:"],
            Mutation::ReadyEarly => &["view:"],
            Mutation::ForwardUncommitted
            | Mutation::IgnoreHold
            | Mutation::NoBackPressure
            | Mutation::ForgetFloors => &["backup:"],
            Mutation::ForwardAcrossTerms => &["backup:", "4:"],
            Mutation::IgnorePause | Mutation::ForgetChanges | Mutation::Overtake => &["4:"],
            // A node waits for another that does not take part.
            Mutation::KeepEpoch | Mutation::AskConfigured => &["live:", "3:"],
            Mutation::IgnoreLease | Mutation::LookSilently => &["3:"],
            Mutation::ForgetRing => &["3:"],
            Mutation::AloneInRing => &["2:"],
            // Other failures excuse the state at the end of a run, so only a shrunk run
            // shows it.
            Mutation::OtherLife => &["shrunk:"],
            Mutation::ForgetMissing
            | Mutation::TellOld
            | Mutation::AskNobody
            | Mutation::ForgetPromise
            | Mutation::ForgetMiss => &["3:"],
            Mutation::StampParts => &["told:"],
            Mutation::TrustWire => &["1:", "3:", "4:"],
            // What is lost of a spill file may also keep its record from being applied, for ever.
            Mutation::SpillUnsynced => &["3:", "live:", "told:"],
            Mutation::CallReplaced => &["replaced:"],
            // The spill file's record is refused for ever.
            Mutation::SpillOnce => &["live:"],
            Mutation::ReleaseEarly => &["1:", "2:", "3:", "4:"],
            _ => &["2:", "3:"],
        }
    }

    /// The engine's switch for it.
    fn switch(self, switches: &Mutations) -> &Switch {
        match self {
            Mutation::ApplyBeforeLog => &switches.apply_before_log,
            Mutation::AckEarly => &switches.ack_early,
            Mutation::IgnoreFailedSync => &switches.ignore_failed_sync,
            Mutation::ReplaceEarly => &switches.replace_early,
            Mutation::AloneWithoutView => &switches.alone_without_view,
            Mutation::AmnesiacMember => &switches.amnesiac_member,
            Mutation::StaleMember => &switches.stale_member,
            Mutation::NoFence => &switches.no_fence,
            Mutation::AdmitEarly => &switches.admit_early,
            Mutation::AdmitInDoubt => &switches.admit_in_doubt,
            Mutation::AckGap => &switches.ack_gap,
            Mutation::ApplyUncommitted => &switches.apply_uncommitted,
            Mutation::ReadyEarly => &switches.ready_early,
            Mutation::KeepDifference => &switches.keep_difference,
            Mutation::ForwardUncommitted => &switches.forward_uncommitted,
            Mutation::IgnoreHold => &switches.ignore_hold,
            Mutation::ForwardAcrossTerms => &switches.forward_across_terms,
            Mutation::NoBackPressure => &switches.no_back_pressure,
            Mutation::IgnorePause => &switches.ignore_pause,
            Mutation::ForgetFloors => &switches.forget_floors,
            Mutation::ForgetChanges => &switches.forget_changes,
            Mutation::Overtake => &switches.overtake,
            Mutation::KeepEpoch => &switches.keep_epoch,
            Mutation::AskConfigured => &switches.ask_configured,
            Mutation::IgnoreLease => &switches.ignore_lease,
            Mutation::LookSilently => &switches.look_silently,
            Mutation::ForgetRing => &switches.forget_ring,
            Mutation::AloneInRing => &switches.alone_in_ring,
            Mutation::ReleaseEarly => &switches.release_early,
            Mutation::PromiseEarly => &switches.promise_early,
            Mutation::TrustWire => &switches.trust_wire,
            Mutation::OtherLife => &switches.other_life,
            Mutation::ForgetMissing => &switches.forget_missing,
            Mutation::TellOld => &switches.tell_old,
            Mutation::AskNobody => &switches.ask_nobody,
            Mutation::ForgetPromise => &switches.forget_promise,
            Mutation::ForgetMiss => &switches.forget_miss,
            Mutation::StampParts => &switches.stamp_parts,
            Mutation::SpillUnsynced => &switches.spill_unsynced,
            Mutation::SpillOnce => &switches.spill_once,
            Mutation::CallReplaced => &switches.call_replaced,
        }
    }

    /// Turns the mutation on in `store`.
    pub(super) fn break_in(self, store: &Store) {
        self.switch(&store.mutations).set(true);
    }
}
