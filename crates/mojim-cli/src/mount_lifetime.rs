//! The process behind the mount of programs under `mojim run` ([`RunsMount`]).
//!
//! It serves until no program uses the mount any more.
//!
//! Owns the decision when that is so. A program uses it in each of these cases:
//!
//! - It has the mount anywhere but at its own place, as over the volume's directory.
//! - Its root or working directory, changed by `chroot`, lies in the mount.
//! - The mount was taken away for want of such programs, and the program has a file of it open.
//!
//! Also owns who they are once the mount is dead: the processes in the mount namespaces that
//! `mojim run` made for it.
//!
//! [`RunsMount`]: crate::runs_mount::RunsMount

use std::collections::HashSet;
use std::ffi::{CStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim_mount::Mounted;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::failure::{Done, Failure};
use crate::run_note;
use crate::runs_mount::{Device, device_of, open_own, try_lock};
use crate::signals;

/// The exit code of a mount that ended under the programs that use it.
pub const CUT_OFF: u8 = 3;
/// How often it is looked for what ends the mount.
const TURN: Duration = Duration::from_millis(200);
/// A look for users may take this part of the time, unless it takes long: whoever wants the volume when this
/// mount has ended waits for the next look.
const LOOKS: u32 = 100;
const MOST_PAUSE: Duration = Duration::from_secs(2);
/// How long the mount is waited for that nobody has any more.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked for programs of a dead mount, and the pause between two looks.
const ROUNDS: u32 = 500;
const PAUSE: Duration = Duration::from_millis(20);
/// How long programs get EROFS once another node is the primary, before the mount is taken away.
const STALE: Duration = Duration::from_secs(5);

/// Serves until no program uses the mount, a second signal asks for its end [`PATIENCE`] after the
/// first, or another node has been the primary for [`STALE`]. The first signal is also that of a
/// service that is stopped with its programs, which still have to end.
pub fn serve(mounted: Mounted, mut users: Users) -> Done {
    // While it is held, no program comes.
    let mut alone: Option<(File, Instant)> = None;
    let (mut asked, mut waits): (Option<Instant>, bool) = (None, false);
    let mut stale: Option<Instant> = None;
    let cause = loop {
        let came = signals::came_within(TURN);
        if came.map_err(|e| cut_off(e.to_string()))? {
            // A service manager may send two at once.
            if asked.is_some_and(|since| since.elapsed() > PATIENCE) {
                break Cause::Asked;
            }
            asked.get_or_insert_with(Instant::now);
            tracing::info!(
                "asked to end: this mount waits for its last program. A signal more than {} s after the first one ends it at once",
                PATIENCE.as_secs()
            );
        }
        if mounted.is_over() {
            // The last user's end is that of the mount, once it is taken away from its place.
            break match alone.is_none() && stale.is_none() && !users.are_gone() {
                true => Cause::CutOff,
                false => Cause::Unused,
            };
        }
        if stale.is_none() && mounted.is_stale() {
            stale = Some(Instant::now());
            tracing::error!(
                "another node is the primary: programs here can change nothing any more, and lose their files in {} s",
                STALE.as_secs()
            );
            if let Err(e) = mounted.hide() {
                tracing::warn!("{e}");
            }
        }
        // The node's daemon needs the copy, to follow the new primary.
        if stale.is_some_and(|since| since.elapsed() > STALE) {
            mounted.forget();
            break Cause::Stale;
        }
        match &alone {
            Some((_, since)) if since.elapsed() > PATIENCE => {
                if !mounted.is_open() && users.are_gone() {
                    break Cause::Unused;
                }
                if !std::mem::replace(&mut waits, true) {
                    tracing::warn!(
                        "processes still have files open; no other program can use the volume"
                    );
                }
            }
            Some(_) => {}
            None => alone = users.leave(&mounted, stale.is_some()),
        }
    };
    cause.log();
    // What a node that was replaced could not commit is known.
    let failed = mounted.end().err().filter(|_| stale.is_none());
    if let Some(e) = &failed {
        users.note(&e.to_string());
    }
    match (cause, failed) {
        // Also if what was stored is committed: its programs can reach nothing any more.
        (Cause::CutOff, None) => Err(cut_off("their stores are committed".into())),
        (Cause::CutOff, Some(e)) => Err(cut_off(e.to_string())),
        (_, Some(e)) => Err(Failure::from(e)),
        (_, None) => Ok(0),
    }
}

fn cut_off(what: String) -> Failure {
    Failure {
        code: CUT_OFF,
        text: format!("the mount ended under the programs that use it: {what}"),
    }
}

/// Why a mount ends.
#[derive(Debug, Clone, Copy)]
enum Cause {
    /// No program uses it.
    Unused,
    Asked,
    /// Another node is the primary.
    Stale,
    /// Its connection to the kernel was ended, with programs that use it.
    CutOff,
}

impl Cause {
    /// Each end is in the log.
    fn log(self) {
        match self {
            Cause::Unused => tracing::info!("the mount ends: no program uses it"),
            Cause::Asked => tracing::warn!("the mount ends: asked to end a second time"),
            Cause::Stale => tracing::error!("the mount ends: another node is the primary"),
            Cause::CutOff => tracing::error!(
                "the mount ends: somebody unmounted it, or ended its connection to the kernel, while \
                 programs use it"
            ),
        }
    }
}

/// Who uses the mount.
pub struct Users {
    /// The place of the mount, and what is kept beside it.
    dir: PathBuf,
    /// The end of the path of its place, as `mountinfo` has it.
    place: Vec<u8>,
    device: Device,
    next: Instant,
    /// Locked as long as the process serves.
    _serving: File,
    said: bool,
}

impl Users {
    /// Of what is mounted at `at`. `serving` is what [`serving`] returned.
    pub fn of(at: &Path, serving: File) -> io::Result<Users> {
        Ok(Users {
            dir: at.parent().unwrap_or(Path::new("/")).to_owned(),
            place: end_of(at),
            device: device_of(at)?,
            next: Instant::now(),
            _serving: serving,
            said: false,
        })
    }

    /// Takes the mount away from its place, if nobody uses it, and so nobody will while the returned
    /// lock is held. Looks only as often as costs little.
    fn leave(&mut self, mounted: &Mounted, is_hidden: bool) -> Option<(File, Instant)> {
        let began = Instant::now();
        if began < self.next {
            return None;
        }
        let left = match self.are_none() {
            Ok(None) => Ok(None),
            Ok(Some(lock)) if is_hidden => Ok(Some(lock)),
            Ok(Some(lock)) => mounted
                .leave()
                .map(|()| Some(lock))
                .map_err(|e| e.to_string()),
            Err(e) => Err(format!("looking for programs that use the volume: {e}")),
        };
        self.next = began + pause_after(began.elapsed());
        match left {
            Ok(lock) => lock.map(|l| (l, Instant::now())),
            Err(e) => {
                // Somebody may use the place itself.
                self.next += PATIENCE;
                if !std::mem::replace(&mut self.said, true) {
                    tracing::warn!("no program uses the volume, but the mount cannot end: {e}");
                }
                None
            }
        }
    }

    /// Whether there are none, as far as can be seen.
    fn are_gone(&self) -> bool {
        !are_some(self.device, &self.place).unwrap_or(true)
    }

    /// The lock, if there are none.
    fn are_none(&self) -> io::Result<Option<File>> {
        if are_some(self.device, &self.place)? {
            return Ok(None);
        }
        let lock = open_own(&self.dir.join("lock"), true)?;
        // Between the look and the lock somebody may have come.
        let free = try_lock(&lock)? && !are_some(self.device, &self.place)?;
        Ok(free.then_some(lock))
    }

    /// Leaves word for the next `mojim run`.
    fn note(&self, why: &str) {
        run_note::write(&self.dir, why);
    }
}

/// From the begin of a look that took so long until the next one.
fn pause_after(took: Duration) -> Duration {
    (took * LOOKS).min(took + MOST_PAUSE)
}

/// The lock that says that a process serves the mount at `at`; `None` if another one does.
pub fn serving(at: &Path) -> io::Result<Option<File>> {
    let dir = at.parent().unwrap_or(Path::new("/"));
    let file = open_own(&dir.join("serving"), true)?;
    Ok(try_lock(&file)?.then_some(file))
}

/// The last components of a mount's place, by which it is known under whatever path it is seen:
/// `.mojim/VOLUME/run/at`.
fn end_of(at: &Path) -> Vec<u8> {
    let parts: Vec<_> = at.components().collect();
    let last: PathBuf = parts[parts.len().saturating_sub(4)..].iter().collect();
    [b"/", &escaped(&last)[..]].concat()
}

/// Whether a process uses the file system: has it mounted anywhere but at its own place, as programs
/// have it over the volume's directory, or has its root or working directory in it.
fn are_some(device: Device, place: &[u8]) -> io::Result<bool> {
    let mut seen: HashSet<OsString> = HashSet::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        if !entry.file_name().as_encoded_bytes()[0].is_ascii_digit() {
            continue;
        }
        let process = entry.path();
        // A process that has ended meanwhile uses nothing. Of another user's neither is said, who
        // cannot use what is not root's.
        let namespace = namespace_of(&process);
        let root = std::fs::read_link(process.join("root")).ok();
        let is_jailed = root.is_some_and(|r| r != Path::new("/"));
        if is_jailed {
            let is_it = |way: &str| device_of(&process.join(way)).is_ok_and(|d| d == device);
            if is_it("root") || is_it("cwd") {
                return Ok(true);
            }
        } else if namespace.as_ref().is_some_and(|n| seen.contains(n)) {
            continue;
        }
        let Some(mounts) = mounts_of(&process) else {
            continue;
        };
        if mounted(&mounts, device).any(|at| !at.ends_with(place)) {
            return Ok(true);
        }
        // One in a jail sees a part only.
        if let (Some(n), false) = (namespace, is_jailed) {
            seen.insert(n);
        }
    }
    Ok(false)
}

/// The mount namespace that a process is in; where its first thread has ended, another one's.
fn namespace_of(process: &Path) -> Option<OsString> {
    let of = |thread: &Path| std::fs::read_link(thread.join("ns/mnt")).ok();
    let threads = || std::fs::read_dir(process.join("task")).ok();
    let found = of(process).or_else(|| threads()?.flatten().find_map(|t| of(&t.path())));
    found.map(PathBuf::into_os_string)
}

/// All processes that can be seen.
fn processes() -> Vec<(u32, PathBuf)> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let id = |e: std::fs::DirEntry| Some((e.file_name().to_str()?.parse().ok()?, e.path()));
    all.filter_map(id).collect()
}

/// Kills the programs of a dead mount: the processes in every namespace that `mojim run` made for
/// it, by laying a file system with the source `below` first. Returns how many.
pub fn end_users(device: Device, below: &CStr) -> usize {
    let mut killed = HashSet::new();
    for _ in 0..ROUNDS {
        let spaces = made_for(device, below);
        let is_in = |path: &Path| namespace_of(path).is_some_and(|n| spaces.contains(&n));
        let mut left = false;
        for (id, path) in processes() {
            if id == std::process::id() || !is_in(&path) {
                continue;
            }
            left = true;
            let Some(pid) = Pid::from_raw(id as i32) else {
                continue;
            };
            // The number may be another process's by now: the descriptor stays the same one's.
            if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
                && is_in(&path)
                && pidfd_send_signal(&process, Signal::KILL).is_ok()
            {
                killed.insert(id);
            }
        }
        if !left {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    killed.len()
}

/// The mount namespaces in which `mojim run` has laid this file system over a volume's directory.
fn made_for(device: Device, below: &CStr) -> HashSet<OsString> {
    let (mut seen, mut made) = (HashSet::new(), HashSet::new());
    for (_, process) in processes() {
        // One in a jail sees a part only.
        let is_jailed = std::fs::read_link(process.join("root")).is_ok_and(|r| r != Path::new("/"));
        let Some(namespace) = namespace_of(&process).filter(|n| !is_jailed && !seen.contains(n))
        else {
            continue;
        };
        let Some(mounts) = mounts_of(&process) else {
            continue;
        };
        if is_made_for(&mounts, device, below) {
            made.insert(namespace.clone());
        }
        seen.insert(namespace);
    }
    made
}

/// Whether the file system is mounted where `mojim run` has laid an empty one before, for the same run
/// of the mount: the device's number alone may have been another one's since.
fn is_made_for(mounts: &[u8], device: Device, below: &CStr) -> bool {
    let below: Vec<&[u8]> = mounts
        .split(|b| *b == b'\n')
        .filter_map(|line| {
            let mut words = line.split(|b| *b == b' ');
            let at = words.nth(4)?;
            // After a dash: the kind, and the source.
            words.find(|w| *w == b"-")?;
            (words.nth(1)? == below.to_bytes()).then_some(at)
        })
        .collect();
    mounted(mounts, device).any(|at| below.contains(&at))
}

/// A process's `mountinfo`; where its first thread has ended, by another one.
fn mounts_of(process: &Path) -> Option<Vec<u8>> {
    if let Ok(mounts) = std::fs::read(process.join("mountinfo")) {
        return Some(mounts);
    }
    let mut threads = std::fs::read_dir(process.join("task")).ok()?.flatten();
    threads.find_map(|t| std::fs::read(t.path().join("mountinfo")).ok())
}

/// Where `mountinfo` has the file system mounted.
fn mounted(mounts: &[u8], (major, minor): Device) -> impl Iterator<Item = &[u8]> {
    let device = format!("{major}:{minor}").into_bytes();
    let lines = mounts.split(|b| *b == b'\n');
    lines.filter_map(move |line| {
        let mut words = line.split(|b| *b == b' ').skip(2);
        (words.next() == Some(&device)).then(|| words.nth(1))?
    })
}

/// A path as `mountinfo` has it.
fn escaped(path: &Path) -> Vec<u8> {
    let mut text = Vec::new();
    for &b in path.as_os_str().as_bytes() {
        match b {
            b' ' | b'\t' | b'\n' | b'\\' => text.extend(format!("\\{b:03o}").bytes()),
            b => text.push(b),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::below;

    /// On a busy machine a look took a tenth of a second: nobody looked for ten more, while a program waited for
    /// the end of a mount that nobody used, and gave up after eight.
    #[test]
    fn a_look_that_takes_long_is_followed_by_another_soon() {
        let ms = Duration::from_millis;
        for (took, pause) in [(1, 100), (20, 2000), (100, 2100), (5000, 7000)] {
            assert_eq!(pause_after(ms(took)), ms(pause));
        }
    }

    #[test]
    fn places_of_a_file_system_are_found() {
        let text = b"66 45 0:39 / /d/at rw - fuse.mojim mojim:v rw\n\
            67 45 0:39 / /with\\040blank rw shared:1 - fuse.mojim mojim:v rw\n\
            68 45 0:3 / /\xff rw - proc proc rw\n\n";
        let all: Vec<_> = mounted(text, (0, 39)).collect();
        assert_eq!(all, [&b"/d/at"[..], b"/with\\040blank"]);
        assert_eq!(escaped(Path::new("/with blank")), all[1]);
        assert_eq!(mounted(text, (0, 3)).next(), Some(&b"/\xff"[..]));
        assert_eq!(mounted(text, (9, 9)).next(), None);
    }

    /// Only where `mojim run` has made the namespace are programs killed: not where somebody has mounted
    /// the file system elsewhere too, nor over another directory, nor those of another mount that has
    /// got the number of this one's file system.
    #[test]
    fn a_namespace_that_was_made_for_a_mount_is_known() {
        let line = |device: &str, at: &str, source: &str| {
            format!("67 45 {device} / {at} rw shared:1 - some {source} rw\n")
        };
        let (own, next) = (below("1"), below("2"));
        let source = own.to_str().unwrap();
        let run = line("0:50", "/d/v", source) + &line("0:39", "/d/v", "mojim:v");
        assert!(is_made_for(run.as_bytes(), (0, 39), &own));
        assert!(!is_made_for(run.as_bytes(), (0, 39), &next));
        assert!(!is_made_for(run.as_bytes(), (0, 38), &own));
        let elsewhere = line("0:50", "/d/v", source) + &line("0:39", "/mnt", "mojim:v");
        assert!(!is_made_for(elsewhere.as_bytes(), (0, 39), &own));
        let other = line("0:50", "/d/v", "tmpfs") + &line("0:39", "/d/v", "mojim:v");
        assert!(!is_made_for(other.as_bytes(), (0, 39), &own));
    }

    /// This process is one that uses its root.
    #[test]
    fn who_has_a_mount_over_a_directory_uses_it() {
        let own = std::fs::read("/proc/self/mountinfo").unwrap();
        let line = own.split(|b| *b == b'\n').next().unwrap();
        let word = |n: usize| line.split(|b| *b == b' ').nth(n).unwrap();
        let device = String::from_utf8_lossy(word(2)).into_owned();
        let (major, minor) = device.split_once(':').unwrap();
        let device = (major.parse().unwrap(), minor.parse().unwrap());
        assert!(are_some(device, b"/no/place").unwrap());
        assert!(!are_some((4000, 4000), b"/no/place").unwrap());
        // Its own place does not count, under whatever path.
        let place = end_of(Path::new("/d/.mojim/a volume/run/at"));
        assert!(b"/host/d/.mojim/a\\040volume/run/at".ends_with(&place));
        assert!(!word(4).ends_with(&place));
    }
}
