//! RocksDB by its C API, found when it is asked for: no part of the build.
//!
//! Invariants:
//!
//! - The library is never unloaded, so its functions stay where they are.
//! - A database is closed when it is dropped, and its options live as long.

use std::ffi::{CStr, CString, c_char, c_uchar, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use crate::library::{function, load};

/// What to install where the library is missing.
pub const PACKAGE: &str = "librocksdb7.8 (or what `apt-cache search librocksdb` lists)";

/// Versions of the library that are tried, the newest first; the functions below are in all.
const MAJOR: std::ops::RangeInclusive<u32> = 5..=12;
const MINOR: std::ops::RangeInclusive<u32> = 0..=30;

type Options = *mut c_void;
type Error = *mut *mut c_char;

/// The functions of the library that are used.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    options_create: unsafe extern "C" fn() -> Options,
    options_set_create_if_missing: unsafe extern "C" fn(Options, c_uchar),
    options_destroy: unsafe extern "C" fn(Options),
    writeoptions_create: unsafe extern "C" fn() -> Options,
    writeoptions_set_sync: unsafe extern "C" fn(Options, c_uchar),
    writeoptions_destroy: unsafe extern "C" fn(Options),
    open: unsafe extern "C" fn(Options, *const c_char, Error) -> *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
    put: unsafe extern "C" fn(
        *mut c_void,
        Options,
        *const c_char,
        usize,
        *const c_char,
        usize,
        Error,
    ),
    free: unsafe extern "C" fn(*mut c_void),
}

impl Library {
    /// The library, if the system has one.
    pub fn load() -> io::Result<Library> {
        let handle = names().find_map(|name| load(name).ok());
        let handle = handle.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        // SAFETY: these are the types of these functions in rocksdb/c.h.
        unsafe {
            Ok(Library {
                options_create: function(handle, c"rocksdb_options_create")?,
                options_set_create_if_missing: function(
                    handle,
                    c"rocksdb_options_set_create_if_missing",
                )?,
                options_destroy: function(handle, c"rocksdb_options_destroy")?,
                writeoptions_create: function(handle, c"rocksdb_writeoptions_create")?,
                writeoptions_set_sync: function(handle, c"rocksdb_writeoptions_set_sync")?,
                writeoptions_destroy: function(handle, c"rocksdb_writeoptions_destroy")?,
                open: function(handle, c"rocksdb_open")?,
                close: function(handle, c"rocksdb_close")?,
                put: function(handle, c"rocksdb_put")?,
                free: function(handle, c"rocksdb_free")?,
            })
        }
    }

    /// What a call said, which takes a place for its error.
    fn checked<T>(&self, call: impl FnOnce(Error) -> T) -> io::Result<T> {
        let mut error: *mut c_char = ptr::null_mut();
        let got = call(&raw mut error);
        if error.is_null() {
            return Ok(got);
        }
        // SAFETY: an error is a C string that is the caller's to free.
        let text = unsafe {
            let text = CStr::from_ptr(error).to_string_lossy().into_owned();
            (self.free)(error.cast());
            text
        };
        Err(io::Error::other(format!("RocksDB: {text}")))
    }
}

/// File names of the library.
fn names() -> impl Iterator<Item = String> {
    let versions = MAJOR.rev().flat_map(|major| {
        let minor = MINOR
            .rev()
            .map(move |m| format!("librocksdb.so.{major}.{m}"));
        [format!("librocksdb.so.{major}")].into_iter().chain(minor)
    });
    ["librocksdb.so".to_owned()].into_iter().chain(versions)
}

/// An open database, whose puts are durable when they return.
pub struct Database {
    library: Library,
    options: Options,
    write: Options,
    db: *mut c_void,
}

// SAFETY: a database is for any number of threads at once, and the options are only read.
unsafe impl Send for Database {}
// SAFETY: as above.
unsafe impl Sync for Database {}

impl Database {
    /// Makes the database `path`.
    pub fn create(library: Library, path: &Path) -> io::Result<Database> {
        let path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
        // SAFETY: options that were just made; the path is a C string.
        unsafe {
            let mut new = Database {
                library,
                options: (library.options_create)(),
                write: (library.writeoptions_create)(),
                db: ptr::null_mut(),
            };
            (library.options_set_create_if_missing)(new.options, 1);
            (library.writeoptions_set_sync)(new.write, 1);
            new.db = library.checked(|e| (library.open)(new.options, path.as_ptr(), e))?;
            Ok(new)
        }
    }

    /// Stores `value` under `key`; durable on return.
    pub fn put(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        let (k, v) = (key.as_ptr().cast(), value.as_ptr().cast());
        // SAFETY: an open database, its options, and two slices, which are only read.
        self.library.checked(|e| unsafe {
            (self.library.put)(self.db, self.write, k, key.len(), v, value.len(), e)
        })
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: all are of this value, and used no more.
        unsafe {
            if !self.db.is_null() {
                (self.library.close)(self.db);
            }
            (self.library.writeoptions_destroy)(self.write);
            (self.library.options_destroy)(self.options);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn the_names_have_the_versions_of_distributions() {
        let names: Vec<_> = names().collect();
        for name in ["so", "so.7.8", "so.8.9", "so.9", "so.9.10", "so.10"] {
            assert!(names.contains(&format!("librocksdb.{name}")), "{name}");
        }
    }

    #[test]
    fn puts_where_the_system_has_it() {
        let Ok(library) = Library::load() else {
            return;
        };
        let dir = Scratch::new().unwrap();
        let db = Database::create(library, &dir.path().join("db")).unwrap();
        for i in 0..10 {
            db.put(&[i], b"value").unwrap();
        }
        drop(db);
        assert!(Database::create(library, Path::new("/proc/none/db")).is_err());
    }
}
