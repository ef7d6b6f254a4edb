//! What most commands ask for: the moment and the traces.

use std::time::Duration;

use super::failure::{Failure, code};
use super::sampling::parse_domain;
use crate::profile::model::Live;
use crate::profile::reader::{LiveSet, ReadError, Reader};
use crate::report::filter::{Filters, NamePattern};
use crate::ui::output::note;
use crate::ui::units::Moment;
use pyheap_protocol::domain;

/// Which allocator domains count.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Filters")]
pub struct DomainArgs {
    /// Only what these allocator domains hold: raw, mem and obj are Python's, malloc and mmap are recorded with --native. Needs the
    /// sidecar file of pyheap's own recordings.
    #[arg(long = "domain", value_name = "LIST", value_delimiter = ',', value_parser = parse_domain)]
    pub domains: Vec<u8>,
}

impl DomainArgs {
    /// Whether all count.
    pub fn is_empty(&self) -> bool {
        self.domains.is_empty()
    }

    /// The names of those that count, or nothing if all do.
    pub fn names(&self) -> Vec<&'static str> {
        let name = |domain: &u8| domain::NAMES.get(usize::from(*domain)).copied();
        self.domains.iter().filter_map(name).collect()
    }

    /// Their numbers.
    ///
    /// # Errors
    /// With exit code 2, when the profile does not tell domains, or none of these was recorded: an empty report would say that they
    /// hold nothing.
    pub fn of(&self, reader: &Reader) -> Result<Vec<u8>, Failure> {
        let fail = |why: String| Err(Failure::new(code::USAGE, why));
        let names = self.names();
        let base = reader.names().base().display();
        let Some(sidecar) = reader.sidecar().filter(|_| !names.is_empty()) else {
            return match names.is_empty() {
                true => Ok(Vec::new()),
                false => fail(format!(
                    "{base} has no ._hpx file, so its domains are not known; leave out --domain"
                )),
            };
        };
        let recorded = &sidecar.header.facts.domains;
        if !recorded.is_empty() && !recorded.iter().any(|name| names.contains(&name.as_str())) {
            let (wanted, recorded) = (names.join(", "), recorded.join(", "));
            let native = self.domains.iter().any(|domain| domain::NATIVE >> domain & 1 == 1);
            let remedy = if native { "; record with --native" } else { "" };
            return fail(format!(
                "{base} was recorded without {wanted}: it has {recorded}{remedy}"
            ));
        }
        Ok(self.domains.clone())
    }
}

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

    /// Which domains count.
    #[command(flatten)]
    pub domain: DomainArgs,

    /// Let the patterns fit any frame of a stack, not only the one that allocated.
    #[arg(long)]
    pub all_frames: bool,
}

impl FilterArgs {
    /// Whether nothing is filtered.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.functions.is_empty() && self.threads.is_empty() && self.domain.is_empty()
    }

    /// As the reports want them. Says on standard error what a profile without sidecar cannot tell.
    ///
    /// # Errors
    /// When the profile does not have the domains that are asked for.
    pub fn filters(&self, reader: &Reader) -> Result<Filters, Failure> {
        let domains = self.domain.of(reader)?;
        if reader.sidecar().is_none() && !(self.functions.is_empty() && self.threads.is_empty()) {
            note(
                "note: this profile has no functions and threads (there is no ._hpx file); nothing fits such a pattern",
            );
        }
        Ok(Filters {
            files: self.files.clone(),
            functions: self.functions.clone(),
            threads: self.threads.clone(),
            domains,
            all_frames: self.all_frames,
        })
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
