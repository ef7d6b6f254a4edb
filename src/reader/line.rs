//! Lines of stacks: what graphs have as nodes and what users ask for by name.

use std::collections::HashMap;
use std::fmt;
use std::io::Read;
use std::path::Path;
use std::rc::Rc;
use std::str::FromStr;

use foldhash::HashMap as FastMap;

use super::{Mode, ReaderError};
use crate::profile::reader::Reader as Profile;

/// Larger source files are not read for their lines.
const MAX_SOURCE_BYTES: u64 = 8 << 20;
/// So many source files are kept; then all are forgotten.
const MAX_SOURCES: usize = 256;

/// A place in a program: `file:line`, or `file` alone where the line is 0.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RawTraceLine {
    /// File name, as the code object has it.
    pub filename: String,
    /// Line number, 0 if there is none.
    pub lineno: u32,
}

impl fmt::Display for RawTraceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lineno {
            0 => f.write_str(&self.filename),
            line => write!(f, "{}:{line}", self.filename),
        }
    }
}

impl FromStr for RawTraceLine {
    type Err = ReaderError;

    /// Takes `file:line` apart at its last colon.
    fn from_str(text: &str) -> Result<Self, ReaderError> {
        let parts = text.rsplit_once(':');
        let line = parts.and_then(|(file, line)| Some((file, line.trim().parse().ok()?)));
        let (filename, lineno) = line.ok_or_else(|| ReaderError::Line(text.to_owned()))?;
        Ok(Self {
            filename: filename.to_owned(),
            lineno,
        })
    }
}

/// A line of a stack with its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceLine {
    /// File name.
    pub filename: String,
    /// Line number, 0 if there is none.
    pub lineno: u32,
    /// Function, which only a sidecar tells.
    pub function: Option<String>,
    /// The source line as the file has it *now*, without white space around it; empty if there is no such file or line.
    pub fileline: String,
}

/// All different lines of a profile, numbered, and every trace as a list of these numbers.
#[derive(Debug)]
pub(super) struct LineTable {
    lines: Vec<(RawTraceLine, Option<String>)>,
    /// Where in `numbers` a trace ends; it begins where the one before ends.
    ends: Vec<usize>,
    /// Outermost frame first.
    numbers: Vec<u32>,
    /// Whether a trace is known at all: an empty one may be.
    known: Vec<bool>,
}

impl LineTable {
    /// The table of a profile. In exact mode the sidecar's frames are taken where there are any.
    pub(super) fn new(profile: &Profile, mode: Mode) -> Self {
        let mut table = Self {
            lines: Vec::new(),
            ends: Vec::new(),
            numbers: Vec::new(),
            known: Vec::new(),
        };
        if mode == Mode::Exact && profile.sidecar().is_some() {
            table.fill_from_sidecar(profile);
        } else {
            table.fill(profile);
        }
        table
    }

    fn fill(&mut self, profile: &Profile) {
        let file = profile.trace_file();
        let line = |(filename, lineno): (&str, u32)| RawTraceLine {
            filename: filename.to_owned(),
            lineno,
        };
        self.lines = file.places().map(|place| (line(place), None)).collect();
        let (numbers, ends) = file.numbered();
        self.numbers = numbers.to_vec();
        self.ends = ends.to_vec();
        self.known = vec![true; ends.len()];
    }

    fn fill_from_sidecar(&mut self, profile: &Profile) {
        let last = profile
            .sidecar()
            .and_then(|sidecar| sidecar.traces.keys().max().copied());
        // A damaged sidecar may name any index; no trace beyond the number of lines in it is worth a place.
        let limit = profile
            .trace_count()
            .saturating_add(profile.sidecar().map_or(0, |s| s.traces.len() as u32));
        let last = last.unwrap_or(0).max(profile.trace_count()).min(limit);
        let mut seen: FastMap<_, u32> = FastMap::default();
        for index in 1..=last {
            let frames = profile.frames(index);
            self.known.push(frames.is_some());
            for frame in frames.unwrap_or_default() {
                let number = seen.entry(frame).or_insert_with_key(|frame| {
                    let place = RawTraceLine {
                        filename: frame.file.clone().into_owned(),
                        lineno: frame.line,
                    };
                    self.lines.push((place, frame.function.map(str::to_owned)));
                    self.lines.len() as u32 - 1
                });
                self.numbers.push(*number);
            }
            self.ends.push(self.numbers.len());
        }
    }

    /// Numbers of the lines of a trace, outermost first; `None` if the index has no trace.
    #[inline]
    pub(super) fn trace(&self, index: u32) -> Option<&[u32]> {
        let place = (index as usize).checked_sub(1)?;
        if !*self.known.get(place)? {
            return None;
        }
        let begin = if place == 0 { 0 } else { self.ends[place - 1] };
        self.numbers.get(begin..self.ends[place])
    }

    /// The largest trace index in it.
    pub(super) fn trace_count(&self) -> u32 {
        self.ends.len() as u32
    }

    /// How many lines there are.
    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    /// The line of a number.
    pub(super) fn line(&self, number: u32) -> &(RawTraceLine, Option<String>) {
        &self.lines[number as usize]
    }

    /// For each line number the places in `asked` that mean it.
    pub(super) fn find(&self, asked: &[RawTraceLine]) -> FastMap<u32, Vec<usize>> {
        let mut places: HashMap<&RawTraceLine, Vec<usize>> = HashMap::new();
        for (place, line) in asked.iter().enumerate() {
            places.entry(line).or_default().push(place);
        }
        let lines = self.lines.iter().enumerate();
        lines
            .filter_map(|(number, (line, _))| Some((number as u32, places.get(line)?.clone())))
            .collect()
    }
}

/// Source files, read when they are first asked for.
#[derive(Debug, Default)]
pub(super) struct Sources(HashMap<String, Rc<Vec<String>>>);

impl Sources {
    /// A line of a file, without white space around it.
    pub(super) fn line(&mut self, filename: &str, lineno: u32) -> String {
        if self.0.len() >= MAX_SOURCES {
            self.0.clear();
        }
        let lines = self
            .0
            .entry(filename.to_owned())
            .or_insert_with(|| Rc::new(read_lines(Path::new(filename))));
        let line = (lineno as usize).checked_sub(1).and_then(|place| lines.get(place));
        line.cloned().unwrap_or_default()
    }
}

/// The lines of a plain file that is not too large. The name comes from the profile and may be that of anything.
fn read_lines(path: &Path) -> Vec<String> {
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() <= MAX_SOURCE_BYTES) {
        return Vec::new();
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(MAX_SOURCE_BYTES).read_to_end(&mut bytes));
    if read.is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&bytes);
    text.lines().map(|line| line.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_as_text() {
        let line: RawTraceLine = "a:b.py:12".parse().unwrap();
        assert_eq!((line.filename.as_str(), line.lineno), ("a:b.py", 12));
        assert_eq!(line.to_string(), "a:b.py:12");
        assert_eq!("x.py:0".parse::<RawTraceLine>().unwrap().to_string(), "x.py");
        for bad in ["", "x.py", "x.py:", "x.py:a", "x.py:-1"] {
            assert!(bad.parse::<RawTraceLine>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_plain_files_are_read_for_source_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.py");
        std::fs::write(&path, "import x\n  f(1)  \n").unwrap();
        let mut sources = Sources::default();
        let name = path.to_str().unwrap();
        assert_eq!(
            [0, 1, 2, 3].map(|line| sources.line(name, line)),
            ["", "import x", "f(1)", ""]
        );
        assert_eq!(sources.line("/dev/zero", 1), "");
    }
}
