//! `pyheap dump` tells what the process tells of itself, harms nobody, and reads core files.
//!
//! `PYHEAP_DUMP_STACKS=1000` compares that many stacks a build, instead of the few of a quick run.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{DEADLINE, have, pyheap, scratch, skip, skipped, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::HashMap;
use std::process::Command;
use std::time::Duration;

/// Function, file, line; innermost first.
type Stack = Vec<(String, String, u64)>;

fn stacks_to_compare() -> usize {
    let wanted = std::env::var("PYHEAP_DUMP_STACKS").ok();
    wanted.and_then(|text| text.parse().ok()).unwrap_or(40)
}

fn frame(function: &Value, file: &Value, line: &Value) -> (String, String, u64) {
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    (text(function), text(file), line.as_u64().expect("a line"))
}

/// What the target says: name and stack of each thread by its identifier.
fn truth(said: &Value) -> HashMap<u64, (String, Stack)> {
    let threads = said.as_object().expect("threads").iter();
    let thread = |thread: &Value| {
        let frames = thread["frames"].as_array().expect("frames").iter();
        let frames = frames.map(|f| frame(&f[0], &f[1], &f[2])).collect();
        (thread["name"].as_str().expect("a name").to_owned(), frames)
    };
    threads
        .map(|(ident, it)| (ident.parse().expect("a number"), thread(it)))
        .collect()
}

fn dump(args: &[&str]) -> Value {
    let mut all = vec!["dump", "--json"];
    all.extend(args);
    let done = pyheap::run(all).expect_code(0);
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", done.stdout))
}

fn threads(dump: &Value) -> Vec<&Value> {
    let interpreters = dump["interpreters"].as_array().expect("interpreters").iter();
    interpreters
        .flat_map(|i| i["threads"].as_array().expect("threads"))
        .collect()
}

fn stack(thread: &Value) -> Stack {
    let frames = thread["frames"].as_array().expect("frames").iter();
    frames.map(|f| frame(&f["function"], &f["file"], &f["line"])).collect()
}

/// Compares a dump with the truth; the number of threads whose stack was vouched for, and therefore compared.
fn compare(name: &str, dump: &Value, before: &Value, after: &Value) -> usize {
    let (before, after) = (truth(before), truth(after));
    let found: HashMap<u64, &Value> = threads(dump)
        .into_iter()
        .map(|t| (t["ident"].as_u64().expect("ident"), t))
        .collect();
    // The threads of the target, and its main thread.
    assert_eq!(found.len(), before.len() + 1, "{name}: {dump:#}");
    let mut compared = 0;
    for (ident, told) in &before {
        let thread = found[ident];
        assert_eq!(after[ident], *told, "{name}: a thread left its line");
        if thread["may_be_torn"] == true {
            continue;
        }
        assert_eq!(stack(thread), told.1, "{name}: {thread:#}");
        assert_eq!(thread["name"], told.0.as_str(), "{name}");
        assert!(
            thread["tid"].is_i64() && thread["incomplete"].is_null(),
            "{name}: {thread:#}"
        );
        compared += 1;
    }
    compared
}

fn compare_random_lines(interpreter: &Interpreter) {
    const THREADS: usize = 20;
    let name = &interpreter.name;
    let wanted = stacks_to_compare();
    let mut target = Target::start(interpreter, "random_lines.py", &[&THREADS.to_string(), "7"]);
    let pid = target.pid.to_string();
    let (mut compared, mut rounds) = (0, 0);
    while compared < wanted {
        rounds += 1;
        assert!(
            rounds <= 10 + 2 * wanted / THREADS,
            "{name}: {compared} in {rounds} rounds"
        );
        let before = target.ask("MOVE", "TRUTH");
        let dump = dump(&[&pid]);
        let after = target.ask("TELL", "TRUTH");
        assert_eq!(dump["mode"], "stopped");
        if dump["consistent"] == true {
            assert!(threads(&dump).iter().all(|thread| thread["may_be_torn"] == false));
        }
        compared += compare(name, &dump, &before, &after);
    }
    // Without stopping anything: what two readings agree on is as true.
    let before = target.ask("MOVE", "TRUTH");
    let dump = dump(&[&pid, "--nonblocking"]);
    let after = target.ask("TELL", "TRUTH");
    let agreed = compare(name, &dump, &before, &after);
    // Those that wait: all but the two that may spin and the two that may wake up.
    assert!(agreed >= THREADS - 4, "{name}: {agreed}: {dump:#}");
    println!("{name}: {compared} stacks in {rounds} rounds");
    target.exit_cleanly();
}

/// On every build.
#[test]
fn stacks_at_random_lines_are_pythons_own() {
    for interpreter in interpreters::named() {
        compare_random_lines(&interpreter);
    }
}

/// A thread that spins holds the GIL, those that wait do not, and the system call they wait in is named.
#[test]
fn who_holds_the_gil_and_who_waits_is_told() {
    for interpreter in interpreters::named() {
        let name = &interpreter.name;
        let mut target = Target::start(&interpreter, "random_lines.py", &["gil"]);
        let pid = target.pid.to_string();
        let by_name = |dump: &Value| -> HashMap<String, Value> {
            let named = threads(dump).into_iter().cloned();
            named
                .map(|t| (t["name"].as_str().unwrap_or("?").to_owned(), t))
                .collect()
        };
        // At first the main thread may still be on its way into its read.
        until(&format!("{name}: the waiting threads wait"), DEADLINE, || {
            let threads = by_name(&dump(&[&pid]));
            let (spin, wait) = (threads.get("spin")?, threads.get("wait")?);
            let main = threads.get("MainThread")?;
            let reads = |thread: &Value| thread["system_call"] == "read";
            // A build without a GIL has no holder.
            let has_gil = !name.ends_with('t');
            let settled = reads(wait) && reads(main) && (spin["holds_gil"] == true) == has_gil;
            settled.then(|| {
                assert!(
                    spin["system_call"].is_null() && spin["state"] == "running",
                    "{name}: {spin:#}"
                );
                assert!(wait["holds_gil"] != true && main["holds_gil"] != true, "{name}");
                let native = |thread: &Value, what: &str| thread["native"][what].as_str().unwrap_or("").to_owned();
                // What musl and stripped libraries call it is their affair.
                assert!(!native(wait, "library").is_empty(), "{name}: {wait:#}");
                if name.starts_with("pyenv-") {
                    assert!(native(wait, "function").ends_with("read"), "{name}: {wait:#}");
                }
                let text = pyheap::run(["dump", &pid]).expect_code(0).stdout;
                let holds = if has_gil { "holds the GIL, " } else { "" };
                assert!(text.contains(&format!("\"spin\", {holds}running\n    ")), "{text}");
                assert!(text.contains("\"wait\", in read\n"), "{text}");
            })
        });
        target.send("EXIT");
        assert!(target.wait().success());
    }
}

/// Dumping again and again, also by pyheaps that are killed in the middle, changes no result and loses no signal.
#[test]
fn dumps_harm_nobody() {
    const DUMPS: usize = 40;
    let Some(interpreter) = interpreters::any() else {
        skip!("dumps_harm_nobody", "no interpreter");
    };
    let mut target = Target::start(&interpreter, "hard.py", &["busy"]);
    let pid = target.pid.to_string();
    for number in 0..DUMPS {
        let mut running = pyheap::start(["dump", &pid]);
        if number % 2 == 0 {
            // Somewhere on its way.
            std::thread::sleep(Duration::from_millis(number as u64));
            if running.is_running() {
                running.signal(Signal::SIGKILL);
            }
            let _ = running.finish(DEADLINE);
        } else {
            running.finish(DEADLINE).expect_code(0);
        }
    }
    let before = target.ask("STATUS", "STATUS")["rounds"].as_u64().expect("a count");
    until("the threads run on", DEADLINE, || {
        let status = target.ask("STATUS", "STATUS");
        assert_eq!(status["wrong"], 0);
        (status["rounds"].as_u64() > Some(before)).then_some(())
    });
    target.send("EXIT");
    target.wait();

    let mut target = Target::start(&interpreter, "hard.py", &["signals"]);
    let pid = target.pid.to_string();
    let mut sent = 0;
    for _ in 0..10 {
        let mut running = pyheap::start(["dump", &pid]);
        while running.is_running() {
            // SAFETY: sends a signal to our own child.
            #[expect(unsafe_code, reason = "nix has no real-time signals")]
            let queued = unsafe { libc::kill(target.pid, libc::SIGRTMIN()) } == 0;
            sent += u64::from(queued);
            std::thread::sleep(Duration::from_micros(200));
        }
        running.finish(DEADLINE).expect_code(0);
    }
    until("every signal arrives", DEADLINE, || {
        let count = target.ask("STATUS", "STATUS")["count"].as_u64().expect("a count");
        assert!(count <= sent, "{count} of {sent}");
        (count == sent).then_some(())
    });
    target.send("EXIT");
    target.wait();
}

fn state(pid: i32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the target lives");
    let rest = stat.rsplit_once(") ").expect("a name in parentheses").1;
    rest.chars().next().expect("a state")
}

/// A process that was stopped can be dumped, stays stopped, and goes on when it is told to.
#[test]
fn a_stopped_process_is_dumped_and_stays_stopped() {
    let Some(interpreter) = interpreters::any() else {
        skip!("a_stopped_process_is_dumped_and_stays_stopped", "no interpreter");
    };
    let mut target = Target::start(&interpreter, "random_lines.py", &["4", "3"]);
    let before = target.ask("MOVE", "TRUTH");
    kill(Pid::from_raw(target.pid), Signal::SIGSTOP).expect("our own child");
    until("it stops", DEADLINE, || (state(target.pid) == 'T').then_some(()));
    let dump = dump(&[&target.pid.to_string()]);
    assert_eq!(dump["consistent"], true);
    assert_eq!(state(target.pid), 'T');
    kill(Pid::from_raw(target.pid), Signal::SIGCONT).expect("our own child");
    let after = target.ask("TELL", "TRUTH");
    assert_eq!(compare(&interpreter.name, &dump, &before, &after), 4);
    target.exit_cleanly();
}

/// gcore's file has the same stacks, read without the process.
#[test]
fn a_core_file_has_the_same_stacks() {
    if !have("gcore") {
        skip!("a_core_file_has_the_same_stacks", "no gcore (it comes with gdb)");
    }
    for interpreter in interpreters::some(&["pyenv-3.8", "deb-3.11", "many-3.13"]) {
        let name = &interpreter.name;
        let dir = scratch();
        let base = dir.path().join("core");
        let mut target = Target::start(&interpreter, "random_lines.py", &["10", "5"]);
        let pid = target.pid.to_string();
        let before = target.ask("MOVE", "TRUTH");
        let gcore = Command::new("gcore")
            .arg("-o")
            .arg(&base)
            .arg(&pid)
            .output()
            .expect("gcore");
        let core = format!("{}.{pid}", base.display());
        if !gcore.status.success() || !std::path::Path::new(&core).exists() {
            let said = String::from_utf8_lossy(&gcore.stderr).into_owned();
            skipped("a_core_file_has_the_same_stacks", &format!("{name}: gcore: {said}"));
            continue;
        }
        let after = target.ask("TELL", "TRUTH");
        target.exit_cleanly();
        let dump = dump(&["--core", &core]);
        assert_eq!(
            (&dump["mode"], &dump["pid"]),
            (&"core".into(), &pid.parse::<i32>().unwrap().into())
        );
        assert_eq!(compare(name, &dump, &before, &after), 10, "{name}: {dump:#}");
        // The same program at another place.
        let exe = std::fs::canonicalize(&interpreter.path).expect("the interpreter exists");
        let moved = dir.path().join("moved");
        std::fs::copy(exe, &moved).expect("a copy");
        let again = self::dump(&["--core", &core, "--exe", moved.to_str().expect("UTF-8")]);
        assert_eq!(again["interpreters"], dump["interpreters"], "{name}");
    }
}

#[test]
fn what_cannot_be_dumped_is_refused() {
    let dump = |args: &[&str]| pyheap::run(std::iter::once(&"dump").chain(args));
    dump(&["4194304"]).expect_code(3);
    dump(&["--core", "/no/such/file"])
        .expect_code(2)
        .expect_stderr("/no/such/file");
    dump(&["--core", "/proc/self/exe"])
        .expect_code(7)
        .expect_stderr("not a core file");
    dump(&["1", "--core", "x"]).expect_code(2);
    dump(&["--exe", "x"]).expect_code(2);
}

/// Every interpreter of a process is there, with its own threads.
#[test]
fn a_second_interpreter_is_dumped_too() {
    for interpreter in interpreters::some(&["pyenv-3.9", "pyenv-3.12", "pyenv-3.13"]) {
        let name = &interpreter.name;
        let mut target = Target::start(&interpreter, "subinterpreter.py", &[]);
        if target.facts["second"] != true {
            skipped(
                "a_second_interpreter_is_dumped_too",
                &format!("{name}: no module for it"),
            );
            continue;
        }
        let dump = dump(&[&target.pid.to_string()]);
        let all = dump["interpreters"].as_array().expect("interpreters");
        let ids: Vec<_> = all.iter().map(|i| i["id"].as_i64().expect("an id")).collect();
        assert_eq!(ids, [0, 1], "{name}: {dump:#}");
        let functions = |i: usize| -> Vec<String> {
            let threads = all[i]["threads"].as_array().expect("threads").iter();
            threads.flat_map(stack).map(|(function, ..)| function).collect()
        };
        assert!(
            functions(1).ends_with(&["within".to_owned(), "<module>".to_owned()]),
            "{name}: {dump:#}"
        );
        assert!(!functions(0).contains(&"within".to_owned()), "{name}: {dump:#}");
        target.send("EXIT");
        assert!(target.wait().success());
    }
}
