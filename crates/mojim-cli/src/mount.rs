//! `mojim mount`: a volume as a directory, in the foreground, until a signal or an unmount ends
//! it.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim::ReaderFiles;
use mojim_config::{Config, Failover, Node, Volume, Working};
use mojim_env::Address;
use mojim_mount::{Flags, Mounted, Options, Reading, Uring};
use mojim_replica::layout;
use serde_json::json;

use crate::ask::load;
use crate::below::Below;
use crate::failure::{Done, Failure, say_on_stderr};
use crate::guard;
use crate::interval::{Interval, interval};
use crate::log::{self, Form};
use crate::mount_lifetime::{self, Users};
use crate::node::raise_descriptors;
use crate::runs_mount::{Begun, LATER, device_of};
use crate::signals;
use crate::supervise::Post;

/// How often it is looked whether the mount has ended, or its node is no longer the primary.
const TURN: Duration = Duration::from_millis(200);

/// How long a mount for programs under `mojim run` waits for a copy that another process has
/// open, and every mount for a mirror that is slow.
const BUSY: Duration = Duration::from_secs(20);

/// Mount a volume as a directory. Any program can keep its files there.
///
/// These calls are sync points: fsync, fdatasync, msync, and writes with O_SYNC or O_DSYNC. When
/// one returns, what it covers is committed atomically, and copied as the volume's mode says. A
/// change that no program syncs is committed after `--commit-interval`, and at the end.
///
/// Names, directories, links, attributes and times are part of the volume. Every sync point
/// commits all such changes made so far.
///
/// The mount is the primary of the volume. No other program can attach the volume meanwhile.
///
/// The mount stays in the foreground. SIGTERM, SIGINT, SIGHUP or `umount DIR` ends it, after it
/// has committed everything.
///
/// If another node takes over, changes fail with EROFS. With `--wait`, the mount waits until this
/// node is the primary again, and mounts the volume again. Until then the directory is
/// read-only (EROFS) if root runs the mount. Otherwise files written there stay on this machine.
///
/// With `--read`, the directory shows the volume read-only, on a node that follows. That is the
/// mirror (not in mode sync-disk) or a backup. The volume may be mounted or attached on the
/// primary. The directory shows whole sync points, and follows the primary. Every change fails
/// with EROFS. While the node's daemon does not answer, calls fail with EIO.
#[derive(clap::Args)]
pub struct Mount {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The node on which you mount.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// The volume. You may leave it out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Show the volume read-only, on a node that follows: the mirror or a backup.
    #[arg(long, conflicts_with_all = ["atomic", "commit_interval", "wait", "while_used", "uring"])]
    read: bool,
    /// How much one fsync commits.
    #[arg(long, value_enum, default_value_t = Atomic::File, value_name = "WHAT")]
    atomic: Atomic,
    /// Seconds after which a change is committed that no program has synced.
    ///
    /// With "never", such a change is committed by a sync point, at the end, or when too much
    /// waits. The bound is 64 MiB, or a quarter of the smallest log if that is less. With default
    /// logs it is 4 MiB.
    #[arg(long, default_value = "5", value_parser = interval, value_name = "SECONDS")]
    commit_interval: Interval,
    /// How the kernel's requests arrive: "auto", "on" (io_uring) or "off".
    ///
    /// "auto" uses io_uring where this machine has it switched on: Linux 6.14, and `options fuse
    /// enable_uring=1` in /etc/modprobe.d. "on" switches it on for the whole machine. It needs
    /// root.
    #[arg(long, default_value = "auto", value_parser = Uring::parse, value_name = "WHEN")]
    uring: Uring,
    /// Wait until this node is the primary of the volume, and again after each loss of that role.
    /// Needs `failover = "automatic"`.
    #[arg(long)]
    wait: bool,
    /// For programs under `mojim run`: ends when none of them has the mount any more.
    #[arg(long, hide = true, conflicts_with_all = ["wait", "json"])]
    while_used: bool,
    /// Of these two processes, the one that serves.
    #[arg(long, hide = true, requires = "while_used")]
    guarded: bool,
    /// The name of this run of it.
    #[arg(long, hide = true, requires = "while_used", default_value = "")]
    run_id: String,
    /// Options of the mount, as in mount(8): ro, suid, dev, noexec, noatime. Without `suid`,
    /// setuid and setgid bits have no effect. Without `dev`, device files cannot be opened.
    #[arg(short = 'o', long = "options", value_parser = Flags::parse, default_value = "", hide_default_value = true, value_name = "OPTIONS")]
    options: Flags,
    /// The name of the file system in the table of mounts.
    #[arg(long, hide = true, value_name = "SOURCE")]
    source: Option<String>,
    /// Print the ready line as JSON.
    #[arg(long)]
    json: bool,
    /// The form of events on standard error.
    #[arg(long, value_enum, default_value_t = Form::Text, value_name = "FORM")]
    log: Form,
    /// The directory on which to mount.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// What one sync point commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Atomic {
    /// The file on which fsync is called.
    File,
    /// All changes in the volume.
    Volume,
}

/// Why a mount is over.
#[derive(Debug, PartialEq, Eq)]
enum Over {
    Asked,
    Unmounted,
    /// Its connection to the kernel was ended while it was mounted.
    CutOff,
    /// Another node is the primary.
    Stale,
}

impl Over {
    /// Each end of a mount is in the log.
    fn log(&self) {
        match self {
            Over::Asked => tracing::info!("the mount ends: a signal asked for it"),
            Over::Unmounted => tracing::info!("the mount ends: somebody unmounted it"),
            Over::CutOff => {
                tracing::warn!("the mount ends: somebody ended its connection to the kernel");
            }
            Over::Stale => tracing::warn!("the mount ends: another node is the primary"),
        }
    }
}

impl Mount {
    /// Mounts, and returns when that is over.
    pub fn run(self) -> Done {
        mojim_linux::hide_memory();
        signals::block()?;
        log::install(&self.name, self.log)?;
        match (self.while_used, self.guarded) {
            (true, true) => return self.run_while_used(),
            (true, false) => return guard::watch(&self.directory, "--guarded", &self.run_id),
            _ => {}
        }
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        let node = config.node(&self.name)?;
        self.check(&config, node, volume)?;
        let post = match self.wait {
            true => Some(Post::new(&config, node, &volume.name)?),
            false => None,
        };
        if self.read {
            return self.run_read(&config, volume);
        }
        raise_descriptors();
        let below = post.as_ref().map(|_| Below::over(&self.directory));
        let _below = below.transpose()?;
        let (mut waits, mut slow) = (Waits::default(), Slow::default());
        loop {
            if let Some(post) = &post {
                while !post.is_ready_within(TURN) {
                    waits.say(&format!(
                        "waiting until node {} is the primary of volume {}",
                        node.name, volume.name
                    ));
                    if signals::came_within(TURN)? {
                        return Ok(0);
                    }
                }
            }
            let attached = match self.attach(&config, volume, &|| false) {
                Err(e)
                    if post.is_some() && may_pass(&e) || slow.is_it(&e, &config, node, volume) =>
                {
                    waits.say(&format!("waiting: {e}"));
                    if signals::came_within(TURN)? {
                        return Ok(0);
                    }
                    continue;
                }
                attached => attached?,
            };
            let mounted = self.mount(attached)?;
            self.say_ready(&volume.name);
            (waits, slow) = (Waits::default(), Slow::default());
            let over = wait(&mounted, &self.directory, self.wait)?;
            over.log();
            let ended = mounted.end();
            if over != Over::Stale {
                ended?;
                return Ok(0);
            }
            if let Err(e) = ended {
                tracing::warn!("{e}");
            }
            waits.say(&format!(
                "another node is the primary of volume {}. Changes that were not committed here are lost, and {} is read-only now",
                volume.name,
                self.directory.display()
            ));
        }
    }

    /// A mount that only shows.
    fn run_read(&self, config: &Config, volume: &Volume) -> Done {
        let files = ReaderFiles::attach(config, &self.name, Some(&volume.name), Reading::KEEPS)?;
        let reading = Reading::over(files, &self.directory, self.options, self.source.as_deref())?;
        self.say_ready(&volume.name);
        while !reading.is_over() && !signals::came_within(TURN)? {}
        reading.end()?;
        Ok(0)
    }

    /// The process behind [`RunsMount`](crate::runs_mount::RunsMount).
    fn run_while_used(self) -> Done {
        let (mounted, users) = match self.begin() {
            Ok(begun) => begun,
            Err(f) => {
                let (text, code) = (f.text.clone(), f.code);
                say_begun(&Begun::Failed { text, code });
                return Err(f);
            }
        };
        say_begun(&Begun::Mounted);
        mount_lifetime::serve(mounted, users)
    }

    fn begin(&self) -> Result<(Mounted, Users), Failure> {
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        let node = config.node(&self.name)?;
        self.check(&config, node, volume).map_err(without)?;
        raise_descriptors();
        let began = Instant::now();
        let later = |e: &mojim::Error| {
            let passes = [
                libc::ETIMEDOUT,
                libc::ECONNREFUSED,
                libc::ESTALE,
                libc::EBUSY,
            ];
            may_pass(e) || passes.contains(&e.errno())
        };
        let in_time = || began.elapsed() < BUSY;
        let mut said = false;
        let serving = loop {
            match mount_lifetime::serving(&self.directory)? {
                Some(file) => break file,
                None if guard::nobody_waits() => return Err(given_up(volume)),
                None if in_time() => {
                    let last = "the process of the last mount has not ended yet";
                    say_waits(&mut said, last.into());
                    std::thread::sleep(TURN);
                }
                None => {
                    return Err(Failure {
                        code: LATER,
                        text: format!("the last mount of volume {} has not ended yet", volume.name),
                    });
                }
            }
        };
        let (mut said, mut slow) = (false, Slow::default());
        let attached = loop {
            match self.attach(&config, volume, &guard::nobody_waits) {
                Err(_) if guard::nobody_waits() => return Err(given_up(volume)),
                // The node's daemon may look at what a dead process left; the mirror may be busy with
                // what that had begun.
                Err(e)
                    if in_time() && matches!(e, mojim::Error::Busy(_))
                        || slow.is_it(&e, &config, node, volume) =>
                {
                    say_waits(&mut said, e.to_string());
                }
                attached => break attached,
            }
        };
        let attached = attached.map_err(|e| {
            let code = if later(&e) { LATER } else { 1 };
            match Failure::from(e) {
                f if f.code == 1 => Failure { code, ..f },
                f => f,
            }
        })?;
        let mounted = self.mount(attached).map_err(without)?;
        let users = Users::of(&self.directory, serving)?;
        Ok((mounted, users))
    }

    fn check(&self, config: &Config, node: &Node, volume: &Volume) -> Result<(), Failure> {
        let file = self.config.display();
        if !volume.data_nodes().contains(&node.name.as_str()) {
            return Err(Failure::usage(format!(
                "{file}: node {} does not hold volume {}",
                node.name, volume.name
            )));
        }
        if self.wait && volume.failover != Failover::Automatic {
            return Err(Failure::usage(format!(
                "{file}: --wait needs failover = \"automatic\" of volume {}",
                volume.name
            )));
        }
        if !self.read {
            config.check_media(&node.name)?;
        }
        let dir = std::fs::canonicalize(&self.directory).map_err(|e| {
            Failure::failed(format!("{}: {e}; make it first", self.directory.display()))
        })?;
        let own = std::fs::canonicalize(&node.directory).unwrap_or(node.directory.clone());
        if !self.while_used && (dir.starts_with(&own) || own.starts_with(&dir)) {
            return Err(Failure::usage(format!(
                "{}: node {} keeps its copies in {}; mount elsewhere",
                dir.display(),
                node.name,
                own.display()
            )));
        }
        check_fuse()
    }

    /// Attaches the volume, unless that is given up.
    fn attach(
        &self,
        config: &Config,
        volume: &Volume,
        given_up: &dyn Fn() -> bool,
    ) -> Result<mojim::Volume, mojim::Error> {
        let mut config = config.clone();
        if let Some(v) = config.volumes.get_mut(&volume.name) {
            // No other process shares it: the mount alone changes its files.
            v.working = Working::Private;
        }
        mojim::Volume::attach_unless(&config, &self.name, &volume.name, given_up)
    }

    fn mount(&self, attached: mojim::Volume) -> Result<Mounted, Failure> {
        let options = Options {
            atomic_volume: self.atomic == Atomic::Volume,
            commit_interval: self.commit_interval.0,
            flags: self.options,
            source: self.source.clone(),
            uring: self.uring,
            ..Options::default()
        };
        let mounted = Mounted::over(attached, &self.directory, options)?;
        if mounted.is_over_uring() {
            tracing::info!("the kernel's requests come over io_uring");
        }
        Ok(mounted)
    }

    /// The starter may have closed the pipe: the mount serves all the same.
    fn say_ready(&self, volume: &str) {
        let mut out = std::io::stdout().lock();
        let dir = self.directory.display();
        let line = match self.json {
            true => {
                let at = dir.to_string();
                json!({ "volume": volume, "node": self.name, "mounted": at }).to_string()
            }
            false => format!("volume {volume} is mounted at {dir}"),
        };
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

/// Before it is mounted; once it is, it ends for want of programs.
fn given_up(volume: &Volume) -> Failure {
    Failure {
        code: LATER,
        text: format!(
            "the mount of volume {} is given up: the `mojim run` that waited for it has ended",
            volume.name
        ),
    }
}

/// What to do where nothing can be mounted.
fn without(f: Failure) -> Failure {
    let text = format!("{} (`mojim run --preload` needs no mount)", f.text);
    Failure { text, ..f }
}

/// If nobody listens any more, the mount ends by itself.
fn say_begun(what: &Begun) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", json!(what));
    let _ = out.flush();
}

/// Says once what the mount waits for.
fn say_waits(said: &mut bool, text: String) {
    if !std::mem::replace(said, true) {
        tracing::info!("waiting: {text}");
        say_begun(&Begun::Waits { text });
    }
}

/// Whether an attach may succeed later: the node's daemon may have the copy open, or the view may
/// have changed again.
fn may_pass(e: &mojim::Error) -> bool {
    use mojim::Error::{Busy, Stale, Timeout};
    matches!(e, Busy(_) | Stale(_) | Timeout(_))
}

/// Since when the mirror is there and does not answer in time: after the death of a primary it
/// may be busy with what that had begun.
#[derive(Default)]
struct Slow(Option<Instant>);

impl Slow {
    /// Whether an attach failed for that, and is to be tried again.
    fn is_it(&mut self, e: &mojim::Error, config: &Config, node: &Node, volume: &Volume) -> bool {
        let mirror = layout::peer(config, node, volume);
        matches!(e, mojim::Error::Timeout(_))
            && self.0.get_or_insert_with(Instant::now).elapsed() < BUSY
            && mirror.is_some_and(|m| match m.address {
                Address::Tcp(at) => TcpStream::connect_timeout(&at, TURN * 5).is_ok(),
                Address::Unix(at) => UnixStream::connect(at).is_ok(),
            })
    }
}

/// What a wait has said: the same once.
#[derive(Default)]
struct Waits(String);

impl Waits {
    fn say(&mut self, text: &str) {
        if self.0 != text {
            say_on_stderr(text);
            self.0 = text.to_owned();
        }
    }
}

/// Until the mount is over.
fn wait(mounted: &Mounted, at: &Path, while_primary: bool) -> Result<Over, Failure> {
    let device = device_of(at).ok();
    loop {
        if signals::came_within(TURN)? {
            return Ok(Over::Asked);
        }
        if mounted.is_over() {
            let stays = device.is_some() && device_of(at).ok() == device;
            return Ok(if stays { Over::CutOff } else { Over::Unmounted });
        }
        if while_primary && mounted.is_stale() {
            return Ok(Over::Stale);
        }
    }
}

/// Whether this machine has FUSE.
fn check_fuse() -> Result<(), Failure> {
    let device = Path::new("/dev/fuse");
    match std::fs::metadata(device) {
        Ok(_) => Ok(()),
        Err(e) => Err(Failure::failed(format!(
            "{}: {e}: a mount needs FUSE (in a container, pass the device in; else load the \
             kernel's module fuse)",
            device.display()
        ))),
    }
}
