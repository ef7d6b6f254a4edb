//! Code objects and stacks as the shim announces them, turned into frames with file, line and function.

use super::native_names::{NO_FILE, NativeNames};
use super::tree::{NamedFrame, StackNode, Tree};
use crate::frames::{BlobMemory, CodeInfo, Layout, resolve};
use foldhash::{HashMap, HashMapExt};
use pyheap_injector::{ProcessMemory, RemoteAddr};
use pyheap_protocol::record::{self, MAX_FRAMES, NATIVE_FIRST};
use std::collections::HashSet;
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

/// Shown for a code object that there was no memory to keep.
const TOO_MANY_NAMES: &str = "<one of too many names>";
/// Most bytes of names that are kept. A large program has a few MiB of them.
const MAX_NAME_BYTES: usize = 24 << 20;
/// Most bytes of line tables that are kept, in each generation.
const MAX_CODE_BYTES: usize = 16 << 20;

/// What the shim has announced, by id, in two generations: it forgets all of a kind at once and says so, and an id of the
/// generation before last never comes again.
#[derive(Debug)]
struct Generations<T> {
    now: HashMap<u64, T>,
    before: HashMap<u64, T>,
    /// Most that the shim can announce before it forgets.
    most: usize,
}

impl<T> Generations<T> {
    fn new(most: u64) -> Self {
        Self {
            now: HashMap::new(),
            before: HashMap::new(),
            most: usize::try_from(most).unwrap_or(usize::MAX),
        }
    }

    /// True if older ones were forgotten. The shim has forgotten them when there are more than it has room for; its word about
    /// that was lost.
    fn insert(&mut self, id: u64, what: T) -> bool {
        let full = self.now.len() >= self.most;
        if full {
            self.forget();
        }
        self.now.insert(id, what);
        full
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
    native: NativeNames,
    codes: Generations<Option<Arc<Code>>>,
    stacks: Generations<StackNode>,
    /// Equal strings share memory.
    strings: HashSet<Arc<str>>,
    /// Their bytes.
    string_bytes: usize,
    /// They were looked through for room, and most of them are still in use: until code objects are forgotten that stays so.
    is_full: bool,
    /// Bytes of line tables in this generation.
    code_bytes: usize,
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
    /// For a target with this layout; `memory` serves code objects too large for the ring. The shim's tables have room for
    /// `codes` and `stacks`.
    #[must_use]
    pub fn new(layout: Layout, memory: ProcessMemory, codes: u64, stacks: u64) -> Self {
        Self {
            layout,
            memory,
            native: NativeNames::new(memory.pid()),
            codes: Generations::new(codes),
            stacks: Generations::new(stacks),
            strings: HashSet::new(),
            string_bytes: 0,
            is_full: false,
            code_bytes: 0,
            tree: Tree::default(),
            unresolved: 0,
            not_kept: 0,
        }
    }

    /// `None` when there is no room for it.
    fn string(&mut self, text: &str) -> Option<Arc<str>> {
        if let Some(known) = self.strings.get(text) {
            return Some(Arc::clone(known));
        }
        if self.is_full {
            return None;
        }
        if self.string_bytes + text.len() > MAX_NAME_BYTES {
            // Names that nothing refers to any more make room: short-lived code objects.
            self.strings.retain(|known| Arc::strong_count(known) > 1);
            self.string_bytes = self.strings.iter().map(|known| known.len()).sum();
            if self.string_bytes + text.len() > MAX_NAME_BYTES / 2 {
                self.is_full = true;
                return None;
            }
        }
        let new: Arc<str> = Arc::from(text);
        self.string_bytes += new.len();
        self.strings.insert(Arc::clone(&new));
        Some(new)
    }

    /// Takes a FORGET record; true if stacks are forgotten.
    pub fn forget(&mut self, what: u16) -> bool {
        let (codes, stacks) = (what & 1 != 0, what & 2 != 0);
        if codes {
            self.codes.forget();
            self.codes_forgotten();
        }
        if stacks {
            self.stacks.forget();
        }
        stacks
    }

    /// Takes a CODE record. A damaged one gives an unreadable code object. False if no shim can have written it.
    #[must_use]
    pub fn code(&mut self, bytes: &[u8]) -> bool {
        let Ok((record, rest)) = record::Code::read_from_prefix(bytes) else {
            return false;
        };
        let info = self.read_code(&record, rest);
        let code = info.map(|info| self.keep_code(info));
        self.codes.now.remove(&record.replaces);
        if self.codes.insert(record.id, code) {
            self.codes_forgotten();
        }
        true
    }

    fn codes_forgotten(&mut self) {
        self.code_bytes = 0;
        self.is_full = false;
    }

    fn keep_code(&mut self, mut info: CodeInfo) -> Arc<Code> {
        let names = self.string(&info.filename).zip(self.string(info.display_name()));
        self.code_bytes += info.line_table.bytes();
        if names.is_none() || self.code_bytes > MAX_CODE_BYTES {
            self.not_kept += 1;
            info.line_table.clear();
        }
        // They are kept once, shared with all others of the same name.
        (info.filename, info.name, info.qualname) = Default::default();
        let (file, function) = names.unwrap_or_else(|| (Arc::from(TOO_MANY_NAMES), Arc::from(TOO_MANY_NAMES)));
        Arc::new(Code { info, file, function })
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

    /// Takes a STACK record. Gives whether older stacks were forgotten for it, or `None` if no shim can have written it.
    #[must_use]
    pub fn stack(&mut self, bytes: &[u8]) -> Option<bool> {
        let Ok((record, frames)) = record::Stack::read_from_prefix(bytes) else {
            return None;
        };
        let (cut_middle, cut_end) = (record.head.flags & 1 != 0, record.head.flags & 2 != 0);
        let is_native = record.head.flags & NATIVE_FIRST != 0;
        let mut named: Vec<NamedFrame> = Vec::new();
        for (number, bytes) in frames.chunks_exact(8).take(MAX_FRAMES).enumerate() {
            let packed = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            if number == MAX_FRAMES / 2 && cut_middle {
                let left_out = record.depth.saturating_sub(MAX_FRAMES as u64);
                named.push(self.marker(&format!("<{left_out} frames left out>")));
            }
            if number == 0 && is_native {
                named.push(self.native_frame(packed));
                continue;
            }
            let is_innermost = number == usize::from(is_native);
            named.extend(self.frame(packed >> 32, packed as u32 as i32, is_innermost));
        }
        if cut_end {
            named.push(self.marker("<the outermost frames were not walked>"));
        }
        if named.len() <= usize::from(is_native) {
            named.push(self.marker(NO_PYTHON));
        }
        let node = self.insert(&named);
        Some(self.stacks.insert(record.id, node))
    }

    fn insert(&mut self, frames: &[NamedFrame]) -> StackNode {
        match self.tree.insert(frames) {
            Some(node) => node,
            None => self.too_many(),
        }
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

    /// The frame of native code that has called a wrapper, which returns to `address`.
    fn native_frame(&mut self, address: u64) -> NamedFrame {
        let Some((file, function)) = self.native.caller(address) else {
            return self.marker(NO_FILE);
        };
        match self.string(&file).zip(self.string(&function)) {
            Some((file, function)) => NamedFrame {
                file,
                line: 0,
                function,
            },
            None => self.marker(TOO_MANY_NAMES),
        }
    }

    fn marker(&mut self, text: &str) -> NamedFrame {
        let text = self.string(text).unwrap_or_else(|| Arc::from(text));
        NamedFrame {
            file: Arc::clone(&text),
            line: 0,
            function: text,
        }
    }

    /// The stack with this id, if it is known.
    #[must_use]
    pub fn named(&self, stack: u64) -> Option<StackNode> {
        self.stacks.get(stack).copied()
    }

    /// The stack that stands for those whose record was lost.
    pub fn lost(&mut self) -> StackNode {
        let marker = self.marker(LOST);
        self.insert(&[marker])
    }

    /// The stack that stands for those that there was no memory to keep.
    pub fn too_many(&mut self) -> StackNode {
        self.not_kept += 1;
        let marker = self.marker(NOT_KEPT);
        self.tree.insert(&[marker]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        let layout = Layout::of_minor(12).expect("a known version");
        Names::new(layout, ProcessMemory::new(i32::MAX), 64, 64)
    }

    #[test]
    fn names_without_end_are_not_kept() {
        let mut names = names();
        let kept: Vec<_> = (0..4000).filter_map(|n| names.string(&format!("{n:010000}"))).collect();
        assert!(kept.len() >= MAX_NAME_BYTES / 2 / 10_000 && kept.len() <= MAX_NAME_BYTES / 10_000);
        assert!(names.string_bytes <= MAX_NAME_BYTES);
        // What nobody uses any more makes room, when code objects are forgotten: only then it is looked for.
        drop(kept);
        assert!(names.is_full && names.string("one more").is_none());
        names.forget(1);
        assert!((0..4000).all(|n| names.string(&format!("{n:09999}")).is_some()));
        assert!(names.string_bytes <= MAX_NAME_BYTES);
    }

    /// The shim says when it forgets, but that word may be lost: more than it has room for are of an earlier generation.
    #[test]
    fn generations_end_by_themselves() {
        let mut generations = Generations::new(64);
        let forgotten = (0..1000_u64).filter(|&id| generations.insert(id, id)).count();
        assert_eq!(forgotten, 1000 / 64);
        assert!(generations.now.len() <= 64 && generations.before.len() <= 64);
        assert_eq!((generations.get(999), generations.get(1)), (Some(&999), None));
    }
}
