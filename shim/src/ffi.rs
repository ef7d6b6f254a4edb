//! The wrappers of libffi's `ffi_call`, by which ctypes and cffi call functions whose address they have asked of the loader.
//!
//! Such an address was in no slot, so a call of `malloc` or `mmap` by it passes the wrappers by. But the call of `ffi_call` itself
//! goes through a slot, with that address as its second argument. If it is none of the functions in [`NATIVE`], libffi goes on
//! as ever. If it is, its arguments are taken from where libffi would have taken them, and the function is called from here. The
//! address of a wrapper is never given to libffi: that would leave it in its frames, where nobody could tell whether it is still needed.
//!
//! What is not plain is left to libffi: another calling convention, arguments that are no integers or pointers, too few or too many of them.

use crate::hooks::{InFlight, freed, my_slot, takes_mark};
use crate::native::{
    Block, Code, From, NATIVE, entered, mmap_slow, mremap_slow, munmap_slow, own_line, realloc_slow, reallocarray_slow,
    save_entry, way,
};
use crate::sys::thread;
use core::arch::naked_asm;
use core::mem::{offset_of, transmute};
use pyheap_protocol::control::Native;
use pyheap_protocol::control::native as number;

/// One for each libffi of a process.
pub const WRAPPERS: [Code; number::FFI_COUNT] = [ffi_call as Code, ffi_call_second as Code];

/// `FFI_UNIX64`: the convention of all of x86-64's C but Windows's.
const SYSTEM_V: u32 = 2;
/// Integers and pointers up to here are passed in registers.
const IN_REGISTERS: usize = 6;
/// How many arguments each function takes, in the order of [`number::NAMES`]; the fifth of `mremap` need not be there.
const ARGUMENTS: [usize; number::COUNT] = [1, 2, 2, 1, 3, 2, 2, 1, 1, 3, 6, 2, 4];

/// `ffi_type`, of which the rest is for structures.
#[repr(C)]
struct Type {
    size: usize,
    alignment: u16,
    kind: u16,
}

/// `ffi_cif`, of which the rest is libffi's own.
#[derive(Clone, Copy)]
#[repr(C)]
struct Interface {
    convention: u32,
    count: u32,
    types: *const *const Type,
    answer: *const Type,
}

/// `FFI_TYPE_UINT8` and so on.
mod kind {
    pub const VOID: u16 = 0;
    pub const UINT8: u16 = 5;
    pub const SINT8: u16 = 6;
    pub const UINT16: u16 = 7;
    pub const SINT16: u16 = 8;
    pub const UINT32: u16 = 9;
    pub const SINT32: u16 = 10;
    pub const UINT64: u16 = 11;
    pub const SINT64: u16 = 12;
    pub const POINTER: u16 = 14;
}

/// A wrapper compares the function with all that it knows: 26 loads from four lines of the cache, in a call that takes ctypes some
/// hundred nanoseconds.
macro_rules! wrapper {
    ($name:ident, $slow:ident, $way:ident, $number:literal) => {
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                own_line!(),
                "lea rax, [rip + {native}]",
                ".irp place, 0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96",
                "cmp rsi, [rax + {functions} + \\place]",
                "je {slow}",
                "cmp rsi, [rax + {aliases} + \\place]",
                "je {slow}",
                ".endr",
                "jmp [rip + {native} + {original}]",
                native = sym NATIVE,
                functions = const offset_of!(Native, functions),
                aliases = const offset_of!(Native, aliases),
                original = const offset_of!(Native, ffi_calls) + 8 * $number,
                slow = sym $way,
            )
        }

        way!($way, $slow, "r8");

        extern "C" fn $slow(
            interface: *const Interface,
            function: Code,
            answer: *mut u64,
            values: *const *const u8,
            from: From<'_>,
        ) {
            slow(interface, function, answer, values, from, $number);
        }
    };
}
const _: () = assert!(number::COUNT == 13, "as many places as in `wrapper`");
wrapper!(ffi_call, slow_first, first_way, 0);
wrapper!(ffi_call_second, slow_second, second_way, 1);

type Three = extern "C" fn(u64, u64, u64) -> u64;
type FfiCall = extern "C" fn(*const Interface, Code, *mut u64, *const *const u8);

/// `number` is that of the libffi.
#[inline(never)]
extern "C" fn slow(
    interface: *const Interface,
    function: Code,
    answer: *mut u64,
    values: *const *const u8,
    from: From<'_>,
    number: usize,
) {
    let _in = InFlight::new();
    let Some((which, words, kind)) = request(read(interface.cast()), function, values) else {
        let address = word(offset_of!(Native, ffi_calls) / 8 + number) as Code;
        // SAFETY: the host has found it as the `ffi_call` that the slot led to, before it has put this wrapper there.
        let ffi_call = unsafe { transmute::<Code, FfiCall>(address) };
        return ffi_call(interface, function, answer, values);
    };
    let word = call(which, words, from);
    if kind != kind::VOID && !answer.is_null() {
        // SAFETY: libffi's callers have room for a whole word, which it would have written.
        unsafe { answer.write_unaligned(widened(kind, word)) };
    }
}

/// Word number `at` of [`NATIVE`].
fn word(at: usize) -> u64 {
    if at >= size_of::<Native>() / 8 {
        return 1;
    }
    // SAFETY: within it; written by the host by single words.
    unsafe { NATIVE.0.get().cast::<u64>().wrapping_add(at).read_volatile() }
}

/// What libffi would read as well.
fn read<T: Copy>(at: *const u8) -> T {
    // SAFETY: the caller of libffi has put it there for it.
    unsafe { at.cast::<T>().read_unaligned() }
}

/// Which function that is, with what arguments, and the kind of its answer. `None`: libffi is to call it.
fn request(
    interface: Interface,
    function: Code,
    values: *const *const u8,
) -> Option<(usize, [u64; IN_REGISTERS], u16)> {
    let function = function as u64;
    let aliases = offset_of!(Native, aliases) / 8;
    let mut which = 0;
    while word(which) != function && word(aliases + which) != function {
        which += 1;
        if which == number::COUNT {
            return None;
        }
    }
    // 1 is none.
    let is_known = function != 1 && word(which) != 1;
    let count = interface.count as usize;
    let is_enough = count >= *ARGUMENTS.get(which)? && count <= IN_REGISTERS;
    if !is_known || !is_enough || interface.convention != SYSTEM_V {
        return None;
    }
    let mut words = [0; IN_REGISTERS];
    for (at, place) in words.iter_mut().enumerate().take(count) {
        let value: *const u8 = read(values.wrapping_add(at).cast());
        *place = argument(kind_of(read(interface.types.wrapping_add(at).cast())), value)?;
    }
    let kind = kind_of(interface.answer);
    let is_plain = matches!(kind, kind::VOID | kind::UINT8..=kind::SINT64 | kind::POINTER);
    is_plain.then_some((which, words, kind))
}

#[inline(never)]
fn argument(kind: u16, value: *const u8) -> Option<u64> {
    let word = match kind {
        kind::UINT8 | kind::SINT8 => u64::from(read::<u8>(value)),
        kind::UINT16 | kind::SINT16 => u64::from(read::<u16>(value)),
        kind::UINT32 | kind::SINT32 => u64::from(read::<u32>(value)),
        kind::UINT64 | kind::SINT64 | kind::POINTER => read(value),
        _ => return None,
    };
    Some(widened(kind, word))
}

fn kind_of(of: *const Type) -> u16 {
    read(of.cast::<u8>().wrapping_add(offset_of!(Type, kind)))
}

/// The lower part of `word` as libffi makes a whole one of it.
fn widened(kind: u16, word: u64) -> u64 {
    match kind {
        kind::UINT8 => u64::from(word as u8),
        kind::SINT8 => word as i8 as u64,
        kind::UINT16 => u64::from(word as u16),
        kind::SINT16 => word as i16 as u64,
        kind::UINT32 => u64::from(word as u32),
        kind::SINT32 => word as i32 as u64,
        _ => word,
    }
}

/// Calls function number `which`, and counts what it does.
fn call(which: usize, words: [u64; IN_REGISTERS], from: From<'_>) -> u64 {
    let [a, b, c, d, e, f] = words;
    match which {
        number::REALLOC => return realloc_slow(a as Block, b as usize, from) as u64,
        number::REALLOCARRAY => return reallocarray_slow(a as Block, b as usize, c as usize, from) as u64,
        number::MMAP => return mmap_slow(a, b, c, d, e, f, from),
        number::MUNMAP => return munmap_slow(a, b, from) as u64,
        number::MREMAP => return mremap_slow(a, b, c, d, e, from),
        // The entry goes before the block does, as in `free`.
        number::FREE => freed(a),
        _ => {}
    }
    let size = match which {
        number::MALLOC | number::VALLOC | number::PVALLOC => a,
        number::CALLOC => a.saturating_mul(b),
        number::POSIX_MEMALIGN => c,
        number::FREE => 0,
        _ => b,
    };
    let me = thread();
    let mark = if which != number::FREE {
        takes_mark(my_slot(me), size as usize)
    } else {
        None
    };
    // SAFETY: the host has found it in slots of that name: a function of up to three words, which are in registers whether or not
    // it takes them.
    let function = unsafe { transmute::<Code, Three>(word(which) as Code) };
    let answer = function(a, b, c);
    let block = match which {
        number::POSIX_MEMALIGN if answer as i32 == 0 => read(a as *const u8),
        number::POSIX_MEMALIGN => core::ptr::null_mut(),
        _ => answer as Block,
    };
    entered(block, size as usize, mark, me, from);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_made_whole_as_by_libffi() {
        const WORD: u64 = 0xFEDC_BA98_F6E5_84B3;
        let whole = [
            (kind::UINT8, 0xB3),
            (kind::SINT8, 0xFFFF_FFFF_FFFF_FFB3),
            (kind::UINT16, 0x84B3),
            (kind::SINT16, 0xFFFF_FFFF_FFFF_84B3),
            (kind::UINT32, 0xF6E5_84B3),
            (kind::SINT32, 0xFFFF_FFFF_F6E5_84B3),
            (kind::UINT64, WORD),
            (kind::SINT64, WORD),
            (kind::POINTER, WORD),
        ];
        for (kind, wanted) in whole {
            assert_eq!(widened(kind, WORD), wanted, "{kind}");
        }
    }
}
