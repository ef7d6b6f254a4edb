//! Promise: `pyheap census` counts what is there, on every interpreter, in a process and in a core file; what it cannot count it
//! says; and nothing in a heap makes it fail.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{DEADLINE, each_of, have, pyheap, scratch, skip, skipped, until};
use serde_json::Value;
use std::collections::HashMap;
use std::process::Command;

/// Objects of the main kinds; some 30 times as many in all.
const OBJECTS: &str = "1000";

/// Objects, those of them that the collector knows, and bytes, by type.
type Counts = HashMap<String, [i64; 3]>;

fn json(args: &[&str]) -> Value {
    let mut all = vec!["census"];
    all.extend(args);
    all.extend(["--json", "--limit", "1000000"]);
    let done = pyheap::run(all).expect_code(0);
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", done.stdout))
}

/// Until the target waits for its next command: then nothing of its last answer is left.
fn idle(target: &Target) {
    let waits = format!("{} 0x0 ", libc::SYS_read);
    until(&format!("{}: it waits", target.name), DEADLINE, || {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", target.pid)).ok()?;
        call.starts_with(&waits).then_some(())
    });
}

fn counts(census: &Value) -> Counts {
    let mut counts = Counts::new();
    for row in census["rows"].as_array().expect("rows") {
        let to = counts
            .entry(row["name"].as_str().expect("a name").to_owned())
            .or_default();
        for (to, field) in to.iter_mut().zip(["count", "tracked", "bytes"]) {
            *to += row[field].as_i64().expect("a number");
        }
        // Those that only C code holds the target cannot know.
        to[0] -= row["from_c"].as_i64().expect("a number");
        to[2] -= row["from_c_bytes"].as_i64().expect("a number");
    }
    counts
}

fn truth(said: &Value) -> Counts {
    let rows = said.as_object().expect("types").iter();
    let numbers = |row: &Value| [0, 1, 2].map(|i: usize| row[i].as_i64().expect("a number"));
    rows.map(|(name, row)| (name.clone(), numbers(row))).collect()
}

fn minus(after: &Counts, before: &Counts) -> Counts {
    let names = after.keys().chain(before.keys());
    let get = |from: &Counts, name: &str| from.get(name).copied().unwrap_or_default();
    let difference = |name: &String| {
        let (after, before) = (get(after, name), get(before, name));
        (name.clone(), [0, 1, 2].map(|i| after[i] - before[i]))
    };
    names.map(difference).collect()
}

fn sum(counts: &Counts, what: usize) -> i64 {
    counts.values().map(|row| row[what]).sum()
}

/// All types of which more or less was found than is there.
fn differing(found: &Counts, real: &Counts) -> String {
    let both = minus(found, real);
    let mut lines: Vec<String> = both
        .iter()
        .filter(|(_, row)| **row != [0; 3])
        .map(|(name, row)| format!("{name}: {row:?} more than {:?}", real.get(name)))
        .collect();
    lines.sort();
    lines.join("\n")
}

/// Within a part of it.
fn is_close(found: i64, real: i64, part: f64) -> bool {
    (found - real).abs() as f64 <= part * real as f64
}

/// What was made is counted as the target counts it, and so is everything that was there before.
fn compare(name: &str, found: [&Counts; 2], real: [&Counts; 2]) {
    let made = minus(found[1], found[0]);
    let really = minus(real[1], real[0]);
    assert!(sum(&really, 0) > 15_000, "{name}: {}", sum(&really, 0));
    let differing_rows = differing(&made, &really);
    // What is between the two counts that the target makes of itself: its own answer, a frame.
    assert!(
        is_close(sum(&made, 2), sum(&really, 2), 0.005),
        "{name}: bytes\n{differing_rows}"
    );
    for (kind, row) in &really {
        let [count, tracked, bytes] = made.get(kind).copied().unwrap_or_default();
        // Those of the collector, exactly: only the program's own frames and calls come and go.
        let own = [
            "code", "frame", "tuple", "dict", "list", "str", "int", "bytes", "float", "type",
        ];
        let is_own = own.contains(&kind.as_str());
        if kind.starts_with("__main__.") || kind.starts_with("collections.") {
            assert_eq!([count, tracked, bytes], *row, "{name}: {kind}\n{differing_rows}");
        }
        assert!(
            (tracked - row[1]).abs() <= if is_own { 64 } else { 0 },
            "{name}: {kind}\n{differing_rows}"
        );
        assert!(
            (count - row[0]).abs() <= 64 + row[0].abs() / 100,
            "{name}: {kind}\n{differing_rows}"
        );
    }
    // In all, on the heap as it was at first, and with what was made.
    for (all, really) in found.iter().zip(real) {
        let differing = differing(all, really);
        let untracked = |counts: &Counts| sum(counts, 0) - sum(counts, 1);
        assert!(
            is_close(sum(all, 2), sum(really, 2), 0.01),
            "{name}: {} bytes of {}\n{differing}",
            sum(all, 2),
            sum(really, 2)
        );
        assert!(
            is_close(untracked(all), untracked(really), 0.02),
            "{name}: {} untracked of {}\n{differing}",
            untracked(all),
            untracked(really)
        );
        for (kind, row) in really {
            let tracked = all.get(kind).map_or(0, |row| row[1]);
            assert!(
                (tracked - row[1]).abs() <= 64,
                "{name}: {kind}: {tracked} of {row:?} are known to the collector"
            );
        }
    }
}

fn check(python: &Interpreter) {
    let name = &python.name;
    let mut target = Target::start(python, "census.py", &[]);
    let pid = target.pid.to_string();
    target.ask("MAKE 10", "MADE");
    let real_before = truth(&target.ask("COUNT", "TRUTH"));
    idle(&target);
    let before = json(&[&pid]);
    target.ask(&format!("MAKE {OBJECTS}"), "MADE");
    let real_after = truth(&target.ask("COUNT", "TRUTH"));
    idle(&target);
    let after = json(&[&pid]);
    for census in [&before, &after] {
        assert_eq!(census["mode"], "frozen", "{name}");
        assert_eq!(census["incomplete"], serde_json::json!([]), "{name}");
        let doubts = census["inconsistent"].as_object().expect("doubts").values();
        let doubts: u64 = doubts.map(|number| number.as_u64().expect("a number")).sum();
        assert_eq!(doubts, 0, "{name}: nothing changes: {:#}", census["inconsistent"]);
    }
    compare(name, [&counts(&before), &counts(&after)], [&real_before, &real_after]);
    target.exit_cleanly();
}

#[test]
fn a_census_counts_what_the_target_counts() {
    let pythons = interpreters::named();
    if pythons.is_empty() {
        skip!("a_census_counts_what_the_target_counts", "no CPython found");
    }
    each_of(2, &pythons, check);
}

#[test]
fn a_core_file_has_the_same_objects() {
    const TEST: &str = "a_core_file_has_the_same_objects";
    if !have("gcore") {
        skip!(TEST, "no gcore (it comes with gdb)");
    }
    for python in interpreters::some(&["pyenv-3.8", "many-3.12", "many-3.14t"]) {
        let name = &python.name;
        let mut target = Target::start(&python, "census.py", &[]);
        let pid = target.pid.to_string();
        target.ask("MAKE 100", "MADE");
        idle(&target);
        let dir = scratch();
        let base = dir.path().join("core");
        let gcore = Command::new("gcore")
            .arg("-o")
            .arg(&base)
            .arg(&pid)
            .output()
            .expect("gcore");
        let core = format!("{}.{pid}", base.display());
        if !gcore.status.success() || !std::path::Path::new(&core).exists() {
            let said = String::from_utf8_lossy(&gcore.stderr).into_owned();
            skipped(TEST, &format!("{name}: gcore: {said}"));
            continue;
        }
        let live = json(&[&pid]);
        let read = json(&["--core", &core]);
        assert_eq!(
            (&read["mode"], &read["exact"], &read["pid"]),
            (&"core".into(), &true.into(), &live["pid"]),
            "{name}"
        );
        let difference = differing(&counts(&read), &counts(&live));
        assert_eq!(difference, "", "{name}");
        let rss = pyheap::run(["rss", "--core", &core, "--json"]).expect_code(0).stdout;
        let rss: Value = serde_json::from_str(&rss).expect("JSON");
        let rows = rss["rows"].as_array().expect("rows").iter();
        let sum: u64 = rows.filter_map(|row| row["bytes"].as_u64()).sum();
        assert_eq!(rss["rss_bytes"].as_u64(), Some(sum), "{name}: {rss:#}");
        assert_eq!(read["memory"]["rss_bytes"], rss["rss_bytes"], "{name}");
        // Objects are where the live table has them.
        let objects = |report: &Value, at: &str| {
            let groups = report["memory"]["groups"].as_array().expect("groups").iter();
            let found = groups.clone().find(|group| group["name"] == at);
            found.and_then(|group| group["bytes"].as_i64()).expect("a number")
        };
        let (of_core, of_copy) = (objects(&read, "Python objects"), objects(&live, "Python objects"));
        assert!(
            is_close(of_core, of_copy, 0.03),
            "{name}: {of_core} in the core, {of_copy} in the copy"
        );
        target.exit_cleanly();
    }
}

#[test]
fn growth_is_shown_by_type_and_by_module() {
    let Some(python) = interpreters::any() else {
        skip!("growth_is_shown_by_type_and_by_module", "no CPython found");
    };
    let mut target = Target::start(&python, "census.py", &[]);
    let pid = target.pid.to_string();
    let dir = scratch();
    let [before, after] = ["before", "after"].map(|name| dir.path().join(name).to_str().expect("UTF-8").to_owned());
    idle(&target);
    let shown = pyheap::run(["census", &pid, "--live", "--save", &before, "--limit", "3"]).expect_code(0);
    assert!(shown.stdout.contains("approximate"), "{}", shown.stdout);
    assert!(shown.stdout.contains("more types (--limit "), "{}", shown.stdout);
    target.ask("MAKE 300", "MADE");
    idle(&target);
    pyheap::run(["census", &pid, "--save", &after, "--by", "module", "--top", "4"])
        .expect_code(0)
        .expect_stdout("read in a copy that stood still")
        .expect_stdout("the frozen copy: one thread stood still for")
        .expect_stdout("__main__");
    let answer = json(&["diff", &before, &after]);
    let row = |answer: &Value, name: &str| {
        let rows = answer["rows"].as_array().expect("rows").iter();
        let row = rows.clone().find(|row| row["name"] == name).cloned();
        row.unwrap_or_else(|| panic!("{answer:#}"))
    };
    let plain = row(&answer, "__main__.Plain");
    // 300, and 500 of each of two threads.
    assert_eq!(
        (&plain["count_before"], &plain["count_after"]),
        (&0.into(), &1300.into())
    );
    let module = row(&json(&["diff", &before, &after, "--by", "module"]), "__main__");
    assert!(
        module["bytes_after"].as_u64() > plain["bytes_after"].as_u64(),
        "{module}"
    );
    let text = pyheap::run(["census", "diff", &before, &after]).expect_code(0).stdout;
    assert!(text.contains("+1,300") && text.contains("__main__.Plain"), "{text}");
    let same = pyheap::run(["census", "diff", &after, &after]).expect_code(0);
    assert!(same.stdout.contains("nothing has changed"), "{}", same.stdout);
    pyheap::run(["census", &pid, "--watch", "10ms"])
        .expect_code(0)
        .expect_stderr("the next census in");
    target.exit_cleanly();
}

/// Those that stay are all found while others come and go, and the collector moves them about.
#[test]
fn a_heap_that_changes_is_counted_nearly() {
    const TEST: &str = "a_heap_that_changes_is_counted_nearly";
    let pythons = interpreters::some(&["3.8", "3.12", "3.14", "3.14t"]);
    if pythons.is_empty() {
        skip!(TEST, "no CPython found");
    }
    for python in pythons {
        let name = &python.name;
        let mut target = Target::start(&python, "census.py", &[]);
        let pid = target.pid.to_string();
        target.ask("MAKE 3000", "MADE");
        target.ask("CHURN", "CHURNING");
        // A collection may have them apart: then it says so.
        let census = until(&format!("{name}: no collection in between"), DEADLINE, || {
            let census = json(&[&pid, "--live"]);
            census["incomplete"]
                .as_array()
                .is_some_and(Vec::is_empty)
                .then_some(census)
        });
        let counts = counts(&census);
        let slotted = counts["__main__.Slotted"][0];
        assert!(
            is_close(slotted, 4000, 0.05),
            "{name}: {slotted} of 4000: {}",
            census["inconsistent"]
        );
        assert_eq!(census["exact"], false);
        target.send("EXIT");
        assert!(target.wait().success(), "{name}");
    }
}

#[test]
fn a_broken_heap_is_counted_as_far_as_it_goes() {
    const TEST: &str = "a_broken_heap_is_counted_as_far_as_it_goes";
    let pythons = interpreters::some(&["pyenv-3.8", "pyenv-3.10", "pyenv-3.12", "pyenv-3.13"]);
    if pythons.is_empty() {
        skip!(TEST, "no CPython with ctypes found");
    }
    each_of(2, &pythons, |python| {
        let name = &python.name;
        let mut target = Target::start(python, "census.py", &[]);
        let pid = target.pid.to_string();
        target.ask("MAKE 100", "MADE");
        target.ask("BREAK", "BROKEN");
        idle(&target);
        let census = json(&[&pid]);
        let doubts = census["inconsistent"].as_object().expect("doubts").values();
        let doubts: u64 = doubts.map(|number| number.as_u64().expect("a number")).sum();
        assert!(doubts > 30, "{name}: {:#}", census["inconsistent"]);
        // Those that can be reached another way than by the broken lists.
        let plain = counts(&census)["__main__.Plain"][0];
        assert!((1000 + 1100 - 20..=1000 + 1100).contains(&plain), "{name}: {plain}");
        // No size is believed that does not fit into memory.
        let bytes = census["total"]["bytes"].as_u64().expect("a number");
        assert!(bytes < 1 << 30, "{name}: {bytes}");
        target.send("EXIT");
        assert!(target.wait().success(), "{name}");
    });
}

#[test]
fn what_has_no_census_is_refused() {
    let census = |args: &[&str]| pyheap::run(std::iter::once(&"census").chain(args));
    census(&["4194304"]).expect_code(3);
    census(&["--core", "/no/such/file"]).expect_code(2);
    census(&["--core", "/proc/self/exe"]).expect_code(7);
    census(&["1", "--core", "x"]).expect_code(2);
    census(&["diff", "/no/such/file", "/no/such/file"]).expect_code(2);
    census(&["diff", "/proc/self/status", "/proc/self/status"])
        .expect_code(7)
        .expect_stderr("is no census");
}

/// Where a planted leak is held: its class, the kind of root, and what is in the words of the way, in this order.
const PLANTED: [(&str, &str, &[&str]); 6] = [
    (
        "ByGlobal",
        "module",
        &["__main__.planted (list)", "dict", "list", "__main__.ByGlobal"],
    ),
    (
        "ByCell",
        "module",
        &[
            "__main__.handler (function)",
            "tuple",
            "cell",
            "list",
            "__main__.ByCell",
        ],
    ),
    ("ByCall", "call", &["waiting_call()", "list", "__main__.ByCall"]),
    (
        "ByCache",
        "module",
        &["__main__.cached (functools._lru_cache_wrapper)", "__main__.ByCache"],
    ),
    (
        "ByClass",
        "module",
        &["__main__.Registry (type)", ".items (list)", "__main__.ByClass"],
    ),
    (
        "ByLocal",
        "module",
        &["__main__.of_thread (_thread._local)", "list", "__main__.ByLocal"],
    ),
];

fn why(pid: &str, kind: &str) -> Value {
    json(&[pid, "--why", &format!("__main__.{kind}")])
}

#[test]
fn whoever_holds_a_leak_is_named() {
    const TEST: &str = "whoever_holds_a_leak_is_named";
    // All of them: PYHEAP_CENSUS=all, half a minute.
    let pythons = match std::env::var_os("PYHEAP_CENSUS") {
        Some(_) => interpreters::named(),
        None => interpreters::some(&["pyenv-3.8", "pyenv-3.10", "pyenv-3.11", "pyenv-3.13", "many-3.14t"]),
    };
    if pythons.is_empty() {
        skip!(TEST, "no CPython found");
    }
    each_of(2, &pythons, |python| {
        let name = &python.name;
        let mut target = Target::start(python, "census.py", &[]);
        let pid = target.pid.to_string();
        target.ask("PLANT", "PLANTED");
        idle(&target);
        for (kind, root, words) in PLANTED {
            let answer = why(&pid, kind);
            assert_eq!(answer["count"], 300, "{name}: {answer:#}");
            let ways = answer["ways"].as_array().expect("ways");
            // The last one that was made may be left somewhere on a stack.
            let count = ways[0]["count"].as_u64().expect("a number");
            assert!(count >= 298 && ways[0]["root"] == root, "{name}: {answer:#}");
            let steps: Vec<&str> = ways[0]["steps"]
                .as_array()
                .expect("steps")
                .iter()
                .filter_map(Value::as_str)
                .collect();
            let mut rest = steps.iter();
            for word in words {
                assert!(
                    rest.any(|step| step.contains(word)),
                    "{name}: no {word} in its place: {steps:?}"
                );
            }
            // They hold a string and a number each, which nobody else has.
            let (bytes, retained) = (answer["bytes"].as_u64(), answer["retained_bytes"].as_u64());
            assert!(retained > bytes.map(|bytes| bytes + 300 * 50), "{name}: {answer:#}");
        }
        let answer = why(&pid, "ByC");
        assert_eq!(
            (&answer["count"], &answer["ways"][0]["root"]),
            (&300.into(), &"c".into()),
            "{name}: {answer:#}"
        );
        pyheap::run(["census", &pid, "--why", "ByClass"])
            .expect_code(1)
            .expect_stderr("there are of __main__.ByClass");
        target.send("EXIT");
        assert!(target.wait().success(), "{name}");
    });
}

/// What objects retain, types and single ones, against what the target finds by leaving them out.
#[test]
fn what_is_retained_is_what_a_search_without_it_misses() {
    const TEST: &str = "what_is_retained_is_what_a_search_without_it_misses";
    let pythons = interpreters::some(&["pyenv-3.8", "pyenv-3.12", "many-3.14t"]);
    if pythons.is_empty() {
        skip!(TEST, "no CPython found");
    }
    each_of(2, &pythons, |python| {
        let name = &python.name;
        let mut target = Target::start(python, "retained.py", &[]);
        let pid = target.pid.to_string();
        let told = target.ask("NODES", "NODES");
        idle(&target);
        let retained = |what: &str| json(&[&pid, "--why", what]);
        for (kind, bytes) in told["types"].as_object().expect("types") {
            let answer = retained(kind);
            assert_eq!(answer["retained_bytes"], *bytes, "{name}: {kind}: {answer:#}");
            // The table has the largest ten.
            let rows = answer["types"].as_array().expect("types").iter();
            let rows: Vec<_> = rows.filter(|row| row["name"] == *kind).collect();
            assert!(
                rows.iter().all(|row| row["retained_bytes"] == *bytes),
                "{name}: {answer:#}"
            );
            assert!(!rows.is_empty() || kind != "__main__.Node", "{name}: {answer:#}");
        }
        for object in told["objects"].as_array().expect("objects") {
            let answer = retained(&format!("{:#x}", object[0].as_u64().expect("an address")));
            assert_eq!(answer["retained_bytes"], object[1], "{name}: {answer:#}");
        }
        target.exit_cleanly();
    });
}

/// A module in C, compiled for this interpreter; `None` where that cannot be.
fn holder(python: &Interpreter, dir: &std::path::Path) -> Option<()> {
    let ask = "import sysconfig; print(sysconfig.get_paths()['include'])";
    let include = Command::new(&python.path).args(["-c", ask]).output().ok()?;
    let include = String::from_utf8(include.stdout).ok()?;
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/targets/holder.c");
    let done = Command::new("gcc")
        .args(["-shared", "-fPIC", "-O1", "-I", include.trim(), "-o"])
        .arg(dir.join("holder.so"))
        .arg(source)
        .output()
        .ok()?;
    done.status.success().then_some(())
}

/// Objects that nothing but an array of a module in C leads to are counted, to the last one, and called what they are.
#[test]
fn what_only_an_extension_module_holds_is_found() {
    const TEST: &str = "what_only_an_extension_module_holds_is_found";
    let pythons = interpreters::some(&[
        "pyenv-3.8",
        "pyenv-3.9",
        "pyenv-3.10",
        "pyenv-3.11",
        "pyenv-3.12",
        "pyenv-3.13",
    ]);
    let mut checked = 0;
    for python in pythons {
        let name = &python.name;
        let dir = scratch();
        if holder(&python, dir.path()).is_none() {
            skipped(TEST, &format!("{name}: no gcc or no headers"));
            continue;
        }
        let mut target = Target::start(&python, "retained.py", &[]);
        let pid = target.pid.to_string();
        idle(&target);
        let before = json(&[&pid]);
        let held = target.ask(&format!("HOLD {}", dir.path().display()), "HELD");
        idle(&target);
        let after = json(&[&pid]);
        let from_c = |census: &Value, kind: &str, field: &str| {
            let rows = census["rows"].as_array().expect("rows").iter();
            let of = rows.filter(|row| row["name"] == kind || row["name"] == format!("__main__.{kind}"));
            of.map(|row| row[field].as_i64().expect("a number")).sum::<i64>()
        };
        for (kind, row) in held.as_object().expect("types") {
            let (count, bytes) = (row[0].as_i64(), row[1].as_i64());
            let growth = |field: &str| from_c(&after, kind, field) - from_c(&before, kind, field);
            // What importing the module has made, and the names in the answer.
            // What was there before may have gone.
            let near = |found: i64, real: Option<i64>, slack: i64| {
                let more = found - real.unwrap_or(0);
                -slack / 5 <= more && more <= slack
            };
            let found = growth("count");
            assert!(near(found, count, 300), "{name}: {kind}: {found} of {count:?}");
            // What the collector has in its lists is met there, though nobody holds it.
            if growth("tracked") == 0 {
                let (found, size) = (growth("from_c"), growth("from_c_bytes"));
                assert!(near(found, count, 100), "{name}: {kind}: {found} of {count:?}");
                assert!(near(size, bytes, 10_000), "{name}: {kind}: {size} of {bytes:?} bytes");
            }
        }
        let answer = json(&[&pid, "--why", "__main__.Held"]);
        assert_eq!(
            (&answer["count"], &answer["ways"][0]["root"]),
            (&200.into(), &"c".into()),
            "{name}: {answer:#}"
        );
        pyheap::run(["census", &pid])
            .expect_code(0)
            .expect_stdout("held from C, or by nothing: ")
            .expect_stdout("small blocks (pymalloc): ");
        target.exit_cleanly();
        checked += 1;
    }
    if checked == 0 {
        skip!(TEST, "no interpreter with headers");
    }
}

/// `record --census`, and what `leaks` makes of the two; also when the process ends before.
#[test]
fn a_recording_has_a_census_before_and_one_after() {
    const TEST: &str = "a_recording_has_a_census_before_and_one_after";
    let Some(python) = interpreters::some(&["3.12"])
        .into_iter()
        .next()
        .or_else(interpreters::any)
    else {
        skip!(TEST, "no CPython found");
    };
    let mut target = Target::start(&python, "census.py", &[]);
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    idle(&target);
    let recording = pyheap::record(target.pid, &base, &["--census"]);
    target.ask("MAKE 100", "MADE");
    idle(&target);
    let done = recording.interrupt();
    for when in ["begin", "end"] {
        let file = std::fs::read_to_string(format!("{base}._census-{when}"));
        let file: Value = serde_json::from_str(&file.expect("it is there")).expect("JSON");
        assert_eq!(file["mode"], "frozen", "{when}: {}", done.stderr);
        // What the resident memory is stands at the head of each census.
        let groups = file["memory"]["groups"].as_array().expect("groups").iter();
        let sum: u64 = groups.filter_map(|group| group["bytes"].as_u64()).sum();
        assert_eq!(Some(sum), file["memory"]["rss_bytes"].as_u64(), "{when}");
    }
    let answer = pyheap::run(["leaks", &base, "--json", "--rows", "1000"])
        .expect_code(0)
        .stdout;
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let rows = answer["census"]["rows"].as_array().expect("rows").iter();
    let plain = rows
        .clone()
        .find(|row| row["name"] == "__main__.Plain")
        .expect("it has grown");
    assert_eq!(
        (&plain["count_before"], &plain["count_after"]),
        (&0.into(), &1100.into())
    );
    pyheap::run(["leaks", &base])
        .expect_code(0)
        .expect_stdout("the heap, from the census at the begin to the one at the end")
        .expect_stdout("__main__.Plain");
    // Another recording of the same name is not to be taken for one with a census.
    pyheap::record(target.pid, &base, &[]).interrupt();
    let left = std::fs::read_dir(dir.path()).expect("our folder").flatten();
    let left: Vec<_> = left
        .map(|file| file.file_name().to_string_lossy().into_owned())
        .collect();
    assert!(!left.iter().any(|name| name.contains("census")), "{left:?}");
    let recording = pyheap::record(target.pid, &base, &["--census"]);
    target.exit_cleanly();
    recording.finish(DEADLINE).expect_code(0);
    let text = pyheap::run(["leaks", &base]).expect_code(0).stdout;
    assert!(!text.contains("from the census"), "{text}");
    pyheap::run(["record", "--all", "--census"])
        .expect_code(2)
        .expect_stderr("--census is for one process");
}
