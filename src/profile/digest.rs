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
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use super::digest_file::DigestFile;
use super::hpd::RawEvent;
use super::live::TraceMap;
use super::names::Part;
use super::ranking::Ranking;
use super::reader::{ReadError, Reader, Scan};
use super::sampling::{SamplingTable, WeightCache};

/// More snapshots are refused: only a damaged time in the file, or an interval by mistake, asks for them.
pub const MAX_SNAPSHOTS: u64 = 10_000_000;

/// After so many events the caller is told how far it is.
const PROGRESS_EVENTS: u64 = 1 << 18;

/// How far the making of a digest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Events that are condensed.
    pub events: u64,
    /// Bytes of the .hpd that are read.
    pub bytes: u64,
    /// Its length.
    pub bytes_total: u64,
    /// Time that has passed in the recording.
    pub clock: Duration,
}

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
    /// Whether it was stopped before the end of the events, so that it shows less than there is.
    pub is_interrupted: bool,
}

/// Makes the .hpc of a profile, replacing an older one. The interval is cut to whole milliseconds.
pub fn make_digest(
    reader: &Reader,
    interval: Duration,
    precision: f64,
    mode: DigestMode,
) -> Result<DigestSummary, DigestError> {
    make_digest_with(reader, interval, precision, mode, |_| ControlFlow::Continue(()))
}

/// Makes the .hpc of a profile and tells about it on the way. When `progress` answers `Break`, the digest ends with the last
/// tick that was reached: it is valid, only shorter.
pub fn make_digest_with(
    reader: &Reader,
    interval: Duration,
    precision: f64,
    mode: DigestMode,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<DigestSummary, DigestError> {
    make(reader, interval, precision, mode, &mut progress)
}

fn make(
    reader: &Reader,
    interval: Duration,
    precision: f64,
    mode: DigestMode,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
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
    let output = DigestFile::create(path.clone(), start, interval_millis, precision).map_err(failed)?;
    let mut making = Making {
        reader,
        output,
        interval_millis,
        progress,
        events: 0,
        is_interrupted: false,
        scan: Scan::default(),
    };
    match mode {
        DigestMode::Exact => making.exact()?,
        DigestMode::Compatible => making.compatible()?,
    }
    let (events, is_interrupted) = (making.events, making.is_interrupted);
    if !is_interrupted {
        reader.keep_scan(std::mem::take(&mut making.scan));
    }
    let snapshots = making.output.len();
    let len = making.output.finish().map_err(failed)?;
    Ok(DigestSummary {
        path,
        len,
        snapshots,
        events,
        interval_millis,
        is_interrupted,
    })
}

/// Live bytes of a trace, and the records that they are made of.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    bytes: f64,
    records: i64,
}

impl Sum {
    /// As [`Tally`](super::live::Tally) counts, but for bytes alone, and without branches: whether an event is a free is
    /// nothing that a processor can guess.
    #[inline]
    fn apply(&mut self, bytes: f64, is_free: bool) {
        let (sign, step) = if is_free { (-1.0, -1) } else { (1.0, 1) };
        let sum = (self.bytes + sign * bytes).max(0.0);
        self.records = (self.records + step).max(0);
        // Nothing is left: say 0, not what sums of rounded numbers leave over.
        self.bytes = if self.records == 0 { 0.0 } else { sum };
    }
}

/// A digest on its way.
struct Making<'a> {
    reader: &'a Reader,
    output: DigestFile,
    interval_millis: u64,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    events: u64,
    is_interrupted: bool,
    /// What is learned on the way, so that nobody has to read the events again.
    scan: Scan,
}

impl Making<'_> {
    /// Counts an event; true if it is time to stop.
    #[inline]
    fn count(&mut self, event: RawEvent, at: impl Fn() -> (Duration, u64)) -> bool {
        self.events += 1;
        self.scan.allocations += u64::from(!event.is_free());
        self.scan.unknown_traces += u64::from(event.trace() > self.reader.trace_count());
        if !self.events.is_multiple_of(PROGRESS_EVENTS) {
            return false;
        }
        let (clock, bytes) = at();
        let progress = Progress {
            events: self.events,
            bytes,
            bytes_total: self.reader.events_len(),
            clock,
        };
        self.is_interrupted = (self.progress)(progress).is_break();
        self.is_interrupted
    }

    fn exact(&mut self) -> Result<(), DigestError> {
        let interval = self.interval_millis.saturating_mul(1000);
        let mut weights = WeightCache::new(self.reader.weights());
        let mut sums: TraceMap<Sum> = TraceMap::new(self.reader.trace_count());
        let mut ranking = Ranking::new(self.reader.trace_count());
        let mut clock = 0u64;
        let mut due = interval;
        let mut events = self.reader.raw_events()?;
        while let Some(event) = events.next() {
            if !event.is_negative() {
                let step = event.secs.saturating_mul(1_000_000).saturating_add(event.micros);
                clock = clock.saturating_add(step);
            }
            if due < clock {
                check_count((clock - due) / interval + self.output.len() as u64)?;
                ranking.update(|index| live_bytes(&mut sums, index));
                while due < clock {
                    self.output.snapshot(ranking.entries())?;
                    due = due.saturating_add(interval);
                }
            }
            let bytes = weights.bytes_of(event.size);
            sums.entry(event.trace()).apply(bytes, event.is_free());
            ranking.touch(event.trace());
            if self.count(event, || (Duration::from_micros(clock), events.offset())) {
                return Ok(());
            }
        }
        self.scan.finish(self.events, clock, events.ending());
        let elapsed = clock.max(u64::try_from(self.reader.sidecar_end().as_micros()).unwrap_or(u64::MAX));
        check_count(elapsed.saturating_sub(due) / interval + self.output.len() as u64)?;
        ranking.update(|index| live_bytes(&mut sums, index));
        while due < elapsed {
            self.output.snapshot(ranking.entries())?;
            due = due.saturating_add(interval);
        }
        self.output.snapshot(ranking.entries())
    }

    fn compatible(&mut self) -> Result<(), DigestError> {
        let scale = CompatibleScale::new(self.reader.sampling_table());
        // `None` is "not in the map": 0 bytes may be in it.
        let mut live: TraceMap<Option<i64>> = TraceMap::new(self.reader.trace_count());
        let mut ranking = Ranking::new(self.reader.trace_count());
        // Sums in f64, step by step, to meet the same ticks as the original.
        let interval = self.interval_millis as f64 / 1000.0;
        let (mut now, mut due) = (0.0, interval);
        let mut clock = 0u64;
        let mut events = self.reader.raw_events()?;
        while let Some(event) = events.next() {
            let scaled = scale.apply(event);
            let entry = live.entry(event.trace());
            *entry = match *entry {
                None => Some(scaled),
                Some(bytes) => Some(bytes.saturating_add(scaled)).filter(|sum| *sum != 0),
            };
            ranking.touch(event.trace());
            if !event.is_negative() {
                now += event.secs as f64 + 1e-6 * event.micros as f64;
                clock = clock.saturating_add(event.secs.saturating_mul(1_000_000).saturating_add(event.micros));
            }
            if now >= due {
                check_count(((now - due) / interval) as u64 + self.output.len() as u64)?;
                // A free without its allocation can make an entry negative, which the file cannot hold.
                ranking.update(|index| u64::try_from((*live.entry(index))?).ok());
            }
            while now >= due {
                self.output.snapshot(ranking.entries())?;
                due += interval;
            }
            if self.count(event, || (Duration::from_micros(clock), events.offset())) {
                return Ok(());
            }
        }
        self.scan.finish(self.events, clock, events.ending());
        Ok(())
    }
}

fn live_bytes(sums: &mut TraceMap<Sum>, index: u32) -> Option<u64> {
    let bytes = sums.entry(index).bytes;
    // `f64::round`, which is a call of the C library.
    let whole = bytes as i64;
    let whole = whole as u64 + u64::from(bytes - whole as f64 >= 0.5);
    (whole > 0).then_some(whole)
}

fn check_count(count: u64) -> Result<(), DigestError> {
    if count > MAX_SNAPSHOTS {
        Err(DigestError::TooManySnapshots(count))
    } else {
        Ok(())
    }
}

/// The original's arithmetic: factors of single precision, the product cut to an integer.
struct CompatibleScale<'a> {
    table: &'a SamplingTable,
    factors: Vec<f32>,
    small: Vec<i64>,
}

/// Sizes below this are scaled in advance.
const SMALL_SIZES: u64 = 4096;

impl<'a> CompatibleScale<'a> {
    fn new(table: &'a SamplingTable) -> Self {
        let factor = |probability: f64| {
            if probability > 0.0 {
                (1.0 / probability) as f32
            } else {
                0.0
            }
        };
        let mut scale = Self {
            table,
            factors: table.ranges().iter().map(|range| factor(range.probability())).collect(),
            small: Vec::new(),
        };
        scale.small = (0..SMALL_SIZES).map(|size| scale.of(size)).collect();
        scale
    }

    #[inline]
    fn apply(&self, event: RawEvent) -> i64 {
        let small = self.small.get(event.size as usize);
        let scaled = small.copied().unwrap_or_else(|| self.of(event.size));
        if event.is_free() { -scaled } else { scaled }
    }

    fn of(&self, size: u64) -> i64 {
        match self.table.range_of(size) {
            None => i64::try_from(size).unwrap_or(i64::MAX),
            Some(place) => {
                let product = size as f32 * self.factors[place];
                if product < (1u32 << 31) as f32 {
                    product as i64
                } else {
                    // The original overflows from here on, so there is nothing to match.
                    (size as f64 / self.table.ranges()[place].probability()) as i64
                }
            }
        }
    }
}
