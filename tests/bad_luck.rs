//! Promise: whatever happens to the disk, the target or to us, what was recorded until then is kept, the target runs on,
//! and the next recording works.

use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::Picture;
use crate::common::report::top;
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, is_root, pyheap, scratch, skip, until};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn representative() -> Vec<Interpreter> {
    interpreters::some(&["pyenv-3.8", "deb-3.11", "3.12", "3.13"])
}

fn file_len(path: &str) -> u64 {
    std::fs::metadata(path).map_or(0, |m| m.len())
}

/// A file system of this many KiB, gone on drop.
struct SmallDisk<'a>(&'a Path);

impl SmallDisk<'_> {
    fn mount(at: &Path, kib: u32) -> Option<SmallDisk<'_>> {
        let size = format!("size={kib}k");
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "pyheap-test"])
            .arg(at)
            .output()
            .ok()?;
        done.status.success().then_some(SmallDisk(at))
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn disk_full() {
    const TEST: &str = "disk_full";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    if !is_root() {
        skip!(TEST, "needs root rights to mount a small file system");
    }
    let dir = scratch();
    let Some(disk) = SmallDisk::mount(dir.path(), 256) else {
        skip!(TEST, "mount of a tmpfs is not allowed here")
    };
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "busy.py", &["2"]);
    let pid = target.pid.to_string();
    let before = Picture::of(target.pid);
    let recording = pyheap::record(target.pid, &base, &["--period", "1KiB", "--suffix", ".hpm"]);
    let end = recording.finish(DEADLINE).expect_code(1);
    assert!(
        end.stderr.contains("No space left") || end.stderr.contains("disk"),
        "{}",
        end.stderr
    );
    assert!(!end.stderr.contains("panicked"), "{}", end.stderr);
    // The target is cured and well …
    let after = Picture::of(target.pid);
    assert_eq!(before.tasks, after.tasks);
    assert_eq!(before.fds, after.fds);
    let info = pyheap::run(["info", &pid]).expect_code(0).stdout;
    assert!(!info.contains(&format!("recorded by {}", pid)), "{info}");
    let status = target.ask("STATUS", "STATUS");
    assert_eq!(
        (&status["wrong"], &status["errors"]),
        (&Value::from(0), &Value::Array(vec![]))
    );
    // … what was written until then is a profile …
    assert!(top(&base, &[]).total_bytes > 0.0);
    drop(disk);
    // … and the next recording works.
    pyheap::record(target.pid, &base, &[]).interrupt();
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
}

/// The target ends or becomes another program: the recording ends by itself, the files are whole, the line says so.
fn target_ends(python: &Interpreter, how: &str, words: &[&str]) {
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(python, "ending.py", &[how, "1.5"]);
    let recording = pyheap::record(target.pid, &base, &[]);
    target.send("GO");
    let ending = target.expect("ENDING");
    let end = recording.finish(DEADLINE).expect_code(0);
    let said = end.stderr.to_lowercase();
    assert!(
        words.iter().any(|word| said.contains(word)),
        "{how}: none of {words:?} in:\n{}",
        end.stderr
    );
    assert!(!said.contains("panicked"), "{how}: {}", end.stderr);
    if how == "exec" {
        // The new program has nothing of us in it and can be recorded in its turn.
        target.expect("EXECED");
        let again = dir.path().join("again").to_str().expect("UTF-8").to_owned();
        pyheap::record(target.pid, &again, &[]).interrupt();
        target.send("EXIT");
        assert!(target.wait().success(), "{how}");
    } else {
        use std::os::unix::process::ExitStatusExt as _;
        let status = target.wait();
        // The launcher of the manylinux builds ends with 255 after an exception, other Pythons with 1.
        let after_exception = if python.name.starts_with("many-") { 255 } else { 1 };
        let expected = match how {
            "exit" => (Some(3), None),
            "raise" => (Some(after_exception), None),
            "abort" => (None, Some(Signal::SIGABRT as i32)),
            "segv" => (None, Some(Signal::SIGSEGV as i32)),
            _ => (None, Some(Signal::SIGKILL as i32)),
        };
        assert_eq!(
            (status.code(), status.signal()),
            expected,
            "{how}: not the end that the target chose"
        );
    }
    let kept = ending["kept"].as_f64().expect("a number");
    // Its highest state: a Python that exits in an orderly way frees its objects first, however long that takes here.
    let found_at = |at: &str| {
        let rows = top(&base, &["--by", "function", "--at", at]).rows;
        rows.iter()
            .find(|row| row.function == "site_kept")
            .map_or(0.0, |row| row.bytes)
    };
    let found = ["-50ms", "-150ms", "-300ms", "-600ms", "-1s", "-2s", "-4s"]
        .map(found_at)
        .into_iter()
        .fold(0.0, f64::max);
    // 20 to 40 MiB in 16 KiB blocks have a relative standard deviation of 6 to 8 %: six of them, and what came after the last of these times.
    assert!(
        found > kept * 0.45 && found < kept * 1.35,
        "{how}: {found} B instead of {kept}"
    );
}

#[test]
fn target_exits() {
    for python in representative() {
        target_ends(&python, "exit", &["exit", "ended"]);
        target_ends(&python, "raise", &["exit", "ended"]);
    }
}

#[test]
fn target_crashes() {
    for python in representative() {
        target_ends(
            &python,
            "segv",
            &["sigsegv", "signal", "killed", "crash", "exited", "ended"],
        );
        target_ends(
            &python,
            "abort",
            &["sigabrt", "signal", "killed", "crash", "exited", "ended"],
        );
        target_ends(&python, "kill", &["sigkill", "signal", "killed", "exited", "ended"]);
    }
}

#[test]
fn target_execs() {
    for python in representative() {
        target_ends(&python, "exec", &["exec", "another program"]);
    }
}

#[test]
fn pyheap_gets_sigkill() {
    for python in representative() {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(&python, "accuracy.py", &["0.3"]);
        let pid = target.pid.to_string();
        let before = Picture::of(target.pid);
        let recording = pyheap::record(target.pid, &base, &[]);
        let truth = target.ask("GO", "TRUTH");
        // "Valid up to the last second": give it that second, and see that the events went to the file.
        let begun = Instant::now();
        let events = format!("{base}._hpd");
        until("events in the file", DEADLINE, || (file_len(&events) > 0).then_some(()));
        std::thread::sleep(Duration::from_millis(1500).saturating_sub(begun.elapsed()));
        recording.signal(Signal::SIGKILL);
        recording.finish(DEADLINE);

        // The target runs on, allocates, frees, and more.
        assert!(target.is_running(), "{}", python.name);
        target.ask("FREE", "TRUTH");
        target.ask("GO", "TRUTH");

        // The files hold everything up to then.
        let wanted: f64 = truth["sites"]
            .as_object()
            .expect("sites")
            .values()
            .filter(|site| site["big"] == true)
            .map(|site| site["bytes"].as_f64().unwrap_or(0.0))
            .sum();
        let rows = top(&base, &["--by", "function"]).rows;
        let found: f64 = rows
            .iter()
            .filter(|row| row.function.starts_with("site_"))
            .map(|row| row.bytes)
            .sum();
        assert!(
            found > wanted * 0.75 && found < wanted * 1.6,
            "{}: {found} B instead of {wanted}",
            python.name
        );
        pyheap::run(["info", &base]).expect_code(0);

        // The next recording on the same pid works, and leaves nothing behind, of the dead one neither.
        let again = dir.path().join("again").to_str().expect("UTF-8").to_owned();
        let recording = pyheap::record(target.pid, &again, &[]);
        target.ask("FREE", "TRUTH");
        let truth = target.ask("GO", "TRUTH");
        recording.interrupt();
        assert!(truth["sites"]["site_1k"]["bytes"].as_f64() > Some(0.0));
        assert!(top(&again, &[]).total_bytes > 0.0, "{}", python.name);
        let info = pyheap::run(["info", &pid]).expect_code(0).stdout;
        let after = Picture::of(target.pid);
        // Python itself has mapped libraries and more heap since: what has no file and can be executed would be ours.
        let ours = |line: &String| line.starts_with("maps +") && line.contains("xp ") && !line.contains('/');
        let left: Vec<_> = before.differences(&after, &info).into_iter().filter(ours).collect();
        assert!(left.is_empty(), "{}: {left:?}", python.name);
        target.exit_cleanly();
    }
}

#[test]
fn cure_after_sigkill() {
    for python in representative() {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(&python, "accuracy.py", &["0.01"]);
        let pid = target.pid.to_string();
        let before = Picture::of(target.pid);
        let recording = pyheap::record(target.pid, &base, &[]);
        recording.signal(Signal::SIGKILL);
        recording.finish(DEADLINE);
        pyheap::run(["cure", &pid]).expect_code(0);
        let info = pyheap::run(["info", &pid]).expect_code(0).stdout;
        assert_eq!(
            before.differences(&Picture::of(target.pid), &info),
            Vec::<String>::new(),
            "{}",
            python.name
        );
        // A second cure finds nothing to do.
        pyheap::run(["cure", &pid]).expect_code(0);
        target.ask("GO", "TRUTH");
        target.exit_cleanly();
    }
}

/// While a recording runs nobody is traced, so other tools work on the target at the same time.
#[test]
fn strace_works_while_recording() {
    const TEST: &str = "strace_works_while_recording";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    if !have("strace") {
        skip!(TEST, "no strace");
    }
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "accuracy.py", &["0.1"]);
    let recording = pyheap::record(target.pid, &base, &[]);
    let mut strace = Command::new("strace");
    strace.args(["-f", "-p", &target.pid.to_string(), "-o", "/dev/null"]);
    let mut strace = strace.stderr(std::process::Stdio::null()).spawn().expect("strace runs");
    until("strace traces", DEADLINE, || {
        (common::picture::tracer(target.pid) != 0).then_some(())
    });
    target.ask("GO", "TRUTH");
    let by = nix::unistd::Pid::from_raw(common::picture::tracer(target.pid));
    nix::sys::signal::kill(by, Signal::SIGTERM).expect("our own child");
    strace.wait().expect("our own child");
    recording.interrupt();
    assert!(top(&base, &[]).total_bytes > 0.0);
    target.exit_cleanly();
}
