//! What running calls hold: the variables of all threads' frames.
//!
//! From 3.11 frames are in chunks of memory of the thread, which are looked through word by word; up to 3.10 they are objects.

use super::heap::{DOUBTFUL, Heap, met_by};
use super::kinds::Kind;
use super::marks::Met;
use crate::frames::layout::TopFrame;
use pyheap_injector::RemoteMemory;

/// Chunks of one thread: each holds some 2,000 words at least, and recursion ends.
const MAX_CHUNKS: usize = 1 << 16;
/// Frames of one thread, up to 3.10.
const MAX_FRAMES: usize = 1 << 20;
/// Words of one chunk.
const MAX_CHUNK_WORDS: u64 = 1 << 24;
/// Before the words of a chunk: the previous one, the size, and how many words are in use if it is not the last.
const CHUNK_HEADER: u64 = 24;
/// A thread state has more bytes than this in every version.
const THREAD_STATE: u64 = 264;

/// What a thread holds.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// An object, or, in doubt, none.
    pub object: u64,
    /// A variable of a running call does; else the thread's state.
    pub in_call: bool,
    /// The code object of that call, as far as it is known.
    pub code: u64,
}

/// Marks what the thread with this `PyThreadState` holds.
pub fn mark<M: RemoteMemory>(heap: &mut Heap<'_, M>, thread: u64) {
    heap.references.clear();
    heap.look_through(thread, 0, THREAD_STATE);
    mark_references(heap, false);
    match heap.at.census.frames {
        Some(_) => _ = chunks(heap, thread),
        None => objects(heap, thread),
    }
}

/// Up to 3.10: the frames, innermost first.
fn objects<M: RemoteMemory>(heap: &mut Heap<'_, M>, thread: u64) {
    let TopFrame::Direct(top) = heap.at.base.thread.top else {
        return;
    };
    let back = heap.at.base.frame.back;
    let mut frame = thread.checked_add(top).and_then(|at| heap.blocks.word(at)).unwrap_or(0);
    for _ in 0..MAX_FRAMES {
        if frame == 0 {
            break;
        }
        heap.marks.mark(frame, Met::Referred);
        heap.held.push(Held {
            object: frame,
            in_call: true,
            code: 0,
        });
        frame = frame.checked_add(back).and_then(|at| heap.blocks.word(at)).unwrap_or(0);
    }
}

fn chunks<M: RemoteMemory>(heap: &mut Heap<'_, M>, thread: u64) -> Option<()> {
    let frames = heap.at.census.frames?;
    let mut chunk = heap.blocks.word(thread.checked_add(frames.stack_chunk)?)?;
    let top = heap.blocks.word(thread.checked_add(frames.stack_top)?)?;
    let mut words = top.checked_sub(chunk.checked_add(CHUNK_HEADER)?)? / 8;
    for _ in 0..MAX_CHUNKS {
        if chunk == 0 {
            break;
        }
        let end = CHUNK_HEADER + words.min(MAX_CHUNK_WORDS) * 8;
        heap.references.clear();
        heap.look_through(chunk, CHUNK_HEADER, end);
        mark_references(heap, true);
        chunk = heap.blocks.word(chunk)?;
        words = match chunk {
            0 => 0,
            chunk => heap.blocks.word(chunk.checked_add(16)?)?,
        };
    }
    Some(())
}

fn mark_references<M: RemoteMemory>(heap: &mut Heap<'_, M>, in_call: bool) {
    // A call begins with its code: what follows is its own.
    let mut code = 0;
    for reference in std::mem::take(&mut heap.references) {
        let object = reference & !DOUBTFUL;
        heap.marks.mark(object, met_by(reference));
        let of = heap.type_of(object).and_then(|of| heap.infos.get(of));
        if in_call && of.is_some_and(|info| info.kind == Kind::Code) {
            code = object;
        }
        heap.held.push(Held { object, in_call, code });
    }
}
