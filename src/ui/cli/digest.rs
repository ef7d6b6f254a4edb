//! `pyheap digest`: condenses a profile into snapshots.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use crate::profile::digest::{DigestMode, make_digest};
use crate::profile::reader::Reader;
use crate::report::human::{Human, bytes, count};
use crate::ui::output::{note, to_stdout};
use crate::ui::units::parse_duration;

/// Write the digest (`BASE._hpc`) of a profile: what was alive at regular times, for the original heapprof's reader.
///
/// An existing digest is replaced once the new one is complete. pyheap's own reports do not need it.
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
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let reader = Reader::open(&args.base)?;
    let mode = if args.compat {
        DigestMode::Compatible
    } else {
        DigestMode::Exact
    };
    let summary = make_digest(&reader, args.interval, args.precision, mode)?;
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
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
