//! The options of mount(8) that FUSE has: what a mount allows.
//!
//! Invariant: a file of the volume gives nobody rights, and is no device, unless that was asked for
//! by name. A writer to the volume, on any node, chooses modes and owners.

use rustix::mount::MountFlags;

/// What a mount allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags {
    /// Nothing can be changed.
    pub read_only: bool,
    /// Setuid and setgid bits and file capabilities count.
    pub suid: bool,
    /// Device files are devices.
    pub dev: bool,
    /// No program of it is executed.
    pub noexec: bool,
    /// Reading changes no access time.
    pub noatime: bool,
}

/// The source of a volume's mount in the table of mounts.
pub(crate) fn source(asked: Option<&str>, volume: &str) -> String {
    // `fusermount3`, by which other users than root mount, takes what follows a comma for an option.
    let is_taken = |s: &&str| rustix::process::getuid().is_root() || !s.contains([',', '\\']);
    let asked = asked.filter(is_taken).map(str::to_owned);
    asked.unwrap_or_else(|| format!("mojim:{volume}"))
}

impl Flags {
    /// Takes the options of mount(8), with commas between: the last of two that exclude each other counts.
    ///
    /// # Errors
    /// The first word that a mount of a volume does not have.
    pub fn parse(words: &str) -> Result<Flags, String> {
        let mut f = Flags::default();
        for word in words.split(',').filter(|w| !w.is_empty()) {
            f.take(word)?;
        }
        Ok(f)
    }

    /// Takes one word.
    ///
    /// # Errors
    /// A mount of a volume does not have it.
    pub fn take(&mut self, word: &str) -> Result<(), String> {
        match word {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "suid" => self.suid = true,
            "nosuid" => self.suid = false,
            "dev" => self.dev = true,
            "nodev" => self.dev = false,
            "noexec" => self.noexec = true,
            "exec" => self.noexec = false,
            "noatime" => self.noatime = true,
            "atime" | "relatime" => self.noatime = false,
            _ => {
                return Err(format!(
                    "{word:?} is no option of a volume's mount: these are ro, suid, dev, noexec, noatime, and rw, nosuid, nodev, exec, relatime, which hold without them"
                ));
            }
        }
        Ok(())
    }

    /// What the mount does not allow: for the helper, and for the system.
    fn bars(self) -> impl Iterator<Item = (&'static str, MountFlags)> {
        let all = [
            (!self.suid, "nosuid", MountFlags::NOSUID),
            (!self.dev, "nodev", MountFlags::NODEV),
            (self.read_only, "ro", MountFlags::RDONLY),
            (self.noexec, "noexec", MountFlags::NOEXEC),
            (self.noatime, "noatime", MountFlags::NOATIME),
        ];
        all.into_iter().filter(|b| b.0).map(|b| (b.1, b.2))
    }

    /// The same for mount(2).
    pub(crate) fn bits(self) -> MountFlags {
        self.bars().map(|b| b.1).collect()
    }

    /// The same for `fusermount3`, which bars set-ID bits and devices by itself.
    pub(crate) fn words(self) -> impl Iterator<Item = &'static str> {
        self.bars().map(|b| b.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_given_where_they_are_asked_for() {
        let of = |words| Flags::parse(words).map(|f| (f.words().collect(), f.bits()));
        let none = (
            vec!["nosuid", "nodev"],
            MountFlags::NOSUID | MountFlags::NODEV,
        );
        assert_eq!(of(""), Ok(none.clone()));
        assert_eq!(of("suid,dev,rw,nosuid,nodev"), Ok(none));
        let all = (
            vec!["ro", "noexec", "noatime"],
            MountFlags::RDONLY | MountFlags::NOEXEC | MountFlags::NOATIME,
        );
        assert_eq!(of("suid,dev,ro,noexec,noatime"), Ok(all));
        assert!(
            of("nosuid,allow_other")
                .unwrap_err()
                .contains("allow_other")
        );
    }
}
