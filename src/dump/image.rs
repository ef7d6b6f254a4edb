//! Memory of a process that a test makes up: zeros from [`BASE`] on, and what is put there.

use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};

/// Address of the first byte.
pub(crate) const BASE: u64 = 0x10_0000;

/// The memory.
#[derive(Clone)]
pub(crate) struct Image(pub(crate) Vec<u8>);

impl Image {
    /// So many bytes of zeros.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(vec![0; bytes])
    }

    /// Puts a word at an address.
    pub(crate) fn put(&mut self, at: u64, value: u64) {
        self.text(at, &value.to_le_bytes());
    }

    /// Puts bytes at an address.
    pub(crate) fn text(&mut self, at: u64, text: &[u8]) {
        let at = (at - BASE) as usize;
        self.0[at..at + text.len()].copy_from_slice(text);
    }
}

impl RemoteMemory for Image {
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
        let len = buf.len();
        let at = addr.0.checked_sub(BASE).and_then(|at| usize::try_from(at).ok());
        let bytes = at.and_then(|at| self.0.get(at..at.checked_add(len)?));
        let source = std::io::ErrorKind::NotFound.into();
        buf.copy_from_slice(bytes.ok_or(MemoryError::Read { addr, len, source })?);
        Ok(())
    }
}
