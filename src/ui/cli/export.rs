//! `pyheap export`: a profile for other tools.

use std::error::Error;
use std::fs::{File, TryLockError};
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use super::failure::{Failure, code};
use super::select::FilterArgs;
use crate::profile::names::{Part, ProfileNames, SuffixStyle};
use crate::profile::reader::Reader;
use crate::report::export::{Metric, collapsed, csv, heapprof, json, pprof, speedscope};
use crate::report::human::{bytes, count};
use crate::ui::output::{note, to_stdout};
use crate::ui::save::{NewFile, save};
use crate::ui::units::Moment;

/// Write a profile in the format of another tool.
///
/// pprof      gzipped profile.proto with alloc_objects, alloc_space, inuse_objects and inuse_space:
///            `go tool pprof -top run.pb.gz` (functions of the same name in several files: add -filefunctions)
/// speedscope JSON for <https://www.speedscope.app>
/// collapsed  a line for each stack, for flamegraph.pl, inferno and others
/// heapprof   run.hpm and run.hpd, which the original heapprof opens (and run.hpx, for pyheap itself)
/// csv        a row for each stack, with the 95 % margins, not rounded
/// json       the same and what is known of the recording, as one object
///
/// Values are estimates of all allocations, not of the sampled ones. Files are replaced once they are complete, and
/// only the user may read them.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// The format.
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub to: Format,

    /// The moment: time since the start (`90s`, `1m30s`), before the end (`-1m`), or a date and time
    /// (`2026-11-29T17:20:00Z`). A moment outside of the recording is taken for its start or end. heapprof's files always
    /// have the whole recording.
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// Write to this file; `-` is standard output. For heapprof it is the new filebase; without it, that of the profile.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Which traces count.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// A format to export to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Gzipped profile.proto.
    Pprof,
    /// speedscope's JSON.
    Speedscope,
    /// Collapsed stacks.
    Collapsed,
    /// The original heapprof's files.
    Heapprof,
    /// A row for each stack.
    Csv,
    /// One object.
    Json,
}

/// Why an export was not begun.
#[derive(Debug, thiserror::Error)]
enum NotExported {
    #[error("pprof files are binary and would garble the terminal; use -o FILE, or a pipe")]
    Terminal,
    #[error("--to heapprof writes several files; give their filebase with -o BASE")]
    SeveralFiles,
    #[error("--to heapprof always writes the whole recording; leave out --at and filters")]
    WholeRecording,
    #[error("{} is the profile itself; give another filebase with -o BASE", .0.display())]
    Itself(PathBuf),
    #[error("a recording is writing to {}; give another filebase with -o BASE", .0.display())]
    Busy(PathBuf),
}

/// Runs the command.
///
/// # Errors
/// When the profile cannot be read or the file not be written.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let usage = |error| Err(Failure::new(code::USAGE, error).into());
    let reader = Reader::open(&args.base)?;
    let stdout = PathBuf::from("-");
    let output = args.output.as_ref().unwrap_or(&stdout);
    if args.to == Format::Heapprof {
        return match &args.output {
            Some(path) if *path == stdout => usage(NotExported::SeveralFiles),
            _ if args.at != Moment::BeforeEnd(std::time::Duration::ZERO) || !args.filter.is_empty() => {
                usage(NotExported::WholeRecording)
            }
            Some(path) => to_heapprof(&reader, path),
            None => to_heapprof(&reader, reader.names().base()),
        };
    }
    if args.to == Format::Pprof && *output == stdout && io::stdout().is_terminal() {
        return usage(NotExported::Terminal);
    }
    let export = super::exported(&reader, args.at, &args.filter)?;
    let file = match args.to {
        Format::Pprof => pprof::pprof(&export)?,
        Format::Speedscope => speedscope::speedscope(&export)?,
        Format::Csv => csv::csv(&export).into_bytes(),
        Format::Json => json::json(&export)?.into_bytes(),
        Format::Collapsed | Format::Heapprof => collapsed::collapsed(&export, Metric::LiveBytes).into_bytes(),
    };
    Ok(save(output, &file)?)
}

/// Writes `base.hpm`, `base.hpd` and, if the profile has a usable sidecar, `base.hpx`. All are complete before the first
/// gets its name.
fn to_heapprof(reader: &Reader, base: &Path) -> Result<(), Box<dyn Error>> {
    let names = ProfileNames::new(base, SuffixStyle::Plain);
    let parts = [Part::Traces, Part::Sidecar, Part::Events];
    for path in parts.map(|part| names.path(part)) {
        check_target(reader, &path)?;
    }
    for warning in reader.warnings()? {
        note(&format!("warning: {warning}"));
    }
    let create = |part| {
        let path = names.path(part);
        NewFile::create(&path).map_err(|source| cannot_write(&path, source))
    };
    let mut traces = create(Part::Traces)?;
    heapprof::traces(reader, &mut traces.out).map_err(|source| cannot_write(&names.path(Part::Traces), source))?;
    let mut events = create(Part::Events)?;
    let (read, written) = heapprof::events(reader, reader.raw_events()?, &mut events.out)
        .map_err(|source| cannot_write(&names.path(Part::Events), source))?;
    // The sidecar speaks of events by their numbers, so it fits only if they are the same.
    let sidecar = if reader.sidecar().is_some() && read == written {
        let mut file = create(Part::Sidecar)?;
        let old = std::fs::read(reader.names().path(Part::Sidecar))?;
        let whole = old.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        file.out
            .write_all(&old[..whole])
            .map_err(|source| cannot_write(&names.path(Part::Sidecar), source))?;
        Some(file)
    } else {
        None
    };
    // A digest or sidecar of an older profile of this name would be taken for the new one's.
    let mut stale = vec![Part::Digest];
    stale.extend(sidecar.is_none().then_some(Part::Sidecar));
    for path in stale.into_iter().map(|part| names.path(part)) {
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(cannot_write(&path, source)),
            _ => {}
        }
    }
    let files = [
        (Part::Traces, Some(traces)),
        (Part::Sidecar, sidecar),
        (Part::Events, Some(events)),
    ];
    for (part, file) in files {
        let finished = file.map_or(Ok(()), NewFile::finish);
        finished.map_err(|source| cannot_write(&names.path(part), source))?;
    }
    let length = std::fs::metadata(names.path(Part::Events)).map_or(0, |found| found.len());
    Ok(to_stdout(&format!(
        "{}: {} events, {}, of {} stacks\n",
        names.path(Part::Events).display(),
        count(written as f64),
        bytes(length as f64),
        count(f64::from(reader.trace_count())),
    ))?)
}

fn cannot_write(path: &Path, source: io::Error) -> Box<dyn Error> {
    #[derive(Debug, thiserror::Error)]
    #[error("cannot write {path}")]
    struct CannotWrite {
        path: String,
        source: io::Error,
    }
    let path = path.display().to_string();
    Box::new(CannotWrite { path, source })
}

/// That `path` is neither a file of the profile itself nor one that is being recorded to.
fn check_target(reader: &Reader, path: &Path) -> Result<(), Failure> {
    let Ok(target) = std::fs::canonicalize(path) else {
        return Ok(());
    };
    let own = |part| std::fs::canonicalize(reader.names().path(part)).is_ok_and(|own| own == target);
    if Part::ALL.into_iter().any(own) {
        return Err(Failure::new(code::USAGE, NotExported::Itself(path.to_owned())));
    }
    match File::open(&target).map(|file| file.try_lock()) {
        Ok(Err(TryLockError::WouldBlock)) => Err(Failure::new(code::USAGE, NotExported::Busy(path.to_owned()))),
        _ => Ok(()),
    }
}
