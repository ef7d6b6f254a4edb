//! Code objects and stacks as the shim announces them, turned into frames with file, line and function.

use crate::frames::{BlobMemory, CodeInfo, Layout, resolve};
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};
use pyheap_protocol::record::{self, MAX_FRAMES};
use std::collections::HashMap;
use std::sync::Arc;
use zerocopy::FromBytes;

/// A frame with names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NamedFrame {
    /// File name as Python has it; of the form `<…>` where there is no file.
    pub file: Arc<str>,
    /// Line, 0 if there is none.
    pub line: u32,
    /// Qualified name from 3.11 on, else the name.
    pub function: Arc<str>,
}

/// A whole stack, innermost frame first.
pub type NamedStack = Arc<[NamedFrame]>;

/// Shown for a sample of a thread that had no Python frames.
pub const NO_PYTHON: (&str, &str) = ("<no Python frame>", "<no Python frame>");
/// Shown for a sample whose stack was lost, because the ring was full.
pub const LOST: (&str, &str) = ("<stack lost>", "<stack lost>");
/// Shown for a code object that could not be read.
const UNREADABLE: &str = "<unreadable code object>";
/// Shown where frames were left out of the middle of a deep stack.
const CUT: &str = "<frames left out>";

/// Codes and stacks by id. Ids that the shim has forgotten never come again, so what is no longer needed for naming stays
/// small: a code object is a name and a table.
#[derive(Debug)]
pub struct Names {
    layout: Layout,
    memory: ProcessMemory,
    codes: HashMap<u64, Option<Arc<Code>>>,
    stacks: HashMap<u64, NamedStack>,
    /// Equal strings share memory.
    strings: HashMap<Arc<str>, ()>,
    /// Frames whose code object was unknown or unreadable.
    pub unresolved: u64,
}

#[derive(Debug)]
struct Code {
    info: CodeInfo,
    file: Arc<str>,
    function: Arc<str>,
}

impl Names {
    /// For a target with this layout; `memory` serves code objects too large for the ring.
    #[must_use]
    pub fn new(layout: Layout, memory: ProcessMemory) -> Self {
        let (codes, stacks, strings) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self { layout, memory, codes, stacks, strings, unresolved: 0 }
    }

    fn string(&mut self, text: &str) -> Arc<str> {
        if let Some((known, ())) = self.strings.get_key_value(text) {
            return Arc::clone(known);
        }
        let new: Arc<str> = Arc::from(text);
        self.strings.insert(Arc::clone(&new), ());
        new
    }

    /// Takes a CODE record. A damaged one gives an unreadable code object.
    pub fn code(&mut self, bytes: &[u8]) {
        let Ok((record, rest)) = record::Code::read_from_prefix(bytes) else { return };
        let info = self.read_code(&record, rest);
        let code = info.map(|info| {
            let file = self.string(&info.filename);
            let function = self.string(info.display_name());
            Arc::new(Code { info, file, function })
        });
        self.codes.insert(record.id, code);
    }

    fn read_code(&self, record: &record::Code, mut rest: &[u8]) -> Option<CodeInfo> {
        let address = RemoteAddr(record.address);
        let mut blob = BlobMemory::new();
        let mut object: &[u8] = &[];
        for _ in 0..record.head.flags {
            let (segment, data) = record::Segment::read_from_prefix(rest).ok()?;
            let bytes = data.get(..segment.len as usize)?;
            blob.push(RemoteAddr(segment.address), bytes).ok()?;
            if segment.address == record.address {
                object = bytes;
            }
            rest = data.get((segment.len as usize).next_multiple_of(8)..)?;
        }
        let copied = CodeInfo::read(&blob, address, &self.layout).ok();
        if let Some(info) = copied.as_ref().filter(|info| !info.line_table_cut) {
            return Some(info.clone());
        }
        // Too large for the ring. It may still be there: believe it if it is the same before and after reading.
        let same = || self.memory.read_vec(address, object.len()).is_ok_and(|now| identity(&now) == identity(object));
        let read = if same() { CodeInfo::read(&self.memory, address, &self.layout).ok() } else { None };
        read.filter(|_| same()).or(copied)
    }

    /// Takes a STACK record.
    pub fn stack(&mut self, bytes: &[u8]) {
        let Ok((record, frames)) = record::Stack::read_from_prefix(bytes) else { return };
        let named: Vec<NamedFrame> = frames.chunks_exact(8).take(MAX_FRAMES).collect::<Vec<_>>().iter().enumerate().fold(
            Vec::new(),
            |mut named, (number, bytes)| {
                let packed = u64::from_le_bytes((*bytes).try_into().unwrap_or_default());
                if number == MAX_FRAMES / 2 && record.head.flags & 1 != 0 {
                    let left_out = record.depth.saturating_sub(MAX_FRAMES as u64);
                    named.push(self.marker(CUT, &format!("<{left_out} frames left out>")));
                }
                named.extend(self.frame(packed >> 32, packed as u32 as i32, number == 0));
                named
            },
        );
        let named = if named.is_empty() { vec![self.marker(NO_PYTHON.0, NO_PYTHON.1)] } else { named };
        self.stacks.insert(record.id, named.into());
    }

    fn frame(&mut self, code: u64, instruction: i32, innermost: bool) -> Option<NamedFrame> {
        match self.codes.get(&code) {
            Some(Some(code)) => {
                let frame = resolve(&code.info, instruction, innermost)?;
                Some(NamedFrame { file: Arc::clone(&code.file), line: frame.line, function: Arc::clone(&code.function) })
            }
            _ => {
                self.unresolved += 1;
                Some(self.marker(UNREADABLE, UNREADABLE))
            }
        }
    }

    fn marker(&mut self, file: &str, function: &str) -> NamedFrame {
        NamedFrame { file: self.string(file), line: 0, function: self.string(function) }
    }

    /// The stack with this id; the marker for a lost one if it is not known.
    pub fn named(&mut self, stack: u64) -> NamedStack {
        if let Some(known) = self.stacks.get(&stack) {
            return Arc::clone(known);
        }
        let lost: NamedStack = vec![self.marker(LOST.0, LOST.1)].into();
        self.stacks.insert(stack, Arc::clone(&lost));
        lost
    }
}

/// What of a code object's bytes tells it from another one: all but the reference count in its first word.
fn identity(object: &[u8]) -> Option<&[u8]> {
    object.get(8..64)
}
