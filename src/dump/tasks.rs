//! What the kernel says of each thread of a process: name, state, system call, and whether it has run since.

use pyheap_injector::observe::{self, Doing};

/// A thread, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// Its number in our pid namespace.
    pub tid: i32,
    /// Its number in its own pid namespace: what `gettid()` says there.
    pub inner_tid: i32,
    /// Its name, at most 15 bytes.
    pub name: String,
    /// The letter of its state.
    pub state: char,
    /// So often it has given up a processor.
    switches: u64,
    /// What it does.
    pub doing: Doing,
}

impl Task {
    /// It waits in the kernel, or is stopped.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.doing != Doing::Running && self.state != 'R'
    }

    /// True if the thread, blocked now, has not run since it was `earlier`: whoever runs and blocks again gives up the
    /// processor once more.
    #[must_use]
    pub fn has_slept_since(&self, earlier: &Self) -> bool {
        self.is_blocked() && earlier.is_blocked() && self.switches == earlier.switches
    }
}

/// The threads of `pid` for which `wanted` holds, except those that have ended; empty when the process is gone.
#[must_use]
pub fn list(pid: i32, wanted: impl Fn(i32) -> bool) -> Vec<Task> {
    let mut tids = observe::threads(pid);
    tids.retain(|tid| wanted(*tid));
    tids.sort_unstable();
    tids.into_iter().filter_map(|tid| task(pid, tid)).collect()
}

fn task(pid: i32, tid: i32) -> Option<Task> {
    // First this: for a thread that is about to block, the kernel waits until it is off the processor, and so the
    // counter below holds that, too.
    let doing = observe::doing(pid, tid)?;
    let status = observe::made_file(format!("/proc/{pid}/task/{tid}/status")).ok()?;
    parse(tid, doing, &status)
}

fn parse(tid: i32, doing: Doing, status: &str) -> Option<Task> {
    let field = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim)
    };
    let count = |name| field(name).and_then(|text| text.parse::<u64>().ok());
    let state = field("State")?.chars().next()?;
    if matches!(state, 'Z' | 'X' | 'x') {
        return None;
    }
    let inner = field("NSpid").and_then(|pids| pids.split_whitespace().last()?.parse().ok());
    Some(Task {
        tid,
        inner_tid: inner.unwrap_or(tid),
        name: field("Name").unwrap_or_default().to_owned(),
        state,
        switches: count("voluntary_ctxt_switches")?.wrapping_add(count("nonvoluntary_ctxt_switches")?),
        doing,
    })
}

/// What `/proc` calls the state of a thread, in words.
#[must_use]
pub const fn state_name(state: char) -> &'static str {
    match state {
        'R' => "running",
        'S' => "sleeping",
        'D' => "waiting for a device",
        'T' => "stopped",
        't' => "in a debugger's hands",
        _ => "idle",
    }
}

/// A thread for tests.
#[cfg(test)]
pub(super) fn tests_task(tid: i32, state: char, switches: u64) -> Task {
    let doing = if state == 'R' {
        Doing::Running
    } else {
        Doing::Blocked { sp: 0, pc: 0 }
    };
    Task {
        tid,
        inner_tid: tid,
        name: String::new(),
        state,
        switches,
        doing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tworker 1\nState:\tS (sleeping)\nNSpid:\t4242\t17\n\
                          voluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
    const CALL: Doing = Doing::Blocked { sp: 0, pc: 0 };

    #[test]
    fn the_kernels_words_are_understood() {
        let task = parse(4242, CALL, STATUS).unwrap();
        assert_eq!(
            (task.name.as_str(), task.inner_tid, task.switches),
            ("worker 1", 17, 695)
        );
        assert!(parse(4242, CALL, &STATUS.replace("S (sl", "Z (zo")).is_none());
    }

    #[test]
    fn who_has_run_is_known_by_the_switches() {
        let then = parse(1, CALL, STATUS).unwrap();
        assert!(then.has_slept_since(&then));
        let later = parse(1, CALL, &STATUS.replace("150", "151")).unwrap();
        assert!(!later.has_slept_since(&then));
        let running = parse(1, Doing::Running, STATUS).unwrap();
        assert!(!running.has_slept_since(&then) && !then.has_slept_since(&running));
    }
}
