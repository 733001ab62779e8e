//! `mojim clean`: what unclean ends have left in memory.

use std::path::PathBuf;

use mojim_format::shown::shown;
use mojim_linux::rings;

use crate::failure::{Done, Failure};
use crate::output;

/// List the rings and logs in memory of volumes that are gone, or remove them.
///
/// A ring keeps the last records of a log in shared memory. It outlives the program and the
/// daemon. A clean end of the volume removes it.
///
/// If you remove the directory of a node or of a volume first, the ring stays. This command finds
/// such rings of your user.
///
/// Mount all file systems of nodes first. A directory on a file system that is not mounted looks
/// as if it were gone.
///
/// Exit code 1: some are left.
#[derive(clap::Args)]
pub struct Clean {
    /// The directory of the rings: `ring` of the nodes' configuration.
    #[arg(long, value_name = "DIRECTORY", default_value = "/dev/shm")]
    ring: PathBuf,
    /// Remove them. Without this option they are only listed.
    #[arg(long)]
    remove: bool,
}

impl Clean {
    /// Runs it.
    pub fn run(self) -> Done {
        let left = rings::left_in(&self.ring).map_err(|e| Failure::failed(e.to_string()))?;
        for l in &left {
            let (path, of) = (l.path.display(), l.of.display());
            let done = match self.remove {
                true => {
                    l.remove().map_err(|e| Failure::failed(e.to_string()))?;
                    "removed"
                }
                false => "left",
            };
            let line = format!("{done}: {path}, {} bytes, of {of}, which is gone", l.bytes);
            // Other users name what lies in a directory of theirs.
            output::text(&format!("{}\n", shown(&line)))?;
        }
        Ok(u8::from(!left.is_empty() && !self.remove))
    }
}
