//! Flushing stores to persistent memory.
//!
//! Owns the instructions, and the choice of one, made once per process from what the processor says.
//!
//! Invariant: when [`flush_range`] returns, every store to the range that this thread made
//! before the call is flushed. That is: the store is in the persistence domain of a mapping made
//! with `MAP_SYNC`. Of other memory nothing is promised.

/// How stores are flushed (slides, "NVMM Data Persistence").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlushMode {
    /// `clflush`: one line after the other, each leaves the cache.
    Clflush,
    /// `clflushopt`: lines side by side, each leaves the cache.
    Clflushopt,
    /// `clwb`: lines side by side, and they may stay in the cache.
    Clwb,
    /// WOF, "write on flush": each line is read, then written again past the cache.
    Wof,
}

impl FlushMode {
    /// All of them.
    pub const ALL: [FlushMode; 4] = [
        FlushMode::Clflush,
        FlushMode::Clflushopt,
        FlushMode::Clwb,
        FlushMode::Wof,
    ];

    /// The name, as in the slides.
    pub fn name(self) -> &'static str {
        match self {
            FlushMode::Clflush => "clflush",
            FlushMode::Clflushopt => "clflushopt",
            FlushMode::Clwb => "clwb",
            FlushMode::Wof => "WOF",
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        arch::has(self)
    }
}

/// Makes the stores to `len` bytes at `ptr` durable: writes back every cache
/// line that they touch, then fences. Where there is no such instruction for
/// user space, `msync`.
///
/// # Safety
/// The range is mapped.
///
/// # Panics
/// Where `msync` is used and fails: the caller has no way to go on as if the
/// stores were durable.
pub unsafe fn flush_range(ptr: *const u8, len: usize) {
    if len > 0 {
        // SAFETY: the caller's promise, passed on. The mode is never WOF.
        unsafe { arch::flush(arch::best(), ptr as usize, len) }
    }
}

/// As [`flush_range`], in this mode.
///
/// # Safety
/// The range is mapped. With [`FlushMode::Wof`] it is writable, and nobody else stores to the cache
/// lines that it touches.
///
/// # Panics
/// If the processor does not have the mode.
pub unsafe fn flush_range_by(mode: FlushMode, ptr: *const u8, len: usize) {
    assert!(mode.is_available(), "this processor has no {}", mode.name());
    if len > 0 {
        // SAFETY: the caller's promise, passed on.
        unsafe { arch::flush(Some(mode), ptr as usize, len) }
    }
}

/// How [`flush_range`] flushes on this machine: `"clwb"`, `"clflushopt"`,
/// `"clflush"` or `"msync"`.
pub fn flush_kind() -> &'static str {
    arch::best().map_or("msync", FlushMode::name)
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::asm;
    use std::sync::OnceLock;

    use super::FlushMode;

    struct Found {
        clwb: bool,
        clflushopt: bool,
        line: usize,
    }

    static FOUND: OnceLock<Found> = OnceLock::new();

    fn found() -> &'static Found {
        FOUND.get_or_init(|| {
            // Safe to call in newer compilers, unsafe in older ones.
            #[allow(unused_unsafe)]
            // SAFETY: every x86_64 processor has cpuid with leaves 0 and 1,
            // and leaf 7 is asked only if leaf 0 says that there is one.
            let (leaf1, leaf7) = unsafe {
                use std::arch::x86_64::{__cpuid, __cpuid_count};
                let most = __cpuid(0).eax;
                (
                    __cpuid(1).ebx,
                    if most >= 7 {
                        __cpuid_count(7, 0).ebx
                    } else {
                        0
                    },
                )
            };
            // Leaf 1, bits 15 to 8: the line that clflush works on, in units of 8 bytes.
            let line = (leaf1 >> 8 & 0xff) as usize * 8;
            Found {
                clwb: leaf7 & 1 << 24 != 0,
                clflushopt: leaf7 & 1 << 23 != 0,
                line: if line.is_power_of_two() { line } else { 64 },
            }
        })
    }

    pub(super) fn has(mode: FlushMode) -> bool {
        match mode {
            FlushMode::Clflush | FlushMode::Wof => true,
            FlushMode::Clflushopt => found().clflushopt,
            FlushMode::Clwb => found().clwb,
        }
    }

    pub(super) fn best() -> Option<FlushMode> {
        let best = [FlushMode::Clwb, FlushMode::Clflushopt];
        let best = best.into_iter().find(|mode| has(*mode));
        Some(best.unwrap_or(FlushMode::Clflush))
    }

    /// What is done and in which order: each line that the range touches is
    /// written back, then comes the fence.
    #[inline(always)]
    pub(super) fn in_order(
        (start, len, line): (usize, usize, usize),
        mut write_back: impl FnMut(usize),
        fence: impl FnOnce(),
    ) {
        for at in (start & !(line - 1)..start + len).step_by(line) {
            write_back(at);
        }
        fence();
    }

    /// # Safety
    /// The range is mapped and not empty; the mode is there. For WOF: writable, and nobody else
    /// stores to its lines.
    pub(super) unsafe fn flush(mode: Option<FlushMode>, start: usize, len: usize) {
        let mode = mode.expect("there is a mode on x86-64");
        let line = found().line;
        let range = (start, len, line);
        // SAFETY: the lines lie in mapped pages, since a line does not cross a
        // page; the instructions exist, by the caller, and change no byte that a
        // program can see. No `nomem`: the compiler must have made its stores.
        let fence = || unsafe { asm!("sfence", options(nostack, preserves_flags)) };
        match mode {
            FlushMode::Clwb => {
                // SAFETY: as above.
                let line = |at: usize| unsafe {
                    asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags));
                };
                in_order(range, line, fence);
            }
            FlushMode::Clflushopt => {
                // SAFETY: as above.
                let line = |at: usize| unsafe {
                    asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags));
                };
                in_order(range, line, fence);
            }
            FlushMode::Clflush => {
                // SAFETY: as above.
                let line = |at: usize| unsafe {
                    asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags));
                };
                in_order(range, line, fence);
            }
            FlushMode::Wof => {
                let word = |at: usize| {
                    // SAFETY: the word lies in a line of the range, which is mapped and writable.
                    // It gets the value that it has, and nobody else stores to it.
                    unsafe {
                        asm!(
                            "mov {v}, [{at}]",
                            "movnti [{at}], {v}",
                            at = in(reg) at,
                            v = out(reg) _,
                            options(nostack, preserves_flags),
                        );
                    }
                };
                in_order(range, |at| (at..at + line).step_by(8).for_each(word), fence);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use super::FlushMode;

    pub(super) fn has(_: FlushMode) -> bool {
        false
    }

    pub(super) fn best() -> Option<FlushMode> {
        None
    }

    /// # Safety
    /// The range is mapped and not empty.
    pub(super) unsafe fn flush(_: Option<FlushMode>, start: usize, len: usize) {
        let page = rustix::param::page_size();
        let first = start & !(page - 1);
        // SAFETY: msync changes no memory; the range is mapped, and so are the
        // whole pages around it.
        let done = rustix::io::retry_on_intr(|| unsafe {
            rustix::mm::msync(
                first as *mut _,
                start + len - first,
                rustix::mm::MsyncFlags::SYNC,
            )
        });
        if let Err(e) = done {
            panic!("msync of {len} bytes of persistent memory failed: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushing_changes_nothing() {
        // Whole pages, since msync, where it is used, works on pages. WOF writes whole lines.
        let page = rustix::param::page_size();
        let mut all = vec![0_u8; 4 * page];
        let first = all.as_ptr().align_offset(page);
        let bytes = &mut all[first..first + 3 * page];
        (0..)
            .zip(&mut *bytes)
            .for_each(|(i, b): (usize, _)| *b = i as u8);
        for (start, len) in [(0, 0), (0, 1), (63, 2), (1, bytes.len() - 1)] {
            let at = bytes[start..].as_mut_ptr();
            // SAFETY: the range lies in `bytes`.
            unsafe { flush_range(at, len) };
            for mode in FlushMode::ALL.into_iter().filter(|m| m.is_available()) {
                // SAFETY: so do its lines, which only this thread has.
                unsafe { flush_range_by(mode, at, len) };
            }
        }
        assert!(bytes.iter().enumerate().all(|(i, b)| *b == i as u8));
        assert!(["clwb", "clflushopt", "clflush", "msync"].contains(&flush_kind()));
    }

    /// The simulator relies on this order.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_line_of_a_range_is_written_back_before_the_fence() {
        for line in [32, 64, 128] {
            for start in 4096..4096 + 2 * line {
                for len in 1..3 * line {
                    let mut lines = Vec::new();
                    let mut fenced = None;
                    let done = std::cell::Cell::new(0);
                    arch::in_order(
                        (start, len, line),
                        |at| {
                            lines.push(at);
                            done.set(done.get() + 1);
                        },
                        || fenced = Some(done.get()),
                    );
                    let want: Vec<_> = (start / line..=(start + len - 1) / line)
                        .map(|n| n * line)
                        .collect();
                    assert_eq!(lines, want, "{start}+{len} by {line}");
                    assert_eq!(fenced, Some(want.len()));
                }
            }
        }
    }
}
