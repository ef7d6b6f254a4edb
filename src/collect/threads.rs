//! What the threads of a target are called.
//!
//! A sample tells the number of its thread. What `threading` calls that thread is read out of the interpreter from outside, as
//! `pyheap dump` does it; a thread that Python does not know has the name that the kernel knows. Names are asked for when a
//! thread is met, and again now and then, since a thread may get its name late; one that lives for less than a tenth of
//! a second may stay without.

use super::resolve::Event;
use crate::attach::Session;
use crate::attach::thread_number;
use crate::dump::budget::Budget;
use crate::dump::objects::{Active, Objects};
use crate::dump::walk::{RawThread, Walker};
use crate::frames::Layout;
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};
use pyheap_protocol::{Control, PyLayout};
use std::collections::HashMap;
use std::mem::offset_of;
use std::time::{Duration, Instant};

/// Between two looks at the names while some are missing, and while none is.
const SOON: Duration = Duration::from_millis(100);
const LATER: Duration = Duration::from_secs(5);
/// So often a thread is looked for among those of Python before it is taken for none of them.
const MAX_LOOKS: u32 = 5;
/// Processor time for one look.
const MAX_READING: Duration = Duration::from_millis(5);
/// So many threads have names, and so many numbers are translated: a target can make up any number of them.
const MAX_THREADS: usize = 1 << 16;
/// Longer names are cut, in characters.
const MAX_NAME: usize = 100;

/// A thread that has a trace.
#[derive(Debug, Default)]
struct Thread {
    name: String,
    /// The name is what `threading` calls it.
    is_python: bool,
    looks: u32,
}

/// The threads met so far.
#[derive(Debug)]
pub struct Threads {
    pid: i32,
    memory: ProcessMemory,
    runtime: RemoteAddr,
    layout: Layout,
    /// From the thread pointer to where a thread keeps its number.
    distance: Option<i32>,
    /// The target counts its threads as we do.
    same_numbers: bool,
    /// Our numbers by the target's own, where they differ; 0 for a thread that has ended.
    numbers: HashMap<u64, u32>,
    by_number: HashMap<u32, Thread>,
    /// Where each interpreter has the names.
    active: HashMap<RemoteAddr, Active>,
    next_look: Instant,
    next_search: Instant,
}

impl Threads {
    /// None met yet.
    #[must_use]
    pub fn new(session: &Session) -> Self {
        let memory = session.memory();
        let at = session.control(offset_of!(Control, config.layout.thread_number));
        let distance = memory.read_u32(at).unwrap_or(PyLayout::ABSENT);
        let distance = (distance != PyLayout::ABSENT).then_some(distance.cast_signed());
        let interpreter = &session.target.interpreter;
        Self::of(memory, interpreter.runtime, interpreter.layout, distance)
    }

    /// The same, for a process that has the runtime there and keeps threads' numbers at this distance from the thread pointer.
    #[must_use]
    pub fn of(memory: ProcessMemory, runtime: RemoteAddr, layout: Layout, distance: Option<i32>) -> Self {
        let pid = memory.pid();
        let own = u32::try_from(pid).unwrap_or_default();
        Self {
            pid,
            memory,
            runtime,
            layout,
            distance,
            same_numbers: thread_number::numbers(pid).get(&own) == Some(&own),
            numbers: HashMap::new(),
            by_number: HashMap::new(),
            active: HashMap::new(),
            next_look: Instant::now(),
            next_search: Instant::now(),
        }
    }

    /// The number by which we know the thread that the target gives this number; 0 where that is not known.
    pub fn number(&mut self, inner: u64) -> u32 {
        if self.same_numbers || inner == 0 {
            return u32::try_from(inner).unwrap_or(0);
        }
        if let Some(&known) = self.numbers.get(&inner) {
            return known;
        }
        if self.numbers.len() >= MAX_THREADS {
            return 0;
        }
        let all = thread_number::numbers(self.pid);
        self.numbers
            .extend(all.into_iter().map(|(inner, outer)| (u64::from(inner), outer)));
        *self.numbers.entry(inner).or_insert(0)
    }

    /// The first trace of this thread has come.
    pub fn meet(&mut self, thread: u32, events: &mut Vec<Event>) {
        if thread == 0 || self.by_number.len() >= MAX_THREADS || self.by_number.contains_key(&thread) {
            return;
        }
        let comm = std::fs::read(format!("/proc/{}/task/{thread}/comm", self.pid)).unwrap_or_default();
        let name = String::from_utf8_lossy(&comm).trim_end().to_owned();
        if !name.is_empty() {
            events.push(Event::Thread(thread, name.clone()));
        }
        let met = Thread {
            name,
            ..Thread::default()
        };
        self.by_number.insert(thread, met);
        self.next_look = self.next_look.min(Instant::now() + SOON);
    }

    /// Looks for names when it is time to. Cheap; call it often.
    pub fn look(&mut self, events: &mut Vec<Event>) {
        if self.by_number.is_empty() || Instant::now() < self.next_look {
            return;
        }
        for (number, name) in self.python_names() {
            if let Some(thread) = self.by_number.get_mut(&number) {
                thread.is_python = true;
                if thread.name != name {
                    thread.name.clone_from(&name);
                    events.push(Event::Thread(number, name));
                }
            }
        }
        let mut missing = false;
        for thread in self.by_number.values_mut().filter(|thread| !thread.is_python) {
            thread.looks += 1;
            missing |= thread.looks < MAX_LOOKS;
        }
        self.next_look = Instant::now() + if missing { SOON } else { LATER };
    }

    /// All names so far, for a new profile.
    pub fn names(&self) -> impl Iterator<Item = (u32, &str)> {
        let named = self.by_number.iter().filter(|(_, thread)| !thread.name.is_empty());
        named.map(|(&number, thread)| (number, thread.name.as_str()))
    }

    /// What `threading` calls the threads that are alive now, by our numbers.
    fn python_names(&mut self) -> Vec<(u32, String)> {
        let memory = self.memory;
        let layout = self.layout;
        let walker = Walker::new(&memory, self.runtime, &layout, Budget::of(MAX_READING));
        let (Some(objects), Ok(interpreters)) = (Objects::new(&memory, &layout), walker.interpreters()) else {
            return Vec::new();
        };
        // `sys.modules` is long: a program without `threading` is not searched all the time.
        let search = Instant::now() >= self.next_search;
        let mut found = Vec::new();
        for interpreter in interpreters {
            if search && !self.active.contains_key(&interpreter.address) {
                self.next_search = Instant::now() + LATER;
                let active = objects.active(interpreter.address);
                self.active.extend(active.map(|active| (interpreter.address, active)));
            }
            let Some(&active) = self.active.get(&interpreter.address) else {
                continue;
            };
            let mut names = objects.names(active, walker.budget());
            for thread in &interpreter.threads {
                let number = self.inner_number(thread).map_or(0, |inner| self.number(inner));
                if number != 0
                    && let Some(name) = names.remove(&thread.thread_id)
                {
                    found.push((number, name.chars().take(MAX_NAME).collect()));
                }
            }
        }
        found
    }

    /// The number of a thread state's thread in its own pid namespace.
    fn inner_number(&self, thread: &RawThread) -> Option<u64> {
        let native = thread.native_id.filter(|number| *number != 0);
        native.or_else(|| {
            let at = thread.thread_id.wrapping_add_signed(i64::from(self.distance?));
            self.memory.read_u32(RemoteAddr(at)).ok().map(u64::from)
        })
    }
}
