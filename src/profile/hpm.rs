//! Decodes a .hpm: start time, sampling table, stack traces.
//!
//! Works on bytes, opens nothing. Damage never makes it fail, except in the header, without which nothing has a meaning:
//! traces before the damage are kept, those after it are unknown, and a warning says so. A last record that is cut short
//! is no damage: the file is still being written, or its writer was killed.

use foldhash::{HashMap, HashMapExt};

use super::format::{Cursor, DecodeError, VERSION};
use super::sampling::{SamplingRange, SamplingTable};

/// Why a file is no usable .hpm.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The first word is something else.
    #[error("its format version is {0}, only {VERSION} is known: this is no heapprof profile, or one of a newer kind")]
    Version(u32),
    /// The file ends inside the header.
    #[error("the file ends inside its header")]
    Cut,
    /// The header holds an impossible number.
    #[error("its header is damaged")]
    Damaged,
}

impl From<DecodeError> for HeaderError {
    fn from(error: DecodeError) -> Self {
        match error {
            DecodeError::Cut => Self::Cut,
            DecodeError::Overlong => Self::Damaged,
        }
    }
}

/// The content of a .hpm. File names are kept once each.
#[derive(Debug, Clone, Default)]
pub struct TraceFile {
    /// Start time, seconds since 1970.
    pub start_secs: u64,
    /// Start time, nanoseconds within the second.
    pub start_nanos: u64,
    /// With what probability allocations were recorded.
    pub table: SamplingTable,
    /// What was wrong, a line each.
    pub warnings: Vec<String>,
    files: Vec<String>,
    /// Number of the file and line of each frame, traces back to back, innermost first.
    frames: Vec<(u32, u32)>,
    /// Where each trace ends in `frames`.
    ends: Vec<usize>,
}

impl TraceFile {
    /// Decodes the bytes of a file.
    pub fn parse(data: &[u8]) -> Result<Self, HeaderError> {
        let mut cursor = Cursor::new(data, 0);
        let version = cursor.u32()?;
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        let mut file = Self {
            start_secs: cursor.u64()?,
            start_nanos: cursor.u64()?,
            ..Self::default()
        };
        let count = cursor.varint()?;
        // A range has 12 bytes, so a count that the file cannot hold is found before memory is reserved for it.
        if count > cursor.remaining() as u64 / 12 {
            return Err(HeaderError::Cut);
        }
        let ranges: Result<Vec<_>, DecodeError> = (0..count)
            .map(|_| {
                Ok(SamplingRange {
                    bound: cursor.u64()?,
                    fixed: cursor.u32()?,
                })
            })
            .collect();
        file.table = SamplingTable::from_ranges(ranges?);
        file.parse_traces(cursor);
        Ok(file)
    }

    fn parse_traces<'a>(&mut self, mut cursor: Cursor<'a>) {
        let mut numbers: HashMap<&'a [u8], u32> = HashMap::new();
        let mut undecodable = 0;
        while cursor.remaining() > 0 {
            let begin = cursor.pos();
            let result = loop {
                let line = match cursor.varint() {
                    Ok(0) => break Ok(()),
                    Ok(line) => u32::try_from(line - 1).unwrap_or(u32::MAX),
                    Err(error) => break Err(error),
                };
                let name = match cursor.varint().and_then(|len| cursor.take(len)) {
                    Ok(name) => name,
                    Err(error) => break Err(error),
                };
                let number = *numbers.entry(name).or_insert_with(|| {
                    let text = String::from_utf8_lossy(name);
                    undecodable += u32::from(matches!(text, std::borrow::Cow::Owned(_)));
                    self.files.push(text.into_owned());
                    self.files.len() as u32 - 1
                });
                self.frames.push((number, line));
            };
            match result {
                Ok(()) => self.ends.push(self.frames.len()),
                Err(error) => {
                    self.frames.truncate(self.ends.last().copied().unwrap_or(0));
                    if error != DecodeError::Cut {
                        let skipped = cursor.pos() - begin + cursor.remaining();
                        self.warnings.push(format!(
                            "stack traces are damaged from byte {begin} on: {skipped} bytes skipped, traces after {} are unknown",
                            self.ends.len(),
                        ));
                    }
                    break;
                }
            }
        }
        if undecodable > 0 {
            self.warnings.push(format!(
                "{undecodable} file names are not UTF-8; what is not is shown as \u{FFFD}"
            ));
        }
    }

    /// Number of traces; the last one has this index.
    pub fn trace_count(&self) -> u32 {
        self.ends.len() as u32
    }

    /// File names, each once; frames name them by number.
    pub(crate) fn files(&self) -> &[String] {
        &self.files
    }

    /// Number of the file and line of each frame of a trace, innermost first; `None` as for [`trace`](Self::trace).
    #[inline]
    pub(crate) fn numbered(&self, index: u32) -> Option<&[(u32, u32)]> {
        let place = (index as usize).checked_sub(1)?;
        let end = *self.ends.get(place)?;
        let begin = if place == 0 { 0 } else { self.ends[place - 1] };
        self.frames.get(begin..end)
    }

    /// File and line of the frames of a trace, innermost first; `None` for index 0 and beyond the last trace.
    pub fn trace(&self, index: u32) -> Option<impl DoubleEndedIterator<Item = (&str, u32)> + ExactSizeIterator> {
        let place = (index as usize).checked_sub(1)?;
        let end = *self.ends.get(place)?;
        let begin = if place == 0 { 0 } else { self.ends[place - 1] };
        Some(
            self.frames[begin..end]
                .iter()
                .map(|(file, line)| (self.files[*file as usize].as_str(), *line)),
        )
    }
}
