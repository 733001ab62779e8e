//! States of this node that are not as they should be, for as long as they last.
//!
//! Each gives an event when it begins and one when it is over. `mojim status` tells since when it
//! has been so.
//!
//! Owns the codes of such states. A program that is attached writes no lines. Its work without its
//! mirror is seen in the figures that it leaves in its ring's memory, twice a second.
//!
//! Invariants:
//!
//! - A code, once given, keeps its meaning: alerts stand on it (`docs/reference/events.md`,
//!   "Codes").
//! - A thing that is seen at one look only is no such state: while a program attaches there is no
//!   link for a moment.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use mojim_config::Volume;
use mojim_format::{State, Superblock};
use mojim_store::log::Live;
use serde_json::{Value, json};
use tracing::{error, info, warn};

use super::{Node, is_full};
use mojim_replica::layout;
use mojim_store::store::read_superblock;

/// A state that an operator should know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Condition {
    /// The program here hears nothing of its mirror.
    MirrorLost,
    /// What the program here acknowledges has one copy.
    Alone,
    /// No room: this node's copy takes nothing more, or only as long as its log has room.
    DiskFull,
    /// This node's copy cannot be used.
    CopyDamaged,
    /// The program here can commit nothing more.
    ProgramFailed,
}

impl Condition {
    /// Its code.
    fn code(self) -> &'static str {
        match self {
            Condition::MirrorLost => "mirror_lost",
            Condition::Alone => "alone",
            Condition::DiskFull => "disk_full",
            Condition::CopyDamaged => "copy_damaged",
            Condition::ProgramFailed => "program_failed",
        }
    }
}

/// The states of one volume on this node.
#[derive(Default)]
pub(crate) struct Conditions {
    /// With since when that is told: what was seen once only is not. The time of day is asked for
    /// when something begins to be told, and never otherwise.
    now: BTreeMap<Condition, Option<SystemTime>>,
}

/// What begins or is over.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Begins(Condition, String),
    Over(Condition),
}

impl Conditions {
    /// Takes what is seen at one look.
    fn look(
        &mut self,
        seen: BTreeMap<Condition, String>,
        at: impl Fn() -> SystemTime,
    ) -> Vec<Turn> {
        let mut turns = Vec::new();
        self.now.retain(|c, told| {
            let is_over = !seen.contains_key(c);
            if is_over && told.is_some() {
                turns.push(Turn::Over(*c));
            }
            !is_over
        });
        for (c, text) in seen {
            match self.now.get_mut(&c) {
                None => drop(self.now.insert(c, None)),
                Some(told @ None) => {
                    *told = Some(at());
                    turns.push(Turn::Begins(c, text));
                }
                Some(_) => {}
            }
        }
        turns
    }

    /// Whether the program here has no mirror.
    fn is_without_mirror(&self) -> bool {
        let without = [Condition::MirrorLost, Condition::Alone];
        without.iter().any(|c| self.now.contains_key(c))
    }

    /// By code, since when each has been so, in milliseconds since 1970; null if nothing is.
    pub(crate) fn since(&self) -> Value {
        let told = self
            .now
            .iter()
            .filter_map(|(c, at)| Some((c, at.as_ref()?)));
        let since = |at: &SystemTime| {
            let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
            json!(since.as_millis() as u64)
        };
        let all: serde_json::Map<_, _> = told
            .map(|(c, at)| (c.code().to_owned(), since(at)))
            .collect();
        match all.is_empty() {
            true => Value::Null,
            false => Value::Object(all),
        }
    }
}

impl Node {
    /// Looks at a volume, and tells what has begun and what is over.
    pub(crate) fn look_at_conditions(&self, v: &Volume) {
        let seen = self.seen_conditions(v);
        let turns = {
            let mut known = self.of(v).known();
            known.conditions.look(seen, SystemTime::now)
        };
        for turn in turns {
            self.tell(v, turn);
        }
    }

    fn seen_conditions(&self, v: &Volume) -> BTreeMap<Condition, String> {
        let mut seen = BTreeMap::new();
        let sb = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name));
        let Ok(Some(sb)) = sb else {
            return seen;
        };
        let why = match self.of(v).mirror() {
            Some(m) => m.store.poisoned().cloned(),
            None => self.noted(v, Some(sb.sequence)),
        };
        if let Some(e) = why {
            let c = match is_full(&e) {
                true => Condition::DiskFull,
                false => Condition::CopyDamaged,
            };
            seen.insert(c, e.cause());
        }
        if sb.state == State::Whole && sb.view.primary == self.me.name && !self.is_healing(v) {
            self.seen_of_program(v, &sb, &mut seen);
        }
        seen
    }

    /// What the figures of the program that is attached here say.
    fn seen_of_program(&self, v: &Volume, sb: &Superblock, seen: &mut BTreeMap<Condition, String>) {
        let Some(live) = self.live(v) else { return };
        let live = |what: Live| live[what as usize];
        // Of an older program, or of one that still begins.
        if live(Live::Pid) == 0 || live(Live::Epoch) != sb.view.epoch || !self.attached(v) {
            return;
        }
        if live(Live::Failed) != 0 {
            let text = "the program here can commit nothing more: its disk or its log has failed";
            seen.insert(Condition::ProgramFailed, text.to_owned());
            return;
        }
        if live(Live::NoRoom) != 0 {
            let text = "the disk is full: committed data waits in the log. Sync points go on until the log is full too";
            seen.insert(Condition::DiskFull, text.to_owned());
        }
        if v.mirror.is_none() {
            return;
        }
        let mirror = &sb.view.mirror;
        if mirror.is_empty() {
            let text = "the program here goes on alone: its sync points have one copy";
            seen.insert(Condition::Alone, text.to_owned());
        } else if live(Live::LinkUp) == 0 {
            let text = format!("the program here hears nothing of node {mirror}, its mirror");
            seen.insert(Condition::MirrorLost, text);
        }
    }

    fn tell(&self, v: &Volume, turn: Turn) {
        let (me, volume) = (&self.me.name, &v.name);
        match turn {
            Turn::Begins(c @ (Condition::MirrorLost | Condition::Alone), text) => {
                warn!(node = %me, volume = %volume, code = c.code(), "{text}");
            }
            Turn::Begins(c, text) => {
                error!(node = %me, volume = %volume, code = c.code(), "{text}");
            }
            // Alone, or without a mirror still: the other one of these is told.
            Turn::Over(Condition::MirrorLost | Condition::Alone) => {
                let left = self.of(v).known().conditions.is_without_mirror();
                if !left && self.attached(v) {
                    info!(
                        node = %me, volume = %volume, code = "mirror_back",
                        "the program here has its mirror again"
                    );
                }
            }
            Turn::Over(Condition::DiskFull) => info!(
                node = %me, volume = %volume, code = "copy_back", "the copy here has room again"
            ),
            Turn::Over(Condition::CopyDamaged) => info!(
                node = %me, volume = %volume, code = "copy_back", "the copy here can be used again"
            ),
            Turn::Over(Condition::ProgramFailed) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_state_is_told_when_it_was_seen_twice_and_when_it_is_over() {
        use Condition::{Alone, MirrorLost};
        let mut all = Conditions::default();
        let at = |s| move || UNIX_EPOCH + Duration::from_secs(s);
        let seen = |c: &[Condition]| c.iter().map(|c| (*c, format!("{c:?}"))).collect();
        // While a program attaches.
        assert_eq!(all.look(seen(&[MirrorLost]), at(1)), []);
        assert_eq!(all.since(), Value::Null);
        assert_eq!(all.look(seen(&[]), at(2)), []);
        assert_eq!(all.look(seen(&[MirrorLost]), at(3)), []);
        let begins = |c| Turn::Begins(c, format!("{c:?}"));
        assert_eq!(all.look(seen(&[MirrorLost]), at(4)), [begins(MirrorLost)]);
        assert_eq!(all.look(seen(&[MirrorLost]), at(5)), []);
        assert_eq!(all.since(), json!({ "mirror_lost": 4000 }));
        assert_eq!(all.look(seen(&[Alone]), at(6)), [Turn::Over(MirrorLost)]);
        assert_eq!(all.look(seen(&[Alone]), at(7)), [begins(Alone)]);
        assert_eq!(all.since(), json!({ "alone": 7000 }));
        assert_eq!(all.look(seen(&[]), at(8)), [Turn::Over(Alone)]);
        assert_eq!(all.since(), Value::Null);
    }
}
