//! Memory that the shim has copied: some segments of a process, at their own addresses.
//!
//! For one code object these are the object itself, its strings and its line table. A read must lie within one
//! segment; all else is as if it were not mapped. What it refuses to do: ask the live process for what is missing (the
//! object may be gone, and another one at its address).

use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use std::io;

/// A code object has five parts; a few more may be added one day.
const MAX_SEGMENTS: usize = 16;

/// Why a segment was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// There are already as many segments as there may be.
    #[error("a capture of more than {MAX_SEGMENTS} segments")]
    TooMany,
    /// It would reach beyond the end of the address space.
    #[error("a captured segment of {len} bytes at {addr} overflows")]
    Overflow {
        /// Where it begins.
        addr: RemoteAddr,
        /// Its length.
        len: usize,
    },
}

/// Captured segments of a process's memory. They may overlap: a function's name and qualified name are often the same
/// object.
#[derive(Debug, Clone, Default)]
pub struct BlobMemory<'a> {
    segments: Vec<(RemoteAddr, &'a [u8])>,
}

impl<'a> BlobMemory<'a> {
    /// No memory at all.
    #[must_use]
    pub const fn new() -> Self {
        Self { segments: Vec::new() }
    }

    /// Adds what was at `addr`.
    ///
    /// # Errors
    /// When there are too many segments or the segment cannot lie there; nothing is added then.
    pub fn push(&mut self, addr: RemoteAddr, bytes: &'a [u8]) -> Result<(), BlobError> {
        if self.segments.len() >= MAX_SEGMENTS {
            return Err(BlobError::TooMany);
        }
        let len = bytes.len();
        addr.checked_add(len as u64).ok_or(BlobError::Overflow { addr, len })?;
        self.segments.push((addr, bytes));
        Ok(())
    }

    fn find(&self, addr: RemoteAddr, len: usize) -> Option<&'a [u8]> {
        self.segments.iter().find_map(|(start, bytes)| {
            let at = usize::try_from(addr.0.checked_sub(start.0)?).ok()?;
            bytes.get(at..at.checked_add(len)?)
        })
    }
}

impl RemoteMemory for BlobMemory<'_> {
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
        let len = buf.len();
        let bytes = self.find(addr, len).ok_or_else(|| MemoryError::Read {
            addr,
            len,
            source: io::Error::new(io::ErrorKind::NotFound, "not captured"),
        })?;
        buf.copy_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lie_within_one_segment() {
        let mut blob = BlobMemory::new();
        blob.push(RemoteAddr(100), &[1, 2, 3, 4]).unwrap();
        blob.push(RemoteAddr(104), &[5]).unwrap();
        assert_eq!(blob.read_array(RemoteAddr(101)).unwrap(), [2, 3, 4]);
        assert!(blob.read_array::<2>(RemoteAddr(103)).is_err());
        assert!(blob.read_array::<1>(RemoteAddr(99)).is_err());
        let overflow = blob.push(RemoteAddr(u64::MAX), &[1]).unwrap_err();
        assert!(matches!(overflow, BlobError::Overflow { len: 1, .. }));
    }
}
