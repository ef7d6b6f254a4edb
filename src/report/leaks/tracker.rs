//! Follows the live memory of every group of traces: by whole stack, by the innermost line of own code, and by the
//! allocating line.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use super::own::OwnCode;
use super::series::{Bins, Level, Series};
use crate::profile::live::TraceMap;
use crate::profile::model::StackFrame;
use crate::profile::sampling::Weights;

/// Sizes below this have their weights worked out in advance.
const CACHED_SIZES: u64 = 4096;
/// The group of all traces.
pub const ALL: u32 = 0;

/// What makes a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Everything.
    All,
    /// One whole stack.
    Stack,
    /// The innermost line of own code.
    Own,
    /// The allocating line.
    Leaf,
}

/// A group of traces.
#[derive(Debug, Clone)]
pub struct Group {
    /// What makes it one.
    pub kind: Kind,
    /// Its live memory over time.
    pub series: Series,
    /// Its traces; a trace has one stack, one domain and one thread.
    pub traces: Vec<u32>,
    /// The groups of its stacks; empty for a stack.
    pub stacks: Vec<u32>,
}

/// The groups that a trace counts for; [`ALL`] where there is none.
#[derive(Debug, Clone, Copy, Default)]
struct Places {
    known: bool,
    stack: u32,
    own: u32,
    leaf: u32,
}

/// The state of all groups. Feed it events in order of time; ask it at any time.
#[derive(Debug)]
pub struct Tracker {
    weights: Weights,
    cached: Vec<Level>,
    own: OwnCode,
    bins: Bins,
    groups: Vec<Group>,
    peaks: Vec<f64>,
    places: TraceMap<Places>,
    keys: HashMap<(Kind, u64, u64), u32>,
    hashers: [RandomState; 2],
}

impl Tracker {
    /// Nothing has happened yet. `trace_count` is a hint.
    pub fn new(weights: Weights, trace_count: u32, own: OwnCode) -> Self {
        let all = Group {
            kind: Kind::All,
            series: Series::default(),
            traces: Vec::new(),
            stacks: Vec::new(),
        };
        Self {
            cached: (0..CACHED_SIZES).map(|size| sample(&weights, size)).collect(),
            weights,
            own,
            bins: Bins::default(),
            groups: vec![all],
            peaks: Vec::new(),
            places: TraceMap::new(trace_count),
            keys: HashMap::new(),
            hashers: [RandomState::new(), RandomState::new()],
        }
    }

    /// Whether this trace has been seen; if not, [`know`](Self::know) has to be called before its first event.
    pub fn knows(&mut self, trace: u32) -> bool {
        self.places.entry(trace).known
    }

    /// Tells the frames of a trace, outermost first.
    pub fn know(&mut self, trace: u32, frames: &[StackFrame<'_>]) {
        let stack = self.group(Kind::Stack, &frames);
        let line = |frame: &StackFrame<'_>| (frame.file.to_string(), frame.line);
        let own = frames.iter().rev().find(|frame| self.own.has(&frame.file));
        let own = own.map_or(ALL, |frame| self.group(Kind::Own, &line(frame)));
        let leaf = frames.last().map_or(ALL, |frame| self.group(Kind::Leaf, &line(frame)));
        // A stack may have several traces, one a domain and thread; its line of own code and its allocating line are always the same.
        let is_new = self.groups[stack as usize].traces.is_empty();
        for group in [stack, own, leaf].into_iter().filter(|group| *group != ALL) {
            let entry = &mut self.groups[group as usize];
            entry.traces.push(trace);
            if is_new && group != stack {
                entry.stacks.push(stack);
            }
        }
        *self.places.entry(trace) = Places {
            known: true,
            stack,
            own,
            leaf,
        };
    }

    fn group<K: std::hash::Hash>(&mut self, kind: Kind, key: &K) -> u32 {
        let [first, second] = self.hashers.each_ref().map(|hasher| hasher.hash_one(key));
        let next = self.groups.len() as u32;
        let found = *self.keys.entry((kind, first, second)).or_insert(next);
        if found == next {
            self.groups.push(Group {
                kind,
                series: Series::default(),
                traces: Vec::new(),
                stacks: Vec::new(),
            });
        }
        found
    }

    /// Counts an allocation or free `at` this time since the start. A piece of a larger block (`continues`) is no object.
    pub fn event(&mut self, at: Duration, trace: u32, size: u64, is_free: bool, continues: bool) {
        let cached = self.cached.get(size as usize).copied();
        let mut sample = cached.unwrap_or_else(|| sample(&self.weights, size));
        if continues {
            (sample.objects, sample.samples) = (0.0, 0);
        }
        if Bins::is_beyond(self.bins.moment(at)) {
            self.stretch(at);
        }
        let moment = self.bins.moment(at);
        let Places { stack, own, leaf, .. } = *self.places.entry(trace);
        let sign = if is_free { -1.0 } else { 1.0 };
        let all = &mut self.groups[ALL as usize].series;
        all.count(moment, &sample, sign);
        let (bin, live) = (Bins::bin_of(moment), all.now.bytes);
        if self.peaks.len() <= bin {
            self.peaks.resize(bin + 1, 0.0);
        }
        self.peaks[bin] = self.peaks[bin].max(live);
        for group in [stack, own, leaf].into_iter().filter(|group| *group != ALL) {
            self.groups[group as usize].series.count(moment, &sample, sign);
        }
    }

    /// All groups; that of everything is the first.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The most that was live of everything, bin by bin; 0 in a bin without events.
    pub fn peaks(&self) -> &[f64] {
        &self.peaks
    }

    /// The bytes that a sample of this size stands for.
    pub fn weigh(&self, size: u64) -> f64 {
        sample(&self.weights, size).bytes
    }

    /// What counts as own code.
    pub fn own(&self) -> &OwnCode {
        &self.own
    }

    /// The clock of their series.
    pub fn bins(&self) -> Bins {
        self.bins
    }

    /// Gets the clock on: a time without events is time all the same.
    pub fn advance(&mut self, elapsed: Duration) {
        self.stretch(elapsed.saturating_sub(Duration::from_micros(1)));
    }

    fn stretch(&mut self, at: Duration) {
        while Bins::is_beyond(self.bins.moment(at)) {
            self.bins.double();
            for group in &mut self.groups {
                group.series.halve();
            }
            self.peaks = self
                .peaks
                .chunks(2)
                .map(|two| two.iter().copied().fold(0.0, f64::max))
                .collect();
        }
    }
}

/// What one sample of this size stands for.
fn sample(weights: &Weights, size: u64) -> Level {
    let weight = weights.of(size);
    let size = size as f64;
    Level {
        bytes: size * weight.objects,
        variance: size * size * weight.variance,
        objects: weight.objects,
        samples: 1,
    }
}
