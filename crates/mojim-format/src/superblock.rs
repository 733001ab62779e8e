//! The superblock: what one node durably knows of its copy of a volume.
//!
//! One file has two slots of `SUPERBLOCK_LEN` bytes. The newer valid slot counts,
//! and a write goes to the other one, so that a torn write loses nothing.
//! `docs/reference/format.md`, "Superblock".

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::{FormatError, MAX_LANES, MAX_NAME, crc32c};

/// Bytes of one slot.
pub const SUPERBLOCK_LEN: usize = 4096;
/// `MJSUPER1`.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"MJSUPER1";
/// Most epochs that a superblock remembers.
pub const MAX_HISTORY: usize = 128;
/// Version of the superblock that is written; earlier versions are read too.
pub const SUPERBLOCK_VERSION: u32 = 3;

const WHAT: &str = "superblock";
const NAMES_AT: usize = 104;
const NAME_LEN: usize = 1 + MAX_NAME;
const STARTS_AT: usize = 432;
const HISTORY_AT: usize = STARTS_AT + MAX_LANES * 8;
const LIFE_AT: usize = HISTORY_AT + MAX_HISTORY * 16;
const FLAGS_AT: usize = LIFE_AT + 8;
const NONCES_AT: usize = FLAGS_AT + 8;
const LOGGED_AT: usize = NONCES_AT + 16;
const CRC_AT: usize = SUPERBLOCK_LEN - 4;
const FLAG_RING_LOST: u32 = 1;
const FLAG_AWAITS_COPY: u32 = 2;
const FLAG_RENEWED: u32 = 4;

const _: () = assert!(NAMES_AT + 5 * NAME_LEN <= STARTS_AT);
const _: () = assert!(LOGGED_AT + 8 <= CRC_AT);

/// Whether a copy can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Holds nothing: the copy is new, or what it held was discarded.
    Empty = 0,
    /// Holds a prefix of the volume's history.
    Whole = 1,
    /// A whole copy of another node is staged and replaces the one that was here;
    /// opening the copy completes this.
    Switching = 3,
}

/// The first LSN that belongs to an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochStart {
    /// The epoch.
    pub epoch: u64,
    /// Its first LSN.
    pub first_lsn: u64,
}

/// The primary and the mirror of an epoch (`docs/reference/views.md`, "Views in a register").
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// Number of the view; 0 before the first.
    pub epoch: u64,
    /// The node whose sync points may be acknowledged.
    pub primary: String,
    /// The node that must acknowledge them too; empty if the primary is alone.
    pub mirror: String,
}

/// One node's durable knowledge of its copy of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Version of the layout: [`SUPERBLOCK_VERSION`], or that of the release that wrote it.
    pub version: u32,
    /// Grows by one with each write.
    pub sequence: u64,
    /// Identity of the volume, chosen at random when it was made; 0 = none yet.
    pub volume_id: u64,
    /// Frames of an epoch below this one are refused.
    pub promised: u64,
    /// The view that this node knew last.
    pub view: View,
    /// Every record up to this LSN is durable in the data area.
    pub checkpoint: u64,
    /// If not zero: the copy is worthless after a boot with another id.
    pub boot_id: [u8; 16],
    /// A number that changes when the logs are lost, or opened after a clean close.
    pub incarnation: u64,
    /// Whether the copy can be used.
    pub state: State,
    /// Bytes of each log.
    pub log_size: u64,
    /// Records in the logs begin at multiples of this number of bytes.
    pub align: u32,
    /// Hash of the logs' configuration; 0 after a clean close, when the logs
    /// hold nothing.
    pub logs: u32,
    /// The cluster's name.
    pub cluster: String,
    /// The volume's name.
    pub volume: String,
    /// This node's name.
    pub node: String,
    /// Where recovery starts in each log, as a position that never wraps.
    pub starts: Vec<u64>,
    /// First LSNs of epochs, ascending: of those that reach beyond the checkpoint,
    /// of the last one before, and perhaps of older ones.
    pub history: Vec<EpochStart>,
    /// Number of the copy's life. It changes when what the copy had acknowledged is
    /// lost or replaced. A view names its members with it.
    pub life: u64,
    /// While this node was primary its ring was lost, with what only the ring held.
    pub ring_lost: bool,
    /// Since that loss the copy has had another life, so that a register does not take it
    /// for the copy that it names.
    pub renewed: bool,
    /// A copy of another node has begun to come to this node, which had none.
    pub awaits_copy: bool,
    /// A random number that changes each time the copy is opened. A ring's memory
    /// counts if it has this nonce, or `nonce_before`.
    pub nonce: u64,
    /// The nonce before, while the rings may not have the new one yet. 0: none.
    pub nonce_before: u64,
    /// This node's own logs had everything up to this LSN durably, and it was acknowledged:
    /// logs that end before are not as they were.
    pub logged: u64,
}

impl Superblock {
    /// The slot's bytes.
    pub fn encode(&self) -> Box<[u8; SUPERBLOCK_LEN]> {
        assert!(self.starts.len() <= MAX_LANES && self.history.len() <= MAX_HISTORY);
        let mut b = Box::new([0u8; SUPERBLOCK_LEN]);
        let mut put = |at: usize, v: &[u8]| b[at..at + v.len()].copy_from_slice(v);
        put(0, &SUPERBLOCK_MAGIC);
        put(8, &self.version.to_le_bytes());
        put(12, &(SUPERBLOCK_LEN as u32).to_le_bytes());
        put(16, &self.sequence.to_le_bytes());
        put(24, &self.volume_id.to_le_bytes());
        put(32, &self.promised.to_le_bytes());
        put(40, &self.view.epoch.to_le_bytes());
        put(48, &self.checkpoint.to_le_bytes());
        put(56, &self.boot_id);
        put(72, &self.incarnation.to_le_bytes());
        put(80, &(self.state as u32).to_le_bytes());
        put(84, &(self.starts.len() as u16).to_le_bytes());
        put(86, &(self.history.len() as u16).to_le_bytes());
        put(88, &self.log_size.to_le_bytes());
        put(96, &self.align.to_le_bytes());
        put(100, &self.logs.to_le_bytes());
        let names = [
            &self.cluster,
            &self.volume,
            &self.node,
            &self.view.primary,
            &self.view.mirror,
        ];
        for (i, name) in names.into_iter().enumerate() {
            assert!(name.len() <= MAX_NAME, "name too long: {name}");
            let at = NAMES_AT + i * NAME_LEN;
            put(at, &[name.len() as u8]);
            put(at + 1, name.as_bytes());
        }
        for (i, s) in self.starts.iter().enumerate() {
            put(STARTS_AT + i * 8, &s.to_le_bytes());
        }
        for (i, e) in self.history.iter().enumerate() {
            put(HISTORY_AT + i * 16, &e.epoch.to_le_bytes());
            put(HISTORY_AT + i * 16 + 8, &e.first_lsn.to_le_bytes());
        }
        put(LIFE_AT, &self.life.to_le_bytes());
        let flags = (self.ring_lost as u32 * FLAG_RING_LOST)
            | (self.awaits_copy as u32 * FLAG_AWAITS_COPY)
            | (self.renewed as u32 * FLAG_RENEWED);
        put(FLAGS_AT, &flags.to_le_bytes());
        put(NONCES_AT, &self.nonce.to_le_bytes());
        put(NONCES_AT + 8, &self.nonce_before.to_le_bytes());
        put(LOGGED_AT, &self.logged.to_le_bytes());
        let crc = crc32c(&b[..CRC_AT]);
        b[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Reads and validates one slot.
    pub fn decode(b: &[u8]) -> Result<Superblock, FormatError> {
        let version = check_slot(b)?;
        let lanes = u16_at(b, 84) as usize;
        if lanes > MAX_LANES {
            return Err(field("lanes", lanes as u64));
        }
        let history = history_of(b)?;
        let align = u32_at(b, 96);
        let log_size = u64_at(b, 88);
        if lanes > 0 && (!align.is_power_of_two() || !log_size.is_multiple_of(align as u64)) {
            return Err(field("align", align as u64));
        }
        let s = Superblock {
            version,
            sequence: u64_at(b, 16),
            volume_id: u64_at(b, 24),
            promised: u64_at(b, 32),
            view: View {
                epoch: u64_at(b, 40),
                primary: name_of(b, 3, "primary")?,
                mirror: name_of(b, 4, "mirror")?,
            },
            checkpoint: u64_at(b, 48),
            boot_id: b[56..72].try_into().expect("sixteen bytes"),
            incarnation: u64_at(b, 72),
            state: match u32_at(b, 80) {
                0 => State::Empty,
                1 => State::Whole,
                3 => State::Switching,
                v => return Err(field("state", v as u64)),
            },
            log_size,
            align,
            logs: u32_at(b, 100),
            cluster: name_of(b, 0, "cluster")?,
            volume: name_of(b, 1, "volume")?,
            node: name_of(b, 2, "node")?,
            starts: (0..lanes).map(|i| u64_at(b, STARTS_AT + i * 8)).collect(),
            history,
            life: u64_at(b, LIFE_AT),
            ring_lost: u32_at(b, FLAGS_AT) & FLAG_RING_LOST != 0,
            renewed: u32_at(b, FLAGS_AT) & FLAG_RENEWED != 0,
            awaits_copy: u32_at(b, FLAGS_AT) & FLAG_AWAITS_COPY != 0,
            nonce: u64_at(b, NONCES_AT),
            nonce_before: u64_at(b, NONCES_AT + 8),
            logged: u64_at(b, LOGGED_AT),
        };
        let newer = s.awaits_copy || s.renewed || s.nonce != 0 || s.nonce_before != 0;
        // Bytes that no field covers are zero, unless another version wrote them.
        if version == 1 && newer
            || version < 3 && s.logged != 0
            || s.encode()[..] != b[..SUPERBLOCK_LEN]
        {
            return Err(field("reserved", 0));
        }
        Ok(s)
    }
}

fn field(field: &'static str, value: u64) -> FormatError {
    FormatError::Field {
        what: WHAT,
        field,
        value,
    }
}

/// Checks that a slot was written whole, in a version that this release reads. Returns
/// the version.
fn check_slot(b: &[u8]) -> Result<u32, FormatError> {
    if b.len() < SUPERBLOCK_LEN {
        return Err(FormatError::Short {
            what: WHAT,
            have: b.len(),
            need: SUPERBLOCK_LEN,
        });
    }
    if b[..8] != SUPERBLOCK_MAGIC {
        return Err(FormatError::Magic {
            what: WHAT,
            found: u32_at(b, 0),
        });
    }
    // Before the version: a damaged version is no sign of another release. Every version has the
    // checksum in this place.
    let (found, expected) = (u32_at(b, CRC_AT), crc32c(&b[..CRC_AT]));
    if found != expected {
        return Err(FormatError::Checksum {
            what: WHAT,
            found,
            expected,
        });
    }
    let version = u32_at(b, 8);
    // In version 1 the nonces and two of the flags were reserved, and zero, and in version 2
    // what the logs had.
    if !(1..=SUPERBLOCK_VERSION).contains(&version) {
        return Err(FormatError::Version {
            what: WHAT,
            found: version.min(u16::MAX as u32) as u16,
            known: SUPERBLOCK_VERSION as u16,
        });
    }
    Ok(version)
}

/// The `i`-th of a slot's names.
fn name_of(b: &[u8], i: usize, field: &'static str) -> Result<String, FormatError> {
    let at = NAMES_AT + i * NAME_LEN;
    let n = b[at] as usize;
    if n > MAX_NAME {
        return Err(FormatError::Name { what: WHAT, field });
    }
    std::str::from_utf8(&b[at + 1..at + 1 + n])
        .map(str::to_owned)
        .map_err(|_| FormatError::Name { what: WHAT, field })
}

/// The epochs of a slot, which ascend.
fn history_of(b: &[u8]) -> Result<Vec<EpochStart>, FormatError> {
    let epochs = u16_at(b, 86) as usize;
    if epochs > MAX_HISTORY {
        return Err(field("history", epochs as u64));
    }
    let history: Vec<EpochStart> = (0..epochs)
        .map(|i| EpochStart {
            epoch: u64_at(b, HISTORY_AT + i * 16),
            first_lsn: u64_at(b, HISTORY_AT + i * 16 + 8),
        })
        .collect();
    if history
        .windows(2)
        .any(|w| w[0].epoch >= w[1].epoch || w[0].first_lsn > w[1].first_lsn)
    {
        return Err(field("history order", epochs as u64));
    }
    Ok(history)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        Superblock {
            version: SUPERBLOCK_VERSION,
            sequence: 3,
            volume_id: 99,
            promised: 5,
            view: View {
                epoch: 4,
                primary: "a".into(),
                mirror: "b".into(),
            },
            checkpoint: 1000,
            boot_id: [7; 16],
            incarnation: 1,
            state: State::Whole,
            log_size: 1 << 20,
            align: 512,
            logs: 77,
            cluster: "example".into(),
            volume: "orders".into(),
            node: "a".into(),
            starts: vec![512, 1024],
            history: vec![
                EpochStart {
                    epoch: 1,
                    first_lsn: 1,
                },
                EpochStart {
                    epoch: 4,
                    first_lsn: 900,
                },
            ],
            life: 12,
            ring_lost: true,
            renewed: true,
            awaits_copy: false,
            nonce: 21,
            nonce_before: 20,
            logged: 1100,
        }
    }

    #[test]
    fn what_is_written_is_read_and_flips_are_found() {
        let s = example();
        let b = s.encode();
        assert_eq!(Superblock::decode(&b[..]).unwrap(), s);
        // As version 1 wrote it: the nonces, and two flags, were reserved.
        let versioned = |s: &Superblock, version: u32| {
            let s = Superblock {
                version,
                ..s.clone()
            };
            Superblock::decode(&s.encode()[..])
        };
        let mut old = s.clone();
        (old.version, old.renewed) = (1, false);
        (old.nonce, old.nonce_before) = (0, 0);
        assert!(versioned(&old, 1).is_err());
        assert!(versioned(&old, 2).is_err());
        old.logged = 0;
        assert_eq!(versioned(&old, 1), Ok(old.clone()));
        assert!(versioned(&s, 1).is_err());
        old.renewed = true;
        assert!(versioned(&old, 1).is_err());
        for other in [0, 4, 70_000] {
            let e = versioned(&old, other).unwrap_err();
            assert!(matches!(e, FormatError::Version { known: 3, .. }), "{e}");
        }
        for bit in (0..b.len() * 8).step_by(7) {
            let mut c = b.clone();
            c[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&c[..]).is_err(), "bit {bit}");
        }
    }

    /// A flipped bit made another version of a slot that is not needed, and the copy was not opened:
    /// a newer release seemed to have written it.
    #[test]
    fn a_damaged_version_is_no_other_release() {
        let b = example().encode();
        for bit in 8 * 8..12 * 8 {
            let mut c = b.clone();
            c[bit / 8] ^= 1 << (bit % 8);
            let e = Superblock::decode(&c[..]).unwrap_err();
            assert!(matches!(e, FormatError::Checksum { .. }), "bit {bit}: {e}");
        }
    }
}
