//! The wrappers: what Python calls instead of its allocators.
//!
//! Three families. *Raw* wraps the raw domain and counts what reaches it. *Small* wraps the mem and obj domains where the
//! original is bare pymalloc: it counts requests of 1 to 512 bytes (larger ones reach the raw domain by themselves) and
//! passes a *sampled* one on as 513 bytes, so that the block lands in the raw domain and so does its free; `free` of mem
//! and obj is not wrapped at all. *Generic* wraps anything else (debug hooks, malloc, another tool's hooks): it counts
//! everything, and while the original runs, what that asks of other domains is not counted again.
//!
//! The fast path is assembly, so that it stays what it is: a subtraction, a branch, a jump. Its listing is a golden file
//! of `scripts/check-shim`.

use crate::sampler::{NEVER, draw, draw_idle, mix, random};
use crate::state::{CONTROL, ORIGINALS, SlotWords, control, count, is_on, original, slot};
use crate::sys::thread;
use crate::{live, sample};
use core::arch::naked_asm;
use core::mem::offset_of;
use core::sync::atomic::Ordering;
use pyheap_protocol::control::{Allocator, Control, HINT_SKIP, Originals, Slot};
use pyheap_protocol::{domain, table};

type Code = *const ();
type Block = *mut u8;
type Malloc = extern "C" fn(u64, usize) -> Block;
type Calloc = extern "C" fn(u64, usize, usize) -> Block;
type Realloc = extern "C" fn(u64, Block, usize) -> Block;
type Free = extern "C" fn(u64, Block);

const MEM: u8 = domain::MEM;
const OBJ: u8 = domain::OBJ;
const RAW_DOMAIN: u8 = domain::RAW;

/// Wrappers `[malloc, calloc, realloc, free]` of the raw domain.
pub const RAW: [Code; 4] = [
    raw_malloc as Code,
    raw_calloc as Code,
    raw_realloc as Code,
    raw_free as Code,
];
/// Wrappers of mem over pymalloc; null = keep the original.
pub const SMALL_MEM: [Code; 4] = [
    mem_malloc as Code,
    mem_calloc as Code,
    small_realloc::<MEM> as Code,
    core::ptr::null(),
];
/// Wrappers of obj over pymalloc.
pub const SMALL_OBJ: [Code; 4] = [
    obj_malloc as Code,
    obj_calloc as Code,
    small_realloc::<OBJ> as Code,
    core::ptr::null(),
];
/// Wrappers of mem over anything.
pub const GENERIC_MEM: [Code; 4] = [
    generic_malloc::<MEM> as Code,
    generic_calloc::<MEM> as Code,
    generic_realloc::<MEM> as Code,
    mem_free as Code,
];
/// Wrappers of obj over anything.
pub const GENERIC_OBJ: [Code; 4] = [
    generic_malloc::<OBJ> as Code,
    generic_calloc::<OBJ> as Code,
    generic_realloc::<OBJ> as Code,
    obj_free as Code,
];

/// The largest request that pymalloc serves itself.
const SMALL: usize = 512;
/// What a sampled small request asks for instead.
const ROUTED: usize = SMALL + 1;

/// Offset of an original function in [`ORIGINALS`].
const fn original_offset(domain: u8, function: usize) -> usize {
    offset_of!(Originals, allocators)
        + domain as usize * size_of::<Allocator>()
        + offset_of!(Allocator, functions)
        + function * 8
}

fn original_malloc(domain: u8) -> Malloc {
    let [address, ..] = original(domain).functions;
    // SAFETY: read out of the interpreter's PyMemAllocatorEx before we replaced it.
    unsafe { core::mem::transmute::<Code, Malloc>(address as Code) }
}

fn original_calloc(domain: u8) -> Calloc {
    let [_, address, ..] = original(domain).functions;
    // SAFETY: as in `original_malloc`.
    unsafe { core::mem::transmute::<Code, Calloc>(address as Code) }
}

fn original_realloc(domain: u8) -> Realloc {
    let [_, _, address, _] = original(domain).functions;
    // SAFETY: as in `original_malloc`.
    unsafe { core::mem::transmute::<Code, Realloc>(address as Code) }
}

fn original_free(domain: u8) -> Free {
    let [.., address] = original(domain).functions;
    // SAFETY: as in `original_malloc`.
    unsafe { core::mem::transmute::<Code, Free>(address as Code) }
}

/// Counts a call that will return into this text, for as long as it lives.
struct InFlight;

impl InFlight {
    fn new() -> Self {
        control!(inflight).fetch_add(1, Ordering::AcqRel);
        Self
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        control!(inflight).fetch_sub(1, Ordering::AcqRel);
    }
}

// ------------------------------------------------------------------------------------------------ per-thread slots

/// The calling thread's slot. Its home is given by a hash; three neighbours take those who find it occupied. When all
/// four are taken, one is taken over: the process of marks has no memory, so whoever loses its slot simply draws anew.
fn my_slot(thread: u64) -> &'static SlotWords {
    let home = table::slot(thread);
    for way in 0..4 {
        let candidate = slot(home ^ way);
        if candidate.owner.load(Ordering::Relaxed) == thread {
            return candidate;
        }
    }
    claim_slot(thread, home)
}

#[cold]
#[inline(never)]
fn claim_slot(thread: u64, home: usize) -> &'static SlotWords {
    let fresh = draw_idle();
    let start = (mix(thread ^ random()) & 3) as usize;
    for round in 0..2 {
        for step in 0..4 {
            // First a free one, home first; then any that is not in use at this moment.
            let candidate = slot(home ^ if round == 0 { step } else { (start + step) & 3 });
            let owner = candidate.owner.load(Ordering::Relaxed);
            let vacant = if round == 0 {
                owner == 0
            } else {
                candidate.depth.load(Ordering::Relaxed) == 0
            };
            if vacant
                && candidate
                    .owner
                    .compare_exchange(owner, thread, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                candidate.countdown.store(fresh, Ordering::Relaxed);
                candidate.hint.store(0, Ordering::Relaxed);
                return candidate;
            }
        }
    }
    // All four are in the middle of a call of their owners: share the home for this once.
    slot(home)
}

/// Takes `size` off the thread's stream; true when that passed a mark.
#[inline(always)]
fn takes_mark(mine: &SlotWords, size: usize) -> bool {
    let left = mine.countdown.load(Ordering::Relaxed).wrapping_sub(size as i64);
    if left > 0 {
        mine.countdown.store(left, Ordering::Relaxed);
        return false;
    }
    mine.countdown.store(draw_idle(), Ordering::Relaxed);
    is_on()
}

/// Runs an original allocator so that what it asks of the raw domain is not counted: the thread's stream is put out of
/// reach meanwhile. Gives the original's answer and how many bytes the raw domain was asked for.
#[inline(always)]
fn uncounted<R>(mine: &SlotWords, original: impl FnOnce() -> R) -> (R, u64) {
    mine.depth.fetch_add(1, Ordering::AcqRel);
    let before = mine.countdown.load(Ordering::Relaxed);
    mine.countdown.store(NEVER, Ordering::Relaxed);
    let answer = original();
    let nested = NEVER.wrapping_sub(mine.countdown.load(Ordering::Relaxed));
    mine.countdown.store(before, Ordering::Relaxed);
    mine.depth.fetch_sub(1, Ordering::AcqRel);
    (answer, nested as u64)
}

// ------------------------------------------------------------------------------------------------ raw domain

/// Domain and whether to count, as the outer wrapper of this thread left it.
#[inline(always)]
fn outer(mine: &SlotWords) -> (u8, bool) {
    match mine.hint.load(Ordering::Relaxed) {
        0 => (RAW_DOMAIN, true),
        HINT_SKIP => (RAW_DOMAIN, false),
        label => ((label - 1) as u8, true),
    }
}

#[unsafe(naked)]
extern "C" fn raw_malloc(_ctx: u64, _size: usize) -> Block {
    naked_asm!(
        "mov rax, fs:0",
        "imul rcx, rax, 0x1E3779B1",
        "shr rcx, 32",
        "and ecx, 0x7FC0",
        "lea rdx, [rip + {control} + {slots}]",
        "cmp [rdx + rcx + {owner}], rax",
        "jne {slow}",
        "sub [rdx + rcx + {countdown}], rsi",
        "jle {slow}",
        "jmp [rip + {originals} + {original}]",
        control = sym CONTROL,
        slots = const offset_of!(Control, slots),
        owner = const offset_of!(Slot, owner),
        countdown = const offset_of!(Slot, countdown),
        slow = sym raw_malloc_slow,
        originals = sym ORIGINALS,
        original = const original_offset(RAW_DOMAIN, 0),
    )
}

/// Whether a raw request that left the fast path is a sample. The fast path has taken `size` off already if the slot it
/// looked at was ours.
fn raw_is_sampled(thread: u64, size: usize) -> bool {
    if !is_on() {
        my_slot(thread).countdown.store(draw_idle(), Ordering::Relaxed);
        return false;
    }
    let home = slot(table::slot(thread));
    if home.owner.load(Ordering::Relaxed) != thread {
        return takes_mark(my_slot(thread), size);
    }
    if home.countdown.load(Ordering::Relaxed) > 0 {
        return false;
    }
    home.countdown.store(draw(), Ordering::Relaxed);
    true
}

extern "C" fn raw_malloc_slow(ctx: u64, size: usize) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let sampled = raw_is_sampled(me, size);
    let block = original_malloc(RAW_DOMAIN)(ctx, size);
    if sampled && !block.is_null() {
        sample::enter(block as u64, size as u64, outer(my_slot(me)).0, me);
    }
    block
}

#[unsafe(naked)]
extern "C" fn raw_calloc(_ctx: u64, _count: usize, _size: usize) -> Block {
    naked_asm!(
        "mov r8, rdx",
        "mov rax, rsi",
        "mul rdx",
        "mov rdx, r8",
        "jo 2f",
        "mov r9, rax",
        "mov rax, fs:0",
        "imul rcx, rax, 0x1E3779B1",
        "shr rcx, 32",
        "and ecx, 0x7FC0",
        "lea r8, [rip + {control} + {slots}]",
        "cmp [r8 + rcx + {owner}], rax",
        "jne {slow}",
        "sub [r8 + rcx + {countdown}], r9",
        "jle {slow}",
        "2:",
        "jmp [rip + {originals} + {original}]",
        control = sym CONTROL,
        slots = const offset_of!(Control, slots),
        owner = const offset_of!(Slot, owner),
        countdown = const offset_of!(Slot, countdown),
        slow = sym raw_calloc_slow,
        originals = sym ORIGINALS,
        original = const original_offset(RAW_DOMAIN, 1),
    )
}

extern "C" fn raw_calloc_slow(ctx: u64, count: usize, size: usize) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let bytes = count.wrapping_mul(size);
    let sampled = raw_is_sampled(me, bytes);
    let block = original_calloc(RAW_DOMAIN)(ctx, count, size);
    if sampled && !block.is_null() {
        sample::enter(block as u64, bytes as u64, outer(my_slot(me)).0, me);
    }
    block
}

/// A realloc is a free followed by a new allocation, whether or not the block moves.
extern "C" fn raw_realloc(ctx: u64, old: Block, size: usize) -> Block {
    let me = thread();
    let mine = my_slot(me);
    let (label, counts) = outer(mine);
    let sampled = counts && takes_mark(mine, size);
    if !sampled && (old.is_null() || !live::may_have(old as u64)) {
        return original_realloc(RAW_DOMAIN)(ctx, old, size);
    }
    raw_realloc_slow(ctx, old, size, sampled, label)
}

#[inline(never)]
extern "C" fn raw_realloc_slow(ctx: u64, old: Block, size: usize, sampled: bool, label: u8) -> Block {
    moved(old, size, sampled, label, || {
        original_realloc(RAW_DOMAIN)(ctx, old, size)
    })
}

/// Reallocates a block that may be a sample, or is to become one.
#[inline(always)]
fn moved(old: Block, size: usize, sampled: bool, label: u8, original: impl FnOnce() -> Block) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let was = if !old.is_null() && live::may_have(old as u64) {
        sample::leave(old as u64, me)
    } else {
        None
    };
    let block = original();
    if block.is_null() {
        if let Some(was) = was {
            sample::enter_again(old as u64, was, me);
        }
    } else if sampled {
        sample::enter(block as u64, size as u64, label, me);
    }
    block
}

/// `free` of any domain: the head of the block's chain tells nearly always that the block is no sample.
macro_rules! free_wrapper {
    ($name:ident, $domain:expr) => {
        #[unsafe(naked)]
        extern "C" fn $name(_ctx: u64, _block: Block) {
            naked_asm!(
                "mov rax, rsi",
                "shr rax, 4",
                "imul eax, eax, 0x9E3779B1",
                "shr eax, 16",
                "lea rcx, [rip + {control} + {buckets}]",
                "cmp dword ptr [rcx + rax * 4], 0",
                "jne {slow}",
                "jmp [rip + {originals} + {original}]",
                control = sym CONTROL,
                buckets = const offset_of!(Control, buckets),
                slow = sym free_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 3),
            )
        }
    };
}
free_wrapper!(raw_free, RAW_DOMAIN);
free_wrapper!(mem_free, MEM);
free_wrapper!(obj_free, OBJ);

extern "C" fn free_slow<const DOMAIN: u8>(ctx: u64, block: Block) {
    if live::may_have(block as u64) {
        // The entry goes before the block does: afterwards another thread may get the same address.
        let _in = InFlight::new();
        sample::leave(block as u64, thread());
    }
    original_free(DOMAIN)(ctx, block);
}

// ------------------------------------------------------------------------------------------------ mem, obj over pymalloc

macro_rules! small_wrappers {
    ($malloc:ident, $calloc:ident, $domain:expr) => {
        #[unsafe(naked)]
        extern "C" fn $malloc(_ctx: u64, _size: usize) -> Block {
            naked_asm!(
                "cmp rsi, 512",
                "ja {large}",
                "sub [rip + {control} + {countdown}], rsi",
                "jle {slow}",
                "jmp [rip + {originals} + {original}]",
                control = sym CONTROL,
                countdown = const offset_of!(Control, small_countdown),
                large = sym large_malloc::<{ $domain }>,
                slow = sym small_malloc_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 0),
            )
        }

        #[unsafe(naked)]
        extern "C" fn $calloc(_ctx: u64, _count: usize, _size: usize) -> Block {
            naked_asm!(
                "mov r8, rdx",
                "mov rax, rsi",
                "mul rdx",
                "mov rdx, r8",
                "jo {large}",
                "cmp rax, 512",
                "ja {large}",
                "sub [rip + {control} + {countdown}], rax",
                "jle {slow}",
                "jmp [rip + {originals} + {original}]",
                control = sym CONTROL,
                countdown = const offset_of!(Control, small_countdown),
                large = sym large_calloc::<{ $domain }>,
                slow = sym small_calloc_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 1),
            )
        }
    };
}
small_wrappers!(mem_malloc, mem_calloc, MEM);
small_wrappers!(obj_malloc, obj_calloc, OBJ);

/// Runs an original with a note for the raw wrappers of this thread: whose call it is, or that it has been counted. The
/// note is restored, not cleared, since a signal handler may come in between.
#[inline(always)]
fn noted<R>(label: u64, original: impl FnOnce() -> R) -> R {
    let mine = my_slot(thread());
    // Counted while it runs: nobody takes the slot over then, and the text stays.
    mine.depth.fetch_add(1, Ordering::AcqRel);
    let before = mine.hint.load(Ordering::Relaxed);
    mine.hint.store(label, Ordering::Relaxed);
    let answer = original();
    mine.hint.store(before, Ordering::Relaxed);
    mine.depth.fetch_sub(1, Ordering::AcqRel);
    answer
}

/// Requests above 512 bytes (and of 0) go on to the raw domain, which counts them under this domain's name.
extern "C" fn large_malloc<const DOMAIN: u8>(ctx: u64, size: usize) -> Block {
    noted(u64::from(DOMAIN) + 1, || original_malloc(DOMAIN)(ctx, size))
}

extern "C" fn large_calloc<const DOMAIN: u8>(ctx: u64, count: usize, size: usize) -> Block {
    noted(u64::from(DOMAIN) + 1, || original_calloc(DOMAIN)(ctx, count, size))
}

/// Passes a sampled small request on as 513 bytes. The raw domain must have been asked for exactly those: else the
/// original is not what it was taken for, the block's free would not be seen, and it is left unsampled.
#[inline(always)]
fn routed(size: usize, domain: u8, route: impl FnOnce() -> Block, plain: impl FnOnce() -> Block) -> Block {
    let _in = InFlight::new();
    if !is_on() {
        control!(small_countdown).store(draw_idle() as u64, Ordering::Relaxed);
        return plain();
    }
    control!(small_countdown).store(draw() as u64, Ordering::Relaxed);
    let me = thread();
    let (block, nested) = uncounted(my_slot(me), route);
    if block.is_null() {
        // Not enough memory for 513 bytes: the target gets its own request, as without us.
        return plain();
    }
    if nested == ROUTED as u64 {
        sample::enter(block as u64, size as u64, domain, me);
    } else {
        count!(unproven);
        count!(lost_bytes, size as u64);
    }
    block
}

extern "C" fn small_malloc_slow<const DOMAIN: u8>(ctx: u64, size: usize) -> Block {
    let malloc = original_malloc(DOMAIN);
    routed(size, DOMAIN, || malloc(ctx, ROUTED), || malloc(ctx, size))
}

extern "C" fn small_calloc_slow<const DOMAIN: u8>(ctx: u64, count: usize, size: usize) -> Block {
    let calloc = original_calloc(DOMAIN);
    routed(
        count.wrapping_mul(size),
        DOMAIN,
        || calloc(ctx, 1, ROUTED),
        || calloc(ctx, count, size),
    )
}

/// A small result is counted here and not again in the raw domain, where it arrives when the old block was large; a large
/// one is counted there. The raw wrappers take the old block's sample out.
extern "C" fn small_realloc<const DOMAIN: u8>(ctx: u64, old: Block, size: usize) -> Block {
    let realloc = original_realloc(DOMAIN);
    if size == 0 || size > SMALL {
        return noted(u64::from(DOMAIN) + 1, || realloc(ctx, old, size));
    }
    let countdown = control!(small_countdown);
    let left = (countdown.load(Ordering::Relaxed) as i64).wrapping_sub(size as i64);
    countdown.store(left as u64, Ordering::Relaxed);
    if left > 0 {
        return noted(HINT_SKIP, || realloc(ctx, old, size));
    }
    small_realloc_slow::<DOMAIN>(ctx, old, size)
}

#[inline(never)]
extern "C" fn small_realloc_slow<const DOMAIN: u8>(ctx: u64, old: Block, size: usize) -> Block {
    let realloc = original_realloc(DOMAIN);
    // A block of pymalloc's is moved to a fresh one of 513 bytes; one of the raw domain's is resized there.
    let route = || noted(HINT_ARRIVES, || realloc(ctx, old, ROUTED));
    routed(size, DOMAIN, route, || noted(HINT_SKIP, || realloc(ctx, old, size)))
}

/// No note: the raw wrapper takes the request off the stream, which is how `routed` sees it arrive.
const HINT_ARRIVES: u64 = 0;

// ------------------------------------------------------------------------------------------------ mem, obj over anything

extern "C" fn generic_malloc<const DOMAIN: u8>(ctx: u64, size: usize) -> Block {
    let me = thread();
    let mine = my_slot(me);
    let sampled = takes_mark(mine, size);
    let (block, _) = uncounted(mine, || original_malloc(DOMAIN)(ctx, size));
    if sampled && !block.is_null() {
        let _in = InFlight::new();
        sample::enter(block as u64, size as u64, DOMAIN, me);
    }
    block
}

extern "C" fn generic_calloc<const DOMAIN: u8>(ctx: u64, count: usize, size: usize) -> Block {
    let me = thread();
    let mine = my_slot(me);
    let bytes = count.saturating_mul(size);
    // A product that overflows is refused by the original.
    let sampled = bytes < isize::MAX as usize && takes_mark(mine, bytes);
    let (block, _) = uncounted(mine, || original_calloc(DOMAIN)(ctx, count, size));
    if sampled && !block.is_null() {
        let _in = InFlight::new();
        sample::enter(block as u64, bytes as u64, DOMAIN, me);
    }
    block
}

extern "C" fn generic_realloc<const DOMAIN: u8>(ctx: u64, old: Block, size: usize) -> Block {
    let mine = my_slot(thread());
    let sampled = takes_mark(mine, size);
    moved(old, size, sampled, DOMAIN, || {
        uncounted(mine, || original_realloc(DOMAIN)(ctx, old, size)).0
    })
}
