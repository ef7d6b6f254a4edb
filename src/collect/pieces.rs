//! Pieces of stacks that wait for the record of their sample.

use pyheap_protocol::record::{Piece, kind};
use pyheap_protocol::ring;
use std::collections::VecDeque;
use zerocopy::FromBytes;

/// Most bytes that wait: what comes in one look, and what was left of the one before.
const MAX_WAITING: usize = 16 << 20;

/// Chunks of pieces, in the order of the samples' ids.
#[derive(Debug, Default)]
pub struct Pieces {
    chunks: VecDeque<Vec<u8>>,
    /// What of the first is done.
    done: usize,
    bytes: usize,
}

impl Pieces {
    /// Adds what came.
    pub fn add(&mut self, chunk: Vec<u8>) {
        if chunk.is_empty() {
            return;
        }
        self.bytes += chunk.len();
        self.chunks.push_back(chunk);
        while self.bytes > MAX_WAITING && self.chunks.len() > 1 {
            self.drop_first();
        }
    }

    fn drop_first(&mut self) {
        self.bytes -= self.chunks.pop_front().map_or(0, |chunk| chunk.len());
        self.done = 0;
    }

    /// The piece of sample `id` and the bytes of the stack, if it is there. Those of the samples before it are dropped.
    pub fn take(&mut self, id: u64) -> Option<(Piece, &[u8])> {
        let (start, len) = loop {
            let rest = self.chunks.front()?.get(self.done..).unwrap_or_default();
            // What makes no sense ends a chunk.
            let Some((head, record, _)) = ring::split(rest) else {
                self.drop_first();
                continue;
            };
            let start = self.done;
            let found = match head.kind {
                kind::PIECE => Piece::read_from_prefix(record).ok().map(|(piece, _)| piece.id),
                _ => None,
            };
            match found {
                Some(found) if found > id => return None,
                Some(found) if found == id => {
                    self.done += record.len();
                    break (start, record.len());
                }
                _ => self.done += record.len(),
            }
        };
        Piece::read_from_prefix(self.chunks.front()?.get(start..start + len)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pyheap_protocol::record::{Entry, Head};
    use zerocopy::IntoBytes;

    fn piece(id: u64) -> Vec<u8> {
        let bytes = id.to_le_bytes();
        let head = Head {
            len: (size_of::<Piece>() + bytes.len()) as u32,
            kind: kind::PIECE,
            flags: 0,
        };
        let piece = Piece {
            head,
            id,
            entry: Entry::default(),
            stack: 0,
        };
        [piece.as_bytes(), &bytes].concat()
    }

    #[test]
    fn each_sample_gets_its_own_or_none() {
        let mut pieces = Pieces::default();
        pieces.add([piece(2), piece(4)].concat());
        pieces.add([piece(5), vec![7; 40], piece(6)].concat());
        pieces.add(piece(9));
        let mut take = |id: u64| pieces.take(id).map(|(piece, bytes)| (piece.id, bytes.to_vec()));
        let whole = |id: u64| Some((id, id.to_le_bytes().to_vec()));
        assert_eq!(take(1), None);
        assert_eq!(
            (take(2), take(3), take(4), take(5)),
            (whole(2), None, whole(4), whole(5))
        );
        // Behind what makes no sense nothing of that chunk counts.
        assert_eq!((take(6), take(9), take(10)), (None, whole(9), None));
    }

    #[test]
    fn what_waits_has_a_limit() {
        let mut pieces = Pieces::default();
        (0..100).for_each(|_| pieces.add(vec![0; 1 << 20]));
        assert!(pieces.bytes <= MAX_WAITING && pieces.chunks.len() == 16);
    }
}
