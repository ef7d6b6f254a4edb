//! The snapshots of a digest with their times.

use std::collections::HashMap;

use super::{Mode, ReaderError};
use crate::profile::hpc::{Digest, Snapshot as Entries};
use crate::profile::reader::Reader as Profile;

/// Live bytes of each trace at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Seconds since the start.
    pub relative_time: f64,
    /// Trace index and bytes, largest first; index 0 is "no stack known", and "all smaller ones" of a digest.
    pub usage: Entries,
}

impl Snapshot {
    /// Live bytes of all traces.
    pub fn total_usage(&self) -> u64 {
        self.usage.total()
    }

    /// Bytes by trace index. If a damaged digest names an index twice, the later entry counts.
    pub fn usage_map(&self) -> HashMap<u32, u64> {
        self.usage.entries.iter().copied().collect()
    }
}

/// The snapshots of a digest: a sequence that reads one when it is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Snapshots<'a> {
    profile: &'a Profile,
    digest: &'a Digest,
    mode: Mode,
}

impl<'a> Snapshots<'a> {
    pub(super) fn new(profile: &'a Profile, digest: &'a Digest, mode: Mode) -> Self {
        Self { profile, digest, mode }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.digest.len()
    }

    /// Whether there is none: the original makes such digests of runs shorter than an interval.
    pub fn is_empty(&self) -> bool {
        self.digest.is_empty()
    }

    /// Seconds between them; single precision in compat mode.
    pub fn interval(&self) -> f64 {
        let seconds = self.digest.interval_millis as f64 / 1000.0;
        match self.mode {
            Mode::Exact => seconds,
            Mode::Compat => f64::from((1e-3 * self.digest.interval_millis as f64) as f32),
        }
    }

    /// Start time as the digest has it, in seconds since 1970. The original reads it with single precision, off by up to 64 s.
    pub fn initial_time(&self) -> f64 {
        let (seconds, nanos) = self.digest.start;
        let start = seconds as f64 + 1e-9 * nanos as f64;
        match self.mode {
            Mode::Exact => start,
            Mode::Compat => f64::from(start as f32),
        }
    }

    /// Seconds after the start that a snapshot shows: its tick, or the end of the recording if that came first. The
    /// original gives the time of the tick before.
    ///
    /// # Errors
    /// When the events cannot be opened, which only the last snapshot needs.
    pub fn relative_time(&self, place: usize) -> Result<f64, ReaderError> {
        if self.mode == Mode::Compat {
            return Ok(place as f64 * self.interval());
        }
        let tick = (place as f64 + 1.0) * self.interval();
        if place + 1 < self.len() {
            return Ok(tick);
        }
        Ok(tick.min(self.profile.elapsed()?.as_secs_f64()))
    }

    /// A snapshot.
    ///
    /// # Errors
    /// [`ReaderError::NoSnapshot`] beyond the last, [`ReaderError::Snapshot`] if it is damaged.
    pub fn get(&self, place: usize) -> Result<Snapshot, ReaderError> {
        if place >= self.len() {
            return Err(ReaderError::NoSnapshot);
        }
        Ok(Snapshot {
            relative_time: self.relative_time(place)?,
            usage: self.digest.snapshot(place).ok_or(ReaderError::Snapshot(place))?,
        })
    }

    /// All snapshots in order; a damaged one is an error in its place.
    pub fn iter(&self) -> impl Iterator<Item = Result<Snapshot, ReaderError>> + use<'a> {
        let snapshots = *self;
        (0..self.len()).map(move |place| snapshots.get(place))
    }

    /// The place of the snapshot for a time.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn place_at(&self, time: f64) -> Result<usize, ReaderError> {
        let last = self.len().checked_sub(1).ok_or(ReaderError::NoSnapshot)?;
        let place = (time / self.interval()).floor();
        if self.mode == Mode::Compat {
            // Below 0 and what is no number become 0 here.
            return Ok((place as usize).min(last));
        }
        // Snapshot k was taken at k + 1 intervals, the last one maybe before.
        let before = (place as usize).saturating_sub(1).min(last);
        if before + 1 == last && time >= self.relative_time(last)? {
            return Ok(last);
        }
        Ok(before)
    }

    /// The digest itself.
    pub(super) fn digest(&self) -> &'a Digest {
        self.digest
    }
}
