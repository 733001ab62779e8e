//! The environment of one process.
//!
//! Owns what a process asks of its machine, except files and links. Invariant: a process
//! that has ended changes nothing, and draws no random numbers that another process would
//! draw.

use super::file::SimFile;
use super::link::SimConn;
use super::state::HandleOwner;
use crate::disk::{MAX_FILE, SECTOR, eio};
use crate::memory::Region;
use mojim_env::{Address, Conn, Env, File, FileSystem, Locker, Memory, NotPlain, OpenHow};
use std::any::Any;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The environment of one process: of one incarnation of a node.
#[derive(Clone)]
pub struct SimEnv {
    pub(super) place: HandleOwner,
    pub(super) boot_id: [u8; 16],
}

impl SimEnv {
    /// The node's name.
    pub fn node(&self) -> String {
        let st = self.place.shared.lock();
        st.nodes[self.place.node].name.to_string()
    }

    /// Whether the process still runs.
    pub fn alive(&self) -> bool {
        self.place.enter().is_ok()
    }
}

impl Env for SimEnv {
    fn now(&self) -> Duration {
        self.place.shared.lock().ctx.now
    }

    fn boot_id(&self) -> [u8; 16] {
        self.boot_id
    }

    fn random(&self) -> u64 {
        let mut st = self.place.shared.lock();
        let node = &mut st.nodes[self.place.node];
        let alive = node.running && node.incarnation == self.place.incarnation;
        let rng = match alive {
            true => &mut node.rng,
            false => &mut node.dead_rng,
        };
        loop {
            match rng.next_u64() {
                0 => {}
                n => return n,
            }
        }
    }

    fn sector(&self, _path: &Path) -> io::Result<usize> {
        self.place.enter().map(|_| SECTOR)
    }

    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        let mut st = self.place.enter()?;
        let n = self.place.node;
        let exists = st.nodes[n].disk.exists(path);
        if how.plain && st.nodes[n].disk.is_link(path) {
            return Err(NotPlain("a symbolic link").into());
        }
        let ino = if how.create && !exists {
            st.change(
                n,
                || format!("create {}", path.display()),
                |disk, _, _| disk.open(path, true),
            )?
        } else {
            st.nodes[n].disk.open(path, false)?
        };
        Ok(Arc::new(SimFile {
            place: self.place.clone(),
            path: path.to_path_buf(),
            ino,
            how,
        }))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("mkdir {}", path.display()),
            |disk, _, _| disk.create_dir_all(path),
        )
    }

    fn file_system(&self, _dir: &Path) -> io::Result<Arc<dyn FileSystem>> {
        drop(self.place.enter()?);
        Ok(Arc::new(SimFileSystem(self.place.clone())))
    }

    fn remove_empty_dirs(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("remove directories {}", path.display()),
            |disk, _, _| disk.remove_empty_dirs(path),
        )
    }

    fn max_file_size(&self, _dir: &Path) -> io::Result<u64> {
        self.place.enter().map(|_| MAX_FILE)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("remove {}", path.display()),
            |disk, _, _| disk.remove(path),
        )
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("rename {} to {}", from.display(), to.display()),
            |disk, _, _| disk.rename(from, to),
        )
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("sync directory {}", path.display()),
            |disk, ctx, node| {
                if ctx.failure(ctx.faults.sync_error, "sync errors", node) {
                    return Err(eio());
                }
                disk.sync_dir(path)
            },
        )
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.place.enter()?.nodes[self.place.node].disk.list(path)
    }

    fn lock(&self, path: &Path, locker: Locker) -> io::Result<Box<dyn Any + Send + Sync>> {
        let mut st = self.place.enter()?;
        let node = &mut st.nodes[self.place.node];
        if node.locks.contains_key(path) {
            let text = format!(
                "{} is locked by {}, process {}",
                path.display(),
                node.name,
                node.incarnation
            );
            return Err(io::Error::new(ErrorKind::WouldBlock, text));
        }
        node.locks.insert(path.to_path_buf(), locker);
        Ok(Box::new(SimLock {
            place: self.place.clone(),
            path: path.to_path_buf(),
        }))
    }

    fn locker(&self, path: &Path) -> io::Result<Option<Locker>> {
        let st = self.place.enter()?;
        Ok(st.nodes[self.place.node].locks.get(path).copied())
    }

    fn memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        let mut st = self.place.enter()?;
        let memories = &mut st.nodes[self.place.node].memories;
        match memories.get(path) {
            Some(region) if region.len() == len => Ok(region.memory()),
            _ => {
                let region = Region::new(len);
                memories.insert(path.to_path_buf(), region.clone());
                Ok(region.memory())
            }
        }
    }

    fn remove_memory(&self, path: &Path) -> io::Result<()> {
        let mut st = self.place.enter()?;
        match st.nodes[self.place.node].memories.remove(path) {
            Some(_) => Ok(()),
            None => Err(ErrorKind::NotFound.into()),
        }
    }

    fn anonymous_memory(&self, len: usize) -> io::Result<Memory> {
        self.place.enter().map(|_| Region::new(len).memory())
    }

    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        self.place.enter()?.change(
            self.place.node,
            || format!("pmem {} of {len}", path.display()),
            |disk, ctx, _| {
                let pmem = disk.pmem(path, len);
                if let Err(error) = &pmem
                    && error.kind() == ErrorKind::StorageFull
                {
                    ctx.hit("no space");
                }
                pmem.map(|p| p.region.memory())
            },
        )
    }

    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        assert!(
            offset <= memory.len() && len <= memory.len() - offset,
            "flush of {offset}+{len} in {} bytes",
            memory.len()
        );
        let Ok(mut st) = self.place.enter() else {
            return;
        };
        let n = self.place.node;
        let crash = st.step(n, || format!("flush {offset}+{len}"));
        let st = &mut *st;
        if let Some((pmem, at)) = st.nodes[n].disk.pmem_at(memory.ptr()) {
            match crash {
                None => pmem.flush(at + offset, len),
                Some(_) => {
                    st.ctx.hit("torn flushes");
                    pmem.flush_torn(at + offset, len, &mut st.ctx.rng);
                }
            }
        }
        if let Some(kind) = crash {
            st.crash(n, kind);
        }
    }

    fn connect(&self, to: &Address) -> io::Result<Arc<dyn Conn>> {
        let st = &mut *self.place.enter()?;
        st.trace(self.place.node, || format!("connect to {to}"));
        let id = st.net.connect(self.place.node, to, &mut st.ctx);
        Ok(Arc::new(SimConn {
            place: self.place.clone(),
            id,
            end: 0,
            peer: to.to_string(),
        }))
    }
}

struct SimFileSystem(HandleOwner);

impl FileSystem for SimFileSystem {
    fn sync(&self) -> io::Result<()> {
        self.0.enter()?.change(
            self.0.node,
            || "sync the file system".to_owned(),
            |disk, ctx, node| {
                if ctx.failure(ctx.faults.sync_error, "sync errors", node) {
                    disk.sync_all_failed(&mut ctx.rng);
                    return Err(eio());
                }
                disk.sync_all();
                Ok(())
            },
        )
    }

    fn has(&self, _file: &dyn File) -> bool {
        true
    }

    fn has_dir(&self, _dir: &Path) -> bool {
        true
    }
}

struct SimLock {
    place: HandleOwner,
    path: PathBuf,
}

impl Drop for SimLock {
    fn drop(&mut self) {
        // After a crash the next process may hold the lock.
        if let Ok(mut st) = self.place.enter() {
            st.nodes[self.place.node].locks.remove(&self.path);
        }
    }
}
