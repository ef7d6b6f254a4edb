//! Facts of a process, from `/proc`: who it is, what it does, how much memory it has, who traces it.
//!
//! A pid alone names nobody for long: [`ProcessId`] adds the start time, and every longer dealing with a process asks
//! [`ProcessId::is_alive`]. What it refuses to do: open anything in the process, or need a right that `/proc` does not
//! give to everyone (except where a function says so).

use super::pages::{PAGE, PRESENT, Pagemap, SWAPPED};
use procfs::process::{MMapPath, Process, Stat};
use procfs::{Current, ProcError, ProcResult};
use pyheap_injector::observe::{self, Kind};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A chain of parents is not followed further.
const MAX_ANCESTORS: usize = 128;

/// `PF_KTHREAD` in the flags of `/proc/PID/stat`.
const PF_KTHREAD: u32 = 0x0020_0000;

/// A process that no later one can be mistaken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessId {
    /// Its number in our pid namespace.
    pub pid: i32,
    /// When it began, in clock ticks since boot.
    pub start_time: u64,
}

impl ProcessId {
    /// The process that has number `pid` now.
    ///
    /// # Errors
    /// When there is none.
    pub fn of(pid: i32) -> ProcResult<Self> {
        let start_time = Process::new(pid)?.stat()?.starttime;
        Ok(Self { pid, start_time })
    }

    /// True while this very process runs: not a zombie, and no other one with the same number.
    #[must_use]
    pub fn is_alive(self) -> bool {
        let stat = Process::new(self.pid).and_then(|process| process.stat());
        stat.is_ok_and(|stat| {
            // A main thread can end before the rest: the process lives on.
            let lives = !is_gone(stat.state) || pyheap_injector::observe::reachable(self.pid) != self.pid;
            stat.starttime == self.start_time && lives
        })
    }
}

const fn is_gone(state: char) -> bool {
    matches!(state, 'Z' | 'X' | 'x')
}

/// Who traces a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracer {
    /// Its pid.
    pub pid: i32,
    /// Its name, without control characters; `?` when that cannot be read.
    pub name: String,
}

/// What `/proc` says of a process.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Number and start time.
    pub id: ProcessId,
    /// The process that it belongs to: `id.pid`, unless that is a thread's number.
    pub thread_group: i32,
    /// The parent's pid.
    pub parent: i32,
    /// The state, as `/proc/PID/stat` writes it: R, S, D, T (stopped), t (in a tracer's hands), Z, X, I.
    pub state: char,
    /// The name of the program, at most 15 bytes.
    pub name: String,
    /// The arguments; empty for kernel threads and zombies, and where they cannot be read.
    pub command_line: Vec<String>,
    /// The executable; `None` where it may not be read.
    pub exe: Option<PathBuf>,
    /// The real user id.
    pub real_uid: u32,
    /// The effective user id.
    pub effective_uid: u32,
    /// How many threads it has.
    pub threads: u64,
    /// The thread group's pids from ours down to its own namespace; one entry outside of containers.
    pub namespace_pids: Vec<i32>,
    /// 0: no seccomp, 1: strict, 2: a filter.
    pub seccomp: Option<u32>,
    /// Who traces it: its main thread, or any other one.
    pub tracer: Option<Tracer>,
    /// What kinds of threads it has.
    pub kinds: Vec<Kind>,
    /// A thread of the kernel.
    pub is_kernel_thread: bool,
    /// How long ago it began.
    pub age: Option<Duration>,
}

impl Facts {
    /// Asks `/proc` about `pid`.
    ///
    /// # Errors
    /// When there is no such process (any more), or `/proc` is unreadable.
    pub fn of(pid: i32) -> ProcResult<Self> {
        let process = Process::new(pid)?;
        let stat = process.stat()?;
        let status = process.status()?;
        let kinds = observe::kinds(pid);
        let tracers = kinds.iter().map(|kind| kind.tracer);
        let tracer = tracers.chain([status.tracerpid]).find(|&pid| pid != 0).map(tracer);
        Ok(Self {
            id: ProcessId {
                pid,
                start_time: stat.starttime,
            },
            thread_group: status.tgid,
            parent: stat.ppid,
            state: stat.state,
            name: status.name.clone(),
            command_line: process.cmdline().unwrap_or_default(),
            exe: process.exe().ok(),
            real_uid: status.ruid,
            effective_uid: status.euid,
            threads: status.threads,
            namespace_pids: status.nspid.clone().unwrap_or_default(),
            seccomp: status.seccomp,
            tracer,
            kinds,
            is_kernel_thread: stat.flags & PF_KTHREAD != 0,
            age: age(&stat),
        })
    }

    /// A zombie, or on the way out.
    #[must_use]
    pub const fn is_gone(&self) -> bool {
        is_gone(self.state)
    }

    /// The name without control characters.
    #[must_use]
    pub fn printable_name(&self) -> String {
        printable(Path::new(&self.name))
    }

    /// The command line in one line, or the name in brackets; at most `limit` characters.
    #[must_use]
    pub fn short_command(&self, limit: usize) -> String {
        let full = if self.command_line.is_empty() {
            format!("[{}]", self.name)
        } else {
            self.command_line.join(" ")
        };
        // A hostile command line may hold escape sequences.
        let mut clean = full.chars().map(|c| if c.is_control() { ' ' } else { c });
        let short: String = clean.by_ref().take(limit).collect();
        if clean.next().is_some() {
            let kept: String = short.chars().take(limit.saturating_sub(1)).collect();
            return kept + "…";
        }
        short
    }
}

fn tracer(pid: i32) -> Tracer {
    let name = Process::new(pid).and_then(|tracer| tracer.stat()).map(|stat| stat.comm);
    Tracer {
        pid,
        name: name.map_or_else(|_| "?".to_owned(), |name| printable(Path::new(&name))),
    }
}

fn age(stat: &Stat) -> Option<Duration> {
    let ticks_per_second = procfs::ticks_per_second();
    let up = procfs::Uptime::current().ok()?.uptime_duration();
    let begun = Duration::from_millis(stat.starttime.checked_mul(1000)?.checked_div(ticks_per_second)?);
    up.checked_sub(begun)
}

/// How much memory a process has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Resident set size.
    pub rss_bytes: u64,
    /// Resident anonymous memory: heap, arenas, stacks. `None` where the kernel does not say.
    pub anonymous_bytes: Option<u64>,
    /// Resident pages of files.
    pub file_bytes: Option<u64>,
    /// In swap.
    pub swap_bytes: Option<u64>,
}

impl MemoryUse {
    /// Reads `/proc/PID/status`: cheap enough for every second, and allowed to everyone.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn of(pid: i32) -> ProcResult<Self> {
        let status = Process::new(pid)?.status()?;
        let bytes = |kib: Option<u64>| kib.map(|kib| kib.saturating_mul(1024));
        Ok(Self {
            rss_bytes: bytes(status.vmrss).unwrap_or(0),
            anonymous_bytes: bytes(status.rssanon),
            file_bytes: bytes(status.rssfile),
            swap_bytes: bytes(status.vmswap),
        })
    }
}

/// How much of `len` bytes from `base` on in a process has pages, in memory or in swap. `None` if that may not be known (it
/// needs the rights of a debugger) or is more than 1 GiB.
#[must_use]
pub fn resident_bytes(pid: i32, base: u64, len: u64) -> Option<u64> {
    const MOST: u64 = 1 << 30;
    let len = Some(len).filter(|len| *len / PAGE <= MOST / PAGE)?;
    let base = base / PAGE * PAGE;
    let mut pages = 0;
    let range = base..base.checked_add(len)?;
    Pagemap::open(pid)
        .and_then(|pagemap| pagemap.pages(range, PRESENT | SWAPPED, |_| pages += 1))
        .ok()?;
    Some(pages * PAGE)
}

/// The proportional share of memory: shared pages count by their number of users. In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProportionalMemory {
    /// Proportional set size.
    pub pss_bytes: u64,
    /// Anonymous pages.
    pub anonymous_bytes: u64,
}

impl ProportionalMemory {
    /// Reads `/proc/PID/smaps_rollup`. The kernel walks the page tables for it: some 10 ms a GiB, with the target's
    /// memory map locked for readers; not for every second of a large process. Needs the rights of a debugger.
    ///
    /// # Errors
    /// When the process is gone or may not be looked into.
    pub fn of(pid: i32) -> ProcResult<Self> {
        let rollup = Process::new(pid)?.smaps_rollup()?;
        let sum = |key: &str| {
            let maps = rollup.memory_map_rollup.0.iter();
            maps.filter_map(|map| map.extension.map.get(key)).sum()
        };
        Ok(Self {
            pss_bytes: sum("Pss"),
            anonymous_bytes: sum("Anonymous"),
        })
    }
}

/// The pids of this process and of all its ancestors, nearest first: pyheap must not stop who waits for it.
#[must_use]
pub fn own_family() -> Vec<i32> {
    let mut family = vec![i32::try_from(std::process::id()).unwrap_or(0)];
    while family.len() < MAX_ANCESTORS {
        let last = family.last().copied().unwrap_or(0);
        match Process::new(last).and_then(|process| process.stat()) {
            Ok(stat) if stat.ppid > 0 && !family.contains(&stat.ppid) => family.push(stat.ppid),
            _ => break,
        }
    }
    family
}

/// All processes and their parents.
#[must_use]
pub fn parents() -> Vec<(i32, i32)> {
    let Ok(all) = procfs::process::all_processes() else {
        return Vec::new();
    };
    let stats = all.flatten().filter_map(|process| process.stat().ok());
    // A frozen copy is nobody's program.
    let programs = stats.filter(|stat| stat.exit_signal != Some(0) || stat.comm != pyheap_injector::copy::NAME);
    programs.map(|stat| (stat.pid, stat.ppid)).collect()
}

/// The children of all threads of `pid`; `None` where the kernel does not list them, and if the process is gone. One that is
/// born meanwhile may be missing.
#[must_use]
pub fn children(pid: i32) -> Option<Vec<i32>> {
    let mut found = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        match std::fs::read_to_string(thread.path().join("children")) {
            Ok(text) => found.extend(
                text.split_ascii_whitespace()
                    .filter_map(|child| child.parse::<i32>().ok()),
            ),
            // The thread has just ended, or there is no such list.
            Err(_) if thread.path().exists() => return None,
            Err(_) => {}
        }
    }
    Some(found)
}

/// The descendants of `pid`, nearest first.
#[must_use]
pub fn descendants(pid: i32) -> Vec<i32> {
    descendants_of(&parents(), &[pid])
}

/// The descendants of `roots` among `parents` (process and its parent), nearest first; without the roots.
#[must_use]
pub fn descendants_of(parents: &[(i32, i32)], roots: &[i32]) -> Vec<i32> {
    let mut found = roots.to_vec();
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        let children = parents.iter().filter(|(_, of)| *of == parent).map(|(child, _)| *child);
        let new: Vec<i32> = children.filter(|child| !found.contains(child)).collect();
        found.extend(new);
        next += 1;
    }
    found.split_off(roots.len())
}

/// The files that are mapped into a process, each once.
///
/// # Errors
/// When the process is gone or may not be looked into.
pub fn mapped_files(process: &Process) -> ProcResult<HashSet<PathBuf>> {
    let paths = process.maps()?.0.into_iter().filter_map(|map| match map.pathname {
        MMapPath::Path(path) => Some(path),
        _ => None,
    });
    Ok(paths.collect())
}

/// True when `error` says that there is no such process.
#[must_use]
pub fn is_not_found(error: &ProcError) -> bool {
    match error {
        ProcError::NotFound(_) => true,
        ProcError::Io(error, _) => error.raw_os_error() == Some(libc::ESRCH),
        _ => false,
    }
}

/// A path of the target, for a message: without control characters.
pub(super) fn printable(path: &Path) -> String {
    let shown = path.to_string_lossy();
    shown.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
