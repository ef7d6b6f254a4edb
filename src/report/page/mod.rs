//! The report page: one HTML file that answers, needs nothing else, and lets its reader choose a range of time that
//! everything in it follows.
//!
//! What is in the page is described in `docs/report.md`. The numbers travel as sums at moments ([`series`]), so that what is
//! shown for a range is what `pyheap top --at` and `pyheap diff` say of it. All names come from the target: they are in a
//! block of JSON in which nothing looks like HTML, the script shows them as text only, and the page's policy lets no other
//! script run and nothing be loaded, even if both failed.

pub mod clock;
pub mod collect;
mod facts;
pub mod series;
pub mod stacks;
mod types;
mod verdict;

use std::collections::HashMap;

use serde_json::{Value, json};

use super::base64::base64;
use super::export::json::plain;
use super::info::Info;
use super::leaks::Report;
use crate::profile::reader::{ReadError, Reader};
use crate::profile::sidecar::Sidecar;
use crate::reader::limits_of;
use crate::report::filter::Counted;
use collect::{Collected, Kind, Limits, collect};
use series::put;
use stacks::shown;

const STYLE: &str = include_str!("assets/style.css");
const BODY: &str = include_str!("assets/body.html");
const SCRIPT: &str = concat!(
    "\"use strict\";\n(() => {\n",
    include_str!("assets/data.js"),
    include_str!("assets/interval.js"),
    include_str!("assets/words.js"),
    include_str!("assets/verdict.js"),
    include_str!("assets/time.js"),
    include_str!("assets/table.js"),
    include_str!("assets/types.js"),
    include_str!("assets/flame.js"),
    include_str!("assets/tree.js"),
    include_str!("assets/sizes.js"),
    include_str!("assets/main.js"),
    "})();\n"
);

/// SHA-256 of [`STYLE`] and [`SCRIPT`], by which the page's policy knows them. A test says what they must be.
const STYLE_HASH: &str = "Kb9OJq7mp/srhqzYYHHQQn30ihGSQjuZYzPLLDw/mdI=";
const SCRIPT_HASH: &str = "oOFyG389EnCFHPuQfeOF4aCXJvBytflsGI226oXdXs8=";

/// Bytes of [`encode`] on a page; four thirds of that are written.
const MAX_BLOB: usize = 5_600_000;
/// So often it is tried again with less, until they suffice.
const ATTEMPTS: usize = 4;
/// Threads with a name on a page.
const MAX_THREADS: usize = 500;
/// Facts on a page.
const MAX_FACTS: usize = 100;

/// The page of a recording, or of what counts of it.
///
/// # Errors
/// When the events cannot be read. Damage is no error; the page tells of it.
pub fn page(counted: &Counted<'_>, verdict: &Report, info: &Info) -> Result<String, ReadError> {
    let reader = counted.reader();
    let data = data(counted, verdict, info, Limits::default())?;
    // Plain data always can be JSON.
    let data = plain(&data).unwrap_or_default();
    let title = stacks::shown(&name(reader)).replace('&', "&amp;").replace('<', "&lt;");
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-{SCRIPT_HASH}'; \
         style-src 'sha256-{STYLE_HASH}'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}: heap report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{BODY}\
         <script type=\"application/json\" id=\"data\">{data}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    ))
}

/// What to call a recording: its filebase without folders.
fn name(reader: &Reader) -> String {
    let base = reader.names().base();
    base.file_name()
        .unwrap_or(base.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// All that the script knows.
fn data(counted: &Counted<'_>, report: &Report, info: &Info, limits: Limits) -> Result<Value, ReadError> {
    let reader = counted.reader();
    let (mut collected, threads, blob) = collected(counted, &verdict::leaking_traces(report), limits)?;
    let sites = verdict::sites(report, &mut collected);
    let types = types::types(reader, &mut collected)?;
    let clock = collected.clock;
    let seconds = |micros: u64| micros as f64 / 1e6;
    Ok(json!({
        "name": shown(&name(reader)),
        "version": crate::VERSION,
        "verdict": {
            "word": report.verdict,
            "long_enough": report.is_long_enough,
            "lines": verdict::lines(report),
            "notes": report.notes.iter().map(|note| shown(note)).collect::<Vec<_>>(),
            "sites": sites,
            "leaking": report.leaking_sites,
        },
        "clock": {"width": seconds(clock.width), "last": clock.last, "end": seconds(clock.end)},
        "start": info.start_seconds,
        "period": reader.period_bytes(),
        "has_functions": reader.sidecar().is_some(),
        "strings": collected.stacks.names,
        "frames": collected.stacks.frames.iter().flat_map(|(file, line, function)| [*file, *line, *function]).collect::<Vec<u32>>(),
        "threads": threads.names,
        "cells": collected.groups.iter().map(|group| group.series.cell_count()).chain(collected.classes.iter().map(|(_, series)| series.cell_count())).sum::<usize>(),
        "blob": base64(&blob),
        "types": types,
        "memory": facts::memory(reader.sidecar(), clock.end),
        "limit": report.limit.as_ref().map(|limit| limit.limit_bytes),
        "facts": info.lines().iter().take(MAX_FACTS).map(|(name, value)| json!([name, shown(value)])).collect::<Vec<_>>(),
        "unknown": facts::unknown(reader, report, info, &collected),
    }))
}

/// Names of threads by number; 0 is none, several, or one too many.
#[derive(Debug, Default)]
struct Threads {
    names: Vec<String>,
    numbers: HashMap<u32, u64>,
}

impl Threads {
    fn number(&mut self, sidecar: &Sidecar, trace: u32) -> u64 {
        let origins = sidecar.origins.get(&trace).map_or(&[][..], Vec::as_slice);
        let Some(thread) = origins
            .first()
            .map(|origin| origin.thread)
            .filter(|thread| *thread != 0)
        else {
            return 0;
        };
        if origins.iter().any(|origin| origin.thread != thread) {
            return 0;
        }
        if let Some(number) = self.numbers.get(&thread) {
            return *number;
        }
        if self.names.len() == MAX_THREADS {
            return 0;
        }
        let id = thread.to_string();
        let name = sidecar
            .threads
            .get(&thread)
            .map_or(id.clone(), |name| format!("{name} ({id})"));
        self.names.push(shown(&name));
        let number = self.names.len() as u64;
        self.numbers.insert(thread, number);
        number
    }
}

/// What there is room for: less and less, until it is small enough.
fn collected(
    counted: &Counted<'_>,
    first: &[u32],
    mut limits: Limits,
) -> Result<(Collected, Threads, Vec<u8>), ReadError> {
    let mut attempts = ATTEMPTS;
    loop {
        let collected = collect(counted, first, limits)?;
        let mut threads = Threads::default();
        let blob = encode(&collected, counted.reader().sidecar(), &mut threads);
        attempts -= 1;
        if blob.len() <= MAX_BLOB || attempts == 0 {
            return Ok((collected, threads, blob));
        }
        limits = limits.scaled(0.9 * MAX_BLOB as f64 / blob.len() as f64);
    }
}

/// The tree, the groups and the classes of sizes, as bytes: [`stacks`] and [`series`] tell how.
fn encode(collected: &Collected, sidecar: Option<&Sidecar>, threads: &mut Threads) -> Vec<u8> {
    let mut out = Vec::new();
    collected.stacks.encode(&mut out);
    put(&mut out, collected.groups.len() as u64);
    for group in &collected.groups {
        let thread = match (group.kind, sidecar) {
            (Kind::Stack, Some(sidecar)) => threads.number(sidecar, group.trace),
            _ => 0,
        };
        let kind = match group.kind {
            Kind::Stack => 0,
            Kind::Line => 1,
            Kind::Rest => 2,
        };
        for value in [kind, u64::from(group.node), thread, u64::from(group.members)] {
            put(&mut out, value);
        }
        group.series.encode(&mut out);
    }
    put(&mut out, collected.classes.len() as u64);
    for (class, series) in &collected.classes {
        let (low, high) = limits_of(*class);
        put(&mut out, low);
        put(&mut out, high);
        series.encode(&mut out);
    }
    out
}

#[cfg(test)]
mod tests;
