//! Source lines, read from the target's file system by a thread of their own: a file may lie on a file system that hangs.
//!
//! The target names the files, so they are opened below its root directory only (`openat2`, Linux 5.6; without it there are
//! no source lines), must be regular and of sane size, and must not have been written since the process began: else the line is
//! not that which runs.

use crate::collect::tree::NamedFrame;
use crate::threads;
use crossbeam_channel::{Receiver, Sender, bounded};
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Larger files have no source lines.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Characters of a line that are kept.
const MAX_LINE_CHARS: usize = 200;
/// Lines that are remembered; beyond, all are forgotten.
const MAX_LINES: usize = 1 << 12;
/// Files that the thread remembers.
const MAX_FILES: usize = 16;
/// Questions that may wait.
const QUEUE: usize = 64;

type Key = (Arc<str>, u32);
type Lines = Arc<Mutex<HashMap<Key, Option<Arc<str>>>>>;

/// Gives source lines, sooner or later.
#[derive(Debug)]
pub struct Sources {
    lines: Lines,
    ask: Sender<Key>,
}

impl Sources {
    /// For the process `pid`, which began this long after the epoch.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn new(pid: i32, begun: Option<Duration>) -> std::io::Result<Self> {
        let lines = Lines::default();
        let (ask, questions) = bounded(QUEUE);
        let found = Arc::clone(&lines);
        threads::start("source", move || answer(pid, begun, &questions, &found))?;
        Ok(Self { lines, ask })
    }

    /// The line of a frame, without its indentation, if it is known by now. If not, the next call may have it.
    #[must_use]
    pub fn line(&self, frame: &NamedFrame) -> Option<Arc<str>> {
        if frame.line == 0 || frame.file.starts_with('<') {
            return None;
        }
        let key = (Arc::clone(&frame.file), frame.line);
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lines.get(&key) {
            return known.clone();
        }
        if lines.len() >= MAX_LINES {
            lines.clear();
        }
        // Asked for: not to be asked for again.
        if self.ask.try_send(key.clone()).is_ok() {
            lines.insert(key, None);
        }
        None
    }
}

fn answer(pid: i32, begun: Option<Duration>, questions: &Receiver<Key>, found: &Lines) {
    let mut files: HashMap<Arc<str>, Vec<String>> = HashMap::new();
    for key in questions {
        if files.len() >= MAX_FILES && !files.contains_key(&key.0) {
            files.clear();
        }
        let lines = files
            .entry(Arc::clone(&key.0))
            .or_insert_with(|| read(pid, &key.0, begun).unwrap_or_default());
        let line = (key.1 as usize).checked_sub(1).and_then(|place| lines.get(place));
        let line = line
            .filter(|line| !line.is_empty())
            .map(|line| Arc::from(line.as_str()));
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        found.insert(key, line);
    }
}

/// The lines of a file as the process `pid` sees it; `None` if that cannot be said.
fn read(pid: i32, path: &str, begun: Option<Duration>) -> Option<Vec<String>> {
    // A relative one is relative to where the process was when it began; most stay there.
    let directory = if path.starts_with('/') { "root" } else { "cwd" };
    let directory = File::open(format!("/proc/{pid}/{directory}")).ok()?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = File::from(openat2(&directory, path, how).ok()?);
    let facts = file.metadata().ok()?;
    let is_older = |begun: Duration| facts.mtime() <= i64::try_from(begun.as_secs()).unwrap_or(0);
    if !facts.is_file() || facts.len() > MAX_FILE_BYTES || !begun.is_some_and(is_older) {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let line = |line: &str| line.trim().chars().take(MAX_LINE_CHARS).collect();
    Some(text.lines().map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::SystemTime;

    fn epoch(seconds: i64) -> Option<Duration> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        Some(Duration::from_secs(now.as_secs().saturating_add_signed(seconds)))
    }

    #[test]
    fn lines_of_regular_files_that_are_older_than_the_process() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.py");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\n    two  \n\xff\n").unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let path = path.to_str().unwrap();
        let read = |path: &str, begun| read(pid, path, begun);
        let Some(lines) = read(path, epoch(100)) else {
            // Before Linux 5.6.
            return;
        };
        assert_eq!(lines, ["one", "two", "\u{fffd}"]);
        assert_eq!(read(path, epoch(-100)), None);
        assert_eq!(read(path, None), None);
        for odd in ["/dev/zero", "/", "/no/such/file.py", "", "a\0b"] {
            assert_eq!(read(odd, epoch(100)), None, "{odd:?}");
        }
        let huge = directory.path().join("huge.py");
        File::create(&huge).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert_eq!(read(huge.to_str().unwrap(), epoch(100)), None);
    }

    #[test]
    fn what_was_asked_for_comes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("b.py");
        std::fs::write(&path, "first\nsecond\n").unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        if read(pid, path.to_str().unwrap(), epoch(100)).is_none() {
            return;
        }
        let sources = Sources::new(pid, epoch(100)).unwrap();
        let frame = |line| NamedFrame {
            file: path.to_str().unwrap().into(),
            line,
            function: "f".into(),
        };
        let begun = std::time::Instant::now();
        while sources.line(&frame(2)).is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(sources.line(&frame(2)).as_deref(), Some("second"));
        assert_eq!(sources.line(&frame(0)), None);
    }
}
