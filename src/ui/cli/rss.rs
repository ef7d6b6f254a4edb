//! `pyheap rss`: where the resident memory of a process is.

use super::choose;
use super::dump::of_core as of_opening;
use super::failure::Failure;
use crate::attach::frozen::{FreezeError, Frozen, Limits};
use crate::attach::preflight;
use crate::dump::core::Core;
use crate::rss::{self, RssError, render};
use crate::ui::output::{note, to_stdout};
use crate::ui::units::parse_duration;
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

/// Show where the resident memory of a process is, in one table that adds up: Python objects, what is free inside of
/// allocators, native memory, and what is no heap at all (stacks, libraries, files), with a verdict.
///
/// Nothing is put into the process and nothing is stopped: its memory and /proc are read, what pymalloc and malloc say about
/// themselves included. With --frozen all of it is of one moment: a copy of the process (a child that runs nothing) is
/// read instead and ended.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The process; may be left out if there is only one Python process.
    #[arg(value_name = "PID", conflicts_with = "core")]
    pub pid: Option<i32>,

    /// Read a core file instead of a process: its table is that of the memory that is in the file.
    #[arg(long, value_name = "FILE", conflicts_with = "frozen")]
    pub core: Option<PathBuf>,

    /// The program that left the core file, if it is not where it was.
    #[arg(long, value_name = "FILE", requires = "core")]
    pub exe: Option<PathBuf>,

    /// Read a frozen copy. Its making stops a thread for some milliseconds a GiB; while it is there, each page that the
    /// process writes to is copied.
    #[arg(long)]
    pub frozen: bool,

    /// How it may be frozen.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What a frozen copy may cost.
#[derive(Debug, clap::Args)]
pub struct LimitArgs {
    /// Of a frozen copy: make none if a thread would stand still for longer, as predicted from the process's size.
    #[arg(long, value_name = "TIME", default_value = "250ms", value_parser = parse_duration)]
    pub max_pause: Duration,

    /// Of a frozen copy: it ends after this time, also by itself, whatever becomes of pyheap.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub max_freeze: Duration,
}

impl LimitArgs {
    /// As the library wants them.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits {
            max_pause: self.max_pause,
            max_freeze: self.max_freeze,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When there is no such process, or it may not be looked into, or no copy of it could be made.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if let Some(path) = &args.core {
        let core = Core::open(path, args.exe.as_deref()).map_err(of_opening)?;
        let interpreter = core.python().map_err(of_opening)?;
        return show(&rss::of_core(&core, &interpreter), args.json);
    }
    let target = match (args.pid, args.frozen) {
        (Some(pid), false) => preflight::check_readable(pid).map_err(Failure::from)?,
        (Some(pid), true) => preflight::check_for_copy(pid).map_err(Failure::from)?,
        (None, _) => choose::target(None)?,
    };
    let report = if args.frozen {
        let copy = Frozen::of(&target, args.limits.limits()).map_err(of_freeze)?;
        let report = rss::of(&target, Some(&copy));
        if let Some(why) = copy.ended() {
            drop(copy);
            return Err(Failure::failed(format!("the frozen copy was ended before all was read: {why}")).into());
        }
        let cost = copy.finish();
        let mut report = report.map_err(of_rss)?;
        match cost {
            Ok(cost) => report.cost = Some(cost),
            Err(error) => note(&format!("warning: {}", super::failure::chain(&error))),
        }
        report
    } else {
        rss::of(&target, None).map_err(of_rss)?
    };
    show(&report, args.json)
}

fn show(report: &rss::Report, json: bool) -> Result<(), Box<dyn Error>> {
    let text = if json {
        serde_json::to_string_pretty(report)? + "\n"
    } else {
        render::render(report)
    };
    Ok(to_stdout(&text)?)
}

/// The exit codes of the README.
fn of_freeze(error: FreezeError) -> Failure {
    Failure::new(error.exit_code(), error)
}

fn of_rss(error: RssError) -> Failure {
    const GONE: u8 = 3;
    const NOT_PERMITTED: u8 = 4;
    const OTHER: u8 = 7;
    let code = match &error {
        RssError::Gone { .. } => GONE,
        RssError::Pagemap { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => NOT_PERMITTED,
        RssError::Mappings { source, .. } if crate::attach::process::is_not_found(source) => GONE,
        _ => OTHER,
    };
    Failure::new(code, error)
}
