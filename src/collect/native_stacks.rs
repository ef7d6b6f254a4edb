//! Whole native stacks: unwinds the pieces that samples bring, names what is found, and merges it with Python's frames.
//!
//! The work has a limit, a share of one processor, beyond which samples keep the one native frame that they have in any case;
//! how many did is counted.

use super::merge::Kind;
use super::native_names::{NativeNames, Place};
use super::tree::StackNode;
use super::unwind::{End, Unwinder};
use foldhash::{HashMap, HashMapExt};
use nix::time::{ClockId, clock_gettime};
use pyheap_injector::{ProcessMemory, space};
use pyheap_protocol::record::Piece;
use std::hash::BuildHasher as _;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of the time, this part at most is spent here: one in so many.
const SHARE: u32 = 20;
/// What can be spent at once: at first nothing has a name yet.
const AT_ONCE: Duration = Duration::from_millis(500);
/// What is mapped is looked at this often at most.
const MAPS_EVERY: Duration = Duration::from_secs(1);
/// Most merged stacks that are known again.
const MAX_KNOWN: usize = 64 << 10;

/// The C function that runs Python code.
const LOOP: &str = "_PyEval_EvalFrameDefault";
/// How the interpreter calls a function, one way or another.
const CALLS: [&str; 16] = [
    "_PyEval_EvalFrame",
    "_PyEval_Vector",
    "_PyEval_EvalCode",
    "_PyEval_EvalCodeWithName",
    "PyEval_EvalFrame",
    "PyEval_EvalFrameEx",
    "_PyFunction_Vectorcall",
    "_PyFunction_FastCallDict",
    "_PyFunction_FastCallKeywords",
    "function_code_fastcall",
    "call_function",
    "do_call_core",
    "_PyVectorcall_Call",
    "PyVectorcall_Call",
    "PyCFunction_Call",
    "bound_method_vectorcall",
];
/// Those of which only the beginning counts.
const BEGINNINGS: [&str; 16] = [
    "_PyObject_Vectorcall",
    "PyObject_Vectorcall",
    "_PyObject_FastCall",
    "_PyObject_Call",
    "PyObject_Call",
    "_PyObject_MakeTpCall",
    "cfunction_vectorcall",
    "cfunction_call",
    "method_vectorcall",
    "object_vacall",
    "_PyMethodDef_RawFastCall",
    "_PyMethodDescr_FastCall",
    "_PyMethodDescr_Vectorcall",
    "_PyCFunction_FastCall",
    "_PyCFunctionFast",
    "_TAIL_CALL_",
];

/// A native stack with names.
pub struct Found {
    /// The frames, innermost first: what each is of, library and function.
    pub frames: Vec<(Kind, Option<Place>)>,
    /// Its outermost frame is there.
    pub is_whole: bool,
}

/// What came of a piece.
pub enum Outcome {
    /// Such a stack was there before.
    Known(StackNode),
    /// It was not, and is to be told by [`NativeStacks::keep`] under this key.
    New(Found, (u64, u64)),
    /// There was no time for it, or not even the innermost frame is known.
    Nothing,
}

/// What is needed for one process.
#[derive(Debug)]
pub struct NativeStacks {
    memory: ProcessMemory,
    unwinder: Unwinder<ProcessMemory>,
    /// The interpreter's code.
    interpreter: Vec<Range<u64>>,
    looked: Option<Instant>,
    /// The merged stacks, and whether frames are missing in them.
    known: HashMap<(u64, u64), (StackNode, bool)>,
    hasher: [foldhash::fast::RandomState; 2],
    begun: Instant,
    spent: Duration,
    /// Pieces for which there was no time.
    pub left_out: u64,
    /// Stacks in which native frames are missing.
    pub cut: u64,
}

impl Found {
    /// What is outside of the library that starts a greenlet belongs to another one, and may have changed since.
    fn end_with_greenlet(&mut self) {
        let is_loop = |(kind, _): &(Kind, Option<Place>)| *kind == Kind::Loop;
        let is_greenlet = |(_, place): &(Kind, Option<Place>)| {
            let file = place.as_ref().map_or("", |(file, _)| file);
            file.starts_with("_greenlet.") || file.starts_with("greenlet.")
        };
        let Some(first) = self.frames.iter().position(is_loop) else {
            return;
        };
        let outside = self.frames.iter().skip(first).position(is_greenlet);
        if let Some(outside) = outside {
            self.frames.truncate(first + outside);
            self.is_whole = true;
        }
    }

    /// Frames are missing that would be in a merged stack with so many of Python's loops.
    #[must_use]
    pub fn is_short(&self, loops: usize) -> bool {
        // Where threads begin there is often no table.
        const FIRST: [&str; 3] = ["__clone", "clone", "clone3"];
        let is_first = |function: &Arc<str>| FIRST.contains(&&**function);
        let last = self.frames.last().and_then(|(_, place)| place.as_ref());
        let found = self.frames.iter().filter(|(kind, _)| *kind == Kind::Loop).count();
        !self.is_whole && (found < loops || loops == 0) && !last.is_some_and(|(_, function)| is_first(function))
    }
}

impl NativeStacks {
    /// For the process with this `memory`, in which the interpreter's code is at `interpreter`.
    #[must_use]
    pub fn new(memory: ProcessMemory, interpreter: Vec<Range<u64>>) -> Self {
        Self {
            memory,
            unwinder: Unwinder::new(memory),
            interpreter,
            looked: None,
            known: HashMap::new(),
            hasher: Default::default(),
            begun: Instant::now(),
            spent: Duration::ZERO,
            left_out: 0,
            cut: 0,
        }
    }

    /// Unwinds the piece of a sample with Python's stack number `stack`.
    pub fn unwind(&mut self, stack: u64, piece: &Piece, bytes: &[u8], names: &mut NativeNames) -> Outcome {
        let allowed = AT_ONCE.saturating_add(self.begun.elapsed() / SHARE);
        if self.spent > allowed {
            self.left_out += 1;
            return Outcome::Nothing;
        }
        // What was not spent for long cannot be spent at once.
        self.spent = self.spent.max(allowed.saturating_sub(AT_ONCE));
        let before = processor_time();
        let outcome = self.unwind_now(stack, piece, bytes, names);
        self.spent += processor_time().saturating_sub(before);
        outcome
    }

    fn unwind_now(&mut self, stack: u64, piece: &Piece, bytes: &[u8], names: &mut NativeNames) -> Outcome {
        if self.looked.is_none_or(|looked| looked.elapsed() >= MAPS_EVERY) {
            self.looked = Some(Instant::now());
            let maps = space::maps(self.memory.pid()).unwrap_or_default();
            if self.unwinder.look_at(&maps) {
                names.forget();
                self.known.clear();
            }
        }
        let (addresses, end) = self.unwinder.unwind(piece, bytes);
        let is_whole = end == End::Whole;
        if addresses.is_empty() {
            return Outcome::Nothing;
        }
        let [one, other] = &self.hasher;
        let content = (stack, &addresses, is_whole);
        let key = (one.hash_one(content), other.hash_one(content));
        if let Some(&(known, is_cut)) = self.known.get(&key) {
            self.cut += u64::from(is_cut);
            return Outcome::Known(known);
        }
        let frames = addresses.iter().map(|&at| {
            let place = names.place(at);
            (self.kind(at, place.as_ref()), place)
        });
        let mut found = Found {
            frames: frames.collect(),
            is_whole,
        };
        found.end_with_greenlet();
        Outcome::New(found, key)
    }

    /// Notes what has become of a new stack, and whether frames are missing in it.
    pub fn keep(&mut self, key: (u64, u64), node: StackNode, is_cut: bool) {
        self.cut += u64::from(is_cut);
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        self.known.insert(key, (node, is_cut));
    }

    fn kind(&self, address: u64, place: Option<&Place>) -> Kind {
        if !self.interpreter.iter().any(|code| code.contains(&address)) {
            return Kind::Code;
        }
        match place {
            Some((_, function)) if !function.starts_with('+') => kind_of(function),
            _ => Kind::Unnamed,
        }
    }
}

/// What a function of the interpreter with this name is.
fn kind_of(function: &str) -> Kind {
    // Compilers make several of one: `call_function.constprop.0`, `_PyEval_EvalFrameDefault.cold`.
    let name = function.split('.').next().unwrap_or_default();
    if name == LOOP {
        Kind::Loop
    } else if CALLS.contains(&name) || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning)) {
        Kind::Call
    } else {
        Kind::Interpreter
    }
}

/// That this thread has used.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// A name as its language has it: C++ and Rust mangle theirs.
#[must_use]
pub fn demangled(name: &str) -> Arc<str> {
    if name.starts_with("_Z") || name.starts_with("_R") {
        if let Ok(rust) = rustc_demangle::try_demangle(name) {
            return Arc::from(short(&format!("{rust:#}")));
        }
        let plain = name.split('.').next().unwrap_or_default();
        let options = cpp_demangle::DemangleOptions::new()
            .no_params()
            .no_return_type()
            .recursion_limit(MAX_NESTED);
        let mut text = Limited(String::new());
        let parsed = cpp_demangle::ParseOptions::default().recursion_limit(MAX_NESTED);
        let symbol = cpp_demangle::Symbol::new_with_options(plain, &parsed);
        if symbol.is_ok_and(|symbol| symbol.structured_demangle(&mut text, &options).is_ok()) {
            return Arc::from(short(&text.0));
        }
    }
    Arc::from(name)
}

/// How deep a name may be nested.
const MAX_NESTED: u32 = 96;

/// Text up to a limit: a short name can stand for an endless one.
struct Limited(String);

impl cpp_demangle::DemangleWrite for Limited {
    fn write_string(&mut self, text: &str) -> std::fmt::Result {
        const MOST: usize = 64 << 10;
        if self.0.len() + text.len() > MOST {
            return Err(std::fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// Templates make names of any length.
fn short(name: &str) -> &str {
    const MOST: usize = 256;
    let end = name
        .char_indices()
        .map(|(at, c)| at + c.len_utf8())
        .take_while(|&end| end <= MOST);
    name.get(..end.last().unwrap_or(0)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_their_language() {
        let name = |mangled| demangled(mangled).to_string();
        assert_eq!(name("_ZN5arrow6Buffer4copyEll"), "arrow::Buffer::copy");
        assert_eq!(
            name("_RNvCskwGfYPst2Cb_3foo16example_function"),
            "foo::example_function"
        );
        assert_eq!(name("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        for plain in ["malloc", "_Zwhatever", "_PyEval_Vector", ""] {
            assert_eq!(name(plain), plain);
        }
        let long = format!("_ZN{}", "4aaaa".repeat(4000) + "Ev");
        assert!(demangled(&long).len() <= long.len());
    }

    #[test]
    fn the_loop_is_known_by_its_name() {
        assert_eq!(kind_of("_PyEval_EvalFrameDefault"), Kind::Loop);
        assert_eq!(kind_of("_PyEval_EvalFrameDefault.cold"), Kind::Loop);
        assert_eq!(kind_of("cfunction_vectorcall_FASTCALL.lto_priv.0"), Kind::Call);
        assert_eq!(kind_of("list_sort_impl"), Kind::Interpreter);
    }
}
