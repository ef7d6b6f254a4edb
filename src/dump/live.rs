//! A process that runs: who must stand still, was it so, and once more if not.
//!
//! Only threads on a processor are stopped at first: one that waits in the kernel changes nothing, and the count of its
//! context switches tells afterwards whether it has waited all the time. If one of them woke up, it is tried again with
//! everything stopped that bears it; calls that would end early (`epoll_wait`), or short (`write`), are never interrupted.
//! So a process in which nothing runs is read without being touched at all.

use super::budget::Budget;
use super::pages::Pages;
use super::tasks::{self, Task, state_name};
use super::walk::{RawThread, Walker};
use super::{
    Dump, DumpError, MAX_READING, Mode, ReadInterpreter, ReadThread, Seen, assemble, find_names, find_task, native,
    read_all,
};
use crate::attach::Target;
use crate::dump::objects::Objects;
use pyheap_injector::freeze::{self, At, Frozen};
use pyheap_injector::hijack::HijackError;
use pyheap_injector::observe::Doing;
use pyheap_injector::{ProcessMemory, RemoteMemory};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// So often threads that woke up meanwhile make us try again.
const MAX_ATTEMPTS: usize = 6;
/// So often a thread that runs is read, until two readings agree.
const MAX_READINGS: usize = 8;
/// Characters of a command line.
const COMMAND_CHARS: usize = 200;

/// Who stood still, and for how long.
#[derive(Default)]
struct Stop {
    threads: HashMap<i32, Option<At>>,
    held: Duration,
    /// They stood still until they were let go.
    sound: bool,
}

/// Dumps a process whose memory is consistent while it is read.
///
/// # Errors
/// See [`DumpError`].
pub fn stopped(target: &Target) -> Result<Dump, DumpError> {
    let pid = target.facts.id.pid;
    let found = &target.interpreter;
    let mem = ProcessMemory::new(pid);
    let active = find_names(&Pages::new(mem), found);
    let mut attempt = 1;
    let mut longest = Duration::ZERO;
    loop {
        let before = tasks::list(pid, |_| true);
        if before.is_empty() {
            return Err(DumpError::Gone { pid });
        }
        let frozen = stop(pid, &before, attempt)?;
        let pages = Pages::new(mem);
        let reading = read_all(&pages, found, &active);
        let (stop, after) = finish(pid, frozen);
        longest = longest.max(stop.held);
        let ran = who_ran(&before, &after, &stop);
        let sound = ran.is_empty() && stop.sound;
        match reading {
            Ok(reading) if sound || attempt == MAX_ATTEMPTS => {
                let seen: Vec<Seen> = before
                    .iter()
                    .map(|task| {
                        let at = stop.threads.get(&task.tid).copied().flatten();
                        Seen {
                            may_be_torn: !stop.sound || ran.contains(&task.tid),
                            ..seen(task, at)
                        }
                    })
                    .collect();
                let mut dump = dump(target, Mode::Stopped, &reading, &pages, &seen);
                let instruction = |task: &Task| {
                    let stopped = stop.threads.get(&task.tid).copied().flatten();
                    let at = stopped.map(|at| at.instruction).or_else(|| instruction(task))?;
                    Some((task.tid, at))
                };
                native::tell(&mut dump, &before.iter().filter_map(instruction).collect());
                if !sound {
                    // A thread that ran may have started or ended others, whose stacks nobody vouches for.
                    let known: HashSet<i32> = seen.iter().map(|task| task.tid).collect();
                    let threads = dump.interpreters.iter_mut().flat_map(|i| &mut i.threads);
                    threads.for_each(|t| t.may_be_torn |= t.tid.is_none_or(|tid| !known.contains(&tid)));
                }
                dump.consistent = sound;
                dump.stopped_seconds = longest.as_secs_f64();
                dump.stopped_threads = stop.threads.len();
                return Ok(dump);
            }
            Err(source) if attempt == MAX_ATTEMPTS => return Err(DumpError::Memory { pid, source }),
            _ => attempt += 1,
        }
    }
}

/// Stops who must be stopped; `None` when that is nobody.
fn stop(pid: i32, before: &[Task], attempt: usize) -> Result<Option<Frozen>, DumpError> {
    let spared = |task: &&Task| task.is_blocked() && (attempt == 1 || freeze::unfit(task.doing));
    let mut spare: Vec<i32> = before.iter().filter(spared).map(|task| task.tid).collect();
    spare.sort_unstable();
    if spare.len() == before.len() {
        return Ok(None);
    }
    match freeze::freeze(pid, &spare) {
        Ok(frozen) => Ok(Some(frozen)),
        Err(HijackError::Gone { .. }) => Err(DumpError::Gone { pid }),
        Err(source) => Err(DumpError::Stop { pid, source }),
    }
}

/// Looks at the threads that were spared, then lets go of the others.
fn finish(pid: i32, frozen: Option<Frozen>) -> (Stop, Vec<Task>) {
    let Some(frozen) = frozen else {
        let stop = Stop {
            sound: true,
            ..Stop::default()
        };
        return (stop, tasks::list(pid, |_| true));
    };
    let threads: HashMap<i32, Option<At>> = frozen.threads().collect();
    let after = tasks::list(pid, |tid| !threads.contains_key(&tid));
    let held = frozen.release();
    let stop = Stop {
        threads,
        sound: held.is_some(),
        held: held.unwrap_or(freeze::MAX_HOLD),
    };
    (stop, after)
}

/// The threads that may have run between two looks: those that were not held, and that are new, gone, or not where they were.
fn who_ran(before: &[Task], after: &[Task], stop: &Stop) -> HashSet<i32> {
    let free = |task: &&Task| !stop.threads.contains_key(&task.tid);
    let find = |list: &[Task], tid: i32| list.iter().find(|task| task.tid == tid).cloned();
    let slept = |task: &Task, then: Option<Task>| then.is_some_and(|then| task.has_slept_since(&then));
    let new = after
        .iter()
        .filter(free)
        .filter(|task| !slept(task, find(before, task.tid)));
    let gone = before
        .iter()
        .filter(free)
        .filter(|task| find(after, task.tid).is_none());
    new.chain(gone).map(|task| task.tid).collect()
}

/// What is known of a thread; `at`: where it was when it was stopped.
fn seen(task: &Task, at: Option<At>) -> Seen {
    let (state, call) = match (at, task.doing) {
        (Some(At { call: None, .. }), _) => (state_name('R'), None),
        (
            Some(At {
                call: Some(number),
                first_argument,
                ..
            }),
            _,
        ) => (state_name('S'), Some((number, first_argument))),
        (None, Doing::Call { number, args, .. }) => (state_name(task.state), Some((number, args[0]))),
        (None, _) => (state_name(task.state), None),
    };
    Seen {
        tid: task.tid,
        inner_tid: task.inner_tid,
        name: Some(task.name.clone()),
        state: Some(state),
        call,
        thread_pointer: at.map(|at| at.thread_pointer),
        may_be_torn: false,
    }
}

/// Where a thread goes on when what it waits for has come; `None` for one that runs.
const fn instruction(task: &Task) -> Option<u64> {
    match task.doing {
        Doing::Call { pc, .. } | Doing::Blocked { pc, .. } => Some(pc),
        Doing::Running => None,
    }
}

/// Dumps a process without stopping anything. Each thread is read until two readings agree or the kernel says that it has
/// waited all the time; one that never does is marked.
///
/// # Errors
/// See [`DumpError`].
pub fn nonblocking(target: &Target) -> Result<Dump, DumpError> {
    let pid = target.facts.id.pid;
    let found = &target.interpreter;
    let mem = ProcessMemory::new(pid);
    let active = find_names(&mem, found);
    let before = tasks::list(pid, |_| true);
    let mut walker = Walker::new(&mem, found.runtime, &found.layout, Budget::of(MAX_READING));
    let objects = Objects::new(&mem, &found.layout);
    let list = walker
        .interpreters()
        .map_err(|source| DumpError::Memory { pid, source })?;
    let mut interpreters = Vec::new();
    for raw in list {
        let threads = raw
            .threads
            .iter()
            .map(|thread| read_until_it_agrees(&mut walker, thread));
        let threads: Vec<ReadThread> = threads.collect();
        let names = objects.as_ref().zip(active.get(&raw.address));
        let names = names.map_or_else(HashMap::new, |(objects, active)| {
            objects.names(*active, walker.budget())
        });
        interpreters.push(ReadInterpreter { raw, names, threads });
    }
    let after = tasks::list(pid, |_| true);
    if after.is_empty() {
        return Err(DumpError::Gone { pid });
    }
    let slept = who_slept(&before, &after);
    let seen: Vec<Seen> = after.iter().map(|task| seen(task, None)).collect();
    for thread in interpreters.iter_mut().flat_map(|i| &mut i.threads) {
        let task = find_task(&mem, &thread.raw, &seen);
        thread.torn &= task.is_none_or(|task| !slept.contains(&task.tid));
    }
    let mut dump = dump(target, Mode::Nonblocking, &interpreters, &mem, &seen);
    let instruction = |task: &Task| Some((task.tid, instruction(task)?));
    native::tell(&mut dump, &after.iter().filter_map(instruction).collect());
    let threads = || dump.interpreters.iter().flat_map(|i| &i.threads);
    dump.consistent = !threads().any(|thread| thread.may_be_torn);
    Ok(dump)
}

fn who_slept(before: &[Task], after: &[Task]) -> HashSet<i32> {
    let slept = |task: &&Task| {
        before
            .iter()
            .any(|then| then.tid == task.tid && task.has_slept_since(then))
    };
    after.iter().filter(slept).map(|task| task.tid).collect()
}

fn read_until_it_agrees<M: RemoteMemory>(walker: &mut Walker<'_, M>, raw: &RawThread) -> ReadThread {
    let mut stack = walker.stack(raw.address);
    let mut reading = 0;
    loop {
        reading += 1;
        // Between two equal readings: what they name was alive then. Others may be at the addresses that were read before.
        walker.forget_codes();
        let codes = walker.codes(&stack);
        let again = walker.stack(raw.address);
        let torn = again != stack;
        if !torn || reading == MAX_READINGS {
            return ReadThread {
                raw: raw.clone(),
                stack,
                codes,
                torn,
            };
        }
        stack = again;
    }
}

fn dump(target: &Target, mode: Mode, reading: &[ReadInterpreter], mem: &impl RemoteMemory, seen: &[Seen]) -> Dump {
    let parts = assemble(reading, mem, seen);
    Dump {
        pid: target.facts.id.pid,
        command: target.facts.short_command(COMMAND_CHARS),
        python: target.interpreter.version.to_string(),
        mode,
        consistent: true,
        stopped_seconds: 0.0,
        stopped_threads: 0,
        interpreters: parts.interpreters,
        other_threads: parts.others,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(tid: i32, state: char) -> Task {
        tasks::tests_task(tid, state, 7)
    }

    #[test]
    fn who_was_not_held_must_have_slept() {
        let before = [task(1, 'S'), task(2, 'R'), task(3, 'S')];
        let mut stop = Stop::default();
        stop.threads.insert(2, None);
        let same = [task(1, 'S'), task(3, 'S')];
        assert!(who_ran(&before, &same, &stop).is_empty());
        let woke = [tasks::tests_task(1, 'S', 8), task(3, 'S')];
        assert_eq!(who_ran(&before, &woke, &stop), HashSet::from([1]));
        let ended_and_new = [task(1, 'S'), task(4, 'S')];
        assert_eq!(who_ran(&before, &ended_and_new, &stop), HashSet::from([3, 4]));
        assert_eq!(
            who_ran(&before, &[task(1, 'R'), task(3, 'S')], &stop),
            HashSet::from([1])
        );
    }
}
