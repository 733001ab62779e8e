//! A view: names and attributes of a volume as of one LSN, for a mount that only shows.
//!
//! Owns the tree of the view, and the numbers by which the kernel knows its nodes.
//!
//! Invariants:
//! - A number that the kernel knows means one file or directory for as long as the mount lasts,
//!   whatever the view. That holds also for what the file of names comes to have: the kernel may
//!   know it by a number of ours.
//! - A number of ours of a directory is known as long as each view has the directory. It does not
//!   come back. So a view knows no more of them than it and the view before have directories.

use std::collections::HashMap;

use rustix::io::Errno;

use crate::fs::{Result, Seen};
use crate::fuse::kind;
use crate::name_table::Kind;
use crate::tree::{Asker, NAMES, Node, ROOT, Tree};

/// Numbers of files that the file of names does not have, with that of the file behind it.
const FILES: u64 = 1 << 50;
/// The same of directories, with a number of ours behind it.
const DIRS: u64 = 1 << 51;

/// A name in a directory, and what it leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: Box<[u8]>,
    pub(crate) ino: u64,
    /// The type, as in a mode.
    pub(crate) kind: u32,
}

/// Names and attributes as of one LSN.
pub(crate) struct Shown {
    /// That of the listing.
    pub(crate) version: u64,
    pub(crate) tree: Tree,
    sizes: HashMap<u32, u64>,
    /// The kernel's numbers of nodes that the file of names does not have, and the tree's.
    outer: HashMap<u64, u64>,
    inner: HashMap<u64, u64>,
    /// Numbers of directories that the file of names does not have, by path.
    dirs: HashMap<Vec<u8>, u64>,
    /// Numbers of ours of directories that the file of names has come to have, with its own.
    adopted: HashMap<u64, u64>,
    /// No directory has had this number of ours or a greater one.
    next: u64,
}

impl Shown {
    /// Of a volume with these files: number, name and size. `names` is the file of names, `before`
    /// the view that was shown until now.
    ///
    /// # Errors
    /// What is wrong with the file of names.
    pub(crate) fn of(
        version: u64,
        names: Option<(u32, &[u8])>,
        mut files: Vec<(u32, String, u64)>,
        before: Option<&Shown>,
        asker: Asker,
    ) -> std::result::Result<Shown, String> {
        files.retain(|f| f.1 != NAMES);
        let tree = Tree::load(names, &files, Vec::new(), asker, 1)?;
        let mut shown = Shown {
            version,
            sizes: files.iter().map(|f| (f.0, f.2)).collect(),
            outer: HashMap::new(),
            inner: HashMap::new(),
            dirs: HashMap::new(),
            adopted: HashMap::new(),
            next: before.map_or(DIRS, |b| b.next),
            tree,
        };
        shown.number(before);
        if let Some(before) = before {
            shown.adopt(before);
        }
        Ok(shown)
    }

    /// Numbers what the file of names does not have.
    fn number(&mut self, before: Option<&Shown>) {
        for node in self.tree.nodes().filter(|n| !n.is_kept()) {
            let outer = match node.file() {
                _ if node.ino == ROOT => continue,
                Some(number) => FILES + u64::from(number),
                None => {
                    let path = self.tree.path(node);
                    let known = before.and_then(|b| b.dirs.get(&path)).copied();
                    let outer = known.unwrap_or(self.next);
                    self.next = self.next.max(outer + 1);
                    self.dirs.insert(path, outer);
                    outer
                }
            };
            self.outer.insert(node.ino, outer);
            self.inner.insert(outer, node.ino);
        }
    }

    /// Numbers of ours lead on to the directories that the file of names has come to have.
    fn adopt(&mut self, before: &Shown) {
        let own = before.dirs.iter().filter_map(|(path, outer)| {
            let node = self.tree.at(path)?;
            let is_it = node.is_kept() && node.is_dir() && self.has_of(node, before, path);
            is_it.then_some((*outer, node.ino))
        });
        let adopted = before.adopted.iter().map(|(outer, inner)| (*outer, *inner));
        let adopted = adopted.filter(|(_, inner)| self.tree.node(*inner).is_ok_and(Node::is_dir));
        self.adopted = own.chain(adopted).collect();
        self.inner.extend(&self.adopted);
    }

    /// Whether directory `dir` has a file of those that were at `path` before. A directory that was
    /// made anew at the path has none.
    fn has_of(&self, dir: &Node, before: &Shown, path: &[u8]) -> bool {
        let was = before.tree.at(path).map(|n| n.ino);
        let files = was.into_iter().flat_map(|i| before.tree.files_below(i));
        let mut numbers = files.filter_map(|i| before.tree.node(i).ok()?.file());
        numbers.any(|n| {
            let file = self.tree.node_of(n);
            file.is_ok_and(|f| self.tree.is_below(f.ino, dir.ino))
        })
    }

    /// The node of a number that the kernel knows.
    pub(crate) fn node(&self, ino: u64) -> Result<&Node> {
        match self.inner.get(&ino) {
            Some(inner) => self.tree.node(*inner),
            None if (FILES..DIRS).contains(&ino) => self.tree.node_of((ino - FILES) as u32),
            // In the tree it may be another one's.
            None if self.outer.contains_key(&ino) => Err(Errno::STALE),
            None => self.tree.node(ino),
        }
    }

    pub(crate) fn seen(&self, node: &Node) -> Seen {
        let size = match &node.attributes.kind {
            Kind::Link(target) => target.len() as u64,
            Kind::File(number) => self.sizes.get(number).copied().unwrap_or(0),
            _ => 0,
        };
        Seen {
            ino: self.outer.get(&node.ino).copied().unwrap_or(node.ino),
            attributes: node.attributes.clone(),
            size,
            blocks: size.div_ceil(512),
            is_sure: true,
            links: Tree::links(node),
        }
    }

    /// What has a name in a directory, which may be `.` or `..`.
    pub(crate) fn named(&self, dir: u64, name: &[u8]) -> Result<Seen> {
        let dir = self.node(dir)?;
        let ino = match name {
            b"." => dir.ino,
            b".." => self.tree.parent(dir.ino),
            name => self.tree.lookup(dir.ino, name)?,
        };
        Ok(self.seen(self.tree.node(ino)?))
    }

    /// What a directory has, with `.` and `..`, by name.
    pub(crate) fn entries(&self, dir: u64) -> Result<Vec<Entry>> {
        let dir = self.node(dir)?;
        if !dir.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let own = [(&b"."[..], dir.ino), (b"..", self.tree.parent(dir.ino))];
        let children = dir.children.iter().map(|(name, c)| (&name[..], c.ino));
        let entry = |(name, ino): (&[u8], u64)| {
            let node = self.tree.node(ino)?;
            Ok(Entry {
                name: name.into(),
                ino: self.outer.get(&ino).copied().unwrap_or(ino),
                kind: kind(&node.attributes.kind),
            })
        };
        own.into_iter().chain(children).map(entry).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::name_table::{Attributes, Cell};

    const ASKER: Asker = Asker {
        uid: 0,
        gid: 0,
        now: (0, 0),
    };

    /// A view of a volume with these files, which no mount made.
    pub(crate) fn view(version: u64, files: &[(u32, &str)], before: Option<&Shown>) -> Shown {
        kept(version, &[], files, before)
    }

    /// The same where the file of names has these: number, directory, name and file, if it is one.
    pub(crate) fn kept(
        version: u64,
        nodes: &[(u64, u64, &str, Option<u32>)],
        files: &[(u32, &str)],
        before: Option<&Shown>,
    ) -> Shown {
        let node = |ino, kind| Cell::Node {
            ino,
            attributes: Attributes {
                kind,
                mode: 0o755,
                uid: 0,
                gid: 0,
                accessed: (0, 0),
                modified: (0, 0),
                changed: (0, 0),
            },
        };
        let mut cells = vec![Cell::First(1000), node(ROOT, Kind::Dir)];
        for (ino, parent, name, file) in nodes {
            let (ino, parent, name) = (*ino, *parent, name.as_bytes().to_vec());
            cells.push(node(ino, file.map_or(Kind::Dir, Kind::File)));
            cells.push(Cell::Name { parent, ino, name });
        }
        let bytes: Vec<u8> = cells.iter().flat_map(Cell::encode).collect();
        let names = (!nodes.is_empty()).then_some((999, &bytes[..]));
        let files = files.iter().map(|(n, name)| (*n, (*name).to_owned(), 0));
        Shown::of(version, names, files.collect(), before, ASKER).unwrap()
    }

    fn number(shown: &Shown, name: &str) -> u64 {
        shown.named(ROOT, name.as_bytes()).unwrap().ino
    }

    /// A number of ours was bound to a path, not to a directory: once a mount on the primary had renamed the
    /// directory, it led nowhere, or to another one at the path.
    #[test]
    fn a_number_of_ours_leads_on_to_what_a_mount_comes_to_know() {
        let first = view(1, &[(5, "d/e/f")], None);
        let d = number(&first, "d");
        let e = first.named(d, b"e").unwrap().ino;
        let nodes = |name| {
            let dirs = [(7, ROOT, name, None), (8, 7, "e", None)];
            [&dirs[..], &[(9, 8, "f", Some(5))]].concat()
        };
        let second = kept(2, &nodes("d"), &[(5, "d/e/f")], Some(&first));
        let mut other = nodes("moved");
        other.push((10, ROOT, "d", None));
        let third = kept(3, &other, &[(5, "moved/e/f")], Some(&second));
        for (view, name) in [(&second, "d"), (&third, "moved")] {
            assert_eq!(number(view, name), 7);
            assert_eq!([d, e].map(|n| view.node(n).unwrap().ino), [7, 8]);
            assert_eq!(Tree::links(view.node(d).unwrap()), 3);
        }
        let last = kept(4, &[(10, ROOT, "d", None)], &[], Some(&third));
        assert_eq!([d, e].map(|n| last.node(n).err()), [Some(Errno::STALE); 2]);
        assert!(last.adopted.is_empty());
    }

    /// A directory that no mount made was removed while it was open here, and a mount on the primary made another
    /// one at its path: what was open was that one then, with its names and links.
    #[test]
    fn a_number_of_ours_leads_to_no_directory_made_anew() {
        let first = view(1, &[(5, "d/f")], None);
        let d = number(&first, "d");
        let new = [(7, ROOT, "d", None), (8, 7, "f", Some(6))];
        // With a view between that lacks it, and in one sync point.
        let none = view(2, &[(4, "other")], Some(&first));
        for before in [&none, &first] {
            let shown = kept(3, &new, &[(6, "d/f")], Some(before));
            assert_eq!(number(&shown, "d"), 7);
            assert_eq!(shown.node(d).err(), Some(Errno::STALE));
        }
        let again = view(3, &[(5, "d/f")], Some(&none));
        assert_ne!(number(&again, "d"), d);
        assert_eq!(again.node(d).err(), Some(Errno::STALE));
    }

    /// Every path that a directory had ever had was kept, and looked for in each new view.
    #[test]
    fn paths_that_no_directory_has_any_more_are_forgotten() {
        let mut shown = view(0, &[(5, "d/f")], None);
        let d = number(&shown, "d");
        let mut numbers = std::collections::BTreeSet::from([d]);
        for n in 1..10 {
            let name = format!("{n}/f");
            shown = view(n, &[(5, "d/f"), (6, &name)], Some(&shown));
            assert_eq!(number(&shown, "d"), d);
            assert!(
                numbers.insert(number(&shown, &n.to_string())),
                "it was there"
            );
            assert_eq!(shown.dirs.len(), 2);
        }
    }
}
