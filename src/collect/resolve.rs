//! Records become traces and events.

use super::drain::Chunk;
use super::live::{Estimate, Live, Trace};
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
}

/// Locks the model; a thread that panicked while it held the lock leaves numbers, not broken pointers.
pub fn lock(live: &Mutex<Live>) -> MutexGuard<'_, Live> {
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Resolver {
    /// Resolves into `live`.
    #[must_use]
    pub fn new(names: Names, live: Arc<Mutex<Live>>) -> Self {
        Self {
            names,
            live,
            traces: HashMap::new(),
            by_id: HashMap::new(),
            dead: HashSet::new(),
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
                        if !model.contains(entry.id) {
                            let domain = entry.domain as u8;
                            let trace = self.trace(&mut model, entry.stack, domain, &mut events);
                            alloc(&mut model, at, entry.id, trace, entry.size, domain, &mut events);
                        }
                    }
                }
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
                    if let Ok(found) = record::Alloc::read_from_bytes(record)
                        && !self.dead.contains(&found.id)
                    {
                        let domain = (found.head.flags & 3) as u8;
                        let trace = self.trace(&mut model, found.stack, domain, events);
                        alloc(&mut model, at, found.id, trace, found.size, domain, events);
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
        index
    }
}

fn alloc(model: &mut Live, at: Duration, id: u64, trace: u32, size: u64, domain: u8, events: &mut Vec<Event>) {
    if model.add(id, trace, size, at) {
        events.push(Event::Alloc {
            at,
            trace,
            size,
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
