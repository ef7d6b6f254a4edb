//! Recordings without files, of one process or of several: a thread each, whose state `serve` and `push` read.
//!
//! Each attach has a thread of its own, since a recording gives up privileges that the next attach may need.

use super::failure::{Failure, chain, code};
use super::recording::{Front, Recording, Why, facts, stop_time};
use super::which::Which;
use super::{choose, sampling};
use crate::attach::crowd::{Crowd, Selection};
use crate::attach::process::ProcessId;
use crate::attach::{AttachError, FindError, Refusal, Session, candidates, preflight};
use crate::collect::recorder::losses;
use crate::collect::resolve::lock as lock_live;
use crate::collect::{Files, Stop};
use crate::profile::names::SuffixStyle;
use crate::report::human::Human;
use crate::serve::heap::Heap;
use crate::serve::served::{Served, Set, lock};
use crate::threads;
use crate::ui::output::note;
use pyheap_injector::infect::InfectError;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Processes that are attached to at the same time.
const MOST: usize = 64;
/// How often it is looked for new processes.
const EVERY: Duration = Duration::from_millis(250);
/// An attach for which there was no time is tried so often, with such pauses.
const ATTEMPTS: u32 = 5;
const AGAIN: Duration = Duration::from_millis(500);
/// How often a thread without hooks looks whether somebody wants them.
const LOOK: Duration = Duration::from_millis(25);

/// How it is recorded.
#[derive(Debug, Clone)]
pub struct How {
    /// What is sampled.
    pub sampling: sampling::Args,
    /// Detach when nobody has asked for so long.
    pub idle: Option<Duration>,
    /// Also write files.
    pub output: Option<PathBuf>,
    /// Say what attaching and detaching cost.
    pub verbose: bool,
}

/// Called when a recording has ended and all of it has been seen, while it can still be read.
pub type AtEnd = Arc<dyn Fn(&Arc<Served>) + Send + Sync>;

/// What becomes of a recording.
enum Ended {
    /// Somebody has said so.
    Asked,
    /// Nobody has asked for a profile.
    Idle,
    /// The process is no more.
    Gone(String),
    /// It could not go on, or not begin: exit code and reason.
    Failed(u8, String),
}

impl Ended {
    fn bug() -> Self {
        Self::Failed(code::FAILED, "the recording has ended by a bug in pyheap".to_owned())
    }
}

/// The recordings.
pub struct Collectors {
    /// Who is meant; `None` for a single process.
    crowd: Option<Crowd>,
    /// Of a tree: with its end, and that of all its descendants, all is over.
    root: Option<ProcessId>,
    shared: Arc<Shared>,
    running: HashMap<ProcessId, JoinHandle<Ended>>,
    /// Those that cannot be recorded, or have been.
    done: HashSet<ProcessId>,
    is_first_look: bool,
    next_look: Instant,
    too_many: bool,
    /// The end of the one process.
    one: Option<Ended>,
}

/// What all threads need.
struct Shared {
    set: Arc<Set>,
    how: How,
    stop: AtomicBool,
    at_end: AtEnd,
}

impl Collectors {
    /// Starts; of one process it comes back when that is attached to.
    ///
    /// # Errors
    /// When the process cannot be attached to.
    pub fn start(
        process: Option<i32>,
        which: &Which,
        how: How,
        set: Arc<Set>,
        at_end: AtEnd,
        stop: &AtomicBool,
    ) -> Result<Self, Failure> {
        let shared = Arc::new(Shared {
            set,
            how,
            stop: AtomicBool::new(false),
            at_end,
        });
        let selection = which.selection()?;
        let root = match selection {
            Some(Selection::Tree(root)) => {
                let gone = |_| Failure::new(code::NO_PROCESS, format!("no process has pid {root}"));
                Some(ProcessId::of(root).map_err(gone)?)
            }
            _ => None,
        };
        let mut collectors = Self {
            crowd: selection.map(|selection| Crowd::new(selection, which.pattern.clone())),
            root,
            shared,
            running: HashMap::new(),
            done: HashSet::new(),
            is_first_look: true,
            next_look: Instant::now(),
            too_many: false,
            one: None,
        };
        if collectors.crowd.is_some() {
            collectors.look();
        } else {
            let target = choose::target(process)?;
            collectors.run(target.facts.id, target.facts.command_line.clone())?;
            collectors.wait(stop);
        }
        Ok(collectors)
    }

    /// Until each process that was found first has hooks, or cannot have them.
    fn wait(&mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) && self.shared.set.all().iter().any(|served| served.is_wanted()) {
            self.reap();
            std::thread::sleep(LOOK);
        }
    }

    fn run(&mut self, id: ProcessId, command: Vec<String>) -> Result<(), Failure> {
        let served = Arc::new(Served::new(id, command));
        self.shared.set.add(Arc::clone(&served));
        let shared = Arc::clone(&self.shared);
        let thread = threads::start(format!("p{}", id.pid), move || keep(&served, &shared)).map_err(Failure::failed)?;
        self.running.insert(id, thread);
        Ok(())
    }

    /// Looks who is new and who has ended. Cheap; call it often. True when there is nothing left to wait for.
    pub fn look(&mut self) -> bool {
        self.reap();
        let Some(crowd) = &mut self.crowd else {
            return self.running.is_empty();
        };
        if self.next_look <= Instant::now() {
            self.next_look = Instant::now() + EVERY;
            let is_first = std::mem::replace(&mut self.is_first_look, false);
            for meant in crowd.look() {
                // One that has just been forked may be about to become another program.
                if is_first || meant.seen.elapsed() >= EVERY {
                    self.meet(meant.id);
                }
            }
        }
        self.root
            .is_some_and(|root| self.running.is_empty() && !root.is_alive())
    }

    /// Begins to record a process, if it is a Python that is not recorded yet.
    fn meet(&mut self, id: ProcessId) {
        let pid = id.pid;
        if self.running.contains_key(&id) || self.done.contains(&id) || !candidates::looks_like_python(pid) {
            return;
        }
        if self.running.len() >= MOST {
            if !std::mem::replace(&mut self.too_many, true) {
                note(&format!("more than {MOST} processes: the others are not attached to"));
            }
            return;
        }
        match preflight::look(pid) {
            Ok(target) => {
                if let Err(error) = self.run(id, target.facts.command_line.clone()) {
                    note(&format!("process {pid}: {}", chain(&error)));
                }
            }
            // It is just starting, or becoming another program: look again.
            Err(refusal) if is_young(&refusal) => {}
            Err(refusal) => {
                note(&format!("process {pid} is left alone: {}", chain(&refusal)));
                self.done.insert(id);
            }
        }
    }

    fn reap(&mut self) {
        let over: Vec<_> = self
            .running
            .iter()
            .filter(|(_, thread)| thread.is_finished())
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            let Some(thread) = self.running.remove(&id) else {
                continue;
            };
            let ended = thread.join().unwrap_or_else(|_| Ended::bug());
            self.shared.set.remove(id);
            if self.crowd.is_none() {
                self.one = Some(ended);
                continue;
            }
            match ended {
                // An exec has made it another program, which may be Python, too.
                Ended::Gone(why) => note(&format!("process {}: {why}", id.pid)),
                Ended::Failed(_, why) => {
                    note(&format!("process {}: {why}", id.pid));
                    self.done.insert(id);
                }
                Ended::Asked | Ended::Idle => {}
            }
        }
        if self.done.len() > 4 * MOST {
            self.done.retain(|id| id.is_alive());
        }
    }

    /// Takes the hooks out everywhere.
    ///
    /// # Errors
    /// When the one process could not be attached to, or hooks are left in it.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.shared.stop.store(true, Ordering::Release);
        while !self.running.is_empty() {
            self.reap();
            std::thread::sleep(LOOK);
        }
        match self.one.take() {
            Some(Ended::Failed(code, why)) => Err(Failure::new(code, why)),
            Some(Ended::Gone(why)) => {
                note(&why);
                Ok(())
            }
            Some(Ended::Asked | Ended::Idle) | None => Ok(()),
        }
    }
}

/// True if a process refused with this may be a Python a moment later.
fn is_young(refusal: &Refusal) -> bool {
    matches!(
        refusal,
        Refusal::Python(FindError::NotInitialised { .. } | FindError::Memory { .. } | FindError::Maps { .. })
            | Refusal::Stopped { .. }
    )
}

/// True if only time was missing.
fn is_slow(error: &AttachError) -> bool {
    matches!(
        error,
        AttachError::Infect {
            source: InfectError::Slow { .. },
            ..
        }
    )
}

/// Records a process whenever somebody wants it, until it or everything ends.
fn keep(served: &Arc<Served>, shared: &Arc<Shared>) -> Ended {
    let pid = served.id.pid;
    loop {
        let (one, all) = (Arc::clone(served), Arc::clone(shared));
        let attach = threads::start(format!("r{pid}"), move || record(&one, &all));
        let ended = match attach.map(JoinHandle::join) {
            Ok(Ok(ended)) => ended,
            Ok(Err(_)) => Ended::bug(),
            Err(error) => Ended::Failed(code::FAILED, error.to_string()),
        };
        match &ended {
            Ended::Idle => {}
            Ended::Failed(_, why) | Ended::Gone(why) => {
                served.detach(why, false);
                return ended;
            }
            Ended::Asked => return ended,
        }
        while !served.is_wanted() {
            if shared.stop.load(Ordering::Acquire) {
                return Ended::Asked;
            }
            if !served.id.is_alive() {
                return Ended::Gone("the target has ended".to_owned());
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// From one attach to its detach.
fn record(served: &Arc<Served>, shared: &Shared) -> Ended {
    match try_record(served, shared) {
        Ok(ended) => ended,
        // It can have ended meanwhile.
        Err(_) if !served.id.is_alive() => Ended::Gone("the target has ended".to_owned()),
        Err(error) => Ended::Failed(error.code, chain(&error)),
    }
}

fn try_record(served: &Arc<Served>, shared: &Shared) -> Result<Ended, Failure> {
    let pid = served.id.pid;
    let how = &shared.how;
    let mut attempts = 0;
    let session = loop {
        let target = preflight::check(pid)?;
        if target.facts.id != served.id {
            return Ok(Ended::Gone("the target has ended".to_owned()));
        }
        attempts += 1;
        match Session::attach(target, how.sampling.options()) {
            Ok(session) => break session,
            // A machine under load: nothing was installed, and the next attempt cleans up after this one.
            Err(error) if is_slow(&error) && attempts < ATTEMPTS && !shared.stop.load(Ordering::Acquire) => {
                std::thread::sleep(AGAIN);
            }
            Err(error) => return Err(error.into()),
        }
    };
    let facts = facts(&session, how.sampling.domains());
    let heap = Arc::new(Mutex::new(Heap::new(session.period())));
    let tap = {
        let heap = Arc::clone(&heap);
        Box::new(move |events: &[_]| lock(&heap).events(events))
    };
    let files = |session: &Session| {
        let Some(base) = &how.output else { return Ok(None) };
        Files::create(base, SuffixStyle::default(), session.period(), facts.clone())
            .map(Some)
            .map_err(Failure::failed)
    };
    let mut recording = Recording::start(session, how.sampling.limits(), files, tap)?;
    served.attach(heap, facts.clone());
    if how.verbose {
        note(&format!(
            "process {pid}: attached, a thread was held for {:?}",
            stop_time(&recording.session)
        ));
    }
    let mut keeper = Keeper {
        served,
        idle: how.idle,
        is_idle: false,
    };
    let why = match recording.run(&shared.stop, None, &mut keeper) {
        Why::Asked if keeper.is_idle => Why::Unwanted,
        why => why,
    };
    let reason = why.reason();
    let (outcome, hooked) = recording.finish(&reason);
    (shared.at_end)(served);
    let words = match (&why, how.idle) {
        (Why::Stop(stop), _) => stop.describe(),
        (Why::Unwanted, Some(idle)) => format!("nobody has asked for {}: detached until somebody does", Human(idle)),
        _ => "detached".to_owned(),
    };
    served.detach(&words, why == Why::Unwanted);
    let (held, done) = hooked.leave(&why, how.verbose);
    if let Some(held) = held.filter(|_| how.verbose) {
        note(&format!("process {pid}: detached, a thread was held for {held:?}"));
    }
    done?;
    if let Some(error) = outcome.write_error {
        return Err(Failure::failed(error));
    }
    Ok(match why {
        Why::Stop(Stop::TargetGone | Stop::TargetReplaced | Stop::ShutDown) => Ended::Gone(words),
        Why::Stop(other) => Ended::Failed(code::FAILED, other.describe()),
        Why::Unwanted => {
            note(&format!("process {pid}: {words}"));
            Ended::Idle
        }
        Why::Asked | Why::Duration => Ended::Asked,
    })
}

/// What is done while a recording runs.
struct Keeper<'a> {
    served: &'a Served,
    idle: Option<Duration>,
    is_idle: bool,
}

impl Front for Keeper<'_> {
    fn note(&mut self, text: &str) {
        note(&format!("process {}: {text}", self.served.id.pid));
    }

    fn turn(&mut self, _recording: &mut Recording) -> bool {
        self.is_idle = self.idle.is_some_and(|idle| self.served.idle() >= idle);
        self.is_idle
    }

    fn second(&mut self, recording: &mut Recording) {
        let recorder = &recording.recorder;
        let losses = losses(&recorder.counters(), &lock_live(&recorder.live));
        self.served.note(losses, recorder.memory());
    }
}
