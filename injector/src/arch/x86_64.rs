//! x86-64: registers of a stopped thread, system-call restart, and the stubs.

use super::{Call, Gadgets, Job, LONGEST_STUB, Signals};
use libc::user_regs_struct;
use nix::sys::ptrace;
use nix::unistd::Pid;

/// Registers of a thread.
pub type Registers = user_regs_struct;

/// pyheap can enter processes on this machine.
pub const CAN_ENTER: bool = true;

/// A slot for a stub, in bytes. [`Job::Copy`] takes two of them.
pub const STUB_BYTES: usize = 480;

/// End of user space: with four levels of page tables, which is what a process gets that does not ask for more.
#[must_use]
pub const fn user_end(_highest: u64) -> u64 {
    0x7fff_ffff_f000
}

/// What seccomp's filters know this processor by: `AUDIT_ARCH_X86_64` (`uapi/linux/audit.h`).
pub const AUDIT_ARCH: u32 = 0xc000_003e;

const SYS_MMAP: u64 = 9;
const SYS_MPROTECT: u64 = 10;
const SYS_MUNMAP: u64 = 11;
const SYS_MUNLOCK: u64 = 150;
const SYS_CLONE: u64 = 56;
const SYS_WAIT4: u64 = 61;
const SYS_PRCTL: u64 = 157;
const SYS_CLOCK_NANOSLEEP: u64 = 230;
const SYS_EXIT_GROUP: u64 = 231;
const SYS_CLOSE_RANGE: u64 = 436;
const SYS_RESTART: u64 = 219;

const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;
const EINTR: i64 = -4;

/// The registers of a stopped thread.
///
/// # Errors
/// Those of ptrace: it is gone, or not stopped.
pub fn registers(tid: Pid) -> nix::Result<Registers> {
    ptrace::getregs(tid)
}

/// Sets the registers of a stopped thread, all at once.
///
/// # Errors
/// Those of ptrace; nothing has changed then.
pub fn set_registers(tid: Pid, regs: &Registers) -> nix::Result<()> {
    ptrace::setregs(tid, *regs)
}

/// The system call that a thread is about to make, where how it goes on cannot be seen before it has: here it can, see
/// [`resumed`].
#[must_use]
pub const fn at_call(_stopped: &Registers) -> Option<(u64, [u64; 6])> {
    None
}

/// The registers at the end of a call, for a thread that stood `before` it, see [`at_call`].
#[must_use]
pub const fn ended_call(_before: &Registers, now: &Registers) -> Option<Registers> {
    Some(*now)
}

/// True if a stub at `stub`, or a frame of ours (`None`), can resume a stopped thread with all that it has: here any.
#[must_use]
pub const fn fit(_tid: Pid, _stopped: &Registers, _stub: Option<u64>) -> bool {
    true
}

/// True if the kernel would restart the call that the thread was stopped in.
#[must_use]
pub fn is_restart(stopped: &Registers) -> bool {
    stopped.orig_rax as i64 >= 0
        && matches!(
            stopped.rax as i64,
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK
        )
}

/// What a stopped thread was doing.
#[must_use]
pub const fn doing(stopped: &Registers) -> crate::freeze::At {
    let regs = stopped;
    place(regs.orig_rax, regs.rax, regs.rdi, regs.rip, regs.fs_base)
}

const fn place(orig_rax: u64, rax: u64, rdi: u64, rip: u64, fs_base: u64) -> crate::freeze::At {
    let waits = orig_rax as i64 >= 0
        && matches!(
            rax as i64,
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK | EINTR
        );
    crate::freeze::At {
        call: if waits { Some(orig_rax) } else { None },
        first_argument: rdi,
        instruction: rip,
        thread_pointer: fs_base,
    }
}

/// A thread of a core file, from its note `NT_PRSTATUS` (`struct elf_prstatus`): number and registers.
#[must_use]
pub fn core_thread(note: &[u8]) -> Option<(i32, crate::freeze::At)> {
    const PID_AT: usize = 32;
    const REGISTERS_AT: usize = 112;
    let tid = i32::from_le_bytes(*note.get(PID_AT..)?.first_chunk()?);
    // In the order of `struct user_regs_struct`.
    let word = |number: usize| {
        let bytes = note.get(REGISTERS_AT + number * 8..)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    };
    let (rax, rdi, orig_rax, rip, fs_base) = (word(10)?, word(14)?, word(15)?, word(16)?, word(21)?);
    Some((tid, place(orig_rax, rax, rdi, rip, fs_base)))
}

/// Flags that a stub must not run with: single step, direction.
const TF_AND_DF: u64 = 0x100 | 0x400;
/// Length of the `syscall` instruction, which a restarted call executes again.
const SYSCALL_BYTES: u64 = 2;

/// The registers with which the thread must go on so that the program does not notice the stop.
///
/// A call that the stop interrupted shows one of the kernel's restart codes in `rax` while `orig_rax` is its number. The
/// kernel would act on them when the thread resumes; we resume it elsewhere, so we do the same by hand: execute the
/// `syscall` instruction again with the call's number, or, for calls that keep their deadline in the thread's restart
/// block (poll, nanosleep, futex with a timeout), with that of `restart_syscall`, which goes on with the time that is left.
#[must_use]
pub fn resumed(stopped: &Registers) -> Registers {
    let mut regs = *stopped;
    if stopped.orig_rax as i64 >= 0 {
        let number = match stopped.rax as i64 {
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => Some(stopped.orig_rax),
            ERESTART_RESTARTBLOCK if waits_until(stopped) => Some(stopped.orig_rax),
            ERESTART_RESTARTBLOCK => Some(SYS_RESTART),
            EINTR if restarts_whole(stopped) => Some(stopped.orig_rax),
            _ => None,
        };
        if let Some(number) = number {
            regs.rax = number;
            regs.rip = regs.rip.wrapping_sub(SYSCALL_BYTES);
        }
    }
    regs.orig_rax = u64::MAX;
    regs
}

/// Calls that a bare stop makes fail with EINTR although no signal came, and that can simply be made again: those
/// without a timeout, and those of which the timeout only starts with the next piece of data.
fn restarts_whole(regs: &Registers) -> bool {
    match regs.orig_rax {
        // recvfrom, accept, accept4, recvmsg (with SO_RCVTIMEO), semop
        45 | 43 | 288 | 47 | 65 => true,
        // epoll_wait, epoll_pwait: timeout in milliseconds, negative = none
        232 | 281 => (regs.r10 as i32) < 0,
        // epoll_pwait2, semtimedop: pointer to the timeout
        441 | 220 => regs.r10 == 0,
        // rt_sigtimedwait
        128 => regs.rdx == 0,
        _ => false,
    }
}

/// How well a thread that is blocked in system call `number` bears a stop: 0 best. `None` = it must not be stopped: the call
/// would return with a part of what it has done, which programs need not expect.
#[must_use]
pub fn restart_class(number: u64, args: [u64; 6]) -> Option<u8> {
    const MSG_WAITALL: u64 = 0x100;
    match number {
        // read, select, wait4, futex, waitid, pselect6, ppoll
        0 | 23 | 61 | 202 | 247 | 270 | 271 => Some(0),
        // Those with a restart block: poll, nanosleep, clock_nanosleep, restart_syscall
        7 | 35 | 230 | 219 => Some(1),
        // recvfrom, recvmsg
        45 if args[3] & MSG_WAITALL != 0 => None,
        47 if args[2] & MSG_WAITALL != 0 => None,
        // accept, accept4, recvfrom, recvmsg, connect, pause, flock
        43 | 288 | 45 | 47 | 42 | 34 | 73 => Some(2),
        // epoll_wait, epoll_pwait without timeout
        232 | 281 if (args[3] as i32) < 0 => Some(2),
        // write, pwrite64, writev, pwritev, pwritev2, sendto, sendmsg, sendmmsg, sendfile, splice, vmsplice, tee,
        // copy_file_range
        1 | 18 | 20 | 296 | 328 | 44 | 46 | 307 | 40 | 275 | 278 | 276 | 326 => None,
        _ => Some(4),
    }
}

/// True for a call with a timeout, ended by any stop, that some C library makes again with its whole timeout:
/// `rt_sigtimedwait`, which musl makes so.
#[must_use]
pub const fn starts_timeout_anew(number: u64, args: [u64; 6]) -> bool {
    number == 128 && args[2] != 0
}

/// The instruction that a signal has interrupted, if a signal's frame begins at the `at`th word of a stack: with the address of
/// the `restorer`. `word` gives words of that stack.
pub fn interrupted(word: impl Fn(usize) -> Option<u64>, at: usize, restorer: Option<u64>) -> Option<u64> {
    /// In `ucontext`, after flags, link and stack, the 17th word of `sigcontext`.
    const INSTRUCTION: usize = 8 + 40 + 16 * 8;
    let is_frame = word(at)? == restorer?;
    if is_frame { word(at + INSTRUCTION / 8) } else { None }
}

/// Asks the processor everything that [`stub`] and [`return_frame`] need to know. The answers are kept; in a virtual
/// machine a question takes some 20 µs, so it must not be asked while a thread stands still.
pub fn ask_processor() {
    let _ = (has_xsave(), xsave_ends());
}

fn has_xsave() -> bool {
    std::arch::is_x86_feature_detected!("xsave")
}

/// For each component of the extended state that user frames have, where it ends in the standard format; 0 for others.
fn xsave_ends() -> &'static [u32; 63] {
    static ENDS: std::sync::OnceLock<[u32; 63]> = std::sync::OnceLock::new();
    ENDS.get_or_init(|| {
        let mut ends = [0; 63];
        for (feature, end) in (0..).zip(&mut ends).skip(2) {
            let leaf = std::arch::x86_64::__cpuid_count(0xd, feature);
            // Bit 0 of ecx: a supervisor state, which user frames do not have.
            if leaf.ecx & 1 == 0 {
                *end = leaf.ebx.saturating_add(leaf.eax);
            }
        }
        ends
    })
}

/// A stub in the making, on the stack: no allocation, since it is made between fork and exit.
struct Code {
    bytes: [u8; LONGEST_STUB],
    len: usize,
}

impl Code {
    fn put(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            // One that is too long is refused in the end.
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = byte;
            }
            self.len += 1;
        }
    }

    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    /// Fills the distance of the short jump whose operand is at `at`: it lands here.
    fn land(&mut self, at: usize) {
        let distance = self.len - at - 1;
        if let Some(place) = self.bytes.get_mut(at) {
            *place = distance as u8;
        }
    }

    /// `mov eax, number; syscall`
    fn call(&mut self, number: u64) {
        self.put(&[0xb8]);
        self.put(&(number as u32).to_le_bytes());
        self.put(&[0x0f, 0x05]);
    }

    /// A word among the code; its offset.
    fn data(&mut self, word: u64) -> usize {
        self.put_u64(word);
        self.len - 8
    }

    /// `rt_sigprocmask(SIG_SETMASK, the word at offset, NULL, 8)`
    fn mask(&mut self, at: usize) {
        const SYS_RT_SIGPROCMASK: u64 = 14;
        self.put(&[0xbf, libc::SIG_SETMASK as u8, 0, 0, 0]); // mov edi, SIG_SETMASK
        self.put(&[0x48, 0x8d, 0x35]); // lea rsi, [rip + distance]
        let distance = at as i32 - (self.len as i32 + 4);
        self.put(&distance.to_le_bytes());
        self.put(&[0x31, 0xd2]); // xor edx, edx
        self.put(&[0x41, 0xba, 8, 0, 0, 0]); // mov r10d, 8
        self.call(SYS_RT_SIGPROCMASK);
    }

    /// Sets `rbp` if a signal waits that has a handler and is only blocked by us. The answer is written below the red zone,
    /// where a signal's frame would be.
    fn heed_pending(&mut self, signals: Signals) {
        const SYS_RT_SIGPENDING: u64 = 127;
        const BELOW_RED_ZONE: [u8; 4] = (-0x98_i32).to_le_bytes();
        self.put(&[0x48, 0x8d, 0xbc, 0x24]); // lea rdi, [rsp - 0x98]
        self.put(&BELOW_RED_ZONE);
        self.put(&[0xbe, 8, 0, 0, 0]); // mov esi, 8
        self.call(SYS_RT_SIGPENDING);
        self.put(&[0x85, 0xc0]); // test eax, eax
        let failed = self.jump(0x75); // jne
        self.load(1, signals.caught & !signals.blocked);
        self.put(&[0x48, 0x85, 0x8c, 0x24]); // test [rsp - 0x98], rcx
        self.put(&BELOW_RED_ZONE);
        let none = self.jump(0x74); // je
        self.put(&[0xbd, 1, 0, 0, 0]); // mov ebp, 1
        self.land(failed);
        self.land(none);
    }

    /// `lea rsi, [rip + distance]` or, for other registers, by the last byte: the address of the word at `offset`.
    fn address_of(&mut self, offset: usize, modrm: u8) {
        self.put(&[0x48, 0x8d, modrm]);
        let distance = offset as i32 - (self.len as i32 + 4);
        self.put(&distance.to_le_bytes());
    }

    /// Makes a child by a plain `clone`: memory copied on write, an exit signal of 0, and the table of descriptors shared.
    /// The child takes an empty table of its own (so that what the program closes is closed), names itself, sleeps, and
    /// ends. It never comes out of here: if even `exit_group` were refused, it would end by an illegal instruction.
    fn copy(&mut self, seconds: u64, nanos: u64, name: [u8; 16]) {
        const LEA_RSI: u8 = 0x35;
        const LEA_RDX: u8 = 0x15;
        let over_data = self.jump(0xeb);
        let time = self.data(seconds);
        self.data(nanos);
        let at_name = self.len;
        self.put(&name);
        self.land(over_data);
        self.put(&[0xbf]); // mov edi, flags; no exit signal
        self.put(&libc::CLONE_FILES.to_le_bytes());
        self.put(&[0x31, 0xf6, 0x31, 0xd2, 0x45, 0x31, 0xd2, 0x45, 0x31, 0xc0]); // xor esi, edx, r10d, r8d
        self.call(SYS_CLONE);
        self.put(&[0x48, 0x85, 0xc0]); // test rax, rax
        let parent = self.jump(0x75); // jne
        self.put(&[0x31, 0xff]); // xor edi, edi
        self.put(&[0xbe, 0xff, 0xff, 0xff, 0xff]); // mov esi, -1
        self.put(&[0xba, libc::CLOSE_RANGE_UNSHARE as u8, 0, 0, 0]); // mov edx, CLOSE_RANGE_UNSHARE
        self.call(SYS_CLOSE_RANGE);
        self.put(&[0x85, 0xc0]); // test eax, eax
        let end = self.jump(0x75); // jne
        self.put(&[0xbf, libc::PR_SET_NAME as u8, 0, 0, 0]); // mov edi, PR_SET_NAME
        self.address_of(at_name, LEA_RSI);
        self.call(SYS_PRCTL);
        self.put(&[0xbf, libc::CLOCK_MONOTONIC as u8, 0, 0, 0]); // mov edi, CLOCK_MONOTONIC
        self.put(&[0x31, 0xf6]); // xor esi, esi
        self.address_of(time, LEA_RDX);
        self.put(&[0x45, 0x31, 0xd2]); // xor r10d, r10d
        self.call(SYS_CLOCK_NANOSLEEP);
        self.land(end);
        self.put(&[0x31, 0xff]); // xor edi, edi
        self.call(SYS_EXIT_GROUP);
        self.put(&[0x0f, 0x0b]); // ud2
        self.land(parent);
    }

    /// `wait4(child, NULL, __WALL | WNOHANG, NULL)`
    fn reap(&mut self, child: i32) {
        self.put(&[0xbf]); // mov edi, child
        self.put(&child.to_le_bytes());
        self.put(&[0x31, 0xf6]); // xor esi, esi
        self.put(&[0xba]); // mov edx, options
        self.put(&(libc::__WALL | libc::WNOHANG).to_le_bytes());
        self.put(&[0x45, 0x31, 0xd2]); // xor r10d, r10d
        self.call(SYS_WAIT4);
    }

    /// A short jump; returns where its operand is.
    fn jump(&mut self, opcode: u8) -> usize {
        self.put(&[opcode, 0]);
        self.len - 1
    }

    /// `mov r64, value`, by the register's number.
    fn load(&mut self, register: u8, value: u64) {
        self.put(&[0x48 | register >> 3, 0xb8 + (register & 7)]);
        self.put_u64(value);
    }

    /// Restores all general registers and the arithmetic flags, and jumps to where the thread was: as `back` says, or, if
    /// `rbp` is 1, with `interrupted` in `rax` to where it was stopped. Uses no stack: the thread's own may be anything.
    fn restore(&mut self, back: &Registers, stopped: &Registers) {
        // mov eax, flags: AH takes SF ZF AF PF CF, AL overflows or not with the addition.
        let overflow = if back.eflags & 0x800 != 0 { 0x7f } else { 0 };
        let low = ((back.eflags & 0xff) << 8) as u32 | overflow;
        self.put(&[0xb8]);
        self.put(&low.to_le_bytes());
        self.put(&[0x04, 0x01]); // add al, 1
        self.put(&[0x9e]); // sahf
        self.put(&[if back.eflags & 0x400 != 0 { 0xfd } else { 0xfc }]); // std or cld
        // From here on nothing may touch the flags.
        self.put(&[0x48, 0x89, 0xe9]); // mov rcx, rbp
        const RDX_RBX_RSP_RBP_RSI_RDI: [u8; 6] = [2, 3, 4, 5, 6, 7];
        let values = [back.rdx, back.rbx, back.rsp, back.rbp, back.rsi, back.rdi];
        for (register, value) in RDX_RBX_RSP_RBP_RSI_RDI.into_iter().zip(values) {
            self.load(register, value);
        }
        for (number, value) in [back.r8, back.r9, back.r10, back.r11].into_iter().enumerate() {
            self.load(8 + number as u8, value);
        }
        for (number, value) in [back.r12, back.r13, back.r14, back.r15].into_iter().enumerate() {
            self.load(12 + number as u8, value);
        }
        let as_was = self.jump(0xe3); // jrcxz
        self.leave(EINTR as u64, back.rcx, stopped.rip);
        self.land(as_was);
        self.leave(back.rax, back.rcx, back.rip);
    }

    fn leave(&mut self, rax: u64, rcx: u64, rip: u64) {
        self.load(0, rax);
        self.load(1, rcx);
        self.put(&[0xff, 0x25, 0, 0, 0, 0]); // jmp [rip]
        self.put_u64(rip);
    }
}

/// The stub's first instructions, by offset: where the kernel goes when it restarts the interrupted call (it sets the
/// instruction pointer back by the length of `syscall`), where it goes when a signal's handler has interrupted that call for
/// good, and where a thread that was in no such call begins.
const RESTARTED: u64 = 0;
const INTERRUPTED: u64 = SYSCALL_BYTES;
const PLAIN: u64 = 7;

/// Makes the stub that does `job` and then resumes the thread that is `stopped`, and the registers to enter it with at
/// `stub`. It is no longer than [`Job::room`]: `None` if it would have to be.
///
/// A thread that was in a call which is to be restarted enters with the kernel's restart code still in its registers: so it
/// is the kernel that decides, when the thread gets to run, between making the call again and letting a signal that came
/// meanwhile interrupt it. The stub only remembers the decision (in `rbp`), and acts on it after its job. While it works it
/// blocks all signals; one that came in this time and has a handler interrupts the call as well.
#[must_use]
pub fn stub(job: Job, stub: u64, stopped: &Registers, signals: Signals) -> Option<([u8; LONGEST_STUB], Registers)> {
    let back = &resumed(stopped);
    let mut code = Code {
        bytes: [0xcc; LONGEST_STUB],
        len: 0,
    };
    let mut enter = *back;
    enter.eflags &= !TF_AND_DF;
    enter.rbp = 0;
    let restart = is_restart(stopped);
    if restart {
        (enter.rax, enter.orig_rax, enter.rip) = (stopped.rax, stopped.orig_rax, stub + INTERRUPTED);
    } else {
        (enter.orig_rax, enter.rip) = (u64::MAX, stub + PLAIN);
    }
    code.put(&[0xeb, (PLAIN - INTERRUPTED) as u8]); // RESTARTED: jmp PLAIN
    code.put(&[0xbd, 1, 0, 0, 0]); // INTERRUPTED: mov ebp, 1
    debug_assert!(RESTARTED == 0 && code.len as u64 == PLAIN);
    let over_data = code.jump(0xeb);
    let all = code.data(u64::MAX);
    let before = code.data(signals.blocked);
    code.land(over_data);
    code.mask(all);
    match job {
        Job::Map {
            address,
            len,
            nonce,
            locked,
        } => {
            const ACCESS: u8 = (libc::PROT_READ | libc::PROT_WRITE) as u8;
            let at_first = if locked { libc::PROT_NONE as u8 } else { ACCESS };
            const FLAGS: i32 =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
            (enter.r12, enter.r13) = (address, len);
            code.put(&[0x4c, 0x89, 0xe7]); // mov rdi, r12
            code.put(&[0x4c, 0x89, 0xee]); // mov rsi, r13
            code.put(&[0xba, at_first, 0, 0, 0]); // mov edx, protection
            code.put(&[0x41, 0xba]); // mov r10d, flags
            code.put(&FLAGS.to_le_bytes());
            code.put(&[0x49, 0xc7, 0xc0, 0xff, 0xff, 0xff, 0xff]); // mov r8, -1
            code.put(&[0x45, 0x31, 0xc9]); // xor r9d, r9d
            code.call(SYS_MMAP);
            code.put(&[0x48, 0x39, 0xf8]); // cmp rax, rdi
            let elsewhere = code.jump(0x75); // jne
            let not_accessible = locked.then(|| {
                code.call(SYS_MUNLOCK); // of rdi and rsi, which calls leave as they are
                code.put(&[0xba, ACCESS, 0, 0, 0]); // mov edx, protection
                code.call(SYS_MPROTECT);
                code.put(&[0x48, 0x85, 0xc0]); // test rax, rax
                code.jump(0x75) // jne
            });
            code.put(&[0x4c, 0x89, 0x6f, 0x08]); // mov [rdi + 8], r13
            code.put(&[0x48, 0xb8]); // mov rax, nonce
            code.put_u64(nonce);
            code.put(&[0x48, 0x89, 0x07]); // mov [rdi], rax
            let done = code.jump(0xeb);
            code.land(elsewhere);
            // Kernels before 4.17 do not know NOREPLACE and map elsewhere: undo that.
            code.put(&[0x48, 0x85, 0xc0]); // test rax, rax
            let failed = code.jump(0x78); // js
            code.put(&[0x48, 0x89, 0xc7]); // mov rdi, rax
            if let Some(not_accessible) = not_accessible {
                code.land(not_accessible);
            }
            code.call(SYS_MUNMAP);
            code.land(done);
            code.land(failed);
        }
        Job::Call {
            text,
            text_len,
            function,
            xsave,
            status,
            refused,
        } => {
            enter.rbx = text;
            enter.r12 = status;
            enter.r13 = refused;
            enter.r14 = function;
            enter.r15 = xsave;
            let wide = has_xsave();
            code.put(&[0x48, 0x89, 0xdf]); // mov rdi, rbx
            code.put(&[0xbe]); // mov esi, length
            code.put(&(text_len as u32).to_le_bytes());
            code.put(&[0xba, (libc::PROT_READ | libc::PROT_EXEC) as u8, 0, 0, 0]); // mov edx, protection
            code.call(SYS_MPROTECT);
            code.put(&[0x48, 0x85, 0xc0]); // test rax, rax
            let refused = code.jump(0x75); // jne
            code.put(&[0x4c, 0x89, 0xfc]); // mov rsp, r15
            // xsave64 [r15] with all components, or fxsave64 [r15]
            let save = |code: &mut Code, extension: u8| {
                if wide {
                    code.put(&[0x83, 0xc8, 0xff]); // or eax, -1
                    code.put(&[0x83, 0xca, 0xff]); // or edx, -1
                    code.put(&[0x49, 0x0f, 0xae, 0x07 | (extension + 4) << 3]);
                } else {
                    code.put(&[0x49, 0x0f, 0xae, 0x07 | extension << 3]);
                }
            };
            save(&mut code, 0); // xsave64 = 0f ae /4, fxsave64 = 0f ae /0
            code.put(&[0x41, 0xff, 0xd6]); // call r14
            save(&mut code, 1); // xrstor64 = 0f ae /5, fxrstor64 = 0f ae /1
            let done = code.jump(0xeb);
            code.land(refused);
            code.put(&[0x48, 0xf7, 0xd8]); // neg rax
            code.put(&[0x49, 0x89, 0x44, 0x24, 0x08]); // mov [r12 + 8], rax
            code.put(&[0x4d, 0x89, 0x2c, 0x24]); // mov [r12], r13
            code.land(done);
            code.load(4, back.rsp);
        }
        Job::Unmap { address, len } => {
            (enter.r12, enter.r13) = (address, len);
            code.put(&[0x4c, 0x89, 0xe7]); // mov rdi, r12
            code.put(&[0x4c, 0x89, 0xee]); // mov rsi, r13
            code.call(SYS_MUNMAP);
        }
        Job::Copy { seconds, nanos, name } => code.copy(seconds, nanos, name),
        Job::Reap { child } => code.reap(child),
    }
    if restart {
        code.heed_pending(signals);
    }
    code.mask(before);
    code.restore(back, stopped);
    (code.len <= job.room()).then_some((code.bytes, enter))
}

/// Longest frame that [`return_frame`] makes.
pub const RETURN_FRAME_BYTES: usize = 20 << 10;
/// Largest extended state that it takes.
pub const MAX_XSTATE_BYTES: usize = 16 << 10;

/// The extended state that it takes with it: `NT_X86_XSTATE`.
pub const XSTATE_NOTE: usize = 0x202;

/// The bytes of [`Gadgets`]: `syscall; ret`.
pub const CALL_GADGET: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15, %rax; syscall`
pub const RESTORER_GADGET: &[u8] = &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];

/// As [`resumed`], for a thread that is resumed by `rt_sigreturn`, which resets the restart block of a call that is to go on
/// with the time that is left: `None` for such a call.
#[must_use]
pub fn resumed_by_return(stopped: &Registers) -> Option<Registers> {
    let back = resumed(stopped);
    (back.rax != SYS_RESTART || back.rip == stopped.rip).then_some(back)
}

/// A futex wait whose timeout is a point in time: it can be made anew and ends when it would have.
fn waits_until(regs: &Registers) -> bool {
    const SYS_FUTEX: u64 = 202;
    const FUTEX_COMMAND: u64 = 0x7f;
    const FUTEX_WAIT_BITSET: u64 = 9;
    regs.orig_rax == SYS_FUTEX && regs.rsi & FUTEX_COMMAND == FUTEX_WAIT_BITSET
}

/// The extended state as a signal frame holds it: its size and features without those that the thread does not use (AMX is
/// dynamic: the kernel takes a larger frame for a broken one). `None` if that cannot be told.
fn frame_xstate(xstate: &[u8]) -> Option<(usize, u64)> {
    const AMX: u64 = 3 << 17;
    const LEGACY_AND_HEADER: usize = 576;
    let word = |at: usize| Some(u64::from_le_bytes(xstate.get(at..at + 8)?.try_into().ok()?));
    // The kernel puts the mask of the enabled features where a signal frame has it, too.
    let (enabled, in_use) = (word(464)?, word(512)?);
    if in_use & AMX != 0 {
        return None;
    }
    let features = enabled & !AMX;
    let mut len = LEGACY_AND_HEADER;
    for (feature, &end) in xsave_ends().iter().enumerate() {
        if features >> feature & 1 == 1 {
            len = len.max(end as usize);
        }
    }
    (len <= xstate.len() && len <= MAX_XSTATE_BYTES).then_some((len, features))
}

/// Makes a signal frame below `regs.rsp` that `rt_sigreturn` resumes the thread from as `back` says, and the registers
/// with which the thread makes `call` first, by instructions of its own C library alone: for what must not be done by a
/// stub, namely dropping the page that the stubs were in. Returns the frame's address, its length in `frame`, and the
/// registers; `None` when the state cannot be put into a frame.
pub fn return_frame(
    frame: &mut [u8; RETURN_FRAME_BYTES],
    call: Call,
    gadgets: Gadgets,
    back: &Registers,
    sigmask: u64,
    xstate: &[u8],
) -> Option<(u64, usize, Registers)> {
    const RED_ZONE: u64 = 128;
    const CONTEXT: usize = 512;
    const UC_FP_XSTATE_AND_SS: u64 = 1 | 2 | 4;
    let (len, features) = frame_xstate(xstate)?;
    let total = CONTEXT + len + 64;
    let base = back.rsp.checked_sub(RED_ZONE + total as u64)? & !63;
    frame.get_mut(..total)?.fill(0);
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = frame.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    let state = base + CONTEXT as u64;
    // struct rt_sigframe: return address, ucontext (flags, link, stack, sigcontext, mask).
    put(0, &gadgets.restorer.to_le_bytes());
    put(8, &UC_FP_XSTATE_AND_SS.to_le_bytes());
    let words = [
        back.r8,
        back.r9,
        back.r10,
        back.r11,
        back.r12,
        back.r13,
        back.r14,
        back.r15,
        back.rdi,
        back.rsi,
        back.rbp,
        back.rbx,
        back.rdx,
        back.rax,
        back.rcx,
        back.rsp,
        back.rip,
        back.eflags,
        // cs, gs, fs, ss
        back.cs & 0xffff | (back.ss & 0xffff) << 48,
        0,
        0,
        sigmask,
        0,
        state,
    ];
    for (number, word) in words.into_iter().enumerate() {
        put(8 + 40 + number * 8, &word.to_le_bytes());
    }
    put(8 + 40 + 256, &sigmask.to_le_bytes());
    put(CONTEXT, xstate.get(..len)?);
    // struct _fpx_sw_bytes, and the mark behind the state.
    put(CONTEXT + 464, &0x4650_5853_u32.to_le_bytes());
    put(CONTEXT + 468, &(len as u32 + 4).to_le_bytes());
    put(CONTEXT + 472, &features.to_le_bytes());
    put(CONTEXT + 480, &(len as u32).to_le_bytes());
    put(CONTEXT + 484, &[0; 28]);
    put(CONTEXT + len, &0x4650_5845_u32.to_le_bytes());
    let mut enter = *back;
    (enter.rip, enter.rsp, enter.rax, enter.orig_rax) = (gadgets.call, base, call.number, u64::MAX);
    [enter.rdi, enter.rsi, enter.rdx] = call.args;
    enter.eflags &= !TF_AND_DF;
    Some((base, total, enter))
}

/// True if `rip` or any general register points into `range`: the thread is in it, or about to jump there.
#[must_use]
pub fn touches(regs: &Registers, range: &std::ops::Range<u64>) -> bool {
    [
        regs.rip, regs.rax, regs.rbx, regs.rcx, regs.rdx, regs.rsi, regs.rdi, regs.rbp, regs.r8, regs.r9, regs.r10,
        regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ]
    .iter()
    .any(|value| range.contains(value))
}

/// True for a thread that runs 32-bit code.
#[must_use]
pub const fn is_foreign(regs: &Registers) -> bool {
    /// Code segment of 64-bit user code.
    const USER_CS: u64 = 0x33;
    regs.cs != USER_CS
}

/// The stack pointer.
#[must_use]
pub const fn stack_pointer(regs: &Registers) -> u64 {
    regs.rsp
}

/// The thread pointer, where it is among the registers.
#[must_use]
pub const fn thread_pointer(regs: &Registers) -> u64 {
    regs.fs_base
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers() -> Registers {
        // SAFETY: a plain struct of integers.
        #[expect(unsafe_code, reason = "libc gives no other constructor")]
        unsafe {
            std::mem::zeroed()
        }
    }

    #[test]
    fn interrupted_calls_are_made_again() {
        for code in [-512_i64, -513, -514] {
            let mut regs = registers();
            (regs.rax, regs.orig_rax, regs.rip) = (code as u64, 202, 0x1002);
            let back = resumed(&regs);
            assert_eq!((back.rax, back.rip, back.orig_rax), (202, 0x1000, u64::MAX));
        }
        let mut regs = registers();
        (regs.rax, regs.orig_rax, regs.rip) = (-516_i64 as u64, 7, 0x1002);
        assert_eq!((resumed(&regs).rax, resumed(&regs).rip), (219, 0x1000));
    }

    #[test]
    fn a_relative_timeout_does_not_start_again() {
        let mut regs = registers();
        (regs.rax, regs.orig_rax, regs.rip) = (-516_i64 as u64, 7, 0x1002);
        assert!(resumed_by_return(&regs).is_none(), "poll");
        (regs.orig_rax, regs.rsi) = (202, 0x80);
        assert!(resumed_by_return(&regs).is_none(), "FUTEX_WAIT");
        regs.rsi = 0x189;
        let back = resumed_by_return(&regs).unwrap();
        assert_eq!(
            (back.rax, back.rip),
            (202, 0x1000),
            "FUTEX_WAIT_BITSET has an absolute one"
        );
    }

    #[test]
    fn a_finished_call_keeps_its_result_and_user_code_its_registers() {
        let mut regs = registers();
        (regs.rax, regs.orig_rax, regs.rip) = (17, 0, 0x1002);
        assert_eq!((resumed(&regs).rax, resumed(&regs).rip), (17, 0x1002));
        (regs.rax, regs.orig_rax) = (-512_i64 as u64, u64::MAX);
        assert_eq!((resumed(&regs).rax, resumed(&regs).rip), (-512_i64 as u64, 0x1002));
    }

    #[test]
    fn a_finite_epoll_wait_is_left_to_the_program() {
        let mut regs = registers();
        (regs.rax, regs.orig_rax, regs.rip, regs.r10) = (-4_i64 as u64, 232, 0x1002, 500);
        assert_eq!(resumed(&regs).rax as i64, -4);
        regs.r10 = u64::from(u32::MAX);
        assert_eq!((resumed(&regs).rax, resumed(&regs).rip), (232, 0x1000));
    }

    #[test]
    fn the_kernel_decides_how_an_interrupted_call_goes_on() {
        let mut regs = registers();
        (regs.rax, regs.orig_rax, regs.rip, regs.rbp) = (-514_i64 as u64, 23, 0x1002, 77);
        let job = Job::Unmap { address: 1, len: 2 };
        let (bytes, enter) = stub(job, 0x5000, &regs, Signals::default()).unwrap();
        assert_eq!(
            (enter.rax as i64, enter.orig_rax, enter.rip, enter.rbp),
            (-514, 23, 0x5002, 0)
        );
        // Restarted: back to the instruction with the call's number. Interrupted: behind it, with EINTR.
        for (rax, rip) in [(23_u64, 0x1000_u64), (-4_i64 as u64, 0x1002)] {
            let mut way = [0; 10];
            way[..2].copy_from_slice(&[0x48, 0xb8]);
            way[2..].copy_from_slice(&rax.to_le_bytes());
            let at = bytes.windows(10).position(|w| w == way).expect("it loads rax");
            assert_eq!(bytes[at + 26..at + 34], rip.to_le_bytes());
        }
        (regs.rax, regs.orig_rax) = (5, u64::MAX);
        let (_, enter) = stub(job, 0x5000, &regs, Signals::default()).unwrap();
        assert_eq!((enter.orig_rax, enter.rip), (u64::MAX, 0x5007));
    }

    #[test]
    fn every_stub_fits_its_slot() {
        for job in [
            Job::Map {
                address: 1,
                len: 2,
                nonce: 3,
                locked: true,
            },
            Job::Call {
                text: 1,
                text_len: 2,
                function: 3,
                xsave: 4,
                status: 5,
                refused: 6,
            },
            Job::Unmap { address: 1, len: 2 },
            Job::Copy {
                seconds: 60,
                nanos: 0,
                name: [b'x'; 16],
            },
            Job::Reap { child: 7 },
        ] {
            let mut back = registers();
            back.rip = 0x1122_3344_5566_7788;
            let plain = stub(job, 0x1000, &back, Signals::default());
            // A call that is to be restarted makes it longer.
            (back.rax, back.orig_rax) = (-512_i64 as u64, 202);
            let longest = stub(job, 0x1000, &back, Signals::default());
            for (bytes, _) in [plain.expect("it fits"), longest.expect("it fits")] {
                assert!(bytes[job.room() - 1] == 0xcc, "{job:?} fills its slot");
                let address = back.rip.to_le_bytes();
                assert!(bytes.windows(8).any(|w| w == address), "{job:?} is cut");
            }
        }
    }
}
