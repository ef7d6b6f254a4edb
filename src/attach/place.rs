//! Where a process lives: its cgroup, its container, its pod, as far as `/proc` tells.
//!
//! Container engines name cgroups after containers, kubelets after pods' uids; a pod's name is the host name within it, for which its
//! root must be readable. What it refuses to do: ask an engine or an API server.

use super::rooted::open_in_root;
use std::io::Read as _;
use std::path::Path;

/// Most bytes that are read of `/proc/PID/cgroup`.
const MAX_CGROUP_BYTES: u64 = 16 << 10;
/// A host name has at most 253 characters.
const MAX_NAME_BYTES: u64 = 256;
/// Containers' ids are 64 hexadecimal digits.
const ID_DIGITS: usize = 64;
/// As many of them are shown.
const ID_SHOWN: usize = 12;

/// Where a process lives.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Place {
    /// The path of its cgroup, below the root of the hierarchy that we see.
    pub cgroup: Option<String>,
    /// The first digits of the container's id.
    pub container: Option<String>,
    /// The uid of its pod.
    pub pod_uid: Option<String>,
    /// The name of its pod.
    pub pod: Option<String>,
}

impl Place {
    /// Where `pid` lives; all unknown if that cannot be read.
    #[must_use]
    pub fn of(pid: i32) -> Self {
        let mut text = String::new();
        let read = std::fs::File::open(format!("/proc/{pid}/cgroup"))
            .and_then(|file| file.take(MAX_CGROUP_BYTES).read_to_string(&mut text));
        let mut place = read.map_or_else(|_| Self::default(), |_| Self::parse(&text));
        if place.pod_uid.is_some() {
            place.pod = host_name(pid);
        }
        place
    }

    fn parse(text: &str) -> Self {
        // Version 2 has one line, `0::/path`; of version 1 the longest path says most.
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        let Some(path) = paths.max_by_key(|path| path.len()) else {
            return Self::default();
        };
        let clean: String = path.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        Self {
            container: clean.rsplit('/').find_map(container_id),
            pod_uid: clean.split('/').find_map(pod_uid),
            pod: None,
            cgroup: Some(clean),
        }
    }

    /// The shortest name that tells: the pod's, the container's, or the last part of the cgroup's path.
    #[must_use]
    pub fn short(&self) -> String {
        let container = self.container.as_ref();
        match (&self.pod, &self.pod_uid, container, &self.cgroup) {
            (Some(pod), ..) => format!("pod {pod}"),
            (None, Some(uid), ..) => format!("pod {uid}"),
            (None, None, Some(id), _) => format!("container {id}"),
            (None, None, None, Some(path)) => path.rsplit('/').find(|part| !part.is_empty()).unwrap_or("-").to_owned(),
            (None, None, None, None) => "-".to_owned(),
        }
    }
}

/// `cri-containerd-HEX.scope`, `docker-HEX.scope`, `libpod-HEX.scope`, `HEX`.
fn container_id(part: &str) -> Option<String> {
    let is_digit = |c: char| matches!(c, '0'..='9' | 'a'..='f');
    let mut runs = part.split(|c| !is_digit(c));
    let id = runs.find(|run| run.len() == ID_DIGITS)?;
    id.get(..ID_SHOWN).map(str::to_owned)
}

/// `podUID`, `kubepods-burstable-podUID.slice`, where the uid's dashes may be underscores.
fn pod_uid(part: &str) -> Option<String> {
    let start = if part.starts_with("pod") {
        3
    } else {
        part.find("-pod")? + 4
    };
    let uid: String = part.get(start..)?.trim_end_matches(".slice").replace('_', "-");
    let is_uid = (32..=36).contains(&uid.len()) && uid.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    is_uid.then_some(uid)
}

/// The host name that the process's container has, from its own file: that of its UTS namespace can only be asked for within it.
fn host_name(pid: i32) -> Option<String> {
    let mut name = String::new();
    let file = open_in_root(pid, Path::new("/etc/hostname")).ok()?;
    file.take(MAX_NAME_BYTES).read_to_string(&mut name).ok()?;
    let name = name.trim();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c));
    is_name.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f4e0a1b2c3d4e5f60718293a4b5c6d7e8f901234567890abcdef0123456789a";

    fn short(path: &str) -> String {
        Place::parse(path).short()
    }

    #[test]
    fn engines_and_kubelets_are_understood() {
        let uid = "0a1b2c3d-1111-2222-3333-444455556666";
        let under = uid.replace('-', "_");
        let systemd = format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope\n"
        );
        let place = Place::parse(&systemd);
        assert_eq!(
            (place.pod_uid.as_deref(), place.container.as_deref()),
            (Some(uid), Some("3f4e0a1b2c3d"))
        );
        let place = Place::parse(&format!("4:memory:/kubepods/besteffort/pod{uid}/{ID}\n1:cpu:/\n"));
        assert_eq!(
            (place.pod_uid.as_deref(), place.container.as_deref()),
            (Some(uid), Some("3f4e0a1b2c3d"))
        );
        assert_eq!(
            short(&format!("0::/system.slice/docker-{ID}.scope\n")),
            "container 3f4e0a1b2c3d"
        );
        assert_eq!(
            short(&format!("2:memory:/docker/{ID}\n0::/\n")),
            "container 3f4e0a1b2c3d"
        );
    }

    #[test]
    fn what_is_no_container_has_the_name_of_its_group() {
        assert_eq!(short("0::/system.slice/gunicorn.service\n"), "gunicorn.service");
        assert_eq!(short("0::/\n"), "-");
        assert_eq!(short(""), "-");
        assert_eq!(short("0::/user.slice/podium\n"), "podium");
        assert_eq!(short("0::/a\x1b[2Jb\n"), "a?[2Jb");
    }
}
