//! The lock, and what is done under it: entering a sample, taking one out.

pub use crate::live::Sample as Left;
use crate::live::Sample;
use crate::state::{add, bump, cell, config, control, count, word};
use crate::sys::number;
use crate::{frames, live, pieces, ring};
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use pyheap_protocol::control::{Control, DEFERRED, GAP_UNIT};
use pyheap_protocol::record::{Alloc, Entry, Free, Head, kind};
use pyheap_protocol::thin::{keeps, probability};

/// Rounds of waiting for the lock: some tens of microseconds. Its holder needs about one, unless it lost its processor.
const MAX_SPINS: u32 = 500;

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
            Err(_) => {
                // Its holder has lost its processor, as one who has waited already found out; nobody waits for it again.
                let turn = control!(turn).load(Ordering::Relaxed) + 1;
                if control!(stuck).load(Ordering::Relaxed) == turn {
                    return Ask::Busy;
                }
                if spins == MAX_SPINS {
                    control!(stuck).store(turn, Ordering::Relaxed);
                    return Ask::Busy;
                }
                spins += 1;
            }
        }
        core::hint::spin_loop();
    }
    add(control!(turn), 1);
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

/// Enters a freshly allocated block of `size` bytes (as asked for) as a sample, which was picked under `period`.
#[inline(always)]
pub fn enter(address: u64, size: u64, domain: u8, thread: u64, period: u64) {
    enter_from(address, size, domain, thread, period, None);
}

/// The same, for native code that has entered a wrapper with `from`.
#[inline(never)]
pub fn enter_from(address: u64, size: u64, domain: u8, thread: u64, period: u64, from: Option<&Entry>) {
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
    // The filter first: it is in the cache, a chain's head hardly ever is.
    if cell(address).load(Ordering::Relaxed) != 0 && take_out(address).is_some() {
        bump!(missed_frees);
    }
    adopt_period();
    let stack = frames::stack_id(thread, from.map_or(0, |entry| entry.caller));
    let sample = Sample {
        id: 0,
        size,
        stack,
        thread: number(thread),
        domain,
        period,
    };
    put_in(address, sample, |id| {
        if let Some(entry) = from {
            pieces::copy(id, entry, thread);
        }
    });
    unlock();
}

/// The block is about to be freed or moved: takes its sample out and says what it was.
#[inline(never)]
pub fn leave(address: u64, thread: u64) -> Option<Sample> {
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
pub fn enter_again(address: u64, was: Sample, thread: u64) {
    if let Ask::Got = ask(thread) {
        put_in(address, was, |_| {});
        unlock();
    } else {
        count!(contended);
        count!(lost_bytes, was.size);
    }
}

/// Samples that are looked at for thinning while one is entered: a change of period is through with a table of 500,000
/// after 16,000 samples, and costs each of them a few microseconds.
const THINNED_AT_ONCE: u64 = 32;

/// Takes over a longer period that the host has asked for, and thins the present set accordingly, a few entries at a time.
fn adopt_period() {
    let b = control!(period_wanted.b).load(Ordering::Acquire);
    if b > config!(period) {
        fence(Ordering::Acquire);
        if control!(period_wanted.a).load(Ordering::Acquire) == b {
            period().store(b, Ordering::Relaxed);
            control!(thin_left).store(control!(slab_used).load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
    let left = control!(thin_left).load(Ordering::Relaxed);
    if left != 0 {
        let until = left.saturating_sub(THINNED_AT_ONCE);
        for index in until..left {
            live::thin(index + 1, config!(period));
        }
        control!(thin_left).store(until, Ordering::Relaxed);
    }
}

/// The period that the next distances are drawn with.
fn period() -> &'static AtomicU64 {
    word::<{ offset_of!(Control, config.period) }>()
}

/// Puts a sample into the table and the ring. `before` its record comes what belongs to it.
#[inline(always)]
fn put_in(address: u64, mut sample: Sample, before: impl FnOnce(u64)) {
    sample.id = control!(last_id).load(Ordering::Relaxed) + 1;
    // Picked under a shorter period than now: one in so many stays.
    if !keeps(sample.id, sample.size, sample.period, config!(period)) {
        control!(last_id).store(sample.id, Ordering::Release);
        return;
    }
    if !live::insert(address, sample) {
        count!(lost_bytes, sample.size);
        return;
    }
    // Only now: who reads this id finds its entry in the table, or it has been freed.
    control!(last_id).store(sample.id, Ordering::Release);
    bump!(samples);
    before(sample.id);
    let head = Head {
        len: size_of::<Alloc>() as u32,
        kind: kind::ALLOC,
        flags: u16::from(sample.domain),
    };
    if !ring::push(Alloc {
        head,
        id: sample.id,
        address,
        size: sample.size,
        thread: sample.thread,
        stack: sample.stack,
        period: sample.period,
    }) {
        bump!(lost_allocs);
        let weight = 1.0 / probability(sample.size, config!(period));
        bump!(gap_bytes, whole(sample.size as f64 * weight));
        bump!(gap_objects, whole(GAP_UNIT as f64 * weight));
    }
}

/// The nearest whole number.
fn whole(x: f64) -> u64 {
    (x + 0.5) as u64
}

fn take_out(address: u64) -> Option<Sample> {
    let mut removed = live::remove(address)?;
    if !keeps(removed.id, removed.size, removed.period, config!(period)) {
        // It had not survived the last raise of the period; the thinning was just not through.
        return None;
    }
    removed.period = config!(period);
    bump!(frees);
    let head = Head {
        len: size_of::<Free>() as u32,
        kind: kind::FREE,
        flags: 0,
    };
    if !ring::push(Free { head, id: removed.id }) {
        bump!(lost_frees);
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
