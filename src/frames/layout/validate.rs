//! Is a layout true of this process? Follows it from `_PyRuntime` to a file name and checks what can be checked.
//!
//! The process runs meanwhile, so a thread or frame may vanish under the reader: such failures are tried again a few
//! times. A process whose threads have no frames at all (an embedder that is outside Python) passes on the rest.

use super::{FrameLayout, Layout, TopFrame};
use crate::frames::code::CodeError;
use crate::frames::text;
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use std::time::Duration;

/// More interpreters than this in one process are not looked at.
const MAX_INTERPRETERS: usize = 1024;
/// More threads than this of one interpreter are not looked at.
const MAX_THREADS: usize = 64;
/// So many frames, of all threads together, are looked at for one that holds a code object.
const MAX_FRAMES: usize = 256;
/// First lines beyond this are taken for a sign of a wrong layout.
const MAX_PLAUSIBLE_LINE: u32 = 100_000_000;
/// So often a failure that a running process can cause is tried again, after so long a pause.
const ATTEMPTS: u32 = 8;
const PAUSE: Duration = Duration::from_millis(2);

/// What did not fit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValidationError {
    /// Something that must be there cannot be read.
    #[error("the interpreter's state cannot be followed at {what}")]
    Memory {
        /// What was being read.
        what: &'static str,
        /// The failed read.
        #[source]
        source: MemoryError,
    },
    /// A pointer that must be set is null.
    #[error("{0} is null")]
    Null(&'static str),
    /// A value is not what it must be.
    #[error("{what} is {found:#x} instead of {expected:#x}")]
    Value {
        /// Which value.
        what: &'static str,
        /// What is there.
        found: u64,
        /// What must be there.
        expected: u64,
    },
    /// The main interpreter is not in the list of interpreters.
    #[error("the main interpreter is not in the list of interpreters")]
    MainNotListed,
    /// A frame's code object is none.
    #[error("what a frame calls its code object is none")]
    Code(#[source] CodeError),
}

fn at(base: RemoteAddr, offset: u64, what: &'static str) -> Result<RemoteAddr, ValidationError> {
    base.checked_add(offset).ok_or(ValidationError::Null(what))
}

fn word(mem: &impl RemoteMemory, base: RemoteAddr, offset: u64, what: &'static str) -> Result<u64, ValidationError> {
    mem.read_u64(at(base, offset, what)?)
        .map_err(|source| ValidationError::Memory { what, source })
}

fn pointer(
    mem: &impl RemoteMemory,
    base: RemoteAddr,
    offset: u64,
    what: &'static str,
) -> Result<RemoteAddr, ValidationError> {
    match word(mem, base, offset, what)? {
        0 => Err(ValidationError::Null(what)),
        address => Ok(RemoteAddr(address)),
    }
}

fn expect(what: &'static str, found: u64, expected: u64) -> Result<(), ValidationError> {
    if found == expected {
        Ok(())
    } else {
        Err(ValidationError::Value { what, found, expected })
    }
}

impl Layout {
    /// Follows this layout through the process from `runtime`, the address of `_PyRuntime`. Reads only; takes at most
    /// some 20 ms.
    ///
    /// # Errors
    /// With the first thing that does not fit.
    pub fn validate(&self, mem: &impl RemoteMemory, runtime: RemoteAddr) -> Result<(), ValidationError> {
        let mut attempt = 1;
        loop {
            match self.validate_once(mem, runtime) {
                Err(_) if attempt < ATTEMPTS => std::thread::sleep(PAUSE),
                result => return result,
            }
            attempt += 1;
        }
    }

    fn validate_once(&self, mem: &impl RemoteMemory, runtime: RemoteAddr) -> Result<(), ValidationError> {
        let main = self.validate_interpreters(mem, runtime)?;
        let mut thread = pointer(mem, main, self.interpreter.threads_head, "the list of threads")?;
        let mut outcome = None;
        let mut frames_left = MAX_FRAMES;
        for _ in 0..MAX_THREADS {
            let interp = word(mem, thread, self.thread.interp, "a thread's interpreter")?;
            expect("a thread's interpreter", interp, main.0)?;
            match self.validate_frames(mem, thread, &mut frames_left) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => outcome = Some(error),
            }
            thread = RemoteAddr(word(mem, thread, self.thread.next, "the list of threads")?);
            if thread.is_null() {
                break;
            }
        }
        outcome.map_or(Ok(()), Err)
    }

    /// The list of interpreters ends, and the last one is the main one.
    fn validate_interpreters(
        &self,
        mem: &impl RemoteMemory,
        runtime: RemoteAddr,
    ) -> Result<RemoteAddr, ValidationError> {
        let main = pointer(mem, runtime, self.runtime.interpreters_main, "interpreters.main")?;
        let mut interpreter = pointer(mem, runtime, self.runtime.interpreters_head, "interpreters.head")?;
        for _ in 0..MAX_INTERPRETERS {
            if let Some(offset) = self.interpreter.runtime {
                let back = word(mem, interpreter, offset, "an interpreter's runtime")?;
                expect("an interpreter's runtime", back, runtime.0)?;
            }
            if interpreter == main {
                let id = word(mem, main, self.interpreter.id, "the main interpreter's id")?;
                expect("the main interpreter's id", id, 0)?;
                return Ok(main);
            }
            interpreter = RemoteAddr(word(
                mem,
                interpreter,
                self.interpreter.next,
                "the list of interpreters",
            )?);
            if interpreter.is_null() {
                break;
            }
        }
        Err(ValidationError::MainNotListed)
    }

    /// True when a frame of `thread` has a code object whose type is `code`, whose names are strings, whose line table is
    /// bytes, and in whose bytecode the frame is; false when the thread has no frame with code.
    fn validate_frames(
        &self,
        mem: &impl RemoteMemory,
        thread: RemoteAddr,
        frames_left: &mut usize,
    ) -> Result<bool, ValidationError> {
        let mut frame = match self.thread.top {
            TopFrame::Direct(offset) => word(mem, thread, offset, "a thread's frame")?,
            TopFrame::ByCFrame { cframe, current_frame } => {
                let cframe = pointer(mem, thread, cframe, "a thread's cframe")?;
                word(mem, cframe, current_frame, "a thread's frame")?
            }
        };
        let mut outcome = None;
        while frame != 0 && *frames_left > 0 {
            *frames_left -= 1;
            let this = RemoteAddr(frame);
            if !self.is_c_stack_frame(mem, this)? {
                let address = pointer(mem, this, self.frame.code, "a frame's code")?;
                let address = RemoteAddr(FrameLayout::untagged(address.0));
                match self
                    .validate_code(mem, address)
                    .and_then(|()| self.validate_instruction(mem, this, address))
                {
                    Ok(()) => return Ok(true),
                    Err(error) => outcome = Some(error),
                }
            }
            frame = word(mem, this, self.frame.back, "the list of frames")?;
        }
        outcome.map_or(Ok(false), |error| Err(ValidationError::Code(error)))
    }

    fn is_c_stack_frame(&self, mem: &impl RemoteMemory, frame: RemoteAddr) -> Result<bool, ValidationError> {
        let (Some(offset), Some(mark)) = (self.frame.owner, self.frame.owner_c_stack) else {
            return Ok(false);
        };
        let what = "a frame's owner";
        let owner = mem
            .read_array::<1>(at(frame, offset, what)?)
            .map_err(|source| ValidationError::Memory { what, source })?;
        Ok(owner >= [mark])
    }

    /// From 3.11 on, a frame's instruction is within its code object's (where each thread has its own copy, that of the
    /// first one only).
    fn validate_instruction(
        &self,
        mem: &impl RemoteMemory,
        frame: RemoteAddr,
        code: RemoteAddr,
    ) -> Result<(), CodeError> {
        let Some(start) = self.code.code_adaptive.filter(|_| self.code.tlbc.is_none()) else {
            return Ok(());
        };
        let field = |base: RemoteAddr, offset| base.checked_add(offset).ok_or(CodeError::Absurd("an address"));
        let units = mem.read_u64(field(code, self.bytes.size)?)?;
        let at = mem.read_u64(field(frame, self.frame.instr)?)?;
        // A frame of 3.11 and 3.12 that has not started is one unit before the first.
        let distance = at.wrapping_sub(code.0).wrapping_sub(start).wrapping_add(2);
        if distance.is_multiple_of(2) && distance / 2 <= units {
            Ok(())
        } else {
            Err(CodeError::Absurd("a frame's instruction"))
        }
    }

    fn validate_code(&self, mem: &impl RemoteMemory, address: RemoteAddr) -> Result<(), CodeError> {
        text::expect_type(mem, address, self, "code")?;
        let field = |offset: u64| address.checked_add(offset).ok_or(CodeError::Absurd("an address"));
        let names = [Some(self.code.filename), Some(self.code.name), self.code.qualname];
        for offset in names.into_iter().flatten() {
            let name = mem.read_ptr(field(offset)?)?;
            text::expect_type(mem, name, self, "str")?;
            text::expect_end(mem, text::characters(mem, name, self)?)?;
        }
        let lines = mem.read_ptr(field(self.code.line_table)?)?;
        text::expect_type(mem, lines, self, "bytes")?;
        text::expect_end(mem, text::content(mem, lines, self)?)?;
        // A negative number is above the limit, too.
        if mem.read_u32(field(self.code.first_line)?)? > MAX_PLAUSIBLE_LINE {
            return Err(CodeError::Absurd("co_firstlineno"));
        }
        Ok(())
    }
}
