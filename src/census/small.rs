//! The small blocks of Python's own allocators, so that nothing that is in use is left out in silence.
//!
//! A walk finds what can be reached from the collector's objects and from running calls. What only C code holds is not reached,
//! but it has a block all the same: pymalloc's pools say which of their blocks are in use, and so do mimalloc's pages. Each
//! such block that the walk has not come to is looked at: if it begins like an object of a type, it is counted as one, and so is what it
//! leads to. The rest is told by size.
//!
//! Pools are found by their headers, which [`crate::rss::pymalloc`] knows: that is the same in every version, with arenas in
//! an array (up to 3.9), in a radix tree, and with a state for each interpreter (from 3.12), and needs no symbol.

use super::heap::Heap;
use super::marks::Met;
use super::mimalloc;
use crate::rss::pymalloc::{self, HEADER, Shape};
use pyheap_injector::{RemoteAddr, RemoteMemory};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// Blocks that are kept to be looked at twice: 64 MiB of them.
const MAX_KEPT: usize = 4 << 20;
/// Before an object: nothing, the collector's head, attributes too; and as much more with the debugging allocator.
const BEFORE: [u64; 4] = [0, 16, 32, 48];
/// What the debugging allocator puts before each block.
const DEBUG: u64 = 16;
/// Size classes that are kept apart; larger blocks (of mimalloc) are in one.
const LARGEST: u64 = 1024;
/// Blocks between two looks at the clock.
const CLOCK: u64 = 1 << 16;

/// Blocks of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// How many.
    pub blocks: u64,
    /// Their bytes, as the allocator has cut them.
    pub bytes: u64,
}

impl Blocks {
    const fn add(&mut self, size: u64) {
        self.blocks += 1;
        self.bytes += size;
    }
}

/// Blocks of one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Class {
    /// Bytes of one; 0 stands for all that are larger than 1024.
    pub size: u64,
    /// How many.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// All small blocks in use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Small {
    /// `pymalloc` or `mimalloc`.
    pub allocator: String,
    /// In use.
    pub in_use: Blocks,
    /// Of them: objects that were counted, and their tables.
    pub counted: Blocks,
    /// Not counted, but a field of a counted object leads there: its own memory in C.
    pub attached: Blocks,
    /// What was an object, and is kept for the next one of its type.
    pub kept_for_reuse: Blocks,
    /// Nothing that was counted leads there, and it begins with no object: memory of C code.
    pub unknown: Blocks,
    /// The unknown ones by size, those with the most bytes first.
    pub unknown_by_size: Vec<Class>,
    /// Time was over, or there were too many: so many are in `in_use` and nowhere else.
    pub not_looked_at: u64,
}

/// Blocks that no object was found in.
#[derive(Debug, Default)]
pub struct Rest {
    small: Small,
    blocks: Vec<(u64, u64)>,
}

/// Looks at all small blocks in `areas` and marks what looks like an object that was not met. When it is looked at, too,
/// [`Rest::settle`] tells what there is.
pub fn seed<M: RemoteMemory>(heap: &mut Heap<'_, M>, areas: &[Range<u64>], until: Instant) -> Rest {
    let mut rest = Rest::default();
    let mut seen = 0_u64;
    let mut late = false;
    let mut visit = |heap: &mut Heap<'_, M>, block: u64, size: u64| {
        seen += 1;
        late |= seen.is_multiple_of(CLOCK) && Instant::now() > until;
        rest.small.in_use.add(size);
        if heap.marks.is_accounted(block, size) {
            rest.small.counted.add(size);
        } else if late || rest.blocks.len() >= MAX_KEPT {
            rest.small.not_looked_at += 1;
        } else {
            rest.blocks.push((block, size));
            if let Some(object) = object_in(heap, block, size, true) {
                heap.marks.mark(object, Met::Doubtful);
            }
        }
    };
    if heap.at.base.free_threaded {
        mimalloc::each_block(heap, &mut visit);
        rest.small.allocator = "mimalloc".to_owned();
    } else {
        pools(heap, areas, &mut visit);
        rest.small.allocator = "pymalloc".to_owned();
    }
    rest
}

impl Rest {
    /// What the blocks are, now that objects in them are counted.
    pub fn settle<M: RemoteMemory>(self, heap: &mut Heap<'_, M>) -> Small {
        let mut small = self.small;
        let mut classes: BTreeMap<u64, Class> = BTreeMap::new();
        for (block, size) in self.blocks {
            if heap.marks.is_accounted(block, size) {
                small.counted.add(size);
            } else if object_in(heap, block, size, false).is_some() {
                small.kept_for_reuse.add(size);
            } else if heap.marks.is_met(block, size) {
                small.attached.add(size);
            } else {
                small.unknown.add(size);
                let of = if size <= LARGEST { size } else { 0 };
                let class = classes.entry(of).or_default();
                class.size = of;
                class.blocks += 1;
                class.bytes += size;
            }
        }
        small.unknown_by_size = classes.into_values().collect();
        small
            .unknown_by_size
            .sort_by_key(|class| std::cmp::Reverse(class.bytes));
        small
    }
}

/// The object that a block begins with, alive, or what is left of one.
fn object_in<M: RemoteMemory>(heap: &mut Heap<'_, M>, block: u64, size: u64, alive: bool) -> Option<u64> {
    BEFORE.into_iter().find_map(|before| {
        let object = block.checked_add(before)?;
        let of = heap.blocks.word(object.checked_add(heap.at.base.ob_type)?)?;
        let info = heap.type_at(of)?;
        let info = heap.infos.get(info)?;
        let is_here = before == info.before || before == info.before + DEBUG;
        // One item may be in the fixed part.
        let fits = before + info.basic.saturating_sub(info.item) <= size;
        if !is_here || !fits {
            return None;
        }
        (heap.type_of(object).is_some() == alive).then_some(object)
    })
}

/// Visits the blocks in use of pymalloc's pools.
fn pools<'a, M: RemoteMemory>(
    heap: &mut Heap<'a, M>,
    areas: &[Range<u64>],
    visit: &mut dyn FnMut(&mut Heap<'a, M>, u64, u64),
) {
    let shape = Shape::of(heap.at.base.minor);
    for area in areas {
        let mut at = area.start.next_multiple_of(shape.pool);
        while at.checked_add(shape.pool).is_some_and(|end| end <= area.end) {
            let mut header = [0; HEADER as usize];
            let there = heap.blocks.memory().read_into(RemoteAddr(at), &mut header).is_ok();
            if let Some(pool) = pymalloc::pool(shape, at, &header).filter(|pool| there && pool.used > 0) {
                blocks_of(heap, &pool, visit);
            }
            at += shape.pool;
        }
    }
}

fn blocks_of<'a, M: RemoteMemory>(
    heap: &mut Heap<'a, M>,
    pool: &pymalloc::Pool,
    visit: &mut dyn FnMut(&mut Heap<'a, M>, u64, u64),
) {
    let mut free = vec![false; pool.carved as usize];
    let mut block = pool.free;
    // The list may be changed while it is read: it has no more entries than blocks.
    for _ in 0..pool.carved {
        let place = block
            .checked_sub(pool.at + HEADER)
            .filter(|place| place.is_multiple_of(pool.size));
        let place = place.and_then(|place| free.get_mut((place / pool.size) as usize));
        let Some(place) = place.filter(|place| !**place) else {
            break;
        };
        *place = true;
        block = heap.blocks.word(block).unwrap_or(0);
    }
    for (number, _) in free.iter().enumerate().filter(|(_, free)| !**free) {
        visit(heap, pool.at + HEADER + number as u64 * pool.size, pool.size);
    }
}
