//! A voter's files on a disk that fails, lies in its cache and loses its power.
//!
//! Owns the history of one voter's directory: the shipped `Disk` of `mojim-views` over
//! the simulated disk, which is opened, written and ended again and again. The directory
//! must hold one of a few states: the state that was last promised, and, after a call
//! that failed, also the state that this call wanted. A state is promised once a call has
//! returned success for it, or a start has read it: the voter acts upon both. So a start
//! narrows the states down to the one that it found, and each later start must find that
//! state, whatever came between. Now and then the disk is another one, empty or one that was
//! there before: each has its own promises, and its own incarnation, by which the other
//! voters tell them apart. A violation begins with "voter:".

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use mojim_env::Error;
use mojim_env::{Env, File, OpenHow};
use mojim_views::files::{Files, Id, VoterPromises};

use crate::ctx::Faults;
use crate::rng::Rng;
use crate::world::{CrashKind, SimEnv, World};

const NODE: &str = "v";
const DIR: &str = "/voter";

/// What is reported durable, but is not made so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// A vote's file.
    Vote,
    /// An entry that was appended.
    Append,
    /// A name in the directory.
    Name,
    /// The state that a start has read.
    Start,
    /// A directory's incarnation is that of the one before.
    Life,
}

impl Broken {
    /// All defects, with their names.
    pub const ALL: [(Broken, &'static str); 5] = [
        (Broken::Vote, "voter_vote (a vote not made durable)"),
        (Broken::Append, "voter_append (an entry not made durable)"),
        (
            Broken::Name,
            "voter_name (a file's new name not made durable)",
        ),
        (
            Broken::Start,
            "voter_start (what a start has read not made durable)",
        ),
        (
            Broken::Life,
            "voter_life (an empty directory counts as the one that was lost)",
        ),
    ];
}

/// A node's environment in which the broken syncs do nothing.
struct Lax {
    env: Arc<SimEnv>,
    broken: Option<Broken>,
    starting: Arc<AtomicBool>,
}

struct LaxFile {
    file: Arc<dyn File>,
    /// Whether the file's sync does nothing: during a start, and afterwards.
    skips: [bool; 2],
    starting: Arc<AtomicBool>,
}

impl File for LaxFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(buf, offset)
    }
    fn sync(&self) -> io::Result<()> {
        match self.skips[usize::from(!self.starting.load(Relaxed))] {
            true => Ok(()),
            false => self.file.sync(),
        }
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn allocate(&self, len: u64) -> io::Result<()> {
        self.file.allocate(len)
    }
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.file.next_data(offset)
    }
}

impl Env for Lax {
    fn random(&self) -> u64 {
        match self.broken {
            Some(Broken::Life) => 7,
            _ => self.env.random(),
        }
    }
    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        let is = |name: &str| path.file_name().is_some_and(|n| n == name);
        let always = self.broken == Some(Broken::Vote) && is("vote.new");
        Ok(Arc::new(LaxFile {
            file: self.env.open(path, how)?,
            skips: [
                always || self.broken == Some(Broken::Start),
                always || self.broken == Some(Broken::Append) && is("log.new"),
            ],
            starting: self.starting.clone(),
        }))
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match self.broken {
            Some(Broken::Name) => Ok(()),
            Some(Broken::Start) if self.starting.load(Relaxed) => Ok(()),
            _ => self.env.sync_dir(path),
        }
    }

    mojim_env::forward_env!(
        env,
        now,
        boot_id,
        sector,
        create_dir_all,
        remove,
        rename,
        list,
        lock,
        locker,
        memory,
        remove_memory,
        anonymous_memory,
        persistent_memory,
        flush,
        connect
    );
}

/// A call that changes what a voter holds.
#[derive(Debug, Clone)]
enum Call {
    Vote((u64, u64, bool)),
    Append(Vec<(Id, u64)>),
    Truncate(u64),
    Snapshot(Id, u64),
    Purge(Id),
}

impl Call {
    fn on(&self, files: &Files) -> mojim_env::Result<()> {
        match self {
            Call::Vote(v) => files.vote(*v),
            Call::Append(entries) => files.append(entries),
            Call::Truncate(from) => files.truncate(*from),
            Call::Snapshot(last, n) => files.snapshot(*last, *n),
            Call::Purge(upto) => files.purge(*upto),
        }
    }

    /// The state after the call.
    fn after(&self, held: &VoterPromises) -> VoterPromises {
        let mut h = held.clone();
        match self {
            Call::Vote(v) => h.vote = Some(*v),
            Call::Append(entries) => h.entries.extend_from_slice(entries),
            Call::Truncate(from) => h.entries.retain(|((.., i), _)| i < from),
            Call::Snapshot(last, n) => h.snapshot = Some((*last, *n)),
            Call::Purge(upto) => {
                h.purged = Some(*upto);
                h.entries.retain(|((.., i), _)| *i > upto.2);
            }
        }
        h
    }

    /// Draws a call that openraft could make.
    fn draw(h: &VoterPromises, me: u64, rng: &mut Rng) -> Call {
        let saved = h.snapshot.map(|(last, _)| last);
        let last = h.entries.last().map(|(at, _)| *at).or(h.purged);
        let Some((term, leader, _)) = h.vote else {
            return Call::Vote((1, me, false));
        };
        if let Some(s) = saved
            && last.is_none_or(|l| l.2 < s.2)
        {
            // The snapshot came from the leader and is ahead of the log, which is purged
            // next.
            return Call::Purge(s);
        }
        let after = |i: Option<Id>| i.map_or(0, |i| i.2 + 1);
        match rng.below(16) {
            0..=2 => {
                let term = term + u64::from(rng.below(4) != 0);
                let node = match term == h.vote.expect("it is there").0 {
                    true => leader,
                    false => *rng.pick(&[me, 1, 2]),
                };
                Call::Vote((term, node, rng.coin()))
            }
            3 => Call::Snapshot(
                (term, leader, after(last) + rng.below(4)),
                rng.next_u64() >> 1,
            ),
            4 | 5 if after(last) > after(saved) => {
                Call::Truncate(rng.between(after(saved), after(last) - 1))
            }
            6 | 7 if after(last) > after(saved) => {
                let most = (after(last) - after(saved)) as usize;
                let (at, n) = h.entries[h.entries.len() - 1 - rng.below(most as u64) as usize];
                Call::Snapshot(at, n)
            }
            8 if saved > h.purged => Call::Purge(saved.expect("it is more than none")),
            _ => {
                let first = after(last);
                let entry = |i| ((term, leader, i), rng.next_u64() >> 1);
                let n = Rng::new(first ^ term).between(1, 4);
                Call::Append((first..first + n).map(entry).collect())
            }
        }
    }
}

/// The state as a start shows it: the voter's own leadership ended with its process.
fn restarted(h: &VoterPromises, me: u64) -> VoterPromises {
    let mut h = h.clone();
    if let Some(v) = h.vote.as_mut().filter(|v| v.1 == me) {
        v.2 = false;
    }
    h
}

/// What one seed did.
#[derive(Debug, Clone, Default)]
pub struct Shown {
    /// Starts that could read the directory.
    pub starts: u64,
    /// Calls that returned success.
    pub calls: u64,
    /// Power losses and kills.
    pub ends: u64,
}

/// Runs several lives of one voter, from a seed.
pub fn run(seed: u64, broken: Option<Broken>, trace: bool) -> (Shown, Result<(), String>, World) {
    let mut rng = Rng::new(seed ^ 0x766f_7465_7200);
    let mut faults = Faults::none();
    let mut rate = |most: u64| match rng.coin() {
        true => 0,
        false => rng.between(1, most) as u32,
    };
    faults.read_error = rate(30);
    faults.write_error = rate(60);
    faults.sync_error = rate(120);
    faults.write_back = rate(300);
    let world = World::new(seed ^ 0x766f_7465, faults);
    if trace {
        world.trace_on();
    }
    let mut shown = Shown::default();
    let result = lives(&world, &mut rng, broken, &mut shown);
    (shown, result, world)
}

/// A disk that the voter has had.
struct VoterDisk {
    /// The states that its directory may be in.
    may: Vec<VoterPromises>,
    /// The directory's incarnation, once a start has succeeded.
    incarnation: Option<u64>,
}

impl Default for VoterDisk {
    fn default() -> VoterDisk {
        VoterDisk {
            may: vec![VoterPromises::default()],
            incarnation: None,
        }
    }
}

/// Checks that the directory on disk `at` has the incarnation that it had, and no other disk's.
fn is_itself(disks: &mut [VoterDisk], at: usize, found: u64) -> Result<(), String> {
    let of = |d: &VoterDisk| d.incarnation == Some(found);
    let other = disks.iter().enumerate().any(|(i, d)| i != at && of(d));
    if other || *disks[at].incarnation.get_or_insert(found) != found {
        return Err(format!(
            "voter: disk {at} has incarnation {found}, which is not its own"
        ));
    }
    Ok(())
}

fn lives(
    world: &World,
    rng: &mut Rng,
    broken: Option<Broken>,
    shown: &mut Shown,
) -> Result<(), String> {
    let me = Files::number(NODE);
    let mut disks = vec![VoterDisk::default()];
    let mut at = 0;
    let lives = rng.between(3, 14);
    for life in 0..=lives {
        let last = life == lives;
        if rng.below(5) == 0 {
            at = rng.below(disks.len() as u64 + 1) as usize;
            if at == disks.len() {
                disks.push(VoterDisk::default());
            }
            world.note(|| format!("--- the disk is number {at}"));
        }
        if last {
            world.set_faults(Faults::none());
            world.power_loss(NODE);
        } else if rng.below(3) == 0 {
            let kind = *rng.pick(&[CrashKind::Kill, CrashKind::Power]);
            world.arm_crash(NODE, rng.between(1, 40), kind);
        }
        let starting = Arc::new(AtomicBool::new(true));
        let env = Arc::new(Lax {
            env: world.env(NODE),
            broken,
            starting: starting.clone(),
        });
        let dir = PathBuf::from(format!("{DIR}-{at}"));
        match Files::open(env, &dir, NODE) {
            Ok(files) => {
                starting.store(false, Relaxed);
                shown.starts += 1;
                let found = files.held().map_err(|e| format!("voter: live: {e}"))?;
                world.note(|| format!("--- found {found:?}"));
                is_itself(&mut disks, at, files.incarnation())?;
                let may = &mut disks[at].may;
                if !may.iter().any(|h| restarted(h, me) == found) {
                    return Err(format!("voter: found {found:?}, promised {may:?}"));
                }
                *may = vec![found];
                if !last {
                    live(world, &files, may, rng, me, shown)?;
                }
            }
            Err(e @ (Error::Damaged { .. } | Error::Config(_) | Error::Unsupported(_))) => {
                let may = &disks[at].may;
                return Err(format!("voter: refused: {e}; promised {may:?}"));
            }
            Err(e) if last => return Err(format!("voter: live: {e}")),
            Err(e) => world.note(|| format!("--- does not start: {e}")),
        }
        world.disarm(NODE);
        shown.ends += 1;
        match rng.coin() {
            true => world.kill(NODE),
            false => world.power_loss(NODE),
        }
    }
    Ok(())
}

/// Makes calls until one fails, or a drawn number is reached.
fn live(
    world: &World,
    files: &Files,
    may: &mut Vec<VoterPromises>,
    rng: &mut Rng,
    me: u64,
    shown: &mut Shown,
) -> Result<(), String> {
    for _ in 0..rng.between(0, 14) {
        let held = may[0].clone();
        let call = Call::draw(&held, me, rng);
        world.note(|| format!("--- {call:?}"));
        match call.on(files) {
            Ok(()) => {
                shown.calls += 1;
                *may = vec![call.after(&held)];
                let now = files.held().map_err(|e| format!("voter: live: {e}"))?;
                if now != may[0] {
                    return Err(format!("voter: holds {now:?} after {call:?} of {held:?}"));
                }
            }
            Err(e) => {
                world.note(|| format!("--- failed: {e}"));
                may.push(call.after(&held));
                return match files.held() {
                    Err(_) => Ok(()),
                    Ok(_) => Err(format!("voter: goes on after {e}")),
                };
            }
        }
    }
    Ok(())
}

/// The first seed at which the defect is caught, and how.
pub fn catch(broken: Broken, first: u64, most: u64) -> Option<(u64, String)> {
    (first..first.saturating_add(most))
        .find_map(|seed| Some((seed, run(seed, Some(broken), false).1.err()?)))
}
