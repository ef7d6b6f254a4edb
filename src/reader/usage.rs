//! How much some lines hold, in one snapshot and over time, and the original's flame graph.

use std::fmt::Write;

use foldhash::HashMap as FastMap;

use super::line::{LineTable, RawTraceLine};
use super::snapshots::Snapshots;
use super::{Mode, ReaderError};
use crate::profile::hpc::Snapshot as Entries;
use crate::report::flame::{Sums, Texts};

/// An answer of [`fast_get_usage`](super::Reader::fast_get_usage).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Live bytes of each line, in the order in which they were asked for.
    pub lines: Vec<u64>,
    /// Live bytes of all traces, those of unknown stacks included.
    pub total: u64,
}

/// Usage over time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimePlot {
    /// Seconds since the start.
    pub times: Vec<f64>,
    /// Live bytes in all.
    pub total_usage: Vec<u64>,
    /// For each label its live bytes over time.
    pub lines: Vec<Vec<u64>>,
    /// The labels, sorted.
    pub labels: Vec<String>,
}

/// For every trace the places of the asked lines that count for it.
#[derive(Debug)]
pub(super) struct Asked {
    /// Trace index to a list in `lists`; 0 is the empty one.
    of_trace: Vec<u32>,
    /// All different lists.
    lists: Vec<Vec<usize>>,
}

impl Asked {
    pub(super) fn new(table: &LineTable, count: u32, lines: &[RawTraceLine], cumulative: bool) -> Self {
        let places = table.find(lines);
        let mut asked = Self {
            of_trace: Vec::new(),
            lists: vec![Vec::new()],
        };
        if places.is_empty() {
            return asked;
        }
        asked.of_trace = vec![0; count as usize + 1];
        let mut known: FastMap<Vec<usize>, u32> = FastMap::default();
        let mut wanted = vec![false; table.len()];
        for number in places.keys() {
            wanted[*number as usize] = true;
        }
        for index in 1..=count {
            let frames = table.trace(index).unwrap_or_default();
            let frames = if cumulative {
                frames
            } else {
                &frames[frames.len().saturating_sub(1)..]
            };
            let mut list: Vec<usize> = Vec::new();
            for number in frames.iter().filter(|number| wanted[**number as usize]) {
                for place in places.get(number).into_iter().flatten() {
                    if !list.contains(place) {
                        list.push(*place);
                    }
                }
            }
            if !list.is_empty() {
                let lists = &mut asked.lists;
                asked.of_trace[index as usize] = *known.entry(list).or_insert_with_key(|list| {
                    lists.push(list.clone());
                    lists.len() as u32 - 1
                });
            }
        }
        asked
    }

    /// The places that an entry of this trace counts for.
    #[inline]
    pub(super) fn of(&self, index: u32) -> &[usize] {
        &self.lists[self.list_of(index)]
    }

    /// Which of the lists is that of this trace.
    #[inline]
    fn list_of(&self, index: u32) -> usize {
        self.of_trace.get(index as usize).copied().unwrap_or(0) as usize
    }
}

pub(super) fn of(table: &LineTable, usage: &Entries, lines: &[RawTraceLine], cumulative: bool, mode: Mode) -> Usage {
    let asked = Asked::new(table, table.trace_count(), lines, cumulative);
    let mut sums = vec![0u64; lines.len()];
    for (index, bytes) in &usage.entries {
        for place in asked.of(*index) {
            sums[*place] = sums[*place].saturating_add(*bytes);
        }
    }
    if mode == Mode::Compat && cumulative {
        for (place, line) in lines.iter().enumerate() {
            let times = lines.iter().filter(|other| *other == line).count() as u64;
            sums[place] = sums[place].saturating_mul(times);
        }
    }
    Usage {
        lines: sums,
        total: usage.total(),
    }
}

pub(super) fn time_plot(
    table: &LineTable,
    snapshots: &Snapshots<'_>,
    lines: &[(String, RawTraceLine)],
) -> Result<TimePlot, ReaderError> {
    let mut lines: Vec<_> = lines.iter().collect();
    lines.sort_by(|a, b| a.0.cmp(&b.0));
    let (labels, lines): (Vec<_>, Vec<_>) = lines.into_iter().cloned().unzip();
    let asked = Asked::new(table, table.trace_count(), &lines, true);
    let mut plot = TimePlot {
        times: Vec::with_capacity(snapshots.len()),
        total_usage: Vec::with_capacity(snapshots.len()),
        lines: vec![Vec::with_capacity(snapshots.len()); lines.len()],
        labels,
    };
    let mut sums = vec![0u64; lines.len()];
    let mut list_sums = vec![0u64; asked.lists.len()];
    for place in 0..snapshots.len() {
        // By list first and then by line: there are few lists, many entries, and nothing to decide for each of them.
        list_sums.fill(0);
        let visited = snapshots.digest().visit(place, |index, bytes| {
            let sum = &mut list_sums[asked.list_of(index)];
            *sum = sum.saturating_add(bytes);
        });
        let total = list_sums.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        sums.fill(0);
        for (list, bytes) in asked.lists.iter().zip(&list_sums) {
            for line in list {
                sums[*line] = sums[*line].saturating_add(*bytes);
            }
        }
        visited.ok_or(ReaderError::Snapshot(place))?;
        plot.times.push(snapshots.relative_time(place)?);
        plot.total_usage.push(total);
        for (values, sum) in plot.lines.iter_mut().zip(&sums) {
            values.push(*sum);
        }
    }
    Ok(plot)
}

/// Collapsed stacks, as `pyheap flame` writes them.
pub(super) fn collapsed(table: &LineTable, usage: &Entries) -> String {
    let mut texts = Texts::default();
    let lines = (0..table.len() as u32).map(|number| table.line(number));
    let numbers: Vec<u32> = lines
        .map(|(line, function)| texts.number(&line.filename, line.lineno, function.as_deref()))
        .collect();
    let mut sums = Sums::default();
    for (index, bytes) in &usage.entries {
        let frames = table.trace(*index).unwrap_or_default();
        sums.add(frames.iter().map(|number| numbers[*number as usize]), *bytes);
    }
    sums.text(&texts)
}

/// The original's text, names as they are.
pub(super) fn flame(table: &LineTable, usage: &Entries) -> String {
    let names: Vec<String> = (0..table.len() as u32)
        .map(|number| {
            let line = &table.line(number).0;
            format!("{}:{}", line.filename, line.lineno)
        })
        .collect();
    let mut text = String::new();
    let mut other = 0u64;
    for (index, bytes) in &usage.entries {
        let frames = table.trace(*index).unwrap_or_default();
        let Some((last, callers)) = frames.split_last() else {
            other = other.saturating_add(*bytes);
            continue;
        };
        for number in callers {
            text.push_str(&names[*number as usize]);
            text.push(';');
        }
        let _ = writeln!(text, "{} {bytes}", names[*last as usize]);
    }
    if other > 0 {
        let _ = writeln!(text, "OTHER {other}");
    }
    text
}
