//! How much memory may a process still take before its memory cgroup is at its limit?
//!
//! The shim's tables become resident as they fill. In a container that is nearly full, even a megabyte may be the one for
//! which the kernel kills. What files occupy can be given back and so counts as free.

use std::path::{Path, PathBuf};

/// A hierarchy is not followed further up.
const MAX_DEPTH: usize = 64;

/// The names of one version of the cgroup interface.
struct Names {
    /// Where the hierarchy is mounted, one of these.
    roots: &'static [&'static str],
    limit: &'static str,
    used: &'static str,
    files: [&'static str; 2],
}

const V2: Names = Names {
    roots: &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
    limit: "memory.max",
    used: "memory.current",
    files: ["active_file", "inactive_file"],
};

const V1: Names = Names {
    roots: &["/sys/fs/cgroup/memory"],
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    files: ["total_active_file", "total_inactive_file"],
};

const PROCESSES_V2: Names = Names {
    roots: V2.roots,
    limit: "pids.max",
    used: "pids.current",
    files: ["", ""],
};

const PROCESSES_V1: Names = Names {
    roots: &["/sys/fs/cgroup/pids"],
    limit: "pids.max",
    used: "pids.current",
    files: ["", ""],
};

/// How many tasks the cgroups of `pid` may get more; `None` where there is no limit, or it cannot be told.
#[must_use]
pub fn processes(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    groups(&text, "pids", [&PROCESSES_V2, &PROCESSES_V1])
        .filter_map(|(names, path)| nearest(names, path))
        .min()
}

/// Bytes until the nearest limit of a memory cgroup of `pid`; `None` where there is none, or it cannot be told.
#[must_use]
pub fn of(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    groups(&text, "memory", [&V2, &V1])
        .filter_map(|(names, path)| nearest(names, path))
        .min()
}

/// The lines of `/proc/PID/cgroup` that are about `wanted`: `0::/path` is version 2, `N:…,memory,…:/path` version 1.
fn groups<'a>(
    text: &'a str,
    wanted: &'a str,
    [v2, v1]: [&'static Names; 2],
) -> impl Iterator<Item = (&'static Names, &'a str)> {
    text.lines().filter_map(move |line| {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        match (number, controllers) {
            ("0", "") => Some((v2, path)),
            (_, list) if list.split(',').any(|name| name == wanted) => Some((v1, path)),
            _ => None,
        }
    })
}

/// The least headroom of a group and its parents.
fn nearest(names: &Names, path: &str) -> Option<u64> {
    let relative = Path::new(path.trim_start_matches('/'));
    let of_root = |root: &&str| {
        let all = relative.ancestors().take(MAX_DEPTH);
        all.filter_map(|group| headroom(names, &Path::new(root).join(group)))
            .min()
    };
    names.roots.iter().filter_map(of_root).min()
}

fn headroom(names: &Names, group: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(PathBuf::from(group).join(name)).ok();
    // "max" is no number.
    let limit: u64 = read(names.limit)?.trim().parse().ok()?;
    let used: u64 = read(names.used)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    Some(
        limit
            .saturating_sub(used)
            .saturating_add(file_bytes(&stat, names.files)),
    )
}

fn file_bytes(stat: &str, keys: [&str; 2]) -> u64 {
    let words = stat.lines().filter_map(|line| line.split_once(' '));
    words
        .filter(|(key, _)| keys.contains(key))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_told_apart() {
        let text = "5:devices:/\n4:cpu,memory:/a/b\n0::/c\n";
        let found: Vec<_> = groups(text, "memory", [&V2, &V1])
            .map(|(names, path)| (names.limit, path))
            .collect();
        assert_eq!(found, [("memory.limit_in_bytes", "/a/b"), ("memory.max", "/c")]);
    }

    #[test]
    fn a_group_without_limit_has_no_headroom_to_tell() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "1000\n");
        assert_eq!(headroom(&V2, dir.path()), None);
        write("memory.max", "5000\n");
        write("memory.stat", "anon 7\nactive_file 200\ninactive_file 30\nfile 9999\n");
        assert_eq!(headroom(&V2, dir.path()), Some(4230));
    }
}
