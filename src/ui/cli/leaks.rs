//! `pyheap leaks`: does it leak, where, how fast, how sure is that.

use std::error::Error;
use std::path::{Path, PathBuf};

use super::heap::Growth;
use super::select::DomainArgs;
use crate::profile::facts::MemorySample;
use crate::profile::model::StackFrame;
use crate::profile::names::{self, ProfileNames};
use crate::profile::reader::Reader;
use crate::report::filter::{Counted, Filters};
use crate::report::leaks::memory::Limit;
use crate::report::leaks::render::{Detail, headline, render};
use crate::report::leaks::{Facts, Overall, OwnCode, Report, Tracker, judge};
use crate::report::types::{TypeRow, Types};
use crate::ui::output::{note, to_stdout};
use crate::ui::units;
use pyheap_protocol::domain;

/// Say whether a recorded process leaks, where, how fast, and how sure that is.
///
/// The first line is the answer. Rates have 95 % confidence intervals; the odds that a recording of a program that does not leak
/// names a leak are below 1 %. Start-up, caches that fill and stop, and what comes and goes are no leaks. docs/leaks.md
/// defines each word and number.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files. It may still be recorded. Several (`run.*`) are judged together.
    #[arg(value_name = "BASE", required = true)]
    pub base: Vec<PathBuf>,

    /// Code below this path is your own, too. Else all is that is not in the interpreter's library, site-packages or
    /// dist-packages. May be given several times.
    #[arg(long, value_name = "PATH")]
    pub own: Vec<String>,

    /// Tell when the process hits this size, for example 2GiB. Without it: the limit of its memory cgroup, if it has one.
    #[arg(long, value_name = "BYTES", value_parser = units::parse_size)]
    pub limit: Option<u64>,

    /// Show this many sites.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub rows: usize,

    /// Print one JSON object. Its form is in docs/leaks.md.
    #[arg(long)]
    pub json: bool,

    /// Print the first line only.
    #[arg(long, short, conflicts_with_all = ["verbose", "json"])]
    pub quiet: bool,

    /// Which domains are judged. What the process does is then compared with nothing.
    #[command(flatten)]
    pub domain: DomainArgs,

    /// Print whole stacks, and what is no leak.
    #[arg(long, short)]
    pub verbose: bool,
}

/// Runs the command.
///
/// # Errors
/// When the profile cannot be read.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if args.base.len() > 1 {
        return super::merged::leaks(args);
    }
    let reader = Reader::open(args.base.first().map_or(Path::new(""), PathBuf::as_path))?;
    let mut report = report(&reader, &args.own, args.limit, &args.domain)?;
    if let Some(part) = args.base.first().and_then(|base| part_of(base, &reader)) {
        // Before anything else where a person reads it: the answer is for a part of the time.
        if args.json {
            report.notes.push(part);
        } else if !args.quiet {
            note(&format!("note: {part}"));
        }
    }
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
    }
    let detail = if args.verbose { Detail::Verbose } else { Detail::Normal };
    let text = match () {
        () if args.json => {
            let mut answer = serde_json::to_value(&report)?;
            if let (Some(answer), Some(growth)) = (answer.as_object_mut(), growth(args, &reader)) {
                answer.insert("census".to_owned(), growth.json(args.rows)?);
            }
            serde_json::to_string_pretty(&answer)? + "\n"
        }
        () if args.quiet => headline(&report) + "\n",
        () => {
            let growth = growth(args, &reader).map(|growth| growth.text(report.live_bytes, args.rows));
            render(&report, detail, args.rows) + &growth.unwrap_or_default()
        }
    };
    Ok(to_stdout(&text)?)
}

/// What the censuses of a recording say of its whole heap.
fn growth(args: &Args, reader: &Reader) -> Option<Growth> {
    args.domain.is_empty().then(|| Growth::of(reader)).flatten()
}

/// What is judged, where a recording has several parts (its period was raised, or its files were rotated): one part is, the one that
/// was named, and what it began with counts as kept from its beginning on.
pub fn part_of(base: &Path, reader: &Reader) -> Option<String> {
    let found = ProfileNames::find(base)?;
    let base = found.base();
    let next = reader.sidecar().and_then(|sidecar| sidecar.end.as_ref()?.next.clone());
    // A number may also be that of a process.
    let leads_here = |before: &PathBuf| {
        let end = Reader::open(before).ok()?.sidecar()?.end.clone()?;
        (end.next? == names::last_word(base)).then_some(())
    };
    let before = names::before(base).filter(|before| leads_here(before).is_some());
    let from = before.map(|before| format!("what came before is in {}", names::last_word(&before)));
    let last = next.as_deref().map(|next| last_part(base, next));
    let until = match (next, last) {
        (Some(next), Some(last)) if last == next => Some(format!("what came then in {next}")),
        (Some(next), Some(last)) => Some(format!("what came then in {next} and so on, the end in {last}")),
        _ => None,
    };
    let others: Vec<String> = [from, until].into_iter().flatten().collect();
    (!others.is_empty()).then(|| format!("judged is {} alone; {}", names::last_word(base), others.join(", ")))
}

/// The last part of a recording that goes on from `base` in `next`, as far as the parts are there.
fn last_part(base: &Path, next: &str) -> String {
    /// More parts than a recording has.
    const MOST: usize = 1 << 12;
    let mut last = next.to_owned();
    for _ in 0..MOST {
        let reader = Reader::open(&base.with_file_name(&last)).ok();
        let next = reader.and_then(|reader| reader.sidecar()?.end.as_ref()?.next.clone());
        match next {
            Some(next) if next != last => last = next,
            _ => break,
        }
    }
    last
}

/// The verdict on a profile, or on these domains of it.
///
/// # Errors
/// When it cannot be read, or does not have the domains.
pub fn report(
    reader: &Reader,
    own: &[String],
    limit: Option<u64>,
    domains: &DomainArgs,
) -> Result<Report, Box<dyn Error>> {
    let filters = Filters {
        domains: domains.of(reader)?,
        ..Filters::default()
    };
    let counted = Counted::new(reader, &filters);
    let facts = reader.sidecar().map(|sidecar| &sidecar.header.facts);
    let interpreter = facts.and_then(|facts| facts.more.get("interpreter")?.as_str().or(facts.exe.as_deref()));
    let own = OwnCode::new(own, interpreter);
    let mut tracker = Tracker::new(reader.weights(), reader.trace_count(), own);
    counted.visit(|event| {
        // What the .hpm does not have comes from damage, and may be anything.
        let trace = if event.trace <= reader.trace_count() {
            event.trace
        } else {
            0
        };
        if !tracker.knows(trace) {
            tracker.know(trace, &reader.frames(trace).unwrap_or_default());
        }
        tracker.event(event.clock, trace, event.size, event.is_free, event.continues);
    })?;
    let elapsed = reader.elapsed()?;
    let cgroup = facts.and_then(|facts| facts.memory_limit_bytes);
    let given = limit.map(|bytes| Limit {
        bytes,
        is_cgroup: false,
    });
    let limit = given.or(cgroup.map(|bytes| Limit { bytes, is_cgroup: true }));
    let facts = Recorded {
        reader,
        types: Types::of(reader),
        only: domains.names().into_iter().map(str::to_owned).collect(),
    };
    let mut report = judge(&mut tracker, elapsed, &facts, limit);
    if report.verdict == Overall::Native {
        let text = if facts.has_native() {
            "what --native does not see is listed in docs/native.md"
        } else {
            "record with --native to see which lines the memory of native code belongs to"
        };
        report.notes.push(text.to_owned());
    }
    if let Some(sidecar) = reader.sidecar().filter(|sidecar| !sidecar.losses.is_empty()) {
        let losses = crate::report::info::describe_losses(&sidecar.losses);
        report.notes.push(format!("lost while recording: {losses}"));
    }
    Ok(report)
}

/// What a finished recording knows.
struct Recorded<'a> {
    reader: &'a Reader,
    types: Option<Types<'a>>,
    /// The domains that are judged, if not all are.
    only: Vec<String>,
}

impl Facts for Recorded<'_> {
    fn frames(&self, trace: u32) -> Vec<StackFrame<'_>> {
        self.reader.frames(trace).unwrap_or_default()
    }

    fn has_native(&self) -> bool {
        let domains = self.reader.sidecar().map(|sidecar| &sidecar.header.facts.domains);
        let malloc = domain::NAMES[usize::from(domain::MALLOC)];
        domains.is_some_and(|domains| domains.iter().any(|name| name == malloc))
    }

    fn only(&self) -> Vec<String> {
        self.only.clone()
    }

    fn types(&self, traces: &[u32]) -> Vec<TypeRow> {
        let types = self.types.as_ref();
        types.map_or_else(Vec::new, |types| types.rows(traces.iter().copied()))
    }

    fn origin(&self, trace: u32) -> (Option<String>, Option<String>) {
        let last = self.reader.sidecar().and_then(|sidecar| {
            let origin = sidecar.origins.get(&trace)?.last()?;
            let thread = (origin.thread != 0).then(|| {
                let name = sidecar.threads.get(&origin.thread).cloned();
                name.unwrap_or_else(|| origin.thread.to_string())
            });
            let domain = domain::NAMES
                .get(usize::from(origin.domain))
                .map(|name| (*name).to_owned());
            Some((domain, thread))
        });
        last.unwrap_or_default()
    }

    fn births(&self, trace: u32) -> Option<&[(u64, u64)]> {
        let survivors = self.reader.sidecar()?.survivors.as_ref()?;
        Some(survivors.get(&trace).map_or(&[], Vec::as_slice))
    }

    fn memory(&self) -> &[(u64, MemorySample)] {
        self.reader.sidecar().map_or(&[], |sidecar| &sidecar.memory)
    }
}
