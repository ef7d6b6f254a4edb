//! Where live memory was allocated: traces grouped by line, function, file or whole stack, largest first.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use serde::Serialize;

use super::TraceUsage;
use super::human::{bytes, clean, count, share};
use super::types::{self, TypeRow, Types};
use crate::profile::interval::{self, Interval, MANY};
use crate::profile::model::{Live, StackFrame};
use crate::profile::sidecar::Sidecar;

/// Types of a row that are shown.
const SHOWN_TYPES: usize = 5;

/// What makes two traces one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupBy {
    /// File and line.
    #[default]
    Line,
    /// File and function.
    Function,
    /// File.
    File,
    /// The whole stack.
    Trace,
}

/// One row of the table. Sizes are estimates; margins are half the width of the 95 % interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TopRow {
    /// Live bytes.
    pub live_bytes: f64,
    /// Margin of `live_bytes`, by the normal approximation.
    pub live_bytes_margin: f64,
    /// Lower limit of the 95 % interval of `live_bytes`, exact where there are few samples.
    pub live_bytes_low: f64,
    /// Its upper limit.
    pub live_bytes_high: f64,
    /// Part of all live bytes, 0 to 1.
    pub share: f64,
    /// Live objects.
    pub live_objects: f64,
    /// Margin of `live_objects`.
    pub live_objects_margin: f64,
    /// Bytes allocated so far, freed ones included.
    pub allocated_bytes: f64,
    /// Objects allocated so far, freed ones included.
    pub allocated_objects: f64,
    /// Records that the estimate is made of.
    pub samples: u64,
    /// What the row stands for.
    pub site: Site,
    /// What the live objects are, if that was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub types: Vec<TypeRow>,
}

/// What a row stands for. `file` is missing where no stack is known.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Site {
    /// File name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Line, if the row is of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Function, if it is known and the same for all of the row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// The whole stack, outermost first, if the row is of one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<Site>,
    /// Name and number of the thread, if the row is of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// The type, if the row is of one.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

impl Site {
    fn new(frame: &StackFrame<'_>, by: GroupBy) -> Self {
        let function = frame.function.map(str::to_owned);
        let (line, function) = match by {
            GroupBy::Line | GroupBy::Trace => (Some(frame.line), function),
            GroupBy::Function => (None, function),
            GroupBy::File => (None, None),
        };
        Self {
            file: Some(frame.file.clone().into_owned()),
            line,
            function,
            ..Self::default()
        }
    }

    /// `file:line function`, on one line.
    pub(super) fn text(&self) -> String {
        if let Some(name) = self.thread.as_ref().or(self.kind.as_ref()) {
            return clean(name).into_owned();
        }
        let Some(file) = &self.file else {
            return "(no Python stack)".to_owned();
        };
        let mut text = clean(file).into_owned();
        if let Some(line) = self.line {
            let _ = write!(text, ":{line}");
        }
        if let Some(function) = &self.function {
            let _ = write!(text, " {}", clean(function));
        }
        text
    }
}

/// Groups traces. A trace counts for the frame that allocated, or if `cumulative` for every frame of its stack, once
/// each. Rows whose estimate is below half a byte are left out.
///
/// Without a `period` (in bytes; a profile of the original heapprof does not tell) all intervals are by the normal
/// approximation.
pub fn top(traces: &[TraceUsage<'_>], by: GroupBy, cumulative: bool, period: Option<u64>) -> Vec<TopRow> {
    let mut groups: HashMap<Site, Live> = HashMap::new();
    let mut total = 0.0;
    for trace in traces {
        total += trace.live.bytes;
        for site in sites(trace, by, cumulative) {
            groups.entry(site).or_default().add(&trace.live);
        }
    }
    rows(groups, total, period)
}

/// The rows that a trace counts for.
pub fn sites(trace: &TraceUsage<'_>, by: GroupBy, cumulative: bool) -> HashSet<Site> {
    let frames = trace.frames.as_deref().unwrap_or_default();
    let Some(innermost) = frames.last() else {
        return [Site::default()].into();
    };
    match by {
        GroupBy::Trace => {
            let mut site = Site::new(innermost, by);
            site.stack = frames.iter().map(|frame| Site::new(frame, by)).collect();
            [site].into()
        }
        _ if cumulative => frames.iter().map(|frame| Site::new(frame, by)).collect(),
        _ => [Site::new(innermost, by)].into(),
    }
}

/// The row by thread that a trace counts for.
pub fn thread_of(trace: &TraceUsage<'_>, sidecar: Option<&Sidecar>) -> Site {
    let origin = sidecar.map(|sidecar| super::export::origin(sidecar, trace.index));
    let thread = match origin.and_then(|origin| Some((origin.thread?, origin.thread_name))) {
        Some((number, Some(name))) => format!("{name} ({number})"),
        Some((number, None)) => number.to_string(),
        None => "(thread not known)".to_owned(),
    };
    Site {
        thread: Some(thread),
        ..Site::default()
    }
}

/// Groups traces by the thread that allocated; `period` as for [`top`].
pub fn by_thread(traces: &[TraceUsage<'_>], sidecar: Option<&Sidecar>, period: Option<u64>) -> Vec<TopRow> {
    let mut groups: HashMap<Site, Live> = HashMap::new();
    let mut total = 0.0;
    for trace in traces {
        total += trace.live.bytes;
        groups.entry(thread_of(trace, sidecar)).or_default().add(&trace.live);
    }
    rows(groups, total, period)
}

/// Groups what is alive of traces by its type; `period` as for [`top`].
pub fn by_type(traces: &[TraceUsage<'_>], types: &Types<'_>, period: Option<u64>) -> Vec<TopRow> {
    let groups = types.live(traces.iter().map(|trace| trace.index));
    let total = groups.values().map(|live| live.bytes).sum();
    let groups = groups.into_iter().map(|(name, live)| {
        let kind = Some(name.to_owned());
        (
            Site {
                kind,
                ..Site::default()
            },
            live,
        )
    });
    rows(groups.collect(), total, period)
}

/// Adds to rows what their live objects are; `sites` says which rows a trace counts for.
pub fn add_types(
    rows: &mut [TopRow],
    traces: &[TraceUsage<'_>],
    types: &Types<'_>,
    sites: impl Fn(&TraceUsage<'_>) -> HashSet<Site>,
) {
    let mut of_site: HashMap<Site, Vec<u32>> = HashMap::new();
    for trace in traces {
        for site in sites(trace) {
            of_site.entry(site).or_default().push(trace.index);
        }
    }
    for row in rows {
        row.types = types.rows(of_site.remove(&row.site).unwrap_or_default());
    }
}

fn rows(groups: HashMap<Site, Live>, total: f64, period: Option<u64>) -> Vec<TopRow> {
    let mut intervals = interval::Cache::default();
    let mut row = |(site, live): (Site, Live)| {
        let Interval { low, high } = limits(&mut intervals, &live, period);
        TopRow {
            live_bytes: live.bytes,
            live_bytes_margin: live.bytes_margin(),
            live_bytes_low: low,
            live_bytes_high: high,
            share: if total > 0.0 { live.bytes / total } else { 0.0 },
            live_objects: live.objects,
            live_objects_margin: live.objects_margin(),
            allocated_bytes: live.alloc_bytes,
            allocated_objects: live.alloc_objects,
            samples: live.sampled,
            site,
            types: Vec::new(),
        }
    };
    let mut rows: Vec<_> = groups
        .into_iter()
        .filter(|(_, live)| live.bytes >= 0.5)
        .map(&mut row)
        .collect();
    rows.sort_by(|a, b| b.live_bytes.total_cmp(&a.live_bytes).then_with(|| a.site.cmp(&b.site)));
    rows
}

/// The 95 % interval of live bytes.
fn limits(cache: &mut interval::Cache, live: &Live, period: Option<u64>) -> Interval {
    match period {
        Some(period) => cache.of_bytes(live.bytes, live.bytes_variance, live.sampled, period),
        None => Interval {
            low: (live.bytes - live.bytes_margin()).max(0.0),
            high: live.bytes + live.bytes_margin(),
        },
    }
}

/// An interval as people read it: `± 3.1 MiB` where it is even, else its two limits.
pub fn interval_text(value: f64, margin: f64, low: f64, high: f64, samples: u64) -> String {
    if samples >= MANY || high <= value {
        return format!("± {}", bytes(margin));
    }
    let (low, high) = (bytes(low), bytes(high));
    match (low.split_once(' '), high.split_once(' ')) {
        (Some((number, unit)), Some((_, other))) if unit == other => format!("{number} – {high}"),
        _ => format!("{low} – {high}"),
    }
}

/// The table of the first `limit` rows, with a last line on those that are left out. `total` is all that is alive.
pub fn render(rows: &[TopRow], limit: usize, total: &Live, cumulative: bool) -> String {
    let mut text = String::new();
    if rows.is_empty() {
        return text;
    }
    let _ = writeln!(
        text,
        "{:>10} {:>21} {:>6} {:>11}  SITE",
        "LIVE", "95 % INTERVAL", "SHARE", "OBJECTS"
    );
    for row in rows.iter().take(limit) {
        let _ = writeln!(
            text,
            "{:>10} {:>21} {:>6} {:>11}  {}",
            bytes(row.live_bytes),
            interval_text(
                row.live_bytes,
                row.live_bytes_margin,
                row.live_bytes_low,
                row.live_bytes_high,
                row.samples,
            ),
            share(row.live_bytes, total.bytes),
            count(row.live_objects),
            row.site.text(),
        );
        if !row.types.is_empty() {
            let _ = writeln!(text, "{:53}{}", "", types::line(&row.types, SHOWN_TYPES));
        }
        for caller in row.site.stack.iter().rev().skip(1) {
            let _ = writeln!(text, "{:53}< {}", "", caller.text());
        }
    }
    if rows.len() > limit {
        let rest = &rows[limit..];
        let _ = write!(text, "{} more", count(rest.len() as f64));
        if !cumulative {
            let _ = write!(text, " with {}", bytes(rest.iter().map(|row| row.live_bytes).sum()));
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(index: u32, frames: &[(&'static str, u32, &'static str)], bytes: f64) -> TraceUsage<'static> {
        let frames: Vec<_> = frames
            .iter()
            .map(|(file, line, function)| StackFrame {
                file: (*file).into(),
                line: *line,
                function: Some(*function),
            })
            .collect();
        let live = Live {
            bytes,
            objects: 1.0,
            bytes_variance: bytes * bytes,
            sampled: 1,
            ..Live::default()
        };
        TraceUsage {
            index,
            frames: Some(frames).filter(|frames| !frames.is_empty()),
            live,
        }
    }

    fn sample() -> Vec<TraceUsage<'static>> {
        vec![
            usage(1, &[("app.py", 1, "main"), ("a.py", 5, "f"), ("a.py", 5, "f")], 300.0),
            usage(2, &[("app.py", 2, "main"), ("a.py", 6, "f")], 400.0),
            usage(3, &[("app.py", 1, "main"), ("a.py", 9, "g")], 2000.0),
            usage(4, &[("app.py", 1, "main")], 0.2),
            usage(0, &[], 300.0),
        ]
    }

    fn short(by: GroupBy, cumulative: bool) -> Vec<(String, f64)> {
        top(&sample(), by, cumulative, Some(1000))
            .iter()
            .map(|row| (row.site.text(), row.live_bytes))
            .collect()
    }

    fn owned(rows: &[(&str, f64)]) -> Vec<(String, f64)> {
        rows.iter().map(|(text, bytes)| ((*text).to_owned(), *bytes)).collect()
    }

    #[test]
    fn by_what_allocated() {
        let lines = [
            ("a.py:9 g", 2000.0),
            ("a.py:6 f", 400.0),
            ("(no Python stack)", 300.0),
            ("a.py:5 f", 300.0),
        ];
        assert_eq!(short(GroupBy::Line, false), owned(&lines));
        let functions = [("a.py g", 2000.0), ("a.py f", 700.0), ("(no Python stack)", 300.0)];
        assert_eq!(short(GroupBy::Function, false), owned(&functions));
        assert_eq!(
            short(GroupBy::File, false),
            owned(&[("a.py", 2700.0), ("(no Python stack)", 300.0)])
        );
        assert_eq!(short(GroupBy::Trace, false).len(), 4);
    }

    #[test]
    fn cumulative_counts_a_recurring_line_once() {
        let files = [("app.py", 2700.2), ("a.py", 2700.0), ("(no Python stack)", 300.0)];
        assert_eq!(short(GroupBy::File, true), owned(&files));
        assert!(short(GroupBy::Line, true).contains(&("a.py:5 f".to_owned(), 300.0)));
    }

    #[test]
    fn the_table_is_aligned_and_says_what_it_leaves_out() {
        let mut total = Live::default();
        sample().iter().for_each(|trace| total.add(&trace.live));
        let rows = top(&sample(), GroupBy::Trace, false, Some(1000));
        assert_eq!(
            render(&rows, 2, &total, false),
            "      LIVE         95 % INTERVAL  SHARE     OBJECTS  SITE
   2.0 KiB        51 B – 8.5 KiB  66.7%           1  a.py:9 g
                                                     < app.py:1 main
     400 B        10 B – 4.1 KiB  13.3%           1  a.py:6 f
                                                     < app.py:2 main
2 more with 600 B
"
        );
        assert_eq!(render(&[], 2, &total, false), "");
    }
}
