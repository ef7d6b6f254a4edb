//! Promise: what survives is called by its type, and what allocates by its thread, on every interpreter, while memory changes
//! hands at full speed.

use crate::common::interpreters::{self, Interpreter};
use crate::common::pyheap::{record, run};
use crate::common::target::Target;
use crate::common::{DEADLINE, binomial, each_of, scratch, skip, until};
use serde_json::Value;
use std::sync::Mutex;

/// Samples of each line that are waited for.
const ENOUGH: u64 = 20;
/// Survivors whose type is wrong or unknown, at most: one in a hundred.
const NOT_RIGHT: f64 = 0.01;
/// A build fails when it has more of them than so small a chance would allow if each were one with that probability. There are
/// some twenty builds.
const CHANCE: f64 = 1e-8;

/// A line that keeps objects of one type.
struct Site<'a> {
    name: &'a str,
    line: u64,
    kind: &'a str,
}

fn json(args: &[&str]) -> Option<Value> {
    let finished = run(args);
    (finished.code() == 0).then(|| serde_json::from_str(&finished.stdout).expect("the answer is JSON"))
}

fn rows(answer: &Value) -> &[Value] {
    answer["rows"].as_array().expect("a list")
}

fn samples(row: &Value) -> u64 {
    row["samples"].as_u64().expect("a number")
}

/// The row of a line of the target.
fn of_line<'a>(answer: &'a Value, site: &Site<'_>) -> Option<&'a Value> {
    let file = |row: &Value| {
        row["site"]["file"]
            .as_str()
            .is_some_and(|file| file.ends_with("keepers.py"))
    };
    rows(answer)
        .iter()
        .find(|row| file(row) && row["site"]["line"] == site.line)
}

fn thread_rows(answer: &Value) -> Vec<&str> {
    let names = rows(answer).iter().filter_map(|row| row["site"]["thread"].as_str());
    names.filter_map(|name| name.split(' ').next()).collect()
}

/// The survivors of a recording, and how many of them have the right type.
fn check(python: &Interpreter, period: &str) -> (u64, u64) {
    let mut target = Target::start(python, "keepers.py", &[]);
    let name = target.name.clone();
    let dir = scratch();
    let base = dir.path().join("run");
    let base = base.to_str().expect("a plain path");
    let recording = record(target.pid, base, &["--period", period]);
    let going = target.ask("GO", "GOING");
    let sites: Vec<Site<'_>> = going
        .as_object()
        .expect("an object")
        .iter()
        .map(|(name, site)| Site {
            name,
            line: site[0].as_u64().expect("a line"),
            kind: site[1].as_str().expect("a type"),
        })
        .collect();
    assert_eq!(sites.len(), 5, "{going}");
    until(
        &format!("{name}: samples of all lines and names of all threads"),
        DEADLINE,
        || {
            let lines = json(&["top", base, "--json", "--limit", "1000"])?;
            let enough = |site: &Site<'_>| of_line(&lines, site).is_some_and(|row| samples(row) >= ENOUGH);
            if !sites.iter().all(enough) {
                return None;
            }
            let threads = json(&["top", base, "--json", "--by", "thread", "--limit", "1000"])?;
            let known = thread_rows(&threads);
            let named = |site: &Site<'_>| known.contains(&format!("keeper-{}", site.name).as_str());
            sites.iter().all(named).then_some(())
        },
    );
    recording.interrupt();

    let typed = json(&["top", base, "--json", "--types", "--limit", "1000"]).expect("types");
    let (mut all, mut known, mut right) = (0, 0, 0);
    for site in &sites {
        let row = of_line(&typed, site).unwrap_or_else(|| panic!("{name} {}: {typed:#}", site.name));
        let types = row["types"].as_array().expect("types");
        // The attributes of an object may be in a block of their own, and builds without the GIL have lists of what to free later.
        let is_buffer = |row: &Value| row["type"] == "buffer (mem)" || row["type"] == "buffer (raw)";
        let objects = || types.iter().filter(|row| !is_buffer(row));
        let found = |row: &&Value| row["type"] == site.kind;
        let is_looked_at = |row: &&Value| row["type"] != "(unknown)";
        for row in objects().filter(is_looked_at).filter(|row| !found(row)) {
            println!("{name}, line of {}: {row}", site.kind);
        }
        all += objects().map(samples).sum::<u64>();
        known += objects().filter(is_looked_at).map(samples).sum::<u64>();
        right += objects().filter(found).map(samples).sum::<u64>();
        assert_eq!(types.iter().map(samples).sum::<u64>(), samples(row), "{name}: {row:#}");
        // What a thread has allocated is exactly what its line has.
        let thread = format!("keeper-{}", site.name);
        let mine = json(&["top", base, "--json", "--thread", &thread, "--limit", "1000"]).expect("a report");
        for other in &sites {
            let found = of_line(&mine, other).map(samples);
            let expected = (other.line == site.line).then(|| samples(row));
            assert_eq!(found, expected, "{name}: {thread} at the line of {}", other.name);
        }
    }
    println!("{name}: of {all} survivors {known} were looked at, {right} are right");
    assert_right(&name, all, right);
    let leaks = json(&["leaks", base, "--json"]).expect("a verdict");
    for leak in leaks["leaks"].as_array().expect("a list") {
        if let Some(kept) = leak["own"]["function"].as_str().and_then(|f| f.strip_prefix("keep_")) {
            assert_eq!(leak["thread"], format!("keeper-{kept}"), "{name}: {leak:#}");
            assert!(
                !leak["types"].as_array().expect("a list").is_empty(),
                "{name}: {leak:#}"
            );
        }
    }
    target.exit_cleanly();
    (all, right)
}

#[track_caller]
fn assert_right(of: &str, all: u64, right: u64) {
    let (_, most) = binomial::acceptance(all, NOT_RIGHT, CHANCE);
    assert!(all - right <= most, "{of}: {right} of {all} are right");
}

#[test]
fn survivors_have_the_right_type_and_the_right_thread() {
    const TEST: &str = "survivors_have_the_right_type_and_the_right_thread";
    let pythons = interpreters::named();
    if pythons.is_empty() {
        skip!(TEST, "no CPython found");
    }
    // From 32 KiB on, sampled small blocks take another way.
    let rows: Vec<(&Interpreter, &str)> = pythons
        .iter()
        .enumerate()
        .map(|(number, python)| (python, if number % 4 == 0 { "32KiB" } else { "1KiB" }))
        .collect();
    let sums = Mutex::new((0, 0));
    each_of(4, &rows, |(python, period)| {
        let (all, right) = check(python, period);
        let mut sums = sums.lock().expect("nobody panics while holding it");
        *sums = (sums.0 + all, sums.1 + right);
    });
    let (all, right) = *sums.lock().expect("nobody panics while holding it");
    assert_right("all builds", all, right);
}

/// Types are written after ten seconds for the first time, and at the end.
#[test]
fn a_profile_without_types_says_so() {
    const TEST: &str = "a_profile_without_types_says_so";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found");
    };
    let target = Target::start(&python, "whereis.py", &[]);
    let dir = scratch();
    let base = dir.path().join("run");
    let base = base.to_str().expect("a plain path");
    let recording = record(target.pid, base, &[]);
    run(["top", base, "--types"])
        .expect_code(1)
        .expect_stderr("this profile has no types");
    run(["top", base, "--by", "type", "--at", "1s"])
        .expect_code(2)
        .expect_stderr("types are known for the end of a recording only");
    recording.interrupt();
    run(["top", base, "--types", "--by", "type"]).expect_code(0);
    target.exit_cleanly();
}
