//! Promise: what has once harmed a target, or made a number wrong, does not do it again. Each test is an attack that succeeded.

use crate::common::cgroup::Cgroup;
use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::Picture;
use crate::common::report::top;
use crate::common::target::Target;
use crate::common::{DEADLINE, each_of, golden, pyheap, scratch, skip, skipped, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Up to 3.11 and from 3.12 on hooks and names work in different ways.
fn representative() -> Vec<Interpreter> {
    interpreters::some(&["3.8", "3.11", "3.12", "3.13"])
}

fn path(dir: &tempfile::TempDir, name: &str) -> String {
    dir.path().join(name).to_str().expect("UTF-8").to_owned()
}

/// The state of a process as /proc tells it.
fn state(pid: i32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next())
        .unwrap_or('X')
}

/// A target that is stopped when the hooks should go out: they stay, which is said, and go when it can be entered again.
#[test]
fn a_target_that_is_stopped_while_we_leave() {
    for python in representative() {
        let dir = scratch();
        let mut target = Target::start(&python, "hard.py", &["busy"]);
        let pid = target.pid.to_string();
        for remedy in ["cure", "record"] {
            let recording = pyheap::record(target.pid, &path(&dir, "run"), &[]);
            kill(Pid::from_raw(target.pid), Signal::SIGSTOP).expect("our own child");
            until("the stop", DEADLINE, || (state(target.pid) == 'T').then_some(()));
            recording.signal(Signal::SIGINT);
            recording.finish(DEADLINE).expect_code(1).expect_stderr("kill -CONT");
            kill(Pid::from_raw(target.pid), Signal::SIGCONT).expect("our own child");
            let again = path(&dir, "again");
            match remedy {
                "cure" => pyheap::run(["cure", &pid]).expect_code(0),
                _ => pyheap::run(["record", &pid, "--duration", "100ms", "-o", &again]).expect_code(0),
            };
            let info = pyheap::run(["info", &pid]).expect_code(0);
            info.expect_stdout("nothing of pyheap is in it");
            let status = target.ask("STATUS", "STATUS");
            assert_eq!(status["wrong"], 0, "{}: {status}", python.name);
        }
        target.exit_cleanly();
    }
}

/// Several pyheaps at the same target at the same moment: one works, the others are refused, the target does not notice.
#[test]
fn several_pyheaps_at_once() {
    const ROUNDS: usize = 5;
    for python in representative() {
        let dir = scratch();
        let mut target = Target::start(&python, "hard.py", &["busy"]);
        let pid = target.pid.to_string();
        for round in 0..ROUNDS {
            let start = |n: usize| {
                let base = path(&dir, &format!("run{n}"));
                pyheap::start(["record", &pid, "--duration", "50ms", "-o", &base])
            };
            let running: Vec<_> = (0..3).map(start).collect();
            for one in running {
                let end = one.finish(DEADLINE);
                assert!([0, 6].contains(&end.code()), "{}, round {round}: {end:?}", python.name);
            }
            let status = target.ask("STATUS", "STATUS");
            assert_eq!(status["wrong"], 0, "{}, round {round}: {status}", python.name);
        }
        let info = pyheap::run(["info", &pid]).expect_code(0);
        info.expect_stdout("nothing of pyheap is in it");
        target.exit_cleanly();
    }
}

/// A process whose main thread has ended before the rest is recorded, lives on, and is left as every other one.
#[test]
fn a_main_thread_that_ends_before_the_rest() {
    let Some(python) = interpreters::any() else {
        return skipped("a_main_thread_that_ends_before_the_rest", "no CPython found");
    };
    let dir = scratch();
    let mut target = Target::start(&python, "hard.py", &["zombie"]);
    until("the end of the main thread", DEADLINE, || {
        (state(target.pid) == 'Z').then_some(())
    });
    let pid = target.pid.to_string();
    pyheap::run(["record", &pid, "--duration", "200ms", "-o", &path(&dir, "run")]).expect_code(0);
    pyheap::run(["info", &pid]).expect_stdout("nothing of pyheap is in it");
    let before = target.ask("STATUS", "STATUS");
    until("progress", DEADLINE, || {
        let now = target.ask("STATUS", "STATUS");
        (now["rounds"].as_u64() > before["rounds"].as_u64()).then_some(())
    });
}

/// Real-time signals that arrive while threads are stopped and hijacked: none is lost.
#[test]
fn real_time_signals_are_not_lost() {
    const EACH: u64 = 300;
    let list = interpreters::some(&["3.11", "3.12"]);
    for python in list {
        let dir = scratch();
        let mut target = Target::start(&python, "hard.py", &["signals"]);
        let mut sent = 0;
        for _ in 0..4 {
            let base = path(&dir, "run");
            let pid = target.pid.to_string();
            let recording = pyheap::start(["record", &pid, "--duration", "50ms", "-o", &base]);
            for _ in 0..EACH {
                // SAFETY: sends a signal to our own child.
                #[expect(unsafe_code, reason = "nix has no real-time signals")]
                let queued = unsafe { libc::kill(target.pid, libc::SIGRTMIN()) } == 0;
                sent += u64::from(queued);
                std::thread::sleep(Duration::from_micros(300));
            }
            recording.finish(DEADLINE).expect_code(0);
        }
        until("all signals", DEADLINE, || {
            (target.ask("STATUS", "STATUS")["count"].as_u64() == Some(sent)).then_some(())
        });
        target.exit_cleanly();
    }
}

/// Code objects that agree in everything but the content of their file name, at addresses that are used again.
#[test]
fn code_objects_that_differ_by_file_name_only() {
    for python in representative() {
        let dir = scratch();
        let base = path(&dir, "run");
        let mut target = Target::start(&python, "hard.py", &["replace", "400"]);
        let recording = pyheap::record(target.pid, &base, &["--period", "4KiB"]);
        let truth = target.ask("GO", "DONE");
        recording.interrupt();
        let sizes = truth["sizes"].as_object().expect("sizes");
        let rows = top(&base, &["--by", "file"]).rows;
        for row in rows.iter().filter(|row| row.file.starts_with("/generated/")) {
            let size = sizes
                .get(&row.file)
                .and_then(Value::as_f64)
                .expect("a file of the target's");
            // Each is sampled with probability 1 - e^-50.
            assert!(
                (row.bytes - size).abs() < 0.005 * size,
                "{}: {row:?}, truth {size}",
                python.name
            );
        }
        let found = rows.iter().filter(|row| row.file.starts_with("/generated/")).count();
        assert_eq!(found, sizes.len(), "{}", python.name);
        target.exit_cleanly();
    }
}

/// pyheap is stopped (Ctrl-Z, a freezer) while the target allocates much more than the ring holds: afterwards there is no leak
/// that is none, and the gap is shown, at the end and by `info`.
#[test]
fn a_pause_of_pyheap_makes_no_leak_and_is_shown() {
    /// Of the ring, in bytes; each of its records is longer than 16.
    const RING: f64 = 1024.0 * 1024.0;
    /// A pause from which on it is told how long it was.
    const LONG: Duration = Duration::from_secs(6);
    each_of(2, &interpreters::some(&["3.8", "3.12"]), |python| {
        let dir = scratch();
        let base = path(&dir, "run");
        let mut target = Target::start(python, "hard.py", &["churn"]);
        // A short period makes many events.
        let recording = pyheap::record(target.pid, &base, &["--period", "1KiB"]);
        target.ask("GO", "GOING");
        let begun = Instant::now();
        recording.signal(Signal::SIGSTOP);
        until("the stop", DEADLINE, || (state(recording.pid()) == 'T').then_some(()));
        // Nobody reads the ring meanwhile.
        let bytes = target.ask("VOLUME", "VOLUME")["bytes"].as_f64().expect("a number");
        assert!(bytes / 1024.0 > 2.0 * RING / 16.0, "{bytes} B make too few records");
        std::thread::sleep(LONG.saturating_sub(begun.elapsed()));
        recording.signal(Signal::SIGCONT);
        target.ask("VOLUME", "VOLUME");
        target.ask("FREE", "FREED");
        let end = recording.interrupt();
        for what in ["events_lost_ring_full", "milliseconds_pyheap_stood_still"] {
            assert!(end.stderr.contains(what), "{}: no {what}: {}", python.name, end.stderr);
        }
        let info = pyheap::run(["info", &base]).expect_code(0);
        let info = info.expect_stdout("events_lost_ring_full");
        info.expect_stdout("milliseconds_pyheap_stood_still");
        let rows = top(&base, &["--by", "function"]).rows;
        let left: f64 = rows
            .iter()
            .filter(|row| row.file.ends_with("hard.py") && row.function.contains("run"))
            .map(|row| row.bytes)
            .sum();
        assert!(left == 0.0, "{}: {left} B are alive, and all were freed", python.name);
        target.exit_cleanly();
    });
}

/// Writes to the memory of our own child.
fn poke(pid: i32, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    let memory = std::fs::File::options().write(true).open(format!("/proc/{pid}/mem"));
    memory
        .and_then(|memory| memory.write_all_at(bytes, at))
        .expect("our own child's memory");
}

/// Hooks that a killed pyheap of another version has left are replaced, if that version follows the rules, and refused untouched
/// if not.
#[test]
fn hooks_of_another_version() {
    /// Where a region says which protocol it speaks.
    const PROTOCOL: u64 = 16;
    each_of(2, &interpreters::some(&["3.8", "3.12"]), |python| {
        let dir = scratch();
        let mut target = Target::start(python, "hard.py", &["busy"]);
        let pid = target.pid.to_string();
        let clean = Picture::of(target.pid);
        for (protocol, remedy) in [(1_u32, "none"), (1000, "cure"), (1000, "record")] {
            let recording = pyheap::record(target.pid, &path(&dir, "run"), &[]);
            recording.signal(Signal::SIGKILL);
            recording.finish(DEADLINE);
            let info = pyheap::run(["info", &pid, "--json"]).expect_code(0).stdout;
            let info: Value = serde_json::from_str(&info).expect("JSON");
            let base = info["regions"][0]["base"].as_u64().expect("a region");
            let mut own = [0; 4];
            {
                use std::os::unix::fs::FileExt as _;
                let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("our own child");
                memory.read_exact_at(&mut own, base + PROTOCOL).expect("our own child");
            }
            poke(target.pid, base + PROTOCOL, &protocol.to_le_bytes());
            let again = path(&dir, "again");
            let record = || pyheap::run(["record", &pid, "--duration", "100ms", "-o", &again]);
            match remedy {
                "none" => {
                    let before = Picture::of(target.pid);
                    golden::check("hooks_of_an_old_version", 6, record(), &[(&pid, "PID")]);
                    let now = Picture::of(target.pid);
                    assert_eq!((before.fds, before.status), (now.fds, now.status));
                    assert_eq!(before.private_code, now.private_code);
                    let cure = pyheap::run(["cure", &pid]).expect_code(1);
                    cure.expect_stderr("another version");
                    poke(target.pid, base + PROTOCOL, &own);
                    pyheap::run(["cure", &pid]).expect_code(0);
                }
                "cure" => drop(pyheap::run(["cure", &pid]).expect_code(0)),
                _ => drop(record().expect_code(0)),
            }
            let info = pyheap::run(["info", &pid]).expect_code(0);
            let info = info.expect_stdout("nothing of pyheap is in it").stdout;
            let now = Picture::of(target.pid);
            assert_eq!(clean.fds, now.fds, "{}, {protocol}", python.name);
            assert_eq!(clean.status, now.status, "{}, {protocol}: {info}", python.name);
            let status = target.ask("STATUS", "STATUS");
            assert_eq!(status["wrong"], 0, "{}, {protocol}: {status}", python.name);
        }
        target.exit_cleanly();
    });
}

/// In a container that has used up its processes pyheap records if it can, or says what to raise; nothing stays in the target.
#[test]
fn few_processes_are_allowed() {
    const TEST: &str = "attacks: few_processes_are_allowed";
    const ENOUGH: u32 = 8;
    if Cgroup::of_processes(1).is_none() {
        skip!(TEST, "no cgroup that limits processes can be made");
    }
    each_of(2, &interpreters::some(&["3.8", "3.12"]), |python| {
        let dir = scratch();
        let target = Target::start(python, "hard.py", &["busy"]);
        let pid = target.pid.to_string();
        let before = Picture::of(target.pid);
        for most in 1..=ENOUGH {
            let group = Cgroup::of_processes(most).expect("as above");
            let record = format!(
                "echo $$ >'{}/cgroup.procs' && exec '{}' record {pid} --duration 100ms -o '{}'",
                group.path(),
                pyheap::binary(),
                path(&dir, "run")
            );
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", &record]);
            let done = pyheap::start_command(shell).finish(DEADLINE);
            match done.code() {
                0 => assert!(most > 1, "{}, {most}: {}", python.name, done.stderr),
                _ => {
                    assert!(most < ENOUGH, "{}, {most}: {}", python.name, done.stderr);
                    drop(done.expect_stderr("pids.max"));
                }
            }
            let differences = before.differences(&Picture::of(target.pid), "");
            assert!(differences.is_empty(), "{}, {most}: {differences:?}", python.name);
        }
        target.exit_cleanly();
    });
}
