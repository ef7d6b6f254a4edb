//! `pyheap diff`: what has changed between two moments, or two recordings.

use std::error::Error;
use std::path::Path;
use std::str::FromStr;

use super::failure::{Failure, code};
use super::select::{self, FilterArgs};
use super::top::By;
use crate::profile::model::Live;
use crate::reader::Reader;
use crate::report::TraceUsage;
use crate::report::diff::{diff, render, signed_bytes};
use crate::report::human::{Human, bytes};
use crate::ui::output::{note, to_stdout};
use crate::ui::units::Moment;

/// Show what has changed between two moments of a recording (`pyheap diff run@1m run@10m`), or between two recordings
/// (`pyheap diff before after`), the largest change first.
///
/// Margins are half the 95 % confidence interval of the change. Within one recording, blocks that were alive at both moments do
/// not add to it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The old state: a profile, at its end or at a moment: `run`, `run@90s`, `run@-1m`.
    #[arg(value_name = "OLD[@TIME]")]
    pub old: State,

    /// The new state.
    #[arg(value_name = "NEW[@TIME]")]
    pub new: State,

    /// What makes one row.
    #[arg(long, value_enum, default_value_t = By::Line)]
    pub by: By,

    /// Show this many rows.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,

    /// Count an allocation for every line on its stack, once each, not only for the one that allocated.
    #[arg(long)]
    pub cumulative: bool,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,

    /// Which traces count.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// A profile at a moment.
#[derive(Debug, Clone)]
pub struct State {
    /// The profile.
    pub base: String,
    /// The moment.
    pub at: Moment,
}

impl FromStr for State {
    type Err = crate::ui::units::UnitError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let end = Moment::BeforeEnd(std::time::Duration::ZERO);
        // A file may have an @ in its name.
        if crate::profile::names::ProfileNames::find(Path::new(text)).is_some() {
            let base = text.to_owned();
            return Ok(Self { base, at: end });
        }
        // `run@@1769860800` is an absolute time.
        let split = text.find("@@").or_else(|| text.rfind('@'));
        match split {
            Some(place) => Ok(Self {
                base: text[..place].to_owned(),
                at: text[place + 1..].parse()?,
            }),
            None => Ok(Self {
                base: text.to_owned(),
                at: end,
            }),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When a profile cannot be read.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let old = Reader::open(&args.old.base)?;
    let new = Reader::open(&args.new.base)?;
    let is_same = old.profile().names() == new.profile().names();
    let from = select::moment(old.profile(), args.old.at)?;
    let to = select::moment(new.profile(), args.new.at)?;
    if is_same && from == to {
        let why = "both are the same moment of the same profile; write for example: pyheap diff run@1m run";
        return Err(Failure::new(code::USAGE, why).into());
    }
    select::warn(new.profile(), 0)?;
    if !is_same {
        select::warn(old.profile(), 0)?;
    }
    let by = args.by.group(new.profile());
    let (before, after, moved) = if is_same {
        within(&new, args, from, to)?
    } else {
        let filters = args.filter.filters(old.profile())?;
        args.filter.domain.of(new.profile())?;
        let before = super::usages(old.profile(), &select::live(old.profile(), from, &filters)?);
        let after = super::usages(new.profile(), &select::live(new.profile(), to, &filters)?);
        (before, after, None)
    };
    let rows = diff(&before, &after, moved.as_deref(), by, args.cumulative);
    let sum = |usages: &[TraceUsage<'_>]| {
        let mut total = Live::default();
        usages.iter().for_each(|usage| total.add(&usage.live));
        total
    };
    let (first, last) = (sum(&before), sum(&after));
    let variance = match &moved {
        Some(moved) => sum(moved).bytes_margin(),
        None => first.bytes_margin().hypot(last.bytes_margin()),
    };
    let change = last.bytes - first.bytes;
    let times = [(&old, from), (&new, to)].map(|(reader, at)| match at {
        Some(at) => Ok(at),
        None => reader.profile().elapsed(),
    });
    let [old_at, new_at] = times;
    let (old_at, new_at) = (old_at?, new_at?);
    if args.json {
        let answer = serde_json::json!({
            "old_seconds": old_at.as_secs_f64(),
            "new_seconds": new_at.as_secs_f64(),
            "old_live_bytes": first.bytes,
            "new_live_bytes": last.bytes,
            "live_bytes_diff": change,
            "live_bytes_diff_margin": variance,
            "cumulative": args.cumulative,
            "omitted_rows": rows.len().saturating_sub(args.limit),
            "rows": rows[..rows.len().min(args.limit)],
        });
        return Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?);
    }
    let mut text = format!(
        "{} ± {} from {} at {} to {} at {}\n",
        signed_bytes(change),
        bytes(variance),
        bytes(first.bytes),
        Human(old_at),
        bytes(last.bytes),
        Human(new_at),
    );
    text += &render(&rows, args.limit);
    if rows.is_empty() {
        note("nothing has changed");
    }
    Ok(to_stdout(&text)?)
}

type States<'a> = (Vec<TraceUsage<'a>>, Vec<TraceUsage<'a>>, Option<Vec<TraceUsage<'a>>>);

/// Two moments of one recording. The later one may be named first.
fn within<'a>(
    reader: &'a Reader,
    args: &Args,
    from: Option<std::time::Duration>,
    to: Option<std::time::Duration>,
) -> Result<States<'a>, Box<dyn Error>> {
    let is_backwards = match (from, to) {
        (Some(from), Some(to)) => from > to,
        (None, _) => true,
        _ => false,
    };
    let (first, second) = if is_backwards { (to, from) } else { (from, to) };
    let changes = reader.changes(first.unwrap_or_default(), second)?;
    let filters = args.filter.filters(reader.profile())?;
    let usage = |index, live| TraceUsage {
        index,
        frames: reader.profile().frames(index),
        live,
    };
    let mut states = (Vec::new(), Vec::new(), Vec::new());
    for (index, change) in changes.traces {
        let frames = reader.profile().frames(index).unwrap_or_default();
        if !filters.counts(index, &frames, reader.profile().sidecar()) {
            continue;
        }
        states.0.push(usage(index, change.from));
        states.1.push(usage(index, change.to));
        // Both sizes, so that no row is too small to be there.
        let moved = Live {
            bytes: change.from.bytes + change.to.bytes,
            bytes_variance: change.bytes_variance,
            objects_variance: change.objects_variance,
            ..Live::default()
        };
        states.2.push(usage(index, moved));
    }
    let (before, after) = if is_backwards {
        (states.1, states.0)
    } else {
        (states.0, states.1)
    };
    Ok((before, after, Some(states.2)))
}
