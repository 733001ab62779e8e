//! Flushing stores to persistent memory.
//!
//! Owns the choice of instruction, made once per process from what the processor says.
//!
//! Invariant: when [`flush_range`] returns, every store to the range that this thread made
//! before the call is flushed. That is: the store is in the persistence domain of a mapping made
//! with `MAP_SYNC`. Of other memory nothing is promised.

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
        // SAFETY: the caller's promise, passed on.
        unsafe { arch::flush(ptr as usize, len) }
    }
}

/// How [`flush_range`] flushes on this machine: `"clwb"`, `"clflushopt"`,
/// `"clflush"` or `"msync"`.
pub fn flush_kind() -> &'static str {
    arch::kind()
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::asm;
    use std::sync::OnceLock;

    #[derive(Clone, Copy)]
    enum Kind {
        Clwb,
        Clflushopt,
        Clflush,
    }

    struct Found {
        kind: Kind,
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
            let kind = if leaf7 & 1 << 24 != 0 {
                Kind::Clwb
            } else if leaf7 & 1 << 23 != 0 {
                Kind::Clflushopt
            } else {
                Kind::Clflush
            };
            // Leaf 1, bits 15 to 8: the line that clflush works on, in units of 8 bytes.
            let line = (leaf1 >> 8 & 0xff) as usize * 8;
            Found {
                kind,
                line: if line.is_power_of_two() { line } else { 64 },
            }
        })
    }

    pub(super) fn kind() -> &'static str {
        match found().kind {
            Kind::Clwb => "clwb",
            Kind::Clflushopt => "clflushopt",
            Kind::Clflush => "clflush",
        }
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
    /// The range is mapped and not empty.
    pub(super) unsafe fn flush(start: usize, len: usize) {
        let found = found();
        let range = (start, len, found.line);
        // SAFETY: the lines lie in mapped pages, since a line does not cross a
        // page; the instructions exist, by `found`, and change no byte that a
        // program can see. No `nomem`: the compiler must have made its stores.
        let fence = || unsafe { asm!("sfence", options(nostack, preserves_flags)) };
        match found.kind {
            Kind::Clwb => {
                // SAFETY: as above.
                let line = |at: usize| unsafe {
                    asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags));
                };
                in_order(range, line, fence);
            }
            Kind::Clflushopt => {
                // SAFETY: as above.
                let line = |at: usize| unsafe {
                    asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags));
                };
                in_order(range, line, fence);
            }
            Kind::Clflush => {
                // SAFETY: as above.
                let line = |at: usize| unsafe {
                    asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags));
                };
                in_order(range, line, fence);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    pub(super) fn kind() -> &'static str {
        "msync"
    }

    /// # Safety
    /// The range is mapped and not empty.
    pub(super) unsafe fn flush(start: usize, len: usize) {
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
        // Whole pages, since msync, where it is used, works on pages.
        let bytes: Vec<u8> = (0..3 * rustix::param::page_size())
            .map(|i| i as u8)
            .collect();
        for (start, len) in [(0, 0), (0, 1), (63, 2), (1, bytes.len() - 1)] {
            // SAFETY: the range lies in `bytes`.
            unsafe { flush_range(bytes[start..].as_ptr(), len) };
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
