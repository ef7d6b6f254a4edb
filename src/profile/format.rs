//! Constants and primitives of the heapprof files, byte by byte.
//!
//! This module knows how a number lies in a file and nothing about what it means: no file is opened here and nothing is
//! estimated. `docs/format.md` has the whole format with worked examples; the tables here are its summary.
//!
//! ```text
//! .hpm   fixed32 version (1)             .hpd   events back to back:
//!        fixed64 start, seconds                 fixed32 head word
//!        fixed64 start, nanoseconds                     bit 31     the time difference is negative
//!        varint  number of ranges N                     bit 30     1 = free, 0 = allocation
//!        N x   fixed64 bound, exclusive                 bits 29..0 trace index
//!              fixed32 probability              varint  |difference|, whole seconds
//!        traces, each:                          varint  |difference|, microseconds
//!          frames x  varint line + 1            varint  size in bytes
//!                    varint length, UTF-8
//!          varint 0
//! .hpc   fixed32 version (1)             a snapshot:
//!        fixed64 start, seconds                 fixed32 SNAPSHOT_MAGIC
//!        fixed64 start, nanoseconds             varint  entries M
//!        varint  interval, milliseconds         M x  varint trace index
//!        fixed64 offset of the index                 varint bytes (first) or bytes before - own
//!        snapshots                       the index:
//!        index                                  fixed32 INDEX_MAGIC
//!                                               varint  snapshots K
//!                                               K x varint offset (first) or offset - offset before
//! ```
//!
//! *fixed32* and *fixed64* are big-endian; a *varint* is unsigned LEB128 of at most ten bytes.

/// The version in the first word of .hpm and .hpc.
pub const VERSION: u32 = 1;
/// Head word of an event: the time difference is negative. Our writer never sets it.
pub const HEAD_NEGATIVE: u32 = 0x8000_0000;
/// Head word of an event: it ends an allocation.
pub const HEAD_FREE: u32 = 0x4000_0000;
/// The largest trace index, and the mask of the index bits in a head word. Index 0 means "no trace known".
pub const MAX_TRACE_INDEX: u32 = 0x3FFF_FFFF;
/// Begins every snapshot in .hpc.
pub const SNAPSHOT_MAGIC: u32 = 0x5379_A0BD;
/// Begins the index of .hpc.
pub const INDEX_MAGIC: u32 = 0xAB93_5776;
/// The stored form of probability 1; a stored value v stands for v / `PROBABILITY_ONE`.
pub const PROBABILITY_ONE: u32 = u32::MAX;
/// The largest size that readers with 32-bit numbers take for what it is; larger events are written in pieces.
pub const MAX_EVENT_BYTES: u64 = (1 << 31) - 1;
/// No event is longer: a head word and three varints of ten bytes.
pub const MAX_EVENT_LEN: usize = 4 + 3 * MAX_VARINT_LEN;
/// No varint is longer.
pub const MAX_VARINT_LEN: usize = 10;

/// Appends `value` in its shortest form.
#[inline]
pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7F {
        out.push((value as u8 & 0x7F) | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Two varints that begin in these bytes and end in them, and the length of both; `None` if they are longer.
#[inline]
pub(crate) fn two_varints(bytes: [u8; 8]) -> Option<(u64, u64, usize)> {
    let word = u64::from_le_bytes(bytes);
    // A byte without its top bit is the last one of a number.
    let ends = !word & 0x8080_8080_8080_8080;
    let later = ends & ends.wrapping_sub(1);
    if later == 0 {
        return None;
    }
    let first_bits = ends.trailing_zeros() + 1;
    let both_bits = later.trailing_zeros() + 1;
    let first = word & (u64::MAX >> (64 - first_bits));
    let second = (word & (u64::MAX >> (64 - both_bits))) >> first_bits;
    Some((groups(first), groups(second), both_bits as usize / 8))
}

/// Puts together the groups of seven bits of up to eight bytes; the top bits do not count.
#[inline]
fn groups(bytes: u64) -> u64 {
    // To groups of 14, 28 and 56.
    let own = bytes & 0x007F_007F_007F_007F | (bytes & 0x7F00_7F00_7F00_7F00) >> 1;
    let own = own & 0x0000_3FFF_0000_3FFF | (own & 0x3FFF_0000_3FFF_0000) >> 2;
    own & 0x0FFF_FFFF | (own & 0x0FFF_FFFF_0000_0000) >> 4
}

/// Two varints back to back in the low bytes of a word, and how many these are; `None` if they do not fit into it.
#[inline]
pub(crate) fn two_varints_word(first: u64, second: u64) -> Option<(u64, usize)> {
    let (first_len, second_len) = (varint_len(first), varint_len(second));
    if first_len + second_len > 8 {
        return None;
    }
    let word = with_groups(first, first_len) | with_groups(second, second_len) << (8 * first_len);
    Some((word, first_len + second_len))
}

/// Number of bytes of a varint.
#[inline]
fn varint_len(value: u64) -> usize {
    // Bits by seven, rounded up.
    (value | 1).ilog2() as usize / 7 + 1
}

/// Takes a number below 2^56 apart into groups of seven bits: the inverse of [`groups`], with the top bits of a varint.
#[inline]
fn with_groups(value: u64, len: usize) -> u64 {
    let own = value & 0x0FFF_FFFF | (value & 0x00FF_FFFF_F000_0000) << 4;
    let own = own & 0x0000_3FFF_0000_3FFF | (own & 0x0FFF_C000_0FFF_C000) << 2;
    let own = own & 0x007F_007F_007F_007F | (own & 0x3F80_3F80_3F80_3F80) << 1;
    own | 0x8080_8080_8080_8080 & ((1 << (8 * (len - 1))) - 1)
}

/// Appends a fixed32.
pub fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_be_bytes());
}

/// Appends a fixed64.
pub fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_be_bytes());
}

/// Why a value could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end inside the value: normal at the end of a file that is still being written.
    #[error("the data ends inside a record")]
    Cut,
    /// A varint goes on past 64 bits: the file is damaged here.
    #[error("a number is longer than 64 bits")]
    Overlong,
}

/// Decodes values from a slice, front to back. After an error the position is unspecified.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    data: &'a [u8],
    pos: usize,
}

impl<'a> Cursor<'a> {
    /// A cursor that begins at `pos`; beyond the end it finds every value [`DecodeError::Cut`].
    pub fn new(data: &'a [u8], pos: usize) -> Self {
        Self {
            data,
            pos: pos.min(data.len()),
        }
    }

    /// Bytes from the start of the slice.
    pub fn pos(&self) -> usize {
        self.pos
    }

    /// Bytes not yet consumed.
    pub fn remaining(&self) -> usize {
        self.data.len() - self.pos
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: u64) -> Result<&'a [u8], DecodeError> {
        let len = usize::try_from(len).map_err(|_| DecodeError::Cut)?;
        let end = self.pos.checked_add(len).ok_or(DecodeError::Cut)?;
        let piece = self.data.get(self.pos..end).ok_or(DecodeError::Cut)?;
        self.pos = end;
        Ok(piece)
    }

    /// A fixed32.
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(self
            .take(4)?
            .iter()
            .fold(0, |value, byte| value << 8 | u32::from(*byte)))
    }

    /// A fixed64.
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(self
            .take(8)?
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// A varint; longer than the shortest form is accepted up to ten bytes.
    #[inline]
    pub fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for position in 0..MAX_VARINT_LEN {
            let byte = *self.data.get(self.pos).ok_or(DecodeError::Cut)?;
            self.pos += 1;
            // The tenth byte holds bit 63 only.
            if position == MAX_VARINT_LEN - 1 && byte > 1 {
                return Err(DecodeError::Overlong);
            }
            value |= u64::from(byte & 0x7F) << (7 * position);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(DecodeError::Overlong)
    }

    /// Two varints, one after the other.
    #[inline]
    pub fn two_varints(&mut self) -> Result<(u64, u64), DecodeError> {
        if let Some(window) = self.data.get(self.pos..self.pos + 8)
            && let Ok(window) = window.try_into()
            && let Some((first, second, len)) = two_varints(window)
        {
            self.pos += len;
            return Ok((first, second));
        }
        Ok((self.varint()?, self.varint()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(value: u64) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, value);
        out
    }

    #[test]
    fn varints_have_the_documented_bytes() {
        for (value, bytes) in [
            (0, &[0][..]),
            (1, &[1]),
            (127, &[0x7F]),
            (128, &[0x80, 1]),
            (300, &[0xAC, 2]),
            (1000, &[0xE8, 7]),
            (400_000, &[0x80, 0xB5, 0x18]),
            ((1 << 31) - 1, &[0xFF, 0xFF, 0xFF, 0xFF, 7]),
            (u64::MAX, &[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1]),
        ] {
            assert_eq!(varint(value), bytes, "{value}");
            assert_eq!(Cursor::new(bytes, 0).varint(), Ok(value));
        }
    }

    #[test]
    fn every_power_of_two_survives() {
        for shift in 0..64 {
            for value in [1u64 << shift, (1u64 << shift) - 1, (1u64 << shift).wrapping_add(1)] {
                let bytes = varint(value);
                let mut cursor = Cursor::new(&bytes, 0);
                assert_eq!((cursor.varint(), cursor.remaining()), (Ok(value), 0));
                assert_eq!(
                    Cursor::new(&bytes[..bytes.len() - 1], 0).varint(),
                    Err(DecodeError::Cut)
                );
            }
        }
    }

    #[test]
    fn two_varints_are_read_and_written_in_one_step() {
        let values = (0..49).flat_map(|shift| [1u64 << shift, (1 << shift) - 1, 0x5A5A_5A5A_5A5A >> shift]);
        let values: Vec<u64> = values.collect();
        for first in &values {
            for second in &values {
                let mut bytes = [varint(*first), varint(*second)].concat();
                let len = bytes.len();
                bytes.extend([0x7F; 8]);
                let window = bytes[..8].try_into().unwrap();
                assert_eq!(
                    two_varints(window),
                    (len <= 8).then_some((*first, *second, len)),
                    "{first:#x} {second:#x}"
                );
                let word = (len <= 8).then(|| {
                    bytes[len..].fill(0);
                    (u64::from_le_bytes(bytes[..8].try_into().unwrap()), len)
                });
                assert_eq!(two_varints_word(*first, *second), word, "{first:#x} {second:#x}");
            }
        }
    }

    #[test]
    fn numbers_past_64_bits_are_refused() {
        assert_eq!(Cursor::new(&[0xFF; 11], 0).varint(), Err(DecodeError::Overlong));
        let mut too_much = [0xFF; 10];
        too_much[9] = 2;
        assert_eq!(Cursor::new(&too_much, 0).varint(), Err(DecodeError::Overlong));
        assert_eq!(
            Cursor::new(&[0x80, 0x00], 0).varint(),
            Ok(0),
            "longer than needed is legal"
        );
    }
}
