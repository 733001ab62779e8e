//! The begin of a block, which returns once more for every abort.
//!
//! Owns the registers' layout in a level: stack pointer behind the return, rbx, rbp, r12 to
//! r15, return address. (The control words of the floating-point units are not among them:
//! libitm leaves them alone, too.)

use std::arch::naked_asm;

use mojim_undo::Log;

use crate::thread::{fetch, irrevocable, log};

/// What `_ITM_beginTransaction` returns, to the code that the compiler made.
const RUN_INSTRUMENTED: u32 = 0x01;
const RUN_UNINSTRUMENTED: u32 = 0x02;
const SAVE_LIVE: u32 = 0x04;
pub(crate) const RESTORE_LIVE: u32 = 0x08;
pub(crate) const ABORTED: u32 = 0x10;
pub(crate) const RUN_AGAIN: u32 = RUN_INSTRUMENTED | RESTORE_LIVE;

/// The block has instrumented code.
const HAS_INSTRUMENTED: u32 = 0x01;

/// `_ITM_beginTransaction(properties, ...)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_beginTransaction() -> u32 {
    naked_asm!(
        "endbr64",
        "lea rax, [rsp + 8]",
        "mov rdx, [rsp]",
        "sub rsp, 72",
        "mov [rsp], rax",
        "mov [rsp + 8], rbx",
        "mov [rsp + 16], rbp",
        "mov [rsp + 24], r12",
        "mov [rsp + 32], r13",
        "mov [rsp + 40], r14",
        "mov [rsp + 48], r15",
        "mov [rsp + 56], rdx",
        "mov rsi, rsp",
        "call {begin}",
        "add rsp, 72",
        "ret",
        begin = sym begin,
    )
}

/// Goes on behind the begin whose registers these are, which returns `value` there.
///
/// # Safety
/// The frame that called the begin is still there.
#[unsafe(naked)]
pub(crate) unsafe extern "C-unwind" fn go_on(registers: *const [usize; 8], value: u32) -> ! {
    naked_asm!(
        "mov eax, esi",
        "mov rbx, [rdi + 8]",
        "mov rbp, [rdi + 16]",
        "mov r12, [rdi + 24]",
        "mov r13, [rdi + 32]",
        "mov r14, [rdi + 40]",
        "mov r15, [rdi + 48]",
        "mov rdx, [rdi + 56]",
        "mov rsp, [rdi]",
        "jmp rdx",
    )
}

unsafe extern "C-unwind" fn begin(properties: u32, registers: *const [usize; 8]) -> u32 {
    let mut log = log();
    if log.is_null() {
        log = fetch();
    }
    // SAFETY: the calling thread's own log; the registers are in the caller's frame.
    unsafe {
        let mut level = Log::begin(log, true);
        while level.is_null() {
            std::thread::sleep(std::time::Duration::from_millis(10));
            level = Log::begin(log, true);
        }
        (*level).registers = *registers;
        if properties & HAS_INSTRUMENTED == 0 {
            irrevocable(log);
            return RUN_UNINSTRUMENTED | SAVE_LIVE;
        }
    }
    RUN_INSTRUMENTED | SAVE_LIVE
}
