//! What the symbols of an interpreter's file tell: the addresses that the shim needs, and the version where no number
//! in memory does.

use super::elf::{Symbol, parse_version};
use super::module::Module;
use crate::frames::PyVersion;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::collections::HashMap;

/// The writable data of an interpreter is below 2 MB, that of a large program it is linked into some 10 MB.
pub(super) const MAX_DATA_BYTES: usize = 64 << 20;

/// All symbols that are looked up.
pub(super) const SYMBOLS: &[&str] = &[
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

impl Symbols {
    pub(super) fn new(found: &HashMap<&str, Symbol>, module: &Module, version: PyVersion) -> Self {
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

/// Up to 3.10 there is no version number in memory. Functions that came with a minor version tell that, and the text
/// that `Py_GetVersion` has made when Python started tells the patch level.
pub(super) fn version_before_3_11(
    symbols: &HashMap<&str, Symbol>,
    module: &Module,
    mem: &impl RemoteMemory,
) -> Option<PyVersion> {
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
pub(super) fn version_text(
    module: &Module,
    mem: &impl RemoteMemory,
    wanted: impl Fn(&PyVersion) -> bool,
) -> Option<PyVersion> {
    const LONGEST: usize = 16;
    let mut left = MAX_DATA_BYTES;
    for range in module.writable() {
        let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let Some(rest) = left.checked_sub(len) else {
            continue;
        };
        left = rest;
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
