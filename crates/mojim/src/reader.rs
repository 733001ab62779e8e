//! A volume as a node that follows shows it.

use std::path::Path;
use std::time::Duration;

use engine::Result;

/// A volume that this process reads, on the mirror or a backup (Mojim, Section 4.2). It sees whole
/// sync points only. Detached when dropped.
///
/// ```no_run
/// # use std::time::Duration;
/// let reader = mojim::Reader::attach("mojim.toml", "b", None)?;
/// let mut bytes = [0; 8];
/// reader.read("counter", 0, &mut bytes)?;
/// println!("{} as of LSN {}", u64::from_ne_bytes(bytes), reader.shown());
/// reader.wait(reader.shown() + 1, Duration::from_secs(60))?;
/// # Ok::<(), mojim::Error>(())
/// ```
pub struct Reader(engine::Reader);

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reader({})", self.0.name())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // It holds nothing that could be lost.
        let _ = self.0.detach();
    }
}

impl Reader {
    /// Attaches this process to what node `node` shows of a volume. Its daemon must run, on this
    /// host.
    ///
    /// # Errors
    /// [`Error::Answered`](crate::Error::Answered) if the node is the volume's primary, or has
    /// nothing to show within 5 s; [`Error::Unsupported`](crate::Error::Unsupported) before Linux
    /// 6.6; `Io` if the daemon cannot be reached.
    pub fn attach(config: impl AsRef<Path>, node: &str, volume: Option<&str>) -> Result<Reader> {
        engine::Reader::attach(config.as_ref(), node, volume).map(Reader)
    }

    /// The LSN that is shown: every sync point up to it, and nothing of a later one.
    pub fn shown(&self) -> u64 {
        self.0.shown()
    }

    /// Waits until everything up to `lsn` is shown.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) after `timeout`.
    pub fn wait(&self, lsn: u64, timeout: Duration) -> Result<()> {
        self.0.wait(lsn, timeout)
    }

    /// Size of a file in bytes, if it is there.
    pub fn size(&self, file: &str) -> Result<Option<u64>> {
        self.0.size(file)
    }

    /// Reads bytes of a file from `offset` on, each 64 KiB of them as of one LSN, which is shown when
    /// the call returns. Returns how many were read: fewer than asked for at the file's end.
    pub fn read(&self, file: &str, offset: u64, bytes: &mut [u8]) -> Result<usize> {
        self.0.read(file, offset, bytes)
    }
}
