//! userfaultfd: the kernel's structures and numbers, and its calls.
//!
//! Source: Linux `Documentation/admin-guide/mm/userfaultfd.rst` and
//! `linux/userfaultfd.h`. The installed headers may be older than the kernel.
//!
//! Owns what both `track` (which pages were written) and `reader` of `mojim` (which
//! pages are shown) need.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use mojim_env::descriptors;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};
use rustix::mm::UserfaultfdFlags;

const UFFD_USER_MODE_ONLY: u32 = 1;
const UFFD_API: u64 = 0xAA;
/// Faults on pages that the shared memory does not have are reported.
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// Faults on pages that the shared memory has, but this mapping has not, are
/// reported.
pub const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// A page can be made to give SIGBUS (Linux 6.6).
pub const FEATURE_POISON: u64 = 1 << 14;
/// [`FEATURE_MISSING_SHMEM`] for a range.
pub const MODE_MISSING: u64 = 1 << 0;
/// [`FEATURE_MINOR_SHMEM`] for a range.
pub const MODE_MINOR: u64 = 1 << 2;
const EVENT_PAGEFAULT: u8 = 0x12;

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
pub(crate) struct UffdioRange {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// The argument of UFFDIO_CONTINUE and UFFDIO_POISON. The kernel sets `done`:
/// bytes, or a negative error.
#[repr(C)]
struct UffdioPages {
    range: UffdioRange,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct UffdMsg {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

const _: () = assert!(size_of::<UffdioApi>() == 24);
const _: () = assert!(size_of::<UffdioRange>() == 16);
const _: () = assert!(size_of::<UffdioRegister>() == 32);
const _: () = assert!(size_of::<UffdioPages>() == 32);
const _: () = assert!(size_of::<UffdMsg>() == 32);

const UFFDIO_API: Opcode = opcode::read_write::<UffdioApi>(0xAA, 0x3F);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xAA, 0x00);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<UffdioRange>(0xAA, 0x01);
const UFFDIO_WAKE: Opcode = opcode::read::<UffdioRange>(0xAA, 0x02);
const UFFDIO_CONTINUE: Opcode = opcode::read_write::<UffdioPages>(0xAA, 0x07);
const UFFDIO_POISON: Opcode = opcode::read_write::<UffdioPages>(0xAA, 0x08);

/// One ioctl whose argument is a `T` that the kernel reads and may write; gives its return value.
struct Call<'a, T> {
    opcode: Opcode,
    arg: &'a mut T,
}

// SAFETY: `as_ptr` points to a live `T`, exclusively borrowed; the opcode, made from the size of
// `T`, tells the kernel how much of it to read and write. The output is the return value alone.
unsafe impl<T> Ioctl for Call<'_, T> {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        std::ptr::from_mut(self.arg).cast()
    }

    unsafe fn output_from_ptr(
        out: IoctlOutput,
        _: *mut rustix::ffi::c_void,
    ) -> rustix::io::Result<usize> {
        usize::try_from(out).map_err(|_| Errno::RANGE)
    }
}

/// # Safety
/// `opcode` is one whose argument is a `T`, any pointers within which the kernel may follow.
pub(crate) unsafe fn call<T>(
    fd: BorrowedFd<'_>,
    opcode: Opcode,
    arg: &mut T,
) -> rustix::io::Result<usize> {
    // SAFETY: the caller's promise.
    unsafe { rustix::ioctl::ioctl(fd, Call { opcode, arg }) }
}

/// A new userfaultfd with these features. `user_only`: faults within system calls
/// fail (EFAULT) instead of waiting; that needs no privilege.
pub fn open(user_only: bool, features: u64) -> io::Result<OwnedFd> {
    let mut flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    if user_only {
        flags |= UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
    }
    // SAFETY: a descriptor that does nothing until a range is registered.
    let fd = descriptors::open(|| unsafe { rustix::mm::userfaultfd(flags) })?;
    let mut api = UffdioApi {
        api: UFFD_API,
        features,
        ioctls: 0,
    };
    // SAFETY: the argument of UFFDIO_API is a UffdioApi.
    unsafe { call(fd.as_fd(), UFFDIO_API, &mut api)? };
    Ok(fd)
}

fn range(start: usize, len: usize) -> UffdioRange {
    UffdioRange {
        start: start as u64,
        len: len as u64,
    }
}

/// # Safety
/// The range is mapped and the caller's: from now on its faults are reported.
pub unsafe fn register(fd: BorrowedFd<'_>, start: usize, len: usize, mode: u64) -> io::Result<()> {
    let mut arg = UffdioRegister {
        range: range(start, len),
        mode,
        ioctls: 0,
    };
    // SAFETY: the argument of UFFDIO_REGISTER is a UffdioRegister.
    unsafe { call(fd, UFFDIO_REGISTER, &mut arg)? };
    Ok(())
}

/// # Safety
/// The range is the caller's: its pages become ordinary ones.
pub unsafe fn unregister(fd: BorrowedFd<'_>, start: usize, len: usize) -> io::Result<()> {
    // SAFETY: the argument of UFFDIO_UNREGISTER is a UffdioRange.
    unsafe { call(fd, UFFDIO_UNREGISTER, &mut range(start, len))? };
    Ok(())
}

/// Wakes the threads that wait for a page of the range; they try again.
pub fn wake(fd: BorrowedFd<'_>, start: usize, len: usize) {
    // SAFETY: the argument of UFFDIO_WAKE is a UffdioRange; it changes no memory.
    // If it fails, no thread is woken, and one that waits is served by its fault.
    let _ = unsafe { call(fd, UFFDIO_WAKE, &mut range(start, len)) };
}

/// Maps pages that the memory of a registered mapping has, and wakes the threads
/// that wait for them. Pages that are mapped already stay as they are.
pub fn put_in(fd: BorrowedFd<'_>, start: usize, len: usize) {
    pages(fd, UFFDIO_CONTINUE, start, len);
}

/// Makes pages of a registered mapping give SIGBUS, and wakes the threads that wait
/// for them.
pub fn poison(fd: BorrowedFd<'_>, start: usize, len: usize) {
    pages(fd, UFFDIO_POISON, start, len);
}

fn pages(fd: BorrowedFd<'_>, opcode: Opcode, start: usize, len: usize) {
    let page = rustix::param::page_size();
    let (mut at, end) = (start, start + len);
    while at < end {
        let mut arg = UffdioPages {
            range: range(at, end - at),
            mode: 0,
            done: 0,
        };
        // SAFETY: the argument of both is a UffdioPages. They change what the
        // registered mapping shows, which is what its owner asks for.
        match unsafe { call(fd, opcode, &mut arg) } {
            Ok(_) => return,
            // Only a part was done, or the process's mappings are just being
            // changed.
            Err(Errno::AGAIN | Errno::INTR) => at += usize::try_from(arg.done).unwrap_or(0),
            // Mapped already; or not there at all: then a thread that waits faults
            // again.
            Err(_) => {
                wake(fd, at, page);
                at += page;
            }
        }
    }
}

/// Appends to `out` the addresses of faults that were not reported yet.
pub fn faults(fd: BorrowedFd<'_>, out: &mut Vec<usize>) -> io::Result<()> {
    const MOST: usize = 16;
    let mut buf = [const { MaybeUninit::<u8>::uninit() }; MOST * size_of::<UffdMsg>()];
    match rustix::io::read(fd, &mut buf) {
        Ok((bytes, _)) => {
            for m in bytes.chunks_exact(size_of::<UffdMsg>()) {
                if m[std::mem::offset_of!(UffdMsg, event)] == EVENT_PAGEFAULT {
                    let at = std::mem::offset_of!(UffdMsg, address);
                    let address = m[at..at + 8].try_into().expect("8 bytes");
                    out.push(u64::from_ne_bytes(address) as usize);
                }
            }
            Ok(())
        }
        Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_kernels() {
        // The values of the generic ioctl encoding (x86-64, aarch64, riscv64).
        assert_eq!(UFFDIO_API, 0xC018_AA3F);
        assert_eq!(UFFDIO_REGISTER, 0xC020_AA00);
        assert_eq!(UFFDIO_UNREGISTER, 0x8010_AA01);
        assert_eq!(UFFDIO_WAKE, 0x8010_AA02);
        assert_eq!(UFFDIO_CONTINUE, 0xC020_AA07);
        assert_eq!(UFFDIO_POISON, 0xC020_AA08);
    }
}
