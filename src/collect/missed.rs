//! Frees of native memory that no wrapper saw: by a pointer that is not in a slot, or by an object that is left alone.
//!
//! A sample whose address is allocated again is found by the shim. Here the others are looked for from outside, a few every
//! second: a mapping that is not there any more, and a block whose chunk, as the GNU C library keeps it, is free or has become
//! another one. What two looks in a row find, a second apart, has been freed: nobody writes into a chunk's header but the
//! allocator. Small blocks that wait in a thread's cache for the next request look as if they were in use.

use super::live::{Kind, Live};
use crate::attach::Session;
use procfs::process::MMPermissions;
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory, space};
use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

/// Samples that are looked at in a second, at most: some milliseconds.
const AT_ONCE: usize = 2000;
/// Younger ones are left alone.
const MIN_AGE: Duration = Duration::from_secs(2);
/// Before a block: the size of its chunk with three flags, and before that the size of the one before.
const HEADER: u64 = 16;
/// The chunk before is in use; this one is a mapping of its own.
const BEFORE_IN_USE: u64 = 1;
const IS_MAPPED: u64 = 2;
const FLAGS: u64 = 7;
/// A chunk is at most so much larger than what was asked for: what is left over is split off, but for pages that were asked for as such.
const MOST_SPARE: u64 = 3 * 4096;

/// A live sample of native memory.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    id: u64,
    address: u64,
    size: u64,
    is_mapping: bool,
}

/// Looks for missed frees.
#[derive(Debug)]
pub struct MissedFrees {
    memory: ProcessMemory,
    /// Chunks can be judged: they are the GNU C library's.
    is_glibc: bool,
    /// Where the last look ended, by id.
    last: u64,
    suspects: HashSet<u64>,
}

impl MissedFrees {
    /// For a session that samples native memory; `None` for one that does not.
    #[must_use]
    pub fn new(session: &Session) -> Option<Self> {
        let coverage = session.coverage()?;
        Some(Self {
            memory: session.memory(),
            is_glibc: coverage.is_glibc,
            last: 0,
            suspects: HashSet::new(),
        })
    }

    /// The samples that are looked at this time, `now` after the start.
    pub fn choose(&mut self, live: &Live, now: Duration) -> Vec<Block> {
        let before = u64::try_from(now.saturating_sub(MIN_AGE).as_millis()).unwrap_or(0);
        let mut blocks: Vec<Block> = live
            .native_samples()
            .filter(|(_, sample)| sample.born <= before)
            .map(|(id, sample)| Block {
                id,
                address: sample.address,
                size: sample.size,
                is_mapping: sample.kind == Kind::MAPPING,
            })
            .filter(|block| block.is_mapping || self.is_glibc)
            .collect();
        // Suspects again, and then on from where the last look ended.
        blocks.sort_unstable_by_key(|block| (!self.suspects.contains(&block.id), block.id <= self.last, block.id));
        blocks.truncate(AT_ONCE);
        let mut others = blocks.iter().filter(|block| !self.suspects.contains(&block.id));
        self.last = others.next_back().map_or(0, |block| block.id);
        blocks
    }

    /// Ids of those of them that were freed without our knowledge. Reads the process.
    pub fn judge(&mut self, blocks: &[Block]) -> Vec<u64> {
        if blocks.is_empty() {
            self.suspects.clear();
            return Vec::new();
        }
        let Ok(maps) = space::maps(self.memory.pid()) else {
            return Vec::new();
        };
        let writable = maps
            .iter()
            .filter(|map| map.perms.intersects(MMPermissions::READ | MMPermissions::WRITE));
        let mut mapped: Vec<Range<u64>> = Vec::new();
        for (start, end) in writable.map(|map| map.address) {
            match mapped.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => mapped.push(start..end),
            }
        }
        let is_free = |block: &&Block| {
            let end = block.address.saturating_add(block.size);
            !covers(&mapped, block.address..end) || !block.is_mapping && self.is_free_chunk(block)
        };
        let found: HashSet<u64> = blocks.iter().filter(is_free).map(|block| block.id).collect();
        let freed = found.intersection(&self.suspects).copied().collect();
        self.suspects = found.difference(&self.suspects).copied().collect();
        freed
    }

    /// True if the chunk of a block is certainly free, or that of another block. What cannot be read is not certain.
    fn is_free_chunk(&self, block: &Block) -> bool {
        let Some(header) = block.address.checked_sub(HEADER / 2) else {
            return false;
        };
        let Ok(word) = self.memory.read_u64(RemoteAddr(header)) else {
            return false;
        };
        let size = word & !FLAGS;
        let needed = block.size.saturating_add(HEADER / 2);
        if word & IS_MAPPED != 0 {
            return size < needed;
        }
        if size < needed || size > needed.saturating_add(MOST_SPARE) {
            return true;
        }
        let next = header.wrapping_add(size);
        self.memory
            .read_u64(RemoteAddr(next))
            .is_ok_and(|next| next & BEFORE_IN_USE == 0)
    }
}

/// Whether all of `range` is in one of `mapped`, which are in order and apart.
fn covers(mapped: &[Range<u64>], range: Range<u64>) -> bool {
    let after = mapped.partition_point(|map| map.start <= range.start);
    let map = after.checked_sub(1).and_then(|at| mapped.get(at));
    map.is_some_and(|map| range.end <= map.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> MissedFrees {
        MissedFrees {
            memory: ProcessMemory::new(std::process::id() as i32),
            is_glibc: true,
            last: 0,
            suspects: HashSet::new(),
        }
    }

    #[test]
    fn what_is_in_use_is_never_free() {
        let blocks: Vec<Vec<u8>> = (1..2000).map(|size| vec![1; size * 7]).collect();
        let blocks: Vec<Block> = blocks
            .iter()
            .zip(1..)
            .map(|(block, id)| Block {
                id,
                address: block.as_ptr() as u64,
                size: block.len() as u64,
                is_mapping: false,
            })
            .collect();
        let mut missed = here();
        assert!(missed.judge(&blocks).is_empty() && missed.suspects.is_empty());
        assert!(missed.judge(&blocks).is_empty());
    }

    /// It takes two looks.
    #[test]
    fn a_mapping_that_has_gone_is_free() {
        let gone = Block {
            id: 7,
            address: 0x1000,
            size: 4096,
            is_mapping: true,
        };
        let mut missed = here();
        assert!(missed.judge(&[gone]).is_empty());
        assert_eq!(missed.judge(&[gone]), [7]);
        assert!(missed.judge(&[gone]).is_empty());
    }

    #[test]
    fn ranges_are_covered_as_a_whole() {
        let mapped = [0x1000..0x3000, 0x5000..0x6000];
        assert!(covers(&mapped, 0x1000..0x3000) && covers(&mapped, 0x5000..0x5001));
        assert!(!covers(&mapped, 0x2000..0x3001) && !covers(&mapped, 0x4000..0x5001) && !covers(&mapped, 0..1));
    }
}
