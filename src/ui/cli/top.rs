//! `pyheap top`: where live memory was allocated.

use std::error::Error;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::failure::{Failure, code};
use super::select::{self, FilterArgs};
use crate::profile::interval::{self, Interval};
use crate::profile::model::Live;
use crate::profile::reader::{LiveSet, Reader};
use crate::reader::Reader as Analysis;
use crate::report::TraceUsage;
use crate::report::human::{Human, bytes, count};
use crate::report::info::{describe_losses, describe_sampling};
use crate::report::top::{GroupBy, add_types, by_thread, by_type, interval_text, render, sites, thread_of, top};
use crate::report::types::Types;
use crate::ui::output::{note, to_stdout};
use crate::ui::units::{Moment, parse_duration};

/// List where live memory was allocated, largest first, with 95 % confidence intervals.
///
/// The first line says how much is alive in all. Sizes are the bytes that the program asked for, estimated from samples;
/// memory allocated before the recording began is not in them.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded. Several (`run.*`) are
    /// added up, and their spread is shown.
    #[arg(value_name = "BASE", required = true)]
    pub base: Vec<PathBuf>,

    /// The moment: time since the start (`90s`, `1m30s`), before the end (`-1m`), or absolute (`2026-01-31T12:00:00Z`,
    /// `@1769860800`). A moment outside of the recording is taken for its start or end.
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// What makes one row. Functions, threads and types need the sidecar file of pyheap's own recordings; without it, rows by
    /// function are rows by line. Types are known for the end of the recording only.
    #[arg(long, value_enum, default_value_t = TopBy::Line)]
    pub by: TopBy,

    /// Show this many rows.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,

    /// Count an allocation for every line on its stack, once each, not only for the one that allocated. Has no effect
    /// on rows by trace.
    #[arg(long)]
    pub cumulative: bool,

    /// Only what was allocated after this moment (and is alive at `--at`). A free does not say which of several blocks of one
    /// stack and size it ends, so there is a least and a most; rows show the most.
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub since: Option<Moment>,

    /// Only what was allocated until this moment; from the start, or from `--since`.
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub until: Option<Moment>,

    /// Show a recording that still runs again and again, until it ends or Ctrl-C.
    #[arg(long, conflicts_with_all = ["at", "since", "until"])]
    pub follow: bool,

    /// Time between two looks with `--follow`.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_duration)]
    pub every: Duration,

    /// Which traces count.
    #[command(flatten)]
    pub filter: FilterArgs,

    /// Tell of each row what its live objects are: types and how many of each, `buffer` for blocks that hold no object. Needs
    /// pyheap's own recordings; known for the end of the recording only.
    #[arg(long, conflicts_with_all = ["at", "since", "until"])]
    pub types: bool,

    /// Print one JSON object. Sizes are in bytes, margins are half the width of the 95 % confidence interval.
    #[arg(long)]
    pub json: bool,
}

/// What makes one row here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TopBy {
    /// File and line.
    #[value(alias = "lineno")]
    Line,
    /// File and function.
    Function,
    /// File.
    #[value(alias = "filename")]
    File,
    /// The whole stack.
    #[value(alias = "traceback")]
    Trace,
    /// The thread that allocated.
    Thread,
    /// The type of the objects.
    Type,
}

impl TopBy {
    /// What makes one row of traces, where it is that.
    pub(super) const fn of_traces(self) -> By {
        match self {
            Self::Line | Self::Thread | Self::Type => By::Line,
            Self::Function => By::Function,
            Self::File => By::File,
            Self::Trace => By::Trace,
        }
    }
}

/// What makes one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// File and line.
    #[value(alias = "lineno")]
    Line,
    /// File and function.
    Function,
    /// File.
    #[value(alias = "filename")]
    File,
    /// The whole stack.
    #[value(alias = "traceback")]
    Trace,
}

impl By {
    /// As the reports call it. A profile without function names has lines instead, and that is said.
    pub fn group(self, reader: &Reader) -> GroupBy {
        match self {
            Self::Function if reader.sidecar().is_none() => {
                note("note: this profile has no function names (there is no ._hpx file); rows are by line");
                GroupBy::Line
            }
            Self::Line => GroupBy::Line,
            Self::Function => GroupBy::Function,
            Self::File => GroupBy::File,
            Self::Trace => GroupBy::Trace,
        }
    }
}

/// How often it is looked whether to stop.
const LOOK: Duration = Duration::from_millis(50);

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if args.base.len() > 1 {
        return super::merged::top(args);
    }
    if !args.follow {
        return to_stdout(&show(args)?.0).map_err(Into::into);
    }
    let stop = super::record::stop_signals()?;
    let clear = std::io::stdout().is_terminal();
    loop {
        let (text, is_over) = show(args)?;
        let text = if clear { format!("\x1b[H\x1b[2J{text}") } else { text };
        if !crate::ui::output::to_reader(&text)? || is_over {
            return Ok(());
        }
        let next = Instant::now() + args.every;
        while Instant::now() < next {
            if stop.load(Ordering::Acquire) {
                return Ok(());
            }
            std::thread::sleep(LOOK.min(next.saturating_duration_since(Instant::now())));
        }
    }
}

/// The text, and whether the recording is over.
fn show(args: &Args) -> Result<(String, bool), Box<dyn Error>> {
    let analysis = Analysis::open(args.base.first().map_or(Path::new(""), PathBuf::as_path))?;
    let reader = analysis.profile();
    let is_over = reader.sidecar().is_none_or(|sidecar| sidecar.end.is_some());
    let by = args.by.of_traces().group(reader);
    let types = types(args, reader)?;
    let at = select::moment(reader, args.at)?;
    let filters = args.filter.filters(reader)?;
    let (live, least) = match window(args, reader)? {
        Some((from, to)) => {
            let window = analysis.window(from, to, at)?;
            let set = |of: fn(&crate::reader::Bounds) -> Live| {
                let mut set = LiveSet {
                    at: at.map_or_else(|| reader.elapsed(), Ok)?,
                    traces: window
                        .traces
                        .iter()
                        .map(|(index, bounds)| (*index, of(bounds)))
                        .collect(),
                    total: of(&window.total),
                    unmatched_frees: 0,
                };
                select::retain(reader, &mut set, &filters);
                Ok::<_, Box<dyn Error>>(set)
            };
            (set(|bounds| bounds.most)?, Some(set(|bounds| bounds.least)?.total))
        }
        None => (select::live(reader, at, &filters)?, None),
    };
    select::warn(reader, live.unmatched_frees)?;
    let cumulative = args.cumulative && by != GroupBy::Trace;
    let usages = super::usages(reader, &live);
    let period = reader.period_bytes();
    let mut rows = match (args.by, &types) {
        (TopBy::Thread, _) => by_thread(&usages, reader.sidecar(), period),
        (TopBy::Type, Some(types)) => by_type(&usages, types, period),
        _ => top(&usages, by, cumulative, period),
    };
    if let Some(types) = types.filter(|_| args.types) {
        let shown = rows.len().min(args.limit);
        let of_trace = |trace: &TraceUsage<'_>| match args.by {
            TopBy::Thread => [thread_of(trace, reader.sidecar())].into(),
            _ => sites(trace, by, cumulative),
        };
        add_types(&mut rows[..shown], &usages, &types, of_trace);
    }
    let total = total_interval(reader, &live);
    if args.json {
        let losses = reader.sidecar().map(|sidecar| &sidecar.losses);
        let answer = serde_json::json!({
            "at_seconds": live.at.as_secs_f64(),
            "live_bytes": live.total.bytes,
            "live_bytes_margin": live.total.bytes_margin(),
            "live_bytes_at_least": least.unwrap_or(live.total).bytes,
            "live_bytes_low": total.low,
            "live_bytes_high": total.high,
            "live_objects": live.total.objects,
            "live_objects_margin": live.total.objects_margin(),
            "samples": live.total.sampled,
            "cumulative": cumulative,
            "losses": losses,
            "omitted_rows": rows.len().saturating_sub(args.limit),
            "rows": rows[..rows.len().min(args.limit)],
        });
        return Ok((serde_json::to_string_pretty(&answer)? + "\n", is_over));
    }
    let mut text = headline(reader, &live, at.is_none());
    if let Some(least) = least
        && least.sampled != live.total.sampled
    {
        text += &format!(
            "these are the most that can be left of the window; at least {} are\n",
            bytes(least.bytes)
        );
    }
    if let Some(next) = reader.sidecar().and_then(|sidecar| sidecar.end.as_ref()?.next.as_ref()) {
        note(&format!("note: the recording goes on in {next}"));
    }
    text += &render(&rows, args.limit, &live.total, cumulative);
    if let Some(sidecar) = reader.sidecar()
        && !sidecar.losses.is_empty()
    {
        text += &format!("lost while recording: {}\n", describe_losses(&sidecar.losses));
    }
    Ok((text, is_over))
}

/// What the survivors are, if that is asked for.
fn types<'a>(args: &Args, reader: &'a Reader) -> Result<Option<Types<'a>>, Box<dyn Error>> {
    let is_by_type = args.by == TopBy::Type;
    if !args.types && !is_by_type {
        return Ok(None);
    }
    if is_by_type && (args.at != Moment::BeforeEnd(Duration::ZERO) || args.since.is_some() || args.until.is_some()) {
        let why = "types are known for the end of a recording only; leave out --at, --since and --until";
        return Err(Failure::new(code::USAGE, why.to_owned()).into());
    }
    let types = Types::of(reader).ok_or_else(|| {
        let why = "this profile has no types: it is no recording of pyheap's own, is of an older version, or has only just begun";
        Failure::failed(why.to_owned())
    })?;
    let behind = reader.elapsed()?.saturating_sub(Duration::from_micros(types.at()));
    if behind >= Duration::from_secs(1) {
        let text = format!(
            "note: types are as of {} before the end",
            Human(Duration::from_secs(behind.as_secs()))
        );
        note(&text);
    }
    Ok(Some(types))
}

/// After this moment (or from the start) up to that one.
type Span = (Option<Duration>, Duration);

/// The window that is asked for, if any.
fn window(args: &Args, reader: &Reader) -> Result<Option<Span>, Box<dyn Error>> {
    if args.since.is_none() && args.until.is_none() {
        return Ok(None);
    }
    let elapsed = reader.elapsed()?;
    let from = args.since.map(|moment| moment.within(reader.start(), elapsed));
    let to = args.until.map(|moment| moment.within(reader.start(), elapsed));
    Ok(Some((from, to.unwrap_or(elapsed))))
}

pub(super) fn total_interval(reader: &Reader, live: &LiveSet) -> Interval {
    let total = &live.total;
    let period = reader.period_bytes();
    let limits = |period| interval::of_bytes(total.bytes, total.bytes_variance, total.sampled, period);
    period.map_or_else(
        || Interval {
            low: (total.bytes - total.bytes_margin()).max(0.0),
            high: total.bytes + total.bytes_margin(),
        },
        limits,
    )
}

fn headline(reader: &Reader, live: &LiveSet, is_end: bool) -> String {
    let Interval { low, high } = total_interval(reader, live);
    let total = &live.total;
    let interval = interval_text(total.bytes, total.bytes_margin(), low, high, total.sampled);
    format!(
        "{} {} live in {} ± {} objects at {}{} ({} samples, {})\n",
        bytes(live.total.bytes),
        if interval.starts_with('±') {
            interval
        } else {
            format!("({interval})")
        },
        count(live.total.objects),
        count(live.total.objects_margin()),
        Human(live.at),
        if is_end { ", the end" } else { "" },
        count(live.total.sampled as f64),
        describe_sampling(reader.period_bytes(), reader.sampling_table().ranges().len()),
    )
}
