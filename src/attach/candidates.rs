//! All Python processes of the host, for `pyheap list` and for choosing a target.
//!
//! Cheap first: a process is looked into only when the name of its executable or of a mapped file says Python, or its
//! executable has the section that an interpreter within it leaves there (from 3.10). pyheap itself and its ancestors are
//! never listed: a script that runs pyheap waits for it.

use super::elf::ElfFile;
use super::preflight;
use super::process::{self, Facts, MemoryUse};
use super::rooted::open_regular;
use crate::frames::PyVersion;
use procfs::process::Process;
use std::time::Duration;

/// The command line is cut to this many characters.
const COMMAND_CHARS: usize = 100;

/// A process that is, or seems to be, Python.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The process.
    pub pid: i32,
    /// Its Python's version; `None` where it could not be found out.
    pub version: Option<PyVersion>,
    /// Its command line, cut.
    pub command: String,
    /// Its resident memory, in bytes.
    pub rss_bytes: u64,
    /// How long ago it began.
    pub age: Option<Duration>,
    /// Whether pyheap can attach to it, or the one line that says why not.
    pub attachable: Result<(), String>,
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
    let checked = preflight::look(pid);
    Some(Candidate {
        pid,
        version: checked.as_ref().ok().map(|target| target.interpreter.version),
        command: facts.short_command(COMMAND_CHARS),
        rss_bytes: MemoryUse::of(pid).map_or(0, |memory| memory.rss_bytes),
        age: facts.age,
        attachable: checked.map(|_| ()).map_err(|refusal| with_causes(&refusal)),
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

/// Only the list of sections is read: symbols would be too much for every process of a host.
fn holds_interpreter(pid: i32) -> bool {
    let file = open_regular(format!("/proc/{pid}/exe").as_ref());
    let elf = file.ok().and_then(|file| ElfFile::open(file).ok());
    elf.is_some_and(|elf| elf.section(".PyRuntime").is_some())
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
