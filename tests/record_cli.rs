//! Promise: the commands do what their help says: choosing a process, starting one, progress, Ctrl-C, the demo, the view.

use crate::common::interpreters::{self, Interpreter};
use crate::common::pyheap::{start, start_command};
use crate::common::report::{flame, top};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, is_root, pyheap, scratch, skip, target_script};
use nix::sys::signal::Signal;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs a shell script in a pid namespace of its own, where the only processes are the script's: what `pyheap` finds there
/// does not depend on the machine. `None` where that is not possible.
fn in_a_namespace(script: &str, python: &Interpreter, dir: &Path) -> Option<Command> {
    let probe = ["--pid", "--fork", "--mount-proc", "true"];
    if !is_root() || !have("unshare") || !Command::new("unshare").args(probe).output().ok()?.status.success() {
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "sh", "-euc", script]);
    command
        .env("PYHEAP", common::pyheap::binary())
        .env("PY", &python.path)
        .env("TARGETS", common::tests_dir().join("targets"));
    command.current_dir(dir);
    Some(command)
}

/// `wait_ready FILE`: until a target has said READY there. At most ten seconds.
const SHELL: &str = r#"
wait_ready() { i=0; until grep -q READY "$1" 2>/dev/null; do i=$((i + 1)); [ $i -lt 1000 ] || exit 99; sleep 0.01; done; }
start() { mkfifo "$1.in"; "$PY" "$TARGETS/accuracy.py" 0.01 <"$1.in" >"$1.out" & eval "$1=\$!"; exec 9>"$1.in"; wait_ready "$1.out"; }
"#;

#[test]
fn the_only_python_is_taken() {
    const TEST: &str = "the_only_python_is_taken";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let script = format!("{SHELL} start a; echo \"target $a\"; \"$PYHEAP\" record --duration 1s -o run; kill $a");
    let Some(command) = in_a_namespace(&script, &python, dir.path()) else {
        skip!(TEST, "no pid namespace possible")
    };
    let end = start_command(command).finish(DEADLINE).expect_code(0);
    let pid = end
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("target "))
        .expect("said by the script")
        .to_owned();
    // Named before it is touched.
    let said: Vec<&str> = end.stderr.lines().collect();
    let recording = said
        .iter()
        .position(|line| pyheap::is_recording(line, &pid))
        .expect("recording");
    assert!(
        said[..recording].iter().any(|line| line.contains(&pid)),
        "not named before: {said:?}"
    );
    assert!(dir.path().join("run._hpm").exists());
}

#[test]
fn several_are_listed() {
    const TEST: &str = "several_are_listed";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let script = format!(
        "{SHELL} start a; exec 8>&9; start b; echo \"target $a\"; echo \"target $b\"; \
         set +e; \"$PYHEAP\" record --duration 1s -o run; echo \"code $?\"; kill $a $b"
    );
    let Some(command) = in_a_namespace(&script, &python, dir.path()) else {
        skip!(TEST, "no pid namespace possible")
    };
    let end = start_command(command)
        .finish(DEADLINE)
        .expect_code(0)
        .expect_stdout("code 2");
    for pid in end.stdout.lines().filter_map(|line| line.strip_prefix("target ")) {
        let listed = |text: &str| text.lines().any(|line| line.split_whitespace().any(|word| word == pid));
        let list = end
            .stdout
            .split_once("code")
            .map_or("", |(list, _)| list)
            .replace("target ", "");
        assert!(
            listed(&end.stderr) || list.matches(pid).count() > 1,
            "{pid} is not listed: {end:?}"
        );
    }
    assert!(!dir.path().join("run._hpm").exists());
}

#[test]
fn none_is_said() {
    const TEST: &str = "none_is_said";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let script = "set +e; \"$PYHEAP\" record --duration 1s -o run; echo \"code $?\"";
    let Some(command) = in_a_namespace(script, &python, dir.path()) else {
        skip!(TEST, "no pid namespace possible")
    };
    let end = start_command(command)
        .finish(DEADLINE)
        .expect_code(0)
        .expect_stdout("code 2");
    assert!(
        !end.stderr.trim().is_empty() && !end.stderr.contains("panicked"),
        "{end:?}"
    );
}

/// A Python program that starts pyheap is not what is meant by "the Python process".
#[test]
fn our_own_ancestors_are_never_taken() {
    const TEST: &str = "our_own_ancestors_are_never_taken";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let run = "import os, subprocess; print('parent', os.getpid(), flush=True); \
               print('code', subprocess.call([os.environ['PYHEAP'], 'record', '--duration', '1s', '-o', 'run']))";
    let script = format!("{SHELL} \"$PY\" -c \"{run}\"; start a; echo \"target $a\"; \"$PY\" -c \"{run}\"; kill $a");
    let Some(command) = in_a_namespace(&script, &python, dir.path()) else {
        skip!(TEST, "no pid namespace possible")
    };
    let end = start_command(command).finish(DEADLINE).expect_code(0);
    // Alone with its parent: no candidate. With another one: that.
    let codes: Vec<&str> = end
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("code "))
        .collect();
    assert_eq!(codes, ["2", "0"], "{end:?}");
    let pid = end
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("target "))
        .expect("said by the script")
        .to_owned();
    assert!(
        end.stderr.lines().any(|line| pyheap::is_recording(line, &pid)),
        "{end:?}"
    );
}

#[test]
fn a_command_is_started_and_recorded() {
    for python in interpreters::some(&["pyenv-3.8", "deb-3.11", "3.12", "3.13"]) {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let script = target_script("short.py");
        // No --duration: the command's end ends the recording.
        let end = start(["record", "-o", &base, "--", &python.path, &script]).finish(DEADLINE);
        assert!(end.stdout.contains("short.py: done"), "{}: {end:?}", python.name);
        assert!(end.stderr.contains("recording "), "{}: {end:?}", python.name);
        let end = end.expect_code(0);
        assert!(
            end.stderr.contains('7'),
            "{}: the command's exit code is not told: {}",
            python.name,
            end.stderr
        );
        // Before its end: a Python that exits frees its objects first.
        let rows = top(&base, &["--by", "line", "--at", "-800ms"]).rows;
        let first = rows
            .first()
            .unwrap_or_else(|| panic!("{}: nothing recorded", python.name));
        assert_eq!(first.function, "site_short", "{}", python.name);
        // 512 blocks of 16 KiB, p = 0.1175: 60 samples, sd 7.3; six of them.
        let mib = first.bytes / f64::from(1 << 20);
        assert!((2.0..14.5).contains(&mib), "{}: {mib} MiB instead of 8", python.name);
    }
}

/// A launcher that becomes Python later (pyenv's shims and `env` are such): attached when the interpreter is up, not before.
#[test]
fn a_command_may_become_python_by_exec() {
    const TEST: &str = "a_command_may_become_python_by_exec";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let script = target_script("short.py");
    let shell = "sleep 0.3; exec \"$0\" \"$1\"";
    let end = start(["record", "-o", &base, "--", "sh", "-c", shell, &python.path, &script]).finish(DEADLINE);
    assert!(end.stdout.contains("short.py: done"), "{end:?}");
    end.expect_code(0);
    let rows = top(&base, &["--by", "line", "--at", "-800ms"]).rows;
    assert_eq!(rows.first().map(|row| row.function.as_str()), Some("site_short"));
}

#[test]
fn a_duration_ends_a_commands_recording_not_the_command() {
    const TEST: &str = "a_duration_ends_a_commands_recording_not_the_command";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let script = target_script("short.py");
    let end = start([
        "record",
        "--duration",
        "500ms",
        "-o",
        &base,
        "--",
        &python.path,
        &script,
        "1",
        "1",
    ])
    .finish(DEADLINE);
    // It is not killed, and its output is not lost.
    assert!(end.stdout.contains("short.py: done"), "{end:?}");
}

#[test]
fn progress_duration_and_files() {
    const TEST: &str = "progress_duration_and_files";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "busy.py", &["2"]);
    let pid = target.pid.to_string();
    let begun = Instant::now();
    // Off a terminal there is a line of progress every ten seconds.
    let end = start(["record", "--duration", "11s", "-o", &base, &pid])
        .finish(DEADLINE)
        .expect_code(0);
    let took = begun.elapsed();
    assert!(
        took >= Duration::from_secs(11) && took < Duration::from_secs(20),
        "11 s took {took:?}"
    );
    assert!(
        end.stderr.lines().any(|line| pyheap::is_recording(line, &pid)),
        "{}",
        end.stderr
    );
    assert!(
        end.stderr.lines().filter(|line| line.contains("samples")).count() >= 1,
        "no progress: {}",
        end.stderr
    );
    assert!(
        !end.stderr.contains('\r') && !end.stderr.contains('\x1b'),
        "terminal codes off a terminal"
    );
    for suffix in ["._hpm", "._hpd", "._hpx"] {
        assert!(Path::new(&format!("{base}{suffix}")).exists(), "no {suffix}");
    }
    pyheap::run(["info", &base]).expect_code(0).expect_stdout(&pid);
    pyheap::run(["digest", &base]).expect_code(0);
    assert!(Path::new(&format!("{base}._hpc")).exists(), "no digest");
    let stacks = flame(&base, &[]);
    assert!(
        stacks.keys().flatten().any(|frame| frame.starts_with("compute (")),
        "{stacks:?}"
    );
    target.ask("EXIT", "DONE");
}

#[test]
fn sigint_and_sigterm_end_a_recording() {
    const TEST: &str = "sigint_and_sigterm_end_a_recording";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(&python, "accuracy.py", &["0.1"]);
        let recording = pyheap::record(target.pid, &base, &[]);
        target.ask("GO", "TRUTH");
        recording.signal(signal);
        recording.finish(DEADLINE).expect_code(0);
        assert!(top(&base, &[]).total_bytes > 0.0, "{signal}");
        assert!(target.is_running(), "{signal}: the target was hit");
        target.exit_cleanly();
    }
}

#[test]
fn top_at_a_time() {
    const TEST: &str = "top_at_a_time";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "accuracy.py", &["0.3"]);
    let recording = pyheap::record(target.pid, &base, &[]);
    // A second of silence before the allocations: the times are what is tested.
    std::thread::sleep(Duration::from_secs(1));
    target.ask("GO", "TRUTH");
    recording.interrupt();
    let sites = |top: &common::report::Top| {
        top.rows
            .iter()
            .filter(|row| row.function.starts_with("site_"))
            .map(|row| row.bytes)
            .sum::<f64>()
    };
    assert_eq!(sites(&top(&base, &["--at", "0.5", "--by", "function"])), 0.0);
    assert!(sites(&top(&base, &["--at", "1000", "--by", "function"])) > 20e6);
    // The four views of one moment have one total.
    let totals: Vec<f64> = ["line", "function", "file", "trace"]
        .iter()
        .map(|by| top(&base, &["--by", by]).total_bytes)
        .collect();
    assert!(totals.iter().all(|t| (t - totals[0]).abs() < 1.0), "{totals:?}");
    let text = pyheap::run(["top", &base]).expect_code(0).stdout;
    assert!(text.contains("site_64k") && text.contains("accuracy.py"), "{text}");
    target.exit_cleanly();
}

#[test]
fn attach_shows_the_sites_and_detaches() {
    const TEST: &str = "attach_shows_the_sites_and_detaches";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let mut target = Target::start(&python, "accuracy.py", &["0.3"]);
    let before = common::picture::Picture::of(target.pid);
    let mut view = start(["attach", &target.pid.to_string()]);
    // Off a terminal: plain lines. The hooks are in place when it has said anything about this process.
    view.wait_stderr(&target.pid.to_string());
    common::until("the shim in place", DEADLINE, || {
        (common::picture::Picture::of(target.pid).maps.len() > before.maps.len()).then_some(())
    });
    let mut found = Err("nothing".to_owned());
    for _ in 0..20 {
        // Attached a little before or after our looking: allocate until it shows.
        target.ask("GO", "TRUTH");
        found = view
            .out
            .wait_for("site_64k", Duration::from_secs(3), |line| line.contains("site_64k"));
        if found.is_ok() {
            break;
        }
    }
    let line = found.unwrap_or_else(|e| panic!("{e}"));
    assert!(!line.contains('\x1b'), "terminal codes off a terminal: {line:?}");
    view.interrupt();
    assert!(target.is_running());
    target.exit_cleanly();
}

#[test]
fn the_demo_finds_its_leak() {
    const TEST: &str = "the_demo_finds_its_leak";
    if interpreters::any().is_none() || !have("python3") {
        skip!(TEST, "no python3 in PATH");
    }
    let dir = scratch();
    let mut command = Command::new(common::pyheap::binary());
    command.arg("demo").current_dir(dir.path());
    let end = start_command(command).finish(DEADLINE).expect_code(0);
    let said = format!("{}{}", end.stdout, end.stderr);
    assert!(said.to_lowercase().contains("leak"), "no verdict: {said}");
    assert!(said.contains(".py:"), "no place: {said}");
}

#[test]
fn help_and_version() {
    for command in [
        "record", "attach", "info", "digest", "top", "flame", "demo", "cure", "leaks",
    ] {
        let help = pyheap::run([command, "--help"]).expect_code(0).stdout;
        assert!(help.contains("Usage: pyheap"), "{command}: {help}");
    }
    pyheap::run(["--help"]).expect_code(0).expect_stdout("record");
    pyheap::run(["--version"])
        .expect_code(0)
        .expect_stdout(env!("CARGO_PKG_VERSION"));
}
