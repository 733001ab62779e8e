//! The names of a volume's open files, as this process knows them.
//!
//! Owns the names: another process may rename or remove a file, and this process is not
//! told. The functions are called inside.
//!
//! Invariant: the engine is asked by a name that the file had a moment before, or not
//! at all.

use std::ffi::c_int;
use std::os::unix::fs::MetadataExt;

use crate::inside::reads;
use crate::path::Target;
use crate::real::{say, stat_of};
use crate::settings::directory;
use crate::table::{Entry, Opened, names};

/// The name of an open file, as this process knows it.
pub fn name_of(e: Entry) -> Result<String, c_int> {
    let known = names().get(e.id()).and_then(|f| f.name.clone());
    known.ok_or_else(|| {
        say("a file that was removed can only be read");
        libc::EOPNOTSUPP
    })
}

/// The name of an open file, for a call of the engine that takes a name. ESTALE if the
/// file has no name any more. (A rename between this check and the call is not noticed.)
pub fn present_name(fd: c_int, e: Entry) -> Result<String, c_int> {
    let name = name_of(e)?;
    // Where files are only read, a new copy of the volume may take their places.
    if reads() {
        return Ok(name);
    }
    let inode = names()[e.id()].inode;
    let (dir, canonical) = directory()?;
    let is_of = |name: &str| {
        let there = std::fs::symlink_metadata(dir.join(name));
        there.is_ok_and(|m| (m.dev(), m.ino()) == inode)
    };
    if is_of(&name) {
        return Ok(name);
    }
    // Another process has renamed it; or this one has, and was told of a failure.
    let now = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
    let now = now.zip(canonical).and_then(|(now, dir)| {
        let name = now.strip_prefix(dir).ok()?.to_str()?;
        is_of(name).then(|| name.to_owned())
    });
    if let Some(now) = now {
        names()[e.id()].name = Some(now.clone());
        return Ok(now);
    }
    say(&format!(
        "{name}: the file was replaced or removed; open it again"
    ));
    Err(libc::ESTALE)
}

/// The number of the file that was opened by this name.
pub fn id_of(fd: c_int, name: &str) -> Result<usize, c_int> {
    let st = stat_of(fd)?;
    let inode = (st.st_dev, st.st_ino);
    let mut names = names();
    let known = names.iter().position(|f| match reads() {
        true => f.name.as_deref() == Some(name),
        false => f.inode == inode,
    });
    let name = Some(name.to_owned());
    Ok(match known {
        Some(i) => {
            names[i].name = name;
            i
        }
        None => {
            names.push(Opened { name, inode });
            names.len() - 1
        }
    })
}

/// A file has another name, or none.
pub fn renamed(t: &Target, name: Option<&str>) {
    for f in names().iter_mut().filter(|f| f.inode == t.inode) {
        f.name = name.map(str::to_owned);
    }
}

/// The engine makes directories as names need them; open does not.
pub fn check_parent(t: &Target) -> Result<(), c_int> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(t.path.as_bytes()));
    match path.parent().map(std::fs::metadata) {
        Some(Ok(m)) if m.is_dir() => Ok(()),
        Some(Ok(_)) => Err(libc::ENOTDIR),
        Some(Err(e)) => Err(e.raw_os_error().unwrap_or(libc::ENOENT)),
        None => Ok(()),
    }
}
