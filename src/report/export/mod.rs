//! What leaves pyheap: a profile at one moment in the formats of other tools.
//!
//! [`Export`] is what all of them are made of, and the only place here that asks the reader; the formats are pure
//! functions from it to bytes. Names come from the target and end up in terminals, browsers and spreadsheets, so each
//! format escapes them for the place where it is shown.
//!
//! Estimates are fractions and most formats hold whole numbers. Rounding each stack by itself would not average out: a
//! thousand stacks of one sample that stands for 1.58 objects would be 2,000 instead of 1,582. So it is the running sum
//! that is rounded: each value is off by less than one, and so is every total.

use std::collections::HashMap;
use std::time::Duration;

use crate::profile::facts::{Facts, Losses};
use crate::profile::model::{Live, StackFrame};
use crate::profile::reader::{LiveSet, ReadError, Reader};
use crate::profile::sidecar::Sidecar;
use pyheap_protocol::domain;

pub mod collapsed;
pub mod csv;
pub mod heapprof;
pub mod html;
pub mod json;
pub mod log;
pub mod pprof;
mod protobuf;
pub mod speedscope;
pub mod svg;
mod tree;

/// What stands in a stack's place where none is known.
pub const NO_STACK: &str = "(no Python stack)";

/// No total is above this, so that readers with signed numbers are not misled by a damaged file.
const LARGEST: f64 = (1u64 << 62) as f64;

/// A number that an export has for each stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Estimated live bytes.
    LiveBytes,
    /// Estimated live objects.
    LiveObjects,
    /// Estimated bytes allocated so far, freed ones included.
    AllocBytes,
    /// Estimated objects allocated so far, freed ones included.
    AllocObjects,
}

impl Metric {
    /// All of them; the one that most people want is the first.
    pub const ALL: [Self; 4] = [Self::LiveBytes, Self::LiveObjects, Self::AllocBytes, Self::AllocObjects];

    /// For people.
    pub fn title(self) -> &'static str {
        match self {
            Self::LiveBytes => "live bytes",
            Self::LiveObjects => "live objects",
            Self::AllocBytes => "allocated bytes",
            Self::AllocObjects => "allocated objects",
        }
    }

    /// Whether it counts bytes.
    pub fn is_bytes(self) -> bool {
        matches!(self, Self::LiveBytes | Self::AllocBytes)
    }

    /// Its value, not rounded.
    pub fn of(self, live: &Live) -> f64 {
        match self {
            Self::LiveBytes => live.bytes,
            Self::LiveObjects => live.objects,
            Self::AllocBytes => live.alloc_bytes,
            Self::AllocObjects => live.alloc_objects,
        }
    }
}

/// Where the allocations of a trace came from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin<'a> {
    /// Thread id, if it is known and the same for all.
    pub thread: Option<u32>,
    /// Name of that thread, if known.
    pub thread_name: Option<&'a str>,
    /// Name of the allocator domain, if it is known and the same for all.
    pub domain: Option<&'static str>,
}

/// One trace with what it holds.
#[derive(Debug, Clone)]
pub struct Trace<'a> {
    /// Its index in the profile, 0 if none was recorded.
    pub index: u32,
    /// Its frames, outermost first; empty if they are unknown.
    pub frames: Vec<StackFrame<'a>>,
    /// Thread and domain.
    pub origin: Origin<'a>,
    /// Estimates.
    pub live: Live,
}

/// A profile at one moment.
#[derive(Debug, Clone)]
pub struct Export<'a> {
    /// What to call it: its filebase without folders.
    pub name: String,
    /// Start of the recording, since 1970.
    pub start: Duration,
    /// The moment, since the start.
    pub at: Duration,
    /// Mean distance of samples in bytes, if known; 1 if every allocation was recorded.
    pub period_bytes: Option<u64>,
    /// Number of ranges in the sampling table.
    pub sampling_ranges: usize,
    /// What is known of the target.
    pub facts: Option<&'a Facts>,
    /// What was lost while recording.
    pub losses: Option<&'a Losses>,
    /// All traces together.
    pub total: Live,
    /// Traces in order of their stacks, so that those with a common beginning are neighbours.
    pub traces: Vec<Trace<'a>>,
    /// What the profile's reader has to say about damage, a line each.
    pub warnings: Vec<String>,
}

impl<'a> Export<'a> {
    /// The profile `at` a time since the start; `None` is its end. Reads all events.
    ///
    /// # Errors
    /// When a file cannot be read. Damage is no error: what is before it is used, and `warnings` tells.
    pub fn new(reader: &'a Reader, at: Option<Duration>) -> Result<Self, ReadError> {
        Self::of(reader, &reader.live_at(at)?)
    }

    /// The same of what somebody has counted, perhaps of some traces only.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(reader: &'a Reader, live: &LiveSet) -> Result<Self, ReadError> {
        let mut warnings = reader.warnings()?;
        if live.unmatched_frees > 0 {
            warnings.push(format!(
                "{} frees have no allocation in the file; they are ignored",
                live.unmatched_frees
            ));
        }
        let sidecar = reader.sidecar();
        let mut traces: Vec<_> = live
            .traces
            .iter()
            .map(|(index, live)| Trace {
                index: *index,
                frames: reader.frames(*index).unwrap_or_default(),
                origin: sidecar.map_or_else(Origin::default, |sidecar| origin(sidecar, *index)),
                live: *live,
            })
            .collect();
        traces.sort_by(|a, b| a.frames.cmp(&b.frames).then(a.index.cmp(&b.index)));
        let base = reader.names().base();
        Ok(Self {
            name: base
                .file_name()
                .unwrap_or(base.as_os_str())
                .to_string_lossy()
                .into_owned(),
            start: reader.start(),
            at: live.at,
            period_bytes: reader.period_bytes(),
            sampling_ranges: reader.sampling_table().ranges().len(),
            facts: sidecar.map(|sidecar| &sidecar.header.facts),
            losses: sidecar.map(|sidecar| &sidecar.losses),
            total: live.total,
            traces,
            warnings,
        })
    }

    /// A whole number for each trace, in their order. What is allocated is never less than what is alive.
    pub fn whole(&self, metric: Metric) -> Vec<u64> {
        let rounded = |metric: Metric| rounded(self.traces.iter().map(|trace| metric.of(&trace.live)));
        let live = match metric {
            Metric::LiveBytes | Metric::LiveObjects => return rounded(metric),
            Metric::AllocBytes => Metric::LiveBytes,
            Metric::AllocObjects => Metric::LiveObjects,
        };
        let freed = self
            .traces
            .iter()
            .map(|trace| metric.of(&trace.live) - live.of(&trace.live));
        let sums = rounded(live).into_iter().zip(self::rounded(freed));
        sums.map(|(live, freed)| live + freed).collect()
    }

    /// A whole number for each trace, in their order, where there may be less than nothing: differences of two moments, and
    /// what is counted while the period changes.
    pub fn whole_signed(&self, metric: Metric) -> Vec<i64> {
        let values = self.traces.iter().map(|trace| metric.of(&trace.live));
        let (mut sum, mut before) = (0.0f64, 0i64);
        values
            .map(|value| {
                sum += value;
                let whole = sum.clamp(-LARGEST, LARGEST).round() as i64;
                let part = whole.saturating_sub(before);
                before = whole;
                part
            })
            .collect()
    }
}

/// Whole numbers whose sums from the first to any are the rounded sums of `values`. Negative ones count as 0.
fn rounded(values: impl Iterator<Item = f64>) -> Vec<u64> {
    let (mut sum, mut before) = (0.0f64, 0u64);
    values
        .map(|value| {
            sum += value.max(0.0);
            let whole = sum.min(LARGEST).round() as u64;
            let part = whole.saturating_sub(before);
            before = whole;
            part
        })
        .collect()
}

pub(super) fn origin(sidecar: &Sidecar, trace: u32) -> Origin<'_> {
    let origins = sidecar.origins.get(&trace).map_or(&[][..], Vec::as_slice);
    let Some(first) = origins.first() else {
        return Origin::default();
    };
    let thread = first.thread;
    let same_thread = thread != 0 && origins.iter().all(|origin| origin.thread == thread);
    let same_domain = origins.iter().all(|origin| origin.domain == first.domain);
    let thread = same_thread.then_some(thread);
    Origin {
        thread,
        thread_name: thread
            .and_then(|thread| sidecar.threads.get(&thread))
            .map(String::as_str),
        domain: domain::NAMES
            .get(usize::from(first.domain))
            .copied()
            .filter(|_| same_domain),
    }
}

/// Numbers things by what they are, from 0, in the order in which they come.
#[derive(Debug)]
pub(super) struct Numbering<K> {
    numbers: HashMap<K, u32>,
}

impl<K: std::hash::Hash + Eq> Numbering<K> {
    fn new() -> Self {
        Self {
            numbers: HashMap::new(),
        }
    }

    /// The number of `key`, and whether it is new.
    fn number(&mut self, key: K) -> (u32, bool) {
        let next = u32::try_from(self.numbers.len()).unwrap_or(u32::MAX);
        let number = *self.numbers.entry(key).or_insert(next);
        (number, number == next)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Names that a terminal, a browser, a spreadsheet or a parser might obey.
    pub(crate) const EVIL: [&str; 8] = [
        "</script><script>alert(1)</script>",
        "\"quo'ted\" & <b>",
        "new\nline\r\t",
        "right\u{202E}to left\u{2066}",
        "\u{1b}[2J\u{9b}31m\u{7}",
        "=cmd|' /C calc'!A0",
        "semi;colon 12",
        "\u{FFFE}\u{0}\u{2028}é",
    ];

    pub(crate) fn frame(file: &'static str, line: u32, function: Option<&'static str>) -> StackFrame<'static> {
        StackFrame {
            file: file.into(),
            line,
            function,
        }
    }

    pub(crate) fn trace(index: u32, frames: Vec<StackFrame<'static>>, bytes: f64, objects: f64) -> Trace<'static> {
        let live = Live {
            bytes,
            objects,
            bytes_variance: bytes * bytes / 100.0,
            objects_variance: 0.25,
            alloc_bytes: 2.0 * bytes,
            alloc_objects: 2.0 * objects,
            sampled: 1,
            sampled_bytes: bytes as u64,
        };
        Trace {
            index,
            frames,
            origin: Origin::default(),
            live,
        }
    }

    pub(crate) fn export(traces: Vec<Trace<'static>>) -> Export<'static> {
        let mut total = Live::default();
        traces.iter().for_each(|trace| total.add(&trace.live));
        Export {
            name: "run".to_owned(),
            start: Duration::from_secs(1_600_000_000),
            at: Duration::from_secs(10),
            period_bytes: Some(131_072),
            sampling_ranges: 1417,
            facts: None,
            losses: None,
            total,
            traces,
            warnings: Vec::new(),
        }
    }

    /// Three stacks, two of which share a frame, and what has no stack.
    pub(crate) fn sample() -> Export<'static> {
        let main = frame("app.py", 3, Some("main"));
        export(vec![
            trace(0, vec![], 100.5, 1.5),
            trace(2, vec![main.clone(), frame("leak.py", 7, Some("grow"))], 1000.0, 10.0),
            trace(3, vec![main, frame("leak.py", 9, Some("grow"))], 500.25, 2.5),
            trace(1, vec![frame("old.py", 0, None)], 50.0, 1.0),
        ])
    }

    /// Every evil name as a file and as a function.
    pub(crate) fn evil() -> Export<'static> {
        let stacks = EVIL.into_iter().enumerate().map(|(place, name)| {
            let frames = vec![
                frame("app.py", 1, Some(name)),
                frame(name, 2, Some("f")),
                frame(name, 3, None),
            ];
            let mut trace = trace(place as u32 + 1, frames, 100.0, 1.0);
            trace.origin.thread = Some(7);
            trace.origin.thread_name = Some(name);
            trace
        });
        let mut export = export(stacks.collect());
        export.name = EVIL.concat();
        export
    }

    /// That nothing is in `text` which a terminal obeys or a browser reorders by.
    #[track_caller]
    pub(crate) fn assert_clean(text: &str) {
        let bad = text.chars().find(|c| *c != '\n' && crate::report::human::is_unsafe(*c));
        assert_eq!(bad, None, "in {text}");
    }

    #[test]
    fn rounding_keeps_totals_and_order() {
        let one = |index| trace(index, vec![], 1.58, 1.58);
        let export = export((1..=1000).map(one).collect());
        for (metric, total) in [(Metric::LiveBytes, 1580), (Metric::AllocObjects, 3160)] {
            let values = export.whole(metric);
            assert_eq!(values.iter().sum::<u64>(), total);
            assert!(
                values
                    .iter()
                    .all(|value| (*value as f64 - metric.of(&export.traces[0].live)).abs() < 1.5)
            );
        }
        let pairs = export
            .whole(Metric::LiveObjects)
            .into_iter()
            .zip(export.whole(Metric::AllocObjects));
        assert!(pairs.into_iter().all(|(live, allocated)| live <= allocated));
        assert_eq!(rounded([-1.0, 0.4, 0.4, 0.4].into_iter()), [0, 0, 1, 0]);
    }

    #[test]
    fn differences_keep_their_sign_and_their_sum() {
        let traces = [1.58, -2.3, f64::from(1 << 20), -0.4].map(|bytes| trace(1, vec![], bytes, bytes));
        let values = export(traces.to_vec()).whole_signed(Metric::LiveBytes);
        assert_eq!(values.iter().sum::<i64>(), 1_048_575);
        assert!(values[1] < 0 && values[3] <= 0);
        let absurd = export(vec![trace(1, vec![], f64::NAN, 1.0), trace(2, vec![], 5.0, 1.0)]);
        assert_eq!(absurd.whole_signed(Metric::LiveBytes), [0, 0]);
    }

    #[test]
    fn absurd_values_stay_countable() {
        let values = rounded([1e30, 5.0, f64::MAX].into_iter());
        assert_eq!(values, [1 << 62, 0, 0]);
    }
}
