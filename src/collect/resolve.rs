//! Records become traces and events.

use super::drain::Chunk;
use super::live::{Estimate, Live, Sample, Trace};
use super::names::Names;
use super::tree::{NamedFrame, StackNode};
use crossbeam_channel::Receiver;
use pyheap_protocol::record::{self, kind};
use pyheap_protocol::ring;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use zerocopy::FromBytes;

/// What the writer gets.
#[derive(Debug)]
pub enum Event {
    /// A trace seen for the first time, innermost frame first: its index is one more than that of the trace before.
    Trace(Vec<NamedFrame>),
    /// The files so far are complete: what follows belongs to a new profile with another period, beginning with the traces
    /// and allocations of what is alive.
    Period {
        /// Since the start.
        at: Duration,
        /// In bytes.
        period: u64,
    },
    /// An allocation was sampled.
    Alloc {
        /// Since the start.
        at: Duration,
        /// Trace index.
        trace: u32,
        /// Bytes asked for.
        size: u64,
        /// Allocator domain.
        domain: u8,
    },
    /// The shim's number of a stack, in a domain, stands for this trace.
    Stack {
        /// Its number; 0 is a lost one.
        stack: u64,
        /// Allocator domain.
        domain: u8,
        /// Trace index.
        trace: u32,
    },
    /// A sampled block was freed.
    Free {
        /// Since the start.
        at: Duration,
        /// Trace index of its allocation.
        trace: u32,
        /// Its size.
        size: u64,
    },
}

/// Interns traces and keeps the live model.
#[derive(Debug)]
pub struct Resolver {
    names: Names,
    live: Arc<Mutex<Live>>,
    traces: HashMap<(StackNode, u8), u32>,
    /// The trace of a stack id in a domain: saves hashing whole stacks.
    by_id: HashMap<(u64, u8), u32>,
    /// Ids that the next records enter although they were freed already: the record of the free was lost.
    dead: HashSet<u64>,
    /// Bit per allocator domain that is wanted.
    domains: u8,
}

/// Locks the model; a thread that panicked while it held the lock leaves numbers, not broken pointers.
pub fn lock(live: &Mutex<Live>) -> MutexGuard<'_, Live> {
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Resolver {
    /// Resolves into `live` what is of the wanted `domains` (a bit each).
    #[must_use]
    pub fn new(names: Names, live: Arc<Mutex<Live>>, domains: u8) -> Self {
        Self {
            names,
            live,
            traces: HashMap::new(),
            by_id: HashMap::new(),
            dead: HashSet::new(),
            domains,
        }
    }

    /// Works until the drain has ended, handing events to `send` until that says no; false if something in the records
    /// made no sense.
    pub fn run(mut self, chunks: &Receiver<Chunk>, send: impl Fn(Vec<Event>) -> bool) -> bool {
        let mut sane = true;
        for chunk in chunks {
            let mut events = Vec::new();
            match chunk {
                Chunk::Records { at, bytes } => sane &= self.records(at, &bytes, &mut events),
                Chunk::Table {
                    at,
                    live,
                    coming,
                    going,
                    last_id,
                } => {
                    let shared = Arc::clone(&self.live);
                    let mut model = lock(&shared);
                    let present: HashSet<u64> = live.iter().map(|entry| entry.id).collect();
                    let gone: Vec<u64> = model
                        .ids()
                        .filter(|id| !present.contains(id) && !going.contains(id))
                        .collect();
                    for id in gone {
                        free(&mut model, at, id, &mut events);
                    }
                    let dead = |id: &u64| *id <= last_id && !present.contains(id) && !going.contains(id);
                    self.dead = coming.iter().copied().filter(dead).collect();
                    for entry in live.iter().filter(|entry| !coming.contains(&entry.id)) {
                        let domain = (entry.domain & 3) as u8;
                        if !model.contains(entry.id)
                            && self.wants(domain)
                            && model.keeps(entry.id, entry.size, entry.period)
                        {
                            let trace = self.trace(&mut model, entry.stack, domain, &mut events);
                            let (size, period) = (entry.size, entry.period);
                            let sample = Sample { trace, size, period };
                            model.note_late(size);
                            alloc(&mut model, at, entry.id, sample, domain, &mut events);
                        }
                    }
                }
                Chunk::Period { at, period } => self.raise(at, period, &mut events),
            }
            {
                let mut live = lock(&self.live);
                live.unresolved = self.names.unresolved;
                live.not_kept = self.names.not_kept;
            }
            if !events.is_empty() && !send(events) {
                break;
            }
        }
        sane
    }

    fn records(&mut self, at: Duration, bytes: &[u8], events: &mut Vec<Event>) -> bool {
        let shared = Arc::clone(&self.live);
        let mut model = lock(&shared);
        let mut rest = bytes;
        while let Some((head, record, more)) = ring::split(rest) {
            rest = more;
            match head.kind {
                kind::CODE => self.names.code(record),
                kind::STACK => self.names.stack(record),
                kind::FORGET if self.names.forget(head.flags) => self.by_id.clear(),
                kind::ALLOC => {
                    if let Ok(found) = record::Alloc::read_from_bytes(record) {
                        let domain = (found.head.flags & 3) as u8;
                        if !self.dead.contains(&found.id)
                            && self.wants(domain)
                            && model.keeps(found.id, found.size, found.period)
                        {
                            let trace = self.trace(&mut model, found.stack, domain, events);
                            let (size, period) = (found.size, found.period);
                            let sample = Sample { trace, size, period };
                            alloc(&mut model, at, found.id, sample, domain, events);
                        }
                    }
                }
                kind::FREE => {
                    if let Ok(found) = record::Free::read_from_bytes(record) {
                        free(&mut model, at, found.id, events);
                    }
                }
                _ => {}
            }
        }
        self.dead.clear();
        rest.is_empty()
    }

    fn wants(&self, domain: u8) -> bool {
        self.domains >> domain & 1 != 0
    }

    /// Goes over to a longer period: says again what is alive, as the beginning of a new profile.
    fn raise(&mut self, at: Duration, period: u64, events: &mut Vec<Event>) {
        let shared = Arc::clone(&self.live);
        let mut model = lock(&shared);
        let renumbered = model.raise(period);
        self.by_id.clear();
        self.traces.retain(|_, index| {
            let now = (*index as usize).checked_sub(1).and_then(|old| renumbered.get(old));
            *index = now.copied().unwrap_or(0);
            *index != 0
        });
        events.push(Event::Period { at, period });
        let mut known: Vec<_> = self.traces.iter().map(|(&(node, _), &index)| (index, node)).collect();
        known.sort_unstable_by_key(|&(index, _)| index);
        for (_, node) in known {
            events.push(Event::Trace(self.names.tree.frames(node).cloned().collect()));
        }
        for (_, Sample { trace, size, .. }) in model.by_age() {
            let site = (trace as usize)
                .checked_sub(1)
                .and_then(|place| model.traces.get(place));
            let domain = site.map_or(0, |site| site.domain);
            events.push(Event::Alloc {
                at,
                trace,
                size,
                domain,
            });
        }
    }

    fn trace(&mut self, model: &mut Live, stack: u64, domain: u8, events: &mut Vec<Event>) -> u32 {
        if let Some(&known) = self.by_id.get(&(stack, domain)) {
            return known;
        }
        let node = self.names.named(stack);
        let index = match self.traces.get(&(node, domain)) {
            Some(&known) => known,
            None => {
                let frames: Vec<NamedFrame> = self.names.tree.frames(node).cloned().collect();
                // Every stack has a frame, if only a marker.
                let Some(site) = frames.first().cloned() else {
                    return 0;
                };
                let next = u32::try_from(self.traces.len() + 1).unwrap_or(0);
                self.traces.insert((node, domain), next);
                events.push(Event::Trace(frames));
                model.traces.push(Trace {
                    site,
                    domain,
                    live: Estimate::default(),
                });
                next
            }
        };
        self.by_id.insert((stack, domain), index);
        events.push(Event::Stack {
            stack,
            domain,
            trace: index,
        });
        index
    }
}

fn alloc(model: &mut Live, at: Duration, id: u64, sample: Sample, domain: u8, events: &mut Vec<Event>) {
    if model.add(id, sample) {
        events.push(Event::Alloc {
            at,
            trace: sample.trace,
            size: sample.size,
            domain,
        });
    }
}

fn free(model: &mut Live, at: Duration, id: u64, events: &mut Vec<Event>) {
    if let Some(sample) = model.remove(id) {
        events.push(Event::Free {
            at,
            trace: sample.trace,
            size: sample.size,
        });
    }
}
