//! A disk whose syncs fail when told to.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use mojim_env::{Env, File, OpenHow};
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
    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(FailingFile {
            file: self.os.open(path, how)?,
            fails: self.fails.clone(),
        }))
    }

    mojim_env::forward_env!(
        os,
        now,
        boot_id,
        random,
        sector,
        create_dir_all,
        remove,
        rename,
        sync_dir,
        list,
        lock,
        locker,
        memory,
        remove_memory,
        anonymous_memory,
        persistent_memory,
        flush,
        connect
    );
}
