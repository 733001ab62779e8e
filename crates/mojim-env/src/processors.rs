//! On which processor a thread runs, and how it leaves that one.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processor of the calling thread, a moment ago. `None` if the system does not say.
#[inline]
pub fn processor() -> Option<usize> {
    // SAFETY: it takes nothing. (rustix asks the kernel's page; the C library reads a word of the
    // thread, a tenth of that.)
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Moves the calling thread off `processor`, if it may run on another one. It may come back:
/// the set of processors on which it may run stays as it was. (Who changes that thread's set
/// from outside at this very moment has to do so again.)
///
/// The system tells only those of a thread's processors that its control group has now. A
/// thread that may run on every one of these stays a thread that may run everywhere, so that it
/// gets what the group gets later.
pub fn leave(processor: usize) {
    let (Ok(before), Some(home)) = (sched_getaffinity(None), home()) else {
        return;
    };
    let mut others = before;
    if processor < CpuSet::MAX_CPU {
        others.unset(processor);
    }
    if others.count() == 0 {
        return;
    }
    let _ = sched_setaffinity(None, &others);
    if sched_setaffinity(None, &home).is_err() {
        // The group may have lost what it had a moment ago.
        let _ = sched_setaffinity(None, &everywhere());
    }
}

/// What to set for the calling thread, once it was kept to a part of its processors, so that it may
/// run where it may now; `None` if the system does not say.
pub fn home() -> Option<CpuSet> {
    let before = sched_getaffinity(None).ok()?;
    let everywhere = everywhere();
    let is_free = sched_setaffinity(None, &everywhere).is_ok()
        && sched_getaffinity(None).is_ok_and(|now| now == before);
    if is_free {
        return Some(everywhere);
    }
    let _ = sched_setaffinity(None, &before);
    Some(before)
}

fn everywhere() -> CpuSet {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|i| all.set(i));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_leaves_a_processor_and_may_come_back() {
        let all = sched_getaffinity(None).unwrap();
        let mut left = 0;
        for _ in 0..20 {
            let here = processor().unwrap();
            assert!(all.is_set(here));
            leave(here);
            left += u32::from(processor() != Some(here));
            assert_eq!(sched_getaffinity(None).unwrap(), all);
        }
        // It may have come back, but not each time.
        assert!(left > 0 || all.count() == 1);
        // Not where it runs, and nowhere.
        leave(CpuSet::MAX_CPU - 1);
        leave(usize::MAX);
        assert_eq!(sched_getaffinity(None).unwrap(), all);
        // It stays where it must.
        std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(processor().unwrap());
            sched_setaffinity(None, &one).unwrap();
            let here = processor().unwrap();
            leave(here);
            assert_eq!(processor(), Some(here));
            assert_eq!(sched_getaffinity(None).unwrap(), one);
        })
        .join()
        .unwrap();
    }
}
