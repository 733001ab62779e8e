//! One node's disk: what its processes read, and what a power loss would leave of it.
//!
//! Owns files, names and directories, each twice: as cached (what calls see)
//! and as durable (what survives a loss of power).
//!
//! Invariants:
//! - A sector is `dirty` or `lost`, or its cached and durable bytes are the same.
//! - `sync` and durable writes change the durable side at once. Before a power loss only
//!   write-back changes it otherwise, at any time.
//! - `pending` holds the name operations that the durable names lack, in
//!   order. A power loss applies a prefix of them.
//! - Bytes beyond a file's end are zero on both sides after each call, except after a
//!   truncation that is not durable yet (`cut`).

use crate::ctx::Ctx;
use crate::memory::Pmem;
use crate::rng::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The unit of durable writes, in bytes.
pub const SECTOR: usize = 512;

const PAGE: usize = 4096;
const SECTORS: usize = PAGE / SECTOR;

/// Input/output error.
pub(crate) fn eio() -> io::Error {
    io::Error::from_raw_os_error(5)
}

fn no_space() -> io::Error {
    io::Error::from_raw_os_error(28)
}

fn error(kind: io::ErrorKind, path: &Path) -> io::Error {
    io::Error::new(kind, path.display().to_string())
}

/// 4 KiB of a file, as cached and as durable.
#[derive(Debug)]
struct Page {
    cache: [u8; PAGE],
    durable: [u8; PAGE],
    /// Sectors that the next sync writes.
    dirty: u8,
    /// Sectors that a failed sync gave up: cached and durable bytes may differ
    /// though nothing will write them.
    lost: u8,
    /// Listed in `Inode::touched`.
    touched: bool,
}

impl Page {
    fn persist(&mut self, sectors: u8) {
        if sectors == 0xff {
            self.durable = self.cache;
        } else {
            for s in 0..SECTORS {
                if sectors & (1 << s) != 0 {
                    let r = s * SECTOR..(s + 1) * SECTOR;
                    self.durable[r.clone()].copy_from_slice(&self.cache[r]);
                }
            }
        }
        self.dirty &= !sectors;
        self.lost &= !sectors;
    }
}

/// The sectors of a page that a byte range touches, as a mask.
fn mask(range: Range<usize>) -> u8 {
    let (from, to) = (range.start / SECTOR, range.end.div_ceil(SECTOR));
    (((1u16 << to) - 1) & !((1u16 << from) - 1)) as u8
}

/// Each set bit is kept with `keep` chances in 1000.
fn some_of(bits: u8, keep: u32, rng: &mut Rng) -> u8 {
    match keep {
        0 => 0,
        1000.. => bits,
        _ => (0..8)
            .map(|s| bits & (1 << s))
            .filter(|b| *b != 0 && rng.per_mille(keep))
            .sum(),
    }
}

#[derive(Debug, Default)]
struct Inode {
    pages: Vec<Option<Box<Page>>>,
    len: u64,
    durable_len: u64,
    /// The shortest length since the last sync, if the file was truncated.
    cut: Option<u64>,
    /// Pages whose two sides may differ.
    touched: Vec<u32>,
    /// Bytes reserved.
    reserved: u64,
    durable_reserved: u64,
    /// Open handles.
    open: u32,
    pmem: Option<Pmem>,
    /// It is no plain file: what is read and written through it lies elsewhere.
    is_link: bool,
}

impl Inode {
    fn page(&mut self, n: usize) -> &mut Page {
        if self.pages.len() <= n {
            self.pages.resize_with(n + 1, || None);
        }
        self.pages[n].get_or_insert_with(|| {
            Box::new(Page {
                cache: [0; PAGE],
                durable: [0; PAGE],
                dirty: 0,
                lost: 0,
                touched: false,
            })
        })
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        if offset >= self.len {
            return 0;
        }
        let n = buf.len().min((self.len - offset) as usize);
        let mut done = 0;
        while done < n {
            let at = offset as usize + done;
            let (p, o) = (at / PAGE, at % PAGE);
            let m = (PAGE - o).min(n - done);
            let to = &mut buf[done..done + m];
            match self.pages.get(p) {
                Some(Some(page)) => to.copy_from_slice(&page.cache[o..o + m]),
                _ => to.fill(0),
            }
            done += m;
        }
        n
    }

    fn write(&mut self, data: &[u8], offset: u64, durable: bool) {
        if data.is_empty() {
            return;
        }
        if durable {
            self.apply_cut();
        }
        let mut done = 0;
        while done < data.len() {
            let at = offset as usize + done;
            let (p, o) = (at / PAGE, at % PAGE);
            let m = (PAGE - o).min(data.len() - done);
            let from = &data[done..done + m];
            let page = self.page(p);
            page.cache[o..o + m].copy_from_slice(from);
            let sectors = mask(o..o + m);
            if durable {
                page.durable[o..o + m].copy_from_slice(from);
                page.dirty &= !sectors;
                page.lost &= !sectors;
            } else {
                page.dirty |= sectors;
                if !page.touched {
                    page.touched = true;
                    self.touched.push(p as u32);
                }
            }
            done += m;
        }
        let end = offset + data.len() as u64;
        self.len = self.len.max(end);
        if durable {
            self.durable_len = self.durable_len.max(end);
        }
    }

    fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.cut = Some(self.cut.unwrap_or(len).min(len));
            let first = len as usize / PAGE;
            for p in first..self.pages.len() {
                let Some(page) = &mut self.pages[p] else {
                    continue;
                };
                let from = (len as usize).saturating_sub(p * PAGE).min(PAGE);
                page.cache[from..].fill(0);
                let beyond = from.next_multiple_of(SECTOR);
                if beyond < PAGE {
                    page.dirty &= !mask(beyond..PAGE);
                }
                if !page.touched {
                    page.touched = true;
                    self.touched.push(p as u32);
                }
            }
        }
        self.len = len;
    }

    /// Makes a truncation durable.
    fn apply_cut(&mut self) {
        if let Some(cut) = self.cut.take() {
            self.durable_len = self.durable_len.min(cut);
            for p in cut as usize / PAGE..self.pages.len() {
                if let Some(page) = &mut self.pages[p] {
                    let from = (cut as usize).saturating_sub(p * PAGE).min(PAGE);
                    page.durable[from..].fill(0);
                }
            }
        }
    }

    fn sync(&mut self) {
        self.apply_cut();
        self.durable_len = self.len;
        self.durable_reserved = self.reserved;
        let mut touched = std::mem::take(&mut self.touched);
        touched.retain(|p| {
            let page = self.page(*p as usize);
            page.persist(page.dirty);
            page.touched = page.lost != 0;
            page.touched
        });
        self.touched = touched;
    }

    /// A sync that fails: bytes that it did not write are never written.
    fn sync_failed(&mut self, rng: &mut Rng) {
        // Nothing behind a truncation that is not durable is written: the truncation
        // would undo it when it becomes durable.
        let keep = if self.cut.is_none() { 500 } else { 0 };
        if rng.per_mille(keep) {
            self.durable_len = self.len;
        }
        for i in 0..self.touched.len() {
            let p = self.touched[i] as usize;
            let page = self.page(p);
            let kept = some_of(page.dirty, keep, rng);
            let dropped = page.dirty & !kept;
            page.persist(kept);
            page.dirty = 0;
            page.lost |= dropped;
        }
    }

    /// The kernel writes some dirty sectors by itself.
    fn write_back(&mut self, rng: &mut Rng) {
        if self.cut.is_some() {
            return;
        }
        for i in 0..self.touched.len() {
            let p = self.touched[i] as usize;
            let page = self.page(p);
            let some = some_of(page.dirty, 500, rng);
            page.persist(some);
            // The page stays listed until the next sync.
        }
    }

    fn power_loss(&mut self, keep: u32, ctx: &mut Ctx) {
        self.open = 0;
        if let Some(pmem) = &mut self.pmem {
            let words = pmem.power_loss(keep, &mut ctx.rng);
            ctx.add("pmem words dropped", words);
            return;
        }
        if self.cut.is_some() {
            if ctx.rng.per_mille(keep) {
                self.apply_cut();
            } else {
                self.cut = None;
                ctx.hit("lost truncations");
            }
        }
        if self.len != self.durable_len {
            if ctx.rng.per_mille(keep) {
                self.durable_len = self.len;
            } else {
                ctx.hit("lost lengths");
            }
        }
        let mut dropped = 0;
        for p in std::mem::take(&mut self.touched) {
            let page = self.page(p as usize);
            let kept = some_of(page.dirty, keep, &mut ctx.rng);
            dropped += (page.dirty & !kept).count_ones() + page.lost.count_ones();
            page.persist(kept);
            page.cache = page.durable;
            (page.dirty, page.lost, page.touched) = (0, 0, false);
        }
        ctx.add("dropped sectors", u64::from(dropped));
        let pages = self.pages.iter().flatten();
        debug_assert!(
            pages.into_iter().all(|p| p.cache == p.durable),
            "a page differs from the medium and is not listed"
        );
        self.len = self.durable_len;
        let end = self.len as usize;
        self.pages.truncate(end.div_ceil(PAGE));
        if let Some(Some(page)) = self.pages.get_mut(end / PAGE) {
            page.cache[end % PAGE..].fill(0);
            page.durable[end % PAGE..].fill(0);
        }
        if ctx.rng.coin() {
            self.durable_reserved = self.reserved;
        }
        self.reserved = self.durable_reserved;
    }

    /// Pages that the file takes from the quota.
    fn used(&self) -> u64 {
        if let Some(pmem) = &self.pmem {
            return pmem.image.len().div_ceil(PAGE) as u64;
        }
        let reserved = self.reserved.div_ceil(PAGE as u64);
        let beyond = self.pages.iter().skip(reserved as usize);
        reserved + beyond.filter(|p| p.is_some()).count() as u64
    }
}

/// A change of the names.
#[derive(Debug)]
enum NameOp {
    MakeDir(PathBuf),
    RemoveDir(PathBuf),
    Make(PathBuf, u64),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
}

impl NameOp {
    fn paths(&self) -> [&Path; 2] {
        match self {
            NameOp::MakeDir(p) | NameOp::RemoveDir(p) | NameOp::Make(p, _) | NameOp::Remove(p) => {
                [p, p]
            }
            NameOp::Rename(from, to) => [from, to],
        }
    }
}

/// The greatest length of a file, in bytes.
pub(crate) const MAX_FILE: u64 = (1 << 43) - 1;

/// The names of one disk.
#[derive(Debug, Default, Clone)]
struct Names {
    files: BTreeMap<PathBuf, u64>,
    dirs: BTreeSet<PathBuf>,
}

impl Names {
    fn apply(&mut self, op: &NameOp) {
        match op {
            NameOp::MakeDir(p) => {
                self.dirs.insert(p.clone());
            }
            NameOp::RemoveDir(p) => {
                self.dirs.remove(p);
            }
            NameOp::Make(p, ino) => {
                self.files.insert(p.clone(), *ino);
            }
            NameOp::Remove(p) => {
                self.files.remove(p);
            }
            NameOp::Rename(from, to) => {
                if let Some(ino) = self.files.remove(from) {
                    self.files.insert(to.clone(), ino);
                }
            }
        }
    }

    fn is_dir(&self, path: &Path) -> bool {
        path.as_os_str().is_empty() || path.parent().is_none() || self.dirs.contains(path)
    }
}

/// What a disk had durably at one moment.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    names: Names,
    files: BTreeMap<u64, KeptFile>,
}

#[derive(Debug)]
struct KeptFile {
    pages: Vec<Option<Box<[u8; PAGE]>>>,
    len: u64,
    reserved: u64,
    pmem: Option<Vec<u8>>,
    is_link: bool,
}

impl KeptFile {
    fn of(inode: &Inode) -> KeptFile {
        let durable = |p: &Option<Box<Page>>| p.as_ref().map(|p| Box::new(p.durable));
        KeptFile {
            pages: inode.pages.iter().map(durable).collect(),
            len: inode.durable_len,
            reserved: inode.durable_reserved,
            pmem: inode.pmem.as_ref().map(|p| p.image.clone()),
            is_link: inode.is_link,
        }
    }

    fn inode(&self) -> Inode {
        let page = |bytes: &[u8; PAGE]| {
            Box::new(Page {
                cache: *bytes,
                durable: *bytes,
                dirty: 0,
                lost: 0,
                touched: false,
            })
        };
        let mut inode = Inode {
            pages: self.pages.iter().map(|p| p.as_deref().map(page)).collect(),
            len: self.len,
            durable_len: self.len,
            reserved: self.reserved,
            durable_reserved: self.reserved,
            is_link: self.is_link,
            ..Inode::default()
        };
        if let Some(image) = &self.pmem {
            let pmem = inode.pmem.insert(Pmem::new(image.len()));
            pmem.region.write(0, image);
            pmem.image.clone_from(image);
        }
        // Bytes beyond the end are zero.
        let end = self.len as usize;
        inode.pages.truncate(end.div_ceil(PAGE));
        if let Some(Some(page)) = inode.pages.get_mut(end / PAGE) {
            page.cache[end % PAGE..].fill(0);
            page.durable[end % PAGE..].fill(0);
        }
        inode
    }
}

/// A node's disk.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    inodes: BTreeMap<u64, Inode>,
    next_ino: u64,
    live: Names,
    durable: Names,
    pending: Vec<NameOp>,
    /// A file may have lost its last name since the last collection.
    garbage: bool,
    quota: Option<u64>,
    misdirect: Option<(u64, u64)>,
}

impl Disk {
    fn inode(&mut self, ino: u64) -> &mut Inode {
        self.inodes.get_mut(&ino).expect("an open file's inode")
    }

    fn name(&mut self, op: NameOp) {
        self.live.apply(&op);
        self.pending.push(op);
    }

    pub(crate) fn exists(&self, path: &Path) -> bool {
        self.live.files.contains_key(path)
    }

    /// Finds or creates a file, and counts a handle on it.
    pub(crate) fn open(&mut self, path: &Path, create: bool) -> io::Result<u64> {
        let ino = self.find_or_make(path, create)?;
        self.inode(ino).open += 1;
        Ok(ino)
    }

    fn find_or_make(&mut self, path: &Path, create: bool) -> io::Result<u64> {
        if let Some(ino) = self.live.files.get(path) {
            return Ok(*ino);
        }
        if self.live.is_dir(path) {
            return Err(error(io::ErrorKind::IsADirectory, path));
        }
        if !create || !path.parent().is_some_and(|d| self.live.is_dir(d)) {
            return Err(error(io::ErrorKind::NotFound, path));
        }
        self.next_ino += 1;
        let ino = self.next_ino;
        self.inodes.insert(ino, Inode::default());
        self.name(NameOp::Make(path.to_path_buf(), ino));
        Ok(ino)
    }

    /// Somebody has put a symbolic link there, durably, to a file elsewhere with these bytes.
    pub(crate) fn put_link(&mut self, path: &Path, bytes: &[u8], ctx: &mut Ctx) -> io::Result<()> {
        let ino = self.find_or_make(path, true)?;
        self.write(ino, bytes, 0, false, ctx)?;
        self.sync(ino);
        self.inode(ino).is_link = true;
        let dir = path.parent().expect("it was found there").to_owned();
        self.sync_dir(&dir)
    }

    /// Whether something lies there that is no plain file.
    pub(crate) fn is_link(&self, path: &Path) -> bool {
        let ino = self.live.files.get(path);
        let inode = ino.and_then(|ino| self.inodes.get(ino));
        inode.is_some_and(|inode| inode.is_link)
    }

    pub(crate) fn close(&mut self, ino: u64) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.open = inode.open.saturating_sub(1);
        }
    }

    /// Persistent memory by name; of another length it is made anew.
    pub(crate) fn pmem(&mut self, path: &Path, len: usize) -> io::Result<&Pmem> {
        let ino = self.find_or_make(path, true)?;
        let old = match &self.inode(ino).pmem {
            Some(pmem) => pmem.image.len(),
            None => 0,
        };
        if old != len {
            self.room((len.div_ceil(PAGE) as u64).saturating_sub(old.div_ceil(PAGE) as u64))?;
        }
        let inode = self.inode(ino);
        if inode.pmem.as_ref().is_none_or(|p| p.image.len() != len) {
            let mut pmem = Pmem::new(len);
            // What was written to it as a file is kept.
            for (n, page) in std::mem::take(&mut inode.pages).iter().enumerate() {
                let from = n * PAGE;
                if let Some(page) = page
                    && from < len
                {
                    let m = PAGE.min(len - from);
                    pmem.region.write(from, &page.cache[..m]);
                    pmem.image[from..from + m].copy_from_slice(&page.durable[..m]);
                }
            }
            inode.touched.clear();
            inode.cut = None;
            inode.pmem = Some(pmem);
        }
        (inode.len, inode.durable_len) = (len as u64, len as u64);
        Ok(inode.pmem.as_ref().expect("made above"))
    }

    /// The persistent memory that `ptr` points into, and where.
    pub(crate) fn pmem_at(&mut self, ptr: *mut u8) -> Option<(&mut Pmem, usize)> {
        self.inodes.values_mut().find_map(|inode| {
            let pmem = inode.pmem.as_mut()?;
            let at = pmem.offset_of(ptr)?;
            Some((pmem, at))
        })
    }

    /// Fails unless the quota has room for `pages` more pages.
    fn room(&self, pages: u64) -> io::Result<()> {
        let Some(quota) = self.quota else {
            return Ok(());
        };
        if pages == 0 {
            return Ok(());
        }
        if (self.used() + pages) * PAGE as u64 > quota {
            return Err(no_space());
        }
        Ok(())
    }

    pub(crate) fn used(&self) -> u64 {
        let named: BTreeSet<u64> = self.live.files.values().copied().collect();
        let counted = |(ino, inode): &(&u64, &Inode)| inode.open > 0 || named.contains(ino);
        let inodes = self.inodes.iter().filter(counted);
        inodes.map(|(_, inode)| inode.used()).sum()
    }

    pub(crate) fn set_quota(&mut self, quota: Option<u64>) {
        self.quota = quota;
    }

    pub(crate) fn read(&mut self, ino: u64, buf: &mut [u8], offset: u64) -> usize {
        let inode = self.inode(ino);
        let Some(pmem) = &inode.pmem else {
            return inode.read(buf, offset);
        };
        let len = pmem.region.len();
        let at = usize::try_from(offset).unwrap_or(len).min(len);
        let n = buf.len().min(len - at);
        pmem.region.read(at, &mut buf[..n]);
        n
    }

    pub(crate) fn write(
        &mut self,
        ino: u64,
        data: &[u8],
        offset: u64,
        durable: bool,
        ctx: &mut Ctx,
    ) -> io::Result<()> {
        let end = offset.checked_add(data.len() as u64);
        let Some(end) = end.filter(|e| *e < 1 << 43) else {
            return Err(io::Error::from_raw_os_error(27));
        };
        if self.quota.is_some() {
            let inode = self.inode(ino);
            let reserved = inode.reserved.div_ceil(PAGE as u64);
            let pages = offset / PAGE as u64..end.div_ceil(PAGE as u64);
            let new = pages.filter(|p| {
                *p >= reserved && !matches!(inode.pages.get(*p as usize), Some(Some(_)))
            });
            let new = new.count() as u64;
            self.room(new).inspect_err(|_| ctx.hit("no space"))?;
        }
        let mut offset = offset;
        if durable && self.misdirect.is_some_and(|(i, _)| i == ino) {
            let to = self.misdirect.take().expect("checked").1;
            // Within the file: a misdirected write does not make the file grow.
            let most = self.inode(ino).len.saturating_sub(data.len() as u64);
            offset = to.min(most);
            ctx.hit("misdirected writes");
        }
        let inode = self.inode(ino);
        if let Some(pmem) = &mut inode.pmem {
            if end > pmem.image.len() as u64 {
                return Err(no_space());
            }
            pmem.region.write(offset as usize, data);
            if durable {
                pmem.flush(offset as usize, data.len());
            }
            return Ok(());
        }
        if !durable && ctx.faults.write_back != 0 && ctx.rng.per_mille(ctx.faults.write_back) {
            ctx.hit("write-backs");
            inode.write_back(&mut ctx.rng);
        }
        inode.write(data, offset, durable);
        Ok(())
    }

    /// A write that does not complete. Of a durable write any subset of its sectors is on
    /// the medium, or a prefix if only the process died; of another write a prefix is in
    /// the cache.
    pub(crate) fn write_torn(
        &mut self,
        ino: u64,
        data: &[u8],
        offset: u64,
        durable: bool,
        subset: bool,
        ctx: &mut Ctx,
    ) {
        ctx.hit("torn writes");
        if !durable {
            let n = ctx.rng.between(0, data.len() as u64) as usize;
            let _ = self.write(ino, &data[..n], offset, false, ctx);
            return;
        }
        let sectors = data.len() / SECTOR;
        let keep = match subset {
            true => ctx.keep(),
            false => 0,
        };
        let prefix = ctx.rng.between(0, sectors as u64) as usize;
        for (i, sector) in data.chunks(SECTOR).enumerate() {
            let kept = match subset {
                true => ctx.rng.per_mille(keep),
                false => i < prefix,
            };
            if kept {
                let at = offset + (i * SECTOR) as u64;
                let _ = self.write(ino, sector, at, true, ctx);
            } else {
                ctx.hit("torn sectors");
            }
        }
    }

    pub(crate) fn sync(&mut self, ino: u64) {
        let inode = self.inode(ino);
        match &mut inode.pmem {
            Some(pmem) => pmem.flush(0, pmem.image.len()),
            None => inode.sync(),
        }
    }

    pub(crate) fn sync_failed(&mut self, ino: u64, rng: &mut Rng) {
        self.inode(ino).sync_failed(rng);
    }

    /// A sync of the whole file system: files and names.
    pub(crate) fn sync_all(&mut self) {
        let all: Vec<u64> = self.inodes.keys().copied().collect();
        all.into_iter().for_each(|ino| self.sync(ino));
        for op in std::mem::take(&mut self.pending) {
            self.durable.apply(&op);
        }
        self.collect();
    }

    /// One that fails: each file may have been synced, or have lost what was to be written.
    pub(crate) fn sync_all_failed(&mut self, rng: &mut Rng) {
        for inode in self.inodes.values_mut().filter(|i| i.pmem.is_none()) {
            match rng.coin() {
                true => inode.sync(),
                false => inode.sync_failed(rng),
            }
        }
    }

    pub(crate) fn set_len(&mut self, ino: u64, len: u64) -> io::Result<()> {
        if len > MAX_FILE {
            return Err(io::Error::from_raw_os_error(27));
        }
        let inode = self.inode(ino);
        if let Some(pmem) = &inode.pmem {
            return match pmem.image.len() as u64 == len {
                true => Ok(()),
                false => Err(io::ErrorKind::InvalidInput.into()),
            };
        }
        if len > inode.len && self.quota.is_some() {
            // Holes are free, the file system's own block is not.
            self.room(1)?;
        }
        self.inode(ino).set_len(len);
        Ok(())
    }

    pub(crate) fn len(&mut self, ino: u64) -> u64 {
        self.inode(ino).len
    }

    pub(crate) fn allocate(&mut self, ino: u64, len: u64) -> io::Result<()> {
        if self.quota.is_some() {
            let inode = self.inode(ino);
            let old = inode.used();
            let before = std::mem::replace(&mut inode.reserved, len);
            let new = inode.used();
            inode.reserved = before;
            self.room(new.saturating_sub(old))?;
        }
        let inode = self.inode(ino);
        inode.reserved = inode.reserved.max(len);
        Ok(())
    }

    pub(crate) fn next_data(&mut self, ino: u64, offset: u64) -> Option<Range<u64>> {
        let inode = self.inode(ino);
        if inode.pmem.is_some() {
            return (offset < inode.len).then_some(offset..inode.len);
        }
        let there = |p: usize| matches!(inode.pages.get(p), Some(Some(_)));
        let first = usize::try_from(offset).ok()? / PAGE;
        let start = (first..inode.pages.len()).find(|p| there(*p))?;
        let end = (start..).find(|p| !there(*p))?;
        let from = offset.max((start * PAGE) as u64);
        let to = inode.len.min((end * PAGE) as u64);
        (from < to).then_some(from..to)
    }

    pub(crate) fn create_dir_all(&mut self, path: &Path) -> io::Result<()> {
        let mut above: Vec<&Path> = path.ancestors().collect();
        above.reverse();
        for dir in above {
            if self.live.is_dir(dir) {
                continue;
            }
            if self.exists(dir) {
                return Err(error(io::ErrorKind::NotADirectory, dir));
            }
            self.name(NameOp::MakeDir(dir.to_path_buf()));
        }
        Ok(())
    }

    pub(crate) fn remove_empty_dirs(&mut self, path: &Path) -> io::Result<()> {
        if !self.live.is_dir(path) {
            return Err(error(io::ErrorKind::NotADirectory, path));
        }
        let mut below = self.live.files.range(path.to_path_buf()..);
        if below.next().is_some_and(|(p, _)| p.starts_with(path)) {
            return Err(error(io::ErrorKind::DirectoryNotEmpty, path));
        }
        let within = self.live.dirs.range(path.to_path_buf()..);
        let mut within: Vec<_> = within
            .take_while(|d| d.starts_with(path))
            .cloned()
            .collect();
        within.reverse();
        for dir in within {
            self.name(NameOp::RemoveDir(dir));
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, path: &Path) -> io::Result<()> {
        if !self.exists(path) {
            return Err(error(io::ErrorKind::NotFound, path));
        }
        self.garbage = true;
        self.name(NameOp::Remove(path.to_path_buf()));
        Ok(())
    }

    pub(crate) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        if !self.exists(from) {
            return Err(error(io::ErrorKind::NotFound, from));
        }
        if self.live.is_dir(to) {
            return Err(error(io::ErrorKind::IsADirectory, to));
        }
        if !to.parent().is_some_and(|d| self.live.is_dir(d)) {
            return Err(error(io::ErrorKind::NotFound, to));
        }
        if from != to {
            self.garbage |= self.exists(to);
            self.name(NameOp::Rename(from.to_path_buf(), to.to_path_buf()));
        }
        Ok(())
    }

    /// Makes the operations in `dir`, and those on which they depend, durable.
    pub(crate) fn sync_dir(&mut self, dir: &Path) -> io::Result<()> {
        if !self.live.is_dir(dir) {
            return Err(error(io::ErrorKind::NotFound, dir));
        }
        let mut needed = BTreeSet::from([dir.to_path_buf()]);
        let mut picked = vec![false; self.pending.len()];
        for (op, picked) in self.pending.iter().zip(&mut picked).rev() {
            let mut paths = op.paths().into_iter();
            if paths.any(|p| p.parent() == Some(dir) || needed.contains(p)) {
                *picked = true;
                for p in op.paths() {
                    needed.insert(p.to_path_buf());
                    needed.extend(p.parent().map(Path::to_path_buf));
                }
            }
        }
        let mut picked = picked.into_iter();
        let durable = &mut self.durable;
        self.pending.retain(|op| {
            let now = picked.next().unwrap_or(false);
            if now {
                durable.apply(op);
            }
            !now
        });
        self.collect();
        Ok(())
    }

    /// Files below a directory, relative to it.
    pub(crate) fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        if !self.live.is_dir(dir) {
            return Err(error(io::ErrorKind::NotFound, dir));
        }
        let below = self.live.files.range(dir.to_path_buf()..);
        Ok(below
            .map_while(|(p, _)| Some((p, p.strip_prefix(dir).ok()?)))
            .filter(|(p, _)| !self.is_link(p))
            .map(|(_, name)| name.to_path_buf())
            .collect())
    }

    /// Frees files that no handle reaches, and no name, now or after a power loss.
    fn collect(&mut self) {
        if !std::mem::take(&mut self.garbage) {
            return;
        }
        let mut named: BTreeSet<u64> = self.live.files.values().copied().collect();
        named.extend(self.durable.files.values());
        for op in &self.pending {
            if let NameOp::Make(_, ino) = op {
                named.insert(*ino);
            }
        }
        self.inodes
            .retain(|ino, inode| inode.open > 0 || named.contains(ino));
        // Files that are only open, or only durable, are checked again next time.
        self.garbage = self.inodes.len() > self.live.files.len();
    }

    /// The process dies: nothing is lost, but its handles and mappings are closed.
    pub(crate) fn kill(&mut self) {
        for inode in self.inodes.values_mut() {
            inode.open = 0;
            if let Some(pmem) = &mut inode.pmem {
                pmem.region = pmem.region.copy();
            }
        }
        self.misdirect = None;
        self.collect();
    }

    /// The power is lost.
    pub(crate) fn power_loss(&mut self, ctx: &mut Ctx) {
        let all = self.pending.len();
        let kept = match ctx.rng.below(3) {
            0 => 0,
            1 => all,
            _ => ctx.rng.between(0, all as u64) as usize,
        };
        for op in self.pending.drain(..).take(kept) {
            self.durable.apply(&op);
        }
        ctx.add("lost names", (all - kept) as u64);
        // A file cannot exist without its directory: a prefix keeps the directory's
        // creation before the file's.
        self.live = self.durable.clone();
        let keep = ctx.keep();
        let named: BTreeSet<u64> = self.live.files.values().copied().collect();
        self.inodes.retain(|ino, _| named.contains(ino));
        for inode in self.inodes.values_mut() {
            inode.power_loss(keep, ctx);
        }
        self.garbage = false;
        self.misdirect = None;
    }

    /// What would be left if the power were lost now, and nothing more were written.
    pub(crate) fn keep(&self) -> Kept {
        let inos = self.durable.files.values();
        let files = inos.filter_map(|ino| Some((*ino, KeptFile::of(self.inodes.get(ino)?))));
        Kept {
            names: self.durable.clone(),
            files: files.collect(),
        }
    }

    /// Puts back what was kept: everything, or only these files. The power was lost.
    pub(crate) fn put_back(&mut self, kept: &Kept, only: Option<&[PathBuf]>) {
        let Some(only) = only else {
            self.inodes = kept.files.iter().map(|(i, f)| (*i, f.inode())).collect();
            self.durable = kept.names.clone();
            self.live = kept.names.clone();
            self.pending.clear();
            return;
        };
        for path in only {
            let before = kept.names.files.get(path).and_then(|i| kept.files.get(i));
            if let (Some(ino), Some(before)) = (self.live.files.get(path), before) {
                self.inodes.insert(*ino, before.inode());
            }
        }
    }

    /// Changes bytes on both sides, as a bad medium does.
    pub(crate) fn corrupt(&mut self, path: &Path, offset: u64, change: impl Fn(&mut u8)) -> bool {
        let Some(ino) = self.live.files.get(path).copied() else {
            return false;
        };
        let inode = self.inode(ino);
        if offset >= inode.len {
            return false;
        }
        let at = offset as usize;
        if let Some(pmem) = &mut inode.pmem {
            change(&mut pmem.image[at]);
            let mut byte = [0];
            pmem.region.read(at, &mut byte);
            change(&mut byte[0]);
            pmem.region.write(at, &byte);
        } else {
            let page = inode.page(at / PAGE);
            change(&mut page.cache[at % PAGE]);
            change(&mut page.durable[at % PAGE]);
        }
        true
    }

    /// Sends the next durable write to the file to another offset.
    pub(crate) fn misdirect(&mut self, path: &Path, to: u64) -> bool {
        let Some(ino) = self.live.files.get(path).copied() else {
            return false;
        };
        self.misdirect = Some((ino, to));
        true
    }

    /// A file's bytes as a process would read them.
    pub(crate) fn contents(&mut self, path: &Path) -> Option<Vec<u8>> {
        let ino = *self.live.files.get(path)?;
        let mut bytes = vec![0; self.len(ino) as usize];
        self.read(ino, &mut bytes, 0);
        Some(bytes)
    }

    /// Every file's name.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        self.live.files.keys().cloned().collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::{CrashKind, Faults, Rng, SECTOR, World, is_crash};
    use mojim_env::{Env, OpenHow};
    use std::io::ErrorKind;
    use std::path::{Path, PathBuf};

    pub(crate) const CACHED: OpenHow = OpenHow {
        create: true,
        write: true,
        durable: false,
        plain: false,
    };
    pub(crate) const DURABLE: OpenHow = OpenHow {
        durable: true,
        ..CACHED
    };

    #[derive(Clone, Copy)]
    #[repr(C, align(512))]
    struct Sector([u8; SECTOR]);

    /// Bytes, aligned as a durable write requires.
    pub(crate) struct Sectors(Vec<Sector>);

    impl Sectors {
        pub(crate) fn new(n: usize, byte: u8) -> Sectors {
            Sectors(vec![Sector([byte; SECTOR]); n])
        }
    }

    impl std::ops::Deref for Sectors {
        type Target = [u8];
        fn deref(&self) -> &[u8] {
            // SAFETY: a Sector is 512 initialised bytes without padding.
            unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * SECTOR) }
        }
    }

    fn root() -> &'static Path {
        Path::new("/")
    }

    #[test]
    fn unsynced_data_may_be_lost_and_synced_data_never_is() {
        let path = Path::new("/f");
        let (mut lost, mut kept, mut mixed, mut short) = (0, 0, 0, 0);
        for seed in 0..200 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            let file = env.open(path, CACHED).unwrap();
            file.write_at(&[1; 8192], 0).unwrap();
            file.sync().unwrap();
            env.sync_dir(root()).unwrap();
            file.write_at(&[2; 8192], 4096).unwrap();
            world.power_loss("a");
            let left = world.contents("a", path).unwrap();
            assert!(left[..4096].iter().all(|b| *b == 1));
            assert!(left.len() == 8192 || left.len() == 12288);
            short += u32::from(left.len() == 8192);
            for sector in left[4096..].chunks(SECTOR) {
                assert!(
                    sector.iter().all(|b| *b == sector[0]),
                    "torn within a sector"
                );
            }
            assert!(left[4096..8192].iter().all(|b| *b == 1 || *b == 2));
            assert!(left[8192..].iter().all(|b| *b == 0 || *b == 2));
            match left[4096..8192].iter().filter(|b| **b == 2).count() {
                0 => lost += 1,
                4096 => kept += 1,
                _ => mixed += 1,
            }
        }
        assert!(lost > 0 && kept > 0 && mixed > 0 && short > 0);
    }

    /// Random writes, truncations and syncs, compared with a plain model: a synced sector
    /// that was not written since is unchanged after a power loss.
    #[test]
    fn a_disk_agrees_with_a_model() {
        const MAX: usize = 40_000;
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let faults = Faults {
                write_back: 100,
                ..Faults::none()
            };
            let world = World::new(seed, faults);
            let env = world.env("a");
            let path = Path::new("/f");
            let cached = env.open(path, CACHED).unwrap();
            let durable = env.open(path, DURABLE).unwrap();
            env.sync_dir(root()).unwrap();
            let mut now: Vec<u8> = Vec::new();
            let mut synced: Vec<u8> = Vec::new();
            let mut fuzzy = [false; MAX / SECTOR + 1];
            let mut resized = false;
            for _ in 0..rng.below(60) {
                let byte = rng.between(1, 255) as u8;
                match rng.below(10) {
                    0..4 => {
                        let at = rng.below(20_000) as usize;
                        let n = rng.between(1, 9_000) as usize;
                        cached.write_at(&vec![byte; n], at as u64).unwrap();
                        if now.len() < at + n {
                            now.resize(at + n, 0);
                            resized = true;
                        }
                        now[at..at + n].fill(byte);
                        fuzzy[at / SECTOR..=(at + n - 1) / SECTOR].fill(true);
                    }
                    4..7 => {
                        let at = rng.below(40) as usize * SECTOR;
                        let n = rng.between(1, 17) as usize;
                        let data = Sectors::new(n, byte);
                        durable.write_at(&data, at as u64).unwrap();
                        let end = at + n * SECTOR;
                        now.resize(now.len().max(end), 0);
                        synced.resize(synced.len().max(end), 0);
                        now[at..end].fill(byte);
                        synced[at..end].fill(byte);
                        fuzzy[at / SECTOR..end / SECTOR].fill(false);
                    }
                    7 => {
                        let n = rng.below(20_000) as usize;
                        cached.set_len(n as u64).unwrap();
                        if n < now.len() {
                            fuzzy[n / SECTOR..].fill(true);
                        }
                        resized |= n != now.len();
                        now.resize(n, 0);
                    }
                    _ => {
                        cached.sync().unwrap();
                        synced = now.clone();
                        fuzzy.fill(false);
                        resized = false;
                    }
                }
                assert_eq!(world.contents("a", path).unwrap(), now, "seed {seed}");
            }
            world.power_loss("a");
            let left = world.contents("a", path).unwrap();
            if !resized {
                assert_eq!(left.len(), synced.len(), "seed {seed}");
            }
            for (s, sector) in left.chunks(SECTOR).enumerate() {
                let from = s * SECTOR;
                if !fuzzy[s] && from + sector.len() <= synced.len() {
                    assert_eq!(
                        sector,
                        &synced[from..from + sector.len()],
                        "seed {seed}, {s}"
                    );
                }
            }
            // What is left is durable: it survives the next power loss unchanged.
            world.env("a");
            world.power_loss("a");
            assert_eq!(world.contents("a", path).unwrap(), left);
        }
    }

    #[test]
    fn a_durable_write_can_be_torn_between_sectors() {
        let path = Path::new("/f");
        for kind in [CrashKind::Power, CrashKind::Kill] {
            let (mut torn, mut holes) = (false, false);
            for seed in 0..100 {
                let world = World::new(seed, Faults::none());
                let env = world.env("a");
                let file = env.open(path, DURABLE).unwrap();
                file.write_at(&Sectors::new(8, 1), 0).unwrap();
                env.sync_dir(root()).unwrap();
                world.arm_crash("a", 1, kind);
                let error = file.write_at(&Sectors::new(8, 2), 0).unwrap_err();
                assert!(is_crash(&error));
                assert_eq!(world.crashed("a"), Some(kind));
                let left = world.contents("a", path).unwrap();
                let bytes: Vec<u8> = left.chunks(SECTOR).map(|s| s[0]).collect();
                assert_eq!(bytes.len(), 8);
                assert!(left.chunks(SECTOR).all(|s| s.iter().all(|b| *b == s[0])));
                torn |= bytes.contains(&1) && bytes.contains(&2);
                holes |= bytes.windows(2).any(|w| w == [1, 2]);
            }
            assert!(torn);
            assert_eq!(holes, kind == CrashKind::Power);
        }
    }

    #[test]
    #[should_panic(expected = "not whole sectors")]
    fn a_durable_write_wants_aligned_buffers() {
        let world = World::new(1, Faults::none());
        let file = world.env("a").open(Path::new("/f"), DURABLE).unwrap();
        let _ = file.write_at(&Sectors::new(2, 0)[8..520], 0);
    }

    #[test]
    fn names_reach_the_medium_in_order_and_for_sure_after_sync_dir() {
        let path = |n: u32| PathBuf::from(format!("/d/{n}"));
        let mut seen = [false; 4];
        for seed in 0..200 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            env.create_dir_all(Path::new("/d")).unwrap();
            for n in [1, 2] {
                let file = env.open(&path(n), CACHED).unwrap();
                file.write_at(&[n as u8; 10], 0).unwrap();
                file.sync().unwrap();
            }
            env.sync_dir(Path::new("/d")).unwrap();
            env.rename(&path(1), &path(2)).unwrap();
            env.open(&path(3), CACHED).unwrap();
            env.remove(&path(2)).unwrap();
            assert_eq!(env.list(Path::new("/d")).unwrap(), [PathBuf::from("3")]);
            world.power_loss("a");
            let byte = |n| world.contents("a", &path(n)).map(|c| c.first().copied());
            let done = match [byte(1), byte(2), byte(3)] {
                [Some(Some(1)), Some(Some(2)), None] => 0,
                [None, Some(Some(1)), None] => 1,
                [None, Some(Some(1)), Some(None)] => 2,
                [None, None, Some(None)] => 3,
                other => panic!("not a prefix: {other:?}"),
            };
            seen[done] = true;

            let env = world.env("a");
            env.open(&path(4), CACHED).unwrap();
            env.rename(&path(4), &path(5)).unwrap();
            env.sync_dir(Path::new("/d")).unwrap();
            world.power_loss("a");
            assert!(world.files("a").contains(&path(5)));
            assert!(!world.files("a").contains(&path(4)));
        }
        assert_eq!(seen, [true; 4]);
    }

    #[test]
    fn a_directory_sync_leaves_other_directories_alone() {
        let mut lost = false;
        for seed in 0..20 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            env.create_dir_all(Path::new("/x/y")).unwrap();
            env.create_dir_all(Path::new("/z")).unwrap();
            env.open(Path::new("/z/1"), CACHED).unwrap();
            env.open(Path::new("/x/y/2"), CACHED).unwrap();
            env.sync_dir(Path::new("/x/y")).unwrap();
            world.power_loss("a");
            // The directories above became durable with it.
            assert!(world.files("a").contains(&PathBuf::from("/x/y/2")));
            lost |= !world.files("a").contains(&PathBuf::from("/z/1"));
        }
        assert!(lost);
    }

    #[test]
    fn after_a_failed_sync_a_good_one_proves_nothing() {
        let mut lost = false;
        for seed in 0..50 {
            let world = World::new(seed, Faults::none());
            let env = world.env("a");
            let file = env.open(Path::new("/f"), CACHED).unwrap();
            env.sync_dir(root()).unwrap();
            file.write_at(&[1; 4096], 0).unwrap();
            world.set_faults(Faults {
                sync_error: 1000,
                ..Faults::none()
            });
            assert_eq!(file.sync().unwrap_err().raw_os_error(), Some(5));
            world.set_faults(Faults::none());
            file.sync().unwrap();
            world.power_loss("a");
            let left = world.contents("a", Path::new("/f")).unwrap();
            assert_eq!(left.len(), 4096);
            lost |= left.contains(&0);
        }
        assert!(lost);
    }

    #[test]
    fn a_quota_is_kept_and_what_was_reserved_can_be_written() {
        let world = World::new(1, Faults::none());
        let env = world.env("a");
        let file = env.open(Path::new("/f"), CACHED).unwrap();
        world.set_quota("a", Some(8 * 4096));
        file.allocate(4 * 4096).unwrap();
        assert_eq!(file.len().unwrap(), 0);
        let other = env.open(Path::new("/g"), CACHED).unwrap();
        other.write_at(&[1; 4 * 4096], 0).unwrap();
        let full = other.write_at(&[1; 1], 4 * 4096).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::StorageFull);
        assert_eq!(other.len().unwrap(), 4 * 4096);
        assert_eq!(
            file.allocate(5 * 4096).unwrap_err().kind(),
            ErrorKind::StorageFull
        );
        file.write_at(&[2; 4 * 4096], 0).unwrap();
        other.write_at(&[3; 4096], 4096).unwrap();
        // Space comes back when neither a name nor a handle is left.
        env.remove(Path::new("/g")).unwrap();
        assert!(file.write_at(&[1; 1], 4 * 4096).is_err());
        drop(other);
        file.write_at(&[1; 1], 4 * 4096).unwrap();
        assert_eq!(world.counts()["no space"], 3);
    }

    #[test]
    fn a_file_reads_as_written_with_holes() {
        let world = World::new(1, Faults::none());
        let env = world.env("a");
        let path = Path::new("/f");
        assert_eq!(
            env.open(path, OpenHow::default()).err().unwrap().kind(),
            ErrorKind::NotFound
        );
        assert!(env.open(Path::new("/no/f"), CACHED).is_err());
        let file = env.open(path, CACHED).unwrap();
        file.set_len(1 << 30).unwrap();
        file.write_at(b"here", 100_000).unwrap();
        let data = file.next_data(0).unwrap().unwrap();
        assert!(data.start <= 100_000 && data.end >= 100_004 && data.end < 200_000);
        assert_eq!(file.next_data(data.end).unwrap(), None);
        let mut buf = [9; 8];
        assert_eq!(file.read_at(&mut buf, 99_998).unwrap(), 8);
        assert_eq!(&buf, b"\0\0here\0\0");
        assert_eq!(file.read_at(&mut buf, (1 << 30) - 3).unwrap(), 3);
        assert_eq!(file.read_at(&mut buf, 1 << 30).unwrap(), 0);
        let reader = env.open(path, OpenHow::default()).unwrap();
        assert!(reader.write_at(b"x", 0).is_err());
    }

    #[test]
    fn a_bad_medium_is_bad_for_good() {
        let world = World::new(1, Faults::none());
        let env = world.env("a");
        let path = Path::new("/f");
        let file = env.open(path, DURABLE).unwrap();
        file.write_at(&Sectors::new(4, 0), 0).unwrap();
        env.sync_dir(root()).unwrap();
        assert!(world.flip_bit("a", path, 8 * 700 + 3));
        assert!(!world.flip_bit("a", path, 8 * 2048));
        assert!(world.misdirect_next_write("a", path, 512));
        world.power_loss("a");
        assert_eq!(world.contents("a", path).unwrap()[700], 8);
        let file = world.env("a").open(path, DURABLE).unwrap();
        assert!(world.misdirect_next_write("a", path, 1536));
        file.write_at(&Sectors::new(1, 7), 0).unwrap();
        let left = world.contents("a", path).unwrap();
        assert_eq!((left[0], left[1536]), (0, 7));
    }
}
