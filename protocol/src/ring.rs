//! Positions in the ring, and why both sides may trust them.
//!
//! The ring is `ring_len` bytes (a power of two) of the target's private memory. `ring_head` and `ring_tail` count bytes
//! ever written and ever read; a position modulo `ring_len` is an offset.
//!
//! * *Producers* run in the target, one at a time, under the shim's lock. A producer writes a record's bytes beyond
//!   `ring_head` and then stores the new head with release ordering. It never writes a byte in
//!   `ring_tail..ring_head`.
//! * *The consumer* is the host. It reads `ring_head` in one system call and the bytes below it in a later one; the
//!   kernel copies from the same physical memory, so the second copy sees at least what the first one implied
//!   (x86-64's total store order; on aarch64 the store-release and the barriers in the system call's entry).
//! * The consumer's `ring_tail` is written by the kernel's copy, which may be torn: it is a
//!   [`Doubled`](crate::Doubled), and a producer that sees two different values goes on with the older one that it
//!   remembers, which can only make the ring look fuller than it is.

use crate::record::Head;

/// Room that a record of `len` bytes takes when it must not wrap: `(padding, total)`.
#[must_use]
pub const fn reserve(head: u64, len: u64, ring_len: u64) -> (u64, u64) {
    let offset = head & (ring_len - 1);
    let to_end = ring_len - offset;
    if len <= to_end {
        (0, len)
    } else {
        (to_end, to_end + len)
    }
}

/// True when `total` more bytes fit.
#[must_use]
pub const fn fits(head: u64, tail: u64, total: u64, ring_len: u64) -> bool {
    // A tail beyond the head can only be nonsense from outside; the ring then counts as full.
    match head.checked_sub(tail) {
        Some(used) => used <= ring_len && total <= ring_len - used,
        None => false,
    }
}

/// Splits the first record off `bytes`, which a consumer has copied out of the ring.
///
/// Returns the head, the whole record and the rest; `None` when `bytes` is empty or what is there cannot be a record
/// (the consumer then drops everything up to the head it read, and counts it as a loss).
#[must_use]
pub fn split(bytes: &[u8]) -> Option<(Head, &[u8], &[u8])> {
    use zerocopy::FromBytes;
    let (head, _) = Head::read_from_prefix(bytes).ok()?;
    let len = head.len as usize;
    if len < size_of::<Head>() || !len.is_multiple_of(8) || len > bytes.len() {
        return None;
    }
    let (record, rest) = bytes.split_at(len);
    Some((head, record, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::kind;
    use zerocopy::IntoBytes;

    #[test]
    fn a_record_never_wraps() {
        assert_eq!(reserve(0, 48, 64), (0, 48));
        assert_eq!(reserve(16, 48, 64), (0, 48));
        assert_eq!(reserve(24, 48, 64), (40, 88));
        assert_eq!(reserve(64 * 7 + 24, 48, 64), (40, 88));
    }

    #[test]
    fn a_full_ring_and_a_nonsense_tail_have_no_room() {
        assert!(fits(0, 0, 64, 64));
        assert!(!fits(8, 0, 64, 64));
        assert!(fits(64, 64, 64, 64));
        assert!(!fits(10, 20, 1, 64));
        assert!(!fits(1000, 0, 8, 64));
    }

    #[test]
    fn damaged_heads_are_refused() {
        let head = |len, kind| Head { len, kind, flags: 0 };
        assert!(split(&[]).is_none());
        assert!(split(head(7, kind::FREE).as_bytes()).is_none());
        assert!(split(head(12, kind::FREE).as_bytes()).is_none());
        assert!(split(head(16, kind::FREE).as_bytes()).is_none());
        let pad = head(8, kind::PAD);
        let (got, record, rest) = split(pad.as_bytes()).unwrap();
        assert_eq!((got.kind, record.len(), rest.len()), (kind::PAD, 8, 0));
    }
}
