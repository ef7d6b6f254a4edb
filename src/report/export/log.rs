//! The raw log: every allocation and free as it was recorded, as text or JSON lines.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::json::plain;
use super::origin;
use crate::profile::model::{Event, StackFrame};
use crate::profile::reader::Reader;
use crate::profile::sampling::Weights;
use crate::report::human::clean;

/// The first line of the text.
pub const HEADER: &str = "        TIME  WHAT         BYTES      WEIGHT    TRACE  SITE\n";

/// Makes lines of events. What is known of a trace is looked up once.
#[derive(Debug)]
pub struct Log<'a> {
    reader: &'a Reader,
    weights: Weights,
    sites: HashMap<u32, String>,
    /// JSON of the whole stack instead of the frame that allocated.
    stacks: bool,
}

impl<'a> Log<'a> {
    /// Lines of this profile's events; with `stacks`, JSON lines have whole stacks.
    pub fn new(reader: &'a Reader, stacks: bool) -> Self {
        Self {
            reader,
            weights: reader.weights(),
            sites: HashMap::new(),
            stacks,
        }
    }

    /// Appends `TIME WHAT BYTES WEIGHT TRACE SITE`: seconds since the start (steps back in time included), `alloc` or
    /// `free` (`+alloc` and `+free` for a further piece of the block before), the bytes as the program asked for them, how
    /// many such objects the record stands for, the trace, and the line that allocated.
    pub fn text(&mut self, event: &Event, out: &mut String) {
        let what = match (event.is_free, event.continues) {
            (false, false) => "alloc",
            (true, false) => "free",
            (false, true) => "+alloc",
            (true, true) => "+free",
        };
        let sign = if event.micros < 0 { "-" } else { "" };
        let micros = event.micros.unsigned_abs();
        let time = format!("{sign}{}.{:06}", micros / 1_000_000, micros % 1_000_000);
        let weight = self.weights.of(event.size).objects;
        let reader = self.reader;
        let site = self.sites.entry(event.trace).or_insert_with(|| {
            let frames = reader.frames(event.trace).unwrap_or_default();
            frames.last().map_or_else(|| super::NO_STACK.to_owned(), site_text)
        });
        let _ = writeln!(
            out,
            "{time:>12}  {what:<6} {:>11} {weight:>11.4} {:>8}  {site}",
            event.size, event.trace
        );
    }

    /// Appends the event as one JSON object on a line of its own.
    ///
    /// # Errors
    /// None in practice: it is made of plain data.
    pub fn json(&mut self, event: &Event, out: &mut String) -> serde_json::Result<()> {
        let mut line = json!({
            "event": event.number,
            "at_micros": event.micros,
            "what": if event.is_free { "free" } else { "alloc" },
            "bytes": event.size,
            "weight": self.weights.of(event.size).objects,
            "trace": event.trace,
        });
        if event.continues {
            line["continues"] = true.into();
        }
        let text = plain(&line)?;
        let site = match self.sites.get(&event.trace) {
            Some(site) => site,
            None => {
                let site = self.site_json(event.trace)?;
                self.sites.entry(event.trace).or_insert(site)
            }
        };
        // Both are objects: the second goes on where the first ends.
        out.push_str(text.trim_end_matches('}'));
        out.push_str(site);
        out.push('\n');
        Ok(())
    }

    /// The rest of the object, which is the same for all events of a trace: `,"file":…}`.
    fn site_json(&self, trace: u32) -> serde_json::Result<String> {
        let mut rest = json!({});
        if let Some(sidecar) = self.reader.sidecar() {
            let origin = origin(sidecar, trace);
            rest["domain"] = json!(origin.domain);
            rest["thread"] = json!(origin.thread);
            rest["thread_name"] = json!(origin.thread_name);
        }
        let frames = self.reader.frames(trace).unwrap_or_default();
        if self.stacks {
            rest["stack"] = frames.iter().map(frame_json).collect();
        } else if let Some(frame) = frames.last() {
            for (key, value) in [
                ("file", json!(frame.file)),
                ("line", json!(frame.line)),
                ("function", json!(frame.function)),
            ] {
                rest[key] = value;
            }
        }
        let text = plain(&rest)?;
        Ok(if text == "{}" {
            "}".to_owned()
        } else {
            text.replacen('{', ",", 1)
        })
    }
}

fn site_text(frame: &StackFrame<'_>) -> String {
    let file = clean(&frame.file);
    match frame.function {
        Some(function) => format!("{file}:{} {}", frame.line, clean(function)),
        None => format!("{file}:{}", frame.line),
    }
}

fn frame_json(frame: &StackFrame<'_>) -> Value {
    json!({"file": frame.file, "line": frame.line, "function": frame.function})
}
