//! The short-lived processes that do what needs the right to trace, and one to rehearse on.

#![expect(
    unsafe_code,
    reason = "clone, fork, and the stacks of processes that share our memory"
)]

use crate::hijack::HijackError;
use nix::sys::signal::SigSet;
use nix::sys::wait::WaitPidFlag;
use nix::unistd::Pid;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

/// Makes this process a group of its own, which a terminal's signals and a `kill` of our group do not reach. No session of its
/// own: where the kernel shares processors among sessions (autogroup), a new one was seen to get none for tens of seconds on
/// a busy machine, while a thread of the target may stand still for it.
pub(crate) fn leave_group() {
    let own = Pid::from_raw(0);
    let _ = nix::unistd::setpgid(own, own);
}

/// What failed when there can be no more processes.
pub(crate) const CLONE: &str =
    "making a process that traces (is the limit of processes reached: ulimit -u, pids.max of the cgroup?)";

fn os_error(what: &'static str) -> impl FnOnce(nix::Error) -> HijackError {
    move |errno| HijackError::Os {
        what,
        source: errno.into(),
    }
}

/// Runs `work` in a child process that may trace and that nothing can interrupt, and waits for it.
///
/// The child shares our memory, and the calling thread stands still in the kernel until it has ended (`vfork`): to copy the page
/// tables of a pyheap that records dozens of processes takes longer than all the rest, and the child would wait for a page at each
/// of its writes while a thread of the target waits for it. `work` runs beside our other threads and may be killed at any place:
/// it must not allocate, lock or panic, nor own anything.
pub(crate) fn in_child<W: FnOnce()>(work: W) -> Result<(), HijackError> {
    extern "C" fn child<W: FnOnce()>(work: *mut libc::c_void) -> libc::c_int {
        leave_group();
        // SAFETY: points to the `Option` of the caller below, which waits in the kernel and does not touch it.
        if let Some(work) = unsafe { &mut *work.cast::<Option<W>>() }.take() {
            work();
        }
        0
    }
    let stack = ChildStack::new(TRACER_STACK)?;
    let mut work = Some(work);
    let made = without_signals(|| {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the child makes only system calls on a stack of its own and touches memory prepared before, and ends by
        // returning from `child`; stack and `work` outlive it, as CLONE_VFORK says (clone(2)) and the wait below.
        unsafe { libc::clone(child::<W>, stack.top(), flags, (&raw mut work).cast()) }
    })?;
    wait_for_end(made)
}

/// Makes a child with all signals blocked: no handler of ours runs in it.
fn without_signals(make: impl FnOnce() -> libc::c_int) -> Result<Pid, HijackError> {
    let mask = SigSet::all()
        .thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)
        .map_err(os_error("sigprocmask"))?;
    let made = make();
    let failed = nix::errno::Errno::last();
    let _ = mask.thread_set_mask();
    if made < 0 {
        return Err(os_error(CLONE)(failed));
    }
    Ok(Pid::from_raw(made))
}

/// A process of ours that does nothing, for a tracer to rehearse on. It ends with this, or with the thread that has made it.
#[derive(Debug)]
pub(crate) struct StandIn {
    pid: Pid,
    memory: Option<File>,
    stack: ChildStack,
}

impl StandIn {
    /// Bytes of its stack: a page that cannot be accessed, and more than a system call takes.
    const STACK: usize = 32 << 10;

    /// `None` if there can be none: then there is no rehearsal.
    pub(crate) fn new() -> Option<Self> {
        /// It shares our memory, so it owns nothing, and its thread's `errno` is ours: it makes no call that fails.
        extern "C" fn stand_by(maker: *mut libc::c_void) -> libc::c_int {
            // SAFETY: changes what this process is sent when its maker ends.
            unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            // SAFETY: the name is terminated by a zero.
            unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_NAME, c"pyheap-stand-in".as_ptr(), 0, 0, 0) };
            // SAFETY: no arguments.
            while unsafe { libc::syscall(libc::SYS_getppid) } == maker.addr() as i64 {
                // Until a signal that can be handled, and all of them are blocked.
                // SAFETY: no descriptors, no timeout, no mask.
                unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0) };
            }
            0
        }
        let stack = ChildStack::new(Self::STACK).ok()?;
        let maker = std::ptr::without_provenance_mut(std::process::id() as usize);
        // No signal tells of its end, so no handler of the program's sees it.
        let flags = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES;
        // SAFETY: the child makes only system calls, none of which writes to our memory, on a stack that outlives it: see `drop`.
        let pid = without_signals(|| unsafe { libc::clone(stand_by, stack.top(), flags, maker) }).ok()?;
        // Its memory is ours, and ours is open to us also where another's is not.
        let memory = File::options().write(true).open("/proc/self/mem").ok();
        Some(Self { pid, memory, stack })
    }

    /// Its number.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Its memory, for writing, and a place in it for `len` bytes that nobody uses.
    pub(crate) fn place(&self, len: usize) -> Option<(RawFd, u64)> {
        // Above the page that cannot be accessed, a page away from what it uses.
        let fits = len <= Self::STACK - 2 * ChildStack::PAGE;
        let memory = self.memory.as_ref().filter(|_| fits)?;
        Some((memory.as_raw_fd(), (self.stack.at.addr() + ChildStack::PAGE) as u64))
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(self.pid, nix::sys::signal::Signal::SIGKILL);
        let _ = wait_for_end(self.pid);
    }
}

/// Runs `work` in a child process with a copy of our memory, and waits for it: for what the kernel might kill us for.
///
/// `work` runs between fork and exit of a process that may have other threads: it must not allocate, lock or panic.
pub(crate) fn in_copy(work: impl FnOnce()) -> Result<(), HijackError> {
    // SAFETY: the child makes only system calls and touches memory prepared before; it leaves by `_exit`.
    match unsafe { nix::unistd::fork() }.map_err(os_error(CLONE))? {
        nix::unistd::ForkResult::Child => {
            leave_group();
            let _ = SigSet::all().thread_block();
            work();
            // SAFETY: ends this process without running anything of the parent's.
            unsafe { libc::_exit(0) }
        }
        nix::unistd::ForkResult::Parent { child } => wait_for_end(child),
    }
}

/// Waits for the end of a child.
fn wait_for_end(child: Pid) -> Result<(), HijackError> {
    loop {
        match nix::sys::wait::waitpid(child, Some(WaitPidFlag::__WALL)) {
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(os_error("waitpid")(errno)),
            Ok(_) => return Ok(()),
        }
    }
}

/// The stack of a child that shares our memory; its lowest page is not accessible.
#[derive(Debug)]
struct ChildStack {
    at: *mut libc::c_void,
    len: usize,
}

/// Bytes of stack for who traces: the deepest call takes some 50 KiB, three times that without optimisation.
const TRACER_STACK: usize = 256 << 10;

impl ChildStack {
    const PAGE: usize = 4096;

    fn new(len: usize) -> Result<Self, HijackError> {
        let os = |what| HijackError::Os {
            what,
            source: std::io::Error::last_os_error(),
        };
        // In memory from the start: a thread that stands still would wait for each page that is touched first.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK | libc::MAP_POPULATE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh anonymous mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(os("mmap"));
        }
        let stack = Self { at, len };
        // SAFETY: the lowest page of that mapping, which nothing uses.
        match unsafe { libc::mprotect(at, Self::PAGE, libc::PROT_NONE) } {
            0 => Ok(stack),
            _ => Err(os("mprotect")),
        }
    }

    /// Its end, where it begins to be used: aligned to a page.
    fn top(&self) -> *mut libc::c_void {
        self.at.wrapping_byte_add(self.len)
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this size; who ran on it has ended.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hijack::Shared;
    use nix::sys::signal::kill;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_stand_in_ends_with_its_owner() {
        let stand_in = StandIn::new().unwrap();
        let pid = stand_in.pid();
        assert_eq!(kill(pid, None), Ok(()));
        drop(stand_in);
        assert_eq!(kill(pid, None), Err(nix::errno::Errno::ESRCH));
    }

    #[test]
    fn a_stand_in_ends_with_its_maker() {
        let report = Shared::new().unwrap();
        in_copy(|| {
            if let Some(stand_in) = StandIn::new() {
                report.count.store(stand_in.pid().as_raw() as u32, Ordering::Release);
                std::mem::forget(stand_in);
            }
        })
        .unwrap();
        let pid = report.count.load(Ordering::Acquire);
        assert_ne!(pid, 0);
        let is_there = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
        };
        while is_there() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
