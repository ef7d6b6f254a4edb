//! The part of pyheap that runs inside the target process.
//!
//! A freestanding image: no libc, no loader, no thread-local storage, no symbol but [`pyheap_shim`]. The command maps and
//! relocates it, starts it, and takes it away again; see the injector.
//!
//! # Rules of code that runs in a stranger's process
//!
//! 1. Nothing here may fail where the target would not have: a request that we changed and that failed is retried as it
//!    was; when in doubt an allocation simply goes unsampled, and is counted.
//! 2. No lock is waited for without a bound, and none is held while the original allocator runs.
//! 3. No allocation, no call into Python but the two functions that read the current thread state.
//! 4. At most some 550 bytes of the caller's stack, 800 in a wrapper of the C library's functions (threads with 32 KiB stacks, greenlets): frames and names are copied from
//!    where they are into the ring or the scratch area, never through the stack.
//! 5. No system call outside [`control::start`]: a seccomp filter may kill for one.
//! 6. A signal handler may allocate at any instruction of ours on the same thread, and a forked child may find any lock
//!    held: the first is met by the lock's owner word, the second by memory that the kernel wipes in the child.
//! 7. Every entry that will return into this text is counted while it runs, so that the text can be unmapped.
//! 8. No panic, no bounds check that could become one.
#![cfg_attr(not(test), no_std)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test that fails may panic"))]

mod control;
#[cfg(test)]
mod counts;
mod ffi;
mod frames;
mod hooks;
mod live;
#[cfg(not(test))]
mod mem;
mod native;
mod pieces;
mod ring;
mod sample;
mod sampler;
mod state;
mod sys;

pub use control::pyheap_shim;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Not reachable: scripts/check-shim proves that no panic code is linked in.
    loop {
        core::hint::spin_loop();
    }
}
