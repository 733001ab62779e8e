//! The tree: which names a mounted directory has, and the attributes of what they name.
//!
//! Owns:
//!
//! - the nodes in memory
//! - the file of names as it should be (`cells`)
//! - which files' names in the volume have changed since the last sync point (`names`)
//!
//! Invariants:
//!
//! - A file's first name is its name in the volume's catalogue, once what was begun is applied.
//! - A node goes when it has no name, is not open, and the kernel has forgotten it. A file without
//!   a name lies below [`REMOVED`] until then. Those that a crash left there go at the next mount.
//! - A change is made here completely, or not at all.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mojim::Change;
use mojim_env::Longest;
use mojim_format::catalog::valid_file_name;
use mojim_format::{MAX_FILE_NAME, OP_LEN};
use rustix::io::Errno;

use crate::name_table::{
    Attributes, Cell, CellAllocator, CellExtent, Kind, MOST_NAME, MOST_TARGET, MOST_VALUE, Time,
};
use crate::names::{Names, REMOVED};
use crate::overlay::Overlay;

/// The root's number (that of FUSE).
pub(crate) const ROOT: u64 = 1;
/// The mount's own directory in the volume. No program sees it.
pub(crate) const OWN: &str = ".mount";
/// The file of names.
pub(crate) const NAMES: &str = ".mount/names";
/// Where files lie whose paths no volume can have: too long, or not UTF-8.
const OTHERS: &str = ".mount/others/";
/// The file of names grows by so many bytes: each growth costs more than a write.
const GROWTH: u64 = 64 << 10;
/// Greatest number of a node.
const MOST_INO: u64 = 1 << 48;
/// So many numbers of files are promised at once.
const STRIDE: u32 = 1024;
/// Most files that one call renames, with the directory in which they lie.
const MOST_RENAMED: usize = 1000;

type Result<T> = std::result::Result<T, Errno>;

/// A file, directory or symbolic link.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) ino: u64,
    pub(crate) attributes: Attributes,
    place: Option<CellExtent>,
    /// Of a directory.
    pub(crate) children: BTreeMap<Vec<u8>, Child>,
    /// Names: the directory's number, and the name in it. A directory has one; the root none.
    pub(crate) names: Vec<(u64, Vec<u8>)>,
    xattrs: BTreeMap<Vec<u8>, (Vec<u8>, CellExtent)>,
    pub(crate) opens: u32,
    /// Openings to write.
    pub(crate) writers: u32,
    /// How often the kernel was told of it, and has not forgotten it.
    told: u64,
    /// Directories among the children.
    dirs: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Child {
    pub(crate) ino: u64,
    place: CellExtent,
}

impl Node {
    pub(crate) fn is_dir(&self) -> bool {
        self.attributes.kind == Kind::Dir
    }

    /// Whether the file of names has it.
    pub(crate) fn is_kept(&self) -> bool {
        self.place.is_some()
    }

    pub(crate) fn file(&self) -> Option<u32> {
        match self.attributes.kind {
            Kind::File(n) => Some(n),
            _ => None,
        }
    }
}

/// Who asks, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) now: Time,
}

/// What a program opened a file for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opened {
    Reads,
    Writes,
}

/// How a name may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renames {
    Replaces,
    NoReplace,
    Exchanges,
}

#[derive(Debug)]
pub(crate) struct Tree {
    nodes: HashMap<u64, Node>,
    /// Nodes that are open.
    opened: usize,
    next: u64,
    places: CellAllocator,
    /// The file of names, and its number.
    names: Overlay,
    names_file: u32,
    /// The files whose names in the volume may have changed since the last sync point, and
    /// these names then; `None`: the volume did not have the file.
    was: BTreeMap<u32, Option<String>>,
    /// Bytes of the operations that these come to, at most.
    was_bytes: usize,
    /// The nodes of files.
    numbers: HashMap<u32, u64>,
    /// The next file's number, if it is free; below `promised`.
    number: u32,
    /// What the first cell says.
    promised: u32,
    touched: Touched,
    /// Files whose bytes go with the next sync point, as they were made or renamed: no name
    /// comes without the bytes that it had then.
    joined: BTreeSet<u64>,
    /// Names in the volume's directory that no program may take.
    foreign: BTreeSet<String>,
    /// The longest names of files that all nodes can have.
    pub(crate) longest: Longest,
}

/// Nodes whose cells are to be written with the next sync point.
#[derive(Debug, Default)]
struct Touched {
    /// Each with the bytes of its cell, about.
    nodes: BTreeMap<u64, usize>,
    /// Those of all.
    bytes: usize,
}

impl Touched {
    /// A node's cell has the same length always.
    fn insert(&mut self, ino: u64, attributes: &Attributes) {
        let target = match &attributes.kind {
            Kind::Link(target) => target.len(),
            _ => 0,
        };
        let len = TOUCHED + target;
        if self.nodes.insert(ino, len).is_none() {
            self.bytes += len;
        }
    }

    fn remove(&mut self, ino: u64) {
        self.bytes -= self.nodes.remove(&ino).unwrap_or(0);
    }
}

/// Most bytes of cells in one extent: a cell is written by itself, into the midst of an extent that
/// was begun.
const MOST_CELLS: usize = 16 << 10;
/// Bytes of the name of a file that has none any more, at most.
const REMOVED_LEN: usize = 64;
/// Bytes that the cell of a node takes, about, beside a link's target.
const TOUCHED: usize = 160;
/// Most bytes of a node's extended attributes, names and values.
const MOST_XATTRS: usize = 2 * MOST_VALUE;

impl Tree {
    /// The tree of a volume: `names` is the file of names, if there is one, with its number;
    /// `files` the catalogue without it; `make` makes a number for a file.
    pub(crate) fn load(
        names: Option<(u32, &[u8])>,
        files: &[(u32, String, u64)],
        foreign: Vec<String>,
        asker: Asker,
        random: u32,
    ) -> std::result::Result<Tree, String> {
        let (places, cells) = match names {
            Some((_, bytes)) => CellAllocator::read(bytes).map_err(|e| e.to_string())?,
            None => Default::default(),
        };
        let mut tree = Tree {
            nodes: HashMap::new(),
            opened: 0,
            next: ROOT + 1,
            places,
            names: Overlay::with_most(names.map_or(0, |(_, b)| b.len() as u64), MOST_CELLS),
            names_file: names.map_or(0, |(n, _)| n),
            was: BTreeMap::new(),
            was_bytes: 0,
            numbers: HashMap::new(),
            number: 0,
            promised: 0,
            touched: Touched::default(),
            joined: BTreeSet::new(),
            foreign: foreign.into_iter().collect(),
            longest: Longest::USUAL,
        };
        if cells.is_empty() {
            let place = tree.put(&Cell::First(random));
            debug_assert_eq!(place.0, 0);
            (tree.number, tree.promised) = (random, random);
        }
        tree.take_cells(cells)?;
        if !tree.nodes.contains_key(&ROOT) {
            let root = attributes(Kind::Dir, 0o755, asker);
            tree.touched.insert(ROOT, &root);
            tree.insert(ROOT, root, None);
        }
        tree.check_shape()?;
        tree.reconcile(files, asker);
        if names.is_none() {
            tree.names_file = tree.new_number();
            tree.was.insert(tree.names_file, None);
        }
        Ok(tree)
    }

    fn take_cells(&mut self, cells: Vec<(CellExtent, Cell)>) -> std::result::Result<(), String> {
        let mut links = Vec::new();
        let mut xattrs = Vec::new();
        for (place, cell) in cells {
            match cell {
                Cell::First(next) => (self.number, self.promised) = (next, next),
                Cell::Node { ino, attributes } => {
                    let dir = attributes.kind == Kind::Dir;
                    if ino == 0 || ino > MOST_INO || ino == ROOT && !dir {
                        return Err(format!("node {ino} cannot be"));
                    }
                    let twice = match attributes.kind {
                        Kind::File(file) => self.numbers.contains_key(&file),
                        _ => false,
                    };
                    if twice || self.nodes.contains_key(&ino) {
                        return Err(format!("node {ino}, or its file, is there twice"));
                    }
                    self.insert(ino, attributes, Some(place));
                }
                Cell::Name { parent, ino, name } => links.push((place, parent, ino, name)),
                Cell::Xattr { ino, name, value } => xattrs.push((place, ino, name, value)),
            }
        }
        for (place, parent, ino, name) in links {
            let dir = self.nodes.get(&parent).filter(|n| n.is_dir());
            let (Some(dir), true) = (dir, self.nodes.contains_key(&ino)) else {
                return Err(format!(
                    "{}: no node {ino}, or no directory {parent}",
                    name.escape_ascii()
                ));
            };
            let odd = name.is_empty() || name == b"." || name == b"..";
            if odd || name.contains(&b'/') || name.contains(&0) {
                return Err(format!("{} cannot be a name", name.escape_ascii()));
            }
            if dir.children.contains_key(&name) {
                return Err(format!("{} is there twice", name.escape_ascii()));
            }
            self.hang(parent, &name, Child { ino, place });
        }
        for (place, ino, name, value) in xattrs {
            let node = self.nodes.get_mut(&ino);
            let node =
                node.ok_or_else(|| format!("an attribute of node {ino}, which is not there"))?;
            if node.xattrs.insert(name, (value, place)).is_some() {
                return Err(format!("an attribute of node {ino} is there twice"));
            }
        }
        Ok(())
    }

    /// Every directory but the root has one name, and is reached from the root. One that is empty
    /// may have none: it was removed while a program used it.
    fn check_shape(&self) -> std::result::Result<(), String> {
        let mut reached = BTreeSet::from([ROOT]);
        let mut open = vec![ROOT];
        while let Some(d) = open.pop() {
            for c in self.nodes[&d].children.values() {
                if self.nodes[&c.ino].is_dir() {
                    if !reached.insert(c.ino) {
                        return Err(format!("directory {} has two names", c.ino));
                    }
                    open.push(c.ino);
                }
            }
        }
        let used = |n: &&Node| n.is_dir() && !(n.names.is_empty() && n.children.is_empty());
        let dirs = self.nodes.values().filter(used);
        match dirs.map(|n| n.ino).find(|ino| !reached.contains(ino)) {
            Some(ino) => Err(format!("directory {ino} is in no directory")),
            None => Ok(()),
        }
    }

    /// The volume's files are what its catalogue says: programs that do not use the mount may
    /// have made, renamed and removed some.
    fn reconcile(&mut self, files: &[(u32, String, u64)], asker: Asker) {
        let numbers = self.numbers.clone();
        let known: BTreeSet<u32> = files.iter().map(|f| f.0).collect();
        let gone: Vec<u64> = numbers
            .iter()
            .filter(|(n, _)| !known.contains(n))
            .map(|(_, i)| *i)
            .collect();
        for ino in gone {
            for (parent, name) in self.nodes[&ino].names.clone() {
                self.cut(parent, &name);
            }
            self.discard(ino);
        }
        for (file, name, _) in files {
            let others = name.starts_with(OTHERS);
            if name.starts_with(REMOVED) || others && !numbers.contains_key(file) {
                self.was.insert(*file, Some(name.clone()));
                if let Some(ino) = numbers.get(file) {
                    self.discard(*ino);
                }
                continue;
            }
            match numbers.get(file) {
                Some(_) if others => {}
                Some(&ino) => self.rename_as(ino, name, asker),
                None => {
                    let ino = self.add(attributes(Kind::File(*file), 0o644, asker));
                    self.link_path(ino, name, asker);
                }
            }
        }
        while let Some(ino) = self.nameless() {
            self.discard(ino);
        }
    }

    /// A number for a new file. It comes once: a number that was in use lately must not come
    /// back, since applying a log again writes to the numbers that it names.
    pub(crate) fn new_number(&mut self) -> u32 {
        loop {
            if self.number == self.promised {
                self.promised = self.number.wrapping_add(STRIDE);
                let cell = Cell::First(self.promised);
                self.write(0, &cell.encode());
            }
            let number = self.number;
            self.number = number.wrapping_add(1);
            let used = self.numbers.contains_key(&number) || self.was.contains_key(&number);
            if number != 0 && number != self.names_file && !used {
                return number;
            }
        }
    }

    fn nameless(&self) -> Option<u64> {
        let mut nodes = self.nodes.values();
        let node = nodes.find(|n| n.ino != ROOT && n.names.is_empty())?;
        Some(node.ino)
    }

    /// A node's first name is `path` from here on.
    fn rename_as(&mut self, ino: u64, path: &str, asker: Asker) {
        let names = &self.nodes[&ino].names;
        let is_path = |(p, n): &(u64, Vec<u8>)| self.path_in(*p, n) == path.as_bytes();
        let at = names.iter().position(is_path);
        match at {
            Some(i) => self.node_mut(ino).names.swap(0, i),
            None => {
                for (parent, name) in self.nodes[&ino].names.clone() {
                    self.cut(parent, &name);
                }
                self.link_path(ino, path, asker);
            }
        }
    }

    /// Gives a node a name by its path, with the directories that lack.
    fn link_path(&mut self, ino: u64, path: &str, asker: Asker) {
        let mut at = ROOT;
        let (dirs, name) = path.rsplit_once('/').unwrap_or(("", path));
        for dir in dirs.split('/').filter(|d| !d.is_empty()) {
            let dir = dir.as_bytes();
            let found = self.nodes[&at].children.get(dir).map(|c| c.ino);
            // What is no directory has lost its place to one.
            let found = found.filter(|i| self.nodes[i].is_dir());
            at = found.unwrap_or_else(|| {
                self.cut(at, dir);
                let new = self.add(attributes(Kind::Dir, 0o755, asker));
                self.link(at, dir, new);
                new
            });
        }
        self.cut(at, name.as_bytes());
        self.link(at, name.as_bytes(), ino);
    }

    pub(crate) fn node(&self, ino: u64) -> Result<&Node> {
        self.nodes.get(&ino).ok_or(Errno::STALE)
    }

    /// The node of a file.
    pub(crate) fn node_of(&self, file: u32) -> Result<&Node> {
        self.node(*self.numbers.get(&file).ok_or(Errno::STALE)?)
    }

    /// The node at a path.
    pub(crate) fn at(&self, path: &[u8]) -> Option<&Node> {
        let mut node = self.nodes.get(&ROOT)?;
        for name in path.split(|b| *b == b'/') {
            node = self.nodes.get(&node.children.get(name)?.ino)?;
        }
        Some(node)
    }

    fn node_mut(&mut self, ino: u64) -> &mut Node {
        self.nodes
            .get_mut(&ino)
            .expect("a node that was found before")
    }

    /// Changes attributes; they are committed with the next sync point.
    pub(crate) fn change(&mut self, ino: u64, f: impl FnOnce(&mut Attributes)) -> Result<()> {
        let node = self.nodes.get_mut(&ino).ok_or(Errno::STALE)?;
        f(&mut node.attributes);
        self.touched.insert(ino, &node.attributes);
        Ok(())
    }

    /// Number of names; a directory counts itself and its directories too.
    pub(crate) fn links(node: &Node) -> u32 {
        match node.is_dir() {
            // Removed, and still in use.
            true if node.names.is_empty() && node.ino != ROOT => 0,
            true => 2 + node.dirs,
            false => node.names.len() as u32,
        }
    }

    pub(crate) fn parent(&self, ino: u64) -> u64 {
        let node = self.nodes.get(&ino);
        node.and_then(|n| n.names.first()).map_or(ROOT, |(p, _)| *p)
    }

    pub(crate) fn lookup(&self, parent: u64, name: &[u8]) -> Result<u64> {
        let node = self.node(parent)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if name.len() > MOST_NAME {
            return Err(Errno::NAMETOOLONG);
        }
        Ok(node.children.get(name).ok_or(Errno::NOENT)?.ino)
    }

    /// The volume's files: their nodes and numbers.
    pub(crate) fn files(&self) -> impl Iterator<Item = (u64, u32)> {
        self.nodes.values().filter_map(|n| Some((n.ino, n.file()?)))
    }

    /// Files that are open.
    pub(crate) fn open_inodes(&self) -> impl Iterator<Item = u64> {
        let open = self
            .nodes
            .iter()
            .filter(|(_, n)| n.opens > 0 && !n.is_dir());
        open.map(|(ino, _)| *ino)
    }

    /// Bytes of names and attributes that are not begun, about.
    pub(crate) fn waiting(&self) -> usize {
        self.names.dirty_bytes() + self.touched.bytes + self.was_bytes
    }

    /// Files whose names were made, changed or removed, and are not begun.
    pub(crate) fn names_waiting(&self) -> usize {
        self.was.len()
    }

    /// There are no nodes any more.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.opened = 0;
        self.numbers.clear();
        self.was.clear();
        self.was_bytes = 0;
        self.touched = Touched::default();
        self.joined.clear();
        self.names = Overlay::with_most(0, MOST_CELLS);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.opened > 0
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// The path of a node's first name.
    pub(crate) fn path(&self, node: &Node) -> Vec<u8> {
        let first = node.names.first();
        first.map_or_else(Vec::new, |(parent, name)| self.path_in(*parent, name))
    }

    pub(crate) fn inodes(&self) -> impl Iterator<Item = u64> {
        self.nodes.keys().copied()
    }

    pub(crate) fn counts(&self) -> u64 {
        self.nodes.len() as u64
    }

    fn path_in(&self, parent: u64, name: &[u8]) -> Vec<u8> {
        let mut parts = vec![name];
        let mut at = parent;
        while let Some((up, name)) = self.nodes.get(&at).and_then(|n| n.names.first()) {
            parts.push(name);
            at = *up;
        }
        parts.reverse();
        parts.join(&b'/')
    }

    /// Whether a name may be given in a directory.
    fn check_name(&self, parent: u64, name: &[u8]) -> Result<()> {
        if name.len() > MOST_NAME {
            return Err(Errno::NAMETOOLONG);
        }
        let node = self.node(parent)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if parent != ROOT && node.names.is_empty() {
            return Err(Errno::NOENT);
        }
        if parent == ROOT && name == OWN.as_bytes() {
            return Err(Errno::PERM);
        }
        let path = self.path_in(parent, name);
        if self.is_too_long(&path) {
            return Err(Errno::NAMETOOLONG);
        }
        // What others put into the volume's directory.
        match self.is_foreign(&path) {
            true => Err(Errno::EXIST),
            false => Ok(()),
        }
    }

    /// Whether a file of that path has a name in the volume that some node cannot have.
    fn is_too_long(&self, path: &[u8]) -> bool {
        let name = std::str::from_utf8(path);
        name.is_ok_and(|n| valid_file_name(n) && !self.longest.takes(n))
    }

    /// Whether something else lies at that path, or below it.
    fn is_foreign(&self, path: &[u8]) -> bool {
        let Ok(path) = std::str::from_utf8(path) else {
            return false;
        };
        let below = format!("{path}/");
        let mut from = self.foreign.range(below.clone()..);
        self.foreign.contains(path) || from.next().is_some_and(|f| f.starts_with(&below))
    }

    /// Makes a node. `kind`: of a file, with a number that the volume did not have.
    pub(crate) fn make(
        &mut self,
        parent: u64,
        name: &[u8],
        kind: Kind,
        mode: u32,
        mut asker: Asker,
    ) -> Result<u64> {
        self.check_name(parent, name)?;
        let up = self.node(parent)?;
        if up.children.contains_key(name) {
            return Err(Errno::EXIST);
        }
        let mut mode = mode;
        if let Kind::Link(target) = &kind
            && target.len() > MOST_TARGET
        {
            return Err(Errno::NAMETOOLONG);
        }
        if up.attributes.mode & 0o2000 != 0 {
            asker.gid = up.attributes.gid;
            if kind == Kind::Dir {
                mode |= 0o2000;
            }
        }
        if let Kind::File(file) = kind {
            self.was.insert(file, None);
            self.was_bytes += OP_LEN + self.path_in(parent, name).len().max(REMOVED_LEN);
        }
        let is_file = matches!(kind, Kind::File(_));
        let ino = self.add(attributes(kind, mode, asker));
        if is_file {
            self.joined.insert(ino);
        }
        self.link(parent, name, ino);
        self.modified(parent, asker.now);
        Ok(ino)
    }

    /// Gives a file or symbolic link another name.
    pub(crate) fn link_to(&mut self, ino: u64, parent: u64, name: &[u8], now: Time) -> Result<()> {
        self.check_name(parent, name)?;
        let node = self.node(ino)?;
        if node.is_dir() {
            return Err(Errno::PERM);
        }
        if node.names.is_empty() {
            return Err(Errno::NOENT);
        }
        if self.node(parent)?.children.contains_key(name) {
            return Err(Errno::EXIST);
        }
        self.link(parent, name, ino);
        self.join(ino);
        self.modified(parent, now);
        self.change(ino, |a| a.changed = now)
    }

    /// Node `ino` has got a name, or another one: the bytes of the files to which it leads go
    /// with the next sync point.
    fn join(&mut self, ino: u64) {
        let files = self.files_below(ino);
        self.joined.extend(files);
    }

    /// Removes the name of a file or symbolic link. Returns its node, which may be gone.
    pub(crate) fn unlink(&mut self, parent: u64, name: &[u8], now: Time) -> Result<u64> {
        let ino = self.lookup(parent, name)?;
        if self.node(ino)?.is_dir() {
            return Err(Errno::ISDIR);
        }
        self.moves(ino, REMOVED_LEN);
        self.cut(parent, name);
        self.modified(parent, now);
        self.change(ino, |a| a.changed = now)?;
        self.drop_if_unused(ino);
        Ok(ino)
    }

    pub(crate) fn rmdir(&mut self, parent: u64, name: &[u8], now: Time) -> Result<()> {
        let ino = self.lookup(parent, name)?;
        let node = self.node(ino)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if !node.children.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        self.cut(parent, name);
        self.modified(parent, now);
        self.drop_if_unused(ino);
        Ok(())
    }

    /// Renames. Returns the node that lost its name, if one did.
    pub(crate) fn rename(
        &mut self,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        how: Renames,
        now: Time,
    ) -> Result<()> {
        let ino = self.lookup(from.0, from.1)?;
        let other = self.node(to.0)?.children.get(to.1).map(|c| c.ino);
        self.check_rename(ino, from, to, other, how)?;
        if other == Some(ino) {
            return Ok(());
        }
        self.moves(ino, self.path_in(to.0, to.1).len());
        // It gets no name, or that of the first.
        let back = self.path_in(from.0, from.1).len().max(REMOVED_LEN);
        other.into_iter().for_each(|o| self.moves(o, back));
        self.cut(from.0, from.1);
        if let Some(other) = other {
            self.cut(to.0, to.1);
            if how == Renames::Exchanges {
                self.link(from.0, from.1, other);
            }
        }
        self.link(to.0, to.1, ino);
        if let Some(other) = other {
            self.change(other, |a| a.changed = now)?;
            match how {
                Renames::Exchanges => self.join(other),
                _ => self.drop_if_unused(other),
            }
        }
        self.join(ino);
        self.modified(from.0, now);
        self.modified(to.0, now);
        self.change(ino, |a| a.changed = now)
    }

    fn check_rename(
        &self,
        ino: u64,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        other: Option<u64>,
        how: Renames,
    ) -> Result<()> {
        self.check_name(to.0, to.1)?;
        let node = self.node(ino)?;
        match other {
            Some(_) if how == Renames::NoReplace => return Err(Errno::EXIST),
            None if how == Renames::Exchanges => return Err(Errno::NOENT),
            Some(o) if how == Renames::Replaces && o != ino => {
                let o = self.node(o)?;
                match (node.is_dir(), o.is_dir()) {
                    (true, false) => return Err(Errno::NOTDIR),
                    (false, true) => return Err(Errno::ISDIR),
                    (true, true) if !o.children.is_empty() => return Err(Errno::NOTEMPTY),
                    _ => {}
                }
            }
            _ => {}
        }
        let mut moves = vec![(ino, to.0)];
        moves.extend(
            other
                .filter(|_| how == Renames::Exchanges)
                .map(|o| (o, from.0)),
        );
        for (node, into) in moves {
            if self.is_below(into, node) {
                return Err(Errno::INVAL);
            }
            let files = self.files_below(node);
            if files.len() > MOST_RENAMED {
                // Programs that move directories copy then.
                return Err(Errno::XDEV);
            }
            if !self.foreign.is_empty() && self.moves_to(&files, node, to, Tree::is_foreign) {
                return Err(Errno::EXIST);
            }
            let Longest { part, path } = self.longest;
            let is_bound = usize::from(path) < MAX_FILE_NAME || usize::from(part) < MOST_NAME;
            if is_bound && self.moves_to(&files, node, to, Tree::is_too_long) {
                return Err(Errno::NAMETOOLONG);
            }
        }
        Ok(())
    }

    /// Whether one of `files`, which are `node` or lie below it, comes to such a path when that
    /// takes the name `to`.
    fn moves_to(
        &self,
        files: &[u64],
        node: u64,
        to: (u64, &[u8]),
        such: fn(&Tree, &[u8]) -> bool,
    ) -> bool {
        let top = self.nodes[&node].names.first();
        let top = top.map_or(0, |(p, n)| self.path_in(*p, n).len());
        let to = self.path_in(to.0, to.1);
        files.iter().any(|f| {
            let (parent, name) = &self.nodes[f].names[0];
            let path = self.path_in(*parent, name);
            let rest = path.get(top..).unwrap_or(&[]);
            such(self, &[&to[..], rest].concat())
        })
    }

    /// Whether directory `ino` is `top`, or lies below it.
    pub(crate) fn is_below(&self, mut ino: u64, top: u64) -> bool {
        loop {
            if ino == top {
                return true;
            }
            match self.nodes.get(&ino).and_then(|n| n.names.first()) {
                Some((up, _)) => ino = *up,
                None => return false,
            }
        }
    }

    /// The files of the volume that are `ino`, or have their first names below it.
    pub(crate) fn files_below(&self, ino: u64) -> Vec<u64> {
        let (mut files, mut open) = (Vec::new(), vec![ino]);
        while let Some(i) = open.pop() {
            let node = &self.nodes[&i];
            open.extend(node.children.values().map(|c| c.ino));
            if node.file().is_some() {
                files.push(i);
            }
        }
        files.sort_unstable();
        files.dedup();
        files
    }

    /// The name in the volume of file `file`, whose node is `ino`.
    fn name_of(&self, ino: u64, file: u32) -> String {
        match self.nodes[&ino].names.first() {
            Some((parent, name)) => name_in_volume(&self.path_in(*parent, name), file),
            None => format!("{REMOVED}{file}"),
        }
    }

    /// Node `ino` is about to get another first name, a path of `new` bytes, and the files below it
    /// with it.
    fn moves(&mut self, ino: u64, new: usize) {
        for f in self.files_below(ino) {
            let file = self.nodes[&f].file().expect("a file");
            let name = self.name_of(f, file);
            // A file may go aside before it gets its name.
            self.was_bytes += 2 * (OP_LEN + name.len() + new);
            self.was.entry(file).or_insert(Some(name));
        }
    }

    /// Removes a node without a name that nobody has open.
    fn drop_if_unused(&mut self, ino: u64) {
        let node = &self.nodes[&ino];
        if !node.names.is_empty() || node.opens > 0 || node.told > 0 || ino == ROOT {
            return;
        }
        self.moves(ino, REMOVED_LEN);
        self.discard(ino);
    }

    /// An open file has one opening less. True if the node is gone.
    pub(crate) fn close(&mut self, ino: u64, how: Opened) -> bool {
        let Some(node) = self.nodes.get_mut(&ino) else {
            return false;
        };
        self.opened -= usize::from(node.opens == 1);
        node.opens = node.opens.saturating_sub(1);
        node.writers = node.writers.saturating_sub((how == Opened::Writes).into());
        self.drop_if_unused(ino);
        !self.nodes.contains_key(&ino)
    }

    /// The kernel is told of a node.
    pub(crate) fn tell(&mut self, ino: u64) {
        self.node_mut(ino).told += 1;
    }

    /// The kernel has forgotten a node, `times` times. True if it is gone.
    pub(crate) fn forget(&mut self, ino: u64, times: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&ino) else {
            return false;
        };
        node.told = node.told.saturating_sub(times);
        self.drop_if_unused(ino);
        !self.nodes.contains_key(&ino)
    }

    pub(crate) fn open(&mut self, ino: u64, how: Opened) -> Result<()> {
        let node = self.nodes.get_mut(&ino).ok_or(Errno::STALE)?;
        self.opened += usize::from(node.opens == 0);
        node.opens += 1;
        node.writers += u32::from(how == Opened::Writes);
        Ok(())
    }

    pub(crate) fn xattr(&self, ino: u64, name: &[u8]) -> Result<&[u8]> {
        let value = self.node(ino)?.xattrs.get(name);
        Ok(&value.ok_or(Errno::NODATA)?.0)
    }

    pub(crate) fn xattrs(&self, ino: u64) -> Result<impl Iterator<Item = &[u8]>> {
        Ok(self.node(ino)?.xattrs.keys().map(|n| &n[..]))
    }

    pub(crate) fn set_xattr(
        &mut self,
        ino: u64,
        name: &[u8],
        value: &[u8],
        flags: i32,
        now: Time,
    ) -> Result<()> {
        let there = self.node(ino)?.xattrs.contains_key(name);
        if value.len() > MOST_VALUE || name.len() > MOST_NAME {
            return Err(Errno::TOOBIG);
        }
        match flags {
            libc::XATTR_CREATE if there => return Err(Errno::EXIST),
            libc::XATTR_REPLACE if !there => return Err(Errno::NODATA),
            _ => {}
        }
        let others = self
            .node(ino)?
            .xattrs
            .iter()
            .filter(|(n, _)| &n[..] != name);
        let others = others.fold((0, 0), |(names, all), (n, (v, _))| {
            (names + n.len() + 1, all + n.len() + v.len())
        });
        // The kernel lists no more names; and all of them are kept in memory.
        if others.0 + name.len() + 1 > MOST_VALUE
            || others.1 + name.len() + value.len() > MOST_XATTRS
        {
            return Err(Errno::NOSPC);
        }
        if there {
            self.remove_xattr(ino, name, now)?;
        }
        let (name, value) = (name.to_vec(), value.to_vec());
        let cell = Cell::Xattr {
            ino,
            name: name.clone(),
            value: value.clone(),
        };
        let place = self.put(&cell);
        self.node_mut(ino).xattrs.insert(name, (value, place));
        self.change(ino, |a| a.changed = now)
    }

    pub(crate) fn remove_xattr(&mut self, ino: u64, name: &[u8], now: Time) -> Result<()> {
        let node = self.nodes.get_mut(&ino).ok_or(Errno::NOENT)?;
        let (_, place) = node.xattrs.remove(name).ok_or(Errno::NODATA)?;
        self.erase(place);
        self.change(ino, |a| a.changed = now)
    }

    fn modified(&mut self, dir: u64, now: Time) {
        let _ = self.change(dir, |a| (a.modified, a.changed) = (now, now));
    }

    fn insert(&mut self, ino: u64, attributes: Attributes, place: Option<CellExtent>) {
        self.next = self.next.max(ino + 1);
        if let Kind::File(file) = attributes.kind {
            self.numbers.insert(file, ino);
        }
        let node = Node {
            ino,
            attributes,
            place,
            children: BTreeMap::new(),
            names: Vec::new(),
            xattrs: BTreeMap::new(),
            opens: 0,
            writers: 0,
            told: 0,
            dirs: 0,
        };
        self.nodes.insert(ino, node);
    }

    fn add(&mut self, attributes: Attributes) -> u64 {
        let ino = self.next;
        self.touched.insert(ino, &attributes);
        self.insert(ino, attributes, None);
        ino
    }

    fn link(&mut self, parent: u64, name: &[u8], ino: u64) {
        let cell = Cell::Name {
            parent,
            ino,
            name: name.to_vec(),
        };
        let place = self.put(&cell);
        self.hang(parent, name, Child { ino, place });
    }

    fn hang(&mut self, parent: u64, name: &[u8], child: Child) {
        let node = self.node_mut(child.ino);
        node.names.push((parent, name.to_vec()));
        let is_dir = node.is_dir();
        let up = self.node_mut(parent);
        up.dirs += u32::from(is_dir);
        up.children.insert(name.to_vec(), child);
    }

    /// A name goes, if it is there.
    fn cut(&mut self, parent: u64, name: &[u8]) {
        let Some(child) = self.node_mut(parent).children.remove(name) else {
            return;
        };
        self.erase(child.place);
        let node = self.node_mut(child.ino);
        node.names.retain(|(p, n)| (*p, &n[..]) != (parent, name));
        if node.is_dir() {
            self.node_mut(parent).dirs -= 1;
        }
    }

    /// A node goes, and what is named in it loses these names.
    fn discard(&mut self, ino: u64) {
        let names = self.nodes.get(&ino).map(|n| n.children.keys().cloned());
        for name in names.into_iter().flatten().collect::<Vec<_>>() {
            self.cut(ino, &name);
        }
        let Some(node) = self.nodes.remove(&ino) else {
            return;
        };
        node.file().map(|f| self.numbers.remove(&f));
        node.place.into_iter().for_each(|p| self.erase(p));
        node.xattrs.into_values().for_each(|(_, p)| self.erase(p));
        self.touched.remove(ino);
        self.joined.remove(&ino);
    }

    /// Writes a new cell.
    fn put(&mut self, cell: &Cell) -> CellExtent {
        let bytes = cell.encode();
        let place = self.places.take(bytes.len() as u32);
        self.write(place.0, &bytes);
        place
    }

    fn erase(&mut self, place: CellExtent) {
        self.write(place.0, &CellAllocator::free_head(place.1));
        self.places.free(place);
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        let end = self.places.end();
        if end > self.names.size() {
            self.names.resize(end.next_multiple_of(GROWTH));
        }
        self.names.write(at, bytes);
    }

    /// The cells of touched nodes are written. Call before [`Tree::changes`].
    pub(crate) fn write_touched(&mut self) {
        for ino in std::mem::take(&mut self.touched).nodes.into_keys() {
            let Some(node) = self.nodes.get(&ino) else {
                continue;
            };
            let attributes = node.attributes.clone();
            let cell = Cell::Node { ino, attributes };
            match node.place {
                // A node's cell has the same length always: a link's target stays.
                Some(place) => self.write(place.0, &cell.encode()),
                None => self.node_mut(ino).place = Some(self.put(&cell)),
            }
        }
    }

    /// Files whose bytes go with the next sync point.
    pub(crate) fn joined(&self) -> Vec<u64> {
        self.joined.iter().copied().collect()
    }

    /// How the files' names in the volume have changed.
    pub(crate) fn renames(&self) -> Names {
        let now = |file: u32| match file == self.names_file {
            true => Some(NAMES.to_owned()),
            false => self.numbers.get(&file).map(|ino| self.name_of(*ino, file)),
        };
        let all = self
            .was
            .iter()
            .map(|(file, was)| (*file, was.clone(), now(*file)));
        Names::of(all)
    }

    /// Adds to `out` what is to be committed of the file of names.
    pub(crate) fn changes<'a>(&'a self, out: &mut Vec<Change<'a>>) {
        self.names.changes(self.names_file, out);
    }

    /// What [`Tree::changes`] gave was begun.
    pub(crate) fn begun(&mut self, lsn: u64) {
        self.was.clear();
        self.was_bytes = 0;
        self.joined.clear();
        self.names.begun(lsn);
    }

    pub(crate) fn applied(&mut self, lsn: u64) {
        self.names.applied(lsn);
    }
}

/// The name in the volume of file `file`, whose path is `path`.
fn name_in_volume(path: &[u8], file: u32) -> String {
    match std::str::from_utf8(path) {
        Ok(path) if valid_file_name(path) => path.to_owned(),
        _ => format!("{OTHERS}{file}"),
    }
}

fn attributes(kind: Kind, mode: u32, asker: Asker) -> Attributes {
    Attributes {
        kind,
        mode: mode & 0o7777,
        uid: asker.uid,
        gid: asker.gid,
        accessed: asker.now,
        modified: asker.now,
        changed: asker.now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path that the mirror cannot have was taken, and poisoned the mirror.
    /// A link of 4,000 bytes counted as 128 until its sync point was begun. Those of a moment made that
    /// one so large that it went through a spill file, and all calls waited for the mirror.
    #[test]
    fn what_waits_has_all_bytes_of_new_nodes() {
        let asker = Asker {
            uid: 0,
            gid: 0,
            now: crate::fs::now(),
        };
        let mut tree = Tree::load(None, &[], Vec::new(), asker, 1).unwrap();
        let make = |tree: &mut Tree, n: usize, kind| {
            let name = n.to_string();
            tree.make(ROOT, name.as_bytes(), kind, 0o777, asker)
                .unwrap()
        };
        let mut links = Vec::new();
        for n in 0..40 {
            links.push(make(&mut tree, n, Kind::Link(vec![b't'; 4000])));
            make(&mut tree, 1000 + n, Kind::File(n as u32 + 7));
        }
        // Touched again, it is the same cell.
        tree.change(links[0], |a| a.mode = 0o700).unwrap();
        // One that goes leaves nothing.
        tree.discard(links[1]);
        let before = tree.waiting();
        tree.write_touched();
        let written = tree.waiting();
        assert!(written <= before, "{before} were said, {written} are");
        assert!(
            before < written + 80 * TOUCHED,
            "{before} were said, {written} are"
        );
        tree.begun(1);
        assert_eq!(tree.waiting(), 0);
    }

    #[test]
    fn a_path_that_a_node_cannot_have_is_refused() {
        let asker = Asker {
            uid: 0,
            gid: 0,
            now: crate::fs::now(),
        };
        let mut tree = Tree::load(None, &[], Vec::new(), asker, 1).unwrap();
        let (part, path) = (10, 20);
        tree.longest = Longest { part, path };
        let make = |tree: &mut Tree, parent, name: &str, file| {
            let kind = match file {
                Some(number) => Kind::File(number),
                None => Kind::Dir,
            };
            tree.make(parent, name.as_bytes(), kind, 0o755, asker)
        };
        let dir = make(&mut tree, ROOT, "a", None).unwrap();
        let below = make(&mut tree, dir, "123456789", None).unwrap();
        make(&mut tree, below, "12345678", Some(1)).unwrap();
        let long = Err(Errno::NAMETOOLONG);
        assert_eq!(make(&mut tree, below, "123456789", Some(2)), long);
        assert_eq!(make(&mut tree, ROOT, "12345678901", Some(2)), long);
        // A directory may not carry its files there.
        let mut rename = |to: &str| {
            let (from, to) = ((ROOT, &b"a"[..]), (ROOT, to.as_bytes()));
            tree.rename(from, to, Renames::Replaces, asker.now)
        };
        assert_eq!(rename("ab"), Err(Errno::NAMETOOLONG));
        assert_eq!(rename("b"), Ok(()));
    }
}
