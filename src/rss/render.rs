//! The table for people.

use super::{Group, Report};
use crate::attach::frozen::Cost;
use crate::report::human;
use std::fmt::Write;
use std::time::Duration;

/// Size classes that are named.
const CLASSES: usize = 5;
/// Files that are named.
const FILES: usize = 5;
/// What copying a page costs the process, in seconds, as measured: docs/rss.md.
const COPY_SECONDS: f64 = 2.8e-6;
/// Less than this part of all is not worth a word.
const WORTH: f64 = 0.05;

/// All of it.
#[must_use]
pub fn render(report: &Report) -> String {
    let all = report.rss_bytes as f64;
    let mut text = format!(
        "{}process {}: Python {}, {} {}{}\n\n",
        if report.core { "the core file of " } else { "" },
        report.pid,
        report.python,
        human::bytes(all),
        if report.core { "written to" } else { "resident" },
        if report.frozen { ", read from a frozen copy" } else { "" }
    );
    for group in Group::ALL {
        let rows: Vec<_> = report
            .rows
            .iter()
            .filter(|row| row.group == group && row.bytes > 0)
            .collect();
        let sum: u64 = rows.iter().map(|row| row.bytes).sum();
        line(&mut text, group.name(), sum, all);
        for row in rows {
            line(&mut text, &format!("  {}", row.what), row.bytes, all);
        }
    }
    line(&mut text, "in all", report.rss_bytes, all);
    text.push('\n');
    let _ = writeln!(
        text,
        "verdict: {} ({} of {}, {})",
        report.verdict.word.name(),
        human::bytes(report.verdict.bytes as f64),
        human::bytes(all),
        human::share(report.verdict.bytes as f64, all)
    );
    text += &pinned(report);
    text += &files(report);
    text += &notes(report);
    text
}

fn line(text: &mut String, what: &str, bytes: u64, all: f64) {
    let _ = writeln!(
        text,
        "{what:<52} {:>10} {:>7}",
        human::bytes(bytes as f64),
        human::share(bytes as f64, all)
    );
}

/// Which size classes keep arenas from being given back.
fn pinned(report: &Report) -> String {
    let found = &report.pymalloc;
    let free = found.free_in_pools + found.free_pools;
    let mut text = String::new();
    if (free as f64) < WORTH * report.rss_bytes as f64 {
        return text;
    }
    let _ = writeln!(
        text,
        "pymalloc has {} arenas, {} of them less than half in use",
        found.arenas, found.sparse_arenas
    );
    let mut classes: Vec<_> = found.classes.iter().collect();
    classes.sort_by_key(|class| std::cmp::Reverse(class.free_bytes + class.pinned_bytes));
    for class in classes.into_iter().take(CLASSES) {
        let _ = writeln!(
            text,
            "  blocks of {:>3} bytes: {} in use, {} free in their pools; they are in {} of those arenas",
            class.size,
            human::count(class.blocks as f64),
            human::bytes(class.free_bytes as f64),
            class.sparse_arenas
        );
    }
    text
}

fn files(report: &Report) -> String {
    let mut text = String::new();
    let large = |bytes: u64| bytes as f64 >= WORTH * report.rss_bytes as f64;
    for file in report.files.iter().filter(|file| large(file.bytes)).take(FILES) {
        let _ = writeln!(
            text,
            "  {} of {}",
            human::bytes(file.bytes as f64),
            human::clean(&file.path)
        );
    }
    if text.is_empty() {
        text
    } else {
        format!("files:\n{text}")
    }
}

fn notes(report: &Report) -> String {
    let mut text = String::new();
    if report.malloc.is_none() {
        text += "the C library is not glibc: what of its heap is free is not known\n";
    }
    if report.not_looked_at > 0 {
        let _ = writeln!(
            text,
            "{} of address space was too much to look at: its memory is counted as nobody's",
            human::bytes(report.not_looked_at as f64)
        );
    }
    if let Some(cost) = &report.cost {
        text += &copy(cost);
    }
    text
}

/// What a frozen copy has cost the process, in one line.
#[must_use]
pub fn copy(cost: &Cost) -> String {
    let ms = |nanos: u64| Duration::from_nanos(nanos).as_secs_f64() * 1e3;
    let copied = cost.copied_bytes.map_or_else(String::new, |copied| {
        format!(
            " and {} copied for it (some {:.1} ms of its time)",
            human::bytes(copied as f64),
            copied as f64 / 4096.0 * COPY_SECONDS * 1e3
        )
    });
    format!(
        "the frozen copy: one thread stood still for {:.1} ms at most ({:.1} predicted); it lived for {:.0} ms, with {} page faults in the process{copied}\n",
        ms(cost.paused_nanos),
        ms(cost.predicted_nanos),
        ms(cost.lived_nanos),
        human::count(cost.faults as f64)
    )
}
