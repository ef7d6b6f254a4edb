//! Reads CPython's code objects: names, file, and the line of any of their instructions.
//!
//! [`CodeInfo::read`] needs the fixed part of the code object, its name, file name and qualified name, and its line
//! table, and nothing else: so it works on what the shim has copied. [`resolve`] then answers for one frame.
//!
//! What it refuses to do: check types. A copied code object has none that could be read; in a live process
//! `text::expect_type` does it first.

use super::layout::Layout;
use super::lines::{FrameLine, InstrUnit, LineTable};
use super::text::{self, read_bytes, read_str};
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};

/// A line table longer than this is cut. The longest in the standard library of any version is below 100 KiB;
/// generated modules of some 10 MB of source come near this.
pub const MAX_LINE_TABLE_BYTES: usize = 8 << 20;

/// `co_flags` of generators (0x20), coroutines (0x80) and asynchronous generators (0x200).
const CO_ANY_GENERATOR: u32 = 0x20 | 0x80 | 0x200;

/// The name and the file name of the helper code that 3.12 and later run around a specialised `Class(...)` call.
const INIT_HELPER: &str = "__init__";

/// Why a code object could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodeError {
    /// It, or what it points to, cannot be read.
    #[error("a code object cannot be read")]
    Memory(#[from] MemoryError),
    /// A pointer that must be set is null.
    #[error("{0} is null")]
    Null(&'static str),
    /// A value cannot be what it is taken for.
    #[error("{0} makes no sense")]
    Absurd(&'static str),
    /// The object is of another type.
    #[error("expected an object of type {expected}, found one of type {found:?}")]
    WrongType {
        /// The type's name.
        expected: &'static str,
        /// What the target says.
        found: String,
    },
}

/// What a code object says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeInfo {
    /// `co_filename`.
    pub filename: String,
    /// `co_name`.
    pub name: String,
    /// `co_qualname`, from 3.11.
    pub qualname: Option<String>,
    /// `co_firstlineno`; 0 when it is negative.
    pub first_line: u32,
    /// `co_flags`.
    pub flags: u32,
    /// `_co_firsttraceable` in code units, from 3.11: instructions before it are the function's prologue.
    pub first_traceable: Option<u32>,
    /// `co_version`, from 3.12.
    pub version: Option<u32>,
    /// `co_lnotab` or `co_linetable`.
    pub line_table: LineTable,
    /// True when the line table could not be read to its end: lines are missing, names are right.
    pub line_table_cut: bool,
}

/// One frame, resolved. Its code object has the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResolvedFrame {
    /// The line: of the instruction, or the code's first one where an instruction has none.
    pub line: u32,
}

/// The fixed part of a code object, as bytes.
struct Fields(Vec<u8>);

impl Fields {
    fn bytes<const N: usize>(&self, at: u64) -> Result<[u8; N], CodeError> {
        usize::try_from(at)
            .ok()
            .and_then(|at| self.0.get(at..)?.first_chunk::<N>())
            .copied()
            .ok_or(CodeError::Absurd("an offset in the code object"))
    }

    fn u32(&self, at: u64) -> Result<u32, CodeError> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    /// An int that is never negative where it makes sense.
    fn unsigned(&self, at: u64) -> Result<u32, CodeError> {
        let value = self.bytes(at).map(i32::from_le_bytes)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn pointer(&self, at: u64) -> Result<RemoteAddr, CodeError> {
        self.bytes(at).map(u64::from_le_bytes).map(RemoteAddr)
    }
}

impl CodeInfo {
    /// Reads the code object at `address`.
    ///
    /// # Errors
    /// When the object or one of its names cannot be read or makes no sense. A line table that cannot be read is not
    /// an error: the names are worth having without it, and `line_table_cut` says so.
    pub fn read(mem: &impl RemoteMemory, address: RemoteAddr, layout: &Layout) -> Result<Self, CodeError> {
        if address.is_null() {
            return Err(CodeError::Null("a code object"));
        }
        let at = &layout.code;
        // `Layout` bounds the length by 1 KiB.
        let len = usize::try_from(at.prefix_len()).map_err(|_| CodeError::Absurd("the size of code objects"))?;
        let fields = Fields(mem.read_vec(address, len)?);
        let string = |offset| read_str(mem, fields.pointer(offset)?, layout);
        let first_line = fields.unsigned(at.first_line)?;
        let table = fields.pointer(at.line_table)?;
        let table = read_bytes(mem, table, layout, MAX_LINE_TABLE_BYTES).unwrap_or(text::RemoteBytes {
            bytes: Vec::new(),
            cut: true,
        });
        Ok(Self {
            filename: string(at.filename)?,
            name: string(at.name)?,
            qualname: at.qualname.map(string).transpose()?,
            first_line,
            flags: fields.u32(at.flags)?,
            first_traceable: at.first_traceable.map(|offset| fields.unsigned(offset)).transpose()?,
            version: at.version.map(|offset| fields.u32(offset)).transpose()?,
            line_table: LineTable::new(layout.instr_unit(), first_line, table.bytes),
            line_table_cut: table.cut,
        })
    }

    /// The line of the instruction `raw_instr`, which is a frame's `f_lasti` up to 3.10 and the distance in bytes from
    /// the thread's bytecode later. Negative: the frame has not started.
    #[must_use]
    pub fn line_of(&self, raw_instr: i32) -> FrameLine {
        self.line_table.line_of(raw_instr)
    }

    /// The qualified name where there is one, else the name.
    #[must_use]
    pub fn display_name(&self) -> &str {
        self.qualname.as_deref().unwrap_or(&self.name)
    }

    /// True while a frame is in the prologue of its function (making cells, or the generator object): from 3.11, and
    /// not for generators, whose frames begin there when they are resumed for the first time.
    fn is_incomplete(&self, raw_instr: i32) -> bool {
        let Some(first_traceable) = self.first_traceable else {
            return false;
        };
        if self.flags & CO_ANY_GENERATOR != 0 {
            return false;
        }
        match InstrUnit::ByteDistance.bytes(raw_instr) {
            Some(bytes) => bytes / 2 < u64::from(first_traceable),
            None => true,
        }
    }

    /// The helper around `Class(...)`: it is no function of the program.
    fn is_init_helper(&self) -> bool {
        self.name == INIT_HELPER && self.filename == INIT_HELPER
    }
}

/// Resolves one frame of a stack; `None` when it is to be left out.
///
/// An incomplete frame is shown, with its first line, when it is the innermost one (the allocation is its own: its
/// caller would be blamed otherwise), and left out elsewhere, as Python's own tracebacks do. The `__init__` helper of
/// 3.12 and later is always left out.
#[must_use]
pub fn resolve(info: &CodeInfo, raw_instr: i32, innermost: bool) -> Option<ResolvedFrame> {
    if info.is_init_helper() {
        return None;
    }
    let line = if info.is_incomplete(raw_instr) {
        if !innermost {
            return None;
        }
        info.first_line
    } else {
        info.line_of(raw_instr).or(info.first_line)
    };
    Some(ResolvedFrame { line })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(flags: u32, first_traceable: Option<u32>) -> CodeInfo {
        CodeInfo {
            filename: "a.py".into(),
            name: "f".into(),
            qualname: None,
            first_line: 7,
            flags,
            first_traceable,
            version: None,
            // One unit of line 7, then seven of line 9.
            line_table: LineTable::new(InstrUnit::ByteDistance, 7, vec![0x80, 0x00, 0xe6, 0x00, 0x00]),
            line_table_cut: false,
        }
    }

    #[test]
    fn incomplete_frames_are_shown_only_when_innermost() {
        let info = info(0, Some(2));
        let line = |raw, innermost| resolve(&info, raw, innermost).map(|frame| frame.line);
        assert_eq!(line(2, true), Some(7));
        assert_eq!(line(2, false), None);
        assert_eq!(line(-2, true), Some(7));
        assert_eq!(line(-2, false), None);
        assert_eq!(line(4, false), Some(9));
    }

    #[test]
    fn a_generator_in_its_prologue_is_shown() {
        let frame = resolve(&info(0x20, Some(4)), 2, false).unwrap();
        assert_eq!(frame.line, 9);
    }

    /// A code object and its parts at 0x1000, as Python 3.`minor` would have it: `f` in `a.py`, line 7.
    fn image(layout: &Layout) -> Vec<u8> {
        let mut bytes = vec![0_u8; 1024];
        let mut put = |at: u64, value: &[u8]| {
            let at = usize::try_from(at).unwrap();
            bytes[at..at + value.len()].copy_from_slice(value);
        };
        let unicode = &layout.unicode;
        let (filename, name, table) = (300_u64, 400_u64, 500_u64);
        for (object, text) in [(filename, "a.py"), (name, "f")] {
            put(object + unicode.length, &(text.len() as u64).to_le_bytes());
            // Kind 1, compact, ASCII.
            put(object + unicode.state, &(0x19_u32 << unicode.kind_bit).to_le_bytes());
            put(object + unicode.ascii_data, text.as_bytes());
        }
        put(table + layout.bytes.size, &4_u64.to_le_bytes());
        put(table + layout.bytes.data, &[0x80, 0x00, 0x80, 0x00]);
        let code = &layout.code;
        put(code.filename, &(0x1000 + filename).to_le_bytes());
        put(code.name, &(0x1000 + name).to_le_bytes());
        if let Some(qualname) = code.qualname {
            put(qualname, &(0x1000 + name).to_le_bytes());
        }
        put(code.line_table, &(0x1000 + table).to_le_bytes());
        put(code.first_line, &7_u32.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8], layout: &Layout) -> Result<CodeInfo, CodeError> {
        let mut blob = crate::frames::BlobMemory::new();
        blob.push(RemoteAddr(0x1000), bytes).unwrap();
        CodeInfo::read(&blob, RemoteAddr(0x1000), layout)
    }

    #[test]
    fn damaged_code_objects_are_an_answer_or_an_error() {
        use rand::{RngExt, SeedableRng};
        let mut random = rand::rngs::SmallRng::seed_from_u64(7);
        let mut answers = 0;
        for build in crate::frames::Build::all() {
            let layout = Layout::of(build).unwrap();
            let sound = image(&layout);
            let info = read(&sound, &layout).unwrap();
            assert_eq!(
                (info.filename.as_str(), info.display_name(), info.first_line),
                ("a.py", "f", 7)
            );
            for _ in 0..2000 {
                let mut bytes = sound.clone();
                for _ in 0..random.random_range(1..20) {
                    let at = random.random_range(0..600_usize);
                    bytes[at] = random.random();
                }
                if let Ok(info) = read(&bytes, &layout) {
                    assert!(info.name.chars().count() <= 4097);
                    let _ = resolve(&info, random.random(), random.random());
                    answers += 1;
                }
            }
        }
        assert!((100..23_900).contains(&answers), "{answers} of 24,000");
    }

    #[test]
    fn a_cut_copy_keeps_its_names() {
        let layout = Layout::of_minor(12).unwrap();
        let mut bytes = image(&layout);
        bytes.truncate(usize::try_from(500 + layout.bytes.data + 2).unwrap());
        let info = read(&bytes, &layout).unwrap();
        assert!(info.line_table_cut);
        assert_eq!(info.line_of(0), FrameLine::Line(7));
        assert_eq!(info.line_of(2), FrameLine::OutOfRange);
        // A string whose end was not copied ends with the mark.
        let length = usize::try_from(400 + layout.unicode.length).unwrap();
        bytes[length..length + 8].copy_from_slice(&1_000_000_u64.to_le_bytes());
        assert!(read(&bytes, &layout).unwrap().name.ends_with(text::CUT_MARK));
    }

    #[test]
    fn the_init_helper_is_never_shown() {
        let mut helper = info(0, Some(4));
        helper.name = "__init__".into();
        assert!(resolve(&helper, 8, true).is_some(), "a method of that name");
        helper.filename = "__init__".into();
        assert!(resolve(&helper, 8, true).is_none());
    }
}
