//! The room that a copy has, leaves free, and keeps (`room.rs`).

use std::sync::atomic::Ordering::Relaxed;

use super::state::Store;
use crate::room;
use mojim_env::Space;

impl Store {
    /// What the file system of the data files has free. What it does not tell counts as
    /// unbounded.
    pub fn space(&self) -> Space {
        let space = self.env.space(&self.spec.dir);
        space.unwrap_or(Space::UNBOUNDED)
    }

    /// See [`room::reserve`].
    pub fn reserve(&self) -> u64 {
        room::reserve(&*self.env, &self.spec.meta)
    }

    /// See [`room::release`].
    pub(super) fn release_reserve(&self) -> bool {
        room::release(&*self.env, &self.spec.meta)
    }

    /// Keeps room on the disk.
    pub(super) fn keep_reserve(&self) {
        let each = room::to_keep(&*self.env, &self.spec.meta);
        let kept = &self.reserved;
        if kept.load(Relaxed) < each
            && room::keep(&*self.env, &self.spec.dir, &self.spec.meta, each)
        {
            kept.store(each, Relaxed);
        }
    }

    /// Something was applied with room that was kept, or found none: what is left of it, or was
    /// freed by that, is kept at once, before others take it.
    pub(super) fn keep_again(&self) {
        self.reserved.store(0, Relaxed);
        self.keep_reserve();
    }
}
