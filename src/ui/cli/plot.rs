//! `pyheap plot`: live memory over time.

use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::failure::Failure;
use super::select::{self, FilterArgs};
use crate::reader::{Mode, RawTraceLine, Reader, ReaderError, Series, TimePlot};
use crate::report::filter::{Counted, Filters};
use crate::report::human::clean;
use crate::report::plot::{Curve, Panel, Plot, csv};
use crate::report::top::{GroupBy, top};
use crate::ui::output::to_stdout;
use crate::ui::save::save;
use crate::ui::units::{Moment, parse_duration};

/// Points of a plot unless an interval is given.
const POINTS: u32 = 400;
/// The unit of the vertical axis.
const MIB: f64 = (1 << 20) as f64;

/// Plot live memory over time: all of it, and what single lines hold, themselves and by what they call.
///
/// With lines there are three panels: the total, each line, and each line's part of the total. `.svg` and `.png` files are
/// pictures, `.csv` is a table; standard output gets the table.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// A line to plot, maybe with a name: `app.py:12`, `cache=/srv/app/cache.py:80`. May be given several times.
    #[arg(long = "line", value_name = "[NAME=]FILE:LINE")]
    pub lines: Vec<Named>,

    /// Plot the N lines that have allocated most of what is alive at the end, or at `--at`.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub top: usize,

    /// Time between two points. Without it there are 400.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub interval: Option<Duration>,

    /// Plot up to this moment: time since the start (`90s`), before the end (`-1m`), or absolute (`2026-01-31T12:00:00Z`,
    /// `@1769860800`).
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// Write to this file: `.svg`, `.png` or `.csv`; `-` is a table on standard output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,

    /// Plot the snapshots of the digest as the original heapprof does, each one interval early.
    #[arg(long, conflicts_with_all = ["interval", "at", "files", "functions", "threads", "domains"])]
    pub compat: bool,

    /// Print one JSON object instead, with allocation rates.
    #[arg(long)]
    pub json: bool,

    /// Which traces count.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// A line with its name.
#[derive(Debug, Clone)]
pub struct Named(String, RawTraceLine);

impl FromStr for Named {
    type Err = ReaderError;

    fn from_str(text: &str) -> Result<Self, ReaderError> {
        let (label, line) = text.split_once('=').unwrap_or((text, text));
        Ok(Self(label.to_owned(), line.parse()?))
    }
}

/// Runs the command.
///
/// # Errors
/// When the profile cannot be read, or the file not written.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mode = if args.compat { Mode::Compat } else { Mode::Exact };
    let reader = Reader::open_as(&args.base, mode)?;
    let mut lines: Vec<_> = args
        .lines
        .iter()
        .map(|Named(label, line)| (label.clone(), line.clone()))
        .collect();
    let at = select::moment(reader.profile(), args.at)?;
    let filters = args.filter.filters(reader.profile())?;
    lines.extend(largest(&reader, args.top, at, &filters)?);
    select::warn(reader.profile(), 0)?;
    let (plot, rates) = if args.compat {
        (reader.time_plot(&lines)?, None)
    } else {
        let elapsed = at.map_or_else(|| reader.profile().elapsed(), Ok)?;
        let interval = args
            .interval
            .unwrap_or((elapsed / POINTS).max(Duration::from_millis(1)));
        let counted = Counted::new(reader.profile(), &filters);
        let series = reader.series_of(interval, &lines, at, |index| counted.counts(index))?;
        (as_plot(&series), Some(series))
    };
    if args.json {
        let answer = json(&plot, rates.as_ref());
        return Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?);
    }
    let name = clean(&reader.profile().names().base().display().to_string()).into_owned();
    let bytes = match args.output.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => picture(&plot, name).svg().into_bytes(),
        Some("png") => picture(&plot, name)
            .png()
            .ok_or_else(|| Failure::failed("there is not enough memory for the picture"))?,
        _ => table(&plot).into_bytes(),
    };
    save(&args.output, &bytes)?;
    Ok(())
}

/// The lines that have allocated most of what is alive at a moment.
fn largest(
    reader: &Reader,
    count: usize,
    at: Option<Duration>,
    filters: &Filters,
) -> Result<Vec<(String, RawTraceLine)>, Box<dyn Error>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let live = select::live(reader.profile(), at, filters)?;
    let rows = top(&super::usages(reader.profile(), &live), GroupBy::Line, false, None);
    let mut lines: Vec<(String, RawTraceLine)> = Vec::new();
    for row in rows {
        let (Some(filename), Some(lineno)) = (row.site.file, row.site.line) else {
            continue;
        };
        let line = RawTraceLine { filename, lineno };
        if lines.iter().all(|(_, known)| *known != line) {
            lines.push((line.to_string(), line));
        }
        if lines.len() == count {
            break;
        }
    }
    Ok(lines)
}

fn as_plot(series: &Series) -> TimePlot {
    let line = |place: usize| {
        series
            .points
            .iter()
            .map(|point| point.lines[place].bytes.round() as u64)
            .collect()
    };
    TimePlot {
        times: series.points.iter().map(|point| point.at).collect(),
        total_usage: series
            .points
            .iter()
            .map(|point| point.total.bytes.round() as u64)
            .collect(),
        lines: (0..series.labels.len()).map(line).collect(),
        labels: series.labels.clone(),
    }
}

fn json(plot: &TimePlot, series: Option<&Series>) -> serde_json::Value {
    let lines: serde_json::Map<_, _> = plot
        .labels
        .iter()
        .zip(&plot.lines)
        .map(|(label, values)| (label.clone(), serde_json::json!(values)))
        .collect();
    let mut answer = serde_json::json!({
        "seconds": plot.times,
        "total_bytes": plot.total_usage,
        "lines": lines,
    });
    if let Some(series) = series {
        let rates = series.allocation_rates();
        let margins = series.points.iter().map(|point| point.total.bytes_margin());
        let objects = series.points.iter().map(|point| point.total.objects);
        answer["total_bytes_margin"] = margins.collect();
        answer["total_objects"] = objects.collect();
        answer["allocated_bytes_per_second"] = rates.iter().map(|rate| rate.0).collect();
        answer["allocated_objects_per_second"] = rates.iter().map(|rate| rate.1).collect();
    }
    answer
}

fn table(plot: &TimePlot) -> String {
    let mut names = vec!["seconds".to_owned(), "total_bytes".to_owned()];
    names.extend(plot.labels.iter().map(|label| clean(label).into_owned()));
    let row = |place: usize| {
        let mut row = vec![plot.times[place], plot.total_usage[place] as f64];
        row.extend(plot.lines.iter().map(|line| line[place] as f64));
        row
    };
    csv(&names, (0..plot.times.len()).map(row))
}

fn picture(plot: &TimePlot, title: String) -> Plot {
    let curve = |label: &str, values: Vec<f64>| Curve {
        label: label.to_owned(),
        values,
    };
    let floats = |values: &[u64]| values.iter().map(|value| *value as f64).collect::<Vec<_>>();
    let share = |values: &[u64]| {
        let pairs = values.iter().zip(&plot.total_usage);
        // Nothing is no part of nothing.
        pairs
            .map(|(part, all)| if *all == 0 { 0.0 } else { *part as f64 / *all as f64 })
            .collect()
    };
    let mut panels = vec![Panel {
        title: "live in all, MiB".to_owned(),
        unit: MIB,
        curves: vec![curve("", floats(&plot.total_usage))],
    }];
    if !plot.labels.is_empty() {
        let lines = || plot.labels.iter().zip(&plot.lines);
        panels.push(Panel {
            title: "live by line, MiB".to_owned(),
            unit: MIB,
            curves: lines().map(|(label, values)| curve(label, floats(values))).collect(),
        });
        panels.push(Panel {
            title: "part of all, %".to_owned(),
            unit: 0.01,
            curves: lines().map(|(label, values)| curve(label, share(values))).collect(),
        });
    }
    Plot {
        title,
        times: plot.times.clone(),
        panels,
    }
}
