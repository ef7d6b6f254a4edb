//! Reads memory a page at a time and keeps what it has read: for memory that does not change meanwhile.
//!
//! A dump follows some thousand pointers, most of them into pages that hold many of the others. One system call a page
//! instead of one a pointer keeps the time short for which the process stands still.

use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use std::cell::RefCell;
use std::collections::HashMap;

/// Bytes of a page, as far as this module is concerned.
const PAGE: usize = 4096;
/// Pages that are kept: 64 MiB. Beyond that, reads go through.
const MAX_PAGES: usize = 16_384;
/// Longer reads go through: they would only fill the cache.
const MAX_CACHED_READ: usize = 16 * PAGE;

/// A cache over another memory.
#[derive(Debug)]
pub struct Pages<M> {
    memory: M,
    /// `None`: it cannot be read as a whole.
    pages: RefCell<HashMap<u64, Option<Box<[u8; PAGE]>>>>,
}

impl<M: RemoteMemory> Pages<M> {
    /// An empty cache over `memory`.
    pub fn new(memory: M) -> Self {
        Self {
            memory,
            pages: RefCell::default(),
        }
    }

    /// Copies from page number `page`, from `at` on; false when the page cannot be had.
    fn copy(&self, page: u64, at: usize, to: &mut [u8]) -> bool {
        let mut pages = self.pages.borrow_mut();
        if pages.len() >= MAX_PAGES && !pages.contains_key(&page) {
            return false;
        }
        let content = pages.entry(page).or_insert_with(|| {
            let mut bytes = Box::new([0; PAGE]);
            let start = RemoteAddr(page.wrapping_mul(PAGE as u64));
            self.memory.read_into(start, &mut bytes[..]).ok().map(|()| bytes)
        });
        let from = content
            .as_ref()
            .and_then(|bytes| bytes.get(at..at.checked_add(to.len())?));
        from.is_some_and(|from| {
            to.copy_from_slice(from);
            true
        })
    }
}

impl<M: RemoteMemory> RemoteMemory for Pages<M> {
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
        if buf.len() > MAX_CACHED_READ || addr.checked_add(buf.len() as u64).is_none() {
            return self.memory.read_into(addr, buf);
        }
        let (mut at, mut done) = (addr.0, 0);
        while done < buf.len() {
            let in_page = (at % PAGE as u64) as usize;
            let len = (PAGE - in_page).min(buf.len() - done);
            let part = buf.get_mut(done..done + len).unwrap_or_default();
            if !self.copy(at / PAGE as u64, in_page, part) {
                // A page that is mapped in part, as core files have them, or none at all.
                return self.memory.read_into(addr, buf);
            }
            at += len as u64;
            done += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Two pages from 8192 on, in which byte i is i modulo 251.
    struct Counting(Cell<usize>);
    impl RemoteMemory for Counting {
        fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
            self.0.set(self.0.get() + 1);
            let end = addr.0.checked_add(buf.len() as u64);
            if addr.0 < 8192 || end.is_none_or(|end| end > 16_384) {
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

    #[test]
    fn a_page_is_read_once() {
        let pages = Pages::new(Counting(Cell::new(0)));
        for at in 8192..16_384 - 8 {
            let expected: Vec<u8> = (at..at + 8).map(|i| (i % 251) as u8).collect();
            assert_eq!(pages.read_vec(RemoteAddr(at), 8).unwrap(), expected);
        }
        assert_eq!(pages.memory.0.get(), 2);
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let pages = Pages::new(Counting(Cell::new(0)));
        assert!(pages.read_u64(RemoteAddr(8188)).is_err());
        assert!(pages.read_u64(RemoteAddr(16_380)).is_err());
        assert!(pages.read_u64(RemoteAddr(u64::MAX - 3)).is_err());
        assert!(pages.read_u64(RemoteAddr(8192)).is_ok());
    }
}
