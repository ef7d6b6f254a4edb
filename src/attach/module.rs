//! The ELF files that are mapped into a process, as modules: file, load bias, ranges.
//!
//! A file is opened through the process's own root (it may be in a container), or, when it was deleted or replaced
//! since, through the kernel's link to the mapped one. Either way its first page must be what is in memory: a file of
//! the same name that was installed later is not the one that runs. Where neither can be had (the kernel's link needs rights
//! that a container may lack), the loaded parts in memory must do.

use super::elf::{ElfError, ElfFile, in_memory};
use super::process::printable;
use super::rooted::{open_in_root, open_regular, open_without_links};
use procfs::process::{MMPermissions, MMapPath, MemoryMap, MemoryMaps};
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Addresses of files are multiples of this on x86-64.
const PAGE: u64 = 4096;
/// What the kernel appends to the path of a mapped file that has no name any more.
const DELETED: &str = " (deleted)";

/// One file and where its parts are mapped.
#[derive(Debug, Clone)]
pub struct MappedFile {
    /// The path as the process sees it, without the mark for a deleted file.
    pub path: PathBuf,
    /// True when the kernel says that the file has no name any more.
    pub deleted: bool,
    /// Address ranges, with the offset in the file at which each begins.
    ranges: Vec<(Range<u64>, u64)>,
    /// A part of it is mapped executable.
    pub executable: bool,
}

impl MappedFile {
    /// The files in `maps`, in the order of their first address.
    #[must_use]
    pub fn all(maps: &MemoryMaps) -> Vec<Self> {
        let mut files: Vec<Self> = Vec::new();
        // A process may have 65,530 mappings and more, each of a file of its own.
        let mut index_of = HashMap::new();
        for map in maps {
            let MMapPath::Path(path) = &map.pathname else { continue };
            // Device and inode: names may repeat.
            let identity = (map.dev, map.inode);
            let next = files.len();
            match files.get_mut(*index_of.entry(identity).or_insert(next)) {
                Some(file) => file.add(map),
                None => files.push(Self::new(path, map)),
            }
        }
        files
    }

    fn new(path: &Path, map: &MemoryMap) -> Self {
        let shown = path.to_string_lossy();
        let stripped = shown.strip_suffix(DELETED).map(PathBuf::from);
        let mut file = Self {
            deleted: stripped.is_some(),
            path: stripped.unwrap_or_else(|| path.to_owned()),
            ranges: Vec::new(),
            executable: false,
        };
        file.add(map);
        file
    }

    /// A file that a core file says was mapped: address ranges, each with its offset in the file.
    #[must_use]
    pub const fn of_core(path: PathBuf, ranges: Vec<(Range<u64>, u64)>) -> Self {
        Self {
            path,
            deleted: false,
            ranges,
            executable: true,
        }
    }

    fn add(&mut self, map: &MemoryMap) {
        self.ranges.push((map.address.0..map.address.1, map.offset));
        self.executable |= map.perms.contains(MMPermissions::EXECUTE);
    }

    /// True if a part of the file is mapped at `address`.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        self.ranges.iter().any(|(range, _)| range.contains(&address))
    }

    /// The last component of the path, without control characters.
    #[must_use]
    pub fn name(&self) -> String {
        printable(Path::new(self.path.file_name().unwrap_or_default()))
    }

    /// True when this is the program that the process runs; `exe` is what `/proc/PID/exe` links to.
    #[must_use]
    pub fn is_program(&self, exe: &Path) -> bool {
        let shown = exe.to_string_lossy();
        self.path == exe
            || shown
                .strip_suffix(DELETED)
                .is_some_and(|path| self.path == Path::new(path))
    }

    /// Opens the file that is mapped into process `pid`.
    ///
    /// # Errors
    /// When it cannot be opened, is no ELF file of ours, or is not what is in memory.
    pub fn open(&self, pid: i32) -> Result<Module, ModuleError> {
        let by_mapping = self.ranges.iter().map(|(range, _)| {
            let link = format!("/proc/{pid}/map_files/{:x}-{:x}", range.start, range.end);
            open_regular(Path::new(&link))
        });
        let mut ways: Vec<Box<dyn Iterator<Item = io::Result<File>> + '_>> = Vec::new();
        if !self.deleted {
            ways.push(Box::new(std::iter::once_with(|| open_in_root(pid, &self.path))));
            // A process in a chroot: paths in maps begin at our root then, not at its.
            ways.push(Box::new(std::iter::once_with(|| open_without_links(&self.path))));
        }
        ways.push(Box::new(by_mapping.take(1)));
        ways.push(Box::new(std::iter::once_with(|| {
            open_regular(Path::new(&format!("/proc/{pid}/exe")))
        })));
        let mut first_error = None;
        for file in ways.into_iter().flatten() {
            match self.opened(&ProcessMemory::new(pid), file) {
                Ok(module) => return Ok(module),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        self.open_in_memory(pid).map_err(|error| first_error.unwrap_or(error))
    }

    /// What the loaded parts in memory tell of the file, without the file.
    ///
    /// # Errors
    /// When they cannot be read or are no program or library.
    pub(super) fn open_in_memory(&self, pid: i32) -> Result<Module, ModuleError> {
        let first = self.ranges.iter().find(|(_, offset)| *offset == 0);
        let (first, _) = first.filter(|_| self.executable).ok_or(ModuleError::NotMapped)?;
        let (elf, bias) = ElfFile::in_memory(&ProcessMemory::new(pid), first.start)?;
        if self.load_bias(&elf) != Some(bias) {
            return Err(ModuleError::NotMapped);
        }
        Ok(Module {
            path: self.path.clone(),
            bias,
            elf,
            is_program: false,
        })
    }

    /// Opens `way` as the file that is mapped in `mem`.
    ///
    /// # Errors
    /// When it cannot be opened, is no ELF file of ours, or is not what is in memory.
    pub fn open_at(&self, mem: &impl RemoteMemory, way: &Path) -> Result<Module, ModuleError> {
        self.opened(mem, open_regular(way))
    }

    fn opened(&self, mem: &impl RemoteMemory, file: io::Result<File>) -> Result<Module, ModuleError> {
        let elf = ElfFile::open(file.map_err(ElfError::from)?)?;
        let bias = self.load_bias(&elf).ok_or(ModuleError::NotMapped)?;
        if let Some((address, bytes)) = elf.first_page()? {
            let start = RemoteAddr(address.wrapping_add(bias));
            let mapped = mem.read_vec(start, bytes.len());
            if mapped.map_err(ModuleError::Memory)? != bytes {
                return Err(ModuleError::Replaced);
            }
        }
        Ok(Module {
            path: self.path.clone(),
            bias,
            elf,
            is_program: false,
        })
    }

    /// The load bias: address in memory less address by the file. It is right when the first page of every segment is
    /// mapped where it says.
    fn load_bias(&self, elf: &ElfFile) -> Option<u64> {
        let page = |n: u64| n & !(PAGE - 1);
        let fits = |bias: u64| {
            elf.segments.iter().filter(|s| s.file_size > 0).all(|segment| {
                let at = page(segment.address).wrapping_add(bias);
                self.ranges.iter().any(|(range, _)| range.contains(&at))
            })
        };
        if !elf.position_independent {
            return fits(0).then_some(0);
        }
        let first = elf.segments.first()?;
        self.ranges
            .iter()
            .filter(|(_, offset)| *offset == page(first.file_offset))
            .map(|(range, _)| range.start.wrapping_sub(page(first.address)))
            .find(|bias| fits(*bias))
    }
}

/// Why a mapped file is no usable module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModuleError {
    /// The file cannot be read as ELF.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// Its segments are not where they would have to be.
    #[error("the file is not mapped as a program or library")]
    NotMapped,
    /// Another file has its name now.
    #[error("the file was replaced since the process began")]
    Replaced,
    /// The process's memory cannot be read.
    #[error("the process's memory cannot be read")]
    Memory(#[source] pyheap_injector::MemoryError),
}

/// A program or library in a process.
#[derive(Debug)]
pub struct Module {
    /// The path as the process sees it.
    pub path: PathBuf,
    /// Address in memory less address by the file; 0 for a non-PIE program.
    pub bias: u64,
    /// The file.
    pub elf: ElfFile,
    /// It is the program that the process runs, as far as the caller of [`MappedFile::open`] has said.
    pub is_program: bool,
}

impl Module {
    /// Where something that the file puts at `address` is in memory.
    #[must_use]
    pub const fn remote(&self, address: u64) -> RemoteAddr {
        RemoteAddr(address.wrapping_add(self.bias))
    }

    /// The ranges of code.
    #[must_use]
    pub fn text(&self) -> Vec<Range<u64>> {
        self.ranges(true)
    }

    /// The ranges of writable data, .bss included.
    #[must_use]
    pub fn writable(&self) -> Vec<Range<u64>> {
        self.ranges(false)
    }

    fn ranges(&self, code: bool) -> Vec<Range<u64>> {
        let segments = self.elf.segments.iter();
        segments
            .filter(|s| if code { s.executable } else { s.writable })
            .map(|s| in_memory(s, self.bias))
            .collect()
    }
}
