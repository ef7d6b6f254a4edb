//! The files of a recording: one profile, or several in a row when the period changes, since a profile has one period.

use super::live::KindCounts;
use super::rotation::{Past, Rotation};
use crate::profile::facts::{EndReason, Facts, Losses, MemorySample};
use crate::profile::names::{self, Part, ProfileNames, SuffixStyle};
use crate::profile::reader::Reader;
use crate::profile::writer::{AllocDetail, Frame, ProfileWriter, WriteError};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// What is being written.
#[derive(Debug)]
pub struct Files {
    now: ProfileWriter,
    base: PathBuf,
    style: SuffixStyle,
    facts: Facts,
    started: SystemTime,
    /// When the present profile began, since the start of the recording.
    begun: Duration,
    period: u64,
    /// Profiles so far.
    parts: u32,
    /// Events in those before the present one.
    events_before: u64,
    rotation: Rotation,
    past: Past,
    /// Bytes of the present profile, for who decides when it is time for the next one.
    bytes: Arc<AtomicU64>,
}

/// Files that are wanted in the middle of a recording.
#[derive(Debug)]
pub struct SaveRequest {
    /// Their filebase.
    pub base: PathBuf,
    /// What they say of the target.
    pub facts: Facts,
    /// When they begin, since the start of the recording.
    pub at: Duration,
}

/// In a part's facts: the name of the part before it.
const CONTINUES: &str = "continues";

/// Removes the later parts of an older recording of that name: they would be taken for parts of the new one. Each says itself
/// which it continues; a number may also be that of a process.
fn remove_older_parts(first: &Path) {
    let directory = first.parent().filter(|parent| !parent.as_os_str().is_empty());
    let Ok(entries) = std::fs::read_dir(directory.unwrap_or(Path::new("."))) else {
        return;
    };
    let own = names::last_word(first);
    let number = |file: &str| {
        let (number, _) = file.strip_prefix(&own)?.strip_prefix('.')?.split_once(['.', '_'])?;
        number.parse::<u32>().ok().filter(|number| *number > 1)
    };
    let numbers: BTreeSet<u32> = entries
        .flatten()
        .filter_map(|entry| number(entry.file_name().to_str()?))
        .collect();
    for number in numbers {
        let base = names::numbered(first, number);
        let before = names::before(&base).map(|before| names::last_word(&before));
        let is_part = Reader::open(&base).is_ok_and(|reader| {
            let facts = reader.sidecar().map(|sidecar| &sidecar.header.facts);
            facts.is_some_and(|facts| facts.more.get(CONTINUES).and_then(|name| name.as_str()) == before.as_deref())
        });
        if let Some(found) = ProfileNames::find(&base).filter(|_| is_part) {
            for part in Part::ALL {
                let _ = std::fs::remove_file(found.path(part));
            }
        }
    }
}

impl Files {
    /// Creates the files that `request` asks for, which begin now, `request.at` after the start of the recording.
    ///
    /// # Errors
    /// As [`Files::create`].
    pub fn save(request: SaveRequest, period: u64) -> Result<Self, WriteError> {
        let SaveRequest { base, facts, at } = request;
        let mut files = Self::create(&base, SuffixStyle::default(), period, facts)?;
        files.started = files.started.checked_sub(at).unwrap_or(SystemTime::UNIX_EPOCH);
        files.begun = at;
        Ok(files)
    }

    /// Creates the first profile, which begins now.
    ///
    /// # Errors
    /// When the files cannot be created.
    pub fn create(base: &Path, style: SuffixStyle, period: u64, facts: Facts) -> Result<Self, WriteError> {
        let started = SystemTime::now();
        let now = ProfileWriter::create(base, style, started, period, &facts)?;
        remove_older_parts(now.names().base());
        Ok(Self {
            now,
            base: base.to_owned(),
            style,
            facts,
            started,
            begun: Duration::ZERO,
            period,
            parts: 1,
            events_before: 0,
            rotation: Rotation::default(),
            past: Past::default(),
            bytes: Arc::default(),
        })
    }

    /// The same files, of which old ones go as `rotation` says.
    #[must_use]
    pub fn rotated(mut self, rotation: Rotation) -> Self {
        self.rotation = rotation;
        self
    }

    /// How they are rotated, and where the size of the present profile stands.
    #[must_use]
    pub fn rotation(&self) -> (Rotation, Arc<AtomicU64>) {
        (self.rotation, Arc::clone(&self.bytes))
    }

    /// Ends the present profile and begins the next: after `run` comes `run.2`.
    ///
    /// # Errors
    /// When one cannot be written or the other not created.
    pub fn next(&mut self, at: Duration, period: u64) -> Result<(), WriteError> {
        let first = ProfileNames::new(&self.base, self.style);
        let base = names::numbered(first.base(), self.parts + 1);
        let mut facts = self.facts.clone();
        let before = names::last_word(self.now.names().base());
        facts.more.insert(CONTINUES.to_owned(), before.into());
        let start = self.started + at;
        let next = ProfileWriter::create(&base, self.style, start, period, &facts)?;
        self.end(
            at,
            &EndReason::Continued {
                next: names::last_word(&base),
            },
        );
        self.now.flush()?;
        self.events_before += self.now.event_count();
        self.past.add(self.now.names().clone(), self.now.written_bytes());
        self.now = next;
        self.tidy();
        self.begun = at;
        self.period = period;
        self.parts += 1;
        Ok(())
    }

    /// The names of the present profile.
    #[must_use]
    pub fn names(&self) -> &ProfileNames {
        self.now.names()
    }

    /// Events so far, in all profiles.
    #[must_use]
    pub fn event_count(&self) -> u64 {
        self.events_before + self.now.event_count()
    }

    /// See [`ProfileWriter::buffered_bytes`].
    #[must_use]
    pub fn buffered_bytes(&self) -> usize {
        self.now.buffered_bytes()
    }

    /// See [`ProfileWriter::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&mut self) -> Result<(), WriteError> {
        self.now.flush()?;
        self.tidy();
        Ok(())
    }

    /// Tells how large the present profile is, and removes old ones.
    fn tidy(&mut self) {
        let bytes = self.now.written_bytes();
        self.bytes.store(bytes, Ordering::Release);
        self.past.prune(&self.rotation, bytes);
    }

    /// See [`ProfileWriter::add_trace`].
    ///
    /// # Errors
    /// As there.
    pub fn add_trace(&mut self, frames: &[Frame<'_>]) -> Result<u32, WriteError> {
        self.now.add_trace(frames)
    }

    /// See [`ProfileWriter::stack`].
    pub fn stack(&mut self, stack: u64, domain: u8, trace: u32) {
        self.now.stack(stack, domain, trace);
    }

    /// See [`ProfileWriter::thread`].
    pub fn thread(&mut self, thread: u32, name: &str) {
        self.now.thread(thread, name);
    }

    /// An allocation; times are since the start of the recording.
    pub fn alloc(&mut self, at: Duration, trace: u32, size: u64, detail: AllocDetail) {
        self.now.alloc(at.saturating_sub(self.begun), trace, size, detail);
    }

    /// A free.
    pub fn free(&mut self, at: Duration, trace: u32, size: u64) {
        self.now.free(at.saturating_sub(self.begun), trace, size);
    }

    /// The target's memory.
    pub fn memory(&mut self, at: Duration, sample: &MemorySample) {
        self.now.memory(at.saturating_sub(self.begun), sample);
    }

    /// What the live samples are at a moment, of the profile with this period: nothing is written if that is not the present one.
    pub fn kinds(&mut self, at: Duration, period: u64, counts: &KindCounts, names: &[Arc<str>]) {
        if period != self.period {
            return;
        }
        for (&trace, counts) in counts {
            let counts = counts.iter().map(|(&(kind, size), &count)| {
                let name = names.get(kind.index()).map_or("(unknown)", |name| name);
                (name, size, count)
            });
            self.now.types(trace, counts);
        }
        self.now.typed(at.saturating_sub(self.begun));
    }

    /// See [`ProfileWriter::survivors`]; what was allocated in an earlier profile has the time of this one's beginning.
    pub fn survivors(&mut self, trace: u32, births: &[(u64, u64)]) {
        let begun = u64::try_from(self.begun.as_millis()).unwrap_or(u64::MAX);
        let births: Vec<_> = births
            .iter()
            .map(|&(born, size)| (born.saturating_sub(begun), size))
            .collect();
        self.now.survivors(trace, &births);
    }

    /// What was lost so far, in all profiles.
    pub fn losses(&mut self, at: Duration, losses: &Losses) {
        self.now.losses(at.saturating_sub(self.begun), losses);
    }

    /// The last line.
    pub fn end(&mut self, at: Duration, reason: &EndReason) {
        self.now.end(at.saturating_sub(self.begun), reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_older_recording_go_and_no_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        let create = |base: &Path| Files::create(base, SuffixStyle::default(), 1 << 17, Facts::default()).unwrap();
        let mut files = create(&base);
        for second in 1..=3 {
            files.next(Duration::from_secs(second), 1 << 18).unwrap();
        }
        drop(files);
        // A process of that number, another recording, and a part in the middle that is gone.
        drop(create(&dir.path().join("run.77")));
        drop(create(&dir.path().join("run2")));
        let names = |base: &str| {
            Part::ALL.map(|part| ProfileNames::new(&dir.path().join(base), SuffixStyle::default()).path(part))
        };
        let _ = names("run.2").map(|path| std::fs::remove_file(path).ok());
        let is_there = |base: &str| names(base).iter().any(|path| path.exists());
        assert!(is_there("run.3") && is_there("run.4"));
        drop(create(&base));
        assert!(!is_there("run.3") && !is_there("run.4"));
        assert!(is_there("run") && is_there("run.77") && is_there("run2"));
    }
}
