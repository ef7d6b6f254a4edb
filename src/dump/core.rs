//! A core file as memory: what the process had in memory when the file was made.
//!
//! A core file holds what was written to; pages that are the same in a file (code, constants) are left out, and are read
//! from that file, whose name and place the core file tells (`NT_FILE`). It also tells the threads and their registers
//! (`NT_PRSTATUS`).
//!
//! The file may be damaged or made to hurt: counts and lengths are capped, and nothing is read that lies outside of it.
//! What it refuses to do: make up. Memory that is in no file is an error, never zeros.

use super::objects::Objects;
use super::pages::Pages;
use super::{Dump, DumpError, Mode, Seen, assemble, find_names, read_all};
use crate::attach::find_error::FindError;
use crate::attach::interpreter::{Interpreter, examine_module};
use crate::attach::module::{MappedFile, ModuleError};
use crate::attach::rooted::open_regular;
use pyheap_injector::arch;
use pyheap_injector::freeze::At;
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Parts of memory; a process has at most some 65,530 unless its kernel is told otherwise.
const MAX_SEGMENTS: u64 = 1 << 20;
/// Notes, of all kinds. A thread has some five.
const MAX_NOTES: usize = 1 << 20;
/// One note that is read: the list of mapped files.
const MAX_NOTE_BYTES: u64 = 64 << 20;
/// `e_phnum` when the number is in the first section header instead.
const PN_XNUM: u16 = 0xffff;

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const ET_CORE: u16 = 4;
const EM_HERE: u16 = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
const NT_PRSTATUS: u32 = 1;
const NT_PRPSINFO: u32 = 3;
const NT_AUXV: u32 = 6;
const NT_FILE: u32 = 0x4649_4c45;

/// Why a core file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// It cannot be read.
    #[error("{} cannot be read", .path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is none.
    #[error("{} is not a core file of a 64-bit process of this kind of machine", .0.display())]
    NotCore(PathBuf),
    /// It makes no sense.
    #[error("{} is damaged: {what}", .path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// No Python is in it.
    #[error("no Python was found in {}", .0.display())]
    NoPython(PathBuf),
    /// The program is not where it was, or is another one now.
    #[error("the program that left {} is not what it was: name the right file with --exe", .path.display())]
    Program {
        /// Which file.
        path: PathBuf,
        /// What is wrong with the program's file.
        #[source]
        source: FindError,
    },
    /// There is one, which cannot be read.
    #[error(transparent)]
    Python(#[from] FindError),
}

/// A part of memory that is in the core file.
#[derive(Debug)]
struct Segment {
    memory: Range<u64>,
    offset: u64,
}

/// A part of memory that is in another file.
#[derive(Debug)]
struct Mapping {
    memory: Range<u64>,
    offset: u64,
    /// Index in the list of files.
    file: usize,
}

/// A file that was mapped.
#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    /// Where it is here.
    way: PathBuf,
    /// Only if it is still what was mapped.
    file: Option<File>,
}

/// A core file.
#[derive(Debug)]
pub struct Core {
    path: PathBuf,
    file: File,
    /// Sorted by address.
    segments: Vec<Segment>,
    /// Sorted by address.
    mappings: Vec<Mapping>,
    files: Vec<Mapped>,
    /// The threads, with their registers.
    threads: Vec<(i32, At)>,
    pid: i32,
    command: String,
    /// The entry point of the program.
    entry: Option<u64>,
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_le_bytes)
}

impl Core {
    /// Opens a core file. `exe`: where the program is now, if not where it was.
    ///
    /// # Errors
    /// See [`CoreError`].
    pub fn open(path: &Path, exe: Option<&Path>) -> Result<Self, CoreError> {
        let failed = |source| CoreError::Io {
            path: path.to_owned(),
            source,
        };
        let full = std::path::absolute(path).map_err(failed)?;
        let file = open_regular(&full).map_err(failed)?;
        let mut core = Self {
            path: path.to_owned(),
            file,
            segments: Vec::new(),
            mappings: Vec::new(),
            files: Vec::new(),
            threads: Vec::new(),
            pid: 0,
            command: String::new(),
            entry: None,
        };
        for note in core.read_headers()? {
            core.read_notes(note)?;
        }
        core.segments.sort_by_key(|segment| segment.memory.start);
        core.mappings.sort_by_key(|mapping| mapping.memory.start);
        core.open_files(exe);
        Ok(core)
    }

    fn damaged(&self, what: &'static str) -> CoreError {
        CoreError::Damaged {
            path: self.path.clone(),
            what,
        }
    }

    fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, CoreError> {
        let mut bytes = vec![0; len];
        match self.file.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(self.damaged("it ends too early")),
            Err(source) => Err(CoreError::Io {
                path: self.path.clone(),
                source,
            }),
        }
    }

    /// Reads the list of segments; the parts of the file that hold notes.
    fn read_headers(&mut self) -> Result<Vec<Range<u64>>, CoreError> {
        const HEADER_BYTES: usize = 64;
        const SEGMENT_BYTES: u64 = 56;
        /// `sh_info` of the first section header.
        const SH_INFO_AT: u64 = 44;
        let not_core = || CoreError::NotCore(self.path.clone());
        let header = self.read(0, HEADER_BYTES).map_err(|_| not_core())?;
        // 64-bit, little-endian.
        let is_core = header.starts_with(b"\x7fELF\x02\x01")
            && u16_at(&header, 16) == Some(ET_CORE)
            && u16_at(&header, 18) == Some(EM_HERE);
        if !is_core {
            return Err(not_core());
        }
        let broken = || self.damaged("its header");
        let at = u64_at(&header, 32).ok_or_else(broken)?;
        let count = match u16_at(&header, 56).ok_or_else(broken)? {
            PN_XNUM => {
                let section = u64_at(&header, 40).ok_or_else(broken)?;
                let info = section.checked_add(SH_INFO_AT).ok_or_else(broken)?;
                u64::from(u32_at(&self.read(info, 4)?, 0).ok_or_else(broken)?)
            }
            count => u64::from(count),
        };
        let len = self.file.metadata().map_or(0, |metadata| metadata.len());
        if count > MAX_SEGMENTS || count.saturating_mul(SEGMENT_BYTES) > len {
            return Err(self.damaged("too many segments"));
        }
        let bytes = self.read(at, usize::try_from(count * SEGMENT_BYTES).unwrap_or(0))?;
        let (mut notes, mut segments) = (Vec::new(), Vec::new());
        for header in bytes.chunks_exact(SEGMENT_BYTES as usize) {
            let word = |at| u64_at(header, at).unwrap_or(0);
            let (offset, address, in_file) = (word(8), word(16), word(32));
            match u32_at(header, 0) {
                Some(PT_LOAD) if in_file > 0 => segments.push(Segment {
                    memory: address..address.saturating_add(in_file),
                    offset,
                }),
                Some(PT_NOTE) => notes.push(offset..offset.saturating_add(in_file).min(len)),
                _ => {}
            }
        }
        self.segments = segments;
        Ok(notes)
    }

    /// Reads the notes in a part of the file.
    fn read_notes(&mut self, part: Range<u64>) -> Result<(), CoreError> {
        const HEAD_BYTES: usize = 12;
        let aligned = |len: u32| u64::from(len).next_multiple_of(4);
        let mut at = part.start;
        for _ in 0..MAX_NOTES {
            if at.saturating_add(HEAD_BYTES as u64) > part.end {
                return Ok(());
            }
            let head = self.read(at, HEAD_BYTES)?;
            let word = |i| u32_at(&head, i).unwrap_or(0);
            let (name, len, kind) = (word(0), word(4), word(8));
            let start = at + HEAD_BYTES as u64 + aligned(name);
            if start.saturating_add(u64::from(len)) > part.end {
                return Err(self.damaged("a note is longer than its segment"));
            }
            at = start + aligned(len);
            if !matches!(kind, NT_PRSTATUS | NT_PRPSINFO | NT_AUXV | NT_FILE) {
                continue;
            }
            if u64::from(len) > MAX_NOTE_BYTES {
                return Err(self.damaged("a note is too long"));
            }
            let bytes = self.read(start, usize::try_from(len).unwrap_or(0))?;
            match kind {
                NT_PRSTATUS => self.threads.extend(arch::core_thread(&bytes)),
                NT_PRPSINFO => self.read_process(&bytes),
                NT_AUXV => self.entry = self.entry.or_else(|| entry_point(&bytes)),
                _ => self
                    .read_mappings(&bytes)
                    .ok_or_else(|| self.damaged("its list of mapped files"))?,
            }
        }
        Ok(())
    }

    /// `struct elf_prpsinfo`: the pid, and the beginning of the command line.
    fn read_process(&mut self, bytes: &[u8]) {
        const PID_AT: usize = 24;
        const ARGUMENTS_AT: usize = 56;
        self.pid = u32_at(bytes, PID_AT).map_or(0, u32::cast_signed);
        let arguments = bytes.get(ARGUMENTS_AT..).unwrap_or_default();
        let arguments: Vec<u8> = arguments.iter().copied().take_while(|byte| *byte != 0).collect();
        self.command = String::from_utf8_lossy(&arguments).trim_end().to_owned();
    }

    /// `NT_FILE`: a count, the unit of offsets, then start, end and offset of each mapping, then their paths.
    fn read_mappings(&mut self, bytes: &[u8]) -> Option<()> {
        use std::os::unix::ffi::OsStrExt;
        const ENTRY_BYTES: usize = 24;
        let count = usize::try_from(u64_at(bytes, 0)?).ok()?;
        let unit = u64_at(bytes, 8)?;
        let names_at = count.checked_mul(ENTRY_BYTES)?.checked_add(16)?;
        let mut names = bytes.get(names_at..)?.split(|byte| *byte == 0);
        let entries = bytes.get(16..names_at)?.chunks_exact(ENTRY_BYTES);
        let mut known: HashMap<PathBuf, usize> = HashMap::new();
        for entry in entries {
            let path = PathBuf::from(std::ffi::OsStr::from_bytes(names.next()?));
            let next = self.files.len();
            let file = *known.entry(path.clone()).or_insert(next);
            if file == next {
                self.files.push(Mapped {
                    way: path.clone(),
                    path,
                    file: None,
                });
            }
            self.mappings.push(Mapping {
                memory: u64_at(entry, 0)?..u64_at(entry, 8)?,
                offset: u64_at(entry, 16)?.checked_mul(unit)?,
                file,
            });
        }
        Some(())
    }

    /// The index of the program among the files: its entry point is there.
    fn program(&self) -> Option<usize> {
        let entry = self.entry?;
        self.mappings
            .iter()
            .find(|mapping| mapping.memory.contains(&entry))
            .map(|mapping| mapping.file)
    }

    /// Opens the files that were mapped, those that still are what they were: as far as the core file holds their first
    /// page, that is compared.
    fn open_files(&mut self, exe: Option<&Path>) {
        if let (Some(exe), Some(program)) = (exe, self.program())
            && let Some(mapped) = self.files.get_mut(program)
        {
            mapped.way = std::path::absolute(exe).unwrap_or_else(|_| exe.to_owned());
        }
        let opened: Vec<Option<File>> = (0..self.files.len()).map(|index| self.open_file(index)).collect();
        for (mapped, file) in self.files.iter_mut().zip(opened) {
            mapped.file = file;
        }
    }

    fn open_file(&self, index: usize) -> Option<File> {
        const PAGE: usize = 4096;
        let file = open_regular(&self.files.get(index)?.way).ok()?;
        let start = self
            .mappings
            .iter()
            .find(|mapping| mapping.file == index && mapping.offset == 0);
        if let Some(start) = start {
            let mut first = vec![0; PAGE];
            let len = file.read_at(&mut first, 0).ok()?;
            first.truncate(len);
            let mut then = vec![0; len];
            let address = RemoteAddr(start.memory.start);
            let known = self.read_segments(address, &mut then);
            if known.is_some_and(|known| known.is_ok_and(|known| first.get(..known) != then.get(..known))) {
                return None;
            }
        }
        Some(file)
    }

    /// Copies what the core file has from `addr` on; how much that is. `None`: it is not in the core file.
    fn read_segments(&self, addr: RemoteAddr, buf: &mut [u8]) -> Option<io::Result<usize>> {
        let index = self.segments.partition_point(|segment| segment.memory.end <= addr.0);
        let segment = self
            .segments
            .get(index)
            .filter(|segment| segment.memory.contains(&addr.0))?;
        let len = usize::try_from(segment.memory.end - addr.0)
            .unwrap_or(usize::MAX)
            .min(buf.len());
        let offset = segment.offset.checked_add(addr.0 - segment.memory.start)?;
        // What should be there and is not, in a file that was cut, must not be taken from elsewhere.
        let read = self.file.read_exact_at(buf.get_mut(..len)?, offset);
        Some(read.map(|()| len))
    }

    /// The same for what is in the mapped files.
    fn read_files(&self, addr: RemoteAddr, buf: &mut [u8]) -> Option<io::Result<usize>> {
        let index = self.mappings.partition_point(|mapping| mapping.memory.end <= addr.0);
        let mapping = self
            .mappings
            .get(index)
            .filter(|mapping| mapping.memory.contains(&addr.0))?;
        let len = usize::try_from(mapping.memory.end - addr.0)
            .unwrap_or(usize::MAX)
            .min(buf.len());
        let offset = mapping.offset.checked_add(addr.0 - mapping.memory.start)?;
        let file = self.files.get(mapping.file)?.file.as_ref()?;
        let read = file.read_exact_at(buf.get_mut(..len)?, offset);
        Some(read.map(|()| len))
    }

    /// The process that left it.
    pub const fn pid(&self) -> i32 {
        self.pid
    }

    /// The beginning of its command line.
    pub fn command(&self) -> &str {
        &self.command
    }

    /// What it holds of the process's memory, in the order of addresses.
    pub fn memory(&self) -> Vec<Range<u64>> {
        self.segments.iter().map(|segment| segment.memory.clone()).collect()
    }

    /// The file that was mapped at an address, with its number.
    pub fn file_at(&self, address: u64) -> Option<(usize, &Path)> {
        let index = self.mappings.partition_point(|mapping| mapping.memory.end <= address);
        let mapping = self
            .mappings
            .get(index)
            .filter(|mapping| mapping.memory.contains(&address))?;
        Some((mapping.file, &self.files.get(mapping.file)?.path))
    }

    /// How many threads the process had.
    pub const fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Finds the Python in it.
    ///
    /// # Errors
    /// When there is none, or none that is supported.
    pub fn python(&self) -> Result<Interpreter, CoreError> {
        let program = self.program();
        let mut order: Vec<usize> = (0..self.files.len()).collect();
        let is_named = |index: usize| {
            let name = self.files.get(index).and_then(|mapped| mapped.path.file_name());
            name.is_some_and(|name| name.to_string_lossy().contains("python"))
        };
        order.sort_by_key(|&index| (Some(index) != program, !is_named(index)));
        let mut refused = None;
        for index in order {
            let Some(mapped) = self.files.get(index) else { continue };
            let ranges = self.mappings.iter().filter(|mapping| mapping.file == index);
            let ranges = ranges.map(|mapping| (mapping.memory.clone(), mapping.offset)).collect();
            let file = MappedFile::of_core(mapped.path.clone(), ranges);
            let found = match file.open_at(self, &mapped.way) {
                Ok(module) => examine_module(self, self.pid, module, Some(index) == program),
                Err(source) if Some(index) == program || is_named(index) && mapped.file.is_none() => {
                    if !matches!(source, ModuleError::NotMapped) {
                        let path = mapped.way.clone();
                        refused = refused.or(Some(FindError::Module { path, source }));
                    }
                    continue;
                }
                Err(_) => continue,
            };
            match found {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        let path = self.path.clone();
        Err(match refused {
            Some(source @ FindError::Module { .. }) => CoreError::Program { path, source },
            Some(error) => error.into(),
            None => CoreError::NoPython(path),
        })
    }
}

impl RemoteMemory for Core {
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
        let mut done = 0;
        while done < buf.len() {
            let rest = buf.get_mut(done..).unwrap_or_default();
            let here = addr.checked_add(done as u64);
            let read = here.and_then(|here| self.read_segments(here, rest).or_else(|| self.read_files(here, rest)));
            let nowhere = || Err(io::Error::new(io::ErrorKind::NotFound, "it is not in the core file"));
            match read.unwrap_or_else(nowhere) {
                Ok(len) => done += len,
                Err(source) => {
                    let len = buf.len();
                    return Err(MemoryError::Read { addr, len, source });
                }
            }
        }
        Ok(())
    }
}

/// `AT_ENTRY` of an auxiliary vector: pairs of words.
fn entry_point(bytes: &[u8]) -> Option<u64> {
    const AT_ENTRY: u64 = 9;
    let mut pairs = bytes.chunks_exact(16);
    pairs
        .find(|pair| u64_at(pair, 0) == Some(AT_ENTRY))
        .and_then(|pair| u64_at(pair, 8))
}

/// Dumps a core file.
///
/// # Errors
/// When it is no core file of a supported Python, or its interpreters cannot be read.
pub fn dump(core: &Core) -> Result<Dump, Box<dyn std::error::Error>> {
    let found = core.python()?;
    let pid = core.pid;
    let pages = Pages::new(core);
    let active = match Objects::new(&pages, &found.layout) {
        Some(_) => find_names(&pages, &found),
        None => HashMap::new(),
    };
    let reading = read_all(&pages, &found, &active).map_err(|source| DumpError::Memory { pid, source })?;
    let seen: Vec<Seen> = core.threads.iter().map(|(tid, at)| seen(*tid, *at)).collect();
    let parts = assemble(&reading, &pages, &seen);
    Ok(Dump {
        pid,
        command: core.command.clone(),
        python: found.version.to_string(),
        mode: Mode::Core,
        consistent: true,
        stopped_seconds: 0.0,
        stopped_threads: 0,
        interpreters: parts.interpreters,
        other_threads: parts.others,
    })
}

fn seen(tid: i32, at: At) -> Seen {
    Seen {
        tid,
        // Whether its namespace was ours cannot be known any more; its thread pointer tells which thread it is.
        inner_tid: tid,
        name: None,
        state: None,
        call: at.call.map(|call| (call, at.first_argument)),
        thread_pointer: Some(at.thread_pointer),
        may_be_torn: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};

    /// A core file of one segment of four bytes at 0x1000, a thread, and the list of mapped files.
    fn image() -> Vec<u8> {
        let mut notes = Vec::new();
        let mut note = |kind: u32, bytes: &[u8]| {
            notes.extend(
                [5_u32, bytes.len() as u32, kind]
                    .iter()
                    .flat_map(|word| word.to_le_bytes()),
            );
            notes.extend(b"CORE\0\0\0\0");
            notes.extend(bytes);
            notes.resize(notes.len().next_multiple_of(4), 0);
        };
        let mut process = vec![0; 136];
        process[24..28].copy_from_slice(&4242_u32.to_le_bytes());
        process[56..63].copy_from_slice(b"python ");
        note(NT_PRPSINFO, &process);
        let mut status = vec![0; 336];
        status[32..36].copy_from_slice(&4243_u32.to_le_bytes());
        note(NT_PRSTATUS, &status);
        let words = [1_u64, 4096, 0x2000, 0x3000, 0];
        let mut files: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        files.extend(b"/nowhere\0");
        note(NT_FILE, &files);

        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(64 + 2 * 56, 0);
        bytes[16..18].copy_from_slice(&ET_CORE.to_le_bytes());
        bytes[18..20].copy_from_slice(&EM_HERE.to_le_bytes());
        bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
        bytes[56..58].copy_from_slice(&2_u16.to_le_bytes());
        let data = bytes.len() as u64;
        let segments = [(PT_NOTE, data + 4, 0, notes.len() as u64), (PT_LOAD, data, 0x1000, 4)];
        for (i, (kind, offset, address, len)) in segments.into_iter().enumerate() {
            let at = 64 + i * 56;
            bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&u64::to_le_bytes(offset));
            bytes[at + 16..at + 24].copy_from_slice(&u64::to_le_bytes(address));
            bytes[at + 32..at + 40].copy_from_slice(&u64::to_le_bytes(len));
        }
        bytes.extend([1, 2, 3, 4]);
        bytes.extend(notes);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<Core, CoreError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        Core::open(file.path(), None)
    }

    #[test]
    fn memory_threads_and_files_are_found() {
        let core = open(&image()).unwrap();
        assert_eq!((core.pid, core.command.as_str()), (4242, "python"));
        assert_eq!(core.threads.len(), 1);
        assert_eq!(core.threads[0].0, 4243);
        assert_eq!(core.files[0].path, Path::new("/nowhere"));
        assert_eq!(core.read_array(RemoteAddr(0x1001)).unwrap(), [2, 3]);
        assert!(core.read_array::<2>(RemoteAddr(0x1003)).is_err());
        assert!(core.read_array::<1>(RemoteAddr(0x2000)).is_err(), "its file is gone");
        assert!(matches!(core.python(), Err(CoreError::NoPython(_))));
    }

    #[test]
    fn other_files_are_refused() {
        assert!(matches!(open(b""), Err(CoreError::NotCore(_))));
        let exe = Core::open(Path::new("/proc/self/exe"), None);
        assert!(matches!(exe, Err(CoreError::NotCore(_))));
    }

    #[test]
    fn damage_is_an_answer_or_an_error() {
        let sound = image();
        let mut random = rand::rngs::SmallRng::seed_from_u64(11);
        let mut answers = 0;
        for _ in 0..3000 {
            let mut bytes = sound.clone();
            for _ in 0..random.random_range(1..8) {
                let at = random.random_range(16..bytes.len());
                bytes[at] = random.random();
            }
            bytes.truncate(random.random_range(1..=bytes.len() * 2).min(bytes.len()));
            if let Ok(core) = open(&bytes) {
                let _ = core.read_u64(RemoteAddr(random.random()));
                let _ = core.python();
                answers += 1;
            }
        }
        assert!((100..2900).contains(&answers), "{answers}");
    }
}
