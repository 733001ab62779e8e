//! What a mount allows: the options of mount(8) that FUSE has.
//!
//! Invariant: a file of the volume gives nobody rights, and is no device, unless that was asked for by
//! name. A writer to the volume, on any node, chooses modes and owners.

use fuser::MountOption;

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

/// Source and type of a volume's mount in the table of mounts. The type is `fuse.mojim`: mount(8) runs the
/// source of a mount whose type is bare `fuse` as a command, when it is asked to change that mount.
pub(crate) fn named(source: Option<&str>, volume: &str) -> [MountOption; 2] {
    // `fusermount3`, by which other users than root mount, takes what follows a comma for an option.
    let is_taken = |s: &&str| rustix::process::getuid().is_root() || !s.contains([',', '\\']);
    let source = source.filter(is_taken).map(str::to_owned);
    [
        MountOption::FSName(source.unwrap_or_else(|| format!("mojim:{volume}"))),
        // An option of the kernel: `MountOption::Subtype` is for `fusermount3` only, and a mount by root
        // would lack it.
        MountOption::CUSTOM("subtype=mojim".into()),
    ]
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

    /// The same for the system.
    pub(crate) fn options(self) -> Vec<MountOption> {
        let either = |is, one, other| if is { one } else { other };
        let mut all = vec![
            either(self.suid, MountOption::Suid, MountOption::NoSuid),
            either(self.dev, MountOption::Dev, MountOption::NoDev),
        ];
        all.extend(self.read_only.then_some(MountOption::RO));
        all.extend(self.noexec.then_some(MountOption::NoExec));
        all.extend(self.noatime.then_some(MountOption::NoAtime));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_given_where_they_are_asked_for() {
        let of = |words| Flags::parse(words).map(Flags::options);
        let none = vec![MountOption::NoSuid, MountOption::NoDev];
        assert_eq!(of(""), Ok(none.clone()));
        assert_eq!(of("suid,dev,rw,nosuid,nodev"), Ok(none));
        let all = vec![
            MountOption::Suid,
            MountOption::Dev,
            MountOption::RO,
            MountOption::NoExec,
            MountOption::NoAtime,
        ];
        assert_eq!(of("suid,dev,ro,noexec,noatime"), Ok(all));
        assert!(
            of("nosuid,allow_other")
                .unwrap_err()
                .contains("allow_other")
        );
    }
}
