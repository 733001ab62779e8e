//! Where acknowledgements go, so that they outlive the process that gives them.
//!
//! Owns the form of an acknowledgement: a line `ack N`, or a sector on a device or in a
//! file. Each sector is written over the last one, and is on the medium when the call
//! returns.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// Size of an acknowledgement on a device, in bytes.
pub const SECTOR: usize = 512;
const MAGIC: [u8; 8] = *b"MJCRASH1";

/// Aligned as O_DIRECT requires.
#[repr(align(4096))]
struct Aligned([u8; SECTOR]);

/// The place to which acknowledgements go.
pub enum Acks {
    /// Lines on standard output.
    Lines,
    /// A sector at an offset.
    Sector(File, u64),
}

impl Acks {
    /// `stdout`, or `PATH@OFFSET` with an offset that is a multiple of 512.
    pub fn open(text: &str) -> io::Result<Acks> {
        if text == "stdout" {
            return Ok(Acks::Lines);
        }
        let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "stdout or PATH@OFFSET");
        let (path, offset) = text.rsplit_once('@').ok_or_else(wrong)?;
        let offset = offset.parse().map_err(|_| wrong())?;
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_DIRECT | libc::O_DSYNC)
            .open(path)?;
        Ok(Acks::Sector(file, offset))
    }

    /// Acknowledges step `step`, and with it all steps before.
    pub fn put(&self, step: u64) -> io::Result<()> {
        match self {
            Acks::Lines => {
                let mut out = io::stdout().lock();
                writeln!(out, "ack {step}")?;
                out.flush()
            }
            Acks::Sector(file, offset) => {
                let mut sector = Aligned([0; SECTOR]);
                sector.0[..8].copy_from_slice(&MAGIC);
                sector.0[8..16].copy_from_slice(&step.to_le_bytes());
                file.write_all_at(&sector.0, *offset)
            }
        }
    }
}

/// The step that a line acknowledges.
pub fn of_line(line: &str) -> Option<u64> {
    line.trim().strip_prefix("ack ")?.parse().ok()
}

/// The step that a sector acknowledges.
pub fn of_sector(sector: &[u8]) -> Option<u64> {
    let rest = sector.strip_prefix(&MAGIC)?;
    Some(u64::from_le_bytes(rest.get(..8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read_as_written() {
        assert_eq!(of_line("ack 17\n"), Some(17));
        assert_eq!(of_line("ack"), None);
        let path = std::env::temp_dir().join(format!("mojim-acks-{}", std::process::id()));
        std::fs::write(&path, [0; 8192]).unwrap();
        // tmpfs of older kernels has no O_DIRECT.
        if let Ok(acks) = Acks::open(&format!("{}@4096", path.display())) {
            acks.put(9).unwrap();
            acks.put(10).unwrap();
            let all = std::fs::read(&path).unwrap();
            assert_eq!(of_sector(&all[..SECTOR]), None);
            assert_eq!(of_sector(&all[4096..4096 + SECTOR]), Some(10));
        }
        std::fs::remove_file(&path).unwrap();
        assert!(Acks::open("nothing").is_err());
    }
}
