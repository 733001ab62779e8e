//! How a directory gets its mount, and how that is taken away: by the system's calls, or by the helper
//! `fusermount3` of who is not root.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use mojim_env::{Context, Error, Result};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg as receive_message,
};

use crate::flags::Flags;

/// The kernel checks owners and permissions. The type is `fuse.mojim`: mount(8) runs the source of a mount
/// whose type is bare `fuse` as a command, when it is asked to change that mount.
const OPTIONS: &str = "default_permissions,subtype=mojim";
const HELPER: &str = "fusermount3";

/// Mounts `directory`; returns the connection to the kernel, on which nothing was said yet.
///
/// # Errors
/// The system, or the helper, does not let this process mount.
pub(crate) fn mount(directory: &Path, source: &str, flags: Flags) -> Result<OwnedFd> {
    let what = || format!("mounting at {}", directory.display());
    let directory = directory.canonicalize().context(what)?;
    let mounted = match own(&directory, source, flags) {
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            let helped = by_helper(&directory, source, flags);
            helped.map_err(|h| io::Error::new(h.kind(), format!("{e}; {h}")))
        }
        mounted => mounted,
    };
    mounted.context(what)
}

/// As root may.
fn own(directory: &Path, source: &str, flags: Flags) -> io::Result<OwnedFd> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")?;
    let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
    let mut options = format!(
        "fd={},rootmode={:o},user_id={},group_id={},{OPTIONS}",
        device.as_raw_fd(),
        directory.metadata()?.mode(),
        user.as_raw(),
        group.as_raw(),
    );
    if user.is_root() {
        options += ",allow_other";
    }
    let options = CString::new(options)?;
    rustix::mount::mount(source, directory, "fuse", flags.bits(), options.as_c_str())?;
    Ok(device.into())
}

/// The helper sends the connection over a socket, which it has as its standard input.
fn by_helper(directory: &Path, source: &str, flags: Flags) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut options = format!("fsname={source},{OPTIONS}");
    for word in flags.words() {
        options = options + "," + word;
    }
    let mut helper = Command::new(HELPER);
    helper.arg("-o").arg(options).arg("--").arg(directory);
    helper.env("_FUSE_COMMFD", "0").stdin(OwnedFd::from(theirs));
    helper.stdout(Stdio::null()).stderr(Stdio::piped());
    let named = |e: io::Error| io::Error::new(e.kind(), format!("starting {HELPER}: {e}"));
    let child = helper.spawn().map_err(named)?;
    // It has the other end of the socket too, and nothing would come of a helper that has failed.
    drop(helper);
    let device = receive(&ours);
    let said = child.wait_with_output()?.stderr;
    device.map_err(|e| {
        let said = String::from_utf8_lossy(&said);
        match said.trim() {
            "" => io::Error::other(format!("{HELPER}: {e}")),
            said => io::Error::other(said.to_owned()),
        }
    })
}

/// The descriptor that comes over a socket.
fn receive(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut came = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0; 1];
    loop {
        let mut bytes = [IoSliceMut::new(&mut byte)];
        match receive_message(socket, &mut bytes, &mut came, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
            Ok(got) if got.bytes == 0 || got.flags.contains(ReturnFlags::CTRUNC) => break,
            Ok(_) => {}
        }
        for message in came.drain() {
            if let RecvAncillaryMessage::ScmRights(mut all) = message
                && let Some(device) = all.next()
            {
                return Ok(device);
            }
        }
        break;
    }
    Err(io::Error::new(
        ErrorKind::UnexpectedEof,
        "it sent no descriptor",
    ))
}

/// Takes a directory away in this process's namespace.
///
/// # Errors
/// Somebody uses it, unless `flags` say that this is no matter, or the helper fails that unmounts
/// for who is not root.
pub(crate) fn take_away(directory: &Path, flags: UnmountFlags) -> Result<()> {
    let what = || format!("unmounting {}", directory.display());
    match rustix::mount::unmount(directory, flags) {
        // Only root may; others have a helper.
        Err(Errno::PERM) => {
            let mut helper = Command::new(HELPER);
            helper
                .arg("-u")
                .args(flags.contains(UnmountFlags::DETACH).then_some("-z"));
            let out = helper.arg("--").arg(directory).output().context(what)?;
            if !out.status.success() {
                let said = String::from_utf8_lossy(&out.stderr).trim().to_owned();
                return Err(Error::io(what(), &std::io::Error::other(said)));
            }
            Ok(())
        }
        // Somebody else has.
        Err(Errno::INVAL) => Ok(()),
        taken => taken.map_err(std::io::Error::from).context(what),
    }
}
