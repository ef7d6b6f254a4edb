//! `pyheap doctor`: everything that could stand in the way of an attach, and what helps.

use super::failure::Failure;
use crate::attach::doctor::{Cost, Diagnosis, Level, diagnose};
use crate::report::human::{bytes, clean, count};
use crate::ui::output::to_stdout;
use std::error::Error;
use std::fmt::Write;

/// Check what could keep pyheap from attaching to a process, without touching it, and say what helps and what an attach would cost.
///
/// Without a PID only the host is looked at.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 nothing stands in the way; else that of the first cause, whose first digit is the exit code of \
`pyheap record`: 30 no such process, 31 it has ended, 32 a thread; 40 another user's, 41 Yama, 42 not dumpable, 43 its capabilities, \
44 its user namespace, 45 a security module, 46 pyheap's own seccomp filter; 50 not Python, 51 an unsupported Python, 52 its layout, \
53 a missing symbol, 54 its file, 55 a thread of the kernel; 60 traced, 61 recorded by another pyheap, 62 hooks of another version; \
71 stopped, 72 starting up, 73 shutting down, 74 seccomp, 75 shadow stack, 76 address space, 77 memory cgroup, 78 remote debugging \
disabled, 79 this processor, 70 anything else."
)]
pub struct Args {
    /// The process.
    #[arg(value_name = "PID")]
    pub pid: Option<i32>,

    /// Read seccomp filters, too. The kernel shows those of a stopped thread only, so one is stopped for some microseconds.
    #[arg(long, requires = "pid")]
    pub read_filters: bool,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// With the exit code of the first cause.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let found = diagnose(args.pid, args.read_filters);
    let code = found.exit_code();
    let text = if args.json {
        let mut value = serde_json::to_value(&found)?;
        if let Some(object) = value.as_object_mut() {
            object.insert("exit_code".to_owned(), code.into());
        }
        serde_json::to_string_pretty(&value)? + "\n"
    } else {
        render(&found)
    };
    to_stdout(&text)?;
    if code == 0 {
        return Ok(());
    }
    let what = found
        .pid
        .map_or_else(|| "this host".to_owned(), |pid| format!("process {pid}"));
    Err(Failure::new(code, format!("{what} cannot be attached to as things are")).into())
}

fn render(found: &Diagnosis) -> String {
    let width = found.checks.iter().map(|one| one.check.len()).max().unwrap_or(0);
    let mut text = String::new();
    for one in &found.checks {
        let level = match one.level {
            Level::Ok => "ok  ",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        let _ = writeln!(text, "{level}  {:width$}  {}", one.check, clean(&one.text));
        for remedy in &one.remedy {
            let _ = writeln!(text, "      {:width$}  → {}", "", clean(remedy));
        }
    }
    if let Some(cost) = &found.cost {
        text += &describe(cost);
    }
    if let (Some(pid), 0) = (found.pid, found.exit_code()) {
        let warnings = match found.count(Level::Warn) {
            0 => String::new(),
            1 => ", with a warning".to_owned(),
            count => format!(", with {count} warnings"),
        };
        let _ = writeln!(text, "can be attached to{warnings}: pyheap record {pid} --duration 1m");
    }
    text
}

fn describe(cost: &Cost) -> String {
    format!(
        "cost  one thread stands still twice, at the attach and at the detach, for some {} µs each (on a busy machine up to {} µs); \
         {} of address space, of which at most {} become memory; at most {} % of its CPU time, and about 1 % of a core for pyheap\n",
        count(cost.stop_micros as f64),
        count(cost.stop_micros_busy as f64),
        bytes(cost.address_space_bytes as f64),
        bytes(cost.memory_bytes_at_most as f64),
        100.0 * cost.cpu_share_at_most,
    )
}
