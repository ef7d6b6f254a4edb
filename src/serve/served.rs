//! The processes that are served, and what is known of each. Written by the thread that records it, read by whoever
//! answers requests.

use super::heap::Heap;
use crate::attach::process::ProcessId;
use crate::profile::facts::{Facts, Losses, MemorySample};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Locks; a thread that panicked while it held the lock leaves numbers, not broken pointers.
pub fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the hooks in a process have seen so far.
#[derive(Debug, Clone)]
pub struct Attached {
    /// Since when.
    pub since: SystemTime,
    /// The same by the clock that is never set.
    pub begun: Instant,
    /// Stacks and sums.
    pub heap: Arc<Mutex<Heap>>,
    /// Of the process.
    pub facts: Arc<Facts>,
    /// What was lost until the last second.
    pub losses: Losses,
    /// Its memory a second ago.
    pub memory: Option<MemorySample>,
    /// Which attach to this process it is, from 1.
    pub times: u64,
}

/// Whether there are hooks in a process.
#[derive(Debug, Default)]
struct State {
    attached: Option<Attached>,
    /// Why there are none, in words, where somebody has tried.
    why_not: Option<String>,
    /// Somebody waits for them.
    is_wanted: bool,
    /// When somebody has last got an answer.
    asked: Option<Instant>,
    /// How many wait for theirs.
    asking: usize,
    times: u64,
}

/// A process that is served.
#[derive(Debug)]
pub struct Served {
    /// Which one.
    pub id: ProcessId,
    /// Its command line.
    pub command: Vec<String>,
    state: Mutex<State>,
}

impl Served {
    /// A process that is to be attached to.
    #[must_use]
    pub fn new(id: ProcessId, command: Vec<String>) -> Self {
        let state = State {
            is_wanted: true,
            asked: Some(Instant::now()),
            ..State::default()
        };
        Self {
            id,
            command,
            state: Mutex::new(state),
        }
    }

    /// Somebody asks for a profile, until what comes back is dropped.
    #[must_use]
    pub fn ask(self: &Arc<Self>) -> Asking {
        let mut state = lock(&self.state);
        state.asking += 1;
        state.is_wanted |= state.attached.is_none();
        Asking(Arc::clone(self))
    }

    /// For how long nobody has asked.
    #[must_use]
    pub fn idle(&self) -> Duration {
        let state = lock(&self.state);
        match state.asked {
            _ if state.asking > 0 => Duration::ZERO,
            Some(asked) => asked.elapsed(),
            None => Duration::MAX,
        }
    }

    /// Whether somebody waits for an attach.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        lock(&self.state).is_wanted
    }

    /// What was seen so far, if there are hooks.
    #[must_use]
    pub fn attached(&self) -> Option<Attached> {
        lock(&self.state).attached.clone()
    }

    /// Why there are no hooks.
    #[must_use]
    pub fn why_not(&self) -> Option<String> {
        lock(&self.state).why_not.clone()
    }

    /// The hooks are in place.
    pub fn attach(&self, heap: Arc<Mutex<Heap>>, facts: Facts) {
        let mut state = lock(&self.state);
        state.times += 1;
        state.attached = Some(Attached {
            since: SystemTime::now(),
            begun: Instant::now(),
            heap,
            facts: Arc::new(facts),
            losses: Losses::default(),
            memory: None,
            times: state.times,
        });
        state.is_wanted = false;
        state.why_not = None;
    }

    /// What is due every second.
    pub fn note(&self, losses: Losses, memory: Option<MemorySample>) {
        if let Some(attached) = &mut lock(&self.state).attached {
            attached.losses = losses;
            attached.memory = memory;
        }
    }

    /// The hooks are about to be taken out, or could not be put there. Whoever asks at this moment waits for others if they
    /// `may_return`.
    pub fn detach(&self, why: &str, may_return: bool) {
        let mut state = lock(&self.state);
        state.attached = None;
        state.is_wanted = may_return && state.asking > 0;
        state.why_not = Some(why.to_owned());
    }
}

/// Somebody waits for a profile of a process.
#[derive(Debug)]
pub struct Asking(Arc<Served>);

impl Drop for Asking {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.asking = state.asking.saturating_sub(1);
        state.asked = Some(Instant::now());
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct Set {
    served: Mutex<BTreeMap<i32, Arc<Served>>>,
    /// Answers by status.
    answers: Mutex<BTreeMap<u16, u64>>,
    /// Open connections.
    pub connections: AtomicU64,
    /// Requests that are being answered.
    pub in_flight: AtomicU64,
}

impl Set {
    /// Those that are served now, in the order of their pids.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Served>> {
        lock(&self.served).values().cloned().collect()
    }

    /// The one of this number.
    #[must_use]
    pub fn of(&self, pid: i32) -> Option<Arc<Served>> {
        lock(&self.served).get(&pid).cloned()
    }

    /// Adds one.
    pub fn add(&self, served: Arc<Served>) {
        lock(&self.served).insert(served.id.pid, served);
    }

    /// Takes one away, unless its number belongs to another one by now.
    pub fn remove(&self, id: ProcessId) {
        let mut all = lock(&self.served);
        if all.get(&id.pid).is_some_and(|served| served.id == id) {
            all.remove(&id.pid);
        }
    }

    /// Counts an answer. There are only so many statuses.
    pub fn count(&self, status: u16) {
        *lock(&self.answers).entry(status).or_default() += 1;
    }

    /// Answers so far, by status.
    #[must_use]
    pub fn answers(&self) -> Vec<(u16, u64)> {
        lock(&self.answers).iter().map(|(a, b)| (*a, *b)).collect()
    }

    /// How many connections are open.
    #[must_use]
    pub fn open(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_asked_for_is_not_idle_and_who_is_detached_becomes_wanted() {
        let id = ProcessId { pid: 7, start_time: 1 };
        let served = Arc::new(Served::new(id, Vec::new()));
        assert!(served.is_wanted() && served.attached().is_none());
        served.attach(Arc::new(Mutex::new(Heap::new(1))), Facts::default());
        assert!(!served.is_wanted() && served.attached().is_some_and(|attached| attached.times == 1));
        let (long, short) = (served.ask(), served.ask());
        drop(short);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(served.idle(), Duration::ZERO, "somebody waits still");
        assert!(!served.is_wanted());
        drop(long);
        std::thread::sleep(Duration::from_millis(2));
        assert!(served.idle() >= Duration::from_millis(2));
        served.detach("nobody asked", true);
        assert_eq!(
            (served.is_wanted(), served.why_not()),
            (false, Some("nobody asked".to_owned()))
        );
        let _asking = served.ask();
        assert!(served.is_wanted());
        served.attach(Arc::new(Mutex::new(Heap::new(1))), Facts::default());
        assert!(served.attached().is_some_and(|attached| attached.times == 2));
        served.detach("somebody asked a moment too late", true);
        assert!(served.is_wanted());
        served.detach("it is gone", false);
        assert!(!served.is_wanted());
    }

    #[test]
    fn a_number_that_was_given_again_is_not_taken_away() {
        let set = Set::default();
        let (old, new) = (ProcessId { pid: 7, start_time: 1 }, ProcessId { pid: 7, start_time: 2 });
        set.add(Arc::new(Served::new(new, Vec::new())));
        set.remove(old);
        assert!(set.of(7).is_some());
        set.remove(new);
        assert!(set.all().is_empty());
    }
}
