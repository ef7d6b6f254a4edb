//! Reads what is needed of a mapped ELF file: segments, a few sections, a few symbols.
//!
//! The file belongs to the target, and may be anything. Only pieces of it are read, each up to a named cap, and never
//! the whole: an interpreter with debug information is 30 MB and more. Where the file cannot be had any more, the loaded
//! parts in memory tell what the loader needs, which is all but sections ([`ElfFile::in_memory`]). What it refuses to do:
//! 32-bit and big-endian files.

use crate::frames::PyVersion;
use goblin::container::{Container, Ctx, Endian};
use goblin::elf::program_header::{PF_W, PF_X, PT_DYNAMIC, PT_LOAD, PT_TLS, ProgramHeader};
use goblin::elf::section_header::{SHF_COMPRESSED, SHT_NOBITS, SectionHeader};
use goblin::elf::sym::{STT_FUNC, STT_OBJECT, Symtab, st_type};
use goblin::elf::{Elf, header};
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// ELF itself cannot count more program headers without tricks that nobody plays.
const MAX_SEGMENTS: u16 = 512;
/// Files with more sections have been made to hurt; interpreters have below 50.
const MAX_SECTIONS: u16 = 4096;
/// Names of all sections together.
const MAX_SECTION_NAMES_BYTES: u64 = 1 << 20;
/// One symbol or string table. The .symtab of a CPython is below 1 MB, a large embedder's some 50 MB.
const MAX_TABLE_BYTES: u64 = 128 << 20;
/// Longer names than this are not compared; the ones that are looked for have at most 30 bytes, and a suffix.
const MAX_SYMBOL_BYTES: usize = 64;
/// Longer names are cut where a function's is shown.
const MAX_FUNCTION_BYTES: usize = 256;
/// Names of C++ are long before they are made readable.
const MAX_MANGLED_BYTES: usize = 4096;
/// A symbol table entry of a 64-bit file.
const SYMBOL_BYTES: u64 = 24;

const CTX: Ctx = Ctx {
    container: Container::Big,
    le: Endian::Little,
};

/// Why a file could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElfError {
    /// The file cannot be read.
    #[error("the file cannot be read")]
    Io(#[from] io::Error),
    /// The loaded parts cannot be read.
    #[error("the loaded parts of the file cannot be read")]
    Memory(#[from] pyheap_injector::MemoryError),
    /// It is no ELF file.
    #[error("the file is no ELF file")]
    NotElf,
    /// It is not for a 64-bit little-endian machine.
    #[error("the file is for another kind of machine (32-bit or big-endian)")]
    OtherMachine,
    /// Its structure makes no sense.
    #[error("the ELF file is damaged: {0}")]
    Damaged(&'static str),
    /// A part of it is larger than is read.
    #[error("{what} of the ELF file has {len} bytes, more than is read")]
    TooLarge {
        /// Which part.
        what: String,
        /// Its size.
        len: u64,
    },
}

/// A part of the file that is mapped into memory (`PT_LOAD`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it is in the file.
    pub file_offset: u64,
    /// How much of it is in the file.
    pub file_size: u64,
    /// Its address by the file, before the load bias.
    pub address: u64,
    /// Its size in memory, .bss included.
    pub memory_size: u64,
    /// It holds code.
    pub executable: bool,
    /// It may be written.
    pub writable: bool,
}

/// A section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Its name, such as `.PyRuntime`.
    pub name: String,
    /// Its address by the file, before the load bias.
    pub address: u64,
    /// Its size.
    pub size: u64,
    file_offset: Option<u64>,
    compressed: bool,
}

/// A symbol that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol {
    /// Its address by the file, before the load bias.
    pub address: u64,
    /// Its size; 0 when the file does not say.
    pub size: u64,
    /// It is in `.dynsym`, so other modules may use it.
    pub exported: bool,
    /// It is a function, else data.
    pub function: bool,
}

/// What a file is known by: device, inode, size, and when it was last changed. (A file's owner can set every time but that one.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId([u64; 5]);

impl FileId {
    fn of(file: &File) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let found = file.metadata().ok()?;
        let changed = [found.ctime().cast_unsigned(), found.ctime_nsec().cast_unsigned()];
        Some(Self([found.dev(), found.ino(), found.len(), changed[0], changed[1]]))
    }
}

/// Symbols by name.
pub type Symbols = HashMap<&'static str, Symbol>;

/// An ELF file, 64-bit, little-endian.
#[derive(Debug)]
pub struct ElfFile {
    /// `None` for one that was found in memory.
    file: Option<File>,
    len: u64,
    /// Of one that was found in memory: the dynamic symbol table and its strings.
    symbols: Option<(Vec<u8>, Vec<u8>)>,
    /// The same one's dynamic section.
    pub dynamic: Option<Dynamic>,
    /// How much of each thread's local storage belongs to it, rounded up as the loader does; 0 for none.
    pub tls_bytes: u64,
    /// Linked for any address (a PIE or a shared library), else for a fixed one.
    pub position_independent: bool,
    /// The parts in memory, in the file's order.
    pub segments: Vec<Segment>,
    sections: Vec<Section>,
}

impl ElfFile {
    /// Reads the headers of `file`.
    ///
    /// # Errors
    /// When it cannot be read, or is no ELF file for this kind of machine.
    pub fn open(file: File) -> Result<Self, ElfError> {
        let len = file.metadata()?.len();
        let read = |offset: u64, len: usize| -> Result<Vec<u8>, ElfError> {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, offset)?;
            Ok(bytes)
        };
        let ident = read(0, header::header64::SIZEOF_EHDR).map_err(|_| ElfError::NotElf)?;
        if !ident.starts_with(header::ELFMAG) {
            return Err(ElfError::NotElf);
        }
        if ident.get(header::EI_CLASS) != Some(&header::ELFCLASS64)
            || ident.get(header::EI_DATA) != Some(&header::ELFDATA2LSB)
        {
            return Err(ElfError::OtherMachine);
        }
        let header = Elf::parse_header(&ident).map_err(|_| ElfError::Damaged("the header"))?;
        if header.e_phnum > MAX_SEGMENTS || header.e_shnum > MAX_SECTIONS {
            return Err(ElfError::Damaged("too many segments or sections"));
        }

        let count = usize::from(header.e_phnum);
        let bytes = read(header.e_phoff, count * ProgramHeader::size(CTX))?;
        let headers = ProgramHeader::parse(&bytes, 0, count, CTX).map_err(|_| ElfError::Damaged("the segments"))?;
        let segments = headers.iter().filter(|h| h.p_type == PT_LOAD).map(segment).collect();
        let tls_bytes = tls_bytes(&headers);

        let count = usize::from(header.e_shnum);
        let bytes = read(header.e_shoff, count * SectionHeader::size(CTX))?;
        let headers: Vec<SectionHeader> = if count == 0 {
            Vec::new()
        } else {
            SectionHeader::parse_from(&bytes, 0, count, CTX).map_err(|_| ElfError::Damaged("the sections"))?
        };
        let names = match headers.get(usize::from(header.e_shstrndx)) {
            Some(names) if names.sh_size <= MAX_SECTION_NAMES_BYTES => {
                read(names.sh_offset, usize::try_from(names.sh_size).unwrap_or(0))?
            }
            _ => Vec::new(),
        };
        let sections = headers.iter().map(|h| section(h, &names)).collect();
        Ok(Self {
            len,
            position_independent: header.e_type != header::ET_EXEC,
            segments,
            sections,
            file: Some(file),
            symbols: None,
            dynamic: None,
            tls_bytes,
        })
    }

    /// Reads the headers of a file that is loaded at `base`, out of the process's memory, with its load bias. There are no
    /// sections then, and no symbols but the exported ones.
    ///
    /// # Errors
    /// When the memory cannot be read, or is no ELF file for this kind of machine.
    pub fn in_memory(mem: &ProcessMemory, base: u64) -> Result<(Self, u64), ElfError> {
        let read = |at: u64, len: usize| mem.read_vec(RemoteAddr(at), len);
        let ident = read(base, header::header64::SIZEOF_EHDR)?;
        if !ident.starts_with(header::ELFMAG) {
            return Err(ElfError::NotElf);
        }
        if ident.get(header::EI_CLASS) != Some(&header::ELFCLASS64)
            || ident.get(header::EI_DATA) != Some(&header::ELFDATA2LSB)
        {
            return Err(ElfError::OtherMachine);
        }
        let header = Elf::parse_header(&ident).map_err(|_| ElfError::Damaged("the header"))?;
        if header.e_phnum > MAX_SEGMENTS {
            return Err(ElfError::Damaged("too many segments"));
        }
        let count = usize::from(header.e_phnum);
        let bytes = read(base.wrapping_add(header.e_phoff), count * ProgramHeader::size(CTX))?;
        let headers = ProgramHeader::parse(&bytes, 0, count, CTX).map_err(|_| ElfError::Damaged("the segments"))?;
        let segments: Vec<Segment> = headers.iter().filter(|h| h.p_type == PT_LOAD).map(segment).collect();
        let first = segments
            .iter()
            .find(|segment| segment.file_offset == 0)
            .ok_or(ElfError::Damaged("the segments"))?;
        let bias = base.wrapping_sub(first.address);
        let dynamic = headers
            .iter()
            .find(|h| h.p_type == PT_DYNAMIC)
            .map(|h| Dynamic::read(mem, h.p_vaddr.wrapping_add(bias), bias))
            .transpose()?;
        let symbols = dynamic
            .as_ref()
            .map(|dynamic| dynamic_symbols(mem, dynamic))
            .transpose()?;
        let file = Self {
            file: None,
            len: 0,
            symbols,
            dynamic,
            tls_bytes: tls_bytes(&headers),
            position_independent: header.e_type != header::ET_EXEC,
            segments,
            sections: Vec::new(),
        };
        Ok((file, bias))
    }

    /// The build id in hex, by which a file is known to be the same; `None` when it has none.
    #[must_use]
    pub fn build_id(&self) -> Option<String> {
        const MAX_NOTE_BYTES: u64 = 4096;
        /// Lengths of name and content, type, the name `GNU`.
        const HEAD: usize = 16;
        let note = self.section_bytes(".note.gnu.build-id", MAX_NOTE_BYTES).ok()??;
        let len = note.get(4..8)?.try_into().map(u32::from_le_bytes).ok()?;
        let id = note.get(HEAD..HEAD.checked_add(usize::try_from(len).ok()?)?)?;
        (id.len() >= 8).then(|| id.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The section `name`.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// The content of section `name`; `None` when there is no such section, or it is not in the file, or compressed.
    ///
    /// # Errors
    /// When it is larger than `cap` or cannot be read.
    pub fn section_bytes(&self, name: &str, cap: u64) -> Result<Option<Vec<u8>>, ElfError> {
        let Some((section, offset)) = self
            .section(name)
            .filter(|section| !section.compressed)
            .and_then(|section| Some((section, section.file_offset?)))
        else {
            return Ok(None);
        };
        // The second bound keeps a small file from asking for a large buffer.
        if section.size > cap || section.size > self.len {
            let what = name.to_owned();
            let len = section.size;
            return Err(ElfError::TooLarge { what, len });
        }
        let Some(file) = &self.file else { return Ok(None) };
        let mut bytes = vec![0; usize::try_from(section.size).unwrap_or(0)];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(Some(bytes))
    }

    /// The first bytes of the first segment, up to one page: what must be found in memory if this is the mapped file.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn first_page(&self) -> Result<Option<(u64, Vec<u8>)>, ElfError> {
        let (Some(file), Some(first)) = (&self.file, self.segments.iter().find(|s| !s.writable)) else {
            return Ok(None);
        };
        let mut bytes = vec![0; usize::try_from(first.file_size.min(4096)).unwrap_or(0)];
        file.read_exact_at(&mut bytes, first.file_offset)?;
        Ok(Some((first.address, bytes)))
    }

    /// As [`ElfFile::symbols`], and kept for the next process that runs the same file: workers are many, and an interpreter has
    /// ten thousand symbols. `wanted` is always the same list.
    ///
    /// # Errors
    /// When a symbol table is damaged or too large.
    pub fn known_symbols(&self, wanted: &'static [&'static str]) -> Result<Symbols, ElfError> {
        const MOST: usize = 16;
        static KNOWN: Mutex<Vec<(FileId, Symbols)>> = Mutex::new(Vec::new());
        let lock = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(id) = self.file.as_ref().and_then(FileId::of) else {
            return self.symbols(wanted);
        };
        if let Some((_, symbols)) = lock().iter().find(|(known, _)| *known == id) {
            return Ok(symbols.clone());
        }
        let symbols = self.symbols(wanted)?;
        let mut known = lock();
        if known.len() >= MOST {
            known.remove(0);
        }
        known.push((id, symbols.clone()));
        Ok(symbols)
    }

    /// Looks up defined symbols, in `.dynsym` and, for those not there, in `.symtab`.
    ///
    /// # Errors
    /// When a symbol table is damaged or too large.
    pub fn symbols(&self, wanted: &[&'static str]) -> Result<Symbols, ElfError> {
        let mut found = HashMap::new();
        if let Some((table, names)) = &self.symbols {
            symbols_in(table, names, true, wanted, &mut found)?;
            return Ok(found);
        }
        self.symbols_of(".dynsym", ".dynstr", true, wanted, &mut found)?;
        if wanted.iter().any(|name| !found.contains_key(name)) {
            self.symbols_of(".symtab", ".strtab", false, wanted, &mut found)?;
        }
        Ok(found)
    }

    /// The names of the functions whose code is at `addresses`, which are by the file; none for an address that no symbol
    /// covers by its size.
    ///
    /// # Errors
    /// When a symbol table is damaged or larger than is read for this.
    pub fn functions_at(&self, addresses: &[u64]) -> Result<HashMap<u64, String>, ElfError> {
        /// A CPython's has 1 MB.
        const MAX_BYTES: u64 = 16 << 20;
        let mut found = HashMap::new();
        if let Some((table, names)) = &self.symbols {
            functions_in(table, names, addresses, &mut found)?;
        }
        // The full table first: it has the names that are not exported, too.
        for (table, names) in [(".symtab", ".strtab"), (".dynsym", ".dynstr")] {
            if found.len() < addresses.len()
                && let Some(table) = self.section_bytes(table, MAX_BYTES)?
                && let Some(names) = self.section_bytes(names, MAX_BYTES)?
            {
                functions_in(&table, &names, addresses, &mut found)?;
            }
        }
        Ok(found)
    }

    /// All functions that have names and a size; none of a table that is larger than is read for this.
    ///
    /// # Errors
    /// When a symbol table is damaged.
    pub fn functions(&self) -> Result<Functions, ElfError> {
        /// A CPython's have 1 MB, large libraries of C++ some ten times that.
        const MAX_SYMBOLS: u64 = 16 << 20;
        const MAX_NAMES: u64 = 24 << 20;
        let mut functions = Functions::default();
        if let Some((table, names)) = &self.symbols {
            functions.add(table, names.clone())?;
        }
        // The full table has what the other one has, too.
        for (table, names) in [(".symtab", ".strtab"), (".dynsym", ".dynstr")] {
            if functions.all.is_empty()
                && let Ok(Some(table)) = self.section_bytes(table, MAX_SYMBOLS)
                && let Ok(Some(names)) = self.section_bytes(names, MAX_NAMES)
            {
                functions.add(&table, names)?;
            }
        }
        // Of several at one address the first one counts.
        functions.all.sort_by_key(|function| function.start);
        Ok(functions)
    }

    /// The strings of the dynamic symbols of a file that was found in memory.
    #[must_use]
    pub fn dynamic_strings(&self) -> Option<&[u8]> {
        self.symbols.as_ref().map(|(_, strings)| strings.as_slice())
    }

    fn symbols_of(
        &self,
        table: &'static str,
        names: &'static str,
        exported: bool,
        wanted: &[&'static str],
        found: &mut HashMap<&'static str, Symbol>,
    ) -> Result<(), ElfError> {
        let (Some(table), Some(names)) = (
            self.section_bytes(table, MAX_TABLE_BYTES)?,
            self.section_bytes(names, MAX_TABLE_BYTES)?,
        ) else {
            return Ok(());
        };
        symbols_in(&table, &names, exported, wanted, found)
    }
}

/// The functions of a file, by their addresses there.
#[derive(Debug, Default)]
pub struct Functions {
    all: Vec<Function>,
    names: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct Function {
    start: u64,
    end: u64,
    /// In which table of names, and where.
    name: (u32, u32),
}

impl Functions {
    fn add(&mut self, table: &[u8], names: Vec<u8>) -> Result<(), ElfError> {
        let count = table.len() / usize::try_from(SYMBOL_BYTES).unwrap_or(usize::MAX);
        let symbols = Symtab::parse(table, 0, count, CTX).map_err(|_| ElfError::Damaged("a symbol table"))?;
        let number = self.names.len() as u32;
        for symbol in symbols.iter() {
            let name = u32::try_from(symbol.st_name);
            if let (STT_FUNC, 1.., 1.., Ok(name)) = (st_type(symbol.st_info), symbol.st_shndx, symbol.st_size, name) {
                self.all.push(Function {
                    start: symbol.st_value,
                    end: symbol.st_value.saturating_add(symbol.st_size),
                    name: (number, name),
                });
            }
        }
        self.names.push(names);
        Ok(())
    }

    /// The name of the function whose code is at `address`.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<&[u8]> {
        /// Functions within functions, and other names of the same.
        const NESTED: usize = 64;
        let after = self.all.partition_point(|function| function.start <= address);
        let before = self.all.get(..after)?.iter().rev().take(NESTED);
        let mut covering = before.filter(|function| address < function.end);
        let first = covering.next()?;
        let same = covering.take_while(|function| function.start == first.start);
        let (table, name) = same.last().unwrap_or(first).name;
        let tail = self.names.get(table as usize)?.get(name as usize..)?;
        let tail = tail.get(..tail.len().min(MAX_MANGLED_BYTES)).unwrap_or_default();
        tail.split(|byte| *byte == 0).next().filter(|name| !name.is_empty())
    }

    /// The memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.names.iter().map(Vec::len).sum::<usize>() + self.all.len() * size_of::<Function>()
    }
}

/// Adds those of the symbols in `table` that are wanted and not found yet.
fn symbols_in(
    table: &[u8],
    names: &[u8],
    exported: bool,
    wanted: &[&'static str],
    found: &mut HashMap<&'static str, Symbol>,
) -> Result<(), ElfError> {
    let count = table.len() / usize::try_from(SYMBOL_BYTES).unwrap_or(usize::MAX);
    let symbols = Symtab::parse(table, 0, count, CTX).map_err(|_| ElfError::Damaged("a symbol table"))?;
    let wanted: HashMap<&[u8], &'static str> = wanted.iter().map(|name| (name.as_bytes(), *name)).collect();
    for symbol in symbols.iter() {
        let kind = st_type(symbol.st_info);
        if symbol.st_shndx == 0 || !matches!(kind, STT_FUNC | STT_OBJECT) {
            continue;
        }
        let tail = names.get(symbol.st_name..).unwrap_or_default();
        let mut characters = tail.iter().take(MAX_SYMBOL_BYTES);
        let Some(len) = characters.position(|byte| *byte == 0) else {
            continue;
        };
        let name = tail.get(..len).unwrap_or_default();
        let Some(&name) = wanted.get(without_lto_suffix(name)) else {
            continue;
        };
        found.entry(name).or_insert(Symbol {
            address: symbol.st_value,
            size: symbol.st_size,
            exported,
            function: kind == STT_FUNC,
        });
    }
    Ok(())
}

/// Adds the names of the functions in `table` that are at those of `addresses` which have none yet.
fn functions_in(
    table: &[u8],
    names: &[u8],
    addresses: &[u64],
    found: &mut HashMap<u64, String>,
) -> Result<(), ElfError> {
    let count = table.len() / usize::try_from(SYMBOL_BYTES).unwrap_or(usize::MAX);
    let symbols = Symtab::parse(table, 0, count, CTX).map_err(|_| ElfError::Damaged("a symbol table"))?;
    for symbol in symbols.iter() {
        if symbol.st_shndx == 0 || st_type(symbol.st_info) != STT_FUNC {
            continue;
        }
        let range = symbol.st_value..symbol.st_value.saturating_add(symbol.st_size);
        for address in addresses.iter().filter(|address| range.contains(address)) {
            let tail = names.get(symbol.st_name..).unwrap_or_default();
            let name = tail.split(|byte| *byte == 0).next().unwrap_or_default();
            let name = name.get(..name.len().min(MAX_FUNCTION_BYTES)).unwrap_or_default();
            let name = || String::from_utf8_lossy(name).into_owned();
            found.entry(*address).or_insert_with(name);
        }
    }
    Ok(())
}

/// The size of the thread-local storage, as far below the thread pointer as a program's begins.
fn tls_bytes(headers: &[ProgramHeader]) -> u64 {
    headers.iter().find(|h| h.p_type == PT_TLS).map_or(0, |h| {
        let align = h.p_align.clamp(1, 4096);
        h.p_memsz.checked_next_multiple_of(align).unwrap_or(0)
    })
}

/// A dynamic section in memory: values by tag.
#[derive(Debug)]
pub struct Dynamic {
    values: HashMap<u64, u64>,
    bias: u64,
}

impl Dynamic {
    /// Reads the one at `at`.
    fn read(mem: &ProcessMemory, at: u64, bias: u64) -> Result<Self, ElfError> {
        /// None has more entries.
        const MAX_ENTRIES: u64 = 512;
        let mut values = HashMap::new();
        for number in 0..MAX_ENTRIES {
            let entry: [u8; 16] = mem.read_array(RemoteAddr(at.wrapping_add(number * 16)))?;
            let entry = u128::from_le_bytes(entry);
            let (tag, value) = (entry as u64, (entry >> 64) as u64);
            if tag == 0 {
                break;
            }
            values.insert(tag, value);
        }
        Ok(Self { values, bias })
    }

    /// What stands under a tag.
    #[must_use]
    pub fn value(&self, tag: u64) -> Option<u64> {
        self.values.get(&tag).copied()
    }

    /// The same as an address: glibc's loader adds the bias in place, musl's does not.
    #[must_use]
    pub fn address(&self, tag: u64) -> Option<u64> {
        let value = self.value(tag)?;
        Some(if value < self.bias {
            value.wrapping_add(self.bias)
        } else {
            value
        })
    }
}

/// The dynamic symbol table and its strings.
fn dynamic_symbols(mem: &ProcessMemory, dynamic: &Dynamic) -> Result<(Vec<u8>, Vec<u8>), ElfError> {
    const DT_HASH: u64 = 4;
    const DT_STRTAB: u64 = 5;
    const DT_SYMTAB: u64 = 6;
    const DT_STRSZ: u64 = 10;
    const DT_GNU_HASH: u64 = 0x6fff_fef5;
    let damaged = || ElfError::Damaged("the dynamic section");
    let address = |tag: u64| dynamic.address(tag);
    let count = match (address(DT_HASH), address(DT_GNU_HASH)) {
        (Some(hash), _) => u64::from(mem.read_u32(RemoteAddr(hash.wrapping_add(4)))?),
        (None, Some(hash)) => count_by_gnu_hash(mem, hash)?,
        (None, None) => return Err(damaged()),
    };
    let (Some(symbols), Some(strings), Some(len)) = (address(DT_SYMTAB), address(DT_STRTAB), dynamic.value(DT_STRSZ))
    else {
        return Err(damaged());
    };
    let bytes = count.saturating_mul(SYMBOL_BYTES);
    if bytes > MAX_TABLE_BYTES || len > MAX_TABLE_BYTES {
        let what = "the symbol table".to_owned();
        return Err(ElfError::TooLarge { what, len: bytes });
    }
    let read = |at: u64, len: u64| mem.read_vec(RemoteAddr(at), usize::try_from(len).unwrap_or(0));
    Ok((read(symbols, bytes)?, read(strings, len)?))
}

/// How many symbols there are: one more than the last in the chain of the last bucket.
fn count_by_gnu_hash(mem: &ProcessMemory, hash: u64) -> Result<u64, ElfError> {
    const MAX_BUCKETS: u32 = 1 << 22;
    let word = |at: u64| mem.read_u32(RemoteAddr(hash.wrapping_add(at)));
    let (buckets, first, bloom) = (word(0)?, word(4)?, word(8)?);
    if buckets > MAX_BUCKETS || bloom > MAX_BUCKETS {
        return Err(ElfError::Damaged("the hash table of symbols"));
    }
    let heads = 16 + u64::from(bloom) * 8;
    let bytes = mem.read_vec(RemoteAddr(hash.wrapping_add(heads)), buckets as usize * 4)?;
    let heads_of = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let Some(mut last) = heads_of.max().filter(|&last| last >= first) else {
        return Ok(u64::from(first));
    };
    let chains = heads + u64::from(buckets) * 4;
    for _ in 0..MAX_BUCKETS {
        // The lowest bit ends a chain.
        if word(chains + u64::from(last - first) * 4)? & 1 == 1 {
            break;
        }
        last = last.saturating_add(1);
    }
    Ok(u64::from(last) + 1)
}

fn segment(header: &ProgramHeader) -> Segment {
    Segment {
        file_offset: header.p_offset,
        file_size: header.p_filesz,
        address: header.p_vaddr,
        memory_size: header.p_memsz,
        executable: header.p_flags & PF_X != 0,
        writable: header.p_flags & PF_W != 0,
    }
}

fn section(header: &SectionHeader, names: &[u8]) -> Section {
    let name = names
        .get(header.sh_name..)
        .and_then(|tail| tail.split(|byte| *byte == 0).next())
        .unwrap_or_default();
    Section {
        name: String::from_utf8_lossy(name).into_owned(),
        address: header.sh_addr,
        size: header.sh_size,
        file_offset: (header.sh_type != SHT_NOBITS).then_some(header.sh_offset),
        compressed: header.sh_flags & u64::from(SHF_COMPRESSED) != 0,
    }
}

/// Link-time optimisation renames static symbols: `_PyMem_Raw.lto_priv.0`.
fn without_lto_suffix(name: &[u8]) -> &[u8] {
    const MARK: &[u8] = b".lto_priv.";
    let at = name.windows(MARK.len()).position(|window| window == MARK);
    at.and_then(|at| name.get(..at)).unwrap_or(name)
}

/// `3.10.13`, `3.12.0rc1`, `3.9.2+`.
pub(super) fn parse_version(text: &str) -> Option<PyVersion> {
    let text = text.strip_suffix('+').unwrap_or(text);
    let mut parts = text.splitn(3, '.');
    let (major, minor, rest) = (parts.next()?, parts.next()?, parts.next()?);
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (micro, suffix) = rest.split_at_checked(digits)?;
    let level = |mark: u8, serial: &str| serial.parse::<u8>().ok().filter(|s| *s < 16).map(|s| mark << 4 | s);
    let release = match suffix {
        "" => 0xf0,
        _ => [("rc", 0xc), ("a", 0xa), ("b", 0xb)]
            .into_iter()
            .find_map(|(prefix, mark)| level(mark, suffix.strip_prefix(prefix)?))?,
    };
    let number = |text: &str| {
        text.parse::<u8>()
            .ok()
            .filter(|_| text.bytes().all(|b| b.is_ascii_digit()))
    };
    Some(PyVersion {
        major: number(major)?,
        minor: number(minor)?,
        micro: number(micro)?,
        release,
    })
}

/// Where a segment is in memory.
pub(super) fn in_memory(segment: &Segment, bias: u64) -> Range<u64> {
    let start = segment.address.wrapping_add(bias);
    start..start.saturating_add(segment.memory_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_an_elf_file_with_symbols() {
        let elf = ElfFile::open(File::open("/proc/self/exe").unwrap()).unwrap();
        assert!(elf.segments.iter().any(|s| s.executable));
        assert!(elf.section(".text").is_some());
        let symbols = elf.symbols(&["main", "no_such_symbol"]).unwrap();
        assert!(symbols["main"].function && !symbols["main"].exported);
        assert_eq!(symbols.len(), 1);
    }

    /// The symbols that the C library of this test exports, by its file and by what is loaded of it.
    #[test]
    fn memory_tells_what_the_file_does() {
        let me = procfs::process::Process::myself().unwrap();
        let files = super::super::module::MappedFile::all(&me.maps().unwrap());
        let libc = files.iter().find(|file| file.name().starts_with("libc.")).unwrap();
        let by_file = libc.open(me.pid).unwrap();
        let by_memory = libc.open_in_memory(me.pid).unwrap();
        assert_eq!(by_file.bias, by_memory.bias);
        assert_eq!(by_file.elf.segments, by_memory.elf.segments);
        assert_eq!(by_file.elf.tls_bytes, by_memory.elf.tls_bytes);
        let names = &["malloc", "environ", "no_such_symbol"];
        let symbols = by_memory.elf.symbols(names).unwrap();
        assert_eq!(symbols, by_file.elf.symbols(names).unwrap());
        assert!(symbols["malloc"].exported && symbols.len() == 2);
        assert!(by_file.elf.build_id().is_some_and(|id| id.len() == 40));
    }

    #[test]
    fn other_files_are_refused() {
        let error = ElfFile::open(File::open("/proc/self/maps").unwrap()).unwrap_err();
        assert!(matches!(error, ElfError::NotElf));
    }

    #[test]
    fn versions() {
        let version = |text| parse_version(text).map(|v| v.to_string());
        assert_eq!(version("3.10.13").as_deref(), Some("3.10.13"));
        assert_eq!(version("3.12.0rc1+").as_deref(), Some("3.12.0rc1"));
        for no in ["3.10", "3.10.1.2", "3.x.1", "3.1.+", "", "3.400.1", "3.8.0z1"] {
            assert_eq!(version(no), None, "{no}");
        }
    }

    #[test]
    fn lto_names() {
        assert_eq!(without_lto_suffix(b"_PyMem_Raw.lto_priv.0"), b"_PyMem_Raw");
        assert_eq!(without_lto_suffix(b"_PyObject_Malloc.cold"), b"_PyObject_Malloc.cold");
    }
}
