//! Long recordings: when new files begin, and which old ones go.
//!
//! Every profile is complete by itself, since it begins with what is alive, so old ones can go. What may not go is the present one.

use crate::profile::names::{Part, ProfileNames};
use std::collections::VecDeque;
use std::time::Duration;

/// New files begin at most this often because of their size: they begin with what is alive, and that may be much.
const LEAST: Duration = Duration::from_secs(10);

/// What is wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rotation {
    /// New files after this time.
    pub every: Option<Duration>,
    /// New files when the present ones have so many bytes together.
    pub bytes: Option<u64>,
    /// Profiles that are kept, the present one included.
    pub keep: Option<u32>,
    /// Bytes that all of them may have together.
    pub disk: Option<u64>,
}

impl Rotation {
    /// Whether new files should begin, when the present ones are so old and have so many bytes.
    #[must_use]
    pub fn is_due(&self, age: Duration, bytes: u64) -> bool {
        // With a budget there must be room for old files beside the present ones.
        let most = [self.bytes, self.disk.map(|disk| disk / 2)].into_iter().flatten().min();
        self.every.is_some_and(|every| age >= every) || most.is_some_and(|most| bytes >= most && age >= LEAST)
    }

    /// Whether old files may go.
    #[must_use]
    pub const fn removes(&self) -> bool {
        self.keep.is_some() || self.disk.is_some()
    }
}

/// The profiles before the present one.
#[derive(Debug, Default)]
pub struct Past {
    files: VecDeque<(ProfileNames, u64)>,
}

impl Past {
    /// A profile is complete.
    pub fn add(&mut self, names: ProfileNames, bytes: u64) {
        self.files.push_back((names, bytes));
    }

    /// Removes the oldest ones that `rotation` does not keep, when the present one has so many bytes.
    pub fn prune(&mut self, rotation: &Rotation, present: u64) {
        let too_many = |past: &Self| {
            let all = past.files.len() + 1;
            rotation.keep.is_some_and(|keep| all > keep.max(1) as usize)
        };
        let too_large = |past: &Self| {
            let all = past
                .files
                .iter()
                .fold(present, |sum, (_, bytes)| sum.saturating_add(*bytes));
            rotation.disk.is_some_and(|disk| all > disk)
        };
        while too_many(self) || too_large(self) {
            let Some((names, _)) = self.files.pop_front() else {
                return;
            };
            for part in Part::ALL {
                let _ = std::fs::remove_file(names.path(part));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::names::SuffixStyle;

    #[test]
    fn new_files_begin_by_time_or_size() {
        let second = Duration::from_secs;
        let hourly = Rotation {
            every: Some(second(3600)),
            bytes: Some(1 << 20),
            ..Rotation::default()
        };
        assert!(!hourly.is_due(second(3599), 0) && hourly.is_due(second(3600), 0));
        assert!(hourly.is_due(second(11), 1 << 20) && !hourly.is_due(second(9), 1 << 30));
        let budget = Rotation {
            disk: Some(1 << 20),
            ..Rotation::default()
        };
        assert!(budget.is_due(second(11), 1 << 19) && !budget.is_due(second(11), (1 << 19) - 1));
        assert!(!Rotation::default().is_due(second(1 << 30), u64::MAX));
    }

    #[test]
    fn the_oldest_go_first() {
        let dir = tempfile::tempdir().unwrap();
        let mut past = Past::default();
        let names: Vec<_> = (0..5)
            .map(|number| ProfileNames::new(&dir.path().join(format!("run.{number}")), SuffixStyle::default()))
            .collect();
        for names in &names {
            Part::ALL
                .iter()
                .for_each(|part| std::fs::write(names.path(*part), "x").unwrap());
            past.add(names.clone(), 100);
        }
        let there = || names.iter().filter(|names| names.path(Part::Events).exists()).count();
        let keep = Rotation {
            keep: Some(4),
            ..Rotation::default()
        };
        past.prune(&keep, 0);
        assert_eq!(there(), 3);
        let disk = Rotation {
            disk: Some(350),
            ..Rotation::default()
        };
        past.prune(&disk, 100);
        assert!(there() == 2 && !names[2].path(Part::Sidecar).exists());
        // The present one stays, whatever it has.
        past.prune(&disk, 1000);
        assert_eq!(there(), 0);
    }
}
