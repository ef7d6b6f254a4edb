//! Writes a profile while it is recorded.
//!
//! Everything is buffered until [`ProfileWriter::flush`], which hands each file whole records in one write, traces before
//! the events that name them: whoever kills us leaves a valid profile. When a write fails (the disk is full), the file
//! is cut back to its last whole record and what did not get in stays buffered, so that a later flush may succeed.
//!
//! The writer does not intern: equal stacks added twice are two traces. It does not sample and does not match frees with
//! allocations. The rules that make the files better than those of the original heapprof and still readable by it:
//! differences of time are taken between times rounded to microseconds *since the start*, so nothing is lost on the way;
//! sizes from 2^31 are written in pieces; frames whose file begins with `<` go to the sidecar only.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::facts::{End, EndReason, Facts, Losses, MemorySample};
use super::format::*;
use super::names::{Part, ProfileNames, SuffixStyle};
use super::output::Output;
pub use super::output::WriteError;
use super::sampling::SamplingTable;
use super::sidecar::{DOMAIN_UNKNOWN, Header, Line, SIDECAR_FORMAT, put_line};

/// No process has room for a larger block, so a larger size is an error of whoever reported it; it is written as it is,
/// without cutting it in billions of pieces.
const MAX_REAL_BYTES: u64 = 1 << 48;

/// One frame of a stack, as the recorder knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame<'a> {
    /// File name of the code object. What is not Unicode in it was replaced by U+FFFD before.
    pub file: &'a str,
    /// Line number, 0 if there is none.
    pub line: u32,
    /// Function name, empty if unknown.
    pub function: &'a str,
}

/// What else is known of an allocation; it goes to the sidecar. The file stays small if traces are interned by stack,
/// domain and thread; a trace that is shared by several costs a line at every change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocDetail {
    /// Allocator domain as CPython numbers them (0 raw, 1 mem, 2 obj), or [`DOMAIN_UNKNOWN`].
    pub domain: u8,
    /// Thread id, 0 if unknown.
    pub thread: u32,
}

impl Default for AllocDetail {
    fn default() -> Self {
        Self {
            domain: DOMAIN_UNKNOWN,
            thread: 0,
        }
    }
}

/// The files of a profile that is being recorded.
#[derive(Debug)]
pub struct ProfileWriter {
    names: ProfileNames,
    traces: Output,
    events: Output,
    sidecar: Output,
    /// Traces written so far; also the index of the last one.
    trace_count: u32,
    event_count: u64,
    /// The time that a reader has reached, in microseconds since the start.
    emitted_micros: u64,
    /// Numbers of file and function in the sidecar.
    functions: HashMap<(Box<str>, Box<str>), u32>,
    /// Numbers of types in the sidecar.
    kinds: HashMap<Box<str>, u32>,
    /// The detail last written for each trace.
    details: Vec<AllocDetail>,
    /// Whether the sampling table allows pieces.
    may_split: bool,
}

impl ProfileWriter {
    /// Creates `base._hpm`, `base._hpd` and `base._hpx` (or without the underscore) with mode 0600. Older ones are
    /// emptied, and the digest of an older profile is removed. The headers are written at once.
    pub fn create(
        base: &Path,
        style: SuffixStyle,
        start: SystemTime,
        period_bytes: u64,
        facts: &Facts,
    ) -> Result<Self, WriteError> {
        let names = ProfileNames::new(base, style);
        let since_epoch = start.duration_since(UNIX_EPOCH).unwrap_or_default();
        let table = SamplingTable::shared(period_bytes);
        // The smallest piece has half the bytes of a split event, and each piece must be above the whole table.
        let may_split = table.largest_bound() <= MAX_EVENT_BYTES / 2;
        let mut writer = Self {
            traces: Output::create(names.path(Part::Traces))?,
            events: Output::create(names.path(Part::Events))?,
            sidecar: Output::create(names.path(Part::Sidecar))?,
            names,
            trace_count: 0,
            event_count: 0,
            emitted_micros: 0,
            functions: HashMap::new(),
            kinds: HashMap::new(),
            details: Vec::new(),
            may_split,
        };
        for output in [&mut writer.traces, &mut writer.events, &mut writer.sidecar] {
            output.empty()?;
        }
        let digest = writer.names.path(Part::Digest);
        match std::fs::remove_file(&digest) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(WriteError::Create { path: digest, source });
            }
            _ => {}
        }
        writer.traces.record(|out| {
            put_u32(out, VERSION);
            put_u64(out, since_epoch.as_secs());
            put_u64(out, u64::from(since_epoch.subsec_nanos()));
            put_varint(out, table.ranges().len() as u64);
            for range in table.ranges() {
                put_u64(out, range.bound);
                put_u32(out, range.fixed);
            }
        });
        writer.line(&Header {
            pyheap: 1,
            format: SIDECAR_FORMAT,
            start: (since_epoch.as_secs(), since_epoch.subsec_nanos()),
            period_bytes: period_bytes.max(1),
            facts: facts.clone(),
        });
        writer.flush()?;
        Ok(writer)
    }

    /// Adds a stack and gives its index, from 1; or 0, which stands for "no trace known", when all indices are taken.
    ///
    /// Buffers only, and so never fails at present; that it may is kept in the signature for a writer that spills.
    pub fn add_trace(&mut self, innermost_first: &[Frame<'_>]) -> Result<u32, WriteError> {
        if self.trace_count == MAX_TRACE_INDEX {
            return Ok(0);
        }
        self.trace_count += 1;
        self.traces.record(|out| {
            for frame in innermost_first.iter().filter(|frame| !frame.file.starts_with('<')) {
                put_varint(out, u64::from(frame.line) + 1);
                put_varint(out, frame.file.len() as u64);
                out.extend_from_slice(frame.file.as_bytes());
            }
            put_varint(out, 0);
        });
        let mut flat = Vec::with_capacity(2 * innermost_first.len());
        for frame in innermost_first {
            flat.push(self.function(frame));
            flat.push(frame.line);
        }
        self.line(&Line::Trace(self.trace_count, flat));
        self.details.push(AllocDetail::default());
        Ok(self.trace_count)
    }

    /// Adds an allocation of `size` bytes, `at` this time since the start on a clock that does not go back. An earlier
    /// time than that of the event before is taken for the same.
    pub fn alloc(&mut self, at: Duration, trace: u32, size: u64, detail: AllocDetail) {
        if let Some(known) = (trace as usize)
            .checked_sub(1)
            .and_then(|place| self.details.get_mut(place))
            && *known != detail
        {
            *known = detail;
            self.line(&Line::Origin(self.event_count, trace, detail.domain, detail.thread));
        }
        self.event(at, trace, size, 0);
    }

    /// Adds the free of a block, with the trace and size of its allocation.
    pub fn free(&mut self, at: Duration, trace: u32, size: u64) {
        self.event(at, trace, size, HEAD_FREE);
    }

    /// Says which trace a stack of the shim is, by its number and the domain; `pyheap where` looks it up.
    pub fn stack(&mut self, stack: u64, domain: u8, trace: u32) {
        self.line(&Line::Stack(stack, domain, trace));
    }

    /// Adds the name of a thread, once it is known or when it changes.
    pub fn thread(&mut self, thread: u32, name: &str) {
        self.line(&Line::Thread(thread, name.to_owned()));
    }

    /// Adds the target's memory at a moment.
    pub fn memory(&mut self, at: Duration, sample: &MemorySample) {
        self.line(&Line::Memory(micros(at), *sample));
    }

    /// Adds the state of all loss counters; call it when they have changed.
    pub fn losses(&mut self, at: Duration, losses: &Losses) {
        self.line(&Line::Losses(micros(at), losses.clone()));
    }

    /// Adds the samples of a trace that are alive at the end: when each was allocated, in milliseconds since the start, and its
    /// size.
    pub fn survivors(&mut self, trace: u32, births: &[(u64, u64)]) {
        let flat = births.iter().flat_map(|(born, size)| [*born, *size]).collect();
        self.line(&Line::Survivors(trace, flat));
    }

    /// Adds what the live samples of a trace are: type, size in bytes, how many of that. It counts once [`Self::typed`] says
    /// that all traces are through.
    pub fn types<'a>(&mut self, trace: u32, counts: impl Iterator<Item = (&'a str, u64, u64)>) {
        let mut flat = Vec::new();
        for (name, size, count) in counts {
            flat.extend([u64::from(self.kind(name)), size, count]);
        }
        self.line(&Line::Types(trace, flat));
    }

    /// Says that the types added since the last time are those of all that was alive at this moment.
    pub fn typed(&mut self, at: Duration) {
        self.line(&Line::Typed(micros(at)));
    }

    /// Adds the last line of the sidecar. Flush afterwards.
    pub fn end(&mut self, at: Duration, reason: &EndReason) {
        self.line(&Line::End(End::new(micros(at), reason)));
    }

    /// Writes everything buffered: one write a file, traces before events. On an error nothing is lost; see
    /// [`WriteError::Write`]. Events are not written before the traces and the sidecar lines they need.
    pub fn flush(&mut self) -> Result<(), WriteError> {
        self.traces.flush()?;
        self.sidecar.flush()?;
        self.events.flush()
    }

    /// The names of the files.
    pub fn names(&self) -> &ProfileNames {
        &self.names
    }

    /// Events so far, pieces counted each.
    pub fn event_count(&self) -> u64 {
        self.event_count
    }

    /// Traces so far.
    pub fn trace_count(&self) -> u32 {
        self.trace_count
    }

    /// Bytes that wait for a flush.
    pub fn buffered_bytes(&self) -> usize {
        self.traces.buffer.len() + self.events.buffer.len() + self.sidecar.buffer.len()
    }

    /// Bytes in the files so far.
    pub fn written_bytes(&self) -> u64 {
        self.traces.written + self.events.written + self.sidecar.written
    }

    fn event(&mut self, at: Duration, trace: u32, size: u64, kind: u32) {
        // Never a piece above the limit, and all of about the same size.
        let pieces = if self.may_split && size <= MAX_REAL_BYTES {
            size.div_ceil(MAX_EVENT_BYTES).max(1)
        } else {
            1
        };
        if pieces > 1 {
            self.line(&Line::Pieces(
                self.event_count,
                u32::try_from(pieces).unwrap_or(u32::MAX),
            ));
        }
        for piece in 0..pieces {
            let step = micros(at).saturating_sub(self.emitted_micros);
            self.emitted_micros += step;
            let size = size / pieces + u64::from(piece < size % pieces);
            self.events.record(|out| {
                put_u32(out, kind | if trace > MAX_TRACE_INDEX { 0 } else { trace });
                put_varint(out, step / 1_000_000);
                put_varint(out, step % 1_000_000);
                put_varint(out, size);
            });
            self.event_count += 1;
        }
    }

    /// The number of a frame's function in the sidecar.
    fn function(&mut self, frame: &Frame<'_>) -> u32 {
        let key = (frame.file.into(), frame.function.into());
        if let Some(number) = self.functions.get(&key) {
            return *number;
        }
        self.line(&Line::Function(frame.file.to_owned(), frame.function.to_owned()));
        let number = self.functions.len() as u32;
        self.functions.insert(key, number);
        number
    }

    /// The number of a type in the sidecar.
    fn kind(&mut self, name: &str) -> u32 {
        if let Some(number) = self.kinds.get(name) {
            return *number;
        }
        self.line(&Line::Kind(name.to_owned()));
        let number = self.kinds.len() as u32;
        self.kinds.insert(name.into(), number);
        number
    }

    fn line<T: serde::Serialize>(&mut self, line: &T) {
        self.sidecar.record(|out| put_line(out, line));
    }
}

fn micros(at: Duration) -> u64 {
    u64::try_from(at.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_sizes_are_not_cut_in_billions_of_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        let facts = Facts::default();
        let mut writer = ProfileWriter::create(&base, SuffixStyle::Underscore, UNIX_EPOCH, 1 << 26, &facts).unwrap();
        writer.alloc(Duration::ZERO, 0, u64::MAX, AllocDetail::default());
        assert_eq!(writer.event_count(), 1);
        writer.alloc(Duration::ZERO, 0, MAX_EVENT_BYTES, AllocDetail::default());
        assert_eq!(writer.event_count(), 2);
        writer.alloc(Duration::ZERO, 0, MAX_EVENT_BYTES + 1, AllocDetail::default());
        assert_eq!(writer.event_count(), 4);
        // A table that reaches above half the limit leaves no room for pieces that are certain to be recorded.
        let mut coarse =
            ProfileWriter::create(&dir.path().join("c"), SuffixStyle::Plain, UNIX_EPOCH, 1 << 30, &facts).unwrap();
        coarse.alloc(Duration::ZERO, 0, 1 << 33, AllocDetail::default());
        assert_eq!(coarse.event_count(), 1);
    }
}
