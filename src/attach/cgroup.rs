//! The memory cgroup of a process: its limit, and how much of it is used. Versions 1 and 2.
//!
//! What it refuses to do: write there, or take a limit of another hierarchy for one of memory.

use procfs::process::Process;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// A limit from here on is none: version 1 writes the largest number of pages.
const NO_LIMIT: u64 = 1 << 62;

/// A memory cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryCgroup {
    directory: PathBuf,
    is_v2: bool,
    /// Its limit in bytes.
    pub limit_bytes: u64,
}

impl MemoryCgroup {
    /// Of the cgroups that `pid` is in, its own and those above, the one with the smallest limit. `None` without any limit, or
    /// where the hierarchy cannot be seen from here (the process of another container).
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        let process = Process::new(pid).ok()?;
        let mounts = Process::myself().ok()?.mountinfo().ok()?;
        let groups = process.cgroups().ok()?;
        let mut found: Option<Self> = None;
        for group in groups {
            let is_v2 = group.hierarchy == 0;
            if !is_v2 && !group.controllers.iter().any(|controller| controller == "memory") {
                continue;
            }
            let mount = mounts.0.iter().find(|mount| match mount.fs_type.as_str() {
                "cgroup2" => is_v2,
                "cgroup" => !is_v2 && mount.super_options.contains_key("memory"),
                _ => false,
            });
            let Some(mount) = mount else { continue };
            let below = Path::new(&group.pathname).strip_prefix(&mount.root).ok();
            let Some(below) = below else { continue };
            let smallest = Self::smallest(&mount.mount_point, below, is_v2);
            found = [found, smallest]
                .into_iter()
                .flatten()
                .min_by_key(|group| group.limit_bytes);
        }
        found
    }

    fn smallest(top: &Path, below: &Path, is_v2: bool) -> Option<Self> {
        let is_plain = |part: std::path::Component<'_>| part.as_os_str() != OsStr::new("..");
        if !below.components().all(is_plain) {
            return None;
        }
        let whole = top.join(below);
        let limited = |directory: &Path| {
            let name = if is_v2 { "memory.max" } else { "memory.limit_in_bytes" };
            let limit_bytes = number(&directory.join(name)).filter(|limit| *limit < NO_LIMIT)?;
            Some(Self {
                directory: directory.to_owned(),
                is_v2,
                limit_bytes,
            })
        };
        let parents = whole.ancestors().take_while(|directory| directory.starts_with(top));
        parents.filter_map(limited).min_by_key(|group| group.limit_bytes)
    }

    /// What counts against the limit and cannot simply be dropped: usage without inactive pages of files.
    #[must_use]
    pub fn used_bytes(&self) -> Option<u64> {
        let (usage, inactive) = if self.is_v2 {
            ("memory.current", "inactive_file")
        } else {
            ("memory.usage_in_bytes", "total_inactive_file")
        };
        let used = number(&self.directory.join(usage))?;
        let stat = std::fs::read_to_string(self.directory.join("memory.stat")).unwrap_or_default();
        let inactive = stat.lines().find_map(|line| {
            let (name, value) = line.split_once(' ')?;
            (name == inactive).then(|| value.trim().parse::<u64>().ok())?
        });
        Some(used.saturating_sub(inactive.unwrap_or(0)))
    }
}

/// The number in a file; `None` for `max`.
fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: PathBuf, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn the_smallest_limit_on_the_way_up_counts() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        write(top.join("a/memory.max"), "1000\n");
        write(top.join("a/memory.current"), "900\n");
        write(top.join("a/memory.stat"), "anon 5\ninactive_file 300\nactive_file 1\n");
        write(top.join("a/b/memory.max"), "max\n");
        write(top.join("a/b/c/memory.max"), "5000\n");
        let found = MemoryCgroup::smallest(top, Path::new("a/b/c"), true).unwrap();
        assert_eq!((found.limit_bytes, found.used_bytes()), (1000, Some(600)));
        assert_eq!(
            MemoryCgroup::smallest(top, Path::new("a/b"), true).unwrap().limit_bytes,
            1000
        );
        assert_eq!(MemoryCgroup::smallest(top, Path::new("z"), true), None);
        assert_eq!(MemoryCgroup::smallest(&top.join("a"), Path::new("../a"), true), None);
        write(top.join("v1/memory.limit_in_bytes"), "9223372036854771712\n");
        assert_eq!(MemoryCgroup::smallest(top, Path::new("v1"), false), None);
        write(top.join("v1/memory.limit_in_bytes"), "4096\n");
        write(top.join("v1/memory.usage_in_bytes"), "77\n");
        let found = MemoryCgroup::smallest(top, Path::new("v1"), false).unwrap();
        assert_eq!((found.limit_bytes, found.used_bytes()), (4096, Some(77)));
    }
}
