//! Promise: in whatever state a process is, it is recorded and goes on unharmed, or it is refused in one line before it is touched.
//!
//! One row a state; `tests/targets/states.py` says what each is. docs/safety.md lists the same states.

use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::{Picture, rss_kib};
use crate::common::pyheap::Finished;
use crate::common::target::Target;
use crate::common::{self, DEADLINE, golden, have, in_parallel, is_root, pyheap, scratch, skip, skipped, until};
use serde_json::Value;
use std::process::Command;
use std::sync::OnceLock;

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
/// These have a part in C, which is built by `cc`.
const WITH_NATIVE_PART: &[&str] = &["live_tiles_and_vectors", "alternate_signal_stack"];
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

/// The target programs' parts in C, built; `None` where there is no `cc`.
fn native_parts() -> Option<&'static std::path::Path> {
    static PARTS: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let build = || {
        let dir = scratch();
        for name in ["handler", "registers"] {
            let mut command = Command::new("cc");
            command.args(["-O2", "-w", "-shared", "-fPIC", "-o"]);
            command.arg(dir.path().join(format!("{name}.so")));
            let done = command.arg(common::target_script(&format!("{name}.c"))).output().ok()?;
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success(), "{name}.c: {said}");
        }
        Some(dir)
    };
    PARTS.get_or_init(build).as_ref().map(tempfile::TempDir::path)
}

/// A process in this state.
fn start(python: &Interpreter, state: &str) -> Target {
    let mut command = Command::new(&python.path);
    command.args([&common::target_script("states.py"), state]);
    if let Some(parts) = native_parts() {
        command.env("NATIVE", parts);
    }
    Target::start_command(command, &format!("{}, {state}", python.name))
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
    let mut target = start(python, state);
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
    if native_parts().is_some() {
        states.extend(WITH_NATIVE_PART);
    } else {
        skipped("recorded_and_unharmed", "no cc: without states that have a part in C");
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
    // Nothing can be written or executed from a file of ours, and no memfd be executable; as far as the host lets us.
    let shell = "echo 2 >/proc/sys/vm/memfd_noexec; mount -o remount,ro,noexec,bind /tmp; mount -o remount,ro,noexec,bind /dev/shm; \
                 mount -o remount,ro,bind /; mount -t tmpfs none /proc && exec \"$@\"";
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

/// A handler in C that allocates while its thread is in our slow path: its allocation is not sampled, which is counted, and
/// nobody's block is harmed.
#[test]
fn a_native_handler_allocates() {
    const TEST: &str = "a_native_handler_allocates";
    /// Each makes 2,000 allocations, of which each is sampled: some ms on a processor, of which there is a signal every 4.
    const STEPS: u64 = 250;
    if native_parts().is_none() {
        skip!(TEST, "no cc");
    }
    let pythons = interpreters::some(&["pyenv-3.8", "pyenv-3.12"]);
    common::each_of(2, &pythons, |python| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = start(python, "native_handler_allocates");
        let recording = pyheap::record(target.pid, &base, &["--period", "1"]);
        let begin = target.ask("STATUS", "STATUS")["steps"].as_u64().expect("a number");
        until(&format!("{}: steps", python.name), DEADLINE, || {
            let steps = target.ask("STATUS", "STATUS")["steps"].as_u64();
            steps.filter(|&steps| steps > begin + STEPS)
        });
        recording.interrupt();
        let info = pyheap::run(["info", &base]).expect_code(0);
        info.expect_stdout("samples_lost_in_signal_handler");
        let info = pyheap::run(["info", &target.pid.to_string()]).expect_code(0);
        info.expect_stdout("nothing of pyheap is in it");
        let status = target.ask("STATUS", "STATUS");
        assert_eq!(status["wrong"], Value::Array(vec![]), "{}", python.name);
        target.ask("EXIT", "DONE");
        assert!(target.wait().success(), "{}: {}", python.name, target.stderr());
    });
}

/// Another user's process, and one that is root in a user namespace of its own: root records both.
#[test]
fn processes_of_others_recorded_by_root() {
    const TEST: &str = "processes_of_others_recorded_by_root";
    // One that others may read and run, too.
    let python = interpreters::some(&["deb-3.11"]).into_iter().next();
    let Some(python) = python.filter(|_| is_root()) else {
        skip!(TEST, "needs root rights and the system's Python")
    };
    let dir = scratch();
    for file in ["states.py", "protocol.py"] {
        std::fs::copy(common::target_script(file), dir.path().join(file)).expect("room for a copy");
    }
    let script = dir.path().join("states.py");
    let other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    let own_root = ["unshare", "--user", "--map-root-user", "--"];
    for wrapper in [&other[..], &own_root] {
        let wrapped = |args: &[&std::ffi::OsStr]| {
            let mut command = Command::new(wrapper[0]);
            command.args(&wrapper[1..]).arg(&python.path).args(args);
            command
        };
        if !have(wrapper[0])
            || !wrapped(&["-c".as_ref(), "".as_ref()])
                .output()
                .is_ok_and(|done| done.status.success())
        {
            skipped(TEST, &format!("{} does not work here", wrapper[0]));
            continue;
        }
        let mut target = Target::start_command(wrapped(&[script.as_os_str(), "cpu".as_ref()]), wrapper[0]);
        let before = lasting(&Picture::of(target.pid));
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        record(target.pid, &base, &[]).expect_code(0);
        let info = pyheap::run(["info", &target.pid.to_string()]).expect_code(0);
        info.expect_stdout("nothing of pyheap is in it");
        assert_eq!(before, lasting(&Picture::of(target.pid)), "{}", wrapper[0]);
        assert_eq!(target.ask("STATUS", "STATUS")["wrong"], Value::Array(vec![]));
        target.ask("EXIT", "DONE");
        assert!(target.wait().success());
    }
}

/// In a container that is under a seccomp filter, which nobody in it can see: what a child of pyheap may do, the target may. A
/// target with a filter of its own is refused, and so is one in a container whose filter does not allow it.
#[test]
fn in_a_container_under_seccomp() {
    const TEST: &str = "in_a_container_under_seccomp";
    let Some(python) = interpreters::some(&["pyenv-3.12", "deb-3.11", "pyenv-3.11"])
        .into_iter()
        .next()
    else {
        skip!(TEST, "no CPython with libraries in usual places found")
    };
    let unshare = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let probe = || Command::new("unshare").args(unshare).arg("true").status();
    if !is_root() || !have("unshare") || !probe().is_ok_and(|status| status.success()) {
        skip!(TEST, "namespaces cannot be made here");
    }
    for (filter, state, golden_name) in [
        ("harmless", "cpu", None),
        ("harmless", "seccomp_that_matters_not", Some("seccomp_unseen")),
        ("no_executable_memory", "cpu", Some("seccomp_of_the_container")),
    ] {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut command = Command::new("unshare");
        command.args(unshare).arg(&python.path);
        command.args([&common::target_script("container.py"), filter, state]);
        let mut target = Target::start_command(command, TEST);
        let run = |target: &mut Target, args: &[&str]| {
            let line = serde_json::to_string(&[&[pyheap::binary().as_str()], args].concat()).expect("plain text");
            target.ask(&format!("RUN {line}"), "RAN")
        };
        let told = run(&mut target, &["record", "PID", "--duration", "60ms", "-o", &base]);
        match golden_name {
            None => assert_eq!(told["code"], 0, "{told}"),
            Some(name) => {
                let child = target.facts["child"].to_string();
                let line = told["stderr"].as_str().unwrap_or_default().to_owned();
                golden::check_line(
                    name,
                    7,
                    told["code"].as_i64(),
                    &line,
                    &[(&format!("process {child}"), "process PID")],
                );
            }
        }
        let info = run(&mut target, &["info", "PID"]);
        let clean = info["stdout"]
            .as_str()
            .is_some_and(|text| text.contains("nothing of pyheap is in it"));
        assert!(clean, "{filter}, {state}: {info}");
        let was = target.ask("STATUS", "STATUS");
        until("progress", DEADLINE, || {
            let now = target.ask("STATUS", "STATUS");
            assert_eq!(now["wrong"], Value::Array(vec![]), "{filter}, {state}");
            (now["steps"].as_u64() > was["steps"].as_u64()).then_some(())
        });
        target.ask("EXIT", "DONE");
        assert!(target.wait().success());
    }
}

/// A memory cgroup that is nearly full: refused before anything is done.
#[test]
fn a_memory_cgroup_that_is_nearly_full() {
    const TEST: &str = "a_memory_cgroup_that_is_nearly_full";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let Some(group) = common::cgroup::Cgroup::make() else {
        skip!(TEST, "no memory cgroup can be made here")
    };
    let mut target = Target::start(&python, "states.py", &["sleep"]);
    let pid = target.pid.to_string();
    // What it has already stays with its old group.
    if !group.limit(&pid, 4 << 20) {
        skip!(TEST, "the cgroup cannot be limited");
    }
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let before = lasting(&Picture::of(target.pid));
    let end = record(target.pid, &base, &[]);
    let number = end
        .stderr
        .split(' ')
        .find(|word| word.parse::<u64>().is_ok_and(|n| n > 100_000));
    let number = number.unwrap_or("no number").to_owned();
    golden::check("memory_cgroup_full", 7, end, &[(&pid, "PID"), (&number, "N")]);
    assert_eq!(before, lasting(&Picture::of(target.pid)));
    assert_eq!(target.ask("STATUS", "STATUS")["wrong"], Value::Array(vec![]));
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
}

/// An interpreter that is shutting down.
#[test]
fn an_interpreter_that_shuts_down() {
    const TEST: &str = "an_interpreter_that_shuts_down";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "states.py", &["shutting_down"]);
    target.expect("SHUTDOWN");
    let before = Picture::of(target.pid);
    let pid = target.pid.to_string();
    golden::check("shutting_down", 7, record(target.pid, &base, &[]), &[(&pid, "PID")]);
    assert_eq!(before.differences(&Picture::of(target.pid), ""), Vec::<String>::new());
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
}
