//! The separate debug file of an interpreter, as distributions ship them, and the offsets that were once read from one.
//!
//! A debug file is looked for where gdb looks: under `/usr/lib/debug/.build-id` by build id, and by the name in
//! `.gnu_debuglink` beside the interpreter, in `.debug` there and under `/usr/lib/debug`; in the target's root first, then in
//! ours. It is taken only if its build id is the interpreter's.
//!
//! Reading DWARF takes some 100 ms, so the offsets are kept, by build id, in `$XDG_CACHE_HOME/pyheap` (else
//! `~/.cache/pyheap`): a text file, a C path and its offset a line. What is read there is validated like anything else; a
//! file that others may write is not read. Failures to write it are nobody's concern.

use super::elf::ElfFile;
use super::module::Module;
use super::rooted::{open_in_root, open_regular};
use crate::frames::{Build, Layout};
use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// A cached file is below 3 KiB.
const MAX_CACHED_BYTES: u64 = 64 << 10;
/// A debug link is a file name.
const MAX_LINK_BYTES: u64 = 4096;

/// Opens the separate debug file of `module`, which is mapped into process `pid`; `None` if there is none that belongs to
/// it.
#[must_use]
pub fn find(module: &Module, pid: i32) -> Option<ElfFile> {
    let id = module.elf.build_id()?;
    let mut names = Vec::new();
    if let (Some(first), Some(rest)) = (id.get(..2), id.get(2..)) {
        names.push(PathBuf::from(format!("usr/lib/debug/.build-id/{first}/{rest}.debug")));
    }
    let folder = module.path.parent().and_then(|path| path.strip_prefix("/").ok());
    if let (Some(link), Some(folder)) = (debug_link(&module.elf), folder) {
        names.push(folder.join(&link));
        names.push(folder.join(".debug").join(&link));
        names.push(Path::new("usr/lib/debug").join(folder).join(&link));
    }
    let theirs = names.iter().map(|name| open_in_root(pid, name));
    // In our own root such a file counts if it is root's: what others may write there is not for us.
    let ours = names.iter().map(|name| {
        let file = open_regular(&Path::new("/").join(name))?;
        let facts = file.metadata()?;
        let is_root_only = facts.uid() == 0 && facts.mode() & 0o022 == 0;
        is_root_only
            .then_some(file)
            .ok_or_else(|| std::io::ErrorKind::PermissionDenied.into())
    });
    theirs
        .chain(ours)
        .filter_map(|file: std::io::Result<_>| ElfFile::open(file.ok()?).ok())
        .find(|file| file.build_id().as_deref() == Some(id.as_str()))
}

/// The file name in `.gnu_debuglink`.
fn debug_link(file: &ElfFile) -> Option<PathBuf> {
    let bytes = file.section_bytes(".gnu_debuglink", MAX_LINK_BYTES).ok()??;
    let name = bytes.split(|byte| *byte == 0).next()?;
    let path = Path::new(std::ffi::OsStr::from_bytes(name));
    // A name, not a path that leads elsewhere.
    path.file_name()
        .filter(|only| *only == path.as_os_str())
        .map(PathBuf::from)
}

/// The folder in which offsets are kept; `None` where there is no home.
#[must_use]
pub fn cache_folder() -> Option<PathBuf> {
    let folder = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    Some(folder.filter(|path| path.is_absolute()).or_else(home)?.join("pyheap"))
}

/// Where the offsets of `build` with the build id of `elf` are kept in `folder`.
fn cache_path(folder: &Path, elf: &ElfFile, build: Build) -> Option<PathBuf> {
    Some(folder.join(format!("{}-{build}", elf.build_id()?)))
}

/// The layout that was kept in `folder` for this build id.
#[must_use]
pub fn cached(folder: &Path, elf: &ElfFile, build: Build) -> Option<Layout> {
    let file = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(cache_path(folder, elf, build)?)
        .ok()?;
    let facts = file.metadata().ok()?;
    let is_ours = facts.is_file() && facts.uid() == nix::unistd::geteuid().as_raw() && facts.mode() & 0o022 == 0;
    let mut text = String::new();
    if !is_ours || file.take(MAX_CACHED_BYTES).read_to_string(&mut text).is_err() {
        return None;
    }
    let offsets: std::collections::HashMap<&str, u64> = text
        .lines()
        .filter_map(|line| {
            let (name, offset) = line.rsplit_once(' ')?;
            Some((name, offset.parse().ok()?))
        })
        .collect();
    Layout::from_lookup(build, |name| offsets.get(name).copied()).ok()
}

/// Makes a layout by `lookup` and keeps what it was made of in `folder` for [`cached`], if that works.
pub fn keep(
    folder: Option<&Path>,
    elf: &ElfFile,
    build: Build,
    lookup: impl Fn(&str) -> Option<u64>,
) -> Option<Layout> {
    let text = RefCell::new(String::new());
    let layout = Layout::from_lookup(build, |name| {
        let offset = lookup(name)?;
        let _ = writeln!(text.borrow_mut(), "{name} {offset}");
        Some(offset)
    });
    let layout = layout.ok()?;
    let _ = folder.and_then(|folder| {
        let path = cache_path(folder, elf, build)?;
        std::fs::create_dir_all(folder).ok()?;
        // Whole or not at all, and under a name of our own until then.
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        let mut file = std::fs::File::options()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&fresh)
            .ok()?;
        let written = file
            .write_all(text.borrow().as_bytes())
            .and_then(|()| std::fs::rename(&fresh, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&fresh);
        }
        Some(())
    });
    Some(layout)
}
