//! Directories that programs have open, in a mount that only shows.
//!
//! Owns their handles, the listings that programs have begun, and what those directories were that
//! the volume has no more.
//!
//! Invariants:
//! - A listing is as of one LSN, from its first entry to its last. It is made when a program begins
//!   to read the directory: to open one takes no listing.
//! - Handles share a directory's listing as long as its names stay the same. The entries of all
//!   listings have a bound: [`OpenDirs::list`].
//! - Listings are made and dropped without the lock.
//! - An open directory stays, also where the volume has it no more: its attributes can be asked
//!   for, and it can be listed, as the last view had it that did. opendir(3) asks for attributes
//!   once the directory is open, and then the kernel does not look again for what is gone.
//! - To open a directory that the view lacks fails with ESTALE: then the kernel looks for its name
//!   once more, and no path leads to an old directory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

use mojim_env::locks::lock;
use rustix::io::Errno;

use crate::fs::{Result, Seen};
use crate::shown::{Entry, Shown};

/// So many entries may be in listings, or [`PER_NODE`] for each node of the view, if that is more.
const MOST: usize = 1 << 20;
const PER_NODE: usize = 4;

/// What a directory has.
pub(crate) struct Listing {
    pub(crate) entries: Vec<Entry>,
    /// Entries of all listings.
    all: Arc<AtomicUsize>,
}

impl Drop for Listing {
    fn drop(&mut self) {
        self.all.fetch_sub(self.entries.len(), Relaxed);
    }
}

/// A directory that is open.
#[derive(Default)]
struct Dir {
    handles: usize,
    /// The listing that was made last, if somebody has it still, and of which view.
    newest: (u64, Weak<Listing>),
    /// What it was, if the view lacks it.
    gone: Option<Gone>,
}

struct Gone {
    was: Seen,
    /// `None`: there were too many entries.
    listing: Option<Arc<Listing>>,
}

struct Handle {
    ino: u64,
    /// The listing that was begun.
    listing: Option<Arc<Listing>>,
}

#[derive(Default)]
struct All {
    /// By number.
    dirs: HashMap<u64, Dir>,
    handles: HashMap<u64, Handle>,
    last: u64,
}

/// What a listing that begins is.
enum Begun {
    Made(Arc<Listing>),
    /// It is to be made, after this one.
    After(Option<Arc<Listing>>),
}

impl All {
    fn open(&mut self, ino: u64) -> u64 {
        self.last += 1;
        self.dirs.entry(ino).or_default().handles += 1;
        let listing = None;
        self.handles.insert(self.last, Handle { ino, listing });
        self.last
    }

    /// Returns what is to be dropped.
    fn close(&mut self, handle: u64) -> Option<(Handle, Option<Dir>)> {
        let closed = self.handles.remove(&handle)?;
        let dir = self.dirs.get_mut(&closed.ino)?;
        dir.handles -= 1;
        let dir = match dir.handles {
            0 => self.dirs.remove(&closed.ino),
            _ => None,
        };
        Some((closed, dir))
    }

    fn begun(&self, ino: u64, shown: &Shown) -> Result<Begun> {
        let dir = self.dirs.get(&ino).ok_or(Errno::BADF)?;
        if let Err(e) = shown.node(ino) {
            let gone = dir.gone.as_ref().ok_or(e)?;
            let listing = gone.listing.clone().ok_or(Errno::NFILE)?;
            return Ok(Begun::Made(listing));
        }
        let (version, newest) = (dir.newest.0, dir.newest.1.upgrade());
        Ok(match newest {
            Some(newest) if version == shown.version => Begun::Made(newest),
            newest => Begun::After(newest),
        })
    }

    /// Returns what is to be dropped.
    fn set(&mut self, handle: u64, version: u64, listing: &Arc<Listing>) -> Option<Arc<Listing>> {
        let open = self.handles.get_mut(&handle)?;
        if let Some(dir) = self.dirs.get_mut(&open.ino) {
            dir.newest = (version, Arc::downgrade(listing));
        }
        open.listing.replace(listing.clone())
    }

    /// Directories that `old` has and `new` lacks, with their last listings.
    fn lost(&self, old: &Shown, new: &Shown) -> Vec<(u64, Option<Arc<Listing>>)> {
        let open = self.dirs.iter();
        let lost = open.filter(|(ino, _)| new.node(**ino).is_err() && old.node(**ino).is_ok());
        lost.map(|(ino, dir)| (*ino, dir.newest.1.upgrade()))
            .collect()
    }
}

/// All that are open.
pub(crate) struct OpenDirs {
    all: Mutex<All>,
    /// Entries of all listings.
    entries: Arc<AtomicUsize>,
    most: usize,
}

impl OpenDirs {
    pub(crate) fn new() -> OpenDirs {
        OpenDirs {
            all: Mutex::default(),
            entries: Arc::default(),
            most: MOST,
        }
    }

    /// Opens a directory of the view. Returns its handle. Until then no other view comes.
    ///
    /// # Errors
    /// ESTALE if the view does not have it.
    pub(crate) fn open(&self, shown: &Shown, ino: u64) -> Result<u64> {
        match shown.node(ino)?.is_dir() {
            true => Ok(lock(&self.all).open(ino)),
            false => Err(Errno::NOTDIR),
        }
    }

    pub(crate) fn close(&self, handle: u64) {
        let closed = lock(&self.all).close(handle);
        drop(closed);
    }

    /// A listing begins: it is as of this view, or of the last one that had the directory.
    ///
    /// # Errors
    /// ENFILE if there are too many entries in listings.
    pub(crate) fn begin(&self, handle: u64, shown: &Shown) -> Result<Arc<Listing>> {
        let (ino, old) = {
            let mut all = lock(&self.all);
            let open = all.handles.get_mut(&handle).ok_or(Errno::BADF)?;
            (open.ino, open.listing.take())
        };
        let begun = lock(&self.all).begun(ino, shown)?;
        drop(old);
        let listing = match begun {
            Begun::Made(listing) => listing,
            Begun::After(newest) => self.list(shown, ino, newest)?,
        };
        let old = lock(&self.all).set(handle, shown.version, &listing);
        drop(old);
        Ok(listing)
    }

    /// Makes a listing, which is `newest` if that is the same.
    ///
    /// # Errors
    /// ENFILE if the others have more entries than may be. So any directory can be listed, however
    /// large.
    fn list(&self, shown: &Shown, ino: u64, newest: Option<Arc<Listing>>) -> Result<Arc<Listing>> {
        let most = self.most.max(PER_NODE * shown.tree.counts() as usize);
        let own = newest.as_ref().map_or(0, |l| l.entries.len());
        if self.entries.load(Relaxed).saturating_sub(own) > most {
            return Err(Errno::NFILE);
        }
        let entries = shown.entries(ino)?;
        if let Some(newest) = newest.filter(|l| l.entries == entries) {
            return Ok(newest);
        }
        let all = self.entries.clone();
        all.fetch_add(entries.len(), Relaxed);
        Ok(Arc::new(Listing { entries, all }))
    }

    /// The listing that was begun.
    pub(crate) fn listing(&self, handle: u64) -> Result<Option<Arc<Listing>>> {
        let all = lock(&self.all);
        let open = all.handles.get(&handle).ok_or(Errno::BADF)?;
        Ok(open.listing.clone())
    }

    /// `new` follows `old`: what it lacks of what is open is kept as `old` has it.
    pub(crate) fn keep(&self, old: &Shown, new: &Shown) {
        let lost = lock(&self.all).lost(old, new);
        for (ino, newest) in lost {
            let Ok(node) = old.node(ino) else { continue };
            // It has no name.
            let links = 0;
            let was = Seen {
                links,
                ..old.seen(node)
            };
            let listing = self.list(old, ino, newest).ok();
            let gone = Some(Gone { was, listing });
            let earlier = match lock(&self.all).dirs.get_mut(&ino) {
                Some(dir) => std::mem::replace(&mut dir.gone, gone),
                None => gone,
            };
            drop(earlier);
        }
    }

    /// What an open directory was that the view lacks.
    pub(crate) fn removed(&self, ino: u64) -> Option<Seen> {
        let all = lock(&self.all);
        let gone = all.dirs.get(&ino)?.gone.as_ref()?;
        Some(gone.was.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shown::tests::{kept, view};
    use crate::tree::ROOT;

    /// Views of a volume with these files, one after the other.
    fn views(all: &[&[&str]]) -> Vec<Shown> {
        let mut views: Vec<Shown> = Vec::new();
        for (version, names) in all.iter().enumerate() {
            let files: Vec<_> = (1..).zip(names.iter().copied()).collect();
            views.push(view(version as u64, &files, views.last()));
        }
        views
    }

    fn number(shown: &Shown) -> u64 {
        shown.named(ROOT, b"d").unwrap().ino
    }

    fn names(listing: &Listing) -> Vec<String> {
        let names = listing.entries.iter().map(|e| e.name.to_vec());
        names.map(|n| String::from_utf8(n).unwrap()).collect()
    }

    fn held(dirs: &OpenDirs, handle: u64) -> Vec<String> {
        names(&dirs.listing(handle).unwrap().unwrap())
    }

    fn entries(dirs: &OpenDirs) -> usize {
        dirs.entries.load(Relaxed)
    }

    /// A view without the directory came between open and fstat of opendir(3), which failed with ESTALE. Here two
    /// such views come.
    #[test]
    fn an_open_directory_stays_through_views_that_lack_it() {
        let views = views(&[&["d/a"], &["d/a", "d/b"], &["e/a"], &[]]);
        let ino = number(&views[0]);
        let dirs = OpenDirs::new();
        let first = dirs.open(&views[0], ino).unwrap();
        dirs.begin(first, &views[0]).unwrap();
        dirs.keep(&views[0], &views[1]);
        assert!(dirs.removed(ino).is_none());
        // Only once it begins anew is a listing as of another view.
        assert_eq!(held(&dirs, first), [".", "..", "a"]);
        let second = dirs.open(&views[1], ino).unwrap();
        for w in views[1..].windows(2) {
            dirs.keep(&w[0], &w[1]);
            assert_eq!(w[1].node(ino).err(), Some(Errno::STALE));
            let was = dirs.removed(ino).unwrap();
            assert_eq!((was.ino, was.links), (ino, 0));
            // The kernel is to look for the name once more.
            assert_eq!(dirs.open(&w[1], ino).err(), Some(Errno::STALE));
        }
        assert_eq!(held(&dirs, first), [".", "..", "a"]);
        for handle in [first, second] {
            let listing = dirs.begin(handle, &views[3]).unwrap();
            assert_eq!(names(&listing), [".", "..", "a", "b"]);
        }
        dirs.close(first);
        assert!(dirs.removed(ino).is_some());
        dirs.close(second);
        assert!(dirs.removed(ino).is_none());
        assert_eq!(dirs.begin(second, &views[0]).err(), Some(Errno::BADF));
        assert_eq!(entries(&dirs), 0);
    }

    /// The last view was taken for that with the greatest version, and a directory for what the first handle had
    /// seen of it. Here it goes twice, and was another one the second time.
    #[test]
    fn a_removed_directory_is_what_the_last_view_had() {
        let d = |links: &[(u64, u64, &'static str, Option<u32>)]| {
            [&[(7, ROOT, "d", None)], links].concat()
        };
        let none = [(9, ROOT, "other", None)];
        let first = kept(9, &d(&[(8, 7, "a", None)]), &[], None);
        let second = kept(5, &none, &[], Some(&first));
        let third = kept(3, &d(&[(8, 7, "b", None)]), &[], Some(&second));
        let last = kept(4, &none, &[], Some(&third));
        let dirs = OpenDirs::new();
        let handle = dirs.open(&first, 7).unwrap();
        let listed = |shown| names(&dirs.begin(handle, shown).unwrap());
        assert_eq!(listed(&first), [".", "..", "a"]);
        for (w, has) in [([&first, &second], "a"), ([&third, &last], "b")] {
            dirs.keep(w[0], w[1]);
            assert_eq!(listed(w[1]), [".", "..", has]);
        }
    }

    /// Each open copied the whole directory, under the lock that all calls need, and kept it until it was closed.
    #[test]
    fn handles_share_a_listing_as_long_as_it_is_the_same() {
        let views = views(&[&["d/a"], &["d/a", "e"], &["d/a", "d/b"]]);
        let ino = number(&views[0]);
        let dirs = OpenDirs::new();
        let open: Vec<u64> = (0..3).map(|_| dirs.open(&views[0], ino).unwrap()).collect();
        assert_eq!(entries(&dirs), 0);
        let begin = |handle: usize, view: usize| dirs.begin(open[handle], &views[view]).unwrap();
        let first = begin(0, 0);
        for (handle, view) in [(1, 0), (2, 1), (0, 1)] {
            assert!(Arc::ptr_eq(&begin(handle, view), &first));
        }
        drop(first);
        assert_eq!(entries(&dirs), 3);
        begin(0, 2);
        assert_eq!(entries(&dirs), 3 + 4);
        begin(1, 2);
        dirs.close(open[2]);
        assert_eq!(entries(&dirs), 4);
    }

    /// A thousand open directories of a hundred thousand names took 18 GB.
    #[test]
    fn entries_of_listings_have_a_bound() {
        let files: Vec<String> = (0..20).map(|n| format!("d/{n}")).collect();
        let files: Vec<[&str; 1]> = files.iter().map(|f| [&f[..]]).collect();
        let files: Vec<&[&str]> = files.iter().map(|f| &f[..]).collect();
        let views = views(&files);
        let ino = number(&views[0]);
        let dirs = OpenDirs {
            most: 0,
            ..OpenDirs::new()
        };
        let open: Vec<u64> = (0..20)
            .map(|_| dirs.open(&views[0], ino).unwrap())
            .collect();
        let begin = |n: usize| dirs.begin(open[n], &views[n]).err();
        // Three nodes, and three entries: four listings, the one that was last, and the one that is made.
        let refused = (0..20).find(|n| begin(*n).is_some()).unwrap();
        assert_eq!((refused, entries(&dirs)), (6, 6 * 3));
        assert_eq!(begin(refused), Some(Errno::NFILE));
        // Those that have one go on, and one that ends makes room.
        assert_eq!(held(&dirs, open[0]), [".", "..", "0"]);
        dirs.close(open[0]);
        assert_eq!(begin(refused), None);
        // What cannot be kept is no reason to forget that the directory was there.
        let none = view(20, &[], views.last());
        dirs.keep(&views[19], &none);
        assert_eq!(dirs.removed(ino).unwrap().links, 0);
        assert_eq!(dirs.begin(open[10], &none).err(), Some(Errno::NFILE));
    }
}
