//! The mount that all programs under `mojim run` on a node have in common, for each volume.
//!
//! Owns its place below the node's own state, its start, and what a program needs to know of it.
//! Its process is `mojim mount` (`mount_lifetime.rs`), started by the first `mojim run` that
//! needs it. The process belongs to no program, and no program's end takes it along.
//!
//! The place has:
//!
//! - `at`, where it is mounted
//! - `lock`
//! - `serving`, which its process has locked while it lives
//! - `log`, what that process says
//! - `failed`, what the last one could not commit, or of what it died
//!
//! A second process watches the first (`guard.rs`).
//!
//! Invariants:
//!
//! - Only the holder of the lock looks at a mount, starts and joins it. The mount's process
//!   leaves it when nobody uses it, and holds the lock for that too.
//! - After joining a mount, the holder checks that it was still there ([`MountLease::device`]).
//!   The mount may also be taken away without the lock.
//! - Nothing here asks the mount's process for anything but by the file `serving`, since that
//!   process may stand still.
//! - The lock's file says with which [`Settings`] the mount runs, and the name of this run of it.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mojim_config::{Node, Volume};
use mojim_linux::trust;
use mojim_replica::layout;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, FlockOperation, StatxFlags, flock, statx};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, say_on_stderr};
use crate::interval::{Interval, interval};
use crate::run_note;

/// How long a wait goes on before a person is told of it.
const SILENCE: Duration = Duration::from_secs(1);
/// The pause between two looks at what another process has to do.
const PAUSE: Duration = Duration::from_millis(20);
/// For how many looks, 8 s and more, a mount is waited for whose process lives, and which is not there, or
/// which is to end. Not by the clock: the mount's process stands still when the machine does.
const ELSEWHERE: u32 = 400;
/// The pause between two looks whether the process is ready.
const STEP: Duration = Duration::from_millis(2);
/// In front of the name of a run of the mount, on its command line and in the lock's file.
const ID: &str = "--run-id=";
/// Bytes of the lock's file, so that no settings need more room on a full disk.
const NOTE: usize = 256;
/// A log that is larger is begun anew by the next mount.
const MOST_LOG: u64 = 1 << 20;

/// The exit code of a mount that may succeed later.
pub const LATER: u8 = 75;

/// What `mojim run` may say of the mount, as on the command line of `mojim mount`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
pub struct Settings {
    /// How much one fsync commits: the "file", or all changes in the "volume" [default: file].
    #[arg(long, value_name = "WHAT", value_parser = ["file", "volume"])]
    pub atomic: Option<String>,
    /// Seconds after which a change is committed that no program has synced, or "never" [default:
    /// 5]. See `mojim mount --help`.
    #[arg(long, value_name = "SECONDS", value_parser = commit_interval)]
    pub commit_interval: Option<String>,
    /// How the kernel's requests arrive: "auto", "on" (io_uring) or "off" [default: auto]. See
    /// `mojim mount --help`.
    #[arg(long, value_name = "WHEN", value_parser = ["auto", "on", "off"])]
    pub uring: Option<String>,
}

/// In one form, so that equal ones look alike.
fn commit_interval(text: &str) -> Result<String, String> {
    Ok(match interval(text)? {
        Interval(Some(time)) => time.as_secs_f64().to_string(),
        Interval(None) => "never".into(),
    })
}

impl Settings {
    /// Words for `mojim mount`.
    fn args(&self) -> [String; 3] {
        [
            format!("--atomic={}", self.atomic.as_deref().unwrap_or("file")),
            format!(
                "--commit-interval={}",
                self.commit_interval.as_deref().unwrap_or("5")
            ),
            format!("--uring={}", self.uring.as_deref().unwrap_or("auto")),
        ]
    }

    /// Whether who asks for these can use a mount with `words`.
    fn go_with(&self, words: &[String]) -> bool {
        let asked = [&self.atomic, &self.commit_interval, &self.uring].map(Option::is_some);
        let mut all = self.args().into_iter().zip(asked);
        words.is_empty() || all.all(|(word, asked)| !asked || words.contains(&word))
    }
}

/// The mount's place on a node.
pub struct RunsMount {
    config: PathBuf,
    node: String,
    volume: String,
    dir: PathBuf,
}

/// While this lives, the mount does not end for want of users.
pub struct MountLease {
    _lock: File,
    /// The number of the mount's file system, by which a program's namespace checks that it has it.
    pub device: Device,
    /// That of this run of the mount; none has it again.
    pub id: String,
}

/// The number of a file system, major and minor.
pub type Device = (u32, u32);

/// What waits, for so long: whether it is to be given up.
pub type Pause<'a> = dyn FnMut(Duration) -> bool + 'a;

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
    /// What the mount's process says, with its exit code; that it runs with other settings;
    /// [`GIVEN_UP`] if `pause` says so.
    pub fn ensure(&self, settings: &Settings, pause: &mut Pause) -> Result<MountLease, Failure> {
        let at = self.at();
        let of_at = |e: io::Error| Failure::from(e).at(&place(&at));
        trust::make(&self.dir).map_err(|e| Failure::from(e).at(&place(&self.dir)))?;
        let mut lock = self.lock()?;
        self.wait_for_lock(&lock, pause)?;
        let mut looks = 0;
        let (mounted, serving) = loop {
            let serving = self.is_serving().map_err(of_at)?;
            let mounted = self.mounted().map_err(of_at)?;
            // It may be about to be mounted, for a `mojim run` that has ended, or be ending.
            if mounted.is_some() || !serving {
                break (mounted, serving);
            }
            looks += 1;
            if looks > ELSEWHERE {
                return Err(Failure {
                    code: LATER,
                    text: format!(
                        "volume {} is mounted for programs under `mojim run`. Their mount is in another mount namespace, as of a service with PrivateTmp, or it does not end: {}",
                        self.volume,
                        place(&self.log())
                    ),
                });
            }
            if pause(PAUSE) {
                return Err(given_up());
            }
        };
        if let (Some(device), true) = (mounted, serving) {
            let mut text = String::new();
            lock.read_to_string(&mut text)?;
            let mut words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            let id = words.iter().position(|w| w.starts_with(ID));
            let id = id.map(|i| words.remove(i)[ID.len()..].to_owned());
            if !settings.go_with(&words) {
                return Err(Failure::usage(format!(
                    "volume {} is mounted already, for programs under `mojim run`, with {}: give the \
                     same, or end them first",
                    self.volume,
                    words.join(" ")
                )));
            }
            return Ok(MountLease {
                _lock: lock,
                device,
                id: id.unwrap_or_default(),
            });
        }
        if mounted.is_some() {
            take_away(&at)?;
        }
        self.say_what_failed();
        trust::make(&at).map_err(of_at)?;
        // Before it starts: it may be there, and this process end before it hears so. What cannot
        // be written is no reason not to start.
        let id = format!("{:016x}", RandomState::new().hash_one(0));
        let note = settings.args().join(" ") + " " + ID + &id;
        let _ = lock.write_all_at(format!("{note:NOTE$}").as_bytes(), 0);
        self.start(settings, &id, pause)?;
        match self.mounted().map_err(of_at)? {
            Some(device) => Ok(MountLease {
                _lock: lock,
                device,
                id,
            }),
            None => Err(Failure {
                code: LATER,
                text: format!("{} was unmounted at once by somebody else", place(&at)),
            }),
        }
    }

    /// Waits until the mount has ended that nobody uses any more: a process of the volume's own needs
    /// the node's copy. While what it returns lives, none begins.
    ///
    /// # Errors
    /// Programs use it; [`GIVEN_UP`] if `pause` says so.
    pub fn await_end(&self, pause: &mut Pause) -> Result<MountLease, Failure> {
        let of_dir = |e: io::Error| Failure::from(e).at(&place(&self.dir));
        trust::make(&self.dir).map_err(of_dir)?;
        let lock = self.lock()?;
        self.wait_for_lock(&lock, pause)?;
        let (began, mut said, mut looks) = (Instant::now(), false, 0);
        while self.is_serving().map_err(of_dir)? {
            let text = || {
                format!(
                    "volume {} is mounted for other programs under `mojim run`, or that mount still commits their stores ({}). Wait until it has ended, or run this program over the mount too (--mount)",
                    self.volume,
                    place(&self.log())
                )
            };
            looks += 1;
            if looks > ELSEWHERE {
                return Err(Failure {
                    code: LATER,
                    text: text(),
                });
            }
            if began.elapsed() >= SILENCE && !std::mem::replace(&mut said, true) {
                say_on_stderr(&format!("waiting: {}", text()));
            }
            // Its process looks at the lock when it ends for want of users.
            let _ = flock(&lock, FlockOperation::Unlock);
            let given = pause(PAUSE);
            self.wait_for_lock(&lock, pause)?;
            if given {
                return Err(given_up());
            }
        }
        self.say_what_failed();
        Ok(MountLease {
            _lock: lock,
            device: (0, 0),
            id: String::new(),
        })
    }

    /// The number of what is mounted at the place, if anything is.
    fn mounted(&self) -> io::Result<Option<Device>> {
        let device = match device_of(&self.at()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            // Nothing answers there any more.
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => return Ok(Some((0, 0))),
            device => device?,
        };
        Ok((device != device_of(&self.dir)?).then_some(device))
    }

    /// Whether the mount's process lives.
    fn is_serving(&self) -> io::Result<bool> {
        let path = self.dir.join("serving");
        match open_own(&path, false) {
            Ok(file) => Ok(!try_lock(&file)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// What the last mount could not commit was told to nobody.
    fn say_what_failed(&self) {
        if let Some(text) = self.failed() {
            say_on_stderr(&format!(
                "volume {}: some changes of earlier programs were not committed when the last program ended: {text}",
                self.volume
            ));
            run_note::clear(&self.dir);
        }
    }

    /// What the last mount could not commit, or of what it died.
    pub fn failed(&self) -> Option<String> {
        run_note::read(&self.dir)
    }

    fn lock(&self) -> Result<File, Failure> {
        let path = self.dir.join("lock");
        open_own(&path, true).map_err(|e| Failure::from(e).at(&place(&path)))
    }

    fn wait_for_lock(&self, lock: &File, pause: &mut Pause) -> Result<(), Failure> {
        let began = Instant::now();
        let mut said = false;
        while !try_lock(lock)? {
            if !said && began.elapsed() >= SILENCE {
                said = true;
                say_on_stderr(&format!(
                    "volume {}: waiting for its mount. Another `mojim run` starts it, or it ends and waits for processes with open files there ({})",
                    self.volume,
                    place(&self.log())
                ));
            }
            if pause(PAUSE) {
                return Err(given_up());
            }
        }
        Ok(())
    }

    /// Starts the mount's process and waits until it says that it is mounted.
    fn start(&self, settings: &Settings, id: &str, pause: &mut Pause) -> Result<(), Failure> {
        let path = self.log();
        let log_at = |e: io::Error| Failure::from(e).at(&place(&path));
        let mut options = OpenOptions::new();
        let options = options.create(true).append(true).mode(0o600);
        let options = options.custom_flags(libc::O_NOFOLLOW);
        let log = options.open(&path).map_err(log_at)?;
        run_note::keep_room(&self.dir);
        let exe = std::env::current_exe()?;
        if log.metadata().map_err(log_at)?.len() > MOST_LOG {
            log.set_len(0).map_err(log_at)?;
        }
        let mut command = Command::new(&exe);
        command
            .args(["mount", "--while-used", "--config"])
            .arg(&self.config)
            .args(["--name", &self.node, "--volume", &self.volume])
            .args(settings.args())
            .arg(format!("{ID}{id}"))
            .arg(self.at())
            .env_remove("LD_PRELOAD")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        // SAFETY: between fork and exec system calls are made only; the process in the middle ends
        // without running anything of this one's.
        unsafe { command.pre_exec(apart) };
        let child = command.spawn();
        let mut child = child.map_err(|e| Failure::from(e).at(&place(&exe)))?;
        let out = child.stdout.take().expect("it is piped");
        // The process in the middle; where nobody waits for children, there is none.
        let _ = child.wait();
        let mut out = BufReader::new(out);
        let mut said = false;
        loop {
            if out.buffer().is_empty() {
                self.wait_for(out.get_ref(), &mut said, pause)?;
            }
            let mut line = String::new();
            out.read_line(&mut line)?;
            match serde_json::from_str(&line) {
                Ok(Begun::Waits { text }) => {
                    said = true;
                    say_on_stderr(&format!("volume {}: waiting: {text}", self.volume));
                }
                Ok(Begun::Mounted) => return Ok(()),
                Ok(Begun::Failed { text, code }) => return Err(Failure { code, text }),
                Err(_) => {
                    return Err(Failure::failed(format!(
                        "the process of volume {}'s mount ended; {} may say why",
                        self.volume,
                        place(&path)
                    )));
                }
            }
        }
    }

    /// Until there is something to read, or the end; no thread waits, since who enters a namespace
    /// may have one only.
    /// Says once that it waits.
    fn wait_for(
        &self,
        out: &ChildStdout,
        said: &mut bool,
        pause: &mut Pause,
    ) -> Result<(), Failure> {
        let (began, now) = (Instant::now(), rustix::time::Timespec::default());
        loop {
            let mut fds = [PollFd::new(out, PollFlags::IN)];
            if !matches!(poll(&mut fds, Some(&now)), Ok(0)) {
                return Ok(());
            }
            if !*said && began.elapsed() >= SILENCE {
                *said = true;
                say_on_stderr(&format!(
                    "volume {}: waiting until it is mounted ({})",
                    self.volume,
                    place(&self.log())
                ));
            }
            if pause(STEP) {
                return Err(given_up());
            }
        }
    }
}

/// The exit code of a wait that was given up: who waited knows why.
pub const GIVEN_UP: u8 = 130;

fn given_up() -> Failure {
    Failure {
        code: GIVEN_UP,
        text: String::new(),
    }
}

/// What the mount's process says first, on its standard output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Begun {
    /// It is not there yet.
    Waits {
        /// What it waits for.
        text: String,
    },
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

/// Puts the mount's process into a session of its own, as nobody's child, with nothing of this
/// process's open: no terminal's signal is for it, no shell's end, and no program waits for a
/// process that it did not start.
fn apart() -> io::Result<()> {
    rustix::process::setsid()?;
    // SAFETY: system calls that change this process's own descriptors and dispositions; those
    // that `exec` needs are not closed before it.
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
    }
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
pub fn try_lock(lock: &File) -> io::Result<bool> {
    match flock(lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// A file of the place, which nobody else could have made.
pub fn open_own(path: &Path, make: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(make).truncate(false);
    options
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

/// The file system that `path` is of, without a question to its server.
pub fn device_of(path: &Path) -> io::Result<Device> {
    let s = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    Ok((s.stx_dev_major, s.stx_dev_minor))
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
