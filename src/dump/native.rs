//! What C function each thread is in: the symbol around its instruction, in the library that is mapped there.
//!
//! A name is told only where a symbol's own size covers the instruction. The nearest symbol before it, which a stripped
//! library would give, is as a rule the wrong function, so there the library alone is named.

use super::Dump;
use crate::attach::module::{MappedFile, Module};
use procfs::process::Process;
use serde::Serialize;
use std::collections::HashMap;

/// Libraries that are opened for one dump: threads wait in one or two.
const MAX_MODULES: usize = 16;

/// Where a thread is outside of Python.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Native {
    /// The C function; `None` where the library has no symbol for it.
    pub function: Option<String>,
    /// The file that holds it, without its folder.
    pub library: String,
}

/// Tells for each thread of `dump` that `instructions` (by thread number) knows of.
pub fn tell(dump: &mut Dump, instructions: &HashMap<i32, u64>) {
    let Ok(maps) = Process::new(dump.pid).and_then(|process| process.maps()) else {
        return;
    };
    let files = MappedFile::all(&maps);
    let mut wanted: HashMap<usize, Vec<u64>> = HashMap::new();
    for &instruction in instructions.values() {
        if let Some(number) = files.iter().position(|file| file.contains(instruction)) {
            wanted.entry(number).or_default().push(instruction);
        }
    }
    let mut known: HashMap<u64, Native> = HashMap::new();
    let mut opened = 0;
    for (number, instructions) in wanted {
        let Some(file) = files.get(number) else { continue };
        opened += 1;
        let module = if opened <= MAX_MODULES {
            file.open(dump.pid).ok()
        } else {
            None
        };
        let names = module.map_or_else(HashMap::new, |module| functions(&module, &instructions));
        for instruction in instructions {
            let native = Native {
                function: names.get(&instruction).cloned(),
                library: file.name(),
            };
            known.insert(instruction, native);
        }
    }
    let of = |tid: i32| known.get(instructions.get(&tid)?).cloned();
    for thread in dump.interpreters.iter_mut().flat_map(|i| &mut i.threads) {
        // A second state of a thread does nothing of its own.
        thread.native = thread.tid.filter(|_| !thread.second_state).and_then(of);
    }
    for thread in &mut dump.other_threads {
        thread.native = of(thread.tid);
    }
}

/// The functions around `instructions`.
fn functions(module: &Module, instructions: &[u64]) -> HashMap<u64, String> {
    let by_file = |address: u64| address.wrapping_sub(module.bias);
    let addresses: Vec<u64> = instructions.iter().copied().map(by_file).collect();
    let names = module.elf.functions_at(&addresses).unwrap_or_default();
    let name = |instruction: &u64| Some((*instruction, names.get(&by_file(*instruction))?.clone()));
    instructions.iter().filter_map(name).collect()
}

impl Native {
    /// What is worth a line of a dump for people: not the interpreter's own loop, which every thread that runs is in, nor a
    /// function that is only the system call, which is told already.
    #[must_use]
    pub fn remark(&self, system_call: Option<&str>) -> Option<String> {
        const LOOP: &str = "_PyEval_EvalFrameDefault";
        let function = self.function.as_deref()?;
        let plain = function.trim_start_matches('_').trim_start_matches("libc_");
        let is_call = system_call.is_some_and(|call| plain == call);
        (!is_call && !function.starts_with(LOOP)).then(|| format!("{function} in {}", self.library))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_worth_a_line() {
        let native = |function: Option<&str>| Native {
            function: function.map(str::to_owned),
            library: "libz.so.1".to_owned(),
        };
        let remark = |function, call| native(function).remark(call);
        assert_eq!(remark(Some("deflate"), None).as_deref(), Some("deflate in libz.so.1"));
        assert_eq!(remark(Some("__libc_read"), Some("read")), None);
        assert_eq!(
            remark(Some("fread"), Some("read")).as_deref(),
            Some("fread in libz.so.1")
        );
        assert_eq!(remark(Some("_PyEval_EvalFrameDefault.cold"), None), None);
        assert_eq!(remark(None, Some("read")), None);
    }

    /// The function that calls this, by its own address.
    #[test]
    fn a_function_is_found_by_an_address_within() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let inside = what_is_worth_a_line as fn() as usize as u64;
        let files = MappedFile::all(&Process::new(pid).unwrap().maps().unwrap());
        let file = files.iter().find(|file| file.contains(inside)).unwrap();
        let module = file.open(pid).unwrap();
        let found = functions(&module, &[inside, 1]);
        assert!(found[&inside].contains("what_is_worth_a_line"), "{found:?}");
        assert_eq!(found.len(), 1);
    }
}
