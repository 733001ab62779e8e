//! Byte streams over TCP and Unix sockets, and passing memory over the latter.
//!
//! Owns the sockets. Invariants:
//! - Every socket is non-blocking. Only `wait`, `accept`, `send_memory` and `recv_memory`
//!   block, all with a bound.
//! - `send` and `recv` do not allocate.
//! - A Unix socket is used only with processes of this user or root. Memory is passed
//!   with one byte of the stream, [`MEMORY_BYTE`]: the protocol above says where it
//!   stands, and the receiver must have received exactly the bytes before it.

use super::{disk, error, memory, now};
use mojim_env::futex::timespec;
use mojim_env::{Address, Conn, Memory, Proof, descriptors};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrAny, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The most buffers that the kernel takes in one call (`UIO_MAXIOV`).
const MOST_BUFFERS: usize = 1024;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// The byte that memory is passed with.
const MEMORY_BYTE: u8 = b'M';

/// How long passing memory may wait for the peer.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(5);

/// `Socket::state` while the connection is being made; it is 0 afterwards,
/// or the error number that it failed with.
const CONNECTING: i32 = -1;
const OPEN: i32 = 0;

/// A connection.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    unix: bool,
    state: AtomicI32,
    peer: String,
    /// From where it was accepted, over TCP.
    source: Option<IpAddr>,
    /// It was accepted from this host, over TCP.
    beside: bool,
}

fn socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    descriptors::open(|| net::socket_with(family, SocketType::STREAM, FLAGS, None))
}

impl Socket {
    /// Begins to connect. `WouldBlock` here if a Unix socket's listener has no room for
    /// more waiting connections.
    pub(super) fn connect(to: &Address) -> io::Result<Socket> {
        let peer = to.to_string();
        let (fd, unix, begun) = match to {
            Address::Tcp(addr) => {
                let fd = socket(family(addr))?;
                sockopt::set_tcp_nodelay(&fd, true)?;
                let begun = net::connect(&fd, addr);
                (fd, false, begun)
            }
            Address::Unix(path) => {
                let fd = socket(AddressFamily::UNIX)?;
                let (addr, _dir) = unix_address(path)?;
                let begun = net::connect(&fd, &addr);
                (fd, true, begun)
            }
        };
        let state = match begun {
            Ok(()) if unix => OPEN,
            // Interrupted: it goes on by itself.
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => CONNECTING,
            Err(Errno::AGAIN) if unix => {
                let text = format!("{peer}: too many connections wait to be accepted");
                return Err(error(io::ErrorKind::WouldBlock, text));
            }
            Err(e) => return Err(e.into()),
        };
        if unix {
            allowed(peer_of(&fd)?.1, &peer)?;
        }
        Ok(Socket {
            fd,
            unix,
            state: AtomicI32::new(state),
            peer,
            source: None,
            beside: false,
        })
    }

    fn accepted(fd: OwnedFd, from: Option<SocketAddrAny>, at: &Address) -> io::Result<Socket> {
        let unix = matches!(at, Address::Unix(_));
        let mut source = None;
        let peer = if unix {
            let (pid, uid) = peer_of(&fd)?;
            let peer = format!("process {pid} of user {uid} at {at}");
            allowed(uid, &peer)?;
            peer
        } else {
            sockopt::set_tcp_nodelay(&fd, true)?;
            match from.map(SocketAddr::try_from) {
                Some(Ok(addr)) => {
                    source = Some(addr.ip().to_canonical());
                    addr.to_string()
                }
                _ => format!("someone at {at}"),
            }
        };
        Ok(Socket {
            unix,
            state: AtomicI32::new(OPEN),
            peer,
            beside: source.is_some_and(|ip| ip.is_loopback() || Some(ip) == own_address(&fd)),
            source,
            fd,
        })
    }

    /// For polling several sockets.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Where it was accepted from, over TCP.
    pub(super) fn source(&self) -> Option<IpAddr> {
        self.source
    }

    /// Whether bytes can go over it: `WouldBlock` while it is being connected.
    fn ready(&self) -> io::Result<()> {
        match self.state.load(Ordering::Acquire) {
            OPEN => Ok(()),
            CONNECTING => self.proceed(),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    #[cold]
    fn proceed(&self) -> io::Result<()> {
        let become_ = |state| {
            // Only the first outcome counts: `close` may have been before us.
            let _ =
                self.state
                    .compare_exchange(CONNECTING, state, Ordering::AcqRel, Ordering::Acquire);
            match self.state.load(Ordering::Acquire) {
                OPEN => Ok(()),
                errno => Err(io::Error::from_raw_os_error(errno)),
            }
        };
        if let Err(e) = sockopt::socket_error(&self.fd)? {
            return become_(e.raw_os_error());
        }
        match net::getpeername(&self.fd) {
            // A port of this host that nobody listens on, chosen as our own:
            // TCP then connects the socket to itself.
            Ok(peer) if peer == net::getsockname(&self.fd).ok() => become_(libc::ECONNREFUSED),
            Ok(_) => become_(OPEN),
            // Not yet. (If the other thread of this connection has just taken
            // the error, it also notes it in `state`.)
            Err(Errno::NOTCONN) => Err(io::ErrorKind::WouldBlock.into()),
            Err(e) => Err(e.into()),
        }
    }

    /// Waits until `deadline`; `TimedOut` then.
    fn wait_for_memory(&self, to_send: bool, deadline: Duration) -> io::Result<()> {
        if self.wait(to_send, deadline.saturating_sub(now()))? {
            return Ok(());
        }
        let text = format!("{}: shared memory could not be passed in time", self.peer);
        Err(error(io::ErrorKind::TimedOut, text))
    }

    /// Memory is passed only to processes of this user or root, and over no network.
    fn check_peer(&self) -> io::Result<()> {
        if !self.unix {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.ready()?;
        check_local_peer(&self.fd, &self.peer)
    }
}

/// This end's address of a TCP connection.
fn own_address(fd: &OwnedFd) -> Option<IpAddr> {
    let addr = SocketAddr::try_from(net::getsockname(fd).ok()?).ok()?;
    Some(addr.ip().to_canonical())
}

/// Fails if the other end of a Unix socket is neither this user's nor root's.
pub fn check_local_peer(fd: &OwnedFd, peer: &str) -> io::Result<()> {
    let (_, uid) = peer_of(fd)?;
    allowed(uid, peer)
}

/// Allows the processes that can read this user's memory anyway: the user's own, and
/// root's.
fn allowed(uid: u32, peer: &str) -> io::Result<()> {
    let ours = rustix::process::geteuid().as_raw();
    if uid == ours || uid == 0 {
        return Ok(());
    }
    let text = format!("{peer}: runs as user {uid}; only user {ours} and root are spoken to here");
    Err(error(io::ErrorKind::PermissionDenied, text))
}

impl Conn for Socket {
    fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.ready()?;
        let sent = if let [buf] = bufs {
            rustix::io::retry_on_intr(|| net::send(&self.fd, buf, SendFlags::NOSIGNAL))
        } else {
            let bufs = &bufs[..bufs.len().min(MOST_BUFFERS)];
            let mut none = SendAncillaryBuffer::default();
            rustix::io::retry_on_intr(|| {
                net::sendmsg(&self.fd, bufs, &mut none, SendFlags::NOSIGNAL)
            })
        };
        Ok(sent?)
    }

    fn recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.ready()?;
        let received = if let [buf] = bufs {
            rustix::io::retry_on_intr(|| {
                net::recv(&self.fd, &mut buf[..], RecvFlags::empty()).map(|(n, _)| n)
            })
        } else {
            let most = bufs.len().min(MOST_BUFFERS);
            let mut none = RecvAncillaryBuffer::default();
            rustix::io::retry_on_intr(|| {
                net::recvmsg(
                    &self.fd,
                    &mut bufs[..most],
                    &mut none,
                    RecvFlags::CMSG_CLOEXEC,
                )
                .map(|r| r.bytes)
            })
        };
        Ok(received?)
    }

    fn wait(&self, to_send: bool, timeout: Duration) -> io::Result<bool> {
        let room = if to_send {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        wait_on(self.fd.as_fd(), PollFlags::IN | room, timeout)
    }

    fn processor(&self) -> Option<usize> {
        if !self.beside {
            return None;
        }
        // Over loopback, what is sent is received on the sender's processor.
        let there = sockopt::socket_incoming_cpu(&self.fd).ok()?;
        usize::try_from(there).ok()
    }

    fn close(&self) {
        let _ = self.state.compare_exchange(
            CONNECTING,
            libc::ENOTCONN,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        // It fails if there is no connection any more, which is what is wanted.
        let _ = net::shutdown(&self.fd, Shutdown::Both);
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn proof(&self) -> Proof {
        match self.unix {
            true => Proof::Local,
            false => Proof::Nothing,
        }
    }

    /// Anonymous memory goes out writable, other memory for reading only.
    fn send_memory(&self, memory: &Memory) -> io::Result<()> {
        self.check_peer()?;
        let fd = memory::passable(memory)?;
        let deadline = now() + MEMORY_TIMEOUT;
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [fd.as_fd()];
            assert!(
                control.push(SendAncillaryMessage::ScmRights(&fds)),
                "room for one"
            );
            let byte = [IoSlice::new(&[MEMORY_BYTE])];
            match net::sendmsg(&self.fd, &byte, &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_for_memory(true, deadline)?,
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn recv_memory(&self, len: usize, write: bool) -> io::Result<Memory> {
        self.check_peer()?;
        let deadline = now() + MEMORY_TIMEOUT;
        loop {
            // Room for a second descriptor, to notice one too many.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let mut bufs = [IoSliceMut::new(&mut byte)];
            let got = match net::recvmsg(&self.fd, &mut bufs, &mut control, RecvFlags::CMSG_CLOEXEC)
            {
                Ok(got) => got,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.wait_for_memory(false, deadline)?;
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            if got.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let mut fds = control.drain().flat_map(|m| match m {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let fds = (
                fds.next(),
                fds.next(),
                got.flags.contains(ReturnFlags::CTRUNC),
            );
            let (Some(mut first), None, false) = fds else {
                return Err(not_memory(&self.peer));
            };
            return match (first.next(), first.next(), byte[0]) {
                (Some(fd), None, MEMORY_BYTE) => memory::received(fd, len, write),
                _ => Err(not_memory(&self.peer)),
            };
        }
    }
}

fn not_memory(peer: &str) -> io::Error {
    error(
        io::ErrorKind::InvalidData,
        format!("{peer}: did not pass the memory that it had to"),
    )
}

/// Polls; errors and hang-ups are for the next call to report, so they are ready.
fn wait_on(fd: BorrowedFd<'_>, for_: PollFlags, timeout: Duration) -> io::Result<bool> {
    let deadline = now().saturating_add(timeout);
    let mut left = timeout;
    loop {
        let mut fds = [PollFd::from_borrowed_fd(fd, for_)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(n) => return Ok(n > 0),
            Err(Errno::INTR) => left = deadline.saturating_sub(now()),
            Err(e) => return Err(e.into()),
        }
    }
}

fn family(addr: &SocketAddr) -> AddressFamily {
    if addr.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    }
}

/// Process and user at the other end of a Unix socket, as they were when it
/// was connected. The process is 0 if it is in another name space.
fn peer_of(fd: &OwnedFd) -> io::Result<(i32, u32)> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cred`, and `len`. Not
    // rustix's, which has no value for process 0.
    let done = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &mut len,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((cred.pid, cred.uid))
}

/// The address of a Unix socket. A path that is too long for one is reached
/// through its directory, which must stay open while the address is used.
pub fn unix_address(path: &Path) -> io::Result<(SocketAddrUnix, Option<OwnedFd>)> {
    match SocketAddrUnix::new(path) {
        Err(Errno::NAMETOOLONG) => {}
        other => return Ok((other?, None)),
    }
    let Some(name) = path.file_name() else {
        return Err(Errno::INVAL.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = descriptors::open(|| fs::openat(CWD, disk::parent(path), flags, Mode::empty()))?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
    Ok((SocketAddrUnix::new(short)?, Some(dir)))
}

/// Where peers connect to.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    address: Address,
    /// Of a Unix socket's file: device and inode, so that only ours is removed.
    file: Option<(u64, u64)>,
    closed: AtomicBool,
    /// A forked child that drops its copy must not close it for the parent.
    owner: rustix::process::Pid,
}

impl Listener {
    /// Listens on `at`. TCP port 0 stands for a free one. A Unix socket's file is open to
    /// this user only; a file left over by a process that died is replaced, one that is
    /// in use is `AddrInUse`.
    pub fn bind(at: &Address) -> io::Result<Listener> {
        let (fd, address, file) = match at {
            Address::Tcp(addr) => {
                let fd = socket(family(addr))?;
                sockopt::set_socket_reuseaddr(&fd, true)?;
                net::bind(&fd, addr)?;
                net::listen(&fd, BACKLOG)?;
                let bound = SocketAddr::try_from(net::getsockname(&fd)?)?;
                (fd, Address::Tcp(bound), None)
            }
            Address::Unix(path) => {
                let fd = socket(AddressFamily::UNIX)?;
                // The file's mode comes from the socket's, so that it never
                // has another one; less the process's umask.
                fs::fchmod(&fd, Mode::from_raw_mode(0o600))?;
                let (addr, _dir) = unix_address(path)?;
                match net::bind(&fd, &addr) {
                    Err(Errno::ADDRINUSE) => {
                        remove_stale(path, &addr)?;
                        net::bind(&fd, &addr)?;
                    }
                    other => other?,
                }
                let file = fs::lstat(path).map(|s| id(&s));
                net::listen(&fd, BACKLOG)?;
                (fd, at.clone(), Some(file?))
            }
        };
        let owner = rustix::process::getpid();
        Ok(Listener {
            fd,
            address,
            file,
            closed: AtomicBool::new(false),
            owner,
        })
    }

    /// The next connection; `None` after `timeout`. After [`Listener::close`]
    /// the error is `NotConnected`.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<Arc<dyn Conn>>> {
        let deadline = now().saturating_add(timeout);
        loop {
            if let Some(socket) = self.try_accept()? {
                return Ok(Some(Arc::new(socket)));
            }
            let left = deadline.saturating_sub(now());
            if !wait_on(self.fd.as_fd(), PollFlags::IN, left)? {
                return Ok(None);
            }
        }
    }

    /// The next connection, if there is one by now.
    pub(super) fn try_accept(&self) -> io::Result<Option<Socket>> {
        loop {
            if self.closed.load(Ordering::Acquire) {
                let text = format!("{}: closed", self.address);
                return Err(error(io::ErrorKind::NotConnected, text));
            }
            let mut from = None;
            let accepted = descriptors::open(|| {
                let (fd, who) = net::acceptfrom_with(&self.fd, FLAGS)?;
                from = who;
                Ok(fd)
            });
            match accepted {
                Ok(fd) => match Socket::accepted(fd, from, &self.address) {
                    Ok(socket) => return Ok(Some(socket)),
                    // The connection broke at once, or its peer is refused: the listener
                    // goes on.
                    Err(_) => continue,
                },
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // Linux reports what happened to the new connection here.
                Err(
                    Errno::NETDOWN
                    | Errno::PROTO
                    | Errno::NOPROTOOPT
                    | Errno::HOSTDOWN
                    | Errno::NONET
                    | Errno::HOSTUNREACH
                    | Errno::NETUNREACH,
                ) => {}
                Err(_) if self.closed.load(Ordering::Acquire) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// For polling several sockets.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Where it listens, with the port that was chosen.
    pub fn local_address(&self) -> Address {
        self.address.clone()
    }

    /// Stops listening; a thread in [`Listener::accept`] returns. Connections
    /// that were accepted stay.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let (Address::Unix(path), Some(file)) = (&self.address, self.file)
            && fs::lstat(path).is_ok_and(|s| id(&s) == file)
        {
            let _ = fs::unlink(path);
        }
        let _ = net::shutdown(&self.fd, Shutdown::Both);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.owner == rustix::process::getpid() {
            self.close();
        }
    }
}

fn id(s: &fs::Stat) -> (u64, u64) {
    (s.st_dev, s.st_ino)
}

/// Removes a Unix socket's file that nobody listens on.
fn remove_stale(path: &Path, addr: &SocketAddrUnix) -> io::Result<()> {
    let used = |why| {
        Err(error(
            io::ErrorKind::AddrInUse,
            format!("{}: {why}", path.display()),
        ))
    };
    match fs::lstat(path) {
        Ok(s) if FileType::from_raw_mode(s.st_mode).is_socket() => {}
        Ok(_) => return used("is there and is no socket"),
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e.into()),
    }
    let probe = socket(AddressFamily::UNIX)?;
    match net::connect(&probe, addr) {
        Err(Errno::CONNREFUSED) => match fs::unlink(path) {
            Err(Errno::NOENT) => Ok(()),
            other => Ok(other?),
        },
        Err(Errno::NOENT) => Ok(()),
        Ok(()) | Err(Errno::AGAIN) => used("another process listens there"),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn unix_sockets_are_for_this_user_and_root() {
        let ours = rustix::process::geteuid().as_raw();
        allowed(ours, "p").unwrap();
        allowed(0, "p").unwrap();
        for other in [ours + 1, u32::MAX, 65534] {
            let e = allowed(other, "p").unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
        }
    }

    use super::*;
    use crate::Os;
    use mojim_env::Env;
    use tempfile::TempDir;

    const LONG: Duration = Duration::from_secs(60);

    /// On an address of these tests' own: other processes' tests listen at ports of
    /// 127.0.0.1 that were free a moment ago, and knock at those at which theirs were.
    fn any_port() -> Address {
        any_port_of(2)
    }

    fn any_port_of(net: u8) -> Address {
        let last = (std::process::id() % 250) as u8 + 1;
        Address::Tcp(([127, 78, net, last], 0).into())
    }

    fn pair(at: &Address) -> (Arc<dyn Conn>, Arc<dyn Conn>) {
        let listener = Listener::bind(at).unwrap();
        let a = Os::new()
            .unwrap()
            .connect(&listener.local_address())
            .unwrap();
        let b = listener.accept(LONG).unwrap().unwrap();
        (a, b)
    }

    /// Sends all, waiting for room.
    fn send_all(conn: &dyn Conn, mut bytes: &[u8], piece: usize) {
        while !bytes.is_empty() {
            let (a, b) = bytes.split_at(bytes.len().min(piece));
            match conn.send(&[IoSlice::new(a), IoSlice::new(b)]) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    assert!(conn.wait(true, LONG).unwrap());
                }
                Err(e) => panic!("{e}"),
            }
        }
    }

    fn recv_some(conn: &dyn Conn, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            match conn.recv(bufs) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    assert!(conn.wait(false, LONG).unwrap());
                }
                other => return other,
            }
        }
    }

    fn recv_all(conn: &dyn Conn, bytes: &mut [u8]) {
        let mut at = 0;
        while at < bytes.len() {
            let rest = bytes.len() - at;
            let (a, b) = bytes[at..].split_at_mut(rest / 2);
            let n = if at % 2 == 0 {
                recv_some(conn, &mut [IoSliceMut::new(a), IoSliceMut::new(b)]).unwrap()
            } else {
                recv_some(conn, &mut [IoSliceMut::new(&mut bytes[at..])]).unwrap()
            };
            assert_ne!(n, 0, "closed too early");
            at += n;
        }
    }

    fn large_transfer(at: &Address) {
        let (a, b) = pair(at);
        let bytes: Vec<u8> = (0..8 << 20).map(|i: usize| (i / 251 + i) as u8).collect();
        // Nobody receives yet: sends become short, then impossible.
        let mut full = 0;
        let e = loop {
            match a.send(&[IoSlice::new(&bytes)]) {
                Ok(n) => full += n,
                Err(e) => break e,
            }
        };
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
        assert!(!full.is_multiple_of(bytes.len()), "the last send was short");
        recv_all(&*b, &mut vec![0; full]);
        std::thread::scope(|s| {
            s.spawn(|| send_all(&*a, &bytes, 1000));
            let mut got = vec![0; bytes.len()];
            recv_all(&*b, &mut got);
            assert!(got == bytes);
        });
        // Both ways, and the end.
        send_all(&*b, b"bye", 1);
        let mut got = [0; 3];
        recv_all(&*a, &mut got);
        assert_eq!(&got, b"bye");
        b.close();
        assert_eq!(
            recv_some(&*a, &mut [IoSliceMut::new(&mut [0; 9])]).unwrap(),
            0
        );
        assert!(b.send(&[IoSlice::new(b"x")]).is_err());
    }

    #[test]
    fn large_transfers_over_tcp() {
        large_transfer(&any_port());
    }

    #[test]
    fn large_transfers_over_a_unix_socket() {
        let dir = TempDir::new().unwrap();
        large_transfer(&Address::Unix(dir.path().join("s")));
    }

    #[test]
    fn many_buffers_are_taken_in_part() {
        let (a, b) = pair(&any_port());
        let bufs = vec![IoSlice::new(b"x"); 3000];
        assert_eq!(a.send(&bufs).unwrap(), MOST_BUFFERS);
        recv_all(&*b, &mut [0; MOST_BUFFERS]);
        assert_eq!(
            b.recv(&mut [IoSliceMut::new(&mut [0])]).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        assert!(!b.wait(false, Duration::from_millis(1)).unwrap());
        assert!(b.wait(true, LONG).unwrap());
        assert!(b.peer().starts_with("127.0.0.1:"), "{}", b.peer());
    }

    /// Who accepts learns where the peer on this host sent, which may have moved since.
    #[test]
    fn the_peers_processor_is_known_over_loopback() {
        let (a, b) = pair(&any_port());
        let on = |processor: usize| {
            let (a, b) = (a.clone(), b.clone());
            std::thread::spawn(move || {
                let mut one = rustix::thread::CpuSet::new();
                one.set(processor);
                rustix::thread::sched_setaffinity(None, &one).unwrap();
                send_all(&*a, b"x", 1);
                recv_all(&*b, &mut [0]);
                assert_eq!(b.processor(), Some(processor));
                assert_eq!(a.processor(), None);
            })
            .join()
            .unwrap();
        };
        let all = rustix::thread::sched_getaffinity(None).unwrap();
        (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|i| all.is_set(*i))
            .for_each(on);
        let dir = TempDir::new().unwrap();
        let (a, b) = pair(&Address::Unix(dir.path().join("s")));
        send_all(&*a, b"x", 1);
        recv_all(&*b, &mut [0]);
        assert_eq!(b.processor(), None);
    }

    #[test]
    fn a_refused_connection_is_an_error_each_time() {
        // Nobody listens there any more, and no other test takes the port.
        let address = Listener::bind(&any_port_of(3)).unwrap().local_address();
        let refused = |e: io::Error| assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused);
        match Os::new().unwrap().connect(&address) {
            Err(e) => refused(e),
            Ok(conn) => {
                refused(recv_some(&*conn, &mut [IoSliceMut::new(&mut [0])]).unwrap_err());
                refused(conn.send(&[IoSlice::new(b"x")]).unwrap_err());
                refused(recv_some(&*conn, &mut [IoSliceMut::new(&mut [0])]).unwrap_err());
                assert_eq!(conn.peer(), address.to_string());
            }
        }
    }

    #[test]
    fn while_connecting_nothing_can_be_sent_or_received() {
        // Documentation addresses: no answer comes, or the host is unreachable.
        let to = Address::Tcp(([192, 0, 2, 1], 9).into());
        let Ok(conn) = Os::new().unwrap().connect(&to) else {
            return;
        };
        if let Err(e) = conn.send(&[IoSlice::new(b"x")])
            && e.kind() == io::ErrorKind::WouldBlock
        {
            std::thread::scope(|s| {
                let waiter = s.spawn(|| conn.wait(true, LONG).unwrap());
                conn.close();
                assert!(waiter.join().unwrap());
            });
            let e = conn.recv(&mut [IoSliceMut::new(&mut [0])]).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::NotConnected);
        }
    }

    #[test]
    fn close_wakes_who_waits() {
        let dir = TempDir::new().unwrap();
        for at in [any_port(), Address::Unix(dir.path().join("s"))] {
            let (a, _b) = pair(&at);
            std::thread::scope(|s| {
                let waiter = s.spawn(|| a.wait(false, LONG).unwrap());
                a.close();
                assert!(waiter.join().unwrap());
            });
            let listener = Listener::bind(&at).unwrap();
            assert!(listener.accept(Duration::ZERO).unwrap().is_none());
            std::thread::scope(|s| {
                let waiter = s.spawn(|| listener.accept(LONG).err().unwrap().kind());
                listener.close();
                assert_eq!(waiter.join().unwrap(), io::ErrorKind::NotConnected);
            });
            if matches!(at, Address::Unix(_)) {
                assert!(Os::new().unwrap().connect(&at).is_err());
            }
        }
    }

    #[test]
    fn unix_sockets_replace_stale_files_only() {
        let dir = TempDir::new().unwrap();
        // Longer than a socket address.
        let long = "d".repeat(120);
        std::fs::create_dir(dir.path().join(&long)).unwrap();
        for path in [dir.path().join("s"), dir.path().join(&long).join("s")] {
            let at = Address::Unix(path.clone());
            let first = Listener::bind(&at).unwrap();
            assert_eq!(fs::stat(&path).unwrap().st_mode & 0o777, 0o600);
            assert_eq!(
                Listener::bind(&at).unwrap_err().kind(),
                io::ErrorKind::AddrInUse
            );
            // What a killed process leaves behind: the file, without a listener.
            std::fs::rename(&path, dir.path().join("kept")).unwrap();
            drop(first);
            std::fs::rename(dir.path().join("kept"), &path).unwrap();
            let second = Listener::bind(&at).unwrap();
            let a = Os::new().unwrap().connect(&at).unwrap();
            let b = second.accept(LONG).unwrap().unwrap();
            let us = format!("process {} of user", std::process::id());
            assert!(b.peer().starts_with(&us), "{}", b.peer());
            send_all(&*a, b"hi", 9);
            recv_all(&*b, &mut [0; 2]);
            drop(second);
            assert!(!path.exists());
            std::fs::write(&path, b"a file").unwrap();
            assert_eq!(
                Listener::bind(&at).unwrap_err().kind(),
                io::ErrorKind::AddrInUse
            );
            assert_eq!(std::fs::read(&path).unwrap(), b"a file");
        }
    }

    #[test]
    fn memory_is_passed_between_threads() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let (a, b) = pair(&Address::Unix(dir.path().join("s")));
        let ring = os.anonymous_memory(5000).unwrap();
        let log = os.memory(&dir.path().join("log"), 100).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                let theirs = b.recv_memory(5000, true).unwrap();
                // SAFETY: in the memory, which the other thread does not use
                // before it receives a byte.
                unsafe { theirs.ptr().add(4999).write(7) };
                send_all(&*b, b".", 9);
                let view = b.recv_memory(100, false).unwrap();
                // SAFETY: as above.
                assert_eq!(unsafe { view.ptr().read() }, 3);
                send_all(&*b, b".", 9);
            });
            a.send_memory(&ring).unwrap();
            recv_all(&*a, &mut [0]);
            // SAFETY: in the memory, and the other thread is done with it.
            unsafe {
                assert_eq!(ring.ptr().add(4999).read(), 7);
                log.ptr().write(3);
            }
            a.send_memory(&log).unwrap();
            recv_all(&*a, &mut [0]);
        });
        // Named memory does not go out writable.
        a.send_memory(&log).unwrap();
        assert_eq!(
            b.recv_memory(100, true).err().unwrap().kind(),
            io::ErrorKind::PermissionDenied
        );
        // Another length than agreed.
        a.send_memory(&ring).unwrap();
        assert_eq!(
            b.recv_memory(4999, true).err().unwrap().kind(),
            io::ErrorKind::InvalidData
        );
        // A byte without memory; then the end.
        send_all(&*a, b"M", 9);
        assert_eq!(
            b.recv_memory(100, true).err().unwrap().kind(),
            io::ErrorKind::InvalidData
        );
        // Ordinary bytes around it are not touched.
        send_all(&*a, b"before", 9);
        a.send_memory(&ring).unwrap();
        send_all(&*a, b"after", 9);
        recv_all(&*b, &mut [0; 6]);
        b.recv_memory(5000, false).unwrap();
        let mut after = [0; 5];
        recv_all(&*b, &mut after);
        assert_eq!(&after, b"after");
        a.close();
        assert_eq!(
            b.recv_memory(100, true).err().unwrap().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn memory_is_not_passed_over_tcp() {
        let os = Os::new().unwrap();
        let (a, _b) = pair(&any_port());
        let m = os.anonymous_memory(10).unwrap();
        assert_eq!(
            a.send_memory(&m).unwrap_err().kind(),
            io::ErrorKind::Unsupported
        );
        assert_eq!(
            a.recv_memory(10, true).err().unwrap().kind(),
            io::ErrorKind::Unsupported
        );
    }
}
