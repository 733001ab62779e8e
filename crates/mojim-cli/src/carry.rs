//! `mojim import` and `mojim export`: files and directories into a volume, and out of it.
//!
//! Owns what both have in common: under `mojim run`, `cp -a` copies into a directory without a
//! name that anybody looks for, what it copied is made durable, and only then gets its names, all
//! of them together. So whoever looks finds each file or directory whole, or not at all.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::ask::load;
use crate::failure::{Done, Failure};

/// What runs under `mojim run`: the copy's directory, how it is made durable, the sources. `cp`
/// prints a line for each file.
const COPY: &str = r#"
set -eu
to=$1 how=$2; shift 2
for from; do
    if [ -e "$to/${from##*/}" ] || [ -L "$to/${from##*/}" ]; then
        echo "mojim: $to/${from##*/} is there already: remove it, or give it another name" >&2
        exit 1
    fi
done
new=$(mktemp -d "$to/.copy.XXXXXXXX")
trap 'rm -rf -- "$new"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
cp -a -v -- "$@" "$new/"
$how -- "$new"
for from; do
    mv -T -n -- "$new/${from##*/}" "$to/${from##*/}"
done
rmdir -- "$new"
trap - EXIT
sync -- "$to"
"#;

/// Of everything in the last argument, the names are known under `mojim run` only.
const EVERYTHING: &str = r#"
all=$3
set -- "$1" "$2"
for from in "$all"/* "$all"/.[!.]* "$all"/..?*; do
    if [ -e "$from" ] || [ -L "$from" ]; then
        set -- "$@" "$from"
    fi
done
[ $# -gt 2 ] || exit 0
"#;

/// How often the progress is shown, on a terminal.
const SHOWN: Duration = Duration::from_millis(500);

/// Copy files and directories into a volume.
///
/// They get their names in the volume's directory, with owners, modes, times, extended attributes and
/// links, by one sync point: after any failure each is there whole, or not at all. Stop the programs that
/// write to them before. What has the name already is an error. The node must be the volume's primary,
/// or become it; the volume is mounted for the time, as by `mojim run`, and other programs under
/// `mojim run` may go on meanwhile. After a crash a directory `.copy.*` may be left, which can be removed.
#[derive(clap::Args)]
pub struct Import {
    #[command(flatten)]
    at: At,
    /// What is copied.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

/// Copy files and directories of a volume to a directory elsewhere.
///
/// As `mojim import`, the other way round. The copies are made durable before they get their names.
#[derive(clap::Args)]
pub struct Export {
    #[command(flatten)]
    at: At,
    /// What is copied: paths within the volume. Without, everything.
    #[arg(long = "path", value_name = "PATH")]
    paths: Vec<PathBuf>,
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
    /// The volume; may be left out if there is only one.
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
            all.add(&path).map_err(why)?;
            from.push(path);
        }
        self.at.copy(&from, &to, "sync", Some(all))
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
        let outside = |p: &&PathBuf| {
            p.is_absolute() || p.components().any(|c| c == std::path::Component::ParentDir)
        };
        if let Some(path) = self.paths.iter().find(outside) {
            let text = format!("{}: a path within the volume is needed", path.display());
            return Err(Failure::usage(text));
        }
        let from: Vec<PathBuf> = self.paths.iter().map(|p| volume.join(p)).collect();
        self.at.copy(&from, &to, "sync -f", None)
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

    /// Copies, under `mojim run`; the copy is durable after the command `how` on it.
    fn copy(&self, from: &[PathBuf], to: &Path, how: &str, all: Option<Amount>) -> Done {
        let names: BTreeSet<_> = from.iter().filter_map(|p| p.file_name()).collect();
        if names.len() < from.len() {
            return Err(Failure::usage(
                "two of the paths end with the same name".to_owned(),
            ));
        }
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["run", "--config"]).arg(&self.config);
        command.args(["--name", &self.name]);
        if let Some(volume) = &self.volume {
            command.args(["--volume", volume]);
        }
        let (script, last) = match from {
            [] => (format!("{EVERYTHING}{COPY}"), vec![self.directory()?]),
            from => (COPY.to_owned(), from.to_vec()),
        };
        command.args(["--", "sh", "-c", &script, "mojim"]);
        command.arg(to).arg(how).args(last);
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
            true => writeln!(out, "{}", json!({"copied": copied, "to": to})),
            false => writeln!(
                out,
                "copied {copied} files and directories to {}",
                to.display()
            ),
        }
    }
}

/// How much is to be copied.
#[derive(Debug, Default, Clone, Copy)]
struct Amount {
    entries: u64,
    bytes: u64,
}

impl Amount {
    fn add(&mut self, path: &Path) -> std::io::Result<()> {
        let mut left = vec![path.to_owned()];
        while let Some(path) = left.pop() {
            let meta = std::fs::symlink_metadata(&path)?;
            self.entries += 1;
            if meta.is_file() {
                self.bytes += meta.size();
            }
            if meta.is_dir() {
                for entry in std::fs::read_dir(&path)? {
                    left.push(entry?.path());
                }
            }
        }
        Ok(())
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
            format!(" of {}, {} MiB in all", a.entries, a.bytes >> 20)
        });
        let _ = write!(std::io::stderr(), "\r{}{of}", self.copied);
    }

    fn end(&self) {
        if self.shown.is_some() {
            let _ = writeln!(std::io::stderr());
        }
    }
}
