//! The loaded objects of a process and their relocation slots: the words through which each calls functions of others.
//!
//! All of it is read out of the process's memory, as the loader has left it, so no file needs to be found or opened. A word
//! is a slot of `malloc`, say, because a relocation says so: the loader has written the function's address there, or (a slot
//! that is bound at the first call) the address of the stub that asks the loader.

use super::elf::{Dynamic, ElfFile};
use super::process::printable;
use procfs::process::{MMPermissions, MMapPath, MemoryMap};
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};
use pyheap_protocol::control::native::NAMES;
use std::ops::Range;
use std::path::Path;

/// Most bytes of relocations, names or symbols that are read of one object.
const MAX_TABLE_BYTES: u64 = 64 << 20;
/// Most slots of one object: there is one a function, and a few in tables.
const MAX_SLOTS: usize = 1024;
/// Bytes of a relocation with addend, and of a symbol.
const RELOCATION_BYTES: usize = 24;
const SYMBOL_BYTES: u64 = 24;
/// A function that only a C library has.
const OF_LIBC: &str = "__libc_start_main";

/// A file, by device and inode.
pub type FileId = (i32, i32, u64);

/// Where an object begins.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// Its file.
    pub file: FileId,
    /// The address of its first byte.
    pub base: u64,
}

/// A word that holds the address of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Where it is.
    pub at: u64,
    /// Which function: its place in [`NAMES`].
    pub which: usize,
    /// Its number among the slots that are bound at the first call, if it may be one of those.
    pub lazy: Option<u32>,
}

/// A program or library in a process.
#[derive(Debug, Clone)]
pub struct Object {
    /// The last component of its path.
    pub name: String,
    /// Its addresses.
    pub range: Range<u64>,
    /// Its slots of the functions in [`NAMES`].
    pub slots: Vec<Slot>,
    /// Where it defines these functions itself.
    pub defines: [Option<u64>; NAMES.len()],
    /// Where a program that is not position-independent has its own stand-in for these functions: whoever takes the function's
    /// address gets that one's.
    pub stand_ins: [Option<u64>; NAMES.len()],
    /// It is the C library.
    pub is_libc: bool,
}

/// Where objects may begin in `maps`, with their names: where the first byte of a file is mapped.
pub fn places(maps: &[MemoryMap]) -> impl Iterator<Item = (Place, String)> {
    maps.iter().filter(|map| map.offset == 0).filter_map(|map| {
        let MMapPath::Path(path) = &map.pathname else {
            return None;
        };
        let name = printable(Path::new(path.file_name().unwrap_or_default()));
        let file = (map.dev.0, map.dev.1, map.inode);
        let is_private = map.perms.contains(MMPermissions::PRIVATE | MMPermissions::READ);
        is_private.then_some((
            Place {
                file,
                base: map.address.0,
            },
            name,
        ))
    })
}

impl Object {
    /// Reads the object at `base`; `None` if there is none that makes sense, or if it is linked statically.
    #[must_use]
    pub fn read(memory: &ProcessMemory, base: u64, name: String) -> Option<Self> {
        let (elf, bias) = ElfFile::in_memory(memory, base).ok()?;
        let end = elf
            .segments
            .iter()
            .map(|segment| segment.address.saturating_add(segment.memory_size))
            .max()?;
        let range = base..bias.checked_add(end)?;
        let wanted: Vec<&'static str> = NAMES.into_iter().chain([OF_LIBC]).collect();
        let symbols = elf.symbols(&wanted).ok()?;
        let defines = NAMES.map(|name| {
            let symbol = symbols.get(name).filter(|symbol| symbol.function)?;
            Some(symbol.address.wrapping_add(bias))
        });
        let relocations = Relocations {
            elf: &elf,
            dynamic: elf.dynamic.as_ref()?,
            range: range.clone(),
            bias,
        };
        let mut stand_ins = [None; NAMES.len()];
        let slots = relocations.slots(memory, &mut stand_ins)?;
        Some(Self {
            name,
            range,
            slots,
            defines,
            stand_ins,
            is_libc: symbols.contains_key(OF_LIBC),
        })
    }
}

/// Where the relocations of an object are.
struct Relocations<'a> {
    elf: &'a ElfFile,
    dynamic: &'a Dynamic,
    range: Range<u64>,
    bias: u64,
}

impl Relocations<'_> {
    const PLT_BYTES: u64 = 2;
    const SYMBOLS: u64 = 6;
    const RELOCATIONS: u64 = 7;
    const RELOCATION_BYTES: u64 = 8;
    const PLT: u64 = 23;
    const RELATIVE: u64 = 0x6fff_fff9;

    fn value(&self, tag: u64) -> Option<u64> {
        self.dynamic.value(tag)
    }

    /// An address within the object.
    fn address(&self, tag: u64) -> Option<u64> {
        self.dynamic.address(tag).filter(|address| self.range.contains(address))
    }

    fn table(&self, memory: &ProcessMemory, address: u64, len: u64) -> Option<Vec<u8>> {
        let len = Some(len).filter(|&len| len <= MAX_TABLE_BYTES)?;
        memory.read_vec(RemoteAddr(address), usize::try_from(len).ok()?).ok()
    }

    fn slots(&self, memory: &ProcessMemory, stand_ins: &mut [Option<u64>; NAMES.len()]) -> Option<Vec<Slot>> {
        const X86_64_64: u32 = 1;
        const GLOB_DAT: u32 = 6;
        const JUMP_SLOT: u32 = 7;
        // (where, which symbol, number among the lazy ones)
        let mut found: Vec<(u64, u32, Option<u32>)> = Vec::new();
        if let (Some(at), Some(len)) = (self.address(Self::PLT), self.value(Self::PLT_BYTES)) {
            for (number, entry) in self.table(memory, at, len)?.chunks_exact(RELOCATION_BYTES).enumerate() {
                let (at, info) = (word(entry, 0)?, word(entry, 8)?);
                if info as u32 == JUMP_SLOT {
                    found.push((at, (info >> 32) as u32, u32::try_from(number).ok()));
                }
            }
        }
        if let (Some(at), Some(len)) = (self.address(Self::RELOCATIONS), self.value(Self::RELOCATION_BYTES)) {
            // Those that need no symbol come first, and may be millions.
            let skipped = self.value(Self::RELATIVE).unwrap_or(0);
            let skipped = skipped.saturating_mul(RELOCATION_BYTES as u64).min(len);
            for entry in self
                .table(memory, at + skipped, len - skipped)?
                .chunks_exact(RELOCATION_BYTES)
            {
                let (at, info, addend) = (word(entry, 0)?, word(entry, 8)?, word(entry, 16)?);
                if matches!(info as u32, X86_64_64 | GLOB_DAT) && addend == 0 {
                    found.push((at, (info >> 32) as u32, None));
                }
            }
        }
        let Some(last) = found.iter().map(|&(_, symbol, _)| symbol).max() else {
            return Some(Vec::new());
        };
        let names = self.elf.dynamic_strings()?;
        let symbols = (u64::from(last) + 1) * SYMBOL_BYTES;
        let symbols = self.table(memory, self.address(Self::SYMBOLS)?, symbols)?;
        let mut slot = |&(at, symbol, lazy): &(u64, u32, Option<u32>)| {
            let symbol = symbols.get(symbol as usize * SYMBOL_BYTES as usize..)?;
            let is_defined = symbol.get(6..8)? != [0, 0];
            let value = word(symbol, 8)?;
            let name = u32::from_le_bytes(symbol.get(..4)?.try_into().ok()?);
            let which = which(names.get(name as usize..)?)?;
            if let (false, 1.., Some(place)) = (is_defined, value, stand_ins.get_mut(which)) {
                *place = Some(self.bias.wrapping_add(value));
            }
            let at = self.bias.wrapping_add(at);
            let is_inside = self.range.contains(&at) && at.is_multiple_of(8);
            is_inside.then_some(Slot { at, which, lazy })
        };
        Some(found.iter().filter_map(&mut slot).take(MAX_SLOTS).collect())
    }
}

/// The word at byte `at`.
fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + 8)?;
    bytes.try_into().map(u64::from_le_bytes).ok()
}

/// The place in [`NAMES`] of the name that `bytes` begin with.
fn which(bytes: &[u8]) -> Option<usize> {
    // The offsets of both are 64 bits wide.
    if bytes.starts_with(b"mmap64\0") {
        return NAMES.iter().position(|name| *name == "mmap");
    }
    NAMES
        .iter()
        .position(|name| bytes.get(name.len()) == Some(&0) && bytes.starts_with(name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pyheap_injector::space;

    #[test]
    fn names_are_whole() {
        assert_eq!(
            (which(b"malloc\0x"), which(b"mmap64\0"), which(b"free\0")),
            (Some(0), Some(10), Some(3))
        );
        assert_eq!(
            (which(b"malloc_trim\0"), which(b"free"), which(b"")),
            (None, None, None)
        );
    }

    /// This very process calls `malloc` through slots, which hold an address in the C library.
    #[test]
    fn the_slots_of_this_process_lead_to_the_c_library() {
        let pid = std::process::id() as i32;
        let memory = ProcessMemory::new(pid);
        let maps = space::maps(pid).unwrap();
        let objects: Vec<Object> = places(&maps)
            .filter_map(|(place, name)| Object::read(&memory, place.base, name))
            .collect();
        let libc = objects.iter().find(|object| object.is_libc).expect("a C library");
        let malloc = libc.defines[0].expect("it defines malloc");
        assert!(libc.range.contains(&malloc));
        let own = objects
            .iter()
            .flat_map(|object| &object.slots)
            .filter(|slot| slot.which == 0)
            .any(|slot| memory.read_u64(RemoteAddr(slot.at)).unwrap() == malloc);
        assert!(own, "no slot of malloc");
    }
}
