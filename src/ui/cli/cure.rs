//! `pyheap cure`: takes out what a pyheap that is no more has left in a process.

use super::failure::{Failure, code};
use crate::attach::preflight;
use crate::attach::session::{self, Cured};
use crate::ui::output::note;
use std::error::Error;

/// Take out what an earlier pyheap has left in a process (it was killed, or something was still in use when it left).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The process.
    #[arg(value_name = "PID")]
    pub pid: i32,
}

/// Runs the command.
///
/// # Errors
/// When something is left.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let pid = args.pid;
    let target = preflight::look(pid).map_err(Failure::from)?;
    let cured = session::cure(pid, &target.interpreter).map_err(|error| Failure::new(code::FAILED, error))?;
    if cured.is_empty() {
        note(&format!("nothing of pyheap is in process {pid}"));
    }
    let mut left = None;
    for outcome in cured {
        match outcome {
            Cured::Gone => note(&format!("process {pid} is clean again")),
            Cured::Inert(why) => left = Some(format!("the hooks are out, but the memory stays for now: {why}")),
            Cured::InUse { owner } => left = Some(format!("pyheap (pid {owner}) is recording it: kill -INT {owner}")),
        }
    }
    match left {
        Some(why) => Err(Failure::new(code::FAILED, why).into()),
        None => Ok(()),
    }
}
