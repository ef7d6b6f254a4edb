//! What the compiler expects of a libc: memory functions, hidden so that the target never sees them.

use core::arch::{asm, global_asm};

global_asm!(
    ".hidden memcpy",
    ".hidden memmove",
    ".hidden memset",
    ".hidden memcmp",
    ".hidden bcmp"
);

/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller's contract is memcpy's: both ranges are valid and do not overlap. The direction flag is clear
    // by the psABI.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= len {
        // SAFETY: `to` does not lie within `from..from + len`, so an ascending copy reads each byte before writing it.
        return unsafe { memcpy(to, from, len) };
    }
    let last = len.wrapping_sub(1);
    // SAFETY: the ranges are valid by the caller's contract; a descending copy is right when `to` lies within `from`'s
    // range. The direction flag is set only between these instructions.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") len => _, inout("rdi") to.wrapping_add(last) => _,
             inout("rsi") from.wrapping_add(last) => _, options(nostack));
    }
    to
}

/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8 {
    // SAFETY: `to` is valid for `len` bytes by the caller's contract.
    unsafe {
        asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") byte as u8,
             options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    let mut at = 0;
    while at < len {
        // SAFETY: both ranges are valid for `len` bytes by the caller's contract and `at < len`.
        let (x, y) = unsafe { (*a.add(at), *b.add(at)) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
        at += 1;
    }
    0
}

/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(a, b, len) }
}
