//! Which processes are meant, now and in future: a process and its descendants, all of the host, or those of a cgroup.
//!
//! Looked at ten times a second, so only what is new is read: the number that the kernel gave last tells whether anybody came,
//! the names in `/proc` who (if many came), and a process's start time, read again each second, that its number was not given
//! to another one. Whether a process is Python is asked by the caller, when it has had a moment to become what it is going to
//! be.

use super::candidates::WHOLE_COMMAND_CHARS;
use super::process::{Facts, ProcessId, own_family};
use regex_lite::Regex;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// All start times are read again after so long.
const WHOLE: Duration = Duration::from_secs(1);
/// So many new numbers are asked for one by one; else all names are read.
const FEW: i32 = 64;
/// Groups below a cgroup that are looked into.
const MAX_GROUPS: usize = 1024;
/// Where the hierarchy of cgroups is mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// What is meant.
#[derive(Debug, Clone)]
pub enum Selection {
    /// A process and its descendants.
    Tree(i32),
    /// All processes that we see, but for our own ancestors.
    All,
    /// Those of the cgroup in this folder, and of the groups below it.
    Cgroup(PathBuf),
}

impl Selection {
    /// The cgroup at `path`: its folder, or the path that `/proc/PID/cgroup` shows.
    ///
    /// # Errors
    /// With a sentence, when there is no such group.
    pub fn cgroup(path: &Path) -> Result<Self, String> {
        let relative = path.strip_prefix("/").unwrap_or(path);
        let below = |controller: &str| Path::new(CGROUPS).join(controller).join(relative);
        // Version 1 has a tree for each controller; a process is mostly at the same place in all of them.
        let controllers = ["", "unified", "memory", "pids", "cpu", "systemd"];
        let found = [path.to_owned()]
            .into_iter()
            .chain(controllers.map(below))
            .find(|dir| dir.join("cgroup.procs").is_file());
        found.map(Self::Cgroup).ok_or_else(|| {
            format!(
                "there is no cgroup {}: take a folder below {CGROUPS}, or a path as /proc/PID/cgroup shows it",
                path.display()
            )
        })
    }
}

/// A process that was seen.
#[derive(Debug, Clone, Copy)]
struct Known {
    start: u64,
    parent: i32,
    seen: Instant,
    is_meant: bool,
    /// It, or a process that it descends from, carries hooks or a copy of them.
    is_kin: bool,
    /// Whether its command line matches; `None` if that was not asked yet.
    matches: Option<bool>,
}

/// A process that is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meant {
    /// Which.
    pub id: ProcessId,
    /// Since when we know of it.
    pub seen: Instant,
}

/// The processes of a selection.
#[derive(Debug)]
pub struct Crowd {
    selection: Selection,
    pattern: Option<Regex>,
    own: Vec<i32>,
    known: BTreeMap<i32, Known>,
    next_whole: Instant,
    /// The last number that the kernel had given when we looked.
    last_number: Option<i32>,
}

impl Crowd {
    /// Those that are selected and whose command line matches, if there is a `pattern`.
    #[must_use]
    pub fn new(selection: Selection, pattern: Option<Regex>) -> Self {
        Self {
            selection,
            pattern,
            own: own_family(),
            known: BTreeMap::new(),
            next_whole: Instant::now(),
            last_number: None,
        }
    }

    /// Looks who came and went. Those that are meant and alive, in the order of their numbers. That one has ended is seen within a
    /// second.
    pub fn look(&mut self) -> Vec<Meant> {
        let now = Instant::now();
        let whole = now >= self.next_whole;
        if whole {
            self.next_whole = now + WHOLE;
        }
        // Asked before the names are read: who comes in between is seen the next time at the latest.
        let before = std::mem::replace(&mut self.last_number, last_number());
        let since = before
            .zip(self.last_number)
            .map(|(before, last)| before.saturating_add(1)..last.saturating_add(1));
        match since {
            // Numbers are given in ascending order, until they begin again.
            Some(new) if !whole && (0..=FEW).contains(&(new.end - new.start)) => {
                self.look_at(new.filter(|&pid| is_process(pid)).collect(), now, false);
            }
            _ => {
                let present = pids();
                self.known.retain(|pid, _| present.contains(pid));
                self.look_at(present, now, whole);
            }
        }
        self.meant()
    }

    fn look_at(&mut self, present: BTreeSet<i32>, now: Instant, whole: bool) {
        let mut new = Vec::new();
        for pid in present {
            let known = self.known.get(&pid);
            if known.is_some() && !whole {
                continue;
            }
            let Some((start, parent)) = stat(pid) else {
                self.known.remove(&pid);
                continue;
            };
            match self.known.get_mut(&pid).filter(|known| known.start == start) {
                // By exec it may have become what is meant, or is not any more.
                Some(known) => known.matches = None,
                None => {
                    let fresh = Known {
                        start,
                        parent,
                        seen: now,
                        is_meant: false,
                        is_kin: false,
                        matches: None,
                    };
                    self.known.insert(pid, fresh);
                    new.push(pid);
                }
            }
        }
        self.inherit(&new);
        self.select(&new);
    }

    fn meant(&mut self) -> Vec<Meant> {
        let mut meant = Vec::new();
        for (&pid, known) in &mut self.known {
            if !known.is_meant || self.own.contains(&pid) {
                continue;
            }
            let is_match = self.pattern.as_ref().is_none_or(|pattern| {
                *known.matches.get_or_insert_with(|| {
                    let command = Facts::of(pid).map(|facts| facts.short_command(WHOLE_COMMAND_CHARS));
                    command.is_ok_and(|command| pattern.is_match(&command))
                })
            });
            if is_match {
                let id = ProcessId {
                    pid,
                    start_time: known.start,
                };
                meant.push(Meant { id, seen: known.seen });
            }
        }
        meant
    }

    /// Looks at all names the next time: somebody has ended.
    pub fn look_again(&mut self) {
        self.next_whole = Instant::now();
    }

    /// What children have from their parents. Once given it stays, whoever their parent is later.
    fn inherit(&mut self, new: &[i32]) {
        let by_tree = matches!(self.selection, Selection::Tree(_));
        // A parent may have a larger number than its child.
        let mut changed = true;
        while changed {
            changed = false;
            for pid in new {
                let Some(&known) = self.known.get(pid) else { continue };
                let Some(&parent) = self.known.get(&known.parent) else {
                    continue;
                };
                let (kin, meant) = (parent.is_kin, by_tree && parent.is_meant);
                if let Some(known) = self.known.get_mut(pid)
                    && (kin && !known.is_kin || meant && !known.is_meant)
                {
                    known.is_kin |= kin;
                    known.is_meant |= meant;
                    changed = true;
                }
            }
        }
    }

    fn select(&mut self, new: &[i32]) {
        match &self.selection {
            Selection::Tree(root) => {
                if new.contains(root)
                    && let Some(known) = self.known.get_mut(root)
                {
                    known.is_meant = true;
                    self.inherit(new);
                }
            }
            Selection::All => {
                for known in self.known.values_mut() {
                    known.is_meant = true;
                }
            }
            Selection::Cgroup(dir) => {
                let members = members(dir);
                for (pid, known) in &mut self.known {
                    known.is_meant = members.contains(pid);
                }
            }
        }
    }

    /// `pid` carries hooks from now on, and its children copies of them.
    pub fn carries(&mut self, pid: i32) {
        if let Some(known) = self.known.get_mut(&pid) {
            known.is_kin = true;
        }
    }

    /// Those that may carry hooks or copies of them.
    #[must_use]
    pub fn kin(&mut self) -> Vec<i32> {
        self.look_again();
        let _ = self.look();
        self.known
            .iter()
            .filter(|(_, known)| known.is_kin)
            .map(|(&pid, _)| pid)
            .collect()
    }
}

/// The number that the kernel has last given to a process or thread: proc(5), loadavg. `None` where `/proc` shows another pid
/// namespace than ours, which that number is from.
fn last_number() -> Option<i32> {
    let own = std::fs::read_link("/proc/self").ok()?;
    if own.to_str()?.parse() != Ok(std::process::id()) {
        return None;
    }
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_ascii_whitespace().last()?.parse().ok()
}

/// True for the number of a process, and not of a thread: `/proc` knows those, too, but does not list them.
fn is_process(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let group = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    group.is_some_and(|group| group.trim().parse() == Ok(pid))
}

/// All processes that we see.
fn pids() -> BTreeSet<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return BTreeSet::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Start time and parent of a process.
fn stat(pid: i32) -> Option<(u64, i32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&text)
}

fn parse_stat(text: &str) -> Option<(u64, i32)> {
    // The name, in parentheses, may hold anything. The state, field 3, follows it.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let start = fields.nth(17)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some((start, parent))
}

/// The processes of a cgroup and of those below it.
fn members(dir: &Path) -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let mut left = vec![dir.to_owned()];
    let mut seen = 0;
    while let Some(dir) = left.pop() {
        seen += 1;
        if seen > MAX_GROUPS {
            break;
        }
        let text = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        left.extend(
            entries
                .filter(|one| one.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|one| one.path()),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_parsed_whatever_the_name_is() {
        let rest = "1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 777 1000 5 18446744073709551615";
        assert_eq!(parse_stat(&format!("42 (a) S 7) S {rest}")), Some((777, 1)));
        assert_eq!(parse_stat(&format!("42 (python3) Z {rest}")), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_tree_has_its_root_and_what_descends_from_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let meant = |crowd: &mut Crowd| crowd.look().iter().map(|meant| meant.id.pid).collect::<Vec<_>>();
        // Ourselves and those above us are never meant.
        let tree = meant(&mut Crowd::new(Selection::Tree(me), None));
        assert!(tree.contains(&pid) && !tree.contains(&me), "{tree:?}");
        assert!(!meant(&mut Crowd::new(Selection::Tree(pid), None)).contains(&me));
        let mut all = Crowd::new(Selection::All, Some(Regex::new("^sleep 60$").unwrap()));
        crate::attach::process::ProcessId::of(pid).unwrap();
        // It may not have executed its program yet.
        let end = Instant::now() + Duration::from_secs(30);
        while !meant(&mut all).contains(&pid) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(meant(&mut all).contains(&pid));
        all.carries(pid);
        assert_eq!(all.kin(), [pid]);
        child.kill().unwrap();
        child.wait().unwrap();
        all.look_again();
        assert!(!meant(&mut all).contains(&pid));
    }
}
