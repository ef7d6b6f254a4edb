//! Addresses in native code, turned into a library and the function that covers them.

use super::native_stacks::demangled;
use crate::attach::debug_file;
use crate::attach::elf::Functions;
use crate::attach::module::MappedFile;
use pyheap_injector::observe;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Shown for code that is in no file: made at run time, or of a library that has been unloaded.
pub const NO_FILE: &str = "<native code>";
/// Most addresses whose function is looked up, and that are kept. A program calls malloc in some thousand places.
const MAX_ADDRESSES: usize = 16 << 10;
/// Most files whose symbols are kept, and most bytes of them.
const MAX_FILES: usize = 1024;
const MAX_BYTES: usize = 32 << 20;

/// A library and a function in it, by name. Without a symbol that covers it, the address by the file, as `+0x1a2b`.
pub type Place = (Arc<str>, Arc<str>);

/// What is mapped where, and what it is called.
#[derive(Debug)]
pub struct NativeNames {
    pid: i32,
    files: Vec<MappedFile>,
    tables: HashMap<PathBuf, Option<Table>>,
    bytes: usize,
    known: HashMap<u64, Option<Place>>,
}

/// The functions of a file that is mapped.
#[derive(Debug)]
struct Table {
    /// Address in memory less address by the file.
    bias: u64,
    functions: Functions,
    /// Those of its separate debug file, where it has no full table itself.
    more: Functions,
}

impl NativeNames {
    /// For process `pid`. Nothing is read yet.
    #[must_use]
    pub fn new(pid: i32) -> Self {
        Self {
            pid,
            files: Vec::new(),
            tables: HashMap::new(),
            bytes: 0,
            known: HashMap::new(),
        }
    }

    /// Something was unloaded: what was known of addresses may be wrong.
    pub fn forget(&mut self) {
        self.files.clear();
        self.known.clear();
        self.drop_tables();
    }

    fn drop_tables(&mut self) {
        self.tables.clear();
        self.bytes = 0;
    }

    /// The place of a call that returns to `address`; `None` where there is no file.
    pub fn caller(&mut self, address: u64) -> Option<Place> {
        self.place(address.wrapping_sub(1))
    }

    /// The place of an instruction at `address`, or of the call that ends there; `None` where there is no file.
    pub fn place(&mut self, address: u64) -> Option<Place> {
        if let Some(known) = self.known.get(&address) {
            return known.clone();
        }
        let place = self.look_up(address);
        if self.known.len() < MAX_ADDRESSES {
            self.known.insert(address, place.clone());
        }
        place
    }

    fn look_up(&mut self, address: u64) -> Option<Place> {
        if !self.files.iter().any(|file| file.contains(address)) {
            let process = procfs::process::Process::new(observe::reachable(self.pid));
            self.files = MappedFile::all(&process.and_then(|process| process.maps()).ok()?);
            // What was unmapped may be mapped elsewhere now.
            self.drop_tables();
        }
        let file = self.files.iter().find(|file| file.contains(address))?.clone();
        if self.known.len() >= MAX_ADDRESSES || self.tables.len() >= MAX_FILES || self.bytes > MAX_BYTES {
            self.drop_tables();
        }
        if !self.tables.contains_key(&file.path) {
            let table = Table::read(&file, self.pid);
            self.bytes += table.as_ref().map_or(0, Table::bytes);
            self.tables.insert(file.path.clone(), table);
        }
        let name = Arc::from(file.name());
        let Some(Some(table)) = self.tables.get(&file.path) else {
            return Some((name, Arc::from(NO_FILE)));
        };
        let by_file = address.wrapping_sub(table.bias);
        let is_known = self.known.len() < MAX_ADDRESSES;
        let function = is_known.then(|| table.name(by_file)).flatten();
        let function = function.unwrap_or_else(|| Arc::from(format!("+{:#x}", by_file.wrapping_add(1))));
        Some((name, function))
    }
}

impl Table {
    fn read(file: &MappedFile, pid: i32) -> Option<Self> {
        let module = file.open(pid).ok()?;
        let functions = module.elf.functions().unwrap_or_default();
        let more = if module.elf.section(".symtab").is_some() {
            None
        } else {
            debug_file::find(&module, pid).and_then(|debug| debug.functions().ok())
        };
        Some(Self {
            bias: module.bias,
            functions,
            more: more.unwrap_or_default(),
        })
    }

    fn bytes(&self) -> usize {
        self.functions.bytes() + self.more.bytes()
    }

    fn name(&self, by_file: u64) -> Option<Arc<str>> {
        let name = self.more.at(by_file).or_else(|| self.functions.at(by_file))?;
        Some(demangled(&String::from_utf8_lossy(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_this_program_has_its_name() {
        let address = a_function_of_this_program_has_its_name as *const () as u64;
        let mut names = NativeNames::new(std::process::id() as i32);
        let (file, function) = names.caller(address + 2).expect("it is in a file");
        assert!(file.starts_with("pyheap-"), "{file}");
        assert!(
            function.contains("a_function_of_this_program") || function.starts_with("+0x"),
            "{function}"
        );
        assert_eq!(names.caller(address + 2).as_ref(), Some(&(file, function)));
        assert_eq!(names.caller(0x10), None);
    }
}
