//! Reading and writing the memory of another process.
//!
//! # Semantics
//!
//! * A read returns all the bytes asked for or an error; on an error the buffer's content is unspecified.
//! * The target runs on while we read. What is read may be torn or stale, and every value is an allegation until the
//!   caller has checked it.
//! * Nothing here stops the target or needs it stopped.

use pyheap_protocol::RemoteAddr;
use std::io;

/// A failed access to the target's memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The range is not mapped (or only in part), or may not be read.
    #[error("cannot read {len} bytes at {addr}")]
    Read {
        /// Where.
        addr: RemoteAddr,
        /// How many bytes.
        len: usize,
        /// Why, as the kernel says.
        #[source]
        source: io::Error,
    },
    /// The range is not mapped (or only in part), or may not be written.
    #[error("cannot write {len} bytes at {addr}")]
    Write {
        /// Where.
        addr: RemoteAddr,
        /// How many bytes.
        len: usize,
        /// Why, as the kernel says.
        #[source]
        source: io::Error,
    },
}

/// Anything that can be read like a process: a live one, a captured blob, a core file, an array in a test.
pub trait RemoteMemory {
    /// Fills `buf` from `addr`.
    ///
    /// # Errors
    /// When any byte of the range cannot be read; `buf` is unspecified then.
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError>;

    /// Reads an array of `N` bytes.
    ///
    /// # Errors
    /// As [`RemoteMemory::read_into`].
    fn read_array<const N: usize>(&self, addr: RemoteAddr) -> Result<[u8; N], MemoryError> {
        let mut buf = [0; N];
        self.read_into(addr, &mut buf)?;
        Ok(buf)
    }

    /// Reads a little-endian 32-bit number.
    ///
    /// # Errors
    /// As [`RemoteMemory::read_into`].
    fn read_u32(&self, addr: RemoteAddr) -> Result<u32, MemoryError> {
        self.read_array(addr).map(u32::from_le_bytes)
    }

    /// Reads a little-endian 64-bit number.
    ///
    /// # Errors
    /// As [`RemoteMemory::read_into`].
    fn read_u64(&self, addr: RemoteAddr) -> Result<u64, MemoryError> {
        self.read_array(addr).map(u64::from_le_bytes)
    }

    /// Reads a pointer.
    ///
    /// # Errors
    /// As [`RemoteMemory::read_into`].
    fn read_ptr(&self, addr: RemoteAddr) -> Result<RemoteAddr, MemoryError> {
        self.read_u64(addr).map(RemoteAddr)
    }

    /// Reads `len` bytes. The caller bounds `len`: it must never be a number taken from the target unchecked.
    ///
    /// # Errors
    /// As [`RemoteMemory::read_into`].
    fn read_vec(&self, addr: RemoteAddr, len: usize) -> Result<Vec<u8>, MemoryError> {
        let mut buf = vec![0; len];
        self.read_into(addr, &mut buf)?;
        Ok(buf)
    }
}

impl<M: RemoteMemory + ?Sized> RemoteMemory for &M {
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
        (**self).read_into(addr, buf)
    }
}

/// The memory of a live process, by `process_vm_readv` and `process_vm_writev`.
#[derive(Debug, Clone, Copy)]
pub struct ProcessMemory {
    pid: nix::unistd::Pid,
}

impl ProcessMemory {
    /// The memory of process `pid`. Nothing is opened or checked before the first access.
    #[must_use]
    pub const fn new(pid: i32) -> Self {
        Self {
            pid: nix::unistd::Pid::from_raw(pid),
        }
    }

    /// Makes an access, by another thread if the main thread has ended before the rest.
    fn reach(&self, mut access: impl FnMut(nix::unistd::Pid) -> nix::Result<usize>) -> nix::Result<usize> {
        match access(self.pid) {
            Err(nix::errno::Errno::ESRCH) => {
                let tid = crate::observe::reachable(self.pid.as_raw());
                if tid == self.pid.as_raw() {
                    return Err(nix::errno::Errno::ESRCH);
                }
                access(nix::unistd::Pid::from_raw(tid))
            }
            done => done,
        }
    }

    /// The process.
    #[must_use]
    pub const fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Writes all of `bytes` at `addr`, which must be mapped writable.
    ///
    /// # Errors
    /// When any byte of the range cannot be written; a prefix of it may have been.
    pub fn write(&self, addr: RemoteAddr, bytes: &[u8]) -> Result<(), MemoryError> {
        let remote = [nix::sys::uio::RemoteIoVec {
            base: addr.0 as usize,
            len: bytes.len(),
        }];
        let local = [io::IoSlice::new(bytes)];
        let done = self.reach(|pid| nix::sys::uio::process_vm_writev(pid, &local, &remote));
        check(done, bytes.len()).map_err(|source| MemoryError::Write {
            addr,
            len: bytes.len(),
            source,
        })
    }
}

impl RemoteMemory for ProcessMemory {
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
        let len = buf.len();
        if len == 0 {
            return Ok(());
        }
        let remote = [nix::sys::uio::RemoteIoVec {
            base: addr.0 as usize,
            len,
        }];
        let mut local = [io::IoSliceMut::new(buf)];
        let done = self.reach(|pid| nix::sys::uio::process_vm_readv(pid, &mut local, &remote));
        check(done, len).map_err(|source| MemoryError::Read { addr, len, source })
    }
}

/// The memory of a live process, by `/proc/PID/mem`. For a forked process whose pages are still shared with another one:
/// `process_vm_readv` pins what it reads, and for that the kernel (from 5.19 on) first makes a page that is shared after a fork
/// the process's own, by copying it. So reading by it doubles the memory of a copy; this does not.
#[derive(Debug)]
pub struct MemoryFile {
    file: std::fs::File,
}

impl MemoryFile {
    /// Opens the memory of process `pid`.
    ///
    /// # Errors
    /// When there is no such process, or it may not be read.
    pub fn open(pid: i32) -> io::Result<Self> {
        let file = std::fs::File::open(format!("/proc/{pid}/mem"))?;
        Ok(Self { file })
    }
}

impl RemoteMemory for MemoryFile {
    fn read_into(&self, addr: RemoteAddr, buf: &mut [u8]) -> Result<(), MemoryError> {
        use std::os::unix::fs::FileExt;
        let len = buf.len();
        self.file
            .read_exact_at(buf, addr.0)
            .map_err(|source| MemoryError::Read { addr, len, source })
    }
}

/// A transfer that stopped half way ran into unmapped memory.
fn check(done: nix::Result<usize>, wanted: usize) -> io::Result<()> {
    match done {
        Ok(n) if n == wanted => Ok(()),
        Ok(_) => Err(nix::errno::Errno::EFAULT.into()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_this_very_process() {
        let memory = ProcessMemory::new(nix::unistd::getpid().as_raw());
        let value = std::sync::atomic::AtomicU64::new(0x1122_3344_5566_7788);
        let addr = RemoteAddr(value.as_ptr() as u64);
        assert_eq!(memory.read_u64(addr).unwrap(), 0x1122_3344_5566_7788);
        memory.write(addr, &7_u64.to_le_bytes()).unwrap();
        assert_eq!(value.load(std::sync::atomic::Ordering::SeqCst), 7);
    }

    #[test]
    fn the_memory_file_reads_the_same() {
        let memory = MemoryFile::open(nix::unistd::getpid().as_raw()).unwrap();
        let value = 0x1122_3344_5566_7788_u64;
        assert_eq!(memory.read_u64(RemoteAddr(&raw const value as u64)).unwrap(), value);
        assert!(memory.read_u64(RemoteAddr(0x10)).is_err());
        assert!(memory.read_u64(RemoteAddr(u64::MAX)).is_err());
    }

    #[test]
    fn an_unmapped_address_is_an_error_with_the_address_in_it() {
        let memory = ProcessMemory::new(nix::unistd::getpid().as_raw());
        let error = memory.read_u64(RemoteAddr(0x10)).unwrap_err();
        assert_eq!(error.to_string(), "cannot read 8 bytes at 0x10");
    }
}
