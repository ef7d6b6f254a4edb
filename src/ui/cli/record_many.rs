//! `pyheap record --tree | --all | --cgroup`: many processes at once; and waiting until it is worth it.

use super::failure::{Failure, code};
use super::fleet::{Fleet, Plan, Sum};
use super::merged;
use super::record::{Args, is_progress_overwritten};
use super::recording::Why;
use crate::attach::Target;
use crate::attach::condition::{Condition, Watch};
use crate::attach::crowd::{Crowd, Selection};
use crate::attach::process::MemoryUse;
use crate::report::human::{self, Human};
use crate::report::info::describe_losses;
use crate::ui::output::note;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often we look whether there is something to do.
const TURN: Duration = Duration::from_millis(50);
/// Progress is shown this often at a terminal, and elsewhere.
const PROGRESS_TERMINAL: Duration = Duration::from_secs(1);
const PROGRESS_LOG: Duration = Duration::from_secs(10);
/// Nobody is left for so long: then a tree has ended.
const NOBODY: Duration = Duration::from_millis(500);

/// How members are recorded.
pub(super) fn plan(args: &Args) -> Plan {
    Plan {
        base: args.output.clone(),
        suffix: args.suffix,
        sampling: args.sampling.clone(),
        condition: args.when.condition(),
        verbose: args.verbose,
        quiet: args.quiet,
        rotation: args.long.rotation(),
    }
}

/// Waits until `condition` holds of `target`: what has happened, or nothing if there is nothing to wait for.
///
/// # Errors
/// When the process ends before, or `stop` is set.
pub(super) fn wait_until(condition: &Condition, target: &Target, stop: &AtomicBool) -> Result<Option<String>, Failure> {
    if condition.is_none() {
        return Ok(None);
    }
    let (pid, begun) = (target.facts.id.pid, Instant::now());
    let mut watch = Watch::new(*condition);
    let mut next = Duration::ZERO;
    note(&format!("waiting before attaching to {pid} (Ctrl-C gives up)"));
    loop {
        if stop.load(Ordering::Acquire) {
            return Err(Failure::failed(format!(
                "interrupted before process {pid} was attached to"
            )));
        }
        let elapsed = begun.elapsed();
        if elapsed >= next {
            next = elapsed + condition.step();
            if !target.facts.id.is_alive() {
                return Err(Failure::new(
                    code::NO_PROCESS,
                    format!("process {pid} ended before it was time to attach"),
                ));
            }
            let now = MemoryUse::of(pid).ok();
            if let Some(why) = now.and_then(|now| watch.see(elapsed, now.rss_bytes)) {
                note(&format!("attaching to {pid}: {why}"));
                return Ok(Some(why));
            }
        }
        std::thread::sleep(TURN);
    }
}

/// Records all that are selected.
///
/// # Errors
/// When nobody could be recorded, or a recording failed.
pub(super) fn record(args: &Args, selection: Selection, stop: &AtomicBool, hangup: &AtomicBool) -> Result<(), Failure> {
    check_writable(args)?;
    if let Selection::Tree(root) = selection {
        crate::attach::process::ProcessId::of(root)
            .map_err(|_| Failure::new(code::NO_PROCESS, format!("no process has pid {root}")))?;
    }
    let is_tree = matches!(selection, Selection::Tree(_));
    let crowd = Crowd::new(selection, args.which.pattern.clone());
    let mut fleet = Fleet::new(plan(args), crowd, None)?;
    let base = args.output.display();
    note(&format!(
        "recording into {base}.PID._hpm, for each process (Ctrl-C ends it)"
    ));
    let begun = Instant::now();
    let overwrites = is_progress_overwritten();
    let every = if overwrites { PROGRESS_TERMINAL } else { PROGRESS_LOG };
    let mut say = |text: &str| {
        if overwrites {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        note(text);
    };
    let mut next = every;
    let mut nobody_since = None;
    let why = loop {
        if stop.load(Ordering::Acquire) {
            break Why::Asked;
        }
        let elapsed = begun.elapsed();
        if args.limited().is_some_and(|duration| elapsed >= duration) {
            break Why::Duration;
        }
        fleet.tick(&mut say);
        if hangup.swap(false, Ordering::AcqRel) {
            fleet.rotate();
        }
        if is_tree && !fleet.is_anybody() {
            if elapsed.saturating_sub(*nobody_since.get_or_insert(elapsed)) >= NOBODY {
                break Why::Stop(crate::collect::Stop::TargetGone);
            }
        } else {
            nobody_since = None;
        }
        if elapsed >= next && !args.quiet {
            next = elapsed + every;
            let line = progress(args, &fleet, elapsed);
            if overwrites {
                let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
            } else {
                note(&line);
            }
        }
        std::thread::sleep(TURN);
    };
    let sum = fleet.finish(&why, &mut say);
    report(args, &sum, begun.elapsed());
    finished(args, sum)
}

/// Sees that files can be made, before anything is touched.
fn check_writable(args: &Args) -> Result<(), Failure> {
    let mut probe = args.output.clone().into_os_string();
    probe.push(format!(".{}.probe", std::process::id()));
    let probe = std::path::PathBuf::from(probe);
    let made = crate::profile::place::writable(&probe, true)
        .and_then(|place| std::fs::OpenOptions::new().write(true).create_new(true).open(place));
    made.map_err(|error| {
        let text = format!(
            "cannot write {}.PID: {error}; choose another place with -o",
            args.output.display()
        );
        Failure::failed(text)
    })?;
    let _ = std::fs::remove_file(probe);
    Ok(())
}

fn progress(args: &Args, fleet: &Fleet, elapsed: Duration) -> String {
    let (count, total, samples) = fleet.now();
    let left = match args.limited() {
        Some(duration) => format!("{} left", Human(duration.saturating_sub(elapsed))),
        None => "until Ctrl-C".to_owned(),
    };
    format!(
        "{} ({left})  {count} processes  {} samples  live since the attach {} ± {}",
        Human(Duration::from_secs(elapsed.as_secs())),
        human::count(samples as f64),
        human::bytes(total.bytes),
        human::bytes(total.error95()),
    )
}

fn report(args: &Args, sum: &Sum, elapsed: Duration) {
    let margin = 1.96 * sum.live.1.max(0.0).sqrt();
    note(&format!(
        "recorded {} processes ({} of them have ended) in {}: {} events, live since the attach {} ± {}",
        sum.recorded,
        sum.ended,
        Human(elapsed),
        human::count(sum.events as f64),
        human::bytes(sum.live.0),
        human::bytes(margin),
    ));
    if sum.refused > 0 {
        note(&format!("{} processes could not be recorded", sum.refused));
    }
    if !sum.losses.is_empty() {
        note(&format!(
            "lost or late while recording: {}",
            describe_losses(&sum.losses)
        ));
    }
    if args.quiet || sum.recorded == 0 {
        return;
    }
    match merged::headline_of(&sum.bases) {
        Ok(line) => note(&line),
        Err(error) => note(&format!("no verdict: {error}")),
    }
    let base = args.output.display();
    note(&format!("look at it with: pyheap leaks {base}.*, pyheap top {base}.*"));
}

fn finished(args: &Args, sum: Sum) -> Result<(), Failure> {
    if let Some(first) = sum.failures.first() {
        let more = match sum.failures.len() {
            1 => String::new(),
            all => format!(", and {} more", all - 1),
        };
        return Err(Failure::failed(format!(
            "a recording failed: process {first}{more}; what was recorded is kept"
        )));
    }
    match (sum.recorded, sum.refusal) {
        (0, Some((code, text))) => Err(Failure::new(code, text)),
        (0, None) if args.when.condition().is_none() => Err(Failure::new(
            code::USAGE,
            "there was no Python process to record".to_owned(),
        )),
        _ => Ok(()),
    }
}
