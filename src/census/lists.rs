//! The garbage collector's lists: where a census of a build with the GIL begins.
//!
//! They are rings through the objects themselves, linked both ways. A program that runs moves objects from one to the next
//! while they are followed, so the young ones come first: what moves meanwhile moves to a list that is still to come. Each
//! step is checked backwards; where it leads astray, the rest of the list is taken from its other end.

use super::heap::Heap;
use super::layout::ListsLayout;
use super::marks::Met;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::time::Duration;

/// The lowest two bits of links have other meanings from 3.8 on. The third has not: Debian's 3.13 has list heads at odd
/// multiples of 4.
const LINK: u64 = !3;
/// `_gc_prev`.
const PREV: u64 = 8;
/// Lists before the permanent one.
const GENERATIONS: u64 = 3;
/// A collection in progress has the lists apart; one takes some seconds at most, with tens of millions of objects.
const MAX_COLLECTION: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(2);

/// Waits until no collection is in progress; false if one still is. Memory that does not change is not waited for.
pub fn quiet<M: RemoteMemory>(memory: &M, at: RemoteAddr, changes: bool) -> bool {
    let started = std::time::Instant::now();
    loop {
        match memory.read_u32(at) {
            Ok(0) | Err(_) => return true,
            Ok(_) if changes && started.elapsed() < MAX_COLLECTION => std::thread::sleep(POLL),
            Ok(_) => return false,
        }
    }
}

/// Marks all objects in the lists of one interpreter, or of the runtime; `None` where there are no lists.
pub fn mark<M: RemoteMemory>(heap: &mut Heap<'_, M>, lists: &ListsLayout, owner: u64) -> Option<u64> {
    let place = owner.checked_add(lists.first)?;
    let first = if lists.by_pointer {
        heap.blocks.word(place)?
    } else {
        place
    };
    let mut found = 0;
    for generation in 0..GENERATIONS {
        let list = first.checked_add(generation * lists.step)?;
        found += follow(heap, list, lists.head)?;
    }
    // It may never have been set up: then it is all zeros.
    let permanent = owner.checked_add(lists.permanent)?;
    if heap.blocks.word(permanent)? != 0 {
        found += follow(heap, permanent, lists.head)?;
    }
    Some(found)
}

/// Follows one list; how many objects of it were new. `None` when it is none.
fn follow<M: RemoteMemory>(heap: &mut Heap<'_, M>, list: u64, head: u64) -> Option<u64> {
    let next = heap.blocks.word(list)? & LINK;
    let prev = heap.blocks.word(list.checked_add(PREV)?)? & LINK;
    // A list's ends lead back to it.
    let back = heap.blocks.word(next.checked_add(PREV)?)? & LINK;
    let forth = heap.blocks.word(prev)? & LINK;
    if (back, forth) != (list, list) {
        heap.blocks.forget_at(next);
        heap.blocks.forget_at(prev);
        heap.blocks.word(next.checked_add(PREV)?)?;
    }
    let forwards = walk(heap, list, 0, PREV, head);
    let mut found = forwards.new;
    if !forwards.closed {
        heap.doubts.broken_lists += 1;
        let backwards = walk(heap, list, PREV, 0, head);
        found += backwards.new;
        heap.doubts.broken_lists += u64::from(!backwards.closed && !backwards.met);
    }
    Some(found)
}

/// How following a list went.
struct Walk {
    /// Objects that were not met before.
    new: u64,
    /// It led back to the list.
    closed: bool,
    /// It led to what was met before.
    met: bool,
}

/// Follows the links at `way`, and checks them by those at `back`.
fn walk<M: RemoteMemory>(heap: &mut Heap<'_, M>, list: u64, way: u64, back: u64, head: u64) -> Walk {
    let mut walk = Walk {
        new: 0,
        closed: false,
        met: false,
    };
    let (mut node, mut known) = (list, 0_u64);
    loop {
        let Some(next) = step(heap, node, way, back) else {
            return walk;
        };
        if next == list {
            walk.closed = true;
            return walk;
        }
        let Some(object) = next.checked_add(head) else {
            return walk;
        };
        if heap.marks.mark(object, Met::Listed) {
            walk.new += 1;
            known = 0;
        } else {
            // Seen in a younger list; or the list was broken, and bites its own tail.
            known += 1;
            walk.met = true;
            if known > heap.marks.waiting() || way != 0 || !heap.marks.may_be(object) {
                return walk;
            }
        }
        node = next;
    }
}

/// The next node, if that one says so, too. Asked twice: the second time the memory is read again.
fn step<M: RemoteMemory>(heap: &mut Heap<'_, M>, node: u64, way: u64, back: u64) -> Option<u64> {
    for again in [false, true] {
        let next = heap.blocks.word(node.checked_add(way)?)? & LINK;
        let behind = next.checked_add(back).and_then(|at| heap.blocks.word(at));
        if behind.is_some_and(|behind| behind & LINK == node) {
            return Some(next);
        }
        if !again {
            heap.blocks.forget_at(node);
            heap.blocks.forget_at(next);
        }
    }
    None
}
