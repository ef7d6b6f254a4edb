//! Everything that is known at a moment, as one JSON object: for scripts.
//!
//! Names are as they are in the profile, the rest is as in the CSV: estimates that are not rounded. `stack` has places in
//! `frames`, outermost first.

use serde_json::{Value, json};

use super::{Export, Numbering};
use crate::profile::model::StackFrame;
use crate::report::human::is_unsafe;

/// Version of the object. New fields leave it as it is.
const FORMAT: u32 = 1;

/// The object, and a newline.
///
/// # Errors
/// None in practice: it is made of plain data.
pub fn json<'a>(export: &Export<'a>) -> serde_json::Result<String> {
    let mut numbering = Numbering::new();
    let mut frames = Vec::new();
    let mut number = |frame: &StackFrame<'a>| {
        let (number, is_new) = numbering.number(frame.clone());
        if is_new {
            frames.push(json!({"file": frame.file, "line": frame.line, "function": frame.function}));
        }
        number
    };
    let traces: Vec<_> = export
        .traces
        .iter()
        .map(|trace| {
            let live = &trace.live;
            json!({
                "trace": trace.index,
                "live_bytes": live.bytes,
                "live_bytes_margin": live.bytes_margin(),
                "live_objects": live.objects,
                "live_objects_margin": live.objects_margin(),
                "allocated_bytes": live.alloc_bytes,
                "allocated_objects": live.alloc_objects,
                "samples": live.sampled,
                "domain": trace.origin.domain,
                "thread": trace.origin.thread,
                "thread_name": trace.origin.thread_name,
                "stack": trace.frames.iter().map(&mut number).collect::<Vec<_>>(),
            })
        })
        .collect();
    let total = &export.total;
    let object = json!({
        "pyheap_export": FORMAT,
        "exporter": crate::VERSION,
        "name": export.name,
        "start_seconds": export.start.as_secs_f64(),
        "at_seconds": export.at.as_secs_f64(),
        "period_bytes": export.period_bytes,
        "target": export.facts,
        "losses": export.losses,
        "warnings": export.warnings,
        "total": {
            "live_bytes": total.bytes,
            "live_bytes_margin": total.bytes_margin(),
            "live_objects": total.objects,
            "live_objects_margin": total.objects_margin(),
            "allocated_bytes": total.alloc_bytes,
            "allocated_objects": total.alloc_objects,
            "samples": total.sampled,
        },
        "frames": frames,
        "traces": traces,
    });
    Ok(plain(&object)? + "\n")
}

/// JSON on one line in which every character that a terminal or a browser might obey is written as `\u….`. Outside of
/// strings there is none, so nothing is changed in what the text means.
///
/// # Errors
/// When the value cannot be JSON, which plain data always can.
pub(in crate::report) fn plain(value: &Value) -> serde_json::Result<String> {
    let text = serde_json::to_string(value)?;
    if !text.contains(|c| is_unsafe(c) || matches!(c, '<' | '>' | '&')) {
        return Ok(text);
    }
    let mut out = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        if is_unsafe(c) || matches!(c, '<' | '>' | '&') {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            out.push(c);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{EVIL, assert_clean, evil, sample};
    use super::*;

    #[test]
    fn numbers_and_stacks() {
        let text = json(&sample()).unwrap();
        let object: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(object["total"]["live_bytes"], 1650.75);
        assert_eq!(
            (&object["at_seconds"], &object["period_bytes"]),
            (&json!(10.0), &json!(131_072))
        );
        let trace = &object["traces"][1];
        assert_eq!(
            (&trace["live_bytes"], &trace["live_bytes_margin"]),
            (&json!(1000.0), &json!(196.0))
        );
        assert_eq!(trace["stack"], json!([0, 1]));
        assert_eq!(
            object["frames"][1],
            json!({"file": "leak.py", "line": 7, "function": "grow"})
        );
        assert_eq!(object["traces"][0]["stack"], json!([]));
        assert_eq!(object["frames"][3]["function"], Value::Null);
    }

    #[test]
    fn names_are_harmless_and_whole() {
        let text = json(&evil()).unwrap();
        assert_clean(&text);
        assert_eq!((text.lines().count(), text.contains('<')), (1, false));
        let object: Value = serde_json::from_str(&text).unwrap();
        for (place, name) in EVIL.into_iter().enumerate() {
            let trace = &object["traces"][place];
            let frame = &object["frames"][trace["stack"][1].as_u64().unwrap() as usize];
            assert_eq!((&frame["file"], &trace["thread_name"]), (&json!(name), &json!(name)));
        }
    }
}
