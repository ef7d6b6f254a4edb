//! Where a thread keeps its own `PyThreadState`, in interpreters whose functions have no names.
//!
//! The shim asks `PyThreadState_GetUnchecked` and its like for the calling thread's state. A program that was linked with
//! hidden symbols and stripped has no such name. But from 3.12 on each thread notes its state where it stays as long as the
//! state lives: up to 3.14 under a key of pthread's (`_PyRuntime.autoTSSkey`), in 3.15 in a thread-local variable of the
//! program (`_Py_tss_gilstate`). Both are at a fixed distance from the thread pointer: the value of a small key within
//! glibc's `struct pthread`, and the thread-local variables of the program (not of a library) just below it.
//!
//! The distance is believed only if every thread of the interpreter has its own state there.

use super::module::Module;
use crate::frames::Layout;
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};

/// `specific_1stblock` of glibc's `struct pthread` on x86-64: the same since 2.12, and checked on every thread.
const FIRST_VALUES: u64 = 0x310;
/// That many keys have their values there; an entry is a sequence number and the value.
const KEYS_THERE: u32 = 32;
const VALUE_BYTES: u64 = 16;
/// More threads than this are not looked at.
const MAX_THREADS: usize = 4096;
/// The thread-local variables of an interpreter have some 20 bytes, those of an embedder may have some KiB.
const MAX_TLS_BYTES: u64 = 64 << 10;

/// The threads of the main interpreter: thread pointer and state.
pub(super) fn threads(
    mem: &impl RemoteMemory,
    runtime: RemoteAddr,
    layout: &Layout,
) -> Result<Vec<(u64, u64)>, MemoryError> {
    let word = |base: u64, offset: u64| mem.read_u64(RemoteAddr(base.wrapping_add(offset)));
    let main = word(runtime.0, layout.runtime.interpreters_main)?;
    let mut state = word(main, layout.interpreter.threads_head)?;
    let mut found = Vec::new();
    while state != 0 && found.len() < MAX_THREADS {
        // A state that no thread has taken yet has no thread.
        let thread = word(state, layout.thread.thread_id)?;
        if thread != 0 {
            found.push((thread, state));
        }
        state = word(state, layout.thread.next)?;
    }
    Ok(found)
}

/// The distance (to be added) from the thread pointer to where each thread has the address of its state; `None` where it
/// cannot be told.
pub(super) fn distance(mem: &impl RemoteMemory, runtime: RemoteAddr, layout: &Layout, module: &Module) -> Option<i32> {
    if layout.minor < 12 {
        return None;
    }
    // Threads come and go: a failure may be due to that.
    (0..5).find_map(|_| {
        let threads = threads(mem, runtime, layout).ok()?;
        let fits = |distance: i32| {
            let at = |thread: u64| RemoteAddr(thread.wrapping_add_signed(i64::from(distance)));
            let own = |&(thread, state): &(u64, u64)| mem.read_u64(at(thread)).is_ok_and(|found| found == state);
            !threads.is_empty() && threads.iter().all(own)
        };
        let by_key = layout.runtime.tss_key.and_then(|offset| {
            let at = |more: u64| RemoteAddr(runtime.0.wrapping_add(offset).wrapping_add(more));
            let is_made = mem.read_u32(at(0)).ok()? != 0;
            let key = mem.read_u32(at(4)).ok().filter(|key| is_made && *key < KEYS_THERE)?;
            i32::try_from(FIRST_VALUES + u64::from(key) * VALUE_BYTES + 8).ok()
        });
        by_key.filter(|&distance| fits(distance)).or_else(|| {
            let size = module.is_program.then_some(module.elf.tls_bytes)?;
            let size = i32::try_from(size.min(MAX_TLS_BYTES).next_multiple_of(8)).ok()?;
            (1..=size / 8).map(|n| -8 * n).find(|&distance| fits(distance))
        })
    })
}
