//! Whether requests come over io_uring.
//!
//! Owns what is asked for, and the kernel's switch, which is the whole machine's: it counts for mounts that
//! are made later.

use std::fs;
use std::io;
use std::path::Path;

use mojim_env::{Error, Result};

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether the kernel's requests come over io_uring (FUSE_OVER_IO_URING, Linux 6.14): answers need fewer
/// wake-ups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Uring {
    /// If that is switched on.
    #[default]
    Auto,
    /// In any case: it is switched on for the machine, which root may, or the mount fails.
    On,
    /// Not.
    Off,
}

impl Uring {
    /// Takes a word of a command line.
    ///
    /// # Errors
    /// Another word.
    pub fn parse(word: &str) -> std::result::Result<Uring, String> {
        match word {
            "auto" => Ok(Uring::Auto),
            "on" => Ok(Uring::On),
            "off" => Ok(Uring::Off),
            _ => Err("auto, on or off".into()),
        }
    }

    /// Before the mount is made.
    ///
    /// # Errors
    /// It is to be on, and cannot be.
    pub(crate) fn prepare(self) -> Result<()> {
        match self {
            Uring::On => switch_on(Path::new(SWITCH)),
            Uring::Auto | Uring::Off => Ok(()),
        }
    }
}

fn switch_on(switch: &Path) -> Result<()> {
    let what = || format!("--uring on: {}", switch.display());
    // The kernel's module may be loaded by that.
    let _ = fs::File::open("/dev/fuse");
    let is_on = match fs::read_to_string(switch) {
        Ok(text) => text.trim() == "Y",
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let lacks = "this kernel has no FUSE over io_uring (Linux 6.14, CONFIG_FUSE_IO_URING)";
            return Err(Error::io(what(), &io::Error::other(lacks)));
        }
        Err(e) => return Err(Error::io(what(), &e)),
    };
    if is_on {
        return Ok(());
    }
    fs::write(switch, "Y").map_err(|e| {
        let e = format!(
            "{e}: root may switch it on (`options fuse enable_uring=1` in /etc/modprobe.d)"
        );
        Error::io(what(), &io::Error::other(e))
    })?;
    tracing::info!(
        "FUSE over io_uring is switched on for this machine: {}",
        switch.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_is_turned_where_it_is_and_its_lack_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let switch = dir.path().join("enable_uring");
        let said = switch_on(&switch).unwrap_err().to_string();
        assert!(said.contains("CONFIG_FUSE_IO_URING"), "{said}");
        fs::write(&switch, "N\n").unwrap();
        switch_on(&switch).unwrap();
        assert_eq!(fs::read_to_string(&switch).unwrap(), "Y");
        switch_on(&switch).unwrap();
        assert_eq!(Uring::parse("auto"), Ok(Uring::default()));
        assert!(Uring::parse("yes").is_err());
    }
}
