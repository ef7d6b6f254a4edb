//! Would the target's seccomp filters let the calls of a stub pass? A filter that kills the process for one of them must
//! be known before the stub runs, for a stub has no way to ask.
//!
//! The kernel shows the filters of a stopped thread to a tracer that is under no filter itself and has `CAP_SYS_ADMIN`.
//! Then they are evaluated here, call by call. Else there is one case in which an experiment tells the same: when target,
//! pyheap and the first process of their pid namespace are under the same number of filters. Filters are inherited and
//! never removed, so these are the container's own, and what a child of ours may call, the target may. In all other cases
//! nothing is proven, and that is the answer.

#![expect(
    unsafe_code,
    reason = "fork, ptrace requests that nix does not have, raw system calls"
)]

use crate::arch::{AUDIT_ARCH, PtraceRequest};
use crate::child;
use crate::hijack::{self, Shared};
use crate::observe;
use nix::sys::ptrace;
use nix::unistd::Pid;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most filters that a thread may have, and most instructions in one (`BPF_MAXINSNS`).
const MAX_FILTERS: usize = 64;
const MAX_INSTRUCTIONS: usize = 4096;
/// Longest wait for the thread whose filters are read.
const STOP_DEADLINE: Duration = Duration::from_millis(200);

/// One instruction of classic BPF, as the kernel hands it out (`struct sock_filter`).
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    k: u32,
}

/// What speaks against a hijack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Forbidden {
    /// Strict mode: read, write, exit and nothing else.
    #[error("it is in seccomp's strict mode, in which any other call would kill it")]
    Strict,
    /// A filter says no.
    #[error("its seccomp filter {answer} {call}, which pyheap needs there")]
    Call {
        /// The call's name.
        call: &'static str,
        /// What the filter would do.
        answer: Answer,
    },
    /// The filters cannot be seen.
    #[error(
        "it is under a seccomp filter of its own, and whether that allows what pyheap needs can only be seen as root outside of containers"
    )]
    Unknown,
}

/// What a filter does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// `SECCOMP_RET_KILL_*`
    Kills,
    /// `SECCOMP_RET_TRAP`
    Traps,
    /// `SECCOMP_RET_ERRNO`
    Refuses,
    /// A supervisor or tracer would be asked.
    Asks,
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kills => "kills it for",
            Self::Traps => "sends SIGSYS for",
            Self::Refuses => "refuses",
            Self::Asks => "asks another process about",
        })
    }
}

/// A call that a stub, or the shim's start, makes: name, number, arguments.
type Needed = (&'static str, u32, [u64; 6]);

/// Every kind of call, with arguments like those that are used.
fn needed() -> [Needed; 10] {
    const AT: u64 = 0x7f00_0000_0000;
    const LEN: u64 = 1 << 20;
    let map = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE) as u64;
    let (read_write, read_exec) = (
        (libc::PROT_READ | libc::PROT_WRITE) as u64,
        (libc::PROT_READ | libc::PROT_EXEC) as u64,
    );
    let number = |call: libc::c_long| call as u32;
    let madvise = |advice: i32| {
        let args = [AT, LEN, advice as u64, 0, 0, 0];
        ("madvise", number(libc::SYS_madvise), args)
    };
    let block = [libc::SIG_SETMASK as u64, AT, 0, 8, 0, 0];
    [
        ("mmap", number(libc::SYS_mmap), [AT, LEN, read_write, map, u64::MAX, 0]),
        (
            "mprotect to executable",
            number(libc::SYS_mprotect),
            [AT, LEN, read_exec, 0, 0, 0],
        ),
        ("munmap", number(libc::SYS_munmap), [AT, LEN, 0, 0, 0, 0]),
        ("rt_sigprocmask", number(libc::SYS_rt_sigprocmask), block),
        ("rt_sigpending", number(libc::SYS_rt_sigpending), [AT, 8, 0, 0, 0, 0]),
        ("rt_sigreturn", number(libc::SYS_rt_sigreturn), [0; 6]),
        madvise(libc::MADV_DONTFORK),
        madvise(18), // MADV_WIPEONFORK
        madvise(libc::MADV_NOHUGEPAGE),
        madvise(libc::MADV_DONTNEED),
    ]
}

/// What a stub that makes a copy of the process, the copy, and the stub that reaps it, call.
fn needed_for_copy() -> [Needed; 10] {
    const AT: u64 = 0x7f00_0000_0000;
    let number = |call: libc::c_long| call as u32;
    let all = [0, u64::from(u32::MAX), u64::from(libc::CLOSE_RANGE_UNSHARE), 0, 0, 0];
    let name = [libc::PR_SET_NAME as u64, AT, 0, 0, 0, 0];
    let sleep = [libc::CLOCK_MONOTONIC as u64, 0, AT, 0, 0, 0];
    let status = [1000, 0, (libc::__WALL | libc::WNOHANG) as u64, 0, 0, 0];
    let block = [libc::SIG_SETMASK as u64, AT, 0, 8, 0, 0];
    let page = [AT, 4096, libc::MADV_DONTNEED as u64, 0, 0, 0];
    [
        (
            "clone",
            number(libc::SYS_clone),
            [libc::CLONE_FILES as u64, 0, 0, 0, 0, 0],
        ),
        ("close_range", number(libc::SYS_close_range), all),
        ("prctl", number(libc::SYS_prctl), name),
        ("clock_nanosleep", number(libc::SYS_clock_nanosleep), sleep),
        ("exit_group", number(libc::SYS_exit_group), [0; 6]),
        ("wait4", number(libc::SYS_wait4), status),
        ("rt_sigprocmask", number(libc::SYS_rt_sigprocmask), block),
        ("rt_sigpending", number(libc::SYS_rt_sigpending), [AT, 8, 0, 0, 0, 0]),
        ("rt_sigreturn", number(libc::SYS_rt_sigreturn), [0; 6]),
        ("madvise", number(libc::SYS_madvise), page),
    ]
}

/// What is to be done in the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// [`crate::Infection`], and its end.
    Infect,
    /// [`crate::copy`].
    Copy,
}

/// True if `pid` has locked memory, and so may have asked for all that it maps to be locked (`mlockall`).
#[must_use]
pub fn locks_memory(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", observe::reachable(pid))).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    line.is_some_and(|size| size.split_whitespace().next() != Some("0"))
}

/// Says whether every thread of `pid` may make the calls of a stub.
///
/// # Errors
/// With what is forbidden, or that it cannot be told.
pub fn check(pid: i32) -> Result<(), Forbidden> {
    check_kinds(pid, &observe::kinds(pid), Purpose::Infect)
}

/// The same, when the `kinds` of its threads are known. A thread of each kind (mode and number of filters) is looked at; if
/// there are filters to read, it is stopped for that, some microseconds, and nothing is changed.
///
/// # Errors
/// With what is forbidden, or that it cannot be told.
pub fn check_kinds(pid: i32, kinds: &[observe::Kind], purpose: Purpose) -> Result<(), Forbidden> {
    let filtered = kinds.iter().filter(|kind| kind.seccomp != 0);
    let mut kinds: Vec<((u32, u32), i32)> = filtered.map(|kind| ((kind.seccomp, kind.filters), kind.tid)).collect();
    // In order of mode and number.
    kinds.dedup_by_key(|(kind, _)| *kind);
    for ((mode, count), tid) in kinds {
        if mode == 1 {
            return Err(Forbidden::Strict);
        }
        match filters(pid, tid) {
            Some(filters) if purpose == Purpose::Copy => judge(&filters, needed_for_copy())?,
            Some(filters) => judge(&filters, needed_to_infect(locks_memory(pid)))?,
            None => experiment(count, purpose)?,
        }
    }
    Ok(())
}

/// Seccomp mode and number of filters of the process or thread at `path`. Kernels before 5.9 do not tell the number: 0.
fn mode_of(path: &str) -> Option<(u32, u32)> {
    let status = std::fs::read_to_string(format!("{path}/status")).ok()?;
    let number = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().parse().ok()
    };
    Some((number("Seccomp:").unwrap_or(0), number("Seccomp_filters:").unwrap_or(0)))
}

/// Makes the calls in a child of ours, if that is under the same filters as a thread with `count` of them.
fn experiment(count: u32, purpose: Purpose) -> Result<(), Forbidden> {
    let same = count != 0
        && ["/proc/self", "/proc/1"]
            .iter()
            .all(|path| mode_of(path) == Some((2, count)));
    if !same {
        return Err(Forbidden::Unknown);
    }
    let report = Shared::new().map_err(|_| Forbidden::Unknown)?;
    const DONE: u32 = 1;
    let ended = child::in_copy(|| {
        let allowed = match purpose {
            Purpose::Infect => try_calls(),
            Purpose::Copy => try_copy(),
        };
        if allowed {
            report.state.store(DONE, Ordering::Release);
        }
    });
    match (ended, report.state.load(Ordering::Acquire)) {
        (Ok(()), DONE) => Ok(()),
        _ => Err(Forbidden::Call {
            call: match purpose {
                Purpose::Infect => "mmap, mprotect, madvise or munmap",
                Purpose::Copy => "clone, close_range, prctl, clock_nanosleep or wait4",
            },
            answer: Answer::Refuses,
        }),
    }
}

/// Makes the calls of [`needed`] on memory of our own.
fn try_calls() -> bool {
    const LEN: usize = 4 << 12;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            LEN,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return false;
    }
    for advice in [libc::MADV_DONTFORK, 18, libc::MADV_DONTNEED] {
        // SAFETY: our own mapping, which nothing refers to.
        if unsafe { libc::madvise(at, LEN, advice) } != 0 {
            return false;
        }
    }
    // SAFETY: as above.
    if unsafe { libc::mprotect(at, LEN, libc::PROT_READ | libc::PROT_EXEC) } != 0 {
        return false;
    }
    // SAFETY: as above.
    let unmapped = unsafe { libc::munmap(at, LEN) } == 0;
    // SAFETY: `sigset_t` is plain data.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes to the local set.
    let pending = unsafe { libc::sigpending(&raw mut set) } == 0;
    unmapped && pending
}

/// Makes the calls of [`needed_for_copy`] in a process that may be killed for one of them.
fn try_copy() -> bool {
    // SAFETY: without CLONE_VM and with no stack given this is a fork; the child makes only system calls.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES, 0, 0, 0, 0) };
    let child = child as i32;
    if child < 0 {
        return false;
    }
    if child == 0 {
        // SAFETY: the child's own table.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, libc::CLOSE_RANGE_UNSHARE) };
        // SAFETY: reads a constant.
        let named = unsafe { libc::prctl(libc::PR_SET_NAME, c"pyheap".as_ptr()) };
        let moment = libc::timespec { tv_sec: 0, tv_nsec: 1 };
        // SAFETY: reads the local time.
        let slept = unsafe { libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const moment, std::ptr::null_mut()) };
        let failed = closed != 0 || named != 0 || slept != 0;
        // SAFETY: ends this process without running anything of the parent's.
        unsafe { libc::_exit(i32::from(failed)) }
    }
    let mut status = 0;
    // SAFETY: writes one integer.
    let reaped = unsafe { libc::waitpid(child, &raw mut status, libc::__WALL) };
    // SAFETY: `sigset_t` is plain data.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes to the local set.
    let pending = unsafe { libc::sigpending(&raw mut set) } == 0;
    reaped == child && status == 0 && pending
}

/// The filters of thread `tid`; `None` if we may not see them.
fn filters(pid: i32, tid: i32) -> Option<Vec<Vec<Instruction>>> {
    const PTRACE_SECCOMP_GET_FILTER: PtraceRequest = 0x420c;
    // The child writes, so the room is shared, and made before.
    let room = hijack::SharedBytes::new(MAX_FILTERS * (8 + MAX_INSTRUCTIONS * size_of::<Instruction>()))?;
    let report = Shared::new().ok()?;
    child::in_child(|| {
        let thread = Pid::from_raw(tid);
        if ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD).is_err()
            || !hijack::is_thread_of(pid, tid)
            || ptrace::interrupt(thread).is_err()
            || !hijack::wait_for_any_stop(thread, Instant::now() + STOP_DEADLINE)
        {
            return;
        }
        let (mut count, mut used) = (0, 0);
        while count < MAX_FILTERS {
            let Some(place) = room.at(used, MAX_INSTRUCTIONS * size_of::<Instruction>()) else {
                break;
            };
            // SAFETY: writes at most BPF_MAXINSNS instructions to `place`, which has room for them (ptrace(2)).
            let n = unsafe { libc::ptrace(PTRACE_SECCOMP_GET_FILTER, tid, count, place) };
            let Ok(n) = usize::try_from(n) else {
                // ENOENT: that was the last one. Anything else: we may not.
                if nix::errno::Errno::last() != nix::errno::Errno::ENOENT {
                    count = 0;
                }
                break;
            };
            let Some(len) = report.observed.get(count) else { break };
            len.store(n as u32, Ordering::Release);
            used += n * size_of::<Instruction>();
            count += 1;
        }
        report.count.store(count as u32, Ordering::Release);
        let _ = ptrace::detach(thread, None);
    })
    .ok()?;
    let count = report.count.load(Ordering::Acquire) as usize;
    let mut bytes = room.bytes();
    let mut filters = Vec::new();
    for len in report.observed.get(..count)? {
        let len = len.load(Ordering::Acquire) as usize;
        let (filter, rest) = bytes.split_at_checked(len.checked_mul(size_of::<Instruction>())?)?;
        filters.push(filter.chunks_exact(8).map(instruction).collect());
        bytes = rest;
    }
    (!filters.is_empty()).then_some(filters)
}

fn instruction(bytes: &[u8]) -> Instruction {
    let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
    Instruction {
        code: u16::from_le_bytes([byte(0), byte(1)]),
        if_true: byte(2),
        if_false: byte(3),
        k: u32::from_le_bytes([byte(4), byte(5), byte(6), byte(7)]),
    }
}

/// The first needed call that one of `filters` does not simply allow.
fn judge(filters: &[Vec<Instruction>], needed: impl IntoIterator<Item = Needed>) -> Result<(), Forbidden> {
    for (call, number, args) in needed {
        for filter in filters {
            if let Some(answer) = answer_of(run(filter, &data(number, args))) {
                return Err(Forbidden::Call { call, answer });
            }
        }
    }
    Ok(())
}

fn needed_to_infect(locked: bool) -> impl Iterator<Item = Needed> {
    let munlock = ("munlock", 150, [0x7f00_0000_0000, 1 << 20, 0, 0, 0, 0]);
    needed().into_iter().chain(locked.then_some(munlock))
}

/// What a filter's result means; `None` if the call passes. A filter that we cannot follow counts as one that kills.
fn answer_of(result: Option<u32>) -> Option<Answer> {
    match result.map(|value| value & 0xffff_0000) {
        Some(0x7fff_0000 | 0x7ffc_0000) => None,               // ALLOW, LOG
        Some(0x0005_0000) => Some(Answer::Refuses),            // ERRNO
        Some(0x0003_0000) => Some(Answer::Traps),              // TRAP
        Some(0x7fc0_0000 | 0x7ff0_0000) => Some(Answer::Asks), // USER_NOTIF, TRACE
        _ => Some(Answer::Kills),
    }
}

/// `struct seccomp_data` for a call on this processor.
fn data(number: u32, args: [u64; 6]) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut put = |at: usize, word: &[u8]| {
        if let Some(place) = bytes.get_mut(at..at + word.len()) {
            place.copy_from_slice(word);
        }
    };
    put(0, &number.to_le_bytes());
    put(4, &AUDIT_ARCH.to_le_bytes());
    for (index, arg) in args.into_iter().enumerate() {
        put(16 + index * 8, &arg.to_le_bytes());
    }
    bytes
}

/// Runs a classic BPF program, as seccomp(2) restricts it; `None` when it does something that the kernel would not have
/// accepted. Jumps only go forward, so it ends.
fn run(filter: &[Instruction], data: &[u8; 64]) -> Option<u32> {
    let (mut a, mut x, mut scratch) = (0_u32, 0_u32, [0_u32; 16]);
    let mut at = 0_usize;
    loop {
        let Instruction {
            code,
            if_true,
            if_false,
            k,
        } = *filter.get(at)?;
        at += 1;
        let operand = if code & 0x08 == 0 { k } else { x };
        let word = || {
            let from = k as usize;
            Some(u32::from_le_bytes(
                data.get(from..from.checked_add(4)?)?.try_into().ok()?,
            ))
        };
        match code {
            0x20 => a = word()?,                       // ld [k]
            0x00 => a = k,                             // ld #k
            0x80 => a = 64,                            // ld #len
            0x60 => a = *scratch.get(k as usize)?,     // ld M[k]
            0x01 => x = k,                             // ldx #k
            0x81 => x = 64,                            // ldx #len
            0x61 => x = *scratch.get(k as usize)?,     // ldx M[k]
            0x02 => *scratch.get_mut(k as usize)? = a, // st
            0x03 => *scratch.get_mut(k as usize)? = x, // stx
            0x04 | 0x0c => a = a.wrapping_add(operand),
            0x14 | 0x1c => a = a.wrapping_sub(operand),
            0x24 | 0x2c => a = a.wrapping_mul(operand),
            0x34 | 0x3c => a = a.checked_div(operand)?,
            0x44 | 0x4c => a |= operand,
            0x54 | 0x5c => a &= operand,
            0x64 | 0x6c => a = a.checked_shl(operand)?,
            0x74 | 0x7c => a = a.checked_shr(operand)?,
            0x84 => a = a.wrapping_neg(),
            0xa4 | 0xac => a ^= operand,
            0x05 => at = at.checked_add(k as usize)?, // ja
            0x15 | 0x1d => at += usize::from(if a == operand { if_true } else { if_false }),
            0x25 | 0x2d => at += usize::from(if a > operand { if_true } else { if_false }),
            0x35 | 0x3d => at += usize::from(if a >= operand { if_true } else { if_false }),
            0x45 | 0x4d => at += usize::from(if a & operand != 0 { if_true } else { if_false }),
            0x06 => return Some(k), // ret #k
            0x16 => return Some(a), // ret a
            0x07 => x = a,          // tax
            0x87 => a = x,          // txa
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn i(code: u16, if_true: u8, if_false: u8, k: u32) -> Instruction {
        Instruction {
            code,
            if_true,
            if_false,
            k,
        }
    }

    /// A filter that answers `result` for call `number` and allows the rest.
    fn for_call(number: u32, result: u32) -> Vec<Instruction> {
        vec![
            i(0x20, 0, 0, 4), // architecture
            i(0x15, 1, 0, AUDIT_ARCH),
            i(0x06, 0, 0, 0x8000_0000),
            i(0x20, 0, 0, 0),
            i(0x15, 0, 1, number),
            i(0x06, 0, 0, result),
            i(0x06, 0, 0, 0x7fff_0000),
        ]
    }

    #[test]
    fn each_answer_is_told_apart() {
        for (result, answer) in [
            (0x8000_0000, Answer::Kills),
            (0, Answer::Kills),
            (0x0003_0000, Answer::Traps),
            (0x0005_0001, Answer::Refuses),
            (0x7fc0_0000, Answer::Asks),
        ] {
            let found = judge(&[for_call(39, 0), for_call(9, result)], needed_to_infect(false));
            assert_eq!(found, Err(Forbidden::Call { call: "mmap", answer }));
        }
        assert_eq!(
            judge(&[for_call(39, 0)], needed_to_infect(false)),
            Ok(()),
            "getpid is not needed"
        );
        assert_eq!(
            judge(&[for_call(9, 0x7ffc_0000)], needed_to_infect(false)),
            Ok(()),
            "a call that is logged passes"
        );
    }

    #[test]
    fn a_filter_that_looks_at_arguments_is_followed() {
        // As systemd's MemoryDenyWriteExecute: EPERM for mprotect with PROT_EXEC.
        let filter = vec![
            i(0x20, 0, 0, 0),
            i(0x15, 0, 3, 10),
            i(0x20, 0, 0, 32), // low half of the third argument
            i(0x45, 0, 1, 4),
            i(0x06, 0, 0, 0x0005_0001),
            i(0x06, 0, 0, 0x7fff_0000),
        ];
        let call = "mprotect to executable";
        let answer = Answer::Refuses;
        assert_eq!(
            judge(&[filter], needed_to_infect(false)),
            Err(Forbidden::Call { call, answer })
        );
    }

    #[test]
    fn a_program_that_runs_away_is_not_followed() {
        assert_eq!(run(&[], &data(9, [0; 6])), None);
        assert_eq!(run(&[i(0x05, 0, 0, u32::MAX)], &data(9, [0; 6])), None);
        assert_eq!(run(&[i(0x20, 0, 0, 62)], &data(9, [0; 6])), None);
        assert_eq!(run(&[i(0x34, 0, 0, 0), i(0x06, 0, 0, 0)], &data(9, [0; 6])), None);
    }
}
