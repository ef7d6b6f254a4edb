//! `pyheap top`: where live memory was allocated.

use std::error::Error;
use std::path::PathBuf;

use crate::profile::interval::{self, Interval};
use crate::profile::reader::{LiveSet, Reader};
use crate::report::human::{Human, bytes, count};
use crate::report::info::{describe_losses, describe_sampling};
use crate::report::top::{GroupBy, interval_text, render, top};
use crate::ui::output::{note, to_stdout};
use crate::ui::units::Moment;

/// List where live memory was allocated, largest first, with 95 % confidence intervals.
///
/// The first line says how much is alive in all. Sizes are the bytes that the program asked for, estimated from samples;
/// memory allocated before the recording began is not in them.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// The moment: time since the start (`90s`, `1m30s`), or before the end (`-1m`). A moment outside of the recording is
    /// taken for its start or end.
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// What makes one row. Function names need the sidecar file of pyheap's own recordings; without it, rows by function
    /// are rows by line.
    #[arg(long, value_enum, default_value_t = By::Line)]
    pub by: By,

    /// Show this many rows.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,

    /// Count an allocation for every line on its stack, once each, not only for the one that allocated. Has no effect
    /// on rows by trace.
    #[arg(long)]
    pub cumulative: bool,

    /// Print one JSON object. Sizes are in bytes, margins are half the width of the 95 % confidence interval.
    #[arg(long)]
    pub json: bool,
}

/// What makes one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// File and line.
    Line,
    /// File and function.
    Function,
    /// File.
    File,
    /// The whole stack.
    Trace,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let reader = Reader::open(&args.base)?;
    let elapsed = reader.elapsed()?;
    let at = args.at.within(reader.start(), elapsed);
    let is_end = at == elapsed;
    let live = reader.live_at((!is_end).then_some(at))?;
    let by = match args.by {
        By::Function if reader.sidecar().is_none() => {
            note("note: this profile has no function names (there is no ._hpx file); rows are by line");
            GroupBy::Line
        }
        By::Line => GroupBy::Line,
        By::Function => GroupBy::Function,
        By::File => GroupBy::File,
        By::Trace => GroupBy::Trace,
    };
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
    }
    if live.unmatched_frees > 0 {
        note(&format!(
            "warning: {} frees have no allocation in the file; they are ignored",
            live.unmatched_frees
        ));
    }
    let cumulative = args.cumulative && by != GroupBy::Trace;
    let rows = top(&super::usages(&reader, &live), by, cumulative, reader.period_bytes());
    let total = total_interval(&reader, &live);
    if args.json {
        let losses = reader.sidecar().map(|sidecar| &sidecar.losses);
        let answer = serde_json::json!({
            "at_seconds": live.at.as_secs_f64(),
            "live_bytes": live.total.bytes,
            "live_bytes_margin": live.total.bytes_margin(),
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
        return Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?);
    }
    if let Some(next) = reader.sidecar().and_then(|sidecar| sidecar.end.as_ref()?.next.as_ref()) {
        note(&format!("note: the recording goes on in {next}, with a longer period"));
    }
    let mut text = headline(&reader, &live, is_end);
    text += &render(&rows, args.limit, &live.total, cumulative);
    if let Some(sidecar) = reader.sidecar()
        && !sidecar.losses.is_empty()
    {
        text += &format!("lost while recording: {}\n", describe_losses(&sidecar.losses));
    }
    Ok(to_stdout(&text)?)
}

fn total_interval(reader: &Reader, live: &LiveSet) -> Interval {
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
