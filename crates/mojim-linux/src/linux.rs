//! The Linux environment: [`Os`] implements [`Env`] over system calls.
//!
//! Owns every call of this crate into the kernel that is about files, shared
//! memory, sockets, time and chance.
//!
//! Invariants:
//! - File and memory calls are raw system calls (rustix without libc, or
//!   `libc::syscall`), never the C library's functions: this code also runs
//!   below an interposer of those. The one exception is the `close` in the
//!   drop of an `OwnedFd`, which the interposer passes through.
//! - Every descriptor is close-on-exec.
//! - No call here waits without a bound, except for the disk.

use crate::lock::Lock;
use crate::{Keys, disk, flush_range, in_memory, memory, net, tls};
use mojim_config::Config;
use mojim_config::key_files;
use mojim_env::{
    Address, Conn, Context, Env, File, FileSystem, Locker, Longest, Memory, OpenHow, Result, Space,
};
use mojim_format::certificate::Subject;
use std::any::Any;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// This machine.
#[derive(Clone)]
pub struct Os {
    boot: [u8; 16],
    /// In a cluster with keys: the keys with which the ends of connections prove their
    /// names.
    keys: Option<Arc<Keys>>,
    encrypt: bool,
}

impl Os {
    /// Fails if the kernel does not tell its boot id or has no random numbers: without
    /// them a copy lost with the power cannot be told from a good one.
    pub fn new() -> io::Result<Os> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let text = disk::read_start(path, 64)
            .map_err(|e| error(e.kind(), format!("{}: {e}", path.display())))?;
        let boot = parse_uuid(&text).ok_or_else(|| {
            error(
                io::ErrorKind::InvalidData,
                format!("{}: not a boot id", path.display()),
            )
        })?;
        random()?;
        Ok(Os {
            boot,
            keys: None,
            encrypt: true,
        })
    }

    /// This machine, as `subject` of a cluster: in one with keys, connections
    /// over TCP prove that this end is `subject`, and that the other end is the
    /// node that the configuration has there. Keys that cannot be used are an error of the
    /// configuration.
    pub fn of(config: &Config, subject: &Subject) -> Result<Os> {
        let mut os = Os::new().context(|| "starting".into())?;
        if let Some(dir) = &config.keys {
            let unfit = |e| mojim_env::Error::Config(format!("the keys of {subject}: {e}"));
            os.keys = Some(Keys::load(config, dir, subject).map_err(unfit)?);
        }
        Ok(os)
    }

    /// This machine, as an operator's tool: with a client's certificate or, if there is
    /// none, with that of a node.
    pub fn asking(config: &Config) -> Result<Os> {
        let nodes = config.nodes.keys().cloned().map(Subject::Node);
        let mut all = std::iter::once(Subject::Client).chain(nodes);
        let there = |s: &Subject| match &config.keys {
            Some(dir) => rustix::fs::stat(key_files::certificate(dir, s)).is_ok(),
            None => true,
        };
        Os::of(config, &all.find(there).unwrap_or(Subject::Client))
    }

    /// This environment, with links that are encrypted, or that are plain once both ends
    /// have proved their names.
    pub fn encrypting(mut self, encrypt: bool) -> Os {
        self.encrypt = encrypt;
        self
    }

    /// Adds a node that the configuration has by now, and where it listens: this
    /// environment and all its clones know it from here on.
    pub fn meet(&self, name: &str, at: &Address) -> Result<()> {
        let (Some(keys), Address::Tcp(at)) = (&self.keys, at) else {
            return Ok(());
        };
        let met = keys.meet(name, *at);
        met.context(|| format!("how to reach node {name}"))
    }

    /// The keys, for a listener's door.
    pub fn keys(&self) -> Option<Arc<Keys>> {
        self.keys.clone()
    }
}

impl Env for Os {
    fn now(&self) -> Duration {
        now()
    }
    fn boot_id(&self) -> [u8; 16] {
        self.boot
    }
    fn random(&self) -> u64 {
        random().expect("getrandom worked when this environment was made")
    }
    fn sector(&self, path: &Path) -> io::Result<usize> {
        disk::sector(path)
    }
    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        let file = disk::DiskFile::open(path, how)?;
        Ok(match how.durable && how.write {
            true => in_memory::of(file),
            false => Arc::new(file),
        })
    }
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        disk::create_dir_all(path)
    }
    fn close_dir(&self, path: &Path) -> io::Result<()> {
        disk::close_dir(path)
    }
    fn create_dirs(&self, path: &Path) -> io::Result<()> {
        disk::create_dirs(path)
    }
    fn file_system(&self, dir: &Path) -> io::Result<Arc<dyn FileSystem>> {
        Ok(Arc::new(disk::WholeDisk::open(dir)?))
    }
    fn remove_empty_dirs(&self, path: &Path) -> io::Result<()> {
        disk::remove_empty_dirs(path)
    }
    fn max_file_size(&self, dir: &Path) -> io::Result<u64> {
        disk::max_file_size(dir)
    }
    fn reach(&self, dir: &Path) -> io::Result<(u64, u64)> {
        disk::reach(dir)
    }
    fn longest_names(&self, dir: &Path) -> io::Result<Longest> {
        disk::longest_names(dir)
    }
    fn file_size_limit(&self) -> u64 {
        disk::file_size_limit()
    }
    fn space(&self, dir: &Path) -> io::Result<Space> {
        disk::space(dir)
    }
    fn most_open(&self) -> usize {
        disk::most_open()
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::unlink(path)?)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::rename(from, to)?)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        disk::sync_dir(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        disk::list(path)
    }
    fn lock(&self, path: &Path, locker: Locker) -> io::Result<Box<dyn Any + Send + Sync>> {
        Ok(Box::new(Lock::take(path, locker)?))
    }
    fn locker(&self, path: &Path) -> io::Result<Option<Locker>> {
        Lock::locker(path)
    }
    fn memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        memory::named(path, len)
    }
    fn populate(&self, memory: &Memory) {
        memory::populate(memory)
    }
    fn remove_memory(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::unlink(path)?)
    }
    fn anonymous_memory(&self, len: usize) -> io::Result<Memory> {
        memory::anonymous(len)
    }
    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        memory::persistent(path, len)
    }
    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        assert!(
            offset
                .checked_add(len)
                .is_some_and(|end| end <= memory.len()),
            "flush of {len} bytes at {offset} in memory of {}",
            memory.len()
        );
        // SAFETY: the range was just checked to lie in the memory, which is
        // mapped as long as `memory` lives.
        unsafe { flush_range(memory.ptr().add(offset), len) }
    }
    fn connect(&self, to: &Address) -> io::Result<Arc<dyn Conn>> {
        match (&self.keys, to) {
            (Some(keys), Address::Tcp(at)) => {
                Ok(Arc::new(tls::Tls::connect(keys, *at, self.encrypt)?))
            }
            _ => Ok(Arc::new(net::Socket::connect(to)?)),
        }
    }
}

/// Keeps this process, which has keys and the bytes of volumes, out of core dumps, and out of reach of
/// other processes of its user. For daemons: a program's own dumps stay its own matter.
pub fn hide_memory() {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    // It cannot fail with this value; a daemon that is not hidden works all the same.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// An error with a text of our own.
pub fn error(kind: io::ErrorKind, text: impl Into<String>) -> io::Error {
    io::Error::new(kind, text.into())
}

/// `CLOCK_MONOTONIC`.
pub fn now() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

pub fn random() -> io::Result<u64> {
    loop {
        let mut value = 0u64;
        // SAFETY: the kernel writes at most the 8 bytes of `value`.
        let n = unsafe { libc::syscall(libc::SYS_getrandom, &raw mut value, size_of::<u64>(), 0) };
        if n < 0 {
            let e = io::Error::last_os_error();
            if e.kind() != io::ErrorKind::Interrupted {
                return Err(e);
            }
        } else if n as usize == size_of::<u64>() && value != 0 {
            return Ok(value);
        }
    }
}

/// 32 hexadecimal digits, with dashes and white space anywhere.
fn parse_uuid(text: &[u8]) -> Option<[u8; 16]> {
    let mut digits = text
        .iter()
        .filter(|c| **c != b'-' && !c.is_ascii_whitespace());
    let mut id = [0u8; 16];
    let mut digit = || (*digits.next()? as char).to_digit(16);
    for byte in &mut id {
        *byte = (digit()? << 4 | digit()?) as u8;
    }
    digits.next().is_none().then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_id_is_the_same_each_time() {
        let a = Os::new().unwrap().boot_id();
        assert_eq!(a, Os::new().unwrap().boot_id());
        assert_ne!(a, [0; 16]);
    }

    /// A daemon's core dump had its keys, and the bytes of its volumes.
    #[test]
    fn a_daemon_leaves_no_core_dump() {
        // SAFETY: the child makes system calls only, and ends by `_exit`.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                hide_memory();
                libc::_exit(libc::prctl(libc::PR_GET_DUMPABLE));
            }
            child
        };
        let mut status = 0;
        // SAFETY: a place for the status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
    }

    #[test]
    fn uuids() {
        let mut want = [0u8; 16];
        want[0] = 0xa1;
        want[15] = 0x0f;
        assert_eq!(
            parse_uuid(b"a1000000-0000-0000-0000-00000000000f\n"),
            Some(want)
        );
        assert_eq!(parse_uuid(b"a1000000-0000-0000-0000-00000000000"), None);
        assert_eq!(parse_uuid(b"a1000000-0000-0000-0000-00000000000f0"), None);
        assert_eq!(parse_uuid(b"x1000000-0000-0000-0000-00000000000f"), None);
    }

    #[test]
    fn random_numbers_and_time() {
        let os = Os::new().unwrap();
        assert_ne!(os.random(), 0);
        assert_ne!(os.random(), os.random());
        let before = os.now();
        assert!(os.now() >= before);
    }
}
