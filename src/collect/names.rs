//! Code objects and stacks as the shim announces them, turned into frames with file, line and function.

use super::tree::{NamedFrame, StackNode, Tree};
use crate::frames::{BlobMemory, CodeInfo, Layout, resolve};
use pyheap_injector::{ProcessMemory, RemoteAddr};
use pyheap_protocol::record::{self, MAX_FRAMES};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Shown for a sample of a thread that had no Python frames.
pub const NO_PYTHON: &str = "<no Python frame>";
/// Shown for a sample whose stack was lost, because the ring was full.
pub const LOST: &str = "<stack lost>";
/// Shown for a stack that there was no memory to keep.
pub const NOT_KEPT: &str = "<one of too many different stacks>";
/// Shown for a code object that could not be read.
const UNREADABLE: &str = "<unreadable code object>";

/// What the shim has announced, by id, in two generations: it forgets all of a kind at once and says so, and an id of the
/// generation before last never comes again.
#[derive(Debug)]
struct Generations<T> {
    now: HashMap<u64, T>,
    before: HashMap<u64, T>,
}

impl<T> Generations<T> {
    fn new() -> Self {
        Self {
            now: HashMap::new(),
            before: HashMap::new(),
        }
    }

    fn get(&self, id: u64) -> Option<&T> {
        self.now.get(&id).or_else(|| self.before.get(&id))
    }

    fn forget(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }
}

/// Codes and stacks by id.
#[derive(Debug)]
pub struct Names {
    layout: Layout,
    memory: ProcessMemory,
    codes: Generations<Option<Arc<Code>>>,
    stacks: Generations<StackNode>,
    /// Equal strings share memory.
    strings: HashSet<Arc<str>>,
    /// All stacks.
    pub tree: Tree,
    /// Frames whose code object was unknown or unreadable.
    pub unresolved: u64,
    /// Stacks that there was no memory to keep.
    pub not_kept: u64,
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
        Self {
            layout,
            memory,
            codes: Generations::new(),
            stacks: Generations::new(),
            strings: HashSet::new(),
            tree: Tree::default(),
            unresolved: 0,
            not_kept: 0,
        }
    }

    fn string(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.strings.get(text) {
            return Arc::clone(known);
        }
        let new: Arc<str> = Arc::from(text);
        self.strings.insert(Arc::clone(&new));
        new
    }

    /// Takes a FORGET record; true if stacks are forgotten.
    pub fn forget(&mut self, what: u16) -> bool {
        let (codes, stacks) = (what & 1 != 0, what & 2 != 0);
        if codes {
            self.codes.forget();
        }
        if stacks {
            self.stacks.forget();
        }
        stacks
    }

    /// Takes a CODE record. A damaged one gives an unreadable code object.
    pub fn code(&mut self, bytes: &[u8]) {
        let Ok((record, rest)) = record::Code::read_from_prefix(bytes) else {
            return;
        };
        let info = self.read_code(&record, rest);
        let code = info.map(|info| {
            let file = self.string(&info.filename);
            let function = self.string(info.display_name());
            Arc::new(Code { info, file, function })
        });
        self.codes.now.remove(&record.replaces);
        self.codes.now.insert(record.id, code);
    }

    fn read_code(&self, record: &record::Code, mut rest: &[u8]) -> Option<CodeInfo> {
        let address = RemoteAddr(record.address);
        let mut blob = BlobMemory::new();
        for _ in 0..record.head.flags {
            let (segment, data) = record::Segment::read_from_prefix(rest).ok()?;
            let bytes = data.get(..segment.len as usize)?;
            blob.push(RemoteAddr(segment.address), bytes).ok()?;
            rest = data.get((segment.len as usize).next_multiple_of(8)..)?;
        }
        let copied = CodeInfo::read(&blob, address, &self.layout).ok()?;
        if !copied.line_table_cut {
            return Some(copied);
        }
        // The line table is too large for the ring. Most probably the object is still there: it is believed if it says of
        // itself what the copy says.
        let same = |now: &CodeInfo| {
            let facts = |code: &CodeInfo| (code.first_line, code.flags, code.version);
            (&now.filename, &now.name, &now.qualname) == (&copied.filename, &copied.name, &copied.qualname)
                && facts(now) == facts(&copied)
        };
        let read = CodeInfo::read(&self.memory, address, &self.layout).ok();
        read.filter(same).or(Some(copied))
    }

    /// Takes a STACK record.
    pub fn stack(&mut self, bytes: &[u8]) {
        let Ok((record, frames)) = record::Stack::read_from_prefix(bytes) else {
            return;
        };
        let (cut_middle, cut_end) = (record.head.flags & 1 != 0, record.head.flags & 2 != 0);
        let mut named: Vec<NamedFrame> = Vec::new();
        for (number, bytes) in frames.chunks_exact(8).take(MAX_FRAMES).enumerate() {
            let packed = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            if number == MAX_FRAMES / 2 && cut_middle {
                let left_out = record.depth.saturating_sub(MAX_FRAMES as u64);
                named.push(self.marker(&format!("<{left_out} frames left out>")));
            }
            named.extend(self.frame(packed >> 32, packed as u32 as i32, number == 0));
        }
        if cut_end {
            named.push(self.marker("<the outermost frames were not walked>"));
        }
        if named.is_empty() {
            named.push(self.marker(NO_PYTHON));
        }
        let node = self.insert(&named);
        self.stacks.now.insert(record.id, node);
    }

    fn insert(&mut self, frames: &[NamedFrame]) -> StackNode {
        if let Some(node) = self.tree.insert(frames) {
            return node;
        }
        self.not_kept += 1;
        let marker = self.marker(NOT_KEPT);
        self.tree.insert(&[marker]).unwrap_or_default()
    }

    fn frame(&mut self, code: u64, instruction: i32, innermost: bool) -> Option<NamedFrame> {
        match self.codes.get(code) {
            Some(Some(code)) => {
                let frame = resolve(&code.info, instruction, innermost)?;
                Some(NamedFrame {
                    file: Arc::clone(&code.file),
                    line: frame.line,
                    function: Arc::clone(&code.function),
                })
            }
            _ => {
                self.unresolved += 1;
                Some(self.marker(UNREADABLE))
            }
        }
    }

    fn marker(&mut self, text: &str) -> NamedFrame {
        let text = self.string(text);
        NamedFrame {
            file: Arc::clone(&text),
            line: 0,
            function: text,
        }
    }

    /// The stack with this id; the marker for a lost one if it is not known.
    pub fn named(&mut self, stack: u64) -> StackNode {
        if let Some(&known) = self.stacks.get(stack) {
            return known;
        }
        let marker = self.marker(LOST);
        self.insert(&[marker])
    }
}
