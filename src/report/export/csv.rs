//! A table with a row for each trace, for spreadsheets and data frames (RFC 4180, UTF-8).
//!
//! Numbers are estimates with all their decimals, margins are half the width of the 95 % interval. Nothing is rounded and
//! no trace is joined with another, so a sum over any rows is what pyheap itself says of them.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::Export;
use crate::profile::model::StackFrame;
use crate::report::human::clean;

const HEADER: &str = "trace,live_bytes,live_bytes_margin,live_objects,live_objects_margin,allocated_bytes,\
                      allocated_objects,samples,domain,thread,thread_name,file,line,function,stack\r\n";

/// The table. `file`, `line` and `function` are those of the frame that allocated; `stack` is all of them, outermost
/// first, with ` > ` between.
pub fn csv(export: &Export<'_>) -> String {
    let mut text = HEADER.to_owned();
    for trace in &export.traces {
        let live = &trace.live;
        let _ = write!(
            text,
            "{},{},{},{},{},{},{},{},{},{},{},",
            trace.index,
            live.bytes,
            live.bytes_margin(),
            live.objects,
            live.objects_margin(),
            live.alloc_bytes,
            live.alloc_objects,
            live.sampled,
            trace.origin.domain.unwrap_or_default(),
            trace.origin.thread.map(|thread| thread.to_string()).unwrap_or_default(),
            cell(trace.origin.thread_name.unwrap_or_default()),
        );
        match trace.frames.last() {
            Some(frame) => {
                let function = cell(frame.function.unwrap_or_default());
                let _ = write!(text, "{},{},{function},", cell(&frame.file), frame.line);
            }
            None => text.push_str(",,,"),
        }
        let stack: Vec<_> = trace.frames.iter().map(site).collect();
        text.push_str(&cell(&stack.join(" > ")));
        text.push_str("\r\n");
    }
    text
}

fn site(frame: &StackFrame<'_>) -> String {
    match frame.function {
        Some(function) => format!("{function} ({}:{})", frame.file, frame.line),
        None => format!("{}:{}", frame.file, frame.line),
    }
}

/// A text as one cell. A spreadsheet takes what begins with `=`, `+`, `-` or `@` for a formula and may run it, so such a
/// name gets a `'` in front.
fn cell(text: &str) -> Cow<'_, str> {
    let mut cell = clean(text);
    if cell.trim_start().starts_with(['=', '+', '-', '@']) {
        cell.to_mut().insert(0, '\'');
    }
    if cell.contains(['"', ',']) {
        cell = format!("\"{}\"", cell.replace('"', "\"\"")).into();
    }
    cell
}

#[cfg(test)]
mod tests {
    use super::super::tests::{EVIL, assert_clean, evil, sample};
    use super::*;

    #[test]
    fn a_row_for_each_trace() {
        let text = csv(&sample());
        let rows: Vec<_> = text.split_terminator("\r\n").collect();
        assert_eq!(rows.len(), 5);
        assert_eq!(rows[0].split(',').count(), 15);
        assert_eq!(rows[1], "0,100.5,19.698,1.5,0.98,201,3,1,,,,,,,");
        assert_eq!(
            rows[2],
            "2,1000,196,10,0.98,2000,20,1,,,,leak.py,7,grow,main (app.py:3) > grow (leak.py:7)"
        );
    }

    #[test]
    fn names_stay_in_their_cell() {
        let text = csv(&evil());
        assert_clean(&text.replace("\r\n", ""));
        let rows: Vec<_> = text.split_terminator("\r\n").skip(1).collect();
        assert_eq!(rows.len(), EVIL.len());
        for row in rows {
            // Whatever is within quotes is one cell.
            let bare: String = row.split('"').step_by(2).collect();
            assert_eq!(bare.split(',').count(), 15, "{row}");
            assert!(!row.contains(",=") && !row.contains(",\"="));
        }
        assert_eq!(cell(EVIL[1]), "\"\"\"quo'ted\"\" & <b>\"");
        assert_eq!(cell("-c"), "'-c");
    }
}
