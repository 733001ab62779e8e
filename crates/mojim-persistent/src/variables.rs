//! Persistent variables: a section of a program whose memory is a region of a file.
//!
//! The section may also be that of a shared library.
//!
//! Owns the order in which a section becomes persistent. `image` reads what the program's file says
//! of the section.
//!
//! Invariants:
//!
//! - The file's first state is the program's initial values, in one sync point together with the
//!   head that describes them.
//! - A section whose names, offsets or sizes are not the file's is never mapped over.
//! - The addresses of a section are never without memory (`mojim_memory::places`). A region is
//!   mapped in place of it. When the region goes, ordinary memory with the last values takes its
//!   place, also where the detach fails afterwards.
//!
//! Source: Mnemosyne, "Persistent memory regions" (static).

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, MutexGuard};

use mojim::{Error, MapFlags, Result, Volume, gmsync, is_region, unmap};
use mojim_env::locks::lock;
use mojim_format::persistent::{BUILD_ID, Variable, Variables};
use mojim_memory::fork::check_fork;
use mojim_memory::places;

use crate::file::{FileHead, look};
use crate::image::{self, Image};

/// A section that is persistent now.
struct Open {
    start: usize,
    file: String,
}

static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

fn open_ones() -> MutexGuard<'static, Vec<Open>> {
    lock(&OPEN)
}

/// Makes the section `start..stop` of the calling program, or of one of its libraries,
/// persistent: its bytes are those of the file from now on. A file that is not there gets the
/// bytes that the section has, committed.
///
/// # Errors
/// `Invalid` if the file's variables are others (the text names one), if one cannot be
/// persistent, or if `start..stop` is not a section of persistent variables; `Damaged` if the
/// file is no file of variables; `Busy` if the section or the file is in use; `Unsupported` where
/// the program's file cannot be read; those of [`Volume::map`] and of a sync point. The
/// variables have the values then that they had before the call.
///
/// # Safety
/// No other thread uses the variables during the call.
pub unsafe fn open(volume: &Volume, file: &str, start: *mut u8, stop: *mut u8) -> Result<()> {
    check_fork()?;
    let (at, len) = (start as usize, (stop as usize).wrapping_sub(start as usize));
    if start.is_null() || start > stop || !at.is_multiple_of(rustix::param::page_size()) {
        return Err(Error::Invalid(format!(
            "{file}: {start:p} to {stop:p} is no section of persistent variables"
        )));
    }
    if len == 0 {
        return Err(Error::Invalid(format!(
            "{file}: this program (or library) has no variable with MOJIM_PERSISTENT"
        )));
    }
    let mut all = open_ones();
    all.retain(|o| is_region(o.start));
    if let Some(o) = all.iter().find(|o| o.start == at) {
        return Err(Error::Busy(format!(
            "{file}: these variables are persistent already, in {}",
            o.file
        )));
    }
    let image = image::of(at, len)?;
    let now = Variables {
        size: len as u64,
        build_id: image.build_id,
        list: image.list.clone(),
    };
    match look(volume, file, Variables::decode)? {
        // SAFETY: the section, which the caller promises to be its own.
        FileHead::New => unsafe { begin(volume, file, &now, (start, len))? },
        FileHead::Old(then) => {
            check_layout(&then, &now, file, &image)?;
            // SAFETY: as above.
            unsafe { resume(volume, file, &then, &now, (start, len))? }
        }
    }
    keep_loaded(&image);
    all.push(Open {
        start: at,
        file: file.to_owned(),
    });
    Ok(())
}

fn flags(offset: usize, fixed_at: usize) -> MapFlags {
    MapFlags {
        create: true,
        atomic: true,
        offset: offset as u64,
        fixed_at,
        ..MapFlags::default()
    }
}

/// Maps the file over the section; on failure the section has memory with its bytes.
///
/// # Safety
/// The section is the caller's, and nobody uses it.
unsafe fn map_over(
    volume: &Volume,
    file: &str,
    offset: usize,
    (start, len): (*mut u8, usize),
) -> Result<Vec<u8>> {
    // SAFETY: the caller's promise.
    let before = unsafe { std::slice::from_raw_parts(start, len) }.to_vec();
    // SAFETY: as above.
    match unsafe { volume.map_over(file, len, flags(offset, start as usize)) } {
        Ok(_) => {
            places::leave_memory(start as usize);
            Ok(before)
        }
        Err(e) => {
            // SAFETY: the section's pages, where no region is: what it was, or what holds its
            // addresses. It begins on a page, and nothing else is in its last.
            match unsafe { places::replace(start, &before) } {
                Ok(()) => Err(e),
                Err(worse) => Err(Error::Poisoned(format!(
                    "{e}; and then the variables have lost their memory: {worse}"
                ))),
            }
        }
    }
}

/// Makes the first state.
///
/// # Safety
/// As for [`map_over`].
unsafe fn begin(
    volume: &Volume,
    file: &str,
    now: &Variables,
    section: (*mut u8, usize),
) -> Result<()> {
    let head = volume.map(file, now.head_len(), flags(0, 0))?;
    // SAFETY: the caller's promise; on failure the section is as it was.
    let done = unsafe { map_over(volume, file, head.len, section) }.and_then(|values| {
        let bytes = now.encode();
        // SAFETY: both regions were just mapped, and have room for these bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), section.0, values.len());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), head.ptr, bytes.len());
        }
        let both = [
            (head.ptr.cast_const(), head.len),
            (section.0.cast_const(), section.1),
        ];
        // Ordinary memory with the values takes the region's place.
        let undone = |e| unmap(section.0, section.1).and(Err(e));
        gmsync(&both).map(drop).or_else(undone)
    });
    let gone = unmap(head.ptr, head.len);
    done.and(gone)
}

/// Goes on with the file's state.
///
/// # Safety
/// As for [`map_over`].
unsafe fn resume(
    volume: &Volume,
    file: &str,
    then: &Variables,
    now: &Variables,
    section: (*mut u8, usize),
) -> Result<()> {
    // A program of another build has the same layout: what it knows of itself is kept, so that
    // it is known again when its names are stripped.
    if !now.list.is_empty() && then != now && then.head_len() == now.head_len() {
        let head = volume.map(file, now.head_len(), flags(0, 0))?;
        let bytes = now.encode();
        // SAFETY: the region was just mapped, and has room for these bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), head.ptr, bytes.len()) };
        let done = mojim::msync(head.ptr, bytes.len());
        unmap(head.ptr, head.len)?;
        done?;
    }
    // SAFETY: the caller's promise.
    unsafe { map_over(volume, file, then.head_len(), section) }.map(drop)
}

/// A library with persistent variables stays loaded: its memory is the file's.
fn keep_loaded(image: &Image) {
    let path = image.library.as_ref().map(|p| p.as_os_str().as_bytes());
    if let Some(Ok(path)) = path.map(CString::new) {
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: a C string. The handle is not needed: the library is never unloaded now.
        unsafe { libc::dlopen(path.as_ptr(), flags) };
    }
}

/// Fails, and says what changed, unless the file's variables are the program's.
fn check_layout(then: &Variables, now: &Variables, file: &str, image: &Image) -> Result<()> {
    let what = if now.list.is_empty() || then.list.is_empty() {
        // Where there are names, they count: a build id can be given to many builds.
        let same_build = then.build_id == now.build_id && now.build_id != [0; BUILD_ID];
        if same_build && then.size == now.size {
            return Ok(());
        }
        let which = if now.list.is_empty() {
            "this program"
        } else {
            "the program that made the file"
        };
        format!(
            "{which} was stripped of its names, and the two are not of one build: whether their variables are the same cannot be known (strip -g keeps the names)"
        )
    } else {
        match difference(&then.list, &now.list) {
            Some(what) => what,
            None if then.size == now.size => return Ok(()),
            None => format!(
                "all variables together have {} bytes, {} in the file",
                now.size, then.size
            ),
        }
    };
    Err(Error::Invalid(format!(
        "{file}: the persistent variables of {} are not those of the file: {what}. Go back to the old declarations, or give another file name",
        image.path.display()
    )))
}

/// What changed from one layout to another; `None` if nothing did.
pub fn difference(then: &[Variable], now: &[Variable]) -> Option<String> {
    let by_name = |list: &[Variable]| -> BTreeMap<String, (u64, u64)> {
        let entry = |v: &Variable| (v.name.clone(), (v.offset, v.size));
        list.iter().map(entry).collect()
    };
    let (old, new) = (by_name(then), by_name(now));
    for (name, (at, size)) in &old {
        match new.get(name) {
            Some((_, other)) if other != size => {
                return Some(format!("{name} has {other} bytes, {size} in the file"));
            }
            Some(_) => {}
            None => {
                let renamed = new
                    .iter()
                    .find(|(n, v)| !old.contains_key(*n) && **v == (*at, *size));
                return Some(match renamed {
                    Some((n, _)) => format!("{name} is gone, and {n} is in its place"),
                    None => format!("{name} is gone"),
                });
            }
        }
    }
    if let Some((name, _)) = new.iter().find(|(n, _)| !old.contains_key(*n)) {
        return Some(format!("{name} is new"));
    }
    let mut moved = old.iter().filter(|(name, (at, _))| new[*name].0 != *at);
    moved.next().map(|(name, (at, _))| {
        let to = new[name].0;
        format!("{name} lies at offset {to} of the section, {at} in the file (the order changed, or a variable's alignment)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(of: &[(&str, u64, u64)]) -> Vec<Variable> {
        of.iter()
            .map(|(name, offset, size)| Variable {
                offset: *offset,
                size: *size,
                name: (*name).to_owned(),
            })
            .collect()
    }

    /// Two builds with the same given build id (`-Wl,--build-id=0x...`), whose variables were
    /// swapped, were taken for one.
    #[test]
    fn a_build_id_counts_only_where_there_are_no_names() {
        let of = |of: &[(&str, u64, u64)]| Variables {
            size: 16,
            build_id: [1; BUILD_ID],
            list: list(of),
        };
        let (a, b, stripped) = (
            of(&[("a", 0, 8), ("b", 8, 8)]),
            of(&[("b", 0, 8), ("a", 8, 8)]),
            of(&[]),
        );
        let image = Image {
            list: Vec::new(),
            build_id: [1; BUILD_ID],
            path: "p".into(),
            library: None,
        };
        let check = |then, now| check_layout(then, now, "f", &image);
        assert!(check(&a, &b).is_err());
        assert!(check(&a, &a).is_ok() && check(&a, &stripped).is_ok());
        let other = Variables {
            build_id: [2; BUILD_ID],
            ..of(&[])
        };
        assert!(check(&a, &other).is_err());
    }

    #[test]
    fn what_changed_is_named() {
        let then = list(&[("a", 0, 4), ("b", 4, 4), ("c", 8, 8)]);
        assert_eq!(difference(&then, &then), None);
        for (now, what) in [
            (list(&[("a", 0, 4), ("b", 4, 4)]), "c is gone"),
            (
                list(&[("a", 0, 4), ("b", 4, 4), ("d", 8, 8)]),
                "c is gone, and d is in its place",
            ),
            (
                list(&[("a", 0, 4), ("b", 4, 4), ("c", 8, 16)]),
                "c has 16 bytes, 8 in the file",
            ),
            (
                list(&[("b", 0, 4), ("a", 4, 4), ("c", 8, 8)]),
                "a lies at offset 4 of the section, 0 in the file (the order changed, or a variable's alignment)",
            ),
            (
                list(&[("a", 0, 4), ("b", 4, 4), ("c", 8, 8), ("e", 16, 8)]),
                "e is new",
            ),
        ] {
            assert_eq!(difference(&then, &now).unwrap(), what);
        }
    }
}
