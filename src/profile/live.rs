//! Adds up events to what is alive: the one place where records become estimates.

use foldhash::{HashMap, HashMapExt};

use super::model::{Event, Live};
use super::sampling::{WeightCache, Weights};

/// A value for each trace index. Indices that the .hpm knows are few and dense; any other comes from damage or a cut
/// file and may be anything up to 2^30, so those are hashed.
#[derive(Debug, Clone)]
pub struct TraceMap<T> {
    dense: Vec<T>,
    sparse: HashMap<u32, T>,
}

impl<T: Default + Clone> TraceMap<T> {
    /// A map for a profile of so many traces.
    pub fn new(trace_count: u32) -> Self {
        Self {
            dense: vec![T::default(); trace_count as usize + 1],
            sparse: HashMap::new(),
        }
    }

    /// The value of an index.
    #[inline]
    pub fn entry(&mut self, index: u32) -> &mut T {
        match self.dense.get_mut(index as usize) {
            Some(value) => value,
            None => self.sparse.entry(index).or_default(),
        }
    }

    /// All values in unspecified order, those never touched included.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let dense = self
            .dense
            .iter()
            .enumerate()
            .map(|(index, value)| (index as u32, value));
        dense.chain(self.sparse.iter().map(|(index, value)| (*index, value)))
    }
}

/// The running state of all traces.
#[derive(Debug, Clone)]
pub struct Tally {
    weights: WeightCache,
    traces: TraceMap<Live>,
    unmatched_frees: u64,
}

impl Tally {
    /// Nothing is alive yet.
    pub fn new(weights: Weights, trace_count: u32) -> Self {
        Self {
            weights: WeightCache::new(weights),
            traces: TraceMap::new(trace_count),
            unmatched_frees: 0,
        }
    }

    /// Counts one event. A free of a trace of which nothing is alive is ignored and counted as unmatched.
    pub fn apply(&mut self, event: &Event) {
        let weight = self.weights.of(event.size);
        let size = event.size as f64;
        let bytes = size * weight.objects;
        let bytes_variance = size * size * weight.variance;
        // A piece of a larger block adds bytes, but no object.
        let (count, objects, objects_variance) = if event.continues {
            (0, 0.0, 0.0)
        } else {
            (1, weight.objects, weight.variance)
        };
        let live = self.traces.entry(event.trace);
        if !event.is_free {
            live.bytes += bytes;
            live.objects += objects;
            live.bytes_variance += bytes_variance;
            live.objects_variance += objects_variance;
            live.alloc_bytes += bytes;
            live.alloc_objects += objects;
            live.sampled += count;
            live.sampled_bytes = live.sampled_bytes.saturating_add(event.size);
        } else if live.sampled <= count {
            self.unmatched_frees += u64::from(live.sampled < count);
            // Nothing is left: say 0, not what sums of rounded numbers leave over.
            *live = Live {
                alloc_bytes: live.alloc_bytes,
                alloc_objects: live.alloc_objects,
                ..Live::default()
            };
        } else {
            // Below 0 only by rounding, or by a free of another size than its allocation in a damaged file.
            live.bytes = (live.bytes - bytes).max(0.0);
            live.objects = (live.objects - objects).max(0.0);
            live.bytes_variance = (live.bytes_variance - bytes_variance).max(0.0);
            live.objects_variance = (live.objects_variance - objects_variance).max(0.0);
            live.sampled -= count;
            live.sampled_bytes = live.sampled_bytes.saturating_sub(event.size);
        }
    }

    /// State of one trace.
    #[inline]
    pub fn live(&mut self, trace: u32) -> Live {
        *self.traces.entry(trace)
    }

    /// State of every trace; those without any record are among them.
    pub fn traces(&self) -> impl Iterator<Item = (u32, &Live)> {
        self.traces.iter()
    }

    /// Frees for which no allocation was recorded: the file is damaged or incomplete.
    pub fn unmatched_frees(&self) -> u64 {
        self.unmatched_frees
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(trace: u32, size: u64, is_free: bool, continues: bool) -> Event {
        Event {
            number: 0,
            micros: 0,
            clock: std::time::Duration::ZERO,
            trace,
            is_free,
            size,
            continues,
        }
    }

    fn of(tally: &Tally, trace: u32) -> Live {
        *tally.traces().find(|(index, _)| *index == trace).unwrap().1
    }

    #[test]
    fn allocations_and_frees_cancel_to_exact_zero() {
        let mut tally = Tally::new(Weights::Period(1000), 1);
        for size in [1, 7, 100, 3, 10_000] {
            tally.apply(&event(1, size, false, false));
        }
        let all = of(&tally, 1);
        assert!(all.bytes > 14_000.0 && all.sampled == 5 && all.bytes_margin() > 0.0);
        for size in [100, 10_000, 1, 3, 7] {
            tally.apply(&event(1, size, true, false));
        }
        let none = of(&tally, 1);
        assert_eq!(
            (none.bytes, none.objects, none.bytes_variance, none.sampled_bytes),
            (0.0, 0.0, 0.0, 0)
        );
        assert_eq!(
            (none.alloc_bytes, none.alloc_objects),
            (all.alloc_bytes, all.alloc_objects)
        );
        tally.apply(&event(1, 100, true, false));
        assert_eq!((of(&tally, 1).bytes, tally.unmatched_frees()), (0.0, 1));
    }

    #[test]
    fn pieces_are_one_object() {
        let mut tally = Tally::new(Weights::Period(1), 0);
        for (free, continues) in [
            (false, false),
            (false, true),
            (false, false),
            (false, true),
            (true, false),
            (true, true),
        ] {
            tally.apply(&event(9, 1 << 30, free, continues));
        }
        let live = of(&tally, 9);
        assert_eq!((live.bytes, live.objects, live.sampled), ((1u64 << 31) as f64, 1.0, 1));
        for continues in [false, true] {
            tally.apply(&event(9, 1 << 30, true, continues));
        }
        assert_eq!((of(&tally, 9).bytes, tally.unmatched_frees()), (0.0, 0));
    }
}
