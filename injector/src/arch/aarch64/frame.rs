//! Signal frames (`struct rt_sigframe`, `arch/arm64/kernel/signal.c`; `struct ucontext`, `uapi/asm/ucontext.h`; `struct
//! sigcontext` and its records, `uapi/asm/sigcontext.h`).
//!
//! ```text
//!    0  siginfo         128
//!  128  uc_flags, uc_link, uc_stack   8, 8, 24
//!  168  uc_sigmask        8, and room for 128
//!  304  fault_address     8   (aligned to 16)
//!  312  x0 to x30
//!  560  sp, pc, pstate
//!  592  records          (aligned to 16): magic 4, size 4, …; the last one is zero
//! ```
//!
//! The one record that must be there is the floating-point one. Without one of their own, SVE's registers are lost, and ZA,
//! TPIDR2 and FPMR stay as they are (`restore_sigframe`); the overlay permissions (POE) were lost by some kernels. A thread for
//! which that matters is not taken ([`super::fit`]). `uc_stack` is zero: the kernel takes that for a stack that is too small
//! and leaves the alternate stack as it is (`restore_altstack`, `kernel/signal.c`).

use super::{BTYPE, Registers};
use crate::arch::{Call, Gadgets};

const SIGMASK: usize = 168;
const GENERAL: usize = 312;
const RECORDS: usize = 592;
/// Of `struct fpsimd_context`: head, `fpsr` and `fpcr`, `q0` to `q31`.
const FLOATING_BYTES: usize = 8 + 8 + 512;
/// `FPSIMD_MAGIC` and the size.
const FLOATING_HEAD: u64 = 0x4650_8001 | (FLOATING_BYTES as u64) << 32;
/// Where `pc` is from the first record, which the kernel makes the floating-point one (`setup_sigframe_layout`).
const INSTRUCTION_TO_RECORDS: usize = RECORDS - (GENERAL + 32 * 8);

/// Longest frame that [`return_frame`] makes.
pub const RETURN_FRAME_BYTES: usize = RECORDS + FLOATING_BYTES + 16;
/// Largest floating-point state that it takes.
pub const MAX_XSTATE_BYTES: usize = FLOATING_BYTES;
/// The registers that it takes with it: `NT_PRFPREG`, `struct user_fpsimd_state`: `q0` to `q31`, `fpsr`, `fpcr`, 8 unused.
pub const XSTATE_NOTE: usize = 2;

/// `svc #0; ret`
pub const CALL_GADGET: &[u8] = &[0x01, 0x00, 0x00, 0xd4, 0xc0, 0x03, 0x5f, 0xd6];
/// `mov x8, #139; svc #0`: what signal handlers return to. With glibc it is in the vDSO (`vdso/sigreturn.S`), musl has its own.
pub const RESTORER_GADGET: &[u8] = &[0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4];

/// The instruction that a signal has interrupted, if the `at`th word of a stack is where a signal's frame has it; `word` gives
/// words of that stack. On this processor nothing in the frame leads to the restorer: the handler gets it in `x30`. The
/// head of the floating-point record, at its place, is the mark.
pub fn interrupted(word: impl Fn(usize) -> Option<u64>, at: usize, _restorer: Option<u64>) -> Option<u64> {
    let is_frame = word(at + INSTRUCTION_TO_RECORDS / 8)? == FLOATING_HEAD;
    if is_frame { word(at) } else { None }
}

/// Makes a signal frame below `back.sp` that `rt_sigreturn` resumes the thread from as `back` says, and the registers with
/// which the thread makes `call` first, by instructions of its own C library alone: for what must not be done by a stub,
/// namely dropping the page that the stubs were in. Returns the frame's address, its length in `frame`, and the registers;
/// `None` when the state is not what the kernel gives.
pub fn return_frame(
    frame: &mut [u8; RETURN_FRAME_BYTES],
    call: Call,
    gadgets: Gadgets,
    back: &Registers,
    sigmask: u64,
    xstate: &[u8],
) -> Option<(u64, usize, Registers)> {
    const VECTORS: usize = 512;
    let base = back.sp.checked_sub(RETURN_FRAME_BYTES as u64)? & !15;
    let (vectors, control) = (xstate.get(..VECTORS)?, xstate.get(VECTORS..VECTORS + 8)?);
    frame.fill(0);
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = frame.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(SIGMASK, &sigmask.to_le_bytes());
    let words = back.x.into_iter().chain([back.sp, back.pc, back.pstate]);
    for (number, word) in words.enumerate() {
        put(GENERAL + number * 8, &word.to_le_bytes());
    }
    put(RECORDS, &FLOATING_HEAD.to_le_bytes());
    put(RECORDS + 8, control);
    put(RECORDS + 16, vectors);
    let mut enter = *back;
    (enter.pc, enter.sp) = (gadgets.call, base);
    enter.pstate &= !BTYPE;
    for (number, value) in (0..).zip(call.args) {
        enter.set(number, value);
    }
    enter.set(8, call.number);
    enter.set(30, gadgets.restorer);
    Some((base, RETURN_FRAME_BYTES, enter))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(frame: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(frame[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn a_frame_has_everything_and_is_found_again() {
        let mut back = Registers::default();
        for number in 0..31 {
            back.set(number, 0x1000 + u64::from(number));
        }
        (back.sp, back.pc, back.pstate) = (0x7fff_fff8, 0x40_0000, 0x8000_0400);
        let xstate: Vec<u8> = (0..528_u32).map(|n| (n % 251) as u8).collect();
        let gadgets = Gadgets {
            call: 0xca11,
            restorer: 0x4e57,
        };
        let call = Call {
            number: 233,
            args: [1, 2, 3],
        };
        let mut frame = [0xff; RETURN_FRAME_BYTES];
        let (base, len, enter) = return_frame(&mut frame, call, gadgets, &back, 0x55, &xstate).unwrap();
        assert_eq!((base % 16, len), (0, RETURN_FRAME_BYTES));
        assert!(base + len as u64 <= back.sp);
        assert_eq!((enter.pc, enter.sp, enter.pstate), (0xca11, base, 0x8000_0000));
        assert_eq!(enter.x[..3], [1, 2, 3]);
        assert_eq!((enter.x[8], enter.x[30], enter.x[19]), (233, 0x4e57, back.x[19]));
        assert_eq!(word(&frame, 168), 0x55, "uc_sigmask");
        for number in 0..31 {
            assert_eq!(word(&frame, 312 + number * 8), back.x[number]);
        }
        assert_eq!(word(&frame, 560), back.sp);
        assert_eq!((word(&frame, 568), word(&frame, 576)), (back.pc, back.pstate));
        assert_eq!(frame[592..600], [0x01, 0x80, 0x50, 0x46, 0x10, 0x02, 0, 0]);
        assert_eq!(frame[600..608], xstate[512..520], "fpsr, fpcr");
        assert_eq!(frame[608..1120], xstate[..512]);
        assert!(frame[1120..].iter().all(|&byte| byte == 0), "the last record");
        assert!(frame[..168].iter().all(|&byte| byte == 0));
        let words = |at: usize| frame.get(at * 8..at * 8 + 8).map(|_| word(&frame, at * 8));
        let found: Vec<_> = (0..len / 8).filter_map(|at| interrupted(words, at, None)).collect();
        assert_eq!(found, [back.pc]);
    }

    #[test]
    fn a_short_state_or_stack_makes_no_frame() {
        let mut back = Registers::default();
        let gadgets = Gadgets { call: 0, restorer: 0 };
        let call = Call::drop_page(4096);
        let mut frame = [0; RETURN_FRAME_BYTES];
        assert!(
            return_frame(&mut frame, call, gadgets, &back, 0, &[0; 528]).is_none(),
            "no stack"
        );
        back.sp = 1 << 20;
        assert!(return_frame(&mut frame, call, gadgets, &back, 0, &[0; 519]).is_none());
        assert!(return_frame(&mut frame, call, gadgets, &back, 0, &[0; 528]).is_some());
    }
}
