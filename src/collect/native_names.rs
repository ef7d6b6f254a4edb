//! Addresses in native code, turned into a library and the function that covers them.

use crate::attach::module::{MappedFile, Module};
use pyheap_injector::observe;
use std::collections::HashMap;
use std::sync::Arc;

/// Shown for code that is in no file: made at run time, or of a library that has been unloaded.
pub const NO_FILE: &str = "<native code>";
/// Most addresses whose function is looked up, and that are kept. A program calls malloc in some thousand places.
const MAX_ADDRESSES: usize = 16 << 10;
/// Most files that are kept open.
const MAX_MODULES: usize = 64;

/// A library and a function in it, by name. Without a symbol that covers it, the address by the file, as `+0x1a2b`.
pub type Place = (Arc<str>, Arc<str>);

/// What is mapped where, and what it is called.
#[derive(Debug)]
pub struct NativeNames {
    pid: i32,
    files: Vec<MappedFile>,
    modules: HashMap<std::path::PathBuf, Option<Module>>,
    known: HashMap<u64, Option<Place>>,
}

impl NativeNames {
    /// For process `pid`. Nothing is read yet.
    #[must_use]
    pub fn new(pid: i32) -> Self {
        Self {
            pid,
            files: Vec::new(),
            modules: HashMap::new(),
            known: HashMap::new(),
        }
    }

    /// The place of a call that returns to `address`; `None` where there is no file.
    pub fn caller(&mut self, address: u64) -> Option<Place> {
        if let Some(known) = self.known.get(&address) {
            return known.clone();
        }
        let place = self.look_up(address.wrapping_sub(1));
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
            self.modules.clear();
        }
        let file = self.files.iter().find(|file| file.contains(address))?;
        if self.known.len() >= MAX_ADDRESSES || self.modules.len() >= MAX_MODULES {
            self.modules.clear();
        }
        let pid = self.pid;
        let module = self
            .modules
            .entry(file.path.clone())
            .or_insert_with(|| file.open(pid).ok());
        let name = Arc::from(file.name());
        let Some(module) = module else {
            return Some((name, Arc::from(NO_FILE)));
        };
        let by_file = address.wrapping_sub(module.bias);
        let is_known = self.known.len() < MAX_ADDRESSES;
        let function = is_known.then(|| module.elf.functions_at(&[by_file]).ok()).flatten();
        let function = function.and_then(|mut found| found.remove(&by_file));
        let function = function.unwrap_or_else(|| format!("+{:#x}", by_file.wrapping_add(1)));
        Some((name, Arc::from(function)))
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
