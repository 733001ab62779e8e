//! `mojim run`: a program whose files in a volume's directory are Mojim's, by a mount over that
//! directory, or by Mojim's libraries in the program.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex};

use mojim_config::{Config, Failover, Node, Volume};

use crate::ask::load;
use crate::failure::{Done, Failure};
use crate::linked;
use crate::namespace::{Namespace, below};
use crate::program;
use crate::runs_mount::{Device, Pause, RunsMount, Settings};
use crate::supervise;

/// The libraries that are put before the program, in this order.
const LIBRARIES: [&str; 2] = ["libmojim_preload.so", "libmojim.so"];

/// Run an unmodified program: for it, the volume's directory is the volume itself.
///
/// The program is started in a mount namespace of its own, in which the directory VOLUME below the
/// node's `directory` is the volume, mounted as by `mojim mount`: every program works there, however
/// it is linked, and so do the programs that it starts. fsync, fdatasync, msync, and writes with
/// O_SYNC or O_DSYNC are sync points; what no program syncs is committed every --commit-interval.
/// Several programs on a node share the volume. The mount is started by the first, belongs to none,
/// and ends when none is left: then everything is committed. What it has to say is in the file
/// .mojim/VOLUME/run/log below the node's `directory`. Processes that were not started so see the
/// bare copy of the node in that directory, and must not change it.
///
/// This needs FUSE (/dev/fuse) and the right to mount: as root, or with the program fusermount3 and
/// user namespaces.
///
/// With --preload, and for a program that is linked with libmojim.so (--mount prevents that), nothing is
/// mounted: the program may attach the volume itself. Mojim's libraries are loaded into the program: the files
/// that it maps in the directory are the volume's memory in its own process, and msync takes a
/// fraction of the time. But part of what a program may do with files is refused then, and what it
/// does past the C library is not seen. LD_PRELOAD, MOJIM_CONFIG, MOJIM_NODE and
/// MOJIM_VOLUME are set; the libraries are looked for in $MOJIM_LIB, beside this command, and in ../lib.
/// What several such programs map with MAP_SHARED is the same memory in all; the first that opens a file of
/// the volume does the work for all: once it has ended, the others can commit nothing more. A
/// program that would run without the libraries is not started, by this command (exit code 126) or
/// by a program that runs under it (EACCES): one that is linked statically or for another C library,
/// or that has the set-user-ID or set-group-ID bit or capabilities, and a script for such an
/// interpreter.
///
/// If the mount's process dies, the programs that use the mount are killed (SIGKILL), as by a machine
/// that stops: their files would stay dead for them. The next `mojim run` mounts the volume again, and
/// says what had happened.
///
/// It stays while the program runs, passes on SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2, and
/// takes the program along when it is killed. Its exit code is the program's, or 128 and the number of
/// the signal that ended the program, which standard error says then. Where the volume's views change by themselves
/// (`failover = "automatic"`), it waits until this node is the volume's primary, then starts the
/// program, ends it when the node no longer is, and waits again. What it waits for, where and since
/// when it says on standard error after a second.
///
/// With --read the program reads the volume on a node that follows, the mirror or a backup (in mode
/// `sync-disk` a backup only), whose `mojim node` runs on this host, through the libraries: files that
/// it maps with PROT_READ, or reads, show whole sync points only, and follow the primary. Opening them
/// for writing fails with EROFS. There may be any number of such programs.
#[derive(clap::Args)]
pub struct Run {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The node on which the program runs.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// The volume; may be left out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    #[command(flatten)]
    settings: Settings,
    /// Load Mojim's libraries into the program, instead of mounting the volume.
    #[arg(long, conflicts_with_all = ["atomic", "commit_interval", "uring", "mount"])]
    preload: bool,
    /// Mount the volume for a program that is linked with libmojim.so, too, as --atomic,
    /// --commit-interval and --uring do.
    #[arg(long, conflicts_with_all = ["read", "allow_unguarded"])]
    mount: bool,
    /// Read on a node that follows, instead of being the volume's primary; by the libraries.
    #[arg(long, conflicts_with_all = ["atomic", "commit_interval", "uring"])]
    read: bool,
    /// Start programs, too, that run without the libraries: nothing keeps them from the volume's files.
    #[arg(long, conflicts_with_all = ["atomic", "commit_interval", "uring"])]
    allow_unguarded: bool,
    /// The program and its arguments, after `--`.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Run {
    /// Runs it to its end.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let (node, volume) = self.place(&config)?;
        let directory = mojim_replica::layout::data_dir(node, &volume.name);
        mojim_linux::trust::make(&directory)
            .map_err(|e| Failure::failed(format!("making {}: {e}", directory.display())))?;
        let config_file = std::fs::canonicalize(&self.config)?;
        let (program, args) = self.command.split_first().expect("clap requires one");
        let mut command = Command::new(program);
        command.args(args);
        let mount = RunsMount::of(&config_file, node, volume);
        let mounts = !self.by_libraries();
        let target = Arc::new(Mutex::new(((0, 0), CString::default())));
        if mounts {
            enter(&mut command, &mount, &directory, &target)?;
            // What attaches there all the same is told why it cannot.
            name_volume(&mut command, &config_file, node, volume);
        } else {
            self.preload_into(&mut command, &config_file, node, volume)?;
        }
        let mut prepare = |pause: &mut Pause| {
            // It may have been put there, or replaced, since.
            if self.by_libraries() == mounts {
                return Err(begin_anew());
            }
            if !mounts {
                // Readers have nothing to do with it, nor programs that may not use the volume.
                let awaits = !self.read && !self.allow_unguarded;
                return awaits.then(|| mount.await_end(pause)).transpose();
            }
            let held = mount.ensure(&self.settings, pause)?;
            *target.lock().expect("no thread panics") = (held.device, below(&held.id));
            Ok(Some(held))
        };
        let why = |status: ExitStatus| match mounts {
            true => mount.failed().or_else(|| beyond(status)),
            false => None,
        };
        if !self.read && volume.failover == Failover::Automatic {
            let file = &self.config;
            return supervise::run(command, &mut prepare, &why, &config, file, node, volume);
        }
        supervise::once(command, &mut prepare, &why, &volume.name)
    }

    /// The node and the volume.
    fn place<'a>(&self, config: &'a Config) -> Result<(&'a Node, &'a Volume), Failure> {
        let volume = config.volume(self.volume.as_deref())?;
        let node = config.node(&self.name)?;
        if !volume.data_nodes().contains(&node.name.as_str()) {
            return Err(Failure::usage(format!(
                "{}: node {} does not hold volume {}",
                self.config.display(),
                node.name,
                volume.name
            )));
        }
        if !self.read {
            config.check_media(&node.name)?;
        }
        Ok((node, volume))
    }

    /// Whether the program has Mojim's libraries, and nothing is mounted. A program that is linked with
    /// one of them may attach the volume, which a mount would have.
    fn by_libraries(&self) -> bool {
        let asked = self.preload || self.read || self.allow_unguarded;
        let mounts = self.mount || self.settings != Settings::default();
        let linked = || with_found(&self.command[0], |p| linked::with_libmojim(&path_of(p)));
        asked || !mounts && linked().unwrap_or(false)
    }

    /// Has the libraries loaded into the program.
    fn preload_into(
        &self,
        command: &mut Command,
        config: &Path,
        node: &Node,
        volume: &Volume,
    ) -> Result<(), Failure> {
        let mut preload = OsString::new();
        for (i, path) in libraries()?.iter().enumerate() {
            if i > 0 {
                preload.push(":");
            }
            preload.push(path);
        }
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|o| !o.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        command.env("LD_PRELOAD", preload);
        name_volume(command, config, node, volume);
        if self.read {
            command.env("MOJIM_READ", "1");
        } else {
            command.env_remove("MOJIM_READ");
        }
        let allowed = program::ALLOWED.to_string_lossy();
        if self.allow_unguarded {
            command.env(&*allowed, "1");
        } else {
            command.env_remove(&*allowed);
            check_program(command.get_program())?;
        }
        Ok(())
    }
}

/// Says in the program's environment which volume it is started for.
fn name_volume(command: &mut Command, config: &Path, node: &Node, volume: &Volume) {
    command
        .env("MOJIM_CONFIG", config)
        .env("MOJIM_NODE", &node.name)
        .env("MOJIM_VOLUME", &volume.name);
}

/// Has this process begin anew, with the words that it was given: what it does hangs on the program's
/// file. Returns why it cannot.
fn begin_anew() -> Failure {
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    let e = match std::env::current_exe() {
        Ok(me) => Command::new(me).arg0(name).args(words).exec(),
        Err(e) => e,
    };
    Failure::failed(format!(
        "the program's file was replaced meanwhile, and `mojim run` cannot begin anew: {e}"
    ))
}

/// Has the program started where the volume's directory is the mount. `target` is what has to be
/// mounted by then.
fn enter(
    command: &mut Command,
    mount: &RunsMount,
    directory: &Path,
    target: &Arc<Mutex<(Device, CString)>>,
) -> Result<(), Failure> {
    let namespace = Namespace::new(&mount.at(), &std::fs::canonicalize(directory)?)?;
    let target = target.clone();
    // SAFETY: `enter` makes system calls only, on what was prepared; the lock is free, since
    // who starts a program holds it at no other time.
    unsafe {
        command.pre_exec(move || {
            let target = target.lock().expect("free");
            namespace.enter(target.0, &target.1)
        });
    }
    Ok(())
}

/// What a person may not know of this signal.
fn beyond(status: ExitStatus) -> Option<String> {
    let text = "a load or store beyond the end of a mapped file, perhaps: in a mount a mapping does not \
                make its file longer, with --preload it does";
    (status.signal() == Some(libc::SIGBUS)).then(|| text.to_owned())
}

/// What `f` makes of the program's file; None if there is none, which the start reports.
fn with_found<T>(program: &OsStr, f: impl FnOnce(&CStr) -> T) -> Option<T> {
    let c_string = |s: &OsStr| CString::new(s.as_bytes()).ok();
    let path = std::env::var_os("PATH").and_then(|p| c_string(&p));
    let mut place = [0; libc::PATH_MAX as usize];
    let name = c_string(program).unwrap_or_default();
    program::find(&name, path.as_deref(), &mut place).map(f)
}

fn path_of(found: &CStr) -> PathBuf {
    OsStr::from_bytes(found.to_bytes()).into()
}

/// Refuses a program that would run without the libraries.
fn check_program(program: &OsStr) -> Result<(), Failure> {
    let checked = with_found(program, |found| {
        program::check(libc::AT_FDCWD, found).map_err(|refused| Failure {
            code: 126,
            text: refused.text(found),
        })
    });
    checked.unwrap_or(Ok(()))
}

/// Where the libraries are.
fn libraries() -> Result<Vec<PathBuf>, Failure> {
    let exe = std::env::current_exe()?;
    let beside = exe.parent().unwrap_or(Path::new("/")).to_owned();
    let mut places: Vec<PathBuf> = std::env::var_os("MOJIM_LIB")
        .filter(|p| !p.is_empty())
        .map(PathBuf::from)
        .into_iter()
        .collect();
    places.push(beside.join("../lib"));
    places.insert(places.len() - 1, beside);
    for place in &places {
        let found = LIBRARIES.map(|l| place.join(l));
        if found.iter().all(|f| f.is_file()) {
            let found: Result<Vec<_>, _> = found.iter().map(std::fs::canonicalize).collect();
            let found = found?;
            // The dynamic linker splits LD_PRELOAD at both.
            if let Some(bad) = found.iter().find(|f| {
                f.as_os_str()
                    .as_encoded_bytes()
                    .iter()
                    .any(|b| b": \t\n".contains(b))
            }) {
                return Err(Failure::failed(format!(
                    "{}: LD_PRELOAD cannot name a path with a space or colon; put the libraries elsewhere and set MOJIM_LIB",
                    bad.display()
                )));
            }
            return Ok(found);
        }
    }
    let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    Err(Failure::failed(format!(
        "{} are in none of {}; build them (`cargo build --release`) or set MOJIM_LIB to their directory",
        LIBRARIES.join(" and "),
        places.join(", ")
    )))
}
