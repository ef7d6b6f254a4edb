//! `pyheap flame`: flame graphs, and the input of tools that draw them.

use std::error::Error;
use std::path::PathBuf;

use super::select::FilterArgs;
use crate::profile::reader::Reader;
use crate::report::export::{Metric, collapsed, html, speedscope, svg};
use crate::ui::save::save;
use crate::ui::units::Moment;

/// Draw what is alive as a flame graph, or write the input of tools that do.
///
/// The format is that of -o's name (.svg, .html, .json for speedscope), and otherwise collapsed stacks: a line is
/// `frame;frame;frame VALUE`, the outermost frame first, and a frame is `function (file:line)`, or `file:line` if the
/// function is not known. What has no known stack is in a last line `OTHER`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// What to count, estimated: live bytes or objects, or all that were allocated so far. (HTML and speedscope have all
    /// four; HTML shows this one first.)
    #[arg(long, value_enum, default_value_t = Value::Bytes)]
    pub value: Value,

    /// The moment: time since the start (`90s`, `1m30s`), before the end (`-1m`), or a date and time
    /// (`2026-11-29T17:20:00Z`). A moment outside of the recording is taken for its start or end.
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// The format, whatever the name of the file.
    #[arg(long, value_enum)]
    pub format: Option<Format>,

    /// Write JSON, for speedscope: the same as `--format speedscope`.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,

    /// Write to this file, which is replaced once the new one is complete; `-` is standard output.
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
    /// Estimated bytes allocated so far, freed ones included.
    AllocatedBytes,
    /// Estimated objects allocated so far, freed ones included.
    AllocatedObjects,
}

/// What to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Text for flamegraph.pl, inferno and others.
    Collapsed,
    /// JSON for speedscope.
    Speedscope,
    /// A picture; a browser can zoom and search in it.
    Svg,
    /// One file for a browser, with search, error bars and everything by keyboard. It loads nothing.
    Html,
}

impl Args {
    fn format(&self) -> Format {
        if self.json {
            return Format::Speedscope;
        }
        let extension = self.output.extension().and_then(|extension| extension.to_str());
        self.format.unwrap_or(match extension {
            Some("svg") => Format::Svg,
            Some("html" | "htm") => Format::Html,
            Some("json") => Format::Speedscope,
            _ => Format::Collapsed,
        })
    }
}

/// Runs the command.
///
/// # Errors
/// When the profile cannot be read, the file not be written, or there is nothing to draw.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let reader = Reader::open(&args.base)?;
    let export = super::exported(&reader, args.at, &args.filter)?;
    let metric = match args.value {
        Value::Bytes => Metric::LiveBytes,
        Value::Objects => Metric::LiveObjects,
        Value::AllocatedBytes => Metric::AllocBytes,
        Value::AllocatedObjects => Metric::AllocObjects,
    };
    let file = match args.format() {
        Format::Collapsed => collapsed::collapsed(&export, metric).into_bytes(),
        Format::Speedscope => speedscope::speedscope(&export)?,
        Format::Svg => svg::svg(&export, metric)?,
        Format::Html => html::html(&export, metric)?.into_bytes(),
    };
    Ok(save(&args.output, &file)?)
}
