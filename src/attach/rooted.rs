//! Opens files that a target names, without being led anywhere else.
//!
//! The target chooses the names, and may own the folders: what it calls a library may be a link to `/etc/shadow`, a named
//! pipe on which we would wait for ever, or a device that does something when it is opened. So a name is resolved *within the
//! target's root*, as the target itself would (an absolute link there leads to a place there, never to one of ours); what is
//! found is looked at before it is opened, through a descriptor that cannot be exchanged; and only a regular file is.

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens the regular file that process `pid` sees at `path`.
///
/// # Errors
/// When there is none, or it cannot be opened.
pub fn open_in_root(pid: i32, path: &Path) -> io::Result<File> {
    open_below(Path::new(&format!("/proc/{pid}/root")), path)
}

/// Opens the regular file at `path` where that leads if `root` is the root.
///
/// # Errors
/// When there is none, or it cannot be opened.
pub fn open_below(root: &Path, path: &Path) -> io::Result<File> {
    let inside = path.strip_prefix("/").unwrap_or(path);
    let resolved = resolve(
        root,
        inside,
        ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS,
    );
    opened(resolved, &root.join(inside))
}

/// Opens the regular file at a path that the kernel told us: it contains no link, and if it does by now, somebody has
/// exchanged a folder.
///
/// # Errors
/// When there is none, or it cannot be opened.
pub fn open_without_links(path: &Path) -> io::Result<File> {
    let inside = path.strip_prefix("/").unwrap_or(path);
    opened(resolve(Path::new("/"), inside, ResolveFlag::RESOLVE_NO_SYMLINKS), path)
}

/// Opens a regular file, wherever `path` leads.
///
/// # Errors
/// When there is none, or it cannot be opened.
pub fn open_regular(path: &Path) -> io::Result<File> {
    if !path.is_absolute() {
        return Err(not_regular());
    }
    reopen(File::options().read(true).custom_flags(libc::O_PATH).open(path)?)
}

fn resolve(root: &Path, inside: &Path, how: ResolveFlag) -> io::Result<OwnedFd> {
    let root = File::options()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
        .open(root)?;
    let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(how);
    Ok(openat2(&root, inside, how)?)
}

/// Opens what was resolved. Linux before 5.6 and some containers know no `openat2`; what is opened the old way is still
/// compared with memory, or by its build id, before it is believed.
fn opened(resolved: io::Result<OwnedFd>, path: &Path) -> io::Result<File> {
    match resolved {
        Ok(place) => reopen(File::from(place)),
        Err(error)
            if [Errno::ENOSYS as i32, Errno::EPERM as i32]
                .map(Some)
                .contains(&error.raw_os_error()) =>
        {
            open_regular(path)
        }
        Err(error) => Err(error),
    }
}

/// Opens for reading what `place` stands for, if it is a regular file.
fn reopen(place: File) -> io::Result<File> {
    if !place.metadata()?.is_file() {
        return Err(not_regular());
    }
    File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{}", place.as_raw_fd()))
}

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::fs::symlink;

    fn text(file: io::Result<File>) -> String {
        let mut text = String::new();
        file.unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// Links that lead out of the root lead to what is there within it.
    #[test]
    fn nothing_leads_out_of_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::create_dir_all(root.join("lib")).unwrap();
        std::fs::write(dir.path().join("secret"), "outside").unwrap();
        std::fs::write(root.join("secret"), "inside").unwrap();
        symlink("/secret", root.join("lib/absolute")).unwrap();
        symlink("../../../../secret", root.join("lib/relative")).unwrap();
        symlink(dir.path(), root.join("lib/folder")).unwrap();
        symlink("/proc/self/exe", root.join("lib/magic")).unwrap();
        for name in ["/lib/absolute", "/lib/relative", "/lib/../../../secret"] {
            assert_eq!(text(open_below(&root, Path::new(name))), "inside", "{name}");
        }
        for name in ["/lib/folder/secret", "/lib/magic", "/etc", "/nothing"] {
            assert!(open_below(&root, Path::new(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(dir.path().join("file"), "text").unwrap();
        symlink("file", dir.path().join("link")).unwrap();
        for path in [
            dir.path().join("pipe"),
            dir.path().to_owned(),
            "/dev/zero".into(),
            "file".into(),
        ] {
            assert!(open_regular(&path).is_err(), "{}", path.display());
        }
        assert_eq!(text(open_regular(&dir.path().join("link"))), "text");
        // The kernel's paths have no links.
        let folder = std::fs::canonicalize(dir.path()).unwrap();
        assert_eq!(text(open_without_links(&folder.join("file"))), "text");
        assert!(open_without_links(&folder.join("link")).is_err());
    }
}
