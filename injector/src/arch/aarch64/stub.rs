//! The stubs.
//!
//! ```text
//!   0  b 12              RESTARTED: the kernel makes the interrupted call again
//!   4  cmn x0, #4        INTERRUPTED: it does not, a signal's handler has run
//!   8  cset x19, eq
//!  12  b start           PLAIN: the thread was in no such call
//!  16  words             the registers to restore, and what else a stub must know
//!      start …           block signals; the job; unblock them; restore; b to where the thread was
//! ```
//!
//! # How the thread gets back
//!
//! By a direct branch, since an indirect one takes a register, and all of them are to be as they were. It reaches 128 MiB: a
//! thread that is further from the stub is not taken ([`super::fit`]). (`rt_sigreturn` reaches everything, but resets the
//! restart block of a call that is to go on with the time that is left, and needs its frame on the thread's stack.)
//!
//! # Branch targets
//!
//! Code of a file may be in guarded pages (BTI). There, the first instruction after an *indirect branch* must be a landing
//! pad, which the processor knows by `PSTATE.BTYPE`; a thread that gets its program counter from ptrace is checked as
//! well if it was stopped between such a branch and its target. So the thread enters with `BTYPE` clear, and so it goes back;
//! a landing pad bears that. The branches in here are direct; `blr` goes to the image, which is not guarded.
//!
//! # Caches
//!
//! What is written to code through `/proc/PID/mem` is seen by the next fetch: the kernel writes by `copy_to_user_page`, which
//! for executable mappings cleans the data cache and invalidates the instruction cache (`flush_ptrace_access`,
//! `arch/arm64/mm/flush.c`); the thread synchronises when it returns from the kernel. The image is written where nothing is
//! executable yet, so that does nothing there; it is done when `mprotect` makes the page executable (`__sync_icache_dcache`, as
//! long as the page is not marked as clean).

use super::calls::{
    SYS_clock_nanosleep, SYS_clone, SYS_close_range, SYS_exit_group, SYS_mmap, SYS_mprotect, SYS_munlock, SYS_munmap,
    SYS_prctl, SYS_restart_syscall, SYS_rt_sigpending, SYS_rt_sigprocmask, SYS_wait4,
};
use super::code::{Branch, Code, X, in_reach};
use super::{
    BTYPE, EINTR, ERESTART_RESTARTBLOCK, ERESTARTNOHAND, FLAGS, LONGEST_STUB, Registers, STUB_BYTES, SVC_BYTES,
};
use crate::arch::{Job, Signals};

const RESTARTED: u64 = 0;
const INTERRUPTED: u64 = RESTARTED + SVC_BYTES;
const PLAIN: u64 = 12;

/// The words among the code, in this order: `x0` to `x30`, and these.
const WORDS_AT: u32 = 16;
const SP: u32 = 31;
const NZCV: u32 = 32;
const ALL_SIGNALS: u32 = 33;
const BLOCKED: u32 = 34;
const CAUGHT: u32 = 35;
const NUMBER: u32 = 36;
/// Of a copy only: how long it sleeps (`struct timespec`), and its name.
const TIME: u32 = 37;
const NAME: u32 = 39;

/// 1 if the call was interrupted for good. Calls of functions leave it alone, as they do with the job's registers.
const IS_INTERRUPTED: X = 19;
/// The job's first words: an address, its length or another address, and what to write there.
const ADDRESS: X = 21;
const LENGTH: X = 22;
const NONCE: X = 23;
const STATUS: X = 22;
const REFUSED: X = 23;
const FUNCTION: X = 24;
const XSAVE: X = 25;
/// Where the words are, while they are loaded; it is loaded last.
const WORDS: X = 30;

/// How a call that is to be made again goes on.
struct GoesOn {
    /// The kernel's code for it.
    code: i64,
    /// The number by which it is made.
    number: u64,
}

/// `None` for a thread that was in no call, or whose call is complete. A call that a bare stop ends with EINTR and that can
/// simply be made again becomes one that the kernel restarts.
fn goes_on(stopped: &Registers) -> Option<GoesOn> {
    let called = stopped.ended_call()?;
    let args = stopped.arguments();
    // A restarted call has the number that is in `x8`.
    let number = stopped.get(8);
    match stopped.get(0) as i64 {
        EINTR if super::calls::restarts_whole(called, args) => Some(GoesOn {
            code: ERESTARTNOHAND,
            number,
        }),
        // FUTEX_WAIT_BITSET, too: there the kernel knows the point in time.
        code @ ERESTART_RESTARTBLOCK => Some(GoesOn {
            code,
            number: SYS_restart_syscall,
        }),
        code if super::is_restart_code(code) => Some(GoesOn { code, number }),
        _ => None,
    }
}

/// Makes the stub that does `job` and then resumes the thread that is `stopped`, and the registers to enter it with at
/// `stub`. The thread must be [`super::fit`] for it.
///
/// A thread at the end of a call that is to go on enters with the kernel's restart code still in its registers, at the second
/// instruction: so it is the kernel that decides, when the thread gets to run, between making the call again (it then sets
/// the program counter back by one instruction) and letting a signal that came meanwhile interrupt it. The stub remembers the
/// decision, and acts on it after its job. While it works it blocks all signals; one that came in this time and has a
/// handler interrupts the call as well. `None` if it is too long for [`Job::room`].
#[must_use]
pub fn stub(job: Job, stub: u64, stopped: &Registers, signals: Signals) -> Option<([u8; LONGEST_STUB], Registers)> {
    let mut code = Code::new();
    let mut enter = *stopped;
    enter.pstate &= !BTYPE;
    let goes_on = goes_on(stopped);
    let mut inputs = [(IS_INTERRUPTED, 0); 6];
    let start = begin(&mut code, stopped, goes_on.as_ref(), signals);
    if let Job::Copy { seconds, nanos, name } = job {
        let (halves, _) = name.as_chunks::<8>();
        let words = halves.iter().map(|half| u64::from_le_bytes(*half));
        for word in [seconds, nanos].into_iter().chain(words) {
            code.word(word);
        }
    }
    code.land(start);
    block(&mut code, ALL_SIGNALS);
    match job {
        Job::Map {
            address,
            len,
            nonce,
            locked,
        } => {
            inputs[1..4].copy_from_slice(&[(ADDRESS, address), (LENGTH, len), (NONCE, nonce)]);
            map(&mut code, locked);
        }
        Job::Call {
            text,
            text_len,
            function,
            xsave,
            status,
            refused,
        } => {
            inputs[1..].copy_from_slice(&[
                (ADDRESS, text),
                (STATUS, status),
                (REFUSED, refused),
                (FUNCTION, function),
                (XSAVE, xsave),
            ]);
            call(&mut code, text_len as u32);
        }
        Job::Unmap { address, len } => {
            inputs[1..3].copy_from_slice(&[(ADDRESS, address), (LENGTH, len)]);
            code.mov(0, ADDRESS);
            code.mov(1, LENGTH);
            code.call(SYS_munmap);
        }
        Job::Copy { .. } => copy(&mut code),
        Job::Reap { child } => reap(&mut code, child),
    }
    for (number, value) in inputs {
        enter.set(number, value);
    }
    if goes_on.is_some() {
        heed_pending(&mut code);
    }
    block(&mut code, BLOCKED);
    restore(
        &mut code,
        (stopped.pc as i64).wrapping_sub(stub as i64),
        goes_on.is_some(),
    );
    if let Some(goes_on) = goes_on {
        enter.set(0, goes_on.code as u64);
        enter.pc = stub + INTERRUPTED;
    } else {
        enter.pc = stub + PLAIN;
    }
    (code.len() <= job.slots() * STUB_BYTES).then_some((code.bytes(), enter))
}

/// True if a stub at `stub` can send the thread back.
pub(super) const fn can_return(stub: u64, stopped: &Registers) -> bool {
    in_reach(stub, stopped.pc)
}

/// The entries and the words; the branch over them.
fn begin(code: &mut Code, stopped: &Registers, goes_on: Option<&GoesOn>, signals: Signals) -> Branch {
    let start_of_restarted = code.b();
    code.set_if_minus(IS_INTERRUPTED, 0, EINTR.unsigned_abs() as u32);
    debug_assert!(code.len() as u64 == PLAIN);
    code.land(start_of_restarted);
    let start = code.b();
    debug_assert!(code.len() as u32 == WORDS_AT);
    let mut back = *stopped;
    if let Some(goes_on) = goes_on {
        back.set(0, stopped.first_argument);
        back.set(8, goes_on.number);
    }
    for value in back.x {
        code.word(value);
    }
    for value in [
        stopped.sp,
        stopped.pstate & FLAGS,
        u64::MAX,
        signals.blocked,
        signals.caught & !signals.blocked,
        stopped.get(8),
    ] {
        code.word(value);
    }
    debug_assert!(code.len() as u32 == WORDS_AT + (NUMBER + 1) * 8);
    start
}

/// `rt_sigprocmask(SIG_SETMASK, the word, NULL, 8)`
fn block(code: &mut Code, word: u32) {
    code.set(0, libc::SIG_SETMASK as u32);
    code.adr(1, (WORDS_AT + word * 8) as usize);
    code.set(2, 0);
    code.set(3, 8);
    code.call(SYS_rt_sigprocmask);
}

fn map(code: &mut Code, locked: bool) {
    const ACCESS: u32 = (libc::PROT_READ | libc::PROT_WRITE) as u32;
    const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    code.mov(0, ADDRESS);
    code.mov(1, LENGTH);
    code.set(2, if locked { libc::PROT_NONE as u32 } else { ACCESS });
    code.set(3, FLAGS as u32);
    code.set_not(4, 0);
    code.set(5, 0);
    code.call(SYS_mmap);
    code.cmp(0, ADDRESS);
    let elsewhere = code.b_ne();
    let not_accessible = locked.then(|| {
        code.mov(1, LENGTH);
        code.call(SYS_munlock);
        code.mov(0, ADDRESS);
        code.set(2, ACCESS);
        code.call(SYS_mprotect);
        code.cbnz(0)
    });
    code.str(LENGTH, ADDRESS, 8);
    code.stlr(NONCE, ADDRESS);
    let done = code.b();
    code.land(elsewhere);
    // Kernels before 4.17 do not know NOREPLACE and map elsewhere: undo that.
    let failed = code.if_negative(0);
    if let Some(not_accessible) = not_accessible {
        let undo = code.b();
        code.land(not_accessible);
        code.mov(0, ADDRESS);
        code.land(undo);
    }
    code.mov(1, LENGTH);
    code.call(SYS_munmap);
    code.land(done);
    code.land(failed);
}

fn call(code: &mut Code, text_len: u32) {
    code.mov(0, ADDRESS);
    code.set(1, text_len);
    code.set(2, (libc::PROT_READ | libc::PROT_EXEC) as u32);
    code.call(SYS_mprotect);
    let refused = code.cbnz(0);
    code.set_sp(XSAVE);
    code.floating(XSAVE, false);
    code.blr(FUNCTION);
    code.floating(XSAVE, true);
    let done = code.b();
    code.land(refused);
    code.neg(0);
    code.str(0, STATUS, 8);
    code.stlr(REFUSED, STATUS);
    code.land(done);
    code.adr(WORDS, WORDS_AT as usize);
    code.ldr(1, WORDS, SP * 8);
    code.set_sp(1);
}

/// Makes a child by a plain `clone`: memory copied on write, an exit signal of 0, and the table of descriptors shared. The
/// child takes an empty table of its own (so that what the program closes is closed), names itself, sleeps, and ends. It never
/// comes out of here: if even `exit_group` were refused, it would end by an undefined instruction.
fn copy(code: &mut Code) {
    code.set(0, libc::CLONE_FILES as u32);
    // Stack, the two places for a pid with the thread pointer between them: none.
    for argument in 1..5 {
        code.set(argument, 0);
    }
    code.call(SYS_clone);
    let parent = code.cbnz(0);
    code.set(0, 0);
    code.set(1, u32::MAX);
    code.set(2, libc::CLOSE_RANGE_UNSHARE);
    code.call(SYS_close_range);
    let end = code.cbnz(0);
    code.set(0, libc::PR_SET_NAME as u32);
    code.adr(1, (WORDS_AT + NAME * 8) as usize);
    code.call(SYS_prctl);
    code.set(0, libc::CLOCK_MONOTONIC as u32);
    code.set(1, 0);
    code.adr(2, (WORDS_AT + TIME * 8) as usize);
    code.set(3, 0);
    code.call(SYS_clock_nanosleep);
    code.land(end);
    code.set(0, 0);
    code.call(SYS_exit_group);
    code.undefined();
    code.land(parent);
}

/// `wait4(child, NULL, __WALL | WNOHANG, NULL)`
fn reap(code: &mut Code, child: i32) {
    code.set(0, child as u32);
    code.set(1, 0);
    code.set(2, (libc::__WALL | libc::WNOHANG) as u32);
    code.set(3, 0);
    code.call(SYS_wait4);
}

/// Sets [`IS_INTERRUPTED`] if a signal waits that has a handler and is only blocked by us. The answer is written below the
/// stack, where a signal's frame would be; there is no red zone.
fn heed_pending(code: &mut Code) {
    const BELOW: u32 = 16;
    code.below_sp(0, BELOW);
    code.set(1, 8);
    code.call(SYS_rt_sigpending);
    let failed = code.cbnz(0);
    code.below_sp(0, BELOW);
    code.ldr(1, 0, 0);
    code.adr(2, (WORDS_AT + CAUGHT * 8) as usize);
    code.ldr(2, 2, 0);
    code.and(1, 2);
    let none = code.cbz(1);
    code.set(IS_INTERRUPTED, 1);
    code.land(failed);
    code.land(none);
}

/// Restores the flags and all general registers, and goes to where the thread was, `back` bytes from the stub. If its call
/// goes on, that is on the instruction that makes the call, or, where a signal has interrupted it, behind that with EINTR.
/// Uses no stack: the thread's own may be anything.
fn restore(code: &mut Code, back: i64, goes_on: bool) {
    let last = |code: &mut Code, distance: i64| {
        code.ldr(WORDS, WORDS, WORDS * 8);
        code.b_to(distance);
    };
    code.adr(WORDS, WORDS_AT as usize);
    code.ldr(1, WORDS, NZCV * 8);
    code.set_flags(1);
    for number in (1..18).step_by(2).chain((20..29).step_by(2)) {
        code.ldp(number, WORDS, number * 8);
    }
    let interrupted = goes_on.then(|| code.cbnz(IS_INTERRUPTED));
    code.ldr(IS_INTERRUPTED, WORDS, IS_INTERRUPTED * 8);
    code.ldr(0, WORDS, 0);
    let Some(interrupted) = interrupted else {
        return last(code, back);
    };
    last(code, back.wrapping_sub(SVC_BYTES as i64));
    code.land(interrupted);
    code.ldr(IS_INTERRUPTED, WORDS, IS_INTERRUPTED * 8);
    code.ldr(8, WORDS, NUMBER * 8);
    code.set_not(0, EINTR.unsigned_abs() as u32 - 1);
    last(code, back);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    const AT: u64 = 0x7f00_0000_1000;
    /// `futex`
    const NUMBER: u64 = 98;

    /// A thread whose registers are all different.
    fn thread() -> Registers {
        let mut regs = Registers::default();
        for number in 0..31 {
            regs.set(number, 0x0101_0101_0101_0101 * u64::from(number + 1));
        }
        (regs.sp, regs.pc, regs.pstate) = (0x7fff_f000, AT + 0x10_0004, 0x9000_1c00);
        (regs.call, regs.first_argument) = (-1, regs.get(0));
        regs
    }

    /// One at the end of a call that returned `code`.
    fn in_call(code: i64) -> Registers {
        let mut regs = thread();
        regs.set(0, code as u64);
        regs.set(8, NUMBER);
        (regs.call, regs.first_argument) = (NUMBER as i64, 0xf1f1);
        regs
    }

    const MAP: Job = Job::Map {
        address: 0x5000_0000_0000,
        len: 0x20_0000,
        nonce: 0x1122_3344_5566_7788,
        locked: false,
    };
    const MAP_LOCKED: Job = Job::Map {
        address: 0x5000_0000_0000,
        len: 0x20_0000,
        nonce: 0x1122_3344_5566_7788,
        locked: true,
    };
    const CALL: Job = Job::Call {
        text: 0x5000_0000_1000,
        text_len: 0x1_2000,
        function: 0x5000_0000_1234,
        xsave: 0x5000_0004_0000,
        status: 0x5000_0003_0000,
        refused: 7,
    };
    const UNMAP: Job = Job::Unmap {
        address: 0x5000_0000_0000,
        len: 0x20_0000,
    };
    const SIGNALS: Signals = Signals {
        blocked: 0x10,
        caught: 0x4012,
    };

    const COPY: Job = Job::Copy {
        seconds: 60,
        nanos: 5,
        name: *b"pyheap-frozen\0\0\0",
    };
    const REAP: Job = Job::Reap { child: 77 };

    fn all() -> [(&'static str, Job, Registers); 9] {
        [
            ("map, the call goes on", MAP, in_call(ERESTARTNOHAND)),
            ("map, locked, the call goes on", MAP_LOCKED, in_call(ERESTARTNOHAND)),
            (
                "call, the call goes on with the time left",
                CALL,
                in_call(ERESTART_RESTARTBLOCK),
            ),
            ("call, in no call", CALL, thread()),
            ("unmap, the call goes on", UNMAP, in_call(ERESTARTNOHAND)),
            ("unmap, in no call", UNMAP, thread()),
            ("copy, the call goes on", COPY, in_call(ERESTARTNOHAND)),
            ("copy, in no call", COPY, thread()),
            ("reap, the call goes on", REAP, in_call(ERESTARTNOHAND)),
        ]
    }

    const BRK: u32 = 0xd420_0000;

    /// Without the rest of the slot.
    fn words(bytes: &[u8]) -> Vec<u32> {
        let (words, _) = bytes.as_chunks::<4>();
        let mut words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        while words.last() == Some(&BRK) {
            words.pop();
        }
        words
    }

    fn data(bytes: &[u8], number: u32) -> u64 {
        let at = (WORDS_AT + number * 8) as usize;
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    /// Where the data among the instructions ends: where the last entry branches to.
    fn start(bytes: &[u8]) -> usize {
        let branch = u32::from_le_bytes(*bytes[PLAIN as usize..].first_chunk().unwrap());
        PLAIN as usize + (branch & 0x03ff_ffff) as usize * 4
    }

    /// What binutils' disassembler says of a stub's instructions; the data among them as words.
    fn disassembled(bytes: &[u8]) -> String {
        let file = std::env::temp_dir().join(format!("pyheap-stub-{}", std::process::id()));
        std::fs::write(&file, bytes).unwrap();
        let output = std::process::Command::new("aarch64-linux-gnu-objdump")
            .args(["-D", "-z", "-bbinary", "-maarch64", "-Mno-aliases"])
            .arg(&file)
            .output()
            .expect("binutils-aarch64-linux-gnu");
        std::fs::remove_file(file).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().skip_while(|line| !line.contains("<.data>:")).skip(1);
        let start = start(bytes);
        lines.fold(String::new(), |mut listing, line| {
            let (offset, rest) = line.trim().split_once(":\t").unwrap();
            let at = usize::from_str_radix(offset, 16).unwrap();
            let (word, instruction) = rest.split_once('\t').unwrap();
            let instruction = instruction.split("//").next().unwrap().trim_end().replace('\t', " ");
            let is_data = (WORDS_AT as usize..start).contains(&at);
            let says = if is_data { ".word" } else { &instruction };
            writeln!(listing, "{offset:>4}: {} {says}", word.trim()).unwrap();
            listing
        })
    }

    /// The listing is by another's disassembler (binutils); it was read, instruction by instruction. Written with
    /// `PYHEAP_BLESS=1`; compared without any tool.
    #[test]
    fn the_stubs_are_those_of_the_listing() {
        const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/stubs-aarch64.txt");
        if std::env::var_os("PYHEAP_BLESS").is_some() {
            let listing = all().into_iter().fold(String::new(), |mut listing, (name, job, regs)| {
                let (bytes, _) = stub(job, AT, &regs, SIGNALS).unwrap();
                let used = words(&bytes).len() * 4;
                write!(listing, "# {name}\n{}\n", disassembled(&bytes[..used])).unwrap();
                listing
            });
            std::fs::write(PATH, listing).unwrap();
        }
        let golden = std::fs::read_to_string(PATH).unwrap();
        let mut parts = golden.split("# ").skip(1);
        for (name, job, regs) in all() {
            let part = parts.next().expect(name);
            let mut lines = part.lines();
            assert_eq!(lines.next(), Some(name));
            let listed: Vec<u32> = lines
                .filter(|line| !line.is_empty())
                .map(|line| u32::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap())
                .collect();
            let (bytes, _) = stub(job, AT, &regs, SIGNALS).unwrap();
            assert_eq!(words(&bytes), listed, "{name}");
        }
        assert!(parts.next().is_none());
    }

    #[test]
    fn every_stub_fits_its_slot() {
        for (name, job, regs) in all() {
            let (bytes, _) = stub(job, AT, &regs, SIGNALS).expect(name);
            let used = words(&bytes).len() * 4;
            assert!(used < job.slots() * STUB_BYTES, "{name} fills its slots");
        }
    }

    #[test]
    fn a_copy_knows_its_time_and_its_name() {
        let (bytes, enter) = stub(COPY, AT, &thread(), SIGNALS).unwrap();
        assert_eq!((data(&bytes, TIME), data(&bytes, TIME + 1)), (60, 5));
        let name = (WORDS_AT + super::NAME * 8) as usize;
        assert_eq!(bytes[name..start(&bytes)], *b"pyheap-frozen\0\0\0");
        assert_eq!(enter.pc, AT + PLAIN);
    }

    #[test]
    fn the_kernel_decides_how_an_interrupted_call_goes_on() {
        for (code, number) in [
            (ERESTARTNOHAND, NUMBER),
            (super::super::ERESTARTSYS, NUMBER),
            (super::super::ERESTARTNOINTR, NUMBER),
            (ERESTART_RESTARTBLOCK, 128),
        ] {
            let regs = in_call(code);
            let (bytes, enter) = stub(UNMAP, AT, &regs, SIGNALS).unwrap();
            // The kernel goes four bytes back to the first instruction, and puts the first argument back.
            assert_eq!((enter.pc, enter.x[0] as i64), (AT + 4, code));
            assert_eq!((enter.x[19], enter.x[8]), (0, NUMBER));
            assert_eq!((data(&bytes, 0), data(&bytes, 8)), (0xf1f1, number));
            assert_eq!((data(&bytes, super::NUMBER), data(&bytes, 30)), (NUMBER, regs.x[30]));
            // `b` to the call's instruction, and to behind it.
            let words = words(&bytes);
            let to = |pc: u64| {
                let is_branch = |at: &usize| {
                    let distance = (pc as i64 - (AT as i64 + *at as i64 * 4)) / 4;
                    words[*at] == 0x1400_0000 | distance as u32 & 0x03ff_ffff
                };
                (0..words.len()).filter(is_branch).count()
            };
            assert_eq!((to(regs.pc - 4), to(regs.pc)), (1, 1));
        }
    }

    #[test]
    fn a_complete_call_keeps_its_result_and_user_code_its_registers() {
        for regs in [in_call(17), in_call(-11), in_call(EINTR), thread()] {
            let (bytes, enter) = stub(UNMAP, AT, &regs, SIGNALS).unwrap();
            assert_eq!((enter.pc, enter.x[0]), (AT + PLAIN, regs.x[0]));
            for number in 0..31 {
                assert_eq!(data(&bytes, number), regs.get(number));
            }
            assert_eq!((data(&bytes, SP), data(&bytes, NZCV)), (regs.sp, 0x9000_0000));
            assert_eq!(enter.pstate, 0x9000_1000, "without the kind of branch");
        }
        // Not in a call: a number that happens to look like the kernel's.
        let mut regs = thread();
        regs.set(0, ERESTARTNOHAND as u64);
        assert_eq!(stub(UNMAP, AT, &regs, SIGNALS).unwrap().1.pc, AT + PLAIN);
    }

    #[test]
    fn a_receive_that_the_stop_ended_is_made_again() {
        let mut regs = in_call(EINTR);
        regs.call = 207;
        let (_, enter) = stub(UNMAP, AT, &regs, SIGNALS).unwrap();
        assert_eq!((enter.pc, enter.x[0] as i64), (AT + INTERRUPTED, ERESTARTNOHAND));
    }

    #[test]
    fn only_a_handler_that_was_not_blocked_anyway_counts() {
        let (bytes, _) = stub(MAP, AT, &in_call(ERESTARTNOHAND), SIGNALS).unwrap();
        assert_eq!((data(&bytes, BLOCKED), data(&bytes, CAUGHT)), (0x10, 0x4002));
    }

    #[test]
    fn a_thread_out_of_reach_is_not_taken() {
        let mut regs = thread();
        for (distance, ok) in [
            (0_i64, true),
            (1 << 26, true),
            (-(1 << 26), true),
            (1 << 27, false),
            (-(1 << 27), false),
        ] {
            regs.pc = AT.wrapping_add_signed(distance);
            assert_eq!(can_return(AT, &regs), ok, "{distance:#x}");
        }
        regs.pc = AT + 2;
        assert!(!can_return(AT, &regs));
    }
}
