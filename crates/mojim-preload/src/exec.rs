//! Programs that this one executes: they run with these libraries, or not at all.
//!
//! Owns what the exec family, posix_spawn, system and popen mean:
//!
//! - The environment that `mojim run` made is put back where it was dropped.
//! - A program that would run without the libraries is refused with EACCES (`program`).
//!
//! Invariants:
//!
//! - The exec and spawn functions allocate nothing in the C library unless the call is
//!   refused: they are called between vfork and exec.
//! - Settings of another `mojim run` (a program's own, for what it starts) stay.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::panic::catch_unwind;
use std::sync::OnceLock;

use crate::inside::on;
use crate::program;
use crate::real::{self, exports, real, say};

type Strings = *const *const c_char;

unsafe extern "C" {
    static mut environ: Strings;
}

const PRELOAD: &[u8] = b"LD_PRELOAD";
/// Both must be set for a program to have a volume.
const NEEDED: [&[u8]; 2] = [b"MOJIM_CONFIG", b"MOJIM_NODE"];
const ALL: [&[u8]; 5] = [
    NEEDED[0],
    NEEDED[1],
    b"MOJIM_VOLUME",
    b"MOJIM_READ",
    b"MOJIM_ALLOW_UNGUARDED",
];

/// The environment as it was when the program started.
struct Start {
    /// LD_PRELOAD, with its name.
    preload: CString,
    /// Those of `ALL` that were set, with their names.
    settings: Vec<CString>,
    /// Programs that run without the libraries may be executed.
    allows: bool,
}

static START: OnceLock<Start> = OnceLock::new();

/// Remembers the environment. Called before main, if the library is on.
pub fn remember() {
    let with_name = |name: &&[u8]| {
        let name = CString::new(*name).ok()?;
        // SAFETY: C strings; the environment is not changed before main.
        let value = unsafe {
            let v = libc::getenv(name.as_ptr());
            (!v.is_null() && *v != 0).then(|| CStr::from_ptr(v))
        }?;
        CString::new([name.to_bytes(), b"=", value.to_bytes()].concat()).ok()
    };
    let settings: Vec<_> = ALL.iter().filter_map(with_name).collect();
    let allowed = program::ALLOWED.to_bytes();
    START.get_or_init(|| Start {
        preload: with_name(&PRELOAD).unwrap_or_default(),
        allows: settings.iter().any(|s| value(s, allowed).is_some()),
        settings,
    });
}

/// The value in `NAME=value`, if that is the name.
fn value<'a>(s: &'a CStr, name: &[u8]) -> Option<&'a [u8]> {
    s.to_bytes().strip_prefix(name)?.strip_prefix(b"=")
}

/// The strings of a list that ends with a null pointer.
///
/// # Safety
/// `list` is null, or such a list of C strings.
unsafe fn each<'a>(list: Strings) -> impl Iterator<Item = &'a CStr> + Clone {
    // SAFETY: the caller's promise.
    let at = move |i: usize| unsafe {
        let p = if list.is_null() {
            list.cast()
        } else {
            *list.add(i)
        };
        (!p.is_null()).then(|| CStr::from_ptr(p))
    };
    (0..).map_while(at)
}

/// Whether an environment lacks LD_PRELOAD, and whether it lacks the settings.
fn lacks<'a>(env: impl Iterator<Item = &'a CStr>) -> (bool, bool) {
    let (mut preload, mut needed) = (false, [false; 2]);
    for s in env {
        if let Some(v) = value(s, PRELOAD) {
            const OWN: &[u8] = b"libmojim_preload.so";
            preload = v.windows(OWN.len()).any(|w| w == OWN);
        }
        for (has, name) in needed.iter_mut().zip(NEEDED) {
            *has |= value(s, name).is_some_and(|v| !v.is_empty());
        }
    }
    (!preload, needed != [true; 2])
}

/// A mapping of its own, since the caller may not allocate. Unmapped on drop; an exec
/// that succeeds after vfork leaves it mapped.
struct Pages(*mut c_void, usize);

impl Pages {
    fn new(n: usize) -> Result<Pages, c_int> {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping.
        let p = unsafe { real::mmap(std::ptr::null_mut(), n, prot, flags, -1, 0) };
        if p == libc::MAP_FAILED {
            Err(libc::ENOMEM)
        } else {
            Ok(Pages(p, n))
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: made above.
        unsafe { real::munmap(self.0, self.1) };
    }
}

/// An environment with the start's settings in it.
struct Env {
    list: Strings,
    /// Where it lies, unless it is the program's own.
    _pages: Option<Pages>,
}

impl Env {
    /// # Safety
    /// `env` is null, or an environment.
    unsafe fn of(env: Strings) -> Result<Env, c_int> {
        let Some(start) = START.get() else {
            return Ok(Env {
                list: env,
                _pages: None,
            });
        };
        // SAFETY: the caller's promise.
        let given = unsafe { each(env) };
        let (preload, settings) = lacks(given.clone());
        if !preload && !settings {
            return Ok(Env {
                list: env,
                _pages: None,
            });
        }
        let drops = |s: &CStr| {
            preload && value(s, PRELOAD).is_some()
                || settings && ALL.iter().any(|n| value(s, n).is_some())
        };
        let theirs = given.clone().find_map(|s| value(s, PRELOAD)).unwrap_or(b"");
        let own = start.preload.to_bytes();
        let text = own.len() + 1 + theirs.len() + 1;
        let slots = given.clone().count() + start.settings.len() + 2;
        let pages = Pages::new(slots * size_of::<usize>() + text)?;
        let (list, mut n) = (pages.0.cast::<*const c_char>(), 0);
        let mut push = |p: *const c_char| {
            debug_assert!(n < slots);
            // SAFETY: one of the slots: as many as strings, and the null.
            unsafe { list.add(n).write(p) };
            n += 1;
        };
        given.filter(|s| !drops(s)).for_each(|s| push(s.as_ptr()));
        if settings {
            start.settings.iter().for_each(|s| push(s.as_ptr()));
        }
        if preload && !own.is_empty() {
            // SAFETY: behind the slots there is room for it; the pages are zeros.
            unsafe {
                let at = list.add(slots).cast::<u8>();
                own.as_ptr().copy_to_nonoverlapping(at, own.len());
                if !theirs.is_empty() {
                    at.add(own.len()).write(b':');
                    let after = at.add(own.len() + 1);
                    theirs.as_ptr().copy_to_nonoverlapping(after, theirs.len());
                }
                push(at.cast());
            }
        }
        push(std::ptr::null());
        Ok(Env {
            list,
            _pages: Some(pages),
        })
    }
}

/// Refuses what would run without the libraries, with an errno and a line.
fn check(dirfd: c_int, path: &CStr) -> Result<(), c_int> {
    if START.get().is_none_or(|s| s.allows) {
        return Ok(());
    }
    let refused = match catch_unwind(|| program::check(dirfd, path)) {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(refused)) => refused,
        Err(_) => program::Refused::Unknown(libc::EIO),
    };
    say(&refused.text(path));
    Err(refused.errno())
}

/// Checks, and gives the environment to execute `path` with.
///
/// # Safety
/// The path is null or a C string, `env` null or an environment.
unsafe fn prepare(
    dirfd: c_int,
    path: *const c_char,
    search: bool,
    env: Strings,
) -> Result<Env, c_int> {
    if !path.is_null() {
        // SAFETY: the caller's promise.
        let path = unsafe { CStr::from_ptr(path) };
        let mut place = [0; libc::PATH_MAX as usize];
        let found = if search {
            // SAFETY: C strings; the program does not change its environment meanwhile.
            let dirs = unsafe {
                let v = libc::getenv(c"PATH".as_ptr());
                (!v.is_null()).then(|| CStr::from_ptr(v))
            };
            program::find(path, dirs, &mut place)
        } else {
            Some(path)
        };
        if let Some(found) = found {
            check(dirfd, found)?;
        }
    }
    // SAFETY: the caller's promise.
    unsafe { Env::of(env) }
}

/// An exec call, made by `call`. Returns only if it failed.
///
/// # Safety
/// As `prepare`.
unsafe fn execute(
    dirfd: c_int,
    path: *const c_char,
    search: bool,
    env: Strings,
    call: impl FnOnce(Strings) -> c_int,
) -> c_int {
    if !on() {
        return call(env);
    }
    // SAFETY: the caller's promise.
    match unsafe { prepare(dirfd, path, search, env) } {
        Ok(env) => {
            let r = call(env.list);
            let errno = real::errno();
            drop(env);
            real::set_errno(errno);
            r
        }
        Err(errno) => {
            real::set_errno(errno);
            -1
        }
    }
}

/// The program's own environment.
fn own() -> Strings {
    // SAFETY: the pointer alone is read, as exec does.
    unsafe { (&raw const environ).read() }
}

const CWD: c_int = libc::AT_FDCWD;

unsafe fn exec(path: *const c_char, argv: Strings, env: Strings) -> c_int {
    let call = |env| real!(execve(path => *const c_char, argv => Strings, env => Strings) -> c_int);
    // SAFETY: the program's.
    unsafe { execute(CWD, path, false, env, call) }
}

unsafe fn exec_search(file: *const c_char, argv: Strings, env: Strings) -> c_int {
    let call =
        |env| real!(execvpe(file => *const c_char, argv => Strings, env => Strings) -> c_int);
    // SAFETY: the program's.
    unsafe { execute(CWD, file, true, env, call) }
}

/// posix_spawn: errors are returned, errno stays.
unsafe fn spawn(
    path: *const c_char,
    search: bool,
    env: Strings,
    call: impl FnOnce(Strings) -> c_int,
) -> c_int {
    if !on() {
        return call(env);
    }
    let before = real::errno();
    // SAFETY: the program's.
    let r = match unsafe { prepare(CWD, path, search, env) } {
        Ok(env) => call(env.list),
        Err(errno) => errno,
    };
    real::set_errno(before);
    r
}

/// Restores this process's environment, which the C library passes to what it executes
/// itself.
fn put_back() {
    let Some(start) = START.get().filter(|_| on()) else {
        return;
    };
    // SAFETY: the program's environment.
    let (preload, settings) = lacks(unsafe { each(own()) });
    let set = |s: &CString| {
        let (Some(at), s) = (s.to_bytes().iter().position(|&b| b == b'='), s.to_bytes()) else {
            return;
        };
        if let (Ok(name), Ok(value)) = (CString::new(&s[..at]), CString::new(&s[at + 1..])) {
            // SAFETY: C strings, in the thread that uses the environment.
            unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) };
        }
    };
    if preload {
        set(&start.preload);
    }
    if settings {
        start.settings.iter().for_each(set);
    }
}

/// The arguments of a variadic function, from its registers and its stack.
struct Variadic(*const *const c_char, *const *const c_char);

impl Variadic {
    #[cfg(target_arch = "x86_64")]
    const REGISTERS: usize = 6;
    #[cfg(target_arch = "aarch64")]
    const REGISTERS: usize = 8;

    /// # Safety
    /// The function has more than `i` arguments.
    unsafe fn get(&self, i: usize) -> *const c_char {
        // SAFETY: the caller's promise.
        unsafe {
            match i.checked_sub(Self::REGISTERS) {
                None => *self.0.add(i),
                Some(i) => *self.1.add(i),
            }
        }
    }
}

/// execl and its kin: which one, by number.
unsafe extern "C" fn exec_list(regs: Strings, stack: Strings, which: usize) -> c_int {
    const FEW: usize = 64;
    let all = Variadic(regs, stack);
    // SAFETY: execl(3): a path, arguments, a null, and for execle the environment.
    unsafe {
        let mut n = 0;
        while !all.get(1 + n).is_null() {
            n += 1;
        }
        let mut few: [*const c_char; FEW] = [std::ptr::null(); FEW];
        let pages = match n < FEW {
            true => None,
            false => match Pages::new((n + 1) * size_of::<usize>()) {
                Ok(pages) => Some(pages),
                Err(errno) => {
                    real::set_errno(errno);
                    return -1;
                }
            },
        };
        let argv = pages
            .as_ref()
            .map_or(few.as_mut_ptr(), |p| p.0.cast::<*const c_char>());
        for i in 0..=n {
            argv.add(i).write(all.get(1 + i));
        }
        let path = all.get(0);
        match which {
            0 => exec(path, argv, own()),
            1 => exec_search(path, argv, own()),
            _ => exec(path, argv, all.get(2 + n).cast()),
        }
    }
}

/// Defines a variadic function of this name: it stores its argument registers, and passes
/// `exec_list` their address and that of the arguments on the stack.
macro_rules! variadic {
    ($($name:ident $which:literal)+) => {$(
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() -> c_int {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                ".cfi_startproc",
                "sub rsp, 56",
                ".cfi_adjust_cfa_offset 56",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov rdi, rsp",
                "lea rsi, [rsp + 64]",
                concat!("mov edx, ", $which),
                "call {}",
                "add rsp, 56",
                ".cfi_adjust_cfa_offset -56",
                "ret",
                ".cfi_endproc",
                sym exec_list,
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                ".cfi_startproc",
                "stp x29, x30, [sp, #-80]!",
                ".cfi_def_cfa_offset 80",
                ".cfi_offset x29, -80",
                ".cfi_offset x30, -72",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "add x0, sp, #16",
                "add x1, sp, #80",
                concat!("mov x2, #", $which),
                "bl {}",
                "ldp x29, x30, [sp], #80",
                "ret",
                ".cfi_endproc",
                sym exec_list,
            );
        }
    )+};
}

variadic! {
    execl "0"
    execlp "1"
    execle "2"
}

exports! { |pass|
    fn system(command: *const c_char) -> c_int {
        put_back();
        pass()
    }
    fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
        put_back();
        pass()
    }
    // Under another root the volume's files have other names, and these libraries and the
    // configuration have none.
    fn chroot(path: *const c_char) -> c_int {
        if on() {
            say("chroot is refused under `mojim run --preload`: the volume's files could not be told from others; run mojim in there");
            real::set_errno(libc::EPERM);
            return -1;
        }
        pass()
    }
}

exports! {
    fn execve(path: *const c_char, argv: Strings, env: Strings) -> c_int {
        // SAFETY: the program's.
        unsafe { exec(path, argv, env) }
    }
    fn execv(path: *const c_char, argv: Strings) -> c_int {
        // SAFETY: the program's.
        unsafe { exec(path, argv, own()) }
    }
    fn execvp(file: *const c_char, argv: Strings) -> c_int {
        // SAFETY: the program's.
        unsafe { exec_search(file, argv, own()) }
    }
    fn execvpe(file: *const c_char, argv: Strings, env: Strings) -> c_int {
        // SAFETY: the program's.
        unsafe { exec_search(file, argv, env) }
    }
    fn execveat(dirfd: c_int, path: *const c_char, argv: Strings, env: Strings, flags: c_int) -> c_int {
        // SAFETY: the program's.
        if flags & libc::AT_EMPTY_PATH != 0 && !path.is_null() && unsafe { *path } == 0 {
            // SAFETY: the program's.
            return unsafe { fexecve(dirfd, argv, env) };
        }
        // SAFETY: the program's.
        unsafe {
            execute(dirfd, path, false, env, |env| {
                libc::syscall(libc::SYS_execveat, dirfd, path, argv, env, c_long::from(flags)) as c_int
            })
        }
    }
    fn fexecve(fd: c_int, argv: Strings, env: Strings) -> c_int {
        let call = |env| real!(fexecve(fd => c_int, argv => Strings, env => Strings) -> c_int);
        let mut name: [c_char; 32] = [0; 32];
        // SAFETY: the buffer's own length, which a number does not fill.
        unsafe {
            libc::snprintf(name.as_mut_ptr(), name.len(), c"/proc/self/fd/%d".as_ptr(), fd);
            execute(CWD, name.as_ptr(), false, env, call)
        }
    }
    fn posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void, argv: Strings, env: Strings) -> c_int {
        let call = |env| real!(posix_spawn(
            pid => *mut libc::pid_t, path => *const c_char, actions => *const c_void,
            attr => *const c_void, argv => Strings, env => Strings
        ) -> c_int);
        // SAFETY: the program's.
        unsafe { spawn(path, false, env, call) }
    }
    fn posix_spawnp(pid: *mut libc::pid_t, file: *const c_char, actions: *const c_void, attr: *const c_void, argv: Strings, env: Strings) -> c_int {
        let call = |env| real!(posix_spawnp(
            pid => *mut libc::pid_t, file => *const c_char, actions => *const c_void,
            attr => *const c_void, argv => Strings, env => Strings
        ) -> c_int);
        // SAFETY: the program's.
        unsafe { spawn(file, true, env, call) }
    }
}
