//! `pyheap digest`: condenses a profile into snapshots.

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::failure::Failure;
use crate::reader::{Mode, Reader};
use crate::report::human::{Human, bytes, count};
use crate::ui::output::{note, to_stdout};
use crate::ui::progress::Bar;
use crate::ui::units::parse_duration;

/// Write the digest (`BASE._hpc`) of a profile: what was alive at regular times, for the original heapprof's reader.
///
/// An existing digest is replaced once the new one is complete. Ctrl-C ends early: the digest is then valid, only shorter.
/// pyheap's own reports do not need it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`).
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// Time between snapshots, in whole milliseconds, for example `500ms`, `60s`, `10m`.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_duration)]
    pub interval: Duration,

    /// Join the smallest traces of a snapshot, together up to this fraction of its total, under "other". 0 keeps all.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.01)]
    pub precision: f64,

    /// Compute as the original heapprof does: single-precision factors, an event seen by the ticks before it, nothing
    /// after the last full interval. With `--precision 0` the digest is the original's up to the order of equal sizes.
    #[arg(long)]
    pub compat: bool,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let stop = super::record::stop_signals()?;
    let mode = if args.compat { Mode::Compat } else { Mode::Exact };
    let mut reader = Reader::open_as(&args.base, mode)?;
    let mut bar = Bar::new("digest");
    let summary = reader.make_digest(args.interval, args.precision, |progress| {
        bar.show(progress.bytes, progress.bytes_total, progress.events);
        if stop.load(Ordering::Acquire) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    bar.clear();
    if summary.is_interrupted {
        let path = summary.path.display();
        let (snapshots, events) = (count(summary.snapshots as f64), count(summary.events as f64));
        let why = format!("interrupted after {events} events; {path} has the {snapshots} snapshots up to there");
        return Err(Failure::failed(why).into());
    }
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
    }
    if args.json {
        let answer = serde_json::json!({
            "path": summary.path,
            "bytes": summary.len,
            "snapshots": summary.snapshots,
            "events": summary.events,
            "interval_seconds": summary.interval_millis as f64 / 1000.0,
            "precision": args.precision,
            "compat": args.compat,
        });
        return Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?);
    }
    if summary.snapshots == 0 {
        note("warning: the profile is shorter than one interval, so a compatible digest has no snapshot");
    }
    Ok(to_stdout(&format!(
        "{}: {} snapshots, one every {}, of {} events ({})\n",
        summary.path.display(),
        count(summary.snapshots as f64),
        Human(Duration::from_millis(summary.interval_millis)),
        count(summary.events as f64),
        bytes(summary.len as f64),
    ))?)
}
