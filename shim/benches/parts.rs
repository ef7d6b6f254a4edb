//! The shim's parts, one by one, in this process: its modules are compiled in as they are, around made-up Python frames.
#![allow(
    dead_code,
    missing_docs,
    unused_imports,
    reason = "the modules' own users are not all here"
)]

#[path = "../src/control.rs"]
mod control;
#[path = "../src/ffi.rs"]
mod ffi;
#[path = "../src/frames.rs"]
mod frames;
#[path = "../src/hooks.rs"]
mod hooks;
#[path = "../src/live.rs"]
mod live;
#[path = "../src/native.rs"]
mod native;
#[path = "../src/pieces.rs"]
mod pieces;
#[path = "../src/ring.rs"]
mod ring;
#[path = "../src/sample.rs"]
mod sample;
#[path = "../src/sampler.rs"]
mod sampler;
#[path = "../src/state.rs"]
mod state;
#[path = "../src/sys.rs"]
mod sys;

use divan::{Bencher, black_box};
use pyheap_protocol::control::{Allocator, Config, Control, PyLayout};
use pyheap_protocol::record::MAX_FRAMES;
use pyheap_protocol::table::{Entry, KnownCode, KnownStack};
use std::mem::offset_of;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const RING: usize = 1 << 20;
const ENTRIES: usize = 1 << 21;
const CODES: usize = 1 << 14;
const STACKS: usize = 1 << 15;

fn main() {
    prepare();
    ring_with_reader();
    divan::main();
}

/// Zeroed memory that stays.
fn zeroed(bytes: usize) -> u64 {
    // SAFETY: a layout of more than zero bytes, aligned to a page.
    unsafe {
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).unwrap();
        std::alloc::alloc_zeroed(layout) as u64
    }
}

extern "C" fn malloc(_ctx: u64, size: usize) -> *mut u8 {
    // SAFETY: C's malloc takes any size.
    unsafe { libc::malloc(size).cast() }
}
extern "C" fn calloc(_ctx: u64, count: usize, size: usize) -> *mut u8 {
    // SAFETY: as above.
    unsafe { libc::calloc(count, size).cast() }
}
extern "C" fn realloc(_ctx: u64, block: *mut u8, size: usize) -> *mut u8 {
    // SAFETY: `block` is of `malloc` above.
    unsafe { libc::realloc(block.cast(), size).cast() }
}
extern "C" fn free(_ctx: u64, block: *mut u8) {
    // SAFETY: `block` is of `malloc` above.
    unsafe { libc::free(block.cast()) }
}

/// A made-up thread state, frame, code object, str and bytes, with the fields where [`layout`] says they are.
#[repr(C)]
struct Thread {
    id: u64,
    frame: *const Frame,
}
#[repr(C)]
struct Frame {
    back: *const Frame,
    code: *const Code,
    instr: u64,
    owner: u64,
}
#[repr(C)]
struct Code {
    head: [u64; 2],
    name: *const Text,
    file: *const Text,
    lines: *const Lines,
    first_line: u32,
    version: u32,
    instructions: [u64; 8],
}
#[repr(C)]
struct Text {
    head: [u64; 2],
    length: u64,
    hash: u64,
    state: u64,
    data: [u8; 24],
}
#[repr(C)]
struct Lines {
    head: [u64; 2],
    size: u64,
    data: [u8; 40],
}

static THREAD: AtomicPtr<Thread> = AtomicPtr::new(std::ptr::null_mut());
extern "C" fn current() -> u64 {
    THREAD.load(Ordering::Relaxed) as u64
}

fn layout() -> PyLayout {
    PyLayout {
        walk: PyLayout::WALK_CURRENT,
        tstate_thread_id: 0,
        tstate_frame: 8,
        frame_back: 0,
        frame_code: 8,
        frame_instr: 16,
        frame_owner: 24,
        owner_cstack: 3,
        code_size: size_of::<Code>() as u32,
        code_name: offset_of!(Code, name) as u32,
        code_filename: offset_of!(Code, file) as u32,
        code_qualname: PyLayout::ABSENT,
        code_linetable: offset_of!(Code, lines) as u32,
        code_firstlineno: offset_of!(Code, first_line) as u32,
        code_version: offset_of!(Code, version) as u32,
        code_instructions: offset_of!(Code, instructions) as u32,
        str_length: 16,
        str_hash: 24,
        str_state: 32,
        str_kind_bit: 2,
        str_ascii_data: 40,
        str_compact_data: 56,
        var_size: 16,
        bytes_data: 24,
        tstate_state: PyLayout::ABSENT,
        frame_tlbc_index: PyLayout::ABSENT,
        code_tlbc: PyLayout::ABSENT,
        own_tstate: PyLayout::ABSENT,
        thread_number: PyLayout::ABSENT,
        ..PyLayout::default()
    }
}

/// Sets the calling thread's stack to `depth` frames of as many functions.
fn stack(depth: usize) {
    let text = || {
        Box::leak(Box::new(Text {
            head: [1; 2],
            length: 20,
            hash: 77,
            // ASCII, compact, one byte a character.
            state: 1 << 2 | 8 << 2 | 16 << 2,
            data: *b"a name of that length\0\0\0",
        })) as *const Text
    };
    let mut back = std::ptr::null();
    for number in 0..depth {
        let lines = Lines {
            head: [1; 2],
            size: 40,
            data: [number as u8; 40],
        };
        let code = Code {
            head: [1; 2],
            name: text(),
            file: text(),
            lines: Box::leak(Box::new(lines)),
            first_line: number as u32,
            version: number as u32 + 1,
            instructions: [0; 8],
        };
        let code: *const Code = Box::leak(Box::new(code));
        let instr = code as u64 + offset_of!(Code, instructions) as u64 + 4;
        let (owner, frame) = (0, back);
        back = Box::leak(Box::new(Frame {
            back: frame,
            code,
            instr,
            owner,
        }));
    }
    let id = sys::thread();
    THREAD.store(Box::leak(Box::new(Thread { id, frame: back })), Ordering::Relaxed);
}

fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let config = Config {
            period: 131_072,
            seed: 1,
            slab: zeroed(ENTRIES * size_of::<Entry>()),
            slab_entries: ENTRIES as u64,
            ring: zeroed(RING),
            ring_len: RING as u64,
            codes: zeroed(CODES * size_of::<KnownCode>()),
            codes_len: CODES as u64,
            stacks: zeroed(STACKS * size_of::<KnownStack>()),
            stacks_len: STACKS as u64,
            scratch: zeroed(MAX_FRAMES * 8),
            current_tstate: current as *const () as u64,
            layout: layout(),
            ..Config::default()
        };
        let first: *const AtomicU64 = state::word::<{ offset_of!(Control, config) }>();
        // SAFETY: the control block's config has this form, and nobody else runs yet.
        unsafe { first.cast_mut().cast::<Config>().write(config) };
        let functions = [
            malloc as *const () as u64,
            calloc as *const () as u64,
            realloc as *const () as u64,
            free as *const () as u64,
        ];
        (0..3).for_each(|domain| state::set_original(domain, Allocator { ctx: 0, functions }));
        state::word::<{ offset_of!(Control, gate) }>().store(1, Ordering::Release);
        stack(20);
    });
}

/// The host's part: everything in the ring has been read.
fn drain() {
    let head = state::word::<{ offset_of!(Control, ring_head) }>().load(Ordering::Acquire);
    state::word::<{ offset_of!(Control, ring_tail.a) }>().store(head, Ordering::Release);
    state::word::<{ offset_of!(Control, ring_tail.b) }>().store(head, Ordering::Release);
}

/// What the ring carries, with a reader that copies it out as pyheap does: the processor time of a sample and its free on either
/// side. Batches begin when there is room, so that nothing is lost however long the reader waits for a processor.
fn ring_with_reader() {
    const BATCH: u64 = 1000;
    stack(30);
    let done = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut copy = vec![0_u8; RING];
            let own = std::process::id() as i32;
            let mut position = 0;
            let begun = thread_time();
            while done.load(Ordering::Acquire) == 0 {
                let head = state::word::<{ offset_of!(Control, ring_head) }>().load(Ordering::Acquire);
                let (from, len) = (position % RING as u64, (head - position) as usize);
                let first = len.min(RING - from as usize);
                let base = state::word::<{ offset_of!(Control, config.ring) }>().load(Ordering::Relaxed);
                for (at, piece, to) in [(from, first, 0), (0, len - first, first)] {
                    let local = libc::iovec {
                        iov_base: copy[to..].as_mut_ptr().cast(),
                        iov_len: piece,
                    };
                    let remote = libc::iovec {
                        iov_base: (base + at) as *mut _,
                        iov_len: piece,
                    };
                    // SAFETY: both ranges are ours; the copy is as long as the ring.
                    unsafe { libc::process_vm_readv(own, &raw const local, 1, &raw const remote, 1, 0) };
                }
                position = head;
                state::word::<{ offset_of!(Control, ring_tail.a) }>().store(head, Ordering::Release);
                state::word::<{ offset_of!(Control, ring_tail.b) }>().store(head, Ordering::Release);
                black_box(&copy);
                std::thread::sleep(Duration::from_millis(1));
            }
            thread_time() - begun
        });
        let (start, mut used, mut samples) = (Instant::now(), Duration::ZERO, 0_u64);
        let me = sys::thread();
        while start.elapsed() < Duration::from_secs(2) {
            let head = state::word::<{ offset_of!(Control, ring_head) }>().load(Ordering::Acquire);
            let tail = state::word::<{ offset_of!(Control, ring_tail.b) }>().load(Ordering::Acquire);
            if head - tail > RING as u64 / 2 {
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            let begun = thread_time();
            for _ in 0..BATCH {
                sample::enter(0x1000_0000, 64, 2, me, 131_072);
                sample::leave(0x1000_0000, me);
            }
            used += thread_time() - begun;
            samples += BATCH;
        }
        done.store(1, Ordering::Release);
        let reading = reader.join().expect("the reader does not panic");
        let lost = state::word::<{ offset_of!(Control, counters.lost_allocs) }>().load(Ordering::Relaxed)
            + state::word::<{ offset_of!(Control, counters.lost_frees) }>().load(Ordering::Relaxed);
        let each = |time: Duration| time.as_nanos() as f64 / samples as f64;
        println!(
            "ring of 1 MiB, depth 30, reader every millisecond: a sample and its free take {:.0} ns, reading them {:.0} ns; {lost} of \
             {samples} lost. With a core for each that is {:.0} samples a second.",
            each(used),
            each(reading),
            1e9 / each(used).max(each(reading))
        );
    });
    drain();
}

/// Processor time of the calling thread.
fn thread_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` has room for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[divan::bench]
fn sampler_distance() -> i64 {
    sampler::draw()
}

#[divan::bench(args = [5, 20, 60])]
fn sample_and_free_at_depth(bencher: Bencher<'_, '_>, depth: usize) {
    stack(depth);
    let me = sys::thread();
    bencher.bench_local(|| {
        sample::enter(0x2000_0000, 64, 2, me, 131_072);
        sample::leave(0x2000_0000, me);
        drain();
    });
}

/// Removing and inserting one of so many.
#[divan::bench(args = [1_000, 100_000, 1_000_000])]
fn live_table(bencher: Bencher<'_, '_>, live: u64) {
    let address = |n: u64| 0x5000_0000_0000 + n * 1040;
    let entry = |id| live::Sample {
        id,
        size: 64,
        stack: 1,
        thread: 1,
        domain: 2,
        period: 131_072,
    };
    (1..=live).for_each(|n| assert!(live::insert(address(n), entry(n))));
    let mut n = 0;
    bencher.bench_local(|| {
        n = n % live + 1;
        let at = address(sampler::mix(n) % live + 1);
        live::remove(at);
        live::insert(at, entry(n))
    });
    (1..=live).for_each(|n| assert!(live::remove(address(n)).is_some()));
}

/// Freeing what is no sample, among so many that are.
#[divan::bench(args = [0, 1_000, 10_000, 100_000, 1_000_000])]
fn free_of_an_unsampled_block(bencher: Bencher<'_, '_>, live: u64) {
    let address = |n: u64| 0x5000_0000_0000 + n * 1040;
    let entry = live::Sample {
        id: 1,
        size: 64,
        stack: 1,
        thread: 1,
        domain: 2,
        period: 131_072,
    };
    (1..=live).for_each(|n| assert!(live::insert(address(n), entry)));
    let mut n = 0_u64;
    bencher.bench_local(|| {
        n += 1;
        let at = 0x5000_0000_0200 + sampler::mix(n) % 1_000_000 * 1040;
        state::cell(at).load(Ordering::Relaxed) != 0 && live::may_have(at)
    });
    (1..=live).for_each(|n| assert!(live::remove(address(n)).is_some()));
}

fn pairs(bencher: Bencher<'_, '_>, [malloc, _, _, free]: [*const (); 4], size: usize) {
    // SAFETY: functions of these types.
    let (malloc, free) = unsafe {
        (
            std::mem::transmute::<*const (), extern "C" fn(u64, usize) -> *mut u8>(malloc),
            std::mem::transmute::<*const (), extern "C" fn(u64, *mut u8)>(free),
        )
    };
    bencher.bench_local(|| free(0, malloc(0, black_box(size))));
    drain();
}

/// A malloc and its free by themselves …
#[divan::bench(args = [56, 600])]
fn pair_bare(bencher: Bencher<'_, '_>, size: usize) {
    let functions = [malloc as *const (), calloc as _, realloc as _, free as _];
    pairs(bencher, functions, size);
}

/// … and through the raw domain's wrappers, one sample in 128 KiB included.
#[divan::bench(args = [56, 600])]
fn pair_raw(bencher: Bencher<'_, '_>, size: usize) {
    pairs(bencher, hooks::RAW, size);
}

/// The same through those of an interpreter without pymalloc …
#[divan::bench(args = [56, 600])]
fn pair_flat(bencher: Bencher<'_, '_>, size: usize) {
    pairs(bencher, hooks::FLAT_OBJ, size);
}

/// … and through those that return into the shim.
#[divan::bench(args = [56, 600])]
fn pair_generic(bencher: Bencher<'_, '_>, size: usize) {
    pairs(bencher, hooks::GENERIC_OBJ, size);
}
