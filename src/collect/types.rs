//! What the survivors are: the types of the objects in live sampled blocks, looked at from outside while the target runs.
//!
//! Only blocks of the obj domain hold objects, and not all of them; what the raw and mem domains hold is called a buffer (the
//! bodies of lists, dicts and sets, text, C data). A block is looked at once it has lived for a second, so that what comes
//! and goes is not, and at most for a hundredth of the time, or four while more wait than can be looked at in it; the rest at
//! the end. What is found counts only if the target's own table says afterwards that the block is still the same sample.

use super::live::{Kind, Live, Sample};
use super::resolve::lock;
use crate::attach::Session;
use crate::attach::interpreter::{Interpreter, Phase};
use crate::dump::budget::Budget;
use crate::dump::types::Types;
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory};
use pyheap_protocol::control::{Control, DEFERRED};
use pyheap_protocol::table::{self, Entry};
use std::collections::{HashMap, HashSet};
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Blocks younger than this are left alone until the end.
const MIN_AGE: Duration = Duration::from_secs(1);
/// Between two looks, and the processor time of one.
const PAUSE: Duration = Duration::from_millis(250);
const ONE_LOOK: Duration = Duration::from_micros(2500);
/// The same while so many wait that objects might be replaced faster than they are looked at.
const LONG_LOOK: Duration = Duration::from_millis(10);
const MANY: usize = 2000;
/// Of a round of [`Looker::catch_up`].
const ONE_ROUND: Duration = Duration::from_millis(100);
/// The same at the end of a recording.
const HURRY: Duration = Duration::from_millis(2);
/// Blocks that are looked at before it is asked whether they are still there.
const BATCH: usize = 128;
/// Queued blocks that are considered at once, while the model is locked.
const QUEUED: usize = 8192;
/// Entries of a chain of the target's table that are followed.
const MAX_CHAIN: usize = 64;
/// Different types that are kept apart.
const MAX_KINDS: usize = 1 << 14;

/// A block to be looked at.
#[derive(Debug, Clone, Copy)]
struct Block {
    id: u64,
    address: u64,
    size: u64,
}

/// Looks at live blocks.
#[derive(Debug)]
pub struct Looker {
    memory: ProcessMemory,
    interpreter: Interpreter,
    reader: Option<Types<ProcessMemory>>,
    buckets: RemoteAddr,
    deferred: RemoteAddr,
    slab: u64,
    slab_entries: u64,
    live: Arc<Mutex<Live>>,
    started: Instant,
    /// Numbers of the types in the model.
    kinds: HashMap<Arc<str>, Kind>,
}

impl Looker {
    /// Looks at the blocks that `live` has of `session`; ages count from `started`.
    #[must_use]
    pub fn new(session: &Session, live: Arc<Mutex<Live>>, started: Instant) -> Self {
        let memory = session.memory();
        let places = session.places();
        let interpreter = session.target.interpreter.clone();
        Self {
            memory,
            reader: Types::new(memory, &interpreter.layout),
            interpreter,
            buckets: session.control(offset_of!(Control, buckets)),
            deferred: session.control(offset_of!(Control, deferred)),
            slab: places.slab,
            slab_entries: places.slab_entries,
            live,
            started,
            kinds: HashMap::new(),
        }
    }

    /// Looks now and then, until `stop` is set. So many recordings share the time for it, in `company`.
    #[must_use]
    pub fn run(mut self, stop: &AtomicBool, company: u32) -> Self {
        let company = company.max(1);
        let pause = PAUSE.saturating_mul(company.min(4));
        while !stop.load(Ordering::Acquire) {
            let allowed = if self.waiting() > MANY { LONG_LOOK } else { ONE_LOOK };
            self.look(MIN_AGE, allowed * company.min(4) / company, PAUSE);
            std::thread::park_timeout(pause);
        }
        self
    }

    /// How many blocks wait to be looked at. Those that were freed since count, too.
    fn waiting(&self) -> usize {
        lock(&self.live).queue_len()
    }

    /// Looks at blocks of any age until hardly any wait, for so much processor time, and at most so long. Each round leaves
    /// what the target, which runs on, has made during it.
    pub fn catch_up(&mut self, allowed: Duration, patience: Duration) {
        let budget = Budget::of(allowed);
        let end = Instant::now() + patience;
        while self.waiting() >= BATCH && !budget.is_spent() && Instant::now() < end && self.is_running() {
            self.look(Duration::ZERO, ONE_ROUND, PAUSE);
        }
        self.look(Duration::ZERO, HURRY, HURRY);
    }

    /// Looks all the time, at blocks of any age, until `done` is set.
    pub fn hurry(&mut self, done: &AtomicBool) {
        while !done.load(Ordering::Acquire) {
            self.look(Duration::ZERO, HURRY, PAUSE);
            std::thread::sleep(HURRY);
        }
    }

    /// Looks at blocks that are at least so old, for so much processor time, and at most so long.
    pub fn look(&mut self, age: Duration, allowed: Duration, patience: Duration) {
        if self.reader.is_none() {
            return;
        }
        let budget = Budget::of(allowed);
        let end = Instant::now() + patience;
        let is_over = || budget.is_spent() || Instant::now() > end;
        let before = self.started.elapsed().saturating_sub(age);
        let before = u64::try_from(before.as_millis()).unwrap_or(u64::MAX);
        let mut queued = lock(&self.live).queue_len();
        while queued > 0 && !is_over() {
            let (taken, blocks) = self.take(before, queued.min(QUEUED));
            if taken == 0 {
                return;
            }
            queued -= taken;
            let mut done = 0;
            for batch in blocks.chunks(BATCH) {
                if is_over() || !self.batch(batch).unwrap_or(false) {
                    break;
                }
                done += batch.len();
            }
            let left = blocks.iter().skip(done).map(|block| block.id);
            lock(&self.live).queue_again(left);
            if done < blocks.len() {
                return;
            }
        }
    }

    fn is_running(&self) -> bool {
        matches!(self.interpreter.phase(&self.memory), Ok(Phase::Running))
    }

    /// Takes so many blocks out of the queue: how many, and those of them that are alive. Ends at the first that was born later.
    fn take(&self, before: u64, most: usize) -> (usize, Vec<Block>) {
        let mut live = lock(&self.live);
        let mut blocks = Vec::new();
        let mut taken = 0;
        while taken < most {
            let Some((id, sample)) = live.next_queued(before) else {
                break;
            };
            taken += 1;
            if let Some(Sample { address, size, .. }) = sample {
                blocks.push(Block { id, address, size });
            }
        }
        (taken, blocks)
    }

    /// Looks at some blocks, and enters what was found in those that are still there. False when the interpreter shuts down: it
    /// then frees blocks that the table still has.
    fn batch(&mut self, blocks: &[Block]) -> Result<bool, MemoryError> {
        let Some(reader) = &mut self.reader else {
            return Ok(false);
        };
        let found = reader.of_blocks(blocks.iter().map(|block| (block.address, block.size)));
        if !self.is_running() {
            return Ok(false);
        }
        let freed = self.deferred()?;
        let mut again = Vec::new();
        for (block, found) in blocks.iter().zip(found) {
            if freed.contains(&block.address) || !self.is_there(block)? {
                // It was freed, and the model learns that next; or we lost our way in a chain that was changed meanwhile.
                again.push(block.id);
            } else {
                let kind = found.map_or(Kind::OBJ_BUFFER, |name| self.kind(name));
                lock(&self.live).set_kind(block.id, kind);
            }
        }
        lock(&self.live).queue_again(again.into_iter());
        Ok(true)
    }

    /// The number of a type.
    fn kind(&mut self, name: Arc<str>) -> Kind {
        if let Some(&known) = self.kinds.get(&name) {
            return known;
        }
        if self.kinds.len() >= MAX_KINDS {
            return Kind::OTHER;
        }
        let kind = lock(&self.live).add_kind(&name);
        self.kinds.insert(name, kind);
        kind
    }

    /// Addresses of blocks that were freed without the table knowing it yet.
    fn deferred(&self) -> Result<HashSet<u64>, MemoryError> {
        let bytes: [u8; DEFERRED * 8] = self.memory.read_array(self.deferred)?;
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        Ok(words.filter(|word| *word != 0).collect())
    }

    /// True if the target's table has this sample now: then it had it all the time, since ids are never used twice. False says
    /// little: chains change while they are followed.
    fn is_there(&self, block: &Block) -> Result<bool, MemoryError> {
        let bucket = u64::from(table::bucket(block.address));
        let at = |base: u64, more: u64| RemoteAddr(base.wrapping_add(more));
        let mut index = self.memory.read_u32(at(self.buckets.0, bucket * 4))?;
        for _ in 0..MAX_CHAIN {
            let number = u64::from(index);
            if number == 0 || number > self.slab_entries {
                break;
            }
            let place = at(self.slab, (number - 1) * size_of::<Entry>() as u64);
            let bytes: [u8; size_of::<Entry>()] = self.memory.read_array(place)?;
            let Ok(entry) = Entry::read_from_bytes(&bytes) else {
                break;
            };
            if entry.address == block.address {
                return Ok(entry.is_live() && entry.id == block.id);
            }
            index = entry.next;
        }
        Ok(false)
    }
}
