//! The roots of a heap: what a program finds in it by name.
//!
//! Owns where each root lies in the heap's head, and who is changing it.
//!
//! Invariants:
//! - Of a heap that is open to be changed, only who holds `Inner::roots` writes a root, or looks
//!   at all of them. Of a reader's, all of them are looked at as of one moment.
//! - A root that an open transaction has changed, and the name that it had, are that
//!   transaction's until it is over.

use std::sync::atomic::fence;
use std::time::Instant;

use mojim_format::heap::{MAX_ROOT_KIND, MAX_ROOT_NAME, MAX_ROOTS, ROOT_LEN, Root, root_at};

use super::*;

/// How long a reader tries to read a head that changes all the time.
const PATIENCE: Duration = Duration::from_secs(10);

/// The place of a root that an open transaction has changed.
pub(super) struct Changed {
    place: usize,
    /// The thread ([`mojim_undo::me`]).
    owner: usize,
    /// The name that was there before.
    former: Option<String>,
}

/// A root's place is the calling thread's until this is dropped: others change neither what is
/// there, nor a root of the name that was there.
pub struct HeldRoot {
    heap: &'static Inner,
    place: usize,
    owner: usize,
    /// What was there.
    before: Box<[u8; ROOT_LEN]>,
}

impl HeldRoot {
    /// Puts back what was there. Other threads, which look at all roots, see no half of it.
    pub fn take_back(&self) {
        // A thread of the parent may have held the lock at the fork.
        let _held = (!mojim_memory::fork::is_forked()).then(|| lock(&self.heap.roots));
        // SAFETY: a root of the head, which only the holder of `roots` writes.
        unsafe {
            self.heap
                .at_root(self.place)
                .copy_from(self.before.as_ptr(), ROOT_LEN)
        };
    }
}

impl Drop for HeldRoot {
    fn drop(&mut self) {
        // A thread of the parent may have held the lock at the fork.
        if mojim_memory::fork::is_forked() {
            return;
        }
        let mut all = lock(&self.heap.roots);
        let mine = |c: &Changed| c.place == self.place && c.owner == self.owner;
        if let Some(i) = all.iter().rposition(mine) {
            all.remove(i);
        }
    }
}

impl Heap {
    /// What a root points to. `kind` must be what it was set with.
    ///
    /// # Errors
    /// `NotFound` if there is no such root; `Invalid` if it is of another kind; `Unsupported` in a forked
    /// child, as a thread of the parent may have held a lock at the fork; of a reader `Timeout` if the heap
    /// changes faster than it can be read.
    pub fn root(self, name: &str, kind: &str) -> Result<*mut u8> {
        mojim_memory::fork::check_fork()?;
        let inner = self.0;
        let found = self.list_roots()?.into_iter().find(|r| r.name == name);
        let root = found.ok_or_else(|| {
            Error::NotFound(format!("heap {} has no root {name}", inner.name.file))
        })?;
        if root.pointer.wrapping_sub(inner.base as u64) >= inner.capacity as u64 {
            return Err(inner.name.damaged(format!("root {name} points out of it")));
        }
        match root.kind == kind {
            true => Ok(root.pointer as *mut u8),
            false => Err(invalid(format!(
                "root {name} of heap {} is of type `{}`, not `{kind}`",
                inner.name.file, root.kind
            ))),
        }
    }

    /// The roots: name, type and address of each.
    ///
    /// # Errors
    /// As [`Heap::root`].
    pub fn list_roots(self) -> Result<Vec<Root>> {
        mojim_memory::fork::check_fork()?;
        let inner = self.0;
        let roots = match inner.read_only {
            true => inner.follow()?,
            false => {
                let _held = lock(&inner.roots);
                inner.roots()?
            }
        };
        Ok(roots.into_iter().flatten().collect())
    }

    /// Sets a root, or removes it (`ptr` null). Durable with the next [`Heap::sync`].
    ///
    /// # Errors
    /// `Busy` if an open transaction of another thread has changed the root.
    pub fn set_root(self, name: &str, ptr: *mut u8, kind: &str) -> Result<()> {
        self.check()?;
        self.set_root_with(name, ptr, kind, &mut |_, _| Ok(()))?;
        Ok(())
    }

    /// [`Heap::set_root`] for a transaction: before it stores, calls `log` with the bytes, which a commit
    /// has to commit. The caller drops what it returns when the transaction is committed; or, when it is
    /// taken back, behind [`HeldRoot::take_back`].
    pub fn set_root_with(
        self,
        name: &str,
        ptr: *mut u8,
        kind: &str,
        log: &mut dyn FnMut(*mut u8, usize) -> Result<()>,
    ) -> Result<HeldRoot> {
        let inner = self.0;
        mojim_memory::fork::check_fork()?;
        self.check_writable()?;
        let sound = |t: &str, most| t.len() <= most && !t.contains('\0');
        if name.is_empty() || !sound(name, MAX_ROOT_NAME) || !sound(kind, MAX_ROOT_KIND) {
            return Err(invalid(format!(
                "root `{name}` of type `{kind}`: a name has 1 to {MAX_ROOT_NAME} bytes, a type at most {MAX_ROOT_KIND}"
            )));
        }
        let offset = (ptr as usize).wrapping_sub(inner.base);
        if !ptr.is_null() && offset >= inner.capacity {
            return Err(invalid(format!(
                "root {name}: {ptr:p} is not in heap {}: in the next run nothing would be there",
                inner.name.file
            )));
        }
        let mut changed = lock(&inner.roots);
        let (at, former) = inner.place_of_root(name, &changed)?;
        let root = Root {
            name: name.into(),
            kind: kind.into(),
            pointer: ptr as u64,
        };
        let bytes = match ptr.is_null() {
            true => [0; ROOT_LEN],
            false => root.encode(),
        };
        let to = inner.at_root(at);
        log(to, ROOT_LEN)?;
        let mut before = Box::new([0; ROOT_LEN]);
        // SAFETY: a root of the head, which only the holder of `roots` writes.
        unsafe {
            to.copy_to_nonoverlapping(before.as_mut_ptr(), ROOT_LEN);
            to.copy_from_nonoverlapping(bytes.as_ptr(), ROOT_LEN);
        }
        let owner = mojim_undo::me();
        changed.push(Changed {
            place: at,
            owner,
            former,
        });
        Ok(HeldRoot {
            heap: inner,
            place: at,
            owner,
            before,
        })
    }
}

impl Inner {
    /// Where a root of this name is, or is to be, and the name that is there.
    fn place_of_root(&self, name: &str, changed: &[Changed]) -> Result<(usize, Option<String>)> {
        let me = mojim_undo::me();
        let others = || changed.iter().filter(|c| c.owner != me);
        let mut roots = self.roots()?;
        let at = roots
            .iter()
            .position(|r| r.as_ref().is_some_and(|r| r.name == name));
        if others().any(|c| at == Some(c.place) || c.former.as_deref() == Some(name)) {
            return Err(Error::Busy(format!(
                "root {name} of heap {} is being changed by an open transaction of another thread",
                self.name.file
            )));
        }
        // An abort of the other transaction would put back what it has removed.
        let is_free = |i: &usize| roots[*i].is_none() && others().all(|c| c.place != *i);
        let Some(at) = at.or_else(|| (0..MAX_ROOTS).find(is_free)) else {
            return Err(invalid(format!(
                "heap {} has {MAX_ROOTS} roots, and cannot have more",
                self.name.file
            )));
        };
        Ok((at, roots.swap_remove(at).map(|r| r.name)))
    }

    /// The `i`th root's place.
    fn at_root(&self, i: usize) -> *mut u8 {
        (self.base + root_at(i)) as *mut u8
    }

    fn roots(&self) -> Result<Vec<Option<Root>>> {
        // SAFETY: the head, which is mapped.
        let head = unsafe { std::slice::from_raw_parts(self.base as *const u8, HEAD_LEN) };
        self.roots_of(head)
    }

    fn roots_of(&self, head: &[u8]) -> Result<Vec<Option<Root>>> {
        let all = (0..MAX_ROOTS).map(|i| {
            let bytes = &head[root_at(i)..][..ROOT_LEN];
            Root::decode(bytes).map_err(|e| self.name.damaged(e))
        });
        all.collect()
    }

    /// Of a reader: the roots, as of one moment. What they point to is mapped.
    fn follow(&self) -> Result<Vec<Option<Root>>> {
        let _changes = lock(&CHANGES);
        self.check_whole()?;
        let head = self.head_of_one_state()?;
        let new = self.shared.slabs.new_chunks(&head);
        for c in new.map_err(|e| self.name.damaged(e))? {
            let at = (self.base + c.offset as usize) as *mut u8;
            self.space.map(c.offset, c.len as usize, at)?;
            self.shared.slabs.know(c);
        }
        let end = self.shared.slabs.end();
        let roots = self.roots_of(&head)?;
        match roots.iter().flatten().find(|r| r.pointer >= end) {
            Some(r) => Err((self.name).damaged(format!("root {} points out of it", r.name))),
            None => Ok(roots),
        }
    }

    /// Of a reader: the head, all of it as of one moment.
    fn head_of_one_state(&self) -> Result<Vec<u8>> {
        let mut head = vec![0; HEAD_LEN];
        let end = Instant::now() + PATIENCE;
        loop {
            let shown = self.space.shown();
            fence(SeqCst);
            // SAFETY: the head, which is mapped.
            unsafe {
                head.as_mut_ptr()
                    .copy_from(self.base as *const u8, HEAD_LEN)
            };
            fence(SeqCst);
            if self.space.shown() == shown {
                return Ok(head);
            }
            if Instant::now() > end {
                return Err(Error::Timeout(format!(
                    "heap {} changes faster than its roots can be read",
                    self.name.file
                )));
            }
        }
    }
}
