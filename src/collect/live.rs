//! The model of what is live now: sampled, and what it stands for.

use super::tree::NamedFrame;
use crate::profile::sampling;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// A live sample.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Index into [`Live::traces`].
    pub trace: u32,
    /// Size as asked for, in bytes.
    pub size: u64,
    /// When it was allocated, in milliseconds since the start.
    pub born: u64,
}

/// Estimated quantities with their variance.
#[derive(Debug, Clone, Copy, Default)]
pub struct Estimate {
    /// Samples that it is made of.
    pub samples: u64,
    /// Estimated bytes.
    pub bytes: f64,
    /// Estimated number of blocks.
    pub objects: f64,
    /// Variance of `bytes`.
    pub variance: f64,
}

impl Estimate {
    fn add(&mut self, size: u64, period: u64, sign: f64) {
        let weight = sampling::weight(size, period);
        let bytes = size as f64 * weight;
        self.bytes += sign * bytes;
        self.objects += sign * weight;
        // x^2 (1 - p) / p^2, with the weight 1/p.
        self.variance += sign * bytes * bytes * (1.0 - 1.0 / weight);
        self.samples = if sign > 0.0 {
            self.samples + 1
        } else {
            self.samples.saturating_sub(1)
        };
        if self.samples == 0 {
            // What rounding has left is nothing.
            *self = Self::default();
        }
    }

    /// Half the width of the 95 % interval of `bytes`, by the normal approximation.
    #[must_use]
    pub fn error95(&self) -> f64 {
        1.96 * self.variance.max(0.0).sqrt()
    }
}

/// One allocation trace.
#[derive(Debug, Clone)]
pub struct Trace {
    /// The allocating line.
    pub site: NamedFrame,
    /// Allocator domain.
    pub domain: u8,
    /// What is live of it.
    pub live: Estimate,
}

/// All that is live.
#[derive(Debug)]
pub struct Live {
    period: u64,
    /// By trace index - 1.
    pub traces: Vec<Trace>,
    samples: HashMap<u64, Sample>,
    /// Sum over all traces.
    pub total: Estimate,
    /// Samples taken since the start.
    pub sampled: u64,
    /// Frames that could not be named.
    pub unresolved: u64,
    /// Stacks that there was no memory to keep.
    pub not_kept: u64,
}

impl Live {
    /// Nothing yet.
    #[must_use]
    pub fn new(period: u64) -> Self {
        let (traces, samples, total) = (Vec::new(), HashMap::new(), Estimate::default());
        Self {
            period,
            traces,
            samples,
            total,
            sampled: 0,
            unresolved: 0,
            not_kept: 0,
        }
    }

    /// A sample has come; false if its id is known already.
    pub fn add(&mut self, id: u64, trace: u32, size: u64, at: Duration) -> bool {
        if self.samples.contains_key(&id) {
            return false;
        }
        let born = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
        self.samples.insert(id, Sample { trace, size, born });
        self.sampled += 1;
        self.count(trace, size, 1.0);
        true
    }

    /// A sample has gone; what it was, if it is known.
    pub fn remove(&mut self, id: u64) -> Option<Sample> {
        let sample = self.samples.remove(&id)?;
        self.count(sample.trace, sample.size, -1.0);
        Some(sample)
    }

    fn count(&mut self, trace: u32, size: u64, sign: f64) {
        self.total.add(size, self.period, sign);
        if let Some(trace) = (trace as usize).checked_sub(1).and_then(|at| self.traces.get_mut(at)) {
            trace.live.add(size, self.period, sign);
        }
    }

    /// Ids of all live samples.
    pub fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.samples.keys().copied()
    }

    /// The live samples of each trace: when each was allocated, in milliseconds since the start, and its size.
    pub fn births(&self) -> BTreeMap<u32, Vec<(u64, u64)>> {
        let mut births: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
        for sample in self.samples.values() {
            births.entry(sample.trace).or_default().push((sample.born, sample.size));
        }
        births.values_mut().for_each(|births| births.sort_unstable());
        births
    }

    /// True if this sample is live.
    #[must_use]
    pub fn contains(&self, id: u64) -> bool {
        self.samples.contains_key(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_gone_leaves_exactly_nothing() {
        let mut live = Live::new(131_072);
        let trace = Trace {
            site: NamedFrame {
                file: "f.py".into(),
                line: 1,
                function: "f".into(),
            },
            domain: 0,
            live: Estimate::default(),
        };
        live.traces.push(trace);
        for id in 1..=1000 {
            assert!(live.add(id, 1, 7 + id % 13, Duration::from_millis(id)));
        }
        assert!(!live.add(1000, 1, 7, Duration::ZERO));
        assert!(live.total.bytes > 1000.0 * 131_072.0 * 0.9);
        let births: Vec<(u64, u64)> = (1..=1000).map(|id| (id, 7 + id % 13)).collect();
        assert_eq!(live.births()[&1], births);
        for id in 1..=1000 {
            live.remove(id).unwrap();
        }
        assert!(live.remove(1).is_none());
        assert_eq!(
            (live.total.bytes, live.total.objects, live.total.variance),
            (0.0, 0.0, 0.0)
        );
        assert_eq!(live.traces[0].live.bytes, 0.0);
    }
}
