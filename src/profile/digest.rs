//! Condenses the events of a profile into a .hpc: what was alive at each tick.
//!
//! Two modes. [`DigestMode::Exact`] says what is known: estimates by the true probabilities in f64, a snapshot holds
//! exactly the events up to its tick, and a last one shows the end. [`DigestMode::Compatible`] gives the bytes that the
//! original heapprof gives, its single-precision factors and its tick rule included, with one exception: where its
//! 32-bit numbers would overflow, the right value is written. `docs/format.md` lists the differences.
//!
//! The precision is applied in both modes as it is meant (the original's own implementation reads memory that it never
//! wrote): the smallest traces, up to that part of a snapshot's total, appear together under index 0.
//!
//! The digest is written beside its final name and renamed when it is complete, so a failure keeps an older one.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::digest_file::DigestFile;
use super::hpd::RawEvent;
use super::live::{Tally, TraceMap};
use super::names::Part;
use super::reader::{ReadError, Reader};
use super::sampling::SamplingTable;

/// More snapshots are refused: only a damaged time in the file, or an interval by mistake, asks for them.
pub const MAX_SNAPSHOTS: u64 = 10_000_000;

/// How a digest is computed; see the module documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DigestMode {
    /// Right.
    #[default]
    Exact,
    /// As the original.
    Compatible,
}

/// Why a digest could not be made. A digest that existed before is untouched in every case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// The interval is below a millisecond.
    #[error("the interval between snapshots must be a millisecond at least")]
    Interval,
    /// The precision is no fraction.
    #[error("the precision must be at least 0 and below 1, not {0}")]
    Precision(f64),
    /// The events span more intervals than can be sensible.
    #[error("the digest would have {0} snapshots: the interval is too short, or a time in the profile is damaged")]
    TooManySnapshots(u64),
    /// The profile could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The digest could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestSummary {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// Number of snapshots in it.
    pub snapshots: usize,
    /// Number of events that it condenses.
    pub events: u64,
    /// Whole milliseconds between snapshots.
    pub interval_millis: u64,
}

/// Makes the .hpc of a profile, replacing an older one. The interval is cut to whole milliseconds.
pub fn make_digest(
    reader: &Reader,
    interval: Duration,
    precision: f64,
    mode: DigestMode,
) -> Result<DigestSummary, DigestError> {
    let interval_millis = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
    if interval_millis == 0 {
        return Err(DigestError::Interval);
    }
    if !(0.0..1.0).contains(&precision) {
        return Err(DigestError::Precision(precision));
    }
    let path = reader.names().path(Part::Digest);
    let start = match mode {
        DigestMode::Exact => (reader.start().as_secs(), u64::from(reader.start().subsec_nanos())),
        DigestMode::Compatible => {
            let start = reader.initial_time();
            (start as u64, (1e9 * (start - start.trunc())) as u64)
        }
    };
    let failed = |source| DigestError::Write {
        path: path.clone(),
        source,
    };
    let mut output = DigestFile::create(path.clone(), start, interval_millis, precision).map_err(failed)?;
    let events = match mode {
        DigestMode::Exact => exact(reader, &mut output, interval_millis)?,
        DigestMode::Compatible => compatible(reader, &mut output, interval_millis)?,
    };
    let snapshots = output.len();
    let len = output.finish().map_err(failed)?;
    Ok(DigestSummary {
        path,
        len,
        snapshots,
        events,
        interval_millis,
    })
}

fn exact(reader: &Reader, output: &mut DigestFile, interval_millis: u64) -> Result<u64, DigestError> {
    let interval = interval_millis.saturating_mul(1000);
    let elapsed = u64::try_from(reader.elapsed()?.as_micros()).unwrap_or(u64::MAX);
    check_count(elapsed / interval)?;
    let mut tally = Tally::new(reader.weights(), reader.trace_count());
    let mut due = interval;
    let mut count = 0;
    for event in reader.events()? {
        let clock = u64::try_from(event.clock.as_micros()).unwrap_or(u64::MAX);
        while due < clock {
            output.snapshot(live_entries(&tally))?;
            due = due.saturating_add(interval);
        }
        tally.apply(&event);
        count += 1;
    }
    while due < elapsed {
        output.snapshot(live_entries(&tally))?;
        due = due.saturating_add(interval);
    }
    output.snapshot(live_entries(&tally))?;
    Ok(count)
}

fn check_count(count: u64) -> Result<(), DigestError> {
    if count > MAX_SNAPSHOTS {
        Err(DigestError::TooManySnapshots(count))
    } else {
        Ok(())
    }
}

fn live_entries(tally: &Tally) -> Vec<(u32, u64)> {
    let rounded = tally.traces().map(|(index, live)| (index, live.bytes.round() as u64));
    rounded.filter(|(_, bytes)| *bytes > 0).collect()
}

fn compatible(reader: &Reader, output: &mut DigestFile, interval_millis: u64) -> Result<u64, DigestError> {
    let scale = CompatibleScale::new(reader.sampling_table());
    // `None` is "not in the map": 0 bytes may be in it.
    let mut live: TraceMap<Option<i64>> = TraceMap::new(reader.trace_count());
    // Sums in f64, step by step, to meet the same ticks as the original.
    let interval = interval_millis as f64 / 1000.0;
    let (mut now, mut due, mut count) = (0.0, interval, 0);
    for event in reader.raw_events()? {
        let scaled = scale.apply(event);
        let entry = live.entry(event.trace());
        *entry = match *entry {
            None => Some(scaled),
            Some(bytes) => Some(bytes.saturating_add(scaled)).filter(|sum| *sum != 0),
        };
        if !event.is_negative() {
            now += event.secs as f64 + 1e-6 * event.micros as f64;
        }
        if now >= due {
            check_count(((now - due) / interval) as u64 + output.len() as u64)?;
        }
        while now >= due {
            // A free without its allocation can make an entry negative, which the file cannot hold.
            let entries = live
                .iter()
                .filter_map(|(index, bytes)| Some((index, u64::try_from((*bytes)?).ok()?)));
            output.snapshot(entries.collect())?;
            due += interval;
        }
        count += 1;
    }
    Ok(count)
}

/// The original's arithmetic: factors of single precision, the product cut to an integer.
struct CompatibleScale<'a> {
    table: &'a SamplingTable,
    factors: Vec<f32>,
}

impl<'a> CompatibleScale<'a> {
    fn new(table: &'a SamplingTable) -> Self {
        let factor = |probability: f64| {
            if probability > 0.0 {
                (1.0 / probability) as f32
            } else {
                0.0
            }
        };
        Self {
            table,
            factors: table.ranges().iter().map(|range| factor(range.probability())).collect(),
        }
    }

    fn apply(&self, event: RawEvent) -> i64 {
        let scaled = match self.table.range_of(event.size) {
            None => i64::try_from(event.size).unwrap_or(i64::MAX),
            Some(place) => {
                let product = event.size as f32 * self.factors[place];
                if product < (1u32 << 31) as f32 {
                    product as i64
                } else {
                    // The original overflows from here on, so there is nothing to match.
                    (event.size as f64 / self.table.ranges()[place].probability()) as i64
                }
            }
        };
        if event.is_free() { -scaled } else { scaled }
    }
}
