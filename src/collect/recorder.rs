//! A recording: the threads, the clock, the reasons to stop.

use super::drain::{self, Chunk, Drain};
use super::files::{Files, SaveRequest};
use super::live::{KindCounts, Live};
use super::memory::MemoryProbe;
use super::missed::MissedFrees;
use super::names::Names;
use super::period::{Limits, Seen, Watch};
use super::resolve::{Event, Resolver, lock};
use super::rotation::Rotation;
use super::threads::Threads;
use super::tree::NamedFrame;
use super::types::Looker;
use crate::attach::interpreter::Phase;
use crate::attach::privileges;
use crate::attach::session::{self, Session};
use crate::profile::facts::{EndReason, Facts, Losses, MemorySample};
use crate::profile::names::ProfileNames;
use crate::profile::writer::{AllocDetail, Frame, WriteError};
use crate::report::human::exact_bytes;
use crate::threads;
use pyheap_injector::RemoteMemory;
use pyheap_protocol::RemoteAddr;
use pyheap_protocol::control::{Control, Counters, Doubled, GAP_UNIT, Identity};
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Chunks that may wait for the resolver; their bytes are limited as well. These queues are the standard library's: their receivers
/// sleep at once, where crossbeam's first look again and again, which with dozens of recordings was a sixth of all that pyheap took.
const QUEUE: usize = 256;
/// Batches that may wait for the writer.
const BATCHES: usize = 16;
/// The files are brought up to date this often.
const FLUSH: Duration = Duration::from_millis(500);
/// Buffered bytes at which the writer does not wait for that.
const FLUSH_BYTES: usize = 1 << 20;

/// What the survivors are is written after so long, and then each time that half as much again has passed, unless there are
/// more than so many.
const FIRST_KINDS: Duration = Duration::from_secs(10);
const MANY_KINDS: usize = 200_000;
/// Processor time, and time, for looking at what is left when the recording is about to end: it goes on meanwhile.
const CATCH_UP: Duration = Duration::from_secs(1);
const CATCH_UP_WITHIN: Duration = Duration::from_secs(2);
/// Processor time, and time, for each of so many looks after its end.
const LAST_LOOK: Duration = Duration::from_millis(250);
const AFTER_END: Duration = Duration::from_millis(500);
const LAST_LOOKS: usize = 3;

/// A second that takes longer than this was a pause of ours.
const LONG_PAUSE: Duration = Duration::from_secs(5);
/// Seconds after which an interpreter that shuts down is taken for gone although its process lives on (it was embedded).
const LONG_SHUTDOWN: u32 = 3;

/// Why a recording has to end by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// The target is gone.
    TargetGone,
    /// The target has become another program by exec.
    TargetReplaced,
    /// The files cannot be written any more.
    WriteFailed(String),
    /// The interpreter was shut down, but its process lives on.
    ShutDown,
    /// The target's records make no sense.
    Damaged,
    /// Another tool has taken our hooks out.
    HooksLost,
}

impl Stop {
    /// For people.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::TargetGone => "the target has ended".to_owned(),
            Self::TargetReplaced => "the target has become another program (exec)".to_owned(),
            Self::WriteFailed(error) => format!("the files cannot be written: {error}"),
            Self::ShutDown => "the interpreter has been shut down".to_owned(),
            Self::Damaged => {
                "the ring in the target is corrupt: the target, or a library in it, has written over it".to_owned()
            }
            Self::HooksLost => {
                "another tool (tracemalloc, for example) has taken our hooks out of the allocators".to_owned()
            }
        }
    }
}

/// Messages to the writer.
enum Write {
    Events(Vec<Event>),
    Memory(Duration, MemorySample),
    Losses(Duration, Losses),
    Survivors(BTreeMap<u32, Vec<(u64, u64)>>),
    Kinds(Kinds),
    End(Duration, EndReason),
}

/// What the survivors are, at a moment.
struct Kinds {
    at: Duration,
    /// The profile that the traces are of.
    period: u64,
    counts: KindCounts,
    names: Vec<Arc<str>>,
}

/// Sees all events on their way to the files.
pub type Tap = Box<dyn FnMut(&[Event]) + Send>;

/// What has become of the files that [`Recorder::save`] asked for.
#[derive(Debug, Clone, Default)]
pub enum Saved {
    /// Nothing was asked for.
    #[default]
    Nothing,
    /// They are being written.
    Now(ProfileNames),
    /// They are complete.
    Done(ProfileNames),
    /// They could not be written.
    Failed(String),
}

/// What a recording has come to.
#[derive(Debug)]
pub struct Outcome {
    /// How long it took.
    pub elapsed: Duration,
    /// Events written.
    pub events: u64,
    /// Why the files are not complete, if so.
    pub write_error: Option<WriteError>,
    /// The shim's counters at the end.
    pub counters: Counters,
    /// What was lost, and for how long pyheap stood still.
    pub losses: Losses,
    /// The last profile that was written, if any was.
    pub names: Option<ProfileNames>,
    /// What was saved meanwhile.
    pub saved: Saved,
}

/// A running recording.
#[derive(Debug)]
pub struct Recorder {
    /// The model of what is live.
    pub live: Arc<Mutex<Live>>,
    started: Instant,
    stop: Arc<AtomicBool>,
    failed: Arc<Mutex<Option<String>>>,
    saved: Arc<Mutex<Saved>>,
    drain: Option<JoinHandle<drain::Ended>>,
    resolver: Option<JoinHandle<()>>,
    /// The resolver has met what no shim can have written.
    damaged: Arc<AtomicBool>,
    writer: Option<JoinHandle<Written>>,
    looker: Option<JoinHandle<Looker>>,
    stop_looking: Arc<AtomicBool>,
    /// When the types of the survivors are written next.
    next_kinds: Duration,
    to_writer: Option<SyncSender<Write>>,
    to_resolver: Option<SyncSender<Chunk>>,
    watch: Watch,
    period: u64,
    notes: Vec<String>,
    last_counters: Counters,
    written_losses: Losses,
    heartbeat: u64,
    /// How often the shim had switched itself off when we last switched it on again.
    suspensions: u64,
    /// When [`Recorder::every_second`] was last here.
    last_second: Duration,
    /// How long we were stopped ourselves, in all.
    stood_still: Duration,
    memory: MemoryProbe,
    last_memory: Option<MemorySample>,
    /// It is looked at once in so many seconds.
    memory_every: u64,
    /// Seconds for which the interpreter has been shutting down.
    finalizing: u32,
    /// Looks for frees of native memory that nobody saw.
    missed: Option<MissedFrees>,
    /// How files are rotated, the size of the present ones, and when they began.
    rotation: (Rotation, Arc<AtomicU64>),
    files_begun: Duration,
}

impl Recorder {
    /// Starts draining `session`, into `files` if there are any, within `limits`.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(session: &Session, files: Option<Files>, limits: Limits, started: Instant) -> std::io::Result<Self> {
        Self::start_with(session, files, limits, started, Box::new(|_| {}))
    }

    /// The same, with somebody who sees all events.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start_with(
        session: &Session,
        files: Option<Files>,
        limits: Limits,
        started: Instant,
        tap: Tap,
    ) -> std::io::Result<Self> {
        // From here on what is read is the target's.
        privileges::drop_unneeded();
        let rotation = files.as_ref().map(Files::rotation).unwrap_or_default();
        let live = Arc::new(Mutex::new(Live::new(session.period())));
        let (to_resolver, chunks) = sync_channel(QUEUE);
        let (to_writer, messages) = sync_channel::<Write>(BATCHES);
        let drain = Drain::new(session, started);
        let places = session.places();
        let layout = session.target.interpreter.layout;
        let mut names = Names::new(layout, session.memory(), places.codes_len, places.stacks_len);
        if !session.pieces().is_empty() {
            names.with_native_stacks(session.target.interpreter.text.clone());
        }
        let resolver = Resolver::new(
            names,
            Threads::new(session),
            Arc::clone(&live),
            limits.domains,
            places.slab_entries,
        );
        let waiting = drain.waiting();
        let calm = limits.calm_pause(session.period());
        let mut recorder = Self {
            live: Arc::clone(&live),
            looker: None,
            stop_looking: Arc::new(AtomicBool::new(false)),
            next_kinds: FIRST_KINDS,
            started,
            stop: Arc::new(AtomicBool::new(false)),
            failed: Arc::new(Mutex::new(None)),
            saved: Arc::new(Mutex::new(Saved::default())),
            damaged: Arc::new(AtomicBool::new(false)),
            drain: None,
            resolver: None,
            writer: None,
            to_writer: Some(to_writer.clone()),
            to_resolver: Some(to_resolver.clone()),
            watch: Watch::new(limits),
            period: session.period(),
            notes: Vec::new(),
            last_counters: Counters::default(),
            written_losses: Losses::default(),
            heartbeat: 0,
            suspensions: 0,
            last_second: Duration::ZERO,
            stood_still: Duration::ZERO,
            memory: MemoryProbe::new(session, limits.company),
            last_memory: None,
            memory_every: u64::from(limits.company / 8).clamp(1, 4),
            finalizing: 0,
            missed: MissedFrees::new(session),
            rotation,
            files_begun: Duration::ZERO,
        };
        let writer = Writer {
            files,
            period: session.period(),
            is_save: false,
            flush: FLUSH.saturating_mul(limits.company.clamp(1, 4)),
            failed: Arc::clone(&recorder.failed),
            saved: Arc::clone(&recorder.saved),
            error: None,
        };
        let looker = Looker::new(session, live, started);
        // If one of them cannot be started, those before it end with the recorder.
        let stop = Arc::clone(&recorder.stop);
        recorder.drain = Some(threads::start("drain", move || drain.run(&to_resolver, &stop, calm))?);
        let send = move |events: Vec<Event>| to_writer.send(Write::Events(events)).is_ok();
        let damaged = Arc::clone(&recorder.damaged);
        recorder.resolver = Some(threads::start("resolve", move || {
            resolver.run(&chunks, tap, send, &waiting, &damaged)
        })?);
        recorder.writer = Some(threads::start("write", move || writer.run(&messages))?);
        let stop = Arc::clone(&recorder.stop_looking);
        recorder.looker = Some(threads::start("types", move || looker.run(&stop, limits.company))?);
        Ok(recorder)
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// What the shim has counted, when it was last asked.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.last_counters
    }

    /// Looks whether the recording has to end. Cheap; call it often.
    #[must_use]
    pub fn must_stop(&self, session: &Session) -> Option<Stop> {
        if let Some(error) = self.failed.lock().ok().and_then(|failed| failed.clone()) {
            return Some(Stop::WriteFailed(error));
        }
        // What is still in its memory tells it for a tenth of what the kernel's files cost; those are asked once a second.
        if !session::is_there(session) && !session.target.facts.id.is_alive() {
            return Some(Stop::TargetGone);
        }
        let damaged = self.damaged.load(Ordering::Acquire);
        if damaged || self.drain.as_ref().is_some_and(JoinHandle::is_finished) {
            let region = session.memory().read_array::<16>(RemoteAddr(session.identity().base));
            return Some(match region {
                _ if session::is_replaced(session) => Stop::TargetReplaced,
                // It is there, and still drain or resolver have given up.
                Ok(_) => Stop::Damaged,
                // Its memory is gone already, though it still counts as alive.
                Err(_) => Stop::TargetGone,
            });
        }
        None
    }

    /// What is due every second: heartbeat, memory of the target, losses, and whether our hooks are still there.
    pub fn every_second(&mut self, session: &Session) -> Option<Stop> {
        let memory = session.memory();
        self.note_pause();
        self.heartbeat += 1;
        let at = session.identity().base + offset_of!(Identity, heartbeat) as u64;
        let _ = memory.write(RemoteAddr(at), &self.heartbeat.to_le_bytes());
        if self.heartbeat.is_multiple_of(self.memory_every) {
            self.note_memory();
        }
        session.look_for_objects();
        self.look_for_missed_frees();
        self.note_losses(session);
        self.note_kinds();
        self.watch_cost(session);
        let age = self.elapsed().saturating_sub(self.files_begun);
        if self.rotation.0.is_due(age, self.rotation.1.load(Ordering::Acquire)) {
            self.rotate();
        }
        let gate = session.control(offset_of!(Control, gate));
        let suspensions = self.last_counters.suspensions;
        if suspensions > self.suspensions && memory.read_u64(gate).is_ok_and(|gate| gate == 0) {
            // The ring had been full for so long that the shim took us for gone. We are not: go on. What was allocated
            // meanwhile was not sampled, which the losses say; what was freed was seen. (Whoever else closes the gate means it.)
            self.suspensions = suspensions;
            let _ = memory.write(gate, &1_u64.to_le_bytes());
        }
        let phase = session.target.interpreter.phase(&memory);
        self.finalizing = if matches!(phase, Ok(Phase::Running) | Err(_)) {
            0
        } else {
            self.finalizing + 1
        };
        if self.finalizing >= LONG_SHUTDOWN {
            return Some(Stop::ShutDown);
        }
        match session.hooks_in_place() {
            Ok(domains) if domains.contains(&Some(false)) => Some(Stop::HooksLost),
            _ if !session.target.facts.id.is_alive() => Some(Stop::TargetGone),
            _ => None,
        }
    }

    fn look_for_missed_frees(&mut self) {
        let at = self.elapsed();
        let Some(missed) = &mut self.missed else { return };
        let blocks = missed.choose(&lock(&self.live), at);
        let ids = missed.judge(&blocks);
        if let (false, Some(resolver)) = (ids.is_empty(), &self.to_resolver) {
            let _ = resolver.send(Chunk::Missed { at, ids });
        }
    }

    /// Adds up the times in which we were not running (Ctrl-Z, a freezer): what happened then has the time of our return.
    fn note_pause(&mut self) {
        let now = self.elapsed();
        let pause = now.saturating_sub(self.last_second);
        if pause > LONG_PAUSE {
            self.stood_still += pause;
        }
        self.last_second = now;
    }

    /// Looks whether the table of live samples fills. Cheap; call it often.
    pub fn watch_room(&mut self, session: &Session) {
        let Ok(used) = session.memory().read_u64(session.control(offset_of!(Control, live))) else {
            return;
        };
        let longer = {
            let live = lock(&self.live);
            // A change that the resolver has not come to yet is under way.
            if live.period() != self.period {
                return;
            }
            self.watch.by_room(used, &live)
        };
        self.raise(session, longer);
    }

    fn watch_cost(&mut self, session: &Session) {
        let Some(cpu) = cpu_time(session.target.facts.id.pid) else {
            return;
        };
        let walked = {
            let live = lock(&self.live);
            (live.sampled, live.frames)
        };
        let now = Seen {
            at: self.elapsed(),
            samples: self.last_counters.samples,
            walked,
            pieces: self.last_counters.pieces,
            cpu,
        };
        let longer = self.watch.by_cost(now, self.period);
        self.raise(session, longer);
    }

    /// Goes over to a longer period: first tells the resolver, then the shim, so that no sample of the new period comes
    /// before the resolver knows of it.
    fn raise(&mut self, session: &Session, longer: Option<(u64, String)>) {
        let Some((period, why)) = longer else { return };
        let at = self.elapsed();
        let told = self
            .to_resolver
            .as_ref()
            .is_some_and(|resolver| resolver.send(Chunk::Period { at, period }).is_ok());
        if !told {
            return;
        }
        self.period = period;
        let wanted = Doubled { a: period, b: period };
        let at = session.control(offset_of!(Control, period_wanted));
        let _ = session.memory().write(at, wanted.as_bytes());
        let period = exact_bytes(period);
        self.notes.push(format!("from now on one sample in {period}: {why}"));
    }

    /// Ends the present files and begins new ones, with what is alive.
    pub fn rotate(&mut self) {
        let (at, period) = (self.elapsed(), self.period);
        self.files_begun = at;
        if let Some(resolver) = &self.to_resolver {
            let _ = resolver.send(Chunk::Period { at, period });
        }
    }

    /// What is to be told to the user since the last call.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// The target's memory, when it was last looked at.
    #[must_use]
    pub fn memory(&self) -> Option<MemorySample> {
        self.last_memory
    }

    /// The period that was last asked for, in bytes.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.period
    }

    /// Begins to write files that begin with what is alive now, in a recording that has none. [`Recorder::saved`] tells
    /// what comes of it: an error of theirs ends them, not the recording.
    pub fn save(&mut self, base: PathBuf, facts: Facts) {
        let at = self.elapsed();
        self.written_losses = Losses::default();
        if let Some(resolver) = &self.to_resolver {
            let _ = resolver.send(Chunk::Save(Box::new(SaveRequest { base, facts, at })));
        }
    }

    /// Ends these files.
    pub fn end_save(&mut self) {
        let at = self.elapsed();
        if let Some(resolver) = &self.to_resolver {
            let _ = resolver.send(Chunk::SaveEnds { at });
        }
    }

    /// What has become of these files.
    #[must_use]
    pub fn saved(&self) -> Saved {
        self.saved.lock().map(|saved| saved.clone()).unwrap_or_default()
    }

    fn note_memory(&mut self) {
        if let Some(sample) = self.memory.sample() {
            self.last_memory = Some(sample);
            self.tell(Write::Memory(self.elapsed(), sample));
        }
    }

    /// Writes what the survivors are, should we be killed. The pauses get longer, so that the file does not grow by it.
    fn note_kinds(&mut self) {
        let now = self.elapsed();
        if now >= self.next_kinds {
            self.next_kinds = now.mul_f64(1.5);
            if lock(&self.live).len() <= MANY_KINDS {
                self.tell_kinds();
            }
        }
    }

    fn tell_kinds(&self) {
        let kinds = {
            let live = lock(&self.live);
            Kinds {
                at: self.elapsed(),
                period: live.period(),
                counts: live.kind_counts(),
                names: live.kinds.clone(),
            }
        };
        self.tell(Write::Kinds(kinds));
    }

    fn note_losses(&mut self, session: &Session) {
        if let Ok(counters) = Drain::new(session, self.started).read_counters() {
            self.last_counters = counters;
        }
        let mut losses = losses(&self.last_counters, &lock(&self.live));
        if !self.stood_still.is_zero() {
            let millis = u64::try_from(self.stood_still.as_millis()).unwrap_or(u64::MAX);
            losses.0.insert("milliseconds_pyheap_stood_still".to_owned(), millis);
        }
        if losses != self.written_losses {
            self.written_losses = losses.clone();
            self.tell(Write::Losses(self.elapsed(), losses));
        }
    }

    fn tell(&self, message: Write) {
        if let Some(writer) = &self.to_writer {
            let _ = writer.send(message);
        }
    }

    /// Ends the thread that looks at survivors, and takes what it knows.
    fn end_looking(&mut self) -> Option<Looker> {
        self.stop_looking.store(true, Ordering::Release);
        let looker = self.looker.take()?;
        looker.thread().unpark();
        looker.join().ok()
    }

    /// Has the last records taken and resolved, and ends the threads that do so.
    fn end_draining(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.to_resolver = None;
        if let Some(drain) = self.drain.take() {
            drain.thread().unpark();
            let _ = drain.join();
        }
        let _ = self.resolver.take().map(JoinHandle::join);
    }

    /// Ends the recording: takes the last records, and closes the files with `reason`. The hooks are still in the target.
    ///
    /// # Panics
    /// Never: a thread that panicked counts as one that failed.
    pub fn finish(mut self, session: &Session, reason: &EndReason) -> Outcome {
        self.note_pause();
        self.note_memory();
        let mut looker = self.end_looking();
        // First while records still come; then, as long as the last of them are on their way; then what is left.
        if let Some(looker) = &mut looker {
            looker.catch_up(CATCH_UP, CATCH_UP_WITHIN);
        }
        let all_here = AtomicBool::new(false);
        std::thread::scope(|scope| {
            if let Some(looker) = &mut looker {
                let _ = threads::start_in(scope, "types", || looker.hurry(&all_here));
            }
            self.end_draining();
            all_here.store(true, Ordering::Release);
        });
        let elapsed = self.elapsed();
        if let Some(looker) = &mut looker {
            (0..LAST_LOOKS).for_each(|_| looker.look(Duration::ZERO, LAST_LOOK, AFTER_END));
        }
        self.note_losses(session);
        self.tell_kinds();
        let births = lock(&self.live).births();
        self.tell(Write::Survivors(births));
        self.tell(Write::End(elapsed, reason.clone()));
        self.to_writer = None;
        let written = self.writer.take().and_then(|w| w.join().ok()).unwrap_or_default();
        let saved = self.saved();
        Outcome {
            elapsed,
            events: written.events,
            write_error: written.error,
            counters: self.last_counters,
            losses: std::mem::take(&mut self.written_losses),
            names: written.names,
            saved,
        }
    }
}

impl Drop for Recorder {
    /// Ends what [`Recorder::finish`] has not ended: a thread that goes on could be the one too many for the process that takes the
    /// hooks out.
    fn drop(&mut self) {
        let _ = self.end_looking();
        self.end_draining();
        self.to_writer = None;
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

/// CPU time that a process has used.
fn cpu_time(pid: i32) -> Option<Duration> {
    let stat = procfs::process::Process::new(pid)
        .and_then(|process| process.stat())
        .ok()?;
    let ticks = stat.utime.saturating_add(stat.stime);
    Some(Duration::from_secs_f64(
        ticks as f64 / procfs::ticks_per_second() as f64,
    ))
}

/// The losses worth telling, by name; `docs/format.md` lists them.
#[must_use]
pub fn losses(counters: &Counters, live: &Live) -> Losses {
    // What the lost records stood for, without those that were found in the table afterwards and are in the files now.
    let (late_bytes, late_objects) = live.found_late;
    let in_gaps = |counted: f64, late: f64| (counted - late).max(0.0).round() as u64;
    let gap_objects = counters.gap_objects as f64 / GAP_UNIT as f64;
    let named = [
        (
            "events_lost_ring_full",
            counters.lost_allocs.saturating_add(counters.lost_frees),
        ),
        ("stacks_lost_ring_full", counters.lost_stacks),
        ("samples_lost_lock_busy", counters.contended),
        ("samples_lost_in_signal_handler", counters.nested),
        ("samples_lost_table_full", counters.table_full),
        ("samples_not_proven", counters.unproven),
        (
            "frees_missed",
            counters
                .missed_frees
                .saturating_add(counters.dropped_frees)
                .saturating_add(live.missed),
        ),
        ("bytes_in_lost_samples", counters.lost_bytes),
        (
            "bytes_allocated_in_gaps",
            in_gaps(counters.gap_bytes as f64, late_bytes),
        ),
        ("objects_allocated_in_gaps", in_gaps(gap_objects, late_objects)),
        ("frames_not_named", live.unresolved),
        ("stacks_not_kept", live.not_kept),
        ("native_stacks_lost_ring_full", counters.lost_pieces),
        ("native_stacks_left_out", live.native_stacks_left_out),
        ("native_stacks_cut", live.native_stacks_cut),
        ("times_switched_off_ring_full", counters.suspensions),
    ];
    Losses(
        named
            .into_iter()
            .filter(|&(_, count)| count != 0)
            .map(|(name, count)| (name.to_owned(), count))
            .collect(),
    )
}

/// What the writer thread has done.
#[derive(Default)]
struct Written {
    events: u64,
    error: Option<WriteError>,
    names: Option<ProfileNames>,
}

/// The writer thread: puts what comes into the files, if there are any, and brings those up to date twice a second, or less often in
/// company.
struct Writer {
    files: Option<Files>,
    /// That samples stand for at present, in bytes.
    period: u64,
    /// Whether the files are a save.
    is_save: bool,
    /// The files are brought up to date this often.
    flush: Duration,
    failed: Arc<Mutex<Option<String>>>,
    saved: Arc<Mutex<Saved>>,
    error: Option<WriteError>,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Write>) -> Written {
        let mut next_flush = Instant::now() + self.flush;
        loop {
            let message = messages.recv_timeout(next_flush.saturating_duration_since(Instant::now()));
            let ended = matches!(message, Err(RecvTimeoutError::Disconnected));
            // After an error there is nothing to write to: take the messages all the same, so that nobody waits.
            let result = match message {
                Ok(message) if self.error.is_none() => self.put(message),
                _ => Ok(()),
            };
            let buffered = self.files.as_ref().map_or(0, Files::buffered_bytes);
            let due = ended || Instant::now() >= next_flush || buffered >= FLUSH_BYTES;
            if due {
                next_flush = Instant::now() + self.flush;
            }
            let result = result.and_then(|()| match &mut self.files {
                Some(files) if due && self.error.is_none() => files.flush(),
                _ => Ok(()),
            });
            if let Err(problem) = result {
                self.fail(problem);
            }
            if ended {
                return self.written();
            }
        }
    }

    fn fail(&mut self, problem: WriteError) {
        if self.is_save {
            self.tell(Saved::Failed(describe(&problem)));
            (self.files, self.is_save) = (None, false);
            return;
        }
        if let Ok(mut failed) = self.failed.lock() {
            *failed = Some(describe(&problem));
        }
        self.error = Some(problem);
    }

    fn tell(&self, what: Saved) {
        if let Ok(mut saved) = self.saved.lock() {
            *saved = what;
        }
    }

    fn written(self) -> Written {
        let names = self.files.as_ref().map(|files| files.names().clone());
        if let (true, Some(names)) = (self.is_save, &names) {
            self.tell(Saved::Done(names.clone()));
        }
        Written {
            events: self.files.as_ref().map_or(0, Files::event_count),
            error: self.error,
            names,
        }
    }

    fn put(&mut self, message: Write) -> Result<(), WriteError> {
        let Write::Events(events) = message else {
            return self.files.as_mut().map_or(Ok(()), |files| put(files, message));
        };
        for event in events {
            match (event, &mut self.files) {
                (Event::Save(request), None) => {
                    self.is_save = true;
                    let files = Files::save(*request, self.period)?;
                    self.tell(Saved::Now(files.names().clone()));
                    self.files = Some(files);
                }
                (Event::SaveEnds { at, births }, Some(files)) if self.is_save => {
                    put(files, Write::Survivors(births))?;
                    files.end(at, &EndReason::Stopped);
                    files.flush()?;
                    let names = files.names().clone();
                    (self.files, self.is_save) = (None, false);
                    self.tell(Saved::Done(names));
                }
                (Event::Period { at, period }, files) => {
                    self.period = period;
                    if let Some(files) = files {
                        files.next(at, period)?;
                        if self.is_save {
                            let names = files.names().clone();
                            self.tell(Saved::Now(names));
                        }
                    }
                }
                (event, Some(files)) => put_event(files, event)?,
                (_, None) => {}
            }
        }
        Ok(())
    }
}

fn describe(error: &WriteError) -> String {
    use std::error::Error;
    error
        .source()
        .map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

fn put(files: &mut Files, message: Write) -> Result<(), WriteError> {
    match message {
        Write::Events(events) => events.into_iter().try_for_each(|event| put_event(files, event))?,
        Write::Memory(at, sample) => files.memory(at, &sample),
        Write::Losses(at, losses) => files.losses(at, &losses),
        Write::Kinds(kinds) => files.kinds(kinds.at, kinds.period, &kinds.counts, &kinds.names),
        Write::Survivors(births) => births
            .into_iter()
            .for_each(|(trace, births)| files.survivors(trace, &births)),
        Write::End(at, reason) => files.end(at, &reason),
    }
    Ok(())
}

fn put_event(files: &mut Files, event: Event) -> Result<(), WriteError> {
    match event {
        Event::Trace(stack) => {
            let frames: Vec<Frame<'_>> = stack.iter().map(frame).collect();
            files.add_trace(&frames)?;
        }
        Event::Alloc {
            at,
            trace,
            size,
            domain,
            thread,
            ..
        } => files.alloc(at, trace, size, AllocDetail { domain, thread }),
        Event::Thread(thread, name) => files.thread(thread, &name),
        Event::Stack { stack, domain, trace } => files.stack(stack, domain, trace),
        Event::Period { at, period } => files.next(at, period)?,
        Event::Free { at, trace, size, .. } => files.free(at, trace, size),
        // Of a recording into files no other files are made.
        Event::Save(_) | Event::SaveEnds { .. } => {}
    }
    Ok(())
}

fn frame(named: &NamedFrame) -> Frame<'_> {
    Frame {
        file: &named.file,
        line: named.line,
        function: &named.function,
    }
}
