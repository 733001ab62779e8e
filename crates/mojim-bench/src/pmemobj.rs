//! libpmemobj's transactions, by its C API, found when it is asked for: no part of the build.
//!
//! Invariants:
//!
//! - The library is never unloaded.
//! - A pool is closed when it is dropped.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use crate::library::{function, load};

/// What to install where the library is missing.
pub const PACKAGE: &str = "libpmemobj1";

/// `PMEMoid`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Oid(u64, u64);

/// The functions of the library that are used, by the types of libpmemobj.h.
#[derive(Clone, Copy)]
struct Functions {
    create: unsafe extern "C" fn(*const c_char, *const c_char, usize, u32) -> *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
    root: unsafe extern "C" fn(*mut c_void, usize) -> Oid,
    begin: unsafe extern "C" fn(*mut c_void, *mut c_void, ...) -> c_int,
    add: unsafe extern "C" fn(*const c_void, usize) -> c_int,
    commit: unsafe extern "C" fn(),
    end: unsafe extern "C" fn() -> c_int,
}

/// A pool with one root object.
pub struct Pool {
    f: Functions,
    pool: *mut c_void,
    /// The root object's first byte.
    pub base: *mut u8,
}

impl Pool {
    /// Makes a pool in a new file, whose root object has `bytes`. `forced`: its stores are
    /// persistent when they have left the processor's caches, which is so on no disk.
    pub fn create(path: &Path, bytes: usize, forced: bool) -> io::Result<Pool> {
        let force = match forced {
            true => c"1",
            false => c"0",
        };
        // SAFETY: two C strings; no other thread looks at the environment now.
        unsafe { libc::setenv(c"PMEM_IS_PMEM_FORCE".as_ptr(), force.as_ptr(), 1) };
        let handle = load("libpmemobj.so.1")?;
        let path = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: these are the types of these functions in libpmemobj.h; the pool is open while
        // its root object is used.
        unsafe {
            let f = Functions {
                create: function(handle, c"pmemobj_create")?,
                close: function(handle, c"pmemobj_close")?,
                root: function(handle, c"pmemobj_root")?,
                begin: function(handle, c"pmemobj_tx_begin")?,
                add: function(handle, c"pmemobj_tx_add_range_direct")?,
                commit: function(handle, c"pmemobj_tx_commit")?,
                end: function(handle, c"pmemobj_tx_end")?,
            };
            let size = bytes * 2 + (32 << 20);
            let pool = (f.create)(path.as_ptr(), c"bench".as_ptr(), size, 0o600);
            if pool.is_null() {
                return Err(io::Error::last_os_error());
            }
            let root = (f.root)(pool, bytes);
            let base = pool.cast::<u8>().add(root.1 as usize);
            Ok(Pool { f, pool, base })
        }
    }

    /// One transaction that stores `value` to these places.
    pub fn store(&self, places: &[usize], value: u64) -> io::Result<()> {
        // SAFETY: places in the root object; each is added before it is stored to.
        unsafe {
            if (self.f.begin)(self.pool, ptr::null_mut(), 0 as c_int) != 0 {
                return Err(io::Error::other("pmemobj_tx_begin"));
            }
            for at in places {
                let p = self.base.add(*at);
                (self.f.add)(p.cast(), 8);
                p.cast::<u64>().write(value);
            }
            (self.f.commit)();
            match (self.f.end)() {
                0 => Ok(()),
                e => Err(io::Error::from_raw_os_error(e)),
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once.
        unsafe { (self.f.close)(self.pool) };
    }
}
