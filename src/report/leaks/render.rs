//! The verdict in words: the first line is the answer.

use std::fmt::Write;
use std::time::Duration;

use super::memory::Forecast;
use super::{Frame, Overall, Report, Site, Verdict};
use crate::report::human::{Human, bytes, clean, count, share};
use crate::report::types;

/// Types of a site that are shown.
const SHOWN_TYPES: usize = 4;

/// How much is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// The answer, the worst sites, the process: for the end of a recording.
    Brief,
    /// That, and everything on each leak.
    Normal,
    /// And what is no leak.
    Verbose,
}

/// The first line: the answer.
pub fn headline(report: &Report) -> String {
    let leaks = leaks(report);
    let time = Human(Duration::from_secs_f64(report.elapsed_seconds));
    if !report.is_long_enough {
        return format!("too short: {time} do not tell what grows; record at least 30s");
    }
    match (report.verdict, leaks.first()) {
        (Overall::Leak, Some(worst)) => {
            let place = worst.own.as_ref().or(worst.stack.first());
            let place = place.map_or_else(|| "(no Python stack)".to_owned(), text);
            let all = bytes(report.leaking_bytes_per_min);
            let more = match report.leaking_sites {
                1 => String::new(),
                sites => format!("; {} sites leak {all} a minute in all", count(sites as f64)),
            };
            format!("leak: {place} grows by {} a minute{more}", estimate(worst))
        }
        (Overall::Native, _) => format!(
            "native: the process grows by {} a minute, and {} {} of it; the rest is {}, or holes in the heap",
            process_rate(report),
            holders(report),
            explained(report),
            if report.has_native {
                "memory that --native does not see"
            } else {
                "memory of C code"
            },
        ),
        (Overall::Fragmentation, _) => format!(
            "fragmentation: the process grows by {} a minute, as Python's heap has been that much larger meanwhile; what was freed \
             was not given back",
            process_rate(report),
        ),
        _ if !report.domains.is_empty() => format!(
            "no leak: nothing grows steadily beyond chance in {time}, in {}",
            report.domains.join(", ")
        ),
        _ => format!("no leak: nothing grows steadily beyond chance in {time}"),
    }
}

/// All of it, every line ended by a newline; at most `limit` sites.
pub fn render(report: &Report, detail: Detail, limit: usize) -> String {
    let mut text = headline(report) + "\n";
    let _ = writeln!(text, "{}", process(report));
    if let Some(forecast) = &report.limit {
        let _ = writeln!(text, "{}", hits(forecast));
    }
    let leaks = leaks(report);
    let shown = if detail == Detail::Brief { limit.min(3) } else { limit };
    if !leaks.is_empty() && (detail != Detail::Brief || leaks.len() > 1) {
        table(&mut text, &leaks, report.leaking_sites, shown, detail);
    }
    let others: Vec<&Site> = report
        .leaks
        .iter()
        .filter(|site| site.verdict != Verdict::Leak)
        .collect();
    if detail == Detail::Verbose && !others.is_empty() {
        let _ = writeln!(text, "no leaks:");
        table(&mut text, &others, others.len(), shown, detail);
    }
    for note in &report.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

fn leaks(report: &Report) -> Vec<&Site> {
    report
        .leaks
        .iter()
        .filter(|site| site.verdict == Verdict::Leak)
        .collect()
}

/// What is live and what the process does, on one line.
pub fn process(report: &Report) -> String {
    let mut out = String::new();
    let _ = write!(
        out,
        "live since the start {} ± {}",
        bytes(report.live_bytes),
        bytes(report.live_bytes_margin)
    );
    if let Some((first, last)) = report.rss_bytes {
        let _ = write!(out, "; RSS {} → {}", bytes(first as f64), bytes(last as f64));
    }
    if report.rss_growth_bytes.is_some() {
        let (rate, holders, explained) = (process_rate(report), holders(report), explained(report));
        let _ = write!(out, ", {rate} a minute, of which {holders} {explained}");
    }
    out
}

/// What it is that holds memory in these numbers, with its verb.
fn holders(report: &Report) -> String {
    match (&report.domains[..], report.has_native) {
        ([], false) => "Python's allocators hold".to_owned(),
        ([], true) => "Python's and native allocators hold".to_owned(),
        (only, _) => format!("the domains {} hold", only.join(", ")),
    }
}

/// `+48.0 MiB ± 9.1 MiB`.
fn process_rate(report: &Report) -> String {
    let minutes = report.elapsed_seconds / 60.0;
    let rate = report.rss_growth_bytes.unwrap_or(0.0) / minutes;
    let (low, high) = report.rss_ci95.unwrap_or_default();
    format!("{} ± {}", bytes(rate), bytes((high - low) / 2.0))
}

/// `12.0 MiB (25.0%)`.
fn explained(report: &Report) -> String {
    let minutes = report.elapsed_seconds / 60.0;
    let part = report.explained_bytes / minutes;
    match report.rss_growth_bytes {
        Some(whole) if whole > 0.0 && report.explained_bytes > 0.0 => {
            format!("{} ({})", bytes(part), share(report.explained_bytes.min(whole), whole))
        }
        _ => bytes(part),
    }
}

/// `12.3 MiB ± 1.0 MiB`.
fn estimate(site: &Site) -> String {
    let (low, high) = site.ci95;
    format!("{} ± {}", bytes(site.growth_bytes_per_min), bytes((high - low) / 2.0))
}

/// When the limit is hit.
pub fn hits(forecast: &Forecast) -> String {
    let source = if forecast.source == "cgroup" {
        "the cgroup's limit"
    } else {
        "the limit given"
    };
    let limit = format!(
        "limit: {} of {} used ({source})",
        bytes(forecast.used_bytes as f64),
        bytes(forecast.limit_bytes as f64)
    );
    match (forecast.seconds, forecast.ci95) {
        (Some(seconds), Some((low, Some(high)))) => {
            format!("{limit}, hit in {} ± {}", time(seconds), time((high - low) / 2.0))
        }
        (Some(seconds), Some((low, None))) => {
            format!("{limit}, hit in {} or later, not before {}", time(seconds), time(low))
        }
        _ => format!("{limit}, not hit at this rate"),
    }
}

/// A time to come, as precise as makes sense.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s if s < 3.0e8 => format!("{:.0} days", s / 86_400.0),
        _ => "years".to_owned(),
    }
}

/// The first `limit` of `sites`, of which there are `all`.
fn table(out: &mut String, sites: &[&Site], all: usize, limit: usize, detail: Detail) {
    let _ = writeln!(
        out,
        "{:>10} {:>10} {:>6} {:>10} {:>9} {:>6}  SITE",
        "A MINUTE", "± 95 %", "SHARE", "LIVE", "OBJECTS", "AGE"
    );
    for site in sites.iter().take(limit) {
        row(out, site);
        if detail != Detail::Brief {
            places(out, site, detail);
        }
    }
    let shown = sites.len().min(limit);
    if all > shown {
        let _ = writeln!(out, "{} more", count((all - shown) as f64));
    }
}

fn row(out: &mut String, site: &Site) {
    let (low, high) = site.ci95;
    let age = site
        .age_seconds
        .map_or_else(|| "-".to_owned(), |ages| format!("{:.0} s", ages.median));
    let what = match site.verdict {
        Verdict::Leak => "",
        Verdict::Plateau => "plateau: ",
        Verdict::Steady => "steady: ",
        Verdict::OneOff => "one-off: ",
    };
    let place = site.own.as_ref().or(site.stack.first());
    let _ = writeln!(
        out,
        "{:>10} {:>10} {:>6} {:>10} {:>9} {:>6}  {what}{}",
        bytes(site.growth_bytes_per_min),
        bytes((high - low) / 2.0),
        site.share.map_or_else(|| "-".to_owned(), |part| share(part, 1.0)),
        bytes(site.live_bytes),
        count(site.objects),
        age,
        place.map_or_else(|| "(no Python stack)".to_owned(), text),
    );
}

/// The allocating lines, and in detail the stack.
fn places(out: &mut String, site: &Site, detail: Detail) {
    let indent = " ".repeat(58);
    let shown = site.own.as_ref().or(site.stack.first());
    for line in &site.lines {
        if shown != Some(&line.frame) {
            let _ = writeln!(
                out,
                "{indent}{} a minute allocated at {}",
                bytes(line.growth_bytes_per_min),
                text(&line.frame)
            );
        }
    }
    if !site.types.is_empty() {
        let _ = writeln!(out, "{indent}{}", types::line(&site.types, SHOWN_TYPES));
    }
    if let Some(thread) = &site.thread {
        let _ = writeln!(out, "{indent}by thread {}", clean(thread));
    }
    if detail == Detail::Verbose {
        for caller in site.stack.iter().skip(1) {
            let _ = writeln!(out, "{indent}< {}", text(caller));
        }
    }
}

/// `file:line function`, on one line.
fn text(frame: &Frame) -> String {
    let mut text = clean(&frame.file).into_owned();
    if frame.line > 0 {
        let _ = write!(text, ":{}", frame.line);
    }
    if let Some(function) = frame.function.as_ref().filter(|function| **function != frame.file) {
        let _ = write!(text, " {}", clean(function));
    }
    text
}
