//! The cost that an allocation adds to a commit over shared memory.
//!
//! A transaction that allocates a block and fills it runs beside one that fills a block that is
//! there.

use std::ffi::{CString, c_void};
use std::io;

use super::allocator::Mojim;
use crate::cluster::{NodeProcess, config_text};
use crate::measure::{Plan, Subject, paired, prepared};
use crate::raw::{pin_process, pin_thread, placement};
use crate::scratch::Scratch;

/// Bytes of each block, all of which are stored to.
pub const BYTES: usize = 64;
/// Blocks that are there.
const BLOCKS: usize = 1024;

const WITH: &str = "malloc and store";
const ALONE: &str = "store";

/// A heap and what is done in it.
struct Work {
    m: Mojim,
    heap: *mut c_void,
    there: Vec<*mut c_void>,
    next: usize,
}

impl Work {
    fn transaction(&self, f: impl FnOnce() -> io::Result<*mut c_void>) -> io::Result<*mut c_void> {
        // SAFETY: calls without pointers.
        self.m.check(unsafe { (self.m.begin)() }, -1)?;
        let p = f()?;
        // SAFETY: a block of the transaction's, of so many bytes.
        unsafe { p.cast::<u8>().write_bytes(self.next as u8, BYTES) };
        // SAFETY: as above.
        self.m.check(unsafe { (self.m.commit)() }, -1)?;
        Ok(p)
    }

    fn with(&self) -> io::Result<*mut c_void> {
        // SAFETY: an open heap.
        let malloc = || unsafe { (self.m.malloc)(self.heap, BYTES) };
        self.transaction(|| self.m.check(malloc(), std::ptr::null_mut()))
    }

    fn alone(&self) -> io::Result<*mut c_void> {
        let p = self.there[self.next % BLOCKS];
        // SAFETY: a block of the heap.
        let add = || unsafe { (self.m.add)(p, BYTES) };
        self.transaction(|| self.m.check(add(), -1).map(|_| p))
    }

    fn advance(&mut self) -> io::Result<()> {
        self.next += 613;
        Ok(())
    }
}

/// Runs it. Of each of both: its name, the median in nanoseconds, and how many times as long as the store
/// alone it took.
pub fn run(rounds: usize, m: Mojim) -> io::Result<Vec<(&'static str, f64, Option<f64>)>> {
    let shm = Scratch::new_in(std::path::Path::new("/dev/shm"))?;
    let volumes = [("c", "sync", "shm")];
    let text = config_text(shm.path(), shm.path(), &volumes, Some(1))?;
    let file = shm.path().join("bench.toml");
    std::fs::write(&file, text)?;
    let mirror = NodeProcess::start(&file, "b")?;
    let path = CString::new(file.to_str().ok_or(io::ErrorKind::InvalidInput)?)?;
    // SAFETY: C strings; then an attached volume.
    let (volume, heap) = unsafe {
        let volume = (m.attach)(path.as_ptr(), c"a".as_ptr(), std::ptr::null());
        m.check(volume, std::ptr::null_mut())?;
        let heap = (m.open)(volume, c"commits".as_ptr(), 0, std::ptr::null_mut(), 0);
        (volume, m.check(heap, std::ptr::null_mut())?)
    };
    let cpus = placement();
    if let Some((_, peer)) = cpus {
        pin_process(mirror.id(), peer)?;
    }
    let pinned = cpus.map(|(client, _)| pin_thread(client)).transpose()?;
    let work = || -> io::Result<Work> {
        let mut work = Work {
            m,
            heap,
            there: Vec::new(),
            next: 0,
        };
        work.there = (0..BLOCKS)
            .map(|_| work.with())
            .collect::<io::Result<_>>()?;
        Ok(work)
    };
    let mut subjects: [Box<dyn Subject>; 2] = [
        Box::new(prepared(WITH, work()?, Work::advance, |w: &mut Work| {
            w.with().map(drop)
        })),
        Box::new(prepared(ALONE, work()?, Work::advance, |w: &mut Work| {
            w.alone().map(drop)
        })),
    ];
    let mut refs: Vec<&mut dyn Subject> = subjects.iter_mut().map(|s| &mut **s as _).collect();
    let plan = Plan {
        rounds: rounds.max(3),
        ops: 200,
        ..Plan::default()
    };
    let done = paired(&mut refs, plan)?;
    drop(pinned);
    // SAFETY: no call uses the handle any more.
    m.check(unsafe { (m.detach)(volume) }, -1)?;
    let of = |name| {
        let median = done.summary(name).map_or(0.0, |s| s.median_us * 1e3);
        let to = (name != ALONE).then(|| done.ratio(name, ALONE)).flatten();
        (name, median, to.map(|r| r.ratio))
    };
    Ok(vec![of(WITH), of(ALONE)])
}
