//! Promise: `pyheap leaks` finds what leaks and where, blames nothing else, and tells growth of Python's heap from growth of the
//! process.
//!
//! Everything is recorded (`--period 1`), so that there is no chance in it; what sampling does to the verdict is tested with
//! thousands of simulated programs (`src/report/leaks/simulated.rs`). What is left is the machine: a target that stood still for
//! long says so, and is recorded again.

use crate::common::interpreters;
use crate::common::pyheap::run;
use crate::common::target::Target;
use crate::common::{self, pyheap, scratch, skip};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Rounds of work of the target, 20 a second.
const ROUNDS: &str = "300";
/// The longest pause of the target, as a part of its time, that is no reason to record again.
const STALL: f64 = 0.08;
/// Recordings until one without such a pause.
const ATTEMPTS: usize = 6;

/// What was recorded of a target, and what it says of itself.
struct Recording {
    base: String,
    /// What `record` said at its end.
    said: String,
    truth: Value,
}

/// Records every allocation of `mode` from its first round to its last.
fn record(mode: &str, dir: &Path) -> Option<Recording> {
    record_with(mode, dir, &["--period", "1"])
}

/// Records `mode` from its first round to its last.
fn record_with(mode: &str, dir: &Path, options: &[&str]) -> Option<Recording> {
    let python = interpreters::any()?;
    for attempt in 1..=ATTEMPTS {
        let mut target = Target::start(&python, "leaks.py", &[mode, ROUNDS]);
        let base = dir
            .join(format!("{mode}{}{attempt}", options.len()))
            .to_str()
            .expect("UTF-8")
            .to_owned();
        let recorder = pyheap::record(target.pid, &base, options);
        target.send("GO");
        let truth = target.expect_within("TRUTH", Duration::from_secs(240));
        let said = recorder.interrupt().stderr;
        target.exit_cleanly();
        let number = |key: &str| truth[key].as_f64().expect("a number");
        if number("stall") <= STALL * number("seconds") || attempt == ATTEMPTS {
            return Some(Recording { base, said, truth });
        }
    }
    None
}

fn leaks(base: &str, more: &[&str]) -> Value {
    let args = [&["leaks", base, "--json"], more].concat();
    let out = run(args).expect_code(0).stdout;
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

fn function(frame: &Value) -> &str {
    frame["function"].as_str().unwrap_or_default()
}

/// The sites of this verdict by their own function.
fn own<'a>(report: &'a Value, verdict: &str) -> Vec<&'a str> {
    let sites = report["leaks"].as_array().expect("a list");
    let of_verdict = sites.iter().filter(|site| site["verdict"] == verdict);
    of_verdict.map(|site| function(&site["own"])).collect()
}

#[test]
fn leaks_are_found_and_nothing_else_is_blamed() {
    const TEST: &str = "leaks_are_found_and_nothing_else_is_blamed";
    let dir = scratch();
    let Some(recording) = record("leaky", dir.path()) else {
        skip!(TEST, "no CPython found")
    };
    let report = leaks(&recording.base, &["--limit", "1TiB"]);
    assert_eq!(report["verdict"], "leak", "{report:#}");
    let mut found = own(&report, "leak");
    found.sort_unstable();
    assert_eq!(found, ["open_session", "report_error"], "{report:#}");
    let seconds = recording.truth["seconds"].as_f64().unwrap();
    for site in report["leaks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|site| site["verdict"] == "leak")
    {
        let kept = recording.truth["kept"][function(&site["own"])].as_f64().unwrap();
        let (growth, low, high) = (
            site["growth_bytes_per_min"].as_f64().unwrap(),
            site["ci95"][0].as_f64().unwrap(),
            site["ci95"][1].as_f64().unwrap(),
        );
        let truth = kept / seconds * 60.0;
        // The pace of the target varies as the machine lets it.
        assert!((growth / truth - 1.0).abs() < 0.3, "{truth}: {site:#}");
        assert!(0.0 < low && low <= growth && growth <= high, "{site:#}");
        let (median, oldest) = (&site["age_seconds"]["median"], &site["age_seconds"]["oldest"]);
        let (median, oldest) = (median.as_f64().unwrap(), oldest.as_f64().unwrap());
        assert!(
            0.2 * seconds < median && median < 0.8 * seconds && median < oldest,
            "{site:#}"
        );
        let objects = site["objects"].as_f64().unwrap();
        assert!(objects >= 30.0, "{site:#}");
        // Every survivor has a type, or is counted as one without.
        let of_types = site["types"].as_array().unwrap().iter();
        let of_types: f64 = of_types.map(|row| row["objects"].as_f64().unwrap()).sum();
        assert!((of_types - objects).abs() < 0.5, "{site:#}");
        // A program without `threading` has the name that the kernel knows.
        assert!(site["thread"].is_string(), "{site:#}");
    }
    let rare = report["leaks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|site| function(&site["own"]) == "report_error");
    let rare = rare.unwrap();
    // Innermost first: the allocating line is the library's, the line of own code further out.
    assert!(rare["stack"][0]["file"].as_str().unwrap().contains("json"), "{rare:#}");
    assert!(rare["own"]["file"].as_str().unwrap().ends_with("leaks.py"), "{rare:#}");
    assert_eq!(rare["domain"], rare["domain"].as_str().unwrap(), "{rare:#}");
    let limit = &report["limit"];
    assert_eq!(
        (&limit["source"], limit["limit_bytes"].as_u64()),
        (&Value::from("given"), Some(1 << 40))
    );
    assert!(limit["seconds"].as_f64().unwrap() > 3600.0, "{limit:#}");
    assert!(
        report["rss_growth_bytes"].is_number() && report["explained_bytes"].is_number(),
        "{report:#}"
    );
    // Words: the first line is the answer, at the end of the recording as well.
    let quiet = run(["leaks", &recording.base, "--quiet"]).expect_code(0).stdout;
    assert!(quiet.starts_with("leak: ") && quiet.lines().count() == 1, "{quiet}");
    assert!(
        recording.said.lines().any(|line| line.starts_with("leak: ")),
        "{}",
        recording.said
    );
    let verbose = run(["leaks", &recording.base, "--verbose"]).expect_code(0).stdout;
    for word in [&quiet[..], "open_session", "report_error", "no leaks:", "json"] {
        assert!(verbose.contains(word), "{word} is not in {verbose}");
    }
    // A library that is called own is.
    let with_json = leaks(&recording.base, &["--own", "json"]);
    assert!(own(&with_json, "leak").contains(&"open_session"), "{with_json:#}");
    assert!(!own(&with_json, "leak").contains(&"report_error"), "{with_json:#}");
}

#[test]
fn caches_start_up_and_churn_are_no_leaks() {
    const TEST: &str = "caches_start_up_and_churn_are_no_leaks";
    let dir = scratch();
    let Some(recording) = record("healthy", dir.path()) else {
        skip!(TEST, "no CPython found")
    };
    let report = leaks(&recording.base, &[]);
    assert_eq!(own(&report, "leak"), [""; 0], "{report:#}");
    assert_eq!(own(&report, "plateau"), ["look_up"], "{report:#}");
    assert!(own(&report, "one_off").contains(&"load_table"), "{report:#}");
    assert!(own(&report, "steady").contains(&"remember"), "{report:#}");
    assert!(report["verdict"] != "leak", "{report:#}");
}

#[test]
fn what_python_does_not_hold_is_native() {
    const TEST: &str = "what_python_does_not_hold_is_native";
    let dir = scratch();
    let Some(recording) = record("native", dir.path()) else {
        skip!(TEST, "no CPython found")
    };
    let report = leaks(&recording.base, &[]);
    assert_eq!(report["verdict"], "native", "{report:#}");
    let (grown, explained) = (&report["rss_growth_bytes"], &report["explained_bytes"]);
    assert!(
        grown.as_f64().unwrap() > 10.0 * explained.as_f64().unwrap().abs(),
        "{report:#}"
    );
    assert!(recording.said.contains("native: "), "{}", recording.said);
}

/// What is live in between stays the same and the process grows: with --native as without.
#[test]
fn holes_are_fragmentation() {
    const TEST: &str = "holes_are_fragmentation";
    let dir = scratch();
    // Peaks of some thousand samples each.
    let ways: [&[&str]; 2] = [&["--period", "16KiB"], &["--period", "16KiB", "--native"]];
    common::each_of(2, &ways, |options| {
        let Some(recording) = record_with("holes", dir.path(), options) else {
            skip!(TEST, "no CPython found")
        };
        let report = leaks(&recording.base, &[]);
        assert_eq!(report["verdict"], "fragmentation", "{options:?}: {report:#}");
        assert_eq!(own(&report, "leak"), [""; 0], "{options:?}: {report:#}");
        assert_eq!(
            report["has_native"],
            options.contains(&"--native"),
            "{options:?}: {report:#}"
        );
        let text = run(["leaks", &recording.base]).expect_code(0).stdout;
        let holders = match options.contains(&"--native") {
            true => "of which Python's and native allocators hold",
            false => "of which Python's allocators hold",
        };
        assert!(text.starts_with("fragmentation: ") && text.contains(holders), "{text}");
    });
}

#[test]
fn a_moment_tells_nothing() {
    let dir = scratch();
    let base = dir.path().join("none");
    std::fs::write(base.with_extension("_hpm"), [&[0, 0, 0, 1][..], &[0; 17]].concat()).unwrap();
    std::fs::write(base.with_extension("_hpd"), b"").unwrap();
    let base = base.to_str().unwrap();
    let report = leaks(base, &[]);
    assert_eq!(
        (&report["verdict"], &report["is_long_enough"]),
        (&Value::from("no_leak"), &Value::from(false))
    );
    assert_eq!(report["leaks"], Value::Array(Vec::new()));
    run(["leaks", base]).expect_code(0).expect_stdout("too short");
    run(["leaks", "/nonexistent/run"])
        .expect_code(1)
        .expect_stderr("no profile");
}
