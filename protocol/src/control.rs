//! The control structures: identity of a region, configuration, status, counters.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What CPython's allocator of small objects maps at once, from 3.10 on; it contains what is counted as obj. The chunks that frames of
/// Python functions are in (3.11 on) are mapped by the same function and are smaller: 16 KiB, or what a frame needs.
pub const ARENA_BYTES: u64 = 1 << 20;
/// Number of per-thread slots, see [`Slot`].
pub const SLOTS: usize = 512;
/// Number of buckets of the live table.
pub const BUCKETS: usize = 1 << 18;
/// Cells of the filter that `free` looks at first, see [`Control::filter`].
pub const CELLS: usize = 1 << 16;
/// Records that may find the ring full, one after the other, before the shim takes it that nobody will ever empty it: some
/// minutes at usual rates, and seconds when every allocation is recorded.
pub const MOST_STALLED: u64 = 1 << 22;
/// One block in [`Counters::gap_objects`].
pub const GAP_UNIT: u64 = 256;
/// Frees that could not take the lock wait here.
pub const DEFERRED: usize = 256;

/// First page of a region: who put it there and where its parts are. Written by the host, inherited by forked children.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Identity {
    /// [`crate::IDENTITY_MAGIC`]
    pub magic: [u8; 16],
    /// [`crate::PROTOCOL`] of the pyheap that made the region.
    pub protocol: u32,
    /// Process id of that pyheap, as its own pid namespace numbers it.
    pub owner_pid: u32,
    /// Start time of that pyheap, in clock ticks since boot (`/proc/PID/stat` field 22): tells a reused pid.
    pub owner_start: u64,
    /// Where the region starts: the address of this page.
    pub base: u64,
    /// Length of the region in bytes.
    pub len: u64,
    /// First byte of the shim's text.
    pub text: u64,
    /// Length of the shim's text in bytes.
    pub text_len: u64,
    /// Address of the [`Control`].
    pub control: u64,
    /// Address of the [`ShimHeader`].
    pub header: u64,
    /// Process that the region was made for. A forked child finds its parent's pid here.
    pub target_pid: u32,
    /// The inode number of the pid namespace in which `owner_pid` counts; 0 if it is not known.
    pub owner_namespace: u32,
    /// Raised by the host every second.
    pub heartbeat: u64,
    /// Start of the executable page's tail that holds the stubs (0 = none).
    pub stub: u64,
    /// Addresses of the three live `PyMemAllocatorEx` (raw, mem, obj), 0 where not known yet.
    pub allocators: [u64; 3],
    /// Area for extended registers; the private stack ends there.
    pub xsave: u64,
}
const _: () = assert!(size_of::<Identity>() == 136);

/// Where the parts of the shim's image are, filled by its own relocations.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShimHeader {
    /// [`crate::IDENTITY_MAGIC`]
    pub magic: [u8; 16],
    /// [`crate::PROTOCOL`]
    pub protocol: u64,
    /// Address of the [`Control`].
    pub control: u64,
    /// Size of what must be wiped in a forked child, from `control` on; whole pages.
    pub wiped_len: u64,
    /// Address of the [`Originals`].
    pub originals: u64,
    /// `extern "C" fn()`: installs the wrappers.
    pub start: u64,
    /// `extern "C" fn()`: puts the originals back.
    pub stop: u64,
    /// The wrappers `[malloc, calloc, realloc, free]`: raw; then mem and obj over pymalloc, over anything, over an allocator
    /// that serves them by itself.
    pub wrappers: [[u64; 4]; 7],
    /// Address of the [`Native`].
    pub native: u64,
    /// The wrappers of the C library's functions, in the order of [`native::NAMES`].
    pub native_wrappers: [u64; native::COUNT],
    /// The wrapper of `mmap` for the interpreter's own calls, see [`ARENA_BYTES`].
    pub chunk_mmap: u64,
    /// The wrappers of `ffi_call`, one for each library that has one.
    pub ffi_wrappers: [u64; native::FFI_COUNT],
}
const _: () = assert!(size_of::<ShimHeader>() == 288 + 8 + 8 * native::COUNT + 8 + 8 * native::FFI_COUNT);

/// The functions of the C library that have wrappers, and libffi's.
pub mod native {
    /// The number of those of the C library.
    pub const COUNT: usize = 13;
    /// How many libffis in a process have a wrapper: a wheel may bring its own beside the system's.
    pub const FFI_COUNT: usize = 2;
    /// The number of all wrappers.
    pub const ALL: usize = COUNT + FFI_COUNT;
    /// Their names; the wrapper of a function is known by its place here. The wrappers of the other libffis follow.
    pub const NAMES: [&str; COUNT + 1] = [
        "malloc",
        "calloc",
        "realloc",
        "free",
        "posix_memalign",
        "aligned_alloc",
        "memalign",
        "valloc",
        "pvalloc",
        "reallocarray",
        "mmap",
        "munmap",
        "mremap",
        "ffi_call",
    ];
    /// The first that is about mappings.
    pub const FIRST_MAPPING: usize = MMAP;
    /// `malloc`
    pub const MALLOC: usize = 0;
    /// `calloc`
    pub const CALLOC: usize = 1;
    /// `realloc`
    pub const REALLOC: usize = 2;
    /// `free`
    pub const FREE: usize = 3;
    /// `posix_memalign`
    pub const POSIX_MEMALIGN: usize = 4;
    /// `aligned_alloc`
    pub const ALIGNED_ALLOC: usize = 5;
    /// `memalign`
    pub const MEMALIGN: usize = 6;
    /// `valloc`
    pub const VALLOC: usize = 7;
    /// `pvalloc`
    pub const PVALLOC: usize = 8;
    /// `reallocarray`
    pub const REALLOCARRAY: usize = 9;
    /// `mmap`
    pub const MMAP: usize = 10;
    /// `munmap`
    pub const MUNMAP: usize = 11;
    /// `mremap`
    pub const MREMAP: usize = 12;
    /// `ffi_call`, through which ctypes and cffi call what the loader was asked for.
    pub const FFI_CALL: usize = COUNT;
}

/// What the wrappers of the C library's functions pass on to. Written by the host before it puts any of them into place; on
/// an ordinary page, which a forked child keeps.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Native {
    /// The functions themselves; 1 where the process has none that is covered.
    pub functions: [u64; native::COUNT],
    /// 1 once the host has begun to put wrappers into place.
    pub used: u64,
    /// What the wrappers of `ffi_call` pass on to; 1 where there is none.
    pub ffi_calls: [u64; native::FFI_COUNT],
    /// Other addresses that lead to these functions: a program's that is not position-independent; 1 where there is none.
    pub aliases: [u64; native::COUNT],
}
const _: () = assert!(size_of::<Native>() == 8 * (2 * native::COUNT + 1 + native::FFI_COUNT));
/// Its bytes up to and with `used`: all that shims before [`crate::FIRST_FFI`] have.
pub const OLDEST_NATIVE_BYTES: usize = core::mem::offset_of!(Native, ffi_calls);

/// One `PyMemAllocatorEx` of CPython.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Allocator {
    /// `PyMemAllocatorEx.ctx`; never changed by us.
    pub ctx: u64,
    /// `malloc, calloc, realloc, free`
    pub functions: [u64; 4],
}

/// What was there before us, by domain. On an ordinary page: a forked child keeps it.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Originals {
    /// raw, mem, obj
    pub allocators: [Allocator; 3],
}

/// How a domain is wrapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    /// Not hooked.
    Off = 0,
    /// The raw domain: counts what reaches it.
    Raw = 1,
    /// The original is bare pymalloc: counts 1..=512, `free` untouched.
    Pymalloc = 2,
    /// The original is anything else: counts all, nested calls are not counted again, `free` probes the table.
    Generic = 3,
    /// The original serves the domain by itself (malloc): counts all, `free` probes the table.
    Flat = 4,
}

/// Progress of the start routine, in [`Control::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum StartStatus {
    /// Not run yet.
    None = 0,
    /// Hooks are in place.
    Running = 1,
    /// `mprotect` to executable was refused; the errno is in [`Control::detail`].
    NotExecutable = 2,
    /// `madvise` for fork safety was refused; nothing was installed; errno in `detail`.
    NotForkSafe = 3,
    /// The originals are not what they should be (a null pointer, or our own): nothing was installed.
    OddAllocators = 4,
    /// The stop routine ran; `detail` has a bit per pointer that was not ours any more (bit = domain * 4 + function).
    Stopped = 5,
    /// The host is about to run the stop routine: it may have run, or not.
    Stopping = 6,
    /// The host did not want the start any more when the routine came to run: nothing was installed.
    Unwanted = 7,
}

/// A word written by the host while the shim may read it: first `a`, then `b`. The reader takes `b` then `a` and
/// believes them only when equal; a copy that is torn at any byte makes them differ, or gives a value that was written.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Doubled {
    /// Written first.
    pub a: u64,
    /// Written second.
    pub b: u64,
}

/// Offsets of CPython structs that the shim's frame walk needs, in bytes. `u32::MAX` where the version has no such field.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PyLayout {
    /// `(minor << 8) | micro` of the interpreter.
    pub version: u32,
    /// [`PyLayout::WALK_FRAME_OBJECTS`] (<= 3.10), [`PyLayout::WALK_CFRAME`] (3.11, 3.12) or [`PyLayout::WALK_CURRENT`] (3.13 on).
    pub walk: u32,
    /// `PyThreadState.thread_id`
    pub tstate_thread_id: u32,
    /// `PyThreadState.frame`, `.cframe` or `.current_frame`
    pub tstate_frame: u32,
    /// `_PyCFrame.current_frame` (3.11, 3.12)
    pub cframe_current_frame: u32,
    /// `PyFrameObject.f_back` or `_PyInterpreterFrame.previous`
    pub frame_back: u32,
    /// `f_code` / `f_executable`
    pub frame_code: u32,
    /// `f_lasti` (i32), `prev_instr` or `instr_ptr` (pointer)
    pub frame_instr: u32,
    /// `_PyInterpreterFrame.owner` (u8)
    pub frame_owner: u32,
    /// Frames with this owner or above are the interpreter's own and are left out (`FRAME_OWNED_BY_CSTACK`).
    pub owner_cstack: u32,
    /// `sizeof(PyCodeObject)`, at most [`PyLayout::MAX_CODE_SIZE`]
    pub code_size: u32,
    /// `PyCodeObject.co_filename`
    pub code_filename: u32,
    /// `PyCodeObject.co_name`
    pub code_name: u32,
    /// `PyCodeObject.co_qualname` (3.11+)
    pub code_qualname: u32,
    /// `PyCodeObject.co_lnotab` / `.co_linetable`
    pub code_linetable: u32,
    /// `PyCodeObject.co_firstlineno`
    pub code_firstlineno: u32,
    /// `PyCodeObject.co_version` (3.12+)
    pub code_version: u32,
    /// `PyCodeObject.co_code_adaptive` (3.11+): the instructions start there.
    pub code_instructions: u32,
    /// `PyASCIIObject.length`
    pub str_length: u32,
    /// `PyASCIIObject.hash`
    pub str_hash: u32,
    /// `PyASCIIObject.state`
    pub str_state: u32,
    /// Lowest bit of `kind` within the state word (3 bits); `compact` and `ascii` are the two bits above it.
    pub str_kind_bit: u32,
    /// `sizeof(PyASCIIObject)`
    pub str_ascii_data: u32,
    /// `sizeof(PyCompactUnicodeObject)`
    pub str_compact_data: u32,
    /// `PyVarObject.ob_size`
    pub var_size: u32,
    /// `PyBytesObject.ob_sval`
    pub bytes_data: u32,
    /// `PyThreadState.state` (3.14 on, without the GIL): 1 while the thread may touch objects.
    pub tstate_state: u32,
    /// `_PyInterpreterFrame.tlbc_index` (i32; 3.14 on, without the GIL): which copy of the bytecode it runs.
    pub frame_tlbc_index: u32,
    /// `PyCodeObject.co_tlbc` (3.14 on, without the GIL): pointer to the copies, first their number, then an address each.
    pub code_tlbc: u32,
    /// Distance (i32) from the thread pointer to where a thread keeps the address of its `PyThreadState`, for interpreters
    /// whose functions have no names.
    pub own_tstate: u32,
    /// Distance (i32) from the thread pointer to where the C library keeps the thread's number (`gettid`), an i32.
    pub thread_number: u32,
    /// `_PyInterpreterFrame.is_entry` (u8; 3.11 only): the frame is the outermost of those that one call of the C function runs.
    pub frame_entry: u32,
}
const _: () = assert!(size_of::<PyLayout>() == 32 * 4);

impl PyLayout {
    /// A field that this version does not have.
    pub const ABSENT: u32 = u32::MAX;
    /// Frames are `PyFrameObject`s linked by `f_back`.
    pub const WALK_FRAME_OBJECTS: u32 = 1;
    /// Frames are `_PyInterpreterFrame`s, found by `tstate->cframe->current_frame`.
    pub const WALK_CFRAME: u32 = 2;
    /// Frames are `_PyInterpreterFrame`s, found by `tstate->current_frame`.
    pub const WALK_CURRENT: u32 = 3;
    /// Largest `sizeof(PyCodeObject)` that a [`crate::record::Code`] carries.
    pub const MAX_CODE_SIZE: u32 = 320;
}

/// Written by the host before the start, read-only afterwards.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Mean distance of two samples in bytes; 1 = every allocation.
    pub period: u64,
    /// Seed of the shim's random numbers.
    pub seed: u64,
    /// Base of the whole region and its length.
    pub region: u64,
    /// See `region`.
    pub region_len: u64,
    /// The slab of live entries ([`crate::table::Entry`]): address.
    pub slab: u64,
    /// Entries in the slab.
    pub slab_entries: u64,
    /// The ring's bytes: address.
    pub ring: u64,
    /// Size of the ring in bytes: a power of two.
    pub ring_len: u64,
    /// Table of known code objects ([`crate::table::KnownCode`]): address.
    pub codes: u64,
    /// Its entries, a power of two.
    pub codes_len: u64,
    /// Table of known stacks ([`crate::table::KnownStack`]): address.
    pub stacks: u64,
    /// Its entries, a power of two.
    pub stacks_len: u64,
    /// Scratch for one stack: [`crate::record::MAX_FRAMES`] words.
    pub scratch: u64,
    /// `_PyRuntime.allocators.standard` (3.12+), else 0.
    pub allocators: u64,
    /// `PyMem_GetAllocator`, where `allocators` is 0.
    pub get_allocator: u64,
    /// `PyMem_SetAllocator`, where `allocators` is 0.
    pub set_allocator: u64,
    /// Function without arguments that gives the current thread state (`_PyThreadState_UncheckedGet` …), or 0, see
    /// [`PyLayout::own_tstate`].
    pub current_tstate: u64,
    /// `PyGILState_GetThisThreadState`, or 0.
    pub gilstate_tstate: u64,
    /// The word of `_PyRuntime` that is not zero while the interpreter shuts down.
    pub finalizing: u64,
    /// The interpreter's text: a pymalloc must lie in it.
    pub text: u64,
    /// Its length.
    pub text_len: u64,
    /// Bit per domain: hook it.
    pub domains: u32,
    /// 1 = a bare pymalloc may be treated as such (the 513 route).
    pub allow_pymalloc: u32,
    /// Offsets for the frame walk.
    pub layout: PyLayout,
}
const _: () = assert!(size_of::<Config>() == 21 * 8 + 8 + 128);

/// Counted by the shim, under its lock unless said otherwise. All only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Counters {
    /// Samples entered into the table.
    pub samples: u64,
    /// Sampled blocks freed.
    pub frees: u64,
    /// Allocation records that found the ring full (the table still has the sample).
    pub lost_allocs: u64,
    /// Free records that found the ring full.
    pub lost_frees: u64,
    /// Stacks that found the ring full: their sample has stack 0.
    pub lost_stacks: u64,
    /// Allocations that should have been sampled but could not take the lock in time. Atomic.
    pub contended: u64,
    /// Allocations inside our own slow path, by a signal handler. Atomic.
    pub nested: u64,
    /// Samples for which the table had no room.
    pub table_full: u64,
    /// Entries found under an address that was allocated again: their free was missed.
    pub missed_frees: u64,
    /// Frees that could neither take the lock nor be deferred. Atomic.
    pub dropped_frees: u64,
    /// Sampled small blocks that did not arrive in the raw domain: not counted as samples. Atomic.
    pub unproven: u64,
    /// Stacks deeper than [`crate::record::MAX_FRAMES`].
    pub deep_stacks: u64,
    /// Samples without Python frames (no thread state).
    pub no_python: u64,
    /// Times the shim has switched itself off, see [`MOST_STALLED`].
    pub suspensions: u64,
    /// Bytes requested by the allocations counted in `contended`, `nested`, `table_full` and `unproven`. Atomic.
    pub lost_bytes: u64,
    /// Estimated bytes that the samples in `lost_allocs` stand for.
    pub gap_bytes: u64,
    /// Estimated blocks that they stand for, in units of 1/[`GAP_UNIT`].
    pub gap_objects: u64,
    /// Pieces of native stacks that were copied.
    pub pieces: u64,
    /// Pieces for which there was no room: their samples have one native frame.
    pub lost_pieces: u64,
    /// Pieces that end with their page, because it is not known how far the stack reaches.
    pub short_pieces: u64,
}
const _: () = assert!(size_of::<Counters>() == 20 * 8);

/// What one thread needs on the fast path. Found by a hash of the thread pointer; `owner` says whose it is now.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct Slot {
    /// Thread pointer of the owner, 0 = free.
    pub owner: u64,
    /// Bytes until the next sample of this thread's stream.
    pub countdown: i64,
    /// Calls of this thread inside the shim that will return into it. Atomic.
    pub depth: u64,
    /// Period under which `countdown` was drawn, in bytes: the next sample's weight belongs to it.
    pub period: u64,
    /// Keeps the slot on a cache line of its own.
    pub reserved: [u64; 4],
}
const _: () = assert!(size_of::<Slot>() == 64);

/// The shim's state. In memory that a forked child finds zeroed: there `gate` is 0 and the shim is inert.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub struct Control {
    /// 1 while samples are wanted.
    pub gate: u64,
    /// A [`StartStatus`].
    pub status: u64,
    /// Detail of `status`.
    pub detail: u64,
    /// [`Mode`]s of raw, mem, obj.
    pub modes: [u32; 3],
    /// Nothing.
    pub reserved0: u32,
    /// 1 = the start routine may install. A host that has waited too long for it takes that back.
    pub wanted: u64,
    /// Nothing.
    pub reserved1: [u64; 2],

    /// Bytes until the next sample of the obj and mem domains over pymalloc. Under the GIL.
    pub small_countdown: i64,
    /// Period under which it was drawn.
    pub small_period: u64,
    /// Note of the last mem or obj call that was passed on to the raw domain: its stack pointer. Under the GIL, on the same
    /// cache line as the countdown, and believed only by a thread that finds `note_return` at that place of its own stack.
    pub note_stack: u64,
    /// What stood there: its return address.
    pub note_return: u64,
    /// Whose call it was: domain + 1, or [`NOTE_COUNTED`].
    pub note_label: u64,
    /// The block that a realloc noted as counted is about.
    pub note_old: u64,
    /// Nothing.
    pub reserved2: [u64; 2],

    /// Owner of the lock of everything below: a thread pointer, or 0.
    pub lock: u64,
    /// Calls in the slow path that will return into the shim. Atomic.
    pub inflight: u64,
    /// State of the random number generator. Atomic.
    pub random: u64,
    /// Entries of `deferred` in use. Atomic.
    pub deferred_used: u64,
    /// Times that the lock was taken. Under it.
    pub turn: u64,
    /// The turn + 1 whose holder was waited for in vain: nobody waits for it again.
    pub stuck: u64,
    /// Nothing.
    pub reserved3: [u64; 2],

    /// Bytes ever committed to the ring. Written by the shim.
    pub ring_head: u64,
    /// `ring_tail` as the shim last believed it.
    pub ring_tail_seen: u64,
    /// Records that found the ring full since the last one that did not. At [`MOST_STALLED`] the shim switches itself off.
    pub stalled: u64,
    /// Nothing.
    pub reserved4: [u64; 5],
    /// Bytes ever consumed from the ring. Written by the host.
    pub ring_tail: Doubled,
    /// The period that the host wants from now on, in bytes; it only ever grows. Written by the host.
    pub period_wanted: Doubled,
    /// Entries of the slab that are still to be thinned after a change of period, from the last one used down to here.
    pub thin_left: u64,
    /// Distance from the thread pointer to where the C library keeps the lowest address of a thread's stack and, in the next
    /// word, its size; 0 where that is not known. Written by the host.
    pub stack_block: Doubled,
    /// Nothing.
    pub reserved5: u64,

    /// Last sample id given.
    pub last_id: u64,
    /// Entries of the slab ever used: the host reads so many.
    pub slab_used: u64,
    /// First free entry of the slab (index + 1), linked by `next`.
    pub slab_free: u64,
    /// Entries in use.
    pub live: u64,
    /// Code objects in the known-code table.
    pub codes_used: u64,
    /// Last code id given.
    pub last_code: u64,
    /// Stacks in the known-stack table.
    pub stacks_used: u64,
    /// Last stack id given.
    pub last_stack: u64,
    /// What went wrong, and how often.
    pub counters: Counters,
    /// Nothing.
    pub reserved6: [u64; 4],
    /// Addresses whose free could not take the lock, 0 = empty. Atomic.
    pub deferred: [u64; DEFERRED],
    /// Keeps what follows aligned.
    pub config: Config,
    /// Mappings of so many bytes and more are counted. Written by the host.
    pub mmap_threshold: u64,
    /// Most bytes of a stack that are copied at a native sample; 0 = none are. Written by the host before the start, as the next two.
    pub piece_bytes: u64,
    /// The ring of [`crate::record::Piece`]s: address.
    pub pieces: u64,
    /// Its size in bytes: a power of two.
    pub pieces_len: u64,
    /// Bytes ever committed to it. Written by the shim.
    pub pieces_head: u64,
    /// Bytes ever consumed from it. Written by the host.
    pub pieces_tail: Doubled,
    /// The stack of the main thread is mapped from here on at least; it only ever grows. Written by the host.
    pub main_stack: Doubled,
    /// Where that stack ends; 0 if it is not known. Written by the host before the start.
    pub main_stack_end: u64,
    /// Per-thread slots.
    pub slots: [Slot; SLOTS],
    /// How many live samples have an address in each 256 bytes of memory (every 16 MiB share a cell; 255 = as many or more,
    /// for ever). What a program frees lies where it has just worked, so the cells that it asks for stay in the cache;
    /// hashed places all over the chains' heads did not.
    pub filter: [u8; CELLS],
    /// Heads of the live table's chains: entry index + 1, 0 = empty.
    pub buckets: [u32; BUCKETS],
    /// Fills the last page.
    pub reserved8: [u64; CONTROL_FILL],
}

const CONTROL_HEAD: usize = 64 * 6
    + size_of::<Counters>()
    + 4 * 8
    + DEFERRED * 8
    + size_of::<Config>()
    + 10 * 8
    + SLOTS * 64
    + CELLS
    + BUCKETS * 4;
const CONTROL_FILL: usize = (CONTROL_HEAD.next_multiple_of(4096) - CONTROL_HEAD) / 8;
const _: () = assert!(size_of::<Control>().is_multiple_of(4096));
const _: () = assert!(core::mem::offset_of!(Control, slots).is_multiple_of(64));

// What a cure by another version needs: it never moves.
const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Identity, protocol) == 16 && offset_of!(Identity, xsave) == 128);
    assert!(offset_of!(ShimHeader, control) == 24 && offset_of!(ShimHeader, originals) == 40);
    assert!(offset_of!(ShimHeader, stop) == 56 && offset_of!(ShimHeader, wrappers) == 64);
    assert!(size_of::<Originals>() == 3 * 40);
    assert!(offset_of!(Control, gate) == 0 && offset_of!(Control, status) == 8);
    assert!(offset_of!(Control, detail) == 16 && offset_of!(Control, modes) == 24);
    assert!(offset_of!(Control, inflight) == 136);
    assert!(offset_of!(Control, config) == 2624 && offset_of!(Control, slots) == 3008 && SLOTS == 512);
    assert!(offset_of!(Config, region) == 16 && offset_of!(Config, region_len) == 24);
    assert!(size_of::<Slot>() == 64 && offset_of!(Slot, depth) == 16);
};

/// The value of [`Control::note_label`] that says "the outer wrapper has counted this already".
pub const NOTE_COUNTED: u64 = 7;
