//! The wrappers: what Python calls instead of its allocators.
//!
//! Four families. *Raw* wraps the raw domain and counts what reaches it. *Small* wraps the mem and obj domains where the
//! original is bare pymalloc: it counts requests of 1 to 512 bytes (larger ones reach the raw domain by themselves) and
//! passes a *sampled* one on as 513 bytes, so that the block lands in the raw domain and so does its free; `free` of mem
//! and obj is not wrapped at all. *Flat* wraps mem and obj where the original serves them by itself and asks nothing of
//! the raw domain (malloc). *Generic* wraps anything else (debug hooks, another tool's hooks): it counts everything, and
//! while the original runs, what that asks of other domains is not counted again.
//!
//! The fast paths are assembly, so that they stay what they are: a subtraction, a branch, a jump, and no locked
//! instruction, no store that other threads wait for. They never return into this text; what does is counted while it
//! runs (rule 7), with locked instructions. Their listing is a golden file of `scripts/check-shim`.

use crate::sampler::{NEVER, draw, draw_idle, mix, random};
use crate::state::{CONTROL, ORIGINALS, SlotWords, config, control, count, is_on, original, slot};
use crate::sys::{stack_pointer, thread};
use crate::{live, sample};
use core::arch::naked_asm;
use core::mem::offset_of;
use core::sync::atomic::Ordering;
use pyheap_protocol::control::{Allocator, Control, NOTE_COUNTED, Originals, Slot};
use pyheap_protocol::{domain, table};

type Code = *const ();
type Block = *mut u8;
type Malloc = extern "C" fn(u64, usize) -> Block;
type Calloc = extern "C" fn(u64, usize, usize) -> Block;
type Realloc = extern "C" fn(u64, Block, usize) -> Block;

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
    mem_realloc as Code,
    core::ptr::null(),
];
/// Wrappers of obj over pymalloc.
pub const SMALL_OBJ: [Code; 4] = [
    obj_malloc as Code,
    obj_calloc as Code,
    obj_realloc as Code,
    core::ptr::null(),
];
/// Wrappers of mem over an allocator that serves it by itself.
pub const FLAT_MEM: [Code; 4] = [
    flat_mem_malloc as Code,
    flat_mem_calloc as Code,
    flat_mem_realloc as Code,
    mem_free as Code,
];
/// Wrappers of obj over one.
pub const FLAT_OBJ: [Code; 4] = [
    flat_obj_malloc as Code,
    flat_obj_calloc as Code,
    flat_obj_realloc as Code,
    obj_free as Code,
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

/// Counts a call that will return into this text, for as long as it lives.
pub struct InFlight;

impl InFlight {
    /// From now on.
    pub fn new() -> Self {
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

/// The calling thread's slot, if it has one. Its home is given by a hash; three neighbours take those who find it occupied.
fn find_slot(thread: u64) -> Option<&'static SlotWords> {
    let home = table::slot(thread);
    (0..4)
        .map(|way| slot(home ^ way))
        .find(|candidate| candidate.owner.load(Ordering::Relaxed) == thread)
}

/// The calling thread's slot. When all four places are taken, one is taken over: the process of marks has no memory, so
/// whoever loses its slot simply draws anew.
pub fn my_slot(thread: u64) -> &'static SlotWords {
    match find_slot(thread) {
        Some(mine) => mine,
        None => claim_slot(thread),
    }
}

#[cold]
#[inline(never)]
fn claim_slot(thread: u64) -> &'static SlotWords {
    let home = table::slot(thread);
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
                candidate.period.store(config!(period), Ordering::Relaxed);
                return candidate;
            }
        }
    }
    // All four are in the middle of a call of their owners: share the home for this once.
    slot(home)
}

/// Takes `size` off the thread's stream. When that passed a mark: the period under which the distance was drawn.
/// Nothing for a size that no allocator has: as a number with a sign it would put the next mark out of reach.
#[inline(always)]
pub fn takes_mark(mine: &SlotWords, size: usize) -> Option<u64> {
    if size > isize::MAX as usize {
        return None;
    }
    let left = mine.countdown.load(Ordering::Relaxed).wrapping_sub(size as i64);
    if left > 0 {
        mine.countdown.store(left, Ordering::Relaxed);
        return None;
    }
    redraw(mine)
}

/// Starts the way to the next mark. Gives the period of the one that was passed, if samples are wanted.
fn redraw(mine: &SlotWords) -> Option<u64> {
    let was = mine.period.load(Ordering::Relaxed);
    mine.countdown.store(draw_idle(), Ordering::Relaxed);
    mine.period.store(config!(period), Ordering::Relaxed);
    is_on().then_some(was)
}

/// Whether a request of `size` bytes that has left the fast path passed a mark. The fast path has taken the size off
/// already if the thread has a slot.
pub fn passed_mark(thread: u64, size: usize) -> Option<u64> {
    match find_slot(thread) {
        Some(mine) if mine.countdown.load(Ordering::Relaxed) > 0 => None,
        Some(mine) => redraw(mine),
        None => takes_mark(claim_slot(thread), size),
    }
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

// ------------------------------------------------------------------------------------------------ raw domain, flat

/// Farthest that the stack pointer of the wrapper that left a note may lie above ours: pymalloc's own frames between them.
const NOTE_REACH: u64 = 2048;

/// The note of the mem or obj call that this raw call serves, if it serves one: what was noted is this thread's stack
/// pointer at that call, and the return address that stood there; both are as they were only as long as it runs.
fn note() -> Option<u64> {
    let at = control!(note_stack).load(Ordering::Relaxed);
    let above = at.wrapping_sub(stack_pointer());
    if above >= NOTE_REACH || !at.is_multiple_of(8) {
        return None;
    }
    // SAFETY: `at` was the stack pointer of some thread and lies within `NOTE_REACH` bytes above ours: on our own stack,
    // since another one begins a guard page further at least.
    let now = unsafe { (at as *const u64).read_volatile() };
    (now == control!(note_return).load(Ordering::Relaxed)).then(|| control!(note_label).load(Ordering::Relaxed))
}

/// The domain whose call this one serves. (One call place that calls both domains with nothing in between, a foreign
/// function interface say, may make it the domain of the call before.)
fn label<const DOMAIN: u8>() -> u8 {
    if DOMAIN != RAW_DOMAIN {
        return DOMAIN;
    }
    match note() {
        None | Some(NOTE_COUNTED) => RAW_DOMAIN,
        Some(label) => (label.wrapping_sub(1) & 3) as u8,
    }
}

/// Whether this realloc of `old` serves one that has been counted as such.
fn is_counted<const DOMAIN: u8>(old: Block) -> bool {
    DOMAIN == RAW_DOMAIN && control!(note_old).load(Ordering::Relaxed) == old as u64 && note() == Some(NOTE_COUNTED)
}

/// Finds the thread's slot in one of its four places: rax = thread, r8 + rcx = the slot. Uses these three registers only.
macro_rules! find_slot {
    () => {
        concat!(
            "mov rax, fs:0\n",
            "imul rcx, rax, 0x1E3779B1\n",
            "shr rcx, 32\n",
            "and ecx, 0x7FC0\n",
            "lea r8, [rip + {control} + {slots}]\n",
            "cmp [r8 + rcx + {owner}], rax\n",
            "jne 3f\n",
            "2:\n"
        )
    };
}
/// The rest of it, out of the way.
macro_rules! other_places {
    () => {
        concat!(
            "3:\n",
            "xor ecx, 64\n",
            "cmp [r8 + rcx + {owner}], rax\n",
            "je 2b\n",
            "xor ecx, 192\n",
            "cmp [r8 + rcx + {owner}], rax\n",
            "je 2b\n",
            "xor ecx, 64\n",
            "cmp [r8 + rcx + {owner}], rax\n",
            "je 2b\n",
            "jmp {slow}\n"
        )
    };
}

/// Asks the filter whether the block in `$block` may be a sample: then "not equal". Uses rax and `$free`.
macro_rules! filtered {
    ($block:literal, $free:literal) => {
        concat!(
            "mov rax, ",
            $block,
            "\n",
            "shr rax, 8\n",
            "movzx eax, ax\n",
            "lea ",
            $free,
            ", [rip + {control} + {filter}]\n",
            "cmp byte ptr [",
            $free,
            " + rax], 0\n"
        )
    };
}

pub(crate) use {filtered, find_slot as find_slot_code, other_places};

/// The wrappers of a domain whose requests are taken off the thread's own stream. `$odd` is what `realloc` asks about a
/// request that may have been counted elsewhere.
macro_rules! stream_wrappers {
    ($malloc:ident, $calloc:ident, $realloc:ident, $domain:expr, $odd:literal) => {
        #[unsafe(naked)]
        extern "C" fn $malloc(_ctx: u64, _size: usize) -> Block {
            naked_asm!(
                find_slot!(),
                "sub [r8 + rcx + {countdown}], rsi",
                "jle {slow}",
                "jmp [rip + {originals} + {original}]",
                other_places!(),
                control = sym CONTROL,
                slots = const offset_of!(Control, slots),
                owner = const offset_of!(Slot, owner),
                countdown = const offset_of!(Slot, countdown),
                slow = sym stream_malloc_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 0),
            )
        }

        // An overflow that two's complement does not see (two factors from 2^63 on) is a few bytes taken off too much.
        #[unsafe(naked)]
        extern "C" fn $calloc(_ctx: u64, _count: usize, _size: usize) -> Block {
            naked_asm!(
                "mov r9, rsi",
                "imul r9, rdx",
                "jo 4f",
                find_slot!(),
                "sub [r8 + rcx + {countdown}], r9",
                "jle {slow}",
                "4:",
                "jmp [rip + {originals} + {original}]",
                other_places!(),
                control = sym CONTROL,
                slots = const offset_of!(Control, slots),
                owner = const offset_of!(Slot, owner),
                countdown = const offset_of!(Slot, countdown),
                slow = sym stream_calloc_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 1),
            )
        }

        #[unsafe(naked)]
        extern "C" fn $realloc(_ctx: u64, _old: Block, _size: usize) -> Block {
            naked_asm!(
                $odd,
                filtered!("rsi", "r8"),
                "jne {slow}",
                find_slot!(),
                "sub [r8 + rcx + {countdown}], rdx",
                "jle {marked}",
                "jmp [rip + {originals} + {original}]",
                other_places!(),
                control = sym CONTROL,
                filter = const offset_of!(Control, filter),
                slots = const offset_of!(Control, slots),
                owner = const offset_of!(Slot, owner),
                countdown = const offset_of!(Slot, countdown),
                slow = sym stream_realloc_slow::<{ $domain }>,
                marked = sym stream_realloc_marked::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 2),
            )
        }
    };
}
stream_wrappers!(
    raw_malloc,
    raw_calloc,
    raw_realloc,
    RAW_DOMAIN,
    "cmp rdx, 512\njbe {slow}"
);
stream_wrappers!(flat_mem_malloc, flat_mem_calloc, flat_mem_realloc, MEM, "");
stream_wrappers!(flat_obj_malloc, flat_obj_calloc, flat_obj_realloc, OBJ, "");

extern "C" fn stream_malloc_slow<const DOMAIN: u8>(ctx: u64, size: usize) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let mark = passed_mark(me, size);
    let label = label::<DOMAIN>();
    let block = original_malloc(DOMAIN)(ctx, size);
    if let (Some(period), false) = (mark, block.is_null()) {
        sample::enter(block as u64, size as u64, label, me, period);
    }
    block
}

extern "C" fn stream_calloc_slow<const DOMAIN: u8>(ctx: u64, count: usize, size: usize) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let bytes = count.wrapping_mul(size);
    let mark = passed_mark(me, bytes);
    let label = label::<DOMAIN>();
    let block = original_calloc(DOMAIN)(ctx, count, size);
    if let (Some(period), false) = (mark, block.is_null()) {
        sample::enter(block as u64, bytes as u64, label, me, period);
    }
    block
}

/// A realloc is a free followed by a new allocation, whether or not the block moves. This one may be of a sampled block, or
/// serve a call that has been counted; nothing was taken off yet.
extern "C" fn stream_realloc_slow<const DOMAIN: u8>(ctx: u64, old: Block, size: usize) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let label = label::<DOMAIN>();
    let mark = if is_counted::<DOMAIN>(old) {
        None
    } else {
        takes_mark(my_slot(me), size)
    };
    moved(old, size, mark, label, || original_realloc(DOMAIN)(ctx, old, size))
}

/// This one has passed a mark.
extern "C" fn stream_realloc_marked<const DOMAIN: u8>(ctx: u64, old: Block, size: usize) -> Block {
    let _in = InFlight::new();
    let mark = passed_mark(thread(), size);
    let label = label::<DOMAIN>();
    moved(old, size, mark, label, || original_realloc(DOMAIN)(ctx, old, size))
}

/// Reallocates a block that may be a sample, or is to become one.
#[inline(always)]
fn moved(old: Block, size: usize, mark: Option<u64>, label: u8, original: impl FnOnce() -> Block) -> Block {
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
    } else if let Some(period) = mark {
        sample::enter(block as u64, size as u64, label, me, period);
    }
    block
}

/// `free` of any domain: the filter tells nearly always that the block is no sample.
macro_rules! free_wrapper {
    ($name:ident, $domain:expr) => {
        #[unsafe(naked)]
        extern "C" fn $name(_ctx: u64, _block: Block) {
            naked_asm!(
                filtered!("rsi", "rcx"),
                "jne 3f",
                "2:",
                "jmp [rip + {originals} + {original}]",
                // The entry goes before the block does: afterwards another thread may get the same address.
                "3:",
                "push rdi",
                "push rsi",
                "sub rsp, 8",
                "mov rdi, rsi",
                "call {freed}",
                "add rsp, 8",
                "pop rsi",
                "pop rdi",
                "jmp 2b",
                control = sym CONTROL,
                filter = const offset_of!(Control, filter),
                freed = sym freed,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 3),
            )
        }
    };
}
free_wrapper!(raw_free, RAW_DOMAIN);
free_wrapper!(mem_free, MEM);
free_wrapper!(obj_free, OBJ);

/// The block is about to be freed; its filter says that it may be a sample.
pub extern "C" fn freed(block: u64) {
    if live::may_have(block) {
        let _in = InFlight::new();
        sample::leave(block, thread());
    }
}

// ------------------------------------------------------------------------------------------------ mem, obj over pymalloc

/// Notes for the raw wrappers whose call this is, or that it has been counted, and goes on. See [`note`].
macro_rules! leave_note {
    ($label:literal) => {
        concat!(
            "mov [rip + {control} + {note_stack}], rsp\n",
            "mov rax, [rsp]\n",
            "mov [rip + {control} + {note_return}], rax\n",
            "mov dword ptr [rip + {control} + {note_label}], {",
            $label,
            "}\n",
            "jmp [rip + {originals} + {original}]\n"
        )
    };
}

macro_rules! small_wrappers {
    ($malloc:ident, $calloc:ident, $realloc:ident, $domain:expr) => {
        #[unsafe(naked)]
        extern "C" fn $malloc(_ctx: u64, _size: usize) -> Block {
            naked_asm!(
                "cmp rsi, 512",
                "ja 3f",
                "sub [rip + {control} + {countdown}], rsi",
                "jle {slow}",
                "jmp [rip + {originals} + {original}]",
                // Larger ones go on to the raw domain, which counts them under this domain's name.
                "3:",
                leave_note!("whose"),
                control = sym CONTROL,
                countdown = const offset_of!(Control, small_countdown),
                note_stack = const offset_of!(Control, note_stack),
                note_return = const offset_of!(Control, note_return),
                note_label = const offset_of!(Control, note_label),
                whose = const $domain + 1,
                slow = sym small_malloc_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 0),
            )
        }

        #[unsafe(naked)]
        extern "C" fn $calloc(_ctx: u64, _count: usize, _size: usize) -> Block {
            naked_asm!(
                "mov rax, rsi",
                "imul rax, rdx",
                "jo 3f",
                "cmp rax, 512",
                "ja 3f",
                "sub [rip + {control} + {countdown}], rax",
                "jle {slow}",
                "jmp [rip + {originals} + {original}]",
                "3:",
                leave_note!("whose"),
                control = sym CONTROL,
                countdown = const offset_of!(Control, small_countdown),
                note_stack = const offset_of!(Control, note_stack),
                note_return = const offset_of!(Control, note_return),
                note_label = const offset_of!(Control, note_label),
                whose = const $domain + 1,
                slow = sym small_calloc_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 1),
            )
        }

        // A small result is counted here and not again in the raw domain, where it arrives when the old block was large; a
        // large one (and one of 0 bytes) is counted there. The raw wrappers take the old block's sample out.
        #[unsafe(naked)]
        extern "C" fn $realloc(_ctx: u64, _old: Block, _size: usize) -> Block {
            naked_asm!(
                "lea rax, [rdx - 1]",
                "cmp rax, 511",
                "ja 3f",
                "sub [rip + {control} + {countdown}], rdx",
                "jle {slow}",
                "mov [rip + {control} + {note_old}], rsi",
                leave_note!("counted"),
                "3:",
                leave_note!("whose"),
                control = sym CONTROL,
                countdown = const offset_of!(Control, small_countdown),
                note_stack = const offset_of!(Control, note_stack),
                note_return = const offset_of!(Control, note_return),
                note_label = const offset_of!(Control, note_label),
                whose = const $domain + 1,
                note_old = const offset_of!(Control, note_old),
                counted = const NOTE_COUNTED,
                slow = sym small_realloc_slow::<{ $domain }>,
                originals = sym ORIGINALS,
                original = const original_offset($domain, 2),
            )
        }
    };
}
small_wrappers!(mem_malloc, mem_calloc, mem_realloc, MEM);
small_wrappers!(obj_malloc, obj_calloc, obj_realloc, OBJ);

/// Passes a sampled small request on as 513 bytes. The raw domain must have been asked for exactly those: else the
/// original is not what it was taken for, the block's free would not be seen, and it is left unsampled.
#[inline(always)]
fn routed(size: usize, domain: u8, route: impl FnOnce() -> Block, plain: impl FnOnce() -> Block) -> Block {
    let _in = InFlight::new();
    // The raw calls that this one makes are its own.
    control!(note_stack).store(0, Ordering::Relaxed);
    if !is_on() {
        control!(small_countdown).store(draw_idle() as u64, Ordering::Relaxed);
        return plain();
    }
    let period = control!(small_period).load(Ordering::Relaxed);
    control!(small_period).store(config!(period), Ordering::Relaxed);
    control!(small_countdown).store(draw() as u64, Ordering::Relaxed);
    if size == 0 || size > SMALL {
        // Nothing passes no mark. A calloc whose factors overflow to something small fails.
        return plain();
    }
    let me = thread();
    let (block, nested) = uncounted(my_slot(me), route);
    if block.is_null() {
        // Not enough memory for 513 bytes: the target gets its own request, as without us.
        return plain();
    }
    if nested == ROUTED as u64 {
        sample::enter(block as u64, size as u64, domain, me, period);
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
        count.saturating_mul(size),
        DOMAIN,
        || calloc(ctx, 1, ROUTED),
        || calloc(ctx, count, size),
    )
}

/// A block of pymalloc's is moved to a fresh one of 513 bytes; one of the raw domain's is resized there.
extern "C" fn small_realloc_slow<const DOMAIN: u8>(ctx: u64, old: Block, size: usize) -> Block {
    let realloc = original_realloc(DOMAIN);
    routed(size, DOMAIN, || realloc(ctx, old, ROUTED), || realloc(ctx, old, size))
}

// ------------------------------------------------------------------------------------------------ mem, obj over anything

extern "C" fn generic_malloc<const DOMAIN: u8>(ctx: u64, size: usize) -> Block {
    let me = thread();
    let mine = my_slot(me);
    let mark = takes_mark(mine, size);
    let (block, _) = uncounted(mine, || original_malloc(DOMAIN)(ctx, size));
    entered(block, size, DOMAIN, me, mark)
}

extern "C" fn generic_calloc<const DOMAIN: u8>(ctx: u64, count: usize, size: usize) -> Block {
    let me = thread();
    let mine = my_slot(me);
    let bytes = count.saturating_mul(size);
    // A product that overflows is refused by the original.
    let mark = if bytes < isize::MAX as usize {
        takes_mark(mine, bytes)
    } else {
        None
    };
    let (block, _) = uncounted(mine, || original_calloc(DOMAIN)(ctx, count, size));
    entered(block, bytes, DOMAIN, me, mark)
}

#[inline(always)]
fn entered(block: Block, size: usize, domain: u8, me: u64, mark: Option<u64>) -> Block {
    if let (Some(period), false) = (mark, block.is_null()) {
        let _in = InFlight::new();
        sample::enter(block as u64, size as u64, domain, me, period);
    }
    block
}

extern "C" fn generic_realloc<const DOMAIN: u8>(ctx: u64, old: Block, size: usize) -> Block {
    let _in = InFlight::new();
    let mine = my_slot(thread());
    let mark = takes_mark(mine, size);
    moved(old, size, mark, DOMAIN, || {
        uncounted(mine, || original_realloc(DOMAIN)(ctx, old, size)).0
    })
}
