//! Builds without the GIL have no lists of objects: the collector asks the allocator, mimalloc, for all blocks of its heaps. So
//! do we, from outside.
//!
//! Segments are 32 MiB and begin at a multiple of that, each with a table of its slices of 64 KiB. All of them are looked at,
//! whoever owns them, and so are those of threads that have ended. Nothing says where segments are, so each such address in
//! writable memory is tried: it is one when its table adds up. A block of a page is in use when it is on none of the page's three
//! lists of free ones.
//!
//! Source: `mi_segment_t`, `mi_page_t`,
//! <https://github.com/python/cpython/blob/v3.13.0/Include/internal/mimalloc/mimalloc/types.h>,
//! <https://github.com/python/cpython/blob/v3.14.0/Include/internal/mimalloc/mimalloc/types.h>; the heaps' numbers are in
//! `pycore_mimalloc.h` there.

use super::heap::Heap;
use super::marks::Met;
use pyheap_injector::RemoteMemory;

const SEGMENT: u64 = 32 << 20;
const SLICE: u64 = 64 << 10;
/// Slices of a segment, and the one that huge ones have more.
const MAX_SLICES: u64 = SEGMENT / SLICE + 1;
/// The heap of objects that the collector looks after, and that of those with attributes before them.
const HEAP_OBJECTS: u8 = 2;
const HEAP_WITH_ATTRIBUTES: u8 = 3;
/// What those have before them.
const BEFORE: u64 = 16;
/// `PyObject.ob_type`: `debug_offset` is where that is in a block.
const HEADER: u64 = 24;
/// Slices that one page may have: 1 TiB.
const MAX_PAGE_SLICES: u64 = 1 << 24;

/// Offsets of one mimalloc.
#[derive(Debug, Clone, Copy)]
struct Version {
    info_slices: u64,
    slice_entries: u64,
    slices: u64,
    page: u64,
    /// `heap_tag`; in 2.1.2 a nibble of flags, from bit 3 on.
    tag: u64,
    tag_shift: u32,
    local_free: u64,
    thread_free: u64,
    used: u64,
    /// `used` has four bytes, or two.
    used_mask: u32,
    debug_offset: u64,
    /// `xblock_size`, four bytes; or `block_size`, eight.
    block_size: u64,
    wide_block_size: bool,
    /// `page_start`; without it the start is worked out.
    page_start: Option<u64>,
}

/// 2.1.2: 3.13, 3.14 up to 3.14.9, 3.15 up to 3.15.1.
const V2_1: Version = Version {
    info_slices: 232,
    slice_entries: 248,
    slices: 264,
    page: 96,
    tag: 8,
    tag_shift: 3,
    local_free: 32,
    thread_free: 40,
    used: 24,
    used_mask: u32::MAX,
    debug_offset: 9,
    block_size: 28,
    wide_block_size: false,
    page_start: None,
};

/// 2.5.2.
const V2_5: Version = Version {
    info_slices: 256,
    slice_entries: 272,
    slices: 288,
    page: 112,
    tag: 35,
    tag_shift: 0,
    local_free: 24,
    thread_free: 56,
    used: 32,
    used_mask: 0xffff,
    debug_offset: 37,
    block_size: 40,
    wide_block_size: true,
    page_start: Some(48),
};

/// `slice_count`, `slice_offset`, `capacity` and `free` of a page are at the same place in both.
const SLICE_OFFSET: u64 = 4;
const CAPACITY: u64 = 10;
const FREE: u64 = 16;

/// A page with objects.
struct Page {
    start: u64,
    block: u64,
    capacity: u64,
    lists: [u64; 3],
    used: u64,
    /// From a block to its object.
    to_object: u64,
    /// Its objects are the collector's.
    is_collected: bool,
}

/// Marks all objects that the collector knows; `None` where there is no segment of mimalloc.
pub fn mark<M: RemoteMemory>(heap: &mut Heap<'_, M>) -> Option<u64> {
    let mut found = 0;
    for page in all_pages(heap)?.into_iter().filter(|page| page.is_collected) {
        found += objects(heap, &page);
    }
    Some(found)
}

/// Visits the blocks in use of all heaps.
pub fn each_block<'a, M: RemoteMemory>(heap: &mut Heap<'a, M>, visit: &mut dyn FnMut(&mut Heap<'a, M>, u64, u64)) {
    for page in all_pages(heap).unwrap_or_default() {
        for number in in_use(heap, &page) {
            visit(heap, page.start + number * page.block, page.block);
        }
    }
}

/// The pages of all heaps; `None` where there is no segment of mimalloc.
fn all_pages<M: RemoteMemory>(heap: &mut Heap<'_, M>) -> Option<Vec<Page>> {
    let mut starts = Vec::new();
    for range in heap.marks.memory() {
        let first = range.start.checked_next_multiple_of(SEGMENT);
        // The kernel's own page at the end of the address space is in core files.
        let starts_here = first
            .into_iter()
            .flat_map(|first| (first..range.end).step_by(SEGMENT as usize));
        starts.extend(starts_here);
    }
    // The one whose tables add up more often; a table of the other one does not.
    let adds_up = |heap: &mut Heap<'_, M>, version: &Version| -> usize {
        let sound = starts.iter().filter(|start| pages(heap, version, **start).is_some());
        sound.count()
    };
    let (older, newer) = (adds_up(heap, &V2_1), adds_up(heap, &V2_5));
    let version = if older >= newer { V2_1 } else { V2_5 };
    if older.max(newer) == 0 {
        return None;
    }
    let mut found = Vec::new();
    for start in starts {
        for page in pages(heap, &version, start).unwrap_or_default() {
            found.extend(describe(heap, &version, start, page));
        }
    }
    Some(found)
}

/// The addresses of the pages of a segment; `None` where there is none.
fn pages<M: RemoteMemory>(heap: &mut Heap<'_, M>, version: &Version, segment: u64) -> Option<Vec<u64>> {
    let entries = heap.blocks.word(segment + version.slice_entries)?;
    let info = heap.blocks.word(segment + version.info_slices)?;
    if entries == 0 || entries > MAX_SLICES || info == 0 || info > entries {
        return None;
    }
    let mut pages = Vec::new();
    let mut slice = 0;
    while slice < entries {
        let page = segment + version.slices + slice * version.page;
        let count = u64::from(heap.blocks.number(page)?);
        let offset = heap.blocks.number(page + SLICE_OFFSET)?;
        if count == 0 || offset != 0 || count > MAX_PAGE_SLICES || slice == 0 && count != info {
            return None;
        }
        // Only huge segments have a page that is longer than the table.
        if slice + count > entries && slice != info {
            return None;
        }
        if slice > 0 {
            pages.push(page);
        }
        slice += count;
    }
    Some(pages)
}

/// What is in a page; `None` where that is nothing.
fn describe<M: RemoteMemory>(heap: &mut Heap<'_, M>, version: &Version, segment: u64, page: u64) -> Option<Page> {
    let blocks = &mut heap.blocks;
    let tag = blocks.byte(page + version.tag)? >> version.tag_shift & 15;
    let used = u64::from(blocks.number(page + version.used)? & version.used_mask);
    let before = match tag {
        ..=HEAP_OBJECTS => 0,
        HEAP_WITH_ATTRIBUTES => BEFORE,
        _ => return None,
    };
    let mut capacity = [0; 2];
    if used == 0 || !blocks.copy(page + CAPACITY, &mut capacity) {
        return None;
    }
    let slices = u64::from(blocks.number(page)?) * SLICE;
    let block = match version.wide_block_size {
        true => blocks.word(page + version.block_size)?,
        false => u64::from(blocks.number(page + version.block_size)?),
    };
    // Of a huge block 2.1.2 only says that it is one.
    let block = if block > slices && capacity == [1, 0] {
        slices
    } else {
        block
    };
    let start = match version.page_start {
        Some(field) => blocks.word(page + field)?,
        None => {
            let slice = (page - segment - version.slices) / version.page;
            let ahead = match block {
                8..=64 => 3 * block,
                65..=512 => block,
                _ => 0,
            };
            segment + slice * SLICE + ahead
        }
    };
    let capacity = u64::from(u16::from_le_bytes(capacity));
    let debug = u64::from(blocks.byte(page + version.debug_offset)?);
    let lists = [
        blocks.word(page + FREE)?,
        blocks.word(page + version.local_free)?,
        // The lowest two bits are flags.
        blocks.word(page + version.thread_free)? & !3,
    ];
    let fits = block >= 16 && block.checked_mul(capacity)? <= slices.max(block) && block.is_multiple_of(8);
    fits.then_some(Page {
        start,
        block,
        capacity,
        lists,
        used,
        is_collected: tag >= HEAP_OBJECTS,
        // What the debugging allocator puts before a block is in there, too.
        to_object: debug
            .checked_sub(HEADER)
            .filter(|at| *at <= 2 * BEFORE)
            .unwrap_or(before),
    })
}

/// The numbers of the blocks of a page that are in use.
fn in_use<M: RemoteMemory>(heap: &mut Heap<'_, M>, page: &Page) -> Vec<u64> {
    let mut free = vec![false; usize::try_from(page.capacity).unwrap_or(0)];
    for list in page.lists {
        let mut block = list;
        for _ in 0..page.capacity {
            let place = block.checked_sub(page.start).filter(|at| at.is_multiple_of(page.block));
            let place = place.and_then(|at| free.get_mut(usize::try_from(at / page.block).ok()?));
            let Some(place) = place else {
                // It leads out of the page: changed while it was read.
                heap.doubts.broken_lists += u64::from(block != 0);
                break;
            };
            *place = true;
            block = heap.blocks.word(block).unwrap_or(0);
        }
    }
    let in_use = free.iter().enumerate().filter(|(_, free)| !**free);
    let in_use: Vec<u64> = in_use.map(|(number, _)| number as u64).collect();
    // Blocks that other threads have given back count as used until their owner takes them.
    heap.doubts.broken_lists += u64::from(in_use.len() as u64 > page.used);
    in_use
}

/// Marks the objects of a page.
fn objects<M: RemoteMemory>(heap: &mut Heap<'_, M>, page: &Page) -> u64 {
    let mut found = 0;
    for number in in_use(heap, page) {
        let object = page.start + number * page.block + page.to_object;
        if heap.is_known_to_collector(object) && heap.marks.mark(object, Met::Listed) {
            found += 1;
        }
    }
    found
}
