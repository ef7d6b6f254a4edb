//! `pyheap dump`: the Python stacks of all threads, now.

use super::choose;
use super::failure::Failure;
use crate::attach::preflight;
use crate::dump::core::{Core, CoreError};
use crate::dump::{DumpError, live, render};
use crate::ui::output::to_stdout;
use std::error::Error;
use std::path::PathBuf;

/// Show the Python stacks of all threads: function, file, line, who holds the GIL, which system call each waits in,
/// and in which C function where a symbol tells.
///
/// Nothing is put into the process. Threads that run are stopped while it is read, some milliseconds as a rule; threads
/// that wait are left alone, and that they did not run meanwhile is checked. The innermost call comes first. Greenlets and coroutines that wait are on no
/// thread's stack, and are not shown.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The process; may be left out if there is only one Python process.
    #[arg(value_name = "PID", conflicts_with = "core")]
    pub pid: Option<i32>,

    /// Stop nothing. Each thread is read until two readings agree; what may be torn is marked.
    #[arg(long, conflicts_with = "core")]
    pub nonblocking: bool,

    /// Read a core file instead of a process.
    #[arg(long, value_name = "FILE")]
    pub core: Option<PathBuf>,

    /// The program that left the core file, if it is not where it was.
    #[arg(long, value_name = "FILE", requires = "core")]
    pub exe: Option<PathBuf>,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// When there is no such process or file, or it is no Python that is supported.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let dump = match &args.core {
        Some(path) => {
            let core = Core::open(path, args.exe.as_deref()).map_err(of_core)?;
            crate::dump::core::dump(&core).map_err(|error| match error.downcast::<CoreError>() {
                Ok(error) => of_core(*error),
                Err(error) => Failure::failed(error),
            })?
        }
        None => {
            let target = match args.pid {
                Some(pid) => preflight::check_readable(pid).map_err(Failure::from)?,
                None => choose::target(None)?,
            };
            let dump = if args.nonblocking {
                live::nonblocking(&target)
            } else {
                live::stopped(&target)
            };
            dump.map_err(of_process)?
        }
    };
    let text = if args.json {
        serde_json::to_string_pretty(&dump)? + "\n"
    } else {
        render::render(&dump)
    };
    Ok(to_stdout(&text)?)
}

/// The exit codes of the README.
pub(super) fn of_core(error: CoreError) -> Failure {
    const UNSUPPORTED: u8 = 5;
    const OTHER: u8 = 7;
    let code = match &error {
        CoreError::Io { .. } => super::failure::code::USAGE,
        CoreError::NoPython(_) | CoreError::Python(_) => UNSUPPORTED,
        _ => OTHER,
    };
    Failure::new(code, error)
}

fn of_process(error: DumpError) -> Failure {
    use pyheap_injector::hijack::HijackError;
    const GONE: u8 = 3;
    const NOT_PERMITTED: u8 = 4;
    const OTHER: u8 = 7;
    let code = match &error {
        DumpError::Gone { .. } => GONE,
        DumpError::Stop {
            source: HijackError::Refused { .. },
            ..
        } => NOT_PERMITTED,
        _ => OTHER,
    };
    Failure::new(code, error)
}
