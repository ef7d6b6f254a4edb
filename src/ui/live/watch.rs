//! What a live view knows: every stack with what is alive of it, what it was a while ago, and the verdict. Fed with the
//! recording's events on their way to the files; knows nothing of terminals.
//!
//! Memory is bounded: so many stacks (the rest is counted together), each with a minute of fine history and a coarse one of
//! the whole time, whose steps double when it is full.

use super::series::{Clock, Series};
use crate::collect::live::Estimate;
use crate::collect::resolve::Event;
use crate::collect::stacks::{Key, Stacks};
use crate::collect::tree::NamedFrame;
use crate::profile::facts::MemorySample;
use crate::profile::model::StackFrame;
use crate::profile::sampling::{WeightCache, Weights};
use crate::report::leaks::memory::Limit;
use crate::report::leaks::{Facts, OwnCode, Report, Tracker, judge};
use pyheap_protocol::domain::NAMES as DOMAINS;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Stacks that are told apart; one is of an allocator domain and a thread.
const MAX_STACKS: usize = 20_000;
/// From so many on, new ones are not told apart by thread.
const MAX_APART: usize = 10_000;
/// Rates are those of this time.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Distance of the moments that are remembered of it.
const STEP: Duration = Duration::from_secs(5);
/// Samples of the process's memory that are remembered; beyond, every second one goes.
const MAX_MEMORY: usize = 1 << 12;
/// What there was of a stack at a moment. All but `live` only ever grows.
#[derive(Debug, Clone, Copy, Default)]
struct Moment {
    live: Estimate,
    /// Bytes allocated so far.
    allocated: f64,
    /// Variance of all samples that came or went so far: that of a difference is no more than what it has grown by.
    churn: f64,
}

/// What is kept of one stack.
#[derive(Debug)]
struct Stack {
    /// The allocating line.
    leaf: NamedFrame,
    now: Moment,
    /// Sum over the live samples of bytes × milliseconds from the start to their allocation.
    births: f64,
    /// At the moments of [`Watch::recent`], as far as it existed, the last one last.
    recent: VecDeque<Moment>,
    past: Series,
    mark: Moment,
}

impl Stack {
    fn new(leaf: &NamedFrame, clock: &Clock) -> Self {
        Self {
            leaf: leaf.clone(),
            now: Moment::default(),
            births: 0.0,
            recent: VecDeque::new(),
            past: Series::new(clock),
            mark: Moment::default(),
        }
    }
}

/// A number with half the width of its 95 % interval.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Bounded {
    /// The number.
    pub value: f64,
    /// Its variance, or more.
    pub variance: f64,
}

impl Bounded {
    /// Half the width of the 95 % interval, or more.
    #[must_use]
    pub fn margin(&self) -> f64 {
        1.96 * self.variance.max(0.0).sqrt()
    }

    /// Adds an independent one.
    pub fn add(&mut self, other: &Self) {
        self.value += other.value;
        self.variance += other.variance;
    }
}

/// What is known of one stack, or of many together, at a moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Amount {
    /// What is alive.
    pub live: Estimate,
    /// Growth of that over the window, in bytes.
    pub growth: Bounded,
    /// Bytes allocated in the window.
    pub allocated: f64,
    /// Sum over the live samples of bytes × seconds of age.
    pub ages: f64,
    /// Change since the baseline, in bytes.
    pub since: Bounded,
    /// Change in objects since the baseline.
    pub objects_since: f64,
}

impl Amount {
    /// Adds those of another stack.
    pub fn add(&mut self, other: &Self) {
        self.live.merge(&other.live);
        self.growth.add(&other.growth);
        self.allocated += other.allocated;
        self.ages += other.ages;
        self.since.add(&other.since);
        self.objects_since += other.objects_since;
    }

    /// Mean age of the live bytes, in seconds.
    #[must_use]
    pub fn age(&self) -> Option<f64> {
        (self.live.bytes > 0.0).then(|| (self.ages / self.live.bytes).max(0.0))
    }
}

/// A stack at the moment of a [`Picture`].
#[derive(Debug, Clone)]
pub struct StackNow {
    /// Its number, the same in all pictures.
    pub number: u32,
    /// The allocating line.
    pub leaf: NamedFrame,
    /// Name and number of the thread that allocates, if that is known.
    pub thread: Option<Arc<str>>,
    /// How much.
    pub amount: Amount,
}

/// All stacks at a moment.
#[derive(Debug, Clone, Default)]
pub struct Picture {
    /// Since the start.
    pub at: Duration,
    /// Those of which something is alive, was allocated lately or is missing since the baseline.
    pub stacks: Vec<StackNow>,
    /// Their sum.
    pub total: Amount,
    /// The period that samples stand for, in bytes.
    pub period: u64,
    /// Samples since the start.
    pub sampled: u64,
    /// Samples a second, over the last moments.
    pub samples_per_second: f64,
    /// The time that growth and allocation rates are of, in seconds.
    pub window: f64,
    /// When the baseline was set.
    pub baseline: Option<Duration>,
    /// Heap and resident set until then.
    pub course: Course,
}

/// Heap and resident set over time.
#[derive(Debug, Clone, Default)]
pub struct Course {
    /// Live bytes at evenly spaced moments, the last one now.
    pub heap: Vec<f64>,
    /// Resident bytes at the same moments.
    pub rss: Vec<f64>,
}

/// The state. Feed it batches of events as they come, and ask it for pictures.
#[derive(Debug)]
pub struct Watch {
    stacks: Stacks<Stack>,
    /// Names of threads.
    names: HashMap<u32, String>,
    /// The same with their numbers, of all threads that have allocated.
    threads: HashMap<u32, Arc<str>>,
    period: u64,
    weights: WeightCache,
    sampled: u64,
    /// Moments that are remembered finely, and the samples until then.
    recent: VecDeque<(Duration, u64)>,
    clock: Clock,
    heap: Series,
    rss: Series,
    own: OwnCode,
    limit: Option<Limit>,
    /// Whether memory of native code is recorded.
    has_native: bool,
    tracker: Tracker,
    /// When what the tracker has seen begins.
    tracker_begun: Duration,
    memory: Vec<(u64, MemorySample)>,
    baseline: Option<Duration>,
}

impl Watch {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(period: u64, own: OwnCode, limit: Option<Limit>) -> Self {
        let clock = Clock::default();
        Self {
            stacks: Stacks::new(MAX_STACKS, MAX_APART, |leaf| Stack::new(leaf, &clock)),
            names: HashMap::new(),
            threads: HashMap::new(),
            period,
            weights: WeightCache::new(Weights::Period(period)),
            sampled: 0,
            recent: VecDeque::from([(Duration::ZERO, 0)]),
            clock,
            heap: Series::default(),
            rss: Series::default(),
            tracker: Tracker::new(Weights::Period(period), 0, own.clone()),
            own,
            limit,
            has_native: false,
            tracker_begun: Duration::ZERO,
            memory: Vec::new(),
            baseline: None,
        }
    }

    /// Memory of native code is recorded, too, or is not.
    #[must_use]
    pub fn with_native(self, has_native: bool) -> Self {
        Self { has_native, ..self }
    }

    /// Takes events, as many as the recording hands on at once.
    pub fn events(&mut self, events: &[Event]) {
        let mut is_again = false;
        match events.first() {
            // What is alive is said again, for files that begin: nothing has happened.
            Some(Event::Save(_)) => {
                for event in events {
                    if let Event::Thread(thread, name) = event {
                        self.name(*thread, name);
                    }
                }
                return;
            }
            Some(Event::Period { at, period }) => {
                self.raise(*at, *period);
                is_again = true;
            }
            _ => {}
        }
        for event in events {
            match event {
                Event::Trace(frames) => self.stacks.trace(frames),
                Event::Thread(thread, name) => self.name(*thread, name),
                Event::Alloc {
                    at,
                    trace,
                    size,
                    born,
                    domain,
                    thread,
                } => {
                    let stack = self.allocating(*trace, *domain, *thread);
                    self.alloc(*at, stack, *size, *born, is_again);
                }
                Event::Free {
                    at, trace, size, born, ..
                } => self.free(*at, *trace, *size, *born),
                _ => {}
            }
        }
    }

    fn name(&mut self, thread: u32, name: &str) {
        self.names.insert(thread, name.to_owned());
        if let Some(known) = self.threads.get_mut(&thread) {
            *known = thread_label(thread, Some(name));
        }
    }

    /// The stack that a trace allocates for.
    fn allocating(&mut self, trace: u32, domain: u8, thread: u32) -> u32 {
        self.stacks.allocating(trace, domain, thread, |key, leaf| {
            if key.thread != 0 {
                let name = self.names.get(&key.thread).map(String::as_str);
                let label = || thread_label(key.thread, name);
                self.threads.entry(key.thread).or_insert_with(label);
            }
            Stack::new(leaf, &self.clock)
        })
    }

    fn alloc(&mut self, at: Duration, number: u32, size: u64, born: u64, is_again: bool) {
        let weight = self.weights.of(size);
        let bytes = size as f64 * weight.objects;
        let Some(stack) = self.stacks.get_mut(number) else {
            return;
        };
        stack.now.live.add(size, self.period, 1.0);
        stack.births += bytes * born as f64;
        stack.now.churn += (size as f64).powi(2) * weight.variance;
        if !is_again {
            self.sampled += 1;
            stack.now.allocated += bytes;
        }
        self.follow(at, number, size, false);
    }

    fn free(&mut self, at: Duration, trace: u32, size: u64, born: u64) {
        let number = self.stacks.of(trace);
        let weight = self.weights.of(size);
        let bytes = size as f64 * weight.objects;
        let Some(stack) = self.stacks.get_mut(number) else {
            return;
        };
        stack.now.live.add(size, self.period, -1.0);
        stack.now.churn += (size as f64).powi(2) * weight.variance;
        stack.births = if stack.now.live.samples == 0 {
            0.0
        } else {
            stack.births - bytes * born as f64
        };
        self.follow(at, number, size, true);
    }

    fn follow(&mut self, at: Duration, number: u32, size: u64, is_free: bool) {
        if !self.tracker.knows(number) {
            let frames = self.stacks.stack_frames(number);
            self.tracker.know(number, &frames);
        }
        let at = at.saturating_sub(self.tracker_begun);
        self.tracker.event(at, number, size, is_free, false);
    }

    /// Samples stand for more from now on: what is alive is said again, from fewer samples. The verdict begins anew.
    fn raise(&mut self, at: Duration, period: u64) {
        self.period = period;
        self.weights = WeightCache::new(Weights::Period(period));
        self.stacks.forget_traces();
        for stack in self.stacks.iter_mut() {
            stack.births = 0.0;
            // A difference between now and then is one between independent samples at worst: all went, and others come.
            stack.now.churn += stack.now.live.variance;
            stack.now.live = Estimate::default();
        }
        self.tracker = Tracker::new(Weights::Period(period), 0, self.own.clone());
        self.tracker_begun = at;
        let begun = micros(at);
        self.memory.retain(|(then, _)| *then >= begun);
    }

    /// Called every second.
    pub fn tick(&mut self, at: Duration, memory: Option<MemorySample>) {
        if let Some(memory) = memory {
            if self.memory.len() >= MAX_MEMORY {
                let mut place = 0;
                self.memory.retain(|_| {
                    place += 1;
                    place % 2 == 1
                });
            }
            self.memory.push((micros(at), memory));
        }
        if self.clock.tick(at) {
            let total: f64 = self.stacks.iter().map(|(_, stack)| stack.now.live.bytes).sum();
            let is_full = self.clock.is_full();
            let rss = memory.map_or_else(|| self.rss.last(), |memory| memory.rss as f64);
            for (series, value) in [(&mut self.heap, total), (&mut self.rss, rss)] {
                series.push(value, is_full);
            }
            for stack in self.stacks.iter_mut() {
                stack.past.push(stack.now.live.bytes, is_full);
            }
            self.clock.pushed();
        }
        let last = self.recent.back().map_or(Duration::ZERO, |(then, _)| *then);
        if at.saturating_sub(last) >= STEP {
            self.recent.push_back((at, self.sampled));
            while self
                .recent
                .front()
                .is_some_and(|(then, _)| at.saturating_sub(*then) > WINDOW)
            {
                self.recent.pop_front();
            }
            for stack in self.stacks.iter_mut() {
                stack.recent.push_back(stack.now);
                while stack.recent.len() > self.recent.len() {
                    stack.recent.pop_front();
                }
            }
        }
    }

    /// From now on the difference to now is told.
    pub fn set_baseline(&mut self, at: Duration) {
        self.baseline = Some(at);
        for stack in self.stacks.iter_mut() {
            stack.mark = stack.now;
        }
    }

    /// There is no baseline any more.
    pub fn clear_baseline(&mut self) {
        self.baseline = None;
        for stack in self.stacks.iter_mut() {
            stack.mark = Moment::default();
        }
    }

    /// How things are.
    #[must_use]
    pub fn picture(&self, at: Duration) -> Picture {
        let (begun, _) = self.recent.front().copied().unwrap_or_default();
        let (lately, sampled) = self
            .recent
            .iter()
            .rev()
            .nth(1)
            .or(self.recent.back())
            .copied()
            .unwrap_or_default();
        let mut total = Amount::default();
        let stacks = (0..).zip(self.stacks.iter()).filter_map(|(number, (key, stack))| {
            let amount = self.amount(stack, at);
            let is_of_interest = amount.live.samples > 0
                || amount.allocated > 0.0
                || amount.growth.value != 0.0
                || amount.since.value != 0.0;
            is_of_interest.then(|| {
                total.add(&amount);
                StackNow {
                    number,
                    leaf: stack.leaf.clone(),
                    thread: self.threads.get(&key.thread).cloned(),
                    amount,
                }
            })
        });
        let stacks = stacks.collect();
        let seconds = at.saturating_sub(lately).as_secs_f64();
        Picture {
            at,
            stacks,
            total,
            period: self.period,
            sampled: self.sampled,
            samples_per_second: if seconds > 0.0 {
                (self.sampled - sampled) as f64 / seconds
            } else {
                0.0
            },
            window: at.saturating_sub(begun).as_secs_f64(),
            baseline: self.baseline,
            course: Course {
                heap: self.heap.values(&self.clock),
                rss: self.rss.values(&self.clock),
            },
        }
    }

    fn amount(&self, stack: &Stack, at: Duration) -> Amount {
        // A stack that came later had nothing at the beginning of the window.
        let then = match stack.recent.front() {
            Some(then) if stack.recent.len() >= self.recent.len() => *then,
            _ => Moment::default(),
        };
        let since = if self.baseline.is_some() {
            change(&stack.now, &stack.mark)
        } else {
            Bounded::default()
        };
        let objects_since = if self.baseline.is_some() {
            stack.now.live.objects - stack.mark.live.objects
        } else {
            0.0
        };
        Amount {
            live: stack.now.live,
            growth: change(&stack.now, &then),
            allocated: stack.now.allocated - then.allocated,
            ages: stack.now.live.bytes * at.as_secs_f64() - stack.births / 1000.0,
            since,
            objects_since,
        }
    }

    /// What was alive of these stacks together at evenly spaced moments until `until`, the last one last.
    #[must_use]
    pub fn past(&self, stacks: &[u32], until: Duration) -> Vec<f64> {
        let mut sum = vec![0.0; self.clock.count_until(until)];
        for number in stacks {
            if let Some((_, stack)) = self.stacks.get(*number) {
                stack.past.add_to(&mut sum);
            }
        }
        sum
    }

    /// The frames of a stack, innermost first.
    pub fn frames(&self, number: u32) -> impl Iterator<Item = &NamedFrame> {
        self.stacks.frames(number)
    }

    /// How many different stacks these are, whatever thread and domain they are of.
    #[must_use]
    pub fn different(&self, stacks: &[u32]) -> usize {
        let nodes = stacks.iter().filter_map(|number| self.stacks.get(*number));
        nodes.map(|(key, _)| key.node).collect::<HashSet<_>>().len()
    }

    /// The period that samples stand for, in bytes.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.period
    }

    /// Traces of the recording with the stacks that they count for.
    pub fn traces(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.stacks.traces()
    }

    /// The verdict on what was seen until `at`, or since the period was last raised.
    pub fn judge(&mut self, at: Duration) -> Report {
        let begun = micros(self.tracker_begun);
        let memory: Vec<_> = self
            .memory
            .iter()
            .map(|(then, sample)| (then.saturating_sub(begun), *sample))
            .collect();
        let facts = Known {
            stacks: &self.stacks,
            names: &self.names,
            memory: &memory,
            has_native: self.has_native,
        };
        let elapsed = at.saturating_sub(self.tracker_begun);
        judge(&mut self.tracker, elapsed, &facts, self.limit)
    }
}

/// As `pyheap top --by thread` calls it.
fn thread_label(number: u32, name: Option<&str>) -> Arc<str> {
    match name {
        Some(name) => format!("{name} ({number})").into(),
        None => number.to_string().into(),
    }
}

fn micros(at: Duration) -> u64 {
    u64::try_from(at.as_micros()).unwrap_or(u64::MAX)
}

/// What has changed from `then` to `now`. The samples alive at both moments cancel out: the variance is at most that of
/// what came and went meanwhile, and at most that of both together.
fn change(now: &Moment, then: &Moment) -> Bounded {
    let both = now.live.variance + then.live.variance;
    Bounded {
        value: now.live.bytes - then.live.bytes,
        variance: both.min(now.churn - then.churn).max(0.0),
    }
}

/// What the verdict asks for.
struct Known<'a> {
    stacks: &'a Stacks<Stack>,
    names: &'a HashMap<u32, String>,
    memory: &'a [(u64, MemorySample)],
    has_native: bool,
}

impl Facts for Known<'_> {
    fn frames(&self, trace: u32) -> Vec<StackFrame<'_>> {
        self.stacks.stack_frames(trace)
    }

    fn origin(&self, trace: u32) -> (Option<String>, Option<String>) {
        let Some(&(Key { domain, thread, .. }, _)) = self.stacks.get(trace) else {
            return (None, None);
        };
        let name = || self.names.get(&thread).cloned().unwrap_or_else(|| thread.to_string());
        let domain = DOMAINS.get(usize::from(domain)).map(|name| (*name).to_owned());
        (domain, (thread != 0).then(name))
    }

    fn live_bytes(&self, trace: u32, _: &dyn Fn(u64) -> f64) -> f64 {
        self.stacks.get(trace).map_or(0.0, |(_, stack)| stack.now.live.bytes)
    }

    fn births(&self, _: u32) -> Option<&[(u64, u64)]> {
        None
    }

    fn memory(&self) -> &[(u64, MemorySample)] {
        self.memory
    }

    fn has_native(&self) -> bool {
        self.has_native
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
