//! Promise: a frozen copy is of one moment, the process does not notice it, and nothing of it stays, whatever becomes of
//! pyheap.

use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::Picture;
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, is_root, pyheap, skip, until};
use ::pyheap::attach::frozen::{Ended, FreezeError, Frozen, Limits};
use ::pyheap::attach::preflight;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pyheap_injector::copy::{self, Found};
use pyheap_injector::{RemoteAddr, RemoteMemory};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

const LONG: Limits = Limits {
    // As long as a busy machine may take.
    max_pause: Duration::from_secs(10),
    max_freeze: Duration::from_secs(120),
};

fn representative() -> Vec<Interpreter> {
    interpreters::some(&["pyenv-3.8", "deb-3.11", "3.13", "3.14t"])
}

fn freeze(pid: i32, limits: Limits) -> Result<Frozen, FreezeError> {
    let target = preflight::check_for_copy(pid)?;
    // A thread may be in a call that must not be interrupted at this moment, or get no processor.
    Frozen::of(&target, limits)
}

fn frozen(pid: i32) -> Frozen {
    until("a frozen copy", DEADLINE, || match freeze(pid, LONG) {
        Ok(copy) => Some(copy),
        Err(FreezeError::Copy { source, .. }) => {
            println!("once more: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    })
}

fn nothing_wrong(answer: &Value) {
    assert_eq!(answer["wrong"], json!([]), "{answer}");
}

/// What of a picture does not change by what the target does itself: its timer's signal may be pending at any moment.
fn lasting(picture: &Picture) -> Vec<String> {
    let status = picture.status.iter().filter(|(key, _)| !key.ends_with("Pnd"));
    let status = status.map(|(key, value)| format!("{key} {value}"));
    status.chain(picture.fds.keys().cloned()).collect()
}

fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[test]
fn the_process_does_not_notice() {
    let list = representative();
    if list.is_empty() {
        skip!("the_process_does_not_notice", "no CPython found");
    }
    common::each_of(2, &list, |python| {
        let mut target = Target::start(python, "freezing.py", &[]);
        let at = RemoteAddr(target.facts["buffer"].as_u64().expect("an address"));
        let status = target.ask("STATUS", "STATUS");
        let picture = Picture::of(target.pid);
        let copy = frozen(target.pid);
        assert_eq!(copy::find(target.pid).len(), 1, "{}", target.name);
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", copy.pid())).map(Iterator::count);
        assert_eq!(descriptors.ok(), Some(0), "the copy has descriptors of its own");
        // The copy stays as it was; the process goes on, and is alone.
        target.ask("WRITE", "WRITTEN");
        nothing_wrong(&target.ask("CLOSE", "CLOSED"));
        nothing_wrong(&target.ask("WAITS", "WAITS"));
        assert_eq!(copy.memory().read_array::<64>(at).expect("it can be read"), [1; 64]);
        assert_eq!(copy.ended(), None);
        assert!(copy.paused() < LONG.max_pause, "{:?}", copy.paused());
        let number = copy.pid();
        let cost = copy.finish().expect("nothing is left");
        assert!(cost.copied_bytes.is_none_or(|bytes| bytes >= 4096), "{cost:?}");
        assert!(
            copy::find(target.pid).is_empty() && state(number).is_none(),
            "a zombie is left"
        );
        nothing_wrong(&target.ask("WAITS", "WAITS"));
        nothing_wrong(&target.ask("LOCKED", "LOCKED"));
        let after = target.ask("STATUS", "STATUS");
        // Several SIGCHLDs may come as one.
        assert!(after["signals"].as_u64() <= after["forks"].as_u64(), "{after}");
        assert!(after["timer"].as_u64() > status["timer"].as_u64(), "{after}");
        assert_eq!(lasting(&Picture::of(target.pid)), lasting(&picture), "{}", target.name);
        target.exit_cleanly();
    });
}

/// No SIGCHLD comes when a copy ends and is reaped, in a process that makes no children itself.
#[test]
fn its_end_is_no_signal() {
    let Some(python) = interpreters::any() else {
        skip!("its_end_is_no_signal", "no CPython found")
    };
    let mut target = Target::start(&python, "freezing.py", &[]);
    for _ in 0..5 {
        frozen(target.pid).finish().expect("nothing is left");
    }
    // Killed by somebody else, it is noticed and reaped all the same.
    let copy = frozen(target.pid);
    kill(Pid::from_raw(copy.pid()), Signal::SIGKILL).expect("our own");
    until("the death of the copy", DEADLINE, || copy.ended());
    assert_eq!(copy.ended(), Some(Ended::Killed));
    copy.finish().expect("nothing is left");
    let status = target.ask("STATUS", "STATUS");
    assert_eq!(
        (&status["signals"], &status["forks"]),
        (&json!(0), &json!(0)),
        "{status}"
    );
    target.exit_cleanly();
}

/// Starts `pyheap rss --frozen` and kills it while the copy lives; the copy. `None` if it was too late.
fn abandoned(pid: i32, life: &str) -> Option<Found> {
    let (pid, number) = (pid.to_string(), pid);
    let mut reader = pyheap::start(["rss", &pid, "--frozen", "--max-pause", "10s", "--max-freeze", life]);
    let found = until("a copy, or an end", DEADLINE, || {
        let found = copy::find(number).into_iter().find(|copy| !copy.is_dead);
        (found.is_some() || !reader.is_running()).then_some(found)
    });
    if reader.is_running() {
        reader.signal(Signal::SIGKILL);
    }
    reader.finish(DEADLINE);
    found.filter(|copy| state(copy.pid).is_some_and(|state| state != 'Z'))
}

#[test]
fn a_copy_ends_when_pyheap_is_killed() {
    const TEST: &str = "a_copy_ends_when_pyheap_is_killed";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    // So large that reading it takes a while.
    let mut target = Target::start(&python, "freezing.py", &["150000"]);
    let pid = target.pid.to_string();
    let copy = until("a pyheap that is killed in time", DEADLINE, || {
        abandoned(target.pid, "1s")
    });
    nothing_wrong(&target.ask("WAITS", "WAITS"));
    // Nobody is there to end it.
    until("the copy's own end", DEADLINE, || {
        (state(copy.pid) == Some('Z')).then_some(())
    });
    nothing_wrong(&target.ask("WAITS", "WAITS"));
    let info = pyheap::run(["info", &pid]).expect_code(0);
    assert!(
        info.stdout.contains(&format!(
            "frozen copy of it (pid {}): left by a pyheap that is gone, has ended",
            copy.pid
        )),
        "{}",
        info.stdout
    );
    let info = pyheap::run(["info", &pid, "--json"]).expect_code(0);
    let info: Value = serde_json::from_str(&info.stdout).expect("JSON");
    assert_eq!(
        info["copies"],
        json!([{"pid": copy.pid, "ended": true, "in_use": false}])
    );
    let cured = || pyheap::run(["cure", &pid]).status.success().then_some(());
    until("a cure", DEADLINE, cured);
    assert!(state(copy.pid).is_none(), "the zombie is still there");
    pyheap::run(["info", &pid])
        .expect_code(0)
        .expect_stdout("nothing of pyheap is in it");
    // One that still lives is ended by the next pyheap that comes.
    let copy = until("a pyheap that is killed in time", DEADLINE, || {
        abandoned(target.pid, "10m")
    });
    let next = || {
        pyheap::run(["rss", &pid, "--frozen", "--max-pause", "10s"])
            .status
            .success()
            .then_some(())
    };
    until("the next pyheap", DEADLINE, next);
    assert!(state(copy.pid).is_none(), "the copy is still there");
    let status = target.ask("STATUS", "STATUS");
    assert!(status["signals"].as_u64() <= status["forks"].as_u64(), "{status}");
    target.exit_cleanly();
}

#[test]
fn a_copy_ends_with_its_time_or_with_the_process() {
    let Some(python) = interpreters::any() else {
        skip!("a_copy_ends_with_its_time_or_with_the_process", "no CPython found")
    };
    let target = Target::start(&python, "freezing.py", &[]);
    let short = Limits {
        max_freeze: Duration::from_millis(100),
        ..LONG
    };
    let copy = until("a frozen copy", DEADLINE, || freeze(target.pid, short).ok());
    let why = until("its end", DEADLINE, || copy.ended());
    assert!(matches!(why, Ended::Deadline | Ended::Killed), "{why}");
    copy.finish().expect("nothing is left");
    let copy = frozen(target.pid);
    let number = copy.pid();
    drop(target);
    until("the copy's end with the process", DEADLINE, || {
        state(number).is_none_or(|state| state == 'Z').then_some(())
    });
    drop(copy);
}

#[test]
fn what_would_do_harm_is_refused() {
    const TEST: &str = "what_would_do_harm_is_refused";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let mut target = Target::start(&python, "freezing.py", &[]);
    let pid = target.pid.to_string();
    refusal(
        "freeze_pause",
        pyheap::run(["rss", &pid, "--frozen", "--max-pause", "0.1ms"]),
        &pid,
    );
    kill(Pid::from_raw(target.pid), Signal::SIGSTOP).expect("our own child");
    until("the stop", DEADLINE, || (state(target.pid) == Some('T')).then_some(()));
    refusal("freeze_stopped", pyheap::run(["rss", &pid, "--frozen"]), &pid);
    // Reading is no harm.
    pyheap::run(["rss", &pid]).expect_code(0);
    kill(Pid::from_raw(target.pid), Signal::SIGCONT).expect("our own child");
    nothing_wrong(&target.ask("WAITS", "WAITS"));
    assert!(copy::find(target.pid).is_empty());
    target.exit_cleanly();
    if !is_root() || !have("unshare") {
        skip!(TEST, "needs root and unshare for a pid namespace");
    }
    // Its first child would be the first process of a namespace, which ends with it.
    let mut command = Command::new("unshare");
    // It cannot make a thread there either.
    command.args([
        "--pid",
        &python.path,
        "-c",
        "import sys; print('r', flush=True); sys.stdin.read()",
    ]);
    let mut child = command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("unshare runs");
    let mut ready = [0; 1];
    std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut ready).expect("it says that it is ready");
    let pid = child.id().to_string();
    let refused = pyheap::run(["rss", &pid, "--frozen"]);
    let _ = child.kill();
    let _ = child.wait();
    refusal("freeze_namespace", refused, &pid);
}

/// As it stands in `tests/golden/refusals.txt`, with numbers as N.
fn refusal(name: &str, mut run: pyheap::Finished, pid: &str) {
    let text = run.stderr.replace(pid, "PID");
    run.stderr = text
        .split_inclusive(|c: char| !c.is_ascii_digit())
        .map(|part| {
            let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
            if rest.len() < part.len() {
                format!("N{rest}")
            } else {
                rest.to_owned()
            }
        })
        .collect();
    common::golden::check(name, 7, run, &[]);
}
