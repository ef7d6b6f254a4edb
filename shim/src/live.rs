//! The table of live samples: chains of entries that never move, in memory that the host can read.

use crate::state::{add, bucket, bump, cell, config, control};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use pyheap_protocol::table::{self, Entry};
use pyheap_protocol::thin::keeps;

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

/// What an entry holds.
#[derive(Clone, Copy)]
pub struct Sample {
    /// Sample id.
    pub id: u64,
    /// Size as asked for.
    pub size: u64,
    /// Stack id.
    pub stack: u64,
    /// Number of the thread.
    pub thread: u64,
    /// Domain.
    pub domain: u8,
    /// Period under which it was sampled.
    pub period: u64,
}

/// Takes `address` out. Under the lock.
pub fn remove(address: u64) -> Option<Sample> {
    let head = bucket(table::bucket(address));
    let mut link = head;
    let mut index = link.load(Ordering::Relaxed);
    while let Some(e) = entry(index) {
        if e.address.load(Ordering::Relaxed) == address {
            let removed = Sample {
                id: e.id.load(Ordering::Relaxed),
                size: e.size.load(Ordering::Relaxed),
                stack: e.stack.load(Ordering::Relaxed),
                thread: e.thread.load(Ordering::Relaxed),
                domain: e.domain.load(Ordering::Relaxed) as u8,
                period: e.period.load(Ordering::Relaxed),
            };
            link.store(e.next.load(Ordering::Relaxed), Ordering::Release);
            e.id.store(0, Ordering::Release);
            e.stack
                .store(control!(slab_free).load(Ordering::Relaxed), Ordering::Relaxed);
            control!(slab_free).store(u64::from(index), Ordering::Relaxed);
            add(control!(live), u64::MAX);
            let cell = cell(address);
            let count = cell.load(Ordering::Relaxed);
            if count != u8::MAX {
                cell.store(count.wrapping_sub(1), Ordering::Relaxed);
            }
            return Some(removed);
        }
        link = &e.next;
        index = link.load(Ordering::Relaxed);
    }
    None
}

/// Takes entry number `index` out unless it survives a raise of the period to `period`. Under the lock.
pub fn thin(index: u64, period: u64) {
    let Some(e) = entry(index as u32) else { return };
    let id = e.id.load(Ordering::Relaxed);
    let (size, from) = (e.size.load(Ordering::Relaxed), e.period.load(Ordering::Relaxed));
    if id != 0 && !keeps(id, size, from, period) {
        remove(e.address.load(Ordering::Relaxed));
    }
}

/// Enters a sample at `address`, which is not in the table. Under the lock. False when there is no room.
pub fn insert(address: u64, sample: Sample) -> bool {
    let free = control!(slab_free).load(Ordering::Relaxed) as u32;
    let index = if free != 0 {
        free
    } else {
        control!(slab_used).load(Ordering::Relaxed) as u32 + 1
    };
    let Some(e) = entry(index) else {
        bump!(table_full);
        return false;
    };
    if free != 0 {
        control!(slab_free).store(e.stack.load(Ordering::Relaxed), Ordering::Relaxed);
    } else {
        control!(slab_used).store(u64::from(index), Ordering::Relaxed);
    }
    let head = bucket(table::bucket(address));
    e.id_check.store(sample.id, Ordering::Release);
    e.address.store(address, Ordering::Release);
    e.size.store(sample.size, Ordering::Release);
    e.stack.store(sample.stack, Ordering::Release);
    e.thread.store(sample.thread, Ordering::Release);
    e.period.store(sample.period, Ordering::Release);
    e.domain.store(u32::from(sample.domain), Ordering::Release);
    e.next.store(head.load(Ordering::Relaxed), Ordering::Release);
    e.id.store(sample.id, Ordering::Release);
    head.store(index, Ordering::Release);
    let cell = cell(address);
    cell.store(cell.load(Ordering::Relaxed).saturating_add(1), Ordering::Release);
    add(control!(live), 1);
    true
}
