//! Promise: with --native-stacks, a sample of native memory has Python's frames and C's in the order in which they called each
//! other, and a debugger says the same.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{self, each_of, pyheap, scratch, skipped};
use ::pyheap::collect::unwind::{End, Unwinder};
use pyheap_injector::{ProcessMemory, space};
use pyheap_protocol::record::{Entry, Head, Piece};
use serde_json::Value;
use std::process::Command;
use std::sync::OnceLock;

/// Every minor version, both C libraries, with and without the GIL, linked both ways, with and without symbols.
fn all() -> Vec<Interpreter> {
    interpreters::some(&[
        "pyenv-3.8",
        "many-3.9",
        "pyenv-3.10",
        "pyenv-3.11",
        "deb-3.11",
        "pyenv-3.12",
        "many-3.13",
        "many-3.14",
        "many-3.14t",
        "musl-3.12",
    ])
}

/// The library of the target, built once; `None` where there is no `cc`.
fn library() -> Option<&'static str> {
    static BUILT: OnceLock<Option<(tempfile::TempDir, String)>> = OnceLock::new();
    let build = || {
        let dir = scratch();
        let library = dir.path().join("native_stacks.so").to_str().expect("UTF-8").to_owned();
        let mut command = Command::new("cc");
        command.args(["-O1", "-fno-builtin", "-shared", "-fPIC", "-nostdlib", "-o", &library]);
        let done = command.arg(common::target_script("native_stacks.c")).output().ok()?;
        assert!(
            done.status.success(),
            "native_stacks.c: {}",
            String::from_utf8_lossy(&done.stderr)
        );
        Some((dir, library))
    };
    BUILT.get_or_init(build).as_ref().map(|(_, library)| library.as_str())
}

/// Traces of native memory that are live, innermost frame first: their bytes and frames.
fn traces(base: &str) -> Vec<(u64, Vec<Value>)> {
    let out = pyheap::run(["export", base, "--to", "json"]).expect_code(0).stdout;
    let export: Value = serde_json::from_str(&out).expect("JSON");
    let frames = export["frames"].as_array().expect("frames");
    let number = |frame: &Value| frame.as_u64().and_then(|number| usize::try_from(number).ok());
    let stack = |trace: &Value| {
        let stack = trace["stack"].as_array().expect("a stack").iter().rev();
        stack.filter_map(|frame| frames.get(number(frame)?).cloned()).collect()
    };
    let traces = export["traces"].as_array().expect("traces").iter();
    traces
        .filter(|trace| trace["domain"] == "malloc" && trace["live_bytes"].as_f64() > Some(0.0))
        .map(|trace| (trace["live_bytes"].as_f64().expect("a number") as u64, stack(trace)))
        .collect()
}

/// The frames of the target and its library, as the target writes them, and the one of the interpreter's own that it names.
fn names(stack: &[Value]) -> Vec<String> {
    let name = |frame: &Value| {
        let function = frame["function"].as_str().expect("a name");
        let file = frame["file"].as_str().expect("a file");
        // `through.localalias`, `list_sort_impl.isra.0`
        let native = function.split('.').next().unwrap_or_default();
        if file.ends_with("native_stacks.py") {
            function.rsplit('.').next().map(str::to_owned)
        } else if file == "native_stacks.so" || native == "list_sort_impl" {
            Some(format!("C {native}"))
        } else {
            None
        }
    };
    stack.iter().filter_map(name).collect()
}

#[test]
fn frames_of_both_kinds_are_in_the_order_of_their_calls() {
    let name_of_test = "frames_of_both_kinds_are_in_the_order_of_their_calls";
    let (Some(library), list) = (library(), all()) else {
        return skipped(name_of_test, "no cc");
    };
    if list.is_empty() {
        return skipped(name_of_test, "no CPython");
    }
    each_of(2, &list, |interpreter| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(interpreter, "native_stacks.py", &[library]);
        let recording = pyheap::record(target.pid, &base, &["--native-stacks"]);
        let truth = target.ask("GO", "TRUTH");
        recording.interrupt();
        let found = traces(&base);
        for (site, facts) in truth["sites"].as_object().expect("sites") {
            let bytes = facts["bytes"].as_u64().expect("bytes");
            let wanted: Vec<&str> = facts["stack"]
                .as_array()
                .expect("a stack")
                .iter()
                .filter_map(Value::as_str)
                .collect();
            // One sample of a block so large stands for itself.
            let (_, stack) = found
                .iter()
                .find(|(live, _)| *live == bytes)
                .unwrap_or_else(|| panic!("{}: {site} has no sample: {found:?}", interpreter.name));
            let got = names(stack);
            // It has a name where the interpreter has one for it.
            let has_name = got.iter().any(|name| name.starts_with("C list"));
            let wanted: Vec<&str> = wanted
                .into_iter()
                .filter(|name| has_name || !name.starts_with("C list"))
                .collect();
            let tail: &[&str] = match (wanted.last(), site.as_str()) {
                (_, "in_worker") => &[],
                (Some(&"C on_its_own"), _) => &[],
                _ => &["main", "<module>"],
            };
            assert_eq!(got, [&wanted, tail].concat(), "{}: {site}: {stack:?}", interpreter.name);
        }
        // The thread that Python knows nothing of has frames of its own only.
        let has_marker =
            |(_, stack): &&(u64, Vec<Value>)| stack.last().is_some_and(|last| last["file"] == "<no Python frame>");
        assert_eq!(found.iter().filter(has_marker).count(), 1, "{}", interpreter.name);
        target.exit_cleanly();
    });
}

/// Stops of a debugger that are compared: more of them by `scripts/compare-native-stacks`.
fn stops() -> usize {
    let asked = std::env::var("PYHEAP_NATIVE_STOPS").ok();
    asked.and_then(|asked| asked.parse().ok()).unwrap_or(12)
}

/// gdb stops a process where it allocates, and finds the frames by its own means; from the registers and the piece of the stack, we find the same ones.
#[test]
fn a_debugger_finds_the_same_frames() {
    let name = "a_debugger_finds_the_same_frames";
    let list = match std::env::var("PYHEAP_NATIVE_STOPS") {
        // Stacks of musl's own functions are of no use to a comparison: it has no tables.
        Ok(_) => all()
            .into_iter()
            .filter(|interpreter| !interpreter.name.starts_with("musl"))
            .collect(),
        Err(_) => interpreters::some(&["many-3.12"]),
    };
    let has_gdb = Command::new("gdb").args(["-batch", "-ex", "python print(1)"]).output();
    if list.is_empty() || !has_gdb.is_ok_and(|done| done.stdout.starts_with(b"1")) {
        return skipped(name, "no CPython, or no gdb with Python");
    }
    let (mut same, mut all) = (0, 0);
    for interpreter in &list {
        let dir = scratch();
        let out = dir.path().join("stops");
        let target = Target::start(interpreter, "native_busy.py", &[]);
        let facts = format!("python PID = {}; STOPS = {}; OUT = {out:?}", target.pid, stops());
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/native_stops.py");
        let done = Command::new("gdb")
            .args(["-q", "-nx", "-batch", "-ex", &facts, "-x", script])
            .output()
            .expect("gdb runs");
        let text = std::fs::read_to_string(&out).unwrap_or_default();
        let mut unwinder = Unwinder::new(ProcessMemory::new(target.pid));
        unwinder.look_at(&space::maps(target.pid).expect("it lives"));
        let before = (same, all);
        for line in text.lines() {
            let stop: Value = serde_json::from_str(line).expect("JSON");
            all += 1;
            match compared(&mut unwinder, &stop) {
                Ok(()) => same += 1,
                Err(why) => println!("{}: {why}", interpreter.name),
            }
        }
        println!("{}: {} of {} agree", interpreter.name, same - before.0, all - before.1);
        assert!(
            all - before.1 == stops(),
            "{}: {}",
            interpreter.name,
            String::from_utf8_lossy(&done.stderr)
        );
        target.exit_cleanly();
    }
    assert!(same * 100 >= all * 99, "{same} of {all}");
}

/// The frames of a stop, by gdb and by us: to the end of the piece the same.
fn compared(unwinder: &mut Unwinder<ProcessMemory>, stop: &Value) -> Result<(), String> {
    let number = |value: &Value| value.as_u64().expect("a number");
    let register = |name: &str| number(&stop["registers"][name]);
    let text = stop["stack"].as_str().expect("hex");
    let bytes: Vec<u8> = (0..text.len() / 2)
        .filter_map(|at| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok())
        .collect();
    let (caller, stack) = bytes.split_at(8);
    let piece = Piece {
        head: Head {
            len: 0,
            kind: 0,
            flags: 0,
        },
        id: 1,
        entry: Entry {
            registers: ["rbp", "rbx", "r12", "r13", "r14", "r15"].map(register),
            caller: u64::from_le_bytes(caller.try_into().expect("eight bytes")),
        },
        stack: register("rsp") + 8,
    };
    let (ours, end) = unwinder.unwind(&piece, stack);
    let theirs: Vec<u64> = stop["pcs"].as_array().expect("frames").iter().map(number).collect();
    // Each of ours is the last byte of a call.
    let differs = ours.iter().zip(&theirs).position(|(ours, theirs)| ours + 1 != *theirs);
    let is_as_long = ours.len() >= theirs.len() || (end == End::Cut && stack.len() > 8000);
    if differs.is_none() && is_as_long && !ours.is_empty() {
        return Ok(());
    }
    let names = &stop["names"];
    let names = names.to_string();
    let names = names.get(..400).unwrap_or(&names);
    Err(format!(
        "frame {differs:?} of {} ({end:?}) and {}: {names}",
        ours.len(),
        theirs.len()
    ))
}
