//! How much of a node's disk a copy leaves free, and what it keeps for itself.
//!
//! Owns two reserves. The room that is counted as free leaves out the first one ([`reserve`]):
//! programs do not get it, so that what they remove and cut can be applied. A change of names or
//! sizes is written as a whole catalogue, beside the old one. A mount refuses, `df` shows, and
//! `mojim status` warns by this one figure. But others write to the disk, too: so the copy has some
//! files that keep room. When applying finds none, those that keep it for anything go, and it is
//! tried again. The catalogue and the notes of names are then written into the others.
//!
//! Invariants:
//! - Nothing is lost with the files that keep room. They may be missing at any time.
//! - No bytes of data files take the room that is kept for the catalogue and the notes: a removal
//!   needs no other room than that.

use std::path::{Path, PathBuf};

use mojim_env::{Env, OpenHow};

/// Bytes that a copy leaves free, beside those for its catalogue.
const RESERVE: u64 = 16 << 20;
/// Files that a copy leaves free.
pub const RESERVED_FILES: u64 = 128;

/// How many files keep room for anything: also for files that a change of names makes.
const KEPT: u64 = 2;
/// How many more keep it for the catalogue and the notes alone: for one of each.
const KEPT_FOR_NAMES: u64 = 2;
/// What each of them has, those for the catalogue beside the room for it.
const KEPT_BYTES: u64 = 256 << 10;
/// They grow by so much.
const KEPT_STEP: u64 = 64 << 10;

fn catalog(env: &dyn Env, meta: &Path) -> u64 {
    let catalog = env.open(&meta.join("catalog"), OpenHow::default());
    catalog.and_then(|f| f.len()).unwrap_or(0)
}

/// Bytes that the copy with its catalogue in `meta` leaves free: twice the catalogue (as it is
/// replaced, and a note of what is removed), and 16 MiB.
pub fn reserve(env: &dyn Env, meta: &Path) -> u64 {
    RESERVE + 2 * catalog(env, meta)
}

fn path(meta: &Path, n: u64) -> PathBuf {
    meta.join(format!("reserve.{n}"))
}

/// Where the files lie that keep room for anything.
fn kept(meta: &Path) -> impl Iterator<Item = PathBuf> {
    (0..KEPT).map(move |n| path(meta, n))
}

/// Where the files lie that keep room for the catalogue and the notes. They have no bytes: whoever
/// renames one may write it from its beginning.
pub fn kept_for_names(meta: &Path) -> impl Iterator<Item = PathBuf> {
    (KEPT..KEPT + KEPT_FOR_NAMES).map(move |n| path(meta, n))
}

/// Gives the room that is kept for anything to whoever asks first. False if none was kept.
pub fn release(env: &dyn Env, meta: &Path) -> bool {
    // All of them.
    let released = kept(meta).map(|path| env.remove(&path).is_ok());
    released.fold(false, |any, one| any | one)
}

/// Bytes of each of the files that are to keep room for the catalogue and the notes.
pub fn to_keep(env: &dyn Env, meta: &Path) -> u64 {
    (KEPT_BYTES + catalog(env, meta)).next_multiple_of(KEPT_STEP)
}

/// Keeps room in files: for names so many bytes each, and for anything, if there is plenty. False if
/// not all of it is kept.
pub fn keep(env: &dyn Env, dir: &Path, meta: &Path, each: u64) -> bool {
    let Ok(space) = env.space(dir) else {
        return false;
    };
    // One that does not count has no bound, or does not tell.
    if space.bytes == u64::MAX {
        return false;
    }
    let how = OpenHow {
        create: true,
        write: true,
        ..OpenHow::default()
    };
    let keep = |path: &Path, bytes| env.open(path, how)?.allocate(bytes);
    let mut all = true;
    for path in kept_for_names(meta) {
        let kept = keep(&path, each);
        all &= kept.is_ok();
        // One without room is a file of the disk at least. Where none can be kept, there is none.
        if kept.is_err_and(|e| e.kind() == std::io::ErrorKind::Unsupported) {
            let _ = env.remove(&path);
        }
    }
    let most = KEPT * KEPT_BYTES + KEPT_FOR_NAMES * each;
    if space.bytes < reserve(env, meta) + most {
        return false;
    }
    let rest = kept(meta).try_for_each(|path| keep(&path, KEPT_BYTES));
    // Others were faster, or this file system cannot do it.
    if rest.is_err() {
        release(env, meta);
    }
    all && rest.is_ok()
}
