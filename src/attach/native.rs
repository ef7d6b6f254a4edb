//! The C library's allocating functions, and libffi's `ffi_call`: their wrappers into the slots of the loaded objects, and out again.
//!
//! A slot is written by one aligned store of eight bytes, through `/proc/PID/mem`, which reaches the pages that the loader has
//! made read-only. It is written only while it holds the very function that the wrapper passes on to (or leads to the loader,
//! where there is only one function that this can find), so whoever calls through it gets what it got before. Taken back is
//! only what still is ours.
//!
//! An object that is unloaded while we write could leave its place to another one. So a new object is left alone until it has
//! been seen twice, and a file that was unloaded once is not touched again.

use super::pages::{PAGE, PRESENT, Pagemap, SWAPPED, Words};
use super::slots::{FileId, Object, Place, Slot, places};
use crate::attach::interpreter::Interpreter;
use procfs::process::{MMPermissions, MemoryMap};
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory, observe, space};
use pyheap_protocol::control::native::{
    ALL, COUNT, FFI_CALL, FIRST_MAPPING, MALLOC, MMAP, NAMES, REALLOC, REALLOCARRAY,
};
use pyheap_protocol::control::{Control, Identity, Native as Table, OLDEST_NATIVE_BYTES, Originals, ShimHeader};
use pyheap_protocol::{FIRST_CHUNKS, FIRST_FFI, FIRST_NATIVE};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;
use zerocopy::FromBytes;

/// Objects that are looked at, at most.
const MAX_OBJECTS: usize = 4096;
/// Slots that get a wrapper, at most, and files that are remembered as unloaded: after those nothing new is touched.
const MAX_SLOTS: usize = 1 << 16;
const MAX_UNLOADED: usize = 1 << 14;
/// Pause between the two looks at the beginning.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);
/// Looks at an object after which it counts as there to stay.
const ENOUGH_LOOKS: u32 = 2;
/// The first Python that has its frames in chunks.
const FIRST_WITH_CHUNKS: (u8, u8) = (3, 11);
/// Rounds of taking slots back, at most.
const ROUNDS: usize = 3;
/// Most memory that is searched for copies of our addresses.
const MAX_SEARCH_BYTES: u64 = 8 << 30;
/// Pages that are looked up at once.
const PAGES_AT_ONCE: u64 = 512;

/// How many objects and slots have wrappers, and what has not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Objects with a wrapper in one slot at least.
    pub objects: usize,
    /// Slots with wrappers.
    pub slots: usize,
    /// Functions that no object calls, or that are not known without doubt.
    pub functions_left_out: Vec<&'static str>,
    /// Objects of which the calls through libffi are seen, by name.
    pub through_ffi: Vec<String>,
    /// The object that `malloc` is in.
    pub allocator: Option<String>,
    /// It is the GNU C library's own.
    pub is_glibc: bool,
    /// Files that were unloaded and are left alone since.
    pub unloaded: usize,
}

/// Where the shim's part is.
#[derive(Debug, Clone, Copy)]
struct Shim {
    /// Address of the [`Table`].
    table: u64,
    /// Those of the C library's functions, then those of `ffi_call`; 0 for what an older shim has not.
    wrappers: [u64; ALL],
    /// The one of `mmap` for the interpreter; 0 in an older shim.
    chunk_mmap: u64,
    /// How much of the [`Table`] there is.
    table_bytes: usize,
}

impl Shim {
    /// `None` for a shim without such wrappers, or one that cannot be read.
    fn of(memory: &ProcessMemory, identity: &Identity) -> Option<Self> {
        if identity.protocol < FIRST_NATIVE {
            return None;
        }
        let bytes = memory.read_array::<{ size_of::<ShimHeader>() }>(RemoteAddr(identity.header));
        let header = ShimHeader::read_from_bytes(&bytes.ok()?).ok()?;
        let region = identity.base..identity.base.saturating_add(identity.len);
        let is_sane = region.contains(&header.native) && header.native.is_multiple_of(8);
        let has_ffi = identity.protocol >= FIRST_FFI;
        let mut wrappers = [0; ALL];
        let ffi = header.ffi_wrappers.iter().filter(|_| has_ffi);
        for (place, &wrapper) in wrappers.iter_mut().zip(header.native_wrappers.iter().chain(ffi)) {
            *place = wrapper;
        }
        is_sane.then_some(Self {
            table: header.native,
            wrappers,
            table_bytes: if has_ffi {
                size_of::<Table>()
            } else {
                OLDEST_NATIVE_BYTES
            },
            chunk_mmap: if identity.protocol < FIRST_CHUNKS {
                0
            } else {
                header.chunk_mmap
            },
        })
    }

    fn table(&self, memory: &ProcessMemory) -> Option<Table> {
        let mut bytes = [0; size_of::<Table>()];
        memory
            .read_into(RemoteAddr(self.table), bytes.get_mut(..self.table_bytes)?)
            .ok()?;
        Table::read_from_bytes(&bytes).ok()
    }

    /// Where the shim finds what wrapper number `which` passes on to.
    fn original_at(&self, which: usize) -> u64 {
        let offset = match which.checked_sub(COUNT) {
            None => offset_of!(Table, functions) + which * 8,
            Some(number) => offset_of!(Table, ffi_calls) + number * 8,
        };
        self.table + offset as u64
    }

    /// Whose wrapper `value` is.
    fn wrapped(&self, value: u64) -> Option<usize> {
        if value == 0 {
            return None;
        }
        let place = self.wrappers.iter().position(|&wrapper| wrapper == value);
        place.or((value == self.chunk_mmap).then_some(MMAP))
    }
}

/// What of an object's slots gets wrappers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    /// It is the C library: what that maps for itself is not a program's memory.
    AllButMappings,
    /// It is the interpreter: what it asks of `malloc` is Python's raw domain. Its `mmap` has a wrapper of its own. Its
    /// `ffi_call` is that of a ctypes that is a part of it.
    Mappings,
    /// It is the interpreter of a Python whose mappings are arenas only.
    Ffi,
    Nothing,
}

impl Part {
    fn has(self, which: usize) -> bool {
        match self {
            Self::All => true,
            Self::AllButMappings => which < FIRST_MAPPING,
            Self::Mappings => which >= FIRST_MAPPING,
            Self::Ffi => which == FFI_CALL,
            Self::Nothing => false,
        }
    }

    /// It is the interpreter's.
    fn is_interpreter(self) -> bool {
        matches!(self, Self::Mappings | Self::Ffi)
    }
}

/// An object that has been met.
#[derive(Debug)]
struct Known {
    object: Object,
    looks: u32,
    part: Part,
}

/// The wrappers in a process.
#[derive(Debug)]
pub struct Native {
    memory: ProcessMemory,
    /// Its memory, writable everywhere.
    file: File,
    shim: Shim,
    interpreter: u64,
    /// It maps chunks for its frames.
    has_chunks: bool,
    loader: u64,
    /// Functions of Python's raw, mem and obj domains: an object that one of them is in is counted there.
    python: Vec<u64>,
    /// In the order of the wrappers.
    originals: [Option<u64>; ALL],
    /// Other addresses that lead there, as the shim knows them.
    aliases: [Option<u64>; COUNT],
    objects: HashMap<Place, Option<Known>>,
    unloaded: HashSet<FileId>,
    /// What the slots with wrappers held before.
    saved: BTreeMap<u64, u64>,
}

/// Why the wrappers could not be put into place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NativeError {
    /// It is linked statically, or only the interpreter calls `malloc`.
    #[error(
        "nothing in the process but the interpreter itself calls malloc through the loader, so --native has nothing to see there"
    )]
    Nothing,
    /// Memory cannot be read or written.
    #[error("its memory cannot be accessed")]
    Memory(#[from] MemoryError),
    /// `/proc/PID/mem`.
    #[error("its memory cannot be opened")]
    Open(#[from] std::io::Error),
    /// `/proc/PID/maps`.
    #[error("its mappings cannot be read")]
    Maps(#[from] procfs::ProcError),
    /// The shim's header.
    #[error("the shim in the process is damaged")]
    Shim,
}

impl Native {
    /// Puts the wrappers of the shim that `identity` names into place. Mappings count from `mmap_bytes` on.
    ///
    /// # Errors
    /// See [`NativeError`].
    pub fn begin(
        memory: ProcessMemory,
        identity: &Identity,
        interpreter: &Interpreter,
        originals: &Originals,
        mmap_bytes: u64,
    ) -> Result<Self, NativeError> {
        let shim = Shim::of(&memory, identity).ok_or(NativeError::Shim)?;
        let threshold = identity.control + offset_of!(Control, mmap_threshold) as u64;
        memory.write(RemoteAddr(threshold), &mmap_bytes.max(1).to_le_bytes())?;
        let pid = memory.pid();
        let python = originals.allocators.iter().flat_map(|allocator| allocator.functions);
        let mut native = Self {
            memory,
            file: open_memory(pid)?,
            shim,
            interpreter: interpreter.runtime.0,
            has_chunks: (interpreter.version.major, interpreter.version.minor) >= FIRST_WITH_CHUNKS,
            loader: loader(pid),
            python: python.collect(),
            originals: [None; ALL],
            aliases: [None; COUNT],
            objects: HashMap::new(),
            unloaded: HashSet::new(),
            saved: BTreeMap::new(),
        };
        native.look()?;
        std::thread::sleep(BETWEEN_LOOKS);
        native.look()?;
        if native.saved.is_empty() {
            return Err(NativeError::Nothing);
        }
        Ok(native)
    }

    /// Looks for objects that came and went. Call it once a second.
    ///
    /// # Errors
    /// When the process cannot be looked into.
    pub fn look(&mut self) -> Result<(), NativeError> {
        let maps = space::maps(self.memory.pid())?;
        self.forget_unloaded(&maps);
        self.meet_new(&maps);
        self.find_originals()?;
        for place in self.ready(|part| part != Part::Nothing && !part.is_interpreter()) {
            self.see_to(&place)?;
        }
        // What the interpreter calls is seen beside native code, not instead of it.
        if !self.saved.is_empty() {
            for place in self.ready(Part::is_interpreter) {
                self.see_to(&place)?;
            }
        }
        Ok(())
    }

    /// The objects that are there to stay and of which such a part gets wrappers.
    fn ready(&self, is_wanted: impl Fn(Part) -> bool) -> Vec<Place> {
        let is_ready = |known: &Known| is_wanted(known.part) && known.looks >= ENOUGH_LOOKS;
        let ready = self
            .objects
            .iter()
            .filter(|(_, known)| known.as_ref().is_some_and(is_ready));
        ready.map(|(place, _)| place.clone()).collect()
    }

    /// Forgets objects that are not there any more.
    fn forget_unloaded(&mut self, maps: &[MemoryMap]) {
        let now: HashSet<Place> = places(maps).map(|(place, _)| place).collect();
        let gone: Vec<Place> = self
            .objects
            .keys()
            .filter(|place| !now.contains(place))
            .cloned()
            .collect();
        for place in gone {
            self.give_up(&place);
            self.objects.remove(&place);
        }
    }

    /// The object at `place` has been unloaded: it may be back there, but is left alone from now on.
    fn give_up(&mut self, place: &Place) {
        if let Some(Some(known)) = self.objects.get_mut(place) {
            known.part = Part::Nothing;
            let range = known.object.range.clone();
            self.saved.retain(|at, _| !range.contains(at));
            self.unloaded.insert(place.file);
        }
    }

    fn meet_new(&mut self, maps: &[MemoryMap]) {
        for (place, name) in places(maps) {
            if let Some(known) = self.objects.get_mut(&place) {
                if let Some(known) = known {
                    known.looks = known.looks.saturating_add(1);
                }
                continue;
            }
            if self.objects.len() >= MAX_OBJECTS {
                return;
            }
            // A further part of an object may begin at the same place in the file.
            let is_part = |known: &Known| known.object.range.contains(&place.base);
            let known = if self.objects.values().flatten().any(is_part) {
                None
            } else {
                Object::read(&self.memory, place.base, name)
            };
            let known = known.map(|object| Known {
                part: self.part(&object, &place),
                object,
                looks: 1,
            });
            self.objects.insert(place, known);
        }
    }

    fn part(&self, object: &Object, place: &Place) -> Part {
        let holds = |address: u64| object.range.contains(&address);
        let is_allocator = object.defines.first().is_some_and(Option::is_some) && !object.is_libc;
        let is_unsafe = self.unloaded.contains(&place.file) || self.unloaded.len() >= MAX_UNLOADED;
        let has_python = self.python.iter().any(|&function| holds(function));
        match (is_unsafe || is_allocator || holds(self.loader), holds(self.interpreter)) {
            (true, _) => Part::Nothing,
            (false, true) if self.has_chunks => Part::Mappings,
            (false, true) => Part::Ffi,
            (false, false) if has_python => Part::Nothing,
            (false, false) if object.is_libc => Part::AllButMappings,
            (false, false) => Part::All,
        }
    }

    /// Finds the functions that are not known yet, and tells the shim.
    fn find_originals(&mut self) -> Result<(), NativeError> {
        for which in 0..ALL {
            if self.original(which).is_some() {
                continue;
            }
            let address = if which < FFI_CALL {
                self.resolve(which)
            } else {
                self.resolve_ffi()
            };
            let Some(address) = address else { continue };
            let at = self.shim.original_at(which);
            self.memory.write(RemoteAddr(at), &address.to_le_bytes())?;
            if let Some(place) = self.originals.get_mut(which) {
                *place = Some(address);
            }
        }
        for which in 0..COUNT {
            let alias = self.original(which).and_then(|_| self.stand_in(which));
            let Some(place) = self.aliases.get_mut(which).filter(|known| **known != alias) else {
                continue;
            };
            let at = self.shim.table + (offset_of!(Table, aliases) + which * 8) as u64;
            self.memory.write(RemoteAddr(at), &alias.unwrap_or(1).to_le_bytes())?;
            *place = alias;
        }
        Ok(())
    }

    /// What wrapper number `which` passes on to.
    fn original(&self, which: usize) -> Option<u64> {
        self.originals.get(which).copied().flatten()
    }

    fn known(&self) -> impl Iterator<Item = &Known> {
        self.objects.values().flatten()
    }

    /// The objects that define function number `which`, and where.
    fn definitions(&self, which: usize) -> Vec<(&Object, u64)> {
        let defined = |known: &'_ Known| known.object.defines.get(which).copied().flatten();
        self.known()
            .filter_map(|known| Some((&known.object, defined(known)?)))
            .collect()
    }

    /// What objects call as function number `which`: the definition that the loader has chosen for the interpreter, or else
    /// for most of those who have called it already; or the only one that there is.
    fn resolve(&self, which: usize) -> Option<u64> {
        let definitions = self.definitions(which);
        // The C library's leads to its `realloc`, which it calls through a slot that is counted already.
        let is_thin = |object: &Object| {
            which == REALLOCARRAY && object.is_libc && object.slots.iter().any(|slot| slot.which == REALLOC)
        };
        let mut votes: HashMap<u64, usize> = HashMap::new();
        for known in self.known() {
            let weight = if known.object.range.contains(&self.interpreter) {
                MAX_OBJECTS
            } else {
                1
            };
            for slot in known.object.slots.iter().filter(|slot| slot.which == which) {
                let value = self.memory.read_u64(RemoteAddr(slot.at)).unwrap_or(0);
                let value = self.shim.wrapped(value).map_or(value, |_| 0);
                if definitions.iter().any(|&(_, address)| address == value) {
                    *votes.entry(value).or_default() += weight;
                }
            }
        }
        let elected = votes.into_iter().max_by_key(|&(address, votes)| (votes, address));
        let address = match (elected, definitions.as_slice()) {
            (Some((address, _)), _) => address,
            (None, &[(_, address)]) => address,
            _ => return None,
        };
        let (object, _) = definitions.iter().find(|(_, at)| *at == address)?;
        (!is_thin(object)).then_some(address)
    }

    /// An `ffi_call` that objects call and no wrapper passes on to yet: that of most of them. A library may have brought its own.
    fn resolve_ffi(&self) -> Option<u64> {
        // What a libffi calls of itself counts only where nobody else calls it.
        const BY_OTHERS: usize = MAX_OBJECTS;
        let definitions = self.definitions(FFI_CALL);
        let mut votes: HashMap<u64, usize> = HashMap::new();
        for known in self.known() {
            for slot in known.object.slots.iter().filter(|slot| slot.which == FFI_CALL) {
                let value = self.memory.read_u64(RemoteAddr(slot.at)).unwrap_or(0);
                let address = match definitions.as_slice() {
                    &[(_, only)] => only,
                    _ => value,
                };
                if definitions.iter().any(|&(_, defined)| defined == address) {
                    let is_own = known.object.range.contains(&address);
                    *votes.entry(address).or_default() += if is_own { 1 } else { BY_OTHERS };
                }
            }
        }
        votes.retain(|&address, _| !self.originals.contains(&Some(address)));
        let elected = votes.into_iter().max_by_key(|&(address, votes)| (votes, address));
        elected.map(|(address, _)| address)
    }

    /// Whose wrapper belongs into a slot that holds `value`.
    fn wrapper_for(&self, slot: Slot, value: u64) -> usize {
        if slot.which != FFI_CALL {
            return slot.which;
        }
        let is_its = |which: &usize| {
            self.original(*which) == Some(value)
                || self.shim.wrappers.get(*which).is_some_and(|&wrapper| wrapper == value)
        };
        (FFI_CALL..ALL).find(is_its).unwrap_or(FFI_CALL)
    }

    /// Puts wrappers into the slots of an object, and finds out whether it is still the one that had them.
    fn see_to(&mut self, place: &Place) -> Result<(), NativeError> {
        let Some(Some(known)) = self.objects.get(place) else {
            return Ok(());
        };
        let (slots, range, part) = (known.object.slots.clone(), known.object.range.clone(), known.part);
        let is_ours = |at: u64| {
            let value = self.memory.read_u64(RemoteAddr(at));
            value.is_ok_and(|value| self.shim.wrapped(value).is_some())
        };
        let mut had = self.saved.range(range.clone()).map(|(&at, _)| at).peekable();
        if had.peek().is_some() && !had.any(is_ours) {
            self.give_up(place);
            return Ok(());
        }
        for slot in slots.into_iter().filter(|slot| part.has(slot.which)) {
            self.put(slot, &range, part)?;
        }
        Ok(())
    }

    /// Puts a wrapper into a slot, if it holds what the wrapper passes on to.
    fn put(&mut self, slot: Slot, range: &Range<u64>, part: Part) -> Result<(), NativeError> {
        // Gone, if it cannot be read.
        let Ok(value) = self.memory.read_u64(RemoteAddr(slot.at)) else {
            return Ok(());
        };
        let which = self.wrapper_for(slot, value);
        let wrapper = match (part, which) {
            (Part::Mappings, MMAP) => Some(self.shim.chunk_mmap),
            (_, which) => self.shim.wrappers.get(which).copied(),
        };
        let (Some(original), Some(wrapper)) = (self.original(which), wrapper) else {
            return Ok(());
        };
        if value == wrapper {
            self.saved.entry(slot.at).or_insert(original);
            return Ok(());
        }
        let is_stand_in = || slot.which != FFI_CALL && self.stand_in(slot.which) == Some(value);
        if self.saved.len() >= MAX_SLOTS {
            return Ok(());
        }
        if value != original && !is_stand_in() && !self.is_unbound(slot, value, range) {
            return Ok(());
        }
        if self.saved.is_empty() {
            let used = self.shim.table + offset_of!(Table, used) as u64;
            self.memory.write(RemoteAddr(used), &1_u64.to_le_bytes())?;
        }
        // Noted first: whatever happens to us in between, it is looked at again.
        self.saved.insert(slot.at, value);
        let _ = self.file.write_all_at(&wrapper.to_le_bytes(), slot.at);
        Ok(())
    }

    /// What the program has in place of function number `which` for those who take its address: it leads there.
    fn stand_in(&self, which: usize) -> Option<u64> {
        self.known()
            .find_map(|known| known.object.stand_ins.get(which).copied().flatten())
    }

    /// Whether a slot leads to the loader, which would find the only definition that there is.
    fn is_unbound(&self, slot: Slot, value: u64, range: &Range<u64>) -> bool {
        const PUSH: u8 = 0x68;
        const LANDING_PAD: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
        let Some(number) = slot.lazy else { return false };
        let original = self.original(slot.which);
        let is_only = matches!(self.definitions(slot.which).as_slice(), &[(_, only)] if Some(only) == original);
        if !range.contains(&value) || !is_only {
            return false;
        }
        let Ok(code) = self.memory.read_array::<9>(RemoteAddr(value)) else {
            return false;
        };
        let code = code.strip_prefix(&LANDING_PAD).unwrap_or(&code);
        code.first() == Some(&PUSH) && code.get(1..5) == Some(&number.to_le_bytes())
    }

    /// Takes the wrappers out again, as far as they are there.
    pub fn take_out(&mut self) {
        for (&at, &before) in &self.saved {
            take_back(&self.memory, &self.file, &self.shim, at, before);
        }
    }

    /// What is covered.
    #[must_use]
    pub fn coverage(&self) -> Coverage {
        let has_wrapper = |known: &&Known| self.saved.range(known.object.range.clone()).next().is_some();
        let missing = |&(_, original): &(&str, &Option<u64>)| original.is_none();
        let calls_ffi = |known: &&Known| {
            let mut slots = known.object.slots.iter().filter(|slot| slot.which == FFI_CALL);
            slots.any(|slot| self.saved.contains_key(&slot.at))
        };
        let mut through_ffi: Vec<String> = self
            .known()
            .filter(calls_ffi)
            .map(|known| known.object.name.clone())
            .collect();
        through_ffi.sort_unstable();
        let malloc = self.originals.get(MALLOC).copied().flatten();
        let allocator = self
            .known()
            .find(|known| malloc.is_some_and(|address| known.object.range.contains(&address)));
        Coverage {
            objects: self.known().filter(has_wrapper).count(),
            slots: self.saved.len(),
            functions_left_out: NAMES
                .into_iter()
                .zip(&self.originals)
                .filter(missing)
                .map(|(name, _)| name)
                .collect(),
            through_ffi,
            allocator: allocator.map(|known| known.object.name.clone()),
            is_glibc: allocator.is_some_and(|known| known.object.is_libc && known.object.name.starts_with("libc")),
            unloaded: self.unloaded.len(),
        }
    }

    /// The slots with wrappers and what they held before.
    #[must_use]
    pub fn slots(&self) -> &BTreeMap<u64, u64> {
        &self.saved
    }
}

fn open_memory(pid: i32) -> std::io::Result<File> {
    File::options()
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(format!("/proc/{}/mem", observe::reachable(pid)))
}

/// Where the loader is, which starts programs; 0 for a program without one.
pub(super) fn loader(pid: i32) -> u64 {
    const AT_BASE: u64 = 7;
    let auxv = procfs::process::Process::new(pid).and_then(|process| process.auxv());
    auxv.ok().and_then(|auxv| auxv.get(&AT_BASE).copied()).unwrap_or(0)
}

/// Gives a slot back, if it holds a wrapper.
fn take_back(memory: &ProcessMemory, file: &File, shim: &Shim, at: u64, before: u64) -> bool {
    let is_ours = memory
        .read_u64(RemoteAddr(at))
        .is_ok_and(|value| shim.wrapped(value).is_some());
    is_ours && file.write_all_at(&before.to_le_bytes(), at).is_ok()
}

/// Takes out the wrappers of the region that `identity` names, wherever they are: whoever put them there may have been killed, and
/// a forked child has copies. True if there were ever any.
///
/// # Errors
/// When the process cannot be looked into.
pub fn restore(memory: &ProcessMemory, identity: &Identity) -> Result<bool, NativeError> {
    let Some(shim) = Shim::of(memory, identity) else {
        return Ok(false);
    };
    let table = shim.table(memory).ok_or(NativeError::Shim)?;
    if table.used == 0 {
        return Ok(false);
    }
    let file = open_memory(memory.pid())?;
    for _ in 0..ROUNDS {
        let maps = space::maps(memory.pid())?;
        let objects: Vec<Object> = places(&maps)
            .take(MAX_OBJECTS)
            .filter_map(|(place, name)| Object::read(memory, place.base, name))
            .collect();
        let stand_in = |which: usize| {
            objects
                .iter()
                .find_map(|object| object.stand_ins.get(which).copied().flatten())
        };
        let mut found = false;
        for slot in objects.iter().flat_map(|object| &object.slots) {
            let value = memory.read_u64(RemoteAddr(slot.at)).unwrap_or(0);
            let Some(which) = shim.wrapped(value) else { continue };
            // A call goes to the function; who takes its address gets that of the program's stand-in.
            let taken = stand_in(which).filter(|_| slot.lazy.is_none());
            let mut functions = table.functions.iter().chain(&table.ffi_calls);
            if let Some(original) = taken.or(functions.nth(which).copied()) {
                found |= take_back(memory, &file, &shim, slot.at, original);
            }
        }
        if !found {
            break;
        }
    }
    Ok(true)
}

/// True if memory of the process, wherever it is, holds the address of a wrapper: somebody has copied it out of a slot, and
/// may call it. Also true if there is more memory than can be searched, or it cannot be read.
#[must_use]
pub fn is_held(memory: &ProcessMemory, identity: &Identity) -> bool {
    let Some(shim) = Shim::of(memory, identity) else {
        return false;
    };
    let Ok(maps) = space::maps(memory.pid()) else {
        return true;
    };
    let present = Pagemap::open(observe::reachable(memory.pid()));
    let region = identity.base..identity.base.saturating_add(identity.len);
    let text = identity.text..identity.text.saturating_add(identity.text_len);
    let wanted = MMPermissions::READ | MMPermissions::WRITE | MMPermissions::PRIVATE;
    let (mut left, mut words) = (MAX_SEARCH_BYTES, Words::default());
    let mut holds = |pages: Range<u64>| {
        let Some(rest) = left.checked_sub(pages.end - pages.start) else {
            return true;
        };
        left = rest;
        words.any(memory, pages, |word| {
            text.contains(&word) && shim.wrapped(word).is_some()
        })
    };
    for map in maps.iter().filter(|map| map.perms.contains(wanted)) {
        let (start, end) = map.address;
        if region.contains(&start) {
            continue;
        }
        let mut at = start;
        while at < end {
            let next = (at + PAGES_AT_ONCE * PAGE).min(end);
            let there = present.as_ref().ok().and_then(|pages| pages_there(pages, at..next));
            let runs = there.unwrap_or_else(|| std::iter::once(at..next).collect());
            if runs.into_iter().any(&mut holds) {
                return true;
            }
            at = next;
        }
    }
    false
}

/// The runs of pages in `range` that are in memory or swapped out: the others are zero, and are not to be made by
/// reading them.
fn pages_there(pagemap: &Pagemap, range: Range<u64>) -> Option<Vec<Range<u64>>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let found = pagemap.pages(range, PRESENT | SWAPPED, |page| match runs.last_mut() {
        Some(run) if run.end == page => run.end = page + PAGE,
        _ => runs.push(page..page + PAGE),
    });
    found.is_ok().then_some(runs)
}
