//! The chunks of memory that calls of Python functions have their frames in, from 3.11 on.
//!
//! Each thread has a stack of them, and each greenlet that is not running has one as well (`_PyStackChunk` in `Include/cpython/pystate.h`,
//! `push_chunk` in `Python/pystate.c`): the chunk before it, its size, and how many words of it are in use once there is a next one.
//! They come from the allocator of pymalloc's arenas, a mapping each, and no other allocator counts them. A head that does not agree with itself is none.

use super::resident::{PAGE, Resident};
use pyheap_injector::{RemoteAddr, RemoteMemory};

/// `DATA_STACK_CHUNK_SIZE`: doubled until a frame fits.
const LEAST: u64 = 16 << 10;
/// No frame needs more.
const MOST: u64 = 1 << 30;
/// `sizeof(_PyStackChunk)` without its words.
const HEADER: u64 = 24;

/// What was found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Frames {
    /// Stacks: one for each thread of Python's and each greenlet that waits.
    pub stacks: u64,
    /// Their chunks.
    pub chunks: u64,
    /// Resident bytes of these.
    pub bytes: u64,
}

impl Frames {
    /// Adds what was found elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.stacks += other.stacks;
        self.chunks += other.chunks;
        self.bytes += other.bytes;
    }

    /// Counts the chunk that begins at `at`, if one does, and says where it ends.
    pub fn take<M: RemoteMemory>(&mut self, memory: &M, resident: &Resident, at: u64, end: u64) -> Option<u64> {
        let (previous, size) = chunk(memory, resident, at)?;
        let next = at.checked_add(size).filter(|next| *next <= end)?;
        if previous != 0 {
            chunk(memory, resident, previous)?;
        }
        self.stacks += u64::from(previous == 0);
        self.chunks += 1;
        self.bytes += resident.bytes(&(at..next));
        Some(next)
    }
}

/// The chunk before it (0: none) and the size, by a head that can be one.
fn chunk<M: RemoteMemory>(memory: &M, resident: &Resident, at: u64) -> Option<(u64, u64)> {
    let end = at.checked_add(HEADER)?;
    let is_there = at.is_multiple_of(PAGE) && resident.bytes(&(at..end)) == HEADER;
    let head: [u8; HEADER as usize] = memory.read_array(RemoteAddr(at)).ok().filter(|_| is_there)?;
    let word = |from: usize| Some(u64::from_le_bytes(*head.get(from..)?.first_chunk()?));
    let (previous, size, top) = (word(0)?, word(8)?, word(16)?);
    let sane = size.is_power_of_two()
        && (LEAST..=MOST).contains(&size)
        && top <= (size - HEADER) / 8
        && previous.is_multiple_of(PAGE)
        && previous != at;
    sane.then_some((previous, size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pyheap_injector::ProcessMemory;
    use std::process;

    /// Pages of our own, at a multiple of 64 KiB.
    #[repr(align(65536))]
    struct Pages([u64; 3 * 8192]);

    fn words(of: &mut Pages, at: usize, head: [u64; 3]) {
        of.0[at / 8..at / 8 + 3].copy_from_slice(&head);
    }

    #[test]
    fn chunks_are_told_by_their_heads() {
        let mut pages = Box::new(Pages([1; 3 * 8192]));
        let start = std::ptr::from_ref(&*pages) as u64;
        let area = start..start + size_of::<Pages>() as u64;
        words(&mut pages, 0, [0, LEAST, 2045]);
        words(&mut pages, 16384, [start, 2 * LEAST, 0]);
        // Another stack, behind pages that are none.
        words(&mut pages, 3 * 16384, [7, LEAST, 0]);
        words(&mut pages, 4 * 16384, [0, LEAST, 0]);
        // Too many words, no size, what is before it is none, too long for the area.
        words(&mut pages, 5 * 16384, [0, LEAST, 2046]);
        words(&mut pages, 6 * 16384, [0, LEAST + 4096, 0]);
        words(&mut pages, 7 * 16384, [start + 5 * 16384, LEAST, 0]);
        words(&mut pages, 8 * 16384, [0, 8 * LEAST, 0]);
        let memory = ProcessMemory::new(process::id() as i32);
        let resident = Resident::written(&memory, std::slice::from_ref(&area));
        let mut found = Frames::default();
        let ends: Vec<Option<u64>> = (area.start..area.end)
            .step_by(16384)
            .map(|at| found.take(&memory, &resident, at, area.end))
            .collect();
        assert_eq!((found.stacks, found.chunks, found.bytes), (2, 3, 4 * LEAST));
        assert_eq!(ends[..2], [Some(start + LEAST), Some(start + 3 * LEAST)]);
        assert_eq!(ends.iter().flatten().count(), 3);
        assert_eq!(found.take(&memory, &resident, start + 8, area.end), None);
        assert_eq!(pages.0[3 * 8192 - 1], 1);
    }
}
