//! Many processes recorded by one pyheap: a tree, all that match, a cgroup, or the children of one; those that come later, too.
//!
//! Each has its own files, its own hooks and its own threads here; what they share is the loop that looks after them and the time
//! that pyheap may take, so with many of them each is looked at less often and sampled more coarsely. To attach and to leave
//! takes a while (a second, where an inherited copy of the hooks has to go first), so threads of their own do that.

use super::failure::{Failure, chain};
use super::recording::{Recording, Why, cure_family, facts};
use super::sampling;
use crate::attach::condition::{Condition, Watch};
use crate::attach::crowd::{Crowd, Meant};
use crate::attach::process::{MemoryUse, ProcessId};
use crate::attach::{AttachError, FindError, Refusal, Session, candidates, preflight, privileges};
use crate::collect::live::Estimate;
use crate::collect::resolve::lock;
use crate::collect::{Files, Stop};
use crate::profile::facts::Losses;
use crate::profile::names::SuffixStyle;
use crate::threads;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Processes that are recorded at the same time.
pub const MOST: usize = 256;
/// Who comes and goes is looked at this often.
const LOOK: Duration = Duration::from_millis(100);
/// A process that we have known for so long is what it is going to be: one that was forked to become another program has done so.
const SETTLED: Duration = Duration::from_millis(80);
/// Whether a recording has to end.
const CHECK: Duration = Duration::from_millis(250);
/// With more of them, half as often.
const MANY: usize = 16;
/// A process that is just starting up is tried again after so long.
const AGAIN: Duration = Duration::from_millis(200);
/// What is no Python may become one.
const RECONSIDER: Duration = Duration::from_secs(1);
/// Threads that attach: they mostly wait.
const ATTACHERS: usize = 8;
/// Recordings that are ended at the same time.
const LEAVERS: usize = 16;

/// How members are recorded.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Files are called BASE.PID.
    pub base: PathBuf,
    /// Their spelling.
    pub suffix: SuffixStyle,
    /// What is sampled.
    pub sampling: sampling::Args,
    /// When a member is attached to.
    pub condition: Condition,
    /// What is said on standard error.
    pub verbose: bool,
    /// Less of it.
    pub quiet: bool,
    /// How files are rotated.
    pub rotation: crate::collect::Rotation,
}

/// Where a member is.
enum State {
    /// To be looked at, at this time.
    Waiting { next: Instant, watch: Watch },
    /// A thread is attaching to it.
    Attaching,
    /// It is recorded.
    Recording(Box<Member>),
    /// A thread is leaving it.
    Leaving,
    /// It is not recorded. Should its program change, it is looked at again.
    Left { program: Option<PathBuf>, next: Instant },
}

struct Member {
    recording: Recording,
    next_check: Instant,
    next_second: Instant,
}

struct Entry {
    id: ProcessId,
    state: State,
}

/// What a thread is to attach to.
struct Job {
    id: ProcessId,
    base: PathBuf,
    company: u32,
    why: Option<String>,
}

/// Why a member is not recorded.
enum Problem {
    /// It is gone, or no Python: nobody wants to know.
    Nothing,
    /// It may be one a moment later.
    Young,
    /// This should be told: exit code and words.
    Refused(u8, String),
}

impl Problem {
    fn refused(failure: &Failure) -> Self {
        Self::Refused(failure.code, chain(failure))
    }
}

/// What threads say.
enum News {
    Attached(i32, Result<Box<Recording>, Problem>),
    Left(Left),
}

/// What became of a recording.
struct Left {
    pid: i32,
    events: u64,
    losses: Losses,
    total: Estimate,
    ended: bool,
    failure: Option<String>,
    base: Option<PathBuf>,
}

/// What all of it has come to.
#[derive(Debug, Default)]
pub struct Sum {
    /// Processes that were recorded.
    pub recorded: usize,
    /// Those of them that have ended meanwhile.
    pub ended: usize,
    /// Those that could not be recorded.
    pub refused: usize,
    /// Events that were written.
    pub events: u64,
    /// What was lost.
    pub losses: Losses,
    /// Alive at the end, of those that were recorded until then: bytes, and their variance.
    pub live: (f64, f64),
    /// Recordings that failed, and why.
    pub failures: Vec<String>,
    /// The first refusal.
    pub refusal: Option<(u8, String)>,
    /// Filebases, of the last files of each process.
    pub bases: Vec<PathBuf>,
}

/// Processes that are recorded together.
pub struct Fleet {
    plan: Arc<Plan>,
    crowd: Crowd,
    /// Recorded by somebody else.
    except: Option<ProcessId>,
    entries: BTreeMap<i32, Entry>,
    /// Filebases that were given away.
    bases: BTreeSet<PathBuf>,
    jobs: Sender<Job>,
    /// For the threads that leave; keeps the channel open.
    tell: Sender<News>,
    news: Receiver<News>,
    attachers: Vec<std::thread::JoinHandle<()>>,
    begun: Instant,
    next_look: Instant,
    next_reconsider: Instant,
    too_many: bool,
    /// What is known so far.
    pub sum: Sum,
}

impl Fleet {
    /// Begins to record `crowd`, but for the process `except`.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn new(plan: Plan, crowd: Crowd, except: Option<ProcessId>) -> Result<Self, Failure> {
        privileges::drop_unneeded();
        let plan = Arc::new(plan);
        let (jobs, todo) = unbounded::<Job>();
        let (tell, news) = unbounded();
        let start = |_| {
            let (plan, todo, tell) = (Arc::clone(&plan), todo.clone(), tell.clone());
            threads::start("attach", move || {
                for job in todo {
                    let pid = job.id.pid;
                    let done = attach(&plan, &job).map(Box::new);
                    // Of one that has ended meanwhile, anything can fail.
                    let done = done.map_err(|problem| if job.id.is_alive() { problem } else { Problem::Nothing });
                    if tell.send(News::Attached(pid, done)).is_err() {
                        return;
                    }
                }
            })
        };
        let attachers = (0..ATTACHERS)
            .map(start)
            .collect::<Result<_, _>>()
            .map_err(Failure::failed)?;
        let now = Instant::now();
        Ok(Self {
            plan,
            crowd,
            except,
            entries: BTreeMap::new(),
            bases: BTreeSet::new(),
            jobs,
            tell,
            news,
            attachers,
            begun: now,
            next_look: now,
            next_reconsider: now,
            too_many: false,
            sum: Sum::default(),
        })
    }

    /// Does what is due: cheap when nothing is. Lines for the user go to `say`.
    pub fn tick(&mut self, say: &mut dyn FnMut(&str)) {
        let now = Instant::now();
        while let Ok(news) = self.news.try_recv() {
            self.hear(news, say);
        }
        if now >= self.next_look {
            self.next_look = now + LOOK;
            if let Some(except) = self.except {
                self.crowd.carries(except.pid);
            }
            let meant = self.crowd.look();
            self.reconcile(&meant, now);
            self.begin(now, say);
        }
        self.look_after(now, say);
    }

    /// Who came and went.
    fn reconcile(&mut self, meant: &[Meant], now: Instant) {
        let condition = self.plan.condition;
        for one in meant {
            let known = self.entries.get(&one.id.pid);
            // A number that was given again waits until we have left its first owner.
            let is_new = known.is_none_or(|entry| {
                entry.id != one.id && matches!(entry.state, State::Waiting { .. } | State::Left { .. })
            });
            if is_new && self.except != Some(one.id) {
                let state = State::Waiting {
                    next: one.seen + SETTLED,
                    watch: Watch::new(condition),
                };
                self.entries.insert(one.id.pid, Entry { id: one.id, state });
            }
        }
        self.entries.retain(|pid, entry| {
            let is_idle = matches!(entry.state, State::Waiting { .. } | State::Left { .. });
            !is_idle || meant.binary_search_by_key(pid, |one| one.id.pid).is_ok()
        });
        if now >= self.next_reconsider {
            self.next_reconsider = now + RECONSIDER;
            for entry in self.entries.values_mut() {
                if let State::Left { program, next } = &entry.state
                    && now >= *next
                    && program_of(entry.id.pid) != *program
                {
                    entry.state = State::Waiting {
                        next: now,
                        watch: Watch::new(condition),
                    };
                }
            }
        }
    }

    /// Has those attached to whose time has come.
    fn begin(&mut self, now: Instant, say: &mut dyn FnMut(&str)) {
        let at = now.duration_since(self.begun);
        let busy = |state: &State| matches!(state, State::Attaching | State::Recording(_) | State::Leaving);
        let waiting = |state: &State| matches!(state, State::Waiting { .. });
        let mut taken = self.entries.values().filter(|entry| busy(&entry.state)).count();
        let company = self
            .entries
            .values()
            .filter(|entry| busy(&entry.state) || waiting(&entry.state))
            .count();
        for (&pid, entry) in &mut self.entries {
            let State::Waiting { next, watch } = &mut entry.state else {
                continue;
            };
            if now < *next {
                continue;
            }
            if !candidates::looks_like_python(pid) {
                entry.state = left(pid, now);
                continue;
            }
            let mut why = None;
            if !self.plan.condition.is_none() {
                *next = now + self.plan.condition.step();
                why = MemoryUse::of(pid)
                    .ok()
                    .and_then(|memory| watch.see(at, memory.rss_bytes));
                if why.is_none() {
                    continue;
                }
            }
            if taken >= MOST {
                if !self.too_many {
                    say(&format!(
                        "more than {MOST} processes: the others wait until one of these has ended"
                    ));
                    self.too_many = true;
                }
                return;
            }
            taken += 1;
            entry.state = State::Attaching;
            let base = free_base(&mut self.bases, &self.plan.base, pid);
            let company = u32::try_from(company).unwrap_or(u32::MAX);
            let _ = self.jobs.send(Job {
                id: entry.id,
                base,
                company,
                why,
            });
        }
    }

    fn hear(&mut self, news: News, say: &mut dyn FnMut(&str)) {
        let now = Instant::now();
        match news {
            News::Attached(pid, Ok(recording)) => {
                self.sum.recorded += 1;
                self.crowd.carries(pid);
                say(&format!(
                    "recording {pid} ({})",
                    recording.session.target.facts.short_command(60)
                ));
                let state = State::Recording(Box::new(Member {
                    recording: *recording,
                    next_check: now,
                    next_second: now,
                }));
                if let Some(entry) = self.entries.get_mut(&pid) {
                    entry.state = state;
                }
            }
            News::Attached(pid, Err(problem)) => {
                let Some(entry) = self.entries.get_mut(&pid) else {
                    return;
                };
                entry.state = left(pid, now);
                match problem {
                    Problem::Young => {
                        entry.state = State::Waiting {
                            next: now + AGAIN,
                            watch: Watch::new(self.plan.condition),
                        };
                    }
                    Problem::Nothing => {}
                    Problem::Refused(code, text) => {
                        self.sum.refused += 1;
                        say(&format!("not recorded: {text}"));
                        self.sum.refusal.get_or_insert((code, text));
                    }
                }
            }
            News::Left(left_one) => {
                let pid = left_one.pid;
                self.crowd.look_again();
                self.add(left_one, say);
                if let Some(entry) = self.entries.get_mut(&pid) {
                    entry.state = left(pid, now);
                }
            }
        }
    }

    fn add(&mut self, left: Left, say: &mut dyn FnMut(&str)) {
        let sum = &mut self.sum;
        sum.events += left.events;
        sum.bases.extend(left.base);
        for (name, count) in left.losses.0 {
            *sum.losses.0.entry(name).or_default() += count;
        }
        if left.ended {
            sum.ended += 1;
            if !self.plan.quiet {
                say(&format!("process {} has ended", left.pid));
            }
        } else {
            sum.live.0 += left.total.bytes;
            sum.live.1 += left.total.variance;
        }
        if let Some(failure) = left.failure {
            let text = format!("{}: {failure}", left.pid);
            say(&format!("process {text}"));
            sum.failures.push(text);
        }
    }

    /// Looks after the recordings.
    fn look_after(&mut self, now: Instant, say: &mut dyn FnMut(&str)) {
        let check = CHECK * if self.entries.len() > MANY { 2 } else { 1 };
        for (pid, entry) in &mut self.entries {
            let State::Recording(member) = &mut entry.state else {
                continue;
            };
            if now < member.next_check {
                continue;
            }
            member.next_check = now + check;
            let Recording { session, recorder, .. } = &mut member.recording;
            let mut stop = recorder.must_stop(session);
            if stop.is_none() {
                recorder.watch_room(session);
            }
            if stop.is_none() && now >= member.next_second {
                member.next_second = now + Duration::from_secs(1);
                stop = recorder.every_second(session);
                stop = stop.map(|stop| recorder.must_stop(session).unwrap_or(stop));
            }
            for text in recorder.take_notes() {
                if !self.plan.quiet {
                    say(&format!("{pid}: {text}"));
                }
            }
            if let Some(stop) = stop
                && let State::Recording(member) = std::mem::replace(&mut entry.state, State::Leaving)
            {
                let (tell, verbose) = (self.tell.clone(), self.plan.verbose);
                let (give, take) = bounded(1);
                let leave = move || {
                    if let Ok(recording) = take.try_recv() {
                        let _ = tell.send(News::Left(leave(recording, &Why::Stop(stop), verbose)));
                    }
                };
                let _ = give.send(member.recording);
                // The others wait for it if it must be done here.
                if threads::start("leave", leave.clone()).is_err() {
                    leave();
                }
            }
        }
    }

    /// Begins new files in all recordings.
    pub fn rotate(&mut self) {
        for entry in self.entries.values_mut() {
            if let State::Recording(member) = &mut entry.state {
                member.recording.recorder.rotate();
            }
        }
    }

    /// How many processes are recorded now, and what is alive in them.
    #[must_use]
    pub fn now(&self) -> (usize, Estimate, u64) {
        let (mut count, mut total, mut samples) = (0, Estimate::default(), 0);
        for entry in self.entries.values() {
            if let State::Recording(member) = &entry.state {
                let live = lock(&member.recording.recorder.live);
                count += 1;
                samples += live.sampled;
                total.bytes += live.total.bytes;
                total.variance += live.total.variance;
            }
        }
        (count, total, samples)
    }

    /// True while anybody is there, recorded or not.
    #[must_use]
    pub fn is_anybody(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Ends all recordings and waits for them. Then inherited copies of the hooks are taken out wherever they are.
    pub fn finish(mut self, why: &Why, say: &mut dyn FnMut(&str)) -> Sum {
        // Who is being attached to is attached to first: a thread in the middle of it must come to its end.
        let (jobs, _) = unbounded();
        self.jobs = jobs;
        for attacher in std::mem::take(&mut self.attachers) {
            let _ = attacher.join();
        }
        while let Ok(news) = self.news.try_recv() {
            self.hear(news, say);
        }
        let mut members = Vec::new();
        let mut leaving = 0;
        for entry in self.entries.values_mut() {
            match std::mem::replace(&mut entry.state, State::Leaving) {
                State::Recording(member) => members.push(member.recording),
                State::Leaving => leaving += 1,
                other => entry.state = other,
            }
        }
        let verbose = self.plan.verbose;
        let (to_leave, todo) = unbounded();
        for recording in members {
            leaving += 1;
            let _ = to_leave.send(recording);
        }
        drop(to_leave);
        std::thread::scope(|scope| {
            let tell = self.tell.clone();
            let work = move || {
                for recording in todo {
                    let _ = tell.send(News::Left(leave(recording, why, verbose)));
                }
            };
            for _ in 0..LEAVERS.min(leaving) {
                if threads::start_in(scope, "leave", work.clone()).is_err() {
                    work.clone()();
                }
            }
            for _ in 0..leaving {
                let Ok(news) = self.news.recv_timeout(Duration::from_secs(60)) else {
                    break;
                };
                self.hear(news, say);
            }
        });
        cure_family(&self.crowd.kin(), None);
        self.sum
    }
}

/// A name that no other process of this recording has: its number, or if that was given again, the number and how often.
fn free_base(taken: &mut BTreeSet<PathBuf>, base: &std::path::Path, pid: i32) -> PathBuf {
    let named = |suffix: &str| {
        let mut name = base.as_os_str().to_owned();
        name.push(format!(".{pid}{suffix}"));
        PathBuf::from(name)
    };
    let mut name = named("");
    let mut number = 2;
    while !taken.insert(name.clone()) {
        name = named(&format!("-{number}"));
        number += 1;
    }
    name
}

fn left(pid: i32, now: Instant) -> State {
    State::Left {
        program: program_of(pid),
        next: now + RECONSIDER,
    }
}

fn program_of(pid: i32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/exe")).ok()
}

/// In company samples are rarer: all of them together should cost pyheap no more than a few times one process.
fn period_in(company: u32) -> u64 {
    crate::attach::session::DEFAULT_PERIOD << (company / 8).checked_ilog2().map_or(0, |log| (log + 1).min(3))
}

fn attach(plan: &Plan, job: &Job) -> Result<Recording, Problem> {
    let pid = job.id.pid;
    let target = preflight::check(pid).map_err(problem)?;
    if target.facts.id != job.id {
        return Err(Problem::Nothing);
    }
    let mut options = plan.sampling.options();
    if plan.sampling.period == sampling::Period::Auto {
        options.period = period_in(job.company);
    }
    let session = Session::attach(target, options).map_err(|error| match (preflight::look(pid), error) {
        // It has become another program meanwhile.
        (Err(refusal), _) => problem(refusal),
        (Ok(_), AttachError::Busy { .. }) => Problem::Young,
        (Ok(_), error) => Problem::refused(&error.into()),
    })?;
    let limits = crate::collect::Limits {
        company: job.company,
        ..plan.sampling.limits()
    };
    let files = |session: &Session| {
        let facts = facts(session, plan.sampling.domains());
        Files::create(&job.base, plan.suffix, session.period(), facts)
            .map(|files| Some(files.rotated(plan.rotation)))
            .map_err(Failure::failed)
    };
    Recording::start_because(job.why.as_deref(), session, limits, files, Box::new(|_| {}))
        .map_err(|failure| Problem::refused(&failure))
}

fn problem(refusal: Refusal) -> Problem {
    match &refusal {
        Refusal::NoSuchProcess { .. } | Refusal::Ended { .. } | Refusal::Finalizing { .. } => Problem::Nothing,
        Refusal::Python(FindError::NotPython { .. }) => Problem::Nothing,
        Refusal::Python(FindError::NotInitialised { .. } | FindError::Memory { .. } | FindError::Maps { .. })
        | Refusal::Stopped { .. } => Problem::Young,
        _ => Problem::refused(&refusal.into()),
    }
}

/// Ends a recording.
fn leave(recording: Recording, why: &Why, verbose: bool) -> Left {
    let pid = recording.session.target.facts.id.pid;
    let reason = why.reason();
    let is_over = matches!(why, Why::Stop(Stop::TargetGone | Stop::TargetReplaced | Stop::ShutDown));
    let live = Arc::clone(&recording.recorder.live);
    let (outcome, hooked) = recording.finish(&reason);
    let (held, cured) = hooked.leave_alone(why, verbose);
    if let (Some(held), Some(names)) = (held, &outcome.names) {
        let path = names.path(crate::profile::names::Part::Sidecar);
        let _ = crate::profile::sidecar::note_detach(&path, super::recording::micros(held));
    }
    let stopped = match why {
        Why::Stop(stop) if !is_over => Some(stop.describe()),
        _ => None,
    };
    let total = lock(&live).total;
    Left {
        pid,
        events: outcome.events,
        losses: outcome.losses,
        total,
        ended: is_over,
        base: outcome.names.as_ref().map(|names| names.base().to_owned()),
        failure: cured
            .err()
            .map(|error| chain(&error))
            .or_else(|| outcome.write_error.as_ref().map(|error| chain(error)))
            .or(stopped),
    }
}
