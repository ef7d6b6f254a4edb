//! Opens a profile and answers questions about it.
//!
//! Made for files that are still growing, whose writer was killed, or that are damaged: everything before the damage is
//! used, and [`Reader::warnings`] says in a line each what was skipped. Only a .hpm without a whole header and a missing
//! .hpd make a profile unreadable. Nothing is estimated here that [`live`](super::live) does not estimate, and no file is
//! changed.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fs::File;
use std::io::{self, Read, Take};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::hpd::{Events, RawEvents};
use super::hpm::{HeaderError, TraceFile};
use super::live::Tally;
use super::model::{Live, StackFrame};
use super::names::{Part, ProfileNames};
use super::sampling::{SamplingTable, Weights};
use super::sidecar::Sidecar;

/// Why a profile could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// There is no .hpm of this name.
    #[error("{} is no profile: there is neither {}._hpm nor {}.hpm", .0.display(), .0.display(), .0.display())]
    NotFound(PathBuf),
    /// A file could not be opened or read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The .hpm has no usable header.
    #[error("cannot use {}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Why.
        source: HeaderError,
    },
}

/// What one pass over all events tells.
#[derive(Debug, Clone, Default)]
pub struct Scan {
    /// Number of events.
    pub events: u64,
    /// Those that are allocations.
    pub allocations: u64,
    /// Time of the last event, steps back in time left out.
    pub clock: Duration,
    /// Events whose trace the .hpm does not have.
    pub unknown_traces: u64,
    /// Whether the file ends inside a record, as that of a running recording does.
    pub is_cut: bool,
    warning: Option<String>,
}

impl Scan {
    /// Takes down how the events ended; the counts of kinds are there already.
    pub(super) fn finish(&mut self, events: u64, clock_micros: u64, ending: &super::hpd::Ending) {
        self.events = events;
        self.clock = Duration::from_micros(clock_micros);
        self.is_cut = matches!(ending, super::hpd::Ending::Cut);
        self.warning = ending.warning();
    }
}

/// What is alive at a moment.
#[derive(Debug, Clone)]
pub struct LiveSet {
    /// The moment, since the start.
    pub at: Duration,
    /// Each trace with anything allocated so far, by index.
    pub traces: Vec<(u32, Live)>,
    /// All of them together.
    pub total: Live,
    /// Frees up to then whose allocation is not in the file; they are ignored.
    pub unmatched_frees: u64,
}

/// An open profile, as it was when it was opened: what is recorded afterwards is not seen.
#[derive(Debug)]
pub struct Reader {
    names: ProfileNames,
    events_len: u64,
    traces: TraceFile,
    sidecar: Option<Sidecar>,
    warnings: Vec<String>,
    scan: OnceCell<Scan>,
}

impl Reader {
    /// Opens the profile that `given` names: a filebase, or any of its files, in either spelling.
    pub fn open(given: &Path) -> Result<Self, ReadError> {
        let names = ProfileNames::find(given).ok_or_else(|| not_found(given))?;
        // The length of the events is taken before the traces are read: a recorder writes traces first, so the traces of
        // all events up to there are found, however much is written meanwhile.
        let events_len = events_len(&names.path(Part::Events))?;
        let path = names.path(Part::Traces);
        let mut traces = match File::open(&path).and_then(TraceFile::read) {
            Ok(Ok(traces)) => traces,
            Ok(Err(source)) => return Err(ReadError::Header { path, source }),
            Err(source) => return Err(ReadError::Io { path, source }),
        };
        let mut warnings = std::mem::take(&mut traces.warnings);
        let sidecar = open_sidecar(&names.path(Part::Sidecar), &traces, &mut warnings);
        Ok(Self {
            names,
            events_len,
            traces,
            sidecar,
            warnings,
            scan: OnceCell::new(),
        })
    }

    /// The names of its files.
    pub fn names(&self) -> &ProfileNames {
        &self.names
    }

    /// What is wrong with the files, a line each. Reads all events, once.
    pub fn warnings(&self) -> Result<Vec<String>, ReadError> {
        let scan = self.scan()?;
        let mut warnings = self.warnings.clone();
        warnings.extend(scan.warning.clone());
        if scan.unknown_traces > 0 {
            let count = scan.unknown_traces;
            warnings.push(format!(
                "{count} events have a stack trace that is not in the .hpm; their stack is unknown"
            ));
        }
        Ok(warnings)
    }

    /// The sidecar, if there is a usable one.
    pub fn sidecar(&self) -> Option<&Sidecar> {
        self.sidecar.as_ref()
    }

    /// Start of the recording, since 1970.
    pub fn start(&self) -> Duration {
        let nanos = Duration::from_nanos(self.traces.start_nanos);
        Duration::from_secs(self.traces.start_secs)
            .checked_add(nanos)
            .unwrap_or(Duration::MAX)
    }

    /// Start of the recording as the original computes it, in seconds since 1970.
    pub fn initial_time(&self) -> f64 {
        self.traces.start_secs as f64 + 1e-9 * self.traces.start_nanos as f64
    }

    /// End of the recording so far, in seconds since 1970.
    pub fn final_time(&self) -> Result<f64, ReadError> {
        Ok(self.initial_time() + self.elapsed()?.as_secs_f64())
    }

    /// Length of the recording so far: up to its last event, or what the sidecar knows of later. Reads all events, once.
    pub fn elapsed(&self) -> Result<Duration, ReadError> {
        Ok(self.scan()?.clock.max(self.sidecar_end()))
    }

    /// How far the sidecar knows of the recording, since its start; 0 without one.
    pub fn sidecar_end(&self) -> Duration {
        Duration::from_micros(self.sidecar.as_ref().map_or(0, |sidecar| {
            let end = sidecar.end.as_ref().map_or(0, |end| end.at);
            sidecar.memory.last().map_or(end, |(at, _)| end.max(*at))
        }))
    }

    /// Length of the .hpd when it was opened.
    pub fn events_len(&self) -> u64 {
        self.events_len
    }

    /// Mean distance of samples in bytes, if the sidecar tells.
    pub fn period_bytes(&self) -> Option<u64> {
        self.sidecar.as_ref().map(|sidecar| sidecar.header.period_bytes)
    }

    /// The sampling table of the .hpm.
    pub fn sampling_table(&self) -> &SamplingTable {
        &self.traces.table
    }

    /// How records are weighted: by the exact period if the sidecar tells it, else by the table.
    pub fn weights(&self) -> Weights {
        match self.period_bytes() {
            Some(period_bytes) => Weights::Period(period_bytes),
            None => Weights::Table(self.traces.table.clone()),
        }
    }

    /// The .hpm as it was read.
    pub(crate) fn trace_file(&self) -> &TraceFile {
        &self.traces
    }

    /// Number of traces.
    pub fn trace_count(&self) -> u32 {
        self.traces.trace_count()
    }

    /// File and line of each frame as the .hpm has them, outermost first; `None` if the index has no trace.
    pub fn raw_trace(&self, index: u32) -> Option<Vec<(&str, u32)>> {
        Some(self.traces.trace(index)?.rev().collect())
    }

    /// The frames of a trace, outermost first: from the sidecar, with function names and the frames that a .hpm leaves
    /// out, or else as the .hpm has them.
    pub fn frames(&self, index: u32) -> Option<Vec<StackFrame<'_>>> {
        if let Some(frames) = self.sidecar_frames(index) {
            return Some(frames);
        }
        let raw = self.traces.trace(index)?.rev();
        Some(
            raw.map(|(file, line)| StackFrame {
                file: Cow::Borrowed(file),
                line,
                function: None,
            })
            .collect(),
        )
    }

    fn sidecar_frames(&self, index: u32) -> Option<Vec<StackFrame<'_>>> {
        let sidecar = self.sidecar.as_ref()?;
        let frames: Vec<_> = sidecar
            .traces
            .get(&index)?
            .iter()
            .rev()
            .map(|(function, line)| {
                let function = &sidecar.functions[*function as usize];
                StackFrame {
                    file: Cow::Borrowed(function.file.as_str()),
                    line: *line,
                    function: function.name.as_deref(),
                }
            })
            .collect();
        // The .hpm may have been cut by a full disk and the sidecar not: then it alone knows the trace.
        let Some(raw) = self.traces.trace(index) else {
            return Some(frames);
        };
        let written = frames.iter().filter(|frame| !frame.file.starts_with('<'));
        raw.rev()
            .eq(written.map(|frame| (&*frame.file, frame.line)))
            .then_some(frames)
    }

    /// The events from the first to the last that was written when the profile was opened; each call opens the file anew.
    pub fn events(&self) -> Result<Events<Take<File>>, ReadError> {
        let pieces = self
            .sidecar
            .as_ref()
            .map(|sidecar| sidecar.pieces.clone())
            .unwrap_or_default();
        Ok(Events::new(self.open_events()?, pieces))
    }

    /// The records of the .hpd as they are.
    pub fn raw_events(&self) -> Result<RawEvents<Take<File>>, ReadError> {
        Ok(RawEvents::new(self.open_events()?))
    }

    fn open_events(&self) -> Result<Take<File>, ReadError> {
        let path = self.names.path(Part::Events);
        let file = File::open(&path).map_err(|source| ReadError::Io { path, source })?;
        Ok(file.take(self.events_len))
    }

    /// Adds up the events to a moment that is not before the one that `tally` is at; `pending` is the event that was read and
    /// is later than that.
    pub(crate) fn apply_until(
        events: &mut Events<Take<File>>,
        pending: &mut Option<super::model::Event>,
        at: Option<Duration>,
        mut apply: impl FnMut(&super::model::Event),
    ) {
        while let Some(event) = pending.take().or_else(|| events.next()) {
            if at.is_some_and(|at| event.clock > at) {
                *pending = Some(event);
                return;
            }
            apply(&event);
        }
    }

    /// Reads all events and tells about them; the answer is kept.
    pub fn scan(&self) -> Result<&Scan, ReadError> {
        if let Some(scan) = self.scan.get() {
            return Ok(scan);
        }
        let mut events = self.raw_events()?;
        let mut scan = Scan::default();
        let (mut count, mut clock) = (0, 0u64);
        for event in &mut events {
            count += 1;
            scan.allocations += u64::from(!event.is_free());
            scan.unknown_traces += u64::from(event.trace() > self.trace_count());
            if !event.is_negative() {
                clock = clock.saturating_add(event.secs.saturating_mul(1_000_000).saturating_add(event.micros));
            }
        }
        scan.finish(count, clock, events.ending());
        Ok(self.scan.get_or_init(|| scan))
    }

    /// Hands every event to `visit`.
    pub fn visit(&self, mut visit: impl FnMut(&super::model::Event)) -> Result<(), ReadError> {
        for event in self.events()? {
            visit(&event);
        }
        Ok(())
    }

    /// Keeps what somebody has learned who has read all events.
    pub(super) fn keep_scan(&self, scan: Scan) {
        let _ = self.scan.set(scan);
    }

    /// What was alive `at` this time since the start, events of that very time included; `None` is the end.
    pub fn live_at(&self, at: Option<Duration>) -> Result<LiveSet, ReadError> {
        let mut tally = Tally::new(self.weights(), self.trace_count());
        for event in self.events()? {
            if at.is_some_and(|at| event.clock > at) {
                break;
            }
            tally.apply(&event);
        }
        let mut traces: Vec<_> = tally
            .traces()
            .filter(|(_, live)| live.alloc_objects > 0.0 || live.sampled > 0)
            .map(|(i, l)| (i, *l))
            .collect();
        traces.sort_unstable_by_key(|(index, _)| *index);
        let mut total = Live::default();
        for (_, live) in &traces {
            total.add(live);
        }
        let at = match at {
            Some(at) => at,
            None => self.elapsed()?,
        };
        Ok(LiveSet {
            at,
            traces,
            total,
            unmatched_frees: tally.unmatched_frees(),
        })
    }
}

/// There is no profile of this name; or there may be one, in a directory that may not be searched.
fn not_found(given: &Path) -> ReadError {
    let path = ProfileNames::new(given, Default::default()).path(Part::Traces);
    match std::fs::metadata(&path) {
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => ReadError::Io { path, source },
        _ => ReadError::NotFound(given.to_owned()),
    }
}

fn events_len(path: &Path) -> Result<u64, ReadError> {
    let found = File::open(path).and_then(|file| file.metadata());
    found.map(|found| found.len()).map_err(|source| ReadError::Io {
        path: path.to_owned(),
        source,
    })
}

/// The sidecar, unless it is missing, unusable or of another recording.
fn open_sidecar(path: &Path, traces: &TraceFile, warnings: &mut Vec<String>) -> Option<Sidecar> {
    let data = match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        other => other,
    };
    let unused = match data.map(|data| Sidecar::parse(&data)) {
        Ok(Ok(sidecar)) if sidecar.header.start == (traces.start_secs, traces.start_nanos as u32) => {
            if sidecar.skipped_lines > 0 {
                let count = sidecar.skipped_lines;
                warnings.push(format!(
                    "{count} lines of the .hpx are damaged or of an unknown kind; they are skipped"
                ));
            }
            return Some(sidecar);
        }
        Ok(Ok(_)) => "it belongs to another recording".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    warnings.push(format!("{} is not used: {unused}", path.display()));
    None
}
