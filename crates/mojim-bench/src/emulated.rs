//! An emulated disk for the mirror's log: the log lies in memory, and each durable write of it takes a given
//! time. So one machine says what two would, of which each has a disk.
//!
//! Owns the node's process whose machine is so: this program again, with a hidden word. No configuration
//! of Mojim leads here.
//!
//! Invariants:
//! - A durable write returns not before its time is over. Writes side by side do not wait for each other.
//! - Everything else is the machine's own, also the mirror's data files.

use std::hint::spin_loop;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mojim_cli::failure::Done;
use mojim_cli::signals;
use mojim_config::Config;
use mojim_env::{Env, File, OpenHow};
use mojim_linux::Os;
use mojim_node::Node;

/// The hidden word.
pub(crate) const WORD: &str = "__node";
/// The most microseconds of a write.
pub(crate) const MOST_MICROS: u64 = 1_000_000;

/// A node whose log is on an emulated disk, until a signal ends it.
#[derive(clap::Args)]
pub struct EmulatedNode {
    /// The configuration file.
    #[arg(long)]
    config: PathBuf,
    /// Which node.
    #[arg(long)]
    name: String,
    /// Microseconds of a durable write.
    #[arg(long)]
    takes: u64,
}

impl EmulatedNode {
    /// Runs it.
    pub fn run(self) -> Done {
        signals::block()?;
        wake_on_time();
        let config = Config::load(&self.config)?;
        let takes = Duration::from_micros(self.takes);
        let over = move |os| -> Arc<dyn Env> { Arc::new(Machine { os, takes }) };
        let node = Node::start_over(&config, &self.name, None, over)?;
        let mut out = io::stdout().lock();
        // Who has started it may not read that.
        let _ = writeln!(out, "node {} is ready", self.name).and_then(|()| out.flush());
        signals::wait()?;
        node.stop();
        Ok(0)
    }
}

/// The command that is this node's process.
pub(crate) fn command(config: &Path, name: &str, takes: Duration) -> io::Result<Command> {
    let mut c = Command::new(std::env::current_exe()?);
    c.args([WORD, "--name", name]);
    c.args(["--takes", &takes.as_micros().to_string()]);
    c.arg("--config").arg(config);
    Ok(c)
}

/// Threads that are started from now on are not woken some 50 µs later than they ask for.
fn wake_on_time() {
    // SAFETY: takes a number.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

/// This machine, with another disk under what is opened durable.
struct Machine {
    os: Os,
    takes: Duration,
}

/// A file on the emulated disk.
struct Slow {
    inner: Arc<dyn File>,
    takes: Duration,
    /// Nanoseconds by which threads are woken late, about.
    late: AtomicU64,
}

impl Slow {
    /// Waits until a write is over that began then: asleep, as for a disk, but for the last moment.
    fn wait(&self, begun: Instant) {
        let due = begun + self.takes;
        let late = self.late.load(Relaxed);
        let asleep = due.saturating_duration_since(Instant::now());
        let asleep = asleep.saturating_sub(Duration::from_nanos(late));
        if !asleep.is_zero() {
            let before = Instant::now();
            std::thread::sleep(asleep);
            let over = before.elapsed().saturating_sub(asleep);
            let over = over.min(self.takes).as_nanos() as u64;
            self.late.store((7 * late + over) / 8, Relaxed);
        }
        while Instant::now() < due {
            spin_loop();
        }
    }
}

impl File for Slow {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let begun = Instant::now();
        let written = self.inner.write_at(buf, offset);
        self.wait(begun);
        written
    }
    fn sync(&self) -> io::Result<()> {
        let begun = Instant::now();
        let synced = self.inner.sync();
        self.wait(begun);
        synced
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
    fn allocate(&self, _len: u64) -> io::Result<()> {
        // Memory is taken as it is written to.
        Ok(())
    }
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.inner.next_data(offset)
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.fd()
    }
}

impl Env for Machine {
    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        let inner = self.os.open(path, how)?;
        if !how.durable {
            return Ok(inner);
        }
        let (takes, late) = (self.takes, AtomicU64::new(0));
        Ok(Arc::new(Slow { inner, takes, late }))
    }

    mojim_env::forward_env!(
        os,
        now,
        boot_id,
        random,
        sector,
        create_dir_all,
        close_dir,
        create_dirs,
        file_system,
        remove_empty_dirs,
        max_file_size,
        reach,
        longest_names,
        file_size_limit,
        space,
        most_open,
        remove,
        rename,
        sync_dir,
        list,
        lock,
        locker,
        memory,
        populate,
        remove_memory,
        anonymous_memory,
        persistent_memory,
        flush,
        connect
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn only_durable_writes_take_their_time_and_all_bytes_are_there() {
        let dir = Scratch::new().unwrap();
        let takes = Duration::from_millis(2);
        let os = Os::new().unwrap();
        let machine = Machine { os, takes };
        let open = |name: &str, durable| {
            let how = OpenHow {
                create: true,
                write: true,
                durable,
                ..OpenHow::default()
            };
            machine.open(&dir.path().join(name), how).unwrap()
        };
        let (log, data) = (open("log", true), open("data", false));
        log.allocate(1 << 20).unwrap();
        // A durable write's bytes lie at a border of sectors, in memory, too.
        let memory = vec![7_u8; 3 * 4096];
        let page = &memory[memory.as_ptr().align_offset(4096)..][..4096];
        for n in 0..20 {
            let begun = Instant::now();
            log.write_at(page, n * 4096).unwrap();
            assert!(begun.elapsed() >= takes, "{n}");
        }
        data.write_at(page, 0).unwrap();
        assert_eq!(log.len().unwrap(), 20 * 4096);
        for name in ["log", "data"] {
            let bytes = std::fs::read(dir.path().join(name)).unwrap();
            assert!(bytes.iter().all(|b| *b == 7), "{name}");
        }
    }
}
