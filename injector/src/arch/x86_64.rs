//! x86-64: registers of a stopped thread, system-call restart, and the stubs.

use libc::user_regs_struct;

/// Registers of a thread.
pub type Registers = user_regs_struct;

/// Longest stub, in bytes; each has a slot of this size.
pub const STUB_BYTES: usize = 288;

const SYS_MMAP: u64 = 9;
const SYS_MPROTECT: u64 = 10;
const SYS_MUNMAP: u64 = 11;
const SYS_RESTART: u64 = 219;

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
    const ERESTARTSYS: i64 = -512;
    const ERESTARTNOINTR: i64 = -513;
    const ERESTARTNOHAND: i64 = -514;
    const ERESTART_RESTARTBLOCK: i64 = -516;
    const EINTR: i64 = -4;
    let mut regs = *stopped;
    if stopped.orig_rax as i64 >= 0 {
        let number = match stopped.rax as i64 {
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => Some(stopped.orig_rax),
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

/// How well a thread that is blocked in system call `number` bears a hijack: 0 best. `None` = not in a call that is known
/// to be resumed without a trace.
#[must_use]
pub fn restart_class(number: u64, args: [u64; 6]) -> Option<u8> {
    match number {
        // read, poll, select, nanosleep, wait4, futex, waitid, clock_nanosleep, pselect6, ppoll
        0 | 7 | 23 | 35 | 61 | 202 | 247 | 230 | 270 | 271 => Some(0),
        // accept, accept4, recvfrom, recvmsg, connect, pause, flock
        43 | 288 | 45 | 47 | 42 | 34 | 73 => Some(1),
        232 | 281 if (args[3] as i32) < 0 => Some(1),
        _ => None,
    }
}

/// What a stub does before it restores the thread.
#[derive(Debug, Clone, Copy)]
pub enum Job {
    /// Maps `len` bytes of private anonymous memory at `address`, read-write, and writes `nonce` there. Fails (and leaves
    /// nothing) when the place is taken.
    Map {
        /// Where.
        address: u64,
        /// How much.
        len: u64,
        /// Proof of success.
        nonce: u64,
    },
    /// Makes `text` executable, saves the extended registers at `xsave`, and calls `function` on the stack that ends at
    /// `xsave`. When the kernel refuses, stores `refused` and then the errno at `status`.
    Call {
        /// First page of text.
        text: u64,
        /// Its length.
        text_len: u64,
        /// `extern "C" fn()`
        function: u64,
        /// 64-byte aligned area of [`crate::region::XSAVE_BYTES`], zero at first; the stack ends here.
        xsave: u64,
        /// Two words.
        status: u64,
        /// See above.
        refused: u64,
    },
    /// Unmaps.
    Unmap {
        /// Where.
        address: u64,
        /// How much.
        len: u64,
    },
}

/// A stub in the making, on the stack: no allocation, since it is made between fork and exit.
struct Code {
    bytes: [u8; STUB_BYTES],
    len: usize,
}

impl Code {
    fn put(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            // A stub that were too long would be cut; the tests run every kind.
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

    /// A short jump; returns where its operand is.
    fn jump(&mut self, opcode: u8) -> usize {
        self.put(&[opcode, 0]);
        self.len - 1
    }

    /// Restores all general registers and the arithmetic flags, and jumps to where the thread was. Uses no stack: the
    /// thread's own may be anything.
    fn restore(&mut self, to: &Registers) {
        // mov eax, flags: AH takes SF ZF AF PF CF, AL overflows or not with the addition.
        let overflow = if to.eflags & 0x800 != 0 { 0x7f } else { 0 };
        let low = ((to.eflags & 0xff) << 8) as u32 | overflow;
        self.put(&[0xb8]);
        self.put(&low.to_le_bytes());
        self.put(&[0x04, 0x01]); // add al, 1
        self.put(&[0x9e]); // sahf
        self.put(&[if to.eflags & 0x400 != 0 { 0xfd } else { 0xfc }]); // std or cld
        let low_registers = [to.rax, to.rcx, to.rdx, to.rbx, to.rsp, to.rbp, to.rsi, to.rdi];
        for (number, value) in low_registers.into_iter().enumerate() {
            self.put(&[0x48, 0xb8 + number as u8]);
            self.put_u64(value);
        }
        for (number, value) in [to.r8, to.r9, to.r10, to.r11, to.r12, to.r13, to.r14, to.r15]
            .into_iter()
            .enumerate()
        {
            self.put(&[0x49, 0xb8 + number as u8]);
            self.put_u64(value);
        }
        self.put(&[0xff, 0x25, 0, 0, 0, 0]); // jmp [rip]
        self.put_u64(to.rip);
    }
}

/// Makes the stub that does `job` and then resumes the thread as `back` says, and the registers to enter it with at
/// `stub`.
#[must_use]
pub fn stub(job: Job, stub: u64, back: &Registers) -> ([u8; STUB_BYTES], Registers) {
    let mut code = Code {
        bytes: [0xcc; STUB_BYTES],
        len: 0,
    };
    let mut enter = *back;
    enter.rip = stub;
    enter.orig_rax = u64::MAX;
    enter.eflags &= !TF_AND_DF;
    match job {
        Job::Map { address, len, nonce } => {
            const FLAGS: i32 =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
            enter.rax = SYS_MMAP;
            enter.rdi = address;
            enter.rsi = len;
            enter.rdx = (libc::PROT_READ | libc::PROT_WRITE) as u64;
            enter.r10 = FLAGS as u64;
            enter.r8 = u64::MAX;
            enter.r9 = 0;
            code.put(&[0x0f, 0x05]); // syscall
            code.put(&[0x48, 0x39, 0xf8]); // cmp rax, rdi
            let elsewhere = code.jump(0x75); // jne
            code.put(&[0x48, 0xb8]); // mov rax, nonce
            code.put_u64(nonce);
            code.put(&[0x48, 0x89, 0x07]); // mov [rdi], rax
            let done = code.jump(0xeb);
            code.land(elsewhere);
            // Kernels before 4.17 do not know NOREPLACE and map elsewhere: undo that.
            code.put(&[0x48, 0x85, 0xc0]); // test rax, rax
            let failed = code.jump(0x78); // js
            code.put(&[0x48, 0x89, 0xc7]); // mov rdi, rax
            code.put(&[0xb8]); // mov eax, munmap
            code.put(&(SYS_MUNMAP as u32).to_le_bytes());
            code.put(&[0x0f, 0x05]); // syscall
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
            enter.rax = SYS_MPROTECT;
            enter.rdi = text;
            enter.rsi = text_len;
            enter.rdx = (libc::PROT_READ | libc::PROT_EXEC) as u64;
            enter.r12 = status;
            enter.r13 = refused;
            enter.r14 = function;
            enter.r15 = xsave;
            let wide = std::arch::is_x86_feature_detected!("xsave");
            code.put(&[0x0f, 0x05]); // syscall
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
        }
        Job::Unmap { address, len } => {
            enter.rax = SYS_MUNMAP;
            enter.rdi = address;
            enter.rsi = len;
            code.put(&[0x0f, 0x05]); // syscall
        }
    }
    code.restore(back);
    debug_assert!(code.len <= STUB_BYTES);
    (code.bytes, enter)
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

/// Code segment of 64-bit user code; another one means a 32-bit thread.
pub const USER_CS: u64 = 0x33;

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
    fn every_stub_fits_its_slot() {
        for job in [
            Job::Map {
                address: 1,
                len: 2,
                nonce: 3,
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
        ] {
            let mut back = registers();
            back.rip = 0x1122_3344_5566_7788;
            let (bytes, _) = stub(job, 0x1000, &back);
            let address = back.rip.to_le_bytes();
            assert!(bytes.windows(8).any(|w| w == address), "{job:?} is cut");
        }
    }
}
