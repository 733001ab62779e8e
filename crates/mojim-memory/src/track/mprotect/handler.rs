//! The process's SIGSEGV handler: installed at the first attach, never removed.
//!
//! - It answers the faults of the ranges in the table (H0 to H3 of `mprotect.rs`).
//! - It sends SIGBUS to a store for which there is no room.
//! - It passes all other faults on to the handler that was there before.
//!
//! It keeps invariant 2 of `mprotect.rs`.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::limits::{LIMITS, Limits};
use super::region::Answer;
use super::table::{DEAD, LIVE, TABLE, USED};
use crate::track::meter::MOST_TEXT;
use mojim_env::locks::lock;

/// How long a handler waits before a store that cannot be let in is tried again.
const SHORTLY: Duration = Duration::from_micros(50);

/// The handler that was there before ours.
static PREVIOUS: OnceLock<Previous> = OnceLock::new();

struct Previous(libc::sigaction);

// SAFETY: a plain value that is only read: a code pointer, a mask and flags.
unsafe impl Send for Previous {}
// SAFETY: as above.
unsafe impl Sync for Previous {}

pub(super) fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = lock(&INSTALLED);
    if *installed {
        return Ok(());
    }
    LIMITS.get_or_init(Limits::read);
    // SAFETY: all-zero is a valid sigaction, and the calls get pointers to live ones. The handler
    // is async-signal-safe (invariant 2). What it chains to is known before it is installed.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGSEGV, std::ptr::null(), &mut previous) != 0 {
            return Err(io::Error::last_os_error());
        }
        PREVIOUS.get_or_init(|| Previous(previous));
        let mut ours: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
        ours.sa_sigaction = handler as usize;
        // No SA_NODEFER: the mask holds SIGSEGV anyway, and `chain` sets the mask that the
        // previous handler asked for.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigfillset(&mut ours.sa_mask);
        if libc::sigaction(libc::SIGSEGV, &ours, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    *installed = true;
    Ok(())
}

/// linux/siginfo.h: mapped, but the access is not allowed.
const SEGV_ACCERR: i32 = 2;

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; for SEGV_ACCERR it holds an address.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code == SEGV_ACCERR && !is_fetch(context, addr) {
        let mut text = [0; MOST_TEXT];
        match answer(addr, &mut text) {
            (Answer::Opened, _) => return,
            (Answer::Later, _) => {
                // The instruction runs again, after the thread's pending signals.
                shortly();
                return;
            }
            (Answer::Refused, len) => {
                // SAFETY: the kernel passes a valid ucontext.
                unsafe { refuse(addr, &text[..len], context) };
                return;
            }
            (Answer::Failed, _) => {}
        }
    }
    // SAFETY: these are the arguments that the kernel passed.
    unsafe { chain(signal, info, context) }
}

/// True for a jump into data, which making it writable would not cure.
fn is_fetch(context: *mut libc::c_void, addr: usize) -> bool {
    let context = context.cast::<libc::ucontext_t>();
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel passes a valid ucontext to an SA_SIGINFO handler.
    let pc = unsafe { (*context).uc_mcontext.gregs[libc::REG_RIP as usize] as usize };
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel passes a valid ucontext to an SA_SIGINFO handler.
    let pc = unsafe { (*context).uc_mcontext.pc as usize };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let pc = {
        let _ = context;
        0
    };
    pc == addr
}

/// What becomes of the store. If it is refused, the text to print is in `text`, and the number is
/// its length.
fn answer(addr: usize, text: &mut [u8; MOST_TEXT]) -> (Answer, usize) {
    let table = &TABLE[..USED.load(Ordering::SeqCst)];
    for slot in table {
        if !slot.covers(addr, LIVE) {
            continue;
        }
        let side = slot.enter(); // H0
        // Look again: only what is seen inside is stable.
        if slot.covers(addr, LIVE) {
            // SAFETY: LIVE as seen inside, so that drop waits for us before it frees the region.
            let region = unsafe { &*slot.region.load(Ordering::SeqCst) };
            let answer = region.open(addr);
            let told = match (&answer, &region.metered) {
                (Answer::Refused, Some(m)) => m.meter.tell(text),
                _ => 0,
            };
            slot.leave(side); // H3
            return (answer, told);
        }
        slot.leave(side);
    }
    for slot in table {
        if slot.covers(addr, DEAD)
            && slot
                .late
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok()
        {
            return (Answer::Opened, 0);
        }
    }
    (Answer::Failed, 0)
}

fn shortly() {
    let time = rustix::thread::Timespec {
        tv_sec: 0,
        tv_nsec: SHORTLY.subsec_nanos().into(),
    };
    // If interrupted, it is only shorter.
    let _ = rustix::thread::nanosleep(&time);
}

/// The store gets SIGBUS when the handler returns, as does a store to a mapped file for which the
/// file system has no room.
///
/// # Safety
/// The context is what the kernel passed to the handler.
unsafe fn refuse(addr: usize, text: &[u8], context: *mut libc::c_void) {
    // linux/siginfo.h
    const BUS_ADRERR: i32 = 2;
    // SAFETY: write, sigaction and the system calls are async-signal-safe, and get live values; a
    // siginfo of zeros is valid, and its address lies where that of a fault does.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(2, text.as_ptr().cast(), text.len());
        // If the program blocks or ignores SIGBUS, do what the kernel does with a fault of its own:
        // else the store would be tried for ever.
        let mask = &mut (*context.cast::<libc::ucontext_t>()).uc_sigmask;
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut action);
        let blocked = libc::sigismember(mask, libc::SIGBUS) == 1;
        if blocked || action.sa_sigaction == libc::SIG_IGN {
            action = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
            libc::sigdelset(mask, libc::SIGBUS);
        }
        let mut info: libc::siginfo_t = std::mem::zeroed();
        info.si_signo = libc::SIGBUS;
        info.si_code = BUS_ADRERR;
        let fields = std::ptr::from_mut(&mut info).cast::<u8>();
        fields.add(16).cast::<usize>().write_unaligned(addr);
        let (process, thread) = (libc::getpid(), libc::syscall(libc::SYS_gettid));
        let (signal, info) = (libc::SIGBUS, &info);
        if libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info) != 0 {
            libc::raise(libc::SIGBUS);
        }
        *errno = before;
    }
}

/// Does what would have happened without our handler, but for SA_RESETHAND, which is not imitated.
///
/// # Safety
/// The arguments are those that the kernel passed to a SIGSEGV handler.
unsafe fn chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(Previous(previous)) = PREVIOUS.get() else {
        return;
    };
    let handler = previous.sa_sigaction;
    // SAFETY: the pointers are the kernel's; sigaction, raise and pthread_sigmask are
    // async-signal-safe; `handler` is what the program registered, with the signature that its
    // flags name.
    unsafe {
        // Sent by kill(2) or the like, not caused by an instruction: it would not repeat.
        let sent = (*info).si_code <= 0;
        if handler == libc::SIG_IGN && sent {
            return;
        }
        if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(signal, &default, std::ptr::null_mut());
            if sent {
                // Blocked until we return.
                libc::raise(signal);
            }
            // Else the instruction runs again and the default action, with its core, shows it.
            return;
        }
        // The mask that the kernel would have set for it; ours blocks everything. Returning from
        // our handler restores the interrupted one.
        let mut mask = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
        for other in 1..=64 {
            if libc::sigismember(&previous.sa_mask, other) == 1 {
                libc::sigaddset(&mut mask, other);
            }
        }
        if previous.sa_flags & libc::SA_NODEFER == 0 {
            libc::sigaddset(&mut mask, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
        if previous.sa_flags & libc::SA_SIGINFO != 0 {
            type WithInfo = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
            std::mem::transmute::<usize, WithInfo>(handler)(signal, info, context);
        } else {
            std::mem::transmute::<usize, extern "C" fn(i32)>(handler)(signal);
        }
    }
}
