//! `pyheap events`: the raw log.

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;

use super::select::FilterArgs;
use crate::profile::reader::Reader;
use crate::report::export::log::{HEADER, Log};
use crate::report::filter::Counted;
use crate::ui::output::note;
use crate::ui::save::save_with;
use crate::ui::units::Moment;

/// List the allocations and frees of a profile one by one, in the order in which they were recorded.
///
/// A line has the time since the start in seconds, what happened (`+` marks a further piece of the block before), the bytes
/// that the program asked for, how many such allocations the record stands for, the number of the stack, and the line that
/// allocated. Only sampled allocations are in a profile, and the frees of these.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// Begin at this moment: time since the start (`90s`, `1m30s`), before the end (`-1m`), or a date and time
    /// (`2026-11-29T17:20:00Z`).
    #[arg(long, value_name = "TIME", default_value = "0", allow_hyphen_values = true)]
    pub from: Moment,

    /// End with this moment, what happened at it included.
    #[arg(
        long,
        visible_alias = "at",
        value_name = "TIME",
        default_value = "end",
        allow_hyphen_values = true
    )]
    pub to: Moment,

    /// Only events of this stack, by its number.
    #[arg(long, value_name = "N")]
    pub trace: Option<u32>,

    /// Stop after so many.
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,

    /// Print a JSON object a line: event, at_micros, what, bytes, weight, trace, and what is known of the stack.
    #[arg(long)]
    pub json: bool,

    /// In JSON, whole stacks, outermost frame first, instead of the line that allocated.
    #[arg(long, requires = "json")]
    pub stacks: bool,

    /// Write to this file; `-` is standard output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,

    /// Which traces count.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// Runs the command.
///
/// # Errors
/// When the profile cannot be read or the output not be written.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let reader = Reader::open(&args.base)?;
    let (start, elapsed) = (reader.start(), reader.elapsed()?);
    let (from, to) = (args.from.within(start, elapsed), args.to.within(start, elapsed));
    let filters = args.filter.filters(&reader)?;
    let counted = Counted::new(&reader, &filters);
    let wanted = reader
        .events()?
        .skip_while(|event| event.clock < from)
        .take_while(|event| event.clock <= to)
        .filter(|event| args.trace.is_none_or(|trace| trace == event.trace))
        .filter(|event| counted.counts(event.trace))
        .take(usize::try_from(args.limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX));
    let mut log = Log::new(&reader, args.stacks);
    save_with(&args.output, |out: &mut dyn Write| {
        if !args.json {
            out.write_all(HEADER.as_bytes())?;
        }
        let mut line = String::new();
        for event in wanted {
            line.clear();
            if args.json {
                log.json(&event, &mut line).map_err(io::Error::from)?;
            } else {
                log.text(&event, &mut line);
            }
            out.write_all(line.as_bytes())?;
        }
        Ok(())
    })?;
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
    }
    Ok(())
}
