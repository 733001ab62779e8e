//! How much of a node's disk a copy leaves free, and what it keeps for itself.
//!
//! Owns two reserves. What is counted as free leaves out the first one ([`reserve`]): programs do
//! not get it, so that what they remove and cut can be applied. A change of names or sizes is
//! written as a whole catalogue, beside the old one. A mount refuses, `df` shows, and `mojim
//! status` warns by this one figure. But others write to the disk, too: so the copy has some files
//! that keep room. When applying finds none they go, and it is tried again.
//!
//! Invariant: nothing is lost with the files that keep room; they may be missing at any time.

use std::path::{Path, PathBuf};

use mojim_env::{Env, OpenHow};

/// Bytes that a copy leaves free, beside those for its catalogue.
const RESERVE: u64 = 16 << 20;
/// Files that a copy leaves free.
pub const RESERVED_FILES: u64 = 128;

/// How many files keep room: also for those that a change of names makes.
const KEPT: u64 = 4;
/// What they have in all, beside the room for the catalogue.
const KEPT_BYTES: u64 = 1 << 20;
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

/// Where a file lies that keeps room.
fn kept(meta: &Path) -> impl Iterator<Item = PathBuf> {
    (0..KEPT).map(move |n| meta.join(format!("reserve.{n}")))
}

/// Gives the room that is kept to whoever asks first. False if none was kept.
pub fn release(env: &dyn Env, meta: &Path) -> bool {
    // All of them.
    let released = kept(meta).map(|path| env.remove(&path).is_ok());
    released.fold(false, |any, one| any | one)
}

/// Bytes of each of the files that are to keep room.
pub fn to_keep(env: &dyn Env, meta: &Path) -> u64 {
    let all = KEPT_BYTES + 2 * catalog(env, meta);
    (all / KEPT).next_multiple_of(KEPT_STEP)
}

/// Keeps room in files of so many bytes each, if there is plenty. False if not all of it is kept.
pub fn keep(env: &dyn Env, dir: &Path, meta: &Path, each: u64) -> bool {
    let Ok(space) = env.space(dir) else {
        return false;
    };
    // One that does not count has no bound, or does not tell.
    if space.bytes == u64::MAX || space.bytes < reserve(env, meta) + KEPT * each {
        return false;
    }
    let how = OpenHow {
        create: true,
        write: true,
        ..OpenHow::default()
    };
    let keep = |path: PathBuf| env.open(&path, how)?.allocate(each);
    let all = kept(meta).try_for_each(keep).is_ok();
    // Others were faster, or this file system cannot do it.
    if !all {
        release(env, meta);
    }
    all
}
