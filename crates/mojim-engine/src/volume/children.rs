//! Forked children of a process that shares memory.
//!
//! A child has its parent's mappings of shared working copies: the same memory. So, before the fork
//! returns in the child, the child becomes a guest of the owner of the volume, which may be its
//! parent: its stores are noticed from the first on. Private working copies become copies in the
//! child, and cannot be committed there (`fork.rs` of `mojim-memory`).
//!
//! Owns the handlers of `pthread_atfork`. The child takes no lock that a thread of its parent may
//! have held, and closes the ends of lines that it inherits: as long as it kept them, the other
//! ends would not notice that the parent has ended. Until the child is a guest, the parent waits,
//! keeps the memory that the child will show, and lets no window come or go: a parent that unmapped
//! or ended at once would leave the child with memory that no owner has.

use std::cell::Cell;
use std::io::{PipeReader, PipeWriter, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, MutexGuard, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::share::Guest;
use crate::share::guest::{self, Inherited, Still};
use crate::share::line::End;
use crate::share::wire::Shown;
use mojim_env::Result;
use mojim_env::descriptors;
use mojim_env::locks::lock;
use mojim_env::threads::{cancel_again, cancel_waits};
use mojim_memory::fork::{Once, is_forked, register};
use mojim_memory::shared::Shared;
use mojim_replica::layout;

use super::attached::{ATTACHED, Inner, Volume};
use super::table::TABLE;

#[derive(Default)]
struct Family {
    all: Vec<Inherited>,
    /// The descriptors that the child closes. Held, so that no other thread closes one before the
    /// fork, and no other descriptor gets its number.
    ends: Vec<End>,
    /// Shared working copies, each kept by a window of no bytes.
    kept: Vec<(Arc<Inner>, Arc<Shared>, u64)>,
    still: Option<(MutexGuard<'static, ()>, Option<Still>)>,
    done: Option<Done>,
}

/// Both ends of a pipe, through which the child reports that it is a guest.
struct Done {
    hears: PipeReader,
    says: PipeWriter,
}

impl Done {
    fn new() -> std::io::Result<Done> {
        descriptors::opening(|| {
            let (hears, says) = std::io::pipe()?;
            Ok(Done {
                hears: descriptors::above(hears.into())?.into(),
                says: descriptors::above(says.into())?.into(),
            })
        })
    }

    /// In the child.
    fn say(mut self) {
        // The child has both ends: if the parent waits no longer, no SIGPIPE comes.
        let _ = self.says.write(&[1]);
    }

    /// In the parent: keeps the reading end, so that only the child, if there is one, has the
    /// writing end. glibc calls the parent's handlers also if a fork fails.
    fn of_parent(self) -> PipeReader {
        self.hears
    }
}

/// Waits until the child is done, or has ended; false if that takes too long. Then the child finds
/// out by itself what became of its parent.
fn is_done(child: &PipeReader) -> bool {
    let mut fds = [PollFd::new(child, PollFlags::IN)];
    let limit = Timespec::try_from(guest::AT_FORK).unwrap_or_default();
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&limit))).is_ok_and(|n| n > 0)
}

thread_local! {
    /// What the handlers of the fork that this thread is in pass on.
    static AT_FORK: Cell<Option<Family>> = const { Cell::new(None) };
}

/// Installs the fork handlers, which act once something is attached.
///
/// An interposer calls this, through `mojim_directory`, before it takes a lock that its own fork
/// handlers need: before glibc 2.36, registering a handler waits for every fork under way, and the
/// handlers of such a fork would wait for that lock.
pub fn expect_forks() {
    static ONCE: Once = Once::new();
    // The handlers need the mark that this one sets in a child.
    register();
    ONCE.call(|| {
        // SAFETY: handlers of this module, which let no panic out.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

extern "C" fn before() {
    let cancel = cancel_waits();
    let _ = catch_unwind(|| {
        let mut family = Family::default();
        let still = TABLE.still();
        if !is_forked() {
            let all: Vec<_> = lock(&ATTACHED).iter().filter_map(Weak::upgrade).collect();
            for inner in all {
                // If this fails, the child cannot become a guest, and cannot store.
                let _ = inner.before_fork(&mut family);
            }
        }
        let guests = guest::before_fork(&mut family.all, &mut family.ends);
        family.still = Some((still, guests));
        if family.all.iter().any(|i| !i.windows.is_empty()) {
            // Without the pipe the parent does not wait.
            family.done = Done::new().ok();
        }
        // Also if there is nothing to inherit: the child must release `still`, or its lock would
        // stay held.
        let _ = AT_FORK.try_with(|f| f.set(Some(family)));
    });
    cancel_again(cancel);
}

extern "C" fn in_parent() {
    let Some(mut family) = AT_FORK.try_with(Cell::take).ok().flatten() else {
        return;
    };
    let cancel = cancel_waits();
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // Closes the writing end before another thread can fork.
        let child = family.done.take().map(Done::of_parent);
        // Releases the table of this process's own windows: a thread that waits for it may hold a
        // lock that the child's requests need, and `kept` keeps what those windows show. The
        // windows as a guest stay locked while the child joins: nothing else keeps them.
        let guests = family.still.take().map(|(_, guests)| guests);
        let _ = child.as_ref().map(is_done);
        drop(guests);
        for (inner, copy, id) in family.kept.drain(..) {
            inner.take_back(&copy, id, false);
        }
    }));
    cancel_again(cancel);
}

extern "C" fn in_child() {
    let Some(family) = AT_FORK.try_with(Cell::take).ok().flatten() else {
        return;
    };
    let cancel = cancel_waits();
    let Family {
        all,
        ends,
        kept,
        still,
        done,
    } = family;
    // The parent gives them back.
    std::mem::forget(kept);
    drop(still);
    let _ = catch_unwind(AssertUnwindSafe(|| guest::inherit(all, ends)));
    if let Some(done) = done {
        done.say();
    }
    cancel_again(cancel);
}

impl Inner {
    fn before_fork(self: &Arc<Inner>, family: &mut Family) -> Result<()> {
        // It has given everything back, and the numbers of its descriptors may be others'.
        if self.detached.load(SeqCst) {
            return Ok(());
        }
        let copies = lock(&self.shared).clone();
        let mut windows = Vec::new();
        for (copy, region) in copies {
            // With an identity that no memory has, the child can only read the memory.
            let memory = copy.identity().unwrap_or(0);
            let before = windows.len();
            for m in self.windows() {
                if Arc::ptr_eq(&m.region, &region) {
                    windows.push(Shown {
                        file: region.file,
                        offset: m.window.at as u64,
                        len: m.window.span.len() as u64,
                        base: m.window.span.start as u64,
                        memory,
                        write: m.window.write,
                        atomic: m.window.atomic,
                        inherited: true,
                    });
                }
            }
            if windows.len() > before {
                let id = copy.watch(0, 0, None);
                family.kept.push((self.clone(), copy, id));
            }
        }
        let shares = match windows.is_empty() {
            true => Ok(()),
            false => self.share(),
        };
        let ends = lock(&self.owner).ends();
        if !windows.is_empty() || !ends.is_empty() {
            family.ends.extend(ends);
            family.all.push(Inherited {
                origin: self.origin(),
                volume: self.volume.name.clone(),
                directory: layout::data_dir(&self.node, &self.volume.name),
                socket: layout::share_socket(&self.node, &self.volume.name),
                windows,
            });
        }
        shares
    }

    fn origin(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }
}

impl Volume {
    /// In a forked child of the process that attached: the child's handle of this volume as a guest
    /// of its parent. `None` elsewhere, and if the parent shared nothing.
    pub fn in_child(&self) -> Option<Guest> {
        Guest::inherited(self.0.origin())
    }

    /// Whether this process can use this handle: false in a forked child that shares nothing with
    /// its parent, and once it is detached.
    pub fn is_usable(&self) -> bool {
        match is_forked() {
            true => self.in_child().is_some(),
            false => self.0.check_attached().is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fork that failed, or whose child was killed at once, took five seconds.
    #[test]
    fn nobody_waits_for_a_child_that_is_not_there() {
        assert!(is_done(&Done::new().unwrap().of_parent()));
    }
}
