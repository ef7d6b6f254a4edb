//! What the profiles are made of: each stack with what is alive of it and what it has allocated so far. Fed with the
//! recording's events on their way to the writer.
//!
//! Memory is bounded: so many stacks, and what others allocate is counted together under a name that says so.

use crate::collect::resolve::Event;
use crate::collect::stacks::{Key, Stacks};
use crate::collect::tree::NamedFrame;
use crate::profile::model::Live;
use crate::profile::sampling::{WeightCache, Weights};
use crate::report::export::{Origin, Trace};
use pyheap_protocol::domain;
use std::collections::HashMap;

/// Stacks that are told apart; one is of an allocator domain and a thread.
const MAX_STACKS: usize = 50_000;
/// From so many on, new ones are not told apart by thread.
const MAX_APART: usize = 20_000;
/// What the numbers of a profile say.
#[derive(Debug, Clone, Copy)]
pub enum Span<'a> {
    /// What is alive, and what was allocated since the attach.
    Whole,
    /// Changes of both since these sums were taken.
    Change(&'a [Live]),
    /// What is alive, and what was allocated since these sums were taken.
    Pushed(&'a [Live]),
}

/// The allocating line with the most alive on it, and the like.
#[derive(Debug, Clone)]
pub struct Site {
    /// The line.
    pub frame: NamedFrame,
    /// How much.
    pub live: Live,
}

/// The state.
#[derive(Debug)]
pub struct Heap {
    stacks: Stacks<Live>,
    threads: HashMap<u32, String>,
    period: u64,
    weights: WeightCache,
    sampled: u64,
}

impl Heap {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(period: u64) -> Self {
        Self {
            stacks: Stacks::new(MAX_STACKS, MAX_APART, |_| Live::default()),
            threads: HashMap::new(),
            period,
            weights: WeightCache::new(Weights::Period(period)),
            sampled: 0,
        }
    }

    /// Takes events, as many as the recording hands on at once.
    pub fn events(&mut self, events: &[Event]) {
        // What is alive is said again, from fewer samples: nothing was allocated.
        let is_again = matches!(events.first(), Some(Event::Period { .. } | Event::Save(_)));
        for event in events {
            match event {
                Event::Period { period, .. } => self.raise(*period),
                Event::Trace(frames) => self.stacks.trace(frames),
                Event::Thread(thread, name) => {
                    self.threads.insert(*thread, name.clone());
                }
                Event::Alloc {
                    trace,
                    size,
                    domain,
                    thread,
                    ..
                } => {
                    let stack = self.stacks.allocating(*trace, *domain, *thread, |_, _| Live::default());
                    self.alloc(stack, *size, is_again);
                }
                Event::Free { trace, size, .. } => self.free(*trace, *size),
                Event::Stack { .. } | Event::Save(_) | Event::SaveEnds { .. } => {}
            }
        }
    }

    fn raise(&mut self, period: u64) {
        self.period = period;
        self.weights = WeightCache::new(Weights::Period(period));
        self.stacks.forget_traces();
        for live in self.stacks.iter_mut() {
            *live = gone(live);
        }
    }

    fn alloc(&mut self, stack: u32, size: u64, is_again: bool) {
        let weight = self.weights.of(size);
        let Some(live) = self.stacks.get_mut(stack) else {
            return;
        };
        let bytes = size as f64;
        live.bytes += bytes * weight.objects;
        live.objects += weight.objects;
        live.bytes_variance += bytes * bytes * weight.variance;
        live.objects_variance += weight.variance;
        live.sampled += 1;
        live.sampled_bytes = live.sampled_bytes.saturating_add(size);
        if !is_again {
            live.alloc_bytes += bytes * weight.objects;
            live.alloc_objects += weight.objects;
            self.sampled += 1;
        }
    }

    fn free(&mut self, trace: u32, size: u64) {
        let stack = self.stacks.of(trace);
        let weight = self.weights.of(size);
        let Some(live) = self.stacks.get_mut(stack) else {
            return;
        };
        if live.sampled <= 1 {
            *live = gone(live);
            return;
        }
        let bytes = size as f64;
        live.bytes = (live.bytes - bytes * weight.objects).max(0.0);
        live.objects = (live.objects - weight.objects).max(0.0);
        live.bytes_variance = (live.bytes_variance - bytes * bytes * weight.variance).max(0.0);
        live.objects_variance = (live.objects_variance - weight.variance).max(0.0);
        live.sampled -= 1;
        live.sampled_bytes = live.sampled_bytes.saturating_sub(size);
    }

    /// The period that samples stand for now, in bytes.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.period
    }

    /// Samples since the start.
    #[must_use]
    pub fn sampled(&self) -> u64 {
        self.sampled
    }

    /// All stacks together.
    #[must_use]
    pub fn total(&self) -> Live {
        let mut total = Live::default();
        self.stacks.iter().for_each(|(_, live)| total.add(live));
        total
    }

    /// The sums of all stacks now, for a [`Span`] later.
    #[must_use]
    pub fn sums(&self) -> Vec<Live> {
        self.stacks.iter().map(|(_, live)| *live).collect()
    }

    /// The stacks of which there is something to say.
    #[must_use]
    pub fn traces(&self, span: Span<'_>) -> Vec<Trace<'_>> {
        let mut found = Vec::new();
        for (number, (key, live)) in (0_u32..).zip(self.stacks.iter()) {
            let live = within(live, number as usize, span);
            if live == Live::default() {
                continue;
            }
            found.push(Trace {
                index: number,
                frames: self.stacks.stack_frames(number),
                origin: self.origin(key),
                live,
            });
        }
        found
    }

    fn origin(&self, key: &Key) -> Origin<'_> {
        let thread = (key.thread != 0).then_some(key.thread);
        Origin {
            thread,
            thread_name: thread.and_then(|thread| self.threads.get(&thread)).map(String::as_str),
            domain: domain::NAMES.get(usize::from(key.domain)).copied(),
        }
    }

    /// The `most` allocating lines with the most alive on them, largest first.
    #[must_use]
    pub fn sites(&self, most: usize) -> Vec<Site> {
        let mut by_line: HashMap<&NamedFrame, Live> = HashMap::new();
        for (number, (_, live)) in (0..).zip(self.stacks.iter()).filter(|(_, (_, live))| live.bytes > 0.0) {
            if let Some(leaf) = self.stacks.frames(number).next() {
                by_line.entry(leaf).or_default().add(live);
            }
        }
        let mut sites: Vec<_> = by_line.into_iter().collect();
        sites.sort_by(|(a, x), (b, y)| {
            let names = || (&a.file, a.line, &a.function).cmp(&(&b.file, b.line, &b.function));
            y.bytes.total_cmp(&x.bytes).then_with(names)
        });
        sites.truncate(most);
        let site = |(frame, live): (&NamedFrame, Live)| Site {
            frame: frame.clone(),
            live,
        };
        sites.into_iter().map(site).collect()
    }
}

/// Of which nothing is left: 0, not what sums of rounded numbers leave over.
fn gone(live: &Live) -> Live {
    Live {
        alloc_bytes: live.alloc_bytes,
        alloc_objects: live.alloc_objects,
        ..Live::default()
    }
}

fn within(now: &Live, index: usize, span: Span<'_>) -> Live {
    let (Span::Change(before) | Span::Pushed(before)) = span else {
        return *now;
    };
    let before = before.get(index).copied().unwrap_or_default();
    let mut live = *now;
    live.alloc_bytes -= before.alloc_bytes;
    live.alloc_objects -= before.alloc_objects;
    if matches!(span, Span::Change(_)) {
        live.bytes -= before.bytes;
        live.objects -= before.objects;
        live.sampled = live.sampled.abs_diff(before.sampled);
        live.sampled_bytes = live.sampled_bytes.abs_diff(before.sampled_bytes);
        // Of what has not changed there is nothing to say.
        if (live.bytes, live.objects, live.alloc_bytes, live.alloc_objects) == (0.0, 0.0, 0.0, 0.0) {
            return Live::default();
        }
    }
    live
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::stacks::REST;
    use crate::profile::sampling::weight;
    use std::time::Duration;

    fn named(line: u32) -> NamedFrame {
        NamedFrame {
            file: "f.py".into(),
            line,
            function: "f".into(),
        }
    }

    fn alloc(trace: u32, size: u64) -> Event {
        Event::Alloc {
            at: Duration::ZERO,
            trace,
            size,
            born: 0,
            domain: 2,
            thread: 7,
        }
    }

    fn free(trace: u32, size: u64) -> Event {
        Event::Free {
            at: Duration::ZERO,
            trace,
            size,
            born: 0,
        }
    }

    fn heap() -> Heap {
        let mut heap = Heap::new(131_072);
        heap.events(&[
            Event::Trace(vec![named(3), named(1)]),
            Event::Trace(vec![named(4), named(1)]),
            Event::Thread(7, "worker".to_owned()),
            alloc(1, 64),
            alloc(1, 64),
            alloc(2, 1 << 20),
        ]);
        heap
    }

    #[test]
    fn stacks_carry_what_came_and_what_is_left() {
        let mut heap = heap();
        heap.events(&[free(1, 64), free(2, 1 << 20)]);
        let traces = heap.traces(Span::Whole);
        let one = 64.0 * weight(64, 131_072);
        assert_eq!(traces.len(), 2);
        assert!((traces[0].live.bytes - one).abs() < 1e-6 && (traces[0].live.alloc_bytes - 2.0 * one).abs() < 1e-6);
        assert_eq!((traces[1].live.bytes, traces[1].live.sampled), (0.0, 0));
        assert_eq!(
            (traces[0].frames[0].line, traces[0].frames[1].line),
            (1, 3),
            "outermost first"
        );
        assert_eq!(
            (traces[0].origin.thread_name, traces[0].origin.domain),
            (Some("worker"), Some("obj"))
        );
        assert_eq!(heap.sampled(), 3);
        assert_eq!(heap.sites(1)[0].frame, named(3));
    }

    #[test]
    fn a_difference_says_what_has_changed_and_may_be_negative() {
        let mut heap = heap();
        let before = heap.sums();
        assert!(heap.traces(Span::Change(&before)).is_empty());
        heap.events(&[free(1, 64), Event::Trace(vec![named(9)]), alloc(3, 64)]);
        let traces = heap.traces(Span::Change(&before));
        let one = 64.0 * weight(64, 131_072);
        let found: Vec<_> = traces
            .iter()
            .map(|trace| (trace.live.bytes.round(), trace.live.alloc_bytes.round()))
            .collect();
        assert_eq!(found, [(-one.round(), 0.0), (one.round(), one.round())]);
        let pushed = heap.traces(Span::Pushed(&before));
        assert_eq!(pushed.len(), 3, "what is alive is said though it has not changed");
        assert_eq!(pushed[1].live.alloc_bytes, 0.0);
    }

    #[test]
    fn a_raise_of_the_period_counts_nothing_twice() {
        let mut heap = heap();
        let allocated = heap.total().alloc_bytes;
        heap.events(&[
            Event::Period {
                at: Duration::ZERO,
                period: 1 << 20,
            },
            Event::Trace(vec![named(4), named(1)]),
            alloc(1, 1 << 20),
        ]);
        assert_eq!((heap.total().alloc_bytes, heap.total().sampled), (allocated, 1));
        assert_eq!((heap.period(), heap.sampled()), (1 << 20, 3));
        let traces = heap.traces(Span::Whole);
        assert_eq!(traces[0].live.bytes, 0.0);
        assert!((traces[1].live.bytes - (1 << 20) as f64 * weight(1 << 20, 1 << 20)).abs() < 1e-3);
    }

    #[test]
    fn more_stacks_than_are_kept_are_counted_together() {
        let mut heap = Heap::new(1);
        let many = MAX_STACKS as u32 + 10;
        for line in 1..=many {
            heap.events(&[Event::Trace(vec![named(line)]), alloc(line, 100)]);
        }
        assert_eq!(heap.stacks.iter().count(), MAX_STACKS);
        assert_eq!(heap.total().sampled, u64::from(many));
        assert_eq!(heap.stacks.get(REST).unwrap().1.sampled, 11);
        heap.events(&[free(many, 100)]);
        assert_eq!(heap.stacks.get(REST).unwrap().1.sampled, 10);
        // What nobody has announced is counted, too.
        heap.events(&[alloc(0, 100), alloc(u32::MAX, 100), free(0, 100)]);
        assert_eq!(heap.stacks.get(REST).unwrap().1.sampled, 11);
    }
}
