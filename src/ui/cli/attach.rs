//! `pyheap attach`: what grows, live, as text.

use super::choose;
use super::failure::Failure;
use super::record::{cure_family, detach, stop_signals};
use crate::attach::Session;
use crate::attach::family::Family;
use crate::attach::process::MemoryUse;
use crate::collect::live::{Estimate, Live};
use crate::collect::resolve::lock;
use crate::collect::{Recorder, Stop};
use crate::profile::interval::of_bytes;
use crate::report::human::{self, Human};
use crate::report::top::interval_text;
use crate::ui::output::{note, to_stdout};
use crate::ui::units;
use std::collections::HashMap;
use std::error::Error;
use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often we look whether it is time to stop.
const LOOK: Duration = Duration::from_millis(20);
/// Rows of the table.
const ROWS: usize = 15;

/// Attach to a running Python process and show what it allocates and keeps, by allocation site.
///
/// Only what is allocated after the attach can be seen. Ctrl-C quits and leaves the process as it was.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The process; without it the only attachable Python process.
    #[arg(value_name = "PID")]
    pub process: Option<i32>,

    /// Time between two updates.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::parse_duration)]
    pub interval: Duration,

    /// What is sampled.
    #[command(flatten)]
    pub sampling: super::sampling::Args,

    /// Quit after this time.
    #[arg(long, short, value_name = "TIME", value_parser = units::parse_duration)]
    pub duration: Option<Duration>,
}

/// Runs the command.
///
/// # Errors
/// With the exit codes of `pyheap record`.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let stop = stop_signals()?;
    let target = choose::target(args.process)?;
    let session = Session::attach(target, args.sampling.options()).map_err(Failure::from)?;
    let pid = session.target.facts.id.pid;
    let mut recorder = match Recorder::start(&session, None, args.sampling.limits(), Instant::now()) {
        Ok(recorder) => recorder,
        Err(error) => {
            let _ = session.detach();
            return Err(error.into());
        }
    };
    note(&format!("attached to PID {pid} (Ctrl-C quits and detaches)"));
    let first = MemoryUse::of(pid).map_or(0, |memory| memory.rss_bytes);
    let terminal = std::io::stdout().is_terminal();
    let (mut next_second, mut next_view) = (Duration::ZERO, args.interval);
    let mut output_error = None;
    let ended = loop {
        if stop.load(Ordering::Acquire) || args.duration.is_some_and(|duration| recorder.elapsed() >= duration) {
            break None;
        }
        if let Some(stop) = recorder.must_stop(&session) {
            break Some(stop);
        }
        recorder.watch_room(&session);
        recorder.take_notes().iter().for_each(|text| note(text));
        let elapsed = recorder.elapsed();
        if elapsed >= next_second {
            next_second += Duration::from_secs(1);
            if let Some(stop) = recorder.every_second(&session) {
                break Some(recorder.must_stop(&session).unwrap_or(stop));
            }
        }
        if elapsed >= next_view {
            next_view = elapsed + args.interval;
            let text = view(&session, &recorder, first);
            let text = if terminal { format!("\x1b[H\x1b[2J{text}") } else { text };
            if let Err(error) = to_stdout(&text) {
                output_error = Some(error);
                break None;
            }
        }
        std::thread::sleep(LOOK);
    };
    let reason = crate::profile::facts::EndReason::Stopped;
    recorder.finish(&session, &reason);
    match ended {
        Some(Stop::TargetGone | Stop::TargetReplaced) => {
            session.forget();
            note("the target has ended");
            Ok(())
        }
        Some(other) => {
            detach_all(session)?;
            Err(Failure::failed(other.describe()).into())
        }
        None => {
            detach_all(session)?;
            note(&format!("detached from PID {pid}"));
            output_error.map_or(Ok(()), |error| {
                Err(Failure::failed(format!("cannot write the view: {error}")).into())
            })
        }
    }
}

fn view(session: &Session, recorder: &Recorder, rss_first: u64) -> String {
    let facts = &session.target.facts;
    let rss = MemoryUse::of(facts.id.pid).map_or(0, |memory| memory.rss_bytes);
    let live = lock(&recorder.live);
    let losses = crate::collect::recorder::losses(&recorder.counters(), &live);
    let lost: String = losses
        .0
        .iter()
        .map(|(name, count)| format!("  {name} {count}"))
        .collect();
    let mut text = String::new();
    let _ = writeln!(
        text,
        "live since the attach: {} ± {} in {} samples of {}  (RSS {} -> {})",
        human::bytes(live.total.bytes),
        human::bytes(live.total.error95()),
        human::count(live.total.samples as f64),
        human::count(live.sampled as f64),
        human::bytes(rss_first as f64),
        human::bytes(rss as f64),
    );
    let _ = writeln!(
        text,
        "PID {}  Python {}  attached for {}  {}{lost}",
        facts.id.pid,
        session.target.interpreter.version,
        Human(Duration::from_secs(recorder.elapsed().as_secs())),
        human::clean(&facts.short_command(60)),
    );
    let _ = writeln!(
        text,
        "{:>10} {:>21} {:>7} {:>10}  SITE",
        "LIVE", "95 % INTERVAL", "SHARE", "OBJECTS"
    );
    for (site, estimate) in sites(&live).into_iter().take(ROWS) {
        let _ = writeln!(
            text,
            "{:>10} {:>21} {:>7} {:>10}  {site}",
            human::bytes(estimate.bytes),
            interval(&estimate, live.period()),
            human::share(estimate.bytes, live.total.bytes),
            human::count(estimate.objects),
        );
    }
    text
}

/// The 95 % interval of an estimate.
fn interval(estimate: &Estimate, period: u64) -> String {
    let limits = of_bytes(estimate.bytes, estimate.variance, estimate.samples, period);
    interval_text(
        estimate.bytes,
        estimate.error95(),
        limits.low,
        limits.high,
        estimate.samples,
    )
}

/// Live memory by allocating line, largest first.
fn sites(live: &Live) -> Vec<(String, Estimate)> {
    let mut by_line: HashMap<(&str, u32, &str), Estimate> = HashMap::new();
    for trace in &live.traces {
        if trace.live.samples == 0 {
            continue;
        }
        let frame = &trace.site;
        let sum = by_line.entry((&frame.file, frame.line, &frame.function)).or_default();
        sum.samples += trace.live.samples;
        sum.bytes += trace.live.bytes;
        sum.objects += trace.live.objects;
        sum.variance += trace.live.variance;
    }
    let mut sites: Vec<(String, Estimate)> = by_line
        .into_iter()
        .map(|((file, line, function), sum)| (human::clean(&format!("{file}:{line} {function}")).into_owned(), sum))
        .collect();
    sites.sort_by(|a, b| b.1.bytes.total_cmp(&a.1.bytes).then_with(|| a.0.cmp(&b.0)));
    sites
}

/// Takes the hooks out of the process, and the copies out of the children that it has forked.
fn detach_all(session: Session) -> Result<(), Failure> {
    let interpreter = session.target.interpreter.clone();
    let pid = session.target.facts.id.pid;
    let mut family = Family::of(pid);
    let (_, done) = detach(session, false);
    cure_family(&mut family, &interpreter);
    done
}
