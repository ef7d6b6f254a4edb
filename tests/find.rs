//! Promise: `pyheap ps` finds every Python and says whether it can be attached to, and `pyheap doctor` names whatever stands in the
//! way, by a code of its own and with what helps, and touches nothing.

use crate::common::interpreters;
use crate::common::picture::{Picture, tracer};
use crate::common::pyheap::{Finished, run, start_command};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, is_root, scratch, skip, skipped, until};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// What `ps --json` says of a process.
fn listed(pid: i32, more: &[&str]) -> Option<Value> {
    let args = [&["ps", "--json"], more].concat();
    let told = run(&args).expect_code(0).stdout;
    let told: Value = serde_json::from_str(&told).expect("JSON");
    let rows = told["processes"].as_array().expect("a list").clone();
    rows.into_iter().find(|row| row["pid"] == pid)
}

#[test]
fn processes_are_listed() {
    const TEST: &str = "processes_are_listed";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let row = listed(target.pid, &[]).expect("it is listed");
    let version = row["python"].as_str().unwrap_or_default();
    assert!(version.starts_with(&format!("{}.", python.minor())), "{row}");
    assert_eq!(
        (&row["attachable"], &row["inside_pid"]),
        (&true.into(), &target.pid.into()),
        "{row}"
    );
    assert!(
        row["rss_bytes"].as_u64() > Some(1 << 20) && row["threads"] == 1,
        "{row}"
    );
    assert!(
        row["command"]
            .as_str()
            .is_some_and(|command| command.contains("accuracy.py")),
        "{row}"
    );
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten();
    assert_eq!(row["user"].as_str(), user.map(|user| user.name).as_deref(), "{row}");

    let watched = listed(target.pid, &["--watch", "100ms"]).expect("it is listed");
    assert!(
        watched["growth_bytes"].is_i64() && watched["watched_seconds"].as_f64() >= Some(0.1),
        "{watched}"
    );
    assert!(listed(target.pid, &["--match", "accuracy[.]py 0.01$"]).is_some());
    assert!(listed(target.pid, &["--match", "nothing like it"]).is_none());
    run(["ps", "--match", "("]).expect_code(2);

    let process = nix::unistd::Pid::from_raw(target.pid);
    nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGSTOP).expect("our own child");
    let stat = format!("/proc/{}/stat", target.pid);
    let is_stopped = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "));
    until("the stop", DEADLINE, || is_stopped().then_some(()));
    let row = listed(target.pid, &[]).expect("it is listed");
    assert!(
        row["attachable"] == false && row["why_not"].as_str().is_some_and(|why| why.contains("kill -CONT")),
        "{row}"
    );
    let table = run(["ps"]).expect_code(0);
    table.expect_stdout("kill -CONT");
    nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGCONT).expect("our own child");
    target.exit_cleanly();
}

/// Python in a pid namespace: both of its numbers.
#[test]
fn numbers_inside_and_outside() {
    const TEST: &str = "numbers_inside_and_outside";
    let python = interpreters::any().filter(|_| is_root() && have("unshare"));
    let Some(python) = python else {
        skip!(TEST, "needs CPython, root rights and unshare")
    };
    let unshare = ["--pid", "--net", "--mount", "--fork", "--kill-child", "--mount-proc"];
    let probe = Command::new("unshare").args(unshare).arg("true").status();
    if !probe.is_ok_and(|status| status.success()) {
        skip!(TEST, "namespaces cannot be made here");
    }
    let mut command = Command::new("unshare");
    command.args(unshare).arg(&python.path);
    command.args([&common::target_script("accuracy.py"), "0.01"]);
    let target = Target::start_command(command, TEST);
    let children = format!("/proc/{0}/task/{0}/children", target.pid);
    let Some(pid) = until("the child", DEADLINE, || std::fs::read_to_string(&children).ok())
        .split_whitespace()
        .next()
        .and_then(|pid| pid.parse::<i32>().ok())
    else {
        skip!(TEST, "this kernel does not list children");
    };
    let row = listed(pid, &[]).expect("it is listed");
    assert_eq!(
        (&row["inside_pid"], &row["attachable"]),
        (&1.into(), &true.into()),
        "{row}"
    );
    let told = run(["doctor", &pid.to_string()]).expect_code(0);
    let told = told.expect_stdout("its own pid, mnt, net namespaces");
    told.expect_stdout("its pid in there is 1");
    target.exit_cleanly();
}

/// Sees that `doctor` ended with `code`, and that the check it names has failed, first of all, with a remedy if there is to be one.
#[track_caller]
fn fails(told: Finished, code: i32, check: &str, remedy: &str) {
    let words = format!("{told:?}");
    let told = told.expect_code(code);
    let found: Value = serde_json::from_str(&told.stdout).unwrap_or_else(|error| panic!("{error}: {words}"));
    assert_eq!(found["exit_code"], code, "{words}");
    let first = found["checks"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|one| one["level"] == "fail");
    let first = first.unwrap_or_else(|| panic!("nothing fails: {words}"));
    assert!(first["check"] == check && first["code"] == code, "{first}\n{words}");
    assert!(first["remedy"].to_string().contains(remedy), "{first}");
    assert!(!told.stderr.contains("panicked"), "{words}");
}

fn doctor(pid: i32, more: &[&str]) -> Finished {
    run([&["doctor", &pid.to_string(), "--json"], more].concat())
}

#[test]
fn nothing_stands_in_the_way() {
    const TEST: &str = "nothing_stands_in_the_way";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let before = Picture::of(target.pid);
    let told = run(["doctor", &target.pid.to_string()]).expect_code(0);
    let told = told.expect_stdout(&format!("pyheap record {}", target.pid));
    for check in [
        "user",
        "capabilities",
        "user namespace",
        "yama",
        "dumpable",
        "security module",
        "tracer",
        "no_new_privs",
    ] {
        assert!(
            told.stdout.contains(&format!("ok    {check} ")),
            "{check}: {}",
            told.stdout
        );
    }
    for check in [
        "seccomp",
        "memfd_noexec",
        "interpreter",
        "offsets",
        "symbols",
        "remote debugging",
        "hooks",
        "cost",
    ] {
        assert!(told.stdout.contains(check), "{check}: {}", told.stdout);
    }
    let json: Value = serde_json::from_str(&doctor(target.pid, &[]).expect_code(0).stdout).expect("JSON");
    assert!(json["cost"]["address_space_bytes"].as_u64() > Some(1 << 20), "{json}");
    assert_eq!(before.differences(&Picture::of(target.pid), ""), Vec::<String>::new());
    run(["doctor"]).expect_stdout("Python processes are to be seen");
    target.exit_cleanly();
}

#[test]
fn no_process_to_attach_to() {
    let mut child = Command::new("true").spawn().expect("true runs");
    let pid = i32::try_from(child.id()).expect("pids are below 2^22");
    until("the end", DEADLINE, || {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .ok()?
            .contains(") Z ")
            .then_some(())
    });
    fails(doctor(pid, &[]), 31, "process", "");
    child.wait().expect("our own child");
    fails(doctor(1 << 30, &[]), 30, "process", "");
    let Some(python) = interpreters::any() else {
        skip!("no_process_to_attach_to", "no CPython found")
    };
    let target = Target::start(&python, "hard.py", &["busy"]);
    let threads = std::fs::read_dir(format!("/proc/{}/task", target.pid))
        .expect("our own child")
        .flatten();
    let mut threads = threads.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let thread = threads.find(|tid| *tid != target.pid).expect("it has eight");
    fails(doctor(thread, &[]), 32, "process", "");
    target.exit_cleanly();
}

#[test]
fn no_python() {
    let mut cat = Command::new("sleep")
        .arg("600")
        .stdin(Stdio::null())
        .spawn()
        .expect("sleep runs");
    let pid = i32::try_from(cat.id()).expect("pids are below 2^22");
    until("sleep", DEADLINE, || {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        (exe.ends_with("sleep") || exe.ends_with("coreutils")).then_some(())
    });
    let told = doctor(pid, &[]);
    let _ = cat.kill();
    let _ = cat.wait();
    fails(told, 50, "interpreter", "");
    match interpreters::pypy() {
        Some(pypy) => {
            let target = Target::start(&pypy, "accuracy.py", &["0.01"]);
            fails(doctor(target.pid, &[]), 51, "interpreter", "");
            target.exit_cleanly();
        }
        None => skipped("no_python", "no pypy3"),
    }
}

#[test]
fn somebody_else_is_at_it() {
    const TEST: &str = "somebody_else_is_at_it";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let first = common::pyheap::record(target.pid, &base, &[]);
    let owner = format!("kill -INT {}", first.pid());
    fails(doctor(target.pid, &[]), 61, "hooks", &owner);
    let row = listed(target.pid, &[]).expect("it is listed");
    assert_eq!(row["recorded_by"], first.pid(), "{row}");
    first.interrupt();
    doctor(target.pid, &[]).expect_code(0);
    if have("strace") {
        let pid = target.pid.to_string();
        let mut strace = Command::new("strace");
        strace
            .args(["-f", "-p", &pid, "-o", "/dev/null"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut strace = strace.spawn().expect("strace runs");
        let by = until("strace", DEADLINE, || Some(tracer(target.pid)).filter(|&by| by != 0));
        let told = doctor(target.pid, &[]);
        strace.kill().expect("our own child");
        let _ = strace.wait();
        fails(told, 60, "tracer", &by.to_string());
    } else {
        skipped(TEST, "no strace");
    }
    target.exit_cleanly();
}

#[test]
fn states_that_do_not_bear_it() {
    const TEST: &str = "states_that_do_not_bear_it";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let mut rows = vec![
        ("stopped", 71, "state", "kill -CONT"),
        ("address_space_exhausted", 76, "state", "prlimit"),
    ];
    if is_root() {
        rows.push(("seccomp_errno", 74, "seccomp", "seccomp=unconfined"));
    }
    for (state, code, check, remedy) in rows {
        let mut target = Target::start(&python, "states.py", &[state]);
        if state == "stopped" {
            let stat = format!("/proc/{}/stat", target.pid);
            let is_stopped = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "));
            until("the stop", DEADLINE, || is_stopped().then_some(()));
        } else if target.ask("STATUS", "STATUS")["wrong"] != Value::Array(vec![]) {
            skipped(state, "this kernel does not have it");
            continue;
        }
        if state == "seccomp_errno" {
            // What a filter says is not seen without a stop, and nobody stops it unasked.
            let told = doctor(target.pid, &[]).expect_code(0);
            told.expect_stdout("--read-filters");
            fails(doctor(target.pid, &["--read-filters"]), code, check, remedy);
        } else {
            fails(doctor(target.pid, &[]), code, check, remedy);
        }
        if state == "stopped" {
            let pid = nix::unistd::Pid::from_raw(target.pid);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).expect("our own child");
        }
        assert_eq!(target.ask("STATUS", "STATUS")["wrong"], Value::Array(vec![]), "{state}");
        target.ask("EXIT", "DONE");
        assert!(target.wait().success(), "{state}: {}", target.stderr());
    }
}

/// `setpriv` to a user who owns nothing.
fn nobody(more: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args(more)
        .arg("--");
    command
}

/// Whatever the kernel can have against it, with pyheap as a user without rights.
#[test]
fn permissions() {
    const TEST: &str = "permissions";
    let python = interpreters::some(&["deb-3.11"]).into_iter().next();
    let Some(python) = python.filter(|_| is_root() && have("setpriv") && have("unshare")) else {
        skip!(TEST, "needs root rights, setpriv, unshare and the system's Python")
    };
    let dir = scratch();
    let pyheap = dir.path().join("pyheap");
    common::copy_program(common::pyheap::binary(), &pyheap);
    for file in ["states.py", "protocol.py"] {
        std::fs::copy(common::target_script(file), dir.path().join(file)).expect("room for a copy");
    }
    let start = |mut command: Command, state: &str| {
        command.arg(&python.path).arg(dir.path().join("states.py")).arg(state);
        Target::start_command(command, state)
    };
    let without = ["--inh-caps=-all"];
    let as_nobody = |pid: i32, wrapper: &[&str]| {
        let mut command = nobody(&without);
        command
            .args(wrapper)
            .arg(&pyheap)
            .args(["doctor", &pid.to_string(), "--json"]);
        start_command(command).finish(DEADLINE)
    };
    let end = |mut target: Target| {
        target.ask("EXIT", "DONE");
        assert!(target.wait().success());
    };

    let mut plain = Command::new("env");
    plain.arg("--");
    let target = start(plain, "sleep");
    fails(as_nobody(target.pid, &[]), 40, "user", "sudo pyheap");
    end(target);

    let target = start(nobody(&without), "not_dumpable");
    fails(as_nobody(target.pid, &[]), 42, "dumpable", "setcap");
    end(target);

    let with = [
        "--inh-caps=-all,+net_bind_service",
        "--ambient-caps=-all,+net_bind_service",
    ];
    let target = start(nobody(&with), "sleep");
    fails(as_nobody(target.pid, &[]), 43, "capabilities", "SYS_PTRACE");
    end(target);

    // pyheap in a user namespace of its own has no rights outside of it.
    let target = start(nobody(&without), "sleep");
    as_nobody(target.pid, &[]).expect_code(0);
    let own_root = ["unshare", "--user", "--map-root-user", "--"];
    let mut probe = nobody(&without);
    if probe
        .args(own_root)
        .arg("true")
        .status()
        .is_ok_and(|status| status.success())
    {
        fails(as_nobody(target.pid, &own_root), 44, "user namespace", "SYS_PTRACE");
    } else {
        skipped(TEST, "user namespaces cannot be made here");
    }
    // And under a filter that forbids it to trace.
    let filter = |call: u32| {
        format!(
            "import os, sys, states; states.seccomp(states.for_call({call}, 0x00050001)); os.execv(sys.argv[1], sys.argv[1:])"
        )
    };
    let mut command = Command::new(&python.path);
    command
        .env("PYTHONPATH", dir.path())
        .args(["-c", &filter(101)])
        .arg(&pyheap);
    command.args(["doctor", &target.pid.to_string(), "--json"]);
    fails(
        start_command(command).finish(DEADLINE),
        46,
        "own seccomp",
        "cap-add=SYS_PTRACE",
    );
    // A security module says no to what nothing else forbids: so does this filter (to process_vm_readv).
    let refuse = filter(310);
    let refuse = [python.path.as_str(), "-c", &refuse];
    let path = format!("PYTHONPATH={}", dir.path().display());
    let mut asked = nobody(&without);
    asked.arg("env").arg(&path).args(refuse).arg(&pyheap);
    asked.args(["doctor", &target.pid.to_string(), "--json"]);
    fails(
        start_command(asked).finish(DEADLINE),
        45,
        "security module",
        "apparmor=unconfined",
    );
    // Yama says the same, and what it is set to. Most kernels here have none, so its file is ours.
    let yama = dir.path().join("kernel/yama");
    std::fs::create_dir_all(&yama).expect("room");
    for (scope, as_root) in [("1", false), ("2", false), ("3", true)] {
        std::fs::write(yama.join("ptrace_scope"), scope).expect("room");
        let mut command = Command::new("unshare");
        let place = dir.path().join("kernel");
        let script = format!("mount --bind {} /proc/sys/kernel && exec \"$@\"", place.display());
        command.args(["--mount", "--", "sh", "-c", &script, "sh"]);
        if !as_root {
            command.arg("setpriv").args(nobody(&without).get_args());
        }
        command.arg("env").arg(&path).args(refuse).arg(&pyheap);
        command.args(["doctor", &target.pid.to_string(), "--json"]);
        let told = start_command(command).finish(DEADLINE);
        if told.stderr.contains("mount") {
            skipped(TEST, "nothing can be mounted here");
            break;
        }
        let remedy = if as_root {
            "boot"
        } else {
            "sysctl -w kernel.yama.ptrace_scope=0"
        };
        fails(told, 41, "yama", remedy);
    }
    end(target);

    // Root that may trace, but not open the files of others.
    let target = start(nobody(&without), "sleep");
    let capabilities = "--bounding-set=-all,+sys_ptrace";
    let mut command = Command::new("setpriv");
    command.args([capabilities, "--inh-caps=-all,+sys_ptrace", "--"]);
    command.arg(&pyheap).args(["doctor", &target.pid.to_string(), "--json"]);
    fails(
        start_command(command).finish(DEADLINE),
        40,
        "user",
        "cap-add=DAC_OVERRIDE",
    );
    let mut command = Command::new("setpriv");
    command.args([capabilities, "--inh-caps=-all,+sys_ptrace", "--"]);
    command
        .arg(&pyheap)
        .args(["record", &target.pid.to_string(), "-o", "/tmp/pyheap-never-written"]);
    let refused = start_command(command).finish(DEADLINE).expect_code(4);
    refused.expect_stderr("CAP_DAC_OVERRIDE");
    // Without a number, and without rights for any Python that there is, the reason is the same, and so is the code.
    let mut command = nobody(&["--inh-caps=-all"]);
    command.args(["unshare", "--user", "--map-root-user", "--"]);
    command.arg(&pyheap).args(["record", "-o", "/tmp/pyheap-never-written"]);
    let told = start_command(command).finish(DEADLINE);
    if !told.stderr.contains("unshare") {
        let told = told.expect_code(4);
        told.expect_stderr("no Python process was found that can be attached to");
    }
    end(target);
}

/// What the interpreter itself can have against it.
#[test]
fn interpreters_that_cannot_be_entered() {
    const TEST: &str = "interpreters_that_cannot_be_entered";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    // Structures that are not where any source says: the number of the main interpreter is another one.
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let found = pyheap::attach::interpreter::find(target.pid).expect("a Python");
    let memory = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{}/mem", target.pid))
        .expect("our own child");
    use std::os::unix::fs::FileExt as _;
    let mut main = [0; 8];
    memory
        .read_exact_at(&mut main, found.runtime.0 + found.layout.runtime.interpreters_main)
        .expect("readable");
    let id = u64::from_le_bytes(main) + found.layout.interpreter.id;
    memory.write_all_at(&[0x77; 8], id).expect("writable");
    fails(doctor(target.pid, &[]), 52, "interpreter", "");
    memory.write_all_at(&[0; 8], id).expect("writable");
    doctor(target.pid, &[]).expect_code(0);
    target.exit_cleanly();

    // One that is on its way up, and one on its way down.
    let package = dir.path().join("starting/encodings");
    std::fs::create_dir_all(&package).expect("room");
    let text = "import posix\nposix.write(1, b'READY\\n')\nposix.read(0, 1)\n";
    std::fs::write(package.join("__init__.py"), text).expect("room");
    // From 3.11 on that package is in the interpreter itself.
    match interpreters::some(&["pyenv-3.10", "pyenv-3.9", "pyenv-3.8"])
        .into_iter()
        .next()
    {
        Some(old) => {
            let mut command = Command::new(&old.path);
            command
                .args(["-c", "pass"])
                .env("PYTHONPATH", dir.path().join("starting"));
            let starting = Target::start_command(command, TEST);
            fails(doctor(starting.pid, &[]), 72, "interpreter", "again");
        }
        None => skipped(TEST, "no Python from before 3.11 that lets PYTHONPATH come first"),
    }
    let mut ending = Target::start(&python, "states.py", &["shutting_down"]);
    ending.expect("SHUTDOWN");
    fails(doctor(ending.pid, &[]), 73, "interpreter", "");
    ending.ask("EXIT", "DONE");
    assert!(ending.wait().success());

    // What is called libpython and is none.
    let libm = std::fs::read_to_string("/proc/self/maps").expect("our own");
    let libm = libm
        .split_whitespace()
        .find(|word| word.contains("/libc.so") || word.contains("/libgcc_s"));
    match libm {
        Some(library) => {
            let copy = dir.path().join("libpython3.12.so.1.0");
            let source = Path::new(library).with_file_name("libm.so.6");
            std::fs::copy(&source, &copy).expect("room for a copy");
            let mut sleep = Command::new("sleep")
                .arg("600")
                .env("LD_PRELOAD", &copy)
                .spawn()
                .expect("sleep runs");
            let pid = i32::try_from(sleep.id()).expect("pids are below 2^22");
            until("the library", DEADLINE, || {
                let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
                let exe = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
                (maps.contains("libpython3.12") && !exe.ends_with("pyheap")).then_some(())
            });
            let told = doctor(pid, &[]);
            let _ = sleep.kill();
            let _ = sleep.wait();
            fails(told, 54, "interpreter", "");
        }
        None => skipped(TEST, "no C library to copy from"),
    }

    // One whose symbols lack one that is needed: a copy in which it has another name.
    let python = interpreters::some(&["deb-3.11"]).into_iter().next();
    match python {
        Some(python) => {
            let mut bytes = std::fs::read(&python.path).expect("readable");
            let name = b"\0PyMem_SetAllocator\0";
            let places: Vec<usize> = bytes
                .windows(name.len())
                .enumerate()
                .filter_map(|(at, window)| (window == name).then_some(at))
                .collect();
            assert!(!places.is_empty(), "{} names its functions", python.path);
            places.into_iter().for_each(|at| bytes[at + 1] = b'Q');
            let copy = dir.path().join("python3");
            common::copy_program(&python.path, &copy);
            std::fs::write(&copy, bytes).expect("our own copy");
            let mut command = Command::new(&copy);
            command.env("PYTHONHOME", "/usr");
            command.args([&common::target_script("accuracy.py"), "0.01"]);
            let target = Target::start_command(command, TEST);
            fails(doctor(target.pid, &[]), 53, "symbols", "");
            target.exit_cleanly();
        }
        None => skipped(TEST, "no Python of the system"),
    }
}

/// Hooks of a version with which nothing can be done, a memory cgroup that is nearly full, and a part of the kernel.
#[test]
fn what_else_is_in_the_way() {
    const TEST: &str = "what_else_is_in_the_way";
    /// Where a region says which protocol it speaks.
    const PROTOCOL: u64 = 16;
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    if std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd") {
        fails(doctor(2, &[]), 55, "process", "");
    } else {
        skipped(TEST, "no thread of the kernel is to be seen here");
    }
    let dir = scratch();
    let target = Target::start(&python, "accuracy.py", &["0.01"]);
    let pid = target.pid.to_string();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let recording = common::pyheap::record(target.pid, &base, &[]);
    recording.signal(nix::sys::signal::Signal::SIGKILL);
    recording.finish(DEADLINE);
    let info = run(["info", &pid, "--json"]).expect_code(0).stdout;
    let info: Value = serde_json::from_str(&info).expect("JSON");
    let place = info["regions"][0]["base"].as_u64().expect("a region") + PROTOCOL;
    let memory = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .expect("our own child");
    use std::os::unix::fs::FileExt as _;
    let mut own = [0; 4];
    memory.read_exact_at(&mut own, place).expect("readable");
    memory.write_all_at(&1_u32.to_le_bytes(), place).expect("writable");
    fails(doctor(target.pid, &[]), 62, "hooks", "");
    memory.write_all_at(&own, place).expect("writable");
    run(["cure", &pid]).expect_code(0);
    match common::cgroup::Cgroup::make() {
        Some(group) if group.limit(&pid, 4 << 20) => fails(doctor(target.pid, &[]), 77, "memory", "MemoryMax"),
        _ => skipped(TEST, "no memory cgroup can be limited here"),
    }

    // What this machine has not, as /proc would show it: a shadow stack, and a file that makes no sense.
    if !is_root() || !have("unshare") {
        skip!(TEST, "needs root rights and unshare");
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("our own child");
    let shown = |place: &str, text: &str| {
        let file = dir.path().join("shown");
        std::fs::write(&file, text).expect("room");
        let mut command = Command::new("unshare");
        let script = format!("mount --bind {} {place} && exec \"$@\"", file.display());
        command.args(["--mount", "--", "sh", "-c", &script, "sh"]);
        command.arg(common::pyheap::binary()).args(["doctor", &pid, "--json"]);
        start_command(command).finish(DEADLINE)
    };
    let with = format!("{status}x86_Thread_features:\tshstk wrss\n");
    let told = shown(&format!("/proc/{pid}/task/{pid}/status"), &with);
    if told.stderr.contains("mount") {
        skip!(TEST, "nothing can be mounted here");
    }
    fails(told, 75, "state", "x86_shstk=off");
    fails(
        shown(&format!("/proc/{pid}/status"), "Name:\tpython\n"),
        70,
        "process",
        "",
    );
    target.exit_cleanly();
}

/// The switch of 3.14 and later is honoured, and can be overridden by its name only. The Python is another system's, in a `chroot`
/// with a C library of its own; what it does is found and named from outside.
#[test]
fn remote_debugging_that_is_switched_off() {
    const TEST: &str = "remote_debugging_that_is_switched_off";
    let root = interpreters::other_root().filter(|_| is_root() && have("chroot"));
    let Some(root) = root else {
        skip!(TEST, "needs root rights and another system with a CPython 3.14")
    };
    let inside = tempfile::tempdir_in(&root).expect("room in it");
    for name in ["accuracy.py", "protocol.py"] {
        std::fs::copy(common::target_script(name), inside.path().join(name)).expect("room in it");
    }
    let script = Path::new("/")
        .join(inside.path().file_name().expect("a name"))
        .join("accuracy.py");
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let start = |option: &[&str], variable: Option<&str>| {
        let mut command = Command::new("chroot");
        command
            .arg(&root)
            .arg("/usr/bin/python3.14")
            .arg("-B")
            .args(option)
            .arg(&script)
            .arg("0.01");
        command.envs(variable.map(|value| ("PYTHON_DISABLE_REMOTE_DEBUG", value)));
        Target::start_command(command, TEST)
    };
    let target = start(&[], None);
    let told = doctor(target.pid, &[]).expect_code(0);
    assert!(told.stdout.contains("CPython 3.14"), "{}", told.stdout);
    target.exit_cleanly();
    for target in [start(&["-X", "disable-remote-debug"], None), start(&[], Some("1"))] {
        let pid = target.pid.to_string();
        let before = Picture::of(target.pid);
        fails(
            doctor(target.pid, &[]),
            78,
            "remote debugging",
            "--even-if-remote-debug-disabled",
        );
        let row = listed(target.pid, &[]).expect("it is listed");
        assert_eq!(row["attachable"], false, "{row}");
        let refused = run(["record", &pid, "--duration", "1s", "-o", &base]).expect_code(7);
        refused.expect_stderr("--even-if-remote-debug-disabled");
        assert_eq!(before.differences(&Picture::of(target.pid), ""), Vec::<String>::new());
        assert!(!Path::new(&format!("{base}._hpm")).exists());
        let named = [
            "record",
            &pid,
            "--duration",
            "50ms",
            "-o",
            &base,
            "--even-if-remote-debug-disabled",
        ];
        run(named).expect_code(0);
        std::fs::remove_file(format!("{base}._hpm")).expect("it was recorded");
        target.exit_cleanly();
    }
}

/// Completions and manual pages are made, and name what there is.
#[test]
fn completions_and_manual_pages() {
    let dir = scratch();
    for (shell, check) in [("bash", &["-n"][..]), ("zsh", &["-n"]), ("fish", &["--no-execute"])] {
        let told = run(["completions", shell]).expect_code(0).stdout;
        assert!(told.contains("doctor") && told.contains("when-rss"), "{shell}: {told}");
        if have(shell) {
            let file = dir.path().join(shell);
            std::fs::write(&file, told).expect("our own folder");
            let status = Command::new(shell).args(check).arg(&file).status().expect("it runs");
            assert!(status.success(), "{shell} does not take its completions");
        }
    }
    run(["man"]).expect_code(0).expect_stdout(".SH SUBCOMMANDS");
    run(["man", "record"]).expect_code(0).expect_stdout("when\\-rss");
    run(["man", "nothing"]).expect_code(2);
    run(["man", "--dir", dir.path().to_str().expect("UTF-8")]).expect_code(0);
    assert!(dir.path().join("pyheap-doctor.1").is_file());
    let version = run(["--version"]).expect_code(0);
    version.expect_stdout("protocol");
}
