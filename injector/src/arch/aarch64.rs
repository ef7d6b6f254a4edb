//! aarch64: registers of a stopped thread, and which system calls bear a stop. Not tried on such a machine.
//!
//! There are no stubs for it, so nothing is ever written into a process ([`CAN_ENTER`]): the hooks of the shim are written in
//! x86-64's instructions. What only reads (`pyheap dump`, `info`, all reports) needs nothing else from here.
//!
//! The kernel prepares the restart of a system call before a tracer sees the thread stopped (`do_signal` in
//! `arch/arm64/kernel/signal.c`: the first argument is back in `x0`, and the program counter on the `svc` instruction
//! again), and makes a call with a deadline go on by itself when the thread is let go with its registers unchanged. pyheap
//! leaves them so.

use super::{Call, Gadgets, Job, LONGEST_STUB, Signals};
use crate::freeze::At;
use libc::user_regs_struct;

/// Registers of a thread: `x0` to `x30`, `sp`, `pc`, `pstate` (`struct user_pt_regs`).
pub type Registers = user_regs_struct;

/// There are no stubs for this processor.
pub const CAN_ENTER: bool = false;

/// Longest stub, in bytes: the slots are there, and stay empty.
pub const STUB_BYTES: usize = 480;

/// Of `pstate`: the thread runs 32-bit code (`PSR_MODE32_BIT`).
const MODE_32_BIT: u64 = 0x10;

/// What a stopped thread was doing. The number of the call is in `x8` whether or not the thread is in one: it counts where
/// the thread stands on `svc`, which only the caller can look at; so it is not told. The thread pointer is not among these
/// registers either (it has a set of its own, `NT_ARM_TLS`).
#[must_use]
pub const fn doing(stopped: &Registers) -> At {
    At {
        call: None,
        first_argument: stopped.regs[0],
        instruction: stopped.pc,
        thread_pointer: 0,
    }
}

/// A thread of a core file, from its note `NT_PRSTATUS` (`struct elf_prstatus`): number and registers.
#[must_use]
pub fn core_thread(note: &[u8]) -> Option<(i32, At)> {
    const PID_AT: usize = 32;
    const REGISTERS_AT: usize = 112;
    const PC: usize = 32;
    let tid = i32::from_le_bytes(*note.get(PID_AT..)?.first_chunk()?);
    // In the order of `struct user_pt_regs`.
    let word = |number: usize| {
        let bytes = note.get(REGISTERS_AT + number * 8..)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    };
    let (x0, pc) = (word(0)?, word(PC)?);
    let at = At {
        call: None,
        first_argument: x0,
        instruction: pc,
        thread_pointer: 0,
    };
    Some((tid, at))
}

/// True if the kernel would restart the call that the thread was stopped in: it has set it up already.
#[must_use]
pub const fn is_restart(_stopped: &Registers) -> bool {
    false
}

/// The registers with which the thread must go on so that the program does not notice the stop: those that it has.
#[must_use]
pub const fn resumed(stopped: &Registers) -> Registers {
    *stopped
}

/// As [`resumed`], for a thread that is resumed by `rt_sigreturn`: never done here.
#[must_use]
pub const fn resumed_by_return(_stopped: &Registers) -> Option<Registers> {
    None
}

/// How well a thread that is blocked in system call `number` bears a stop: 0 best. `None` = it must not be stopped: the call
/// would return with a part of what it has done, which programs need not expect. The same calls as on x86-64, by this
/// processor's numbers; it has no select, poll, epoll_wait, pause and accept without a 4 but through these.
#[must_use]
pub fn restart_class(number: u64, args: [u64; 6]) -> Option<u8> {
    const MSG_WAITALL: u64 = 0x100;
    let call = libc::c_long::try_from(number).unwrap_or(-1);
    match call {
        libc::SYS_read
        | libc::SYS_wait4
        | libc::SYS_futex
        | libc::SYS_waitid
        | libc::SYS_pselect6
        | libc::SYS_ppoll => Some(0),
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_restart_syscall => Some(1),
        libc::SYS_recvfrom if args[3] & MSG_WAITALL != 0 => None,
        libc::SYS_recvmsg if args[2] & MSG_WAITALL != 0 => None,
        libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_connect
        | libc::SYS_flock => Some(2),
        // Without a timeout.
        libc::SYS_epoll_pwait if (args[3] as i32) < 0 => Some(2),
        libc::SYS_write
        | libc::SYS_pwrite64
        | libc::SYS_writev
        | libc::SYS_pwritev
        | libc::SYS_pwritev2
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg
        | libc::SYS_sendfile
        | libc::SYS_splice
        | libc::SYS_vmsplice
        | libc::SYS_tee
        | libc::SYS_copy_file_range => None,
        _ => Some(4),
    }
}

/// True for a call with a timeout, ended by any stop, that some C library makes again with its whole timeout:
/// `rt_sigtimedwait`, which musl makes so.
#[must_use]
pub const fn starts_timeout_anew(number: u64, args: [u64; 6]) -> bool {
    number == libc::SYS_rt_sigtimedwait.unsigned_abs() && args[2] != 0
}

/// Where a signal frame (`struct rt_sigframe`) holds the interrupted instruction, from its beginning: `siginfo` (128), in
/// `ucontext` flags, link and stack (40), the signal mask with its padding (128), and in `sigcontext`, aligned to 16, the
/// fault's address, 31 registers and `sp`.
pub const FRAME_INSTRUCTION: usize = 128 + 176 + 8 + 31 * 8 + 8;

/// Nothing has to be asked.
pub const fn ask_processor() {}

/// No stub. Nobody gets here, see [`CAN_ENTER`].
#[must_use]
pub const fn stub(
    _job: Job,
    _stub: u64,
    _stopped: &Registers,
    _signals: Signals,
) -> Option<([u8; LONGEST_STUB], Registers)> {
    None
}

/// Longest frame that [`return_frame`] makes.
pub const RETURN_FRAME_BYTES: usize = 1 << 10;
/// Largest extended state that it takes.
pub const MAX_XSTATE_BYTES: usize = 16 << 10;

/// `svc #0; ret`
pub const CALL_GADGET: &[u8] = &[0x01, 0x00, 0x00, 0xd4, 0xc0, 0x03, 0x5f, 0xd6];
/// `mov x8, #139; svc #0`: what signal handlers return to, in the vDSO.
pub const RESTORER_GADGET: &[u8] = &[0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4];

/// No frame, see [`CAN_ENTER`].
#[must_use]
pub const fn return_frame(
    _frame: &mut [u8; RETURN_FRAME_BYTES],
    _call: Call,
    _gadgets: Gadgets,
    _back: &Registers,
    _sigmask: u64,
    _xstate: &[u8],
) -> Option<(u64, usize, Registers)> {
    None
}

/// True if the program counter or any general register points into `range`: the thread is in it, or about to jump there.
#[must_use]
pub fn touches(regs: &Registers, range: &std::ops::Range<u64>) -> bool {
    range.contains(&regs.pc) || regs.regs.iter().any(|value| range.contains(value))
}

/// True for a thread that runs 32-bit code.
#[must_use]
pub const fn is_foreign(regs: &Registers) -> bool {
    regs.pstate & MODE_32_BIT != 0
}

/// The stack pointer.
#[must_use]
pub const fn stack_pointer(regs: &Registers) -> u64 {
    regs.sp
}

/// The thread pointer, where it is among the registers: here it is not.
#[must_use]
pub const fn thread_pointer(_regs: &Registers) -> u64 {
    0
}
