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
    /// Kind STACK; flags bit 0: cut in the middle, bit 1: cut at the outer end as well, [`NATIVE_FIRST`].
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
