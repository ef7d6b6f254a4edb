//! May pyheap attach to this process, and can it? All questions are asked before anything is stopped or written.
//!
//! The order is that of the answers a user understands best: is it there, is it alive, may we, is somebody else at it,
//! is it a Python that we know, is it ready. Each [`Refusal`] is one line with what is the matter and, where there is
//! one, the remedy, and belongs to a class of exit codes.
//!
//! A yes is a snapshot: the process may change a moment later, and attaching checks again what must hold.

use super::find_error::FindError;
use super::interpreter::{self, Interpreter, Phase};
use super::process::{self, Facts};
use procfs::ProcError;
use procfs::process::{MMPermissions, Process};
use pyheap_injector::observe::reachable;
use pyheap_injector::seccomp::{self, Forbidden};
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory};

/// The bit of `CAP_SYS_PTRACE` in `CapEff`.
const CAP_SYS_PTRACE: u32 = 19;

/// A process that pyheap can attach to.
#[derive(Debug, Clone)]
pub struct Target {
    /// What `/proc` says of it.
    pub facts: Facts,
    /// Its Python.
    pub interpreter: Interpreter,
}

/// Why pyheap cannot attach. One line each.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// There is no such process.
    #[error("no process has pid {pid}")]
    NoSuchProcess {
        /// The number.
        pid: i32,
    },
    /// The number belongs to a thread.
    #[error("{tid} is a thread of process {pid}: use {pid}")]
    Thread {
        /// The number.
        tid: i32,
        /// The thread's process.
        pid: i32,
    },
    /// It has ended, or is about to.
    #[error("process {pid} ({name}) has already ended{}", if *.state == 'Z' { " and waits for its parent (a zombie)" } else { "" })]
    Ended {
        /// The process.
        pid: i32,
        /// Its name.
        name: String,
        /// Its state.
        state: char,
    },
    /// It is part of the kernel.
    #[error("{pid} ({name}) is a thread of the kernel, not a program")]
    KernelThread {
        /// The process.
        pid: i32,
        /// Its name.
        name: String,
    },
    /// The kernel does not let us.
    #[error("not permitted to look into process {pid}: {reason}")]
    NotPermitted {
        /// The process.
        pid: i32,
        /// Why, as far as can be told, and the remedy.
        reason: NoPermission,
    },
    /// A debugger is at it.
    #[error("{tracer} (pid {tracer_pid}) is tracing process {pid}: quit it or detach there first")]
    Traced {
        /// The process.
        pid: i32,
        /// The tracer's name.
        tracer: String,
        /// The tracer's pid.
        tracer_pid: i32,
    },
    /// There is no Python that we can profile.
    #[error(transparent)]
    Python(#[from] FindError),
    /// The interpreter is about to end.
    #[error("the Python in process {pid} is shutting down")]
    Finalizing {
        /// The process.
        pid: i32,
    },
    /// It is stopped by a signal.
    #[error("process {pid} is stopped (by SIGSTOP or Ctrl-Z): let it run with `kill -CONT {pid}` first")]
    Stopped {
        /// The process.
        pid: i32,
    },
    /// Its seccomp filter would not let the hooks in.
    #[error("pyheap cannot enter process {pid}: {why}")]
    Seccomp {
        /// The process.
        pid: i32,
        /// What it forbids.
        why: Forbidden,
    },
    /// There is no code for this processor.
    #[error(
        "pyheap cannot enter processes on this kind of processor, only on x86-64: `pyheap dump {pid}` and all that reads works"
    )]
    Processor {
        /// The process.
        pid: i32,
    },
    /// The processor checks its return addresses.
    #[error(
        "process {pid} has a shadow stack, which pyheap does not support yet: start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"
    )]
    ShadowStack {
        /// The process.
        pid: i32,
    },
    /// `RLIMIT_AS` leaves no room.
    #[error(
        "process {pid} may map {left} more bytes of address space (RLIMIT_AS, ulimit -v), and pyheap needs {needed} of them: raise it with `prlimit --pid {pid} --as=unlimited`"
    )]
    NoAddressSpace {
        /// The process.
        pid: i32,
        /// What is left, in bytes.
        left: u64,
        /// What is needed, in bytes.
        needed: u64,
    },
    /// `/proc` could not be read.
    #[error("cannot read /proc/{pid}")]
    Proc {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: ProcError,
    },
}

/// Why the kernel does not permit it, as far as can be told from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoPermission {
    /// It runs as somebody else.
    #[error("it runs as user {owner}: run pyheap as that user or with sudo")]
    OtherUser {
        /// The user id.
        owner: u32,
    },
    /// `kernel.yama.ptrace_scope` is 1.
    #[error(
        "the kernel lets only parents trace (kernel.yama.ptrace_scope is 1): run pyheap with sudo, or `sysctl -w kernel.yama.ptrace_scope=0`"
    )]
    YamaParents,
    /// `kernel.yama.ptrace_scope` is 2.
    #[error("the kernel lets only CAP_SYS_PTRACE trace (kernel.yama.ptrace_scope is 2): run pyheap with sudo")]
    YamaAdministrators,
    /// `kernel.yama.ptrace_scope` is 3.
    #[error("the kernel forbids tracing until the next boot (kernel.yama.ptrace_scope is 3)")]
    YamaNobody,
    /// It has forbidden to be looked into, or has changed its user.
    #[error(
        "it is not dumpable (it has changed its user or asked for that with prctl): run pyheap with sudo, in a container with --cap-add=SYS_PTRACE"
    )]
    NotDumpable,
    /// It may do what pyheap may not.
    #[error("it has capabilities that pyheap lacks: run pyheap with sudo, in a container with --cap-add=SYS_PTRACE")]
    Capabilities,
    /// It is in a user namespace that is none of ours.
    #[error("it is in a user namespace in which pyheap has no rights: run pyheap as root on the host")]
    UserNamespace,
    /// We may trace it, but not open its memory for writing: the file is its owner's.
    #[error(
        "its memory is a file of user {owner}, which pyheap may not open without CAP_DAC_OVERRIDE: run pyheap as that user, or in a container with --cap-add=DAC_OVERRIDE beside --cap-add=SYS_PTRACE"
    )]
    MemoryFile {
        /// The user id.
        owner: u32,
    },
    /// Something else.
    #[error(
        "it has privileges that pyheap lacks, or a security profile forbids it: run pyheap with sudo, in a container with --cap-add=SYS_PTRACE"
    )]
    Privileges,
}

impl Refusal {
    /// The exit code of `pyheap` for this refusal: 3 no such process, 4 not permitted, 5 not a Python that is
    /// supported, 6 somebody else is at it, 7 anything else. (0 is success, 1 an internal error, 2 wrong usage or
    /// nothing found.)
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoSuchProcess { .. } | Self::Thread { .. } | Self::Ended { .. } => 3,
            Self::NotPermitted { .. } => 4,
            Self::KernelThread { .. } => 5,
            Self::Traced { .. } => 6,
            Self::Finalizing { .. }
            | Self::Stopped { .. }
            | Self::Seccomp { .. }
            | Self::ShadowStack { .. }
            | Self::Processor { .. }
            | Self::NoAddressSpace { .. }
            | Self::Proc { .. } => 7,
            Self::Python(error) => match error {
                FindError::NotInitialised { .. } | FindError::Memory { .. } | FindError::Maps { .. } => 7,
                _ => 5,
            },
        }
    }
}

/// Looks at process `pid` and says whether pyheap can attach to it. Nothing is written, and nothing is stopped, except
/// where seccomp filters have to be read: the kernel shows those of a stopped thread only.
///
/// # Errors
/// With the first reason why not.
pub fn check(pid: i32) -> Result<Target, Refusal> {
    let target = survey(pid)?;
    seccomp::check_kinds(pid, &target.facts.kinds, seccomp::Purpose::Infect)
        .map_err(|why| Refusal::Seccomp { pid, why })?;
    Ok(target)
}

/// As [`check`], for a copy of the process ([`super::frozen`]) rather than for hooks: what that needs of the kernel is another
/// thing.
///
/// # Errors
/// With the first reason why not.
pub fn check_for_copy(pid: i32) -> Result<Target, Refusal> {
    let target = look(pid)?;
    for check in [processor, not_stopped, no_shadow_stack] {
        check(&target.facts)?;
    }
    seccomp::check_kinds(pid, &target.facts.kinds, seccomp::Purpose::Copy)
        .map_err(|why| Refusal::Seccomp { pid, why })?;
    Ok(target)
}

/// As [`check`], but for seccomp's filters: touches nothing at all.
///
/// # Errors
/// With the first reason why not.
pub fn survey(pid: i32) -> Result<Target, Refusal> {
    let target = look(pid)?;
    for check in STATE_CHECKS {
        check(&target.facts)?;
    }
    Ok(target)
}

/// What must hold of a Python that runs, besides its interpreter, and can be seen from outside. `pyheap doctor` asks the same.
pub(super) const STATE_CHECKS: [Check; 4] = [processor, not_stopped, no_shadow_stack, address_space];

type Check = fn(&Facts) -> Result<(), Refusal>;

fn processor(facts: &Facts) -> Result<(), Refusal> {
    let pid = facts.id.pid;
    pyheap_injector::arch::CAN_ENTER
        .then_some(())
        .ok_or(Refusal::Processor { pid })
}

fn not_stopped(facts: &Facts) -> Result<(), Refusal> {
    let pid = facts.id.pid;
    (facts.state != 'T').then_some(()).ok_or(Refusal::Stopped { pid })
}

fn no_shadow_stack(facts: &Facts) -> Result<(), Refusal> {
    let pid = facts.id.pid;
    let has_one = facts.kinds.iter().any(|kind| kind.shadow_stack);
    (!has_one).then_some(()).ok_or(Refusal::ShadowStack { pid })
}

/// Refuses where `RLIMIT_AS` has no room for the hooks.
fn address_space(facts: &Facts) -> Result<(), Refusal> {
    let pid = facts.id.pid;
    use procfs::process::LimitValue;
    let tid = reachable(pid);
    let Ok(process) = Process::new(tid) else { return Ok(()) };
    let needed = super::session::region_bytes();
    let limit = process.limits().map(|limits| limits.max_address_space.soft_limit);
    let used = process
        .statm()
        .map(|statm| statm.size.saturating_mul(procfs::page_size()));
    match (limit, used) {
        (Ok(LimitValue::Value(limit)), Ok(used)) if limit.saturating_sub(used) < needed => {
            Err(Refusal::NoAddressSpace {
                pid,
                left: limit.saturating_sub(used),
                needed,
            })
        }
        _ => Ok(()),
    }
}

/// As [`check`], but without the questions for which a thread would have to be stopped: for lists of processes.
///
/// # Errors
/// With the first reason why not.
pub fn look(pid: i32) -> Result<Target, Refusal> {
    check_for(pid, Purpose::Attach)
}

/// Looks at process `pid` and says whether its memory can be read and understood: also while somebody else traces it,
/// while it is stopped, and while its Python shuts down.
///
/// # Errors
/// With the first reason why not.
pub fn check_readable(pid: i32) -> Result<Target, Refusal> {
    check_for(pid, Purpose::Read)
}

/// What for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Attach,
    Read,
}

fn check_for(pid: i32, purpose: Purpose) -> Result<Target, Refusal> {
    // Whatever could not be read of a process that has ended meanwhile: that it has ended is the reason.
    examine(pid, purpose).map_err(|refusal| ended(pid).unwrap_or(refusal))
}

/// That a process is not there, or not any more.
fn ended(pid: i32) -> Option<Refusal> {
    match Facts::of(pid) {
        Ok(facts) if facts.is_gone() && facts.thread_group == pid && reachable(pid) == pid => Some(Refusal::Ended {
            pid,
            name: facts.printable_name(),
            state: facts.state,
        }),
        Ok(_) => None,
        Err(source) => process::is_not_found(&source).then_some(Refusal::NoSuchProcess { pid }),
    }
}

fn examine(pid: i32, purpose: Purpose) -> Result<Target, Refusal> {
    let facts = alive(pid)?;
    may_look(&facts)?;
    if purpose == Purpose::Attach {
        may_write(&facts)?;
        untraced(&facts)?;
    }
    let interpreter = python(&facts, purpose == Purpose::Read)?;
    Ok(Target { facts, interpreter })
}

/// A process that is there, and a program.
pub(super) fn alive(pid: i32) -> Result<Facts, Refusal> {
    let facts = Facts::of(pid).map_err(|source| proc_error(pid, source))?;
    let name = || facts.printable_name();
    if facts.thread_group != pid {
        let tid = pid;
        let pid = facts.thread_group;
        return Err(Refusal::Thread { tid, pid });
    }
    // By another thread where the main one has ended before the rest.
    if facts.is_gone() && reachable(pid) == pid {
        let state = facts.state;
        return Err(Refusal::Ended {
            pid,
            name: name(),
            state,
        });
    }
    if facts.is_kernel_thread {
        return Err(Refusal::KernelThread { pid, name: name() });
    }
    Ok(facts)
}

/// Nobody traces it.
pub(super) fn untraced(facts: &Facts) -> Result<(), Refusal> {
    match &facts.tracer {
        Some(tracer) => Err(Refusal::Traced {
            pid: facts.id.pid,
            tracer: tracer.name.clone(),
            tracer_pid: tracer.pid,
        }),
        None => Ok(()),
    }
}

/// A Python that we know, and that runs; one that shuts down if `even_finalizing`.
pub(super) fn python(facts: &Facts, even_finalizing: bool) -> Result<Interpreter, Refusal> {
    let pid = facts.id.pid;
    let interpreter = interpreter::find(reachable(pid)).map_err(|error| match error {
        FindError::Maps { source, .. } => proc_error(pid, source),
        other => Refusal::Python(other),
    })?;
    let mem = ProcessMemory::new(pid);
    match interpreter.phase(&mem) {
        Ok(Phase::Running) => {}
        Ok(Phase::Finalizing) if even_finalizing => {}
        Ok(Phase::Finalizing) => return Err(Refusal::Finalizing { pid }),
        Ok(Phase::NotInitialised) => {
            let version = interpreter.version;
            return Err(FindError::NotInitialised { pid, version }.into());
        }
        Err(source) => return Err(FindError::Memory { pid, source }.into()),
    }
    Ok(interpreter)
}

fn proc_error(pid: i32, source: ProcError) -> Refusal {
    if process::is_not_found(&source) {
        return Refusal::NoSuchProcess { pid };
    }
    match source {
        ProcError::PermissionDenied(_) => Refusal::NotPermitted {
            pid,
            reason: NoPermission::Privileges,
        },
        source => Refusal::Proc { pid, source },
    }
}

/// Reads one byte of the process: the kernel asks the same questions for it as for ptrace.
pub(super) fn may_look(facts: &Facts) -> Result<(), Refusal> {
    let pid = facts.id.pid;
    let denied = || Refusal::NotPermitted {
        pid,
        reason: why_not(facts),
    };
    let maps = match Process::new(reachable(pid)).and_then(|process| process.maps()) {
        Ok(maps) => maps,
        Err(ProcError::PermissionDenied(_)) => return Err(denied()),
        Err(source) => return Err(proc_error(pid, source)),
    };
    // [vvar] and the like are mapped readable but cannot be read: the first private mapping is the program's.
    let readable = maps
        .iter()
        .find(|map| map.perms.contains(MMPermissions::READ | MMPermissions::PRIVATE));
    let Some(map) = readable else {
        return Ok(());
    };
    match ProcessMemory::new(pid).read_array::<1>(RemoteAddr(map.address.0)) {
        Err(MemoryError::Read { source, .. }) => match source.raw_os_error() {
            Some(libc::EPERM) => Err(denied()),
            Some(libc::ESRCH) => Err(Refusal::NoSuchProcess { pid }),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Opens the process's memory for writing, and writes nothing: who may trace it need not be allowed to open a file of its owner's.
pub(super) fn may_write(facts: &Facts) -> Result<(), Refusal> {
    let pid = facts.id.pid;
    let path = format!("/proc/{}/mem", reachable(pid));
    match std::fs::File::options().read(true).write(true).open(&path) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            use std::os::unix::fs::MetadataExt as _;
            let owner = std::fs::metadata(&path).map_or(facts.effective_uid, |file| file.uid());
            let own = nix::unistd::geteuid().as_raw();
            let reason = if owner == own {
                why_not(facts)
            } else {
                NoPermission::MemoryFile { owner }
            };
            Err(Refusal::NotPermitted { pid, reason })
        }
        // Whatever else there is to say, others say better.
        _ => Ok(()),
    }
}

fn why_not(facts: &Facts) -> NoPermission {
    let me = Process::myself().and_then(|me| me.status()).ok();
    let privileged = me.as_ref().is_some_and(|me| me.capeff >> CAP_SYS_PTRACE & 1 == 1);
    let me_permitted = me.as_ref().map(|me| me.capprm);
    let owners = [facts.real_uid, facts.effective_uid];
    if let Some(me) = me.filter(|_| !privileged)
        && let Some(owner) = owners.into_iter().find(|uid| *uid != me.euid)
    {
        return NoPermission::OtherUser { owner };
    }
    let yama = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match yama.trim() {
        "3" => NoPermission::YamaNobody,
        "2" if !privileged => NoPermission::YamaAdministrators,
        "1" if !privileged => NoPermission::YamaParents,
        _ => why_privileges(facts, me_permitted),
    }
}

/// What sets a process of our own user apart, as far as everybody may see it.
fn why_privileges(facts: &Facts, ours: Option<u64>) -> NoPermission {
    use std::os::unix::fs::MetadataExt as _;
    let pid = facts.id.pid;
    let map = |of: &str| std::fs::read_to_string(format!("/proc/{of}/uid_map")).ok();
    if map("self") != map(&pid.to_string()) {
        return NoPermission::UserNamespace;
    }
    let status = Process::new(pid).and_then(|process| process.status());
    let theirs = status.map_or(0, |status| status.capprm);
    if ours.is_some_and(|ours| theirs & !ours != 0) {
        return NoPermission::Capabilities;
    }
    // The kernel gives what is in /proc/PID of a process that is not dumpable to root.
    let file = std::fs::metadata(format!("/proc/{pid}/status"));
    match file {
        Ok(file) if file.uid() != facts.effective_uid => NoPermission::NotDumpable,
        _ => NoPermission::Privileges,
    }
}
