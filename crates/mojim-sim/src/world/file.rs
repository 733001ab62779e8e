//! One handle on a file of a simulated disk.
//!
//! Owns the argument checks of a kernel, and the faults of reads, writes and syncs. The
//! disk owns what is cached and what is durable.

use super::state::{CrashKind, HandleOwner, crashed};
use crate::ctx::Ctx;
use crate::disk::{SECTOR, eio};
use mojim_env::{File, OpenHow};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::PathBuf;

/// One handle on a file.
pub(super) struct SimFile {
    pub(super) place: HandleOwner,
    pub(super) path: PathBuf,
    pub(super) ino: u64,
    pub(super) how: OpenHow,
}

impl SimFile {
    fn aligned(&self, buf: *const u8, len: usize, offset: u64) -> bool {
        !self.how.durable
            || ((buf as usize).is_multiple_of(SECTOR)
                && len.is_multiple_of(SECTOR)
                && offset.is_multiple_of(SECTOR as u64))
    }

    fn text(&self, what: &str, offset: u64, len: u64) -> String {
        let durable = if self.how.durable { " durable" } else { "" };
        format!("{what} {} {offset}+{len}{durable}", self.path.display())
    }

    fn writable(&self) -> io::Result<()> {
        match self.how.write {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(9)),
        }
    }
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let st = &mut *self.place.enter()?;
        if !self.aligned(buf.as_ptr(), buf.len(), offset) {
            return Err(io::Error::from_raw_os_error(22));
        }
        let (node, ctx) = (&mut st.nodes[self.place.node], &mut st.ctx);
        if ctx.failure(ctx.faults.read_error, "read errors", &node.name) {
            return Err(eio());
        }
        Ok(node.disk.read(self.ino, buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        assert!(
            self.aligned(buf.as_ptr(), buf.len(), offset),
            "durable write to {} of {:p}, {offset}+{}: not whole sectors",
            self.path.display(),
            buf.as_ptr(),
            buf.len()
        );
        let st = &mut *self.place.enter()?;
        self.writable()?;
        let (n, durable) = (self.place.node, self.how.durable);
        let crash = st.step(n, || self.text("write", offset, buf.len() as u64));
        let (node, ctx) = (&mut st.nodes[n], &mut st.ctx);
        let disk = &mut node.disk;
        if let Some(kind) = crash {
            let power = kind == CrashKind::Power;
            disk.write_torn(self.ino, buf, offset, durable, power, ctx);
            st.crash(n, kind);
            return Err(crashed());
        }
        if ctx.failure(ctx.faults.write_error, "write errors", &node.name) {
            disk.write_torn(self.ino, buf, offset, durable, true, ctx);
            return Err(eio());
        }
        disk.write(self.ino, buf, offset, durable, ctx)
    }

    fn sync(&self) -> io::Result<()> {
        self.place.enter()?.change(
            self.place.node,
            || format!("sync {}", self.path.display()),
            |disk, ctx, node| {
                if ctx.failure(ctx.faults.sync_error, "sync errors", node) {
                    disk.sync_failed(self.ino, &mut ctx.rng);
                    return Err(eio());
                }
                disk.sync(self.ino);
                Ok(())
            },
        )
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut st = self.place.enter()?;
        self.writable()?;
        st.change(
            self.place.node,
            || self.text("set length", 0, len),
            |disk, ctx, _| no_space(disk.set_len(self.ino, len), ctx),
        )
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.place.enter()?.nodes[self.place.node]
            .disk
            .len(self.ino))
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let mut st = self.place.enter()?;
        self.writable()?;
        st.change(
            self.place.node,
            || self.text("allocate", 0, len),
            |disk, ctx, _| no_space(disk.allocate(self.ino, len), ctx),
        )
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let mut st = self.place.enter()?;
        Ok(st.nodes[self.place.node].disk.next_data(self.ino, offset))
    }
}

fn no_space(result: io::Result<()>, ctx: &mut Ctx) -> io::Result<()> {
    if let Err(error) = &result
        && error.kind() == ErrorKind::StorageFull
    {
        ctx.hit("no space");
    }
    result
}

impl Drop for SimFile {
    fn drop(&mut self) {
        if let Ok(mut st) = self.place.enter() {
            st.nodes[self.place.node].disk.close(self.ino);
        }
    }
}
