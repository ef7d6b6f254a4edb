//! Puts Python's frames and native ones into the order in which they call each other.
//!
//! The C function that runs Python code has a frame on the native stack; it stands for the Python frames that it runs: one
//! each up to 3.10, and from 3.11 on all of those that Python functions have called from one another without C between them.
//!
//! ```text
//! native           Python, by loops      merged
//! malloc's caller                        malloc's caller
//! sort             key   ┐ loop 0        sort
//! EvalFrame        ─────────────────►    key
//! list_sort                              list_sort
//! EvalFrame        ─────────────────►    rank
//!                  rank  ┐ loop 1        main
//!                  main  ┘
//! ```
//!
//! If the numbers do not agree (frames of another greenlet, another interpreter's state, a symbol that is missing), the native
//! frames up to the first one of the interpreter stand below Python's: that much is known.

use super::tree::NamedFrame;

/// What a native frame is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The function that runs Python code.
    Loop,
    /// How the interpreter gets from one function to another.
    Call,
    /// Any other function of the interpreter's.
    Interpreter,
    /// The interpreter's as well, but nobody knows which.
    Unnamed,
    /// Anything else.
    Code,
}

/// The frames, innermost first: `native` ones (to the end of the stack if `is_whole`), and `python`'s, which `loops` of the
/// given lengths run, the innermost first.
#[must_use]
pub fn merged(
    native: &[(Kind, NamedFrame)],
    is_whole: bool,
    python: &[NamedFrame],
    loops: &[usize],
) -> Vec<NamedFrame> {
    if python.is_empty() {
        return native.iter().map(|(_, frame)| frame.clone()).collect();
    }
    let count = |wanted: Kind| native.iter().filter(|(kind, _)| *kind == wanted).count();
    // The interpreter may have a frame of its own outside of all.
    let last = loops.iter().rposition(|&len| len != 0).map_or(0, |last| last + 1);
    let loops = loops.get(..last).unwrap_or_default();
    let found = count(Kind::Loop);
    // Of a stack that is cut the outer loops are missing, and a function without a name could be one.
    let is_inner_part = !is_whole && found < loops.len() && count(Kind::Unnamed) == 0;
    let fits = loops.iter().sum::<usize>() == python.len() && (found == loops.len() || is_inner_part);
    let (mut loops, mut python) = (loops.iter(), python.iter());
    let mut frames = Vec::new();
    for (kind, frame) in native {
        match kind {
            // Outside of Python's outermost frame is only how it was started.
            _ if python.len() == 0 => break,
            Kind::Code => frames.push(frame.clone()),
            _ if !fits => break,
            Kind::Loop => frames.extend(python.by_ref().take(loops.next().copied().unwrap_or(0)).cloned()),
            Kind::Interpreter => frames.push(frame.clone()),
            // Of those without a name nearly all pass calls on as well.
            Kind::Call | Kind::Unnamed => {}
        }
    }
    frames.extend(python.cloned());
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> Vec<NamedFrame> {
        text.split_whitespace()
            .map(|name| NamedFrame {
                file: "f".into(),
                line: 0,
                function: name.into(),
            })
            .collect()
    }

    /// `@` is a loop, `-` a call.
    fn merge(native: &str, is_whole: bool, python: &str, loops: &[usize]) -> String {
        let kind = |name: &str| match name {
            "@" => Kind::Loop,
            "-" => Kind::Call,
            "+" => Kind::Unnamed,
            _ if name.starts_with('i') => Kind::Interpreter,
            _ => Kind::Code,
        };
        let native = named(native).into_iter().map(|frame| (kind(&frame.function), frame));
        let native: Vec<_> = native.collect();
        let merged = merged(&native, is_whole, &named(python), loops);
        let names: Vec<&str> = merged.iter().map(|frame| &*frame.function).collect();
        names.join(" ")
    }

    #[test]
    fn each_loop_stands_for_its_frames() {
        assert_eq!(merge("a @ b - @ c d", true, "P Q R", &[1, 2]), "a P b Q R");
        assert_eq!(merge("a - @ - @ - @ b", true, "P Q R", &[1, 1, 1]), "a P Q R");
        assert_eq!(merge("a i @ + @ b", true, "P Q", &[1, 1]), "a i P Q");
        // One that runs nothing any more, and the interpreter's own frame.
        assert_eq!(merge("a @ b @ c", true, "P Q", &[0, 2, 0]), "a b P Q");
    }

    #[test]
    fn a_stack_that_is_cut_goes_on_in_python() {
        assert_eq!(merge("a @ b", false, "P Q R S", &[1, 2, 1]), "a P b Q R S");
        assert_eq!(merge("a b", false, "P Q", &[1, 1]), "a b P Q");
    }

    #[test]
    fn what_does_not_agree_stands_below() {
        assert_eq!(merge("a @ b", true, "P Q R", &[1, 2]), "a P Q R");
        assert_eq!(merge("a @ b @ c @", true, "P Q", &[1, 1]), "a P Q");
        // No symbol tells the loops.
        assert_eq!(merge("a b + c + d", true, "P Q", &[1, 1]), "a b P Q");
        assert_eq!(merge("a b + c", false, "P Q", &[1, 1]), "a b P Q");
        assert_eq!(merge("a i @ c", true, "P Q", &[1, 1]), "a P Q");
        assert_eq!(merge("a @ b", true, "P Q", &[1]), "a P Q");
    }

    #[test]
    fn a_thread_without_python_has_its_native_frames() {
        assert_eq!(merge("a b c", true, "", &[]), "a b c");
    }
}
