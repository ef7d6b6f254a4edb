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

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use super::format::{INDEX_MAGIC, SNAPSHOT_MAGIC, VERSION, put_u32, put_u64, put_varint};
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
    let mut output = Output::create(path.clone(), start, interval_millis, precision).map_err(failed)?;
    let events = match mode {
        DigestMode::Exact => exact(reader, &mut output, interval_millis)?,
        DigestMode::Compatible => compatible(reader, &mut output, interval_millis)?,
    };
    let snapshots = output.offsets.len();
    let len = output.finish().map_err(failed)?;
    Ok(DigestSummary {
        path,
        len,
        snapshots,
        events,
        interval_millis,
    })
}

fn exact(reader: &Reader, output: &mut Output, interval_millis: u64) -> Result<u64, DigestError> {
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

fn compatible(reader: &Reader, output: &mut Output, interval_millis: u64) -> Result<u64, DigestError> {
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
            check_count(((now - due) / interval) as u64 + output.offsets.len() as u64)?;
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

/// Puts entries in the order of the file, largest first and equal ones by index, and joins the smallest of them, up to
/// the fraction `precision` of the total, under index 0.
fn arrange(entries: &mut Vec<(u32, u64)>, precision: f64) {
    let order = |entry: &(u32, u64)| (std::cmp::Reverse(entry.1), entry.0);
    entries.sort_unstable_by_key(order);
    let total = entries.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let slop = (total as f64 * precision) as u64;
    let mut other = 0u64;
    let mut kept = entries.len();
    // Index 0 stays where it is while others are joined; it is merged below.
    while let Some(place) = entries[..kept].iter().rposition(|(index, _)| *index != 0) {
        match other.checked_add(entries[place].1) {
            Some(sum) if sum <= slop && precision > 0.0 => other = sum,
            _ => break,
        }
        // An entry of index 0 that was passed over moves to the front part's end and keeps the order.
        entries[place..kept].rotate_left(1);
        kept -= 1;
    }
    entries.truncate(kept);
    if other > 0 {
        if let Some(place) = entries.iter().position(|(index, _)| *index == 0) {
            other = other.saturating_add(entries.remove(place).1);
        }
        let place = entries.partition_point(|(_, bytes)| *bytes > other);
        entries.insert(place, (0, other));
    }
}

/// The digest under its temporary name; removed again unless it is finished.
struct Output {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    len: u64,
    index_slot: u64,
    offsets: Vec<u64>,
    precision: f64,
    buffer: Vec<u8>,
}

impl Output {
    fn create(path: PathBuf, start: (u64, u64), interval_millis: u64, precision: f64) -> io::Result<Self> {
        let mut temporary = path.clone().into_os_string();
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        let mut buffer = Vec::new();
        put_u32(&mut buffer, VERSION);
        put_u64(&mut buffer, start.0);
        put_u64(&mut buffer, start.1);
        put_varint(&mut buffer, interval_millis);
        let index_slot = buffer.len() as u64;
        put_u64(&mut buffer, 0);
        let file = BufWriter::with_capacity(1 << 18, file);
        let mut output = Self {
            path,
            temporary,
            file,
            len: 0,
            index_slot,
            offsets: Vec::new(),
            precision,
            buffer,
        };
        output.put()?;
        Ok(output)
    }

    fn put(&mut self) -> io::Result<()> {
        self.file.write_all(&self.buffer)?;
        self.len += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    fn snapshot(&mut self, mut entries: Vec<(u32, u64)>) -> Result<(), DigestError> {
        arrange(&mut entries, self.precision);
        self.offsets.push(self.len);
        put_u32(&mut self.buffer, SNAPSHOT_MAGIC);
        put_varint(&mut self.buffer, entries.len() as u64);
        let mut before = None;
        for (index, bytes) in entries {
            put_varint(&mut self.buffer, u64::from(index));
            put_varint(&mut self.buffer, before.map_or(bytes, |before: u64| before - bytes));
            before = Some(bytes);
        }
        self.put().map_err(|source| DigestError::Write {
            path: self.path.clone(),
            source,
        })
    }

    fn finish(mut self) -> io::Result<u64> {
        let index_at = self.len;
        put_u32(&mut self.buffer, INDEX_MAGIC);
        put_varint(&mut self.buffer, self.offsets.len() as u64);
        let mut before = 0;
        for offset in &self.offsets {
            put_varint(&mut self.buffer, offset - before);
            before = *offset;
        }
        self.put()?;
        self.file.seek(SeekFrom::Start(self.index_slot))?;
        self.file.write_all(&index_at.to_be_bytes())?;
        self.file.flush()?;
        std::fs::rename(&self.temporary, &self.path)?;
        Ok(self.len)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // After `finish` there is nothing of this name.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::arrange;

    fn arranged(mut entries: Vec<(u32, u64)>, precision: f64) -> Vec<(u32, u64)> {
        arrange(&mut entries, precision);
        entries
    }

    #[test]
    fn largest_first_and_ties_by_index() {
        assert_eq!(
            arranged(vec![(3, 5), (1, 5), (2, 9), (4, 0)], 0.0),
            [(2, 9), (1, 5), (3, 5), (4, 0)]
        );
        assert_eq!(arranged(vec![], 0.5), []);
    }

    #[test]
    fn precision_keeps_the_total() {
        assert_eq!(arranged(vec![(1, 98_900), (2, 1100)], 0.01), [(1, 98_900), (2, 1100)]);
        assert_eq!(arranged(vec![(1, 99_000), (2, 1000)], 0.01), [(1, 99_000), (0, 1000)]);
        assert_eq!(arranged(vec![(1, 10)], 0.99), [(1, 10)]);
        let many: Vec<_> = (1..=1000).map(|index| (index, u64::from(index))).collect();
        let total: u64 = many.iter().map(|(_, bytes)| bytes).sum();
        let result = arranged(many, 0.01);
        assert_eq!(result.iter().map(|(_, bytes)| bytes).sum::<u64>(), total);
        // 1 + 2 + ... + 99 = 4950 is within 1 % of 500500, and 100 more is not.
        assert_eq!((result[0], result.len()), ((0, 4950), 902));
    }

    #[test]
    fn the_unknown_and_the_small_ones_are_one_entry() {
        assert_eq!(
            arranged(vec![(0, 2), (1, 900), (2, 1), (3, 3), (4, 94)], 0.005),
            [(1, 900), (4, 94), (0, 6)]
        );
        assert_eq!(
            arranged(vec![(0, 2), (1, 900), (3, 3)], 0.0),
            [(1, 900), (3, 3), (0, 2)]
        );
        assert_eq!(arranged(vec![(0, 500), (1, 500), (2, 1)], 0.01), [(0, 501), (1, 500)]);
    }
}
