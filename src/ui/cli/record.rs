//! `pyheap record`: a recording into files.

use super::choose::{self, Started};
use super::failure::{Failure, chain, code};
use super::fleet::Fleet;
pub use super::recording::stop_signals;
use super::recording::{Front, Recording, Why, cost, covered, facts, found, micros, nap, stop_and_hangup_signals};
use super::select::DomainArgs;
use super::which::{Long, When, Which};
use crate::attach::crowd::{Crowd, Selection};
use crate::attach::preflight;
use crate::attach::process::ProcessId;
use crate::attach::{AttachError, Session, Target};
use crate::collect::recorder::losses;
use crate::collect::resolve::lock;
use crate::collect::{Files, Outcome, Recorder, Stop};
use crate::profile::facts::EndReason;
use crate::profile::names::{Part, ProfileNames, SuffixStyle};
use crate::profile::place;
use crate::profile::reader::Reader;
use crate::profile::sidecar::note_detach;
use crate::report::human::{self, Human};
use crate::report::info::describe_losses;
use crate::report::leaks::render::{Detail, render};
use crate::ui::output::{are_notes_json, note};
use crate::ui::units;
use std::error::Error;
use std::io::{IsTerminal, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Progress is shown this often at a terminal, and elsewhere.
const PROGRESS_TERMINAL: Duration = Duration::from_secs(1);
const PROGRESS_LOG: Duration = Duration::from_secs(10);
/// Sites in the verdict at the end.
const VERDICT_SITES: usize = 3;

/// Record a running Python process into files.
///
/// Without a PID the only Python process that can be attached to is taken; if there are several you are asked (at a
/// terminal) or shown the list. Ctrl-C ends the recording: the files are complete then and the process is as before.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 recorded; 1 something failed, what was recorded until then is kept; 2 wrong usage, \
or no or several processes to choose from; 3 no such process; 4 not permitted; 5 not a supported Python; 6 already \
traced or recorded by another; 7 cannot be attached to for another reason."
)]
pub struct Args {
    /// The process to record.
    #[arg(value_name = "PID", conflicts_with_all = ["pid", "command"])]
    pub process: Option<i32>,

    /// The process to record.
    #[arg(long, value_name = "PID", conflicts_with_all = ["command", "tree", "all", "cgroup", "pattern"])]
    pub pid: Option<i32>,

    /// Stop after this time: 90s, 10m, 1h30m. Without it, or with `unlimited`: until Ctrl-C or the end of the process.
    #[arg(long, short, value_name = "TIME", value_parser = parse_time)]
    pub duration: Option<Duration>,

    /// Name of the files: BASE._hpm, BASE._hpd, BASE._hpx.
    #[arg(long, short, value_name = "BASE", default_value = "run")]
    pub output: PathBuf,

    /// What is sampled.
    #[command(flatten)]
    pub sampling: super::sampling::Args,

    /// Spelling of the file names: `._hpm`, or `.hpm` as the original heapprof opens them.
    #[arg(long, value_name = "SUFFIX", default_value = "._hpm")]
    pub suffix: SuffixStyle,

    /// Record the process's descendants, too, each into files of its own: BASE.PID._hpm. Those that it forks meanwhile, and
    /// other Pythons that it starts.
    #[arg(long, conflicts_with_all = ["tree", "all", "cgroup"])]
    pub children: bool,

    /// Take a census of the heap before the recording and one after it, as `pyheap census` does (from a frozen copy), and keep
    /// them beside the files: `pyheap leaks` shows what has grown in between, by type.
    #[arg(long, conflicts_with = "children")]
    pub census: bool,

    /// Which processes, if it is not a single one: each is recorded into files of its own, BASE.PID._hpm.
    #[command(flatten)]
    pub which: Which,

    /// When it is attached to.
    #[command(flatten)]
    pub when: When,

    /// Long recordings.
    #[command(flatten)]
    pub long: Long,

    /// Say more: what was found and what the attach cost.
    #[arg(long, short)]
    pub verbose: bool,

    /// No progress and no verdict: say only that it records and what it has recorded, what goes wrong, and the lines for the audit.
    #[arg(long, short, conflicts_with = "verbose")]
    pub quiet: bool,

    /// The files will not be there for long: do not point at them.
    #[arg(skip)]
    pub temporary: bool,

    /// Start this program and record it from the moment its interpreter is up (what it allocates in its first
    /// hundredths of a second is not seen).
    ///
    /// Its end ends the recording; its exit code is reported, not passed on. Ctrl-C at a terminal reaches the program, too,
    /// as always. When the recording ends before the program, that runs on.
    #[arg(last = true, value_name = "COMMAND", conflicts_with_all = ["tree", "all", "cgroup", "pattern"])]
    pub command: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// With the exit code that `--help` lists.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    args.long.told.apply()?;
    args.sampling.check().map_err(|text| Failure::new(code::USAGE, text))?;
    let (stop, hangup) = match args.long.rotate {
        Some(_) => stop_and_hangup_signals()?,
        None => (stop_signals()?, Arc::default()),
    };
    if let Some(selection) = args.which.selection()? {
        if args.census {
            return Err(Failure::new(code::USAGE, "--census is for one process").into());
        }
        return Ok(super::record_many::record(args, selection, &stop, &hangup)?);
    }
    if args.command.is_empty() && std::env::args_os().last().is_some_and(|last| last == "--") {
        return Err(Failure::new(code::USAGE, "no command was given after --").into());
    }
    check_writable(args)?;
    let mut started = if args.command.is_empty() {
        None
    } else {
        Some(Started::new(&args.command)?)
    };
    let mut why = None;
    let target = match &mut started {
        Some(program) => program.wait_for_python(&stop)?,
        None => {
            let target = choose::target(args.process.or(args.pid))?;
            why = super::record_many::wait_until(&args.when.condition(), &target, &stop)?;
            // It may have become another program meanwhile.
            match why {
                Some(_) => preflight::check(target.facts.id.pid).map_err(Failure::from)?,
                None => target,
            }
        }
    };
    let began = Began {
        why,
        hangup: Some(hangup),
    };
    Ok(record_as(args, target, started.as_mut(), &stop, &began)?)
}

/// A time, or `unlimited`.
fn parse_time(text: &str) -> Result<Duration, units::UnitError> {
    match text {
        "unlimited" => Ok(Duration::MAX),
        text => units::parse_duration(text),
    }
}

impl Args {
    /// For how long, if that is limited.
    pub(super) fn limited(&self) -> Option<Duration> {
        self.duration.filter(|duration| *duration != Duration::MAX)
    }
}

/// How a recording came about.
#[derive(Debug, Default)]
struct Began {
    /// What was waited for.
    why: Option<String>,
    /// Set when new files should begin.
    hangup: Option<Arc<AtomicBool>>,
}

/// Sees that the files can be made, before anything is touched; an older profile of that name stays as it is until the
/// new recording begins.
fn check_writable(args: &Args) -> Result<(), Failure> {
    let names = ProfileNames::new(&args.output, args.suffix);
    for part in [Part::Traces, Part::Events, Part::Sidecar] {
        let path = names.path(part);
        let existed = path.exists();
        if existed && !path.is_file() {
            let text = format!(
                "cannot write {}: it is no regular file; choose another place with -o",
                path.display()
            );
            return Err(Failure::failed(text));
        }
        place::writable(&path, true)
            .and_then(|place| std::fs::OpenOptions::new().create(true).append(true).open(place))
            .map_err(|error| {
                let text = format!("cannot write {}: {error}; choose another place with -o", path.display());
                Failure::failed(text)
            })?;
        if !existed {
            let _ = std::fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Records `target` as `args` say.
///
/// # Errors
/// With the exit code that `--help` lists.
pub fn record(args: &Args, target: Target, program: Option<&mut Started>, stop: &AtomicBool) -> Result<(), Failure> {
    record_as(args, target, program, stop, &Began::default())
}

fn record_as(
    args: &Args,
    target: Target,
    mut program: Option<&mut Started>,
    stop: &AtomicBool,
    began: &Began,
) -> Result<(), Failure> {
    let pid = target.facts.id.pid;
    if args.verbose {
        note(&found(&target.interpreter));
    }
    let census = args.census.then(|| super::heap::begin(&target)).flatten();
    let session = match Session::attach(target, args.sampling.options()) {
        Ok(session) => session,
        Err(error) => {
            if let Some(program) = program.as_deref_mut()
                && let Some(status) = program.ended()
            {
                let text = format!("{} ended before pyheap could attach to it: {status}", program.name);
                return Err(Failure::failed(text));
            }
            return Err(attach_failure(pid, error));
        }
    };
    let program_name = program.as_ref().map(|program| program.name.clone());
    let files = |session: &Session| {
        let facts = facts(session, args.sampling.domains());
        Files::create(&args.output, args.suffix, session.period(), facts)
            .map(|files| Some(files.rotated(args.long.rotation())))
            .map_err(Failure::failed)
    };
    let (limits, tap) = (args.sampling.limits(), Box::new(|_: &[_]| {}));
    let mut recording = Recording::start_because(began.why.as_deref(), session, limits, files, tap)?;
    let first = ProfileNames::new(&args.output, args.suffix);
    super::heap::begun(&first, census.as_ref());
    let made = Part::ALL.map(|part| identity_of(&first.path(part)));
    note(&format!(
        "recording {pid} into {} (Ctrl-C ends it)",
        first.path(Part::Traces).display()
    ));
    if args.verbose {
        note(&cost(&recording.session));
        if let Some(text) = covered(&recording.session) {
            note(&text);
        }
    }
    let id = recording.session.target.facts.id;
    let mut progress = Progress::new(args, program.as_deref_mut(), began.hangup.as_deref(), id)?;
    let why = recording.run(stop, args.limited(), &mut progress);
    let children = progress.end();
    let reason = match &why {
        Why::Stop(Stop::TargetGone) => end_of_target(program),
        why => why.reason(),
    };
    let is_gone = matches!(why, Why::Stop(Stop::TargetGone | Stop::TargetReplaced));
    let program_left = program_name.filter(|_| !is_gone);
    let live = Arc::clone(&recording.recorder.live);
    let (outcome, hooked) = recording.finish(&reason);
    if let Some(children) = children {
        let _ = children.finish(&why, &mut |text| note(text));
    }
    let (held, cured) = hooked.leave(&why, args.verbose);
    let names = outcome.names.as_ref().unwrap_or(&first);
    if let Some(held) = held {
        // Who has removed the file is told below.
        let _ = note_detach(&names.path(Part::Sidecar), micros(held));
    }
    if let Some(name) = program_left {
        note(&format!("{name} runs on as process {pid}"));
    }
    if census.is_some() && !is_gone {
        super::heap::end(&first, id);
    }
    report(args, &outcome, &reason, names, &first, &lock(&live).total);
    let failed = match why {
        Why::Stop(Stop::TargetGone | Stop::TargetReplaced | Stop::ShutDown)
        | Why::Asked
        | Why::Unwanted
        | Why::Duration => None,
        Why::Stop(other) => Some(other.describe()),
    };
    let failed = outcome.write_error.as_ref().map(|error| chain(error)).or(failed);
    let may_be_removed = args.long.rotation().removes();
    let failed = failed.or_else(|| {
        removed(&first, &made)
            .filter(|_| !may_be_removed)
            .map(|path| format!("{} was removed meanwhile", path.display()))
    });
    cured?;
    match failed {
        Some(why) => Err(Failure::failed(format!(
            "{why}; the recording has ended, what was recorded until then is in {}",
            names.path(Part::Traces).display()
        ))),
        None => Ok(()),
    }
}

/// Device and inode of a file that is there.
fn identity_of(path: &std::path::Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// The first of our files that does not stand under its name any more.
fn removed<const N: usize>(names: &ProfileNames, made: &[Option<(u64, u64)>; N]) -> Option<PathBuf> {
    let mut parts = Part::ALL.into_iter().zip(made).filter(|(_, was)| was.is_some());
    parts.find_map(|(part, was)| {
        let path = names.path(part);
        (identity_of(&path) != *was).then_some(path)
    })
}

/// An attach can fail because the process has ended meanwhile.
fn attach_failure(pid: i32, error: AttachError) -> Failure {
    match crate::attach::preflight::check(pid) {
        Err(refusal) if refusal.exit_code() == 3 => refusal.into(),
        _ => error.into(),
    }
}

/// The line on standard error that tells how it goes, and what else `record` does meanwhile.
struct Progress<'a> {
    args: &'a Args,
    program: Option<&'a mut Started>,
    /// With `--children`.
    children: Option<Fleet>,
    hangup: Option<&'a AtomicBool>,
    is_terminal: bool,
    every: Duration,
    next: Duration,
}

impl<'a> Progress<'a> {
    fn new(
        args: &'a Args,
        program: Option<&'a mut Started>,
        hangup: Option<&'a AtomicBool>,
        id: ProcessId,
    ) -> Result<Self, Failure> {
        let is_terminal = is_progress_overwritten();
        let every = if is_terminal { PROGRESS_TERMINAL } else { PROGRESS_LOG };
        let fleet = || {
            Fleet::new(
                super::record_many::plan(args),
                Crowd::new(Selection::Tree(id.pid), None),
                Some(id),
            )
        };
        Ok(Self {
            args,
            program,
            children: args.children.then(fleet).transpose()?,
            hangup,
            is_terminal,
            every,
            next: every,
        })
    }

    fn clear(&self) {
        if self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    fn end(self) -> Option<Fleet> {
        self.clear();
        self.children
    }
}

impl Front for Progress<'_> {
    fn note(&mut self, text: &str) {
        self.clear();
        note(text);
    }

    fn turn(&mut self, recording: &mut Recording) -> bool {
        let elapsed = recording.recorder.elapsed();
        let is_terminal = self.is_terminal;
        if let Some(children) = &mut self.children {
            children.tick(&mut |text| {
                if is_terminal {
                    let _ = write!(std::io::stderr(), "\r\x1b[K");
                }
                note(text);
            });
        }
        if self.hangup.is_some_and(|hangup| hangup.swap(false, Ordering::AcqRel)) {
            recording.recorder.rotate();
            if let Some(children) = &mut self.children {
                children.rotate();
            }
        }
        if elapsed >= self.next && !self.args.quiet {
            self.next = elapsed + self.every;
            let line = progress(self.args, &recording.recorder);
            if self.is_terminal {
                self.clear();
                let _ = write!(std::io::stderr(), "{line}");
            } else {
                note(&line);
            }
        }
        false
    }

    fn pause(&mut self, time: Duration) {
        nap(time);
        // Reaps a program of ours, so that it does not count as alive.
        let _ = self.program.as_mut().map(|program| program.ended());
    }
}

/// Whether a line of progress takes the place of the one before.
pub(super) fn is_progress_overwritten() -> bool {
    std::io::stderr().is_terminal() && !are_notes_json()
}

fn progress(args: &Args, recorder: &Recorder) -> String {
    let elapsed = recorder.elapsed();
    let live = lock(&recorder.live);
    let left = match args.limited() {
        Some(duration) => format!("{} left", Human(duration.saturating_sub(elapsed))),
        None => "until Ctrl-C".to_owned(),
    };
    let losses = losses(&recorder.counters(), &live);
    let lost = match losses.0.iter().next() {
        None => "nothing lost".to_owned(),
        Some((name, count)) => format!("{name} {count}"),
    };
    format!(
        "{} ({left})  {} samples  live since the attach {} ± {}  {lost}",
        Human(Duration::from_secs(elapsed.as_secs())),
        human::count(live.sampled as f64),
        human::bytes(live.total.bytes),
        human::bytes(live.total.error95()),
    )
}

/// How the target has ended, as far as it can be told: of a program that we have started.
fn end_of_target(program: Option<&mut Started>) -> EndReason {
    let status = program.and_then(|program| program.wait_for_end());
    match status.and_then(|status| status.signal()) {
        Some(signal) => EndReason::TargetKilled { signal },
        None => EndReason::TargetExited {
            code: status.and_then(|status| status.code()),
        },
    }
}

fn report(
    args: &Args,
    outcome: &Outcome,
    reason: &EndReason,
    names: &ProfileNames,
    first: &ProfileNames,
    total: &crate::collect::live::Estimate,
) {
    let end = crate::profile::facts::End::new(0, reason).describe();
    note(&format!(
        "recorded {} ({end}): {} events, live since the attach {} ± {}",
        Human(outcome.elapsed),
        human::count(outcome.events as f64),
        human::bytes(total.bytes),
        human::bytes(total.error95()),
    ));
    if !outcome.losses.is_empty() {
        note(&format!(
            "lost or late while recording: {}",
            describe_losses(&outcome.losses)
        ));
    }
    if names != first {
        note(&format!(
            "the recording is in several files: the beginning {} {}, the end in {}",
            if args.long.rotation().removes() {
                "was in"
            } else {
                "is in"
            },
            first.base().display(),
            names.base().display()
        ));
    }
    if args.temporary || args.quiet {
        return;
    }
    // The recording is safe by now: that no verdict can be made of it is no failure of it.
    let judge = |reader| super::leaks::report(&reader, &[], None, &DomainArgs::default());
    match Reader::open(names.base()).map_err(Into::into).and_then(judge) {
        Ok(verdict) => note(render(&verdict, Detail::Brief, VERDICT_SITES).trim_end()),
        Err(error) => note(&format!("no verdict: {}", chain(error.as_ref()))),
    }
    let base = names.base().display();
    note(&format!("look at it with: pyheap leaks {base}, pyheap top {base}"));
}
