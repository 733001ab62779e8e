//! Bits that rot in a node's logs and superblock, and log writes that go to a wrong place.
//!
//! Owns the draws of such damage, which have a random generator of their own, and the
//! reading of a damaged medium. This reading follows docs/reference/format.md ("How recovery finds
//! the end") alone, without the engine: it finds which records of the logs can still be
//! read, and what they tell was acknowledged. The engine has to find and know that much.
//! Data files are left alone, since nothing promises to detect their damage
//! (docs/reference/guarantees.md, "Damaged data files").
//!
//! A log on a disk is read only if the ring's memory is gone. So damage to it shows after
//! a loss of power. A start before that writes the log anew. Persistent memory is damaged
//! only while no process uses it. A process that uses it would read other bytes than it
//! wrote, and no behaviour is defined for that.

use std::path::Path;

use mojim_config::MediumKind;
use mojim_format::pad::Pad;
use mojim_format::{Catalog, RecordHeader, RecordView, SUPERBLOCK_LEN, State, Superblock};
use mojim_protocol::History;
use mojim_store::log::LogSpec;
use mojim_store::store::StoreSpec;

use crate::disk::SECTOR;
use crate::failures::Takes;
use crate::nodes::NODES;
use crate::rng::Rng;
use crate::world::World;

/// Length of the area before the records of a log in persistent memory.
const CONTROL: usize = 4096;

/// What can be read from a node's medium.
#[derive(Debug, Clone, Copy)]
pub struct Readable {
    /// The last LSN of the contiguous prefix of whole sync points.
    pub tail: u64,
    /// The readable records tell that everything up to this LSN was acknowledged.
    pub told: u64,
}

/// One log as it lies on the medium.
struct Lane {
    bytes: Vec<u8>,
    /// Bytes of the file before the ring.
    before: usize,
    /// Each record that was found: where it begins in the ring, and its header.
    found: Vec<(u64, RecordHeader)>,
    /// Where recovery ends.
    head: u64,
    start: u64,
}

/// Tells a copy's records from others.
struct Of<'a> {
    sb: &'a Superblock,
    history: History,
}

impl Of<'_> {
    /// The record that begins at byte `at` of a ring, if it belongs to this copy's
    /// volume.
    fn record(&self, ring: &[u8], at: usize) -> Option<RecordHeader> {
        let h = RecordView::decode(&ring[at..]).ok()?.header;
        (h.volume == self.sb.volume_id).then_some(h)
    }

    fn is_current(&self, h: &RecordHeader) -> bool {
        h.lsn > self.sb.checkpoint && self.history.epoch_at(h.lsn) == Some(h.epoch)
    }

    fn read(&self, bytes: Vec<u8>, before: usize, start: u64) -> Lane {
        let ring = &bytes[before..];
        let (size, align) = (ring.len() as u64, u64::from(self.sb.align));
        let (mut at, mut head, mut last, mut pad) = (start, start, 0, None);
        let mut found = Vec::new();
        while at < start + size {
            let off = (at % size) as usize;
            if let Ok(p) = Pad::decode(&ring[off..])
                && (p.volume == self.sb.volume_id && p.lsn > last && pad.is_none())
            {
                pad = Some(p.lsn);
                at += size - off as u64;
                continue;
            }
            let Some(h) = self.record(ring, off) else {
                break;
            };
            let len = u64::from(h.len).next_multiple_of(align);
            let fits = at + u64::from(h.len) <= start + size;
            let follows = h.lsn > last && pad.is_none_or(|l| l == h.lsn);
            if !fits || !follows || h.lsn > self.sb.checkpoint && !self.is_current(&h) {
                break;
            }
            (last, pad) = (h.lsn, None);
            if h.lsn > self.sb.checkpoint {
                found.push((at, h));
            }
            at += len;
            head = at;
        }
        let start = found.first().map_or(head, |(at, _)| *at);
        Lane {
            bytes,
            before,
            found,
            head,
            start,
        }
    }

    /// The end of the last sync point of which the catalogue may show a part.
    fn begun(&self, world: &World, node: &str, meta: &Path) -> Option<u64> {
        let bytes = world.contents(node, &meta.join("catalog"))?;
        let (epoch, lsn) = Catalog::decode(&bytes).ok()?.begun;
        (self.history.epoch_at(lsn) == Some(epoch)).then_some(lsn)
    }

    /// The greatest committed LSN that the records behind the head tell.
    fn beyond(&self, lane: &Lane) -> u64 {
        let ring = &lane.bytes[lane.before..];
        let size = ring.len() as u64;
        let places = (lane.head..lane.start + size).step_by(self.sb.align as usize);
        let told = places.filter_map(|at| {
            let h = self.record(ring, (at % size) as usize)?;
            let fits = at + u64::from(h.len) <= lane.start + size;
            (fits && self.is_current(&h)).then_some(h.committed)
        });
        told.max().unwrap_or(0)
    }
}

/// The newer valid slot of a superblock, and which one it is.
fn superblock(world: &World, node: &str, meta: &Path) -> Option<(Superblock, usize)> {
    let bytes = world.contents(node, &meta.join("superblock"))?;
    let slots = bytes.chunks(SUPERBLOCK_LEN).enumerate();
    let valid = slots.filter_map(|(i, b)| Some((Superblock::decode(b).ok()?, i)));
    valid.max_by_key(|(sb, _)| sb.sequence)
}

/// The logs of a whole copy; `None` if recovery needs none, or cannot read one.
fn lanes(world: &World, node: &str, spec: &StoreSpec, sb: &Superblock) -> Option<Vec<Lane>> {
    if sb.state != State::Whole || sb.logs == 0 {
        return None;
    }
    let history = History::from_entries(&sb.history)?;
    let of = Of { sb, history };
    let before = match spec.logs[0].medium {
        MediumKind::Pmem => CONTROL,
        MediumKind::Disk | MediumKind::Dram => 0,
    };
    let all = spec.logs.iter().zip(&sb.starts).map(|(l, start)| {
        let bytes = world.contents(node, &l.path)?;
        (bytes.len() as u64 == before as u64 + l.size).then(|| of.read(bytes, before, *start))
    });
    all.collect()
}

/// What can be read of a node's copy; `None` if recovery needs no log.
pub fn readable(world: &World, node: &str, spec: &StoreSpec) -> Option<Readable> {
    let (sb, _) = superblock(world, node, &spec.meta)?;
    let lanes = lanes(world, node, spec, &sb)?;
    let mut all: Vec<_> = lanes.iter().flat_map(|l| &l.found).map(|f| f.1).collect();
    all.sort_by_key(|h| h.lsn);
    let mut tail = sb.checkpoint;
    for (h, next) in all.iter().zip(sb.checkpoint + 1..) {
        if h.lsn != next {
            break;
        }
        if h.end {
            tail = h.lsn;
        }
    }
    let history = History::from_entries(&sb.history)?;
    let of = Of { sb: &sb, history };
    let told = all.iter().map(|h| h.committed);
    let told = told.chain(lanes.iter().map(|l| of.beyond(l)));
    let told = told.chain(of.begun(world, node, &spec.meta));
    let told = told.chain([sb.logged]).max();
    Some(Readable {
        tail,
        told: told.unwrap_or(0),
    })
}

/// What a copy that is opened now recovers: its history, and its last LSN. `None` if it is not
/// whole.
pub fn recovers(world: &World, node: &str, spec: &StoreSpec) -> Option<(History, u64)> {
    let (sb, _) = superblock(world, node, &spec.meta)?;
    if sb.state != State::Whole {
        return None;
    }
    let tail = readable(world, node, spec).map_or(sb.checkpoint, |r| r.tail);
    Some((History::from_entries(&sb.history)?, tail))
}

/// The damage of one run.
pub struct Rot {
    rng: Rng,
    /// The nodes whose logs may have been damaged since they were last read.
    damaged: [bool; NODES],
    /// How often each node had lost its power when its copy was last opened.
    opened: [u32; NODES],
}

impl Rot {
    /// Draws whether a run has damage: one seed in eight, and each that is `wanted`.
    pub fn draw(seed: u64, wanted: bool) -> Option<Rot> {
        let mut rng = Rng::new(seed ^ 0x0062_6974_726f_7473);
        (rng.below(8) == 0 || wanted).then_some(Rot {
            rng,
            damaged: [false; NODES],
            opened: [0; NODES],
        })
    }

    /// True `of` times in a hundred thousand.
    pub fn is_due(&mut self, of: u64) -> bool {
        self.rng.below(100_000) < of
    }

    /// Draws one of `nodes` nodes.
    pub fn node(&mut self, nodes: usize) -> usize {
        self.rng.below(nodes as u64) as usize
    }

    /// Whether what a start of node `n` reads is damaged.
    pub fn shows(
        &self,
        world: &World,
        (n, node): (usize, &str),
        spec: &StoreSpec,
        failures: u32,
    ) -> bool {
        let gone = |l: &LogSpec| !world.has_memory(node, &l.ring);
        let read = match spec.logs[0].medium {
            // A node that refused to serve what it read has removed the ring from memory.
            MediumKind::Disk => failures != self.opened[n] || spec.logs.iter().any(gone),
            MediumKind::Pmem => true,
            MediumKind::Dram => false,
        };
        self.damaged[n] && read
    }

    /// The copy of node `n` was opened, and its logs were written anew.
    pub fn opened(&mut self, n: usize, failures: u32) {
        self.damaged[n] = false;
        self.opened[n] = failures;
    }

    /// Damages something of node `n`. `down`: no process of it runs; `dark`: it lost its
    /// power, and has not started since.
    pub fn strike(
        &mut self,
        world: &World,
        (n, node): (usize, &str),
        spec: &StoreSpec,
        (down, dark): (bool, bool),
    ) {
        let Some((sb, slot)) = superblock(world, node, &spec.meta) else {
            return;
        };
        // Only the other slot, which a start after a power loss does not need. Otherwise
        // the slot written last may still be lost, and the other one would be needed.
        if dark && self.rng.below(4) == 0 {
            let byte = (1 - slot) * SUPERBLOCK_LEN + self.rng.below(SUPERBLOCK_LEN as u64) as usize;
            self.flip(world, node, &spec.meta.join("superblock"), byte as u64);
            return;
        }
        let medium = spec.logs[0].medium;
        if medium == MediumKind::Dram || medium == MediumKind::Pmem && !down {
            return;
        }
        let lane = self.rng.below(spec.logs.len() as u64) as usize;
        let log = &spec.logs[lane];
        if medium == MediumKind::Disk && !down && self.rng.below(3) == 0 {
            let to = self.rng.below(log.size / SECTOR as u64) * SECTOR as u64;
            if world.fails(node, Takes::Bytes) {
                self.damaged[n] |= world.misdirect_next_write(node, &log.path, to);
            }
            return;
        }
        let lanes = lanes(world, node, spec, &sb);
        let found = lanes.as_ref().map_or(&[][..], |l| &l[lane].found);
        let before = match medium {
            MediumKind::Pmem => CONTROL as u64,
            _ => 0,
        };
        // Mostly a byte of a record that recovery needs.
        let byte = match found.is_empty() || self.rng.below(8) == 0 {
            true => self.rng.below(log.size),
            false => {
                let (at, h) = *self.rng.pick(found);
                at % log.size + self.rng.below(u64::from(h.len))
            }
        };
        self.damaged[n] |= self.flip(world, node, &log.path, before + byte);
    }

    fn flip(&mut self, world: &World, node: &str, path: &Path, byte: u64) -> bool {
        let bit = 8 * byte + self.rng.below(8);
        world.fails(node, Takes::Bytes) && world.flip_bit(node, path, bit)
    }
}
