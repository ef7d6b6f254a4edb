//! speedscope's file format: JSON for <https://www.speedscope.app>, or a copy of it on one's own disk.
//!
//! The four metrics are four profiles of the same frames; live bytes is shown first. Each stack is a sample whose weight
//! is its value. Samples are in order of their stacks, so that "Time Order" looks as tidy as "Left Heavy"; a place on that
//! axis is no time.

use serde::Serialize;

use super::{Export, Metric, NO_STACK, Numbering};
use crate::report::human::clean;

const SCHEMA: &str = "https://www.speedscope.app/file-format-schema.json";

#[derive(Serialize)]
struct File {
    #[serde(rename = "$schema")]
    schema: &'static str,
    shared: Shared,
    profiles: Vec<Profile>,
    name: String,
    #[serde(rename = "activeProfileIndex")]
    active_profile_index: usize,
    exporter: String,
}

#[derive(Serialize)]
struct Shared {
    frames: Vec<Frame>,
}

#[derive(Serialize, Clone, PartialEq, Eq, Hash)]
struct Frame {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
}

#[derive(Serialize)]
struct Profile {
    #[serde(rename = "type")]
    kind: &'static str,
    name: String,
    unit: &'static str,
    #[serde(rename = "startValue")]
    start_value: u64,
    #[serde(rename = "endValue")]
    end_value: u64,
    samples: Vec<Vec<u32>>,
    weights: Vec<u64>,
}

/// The file.
///
/// # Errors
/// None in practice: it is made of plain data.
pub fn speedscope(export: &Export<'_>) -> serde_json::Result<Vec<u8>> {
    let mut numbering = Numbering::new();
    let mut frames = Vec::new();
    let mut number = |frame: Frame| {
        let (number, is_new) = numbering.number(frame.clone());
        if is_new {
            frames.push(frame);
        }
        number
    };
    let stacks: Vec<Vec<u32>> = export
        .traces
        .iter()
        .map(|trace| {
            let mut stack: Vec<_> = trace.frames.iter().map(|found| number(frame(found))).collect();
            if stack.is_empty() {
                stack.push(number(Frame {
                    name: NO_STACK.to_owned(),
                    file: None,
                    line: None,
                }));
            }
            stack
        })
        .collect();
    let name = clean(&export.name).into_owned();
    let profiles = Metric::ALL
        .into_iter()
        .map(|metric| profile(export, metric, &name, &stacks));
    serde_json::to_vec(&File {
        schema: SCHEMA,
        profiles: profiles.collect(),
        shared: Shared { frames },
        name,
        active_profile_index: 0,
        exporter: format!("pyheap {}", crate::VERSION),
    })
}

fn profile(export: &Export<'_>, metric: Metric, name: &str, stacks: &[Vec<u32>]) -> Profile {
    let values = export
        .whole(metric)
        .into_iter()
        .zip(stacks)
        .filter(|(value, _)| *value > 0);
    let (weights, samples): (Vec<_>, Vec<_>) = values.map(|(value, stack)| (value, stack.clone())).unzip();
    Profile {
        kind: "sampled",
        name: format!("{name}: {}", metric.title()),
        unit: if metric.is_bytes() { "bytes" } else { "none" },
        start_value: 0,
        end_value: weights.iter().sum(),
        samples,
        weights,
    }
}

fn frame(frame: &crate::profile::model::StackFrame<'_>) -> Frame {
    let file = clean(&frame.file).into_owned();
    Frame {
        name: match frame.function {
            Some(function) => clean(function).into_owned(),
            None => format!("{file}:{}", frame.line),
        },
        file: Some(file),
        // Lines are counted from 1 there.
        line: (frame.line > 0).then_some(frame.line),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_clean, evil, export, sample};
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn stacks_and_weights() {
        let file: Value = serde_json::from_slice(&speedscope(&sample()).unwrap()).unwrap();
        assert_eq!(file["$schema"], SCHEMA);
        let frames = &file["shared"]["frames"];
        assert_eq!(frames[0], json!({"name": NO_STACK}));
        assert_eq!(frames[2], json!({"name": "grow", "file": "leak.py", "line": 7}));
        assert_eq!(frames[4], json!({"name": "old.py:0", "file": "old.py"}));
        let live = &file["profiles"][0];
        assert_eq!((&live["type"], &live["unit"]), (&json!("sampled"), &json!("bytes")));
        assert_eq!(live["samples"], json!([[0], [1, 2], [1, 3], [4]]));
        assert_eq!(
            (&live["weights"], &live["endValue"]),
            (&json!([101, 1000, 500, 50]), &json!(1651))
        );
        assert_eq!(file["profiles"][1]["unit"], "none");
    }

    #[test]
    fn nothing_is_a_profile_too() {
        let file: Value = serde_json::from_slice(&speedscope(&export(vec![])).unwrap()).unwrap();
        assert_eq!(
            (&file["profiles"][0]["endValue"], &file["shared"]["frames"]),
            (&json!(0), &json!([]))
        );
    }

    #[test]
    fn names_are_clean() {
        let bytes = speedscope(&evil()).unwrap();
        assert_clean(std::str::from_utf8(&bytes).unwrap());
        let file: Value = serde_json::from_slice(&bytes).unwrap();
        for frame in file["shared"]["frames"].as_array().unwrap() {
            assert_clean(frame["name"].as_str().unwrap());
        }
    }
}
