//! `/metrics`: numbers in Prometheus' text format, version 0.0.4.
//!
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>. The number of series is bounded: so many processes, each with so
//! many allocating lines.

use super::heap::Site;
use super::served::{Attached, Served, Set, lock};
use crate::profile::interval;
use crate::profile::model::Live;
use crate::report::human::clean;
use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::UNIX_EPOCH;

/// The content type.
pub const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Longer values of labels are cut, in characters.
const MAX_LABEL: usize = 200;

/// Name, type and help of a family of numbers.
struct Family(&'static str, &'static str, &'static str);

/// Each of a process, with hooks or without.
const ATTACHED: Family = Family("pyheap_attached", "gauge", "Whether the process is attached to.");
const INFO: Family = Family("pyheap_process_info", "gauge", "What the process is.");
const LIVE: Family = Family(
    "pyheap_live_bytes",
    "gauge",
    "Bytes alive of what was allocated since the attach, estimated from samples.",
);
const LOW: Family = Family(
    "pyheap_live_bytes_low",
    "gauge",
    "Lower limit of the 95 % interval of pyheap_live_bytes.",
);
const HIGH: Family = Family(
    "pyheap_live_bytes_high",
    "gauge",
    "Upper limit of the 95 % interval of pyheap_live_bytes.",
);
const OBJECTS: Family = Family(
    "pyheap_live_objects",
    "gauge",
    "Objects alive of those allocated since the attach, estimated.",
);
const ALLOCATED: Family = Family(
    "pyheap_allocated_bytes_total",
    "counter",
    "Bytes allocated since the attach, estimated.",
);
const ALLOCATED_OBJECTS: Family = Family(
    "pyheap_allocated_objects_total",
    "counter",
    "Objects allocated since the attach, estimated.",
);
const SAMPLES: Family = Family("pyheap_samples_total", "counter", "Samples taken since the attach.");
const PERIOD: Family = Family("pyheap_period_bytes", "gauge", "Mean distance of samples.");
const SINCE: Family = Family(
    "pyheap_attached_timestamp_seconds",
    "gauge",
    "Since when allocations are seen, since 1970.",
);
const LOST: Family = Family(
    "pyheap_lost_total",
    "counter",
    "What was lost since the attach, by reason; see docs/format.md.",
);
const RSS: Family = Family(
    "pyheap_process_resident_bytes",
    "gauge",
    "Resident memory of the process.",
);
const SITE: Family = Family(
    "pyheap_site_live_bytes",
    "gauge",
    "Bytes alive by allocating line, of the largest lines.",
);

/// One process at a moment.
struct Seen {
    pid: String,
    served: Arc<Served>,
    attached: Option<Attached>,
    total: Live,
    period: u64,
    sampled: u64,
    sites: Vec<Site>,
}

impl Seen {
    fn of(served: Arc<Served>, sites: usize) -> Self {
        let attached = served.attached();
        let mut seen = Self {
            pid: served.id.pid.to_string(),
            served,
            attached,
            total: Live::default(),
            period: 1,
            sampled: 0,
            sites: Vec::new(),
        };
        if let Some(attached) = &seen.attached {
            let heap = lock(&attached.heap);
            (seen.total, seen.period, seen.sampled) = (heap.total(), heap.period(), heap.sampled());
            seen.sites = heap.sites(sites);
        }
        seen
    }
}

/// The text, with the `sites` largest lines of each process.
#[must_use]
pub fn metrics(set: &Set, sites: usize) -> String {
    let all: Vec<_> = set.all().into_iter().map(|served| Seen::of(served, sites)).collect();
    let mut out = String::new();
    head(
        &mut out,
        &Family("pyheap_build_info", "gauge", "The pyheap that answers."),
    );
    line(&mut out, "pyheap_build_info", &[("version", crate::VERSION)], 1);
    head(
        &mut out,
        &Family("pyheap_http_connections", "gauge", "Open connections."),
    );
    line(&mut out, "pyheap_http_connections", &[], set.open());
    let busy = Family(
        "pyheap_http_in_flight",
        "gauge",
        "Requests that are being answered, this one included.",
    );
    head(&mut out, &busy);
    line(&mut out, busy.0, &[], set.in_flight.load(Ordering::Relaxed));
    head(
        &mut out,
        &Family("pyheap_http_answers_total", "counter", "Answers, by status."),
    );
    for (status, count) in set.answers() {
        line(
            &mut out,
            "pyheap_http_answers_total",
            &[("status", &status.to_string())],
            count,
        );
    }
    each(&mut out, &INFO, &all, |seen, out| {
        let python = seen
            .attached
            .as_ref()
            .and_then(|attached| attached.facts.python.clone());
        let command = seen.served.command.join(" ");
        let labels = [
            ("pid", seen.pid.as_str()),
            ("command", &command),
            ("python", python.as_deref().unwrap_or("")),
        ];
        line(out, INFO.0, &labels, 1);
    });
    number(&mut out, &ATTACHED, &all, |seen| {
        Some(f64::from(u8::from(seen.attached.is_some())))
    });
    let attached: Vec<_> = all.into_iter().filter(|seen| seen.attached.is_some()).collect();
    let interval = |seen: &Seen| {
        let total = &seen.total;
        interval::of_bytes(total.bytes, total.bytes_variance, total.sampled, seen.period)
    };
    number(&mut out, &SINCE, &attached, |seen| {
        let since = seen.attached.as_ref()?.since.duration_since(UNIX_EPOCH).ok()?;
        Some(since.as_secs_f64())
    });
    number(&mut out, &LIVE, &attached, |seen| Some(seen.total.bytes));
    number(&mut out, &LOW, &attached, |seen| Some(interval(seen).low));
    number(&mut out, &HIGH, &attached, |seen| Some(interval(seen).high));
    number(&mut out, &OBJECTS, &attached, |seen| Some(seen.total.objects));
    number(&mut out, &ALLOCATED, &attached, |seen| Some(seen.total.alloc_bytes));
    number(&mut out, &ALLOCATED_OBJECTS, &attached, |seen| {
        Some(seen.total.alloc_objects)
    });
    number(&mut out, &SAMPLES, &attached, |seen| Some(seen.sampled as f64));
    number(&mut out, &PERIOD, &attached, |seen| Some(seen.period as f64));
    number(&mut out, &RSS, &attached, |seen| {
        Some(seen.attached.as_ref()?.memory?.rss as f64)
    });
    each(&mut out, &LOST, &attached, |seen, out| {
        let losses = seen.attached.iter().flat_map(|attached| &attached.losses.0);
        for (reason, count) in losses {
            line(out, LOST.0, &[("pid", &seen.pid), ("reason", reason)], count);
        }
    });
    each(&mut out, &SITE, &attached, |seen, out| {
        // Names that differ behind the cut are one series.
        let mut series: BTreeMap<String, f64> = BTreeMap::new();
        for site in &seen.sites {
            let frame = &site.frame;
            let at = frame.line.to_string();
            let names = [
                ("pid", seen.pid.as_str()),
                ("file", &frame.file),
                ("line", &at),
                ("function", &frame.function),
            ];
            *series.entry(labels(&names)).or_default() += site.live.bytes;
        }
        for (labels, bytes) in series {
            let _ = writeln!(out, "{}{labels} {bytes}", SITE.0);
        }
    });
    out
}

fn head(out: &mut String, Family(name, kind, help): &Family) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn each(out: &mut String, family: &Family, all: &[Seen], write: impl Fn(&Seen, &mut String)) {
    head(out, family);
    all.iter().for_each(|seen| write(seen, out));
}

fn number(out: &mut String, family: &Family, all: &[Seen], value: impl Fn(&Seen) -> Option<f64>) {
    each(out, family, all, |seen, out| {
        if let Some(value) = value(seen) {
            line(out, family.0, &[("pid", &seen.pid)], value);
        }
    });
}

fn line(out: &mut String, name: &str, of: &[(&str, &str)], value: impl Display) {
    let _ = writeln!(out, "{name}{} {value}", labels(of));
}

fn labels(of: &[(&str, &str)]) -> String {
    let each = of.iter().map(|(label, text)| {
        let cut: String = text.chars().take(MAX_LABEL).collect();
        format!("{label}=\"{}\"", clean(&cut).replace('\\', "\\\\").replace('"', "\\\""))
    });
    let all: Vec<_> = each.collect();
    if all.is_empty() {
        String::new()
    } else {
        format!("{{{}}}", all.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_one_whatever_is_in_it() {
        let mut out = String::new();
        let evil = "a\"b\\c\nd\u{202e}";
        line(&mut out, "x", &[("file", evil), ("n", "1")], 1.5);
        assert_eq!(out, "x{file=\"a\\\"b\\\\c\\\\nd\\\\u{202e}\",n=\"1\"} 1.5\n");
        let mut out = String::new();
        line(&mut out, "x", &[("file", &"é".repeat(1000))], 1);
        assert_eq!(out.chars().filter(|c| *c == 'é').count(), MAX_LABEL);
    }

    #[test]
    fn without_a_process_there_are_heads_only() {
        let text = metrics(&Set::default(), 10);
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(lines.count(), 3, "{text}");
    }
}
