//! Decodes a .hpd: the events, front to back, in a fixed amount of memory.
//!
//! The file is read, not mapped: it may still be growing, and a file that shrinks under a mapping (a recorder that cuts
//! it back on a full disk) would kill the reader.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::time::Duration;

use super::format::{Cursor, DecodeError, HEAD_FREE, HEAD_NEGATIVE, MAX_EVENT_LEN, MAX_TRACE_INDEX, two_varints};
use super::model::Event;

const CHUNK_BYTES: usize = 256 * 1024;

/// An event as it lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawEvent {
    /// Sign of the difference, kind and trace index.
    pub head: u32,
    /// Whole seconds of the difference.
    pub secs: u64,
    /// Its microseconds.
    pub micros: u64,
    /// Size in bytes.
    pub size: u64,
}

impl RawEvent {
    /// Whether the time difference is negative.
    #[inline]
    pub fn is_negative(self) -> bool {
        self.head & HEAD_NEGATIVE != 0
    }

    /// Whether it ends an allocation.
    #[inline]
    pub fn is_free(self) -> bool {
        self.head & HEAD_FREE != 0
    }

    /// The trace index.
    #[inline]
    pub fn trace(self) -> u32 {
        self.head & MAX_TRACE_INDEX
    }
}

/// How the events of a file ended.
#[derive(Debug, Default)]
pub enum Ending {
    /// Not reached yet, or with a whole record.
    #[default]
    Whole,
    /// Inside a record: normal for a file that is being written.
    Cut,
    /// With something that is no event, at this offset.
    Damaged(u64),
    /// The file could not be read on from this offset.
    Unreadable(u64, std::io::Error),
}

impl Ending {
    /// A line for people, if something was skipped that should not have been.
    pub fn warning(&self) -> Option<String> {
        match self {
            Self::Whole | Self::Cut => None,
            Self::Damaged(offset) => Some(format!(
                "events are damaged from byte {offset} on; all after it is skipped"
            )),
            Self::Unreadable(offset, error) => Some(format!(
                "events could not be read from byte {offset} on ({error}); all after it is skipped"
            )),
        }
    }
}

/// Iterates over the records of a .hpd.
#[derive(Debug)]
pub struct RawEvents<R> {
    source: R,
    /// Only grows; what is read and not yet decoded is between `pos` and `end`.
    buffer: Vec<u8>,
    pos: usize,
    end: usize,
    /// Offset of `buffer` in the file.
    offset: u64,
    at_end: bool,
    ending: Ending,
}

impl<R: Read> RawEvents<R> {
    /// Decodes `source` from where it stands.
    pub fn new(source: R) -> Self {
        Self {
            source,
            buffer: Vec::new(),
            pos: 0,
            end: 0,
            offset: 0,
            at_end: false,
            ending: Ending::Whole,
        }
    }

    /// How it ended, once `next` has returned `None`.
    pub fn ending(&self) -> &Ending {
        &self.ending
    }

    /// Bytes decoded so far.
    #[inline]
    pub fn offset(&self) -> u64 {
        self.offset + self.pos as u64
    }

    fn refill(&mut self) {
        self.buffer.resize(CHUNK_BYTES, 0);
        self.buffer.copy_within(self.pos..self.end, 0);
        self.offset += self.pos as u64;
        self.end -= self.pos;
        self.pos = 0;
        while self.end < MAX_EVENT_LEN && !self.at_end {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.at_end = true,
                Ok(count) => self.end += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.ending = Ending::Unreadable(self.offset + self.end as u64, error);
                    self.at_end = true;
                }
            }
        }
    }
}

impl<R: Read> Iterator for RawEvents<R> {
    type Item = RawEvent;

    // A call would cost as much as the decoding.
    #[inline(always)]
    fn next(&mut self) -> Option<RawEvent> {
        if self.end - self.pos >= MAX_EVENT_LEN
            && let Some(window) = self.buffer.get(self.pos..self.pos + MAX_EVENT_LEN)
            && let Some((event, len)) = decode_usual(window)
        {
            self.pos += len;
            return Some(event);
        }
        self.next_slowly()
    }
}

impl<R: Read> RawEvents<R> {
    /// The next event where it may be cut, unusual, damaged, or not read yet.
    #[cold]
    fn next_slowly(&mut self) -> Option<RawEvent> {
        if self.end - self.pos < MAX_EVENT_LEN && !self.at_end {
            self.refill();
        }
        if self.pos == self.end {
            return None;
        }
        let mut cursor = Cursor::new(&self.buffer[..self.end], self.pos);
        match decode(&mut cursor) {
            Ok(event) => {
                self.pos = cursor.pos();
                Some(event)
            }
            Err(error) => {
                if matches!(self.ending, Ending::Whole) {
                    self.ending = match error {
                        DecodeError::Cut => Ending::Cut,
                        DecodeError::Overlong => Ending::Damaged(self.offset()),
                    };
                }
                self.at_end = true;
                self.offset += self.pos as u64;
                self.pos = 0;
                self.end = 0;
                None
            }
        }
    }
}

/// An event within a second of the one before and with numbers of usual length, and its length, from as many bytes as the
/// longest event has. Nearly all events are such.
#[inline]
fn decode_usual(window: &[u8]) -> Option<(RawEvent, usize)> {
    let head = u32::from_be_bytes(window.get(..4)?.try_into().ok()?);
    if *window.get(4)? != 0 {
        return None;
    }
    let (micros, size, len) = two_varints(window.get(5..13)?.try_into().ok()?)?;
    let event = RawEvent {
        head,
        secs: 0,
        micros,
        size,
    };
    Some((event, 5 + len))
}

fn decode(cursor: &mut Cursor<'_>) -> Result<RawEvent, DecodeError> {
    Ok(RawEvent {
        head: cursor.u32()?,
        secs: cursor.varint()?,
        micros: cursor.varint()?,
        size: cursor.varint()?,
    })
}

/// Iterates over the events of a profile with their times.
#[derive(Debug)]
pub struct Events<R> {
    raw: RawEvents<R>,
    number: u64,
    micros: i64,
    clock_micros: u64,
    /// Events written in pieces, by the number of the first, that are still to come.
    pieces: std::iter::Peekable<std::collections::btree_map::IntoIter<u64, u32>>,
    /// The first event that is no piece of the one before.
    pieces_end: u64,
}

impl<R: Read> Events<R> {
    /// Events of `source`; `pieces` says which of them belong together, by the first one's number.
    pub fn new(source: R, pieces: BTreeMap<u64, u32>) -> Self {
        let pieces = pieces.into_iter().peekable();
        Self {
            raw: RawEvents::new(source),
            number: 0,
            micros: 0,
            clock_micros: 0,
            pieces,
            pieces_end: 0,
        }
    }

    /// How it ended, once `next` has returned `None`.
    pub fn ending(&self) -> &Ending {
        self.raw.ending()
    }
}

impl<R: Read> Iterator for Events<R> {
    type Item = Event;

    #[inline]
    fn next(&mut self) -> Option<Event> {
        let raw = self.raw.next()?;
        let step = raw.secs.saturating_mul(1_000_000).saturating_add(raw.micros);
        if raw.is_negative() {
            self.micros = self.micros.saturating_sub_unsigned(step);
        } else {
            self.micros = self.micros.saturating_add_unsigned(step);
            self.clock_micros = self.clock_micros.saturating_add(step);
        }
        let number = self.number;
        self.number += 1;
        let continues = number < self.pieces_end;
        while let Some((first, count)) = self.pieces.next_if(|(first, _)| *first <= number) {
            if first == number {
                self.pieces_end = number.saturating_add(u64::from(count));
            }
        }
        Some(Event {
            number,
            micros: self.micros,
            clock: Duration::from_micros(self.clock_micros),
            trace: raw.trace(),
            is_free: raw.is_free(),
            size: raw.size,
            continues,
        })
    }
}
