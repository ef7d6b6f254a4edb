//! Whole stacks, walked from outside by a layout's offsets, against what `sys._current_frames` says: plain calls,
//! generators, comprehensions, coroutines, calls through C, a specialised `__init__`, deep recursion.

use crate::common::interpreters::{self, Python};
use crate::common::python::Running;
use pyheap::attach::interpreter::{self, Interpreter};
use pyheap::frames::layout::{FrameLayout, TopFrame};
use pyheap::frames::{CodeInfo, resolve};
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};
use std::collections::HashMap;

/// Code objects and lines, innermost first.
type Stack = Vec<(u64, u32)>;

fn parse(line: &str) -> (u64, Stack) {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let frames = fields[3..].iter().map(|field| {
        let (code, line) = field.split_once(':').unwrap();
        (code.parse().unwrap(), line.parse().unwrap())
    });
    (fields[1].parse().unwrap(), frames.collect())
}

struct Walker<'a> {
    mem: ProcessMemory,
    found: &'a Interpreter,
}

impl Walker<'_> {
    fn word(&self, base: u64, offset: u64) -> u64 {
        self.mem.read_u64(RemoteAddr(base + offset)).unwrap()
    }

    fn threads(&self) -> HashMap<u64, u64> {
        let layout = &self.found.layout;
        let head = self.word(self.found.runtime.0, layout.runtime.interpreters_main);
        let mut thread = self.word(head, layout.interpreter.threads_head);
        let mut all = HashMap::new();
        while thread != 0 {
            all.insert(self.word(thread, layout.thread.thread_id), thread);
            thread = self.word(thread, layout.thread.next);
        }
        all
    }

    /// The raw instruction number of a frame, as the shim computes it.
    fn raw_instr(&self, frame: u64, code: u64) -> i32 {
        let layout = &self.found.layout;
        match layout.code.code_adaptive {
            None => self
                .mem
                .read_u32(RemoteAddr(frame + layout.frame.instr))
                .unwrap()
                .cast_signed(),
            Some(start) => {
                let start = self.copy_of_bytecode(frame, code).unwrap_or(code + start);
                let distance = self.word(frame, layout.frame.instr).wrapping_sub(start);
                i32::try_from(distance.cast_signed()).unwrap()
            }
        }
    }

    /// Where the thread's own copy of the bytecode begins, if it has one.
    fn copy_of_bytecode(&self, frame: u64, code: u64) -> Option<u64> {
        let layout = &self.found.layout;
        let index = self.mem.read_u32(RemoteAddr(frame + layout.frame.tlbc_index?)).unwrap();
        let copies = self.word(code, layout.code.tlbc?);
        (index != 0).then(|| self.word(copies, 8 + 8 * u64::from(index)))
    }

    fn stack(&self, thread: u64) -> Stack {
        let layout = &self.found.layout;
        let mut frame = match layout.thread.top {
            TopFrame::Direct(offset) => self.word(thread, offset),
            TopFrame::ByCFrame { cframe, current_frame } => self.word(self.word(thread, cframe), current_frame),
        };
        let mut stack = Stack::new();
        let mut innermost = true;
        while frame != 0 {
            let owner = layout
                .frame
                .owner
                .map(|at| self.mem.read_array::<1>(RemoteAddr(frame + at)).unwrap()[0]);
            let is_own = owner
                .zip(layout.frame.owner_c_stack)
                .is_some_and(|(owner, least)| owner >= least);
            if !is_own {
                let code = FrameLayout::untagged(self.word(frame, layout.frame.code));
                let info = CodeInfo::read(&self.mem, RemoteAddr(code), layout).unwrap();
                if let Some(resolved) = resolve(&info, self.raw_instr(frame, code), innermost) {
                    stack.push((code, resolved.line));
                }
                innermost = false;
            }
            frame = self.word(frame, layout.frame.back);
        }
        stack
    }
}

#[test]
fn stacks_are_pythons_own() {
    for python in interpreters::supported() {
        check(&python);
    }
}

fn check(python: &Python) {
    let at = python.path.display();
    let mut target = Running::start(python, "stacks.py", &[]);
    let expected: Vec<_> = target.lines_until("ready").iter().map(|line| parse(line)).collect();
    assert_eq!(expected.len(), 9, "{at}");
    let found = interpreter::find(target.pid()).unwrap();
    let mem = ProcessMemory::new(target.pid());
    let walker = Walker { mem, found: &found };
    let threads = walker.threads();
    let mut frames = 0;
    for (ident, stack) in expected {
        let thread = threads[&ident];
        assert_eq!(walker.stack(thread), stack, "{at}");
        frames += stack.len();
        if let Some(offset) = found.layout.thread.native_thread_id {
            let tid = walker.word(thread, offset);
            let task = format!("/proc/{}/task/{tid}", target.pid());
            assert!(std::path::Path::new(&task).exists(), "{at}: {task}");
        }
    }
    assert!(frames > 230, "{at}: {frames} frames");
}
