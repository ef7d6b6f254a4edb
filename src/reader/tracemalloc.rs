//! What `tracemalloc` calls it: snapshots, statistics, differences, filters.
//!
//! `take_snapshot`, `statistics`, `compare_to`, `filter_traces` and `traced_memory` mean what they mean in the standard
//! library, for a process that never imported it. Sizes and counts are estimates from samples; each has a margin.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use super::{Reader, ReaderError};
use crate::profile::live::Tally;
use crate::profile::model::{Live, StackFrame};
use crate::report::TraceUsage;
use crate::report::filter::{NamePattern, PatternError};
use crate::report::top::{self, Site};

pub use crate::report::top::{GroupBy, TopRow as Statistic};

/// What is alive at a moment, with stacks.
#[derive(Debug, Clone)]
pub struct Snapshot<'a> {
    /// The moment, since the start.
    pub at: Duration,
    /// Each trace.
    pub traces: Vec<TraceUsage<'a>>,
}

/// How a group has changed from one snapshot to another.
#[derive(Debug, Clone, PartialEq)]
pub struct StatisticDiff {
    /// What the group is.
    pub site: Site,
    /// Live bytes now.
    pub size: f64,
    /// Bytes that have been added; negative if there are fewer.
    pub size_diff: f64,
    /// Half the width of the 95 % interval of `size_diff`. The snapshots are taken as independent, so for two of one
    /// recording it is too large; [`Reader::changes`] knows better.
    pub size_diff_margin: f64,
    /// Live objects now.
    pub count: f64,
    /// Objects that have been added.
    pub count_diff: f64,
    /// Half the width of the 95 % interval of `count_diff`.
    pub count_diff_margin: f64,
}

/// Keeps or drops traces by file and line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    pattern: NamePattern,
    lineno: Option<u32>,
    all_frames: bool,
}

impl Filter {
    /// A filter as `tracemalloc.Filter(inclusive, filename_pattern, lineno, all_frames)`: `*`, `?` and `[…]` in the pattern,
    /// and a name ending in `.pyc` means the `.py` file.
    ///
    /// # Errors
    /// If the pattern is none.
    pub fn new(
        inclusive: bool,
        filename_pattern: &str,
        lineno: Option<u32>,
        all_frames: bool,
    ) -> Result<Self, PatternError> {
        let plain = filename_pattern.strip_suffix(".pyc").map(|stem| format!("{stem}.py"));
        Ok(Self {
            pattern: NamePattern::new(plain.as_deref().unwrap_or(filename_pattern), inclusive)?,
            lineno,
            all_frames,
        })
    }

    /// Whether the filter lets the trace pass, as `Filter._match` does: an exclusive one lets all frames but those that fit.
    fn lets_pass(&self, frames: &[StackFrame<'_>]) -> bool {
        let fits = |frame: &StackFrame<'_>| {
            self.pattern.fits(&frame.file) && self.lineno.is_none_or(|line| line == frame.line)
        };
        let found = if self.all_frames {
            frames.iter().any(fits)
        } else {
            frames.last().is_some_and(fits)
        };
        found == self.pattern.is_inclusive
    }
}

impl<'a> Snapshot<'a> {
    /// Groups of traces, largest first. Cumulative: a trace counts for every frame, once each; this cannot be asked for
    /// whole tracebacks, where it has no effect.
    pub fn statistics(&self, by: GroupBy, cumulative: bool) -> Vec<Statistic> {
        top::top(&self.traces, by, cumulative && by != GroupBy::Trace)
    }

    /// Groups with what has changed since an older snapshot (maybe of another recording), the largest change first.
    pub fn compare_to(&self, old: &Snapshot<'_>, by: GroupBy, cumulative: bool) -> Vec<StatisticDiff> {
        let mut groups: HashMap<Site, [Option<Statistic>; 2]> = HashMap::new();
        for (place, snapshot) in [old.statistics(by, cumulative), self.statistics(by, cumulative)]
            .into_iter()
            .enumerate()
        {
            for row in snapshot {
                let site = row.site.clone();
                groups.entry(site).or_default()[place] = Some(row);
            }
        }
        let mut diffs: Vec<_> = groups
            .into_iter()
            .map(|(site, [old, new])| {
                let of = |row: &Option<Statistic>, value: fn(&Statistic) -> f64| row.as_ref().map_or(0.0, value);
                let diff = |value| of(&new, value) - of(&old, value);
                let margin = |value| of(&new, value).hypot(of(&old, value));
                StatisticDiff {
                    site,
                    size: of(&new, |row| row.live_bytes),
                    size_diff: diff(|row| row.live_bytes),
                    size_diff_margin: margin(|row| row.live_bytes_margin),
                    count: of(&new, |row| row.live_objects),
                    count_diff: diff(|row| row.live_objects),
                    count_diff_margin: margin(|row| row.live_objects_margin),
                }
            })
            .collect();
        let key = |diff: &StatisticDiff| Reverse((diff.size_diff.abs() * 1024.0) as u128);
        diffs.sort_by(|a, b| {
            let order = key(a).cmp(&key(b)).then(b.size.total_cmp(&a.size));
            order.then_with(|| a.site.cmp(&b.site))
        });
        diffs
    }

    /// The traces that some inclusive filter lets pass (or all, if there is none) and every exclusive one.
    #[must_use]
    pub fn filter_traces(&self, filters: &[Filter]) -> Self {
        let (inclusive, exclusive): (Vec<_>, Vec<_>) = filters.iter().partition(|filter| filter.pattern.is_inclusive);
        let counts = |trace: &&TraceUsage<'_>| {
            let frames = trace.frames.as_deref().unwrap_or_default();
            (inclusive.is_empty() || inclusive.iter().any(|filter| filter.lets_pass(frames)))
                && exclusive.iter().all(|filter| filter.lets_pass(frames))
        };
        Self {
            at: self.at,
            traces: self.traces.iter().filter(counts).cloned().collect(),
        }
    }

    /// All of it together.
    pub fn total(&self) -> Live {
        let mut total = Live::default();
        self.traces.iter().for_each(|trace| total.add(&trace.live));
        total
    }
}

impl Reader {
    /// What is alive at a moment (`None`: the end), from the events. O(events up to it).
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn take_snapshot(&self, at: Option<Duration>) -> Result<Snapshot<'_>, ReaderError> {
        let live = self.profile.live_at(at)?;
        let usage = |(index, live): &(u32, Live)| TraceUsage {
            index: *index,
            frames: self.profile.frames(*index),
            live: *live,
        };
        Ok(Snapshot {
            at: live.at,
            traces: live.traces.iter().map(usage).collect(),
        })
    }

    /// Estimated live bytes at a moment (`None`: the end), and the most that were alive at any time up to it. One pass.
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn traced_memory(&self, at: Option<Duration>) -> Result<(f64, f64), ReaderError> {
        // All traces as one: the sum is wanted, and frees of one trace never exceed its allocations.
        let mut tally = Tally::new(self.profile.weights(), 0);
        let mut peak: f64 = 0.0;
        let mut current = 0.0;
        for mut event in self.profile.events()? {
            if at.is_some_and(|at| event.clock > at) {
                break;
            }
            event.trace = 0;
            tally.apply(&event);
            if let Some((_, live)) = tally.traces().next() {
                current = live.bytes;
                peak = peak.max(current);
            }
        }
        Ok((current, peak))
    }
}
