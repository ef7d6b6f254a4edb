//! The wrappers of the C library's functions: what everything but the interpreter calls instead of `malloc` and its like.
//!
//! The host puts their addresses into the relocation slots of the loaded objects, one store each, and takes them out again;
//! nothing here installs anything. What they pass on to is in [`NATIVE`]. Requests are taken off the calling thread's own
//! stream, the one of the raw domain: the interpreter's own calls do not come here, so nothing is counted twice.
//!
//! These may be called at any time by any thread: without the GIL, without a Python thread state, from a signal handler.
//! The rules of the crate are enough for that, since nothing below the lock calls an allocator.

use crate::hooks::{InFlight, filtered, find_slot_code, freed, my_slot, other_places, passed_mark, takes_mark};
use crate::state::{CONTROL, control, is_on};
use crate::sys::thread;
use crate::{live, sample};
use core::arch::naked_asm;
use core::cell::UnsafeCell;
use core::mem::{offset_of, transmute};
use core::sync::atomic::Ordering;
use pyheap_protocol::control::native as number;
use pyheap_protocol::control::{ARENA_BYTES, Control, Native, Slot};
use pyheap_protocol::domain::{MALLOC, MMAP};
use pyheap_protocol::record::Entry;

pub type Code = *const ();
pub type Block = *mut u8;

/// Ordinary memory, inherited by forked children; written by the host alone.
#[repr(C, align(64))]
pub struct Kept(pub(crate) UnsafeCell<Native>);
// SAFETY: read by single words, which the host has written before any wrapper that reads them can be called.
unsafe impl Sync for Kept {}

/// The functions that the wrappers pass on to. Not zero-initialised, so that it does not share pages with [`CONTROL`].
pub static NATIVE: Kept = Kept(UnsafeCell::new(Native {
    functions: [1; number::COUNT],
    used: 0,
    ffi_calls: [1; number::FFI_COUNT],
    aliases: [1; number::COUNT],
}));

/// The wrappers, in the order of [`number::NAMES`].
pub const WRAPPERS: [Code; number::COUNT] = [
    malloc as Code,
    calloc as Code,
    realloc as Code,
    free as Code,
    posix_memalign as Code,
    aligned_alloc as Code,
    memalign as Code,
    valloc as Code,
    pvalloc as Code,
    reallocarray as Code,
    mmap as Code,
    munmap as Code,
    mremap as Code,
];

/// What the interpreter calls as `mmap`.
pub const CHUNK_MMAP: Code = chunk_mmap as Code;

/// The address of function number `WHICH`, as the host has found it.
#[inline(always)]
fn address<const WHICH: usize>() -> Code {
    const { assert!(WHICH < number::COUNT) };
    // SAFETY: within the table by the assertion.
    unsafe { NATIVE.0.get().cast::<Code>().add(WHICH).read_volatile() }
}

/// The original function number `$which` as `$type`.
macro_rules! original {
    ($which:ident, $type:ty) => {{
        // SAFETY: the host has found this address in the slots of objects that call it as the C library's function of that
        // name, whose signature this is.
        unsafe { transmute::<Code, $type>(address::<{ number::$which }>()) }
    }};
}

/// Offset of function number `which` in [`NATIVE`].
const fn at(which: usize) -> usize {
    offset_of!(Native, functions) + which * 8
}

// ------------------------------------------------------------------------------------------------ allocating

/// The way from a wrapper to its slow path: an [`Entry`] on the stack, whose address is the last argument, in `$register`.
/// Whoever is on its last instructions is seen by its program counter.
macro_rules! way {
    ($name:ident, $slow:ident, $register:literal) => {
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                save_entry!(),
                concat!("mov ", $register, ", rsp"),
                "sub rsp, 8",
                "call {slow}",
                "add rsp, 56",
                "ret",
                slow = sym $slow
            )
        }
    };
}

/// A wrapper begins with a cache line of code: where `malloc`'s crossed a border of two, a pair of malloc and free took a cycle longer.
/// (`docs/performance.md`, "Where the shim lies".) It is the first of its section, so that nothing is filled up before it.
macro_rules! own_line {
    () => {
        ".p2align 6"
    };
}

/// Completes an [`Entry`] above which the return address stands. The slow paths leave these registers as they are.
macro_rules! save_entry {
    () => {
        "push r15\npush r14\npush r13\npush r12\npush rbx\npush rbp"
    };
}

/// Where a wrapper was entered; on the calling thread's own stack, until the slow path returns.
pub type From<'a> = &'a Entry;

pub(crate) use {own_line, save_entry, way};

/// A wrapper whose request is `$size` (assembly that leaves it in a register, named `$taken`). `$entry` is the register of the
/// slow path's last argument.
macro_rules! allocating {
    ($name:ident, $which:ident, $slow:ident, $way:ident, $entry:literal, $size:literal, $taken:literal) => {
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                own_line!(),
                $size,
                find_slot_code!(),
                concat!("sub [r8 + rcx + {countdown}], ", $taken),
                "jle {slow}",
                "4:",
                "jmp [rip + {native} + {original}]",
                other_places!(),
                control = sym CONTROL,
                slots = const offset_of!(Control, slots),
                owner = const offset_of!(Slot, owner),
                countdown = const offset_of!(Slot, countdown),
                slow = sym $way,
                native = sym NATIVE,
                original = const at(number::$which),
            )
        }

        way!($way, $slow, $entry);
    };
}
allocating!(malloc, MALLOC, malloc_slow, malloc_way, "rsi", "", "rdi");
// An overflow that two's complement does not see (two factors from 2^63 on) is a few bytes taken off too much.
allocating!(
    calloc,
    CALLOC,
    calloc_slow,
    calloc_way,
    "rdx",
    "mov r9, rdi\nimul r9, rsi\njo 4f",
    "r9"
);
allocating!(
    posix_memalign,
    POSIX_MEMALIGN,
    posix_memalign_slow,
    posix_memalign_way,
    "rcx",
    "",
    "rdx"
);
allocating!(
    aligned_alloc,
    ALIGNED_ALLOC,
    aligned_alloc_slow,
    aligned_alloc_way,
    "rdx",
    "",
    "rsi"
);
allocating!(memalign, MEMALIGN, memalign_slow, memalign_way, "rdx", "", "rsi");
allocating!(valloc, VALLOC, valloc_slow, valloc_way, "rsi", "", "rdi");
allocating!(pvalloc, PVALLOC, pvalloc_slow, pvalloc_way, "rsi", "", "rdi");

/// Enters a block that has passed a mark and is there.
#[inline(always)]
pub fn entered(block: Block, size: usize, mark: Option<u64>, me: u64, from: From<'_>) -> Block {
    if let (Some(period), false) = (mark, block.is_null()) {
        sample::enter_from(block as u64, size as u64, MALLOC, me, period, Some(from));
    }
    block
}

extern "C" fn malloc_slow(size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let mark = passed_mark(me, size);
    let block = original!(MALLOC, extern "C" fn(usize) -> Block)(size);
    entered(block, size, mark, me, from)
}

extern "C" fn calloc_slow(count: usize, size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let bytes = count.wrapping_mul(size);
    let mark = passed_mark(me, bytes);
    let block = original!(CALLOC, extern "C" fn(usize, usize) -> Block)(count, size);
    entered(block, bytes, mark, me, from)
}

extern "C" fn posix_memalign_slow(place: *mut Block, alignment: usize, size: usize, from: From<'_>) -> i32 {
    let _in = InFlight::new();
    let me = thread();
    let mark = passed_mark(me, size);
    let answer = original!(POSIX_MEMALIGN, extern "C" fn(*mut Block, usize, usize) -> i32)(place, alignment, size);
    if answer == 0 {
        // SAFETY: the function that answered 0 has just written there.
        entered(unsafe { *place }, size, mark, me, from);
    }
    answer
}

extern "C" fn aligned_alloc_slow(alignment: usize, size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let mark = passed_mark(me, size);
    let block = original!(ALIGNED_ALLOC, extern "C" fn(usize, usize) -> Block)(alignment, size);
    entered(block, size, mark, me, from)
}

extern "C" fn memalign_slow(alignment: usize, size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let mark = passed_mark(me, size);
    let block = original!(MEMALIGN, extern "C" fn(usize, usize) -> Block)(alignment, size);
    entered(block, size, mark, me, from)
}

extern "C" fn valloc_slow(size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let mark = passed_mark(me, size);
    let block = original!(VALLOC, extern "C" fn(usize) -> Block)(size);
    entered(block, size, mark, me, from)
}

extern "C" fn pvalloc_slow(size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let me = thread();
    let mark = passed_mark(me, size);
    let block = original!(PVALLOC, extern "C" fn(usize) -> Block)(size);
    entered(block, size, mark, me, from)
}

// ------------------------------------------------------------------------------------------------ moving and freeing

/// A wrapper that may be of a sampled block, in rdi: then nothing is taken off before `$slow`.
macro_rules! moving {
    ($name:ident, $which:ident, $slow:ident, $slow_way:ident, $marked:ident, $marked_way:ident, $entry:literal, $size:literal, $taken:literal) => {
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                own_line!(),
                filtered!("rdi", "r8"),
                "jne {slow}",
                $size,
                find_slot_code!(),
                concat!("sub [r8 + rcx + {countdown}], ", $taken),
                "jle {marked}",
                "4:",
                "jmp [rip + {native} + {original}]",
                other_places!(),
                control = sym CONTROL,
                filter = const offset_of!(Control, filter),
                slots = const offset_of!(Control, slots),
                owner = const offset_of!(Slot, owner),
                countdown = const offset_of!(Slot, countdown),
                slow = sym $slow_way,
                marked = sym $marked_way,
                native = sym NATIVE,
                original = const at(number::$which),
            )
        }

        way!($slow_way, $slow, $entry);
        way!($marked_way, $marked, $entry);
    };
}
moving!(
    realloc,
    REALLOC,
    realloc_slow,
    realloc_slow_way,
    realloc_marked,
    realloc_marked_way,
    "rdx",
    "",
    "rsi"
);
moving!(
    reallocarray,
    REALLOCARRAY,
    reallocarray_slow,
    reallocarray_slow_way,
    reallocarray_marked,
    reallocarray_marked_way,
    "rcx",
    "mov r9, rsi\nimul r9, rdx\njo 4f",
    "r9"
);

/// This one may be of a sampled block; nothing was taken off yet.
pub extern "C" fn realloc_slow(old: Block, size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let mark = takes_mark(my_slot(thread()), size);
    let realloc = original!(REALLOC, extern "C" fn(Block, usize) -> Block);
    moved(old, size, mark, from, || realloc(old, size))
}

/// This one has passed a mark.
extern "C" fn realloc_marked(old: Block, size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let mark = passed_mark(thread(), size);
    let realloc = original!(REALLOC, extern "C" fn(Block, usize) -> Block);
    moved(old, size, mark, from, || realloc(old, size))
}

pub extern "C" fn reallocarray_slow(old: Block, count: usize, size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    // A product that overflows is refused by the original.
    let bytes = count.saturating_mul(size);
    let mark = if bytes < isize::MAX as usize {
        takes_mark(my_slot(thread()), bytes)
    } else {
        None
    };
    let reallocarray = original!(REALLOCARRAY, extern "C" fn(Block, usize, usize) -> Block);
    moved(old, bytes, mark, from, || reallocarray(old, count, size))
}

extern "C" fn reallocarray_marked(old: Block, count: usize, size: usize, from: From<'_>) -> Block {
    let _in = InFlight::new();
    let bytes = count.wrapping_mul(size);
    let mark = passed_mark(thread(), bytes);
    let reallocarray = original!(REALLOCARRAY, extern "C" fn(Block, usize, usize) -> Block);
    moved(old, bytes, mark, from, || reallocarray(old, count, size))
}

/// Reallocates a block that may be a sample, or is to become one. A realloc is a free followed by a new allocation, whether
/// or not the block moves.
#[inline(always)]
fn moved(old: Block, size: usize, mark: Option<u64>, from: From<'_>, original: impl FnOnce() -> Block) -> Block {
    let me = thread();
    let was = if !old.is_null() && live::may_have(old as u64) {
        sample::leave(old as u64, me)
    } else {
        None
    };
    let block = original();
    if !block.is_null() {
        return entered(block, size, mark, me, from);
    }
    // A size of 0 with no block as the answer is a free.
    if let (Some(was), true) = (was, size != 0) {
        sample::enter_again(old as u64, was, me);
    }
    block
}

/// The filter tells nearly always that the block is no sample.
#[unsafe(naked)]
extern "C" fn free() {
    naked_asm!(
        own_line!(),
        filtered!("rdi", "rcx"),
        "jne 3f",
        "2:",
        "jmp [rip + {native} + {original}]",
        // The entry goes before the block does: afterwards another thread may get the same address.
        "3:",
        "push rdi",
        "call {freed}",
        "pop rdi",
        "jmp 2b",
        control = sym CONTROL,
        filter = const offset_of!(Control, filter),
        freed = sym freed,
        native = sym NATIVE,
        original = const at(number::FREE),
    )
}

// ------------------------------------------------------------------------------------------------ mappings

/// `MAP_FAILED`
const FAILED: u64 = u64::MAX;
/// `PROT_WRITE`
const WRITABLE: u64 = 2;
/// `MAP_SHARED`
const SHARED: u64 = 1;
/// `MAP_ANONYMOUS`
const ANONYMOUS: u64 = 0x20;
/// Pages.
const PAGE: u64 = 4096;

// In a forked child the threshold is 0, and all take the slow path, which finds the gate closed.
#[unsafe(naked)]
extern "C" fn mmap() {
    naked_asm!(
        "cmp rsi, [rip + {control} + {threshold}]",
        "jae 3f",
        "jmp [rip + {native} + {original}]",
        // The entry as a seventh argument, which also aligns the stack.
        "3:",
        save_entry!(),
        "push rsp",
        "call {slow}",
        "add rsp, 56",
        "ret",
        control = sym CONTROL,
        threshold = const offset_of!(Control, mmap_threshold),
        slow = sym mmap_slow,
        native = sym NATIVE,
        original = const at(number::MMAP),
    )
}

/// For the interpreter's own calls, which are rare: all take the slow path.
#[unsafe(naked)]
extern "C" fn chunk_mmap() {
    naked_asm!(
        save_entry!(),
        "push rsp",
        "call {slow}",
        "add rsp, 56",
        "ret",
        slow = sym chunk_mmap_slow,
    )
}

type Map = extern "C" fn(u64, u64, u64, u64, u64, u64) -> u64;

/// Mappings of so many bytes and more are counted.
fn threshold() -> u64 {
    control!(mmap_threshold).load(Ordering::Relaxed)
}

/// Takes a mapping of `len` bytes off the thread's stream, if it is to be counted.
fn marked(len: u64, me: u64) -> Option<u64> {
    marked_from(threshold(), len, me)
}

/// The same, counted from `least` bytes on.
fn marked_from(least: u64, len: u64, me: u64) -> Option<u64> {
    if is_on() && len >= least && len < isize::MAX as u64 {
        takes_mark(my_slot(me), len as usize)
    } else {
        None
    }
}

pub extern "C" fn mmap_slow(
    address: u64,
    len: u64,
    protection: u64,
    flags: u64,
    file: u64,
    offset: u64,
    from: From<'_>,
) -> u64 {
    let request = [address, len, protection, flags, file, offset];
    map(request, threshold(), from)
}

/// What the interpreter maps: chunks of frames count whatever their size is. Arenas do not, since what they contain is counted as obj;
/// nor do larger private mappings, which another allocator of the interpreter makes in their place. The module `mmap`, where it is a part of
/// the interpreter, makes shared ones.
extern "C" fn chunk_mmap_slow(
    address: u64,
    len: u64,
    protection: u64,
    flags: u64,
    file: u64,
    offset: u64,
    from: From<'_>,
) -> u64 {
    let least = match (flags & SHARED != 0, len < ARENA_BYTES) {
        (true, _) => threshold(),
        (false, true) => 1,
        (false, false) => u64::MAX,
    };
    map([address, len, protection, flags, file, offset], least, from)
}

/// Maps, and enters the mapping if it is memory of `least` bytes or more that has passed a mark.
#[inline(always)]
fn map(request: [u64; 6], least: u64, from: From<'_>) -> u64 {
    let _in = InFlight::new();
    let me = thread();
    let map = original!(MMAP, Map);
    let [address, len, protection, flags, file, offset] = request;
    let is_memory = flags & ANONYMOUS != 0 && protection & WRITABLE != 0;
    let mark = if is_memory { marked_from(least, len, me) } else { None };
    let mapped = map(address, len, protection, flags, file, offset);
    if let (Some(period), true) = (mark, mapped != FAILED) {
        sample::enter_from(mapped, len, MMAP, me, period, Some(from));
    }
    mapped
}

#[unsafe(naked)]
extern "C" fn munmap() {
    naked_asm!(
        own_line!(),
        filtered!("rdi", "rcx"),
        "jne 3f",
        "jmp [rip + {native} + {original}]",
        "3:",
        "jmp {slow}",
        control = sym CONTROL,
        filter = const offset_of!(Control, filter),
        slow = sym munmap_way,
        native = sym NATIVE,
        original = const at(number::MUNMAP),
    )
}
way!(munmap_way, munmap_slow, "rdx");

/// The sample at `address`, taken out, if it is a mapping.
fn leave_mapping(address: u64, me: u64) -> Option<sample::Left> {
    if live::may_have(address) {
        sample::leave(address, me)
    } else {
        None
    }
}

/// What is left of a mapping whose beginning goes is a new one, further up.
pub extern "C" fn munmap_slow(address: u64, len: u64, from: From<'_>) -> i32 {
    let _in = InFlight::new();
    let me = thread();
    let was = leave_mapping(address, me);
    let answer = original!(MUNMAP, extern "C" fn(u64, u64) -> i32)(address, len);
    if let Some(was) = was {
        let gone = len.wrapping_add(PAGE - 1) & !(PAGE - 1);
        if answer != 0 {
            sample::enter_again(address, was, me);
        } else if gone < was.size
            && let Some(period) = marked(was.size - gone, me)
        {
            sample::enter_from(
                address.wrapping_add(gone),
                was.size - gone,
                MMAP,
                me,
                period,
                Some(from),
            );
        }
    }
    answer
}

#[unsafe(naked)]
extern "C" fn mremap() {
    naked_asm!(
        "cmp rdx, [rip + {control} + {threshold}]",
        "jae 3f",
        filtered!("rdi", "r9"),
        "jne 3f",
        "jmp [rip + {native} + {original}]",
        "3:",
        "jmp {slow}",
        control = sym CONTROL,
        filter = const offset_of!(Control, filter),
        threshold = const offset_of!(Control, mmap_threshold),
        slow = sym mremap_way,
        native = sym NATIVE,
        original = const at(number::MREMAP),
    )
}
way!(mremap_way, mremap_slow, "r9");

type Remap = extern "C" fn(u64, u64, u64, u64, u64) -> u64;

pub extern "C" fn mremap_slow(old: u64, old_len: u64, len: u64, flags: u64, place: u64, from: From<'_>) -> u64 {
    let _in = InFlight::new();
    let me = thread();
    let was = leave_mapping(old, me);
    let mark = marked(len, me);
    let mapped = original!(MREMAP, Remap)(old, old_len, len, flags, place);
    if mapped == FAILED {
        if let Some(was) = was {
            sample::enter_again(old, was, me);
        }
    } else if let Some(period) = mark {
        sample::enter_from(mapped, len, MMAP, me, period, Some(from));
    }
    mapped
}
