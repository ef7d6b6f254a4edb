//! The outputs of `pyheap top --json` and `pyheap flame`, as the tests read them.

use super::pyheap::run;
use serde_json::Value;
use std::collections::BTreeMap;

/// A row of `top --json`. By trace, `frames` is the stack, outermost first, and the other three are its last frame's.
#[derive(Debug, Clone)]
pub struct Row {
    pub function: String,
    pub file: String,
    pub line: u64,
    pub frames: Vec<(String, String, u64)>,
    /// Estimated.
    pub bytes: f64,
    /// Estimated.
    pub objects: f64,
    /// Sampled objects behind the estimate.
    pub samples: Option<u64>,
}

#[derive(Debug, Clone)]
pub struct Top {
    pub total_bytes: f64,
    /// Largest first.
    pub rows: Vec<Row>,
}

/// `pyheap top BASE --json MORE…`, all rows.
pub fn top(base: &str, more: &[&str]) -> Top {
    let mut args = vec!["top", base, "--json", "--limit", "1000000"];
    args.extend(more);
    let out = run(args).expect_code(0).stdout;
    let json: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("top --json: {e}:\n{out}"));
    let number = |v: &Value, key: &str| v[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {v}"));
    let frame = |v: &Value| {
        let text = |key: &str| v[key].as_str().unwrap_or_default().to_owned();
        (text("function"), text("file"), v["line"].as_u64().unwrap_or(0))
    };
    let rows = json["rows"].as_array().unwrap_or_else(|| panic!("no rows in {json}"));
    let rows = rows
        .iter()
        .map(|row| {
            let frames: Vec<_> = row["site"]["stack"]
                .as_array()
                .into_iter()
                .flatten()
                .map(frame)
                .collect();
            assert!(number(row, "live_bytes_margin") >= 0.0, "{row}");
            let (function, file, line) = frames.last().cloned().unwrap_or_else(|| frame(&row["site"]));
            Row {
                function,
                file,
                line,
                frames,
                bytes: number(row, "live_bytes"),
                objects: number(row, "live_objects"),
                samples: row["samples"].as_u64(),
            }
        })
        .collect();
    assert!(number(&json, "live_objects") >= 0.0, "{json}");
    Top {
        total_bytes: number(&json, "live_bytes"),
        rows,
    }
}

/// `pyheap flame BASE -o -`: stack (outermost first, as `function (file:line)`) → value.
pub fn flame(base: &str, more: &[&str]) -> BTreeMap<Vec<String>, f64> {
    let mut args = vec!["flame", base, "-o", "-"];
    args.extend(more);
    let out = run(args).expect_code(0).stdout;
    let mut stacks = BTreeMap::new();
    for line in out.lines() {
        let (stack, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("flame: {line}"));
        let value: f64 = value.parse().unwrap_or_else(|e| panic!("flame: {e}: {line}"));
        let stack = stack.split(';').map(str::to_owned).collect();
        assert!(
            stacks.insert(stack, value).is_none(),
            "flame: twice the same stack: {line}"
        );
    }
    stacks
}
