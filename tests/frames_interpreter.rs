//! Finding CPython in live processes: version, layout and addresses, on every interpreter that is there.

use crate::common;
use crate::common::interpreters::{self, Python};
use crate::common::python::Running;
use pyheap::attach::interpreter::{self, OffsetSource, Phase};
use pyheap::frames::{Build, Layout};
use pyheap_injector::{ProcessMemory, RemoteMemory};

fn idle(python: &Python) -> Running {
    let mut target = Running::start(python, "idle.py", &[]);
    target.lines_until("ready");
    target
}

#[test]
fn every_supported_python_is_found_and_validated() {
    for python in interpreters::supported() {
        let target = idle(&python);
        let at = python.path.display();
        let found = interpreter::find(target.pid()).unwrap_or_else(|e| panic!("{at}: {}", chain(&e)));
        assert_eq!(found.version.to_string(), python.version_text(), "{at}");
        assert_eq!(found.layout, Layout::of(python.build()).unwrap(), "{at}");
        let expected = match python.minor() {
            13.. => OffsetSource::DebugOffsets,
            _ => OffsetSource::Table,
        };
        assert_eq!(found.offset_source, expected, "{at}");
        let mem = ProcessMemory::new(target.pid());
        assert_eq!(found.phase(&mem).unwrap(), Phase::Running, "{at}");
        for function in [
            found.symbols.get_allocator,
            found.symbols.set_allocator,
            found.symbols.current_thread_state,
            found.symbols.this_thread_state,
        ] {
            assert!(function.is_some_and(|f| found.is_own_code(f)), "{at}: {function:?}");
        }
        assert!(found.writable.iter().any(|r| r.contains(&found.runtime.0)), "{at}");
        check_allocators(&found, &mem, &at.to_string());
    }
}

/// The allocator structs hold functions of the interpreter: pymalloc's in all three domains but the first.
fn check_allocators(found: &interpreter::Interpreter, mem: &ProcessMemory, at: &str) {
    let structs = match found.layout.runtime.allocators {
        Some(offsets) => {
            let place = |offset| found.runtime.checked_add(offset).unwrap();
            [place(offsets.raw), place(offsets.mem), place(offsets.obj)]
        }
        None => match found.symbols.allocators {
            Some(structs) => structs,
            None => return,
        },
    };
    for address in structs {
        let malloc = mem.read_ptr(address.checked_add(8).unwrap()).unwrap();
        assert!(found.is_own_code(malloc), "{at}: {malloc}");
    }
    if let Some([malloc, ..]) = found.symbols.pymalloc {
        for address in &structs[1..] {
            assert_eq!(mem.read_ptr(address.checked_add(8).unwrap()).unwrap(), malloc, "{at}");
        }
    }
}

#[test]
fn a_wrong_layout_does_not_validate() {
    for python in interpreters::supported() {
        let target = idle(&python);
        let found = interpreter::find(target.pid()).unwrap();
        let mem = ProcessMemory::new(target.pid());
        for build in Build::all() {
            let layout = Layout::of(build).unwrap();
            let fits = layout.validate(&mem, found.runtime).is_ok();
            // 3.9 and 3.10 differ only in what a line table means and where f_lasti is, which no structure tells.
            let same = build == python.build() || [build, python.build()].iter().all(|b| [9, 10].contains(&b.minor));
            assert_eq!(fits, same, "layout of {build} on {}", python.path.display());
        }
    }
}

#[test]
fn a_deleted_executable_is_still_found() {
    let python = Python::ask("/usr/bin/python3".as_ref())
        .or_else(|| interpreters::supported().pop())
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("python-copy");
    let real = std::fs::canonicalize(&python.path).unwrap();
    common::copy_program(&real, &copy);
    let mut command = std::process::Command::new(&copy);
    command.arg(common::python::targets().join("idle.py"));
    if let Some(home) = real.parent().and_then(|bin| bin.parent()) {
        command.env("PYTHONHOME", home);
    }
    let mut target = Running::spawn(command);
    target.lines_until("ready");
    std::fs::remove_file(&copy).unwrap();
    let found = interpreter::find(target.pid()).unwrap_or_else(|e| panic!("{}", chain(&e)));
    assert_eq!(found.version.to_string(), python.version_text());
    // Another file under the old name is not taken for it.
    std::fs::copy("/bin/true", &copy).unwrap();
    interpreter::find(target.pid()).unwrap_or_else(|e| panic!("{}", chain(&e)));
}

/// A shell command in a mount namespace of its own, if we may make one.
fn in_own_mounts(script: &str, arguments: &[&std::path::Path]) -> Option<Running> {
    let allowed = std::process::Command::new("unshare").args(["--mount", "true"]).status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no mount namespaces here");
        return None;
    }
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).args(arguments);
    Some(Running::spawn(command))
}

#[test]
fn a_python_in_another_mount_namespace_is_found() {
    for python in interpreters::supported() {
        let real = std::fs::canonicalize(&python.path).unwrap();
        let Some(prefix) = real
            .parent()
            .and_then(|bin| bin.parent())
            .filter(|p| p.join("lib").exists())
        else {
            continue;
        };
        // Outside, the place is an empty folder.
        let place = tempfile::tempdir().unwrap();
        let inside = place.path().join("bin").join(real.file_name().unwrap());
        let script = "mount --bind \"$1\" \"$2\" && export LD_LIBRARY_PATH=\"$2/lib\" && exec \"$3\" \"$4\"";
        let arguments = [
            prefix,
            place.path(),
            &inside,
            &common::python::targets().join("idle.py"),
        ];
        let Some(mut target) = in_own_mounts(script, &arguments) else {
            return;
        };
        target.lines_until("ready");
        assert!(!inside.exists());
        let found = interpreter::find(target.pid()).unwrap_or_else(|e| panic!("{}: {}", real.display(), chain(&e)));
        assert_eq!(found.version.to_string(), python.version_text());
        assert!(found.path.starts_with(place.path()), "{}", found.path.display());
    }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text += &format!(": {cause}");
        next = cause.source();
    }
    text
}
