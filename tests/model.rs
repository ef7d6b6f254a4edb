//! Promise: our files are heapprof files. A model of the format that shares no code with ours (`tests/model/hpmodel.py`)
//! reads the same traces and totals from them, and ours reads what the model writes.

use crate::common::report::{flame, top};
use crate::common::target::Target;
use crate::common::{interpreters, pyheap, scratch, skip, tests_dir};
use ::pyheap::profile::hpc::Digest;
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;

/// A stack as the format has it: (file, line), outermost first.
type Stack = Vec<(String, u64)>;

/// The model runs on whatever python3 is there; it is no target.
fn model(args: &[&str]) -> Value {
    let python = interpreters::any().expect("checked by the caller");
    let out = Command::new(python.path)
        .arg(tests_dir().join("model/hpmodel.py"))
        .args(args)
        .output()
        .expect("an interpreter that runs");
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success(),
        "hpmodel.py {args:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("hpmodel.py {args:?}: {e}: {text}"))
}

/// What the model says is alive: stack → (bytes, objects, samples), equal stacks added up.
fn alive(model: &Value) -> BTreeMap<Stack, (f64, f64, u64)> {
    let mut all: BTreeMap<Stack, (f64, f64, u64)> = BTreeMap::new();
    for entry in model["live"].as_array().expect("live") {
        let frames = entry["frames"].as_array().expect("frames").iter();
        let stack: Stack = frames
            .map(|f| (f[0].as_str().unwrap_or_default().to_owned(), f[1].as_u64().unwrap_or(0)))
            .collect();
        let sum = all.entry(stack).or_default();
        sum.0 += entry["bytes"].as_f64().expect("bytes");
        sum.1 += entry["objects"].as_f64().expect("objects");
        sum.2 += entry["samples"].as_u64().expect("samples");
    }
    all
}

/// The format leaves out frames of files whose name begins with `<`.
fn strip(stack: impl Iterator<Item = (String, u64)>) -> Stack {
    stack.filter(|(file, _)| !file.starts_with('<')).collect()
}

/// Ours may use the exact weight of a sample where the file has the table's: a quarter of a percent at most.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 0.004 * a.abs().max(b.abs()) + 1.0
}

/// `function (file:line)`, or `file:line` where no function name is known → (file, line)
fn place(frame: &str) -> Option<(String, u64)> {
    let inside = frame
        .rsplit_once(" (")
        .and_then(|(_, rest)| rest.strip_suffix(')'))
        .unwrap_or(frame);
    let (file, line) = inside.rsplit_once(':')?;
    Some((file.to_owned(), line.parse().ok()?))
}

fn compare(base: &str, model: &Value) {
    let alive = alive(model);
    let mut ours: BTreeMap<Stack, (f64, f64, Option<u64>)> = BTreeMap::new();
    let report = top(base, &["--by", "trace"]);
    for row in &report.rows {
        let stack = strip(row.frames.iter().map(|(_, file, line)| (file.clone(), *line)));
        let sum = ours.entry(stack).or_insert((0.0, 0.0, Some(0)));
        sum.0 += row.bytes;
        sum.1 += row.objects;
        sum.2 = sum.2.zip(row.samples).map(|(a, b)| a + b);
    }
    ours.retain(|_, sum| sum.0 != 0.0 || sum.2 != Some(0));
    let (theirs, mine): (Vec<_>, Vec<_>) = (alive.keys().collect(), ours.keys().collect());
    assert_eq!(theirs, mine, "other stacks are alive");
    for (stack, sum) in &alive {
        let our = &ours[stack];
        assert!(
            close(sum.0, our.0) && close(sum.1, our.1),
            "{stack:?}: {sum:?} and {our:?}"
        );
        if let Some(samples) = our.2 {
            assert_eq!(sum.2, samples, "{stack:?}: samples");
        }
    }
    let total: f64 = alive.values().map(|sum| sum.0).sum();
    assert!(
        close(total, report.total_bytes),
        "total {total} and {}",
        report.total_bytes
    );

    let mut graph: BTreeMap<Stack, f64> = BTreeMap::new();
    for (stack, value) in flame(base, &["--value", "bytes"]) {
        if let [only] = &stack[..]
            && place(only).is_none()
        {
            continue; // the word for what has no stack
        }
        let frames = stack
            .iter()
            .map(|frame| place(frame).unwrap_or_else(|| panic!("flame: frame {frame:?}")));
        *graph.entry(strip(frames)).or_default() += value;
    }
    for (stack, sum) in alive.iter().filter(|(stack, _)| !stack.is_empty()) {
        let value = graph.get(stack).copied().unwrap_or(0.0);
        assert!(close(sum.0, value), "flame: {stack:?}: {} and {value}", sum.0);
    }
}

#[test]
fn an_independent_model_reads_our_files() {
    const TEST: &str = "an_independent_model_reads_our_files";
    if interpreters::any().is_none() {
        skip!(TEST, "no CPython found");
    }
    for python in interpreters::some(&["3.8", "deb-3.11", "3.13"]) {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(&python, "accuracy.py", &["0.3"]);
        let recording = pyheap::record(target.pid, &base, &["--suffix", ".hpm", "--period", "16KiB"]);
        target.ask("GO", "TRUTH");
        target.ask("FREE", "TRUTH");
        target.ask("GO", "TRUTH");
        recording.interrupt();
        let model = model(&["live", &base]);
        assert_eq!(
            model["damage"],
            Value::Array(vec![]),
            "{}: what the model finds wrong",
            python.name
        );
        assert!(model["events"].as_u64() > Some(1000), "{}: {model}", python.name);
        compare(&base, &model);
        target.exit_cleanly();
    }
}

#[test]
fn ours_reads_what_the_model_writes() {
    const TEST: &str = "ours_reads_what_the_model_writes";
    if interpreters::any().is_none() {
        skip!(TEST, "no CPython found");
    }
    let dir = scratch();
    for kind in [
        "table",
        "no_table",
        "unicode",
        "empty_traces",
        "large",
        "cut",
        "many",
        "corners",
    ] {
        let base = dir.path().join(kind).to_str().expect("UTF-8").to_owned();
        model(&["synthesize", kind, &base]);
        compare(&base, &model(&["live", &base]));
        pyheap::run(["info", &base]).expect_code(0);
        pyheap::run(["digest", &base]).expect_code(0);
        let alive: f64 = alive(&model(&["live", &base])).values().map(|sum| sum.0).sum();
        let reader = ::pyheap::reader::Reader::open(&base).expect("a profile");
        let last = reader.snapshots().expect("a digest").iter().last();
        let last = last.expect("a snapshot").expect("a whole one");
        assert!(
            close(alive, last.total_usage() as f64),
            "{kind}: {alive} {}",
            last.total_usage()
        );
        // And to the byte, as the original would have made it if it had 64 bits.
        pyheap::run(["digest", &base, "--compat", "--interval", "60s", "--precision", "0"]).expect_code(0);
        let digest = Digest::open(std::path::Path::new(&format!("{base}.hpc"))).expect("a digest");
        let snapshots = (0..digest.len()).map(|place| {
            let mut entries = digest.snapshot(place).expect("a whole one").entries;
            entries.sort_unstable();
            entries
        });
        let expected: Vec<Vec<(u32, u64)>> =
            serde_json::from_value(model(&["digest", &base, "60"])["snapshots"].take()).expect("snapshots");
        assert!(!expected.is_empty(), "{kind}: longer than a minute");
        assert_eq!(snapshots.collect::<Vec<_>>(), expected, "{kind}");
    }
}
