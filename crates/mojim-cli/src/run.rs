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

/// Run an unmodified program on a volume. The program sees the volume in the volume's directory.
///
/// The program runs in its own mount namespace. There the directory VOLUME below the node's
/// `directory` is the volume, mounted as by `mojim mount`. This works for every program, and for
/// the programs that it starts.
///
/// These calls are sync points: fsync, fdatasync, msync, and writes with O_SYNC or O_DSYNC. A
/// change that no program syncs is committed after `--commit-interval`.
///
/// Several programs on a node share one mount. The first starts it, and it ends with the last,
/// after it has committed everything. Its messages are in .mojim/VOLUME/run/log below the node's
/// `directory`. A program that you start without `mojim run` sees the node's bare copy in that
/// directory. It must not change it.
///
/// Mounting needs FUSE (/dev/fuse), and root, or fusermount3 with user namespaces.
///
/// If the mount's process dies, the programs that use it are killed (SIGKILL), because their open
/// files stay dead. The next `mojim run` mounts the volume again, and reports the cause.
///
/// The command stays while the program runs. It passes on SIGINT, SIGTERM, SIGHUP, SIGQUIT,
/// SIGUSR1 and SIGUSR2. If the command is killed, the program is killed too.
///
/// The exit code is the program's. If a signal ended the program, it is 128 and the signal's
/// number, and standard error names the signal.
///
/// With `failover = "automatic"`, the command waits until this node is the primary, and then
/// starts the program. It ends the program when this node no longer is, and waits again. After
/// one second of waiting, standard error says for what, where and since when.
///
/// With `--preload`, the command mounts nothing, and loads Mojim's libraries into the program. It
/// does the same for a program that is linked with libmojim.so, unless you give `--mount`. Files
/// that the program maps in the directory are the volume's memory in its own process, and msync
/// is several times faster. Some file operations are refused, and operations that bypass the C
/// library are not seen.
///
/// The libraries are searched in $MOJIM_LIB, beside this command, and in ../lib. The program gets
/// LD_PRELOAD, MOJIM_CONFIG, MOJIM_NODE and MOJIM_VOLUME.
///
/// Several programs with `--preload` share the memory of a file that they map with MAP_SHARED.
/// The first program that opens a file of the volume works for all of them. Once it has ended,
/// the others can commit nothing more.
///
/// With `--preload`, a program that would run without the libraries is not started: exit code
/// 126, or EACCES for a program started by another. Such programs are:
///
/// - statically linked, or linked for another C library
///
/// - with the set-user-ID bit, the set-group-ID bit or capabilities
///
/// - scripts for such an interpreter
///
/// With `--read`, the program reads the volume through the libraries, on a node that follows.
/// That is the mirror or a backup, in mode `sync-disk` a backup only. Its `mojim node` must run
/// on this machine. Files that it reads or maps with PROT_READ show whole sync points, and follow
/// the primary. Opening a file for writing fails with EROFS. Any number of such programs may run.
#[derive(clap::Args)]
pub struct Run {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The node on which the program runs.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// The volume, if the configuration has several.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    #[command(flatten)]
    settings: Settings,
    /// Load Mojim's libraries into the program, instead of mounting the volume.
    #[arg(long, conflicts_with_all = ["atomic", "commit_interval", "uring", "mount"])]
    preload: bool,
    /// Mount the volume also for a program that is linked with libmojim.so. --atomic,
    /// --commit-interval and --uring do the same.
    #[arg(long, conflicts_with_all = ["read", "allow_unguarded"])]
    mount: bool,
    /// Read the volume through the libraries, on a node that follows: the mirror or a backup.
    #[arg(long, conflicts_with_all = ["atomic", "commit_interval", "uring"])]
    read: bool,
    /// Also start programs that run without the libraries. Nothing keeps them from the volume's
    /// files.
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

/// Has this process begin anew, with the words that it was given: what it does hangs on the
/// program's file. Returns why it cannot.
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
    let text = "perhaps it used memory beyond the end of a mapped file. A mapping makes its file longer only with --preload";
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
