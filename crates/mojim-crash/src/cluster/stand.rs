//! A cluster after its failures: disks in a possible state, daemons, an operator who acts
//! as the guarantees say, and a program that attaches.
//!
//! Owns the order in which they come back. The shipped engine recovers, in this process:
//! there is a [`Daemon`] for each node that is back, and a volume that is attached as the
//! program would attach it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mojim::{MapFlags, Volume};
use mojim_config::Config;
use mojim_env::{Address, Env};
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::layout;
use mojim_replica::request::Request;

use super::names::Entries;
use super::parts::{Daemon, Made, OURS};
use super::program::PART;
use super::setup::{DATA, FILE, NODES, Places, Setup, file_of};
use super::shown;
use crate::Result;
use crate::blocks::Piece;
use crate::machine::Fault;
use crate::sys::{Lab, Loop, Mounted};

/// Milliseconds after which a node counts as failed in a cluster that is recovered.
const LIMIT: u64 = 2400;
/// How long an operator waits for an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a program tries to attach while the register may still come to name its node.
const VIEWS_PATIENCE: Duration = Duration::from_secs(12);
/// How long an operator tries to promote: much longer than the delays that may prevent
/// it.
const PATIENCE: Duration = Duration::from_secs(60);

/// What comes back of a node.
pub enum Back<'a> {
    /// Nothing.
    Gone,
    /// Only its name, with a disk that no node has used.
    Empty,
    /// What its device had flushed, and what else reached the medium.
    Power(&'a [u8], Vec<Piece>),
    /// Its whole disk, and the files of its memory.
    Kept(&'a [u8], &'a [(PathBuf, Vec<u8>)]),
}

/// What is done when the nodes are back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The node on which the program attaches without an operator's word.
    pub attach: Option<usize>,
    /// The node that is promoted if this attach was refused.
    pub promote: usize,
}

/// The outcome of a state.
#[derive(Debug)]
pub enum Outcome {
    /// The region was read.
    Found {
        /// The region's bytes.
        bytes: Vec<u8>,
        /// Whether an operator's word was needed.
        by_hand: bool,
        /// What a mount of it shows, if it was mounted; or why it does not, or that it is not
        /// what the volume has, or that the volume has lost a file of some.
        shown: Option<std::result::Result<Entries, String>>,
    },
    /// No node serves the volume; the reason.
    Refused(String),
    /// A file system did not mount.
    Unmountable,
}

/// The disks on which states are recovered.
pub struct Stand {
    images: Vec<(File, Loop)>,
    /// Where the cluster was: a log refers to the paths of its configuration.
    places: Places,
    pristine: Vec<u8>,
    exe: PathBuf,
    lives: u64,
}

impl Stand {
    /// Makes the disks, for clusters that lived at these places.
    pub fn new(lab: &Lab, places: Places, pristine: &[u8], exe: &Path) -> Result<Stand> {
        let image = |node: &&str| -> Result<_> {
            let path = lab.path(&format!("image.{node}"));
            File::create(&path)?.set_len(pristine.len() as u64)?;
            let file = OpenOptions::new().write(true).open(&path)?;
            Ok((file, Loop::new(&path)?))
        };
        Ok(Stand {
            images: NODES.iter().map(image).collect::<Result<_>>()?,
            places,
            pristine: pristine.to_vec(),
            exe: exe.to_owned(),
            lives: 0,
        })
    }

    fn mount(&self, node: usize, back: &Back<'_>) -> Result<Option<Mounted>> {
        let (image, disk) = &self.images[node];
        match back {
            Back::Gone => return Ok(None),
            Back::Empty => image.write_all_at(&self.pristine, 0)?,
            Back::Power(medium, pieces) => {
                image.write_all_at(medium, 0)?;
                for (at, bytes) in pieces {
                    image.write_all_at(bytes, *at)?;
                }
            }
            Back::Kept(medium, _) => image.write_all_at(medium, 0)?,
        }
        disk.forget()?;
        let at = self.places.disk(NODES[node]);
        Ok(Mounted::new("ext4", disk.path(), &at).ok())
    }

    /// Lets the nodes come back and the program attach. Returns also what was logged.
    pub fn recover(
        &mut self,
        setup: &Setup,
        back: &[Back<'_>],
        plan: Plan,
        fault: Option<Fault>,
    ) -> Result<(Outcome, String)> {
        self.lives += 1;
        let config = setup.config(&self.places, LIMIT)?;
        let mut mounts = Vec::new();
        for (i, b) in back.iter().enumerate() {
            let mounted = self.mount(i, b)?;
            if mounted.is_none() && !matches!(b, Back::Gone) {
                return Ok((Outcome::Unmountable, String::new()));
            }
            mounts.extend(mounted);
            let node = NODES[i];
            if let Back::Gone = b {
                continue;
            }
            std::fs::create_dir_all(self.places.directory(node))?;
            let ring = self.places.ring(node);
            let _ = std::fs::remove_dir_all(&ring);
            std::fs::create_dir_all(&ring)?;
            if let Back::Kept(_, files) = b {
                restore(&ring, files)?;
            }
        }
        let said = Arc::new(Mutex::new(String::new()));
        let cluster = Cluster {
            config: &config,
            setup,
            places: &self.places,
            exe: &self.exe,
            back,
            fault,
            said: said.clone(),
            daemons: HashMap::new(),
        };
        let outcome = cluster.go(plan);
        for m in mounts {
            m.unmount()?;
        }
        let said = std::mem::take(&mut *said.lock().expect("no thread panics"));
        Ok((outcome?, said))
    }
}

/// Restores the files of a node's memory.
fn restore(ring: &Path, files: &[(PathBuf, Vec<u8>)]) -> Result<()> {
    for (path, bytes) in files {
        let path = ring.join(path);
        std::fs::create_dir_all(path.parent().expect("a directory"))?;
        std::fs::write(path, bytes)?;
    }
    Ok(())
}

/// The sink of the daemons' log lines.
struct Lines(Arc<Mutex<String>>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut said = self.0.lock().expect("no thread panics");
        said.push_str(&String::from_utf8_lossy(line));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a volume has.
struct Contents {
    /// The region, or the files of all threads; nothing before everything is set up.
    bytes: Vec<u8>,
    /// Its catalogue.
    files: Vec<(String, u64)>,
}

/// Whether the volume has the files of the first threads and no others, as before the last thread's
/// file is there: what is missing then was not lost from among other things.
fn is_being_set_up(files: &[(String, u64)]) -> std::result::Result<(), String> {
    let there = files.iter().filter(|(n, _)| !n.starts_with(".mount/"));
    let mut there: Vec<_> = there.collect();
    there.sort_unstable();
    for (thread, (name, size)) in there.into_iter().enumerate() {
        if *name != file_of(thread) || *size != PART as u64 {
            return Err(format!("a thread's file is not as it was made: {files:?}"));
        }
    }
    Ok(())
}

struct Cluster<'a> {
    config: &'a Config,
    setup: &'a Setup,
    places: &'a Places,
    /// The command `mojim-crash`.
    exe: &'a Path,
    back: &'a [Back<'a>],
    fault: Option<Fault>,
    said: Arc<Mutex<String>>,
    daemons: HashMap<usize, Daemon>,
}

impl Cluster<'_> {
    fn say(&self, what: &str) {
        let mut said = self.said.lock().expect("no thread panics");
        said.push_str(what);
        said.push('\n');
    }

    fn made(&self, node: usize) -> Made {
        Made {
            boot: match self.back[node] {
                Back::Kept(..) => 0,
                _ => 0xf0 + node as u8,
            },
            fault: self.fault,
        }
    }

    fn start(&mut self, node: usize) -> Result<()> {
        if matches!(self.back[node], Back::Gone) || self.daemons.contains_key(&node) {
            return Ok(());
        }
        let said = self.said.clone();
        let lines = tracing_subscriber::fmt()
            .with_target(false)
            .with_ansi(false)
            .with_env_filter(OURS)
            .with_writer(move || Lines(said.clone()))
            .finish();
        let daemon = tracing::subscriber::with_default(lines, || {
            Daemon::start(self.config, NODES[node], self.made(node))
        })?;
        self.daemons.insert(node, daemon);
        Ok(())
    }

    fn go(mut self, plan: Plan) -> Result<Outcome> {
        let nodes = if self.setup.register {
            NODES.len()
        } else {
            DATA
        };
        for node in 0..nodes {
            // Without a register the daemon beside the program is not needed.
            if self.setup.register || Some(node) != plan.attach {
                self.start(node)?;
            }
        }
        let mut why = String::new();
        let begun = Instant::now();
        // A refused attach is tried again: the reason for the refusal must still be
        // known. It waits for the register once only.
        for node in plan.attach.into_iter().chain(plan.attach) {
            match self.attach(node, begun) {
                Ok(volume) => return Ok(self.found(node, volume, false)),
                Err(e) => why = e,
            }
            self.say(&format!("without a word: {why}"));
        }
        self.start(plan.promote)?;
        if let Err(e) = self.promote(plan.promote) {
            return Ok(Outcome::Refused(format!("{why}; {e}")));
        }
        Ok(match self.attach(plan.promote, Instant::now()) {
            Ok(volume) => self.found(plan.promote, volume, true),
            Err(e) => Outcome::Refused(format!("{why}; after a promotion: {e}")),
        })
    }

    /// What was read; of a volume that was mounted, with what a mount shows of it.
    fn found(&self, node: usize, volume: Contents, by_hand: bool) -> Outcome {
        let is_set_up = !volume.bytes.is_empty();
        let shown = match self.setup.mounted {
            false => None,
            true if is_set_up => Some(self.shows(node, &volume.files)),
            true => is_being_set_up(&volume.files).err().map(Err),
        };
        Outcome::Found {
            shown,
            bytes: volume.bytes,
            by_hand,
        }
    }

    /// Attaches, and reads the whole region. `begun`: since when this is tried.
    fn attach(&self, node: usize, begun: Instant) -> std::result::Result<Contents, String> {
        loop {
            let tried = catch_unwind(AssertUnwindSafe(|| self.attach_once(node)));
            let Ok(tried) = tried else {
                return Err(format!("{}: the program panicked", NODES[node]));
            };
            match tried {
                Ok(volume) => return Ok(volume),
                // The register may still change.
                Err(e) => {
                    let waits = self.setup.register
                        && begun.elapsed() < VIEWS_PATIENCE
                        && matches!(e, mojim::Error::Timeout(_) | mojim::Error::Stale(_));
                    if !waits {
                        return Err(format!("{}: {e}", NODES[node]));
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn attach_once(&self, node: usize) -> mojim::Result<Contents> {
        let name = NODES[node];
        let (made, directory) = (self.made(node), self.places.directory(name));
        let over = |os: Os| made.over(os, &directory);
        let volume = Volume::attach_over(self.config, name, None, over, |_, _| {})?;
        let flags = MapFlags {
            create: true,
            atomic: true,
            ..MapFlags::default()
        };
        let read = |file: &str, len: usize, flags: MapFlags| {
            volume.map(file, len, flags).map(|m| {
                // SAFETY: mapped until the detach below; nobody stores.
                unsafe { std::slice::from_raw_parts(m.ptr, m.len) }.to_vec()
            })
        };
        let bytes = match self.setup.mounted {
            true => self.parts(&volume, &|file| {
                let flags = MapFlags {
                    create: false,
                    ..flags
                };
                read(file, PART, flags)
            }),
            false => read(FILE, self.setup.region(), flags),
        };
        let files = volume.files();
        volume.detach()?;
        Ok(Contents {
            bytes: bytes?,
            files,
        })
    }

    /// The threads' files of a volume that was mounted: nothing if one is missing, or has another size,
    /// as before everything is set up.
    fn parts(
        &self,
        volume: &Volume,
        read: &dyn Fn(&str) -> mojim::Result<Vec<u8>>,
    ) -> mojim::Result<Vec<u8>> {
        let files: HashMap<String, u64> = volume.files().into_iter().collect();
        let mut all = Vec::new();
        for thread in 0..self.setup.threads {
            let file = file_of(thread);
            if files.get(&file) != Some(&(PART as u64)) {
                self.say(&format!("{file}: of {files:?}"));
                return Ok(Vec::new());
            }
            all.extend(read(&file)?);
        }
        Ok(all)
    }

    /// Mounts what was recovered, and reads all that the mount shows: the volume's `files`, no more.
    fn shows(&self, node: usize, files: &[(String, u64)]) -> std::result::Result<Entries, String> {
        let at = self.places.top().join("shown");
        let config = self.places.top().join("recovered.toml");
        let said = self.places.top().join("shown.txt");
        let text = |e: std::io::Error| format!("the mount: {e}");
        std::fs::create_dir_all(&at).map_err(text)?;
        std::fs::write(&config, self.setup.text(self.places, LIMIT, false)).map_err(text)?;
        let mut command = Command::new(self.exe.with_file_name("mojim"));
        command.args(["mount", "--name", NODES[node], "--config"]);
        let mut mount = command
            .arg(&config)
            .args(self.setup.uring())
            .arg(&at)
            .stdout(Stdio::piped())
            .stderr(File::create(&said).map_err(text)?)
            .spawn()
            .map_err(text)?;
        let mut line = String::new();
        let out = mount.stdout.take().expect("it is piped");
        let ready = BufReader::new(out).read_line(&mut line).map_err(text)? > 0;
        let shown = match ready {
            true => shown::read(&at).map_err(|e| e.to_string()),
            false => Err("it ended".into()),
        };
        let shown = shown.and_then(|s| shown::is_catalogued(&s, files).map(|()| s));
        if let Some(pid) = rustix::process::Pid::from_raw(mount.id() as i32) {
            // It may have ended.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let ended = mount.wait().map_err(text)?;
        let said = std::fs::read_to_string(&said).unwrap_or_default();
        match (shown, ended.success()) {
            (Ok(shown), true) => Ok(shown),
            (shown, _) => {
                let why = shown.err().unwrap_or_default();
                Err(format!("the mount: {why}, {ended}: {said}"))
            }
        }
    }

    /// As `mojim promote`, with `--force` if the answer asks for it.
    fn promote(&self, node: usize) -> std::result::Result<(), String> {
        let begun = Instant::now();
        let mut force = false;
        loop {
            let e = match self.ask(node, force) {
                Ok(()) => return Ok(()),
                Err(e) => e,
            };
            self.say(&format!("promote, force {force}: {e}"));
            if e.contains("--force") && !e.contains("is alive") && !force {
                force = true;
                continue;
            }
            // The copy may still be busy, or the register without a leader.
            let passes = [
                "is alive",
                "not served yet",
                "register of views",
                "look again",
            ];
            let passing = passes.iter().any(|p| e.contains(p));
            if !passing || begun.elapsed() > PATIENCE {
                return Err(format!("promote {}: {e}", NODES[node]));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn ask(&self, node: usize, force: bool) -> std::result::Result<(), String> {
        let asked = || -> Result<()> {
            let env: Arc<dyn Env> = Arc::new(Os::new()?);
            // An order, which a node without keys takes over its Unix socket.
            let to = Address::Unix(layout::socket(self.config.node(NODES[node])?));
            let volume = "v".to_owned();
            let promote = Request::Promote { volume, force };
            // On a busy machine the node goes on, and says how far it is: it is asked until it is over, as
            // the command does. (An attach came too early, and was told of the earlier primary.)
            loop {
                let mut client = Client::connect(&env, &to, &self.config.cluster, ANSWER)?;
                if client.ask(&promote)?["promoting"] != true {
                    return Ok(());
                }
            }
        };
        asked().map_err(|e| e.to_string())
    }
}
