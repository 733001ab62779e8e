//! The demonstration's program: a log of entries in a mapped file.
//!
//! As in Figure 1 of the paper: an entry is stored behind the last one, the log's size is stored,
//! and one gmsync commits both.
//!
//! Owns the file's form: the size of the entries in bytes (8, little endian) at offset 0, entries
//! from `FIRST` on. The content of entry `i` follows from `i`, so that a reader can check every
//! byte without being told anything.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use mojim::{MapFlags, Mapping, Volume, gmsync};

use crate::ask::load;
use crate::failure::{Done, Failure};

/// The log's file in its volume.
pub const FILE: &str = "log";
/// Its size in bytes.
pub const CAPACITY: usize = 32 << 20;
/// Where the first entry begins.
const FIRST: usize = 64;
/// The longest entry in bytes.
const LONGEST: usize = 3000;

/// The demonstration's program: appends entries to a log and says which are committed.
#[derive(clap::Args)]
pub struct Append {
    #[arg(long)]
    config: PathBuf,
    #[arg(long)]
    node: String,
    #[arg(long)]
    volume: Option<String>,
    /// Entries to append. 0: until the log is full.
    #[arg(long, default_value_t = 0)]
    entries: u64,
    /// Append this many entries first, and the rest after a line on standard input.
    #[arg(long)]
    first: Option<u64>,
    /// Microseconds between two entries.
    #[arg(long, default_value_t = 0)]
    pace: u64,
    /// Bytes of another file in the volume, beside the log.
    #[arg(long, default_value_t = 0)]
    ballast: usize,
    /// Stay attached, without appending, until standard input ends.
    #[arg(long)]
    linger: bool,
}

impl Append {
    /// Runs it: prints `attached EPOCH`, the number of each committed entry, and `detached`.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = Volume::attach_with(&config, &self.node, self.volume.as_deref(), |_, _| {})?;
        let map = volume.map(
            FILE,
            CAPACITY,
            MapFlags {
                create: true,
                ..MapFlags::default()
            },
        )?;
        let log = Log(map);
        if self.ballast > 0 {
            fill(&volume, self.ballast)?;
        }
        let found = log.check();
        if found.torn.is_some() {
            return Err(Failure::failed(format!(
                "the log is damaged behind entry {}",
                found.entries
            )));
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "attached {} {}", volume.epoch(), found.entries)?;
        out.flush()?;
        let mut size = found.size;
        let end = if self.entries == 0 {
            u64::MAX
        } else {
            found.entries + self.entries
        };
        let pause = self.first.map(|n| found.entries + n);
        for i in found.entries..end {
            if Some(i) == pause {
                std::io::stdin().read_line(&mut String::new())?;
            }
            let entry = entry(i);
            if FIRST + size + entry.len() > CAPACITY {
                break;
            }
            log.append(size, &entry)?;
            size += entry.len();
            writeln!(out, "{i}")?;
            out.flush()?;
            if self.pace > 0 {
                std::thread::sleep(Duration::from_micros(self.pace));
            }
        }
        if self.linger {
            let mut nothing = Vec::new();
            std::io::Read::read_to_end(&mut std::io::stdin(), &mut nothing)?;
        }
        volume.detach()?;
        writeln!(out, "detached")?;
        Ok(0)
    }
}

/// A file whose every page has bytes of its own, committed.
fn fill(volume: &Volume, len: usize) -> Result<(), mojim::Error> {
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let map = volume.map("ballast", len, flags)?;
    for (i, at) in (0..len).step_by(1 << 20).enumerate() {
        let n = (len - at).min(1 << 20);
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe {
            std::ptr::write_bytes(map.ptr.add(at), i as u8 | 1, n);
            mojim::msync(map.ptr.add(at), n)?;
        }
    }
    Ok(())
}

/// What entry `i` contains: its number, its length, and bytes that follow from both. Logs that an earlier
/// build wrote are read by this one, so the bytes stay (xorshift).
fn entry(i: u64) -> Vec<u8> {
    let mut x = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    // Mostly short, some longer than half a page.
    let r = next() as usize;
    let len = if r.is_multiple_of(8) {
        16 + (r >> 8) % (LONGEST - 16)
    } else {
        16 + (r >> 8) % 240
    };
    let mut bytes = Vec::with_capacity(len + 8);
    bytes.extend_from_slice(&i.to_le_bytes());
    bytes.extend_from_slice(&(len as u64).to_le_bytes());
    while bytes.len() < len {
        bytes.extend_from_slice(&next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// What a log holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogContents {
    /// Whole entries in their places.
    pub entries: u64,
    /// Their bytes.
    pub size: usize,
    /// The byte offset in the file of what is wrong behind them, if anything.
    pub torn: Option<usize>,
}

/// A mapped log.
pub struct Log(pub Mapping);

impl Log {
    fn append(&self, size: usize, entry: &[u8]) -> Result<(), mojim::Error> {
        let p = self.0.ptr;
        assert!(FIRST + size + entry.len() <= self.0.len);
        // SAFETY: checked to be inside the mapping, which only this thread uses.
        let at = unsafe {
            let at = p.add(FIRST + size);
            std::ptr::copy_nonoverlapping(entry.as_ptr(), at, entry.len());
            p.cast::<u64>().write(((size + entry.len()) as u64).to_le());
            at
        };
        // Mojim, Figure 1: the entry and the size, both or neither.
        gmsync(&[(at, entry.len()), (p, 8)])?;
        Ok(())
    }

    /// Reads all of it and compares every byte with what must be there.
    pub fn check(&self) -> LogContents {
        // SAFETY: the mapping is readable; nobody stores to it meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(self.0.ptr, self.0.len) };
        check(bytes)
    }
}

fn check(bytes: &[u8]) -> LogContents {
    let size = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    let mut found = LogContents {
        entries: 0,
        size: 0,
        torn: None,
    };
    let Some(end) = usize::try_from(size)
        .ok()
        .filter(|s| *s <= bytes.len() - FIRST)
    else {
        found.torn = Some(0);
        return found;
    };
    while found.size < end {
        let want = entry(found.entries);
        let at = FIRST + found.size;
        let have = &bytes[at..(at + want.len()).min(FIRST + end)];
        if have != want {
            let same = have.iter().zip(&want).take_while(|(a, b)| a == b).count();
            found.torn = Some(at + same);
            return found;
        }
        found.entries += 1;
        found.size += want.len();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(n: u64) -> Vec<u8> {
        let mut b = vec![0; FIRST];
        for i in 0..n {
            b.extend(entry(i));
        }
        let size = (b.len() - FIRST) as u64;
        b[..8].copy_from_slice(&size.to_le_bytes());
        b.resize(b.len() + 5000, 0);
        b
    }

    #[test]
    fn a_whole_log_is_found_whole() {
        let b = log(100);
        let f = check(&b);
        assert_eq!((f.entries, f.torn), (100, None));
        assert_eq!(check(&[0; 64]).entries, 0);
    }

    #[test]
    fn every_kind_of_damage_is_seen() {
        let mut b = log(100);
        b[FIRST + 700] ^= 1;
        assert_eq!(check(&b).torn, Some(FIRST + 700));
        let mut b = log(100);
        b[0] ^= 1;
        assert!(check(&b).torn.is_some());
        let mut b = log(100);
        b[7] = 0xff;
        assert_eq!(check(&b).torn, Some(0));
    }
}
