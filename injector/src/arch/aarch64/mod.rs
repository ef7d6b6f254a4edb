//! aarch64: registers of a stopped thread, how system calls go on, stubs and signal frames.
//!
//! Not tried on such a machine: see `docs/DESIGN.md` for what was. Nothing is written into a process ([`CAN_ENTER`]), since the
//! hooks of the shim are x86-64's instructions. What only reads (`pyheap dump`, `info`, all reports) needs of all this the
//! registers and the thread pointer.
//!
//! # Calls that a stop interrupts
//!
//! Before a tracer sees the thread stopped, the kernel has prepared to make the call again (`do_signal` in
//! `arch/arm64/kernel/signal.c`): the first argument is back in `x0`, and the program counter on the `svc` instruction
//! again. Whether it does, with which number, or whether a signal's handler interrupts the call, it decides after the stop by
//! the code that the call had returned, which a tracer cannot see any more. A thread that is let go as it is goes on rightly.
//!
//! One that is redirected must be stopped where that code is seen: at the end of the call (a syscall-exit-stop), which is before
//! `do_signal`. So a thread that stands on an `svc` is let to make the call, interrupted at once, and stopped at its end
//! (`end_of_call` in [`crate::hijack`]). There, `NT_ARM_SYSTEM_CALL` tells that it is in a call, and `x0` the code. It is
//! redirected with the code still in `x0`, and the kernel decides as on x86-64, see [`stub`].

mod calls;
mod code;
mod frame;
mod regset;
mod stub;

pub use calls::{restart_class, starts_timeout_anew};
pub use frame::{
    CALL_GADGET, MAX_XSTATE_BYTES, RESTORER_GADGET, RETURN_FRAME_BYTES, XSTATE_NOTE, interrupted, return_frame,
};
pub use regset::{registers, set_registers};
pub use stub::stub;

use crate::freeze::At;
use nix::unistd::Pid;

/// Registers of a thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Registers {
    /// `x0` to `x30`.
    pub x: [u64; 31],
    /// `sp`
    pub sp: u64,
    /// `pc`
    pub pc: u64,
    /// `pstate`
    pub pstate: u64,
    /// `TPIDR_EL0`
    pub thread_pointer: u64,
    /// `x0` as it was when the call began that the thread is at the end of; else `x0`.
    pub first_argument: u64,
    /// The number of the call that the thread is in; -1 for none, also where the kernel has prepared to make a call again.
    pub call: i64,
    /// 1 if the next instruction is `svc #0`.
    pub next_is_call: u64,
}

impl Registers {
    fn get(&self, number: u32) -> u64 {
        self.x.get(number as usize).copied().unwrap_or(0)
    }

    fn set(&mut self, number: u32, value: u64) {
        if let Some(place) = self.x.get_mut(number as usize) {
            *place = value;
        }
    }

    /// Those of a thread that has others.
    fn foreign() -> Self {
        Self {
            pstate: MODE_32_BIT,
            ..Self::default()
        }
    }

    fn ended_call(&self) -> Option<u64> {
        u64::try_from(self.call).ok()
    }

    fn arguments(&self) -> [u64; 6] {
        [
            self.first_argument,
            self.get(1),
            self.get(2),
            self.get(3),
            self.get(4),
            self.get(5),
        ]
    }
}

/// There are stubs, but no hooks.
pub const CAN_ENTER: bool = false;

/// A slot for a stub, in bytes. [`super::Job::Copy`] takes two of them.
pub const STUB_BYTES: usize = 832;

/// The longest stub. (The tests compile this beside another processor's, which has other slots.)
const LONGEST_STUB: usize = super::MOST_SLOTS * STUB_BYTES;

/// End of user space, of a process whose `highest` mapping ends there: kernels are built with 36 to 48 bits
/// (`CONFIG_ARM64_VA_BITS`), and the stack is near the end.
#[must_use]
pub const fn user_end(highest: u64) -> u64 {
    const LEAST: u64 = 1 << 36;
    const MOST: u64 = 1 << 48;
    const PAGE: u64 = 4096;
    let end = if highest <= LEAST {
        LEAST
    } else if highest >= MOST {
        MOST
    } else {
        highest.next_power_of_two()
    };
    end - PAGE
}

/// What seccomp's filters know this processor by: `AUDIT_ARCH_AARCH64` (`uapi/linux/audit.h`).
pub const AUDIT_ARCH: u32 = 0xc000_00b7;

/// `svc #0`
const SVC: u32 = 0xd400_0001;
/// Its length, by which the kernel sets the program counter back.
const SVC_BYTES: u64 = 4;

/// Of `pstate` (`uapi/asm/ptrace.h`): the thread runs 32-bit code (`PSR_MODE32_BIT`).
const MODE_32_BIT: u64 = 0x10;
/// The kind of branch that was just taken (`PSR_BTYPE_MASK`).
const BTYPE: u64 = 0xc00;
/// N, Z, C, V.
const FLAGS: u64 = 0xf000_0000;

// `include/linux/errno.h`, and EINTR.
const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;
const EINTR: i64 = -4;

const fn is_restart_code(code: i64) -> bool {
    matches!(
        code,
        ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK
    )
}

/// What a stopped thread was doing. The number of a call is in `x8` whether or not the thread was in one: that it stands on
/// `svc` says that it was, or that it was about to make one.
#[must_use]
pub fn doing(stopped: &Registers) -> At {
    At {
        call: at_call(stopped).map(|(number, _)| number),
        first_argument: stopped.first_argument,
        instruction: stopped.pc,
        thread_pointer: stopped.thread_pointer,
    }
}

/// A thread of a core file, from its note `NT_PRSTATUS` (`struct elf_prstatus`): number and registers. The thread pointer is in
/// another note (`NT_ARM_TLS`).
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
    let at = At {
        call: None,
        first_argument: word(0)?,
        instruction: word(PC)?,
        thread_pointer: 0,
    };
    Some((tid, at))
}

/// The system call that a thread is about to make, or to make again because the stop interrupted it: number and arguments.
#[must_use]
pub fn at_call(stopped: &Registers) -> Option<(u64, [u64; 6])> {
    (stopped.next_is_call != 0).then(|| (stopped.get(8), stopped.arguments()))
}

/// The registers at the end of a call, for a thread that stood `before` it. `None` if that is not where it is. (During such a
/// stop `x7` holds a mark, 0 at the beginning and 1 at the end, and the kernel restores it: `report_syscall`,
/// `arch/arm64/kernel/ptrace.c`.)
#[must_use]
pub fn ended_call(before: &Registers, now: &Registers) -> Option<Registers> {
    let mut ended = *now;
    ended.set(7, before.get(7));
    ended.first_argument = before.get(0);
    let same = ended.x.iter().zip(&before.x).skip(1).enumerate();
    // The kernel may have replaced `x8` by that of `restart_syscall`.
    let same = same
        .filter(|(number, _)| number + 1 != 8)
        .all(|(_, (now, before))| now == before);
    let here = (now.pc, now.sp, now.get(7)) == (before.pc.wrapping_add(SVC_BYTES), before.sp, 1);
    (same && here && now.ended_call().is_some()).then_some(ended)
}

/// True if the kernel would restart the call that the thread was stopped in, or the thread is about to make one.
#[must_use]
pub fn is_restart(stopped: &Registers) -> bool {
    at_call(stopped).is_some() || stopped.ended_call().is_some() && is_restart_code(stopped.get(0) as i64)
}

/// The registers with which a thread that is resumed by `rt_sigreturn` must go on so that the program does not notice the
/// stop: those that it has; `None` for a call that is to go on with the time that is left, since that resets its restart block.
#[must_use]
pub fn resumed_by_return(stopped: &Registers) -> Option<Registers> {
    let in_call = at_call(stopped).is_some_and(|(number, args)| calls::has_time_left(number, args));
    (!in_call && stopped.ended_call().is_none()).then_some(*stopped)
}

/// True if a stub at `stub`, or a frame of ours (`None`), can resume a stopped thread with all that it has.
#[must_use]
pub fn fit(tid: Pid, stopped: &Registers, stub: Option<u64>) -> bool {
    let extra = regset::Extra::of(tid);
    // In a call, or on its instruction, what a call discards is not missed.
    let wide = extra.wide && stopped.ended_call().is_none() && at_call(stopped).is_none();
    let by_frame = stub.is_none() && (extra.za || extra.overlays);
    !wide && !by_frame && !extra.guarded && stub.is_none_or(|at| stub::can_return(at, stopped))
}

/// Nothing has to be asked.
pub const fn ask_processor() {}

/// True if the program counter or any general register points into `range`: the thread is in it, or about to jump there.
#[must_use]
pub fn touches(regs: &Registers, range: &std::ops::Range<u64>) -> bool {
    range.contains(&regs.pc) || regs.x.iter().any(|value| range.contains(value))
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

/// The thread pointer.
#[must_use]
pub const fn thread_pointer(regs: &Registers) -> u64 {
    regs.thread_pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_user_space_is_above_the_stack() {
        assert_eq!(user_end(0x7f_fe80_0000), 0x7f_ffff_f000, "39 bits");
        assert_eq!(user_end(0xffff_e3c1_2000), 0xffff_ffff_f000, "48 bits");
        assert_eq!(user_end(u64::MAX), 0xffff_ffff_f000);
    }

    /// At the end of a call, as ptrace shows it: `x7` is a mark.
    fn before_and_after() -> (Registers, Registers) {
        let mut before = Registers::default();
        for number in 0..31 {
            before.set(number, 1000 + u64::from(number));
        }
        (before.pc, before.sp, before.next_is_call, before.call) = (0x1000, 0x8000, 1, -1);
        let mut now = before;
        now.set(0, ERESTART_RESTARTBLOCK as u64);
        now.set(7, 1);
        now.set(8, 128);
        (now.pc, now.call, now.next_is_call) = (0x1004, 128, 0);
        (before, now)
    }

    #[test]
    fn the_end_of_a_call_is_told_from_other_stops() {
        let (before, now) = before_and_after();
        let ended = ended_call(&before, &now).unwrap();
        assert_eq!((ended.first_argument, ended.get(7), ended.get(8)), (1000, 1007, 128));
        assert!(is_restart(&ended) && is_restart(&before));
        assert_eq!(ended.arguments(), [1000, 1001, 1002, 1003, 1004, 1005]);
        type Change = fn(&mut Registers);
        let changes: [(&str, Change); 5] = [
            ("the beginning of the call", |now| now.set(7, 0)),
            ("another call", |now| now.pc += 4),
            ("another stack", |now| now.sp -= 16),
            ("other arguments", |now| now.set(2, 5)),
            ("in no call", |now| now.call = -1),
        ];
        for (what, change) in changes {
            let mut other = now;
            change(&mut other);
            assert!(ended_call(&before, &other).is_none(), "{what}");
        }
    }

    #[test]
    fn no_frame_for_a_call_with_time_left() {
        let (mut before, now) = before_and_after();
        assert!(resumed_by_return(&before).is_some());
        before.set(8, calls::SYS_nanosleep);
        assert!(resumed_by_return(&before).is_none());
        before.next_is_call = 0;
        assert!(resumed_by_return(&before).is_some(), "it has returned");
        assert!(resumed_by_return(&now).is_none(), "the code is in x0");
    }

    #[test]
    fn a_thread_of_a_core_file_is_read() {
        let mut note = vec![0; 392];
        note[32..36].copy_from_slice(&77_i32.to_le_bytes());
        note[112..120].copy_from_slice(&5_u64.to_le_bytes());
        note[112 + 32 * 8..112 + 33 * 8].copy_from_slice(&0x4000_u64.to_le_bytes());
        let (tid, at) = core_thread(&note).unwrap();
        assert_eq!((tid, at.first_argument, at.instruction), (77, 5, 0x4000));
        assert!(core_thread(&note[..300]).is_none());
    }
}
