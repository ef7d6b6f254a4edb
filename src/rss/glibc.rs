//! glibc's malloc, by its chunks, read from outside.
//!
//! Every chunk begins with its size, so that the next one follows (`struct malloc_chunk` in `malloc/malloc.c`, unchanged since
//! long before any Python here). Bit 0 of the *next* chunk's size says whether a chunk is in use; bit 1 marks a block that has a
//! mapping of its own. What malloc keeps for its next caller in its per-thread caches and fast bins looks in use.
//!
//! What it refuses to do: believe. A walk counts only as far as every size is possible; the rest of a heap is unknown.

use super::resident::{PAGE, Resident};
use crate::dump::types::Types;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::ops::Range;

/// Heaps of threads begin at multiples of this (`HEAP_MAX_SIZE`), and are no longer.
pub const THREAD_HEAP: u64 = 64 << 20;
/// Bytes that are read at once.
const WINDOW: u64 = 1 << 20;
/// Before the caller's bytes.
const HEADER: u64 = 16;
/// Blocks of Python up to this size come from pymalloc, where it is in use.
const SMALL: u64 = 512;
/// Of a block that is asked for its type, so much is read.
const BEGIN: usize = 64;
/// Blocks that are asked for the type of their object.
const MAX_LOOKS: u64 = 4 << 20;
/// A thread's heap has its arena's data before the first chunk: so far the chunks' begin is looked for.
const MAX_ARENA_DATA: u64 = 4096;
/// A walk that fails because the heap changes is taken up again, so often.
const RETRIES: usize = 3;

/// Resident bytes of one or more heaps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Tally {
    /// In blocks in use that begin with a Python object.
    pub objects: u64,
    /// In other blocks in use.
    pub used: u64,
    /// In free blocks, and at the heap's end.
    pub free: u64,
    /// Where the walk had lost its way.
    pub unknown: u64,
    /// Blocks in use.
    pub blocks: u64,
}

impl Tally {
    /// All of it.
    #[must_use]
    pub const fn sum(&self) -> u64 {
        self.objects + self.used + self.free + self.unknown
    }

    /// Adds another one.
    pub fn add(&mut self, other: &Self) {
        self.objects += other.objects;
        self.used += other.used;
        self.free += other.free;
        self.unknown += other.unknown;
        self.blocks += other.blocks;
    }
}

/// Walks heaps.
#[derive(Debug)]
pub struct Walker<'a, M> {
    memory: &'a M,
    resident: &'a Resident,
    types: Option<Types<&'a M>>,
    looks: u64,
}

impl<'a, M: RemoteMemory> Walker<'a, M> {
    /// A walker; without `types` no block is known to begin with an object.
    pub fn new(memory: &'a M, resident: &'a Resident, types: Option<Types<&'a M>>) -> Self {
        Self {
            memory,
            resident,
            types,
            looks: 0,
        }
    }

    /// The chunks of `[heap]`.
    pub fn main_heap(&mut self, heap: &Range<u64>) -> Tally {
        self.walk(heap.clone()).0
    }

    /// The chunks of a thread's heap that begins at `start`, and its end; `None` if it is none. `limit` is the mapping's end.
    pub fn thread_heap(&mut self, start: u64, limit: u64) -> Option<(Tally, u64)> {
        // `heap_info`: arena, previous heap, size, size that may be accessed.
        let words: [u8; 32] = self.read(start)?;
        let word = |at: usize| words.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
        let (arena, size, accessible) = (word(0)?, word(16)?, word(24)?);
        let sane = (PAGE..=THREAD_HEAP).contains(&size)
            && size.is_multiple_of(16)
            && (size..=THREAD_HEAP).contains(&accessible)
            // Its arena's data follow the head of the arena's first heap.
            && (32..=128).contains(&(arena % THREAD_HEAP));
        let end = start.checked_add(size)?;
        if !sane || end > limit {
            return None;
        }
        let first = (32..MAX_ARENA_DATA)
            .step_by(16)
            .find(|offset| self.leads_to(start + offset, end))?;
        let (mut tally, _) = self.walk(start + first..end);
        tally.used += self.resident.bytes(&(start..start + first));
        // Room that was given back by accident is between the end and what may be accessed.
        Some((tally, end))
    }

    /// True if the chunks from `at` on lead to `end` exactly, as far as some hundred of them tell.
    fn leads_to(&self, mut at: u64, end: u64) -> bool {
        const ENOUGH: usize = 64;
        for _ in 0..ENOUGH {
            let Some(size) = self.read::<8>(at.saturating_add(8)).map(u64::from_le_bytes) else {
                return false;
            };
            let Some(next) = next_chunk(at, size, end) else {
                return false;
            };
            if next == end {
                return true;
            }
            at = next;
        }
        true
    }

    /// Blocks with mappings of their own at the begin of `area`, one after the other: how far they reach.
    pub fn mapped_blocks(&mut self, area: &Range<u64>) -> (Tally, u64) {
        let (mut tally, mut at) = (Tally::default(), area.start);
        while at < area.end {
            let Some(words) = self.read::<16>(at) else { break };
            let (before, size) = words.split_at(8);
            let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
            let (before, size) = (word(before), word(size));
            let bytes = size & !7;
            let next = at.checked_add(bytes).filter(|next| *next <= area.end);
            let (Some(next), true) = (
                next,
                before == 0 && size & 7 == 2 && bytes >= PAGE && bytes.is_multiple_of(PAGE),
            ) else {
                break;
            };
            self.count(&mut tally, at..next, None);
            at = next;
        }
        (tally, at)
    }

    fn read<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let end = at.checked_add(N as u64)?;
        let is_there = self.resident.bytes(&(at..end)) == N as u64;
        self.memory.read_array(RemoteAddr(at)).ok().filter(|_| is_there)
    }

    /// Counts a block in use. `begin`: its first bytes, if they were read.
    fn count(&mut self, tally: &mut Tally, chunk: Range<u64>, begin: Option<&[u8]>) {
        let bytes = self.resident.bytes(&chunk);
        tally.blocks += 1;
        if self.is_object(&chunk, begin) {
            tally.objects += bytes;
        } else {
            tally.used += bytes;
        }
    }

    fn is_object(&mut self, chunk: &Range<u64>, begin: Option<&[u8]>) -> bool {
        let room = (chunk.end - chunk.start).saturating_sub(HEADER / 2);
        let at = chunk.start + HEADER;
        if room <= SMALL || self.looks >= MAX_LOOKS || self.resident.bytes(&(at..at + 64)) < 64 {
            return false;
        }
        self.looks += 1;
        let Some(types) = &mut self.types else { return false };
        match begin {
            Some(begin) => types.is_object(begin, room),
            None => self
                .memory
                .read_array::<BEGIN>(RemoteAddr(at))
                .is_ok_and(|begin| types.is_object(&begin, room)),
        }
    }

    /// Walks the chunks of `range`; the number of chunks besides.
    fn walk(&mut self, range: Range<u64>) -> (Tally, usize) {
        let mut tally = Tally::default();
        let (mut at, end, mut chunks, mut retries) = (range.start, range.end, 0, 0);
        let mut window = vec![0; WINDOW as usize];
        // The chunk before: known to be in use or not only by the size of the next one.
        let mut last: Option<Range<u64>> = None;
        'windows: while at < end {
            // The size of a chunk is its second word.
            let want = at..(at + WINDOW).min(end);
            let there = self.resident.parts(want).next().filter(|part| part.start == at);
            let Some(part) = there else { break };
            let Some(bytes) = window.get_mut(..(part.end - part.start) as usize) else {
                break;
            };
            if bytes.len() < HEADER as usize || self.memory.read_into(RemoteAddr(at), bytes).is_err() {
                break;
            }
            let base = at;
            if let Some(types) = &mut self.types {
                types.forget();
            }
            while at < end && at - base + HEADER <= part.end - base {
                let from = (at - base) as usize + 8;
                let word = window.get(from..from + 8).and_then(|word| word.try_into().ok());
                let size = word.map_or(0, u64::from_le_bytes);
                let Some(next) = next_chunk(at, size, end) else {
                    retries += 1;
                    if retries > RETRIES || at == base {
                        break 'windows;
                    }
                    // Perhaps it has changed since it was read.
                    continue 'windows;
                };
                if let Some(before) = last.take() {
                    if size & 1 == 1 {
                        let from = before.start.checked_sub(base).map(|from| (from + HEADER) as usize);
                        // What is left in the window of one before is not of this one.
                        let read = (part.end - part.start) as usize;
                        let begin = from.and_then(|from| window.get(..read)?.get(from..from + BEGIN));
                        self.count(&mut tally, before, begin);
                    } else {
                        tally.free += self.resident.bytes(&before);
                    }
                }
                last = Some(at..next);
                chunks += 1;
                at = next;
            }
        }
        // The last one is the heap's free end, or where the way was lost.
        match last {
            Some(before) if before.end == end => tally.free += self.resident.bytes(&before),
            Some(before) => tally.unknown += self.resident.bytes(&(before.start..end)),
            None => tally.unknown += self.resident.bytes(&range),
        }
        (tally, chunks)
    }
}

/// Where the chunk after `at` begins; `None` if `size` cannot be one's that is in a heap which ends at `end`.
fn next_chunk(at: u64, size: u64, end: u64) -> Option<u64> {
    const MAPPED: u64 = 2;
    let bytes = size & !7;
    let next = at.checked_add(bytes)?;
    (bytes >= 16 && bytes.is_multiple_of(16) && size & MAPPED == 0 && next <= end).then_some(next)
}
