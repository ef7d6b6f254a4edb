//! Promise: the target is never harmed, and after the detach there is no trace of us.

use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::{Picture, rss_kib, tracer};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, alone, each_of, in_parallel, pyheap, scratch};
use serde_json::Value;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Both ways an interpreter is built, both ways allocators are installed (up to 3.11, from 3.12), both C libraries.
fn representative() -> Vec<Interpreter> {
    interpreters::some(&["pyenv-3.8", "3.10", "deb-3.11", "3.12", "3.13", "musl-3.12"])
}

fn calls(interpreter: &Interpreter) -> Vec<String> {
    let out = std::process::Command::new(&interpreter.path)
        .args([&common::target_script("blocking.py"), "list"])
        .output()
        .expect("the interpreter ran before");
    // musl's own sigtimedwait makes the call again, with its whole timeout, whenever it is interrupted, be it by a tracer or
    // by a SIGCONT: such a thread is not stopped, see `musls_sigtimedwait_is_left_alone`.
    let restarts = |call: &str| interpreter.name.starts_with("musl-") && call == "sigwait_timeout";
    String::from_utf8_lossy(&out.stdout)
        .split_whitespace()
        .filter(|call| !restarts(call))
        .map(str::to_owned)
        .collect()
}

/// When pyheap comes, as fractions of the call's timeout.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hit {
    /// Not at all: the control group, which shows what this machine does to timers today.
    Never,
    /// Attaches and detaches before the call is half over.
    Early,
    /// Attaches at 90 % of the timeout: a relative timeout that starts again would end at 190 %.
    AttachLate,
    /// Attached early, detaches at 90 %.
    DetachLate,
}

const TIMEOUT: f64 = 6.0;
/// How much later than the control group a call may end. A restarted timeout is late by at least 5 % of 6 s = 0.3 s.
const SLACK: f64 = 0.15;
/// For SO_RCVTIMEO, which the kernel's coarse timer wheel serves: a timeout of seconds ends up to an eighth later, untouched.
const COARSE: f64 = 0.8;

/// One process in one call.
struct Row {
    call: String,
    hit: Hit,
    target: Target,
    pyheap: Option<pyheap::Running>,
}

/// All calls with all kinds of hits at once, each in a process of its own: they only wait. The control group is among
/// them, so that all have the same conditions.
fn blocking_calls(interpreter: &Interpreter) -> String {
    let dir = scratch();
    let mut problems = String::new();
    let timeout = TIMEOUT.to_string();
    let mut rows: Vec<Row> = Vec::new();
    for call in calls(interpreter) {
        for hit in [Hit::Never, Hit::Early, Hit::AttachLate, Hit::DetachLate] {
            let target = Target::start(interpreter, "blocking.py", &[&call, &timeout]);
            if target.facts["can"].as_bool() == Some(true) {
                let call = call.clone();
                let pyheap = None;
                rows.push(Row {
                    call,
                    hit,
                    target,
                    pyheap,
                });
            }
        }
    }
    for row in &mut rows {
        row.target.send("GO");
        row.target.expect("BLOCKING");
    }
    let begun = Instant::now();
    for (at, hits) in [
        (0.05, &[Hit::Early, Hit::DetachLate][..]),
        (0.9, &[Hit::AttachLate][..]),
    ] {
        // The one kind of sleep that is meant: the moment of the hit is what is tested.
        std::thread::sleep(Duration::from_secs_f64(TIMEOUT * at).saturating_sub(begun.elapsed()));
        for row in rows.iter_mut().filter(|row| hits.contains(&row.hit)) {
            let duration = if row.hit == Hit::DetachLate { "5100ms" } else { "50ms" };
            let base = dir.path().join(format!("{}-{:?}", row.call, row.hit));
            let (pid, base) = (row.target.pid.to_string(), base.to_str().expect("UTF-8").to_owned());
            row.pyheap = Some(pyheap::start(["record", &pid, "--duration", duration, "-o", &base]));
        }
    }
    let answers: Vec<Value> = rows.iter_mut().map(|row| row.target.expect("RESULT")).collect();
    let elapsed = |answer: &Value| answer["elapsed"].as_f64().expect("a number");
    let is_coarse = |call: &str| call.contains("rcvtimeo");
    let control = rows
        .iter()
        .zip(&answers)
        .filter(|(row, _)| row.hit == Hit::Never && !is_coarse(&row.call));
    let latest = control.map(|(_, answer)| elapsed(answer) - TIMEOUT).fold(0.0, f64::max);
    for (Row { call, hit, .. }, answer) in rows.iter().zip(&answers) {
        if answer["result"] != answer["expected"] {
            let _ = writeln!(
                problems,
                "{hit:?} {call}: {} instead of {}",
                answer["result"], answer["expected"]
            );
        }
        let slack = if is_coarse(call) { COARSE } else { SLACK };
        let took = elapsed(answer);
        // A millisecond early would be early; poll and epoll have a resolution of one.
        if took < TIMEOUT - 0.0011 || took > TIMEOUT + latest + slack {
            let _ = writeln!(
                problems,
                "{hit:?} {call}: took {took:.4} s instead of {TIMEOUT}; latest {latest:.4}"
            );
        }
    }
    for Row {
        call,
        hit,
        target,
        pyheap,
    } in rows
    {
        if let Some(finished) = pyheap.map(|run| run.finish(DEADLINE))
            && finished.code() != 0
        {
            let _ = writeln!(problems, "{hit:?} {call}: {}: {}", finished.status, finished.stderr);
        }
        target.exit_cleanly();
    }
    problems
}

#[test]
fn blocking_calls_end_as_without_us() {
    let _alone = alone();
    let mut problems = String::new();
    for interpreter in interpreters::some(&["pyenv-3.8", "deb-3.11", "3.12", "3.13"]) {
        let wrong = blocking_calls(&interpreter);
        problems.extend(wrong.lines().map(|line| format!("{}: {line}\n", interpreter.name)));
    }
    assert!(problems.is_empty(), "{problems}");
}

/// Its whole timeout would begin anew: where there is no other thread, the process is refused, and that thread has not even
/// woken up.
#[test]
fn musls_sigtimedwait_is_left_alone() {
    let Some(interpreter) = interpreters::some(&["musl-3.12"]).into_iter().next() else {
        common::skipped("musls_sigtimedwait_is_left_alone", "no musl-3.12");
        return;
    };
    // Until it is killed.
    let mut target = Target::start(&interpreter, "blocking.py", &["sigwait_timeout", "3600"]);
    target.send("GO");
    target.expect("BLOCKING");
    let picture = || {
        let proc = format!("/proc/{}", target.pid);
        let call = std::fs::read_to_string(format!("{proc}/syscall")).unwrap_or_default();
        let status = std::fs::read_to_string(format!("{proc}/status")).unwrap_or_default();
        // rt_sigtimedwait
        let waits = call.starts_with("128 ");
        let woken = status.lines().filter(|line| line.contains("ctxt_switches"));
        waits.then(|| woken.map(str::to_owned).collect::<Vec<_>>())
    };
    let before = common::until("it waits", DEADLINE, picture);
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let out = pyheap::run(["record", &target.pid.to_string(), "-o", &base, "--duration", "1s"]);
    out.expect_code(7).expect_stderr("a timeout would begin anew");
    assert_eq!(picture(), Some(before));
}

#[test]
fn a_server_under_load_loses_no_byte() {
    let _alone = alone();
    each_of(3, &representative(), |interpreter| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut server = Target::start(interpreter, "server.py", &["serve"]);
        let port = server.facts["port"].to_string();
        let mut load = Target::start(interpreter, "server.py", &["load", &port, "6"]);
        // Server and client in turn: both sides of a connection are hit in the middle of send, recv and accept.
        for round in 0..6 {
            let pid = if round % 2 == 0 { server.pid } else { load.pid }.to_string();
            pyheap::run(["record", &pid, "--duration", "300ms", "-o", &base]).expect_code(0);
            let before = load.ask("STATUS", "STATUS");
            // Still going after each round.
            let progress = common::until("progress of the load", DEADLINE, || {
                let now = load.ask("STATUS", "STATUS");
                (now["messages"].as_u64() > before["messages"].as_u64()).then_some(now)
            });
            assert_eq!(
                progress["errors"],
                Value::Array(vec![]),
                "{}: load, round {round}",
                interpreter.name
            );
        }
        let sent = load.ask("EXIT", "DONE");
        let served = server.ask("STATUS", "STATUS");
        assert_eq!(sent["errors"], Value::Array(vec![]), "{}: load", interpreter.name);
        assert_eq!(served["errors"], Value::Array(vec![]), "{}: server", interpreter.name);
        // To the last byte: what the clients got back is what the server counted.
        assert_eq!(sent["bytes"], served["bytes"], "{}", interpreter.name);
        server.exit_cleanly();
    });
}

#[test]
fn proc_looks_as_before_after_the_detach() {
    let problems = in_parallel(4, &interpreters::named(), |interpreter| {
        let mut problems = String::new();
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(interpreter, "accuracy.py", &["0.01"]);
        let before = Picture::of(target.pid);
        let pid = target.pid.to_string();
        for round in 0..3 {
            let recording = pyheap::record(target.pid, &base, &[]);
            if tracer(target.pid) != 0 {
                let _ = writeln!(problems, "{}: traced while recording", interpreter.name);
            }
            recording.interrupt();
            let info = pyheap::run(["info", &pid]).expect_code(0).stdout;
            for line in before.differences(&Picture::of(target.pid), &info) {
                let _ = writeln!(problems, "{}, round {round}: {line}", interpreter.name);
            }
        }
        target.ask("GO", "TRUTH");
        target.exit_cleanly();
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    });
    assert!(problems.is_empty(), "{problems}");
}

#[test]
fn two_hundred_rounds_on_eight_busy_threads() {
    let _alone = alone();
    const ROUNDS: usize = 200;
    // The two ways of installing, two targets each; each round is a second of waiting.
    let mut list = interpreters::some(&["3.11", "3.12"]);
    list.extend(list.clone());
    each_of(list.len(), &list, |interpreter| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(interpreter, "busy.py", &["8"]);
        let pid = target.pid.to_string();
        let mut rss = Vec::new();
        let maps = |pid: i32| Picture::of(pid).maps.len();
        let mut maps_early = 0;
        let rounds = ROUNDS / list.len();
        for round in 0..rounds {
            pyheap::run(["record", &pid, "--duration", "50ms", "-o", &base]).expect_code(0);
            let status = target.ask("STATUS", "STATUS");
            assert_eq!(status["wrong"], 0, "{}, round {round}: {status}", interpreter.name);
            assert_eq!(
                status["errors"],
                Value::Array(vec![]),
                "{}, round {round}",
                interpreter.name
            );
            rss.push(rss_kib(target.pid));
            if round == 10 {
                maps_early = maps(target.pid);
            }
        }
        let picture = Picture::of(target.pid);
        assert_eq!(picture.tasks.len(), 9, "{}: threads", interpreter.name);
        assert!(
            maps(target.pid) <= maps_early + 8,
            "{}: {maps_early} mappings became more",
            interpreter.name
        );
        // The least of a stretch is what stays when the threads' own blocks are gone.
        let least = |range: &[u64]| range.iter().copied().min().unwrap_or(0);
        let (early, late) = (least(&rss[10..rounds / 2]), least(&rss[rounds / 2..]));
        assert!(
            late <= early + 2048,
            "{}: RSS grew from {early} to {late} KiB: {rss:?}",
            interpreter.name
        );
        let done = target.ask("EXIT", "DONE");
        assert_eq!(done["wrong"], 0, "{}: {done}", interpreter.name);
        assert_eq!(done["errors"], Value::Array(vec![]), "{}", interpreter.name);
        assert!(target.wait().success(), "{}: exit code", interpreter.name);
    });
}

#[test]
fn children_of_a_recorded_process_are_well() {
    each_of(3, &representative(), |interpreter| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(interpreter, "children.py", &[]);
        let recording = pyheap::record(target.pid, &base, &["--period", "16KiB"]);
        for _ in 0..3 {
            let result = target.ask("GO", "RESULT");
            for (what, expected) in result["expected"].as_object().expect("expected is an object") {
                if what == "multiprocessing" && result[what].is_string() {
                    continue; // an interpreter without it
                }
                assert_eq!(&result[what], expected, "{}: {what}", interpreter.name);
            }
        }
        recording.interrupt();
        target.exit_cleanly();
    });
}
