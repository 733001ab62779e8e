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

/// All threads' stay on one processor; ends when it is dropped: all of the process may run where the
/// thread that tied them could.
#[derive(Debug)]
pub struct PinnedAll(rustix::thread::CpuSet);

impl Drop for PinnedAll {
    fn drop(&mut self) {
        let _ = allow(std::process::id(), &self.0);
    }
}

/// Ties all threads of this process to one processor, and with them those that they start.
pub fn pin_all(cpu: usize) -> io::Result<PinnedAll> {
    let before = PinnedAll(rustix::thread::sched_getaffinity(None)?);
    pin_process(std::process::id(), cpu)?;
    Ok(before)
}

/// Ties all threads of a process to one processor, and with them those that they start.
pub fn pin_process(id: u32, cpu: usize) -> io::Result<()> {
    allow(id, &one(cpu)?)
}

/// Has all threads of a process run on these processors.
fn allow(id: u32, set: &rustix::thread::CpuSet) -> io::Result<()> {
    for task in std::fs::read_dir(format!("/proc/{id}/task"))? {
        let task = task?.file_name();
        let task = task.to_str().and_then(|t| t.parse().ok());
        // Never `None`: that would be the calling thread.
        let Some(task) = task.and_then(rustix::process::Pid::from_raw) else {
            continue;
        };
        match rustix::thread::sched_setaffinity(Some(task), set) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// Threads that ran before, those that began meanwhile, and the calling one.
    #[test]
    fn a_process_is_tied_for_a_time() {
        if std::env::var_os("TIED_PROGRAM").is_none() {
            // In a process of its own: this one's other tests are not to be tied.
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["a_process_is_tied_for_a_time", "--test-threads=1"]);
            assert!(child.env("TIED_PROGRAM", "").status().unwrap().success());
            return;
        }
        let allowed = || rustix::thread::sched_getaffinity(None).unwrap();
        let before = allowed();
        let Some((cpu, _)) = placement() else {
            return; // one processor: nothing to see
        };
        let ask = || {
            let (ask, asked) = channel::<()>();
            let (answer, answered) = channel();
            std::thread::spawn(move || {
                while asked.recv().is_ok() {
                    answer
                        .send(rustix::thread::sched_getaffinity(None).unwrap())
                        .unwrap();
                }
            });
            move || {
                ask.send(()).unwrap();
                answered.recv().unwrap()
            }
        };
        let older = ask();
        assert!(older() == before);
        let tied = pin_all(cpu).unwrap();
        let younger = ask();
        let one = one(cpu).unwrap();
        assert!(older() == one && younger() == one && allowed() == one);
        drop(tied);
        assert!(older() == before && younger() == before && allowed() == before);
    }
}
