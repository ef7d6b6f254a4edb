//! Promise: whatever happens to the files of a profile, every reader and every export gets through them, in bounded
//! time and memory.
//!
//! Thousands of mutations of small real profiles, from fixed seeds: a failure is the same on every machine, and its
//! message has the seed. `scripts/fuzz` does the same with coverage and without an end.

#![expect(
    unsafe_code,
    reason = "an allocator that counts is the only way to bound memory within a test"
)]

#[path = "common/every_way.rs"]
mod every_way;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, UNIX_EPOCH};

use pyheap::profile::facts::{EndReason, Facts, Losses, MemorySample};
use pyheap::profile::names::SuffixStyle;
use pyheap::profile::writer::{AllocDetail, Frame, ProfileWriter};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

/// What is allocated in this process, and the most that it was.
static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is handed to the system's allocator as it is; counting changes neither pointers nor layouts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promises on `layout` are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `pointer` came from `alloc` above, and so from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A mutation that takes longer than this hangs; it takes milliseconds.
const HANGS: Duration = Duration::from_secs(120);
/// No mutation of files of some KiB needs more than this. (A single length that is believed is gigabytes.)
const MOST_BYTES: usize = 256 << 20;

#[derive(Clone)]
struct Files {
    name: String,
    /// Suffix and bytes.
    files: Vec<(&'static str, Vec<u8>)>,
}

/// The original's profile of this name, cut to a size that thousands of passes can afford: its beginnings are files of a
/// recording that was killed.
fn golden(name: &str, limit: usize) -> Files {
    let base = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/heapprof")
        .join(name);
    let file = |suffix| {
        let mut bytes = std::fs::read(base.with_extension(suffix)).expect("a file of the checkout");
        bytes.truncate(limit);
        (suffix, bytes)
    };
    Files {
        name: name.to_owned(),
        files: ["hpm", "hpd", "hpc"].map(file).into(),
    }
}

/// One of our own, with a sidecar that has every kind of line.
fn ours(dir: &Path) -> Files {
    let base = dir.join("ours");
    let facts = Facts {
        pid: Some(7),
        python: Some("3.11.7".to_owned()),
        cmdline: vec!["python3".to_owned()],
        ..Facts::default()
    };
    let mut writer =
        ProfileWriter::create(&base, SuffixStyle::Plain, UNIX_EPOCH, 4096, &facts).expect("our own folder");
    let names = ["a.py", "<string>", "long/path/of/b.py", "c.py"];
    let mut traces = Vec::new();
    for depth in 1..12 {
        let frame = |place: usize| Frame {
            file: names[place % names.len()],
            line: place as u32,
            function: ["f", "", "<module>"][place % 3],
        };
        traces.push(
            writer
                .add_trace(&(0..depth).map(frame).collect::<Vec<_>>())
                .expect("it is buffered"),
        );
    }
    for step in 0..200u32 {
        let at = Duration::from_millis(u64::from(step) * 100);
        let trace = traces[step as usize % traces.len()];
        let detail = AllocDetail {
            domain: (step % 3) as u8,
            thread: step % 5,
        };
        let size = if step == 100 { 5 << 30 } else { u64::from(step) * 97 };
        writer.alloc(at, trace, size, detail);
        if step % 3 == 0 {
            writer.free(at, trace, size);
        }
    }
    let at = Duration::from_secs(20);
    writer.thread(1, "worker");
    writer.memory(at, &MemorySample::default());
    writer.losses(at, &Losses([("events_lost_ring_full".to_owned(), 3)].into()));
    writer.end(at, &EndReason::TargetKilled { signal: 9 });
    writer.flush().expect("there is room");
    let file = |suffix| {
        (
            suffix,
            std::fs::read(base.with_extension(suffix)).expect("it was just written"),
        )
    };
    Files {
        name: "ours".to_owned(),
        files: ["hpm", "hpd", "hpx"].map(file).into(),
    }
}

/// Numbers that are corners of something.
const CORNERS: [&[u8]; 9] = [
    &[0],
    &[0x7F],
    &[0x80],
    &[0xFF; 4],
    &[0xFF; 11],
    &[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1],
    &[0x80, 0x80, 0x80, 0x80, 0x10],
    b"</script>\xE2\x80\xAE\x1B[2J",
    b"\"\\u0000\",-1,1e999,",
];

/// Changes some bytes, cuts, repeats or inserts.
fn mutate(bytes: &mut Vec<u8>, random: &mut Xoshiro256PlusPlus) {
    for _ in 0..random.random_range(1..=4) {
        let place = random.random_range(0..=bytes.len());
        let end = random.random_range(place..=bytes.len().min(place + 64));
        match random.random_range(0..7) {
            0 | 1 => bytes[place..end.min(place + 1)].fill(random.random::<u8>()),
            2 => bytes.truncate(place),
            3 => drop(bytes.drain(place..end)),
            4 => {
                let corner = CORNERS[random.random_range(0..CORNERS.len())];
                bytes.splice(place..place, corner.iter().copied());
            }
            5 => {
                let corner = CORNERS[random.random_range(0..CORNERS.len())];
                bytes.splice(place..(place + corner.len()).min(bytes.len()), corner.iter().copied());
            }
            _ => {
                let piece = bytes[place..end].to_vec();
                bytes.splice(place..place, piece);
            }
        }
    }
}

/// One mutation of one profile; everything that it does follows from the seed.
fn pass(profile: &Files, seed: u64, base: &Path) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let chosen = random.random_range(0..profile.files.len());
    for (place, (suffix, bytes)) in profile.files.iter().enumerate() {
        let mut bytes = bytes.clone();
        if place == chosen || random.random_range(0..4) == 0 {
            mutate(&mut bytes, &mut random);
        }
        match *suffix {
            "hpm" => every_way::hpm(&bytes),
            "hpd" => every_way::hpd(&bytes),
            "hpc" => every_way::hpc(&bytes),
            _ => every_way::hpx(&bytes),
        }
        std::fs::write(base.with_extension(suffix), &bytes).expect("room for a small file");
    }
    every_way::profile(base);
}

/// Runs the passes on a thread of its own and waits for each, so that one that hangs is named.
fn run(profile: Files, seeds: std::ops::Range<u64>, dir: PathBuf) {
    let (started, running) = mpsc::channel();
    let name = profile.name.clone();
    let worker = std::thread::spawn(move || {
        let base = dir.join("run");
        for seed in seeds {
            let _ = started.send(seed);
            let before = NOW.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            pass(&profile, seed, &base);
            let used = PEAK.load(Ordering::Relaxed).saturating_sub(before);
            assert!(
                used < MOST_BYTES,
                "{} seed {seed}: {used} bytes of memory",
                profile.name
            );
        }
    });
    let mut last = None;
    loop {
        match running.recv_timeout(HANGS) {
            Ok(seed) => last = Some(seed),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name} seed {last:?} hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    assert!(
        worker.join().is_ok(),
        "{name}: seed {last:?} panicked; its message is above"
    );
}

/// One test, as its parts would count each other's memory.
#[test]
fn mutations_are_survived() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let ours = ours(dir.path());
    run(ours, 0..1600, dir.path().to_owned());
    std::fs::remove_file(dir.path().join("run.hpx")).expect("the last mutation's");
    for name in ["json_parse", "deep_recursion", "threads_sqlite", "unicode_paths"] {
        run(golden(name, 4000), 0..400, dir.path().to_owned());
    }
}
