//! The names that the threads of the cluster's program give in a mount, and what must be found.
//!
//! Owns the steps on names, and the model of the directory in which a thread makes them: files with
//! their bytes, directories, hard and symbolic links, permissions, extended attributes.
//!
//! Invariants:
//!
//! - A step follows from the seed, the thread, its number and the directory before it.
//! - The first call of a step marks the thread's directory with the step's number. So the directory
//!   after a step is not as after any other one.
//! - Bytes that a step writes come with the name that the file gets next, or with an fsync of the
//!   file at the step's end.
//! - Another thread's sync point commits all names so far, and no other bytes. So whatever it
//!   commits of a step are the step's first calls.

use std::collections::{BTreeMap, BTreeSet};

use mojim_sim::Rng;

/// The names in a directory. There are few, so that names come back.
const POOL: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
/// With more names than this, most steps remove.
const MANY: usize = 24;
/// Files that some steps make at once, in a directory of their own.
const CROWD: u64 = if cfg!(test) { 30 } else { 300 };
/// Names are given in directories that lie less deep than this.
const DEEP: usize = 3;
/// Permissions of what is made.
const MODES: [u32; 4] = [0o644, 0o600, 0o755, 0o750];

/// One call. Paths are relative to the thread's directory, which is the empty path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Sets the extended attribute.
    Mark(String, u64),
    /// Makes a directory with these permissions.
    Mkdir(String, u32),
    /// Makes an empty file with these permissions.
    Create(String, u32),
    /// Gives a file other bytes.
    Write(String, Vec<u8>),
    /// Removes a name. If so said, the file is open meanwhile, until the next step.
    Unlink(String, bool),
    /// Removes an empty directory.
    Rmdir(String),
    /// Gives what has the first name the second one, too.
    Link(String, String),
    /// Makes a symbolic link to the first path, under the second.
    Symlink(String, String),
    /// Renames the first to the second, and replaces what is there.
    Rename(String, String),
    /// Exchanges two names.
    Exchange(String, String),
    /// Sets the permissions.
    Chmod(String, u32),
}

/// What acknowledges a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sync {
    /// An fsync of this directory.
    Dir(String),
    /// An fsync of this file.
    File(String),
}

/// One step: the calls, and then the sync point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The calls.
    pub calls: Vec<Call>,
    /// The sync point.
    pub sync: Sync,
}

/// What a name is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A directory.
    Dir,
    /// A file with these bytes.
    File(Vec<u8>),
    /// A symbolic link to this path.
    Link(String),
}

/// A name, as it is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub what: What,
    /// Its permissions.
    pub mode: u32,
    /// Its extended attribute.
    pub mark: Option<u64>,
    /// Its link count.
    pub links: u64,
    /// The first path, in their order, of the same inode.
    pub first: String,
}

/// All names of a directory and below it, by their paths.
pub type Entries = BTreeMap<String, Entry>;

#[derive(Debug, Clone)]
struct Node {
    what: What,
    mode: u32,
    mark: Option<u64>,
}

/// A thread's directory.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: BTreeMap<u64, Node>,
    names: BTreeMap<String, u64>,
    next: u64,
}

/// Permissions of a thread's directory.
pub const TOP: u32 = 0o755;

impl Tree {
    /// The directory before the first step, marked 0.
    pub fn new() -> Tree {
        let mut tree = Tree {
            nodes: BTreeMap::new(),
            names: BTreeMap::new(),
            next: 0,
        };
        tree.add("", What::Dir, TOP);
        tree.apply(&Call::Mark(String::new(), 0));
        tree
    }

    fn add(&mut self, path: &str, what: What, mode: u32) {
        let mark = None;
        self.nodes.insert(self.next, Node { what, mode, mark });
        self.names.insert(path.into(), self.next);
        self.next += 1;
    }

    fn node(&mut self, path: &str) -> &mut Node {
        let of = self.names[path];
        self.nodes.get_mut(&of).expect("a name is of a node")
    }

    fn is_dir(&self, path: &str) -> bool {
        let of = self.names.get(path);
        of.is_some_and(|n| self.nodes[n].what == What::Dir)
    }

    fn is_empty(&self, dir: &str) -> bool {
        !self.names.keys().any(|n| is_below(n, dir))
    }

    /// Takes away the names of `path` and of what is below it; returns them with the rest of their
    /// paths.
    fn take(&mut self, path: &str) -> Vec<(String, u64)> {
        let all = self.names.keys();
        let taken: Vec<String> = all
            .filter(|n| *n == path || is_below(n, path))
            .cloned()
            .collect();
        let taken = taken.into_iter().map(|n| {
            let of = self.names.remove(&n).expect("it is there");
            (n[path.len()..].to_owned(), of)
        });
        taken.collect()
    }

    fn put(&mut self, path: &str, taken: Vec<(String, u64)>) {
        let named = taken.into_iter().map(|(n, of)| (format!("{path}{n}"), of));
        self.names.extend(named);
    }

    /// What the call makes of it.
    pub fn apply(&mut self, call: &Call) {
        match call {
            Call::Mark(path, mark) => self.node(path).mark = Some(*mark),
            Call::Chmod(path, mode) => self.node(path).mode = *mode,
            Call::Mkdir(path, mode) => self.add(path, What::Dir, *mode),
            Call::Create(path, mode) => self.add(path, What::File(Vec::new()), *mode),
            Call::Write(path, bytes) => self.node(path).what = What::File(bytes.clone()),
            Call::Symlink(to, path) => self.add(path, What::Link(to.clone()), 0o777),
            Call::Unlink(path, _) | Call::Rmdir(path) => drop(self.names.remove(path)),
            Call::Link(from, to) => drop(self.names.insert(to.clone(), self.names[from])),
            // Of one file these do nothing, as POSIX says.
            Call::Rename(a, b) | Call::Exchange(a, b) if self.names.get(a) == self.names.get(b) => {
            }
            Call::Rename(from, to) => {
                self.take(to);
                let taken = self.take(from);
                self.put(to, taken);
            }
            Call::Exchange(a, b) => {
                let (of_a, of_b) = (self.take(a), self.take(b));
                self.put(a, of_b);
                self.put(b, of_a);
            }
        }
        let named: BTreeSet<u64> = self.names.values().copied().collect();
        self.nodes.retain(|n, _| named.contains(n));
    }

    /// As it is found.
    pub fn entries(&self) -> Entries {
        // The names of each node, and the directories in each directory.
        let (mut same, mut within) = (BTreeMap::new(), BTreeMap::new());
        for (path, of) in &self.names {
            same.entry(of).or_insert_with(Vec::new).push(path);
            if self.nodes[of].what == What::Dir && !path.is_empty() {
                *within.entry(parent(path)).or_insert(0) += 1;
            }
        }
        let mut found = Entries::new();
        for (path, of) in &self.names {
            let node = &self.nodes[of];
            let links = match node.what {
                What::Dir => 2 + within.get(&path[..]).copied().unwrap_or(0),
                _ => same[of].len() as u64,
            };
            found.insert(
                path.clone(),
                Entry {
                    what: node.what.clone(),
                    mode: node.mode,
                    mark: node.mark,
                    links,
                    first: same[of][0].clone(),
                },
            );
        }
        found
    }
}

/// Whether `path` lies below directory `dir`.
fn is_below(path: &str, dir: &str) -> bool {
    match dir {
        "" => !path.is_empty(),
        dir => path
            .strip_prefix(dir)
            .is_some_and(|rest| rest.starts_with('/')),
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}

fn join(dir: &str, name: &str) -> String {
    match dir {
        "" => name.to_owned(),
        dir => format!("{dir}/{name}"),
    }
}

/// Chooses one step.
struct Choice<'a> {
    rng: Rng,
    tree: &'a Tree,
}

/// The calls of a choice that can be made, and the file whose fsync they need, if any.
type Made = Option<(Vec<Call>, Option<String>)>;

fn by_dir(calls: Vec<Call>) -> Made {
    Some((calls, None))
}

impl Choice<'_> {
    fn some(&mut self, wanted: impl Fn(&Tree, &str) -> bool) -> Option<String> {
        let all = self.tree.names.keys().filter(|n| !n.is_empty());
        let all: Vec<&String> = all.filter(|n| wanted(self.tree, n)).collect();
        (!all.is_empty()).then(|| (*self.rng.pick(&all)).clone())
    }

    fn leaf(&mut self) -> Option<String> {
        self.some(|t, n| !t.is_dir(n))
    }

    fn file(&mut self) -> Option<String> {
        self.some(|t, n| matches!(t.nodes[&t.names[n]].what, What::File(_)))
    }

    /// A name that nothing has.
    fn free(&mut self) -> Option<String> {
        let shallow = |n: &&String| n.split('/').count() < DEEP && self.tree.is_dir(n);
        let dirs = self.tree.names.keys().filter(shallow);
        let dirs: Vec<&str> = dirs.map(|n| &n[..]).collect();
        let path = join(self.rng.pick::<&str>(&dirs), self.rng.pick::<&str>(&POOL));
        (!self.tree.names.contains_key(&path)).then_some(path)
    }

    fn mode(&mut self) -> u32 {
        *self.rng.pick(&MODES)
    }

    fn bytes(&mut self) -> Vec<u8> {
        let n = match self.rng.below(3) {
            0 => self.rng.between(1, 64),
            1 => self.rng.between(64, 600),
            _ => self.rng.between(600, 9000),
        };
        let mut bytes = vec![0; n as usize];
        self.rng.fill(&mut bytes);
        bytes
    }

    /// A directory with many files, every eighth with bytes.
    fn crowd(&mut self) -> Made {
        let dir = self.free()?;
        let mut calls = vec![Call::Mkdir(dir.clone(), self.mode())];
        for n in 0..CROWD {
            let path = join(&dir, &n.to_string());
            match n % 8 {
                0 => {
                    let mut bytes = vec![0; self.rng.between(1, 64) as usize];
                    self.rng.fill(&mut bytes);
                    let new = format!("{path}.new");
                    calls.extend([
                        Call::Create(new.clone(), self.mode()),
                        Call::Write(new.clone(), bytes),
                        Call::Rename(new, path),
                    ]);
                }
                _ => calls.push(Call::Create(path, self.mode())),
            }
        }
        by_dir(calls)
    }

    /// As careful programs do: the file gets its name when it has its bytes.
    fn whole_file(&mut self, path: &str) -> Vec<Call> {
        let new = format!("{path}.new");
        vec![
            Call::Create(new.clone(), self.mode()),
            Call::Write(new.clone(), self.bytes()),
            Call::Rename(new, path.into()),
        ]
    }

    fn make(&mut self) -> Made {
        let path = self.free()?;
        let mode = self.mode();
        Some(match self.rng.below(6) {
            0 => (vec![Call::Mkdir(path, mode)], None),
            1 => {
                let within = join(&path, self.rng.pick::<&str>(&POOL));
                let mut calls = vec![Call::Mkdir(path, mode)];
                calls.extend(self.whole_file(&within));
                (calls, None)
            }
            2 => (self.whole_file(&path), None),
            3 => {
                let bytes = self.bytes();
                let calls = vec![
                    Call::Create(path.clone(), mode),
                    Call::Write(path.clone(), bytes),
                ];
                (calls, Some(path))
            }
            4 => (vec![Call::Link(self.leaf()?, path)], None),
            _ => {
                let to = format!("{}/{}", self.rng.below(99), self.rng.pick::<&str>(&POOL));
                (vec![Call::Symlink(to, path)], None)
            }
        })
    }

    fn remove(&mut self) -> Made {
        match self.rng.below(4) {
            0 => by_dir(vec![Call::Unlink(self.leaf()?, false)]),
            1 => by_dir(vec![Call::Unlink(self.file()?, true)]),
            2 => by_dir(vec![Call::Rmdir(
                self.some(|t, n| t.is_dir(n) && t.is_empty(n))?,
            )]),
            // With all that is in it.
            _ => {
                let dir = self.some(Tree::is_dir)?;
                let within = self.tree.names.keys().rev();
                let all = within.filter(|n| **n == dir || is_below(n, &dir)).cloned();
                let calls = all.map(|n| match self.tree.is_dir(&n) {
                    true => Call::Rmdir(n),
                    false => Call::Unlink(n, false),
                });
                by_dir(calls.collect())
            }
        }
    }

    fn rename(&mut self) -> Made {
        let from = self.some(|_, _| true)?;
        let to = match self.rng.below(3) {
            0 => self.some(|t, n| match (t.is_dir(&from), t.is_dir(n)) {
                (true, true) => t.is_empty(n),
                (a, b) => a == b,
            })?,
            _ => self.free()?,
        };
        if from == to || is_below(&to, &from) {
            return None;
        }
        by_dir(vec![Call::Rename(from, to)])
    }

    fn exchange(&mut self) -> Made {
        let (a, b) = (self.some(|_, _| true)?, self.some(|_, _| true)?);
        if a == b || is_below(&a, &b) || is_below(&b, &a) {
            return None;
        }
        if self.rng.coin() {
            return by_dir(vec![Call::Exchange(a, b)]);
        }
        let aside = "aside".to_owned();
        let moves = [(&a, &aside), (&b, &a), (&aside, &b)];
        // What had both names has the second one only after the first of these.
        if self.tree.names[&a] == self.tree.names[&b] {
            return None;
        }
        let moves = moves.map(|(from, to)| Call::Rename(from.clone(), to.clone()));
        by_dir(moves.to_vec())
    }

    fn change(&mut self) -> Made {
        match self.rng.below(4) {
            0 => {
                let path = self.some(|t, n| t.is_dir(n))?;
                by_dir(vec![Call::Chmod(path, self.mode())])
            }
            1 => {
                let path = self.file()?;
                let sync = self.rng.coin().then(|| path.clone());
                Some((vec![Call::Chmod(path, self.mode())], sync))
            }
            2 => {
                let path = self.file()?;
                let sync = self.rng.coin().then(|| path.clone());
                Some((vec![Call::Mark(path, self.rng.below(1 << 40))], sync))
            }
            _ => {
                let path = self.file()?;
                Some((vec![Call::Write(path.clone(), self.bytes())], Some(path)))
            }
        }
    }

    fn one(&mut self) -> Made {
        let many = self.tree.names.len() > MANY;
        match self.rng.below(12) {
            _ if many && self.rng.below(4) > 0 => self.remove(),
            _ if !many && self.rng.below(24) == 0 => self.crowd(),
            0..=3 => self.make(),
            4..=5 => self.remove(),
            6 => {
                let over = self.leaf()?;
                by_dir(self.whole_file(&over))
            }
            7..=8 => self.rename(),
            9 => self.exchange(),
            _ => self.change(),
        }
    }
}

/// The directory whose fsync acknowledges these calls: where the last of them gave or took a name.
fn where_synced(calls: &[Call], after: &Tree) -> String {
    let last = calls.last().map_or("", |c| match c {
        Call::Link(_, to) | Call::Symlink(_, to) | Call::Rename(_, to) => to,
        Call::Exchange(path, _) | Call::Mark(path, _) | Call::Mkdir(path, _) => path,
        Call::Create(path, _) | Call::Write(path, _) | Call::Unlink(path, _) => path,
        Call::Rmdir(path) | Call::Chmod(path, _) => path,
    });
    let dir = parent(last);
    match after.is_dir(dir) {
        true => dir.to_owned(),
        false => String::new(),
    }
}

/// Step `step` of a thread whose directory is `tree`.
pub fn step(seed: u64, thread: usize, step: u64, tree: &Tree) -> Step {
    let rng = Rng::new(seed.rotate_left(40) ^ (thread as u64) << 48 ^ step);
    let mut choice = Choice { rng, tree };
    // Not everything can be done with what is there.
    let made = (0..32).find_map(|_| choice.one());
    let (made, of_file) = made.unwrap_or_default();
    let mut calls = vec![Call::Mark(String::new(), step)];
    calls.extend(made);
    let mut after = tree.clone();
    calls.iter().for_each(|c| after.apply(c));
    let sync = match of_file {
        Some(path) => Sync::File(path),
        None => Sync::Dir(where_synced(&calls, &after)),
    };
    Step { calls, sync }
}

/// How far a thread has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reached {
    /// The last step of which there is something.
    pub step: u64,
    /// Whether all of that step is there.
    pub whole: bool,
}

impl Reached {
    /// The last step that is there as a whole.
    pub fn last_whole(self) -> u64 {
        self.step - u64::from(!self.whole)
    }
}

/// A thread's directory after each of its steps on names.
pub struct Model {
    seed: u64,
    thread: usize,
    /// The last step that `tree` has.
    step: u64,
    tree: Tree,
}

impl Model {
    /// The directory before the first step.
    pub fn new(seed: u64, thread: usize) -> Model {
        Model {
            seed,
            thread,
            step: 0,
            tree: Tree::new(),
        }
    }

    /// Goes to the state before step `to`; `is_of_names` says which steps are.
    fn go_before(&mut self, to: u64, is_of_names: &dyn Fn(u64) -> bool) {
        if to <= self.step {
            *self = Model::new(self.seed, self.thread);
        }
        while self.step + 1 < to {
            self.step += 1;
            if is_of_names(self.step) {
                let next = step(self.seed, self.thread, self.step, &self.tree);
                next.calls.iter().for_each(|c| self.tree.apply(c));
            }
        }
    }

    /// The step of which `found` is the result, among those up to `begun`; or how `found` differs.
    /// `alone`: nobody else syncs, so that there is no part of a step.
    pub fn step_of(
        &mut self,
        found: &Entries,
        begun: u64,
        alone: bool,
        is_of_names: &dyn Fn(u64) -> bool,
    ) -> Result<Reached, String> {
        let thread = self.thread;
        let mark = found.get("").and_then(|top| top.mark);
        let mark = mark.ok_or_else(|| format!("names of thread {thread}: no marked directory"))?;
        if mark > begun || mark > 0 && !is_of_names(mark) {
            return Err(format!(
                "names of thread {thread}: step {mark} is there, {begun} were begun"
            ));
        }
        self.go_before(mark, is_of_names);
        let mut tree = self.tree.clone();
        let calls = match mark {
            0 => Vec::new(),
            _ => step(self.seed, thread, mark, &tree).calls,
        };
        // What is found after how many calls, fewer than all.
        let mut before = self.tree.clone();
        let mut part = || {
            let first = &calls[..calls.len().saturating_sub(1)];
            let found_after = first.iter().map(|call| {
                before.apply(call);
                before.entries() == *found
            });
            let found_after: Vec<bool> = found_after.collect();
            found_after.iter().rposition(|is| *is).map(|i| i + 1)
        };
        calls.iter().for_each(|c| tree.apply(c));
        let whole = match difference(&tree.entries(), found).map(|e| (e, part())) {
            None => true,
            Some((_, Some(_))) if !alone => false,
            Some((e, part)) => {
                let part = part.map_or(String::new(), |n| format!(", of which {n} are there"));
                return Err(format!(
                    "names of thread {thread} are not as after its step {mark}: {e}; its calls are {}{part}",
                    brief(&calls)
                ));
            }
        };
        let step = mark;
        Ok(Reached { step, whole })
    }
}

/// Calls without the bytes that they write.
fn brief(calls: &[Call]) -> String {
    let all = calls.iter().map(|c| match c {
        Call::Write(path, bytes) => format!("Write({path:?}, {} bytes)", bytes.len()),
        c => format!("{c:?}"),
    });
    all.collect::<Vec<_>>().join(", ")
}

impl Entry {
    fn brief(&self) -> String {
        let what = match &self.what {
            What::File(bytes) => format!("file of {} bytes", bytes.len()),
            what => format!("{what:?}"),
        };
        let (mode, mark, links) = (self.mode, self.mark, self.links);
        format!(
            "{what}, mode {mode:o}, mark {mark:?}, {links} links, inode of {:?}",
            self.first
        )
    }
}

/// How `found` differs from `want`, if it does.
fn difference(want: &Entries, found: &Entries) -> Option<String> {
    let mut all: Vec<&String> = want.keys().chain(found.keys()).collect();
    all.sort_unstable();
    all.dedup();
    let differ: Vec<&String> = all
        .into_iter()
        .filter(|n| want.get(*n) != found.get(*n))
        .collect();
    let first = differ.first()?;
    let is = |e: &Entries| e.get(*first).map_or("nothing".into(), Entry::brief);
    let (is_found, wanted) = (is(found), is(want));
    let bytes = match is_found == wanted {
        true => " with other bytes",
        false => "",
    };
    Some(format!(
        "{} names differ, the first is {first:?}: {is_found}{bytes} instead of {wanted}",
        differ.len()
    ))
}

impl Default for Tree {
    fn default() -> Tree {
        Tree::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 11;
    const STEPS: u64 = 400;

    fn every(_: u64) -> bool {
        true
    }

    #[test]
    fn each_step_is_told_and_a_part_is_a_part() {
        let mut tree = Tree::new();
        let (mut model, mut parts) = (Model::new(SEED, 1), 0);
        let (mut calls, mut most) = (BTreeMap::new(), 0);
        for s in 1..=STEPS {
            let made = step(SEED, 1, s, &tree);
            for (i, c) in made.calls.iter().enumerate() {
                let kind = format!("{c:?}");
                let kind = kind.split('(').next().unwrap_or_default().to_owned();
                *calls.entry(kind).or_insert(0) += 1;
                tree.apply(c);
                let found = tree.entries();
                let whole = i + 1 == made.calls.len();
                if whole {
                    let (step, whole) = (s, true);
                    let is = Ok(Reached { step, whole });
                    assert_eq!(model.step_of(&found, STEPS, true, &every), is);
                    assert_eq!(model.step_of(&found, s, false, &every), is);
                    assert!(model.step_of(&found, s - 1, false, &every).is_err());
                    assert!(model.step_of(&found, s, false, &|n| n != s).is_err());
                } else {
                    let r = model.step_of(&found, s, false, &every).unwrap();
                    assert_eq!(r.step, s);
                    parts += u64::from(!r.whole);
                    let alone = model.step_of(&found, s, true, &every);
                    assert_eq!(alone.is_ok(), r.whole);
                }
            }
            most = most.max(tree.names.len());
        }
        assert!(parts > STEPS && most > MANY, "{parts}, {most}");
        assert!(
            calls.len() == 11 && calls.values().all(|n| *n > 8),
            "{calls:?}"
        );
        assert_ne!(
            step(SEED, 0, 1, &Tree::new()),
            step(SEED, 1, 1, &Tree::new())
        );
    }

    /// What a broken directory might show after a step. `before`: as before the step.
    fn broken(before: &Entries, after: &Entries) -> Vec<Entries> {
        let mut all = Vec::new();
        let mut put = |change: &dyn Fn(&mut Entries)| {
            let mut found = after.clone();
            change(&mut found);
            all.push(found);
        };
        for (path, entry) in after.iter().filter(|(p, _)| !p.is_empty()) {
            // An acknowledged name is missing.
            put(&|f| drop(f.remove(path)));
            let mut other = |change: &dyn Fn(&mut Entry)| {
                put(&|f| change(f.get_mut(path).expect("it is there")));
            };
            other(&|e| e.links += 1);
            other(&|e| e.mode ^= 0o100);
            other(&|e| e.mark = Some(e.mark.unwrap_or(0) + 1));
            match &entry.what {
                What::File(bytes) if !bytes.is_empty() => {
                    other(&|e| e.what = What::File(Vec::new()));
                    other(&|e| e.what = What::File(vec![0; bytes.len()]));
                }
                What::Link(to) => other(&|e| e.what = What::Link(format!("{to}x"))),
                _ => {}
            }
            if entry.first != *path {
                // Two names of one file are two files.
                other(&|e| e.first = path.clone());
            }
        }
        for (path, entry) in before.iter().filter(|(p, _)| !after.contains_key(*p)) {
            // What was removed, or renamed, is there as well.
            put(&|f| drop(f.insert(path.clone(), entry.clone())));
        }
        all
    }

    #[test]
    fn whatever_is_not_as_after_a_step_is_found() {
        let mut tree = Tree::new();
        let (mut model, mut seen) = (Model::new(SEED, 0), 0);
        for s in 1..=STEPS / 2 {
            let before = tree.entries();
            let made = step(SEED, 0, s, &tree);
            made.calls.iter().for_each(|c| tree.apply(c));
            for found in broken(&before, &tree.entries()) {
                let alone = model.step_of(&found, s, true, &every);
                assert!(alone.is_err(), "{s}: {alone:?}");
                // To others it may be a part of this step, as far as it goes.
                let r = model.step_of(&found, s, false, &every);
                assert!(
                    r.is_err()
                        || r == Ok(Reached {
                            step: s,
                            whole: false
                        }),
                    "{r:?}"
                );
                seen += 1;
            }
        }
        assert!(seen > 1000);
    }
}
