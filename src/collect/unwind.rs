//! Unwinds a piece of a thread's stack by the tables that compilers put beside the code (`.eh_frame`).
//!
//! Nothing is guessed: where there is no rule for an address, the stack ends there, as one that is cut. (So not with a library
//! that goes on by frame pointers then, without saying so.) The tables are read out of the process's memory, as the C++ runtime
//! does: the index of each object (`PT_GNU_EH_FRAME`) once, and from the rest the few hundred bytes that belong to an address.
//! Files are not needed for that.
//!
//! All of it is the target's and may be anything: sizes have limits, expressions a number of steps, each frame must be further
//! out than the one before, and of the stack nothing is read but the piece.

use crate::attach::slots::{FileId, places};
use foldhash::{HashMap, HashMapExt};
use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EndianSlice, EvaluationResult, Expression, LittleEndian, Location,
    ParsedEhFrameHdr, Register, RegisterRule, UnwindContext, UnwindSection, Value, X86_64,
};
use goblin::container::{Container, Ctx, Endian};
use goblin::elf::program_header::{PT_GNU_EH_FRAME, PT_LOAD, ProgramHeader};
use goblin::elf::{Elf, header};
use procfs::process::{MMPermissions, MMapPath, MemoryMap};
use pyheap_injector::RemoteMemory;
use pyheap_protocol::RemoteAddr;
use pyheap_protocol::record::Piece;
use std::ops::Range;

/// Most frames of a native stack.
pub const MAX_FRAMES: usize = 1024;
/// Most bytes of an object's index, eight a function, and of all.
const MAX_INDEX_BYTES: u64 = 8 << 20;
const MAX_INDEXES_BYTES: usize = 16 << 20;
/// Most bytes of one entry: the largest functions of an interpreter have some KiB.
const MAX_ENTRY_BYTES: u64 = 64 << 10;
/// Most objects, and program headers of one.
const MAX_OBJECTS: usize = 4096;
const MAX_HEADERS: u16 = 64;
/// Most addresses whose rules are kept, some 400 bytes each.
const MAX_RULES: usize = 16 << 10;
/// Most bytes of expressions of one rule: there is hardly ever one.
const MAX_EXPRESSIONS: usize = 512;
/// Most steps of one expression.
const MAX_STEPS: u32 = 1000;

/// The registers that are followed, by their numbers in DWARF: those that a function leaves as they were, the stack pointer and
/// the return address.
const RBX: u16 = 3;
const RBP: u16 = 6;
const RSP: u16 = 7;
const R12: u16 = 12;
const RETURN: u16 = 16;
const REGISTERS: usize = 17;

type Slice<'a> = EndianSlice<'a, LittleEndian>;
const LITTLE: LittleEndian = LittleEndian;

/// Why a stack ends where it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its outermost function says that nobody has called it.
    Whole,
    /// The piece ends there, or nobody knows how to go on.
    Cut,
}

/// A part of a rule that must be worked out for each frame.
#[derive(Debug, Clone)]
enum Saved {
    /// As it was.
    Same,
    /// Nobody can tell.
    Lost,
    /// At this distance from the frame's address.
    At(i64),
    /// That address itself, at a distance.
    Is(i64),
    /// In another register.
    In(u16),
    /// Where an expression says.
    AtExpression(Vec<u8>),
    /// What an expression says.
    IsExpression(Vec<u8>),
}

/// How the frame's own address is found.
#[derive(Debug, Clone)]
enum Address {
    Register(u16, i64),
    Expression(Vec<u8>),
}

/// How to get from a frame to its caller.
#[derive(Debug, Clone)]
struct Rule {
    frame: Address,
    saved: Vec<(u16, Saved)>,
    /// A signal has interrupted the caller: it stands at an instruction, not behind a call.
    is_signal: bool,
    encoding: gimli::Encoding,
}

/// An object in the process.
#[derive(Debug)]
struct Object {
    file: FileId,
    base: u64,
    code: Vec<Range<u64>>,
    index: Option<Option<Index>>,
}

/// An object's index of its functions.
#[derive(Debug)]
struct Index {
    at: u64,
    bytes: Vec<u8>,
}

/// What of a process is needed to unwind.
#[derive(Debug)]
pub struct Unwinder<M> {
    memory: M,
    objects: Vec<Object>,
    rules: HashMap<u64, Option<std::sync::Arc<Rule>>>,
    index_bytes: usize,
}

impl<M: RemoteMemory> Unwinder<M> {
    /// For the process with this `memory`. [`Unwinder::look_at`] tells it what is mapped there.
    pub fn new(memory: M) -> Self {
        Self {
            memory,
            objects: Vec::new(),
            rules: HashMap::new(),
            index_bytes: 0,
        }
    }

    /// Takes note of what is mapped. True if something that was there is not any more: what is known of addresses is void.
    pub fn look_at(&mut self, maps: &[MemoryMap]) -> bool {
        let vdso = maps.iter().filter(|map| map.pathname == MMapPath::Vdso);
        let vdso = vdso.map(|map| ((0, 0, 0), map.address.0));
        let now: Vec<(FileId, u64)> = places(maps)
            .map(|(place, _)| (place.file, place.base))
            .chain(vdso)
            .take(MAX_OBJECTS)
            .collect();
        let is_gone = |object: &Object| !now.contains(&(object.file, object.base));
        let some_gone = self.objects.iter().any(is_gone);
        self.objects.retain(|object| !is_gone(object));
        if some_gone {
            self.rules.clear();
        }
        for &(file, base) in &now {
            if !self
                .objects
                .iter()
                .any(|known| (known.file, known.base) == (file, base))
            {
                self.objects.push(Object {
                    file,
                    base,
                    code: Vec::new(),
                    index: None,
                });
            }
        }
        self.objects.sort_by_key(|object| object.base);
        self.objects.iter_mut().for_each(|object| object.code.clear());
        // Code belongs to the last object of its file that begins below it.
        for map in maps.iter().filter(|map| map.perms.contains(MMPermissions::EXECUTE)) {
            let file = match map.pathname {
                MMapPath::Path(_) => (map.dev.0, map.dev.1, map.inode),
                MMapPath::Vdso => (0, 0, 0),
                _ => continue,
            };
            let mut owners = self.objects.iter_mut().rev();
            if let Some(owner) = owners.find(|object| object.file == file && object.base <= map.address.0) {
                owner.code.push(map.address.0..map.address.1);
            }
        }
        some_gone
    }

    /// Whether `address` is in the code of an object.
    #[must_use]
    pub fn is_code(&self, address: u64) -> bool {
        self.object_of(address).is_some()
    }

    fn object_of(&self, address: u64) -> Option<usize> {
        let holds = |object: &Object| object.code.iter().any(|range| range.contains(&address));
        self.objects.iter().position(holds)
    }

    /// The addresses in the code at which the frames of `piece` stand, innermost first: the instruction that is being executed (of a call, its last byte),
    /// and whether the stack was found to its end.
    pub fn unwind(&mut self, piece: &Piece, bytes: &[u8]) -> (Vec<u64>, End) {
        let stack = Stack {
            start: piece.stack,
            bytes,
        };
        let mut registers = [None; REGISTERS];
        let [rbp, rbx, saved @ ..] = piece.entry.registers;
        let known = [(RBP, rbp), (RBX, rbx), (RSP, piece.stack)];
        let numbered = saved.into_iter().zip(R12..).map(|(value, number)| (number, value));
        for (number, value) in known.into_iter().chain(numbered) {
            set(&mut registers, number, Some(value));
        }
        let mut at = piece.entry.caller.wrapping_sub(1);
        let mut found = Vec::new();
        while self.is_code(at) {
            found.push(at);
            if found.len() >= MAX_FRAMES {
                break;
            }
            let Some(rule) = self.rule(at) else { break };
            let (Some(Some(before)), Some(caller)) = (
                registers.get(usize::from(RSP)).copied(),
                rule.caller(&registers, &stack),
            ) else {
                break;
            };
            let (after, returns) = (get(&caller, RSP), get(&caller, RETURN));
            match returns {
                // Nobody has called the outermost function.
                None if rule.ends() => return (found, End::Whole),
                Some(0) => return (found, End::Whole),
                _ => {}
            }
            let (Some(after), Some(returns)) = (after, returns) else {
                break;
            };
            if after <= before && !rule.is_signal {
                break;
            }
            registers = caller;
            at = if rule.is_signal {
                returns
            } else {
                returns.wrapping_sub(1)
            };
        }
        (found, End::Cut)
    }

    fn rule(&mut self, address: u64) -> Option<std::sync::Arc<Rule>> {
        if let Some(known) = self.rules.get(&address) {
            return known.clone();
        }
        let rule = self.find_rule(address).map(std::sync::Arc::new);
        if self.rules.len() >= MAX_RULES {
            self.rules.clear();
        }
        self.rules.insert(address, rule.clone());
        rule
    }

    fn find_rule(&mut self, address: u64) -> Option<Rule> {
        let number = self.object_of(address)?;
        if self.objects.get(number)?.index.is_none() {
            let base = self.objects.get(number)?.base;
            let index = Index::read(&self.memory, base);
            let more = index.as_ref().map_or(0, |index| index.bytes.len());
            if self.index_bytes + more > MAX_INDEXES_BYTES {
                self.objects.iter_mut().for_each(|object| object.index = None);
                self.index_bytes = 0;
            }
            self.index_bytes += more;
            self.objects.get_mut(number)?.index = Some(index);
        }
        let index = self.objects.get(number)?.index.as_ref()?.as_ref()?;
        let entry = index.entry(address)?;
        Entry::read(&self.memory, entry)?.rule(address)
    }
}

impl Index {
    fn read(memory: &impl RemoteMemory, base: u64) -> Option<Self> {
        let ctx = Ctx::new(Container::Big, Endian::Little);
        let ident = memory.read_vec(RemoteAddr(base), header::header64::SIZEOF_EHDR).ok()?;
        let head = Elf::parse_header(&ident).ok()?;
        let count = usize::from(head.e_phnum.min(MAX_HEADERS));
        let at = RemoteAddr(base.checked_add(head.e_phoff)?);
        let bytes = memory.read_vec(at, count * ProgramHeader::size(ctx)).ok()?;
        let headers = ProgramHeader::parse(&bytes, 0, count, ctx).ok()?;
        let first = headers.iter().find(|h| h.p_type == PT_LOAD && h.p_offset == 0)?;
        let bias = base.wrapping_sub(first.p_vaddr);
        let index = headers.iter().find(|h| h.p_type == PT_GNU_EH_FRAME)?;
        let len = Some(index.p_memsz).filter(|&len| len <= MAX_INDEX_BYTES)?;
        let at = index.p_vaddr.wrapping_add(bias);
        let bytes = memory.read_vec(RemoteAddr(at), usize::try_from(len).ok()?).ok()?;
        Some(Self { at, bytes })
    }

    /// Where the entry of the function at `address` is, if it has one.
    fn entry(&self, address: u64) -> Option<u64> {
        let bases = BaseAddresses::default().set_eh_frame_hdr(self.at);
        let parsed: ParsedEhFrameHdr<Slice<'_>> = EhFrameHdr::new(&self.bytes, LITTLE).parse(&bases, 8).ok()?;
        match parsed.table()?.lookup(address, &bases).ok()? {
            gimli::Pointer::Direct(at) => Some(at),
            gimli::Pointer::Indirect(_) => None,
        }
    }
}

/// The entry of a function with what it has in common with others before it, as a section of its own.
struct Entry {
    section: Vec<u8>,
    /// Where the function's part is in it.
    offset: usize,
    /// The address that the section would begin at.
    base: u64,
}

impl Entry {
    fn read(memory: &impl RemoteMemory, at: u64) -> Option<Self> {
        let function = record(memory, at)?;
        // The second word is the distance back to the common part.
        let distance = u32::from_le_bytes(function.get(4..8)?.try_into().ok()?);
        let common = record(memory, at.checked_add(4)?.checked_sub(u64::from(distance))?)?;
        let offset = common.len();
        let mut section = common;
        section.extend_from_slice(&function);
        let distance = u32::try_from(offset + 4).ok()?;
        section
            .get_mut(offset + 4..offset + 8)?
            .copy_from_slice(&distance.to_le_bytes());
        Some(Self {
            section,
            offset,
            base: at.wrapping_sub(offset as u64),
        })
    }

    fn rule(&self, address: u64) -> Option<Rule> {
        let frame = EhFrame::new(&self.section, LITTLE);
        let bases = BaseAddresses::default().set_eh_frame(self.base);
        let entry = frame
            .fde_from_offset(&bases, self.offset.into(), EhFrame::cie_from_offset)
            .ok()?;
        if !entry.contains(address) {
            return None;
        }
        let mut context = UnwindContext::new();
        let row = entry
            .unwind_info_for_address(&frame, &bases, &mut context, address)
            .ok()?;
        let left = std::cell::Cell::new(MAX_EXPRESSIONS);
        let bytes = |expression: &gimli::UnwindExpression<usize>| {
            let Expression(slice) = expression.get(&frame).ok()?;
            left.set(left.get().checked_sub(slice.len())?);
            Some(slice.slice().to_vec())
        };
        let address = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => Address::Register(register.0, *offset),
            CfaRule::Expression(expression) => Address::Expression(bytes(expression)?),
        };
        let mut saved = Vec::new();
        for (register, rule) in row.registers() {
            let rule = match rule {
                RegisterRule::SameValue => Saved::Same,
                RegisterRule::Offset(offset) => Saved::At(*offset),
                RegisterRule::ValOffset(offset) => Saved::Is(*offset),
                RegisterRule::Register(other) => Saved::In(other.0),
                RegisterRule::Expression(expression) => Saved::AtExpression(bytes(expression)?),
                RegisterRule::ValExpression(expression) => Saved::IsExpression(bytes(expression)?),
                _ => Saved::Lost,
            };
            if usize::from(register.0) < REGISTERS {
                saved.push((register.0, rule));
            }
        }
        Some(Rule {
            frame: address,
            saved,
            is_signal: entry.is_signal_trampoline(),
            encoding: entry.cie().encoding(),
        })
    }
}

/// One record of a section, its length before it.
fn record(memory: &impl RemoteMemory, at: u64) -> Option<Vec<u8>> {
    let len = u64::from(memory.read_u32(RemoteAddr(at)).ok()?);
    let is_sane = (4..=MAX_ENTRY_BYTES).contains(&len);
    is_sane.then(|| memory.read_vec(RemoteAddr(at), len as usize + 4).ok())?
}

impl Rule {
    /// This function says that nobody has called it.
    fn ends(&self) -> bool {
        let returns = self.saved.iter().find(|(register, _)| *register == RETURN);
        matches!(returns, Some((_, Saved::Lost)))
    }

    /// The registers of the caller.
    fn caller(&self, registers: &[Option<u64>; REGISTERS], stack: &Stack<'_>) -> Option<[Option<u64>; REGISTERS]> {
        let frame = match &self.frame {
            Address::Register(register, offset) => get(registers, *register)?.wrapping_add_signed(*offset),
            Address::Expression(bytes) => self.evaluate(bytes, None, registers, stack)?,
        };
        let mut caller = [None; REGISTERS];
        // What a function has to leave as it was, and does not speak of.
        for register in [RBX, RBP].into_iter().chain(R12..RETURN) {
            set(&mut caller, register, get(registers, register));
        }
        set(&mut caller, RSP, Some(frame));
        for (register, saved) in &self.saved {
            let value = match saved {
                Saved::Same => get(registers, *register),
                Saved::Lost => None,
                Saved::At(offset) => stack.word(frame.wrapping_add_signed(*offset)),
                Saved::Is(offset) => Some(frame.wrapping_add_signed(*offset)),
                Saved::In(other) => get(registers, *other),
                Saved::AtExpression(bytes) => self
                    .evaluate(bytes, Some(frame), registers, stack)
                    .and_then(|at| stack.word(at)),
                Saved::IsExpression(bytes) => self.evaluate(bytes, Some(frame), registers, stack),
            };
            set(&mut caller, *register, value);
        }
        Some(caller)
    }

    fn evaluate(
        &self,
        bytes: &[u8],
        start: Option<u64>,
        registers: &[Option<u64>; REGISTERS],
        stack: &Stack<'_>,
    ) -> Option<u64> {
        let mut evaluation = Expression(EndianSlice::new(bytes, LITTLE)).evaluation(self.encoding);
        evaluation.set_max_iterations(MAX_STEPS);
        if let Some(start) = start {
            evaluation.set_initial_value(start);
        }
        let mut state = evaluation.evaluate().ok()?;
        for _ in 0..MAX_STEPS {
            state = match state {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    let Register(number) = register;
                    let value = Value::Generic(get(registers, number)?);
                    evaluation.resume_with_register(value).ok()?
                }
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    let value = Value::Generic(stack.word(address)?);
                    evaluation.resume_with_memory(value).ok()?
                }
                _ => return None,
            };
        }
        if !matches!(state, EvaluationResult::Complete) {
            return None;
        }
        match evaluation.as_result() {
            [piece] => match piece.location {
                Location::Address { address } => Some(address),
                _ => None,
            },
            _ => None,
        }
    }
}

fn get(registers: &[Option<u64>; REGISTERS], number: u16) -> Option<u64> {
    registers.get(usize::from(number)).copied().flatten()
}

fn set(registers: &mut [Option<u64>; REGISTERS], number: u16, value: Option<u64>) {
    if let Some(place) = registers.get_mut(usize::from(number)) {
        *place = value;
    }
}

/// The piece of a stack.
struct Stack<'a> {
    start: u64,
    bytes: &'a [u8],
}

impl Stack<'_> {
    fn word(&self, address: u64) -> Option<u64> {
        let at = usize::try_from(address.checked_sub(self.start)?).ok()?;
        let bytes = self.bytes.get(at..at.checked_add(8)?)?;
        bytes.try_into().map(u64::from_le_bytes).ok()
    }
}

const _: () = assert!(
    X86_64::RSP.0 == RSP
        && X86_64::RA.0 == RETURN
        && X86_64::R12.0 == R12
        && X86_64::RBP.0 == RBP
        && X86_64::RBX.0 == RBX
);

#[cfg(test)]
mod tests {
    use super::*;
    use pyheap_injector::{MemoryError, ProcessMemory, space};
    use pyheap_protocol::record::Head;
    use pyheap_protocol::thin::mix;

    /// This process's memory, with one byte in so many changed.
    struct Damaged {
        memory: ProcessMemory,
        seed: u64,
        one_in: u64,
    }

    impl RemoteMemory for Damaged {
        fn read_into(&self, address: RemoteAddr, into: &mut [u8]) -> Result<(), MemoryError> {
            self.memory.read_into(address, into)?;
            for (at, byte) in into.iter_mut().enumerate() {
                let random = mix(self.seed ^ address.0.wrapping_add(at as u64));
                if random.is_multiple_of(self.one_in) {
                    *byte ^= (random >> 32) as u8;
                }
            }
            Ok(())
        }
    }

    fn piece(caller: u64, stack: u64, registers: [u64; 6]) -> Piece {
        let head = Head {
            len: 0,
            kind: 0,
            flags: 0,
        };
        let entry = pyheap_protocol::record::Entry { registers, caller };
        Piece {
            head,
            id: 1,
            entry,
            stack,
        }
    }

    /// Whatever tables and stacks hold, it ends, and every frame is in code.
    #[test]
    fn damaged_tables_and_stacks_end() {
        let pid = std::process::id() as i32;
        let memory = ProcessMemory::new(pid);
        let maps = space::maps(pid).unwrap();
        let own = damaged_tables_and_stacks_end as *const () as u64;
        let mut deepest = 0;
        for seed in 0..300 {
            let one_in = [7, 61, 1009, 100_003][seed as usize % 4];
            let mut unwinder = Unwinder::new(Damaged { memory, seed, one_in });
            assert!(!unwinder.look_at(&maps));
            let code = |n: u64| own.wrapping_add(mix(seed ^ n) % 200_000).wrapping_sub(100_000);
            let stack = 0x7fff_0000_0000;
            let word = |n: u64| match mix(n ^ seed) % 4 {
                0 | 1 => code(n),
                2 => stack + mix(n) % 4096 / 8 * 8,
                _ => mix(n),
            };
            let bytes: Vec<u8> = (0..512).flat_map(|n| word(n).to_le_bytes()).collect();
            for n in 0..20 {
                let piece = piece(code(n), stack, std::array::from_fn(|n| word(n as u64)));
                let (frames, _) = unwinder.unwind(&piece, &bytes);
                assert!(frames.len() <= MAX_FRAMES && frames.iter().all(|&at| unwinder.is_code(at)));
                deepest = deepest.max(frames.len());
            }
        }
        assert!(deepest > 1, "nothing was unwound");
    }

    /// Code of this process that is called has a rule; what is no code has none, and nothing is guessed.
    #[test]
    fn code_has_rules() {
        let pid = std::process::id() as i32;
        let mut unwinder = Unwinder::new(ProcessMemory::new(pid));
        unwinder.look_at(&space::maps(pid).unwrap());
        let own = code_has_rules as *const () as u64;
        let rule = unwinder.rule(own + 1).expect("this function has a rule");
        assert!(!rule.is_signal && !rule.ends());
        assert!(unwinder.rule(0x1000).is_none());
        let (frames, end) = unwinder.unwind(&piece(own + 1, 0x1000, [0; 6]), &[]);
        assert_eq!((frames, end), (vec![own], End::Cut));
    }
}
