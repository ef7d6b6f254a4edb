//! All Python processes of the host, for `pyheap ps` and for choosing a target.
//!
//! Cheap first: a process is looked into only when the name of its executable or of a mapped file says Python, or its
//! executable has the section that an interpreter within it leaves there (from 3.10). pyheap itself and its ancestors are
//! never listed: a script that runs pyheap waits for it.

use super::elf::ElfFile;
use super::place::Place;
use super::preflight::{self, Refusal};
use super::process::{self, Facts, MemoryUse, ProcessId};
use super::rooted::open_regular;
use super::session;
use crate::frames::PyVersion;
use procfs::process::Process;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The command line is cut to this many characters.
const COMMAND_CHARS: usize = 100;
/// What patterns are matched with.
pub const WHOLE_COMMAND_CHARS: usize = 16 << 10;

/// A process that is, or seems to be, Python.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The process.
    pub pid: i32,
    /// Its Python's version; `None` where it could not be found out.
    pub version: Option<PyVersion>,
    /// Its command line, cut.
    pub command: String,
    /// The same, for patterns: cut only where it is absurdly long.
    pub whole_command: String,
    /// Its resident memory, in bytes.
    pub rss_bytes: u64,
    /// How long ago it began.
    pub age: Option<Duration>,
    /// Number and start time.
    pub id: ProcessId,
    /// Its number in its own pid namespace.
    pub inside_pid: i32,
    /// The effective user id.
    pub uid: u32,
    /// How many threads it has.
    pub threads: u64,
    /// Its container, pod or cgroup.
    pub place: Place,
    /// The pyheap that records it.
    pub recorded_by: Option<u32>,
    /// Whether pyheap can attach to it, or the one line that says why not.
    pub attachable: Result<(), String>,
    /// The exit code of that refusal.
    pub refusal_code: Option<u8>,
}

/// Lists the Python processes that we can see, in the order of their pids.
#[must_use]
pub fn list() -> Vec<Candidate> {
    let family = process::own_family();
    let Ok(all) = procfs::process::all_processes() else {
        return Vec::new();
    };
    let mut pids: Vec<i32> = all.flatten().map(|process| process.pid()).collect();
    pids.retain(|pid| !family.contains(pid) && looks_like_python(*pid) && !pyheap_injector::copy::is_copy(*pid));
    pids.sort_unstable();
    pids.into_iter().filter_map(candidate).collect()
}

fn candidate(pid: i32) -> Option<Candidate> {
    let facts = Facts::of(pid).ok()?;
    if facts.is_gone() {
        return None;
    }
    let checked = preflight::survey(pid);
    if checked
        .as_ref()
        .is_err_and(|refusal| matches!(refusal, Refusal::NoSuchProcess { .. } | Refusal::Ended { .. }))
    {
        return None;
    }
    let refused = match &checked {
        Err(refusal) => Some((refusal.exit_code(), with_causes(refusal))),
        Ok(target) => session::allowed(target)
            .err()
            .map(|error| (error.exit_code(), error.to_string())),
    };
    let refusal_code = refused.as_ref().map(|(code, _)| *code);
    let attachable = refused.map_or(Ok(()), |(_, why)| Err(why));
    Some(Candidate {
        pid,
        id: facts.id,
        inside_pid: facts.namespace_pids.last().copied().unwrap_or(pid),
        uid: facts.effective_uid,
        threads: facts.threads,
        place: Place::of(pid),
        recorded_by: checked.as_ref().ok().and_then(|_| session::recorder_of(pid)),
        version: checked.as_ref().ok().map(|target| target.interpreter.version),
        command: facts.short_command(COMMAND_CHARS),
        whole_command: facts.short_command(WHOLE_COMMAND_CHARS),
        rss_bytes: MemoryUse::of(pid).map_or(0, |memory| memory.rss_bytes),
        age: facts.age,
        attachable,
        refusal_code,
    })
}

/// True when the executable's name, or that of a mapped file, says Python, or the executable holds an interpreter under
/// another name: what Nuitka makes of a program.
#[must_use]
pub fn looks_like_python(pid: i32) -> bool {
    let Ok(process) = Process::new(pid) else {
        return false;
    };
    let says_python = |path: &std::path::Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        ["python", "libpython", "pypy", "libpypy"]
            .iter()
            .any(|p| name.starts_with(p))
    };
    if process.exe().is_ok_and(|exe| says_python(&exe)) {
        return true;
    }
    // Where the maps are closed to us, the name of the program is all there is.
    match process::mapped_files(&process) {
        Ok(files) => files.iter().any(|file| says_python(file) || is_extension_module(file)) || holds_interpreter(pid),
        Err(_) => process.stat().is_ok_and(|stat| stat.comm.starts_with("python")),
    }
}

/// Only the list of sections is read: symbols would be too much for every process of a host. Many processes share a program, so
/// the answer is kept by device, inode and time of change.
fn holds_interpreter(pid: i32) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    static SEEN: Mutex<BTreeMap<(u64, u64, i64, i64), bool>> = Mutex::new(BTreeMap::new());
    const MOST: usize = 4096;
    let Ok(file) = open_regular(format!("/proc/{pid}/exe").as_ref()) else {
        return false;
    };
    let Ok(of) = file.metadata() else { return false };
    let key = (of.dev(), of.ino(), of.ctime(), of.ctime_nsec());
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if seen.len() > MOST {
        seen.clear();
    }
    *seen
        .entry(key)
        .or_insert_with(|| ElfFile::open(file).is_ok_and(|elf| elf.section(".PyRuntime").is_some()))
}

/// `_json.cpython-312-x86_64-linux-gnu.so`: an interpreter under another name has loaded it.
fn is_extension_module(path: &std::path::Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.contains(".cpython-3") && name.ends_with(".so")
}

/// An error and its causes in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    line
}
