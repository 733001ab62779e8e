//! A line between two processes of a node: whole messages, and descriptors with them.
//!
//! Owns the Unix sockets (SOCK_SEQPACKET) between a process that shares a volume's working copies
//! and the process that has attached the volume. Without a limit, calls wait until the other end
//! answers, has closed the line, or has died.
//!
//! Invariants:
//! - The process at the other end belongs to this user or to root.
//! - A message longer than [`MOST`], or with more descriptors than it should have, is an error.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
};

use rustix::net::sockopt::Timeout;
use rustix::process::{PidfdFlags, pidfd_open};

use mojim_env::descriptors;
use mojim_linux::{check_local_peer, unix_address};

/// Most bytes of a message.
pub const MOST: usize = 64 << 10;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// One end.
pub struct Line {
    fd: OwnedFd,
    /// A pidfd of the process at the other end (Linux 5.3), which tells of its death: a child that
    /// it forked may have the other end, too, and keep the line from ending.
    peer: Option<Arc<OwnedFd>>,
}

/// A descriptor that a forked child closes.
pub(crate) type End = Arc<dyn AsRawFd + Send + Sync>;

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(descriptors::open(|| {
        net::socket_with(family, kind, flags, None)
    })?)
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.to_owned())
}

impl Line {
    fn new(fd: OwnedFd) -> Line {
        let peer = net::sockopt::socket_peercred(&fd);
        let peer = peer.and_then(|p| descriptors::open(|| pidfd_open(p.pid, PidfdFlags::empty())));
        Line {
            fd,
            peer: peer.ok().map(Arc::new),
        }
    }

    /// Connects to the process that listens at `path`. Fails with ENOENT or ECONNREFUSED if none
    /// does, and with EAGAIN if the process cannot be reached within `limit`, if there is one.
    pub fn connect(path: &Path, limit: Option<Duration>) -> io::Result<Line> {
        let fd = socket(SocketFlags::empty())?;
        let (addr, _dir) = unix_address(path)?;
        net::sockopt::set_socket_timeout(&fd, Timeout::Send, limit)?;
        rustix::io::retry_on_intr(|| net::connect(&fd, &addr))?;
        net::sockopt::set_socket_timeout(&fd, Timeout::Send, None)?;
        check_local_peer(&fd, &path.display().to_string())?;
        Ok(Line::new(fd))
    }

    /// Waits until there is something to receive; false if the process at the other end has died,
    /// and has left no message.
    fn wait(&self, limit: Option<Duration>) -> io::Result<bool> {
        let limit = limit.map(|l| Timespec::try_from(l).unwrap_or_default());
        loop {
            let mut fds = [
                PollFd::new(&self.fd, PollFlags::IN),
                PollFd::new(self.peer.as_deref().unwrap_or(&self.fd), PollFlags::IN),
            ];
            match poll(&mut fds, limit.as_ref()) {
                Ok(0) => return Err(Errno::TIMEDOUT.into()),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(true),
                // It has died; its last message may have come since.
                Ok(_) => {
                    let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
                    return Ok(poll(&mut fds, Some(&Timespec::default()))? > 0);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Sends a message, whole.
    pub fn send(&self, message: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        assert!(message.len() <= MOST, "a message of {}", message.len());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.as_slice();
        if !fds.is_empty() {
            let fits = control.push(SendAncillaryMessage::ScmRights(fds));
            assert!(fits, "room for one");
        }
        let bufs = [IoSlice::new(message)];
        rustix::io::retry_on_intr(|| {
            net::sendmsg(&self.fd, &bufs, &mut control, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }

    /// Waits for a message, puts it into `buf` and gives its length; `None` once the other end is
    /// closed, or its process has ended. `buf` has [`MOST`] bytes. Fails with ETIMEDOUT if nothing
    /// comes within `limit`, if there is one, and with InvalidData if a descriptor comes with it.
    pub fn recv(&self, buf: &mut [u8], limit: Option<Duration>) -> io::Result<Option<usize>> {
        let flags = RecvFlags::empty();
        let mut none = RecvAncillaryBuffer::default();
        let got = self.recv_with(buf, limit, |bufs| {
            net::recvmsg(&self.fd, bufs, &mut none, flags)
        })?;
        Ok(got.map(|got| got.bytes))
    }

    /// [`Line::recv`], of a message with which a descriptor may come.
    pub fn recv_with_fd(
        &self,
        buf: &mut [u8],
        limit: Option<Duration>,
    ) -> io::Result<Option<(usize, Option<OwnedFd>)>> {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        // Room for a second descriptor, to see that it is one too many.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (mut fd, mut more) = (None, false);
        let got = self.recv_with(buf, limit, |bufs| {
            descriptors::opening(|| {
                let got = net::recvmsg(&self.fd, bufs, &mut control, flags)?;
                let mut fds = control.drain().flat_map(|m| match m {
                    RecvAncillaryMessage::ScmRights(fds) => Some(fds).into_iter().flatten(),
                    _ => None.into_iter().flatten(),
                });
                fd = fds.next().map(descriptors::above).transpose()?;
                more = fds.next().is_some();
                Ok(got)
            })
        })?;
        match more {
            true => Err(invalid("a message that is too long")),
            false => Ok(got.map(|got| (got.bytes, fd))),
        }
    }

    fn recv_with(
        &self,
        buf: &mut [u8],
        limit: Option<Duration>,
        mut recv: impl FnMut(&mut [IoSliceMut<'_>]) -> Result<net::RecvMsg, Errno>,
    ) -> io::Result<Option<net::RecvMsg>> {
        let got = loop {
            if !self.wait(limit)? {
                return Ok(None);
            }
            match recv(&mut [IoSliceMut::new(buf)]) {
                Ok(got) => break got,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
        };
        let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
        if got.flags.intersects(cut) {
            return Err(invalid("a message that is too long"));
        }
        Ok((got.bytes > 0).then_some(got))
    }

    /// Ends the line, for both ends and every thread that waits.
    pub fn close(&self) {
        // This fails only if the line has ended already.
        let _ = net::shutdown(&self.fd, Shutdown::Both);
    }

    /// The descriptors that a forked child closes.
    pub fn ends(self: &Arc<Line>) -> impl Iterator<Item = End> + use<> {
        let peer = self.peer.clone().map(|p| p as End);
        std::iter::once(self.clone() as End).chain(peer)
    }

    /// Ends the direction to the other end; messages from there can still be received.
    pub fn stop_speaking(&self) {
        let _ = net::shutdown(&self.fd, Shutdown::Write);
    }
}

impl AsRawFd for Line {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A listening socket.
pub struct Port {
    fd: OwnedFd,
    path: PathBuf,
}

impl Port {
    /// Listens at `path`, and replaces a socket that is there: the caller holds a lock that keeps
    /// other processes from listening there.
    pub fn listen(path: &Path) -> io::Result<Port> {
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        // `accept` must not wait: see `descriptors`.
        let fd = socket(SocketFlags::NONBLOCK)?;
        let (addr, _dir) = unix_address(path)?;
        net::bind(&fd, &addr)?;
        // Sets the mode before `listen`: until then no process can connect.
        rustix::fs::chmodat(
            rustix::fs::CWD,
            path,
            Mode::RUSR | Mode::WUSR,
            rustix::fs::AtFlags::empty(),
        )?;
        net::listen(&fd, BACKLOG)?;
        Ok(Port {
            fd,
            path: path.to_owned(),
        })
    }

    /// Waits for the next line; `None` once the port is closed. A line from another user is an
    /// error, after which the caller can wait again.
    pub fn accept(&self) -> io::Result<Option<Line>> {
        let mut ended = false;
        loop {
            match descriptors::open(|| net::accept_with(&self.fd, SocketFlags::CLOEXEC)) {
                Ok(fd) => {
                    check_local_peer(&fd, &self.path.display().to_string())?;
                    return Ok(Some(Line::new(fd)));
                }
                Err(Errno::AGAIN) if ended => return Ok(None),
                Err(Errno::AGAIN) => {
                    let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
                    match poll(&mut fds, None) {
                        // HUP: shut down. Lines that came before can still be accepted.
                        Ok(_) => ended = fds[0].revents().contains(PollFlags::HUP),
                        Err(Errno::INTR) => {}
                        Err(e) => return Err(e.into()),
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // The socket is shut down, and `accept` says so at once.
                Err(Errno::INVAL) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Ends listening: no more lines begin.
    pub fn close(&self) {
        // Its file goes first: a process that finds the file finds a listener.
        let _ = rustix::fs::unlink(&self.path);
        let _ = net::shutdown(&self.fd, Shutdown::Both);
    }
}

impl AsRawFd for Port {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use tempfile::TempDir;

    #[test]
    fn messages_and_descriptors_go_both_ways() {
        let dir = TempDir::new().unwrap();
        // Longer than a socket's address can be.
        let deep = dir.path().join("d".repeat(90));
        std::fs::create_dir(&deep).unwrap();
        let path = deep.join("s.sock");
        let port = Port::listen(&path).unwrap();
        let there = Line::connect(&path, None).unwrap();
        let here = port.accept().unwrap().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        there.send(b"one", None).unwrap();
        there.send(&vec![7; MOST], Some(file.as_fd())).unwrap();
        let mut buf = vec![0; MOST];
        let (n, fd) = here.recv_with_fd(&mut buf, None).unwrap().unwrap();
        assert_eq!((&buf[..n], fd.is_none()), (&b"one"[..], true));
        let (n, fd) = here.recv_with_fd(&mut buf, None).unwrap().unwrap();
        assert_eq!((n, fd.is_some()), (MOST, true));
        here.send(b"two", None).unwrap();
        assert_eq!(there.recv(&mut buf, None).unwrap().unwrap(), 3);
        // A descriptor that the receiver does not expect is refused.
        here.send(b"three", Some(file.as_fd())).unwrap();
        assert_eq!(
            there.recv(&mut buf, None).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        drop(there);
        assert!(here.recv(&mut buf, None).unwrap().is_none());
        assert!(here.send(b"x", None).is_err());
    }

    #[test]
    fn whoever_waits_is_told_of_the_end() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("s");
        let port = Port::listen(&path).unwrap();
        let there = Line::connect(&path, None).unwrap();
        let here = port.accept().unwrap().unwrap();
        std::thread::scope(|s| {
            let waits = s.spawn(|| here.recv(&mut vec![0; MOST], None).unwrap().is_none());
            let accepts = s.spawn(|| port.accept().unwrap().is_none());
            here.close();
            port.close();
            assert!(waits.join().unwrap() && accepts.join().unwrap());
        });
        assert!(there.recv(&mut vec![0; MOST], None).unwrap().is_none());
        assert!(Line::connect(&path, None).is_err());
        // A socket that a killed process has left does not prevent listening.
        let left = Port::listen(&path).unwrap();
        drop(left);
        assert!(path.exists());
        let again = Port::listen(&path).unwrap();
        assert!(Line::connect(&path, None).is_ok());
        again.close();
    }
}
