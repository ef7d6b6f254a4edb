//! Where the shim's state is, and safe access to its words.
//!
//! All state that several threads touch lies in one [`Control`], whose every word is accessed as an atomic. On x86-64 a
//! relaxed load or store is a plain `mov`, so this costs nothing.

use core::cell::UnsafeCell;
use core::mem::offset_of;
use core::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use pyheap_protocol::control::{Allocator, BUCKETS, Config, Control, Originals, SLOTS, Slot};
use pyheap_protocol::table;

/// Zeroed memory in whole pages; a forked child finds it zeroed again.
#[repr(C, align(4096))]
pub struct Wiped(UnsafeCell<core::mem::MaybeUninit<Control>>);
// SAFETY: every access goes through the atomics below.
unsafe impl Sync for Wiped {}

/// The one control block.
pub static CONTROL: Wiped = Wiped(UnsafeCell::new(core::mem::MaybeUninit::zeroed()));

/// Ordinary memory, inherited by forked children.
#[repr(C, align(64))]
pub struct Kept(UnsafeCell<Originals>);
// SAFETY: written only by `start`, before any wrapper can be called; read-only from then on.
unsafe impl Sync for Kept {}

/// The allocators that were there before us. Not zero-initialised, so that it does not share pages with [`CONTROL`].
pub static ORIGINALS: Kept = Kept(UnsafeCell::new(Originals {
    allocators: [Allocator {
        ctx: 0,
        functions: [1; 4],
    }; 3],
}));

/// The word of [`Control`] at byte `OFFSET`.
#[inline(always)]
pub fn word<const OFFSET: usize>() -> &'static AtomicU64 {
    const { assert!(OFFSET.is_multiple_of(8) && OFFSET + 8 <= size_of::<Control>()) };
    // SAFETY: in bounds and aligned by the assertion; the static lives for ever and is accessed by atomics only.
    unsafe { AtomicU64::from_ptr(CONTROL.0.get().cast::<u64>().byte_add(OFFSET)) }
}

/// The half word of [`Control`] at byte `OFFSET`.
#[inline(always)]
pub fn half<const OFFSET: usize>() -> &'static AtomicU32 {
    const { assert!(OFFSET.is_multiple_of(4) && OFFSET + 4 <= size_of::<Control>()) };
    // SAFETY: as in `word`.
    unsafe { AtomicU32::from_ptr(CONTROL.0.get().cast::<u32>().byte_add(OFFSET)) }
}

/// Names a word of [`Control`].
macro_rules! control {
    ($($field:tt)+) => { $crate::state::word::<{ core::mem::offset_of!(pyheap_protocol::Control, $($field)+) }>() };
}
/// Reads a word of [`Config`].
macro_rules! config {
    ($field:ident) => {
        $crate::state::word::<{ core::mem::offset_of!(pyheap_protocol::Control, config.$field) }>()
            .load(core::sync::atomic::Ordering::Relaxed)
    };
}
/// Reads an offset of the interpreter's layout.
macro_rules! layout {
    ($field:ident) => {
        u64::from(
            $crate::state::half::<{ core::mem::offset_of!(pyheap_protocol::Control, config.layout.$field) }>()
                .load(core::sync::atomic::Ordering::Relaxed),
        )
    };
}
/// Adds to a counter that only the holder of the lock writes.
macro_rules! bump {
    ($field:ident) => {
        bump!($field, 1)
    };
    ($field:ident, $n:expr) => {
        $crate::state::add(
            $crate::state::word::<{ core::mem::offset_of!(pyheap_protocol::Control, counters.$field) }>(),
            $n,
        )
    };
}
/// Adds to a counter that anybody may write.
macro_rules! count {
    ($field:ident) => {
        count!($field, 1)
    };
    ($field:ident, $n:expr) => {
        $crate::state::word::<{ core::mem::offset_of!(pyheap_protocol::Control, counters.$field) }>()
            .fetch_add($n, core::sync::atomic::Ordering::Relaxed)
    };
}
pub(crate) use {bump, config, control, count, layout};

/// Adds to a word that only one thread writes at a time: no locked instruction.
#[inline(always)]
pub fn add(word: &AtomicU64, n: u64) {
    word.store(word.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Offset of the config, for asserts.
const _: () = assert!(offset_of!(Control, config).is_multiple_of(8) && size_of::<Config>().is_multiple_of(8));

/// The original allocator of `domain` (0, 1, 2).
#[inline(always)]
pub fn original(domain: u8) -> &'static Allocator {
    let index = if domain > 2 { 0 } else { domain as usize };
    // SAFETY: `index` is 0, 1 or 2; the static is written only before the first wrapper can run.
    unsafe { &*ORIGINALS.0.get().cast::<Allocator>().add(index) }
}

/// Stores what was there before us. Called by `start` only, before any wrapper is in place.
pub fn set_original(domain: u8, allocator: Allocator) {
    let index = if domain > 2 { 0 } else { domain as usize };
    // SAFETY: `index` is 0, 1 or 2; no wrapper is installed yet, so nobody reads.
    unsafe { ORIGINALS.0.get().cast::<Allocator>().add(index).write(allocator) }
}

/// A per-thread slot as atomics.
#[repr(C, align(64))]
pub struct SlotWords {
    /// See [`Slot::owner`].
    pub owner: AtomicU64,
    /// See [`Slot::countdown`].
    pub countdown: AtomicI64,
    /// See [`Slot::depth`].
    pub depth: AtomicU64,
    /// See [`Slot::period`].
    pub period: AtomicU64,
    reserved: [u64; 4],
}
const _: () = assert!(size_of::<SlotWords>() == size_of::<Slot>());

/// Slot number `index`, modulo their number.
#[inline(always)]
pub fn slot(index: usize) -> &'static SlotWords {
    let index = index % SLOTS;
    // SAFETY: in bounds by the modulo; all fields are plain words that are accessed as atomics.
    unsafe {
        &*CONTROL
            .0
            .get()
            .cast::<SlotWords>()
            .byte_add(offset_of!(Control, slots))
            .add(index)
    }
}

/// The filter's cell for an address.
#[inline(always)]
pub fn cell(address: u64) -> &'static AtomicU8 {
    // SAFETY: `table::cell` is below `CELLS`; accessed as atomics only.
    unsafe {
        AtomicU8::from_ptr(
            CONTROL
                .0
                .get()
                .cast::<u8>()
                .byte_add(offset_of!(Control, filter) + table::cell(address)),
        )
    }
}

/// Chain head number `index`, modulo their number.
#[inline(always)]
pub fn bucket(index: u32) -> &'static AtomicU32 {
    let index = index as usize % BUCKETS;
    // SAFETY: in bounds by the modulo; accessed as atomics only.
    unsafe {
        AtomicU32::from_ptr(
            CONTROL
                .0
                .get()
                .cast::<u32>()
                .byte_add(offset_of!(Control, buckets))
                .add(index),
        )
    }
}

/// True while samples are wanted; false in a forked child, whose copy of the control block is zero.
#[inline(always)]
pub fn is_on() -> bool {
    control!(gate).load(Ordering::Acquire) == 1
}
