//! Directories that programs have open, in a mount that only shows.
//!
//! Owns their handles, and what each directory was when it was opened, or last listed from the start.
//!
//! Invariants:
//! - A listing is as of one LSN, from its first entry to its last.
//! - An open directory stays, also where the volume has it no more: its attributes can be asked
//!   for, and it can be listed. opendir(3) asks for attributes once the directory is open, and
//!   then the kernel does not look again for what is gone.
//! - To open a directory that the view lacks fails with ESTALE: then the kernel looks for its name
//!   once more, and no path leads to an old directory.

use std::collections::HashMap;
use std::sync::Arc;

use rustix::io::Errno;

use crate::fs::{Result, Seen};
use crate::shown::Shown;

/// Names in a directory, and what each leads to.
pub(crate) type Listing = Arc<Vec<(Vec<u8>, Seen)>>;

struct Open {
    ino: u64,
    /// That of the view in which it was so.
    version: u64,
    seen: Seen,
    entries: Listing,
}

impl Open {
    fn of(shown: &Shown, ino: u64) -> Result<Open> {
        Ok(Open {
            ino,
            version: shown.version,
            seen: shown.seen(shown.node(ino)?),
            entries: Arc::new(shown.entries(ino)?),
        })
    }
}

/// All that are open, by handle.
#[derive(Default)]
pub(crate) struct OpenDirs {
    open: HashMap<u64, Open>,
    last: u64,
}

impl OpenDirs {
    /// Opens a directory of a view. Returns its handle.
    ///
    /// # Errors
    /// ESTALE if the view does not have it.
    pub(crate) fn open(&mut self, shown: &Shown, ino: u64) -> Result<u64> {
        let open = Open::of(shown, ino)?;
        self.last += 1;
        self.open.insert(self.last, open);
        Ok(self.last)
    }

    pub(crate) fn close(&mut self, handle: u64) {
        self.open.remove(&handle);
    }

    /// A listing begins: it is as of this view, if that has the directory.
    pub(crate) fn begin(&mut self, handle: u64, shown: &Shown) {
        if let Some(open) = self.open.get_mut(&handle)
            && open.version != shown.version
            && let Ok(new) = Open::of(shown, open.ino)
        {
            *open = new;
        }
    }

    /// The listing that was begun, or what the directory had when it was opened.
    pub(crate) fn listing(&self, handle: u64) -> Result<Listing> {
        let open = self.open.get(&handle).ok_or(Errno::BADF)?;
        Ok(open.entries.clone())
    }

    /// What an open directory was that the view lacks. It has no name.
    pub(crate) fn removed(&self, ino: u64) -> Option<Seen> {
        let of = self.open.values().filter(|o| o.ino == ino);
        let last = of.max_by_key(|o| o.version)?;
        Some(Seen {
            links: 0,
            ..last.seen.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shown::Dirs;
    use crate::tree::{Asker, ROOT};

    /// Views of a volume with these files, one after the other.
    fn views(all: &[&[&str]]) -> Vec<Shown> {
        let asker = Asker {
            uid: 0,
            gid: 0,
            now: crate::fs::now(),
        };
        let mut dirs = Dirs::new();
        let mut view = |(n, names): (usize, &&[&str])| {
            let files = names.iter().zip(1..);
            let files = files.map(|(name, number)| (number, (*name).to_owned(), 0));
            Shown::of(n as u64, None, files.collect(), &mut dirs, asker).unwrap()
        };
        all.iter().enumerate().map(&mut view).collect()
    }

    fn names(dirs: &OpenDirs, handle: u64) -> Vec<String> {
        let listing = dirs.listing(handle).unwrap();
        let name = |(name, _): &(Vec<u8>, Seen)| String::from_utf8(name.clone()).unwrap();
        listing.iter().map(name).collect()
    }

    /// A view without the directory came between open and fstat of opendir(3), which failed with ESTALE. Here two
    /// such views come.
    #[test]
    fn an_open_directory_stays_through_views_that_lack_it() {
        let views = views(&[&["d/a"], &["d/a", "d/b"], &["e/a"], &[]]);
        let ino = views[0].named(ROOT, b"d").unwrap().ino;
        let mut dirs = OpenDirs::default();
        let [first, second] = [0, 1].map(|v| dirs.open(&views[v], ino).unwrap());
        // Only once it begins anew is a listing as of another view.
        assert_eq!(names(&dirs, first), [".", "..", "a"]);
        dirs.begin(first, &views[1]);
        assert_eq!(names(&dirs, first), [".", "..", "a", "b"]);
        for view in &views[2..] {
            assert_eq!(view.node(ino).err(), Some(Errno::STALE));
            dirs.begin(first, view);
            dirs.begin(second, view);
            for handle in [first, second] {
                assert_eq!(names(&dirs, handle), [".", "..", "a", "b"]);
            }
            let was = dirs.removed(ino).unwrap();
            assert_eq!((was.ino, was.links), (ino, 0));
            // The kernel is to look for the name once more.
            assert_eq!(dirs.open(view, ino).err(), Some(Errno::STALE));
        }
        dirs.close(first);
        assert!(dirs.removed(ino).is_some());
        dirs.close(second);
        assert!(dirs.removed(ino).is_none());
        assert_eq!(dirs.listing(second).err(), Some(Errno::BADF));
    }
}
