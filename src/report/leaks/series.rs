//! What was live over time, of one group of traces, in a bounded number of bins.
//!
//! Of each bin is kept the *floor*: the least that was live at any of eight moments in it. Floors see what stays and not
//! what comes and goes: a request that is served, a buffer that is filled and dropped, garbage that waits for its
//! collection. They are taken at moments rather than continuously, because a realloc is a free and an allocation and leaves a
//! gap of no duration between them.

use std::time::Duration;

/// A recording is cut into this many bins at most; when it gets longer, two become one.
pub const MAX_BINS: usize = 96;
/// Moments at which a bin is looked at.
const MOMENTS: u64 = 8;
/// Width of the first bins in microseconds: shorter recordings than 24 of them are not judged.
const FIRST_WIDTH: u64 = 80_000;

/// The clock of all series of a recording.
#[derive(Debug, Clone, Copy)]
pub struct Bins {
    width: u64,
}

impl Default for Bins {
    fn default() -> Self {
        Self { width: FIRST_WIDTH }
    }
}

impl Bins {
    /// Width of a bin in seconds.
    pub fn width_seconds(self) -> f64 {
        self.width as f64 * 1e-6
    }

    /// The number of bins, a last one that is not full left out.
    pub fn whole(self, elapsed: Duration) -> usize {
        (elapsed.as_micros() / u128::from(self.width)).min(MAX_BINS as u128) as usize
    }

    /// The moment that was last at this time.
    pub fn moment(self, at: Duration) -> u64 {
        u64::try_from(at.as_micros()).unwrap_or(u64::MAX) / (self.width / MOMENTS)
    }

    /// The bin of a moment that is not beyond the last.
    pub fn bin_of(moment: u64) -> usize {
        (moment / MOMENTS).min(MAX_BINS as u64 - 1) as usize
    }

    /// Whether this moment is beyond the last bin.
    pub fn is_beyond(moment: u64) -> bool {
        moment >= MAX_BINS as u64 * MOMENTS
    }

    /// Doubles the width. Every series has to be halved as well.
    pub fn double(&mut self) {
        self.width = self.width.saturating_mul(2);
    }
}

/// What is live at a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Level {
    /// Bytes.
    pub bytes: f64,
    /// Sampling variance of the bytes.
    pub variance: f64,
    /// Objects.
    pub objects: f64,
    /// Samples.
    pub samples: u64,
}

impl Level {
    /// Adds (`sign` 1) or takes away (-1) one sample.
    pub fn change(&mut self, sample: &Level, sign: f64) {
        self.samples = if sign > 0.0 {
            self.samples + sample.samples
        } else if self.samples <= sample.samples {
            // Nothing is left: say 0, not what sums of rounded numbers leave over.
            *self = Self::default();
            return;
        } else {
            self.samples - sample.samples
        };
        self.bytes = (self.bytes + sign * sample.bytes).max(0.0);
        self.variance = (self.variance + sign * sample.variance).max(0.0);
        self.objects = (self.objects + sign * sample.objects).max(0.0);
    }
}

/// A bin in which something happened.
#[derive(Debug, Clone, Copy)]
struct Cell {
    bin: u32,
    floor: f64,
    floor_variance: f64,
    /// At its end, and in all bins up to the next cell.
    end: f64,
    end_variance: f64,
    /// Allocated in all up to its end.
    allocated: f64,
}

impl Cell {
    fn lower(&mut self, bytes: f64, variance: f64) {
        if bytes < self.floor {
            (self.floor, self.floor_variance) = (bytes, variance);
        }
    }
}

/// One group of traces over time.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// What is live now.
    pub now: Level,
    allocated: f64,
    moment: u64,
    cells: Vec<Cell>,
}

/// A series, bin by bin.
#[derive(Debug, Clone, PartialEq)]
pub struct Floors {
    /// The least that was live in each bin.
    pub bytes: Vec<f64>,
    /// Its sampling variance.
    pub variance: Vec<f64>,
    /// Allocated up to the end of the bin.
    pub allocated: Vec<f64>,
}

impl Series {
    /// Counts a sample that was allocated (`sign` 1) or freed (-1) after `moment`.
    pub fn count(&mut self, moment: u64, sample: &Level, sign: f64) {
        let bin = (moment / MOMENTS) as u32;
        let Level { bytes, variance, .. } = self.now;
        if moment > self.moment {
            if let Some(last) = self.cells.last_mut()
                && (u64::from(last.bin) + 1) * MOMENTS > self.moment + 1
            {
                last.lower(bytes, variance);
            }
            self.moment = moment;
        }
        match self.cells.last_mut() {
            Some(last) if last.bin >= bin => {}
            _ => self.cells.push(Cell {
                bin,
                floor: bytes,
                floor_variance: variance,
                end: bytes,
                end_variance: variance,
                allocated: self.allocated,
            }),
        }
        self.now.change(sample, sign);
        if sign > 0.0 {
            self.allocated += sample.bytes;
        }
        if let Some(last) = self.cells.last_mut() {
            last.end = self.now.bytes;
            last.end_variance = self.now.variance;
            last.allocated = self.allocated;
        }
    }

    /// Two bins become one.
    pub fn halve(&mut self) {
        let mut merged: Vec<Cell> = Vec::with_capacity(self.cells.len() / 2 + 1);
        for &cell in &self.cells {
            let mut cell = cell;
            let is_first_half = cell.bin % 2 == 0;
            cell.bin /= 2;
            if is_first_half {
                // What was live at its end was so at the first moment of the second half.
                cell.lower(cell.end, cell.end_variance);
                merged.push(cell);
                continue;
            }
            match merged.last_mut().filter(|last| last.bin == cell.bin) {
                Some(last) => {
                    let first = *last;
                    *last = cell;
                    last.lower(first.floor, first.floor_variance);
                }
                None => merged.push(cell),
            }
        }
        self.cells = merged;
        self.moment /= 2;
    }

    /// The first `count` bins.
    pub fn floors(&self, count: usize) -> Floors {
        let mut floors = Floors {
            bytes: Vec::with_capacity(count),
            variance: Vec::with_capacity(count),
            allocated: Vec::with_capacity(count),
        };
        let mut cells = self.cells.iter().peekable();
        let (mut bytes, mut variance, mut allocated) = (0.0, 0.0, 0.0);
        for bin in 0..count as u32 {
            if let Some(cell) = cells.next_if(|cell| cell.bin <= bin) {
                let mut cell = *cell;
                if cells.peek().is_none() && (u64::from(cell.bin) + 1) * MOMENTS > self.moment + 1 {
                    // Nothing came after it that would have looked at the rest of its bin.
                    cell.lower(cell.end, cell.end_variance);
                }
                floors.bytes.push(cell.floor);
                floors.variance.push(cell.floor_variance);
                (bytes, variance, allocated) = (cell.end, cell.end_variance, cell.allocated);
            } else {
                floors.bytes.push(bytes);
                floors.variance.push(variance);
            }
            floors.allocated.push(allocated);
        }
        floors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Level = Level {
        bytes: 10.0,
        variance: 100.0,
        objects: 1.0,
        samples: 1,
    };

    /// Moments of allocations and frees.
    fn series(changes: &[(u64, f64)]) -> Series {
        let mut series = Series::default();
        for (moment, sign) in changes {
            series.count(*moment, &SAMPLE, *sign);
        }
        series
    }

    #[test]
    fn floors_see_what_stays() {
        // Bin 0: one that stays. Bin 2: one that comes and goes. Bin 4: one that stays, after a gap.
        let series = series(&[(1, 1.0), (17, 1.0), (20, -1.0), (33, 1.0)]);
        assert_eq!(series.floors(6).bytes, [0.0, 10.0, 10.0, 10.0, 10.0, 20.0]);
        assert_eq!(series.floors(6).allocated, [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]);
        assert_eq!(series.now.bytes, 20.0);
    }

    #[test]
    fn a_dip_between_two_moments_is_none() {
        let series = series(&[(1, 1.0), (11, -1.0), (11, 1.0), (12, -1.0), (14, 1.0), (50, 1.0)]);
        assert_eq!(series.floors(4).bytes, [0.0, 0.0, 10.0, 10.0]);
        let only_a_gap = self::series(&[(1, 1.0), (11, -1.0), (11, 1.0), (50, 1.0)]);
        assert_eq!(only_a_gap.floors(4).bytes, [0.0, 10.0, 10.0, 10.0]);
    }

    #[test]
    fn halving_keeps_the_floors() {
        let changes = [
            (1, 1.0),
            (9, 1.0),
            (17, 1.0),
            (27, -1.0),
            (44, 1.0),
            (47, 1.0),
            (70, 1.0),
            (90, -1.0),
            (92, -1.0),
        ];
        let fine = series(&changes);
        let mut coarse = fine.clone();
        coarse.halve();
        let (fine, coarse) = (fine.floors(12), coarse.floors(6));
        for bin in 0..6 {
            let least = fine.bytes[2 * bin].min(fine.bytes[2 * bin + 1]);
            assert_eq!(coarse.bytes[bin], least, "{bin}: {fine:?} {coarse:?}");
            assert_eq!(coarse.allocated[bin], fine.allocated[2 * bin + 1]);
        }
    }

    #[test]
    fn nothing_left_is_exactly_nothing() {
        let mut level = Level::default();
        let odd = Level { bytes: 0.1, ..SAMPLE };
        for _ in 0..3 {
            level.change(&odd, 1.0);
        }
        for _ in 0..4 {
            level.change(&odd, -1.0);
        }
        assert_eq!(level, Level::default());
    }
}
