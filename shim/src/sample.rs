//! The lock, and what is done under it: entering a sample, taking one out.

use crate::state::{config, control, count};
use crate::{frames, live, ring};
use core::sync::atomic::Ordering;
use pyheap_protocol::control::Control;
use pyheap_protocol::control::DEFERRED;
use pyheap_protocol::record::{Alloc, Free, Head, kind};

/// Rounds of waiting for the lock: some tens of microseconds. Its holder needs about one, unless it lost its processor.
const MAX_SPINS: u32 = 2_000;

/// Outcome of asking for the lock.
enum Ask {
    Got,
    /// This thread holds it: we are in a signal handler that interrupted our own slow path.
    Nested,
    /// Its holder does not run.
    Busy,
}

fn ask(thread: u64) -> Ask {
    let lock = control!(lock);
    let mut spins = 0;
    loop {
        match lock.compare_exchange_weak(0, thread, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => break,
            Err(owner) if owner == thread => return Ask::Nested,
            Err(_) if spins == MAX_SPINS => return Ask::Busy,
            Err(_) => spins += 1,
        }
        core::hint::spin_loop();
    }
    if control!(deferred_used).load(Ordering::Acquire) != 0 {
        free_deferred();
    }
    Ask::Got
}

fn unlock() {
    control!(lock).store(0, Ordering::Release);
}

/// True while the interpreter shuts down. It then frees nearly everything, which says nothing about the program: the set of
/// live samples stays as it was when that began.
fn is_finalizing() -> bool {
    let address = config!(finalizing);
    // SAFETY: the host gives the address of a pointer within `_PyRuntime`, which lives as long as the process.
    address != 0 && unsafe { (address as *const u64).read_volatile() } != 0
}

/// Enters a freshly allocated block of `size` bytes (as asked for) as a sample.
#[inline(never)]
pub fn enter(address: u64, size: u64, domain: u8, thread: u64) {
    if is_finalizing() {
        return;
    }
    match ask(thread) {
        Ask::Got => {}
        Ask::Nested => {
            count!(nested);
            count!(lost_bytes, size);
            return;
        }
        Ask::Busy => {
            count!(contended);
            count!(lost_bytes, size);
            return;
        }
    }
    if take_out(address).is_some() {
        count!(missed_frees);
    }
    let stack = frames::stack_id(thread);
    put_in(address, size, stack, domain, thread);
    unlock();
}

/// The block is about to be freed or moved: takes its sample out and says what it was.
#[inline(never)]
pub fn leave(address: u64, thread: u64) -> Option<live::Removed> {
    if is_finalizing() {
        return None;
    }
    match ask(thread) {
        Ask::Got => {
            let removed = take_out(address);
            unlock();
            removed
        }
        Ask::Nested | Ask::Busy => {
            defer(address);
            None
        }
    }
}

/// A realloc failed: the old block is still there.
#[inline(never)]
pub fn enter_again(address: u64, was: live::Removed, thread: u64) {
    if let Ask::Got = ask(thread) {
        put_in(address, was.size, was.stack, was.domain, thread);
        unlock();
    } else {
        count!(contended);
        count!(lost_bytes, was.size);
    }
}

fn put_in(address: u64, size: u64, stack: u64, domain: u8, thread: u64) {
    let id = control!(last_id).load(Ordering::Relaxed) + 1;
    if !live::insert(id, address, size, stack, thread, domain) {
        count!(lost_bytes, size);
        return;
    }
    // Only now: who reads this id finds its entry in the table, or it has been freed.
    control!(last_id).store(id, Ordering::Release);
    count!(samples);
    let head = Head {
        len: size_of::<Alloc>() as u32,
        kind: kind::ALLOC,
        flags: u16::from(domain),
    };
    if !ring::push(Alloc {
        head,
        id,
        address,
        size,
        thread,
        stack,
    }) {
        count!(lost_allocs);
    }
}

fn take_out(address: u64) -> Option<live::Removed> {
    let removed = live::remove(address)?;
    count!(frees);
    let head = Head {
        len: size_of::<Free>() as u32,
        kind: kind::FREE,
        flags: 0,
    };
    if !ring::push(Free { head, id: removed.id }) {
        count!(lost_frees);
    }
    Some(removed)
}

/// Leaves a free to whoever takes the lock next. The caller's block goes back to the allocator only after this, so an
/// allocation that gets the same address takes the lock later and finds the note first.
fn defer(address: u64) {
    for at in 0..DEFERRED {
        let place = deferred(at);
        if place
            .compare_exchange(0, address, Ordering::Release, Ordering::Relaxed)
            .is_ok()
        {
            control!(deferred_used).fetch_add(1, Ordering::Release);
            return;
        }
    }
    count!(dropped_frees);
}

fn free_deferred() {
    for at in 0..DEFERRED {
        let address = deferred(at).swap(0, Ordering::Acquire);
        if address != 0 {
            control!(deferred_used).fetch_sub(1, Ordering::Relaxed);
            take_out(address);
        }
    }
}

/// Place number `at` for a deferred free.
fn deferred(at: usize) -> &'static core::sync::atomic::AtomicU64 {
    let first: *const core::sync::atomic::AtomicU64 =
        crate::state::word::<{ core::mem::offset_of!(Control, deferred) }>();
    // SAFETY: `deferred` is an array of `DEFERRED` words.
    unsafe { &*first.add(at % DEFERRED) }
}
