//! How the memory that we map in the target is divided.
//!
//! ```text
//! base     identity   one page: who put this here          inherited by forked children
//!          image      the shim: text, data, control         control is wiped in children
//!          stack      private stack of the hijacked thread, and the area for its extended registers
//!          slab       live entries                         ┐
//!          codes      known code objects                   │ wiped in children
//!          stacks     known stacks                         │
//!          scratch    one stack                            ┘
//!          ring                                            ┐
//!          pieces     pieces of stacks, if they are wanted  ┘ not there in children
//! ```

use crate::image::{Image, pages};
use pyheap_protocol::record::{MAX_FRAMES, MAX_RECORD_BYTES};
use pyheap_protocol::table::{Entry, KnownCode, KnownStack};

/// Private stack. A signal may be delivered on it: its frame takes up to 12 KiB where AMX is, and handlers want some, too.
const STACK_BYTES: u64 = 96 << 10;
/// Area for XSAVE: 11 KiB on the largest processor known.
pub const XSAVE_BYTES: u64 = 16 << 10;
/// Pages.
const PAGE: u64 = 4096;

/// Sizes that a caller chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Most live samples.
    pub live_samples: u64,
    /// Bytes of the ring, a power of two.
    pub ring_bytes: u64,
    /// Known code objects, a power of two.
    pub codes: u64,
    /// Known stacks, a power of two.
    pub stacks: u64,
    /// Bytes of the ring of pieces of stacks, a power of two, or 0.
    pub piece_bytes: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            live_samples: 1 << 19,
            ring_bytes: 1 << 20,
            codes: 1 << 14,
            stacks: 1 << 15,
            piece_bytes: 0,
        }
    }
}

/// Offsets of the parts from the region's base.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Sizes it was made for.
    pub sizes: Sizes,
    /// The image.
    pub image: u64,
    /// Area for extended registers; the private stack grows down towards the image from here.
    pub xsave: u64,
    /// Live entries.
    pub slab: u64,
    /// Known code objects.
    pub codes: u64,
    /// Known stacks.
    pub stacks: u64,
    /// Scratch for one stack.
    pub scratch: u64,
    /// The ring.
    pub ring: u64,
    /// The ring of pieces, right behind it.
    pub pieces: u64,
    /// Length of the whole.
    pub len: u64,
}

impl Plan {
    /// Lays out a region for `image`.
    ///
    /// # Panics
    /// When `sizes` are not powers of two where they must be, or the ring is too small for the longest record.
    #[must_use]
    pub fn new(image: &Image, sizes: Sizes) -> Self {
        assert!(sizes.ring_bytes.is_power_of_two() && sizes.ring_bytes >= 2 * MAX_RECORD_BYTES as u64);
        assert!(sizes.piece_bytes == 0 || sizes.piece_bytes.is_power_of_two());
        assert!(sizes.codes.is_power_of_two() && sizes.stacks.is_power_of_two());
        let at_image = PAGE;
        let xsave = at_image + image.len() + STACK_BYTES;
        let slab = xsave + XSAVE_BYTES;
        let codes = slab + pages(sizes.live_samples * size_of::<Entry>() as u64);
        let stacks = codes + pages(sizes.codes * size_of::<KnownCode>() as u64);
        let scratch = stacks + pages(sizes.stacks * size_of::<KnownStack>() as u64);
        let ring = scratch + pages(MAX_FRAMES as u64 * 8);
        let pieces = ring + pages(sizes.ring_bytes);
        let len = pieces + pages(sizes.piece_bytes);
        Self {
            sizes,
            image: at_image,
            xsave,
            slab,
            codes,
            stacks,
            scratch,
            ring,
            pieces,
            len,
        }
    }
}
