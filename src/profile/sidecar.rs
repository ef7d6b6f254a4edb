//! The sidecar `._hpx`: what pyheap knows and the heapprof files cannot hold.
//!
//! JSON lines, only ever appended to; `docs/format.md` has them field by field. Every command works without the file,
//! so reading it is lenient: a line that is cut, damaged or of a kind unknown here is skipped and counted, never an
//! error. The one thing that is refused is a sidecar of another recording, told by its start time.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::facts::{End, Facts, Losses, MemorySample};
use super::model::Function;

/// The version in the first line. It changes when old readers would misunderstand new lines; new fields and new kinds
/// of lines do not need it.
pub const SIDECAR_FORMAT: u32 = 1;

/// The number of a domain that is not known.
pub const DOMAIN_UNKNOWN: u8 = u8::MAX;

/// The first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Always 1: says whose file this is.
    pub pyheap: u32,
    /// [`SIDECAR_FORMAT`].
    pub format: u32,
    /// Start of the recording, seconds and nanoseconds since 1970, as in the .hpm.
    pub start: (u64, u32),
    /// Mean distance of samples in bytes; 1 if every allocation is recorded.
    pub period_bytes: u64,
    /// About the target.
    pub facts: Facts,
}

/// From an event on, allocations of a trace come from this domain and thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The first event that it holds for, counted from 0 in the .hpd.
    pub event: u64,
    /// Allocator domain: 0 raw, 1 mem, 2 obj, [`DOMAIN_UNKNOWN`].
    pub domain: u8,
    /// Thread id as the target's host counts it, 0 if unknown.
    pub thread: u32,
}

/// One line after the first. The keys are short because there is a line for each trace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Line {
    /// File and function name; lines of this kind are numbered from 0.
    #[serde(rename = "f")]
    Function(String, String),
    /// Trace index, then pairs of function number and line, innermost first.
    #[serde(rename = "t")]
    Trace(u32, Vec<u32>),
    /// Event number, trace index, domain, thread; see [`Origin`].
    #[serde(rename = "o")]
    Origin(u64, u32, u8, u32),
    /// Number that the shim gives a stack, domain, trace index: finds the trace of an entry in the target's live table.
    #[serde(rename = "s")]
    Stack(u64, u8, u32),
    /// Thread id and name.
    #[serde(rename = "thread")]
    Thread(u32, String),
    /// Number of the first of several events that are pieces of one allocation or free, and how many.
    #[serde(rename = "pieces")]
    Pieces(u64, u32),
    /// Microseconds since the start and the target's memory.
    #[serde(rename = "m")]
    Memory(u64, MemorySample),
    /// Microseconds since the start and all counters.
    #[serde(rename = "l")]
    Losses(u64, Losses),
    /// Trace index, and of those of its samples that are alive at the end when each was allocated, in milliseconds since the
    /// start, and its size. Written at the end; a free in the .hpd does not say which of several equal blocks it ends.
    #[serde(rename = "alive")]
    Survivors(u32, Vec<u64>),
    /// Name of a type; lines of this kind are numbered from 0. What is no object has a name in the same way, see
    /// `docs/format.md`.
    #[serde(rename = "k")]
    Kind(String),
    /// Trace index, and what its live samples are: number of the type, size in bytes, how many of that size.
    #[serde(rename = "types")]
    Types(u32, Vec<u64>),
    /// The `types` lines since the one before are of all that was alive so many microseconds after the start.
    #[serde(rename = "typed")]
    Typed(u64),
    /// The last line of the recording.
    #[serde(rename = "end")]
    End(End),
    /// How long a thread of the target stood still while the hooks were taken out, in microseconds. Behind the end, since that is
    /// written before.
    #[serde(rename = "detach_stop_micros")]
    DetachStop(u64),
}

/// A whole sidecar, as far as it could be read.
#[derive(Debug, Clone)]
pub struct Sidecar {
    /// The first line.
    pub header: Header,
    /// The function table.
    pub functions: Vec<Function>,
    /// Frames of each trace, pairs of function number and line, innermost first. Numbers are checked.
    pub traces: HashMap<u32, Vec<(u32, u32)>>,
    /// Where allocations of a trace came from, in order of events.
    pub origins: HashMap<u32, Vec<Origin>>,
    /// Traces by the shim's stack number and the domain.
    pub stacks: HashMap<(u64, u8), u32>,
    /// Names of threads.
    pub threads: BTreeMap<u32, String>,
    /// Events that continue one allocation or free: first event and number of pieces.
    pub pieces: BTreeMap<u64, u32>,
    /// The target's memory over time, microseconds since the start first.
    pub memory: Vec<(u64, MemorySample)>,
    /// The last word on losses.
    pub losses: Losses,
    /// When the survivors of each trace were allocated, in milliseconds since the start, and their sizes; `None` if that was not
    /// written.
    pub survivors: Option<HashMap<u32, Vec<(u64, u64)>>>,
    /// What the live samples were when that was last written; `None` if it never was.
    pub types: Option<LiveTypes>,
    /// When and why it ended; `None` while it is being written, or if pyheap was killed.
    pub end: Option<End>,
    /// How long a thread of the target stood still while the hooks were taken out, in microseconds, if they were.
    pub detach_stop_micros: Option<u64>,
    /// Lines that could not be read.
    pub skipped_lines: usize,
}

/// What live samples are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LiveTypes {
    /// When, in microseconds since the start.
    pub at: u64,
    /// Names of types. Those in round brackets, and buffers, are none.
    pub names: Vec<String>,
    /// Number of the name, size in bytes, and how many samples are of that, by trace. Numbers are checked.
    pub traces: HashMap<u32, Vec<(u32, u64, u64)>>,
}

/// Why a sidecar is not used at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SidecarError {
    /// The first line is missing, cut or something else.
    #[error("its first line is not that of a pyheap sidecar")]
    NoHeader,
    /// It was written by a newer pyheap.
    #[error("its format is {0}, this pyheap reads up to {SIDECAR_FORMAT}")]
    TooNew(u32),
}

impl Sidecar {
    /// Decodes the bytes of a file. A last line without its newline is still being written and is dropped.
    pub fn parse(data: &[u8]) -> Result<Self, SidecarError> {
        let mut lines = data
            .split_inclusive(|byte| *byte == b'\n')
            .filter(|line| line.ends_with(b"\n"));
        let first = lines.next().ok_or(SidecarError::NoHeader)?;
        let header = match serde_json::from_slice::<Header>(first) {
            Ok(header) if header.format <= SIDECAR_FORMAT && header.pyheap == 1 => header,
            other => {
                // A newer header may have lost fields that are required here; its format still says so.
                let format = match other {
                    Ok(header) => Some(u64::from(header.format)),
                    Err(_) => serde_json::from_slice::<serde_json::Value>(first)
                        .ok()
                        .and_then(|v| v["format"].as_u64()),
                };
                let newer = format
                    .and_then(|f| u32::try_from(f).ok())
                    .filter(|format| *format > SIDECAR_FORMAT);
                return Err(newer.map_or(SidecarError::NoHeader, SidecarError::TooNew));
            }
        };
        let mut sidecar = Self {
            header,
            functions: Vec::new(),
            traces: HashMap::new(),
            origins: HashMap::new(),
            stacks: HashMap::new(),
            threads: BTreeMap::new(),
            pieces: BTreeMap::new(),
            memory: Vec::new(),
            losses: Losses::default(),
            survivors: None,
            types: None,
            end: None,
            detach_stop_micros: None,
            skipped_lines: 0,
        };
        let mut pending = LiveTypes::default();
        for line in lines {
            sidecar.add(line, &mut pending);
        }
        if let Some(types) = &mut sidecar.types {
            types.names = pending.names;
        }
        Ok(sidecar)
    }

    fn add(&mut self, line: &[u8], pending: &mut LiveTypes) {
        let Ok(line) = serde_json::from_slice::<Line>(line) else {
            self.skipped_lines += 1;
            // A damaged function line still has its number, or all later ones would be shifted.
            if line.starts_with(b"{\"f\"") {
                self.functions.push(Function::default());
            }
            if line.starts_with(b"{\"k\"") {
                pending.names.push(String::new());
            }
            return;
        };
        match line {
            Line::Function(file, name) => self.functions.push(Function {
                file,
                name: Some(name).filter(|n| !n.is_empty()),
            }),
            Line::Trace(index, flat) => {
                let frames: Vec<_> = flat.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
                let known = frames
                    .iter()
                    .all(|(function, _)| (*function as usize) < self.functions.len());
                if known && flat.len() % 2 == 0 {
                    self.traces.insert(index, frames);
                } else {
                    self.skipped_lines += 1;
                }
            }
            Line::Origin(event, trace, domain, thread) => {
                self.origins
                    .entry(trace)
                    .or_default()
                    .push(Origin { event, domain, thread });
            }
            Line::Stack(stack, domain, trace) => {
                self.stacks.insert((stack, domain), trace);
            }
            Line::Thread(id, name) => {
                self.threads.insert(id, name);
            }
            Line::Pieces(event, count) => {
                self.pieces.insert(event, count);
            }
            Line::Memory(at, sample) => self.memory.push((at, sample)),
            Line::Losses(_, losses) => self.losses = losses,
            Line::Survivors(trace, flat) => {
                let births = flat.chunks_exact(2).map(|pair| (pair[0], pair[1]));
                let survivors = self.survivors.get_or_insert_default();
                survivors.entry(trace).or_default().extend(births);
            }
            Line::Kind(name) => pending.names.push(name),
            Line::Types(trace, flat) => {
                let triples = flat.as_chunks::<3>();
                let known = |kind: u64| {
                    u32::try_from(kind)
                        .ok()
                        .filter(|&kind| (kind as usize) < pending.names.len())
                };
                let counts: Option<Vec<_>> = triples
                    .0
                    .iter()
                    .map(|&[kind, size, count]| Some((known(kind)?, size, count)))
                    .collect();
                match counts.filter(|_| triples.1.is_empty()) {
                    Some(counts) => {
                        pending.traces.insert(trace, counts);
                    }
                    None => self.skipped_lines += 1,
                }
            }
            Line::Typed(at) => {
                self.types = Some(LiveTypes {
                    at,
                    names: Vec::new(),
                    traces: std::mem::take(&mut pending.traces),
                });
            }
            Line::End(end) => self.end = Some(end),
            Line::DetachStop(micros) => self.detach_stop_micros = Some(micros),
        }
    }
}

/// Adds how long the detach held a thread to the sidecar of a recording that has ended.
///
/// # Errors
/// When the file cannot be written.
pub fn note_detach(path: &std::path::Path, stop_micros: u64) -> std::io::Result<()> {
    use std::io::Write as _;
    let mut line = Vec::new();
    put_line(&mut line, &Line::DetachStop(stop_micros));
    std::fs::File::options().append(true).open(path)?.write_all(&line)
}

/// Appends a value as one line.
pub(super) fn put_line<T: Serialize>(out: &mut Vec<u8>, line: &T) {
    // Only maps with keys that are no strings, and failing writers, can make this fail; neither occurs.
    if serde_json::to_writer(&mut *out, line).is_ok() {
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::facts::EndReason;

    fn header() -> Header {
        let facts = Facts {
            pid: Some(7),
            cmdline: vec!["python".into(), "a b".into()],
            ..Facts::default()
        };
        Header {
            pyheap: 1,
            format: 1,
            start: (5, 6),
            period_bytes: 1024,
            facts,
        }
    }

    fn sample() -> Vec<u8> {
        let mut out = Vec::new();
        put_line(&mut out, &header());
        put_line(&mut out, &Line::Function("a.py".into(), "f".into()));
        put_line(&mut out, &Line::Trace(1, vec![0, 12]));
        put_line(&mut out, &Line::Origin(0, 1, 2, 77));
        put_line(
            &mut out,
            &Line::Memory(
                5,
                MemorySample {
                    rss: 9,
                    ..MemorySample::default()
                },
            ),
        );
        put_line(&mut out, &Line::Losses(6, Losses([("dropped".to_owned(), 3)].into())));
        put_line(
            &mut out,
            &Line::End(End::new(8, &EndReason::TargetKilled { signal: 9 })),
        );
        out
    }

    #[test]
    fn lines_are_as_documented() {
        let text = String::from_utf8(sample()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with(r#"{"pyheap":1,"format":1,"start":[5,6],"period_bytes":1024,"facts":{"pid":7,"#));
        assert_eq!(
            lines[1..5],
            [
                r#"{"f":["a.py","f"]}"#,
                r#"{"t":[1,[0,12]]}"#,
                r#"{"o":[0,1,2,77]}"#,
                r#"{"m":[5,{"rss":9}]}"#
            ]
        );
        assert_eq!(
            lines[5..],
            [
                r#"{"l":[6,{"dropped":3}]}"#,
                r#"{"end":{"at":8,"reason":"target-killed","signal":9}}"#
            ]
        );
    }

    #[test]
    fn a_cut_file_is_read_up_to_its_last_whole_line() {
        let whole = sample();
        for cut in 0..=whole.len() {
            let newlines = whole[..cut].iter().filter(|byte| **byte == b'\n').count();
            match Sidecar::parse(&whole[..cut]) {
                Err(error) => assert!(newlines == 0 && error == SidecarError::NoHeader),
                Ok(read) => {
                    assert_eq!((&read.header, read.skipped_lines), (&header(), 0));
                    assert_eq!(
                        (read.traces.len(), read.end.is_some()),
                        (usize::from(newlines > 2), newlines == 7)
                    );
                }
            }
        }
    }

    #[test]
    fn damage_and_unknown_lines_are_skipped_one_by_one() {
        let mut bytes = sample();
        bytes.extend_from_slice(
            b"{\"f\":[\"broken\n{\"new\":1}\n\xFF\n{\"f\":[\"b.py\",\"\"]}\n{\"t\":[2,[2,5]]}\n{\"t\":[3,[9,5]]}\n",
        );
        let read = Sidecar::parse(&bytes).unwrap();
        assert_eq!(read.skipped_lines, 4);
        assert_eq!(read.traces[&2], [(2, 5)]);
        assert_eq!(
            (read.functions[2].file.as_str(), &read.functions[2].name),
            ("b.py", &None)
        );
    }

    #[test]
    fn types_count_when_all_of_them_are_through() {
        let mut bytes = sample();
        let lines = "{\"k\":\"dict\"}\n{\"types\":[1,[0,64,3]]}\n{\"typed\":5}\n{\"k\":\"set\"}\n{\"types\":[1,[1,216,2,0,64,1]]}\n";
        bytes.extend_from_slice(lines.as_bytes());
        let types = |bytes: &[u8]| Sidecar::parse(bytes).unwrap().types.unwrap();
        let first = types(&bytes);
        assert_eq!((first.at, &first.traces[&1][..]), (5, &[(0, 64, 3)][..]));
        bytes.extend_from_slice(b"{\"typed\":9}\n");
        let second = types(&bytes);
        assert_eq!((second.at, &second.traces[&1][..]), (9, &[(1, 216, 2), (0, 64, 1)][..]));
        assert_eq!(second.names, ["dict", "set"]);
        // Numbers that no line has, and halves, are damage.
        bytes.extend_from_slice(b"{\"types\":[1,[2,64,3]]}\n{\"types\":[1,[0,64]]}\n{\"typed\":11}\n");
        let read = Sidecar::parse(&bytes).unwrap();
        assert_eq!((read.skipped_lines, read.types.unwrap().traces.len()), (2, 0));
    }

    /// The example in the documentation is what this module reads.
    #[test]
    fn the_documented_example_is_understood() {
        let text = include_str!("../../docs/format.md");
        let begin = text.find("{\"pyheap\":1").unwrap();
        let example = &text[begin..begin + text[begin..].find("```").unwrap()];
        let read = Sidecar::parse(example.as_bytes()).unwrap();
        assert_eq!((read.skipped_lines, read.header.facts.pid), (0, Some(4242)));
        assert_eq!(
            (read.traces[&1].as_slice(), read.origins[&1][0].thread),
            (&[(0, 7), (1, 3)][..], 4242)
        );
        assert_eq!(read.end.unwrap().describe(), "the target exited with code 0");
    }

    #[test]
    fn a_newer_format_says_so() {
        assert_eq!(
            Sidecar::parse(b"{\"pyheap\":1,\"format\":2}\n").unwrap_err(),
            SidecarError::TooNew(2)
        );
        assert_eq!(Sidecar::parse(b"[]\n").unwrap_err(), SidecarError::NoHeader);
    }
}
