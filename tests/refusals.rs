//! Promise: what cannot be profiled is refused in one line that says why, with the right exit code, untouched.
//!
//! The lines are in `tests/golden/refusals.txt` (`name: exit code: line`, what varies replaced by PID, DIR and EXE);
//! `PYHEAP_BLESS=1 cargo test --release --test integration refusals::` writes it anew.

use crate::common::golden::check as golden;
use crate::common::picture::{Picture, tracer};
use crate::common::pyheap::{Finished, run, start_command};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, interpreters, is_root, scratch, skip, until};
use std::path::Path;
use std::process::{Command, Stdio};

/// `pyheap record PID -o BASE` to its end.
fn refused(pid: i32, base: &Path) -> Finished {
    let pid = pid.to_string();
    run([
        std::ffi::OsStr::new("record"),
        pid.as_ref(),
        "-o".as_ref(),
        base.as_os_str(),
        "--duration".as_ref(),
        "1s".as_ref(),
    ])
}

/// Nothing was written, not even an empty file.
fn no_files(dir: &Path) {
    let files: Vec<_> = std::fs::read_dir(dir)
        .expect("our folder")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert!(files.is_empty(), "a refused recording left {files:?}");
}

#[test]
fn no_such_process() {
    let dir = scratch();
    // A pid that existed a moment ago, and one that cannot be.
    let mut child = Command::new("true").spawn().expect("true runs");
    let gone = i32::try_from(child.id()).expect("pids are below 2^22");
    child.wait().expect("our own child");
    golden(
        "gone",
        3,
        refused(gone, &dir.path().join("run")),
        &[(&gone.to_string(), "PID")],
    );
    golden("pid_0", 3, refused(0, &dir.path().join("run")), &[]);
    golden(
        "never_was",
        3,
        refused(1 << 30, &dir.path().join("run")),
        &[("1073741824", "PID")],
    );
    no_files(dir.path());
}

#[test]
fn bad_arguments() {
    for args in [
        &["record", "abc"][..],
        &["record", "--duration", "ten", "1"],
        &["record", "--period", "0", "1"],
        &["record", "--period", "-5", "1"],
        &["top"],
        &["flame"],
        &["nonsense"],
        &["record", "--", "/no/such/program"],
    ] {
        let run = run(args);
        assert!(
            run.code() == 2 || (args.contains(&"--") && run.code() != 0),
            "{args:?}: {run:?}"
        );
        assert!(
            !run.stderr.is_empty() && !run.stderr.contains("panicked"),
            "{args:?}: {run:?}"
        );
    }
}

#[test]
fn no_profile() {
    let dir = scratch();
    let base = dir.path().join("nothing");
    let base = base.to_str().expect("UTF-8");
    for command in ["info", "digest", "top", "flame"] {
        let mut args = vec![command, base];
        if command == "flame" {
            args.extend(["-o", "-"]);
        }
        let run = run(&args);
        assert!(run.code() != 0 && run.stderr.contains(base), "{command}: {run:?}");
        assert!(!run.stderr.contains("panicked"), "{command}: {run:?}");
    }
}

#[test]
fn not_python() {
    let dir = scratch();
    let mut cat = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("cat runs");
    let pid = i32::try_from(cat.id()).expect("pids are below 2^22");
    // Past its exec, so that it is `cat` that is looked at.
    until("cat", DEADLINE, || {
        std::fs::read_link(format!("/proc/{pid}/exe"))
            .ok()
            .filter(|exe| exe.ends_with("cat") || exe.ends_with("coreutils"))
    });
    let exe = std::fs::read_link(format!("/proc/{pid}/exe")).expect("alive");
    let run = refused(pid, &dir.path().join("run"));
    let exe = exe.to_str().expect("UTF-8");
    let alive = cat.try_wait().expect("our own child").is_none();
    let _ = cat.kill();
    let _ = cat.wait();
    golden("not_python", 5, run, &[(&pid.to_string(), "PID"), (exe, "EXE")]);
    assert!(alive, "the refused process died");
    no_files(dir.path());
}

#[test]
fn init_is_not_python() {
    if !is_root() {
        skip!("init_is_not_python", "not root");
    }
    if std::fs::read_link("/proc/1/exe").is_ok_and(|exe| exe.to_string_lossy().contains("python")) {
        skip!("init_is_not_python", "pid 1 is a Python here");
    }
    let dir = scratch();
    let run = refused(1, &dir.path().join("run"));
    // In a container even root may not look into it.
    assert!(run.code() == 5 || run.code() == 4, "pid 1: {run:?}");
    no_files(dir.path());
}

#[test]
fn pypy() {
    let Some(pypy) = interpreters::pypy() else {
        skip!("pypy", "no pypy3")
    };
    let dir = scratch();
    let mut target = Target::start(&pypy, "accuracy.py", &["0.01"]);
    let run = refused(target.pid, &dir.path().join("run"));
    let print = ["-c", "import sys; print('%d.%d' % sys.version_info[:2])"];
    let version = Command::new(&pypy.path).args(print).output().expect("it runs");
    let version = String::from_utf8(version.stdout).expect("a version");
    let replaced = [
        (version.trim(), "VERSION"),
        (&target.pid.to_string(), "PID"),
        (&pypy.path, "EXE"),
    ];
    golden("pypy", 5, run, &replaced);
    target.ask("GO", "TRUTH");
    target.exit_cleanly();
    no_files(dir.path());
}

#[test]
fn another_users_process() {
    const TEST: &str = "another_users_process";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    if !is_root() || !have("setpriv") {
        skip!(TEST, "needs root rights and setpriv");
    }
    let dir = scratch();
    // Where nobody can read and run it, whatever the rights of the checkout are.
    let copy = dir.path().join("pyheap");
    common::copy_program(common::pyheap::binary(), &copy);
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let before = Picture::of(target.pid);
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=-all",
        "--",
    ]);
    command.arg(&copy).args([
        "record",
        &target.pid.to_string(),
        "--duration",
        "1s",
        "-o",
        "/tmp/pyheap-never-written",
    ]);
    let run = start_command(command).finish(DEADLINE);
    let pid = target.pid.to_string();
    golden("another_users_process", 4, run, &[(&pid, "PID"), (&python.path, "EXE")]);
    assert_eq!(before.differences(&Picture::of(target.pid), ""), Vec::<String>::new());
    target.exit_cleanly();
}

/// A tracer, started and waited for, and what pyheap said meanwhile.
///
/// The tracer ends by SIGKILL: gdb may look at a SIGTERM only after the command that it runs. Neither has breakpoints in the
/// target, so the kernel just lets it go.
fn while_traced_by(name: &str, mut tracer_command: Command, pid: i32, base: &Path) -> (Finished, String) {
    let mut child = tracer_command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let by = until(&format!("{name} traces {pid}"), DEADLINE, || {
        Some(tracer(pid)).filter(|&by| by != 0)
    });
    let run = refused(pid, base);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(by), nix::sys::signal::Signal::SIGKILL).expect("our own child");
    let _ = child.wait();
    (run, by.to_string())
}

#[test]
fn traced_by_strace() {
    const TEST: &str = "traced_by_strace";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    if !have("strace") {
        skip!(TEST, "no strace");
    }
    let dir = scratch();
    let mut target = Target::start(&python, "accuracy.py", &["0.01"]);
    let pid = target.pid.to_string();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-p", &pid, "-o", "/dev/null"]);
    let (run, by) = while_traced_by("strace", strace, target.pid, &dir.path().join("run"));
    golden(
        "traced_by_strace",
        6,
        run,
        &[(&pid, "PID"), (&by, "TRACER"), (&python.path, "EXE")],
    );
    target.ask("GO", "TRUTH");
    target.exit_cleanly();
    no_files(dir.path());
}

#[test]
fn traced_by_gdb() {
    const TEST: &str = "traced_by_gdb";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    if !have("gdb") {
        skip!(TEST, "no gdb");
    }
    let dir = scratch();
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let pid = target.pid.to_string();
    // gdb reads only; calls into the target are what it gets wrong on machines with a large register file.
    let mut gdb = Command::new("gdb");
    gdb.args([
        "-nx",
        "-batch",
        "-iex",
        "set auto-load off",
        "-iex",
        "set debuginfod enabled off",
        "-p",
        &pid,
    ]);
    gdb.args(["-ex", "shell sleep 20"]);
    let (run, by) = while_traced_by("gdb", gdb, target.pid, &dir.path().join("run"));
    golden(
        "traced_by_gdb",
        6,
        run,
        &[(&pid, "PID"), (&by, "TRACER"), (&python.path, "EXE")],
    );
    no_files(dir.path());
}

#[test]
fn recorded_by_another_pyheap() {
    const TEST: &str = "recorded_by_another_pyheap";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let other = scratch();
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let pid = target.pid.to_string();
    let base = other.path().join("run");
    let first = common::pyheap::record(target.pid, base.to_str().expect("UTF-8"), &[]);
    let run = refused(target.pid, &dir.path().join("run"));
    let by = first.pid().to_string();
    golden(
        "recorded_by_another",
        6,
        run,
        &[(&pid, "PID"), (&by, "OTHER"), (&python.path, "EXE")],
    );
    // The first one has not noticed, and `info` knows who records.
    let info = common::pyheap::run(["info", &pid]).expect_code(0).stdout;
    assert!(info.contains(&by), "info does not name the recorder {by}:\n{info}");
    first.interrupt();
    target.exit_cleanly();
    no_files(dir.path());
}

#[test]
fn nowhere_to_write() {
    const TEST: &str = "nowhere_to_write";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let before = Picture::of(target.pid);
    let pid = target.pid.to_string();
    let place = dir.path().to_str().expect("UTF-8");
    let replace = [(place, "DIR"), (pid.as_str(), "PID")];
    golden(
        "no_such_folder",
        1,
        refused(target.pid, &dir.path().join("no/such/run")),
        &replace,
    );
    // Root may write everywhere, so the unwritable folder is one where nobody can: a file, and /proc.
    std::fs::write(dir.path().join("file"), "").expect("our folder");
    golden(
        "folder_is_a_file",
        1,
        refused(target.pid, &dir.path().join("file/run")),
        &replace,
    );
    golden(
        "folder_not_writable",
        1,
        refused(target.pid, Path::new("/proc/run")),
        &replace,
    );
    // Refused before the target was touched.
    assert_eq!(before.differences(&Picture::of(target.pid), ""), Vec::<String>::new());
    target.exit_cleanly();
}

/// What is no process that could be entered: a thread, a zombie, a part of the kernel.
#[test]
fn no_program() {
    let dir = scratch();
    let base = dir.path().join("run");
    let Some(python) = interpreters::any() else {
        skip!("no_program", "no CPython found")
    };
    let target = Target::start(&python, "hard.py", &["busy"]);
    let pid = target.pid.to_string();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"))
        .expect("our own child")
        .flatten();
    let thread = threads
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|tid| *tid != pid);
    let thread = thread.expect("it has eight");
    let end = refused(thread.parse().expect("a number"), &base);
    golden("thread", 3, end, &[(&thread, "TID"), (&pid, "PID")]);
    target.exit_cleanly();

    let mut zombie = Command::new("true").spawn().expect("true runs");
    let pid = zombie.id().to_string();
    until("the end", DEADLINE, || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.contains(") Z ").then_some(())
    });
    golden(
        "zombie",
        3,
        refused(pid.parse().expect("a number"), &base),
        &[(&pid, "PID")],
    );
    zombie.wait().expect("our own child");

    // The number of the kernel's thread that starts all others; a container has none.
    if std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd") {
        golden("kernel_thread", 5, refused(2, &base), &[]);
    } else {
        common::skipped("no_program", "no thread of the kernel is to be seen here");
    }
    no_files(dir.path());
}

/// One's own process that has forbidden to be looked into.
#[test]
fn not_dumpable() {
    const TEST: &str = "not_dumpable";
    let python = interpreters::some(&["deb-3.11"]).into_iter().next();
    let Some(python) = python.filter(|_| is_root() && have("setpriv")) else {
        skip!(TEST, "needs root rights, setpriv and the system's Python")
    };
    let dir = scratch();
    let other = [
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=-all",
        "--",
    ];
    let copy = dir.path().join("pyheap");
    common::copy_program(common::pyheap::binary(), &copy);
    for file in ["states.py", "protocol.py"] {
        std::fs::copy(common::target_script(file), dir.path().join(file)).expect("room for a copy");
    }
    let mut command = Command::new("setpriv");
    command
        .args(other)
        .arg(&python.path)
        .arg(dir.path().join("states.py"))
        .arg("not_dumpable");
    let mut target = Target::start_command(command, TEST);
    let before = Picture::of(target.pid);
    let pid = target.pid.to_string();
    let mut command = Command::new("setpriv");
    command
        .args(other)
        .arg(&copy)
        .args(["record", &pid, "--duration", "1s", "-o", "/tmp/pyheap-never-written"]);
    let run = start_command(command).finish(DEADLINE);
    golden("not_dumpable", 4, run, &[(&pid, "PID")]);
    let now = Picture::of(target.pid);
    assert_eq!((before.fds, before.status), (now.fds, now.status));
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
}

/// The words and exit codes of refusals for which this machine would have to be another one.
#[test]
fn words_of_the_others() {
    use pyheap::attach::preflight::NoPermission;
    use pyheap::attach::{AttachError, FindError, Refusal};
    use pyheap_injector::seccomp::Forbidden;
    let permission = |reason| Refusal::NotPermitted { pid: 4242, reason };
    let refusals = [
        ("shadow_stack", Refusal::ShadowStack { pid: 4242 }),
        (
            "seccomp_strict",
            Refusal::Seccomp {
                pid: 4242,
                why: Forbidden::Strict,
            },
        ),
        ("yama_1", permission(NoPermission::YamaParents)),
        ("yama_2", permission(NoPermission::YamaAdministrators)),
        ("yama_3", permission(NoPermission::YamaNobody)),
        (
            "starting_up",
            Refusal::Python(FindError::NotInitialised {
                pid: 4242,
                version: pyheap::frames::PyVersion {
                    major: 3,
                    minor: 12,
                    micro: 0,
                    release: 0xf0,
                },
            }),
        ),
    ];
    let errors = [
        ("busy", AttachError::Busy { pid: 4242 }),
        (
            "no_symbol",
            AttachError::NoSymbol {
                pid: 4242,
                symbol: "PyMem_GetAllocator",
            },
        ),
    ];
    let refusals = refusals
        .into_iter()
        .map(|(name, refusal)| (name, refusal.exit_code(), refusal.to_string()));
    let errors = errors
        .into_iter()
        .map(|(name, error)| (name, error.exit_code(), error.to_string()));
    for (name, code, words) in refusals.chain(errors) {
        let said = format!("error: {words}");
        common::golden::check_line(name, code.into(), Some(code.into()), &said, &[("4242", "PID")]);
    }
}
