//! Directories that nobody else can change.
//!
//! If others could have made a directory, or can rename in it, a file in it may be theirs. It may
//! also be an old one of ours that they kept.
//!
//! Owns the walk to a directory, component by component, by descriptors, so that the
//! directory that was checked is the one that is used.
//!
//! Invariants:
//!
//! - An entry of a directory to which everybody may write belongs to this process's user or to
//!   root. Such a directory must be sticky, as /tmp and /dev/shm are.
//! - So does the directory at the end, and nobody else may write to it. The exception is
//!   a sticky directory of root's, of which the entry that is used is checked, too.
//! - Nobody else may change the configuration's file, nor the way to it.
//! - A directory of keys may be another user's if this process is root's: root may use
//!   the keys with which a service of this host proves its name.

use super::error;
use mojim_config::Config;
use mojim_env::{Error, Result, descriptors};
use rustix::fd::OwnedFd;
use rustix::fs::{self, FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, retry_on_intr};
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// As many symbolic links as Linux follows.
const MOST_LINKS: u32 = 40;
/// The mode of a directory that is made here.
const DIR_MODE: Mode = Mode::from_raw_mode(0o700);

fn refused(path: &Path, why: &str) -> io::Error {
    error(
        io::ErrorKind::PermissionDenied,
        format!("{}: {why}", path.display()),
    )
}

fn is_sticky(s: &Stat) -> bool {
    s.st_mode & 0o1000 != 0
}

/// Whether anybody may make names in it.
fn is_open(s: &Stat) -> bool {
    s.st_mode & 0o002 != 0
}

fn check_owner(path: &Path, s: &Stat) -> io::Result<()> {
    let us = rustix::process::geteuid().as_raw();
    if s.st_uid == us || s.st_uid == 0 {
        return Ok(());
    }
    Err(refused(
        path,
        &format!(
            "belongs to user {}, not to user {us}, who would use it: somebody else may have made it. Remove it, give it to user {us}, or configure another place",
            s.st_uid
        ),
    ))
}

/// Checks a directory on the way.
fn check_way(path: &Path, s: &Stat) -> io::Result<()> {
    if is_open(s) && !is_sticky(s) {
        return Err(refused(
            path,
            &format!(
                "everybody may replace what is in it (mode {:o}). Take that right away (chmod o-w, or chmod +t), or configure another place",
                s.st_mode & 0o7777
            ),
        ));
    }
    Ok(())
}

/// Checks that only its owner makes names in it.
fn check_closed(path: &Path, s: &Stat) -> io::Result<()> {
    check_rights(path, s, 0o022)
}

/// Checks that nobody has these rights to it.
fn check_rights(path: &Path, s: &Stat, rights: u32) -> io::Result<()> {
    if s.st_mode & rights != 0 {
        return Err(refused(
            path,
            &format!(
                "others may write to it (mode {:o}). Take that right away (chmod go-w), or configure another place",
                s.st_mode & 0o7777
            ),
        ));
    }
    Ok(())
}

fn parts_of(path: &Path) -> impl DoubleEndedIterator<Item = OsString> {
    path.components().filter_map(|c| match c {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    })
}

/// Opens a directory, for the names in it, that only this process's user or root can
/// change. `make`: makes the missing parts; otherwise `None` if it is missing.
pub(super) fn directory(path: &Path, make: bool) -> io::Result<Option<OwnedFd>> {
    let Some((at, dir)) = walk(path, make)? else {
        return Ok(None);
    };
    let s = fs::fstat(&dir)?;
    check_owner(&at, &s)?;
    if !(is_sticky(&s) && s.st_uid == 0) {
        check_closed(&at, &s)?;
    }
    Ok(Some(dir))
}

/// Walks to a directory; also returns its path for messages.
fn walk(path: &Path, make: bool) -> io::Result<Option<(PathBuf, OwnedFd)>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open_at =
        |name: &Path| descriptors::open(|| retry_on_intr(|| fs::open(name, flags, Mode::empty())));
    let start = |path: &Path| Path::new(if path.has_root() { "/" } else { "." });
    let mut at = start(path).to_owned();
    let mut dir = open_at(&at)?;
    let mut left: VecDeque<OsString> = parts_of(path).collect();
    let mut links = 0;
    while let Some(name) = left.pop_front() {
        let parent = fs::fstat(&dir)?;
        check_way(&at, &parent)?;
        if name == ".." {
            dir = descriptors::open(|| {
                retry_on_intr(|| fs::openat(&dir, "..", flags, Mode::empty()))
            })?;
            at.push("..");
            continue;
        }
        let shown = at.join(&name);
        let entry = match open_entry(&dir, &name) {
            Err(Errno::NOENT) if make => {
                match fs::mkdirat(&dir, &name, DIR_MODE) {
                    Ok(()) => super::disk::sync_dir(&at)?,
                    Err(Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                }
                open_entry(&dir, &name)?
            }
            Err(Errno::NOENT) => return Ok(None),
            entry => entry?,
        };
        let s = fs::fstat(&entry)?;
        if is_open(&parent) {
            check_owner(&shown, &s)?;
        }
        match FileType::from_raw_mode(s.st_mode) {
            FileType::Directory => (dir, at) = (entry, shown),
            FileType::Symlink => {
                links += 1;
                if links > MOST_LINKS {
                    return Err(Errno::LOOP.into());
                }
                let to = fs::readlinkat(&entry, "", Vec::new())?;
                let to = PathBuf::from(OsStr::from_bytes(to.to_bytes()));
                parts_of(&to).rev().for_each(|name| left.push_front(name));
                if to.has_root() {
                    at = start(&to).to_owned();
                    dir = open_at(&at)?;
                }
            }
            _ => return Err(refused(&shown, "is not a directory")),
        }
    }
    Ok(Some((at, dir)))
}

fn open_entry(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    descriptors::open(|| retry_on_intr(|| fs::openat(dir, name, flags, Mode::empty())))
}

/// Makes a directory that nobody else can change, if it is missing.
pub fn make(path: &Path) -> io::Result<()> {
    directory(path, true).map(drop)
}

/// Fails if one of these directories exists and belongs to another user, or if others can
/// change it or the way to it.
pub fn check(directories: &[PathBuf]) -> io::Result<()> {
    for d in directories {
        if let Some((at, dir)) = walk(d, false)? {
            let s = fs::fstat(&dir)?;
            check_owner(&at, &s)?;
            check_closed(&at, &s)?;
        }
    }
    Ok(())
}

/// The file system type of FUSE, as `statfs` gives it.
pub const FUSE: fs::FsWord = 0x6573_5546;

/// Fails if a mount of FUSE lies over this directory of a node's copy: for a program under `mojim run`
/// that is the volume, and a volume that had itself for its copy would wait for itself.
pub fn check_bare(directory: &Path) -> io::Result<()> {
    let found = match fs::statfs(directory) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    let above = directory.parent().unwrap_or(Path::new("/"));
    if found.f_type != FUSE || fs::stat(directory)?.st_dev == fs::stat(above)?.st_dev {
        return Ok(());
    }
    Err(refused(
        directory,
        "the volume itself is mounted over the node's copy here, for this program and others. Have a program that attaches the volume started by `mojim run --preload`, and Mojim's commands outside `mojim run`",
    ))
}

/// Fails if another user can put keys into this directory.
pub(super) fn check_keys(path: &Path) -> io::Result<()> {
    let Some((at, dir)) = walk(path, false)? else {
        // Reading a key reports that the directory is missing.
        return Ok(());
    };
    let s = fs::fstat(&dir)?;
    check_key_owner(&at, &s)?;
    check_closed(&at, &s)
}

/// Reads and checks the configuration, which nobody else may change: it says where everything lies, and
/// who is believed.
pub fn load(path: &Path) -> Result<Config> {
    let wrong = |e: io::Error| {
        let (name, text) = (format!("{}: ", path.display()), e.to_string());
        // Most texts begin with the file or the directory that they are about.
        Error::Config(match text.starts_with(&name) {
            true => text,
            false => name + &text,
        })
    };
    check_configuration(path).map_err(wrong)?;
    Config::load(path).map_err(|e| Error::Config(e.to_string()))
}

/// Fails if another user owns this file, or can change it or the way to it. The file of a user whose
/// group is its own may be open to that group, as many systems make it.
fn check_configuration(path: &Path) -> io::Result<()> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let name = path.file_name().ok_or(Errno::ISDIR)?.to_owned();
        // Reading it reports that it is missing.
        let Some((at, dir)) = walk(super::disk::parent(&path), false)? else {
            return Ok(());
        };
        let entry = match open_entry(&dir, &name) {
            Err(Errno::NOENT) => return Ok(()),
            entry => entry?,
        };
        let s = fs::fstat(&entry)?;
        let parent = fs::fstat(&dir)?;
        check_way(&at, &parent)?;
        if is_open(&parent) {
            check_owner(&path, &s)?;
        }
        if FileType::from_raw_mode(s.st_mode) == FileType::Symlink {
            let to = fs::readlinkat(&entry, "", Vec::new())?;
            path = at.join(OsStr::from_bytes(to.to_bytes()));
            continue;
        }
        let others = match s.st_gid == s.st_uid {
            true => 0o002,
            false => 0o022,
        };
        check_key_owner(&path, &s)?;
        return check_rights(&path, &s, others);
    }
    Err(Errno::LOOP.into())
}

/// Calls `f` as the user who owns `path`, if this process is root's: for what that user's processes ask
/// the kernel of who calls them. Only the calling thread is that user meanwhile.
pub fn as_owner_of<T>(path: &Path, f: impl FnOnce() -> T) -> T {
    struct Root;
    impl Drop for Root {
        fn drop(&mut self) {
            let done = set_effective(0);
            // With another user's rights this process would do the rest wrongly.
            done.expect("the saved user is root");
        }
    }
    let owner = fs::stat(path).map_or(0, |s| s.st_uid);
    let switches = rustix::process::geteuid().is_root() && owner != 0;
    let _root = (switches && set_effective(owner).is_ok()).then(|| Root);
    f()
}

/// Sets the calling thread's effective user.
fn set_effective(user: u32) -> io::Result<()> {
    // SAFETY: a system call on this thread's credentials, without memory.
    match unsafe { libc::syscall(libc::SYS_setresuid, -1, user, -1) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Fails if another user owns this file of keys, or can change it.
pub(super) fn check_key(path: &Path, s: &Stat) -> io::Result<()> {
    check_key_owner(path, s)?;
    check_closed(path, s)
}

fn check_key_owner(path: &Path, s: &Stat) -> io::Result<()> {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => check_owner(path, s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Os;
    use mojim_env::Env;
    use rustix::fs::{Gid, Uid};
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// Runs `f` as another user, in a child.
    fn as_nobody(f: impl FnOnce()) {
        // SAFETY: the child makes system calls only, and ends by `_exit`.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::setgid(65534);
                libc::setuid(65534);
                f();
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            assert_eq!(status, 0);
        }
    }

    fn why(path: &Path) -> String {
        let e = directory(path, true).expect_err("it is refused");
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{e}");
        e.to_string()
    }

    #[test]
    fn what_others_made_or_can_change_is_refused() {
        let dir = TempDir::new().unwrap();
        let shared = dir.path().join("shared");
        let mode = |p: &Path, m| fs::chmod(p, Mode::from_raw_mode(m)).unwrap();
        assert!(
            directory(&shared.join("ours/ring"), false)
                .unwrap()
                .is_none()
        );
        assert!(
            directory(&shared.join("ours/ring"), true)
                .unwrap()
                .is_some()
        );
        let made = fs::stat(shared.join("ours")).unwrap();
        assert_eq!(made.st_mode & 0o777, 0o700);
        mode(&shared, 0o777);
        assert!(why(&shared.join("ours")).contains("everybody may replace"));
        mode(&shared, 0o1777);
        directory(&shared.join("ours"), true).unwrap();
        for m in [0o720, 0o702, 0o1702] {
            mode(&shared.join("ours"), m);
            let ours_is_sticky = m == 0o1702 && made.st_uid == 0;
            if !ours_is_sticky {
                assert!(why(&shared.join("ours")).contains("others may write"));
            }
        }
        // `check` does not look at the entries, so it refuses this also if it is sticky.
        mode(&shared.join("ours"), 0o1777);
        let e = check(&[shared.join("ours")]).unwrap_err();
        assert!(e.to_string().contains("others may write"), "{e}");
        mode(&shared.join("ours"), 0o700);
        check(&[shared.join("ours")]).unwrap();
        symlink("ours/ring", shared.join("link")).unwrap();
        directory(&shared.join("link"), true).unwrap();
        std::fs::write(shared.join("file"), "").unwrap();
        assert!(why(&shared.join("file/x")).contains("not a directory"));
        if made.st_uid != 0 {
            eprintln!("left out: another user's directories need root");
            return;
        }
        let theirs = shared.join("theirs");
        let path = std::ffi::CString::new(theirs.as_os_str().as_bytes()).unwrap();
        let link =
            std::ffi::CString::new(shared.join("their-link").as_os_str().as_bytes()).unwrap();
        // As `nobody` makes them: the way there is open to them.
        mode(dir.path(), 0o755);
        as_nobody(|| {
            // SAFETY: C strings.
            unsafe {
                assert_eq!(libc::mkdir(path.as_ptr(), 0o755), 0);
                assert_eq!(libc::symlink(c"ours".as_ptr(), link.as_ptr()), 0);
            }
        });
        for p in ["theirs", "theirs/below", "their-link"] {
            assert!(why(&shared.join(p)).contains("belongs to user 65534"));
        }
        let e = Os::new().unwrap().memory(&theirs.join("ring"), 4096);
        assert!(
            e.err()
                .unwrap()
                .to_string()
                .contains("belongs to user 65534")
        );
        // Keys are taken from root and from oneself; root takes anybody's.
        let keys = dir.path().join("keys");
        std::fs::create_dir(&keys).unwrap();
        mode(&keys, 0o755);
        check_keys(&keys).unwrap();
        as_nobody(|| check_keys(&keys).unwrap());
        fs::chown(&keys, Some(Uid::from_raw(1)), None::<Gid>).unwrap();
        check_keys(&keys).unwrap();
        as_nobody(|| assert!(check_keys(&keys).is_err()));
        // The configuration says where everything lies: nobody else may change it, nor give it.
        let (config, link) = (dir.path().join("mojim.toml"), dir.path().join("link.toml"));
        std::fs::write(&config, "").unwrap();
        symlink("mojim.toml", &link).unwrap();
        for at in [&config, &link] {
            let nobody = || as_nobody(|| check_configuration(at).unwrap());
            for (m, ours) in [(0o644, true), (0o664, true), (0o646, false)] {
                mode(&config, m);
                let found = check_configuration(at);
                assert_eq!(found.is_ok(), ours, "{m:o}: {found:?}");
            }
            // Of a group that is not the user's own.
            mode(&config, 0o664);
            fs::chown(&config, None::<Uid>, Some(Gid::from_raw(1))).unwrap();
            assert!(check_configuration(at).is_err());
            mode(&config, 0o644);
            nobody();
            fs::chown(&config, Some(Uid::from_raw(1)), None::<Gid>).unwrap();
            check_configuration(at).unwrap();
            as_nobody(|| assert!(check_configuration(at).is_err()));
            fs::chown(&config, Some(Uid::ROOT), Some(Gid::ROOT)).unwrap();
        }
        // The mode that the file has, and its name once.
        mode(&config, 0o666);
        let e = load(&config).unwrap_err().to_string();
        assert!(e.contains("others may write to it (mode 666)"), "{e}");
        assert_eq!(e.matches("mojim.toml").count(), 1, "{e}");
        mode(&config, 0o644);
        mode(dir.path(), 0o777);
        assert!(load(&link).unwrap_err().to_string().contains("may replace"));
        mode(dir.path(), 0o755);
        // Also where nobody else could have made it: it is theirs.
        let given = dir.path().join("given");
        std::fs::create_dir(&given).unwrap();
        fs::chown(&given, Some(Uid::from_raw(65534)), None::<Gid>).unwrap();
        assert!(why(&given).contains("belongs to user 65534"));
    }
}
