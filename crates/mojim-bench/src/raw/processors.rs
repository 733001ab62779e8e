//! On which processor the calling thread, or another process, runs.

use std::io;
use std::marker::PhantomData;

/// Two processors that this thread may run on, for the client and for its peers; `None` if there
/// is only one.
pub fn placement() -> Option<(usize, usize)> {
    let set = rustix::thread::sched_getaffinity(None).ok()?;
    let mut cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    Some((cpus.next()?, cpus.next()?))
}

/// The calling thread's stay on one processor; ends when it is dropped (in the same thread).
#[derive(Debug)]
pub struct Pinned {
    before: rustix::thread::CpuSet,
    // Not `Send`: the drop is about the thread that pinned.
    _thread: PhantomData<*const ()>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = rustix::thread::sched_setaffinity(None, &self.before);
    }
}

/// Ties the calling thread to one processor. Threads and processes that it starts afterwards
/// inherit that, so start those first.
pub fn pin_thread(cpu: usize) -> io::Result<Pinned> {
    let before = rustix::thread::sched_getaffinity(None)?;
    rustix::thread::sched_setaffinity(None, &one(cpu)?)?;
    Ok(Pinned {
        before,
        _thread: PhantomData,
    })
}

/// Ties all threads of another process to one processor, and with them those that they start.
pub fn pin_process(id: u32, cpu: usize) -> io::Result<()> {
    let set = one(cpu)?;
    for task in std::fs::read_dir(format!("/proc/{id}/task"))? {
        let task = task?.file_name();
        let task = task.to_str().and_then(|t| t.parse().ok());
        // Never `None`: that would be the calling thread.
        let Some(task) = task.and_then(rustix::process::Pid::from_raw) else {
            continue;
        };
        match rustix::thread::sched_setaffinity(Some(task), &set) {
            // The thread ended meanwhile.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// The set of one processor.
fn one(cpu: usize) -> io::Result<rustix::thread::CpuSet> {
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "no such processor",
        ));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(set)
}
