//! `pyheap record --children`: each child is a target of its own, recorded by a pyheap of its own into BASE.PID.
//!
//! A forked child carries an inert copy of the shim; the pyheap that records it takes that out and puts its own in. One
//! process for each child: what goes wrong with one harms no other, and a terminal's Ctrl-C reaches none of them by itself.

use super::record::Args;
use crate::attach::{Refusal, preflight};
use crate::ui::output::note;
use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Children that are recorded at the same time.
const MOST: usize = 64;

/// The recordings of the children.
#[derive(Debug, Default)]
pub struct Children {
    running: BTreeMap<i32, Child>,
    /// Those that cannot be recorded, or have been.
    done: std::collections::BTreeSet<i32>,
    too_many: bool,
}

impl Children {
    /// Starts recordings of the descendants in `pids` that have none, for the time that is `left`.
    pub fn look(&mut self, args: &Args, pids: &[i32], left: Option<Duration>) {
        self.running.retain(|pid, child| match child.try_wait() {
            Ok(None) => true,
            _ => {
                self.done.insert(*pid);
                false
            }
        });
        // A number may be given again.
        self.done.retain(|pid| pids.contains(pid));
        for &pid in pids {
            if self.running.contains_key(&pid) || self.done.contains(&pid) || left.is_some_and(|left| left.is_zero()) {
                continue;
            }
            if self.running.len() >= MOST {
                if !self.too_many {
                    note(&format!("more than {MOST} children: the others are not recorded"));
                    self.too_many = true;
                }
                return;
            }
            match preflight::look(pid) {
                Ok(_) => self.start(args, pid, left),
                // It is just starting, or becoming another program: look again.
                Err(refusal) if is_young(&refusal) => {}
                Err(_) => {
                    self.done.insert(pid);
                }
            }
        }
    }

    fn start(&mut self, args: &Args, pid: i32, left: Option<Duration>) {
        let mut base = args.output.clone().into_os_string();
        base.push(format!(".{pid}"));
        let mut command = Command::new("/proc/self/exe");
        command.args([
            "record",
            "--pid",
            &pid.to_string(),
            "--period",
            &args.sampling.period.to_string(),
        ]);
        command.args(["--parent", &std::process::id().to_string()]);
        command.args(["--suffix", args.suffix.example(), "-o"]).arg(&base);
        if let Some(left) = left {
            command.args(["--duration", &format!("{}ms", left.as_millis().max(1))]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        command.args(args.verbose.then_some("--verbose"));
        match command.spawn() {
            Ok(child) => {
                self.running.insert(pid, child);
            }
            Err(error) => {
                note(&format!("child {pid} cannot be recorded: {error}"));
                self.done.insert(pid);
            }
        }
    }

    /// Ends all recordings and waits for them.
    pub fn finish(self) {
        for child in self.running.values() {
            if let Ok(pid) = i32::try_from(child.id()) {
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGINT);
            }
        }
        for mut child in self.running.into_values() {
            let _ = child.wait();
        }
    }
}

/// True if a process refused with this may be a Python a moment later.
fn is_young(refusal: &Refusal) -> bool {
    use crate::attach::FindError;
    matches!(
        refusal,
        Refusal::Python(FindError::NotInitialised { .. } | FindError::Memory { .. } | FindError::Maps { .. })
            | Refusal::Stopped { .. }
    )
}
