//! How old live blocks are, and how large allocations are.

use std::collections::VecDeque;
use std::time::Duration;

use foldhash::{HashMap, HashMapExt};

use super::{Reader, ReaderError};
use crate::profile::model::Live;
use crate::profile::sampling::WeightCache;

/// How old the live blocks of a trace are, in seconds.
///
/// A free does not name the block that it ends, only its trace and size, so ages are known within bounds: the least if of
/// equal blocks the oldest is always freed first, the most if the youngest is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Age {
    /// Trace index.
    pub trace: u32,
    /// Estimated live objects.
    pub objects: f64,
    /// Records of live blocks.
    pub sampled: u64,
    /// Mean age of these objects, at least and at most.
    pub mean_seconds: (f64, f64),
    /// Age of the oldest recorded block, at least and at most.
    pub oldest_seconds: (f64, f64),
}

/// Allocations of sizes from `low` to `high`, both included.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SizeClass {
    /// Smallest size.
    pub low: u64,
    /// Largest size: a power of two.
    pub high: u64,
    /// Estimates of what is alive and what was allocated.
    pub live: Live,
}

#[derive(Debug, Default)]
struct Times {
    oldest_first: VecDeque<u64>,
    youngest_first: Vec<u64>,
}

impl Reader {
    /// How old the live blocks of each trace are at a moment (`None`: the end), by index. One pass; memory in proportion to the
    /// records that are alive.
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn ages(&self, at: Option<Duration>) -> Result<Vec<Age>, ReaderError> {
        let mut classes: HashMap<(u32, u64), Times> = HashMap::new();
        for event in self.profile.events()? {
            if at.is_some_and(|at| event.clock > at) {
                break;
            }
            if event.continues {
                continue;
            }
            let key = (event.trace, event.size);
            let times = classes.entry(key).or_default();
            if event.is_free {
                times.oldest_first.pop_front();
                times.youngest_first.pop();
                if times.youngest_first.is_empty() {
                    classes.remove(&key);
                }
            } else {
                let micros = u64::try_from(event.clock.as_micros()).unwrap_or(u64::MAX);
                times.oldest_first.push_back(micros);
                times.youngest_first.push(micros);
            }
        }
        let now = match at {
            Some(at) => at,
            None => self.profile.elapsed()?,
        };
        let now = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let age = |micros: &u64| now.saturating_sub(*micros) as f64 * 1e-6;
        let mut weights = WeightCache::new(self.profile.weights());
        let mut ages: HashMap<u32, Age> = HashMap::new();
        for ((trace, size), times) in classes {
            let weight = weights.of(size).objects;
            let sum = ages.entry(trace).or_default();
            sum.trace = trace;
            sum.objects += weight * times.youngest_first.len() as f64;
            sum.sampled += times.youngest_first.len() as u64;
            // Weighted sums here, means below.
            sum.mean_seconds.0 += weight * times.oldest_first.iter().map(age).sum::<f64>();
            sum.mean_seconds.1 += weight * times.youngest_first.iter().map(age).sum::<f64>();
            let oldest = |first: Option<&u64>| first.map_or(0.0, age);
            sum.oldest_seconds.0 = sum.oldest_seconds.0.max(oldest(times.oldest_first.front()));
            sum.oldest_seconds.1 = sum.oldest_seconds.1.max(oldest(times.youngest_first.first()));
        }
        let mut ages: Vec<_> = ages.into_values().collect();
        for age in &mut ages {
            let mean = |sum: f64| if age.objects > 0.0 { sum / age.objects } else { 0.0 };
            age.mean_seconds = (mean(age.mean_seconds.0), mean(age.mean_seconds.1));
        }
        ages.sort_unstable_by_key(|age| age.trace);
        Ok(ages)
    }

    /// Allocations and what is alive of them by size, in powers of two, up to a moment (`None`: the end): the original's
    /// statistics mode. Sizes 0 and 1 are one class; classes without an allocation are left out. One pass, O(1) memory.
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn size_histogram(&self, at: Option<Duration>) -> Result<Vec<SizeClass>, ReaderError> {
        let mut weights = WeightCache::new(self.profile.weights());
        let mut bins = [Live::default(); 65];
        for event in self.profile.events()? {
            if at.is_some_and(|at| event.clock > at) {
                break;
            }
            let weight = weights.of(event.size);
            let bytes = event.size as f64 * weight.objects;
            let variance = event.size as f64 * event.size as f64 * weight.variance;
            // Pieces of a block are counted with the class of a piece, but as no objects.
            let (count, objects) = if event.continues { (0, 0.0) } else { (1, weight.objects) };
            let bin = &mut bins[bin_of(event.size)];
            let sign = if event.is_free { -1.0 } else { 1.0 };
            bin.bytes = (bin.bytes + sign * bytes).max(0.0);
            bin.objects = (bin.objects + sign * objects).max(0.0);
            bin.bytes_variance = (bin.bytes_variance + sign * variance).max(0.0);
            if event.is_free {
                bin.sampled = bin.sampled.saturating_sub(count);
            } else {
                bin.sampled += count;
                bin.alloc_bytes += bytes;
                bin.alloc_objects += objects;
            }
            if bin.sampled == 0 && event.is_free {
                // Nothing is left: say 0, not what sums of rounded numbers leave over.
                (bin.bytes, bin.objects, bin.bytes_variance) = (0.0, 0.0, 0.0);
            }
        }
        let classes = bins.iter().enumerate().map(|(bin, live)| SizeClass {
            low: limits_of(bin).0,
            high: limits_of(bin).1,
            live: *live,
        });
        Ok(classes.filter(|class| class.live.alloc_objects > 0.0).collect())
    }
}

/// The smallest and the largest size of a bin, both included.
pub(crate) fn limits_of(bin: usize) -> (u64, u64) {
    let low = if bin == 0 { 0 } else { (1u64 << (bin - 1)) + 1 };
    (low, 1u64.checked_shl(bin as u32).unwrap_or(u64::MAX))
}

/// ceil(log2 size); 0 for sizes 0 and 1.
pub(crate) fn bin_of(size: u64) -> usize {
    if size <= 1 {
        0
    } else {
        64 - (size - 1).leading_zeros() as usize
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn bins_are_powers_of_two() {
        let sizes = [0, 1, 2, 3, 4, 5, 16, 17, 1 << 40, (1 << 40) + 1, u64::MAX];
        assert_eq!(sizes.map(super::bin_of), [0, 0, 1, 2, 2, 3, 4, 5, 40, 41, 64]);
    }
}
