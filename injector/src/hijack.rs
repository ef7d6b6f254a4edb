//! One short hijack: stop a thread, redirect it to a stub, let go.
//!
//! All of it happens in a child process of ours in a process group of its own and with all signals blocked, so that a Ctrl-C, a closed
//! terminal or the death of the command does not reach it, and its exit, however it comes about, undoes everything: the
//! kernel detaches a dead tracer's threads. Until `PTRACE_SETREGS` the thread is merely stopped and would go on as if
//! nothing had been; from then on it runs the stub, which needs nobody.

#![expect(
    unsafe_code,
    reason = "fork, shared memory with the child, and ptrace requests that nix does not have"
)]

use crate::arch::{self, Call, Gadgets, Job, PtraceRequest, Registers, Signals};
use crate::child::{CLONE, StandIn, in_child};
use crate::observe::Watch;
use nix::sys::ptrace;
use nix::unistd::Pid;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for one thread to stop; one that sleeps uninterruptibly does not, and another is taken.
pub(crate) const STOP_DEADLINE: Duration = Duration::from_millis(200);
/// Longest wait for a thread that would stop if it got a processor: on an overloaded machine that takes a while, and no
/// other thread would be faster.
const STARVED_DEADLINE: Duration = Duration::from_secs(5);
/// We ask again and again for so long before we sleep until a thread has stopped.
const SPIN: Duration = Duration::from_micros(40);
/// Longest wait for a rehearsal, which a machine with other things to do can make late.
const REHEARSAL_DEADLINE: Duration = Duration::from_millis(2);
/// Longest time for finding a thread that can be redirected.
const HIJACK_DEADLINE: Duration = Duration::from_millis(800);
/// The same for taking the hooks out: on a machine with many more running threads than processors, and with signals that are
/// always pending when a thread gets to run, it can take some attempts.
const LEAVE_DEADLINE: Duration = Duration::from_secs(4);
/// Longest wait for all of some threads that are to be looked at. They are asked at the same time.
const OBSERVE_DEADLINE: Duration = Duration::from_secs(1);
/// So many threads are asked at the same time: each stands still until it has been looked at.
const OBSERVED_AT_ONCE: usize = 16;
/// Threads that one child looks at.
pub const MAX_THREADS: usize = 8192;

/// Why no thread could be redirected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HijackError {
    /// The kernel said no to ptrace.
    #[error("the kernel does not let us trace thread {tid}")]
    Refused {
        /// Which thread.
        tid: i32,
        /// errno
        #[source]
        source: std::io::Error,
    },
    /// The process is stopped (SIGSTOP, Ctrl-Z).
    #[error("process {pid} is stopped (Ctrl-Z or SIGSTOP); continue it first: kill -CONT {pid}")]
    GroupStopped {
        /// The process.
        pid: i32,
    },
    /// No thread stopped in time: all are in uninterruptible sleep, or signals are pending for each of them.
    #[error("no thread of process {pid} could be stopped within {deadline:?}; try again")]
    Timeout {
        /// The process.
        pid: i32,
        /// How long we tried.
        deadline: Duration,
    },
    /// All threads are in calls that must not be interrupted.
    #[error(
        "every thread of process {pid} is in a call that must not be interrupted (a write or receive would come back short, a timeout would begin anew); try again"
    )]
    Unfit {
        /// The process.
        pid: i32,
    },
    /// The place for the stub is in use.
    #[error("another pyheap is at work in process {pid}")]
    Occupied {
        /// The process.
        pid: i32,
    },
    /// The process is gone.
    #[error("process {pid} is gone")]
    Gone {
        /// The process.
        pid: i32,
    },
    /// Its system calls go to a handler of its own (`PR_SET_SYSCALL_USER_DISPATCH`).
    #[error("process {pid} has its system calls sent to a handler of its own (syscall user dispatch, as Wine does)")]
    Dispatches {
        /// The process.
        pid: i32,
    },
    /// A thread runs 32-bit code.
    #[error("process {pid} runs 32-bit code")]
    NotSixtyFour {
        /// The process.
        pid: i32,
    },
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

/// What a hijack cost.
#[derive(Debug, Clone, Copy)]
pub struct Hijacked {
    /// The thread.
    pub tid: i32,
    /// From the confirmed stop to the moment we let go.
    pub held: Duration,
    /// From our request to stop to the moment we let go.
    pub disturbed: Duration,
    /// Of a [`Job::Copy`]: the copy's pid here, and the time from our request to stop to the moment in which it was seen, which
    /// is not before the thread went on. `None` if it was not seen.
    pub copied: Option<(i32, Duration)>,
}

/// What the child reports, in memory shared with it.
#[repr(C)]
pub(crate) struct Report {
    pub(crate) state: AtomicU32,
    errno: AtomicU32,
    tid: AtomicU32,
    pub(crate) count: AtomicU32,
    held_nanos: AtomicU64,
    disturbed_nanos: AtomicU64,
    copy: AtomicU32,
    paused_nanos: AtomicU64,
    pub(crate) observed: [AtomicU32; MAX_THREADS],
}

const DONE: u32 = 1;
const REFUSED: u32 = 2;
const STOPPED: u32 = 3;
const TIMEOUT: u32 = 4;
const GONE: u32 = 5;
const THIRTY_TWO: u32 = 6;
const WRITE_FAILED: u32 = 7;
const OCCUPIED: u32 = 8;
const DISPATCHES: u32 = 9;

/// A page run shared with children.
pub(crate) struct Shared(*mut Report);

impl Shared {
    pub(crate) fn new() -> Result<Self, HijackError> {
        // Zeroed by the kernel, which is valid for atomics.
        Ok(Self(map_shared(size_of::<Report>())?.cast()))
    }
}

/// Fresh zeroed memory of `len` bytes that children share.
fn map_shared(len: usize) -> Result<*mut libc::c_void, HijackError> {
    // SAFETY: a fresh anonymous mapping.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(HijackError::Os {
            what: "mmap",
            source: std::io::Error::last_os_error(),
        });
    }
    Ok(at)
}

/// Bytes that a child fills and its parent reads after the child's end.
pub(crate) struct SharedBytes {
    at: *mut u8,
    len: usize,
}

impl SharedBytes {
    pub(crate) fn new(len: usize) -> Option<Self> {
        let at = map_shared(len).ok()?.cast();
        Some(Self { at, len })
    }

    /// A place for `len` bytes at `offset`, for the kernel to write to.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        (offset.checked_add(len)? <= self.len).then(|| self.at.wrapping_add(offset))
    }

    /// All of them. Only when no child is left that writes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped in `new` with this length, unmapped in `drop`; `in_child` has waited for the child's end.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl Drop for SharedBytes {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this size; no reference outlives `self`.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// True if `tid` is a thread of `pid`: its number may have been given to another process since it was read. Of a thread
/// that we have seized the answer stays true. Makes one system call and does not allocate.
pub(crate) fn is_thread_of(pid: i32, tid: i32) -> bool {
    use std::io::Write;
    let mut path = [0_u8; 64];
    let fits = write!(&mut path[..], "/proc/{pid}/task/{tid}\0").is_ok();
    // SAFETY: `path` is terminated by a zero.
    fits && unsafe { libc::access(path.as_ptr().cast(), libc::F_OK) } == 0
}

/// True when `tid`, seized and interrupted, has stopped for whatever reason.
pub(crate) fn wait_for_any_stop(tid: Pid, deadline: Instant) -> bool {
    matches!(wait_for_stop(tid, deadline), Stop::Ours | Stop::Group)
}

impl std::ops::Deref for Shared {
    type Target = Report;
    fn deref(&self) -> &Report {
        // SAFETY: mapped in `new`, unmapped in `drop`, all fields are atomics.
        unsafe { &*self.0 }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this size; no reference outlives `self`.
        unsafe { libc::munmap(self.0.cast(), size_of::<Report>()) };
    }
}

/// How a thread is made to work for us.
#[derive(Debug, Clone, Copy)]
enum Way<'a> {
    /// By a stub.
    Stub { at: u64, job: Job },
    /// By the C library's own instructions and a signal frame on the thread's own stack.
    Return {
        call: Call,
        gadgets: Gadgets,
        stacks: &'a [Stack],
        /// A thread that must not be taken out of a call: it handles signals, and one that came in this moment would not
        /// interrupt the call.
        spare: Option<i32>,
    },
}

/// A mapping that may be a thread's stack.
#[derive(Debug, Clone, Copy)]
pub struct Stack {
    /// Its first address.
    pub start: u64,
    /// Its end.
    pub end: u64,
    /// The kernel calls it the main thread's stack.
    pub main: bool,
}

/// Makes one of `threads` of `pid` do `call` without any code of ours, see [`arch::return_frame`]. Only a thread that is on
/// its own stack is taken: the main thread on the stack that the kernel made, or one whose thread control block lies in
/// the same mapping; and the main thread of a program that handles signals only while it is in no call.
///
/// # Errors
/// See [`HijackError`]; [`HijackError::Timeout`] also when no thread is fit for it.
pub fn call(
    pid: i32,
    threads: &[i32],
    call: Call,
    gadgets: Gadgets,
    stacks: &[Stack],
) -> Result<Hijacked, HijackError> {
    /// SIGINT, which is nearly always caught, and the two that the C library keeps for itself.
    const USUAL: u64 = 1 << (libc::SIGINT - 1) | 3 << 31;
    let spare = (caught_signals(pid) & !USUAL != 0).then_some(pid);
    let way = Way::Return {
        call,
        gadgets,
        stacks,
        spare,
    };
    hijack_by(pid, threads, way, HIJACK_DEADLINE)
}

/// Redirects one of `threads` (in this order of preference) of `pid` to a stub at `stub_at` that does `job`.
///
/// On success the thread is on its way through the stub; that the job is *done* must be seen in memory. On an error the
/// target is as it was, apart from bytes at `stub_at` that nobody executes.
///
/// # Errors
/// See [`HijackError`].
pub fn hijack(pid: i32, threads: &[i32], stub_at: u64, job: Job) -> Result<Hijacked, HijackError> {
    // Who comes can be refused; who leaves has to get in once more.
    let patience = match job {
        Job::Map { .. } | Job::Copy { .. } => HIJACK_DEADLINE,
        Job::Call { .. } | Job::Unmap { .. } | Job::Reap { .. } => LEAVE_DEADLINE,
    };
    hijack_by(pid, threads, Way::Stub { at: stub_at, job }, patience)
}

fn hijack_by(pid: i32, threads: &[i32], way: Way<'_>, patience: Duration) -> Result<Hijacked, HijackError> {
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{}/mem", crate::observe::reachable(pid)))
        .map_err(|source| HijackError::Os {
            what: "opening /proc/PID/mem for writing",
            source,
        })?;
    let report = Shared::new()?;
    arch::ask_processor();
    let stand_in = StandIn::new();
    let caught = caught_signals(pid);
    let work = |stand_in: Option<&StandIn>| {
        let task = Task {
            pid,
            threads,
            memory: memory.as_raw_fd(),
            way,
            caught,
            stand_in,
            patience,
        };
        in_child(|| redirect(&report, &task))
    };
    let done = work(stand_in.as_ref());
    let was_there = stand_in.is_some();
    drop(stand_in);
    match done {
        // There may have been room for one process only.
        Err(HijackError::Os { what: CLONE, .. }) if was_there => work(None)?,
        done => done?,
    }
    let tid = report.tid.load(Ordering::Acquire) as i32;
    let source = || std::io::Error::from_raw_os_error(report.errno.load(Ordering::Acquire) as i32);
    match report.state.load(Ordering::Acquire) {
        DONE => Ok(Hijacked {
            tid,
            held: Duration::from_nanos(report.held_nanos.load(Ordering::Acquire)),
            disturbed: Duration::from_nanos(report.disturbed_nanos.load(Ordering::Acquire)),
            copied: match report.copy.load(Ordering::Acquire) as i32 {
                0 => None,
                copy => Some((copy, Duration::from_nanos(report.paused_nanos.load(Ordering::Acquire)))),
            },
        }),
        REFUSED => Err(HijackError::Refused { tid, source: source() }),
        STOPPED => Err(HijackError::GroupStopped { pid }),
        GONE => Err(HijackError::Gone { pid }),
        OCCUPIED => Err(HijackError::Occupied { pid }),
        DISPATCHES => Err(HijackError::Dispatches { pid }),
        THIRTY_TWO => Err(HijackError::NotSixtyFour { pid }),
        WRITE_FAILED => Err(HijackError::Os {
            what: "writing the stub through /proc/PID/mem",
            source: source(),
        }),
        _ => Err(HijackError::Timeout {
            pid,
            deadline: patience,
        }),
    }
}

/// The signals for which `pid` has handlers, a bit each.
fn caught_signals(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// How a thread stopped.
pub(crate) enum Stop {
    Ours,
    Group,
    Gone,
    Late,
}

/// Whether `tid` runs or waits for a processor. No allocation: also called in a forked child.
fn is_runnable(tid: Pid) -> bool {
    Stat::of(tid).is_some_and(|stat| stat.state == b'R')
}

/// What /proc/TID/stat tells of a thread.
struct Stat {
    /// A letter, proc_pid_stat(5).
    state: u8,
    /// On which it is, or was last.
    processor: Option<usize>,
}

impl Stat {
    /// No allocation: also called in a forked child.
    fn of(tid: Pid) -> Option<Self> {
        use std::io::{Cursor, Read, Write};
        let mut path = [0; 32];
        let mut name = Cursor::new(&mut path[..]);
        write!(name, "/proc/{tid}/stat").ok()?;
        let len = name.position() as usize;
        let path = std::str::from_utf8(path.get(..len)?).ok()?;
        let (mut stat, mut have) = ([0; 1024], 0);
        let mut file = File::open(path).ok()?;
        while let Some(Ok(n @ 1..)) = stat.get_mut(have..).map(|rest| file.read(rest)) {
            have += n;
        }
        Self::parse(stat.get(..have)?)
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        /// Its number in the manual, counted from the state, which has number 3.
        const PROCESSOR: usize = 39 - 3;
        // "TID (NAME) STATE …", and a name can have any character in it.
        let after = stat.iter().rposition(|&byte| byte == b')')? + 2;
        let mut fields = stat.get(after..)?.split(|&byte| byte == b' ');
        let state = *fields.next()?.first()?;
        let processor = fields
            .nth(PROCESSOR - 1)
            .and_then(|field| std::str::from_utf8(field).ok()?.parse().ok());
        Some(Self { state, processor })
    }
}

/// Waits until `tid`, seized and interrupted, has stopped for us. Signals that come in between are passed on.
fn wait_for_stop(tid: Pid, deadline: Instant) -> Stop {
    wait_for_stop_or_starve(tid, deadline, STARVED_DEADLINE)
}

/// The same; a thread that would stop if it got a processor is waited for until `starved` is over, too.
pub(crate) fn wait_for_stop_or_starve(tid: Pid, mut deadline: Instant, starved: Duration) -> Stop {
    let begun = Instant::now();
    let mut news = News::begin();
    loop {
        let mut status = 0;
        // Not nix's: it does not know real-time signals, and what waitpid has told once is gone.
        // SAFETY: writes one integer.
        let answer = unsafe { libc::waitpid(tid.as_raw(), &raw mut status, libc::__WALL | libc::WNOHANG) };
        if answer == 0 {
            let now = Instant::now();
            if now > deadline {
                if now > begun + starved || !is_runnable(tid) {
                    return Stop::Late;
                }
                deadline = now + STOP_DEADLINE / 4;
            }
            news.wait(now, deadline);
            continue;
        }
        if answer < 0 || !libc::WIFSTOPPED(status) {
            return Stop::Gone;
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        match (event, signal) {
            (libc::PTRACE_EVENT_STOP, libc::SIGTRAP) => return Stop::Ours,
            (libc::PTRACE_EVENT_STOP, _) => return Stop::Group,
            // A signal on its way to the program: let it through; our interrupt is still to come.
            (0, _) if signal & 0x80 == 0 => resume(tid, signal),
            _ => resume(tid, 0),
        }
    }
}

/// Brings a thread that stands before system call `number` to the end of that call, where its registers tell how it goes on: lets
/// it make the call, interrupted at once. Only where [`arch::at_call`] says so: where the kernel does not show otherwise how it
/// goes on with a call that the stop has interrupted. Whatever happens to us, the call goes on as after any stop.
///
/// # Errors
/// [`Stop::Ours`] if it is stopped, but not there; else it is not.
fn end_of_call(
    thread: Pid,
    before: &Registers,
    number: u64,
    args: [u64; 6],
    deadline: Instant,
) -> Result<Registers, Stop> {
    /// Calls that end with EINTR, or short, are worse.
    const BEST: u8 = 2;
    if arch::restart_class(number, args).is_none_or(|class| class > BEST) {
        return Err(Stop::Ours);
    }
    for is_end in [false, true] {
        if is_end && ptrace::interrupt(thread).is_err() {
            return Err(Stop::Gone);
        }
        ptrace::syscall(thread, None).map_err(|_| Stop::Gone)?;
        if let Some(signal) = wait_in_call(thread, (Instant::now() + STOP_DEADLINE).min(deadline))? {
            // It goes to the program first.
            let asked = ptrace::interrupt(thread);
            resume(thread, signal);
            asked.map_err(|_| Stop::Gone)?;
            return Err(wait_for_stop(thread, Instant::now() + STOP_DEADLINE));
        }
    }
    let now = arch::registers(thread).map_err(|_| Stop::Gone)?;
    arch::ended_call(before, &now).ok_or(Stop::Ours)
}

/// Waits until `thread` stops at the beginning or the end of a call; or for another reason, with a signal to pass on or 0.
fn wait_in_call(thread: Pid, deadline: Instant) -> Result<Option<i32>, Stop> {
    let mut news = News::begin();
    loop {
        let mut status = 0;
        // SAFETY: writes one integer.
        let answer = unsafe { libc::waitpid(thread.as_raw(), &raw mut status, libc::__WALL | libc::WNOHANG) };
        if answer == 0 {
            let now = Instant::now();
            if now > deadline {
                return Err(Stop::Late);
            }
            news.wait(now, deadline);
            continue;
        }
        if answer < 0 || !libc::WIFSTOPPED(status) {
            return Err(Stop::Gone);
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        return match event {
            0 if signal & 0x80 != 0 => Ok(None),
            0 => Ok(Some(signal)),
            libc::PTRACE_EVENT_STOP if signal != libc::SIGTRAP => Err(Stop::Group),
            _ => Ok(Some(0)),
        };
    }
}

/// Lets a stopped thread go on, with a signal that it was about to get.
fn resume(tid: Pid, signal: i32) {
    // SAFETY: PTRACE_CONT has no pointer arguments.
    unsafe { libc::ptrace(libc::PTRACE_CONT, tid.as_raw(), 0_usize, signal as usize) };
}

/// How a stop is waited for: by asking again and again at first, for a thread that has a processor stops sooner than we would
/// fall asleep, then asleep.
struct News {
    begun: Instant,
    told: bool,
}

impl News {
    fn begin() -> Self {
        Self {
            begun: Instant::now(),
            told: false,
        }
    }

    /// After a look that has found nothing: returns when it is time for the next.
    fn wait(&mut self, now: Instant, deadline: Instant) {
        if now - self.begun <= SPIN {
            return;
        }
        if self.told {
            wait_for_child_signal(deadline.saturating_duration_since(now));
        } else {
            // Then a look once more: it may have stopped before this.
            tell_us_of_stops(true);
            self.told = true;
        }
    }
}

/// Whether the kernel sends us SIGCHLD when a thread has stopped: the thread has to do that, and is held up by it. Of a child's
/// own process only.
fn tell_us_of_stops(wanted: bool) {
    // SAFETY: `sigaction` is plain data: no handler, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_flags = if wanted { 0 } else { libc::SA_NOCLDSTOP };
    // SAFETY: reads one struct.
    unsafe { libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut()) };
}

/// Sleeps until a tracee has news, for which the kernel sends us SIGCHLD, or for `longest`. All signals are blocked here,
/// so that none is lost between looking and sleeping.
fn wait_for_child_signal(longest: Duration) {
    let timeout = libc::timespec {
        tv_sec: longest.as_secs() as i64,
        tv_nsec: i64::from(longest.subsec_nanos()),
    };
    // SAFETY: `sigset_t` is plain data, and is initialised by sigemptyset.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes to the local set.
    unsafe { libc::sigemptyset(&raw mut set) };
    // SAFETY: as above.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
    // SAFETY: reads the local set and time; no information is asked for.
    unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const timeout) };
}

/// The signals that a stopped thread blocks.
fn signal_mask(tid: Pid) -> Option<u64> {
    const PTRACE_GETSIGMASK: PtraceRequest = 0x420a;
    let mut blocked = 0_u64;
    // SAFETY: writes eight bytes at the given address (ptrace(2), PTRACE_GETSIGMASK).
    let answer = unsafe { libc::ptrace(PTRACE_GETSIGMASK, tid.as_raw(), 8_usize, &raw mut blocked) };
    (answer >= 0).then_some(blocked)
}

/// True if the kernel sends the thread's system calls to a handler in the program: a stub's would end there.
fn dispatches_calls(tid: Pid) -> bool {
    const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: PtraceRequest = 0x4211;
    let mut config = [0_u64; 4];
    let size = size_of_val(&config);
    // SAFETY: writes `size` bytes to the local array (linux/ptrace.h, struct ptrace_sud_config). Kernels before 6.4 say no.
    let answer = unsafe {
        libc::ptrace(
            PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG,
            tid.as_raw(),
            size,
            &raw mut config,
        )
    };
    answer >= 0 && config.first().is_some_and(|&mode| mode != 0)
}

/// True if a signal waits for the thread or its process that it does not block (bit n - 1 of `blocked` for signal n):
/// resuming it now would run the handler without the EINTR that the program may count on.
fn signal_pending(tid: Pid, blocked: u64) -> bool {
    const PTRACE_PEEKSIGINFO: PtraceRequest = 0x4209;
    #[repr(C)]
    struct Peek {
        offset: u64,
        flags: u32,
        count: i32,
    }
    const MOST: usize = 16;
    for flags in [0, 1] {
        let peek = Peek {
            offset: 0,
            flags,
            count: MOST as i32,
        };
        // SAFETY: `siginfo_t` is plain data.
        let mut found: [libc::siginfo_t; MOST] = unsafe { std::mem::zeroed() };
        // SAFETY: writes at most `count` elements at the given address (ptrace(2), PTRACE_PEEKSIGINFO).
        let n = unsafe { libc::ptrace(PTRACE_PEEKSIGINFO, tid.as_raw(), &raw const peek, found.as_mut_ptr()) };
        let Ok(n) = usize::try_from(n) else { return true };
        if found
            .iter()
            .take(n)
            .any(|info| (1..=64).contains(&info.si_signo) && blocked >> (info.si_signo - 1) & 1 == 0)
        {
            return true;
        }
    }
    false
}

/// Writes to the target, also where it may not write itself; the errno if not all could be written.
fn write_memory(memory: RawFd, at: u64, bytes: &[u8]) -> Result<(), i32> {
    // SAFETY: reads `bytes.len()` bytes of a slice.
    let written = unsafe { libc::pwrite(memory, bytes.as_ptr().cast(), bytes.len(), at as i64) };
    if written == bytes.len() as isize {
        Ok(())
    } else {
        Err(nix::errno::Errno::last_raw())
    }
}

/// True if the `len` bytes for a stub at `at` are all zero: nobody's stub is there, and it is what it was taken for.
fn is_zero(memory: RawFd, at: u64, len: usize) -> bool {
    let mut bytes = [1_u8; arch::LONGEST_STUB];
    let Some(bytes) = bytes.get_mut(..len) else {
        return false;
    };
    // SAFETY: reads into the local array.
    let read = unsafe { libc::pread(memory, bytes.as_mut_ptr().cast(), bytes.len(), at as i64) };
    read == bytes.len() as isize && bytes.iter().all(|&byte| byte == 0)
}

/// Copies the stack of thread `tid` from `sp` up, as far as it is mapped and `into` reaches; the number of bytes. Makes one
/// system call.
pub(crate) fn read_stack(tid: i32, sp: u64, into: &mut [u8]) -> usize {
    const PAGE: usize = 4096;
    const MOST: usize = 32;
    let empty = libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    };
    // A piece a page: the kernel copies whole pieces only.
    let mut pieces = [empty; MOST];
    let (mut at, mut left, mut count) = (sp as usize, into.len(), 0);
    for piece in &mut pieces {
        let len = (PAGE - at % PAGE).min(left);
        *piece = libc::iovec {
            iov_base: at as *mut libc::c_void,
            iov_len: len,
        };
        (at, left, count) = (at.wrapping_add(len), left - len, count + 1);
        if left == 0 {
            break;
        }
    }
    let local = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    // SAFETY: writes at most `into.len()` bytes to `into`; remote addresses are only addresses.
    let read = unsafe { libc::process_vm_readv(tid, &raw const local, 1, pieces.as_ptr(), count, 0) };
    usize::try_from(read).unwrap_or(0)
}

/// Writes frames to the target. Has 36 KiB of room for one, cleared before a thread stands still.
struct Frames {
    memory: RawFd,
    xstate: [u8; arch::MAX_XSTATE_BYTES],
    frame: [u8; arch::RETURN_FRAME_BYTES],
}

impl Frames {
    const fn new(memory: RawFd) -> Self {
        Self {
            memory,
            xstate: [0; arch::MAX_XSTATE_BYTES],
            frame: [0; arch::RETURN_FRAME_BYTES],
        }
    }

    /// Writes the frame of [`arch::return_frame`] below the stopped thread's stack pointer, and gives the registers to enter
    /// with. `None` if the thread is not fit for it.
    fn put(
        &mut self,
        thread: Pid,
        regs: &Registers,
        blocked: u64,
        call: Call,
        gadgets: Gadgets,
        stacks: &[Stack],
    ) -> Option<Registers> {
        /// Room for a signal's frame below ours.
        const SPARE: u64 = 16 << 10;
        let back = arch::resumed_by_return(regs)?;
        let mine = stacks
            .iter()
            .find(|stack| (stack.start..stack.end).contains(&arch::stack_pointer(regs)))?;
        if !mine.main && !(mine.start..mine.end).contains(&arch::thread_pointer(regs)) {
            return None;
        }
        let (base, len, enter) = self.make(thread, &back, blocked, call, gadgets)?;
        if !mine.main && base.checked_sub(SPARE)? < mine.start || base < mine.start {
            return None;
        }
        write_memory(self.memory, base, self.frame.get(..len)?).ok()?;
        Some(enter)
    }

    /// Makes it, for a stopped thread that is to go on with the registers `back`: where it begins, its length, and the registers
    /// to enter with.
    fn make(
        &mut self,
        thread: Pid,
        back: &Registers,
        blocked: u64,
        call: Call,
        gadgets: Gadgets,
    ) -> Option<(u64, usize, Registers)> {
        let mut vector = libc::iovec {
            iov_base: self.xstate.as_mut_ptr().cast(),
            iov_len: self.xstate.len(),
        };
        let note = arch::XSTATE_NOTE;
        // SAFETY: writes at most `iov_len` bytes to that array (ptrace(2), PTRACE_GETREGSET).
        let answer = unsafe { libc::ptrace(libc::PTRACE_GETREGSET, thread.as_raw(), note, &raw mut vector) };
        let xstate = self.xstate.get(..vector.iov_len).filter(|_| answer == 0)?;
        arch::return_frame(&mut self.frame, call, gadgets, back, blocked, xstate)
    }
}

/// Makes the stub's page private in the target, if there is one. The state and errno to report if that fails.
fn prepare(memory: RawFd, way: Way<'_>) -> Result<(), (u32, i32)> {
    be_quick();
    match way {
        Way::Stub { at, job } if !is_zero(memory, at, job.room()) => Err((OCCUPIED, 0)),
        Way::Stub { at, job } => write_zeros(memory, at, job).map_err(|errno| (WRITE_FAILED, errno)),
        Way::Return { .. } => Ok(()),
    }
}

/// Writes to a stub's place what is there already.
fn write_zeros(memory: RawFd, at: u64, job: Job) -> Result<(), i32> {
    let zeros = [0; arch::LONGEST_STUB];
    write_memory(memory, at, zeros.get(..job.room()).unwrap_or_default())
}

/// Rehearses until it goes quickly, a few times at most. What comes for the first time after a pause takes two to seven times as
/// long, in the kernel or here; and a processor that has long been idle, to which the thread's is about to become, takes a
/// host of virtual machines 100 µs and more to bring back, until it has been brought back a few times.
fn rehearse(stand_in: &StandIn, tid: Pid, frames: &mut Frames, way: Way<'_>) {
    /// A host that waits a little before it takes an idle processor away waits for 10 µs at first, and each time for twice as long.
    const MOST: u32 = 6;
    const QUICK: Duration = Duration::from_micros(80);
    // Where the thread computes it takes the processor for some microseconds, and must not wait for it.
    be_first(stand_in.pid());
    be_where(stand_in.pid(), tid);
    for _ in 0..MOST {
        let begun = Instant::now();
        if !rehearse_once(stand_in, frames, way) || begun.elapsed() < QUICK {
            return;
        }
    }
}

/// Does to a process of ours what is to be done to a thread of the target. False if that cannot be.
fn rehearse_once(stand_in: &StandIn, frames: &mut Frames, way: Way<'_>) -> bool {
    let thread = stand_in.pid();
    if ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD).is_err() || ptrace::interrupt(thread).is_err() {
        return false;
    }
    let deadline = Instant::now() + REHEARSAL_DEADLINE;
    if !matches!(wait_for_stop_or_starve(thread, deadline, Duration::ZERO), Stop::Ours) {
        // Our exit lets go of it.
        return false;
    }
    let Ok(regs) = arch::registers(thread) else {
        return false;
    };
    std::hint::black_box((dispatches_calls(thread), arch::fit(thread, &regs, None)));
    let blocked = signal_mask(thread).unwrap_or(0);
    std::hint::black_box(signal_pending(thread, blocked));
    let len = match way {
        Way::Stub { at, job } => {
            std::hint::black_box(arch::stub(job, at, &regs, Signals::default()));
            let _ = write_zeros(frames.memory, at, job);
            job.room()
        }
        Way::Return { call, gadgets, .. } => {
            let made = std::hint::black_box(frames.make(thread, &regs, blocked, call, gadgets));
            made.map_or(0, |(_, len, _)| len)
        }
    };
    if let (Some((memory, at)), Some(bytes)) = (stand_in.place(len), frames.frame.get(..len)) {
        let _ = write_memory(memory, at, bytes);
    }
    let set = arch::set_registers(thread, &regs);
    ptrace::detach(thread, None).is_ok() && set.is_ok()
}

/// Brings `stand_in` to the processor on which `tid` sleeps and will wake up, if that is another than ours.
fn be_where(stand_in: Pid, tid: Pid) {
    let Some(Stat {
        state: b'S',
        processor: Some(processor),
    }) = Stat::of(tid)
    else {
        return;
    };
    // SAFETY: no arguments.
    if unsafe { libc::sched_getcpu() } == processor as i32 || processor >= libc::CPU_SETSIZE as usize {
        return;
    }
    // SAFETY: plain data, and an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `processor` is below the number of bits.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: reads the local set. It may not be ours to use; then it stays where it is.
    unsafe { libc::sched_setaffinity(stand_in.as_raw(), size_of_val(&set), &raw const set) };
}

/// Asks for a processor before others while a thread may stand still for us; without the right to, it is no harm. A real-time
/// priority, the highest: a thread that stands still for us must not wait for anybody's real-time threads either, and between
/// two sleeps there are some tens of microseconds of work. Not for children.
fn be_first(who: Pid) {
    let first = libc::sched_param { sched_priority: 99 };
    // SAFETY: reads one struct; changes numbers of a process of ours only.
    unsafe {
        libc::sched_setscheduler(
            who.as_raw(),
            libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK,
            &raw const first,
        )
    };
}

/// Before others, but not before everybody: for more than a few attempts, and where there is no right to [`be_first`].
fn be_quick() {
    let fair = libc::sched_param { sched_priority: 0 };
    // SAFETY: reads one struct; changes numbers of this process only.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, &raw const fair) };
    // SAFETY: changes a number of this process only.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
}

/// Keeps idle processors from going to sleep while the file is open: to wake one takes 10 µs in a virtual machine, as long as
/// nearly all the rest of what a thread stands still for. (The kernel's Documentation/power/pm_qos_interface: a latency of 0.)
/// Whatever becomes of us, it ends with us. Without the right to, it takes a little longer.
fn stay_awake() -> Option<File> {
    use std::io::Write;
    let mut latency = File::options().write(true).open("/dev/cpu_dma_latency").ok()?;
    latency.write_all(&0_i32.to_ne_bytes()).ok()?;
    Some(latency)
}

/// Longest wait for a copy to be seen, from the moment that the thread was sent to make it.
const COPY_DEADLINE: Duration = Duration::from_secs(10);

/// The children that thread `tid` of `pid` has made and that are there. Makes system calls only.
struct Children {
    bytes: [u8; 32 << 10],
    len: usize,
}

impl Children {
    fn of(pid: i32, tid: i32) -> Option<Self> {
        let mut path = [0_u8; 64];
        use std::io::Write;
        write!(&mut path[..], "/proc/{pid}/task/{tid}/children\0").ok()?;
        // SAFETY: `path` is terminated by a zero.
        let fd = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) };
        if fd < 0 {
            return None;
        }
        let mut children = Self {
            bytes: [0; 32 << 10],
            len: 0,
        };
        while let Some(rest) = children.bytes.get_mut(children.len..).filter(|rest| !rest.is_empty()) {
            // SAFETY: writes at most `rest.len()` bytes there.
            let read = unsafe { libc::read(fd, rest.as_mut_ptr().cast(), rest.len()) };
            match usize::try_from(read) {
                Ok(n @ 1..) => children.len += n,
                _ => break,
            }
        }
        // SAFETY: our own descriptor.
        unsafe { libc::close(fd) };
        Some(children)
    }

    fn numbers(&self) -> impl Iterator<Item = i32> {
        let words = self.bytes.get(..self.len).unwrap_or_default();
        words
            .split(|&byte| byte == b' ')
            .filter_map(|word| std::str::from_utf8(word).ok()?.parse().ok())
    }

    /// The last one that is not among those of `before`.
    fn new_since(&self, before: &Self) -> Option<i32> {
        let last = self.numbers().last()?;
        before.numbers().all(|old| old != last).then_some(last)
    }
}

/// Waits until thread `tid` has a child that it had not `before`: the thread is in our stub and makes no other.
fn wait_for_copy(report: &Report, pid: i32, tid: i32, before: &Children, asked: Instant) {
    let pause = libc::timespec {
        tv_sec: 0,
        tv_nsec: 50_000,
    };
    let begun = Instant::now();
    while begun.elapsed() < COPY_DEADLINE {
        let Some(children) = Children::of(pid, tid) else { return };
        if let Some(copy) = children.new_since(before) {
            let paused = asked.elapsed().as_nanos() as u64;
            report.paused_nanos.store(paused, Ordering::Release);
            report.copy.store(copy as u32, Ordering::Release);
            return;
        }
        if begun.elapsed() > STOP_DEADLINE && !is_runnable(Pid::from_raw(tid)) {
            // It waits somewhere: it has been refused the copy, and is through.
            return;
        }
        // SAFETY: reads the local time.
        unsafe { libc::nanosleep(&raw const pause, std::ptr::null_mut()) };
    }
}

/// Attempts to stop a thread that are made with a real-time priority: one is nearly always enough.
const FIRST_ATTEMPTS: u32 = 16;

/// What a tracing child has to do.
struct Task<'a> {
    /// The target.
    pid: i32,
    /// Its threads, in order of preference.
    threads: &'a [i32],
    /// Its memory.
    memory: RawFd,
    way: Way<'a>,
    /// The signals for which it has handlers.
    caught: u64,
    /// A process of ours to rehearse on.
    stand_in: Option<&'a StandIn>,
    /// How long it may take to find a thread.
    patience: Duration,
}

/// The child's work in [`hijack`].
fn redirect(report: &Report, task: &Task<'_>) {
    let &Task {
        pid,
        threads,
        memory,
        way,
        caught,
        stand_in,
        patience,
    } = task;
    let fail = |state: u32, errno: i32, tid: i32| {
        report.errno.store(errno as u32, Ordering::Release);
        report.tid.store(tid as u32, Ordering::Release);
        report.state.store(state, Ordering::Release);
    };
    let deadline = Instant::now() + patience;
    let (mut late, mut unfit) = (false, false);
    let mut frames = Frames::new(memory);
    if let Err((state, errno)) = prepare(memory, way) {
        return fail(state, errno, 0);
    }
    fail(GONE, 0, 0);
    let mut attempts = 0_u32;
    // For the first attempt only, which is nearly always enough; others can take long.
    let mut awake = stay_awake();
    loop {
        for &tid in threads {
            match attempts {
                0 => be_first(Pid::from_raw(0)),
                1 => drop(awake.take()),
                FIRST_ATTEMPTS => be_quick(),
                _ => {}
            }
            tell_us_of_stops(false);
            if let Some(stand_in) = stand_in.filter(|_| attempts == 0) {
                rehearse(stand_in, Pid::from_raw(tid), &mut frames, way);
                tell_us_of_stops(false);
            }
            attempts = attempts.saturating_add(1);
            let thread = Pid::from_raw(tid);
            let makes_copy = matches!(
                way,
                Way::Stub {
                    job: Job::Copy { .. },
                    ..
                }
            );
            let children = makes_copy.then(|| Children::of(pid, tid)).flatten();
            let mut is_asked = false;
            match ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD) {
                Ok(()) => {}
                Err(nix::errno::Errno::ESRCH) => continue,
                // One that we have asked before, and that may have stopped by now. (If it is none of ours, that will show.)
                Err(_) if late => is_asked = true,
                // Also what an exiting thread answers: try the others before believing it.
                Err(errno) => {
                    fail(REFUSED, errno as i32, tid);
                    continue;
                }
            }
            if !is_thread_of(pid, tid) {
                // Another process has this number now. It has not been stopped, and our exit lets go of it.
                continue;
            }
            let asked = Instant::now();
            if !is_asked && ptrace::interrupt(thread).is_err() {
                continue;
            }
            match wait_for_stop(thread, (asked + STOP_DEADLINE).min(deadline)) {
                Stop::Ours => {}
                Stop::Group => {
                    let _ = ptrace::detach(thread, None);
                    return fail(STOPPED, 0, tid);
                }
                Stop::Gone => continue,
                Stop::Late => {
                    // It cannot be detached while it does not stop; our exit does that.
                    late = true;
                    fail(TIMEOUT, 0, tid);
                    if Instant::now() > deadline {
                        return;
                    }
                    continue;
                }
            }
            let stopped = Instant::now();
            let Ok(mut regs) = arch::registers(thread) else {
                continue;
            };
            if arch::is_foreign(&regs) {
                let _ = ptrace::detach(thread, None);
                return fail(THIRTY_TWO, 0, tid);
            }
            if dispatches_calls(thread) {
                let _ = ptrace::detach(thread, None);
                fail(DISPATCHES, 0, tid);
                continue;
            }
            let Some(mut blocked) = signal_mask(thread).filter(|&blocked| !signal_pending(thread, blocked)) else {
                let _ = ptrace::detach(thread, None);
                fail(TIMEOUT, 0, tid);
                continue;
            };
            if let (Way::Stub { .. }, Some((number, args))) = (way, arch::at_call(&regs)) {
                match end_of_call(thread, &regs, number, args, deadline) {
                    Ok(ended) => {
                        regs = ended;
                        // Some calls have a mask of their own.
                        blocked = signal_mask(thread).unwrap_or(0);
                    }
                    Err(stop) => {
                        // Elsewhere meanwhile: it may be better to take later.
                        if matches!(stop, Stop::Ours | Stop::Group) {
                            let _ = ptrace::detach(thread, None);
                        }
                        late |= matches!(stop, Stop::Late);
                        fail(TIMEOUT, 0, tid);
                        continue;
                    }
                }
            }
            let stub = match way {
                Way::Stub { at, .. } => Some(at),
                Way::Return { .. } => None,
            };
            if !arch::fit(thread, &regs, stub) {
                let _ = ptrace::detach(thread, None);
                unfit = true;
                fail(TIMEOUT, 0, tid);
                continue;
            }
            let enter = match way {
                Way::Stub { at, job } => {
                    let signals = Signals { blocked, caught };
                    match arch::stub(job, at, &regs, signals) {
                        Some((bytes, enter)) => {
                            let bytes = bytes.get(..job.room()).unwrap_or_default();
                            write_memory(memory, at, bytes).map(|()| enter)
                        }
                        None => Err(libc::E2BIG),
                    }
                }
                Way::Return {
                    call,
                    gadgets,
                    stacks,
                    spare,
                } => {
                    let spared = spare == Some(tid) && arch::is_restart(&regs);
                    match frames
                        .put(thread, &regs, blocked, call, gadgets, stacks)
                        .filter(|_| !spared)
                    {
                        Some(enter) => Ok(enter),
                        None => {
                            let _ = ptrace::detach(thread, None);
                            unfit = true;
                            fail(TIMEOUT, 0, tid);
                            continue;
                        }
                    }
                }
            };
            let enter = match enter {
                Ok(enter) => enter,
                Err(errno) => {
                    let _ = ptrace::detach(thread, None);
                    return fail(WRITE_FAILED, errno, tid);
                }
            };
            // The commit point.
            if arch::set_registers(thread, &enter).is_err() {
                continue;
            }
            let _ = ptrace::detach(thread, None);
            let end = Instant::now();
            report
                .held_nanos
                .store((end - stopped).as_nanos() as u64, Ordering::Release);
            report
                .disturbed_nanos
                .store((end - asked).as_nanos() as u64, Ordering::Release);
            if let Some(before) = &children {
                be_quick();
                wait_for_copy(report, pid, tid, before, asked);
            }
            return fail(DONE, 0, tid);
        }
        // Signals pending everywhere, or nobody stopped: again, while there is time.
        if report.state.load(Ordering::Acquire) != TIMEOUT || unfit || Instant::now() > deadline {
            return;
        }
        wait_for_child_signal(Duration::from_millis(1));
    }
}

/// What the child found for one thread in [`observe_running`].
pub const OUTSIDE: u32 = 1;
/// It is in the range, or a register points there.
pub const INSIDE: u32 = 2;

/// It has ended.
pub const ENDED: u32 = 3;

/// Looks at each of `threads`, which have been asked to stop, as soon as it has stopped, and lets it go on. False if one
/// does not stop in time.
fn look_at(threads: &[i32], answers: &[AtomicU32], watch: &Watch) -> bool {
    let begun = Instant::now();
    let mut deadline = begun + OBSERVE_DEADLINE;
    loop {
        let mut status = 0;
        // SAFETY: writes one integer.
        let tid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::WNOHANG) };
        if tid < 0 {
            // No tracee is left.
            return true;
        }
        if tid == 0 {
            let now = Instant::now();
            if now > deadline {
                let mut left = threads
                    .iter()
                    .zip(answers)
                    .filter(|(_, a)| a.load(Ordering::Acquire) == 0);
                if now > begun + STARVED_DEADLINE || !left.any(|(&tid, _)| is_runnable(Pid::from_raw(tid))) {
                    return false;
                }
                deadline = now + STOP_DEADLINE;
            }
            wait_for_child_signal(deadline - now);
            continue;
        }
        let thread = Pid::from_raw(tid);
        let stopped = libc::WIFSTOPPED(status);
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        if stopped && event != libc::PTRACE_EVENT_STOP {
            resume(thread, if event == 0 && signal & 0x80 == 0 { signal } else { 0 });
            continue;
        }
        let answer = if stopped {
            let inside = arch::registers(thread).map_or(true, |regs| {
                watch.holds(&regs) || watch.is_interrupted(tid, arch::stack_pointer(&regs))
            });
            let _ = ptrace::detach(thread, None);
            if inside { INSIDE } else { OUTSIDE }
        } else {
            ENDED
        };
        if let Some(place) = threads
            .iter()
            .zip(answers)
            .find_map(|(&of, place)| (of == tid).then_some(place))
        {
            place.store(answer, Ordering::Release);
        }
    }
}

/// Stops each of `threads` for a moment and tells whether it is outside of what is watched: [`OUTSIDE`], [`INSIDE`] (also if it
/// could not be stopped), [`ENDED`], or something else if it was not looked at: the observer may be killed on its way, or
/// has to end because of a thread that does not stop. Only [`OUTSIDE`] and [`ENDED`] are answers to build on.
///
/// # Errors
/// When no child could be made.
pub fn observe_running(threads: &[i32], watch: &Watch) -> Result<Vec<u32>, HijackError> {
    let report = Shared::new()?;
    let threads = threads.get(..MAX_THREADS).unwrap_or(threads);
    in_child(|| {
        be_quick();
        let mut answers = report.observed.get(..threads.len()).unwrap_or_default();
        for some in threads.chunks(OBSERVED_AT_ONCE) {
            let (these, rest) = answers.split_at(some.len());
            answers = rest;
            for (&tid, answer) in some.iter().zip(these) {
                let thread = Pid::from_raw(tid);
                match ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD) {
                    Ok(()) => drop(ptrace::interrupt(thread)),
                    Err(nix::errno::Errno::ESRCH) => answer.store(ENDED, Ordering::Release),
                    Err(_) => answer.store(INSIDE, Ordering::Release),
                }
            }
            if !look_at(some, these, watch) {
                // One does not stop: only our exit lets go of it.
                return;
            }
        }
    })?;
    Ok(threads
        .iter()
        .zip(&report.observed)
        .map(|(_, answer)| answer.load(Ordering::Acquire))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::in_copy;
    use crate::observe::{Doing, doing};
    use std::process::{Command, Stdio};

    /// Who traces `pid`, if anybody does.
    fn tracer_of(pid: i32) -> Option<i32> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:")).unwrap();
        Some(line.trim().parse().unwrap()).filter(|&tracer| tracer != 0)
    }

    #[test]
    fn a_stand_in_that_is_gone_is_no_harm() {
        let way = Way::Stub {
            at: 0,
            job: Job::Unmap { address: 0, len: 0 },
        };
        let stand_in = StandIn::new().unwrap();
        let report = Shared::new().unwrap();
        let rehearsed = || {
            // A process of its own, as where it is really done.
            in_copy(|| {
                let done = rehearse_once(&stand_in, &mut Frames::new(-1), way);
                report.state.store(if done { DONE } else { GONE }, Ordering::Release);
            })
            .unwrap();
            report.state.load(Ordering::Acquire)
        };
        assert_eq!([rehearsed(), rehearsed()], [DONE, DONE]);
        nix::sys::signal::kill(stand_in.pid(), nix::sys::signal::Signal::SIGKILL).unwrap();
        assert_eq!(rehearsed(), GONE);
    }

    #[test]
    fn the_state_is_found_behind_any_name() {
        let numbers = (4..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let stat = Stat::parse(format!("17 (a) R (b) S {numbers}\n").as_bytes()).unwrap();
        assert_eq!((stat.state, stat.processor), (b'S', Some(39)));
        assert_eq!(Stat::parse(b"17 (a) S 1 2").unwrap().processor, None);
        for broken in ["", "17 (a", "17 (a)", "17 (a) "] {
            assert!(Stat::parse(broken.as_bytes()).is_none(), "{broken}");
        }
        let own = Stat::of(nix::unistd::gettid()).unwrap();
        assert_eq!(own.state, b'R');
    }

    #[test]
    fn a_stop_is_told_to_a_tracer_that_sleeps() {
        let mut cat = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = cat.id() as i32;
        let report = Shared::new().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let sleeps = |tracer| {
                    matches!(doing(tracer, tracer), Some(Doing::Call { number, .. })
                        if number == libc::SYS_rt_sigtimedwait as u64)
                };
                while !tracer_of(pid).is_some_and(sleeps) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                nix::sys::signal::kill(Pid::from_raw(pid), nix::sys::signal::Signal::SIGSTOP).unwrap();
            });
            in_copy(|| {
                tell_us_of_stops(false);
                if ptrace::seize(Pid::from_raw(pid), ptrace::Options::empty()).is_ok() {
                    // Would sleep for all of it if nothing woke it up.
                    let stop = wait_for_stop(Pid::from_raw(pid), Instant::now() + Duration::from_secs(24 * 3600));
                    let state = if matches!(stop, Stop::Group) { STOPPED } else { GONE };
                    report.state.store(state, Ordering::Release);
                }
            })
            .unwrap();
        });
        cat.kill().unwrap();
        cat.wait().unwrap();
        assert_eq!(report.state.load(Ordering::Acquire), STOPPED);
    }
}
