//! Who is refused, with which words and which exit code; who is listed.

use crate::common;
use crate::common::interpreters;
use crate::common::python::{Running, targets};
use pyheap::attach::preflight::{self, Refusal};
use pyheap::attach::process::{self, Facts, MemoryUse, ProcessId, ProportionalMemory};
use pyheap::attach::{FindError, candidates};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn refusal(pid: i32) -> Refusal {
    preflight::check(pid).expect_err("this process must be refused")
}

/// Waits until `done`, at most 10 s.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < end, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn idle() -> Running {
    let python = interpreters::supported().remove(0);
    let mut target = Running::start(&python, "idle.py", &[]);
    target.lines_until("ready");
    target
}

#[test]
fn every_supported_python_passes() {
    for python in interpreters::supported() {
        let mut target = Running::start(&python, "idle.py", &[]);
        target.lines_until("ready");
        let checked = preflight::check(target.pid());
        let checked = checked.unwrap_or_else(|e| panic!("{}: {e}", python.path.display()));
        assert_eq!(checked.interpreter.version.to_string(), python.version_text());
        assert_eq!(checked.facts.id.pid, target.pid());
        assert!(checked.facts.threads >= 2);
    }
}

#[test]
fn no_such_process() {
    // Above the largest pid that Linux gives.
    let refusal = refusal(1 << 22);
    assert_eq!(refusal.to_string(), "no process has pid 4194304");
    assert_eq!(refusal.exit_code(), 3);
    assert_eq!(self::refusal(-1).exit_code(), 3);
}

#[test]
fn a_thread_is_not_a_process() {
    let target = idle();
    let tasks = std::fs::read_dir(format!("/proc/{}/task", target.pid())).unwrap();
    let tids = tasks.map(|task| task.unwrap().file_name().into_string().unwrap().parse::<i32>().unwrap());
    let tid = tids.max().unwrap();
    let text = format!("{tid} is a thread of process {0}: use {0}", target.pid());
    assert_eq!(refusal(tid).to_string(), text);
}

#[test]
fn a_zombie_has_ended() {
    let mut child = Command::new("/bin/true").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    wait_for("the end of /bin/true", || Facts::of(pid).unwrap().state == 'Z');
    let refusal = refusal(pid);
    assert_eq!(
        refusal.to_string(),
        format!("process {pid} (true) has already ended and waits for its parent (a zombie)")
    );
    assert_eq!(refusal.exit_code(), 3);
    assert!(!ProcessId::of(pid).unwrap().is_alive());
    child.wait().unwrap();
}

/// As Nuitka makes them: neither the program nor what it maps is called Python.
#[test]
fn a_python_under_another_name_is_seen() {
    let Some(python) = interpreters::listed("hidden-3.12") else {
        eprintln!("skipped: no hidden-3.12 here");
        return;
    };
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", "\"$0\" \"$1\"; echo over"])
        .arg(&python.path)
        .arg(targets().join("idle.py"));
    let mut shell = Running::spawn(shell);
    shell.lines_until("ready");
    let child = process::descendants(shell.pid())[0];
    let exe = std::fs::read_link(format!("/proc/{child}/exe")).unwrap();
    assert!(!exe.ends_with("python"), "{}", exe.display());
    let text = refusal(shell.pid()).to_string();
    assert!(
        text.ends_with(&format!("but it has started Python: try {child}")),
        "{text}"
    );
    preflight::check(child).unwrap();
}

#[test]
fn a_shell_is_told_of_its_python() {
    let python = interpreters::supported().remove(0);
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", "\"$0\" \"$1\"; echo over"])
        .arg(&python.path)
        .arg(targets().join("idle.py"));
    let mut shell = Running::spawn(shell);
    shell.lines_until("ready");
    let child = process::descendants(shell.pid())[0];
    let refusal = refusal(shell.pid());
    let text = refusal.to_string();
    assert!(text.contains("is not Python"), "{text}");
    assert!(
        text.ends_with(&format!("but it has started Python: try {child}")),
        "{text}"
    );
    assert_eq!(refusal.exit_code(), 5);
    preflight::check(child).unwrap();
    Command::new("kill").arg(child.to_string()).status().unwrap();
}

#[test]
fn a_program_without_python() {
    let mut sleep = Command::new("sleep");
    sleep.arg("100");
    let sleep = Running::spawn(sleep);
    wait_for("exec", || Facts::of(sleep.pid()).unwrap().name == "sleep");
    let refusal = refusal(sleep.pid());
    assert!(matches!(refusal, Refusal::Python(FindError::NotPython { .. })));
    let text = refusal.to_string();
    assert!(text.ends_with("sleep) is not Python"), "{text}");
}

#[test]
fn a_traced_process_names_its_tracer() {
    for (tracer, arguments) in [
        ("strace", vec!["-f", "-o", "/dev/null", "-p"]),
        ("gdb", vec!["-q", "-nx", "-p"]),
    ] {
        if !Path::new("/usr/bin").join(tracer).exists() {
            eprintln!("skipped: no {tracer} here");
            continue;
        }
        let target = idle();
        let mut command = Command::new(tracer);
        command
            .args(arguments)
            .arg(target.pid().to_string())
            .stderr(Stdio::null());
        // To the end: gdb killed in the middle of its start leaves a process behind that nobody ends.
        let tracer_process = Running::spawn(command);
        wait_for("tracing", || Facts::of(target.pid()).unwrap().tracer.is_some());
        let refusal = refusal(target.pid());
        let expected = format!(
            "{tracer} (pid {}) is tracing process {}: quit it or detach there first",
            tracer_process.pid(),
            target.pid()
        );
        match tracer {
            "gdb" => tracer_process.end_by_eof(),
            _ => drop(tracer_process),
        }
        assert_eq!(refusal.to_string(), expected);
        assert_eq!(refusal.exit_code(), 6);
    }
}

#[test]
fn a_stopped_process_is_refused_with_the_remedy() {
    let target = idle();
    let kill = |signal: &str| {
        Command::new("kill")
            .args([signal, &target.pid().to_string()])
            .status()
            .unwrap()
    };
    kill("-STOP");
    wait_for("the stop", || Facts::of(target.pid()).unwrap().state == 'T');
    let text = refusal(target.pid()).to_string();
    assert!(text.contains(&format!("`kill -CONT {}`", target.pid())), "{text}");
    kill("-CONT");
    wait_for("running on", || Facts::of(target.pid()).unwrap().state != 'T');
    preflight::check(target.pid()).unwrap();
}

#[test]
fn a_python_that_shuts_down_is_refused() {
    for python in interpreters::supported() {
        let mut target = Running::start(&python, "exiting.py", &[]);
        target.lines_until("ready");
        let text = refusal(target.pid()).to_string();
        let expected = format!("the Python in process {} is shutting down", target.pid());
        assert_eq!(text, expected, "{}", python.path.display());
    }
}

/// Python imports `encodings` before it calls itself initialised: one that waits keeps it there.
#[test]
fn a_python_that_starts_up_is_refused() {
    for python in interpreters::supported() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("encodings");
        std::fs::create_dir(&package).unwrap();
        let text = "import posix\nposix.write(1, b'ready\\n')\nposix.read(0, 1)\n";
        std::fs::write(package.join("__init__.py"), text).unwrap();
        let mut command = Command::new(&python.path);
        command
            .args(["-c", "pass"])
            .env("PYTHONPATH", folder.path())
            .stderr(Stdio::null());
        let mut target = Running::spawn(command);
        if target.line().as_deref() != Some("ready") {
            eprintln!("skipped: {} ignores PYTHONPATH", python.path.display());
            continue;
        }
        let refusal = refusal(target.pid());
        let expected = format!(
            "Python 3.{} in process {} is still starting up or already shut down: try again",
            python.minor(),
            target.pid()
        );
        assert_eq!(refusal.to_string(), expected, "{}", python.path.display());
        assert_eq!(refusal.exit_code(), 7);
    }
}

#[test]
fn other_versions_are_refused_by_name() {
    let others: Vec<_> = interpreters::all()
        .into_iter()
        .filter(|p| p.version.0 != 3 || !pyheap::frames::SUPPORTED_MINORS.contains(&p.minor()))
        .collect();
    if others.is_empty() {
        eprintln!("skipped: no unsupported Python here");
    }
    for python in others {
        let mut target = Running::start(&python, "idle.py", &[]);
        target.lines_until("ready");
        let refusal = refusal(target.pid());
        let end = if python.version.0 == 3 && python.minor() > 15 {
            "is not supported yet: 3.7 to 3.15 are"
        } else {
            "is not supported: 3.7 to 3.15 are"
        };
        assert_eq!(refusal.to_string(), format!("Python {} {end}", python.version_text()));
        assert_eq!(refusal.exit_code(), 5);
    }
}

/// Without symbols, and from before the time when `_PyRuntime` could be found without.
#[test]
fn an_old_python_without_symbols_is_refused_by_its_version() {
    let Some(python) = interpreters::listed("hidden-3.8") else {
        eprintln!("skipped: no hidden-3.8 here");
        return;
    };
    let mut command = Command::new(&python.path);
    command.arg(targets().join("idle.py"));
    let mut target = Running::spawn(command);
    target.lines_until("ready");
    let refusal = refusal(target.pid());
    let text = refusal.to_string();
    assert!(
        text.starts_with("Python 3.8.") && text.contains("has no symbols"),
        "{text}"
    );
    assert_eq!(refusal.exit_code(), 5);
}

/// `PYHEAP_OTHER_PYTHONS`: paths of PyPy, MicroPython, free-threaded builds, joined by colons.
#[test]
fn other_implementations_are_refused() {
    let list = std::env::var_os("PYHEAP_OTHER_PYTHONS").unwrap_or_else(|| "/usr/bin/pypy3:/usr/bin/micropython".into());
    for path in std::env::split_paths(&list) {
        if !path.exists() {
            eprintln!("skipped: no {} here", path.display());
            continue;
        }
        let mut command = Command::new(&path);
        command.arg(targets().join("simple.py"));
        let mut target = Running::spawn(command);
        target.lines_until("ready");
        let refusal = refusal(target.pid());
        let text = refusal.to_string();
        eprintln!("{}: {text}", path.display());
        assert!(text.contains("is not supported"), "{text}");
        assert_eq!(refusal.exit_code(), 5);
    }
}

#[test]
fn candidates_are_listed_without_our_own_family() {
    let python = interpreters::supported().remove(0);
    let target = idle();
    let listed = candidates::list();
    let ours = listed
        .iter()
        .find(|c| c.pid == target.pid())
        .expect("the target is listed");
    assert_eq!(ours.version.map(|v| v.to_string()), Some(python.version_text()));
    assert_eq!(ours.attachable, Ok(()));
    assert!(ours.command.contains("idle.py"), "{}", ours.command);
    assert!(ours.rss_bytes > 1 << 20);
    assert!(ours.age.is_some_and(|age| age < Duration::from_secs(60)));
    let family = process::own_family();
    assert!(family.len() > 1);
    assert!(listed.iter().all(|candidate| !family.contains(&candidate.pid)));
}

#[test]
fn memory_of_a_process() {
    let target = idle();
    let memory = MemoryUse::of(target.pid()).unwrap();
    let exact = ProportionalMemory::of(target.pid()).unwrap();
    assert!(memory.rss_bytes > 1 << 20 && memory.rss_bytes >= exact.pss_bytes);
    let anonymous = memory.anonymous_bytes.unwrap();
    assert!(
        anonymous.abs_diff(exact.anonymous_bytes) < 1 << 20,
        "{memory:?} {exact:?}"
    );
}

/// A 32-bit program that only waits: `mov eax, 29; int 0x80; jmp` back (pause), behind the smallest possible headers.
fn program_of_32_bit() -> Vec<u8> {
    let mut bytes = b"\x7fELF\x01\x01\x01".to_vec();
    bytes.resize(16, 0);
    let half = |bytes: &mut Vec<u8>, n: u16| bytes.extend(n.to_le_bytes());
    let word = |bytes: &mut Vec<u8>, n: u32| bytes.extend(n.to_le_bytes());
    half(&mut bytes, 2);
    half(&mut bytes, 3);
    // Version, entry, program headers, no sections, flags.
    [1, 0x0804_8054, 52, 0, 0].into_iter().for_each(|n| word(&mut bytes, n));
    [52, 32, 1, 0, 0, 0].into_iter().for_each(|n| half(&mut bytes, n));
    // PT_LOAD of the whole file, readable and executable.
    [1, 0, 0x0804_8000, 0x0804_8000, 96, 96, 5, 0x1000]
        .into_iter()
        .for_each(|n| word(&mut bytes, n));
    bytes.extend([0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7]);
    bytes.resize(96, 0x90);
    bytes
}

#[test]
fn a_32_bit_program_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let (bytes, path) = (folder.path().join("bytes"), folder.path().join("small"));
    std::fs::write(&bytes, program_of_32_bit()).unwrap();
    common::copy_program(&bytes, &path);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let Ok(child) = Command::new(&path).spawn() else {
        eprintln!("skipped: this kernel runs no 32-bit programs");
        return;
    };
    let mut child = child;
    let pid = i32::try_from(child.id()).unwrap();
    // The kernel says that exec has succeeded before the new program is mapped.
    let is_mapped = || {
        let process = procfs::process::Process::new(pid).unwrap();
        process::mapped_files(&process).is_ok_and(|files| files.contains(&path))
    };
    wait_for("exec", is_mapped);
    let checked = preflight::check(pid);
    child.kill().unwrap();
    child.wait().unwrap();
    let refusal = checked.expect_err("this process must be refused");
    assert_eq!(
        refusal.to_string(),
        "the 32-bit program small is not supported: pyheap profiles 64-bit processes only"
    );
    assert_eq!(refusal.exit_code(), 5);
}

/// The same test program as another user, by which everything must be refused: the answer comes on its stdout.
#[test]
fn somebody_elses_process_is_refused() {
    const VARIABLE: &str = "PYHEAP_TEST_CHECK_PID";
    if let Ok(pid) = std::env::var(VARIABLE) {
        let refusal = refusal(pid.parse().unwrap());
        println!("refused {}: {refusal}", refusal.exit_code());
        return;
    }
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let target = idle();
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let copy = folder.path().join("test");
    common::copy_program(std::env::current_exe().unwrap(), &copy);
    let out = Command::new(&copy)
        .args([
            "--exact",
            "frames_preflight::somebody_elses_process_is_refused",
            "--nocapture",
        ])
        .env(VARIABLE, target.pid().to_string())
        .current_dir("/")
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let expected = format!(
        "refused 4: not permitted to look into process {}: it runs as user 0: run pyheap as that user or with sudo",
        target.pid()
    );
    assert!(text.contains(&expected), "{text}");
}
