//! Where the fields of CPython's structs are: [`Layout`], one per interpreter build.
//!
//! A layout comes from one of three sources, tried in this order: the `_Py_DebugOffsets` that a process carries from 3.13
//! on (`debug_offsets`), laid over the table of its build; that table alone (`layout/v3_NN.rs`, and `v3_NNt.rs` for builds
//! without the GIL, made by `scripts/gen-offsets` from CPython's own headers); the DWARF of the interpreter's file or of its
//! separate debug file (`dwarf`). All three answer questions such as "where is `PyCodeObject.co_filename`?", and [`Layout::from_lookup`] is the one place that asks.
//!
//! What it refuses to do: guess. A name without an answer is an error, an absurd answer is an error, and a layout is
//! believed only after `Layout::validate` has followed it through the live process.

use super::version::{Build, SUPPORTED_MINORS};

mod debug_offsets;
pub(crate) mod objects;
mod v3_07;
mod v3_08;
mod v3_09;
mod v3_10;
mod v3_11;
mod v3_12;
mod v3_13;
mod v3_13t;
mod v3_14;
mod v3_14t;
mod v3_15;
mod v3_15t;
mod validate;

pub use debug_offsets::{DebugOffsets, DebugOffsetsError};
pub use objects::{GilPlace, ObjectLayout};
pub use validate::ValidationError;

/// No field that we use lies further into its struct. The largest real ones are in `PyInterpreterState` (7,376 in
/// 3.13); offsets that come from a target's DWARF or debug offsets are held to this.
const MAX_FIELD_OFFSET: u64 = 1 << 20;

/// A code object's fixed part is at most this long (240 bytes in 3.14 without the GIL).
const MAX_CODE_STRUCT_BYTES: u64 = 1024;

/// Why a source did not give a layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The version is none that pyheap knows.
    #[error("there is no layout for Python {0}")]
    UnknownBuild(Build),
    /// The source does not know a name.
    #[error("the offset of {0} is not known")]
    Missing(&'static str),
    /// The source says something that cannot be.
    #[error("the offset {offset} of {name} is absurd")]
    Absurd {
        /// The C path.
        name: &'static str,
        /// What was said.
        offset: u64,
    },
}

/// Every offset, in bytes, that the reader and the shim need. `None` means: this version has no such field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The X of Python 3.X.
    pub minor: u8,
    /// A build without the GIL.
    pub free_threaded: bool,
    /// `_PyRuntimeState`, the type of the symbol `_PyRuntime`.
    pub runtime: RuntimeLayout,
    /// `PyInterpreterState`.
    pub interpreter: InterpreterLayout,
    /// `PyThreadState`.
    pub thread: ThreadLayout,
    /// `PyFrameObject` up to 3.10, `_PyInterpreterFrame` from 3.11.
    pub frame: FrameLayout,
    /// `PyCodeObject`.
    pub code: CodeLayout,
    /// `str` objects.
    pub unicode: UnicodeLayout,
    /// `bytes` objects.
    pub bytes: BytesLayout,
    /// `PyObject.ob_type`.
    pub ob_type: u64,
    /// `PyTypeObject.tp_name`, a `char *`.
    pub tp_name: u64,
}

/// Offsets in `_PyRuntimeState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuntimeLayout {
    /// `interpreters.head`: the newest interpreter.
    pub interpreters_head: u64,
    /// `interpreters.main`.
    pub interpreters_main: u64,
    /// `core_initialized`, an int.
    pub core_initialized: u64,
    /// `initialized`, an int.
    pub initialized: u64,
    /// `finalizing` (3.7, 3.8) or `_finalizing`: the thread state that ends the process, else null.
    pub finalizing: u64,
    /// `gilstate.tstate_current`, up to 3.11: the thread state that holds the GIL.
    pub tstate_current: Option<u64>,
    /// `allocators`, from 3.12.
    pub allocators: Option<AllocatorsLayout>,
    /// `autoTSSkey`, a `Py_tss_t`, 3.12 to 3.14: the key under which each thread keeps its state.
    pub tss_key: Option<u64>,
}

/// Offsets of `_PyRuntimeState.allocators`, from 3.12. The three structs are `PyMemAllocatorEx`, 40 bytes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocatorsLayout {
    /// `mutex`: a `PyThread_type_lock` in 3.12, a `PyMutex` from 3.13.
    pub mutex: u64,
    /// `standard.raw`.
    pub raw: u64,
    /// `standard.mem`.
    pub mem: u64,
    /// `standard.obj`.
    pub obj: u64,
}

/// Offsets in `PyInterpreterState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterpreterLayout {
    /// `next`: the next older interpreter.
    pub next: u64,
    /// `id`, an i64; 0 is the main interpreter.
    pub id: u64,
    /// `tstate_head` up to 3.10, then `threads.head`.
    pub threads_head: u64,
    /// `runtime`, from 3.9: back to `_PyRuntime`.
    pub runtime: Option<u64>,
}

/// Offsets in `PyThreadState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadLayout {
    /// `next`: the next older thread.
    pub next: u64,
    /// `interp`: back to the interpreter.
    pub interp: u64,
    /// How to come to the innermost frame.
    pub top: TopFrame,
    /// `thread_id`: what `pthread_self()` says on that thread.
    pub thread_id: u64,
    /// `native_thread_id`, from 3.11: what `gettid()` says.
    pub native_thread_id: Option<u64>,
    /// `state`, an int, from 3.14 without the GIL: 1 while the thread may touch objects.
    pub state: Option<u64>,
}

/// The way from a thread state to its innermost frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopFrame {
    /// The frame's address is at this offset: `frame` up to 3.10, `current_frame` from 3.13.
    Direct(u64),
    /// 3.11 and 3.12: `cframe` is at the first offset, and in the `_PyCFrame` there `current_frame` at the second.
    ByCFrame {
        /// `PyThreadState.cframe`.
        cframe: u64,
        /// `_PyCFrame.current_frame`.
        current_frame: u64,
    },
}

/// Offsets in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameLayout {
    /// `f_back`, from 3.11 `previous`.
    pub back: u64,
    /// `f_code`, from 3.13 `f_executable`. From 3.14 the lowest bits may carry a tag: see [`FrameLayout::untagged`].
    pub code: u64,
    /// Where execution is: `f_lasti` (an int), `prev_instr` (3.11, 3.12) or `instr_ptr` (from 3.13), pointers.
    pub instr: u64,
    /// `owner`, one byte, from 3.11.
    pub owner: Option<u64>,
    /// The least value of `owner` that marks a frame of the interpreter's own, from 3.12: everything else in such a frame is
    /// garbage.
    pub owner_c_stack: Option<u8>,
    /// `tlbc_index`, an int, from 3.14 without the GIL: which copy of the bytecode `instr` points into.
    pub tlbc_index: Option<u64>,
}

impl FrameLayout {
    /// The address of a code object, of the word that a frame holds: from 3.14 with a tag in its lowest bits.
    #[must_use]
    pub const fn untagged(word: u64) -> u64 {
        word & !7
    }
}

/// The value of a frame's `owner` when it belongs to a generator, from 3.11.
pub const OWNER_GENERATOR: u8 = 1;

/// Offsets in `PyCodeObject`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeLayout {
    /// `sizeof(PyCodeObject)`.
    pub size: u64,
    /// `co_flags`, an int.
    pub flags: u64,
    /// `co_firstlineno`, an int.
    pub first_line: u64,
    /// `co_filename`, a str.
    pub filename: u64,
    /// `co_name`, a str.
    pub name: u64,
    /// `co_qualname`, a str, from 3.11.
    pub qualname: Option<u64>,
    /// `co_lnotab` up to 3.9, then `co_linetable`: a bytes object.
    pub line_table: u64,
    /// `co_code` up to 3.10: a bytes object.
    pub code_bytes: Option<u64>,
    /// `co_code_adaptive` from 3.11: the instructions begin there, in the code object.
    pub code_adaptive: Option<u64>,
    /// `_co_firsttraceable`, an int, from 3.11.
    pub first_traceable: Option<u64>,
    /// `co_version`, a u32, from 3.12.
    pub version: Option<u64>,
    /// `co_tlbc`, from 3.14 without the GIL: an array of the threads' copies of the bytecode, first its length.
    pub tlbc: Option<u64>,
}

/// Offsets in `str` objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnicodeLayout {
    /// `length`, in characters.
    pub length: u64,
    /// `hash`, or -1 while nobody has asked for it.
    pub hash: u64,
    /// `state`, 32 bits; the meaning of its bits is in [`UnicodeState`](super::text::UnicodeState).
    pub state: u64,
    /// The lowest bit of `kind` within it.
    pub kind_bit: u8,
    /// The characters of a compact ASCII string.
    pub ascii_data: u64,
    /// The characters of a compact string that is not ASCII.
    pub compact_data: u64,
    /// The pointer to the characters of a string that is not compact.
    pub data_pointer: u64,
}

/// Offsets in `bytes` objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BytesLayout {
    /// `ob_size`.
    pub size: u64,
    /// `ob_sval`.
    pub data: u64,
}

/// The table of one build.
const fn table(build: Build) -> Option<&'static [(&'static str, u64)]> {
    Some(match (build.minor, build.free_threaded) {
        (7, false) => v3_07::TABLE,
        (8, false) => v3_08::TABLE,
        (9, false) => v3_09::TABLE,
        (10, false) => v3_10::TABLE,
        (11, false) => v3_11::TABLE,
        (12, false) => v3_12::TABLE,
        (13, false) => v3_13::TABLE,
        (13, true) => v3_13t::TABLE,
        (14, false) => v3_14::TABLE,
        (14, true) => v3_14t::TABLE,
        (15, false) => v3_15::TABLE,
        (15, true) => v3_15t::TABLE,
        _ => return None,
    })
}

impl Layout {
    /// The layout of `build` by the built-in table.
    ///
    /// # Errors
    /// When there is no table of it.
    pub fn of(build: Build) -> Result<Self, LayoutError> {
        let table = table(build).ok_or(LayoutError::UnknownBuild(build))?;
        Self::from_lookup(build, |name| {
            table.iter().find(|(known, _)| *known == name).map(|&(_, at)| at)
        })
    }

    /// The layout of the default build of Python 3.`minor` by the built-in table.
    ///
    /// # Errors
    /// When there is no table of it.
    pub fn of_minor(minor: u8) -> Result<Self, LayoutError> {
        Self::of(Build::default_of(minor))
    }

    /// Which build this layout is of.
    #[must_use]
    pub const fn build(&self) -> Build {
        Build {
            minor: self.minor,
            free_threaded: self.free_threaded,
        }
    }

    /// Builds a layout by asking `lookup` for each C path that `build` has.
    ///
    /// # Errors
    /// When the version is not supported, or an answer is missing or absurd.
    pub fn from_lookup(build: Build, lookup: impl Fn(&str) -> Option<u64>) -> Result<Self, LayoutError> {
        let Build { minor, free_threaded } = build;
        if !SUPPORTED_MINORS.contains(&minor) {
            return Err(LayoutError::UnknownBuild(build));
        }
        let at = |name: &'static str| -> Result<u64, LayoutError> {
            match lookup(name).ok_or(LayoutError::Missing(name))? {
                offset if offset <= MAX_FIELD_OFFSET => Ok(offset),
                offset => Err(LayoutError::Absurd { name, offset }),
            }
        };
        let from = |first: u8, name| (minor >= first).then(|| at(name)).transpose();
        let until = |last: u8, name| (minor <= last).then(|| at(name)).transpose();
        // Without the GIL, each thread has its own copy of the bytecode from 3.14 on.
        let copies = |name| (minor >= 14 && free_threaded).then(|| at(name)).transpose();
        let by = |first: u8, new, old| at(if minor >= first { new } else { old });

        let allocators = if minor >= 12 {
            Some(AllocatorsLayout {
                mutex: at("_PyRuntimeState.allocators.mutex")?,
                raw: at("_PyRuntimeState.allocators.standard.raw")?,
                mem: at("_PyRuntimeState.allocators.standard.mem")?,
                obj: at("_PyRuntimeState.allocators.standard.obj")?,
            })
        } else {
            None
        };
        let top = match minor {
            ..=10 => TopFrame::Direct(at("PyThreadState.frame")?),
            11 | 12 => TopFrame::ByCFrame {
                cframe: at("PyThreadState.cframe")?,
                current_frame: at("_PyCFrame.current_frame")?,
            },
            _ => TopFrame::Direct(at("PyThreadState.current_frame")?),
        };
        let frame = match minor {
            ..=10 => FrameLayout {
                back: at("PyFrameObject.f_back")?,
                code: at("PyFrameObject.f_code")?,
                instr: at("PyFrameObject.f_lasti")?,
                owner: None,
                owner_c_stack: None,
                tlbc_index: None,
            },
            _ => FrameLayout {
                back: at("_PyInterpreterFrame.previous")?,
                code: by(13, "_PyInterpreterFrame.f_executable", "_PyInterpreterFrame.f_code")?,
                instr: by(13, "_PyInterpreterFrame.instr_ptr", "_PyInterpreterFrame.prev_instr")?,
                owner: Some(at("_PyInterpreterFrame.owner")?),
                owner_c_stack: (minor >= 12).then_some(3),
                tlbc_index: copies("_PyInterpreterFrame.tlbc_index")?,
            },
        };
        let layout = Self {
            minor,
            free_threaded,
            runtime: RuntimeLayout {
                interpreters_head: at("_PyRuntimeState.interpreters.head")?,
                interpreters_main: at("_PyRuntimeState.interpreters.main")?,
                core_initialized: at("_PyRuntimeState.core_initialized")?,
                initialized: at("_PyRuntimeState.initialized")?,
                finalizing: by(9, "_PyRuntimeState._finalizing", "_PyRuntimeState.finalizing")?,
                tstate_current: until(11, "_PyRuntimeState.gilstate.tstate_current")?,
                allocators,
                tss_key: matches!(minor, 12..=14)
                    .then(|| at("_PyRuntimeState.autoTSSkey"))
                    .transpose()?,
            },
            interpreter: InterpreterLayout {
                next: at("PyInterpreterState.next")?,
                id: at("PyInterpreterState.id")?,
                threads_head: by(11, "PyInterpreterState.threads.head", "PyInterpreterState.tstate_head")?,
                runtime: from(9, "PyInterpreterState.runtime")?,
            },
            thread: ThreadLayout {
                next: at("PyThreadState.next")?,
                interp: at("PyThreadState.interp")?,
                top,
                thread_id: at("PyThreadState.thread_id")?,
                native_thread_id: from(11, "PyThreadState.native_thread_id")?,
                state: copies("PyThreadState.state")?,
            },
            frame,
            code: CodeLayout {
                size: at("sizeof(PyCodeObject)")?,
                flags: at("PyCodeObject.co_flags")?,
                first_line: at("PyCodeObject.co_firstlineno")?,
                filename: at("PyCodeObject.co_filename")?,
                name: at("PyCodeObject.co_name")?,
                qualname: from(11, "PyCodeObject.co_qualname")?,
                line_table: by(10, "PyCodeObject.co_linetable", "PyCodeObject.co_lnotab")?,
                code_bytes: until(10, "PyCodeObject.co_code")?,
                code_adaptive: from(11, "PyCodeObject.co_code_adaptive")?,
                first_traceable: from(11, "PyCodeObject._co_firsttraceable")?,
                version: from(12, "PyCodeObject.co_version")?,
                tlbc: copies("PyCodeObject.co_tlbc")?,
            },
            unicode: UnicodeLayout {
                length: at("PyASCIIObject.length")?,
                hash: at("PyASCIIObject.hash")?,
                state: at("PyASCIIObject.state")?,
                // `interned` has a byte of its own in front where it is written without a lock.
                kind_bit: if minor >= 14 && free_threaded { 8 } else { 2 },
                ascii_data: at("sizeof(PyASCIIObject)")?,
                compact_data: at("sizeof(PyCompactUnicodeObject)")?,
                data_pointer: at("PyUnicodeObject.data")?,
            },
            bytes: BytesLayout {
                size: at("PyVarObject.ob_size")?,
                data: at("PyBytesObject.ob_sval")?,
            },
            ob_type: at("PyObject.ob_type")?,
            tp_name: at("PyTypeObject.tp_name")?,
        };
        match layout.code.prefix_len() {
            len if len <= MAX_CODE_STRUCT_BYTES => Ok(layout),
            offset => Err(LayoutError::Absurd {
                name: "sizeof(PyCodeObject)",
                offset,
            }),
        }
    }

    /// Where the raw instruction number of a frame counts from, and in what.
    #[must_use]
    pub const fn instr_unit(&self) -> super::lines::InstrUnit {
        super::lines::InstrUnit::of_minor(self.minor)
    }
}

impl CodeLayout {
    /// So many bytes from the start of a code object hold all of its fields that are read here.
    #[must_use]
    pub fn prefix_len(&self) -> u64 {
        let optional = [
            self.qualname,
            self.code_bytes,
            self.first_traceable,
            self.version,
            self.tlbc,
        ];
        [self.flags, self.first_line, self.filename, self.name, self.line_table]
            .into_iter()
            .chain(optional.into_iter().flatten())
            .map(|offset| offset.saturating_add(8))
            .chain([self.size, self.code_adaptive.unwrap_or(0)])
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_supported_build_has_a_complete_table() {
        for build in Build::all() {
            let layout = Layout::of(build).unwrap();
            assert_eq!(layout.build(), build);
            assert!(layout.code.prefix_len() <= 240, "{build}");
        }
        let unknown = Build::default_of(16);
        assert_eq!(Layout::of(unknown), Err(LayoutError::UnknownBuild(unknown)));
    }

    #[test]
    fn an_absurd_offset_is_refused() {
        let error = Layout::from_lookup(Build::default_of(12), |_| Some(u64::MAX)).unwrap_err();
        assert!(matches!(error, LayoutError::Absurd { offset: u64::MAX, .. }));
        assert!(
            Layout::from_lookup(Build::default_of(12), |_| Some(0xffff)).is_err(),
            "a code object of 64 KiB"
        );
    }
}
