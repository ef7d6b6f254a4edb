//! The model of what is live now: sampled, and what it stands for.

use super::tree::NamedFrame;
use crate::profile::sampling;
use foldhash::{HashMap, HashMapExt};
use pyheap_protocol::domain;
use pyheap_protocol::thin::keeps;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Blocks that wait to be looked at, at most.
const MAX_QUEUE: usize = 4 << 20;

/// What a block holds: a number in [`Live::kinds`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind(u16);

impl Kind {
    /// Nobody has looked, or it was gone by then.
    pub const UNKNOWN: Self = Self(0);
    /// A block of the raw domain.
    pub const RAW_BUFFER: Self = Self(1);
    /// A block of the mem domain.
    pub const MEM_BUFFER: Self = Self(2);
    /// A block of the obj domain without an object.
    pub const OBJ_BUFFER: Self = Self(3);
    /// An object of one of too many types.
    pub const OTHER: Self = Self(4);
    /// A block that native code got from `malloc`.
    pub const MALLOC_BUFFER: Self = Self(5);
    /// A mapping.
    pub const MAPPING: Self = Self(6);
    const NAMES: [&'static str; 7] = [
        "(unknown)",
        "buffer (raw)",
        "buffer (mem)",
        "buffer (obj)",
        "(one of too many types)",
        "buffer (malloc)",
        "mapping (mmap)",
    ];

    /// What is known of a block by its domain alone.
    #[must_use]
    pub const fn of_domain(domain: u8) -> Self {
        match domain {
            domain::RAW => Self::RAW_BUFFER,
            domain::MEM => Self::MEM_BUFFER,
            domain::MALLOC => Self::MALLOC_BUFFER,
            domain::MMAP => Self::MAPPING,
            _ => Self::UNKNOWN,
        }
    }

    /// Its place in the list of names.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// How many live samples of a trace are of a kind and a size, by trace.
pub type KindCounts = BTreeMap<u32, BTreeMap<(Kind, u64), u64>>;

/// A live sample.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Index into [`Live::traces`].
    pub trace: u32,
    /// Size as asked for, in bytes.
    pub size: u64,
    /// Period under which it was picked, in bytes.
    pub period: u64,
    /// When it was allocated, in milliseconds since the start.
    pub born: u64,
    /// Where it is in the target.
    pub address: u64,
    /// What it holds.
    pub kind: Kind,
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
    /// Adds a sample (`sign` 1), or takes it away again (-1).
    pub fn add(&mut self, size: u64, period: u64, sign: f64) {
        self.add_weighted(size, sampling::weight(size, period), sign);
    }

    /// The same, of a sample that stands for so many blocks.
    fn add_weighted(&mut self, size: u64, weight: f64, sign: f64) {
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

    /// Adds what others stand for; samples are independent.
    pub fn merge(&mut self, other: &Self) {
        self.samples += other.samples;
        self.bytes += other.bytes;
        self.objects += other.objects;
        self.variance += other.variance;
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
    /// Number of the thread; 0 if it is not known, or not kept apart.
    pub thread: u32,
    /// Frames of its stack.
    pub depth: u32,
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
    /// Names of what blocks hold, by the number of the kind.
    pub kinds: Vec<Arc<str>>,
    /// Samples whose kind is not known yet, oldest first.
    queue: VecDeque<u64>,
    /// Sum over all traces.
    pub total: Estimate,
    /// Samples taken since the start.
    pub sampled: u64,
    /// Frames of their stacks.
    pub frames: u64,
    /// Frames that could not be named.
    pub unresolved: u64,
    /// Stacks that there was no memory to keep.
    pub not_kept: u64,
    /// Pieces of native stacks that there was no time for.
    pub native_stacks_left_out: u64,
    /// Native stacks that were not found to their end.
    pub native_stacks_cut: u64,
    /// Estimated bytes and blocks whose allocation was lost in the ring and found in the table later.
    pub found_late: (f64, f64),
    /// Samples that were found to be free though nobody saw them freed, and that the shim's table still has.
    pub missed: u64,
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
            kinds: Kind::NAMES.map(Arc::from).to_vec(),
            queue: VecDeque::new(),
            total,
            sampled: 0,
            frames: 0,
            unresolved: 0,
            not_kept: 0,
            native_stacks_left_out: 0,
            native_stacks_cut: 0,
            found_late: (0.0, 0.0),
            missed: 0,
        }
    }

    /// A sample has come; false if its id is known already.
    pub fn add(&mut self, id: u64, sample: Sample) -> bool {
        if self.samples.contains_key(&id) {
            return false;
        }
        self.samples.insert(id, sample);
        if sample.kind == Kind::UNKNOWN {
            self.queue_again(std::iter::once(id));
        }
        self.sampled += 1;
        let trace = (sample.trace as usize)
            .checked_sub(1)
            .and_then(|at| self.traces.get(at));
        self.frames += trace.map_or(0, |trace| u64::from(trace.depth));
        self.count(sample.trace, sample.size, 1.0);
        true
    }

    /// The period that samples stand for now, in bytes.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.period
    }

    /// Whether a sample that was picked under period `from` is one under the present period.
    #[must_use]
    pub fn keeps(&self, id: u64, size: u64, from: u64) -> bool {
        keeps(id, size, from, self.period)
    }

    /// How many of the live samples are expected to survive a raise of the period.
    #[must_use]
    pub fn survivors(&self, period: u64) -> f64 {
        let share = |sample: &Sample| {
            sampling::probability(sample.size, period) / sampling::probability(sample.size, self.period)
        };
        self.samples.values().map(share).sum()
    }

    /// Goes over to a longer period. Samples that do not survive go, and so do traces of which nothing is left; the others
    /// are numbered anew, in the same order. Gives the new index of each old trace (by index - 1), 0 for those that went.
    pub fn raise(&mut self, period: u64) -> Vec<u32> {
        self.period = period;
        self.samples
            .retain(|&id, sample| keeps(id, sample.size, sample.period, period));
        let mut used = vec![false; self.traces.len()];
        for sample in self.samples.values() {
            if let Some(used) = (sample.trace as usize).checked_sub(1).and_then(|at| used.get_mut(at)) {
                *used = true;
            }
        }
        let mut last = 0;
        let renumbered: Vec<u32> = used
            .iter()
            .map(|&used| {
                last += u32::from(used);
                if used { last } else { 0 }
            })
            .collect();
        let mut used = used.iter();
        self.traces.retain(|_| used.next().copied().unwrap_or(false));
        for trace in &mut self.traces {
            trace.live = Estimate::default();
        }
        self.total = Estimate::default();
        let mut sizes = Vec::with_capacity(self.samples.len());
        for sample in self.samples.values_mut() {
            let at = (sample.trace as usize).wrapping_sub(1);
            sample.trace = renumbered.get(at).copied().unwrap_or(0);
            sizes.push((sample.trace, sample.size));
        }
        for (trace, size) in sizes {
            self.count(trace, size, 1.0);
        }
        renumbered
    }

    /// All live samples, oldest first.
    #[must_use]
    pub fn by_age(&self) -> Vec<(u64, Sample)> {
        let mut all: Vec<_> = self.samples.iter().map(|(&id, &sample)| (id, sample)).collect();
        all.sort_unstable_by_key(|&(id, _)| id);
        all
    }

    /// A sample whose record was lost has been found in the table.
    pub fn note_late(&mut self, size: u64) {
        let weight = sampling::weight(size, self.period);
        self.found_late.0 += size as f64 * weight;
        self.found_late.1 += weight;
    }

    /// A sample has gone; what it was, if it is known.
    pub fn remove(&mut self, id: u64) -> Option<Sample> {
        let sample = self.samples.remove(&id)?;
        self.count(sample.trace, sample.size, -1.0);
        Some(sample)
    }

    fn count(&mut self, trace: u32, size: u64, sign: f64) {
        let weight = sampling::weight(size, self.period);
        self.total.add_weighted(size, weight, sign);
        if let Some(trace) = (trace as usize).checked_sub(1).and_then(|at| self.traces.get_mut(at)) {
            trace.live.add_weighted(size, weight, sign);
        }
    }

    /// The live samples of native memory, by id.
    pub fn native_samples(&self) -> impl Iterator<Item = (u64, &Sample)> {
        let samples = self.samples.iter().map(|(&id, sample)| (id, sample));
        samples.filter(|(_, sample)| matches!(sample.kind, Kind::MALLOC_BUFFER | Kind::MAPPING))
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

    /// How many samples wait for somebody to look at what they hold.
    #[must_use]
    pub fn queue_len(&self) -> usize {
        self.queue.len()
    }

    /// Takes the first of them, and says what it is if it is still alive. `None` if it was born after `before`, in milliseconds
    /// since the start.
    pub fn next_queued(&mut self, before: u64) -> Option<(u64, Option<Sample>)> {
        let id = *self.queue.front()?;
        let sample = self.samples.get(&id).copied();
        if sample.is_some_and(|sample| sample.born > before) {
            return None;
        }
        self.queue.pop_front();
        Some((id, sample))
    }

    /// Puts samples at the end of that queue, if it has room.
    pub fn queue_again(&mut self, ids: impl Iterator<Item = u64>) {
        let room = MAX_QUEUE.saturating_sub(self.queue.len());
        self.queue.extend(ids.take(room));
    }

    /// What a sample holds is known now.
    pub fn set_kind(&mut self, id: u64, kind: Kind) {
        if let Some(sample) = self.samples.get_mut(&id) {
            sample.kind = kind;
        }
    }

    /// A type that was not met before. There are at most some 16,000.
    pub fn add_kind(&mut self, name: &Arc<str>) -> Kind {
        let Ok(number) = u16::try_from(self.kinds.len()) else {
            return Kind::OTHER;
        };
        self.kinds.push(Arc::clone(name));
        Kind(number)
    }

    /// What the live samples of each trace hold.
    #[must_use]
    pub fn kind_counts(&self) -> KindCounts {
        let mut counts = KindCounts::new();
        for sample in self.samples.values() {
            let of_trace = counts.entry(sample.trace).or_default();
            *of_trace.entry((sample.kind, sample.size)).or_default() += 1;
        }
        counts
    }

    /// All live samples, in no order.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.samples.values()
    }

    /// What a kind is called.
    #[must_use]
    pub fn kind_name(&self, kind: Kind) -> Arc<str> {
        let name = self.kinds.get(kind.index()).or(self.kinds.first());
        name.map_or_else(|| Kind::NAMES[0].into(), Arc::clone)
    }

    /// The number of live samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// True if nothing is alive.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
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

    fn trace(line: u32) -> Trace {
        Trace {
            site: NamedFrame {
                file: "f.py".into(),
                line,
                function: "f".into(),
            },
            domain: 0,
            thread: 0,
            depth: 1,
            live: Estimate::default(),
        }
    }

    fn sample(size: u64) -> Sample {
        Sample {
            trace: 1,
            size,
            period: 131_072,
            born: 0,
            address: 0,
            kind: Kind::RAW_BUFFER,
        }
    }

    /// 20,000 samples of 64 bytes stand for 2.5 GiB; of the 2,500 that survive a raise to 8 times the period each stands
    /// for 8 times as much. The ids are fixed, so the result is; the bound is five standard deviations.
    #[test]
    fn a_raise_of_the_period_changes_no_total() {
        let mut live = Live::new(131_072);
        live.traces.extend([trace(1), trace(2), trace(3)]);
        for id in 1..=20_000 {
            let large = id % 10 == 0;
            live.add(
                id,
                Sample {
                    trace: if large { 3 } else { 2 },
                    size: if large { 1 << 30 } else { 64 },
                    ..sample(0)
                },
            );
        }
        let before = (live.traces[1].live, live.total);
        assert!((live.survivors(1 << 20) - (2000.0 + 18_000.0 / 8.0)).abs() < 1.0);
        assert_eq!(live.raise(1 << 20), [0, 1, 2]);
        let after = live.traces[0].live;
        let sigma = (18_000.0_f64 * 0.125 * 0.875).sqrt();
        assert!((after.samples as f64 - 18_000.0 / 8.0).abs() < 5.0 * sigma);
        assert!((after.bytes / before.0.bytes - 1.0).abs() < 5.0 * sigma * 8.0 / 18_000.0);
        assert!(live.traces[1].live.samples == 2000 && live.traces[1].live.bytes >= 2000.0 * (1u64 << 30) as f64);
        let sum: f64 = live.traces.iter().map(|trace| trace.live.bytes).sum();
        assert!((sum / live.total.bytes - 1.0).abs() < 1e-9);
        for (id, _) in live.by_age() {
            live.remove(id).unwrap();
        }
        assert_eq!((live.total.bytes, live.traces[0].live.objects), (0.0, 0.0));
    }

    #[test]
    fn who_waits_is_looked_at_once_and_what_is_found_is_kept() {
        let mut live = Live::new(131_072);
        live.traces.push(trace(1));
        for id in 1..=4 {
            let kind = if id == 2 { Kind::MEM_BUFFER } else { Kind::UNKNOWN };
            let born = id;
            live.add(
                id,
                Sample {
                    born,
                    kind,
                    ..sample(8)
                },
            );
        }
        live.remove(1);
        assert!(
            live.next_queued(3)
                .is_some_and(|(id, sample)| id == 1 && sample.is_none())
        );
        assert!(
            live.next_queued(3)
                .is_some_and(|(id, sample)| id == 3 && sample.is_some())
        );
        assert!(live.next_queued(3).is_none() && live.queue_len() == 1);
        let dict = live.add_kind(&"dict".into());
        live.set_kind(3, dict);
        live.set_kind(1, dict);
        let counts = live.kind_counts();
        let expected = [((Kind::UNKNOWN, 8), 1), ((Kind::MEM_BUFFER, 8), 1), ((dict, 8), 1)];
        assert_eq!(counts[&1], expected.into());
        assert_eq!(&*live.kinds[dict.index()], "dict");
    }

    #[test]
    fn what_has_gone_leaves_exactly_nothing() {
        let mut live = Live::new(131_072);
        live.traces.push(trace(1));
        for id in 1..=1000 {
            let born = id;
            assert!(live.add(
                id,
                Sample {
                    born,
                    ..sample(7 + id % 13)
                }
            ));
        }
        assert!(!live.add(1000, sample(7)));
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
