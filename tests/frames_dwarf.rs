//! The built-in tables against the DWARF of interpreters that have it: two independent roads to the same numbers.

mod common;

use common::interpreters;
use common::python::Running;
use pyheap::attach::elf::ElfFile;
use pyheap::attach::interpreter;
use pyheap::frames::Layout;
use pyheap::frames::dwarf::{DwarfError, Structs};
use std::fs::File;

#[test]
fn tables_are_what_the_debug_information_says() {
    let mut compared = 0;
    for python in interpreters::supported() {
        let mut target = Running::start(&python, "idle.py", &[]);
        target.lines_until("ready");
        let found = interpreter::find(target.pid()).unwrap();
        let elf = ElfFile::open(File::open(&found.path).unwrap()).unwrap();
        let at = found.path.display();
        match Structs::read(&elf) {
            Ok(structs) => {
                let layout = structs.layout(python.build()).unwrap_or_else(|e| panic!("{at}: {e:?}"));
                assert_eq!(layout, Layout::of(python.build()).unwrap(), "{at}");
                compared += 1;
            }
            Err(DwarfError::None) => eprintln!("skipped: {at} has no debug information"),
            Err(error) => panic!("{at}: {error:?}"),
        }
    }
    eprintln!("{compared} tables compared");
}
