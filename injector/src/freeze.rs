//! Holds threads still while their process's memory is read.
//!
//! A child process of ours, in a process group of its own and with all signals blocked, seizes and interrupts every thread that it is
//! not told to spare, tells the parent, and waits for it. It lets go when the parent says so, when the parent dies (its
//! end of the pipe closes), after [`MAX_HOLD`], or when it dies itself (the kernel detaches a dead tracer's threads):
//! nothing is written to the target, so however it ends, the target goes on as if nothing had been. A process that was
//! stopped by a signal stays stopped, and signals that come meanwhile are delivered afterwards.
//!
//! What it refuses to do: stop a thread out of a system call that would notice. Such threads are the caller's to spare
//! ([`unfit`]); they sleep, and whether they slept all the time can be seen from outside.

#![expect(
    unsafe_code,
    reason = "fork, shared memory with the child, a directory read without allocation, and ptrace"
)]

use crate::arch;
use crate::hijack::{self, HijackError, STOP_DEADLINE, Stop};
use crate::observe::Doing;
use nix::sys::ptrace;
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// After this time the child lets go by itself, whatever the parent does.
pub const MAX_HOLD: Duration = Duration::from_secs(2);
/// Threads that one child holds.
const MAX_THREADS: usize = 16_384;
/// So often the list of threads is read again for new ones; each time the old ones stand still already.
const MAX_PASSES: usize = 16;

/// Where a thread was when it was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The system call that it waited in.
    pub call: Option<u64>,
    /// That call's first argument.
    pub first_argument: u64,
    /// The next instruction.
    pub instruction: u64,
    /// What the thread's own data is found by: with glibc and musl, `pthread_self()`.
    pub thread_pointer: u64,
}

/// True for a thread whose system call would end early, or short, if it were stopped: it must be spared.
#[must_use]
pub fn unfit(doing: Doing) -> bool {
    /// The class of [`arch::restart_class`] of calls about which nothing is known.
    const UNKNOWN: u8 = 4;
    match doing {
        Doing::Call { number, args, .. } => arch::restart_class(number, args).is_none_or(|class| class >= UNKNOWN),
        Doing::Blocked { .. } | Doing::Running => false,
    }
}

/// One thread, as the child found it.
#[repr(C)]
struct Slot {
    tid: AtomicI32,
    state: AtomicU32,
    call: AtomicU64,
    first_argument: AtomicU64,
    instruction: AtomicU64,
    thread_pointer: AtomicU64,
}

/// Asked to stop, and not seen to have: it executes nothing of its own before it has.
const ASKED: u32 = 1;
/// Stopped, registers known.
const STOPPED: u32 = 2;
/// Stopped, registers unknown.
const STILL: u32 = 3;
/// It has ended.
const GONE: u32 = 4;

/// What the child tells, in memory shared with it.
#[repr(C)]
struct Table {
    count: AtomicU32,
    errno: AtomicI32,
    /// Set by the child when it lets go; the parent compares.
    released_by_itself: AtomicU32,
    slots: [Slot; MAX_THREADS],
}

/// The table's memory.
struct Shared(*mut Table);

impl Shared {
    fn new() -> io::Result<Self> {
        // SAFETY: a fresh anonymous mapping of the right size; the kernel zeroes it, which is valid for atomics.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Table>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(at.cast()))
    }
}

impl std::ops::Deref for Shared {
    type Target = Table;
    fn deref(&self) -> &Table {
        // SAFETY: mapped in `new`, unmapped in `drop`, all fields are atomics.
        unsafe { &*self.0 }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this size; no reference outlives `self`.
        unsafe { libc::munmap(self.0.cast(), size_of::<Table>()) };
    }
}

/// Threads that stand still until this is released or dropped.
pub struct Frozen {
    table: Shared,
    /// The child lets go when this closes.
    go: Option<OwnedFd>,
    child: Pid,
    since: Instant,
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frozen")
            .field("child", &self.child)
            .finish_non_exhaustive()
    }
}

/// Stops all threads of `pid` except those in `spare`, which must be sorted; new threads too. When it returns, they
/// stand still.
///
/// Threads that could not be seized (somebody else traces them) are not in the result; that is no error.
///
/// # Errors
/// [`HijackError::Refused`] when the kernel let no thread be stopped, [`HijackError::Gone`] when there is none, or
/// [`HijackError::Os`] for a system call of ours.
pub fn freeze(pid: i32, spare: &[i32]) -> Result<Frozen, HijackError> {
    let os = |what| move |source: io::Error| HijackError::Os { what, source };
    let tasks = File::open(format!("/proc/{pid}/task")).map_err(|_| HijackError::Gone { pid })?;
    let table = Shared::new().map_err(os("mmap"))?;
    let (ready, tell) = pipe().map_err(os("pipe2"))?;
    let (wait, go) = pipe().map_err(os("pipe2"))?;
    // SAFETY: the child makes only system calls and touches memory prepared before; it leaves by `_exit`.
    let child = match unsafe { nix::unistd::fork() }.map_err(|errno| os("fork")(errno.into()))? {
        nix::unistd::ForkResult::Child => {
            crate::child::leave_group();
            let _ = nix::sys::signal::SigSet::all().thread_block();
            // The parent's ends: their closing must mean the parent's end.
            close(go.as_raw_fd());
            close(ready.as_raw_fd());
            hold(&table, &tasks, spare, tell.as_raw_fd(), wait.as_raw_fd());
            // SAFETY: ends this process without running anything of the parent's.
            unsafe { libc::_exit(0) }
        }
        nix::unistd::ForkResult::Parent { child } => child,
    };
    drop(tell);
    let mut frozen = Frozen {
        table,
        go: Some(go),
        child,
        since: Instant::now(),
    };
    // One byte when all stand still, none if the child has died.
    let told = File::from(ready).read(&mut [0]);
    frozen.since = Instant::now();
    let tid = pid;
    match (told, frozen.table.errno.load(Ordering::Acquire)) {
        (Ok(1), 0) => Ok(frozen),
        (Ok(1), libc::ESRCH) => Err(HijackError::Gone { pid }),
        (Ok(1), errno) => Err(HijackError::Refused {
            tid,
            source: io::Error::from_raw_os_error(errno),
        }),
        (Ok(_), _) => Err(os("the tracing child")(io::ErrorKind::BrokenPipe.into())),
        (Err(source), _) => Err(os("read")(source)),
    }
}

impl Frozen {
    /// The threads that stand still, with what they did where their registers are known.
    pub fn threads(&self) -> impl Iterator<Item = (i32, Option<At>)> {
        self.table.threads()
    }

    /// Lets go. The time for which the threads stood still, or `None` if that ended before this call: what was read
    /// may be torn.
    #[must_use]
    pub fn release(mut self) -> Option<Duration> {
        let held = self.let_go();
        (self.table.released_by_itself.load(Ordering::Acquire) == 0).then_some(held)
    }

    fn let_go(&mut self) -> Duration {
        if self.go.take().is_some() {
            while nix::sys::wait::waitpid(self.child, Some(nix::sys::wait::WaitPidFlag::__WALL))
                == Err(nix::errno::Errno::EINTR)
            {}
        }
        self.since.elapsed()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl Table {
    fn len(&self) -> usize {
        (self.count.load(Ordering::Acquire) as usize).min(MAX_THREADS)
    }

    fn threads(&self) -> impl Iterator<Item = (i32, Option<At>)> {
        self.slots.iter().take(self.len()).filter_map(|slot| {
            let at = |field: &AtomicU64| field.load(Ordering::Acquire);
            let tid = slot.tid.load(Ordering::Acquire);
            match slot.state.load(Ordering::Acquire) {
                STOPPED => {
                    let call = at(&slot.call);
                    Some((
                        tid,
                        Some(At {
                            call: (call != u64::MAX).then_some(call),
                            first_argument: at(&slot.first_argument),
                            instruction: at(&slot.instruction),
                            thread_pointer: at(&slot.thread_pointer),
                        }),
                    ))
                }
                STILL | ASKED => Some((tid, None)),
                _ => None,
            }
        })
    }

    fn knows(&self, tid: i32) -> bool {
        let slots = self.slots.iter().take(self.len());
        slots
            .map(|slot| slot.tid.load(Ordering::Acquire))
            .any(|known| known == tid)
    }

    /// Adds a thread that was asked to stop; false when there is no room.
    fn add(&self, tid: i32) -> bool {
        let len = self.len();
        let Some(slot) = self.slots.get(len) else {
            return false;
        };
        slot.state.store(ASKED, Ordering::Release);
        slot.tid.store(tid, Ordering::Release);
        self.count.store(len as u32 + 1, Ordering::Release);
        true
    }
}

/// The child's work.
fn hold(table: &Table, tasks: &File, spare: &[i32], tell: RawFd, wait: RawFd) {
    let begun = Instant::now();
    let mut errno = libc::ESRCH;
    for _ in 0..MAX_PASSES {
        let known = table.len();
        each_thread(tasks, |tid| {
            if spare.binary_search(&tid).is_ok() || table.knows(tid) {
                return;
            }
            match seize(Pid::from_raw(tid)) {
                Ok(()) if table.add(tid) => {}
                Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
                Err(why) => errno = why as i32,
            }
        });
        if table.len() == known {
            break;
        }
        let deadline = Instant::now() + STOP_DEADLINE;
        table
            .slots
            .iter()
            .take(table.len())
            .skip(known)
            .for_each(|slot| wait_for(slot, deadline));
    }
    // Nothing to hold is fine if there was nothing that should have been held.
    let failed = table.len() == 0 && errno != libc::ESRCH;
    table.errno.store(if failed { errno } else { 0 }, Ordering::Release);
    write_byte(tell);
    let mut poll = libc::pollfd {
        fd: wait,
        events: libc::POLLIN,
        revents: 0,
    };
    let left = MAX_HOLD.saturating_sub(begun.elapsed()).as_millis() as libc::c_int;
    // SAFETY: one descriptor in the local structure. All signals are blocked, so it cannot fail with EINTR.
    if unsafe { libc::poll(&raw mut poll, 1, left) } == 0 {
        table.released_by_itself.store(1, Ordering::Release);
    }
    for slot in table.slots.iter().take(table.len()) {
        if matches!(slot.state.load(Ordering::Acquire), STOPPED | STILL) {
            let _ = ptrace::detach(Pid::from_raw(slot.tid.load(Ordering::Acquire)), None);
        }
    }
    // Threads that have not stopped yet are let go by our exit.
}

fn seize(thread: Pid) -> nix::Result<()> {
    ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD)?;
    ptrace::interrupt(thread)
}

fn wait_for(slot: &Slot, deadline: Instant) {
    let thread = Pid::from_raw(slot.tid.load(Ordering::Acquire));
    // One that is starved of a processor executes nothing of its own either, so nobody else need be held for it.
    let state = match hijack::wait_for_stop_or_starve(thread, deadline, Duration::ZERO) {
        Stop::Ours | Stop::Group => match arch::registers(thread) {
            Ok(regs) => {
                let at = arch::doing(&regs);
                slot.call.store(at.call.unwrap_or(u64::MAX), Ordering::Release);
                slot.first_argument.store(at.first_argument, Ordering::Release);
                slot.instruction.store(at.instruction, Ordering::Release);
                slot.thread_pointer.store(at.thread_pointer, Ordering::Release);
                STOPPED
            }
            Err(_) => STILL,
        },
        Stop::Gone => GONE,
        Stop::Late => ASKED,
    };
    slot.state.store(state, Ordering::Release);
}

/// Calls `visit` with each thread in the directory `/proc/PID/task`. Does not allocate.
fn each_thread(tasks: &File, mut visit: impl FnMut(i32)) {
    /// `struct linux_dirent64`: inode 8, offset 8, length 2, type 1, then the name.
    const LENGTH_AT: usize = 16;
    const NAME_AT: usize = 19;
    let fd = tasks.as_raw_fd();
    // SAFETY: no pointers.
    unsafe { libc::lseek(fd, 0, libc::SEEK_SET) };
    let mut buffer = [0_u8; 8192];
    loop {
        // SAFETY: writes at most `buffer.len()` bytes to the local buffer.
        let read = unsafe { libc::syscall(libc::SYS_getdents64, fd, buffer.as_mut_ptr(), buffer.len()) };
        let Some(mut entries) = usize::try_from(read).ok().and_then(|read| buffer.get(..read)) else {
            return;
        };
        if entries.is_empty() {
            return;
        }
        while let Some(&length) = entries.get(LENGTH_AT..).and_then(|rest| rest.first_chunk::<2>()) {
            let length = usize::from(u16::from_ne_bytes(length)).max(NAME_AT);
            if let Some(tid) = entries.get(NAME_AT..length).and_then(number) {
                visit(tid);
            }
            entries = entries.get(length..).unwrap_or_default();
        }
    }
}

/// The number that a zero-terminated name is; `None` for `.` and `..`.
fn number(name: &[u8]) -> Option<i32> {
    let digits = name.iter().take_while(|byte| **byte != 0);
    let mut value = None;
    for byte in digits {
        let digit = i32::from(byte.checked_sub(b'0').filter(|digit| *digit < 10)?);
        value = Some(value.unwrap_or(0_i32).checked_mul(10)?.checked_add(digit)?);
    }
    value
}

fn write_byte(fd: RawFd) {
    // SAFETY: reads one byte of a constant.
    unsafe { libc::write(fd, [1_u8].as_ptr().cast(), 1) };
}

fn close(fd: RawFd) {
    // SAFETY: in the child, which never uses it again and leaves without dropping its owner.
    unsafe { libc::close(fd) };
}

/// Read end, write end.
fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: writes two descriptors to the local array.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let [read, write] = ends;
    // SAFETY: a fresh descriptor that nobody else owns.
    let read = unsafe { OwnedFd::from_raw_fd(read) };
    // SAFETY: as above.
    let write = unsafe { OwnedFd::from_raw_fd(write) };
    Ok((read, write))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    struct Sleeper(Child);
    impl Sleeper {
        fn pid(&self) -> i32 {
            self.0.id() as i32
        }
        fn state(&self) -> char {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
            stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
        }
    }
    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// `cat` that waits for its input: blocked in `read`.
    fn sleeper() -> Sleeper {
        let child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let sleeper = Sleeper(child);
        while !matches!(
            crate::observe::doing(sleeper.pid(), sleeper.pid()),
            Some(Doing::Call { number: 0, .. })
        ) {
            std::thread::sleep(Duration::from_millis(1));
        }
        sleeper
    }

    #[test]
    fn a_thread_stands_still_until_it_is_released() {
        let sleeper = sleeper();
        let frozen = freeze(sleeper.pid(), &[]).unwrap();
        let threads: Vec<_> = frozen.threads().collect();
        let [(tid, Some(at))] = threads.as_slice() else {
            panic!("{threads:?}")
        };
        assert_eq!((*tid, at.call, at.first_argument), (sleeper.pid(), Some(0), 0));
        assert_eq!(sleeper.state(), 't');
        assert!(frozen.release().is_some());
        assert_ne!(sleeper.state(), 't');
    }

    #[test]
    fn spared_threads_are_left_alone() {
        let sleeper = sleeper();
        let frozen = freeze(sleeper.pid(), &[sleeper.pid()]).unwrap();
        assert_eq!(frozen.threads().count(), 0);
        assert_eq!(sleeper.state(), 'S');
    }

    #[test]
    fn a_stopped_process_stays_stopped() {
        let sleeper = sleeper();
        nix::sys::signal::kill(Pid::from_raw(sleeper.pid()), nix::sys::signal::SIGSTOP).unwrap();
        while sleeper.state() != 'T' {
            std::thread::sleep(Duration::from_millis(1));
        }
        let frozen = freeze(sleeper.pid(), &[]).unwrap();
        assert_eq!(frozen.threads().count(), 1);
        assert!(frozen.release().is_some());
        // The kernel traps the thread once more on its way back into the stop.
        while sleeper.state() != 'T' {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_numbers_in_a_directory_are_the_threads() {
        let tasks = File::open("/proc/self/task").unwrap();
        let mut found = Vec::new();
        each_thread(&tasks, |tid| found.push(tid));
        assert!(found.contains(&nix::unistd::gettid().as_raw()), "{found:?}");
        assert_eq!(number(b"12a\0"), None);
        assert_eq!(number(b"99999999999\0"), None);
    }

    #[test]
    fn nothing_that_notices_is_stopped() {
        let call = |number, args| Doing::Call {
            number,
            args,
            sp: 0,
            pc: 0,
        };
        assert!(!unfit(Doing::Running));
        assert!(!unfit(call(202, [0; 6])), "futex");
        assert!(unfit(call(1, [0; 6])), "write");
        assert!(unfit(call(232, [3, 0, 0, 1000, 0, 0])), "epoll_wait with a timeout");
    }
}
