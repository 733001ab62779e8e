//! The demonstration's child processes, directories and shared memory, and
//! their end.
//!
//! Invariant: whatever is registered here is killed or removed when its owner
//! is dropped, or when a signal asks the process to end, whichever is first.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use mojim_cli::beside::mojim;
use mojim_cli::failure::Failure;
use mojim_cli::signals;
use mojim_env::locks::lock;

struct Owned {
    children: Vec<i32>,
    directories: Vec<PathBuf>,
    keep: bool,
}

static OWNED: Mutex<Owned> = Mutex::new(Owned {
    children: Vec::new(),
    directories: Vec::new(),
    keep: false,
});

fn owned() -> MutexGuard<'static, Owned> {
    lock(&OWNED)
}

/// From here on a signal that asks this process to end also kills or removes everything
/// that the process owns. Call this before any thread is started.
pub fn clean_up_on_signals() -> Result<(), Failure> {
    signals::block()?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(|| {
            let signal = signals::wait().unwrap_or(libc::SIGTERM);
            let o = owned();
            for &pid in &o.children {
                // SAFETY: a child of ours that has not been reaped: reaped
                // children are taken off the list under this lock.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                    libc::waitpid(pid, std::ptr::null_mut(), 0);
                }
            }
            for d in o.directories.iter().filter(|_| !o.keep) {
                let _ = std::fs::remove_dir_all(d);
            }
            mojim_cli::failure::say_on_stderr("interrupted; everything was cleaned up");
            // SAFETY: ends the process without running anything more.
            unsafe { libc::_exit(128 + signal) }
        })?;
    Ok(())
}

/// A directory of our own, removed on drop.
pub struct Directory(PathBuf);

impl Directory {
    /// Makes `parent`/`name`, which must not be there.
    pub fn make(parent: &Path, name: &str) -> io::Result<Directory> {
        let path = parent.join(name);
        let mut o = owned();
        std::fs::create_dir(&path)?;
        o.directories.push(path.clone());
        Ok(Directory(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Leaves it there.
    pub fn keep(&self) {
        owned().directories.retain(|d| *d != self.0);
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let mut o = owned();
        if let Some(i) = o.directories.iter().position(|d| *d == self.0) {
            o.directories.remove(i);
            if !o.keep {
                let _ = std::fs::remove_dir_all(&self.0);
            }
        }
    }
}

/// A child; killed on drop.
pub struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
    errors: PathBuf,
    name: String,
}

impl Process {
    /// Starts the command `mojim` with `args`; its standard error goes to `errors`.
    pub fn start<S: AsRef<OsStr>>(
        name: &str,
        args: impl IntoIterator<Item = S>,
        errors: &Path,
    ) -> Result<Process, Failure> {
        Process::of(name, &mojim()?, args, errors)
    }

    /// Starts this program again; otherwise as [`Process::start`].
    pub fn start_own<S: AsRef<OsStr>>(
        name: &str,
        args: impl IntoIterator<Item = S>,
        errors: &Path,
    ) -> Result<Process, Failure> {
        Process::of(name, &std::env::current_exe()?, args, errors)
    }

    fn of<S: AsRef<OsStr>>(
        name: &str,
        program: &Path,
        args: impl IntoIterator<Item = S>,
        errors: &Path,
    ) -> Result<Process, Failure> {
        let file: File = OpenOptions::new().create(true).append(true).open(errors)?;
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file);
        // SAFETY: both are async-signal-safe system calls.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                signals::unblock()
            });
        }
        let mut o = owned();
        let mut child = command
            .spawn()
            .map_err(|e| Failure::failed(format!("starting {name}: {e}")))?;
        o.children.push(child.id() as i32);
        let out = BufReader::new(child.stdout.take().expect("it is a pipe"));
        Ok(Process {
            child,
            out,
            errors: errors.to_owned(),
            name: name.to_owned(),
        })
    }

    /// Starts the daemon of node `name` and waits until it is ready.
    pub fn node(config: &str, name: &str, errors: &Path) -> Result<Process, Failure> {
        let args = ["node", "--config", config, "--name", name];
        let mut p = Process::start(&format!("node {name}"), args, errors)?;
        p.ready()?;
        Ok(p)
    }

    /// Its standard input.
    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The next line that it prints, without its end; `None` after the last.
    /// A line without an end counts for nothing.
    pub fn line(&mut self) -> io::Result<Option<String>> {
        let mut line = String::new();
        self.out.read_line(&mut line)?;
        Ok(line.strip_suffix('\n').map(str::to_owned))
    }

    /// Its first line, which says that it is ready.
    pub fn ready(&mut self) -> Result<String, Failure> {
        match self.line()? {
            Some(l) => Ok(l),
            None => Err(self.failure("ended before it was ready")),
        }
    }

    /// Why it failed, in its own words.
    pub fn failure(&mut self, what: &str) -> Failure {
        self.kill();
        let said = std::fs::read_to_string(&self.errors).unwrap_or_default();
        let last: Vec<&str> = said.lines().rev().take(5).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        Failure::failed(format!("{} {what}:\n{}", self.name, last.join("\n")))
    }

    /// SIGKILL, without waiting for its memory to go.
    pub fn strike(&mut self) -> io::Result<()> {
        self.child.kill()
    }

    /// SIGKILL, at once.
    pub fn kill(&mut self) {
        let mut o = owned();
        let _ = self.child.kill();
        let _ = self.child.wait();
        o.children.retain(|c| *c != self.child.id() as i32);
    }

    /// SIGTERM; killed if it has not ended after `limit`. True if it ended with 0.
    pub fn stop(&mut self, limit: Duration) -> bool {
        // SAFETY: our child, which has not been reaped.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        self.finish(limit)
    }

    /// Waits for its end; kills it after `limit`. True if it ended with 0.
    pub fn finish(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let mut o = owned();
            match self.child.try_wait() {
                Ok(Some(s)) => {
                    o.children.retain(|c| *c != self.child.id() as i32);
                    return s.success();
                }
                Ok(None) if Instant::now() < deadline => {
                    drop(o);
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => {
                    drop(o);
                    self.kill();
                    return false;
                }
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// `n` TCP ports of the loopback address that are free now.
pub fn free_ports(n: usize) -> io::Result<Vec<u16>> {
    let held: io::Result<Vec<_>> = (0..n)
        .map(|_| std::net::TcpListener::bind(("127.0.0.1", 0)))
        .collect();
    held?.iter().map(|l| Ok(l.local_addr()?.port())).collect()
}
