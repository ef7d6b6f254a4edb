//! Where files are written: places that nobody else has prepared.
//!
//! pyheap often runs as root, and in folders that others may write to (`/tmp`, a user's home). Who knows the name of a
//! file to come can put a link there that leads to `/etc/passwd`, a named pipe that they read from, or a file of their own
//! that stays theirs. In a folder that only root and we may write to nobody can; elsewhere what stands at the place
//! must be ours or root's. Temporary names cannot be guessed.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// A link of ours may lead to another one.
const MAX_LINKS: u32 = 8;

/// What may be written to when `path` was asked for: `path`, or where it leads if it is a link that may be followed. What is
/// there is opened (and then has to be ours), or it is replaced by a file of ours.
///
/// # Errors
/// When somebody else has put something there that could lead elsewhere.
pub fn writable(path: &Path, opened: bool) -> io::Result<PathBuf> {
    let mut place = path.to_owned();
    for _ in 0..MAX_LINKS {
        let found = match std::fs::symlink_metadata(&place) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(place),
            Err(error) => return Err(error),
        };
        if !is_ours_alone(&folder(&place)) {
            planted(&found, opened)?;
        }
        if !found.is_symlink() {
            return Ok(place);
        }
        // `/dev/stdout` leads to what has no place: only the kernel can follow that.
        if place.starts_with("/dev") || place.starts_with("/proc") {
            return Ok(place);
        }
        place = folder(&place).join(std::fs::read_link(&place)?);
    }
    Err(io::Error::other("too many links lead on from there"))
}

/// A new file beside `path`, for us alone, and its name.
///
/// # Errors
/// When it cannot be created.
pub fn temporary(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut name = path.to_owned().into_os_string();
    name.push(format!(".{:016x}.tmp", rand::random::<u64>()));
    // Nobody's file or link of that name is followed or emptied.
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&name)?;
    Ok((file, name.into()))
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) => parent.to_owned(),
        None => PathBuf::from("/"),
    }
}

fn is_ours(found: &Metadata) -> bool {
    found.uid() == 0 || found.uid() == nix::unistd::geteuid().as_raw()
}

/// Nobody but root and us can put anything into this folder.
fn is_ours_alone(folder: &Path) -> bool {
    std::fs::metadata(folder).is_ok_and(|found| is_ours(&found) && found.mode() & 0o022 == 0)
}

/// Refuses what somebody else may have put there for us.
fn planted(found: &Metadata, opened: bool) -> io::Result<()> {
    let kind = found.file_type();
    let what = if kind.is_symlink() {
        "a link"
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_file() {
        "a file"
    } else {
        "something"
    };
    let reason = if kind.is_file() && !opened {
        return Ok(());
    } else if !is_ours(found) {
        format!("of another user (uid {})", found.uid())
    } else if kind.is_file() && found.nlink() > 1 {
        "that has other names, too".to_owned()
    } else {
        return Ok(());
    };
    let text = format!(
        "in this folder, which others may write to, there is {what} of that name {reason}; choose another place"
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn open_to_all(dir: &Path) {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    }

    /// Root can give files to others: what an attacker would have put there.
    fn give_away(path: &Path) -> bool {
        let nobody = Some(nix::unistd::Uid::from_raw(65_534));
        nix::unistd::fchownat(
            nix::fcntl::AT_FDCWD,
            path,
            nobody,
            None,
            nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW,
        )
        .is_ok()
    }

    #[test]
    fn own_links_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link, further) = (
            dir.path().join("out"),
            dir.path().join("link"),
            dir.path().join("further"),
        );
        symlink("out", &link).unwrap();
        symlink(&link, &further).unwrap();
        for shared in [false, true] {
            if shared {
                open_to_all(dir.path());
            }
            assert_eq!(writable(&further, true).unwrap(), path);
            std::fs::write(&path, "").unwrap();
            assert_eq!(writable(&further, true).unwrap(), path);
        }
        symlink("circle", dir.path().join("circle")).unwrap();
        assert!(writable(&dir.path().join("circle"), true).is_err());
    }

    #[test]
    fn what_others_have_put_there_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let [link, pipe, file, name] = ["link", "pipe", "file", "name"].map(|name| dir.path().join(name));
        symlink("/etc/passwd", &link).unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(&file, "").unwrap();
        std::fs::write(&name, "").unwrap();
        std::fs::hard_link(&name, dir.path().join("other name")).unwrap();
        if ![&link, &pipe, &file].into_iter().all(|path| give_away(path)) {
            // Not root: files of others cannot be made.
            return;
        }
        for path in [&link, &pipe, &file, &name] {
            assert!(writable(path, true).is_ok(), "nobody else can write here");
        }
        open_to_all(dir.path());
        for path in [&link, &pipe, &file, &name] {
            let error = writable(path, true).unwrap_err().to_string();
            assert!(error.contains("others may write to"), "{error}");
        }
        // Those are replaced, not written to.
        assert!(writable(&file, false).is_ok() && writable(&name, false).is_ok());
        assert!(writable(&link, false).is_err() && writable(&pipe, false).is_err());
    }

    #[test]
    fn temporary_names_are_not_known_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let ((_, first), (_, second)) = (temporary(&path).unwrap(), temporary(&path).unwrap());
        assert_ne!(first, second);
        assert_eq!(std::fs::metadata(&first).unwrap().mode() & 0o777, 0o600);
    }
}
