//! Promise: what has once harmed a target, or made a number wrong, does not do it again. Each test is an attack that succeeded.

mod common;

use common::interpreters::{self, Interpreter};
use common::report::top;
use common::target::Target;
use common::{DEADLINE, pyheap, scratch, skipped, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::time::Duration;

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

/// pyheap is stopped while the target allocates heavily, so that the ring overflows: afterwards there is no leak that is none.
#[test]
fn a_pause_of_pyheap_makes_no_leak() {
    for python in interpreters::some(&["3.8", "3.12"]) {
        let dir = scratch();
        let base = path(&dir, "run");
        let mut target = Target::start(&python, "hard.py", &["churn"]);
        // A short period makes many events.
        let recording = pyheap::record(target.pid, &base, &["--period", "1KiB"]);
        target.ask("GO", "GOING");
        for _ in 0..3 {
            recording.signal(Signal::SIGSTOP);
            std::thread::sleep(Duration::from_millis(700));
            recording.signal(Signal::SIGCONT);
            std::thread::sleep(Duration::from_millis(200));
        }
        target.ask("FREE", "FREED");
        recording.interrupt();
        let info = pyheap::run(["info", &base]).expect_code(0);
        assert!(
            info.stdout.contains("events_lost_ring_full"),
            "it did not overflow: {}",
            info.stdout
        );
        let rows = top(&base, &["--by", "function"]).rows;
        let left: f64 = rows
            .iter()
            .filter(|row| row.file.ends_with("hard.py") && row.function.contains("run"))
            .map(|row| row.bytes)
            .sum();
        assert!(left == 0.0, "{}: {left} B are alive, and all were freed", python.name);
        target.exit_cleanly();
    }
}
