//! Copies of pieces of stacks, for the host to unwind: a ring of their own, so that samples never wait for it. Under the lock.
//!
//! Nothing is read that is not known to be memory, since a fault would end the target, and no system call may be made to ask.
//! What is known: the page that the return address stands on; the main thread's stack, of which the host has seen so much that it
//! is there (it only grows); and a thread's own stack, from any place on it up to the thread's control block, which both C
//! libraries keep above it: whether the stack pointer is on that one, the library's own words in that block tell.

use crate::ring::{doubled, place};
use crate::state::{bump, control};
use core::sync::atomic::Ordering;
use pyheap_protocol::record::{Entry, Head, Piece, kind};
use pyheap_protocol::ring::{fits, reserve};

/// Pages.
const PAGE: u64 = 4096;

/// Copies what is above `entry` for the sample `id`, as far as that is wanted, known to be there, and there is room.
#[inline(never)]
pub fn copy(id: u64, entry: &Entry, thread: u64) {
    let most = control!(piece_bytes).load(Ordering::Relaxed);
    if most == 0 {
        return;
    }
    let stack = core::ptr::from_ref(entry) as u64 + size_of::<Entry>() as u64;
    let there = end_of_stack(stack, thread).wrapping_sub(stack);
    let bytes = if there < most { there } else { most } & !7;
    let len = size_of::<Piece>() as u64 + bytes;
    let size = control!(pieces_len).load(Ordering::Relaxed);
    let head = control!(pieces_head).load(Ordering::Relaxed);
    let (padding, total) = reserve(head, len, size);
    let tail = doubled(control!(pieces_tail.a), control!(pieces_tail.b));
    if !tail.is_some_and(|tail| fits(head, tail, total, size)) {
        bump!(lost_pieces);
        return;
    }
    let base = control!(pieces).load(Ordering::Relaxed) as *mut u8;
    // SAFETY: the host has mapped that ring for us, and `fits` says that `total` bytes from `head` on are free.
    let to = unsafe { place(base, size, head, padding) };
    // SAFETY: `len` bytes from `to` on are of these. The bytes from `stack` on are this thread's own stack by `end_of_stack`, above
    // all frames of ours.
    unsafe {
        to.cast::<Piece>().write(Piece {
            head: Head {
                len: len as u32,
                kind: kind::PIECE,
                flags: 0,
            },
            id,
            entry: *entry,
            stack,
        });
        core::ptr::copy_nonoverlapping(stack as *const u8, to.add(size_of::<Piece>()), bytes as usize);
    }
    bump!(pieces);
    control!(pieces_head).store(head.wrapping_add(total), Ordering::Release);
}

/// Up to where there is memory, from `stack` on. The word below it is the return address that the caller has just put there.
fn end_of_stack(stack: u64, thread: u64) -> u64 {
    let end = control!(main_stack_end).load(Ordering::Relaxed);
    let low = doubled(control!(main_stack.a), control!(main_stack.b));
    if stack < end && low.is_some_and(|low| low != 0 && low <= stack) {
        return end;
    }
    if own_stack(thread).is_some_and(|base| base <= stack && stack < thread) {
        return thread;
    }
    bump!(short_pieces);
    ((stack - 8) | (PAGE - 1)) + 1
}

/// Where the calling thread's own stack begins, if it reaches up to the thread's control block. (The main thread's words say nothing of the
/// kind.)
fn own_stack(thread: u64) -> Option<u64> {
    let distance = doubled(control!(stack_block.a), control!(stack_block.b)).filter(|&distance| distance != 0)?;
    let at = thread.wrapping_add(distance) as *const u64;
    // SAFETY: the host has found that the C library keeps these two words at this distance in the control blocks of its
    // threads, which every thread has that can call malloc.
    let (base, len) = unsafe { (at.read_volatile(), at.add(1).read_volatile()) };
    (base >= PAGE && base < thread && thread - base < len).then_some(base)
}
