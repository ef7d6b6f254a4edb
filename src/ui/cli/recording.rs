//! A recording under way: the one loop of `record` and `attach`, which differ in what they show meanwhile.

use super::failure::{Failure, code};
use crate::attach::Session;
use crate::attach::cgroup::MemoryCgroup;
use crate::attach::family::{self, Family};
use crate::attach::interpreter::Interpreter;
use crate::attach::process::Facts as ProcessFacts;
use crate::collect::recorder::Tap;
use crate::collect::{Files, Limits, Outcome, Recorder, Stop};
use crate::profile::facts::{EndReason, Facts};
use crate::ui::audit::{self, Deed};
use crate::ui::output::note;
use pyheap_injector::Cure;
use pyheap_injector::hijack::Hijacked;
use pyheap_protocol::domain;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A command line in an audit line.
const AUDITED_CHARS: usize = 300;
/// How often we look whether it is time to stop.
const LOOK: Duration = Duration::from_millis(100);
/// Of the time, this part at most is spent on looking for its children: one in so many.
const FAMILY_SHARE: u32 = 1000;

/// Sets a flag at SIGINT, SIGTERM and SIGHUP. SIGXFSZ is taken as well: a file size limit is an error of the write, not
/// a reason to die with hooks in the target.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn stop_signals() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    signals(&stop, &stop)?;
    Ok(stop)
}

/// The same, but SIGHUP sets a flag of its own, the second one.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn stop_and_hangup_signals() -> Result<(Arc<AtomicBool>, Arc<AtomicBool>), Failure> {
    let (stop, hangup) = (Arc::default(), Arc::default());
    signals(&stop, &hangup)?;
    Ok((stop, hangup))
}

fn signals(stop: &Arc<AtomicBool>, hangup: &Arc<AtomicBool>) -> Result<(), Failure> {
    let ignored = Arc::new(AtomicBool::new(false));
    let all = [
        (libc::SIGINT, stop),
        (libc::SIGTERM, stop),
        (libc::SIGHUP, hangup),
        (libc::SIGXFSZ, &ignored),
    ];
    for (signal, flag) in all {
        signal_hook::flag::register(signal, Arc::clone(flag)).map_err(Failure::failed)?;
    }
    Ok(())
}

/// A process with hooks in it, and the threads that take what comes from them.
#[derive(Debug)]
pub struct Recording {
    /// The attached process.
    pub session: Session,
    /// What comes from it.
    pub recorder: Recorder,
    /// Its descendants.
    pub family: Family,
}

/// What is shown while a recording runs.
pub trait Front {
    /// Something that the user should know.
    fn note(&mut self, text: &str);

    /// Called some forty times a second; true to end the recording.
    fn turn(&mut self, recording: &mut Recording) -> bool;

    /// Called after what is due every second.
    fn second(&mut self, _recording: &mut Recording) {}

    /// Waits until the next turn: `time` at most.
    fn pause(&mut self, time: Duration) {
        nap(time);
    }
}

/// Sleeps for so long, or until a signal comes.
pub fn nap(time: Duration) {
    let _ = nix::poll::ppoll(&mut [], Some(nix::sys::time::TimeSpec::from(time)), None);
}

/// Why a recording ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// Somebody said so.
    Asked,
    /// The time is over.
    Duration,
    /// Nobody looks at it.
    Unwanted,
    /// It had to.
    Stop(Stop),
}

impl Why {
    /// What the files say of it.
    #[must_use]
    pub fn reason(&self) -> EndReason {
        match self {
            Self::Asked | Self::Unwanted => EndReason::Stopped,
            Self::Duration => EndReason::DurationReached,
            Self::Stop(Stop::TargetReplaced) => EndReason::TargetReplaced,
            Self::Stop(Stop::TargetGone | Stop::ShutDown) => EndReason::TargetExited { code: None },
            Self::Stop(other) => EndReason::Failed {
                error: other.describe(),
            },
        }
    }
}

impl Recording {
    /// Begins to record an attached process, into what `files` makes. `tap` sees all events. When something fails, the
    /// process is left as it was.
    ///
    /// # Errors
    /// When the files cannot be made or a thread cannot be started.
    pub fn start(
        session: Session,
        limits: Limits,
        files: impl FnOnce(&Session) -> Result<Option<Files>, Failure>,
        tap: Tap,
    ) -> Result<Self, Failure> {
        Self::start_because(None, session, limits, files, tap)
    }

    /// The same, when there is something to say on why.
    ///
    /// # Errors
    /// As [`Recording::start`].
    pub fn start_because(
        why: Option<&str>,
        session: Session,
        limits: Limits,
        files: impl FnOnce(&Session) -> Result<Option<Files>, Failure>,
        tap: Tap,
    ) -> Result<Self, Failure> {
        let begun = Instant::now();
        let started = files(&session)
            .and_then(|files| Recorder::start_with(&session, files, limits, begun, tap).map_err(Failure::failed));
        match started {
            Ok(recorder) => {
                audit("attach", &session.target.facts, why);
                Ok(Self {
                    family: Family::of(session.target.facts.id.pid),
                    session,
                    recorder,
                })
            }
            Err(error) => {
                let _ = session.detach();
                Err(error)
            }
        }
    }

    /// Keeps the recording going until `stop` is set, `duration` is over, `front` has enough, or it has to end.
    pub fn run(&mut self, stop: &AtomicBool, duration: Option<Duration>, front: &mut dyn Front) -> Why {
        let (mut next_second, mut next_glance) = (Duration::ZERO, Duration::ZERO);
        loop {
            if stop.load(Ordering::Acquire) {
                return Why::Asked;
            }
            if let Some(stop) = self.recorder.must_stop(&self.session) {
                return Why::Stop(stop);
            }
            self.recorder.watch_room(&self.session);
            for text in self.recorder.take_notes() {
                front.note(&text);
            }
            let elapsed = self.recorder.elapsed();
            if duration.is_some_and(|duration| elapsed >= duration) {
                return Why::Duration;
            }
            if elapsed >= next_second {
                next_second += Duration::from_secs(1);
                if let Some(stop) = self.recorder.every_second(&self.session) {
                    return Why::Stop(self.recorder.must_stop(&self.session).unwrap_or(stop));
                }
                if elapsed >= next_glance {
                    self.family.glance();
                    next_glance = elapsed + (self.recorder.elapsed() - elapsed).saturating_mul(FAMILY_SHARE);
                }
                front.second(self);
            }
            if front.turn(self) {
                return Why::Asked;
            }
            let left = duration.map_or(LOOK, |duration| duration.saturating_sub(self.recorder.elapsed()));
            front.pause(LOOK.min(left));
        }
    }

    /// Takes the last records and closes the files. The hooks are still in the process.
    #[must_use]
    pub fn finish(self, reason: &EndReason) -> (Outcome, Hooked) {
        let outcome = self.recorder.finish(&self.session, reason);
        let hooked = Hooked {
            session: self.session,
            family: self.family,
        };
        (outcome, hooked)
    }
}

/// A process that has hooks in it still.
#[derive(Debug)]
pub struct Hooked {
    session: Session,
    family: Family,
}

impl Hooked {
    /// Takes the hooks out of the process, unless it is gone, and the copies out of its children; says what could not be
    /// removed. For how long that has held a thread, if anything was done; an error when hooks are left in the process.
    pub fn leave(mut self, why: &Why, verbose: bool) -> (Option<Duration>, Result<(), Failure>) {
        let interpreter = self.session.target.interpreter.clone();
        let done = leave(self.session, why, verbose);
        cure_family(&self.family.look(), Some(&interpreter));
        done
    }

    /// The same, but for the children: somebody else sees to those.
    pub fn leave_alone(self, why: &Why, verbose: bool) -> (Option<Duration>, Result<(), Failure>) {
        leave(self.session, why, verbose)
    }
}

fn leave(session: Session, why: &Why, verbose: bool) -> (Option<Duration>, Result<(), Failure>) {
    let facts = session.target.facts.clone();
    let done = if matches!(why, Why::Stop(Stop::TargetGone | Stop::TargetReplaced)) {
        session.forget();
        (None, Ok(()))
    } else {
        detach(session, verbose)
    };
    let end = match (why, &done.1) {
        (_, Err(error)) => format!("failed: {error}"),
        (Why::Stop(stop), Ok(())) => stop.describe(),
        (Why::Duration, Ok(())) => "the requested duration was over".to_owned(),
        (Why::Asked, Ok(())) => "stopped by the user".to_owned(),
        (Why::Unwanted, Ok(())) => "nobody has asked for its profile for a while".to_owned(),
    };
    audit("detach", &facts, Some(&end));
    done
}

fn audit(what: &'static str, facts: &ProcessFacts, why: Option<&str>) {
    audit::leave(&Deed {
        what,
        pid: facts.id.pid,
        command: &facts.short_command(AUDITED_CHARS),
        why,
    });
}

/// Takes the hooks out and says what could not be. For how long that has held a thread, if anything was done.
fn detach(session: Session, verbose: bool) -> (Option<Duration>, Result<(), Failure>) {
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

/// Takes the inherited shims out of processes, and says where that was not possible. `interpreter` is theirs, if it is known.
pub fn cure_family(pids: &[i32], interpreter: Option<&Interpreter>) {
    for outcome in family::cure_all(pids, interpreter) {
        let pid = outcome.pid;
        if let Some(why) = outcome.left {
            note(&format!(
                "process {pid} has inherited the hooks, which are switched off there, and keeps them for now ({why}): \
                 `pyheap cure {pid}` removes them later"
            ));
        }
    }
}

/// What was found, for `--verbose`.
#[must_use]
pub fn found(interpreter: &Interpreter) -> String {
    format!(
        "Python {} in {} (offsets: {:?})",
        interpreter.version,
        interpreter.path.display(),
        interpreter.offset_source
    )
}

/// What attaching cost the target, for `--verbose`.
#[must_use]
pub fn cost(session: &Session) -> String {
    let steps = steps(session.hijacks());
    format!("attached: {steps}; domains wrapped as {:?}", session.modes)
}

/// What of the native code is covered, for `--verbose`; `None` without `--native`.
#[must_use]
pub fn covered(session: &Session) -> Option<String> {
    let covered = session.coverage()?;
    let allocator = covered.allocator.as_deref().unwrap_or("no library");
    let mut text = format!(
        "native: {} slots of {} objects have wrappers, malloc is that of {allocator}",
        covered.slots, covered.objects
    );
    if !covered.functions_left_out.is_empty() {
        text += &format!("; not called, or not known: {}", covered.functions_left_out.join(", "));
    }
    if !covered.through_ffi.is_empty() {
        text += &format!("; also through libffi, of {}", covered.through_ffi.join(", "));
    }
    Some(text)
}

/// How long a thread of the target stood still for the attach.
#[must_use]
pub fn stop_time(session: &Session) -> Duration {
    held(session.hijacks())
}

/// For how long the steps have held a thread, all together.
fn held(hijacks: &[Hijacked]) -> Duration {
    hijacks.iter().map(|hijack| hijack.held).sum()
}

/// Whole microseconds.
#[must_use]
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn steps(hijacks: &[Hijacked]) -> String {
    let step = |h: &Hijacked| format!("thread {} held {:?} (disturbed {:?})", h.tid, h.held, h.disturbed);
    hijacks.iter().map(step).collect::<Vec<_>>().join(", ")
}

/// What the files say of the process.
#[must_use]
pub fn facts(session: &Session, domains: u8) -> Facts {
    let process = &session.target.facts;
    let interpreter = &session.target.interpreter;
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
        attach_stop_micros: Some(micros(stop_time(session))),
        pyheap_version: Some(crate::VERSION.to_owned()),
        more,
    }
}
