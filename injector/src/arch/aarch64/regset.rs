//! Sets of registers of a stopped thread, by `PTRACE_GETREGSET` and `PTRACE_SETREGSET`. Numbers: `uapi/linux/elf.h`; layouts:
//! `uapi/asm/ptrace.h` and `arch/arm64/kernel/ptrace.c`.

#![expect(unsafe_code, reason = "requests of ptrace that nix has for one C library only")]

use super::{Registers, SVC};
use nix::sys::ptrace;
use nix::unistd::Pid;

/// `struct user_pt_regs`: `x0` to `x30`, `sp`, `pc`, `pstate`.
const NT_PRSTATUS: usize = 1;
/// `TPIDR_EL0`; where there is SME, `TPIDR2_EL0` follows.
const NT_ARM_TLS: usize = 0x401;
/// An `int`: the call that the thread is in, -1 for none.
const NT_ARM_SYSTEM_CALL: usize = 0x404;
/// These three begin with `struct user_sve_header`: size 4, largest size 4, vector length 2, largest 2, flags 2, unused 2.
const NT_ARM_SVE: usize = 0x405;
const NT_ARM_SSVE: usize = 0x40b;
const NT_ARM_ZA: usize = 0x40c;
/// `POR_EL0`.
const NT_ARM_POE: usize = 0x40f;
/// `struct user_gcs`: enabled features 8, locked ones 8, pointer 8.
const NT_ARM_GCS: usize = 0x410;

/// Bytes of `struct user_sve_header`.
const HEADER: usize = 16;

/// What `note` holds, as far as `into` reaches: the number of bytes. `None` if this machine or kernel has no such set.
fn get(tid: Pid, note: usize, into: &mut [u8]) -> nix::Result<usize> {
    let mut vector = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    // SAFETY: writes at most `iov_len` bytes to `into` (ptrace(2), PTRACE_GETREGSET).
    let answer = unsafe { libc::ptrace(libc::PTRACE_GETREGSET, tid.as_raw(), note, &raw mut vector) };
    nix::errno::Errno::result(answer).map(|_| vector.iov_len)
}

fn word(tid: Pid, note: usize) -> Option<u64> {
    let mut bytes = [0; 8];
    (get(tid, note, &mut bytes).ok()? == bytes.len()).then(|| u64::from_le_bytes(bytes))
}

/// The registers of a stopped thread.
///
/// # Errors
/// Those of ptrace: it is gone, or not stopped; also when it runs 32-bit code and has other registers.
pub fn registers(tid: Pid) -> nix::Result<Registers> {
    const WORDS: usize = 34;
    let mut bytes = [0; WORDS * 8];
    if get(tid, NT_PRSTATUS, &mut bytes)? != bytes.len() {
        return Ok(Registers::foreign());
    }
    let mut regs = Registers::default();
    let places = regs.x.iter_mut().chain([&mut regs.sp, &mut regs.pc, &mut regs.pstate]);
    let (words, _) = bytes.as_chunks::<8>();
    for (place, word) in places.zip(words) {
        *place = u64::from_le_bytes(*word);
    }
    regs.first_argument = regs.get(0);
    regs.thread_pointer = word(tid, NT_ARM_TLS).unwrap_or(0);
    let mut call = [0xff; 4];
    let _ = get(tid, NT_ARM_SYSTEM_CALL, &mut call);
    regs.call = i64::from(i32::from_le_bytes(call));
    let next = ptrace::read(tid, regs.pc as ptrace::AddressType);
    regs.next_is_call = u64::from(next.is_ok_and(|next| next as u32 == SVC));
    Ok(regs)
}

/// Sets the general registers of a stopped thread, all at once.
///
/// # Errors
/// Those of ptrace; nothing has changed then.
pub fn set_registers(tid: Pid, regs: &Registers) -> nix::Result<()> {
    let mut words = [0; 34];
    let values = regs.x.into_iter().chain([regs.sp, regs.pc, regs.pstate]);
    for (word, value) in words.iter_mut().zip(values) {
        *word = value;
    }
    let vector = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: size_of_val(&words),
    };
    // SAFETY: reads `iov_len` bytes of the local array (ptrace(2), PTRACE_SETREGSET).
    let answer = unsafe { libc::ptrace(libc::PTRACE_SETREGSET, tid.as_raw(), NT_PRSTATUS, &raw const vector) };
    nix::errno::Errno::result(answer).map(drop)
}

/// State of a stopped thread that neither a call nor a frame of ours would keep.
pub(super) struct Extra {
    /// The wide registers of SVE hold something, or the thread is in streaming mode: any system call discards that
    /// (`fp_user_discard`, `arch/arm64/kernel/entry-common.c`).
    pub wide: bool,
    /// ZA is on.
    pub za: bool,
    /// There are overlay permissions.
    pub overlays: bool,
    /// There is a guarded control stack (a shadow stack), with which a frame would have to agree.
    pub guarded: bool,
}

impl Extra {
    pub(super) fn of(tid: Pid) -> Self {
        const SVE_PT_REGS_SVE: u16 = 1;
        const SHADOW_STACK_ENABLE: u64 = 1;
        let header = |note| {
            let mut bytes = [0; HEADER];
            (get(tid, note, &mut bytes) == Ok(HEADER)).then_some(bytes)
        };
        let is_live = |note| header(note).is_some_and(|h| u16::from_le_bytes([h[12], h[13]]) & SVE_PT_REGS_SVE != 0);
        Self {
            wide: is_live(NT_ARM_SVE) || is_live(NT_ARM_SSVE),
            za: header(NT_ARM_ZA)
                .is_some_and(|h| usize::try_from(u32::from_le_bytes([h[0], h[1], h[2], h[3]])).ok() > Some(HEADER)),
            overlays: word(tid, NT_ARM_POE).is_some(),
            guarded: word(tid, NT_ARM_GCS).is_some_and(|features| features & SHADOW_STACK_ENABLE != 0),
        }
    }
}
