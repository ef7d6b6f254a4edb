//! Code objects and stacks as the shim announces them, turned into frames with file, line and function.

use super::merge::merged;
use super::native_names::{NO_FILE, NativeNames, Place};
use super::native_stacks::{NativeStacks, Outcome};
use super::tree::{NamedFrame, StackNode, Tree};
use crate::frames::{BlobMemory, CodeInfo, Layout, resolve};
use foldhash::{HashMap, HashMapExt};
use pyheap_injector::{ProcessMemory, RemoteAddr};
use pyheap_protocol::record::{
    self, EMPTY_LOOP, LOOPS_SHIFT, MAX_CODE_WITH_LOOPS, MAX_FRAMES, NATIVE_FIRST, Piece, WITH_LOOPS,
};
use std::collections::HashSet;
use std::ops::Range;
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
    stacks: Generations<Known>,
    /// Whole native stacks, if they are wanted.
    native_stacks: Option<Box<NativeStacks>>,
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

/// A stack that was announced.
#[derive(Debug, Clone)]
struct Known {
    node: StackNode,
    /// How many frames each call of the interpreter's loop runs, the innermost first; `None` where that is not known.
    loops: Option<Arc<[usize]>>,
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
            native_stacks: None,
            strings: HashSet::new(),
            string_bytes: 0,
            is_full: false,
            code_bytes: 0,
            tree: Tree::default(),
            unresolved: 0,
            not_kept: 0,
        }
    }

    /// Native stacks are wanted; the interpreter's code is at `interpreter`.
    pub fn with_native_stacks(&mut self, interpreter: Vec<Range<u64>>) {
        self.native_stacks = Some(Box::new(NativeStacks::new(self.memory, interpreter)));
    }

    /// Native stacks that there was no time for, and that were not found to their end.
    #[must_use]
    pub fn native_stack_losses(&self) -> (u64, u64) {
        let stacks = self.native_stacks.as_ref();
        stacks.map_or((0, 0), |stacks| (stacks.left_out, stacks.cut))
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
        let mut loops = Loops::new(record.head.flags, self.layout.frame.owner.is_none());
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
            let (code, ends) = loops.split(packed);
            let frame = self.frame(code, packed as u32 as i32, is_innermost);
            loops.add(frame.is_some(), ends);
            named.extend(frame);
        }
        let loops = loops.done(cut_middle || cut_end);
        if cut_end {
            named.push(self.marker("<the outermost frames were not walked>"));
        }
        if named.len() <= usize::from(is_native) {
            named.push(self.marker(NO_PYTHON));
        }
        let node = self.insert(&named);
        Some(self.stacks.insert(record.id, Known { node, loops }))
    }

    /// The stack with this id, together with the native frames that a piece of the thread's stack holds; `None` where nothing
    /// more is known than that stack itself.
    pub fn merged(&mut self, stack: u64, piece: &Piece, bytes: &[u8]) -> Option<StackNode> {
        let known = self.stacks.get(stack)?.clone();
        let loops = known.loops?;
        let (found, key) = match self
            .native_stacks
            .as_mut()?
            .unwind(stack, piece, bytes, &mut self.native)
        {
            Outcome::Known(node) => return Some(node),
            Outcome::New(found, key) => (found, key),
            Outcome::Nothing => return None,
        };
        let is_short = found.is_short(loops.iter().filter(|&&len| len != 0).count());
        let native: Vec<_> = found
            .frames
            .into_iter()
            .map(|(kind, place)| (kind, self.place(place)))
            .collect();
        // The first one is the native frame that it has in any case.
        let python: Vec<NamedFrame> = self.tree.frames(known.node).skip(1).cloned().collect();
        let frames = if loops.is_empty() {
            // The marker that says so stays outermost.
            let native = native.into_iter().map(|(_, frame)| frame);
            native.chain(python).collect()
        } else {
            merged(&native, found.is_whole, &python, &loops)
        };
        let node = self.insert(&frames);
        if let Some(stacks) = &mut self.native_stacks {
            stacks.keep(key, node, is_short);
        }
        Some(node)
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
        let place = self.native.caller(address);
        self.place(place)
    }

    fn place(&mut self, place: Option<Place>) -> NamedFrame {
        let Some((file, function)) = place else {
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
        Some(self.stacks.get(stack)?.node)
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

/// Counts the frames that each call of the interpreter's loop runs.
struct Loops {
    /// Each frame has a call of its own (up to 3.10).
    is_one_each: bool,
    /// Frames say where calls end.
    is_marked: bool,
    done: Vec<usize>,
    now: usize,
}

impl Loops {
    fn new(flags: u16, is_one_each: bool) -> Self {
        let is_marked = flags & WITH_LOOPS != 0;
        Self {
            is_one_each: is_marked && is_one_each,
            is_marked,
            done: if flags & EMPTY_LOOP == 0 { Vec::new() } else { vec![0] },
            now: 0,
        }
    }

    /// The code id of a frame, and how many calls end with it.
    fn split(&self, packed: u64) -> (u64, u64) {
        match (self.is_marked, self.is_one_each) {
            (true, true) => (packed >> 32, 1),
            (true, false) => ((packed >> 32) & (MAX_CODE_WITH_LOOPS - 1), packed >> LOOPS_SHIFT),
            _ => (packed >> 32, 0),
        }
    }

    /// A frame, if it is shown, with which so many calls end.
    fn add(&mut self, is_shown: bool, ends: u64) {
        self.now += usize::from(is_shown);
        for _ in 0..ends {
            self.done.push(self.now);
            self.now = 0;
        }
    }

    /// The lengths; `None` if they cannot be told.
    fn done(mut self, is_cut: bool) -> Option<Arc<[usize]>> {
        let is_told = self.is_marked || self.now == 0;
        if self.now != 0 {
            self.done.push(self.now);
        }
        (is_told && !is_cut).then(|| Arc::from(self.done))
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
