//! The maths of sampling: with what probability a block was recorded, and what one record stands for.
//!
//! A profile of period R records a block of x bytes with probability p(x) = 1 - e^(-x/R). A recorded block therefore
//! stands for 1/p(x) blocks, its bytes for x/p(x), and the sum of x²(1-p)/p² over the records is an unbiased estimate
//! of the variance of the estimated bytes. Period 1 means that every allocation is recorded: weight 1, variance 0.
//!
//! A .hpm can describe p only by ranges of constant probability. [`SamplingTable::for_period`] lays them so that
//! neither p nor 1/p is off by more than [`TABLE_TOLERANCE`] for any size (periods up to 16 MiB, and larger powers of
//! two; for other periods the 32-bit probabilities of the smallest blocks may be off by more, at 64 MiB by 0.8 %).

use super::format::PROBABILITY_ONE;
use std::sync::{Arc, Mutex, PoisonError};

/// The largest relative error of a table's probability, and of its inverse, for any size.
pub const TABLE_TOLERANCE: f64 = 0.0025;

/// The probability that a block of `size` bytes is recorded at this period.
pub fn probability(size: u64, period_bytes: u64) -> f64 {
    if period_bytes <= 1 {
        return 1.0;
    }
    // 1 - e^-y without the cancellation that small y would suffer.
    -(-(size as f64) / period_bytes as f64).exp_m1()
}

/// What one recorded block of `size` bytes stands for; 0 for a block that is never recorded (size 0).
pub fn weight(size: u64, period_bytes: u64) -> f64 {
    inverse(probability(size, period_bytes))
}

fn inverse(probability: f64) -> f64 {
    if probability > 0.0 { probability.recip() } else { 0.0 }
}

/// Sizes from the bound of the range before up to `bound`, exclusive, are recorded with one probability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplingRange {
    /// The first size that does not belong to the range.
    pub bound: u64,
    /// The probability times [`PROBABILITY_ONE`].
    pub fixed: u32,
}

impl SamplingRange {
    /// The probability as a number.
    pub fn probability(self) -> f64 {
        f64::from(self.fixed) / f64::from(PROBABILITY_ONE)
    }
}

/// The sampling table of a .hpm. Sizes at and above the last bound are always recorded.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SamplingTable {
    ranges: Vec<SamplingRange>,
}

impl SamplingTable {
    /// A table as read from a file: sorted here, and of equal bounds the later one wins.
    pub fn from_ranges(mut ranges: Vec<SamplingRange>) -> Self {
        ranges.reverse();
        ranges.sort_by_key(|range| range.bound);
        ranges.dedup_by_key(|range| range.bound);
        Self { ranges }
    }

    /// Describes 1 - e^(-x/R) for R = `period_bytes`; empty for period 1 (and 0), where everything is recorded.
    ///
    /// Each range is made as long as the tolerance allows: one size a range while sizes are small, then a constant
    /// ratio. The table ends where the true probability is within the tolerance of 1.
    pub fn for_period(period_bytes: u64) -> Self {
        let mut ranges = Vec::new();
        if period_bytes <= 1 {
            return Self { ranges };
        }
        // Size 0 asks for no bytes, so the sampler never picks it.
        ranges.push(SamplingRange { bound: 1, fixed: 0 });
        let end = first_certain_size(period_bytes);
        let mut first = 1;
        while first < end {
            let range = longest_range(first, end, period_bytes);
            first = range.bound;
            ranges.push(range);
        }
        Self { ranges }
    }

    /// The same, kept for who asks next: many recordings begin with the same period, and a table takes half a millisecond.
    pub fn shared(period_bytes: u64) -> Arc<Self> {
        static LAST: Mutex<Option<(u64, Arc<SamplingTable>)>> = Mutex::new(None);
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((period, table)) if *period == period_bytes => Arc::clone(table),
            _ => {
                let table = Arc::new(Self::for_period(period_bytes));
                *last = Some((period_bytes, Arc::clone(&table)));
                table
            }
        }
    }

    /// The ranges in ascending order.
    pub fn ranges(&self) -> &[SamplingRange] {
        &self.ranges
    }

    /// The first size that is always recorded.
    pub fn largest_bound(&self) -> u64 {
        self.ranges.last().map_or(0, |range| range.bound)
    }

    /// The place in [`ranges`](Self::ranges) of the range that `size` belongs to; `None` above all.
    pub fn range_of(&self, size: u64) -> Option<usize> {
        let place = self.ranges.partition_point(|range| range.bound <= size);
        (place < self.ranges.len()).then_some(place)
    }

    /// The probability that a block of `size` bytes was recorded.
    pub fn probability(&self, size: u64) -> f64 {
        self.range_of(size)
            .map_or(1.0, |place| self.ranges[place].probability())
    }
}

/// The smallest size whose probability is 1 within the tolerance.
fn first_certain_size(period_bytes: u64) -> u64 {
    let (mut below, mut certain) = (0, period_bytes.saturating_mul(8));
    while certain - below > 1 {
        let middle = below + (certain - below) / 2;
        if weight(middle, period_bytes) - 1.0 > TABLE_TOLERANCE {
            below = middle;
        } else {
            certain = middle;
        }
    }
    certain
}

/// The longest range from `first` to at most `end` whose best constant keeps the tolerance (or a single size if none
/// does).
fn longest_range(first: u64, end: u64, period_bytes: u64) -> SamplingRange {
    // p is monotone, so the error of a constant over a range is that at one of its ends.
    let fits = |last: u64| {
        last < end && error(best_fixed(first, last, period_bytes), first, last, period_bytes) <= TABLE_TOLERANCE
    };
    let mut good = first;
    let mut step = 1;
    while fits(good + step) {
        good += step;
        step *= 2;
    }
    while step > 1 {
        step /= 2;
        if fits(good + step) {
            good += step;
        }
    }
    SamplingRange {
        bound: good + 1,
        fixed: best_fixed(first, good, period_bytes),
    }
}

/// The stored probability whose inverse is the mean of the inverses at both ends.
fn best_fixed(first: u64, last: u64, period_bytes: u64) -> u32 {
    let mean = 2.0 / (weight(first, period_bytes) + weight(last, period_bytes));
    (mean * f64::from(PROBABILITY_ONE)).round() as u32
}

/// The larger relative error, of the probability and of its inverse, at both ends.
fn error(fixed: u32, first: u64, last: u64, period_bytes: u64) -> f64 {
    let stored = SamplingRange { bound: 0, fixed }.probability();
    [first, last].into_iter().fold(0.0, |worst: f64, size| {
        let ratio = stored / probability(size, period_bytes);
        worst.max((ratio - 1.0).abs()).max((ratio.recip() - 1.0).abs())
    })
}

/// How the records of a profile are weighted.
#[derive(Debug, Clone, PartialEq)]
pub enum Weights {
    /// By the exact probability at this period.
    Period(u64),
    /// By the ranges of a .hpm: all that is known without our sidecar.
    Table(SamplingTable),
}

impl Weights {
    /// What a record of `size` bytes says about the whole.
    pub fn of(&self, size: u64) -> Weight {
        Weight::from_probability(match self {
            Self::Period(period_bytes) => probability(size, *period_bytes),
            Self::Table(table) => table.probability(size),
        })
    }
}

/// Sizes below this have their weights worked out in advance.
const SMALL_SIZES: u64 = 8192;
/// So many larger ones are remembered.
const REMEMBERED: usize = 1024;

/// [`Weights`] that remembers its answers: an exponential for each event would cost more than everything else.
#[derive(Debug, Clone)]
pub struct WeightCache {
    weights: Weights,
    small: Vec<Weight>,
    /// What a record of each small size stands for in bytes: half as much memory to go through.
    small_bytes: Vec<f64>,
    /// By the size's low bits: a size and its weight.
    large: Vec<(u64, Weight)>,
}

impl WeightCache {
    /// Nothing is remembered yet but the small sizes.
    pub fn new(weights: Weights) -> Self {
        let small: Vec<_> = (0..SMALL_SIZES).map(|size| weights.of(size)).collect();
        let bytes = (0..)
            .zip(&small)
            .map(|(size, weight): (u64, &Weight)| size as f64 * weight.objects);
        Self {
            small_bytes: bytes.collect(),
            small,
            large: vec![(0, weights.of(0)); REMEMBERED],
            weights,
        }
    }

    /// The bytes that a record of `size` bytes stands for.
    #[inline]
    pub fn bytes_of(&mut self, size: u64) -> f64 {
        match self.small_bytes.get(size as usize) {
            Some(bytes) => *bytes,
            None => size as f64 * self.of(size).objects,
        }
    }

    /// [`Weights::of`].
    #[inline]
    pub fn of(&mut self, size: u64) -> Weight {
        if let Some(weight) = self.small.get(size as usize) {
            return *weight;
        }
        let known = &mut self.large[size as usize % REMEMBERED];
        if known.0 != size {
            *known = (size, self.weights.of(size));
        }
        known.1
    }
}

/// The contribution of one record, per object; see the module documentation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight {
    /// 1/p: the number of objects it stands for.
    pub objects: f64,
    /// (1-p)/p²: what it adds to the variance of the number of objects.
    pub variance: f64,
}

impl Weight {
    fn from_probability(probability: f64) -> Self {
        let objects = inverse(probability);
        Self {
            objects,
            variance: (1.0 - probability) * objects * objects,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_size_is_off_by_more_than_the_tolerance() {
        for period in [2, 3, 100, 4096, 131_072] {
            let table = SamplingTable::for_period(period);
            let mut worst: f64 = 0.0;
            for size in 1..8 * period {
                let (stored, exact) = (table.probability(size), probability(size, period));
                worst = worst
                    .max((stored / exact - 1.0).abs())
                    .max((exact / stored - 1.0).abs());
            }
            assert!(worst <= TABLE_TOLERANCE, "period {period}: {worst}");
        }
    }

    /// As above for a period with too many sizes to try: p is monotone, so both ends of a range bound its error.
    #[test]
    fn long_periods_keep_the_tolerance_too() {
        for period in [1 << 19, 5_000_000, 1 << 24, 1 << 26] {
            let table = SamplingTable::for_period(period);
            let mut first = 1;
            for range in &table.ranges()[1..] {
                let worst = error(range.fixed, first, range.bound - 1, period);
                assert!(
                    worst <= TABLE_TOLERANCE,
                    "period {period}, sizes {first}..{}: {worst}",
                    range.bound
                );
                first = range.bound;
            }
            assert!(1.0 - probability(first, period) <= TABLE_TOLERANCE);
            assert!(
                table.ranges().len() < 3500,
                "period {period}: {} ranges",
                table.ranges().len()
            );
        }
    }

    #[test]
    fn small_sizes_have_their_own_ranges_and_zero_is_never_recorded() {
        let table = SamplingTable::for_period(131_072);
        assert_eq!(table.probability(0), 0.0);
        assert_eq!(
            Weights::Table(table.clone()).of(0),
            Weight {
                objects: 0.0,
                variance: 0.0
            }
        );
        for (place, range) in table.ranges()[..200].iter().enumerate() {
            assert_eq!(range.bound, place as u64 + 1);
        }
        // docs/format.md says so.
        assert_eq!(table.ranges().len(), 1417);
        assert!(table.ranges().is_sorted_by(|a, b| a.bound < b.bound));
        assert_eq!(table.probability(table.largest_bound()), 1.0);
    }

    #[test]
    fn period_one_records_everything() {
        assert!(SamplingTable::for_period(1).ranges().is_empty());
        for size in [0, 1, 1 << 40] {
            assert_eq!(
                Weights::Period(1).of(size),
                Weight {
                    objects: 1.0,
                    variance: 0.0
                }
            );
            assert_eq!(weight(size, 1), 1.0);
        }
    }

    #[test]
    fn weights_are_precise_for_tiny_and_huge_ratios() {
        // 1/(1-e^-y) = 1/y + 1/2 + y/12 - ...
        let y = 1.0 / (1u64 << 40) as f64;
        assert!((weight(1, 1 << 40) / (1.0 / y + 0.5) - 1.0).abs() < 1e-15);
        assert_eq!(weight(1 << 40, 4096), 1.0);
        assert_eq!(weight(0, 4096), 0.0);
        let weight = Weights::Period(1000).of(1000);
        let p = 1.0 - (-1f64).exp();
        assert!((weight.objects - 1.0 / p).abs() < 1e-12 && (weight.variance - (1.0 - p) / (p * p)).abs() < 1e-12);
    }

    #[test]
    fn a_size_belongs_to_the_smallest_greater_bound() {
        let range = |bound, fixed| SamplingRange { bound, fixed };
        let table = SamplingTable::from_ranges(vec![range(8192, 7), range(128, 5), range(128, 6)]);
        assert_eq!(table.ranges(), [range(128, 6), range(8192, 7)]);
        assert_eq!(
            [0, 127, 128, 8191, 8192].map(|size| table.range_of(size)),
            [Some(0), Some(0), Some(1), Some(1), None]
        );
    }
}
