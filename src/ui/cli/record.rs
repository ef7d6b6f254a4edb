//! `pyheap record`: a recording into files.

use super::children::Children;
use super::choose::{self, Started};
use super::failure::{Failure, chain, code};
use crate::attach::cgroup::MemoryCgroup;
use crate::attach::family::{self, Family};
use crate::attach::interpreter::Interpreter;
use crate::attach::{AttachError, Session, Target};
use crate::collect::{Files, Outcome, Recorder, Stop};
use crate::profile::facts::{EndReason, Facts};
use crate::profile::names::{Part, ProfileNames, SuffixStyle};
use crate::profile::reader::Reader;
use crate::profile::sidecar::note_detach;
use crate::report::human::{self, Human};
use crate::report::info::describe_losses;
use crate::report::leaks::render::{Detail, render};
use crate::ui::output::note;
use crate::ui::units;
use pyheap_injector::Cure;
use pyheap_injector::hijack::Hijacked;
use pyheap_protocol::domain;
use std::error::Error;
use std::io::{IsTerminal, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often we look whether it is time to stop.
const LOOK: Duration = Duration::from_millis(25);
/// How often we look for new children.
const CHILDREN: Duration = Duration::from_millis(100);
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
    #[arg(long, value_name = "PID", conflicts_with = "command")]
    pub pid: Option<i32>,

    /// Stop after this time: 90s, 10m, 1h30m. Without it: until Ctrl-C or the end of the process.
    #[arg(long, short, value_name = "TIME", value_parser = units::parse_duration)]
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
    #[arg(long)]
    pub children: bool,

    /// Stop when this is no longer the parent: a recording of a child does not outlive that of its parent.
    #[arg(long, hide = true, value_name = "PID")]
    pub parent: Option<u32>,

    /// Say more: what was found and what the attach cost.
    #[arg(long, short)]
    pub verbose: bool,

    /// Say only that it records and what goes wrong: no progress, no verdict.
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
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Sets a flag at SIGINT, SIGTERM and SIGHUP. SIGXFSZ is taken as well: a file size limit is an error of the write, not
/// a reason to die with hooks in the target.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn stop_signals() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(Failure::failed)?;
    }
    let ignored = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(libc::SIGXFSZ, ignored).map_err(Failure::failed)?;
    Ok(stop)
}

/// Runs the command.
///
/// # Errors
/// With the exit code that `--help` lists.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let stop = stop_signals()?;
    check_writable(args)?;
    let mut started = if args.command.is_empty() {
        None
    } else {
        Some(Started::new(&args.command)?)
    };
    let target = match &mut started {
        Some(program) => program.wait_for_python(&stop)?,
        None => match choose::target(args.process.or(args.pid)) {
            Err(failure) if args.parent.is_some() && failure.code == code::NO_PROCESS => {
                let pid = args.process.or(args.pid).unwrap_or_default();
                note(&format!("child {pid} had ended before it could be recorded"));
                return Ok(());
            }
            found => found?,
        },
    };
    Ok(record(args, target, started.as_mut(), &stop)?)
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
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
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
pub fn record(
    args: &Args,
    target: Target,
    mut program: Option<&mut Started>,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    let pid = target.facts.id.pid;
    if args.verbose {
        let interpreter = &target.interpreter;
        note(&format!(
            "Python {} in {} (offsets: {:?})",
            interpreter.version,
            interpreter.path.display(),
            interpreter.offset_source
        ));
    }
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
    let begun = Instant::now();
    let facts = facts(&session, args.sampling.domains());
    let files = Files::create(&args.output, args.suffix, session.period(), facts);
    let files = match files {
        Ok(files) => files,
        Err(error) => {
            let _ = session.detach();
            return Err(Failure::failed(error));
        }
    };
    let names = files.names().clone();
    let made = Part::ALL.map(|part| identity_of(&names.path(part)));
    let mut recorder = match Recorder::start(&session, Some(files), args.sampling.limits(), begun) {
        Ok(recorder) => recorder,
        Err(error) => {
            let _ = session.detach();
            return Err(Failure::failed(error));
        }
    };
    note(&format!(
        "recording {pid} into {} (Ctrl-C ends it)",
        names.path(Part::Traces).display()
    ));
    if args.verbose {
        note(&cost(&session));
    }
    let mut relatives = Relatives {
        family: Family::of(pid),
        children: args.children.then(Children::default),
    };
    let why = wait(
        args,
        &session,
        &mut recorder,
        program.as_deref_mut(),
        stop,
        &mut relatives,
    );
    let (reason, stopped) = match why {
        Why::Asked => (EndReason::Stopped, None),
        Why::Duration => (EndReason::DurationReached, None),
        Why::Stop(stop) => (end_reason(&stop, program), Some(stop)),
    };
    let program_left = program_name.filter(|_| !matches!(stopped, Some(Stop::TargetGone | Stop::TargetReplaced)));
    let live = Arc::clone(&recorder.live);
    let first = names;
    let outcome = recorder.finish(&session, &reason);
    let interpreter = session.target.interpreter.clone();
    let Relatives { mut family, children } = relatives;
    if let Some(children) = children {
        children.finish();
    }
    let cured = match stopped {
        Some(Stop::TargetGone | Stop::TargetReplaced) => {
            session.forget();
            Ok(())
        }
        _ => {
            let (held, cured) = detach(session, args.verbose);
            if let Some(held) = held {
                // Who has removed the file is told below.
                let names = outcome.names.as_ref().unwrap_or(&first);
                let _ = note_detach(&names.path(Part::Sidecar), micros(held));
            }
            cured
        }
    };
    cure_family(&mut family, &interpreter);
    let names = outcome.names.as_ref().unwrap_or(&first);
    if let Some(name) = program_left {
        note(&format!("{name} runs on as process {pid}"));
    }
    report(
        args,
        &outcome,
        &reason,
        names,
        &first,
        &crate::collect::resolve::lock(&live).total,
    );
    let failed = match stopped {
        None | Some(Stop::TargetGone | Stop::TargetReplaced | Stop::ShutDown) => None,
        Some(other) => Some(other.describe()),
    };
    let failed = outcome.write_error.as_ref().map(|error| chain(error)).or(failed);
    let failed =
        failed.or_else(|| removed(&first, &made).map(|path| format!("{} was removed meanwhile", path.display())));
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

/// The target's descendants.
struct Relatives {
    family: Family,
    /// With `--children`.
    children: Option<Children>,
}

/// Takes the inherited shims out of the descendants, and says where that was not possible.
pub fn cure_family(family: &mut Family, interpreter: &Interpreter) {
    let pids = family.look();
    for outcome in family::cure_all(&pids, Some(interpreter)) {
        let pid = outcome.pid;
        if let Some(why) = outcome.left {
            note(&format!(
                "process {pid} has inherited the hooks, which are switched off there, and keeps them for now ({why}): \
                 `pyheap cure {pid}` removes them later"
            ));
        }
    }
}

/// Why the wait ended.
enum Why {
    Asked,
    Duration,
    Stop(Stop),
}

fn wait(
    args: &Args,
    session: &Session,
    recorder: &mut Recorder,
    mut program: Option<&mut Started>,
    stop: &AtomicBool,
    relatives: &mut Relatives,
) -> Why {
    let terminal = std::io::stderr().is_terminal();
    let every = if terminal { PROGRESS_TERMINAL } else { PROGRESS_LOG };
    let (mut next_second, mut next_progress, mut next_children) = (Duration::ZERO, every, Duration::ZERO);
    let end = |why| {
        if terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        why
    };
    loop {
        let is_orphan = args
            .parent
            .is_some_and(|pid| std::os::unix::process::parent_id() != pid);
        if stop.load(Ordering::Acquire) || is_orphan {
            return end(Why::Asked);
        }
        // Reaps a program of ours, so that it does not count as alive.
        let _ = program.as_mut().map(|program| program.ended());
        if let Some(stop) = recorder.must_stop(session) {
            return end(Why::Stop(stop));
        }
        recorder.watch_room(session);
        for text in recorder.take_notes() {
            if terminal {
                let _ = write!(std::io::stderr(), "\r\x1b[K");
            }
            note(&text);
        }
        let elapsed = recorder.elapsed();
        if args.duration.is_some_and(|duration| elapsed >= duration) {
            return end(Why::Duration);
        }
        if elapsed >= next_second {
            next_second += Duration::from_secs(1);
            if let Some(stop) = recorder.every_second(session) {
                return end(Why::Stop(recorder.must_stop(session).unwrap_or(stop)));
            }
            if relatives.children.is_none() {
                relatives.family.look();
            }
        }
        if let Some(children) = &mut relatives.children
            && elapsed >= next_children
        {
            next_children = elapsed + CHILDREN;
            let left = args.duration.map(|duration| duration.saturating_sub(elapsed));
            children.look(args, &relatives.family.look(), left);
        }
        if elapsed >= next_progress && !args.quiet {
            next_progress = elapsed + every;
            let line = progress(args, recorder);
            if terminal {
                let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
            } else {
                note(&line);
            }
        }
        let left = args
            .duration
            .map_or(LOOK, |duration| duration.saturating_sub(recorder.elapsed()));
        std::thread::sleep(LOOK.min(left));
    }
}

fn progress(args: &Args, recorder: &Recorder) -> String {
    let elapsed = recorder.elapsed();
    let live = crate::collect::resolve::lock(&recorder.live);
    let left = match args.duration {
        Some(duration) => format!("{} left", Human(duration.saturating_sub(elapsed))),
        None => "until Ctrl-C".to_owned(),
    };
    let losses = crate::collect::recorder::losses(&recorder.counters(), &live);
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

fn end_reason(stop: &Stop, program: Option<&mut Started>) -> EndReason {
    match stop {
        Stop::TargetGone => {
            let status = program.and_then(|program| program.wait_for_end());
            match status.and_then(|status| status.signal()) {
                Some(signal) => EndReason::TargetKilled { signal },
                None => EndReason::TargetExited {
                    code: status.and_then(|status| status.code()),
                },
            }
        }
        Stop::TargetReplaced => EndReason::TargetReplaced,
        Stop::ShutDown => EndReason::TargetExited { code: None },
        other => EndReason::Failed {
            error: other.describe(),
        },
    }
}

/// Takes the hooks out and says what could not be. For how long that has held a thread, if anything was done.
pub fn detach(session: Session, verbose: bool) -> (Option<Duration>, Result<(), Failure>) {
    let pid = session.target.facts.id.pid;
    let alive = session.target.facts.id;
    let cured = session.detach();
    let mut stop = None;
    if let Ok(Cure::Clean(hijacks) | Cure::Inert { hijacks, .. }) = &cured
        && !hijacks.is_empty()
    {
        stop = Some(held(hijacks));
        if verbose {
            note(&format!("detached: {}", steps(hijacks)));
        }
    }
    let done = match cured {
        Ok(Cure::Clean(_)) => Ok(()),
        Ok(Cure::Inert { why, .. }) => {
            note(&format!(
                "the hooks are out, but {why}: our code stays in process {pid}, inert; `pyheap cure {pid}` removes it later"
            ));
            Ok(())
        }
        Err(_) if !alive.is_alive() => Ok(()),
        Err(error) => Err(Failure::new(code::FAILED, error)),
    };
    (stop, done)
}

/// What attaching cost the target.
fn cost(session: &Session) -> String {
    let steps = steps(session.hijacks());
    format!("attached: {steps}; domains wrapped as {:?}", session.modes)
}

/// For how long the steps have held a thread, all together.
fn held(hijacks: &[Hijacked]) -> Duration {
    hijacks.iter().map(|hijack| hijack.held).sum()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn steps(hijacks: &[Hijacked]) -> String {
    let step = |h: &Hijacked| format!("thread {} held {:?} (disturbed {:?})", h.tid, h.held, h.disturbed);
    hijacks.iter().map(step).collect::<Vec<_>>().join(", ")
}

fn facts(session: &Session, domains: u8) -> Facts {
    let process = &session.target.facts;
    let interpreter = &session.target.interpreter;
    let held = held(session.hijacks());
    let domains = domain::NAMES
        .iter()
        .enumerate()
        .filter(|(number, _)| domains >> number & 1 != 0)
        .map(|(_, name)| (*name).to_owned())
        .collect();
    let mut more = std::collections::BTreeMap::new();
    more.insert("wrappers".to_owned(), format!("{:?}", session.modes).into());
    more.insert("interpreter".to_owned(), interpreter.path.display().to_string().into());
    Facts {
        pid: u32::try_from(process.id.pid).ok(),
        exe: process.exe.as_ref().map(|exe| exe.display().to_string()),
        cmdline: process.command_line.clone(),
        python: Some(interpreter.version.to_string()),
        libc: None,
        host: nix::sys::utsname::uname()
            .ok()
            .and_then(|name| name.nodename().to_str().map(str::to_owned)),
        domains,
        memory_limit_bytes: MemoryCgroup::of(process.id.pid).map(|group| group.limit_bytes),
        attach_stop_micros: Some(micros(held)),
        pyheap_version: Some(crate::VERSION.to_owned()),
        more,
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
            "the period was raised meanwhile: the beginning is in {}, the end in {}",
            first.base().display(),
            names.base().display()
        ));
    }
    if args.temporary || args.quiet {
        return;
    }
    // The recording is safe by now: that no verdict can be made of it is no failure of it.
    match Reader::open(names.base()).and_then(|reader| super::leaks::report(&reader, &[], None)) {
        Ok(verdict) => note(render(&verdict, Detail::Brief, VERDICT_SITES).trim_end()),
        Err(error) => note(&format!("no verdict: {}", chain(&error))),
    }
    let base = names.base().display();
    note(&format!("look at it with: pyheap leaks {base}, pyheap top {base}"));
}
