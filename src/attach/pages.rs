//! Which pages of a process there are, and what words they hold.

use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Bits of an entry of `/proc/PID/pagemap`: it is in memory, or swapped out.
pub const PRESENT: u64 = 1 << 63;
/// See [`PRESENT`].
pub const SWAPPED: u64 = 1 << 62;
/// Entries that are read at once.
const ENTRIES: u64 = 64 << 10;
/// Bytes of memory that are read at once: megabytes of fresh memory at each look would cost more than to read them.
const PIECE: usize = 64 << 10;

/// `/proc/PID/pagemap`: a word for each page of the address space.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens that of a process or thread.
    ///
    /// # Errors
    /// When it cannot be read: it needs the rights of a debugger.
    pub fn open(pid: i32) -> io::Result<Self> {
        File::open(format!("/proc/{pid}/pagemap")).map(Self)
    }

    /// Calls `found` with the address of each page in `range` that has one of `bits`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn pages(&self, range: Range<u64>, bits: u64, mut found: impl FnMut(u64)) -> io::Result<()> {
        let (mut page, end) = (range.start / PAGE, range.end / PAGE);
        let mut entries = Vec::new();
        while page < end {
            let count = (end - page).min(ENTRIES);
            entries.resize(count as usize * 8, 0);
            self.0.read_exact_at(&mut entries, page * 8)?;
            for (entry, number) in entries.as_chunks::<8>().0.iter().zip(page..) {
                if u64::from_le_bytes(*entry) & bits != 0 {
                    found(number * PAGE);
                }
            }
            page += count;
        }
        Ok(())
    }
}

/// Looks for words in memory, with one buffer for all.
#[derive(Debug)]
pub struct Words(Vec<u8>);

impl Default for Words {
    fn default() -> Self {
        Self(vec![0; PIECE])
    }
}

impl Words {
    /// True if an aligned word of `range` is `wanted`. What is not mapped (any more) holds nothing.
    pub fn any(&mut self, memory: &impl RemoteMemory, range: Range<u64>, wanted: impl Fn(u64) -> bool) -> bool {
        let len = range.end.saturating_sub(range.start);
        (0..len).step_by(PIECE).any(|offset| {
            let room = (len - offset).min(PIECE as u64) as usize;
            let piece = self.0.get_mut(..room).unwrap_or_default();
            let at = RemoteAddr(range.start.saturating_add(offset));
            let is_read = memory.read_into(at, piece).is_ok();
            let mut words = piece.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            is_read && words.any(&wanted)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pyheap_injector::ProcessMemory;

    fn own() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    #[test]
    fn words_are_found_wherever_they_are() {
        let memory = ProcessMemory::new(own());
        let mut words = vec![0_u64; 3 * PIECE / 8];
        let start = words.as_ptr() as u64;
        let range = start..start + 3 * PIECE as u64;
        let mut search = Words::default();
        for at in [0, PIECE / 8 - 1, PIECE / 8, words.len() - 1] {
            words[at] = 7;
            assert!(search.any(&memory, range.clone(), |word| word == 7), "{at}");
            words[at] = 0;
            assert!(!search.any(&memory, range.clone(), |word| word == 7), "{at}");
        }
        assert!(!search.any(&memory, 0x1000..0x3000, |_| true));
    }

    #[test]
    fn pages_that_were_written_to_are_there() {
        let bytes = vec![1_u8; 20 * PAGE as usize];
        let start = (bytes.as_ptr() as u64).next_multiple_of(PAGE);
        let mut found = Vec::new();
        let pagemap = Pagemap::open(own()).unwrap();
        let range = start..start + 10 * PAGE;
        pagemap
            .pages(range.clone(), PRESENT | SWAPPED, |page| found.push(page))
            .unwrap();
        let all: Vec<u64> = range.step_by(PAGE as usize).collect();
        assert_eq!(found, all);
    }
}
