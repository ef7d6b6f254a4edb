//! Writing to files: whole or not at all, and for the user alone.
//!
//! A file is written under a temporary name beside its own and renamed when it is complete, so whoever looks finds the
//! old one or the new one. It has mode 0600, as a heap profile names code and data. What is no regular file (`/dev/null`,
//! a named pipe) is written to directly.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::output::to_stdout_with;
use crate::profile::place;

/// A file could not be written. What was there before is unchanged.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub struct SaveError {
    path: PathBuf,
    source: io::Error,
}

/// Writes to `path`, or to standard output if it is `-`.
///
/// # Errors
/// When it cannot be written. A reader of standard output that has enough is no error.
pub fn save(path: &Path, bytes: &[u8]) -> Result<(), SaveError> {
    save_with(path, |out| out.write_all(bytes))
}

/// The same, for what is too long to be held in memory.
///
/// # Errors
/// As [`save`], and what `write` returns.
pub fn save_with(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), SaveError> {
    let saved = if path == Path::new("-") {
        to_stdout_with(write)
    } else {
        NewFile::create(path).and_then(|mut file| {
            write(&mut file.out)?;
            file.finish()
        })
    };
    saved.map_err(|source| SaveError {
        path: path.to_owned(),
        source,
    })
}

/// A file that has its name only when it is finished; dropped before that, nothing is left of it.
#[derive(Debug)]
pub struct NewFile {
    /// Where its bytes go.
    pub out: BufWriter<File>,
    /// Temporary and real name; `None` if it is written to directly.
    rename: Option<(PathBuf, PathBuf)>,
}

impl NewFile {
    /// Begins a file that will be `path`.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        let place = place::writable(path, false)?;
        match std::fs::metadata(&place) {
            Ok(found) if !found.is_file() => {
                let out = BufWriter::new(OpenOptions::new().write(true).open(&place)?);
                return Ok(Self { out, rename: None });
            }
            _ => {}
        }
        // A link was followed: what it points to is replaced, not the link.
        let (file, temporary) = place::temporary(&place)?;
        Ok(Self {
            out: BufWriter::new(file),
            rename: Some((temporary, place)),
        })
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// When the last bytes cannot be written, or the name not be given; then nothing is left of it.
    pub fn finish(mut self) -> io::Result<()> {
        self.out.flush()?;
        if let Some((temporary, path)) = &self.rename {
            std::fs::rename(temporary, path)?;
            self.rename = None;
        }
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some((temporary, _)) = &self.rename {
            // There is nobody to tell if that fails.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let failed = save_with(&path, |out| {
            out.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        save(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    fn links_and_devices_stay_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("out"), dir.path().join("link"));
        std::fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        save(&link, b"new").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        save(Path::new("/dev/null"), b"nothing").unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
        let error = save(dir.path(), b"").unwrap_err();
        assert!(error.to_string().starts_with("cannot write "));
    }
}
