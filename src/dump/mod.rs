//! The Python stacks of all threads of a process, read from outside: no injection, nothing written, the same reader for a
//! process that runs and for a core file.
//!
//! [`live`] decides who must stand still for how long, [`tasks`] asks the kernel about threads, [`walk`] follows CPython's
//! structures, [`objects`] finds the threads' names, [`native`] those of C functions, [`pages`] makes the reads few, [`core`] is memory out of a file, and
//! [`render`] is for people.
//!
//! What it refuses to do: show a stack that was never there. A stack that could not be read while its thread stood still
//! is marked, and so is one that ends before its outermost frame.

pub mod budget;
pub mod core;
#[cfg(test)]
pub(crate) mod image;
pub mod live;
pub mod native;
pub mod objects;
pub mod pages;
pub mod render;
pub mod tasks;
pub mod types;
pub mod walk;

use crate::attach::Interpreter;
use crate::frames::CodeInfo;
use budget::Budget;
use objects::{Active, Objects};
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use serde::Serialize;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use walk::{Frame, KEPT_FRAMES, RawInterpreter, RawStack, RawThread, Walker, resolved};

/// Reading ends after so much processor time, with what there is until then. A thousand threads take some 10 ms.
const MAX_READING: Duration = Duration::from_secs(1);

/// How the memory was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// While nothing ran.
    Stopped,
    /// While everything ran.
    Nonblocking,
    /// Out of a core file.
    Core,
}

/// All that a dump tells.
#[derive(Debug, Clone, Serialize)]
pub struct Dump {
    /// The process.
    pub pid: i32,
    /// Its command line.
    pub command: String,
    /// The version of its Python.
    pub python: String,
    /// How it was read.
    pub mode: Mode,
    /// Every stack was read while its thread stood still.
    pub consistent: bool,
    /// For so long threads were kept from running; 0 when none had to be.
    pub stopped_seconds: f64,
    /// So many threads were stopped for it.
    pub stopped_threads: usize,
    /// The interpreters, the main one first.
    pub interpreters: Vec<InterpreterDump>,
    /// Threads that Python knows nothing of.
    pub other_threads: Vec<OtherThread>,
}

/// One interpreter.
#[derive(Debug, Clone, Serialize)]
pub struct InterpreterDump {
    /// 0 is the main one.
    pub id: i64,
    /// Why there may be more threads than these.
    pub incomplete: Option<&'static str>,
    /// Its threads, oldest first.
    pub threads: Vec<ThreadDump>,
}

/// One thread.
#[derive(Debug, Clone, Serialize)]
pub struct ThreadDump {
    /// Its number, as `ps -L` shows it; `None` where it could not be found out.
    pub tid: Option<i32>,
    /// `threading.get_ident()`, which is `pthread_self()`.
    pub ident: u64,
    /// What `threading` calls it.
    pub name: Option<String>,
    /// What the kernel calls it.
    pub os_name: Option<String>,
    /// It holds the GIL of its interpreter.
    pub holds_gil: bool,
    /// It waits for that GIL.
    pub waits_for_gil: bool,
    /// What it does, in a word; `None` where it is not known.
    pub state: Option<&'static str>,
    /// The system call that it waits in.
    pub system_call: Option<String>,
    /// The C function that it is in, or at least the library; `None` where that is not known.
    pub native: Option<native::Native>,
    /// This thread has a state above already, of another interpreter as a rule. Up to 3.12 a state may also be run by
    /// another thread than the one that made it, which is the one that is named here: what it does is not known.
    pub second_state: bool,
    /// The stack was read while the thread may have run: it may never have been like this.
    pub may_be_torn: bool,
    /// Why the stack ends before its outermost frame.
    pub incomplete: Option<&'static str>,
    /// The frames, innermost first.
    pub frames: Vec<Frame>,
    /// In the middle of a very deep stack, frames are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted: Option<Omitted>,
}

impl ThreadDump {
    fn without_what_is_unknown(mut self) -> Self {
        if self.second_state {
            (self.state, self.system_call, self.waits_for_gil) = (None, None, false);
        }
        self
    }
}

/// Frames that are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Omitted {
    /// After so many of the frames.
    pub after: usize,
    /// So many.
    pub frames: usize,
}

/// A thread without Python.
#[derive(Debug, Clone, Serialize)]
pub struct OtherThread {
    /// Its number.
    pub tid: i32,
    /// What the kernel calls it.
    pub os_name: Option<String>,
    /// What it does, in a word.
    pub state: Option<&'static str>,
    /// The system call that it waits in.
    pub system_call: Option<String>,
    /// The C function that it is in, or at least the library; `None` where that is not known.
    pub native: Option<native::Native>,
}

/// What is known of a thread from the kernel or a core file.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Its number in our pid namespace.
    pub tid: i32,
    /// Its number in its own.
    pub inner_tid: i32,
    /// What the kernel calls it.
    pub name: Option<String>,
    /// What it does, in a word.
    pub state: Option<&'static str>,
    /// The system call that it waits in, and its first argument.
    pub call: Option<(u64, u64)>,
    /// Its thread pointer.
    pub thread_pointer: Option<u64>,
    /// It may have run while it was read.
    pub may_be_torn: bool,
}

/// Why there is no dump.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// The list of interpreters cannot be read.
    #[error("the interpreters of process {pid} cannot be read")]
    Memory {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: MemoryError,
    },
    /// The threads could not be stopped.
    #[error("the threads of process {pid} cannot be stopped; --nonblocking reads without stopping them")]
    Stop {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: pyheap_injector::hijack::HijackError,
    },
    /// The process ended.
    #[error("process {pid} ended before it was read")]
    Gone {
        /// The process.
        pid: i32,
    },
}

/// One thread with its frames, raw.
struct ReadThread {
    raw: RawThread,
    stack: RawStack,
    /// The code objects of the frames.
    codes: Vec<Option<Rc<CodeInfo>>>,
    torn: bool,
}

/// One interpreter, read.
struct ReadInterpreter {
    raw: RawInterpreter,
    names: HashMap<u64, String>,
    threads: Vec<ReadThread>,
}

/// Where the names of threads are, by interpreter. Found before anything stands still, since `sys.modules` is long.
fn find_names(mem: &impl RemoteMemory, found: &Interpreter) -> HashMap<RemoteAddr, Active> {
    let walker = Walker::new(mem, found.runtime, &found.layout, Budget::of(MAX_READING));
    let Some(objects) = Objects::new(mem, &found.layout) else {
        return HashMap::new();
    };
    let interpreters = walker.interpreters().unwrap_or_default();
    let place = |raw: &RawInterpreter| Some((raw.address, objects.active(raw.address)?));
    interpreters.iter().filter_map(place).collect()
}

/// Reads everything that must be read while nothing changes; the rest can be worked out of it later.
fn read_all(
    mem: &impl RemoteMemory,
    found: &Interpreter,
    active: &HashMap<RemoteAddr, Active>,
) -> Result<Vec<ReadInterpreter>, MemoryError> {
    let mut walker = Walker::new(mem, found.runtime, &found.layout, Budget::of(MAX_READING));
    let objects = Objects::new(mem, &found.layout);
    let mut interpreters = Vec::new();
    for raw in walker.interpreters()? {
        let read = |raw: &RawThread| {
            let stack = walker.stack(raw.address);
            ReadThread {
                raw: raw.clone(),
                codes: walker.codes(&stack),
                stack,
                torn: false,
            }
        };
        let threads = raw.threads.iter().map(read).collect();
        let names = match (&objects, active.get(&raw.address)) {
            (Some(objects), Some(active)) => objects.names(*active, walker.budget()),
            _ => HashMap::new(),
        };
        interpreters.push(ReadInterpreter { raw, names, threads });
    }
    Ok(interpreters)
}

/// Puts what was read and what is known of the threads together. `mem` is asked for thread numbers only.
fn assemble(reading: &[ReadInterpreter], mem: &impl RemoteMemory, seen: &[Seen]) -> Parts {
    let mut python = Vec::new();
    let interpreters = reading.iter().map(|interpreter| {
        let threads = interpreter.threads.iter().map(|thread| {
            let task = find_task(mem, &thread.raw, seen);
            let second = task.is_some_and(|task| python.contains(&task.tid));
            python.extend(task.map(|task| task.tid));
            ThreadDump {
                second_state: second,
                ..thread_dump(interpreter, thread, task)
            }
            .without_what_is_unknown()
        });
        InterpreterDump {
            id: interpreter.raw.id,
            incomplete: interpreter.raw.broken,
            threads: threads.collect(),
        }
    });
    let interpreters = interpreters.collect();
    let others = seen.iter().filter(|task| !python.contains(&task.tid));
    let others = others.map(|task| OtherThread {
        tid: task.tid,
        os_name: task.name.clone(),
        state: task.state,
        system_call: task.call.map(call_name),
        native: None,
    });
    Parts {
        others: others.collect(),
        interpreters,
    }
}

struct Parts {
    interpreters: Vec<InterpreterDump>,
    others: Vec<OtherThread>,
}

fn thread_dump(interpreter: &ReadInterpreter, thread: &ReadThread, task: Option<&Seen>) -> ThreadDump {
    let stack = &thread.stack;
    let both = || stack.frames.iter().zip(&thread.codes);
    let mut frames = resolved(both().take(KEPT_FRAMES), true);
    let after = frames.len();
    frames.extend(resolved(both().skip(KEPT_FRAMES), false));
    let call = task.and_then(|task| task.call);
    ThreadDump {
        tid: task.map(|task| task.tid),
        ident: thread.raw.thread_id,
        name: interpreter.names.get(&thread.raw.thread_id).cloned(),
        os_name: task.and_then(|task| task.name.clone()),
        holds_gil: thread.raw.holds_gil,
        waits_for_gil: call.is_some_and(|call| waits_for(&interpreter.raw.gil, call)),
        state: task.and_then(|task| task.state),
        system_call: call.map(call_name),
        native: None,
        second_state: false,
        may_be_torn: thread.torn || task.is_some_and(|task| task.may_be_torn),
        incomplete: stack.broken,
        frames,
        omitted: (stack.omitted > 0).then_some(Omitted {
            after,
            frames: stack.omitted,
        }),
    }
}

/// True for a `futex` call on a word of the GIL.
fn waits_for(gil: &Range<u64>, (number, word): (u64, u64)) -> bool {
    number == libc::SYS_futex.unsigned_abs() && gil.contains(&word)
}

fn call_name((number, _): (u64, u64)) -> String {
    let known = usize::try_from(number).ok().and_then(syscalls::Sysno::new);
    known.map_or_else(|| format!("system call {number}"), |call| call.name().to_owned())
}

/// The thread that a thread state belongs to: by the number that the state has (from 3.11), else by the thread pointer
/// where the thread was stopped, else by the number that the C library keeps in the thread's control block.
fn find_task<'a>(mem: &impl RemoteMemory, thread: &RawThread, seen: &'a [Seen]) -> Option<&'a Seen> {
    /// `pthread_t.tid`: glibc, musl. On aarch64 the control block's own part is smaller.
    const TID_AT: [u64; 2] = if cfg!(target_arch = "x86_64") {
        [720, 48]
    } else {
        [208, 32]
    };
    let by_number = |number: u64| seen.iter().find(|task| u64::try_from(task.inner_tid) == Ok(number));
    if thread.thread_id == 0 {
        return None;
    }
    let by_pointer = || seen.iter().find(|task| task.thread_pointer == Some(thread.thread_id));
    let by_block = || {
        let block = RemoteAddr(thread.thread_id);
        TID_AT.iter().find_map(|offset| {
            let number = mem.read_u32(block.checked_add(*offset)?).ok()?;
            by_number(u64::from(number))
        })
    };
    let native = thread.native_id.filter(|number| *number != 0);
    native.and_then(by_number).or_else(by_pointer).or_else(by_block)
}
