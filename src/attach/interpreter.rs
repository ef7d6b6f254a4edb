//! Finds CPython in a process: which version, where `_PyRuntime` is, which layout fits, which functions are where.
//!
//! Candidates are the executable, then mapped files with `libpython` in their name, then (an embedder may hide it in a
//! plug-in) every mapped library. `_PyRuntime` comes from `.dynsym`, `.symtab` or the section `.PyRuntime` (3.10 and
//! later), the version from `Py_Version` or the debug offsets, before 3.11 from the exported functions and the version
//! string. Nothing is believed before the layout has been followed through the live process.
//!
//! What it refuses, in one line that says what was found: other versions, free-threaded builds, PyPy and MicroPython,
//! 32-bit programs, interpreters without any symbol, and a process that has two running interpreters.

use super::elf::{ElfError, Symbol, parse_version};
use super::module::{MappedFile, Module, ModuleError};
use super::{process, unsupported};
use crate::frames::dwarf::Structs;
use crate::frames::layout::{DebugOffsets, DebugOffsetsError, Layout};
use crate::frames::{PyVersion, ValidationError};
use procfs::ProcError;
use procfs::process::Process;
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

/// So many mapped libraries are searched when neither the executable nor a libpython is it.
const MAX_OTHER_MODULES: usize = 512;
/// So many descendants of a process that is no Python are looked at.
const MAX_DESCENDANTS: usize = 256;

/// The writable data of an interpreter is below 2 MB, that of a large program it is linked into some 10 MB.
const MAX_DATA_BYTES: usize = 64 << 20;

/// All symbols that are looked up.
const SYMBOLS: &[&str] = &[
    "_PyRuntime",
    "Py_Version",
    "PyMem_GetAllocator",
    "PyMem_SetAllocator",
    "_PyThreadState_UncheckedGet",
    "PyThreadState_GetUnchecked",
    "PyGILState_GetThisThreadState",
    "_PyMem_Raw",
    "_PyMem",
    "_PyObject",
    "_PyObject_Malloc",
    "_PyObject_Calloc",
    "_PyObject_Realloc",
    "_PyObject_Free",
    // Each came with one minor version and says that it is at least that.
    "PyIter_Send",
    "PyThreadState_GetFrame",
    "PyConfig_InitPythonConfig",
    "Py_GetVersion",
];

/// Where the layout is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffsetSource {
    /// The table of the minor version.
    Table,
    /// The process's own debug offsets (3.13), with the table for what they lack.
    DebugOffsets,
    /// The DWARF of the interpreter's file, after the table did not fit.
    Dwarf,
}

/// A CPython in a process.
#[derive(Debug, Clone)]
pub struct Interpreter {
    /// The version.
    pub version: PyVersion,
    /// The file that holds it, as the process sees it.
    pub path: PathBuf,
    /// The address of `_PyRuntime`.
    pub runtime: RemoteAddr,
    /// Where the fields are. It has been validated against the process.
    pub layout: Layout,
    /// Where the layout is from.
    pub offset_source: OffsetSource,
    /// False for a program that is linked for a fixed address.
    pub position_independent: bool,
    /// Address in memory less address by the file.
    pub load_bias: u64,
    /// Functions and data that the shim or its installer may need.
    pub symbols: Symbols,
    /// The code of the interpreter's file, so that one can tell whether a function pointer is its own.
    pub text: Vec<Range<u64>>,
    /// The writable data of the interpreter's file, .bss included.
    pub writable: Vec<Range<u64>>,
}

/// Addresses in the process; `None` where the file does not have the symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Symbols {
    /// `PyMem_GetAllocator`.
    pub get_allocator: Option<RemoteAddr>,
    /// `PyMem_SetAllocator`.
    pub set_allocator: Option<RemoteAddr>,
    /// `_PyThreadState_UncheckedGet` up to 3.12, then `PyThreadState_GetUnchecked`.
    pub current_thread_state: Option<RemoteAddr>,
    /// `PyGILState_GetThisThreadState`.
    pub this_thread_state: Option<RemoteAddr>,
    /// The static `PyMemAllocatorEx` structs `_PyMem_Raw`, `_PyMem` and `_PyObject`, up to 3.11; only in files with a
    /// `.symtab`.
    pub allocators: Option<[RemoteAddr; 3]>,
    /// `_PyObject_Malloc`, `_Calloc`, `_Realloc`, `_Free`: pymalloc; only in files with a `.symtab`.
    pub pymalloc: Option<[RemoteAddr; 4]>,
}

/// How far the interpreter has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not initialised yet, or not any more.
    NotInitialised,
    /// It runs.
    Running,
    /// It is shutting down.
    Finalizing,
}

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
    /// A Python that is not supported.
    #[error("{found} is not supported{}", .hint)]
    Unsupported {
        /// What was found, with its version.
        found: String,
        /// The rest of the sentence.
        hint: &'static str,
    },
    /// It is a Python, but its file could not be used.
    #[error("{path} cannot be read as the process's Python")]
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
    #[error("Python {version} in process {pid} is still starting up or already shut down: try again")]
    NotInitialised {
        /// The process.
        pid: i32,
        /// The version.
        version: PyVersion,
    },
    /// Two interpreters run in one process.
    #[error("process {pid} runs two Python interpreters: {first} and {second}")]
    Ambiguous {
        /// The process.
        pid: i32,
        /// One file.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// No known layout fits.
    #[error("Python {version} in {path} is laid out in an unknown way")]
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

impl Interpreter {
    /// Where the interpreter's start and end are at.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub fn phase(&self, mem: &impl RemoteMemory) -> Result<Phase, MemoryError> {
        phase(mem, self.runtime, &self.layout)
    }

    /// True when `addr` lies in the interpreter's own code.
    #[must_use]
    pub fn is_own_code(&self, addr: RemoteAddr) -> bool {
        self.text.iter().any(|range| range.contains(&addr.0))
    }
}

fn phase(mem: &impl RemoteMemory, runtime: RemoteAddr, layout: &Layout) -> Result<Phase, MemoryError> {
    // Offsets are below 1 MiB; an address that wraps cannot be read.
    let at = |offset| runtime.checked_add(offset).unwrap_or(RemoteAddr::NULL);
    if mem.read_u64(at(layout.runtime.finalizing))? != 0 {
        return Ok(Phase::Finalizing);
    }
    Ok(match mem.read_u32(at(layout.runtime.initialized))? {
        0 => Phase::NotInitialised,
        _ => Phase::Running,
    })
}

/// Finds the CPython in process `pid`. Reads only; nothing is stopped.
///
/// # Errors
/// With what was found instead, in one line.
pub fn find(pid: i32) -> Result<Interpreter, FindError> {
    let maps_error = |source| FindError::Maps { pid, source };
    let process = Process::new(pid).map_err(maps_error)?;
    let exe = process.exe().unwrap_or_default();
    let files = MappedFile::all(&process.maps().map_err(maps_error)?);
    unsupported::by_name(&exe, &files)?;

    let is_exe = |file: &MappedFile| file.is_program(&exe);
    let (first, other): (Vec<_>, Vec<_>) = files
        .iter()
        .partition(|file| is_exe(file) || file.name().contains("libpython"));
    let mut first = first;
    first.sort_by_key(|file| !is_exe(file));
    let mut running: Option<Interpreter> = None;
    let mut refused = None;
    let other = other.into_iter().filter(|file| file.executable).take(MAX_OTHER_MODULES);
    for (is_named, file) in first.into_iter().map(|f| (true, f)).chain(other.map(|f| (false, f))) {
        if !is_named && (running.is_some() || refused.is_some()) {
            break;
        }
        match examine(pid, file, is_exe(file)) {
            Ok(None) => {}
            Ok(Some(found)) => match running {
                Some(first) => {
                    return Err(FindError::Ambiguous {
                        pid,
                        first: first.path,
                        second: found.path,
                    });
                }
                None => running = Some(found),
            },
            Err(FindError::Module {
                source: ModuleError::Elf(ElfError::OtherMachine),
                ..
            }) if is_exe(file) => return Err(unsupported::other_machine(&file.name())),
            // A library that cannot be read and has nothing to do with Python is no reason to give up.
            Err(FindError::Module { .. }) if !is_named => {}
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match (running, refused) {
        (Some(found), _) => Ok(found),
        (None, Some(error)) => Err(error),
        (None, None) => Err(FindError::NotPython {
            pid,
            exe: process::printable(&exe),
            python_descendants: process::descendants(pid)
                .into_iter()
                .take(MAX_DESCENDANTS)
                .filter(|child| super::candidates::looks_like_python(*child))
                .collect(),
        }),
    }
}

/// Looks for an interpreter in one mapped file, which may be the program itself; `None` when it has none.
fn examine(pid: i32, file: &MappedFile, is_program: bool) -> Result<Option<Interpreter>, FindError> {
    let failed = |source| FindError::Module {
        path: file.path.clone(),
        source,
    };
    let module = match file.open(pid) {
        // Mapped as data (a debugger, an archiver), not loaded.
        Err(ModuleError::NotMapped) => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    let symbols = module.elf.symbols(SYMBOLS).map_err(|e| failed(e.into()))?;
    let section = module.elf.section(".PyRuntime").map(|section| section.address);
    let runtime = symbols.get("_PyRuntime").map(|s| s.address).or(section);
    let Some(runtime) = runtime else {
        return match symbols.contains_key("Py_GetVersion") {
            true => {
                let is_old = |v: &PyVersion| (v.major, v.minor) < (3, 7);
                let version = version_text(&module, &ProcessMemory::new(pid), is_old);
                Err(unsupported::old(version, &file.name()))
            }
            // The program itself: if it has made itself a Python version, it is one that hides.
            false if is_program => {
                let version = version_text(&module, &ProcessMemory::new(pid), |v| v.major == 3);
                version.map_or(Ok(None), |version| Err(unsupported::hidden(version, &file.name())))
            }
            false => Ok(None),
        };
    };
    let runtime = module.remote(runtime);
    let mem = ProcessMemory::new(pid);
    let memory = |source| FindError::Memory { pid, source };

    let debug = match DebugOffsets::read(&mem, runtime) {
        Ok(debug) => Some(debug),
        Err(DebugOffsetsError::Memory(source)) => return Err(memory(source)),
        Err(_) => None,
    };
    let version = match (&debug, symbols.get("Py_Version")) {
        (Some(debug), _) => Some(debug.version),
        (None, Some(at)) => Some(PyVersion::from_hex(
            mem.read_u32(module.remote(at.address)).map_err(memory)?,
        )),
        (None, None) => version_before_3_11(&symbols, &module, &mem),
    };
    let Some(version) = version else {
        return Err(unsupported::unknown_version(&file.name()));
    };
    unsupported::by_version(version, debug.as_ref().is_some_and(|debug| debug.free_threaded))?;
    let (layout, offset_source) = choose_layout(&mem, runtime, version, debug.as_ref(), &module, pid)?;
    Ok(Some(Interpreter {
        version,
        runtime,
        layout,
        offset_source,
        position_independent: module.elf.position_independent,
        load_bias: module.bias,
        symbols: Symbols::new(&symbols, &module, version),
        text: module.text(),
        writable: module.writable(),
        path: module.path,
    }))
}

/// The debug offsets over the table, else the table, else the DWARF: the first that the process confirms.
fn choose_layout(
    mem: &ProcessMemory,
    runtime: RemoteAddr,
    version: PyVersion,
    debug: Option<&DebugOffsets>,
    module: &Module,
    pid: i32,
) -> Result<(Layout, OffsetSource), FindError> {
    let own = debug.and_then(|debug| debug.layout().ok());
    let table = Layout::of_minor(version.minor).ok();
    let known = [(own, OffsetSource::DebugOffsets), (table, OffsetSource::Table)];
    let mut first_error = None;
    for (layout, source) in known {
        let Some(layout) = layout else { continue };
        match phase(mem, runtime, &layout).map_err(|source| FindError::Memory { pid, source })? {
            Phase::NotInitialised => {
                return Err(FindError::NotInitialised { pid, version });
            }
            // Whoever wants to attach refuses it; who only asks what it is gets an answer while the lists still stand.
            Phase::Running | Phase::Finalizing => {}
        }
        match layout.validate(mem, runtime) {
            Ok(()) => return Ok((layout, source)),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    let dwarf = Structs::read(&module.elf).and_then(|structs| structs.layout(version.minor));
    if let Ok(layout) = dwarf
        && layout.validate(mem, runtime).is_ok()
    {
        return Ok((layout, OffsetSource::Dwarf));
    }
    Err(FindError::Layout {
        version,
        path: module.path.clone(),
        source: first_error.unwrap_or(ValidationError::MainNotListed),
    })
}

/// Up to 3.10 there is no version number in memory. Functions that came with a minor version tell that, and the text
/// that `Py_GetVersion` has made when Python started tells the patch level.
fn version_before_3_11(symbols: &HashMap<&str, Symbol>, module: &Module, mem: &impl RemoteMemory) -> Option<PyVersion> {
    let has = |name| symbols.contains_key(name);
    let minor = if has("PyIter_Send") {
        10
    } else if has("PyThreadState_GetFrame") {
        9
    } else if has("PyConfig_InitPythonConfig") {
        8
    } else if has("Py_GetVersion") {
        7
    } else {
        // Nothing is exported: the text must do.
        return version_text(module, mem, |v| v.is_supported());
    };
    let said = version_text(module, mem, |v| (v.major, v.minor) == (3, minor));
    Some(said.unwrap_or(PyVersion::new(3, minor, 0)))
}

/// Looks for `3.8.18 (default, ` in the module's writable data, of a version that is `wanted`.
fn version_text(module: &Module, mem: &impl RemoteMemory, wanted: impl Fn(&PyVersion) -> bool) -> Option<PyVersion> {
    const LONGEST: usize = 16;
    for range in module.writable() {
        let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        if len > MAX_DATA_BYTES {
            continue;
        }
        let Ok(bytes) = mem.read_vec(RemoteAddr(range.start), len) else {
            continue;
        };
        let mut texts = bytes.windows(LONGEST).filter_map(|window| match window {
            [0, text @ ..] if matches!(text, [b'2' | b'3', b'.', ..]) => std::str::from_utf8(text).ok(),
            _ => None,
        });
        let found = texts.find_map(|text| parse_version(text.split_once(" (")?.0).filter(&wanted));
        if found.is_some() {
            return found;
        }
    }
    None
}

impl Symbols {
    fn new(found: &HashMap<&str, Symbol>, module: &Module, version: PyVersion) -> Self {
        let function = |name| found.get(name).filter(|s| s.function).map(|s| module.remote(s.address));
        // `_PyMem` and the like are short names: only data of exactly the right size is meant.
        let allocator = |name| {
            let symbol = found.get(name).filter(|s| !s.function && s.size == 40)?;
            Some(module.remote(symbol.address))
        };
        let allocators = || Some([allocator("_PyMem_Raw")?, allocator("_PyMem")?, allocator("_PyObject")?]);
        let pymalloc = || {
            Some([
                function("_PyObject_Malloc")?,
                function("_PyObject_Calloc")?,
                function("_PyObject_Realloc")?,
                function("_PyObject_Free")?,
            ])
        };
        Self {
            get_allocator: function("PyMem_GetAllocator"),
            set_allocator: function("PyMem_SetAllocator"),
            current_thread_state: function(if version.minor >= 13 {
                "PyThreadState_GetUnchecked"
            } else {
                "_PyThreadState_UncheckedGet"
            }),
            this_thread_state: function("PyGILState_GetThisThreadState"),
            allocators: if version.minor <= 11 { allocators() } else { None },
            pymalloc: pymalloc(),
        }
    }
}
