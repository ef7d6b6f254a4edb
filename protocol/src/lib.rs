//! What pyheap's command and its shim agree on.
//!
//! One definition for both sides. The command (host) writes an [`Identity`] and a [`Config`] into the target, starts the
//! shim there, and reads a [`Ring`](ring) of [`record`]s and the table of live samples; the shim fills them. Everything
//! is plain little-endian memory of the *target*; the host reaches it with `process_vm_readv` and
//! `process_vm_writev` only, so there is no descriptor, no shared mapping and nothing that could raise SIGBUS.
//!
//! # Rules for a change
//!
//! 1. Whatever changes in this crate changes [`PROTOCOL`]: a target can still hold the shim of an older pyheap, and the
//!    only things that a newer one may use of it are [`Identity`] and the control words that it names.
//! 2. [`Identity`] itself only grows at its end. What a cure needs of [`ShimHeader`], [`Control`] and [`Originals`] stays where
//!    it is (asserts in [`control`]): any pyheap takes out what another version has left. A break of this rule is a new
//!    [`IDENTITY_MAGIC`].
//! 3. Fixed-width integers only, named padding, size and offset asserts beside each struct.
//! 4. A word that the host writes while the shim runs may be seen half written (the kernel's copy promises nothing):
//!    it is written twice and used only when both copies agree, see [`Doubled`].
#![cfg_attr(not(test), no_std)]

pub mod addr;
pub mod control;
pub mod record;
pub mod ring;
pub mod table;
pub mod thin;

pub use addr::RemoteAddr;
pub use control::{
    Config, Control, Counters, Doubled, Identity, Mode, Native, Originals, PyLayout, ShimHeader, Slot, StartStatus,
};

/// Version of everything in this crate.
pub const PROTOCOL: u32 = 7;

/// The oldest version that follows the rules above.
pub const OLDEST_CURABLE: u32 = 2;

/// First bytes of the [`Identity`] page, by which a region of pyheap is found in a process.
pub const IDENTITY_MAGIC: [u8; 16] = *b"pyheap region 1\n";

/// What the mapping stub writes at the start of a fresh region, before any [`Identity`] is there: the first half of
/// [`IDENTITY_MAGIC`], so that a region which was mapped and then abandoned (the command was killed) is found, too.
pub const MAPPED_NONCE: u64 = u64::from_le_bytes(*b"pyheap r");

/// The first version whose shim has wrappers of the C library's functions.
pub const FIRST_NATIVE: u32 = 4;

/// The first version whose shim has a wrapper of `mmap` for the interpreter's own calls.
pub const FIRST_CHUNKS: u32 = 6;

/// The first version whose shim has wrappers of `ffi_call`.
pub const FIRST_FFI: u32 = 7;

/// Allocator domains: those of CPython, as `PyMemAllocatorDomain` numbers them, and what passes them by.
pub mod domain {
    /// `PYMEM_DOMAIN_RAW`
    pub const RAW: u8 = 0;
    /// `PYMEM_DOMAIN_MEM`
    pub const MEM: u8 = 1;
    /// `PYMEM_DOMAIN_OBJ`
    pub const OBJ: u8 = 2;
    /// The C library's `malloc` and its like, called by anything but the interpreter.
    pub const MALLOC: u8 = 3;
    /// Large anonymous mappings.
    pub const MMAP: u8 = 4;
    /// Their names, by number.
    pub const NAMES: [&str; 5] = ["raw", "mem", "obj", "malloc", "mmap"];
    /// A bit for each of CPython's.
    pub const PYTHON: u8 = 0b00111;
    /// A bit for each of the others.
    pub const NATIVE: u8 = 0b11000;
}
