//! `pyheap cure`: takes out what a pyheap that is no more has left in a process.

use super::failure::{Failure, chain, code};
use crate::attach::family::{self, Family};
use crate::attach::process::ProcessId;
use crate::attach::session::{self, Cured};
use crate::attach::{Refusal, preflight};
use crate::ui::output::note;
use std::error::Error;

/// Take out what an earlier pyheap has left in a process (it was killed, or something was still in use when it left).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The process.
    #[arg(value_name = "PID")]
    pub pid: i32,

    /// The process and all its descendants.
    #[arg(long)]
    pub tree: bool,
}

/// Runs the command.
///
/// # Errors
/// When something is left.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if args.tree { tree(args.pid) } else { one(args.pid) }
}

/// Cures a process and its descendants: those that can be, whatever happens to the others.
fn tree(root: i32) -> Result<(), Box<dyn Error>> {
    let id = ProcessId::of(root).map_err(|_| Failure::from(Refusal::NoSuchProcess { pid: root }))?;
    let mut pids = Family::of(id.pid).look();
    pids.insert(0, root);
    let outcomes = family::cure_all(&pids, None);
    if outcomes.is_empty() {
        note(&format!("nothing of pyheap is in process {root} and its descendants"));
    }
    let mut left = 0;
    for outcome in &outcomes {
        match &outcome.left {
            None => note(&format!("process {} is clean again", outcome.pid)),
            Some(why) => {
                left += 1;
                note(&format!("process {}: {why}", outcome.pid));
            }
        }
    }
    match left {
        0 => Ok(()),
        n => Err(Failure::failed(format!("something is left in {n} of {} processes", outcomes.len())).into()),
    }
}

fn one(pid: i32) -> Result<(), Box<dyn Error>> {
    let target = preflight::look(pid).map_err(Failure::from)?;
    let cured = session::cure(pid, &target.interpreter).map_err(|error| Failure::new(code::FAILED, error))?;
    if cured.is_empty() {
        note(&format!("nothing of pyheap is in process {pid}"));
    }
    let mut left = None;
    for outcome in cured {
        match outcome {
            Cured::Gone => note(&format!("process {pid} is clean again")),
            Cured::OtherProtocol { protocol } => {
                left = Some(format!(
                    "process {pid} has hooks of another version of pyheap (protocol {protocol}): use that version's `pyheap cure {pid}`"
                ));
            }
            Cured::Inert(why) => left = Some(format!("the hooks are out, but the memory stays for now: {why}")),
            Cured::Copy(error) => left = Some(chain(&error)),
            Cured::InUse { owner } => left = Some(format!("pyheap (pid {owner}) is recording it: kill -INT {owner}")),
        }
    }
    match left {
        Some(why) => Err(Failure::new(code::FAILED, why).into()),
        None => Ok(()),
    }
}
