//! Python's allocator of small objects, by the headers of its pools.
//!
//! pymalloc cuts arenas into pools of one size class each. A pool begins with a header of 48 bytes (`struct pool_header` in
//! `Objects/obmalloc.c`, `Include/internal/pycore_obmalloc.h`), the same from 3.7 to 3.15, of which nearly every bit is
//! determined by the rest; so pools are found by looking for headers, without a symbol of the interpreter, in all of its
//! interpreters, in every build. A header that does not agree with itself is none.
//!
//! A free pool keeps its header, with a count of 0. The first pool of an arena is the first that was used; with it the arena begins.

use super::resident::Resident;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::collections::HashMap;
use std::ops::Range;

/// Bytes that are read at once.
const WINDOW: u64 = 1 << 20;
/// `sizeof(struct pool_header)`, rounded up: `POOL_OVERHEAD`.
pub(crate) const HEADER: u64 = 48;
/// No more arenas are plausible: 16 TiB of them.
const MAX_ARENA_INDEX: u32 = 1 << 24;
/// The largest request, `SMALL_REQUEST_THRESHOLD`.
const MAX_SIZE: u64 = 512;

/// Sizes in bytes, of a version.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Bytes of a pool, which begins at a multiple of that.
    pub pool: u64,
    arena: u64,
    /// Distances of size classes.
    steps: &'static [u64],
}

impl Shape {
    /// Of Python 3.`minor`.
    #[must_use]
    pub const fn of(minor: u8) -> Self {
        match minor {
            // `POOL_BITS` 12, `ARENA_BITS` 18; the first releases of 3.7 have an alignment of 8, all others of 16.
            0..=9 => Self {
                pool: 4 << 10,
                arena: 256 << 10,
                steps: if minor <= 7 { &[16, 8] } else { &[16] },
            },
            // With the radix tree: 14 and 20.
            _ => Self {
                pool: 16 << 10,
                arena: 1 << 20,
                steps: &[16],
            },
        }
    }
}

/// A pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pool {
    /// Where it begins.
    pub at: u64,
    arena: u32,
    /// Bytes of a block.
    pub size: u64,
    /// Blocks in use.
    pub used: u64,
    /// The first of those that were given back, or 0; each has the next one's address in its first word.
    pub free: u64,
    /// Blocks that were ever in use: the others come after these.
    pub carved: u64,
}

/// What a size class takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Class {
    /// Bytes of a block.
    pub size: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Bytes in them.
    pub used_bytes: u64,
    /// Resident bytes of its pools that are in no block in use.
    pub free_bytes: u64,
    /// Pools with a block in use.
    pub pools: u64,
    /// Arenas less than half in use that have such a pool: each of them could go but for the pools in it.
    pub sparse_arenas: u64,
    /// Resident bytes of such arenas that no block is in, divided among the classes in the measure of their pools there.
    pub pinned_bytes: u64,
}

/// All of it, in resident bytes.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Pymalloc {
    /// Arenas.
    pub arenas: u64,
    /// Arenas less than half in use.
    pub sparse_arenas: u64,
    /// In arenas, all in all.
    pub resident_bytes: u64,
    /// Blocks in use.
    pub used_bytes: u64,
    /// In pools with blocks in use, but in none of these: free blocks, headers, ends.
    pub free_in_pools: u64,
    /// In arenas, but in no pool that is in use.
    pub free_pools: u64,
    /// By size class, smallest first; those in use.
    pub classes: Vec<Class>,
    /// Where the arenas are.
    #[serde(skip)]
    pub ranges: Vec<Range<u64>>,
}

/// Reads one header.
pub(crate) fn pool(shape: Shape, at: u64, bytes: &[u8]) -> Option<Pool> {
    let word = |from: usize| Some(u64::from_le_bytes(*bytes.get(from..)?.first_chunk()?));
    let half = |from: usize| Some(u32::from_le_bytes(*bytes.get(from..)?.first_chunk()?));
    let (used, free, next, previous) = (u64::from(half(0)?), word(8)?, word(16)?, word(24)?);
    let (arena, class) = (half(32)?, u64::from(half(36)?));
    let (next_offset, max_offset) = (u64::from(half(40)?), u64::from(half(44)?));
    let size = shape.pool.checked_sub(max_offset)?;
    let is_class = shape
        .steps
        .iter()
        .any(|step| Some(size) == (class + 1).checked_mul(*step));
    if size == 0 || size > MAX_SIZE || !is_class {
        return None;
    }
    let most = (shape.pool - HEADER) / size;
    let on_block = |offset: u64| offset >= HEADER && (offset - HEADER).is_multiple_of(size);
    let free_fits = free == 0
        || free
            .checked_sub(at)
            .is_some_and(|offset| offset < shape.pool && on_block(offset));
    // The first block is handed out when the pool gets its class.
    let carved = next_offset.checked_sub(HEADER)? / size;
    let sane = arena < MAX_ARENA_INDEX
        && on_block(next_offset)
        && carved >= 1
        && carved <= most + 1
        && used <= most
        && used <= carved
        && free_fits
        && (used < most || free == 0)
        && next % 8 == 0
        && previous % 8 == 0;
    sane.then_some(Pool {
        at,
        arena,
        size,
        used,
        free,
        carved: carved.min(most),
    })
}

/// Finds pools in `areas`, which are sorted and may be read.
fn pools(memory: &impl RemoteMemory, resident: &Resident, areas: &[Range<u64>], shape: Shape) -> Vec<Pool> {
    let mut found = Vec::new();
    let mut bytes = vec![0; WINDOW as usize];
    for area in areas {
        for part in resident.parts(area.clone()) {
            let mut at = part.start;
            while at < part.end {
                // Windows begin at pools.
                let end = (at / WINDOW * WINDOW + WINDOW).min(part.end);
                let Some(window) = bytes.get_mut(..(end - at) as usize) else {
                    break;
                };
                if memory.read_into(RemoteAddr(at), window).is_ok() {
                    let mut place = at.next_multiple_of(shape.pool);
                    while place + HEADER <= end {
                        let header = window.get((place - at) as usize..).unwrap_or_default();
                        found.extend(pool(shape, place, header));
                        place += shape.pool;
                    }
                }
                at = end;
            }
        }
    }
    found
}

/// Looks for pymalloc in `areas`: sorted ranges of private memory of a Python 3.`minor`.
#[must_use]
pub fn find(memory: &impl RemoteMemory, resident: &Resident, areas: &[Range<u64>], minor: u8) -> Pymalloc {
    let shape = Shape::of(minor);
    let pools = pools(memory, resident, areas, shape);
    let mut result = Pymalloc::default();
    // In the order of addresses: an arena's pools follow each other, but numbers are used again, by other interpreters too.
    let mut arenas: Vec<(u64, Vec<Pool>)> = Vec::new();
    let mut open: HashMap<u32, usize> = HashMap::new();
    for pool in pools {
        let known = open.get(&pool.arena).and_then(|&index| arenas.get_mut(index));
        match known.filter(|(start, _)| pool.at - *start < shape.arena) {
            Some((_, list)) => list.push(pool),
            None => {
                open.insert(pool.arena, arenas.len());
                arenas.push((pool.at, vec![pool]));
            }
        }
    }
    let mut classes: HashMap<u64, Class> = HashMap::new();
    for number in 0..arenas.len() {
        let Some((start, list)) = arenas.get(number) else {
            continue;
        };
        let next = arenas.get(number + 1).map_or(u64::MAX, |(next, _)| *next);
        let in_area = areas
            .iter()
            .find(|area| area.contains(start))
            .map_or(*start, |area| area.end);
        // It may begin up to a pool before its first pool, and end as much earlier.
        let range = *start..(start + shape.arena).min(next).min(in_area);
        add_arena(&mut result, &mut classes, resident, shape, range, list);
    }
    result.classes = classes.into_values().filter(|class| class.blocks > 0).collect();
    result.classes.sort_by_key(|class| class.size);
    result
}

fn add_arena(
    result: &mut Pymalloc,
    classes: &mut HashMap<u64, Class>,
    resident: &Resident,
    shape: Shape,
    range: Range<u64>,
    pools: &[Pool],
) {
    let here = resident.bytes(&range);
    let (mut used, mut in_pools, mut own_pools) = (0, 0, HashMap::<u64, u64>::new());
    for pool in pools.iter().filter(|pool| pool.used > 0) {
        let whole = resident.bytes(&(pool.at..(pool.at + shape.pool).min(range.end)));
        let bytes = (pool.used * pool.size).min(whole);
        used += bytes;
        in_pools += whole;
        *own_pools.entry(pool.size).or_default() += 1;
        let class = classes.entry(pool.size).or_default();
        class.size = pool.size;
        class.blocks += pool.used;
        class.used_bytes += bytes;
        class.free_bytes += whole - bytes;
        class.pools += 1;
    }
    result.arenas += 1;
    result.resident_bytes += here;
    result.used_bytes += used;
    result.free_in_pools += in_pools - used;
    result.free_pools += here.saturating_sub(in_pools);
    result.ranges.push(range);
    let all: u64 = own_pools.values().sum();
    if used * 2 < here && all > 0 {
        result.sparse_arenas += 1;
        for (size, pools) in own_pools {
            let class = classes.entry(size).or_default();
            class.sparse_arenas += 1;
            class.pinned_bytes += (here - used) * pools / all;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(at: u64, used: u32, class: u32, offset: u32, free: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(u64::from(used).to_le_bytes());
        bytes.extend(free.to_le_bytes());
        bytes.extend((at + 8).to_le_bytes());
        bytes.extend((at + 16).to_le_bytes());
        for half in [7, class, offset, 16384 - (class + 1) * 16] {
            bytes.extend(half.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_header_must_agree_with_itself() {
        let (at, shape) = (0x10_0000, Shape::of(12));
        let good = header(at, 3, 2, 48 + 5 * 48, at + 48 + 48);
        let found = pool(shape, at, &good).unwrap();
        assert_eq!((found.size, found.used, found.arena), (48, 3, 7));
        assert!(
            pool(shape, at, &header(at, 3, 2, 48 + 5 * 48 + 16, at + 96)).is_none(),
            "between blocks"
        );
        assert!(
            pool(shape, at, &header(at, 6, 2, 48 + 5 * 48, at + 96)).is_none(),
            "more than were carved"
        );
        assert!(
            pool(shape, at, &header(at, 3, 2, 48 + 5 * 48, at + 20000)).is_none(),
            "in another pool"
        );
        assert!(
            pool(shape, at, &header(at, 3, 40, 48 + 5 * 48, 0)).is_none(),
            "no such class"
        );
        assert!(pool(shape, at, &[0; 48]).is_none());
        assert!(pool(shape, at, &good[..40]).is_none());
        // A version with smaller pools reads another size from it.
        assert!(pool(Shape::of(9), at, &good).is_none());
    }
}
