//! What `tracemalloc` calls it: snapshots, statistics, differences, filters.
//!
//! `take_snapshot`, `statistics`, `compare_to`, `filter_traces` and `traced_memory` mean what they mean in the standard
//! library, for a process that never imported it. Sizes and counts are estimates from samples; each has a margin.

use std::time::Duration;

use super::{Reader, ReaderError};
use crate::profile::live::Tally;
use crate::profile::model::{Live, StackFrame};
use crate::report::TraceUsage;
use crate::report::filter::{NamePattern, PatternError};
use crate::report::top;

pub use crate::report::diff::DiffRow as StatisticDiff;
pub use crate::report::top::{GroupBy, TopRow as Statistic};

/// What is alive at a moment, with stacks.
#[derive(Debug, Clone)]
pub struct Snapshot<'a> {
    /// The moment, since the start.
    pub at: Duration,
    /// Each trace.
    pub traces: Vec<TraceUsage<'a>>,
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
        top::top(&self.traces, by, cumulative && by != GroupBy::Trace, None)
    }

    /// Groups that have changed since an older snapshot (maybe of another recording), the largest change first. The snapshots
    /// are taken as independent, so for two of one recording the margins are too large; [`Reader::changes`] knows better.
    pub fn compare_to(&self, old: &Snapshot<'_>, by: GroupBy, cumulative: bool) -> Vec<StatisticDiff> {
        crate::report::diff::diff(&old.traces, &self.traces, None, by, cumulative)
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
