//! What /proc says about a process, for comparison before and after.
//!
//! Only of a process that does nothing of itself in between (one that blocks in `read(0)`): then every difference is our
//! doing. The rule is equality. The one exception is a mapping that pyheap left on purpose (inert code that could not be
//! proven to be unused) and that `pyheap info PID` names by its start address.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// Lines of /proc/PID/maps.
    pub maps: Vec<String>,
    /// Descriptor → what it leads to.
    pub fds: BTreeMap<String, String>,
    /// Thread ids with the name of each.
    pub tasks: BTreeMap<String, String>,
    /// Of /proc/PID/status, and of each thread's.
    pub status: BTreeMap<String, String>,
    /// Executable file mappings of which pages are private copies.
    pub private_code: BTreeMap<String, String>,
}

/// A tracer must be gone, signal handling unchanged, no privilege lost.
const STATUS: [&str; 13] = [
    "Name",
    "TracerPid",
    "Uid",
    "Gid",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "SigPnd",
    "ShdPnd",
    "CapEff",
    "NoNewPrivs",
    "Seccomp",
    "Threads",
];

impl Picture {
    pub fn of(pid: i32) -> Picture {
        let proc_dir = format!("/proc/{pid}");
        let read = |path: &str| fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let list = |path: &str| -> Vec<String> {
            let entries = fs::read_dir(path).unwrap_or_else(|e| panic!("{path}: {e}"));
            entries
                .flatten()
                .map(|e| e.file_name().to_string_lossy().into_owned())
                .collect()
        };
        let fds = list(&format!("{proc_dir}/fd"))
            .into_iter()
            .map(|fd| {
                let to = fs::read_link(format!("{proc_dir}/fd/{fd}"));
                (
                    fd,
                    to.map_or_else(|e| e.to_string(), |p| p.to_string_lossy().into_owned()),
                )
            })
            .collect();
        let mut status = BTreeMap::new();
        let mut tasks = BTreeMap::new();
        for tid in list(&format!("{proc_dir}/task")) {
            let text = read(&format!("{proc_dir}/task/{tid}/status"));
            for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
                if STATUS.contains(&key) {
                    status.insert(format!("{tid} {key}"), value.trim().to_owned());
                }
            }
            tasks.insert(tid.clone(), status[&format!("{tid} Name")].clone());
        }
        Picture {
            maps: read(&format!("{proc_dir}/maps")).lines().map(str::to_owned).collect(),
            fds,
            tasks,
            status,
            private_code: private_code(&read(&format!("{proc_dir}/smaps"))),
        }
    }

    /// What is different in `after`, a line each; `info` is the output of `pyheap info PID`.
    pub fn differences(&self, after: &Picture, info: &str) -> Vec<String> {
        let mut out = Vec::new();
        let (old, new): (BTreeSet<_>, BTreeSet<_>) = (self.maps.iter().collect(), after.maps.iter().collect());
        out.extend(old.difference(&new).map(|line| format!("maps - {line}")));
        for line in new.difference(&old) {
            let start = line.split('-').next().unwrap_or_default();
            if !info.contains(start) {
                out.push(format!("maps + {line}"));
            }
        }
        for (what, old, new) in [
            ("fd", &self.fds, &after.fds),
            ("task", &self.tasks, &after.tasks),
            ("status", &self.status, &after.status),
            ("private code", &self.private_code, &after.private_code),
        ] {
            for key in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
                if old.get(key) != new.get(key) {
                    out.push(format!("{what} {key}: {:?} became {:?}", old.get(key), new.get(key)));
                }
            }
        }
        out
    }
}

fn private_code(smaps: &str) -> BTreeMap<String, String> {
    let mut mapping = "";
    let mut found = BTreeMap::new();
    for line in smaps.lines() {
        match line.strip_prefix("Anonymous:") {
            Some(size) if mapping.contains(" r-xp ") && mapping.contains('/') && size.trim() != "0 kB" => {
                found.insert(mapping.to_owned(), size.trim().to_owned());
            }
            Some(_) => {}
            None if line.split(' ').next().is_some_and(|word| word.contains('-')) => mapping = line,
            None => {}
        }
    }
    found
}

/// VmRSS in KiB.
pub fn rss_kib(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("a living process");
    let line = text
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("every process with memory has it");
    line.split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("a number of KiB")
}

/// The pid of whoever traces this process; 0 for nobody.
pub fn tracer(pid: i32) -> i32 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}
