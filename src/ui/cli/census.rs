//! `pyheap census`: what is on the heap now.

use super::choose;
use super::dump::of_core;
use super::failure::{Failure, code};
use crate::attach::{Target, preflight};
use crate::census::table::{About, Census, LoadError, Mode, changes};
use crate::census::{CensusError, Source, render, take, writable};
use crate::dump::core::Core;
use crate::ui::output::{note, to_stdout};
use crate::ui::save::save;
use crate::ui::units::parse_duration;
use clap::ValueEnum;
use pyheap_injector::ProcessMemory;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Characters of a command line.
const COMMAND_CHARS: usize = 200;

/// Show what is on the heap now, also what was there before pyheap came: objects and bytes by type.
///
/// Nothing is put into the process, and nothing is stopped: its memory is read while it runs, so the numbers of a busy
/// process are approximate, and it is said how many reads did not fit. Objects that the garbage collector knows are found
/// in its lists; strings, numbers and whatever else it does not know are reached from these and from the variables of running calls. Sizes
/// are those of sys.getsizeof.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// The process; may be left out if there is only one Python process.
    #[arg(value_name = "PID", conflicts_with = "core")]
    pub pid: Option<i32>,

    /// Read a core file instead of a process.
    #[arg(long, value_name = "FILE")]
    pub core: Option<PathBuf>,

    /// The program that left the core file, if it is not where it was.
    #[arg(long, value_name = "FILE", requires = "core")]
    pub exe: Option<PathBuf>,

    /// Save the census: `pyheap census diff` compares two.
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,

    /// Take a census now and another one after this time, and show what has grown.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with_all = ["core", "save"])]
    pub watch: Option<Duration>,

    /// End after this time, with what was found until then.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    pub max_time: Duration,

    #[command(flatten)]
    show: Show,
}

#[derive(Debug, clap::Args)]
struct Show {
    /// What a row is.
    #[arg(long, value_enum, default_value = "type")]
    by: By,

    /// Rows to show.
    #[arg(long, visible_alias = "top", value_name = "N", default_value_t = 30)]
    limit: usize,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// The type of the objects.
    Type,
    /// The module that the type is from.
    Module,
}

impl By {
    const fn name(self) -> &'static str {
        match self {
            Self::Type => "type",
            Self::Module => "module",
        }
    }

    fn rows(self, census: &Census) -> Vec<crate::census::table::Row> {
        match self {
            Self::Type => census.types.clone(),
            Self::Module => census.by_module(),
        }
    }
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show what has grown from one saved census to another.
    Diff(DiffArgs),
}

#[derive(Debug, clap::Args)]
struct DiffArgs {
    /// The earlier census.
    #[arg(value_name = "BEFORE")]
    before: PathBuf,

    /// The later one.
    #[arg(value_name = "AFTER")]
    after: PathBuf,

    #[command(flatten)]
    show: Show,
}

/// Runs the command.
///
/// # Errors
/// When there is no such process or file, it is no Python that is supported, or its heap cannot be found.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if let Some(Command::Diff(args)) = &args.command {
        let (before, after) = (load(&args.before)?, load(&args.after)?);
        return show_changes(&before, &after, &args.show);
    }
    let census = match &args.core {
        Some(path) => of_file(path, args)?,
        None => {
            let target = match args.pid {
                Some(pid) => preflight::check_readable(pid).map_err(Failure::from)?,
                None => choose::target(None)?,
            };
            let first = of_process(&target, args)?;
            let Some(pause) = args.watch else {
                return finish(&first, args);
            };
            note(&format!(
                "{} objects now; the next census in {} s",
                first.total.count,
                pause.as_secs()
            ));
            std::thread::sleep(pause);
            return show_changes(&first, &of_process(&target, args)?, &args.show);
        }
    };
    finish(&census, args)
}

/// Shows a census, and saves it where that is wanted.
fn finish(census: &Census, args: &Args) -> Result<(), Box<dyn Error>> {
    if let Some(path) = &args.save {
        save(path, (serde_json::to_string(census)? + "\n").as_bytes()).map_err(Failure::failed)?;
    }
    let rows = args.show.by.rows(census);
    if !args.show.json {
        let text = render::census(census, &rows, args.show.by.name(), args.show.limit);
        return Ok(to_stdout(&text)?);
    }
    let shown = rows.get(..args.show.limit).unwrap_or(&rows);
    let mut all = serde_json::to_value(census)?;
    if let Some(all) = all.as_object_mut() {
        all.remove("types");
        all.insert("by".to_owned(), args.show.by.name().into());
        all.insert("omitted_rows".to_owned(), (rows.len() - shown.len()).into());
        all.insert("rows".to_owned(), serde_json::to_value(shown)?);
    }
    Ok(to_stdout(&(serde_json::to_string_pretty(&all)? + "\n"))?)
}

fn show_changes(before: &Census, after: &Census, show: &Show) -> Result<(), Box<dyn Error>> {
    let all = changes(&show.by.rows(before), &show.by.rows(after));
    if !show.json {
        let text = render::changes(before, after, &all, show.by.name(), show.limit);
        return Ok(to_stdout(&text)?);
    }
    let shown = all.get(..show.limit).unwrap_or(&all);
    let brief = |census: &Census| {
        let mut census = serde_json::to_value(census)?;
        if let Some(census) = census.as_object_mut() {
            census.remove("types");
        }
        Ok::<_, serde_json::Error>(census)
    };
    let answer = serde_json::json!({
        "before": brief(before)?,
        "after": brief(after)?,
        "by": show.by.name(),
        "omitted_rows": all.len() - shown.len(),
        "rows": shown,
    });
    Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?)
}

fn load(path: &Path) -> Result<Census, Failure> {
    Census::load(path).map_err(|error| {
        let number = match &error {
            LoadError::Io { .. } => code::USAGE,
            _ => code::REFUSED,
        };
        Failure::new(number, error)
    })
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

fn of_process(target: &Target, args: &Args) -> Result<Census, Failure> {
    let pid = target.facts.id.pid;
    let gone = |source: procfs::ProcError| Failure::new(code::NO_PROCESS, source);
    let about = About {
        pid,
        command: target.facts.short_command(COMMAND_CHARS),
        python: target.interpreter.version.to_string(),
        mode: Mode::Live,
        taken_unix_seconds: now(),
    };
    let source = Source {
        memory: &ProcessMemory::new(pid),
        writable: writable(pid).map_err(gone)?,
        changes: true,
        limit: args.max_time,
    };
    let found = take(&source, &target.interpreter).map_err(of_census)?;
    if !target.facts.id.is_alive() {
        let error = format!("process {pid} ended before its heap was read");
        return Err(Failure::new(code::NO_PROCESS, error));
    }
    Ok(Census::of(about, &found))
}

fn of_file(path: &Path, args: &Args) -> Result<Census, Failure> {
    let core = Core::open(path, args.exe.as_deref()).map_err(of_core)?;
    let interpreter = core.python().map_err(of_core)?;
    let about = About {
        pid: core.pid(),
        command: core.command().to_owned(),
        python: interpreter.version.to_string(),
        mode: Mode::Core,
        taken_unix_seconds: now(),
    };
    let source = Source {
        memory: &core,
        writable: core.memory(),
        changes: false,
        limit: args.max_time,
    };
    Ok(Census::of(about, &take(&source, &interpreter).map_err(of_census)?))
}

fn of_census(error: CensusError) -> Failure {
    const UNSUPPORTED: u8 = 5;
    let number = match &error {
        CensusError::Unsupported(_) => UNSUPPORTED,
        _ => code::REFUSED,
    };
    Failure::new(number, error)
}
