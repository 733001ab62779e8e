//! Windows: how one comes and goes.
//!
//! Owns mapping and unmapping: over a private working copy, which is made with the
//! window, or over the shared one that all windows of a file have. `table` has the
//! addresses of the windows.
//!
//! Invariants:
//! - Each byte of a file has at most one working copy: a private or a shared one.
//! - A shared working copy lasts as long as it has a window.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};

use crate::reader;
use crate::share::guest;
use mojim_config::{Rounding, Working};
use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_memory::committed::Committed;
use mojim_memory::fork::{check_fork, is_forked};
use mojim_memory::places::{self, Claim};
use mojim_memory::quiescence::Quiescence;
use mojim_memory::region::{MapFlags, MapOptions, Mapping, Private, Region, Window, WorkingCopy};
use mojim_memory::shared::Shared;

use super::attached::{Inner, Lent, Names, Volume};
use super::memory::Memory;
use super::remembered;
use super::table::{Mapped, TABLE, locate, window_at};

/// Ends a window. The caller holds the volume's `names`: a thread that holds `names`
/// while it iterates over the volume's windows finds them all there.
pub(crate) fn close(m: &Arc<Mapped>) -> Result<()> {
    TABLE.update(|t| t.retain(|x| !Arc::ptr_eq(x, m)));
    remembered::forget(m);
    // A shared working copy goes with its last window.
    if m.window.id == 0 {
        m.region.shut();
    }
    let closed = m.region.copy.close(m.window.id);
    m.volume.drop_unused();
    closed
}

/// Ends a window: commits all that it shows, unless it was mapped with `atomic`,
/// and then unmaps it. Only whole windows can be unmapped. What was stored through
/// an `atomic` window of a shared working copy stays there uncommitted, unless it
/// was the copy's last window.
pub fn unmap(addr: *const u8, len: usize) -> Result<()> {
    if let Some(done) = guest::unmap(addr as usize, len) {
        return done;
    }
    if reader::unmap(addr, len)? {
        return Ok(());
    }
    let m = locate(addr as usize, 1)?;
    let span = &m.window.span;
    let page = rustix::param::page_size();
    if span.start != addr as usize
        || len.next_multiple_of(page) != span.len().next_multiple_of(page)
    {
        return Err(Error::Unsupported(format!(
            "unmapping {len} bytes at {addr:p} of the region of {} ({} bytes at {:#x}): only a whole region can be unmapped",
            m.region.name,
            span.len(),
            span.start
        )));
    }
    if is_forked() {
        // Only the mapping goes: threads of the parent may have held locks at the fork, and
        // count as readers of the table for ever.
        return m.region.copy.close(m.window.id);
    }
    if !m.window.atomic && !m.volume.detached.load(Acquire) {
        m.sync(m.all())?;
    }
    let _names = lock(&m.volume.names);
    close(&m)
}

/// Makes copies of the pages of a region that hold any of `[addr, addr + len)`, so that the first
/// stores to them cost no page fault. Only in a region that was mapped with
/// [`untracked`](MapFlags::untracked), where no pages are tracked after all; in any other region
/// it does nothing, since these pages would count as written. Nor where the kernel lacks it
/// (Linux 5.14). Their contents do not change. They take memory.
///
/// # Errors
/// `NotFound` if the address is in no region, `Invalid` if the range reaches beyond it; `Io` if
/// memory is short: then some of the pages may have copies.
pub fn populate(addr: *const u8, len: usize) -> Result<()> {
    if guest::is_window(addr as usize) || reader::is_region(addr as usize) {
        return Ok(());
    }
    check_fork()?;
    let m = locate(addr as usize, len)?;
    let _user = m.region.enter()?;
    let valid = m.region.valid.load(SeqCst);
    let part = m.part(addr as usize, len);
    m.region.copy.populate(part.start..part.end.min(valid))
}

/// Whether `addr` lies in a region.
pub fn is_region(addr: usize) -> bool {
    window_at(addr).is_some() || reader::is_region(addr) || guest::is_window(addr)
}

/// Ordinary memory takes the place of the region that begins at `start`, when that goes.
#[doc(hidden)]
pub fn leave_memory(start: usize) -> Result<()> {
    check_fork()?;
    match span_of(start) {
        Some(span) if span.start == start => places::leave_memory(start),
        None if is_region(start) => {
            return Err(Error::Unsupported(format!(
                "leaving memory at {start:#x}: this process does not commit that region"
            )));
        }
        _ => {
            return Err(Error::Invalid(format!(
                "leaving memory at {start:#x}: no region begins there"
            )));
        }
    }
    Ok(())
}

/// The addresses of the region that `addr` lies in, if this process is the one that commits it.
#[doc(hidden)]
pub fn span_of(addr: usize) -> Option<Range<usize>> {
    window_at(addr).map(|m| m.window.span.clone())
}

impl Volume {
    /// The addresses of its regions.
    #[doc(hidden)]
    pub fn spans(&self) -> Vec<Range<usize>> {
        let all = self.0.windows();
        all.iter().map(|m| m.window.span.clone()).collect()
    }

    /// Maps a file, or a part of it. `len` 0 means up to its end. A mapping
    /// beyond the end of the file grows it (the new size is a record).
    ///
    /// With a private working copy (the default; `working` in the
    /// configuration) the same bytes can be mapped once at a time, and pages that
    /// were stored to take memory. With a shared one (`shared`) the bytes can be
    /// mapped any number of times, all mappings show the same, and a sync point of
    /// any mapping commits what was stored through all. A shared copy holds the
    /// whole file in memory. The first mapping reads it; other mappings and changes
    /// of names wait meanwhile.
    ///
    /// # Errors
    /// `Busy` if the bytes are mapped already with a private working copy, if the file
    /// is mapped with the other kind of copy, or if anything is mapped at `fixed_at`;
    /// `Invalid`, `NotFound`, `Io` (ENOMEM: no room for a shared working copy), and the
    /// errors of a sync point.
    pub fn map(&self, file: &str, len: usize, flags: MapFlags) -> Result<Mapping> {
        self.map_at(file, len, flags, &|len| {
            Claim::of(file, flags.fixed_at, len)
        })
    }

    /// [`Volume::map`] in place of what is mapped at `fixed_at` (`MAP_FIXED`); `Busy` if a region,
    /// or a part of one, is mapped there.
    ///
    /// # Safety
    /// The memory there, if any, is the caller's, and nobody uses it from here on, also if the
    /// call fails.
    pub unsafe fn map_over(&self, file: &str, len: usize, flags: MapFlags) -> Result<Mapping> {
        // SAFETY: the caller's promise.
        self.map_at(file, len, flags, &|len| unsafe {
            Claim::over(file, flags.fixed_at, len)
        })
    }

    fn map_at(
        &self,
        file: &str,
        len: usize,
        flags: MapFlags,
        claim: &dyn Fn(usize) -> Result<Option<Claim>>,
    ) -> Result<Mapping> {
        check_fork()?;
        let inner = &self.0;
        inner.check_attached()?;
        let page = rustix::param::page_size();
        if !flags.fixed_at.is_multiple_of(page) {
            return Err(Error::Invalid(format!(
                "mapping {file} at {:#x}: the address is not a multiple of the page size {page}",
                flags.fixed_at
            )));
        }
        let mut place = claim(len)?;
        let mut names = inner.names()?;
        let shared = match inner.volume.working {
            // Bounded memory must be able to give pages back, which a shared copy cannot.
            Working::Auto => flags.shared && inner.memory.is_none(),
            kind => kind == Working::Shared,
        };
        if flags.untracked {
            inner.check_untracked(file, flags, shared)?;
        }
        let (id, size, len) = inner.to_map(&mut names, file, len, flags, shared)?;
        let end = flags.offset + len as u64;
        let until = end.next_multiple_of(page as u64);
        inner.check_free(file, id, flags.offset..until, shared)?;
        if place.is_none() {
            place = claim(len)?;
        }
        let done = inner.map_known(&mut names, file, (id, size), len, flags, shared);
        match done {
            Ok(_) => place.into_iter().for_each(Claim::keep),
            Err(_) => inner.drop_unused(),
        }
        done
    }
}

impl Inner {
    /// Fails where a region needs its stores tracked.
    fn check_untracked(&self, file: &str, flags: MapFlags, shared: bool) -> Result<()> {
        let why = match () {
            () if shared || flags.shared => "its working copy is shared with other mappings",
            () if self.volume.rounding == Rounding::Page => {
                "msync_rounding = \"page\" commits whole pages"
            }
            () if !flags.atomic && !flags.read_only => {
                "without MAP_ATOMIC its unmap commits what was stored to it"
            }
            () => return Ok(()),
        };
        Err(Error::Invalid(format!(
            "mapping {file}: a region whose stores are not tracked commits exact ranges of a private working copy, and {why}"
        )))
    }

    /// Finds the file to map: its number and size, and the mapping's length.
    fn to_map(
        &self,
        names: &mut Names,
        file: &str,
        len: usize,
        flags: MapFlags,
        shared: bool,
    ) -> Result<(u32, u64, usize)> {
        let page = rustix::param::page_size() as u64;
        if !flags.offset.is_multiple_of(page) {
            return Err(Error::Invalid(format!(
                "mapping {file}: offset {} is not a multiple of the page size {page}",
                flags.offset
            )));
        }
        let (id, _) = self.find_or_create(names, file, flags.create)?;
        if !shared || self.shared_of(id).is_none() {
            // A new working copy is filled from the data file.
            self.settle_all()?;
        }
        let size = self.primary.store.area().find(file).map_or(0, |f| f.size);
        let len = if len == 0 {
            usize::try_from(size.saturating_sub(flags.offset)).unwrap_or(usize::MAX)
        } else {
            len
        };
        if len == 0 {
            return Err(Error::Invalid(format!(
                "mapping {file}: it is empty there; give a length"
            )));
        }
        let end = flags
            .offset
            .checked_add(len as u64)
            .filter(|e| *e <= i64::MAX as u64)
            .ok_or_else(|| Error::Invalid(format!("mapping {file}: {len} bytes are too many")))?;
        if end > size && flags.read_only {
            return Err(Error::Invalid(format!(
                "mapping {file}: {end} bytes, but it has {size}; a read-only mapping does not grow it"
            )));
        }
        Ok((id, size, len))
    }

    /// The shared working copy of a file, for another process to map: with its
    /// region, the mapping's length, and the number of a window that keeps the copy
    /// until the mapping has its own window.
    pub(crate) fn lend(
        &self,
        file: &str,
        len: usize,
        flags: MapFlags,
    ) -> Result<(Lent, usize, u64)> {
        self.check_attached()?;
        let why = match self.volume.working {
            Working::Private => "working = \"private\"",
            _ if self.memory.is_some() => "bounded memory (memory, max_uncommitted)",
            _ => "",
        };
        if !why.is_empty() {
            return Err(Error::Busy(format!(
                "mapping {file}: another process has the volume attached, and {why} shares none with it"
            )));
        }
        let mut names = self.names()?;
        let (id, size, len) = self.to_map(&mut names, file, len, flags, true)?;
        let end = flags.offset + len as u64;
        let page = rustix::param::page_size() as u64;
        self.check_free(file, id, flags.offset..end.next_multiple_of(page), true)?;
        let grown = |lent| self.reach(&mut names, id, size, end).map(|()| lent);
        let done = self.shared_copy(file, id, size, end).and_then(grown);
        match done {
            Ok(lent) => {
                let hold = lent.0.watch(0, page as usize, None);
                Ok((lent, len, hold))
            }
            Err(e) => {
                self.drop_unused();
                Err(e)
            }
        }
    }

    /// Forgets a window of another process.
    pub(crate) fn take_back(&self, copy: &Shared, window: u64, lost: bool) {
        let _names = lock(&self.names);
        if let Err(e) = copy.forget(window, lost) {
            unreachable!("there is nothing to unmap: {e}");
        }
        self.drop_unused();
    }

    /// Makes a file of `size` bytes reach to `end`.
    fn reach(&self, names: &mut Names, id: u32, size: u64, end: u64) -> Result<()> {
        self.resize(names, id, size, end.max(size))
    }

    /// Drops shared working copies that have no window: another copy of the file may be
    /// made, and then this one would be out of date. The caller holds `names`.
    fn drop_unused(&self) {
        let mut all = lock(&self.shared);
        let unused: Vec<_> = all.extract_if(.., |(copy, _)| copy.is_unused()).collect();
        drop(all);
        unused.iter().for_each(|(_, region)| region.shut());
    }

    /// [`Volume::map`] of a file that exists, and of bytes that are free to map.
    fn map_known(
        self: &Arc<Inner>,
        names: &mut Names,
        file: &str,
        (id, size): (u32, u64),
        len: usize,
        flags: MapFlags,
        shared: bool,
    ) -> Result<Mapping> {
        let end = flags.offset + len as u64;
        let known = match shared {
            true => Some(self.shared_copy(file, id, size, end)?),
            false => None,
        };
        self.reach(names, id, size, end)?;
        let options = MapOptions {
            at: (flags.fixed_at != 0).then_some(flags.fixed_at),
            fixed: flags.fixed_at != 0,
            write: !flags.read_only,
            offset: flags.offset,
            untracked: flags.untracked,
        };
        let tracker = self.volume.tracker;
        let (region, number, base, at) = match known {
            Some((copy, region)) => {
                let (number, base) = copy.open(len, options, tracker)?;
                (region, number, base, flags.offset as usize)
            }
            None => {
                let data = self.primary.store.area().file(id)?;
                let meter = self.memory.as_ref().map(Memory::meter);
                let copy = Private::map(&data, len, options, tracker, meter)?;
                let base = copy.base();
                let region = Region {
                    copy: Arc::new(copy),
                    committed: Committed::new(data, flags.offset, len),
                    file: id,
                    name: file.to_owned(),
                    offset: flags.offset,
                    write: !flags.read_only,
                    valid: AtomicUsize::new(len),
                    users: Quiescence::new(),
                    shut: AtomicBool::new(false),
                };
                (Arc::new(region), 0, base, 0)
            }
        };
        let start = base as usize;
        let mapped = Arc::new(Mapped {
            window: Window {
                id: number,
                span: start..start + len,
                at,
                write: !flags.read_only,
                atomic: flags.atomic,
            },
            region,
            volume: self.clone(),
        });
        TABLE.update(|t| t.push(mapped));
        Ok(Mapping { ptr: base, len })
    }

    /// Fails if an existing mapping excludes one of these bytes with this kind of copy.
    fn check_free(&self, file: &str, id: u32, span: Range<u64>, shared: bool) -> Result<()> {
        if !shared && lock(&self.shared).iter().any(|(_, r)| r.file == id) {
            return Err(Error::Busy(format!(
                "{file} is mapped with a shared working copy: a private one would not see its stores. Map it so too, or unmap it first"
            )));
        }
        let page = rustix::param::page_size() as u64;
        for m in self.windows() {
            let r = &m.region;
            let end = (r.offset + r.copy.len() as u64).next_multiple_of(page);
            let over = r.offset < span.end && span.start < end;
            if r.file == id && m.window.id == 0 && (over || shared) {
                return Err(Error::Busy(format!(
                    "{file} is mapped already at {:#x}: with a private working copy two mappings of the same bytes would not see each other's stores (where both are mapped as shared ones, or the volume says working = \"shared\", they do; not beside memory or max_uncommitted)",
                    m.window.span.start
                )));
            }
        }
        Ok(())
    }

    /// Waits until the data files have all that was committed or begun so far, also
    /// through earlier mappings.
    fn settle_all(&self) -> Result<()> {
        let last = self.primary.last_with_records();
        self.wait_for(last)?;
        self.settle(last)
    }

    /// The shared working copy of a file: the existing one, or a new one. `end`: up to
    /// which offset of the file it will be mapped. The caller holds `names`.
    fn shared_copy(&self, file: &str, id: u32, size: u64, end: u64) -> Result<Lent> {
        let there = lock(&self.shared)
            .iter()
            .find(|(_, r)| r.file == id)
            .cloned();
        let both = match there {
            Some(both) => both,
            None => {
                let data = self.primary.store.area().file(id)?;
                let copy = Arc::new(Shared::fill(&data, size, end)?);
                let region = Region {
                    copy: copy.clone(),
                    committed: Committed::new(data, 0, copy.capacity()),
                    file: id,
                    name: file.to_owned(),
                    offset: 0,
                    write: true,
                    valid: AtomicUsize::new(size as usize),
                    users: Quiescence::new(),
                    shut: AtomicBool::new(false),
                };
                let both = (copy, Arc::new(region));
                lock(&self.shared).push(both.clone());
                both
            }
        };
        if end > both.0.capacity() as u64 {
            return Err(Error::Unsupported(format!(
                "mapping {file}: its shared working copy can grow to {} bytes while it is mapped; {end} are asked for. Unmap all of it first",
                both.0.capacity()
            )));
        }
        Ok(both)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sync_point::{Part, Until, sync_many, sync_range};
    use super::*;
    use mojim_config::Config;
    use tempfile::TempDir;

    fn attach(dir: &TempDir, more: &str) -> Volume {
        let text = format!(
            r#"
cluster = "test"
[volume.v]
mode = "unreplicated"
primary = "a"
{more}
[node.a]
address = "127.0.0.1:1"
directory = "{0}/a"
ring = "{0}"
log = {{ medium = "disk", size = "1MiB" }}
"#,
            dir.path().display()
        );
        let config = Config::parse(&text, dir.path()).unwrap();
        Volume::attach_with(&config, "a", None, |_, _| {}).unwrap()
    }

    /// A sync point that had found a region when another thread unmapped it used to
    /// go on. It then committed bytes of a shared working copy that was dropped; they
    /// were older than what had been committed through the next copy.
    #[test]
    fn what_has_no_window_any_more_makes_no_sync_point() {
        for shared in [false, true] {
            let dir = TempDir::new().unwrap();
            let v = attach(&dir, "");
            let flags = MapFlags {
                create: true,
                atomic: true,
                shared,
                ..MapFlags::default()
            };
            let m = v.map("f", 1 << 20, flags).unwrap();
            // SAFETY: inside the mapping, which only this thread uses.
            unsafe { m.ptr.write(1) };
            let region = v.0.regions()[0].clone();
            unmap(m.ptr, m.len).unwrap();
            for range in [0..8, 0..region.copy.len()] {
                let parts = [Part::of(&region, range.clone())];
                let many = sync_many(&v.0, &parts, Until::Committed);
                assert!(matches!(many, Err(Error::NotFound(_))), "{many:?}");
                let one = sync_range(&v.0, &region, range, Until::Committed);
                assert!(matches!(one, Err(Error::NotFound(_))), "{one:?}");
            }
            assert_eq!(v.fsync("f").unwrap(), 0);
            v.detach().unwrap();
        }
    }

    /// A child that unmapped a private region waited for ever for threads that exist only in its
    /// parent: one that looked an address up at the fork, and one that looked for stores. A call of
    /// `size` waited for a thread that held the data area.
    #[test]
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        if !mojim_memory::track::uffd_available() {
            return;
        }
        let dir = TempDir::new().unwrap();
        let v = attach(&dir, "memory = \"1MiB\"");
        let flags = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        let m = v.map("f", 1 << 20, flags).unwrap();
        let region = window_at(m.ptr as usize).unwrap().region.clone();
        let child = || {
            let is_there = || {
                let mut pages = vec![0; m.len / rustix::param::page_size()];
                // SAFETY: a byte for each page.
                unsafe { libc::mincore(m.ptr.cast(), m.len, pages.as_mut_ptr()) == 0 }
            };
            // SAFETY: the end of a child that waits.
            unsafe { libc::alarm(60) };
            let size = v.size("f");
            let before = is_there();
            let unmapped = unmap(m.ptr, m.len).is_ok();
            matches!(size, Err(Error::Unsupported(_))) && before && unmapped && !is_there()
        };
        let mut pid = 0;
        let area = v.0.primary.store.area();
        region.copy.metered(&mut |_| {
            TABLE.read(|_| {
                // SAFETY: the child ends by `_exit`.
                unsafe {
                    pid = libc::fork();
                    if pid == 0 {
                        libc::_exit(if child() { 0 } else { 1 });
                    }
                }
            });
        });
        drop(area);
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "{status:#x}");
        drop(region);
        v.detach().unwrap();
    }
}
