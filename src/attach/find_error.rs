//! Why no usable interpreter was found in a process, each in one sentence that says what is there instead.

use super::module::{MappedFile, ModuleError};
use super::process::printable;
use crate::frames::{PyVersion, ValidationError};
use procfs::ProcError;
use pyheap_injector::MemoryError;
use std::path::{Path, PathBuf};

/// Why no usable interpreter was found. One line each.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FindError {
    /// `/proc` does not tell: the process is gone, or we may not look.
    #[error("cannot see what is mapped into process {pid}")]
    Maps {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: ProcError,
    },
    /// No Python at all.
    #[error("process {pid} ({exe}) is not Python{}", children(.python_descendants))]
    NotPython {
        /// The process.
        pid: i32,
        /// Its executable.
        exe: String,
        /// Its descendants that are: a wrapper such as a shell or `uv run` was meant to be looked through.
        python_descendants: Vec<i32>,
    },
    /// A libpython that holds no Python.
    #[error("{path} is mapped into process {pid} but holds no Python: it was overwritten after the process began", path = printable(.path))]
    Overwritten {
        /// The process.
        pid: i32,
        /// The file, as the process sees it.
        path: PathBuf,
    },
    /// A Python that is not supported.
    #[error("{found} is not supported{}", .hint)]
    Unsupported {
        /// What was found, with its version.
        found: String,
        /// The rest of the sentence.
        hint: &'static str,
    },
    /// It is a Python, but its file could not be used.
    #[error("{} cannot be read as the process's Python", printable(.path))]
    Module {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: ModuleError,
    },
    /// The interpreter's memory cannot be read.
    #[error("the interpreter of process {pid} cannot be read")]
    Memory {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: MemoryError,
    },
    /// The interpreter does not run yet, or not any more.
    #[error("Python {}.{} in process {pid} is still starting up or already shut down: try again", .version.major, .version.minor)]
    NotInitialised {
        /// The process.
        pid: i32,
        /// The version; before 3.11 its patch level is not known yet.
        version: PyVersion,
    },
    /// Two interpreters run in one process.
    #[error("process {pid} runs two Python interpreters: {} and {}", printable(.first), printable(.second))]
    Ambiguous {
        /// The process.
        pid: i32,
        /// One file.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// No known layout fits.
    #[error("Python {version} in {} is laid out in an unknown way", printable(.path))]
    Layout {
        /// The version.
        version: PyVersion,
        /// The file.
        path: PathBuf,
        /// What did not fit in the table's layout.
        #[source]
        source: ValidationError,
    },
}

fn children(pids: &[i32]) -> String {
    if pids.is_empty() {
        return String::new();
    }
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    format!(", but it has started Python: try {}", pids.join(" or "))
}

/// The end of the sentence for other versions.
const VERSIONS: &str = ": 3.7 to 3.15 are";
/// The end of the sentence for versions to come.
const NOT_YET: &str = " yet: 3.7 to 3.15 are";
/// The end of the sentence for other implementations.
const OTHER_IMPLEMENTATION: &str = ": pyheap profiles CPython only";
/// The end of the sentence for a program that tells nothing.
const NO_SYMBOLS: &str = ": it has no symbols to find the interpreter by, which works from 3.12 on only";

fn refuse(found: impl Into<String>, hint: &'static str) -> FindError {
    FindError::Unsupported {
        found: found.into(),
        hint,
    }
}

/// Other implementations are known by the names of their files.
pub(super) fn by_name(pid: i32, exe: &Path, files: &[MappedFile]) -> Result<(), FindError> {
    let exe = exe.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let maps = |prefix: &str| {
        let names = files.iter().filter(|file| file.executable).map(MappedFile::name);
        names.into_iter().find(|name| name.starts_with(prefix))
    };
    let found = if exe.starts_with("pypy") || maps("libpypy").is_some() {
        let version = maps("libpypy").and_then(|name| number_after(&name, "libpypy"));
        let version = number_after(&exe, "pypy").filter(|v| v.contains('.')).or(version);
        named("PyPy", version)
    } else if exe.starts_with("micropython") {
        named("MicroPython", banner(pid, "MicroPython v"))
    } else if exe.starts_with("graalpy") || maps("libpythonvm").is_some() {
        "GraalPy".to_owned()
    } else {
        return Ok(());
    };
    Err(refuse(found, OTHER_IMPLEMENTATION))
}

fn named(name: &str, version: Option<String>) -> String {
    version.map_or_else(|| name.to_owned(), |version| format!("{name} {version}"))
}

/// The digits and dots that follow `prefix`: `3.9` of `libpypy3.9-c.so`.
fn number_after(text: &str, prefix: &str) -> Option<String> {
    let rest = text.strip_prefix(prefix)?;
    let number: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    let number = number.trim_end_matches('.');
    (!number.is_empty()).then(|| number.to_owned())
}

/// The number that follows `text` in the program's file.
fn banner(pid: i32, text: &str) -> Option<String> {
    use std::io::Read as _;
    const MAX_PROGRAM_BYTES: u64 = 8 << 20;
    let file = super::rooted::open_regular(Path::new(&format!("/proc/{pid}/exe"))).ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_PROGRAM_BYTES).read_to_end(&mut bytes).ok()?;
    let mut places = bytes.windows(text.len()).enumerate();
    places.find_map(|(at, window)| {
        let tail = (window == text.as_bytes()).then(|| bytes.get(at..)?.get(..text.len() + 16))??;
        number_after(&String::from_utf8_lossy(tail), text)
    })
}

/// Other versions and other builds of CPython.
pub(super) fn by_version(version: PyVersion, free_threaded: bool) -> Result<(), FindError> {
    let later = (version.major, version.minor) > (3, 15);
    let kind = if free_threaded { ", free-threaded," } else { "" };
    if !version.is_supported() {
        let hint = if later { NOT_YET } else { VERSIONS };
        return Err(refuse(format!("Python {version}{kind}"), hint));
    }
    Ok(())
}

/// It has the C API but no `_PyRuntime`: Python 2, or 3.6 and older.
pub(super) fn old(version: Option<PyVersion>, file: &str) -> FindError {
    match version {
        Some(version) => refuse(format!("Python {version}"), VERSIONS),
        None => refuse(format!("the Python in {file}, older than 3.7,"), VERSIONS),
    }
}

/// A Python without any symbol to find the interpreter by.
pub(super) fn hidden(version: PyVersion, file: &str) -> FindError {
    refuse(format!("Python {version} in {file}"), NO_SYMBOLS)
}

/// It has `_PyRuntime`, but nothing says which version it is.
pub(super) fn unknown_version(file: &str) -> FindError {
    refuse(format!("the Python in {file}, of unknown version,"), NO_SYMBOLS)
}

/// The file is for another kind of machine than this one.
pub(super) fn other_machine(file: &str) -> FindError {
    refuse(
        format!("the 32-bit program {file}"),
        ": pyheap profiles 64-bit processes only",
    )
}
