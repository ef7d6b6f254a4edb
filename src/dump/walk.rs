//! From `_PyRuntime` to the frames of all threads of all interpreters, by a layout's offsets.
//!
//! Everything that is read is hostile: lists are followed to named limits, and until a budget is spent; a list that bites its
//! own tail ends at the limit. What could not be followed is marked, and what was read until then is kept.

use super::budget::Budget;
use crate::frames::layout::{GilPlace, Layout, ObjectLayout, TopFrame};
use crate::frames::{CodeError, CodeInfo, resolve, text};
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

/// Interpreters of one process.
const MAX_INTERPRETERS: usize = 1024;
/// Threads of all interpreters together.
const MAX_THREADS: usize = 65_536;
/// Frames of one stack that are followed: the default recursion limit is 1,000.
const MAX_WALK: usize = 1 << 18;
/// Of a deeper stack, so many innermost frames and as many outermost ones are kept.
pub const KEPT_FRAMES: usize = 1024;

/// A frame as it is in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawFrame {
    /// The code object.
    pub code: RemoteAddr,
    /// The instruction, as [`CodeInfo::line_of`] takes it.
    pub instr: i32,
}

/// The frames of one thread, innermost first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RawStack {
    /// At most twice [`KEPT_FRAMES`].
    pub frames: Vec<RawFrame>,
    /// So many frames are left out after the first [`KEPT_FRAMES`].
    pub omitted: usize,
    /// Why the stack ends before its outermost frame.
    pub broken: Option<&'static str>,
}

/// A thread state.
#[derive(Debug, Clone)]
pub struct RawThread {
    /// The `PyThreadState`.
    pub address: RemoteAddr,
    /// `pthread_self()` of the thread; 0 when no thread belongs to the state yet.
    pub thread_id: u64,
    /// `gettid()` of the thread, in its own pid namespace, from 3.11.
    pub native_id: Option<u64>,
    /// It holds the GIL of its interpreter.
    pub holds_gil: bool,
}

/// An interpreter.
#[derive(Debug, Clone)]
pub struct RawInterpreter {
    /// The `PyInterpreterState`.
    pub address: RemoteAddr,
    /// `id`; 0 is the main interpreter.
    pub id: i64,
    /// The range of memory of its GIL.
    pub gil: std::ops::Range<u64>,
    /// Its threads, oldest first.
    pub threads: Vec<RawThread>,
    /// Why the list of threads is not complete.
    pub broken: Option<&'static str>,
}

/// A function's place: what a frame becomes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Frame {
    /// The qualified name from 3.11, else the name.
    pub function: String,
    /// The file.
    pub file: String,
    /// The line.
    pub line: u32,
}

/// Follows the structures of one process.
pub struct Walker<'a, M> {
    mem: &'a M,
    runtime: RemoteAddr,
    layout: &'a Layout,
    objects: Option<ObjectLayout>,
    budget: Budget,
    codes: HashMap<RemoteAddr, Option<Rc<CodeInfo>>>,
    code_type: Option<RemoteAddr>,
}

fn at(base: RemoteAddr, offset: u64) -> RemoteAddr {
    // A sum that wraps is null, which cannot be read.
    base.checked_add(offset).unwrap_or(RemoteAddr::NULL)
}

impl<'a, M: RemoteMemory> Walker<'a, M> {
    /// Walks from `runtime`, the address of `_PyRuntime`, until `budget` is spent.
    pub fn new(mem: &'a M, runtime: RemoteAddr, layout: &'a Layout, budget: Budget) -> Self {
        Self {
            mem,
            runtime,
            layout,
            objects: ObjectLayout::of(layout),
            budget,
            codes: HashMap::new(),
            code_type: None,
        }
    }

    /// What may still be spent.
    pub const fn budget(&self) -> Budget {
        self.budget
    }

    fn pointer(&self, base: RemoteAddr, offset: u64) -> Result<RemoteAddr, MemoryError> {
        self.mem.read_ptr(at(base, offset))
    }

    /// All interpreters, the main one first.
    ///
    /// # Errors
    /// When the list of interpreters cannot be read.
    pub fn interpreters(&self) -> Result<Vec<RawInterpreter>, MemoryError> {
        let layout = &self.layout.interpreter;
        let mut address = self.pointer(self.runtime, self.layout.runtime.interpreters_head)?;
        let mut all = Vec::new();
        let mut seen = HashSet::new();
        let mut threads_left = MAX_THREADS;
        while !address.is_null() && seen.insert(address) && all.len() < MAX_INTERPRETERS {
            let id = self.mem.read_u64(at(address, layout.id))?.cast_signed();
            let (gil, holder) = self.gil(address);
            let (mut threads, broken) = self.threads(address, holder, &mut threads_left);
            // The newest comes first in memory.
            threads.reverse();
            all.push(RawInterpreter {
                address,
                id,
                gil,
                threads,
                broken,
            });
            address = self.pointer(address, layout.next)?;
        }
        all.reverse();
        Ok(all)
    }

    /// Where the interpreter's GIL is, and the thread state that holds it.
    fn gil(&self, interpreter: RemoteAddr) -> (std::ops::Range<u64>, Option<RemoteAddr>) {
        let Some(objects) = &self.objects else {
            return (0..0, None);
        };
        let gil = match objects.gil {
            GilPlace::Runtime(offset) => Ok(at(self.runtime, offset)),
            GilPlace::Interpreter(offset) => self.pointer(interpreter, offset),
        };
        let gil = gil.unwrap_or(RemoteAddr::NULL);
        if gil.is_null() {
            return (0..0, None);
        }
        let holder = match self.layout.runtime.tstate_current {
            // Up to 3.11 the current thread state is the one that holds the GIL.
            Some(offset) => self.pointer(self.runtime, offset).ok(),
            None => match self.mem.read_u32(at(gil, objects.gil_locked)) {
                Ok(1) => self.pointer(gil, objects.gil_last_holder).ok(),
                _ => None,
            },
        };
        let range = gil.0..gil.0.saturating_add(objects.gil_size);
        (range, holder.filter(|holder| !holder.is_null()))
    }

    /// The threads of `interpreter`, newest first, and why there may be more.
    fn threads(
        &self,
        interpreter: RemoteAddr,
        holder: Option<RemoteAddr>,
        left: &mut usize,
    ) -> (Vec<RawThread>, Option<&'static str>) {
        let layout = &self.layout.thread;
        let mut all = Vec::new();
        let mut seen = HashSet::new();
        let mut next = self.pointer(interpreter, self.layout.interpreter.threads_head);
        loop {
            let address = match next {
                Ok(address) if address.is_null() => return (all, None),
                Ok(address) => address,
                Err(_) => return (all, Some("the list of threads cannot be read")),
            };
            if *left == 0 || !seen.insert(address) {
                return (all, Some("the list of threads has no end"));
            }
            if self.budget.is_spent() {
                return (all, Some("the list of threads takes too long"));
            }
            *left -= 1;
            // A state of another interpreter: a list that is being changed, or damaged.
            if self.pointer(address, layout.interp).ok() != Some(interpreter) {
                return (all, Some("the list of threads leads elsewhere"));
            }
            all.push(RawThread {
                address,
                thread_id: self.mem.read_u64(at(address, layout.thread_id)).unwrap_or(0),
                native_id: layout
                    .native_thread_id
                    .and_then(|offset| self.mem.read_u64(at(address, offset)).ok()),
                holds_gil: holder == Some(address),
            });
            next = self.pointer(address, layout.next);
        }
    }

    fn innermost(&self, thread: RemoteAddr) -> Result<RemoteAddr, MemoryError> {
        match self.layout.thread.top {
            TopFrame::Direct(offset) => self.pointer(thread, offset),
            TopFrame::ByCFrame { cframe, current_frame } => {
                let cframe = self.pointer(thread, cframe)?;
                if cframe.is_null() {
                    return Ok(RemoteAddr::NULL);
                }
                self.pointer(cframe, current_frame)
            }
        }
    }

    /// The frames of the thread state at `thread`.
    pub fn stack(&self, thread: RemoteAddr) -> RawStack {
        let mut stack = RawStack::default();
        let mut outer = VecDeque::new();
        let mut steps = 0;
        let mut next = self.innermost(thread);
        loop {
            let frame = match next {
                Ok(frame) if frame.is_null() => break,
                Ok(frame) => frame,
                Err(_) => {
                    stack.broken = Some("a frame cannot be read");
                    break;
                }
            };
            steps += 1;
            if steps > MAX_WALK || steps % 256 == 0 && self.budget.is_spent() {
                stack.broken = Some("the stack has no end, or is too deep");
                break;
            }
            match self.frame(frame) {
                Ok(None) => {}
                Ok(Some(raw)) if stack.frames.len() < KEPT_FRAMES => stack.frames.push(raw),
                Ok(Some(raw)) => {
                    if outer.len() == KEPT_FRAMES {
                        outer.pop_front();
                        stack.omitted += 1;
                    }
                    outer.push_back(raw);
                }
                Err(_) => {
                    stack.broken = Some("a frame cannot be read");
                    break;
                }
            }
            next = self.pointer(frame, self.layout.frame.back);
        }
        stack.frames.extend(outer);
        stack
    }

    /// The frame at `frame`; `None` for one of the interpreter's own, in which everything else is garbage.
    fn frame(&self, frame: RemoteAddr) -> Result<Option<RawFrame>, MemoryError> {
        let layout = self.layout;
        if let (Some(offset), Some(own)) = (layout.frame.owner, layout.frame.owner_c_stack) {
            let [owner] = self.mem.read_array(at(frame, offset))?;
            // 3.14 has two such values, this one and the next.
            if owner >= own {
                return Ok(None);
            }
        }
        // From 3.14 the low bits are a tag; objects are aligned to 8.
        let code = RemoteAddr(self.pointer(frame, layout.frame.code)?.0 & !7);
        let instr = match layout.code.code_adaptive {
            None => self.mem.read_u32(at(frame, layout.frame.instr))?.cast_signed(),
            Some(start) => {
                let start = self.copy_of_bytecode(frame, code).unwrap_or(at(code, start).0);
                let distance = self.pointer(frame, layout.frame.instr)?.0.wrapping_sub(start);
                // What is not within a code object is as if the frame had not started.
                i32::try_from(distance.cast_signed()).unwrap_or(-1)
            }
        };
        Ok(Some(RawFrame { code, instr }))
    }

    /// Where the copy of the bytecode begins that `frame` runs, if it runs one: from 3.14 without the GIL.
    fn copy_of_bytecode(&self, frame: RemoteAddr, code: RemoteAddr) -> Option<u64> {
        let (index, copies) = (self.layout.frame.tlbc_index?, self.layout.code.tlbc?);
        let index = self.mem.read_u32(at(frame, index)).ok().filter(|index| *index != 0)?;
        let copies = self.pointer(code, copies).ok()?;
        // The array begins with its length.
        let is_there = u64::from(index) < self.mem.read_u64(copies).ok()?;
        let entry = at(copies, 8 + 8 * u64::from(index));
        is_there.then(|| self.mem.read_u64(entry).ok()).flatten()
    }

    /// The code objects of the frames of `stack`, in their order; `None` for what is none.
    pub fn codes(&mut self, stack: &RawStack) -> Vec<Option<Rc<CodeInfo>>> {
        let codes = stack.frames.iter().map(|frame| {
            if let Some(known) = self.codes.get(&frame.code) {
                return known.clone();
            }
            let info = self.read_code(frame.code).ok().map(Rc::new);
            self.codes.insert(frame.code, info.clone());
            info
        });
        codes.collect()
    }

    /// Forgets the code objects: others may be at their addresses.
    pub fn forget_codes(&mut self) {
        self.codes.clear();
    }

    fn read_code(&mut self, address: RemoteAddr) -> Result<CodeInfo, CodeError> {
        let of = self.pointer(address, self.layout.ob_type)?;
        if self.code_type != Some(of) {
            text::expect_type(self.mem, address, self.layout, "code")?;
            self.code_type = Some(of);
        }
        CodeInfo::read(self.mem, address, self.layout)
    }
}

/// `frames` with their code objects as a person reads them; `innermost`: the first of them is where the thread is. Frames
/// that Python's own tracebacks leave out are left out here; one whose code object makes no sense is called `?`.
pub fn resolved<'a>(
    frames: impl Iterator<Item = (&'a RawFrame, &'a Option<Rc<CodeInfo>>)>,
    innermost: bool,
) -> Vec<Frame> {
    let resolved = frames.enumerate().filter_map(|(number, (raw, info))| {
        let Some(info) = info else {
            return Some(Frame {
                function: "?".to_owned(),
                file: "?".to_owned(),
                line: 0,
            });
        };
        let line = resolve(info, raw.instr, innermost && number == 0)?.line;
        Some(Frame {
            function: info.display_name().to_owned(),
            file: info.filename.clone(),
            line,
        })
    });
    resolved.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::image::{BASE, Image};
    use crate::frames::SUPPORTED_MINORS;
    use rand::{RngExt, SeedableRng};
    use std::time::Duration;

    const BYTES: usize = 0x1_0000;
    const RUNTIME: u64 = BASE;
    const INTERPRETER: u64 = BASE + 0x4000;
    const THREADS: [u64; 2] = [BASE + 0x8000, BASE + 0x9000];
    const FRAMES: [u64; 3] = [BASE + 0xa000, BASE + 0xa400, BASE + 0xa800];
    const CODE: u64 = BASE + 0xb000;

    impl Image {
        fn field(&mut self, base: u64, offset: u64, value: u64) {
            self.put(base + offset, value);
        }
    }

    /// One interpreter with two threads; the first has three frames, the second none.
    fn image(layout: &Layout) -> Image {
        let mut image = Image::new(BYTES);
        image.field(RUNTIME, layout.runtime.interpreters_head, INTERPRETER);
        image.field(INTERPRETER, layout.interpreter.threads_head, THREADS[0]);
        image.field(THREADS[0], layout.thread.next, THREADS[1]);
        for thread in THREADS {
            image.field(thread, layout.thread.interp, INTERPRETER);
            image.field(thread, layout.thread.thread_id, thread + 1);
            if let TopFrame::ByCFrame { cframe, .. } = layout.thread.top {
                image.field(thread, cframe, thread + 0x800);
            }
        }
        match layout.thread.top {
            TopFrame::Direct(offset) => image.field(THREADS[0], offset, FRAMES[0]),
            TopFrame::ByCFrame { current_frame, .. } => image.field(THREADS[0] + 0x800, current_frame, FRAMES[0]),
        }
        for (number, frame) in FRAMES.into_iter().enumerate() {
            image.field(frame, layout.frame.code, CODE);
            let instr = layout.code.code_adaptive.map_or(6, |start| CODE + start + 6);
            image.field(frame, layout.frame.instr, instr);
            image.field(frame, layout.frame.back, FRAMES.get(number + 1).copied().unwrap_or(0));
            if let Some(owner) = layout.frame.owner {
                // The one byte only: its word holds other fields.
                image.0[(frame + owner - BASE) as usize] = 0;
            }
        }
        image
    }

    fn walk(image: &Image, layout: &Layout, budget: Duration) -> Result<Vec<(RawThread, RawStack)>, MemoryError> {
        let budget = Budget::of(budget);
        let mut walker = Walker::new(image, RemoteAddr(RUNTIME), layout, budget);
        let mut all = Vec::new();
        for interpreter in walker.interpreters()? {
            for thread in interpreter.threads {
                let stack = walker.stack(thread.address);
                let codes = walker.codes(&stack);
                let _ = resolved(stack.frames.iter().zip(&codes), true);
                all.push((thread, stack));
            }
        }
        Ok(all)
    }

    #[test]
    fn threads_and_frames_are_found() {
        for minor in SUPPORTED_MINORS {
            let layout = Layout::of_minor(minor).unwrap();
            let found = walk(&image(&layout), &layout, Duration::from_secs(60)).unwrap();
            let [(newer, none), (older, three)] = found.as_slice() else {
                panic!("3.{minor}: {found:?}")
            };
            assert_eq!((newer.thread_id, older.thread_id), (THREADS[1] + 1, THREADS[0] + 1));
            assert_eq!(none, &RawStack::default());
            let frame = RawFrame {
                code: RemoteAddr(CODE),
                instr: 6,
            };
            assert_eq!(
                (three.frames.as_slice(), three.broken),
                ([frame; 3].as_slice(), None),
                "3.{minor}"
            );
        }
    }

    #[test]
    fn what_bites_its_tail_ends() {
        for minor in SUPPORTED_MINORS {
            let layout = Layout::of_minor(minor).unwrap();
            let mut image = image(&layout);
            image.field(FRAMES[2], layout.frame.back, FRAMES[0]);
            image.field(THREADS[1], layout.thread.next, THREADS[0]);
            image.field(INTERPRETER, layout.interpreter.next, INTERPRETER);
            let found = walk(&image, &layout, Duration::from_secs(60)).unwrap();
            assert_eq!(found.len(), 2, "3.{minor}");
            let (_, stack) = &found[1];
            assert!(stack.broken.is_some());
            assert_eq!(stack.frames.len(), 2 * KEPT_FRAMES);
            assert_eq!(stack.frames.len() + stack.omitted, MAX_WALK);
        }
    }

    #[test]
    fn damage_is_an_answer_or_an_error() {
        let mut random = rand::rngs::SmallRng::seed_from_u64(5);
        for minor in SUPPORTED_MINORS {
            let layout = Layout::of_minor(minor).unwrap();
            let sound = image(&layout);
            for _ in 0..300 {
                let mut image = Image(sound.0.clone());
                for _ in 0..random.random_range(1..40) {
                    // Words that are used, pointing to places that exist, and to some that do not.
                    let base = [RUNTIME, INTERPRETER, THREADS[0], THREADS[1], FRAMES[0], FRAMES[2], CODE];
                    let base = base[random.random_range(0..base.len())];
                    let to = BASE + random.random_range(0..BYTES as u64 + 0x100);
                    image.field(base, 8 * random.random_range(0..0x80), to);
                }
                // Many of these have no end but the budget's.
                let _ = walk(&image, &layout, Duration::from_millis(2));
            }
        }
    }
}
