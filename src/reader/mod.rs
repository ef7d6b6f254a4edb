//! The analysis of a profile as a library: everything that the original heapprof's `Reader` answers, and more.
//!
//! ```no_run
//! use pyheap::reader::{DotOptions, Reader};
//! # fn main() -> Result<(), pyheap::reader::ReaderError> {
//! let mut reader = Reader::open("run")?;
//! if !reader.has_digest() {
//!     reader.make_digest(std::time::Duration::from_secs(60), 0.01, |_| std::ops::ControlFlow::Continue(()))?;
//! }
//! let graph = reader.flow_graph_at(600.0)?;
//! std::fs::write("run.dot", graph.as_dot(DotOptions::default())?).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! Two ways to the same questions. A *digest* holds snapshots at regular times: [`Reader::snapshots`] and all that takes a
//! time in seconds reads it, as the original does. The *events* hold every moment: [`Reader::live_snapshot`],
//! [`Reader::series`](Reader::series), [`Reader::window`](Reader::window), [`Reader::ages`](Reader::ages) and
//! [`Reader::take_snapshot`] read them, from the first on, at some 50 million a second, and need no digest.
//!
//! Times are seconds since the start of the recording unless a name says otherwise, sizes are estimated bytes. A
//! [`Mode::Exact`] reader (the default) answers what is true; a [`Mode::Compat`] reader answers what the original's does,
//! to the last digit. `docs/reader.md` lists the differences.
//!
//! A profile may still be growing, may be cut, may be damaged: all before the damage is used, and
//! [`Reader::warnings`] says what was not. Nothing here panics on a file's content.

use std::cell::{OnceCell, RefCell};
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::profile::digest::{self, DigestError, DigestMode, DigestSummary, Progress};
use crate::profile::hpc::{Digest, Snapshot as Entries};
use crate::profile::names::Part;
use crate::profile::reader::{LiveSet, ReadError, Reader as Profile};

mod ages;
mod dot;
mod flow;
mod hpd;
mod line;
pub mod original;
mod series;
mod snapshots;
pub mod tracemalloc;
mod usage;
mod window;

pub use ages::{Age, SizeClass};
pub(crate) use ages::{bin_of, limits_of};
pub use dot::DotOptions;
pub use flow::{FlowEdge, FlowGraph, FlowNode, Recursion};
pub use hpd::{HpdEvent, HpdEvents};
pub use line::{RawTraceLine, TraceLine};
pub use series::{Series, SeriesPoint};
pub use snapshots::{Snapshot, Snapshots};
pub use usage::{TimePlot, Usage};
pub use window::{Bounds, Changes, Window};

use line::{LineTable, Sources};

/// How questions are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Right.
    #[default]
    Exact,
    /// As the original, to the last digit, except where that cannot be computed (it crashes, reads memory that it never
    /// wrote, or overflows 32 bits).
    Compat,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReaderError {
    /// The profile cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The digest cannot be made.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// The question needs a digest.
    #[error("the profile has no digest; make one with `pyheap digest`")]
    NoDigest,
    /// The digest is of a run shorter than one interval, or damaged from its first snapshot on.
    #[error("the digest has no snapshot")]
    NoSnapshot,
    /// A snapshot of the digest cannot be read.
    #[error("snapshot {0} of the digest is damaged; make it again with `pyheap digest`")]
    Snapshot(usize),
    /// A fraction that is none.
    #[error("a fraction must be between 0 and 1, not {0}")]
    Fraction(f64),
    /// A line that is none.
    #[error("`{0}` is no line; write FILE:LINE")]
    Line(String),
    /// Something could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The .hpm: start, sampling, traces.
#[derive(Debug, Clone, Copy)]
pub struct Hpm<'a>(&'a Reader);

impl Hpm<'_> {
    /// Start of the recording in seconds since 1970, right to about 0.12 µs.
    pub fn initial_time(&self) -> f64 {
        self.0.initial_time()
    }

    /// Upper bounds of sizes (exclusive) with the probability of being recorded below them.
    pub fn sampling_rate(&self) -> Vec<(u64, f64)> {
        self.0.sampling_rate()
    }

    /// What one event of `size` bytes stands for: 1/p, or 0 if p is 0. O(log ranges).
    pub fn scale_factor(&self, size: u64) -> f64 {
        match self.0.profile.sampling_table().probability(size) {
            p if p > 0.0 => p.recip(),
            _ => 0.0,
        }
    }

    /// Number of traces; the last has this index.
    pub fn trace_count(&self) -> u32 {
        self.0.profile.trace_count()
    }
}

/// An open profile. What is recorded after it was opened is not seen; open it again to follow a recording.
#[derive(Debug)]
pub struct Reader {
    profile: Profile,
    mode: Mode,
    snapshots: Option<Digest>,
    /// Why there is a digest, but not a usable one.
    digest_warning: Option<String>,
    lines: OnceCell<LineTable>,
    sources: RefCell<Sources>,
}

impl Reader {
    /// Opens the profile that `filebase` names (or any of its files), in exact mode. Reads the .hpm and the sidecar whole,
    /// of the digest only its index, of the events nothing.
    ///
    /// # Errors
    /// When there is no .hpm with a whole header, or no .hpd. A digest that cannot be used is as none; see
    /// [`warnings`](Self::warnings).
    pub fn open(filebase: impl AsRef<Path>) -> Result<Self, ReaderError> {
        Self::open_as(filebase, Mode::Exact)
    }

    /// Opens it in this mode.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_as(filebase: impl AsRef<Path>, mode: Mode) -> Result<Self, ReaderError> {
        let mut reader = Self {
            profile: Profile::open(filebase.as_ref())?,
            mode,
            snapshots: None,
            digest_warning: None,
            lines: OnceCell::new(),
            sources: RefCell::default(),
        };
        reader.load_digest();
        Ok(reader)
    }

    fn load_digest(&mut self) {
        let path = self.profile.names().path(Part::Digest);
        self.digest_warning = None;
        self.snapshots = match Digest::open(&path) {
            Ok(digest) => {
                if digest.is_rebuilt {
                    self.digest_warning = Some("the digest has no index: its maker was interrupted".to_owned());
                }
                Some(digest)
            }
            Err(None) => None,
            Err(Some(why)) => {
                self.digest_warning = Some(format!("the digest is not usable: {why}"));
                None
            }
        };
    }

    /// Closes all files; dropping the reader does the same.
    pub fn close(self) {}

    /// What lies below: files, sidecar, traces and events.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// How this reader answers.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What is wrong with the files, a line each. Reads all events, once.
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn warnings(&self) -> Result<Vec<String>, ReaderError> {
        let mut warnings = self.profile.warnings()?;
        warnings.extend(self.digest_warning.clone());
        Ok(warnings)
    }

    /// Whether there is a digest that can be read.
    pub fn has_digest(&self) -> bool {
        self.snapshots.is_some()
    }

    /// Makes a new digest, replacing an older one when it is complete, and loads it. The interval is cut to whole
    /// milliseconds; the smallest traces of a snapshot, up to the fraction `precision` of its total, are joined under index
    /// 0. `progress` is asked every some thousand events; when it answers `Break`, what was reached becomes a valid,
    /// shorter digest, and the summary says so.
    ///
    /// One pass over the events; memory in proportion to the traces.
    ///
    /// # Errors
    /// An interval below a millisecond, a precision outside of 0 to 1, files that cannot be read or written. An older digest
    /// is untouched then.
    pub fn make_digest(
        &mut self,
        interval: Duration,
        precision: f64,
        progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<DigestSummary, ReaderError> {
        let mode = match self.mode {
            Mode::Exact => DigestMode::Exact,
            Mode::Compat => DigestMode::Compatible,
        };
        let summary = digest::make_digest_with(&self.profile, interval, precision, mode, progress)?;
        self.load_digest();
        Ok(summary)
    }

    /// Start of the recording, in seconds since 1970.
    pub fn initial_time(&self) -> f64 {
        self.profile.initial_time()
    }

    /// End of the recording, in seconds since 1970.
    ///
    /// # Errors
    /// As for [`elapsed_time`](Self::elapsed_time).
    pub fn final_time(&self) -> Result<f64, ReaderError> {
        Ok(self.initial_time() + self.elapsed_time()?)
    }

    /// Length of the recording in seconds: up to the last event, or what the sidecar knows of later. Reads all events,
    /// once. The original answers number of snapshots × interval, and so does a compat reader.
    ///
    /// # Errors
    /// When the events cannot be opened; in compat mode, without a digest.
    pub fn elapsed_time(&self) -> Result<f64, ReaderError> {
        match self.mode {
            Mode::Exact => Ok(self.profile.elapsed()?.as_secs_f64()),
            Mode::Compat => {
                let snapshots = self.snapshots()?;
                Ok(snapshots.len() as f64 * snapshots.interval())
            }
        }
    }

    /// Upper bounds of sizes (exclusive) with the probability of being recorded below them; above the last it is 1.
    pub fn sampling_rate(&self) -> Vec<(u64, f64)> {
        let ranges = self.profile.sampling_table().ranges();
        ranges.iter().map(|range| (range.bound, range.probability())).collect()
    }

    /// Time between snapshots of the digest in seconds. In compat mode it has the single precision of the original: 0.1 s is
    /// 0.10000000149011612.
    ///
    /// # Errors
    /// Without a digest.
    pub fn snapshot_interval(&self) -> Result<f64, ReaderError> {
        Ok(self.snapshots()?.interval())
    }

    /// A trace with its source lines, outermost frame first; `None` if there is no such trace (in compat mode also if it is
    /// empty). With functions and `<…>` frames where a sidecar has them, in exact mode.
    ///
    /// Source files are read when first asked for, as they are now.
    pub fn trace(&self, index: u32) -> Option<Vec<TraceLine>> {
        let numbers = self.lines().trace(index)?;
        if numbers.is_empty() && self.mode == Mode::Compat {
            return None;
        }
        let mut sources = self.sources.borrow_mut();
        let lines = numbers.iter().map(|number| {
            let (line, function) = self.lines().line(*number).clone();
            TraceLine {
                fileline: sources.line(&line.filename, line.lineno),
                filename: line.filename,
                lineno: line.lineno,
                function,
            }
        });
        Some(lines.collect())
    }

    /// A trace as the .hpm has it, outermost frame first; `None` for index 0 and those beyond the last.
    pub fn raw_trace(&self, index: u32) -> Option<Vec<RawTraceLine>> {
        let line = |(file, line): (&str, u32)| RawTraceLine {
            filename: file.to_owned(),
            lineno: line,
        };
        Some(self.profile.raw_trace(index)?.into_iter().map(line).collect())
    }

    /// The snapshots of the digest, read when they are asked for.
    ///
    /// # Errors
    /// Without a digest.
    pub fn snapshots(&self) -> Result<Snapshots<'_>, ReaderError> {
        let digest = self.snapshots.as_ref().ok_or(ReaderError::NoDigest)?;
        Ok(Snapshots::new(&self.profile, digest, self.mode))
    }

    /// The snapshot for a time in seconds since the start: the last one taken until then, or the first. In compat mode the one
    /// numbered time / interval, which was taken up to an interval later.
    ///
    /// # Errors
    /// Without a digest, or if it has no snapshot.
    pub fn snapshot_at(&self, time: f64) -> Result<Snapshot, ReaderError> {
        let snapshots = self.snapshots()?;
        snapshots.get(snapshots.place_at(time)?)
    }

    /// What is alive at a moment, from the events and not from the digest, largest trace first; `None` is the end. Events of
    /// that very time are included.
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn live_snapshot(&self, at: Option<Duration>) -> Result<Snapshot, ReaderError> {
        let live = self.profile.live_at(at)?;
        Ok(self.snapshot_of(&live))
    }

    /// A live set as a snapshot.
    pub fn snapshot_of(&self, live: &LiveSet) -> Snapshot {
        let bytes = |(index, live): &(u32, crate::profile::model::Live)| (*index, live.bytes.round() as u64);
        let mut entries: Vec<_> = live.traces.iter().map(bytes).filter(|(_, bytes)| *bytes > 0).collect();
        entries.sort_unstable_by_key(|(index, bytes)| (std::cmp::Reverse(*bytes), *index));
        Snapshot {
            relative_time: live.at.as_secs_f64(),
            usage: Entries { entries },
        }
    }

    /// The .hpm.
    pub fn hpm(&self) -> Hpm<'_> {
        Hpm(self)
    }

    /// The events with their scale factors, front to back; each call opens the file anew.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn hpd(&self) -> Result<HpdEvents, ReaderError> {
        HpdEvents::new(&self.profile, self.mode)
    }

    /// The digest, if there is one; the same as [`snapshots`](Self::snapshots).
    pub fn hpc(&self) -> Option<Snapshots<'_>> {
        self.snapshots().ok()
    }

    /// Live bytes of some lines in a snapshot, and of all. `cumulative`: of the traces that the line is on, once each; else of
    /// those that end with it. A line that does not occur has 0. O(entries × depth).
    ///
    /// In compat mode a line that is asked for n times has n times its cumulative usage.
    pub fn fast_get_usage(&self, snapshot: &Snapshot, lines: &[RawTraceLine], cumulative: bool) -> Usage {
        usage::of(self.lines(), &snapshot.usage, lines, cumulative, self.mode)
    }

    /// Total and cumulative usage of labelled lines in every snapshot of the digest. Labels are sorted.
    ///
    /// Reads the digest once, O(its entries + traces × depth).
    ///
    /// # Errors
    /// Without a digest, or if a snapshot is damaged.
    pub fn time_plot(&self, lines: &[(String, RawTraceLine)]) -> Result<TimePlot, ReaderError> {
        usage::time_plot(self.lines(), &self.snapshots()?, lines)
    }

    /// The flow graph of a snapshot, every line once a trace (in compat mode, once a frame). O(frames).
    pub fn flow_graph(&self, snapshot: &Snapshot) -> FlowGraph {
        let recursion = match self.mode {
            Mode::Exact => Recursion::Once,
            Mode::Compat => Recursion::EachFrame,
        };
        self.flow_graph_with(snapshot, recursion)
    }

    /// The same with recursion counted as asked for.
    pub fn flow_graph_with(&self, snapshot: &Snapshot, recursion: Recursion) -> FlowGraph {
        FlowGraph::new(self.lines(), &snapshot.usage, recursion)
    }

    /// The flow graph of [`snapshot_at`](Self::snapshot_at).
    ///
    /// # Errors
    /// Without a digest, or if it has no snapshot.
    pub fn flow_graph_at(&self, time: f64) -> Result<FlowGraph, ReaderError> {
        Ok(self.flow_graph(&self.snapshot_at(time)?))
    }

    /// The flow graphs of several times in one picture, as text for graphviz.
    ///
    /// # Errors
    /// As for [`flow_graph_at`](Self::flow_graph_at) and [`FlowGraph::compare`].
    pub fn compare_flow_graphs(&self, times: &[f64], options: DotOptions) -> Result<String, ReaderError> {
        let graphs: Result<Vec<_>, _> = times.iter().map(|time| self.flow_graph_at(*time)).collect();
        let graphs = graphs?;
        FlowGraph::compare(&graphs.iter().collect::<Vec<_>>(), options)
    }

    /// Collapsed stacks of a snapshot: `FILE:LINE;FILE:LINE SIZE`, outermost frame first, a line for each trace in the order
    /// of the snapshot, and what has no stack as `OTHER`.
    ///
    /// In exact mode names have no `;` and no line breaks, functions are named where they are known
    /// (`function (FILE:LINE)`), and equal stacks are one line. In compat mode it is the original's text.
    pub fn flame_graph(&self, snapshot: &Snapshot) -> String {
        match self.mode {
            Mode::Exact => usage::collapsed(self.lines(), &snapshot.usage),
            Mode::Compat => usage::flame(self.lines(), &snapshot.usage),
        }
    }

    /// The collapsed stacks of [`snapshot_at`](Self::snapshot_at).
    ///
    /// # Errors
    /// Without a digest, or if it has no snapshot.
    pub fn flame_graph_at(&self, time: f64) -> Result<String, ReaderError> {
        Ok(self.flame_graph(&self.snapshot_at(time)?))
    }

    /// Writes the collapsed stacks of a snapshot to a file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_flame_graph(&self, path: &Path, snapshot: &Snapshot) -> Result<(), ReaderError> {
        write(path, self.flame_graph(snapshot))
    }

    fn lines(&self) -> &LineTable {
        self.lines.get_or_init(|| LineTable::new(&self.profile, self.mode))
    }
}

/// Writes a text to a file.
fn write(path: &Path, text: String) -> Result<(), ReaderError> {
    std::fs::write(path, text).map_err(|source| ReaderError::Write {
        path: path.to_owned(),
        source,
    })
}

impl FlowGraph {
    /// Writes the graph as text for graphviz to a file.
    ///
    /// # Errors
    /// As for [`as_dot`](Self::as_dot), and when the file cannot be written.
    pub fn write_dot_file(&self, path: &Path, options: DotOptions) -> Result<(), ReaderError> {
        write(path, self.as_dot(options)?)
    }
}
