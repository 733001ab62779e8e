//! Every sync point of a volume, as a tree: a fork is a point with two children.
//!
//! Owns the points, and which of them has which LSN in which epoch.
//!
//! Invariants:
//!
//! - The first point is the empty volume.
//! - A point's last LSN is above its parent's.
//! - No two points have the same epoch and last LSN.

use mojim_protocol::{AckRule, History};
use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use crate::model::{Files, ModelOp, apply};
use crate::nodes::NODES;

/// How a sync point was acknowledged.
#[derive(Debug, Clone, Copy)]
pub struct Acked {
    /// Whose acknowledgements were waited for.
    pub rule: AckRule,
    /// The primary, and its mirror.
    pub pair: [usize; 2],
    /// How often each node had failed by then.
    pub failures: [u32; NODES],
}

/// One sync point: a state of the volume.
#[derive(Debug)]
pub struct Point {
    /// The epoch of its records.
    pub epoch: u64,
    /// Its last LSN.
    pub last: u64,
    /// The point before it.
    pub parent: usize,
    /// The volume after it.
    pub files: Arc<Files>,
    /// How it was acknowledged last, if it was.
    pub acked: Option<Acked>,
    /// It was committed, adopted or promoted, so a backup may have applied it.
    pub settled: bool,
}

/// All sync points of a volume.
pub struct Points {
    all: Vec<Point>,
    by: BTreeMap<(u64, u64), usize>,
}

impl Default for Points {
    fn default() -> Self {
        let root = Point {
            epoch: 0,
            last: 0,
            parent: 0,
            files: Arc::default(),
            acked: None,
            settled: true,
        };
        Points {
            all: vec![root],
            by: BTreeMap::new(),
        }
    }
}

impl Index<usize> for Points {
    type Output = Point;

    fn index(&self, p: usize) -> &Point {
        &self.all[p]
    }
}

impl IndexMut<usize> for Points {
    fn index_mut(&mut self, p: usize) -> &mut Point {
        &mut self.all[p]
    }
}

impl Points {
    /// How many there are.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Adds the sync point of the LSNs from `first` to `last` behind `parent`.
    pub fn append(
        &mut self,
        parent: usize,
        epoch: u64,
        first: u64,
        last: u64,
        changes: &[ModelOp],
    ) -> Result<usize, String> {
        if first != self.all[parent].last + 1 {
            return Err(format!(
                "1: LSN {first} was given out behind {}",
                self.text(parent)
            ));
        }
        let mut files = (*self.all[parent].files).clone();
        apply(&mut files, changes);
        let id = self.all.len();
        self.all.push(Point {
            epoch,
            last,
            parent,
            files: Arc::new(files),
            acked: None,
            settled: false,
        });
        match self.by.insert((epoch, last), id) {
            Some(_) => Err(format!("1: {} was given out twice", self.text(id))),
            None => Ok(id),
        }
    }

    /// Whether `old` is `new` or one of its ancestors.
    pub fn is_within(&self, old: usize, mut new: usize) -> bool {
        while self.all[new].last > self.all[old].last {
            new = self.all[new].parent;
        }
        new == old
    }

    /// The last common ancestor of two points.
    pub fn common(&self, mut a: usize, mut b: usize) -> usize {
        while a != b {
            if self.all[a].last >= self.all[b].last {
                a = self.all[a].parent;
            } else {
                b = self.all[b].parent;
            }
        }
        a
    }

    /// The last whole sync point at or before `lsn` on the branch that ends at `head`.
    pub fn before(&self, head: usize, lsn: u64) -> usize {
        let mut p = head;
        while self.all[p].last > lsn {
            p = self.all[p].parent;
        }
        p
    }

    /// The point that ends exactly at `lsn`, for a copy with this history.
    pub fn exact(&self, history: &History, lsn: u64) -> Option<usize> {
        if lsn == 0 {
            return Some(0);
        }
        self.by.get(&(history.epoch_at(lsn)?, lsn)).copied()
    }

    /// The last whole sync point at or before `lsn`, for a copy with this history.
    pub fn rounded(&self, history: &History, lsn: u64) -> Option<usize> {
        (0..=lsn)
            .rev()
            .take(64)
            .find_map(|l| self.exact(history, l))
    }

    /// The point as a violation names it.
    pub fn text(&self, p: usize) -> String {
        let p = &self.all[p];
        format!("LSN {} of epoch {}", p.last, p.epoch)
    }
}
