//! `pyheap census`: what is on the heap now.

use super::choose;
use super::dump::of_core;
use super::failure::{Failure, chain, code};
use super::rss::LimitArgs;
use crate::attach::frozen::{FreezeError, Frozen, Limits};
use crate::attach::{Target, preflight};
use crate::census::table::{About, Census, Change, LoadError, Memory, Mode, changes};
use crate::census::why::{Wanted, Why};
use crate::census::{CensusError, Source, ask, render, small_areas, writable};
use crate::dump::core::Core;
use crate::rss;
use crate::ui::output::{note, to_stdout};
use crate::ui::save::save;
use crate::ui::units::parse_duration;
use clap::ValueEnum;
use pyheap_injector::{ProcessMemory, RemoteMemory};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Characters of a command line.
const COMMAND_CHARS: usize = 200;

/// Show what is on the heap now, also what was there before pyheap came: objects and bytes by type.
///
/// A frozen copy of the process is read (a child that runs nothing and is ended afterwards); its making stops one thread for
/// some milliseconds a GiB. With --live, or where a copy is not possible (that is said), the process is read while it runs: nothing is put into
/// it and nothing is stopped, the numbers of a busy process are approximate, and it is said how many reads did not fit. Objects that the garbage collector knows are found
/// in its lists; strings, numbers and whatever else it does not know are reached from these and from the variables of running calls; what only
/// C code holds is found in the blocks of Python's allocators. Sizes are those of sys.getsizeof. The head says where the resident memory is.
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

    /// Show who holds the objects of a type (as it is called in the census), or the object at an address, and what would be free
    /// without them.
    #[arg(long, value_name = "TYPE|ADDRESS", conflicts_with_all = ["save", "watch", "by"])]
    pub why: Option<String>,

    /// End after this time, with what was found until then.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    pub max_time: Duration,

    /// Read the process itself while it runs, not a frozen copy.
    #[arg(long, conflicts_with = "core")]
    pub live: bool,

    #[command(flatten)]
    limits: LimitArgs,

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
    if let Some(wanted) = &args.why {
        let wanted = wanted_of(wanted);
        let (census, why) = match &args.core {
            Some(path) => of_file(path, args, Some(&wanted))?,
            None => of_process(&target(args)?, args, Some(&wanted))?,
        };
        return show_why(&census, why, &wanted, &args.show);
    }
    let census = match &args.core {
        Some(path) => of_file(path, args, None)?.0,
        None => {
            let target = target(args)?;
            let first = of_process(&target, args, None)?.0;
            let Some(pause) = args.watch else {
                return finish(&first, args);
            };
            note(&format!(
                "{} objects now; the next census in {} s",
                first.total.count,
                pause.as_secs()
            ));
            std::thread::sleep(pause);
            return show_changes(&first, &of_process(&target, args, None)?.0, &args.show);
        }
    };
    finish(&census, args)
}

fn target(args: &Args) -> Result<Target, Failure> {
    match args.pid {
        Some(pid) => preflight::check_readable(pid).map_err(Failure::from),
        None => choose::target(None),
    }
}

/// An address begins with 0x, which no type's name does.
fn wanted_of(text: &str) -> Wanted {
    let address = text
        .strip_prefix("0x")
        .and_then(|digits| u64::from_str_radix(digits, 16).ok());
    address.map_or_else(|| Wanted::Type(text.to_owned()), Wanted::Address)
}

fn show_why(census: &Census, why: Option<Why>, wanted: &Wanted, show: &Show) -> Result<(), Box<dyn Error>> {
    let Some(mut why) = why else {
        let error = match wanted {
            Wanted::Address(address) => format!("there is no object at {address:#x}"),
            Wanted::Type(name) => match similar(census, name) {
                Some(other) => format!("there are no objects of a type {name}; there are of {other}"),
                None => format!("there are no objects of a type {name}; `pyheap census` shows which there are"),
            },
        };
        return Err(Failure::failed(error).into());
    };
    let omitted = why.ways.len().saturating_sub(show.limit);
    why.ways.truncate(show.limit);
    if !show.json {
        return Ok(to_stdout(&render::why(census, &why, omitted))?);
    }
    let mut answer = serde_json::to_value(&why)?;
    if let Some(answer) = answer.as_object_mut() {
        let mut census = serde_json::to_value(census)?;
        census.as_object_mut().and_then(|census| census.remove("types"));
        answer.insert("omitted_ways".to_owned(), omitted.into());
        answer.insert("census".to_owned(), census);
    }
    Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?)
}

/// A type whose name ends in the same word.
fn similar<'a>(census: &'a Census, name: &str) -> Option<&'a str> {
    let last = |name: &str| name.rsplit('.').next().map(str::to_lowercase);
    let found = census.types.iter().find(|row| last(&row.name) == last(name));
    found.map(|row| row.name.as_str())
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
    let answer = changes_json(before, after, &all, show.by.name(), show.limit)?;
    Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?)
}

/// What has changed between two censuses, as JSON: the most `limit` rows.
pub(super) fn changes_json(
    before: &Census,
    after: &Census,
    all: &[Change],
    by: &str,
    limit: usize,
) -> Result<serde_json::Value, serde_json::Error> {
    let shown = all.get(..limit).unwrap_or(all);
    let brief = |census: &Census| {
        let mut census = serde_json::to_value(census)?;
        if let Some(census) = census.as_object_mut() {
            census.remove("types");
        }
        Ok::<_, serde_json::Error>(census)
    };
    Ok(serde_json::json!({
        "before": brief(before)?,
        "after": brief(after)?,
        "by": by,
        "omitted_rows": all.len() - shown.len(),
        "rows": shown,
    }))
}

pub(super) fn load(path: &Path) -> Result<Census, Failure> {
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

fn of_process(target: &Target, args: &Args, wanted: Option<&Wanted>) -> Result<(Census, Option<Why>), Failure> {
    let how = How {
        live: args.live,
        limits: args.limits.limits(),
        max_time: args.max_time,
    };
    of_target(target, &how, wanted)
}

/// How a process is read.
pub(super) struct How {
    /// While it runs.
    pub live: bool,
    /// Of its frozen copy.
    pub limits: Limits,
    /// The longest that reading may take.
    pub max_time: Duration,
}

/// A census of a process, and the answer to what is wanted.
///
/// # Errors
/// When the process is gone or its heap cannot be found.
pub(super) fn of_target(
    target: &Target,
    args: &How,
    wanted: Option<&Wanted>,
) -> Result<(Census, Option<Why>), Failure> {
    let pid = target.facts.id.pid;
    let copy = if args.live {
        None
    } else {
        let ready = preflight::check_for_copy(pid).map_err(FreezeError::from);
        match ready.and_then(|target| Frozen::of(&target, args.limits)) {
            Ok(copy) => Some(copy),
            Err(error) => {
                note(&format!(
                    "no frozen copy, so the process is read while it runs: {}",
                    chain(&error)
                ));
                None
            }
        }
    };
    let Some(copy) = copy else {
        let mut answer = read(target, &ProcessMemory::new(pid), pid, Mode::Live, args.max_time, wanted)?;
        if !target.facts.id.is_alive() {
            let error = format!("process {pid} ended before its heap was read");
            return Err(Failure::new(code::NO_PROCESS, error));
        }
        answer.0.memory = rss::of(target, None).ok().as_ref().map(Memory::from);
        return Ok(answer);
    };
    let answer = read(target, copy.memory(), copy.pid(), Mode::Frozen, args.max_time, wanted);
    let memory = rss::of(target, Some(&copy));
    if let Some(why) = copy.ended() {
        let error = format!("the frozen copy was ended before all was read: {why} (--live does without)");
        return Err(Failure::failed(error));
    }
    let cost = copy.finish();
    let (mut census, why) = answer?;
    census.memory = memory.ok().as_ref().map(Memory::from);
    match cost {
        Ok(cost) => census.copy = Some(cost),
        Err(error) => note(&format!("warning: {}", chain(&error))),
    }
    Ok((census, why))
}

/// A census of the memory that process `pid`, the target or its copy, has mapped.
fn read<M: RemoteMemory>(
    target: &Target,
    memory: &M,
    pid: i32,
    mode: Mode,
    limit: Duration,
    wanted: Option<&Wanted>,
) -> Result<(Census, Option<Why>), Failure> {
    let gone = |source: procfs::ProcError| Failure::new(code::NO_PROCESS, source);
    let about = About {
        pid: target.facts.id.pid,
        command: target.facts.short_command(COMMAND_CHARS),
        python: target.interpreter.version.to_string(),
        mode,
        taken_unix_seconds: now(),
    };
    let source = Source {
        memory,
        writable: writable(pid).map_err(gone)?,
        small: small_areas(pid),
        changes: mode == Mode::Live,
        limit,
    };
    let (found, why) = ask(&source, &target.interpreter, wanted).map_err(of_census)?;
    Ok((Census::of(about, &found), why))
}

fn of_file(path: &Path, args: &Args, wanted: Option<&Wanted>) -> Result<(Census, Option<Why>), Failure> {
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
        small: core.memory(),
        changes: false,
        limit: args.max_time,
    };
    let (found, why) = ask(&source, &interpreter, wanted).map_err(of_census)?;
    let mut census = Census::of(about, &found);
    census.memory = Some(Memory::from(&rss::of_core(&core, &interpreter)));
    Ok((census, why))
}

fn of_census(error: CensusError) -> Failure {
    const UNSUPPORTED: u8 = 5;
    let number = match &error {
        CensusError::Unsupported(_) => UNSUPPORTED,
        _ => code::REFUSED,
    };
    Failure::new(number, error)
}
