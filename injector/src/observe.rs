//! Which threads there are, what they do, and whether they are outside of code that is to go away.

use crate::arch;
use crate::hijack::{self, HijackError};
use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes of a thread's stack, from its stack pointer up, in which an interrupted piece of our code is looked for.
const STACK_BYTES: usize = 64 << 10;
/// Pages.
const PAGE: usize = 4096;

/// Code that threads must be out of.
#[derive(Debug, Clone, Default)]
pub struct Watch {
    /// The shim's text. Stale return addresses into it may be anywhere on a stack, so only a signal frame counts there.
    pub text: Range<u64>,
    /// The stubs. Nothing else points there, so every word that does counts.
    pub stubs: Range<u64>,
    /// Memory that a stack pointer must not be in: the private stack.
    pub stack: Range<u64>,
    /// What signal handlers return to: it marks a signal frame.
    pub restorer: Option<u64>,
}

impl Watch {
    /// True if a thread with these registers is inside, or about to jump there.
    #[must_use]
    pub fn holds(&self, regs: &arch::Registers) -> bool {
        arch::touches(regs, &self.text) || arch::touches(regs, &self.stubs) || self.stack.contains(&regs.rsp)
    }

    fn has(&self, pc: u64) -> bool {
        self.text.contains(&pc) || self.stubs.contains(&pc)
    }

    /// True if a signal handler of thread `tid` has interrupted our code: its frame, somewhere above the stack pointer `sp`,
    /// leads back there. Makes system calls only, so it may be used between fork and exit.
    #[must_use]
    pub fn is_interrupted(&self, tid: i32, sp: u64) -> bool {
        const INSTRUCTION: usize = arch::FRAME_INSTRUCTION / 8;
        if self.stack.contains(&sp) {
            return true;
        }
        let mut bytes = [0_u8; STACK_BYTES];
        let len = hijack::read_stack(tid, sp & !7, &mut bytes);
        let word = |at: usize| {
            let bytes = bytes.get(at * 8..at * 8 + 8).filter(|_| at * 8 + 8 <= len)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        (0..len / 8).any(|at| {
            word(at).is_some_and(|value| {
                let frame = Some(value) == self.restorer && word(at + INSTRUCTION).is_some_and(|pc| self.has(pc));
                frame || self.stubs.contains(&value)
            })
        })
    }
}
const _: () = assert!(STACK_BYTES.is_multiple_of(PAGE));

/// What `/proc/PID/task/TID/syscall` says of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Blocked in a system call.
    Call {
        /// Its number.
        number: u64,
        /// Its arguments.
        args: [u64; 6],
        /// Its stack pointer.
        sp: u64,
        /// Where it will return to.
        pc: u64,
    },
    /// Blocked, but in no system call (a page fault, for example).
    Blocked {
        /// Its stack pointer.
        sp: u64,
        /// Where.
        pc: u64,
    },
    /// On a processor, or waiting for one; or the file may not be read.
    Running,
}

/// The threads of `pid`; empty when it is gone.
#[must_use]
pub fn threads(pid: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// A thread by which the memory of `pid` can be reached: the main thread, or another one when that has ended before the rest.
#[must_use]
pub fn reachable(pid: i32) -> i32 {
    if !has_ended(pid, pid) {
        return pid;
    }
    threads(pid)
        .into_iter()
        .find(|&tid| !has_ended(pid, tid))
        .unwrap_or(pid)
}

/// True if a thread has ended, though it may still be listed.
fn has_ended(pid: i32, tid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
    // The name, in parentheses, may hold anything; the state follows it.
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// Asks the kernel what a thread does, without stopping it. `None` when it is gone.
#[must_use]
pub fn doing(pid: i32, tid: i32) -> Option<Doing> {
    match fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")) {
        Ok(text) => Some(parse(&text).unwrap_or(Doing::Running)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => None,
        Err(_) => Some(Doing::Running),
    }
}

fn parse(text: &str) -> Option<Doing> {
    let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let words: Vec<&str> = text.split_whitespace().collect();
    match *words.as_slice() {
        ["-1", sp, pc] => Some(Doing::Blocked {
            sp: hex(sp)?,
            pc: hex(pc)?,
        }),
        [number, a, b, c, d, e, f, sp, pc] => Some(Doing::Call {
            number: number.parse().ok()?,
            args: [hex(a)?, hex(b)?, hex(c)?, hex(d)?, hex(e)?, hex(f)?],
            sp: hex(sp)?,
            pc: hex(pc)?,
        }),
        _ => None,
    }
}

/// Longest wait for a thread that may be interrupted at all.
const FIT_DEADLINE: Duration = Duration::from_millis(500);

/// The threads of `pid` that may be stopped, those first that bear it best: blocked in a call that the kernel restarts
/// without a trace, then running ones, then the rest. The main thread comes last of its class, since it handles the
/// signals. Threads in calls that would come back short (a blocking write, a receive of everything) are left out; when
/// there are no others, they are waited for.
///
/// # Errors
/// [`HijackError::Unfit`] when no thread leaves such a call in time.
pub fn by_preference(pid: i32) -> Result<Vec<i32>, HijackError> {
    let deadline = Instant::now() + FIT_DEADLINE;
    loop {
        let all = threads(pid);
        let mut ranked: Vec<(u8, bool, i32)> = all
            .iter()
            .filter_map(|&tid| {
                let class = match doing(pid, tid)? {
                    _ if tid == pid && reachable(pid) != pid => return None,
                    Doing::Call { number, args, .. } => arch::restart_class(number, args)?,
                    Doing::Running => 1,
                    Doing::Blocked { .. } => 3,
                };
                Some((class, tid == pid, tid))
            })
            .collect();
        if !ranked.is_empty() || all.is_empty() {
            ranked.sort_unstable();
            return Ok(ranked.into_iter().map(|(.., tid)| tid).collect());
        }
        if Instant::now() > deadline {
            return Err(HijackError::Unfit { pid });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// One look at the threads in `waiting`; those that were not seen outside stay in it. True when none is left.
///
/// # Errors
/// When no observer process could be made.
pub fn round(pid: i32, watch: &Watch, waiting: &mut Vec<i32>) -> Result<bool, HijackError> {
    let mut running = Vec::new();
    for &tid in waiting.iter() {
        match doing(pid, tid) {
            Some(Doing::Call { sp, pc, .. } | Doing::Blocked { sp, pc })
                if !watch.has(pc) && !watch.is_interrupted(tid, sp) => {}
            Some(_) if !has_ended(pid, tid) => running.push(tid),
            Some(_) | None => {}
        }
    }
    *waiting = running;
    if !waiting.is_empty() {
        let answers = hijack::observe_running(waiting, watch)?;
        let mut seen = answers.into_iter();
        // Whoever was not looked at counts as inside.
        waiting.retain(|_| !matches!(seen.next(), Some(hijack::OUTSIDE | hijack::ENDED)));
        if !waiting.is_empty() {
            // One that does not stop keeps the others from being looked at: not again the same first.
            waiting.rotate_left(1);
        }
    }
    Ok(waiting.is_empty())
}

/// Waits until every thread that `pid` has now was seen outside once. False at the deadline.
///
/// # Errors
/// When no observer process could be made.
pub fn all_outside(pid: i32, watch: &Watch, deadline: Instant) -> Result<bool, HijackError> {
    let mut waiting = threads(pid);
    loop {
        if round(pid, watch, &mut waiting)? {
            return Ok(true);
        }
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_understood() {
        assert_eq!(parse("running\n"), None);
        assert_eq!(
            parse("-1 0x7ffd 0x7f01\n"),
            Some(Doing::Blocked { sp: 0x7ffd, pc: 0x7f01 })
        );
        let line = "202 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffd 0x7f01\n";
        assert_eq!(
            parse(line),
            Some(Doing::Call {
                number: 202,
                args: [1, 2, 3, 4, 5, 6],
                sp: 0x7ffd,
                pc: 0x7f01
            })
        );
        assert_eq!(parse("202 0x1\n"), None);
    }
}
