//! `mojim clean`: what unclean ends have left in memory.

use std::path::PathBuf;

use mojim_format::shown::shown;
use mojim_linux::rings;

use crate::failure::{Done, Failure};
use crate::output;

/// List the memory of nodes and volumes that are gone, or remove it.
///
/// A ring outlives its program and its daemon, and is removed when the volume is closed in order. Where
/// instead a node's directory, or a volume's in it, was removed, its ring stays in /dev/shm. This looks
/// for such rings of the calling user. A directory on a file system that is not mounted looks as if it
/// were gone: mount it first. Exit code 1 if something is left.
#[derive(clap::Args)]
pub struct Clean {
    /// Where rings are: the nodes' `ring`.
    #[arg(long, value_name = "DIRECTORY", default_value = "/dev/shm")]
    ring: PathBuf,
    /// Remove it.
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
