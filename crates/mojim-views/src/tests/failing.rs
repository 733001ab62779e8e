//! A disk whose syncs fail when told to.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use mojim_env::{Address, Conn, Env, File, Locker, Memory, OpenHow};
use mojim_linux::Os;

/// This machine, but its disk fails when told to.
pub struct Failing {
    os: Os,
    fails: Arc<AtomicBool>,
}

impl Default for Failing {
    fn default() -> Failing {
        Failing {
            os: Os::new().unwrap(),
            fails: Arc::default(),
        }
    }
}

impl Failing {
    /// From now on its syncs fail, or not any more.
    pub fn fail(&self, fails: bool) {
        self.fails.store(fails, SeqCst);
    }
}

struct FailingFile {
    file: Arc<dyn File>,
    fails: Arc<AtomicBool>,
}

fn try_it(fails: &AtomicBool) -> io::Result<()> {
    match fails.load(SeqCst) {
        true => Err(io::Error::from_raw_os_error(libc::EIO)),
        false => Ok(()),
    }
}

impl File for FailingFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(buf, offset)
    }
    fn sync(&self) -> io::Result<()> {
        try_it(&self.fails)?;
        self.file.sync()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn allocate(&self, len: u64) -> io::Result<()> {
        self.file.allocate(len)
    }
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.file.next_data(offset)
    }
}

impl Env for Failing {
    fn now(&self) -> Duration {
        self.os.now()
    }
    fn boot_id(&self) -> [u8; 16] {
        self.os.boot_id()
    }
    fn random(&self) -> u64 {
        self.os.random()
    }
    fn sector(&self, path: &Path) -> io::Result<usize> {
        self.os.sector(path)
    }
    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(FailingFile {
            file: self.os.open(path, how)?,
            fails: self.fails.clone(),
        }))
    }
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.os.create_dir_all(path)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.os.remove(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.os.rename(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.os.sync_dir(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.os.list(path)
    }
    fn lock(&self, path: &Path, locker: Locker) -> io::Result<Box<dyn Any + Send + Sync>> {
        self.os.lock(path, locker)
    }
    fn locker(&self, path: &Path) -> io::Result<Option<Locker>> {
        self.os.locker(path)
    }
    fn memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        self.os.memory(path, len)
    }
    fn remove_memory(&self, path: &Path) -> io::Result<()> {
        self.os.remove_memory(path)
    }
    fn anonymous_memory(&self, len: usize) -> io::Result<Memory> {
        self.os.anonymous_memory(len)
    }
    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        self.os.persistent_memory(path, len)
    }
    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        self.os.flush(memory, offset, len);
    }
    fn connect(&self, to: &Address) -> io::Result<Arc<dyn Conn>> {
        self.os.connect(to)
    }
}
