//! `_Py_DebugOffsets`: what an interpreter from 3.13 on says of its own structs. It is the first thing in `_PyRuntime`.
//!
//! The order of its words belongs to a minor version. It does not hold all that is needed (allocators,
//! `interpreters.main`, `_co_firsttraceable`), so it is laid over the table of its build. An answer that differs from the
//! table is taken, it is the interpreter's own, and told in [`DebugOffsets::differing`]; the whole must still pass
//! `Layout::validate`.
//!
//! Source: `struct _Py_DebugOffsets`,
//! <https://github.com/python/cpython/blob/v3.13.0/Include/internal/pycore_runtime.h#L51>,
//! <https://github.com/python/cpython/blob/v3.14.0/Include/internal/pycore_debug_offsets.h>,
//! <https://github.com/python/cpython/blob/v3.15.0/Include/internal/pycore_debug_offsets.h>.

use super::{Layout, LayoutError, table};
use crate::frames::version::{Build, PyVersion};
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};

/// The first 8 bytes, constant from before Python starts.
const COOKIE: &[u8; 8] = b"xdebugpy";

/// One minor version's struct: how many words of 8 bytes it has, and word numbers with the C path whose offset each is.
struct Words {
    count: usize,
    names: &'static [(usize, &'static str)],
}

/// The struct of Python 3.`minor`.
const fn words_of(minor: u8) -> Option<Words> {
    Some(match minor {
        13 => Words {
            count: 73,
            names: NAMES_3_13,
        },
        14 => Words {
            count: 95,
            names: NAMES_3_14,
        },
        15 => Words {
            count: 111,
            names: NAMES_3_15,
        },
        _ => return None,
    })
}

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

const NAMES_3_14: &[(usize, &str)] = &[
    (4, "_PyRuntimeState._finalizing"),
    (5, "_PyRuntimeState.interpreters.head"),
    (7, "PyInterpreterState.id"),
    (8, "PyInterpreterState.next"),
    (9, "PyInterpreterState.threads.head"),
    (24, "PyThreadState.next"),
    (25, "PyThreadState.interp"),
    (26, "PyThreadState.current_frame"),
    (27, "PyThreadState.thread_id"),
    (28, "PyThreadState.native_thread_id"),
    (32, "_PyInterpreterFrame.previous"),
    (33, "_PyInterpreterFrame.f_executable"),
    (34, "_PyInterpreterFrame.instr_ptr"),
    (36, "_PyInterpreterFrame.owner"),
    (38, "_PyInterpreterFrame.tlbc_index"),
    (39, "sizeof(PyCodeObject)"),
    (40, "PyCodeObject.co_filename"),
    (41, "PyCodeObject.co_name"),
    (42, "PyCodeObject.co_qualname"),
    (43, "PyCodeObject.co_linetable"),
    (44, "PyCodeObject.co_firstlineno"),
    (48, "PyCodeObject.co_code_adaptive"),
    (49, "PyCodeObject.co_tlbc"),
    (51, "PyObject.ob_type"),
    (53, "PyTypeObject.tp_name"),
    (75, "PyVarObject.ob_size"),
    (76, "PyBytesObject.ob_sval"),
    (78, "PyASCIIObject.state"),
    (79, "PyASCIIObject.length"),
    (80, "sizeof(PyASCIIObject)"),
];

const NAMES_3_15: &[(usize, &str)] = &[
    (4, "_PyRuntimeState._finalizing"),
    (5, "_PyRuntimeState.interpreters.head"),
    (7, "PyInterpreterState.id"),
    (8, "PyInterpreterState.next"),
    (9, "PyInterpreterState.threads.head"),
    (24, "PyThreadState.next"),
    (25, "PyThreadState.interp"),
    (26, "PyThreadState.current_frame"),
    (30, "PyThreadState.thread_id"),
    (31, "PyThreadState.native_thread_id"),
    (40, "_PyInterpreterFrame.previous"),
    (41, "_PyInterpreterFrame.f_executable"),
    (42, "_PyInterpreterFrame.instr_ptr"),
    (44, "_PyInterpreterFrame.owner"),
    (46, "_PyInterpreterFrame.tlbc_index"),
    (47, "sizeof(PyCodeObject)"),
    (48, "PyCodeObject.co_filename"),
    (49, "PyCodeObject.co_name"),
    (50, "PyCodeObject.co_qualname"),
    (51, "PyCodeObject.co_linetable"),
    (52, "PyCodeObject.co_firstlineno"),
    (56, "PyCodeObject.co_code_adaptive"),
    (57, "PyCodeObject.co_tlbc"),
    (59, "PyObject.ob_type"),
    (61, "PyTypeObject.tp_name"),
    (87, "PyVarObject.ob_size"),
    (88, "PyBytesObject.ob_sval"),
    (90, "PyASCIIObject.state"),
    (91, "PyASCIIObject.length"),
    (92, "sizeof(PyASCIIObject)"),
    (93, "sizeof(PyCompactUnicodeObject)"),
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
    /// Reads them at `runtime`, the address of `_PyRuntime`. Of versions whose struct is not known only the version and the
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
        let words = match words_of(version.minor).filter(|_| version.major == 3) {
            Some(known) => {
                let all = mem.read_vec(runtime, known.count * 8)?;
                (0..known.count).map(|i| word(&all, i)).collect()
            }
            None => Vec::new(),
        };
        Ok(Self {
            version,
            free_threaded: word(&head, 2) != 0,
            words,
        })
    }

    fn lookup(&self, name: &str) -> Option<u64> {
        let known = words_of(self.version.minor)?.names;
        let &(at, _) = known.iter().find(|(_, known)| *known == name)?;
        self.words.get(at).copied()
    }

    /// Which build this is.
    #[must_use]
    pub const fn build(&self) -> Build {
        Build {
            minor: self.version.minor,
            free_threaded: self.free_threaded,
        }
    }

    /// The layout: their own word where they have one, the table's for the rest.
    ///
    /// # Errors
    /// When the version is not known or an offset is absurd.
    pub fn layout(&self) -> Result<Layout, DebugOffsetsError> {
        if self.words.is_empty() {
            return Err(DebugOffsetsError::OtherVersion(self.version));
        }
        let build = self.build();
        let table = table(build).ok_or(LayoutError::UnknownBuild(build))?;
        Ok(Layout::from_lookup(build, |name| {
            self.lookup(name)
                .or_else(|| table.iter().find(|(known, _)| *known == name).map(|&(_, at)| at))
        })?)
    }

    /// The C paths whose offset here is not the table's. Empty for every build met so far.
    #[must_use]
    pub fn differing(&self) -> Vec<&'static str> {
        let Some(table) = table(self.build()) else {
            return Vec::new();
        };
        table
            .iter()
            .filter(|(name, at)| self.lookup(name).is_some_and(|said| said != *at))
            .map(|&(name, _)| name)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::BlobMemory;

    const AT: RemoteAddr = RemoteAddr(0x4000);

    /// What a 3.13.`micro` with exactly the table's layout says.
    fn image(micro: u64) -> Vec<u64> {
        image_of(Build::default_of(13), micro)
    }

    fn image_of(build: Build, micro: u64) -> Vec<u64> {
        let known = words_of(build.minor).unwrap();
        let mut words = vec![0; known.count];
        words[0] = u64::from_le_bytes(*COOKIE);
        words[1] = 0x0300_00f0 | u64::from(build.minor) << 16 | micro << 8;
        words[2] = u64::from(build.free_threaded);
        let table = table(build).unwrap();
        for &(word, name) in known.names {
            // Builds with the GIL say 0 for what they do not have.
            words[word] = table.iter().find(|(known, _)| *known == name).map_or(0, |&(_, at)| at);
        }
        words
    }

    #[test]
    fn every_build_with_debug_offsets_is_read() {
        for build in Build::all().filter(|build| build.minor >= 13) {
            let found = read(&image_of(build, 1)).unwrap();
            assert_eq!(found.build(), build);
            assert_eq!(found.differing(), [""; 0], "{build}");
            assert_eq!(found.layout().unwrap(), Layout::of(build).unwrap());
        }
    }

    fn read(words: &[u64]) -> Result<DebugOffsets, DebugOffsetsError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut blob = BlobMemory::new();
        blob.push(AT, &bytes).unwrap();
        DebugOffsets::read(&blob, AT)
    }

    #[test]
    fn the_interpreters_word_is_taken_before_the_tables() {
        let mut words = image(2);
        let same = read(&words).unwrap();
        assert_eq!(same.version, PyVersion::new(3, 13, 2));
        assert!(!same.free_threaded && same.differing().is_empty());
        assert_eq!(same.layout().unwrap(), Layout::of_minor(13).unwrap());
        words[35] += 8;
        let other = read(&words).unwrap();
        assert_eq!(other.differing(), ["PyCodeObject.co_filename"]);
        assert_eq!(other.layout().unwrap().code.filename, words[35]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut words = image(2);
        words[35] = 1 << 40;
        assert!(matches!(
            read(&words).unwrap().layout(),
            Err(DebugOffsetsError::Layout(_))
        ));
        words[0] += 1;
        assert!(matches!(read(&words), Err(DebugOffsetsError::NoCookie(AT))));
        let later = [u64::from_le_bytes(*COOKIE), 0x0310_02f0, 1];
        let later = read(&later).unwrap();
        assert!(later.free_threaded);
        assert!(matches!(later.layout(), Err(DebugOffsetsError::OtherVersion(_))));
    }
}
