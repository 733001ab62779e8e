//! One running cluster.
//!
//! Each node's disk is a device that records its requests. Its daemon and the program are
//! processes.
//!
//! Owns the devices, mounts and processes, and turns what they did into a history.
//! Invariant: everything in a history has a time of one clock (`journal.rs`), which the
//! devices use too.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use super::program::Slip;
use super::setup::{DATA, NODES, Places, Setup};
use crate::device::{Device, Event};
use crate::journal::{Journal, Told};
use crate::machine::Fault;
use crate::subject::SubjectPaths;
use crate::sys::{Lab, Loop, Mounted, make_file_system};
use crate::{Result, WRITE_BACK_EVERY, write_back};

/// Size of a node's disk, in bytes.
pub const DISK: u64 = 16 << 20;
/// The same where a volume is mounted, which leaves 16 MiB free.
pub const DISK_OF_A_MOUNT: u64 = 40 << 20;
/// Milliseconds after which a node of a running cluster counts as failed: longer than
/// anything here takes.
const LIMIT: u64 = 20_000;

/// The requests that a node's device got, and when.
#[derive(Default)]
pub struct Past {
    /// The requests.
    pub events: Vec<Event>,
    /// The time of each.
    pub times: Vec<u64>,
}

/// What a node that keeps its power has left when its processes are killed.
pub struct Kept {
    /// The node.
    pub node: usize,
    /// Its file system as its page cache shows it, written to the medium.
    pub disk: Vec<u8>,
    /// The files of its memory.
    pub ring: Vec<(PathBuf, Vec<u8>)>,
    /// When its processes were killed.
    pub since: u64,
}

/// Everything known of one cluster's life.
pub struct History {
    /// For each node.
    pub nodes: Vec<Past>,
    /// What the program had acknowledged.
    pub told: Told,
    /// The node whose processes were killed, with the memory that was left.
    pub kept: Option<Kept>,
    /// The last time up to which everything is known.
    pub end: u64,
}

/// A node's disk, with the device that records its requests.
struct Site {
    // In the order in which they must be dropped.
    recorded: Loop,
    device: Device,
}

/// Disks on which clusters run, one after the other.
pub struct Stage {
    sites: Vec<Site>,
    pristine: Vec<u8>,
    exe: PathBuf,
}

/// A child process that is killed when this is dropped.
struct Running(Child);

impl Running {
    fn start(mut command: Command) -> Result<Running> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        // SAFETY: the call between fork and exec is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        Ok(Running(command.spawn()?))
    }

    /// Waits until the process prints a line: it is ready, or done.
    fn wait(&mut self, what: &str) -> Result<()> {
        let pipe = self.0.stdout.take().expect("it is piped");
        let mut line = String::new();
        BufReader::new(pipe).read_line(&mut line)?;
        match line.is_empty() {
            false => Ok(()),
            true => Err(format!("{what} ended by itself").into()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is special of a cluster.
#[derive(Clone, Copy)]
pub struct Made {
    /// Its faults.
    pub faults: Faults,
    /// The words for its mount, if the program works in one.
    pub mount: Option<&'static [&'static str]>,
    /// The mistake that the program makes there.
    pub slip: Option<Slip>,
}

/// A cluster's faults: that of the machine of `a`'s program, and that of `b`'s daemon.
pub type Faults = [Option<Fault>; DATA];

/// How a cluster's life ends.
#[derive(Debug, Clone, Copy)]
pub enum End {
    /// When the program has made all its steps.
    Done,
    /// When the first thread has made `step` steps, the processes of this node are
    /// killed; those of the other node go on for a moment.
    Killed {
        /// The node.
        node: usize,
        /// The number of steps.
        step: u64,
    },
}

impl Stage {
    /// Makes disks of `size` bytes; `exe`: the command `mojim-crash`.
    pub fn new(lab: &Lab, exe: &Path, size: u64) -> Result<Stage> {
        let image = lab.path("pristine");
        make_file_system("ext4", &image, size)?;
        let pristine = std::fs::read(&image)?;
        let site = |node: &&str| -> Result<Site> {
            let device = Device::new(&lab.path(&format!("device.{node}")), pristine.clone())?;
            let recorded = Loop::new(device.path())?;
            Ok(Site { recorded, device })
        };
        let sites = NODES.iter().map(site).collect::<Result<_>>()?;
        Ok(Stage {
            sites,
            pristine,
            exe: exe.to_owned(),
        })
    }

    /// The bytes of a disk that no node has used.
    pub fn pristine(&self) -> &[u8] {
        &self.pristine
    }

    /// Runs a cluster until `end`.
    pub fn run(&self, at: &Places, setup: &Setup, made: Made, end: End) -> Result<History> {
        let top = at.top();
        let _ = std::fs::remove_dir_all(top);
        std::fs::create_dir_all(top)?;
        let journal_path = top.join("journal");
        let journal = Arc::new(Journal::open(&journal_path)?);
        let nodes = if setup.register { NODES.len() } else { DATA };
        let mounts = self.mount(at, nodes, &journal)?;
        let text = |program| setup.text(at, LIMIT, program);
        let (theirs, its) = (top.join("cluster.toml"), top.join("program.toml"));
        std::fs::write(&theirs, text(false))?;
        std::fs::write(&its, text(true))?;
        let life = Life {
            exe: &self.exe,
            at,
            setup,
            made,
            nodes,
            theirs,
            its,
            journal: &journal,
            journal_path,
        };

        let over = AtomicBool::new(false);
        let over = &over;
        let (told, end, mut kept) = std::thread::scope(|s| -> Result<_> {
            let disks: Vec<_> = NODES.iter().take(nodes).map(|n| at.directory(n)).collect();
            let kernel = s.spawn(move || write_back_until(over, &disks));
            let ran = life.live(end);
            over.store(true, Relaxed);
            kernel.join().expect("it does not panic")?;
            ran
        })?;
        Ok(History {
            nodes: self.unmount(mounts, &mut kept)?,
            told,
            kept,
            end,
        })
    }

    /// Gives `nodes` nodes new disks, which record by the journal's clock, and mounts
    /// them.
    fn mount(&self, at: &Places, nodes: usize, journal: &Arc<Journal>) -> Result<Vec<Mounted>> {
        let mut mounts = Vec::new();
        for (site, node) in self.sites.iter().zip(NODES).take(nodes) {
            site.device.load(self.pristine.clone());
            let clock = journal.clone();
            site.device.record_by(Arc::new(move || clock.now()));
            site.recorded.forget()?;
            mounts.push(Mounted::new("ext4", site.recorded.path(), &at.disk(node))?);
            std::fs::create_dir_all(at.directory(node))?;
            std::fs::create_dir_all(at.ring(node))?;
        }
        Ok(mounts)
    }

    /// Unmounts the disks, and returns the requests of each until then. The disk of a
    /// node that was killed gets its page cache.
    fn unmount(&self, mounts: Vec<Mounted>, kept: &mut Option<Kept>) -> Result<Vec<Past>> {
        let mut past = Vec::new();
        for (i, (site, mounted)) in self.sites.iter().zip(mounts).enumerate() {
            if let Some(k) = kept.as_mut().filter(|k| k.node == i) {
                // Writes the page cache to the medium, as the kernel would in time.
                mounted.unmount()?;
                k.disk = site.device.bytes();
                let (events, times) = site.device.take_timed_history();
                past.push(Past { events, times });
                continue;
            }
            let (events, times) = site.device.take_timed_history();
            past.push(Past { events, times });
            mounted.unmount()?;
        }
        Ok(past)
    }
}

/// Meanwhile does what the kernel may do: now and then begins to write the page cache of
/// these directories back.
fn write_back_until(over: &AtomicBool, disks: &[PathBuf]) -> std::io::Result<()> {
    while !over.load(Relaxed) {
        for dir in disks {
            write_back(&SubjectPaths {
                dir: dir.clone(),
                ring: PathBuf::new(),
                medium: String::new(),
                forced: None,
            })?;
        }
        std::thread::sleep(WRITE_BACK_EVERY);
    }
    Ok(())
}

/// A mount whose process is killed when this is dropped.
struct Mount {
    process: Running,
    at: PathBuf,
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.process.0.kill();
        let _ = self.process.0.wait();
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
    }
}

/// The program, and the mount in which it works, if it does. Killed in this order, since a call on
/// the mount may wait for its process.
struct Working {
    program: Running,
    _mount: Option<Mount>,
}

/// The processes of one cluster, from their start to their end.
struct Life<'a> {
    exe: &'a Path,
    at: &'a Places,
    setup: &'a Setup,
    made: Made,
    /// How many nodes there are.
    nodes: usize,
    /// The path of the daemons' configuration.
    theirs: PathBuf,
    /// The path of the program's configuration.
    its: PathBuf,
    journal: &'a Journal,
    journal_path: PathBuf,
}

impl Life<'_> {
    /// Runs the cluster. Returns what the program was told, the time of the end, and what
    /// was left if only processes were killed.
    fn live(&self, end: End) -> Result<(Told, u64, Option<Kept>)> {
        let mut daemons = self.start_daemons()?;
        let mut program = Some(self.start_program()?);
        let killed = self.wait_for(end, &mut program, &mut daemons)?;
        let kept = killed.map(|node| self.left_by(node)).transpose()?;
        // Whatever begins from here on is after the history's end.
        let end = self.journal.now();
        let told = self.journal.told(self.setup.threads);
        drop((program, daemons));
        Ok((told, end, kept))
    }

    fn command(
        &self,
        word: &str,
        config: &Path,
        node: &str,
        fault: Option<Fault>,
    ) -> std::io::Result<Command> {
        let mut c = Command::new(self.exe);
        c.args([word, "--name", node, "--config"]).arg(config);
        c.args(fault.iter().flat_map(|f| ["--fault", f.name()]));
        c.stderr(std::fs::File::create(
            self.at.top().join(format!("{word}.{node}")),
        )?);
        Ok(c)
    }

    /// Starts all daemons, and waits until they serve.
    fn start_daemons(&self) -> Result<Vec<Running>> {
        let mut daemons = Vec::new();
        for (i, node) in NODES.iter().enumerate().take(self.nodes) {
            let fault = if i == 1 { self.made.faults[1] } else { None };
            let command = self.command("node", &self.theirs, node, fault)?;
            daemons.push(Running::start(command)?);
        }
        for (d, node) in daemons.iter_mut().zip(NODES) {
            d.wait(&format!("node {node}"))?;
        }
        Ok(daemons)
    }

    fn start_program(&self) -> Result<Working> {
        let mount = match self.made.mount {
            Some(words) => Some(self.start_mount(words)?),
            None => None,
        };
        let mut c = self.command("program", &self.its, "a", self.made.faults[0])?;
        c.arg("--journal").arg(&self.journal_path);
        c.args(["--seed", &self.setup.seed.to_string()]);
        c.args(["--threads", &self.setup.threads.to_string()]);
        c.args(["--steps", &self.setup.steps.to_string()]);
        if let Some(m) = &mount {
            c.arg("--mount").arg(&m.at);
            c.args(self.made.slip.iter().flat_map(|s| ["--slip", s.name()]));
        }
        Ok(Working {
            program: Running::start(c)?,
            _mount: mount,
        })
    }

    /// `mojim mount`, of the command beside this one.
    fn start_mount(&self, words: &[&str]) -> Result<Mount> {
        let at = self.at.top().join("mount");
        std::fs::create_dir_all(&at)?;
        let mut c = Command::new(self.exe.with_file_name("mojim"));
        c.args(["mount", "--name", "a", "--config"]).arg(&self.its);
        c.args(self.setup.uring()).args(words).arg(&at);
        c.stderr(std::fs::File::create(self.at.top().join("mount.a"))?);
        let process =
            Running::start(c).map_err(|e| format!("mojim mount: {e}; build mojim-cli"))?;
        let mut mount = Mount { process, at };
        let ready = mount.process.wait("mojim mount");
        ready.map_err(|e| self.say(e))?;
        Ok(mount)
    }

    /// Waits for this end. Returns the node whose processes were killed for it, if any.
    fn wait_for(
        &self,
        end: End,
        program: &mut Option<Working>,
        daemons: &mut Vec<Running>,
    ) -> Result<Option<usize>> {
        let running = &mut program.as_mut().expect("just started").program;
        match end {
            End::Done => {
                running.wait("the program").map_err(|e| self.say(e))?;
                Ok(None)
            }
            End::Killed { node, step } => {
                // No event tells of the step, so this polls.
                while self.journal.acknowledged(0) < step {
                    if running.0.try_wait()?.is_some() {
                        return Err(self.say("the program ended".into()));
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                if node == 0 {
                    *program = None;
                }
                drop(daemons.remove(node));
                Ok(Some(node))
            }
        }
    }

    /// What a node has, except its disk, whose processes were killed just now.
    fn left_by(&self, node: usize) -> Result<Kept> {
        let since = self.journal.now();
        // Lets the other node finish what was under way.
        std::thread::sleep(Duration::from_millis(3));
        let ring = files(&self.at.ring(NODES[node]))?;
        Ok(Kept {
            node,
            disk: Vec::new(),
            ring,
            since,
        })
    }

    /// Adds the output of the processes to an error.
    fn say(
        &self,
        e: Box<dyn std::error::Error + Send + Sync>,
    ) -> Box<dyn std::error::Error + Send + Sync> {
        let said: Vec<String> = ["program.a", "mount.a", "node.a", "node.b", "node.w"]
            .iter()
            .filter_map(|n| {
                std::fs::read_to_string(self.at.top().join(n))
                    .ok()
                    .map(|t| format!("{n}: {t}"))
            })
            .collect();
        format!("{e}; {}", said.join("; ")).into()
    }
}

/// All files below a directory, with their paths relative to it.
fn files(top: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let (mut out, mut dirs) = (Vec::new(), vec![top.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() {
                dirs.push(path);
            } else {
                let bytes = std::fs::read(&path)?;
                out.push((path.strip_prefix(top)?.to_owned(), bytes));
            }
        }
    }
    Ok(out)
}
