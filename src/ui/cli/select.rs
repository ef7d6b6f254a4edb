//! What most commands ask for: the moment and the traces.

use std::time::Duration;

use crate::profile::model::Live;
use crate::profile::reader::{LiveSet, ReadError, Reader};
use crate::report::filter::{Filters, NamePattern};
use crate::ui::output::note;
use crate::ui::units::Moment;

/// Which traces count.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Filters")]
pub struct FilterArgs {
    /// Only what was allocated in these files: `*.py`, `*/json/*`, `!/usr/lib/*` (all but these). A pattern without a slash
    /// also fits the last part of a name. May be given several times.
    #[arg(long = "file", value_name = "PATTERN")]
    pub files: Vec<NamePattern>,

    /// Only what was allocated in these functions. Needs the sidecar file of pyheap's own recordings.
    #[arg(long = "function", value_name = "PATTERN")]
    pub functions: Vec<NamePattern>,

    /// Only what these threads have allocated, by name or id. Needs the sidecar file, too.
    #[arg(long = "thread", value_name = "PATTERN")]
    pub threads: Vec<NamePattern>,

    /// Let the patterns fit any frame of a stack, not only the one that allocated.
    #[arg(long)]
    pub all_frames: bool,
}

impl FilterArgs {
    /// Whether nothing is filtered.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.functions.is_empty() && self.threads.is_empty()
    }

    /// As the reports want them. Says on standard error what a profile without sidecar cannot tell.
    pub fn filters(&self, reader: &Reader) -> Filters {
        if reader.sidecar().is_none() && !(self.functions.is_empty() && self.threads.is_empty()) {
            note(
                "note: this profile has no functions and threads (there is no ._hpx file); nothing fits such a pattern",
            );
        }
        Filters {
            files: self.files.clone(),
            functions: self.functions.clone(),
            threads: self.threads.clone(),
            all_frames: self.all_frames,
        }
    }
}

/// The moment in a profile, since its start; `None` if it is the end.
pub fn moment(reader: &Reader, moment: Moment) -> Result<Option<Duration>, ReadError> {
    let elapsed = reader.elapsed()?;
    let at = moment.within(reader.start(), elapsed);
    Ok((at != elapsed).then_some(at))
}

/// What is alive at a moment, of the traces that count.
pub fn live(reader: &Reader, at: Option<Duration>, filters: &Filters) -> Result<LiveSet, ReadError> {
    let mut live = reader.live_at(at)?;
    retain(reader, &mut live, filters);
    Ok(live)
}

/// Keeps the traces that count.
pub fn retain(reader: &Reader, live: &mut LiveSet, filters: &Filters) {
    if filters.is_empty() {
        return;
    }
    live.traces
        .retain(|(index, _)| filters.counts(*index, &reader.frames(*index).unwrap_or_default(), reader.sidecar()));
    live.total = Live::default();
    for (_, trace) in &live.traces {
        live.total.add(trace);
    }
}

/// Says on standard error what is wrong with a profile.
pub fn warn(reader: &Reader, unmatched_frees: u64) -> Result<(), ReadError> {
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
    }
    if unmatched_frees > 0 {
        note(&format!(
            "warning: {unmatched_frees} frees have no allocation in the file; they are ignored"
        ));
    }
    Ok(())
}
