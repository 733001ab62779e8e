//! How calls get the room for what they write and make.
//!
//! Owns what is asked for each, and how long a call waits before it is refused.
//!
//! Invariants:
//! - Nothing is asked for removals, cuts, attributes and renames, nor for bytes that take the
//!   place of others in the data file: the reserve of the store is theirs.
//! - Nobody holds a lock of the mount while it waits for what is begun to be applied. The threads that
//!   serve the kernel do not wait for it, nor apply it.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::io::Errno;

use crate::at_once::may_pause;
use crate::fs::{Fs, Result};
use crate::overlay::BLOCK;
use crate::room::Need;
use crate::tree::Tree;

/// Bytes that a name takes beside those of its path and itself, about: in the file of names, the
/// catalogue, the directory, and for the node.
const NAME: u64 = 1024;
/// How often a call that finds too little looks again, while what is begun is applied.
const LOOKS: u32 = 10;
/// How long a mirror that is linked may be silent before it counts as one with room.
const MOST_SILENT: Duration = Duration::from_secs(3);
/// Between two looks whether it has told its room.
const SHORT: Duration = Duration::from_millis(5);
/// Between two looks, where it is the mirror that applies.
const PAUSE: Duration = Duration::from_millis(50);

impl Fs {
    /// What is applied on both nodes is counted no more. What a mirror lacks that is away counts
    /// again when that is back.
    pub(crate) fn forget_room(&self) {
        let applied = self
            .room
            .everywhere(self.volume.rooms().map(|(lsn, _)| lsn));
        self.room.applied(applied);
    }

    /// What programs can still be given.
    pub(crate) fn left(&self) -> Need {
        self.room.left(self.volume.rooms())
    }

    /// Takes room for `blocks` more of a file. Not under any lock of the mount for long.
    pub(crate) fn take_blocks(&self, blocks: usize) -> Result<()> {
        let need = self.room.of_blocks(blocks as u64);
        self.room.take(need, || self.volume.rooms())
    }

    /// Waits until a mirror that is linked for the first time has told its room: not long, and not
    /// under a lock of the mount, nor in a thread that serves.
    pub(crate) fn await_mirror(&self) -> Result<()> {
        let told = &self.room.told;
        if told.load(SeqCst) {
            return Ok(());
        }
        for _ in 0..MOST_SILENT.as_millis() / SHORT.as_millis() {
            match self.volume.mirror_told() {
                None => return Ok(()),
                Some(true) => break,
                Some(false) => may_pause().map(|()| std::thread::sleep(SHORT))?,
            }
        }
        told.store(true, SeqCst);
        Ok(())
    }

    /// Too little was found for the `look`th time: has what is begun applied, which may free some.
    /// False if it is of no use to look again. The caller holds no lock of the mount.
    pub(crate) fn look_again(&self, look: &mut u32) -> Result<bool> {
        self.forget_room();
        let applied = self.volume.rooms().map(|(lsn, _)| lsn).min();
        if *look >= LOOKS {
            self.room.looked_in_vain();
        }
        let is_vain = self.room.was_vain_within(LOOKS * PAUSE);
        if is_vain || !applied.is_some_and(|lsn| self.room.waits(lsn)) {
            return Ok(false);
        }
        may_pause()?;
        self.volume.apply_begun();
        if *look > 0 {
            std::thread::sleep(PAUSE);
        }
        *look += 1;
        Ok(true)
    }

    /// Takes room for a name, and what comes with it: so many bytes, and `files` that the disk
    /// makes for it, beside the directories in which no file lies yet.
    pub(crate) fn take_name(
        &self,
        parent: u64,
        name: &[u8],
        bytes: usize,
        files: u64,
    ) -> Result<Need> {
        let (path, dirs) = {
            let state = self.state();
            let path = state
                .tree
                .node(parent)
                .map_or(0, |n| state.tree.path(n).len())
                + 1
                + name.len();
            (path as u64, new_dirs(&state.tree, parent))
        };
        let dirs = if files > 0 { dirs } else { 0 };
        let need = Need {
            // The catalogue is there twice while it is replaced.
            bytes: NAME + 2 * path + 3 * name.len() as u64 + bytes as u64 + dirs * BLOCK,
            files: files + dirs,
        };
        self.await_mirror()?;
        let mut look = 0;
        loop {
            match self.room.take(need, || self.volume.rooms()) {
                Err(Errno::NOSPC) if self.look_again(&mut look)? => {}
                taken => return taken.map(|()| need),
            }
        }
    }
}

/// Directories that the disk makes with the first file in `dir`.
fn new_dirs(tree: &Tree, dir: u64) -> u64 {
    let mut dirs = 0;
    let mut at = dir;
    // The root is there. A directory without a name is nobody's parent.
    while let Ok(node) = tree.node(at)
        && !node.names.is_empty()
        && node.children.len() <= usize::from(dirs > 0)
    {
        dirs += 1;
        at = tree.parent(at);
    }
    dirs
}
