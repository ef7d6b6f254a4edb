//! The image's header, and the two routines that the host runs by hijack: start and stop.

use crate::ffi;
use crate::hooks;
use crate::native::{self, NATIVE};
use crate::sampler;
use crate::state::{CONTROL, ORIGINALS, Wiped, config, control, half, original, set_original};
use crate::sys::{self, madvise};
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering};
use pyheap_protocol::control::native as native_functions;
use pyheap_protocol::control::{Allocator, Config, Control, Identity, Mode, ShimHeader, StartStatus};
use pyheap_protocol::{IDENTITY_MAGIC, PROTOCOL};

/// A function pointer as the header holds it.
type Code = *const ();

/// [`ShimHeader`] with pointers that the linker can relocate.
#[repr(C)]
pub struct Header {
    magic: [u8; 16],
    protocol: u64,
    control: *const Wiped,
    wiped_len: u64,
    originals: *const crate::state::Kept,
    start: extern "C" fn(),
    stop: extern "C" fn(),
    wrappers: [[Code; 4]; 7],
    native: *const native::Kept,
    native_wrappers: [Code; native_functions::COUNT],
    chunk_mmap: Code,
    ffi_wrappers: [Code; native_functions::FFI_COUNT],
}
// SAFETY: never written.
unsafe impl Sync for Header {}
const _: () = assert!(size_of::<Header>() == size_of::<ShimHeader>());
const _: () = assert!(offset_of!(Header, wrappers) == offset_of!(ShimHeader, wrappers));
const _: () = assert!(offset_of!(Header, native) == offset_of!(ShimHeader, native));
const _: () = assert!(offset_of!(Header, chunk_mmap) == offset_of!(ShimHeader, chunk_mmap));
const _: () = assert!(offset_of!(Header, ffi_wrappers) == offset_of!(ShimHeader, ffi_wrappers));

/// The only symbol of the image.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "a C-like symbol name")]
pub static pyheap_shim: Header = Header {
    magic: IDENTITY_MAGIC,
    protocol: PROTOCOL as u64,
    control: &raw const CONTROL,
    wiped_len: size_of::<Wiped>() as u64,
    originals: &raw const ORIGINALS,
    start,
    stop,
    wrappers: [
        hooks::RAW,
        hooks::SMALL_MEM,
        hooks::SMALL_OBJ,
        hooks::GENERIC_MEM,
        hooks::GENERIC_OBJ,
        hooks::FLAT_MEM,
        hooks::FLAT_OBJ,
    ],
    native: &raw const NATIVE,
    native_wrappers: native::WRAPPERS,
    chunk_mmap: native::CHUNK_MMAP,
    ffi_wrappers: ffi::WRAPPERS,
};

/// `PyMem_GetAllocator` and `PyMem_SetAllocator`.
type Access = extern "C" fn(u32, *mut Allocator);

fn access(function: u64) -> Option<Access> {
    // SAFETY: the host looked the address up as PyMem_GetAllocator or PyMem_SetAllocator, both of which are plain copies
    // of five words up to 3.11.
    (function != 0).then(|| unsafe { core::mem::transmute::<*const (), Access>(function as *const ()) })
}

/// The live `PyMemAllocatorEx` of `domain` as words, where its address is known.
fn live_words(domain: u8) -> Option<&'static [AtomicU64; 5]> {
    let table = config!(allocators);
    let address = if table != 0 {
        table + u64::from(domain) * size_of::<Allocator>() as u64
    } else {
        let identity = config!(region) as *const Identity;
        // SAFETY: the host keeps the identity at the region's start, and `domain` is 0, 1 or 2.
        unsafe {
            (&raw const (*identity).allocators)
                .cast::<u64>()
                .add(domain as usize)
                .read_volatile()
        }
    };
    // SAFETY: the host found the address as a `PyMemAllocatorEx` of the interpreter: five aligned words that are only
    // ever read and written word by word.
    (address != 0).then(|| unsafe { &*(address as *const [AtomicU64; 5]) })
}

fn read_allocator(domain: u8) -> Option<Allocator> {
    if config!(allocators) != 0 {
        let [ctx, a, b, c, d] = live_words(domain)?;
        let get = |word: &AtomicU64| word.load(Ordering::Acquire);
        return Some(Allocator {
            ctx: get(ctx),
            functions: [get(a), get(b), get(c), get(d)],
        });
    }
    let mut allocator = Allocator::default();
    access(config!(get_allocator))?(u32::from(domain), &raw mut allocator);
    Some(allocator)
}

/// The wrappers of `domain` in `mode`; a zero keeps the original.
fn wrappers(domain: u8, mode: u32) -> [Code; 4] {
    match (mode, domain) {
        (m, 0) if m == Mode::Raw as u32 => hooks::RAW,
        (m, 1) if m == Mode::Pymalloc as u32 => hooks::SMALL_MEM,
        (m, 2) if m == Mode::Pymalloc as u32 => hooks::SMALL_OBJ,
        (m, 1) if m == Mode::Flat as u32 => hooks::FLAT_MEM,
        (m, 2) if m == Mode::Flat as u32 => hooks::FLAT_OBJ,
        (m, 1) if m == Mode::Generic as u32 => hooks::GENERIC_MEM,
        (m, 2) if m == Mode::Generic as u32 => hooks::GENERIC_OBJ,
        _ => [core::ptr::null(); 4],
    }
}

fn mode(domain: u8) -> &'static core::sync::atomic::AtomicU32 {
    match domain {
        0 => half::<{ offset_of!(Control, modes) }>(),
        1 => half::<{ offset_of!(Control, modes) + 4 }>(),
        _ => half::<{ offset_of!(Control, modes) + 8 }>(),
    }
}

/// Bytes of a function's start that are looked at.
const HEAD: u64 = 160;

/// True if `a` can be bare pymalloc, whose functions serve both domains, need no context, lie in the interpreter and
/// compare the request with 512 near their start, or in a function that is called there (3.8). Every sampled request
/// proves it again (see `hooks`).
fn looks_like_pymalloc(a: &Allocator, other: &Allocator, raw: &Allocator) -> bool {
    let [malloc, ..] = a.functions;
    if a.ctx != 0 || a.functions != other.functions || a.functions == raw.functions || !in_text(malloc) {
        return false;
    }
    let mut at = 0;
    while at < HEAD {
        // SAFETY: `in_text` left room for `HEAD` bytes and more behind `malloc`.
        let (opcode, operand) = unsafe {
            (
                *((malloc + at) as *const u8),
                ((malloc + at + 1) as *const i32).read_unaligned(),
            )
        };
        const CALL: u8 = 0xE8;
        let callee = (malloc + at + 5).wrapping_add(operand as u64);
        if opcode == CALL && in_text(callee) && compares_with_512(callee) {
            return true;
        }
        at += 1;
    }
    compares_with_512(malloc)
}

/// True if `address` and what [`looks_like_pymalloc`] reads behind it lie in the interpreter's text.
fn in_text(address: u64) -> bool {
    address.wrapping_sub(config!(text)) < config!(text_len).saturating_sub(2 * HEAD)
}

/// True if the start of the function at `address`, which is `in_text`, has 511 or 512 as a 32-bit operand.
fn compares_with_512(address: u64) -> bool {
    let mut at = 0;
    while at < HEAD {
        // SAFETY: by the caller.
        let immediate = unsafe { ((address + at) as *const u32).read_unaligned() };
        if immediate == 511 || immediate == 512 {
            return true;
        }
        at += 1;
    }
    false
}

fn done(status: StartStatus, detail: u64) {
    control!(detail).store(detail, Ordering::Relaxed);
    control!(status).store(status as u64, Ordering::Release);
}

/// Bytes of both rings.
fn rings_len() -> u64 {
    config!(ring_len) + control!(pieces_len).load(Ordering::Relaxed)
}

/// Installs the wrappers. Runs once, on a private stack of the hijacked thread, whatever that thread holds: nothing here
/// waits for anything.
extern "C" fn start() {
    if control!(wanted).load(Ordering::Acquire) != 1 {
        return done(StartStatus::Unwanted, 0);
    }
    let domains = half::<{ offset_of!(Control, config) + offset_of!(Config, domains) }>().load(Ordering::Relaxed);
    let allow = half::<{ offset_of!(Control, config) + offset_of!(Config, allow_pymalloc) }>().load(Ordering::Relaxed);
    let tables = config!(slab);
    let answers = [
        madvise(
            &raw const CONTROL as u64,
            size_of::<Wiped>() as u64,
            sys::MADV_WIPEONFORK,
        ),
        madvise(tables, config!(ring) - tables, sys::MADV_WIPEONFORK),
        // The ring of pieces, if there is one, comes right behind it.
        madvise(config!(ring), rings_len(), sys::MADV_DONTFORK),
    ];
    // Kernels without huge pages refuse this, rightly.
    madvise(tables, config!(ring) + rings_len() - tables, sys::MADV_NOHUGEPAGE);
    for answer in answers {
        if answer != 0 {
            return done(StartStatus::NotForkSafe, answer.unsigned_abs());
        }
    }
    for domain in 0..3 {
        let Some(found) = read_allocator(domain) else {
            return done(StartStatus::OddAllocators, u64::from(domain));
        };
        for function in found.functions {
            let ours = function.wrapping_sub(config!(region)) < config!(region_len);
            if function == 0 || ours {
                return done(StartStatus::OddAllocators, u64::from(domain) | 16);
            }
        }
        set_original(domain, found);
    }
    control!(random).store(config!(seed), Ordering::Relaxed);
    control!(small_countdown).store(sampler::draw() as u64, Ordering::Relaxed);
    control!(small_period).store(config!(period), Ordering::Relaxed);
    let pymalloc = allow != 0 && domains & 7 == 7 && looks_like_pymalloc(original(1), original(2), original(0));
    for domain in 0..3 {
        let chosen = match (domains >> domain & 1, domain, pymalloc) {
            (0, ..) => Mode::Off,
            (_, 0, _) => Mode::Raw,
            (_, _, true) => Mode::Pymalloc,
            // The very functions of the raw domain (PYTHONMALLOC=malloc): they ask nothing of it.
            _ if original(domain) == original(0) => Mode::Flat,
            _ => Mode::Generic,
        };
        mode(domain).store(chosen as u32, Ordering::Relaxed);
    }
    control!(gate).store(1, Ordering::Release);
    for domain in 0..3 {
        if !install(domain) {
            uninstall();
            // Some of ours were there for a moment: to be left as if they had been there longer.
            return done(StartStatus::Stopped, u64::from(domain) | 32);
        }
    }
    done(StartStatus::Running, 0);
}

/// Puts the wrappers of one domain in place. Callers load `ctx` and a function one after the other; `ctx` stays what it
/// was, so each mixture of old and new functions is a working allocator. False if the program is just changing its
/// allocators itself (tracemalloc starts or stops): with another `ctx`, the functions that we found would be wrong. A word
/// is only replaced while it is what we found, so whatever the program writes, it writes over ours or keeps us out.
fn install(domain: u8) -> bool {
    let before = original(domain);
    let wrappers = wrappers(domain, mode(domain).load(Ordering::Relaxed));
    let with_wrappers = || {
        before.functions.into_iter().zip(wrappers).map(
            |(function, wrapper)| {
                if wrapper.is_null() { function } else { wrapper as u64 }
            },
        )
    };
    // Where the address is only a symbol's, what is there tells whether it is the one.
    let is_live = |words: &[&AtomicU64; 4]| {
        let same = |(word, &old): (&&AtomicU64, &u64)| word.load(Ordering::Acquire) == old;
        config!(allocators) != 0 || words.iter().zip(&before.functions).all(same)
    };
    if let Some([ctx, a, b, c, d]) = live_words(domain)
        && let words = [a, b, c, d]
        && is_live(&words)
    {
        for ((word, new), old) in words.iter().zip(with_wrappers()).zip(before.functions) {
            if word
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
                .is_err()
            {
                return false;
            }
        }
        return ctx.load(Ordering::Acquire) == before.ctx;
    }
    let mut new = *before;
    for (place, function) in new.functions.iter_mut().zip(with_wrappers()) {
        *place = function;
    }
    if new != *before
        && let Some(set) = access(config!(set_allocator))
    {
        if read_allocator(domain).as_ref() != Some(before) {
            return false;
        }
        set(u32::from(domain), &raw mut new);
    }
    true
}

/// Puts the originals back where our wrappers still are. Runs on a private stack of a hijacked thread.
extern "C" fn stop() {
    let foreign = uninstall();
    done(StartStatus::Stopped, foreign);
}

/// What [`stop`] does; the bits of pointers that are neither our wrappers nor the originals.
fn uninstall() -> u64 {
    control!(gate).store(0, Ordering::Release);
    let mut foreign = 0;
    for domain in [2, 1, 0] {
        let ours = wrappers(domain, mode(domain).load(Ordering::Relaxed));
        let before = original(domain);
        if let Some([_, words @ ..]) = live_words(domain) {
            let mut bit = 1 << (u32::from(domain) * 4);
            for ((word, wrapper), function) in words.iter().zip(ours).zip(before.functions) {
                if !wrapper.is_null() {
                    let put = word.compare_exchange(wrapper as u64, function, Ordering::AcqRel, Ordering::Acquire);
                    if put.is_err_and(|found| found != function) {
                        foreign |= bit;
                    }
                }
                bit <<= 1;
            }
        } else if let (Some(mut now), Some(set)) = (read_allocator(domain), access(config!(set_allocator))) {
            let mut changed = false;
            let mut bit = 1 << (u32::from(domain) * 4);
            for ((found, wrapper), function) in now.functions.iter_mut().zip(ours).zip(before.functions) {
                if !wrapper.is_null() && *found == wrapper as u64 {
                    *found = function;
                    changed = true;
                } else if !wrapper.is_null() && *found != function {
                    foreign |= bit;
                }
                bit <<= 1;
            }
            if changed {
                set(u32::from(domain), &raw mut now);
            }
        }
    }
    foreign
}
