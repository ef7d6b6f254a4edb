//! `pyheap flame`: collapsed stacks for flame graph tools.

use std::error::Error;
use std::path::{Path, PathBuf};

use super::select::{self, FilterArgs};
use crate::profile::model::Live;
use crate::profile::reader::Reader;
use crate::report::flame::collapsed;
use crate::ui::output::{note, to_stdout};
use crate::ui::units::Moment;

/// Write what is alive as collapsed stacks, the input of flamegraph.pl, inferno, speedscope and others.
///
/// A line is `frame;frame;frame VALUE`, the outermost frame first, and a frame is `function (file:line)`, or `file:line`
/// if the function is not known. What has no known stack is in a last line `OTHER`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// What to count: estimated live bytes, or estimated live objects.
    #[arg(long, value_enum, default_value_t = Value::Bytes)]
    pub value: Value,

    /// The moment: time since the start (`90s`, `1m30s`), before the end (`-1m`), or absolute (`2026-01-31T12:00:00Z`,
    /// `@1769860800`). A moment outside of the recording is
    /// taken for its start or end.
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// Write to this file; `-` is standard output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,

    /// Which traces count.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// What to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Value {
    /// Estimated live bytes.
    Bytes,
    /// Estimated live objects.
    Objects,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let reader = Reader::open(&args.base)?;
    let at = select::moment(&reader, args.at)?;
    let live = select::live(&reader, at, &args.filter.filters(&reader))?;
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
    }
    let value = |live: &Live| match args.value {
        Value::Bytes => live.bytes.round() as u64,
        Value::Objects => live.objects.round() as u64,
    };
    let mut usages = super::usages(&reader, &live);
    usages.sort_by(|a, b| value(&b.live).cmp(&value(&a.live)).then(a.index.cmp(&b.index)));
    let text = collapsed(
        usages
            .into_iter()
            .map(|usage| (usage.frames, value(&usage.live)))
            .filter(|(_, value)| *value > 0),
    );
    if args.output == Path::new("-") {
        return Ok(to_stdout(&text)?);
    }
    std::fs::write(&args.output, text).map_err(|source| OutputError {
        path: args.output.clone(),
        source,
    })?;
    Ok(())
}

#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
struct OutputError {
    path: PathBuf,
    source: std::io::Error,
}
