//! The table of live samples: chains of entries that never move, in memory that the host can read.

use crate::state::{bucket, config, control, count};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use pyheap_protocol::table::{self, Entry};

/// [`Entry`] as atomics.
#[repr(C)]
struct Words {
    id: AtomicU64,
    address: AtomicU64,
    size: AtomicU64,
    stack: AtomicU64,
    thread: AtomicU64,
    period: AtomicU64,
    next: AtomicU32,
    domain: AtomicU32,
    id_check: AtomicU64,
}
const _: () = assert!(size_of::<Words>() == size_of::<Entry>());

/// More entries than a chain of a healthy table ever has.
const MAX_CHAIN: u32 = 4096;

/// Entry number `index` (from 1); `None` for 0 and beyond the slab.
#[inline]
fn entry(index: u32) -> Option<&'static Words> {
    if index == 0 || u64::from(index) > config!(slab_entries) {
        return None;
    }
    // SAFETY: the slab has `slab_entries` entries of this size, zeroed by the kernel, and is unmapped only when no thread
    // is in this code.
    unsafe { Some(&*(config!(slab) as *const Words).add(index as usize - 1)) }
}

/// False only if `address` is no live sample; true if it is one, or may be one. Takes no lock.
///
/// Sound for the thread that is about to free `address`: its entry was inserted before the program could hand the block
/// to it, and nobody else removes it. A walk that meets an entry which was recycled meanwhile sees that entry's new
/// address (stored before its new `next`); if that belongs to another chain the walk has lost its way and says "maybe".
pub fn may_have(address: u64) -> bool {
    let number = table::bucket(address);
    let mut index = bucket(number).load(Ordering::Acquire);
    let mut steps = 0;
    while let Some(e) = entry(index) {
        let next = e.next.load(Ordering::Acquire);
        let here = e.address.load(Ordering::Acquire);
        if here == address || table::bucket(here) != number || steps == MAX_CHAIN {
            return true;
        }
        index = next;
        steps += 1;
    }
    false
}

/// What a removed entry held.
#[derive(Clone, Copy)]
pub struct Removed {
    /// Sample id.
    pub id: u64,
    /// Size as asked for.
    pub size: u64,
    /// Stack id.
    pub stack: u64,
    /// Domain.
    pub domain: u8,
}

/// Takes `address` out. Under the lock.
pub fn remove(address: u64) -> Option<Removed> {
    let head = bucket(table::bucket(address));
    let mut link = head;
    let mut index = link.load(Ordering::Relaxed);
    while let Some(e) = entry(index) {
        if e.address.load(Ordering::Relaxed) == address {
            let removed = Removed {
                id: e.id.load(Ordering::Relaxed),
                size: e.size.load(Ordering::Relaxed),
                stack: e.stack.load(Ordering::Relaxed),
                domain: e.domain.load(Ordering::Relaxed) as u8,
            };
            link.store(e.next.load(Ordering::Relaxed), Ordering::Release);
            e.id.store(0, Ordering::Release);
            e.stack
                .store(control!(slab_free).load(Ordering::Relaxed), Ordering::Relaxed);
            control!(slab_free).store(u64::from(index), Ordering::Relaxed);
            control!(live).fetch_sub(1, Ordering::Relaxed);
            return Some(removed);
        }
        link = &e.next;
        index = link.load(Ordering::Relaxed);
    }
    None
}

/// Enters a sample. Under the lock; `address` is not in the table. False when there is no room.
pub fn insert(id: u64, address: u64, size: u64, stack: u64, thread: u64, domain: u8) -> bool {
    let free = control!(slab_free).load(Ordering::Relaxed) as u32;
    let index = if free != 0 {
        free
    } else {
        control!(slab_used).load(Ordering::Relaxed) as u32 + 1
    };
    let Some(e) = entry(index) else {
        count!(table_full);
        return false;
    };
    if free != 0 {
        control!(slab_free).store(e.stack.load(Ordering::Relaxed), Ordering::Relaxed);
    } else {
        control!(slab_used).store(u64::from(index), Ordering::Relaxed);
    }
    let head = bucket(table::bucket(address));
    e.id_check.store(id, Ordering::Release);
    e.address.store(address, Ordering::Release);
    e.size.store(size, Ordering::Release);
    e.stack.store(stack, Ordering::Release);
    e.thread.store(thread, Ordering::Release);
    e.period.store(config!(period), Ordering::Release);
    e.domain.store(u32::from(domain), Ordering::Release);
    e.next.store(head.load(Ordering::Relaxed), Ordering::Release);
    e.id.store(id, Ordering::Release);
    head.store(index, Ordering::Release);
    control!(live).fetch_add(1, Ordering::Relaxed);
    true
}
