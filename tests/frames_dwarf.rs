//! The built-in tables against the DWARF of interpreters that have it: two independent roads to the same numbers.

use crate::common;
use crate::common::interpreters;
use crate::common::python::Running;
use pyheap::attach::elf::ElfFile;
use pyheap::attach::module::MappedFile;
use pyheap::attach::{debug_file, interpreter};
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

/// A copy of an interpreter's library without symbols, its debug information in a file beside it: it is found by its name
/// and build id, says what the table says, and is not read a second time.
#[test]
fn a_separate_debug_file_is_found() {
    let with_library = interpreters::supported().into_iter().find_map(|python| {
        let mut target = Running::start(&python, "idle.py", &[]);
        target.lines_until("ready");
        let found = interpreter::find(target.pid()).ok()?;
        let real = std::fs::canonicalize(&python.path).ok()?;
        let has_both = found.path != real && has_debug_information(&found.path);
        has_both.then(|| (python, real, found.path.clone()))
    });
    let Some((python, program, library)) = with_library else {
        eprintln!("skipped: no interpreter with a library that has debug information");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join(library.file_name().unwrap());
    std::fs::create_dir(folder.path().join(".debug")).unwrap();
    let debug = folder.path().join(".debug/python.debug");
    let run = |program: &str, arguments: &[&std::ffi::OsStr]| {
        let status = std::process::Command::new(program).args(arguments).status();
        assert!(status.unwrap().success(), "{program}");
    };
    let link = format!("--add-gnu-debuglink={}", debug.display());
    run(
        "objcopy",
        &["--only-keep-debug".as_ref(), library.as_ref(), debug.as_ref()],
    );
    run(
        "objcopy",
        &["--strip-all".as_ref(), link.as_ref(), library.as_ref(), copy.as_ref()],
    );
    let mut command = std::process::Command::new(&program);
    command
        .arg(common::python::targets().join("idle.py"))
        .env("LD_LIBRARY_PATH", folder.path())
        .env("PYTHONHOME", program.parent().and_then(|bin| bin.parent()).unwrap());
    let mut target = Running::spawn(command);
    target.lines_until("ready");

    let maps = procfs::process::Process::new(target.pid()).unwrap().maps().unwrap();
    let mapped = MappedFile::all(&maps)
        .into_iter()
        .find(|file| file.path == copy)
        .unwrap();
    let module = mapped.open(target.pid()).unwrap();
    assert!(matches!(Structs::read(&module.elf), Err(DwarfError::None)));
    let found = debug_file::find(&module, target.pid()).expect("the file in .debug");
    let structs = Structs::read(&found).unwrap();
    let build = python.build();
    let cache = folder.path().join("cache");
    assert_eq!(debug_file::cached(&cache, &module.elf, build), None);
    let layout = debug_file::keep(Some(&cache), &module.elf, build, |name| structs.offset(name));
    assert_eq!(layout, Some(Layout::of(build).unwrap()));
    assert_eq!(debug_file::cached(&cache, &module.elf, build), layout);
    // What anybody may write is not believed.
    for entry in std::fs::read_dir(&cache).unwrap().flatten() {
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        std::fs::set_permissions(entry.path(), open).unwrap();
    }
    assert_eq!(debug_file::cached(&cache, &module.elf, build), None);
    // Another build's file under the right name is not taken.
    let other = std::env::current_exe().unwrap();
    std::fs::copy(other, &debug).unwrap();
    assert!(debug_file::find(&module, target.pid()).is_none());
}

fn has_debug_information(path: &std::path::Path) -> bool {
    let elf = File::open(path).ok().and_then(|file| ElfFile::open(file).ok());
    elf.is_some_and(|elf| elf.section(".debug_info").is_some())
}
