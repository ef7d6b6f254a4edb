//! A frozen copy of a process, to be read at leisure while the process goes on: [`Frozen`].
//!
//! How it is made, and what of it the process can notice, is in [`pyheap_injector::copy`]. Here is when it is *not* made: where
//! the pause would be too long, where the kernel would refuse it, where there is too little memory for it, and where a child
//! would change something for the process for good. While it lives, the process pays for each page that it writes to for the first time,
//! and the page is there twice: a thread of ours watches, and ends the copy when memory gets short, when the process has
//! ended, and when its time is over.

use super::headroom;
use super::preflight::{Refusal, Target};
use super::process::ProcessId;
use super::session::{self, AttachError, Lock};
use procfs::process::{LimitValue, Process};
use procfs::{Current, Meminfo};
use pyheap_injector::copy::{self, Copy, CopyError, Found};
use pyheap_injector::observe;
use pyheap_injector::seccomp::{self, Forbidden, Purpose};
use pyheap_injector::{MemoryFile, RemoteAddr, RemoteMemory};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a copy takes at least, in nanoseconds.
const PAUSE_NANOS: u64 = 300_000;
/// And for each page of anonymous memory, resident or swapped: its entry in the page table is copied, and its counts go up.
/// docs/rss.md has how that was measured.
const PAUSE_NANOS_A_PAGE: u64 = 200;
/// Memory that must be free, besides the page tables and an eighth of what could be copied.
const ROOM_BYTES: u64 = 64 << 20;
/// The copy is ended when less is left.
const SHORT_BYTES: u64 = 32 << 20;
/// How often it is looked whether it must end.
const WATCH: Duration = Duration::from_millis(50);
/// The copy's own deadline is later than ours, so that it is we who end it, as long as we live.
const GRACE: Duration = Duration::from_secs(1);
/// No copy lives longer, whatever is allowed.
const MOST_FREEZE: Duration = Duration::from_secs(24 * 3600);
/// Pages.
const PAGE: u64 = 4096;

/// What a copy may cost.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Longest pause of the thread that makes the copy, as predicted. (Threads that want to map memory wait as long.)
    pub max_pause: Duration,
    /// Longest life of the copy.
    pub max_freeze: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_pause: Duration::from_millis(250),
            max_freeze: Duration::from_secs(60),
        }
    }
}

/// Why there is no frozen copy. The process is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreezeError {
    /// The process is in no state for it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another pyheap is at it.
    #[error(transparent)]
    InUse(#[from] AttachError),
    /// It would take too long.
    #[error(
        "a frozen copy would stop process {pid} for some {} ms (it has {} MiB of anonymous memory), more than the {} ms allowed: raise --max-pause", predicted.as_millis(), anonymous >> 20, limit.as_millis()
    )]
    Pause {
        /// The process.
        pid: i32,
        /// How long.
        predicted: Duration,
        /// Anonymous memory in bytes.
        anonymous: u64,
        /// What is allowed.
        limit: Duration,
    },
    /// There would be too little memory.
    #[error(
        "a frozen copy of process {pid} might need {} MiB, and {whose} has {} MiB left",
        needed >> 20,
        left >> 20
    )]
    Memory {
        /// The process.
        pid: i32,
        /// Whose limit.
        whose: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes left.
        left: u64,
    },
    /// The kernel counts every page that could be copied, and there are too many.
    #[error(
        "this machine never promises more memory than it has (vm.overcommit_memory=2), and has {} MiB left to promise: a frozen copy of process {pid} needs {} MiB", left >> 20, needed >> 20
    )]
    Overcommit {
        /// The process.
        pid: i32,
        /// Bytes needed.
        needed: u64,
        /// Bytes left.
        left: u64,
    },
    /// No process more is allowed.
    #[error("process {pid} may not have another child: {why}")]
    Processes {
        /// The process.
        pid: i32,
        /// Which limit.
        why: &'static str,
    },
    /// Its children live in another namespace.
    #[error(
        "the children of process {pid} go to another {kind} namespace than its own: a copy of it would change that one"
    )]
    Namespace {
        /// The process.
        pid: i32,
        /// "pid" or "time".
        kind: &'static str,
    },
    /// The copy could not be made.
    #[error("cannot make a frozen copy of process {pid}")]
    Copy {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: CopyError,
    },
    /// It may not be read.
    #[error("the frozen copy of process {pid} cannot be read (kernel.yama.ptrace_scope, or a security profile)")]
    Unreadable {
        /// The process.
        pid: i32,
    },
}

impl FreezeError {
    /// The exit code for this failure.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused(refusal) => refusal.exit_code(),
            Self::InUse(error) => error.exit_code(),
            Self::Unreadable { .. } => 4,
            _ => 7,
        }
    }
}

/// Why a copy was ended before its reader had finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Ended {
    /// The process ended.
    #[error("the process has ended")]
    TargetGone,
    /// Its time was over.
    #[error("its time was over (--max-freeze)")]
    Deadline,
    /// Memory ran short.
    #[error("memory got short: {} MiB left", .0 >> 20)]
    Memory(u64),
    /// Somebody else ended it.
    #[error("something else ended it")]
    Killed,
}

/// What a copy has cost the process.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub struct Cost {
    /// The thread that made it stood still for so long at most, in nanoseconds.
    pub paused_nanos: u64,
    /// What was predicted.
    pub predicted_nanos: u64,
    /// How long the copy lived, in nanoseconds.
    pub lived_nanos: u64,
    /// Page faults of the process in that time, without reading from disk: those that copied a page are among them.
    pub faults: u64,
    /// Bytes that the process had to copy because it wrote to them, and that were there twice at the end. `None` where the
    /// kernel does not tell.
    pub copied_bytes: Option<u64>,
}

/// A frozen copy. Its memory is read by [`Frozen::memory`] only: other ways of reading would make the kernel copy each page.
/// Dropping it ends it.
#[derive(Debug)]
pub struct Frozen {
    _lock: Lock,
    target: ProcessId,
    copy: Arc<Copy>,
    memory: MemoryFile,
    predicted: Duration,
    begun: Instant,
    faults_before: u64,
    watcher: Option<(Sender<()>, JoinHandle<()>)>,
    ended: Arc<OnceLock<Ended>>,
    is_finished: bool,
}

impl Frozen {
    /// Makes a frozen copy of `target`, as [`super::preflight::check_for_copy`] found it.
    ///
    /// # Errors
    /// See [`FreezeError`].
    pub fn of(target: &Target, limits: Limits) -> Result<Self, FreezeError> {
        let id = target.facts.id;
        let pid = id.pid;
        let lock = session::lock(id)?;
        session::recorded_by_another(pid)?;
        let _ = clear(pid);
        let predicted = predict(pid, limits)?;
        let faults_before = minor_faults(pid);
        let life = limits.max_freeze.min(MOST_FREEZE) + GRACE;
        let copy = Copy::of(pid, life).map_err(|source| FreezeError::Copy { pid, source })?;
        let memory = MemoryFile::open(copy.found.pid);
        let memory = memory.and_then(|memory| {
            let probe = memory.read_array::<8>(RemoteAddr(target.interpreter.runtime.0));
            probe.map(|_| memory).map_err(std::io::Error::other)
        });
        let Ok(memory) = memory else {
            let _ = copy.kill();
            let _ = copy::end(&copy.found).and_then(|()| reap(pid, &copy.found));
            return Err(FreezeError::Unreadable { pid });
        };
        let copy = Arc::new(copy);
        let ended = Arc::new(OnceLock::new());
        let mut frozen = Self {
            _lock: lock,
            target: id,
            copy: Arc::clone(&copy),
            memory,
            predicted,
            begun: Instant::now(),
            faults_before,
            watcher: None,
            ended: Arc::clone(&ended),
            is_finished: false,
        };
        let (stop, stopped) = mpsc::channel();
        let deadline = frozen.begun + limits.max_freeze.min(MOST_FREEZE);
        let watching = std::thread::spawn(move || {
            while stopped.recv_timeout(WATCH) == Err(RecvTimeoutError::Timeout) {
                if let Some(why) = must_end(id, &copy, deadline) {
                    let _ = ended.set(why);
                    let _ = copy.kill();
                    return;
                }
            }
        });
        frozen.watcher = Some((stop, watching));
        Ok(frozen)
    }

    /// The copy's pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.copy.found.pid
    }

    /// The copy's memory.
    #[must_use]
    pub fn memory(&self) -> &MemoryFile {
        &self.memory
    }

    /// How long the process stood still for it, at most.
    #[must_use]
    pub fn paused(&self) -> Duration {
        self.copy.paused
    }

    /// Why it is not there any more, if it is not: what was read up to then is what it is, and the rest cannot be read.
    #[must_use]
    pub fn ended(&self) -> Option<Ended> {
        let early = || self.copy.has_ended().then_some(Ended::Killed);
        self.ended.get().copied().or_else(early)
    }

    /// Ends the copy and sees that nothing of it is left; what it has cost.
    ///
    /// # Errors
    /// When a zombie is left: `pyheap cure` can try again.
    pub fn finish(mut self) -> Result<Cost, FreezeError> {
        self.finish_once()
    }

    fn finish_once(&mut self) -> Result<Cost, FreezeError> {
        self.is_finished = true;
        let lived = self.begun.elapsed();
        let copied_bytes = private_bytes(self.pid());
        let cost = Cost {
            paused_nanos: nanos(self.copy.paused),
            predicted_nanos: nanos(self.predicted),
            lived_nanos: nanos(lived),
            faults: minor_faults(self.target.pid).saturating_sub(self.faults_before),
            copied_bytes,
        };
        if let Some((stop, watcher)) = self.watcher.take() {
            drop(stop);
            let _ = watcher.join();
        }
        let pid = self.target.pid;
        let _ = self.copy.kill();
        let gone = copy::end(&self.copy.found).and_then(|()| {
            if self.target.is_alive() {
                reap(pid, &self.copy.found)
            } else {
                // It is another one's child now, who takes its status.
                Ok(())
            }
        });
        gone.map_err(|source| FreezeError::Copy { pid, source })?;
        Ok(cost)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = self.finish_once();
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn must_end(id: ProcessId, copy: &Copy, deadline: Instant) -> Option<Ended> {
    if Instant::now() >= deadline {
        return Some(Ended::Deadline);
    }
    if !id.is_alive() {
        return Some(Ended::TargetGone);
    }
    if copy.has_ended() {
        return Some(Ended::Killed);
    }
    let left = headroom::of(id.pid).into_iter().chain(available_bytes()).min()?;
    (left < SHORT_BYTES).then_some(Ended::Memory(left))
}

/// Takes the status of a dead copy, if the process may make the calls for that.
fn reap(pid: i32, copy: &Found) -> Result<(), CopyError> {
    let allowed = seccomp::check_kinds(pid, &observe::kinds(pid), Purpose::Copy);
    allowed.map_err(|why: Forbidden| CopyError::Os {
        what: "taking the copy's status",
        source: std::io::Error::new(std::io::ErrorKind::PermissionDenied, why),
    })?;
    copy::reap(pid, copy).map(drop)
}

/// The copies of `pid` that there are, and whether a pyheap that lives is at work with it.
#[must_use]
pub fn copies(pid: i32) -> (Vec<Found>, bool) {
    let found = copy::find(pid);
    if found.is_empty() {
        return (found, false);
    }
    let id = ProcessId::of(pid).ok();
    let lock = id.and_then(|id| Lock::take(id, Duration::ZERO).ok()).flatten();
    (found, lock.is_none())
}

/// Ends and reaps the copies that a pyheap which is no more has left. The caller has the lock of `pid`.
///
/// # Errors
/// With the first that could not be.
pub(super) fn clear(pid: i32) -> Result<usize, CopyError> {
    let left = copy::find(pid);
    for copy in &left {
        copy::end(copy)?;
        reap(pid, copy)?;
    }
    Ok(left.len())
}

/// How long the copy would take; refuses what should not be tried.
fn predict(pid: i32, limits: Limits) -> Result<Duration, FreezeError> {
    let gone = || Refusal::NoSuchProcess { pid };
    let process = Process::new(observe::reachable(pid)).map_err(|_| gone())?;
    let status = process.status().map_err(|_| gone())?;
    let bytes = |kib: Option<u64>| kib.unwrap_or(0).saturating_mul(1024);
    let anonymous = bytes(status.rssanon).saturating_add(bytes(status.vmswap));
    let predicted = Duration::from_nanos(PAUSE_NANOS.saturating_add(anonymous / PAGE * PAUSE_NANOS_A_PAGE));
    if predicted > limits.max_pause {
        let limit = limits.max_pause;
        return Err(FreezeError::Pause {
            pid,
            predicted,
            anonymous,
            limit,
        });
    }
    same_namespaces(pid)?;
    let needed = bytes(status.vmpte)
        .saturating_add(anonymous / 8)
        .saturating_add(ROOM_BYTES);
    let rooms = [
        ("its memory cgroup", headroom::of(pid)),
        ("this machine", available_bytes()),
    ];
    for (whose, left) in rooms {
        if let Some(left) = left.filter(|left| *left < needed) {
            return Err(FreezeError::Memory {
                pid,
                whose,
                needed,
                left,
            });
        }
    }
    overcommit(pid, bytes(status.vmdata).saturating_add(bytes(status.vmstk)))?;
    if headroom::processes(pid) == Some(0) {
        let why = "its cgroup is at its pids.max";
        return Err(FreezeError::Processes { pid, why });
    }
    const SYS_ADMIN: u32 = 21;
    const SYS_RESOURCE: u32 = 24;
    let is_exempt = status.ruid == 0 || status.capeff & (1 << SYS_ADMIN | 1 << SYS_RESOURCE) != 0;
    if let Ok(LimitValue::Value(limit)) = process.limits().map(|limits| limits.max_processes.soft_limit)
        && !is_exempt
        && threads_of_user(status.ruid) >= limit
    {
        let why = "its user is at its RLIMIT_NPROC (ulimit -u)";
        return Err(FreezeError::Processes { pid, why });
    }
    Ok(predicted)
}

/// Refuses where a first child would become the first process of a pid namespace (with which everything in it would end), or
/// settle a time namespace's clocks.
fn same_namespaces(pid: i32) -> Result<(), FreezeError> {
    for tid in observe::threads(pid) {
        for (kind, own, children) in [
            ("pid", "pid", "pid_for_children"),
            ("time", "time", "time_for_children"),
        ] {
            let link = |name: &str| std::fs::read_link(format!("/proc/{pid}/task/{tid}/ns/{name}"));
            match (link(own), link(children)) {
                (Ok(own), Ok(children)) if own == children => {}
                // A kernel without such namespaces, or a thread that has ended.
                (Err(_), _) => {}
                _ => return Err(FreezeError::Namespace { pid, kind }),
            }
        }
    }
    Ok(())
}

/// Where memory is never promised twice: `private` bytes more must be there to promise.
fn overcommit(pid: i32, private: u64) -> Result<(), FreezeError> {
    let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    if mode.trim() != "2" {
        return Ok(());
    }
    let left = Meminfo::current()
        .ok()
        .and_then(|info| Some(info.commit_limit?.saturating_sub(info.committed_as)));
    match left {
        Some(left) if left < private => Err(FreezeError::Overcommit {
            pid,
            needed: private,
            left,
        }),
        _ => Ok(()),
    }
}

fn available_bytes() -> Option<u64> {
    Meminfo::current().ok()?.mem_available
}

/// All threads of a user's processes.
fn threads_of_user(uid: u32) -> u64 {
    let Ok(all) = procfs::process::all_processes() else {
        return 0;
    };
    let statuses = all.flatten().filter_map(|process| process.status().ok());
    statuses
        .filter(|status| status.ruid == uid)
        .map(|status| status.threads)
        .fold(0, u64::saturating_add)
}

fn minor_faults(pid: i32) -> u64 {
    Process::new(pid)
        .and_then(|process| process.stat())
        .map_or(0, |stat| stat.minflt)
}

/// Memory that process `pid` shares with nobody: of a copy, what its original has copied away from it.
fn private_bytes(pid: i32) -> Option<u64> {
    let rollup = Process::new(pid).ok()?.smaps_rollup().ok()?;
    let maps = rollup.memory_map_rollup.0.iter();
    let sums = maps.map(|map| {
        let value = |key: &str| map.extension.map.get(key).copied();
        Some(value("Private_Dirty")?.saturating_add(value("Private_Clean")?))
    });
    sums.sum()
}
