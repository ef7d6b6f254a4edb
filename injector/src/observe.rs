//! Which threads there are, what they do, and whether they are outside of code that is to go away.

use crate::arch;
use crate::hijack::{self, HijackError};
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
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
    /// First byte of the page that the stubs are in. A thread that has it in a register is about to drop that page, see
    /// [`crate::cure`]: stubs must not be there then.
    pub page: Range<u64>,
}

impl Watch {
    /// True if a thread with these registers is inside, or about to jump there.
    #[must_use]
    pub fn holds(&self, regs: &arch::Registers) -> bool {
        arch::touches(regs, &self.text)
            || arch::touches(regs, &self.stubs)
            || arch::touches(regs, &self.page)
            || self.stack.contains(&arch::stack_pointer(regs))
    }

    fn has(&self, pc: u64) -> bool {
        self.text.contains(&pc) || self.stubs.contains(&pc)
    }

    /// True if a signal handler of thread `tid` has interrupted our code: its frame, somewhere above the stack pointer `sp`,
    /// leads back there. Makes system calls only, so it may be used between fork and exit.
    #[must_use]
    pub fn is_interrupted(&self, tid: i32, sp: u64) -> bool {
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
                let frame = arch::interrupted(word, at, self.restorer).is_some_and(|pc| self.has(pc));
                frame || self.stubs.contains(&value) || self.page.contains(&value)
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

/// What a file of /proc says that the kernel makes when it is read, in two calls: it has no length to ask for, and to read it
/// in growing pieces takes twice as long, which counts where there are thousands of threads.
///
/// # Errors
/// As for opening and reading.
pub fn made_file(path: impl AsRef<Path>) -> io::Result<String> {
    /// More than any of the files has that are read by this.
    const MOST: u64 = 1 << 20;
    let mut text = Vec::with_capacity(8 << 10);
    File::open(path)?.take(MOST).read_to_end(&mut text)?;
    // A thread's name can have any bytes in it.
    Ok(String::from_utf8(text).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// What `/proc/PID/task/TID/status` says of a thread about whoever wants to enter it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// Seccomp's mode: 0 none, 1 strict, 2 filters.
    pub seccomp: u32,
    /// How many filters; kernels before 5.9 do not tell: 0.
    pub filters: u32,
    /// Its processor checks its return addresses (told since Linux 6.6).
    pub shadow_stack: bool,
    /// Who traces it, 0 for nobody.
    pub tracer: i32,
    /// The thread.
    pub tid: i32,
}

/// The kinds of threads in `pid`, each with one thread that is of it.
#[must_use]
pub fn kinds(pid: i32) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = threads(pid)
        .into_iter()
        .filter_map(|tid| {
            let status = made_file(format!("/proc/{pid}/task/{tid}/status")).ok()?;
            Some(kind_in(&status, tid))
        })
        .collect();
    kinds.sort_unstable();
    kinds.dedup_by_key(|kind| Kind { tid: 0, ..*kind });
    kinds
}

fn kind_in(status: &str, tid: i32) -> Kind {
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let number = |key: &str| value(key).and_then(|value| value.parse().ok()).unwrap_or(0);
    Kind {
        seccomp: number("Seccomp:"),
        filters: number("Seccomp_filters:"),
        shadow_stack: value("x86_Thread_features:").is_some_and(|features| features.contains("shstk")),
        tracer: value("TracerPid:").and_then(|pid| pid.parse().ok()).unwrap_or(0),
        tid,
    }
}

/// Asks the kernel what a thread does, without stopping it. `None` when it is gone.
#[must_use]
pub fn doing(pid: i32, tid: i32) -> Option<Doing> {
    match made_file(format!("/proc/{pid}/task/{tid}/syscall")) {
        Ok(text) => Some(parse(&text).unwrap_or(Doing::Running)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
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
/// So many threads of the best kind are enough to choose from: a process may have thousands.
const ENOUGH: usize = 16;

/// The threads of `pid` that may be stopped, those first that bear it best: blocked in a call that the kernel restarts
/// without a trace, then running ones, then the rest. The main thread comes last of its class, since it handles the
/// signals. Threads in calls that would come back short (a blocking write, a receive of everything) are left out; when
/// there are no others, they are waited for. Where there are many that bear it best, only some are named, and the main thread.
///
/// # Errors
/// [`HijackError::Unfit`] when no thread leaves such a call in time.
pub fn by_preference(pid: i32) -> Result<Vec<i32>, HijackError> {
    let deadline = Instant::now() + FIT_DEADLINE;
    loop {
        let all = threads(pid);
        let mut ranked = Vec::new();
        let mut best = 0;
        // The main thread first: it is there when all the others have ended.
        let (main, others): (Vec<i32>, Vec<i32>) = all.iter().partition(|&&tid| tid == pid);
        for tid in main.into_iter().chain(others) {
            if let Some(class) = class_of(pid, tid) {
                ranked.push((class, tid == pid, tid));
                best += usize::from(class == 0);
            }
            if best > ENOUGH {
                break;
            }
        }
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

/// How well a thread bears to be stopped, 0 best; `None` if it must not be, or has ended.
fn class_of(pid: i32, tid: i32) -> Option<u8> {
    match doing(pid, tid)? {
        _ if tid == pid && reachable(pid) != pid => None,
        Doing::Call { number, args, .. } if arch::starts_timeout_anew(number, args) && !has_glibc(pid) => None,
        Doing::Call { number, args, .. } => arch::restart_class(number, args),
        Doing::Running => Some(1),
        Doing::Blocked { .. } => Some(3),
    }
}

/// True if glibc is mapped into `pid`: its functions hand an EINTR on, to Python, which waits for the time that is left.
/// musl's `sigtimedwait` makes the call again itself, with its whole timeout, and which C library a static program has
/// cannot be seen.
fn has_glibc(pid: i32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let names = maps.lines().filter_map(|line| line.rsplit('/').next());
    // Before 2.34 the files had their version in their names.
    let mut names = names.map(|name| name.trim_end_matches(" (deleted)"));
    names.any(|name| name == "libc.so.6" || (name.starts_with("libc-2.") && name.ends_with(".so")))
}

/// One look at the threads in `waiting`; those that were not seen outside stay in it. True when none is left.
///
/// # Errors
/// When no observer process could be made.
pub fn round(pid: i32, watch: &Watch, waiting: &mut Vec<i32>) -> Result<bool, HijackError> {
    let mut running = Vec::new();
    for &tid in waiting.iter() {
        match doing(pid, tid) {
            // In the call that drops the page.
            Some(Doing::Call { args, .. }) if args.iter().any(|arg| watch.page.contains(arg)) => running.push(tid),
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

/// Waits until each of the `waiting` threads of `pid` was seen outside once. False at the deadline.
///
/// # Errors
/// When no observer process could be made.
pub fn all_outside(pid: i32, mut waiting: Vec<i32>, watch: &Watch, deadline: Instant) -> Result<bool, HijackError> {
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
    fn a_thread_can_have_any_name() {
        let status = std::thread::spawn(|| {
            fs::write("/proc/thread-self/comm", b"\xff\xfe").unwrap();
            made_file("/proc/thread-self/status").unwrap()
        });
        let status = status.join().unwrap();
        assert!(
            status.starts_with("Name:\t\u{fffd}") && status.contains("\nNSpid:"),
            "{status}"
        );
    }

    #[test]
    fn a_threads_status_is_understood() {
        let of = |status| kind_in(status, 7);
        let plain = of(
            "Name:\tshstk\nTracerPid:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\nx86_Thread_features:\t\n\
                        x86_Thread_features_locked:\tshstk wrss \n",
        );
        assert!(!plain.shadow_stack && plain.tracer == 0 && plain.seccomp == 0 && plain.tid == 7);
        let other =
            of("Name:\tpython\nTracerPid:\t12\nSeccomp:\t2\nSeccomp_filters:\t3\nx86_Thread_features:\tshstk wrss \n");
        assert!(other.shadow_stack && other.tracer == 12 && other.seccomp == 2 && other.filters == 3);
        // Older kernels say less.
        assert_eq!(
            of("Name:\tpython\n"),
            Kind {
                seccomp: 0,
                filters: 0,
                shadow_stack: false,
                tracer: 0,
                tid: 7
            }
        );
    }

    #[test]
    fn the_c_library_of_a_process_is_known() {
        // This one's.
        let me = i32::try_from(std::process::id()).expect("pids are below 2^22");
        assert_eq!(has_glibc(me), cfg!(target_env = "gnu"));
        assert!(!has_glibc(-1));
    }

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
