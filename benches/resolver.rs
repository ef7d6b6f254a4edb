//! The resolver: records in, events out. Prints records a second.

use pyheap::collect::Live;
use pyheap::collect::drain::Chunk;
use pyheap::collect::names::Names;
use pyheap::collect::resolve::Resolver;
use pyheap::collect::threads::Threads;
use pyheap::frames::Layout;
use pyheap_injector::{ProcessMemory, RemoteAddr};
use pyheap_protocol::record::{Alloc, Free, Head, Stack, kind};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

const STACKS: u64 = 1000;
const DEPTH: u64 = 30;
const CHUNKS: u64 = 100;
const SAMPLES: u64 = 10_000;

fn head<T>(kind: u16, more: usize) -> Head {
    Head {
        len: (size_of::<T>() + more) as u32,
        kind,
        flags: 2,
    }
}

/// A thousand stacks of thirty frames of code that was never announced: they are named all the same, as unreadable.
fn stacks() -> Vec<u8> {
    let mut bytes = Vec::new();
    for id in 1..=STACKS {
        let record = Stack {
            head: Head {
                flags: 0,
                ..head::<Stack>(kind::STACK, 8 * DEPTH as usize)
            },
            id,
            depth: DEPTH,
        };
        bytes.extend_from_slice(record.as_bytes());
        (0..DEPTH).for_each(|frame| bytes.extend_from_slice(&((id * 31 + frame) << 32).to_le_bytes()));
    }
    bytes
}

/// Samples, each freed half a chunk later.
fn samples(chunk: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for n in 0..SAMPLES {
        let id = chunk * SAMPLES + n + 1;
        let alloc = Alloc {
            head: head::<Alloc>(kind::ALLOC, 0),
            id,
            address: id * 64,
            size: 64 + id % 100,
            thread: 1,
            stack: id % STACKS + 1,
            period: 131_072,
        };
        bytes.extend_from_slice(alloc.as_bytes());
        if id > SAMPLES / 2 {
            let id = id - SAMPLES / 2;
            let head = head::<Free>(kind::FREE, 0);
            bytes.extend_from_slice(Free { head, id }.as_bytes());
        }
    }
    bytes
}

fn main() {
    let layout = Layout::of_minor(12).expect("a known version");
    let memory = ProcessMemory::new(0);
    let names = Names::new(layout, memory, 1 << 14, 1 << 15);
    let threads = Threads::of(memory, RemoteAddr::NULL, layout, None);
    let live = Arc::new(Mutex::new(Live::new(131_072)));
    let resolver = Resolver::new(names, threads, Arc::clone(&live), 7, 1 << 19);
    let (send, chunks) = sync_channel(CHUNKS as usize + 1);
    let at = Duration::ZERO;
    send.send(Chunk::Records {
        at,
        bytes: stacks(),
        pieces: Vec::new(),
    })
    .expect("there is room");
    for chunk in 0..CHUNKS {
        let bytes = samples(chunk);
        send.send(Chunk::Records {
            at,
            bytes,
            pieces: Vec::new(),
        })
        .expect("there is room");
    }
    drop(send);
    let start = Instant::now();
    resolver.run(&chunks, |_| {}, |_| true, &AtomicU64::new(0), &AtomicBool::new(false));
    let each = start.elapsed().as_secs_f64() / (CHUNKS * SAMPLES) as f64;
    let samples = pyheap::collect::resolve::lock(&live).sampled;
    assert_eq!(samples, CHUNKS * SAMPLES);
    println!(
        "resolver: {:.0} ns for a sample and its free, {:.0} samples a second",
        each * 1e9,
        1.0 / each
    );
}
