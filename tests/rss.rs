//! Promise: the table of `pyheap rss` adds up to what the kernel says, and its verdict is right.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{self, pyheap, scratch, skip, until};
use serde_json::Value;
use std::process::Command;

fn start(python: &Interpreter, kind: &str) -> Target {
    let mut command = Command::new(&python.path);
    command.arg(common::target_script("memory.py")).arg(kind);
    Target::start_command(command, &format!("{} memory.py {kind}", python.name))
}

fn rss(pid: i32, more: &[&str]) -> Value {
    let pid = pid.to_string();
    let mut args = vec!["rss", &pid, "--json", "--max-pause", "10s"];
    args.extend(more);
    let out = pyheap::run(args).expect_code(0);
    serde_json::from_str(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", out.stdout))
}

/// The sum of the rows of a group, or of all.
fn sum(report: &Value, group: Option<&str>) -> u64 {
    let rows = report["rows"].as_array().expect("rows");
    let rows = rows
        .iter()
        .filter(|row| group.is_none_or(|group| row["group"] == group));
    rows.map(|row| row["bytes"].as_u64().expect("bytes")).sum()
}

fn row(report: &Value, what: &str) -> u64 {
    let rows = report["rows"].as_array().expect("rows");
    let found = rows.iter().find(|row| row["what"] == what);
    found.unwrap_or_else(|| panic!("no row {what:?}: {report}"))["bytes"]
        .as_u64()
        .expect("bytes")
}

/// What the kernel says, added up exactly (`VmRSS` is a rough count).
fn kernel_rss(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).expect("Rss");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1024
}

fn is_within(one: u64, other: u64, parts_of_1000: u64) -> bool {
    one.abs_diff(other) * 1000 <= other * parts_of_1000
}

#[test]
fn each_kind_adds_up_and_is_called_by_its_name() {
    let list = interpreters::some(&["3.12", "pyenv-3.8"]);
    if list.is_empty() {
        skip!("each_kind_adds_up_and_is_called_by_its_name", "no CPython found");
    }
    let dir = scratch();
    let kinds = [
        ("web", "Python objects"),
        ("numpy", "native"),
        ("fragmented", "fragmentation"),
        ("threads", "not the heap at all"),
        ("mapped", "not the heap at all"),
        ("native", "native"),
    ];
    let mut rows: Vec<_> = list
        .iter()
        .flat_map(|python| kinds.map(|(kind, verdict)| (python, kind, verdict)))
        .collect();
    // Of the others, what depends on the version.
    rows.retain(|(python, kind, _)| python.name == list[0].name || ["web", "fragmented", "native"].contains(kind));
    common::each_of(2, &rows, |&(python, kind, verdict)| {
        let mut command = Command::new(&python.path);
        command.arg(common::target_script("memory.py")).arg(kind);
        command.env("SCRATCH", dir.path());
        let target = Target::start_command(command, &format!("{} memory.py {kind}", python.name));
        let size = target.facts["bytes"].as_u64().expect("bytes");
        for more in [&[][..], &["--frozen"]] {
            let report = rss(target.pid, more);
            let name = &target.name;
            let (all, said) = (sum(&report, None), report["rss_bytes"].as_u64().expect("bytes"));
            assert_eq!(all, said, "{name} {more:?}: {report}");
            assert!(
                is_within(all, kernel_rss(target.pid), 30),
                "{name} {more:?}: {all}, {report}"
            );
            assert_eq!(report["verdict"]["word"], verdict, "{name} {more:?}: {report}");
            // Not only the most, but what is there.
            let found = match kind {
                "threads" => row(&report, "thread stacks"),
                "mapped" => row(&report, "mapped files"),
                "numpy" => row(&report, "malloc: large ones with mappings of their own"),
                "native" => row(&report, "malloc: blocks that begin with no object"),
                _ => continue,
            };
            assert!(
                found >= size && is_within(found, size, 100),
                "{name}: {found} of {size}: {report}"
            );
        }
        let text = pyheap::run(["rss", &target.pid.to_string()]).expect_code(0);
        let line = format!("verdict: {verdict} (");
        assert!(text.stdout.contains(&line), "{}", text.stdout);
        target.exit_cleanly();
    });
}

/// The allocator's own words are the truth: on every interpreter, read at one moment.
#[test]
fn small_objects_are_as_many_as_the_allocator_says() {
    let list = interpreters::named();
    if list.is_empty() {
        skip!("small_objects_are_as_many_as_the_allocator_says", "no CPython found");
    }
    common::each_of(3, &list, |python| {
        if python.name.ends_with('t') {
            // Without the GIL it is another allocator, which says nothing.
            return;
        }
        let mut target = start(python, "small");
        let truth = target.ask("STATS", "STATS");
        let truth = truth["used"]
            .as_u64()
            .unwrap_or_else(|| panic!("{}: {truth}", target.name));
        let report = until("a frozen copy", common::DEADLINE, || {
            let pid = target.pid.to_string();
            let out = pyheap::run(["rss", &pid, "--frozen", "--json", "--max-pause", "10s"]);
            serde_json::from_str::<Value>(&out.stdout).ok()
        });
        let found = report["pymalloc"]["used_bytes"].as_u64().expect("bytes");
        // What the question itself has made and dropped.
        assert!(
            is_within(found, truth, 10),
            "{}: {found}, {truth} by itself",
            target.name
        );
        let classes = report["pymalloc"]["classes"].as_array().expect("classes");
        let by_class: u64 = classes
            .iter()
            .map(|class| class["used_bytes"].as_u64().expect("bytes"))
            .sum();
        assert_eq!(by_class, found, "{}", target.name);
        target.exit_cleanly();
    });
}
