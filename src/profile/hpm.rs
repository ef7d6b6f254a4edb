//! Decodes a .hpm: start time, sampling table, stack traces.
//!
//! Works on bytes, in pieces, and opens nothing. Damage never makes it fail, except in the header, without which nothing has a meaning:
//! traces before the damage are kept, those after it are unknown, and a warning says so. A last record that is cut short
//! is no damage: the file is still being written, or its writer was killed.

use std::io::{self, ErrorKind, Read};

use foldhash::HashMap;

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
    /// All different places: number of the file, and line.
    places: Vec<(u32, u32)>,
    /// Number of the place of each frame, traces back to back, outermost first.
    frames: Vec<u32>,
    /// Where each trace ends in `frames`.
    ends: Vec<usize>,
}

impl TraceFile {
    /// Decodes the bytes of a file.
    pub fn parse(data: &[u8]) -> Result<Self, HeaderError> {
        Self::read(data).expect("a slice can be read")
    }

    /// Decodes what `source` gives, up to its end. The file is not kept in memory: the names of a few files are repeated in it
    /// for every frame.
    ///
    /// # Errors
    /// The outer one when it cannot be read.
    pub fn read(source: impl Read) -> io::Result<Result<Self, HeaderError>> {
        let mut pieces = Pieces::new(source);
        let (mut file, len) = loop {
            match Self::header(pieces.bytes()) {
                Err(HeaderError::Cut) if pieces.more(0)? => {}
                Err(error) => return Ok(Err(error)),
                Ok(found) => break found,
            }
        };
        file.read_traces(pieces, len)?;
        Ok(Ok(file))
    }

    /// What is before the traces, and its length.
    fn header(data: &[u8]) -> Result<(Self, usize), HeaderError> {
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
        Ok((file, cursor.pos()))
    }

    fn read_traces(&mut self, mut pieces: Pieces<impl Read>, first: usize) -> io::Result<()> {
        let mut names = Names::default();
        let mut used = first;
        let ending = loop {
            let mut cursor = Cursor::new(pieces.bytes(), used);
            let ending = self.parse_traces(&mut cursor, &mut names);
            used = ending.as_ref().map_or_else(|(begin, _)| *begin, |()| cursor.pos());
            if matches!(ending, Err((_, DecodeError::Overlong))) || !pieces.more(used)? {
                break ending;
            }
            used = 0;
        };
        if let Err((_, DecodeError::Overlong)) = ending {
            let begin = pieces.offset + used as u64;
            let skipped = pieces.len_from(used)?;
            self.warnings.push(format!(
                "stack traces are damaged from byte {begin} on: {skipped} bytes skipped, traces after {} are unknown",
                self.ends.len(),
            ));
        }
        if names.undecodable > 0 {
            let count = names.undecodable;
            self.warnings.push(format!(
                "{count} file names are not UTF-8; what is not is shown as \u{FFFD}"
            ));
        }
        Ok(())
    }

    /// Takes the traces that end in these bytes; the error says where the one begins that does not, and why.
    fn parse_traces(&mut self, cursor: &mut Cursor<'_>, names: &mut Names) -> Result<(), (usize, DecodeError)> {
        while cursor.remaining() > 0 {
            let begin = cursor.pos();
            let first = self.frames.len();
            if let Err(error) = self.parse_trace(cursor, names) {
                self.frames.truncate(first);
                return Err((begin, error));
            }
            self.frames[first..].reverse();
            self.ends.push(self.frames.len());
        }
        Ok(())
    }

    #[inline]
    fn parse_trace(&mut self, cursor: &mut Cursor<'_>, names: &mut Names) -> Result<(), DecodeError> {
        loop {
            let line = match cursor.varint()? {
                0 => return Ok(()),
                line => u32::try_from(line - 1).unwrap_or(u32::MAX),
            };
            let len = cursor.varint()?;
            let name = cursor.take(len)?;
            let number = match names.numbers.get(name) {
                Some(number) => *number,
                None => self.add_name(name, names),
            };
            let place = *names.places.entry((number, line)).or_insert_with(|| {
                self.places.push((number, line));
                self.places.len() as u32 - 1
            });
            self.frames.push(place);
        }
    }

    #[cold]
    fn add_name(&mut self, name: &[u8], names: &mut Names) -> u32 {
        let text = String::from_utf8_lossy(name);
        names.undecodable += u32::from(matches!(text, std::borrow::Cow::Owned(_)));
        let number = self.files.len() as u32;
        self.files.push(text.into_owned());
        names.numbers.insert(name.into(), number);
        number
    }

    /// Number of traces; the last one has this index.
    pub fn trace_count(&self) -> u32 {
        self.ends.len() as u32
    }

    /// All different places of frames, each once: file name and line.
    pub(crate) fn places(&self) -> impl Iterator<Item = (&str, u32)> {
        self.places.iter().map(|place| self.named(*place))
    }

    fn named(&self, (file, line): (u32, u32)) -> (&str, u32) {
        (self.files[file as usize].as_str(), line)
    }

    /// The places of all frames by number, traces back to back, outermost frames first, and where each trace ends.
    pub(crate) fn numbered(&self) -> (&[u32], &[usize]) {
        (&self.frames, &self.ends)
    }

    /// File and line of the frames of a trace, innermost first; `None` for index 0 and beyond the last trace.
    pub fn trace(&self, index: u32) -> Option<impl DoubleEndedIterator<Item = (&str, u32)> + ExactSizeIterator> {
        let place = (index as usize).checked_sub(1)?;
        let end = *self.ends.get(place)?;
        let begin = if place == 0 { 0 } else { self.ends[place - 1] };
        let frames = self.frames[begin..end].iter().rev();
        Some(frames.map(|place| self.named(self.places[*place as usize])))
    }
}

/// The file names that were met.
#[derive(Default)]
struct Names {
    numbers: HashMap<Box<[u8]>, u32>,
    /// What they and lines are together, in the order of `TraceFile::places`.
    places: HashMap<(u32, u32), u32>,
    undecodable: u32,
}

/// So much is read at a time.
const PIECE_BYTES: usize = 256 * 1024;

/// A file in pieces.
struct Pieces<R> {
    source: R,
    /// The first `len` bytes are the file's.
    buffer: Vec<u8>,
    len: usize,
    /// Where the buffer begins in the file.
    offset: u64,
}

impl<R: Read> Pieces<R> {
    fn new(source: R) -> Self {
        Self {
            source,
            buffer: Vec::new(),
            len: 0,
            offset: 0,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// Drops the first `used` bytes and appends a piece of the file: as long again as what is left, so that a record of any
    /// length is reached in a few steps. False at the end.
    fn more(&mut self, used: usize) -> io::Result<bool> {
        self.buffer.copy_within(used..self.len, 0);
        self.offset += used as u64;
        self.len -= used;
        let wanted = self.len + self.len.max(PIECE_BYTES);
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0);
        }
        loop {
            match self.source.read(&mut self.buffer[self.len..]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(read) => {
                    self.len += read;
                    return Ok(read > 0);
                }
            }
        }
    }

    /// Reads the rest, and tells how many bytes there are in all from `used` in the buffer on.
    fn len_from(mut self, used: usize) -> io::Result<u64> {
        Ok((self.len - used) as u64 + io::copy(&mut self.source, &mut io::sink())?)
    }
}
