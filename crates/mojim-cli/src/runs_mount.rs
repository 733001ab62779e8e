//! The mount that all programs under `mojim run` on a node have in common, for each volume.
//!
//! Owns its place below the node's own state (a directory `at`, the `lock`, the process's `log`),
//! its start, and the decision when it ends. Its process is `mojim mount`, started by the first
//! `mojim run` that needs it; it belongs to no program, and no program's end takes it along. It
//! ends by itself when no mount namespace but its own has the mount any more.
//!
//! Invariants:
//! - Who holds the lock decides: a mount is looked at, started and joined, and ends, under the lock
//!   only. So a program never enters a mount that is about to end.
//! - The lock's file says with which [`Settings`] the mount runs.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mojim_config::{Node, Volume};
use mojim_replica::layout;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::mount::{UnmountFlags, unmount};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, say_on_stderr};

/// How long a wait goes on before a person is told of it.
const SILENCE: Duration = Duration::from_secs(1);
/// The pause between two looks at a lock that another process holds.
const PAUSE: Duration = Duration::from_millis(20);
/// A log that is larger is begun anew by the next mount.
const MOST_LOG: u64 = 1 << 20;
/// A look for users may take this part of the time.
const LOOKS: u32 = 100;

/// The exit code of a mount that may succeed later.
pub const LATER: u8 = 75;

/// What `mojim run` may say of the mount, as on the command line of `mojim mount`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
pub struct Settings {
    /// What an fsync commits: the "file" that it is of, which is the default, or everything in the
    /// "volume".
    #[arg(long, value_name = "WHAT", value_parser = ["file", "volume"])]
    pub atomic: Option<String>,
    /// Seconds after which changes that no program has synced are committed, 5 by default, or "never"
    /// (`mojim mount --help`).
    #[arg(long, value_name = "SECONDS")]
    pub commit_interval: Option<String>,
}

impl Settings {
    fn args(&self) -> Vec<String> {
        let one =
            |name: &str, value: &Option<String>| value.as_ref().map(|v| format!("{name}={v}"));
        let all = [
            one("--atomic", &self.atomic),
            one("--commit-interval", &self.commit_interval),
        ];
        all.into_iter().flatten().collect()
    }

    /// Whether who asks for these can use a mount with `others`.
    fn go_with(&self, others: &Settings) -> bool {
        let one = |mine: &Option<String>, other: &Option<String>| mine.is_none() || mine == other;
        one(&self.atomic, &others.atomic) && one(&self.commit_interval, &others.commit_interval)
    }
}

/// The mount's place on a node.
pub struct RunsMount {
    config: PathBuf,
    node: String,
    volume: String,
    dir: PathBuf,
}

/// While this lives, the mount does not end.
pub struct Held {
    _lock: File,
}

impl RunsMount {
    /// That of `volume` on `node`. `config` is an absolute path.
    pub fn of(config: &Path, node: &Node, volume: &Volume) -> RunsMount {
        RunsMount {
            config: config.to_owned(),
            node: node.name.clone(),
            volume: volume.name.clone(),
            dir: layout::runs_dir(node, &volume.name),
        }
    }

    /// Where it is mounted.
    pub fn at(&self) -> PathBuf {
        self.dir.join("at")
    }

    fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Has it mounted, with `settings` if it is not there yet.
    ///
    /// # Errors
    /// What the mount's process says, with its exit code; that it runs with other settings.
    pub fn ensure(&self, settings: &Settings) -> Result<Held, Failure> {
        let at = self.at();
        std::fs::create_dir_all(&self.dir).map_err(|e| Failure::from(e).at(&place(&self.dir)))?;
        mojim_linux::trust::check(std::slice::from_ref(&self.dir))?;
        let mut lock = self.lock()?;
        self.wait_for_lock(&lock)?;
        match look(&at)? {
            Look::Mounted => {
                let mut text = String::new();
                lock.read_to_string(&mut text)?;
                // A mount that ended without warning left what it had said.
                let has: Settings = serde_json::from_str(&text).unwrap_or_default();
                if !settings.go_with(&has) {
                    return Err(Failure::usage(format!(
                        "volume {} is mounted already, for programs under `mojim run` that have {}; \
                         give the same, or end them first",
                        self.volume,
                        match has.args() {
                            none if none.is_empty() => "the defaults".to_owned(),
                            some => some.join(" "),
                        }
                    )));
                }
                return Ok(Held { _lock: lock });
            }
            Look::Dead => take_away(&at)?,
            Look::Bare => match std::fs::create_dir(&at) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(Failure::from(e).at(&place(&at)));
                }
                _ => {}
            },
        }
        self.start(settings)?;
        lock.set_len(0)?;
        lock.seek(SeekFrom::Start(0))?;
        lock.write_all(serde_json::to_string(settings)?.as_bytes())?;
        Ok(Held { _lock: lock })
    }

    fn lock(&self) -> Result<File, Failure> {
        let path = self.dir.join("lock");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let options = options.mode(0o600).custom_flags(libc::O_NOFOLLOW);
        options
            .open(&path)
            .map_err(|e| Failure::from(e).at(&place(&path)))
    }

    fn wait_for_lock(&self, lock: &File) -> Result<(), Failure> {
        let began = Instant::now();
        let mut said = false;
        while !try_lock(lock)? {
            if !said && began.elapsed() >= SILENCE {
                said = true;
                say_on_stderr(&format!(
                    "volume {}: waiting for its mount, which another `mojim run` starts, or which \
                     commits what it has and ends ({})",
                    self.volume,
                    place(&self.log())
                ));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Starts the mount's process and waits until it says that it is mounted.
    fn start(&self, settings: &Settings) -> Result<(), Failure> {
        let path = self.log();
        let log_at = |e: io::Error| Failure::from(e).at(&place(&path));
        let mut options = OpenOptions::new();
        let options = options.create(true).append(true).mode(0o600);
        let options = options.custom_flags(libc::O_NOFOLLOW);
        let log = options.open(&path).map_err(log_at)?;
        if log.metadata().map_err(log_at)?.len() > MOST_LOG {
            log.set_len(0).map_err(log_at)?;
        }
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["mount", "--while-used", "--config"])
            .arg(&self.config)
            .args(["--name", &self.node, "--volume", &self.volume])
            .args(settings.args())
            .arg(self.at())
            .env_remove("LD_PRELOAD")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        // SAFETY: between fork and exec three system calls are made; the process in the middle ends
        // without running anything of this one's.
        unsafe { command.pre_exec(apart) };
        let mut child = command.spawn()?;
        let out = child.stdout.take().expect("it is piped");
        child.wait()?; // the process in the middle
        let mut line = String::new();
        self.wait_for(&out)?;
        BufReader::new(out).read_line(&mut line)?;
        match serde_json::from_str(&line) {
            Ok(Begun::Mounted) => Ok(()),
            Ok(Begun::Failed { text, code }) => Err(Failure { code, text }),
            Err(_) => Err(Failure::failed(format!(
                "the process of volume {}'s mount ended; {} may say why",
                self.volume,
                place(&path)
            ))),
        }
    }

    /// Until there is something to read, or the end; no thread waits, since who enters a namespace
    /// may have one only.
    fn wait_for(&self, out: &ChildStdout) -> Result<(), Failure> {
        let second = rustix::time::Timespec {
            tv_sec: SILENCE.as_secs() as _,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(out, PollFlags::IN)];
        if let Ok(0) = poll(&mut fds, Some(&second)) {
            say_on_stderr(&format!(
                "volume {}: waiting until it is mounted ({})",
                self.volume,
                place(&self.log())
            ));
        }
        Ok(())
    }
}

/// What the mount's process says first, on its standard output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Begun {
    /// It is there.
    Mounted,
    /// It is not, and the process ends.
    Failed {
        /// Why.
        text: String,
        /// The process's exit code.
        code: u8,
    },
}

/// Puts the mount's process into a session of its own, as nobody's child: no terminal's signal is
/// for it, no shell's end, and no program waits for a process that it did not start.
fn apart() -> io::Result<()> {
    rustix::process::setsid()?;
    // SAFETY: the child runs on to its exec; its parent ends here.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(()),
        // SAFETY: ends the process without running anything more.
        _ => unsafe { libc::_exit(0) },
    }
}

fn place(path: &Path) -> String {
    path.display().to_string()
}

/// Whether the lock is taken now; it is let go of with the file.
fn try_lock(lock: &File) -> io::Result<bool> {
    use rustix::io::Errno;
    match flock(lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// What is at the mount's place.
enum Look {
    Bare,
    Mounted,
    /// A mount whose process died.
    Dead,
}

fn look(at: &Path) -> io::Result<Look> {
    match std::fs::metadata(at) {
        Ok(m) => {
            let above = std::fs::metadata(at.parent().unwrap_or(Path::new("/")))?;
            Ok(match m.dev() == above.dev() {
                true => Look::Bare,
                false => Look::Mounted,
            })
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Look::Bare),
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => Ok(Look::Dead),
        Err(e) => Err(e),
    }
}

/// Takes a dead mount away.
fn take_away(at: &Path) -> Result<(), Failure> {
    if unmount(at, UnmountFlags::DETACH).is_ok() {
        return Ok(());
    }
    let mut helper = Command::new("fusermount3");
    let done = helper.args(["-u", "-z"]).arg(at).status();
    match done {
        Ok(s) if s.success() => Ok(()),
        Ok(s) => Err(Failure::failed(format!(
            "fusermount3 -uz {}: {s}",
            place(at)
        ))),
        Err(e) => Err(Failure::failed(format!("fusermount3: {e}"))),
    }
}

/// The mount's own view of who uses it.
pub struct Users {
    lock: PathBuf,
    /// Its place and its file system's number, as in `mountinfo`.
    at: String,
    device: String,
    next: Instant,
}

impl Users {
    /// Of what is mounted at `at`, the place of a [`RunsMount`].
    pub fn of(at: &Path) -> io::Result<Users> {
        let device = std::fs::metadata(at)?.dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let dir = at.parent().unwrap_or(Path::new("/"));
        Ok(Users {
            lock: dir.join("lock"),
            at: escaped(at),
            device: format!("{major}:{minor}"),
            next: Instant::now(),
        })
    }

    /// The lock, if nobody uses the mount now, and so nobody will while the lock is held. Looks only
    /// as often as costs little.
    pub fn are_none(&mut self) -> io::Result<Option<File>> {
        let began = Instant::now();
        if began < self.next || self.are_some()? {
            self.next = self.next.max(began + began.elapsed() * LOOKS);
            return Ok(None);
        }
        let lock = OpenOptions::new().read(true).write(true).open(&self.lock)?;
        // Between the look and the lock somebody may have come.
        let free = try_lock(&lock)? && !self.are_some()?;
        Ok(free.then_some(lock))
    }

    /// Whether a process sees the mount anywhere but at its own place: as in the namespaces of
    /// programs, or where a person has bound it.
    fn are_some(&self) -> io::Result<bool> {
        let mut seen: HashSet<OsString> = HashSet::new();
        for entry in std::fs::read_dir("/proc")?.flatten() {
            if !entry.file_name().as_encoded_bytes()[0].is_ascii_digit() {
                continue;
            }
            // Of another user's process the namespace is not said; one that has ended meanwhile uses
            // nothing.
            if let Ok(namespace) = std::fs::read_link(entry.path().join("ns/mnt"))
                && !seen.insert(namespace.into_os_string())
            {
                continue;
            }
            let Ok(mounts) = std::fs::read_to_string(entry.path().join("mountinfo")) else {
                continue;
            };
            let mut all = mounts.lines().map(|l| l.split(' ').skip(2));
            if all.any(|mut l| {
                l.next() == Some(&self.device) && l.nth(1).is_some_and(|at| at != self.at)
            }) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A path as `mountinfo` has it.
fn escaped(path: &Path) -> String {
    let mut text = String::new();
    for c in path.to_string_lossy().chars() {
        match c {
            ' ' | '\t' | '\n' | '\\' => text += &format!("\\{:03o}", c as u32),
            c => text.push(c),
        }
    }
    text
}
