//! What was alive, and what had been allocated, at regular times: in all, of some lines, of some traces.

use std::time::Duration;

use super::line::RawTraceLine;
use super::usage::Asked;
use super::{Reader, ReaderError};
use crate::profile::digest::DigestError;
use crate::profile::live::Tally;
use crate::profile::model::Live;
use crate::profile::reader::Reader as Profile;

/// More points are refused: each of them is kept.
const MAX_POINTS: u64 = 1_000_000;

/// One moment of a [`Series`].
#[derive(Debug, Clone, PartialEq)]
pub struct SeriesPoint {
    /// Seconds since the start.
    pub at: f64,
    /// All traces.
    pub total: Live,
    /// For each label, the traces that it stands for.
    pub lines: Vec<Live>,
}

/// Estimates at regular times, and at the end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// What was asked for, in that order.
    pub labels: Vec<String>,
    /// In order of time; the last one is the end of the recording.
    pub points: Vec<SeriesPoint>,
}

impl Series {
    /// Bytes and objects allocated a second between each point and the one before (the first: since the start), freed ones
    /// included; 0 if no time has passed.
    pub fn allocation_rates(&self) -> Vec<(f64, f64)> {
        let (mut at, mut bytes, mut objects) = (0.0, 0.0, 0.0);
        let rate = |point: &SeriesPoint| {
            let seconds = point.at - at;
            let rate = |now: f64, then: f64| if seconds > 0.0 { (now - then) / seconds } else { 0.0 };
            let rates = (
                rate(point.total.alloc_bytes, bytes),
                rate(point.total.alloc_objects, objects),
            );
            (at, bytes, objects) = (point.at, point.total.alloc_bytes, point.total.alloc_objects);
            rates
        };
        self.points.iter().map(rate).collect()
    }
}

impl Reader {
    /// All traces, and those on which each labelled line is (counted once each), every `interval` and at the end. From the
    /// events: needs no digest. One pass; O(events + points × traces).
    ///
    /// # Errors
    /// When the events cannot be opened, or if there would be more than a million points.
    pub fn series(&self, interval: Duration, lines: &[(String, RawTraceLine)]) -> Result<Series, ReaderError> {
        self.series_of(interval, lines, None, |_| true)
    }

    /// The same of those traces only that count, and up to a moment (`None` is the end).
    ///
    /// # Errors
    /// As for [`series`](Self::series).
    pub fn series_of(
        &self,
        interval: Duration,
        lines: &[(String, RawTraceLine)],
        until: Option<Duration>,
        counts: impl Fn(u32) -> bool,
    ) -> Result<Series, ReaderError> {
        let (labels, lines): (Vec<_>, Vec<_>) = lines.iter().cloned().unzip();
        let table = self.lines();
        let asked = Asked::new(table, table.trace_count(), &lines, true);
        let span = Span { interval, until };
        let points = points(&self.profile, span, lines.len(), counts, |index, add| {
            asked.of(index).iter().for_each(|place| add(*place));
        })?;
        Ok(Series { labels, points })
    }

    /// The same for single traces.
    ///
    /// # Errors
    /// As for [`series`](Self::series).
    pub fn trace_series(&self, interval: Duration, traces: &[u32]) -> Result<Series, ReaderError> {
        let span = Span { interval, until: None };
        let points = points(
            &self.profile,
            span,
            traces.len(),
            |_| true,
            |index, add| {
                let places = traces.iter().enumerate().filter(|(_, trace)| **trace == index);
                places.for_each(|(place, _)| add(place));
            },
        )?;
        Ok(Series {
            labels: traces.iter().map(u32::to_string).collect(),
            points,
        })
    }
}

/// How often, and how long.
#[derive(Clone, Copy)]
struct Span {
    interval: Duration,
    until: Option<Duration>,
}

fn points(
    profile: &Profile,
    Span { interval, until }: Span,
    groups: usize,
    counts: impl Fn(u32) -> bool,
    places: impl Fn(u32, &mut dyn FnMut(usize)),
) -> Result<Vec<SeriesPoint>, ReaderError> {
    if interval < Duration::from_millis(1) {
        return Err(DigestError::Interval.into());
    }
    let elapsed = until.map_or_else(|| profile.elapsed(), Ok)?;
    let count = u64::try_from(elapsed.as_micros() / interval.as_micros()).unwrap_or(u64::MAX);
    if count > MAX_POINTS {
        return Err(DigestError::TooManySnapshots(count).into());
    }
    let mut tally = Tally::new(profile.weights(), profile.trace_count());
    let mut events = profile.events()?;
    let mut pending = None;
    let mut all = Vec::with_capacity(count as usize + 1);
    for tick in 1..=count + 1 {
        let at = interval.saturating_mul(u32::try_from(tick).unwrap_or(u32::MAX));
        let is_end = at >= elapsed;
        Profile::apply_until(
            &mut events,
            &mut pending,
            if is_end { until } else { Some(at) },
            |event| tally.apply(event),
        );
        let mut point = SeriesPoint {
            at: at.min(elapsed).as_secs_f64(),
            total: Live::default(),
            lines: vec![Live::default(); groups],
        };
        for (index, live) in tally.traces() {
            if live.alloc_objects == 0.0 && live.sampled == 0 || !counts(index) {
                continue;
            }
            point.total.add(live);
            if groups > 0 {
                places(index, &mut |place| point.lines[place].add(live));
            }
        }
        all.push(point);
        if is_end {
            break;
        }
    }
    Ok(all)
}
