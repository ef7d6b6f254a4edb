//! Promise: in whatever state a process is, it is recorded and goes on unharmed, or it is refused in one line before it is touched.
//!
//! One row a state; `tests/targets/states.py` says what each is. docs/safety.md lists the same states.

mod common;

use common::interpreters::{self, Interpreter};
use common::picture::{Picture, rss_kib};
use common::pyheap::Finished;
use common::target::Target;
use common::{DEADLINE, golden, have, in_parallel, is_root, pyheap, scratch, skipped, until};
use serde_json::Value;
use std::process::Command;

/// Recorded, in every one of these.
const RECORDED: &[&str] = &[
    "cpu",
    "sleep",
    "wait_in_select",
    "wait_in_poll",
    "wait_in_epoll",
    "wait_for_lock",
    "holds_the_gil",
    "native_malloc",
    "dlopen_loop",
    "five_hundred_threads",
    "threads_come_and_go",
    "timer_signals",
    "finalizers_that_allocate",
    "deep_recursion",
    "small_stacks",
    "wide_registers",
    "no_descriptor_left",
    "closes_all_descriptors",
    "locks_all_memory",
    "subinterpreter",
    "faulthandler_on",
    "tracemalloc_on",
];
/// These need root rights, to set up or to attach.
const RECORDED_AS_ROOT: &[&str] = &["real_time_priority", "not_dumpable", "seccomp_that_matters_not"];
/// Refused with exit code 7, and the line in the golden file.
const REFUSED: &[&str] = &["address_space_exhausted", "syscall_user_dispatch", "stopped"];
/// Whether a filter allows what pyheap needs is only visible to root.
const REFUSED_AS_ROOT: &[&str] = &["seccomp_errno", "seccomp_trap", "seccomp_kill"];

fn record(pid: i32, base: &str, more: &[&str]) -> Finished {
    let pid = pid.to_string();
    let mut args = vec!["record", &pid, "--duration", "60ms", "-o", base];
    args.extend(more);
    pyheap::run(args)
}

/// What must be the same of a process that goes on working: descriptors, signals, privileges.
fn lasting(picture: &Picture) -> (Vec<String>, Vec<(String, String)>) {
    let code = picture
        .maps
        .iter()
        .filter(|line| line.contains("xp ") && !line.contains('/'));
    let main = picture
        .status
        .iter()
        .filter(|(key, _)| !key.ends_with("Threads") && !key.ends_with("Pnd"));
    (
        code.cloned().collect(),
        main.map(|(key, value)| (key.clone(), value.clone())).collect(),
    )
}

/// Recorded; its own checks find nothing, it goes on, and nothing is left.
fn recorded(python: &Interpreter, state: &str) -> Result<(), String> {
    let name = format!("{}, {state}", python.name);
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(python, "states.py", &[state]);
    let churns = ["threads_come_and_go", "small_stacks"].contains(&state);
    let before = (!churns).then(|| lasting(&Picture::of(target.pid)));
    let rss = rss_kib(target.pid);
    let end = record(target.pid, &base, &[]);
    if end.code() != 0 {
        return Err(format!("{name}: exit code {}: {}", end.code(), end.stderr));
    }
    if state == "locks_all_memory" && rss_kib(target.pid) > rss + (16 << 10) {
        return Err(format!(
            "{name}: resident memory {rss} KiB became {}",
            rss_kib(target.pid)
        ));
    }
    let was = target.ask("STATUS", "STATUS");
    let now = until(&format!("{name}: progress"), DEADLINE, || {
        let now = target.ask("STATUS", "STATUS");
        (now["steps"].as_u64() > was["steps"].as_u64()).then_some(now)
    });
    if now["wrong"] != Value::Array(vec![]) {
        return Err(format!("{name}: {}", now["wrong"]));
    }
    let info = pyheap::run(["info", &target.pid.to_string()]).stdout;
    if !info.contains("nothing of pyheap is in it") {
        return Err(format!("{name}: {info}"));
    }
    if let Some(before) = before {
        let after = lasting(&Picture::of(target.pid));
        if after != before {
            return Err(format!("{name}: {before:?} became {after:?}"));
        }
    }
    target.ask("EXIT", "DONE");
    if !target.wait().success() {
        return Err(format!("{name}: a bad end: {}", target.stderr()));
    }
    Ok(())
}

#[test]
fn recorded_and_unharmed() {
    let mut states = RECORDED.to_vec();
    if is_root() {
        states.extend(RECORDED_AS_ROOT);
    } else {
        skipped(
            "recorded_and_unharmed",
            "not root: without real-time, undumpable and filtered targets",
        );
    }
    let pythons = interpreters::some(&["pyenv-3.8", "3.12"]);
    let rows: Vec<(&Interpreter, &str)> = pythons
        .iter()
        .flat_map(|python| states.iter().map(move |state| (python, *state)))
        .collect();
    let problems = in_parallel(4, &rows, |(python, state)| recorded(python, state));
    assert!(problems.is_empty(), "{problems}");
}

#[test]
fn refused_and_untouched() {
    let Some(python) = interpreters::any() else {
        skip!("refused_and_untouched", "no CPython found")
    };
    let mut states = REFUSED.to_vec();
    if is_root() {
        states.extend(REFUSED_AS_ROOT);
    }
    for state in states {
        let dir = scratch();
        let mut target = Target::start(&python, "states.py", &[state]);
        if state == "stopped" {
            let stat = format!("/proc/{}/stat", target.pid);
            let is_stopped = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "));
            until("the stop", DEADLINE, || is_stopped().then_some(()));
        } else {
            let wrong = &target.ask("STATUS", "STATUS")["wrong"];
            if *wrong != Value::Array(vec![]) {
                // A kernel without it.
                skipped(state, &wrong.to_string());
                continue;
            }
        }
        let before = lasting(&Picture::of(target.pid));
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let end = record(target.pid, &base, &[]);
        let pid = target.pid.to_string();
        let mut replace = vec![(pid.clone(), "PID")];
        if state == "address_space_exhausted" {
            // How much is left depends on the interpreter.
            let numbers = end
                .stderr
                .split(|c: char| !c.is_ascii_digit())
                .filter(|number| number.len() > 5);
            replace.extend(
                numbers
                    .filter(|number| *number != pid)
                    .map(|number| (number.to_owned(), "N")),
            );
        }
        let replace: Vec<(&str, &str)> = replace.iter().map(|(what, with)| (what.as_str(), *with)).collect();
        golden::check(state, 7, end, &replace);
        assert_eq!(before, lasting(&Picture::of(target.pid)), "{state}");
        if state == "stopped" {
            let pid = nix::unistd::Pid::from_raw(target.pid);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).expect("our own child");
        }
        let status = target.ask("STATUS", "STATUS");
        assert_eq!(status["wrong"], Value::Array(vec![]), "{state}");
        target.ask("EXIT", "DONE");
        assert!(target.wait().success(), "{state}: {}", target.stderr());
    }
}

/// Its only thread waits in the kernel, uninterruptibly: nothing can be done, which is said in time, and it goes on.
#[test]
fn a_thread_that_does_not_stop() {
    const TEST: &str = "a_thread_that_does_not_stop";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO in our own folder");
    let mut command = Command::new(&python.path);
    command
        .args([&common::target_script("states.py"), "blocked_in_vfork"])
        .env("FIFO", &fifo);
    let mut target = Target::start_command(command, TEST);
    let state = format!("/proc/{}/stat", target.pid);
    until("the wait", DEADLINE, || {
        std::fs::read_to_string(&state)
            .ok()
            .filter(|stat| stat.contains(") D "))
    });
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let end = record(target.pid, &base, &[]);
    let pid = target.pid.to_string();
    golden::check("blocked_in_vfork", 7, end, &[(&pid, "PID")]);
    // Opened for both, so that it never blocks, neither here nor there.
    let open = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&fifo)
        .expect("our FIFO");
    target.ask("STATUS", "STATUS");
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
    drop(open);
}

/// The first process of a container with namespaces of its own, without a /proc of ours, on a read-only file system.
#[test]
fn the_first_process_of_a_container() {
    const TEST: &str = "the_first_process_of_a_container";
    // The loader needs /proc for libraries that are looked for beside the program.
    let Some(python) = interpreters::some(&["pyenv-3.12", "deb-3.11", "pyenv-3.11"])
        .into_iter()
        .next()
    else {
        skip!(TEST, "no CPython with libraries in usual places found")
    };
    let unshare = ["--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child"];
    let can = is_root() && have("unshare");
    if !can
        || !Command::new("unshare")
            .args(unshare)
            .arg("true")
            .status()
            .is_ok_and(|s| s.success())
    {
        skip!(TEST, "namespaces cannot be made here");
    }
    let dir = scratch();
    let mut command = Command::new("unshare");
    let shell = "mount -t tmpfs none /proc && mount -o remount,ro,bind /tmp 2>/dev/null; exec \"$@\"";
    command.args(unshare).args(["sh", "-c", shell, "sh", &python.path]);
    command.args([&common::target_script("states.py"), "cpu"]);
    let mut target = Target::start_command(command, TEST);
    assert_eq!(target.facts["pid"], 1, "it is the first process there");
    let children = format!("/proc/{0}/task/{0}/children", target.pid);
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let Some(pid) = children.split_whitespace().next().and_then(|pid| pid.parse().ok()) else {
        skip!(TEST, "this kernel does not list children");
    };
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    record(pid, &base, &[]).expect_code(0);
    let info = pyheap::run(["info", &pid.to_string()]).expect_code(0);
    info.expect_stdout("nothing of pyheap is in it");
    let status = target.ask("STATUS", "STATUS");
    assert_eq!(status["wrong"], Value::Array(vec![]));
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
}
