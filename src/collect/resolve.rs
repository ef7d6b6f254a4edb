//! Records become traces and events.

use super::drain::Chunk;
use super::files::SaveRequest;
use super::live::{Estimate, Kind, Live, Sample, Trace};
use super::names::Names;
use super::pieces::Pieces;
use super::threads::Threads;
use super::tree::{NamedFrame, StackNode};
use crate::profile::sidecar::DOMAIN_UNKNOWN;
use foldhash::{HashMap, HashMapExt};
use pyheap_protocol::record::{self, kind};
use pyheap_protocol::{domain, ring};
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
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
    /// What follows belongs to new files, beginning with all traces and the allocations of what is alive.
    Save(Box<SaveRequest>),
    /// Those files are complete.
    SaveEnds {
        /// Since the start.
        at: Duration,
        /// The survivors, as [`Live::births`] gives them.
        births: BTreeMap<u32, Vec<(u64, u64)>>,
    },
    /// An allocation was sampled.
    Alloc {
        /// Since the start.
        at: Duration,
        /// Trace index.
        trace: u32,
        /// Bytes asked for.
        size: u64,
        /// When it was allocated, in milliseconds since the start: before `at` where what is alive is said again.
        born: u64,
        /// Allocator domain.
        domain: u8,
        /// Thread; 0 is one that is not known, or not kept apart.
        thread: u32,
    },
    /// What a thread is called, as far as is known now.
    Thread(u32, String),
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
        /// When it was allocated, in milliseconds since the start.
        born: u64,
    },
}

/// What a trace is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    node: StackNode,
    domain: u8,
    /// Our number of the thread, 0 for all that are not kept apart.
    thread: u32,
}

/// Events wait so long for others, so that the writer is woken seldom: each time costs more than what it then does. It brings the files
/// up to date twice a second only.
const HOLD: Duration = Duration::from_millis(400);
/// So many events do not wait.
const MANY: usize = 4096;
/// So many threads have a trace of their own of one stack in one domain; what others allocate there has no thread.
const MAX_APART: u32 = 64;
/// A trace is written with its whole stack, so that of the next thread repeats it. At most so many frames are repeated: some
/// 15 MB in the files.
const MAX_FRAMES_AGAIN: usize = 256 << 10;
/// Most traces that are kept, some 150 bytes each, the writer's part included.
const MAX_TRACES: usize = 7 << 15;
/// User space of x86-64 and aarch64 ends here: no block is larger.
const MOST_BYTES: u64 = 1 << 52;

/// A sample as the ring or the table of live samples tells of it.
struct Found {
    id: u64,
    address: u64,
    size: u64,
    period: u64,
    stack: u64,
    thread: u64,
    domain: u8,
    /// Its stack with the native frames, if they are known.
    merged: Option<StackNode>,
}

/// Interns traces and keeps the live model.
#[derive(Debug)]
pub struct Resolver {
    names: Names,
    threads: Threads,
    live: Arc<Mutex<Live>>,
    traces: HashMap<Key, u32>,
    /// How many traces each stack has in each domain: one a thread, up to a limit.
    apart: HashMap<(StackNode, u8), u32>,
    /// Frames of all traces but the first of each stack and domain.
    frames_again: usize,
    /// A trace of each stack id in each domain.
    by_id: HashMap<(u64, u8), u32>,
    /// Ids that the next records enter although they were freed already: the record of the free was lost.
    dead: HashSet<u64>,
    /// Ids that were found to be free, see [`Chunk::Missed`], and that are in the shim's table still.
    missed: HashSet<u64>,
    /// Pieces of stacks whose samples are yet to come.
    pieces: Pieces,
    /// Bit per allocator domain that is wanted.
    domains: u8,
    /// The periods under which samples were asked for: others no shim can have written.
    periods: Vec<u64>,
    /// Most samples that can be live: what the shim's table holds, and what is freed while records of frees are lost.
    most: usize,
}

/// Locks the model; a thread that panicked while it held the lock leaves numbers, not broken pointers.
pub fn lock(live: &Mutex<Live>) -> MutexGuard<'_, Live> {
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Resolver {
    /// Resolves into `live` what is of the wanted `domains` (a bit each). The shim's table holds `most_live` samples.
    #[must_use]
    pub fn new(names: Names, threads: Threads, live: Arc<Mutex<Live>>, domains: u8, most_live: u64) -> Self {
        let period = lock(&live).period();
        Self {
            periods: vec![period],
            most: usize::try_from(most_live.saturating_add(most_live / 2)).unwrap_or(usize::MAX),
            names,
            threads,
            live,
            traces: HashMap::new(),
            apart: HashMap::new(),
            frames_again: 0,
            by_id: HashMap::new(),
            dead: HashSet::new(),
            missed: HashSet::new(),
            pieces: Pieces::default(),
            domains,
        }
    }

    /// Works until the drain has ended. `see` is shown all events at once; `send` gets them a few times a second, or when there are
    /// many, until it says no. Takes the bytes of each chunk off `waiting` when it is done with it. A chunk that no shim can
    /// have written sets `damaged`, and what follows is thrown away.
    pub fn run(
        mut self,
        chunks: &Receiver<Chunk>,
        mut see: impl FnMut(&[Event]),
        mut send: impl FnMut(Vec<Event>) -> bool,
        waiting: &AtomicU64,
        damaged: &AtomicBool,
    ) {
        let (mut held, mut since) = (Vec::new(), Instant::now());
        loop {
            let chunk = if held.is_empty() {
                chunks.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                chunks.recv_timeout(HOLD.saturating_sub(since.elapsed()))
            };
            let ended = matches!(chunk, Err(RecvTimeoutError::Disconnected));
            let mut at_once = ended;
            if let Ok(chunk) = chunk {
                at_once = chunk.concerns_files();
                let before = held.len();
                if before == 0 {
                    since = Instant::now();
                }
                let bytes = chunk.bytes();
                if !damaged.load(Ordering::Relaxed) && !self.chunk(chunk, &mut held) {
                    damaged.store(true, Ordering::Release);
                }
                waiting.fetch_sub(bytes, Ordering::AcqRel);
                self.threads.look(&mut held);
                {
                    let mut live = lock(&self.live);
                    live.unresolved = self.names.unresolved;
                    live.not_kept = self.names.not_kept;
                    (live.native_stacks_left_out, live.native_stacks_cut) = self.names.native_stack_losses();
                }
                if let Some(new @ [_, ..]) = held.get(before..) {
                    see(new);
                }
            }
            let is_due = at_once || held.len() >= MANY || since.elapsed() >= HOLD;
            if is_due && !held.is_empty() && !send(std::mem::take(&mut held)) {
                break;
            }
            if ended {
                break;
            }
        }
    }

    /// Takes one chunk; false if it makes no sense.
    fn chunk(&mut self, chunk: Chunk, events: &mut Vec<Event>) -> bool {
        match chunk {
            Chunk::Records { at, bytes, pieces } => {
                self.pieces.add(pieces);
                return self.records(at, &bytes, events);
            }
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
                    free(&mut model, at, id, events);
                }
                let dead = |id: &u64| *id <= last_id && !present.contains(id) && !going.contains(id);
                self.dead = coming.iter().copied().filter(dead).collect();
                self.missed.retain(|id| present.contains(id));
                model.missed = self.missed.len() as u64;
                let known = |id: &u64| coming.contains(id) || self.missed.contains(id);
                let unknown: Vec<_> = live.iter().filter(|entry| !known(&entry.id)).collect();
                for entry in unknown {
                    let found = Found {
                        id: entry.id,
                        address: entry.address,
                        size: entry.size,
                        period: entry.period,
                        stack: entry.stack,
                        thread: entry.thread,
                        domain: (entry.domain & 7) as u8,
                        merged: None,
                    };
                    let is_new = !model.contains(entry.id);
                    match self.enter(&mut model, at, &found, is_new, events) {
                        Some(true) => model.note_late(entry.size),
                        Some(false) => {}
                        None => return false,
                    }
                }
            }
            Chunk::Missed { at, ids } => {
                let shared = Arc::clone(&self.live);
                let mut model = lock(&shared);
                for id in ids.into_iter().filter(|&id| model.contains(id)).collect::<Vec<_>>() {
                    free(&mut model, at, id, events);
                    self.missed.insert(id);
                }
                model.missed = self.missed.len() as u64;
            }
            Chunk::Period { at, period } => self.raise(at, period, events),
            Chunk::Save(request) => {
                let at = request.at;
                events.push(Event::Save(request));
                self.say_again(at, &lock(&Arc::clone(&self.live)), events);
            }
            Chunk::SaveEnds { at } => {
                let births = lock(&self.live).births();
                events.push(Event::SaveEnds { at, births });
            }
        }
        true
    }

    /// Enters a sample if it `counts` and is one of those that are kept. Gives whether it is, or `None` if no shim can have said
    /// this of it.
    fn enter(
        &mut self,
        model: &mut Live,
        at: Duration,
        found: &Found,
        counts: bool,
        events: &mut Vec<Event>,
    ) -> Option<bool> {
        if !self.plausible(model, found.size, found.period) {
            return None;
        }
        if !counts || !self.wants(found.domain) || !model.keeps(found.id, found.size, found.period) {
            return Some(false);
        }
        let sample = Sample {
            trace: self.trace(model, found, events),
            size: found.size,
            period: found.period,
            born: millis(at),
            address: found.address,
            kind: Kind::of_domain(found.domain),
        };
        alloc(model, at, found.id, sample, events);
        Some(true)
    }

    /// Whether a shim can have said this of a sample.
    fn plausible(&self, model: &Live, size: u64, period: u64) -> bool {
        size < MOST_BYTES && self.periods.contains(&period) && model.len() <= self.most
    }

    fn records(&mut self, at: Duration, bytes: &[u8], events: &mut Vec<Event>) -> bool {
        let shared = Arc::clone(&self.live);
        let mut model = lock(&shared);
        let mut rest = bytes;
        while let Some((head, record, more)) = ring::split(rest) {
            rest = more;
            match head.kind {
                kind::CODE if !self.names.code(record) => return false,
                kind::STACK => match self.names.stack(record) {
                    Some(true) => self.by_id.clear(),
                    Some(false) => {}
                    None => return false,
                },
                kind::FORGET if self.names.forget(head.flags) => self.by_id.clear(),
                kind::ALLOC => {
                    let Ok(alloc) = record::Alloc::read_from_bytes(record) else {
                        return false;
                    };
                    let found = Found {
                        id: alloc.id,
                        address: alloc.address,
                        size: alloc.size,
                        period: alloc.period,
                        stack: alloc.stack,
                        thread: alloc.thread,
                        domain: (alloc.head.flags & 7) as u8,
                        merged: self.merged(&alloc),
                    };
                    let is_alive = !self.dead.contains(&alloc.id);
                    if self.enter(&mut model, at, &found, is_alive, events).is_none() {
                        return false;
                    }
                }
                kind::FREE => match record::Free::read_from_bytes(record) {
                    Ok(found) => {
                        if self.missed.remove(&found.id) {
                            model.missed = self.missed.len() as u64;
                        }
                        free(&mut model, at, found.id, events);
                    }
                    Err(_) => return false,
                },
                kind::PAD | kind::CODE | kind::FORGET => {}
                _ => return false,
            }
        }
        self.dead.clear();
        rest.is_empty()
    }

    /// The stack of a native sample with its native frames, if a piece of it came and there was time.
    fn merged(&mut self, alloc: &record::Alloc) -> Option<StackNode> {
        let domain = (alloc.head.flags & 7) as u8;
        if domain::NATIVE >> domain & 1 == 0 || !self.wants(domain) {
            return None;
        }
        let (piece, bytes) = self.pieces.take(alloc.id)?;
        self.names.merged(alloc.stack, &piece, bytes)
    }

    fn wants(&self, domain: u8) -> bool {
        self.domains >> domain & 1 != 0
    }

    /// Goes over to a longer period: says again what is alive, as the beginning of a new profile.
    fn raise(&mut self, at: Duration, period: u64, events: &mut Vec<Event>) {
        let shared = Arc::clone(&self.live);
        let mut model = lock(&shared);
        if !self.periods.contains(&period) {
            self.periods.push(period);
        }
        let renumbered = model.raise(period);
        let renumber = |index: &mut u32| {
            let now = (*index as usize).checked_sub(1).and_then(|old| renumbered.get(old));
            *index = now.copied().unwrap_or(0);
            *index != 0
        };
        self.by_id.retain(|_, index| renumber(index));
        self.traces.retain(|_, index| renumber(index));
        events.push(Event::Period { at, period });
        self.recount();
        self.say_again(at, &model, events);
    }

    /// All threads and traces, and the allocations of what is alive.
    fn say_again(&self, at: Duration, model: &Live, events: &mut Vec<Event>) {
        let names = self.threads.names();
        events.extend(names.map(|(thread, name)| Event::Thread(thread, name.to_owned())));
        let mut known: Vec<_> = self.traces.iter().map(|(key, &index)| (index, key.node)).collect();
        known.sort_unstable_by_key(|&(index, _)| index);
        for (_, node) in known {
            events.push(Event::Trace(self.names.tree.frames(node).cloned().collect()));
        }
        for (&(stack, domain), &trace) in &self.by_id {
            events.push(Event::Stack { stack, domain, trace });
        }
        for (_, Sample { trace, size, born, .. }) in model.by_age() {
            let site = (trace as usize)
                .checked_sub(1)
                .and_then(|place| model.traces.get(place));
            events.push(Event::Alloc {
                at,
                trace,
                size,
                born,
                domain: site.map_or(0, |site| site.domain),
                thread: site.map_or(0, |site| site.thread),
            });
        }
    }

    /// Counts again which stacks have several traces.
    fn recount(&mut self) {
        self.apart.clear();
        self.frames_again = 0;
        for key in self.traces.keys() {
            let count = self.apart.entry((key.node, key.domain)).or_default();
            if *count > 0 {
                self.frames_again += self.names.tree.frames(key.node).count();
            }
            *count += 1;
        }
    }

    /// The trace of a sample.
    fn trace(&mut self, model: &mut Live, found: &Found, events: &mut Vec<Event>) -> u32 {
        let &Found { stack, domain, .. } = found;
        let known = self.names.named(stack);
        let node = known.unwrap_or_else(|| self.names.lost());
        let thread = self.threads.number(found.thread);
        // Of stacks that nobody has announced there may be any number.
        let is_numbered = known.is_some() || stack == 0;
        if let Some(merged) = found.merged {
            // The shim's number stands for all stacks that differ in native frames only: so for the one without.
            if is_numbered && !self.by_id.contains_key(&(stack, domain)) {
                let index = self.index(model, Key { node, domain, thread }, events);
                self.number(stack, domain, index, events);
            }
            let node = merged;
            return self.index(model, Key { node, domain, thread }, events);
        }
        let index = self.index(model, Key { node, domain, thread }, events);
        if is_numbered {
            self.number(stack, domain, index, events);
        }
        index
    }

    fn index(&mut self, model: &mut Live, key: Key, events: &mut Vec<Event>) -> u32 {
        match self.traces.get(&key) {
            Some(&known) => known,
            None => self.new_trace(model, key, events),
        }
    }

    /// The shim's number of a stack stands for a trace, if it does not yet for another one.
    fn number(&mut self, stack: u64, domain: u8, trace: u32, events: &mut Vec<Event>) {
        if trace != 0 && self.by_id.insert((stack, domain), trace).is_none() {
            events.push(Event::Stack { stack, domain, trace });
        }
    }

    /// Makes a trace, or finds that of the threads that are not kept apart, if there are too many.
    fn new_trace(&mut self, model: &mut Live, mut key: Key, events: &mut Vec<Event>) -> u32 {
        if self.traces.len() >= MAX_TRACES {
            let node = self.names.too_many();
            key = Key { node, thread: 0, ..key };
            if let Some(&known) = self.traces.get(&key) {
                return known;
            }
        }
        let others = self.apart.get(&(key.node, key.domain)).copied().unwrap_or(0);
        if others > 0 {
            let depth = self.names.tree.frames(key.node).count();
            if others >= MAX_APART || self.frames_again + depth > MAX_FRAMES_AGAIN {
                key.thread = 0;
                if let Some(&known) = self.traces.get(&key) {
                    return known;
                }
            }
            self.frames_again += depth;
        }
        let frames: Vec<NamedFrame> = self.names.tree.frames(key.node).cloned().collect();
        // Every stack has a frame, if only a marker.
        let Some(site) = frames.first().cloned() else {
            return 0;
        };
        self.apart.insert((key.node, key.domain), others + 1);
        let depth = frames.len();
        let next = u32::try_from(self.traces.len() + 1).unwrap_or(0);
        self.traces.insert(key, next);
        events.push(Event::Trace(frames));
        self.threads.meet(key.thread, events);
        model.traces.push(Trace {
            site,
            domain: key.domain,
            thread: key.thread,
            depth: u32::try_from(depth).unwrap_or(u32::MAX),
            live: Estimate::default(),
        });
        next
    }
}

fn millis(at: Duration) -> u64 {
    u64::try_from(at.as_millis()).unwrap_or(u64::MAX)
}

fn alloc(model: &mut Live, at: Duration, id: u64, sample: Sample, events: &mut Vec<Event>) {
    if model.add(id, sample) {
        let place = (sample.trace as usize).checked_sub(1);
        let trace = place.and_then(|place| model.traces.get(place));
        events.push(Event::Alloc {
            at,
            trace: sample.trace,
            size: sample.size,
            born: sample.born,
            domain: trace.map_or(DOMAIN_UNKNOWN, |trace| trace.domain),
            thread: trace.map_or(0, |trace| trace.thread),
        });
    }
}

fn free(model: &mut Live, at: Duration, id: u64, events: &mut Vec<Event>) {
    if let Some(sample) = model.remove(id) {
        events.push(Event::Free {
            at,
            trace: sample.trace,
            size: sample.size,
            born: sample.born,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::Layout;
    use pyheap_injector::{ProcessMemory, RemoteAddr};
    use pyheap_protocol::record::{Alloc, Head, Stack};
    use zerocopy::IntoBytes;

    /// Stacks of `depth` frames and more (of unknown code), each of another depth, and a sample of each by each thread.
    fn records(depth: usize, stacks: u64, threads: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let head = |len: usize, kind| Head {
            len: len as u32,
            kind,
            flags: 0,
        };
        for id in 1..=stacks {
            let depth = depth + id as usize;
            let head = head(size_of::<Stack>() + 8 * depth, kind::STACK);
            let depth = depth as u64;
            bytes.extend_from_slice(Stack { head, id, depth }.as_bytes());
            (0..depth).for_each(|_| bytes.extend_from_slice(&(1_u64 << 32).to_le_bytes()));
        }
        for n in 0..stacks * threads {
            let alloc = Alloc {
                head: head(size_of::<Alloc>(), kind::ALLOC),
                id: n + 1,
                address: 0x1000 + 64 * n,
                size: 64,
                thread: 1 + n / stacks,
                stack: 1 + n % stacks,
                period: 1,
            };
            bytes.extend_from_slice(alloc.as_bytes());
        }
        bytes
    }

    /// What becomes of them: traces, and for each allocation its thread.
    fn resolve(bytes: Vec<u8>) -> (usize, Vec<u32>) {
        let layout = Layout::of_minor(12).unwrap();
        let memory = ProcessMemory::new(i32::try_from(std::process::id()).unwrap());
        let threads = Threads::of(memory, RemoteAddr::NULL, layout, None);
        let live = Arc::new(Mutex::new(Live::new(1)));
        let resolver = Resolver::new(Names::new(layout, memory, 1 << 14, 1 << 15), threads, live, 7, 1 << 19);
        let (send, chunks) = std::sync::mpsc::channel();
        let at = Duration::ZERO;
        let pieces = Vec::new();
        send.send(Chunk::Records { at, bytes, pieces }).unwrap();
        drop(send);
        let found = Mutex::new((0, Vec::new()));
        let send = |events| {
            let (traces, threads) = &mut *found.lock().unwrap();
            for event in events {
                match event {
                    Event::Trace(_) => *traces += 1,
                    Event::Alloc { thread, .. } => threads.push(thread),
                    _ => {}
                }
            }
            true
        };
        resolver.run(&chunks, |_| {}, send, &AtomicU64::new(0), &AtomicBool::new(false));
        found.into_inner().unwrap()
    }

    #[test]
    fn threads_are_kept_apart_up_to_a_limit() {
        let (traces, threads) = resolve(records(2, 1, 3));
        assert_eq!((traces, threads), (3, vec![1, 2, 3]));
        let (traces, threads) = resolve(records(2, 1, 200));
        assert_eq!(traces, MAX_APART as usize + 1);
        assert_eq!(threads[..64], (1..=64).collect::<Vec<u32>>());
        assert!(threads[64..].iter().all(|thread| *thread == 0));
    }

    #[test]
    fn stacks_are_repeated_up_to_a_limit() {
        let (traces, threads) = resolve(records(1000, 10, 60));
        assert_eq!(threads.len(), 600);
        let again = MAX_FRAMES_AGAIN / 1000;
        // Each stack has a trace of its first thread, and one for those who came too late.
        assert!((10 + again..=20 + again).contains(&traces), "{traces}");
    }

    /// What no shim can have written ends it, and what came before is kept.
    #[test]
    fn what_no_shim_can_have_written_is_refused() {
        let good = records(2, 1, 3);
        let bad = |change: &dyn Fn(&mut Alloc)| {
            let mut alloc = Alloc::read_from_bytes(&good[good.len() - size_of::<Alloc>()..]).unwrap();
            alloc.id = 1 << 40;
            change(&mut alloc);
            let after = Alloc {
                id: 1 << 41,
                period: 1,
                ..alloc
            };
            let mut bytes = good.clone();
            bytes.extend_from_slice(alloc.as_bytes());
            bytes.extend_from_slice(after.as_bytes());
            bytes
        };
        assert_eq!(resolve(bad(&|_| {})).1.len(), 5);
        assert_eq!(resolve(bad(&|alloc| alloc.period = 2)).1.len(), 3);
        assert_eq!(resolve(bad(&|alloc| alloc.size = u64::MAX)).1.len(), 3);
        assert_eq!(resolve(bad(&|alloc| alloc.head.kind = 99)).1.len(), 3);
        assert_eq!(resolve(bad(&|alloc| alloc.head.len = 16)).1.len(), 3);
    }

    #[test]
    fn more_samples_than_the_table_holds_are_refused() {
        let most = 3 << 18;
        let bytes = records(2, 1, 2 * most);
        let (_, found) = resolve(bytes);
        assert_eq!(found.len() as u64, most + 1);
    }
}
