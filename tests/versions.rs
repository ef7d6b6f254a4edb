//! Every build of CPython: what is hard about finding it, naming its code, and its threads.

use crate::common::interpreters::{self, Interpreter};
use crate::common::report::{Row, top};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, is_root, pyheap, scratch, skipped, until};
use ::pyheap::attach::elf::ElfFile;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One of each generation of code objects and strings, and of each way to find the thread's own state.
fn representative() -> Vec<Interpreter> {
    interpreters::some(&[
        "3.7",
        "3.8",
        "3.11",
        "hidden-3.12",
        "3.13t",
        "3.14",
        "3.14t",
        "musl-3.12",
    ])
}

fn path(dir: &tempfile::TempDir, name: &str) -> String {
    dir.path().join(name).to_str().expect("UTF-8").to_owned()
}

/// Function (none for the module around it), file and line of generated code, by its number; none for a wrong name.
fn generated(row: &Row) -> Option<(Option<u64>, u64, u64)> {
    let file = row.file.strip_prefix("<gen-")?.strip_suffix('>')?.parse().ok()?;
    if row.function == "<module>" {
        return Some((None, file, row.line));
    }
    Some((Some(row.function.strip_prefix("gen_")?.parse().ok()?), file, row.line))
}

/// Code that lives for some microseconds only: every name that is shown is right, and every frame has one.
#[test]
fn code_that_is_gone_at_once() {
    const FUNCTIONS: u64 = 10_000;
    for python in representative() {
        let dir = scratch();
        let base = path(&dir, "run");
        let mut target = Target::start(&python, "codes.py", &["short", &FUNCTIONS.to_string()]);
        let recording = pyheap::record(target.pid, &base, &["--period", "4KiB"]);
        let done = target.ask("GO", "DONE");
        recording.interrupt();
        let rows = top(&base, &["--by", "line"]).rows;
        let mut found = 0;
        let mut unresolved = 0;
        for row in &rows {
            unresolved += u64::from(row.function.starts_with("<unreadable") || row.function.starts_with("<stack lost"));
            if row.file.starts_with("<gen-") || row.function.starts_with("gen_") {
                let (function, file, line) = generated(row).unwrap_or_else(|| panic!("{}: {row:?}", python.name));
                match function {
                    Some(function) => {
                        assert_eq!(
                            (function, line),
                            (file, function % 1000 + 2),
                            "{}: {row:?}",
                            python.name
                        );
                        found += 1;
                    }
                    // The function object itself is made by the module around it.
                    None => assert_eq!(line, file % 1000 + 1, "{}: {row:?}", python.name),
                }
            }
        }
        eprintln!(
            "{}: {} code objects a second, {found} shown, {unresolved} of {} rows unresolved",
            python.name,
            done["rate"],
            rows.len()
        );
        assert_eq!(unresolved, 0, "{}", python.name);
        // Each is sampled with probability 1 - e^-2 = 0.865: 8,647 expected, with a deviation of 34.
        assert!((8_300..9_000).contains(&found), "{}: {found}", python.name);
        target.exit_cleanly();
    }
}

/// Names of 1, 2 and 4 bytes a character, with lone surrogates, too long ones, and instances of a subclass.
#[test]
fn names_of_every_kind() {
    for python in representative() {
        let dir = scratch();
        let base = path(&dir, "run");
        let mut target = Target::start(&python, "codes.py", &["odd"]);
        // Each name's 400,000 bytes are sampled but for a chance of e^-97.
        let recording = pyheap::record(target.pid, &base, &["--period", "4KiB"]);
        let done = target.ask("GO", "DONE");
        recording.interrupt();
        let rows = top(&base, &["--by", "line"]).rows;
        for names in done["names"].as_array().expect("names") {
            let text = |i: usize| names[i].as_str().expect("a name");
            let is_there = rows
                .iter()
                .any(|row| row.function == text(0) && row.file == text(1) && row.bytes > 390_000.0);
            let short: String = text(0).chars().take(40).collect();
            assert!(is_there, "{}: {short:?} is not among {} rows", python.name, rows.len());
        }
        target.exit_cleanly();
    }
}

/// Threads that run Python at the same time are recorded and left again and again, and compute what they should.
#[test]
fn threads_without_a_gil() {
    const THREADS: &str = "8";
    for python in interpreters::some(&["3.13t", "3.14t", "musl-3.14t"]) {
        let dir = scratch();
        let mut target = Target::start(&python, "codes.py", &["threads", THREADS]);
        target.ask("GO", "DONE");
        let pid = target.pid.to_string();
        for round in 0..5 {
            let base = path(&dir, &format!("run{round}"));
            // Where eight busy threads share the processors with much else, one of them may not get out of our code in
            // time: then the hooks stay, inert, and it can be tried again.
            until("a recording", DEADLINE, || {
                let out = pyheap::run(["record", &pid, "--duration", "300ms", "-o", &base]);
                (out.status.code() == Some(0)).then_some(())
            });
            for row in top(&base, &["--by", "line"]).rows {
                assert!(!row.function.starts_with("<unreadable"), "{}: {row:?}", python.name);
                // The workers' lines, and no others of theirs.
                let is_work = row.file.ends_with("codes.py") && row.function.contains("work");
                assert!(!is_work || (80..=93).contains(&row.line), "{}: {row:?}", python.name);
            }
        }
        until("a clean target", DEADLINE, || {
            let _ = pyheap::run(["cure", &pid]);
            let info = pyheap::run(["info", &pid]);
            info.stdout.contains("nothing of pyheap is in it").then_some(())
        });
        let before = target.ask("STATUS", "STATUS");
        assert_eq!(
            before["bad"].as_array().map(Vec::len),
            Some(0),
            "{}: {before}",
            python.name
        );
        until("all threads to go on", DEADLINE, || {
            let now = target.ask("STATUS", "STATUS");
            let rounds = |status: &serde_json::Value| -> Vec<u64> {
                let all = status["rounds"].as_array().into_iter().flatten();
                all.map(|n| n.as_u64().unwrap_or(0)).collect()
            };
            rounds(&now)
                .iter()
                .zip(rounds(&before))
                .all(|(now, before)| *now > before)
                .then_some(())
        });
        target.exit_cleanly();
    }
}

/// The libpython that an interpreter of pyenv's loads.
fn library(python: &Interpreter) -> Option<PathBuf> {
    let program = std::fs::canonicalize(&python.path).ok()?;
    let folder = program.parent()?.parent()?.join("lib");
    let mut files = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let minor = python.minor();
    files.find(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&format!("libpython{minor}")) && name.ends_with(".so.1.0")
    })
}

fn strip(file: &Path) -> bool {
    let status = Command::new("strip").arg("--strip-all").arg(file).status();
    status.is_ok_and(|status| status.success())
}

/// A copy of the interpreter and its library without symbols; when it runs, `spoil` is done to the library's file.
fn spoiled(python: &Interpreter, how: &str, spoil: impl Fn(&Path)) -> Option<(tempfile::TempDir, Target)> {
    let Some(library) = library(python) else {
        skipped("spoiled", &format!("{} has no libpython of its own", python.name));
        return None;
    };
    let dir = scratch();
    let program = dir.path().join("python");
    let copy = dir.path().join(library.file_name().unwrap_or_default());
    let real = std::fs::canonicalize(&python.path).expect("it is there");
    common::copy_program(&real, &program);
    std::fs::copy(&library, &copy).expect("room for a copy");
    if !strip(&program) || !strip(&copy) {
        skipped("spoiled", "no strip");
        return None;
    }
    let mut command = Command::new(&program);
    command
        .arg(common::target_script("codes.py"))
        .arg("odd")
        .env("LD_LIBRARY_PATH", dir.path())
        .env("PYTHONHOME", real.parent().and_then(Path::parent).expect("a prefix"));
    let target = Target::start_command(command, &format!("{} {how}", python.name));
    // It may be on its way there still, in code of the library.
    until("the target waits for a command", DEADLINE, || {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", target.pid)).ok()?;
        call.starts_with("0 0x0 ").then_some(())
    });
    spoil(&copy);
    Some((dir, target))
}

/// The same; and then it is recorded.
fn spoiled_and_recorded(python: &Interpreter, how: &str, spoil: impl Fn(&Path)) {
    let Some((dir, mut target)) = spoiled(python, how, spoil) else {
        return;
    };
    let base = path(&dir, "run");
    let recording = pyheap::record(target.pid, &base, &["--period", "4KiB"]);
    target.ask("GO", "DONE");
    recording.interrupt();
    let rows = top(&base, &["--by", "line"]).rows;
    let is_named = rows.iter().any(|row| row.function == "plain" && row.file == "plain");
    // 400,000 bytes at one sample per 4 KiB are missed with a chance of e^-97.
    assert!(is_named, "{} {how}: {rows:?}", python.name);
    target.exit_cleanly();
}

#[test]
fn a_library_that_is_not_there_any_more() {
    let list: Vec<Interpreter> = interpreters::named()
        .into_iter()
        .filter(|python| python.name.starts_with("pyenv-"))
        .collect();
    if list.is_empty() {
        skipped("a_library_that_is_not_there_any_more", "no pyenv");
    }
    for (number, python) in list.iter().enumerate() {
        // Every way on the newest, one on each of the others.
        let is_last = number + 1 == list.len();
        if is_last || number % 3 == 0 {
            spoiled_and_recorded(python, "moved", |file| {
                std::fs::rename(file, file.with_extension("old")).expect("our own folder");
            });
        }
        if is_last || number % 3 == 1 {
            spoiled_and_recorded(python, "deleted", |file| {
                std::fs::remove_file(file).expect("our own folder")
            });
        }
        if is_last || number % 3 == 2 {
            spoiled_and_recorded(python, "replaced", |file| {
                let other = file.with_extension("new");
                std::fs::copy("/bin/true", &other).expect("room for a copy");
                std::fs::rename(&other, file).expect("our own folder");
            });
        }
        if is_last {
            spoiled_and_recorded(python, "overwritten where it is not mapped", overwrite_the_rest);
        }
    }
}

/// Garbage in place of all that the loader did not load: symbols and the list of sections.
fn overwrite_the_rest(file: &Path) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(file)
        .expect("our own folder");
    let len = file.metadata().expect("an open file").len();
    let elf = ElfFile::open(file.try_clone().expect("an open file")).expect("a library");
    let ends = elf
        .segments
        .iter()
        .map(|segment| segment.file_offset + segment.file_size);
    let end = ends.max().expect("it has segments");
    assert!(end < len, "nothing to spoil");
    let garbage = vec![0xa5; usize::try_from(len - end).expect("some kilobytes")];
    file.write_all_at(&garbage, end).expect("room");
}

/// Another system's Python in a `chroot`, with a root and a C library of its own, and no `/proc` to look into.
#[test]
fn a_python_in_a_chroot() {
    const TEST: &str = "a_python_in_a_chroot";
    let Some(root) = interpreters::other_root() else {
        skipped(TEST, "no debsid-3.14");
        return;
    };
    if !is_root() || !have("chroot") {
        skipped(TEST, "only root can chroot");
        return;
    }
    let inside = tempfile::tempdir_in(&root).expect("room in it");
    for name in ["codes.py", "protocol.py"] {
        std::fs::copy(common::target_script(name), inside.path().join(name)).expect("room in it");
    }
    let script = Path::new("/")
        .join(inside.path().file_name().expect("a name"))
        .join("codes.py");
    let mut command = Command::new("chroot");
    command
        .arg(&root)
        .arg("/usr/bin/python3.14")
        .arg("-B")
        .arg(&script)
        .arg("odd");
    let mut target = Target::start_command(command, "chroot");
    let pid = target.pid.to_string();
    let info = pyheap::run(["info", &pid]).expect_code(0).stdout;
    assert!(
        info.contains("Python 3.14.") && info.contains("can be attached to"),
        "{info}"
    );
    let dump = pyheap::run(["dump", &pid]).expect_code(0).stdout;
    let here = format!("main ({}:", script.display());
    assert!(dump.contains(&here), "{dump}");
    let dir = scratch();
    let base = path(&dir, "run");
    let recording = pyheap::record(target.pid, &base, &["--period", "4KiB"]);
    target.ask("GO", "DONE");
    recording.interrupt();
    let rows = top(&base, &["--by", "line"]).rows;
    // 400,000 bytes at one sample per 4 KiB are missed with a chance of e^-97.
    assert!(
        rows.iter().any(|row| row.function == "plain" && row.file == "plain"),
        "{rows:?}"
    );
    let info = pyheap::run(["info", &pid]).expect_code(0).stdout;
    assert!(
        info.contains("nothing of pyheap is in it") || info.contains("private copies"),
        "{info}"
    );
    target.exit_cleanly();
}

/// `cp` over the library of a process: the kernel takes its data away with the old content, and nothing can save it. It is
/// refused, before anything is touched.
#[test]
fn a_library_that_another_was_copied_over() {
    let list = interpreters::some(&["pyenv-3.8", "pyenv-3.12", "pyenv-3.13"]);
    for python in &list {
        for other in ["/bin/true", "nothing"] {
            let spoil = |file: &Path| {
                let content = std::fs::read(other).unwrap_or_default();
                std::fs::write(file, content).expect("our own folder");
            };
            let Some((dir, mut target)) = spoiled(python, other, spoil) else {
                continue;
            };
            let out = pyheap::run(["record", &target.pid.to_string(), "-o", &path(&dir, "run")]);
            let said = format!("{} {other}: {}: {}", python.name, out.code(), out.stderr);
            assert!([5, 7].contains(&out.code()), "{said}");
            assert_eq!(out.stderr.lines().count(), 1, "{said}");
            // It has not run since, and so lives.
            assert!(target.is_running(), "{said}");
            eprintln!("{said}");
        }
    }
}
