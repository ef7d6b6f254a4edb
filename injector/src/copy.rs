//! A copy of a process that stands still: a child that a stub makes by a plain `clone`, with the memory as it is at that
//! moment. It runs nothing of the program: the stub goes on in it for a few system calls, and it ends there.
//!
//! # What the program can notice of it
//!
//! The child has an exit signal of 0: its end raises no SIGCHLD, and no `wait` without `__WALL` or `__WCLONE` sees it, alive or
//! dead. For the same reason nobody but us takes its status: a dead one stays a zombie until a stub calls
//! `wait4` for it by its number ([`reap`]). It has no handlers of `pthread_atfork`, since the C library does not know of it. All
//! signals are blocked in it, since they are while the stub works.
//!
//! Its table of descriptors is shared for the microseconds until it takes an empty one of its own (`close_range` with
//! `CLOSE_RANGE_UNSHARE`): had it a copy of the table, as a forked child has, a connection that the program closes would stay
//! open as long as the copy lives. Timers, memory locks, record locks, robust futexes and the address that a thread's end
//! clears are not inherited by any child. `MADV_DONTFORK` memory is not in it, `MADV_WIPEONFORK` memory is zero, and shared
//! mappings are shared, and change on.
//!
//! It ends by itself after the time that its stub was made with, whatever happens to us, and we kill it before.

#![expect(unsafe_code, reason = "pidfd_open and pidfd_send_signal, which nix does not have")]

use crate::arch::{Job, LONGEST_STUB};
use crate::cure::drop_page;
use crate::hijack::{self, HijackError, Hijacked};
use crate::infect::{InfectError, make_unused, place_for_stubs, wait, watch};
use crate::memory::ProcessMemory;
use crate::observe;
use crate::space;
use procfs::process::Process;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// What a copy is called.
pub const NAME: &str = "pyheap-frozen";
/// Longest wait for a new copy to have got through its first system calls. It may have to wait for a processor.
const READY_DEADLINE: Duration = Duration::from_secs(5);
/// Longest wait for a killed copy to be a zombie: its memory is given back before.
const END_DEADLINE: Duration = Duration::from_secs(10);
/// Longest wait for a redirected thread to have taken its status.
const REAP_DEADLINE: Duration = Duration::from_secs(2);

/// Why there is no copy, or why it is not gone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The process could not be entered.
    #[error("the process could not be entered")]
    Enter(#[from] InfectError),
    /// The kernel refused the copy.
    #[error(
        "the kernel refused the copy: no memory for it, or a limit on processes (ulimit -u, pids.max of its cgroup, kernel.pid_max)"
    )]
    Refused,
    /// It could not take a table of descriptors of its own, and has ended at once.
    #[error("the copy ended at once: it needs close_range with CLOSE_RANGE_UNSHARE, which Linux has from 5.9 on")]
    Ended,
    /// It has not got a processor.
    #[error("the copy (pid {0}) got no processor for {READY_DEADLINE:?}; it ends by itself, try again")]
    Slow(i32),
    /// A killed copy did not end in time.
    #[error("the copy (pid {0}) does not end")]
    Lives(i32),
    /// The status was not taken in time.
    #[error("the copy (pid {0}) has ended, but the process has not yet taken its status; try again: pyheap cure PID")]
    NotReaped(i32),
    /// A system call of ours failed.
    #[error("{what} failed")]
    Os {
        /// What we tried.
        what: &'static str,
        /// errno
        #[source]
        source: std::io::Error,
    },
}

impl From<HijackError> for CopyError {
    fn from(error: HijackError) -> Self {
        Self::Enter(InfectError::Hijack(error))
    }
}

/// A copy that is there, alive or dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Its pid here.
    pub pid: i32,
    /// Its pid as its parent sees it.
    pub inner: i32,
    /// When it began, in clock ticks since boot.
    pub start_time: u64,
    /// It has ended.
    pub is_dead: bool,
}

/// A new copy.
#[derive(Debug)]
pub struct Copy {
    /// Which.
    pub found: Found,
    handle: OwnedFd,
    /// What making it cost.
    pub hijacked: Hijacked,
    /// The thread that made it stood still for so long at most.
    pub paused: Duration,
}

impl Copy {
    /// Makes a copy of `pid` that ends by itself after `life`.
    ///
    /// # Errors
    /// See [`CopyError`]. The process is as it was; a copy that came late ends by itself, and is found by [`find`].
    pub fn of(pid: i32, life: Duration) -> Result<Self, CopyError> {
        let memory = ProcessMemory::new(pid);
        let maps = space::maps(pid).map_err(InfectError::Maps)?;
        let stub = place_for_stubs(pid, &memory, &maps)?.start;
        let mut name = [0; 16];
        name.iter_mut()
            .zip(NAME.bytes())
            .for_each(|(place, byte)| *place = byte);
        let job = Job::Copy {
            seconds: life.as_secs(),
            nanos: u64::from(life.subsec_nanos()),
            name,
        };
        let begun = Instant::now();
        let hijacked = hijack::hijack(pid, &observe::by_preference(pid)?, stub, job)?;
        let copy = match hijacked.copied {
            Some((copy, _)) => Some(copy),
            None => late(pid, &memory, &maps, stub, hijacked)?,
        };
        let paused = hijacked.copied.map_or_else(|| begun.elapsed(), |(_, paused)| paused);
        // The thread is through or nearly so; the copy has the stub's bytes in a page of its own by then.
        make_unused(pid, &memory, &maps, stub, Some(&[hijacked]));
        let copy = copy.ok_or(CopyError::Refused)?;
        let handle = open(copy)?;
        let is_ready = || {
            let name = std::fs::read_to_string(format!("/proc/{copy}/comm")).unwrap_or_default();
            let sleeps = matches!(observe::doing(copy, copy), Some(observe::Doing::Call { pc, .. })
                if (stub..stub + LONGEST_STUB as u64).contains(&pc));
            Ok(name.trim_end() == NAME && sleeps || is_dead(copy))
        };
        let ready = wait(READY_DEADLINE, is_ready).unwrap_or(false);
        if is_dead(copy) {
            // Without its name, perhaps.
            return Err(match describe(copy, pid).map(|found| reap(pid, &found)) {
                Some(Err(error)) => error,
                _ => CopyError::Ended,
            });
        }
        let found = describe(copy, pid).filter(|_| ready).ok_or(CopyError::Slow(copy));
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                let _ = kill(&handle);
                return Err(error);
            }
        };
        // Should memory run out, the kernel is to take the copy first.
        let _ = std::fs::write(format!("/proc/{copy}/oom_score_adj"), "1000");
        Ok(Self {
            found,
            handle,
            hijacked,
            paused,
        })
    }

    /// Ends it, now. It is a zombie then, until [`reap`].
    ///
    /// # Errors
    /// When the kernel does not let us.
    pub fn kill(&self) -> std::io::Result<()> {
        kill(&self.handle)
    }

    /// True once it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        is_dead(self.found.pid)
    }
}

/// The copy that thread `hijacked.tid` is making, or has been refused; for kernels that do not list a thread's children, and
/// for one that took its time. The thread is not interrupted while it is at work: the kernel would begin anew.
fn late(
    pid: i32,
    memory: &ProcessMemory,
    maps: &[procfs::process::MemoryMap],
    stub: u64,
    hijacked: Hijacked,
) -> Result<Option<i32>, CopyError> {
    const AT_WORK: Duration = Duration::from_secs(2);
    let mut seen = None;
    let _ = wait(AT_WORK, || {
        seen = find(pid).into_iter().find(|found| !found.is_dead);
        Ok(seen.is_some())
    });
    if seen.is_none() {
        let watch = watch(memory, maps, None, stub);
        let mut waiting = vec![hijacked.tid];
        let deadline = Instant::now() + READY_DEADLINE;
        while !observe::round(pid, &watch, &mut waiting)? && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        seen = find(pid).into_iter().next();
    }
    Ok(seen.map(|found| found.pid))
}

/// The copies of `pid` that there are: children with our name and without an exit signal. Whose they are, the caller must know.
#[must_use]
pub fn find(pid: i32) -> Vec<Found> {
    let mut children = Vec::new();
    let tids = observe::threads(pid);
    let listed: Option<Vec<String>> = tids
        .iter()
        .map(|tid| observe::made_file(format!("/proc/{pid}/task/{tid}/children")).ok())
        .collect();
    match listed {
        Some(lists) if !tids.is_empty() => {
            let numbers = lists.iter().flat_map(|list| list.split_whitespace());
            children.extend(numbers.filter_map(|number| number.parse::<i32>().ok()));
        }
        // A kernel without these lists, or a thread that ended meanwhile.
        _ => {
            let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
            children.extend(all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()));
        }
    }
    children.into_iter().filter_map(|child| found(child, pid)).collect()
}

/// `child`, if it is a copy of `parent`.
fn found(child: i32, parent: i32) -> Option<Found> {
    is_copy(child).then(|| describe(child, parent)).flatten()
}

/// A child of `parent` without an exit signal: it may not have its name yet.
fn describe(child: i32, parent: i32) -> Option<Found> {
    let process = Process::new(child).ok()?;
    let stat = process.stat().ok()?;
    if stat.ppid != parent || stat.exit_signal != Some(0) {
        return None;
    }
    let status = process.status().ok()?;
    Some(Found {
        pid: child,
        inner: status.nspid.and_then(|pids| pids.last().copied()).unwrap_or(child),
        start_time: stat.starttime,
        is_dead: matches!(stat.state, 'Z' | 'X'),
    })
}

/// True if process `pid` is a copy, of whomever: it is no program.
#[must_use]
pub fn is_copy(pid: i32) -> bool {
    let stat = Process::new(pid).and_then(|process| process.stat());
    stat.is_ok_and(|stat| stat.exit_signal == Some(0) && stat.comm == NAME)
}

fn is_dead(pid: i32) -> bool {
    let stat = Process::new(pid).and_then(|process| process.stat());
    stat.map_or(true, |stat| matches!(stat.state, 'Z' | 'X'))
}

fn open(pid: i32) -> Result<OwnedFd, CopyError> {
    // SAFETY: pidfd_open(2) takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(CopyError::Os {
            what: "pidfd_open",
            source: std::io::Error::last_os_error(),
        });
    }
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn kill(handle: &OwnedFd) -> std::io::Result<()> {
    let fd = handle.as_raw_fd();
    let information = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: pidfd_send_signal(2) with no information to read.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, information, 0) };
    if sent == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

/// Ends a copy that is left over, if it lives, and waits for its end.
///
/// # Errors
/// See [`CopyError`].
pub fn end(copy: &Found) -> Result<(), CopyError> {
    if !is_dead(copy.pid) {
        let handle = open(copy.pid)?;
        // Now that nobody else can get this number: is it still the one?
        let stat = Process::new(copy.pid).and_then(|process| process.stat());
        if stat.is_ok_and(|stat| stat.starttime == copy.start_time) {
            kill(&handle).map_err(|source| CopyError::Os {
                what: "killing the copy",
                source,
            })?;
        }
    }
    let ended = wait(END_DEADLINE, || Ok(is_dead(copy.pid))).unwrap_or(false);
    ended.then_some(()).ok_or(CopyError::Lives(copy.pid))
}

/// Makes process `pid` take the status of a copy that has ended, and puts its page back that the stubs were in.
///
/// # Errors
/// See [`CopyError`]. It can be tried again.
pub fn reap(pid: i32, copy: &Found) -> Result<Vec<Hijacked>, CopyError> {
    let is_there = || {
        let stat = Process::new(copy.pid).and_then(|process| process.stat());
        stat.is_ok_and(|stat| stat.ppid == pid && stat.starttime == copy.start_time)
    };
    let memory = ProcessMemory::new(pid);
    let maps = space::maps(pid).map_err(InfectError::Maps)?;
    let stub = place_for_stubs(pid, &memory, &maps)?.start;
    let mut hijacks = Vec::new();
    if is_there() {
        let job = Job::Reap { child: copy.inner };
        hijacks.push(hijack::hijack(pid, &observe::by_preference(pid)?, stub, job)?);
        let gone = wait(REAP_DEADLINE, || Ok(!is_there())).unwrap_or(false);
        if !gone {
            return Err(CopyError::NotReaped(copy.pid));
        }
    }
    if make_unused(pid, &memory, &maps, stub, Some(&hijacks)) {
        hijacks.extend(drop_page(pid, &memory, stub));
    }
    Ok(hijacks)
}
