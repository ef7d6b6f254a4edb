//! The tables in the target that the host can read at any time.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A live sample. Entries never move; the host copies the slab while the shim goes on.
///
/// An entry is filled in the order `id_check`, the rest, `id`, and emptied by `id = 0`. So a copy made in ascending order
/// of addresses in which `id == id_check != 0` holds one sample's fields and no mixture: `id` was that sample's when the
/// copy began, and `id_check` would have changed first had the entry been given away before the copy ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Entry {
    /// Sample id, 0 = empty.
    pub id: u64,
    /// The block.
    pub address: u64,
    /// What the program asked for, in bytes.
    pub size: u64,
    /// Stack id; in an empty entry the next empty one (index + 1).
    pub stack: u64,
    /// Number of the allocating thread as its own pid namespace counts, 0 if it is not known.
    pub thread: u64,
    /// Period under which it was sampled, in bytes.
    pub period: u64,
    /// Next entry of the chain (index + 1); kept in an empty entry for those who are still walking.
    pub next: u32,
    /// Allocator domain.
    pub domain: u32,
    /// `id` again.
    pub id_check: u64,
}
const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    /// True for a copy that holds one live sample.
    #[must_use]
    pub const fn is_live(&self) -> bool {
        self.id != 0 && self.id == self.id_check
    }
}

/// A code object that the host has been told of.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct KnownCode {
    /// Its address, 0 = empty.
    pub address: u64,
    /// Hash of its immutable fields.
    pub fingerprint: u64,
    /// Its id.
    pub id: u64,
}
const _: () = assert!(size_of::<KnownCode>() == 24);

/// A stack that the host has been told of, by two independent 64-bit hashes of its frames.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct KnownStack {
    /// First hash.
    pub hash1: u64,
    /// Second hash.
    pub hash2: u64,
    /// Its id, 0 = empty.
    pub id: u64,
}
const _: () = assert!(size_of::<KnownStack>() == 24);

/// Bucket of an address.
#[must_use]
pub const fn bucket(address: u64) -> u32 {
    ((address >> 4) as u32).wrapping_mul(0x9E37_79B1) >> (32 - crate::control::BUCKETS.trailing_zeros())
}

/// Cell of the filter. The same arithmetic stands in the shim's assembly.
#[must_use]
pub const fn cell(address: u64) -> usize {
    (address >> 8) as usize % crate::control::CELLS
}

/// Slot of a thread pointer. The same arithmetic stands in the shim's assembly.
#[must_use]
pub const fn slot(thread: u64) -> usize {
    (((thread.wrapping_mul(0x1E37_79B1)) >> 32) & 0x7FC0) as usize / 64
}
