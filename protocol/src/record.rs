//! Records in the ring.
//!
//! Each record starts with a [`Head`], is a multiple of eight bytes long and never wraps: a [`kind::PAD`] record fills the
//! end of the ring instead.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Kinds of records.
pub mod kind {
    /// Filler up to the ring's end.
    pub const PAD: u16 = 0;
    /// [`super::Alloc`]
    pub const ALLOC: u16 = 1;
    /// [`super::Free`]
    pub const FREE: u16 = 2;
    /// [`super::Stack`], then frames
    pub const STACK: u16 = 3;
    /// [`super::Code`], then segments
    pub const CODE: u16 = 4;
    /// Only a head; flags 1: no code id given so far will come again, flags 2: no stack id will.
    pub const FORGET: u16 = 5;
    /// [`super::Piece`], then bytes; in a ring of their own
    pub const PIECE: u16 = 6;
}

/// Most frames of a stack that are kept: the inner half and the outer half of a deeper one.
pub const MAX_FRAMES: usize = 1024;
/// Most frames that are visited to find the outer half.
pub const MAX_WALK: usize = 65_536;
/// Most bytes of a string object that are copied.
pub const MAX_STRING_BYTES: usize = 16 * 1024 + 128;
/// Most bytes of a line table that are copied.
pub const MAX_LINETABLE_BYTES: usize = 64 * 1024;
/// In place of a frame's instruction: it could not be told. (No code object is so long.)
pub const UNKNOWN_INSTRUCTION: i32 = i32::MAX;
/// Flag of a [`Stack`]: its first frame is an address in native code, that of the instruction after the call.
pub const NATIVE_FIRST: u16 = 4;
/// Flag of a [`Stack`]: the two highest bits of a frame say how many calls of the interpreter's loop end with it: the next frame
/// is run by another one, further out.
pub const WITH_LOOPS: u16 = 8;
/// Flag of a [`Stack`], with [`WITH_LOOPS`]: the innermost call of the loop runs none of the frames (any more).
pub const EMPTY_LOOP: u16 = 16;
/// Where the two bits are.
pub const LOOPS_SHIFT: u32 = 62;
/// Code ids from here on leave no room for them.
pub const MAX_CODE_WITH_LOOPS: u64 = 1 << 30;
/// Most segments in a [`Code`] record.
pub const MAX_SEGMENTS: usize = 8;
/// Upper bound for any record's length.
pub const MAX_RECORD_BYTES: usize = 128 * 1024;

/// First word of every record.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Head {
    /// Length of the record in bytes, this word included.
    pub len: u32,
    /// One of [`kind`].
    pub kind: u16,
    /// Depends on the kind.
    pub flags: u16,
}
const _: () = assert!(size_of::<Head>() == 8);

/// A block was sampled.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Alloc {
    /// Kind ALLOC; the domain is in `flags`.
    pub head: Head,
    /// Never used twice.
    pub id: u64,
    /// The block. Not an identity: it is reused.
    pub address: u64,
    /// What the program asked for, in bytes.
    pub size: u64,
    /// Number of the allocating thread as its own pid namespace counts, 0 if it is not known.
    pub thread: u64,
    /// Stack id; 0 = lost, see [`crate::Counters::lost_stacks`].
    pub stack: u64,
    /// Period under which it was picked, in bytes: its weight belongs to that one.
    pub period: u64,
}
const _: () = assert!(size_of::<Alloc>() == 56);

/// A sampled block was freed.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Free {
    /// Kind FREE.
    pub head: Head,
    /// Id of the allocation.
    pub id: u64,
}
const _: () = assert!(size_of::<Free>() == 16);

/// A stack seen for the first time (or again after the shim's table was emptied: then with another id).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Stack {
    /// Kind STACK; flags bit 0: cut in the middle, bit 1: cut at the outer end as well, [`NATIVE_FIRST`], [`WITH_LOOPS`],
    /// [`EMPTY_LOOP`].
    pub head: Head,
    /// Its id.
    pub id: u64,
    /// Frames that were visited. The record holds `(len - 24) / 8` of them, innermost first, each
    /// `code id << 32 | instruction (i32)`.
    pub depth: u64,
}
const _: () = assert!(size_of::<Stack>() == 24);

/// A code object seen for the first time.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Code {
    /// Kind CODE; flags = number of segments.
    pub head: Head,
    /// Its id.
    pub id: u64,
    /// Its address at that time.
    pub address: u64,
    /// Id of the code object that was there before and is no more, or 0.
    pub replaces: u64,
}
const _: () = assert!(size_of::<Code>() == 32);

/// A piece of the target's memory that a [`Code`] record carries; `len` bytes follow, padded to eight.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Segment {
    /// Where it was.
    pub address: u64,
    /// Bytes that follow.
    pub len: u32,
    /// Bytes that there were; more than `len` when cut.
    pub full: u32,
}
const _: () = assert!(size_of::<Segment>() == 16);

/// The lowest piece of a thread's stack at a native sample, and the registers with which the caller of the allocating function
/// goes on. The bytes from `stack` on follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Piece {
    /// Kind PIECE.
    pub head: Head,
    /// Id of the sample.
    pub id: u64,
    /// The registers at the wrapper's entry.
    pub entry: Entry,
    /// The stack pointer after the return.
    pub stack: u64,
}
const _: () = assert!(size_of::<Piece>() == 16 + 56 + 8);

/// What a wrapper that takes a sample puts on the stack: the registers that a function leaves as they were, above which stands
/// the return address.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Entry {
    /// As the caller had them: rbp, rbx, r12, r13, r14, r15.
    pub registers: [u64; 6],
    /// Where the caller goes on.
    pub caller: u64,
}
const _: () = assert!(size_of::<Entry>() == 56);
