//! `top` and `leaks` of several recordings at once: those of the processes of a tree.
//!
//! Of a recording that goes on in further files only the last ones count, since they begin with what is alive. What is alive is asked
//! at one moment for all; a process that had ended by then holds nothing.

use super::failure::{Failure, chain, code};
use super::select::DomainArgs;
use super::{leaks, select, top, usages};
use crate::profile::names::ProfileNames;
use crate::profile::reader::Reader;
use crate::report::human::{bytes, count};
use crate::report::leaks::Report;
use crate::report::merged::{self, Sum};
use crate::report::top::{TopRow, by_thread, by_type};
use crate::report::types::Types;
use crate::ui::output::{note, to_stdout};
use crate::ui::units::Moment;
use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

/// Recordings that end within this time end together.
const TOGETHER: Duration = Duration::from_secs(5);
/// More recordings are not read at once.
const MOST: usize = 4096;

/// One recording.
struct Part {
    name: String,
    reader: Reader,
    start: Duration,
    end: Duration,
    /// The process has ended, and with it what it held.
    is_over: bool,
    /// Parts before it are left out.
    is_later: bool,
}

/// Opens what `given` names, each once: `run.*` names every file. Those that go on in files which are given as well are left out.
fn open(given: &[PathBuf]) -> Result<Vec<Part>, Box<dyn Error>> {
    let mut bases = BTreeSet::new();
    for path in given {
        match ProfileNames::find(path) {
            Some(names) => bases.insert(names.base().to_owned()),
            // Another file that happens to match the pattern: a report, a digest of something.
            None if given.len() > 1 && path.exists() => continue,
            None => bases.insert(path.clone()),
        };
    }
    if bases.len() > MOST {
        return Err(Failure::new(
            code::USAGE,
            format!("{} recordings are too many: {MOST} at most", bases.len()),
        )
        .into());
    }
    let (mut parts, mut later) = (Vec::new(), BTreeSet::new());
    for base in &bases {
        let reader = Reader::open(base)?;
        let end = reader.sidecar().and_then(|sidecar| sidecar.end.clone());
        let goes_on = end
            .as_ref()
            .and_then(|end| end.next.as_ref())
            .map(|next| base.with_file_name(next));
        if let Some(next) = goes_on.filter(|next| bases.contains(next)) {
            later.insert(next.display().to_string());
            continue;
        }
        let start = reader.start();
        parts.push(Part {
            name: base.display().to_string(),
            start,
            end: start + reader.elapsed()?,
            is_over: end.is_some_and(|end| end.reason.starts_with("target-")),
            is_later: false,
            reader,
        });
    }
    for part in &mut parts {
        part.is_later = later.contains(&part.name);
    }
    Ok(parts)
}

/// The moment that is meant, since 1970.
fn moment(parts: &[Part], at: Moment) -> Duration {
    let first = parts.iter().map(|part| part.start).min().unwrap_or_default();
    let last = parts.iter().map(|part| part.end).max().unwrap_or_default();
    match at {
        Moment::Absolute(time) => time,
        Moment::AfterStart(time) => first + time,
        Moment::BeforeEnd(time) => last.saturating_sub(time),
    }
}

/// Whether a process was there at `at`.
fn was_there(part: &Part, at: Duration) -> bool {
    part.start <= at && (part.end + TOGETHER >= at && !part.is_over || part.end >= at)
}

/// Runs `pyheap top` on several recordings.
///
/// # Errors
/// When one cannot be read, or an option is for one only.
pub fn top(args: &top::Args) -> Result<(), Box<dyn Error>> {
    if args.follow || args.types || args.since.is_some() || args.until.is_some() {
        let why = "--follow, --types, --since and --until are for one recording";
        return Err(Failure::new(code::USAGE, why.to_owned()).into());
    }
    let parts = open(&args.base)?;
    let at = moment(&parts, args.at);
    let is_end = args.at == Moment::BeforeEnd(Duration::ZERO);
    let all = parts.len();
    let mut there: Vec<&Part> = parts.iter().filter(|part| was_there(part, at)).collect();
    if is_end && parts.iter().all(|part| part.is_over) {
        there = parts.iter().filter(|part| part.end + TOGETHER >= at).collect();
        note("note: all of these processes have ended: the last ones are shown as they were when they ended");
    }
    if there.len() < all {
        let gone = all - there.len();
        note(&format!(
            "note: {gone} of {all} processes were not there at that moment, and do not count"
        ));
    }
    let (mut of_each, mut total, mut objects, mut samples) = (Vec::new(), Sum::default(), 0.0, 0);
    let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
    for part in &there {
        let reader = &part.reader;
        let moment = (!is_end).then(|| at.saturating_sub(part.start).min(part.end.saturating_sub(part.start)));
        let live = select::live(reader, moment, &args.filter.filters(reader)?)?;
        let interval = top::total_interval(reader, &live);
        total.add(live.total.bytes, (interval.low, interval.high));
        (least, most) = (least.min(live.total.bytes), most.max(live.total.bytes));
        objects += live.total.objects;
        samples += live.total.sampled;
        of_each.push(rows(args, reader, &live)?);
    }
    let rows = merged::rows(&of_each);
    let shown = &rows[..rows.len().min(args.limit)];
    if args.json {
        let answer = serde_json::json!({
            "at_seconds_since_1970": at.as_secs_f64(),
            "processes": there.iter().map(|part| &part.name).collect::<Vec<_>>(),
            "not_there": all - there.len(),
            "live_bytes": total.value,
            "live_bytes_low": total.low.max(0.0),
            "live_bytes_high": total.high,
            "live_objects": objects,
            "samples": samples,
            "omitted_rows": rows.len() - shown.len(),
            "rows": shown,
        });
        return Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?);
    }
    let text = format!(
        "{} ± {} live in {} objects of {} processes, {} to {} each ({} samples)\n",
        bytes(total.value),
        bytes(total.margin()),
        count(objects),
        there.len(),
        bytes(if least.is_finite() { least } else { 0.0 }),
        bytes(most),
        count(samples as f64),
    );
    Ok(to_stdout(
        &(text + &merged::render_rows(&rows, there.len(), args.limit)),
    )?)
}

fn rows(
    args: &top::Args,
    reader: &Reader,
    live: &crate::profile::reader::LiveSet,
) -> Result<Vec<TopRow>, Box<dyn Error>> {
    let usages = usages(reader, live);
    let period = reader.period_bytes();
    Ok(match args.by {
        top::TopBy::Thread => by_thread(&usages, reader.sidecar(), period),
        top::TopBy::Type => match Types::of(reader) {
            Some(types) => by_type(&usages, &types, period),
            None => Vec::new(),
        },
        by => {
            let by = by.of_traces().group(reader);
            let cumulative = args.cumulative && by != crate::report::top::GroupBy::Trace;
            crate::report::top::top(&usages, by, cumulative, period)
        }
    })
}

/// The verdicts on several recordings, with their names.
fn reports(
    parts: &[Part],
    own: &[String],
    limit: Option<u64>,
    domains: &DomainArgs,
) -> Result<Vec<(String, Report)>, Box<dyn Error>> {
    let report = |part: &Part| {
        let report = leaks::report(&part.reader, own, limit, domains)?;
        Ok((part.name.clone(), report))
    };
    parts.iter().map(report).collect()
}

/// Runs `pyheap leaks` on several recordings.
///
/// # Errors
/// When one cannot be read.
pub fn leaks(args: &leaks::Args) -> Result<(), Box<dyn Error>> {
    let parts = open(&args.base)?;
    let reports = reports(&parts, &args.own, args.limit, &args.domain)?;
    let fleet = merged::judge(&reports);
    let later = parts.iter().filter(|part| part.is_later).count();
    if later > 0 {
        note(&format!(
            "note: {later} of {} recordings have several parts, of which the last one is judged",
            parts.len()
        ));
    }
    let text = match () {
        () if args.json => {
            let each: serde_json::Map<_, _> = reports
                .iter()
                .map(|(name, report)| Ok((name.clone(), serde_json::to_value(report)?)))
                .collect::<Result<_, serde_json::Error>>()?;
            serde_json::to_string_pretty(&serde_json::json!({ "fleet": fleet, "processes": each }))? + "\n"
        }
        () if args.quiet => merged::headline(&fleet) + "\n",
        () => {
            let mut text = merged::render(&fleet, args.rows);
            if args.verbose {
                for (name, report) in &reports {
                    text += &format!("{name}: {}\n", crate::report::leaks::render::headline(report));
                }
            }
            text
        }
    };
    Ok(to_stdout(&text)?)
}

/// The first line on several recordings.
///
/// # Errors
/// With one line, when they cannot be read.
pub fn headline_of(bases: &[PathBuf]) -> Result<String, String> {
    let found = open(bases).and_then(|parts| reports(&parts, &[], None, &DomainArgs::default()));
    let reports = found.map_err(|error| chain(error.as_ref()))?;
    Ok(merged::headline(&merged::judge(&reports)))
}
