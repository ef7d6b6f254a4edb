//! The calling thread's own Python stack, and first-sight copies of the code objects on it. Under the lock.
//!
//! A thread may read its own frames without any lock: they are linked and unlinked by single pointer stores, and at an
//! allocation the chain is complete. Nothing else is trusted: pointers are checked for alignment and range, the walk is
//! bounded, and code objects are believed to be what the frame says, since the frame holds a reference.

use crate::ring;
use crate::sampler::mix;
use crate::state::{bump, config, control, layout};
use core::sync::atomic::Ordering;
use pyheap_protocol::PyLayout;
use pyheap_protocol::record::{
    Code, EMPTY_LOOP, Head, LOOPS_SHIFT, MAX_CODE_WITH_LOOPS, MAX_FRAMES, MAX_LINETABLE_BYTES, MAX_STRING_BYTES,
    MAX_WALK, NATIVE_FIRST, Segment, Stack, UNKNOWN_INSTRUCTION, WITH_LOOPS, kind,
};
use pyheap_protocol::table::{KnownCode, KnownStack};

/// Most probes in a hash table before it counts as full.
const MAX_PROBES: u64 = 64;

/// A pointer that can be one: not in the first page, in the user half, aligned to 8.
fn plausible(pointer: u64) -> bool {
    mappable(pointer) && pointer.is_multiple_of(8)
}

/// An address that user memory can have.
fn mappable(address: u64) -> bool {
    (4096..1 << 47).contains(&address)
}

/// Reads a `T` at `base + offset`.
///
/// # Safety
/// The bytes must be readable: `base` is an object of CPython and `offset` one of its fields.
#[inline(always)]
unsafe fn peek<T: Copy>(base: u64, offset: u64) -> T {
    // SAFETY: by the caller's contract; unaligned reads are fine.
    unsafe { (base.wrapping_add(offset) as *const T).read_unaligned() }
}

/// The current thread's state, or the one it has put aside while it runs without the GIL; 0 if it has none. `without_gil`: the thread
/// may be without the GIL.
fn thread_state(thread: u64, without_gil: bool) -> u64 {
    let own = layout!(own_tstate) as u32;
    if own != PyLayout::ABSENT {
        // SAFETY: the host has found that every thread of the interpreter keeps its state at this distance: in its control
        // block or in the program's own thread-local storage, which all threads have.
        let state = unsafe { peek::<u64>(thread, i64::from(own as i32) as u64) };
        // SAFETY: a thread state that is noted there is alive: its end takes it out first.
        let is_own = plausible(state) && unsafe { peek::<u64>(state, layout!(tstate_thread_id)) } == thread;
        return if is_own { state } else { 0 };
    }
    // Up to 3.11 the first one gives the state of whoever holds the GIL. That may be freed while we look at it, so a thread
    // that may not be the holder does not ask.
    const FIRST_OF_ITS_OWN: u64 = 12 << 8;
    let current = if without_gil && layout!(version) < FIRST_OF_ITS_OWN {
        0
    } else {
        config!(current_tstate)
    };
    let mut functions = [current, config!(gilstate_tstate)].into_iter();
    functions
        .find_map(|function| {
            if function == 0 {
                return None;
            }
            // SAFETY: the host looked the address up in the interpreter's symbol table: a function without arguments
            // that returns a `PyThreadState *` and neither allocates Python memory nor takes a lock.
            let state = unsafe { core::mem::transmute::<*const (), extern "C" fn() -> u64>(function as *const ())() };
            // Up to 3.11 the first function names the holder of the GIL, whoever that is: only our own state is ours.
            // SAFETY: a thread state that these functions return is alive.
            (plausible(state) && unsafe { peek::<u64>(state, layout!(tstate_thread_id)) } == thread).then_some(state)
        })
        .unwrap_or(0)
}

/// The innermost frame of a thread state, 0 if there is none.
fn innermost(state: u64) -> u64 {
    // SAFETY: `state` is the calling thread's own live thread state; the offsets are its version's.
    unsafe {
        let frame = peek::<u64>(state, layout!(tstate_frame));
        if layout!(walk) == u64::from(PyLayout::WALK_CFRAME) && plausible(frame) {
            peek(frame, layout!(cframe_current_frame))
        } else {
            frame
        }
    }
}

/// What a walk found; the frames are in the scratch area.
struct Walk {
    frames: usize,
    depth: usize,
    flags: u16,
}

/// Where frame number `at` of the scratch area lies.
fn scratch(at: usize) -> *mut u64 {
    (config!(scratch) as *mut u64).wrapping_add(at % MAX_FRAMES)
}

/// Where the bytecode begins that `frame` runs: within its code object, or, for the threads that have copies of their own, in
/// that copy. `None` where that cannot be told.
///
/// # Safety
/// `state` is the calling thread's own, `frame` one of its frames, not the interpreter's own, and `code` its code object.
unsafe fn bytecode(state: u64, frame: u64, code: u64) -> Option<u64> {
    const ATTACHED: i32 = 1;
    let common = code.wrapping_add(layout!(code_instructions));
    if layout!(code_tlbc) == u64::from(PyLayout::ABSENT) {
        return Some(common);
    }
    // SAFETY: fields of the frame and of the thread state.
    let (index, attached) = unsafe {
        (
            peek::<i32>(frame, layout!(frame_tlbc_index)),
            peek::<i32>(state, layout!(tstate_state)) == ATTACHED,
        )
    };
    if index == 0 {
        return Some(common);
    }
    // The array of copies is replaced when it grows, and the old one is freed when no thread that is attached can still
    // see it: one that has let go of the interpreter must not look.
    if !attached {
        return None;
    }
    // SAFETY: the code object is alive, and the array is while this thread is attached.
    let copies = unsafe { peek::<u64>(code, layout!(code_tlbc)) };
    if !plausible(copies) || index < 0 {
        return None;
    }
    // SAFETY: as above; the array begins with the number of its entries.
    let count = unsafe { peek::<u64>(copies, 0) };
    // SAFETY: `index` is below that number.
    let start = (u64::from(index as u32) < count).then(|| unsafe { peek::<u64>(copies, 8 + 8 * index as u64) })?;
    mappable(start).then_some(start)
}

/// Walks the calling thread's frames into the scratch area, innermost first, and announces code objects not seen before. Inside
/// of them stands `caller`, an address in native code, if it is not 0.
/// A stack deeper than [`MAX_FRAMES`] keeps its inner and its outer half.
fn walk(thread: u64, caller: u64) -> Option<Walk> {
    const HALF: usize = MAX_FRAMES / 2;
    let is_native = caller != 0;
    let mut depth = 0;
    if is_native {
        // SAFETY: `scratch` stays within the scratch area, which only the holder of the lock writes.
        unsafe { scratch(0).write(caller) };
        depth = 1;
    }
    let mut flags = if is_native { NATIVE_FIRST } else { 0 };
    let state = thread_state(thread, is_native);
    if state == 0 {
        return Some(Walk {
            frames: depth,
            depth,
            flags,
        });
    }
    let objects = layout!(walk) == u64::from(PyLayout::WALK_FRAME_OBJECTS);
    let loops = is_native && is_with_loops();
    if loops {
        flags |= WITH_LOOPS;
    }
    let first = depth;
    let mut frame = innermost(state);
    let mut steps = 0;
    while plausible(frame) && steps < MAX_WALK {
        steps += 1;
        // SAFETY: `frame` is a frame of the calling thread, linked and therefore complete; the fields are its version's.
        let (back, owner) = unsafe {
            let owner: u8 = if objects { 0 } else { peek(frame, layout!(frame_owner)) };
            (peek::<u64>(frame, layout!(frame_back)), u64::from(owner))
        };
        if objects || owner < layout!(owner_cstack) {
            // SAFETY: as above; the interpreter's own frames, whose code must not be read, are left out by `owner`.
            let code = unsafe { peek::<u64>(frame, layout!(frame_code)) } & !7;
            if plausible(code) {
                let instruction = if objects {
                    // SAFETY: as above.
                    unsafe { peek::<i32>(frame, layout!(frame_instr)) }
                } else {
                    // SAFETY: as above.
                    let (at, start) =
                        unsafe { (peek::<u64>(frame, layout!(frame_instr)), bytecode(state, frame, code)) };
                    start.map_or(UNKNOWN_INSTRUCTION, |start| at.wrapping_sub(start) as i32)
                };
                let id = code_id(code)?;
                let packed = id << 32 | u64::from(instruction as u32);
                // SAFETY: `scratch` stays within the scratch area, which only the holder of the lock writes.
                unsafe { scratch(place(depth)).write(packed) };
                depth += 1;
                let entry = layout!(frame_entry);
                // SAFETY: a field of the frame, where the version has it.
                if loops && entry != u64::from(PyLayout::ABSENT) && unsafe { peek::<u8>(frame, entry) } != 0 {
                    end_loop(depth);
                }
            }
        } else if loops && depth > first {
            end_loop(depth);
        } else if loops {
            flags |= EMPTY_LOOP;
        }
        frame = back;
    }
    if depth > MAX_FRAMES {
        flags |= 1;
        bump!(deep_stacks);
        rotate_outer_half((depth - HALF) % HALF);
    }
    if steps == MAX_WALK {
        flags |= 2;
    }
    Some(Walk {
        frames: if depth < MAX_FRAMES { depth } else { MAX_FRAMES },
        depth,
        flags,
    })
}

/// Where frame number `depth` goes: the outer half turns round and round in the second half of the scratch area.
fn place(depth: usize) -> usize {
    const HALF: usize = MAX_FRAMES / 2;
    if depth < MAX_FRAMES {
        depth
    } else {
        HALF + (depth - HALF) % HALF
    }
}

/// Whether frames are to say where calls of the interpreter's loop end.
fn is_with_loops() -> bool {
    control!(piece_bytes).load(Ordering::Relaxed) != 0
        && control!(last_code).load(Ordering::Relaxed) < MAX_CODE_WITH_LOOPS - 2 * MAX_WALK as u64
}

/// Notes at the last of `depth` frames that a call of the interpreter's loop ends there; three at most.
fn end_loop(depth: usize) {
    let last = scratch(place(depth - 1));
    // SAFETY: `scratch` stays within the scratch area, which only the holder of the lock writes; the walk has written there.
    unsafe {
        if last.read() >> LOOPS_SHIFT < 3 {
            last.write(last.read() + (1 << LOOPS_SHIFT));
        }
    }
}

/// Brings the second half of the scratch area into order: what stands at `first` comes first. Three reversals.
fn rotate_outer_half(first: usize) {
    const HALF: usize = MAX_FRAMES / 2;
    let reverse = |mut from: usize, mut to: usize| {
        while from + 1 < to {
            to -= 1;
            // SAFETY: both stay within the scratch area.
            unsafe { core::ptr::swap(scratch(from), scratch(to)) };
            from += 1;
        }
    };
    reverse(HALF, HALF + first);
    reverse(HALF + first, MAX_FRAMES);
    reverse(HALF, MAX_FRAMES);
}

/// A hash of the fields of a code object that never change while it lives, so that another object at the same address is
/// told from it. Names and tables are compared by address and by content as far as one word goes.
///
/// # Safety
/// `code` is a live code object.
unsafe fn fingerprint(code: u64) -> u64 {
    let mut hash = 0;
    let mut add = |value: u64| hash = mix(hash ^ value).wrapping_add(value);
    // SAFETY: `code` is alive by the caller's contract, and so are the objects that it owns.
    unsafe {
        let name: u64 = peek(code, layout!(code_name));
        let lines: u64 = peek(code, layout!(code_linetable));
        add(name);
        add(peek(code, layout!(code_filename)));
        add(lines);
        add(u64::from(peek::<u32>(code, layout!(code_firstlineno))));
        let version = layout!(code_version);
        let number = if version == u64::from(PyLayout::ABSENT) {
            0
        } else {
            peek::<u32>(code, version)
        };
        if number != 0 {
            add(u64::from(number));
        } else {
            // Without a version number (they run out after 2^32 code objects) the names themselves tell: `code.replace` and generated code make objects that
            // agree in all addresses.
            add(string_hash(name));
            add(string_hash(peek(code, layout!(code_filename))));
            if layout!(code_qualname) != u64::from(PyLayout::ABSENT) {
                add(string_hash(peek(code, layout!(code_qualname))));
            }
        }
        if plausible(lines) {
            let len: u64 = peek(lines, layout!(var_size));
            add(len);
            if len >= 8 {
                add(peek(lines, layout!(bytes_data)));
                add(peek(lines, layout!(bytes_data) + len - 8));
            }
        }
    }
    hash
}

/// A hash of a string's content: the one that it keeps itself, or one made here of its first and last characters (all of
/// them, up to 512 bytes).
///
/// # Safety
/// `object` is a live `str` or implausible.
unsafe fn string_hash(object: u64) -> u64 {
    const UNKNOWN: u64 = u64::MAX;
    const END: u64 = 256;
    if !plausible(object) {
        return 0;
    }
    // SAFETY: a live str has this field.
    let known: u64 = unsafe { peek(object, layout!(str_hash)) };
    if known != UNKNOWN {
        return known;
    }
    // SAFETY: by the caller's contract.
    let (data, len) = unsafe { characters(object) };
    if !mappable(data) {
        return len;
    }
    let mut hash = len;
    let mut at = 0;
    while at < len {
        if at == END && len > 2 * END {
            at = len - END;
        }
        // SAFETY: `at + 8` may reach beyond the last character only within the terminating zero's word: the bytes of the
        // tail are read one by one.
        unsafe {
            if len - at >= 8 {
                hash = mix(hash ^ peek::<u64>(data, at));
                at += 8;
            } else {
                hash = mix(hash ^ u64::from(peek::<u8>(data, at)));
                at += 1;
            }
        }
    }
    hash
}

/// Where a string's characters are, and how many bytes they take.
///
/// # Safety
/// `object` is a live `str`.
unsafe fn characters(object: u64) -> (u64, u64) {
    // SAFETY: a live str has this header.
    let (length, state): (u64, u32) = unsafe { (peek(object, layout!(str_length)), peek(object, layout!(str_state))) };
    let bits = state >> (layout!(str_kind_bit) as u32 & 31);
    let bytes = if length < 1 << 40 {
        length * u64::from(bits & 7)
    } else {
        0
    };
    let data = if bits & 8 == 0 {
        // SAFETY: a str that is not compact has the pointer to its characters there.
        unsafe { peek(object, layout!(str_compact_data)) }
    } else if bits & 16 != 0 {
        object + layout!(str_ascii_data)
    } else {
        object + layout!(str_compact_data)
    };
    (data, bytes)
}

/// The id of a code object; a new one is announced in the ring first. `None` when the ring is full.
fn code_id(code: u64) -> Option<u64> {
    // SAFETY: the frame that names `code` holds a reference to it.
    let fingerprint = unsafe { fingerprint(code) };
    let len = config!(codes_len);
    let mut at = mix(code) & (len - 1);
    let mut probes = 0;
    loop {
        // SAFETY: `at < len`; the table is only used under the lock.
        let known = unsafe { &mut *(config!(codes) as *mut KnownCode).add(at as usize) };
        if known.address == code && known.fingerprint == fingerprint {
            return Some(known.id);
        }
        if known.address == 0 || known.address == code {
            let id = control!(last_code).load(Ordering::Relaxed) + 1;
            let replaces = if known.address == code { known.id } else { 0 };
            if !announce_code(code, id, replaces) {
                return None;
            }
            control!(last_code).store(id, Ordering::Relaxed);
            let used = control!(codes_used).load(Ordering::Relaxed) + u64::from(known.address == 0);
            control!(codes_used).store(used, Ordering::Relaxed);
            *known = KnownCode {
                address: code,
                fingerprint,
                id,
            };
            if used > len / 4 * 3 {
                forget_codes(len);
            }
            return Some(id);
        }
        probes += 1;
        if probes > MAX_PROBES {
            forget_codes(len);
            probes = 0;
        }
        at = (at + 1) & (len - 1);
    }
}

/// What a FORGET record is about.
const CODES: u16 = 1;
const STACKS: u16 = 2;

/// Forgets which code objects the host was told of; it will be told again, under new ids. When the ring is full it is not
/// told of that, and only keeps more than it needs.
fn forget_codes(len: u64) {
    clear(config!(codes), len * size_of::<KnownCode>() as u64);
    control!(codes_used).store(0, Ordering::Relaxed);
    ring::push(Head {
        len: size_of::<Head>() as u32,
        kind: kind::FORGET,
        flags: CODES,
    });
}

/// The same for stacks.
fn forget_stacks(len: u64) {
    clear(config!(stacks), len * size_of::<KnownStack>() as u64);
    control!(stacks_used).store(0, Ordering::Relaxed);
    ring::push(Head {
        len: size_of::<Head>() as u32,
        kind: kind::FORGET,
        flags: STACKS,
    });
}

/// Zeroes a table.
fn clear(table: u64, bytes: u64) {
    // SAFETY: the table has that many bytes and is only used under the lock.
    unsafe { core::ptr::write_bytes(table as *mut u8, 0, bytes as usize) };
}

/// Pieces of memory to copy: address, bytes to copy, bytes that there are.
type Piece = (u64, u64, u64);

/// The memory of a string object: header and characters, or (not compact) header and characters apart.
///
/// # Safety
/// `object` is a live `str` or implausible.
unsafe fn string_pieces(object: u64) -> [Piece; 2] {
    let none = (0, 0, 0);
    if !plausible(object) {
        return [none, none];
    }
    // SAFETY: by the caller's contract.
    let (data, bytes) = unsafe { characters(object) };
    let header = data.wrapping_sub(object);
    if header == layout!(str_ascii_data) || header == layout!(str_compact_data) {
        return [piece(object, header + bytes, MAX_STRING_BYTES), none];
    }
    let header = layout!(str_compact_data) + 8;
    let data = if mappable(data) {
        piece(data, bytes, MAX_STRING_BYTES)
    } else {
        none
    };
    [(object, header, header), data]
}

/// A piece cut at `limit`.
fn piece(address: u64, full: u64, limit: usize) -> Piece {
    (address, if full < limit as u64 { full } else { limit as u64 }, full)
}

/// Copies a code object and what its names and lines need into the ring. False when the ring is full.
fn announce_code(code: u64, id: u64, replaces: u64) -> bool {
    // SAFETY: `code` is alive (its frame holds it), and with it its names and tables.
    let (name, file, qualified, lines) = unsafe {
        let qualified = if layout!(code_qualname) == u64::from(PyLayout::ABSENT) {
            0
        } else {
            peek(code, layout!(code_qualname))
        };
        let lines: u64 = peek(code, layout!(code_linetable));
        let lines = if plausible(lines) {
            let len: u64 = peek(lines, layout!(var_size));
            let len = if len < 1 << 40 { len } else { 0 };
            piece(lines, layout!(bytes_data) + len, MAX_LINETABLE_BYTES)
        } else {
            (0, 0, 0)
        };
        (
            string_pieces(peek(code, layout!(code_name))),
            string_pieces(peek(code, layout!(code_filename))),
            string_pieces(qualified),
            lines,
        )
    };
    let size = layout!(code_size);
    let pieces = [
        (code, size, size),
        name[0],
        name[1],
        file[0],
        file[1],
        qualified[0],
        qualified[1],
        lines,
    ];
    let mut len = size_of::<Code>() as u64;
    let mut segments = 0;
    for (_, bytes, _) in pieces {
        if bytes != 0 {
            len += size_of::<Segment>() as u64 + bytes.next_multiple_of(8);
            segments += 1;
        }
    }
    let Some(reserved) = ring::begin(len) else { return false };
    let mut to = reserved.place();
    // SAFETY: `begin` gave `len` bytes, which is what the pieces add up to; each piece is memory of a live object.
    unsafe {
        let head = Head {
            len: len as u32,
            kind: kind::CODE,
            flags: segments,
        };
        to.cast::<Code>().write(Code {
            head,
            id,
            address: code,
            replaces,
        });
        to = to.add(size_of::<Code>());
        for (address, bytes, full) in pieces {
            if bytes != 0 {
                let full = if full < u64::from(u32::MAX) {
                    full as u32
                } else {
                    u32::MAX
                };
                to.cast::<Segment>().write(Segment {
                    address,
                    len: bytes as u32,
                    full,
                });
                to = to.add(size_of::<Segment>());
                core::ptr::copy_nonoverlapping(address as *const u8, to, bytes as usize);
                to = to.add(bytes.next_multiple_of(8) as usize);
            }
        }
    }
    reserved.commit();
    true
}

/// The id of the calling thread's stack, announced in the ring at first sight; 0 when the ring is full.
/// `caller`: see [`walk`].
pub fn stack_id(thread: u64, caller: u64) -> u64 {
    let Some(walk) = walk(thread, caller) else {
        bump!(lost_stacks);
        return 0;
    };
    if walk.depth <= usize::from(caller != 0) {
        bump!(no_python);
    }
    let seed = (walk.depth as u64) << 1 | u64::from(caller != 0);
    let (mut hash1, mut hash2) = (seed ^ 0x5851_F42D_4C95_7F2D, !seed);
    for at in 0..walk.frames {
        // SAFETY: within the scratch area, written by the walk.
        let frame = unsafe { scratch(at).read() };
        hash1 = mix(hash1 ^ frame);
        hash2 = (hash2 ^ frame).wrapping_mul(0xFF51_AFD7_ED55_8CCD).rotate_left(31);
    }
    hash2 = mix(hash2);
    let len = config!(stacks_len);
    let mut at = hash1 & (len - 1);
    let mut probes = 0;
    loop {
        // SAFETY: `at < len`; the table is only used under the lock.
        let known = unsafe { &mut *(config!(stacks) as *mut KnownStack).add(at as usize) };
        if known.id != 0 && known.hash1 == hash1 && known.hash2 == hash2 {
            return known.id;
        }
        if known.id == 0 {
            let id = control!(last_stack).load(Ordering::Relaxed) + 1;
            if !announce_stack(&walk, id) {
                bump!(lost_stacks);
                return 0;
            }
            control!(last_stack).store(id, Ordering::Relaxed);
            *known = KnownStack { hash1, hash2, id };
            let used = control!(stacks_used).load(Ordering::Relaxed) + 1;
            control!(stacks_used).store(used, Ordering::Relaxed);
            if used > len / 4 * 3 {
                forget_stacks(len);
            }
            return id;
        }
        probes += 1;
        if probes > MAX_PROBES {
            forget_stacks(len);
            probes = 0;
        }
        at = (at + 1) & (len - 1);
    }
}

/// Copies the scratch area's frames into the ring.
fn announce_stack(walk: &Walk, id: u64) -> bool {
    let len = (size_of::<Stack>() + walk.frames * 8) as u64;
    let Some(reserved) = ring::begin(len) else { return false };
    let head = Head {
        len: len as u32,
        kind: kind::STACK,
        flags: walk.flags,
    };
    // SAFETY: `begin` gave `len` bytes; the scratch area holds `frames` words.
    unsafe {
        reserved.place().cast::<Stack>().write(Stack {
            head,
            id,
            depth: walk.depth as u64,
        });
        let to = reserved.place().add(size_of::<Stack>()).cast::<u64>();
        core::ptr::copy_nonoverlapping(scratch(0), to, walk.frames);
    }
    reserved.commit();
    true
}
