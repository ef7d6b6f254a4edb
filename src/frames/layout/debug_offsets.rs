//! `_Py_DebugOffsets`: what a 3.13 interpreter says of its own structs. It is the first thing in `_PyRuntime`.
//!
//! The words below are those of 3.13; other minors order them differently and are not read. It does not hold all that
//! is needed (allocators, `interpreters.main`, `_co_firsttraceable`), so it is laid over the table of 3.13. An answer
//! that differs from the table is taken, it is the interpreter's own, and told in [`DebugOffsets::differing`]; the
//! whole must still pass `Layout::validate`.

use super::{Layout, LayoutError, table};
use crate::frames::version::PyVersion;
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};

/// The first 8 bytes, constant from before Python starts.
const COOKIE: &[u8; 8] = b"xdebugpy";

/// 3.13 has 73 words of 8 bytes.
const WORDS_3_13: usize = 73;

/// Word number in the 3.13 struct, and the C path whose offset it is.
const NAMES_3_13: &[(usize, &str)] = &[
    (4, "_PyRuntimeState._finalizing"),
    (5, "_PyRuntimeState.interpreters.head"),
    (7, "PyInterpreterState.id"),
    (8, "PyInterpreterState.next"),
    (9, "PyInterpreterState.threads.head"),
    (21, "PyThreadState.next"),
    (22, "PyThreadState.interp"),
    (23, "PyThreadState.current_frame"),
    (24, "PyThreadState.thread_id"),
    (25, "PyThreadState.native_thread_id"),
    (29, "_PyInterpreterFrame.previous"),
    (30, "_PyInterpreterFrame.f_executable"),
    (31, "_PyInterpreterFrame.instr_ptr"),
    (33, "_PyInterpreterFrame.owner"),
    (34, "sizeof(PyCodeObject)"),
    (35, "PyCodeObject.co_filename"),
    (36, "PyCodeObject.co_name"),
    (37, "PyCodeObject.co_qualname"),
    (38, "PyCodeObject.co_linetable"),
    (39, "PyCodeObject.co_firstlineno"),
    (43, "PyCodeObject.co_code_adaptive"),
    (45, "PyObject.ob_type"),
    (47, "PyTypeObject.tp_name"),
    (65, "PyVarObject.ob_size"),
    (66, "PyBytesObject.ob_sval"),
    (68, "PyASCIIObject.state"),
    (69, "PyASCIIObject.length"),
    (70, "sizeof(PyASCIIObject)"),
];

/// Why the debug offsets cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DebugOffsetsError {
    /// They could not be read.
    #[error("the interpreter's debug offsets cannot be read")]
    Memory(#[from] MemoryError),
    /// There are none: not 3.13 or later, or not `_PyRuntime`.
    #[error("there are no debug offsets at {0}")]
    NoCookie(RemoteAddr),
    /// They belong to a version whose order of words is not known here.
    #[error("the debug offsets of Python {0} are not known")]
    OtherVersion(PyVersion),
    /// They give no usable layout.
    #[error("the interpreter's debug offsets make no sense")]
    Layout(#[from] LayoutError),
}

/// The debug offsets of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebugOffsets {
    /// The interpreter's version.
    pub version: PyVersion,
    /// True for a free-threaded build.
    pub free_threaded: bool,
    words: Vec<u64>,
}

impl DebugOffsets {
    /// Reads them at `runtime`, the address of `_PyRuntime`. For versions other than 3.13 only the version and the
    /// kind of build are kept.
    ///
    /// # Errors
    /// When there are none or the memory cannot be read.
    pub fn read(mem: &impl RemoteMemory, runtime: RemoteAddr) -> Result<Self, DebugOffsetsError> {
        let head = mem.read_array::<24>(runtime)?;
        let word = |bytes: &[u8], i: usize| {
            bytes
                .get(i * 8..i * 8 + 8)
                .and_then(|b| b.try_into().ok())
                .map_or(0, u64::from_le_bytes)
        };
        if !head.starts_with(COOKIE) {
            return Err(DebugOffsetsError::NoCookie(runtime));
        }
        // The version is a 32-bit number in a 64-bit word.
        let hex = u32::try_from(word(&head, 1)).map_err(|_| DebugOffsetsError::NoCookie(runtime))?;
        let version = PyVersion::from_hex(hex);
        let words = if (version.major, version.minor) == (3, 13) {
            let all = mem.read_array::<{ WORDS_3_13 * 8 }>(runtime)?;
            (0..WORDS_3_13).map(|i| word(&all, i)).collect()
        } else {
            Vec::new()
        };
        Ok(Self {
            version,
            free_threaded: word(&head, 2) != 0,
            words,
        })
    }

    fn lookup(&self, name: &str) -> Option<u64> {
        let &(at, _) = NAMES_3_13.iter().find(|(_, known)| *known == name)?;
        self.words.get(at).copied()
    }

    /// The layout: their own word where they have one, the table's for the rest.
    ///
    /// # Errors
    /// When the version is not 3.13 or an offset is absurd.
    pub fn layout(&self) -> Result<Layout, DebugOffsetsError> {
        if self.words.is_empty() {
            return Err(DebugOffsetsError::OtherVersion(self.version));
        }
        let minor = self.version.minor;
        let table = table(minor).ok_or(LayoutError::UnknownMinor(minor))?;
        Ok(Layout::from_lookup(minor, |name| {
            self.lookup(name)
                .or_else(|| table.iter().find(|(known, _)| *known == name).map(|&(_, at)| at))
        })?)
    }

    /// The C paths whose offset here is not the table's. Empty for every 3.13 met so far.
    #[must_use]
    pub fn differing(&self) -> Vec<&'static str> {
        let Some(table) = table(self.version.minor) else {
            return Vec::new();
        };
        table
            .iter()
            .filter(|(name, at)| self.lookup(name).is_some_and(|said| said != *at))
            .map(|&(name, _)| name)
            .collect()
    }
}
