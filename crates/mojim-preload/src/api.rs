//! libmojim, as this library finds it in the process: preloaded beside it,
//! linked by the program, or next to this file.
//!
//! Owns the table of its functions. `include/mojim.h` is their manual.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use crate::inside::starting;
use crate::real;

pub const MOJIM_RDONLY: c_int = 0x0040_0000;
pub const MOJIM_SHARED: c_int = 0x0020_0000;
pub const MAP_ATOMIC: c_int = 0x0200_0000;

/// `mojim_t *`.
pub type Handle = *mut c_void;
type Str = *const c_char;

macro_rules! api {
    ($($name:ident: fn($($t:ty),*) -> $ret:ty;)+) => {
        /// libmojim's functions.
        pub struct Api { $(pub $name: unsafe extern "C" fn($($t),*) -> $ret,)+ }

        fn load(library: *mut c_void) -> Option<Api> {
            Some(Api { $($name: {
                let name = concat!(stringify!($name), "\0").as_ptr().cast();
                // SAFETY: a C string, and a library that is loaded for good.
                let p = unsafe { libc::dlsym(library, name) };
                if p.is_null() {
                    return None;
                }
                // SAFETY: the type is the header's.
                unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($t),*) -> $ret>(p)
                }
            },)+ })
        }
    };
}

api! {
    mojim_join: fn(Str, Str, Str) -> Handle;
    mojim_usable: fn(Handle) -> c_int;
    mojim_attach_reader: fn(Str, Str, Str) -> Handle;
    mojim_read: fn(Handle, Str, *mut c_void, usize, i64) -> isize;
    mojim_finish: fn(Handle) -> c_int;
    mojim_map_at: fn(Handle, Str, usize, c_int, i64, *mut c_void) -> *mut c_void;
    mojim_unmap: fn(*mut c_void, usize) -> c_int;
    mojim_msync: fn(*mut c_void, usize, c_int) -> c_int;
    mojim_fsync: fn(Handle, Str) -> c_int;
    gmsync: fn(*const c_void, c_int, c_int) -> c_int;
    mojim_create: fn(Handle, Str) -> c_int;
    mojim_remove: fn(Handle, Str) -> c_int;
    mojim_rename: fn(Handle, Str, Str) -> c_int;
    mojim_truncate: fn(Handle, Str, i64) -> c_int;
    mojim_settle: fn(Handle) -> c_int;
    mojim_dup3: fn(c_int, c_int, c_int) -> c_int;
    mojim_is_yours: fn(c_int) -> c_int;
    mojim_open_above: fn(Str, c_int, c_int) -> c_int;
    mojim_directory: fn(Str, Str, Str, *mut c_char, usize) -> c_int;
    mojim_locks: fn(Str, Str, Str, *mut c_char, usize) -> c_int;
    mojim_last_error: fn() -> Str;
}

// SAFETY: function pointers.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

/// The library, if it has been found.
pub fn known() -> Option<&'static Api> {
    API.get()?.as_ref()
}

static API: OnceLock<Option<Api>> = OnceLock::new();

/// The library; ENOSYS and a line on stderr if it is not there.
pub fn api() -> Result<&'static Api, c_int> {
    if let Some(known) = API.get() {
        return known.as_ref().ok_or(libc::ENOSYS);
    }
    let _held = starting();
    API.get_or_init(|| {
        let found = load(libc::RTLD_DEFAULT).or_else(|| load(open_beside()?));
        if found.is_none() {
            real::say("libmojim.so is not loaded and not beside libmojim_preload.so; preload both");
        }
        found
    })
    .as_ref()
    .ok_or(libc::ENOSYS)
}

/// libmojim.so in the directory of this library.
fn open_beside() -> Option<*mut c_void> {
    use std::os::unix::ffi::OsStrExt;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address in this library, and room for the answer.
    let ok = unsafe { libc::dladdr(open_beside as *const c_void, info.as_mut_ptr()) };
    if ok == 0 {
        return None;
    }
    // SAFETY: zeroed, and filled by dladdr; the name is the loader's.
    let name = unsafe { CStr::from_ptr(info.assume_init().dli_fname) };
    let own = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    let path = own.with_file_name("libmojim.so");
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: a C string.
    let lib = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    (!lib.is_null()).then_some(lib)
}

/// The text of the calling thread's last error in libmojim.
pub fn last_error(api: &Api) -> String {
    // SAFETY: a C string of the library's, valid until this thread's next call.
    unsafe { CStr::from_ptr((api.mojim_last_error)()) }
        .to_string_lossy()
        .into_owned()
}

/// The errno of a call of libmojim that failed, after saying why on stderr.
pub fn failed(api: &Api) -> c_int {
    let e = real::errno();
    real::say(&last_error(api));
    e
}
