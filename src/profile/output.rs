//! A file that is appended to in whole records only, whatever the disk does.

use super::place::writable;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

/// Why a profile could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// A file could not be created or prepared. Nothing of an older profile under this name was changed, except for
    /// files before it in the order .hpm, .hpd, .hpx.
    #[error("cannot create {}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another recording is writing to the same files. Nothing was changed.
    #[error("another recording is writing to {}", path.display())]
    Busy {
        /// The file that is in use.
        path: PathBuf,
    },
    /// A write failed or was cut short. The file holds whole records only; the rest is still buffered.
    #[error("cannot write to {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A file that only ever holds whole records.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    file: File,
    /// Length of the file: the end of its last whole record.
    pub(super) written: u64,
    pub(super) buffer: Vec<u8>,
    /// Where each buffered record ends.
    ends: Vec<usize>,
}

impl Output {
    /// Opens the file for ourselves alone; an older one keeps its bytes until [`empty`](Self::empty).
    pub(super) fn create(path: PathBuf) -> Result<Self, WriteError> {
        let opened = writable(&path, true).and_then(|place| {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600);
            // What leads elsewhere has been followed; what appears meanwhile is not. A pipe that nobody reads does not hold us up.
            options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(place)
        });
        let file = match opened {
            Ok(file) => file,
            Err(source) => return Err(WriteError::Create { path, source }),
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(WriteError::Busy { path }),
            // Some file systems have no locks; then nobody else could hold one.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        Ok(Self {
            path,
            file,
            written: 0,
            buffer: Vec::new(),
            ends: Vec::new(),
        })
    }

    /// Empties the file, and closes it to others.
    pub(super) fn empty(&mut self) -> Result<(), WriteError> {
        let emptied = self.file.metadata().and_then(|found| {
            if !found.is_file() {
                return Ok(());
            }
            // An older file may have been readable by others; a heap profile names their code and data.
            self.file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
            self.file.set_len(0)
        });
        emptied.map_err(|source| WriteError::Create {
            path: self.path.clone(),
            source,
        })
    }

    /// Buffers one record.
    pub(super) fn record(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        encode(&mut self.buffer);
        self.ends.push(self.buffer.len());
    }

    /// Writes the buffered records, at once if nothing interferes.
    pub(super) fn flush(&mut self) -> Result<(), WriteError> {
        let mut done = 0;
        let mut failure = None;
        while done < self.buffer.len() && failure.is_none() {
            // A short write is tried on, to learn its reason.
            match self.file.write_at(&self.buffer[done..], self.written + done as u64) {
                Ok(0) => failure = Some(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => failure = Some(error),
            }
        }
        let whole = self.ends.partition_point(|end| *end <= done);
        let kept = if whole == 0 { 0 } else { self.ends[whole - 1] };
        self.written += kept as u64;
        self.buffer.drain(..kept);
        self.ends.drain(..whole);
        for end in &mut self.ends {
            *end -= kept;
        }
        let Some(source) = failure else { return Ok(()) };
        // If this fails too, the next flush writes over the partial record, and a reader takes it for a cut one.
        let _ = self.file.set_len(self.written);
        Err(WriteError::Write {
            path: self.path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that is always full, and then a disk with room.
    #[test]
    fn what_did_not_fit_is_written_later() {
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut output = Output {
            path: "full".into(),
            file,
            written: 0,
            buffer: Vec::new(),
            ends: Vec::new(),
        };
        output.record(|out| out.extend_from_slice(b"first"));
        output.record(|out| out.extend_from_slice(b"second"));
        let error = output.flush().unwrap_err();
        assert!(matches!(error, WriteError::Write { ref source, .. } if source.kind() == io::ErrorKind::StorageFull));
        assert_eq!((output.written, output.ends.len()), (0, 2));

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("roomy");
        output.file = File::create(&path).unwrap();
        output.flush().unwrap();
        output.record(|out| out.extend_from_slice(b"third"));
        output.flush().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"firstsecondthird");
        assert!(output.buffer.is_empty() && output.ends.is_empty() && output.written == 16);
    }
}
