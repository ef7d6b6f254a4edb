//! Where a thread keeps its own number: the C library has it in the thread's control block.
//!
//! The shim needs the number of the thread that allocates, and a system call for each sample would cost as much as the
//! sample, and may be forbidden. Both glibc and musl note the number when a thread begins, at a fixed distance from the thread
//! pointer.
//!
//! What it refuses to do: guess. The distance is believed only if Python's own threads have the numbers of threads there that
//! exist; otherwise samples have no thread.

use super::own_state::threads;
use crate::frames::Layout;
use pyheap_injector::observe;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::collections::HashMap;

/// `struct pthread.tid` on x86-64: glibc (2.17 to 2.42 were looked at), musl (1.2).
const DISTANCES: [i32; 2] = [720, 48];
/// Threads come and go: a failure may be due to that.
const ATTEMPTS: usize = 5;

/// The threads of `pid`: the number in the thread's own pid namespace, which is what `gettid()` says there, and that in ours.
pub fn numbers(pid: i32) -> HashMap<u32, u32> {
    let threads = observe::threads(pid);
    // All threads of a process are in one namespace; if that is ours, each has the number that we know.
    let of_first = threads.iter().find_map(|&tid| levels(pid, tid));
    let is_ours = of_first.is_some_and(|levels| levels.len() <= 1);
    let number = |tid: i32| {
        let outer = u32::try_from(tid).ok()?;
        let inner = if is_ours {
            outer
        } else {
            levels(pid, tid)?.last().copied().unwrap_or(outer)
        };
        Some((inner, outer))
    };
    threads.into_iter().filter_map(number).collect()
}

/// A thread's numbers in our pid namespace and in those below it, down to its own. `None` if it is gone.
fn levels(pid: i32, tid: i32) -> Option<Vec<u32>> {
    observe::made_file(format!("/proc/{pid}/task/{tid}/status"))
        .ok()
        .map(|status| levels_in(&status))
}

/// What a thread's line `NSpid` says, which kernels without pid namespaces do not have.
fn levels_in(status: &str) -> Vec<u32> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .unwrap_or_default();
    line.split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect()
}

/// The distance (to be added) from the thread pointer to the thread's number; `None` where it cannot be told.
pub(super) fn distance(mem: &impl RemoteMemory, runtime: RemoteAddr, layout: &Layout, pid: i32) -> Option<i32> {
    (0..ATTEMPTS).find_map(|_| {
        let threads = threads(mem, runtime, layout).ok()?;
        let known = numbers(pid);
        DISTANCES.into_iter().find(|&distance| {
            let at = |thread: u64| RemoteAddr(thread.wrapping_add_signed(i64::from(distance)));
            // A thread that has ended leaves its state for a while, and in its block 0 or nothing.
            let mut found = threads.iter().filter_map(|&(thread, _)| mem.read_u32(at(thread)).ok());
            let mut found = found.by_ref().filter(|number| *number != 0).peekable();
            found.peek().is_some() && found.all(|number| known.contains_key(&number))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_in_the_innermost_namespace_counts() {
        assert_eq!(levels_in("Name:\tx\nNSpid:\t4242\t17\nThreads:\t1\n"), [4242, 17]);
        assert!(levels_in("Name:\tx\n").is_empty());
        let own = std::process::id();
        assert_eq!(numbers(i32::try_from(own).unwrap()).get(&own), Some(&own));
    }
}
