//! mimalloc, which a Python without the GIL allocates with: by the pages that its threads have.
//!
//! Each thread state holds its heaps (`_PyThreadStateImpl.mimalloc.heaps`, five `mi_heap_t`), each with queues of pages by block
//! size; a page knows how many of its blocks are in use. A page's head lies in the segment of 32 MiB that its blocks are in.
//! The heaps are found by their thread's number and by their distance, which also tells the version: 2.1.2 or 2.5.2.
//!
//! What it refuses to do: count what threads that have ended left behind ("abandoned" segments) until another thread takes
//! it; that is nobody's.

use super::resident::Resident;
use crate::attach::Interpreter;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

/// `MI_SEGMENT_SIZE`.
const SEGMENT: u64 = 32 << 20;
/// `MI_SEGMENT_SLICE_SIZE`: a segment's head takes one.
const SLICE: u64 = 64 << 10;
/// `_Py_MIMALLOC_HEAP_COUNT`.
const HEAPS: u64 = 5;
/// `MI_BIN_FULL + 1` queues of 24 bytes.
const QUEUES: usize = 75;
/// Interpreters and thread states that are followed.
const MAX_STATES: usize = 1 << 16;
/// Pages that are followed.
const MAX_PAGES: usize = 1 << 22;
/// Where in a thread state the heaps begin.
const PLACES: Range<u64> = 256..2048;

/// Offsets of a version, in bytes.
#[derive(Debug, Clone, Copy)]
struct Version {
    /// `sizeof(mi_heap_t)`.
    heap: u64,
    /// `mi_heap_t.thread_id`.
    thread_id: u64,
    /// `mi_heap_t.pages`.
    pages: u64,
    /// `mi_page_t.used`, and whether it has 32 bits rather than 16.
    used: (usize, bool),
    /// `mi_page_t.xblock_size` (32 bits) or `block_size` (64).
    block_size: (usize, bool),
    /// `mi_page_t.next`.
    next: usize,
}

/// `mimalloc/types.h` as CPython has it: 2.1.2 up to 3.13, 3.14.9 and 3.15.1, then 2.5.2.
const VERSIONS: [Version; 2] = [
    Version {
        heap: 3064,
        thread_id: 2848,
        pages: 1040,
        used: (24, true),
        block_size: (28, false),
        next: 56,
    },
    Version {
        heap: 3088,
        thread_id: 16,
        pages: 1288,
        used: (32, false),
        block_size: (40, true),
        next: 72,
    },
];
/// `sizeof(mi_page_t)`, the longer one.
const PAGE_HEAD: usize = 112;

/// All of it, in resident bytes.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Mimalloc {
    /// Blocks in use.
    pub used_bytes: u64,
    /// In its segments, but in no block in use.
    pub free_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Where the segments are.
    #[serde(skip)]
    pub ranges: Vec<Range<u64>>,
}

/// Looks for mimalloc's segments in `areas`; `None` if no thread's heaps are found.
#[must_use]
pub fn find<M: RemoteMemory>(
    memory: &M,
    resident: &Resident,
    interpreter: &Interpreter,
    areas: &[Range<u64>],
) -> Option<Mimalloc> {
    let mut pages = Pages {
        memory,
        segments: BTreeMap::new(),
        seen: HashSet::new(),
        blocks: 0,
    };
    let mut known = None;
    for state in thread_states(memory, interpreter) {
        let number = memory
            .read_u64(RemoteAddr(state + interpreter.layout.thread.thread_id))
            .unwrap_or(0);
        known = known.or_else(|| heaps(memory, state, number));
        let Some((place, version)) = known else { continue };
        for heap in 0..HEAPS {
            pages.of_heap(state + place + heap * version.heap, number, version);
        }
    }
    known?;
    let mut result = Mimalloc {
        blocks: pages.blocks,
        ..Mimalloc::default()
    };
    let mut end = 0;
    for (start, (used, length)) in pages.segments {
        let Some(area) = areas.iter().find(|area| area.contains(&start)) else {
            continue;
        };
        let range = start.max(end)..start.saturating_add(length).min(area.end);
        if range.is_empty() {
            continue;
        }
        let here = resident.bytes(&range);
        result.used_bytes += used.min(here);
        result.free_bytes += here.saturating_sub(used);
        result.segments += 1;
        end = range.end;
        result.ranges.push(range);
    }
    Some(result)
}

/// The thread states of all interpreters.
fn thread_states(memory: &impl RemoteMemory, interpreter: &Interpreter) -> Vec<u64> {
    let layout = &interpreter.layout;
    let word = |at: Option<u64>| at.and_then(|at| memory.read_u64(RemoteAddr(at)).ok()).unwrap_or(0);
    let mut states = Vec::new();
    let mut of = word(interpreter.runtime.0.checked_add(layout.runtime.interpreters_head));
    for _ in 0..MAX_STATES {
        if of == 0 {
            break;
        }
        let mut state = word(of.checked_add(layout.interpreter.threads_head));
        while state != 0 && states.len() < MAX_STATES {
            states.push(state);
            state = word(state.checked_add(layout.thread.next));
        }
        of = word(of.checked_add(layout.interpreter.next));
    }
    states
}

/// Where the heaps of the thread with `number` (`pthread_self`) are in its `state`: two in a row with its number and the
/// same `tld`.
fn heaps(memory: &impl RemoteMemory, state: u64, number: u64) -> Option<(u64, Version)> {
    let longest = PLACES.end + 2 * VERSIONS.iter().map(|version| version.heap).max().unwrap_or(0);
    let bytes = memory.read_vec(RemoteAddr(state), longest as usize).ok()?;
    let word = |at: u64| bytes.get(at as usize..)?.first_chunk().copied().map(u64::from_le_bytes);
    let is_heap = |at: u64, version: &Version| {
        word(at + version.thread_id) == Some(number) && word(at).is_some_and(|tld| tld != 0)
    };
    PLACES.step_by(8).find_map(|first| {
        let fits = |version: &&Version| {
            let second = first + version.heap;
            is_heap(first, version) && is_heap(second, version) && word(first) == word(second)
        };
        VERSIONS.iter().find(fits).map(|version| (first, *version))
    })
}

/// Pages that were met.
struct Pages<'a, M> {
    memory: &'a M,
    /// By their first address: bytes in use, and length.
    segments: BTreeMap<u64, (u64, u64)>,
    seen: HashSet<u64>,
    blocks: u64,
}

impl<M: RemoteMemory> Pages<'_, M> {
    fn of_heap(&mut self, heap: u64, number: u64, version: Version) {
        let is_its = self.memory.read_u64(RemoteAddr(heap.wrapping_add(version.thread_id)));
        if is_its.ok() != Some(number) {
            return;
        }
        let queues = self
            .memory
            .read_vec(RemoteAddr(heap.wrapping_add(version.pages)), QUEUES * 24);
        for queue in queues.unwrap_or_default().chunks_exact(24) {
            let mut page = queue.first_chunk().copied().map_or(0, u64::from_le_bytes);
            while page != 0 && self.seen.len() < MAX_PAGES && self.seen.insert(page) {
                let Ok(head) = self.memory.read_array::<PAGE_HEAD>(RemoteAddr(page)) else {
                    break;
                };
                page = self.add(page, &head, version).unwrap_or(0);
            }
        }
    }

    /// Counts a page; the next one.
    fn add(&mut self, page: u64, head: &[u8; PAGE_HEAD], version: Version) -> Option<u64> {
        let number = |at: usize, long: bool| -> Option<u64> {
            let bytes = head.get(at..)?;
            if long {
                bytes.first_chunk().copied().map(u64::from_le_bytes)
            } else {
                bytes
                    .first_chunk()
                    .copied()
                    .map(|half| u64::from(u32::from_le_bytes(half)))
            }
        };
        let capacity = u64::from(u16::from_le_bytes(*head.get(10..)?.first_chunk()?));
        let used = number(version.used.0, false)? & if version.used.1 { u64::MAX } else { 0xffff };
        let size = number(version.block_size.0, version.block_size.1)?;
        if used > capacity || size == 0 || size > 1 << 40 {
            return None;
        }
        let bytes = used.saturating_mul(size);
        let start = page & !(SEGMENT - 1);
        // A block that is larger than a segment has one of its own, which is as large.
        let length = size.saturating_add(SLICE).max(SEGMENT);
        let segment = self.segments.entry(start).or_insert((0, SEGMENT));
        segment.0 = segment.0.saturating_add(bytes);
        segment.1 = segment.1.max(length);
        self.blocks += used;
        number(version.next, true)
    }
}
