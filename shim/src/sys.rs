//! The kernel and the processor: raw system calls (only while starting) and the thread pointer.

use core::arch::asm;
use pyheap_protocol::PyLayout;

/// `madvise` of x86-64.
const SYS_MADVISE: u64 = 28;
/// Pages read as zero in a forked child (Linux 4.14).
pub const MADV_WIPEONFORK: u64 = 18;
/// Pages are not there in a forked child.
pub const MADV_DONTFORK: u64 = 10;

/// No huge pages: a table that is touched here and there must not cost 2 MiB each time.
pub const MADV_NOHUGEPAGE: u64 = 15;

/// `madvise(2)`; the kernel's raw answer, 0 or a negative errno.
pub fn madvise(address: u64, len: u64, advice: u64) -> i64 {
    let answer: i64;
    // SAFETY: the advices used here change only what a future fork copies; they touch no byte of this process. The
    // system call clobbers rcx and r11 and reads nothing through its arguments.
    unsafe {
        asm!("syscall", inlateout("rax") SYS_MADVISE => answer, in("rdi") address, in("rsi") len, in("rdx") advice,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer
}

/// The thread pointer: unique among living threads, never 0, a multiple of 16 in glibc and 8 in musl.
#[inline(always)]
pub fn thread() -> u64 {
    let pointer: u64;
    // SAFETY: on x86-64 Linux the first word of the thread control block is its own address (psABI, TLS variant II);
    // every thread that can call malloc has one.
    unsafe { asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly, pure)) };
    pointer
}

/// The calling thread's number (`gettid`), where the C library keeps it; 0 where that is not known.
pub fn number(thread: u64) -> u64 {
    let distance = crate::state::layout!(thread_number) as u32;
    if distance == PyLayout::ABSENT {
        return 0;
    }
    let at = thread.wrapping_add(i64::from(distance as i32) as u64) as *const u32;
    // SAFETY: the host has found that the threads of the interpreter have their numbers at this distance: it lies in the
    // C library's own block of a thread, which every thread has that can call malloc.
    u64::from(unsafe { at.read_volatile() })
}

/// The stack pointer, somewhere within the calling function's frame.
#[inline(always)]
pub fn stack_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}
