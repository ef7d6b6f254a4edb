//! What has changed between two states: of one recording, or of two.

use std::collections::HashMap;
use std::fmt::Write;

use serde::Serialize;

use super::TraceUsage;
use super::human::{bytes, count};
use super::top::{GroupBy, Site, TopRow, top};

/// How a group has changed. Sizes are estimates; margins are half the width of the 95 % interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiffRow {
    /// Live bytes now.
    pub size: f64,
    /// Bytes that have been added; negative if there are fewer.
    pub size_diff: f64,
    /// Margin of `size_diff`.
    pub size_diff_margin: f64,
    /// Live objects now.
    pub count: f64,
    /// Objects that have been added.
    pub count_diff: f64,
    /// Margin of `count_diff`.
    pub count_diff_margin: f64,
    /// What the group is.
    pub site: Site,
}

/// The change of each group that has any, the largest first. `moved` holds for each trace the variance of its change, where
/// blocks that are in both states do not count; without it the states are taken as independent.
pub fn diff(
    old: &[TraceUsage<'_>],
    new: &[TraceUsage<'_>],
    moved: Option<&[TraceUsage<'_>]>,
    by: GroupBy,
    cumulative: bool,
) -> Vec<DiffRow> {
    let cumulative = cumulative && by != GroupBy::Trace;
    let mut groups: HashMap<Site, [Option<TopRow>; 3]> = HashMap::new();
    let states = [old, new, moved.unwrap_or_default()];
    for (place, state) in states.into_iter().enumerate() {
        for row in top(state, by, cumulative, None) {
            let site = row.site.clone();
            groups.entry(site).or_default()[place] = Some(row);
        }
    }
    let mut rows: Vec<_> = groups
        .into_iter()
        .map(|(site, [old, new, change])| {
            let of = |row: &Option<TopRow>, value: fn(&TopRow) -> f64| row.as_ref().map_or(0.0, value);
            let difference = |value| of(&new, value) - of(&old, value);
            let margin = |value| match moved {
                Some(_) => of(&change, value),
                None => of(&new, value).hypot(of(&old, value)),
            };
            DiffRow {
                site,
                size: of(&new, |row| row.live_bytes),
                size_diff: difference(|row| row.live_bytes),
                size_diff_margin: margin(|row| row.live_bytes_margin),
                count: of(&new, |row| row.live_objects),
                count_diff: difference(|row| row.live_objects),
                count_diff_margin: margin(|row| row.live_objects_margin),
            }
        })
        .filter(|row| row.size_diff.abs() >= 0.5 || row.count_diff.abs() >= 0.5)
        .collect();
    rows.sort_by(|a, b| {
        let order = b.size_diff.abs().total_cmp(&a.size_diff.abs());
        order.then(b.size.total_cmp(&a.size)).then_with(|| a.site.cmp(&b.site))
    });
    rows
}

/// `+1.5 MiB`, `-3 B`, `0 B`.
fn signed(value: f64, text: impl Fn(f64) -> String) -> String {
    let sign = match value {
        v if v >= 0.5 => "+",
        v if v <= -0.5 => "-",
        _ => "",
    };
    format!("{sign}{}", text(value.abs()))
}

/// A signed number of bytes.
pub fn signed_bytes(value: f64) -> String {
    signed(value, bytes)
}

/// The table of the first `limit` rows.
pub fn render(rows: &[DiffRow], limit: usize) -> String {
    let mut text = String::new();
    if rows.is_empty() {
        return text;
    }
    let _ = writeln!(
        text,
        "{:>11} {:>10} {:>11} {:>10}  SITE",
        "CHANGE", "± 95 %", "OBJECTS", "LIVE NOW"
    );
    for row in rows.iter().take(limit) {
        let _ = writeln!(
            text,
            "{:>11} {:>10} {:>11} {:>10}  {}",
            signed_bytes(row.size_diff),
            bytes(row.size_diff_margin),
            signed(row.count_diff, count),
            bytes(row.size),
            row.site.text(),
        );
        for caller in row.site.stack.iter().rev().skip(1) {
            let _ = writeln!(text, "{:47}< {}", "", caller.text());
        }
    }
    if rows.len() > limit {
        let _ = writeln!(text, "{} more", count((rows.len() - limit) as f64));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::model::{Live, StackFrame};

    fn usage(index: u32, line: u32, bytes: f64, variance: f64) -> TraceUsage<'static> {
        let frame = StackFrame {
            file: "a.py".into(),
            line,
            function: Some("f"),
        };
        let live = Live {
            bytes,
            objects: bytes / 100.0,
            bytes_variance: variance,
            ..Live::default()
        };
        TraceUsage {
            index,
            frames: Some(vec![frame]),
            live,
        }
    }

    #[test]
    fn changes_with_their_margins() {
        let old = [
            usage(1, 5, 1000.0, 9.0),
            usage(2, 6, 500.0, 0.0),
            usage(3, 7, 200.0, 0.0),
        ];
        let new = [
            usage(1, 5, 400.0, 16.0),
            usage(3, 7, 200.0, 0.0),
            usage(4, 8, 9000.0, 0.0),
        ];
        let rows = diff(&old, &new, None, GroupBy::Line, false);
        let short: Vec<_> = rows
            .iter()
            .map(|row| (row.site.line.unwrap(), row.size_diff, row.count_diff))
            .collect();
        assert_eq!(short, [(8, 9000.0, 90.0), (5, -600.0, -6.0), (6, -500.0, -5.0)]);
        assert_eq!(rows[1].size_diff_margin, 1.96 * 5.0);
        let moved = [usage(1, 5, 1400.0, 4.0)];
        assert_eq!(
            diff(&old, &new, Some(&moved), GroupBy::Line, false)[1].size_diff_margin,
            1.96 * 2.0
        );
        assert!(render(&rows, 2).contains("     -600 B       10 B          -6      400 B  a.py:5 f\n1 more\n"));
    }
}
