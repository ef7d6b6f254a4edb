//! Memory in large pieces: a census asks for millions of words, and a system call a word would take minutes.
//!
//! Pieces are read once and kept in a table in which each has one place, so that memory stays bounded whatever is asked. A
//! piece that is mapped only in part is read page by page.

use pyheap_injector::{RemoteAddr, RemoteMemory};

/// Bytes of a piece.
const PIECE: usize = 64 << 10;
const PAGE: usize = 4096;
/// Places: 512 MiB at most.
const PLACES: usize = 8192;
/// Nothing is at this piece number: addresses end at 2^47.
const EMPTY: u64 = u64::MAX;

struct Piece {
    number: u64,
    /// A bit a page: it could be read.
    valid: u16,
    bytes: Vec<u8>,
}

/// A cache over a memory.
pub struct Blocks<'a, M> {
    memory: &'a M,
    places: Vec<Piece>,
    /// Pieces that were read, those that were read again included.
    pub reads: u64,
}

const fn number_of(address: u64) -> u64 {
    address / PIECE as u64
}

const fn at_of(address: u64) -> usize {
    (address % PIECE as u64) as usize
}

impl<'a, M: RemoteMemory> Blocks<'a, M> {
    /// An empty cache.
    pub fn new(memory: &'a M) -> Self {
        let empty = || Piece {
            number: EMPTY,
            valid: 0,
            bytes: Vec::new(),
        };
        Self {
            memory,
            places: std::iter::repeat_with(empty).take(PLACES).collect(),
            reads: 0,
        }
    }

    /// What is behind it.
    pub const fn memory(&self) -> &'a M {
        self.memory
    }

    /// Forgets everything: what is read next is what is there then.
    pub fn forget(&mut self) {
        for piece in &mut self.places {
            piece.number = EMPTY;
        }
    }

    /// Forgets what was read around an address.
    pub fn forget_at(&mut self, address: u64) {
        let number = number_of(address);
        if let Some(piece) = self.places.get_mut((number % PLACES as u64) as usize) {
            piece.number = EMPTY;
        }
    }

    /// `len` bytes that lie in one piece; `None` when they do not, or cannot be read.
    pub fn slice(&mut self, address: u64, len: usize) -> Option<&[u8]> {
        let (number, at) = (number_of(address), at_of(address));
        let end = at.checked_add(len)?;
        let piece = self.places.get_mut((number % PLACES as u64) as usize)?;
        if piece.number != number {
            self.reads += 1;
            fill(self.memory, piece, number);
        }
        if len == 0 || end > PIECE {
            return None;
        }
        let pages = at / PAGE..=(end - 1) / PAGE;
        if piece.valid != u16::MAX && !pages.into_iter().all(|page| piece.valid & (1 << page) != 0) {
            return None;
        }
        piece.bytes.get(at..end)
    }

    /// Copies bytes that may lie in several pieces; false when they cannot be read.
    pub fn copy(&mut self, mut address: u64, mut to: &mut [u8]) -> bool {
        while !to.is_empty() {
            let len = to.len().min(PIECE - at_of(address));
            let (now, rest) = to.split_at_mut(len);
            let Some(from) = self.slice(address, len) else {
                return false;
            };
            now.copy_from_slice(from);
            let Some(next) = address.checked_add(len as u64) else {
                return rest.is_empty();
            };
            (address, to) = (next, rest);
        }
        true
    }

    /// A word of 8 bytes.
    pub fn word(&mut self, address: u64) -> Option<u64> {
        if let Some(bytes) = self.slice(address, 8) {
            return bytes.try_into().ok().map(u64::from_le_bytes);
        }
        let mut bytes = [0; 8];
        self.copy(address, &mut bytes).then(|| u64::from_le_bytes(bytes))
    }

    /// A number of 4 bytes.
    pub fn number(&mut self, address: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.copy(address, &mut bytes).then(|| u32::from_le_bytes(bytes))
    }

    /// One byte.
    pub fn byte(&mut self, address: u64) -> Option<u8> {
        self.slice(address, 1)?.first().copied()
    }

    /// Gives `count` words to `take`, from the first on; how many of them could not be read.
    pub fn words(&mut self, mut address: u64, count: u64, mut take: impl FnMut(u64)) -> u64 {
        let mut left = count;
        if !address.is_multiple_of(8) {
            return count;
        }
        while left > 0 {
            let here = ((PIECE - at_of(address)) / 8) as u64;
            let now = left.min(here);
            // A page at a time where the piece is not all there.
            let whole = self.slice(address, now as usize * 8).is_some();
            let now = if whole {
                now
            } else {
                now.min(((PAGE - (address as usize) % PAGE) / 8) as u64)
            };
            match self.slice(address, now as usize * 8) {
                Some(bytes) => bytes
                    .as_chunks::<8>()
                    .0
                    .iter()
                    .for_each(|word| take(u64::from_le_bytes(*word))),
                // What is not there does not come back further on.
                None => return left,
            }
            left -= now;
            let Some(next) = address.checked_add(now * 8) else {
                return left;
            };
            address = next;
        }
        0
    }
}

fn fill(memory: &impl RemoteMemory, piece: &mut Piece, number: u64) {
    piece.number = number;
    piece.bytes.resize(PIECE, 0);
    piece.valid = 0;
    let start = number.wrapping_mul(PIECE as u64);
    if memory.read_into(RemoteAddr(start), &mut piece.bytes).is_ok() {
        piece.valid = u16::MAX;
        return;
    }
    for (page, bytes) in piece.bytes.chunks_mut(PAGE).enumerate() {
        let address = RemoteAddr(start.wrapping_add((page * PAGE) as u64));
        if memory.read_into(address, bytes).is_ok() {
            piece.valid |= 1 << page;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pyheap_injector::MemoryError;

    /// Bytes from `START` to `END`: each is its address modulo 251.
    struct Bytes;
    const START: u64 = 3 * PIECE as u64 + 2 * PAGE as u64;
    const END: u64 = 6 * PIECE as u64;

    impl RemoteMemory for Bytes {
        fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
            let end = addr.0.checked_add(buf.len() as u64);
            if addr.0 < START || end.is_none_or(|end| end > END) {
                return Err(MemoryError::Read {
                    addr,
                    len: buf.len(),
                    source: std::io::ErrorKind::NotFound.into(),
                });
            }
            for (i, byte) in buf.iter_mut().enumerate() {
                *byte = ((addr.0 + i as u64) % 251) as u8;
            }
            Ok(())
        }
    }

    fn word(at: u64) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| ((at + i as u64) % 251) as u8))
    }

    #[test]
    fn words_are_read_across_pieces_and_at_the_edges() {
        let mut blocks = Blocks::new(&Bytes);
        for at in [START, START + 4, 4 * PIECE as u64 - 4, END - 8] {
            assert_eq!(blocks.word(at), Some(word(at)), "{at:#x}");
        }
        for at in [0, START - 8, START - 4, END - 4, END, u64::MAX - 3] {
            assert_eq!(blocks.word(at), None, "{at:#x}");
        }
        let before = blocks.reads;
        blocks.word(START);
        assert_eq!(blocks.reads, before, "it is kept");
    }

    #[test]
    fn what_is_not_there_is_counted() {
        let mut blocks = Blocks::new(&Bytes);
        let mut read = Vec::new();
        let count = (END - START) / 8;
        assert_eq!(blocks.words(START, count + 5, |word| read.push(word)), 5);
        assert_eq!(read.len() as u64, count);
        assert!(read.iter().zip(0..).all(|(read, i)| *read == word(START + 8 * i)));
        assert_eq!(blocks.words(START - 8, 3, |_| panic!("nothing is there")), 3);
        assert_eq!(blocks.words(u64::MAX - 7, 3, |_| panic!("nothing is there")), 3);
    }
}
