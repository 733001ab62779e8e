//! A view: names and attributes of a volume as of one LSN, for a mount that only shows.
//!
//! Owns the tree of the view, and the numbers by which the kernel knows its nodes.
//!
//! Invariant: a number that the kernel knows means one file or directory for as long as the mount
//! lasts, whatever the view. That holds also for what the file of names comes to have: the kernel
//! may know it by a number of ours.

use std::collections::HashMap;

use rustix::io::Errno;

use crate::fs::{Result, Seen};
use crate::name_table::Kind;
use crate::tree::{Asker, NAMES, Node, ROOT, Tree};

/// Numbers of files that the file of names does not have, with that of the file behind it.
const FILES: u64 = 1 << 50;
/// The same of directories, with a number of ours behind it.
const DIRS: u64 = 1 << 51;

/// Numbers of directories that the file of names does not have, by path.
pub(crate) type Dirs = HashMap<Vec<u8>, u64>;

/// Names and attributes as of one LSN.
pub(crate) struct Shown {
    /// That of the listing.
    pub(crate) version: u64,
    pub(crate) tree: Tree,
    sizes: HashMap<u32, u64>,
    /// The kernel's numbers of nodes that the file of names does not have, and the tree's.
    outer: HashMap<u64, u64>,
    inner: HashMap<u64, u64>,
}

impl Shown {
    /// Of a volume with these files: number, name and size. `names` is the file of names.
    ///
    /// # Errors
    /// What is wrong with the file of names.
    pub(crate) fn of(
        version: u64,
        names: Option<(u32, &[u8])>,
        mut files: Vec<(u32, String, u64)>,
        dirs: &mut Dirs,
        asker: Asker,
    ) -> std::result::Result<Shown, String> {
        files.retain(|f| f.1 != NAMES);
        let tree = Tree::load(names, &files, Vec::new(), asker, 1)?;
        let mut shown = Shown {
            version,
            sizes: files.iter().map(|f| (f.0, f.2)).collect(),
            outer: HashMap::new(),
            inner: HashMap::new(),
            tree,
        };
        for node in shown.tree.nodes().filter(|n| !n.is_kept()) {
            let outer = match node.file() {
                _ if node.ino == ROOT => continue,
                Some(number) => FILES + u64::from(number),
                None => {
                    let next = DIRS + dirs.len() as u64;
                    *dirs.entry(shown.tree.path(node)).or_insert(next)
                }
            };
            shown.outer.insert(node.ino, outer);
            shown.inner.insert(outer, node.ino);
        }
        for (path, outer) in dirs.iter() {
            if !shown.inner.contains_key(outer)
                && let Some(node) = shown.tree.at(path)
                && node.is_dir()
            {
                shown.inner.insert(*outer, node.ino);
            }
        }
        Ok(shown)
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
    pub(crate) fn entries(&self, dir: u64) -> Result<Vec<(Vec<u8>, Seen)>> {
        let node = self.node(dir)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let names = [&b"."[..], b".."].map(<[u8]>::to_vec).into_iter();
        let names = names.chain(node.children.keys().cloned());
        let entry = |name: Vec<u8>| {
            let seen = self.named(dir, &name)?;
            Ok((name, seen))
        };
        names.map(entry).collect()
    }
}
