//! The signals that ask a process to end, and a node to read its configuration
//! again, taken by waiting for them rather than by handlers.
//!
//! SIGHUP is none of them where whoever started this process has it ignored, as `nohup` does: a signal that
//! is waited for comes all the same.
//!
//! Invariant: they are blocked in the main thread before any other thread
//! starts, so that only [`wait`] ever receives one. A child that is to be
//! stopped by them is started with [`unblock`].

use std::io;
use std::mem::MaybeUninit;

/// The signal on which a node reads its configuration again; the others end it.
pub const RELOAD: i32 = libc::SIGUSR1;

const TAKEN: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, RELOAD];

/// What a process passes on that stands for a program: these, and others that programs know.
const PASSED_ON: [libc::c_int; 6] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    RELOAD,
    libc::SIGQUIT,
    libc::SIGUSR2,
];

fn set() -> libc::sigset_t {
    set_of(&TAKEN)
}

fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    let is_heard = |s: libc::c_int| s != libc::SIGHUP || !is_ignored(s);
    // SAFETY: sigemptyset initialises the set; the numbers are valid signals.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for s in signals.iter().filter(|s| is_heard(**s)) {
            libc::sigaddset(set.as_mut_ptr(), *s);
        }
        set.assume_init()
    }
}

/// Whether a signal is ignored here. May be called between fork and exec.
fn is_ignored(signal: libc::c_int) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: asks for what is done at a valid signal; there is room for that, and it is filled in.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr()) == 0
            && now.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn mask(how: libc::c_int, signals: &[libc::c_int]) -> io::Result<()> {
    let set = set_of(signals);
    // SAFETY: the set is initialised; no old mask is asked for.
    match unsafe { libc::pthread_sigmask(how, &set, std::ptr::null_mut()) } {
        0 => Ok(()),
        e => Err(io::Error::from_raw_os_error(e)),
    }
}

/// Blocks these signals in this thread and in those that it starts.
pub fn block() -> io::Result<()> {
    mask(libc::SIG_BLOCK, &TAKEN)
}

/// Unblocks these signals. May be called between fork and exec.
pub fn unblock() -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, &TAKEN)
}

/// As [`block`], of all that a program is to get from this process.
pub fn block_passed_on() -> io::Result<()> {
    mask(libc::SIG_BLOCK, &PASSED_ON)
}

/// The reverse. May be called between fork and exec.
pub fn unblock_passed_on() -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, &PASSED_ON)
}

/// A signal for the program.
#[derive(Clone, Copy)]
pub struct Came {
    /// Its number.
    pub number: i32,
    /// Somebody typed it at the terminal, which sends it to all processes of its foreground group.
    /// (That the terminal is gone, SIGHUP, it tells the first process of the session alone.)
    pub is_typed: bool,
}

impl Came {
    /// Whether it is one by which people have a program end.
    pub fn asks_for_the_end(self) -> bool {
        ![libc::SIGUSR1, libc::SIGUSR2].contains(&self.number)
    }
}

/// Waits for a signal that is passed on.
pub fn wait_passed_on() -> io::Result<Came> {
    /// `si_code` of a signal that no process sent.
    const SI_KERNEL: libc::c_int = 0x80;
    let set = set_of(&PASSED_ON);
    let mut about = MaybeUninit::<libc::siginfo_t>::zeroed();
    loop {
        // SAFETY: the set is initialised, and there is room for what is told of the signal.
        match unsafe { libc::sigwaitinfo(&set, about.as_mut_ptr()) } {
            -1 => match io::Error::last_os_error() {
                // This process stood still, and goes on.
                e if e.raw_os_error() == Some(libc::EINTR) => {}
                e => return Err(e),
            },
            number => {
                // SAFETY: it was zeroed, and filled in.
                let by_kernel = unsafe { about.assume_init() }.si_code == SI_KERNEL;
                return Ok(Came {
                    number,
                    is_typed: by_kernel && [libc::SIGINT, libc::SIGQUIT].contains(&number),
                });
            }
        }
    }
}

/// What is done when a child ends.
#[derive(Clone, Copy)]
pub struct OfChildren(libc::sighandler_t);

impl OfChildren {
    /// Has this process hear of its children's ends, which whoever started it may have had ignored.
    pub fn hear() -> io::Result<OfChildren> {
        // SAFETY: sets the default action of a valid signal.
        match unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } {
            libc::SIG_ERR => Err(io::Error::last_os_error()),
            was => Ok(OfChildren(was)),
        }
    }

    /// As it was. May be called between fork and exec.
    pub fn restore(self) {
        if self.0 == libc::SIG_IGN {
            // SAFETY: has a valid signal ignored.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        }
    }
}

/// As [`unblock`], of a child that SIGINT is to end: the shell had it ignored where it started this
/// process in the background.
pub fn unblock_interrupt() -> io::Result<()> {
    // SAFETY: sets the default action of a valid signal.
    match unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => unblock(),
    }
}

/// Waits for one of these signals and returns its number.
pub fn wait() -> io::Result<i32> {
    let set = set();
    let mut got = 0;
    // SAFETY: the set is initialised and `got` is a place for the number.
    match unsafe { libc::sigwait(&set, &mut got) } {
        0 => Ok(got),
        e => Err(io::Error::from_raw_os_error(e)),
    }
}

/// Whether a signal that asks this process to end comes within `time`.
pub fn came_within(time: std::time::Duration) -> io::Result<bool> {
    let set = set();
    let time = libc::timespec {
        tv_sec: time.as_secs() as _,
        tv_nsec: time.subsec_nanos() as _,
    };
    // SAFETY: set and time are initialised; no information on the signal is asked for.
    match unsafe { libc::sigtimedwait(&set, std::ptr::null_mut(), &time) } {
        -1 => match io::Error::last_os_error() {
            e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(false),
            e => Err(e),
        },
        s => Ok(s != RELOAD),
    }
}

/// Has [`wait`] return `signal` in this process, from any of its threads.
pub fn send(signal: i32) {
    // SAFETY: a system call on this process; the number is a valid signal.
    unsafe { libc::kill(libc::getpid(), signal) };
}
