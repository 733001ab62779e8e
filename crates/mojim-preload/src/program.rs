//! Whether a file, when it is executed, runs with the libraries of LD_PRELOAD.
//!
//! Owns what is read of it: its mode, its capabilities, the line of a script, the ELF header and
//! interpreter. It is compiled into the library, which asks for what a program executes. It is
//! also compiled into `mojim run`, which asks for the program itself.
//!
//! Invariants:
//!
//! - No allocation and no function that the library interposes, unless the answer
//!   is a refusal: this runs between vfork and exec, and in signal handlers.
//! - A file of which something cannot be found out is refused. A file that the kernel will refuse
//!   by itself is not refused here.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};

/// The dynamic loader that knows LD_PRELOAD, and that these libraries are made for.
#[cfg(target_arch = "x86_64")]
const LOADER: &[u8] = b"ld-linux-x86-64.so.2";
#[cfg(target_arch = "aarch64")]
const LOADER: &[u8] = b"ld-linux-aarch64.so.1";

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = libc::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = libc::EM_AARCH64;

/// What `mojim run --allow-unguarded` sets.
pub const ALLOWED: &CStr = c"MOJIM_ALLOW_UNGUARDED";

/// Scripts that are the interpreters of scripts: as many as the kernel follows.
const DEPTH: u32 = 5;
const HEADER: usize = 256;

/// Why a program is not executed.
#[derive(Clone, Copy)]
pub enum Refused {
    Static,
    OtherLoader,
    Privileged,
    /// It cannot be read; the errno.
    Unknown(c_int),
}

impl Refused {
    /// For the caller of exec.
    #[allow(dead_code)]
    pub fn errno(self) -> c_int {
        match self {
            Refused::Unknown(e) => e,
            _ => libc::EACCES,
        }
    }

    /// For a person.
    pub fn text(self, path: &CStr) -> String {
        let why = match self {
            Refused::Static => "it is linked statically, without an ELF interpreter",
            Refused::OtherLoader => {
                "its loader belongs to another C library, and does not load Mojim's libraries"
            }
            Refused::Privileged => {
                "with its set-user-ID, set-group-ID or capabilities the loader takes no LD_PRELOAD"
            }
            Refused::Unknown(_) => "it cannot be read, so its linking is unknown",
        };
        format!(
            "{} is not started: {why}, so it would reach the volume's files past Mojim \
             (`mojim run --allow-unguarded` starts such programs)",
            path.to_string_lossy()
        )
    }
}

/// A descriptor that is closed on drop.
struct File(c_int);

impl File {
    fn open(dirfd: c_int, path: &CStr) -> Result<File, c_int> {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
        // SAFETY: a C string.
        let fd = unsafe { libc::syscall(libc::SYS_openat, dirfd, path.as_ptr(), flags) };
        if fd < 0 {
            Err(errno())
        } else {
            Ok(File(fd as c_int))
        }
    }

    /// Reads as many bytes as there are, up to the buffer's length.
    fn read(&self, buf: &mut [u8], at: u64) -> Result<usize, c_int> {
        // SAFETY: the buffer's own length.
        let n = unsafe {
            let to = buf.as_mut_ptr().cast::<c_void>();
            libc::syscall(libc::SYS_pread64, self.0, to, buf.len(), at)
        };
        if n < 0 { Err(errno()) } else { Ok(n as usize) }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: it is ours.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

fn errno() -> c_int {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Refuses a program that would not run with LD_PRELOAD.
pub fn check(dirfd: c_int, path: &CStr) -> Result<(), Refused> {
    check_at(dirfd, path, DEPTH)
}

fn check_at(dirfd: c_int, path: &CStr, depth: u32) -> Result<(), Refused> {
    let file = match File::open(dirfd, path) {
        Ok(file) => file,
        Err(e @ (libc::EACCES | libc::EPERM)) if is_executable(dirfd, path) => {
            return Err(Refused::Unknown(e));
        }
        Err(e @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => return Err(Refused::Unknown(e)),
        Err(_) => return Ok(()), // exec will say the same
    };
    let mut st = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: room for the answer.
    if unsafe { libc::fstat(file.0, st.as_mut_ptr()) } != 0 {
        return Err(Refused::Unknown(errno()));
    }
    // SAFETY: filled in.
    let st = unsafe { st.assume_init() };
    if st.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(()); // only a regular file is executed
    }
    if is_privileged(&file, &st) {
        return Err(Refused::Privileged);
    }
    let mut head = [0; HEADER];
    let n = file.read(&mut head, 0).map_err(Refused::Unknown)?;
    let head = &head[..n];
    if let Some(line) = head.strip_prefix(b"#!") {
        let end = line.iter().position(|&b| b == b'\n').unwrap_or(line.len());
        let mut words = line[..end].split(|&b| b == b' ' || b == b'\t' || b == 0);
        let Some(word) = words.find(|w| !w.is_empty()) else {
            return Ok(());
        };
        let mut name = [0; HEADER];
        name[..word.len()].copy_from_slice(word);
        return match CStr::from_bytes_until_nul(&name) {
            Ok(name) if depth > 0 => check_at(libc::AT_FDCWD, name, depth - 1),
            _ => Ok(()), // ELOOP
        };
    }
    if !head.starts_with(b"\x7fELF") {
        return Ok(()); // ENOEXEC
    }
    check_elf(&file, head)
}

fn is_executable(dirfd: c_int, path: &CStr) -> bool {
    // SAFETY: a C string.
    unsafe { libc::syscall(libc::SYS_faccessat, dirfd, path.as_ptr(), libc::X_OK) == 0 }
}

/// Whether the kernel would tell the loader to take nothing from the environment.
fn is_privileged(file: &File, st: &libc::stat) -> bool {
    // SAFETY: no preconditions.
    let (uid, gid, mut euid, mut egid) = unsafe {
        (
            libc::getuid(),
            libc::getgid(),
            libc::geteuid(),
            libc::getegid(),
        )
    };
    if st.st_mode & libc::S_ISUID != 0 {
        euid = st.st_uid;
    }
    const SET_GID: u32 = libc::S_ISGID | libc::S_IXGRP;
    if st.st_mode & SET_GID == SET_GID {
        egid = st.st_gid;
    }
    // SAFETY: C strings; nothing is written to an empty buffer.
    let capabilities = uid != 0
        && unsafe {
            let name: *const c_char = c"security.capability".as_ptr();
            libc::fgetxattr(file.0, name, std::ptr::null_mut(), 0) > 0
        };
    euid != uid || egid != gid || capabilities
}

fn check_elf(file: &File, head: &[u8]) -> Result<(), Refused> {
    const PT_INTERP: u32 = 3;
    const ENTRY: usize = 56;
    let half = |b: &[u8], at: usize| b.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    let word = |b: &[u8], at: usize| {
        let b: Option<[u8; 8]> = b.get(at..at + 8).and_then(|b| b.try_into().ok());
        b.map(u64::from_le_bytes)
    };
    let is_ours = head.get(4) == Some(&libc::ELFCLASS64) && half(head, 18) == Some(MACHINE);
    let (Some(at), Some(ENTRY), Some(n), true) = (
        word(head, 32),
        half(head, 54).map(usize::from),
        half(head, 56),
        is_ours,
    ) else {
        return Err(Refused::OtherLoader);
    };
    for i in 0..u64::from(n) {
        let mut entry = [0; ENTRY];
        let place = at.saturating_add(i * ENTRY as u64);
        let got = file.read(&mut entry, place).map_err(Refused::Unknown)?;
        if got != ENTRY {
            break;
        }
        if u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) != PT_INTERP {
            continue;
        }
        let mut name = [0; HEADER];
        let (from, len) = (word(&entry, 8), word(&entry, 32));
        let len = usize::try_from(len.unwrap_or(0))
            .unwrap_or(HEADER)
            .min(HEADER);
        let got = file.read(&mut name[..len], from.unwrap_or(0));
        let name = &name[..got.map_err(Refused::Unknown)?];
        let name = name.split(|&b| b == 0).next().unwrap_or_default();
        return match name.rsplit(|&b| b == b'/').next() {
            Some(LOADER) => Ok(()),
            _ => Err(Refused::OtherLoader),
        };
    }
    Err(Refused::Static)
}

/// The file that execvp finds for a name, as far as it can be told.
pub fn find<'a>(
    name: &'a CStr,
    path: Option<&CStr>,
    place: &'a mut [u8; libc::PATH_MAX as usize],
) -> Option<&'a CStr> {
    let bytes = name.to_bytes();
    if bytes.contains(&b'/') {
        return Some(name);
    }
    if bytes.is_empty() {
        return None;
    }
    let path = path.map_or(&b"/bin:/usr/bin"[..], CStr::to_bytes);
    let mut end = None;
    for dir in path.split(|&b| b == b':') {
        let dir = if dir.is_empty() { b"." } else { dir };
        let len = dir.len() + 1 + bytes.len();
        if len >= place.len() {
            continue;
        }
        place[..dir.len()].copy_from_slice(dir);
        place[dir.len()] = b'/';
        place[dir.len() + 1..len].copy_from_slice(bytes);
        place[len] = 0;
        let Ok(found) = CStr::from_bytes_with_nul(&place[..=len]) else {
            continue;
        };
        if is_executable(libc::AT_FDCWD, found) && is_file(found) {
            end = Some(len);
            break;
        }
    }
    CStr::from_bytes_with_nul(&place[..=end?]).ok()
}

fn is_file(path: &CStr) -> bool {
    let mut st = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: a C string, and room for the answer, which is read only if there is one.
    unsafe {
        let r: c_long = libc::stat(path.as_ptr(), st.as_mut_ptr()).into();
        r == 0 && st.assume_init().st_mode & libc::S_IFMT == libc::S_IFREG
    }
}
