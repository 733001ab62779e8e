//! `mojim import` and `mojim export`: files and directories into a volume, and out of it.
//!
//! Owns what both have in common. Under `mojim run`, `cp -a` copies into a directory `.copy.*`.
//! Every file there is made durable, and only then each gets its name, by a renaming. So whoever
//! looks finds each whole, or not at all. But a volume does not rename a directory of many files:
//! `mv` copies these again, to their names, where every file has to be made durable once more.
//!
//! Invariants:
//! - The directory that gets the copies may be another user's, who renames what is in it meanwhile.
//!   It and `.copy.*` are opened once, without following a link, and everything goes through these
//!   descriptors. Nobody else can enter `.copy.*`.
//! - A file that comes out of a volume gives nobody rights, and is no device, unless that is asked
//!   for: a writer to the volume, on any node, chose its mode and its owner.

use std::collections::BTreeSet;
use std::hash::BuildHasher;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{self, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::{Errno, FdFlags};
use serde_json::json;

use crate::ask::load;
use crate::failure::{Done, Failure};

/// What [`Carry`] runs: the directory that gets the copies and its name for people, the directory of
/// copies and its name in that, `strip` or nothing, and the sources; or, of everything in a directory,
/// that with `/.` behind it. `cp` prints a line for each file.
const COPY: &str = r#"
set -eu
to=$1 at=$2 new=$3 name=$4 strip=$5; shift 5
check() {
    if [ -e "$to/${1##*/}" ] || [ -L "$to/${1##*/}" ]; then
        one=$(cd "$to" && ls -d -b -- "./${1##*/}")
        printf '%s\n' "mojim: $at/${one#./} is there already: remove it, or give it another name" >&2
        exit 1
    fi
}
name() {
    # It may be one of the devices that were left out.
    if [ -n "$strip" ] && [ ! -e "$new/${1##*/}" ] && [ ! -L "$new/${1##*/}" ]; then return; fi
    check "$1"
    one=$(stat -c %i -- "$new/${1##*/}")
    mv -T -n -- "$new/${1##*/}" "$to/${1##*/}"
    if [ "$(stat -c %i -- "$to/${1##*/}")" != "$one" ]; then
        find "$to/${1##*/}" -type f -exec sync -- {} +
    fi
}
each() {
    did=$1; shift
    case $1 in
    */.)
        for one in "$1"/* "$1"/.[!.]* "$1"/..?*; do
            case ${one##*/} in
            .copy.????????) ;;
            *) if [ -e "$one" ] || [ -L "$one" ]; then "$did" "$one"; fi ;;
            esac
        done ;;
    *) for one; do "$did" "$one"; done ;;
    esac
}
clear() {
    find "$new/" -mindepth 1 -delete
    rmdir -- "$to/$name"
}
trap clear EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
each check "$@"
cp -a -v -- "$@" "$new/"
rm -rf -- "$new"/.copy.????????
if [ -n "$strip" ]; then
    devices=$(find "$new/" \( -type b -o -type c \) -printf . -delete | wc -c)
    rights=$(find "$new/" -type f -perm /6000 -printf . -exec chmod ug-s -- {} + | wc -c)
    if [ "$devices" -gt 0 ] || [ "$rights" -gt 0 ]; then
        echo "mojim: left out: $devices devices, and the setuid and setgid bits of $rights files (--special keeps them)" >&2
    fi
fi
find "$new/" -type f -exec sync -- {} +
sync -- "$new"
each name "$@"
rmdir -- "$to/$name"
trap - EXIT
sync -- "$to"
"#;

/// More files cannot be renamed with their directory, in a volume.
const MOST: u64 = 1000;

/// How often the progress is shown, on a terminal.
const SHOWN: Duration = Duration::from_millis(500);

/// Copy files and directories into a volume.
///
/// Each file or directory gets its name in the volume when all of it is committed. After a
/// failure it is there as a whole, or not at all.
///
/// A directory of more than 1,000 files needs `--in-parts`, and twice the room during the copy.
/// It gets its name before it is complete. If the copy fails, remove the part that is there, and
/// begin again.
///
/// Stop programs that write to the source files first. A name that exists in the volume is an
/// error.
///
/// The copies keep modes, times, links and extended attributes. Root also keeps owners. A file
/// with an access control list is an error, because a volume has none.
///
/// The node must be the primary of the volume. With automatic failover, the command waits until
/// it is.
///
/// The volume is mounted for the copy, as by `mojim run`. Other programs under `mojim run` go on
/// meanwhile. If you kill the command, a directory `.copy.*` may stay. You can remove it.
#[derive(clap::Args)]
pub struct Import {
    #[command(flatten)]
    at: At,
    /// Allow directories of more than 1,000 files. After a failure, a part of one may be there.
    #[arg(long)]
    in_parts: bool,
    /// The files and directories to copy.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

/// Copy files and directories of a volume to a directory elsewhere.
///
/// Each copy gets its name when all of it is durable.
///
/// Setuid and setgid bits of files are dropped, and devices are left out. They were chosen by a
/// program that writes to the volume. `--special` keeps both.
///
/// The node must be the primary of the volume, as for `mojim import`.
#[derive(clap::Args)]
pub struct Export {
    #[command(flatten)]
    at: At,
    /// A path within the volume to copy [default: everything].
    #[arg(long = "path", value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Keep setuid and setgid bits, and devices.
    #[arg(long)]
    special: bool,
    /// The directory that gets the copies.
    #[arg(value_name = "DIRECTORY")]
    to: PathBuf,
}

#[derive(clap::Args)]
struct At {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The node on which the volume is mounted.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// The volume. You may leave it out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Import {
    /// Runs it.
    pub fn run(self) -> Done {
        let to = self.at.directory()?;
        let mut from = Vec::new();
        let mut all = Amount::default();
        for path in &self.paths {
            let why = |e| Failure::failed(format!("{}: {e}", path.display()));
            // Of a link the link is copied, so only what it lies in is resolved.
            let within = path.parent().filter(|p| !p.as_os_str().is_empty());
            let within = std::fs::canonicalize(within.unwrap_or(Path::new("."))).map_err(why)?;
            let name = path.file_name().ok_or_else(|| {
                Failure::usage(format!(
                    "{}: a path that ends with a name is needed",
                    path.display()
                ))
            })?;
            let path = within.join(name);
            if path.starts_with(&to) || to.starts_with(&path) {
                let text = format!(
                    "{}: it lies in the volume's directory, or the other way round",
                    path.display()
                );
                return Err(Failure::usage(text));
            }
            let amount = Amount::of(&path).map_err(why)?;
            if amount.files > MOST && !self.in_parts {
                return Err(Failure::usage(format!(
                    "{}: {} files; more than {MOST} cannot come as one: with --in-parts they come one by one",
                    path.display(),
                    amount.files
                )));
            }
            all.files += amount.files;
            all.bytes += amount.bytes;
            from.push(path);
        }
        self.at.copy(&from, &to, true, Some(all))
    }
}

impl Export {
    /// Runs it.
    pub fn run(self) -> Done {
        let volume = self.at.directory()?;
        let to = &self.to;
        let why = |e| Failure::failed(format!("{}: {e}", to.display()));
        let to = std::fs::canonicalize(to).map_err(why)?;
        if to.starts_with(&volume) {
            let text = format!("{}: it lies in the volume's directory", to.display());
            return Err(Failure::usage(text));
        }
        let mut from = vec![volume.join(".")];
        if !self.paths.is_empty() {
            let inside = self.paths.iter().map(|p| within(&volume, p));
            from = inside.collect::<Result<_, _>>()?;
        }
        self.at.copy(&from, &to, self.special, None)
    }
}

/// A path within the volume's directory, in full.
fn within(volume: &Path, path: &Path) -> Result<PathBuf, Failure> {
    let mut full = volume.to_owned();
    for part in path.components() {
        match part {
            Component::Normal(name) => full.push(name),
            Component::CurDir => {}
            // `..`, or from the root on: within no volume.
            _ => full = PathBuf::new(),
        }
    }
    match full.starts_with(volume) && full != volume {
        true => Ok(full),
        false => Err(Failure::usage(format!(
            "{}: the path of something within the volume is needed",
            path.display()
        ))),
    }
}

impl At {
    /// The volume's directory on the node.
    fn directory(&self) -> Result<PathBuf, Failure> {
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        let node = config.node(&self.name)?;
        let directory = mojim_replica::layout::data_dir(node, &volume.name);
        mojim_linux::trust::make(&directory)
            .map_err(|e| Failure::failed(format!("making {}: {e}", directory.display())))?;
        Ok(std::fs::canonicalize(directory)?)
    }

    /// Copies, under `mojim run`. `special`: also what gives rights.
    fn copy(&self, from: &[PathBuf], to: &Path, special: bool, all: Option<Amount>) -> Done {
        let names: BTreeSet<_> = from.iter().filter_map(|p| p.file_name()).collect();
        if names.len() < from.len() {
            let text = "two of the paths end with the same name";
            return Err(Failure::usage(text));
        }
        let mojim = std::env::current_exe()?;
        let mut command = Command::new(&mojim);
        command.args(["run", "--config"]).arg(&self.config);
        command.args(["--name", &self.name]);
        if let Some(volume) = &self.volume {
            command.args(["--volume", volume]);
        }
        command.arg("--").arg(&mojim).arg("__carry");
        command.args(special.then_some("--special"));
        command.arg("--").arg(to).args(from);
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut progress = Progress::new(all);
        for line in lines.split(b'\n') {
            line?;
            progress.one_more();
        }
        progress.end();
        let status = child.wait()?;
        if !status.success() {
            // It has said why.
            let code = status
                .code()
                .and_then(|c| u8::try_from(c).ok())
                .unwrap_or(1);
            return Ok(if code == 0 { 1 } else { code });
        }
        self.tell(progress.copied, to)?;
        Ok(0)
    }

    fn tell(&self, copied: u64, to: &Path) -> std::io::Result<()> {
        let mut out = std::io::stdout();
        match self.json {
            true => writeln!(
                out,
                "{}",
                json!({"copied": copied, "to": to.display().to_string()})
            ),
            false => writeln!(
                out,
                "copied {copied} files and directories to {}",
                to.display()
            ),
        }
    }
}

/// Copies within a mount of the volume, and ends as the copying does.
#[derive(clap::Args)]
pub struct Carry {
    /// Setuid and setgid bits, and devices, too.
    #[arg(long)]
    special: bool,
    /// The directory that gets the copies, without a link on the way.
    to: PathBuf,
    /// What is copied.
    from: Vec<PathBuf>,
}

impl Carry {
    /// Runs it; returns only if it cannot begin.
    pub fn run(self) -> Done {
        let at = |e: Errno| Failure::failed(format!("{}: {e}", self.to.display()));
        // It was resolved before: a link on the way is there since.
        let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let to = fs::openat2(CWD, &self.to, how, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        let to = to.map_err(at)?;
        let (name, new) = private_in(&to).map_err(at)?;
        // Without CLOEXEC: the programs that the shell starts have them, too.
        let kept = |fd: &OwnedFd| -> Result<String, Failure> {
            let kept = rustix::io::fcntl_dupfd_cloexec(fd, KEPT).map_err(at)?;
            rustix::io::fcntl_setfd(&kept, FdFlags::empty()).map_err(at)?;
            Ok(format!("/proc/self/fd/{}", kept.into_raw_fd()))
        };
        let mut sh = Command::new("sh");
        sh.args(["-c", COPY, "mojim", &kept(&to)?]).arg(&self.to);
        sh.args([&kept(&new)?, &name]);
        sh.arg(if self.special { "" } else { "strip" });
        Err(sh.args(&self.from).exec().into())
    }
}

/// From here on are the descriptors that the shell gets: its own are below.
const KEPT: RawFd = 100;

/// Makes a directory in `to` that nobody else can enter. Its name, and itself: whatever has the name
/// later.
fn private_in(to: &OwnedFd) -> Result<(String, OwnedFd), Errno> {
    let random = std::hash::RandomState::new().hash_one(std::process::id());
    let name = format!(".copy.{:08x}", random as u32);
    fs::mkdirat(to, &name, Mode::RWXU)?;
    let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let new = fs::openat(to, &name, how, Mode::empty())?;
    // Who may write to `to` may have put another one there.
    let found = fs::fstat(&new)?;
    let ours = found.st_uid == rustix::process::geteuid().as_raw();
    match ours && found.st_mode & 0o7777 & !libc::S_ISGID == 0o700 {
        true => Ok((name, new)),
        false => Err(Errno::PERM),
    }
}

/// How much is to be copied.
#[derive(Debug, Default, Clone, Copy)]
struct Amount {
    /// Of whatever kind, but directories.
    files: u64,
    bytes: u64,
}

impl Amount {
    fn of(path: &Path) -> std::io::Result<Amount> {
        let mut all = Amount::default();
        let mut left = vec![path.to_owned()];
        while let Some(path) = left.pop() {
            let meta = std::fs::symlink_metadata(&path)?;
            match meta.is_dir() {
                true => {
                    for entry in std::fs::read_dir(&path)? {
                        left.push(entry?.path());
                    }
                }
                false => all.files += 1,
            }
            if meta.is_file() {
                all.bytes += meta.size();
            }
        }
        Ok(all)
    }
}

/// What is shown meanwhile, if standard error is a terminal.
struct Progress {
    all: Option<Amount>,
    copied: u64,
    shown: Option<Instant>,
    is_terminal: bool,
}

impl Progress {
    fn new(all: Option<Amount>) -> Progress {
        Progress {
            all,
            copied: 0,
            shown: None,
            is_terminal: std::io::stderr().is_terminal(),
        }
    }

    fn one_more(&mut self) {
        self.copied += 1;
        let now = Instant::now();
        if !self.is_terminal || self.shown.is_some_and(|at| now < at + SHOWN) {
            return;
        }
        self.shown = Some(now);
        let of = self.all.map_or_else(String::new, |a| {
            format!(" of {} files, {} MiB", a.files, a.bytes >> 20)
        });
        let _ = write!(std::io::stderr(), "\r{}{of}", self.copied);
    }

    fn end(&self) {
        if self.shown.is_some() {
            let _ = writeln!(std::io::stderr());
        }
    }
}
