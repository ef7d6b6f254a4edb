//! Which threads there are, what they do, and whether they are outside of a range of code.

use crate::arch;
use crate::hijack::{self, HijackError};
use std::fs;
use std::ops::Range;

/// What `/proc/PID/task/TID/syscall` says of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Blocked in a system call.
    Call {
        /// Its number.
        number: u64,
        /// Its arguments.
        args: [u64; 6],
        /// Where it will return to.
        pc: u64,
    },
    /// Blocked, but in no system call (a page fault, for example).
    Blocked {
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
        ["-1", _, pc] => Some(Doing::Blocked { pc: hex(pc)? }),
        [number, a, b, c, d, e, f, _, pc] => Some(Doing::Call {
            number: number.parse().ok()?,
            args: [hex(a)?, hex(b)?, hex(c)?, hex(d)?, hex(e)?, hex(f)?],
            pc: hex(pc)?,
        }),
        _ => None,
    }
}

/// The threads of `pid`, those first that bear a hijack best: blocked in a call that the kernel restarts without a trace,
/// then running ones, then the rest. The main thread comes last of its class, since it handles the signals.
#[must_use]
pub fn by_preference(pid: i32) -> Vec<i32> {
    let mut ranked: Vec<(u8, bool, i32)> = threads(pid)
        .into_iter()
        .filter_map(|tid| {
            let class = match doing(pid, tid)? {
                Doing::Call { number, args, .. } => arch::restart_class(number, args).map_or(4, |class| class * 2),
                Doing::Running => 1,
                Doing::Blocked { .. } => 3,
            };
            Some((class, tid == pid, tid))
        })
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().map(|(.., tid)| tid).collect()
}

/// True once each thread of `pid` was seen outside of `range` in this round; threads that were not are left in `waiting`.
///
/// # Errors
/// When no observer process could be made.
pub fn round(pid: i32, range: &Range<u64>, waiting: &mut Vec<i32>) -> Result<bool, HijackError> {
    let mut running = Vec::new();
    for &tid in waiting.iter() {
        match doing(pid, tid) {
            Some(Doing::Call { pc, .. } | Doing::Blocked { pc }) if !range.contains(&pc) => {}
            Some(_) => running.push(tid),
            None => {}
        }
    }
    *waiting = running;
    if !waiting.is_empty() {
        let answers = hijack::observe_running(waiting, range)?;
        let mut seen = answers.into_iter();
        waiting.retain(|_| seen.next().is_none_or(|answer| answer == hijack::INSIDE));
    }
    Ok(waiting.is_empty())
}

/// Waits until every thread that `pid` has now was seen outside of `range` once. False at the deadline.
///
/// # Errors
/// When no observer process could be made.
pub fn all_outside(pid: i32, range: &Range<u64>, deadline: std::time::Instant) -> Result<bool, HijackError> {
    let mut waiting = threads(pid);
    loop {
        if round(pid, range, &mut waiting)? {
            return Ok(true);
        }
        if std::time::Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_understood() {
        assert_eq!(parse("running\n"), None);
        assert_eq!(parse("-1 0x7ffd 0x7f01\n"), Some(Doing::Blocked { pc: 0x7f01 }));
        let line = "202 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffd 0x7f01\n";
        assert_eq!(
            parse(line),
            Some(Doing::Call {
                number: 202,
                args: [1, 2, 3, 4, 5, 6],
                pc: 0x7f01
            })
        );
        assert_eq!(parse("202 0x1\n"), None);
    }
}
