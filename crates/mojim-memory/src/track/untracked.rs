//! No tracking: every page of which the mapping has a copy of its own counts as written, always.
//!
//! For private mappings whose program commits exact ranges, so that what was written is hardly ever
//! asked for. A first store to a page then costs what it does in any private mapping.
//!
//! Invariant: a page without a copy of its own shows the file. So what is not reported is what is
//! committed and applied.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use super::process::Process;
use super::tracker::{Tracker, check_range, push};
use super::uffd::{look, pagemap};

struct Untracked {
    base: usize,
    len: usize,
    process: Process,
    /// None where it cannot be opened: then all pages count as written.
    pagemap: Option<RawFd>,
}

pub(super) fn attach(base: usize, len: usize) -> io::Result<Box<dyn Tracker>> {
    let process = Process::current()?;
    Ok(Box::new(Untracked {
        base,
        len,
        process,
        pagemap: pagemap(process).ok(),
    }))
}

impl Tracker for Untracked {
    fn collect(
        &self,
        start: usize,
        end: usize,
        _rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        check_range(start, end, self.len)?;
        self.process.check()?;
        let from = out.len();
        let looked = self.pagemap.map(|fd| {
            let copied = |pages, _| push(out, from, pages);
            look(fd, self.base, &(start..end), 0, copied)
        });
        if !matches!(looked, Some(Ok(()))) {
            out.truncate(from);
            push(out, from, start..end);
        }
        Ok(())
    }

    fn mark(&self, _start: usize, _end: usize) {}

    fn kind(&self) -> &'static str {
        "untracked"
    }
}
