//! Finds CPython in a process: which version, where `_PyRuntime` is, which layout fits, which functions are where.
//!
//! Candidates are the executable, then mapped files with `libpython` in their name, then (an embedder may hide it in a
//! plug-in) every mapped library. `_PyRuntime` comes from `.dynsym`, `.symtab`, the section `.PyRuntime` (3.10 and later),
//! or the cookie of the debug offsets in the data (3.13 and later), the version from `Py_Version` or the debug offsets, before 3.11 from the exported functions and the version
//! string. Nothing is believed before the layout has been followed through the live process.
//!
//! What it refuses, in one line that says what was found: other versions, PyPy and MicroPython, 32-bit programs,
//! interpreters before 3.12 without any symbol, and a process that has two running interpreters.

use super::debug_file;
use super::elf::{ElfError, ElfFile};
use super::find_error::{self, FindError};
use super::module::{MappedFile, Module, ModuleError};
use super::own_state;
use super::process;
use super::symbols::{SYMBOLS, Symbols, version_before_3_11, version_text};
use crate::frames::dwarf::Structs;
use crate::frames::layout::{DebugOffsets, DebugOffsetsError, Layout};
use crate::frames::{Build, PyVersion};
use procfs::process::Process;
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// So many mapped libraries are searched when neither the executable nor a libpython is it.
const MAX_OTHER_MODULES: usize = 512;
/// So many files whose names say Python are examined.
const MAX_NAMED_MODULES: usize = 16;
/// The search through other libraries ends after this time; a real one takes some 10 ms.
const MAX_SEARCH: Duration = Duration::from_secs(5);
/// So many descendants of a process that is no Python are looked at.
const MAX_DESCENDANTS: usize = 256;

/// More places that begin with the debug offsets' cookie are not looked at.
const MAX_COOKIES: usize = 16;

/// Where the layout is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffsetSource {
    /// The table of the build.
    Table,
    /// The process's own debug offsets (from 3.13), with the table for what they lack.
    DebugOffsets,
    /// The DWARF of the interpreter's file, after the table did not fit.
    Dwarf,
    /// The DWARF of its separate debug file.
    SeparateDwarf,
    /// What an earlier pyheap has read from either of these.
    Cache,
}

impl std::fmt::Display for OffsetSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Table => "the built-in table",
            Self::DebugOffsets => "the interpreter's debug offsets",
            Self::Dwarf => "the interpreter's DWARF",
            Self::SeparateDwarf => "the DWARF of its separate debug file",
            Self::Cache => "its DWARF, read earlier",
        })
    }
}

/// A CPython in a process.
#[derive(Debug, Clone)]
pub struct Interpreter {
    /// The version. Before 3.11 the patch level is 0 where the interpreter does not show it.
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
    /// Where nothing is named: the distance from the thread pointer to where each thread has its `PyThreadState *`.
    pub own_state: Option<i32>,
    /// The code of the interpreter's file, so that one can tell whether a function pointer is its own.
    pub text: Vec<Range<u64>>,
    /// The writable data of the interpreter's file, .bss included.
    pub writable: Vec<Range<u64>>,
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

impl Interpreter {
    /// Where the interpreter's start and end are at.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub fn phase(&self, mem: &impl RemoteMemory) -> Result<Phase, MemoryError> {
        phase(mem, self.runtime, &self.layout)
    }

    /// Whether its remote debugging is switched on: `PYTHON_DISABLE_REMOTE_DEBUG` and `-X disable-remote-debug` switch it off, from
    /// 3.14 on. `None` before, and where it cannot be told.
    #[must_use]
    pub fn remote_debugging(&self, mem: &impl RemoteMemory) -> Option<bool> {
        // `_Py_DebugOffsets.debugger_support.remote_debugging_enabled`, which tells where `config.remote_debug` is:
        // https://github.com/python/cpython/blob/v3.14.0/Include/internal/pycore_debug_offsets.h
        let word = match (self.version.major, self.version.minor) {
            (3, 14) => 91,
            (3, 15) => 107,
            _ => return None,
        };
        let main = mem
            .read_u64(self.runtime.checked_add(self.layout.runtime.interpreters_main)?)
            .ok()?;
        let offset = mem.read_u64(self.runtime.checked_add(word * 8)?).ok()?;
        let offset = Some(offset).filter(|offset| (1..1 << 20).contains(offset))?;
        match mem.read_u32(RemoteAddr(main).checked_add(offset)?).ok()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// The version, and what kind of build it is: `3.14.9, free-threaded`.
    #[must_use]
    pub fn description(&self) -> String {
        let kind = if self.layout.free_threaded {
            ", free-threaded"
        } else {
            ""
        };
        format!("{}{kind}", self.version)
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
    find_error::by_name(pid, &exe, &files)?;

    let is_exe = |file: &MappedFile| file.is_program(&exe);
    let (first, other): (Vec<_>, Vec<_>) = files
        .iter()
        .partition(|file| is_exe(file) || file.name().contains("libpython"));
    let mut first = first;
    first.sort_by_key(|file| !is_exe(file));
    first.truncate(MAX_NAMED_MODULES);
    let end = Instant::now() + MAX_SEARCH;
    let mut running: Option<Interpreter> = None;
    let mut refused = None;
    let other = other.into_iter().filter(|file| file.executable).take(MAX_OTHER_MODULES);
    for (is_named, file) in first.into_iter().map(|f| (true, f)).chain(other.map(|f| (false, f))) {
        if !is_named && (running.is_some() || refused.is_some() || Instant::now() > end) {
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
            }) if is_exe(file) => return Err(find_error::other_machine(&file.name())),
            // A library that cannot be read and has nothing to do with Python is no reason to give up.
            Err(FindError::Module { .. }) if !is_named => {}
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match (running, refused) {
        (Some(found), _) => Ok(found),
        (None, Some(error)) => Err(error),
        (None, None) if let Some(file) = files.iter().find(|file| file.name().starts_with("libpython3")) => {
            Err(FindError::Overwritten {
                pid,
                path: file.path.clone(),
            })
        }
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
    match file.open(pid) {
        // Mapped as data (a debugger, an archiver), not loaded.
        Err(ModuleError::NotMapped) => Ok(None),
        Err(source) => Err(FindError::Module {
            path: file.path.clone(),
            source,
        }),
        Ok(module) => examine_module(&ProcessMemory::new(pid), pid, module, is_program),
    }
}

/// Looks for an interpreter in a module of the process whose memory is `mem`; `None` when it has none.
///
/// # Errors
/// With what was found instead, in one line.
pub fn examine_module(
    mem: &impl RemoteMemory,
    pid: i32,
    mut module: Module,
    is_program: bool,
) -> Result<Option<Interpreter>, FindError> {
    let path = module.path.clone();
    let file = MappedFile::of_core(path.clone(), Vec::new());
    let failed = |source| FindError::Module {
        path: path.clone(),
        source,
    };
    module.is_program = is_program;
    let symbols = module.elf.known_symbols(SYMBOLS).map_err(|e| failed(e.into()))?;
    let section = module.elf.section(".PyRuntime").map(|section| section.address);
    let named = symbols.get("_PyRuntime").map(|s| s.address).or(section);
    let runtime = named.map(|address| module.remote(address));
    // Not in every library of every process: that could be much to read.
    let may_hide = is_program || file.name().contains("python");
    let hidden = || may_hide.then(|| by_cookie(&module, mem)).flatten();
    let Some(runtime) = runtime.or_else(hidden) else {
        return match symbols.contains_key("Py_GetVersion") {
            true => {
                let is_old = |v: &PyVersion| (v.major, v.minor) < (3, 7);
                let version = version_text(&module, mem, is_old);
                Err(find_error::old(version, &file.name()))
            }
            // The program itself: if it has made itself a Python version, it is one that hides.
            false if is_program => {
                let version = version_text(&module, mem, |v| v.major == 3);
                version.map_or(Ok(None), |version| Err(find_error::hidden(version, &file.name())))
            }
            false => Ok(None),
        };
    };
    let memory = |source| FindError::Memory { pid, source };

    let debug = match DebugOffsets::read(mem, runtime) {
        Ok(debug) => Some(debug),
        Err(DebugOffsetsError::Memory(source)) => return Err(memory(source)),
        Err(_) => None,
    };
    let version = match (&debug, symbols.get("Py_Version")) {
        (Some(debug), _) => Some(debug.version),
        (None, Some(at)) => Some(PyVersion::from_hex(
            mem.read_u32(module.remote(at.address)).map_err(memory)?,
        )),
        (None, None) => version_before_3_11(&symbols, &module, mem),
    };
    let Some(version) = version else {
        return Err(find_error::unknown_version(&file.name()));
    };
    find_error::by_version(version, debug.as_ref().is_some_and(|debug| debug.free_threaded))?;
    let (layout, offset_source) = choose_layout(mem, runtime, version, debug.as_ref(), &module, pid)?;
    let symbols = Symbols::new(&symbols, &module, version);
    let own_state = match symbols.current_thread_state {
        Some(_) => None,
        None => own_state::distance(mem, runtime, &layout, &module),
    };
    Ok(Some(Interpreter {
        version,
        runtime,
        layout,
        offset_source,
        position_independent: module.elf.position_independent,
        load_bias: module.bias,
        symbols,
        own_state,
        text: module.text(),
        writable: module.writable(),
        path: module.path,
    }))
}

/// Where the module's data has debug offsets that lead to a main interpreter: `_PyRuntime` of 3.13 and later, without a name.
fn by_cookie(module: &Module, mem: &impl RemoteMemory) -> Option<RemoteAddr> {
    let mut left = super::symbols::MAX_DATA_BYTES;
    let mut tried = 0;
    for range in module.writable() {
        let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        left = left.checked_sub(len)?;
        let Ok(bytes) = mem.read_vec(RemoteAddr(range.start), len) else {
            continue;
        };
        for (number, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            if word != b"xdebugpy" {
                continue;
            }
            tried += 1;
            if tried > MAX_COOKIES {
                return None;
            }
            let at = RemoteAddr(range.start + number as u64 * 8);
            let is_runtime = |layout: Layout| phase(mem, at, &layout).is_ok();
            let layout = DebugOffsets::read(mem, at).ok().and_then(|debug| debug.layout().ok());
            if layout.is_some_and(is_runtime) {
                return Some(at);
            }
        }
    }
    None
}

/// The debug offsets over the table, else the table, else the DWARF: the first that the process confirms.
fn choose_layout(
    mem: &impl RemoteMemory,
    runtime: RemoteAddr,
    version: PyVersion,
    debug: Option<&DebugOffsets>,
    module: &Module,
    pid: i32,
) -> Result<(Layout, OffsetSource), FindError> {
    let memory = |source| FindError::Memory { pid, source };
    let own = debug.and_then(|debug| debug.layout().ok());
    let build = Build {
        minor: version.minor,
        free_threaded: debug.is_some_and(|debug| debug.free_threaded),
    };
    let table = Layout::of(build).ok();
    let folder = debug_file::cache_folder();
    let read = |elf: &ElfFile| {
        let structs = Structs::read(elf).ok()?;
        debug_file::keep(folder.as_deref(), &module.elf, build, |name| structs.offset(name))
    };
    let dwarf = || read(&module.elf);
    let separate = || read(&debug_file::find(module, pid)?);
    let kept = || debug_file::cached(folder.as_deref()?, &module.elf, build);
    let sources: [(OffsetSource, &dyn Fn() -> Option<Layout>); 5] = [
        (OffsetSource::DebugOffsets, &|| own),
        (OffsetSource::Table, &|| table),
        // Last, because it is the dearest.
        (OffsetSource::Cache, &kept),
        (OffsetSource::Dwarf, &dwarf),
        (OffsetSource::SeparateDwarf, &separate),
    ];
    let mut first_phase = None;
    let mut first_error = None;
    for (source, layout) in sources {
        let Some(layout) = layout() else { continue };
        let phase = phase(mem, runtime, &layout).map_err(memory)?;
        first_phase = first_phase.or(Some(phase));
        // Before and after, there is nothing to follow.
        if phase == Phase::NotInitialised {
            continue;
        }
        match layout.validate(mem, runtime) {
            Ok(()) => return Ok((layout, source)),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    match (first_phase, first_error) {
        (Some(Phase::Running), Some(source)) => Err(FindError::Layout {
            version,
            path: module.path.clone(),
            source,
        }),
        // Not yet or not any more; or on the way out, with its lists half taken down.
        _ => Err(FindError::NotInitialised { pid, version }),
    }
}
