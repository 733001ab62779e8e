//! The copies that programs left here that ended without detaching.
//!
//! Owns the thread that looks at them: what a program committed is in its ring, and is made
//! persistent.
//!
//! Invariant: each copy that is left is looked at once, with these exceptions:
//!
//! - Somebody uses it.
//! - Somebody puts another log in the place of the one that is left.
//! - The disk had no room: then it is looked at until the disk has room.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use mojim_config::{MediumKind, Volume};
use mojim_env::{Error, Result};
use mojim_format::Superblock;
use mojim_replica::layout;
use mojim_store::log::Live;
use mojim_store::store::{Store, read_superblock};
use tracing::{error, warn};

use super::{Node, is_full};

/// What tells one file from another that was put in its place, or from the same one written to.
type Is = Option<(u64, i64, i64)>;

fn is(path: &Path) -> Is {
    let m = std::fs::metadata(path).ok()?;
    Some((m.ino(), m.ctime(), m.ctime_nsec()))
}

/// Rounds, of half a second each, for which a log that was put back has to rest.
const RESTS: u32 = 6;
/// Rounds after which a copy is looked at again for which the disk had no room.
const FULL: u32 = 6;

/// What the thread remembers of a volume.
#[derive(Default)]
struct Seen {
    /// The LSN up to which it said last that records are persistent.
    told: Option<u64>,
    /// How many losses of the mirror there were at the first look, or were told.
    losses: Option<u64>,
    /// The logs' files, with their rings: at the last look at the copy, and a round ago.
    looked: Vec<(Is, Option<u64>)>,
    before: Vec<(Is, Option<u64>)>,
    /// For how many rounds nobody has touched them.
    rests: u32,
    /// For how many rounds the copy has waited for room.
    full: u32,
}

impl Node {
    /// Reports what a loss of the mirror put at risk here, once that is over. `losses`:
    /// how many losses are known; none before the first look.
    fn tell_risk(&self, v: &Volume, losses: &mut Option<u64>) {
        let live = self.live(v);
        let of = |l: Live| live.map_or(0, |all| all[l as usize]);
        let now = of(Live::Losses);
        let known = losses.replace(now).unwrap_or(now);
        if now > known && of(Live::LastRisk) > 0 {
            let (bytes, ms) = (of(Live::LastRisk), of(Live::LastRiskTime) as f64 / 1000.0);
            warn!(
                node = %self.me.name, volume = %v.name,
                "the mirror was lost; {bytes} bytes that it had acknowledged were only in this node's memory, for {ms:.1} ms"
            );
        }
    }

    /// Programs that died leave what they committed in their ring: it is made
    /// persistent here (`docs/reference/invariants.md`, "The order of a record's life").
    pub(super) fn ring_loop(self: Arc<Node>) {
        let mut all: HashMap<String, Seen> = HashMap::new();
        while !self.stopping.load(Acquire) {
            for v in self.volumes() {
                let seen = all.entry(v.name.clone()).or_default();
                self.end_old_look(&v);
                self.tell_risk(&v, &mut seen.losses);
                self.look_at_conditions(&v);
                let meta = layout::meta_dir(&self.me, &v.name);
                let Ok(Some(sb)) = read_superblock(&*self.env, &meta) else {
                    continue;
                };
                let unclean = sb.logs != 0 && sb.view.primary == self.me.name;
                // The lock is tried last: whoever is about to open the copy would find it held.
                let is_due = self.left_tail(&v, sb.sequence).is_none()
                    || self.is_another_log(&v, seen)
                    || self.may_have_room(&v, seen);
                if !(unclean && is_due) || self.of(&v).is_open() || self.in_use(&v) {
                    continue;
                }
                self.look_at_left(&v, &sb, &mut seen.told);
                seen.looked = self.logs_left(&v);
            }
            for _ in 0..10 {
                if self.stopping.load(Acquire) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// Whether the last look found no room, [`FULL`] rounds ago: what the program committed is in
    /// memory alone for so long.
    fn may_have_room(&self, v: &Volume, seen: &mut Seen) -> bool {
        let found = self
            .of(v)
            .known()
            .copy_error
            .as_ref()
            .map(|(_, e)| is_full(e));
        seen.full = match found {
            Some(true) => seen.full + 1,
            _ => 0,
        };
        let may = seen.full >= FULL;
        if may {
            seen.full = 0;
        }
        may
    }

    /// The logs' files on disks, and their rings, of a volume without a mirror: only its log says
    /// what was acknowledged, and an attach has nobody else to take that from.
    fn logs_left(&self, v: &Volume) -> Vec<(Is, Option<u64>)> {
        if v.mirror.is_some() {
            return Vec::new();
        }
        let logs = layout::logs(&self.config, &self.me, v);
        let disks = logs.iter().filter(|l| l.medium == MediumKind::Disk);
        let of = |l: &mojim_store::log::LogSpec| (is(&l.path), is(&l.ring).map(|(ino, ..)| ino));
        disks.map(of).collect()
    }

    /// Whether somebody has put another log in the place of the one that was looked at, and has
    /// not touched it for [`RESTS`] rounds: a log is looked at when it is put back, not meanwhile.
    fn is_another_log(&self, v: &Volume, seen: &mut Seen) -> bool {
        let now = self.logs_left(v);
        seen.rests = match now == seen.before {
            true => seen.rests.saturating_add(1),
            false => 0,
        };
        let is_other = now != seen.looked;
        seen.before = now;
        is_other && seen.rests >= RESTS
    }

    /// Looks at a copy that a program left, and makes its records persistent.
    fn look_at_left(&self, v: &Volume, sb: &Superblock, told: &mut Option<u64>) {
        let _look = self.of(v).look();
        let last = self
            .of(v)
            .known()
            .copy_error
            .as_ref()
            .map(|(_, e)| e.to_string());
        let opened = Store::open(&self.env, self.spec(v));
        // A disk that stays full is told of once.
        let is_new = |e: &Error| last.as_ref() != Some(&e.to_string());
        self.note(v, &opened);
        match opened {
            // A look had this clean copy open when the superblock was read.
            Ok(s) if s.was_clean() => {
                if let Err(e) = s.close_clean(s.tail()) {
                    error!(node = %self.me.name, volume = %v.name, "{e}");
                }
            }
            Ok(s) => {
                let before = s.tail();
                let done = s.persist_all();
                // What the copy has is persistent now; more may have been
                // acknowledged.
                let whole = done.clone().and_then(|()| check_log(v, &s));
                self.note(v, &whole);
                match done {
                    // A look changed the sequence of a copy that was settled
                    // already.
                    Ok(()) if told.replace(before) == Some(before) => {}
                    Ok(()) => warn!(
                        node = %self.me.name, volume = %v.name, code = "program_died",
                        "a program ended without detaching; its records up to LSN {before} are persistent"
                    ),
                    Err(e) if is_new(&e) => {
                        error!(node = %self.me.name, volume = %v.name, "{e}");
                    }
                    Err(_) => {}
                }
                let found = (s.superblock().sequence, Some(before));
                self.of(v).known().left_tail = Some(found);
            }
            Err(Error::Busy(_)) => {}
            Err(e) => {
                if is_new(&e) {
                    error!(node = %self.me.name, volume = %v.name, "{e}");
                }
                // The failed attempt may have changed the sequence.
                let meta = layout::meta_dir(&self.me, &v.name);
                let now = read_superblock(&*self.env, &meta).ok().flatten();
                let sequence = now.map_or(sb.sequence, |sb| sb.sequence);
                self.of(v).known().left_tail = Some((sequence, None));
            }
        }
    }
}

/// Fails if the logs of a copy that a program left lack what was acknowledged. Without a mirror
/// an attach fails with the same words.
fn check_log(v: &Volume, s: &Store) -> Result<()> {
    let tail = s.tail();
    match s.known_missing().filter(|known| *known > tail) {
        None => Ok(()),
        Some(_) if v.mirror.is_none() => s.check_complete(),
        Some(known) => Err(Error::Invalid(format!(
            "its log is damaged: sync points up to LSN {known} were acknowledged, LSN {tail} is the last that can be read here"
        ))),
    }
}
