//! Bytes through everything that reads what a target, or a file that it names, offers: the fuzz targets do this, and
//! `tests/hostile.rs` with a real ring.
//!
//! Nothing here may panic, whatever the bytes are, and what comes out is no larger than what went in allows.
#![allow(dead_code, reason = "each fuzz target, and the test, uses a part of this")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyheap::attach::elf::ElfFile;
use pyheap::collect::Live;
use pyheap::collect::drain::Chunk;
use pyheap::collect::names::Names;
use pyheap::collect::resolve::{Event, Resolver, lock};
use pyheap::collect::threads::Threads;
use pyheap::frames::dwarf::Structs;
use pyheap::frames::{Build, InstrUnit, Layout, LineTable};
use pyheap_injector::{ProcessMemory, RemoteAddr};
use pyheap_protocol::table::Entry;
use zerocopy::FromBytes;

const PERIOD: u64 = 131_072;
/// So many fit into the tables here.
const ROOM: u64 = 64;

/// What the resolver makes of chunks of a target of version 3.`minor`: the events, and whether it took them for damaged.
fn resolved(minor: u8, chunks: Vec<Chunk>) -> (Vec<Event>, bool) {
    let layout = Layout::of_minor(minor).expect("a known version");
    // No process has this number: nothing is read from anywhere.
    let memory = ProcessMemory::new(i32::MAX);
    let names = Names::new(layout, memory, ROOM, ROOM);
    let threads = Threads::of(memory, RemoteAddr::NULL, layout, None);
    let live = Arc::new(Mutex::new(Live::new(PERIOD)));
    let resolver = Resolver::new(names, threads, Arc::clone(&live), 7, ROOM);
    let (send, receive) = sync_channel(chunks.len() + 1);
    let bytes: u64 = chunks.iter().map(Chunk::bytes).sum();
    for chunk in chunks {
        send.send(chunk).expect("there is room");
    }
    drop(send);
    let (waiting, damaged) = (AtomicU64::new(bytes), AtomicBool::new(false));
    let events = Mutex::new(Vec::new());
    let keep = |mut some: Vec<Event>| {
        events.lock().expect("no one panicked").append(&mut some);
        true
    };
    resolver.run(&receive, |_| {}, keep, &waiting, &damaged);
    assert_eq!(waiting.load(Ordering::Relaxed), 0, "every chunk was taken");
    let live = lock(&live);
    assert!(live.len() as u64 <= 2 * ROOM && live.total.bytes >= 0.0);
    (events.into_inner().expect("no one panicked"), damaged.into_inner())
}

/// The minor version that a byte stands for, and the rest.
fn version(bytes: &[u8]) -> Option<(u8, &[u8])> {
    let (first, rest) = bytes.split_first()?;
    Some((7 + first % 8, rest))
}

/// As what was found in the ring, in two pieces, with a longer period between them.
pub fn ring(bytes: &[u8]) -> usize {
    let Some((minor, bytes)) = version(bytes) else { return 0 };
    let at = Duration::from_secs(1);
    let (first, second) = bytes.split_at((bytes.len() / 2).next_multiple_of(8).min(bytes.len()));
    let [first, second] = [first, second].map(|part| Chunk::Records {
        at,
        bytes: part.to_vec(),
        // As a ring of pieces as well: of samples that there may be.
        pieces: bytes.to_vec(),
    });
    let longer = Chunk::Period { at, period: 2 * PERIOD };
    let (events, _) = resolved(minor, vec![first, longer, second]);
    // A record has 16 bytes and gives three events at most; after a longer period what is alive is said again.
    assert!(events.len() <= bytes.len() + 16 * ROOM as usize);
    events
        .iter()
        .filter(|event| matches!(event, Event::Alloc { .. }))
        .count()
}

/// As the table of live samples, and what the ring had while it was read.
pub fn table(bytes: &[u8]) {
    let Some((minor, bytes)) = version(bytes) else { return };
    let at = Duration::from_secs(1);
    let (entries, records) = bytes.split_at(bytes.len() / 2 / 64 * 64);
    let live: Vec<Entry> = entries
        .chunks_exact(64)
        .filter_map(|bytes| Entry::read_from_bytes(bytes).ok())
        .filter(Entry::is_live)
        .collect();
    let ids = |skip: usize| live.iter().skip(skip).step_by(3).map(|entry| entry.id).collect();
    let table = Chunk::Table {
        at,
        coming: ids(0),
        going: ids(1),
        last_id: live.iter().map(|entry| entry.id).max().unwrap_or(0),
        live: live.clone(),
    };
    let bytes = records.to_vec();
    let before = Chunk::Records {
        at,
        bytes: bytes.clone(),
        pieces: bytes.clone(),
    };
    resolved(
        minor,
        vec![
            before,
            table,
            Chunk::Records {
                at,
                bytes,
                pieces: Vec::new(),
            },
        ],
    );
}

/// As a table of lines, of each of the three generations.
pub fn lines(bytes: &[u8]) {
    for minor in [8, 10, 11, 13] {
        let Ok(layout) = Layout::of_minor(minor) else { continue };
        let unit: InstrUnit = layout.instr_unit();
        let table = LineTable::new(unit, 1, bytes.to_vec());
        for instruction in (-2..200).chain([1 << 20, i32::MAX, i32::MIN]) {
            let _ = table.line_of(instruction);
        }
    }
}

/// As the file of an interpreter, or its debug file.
pub fn elf(bytes: &[u8]) {
    use std::io::Write as _;
    let mut file = tempfile::tempfile().expect("room for a small file");
    file.write_all(bytes).expect("room for a small file");
    let Ok(elf) = ElfFile::open(file) else { return };
    let _ = (elf.build_id(), elf.first_page());
    let _ = elf.symbols(&["_PyRuntime", "Py_Version", "PyMem_GetAllocator"]);
    for section in [".PyRuntime", ".gnu_debuglink", ".debug_info"] {
        if let Ok(Some(found)) = elf.section_bytes(section, 1 << 20) {
            assert!(found.len() <= 1 << 20);
        }
    }
    if let Ok(structs) = Structs::read(&elf) {
        for build in Build::all() {
            let _ = structs.layout(build);
        }
    }
}
