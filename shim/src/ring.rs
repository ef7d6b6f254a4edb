//! The producer's side of the ring. Everything here runs under the lock.

use crate::state::{bump, config, control};
use core::sync::atomic::{AtomicU64, Ordering, fence};
use pyheap_protocol::control::MOST_STALLED;
use pyheap_protocol::record::{Head, kind};
use pyheap_protocol::ring::{fits, reserve};

/// A place for one record, not yet visible to the host.
pub struct Reserved {
    at: *mut u8,
    next_head: u64,
}

impl Reserved {
    /// Where the record goes.
    pub fn place(&self) -> *mut u8 {
        self.at
    }

    /// Makes the record visible.
    pub fn commit(self) {
        control!(ring_head).store(self.next_head, Ordering::Release);
    }
}

/// Finds room for a record of `len` bytes (a multiple of 8); `None` when the ring is full. A record's end beyond the ring
/// is avoided by a filler, which becomes visible together with the record.
pub fn begin(len: u64) -> Option<Reserved> {
    let size = config!(ring_len);
    let head = control!(ring_head).load(Ordering::Relaxed);
    let (padding, total) = reserve(head, len, size);
    if !fits(head, control!(ring_tail_seen).load(Ordering::Relaxed), total, size) && !fits(head, tail(), total, size) {
        stall();
        return None;
    }
    control!(stalled).store(0, Ordering::Relaxed);
    let base = config!(ring) as *mut u8;
    // SAFETY: `base` is the ring that the host mapped for us, and `fits` says that `total` bytes from `head` on are free.
    let at = unsafe { place(base, size, head, padding) };
    Some(Reserved {
        at,
        next_head: head.wrapping_add(total),
    })
}

/// Where a record goes in the ring of `size` bytes at `base`: behind the filler that this writes up to the ring's end, if there is one.
///
/// # Safety
/// The ring is memory of ours, and what `reserve` has answered `padding` with is free by `fits`.
#[inline(always)]
pub unsafe fn place(base: *mut u8, size: u64, head: u64, padding: u64) -> *mut u8 {
    let offset = (head & (size - 1)) as usize;
    if padding == 0 {
        // SAFETY: below `size`.
        return unsafe { base.add(offset) };
    }
    // SAFETY: `offset..offset + padding` is the end of the ring, and 8 bytes at least, since all records are multiples of 8.
    unsafe {
        base.add(offset).cast::<Head>().write(Head {
            len: padding as u32,
            kind: kind::PAD,
            flags: 0,
        })
    };
    base
}

/// Counts records that nobody makes room for. The host is gone, or has been stopped for very long: from some number on the
/// shim is of no use to anybody, and becomes a pass-through. A host that comes back opens the gate again.
fn stall() {
    let stalled = control!(stalled).load(Ordering::Relaxed) + 1;
    control!(stalled).store(stalled, Ordering::Relaxed);
    if stalled > MOST_STALLED {
        control!(stalled).store(0, Ordering::Relaxed);
        bump!(suspensions);
        control!(gate).store(0, Ordering::Release);
    }
}

/// The host's position, if it reads the same twice; else the last one believed.
fn tail() -> u64 {
    if let Some(tail) = doubled(control!(ring_tail.a), control!(ring_tail.b)) {
        control!(ring_tail_seen).store(tail, Ordering::Relaxed);
    }
    control!(ring_tail_seen).load(Ordering::Relaxed)
}

/// A word that the host writes twice (see `Doubled`); `None` while it does.
pub fn doubled(a: &AtomicU64, b: &AtomicU64) -> Option<u64> {
    let second = b.load(Ordering::Acquire);
    fence(Ordering::Acquire);
    (a.load(Ordering::Acquire) == second).then_some(second)
}

/// Writes one record of fixed size; false when the ring is full.
pub fn push<T>(record: T) -> bool {
    let Some(reserved) = begin(size_of::<T>() as u64) else {
        return false;
    };
    // SAFETY: `begin` gave `size_of::<T>()` bytes; records are `repr(C)` of words, and the ring's offsets are multiples
    // of 8.
    unsafe { reserved.place().cast::<T>().write(record) };
    reserved.commit();
    true
}
