//! Promise: with --native, memory of native code is seen under its Python line and its own symbol, once and truly, and the
//! process's slots are afterwards what they were.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{self, binomial, each_of, pyheap, scratch, skipped, until};
use ::pyheap::attach::slots::{Object, Slot, places};
use nix::sys::signal::Signal;
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory, space};
use pyheap_protocol::control::native::FFI_CALL;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// As in tests/accuracy.rs: the file's sampling table is that much off at most.
const TABLE_ERROR: f64 = 0.004;

/// Both ways an interpreter is built (with and without libpython), a program that is not position-independent, both C
/// libraries, both ways allocators are installed.
fn representative() -> Vec<Interpreter> {
    interpreters::some(&["pyenv-3.8", "deb-3.11", "pyenv-3.12", "many-3.13", "musl-3.12"])
}

/// The library of the target, built once, and a copy of it; `None` where there is no `cc`.
fn library() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let build = || {
        let dir = scratch();
        let library = dir.path().join("native.so");
        let mut command = Command::new("cc");
        // Without a C library of its own choosing, and bound at the first call, as most are.
        command.args([
            "-O1",
            "-fno-builtin",
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-Wl,-z,lazy",
            "-o",
        ]);
        let done = command
            .arg(&library)
            .arg(common::target_script("native.c"))
            .output()
            .ok()?;
        assert!(
            done.status.success(),
            "native.c: {}",
            String::from_utf8_lossy(&done.stderr)
        );
        std::fs::copy(&library, dir.path().join("copy.so")).expect("room for a copy");
        let mut command = Command::new("cc");
        command.args(["-O1", "-shared", "-fPIC", "-nostdlib", "-o"]);
        let second = command
            .arg(dir.path().join("ffi.so"))
            .arg(common::target_script("ffi.c"));
        assert!(second.status().is_ok_and(|status| status.success()), "ffi.c");
        Some(dir)
    };
    BUILT.get_or_init(build).as_ref().map(tempfile::TempDir::path)
}

/// Runs `test` on each interpreter with the library.
fn on_each(name: &str, list: &[Interpreter], test: impl Fn(&Interpreter, &Path) + Sync) {
    match library() {
        Some(library) if !list.is_empty() => each_of(2, list, |interpreter| test(interpreter, library)),
        _ => skipped(name, "no CPython, or no cc"),
    }
}

fn start(interpreter: &Interpreter, library: &Path, scale: &str) -> Target {
    let library = |name: &str| library.join(name).to_str().expect("UTF-8").to_owned();
    Target::start(
        interpreter,
        "native.py",
        &[&library("native.so"), scale, &library("copy.so")],
    )
}

/// What the slots of all objects hold.
fn slots(pid: i32) -> BTreeMap<u64, (Slot, u64, String)> {
    let memory = ProcessMemory::new(pid);
    let maps = space::maps(pid).expect("the target lives");
    let mut found = BTreeMap::new();
    for (place, name) in places(&maps) {
        let Some(object) = Object::read(&memory, place.base, name) else {
            continue;
        };
        for slot in object.slots {
            let value = memory.read_u64(RemoteAddr(slot.at)).expect("it is mapped");
            found.insert(slot.at, (slot, value, object.name.clone()));
        }
    }
    found
}

/// Each slot holds what it held, but for those that were bound meanwhile: those hold what others of that function hold.
fn assert_same(before: &BTreeMap<u64, (Slot, u64, String)>, pid: i32, what: &str) {
    let after = slots(pid);
    assert!(before.len() > 10, "{what}: only {} slots", before.len());
    for (at, (slot, was, object)) in before {
        let (_, now, _) = after.get(at).unwrap_or_else(|| panic!("{what}: {object} has gone"));
        let is_bound_there = |other: &(Slot, u64, String)| other.0.which == slot.which && other.1 == *now && now != was;
        let is_bound = slot.lazy.is_some() && before.values().any(is_bound_there);
        assert!(
            was == now || is_bound,
            "{what}: slot {at:#x} of {object} was {was:#x} and is {now:#x}"
        );
    }
}

/// What is live of a site: bytes, blocks and samples, by the Python line that has called native code.
fn live(base: &str, site: &Value) -> (f64, f64, u64) {
    let out = pyheap::run(["export", base, "--to", "json"]).expect_code(0).stdout;
    let export: Value = serde_json::from_str(&out).expect("JSON");
    let frames = export["frames"].as_array().expect("frames");
    let frame = |number: Option<&Value>| number.and_then(|number| frames.get(number.as_u64()? as usize));
    // Outermost first.
    let mut sum = (0.0, 0.0, 0);
    for trace in export["traces"].as_array().expect("traces") {
        let stack = trace["stack"].as_array().expect("a stack");
        let (Some(inner), Some(line)) = (frame(stack.last()), frame(stack.iter().rev().nth(1))) else {
            continue;
        };
        let is_site = line["file"] == site["file"] && line["line"] == site["line"];
        if !is_site || trace["live_bytes"].as_f64() == Some(0.0) || trace["domain"] != site["domain"] {
            continue;
        }
        assert_eq!(inner["file"], "native.so", "{inner}");
        assert_eq!(
            (&inner["function"], &inner["line"]),
            (&site["native"], &Value::from(0)),
            "{inner}"
        );
        assert_eq!(
            line["function"].as_str().map(|name| name.ends_with("site")),
            Some(false)
        );
        sum.0 += trace["live_bytes"].as_f64().expect("a number");
        sum.1 += trace["live_objects"].as_f64().expect("a number");
        sum.2 += trace["samples"].as_u64().expect("a number");
    }
    sum
}

fn sites(truth: &Value) -> impl Iterator<Item = (&String, &Value)> {
    truth["sites"].as_object().expect("sites").iter()
}

#[test]
fn every_site_is_seen_and_every_slot_is_given_back() {
    let name = "every_site_is_seen_and_every_slot_is_given_back";
    on_each(name, &representative(), |interpreter, library| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = start(interpreter, library, "0.5");
        let before = slots(target.pid);
        let recording = pyheap::record(target.pid, &base, &["--native"]);
        target.ask("GO", "TRUTH");
        target.ask("FREE", "TRUTH");
        let truth = target.ask("GO", "TRUTH");
        target.ask("CHURN 20000", "DONE");
        recording.interrupt();
        assert_same(&before, target.pid, &interpreter.name);
        for (site, facts) in sites(&truth) {
            let (size, count) = (
                facts["bytes"].as_u64().expect("bytes") / facts["count"].as_u64().expect("a count"),
                facts["count"].as_u64().expect("a count"),
            );
            let (bytes, _, _) = live(&base, facts);
            // Eight threads that allocate at once may have to leave a sample out, which is counted and said; a thirtieth of
            // the bytes is more than was ever lost, on machines with far more threads than processors.
            let spare = if site == "site_threads" { 1.0 / 30.0 } else { 0.0 };
            let (low, high) = binomial::acceptance_bytes(&[(size, count)], binomial::DEFAULT_PERIOD, binomial::TAIL);
            assert!(
                bytes >= low * (1.0 - TABLE_ERROR - spare) && bytes <= high * (1.0 + TABLE_ERROR),
                "{}: {site}: {bytes} B, not in [{low}, {high}]",
                interpreter.name
            );
        }
        target.exit_cleanly();
    });
}

/// Nothing is estimated at period 1, and what was freed is gone, to the byte.
#[test]
fn every_byte_is_counted_once_at_period_one() {
    let name = "every_byte_is_counted_once_at_period_one";
    let list = interpreters::some(&["pyenv-3.12", "musl-3.12"]);
    on_each(name, &list, |interpreter, library| {
        let dir = scratch();
        let base = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
        let mut target = start(interpreter, library, "0.01");
        let recording = pyheap::record(
            target.pid,
            &base("all"),
            &["--native", "--period", "1", "--ring-size", "16MiB"],
        );
        let truth = target.ask("GO", "TRUTH");
        recording.interrupt();
        // Threads that allocate at once may have to leave out some.
        for (site, facts) in sites(&truth).filter(|(site, _)| *site != "site_threads") {
            let (bytes, blocks, _) = live(&base("all"), facts);
            let wanted = (facts["bytes"].as_f64(), facts["count"].as_f64());
            assert_eq!((Some(bytes), Some(blocks)), wanted, "{}: {site}", interpreter.name);
        }
        let recording = pyheap::record(
            target.pid,
            &base("none"),
            &["--native", "--period", "1", "--ring-size", "16MiB"],
        );
        let again = target.ask("GO", "TRUTH");
        target.ask("FREE", "TRUTH");
        recording.interrupt();
        for (site, facts) in sites(&again) {
            assert_eq!(
                live(&base("none"), facts).0,
                0.0,
                "{}: {site} was freed",
                interpreter.name
            );
        }
        target.exit_cleanly();
    });
}

/// What is live of mappings by a Python line, in bytes.
fn mapped(base: &str, site: &Value) -> f64 {
    by_line(base, site, "mmap")
}

/// What is live in a domain by a Python line that has called native code, in bytes.
fn by_line(base: &str, site: &Value, domain: &str) -> f64 {
    let out = pyheap::run(["export", base, "--to", "json", "--domain", domain])
        .expect_code(0)
        .stdout;
    let export: Value = serde_json::from_str(&out).expect("JSON");
    let mut sum = 0.0;
    for trace in export["traces"].as_array().expect("traces") {
        let stack = trace["stack"].as_array().expect("a stack");
        // Outermost first; the innermost is native.
        let line = stack
            .iter()
            .rev()
            .nth(1)
            .and_then(|number| export["frames"].get(number.as_u64()? as usize));
        if line.is_some_and(|line| line["file"] == site["file"] && line["line"] == site["line"]) {
            sum += trace["live_bytes"].as_f64().expect("a number");
        }
    }
    sum
}

/// Frames of threads are in chunks that the interpreter maps: whose call has needed one is to be seen, and that it is gone afterwards.
/// Arenas, which it maps by the same function, are not counted.
#[test]
fn chunks_of_frames_are_blamed_at_the_call_that_needed_them() {
    let name = "chunks_of_frames_are_blamed_at_the_call_that_needed_them";
    let list = interpreters::some(&["deb-3.11", "pyenv-3.12", "many-3.13", "musl-3.12"]);
    on_each(name, &list, |interpreter, library| {
        let dir = scratch();
        let base = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
        let mut target = start(interpreter, library, "0.01");
        let before = slots(target.pid);
        let options = ["--native", "--period", "1", "--ring-size", "16MiB"];
        let recording = pyheap::record(target.pid, &base("deep"), &options);
        let truth = target.ask("DEEP 100", "TRUTH");
        recording.interrupt();
        assert_same(&before, target.pid, &interpreter.name);
        let sites = truth["sites"].as_array().expect("sites");
        for (site, spare) in sites.iter().zip([8.0 * 16384.0, 0.0]) {
            let (seen, all) = (mapped(&base("deep"), site), site["bytes"].as_f64().expect("bytes"));
            // Threads may have to leave out a sample; one of each is more than was ever seen.
            assert!(
                seen <= all && seen >= all - spare,
                "{}: {seen} of {all} bytes at {site}",
                interpreter.name
            );
        }
        target.ask("RETURN", "DONE");
        let recording = pyheap::record(target.pid, &base("gone"), &options);
        target.ask("DEEP 100", "TRUTH");
        target.ask("RETURN", "DONE");
        recording.interrupt();
        for site in sites {
            assert_eq!(mapped(&base("gone"), site), 0.0, "{}: {site}", interpreter.name);
        }
        target.exit_cleanly();
    });
}

/// Whether what ctypes calls is seen: its `ffi_call` is in a slot that leads to one that is known.
fn has_ffi_slot(slots: &BTreeMap<u64, (Slot, u64, String)>) -> bool {
    slots
        .values()
        .any(|(slot, _, object)| slot.which == FFI_CALL && object.starts_with("_ctypes."))
}

/// Addresses that ctypes had before the attach stand in no slot: what it calls by them is blamed at its line none the less, and what it
/// frees is gone. Its answers are what they always were.
#[test]
fn what_ctypes_calls_is_seen_at_its_line() {
    let name = "what_ctypes_calls_is_seen_at_its_line";
    on_each(name, &interpreters::named(), |interpreter, library| {
        let dir = scratch();
        let base = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
        let mut target = start(interpreter, library, "0.01");
        // Some slots are bound at the first call.
        target.ask("CTYPES", "TRUTH");
        let before = slots(target.pid);
        let is_seen = has_ffi_slot(&before);
        let options = ["--native", "--period", "1", "--ring-size", "16MiB", "-v"];
        let recording = pyheap::record(target.pid, &base("kept"), &options);
        let truth = target.ask("CTYPES", "TRUTH");
        let done = recording.interrupt();
        assert_same(&before, target.pid, &interpreter.name);
        assert_eq!(truth["wrong"], Value::Array(Vec::new()), "{}", interpreter.name);
        assert_eq!(
            done.stderr.contains("through libffi, of _ctypes."),
            is_seen,
            "{}: {}",
            interpreter.name,
            done.stderr
        );
        assert!(
            !done.stderr.contains("has copied the address"),
            "{}: {}",
            interpreter.name,
            done.stderr
        );
        let domain = |facts: &Value| facts["domain"].as_str().expect("a domain").to_owned();
        for (site, facts) in sites(&truth) {
            let wanted = if is_seen { facts["bytes"].as_f64() } else { Some(0.0) };
            let seen = by_line(&base("kept"), facts, &domain(facts));
            assert_eq!(Some(seen), wanted, "{}: {site}", interpreter.name);
        }
        if is_seen {
            let recording = pyheap::record(target.pid, &base("freed"), &options);
            target.ask("CTYPES", "TRUTH");
            target.ask("RELEASE", "DONE");
            recording.interrupt();
            assert_same(&before, target.pid, &interpreter.name);
            // The blocks of this one are lost.
            for (site, facts) in sites(&truth).filter(|(site, _)| *site != "ctypes_plain") {
                let left = by_line(&base("freed"), facts, &domain(facts));
                assert_eq!(left, 0.0, "{}: {site} was freed", interpreter.name);
            }
            let info = pyheap::run(["info", &base("freed")]).expect_code(0);
            assert!(
                !info.stdout.contains("frees_missed"),
                "{}: {}",
                interpreter.name,
                info.stdout
            );
        } else {
            println!("{}: ctypes calls libffi by no slot", interpreter.name);
        }
        target.exit_cleanly();
    });
}

/// A library may bring a libffi of its own: calls through both are seen.
#[test]
fn two_libffis_in_one_process_are_followed() {
    let name = "two_libffis_in_one_process_are_followed";
    let list = interpreters::some(&["deb-3.11", "pyenv-3.12", "musl-3.12"]);
    on_each(name, &list, |interpreter, library| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = start(interpreter, library, "0.01");
        target.ask("CTYPES", "TRUTH");
        target.ask("SECOND", "TRUTH");
        let before = slots(target.pid);
        let options = ["--native", "--period", "1", "--ring-size", "16MiB", "-v"];
        let recording = pyheap::record(target.pid, &base, &options);
        let first = target.ask("CTYPES", "TRUTH");
        let second = target.ask("SECOND", "TRUTH");
        let done = recording.interrupt();
        assert_same(&before, target.pid, &interpreter.name);
        assert!(
            done.stderr.contains(", ffi.so"),
            "{}: {}",
            interpreter.name,
            done.stderr
        );
        let is_seen = has_ffi_slot(&before);
        for (site, facts) in sites(&second).chain(sites(&first).filter(|_| is_seen)) {
            let domain = facts["domain"].as_str().expect("a domain");
            let seen = by_line(&base, facts, domain);
            assert_eq!(Some(seen), facts["bytes"].as_f64(), "{}: {site}", interpreter.name);
        }
        target.ask("RELEASE", "DONE");
        target.exit_cleanly();
    });
}

/// What is freed by a pointer that no slot holds does not stay as a leak.
#[test]
fn missed_frees_are_found_and_said() {
    let name = "missed_frees_are_found_and_said";
    let list = interpreters::some(&["pyenv-3.12"]);
    on_each(name, &list, |interpreter, library| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = start(interpreter, library, "0.05");
        let recording = pyheap::record(target.pid, &base, &["--native", "--period", "1KiB"]);
        let truth = target.ask("GO", "TRUTH");
        target.ask("ELSEWHERE", "DONE");
        let facts = &truth["sites"]["site_calloc"];
        let all = facts["bytes"].as_f64().expect("bytes");
        // Half are freed; of those that stay none may be taken for free: 1 - e^-4 of the blocks of 4 KiB are sampled.
        until("the missed frees", common::DEADLINE, || {
            let (bytes, _, _) = live(&base, facts);
            (bytes > 0.0 && bytes < 0.53 * all).then_some(())
        });
        recording.interrupt();
        let (bytes, _, _) = live(&base, facts);
        let (low, high) = binomial::acceptance_bytes(
            &[(4096, facts["count"].as_u64().expect("a count") / 2)],
            1024.0,
            binomial::TAIL,
        );
        assert!(
            bytes >= low && bytes <= high * 1.06,
            "{bytes} B, not in [{low}, {high}]"
        );
        pyheap::run(["info", &base])
            .expect_code(0)
            .expect_stdout("frees_missed");
        target.exit_cleanly();
    });
}

/// The next pyheap finds the slots of one that was killed, and puts them back.
#[test]
fn a_killed_pyheap_leaves_slots_that_are_cured() {
    let name = "a_killed_pyheap_leaves_slots_that_are_cured";
    on_each(name, &representative(), |interpreter, library| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = start(interpreter, library, "0.01");
        // Those that are bound at the first call are so now.
        target.ask("GO", "TRUTH");
        target.ask("FREE", "TRUTH");
        target.ask("CHURN 10", "DONE");
        target.ask("GO", "TRUTH");
        target.ask("CTYPES", "TRUTH");
        let before = slots(target.pid);
        let recording = pyheap::record(target.pid, &base, &["--native"]);
        let meanwhile = slots(target.pid);
        let is_written = |(at, (slot, was, _)): (&u64, &(Slot, u64, String))| {
            (slot.which == FFI_CALL) == has_ffi_slot(&before) && meanwhile.get(at).is_some_and(|now| now.1 != *was)
        };
        assert!(
            before.iter().any(is_written),
            "{}: no slot was written",
            interpreter.name
        );
        recording.signal(Signal::SIGKILL);
        recording.finish(common::DEADLINE);
        target.ask("FREE", "TRUTH");
        target.ask("RELEASE", "DONE");
        pyheap::run(["cure", &target.pid.to_string()])
            .expect_code(0)
            .expect_stderr("clean again");
        assert_same(&before, target.pid, &interpreter.name);
        target.ask("CHURN 10", "DONE");
        target.exit_cleanly();
    });
}

/// Who has copied the address of malloc while it led to us may call it for ever.
#[test]
fn a_copied_address_keeps_the_code_there() {
    let list = interpreters::some(&["pyenv-3.12"]);
    on_each(
        "a_copied_address_keeps_the_code_there",
        &list,
        |interpreter, library| {
            let dir = scratch();
            let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
            let mut target = start(interpreter, library, "0.01");
            let before = slots(target.pid);
            let recording = pyheap::record(target.pid, &base, &["--native"]);
            target.ask("COPY", "DONE");
            recording
                .interrupt()
                .expect_stderr("has copied the address of a wrapper");
            target.ask("USE", "DONE");
            assert_same(&before, target.pid, &interpreter.name);
            target.ask("CHURN 100", "DONE");
            target.ask("USE", "DONE");
            target.exit_cleanly();
        },
    );
}

/// Libraries that come and go meanwhile.
#[test]
fn libraries_may_be_loaded_and_unloaded_all_the_time() {
    let list = interpreters::some(&["pyenv-3.8", "pyenv-3.12", "deb-3.11"]);
    on_each(
        "libraries_may_be_loaded_and_unloaded_all_the_time",
        &list,
        |interpreter, library| {
            let dir = scratch();
            let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
            let mut target = start(interpreter, library, "0.01");
            target.ask("LOOP", "DONE");
            let recording = pyheap::record(target.pid, &base, &["--native", "--duration", "3s"]);
            recording.finish(common::DEADLINE).expect_code(0);
            let done = target.ask("LOOP", "DONE");
            assert!(done["loads"].as_u64() > Some(10), "{done}");
            target.ask("CHURN 100", "DONE");
            target.exit_cleanly();
        },
    );
}

/// Other allocators in place of the C library's.
#[test]
fn preloaded_allocators_are_followed() {
    const PLACES: [&str; 2] = ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"];
    let found: Vec<String> = PLACES
        .iter()
        .map(|name| format!("/usr/lib/x86_64-linux-gnu/{name}"))
        .filter(|path| Path::new(path).exists())
        .collect();
    let Some(python) = interpreters::some(&["pyenv-3.12"]).pop().filter(|_| !found.is_empty()) else {
        return skipped(
            "preloaded_allocators_are_followed",
            "no jemalloc or tcmalloc (libjemalloc2, libtcmalloc-minimal4)",
        );
    };
    let Some(library) = library() else {
        return skipped("preloaded_allocators_are_followed", "no cc");
    };
    each_of(2, &found, |allocator| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut command = Command::new(&python.path);
        command.args([
            &common::target_script("native.py"),
            library.join("native.so").to_str().expect("UTF-8"),
            "0.01",
        ]);
        command.env("LD_PRELOAD", allocator);
        let mut target = Target::start_command(command, allocator);
        let before = slots(target.pid);
        let recording = pyheap::record(
            target.pid,
            &base,
            &["--native", "--period", "1", "--ring-size", "16MiB", "-v"],
        );
        let truth = target.ask("GO", "TRUTH");
        let name = Path::new(allocator)
            .file_stem()
            .and_then(|name| name.to_str())
            .expect("a name");
        recording
            .interrupt()
            .expect_stderr(&format!("malloc is that of {name}"));
        assert_same(&before, target.pid, allocator);
        for (site, facts) in sites(&truth).filter(|(site, _)| *site != "site_threads") {
            assert_eq!(
                Some(live(&base, facts).0),
                facts["bytes"].as_f64(),
                "{allocator}: {site}"
            );
        }
        target.ask("FREE", "TRUTH");
        target.exit_cleanly();
    });
}
