//! How many instructions the wrappers add to a call that is not sampled: counted by single steps, from the wrapper's entry
//! to the original's. The same on every machine, however loaded.

use crate::hooks;
use crate::state::{control, set_original, slot};
use core::arch::naked_asm;
use core::sync::atomic::Ordering;
use pyheap_protocol::control::Allocator;
use pyheap_protocol::table;
use std::mem::MaybeUninit;

#[unsafe(naked)]
extern "C" fn original() {
    naked_asm!("xor eax, eax", "ret")
}

/// A far countdown on both streams, nothing live, and an original that does nothing.
fn prepare() {
    let allocator = Allocator {
        ctx: 0,
        functions: [original as *const () as u64; 4],
    };
    (0..3).for_each(|domain| set_original(domain, allocator));
    control!(small_countdown).store(1 << 40, Ordering::Relaxed);
    let thread = crate::sys::thread();
    let mine = slot(table::slot(thread));
    mine.owner.store(thread, Ordering::Relaxed);
    mine.countdown.store(1 << 40, Ordering::Relaxed);
}

/// Instructions of `wrapper` called with these arguments, its jump to the original included.
fn steps(wrapper: *const (), b: u64, c: u64) -> usize {
    let (entry, end) = (wrapper as u64, original as *const () as u64);
    // SAFETY: the child only calls the wrapper and signals, neither of which allocates.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    if child == 0 {
        // SAFETY: a wrapper takes up to three words; the child stops, is stepped through the call, and is killed.
        unsafe {
            let call = std::mem::transmute::<*const (), extern "C" fn(u64, u64, u64) -> u64>(wrapper);
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            call(0, b, c);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    let mut counted = None;
    // SAFETY: an ordinary wait for our own child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    for _ in 0..100_000 {
        let mut regs = MaybeUninit::<libc::user_regs_struct>::uninit();
        // SAFETY: the child is stopped under our trace; `regs` has room for its registers, which the call fills.
        let rip = unsafe {
            assert_eq!(libc::ptrace(libc::PTRACE_GETREGS, child, 0, regs.as_mut_ptr()), 0);
            regs.assume_init().rip
        };
        if rip == entry && counted.is_none() {
            counted = Some(0);
        }
        if rip == end {
            break;
        }
        counted = counted.map(|n| n + 1);
        // SAFETY: as above.
        unsafe {
            assert_eq!(libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0), 0);
            libc::waitpid(child, &raw mut status, 0);
        }
        assert!(libc::WIFSTOPPED(status), "the child has ended");
    }
    // SAFETY: our own child.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &raw mut status, 0);
    }
    counted.unwrap_or(usize::MAX)
}

#[test]
fn an_unsampled_call_costs_few_instructions() {
    prepare();
    let [small_malloc, small_calloc, small_realloc, small_free] = hooks::SMALL_OBJ;
    let [raw_malloc, raw_calloc, raw_realloc, raw_free] = hooks::RAW;
    let [flat_malloc, _, _, flat_free] = hooks::FLAT_OBJ;
    // The free of small blocks is the original itself.
    assert!(small_free.is_null());
    let counted = [
        ("small malloc", steps(small_malloc, 56, 0), 5),
        ("small calloc", steps(small_calloc, 7, 8), 8),
        ("small realloc", steps(small_realloc, 0x1230, 56), 11),
        ("large malloc", steps(small_malloc, 600, 0), 7),
        ("large realloc", steps(small_realloc, 0x1230, 600), 8),
        ("raw malloc", steps(raw_malloc, 600, 0), 10),
        ("raw calloc", steps(raw_calloc, 6, 100), 13),
        ("raw realloc", steps(raw_realloc, 0x1230, 600), 18),
        ("raw free", steps(raw_free, 0x1230, 0), 7),
        ("malloc without pymalloc", steps(flat_malloc, 56, 0), 10),
        ("free without pymalloc", steps(flat_free, 0x1230, 0), 7),
    ];
    for (what, found, limit) in counted {
        println!("{what}: {found}");
        assert!(found <= limit, "{what}: {found} instructions, not {limit}");
    }
}
