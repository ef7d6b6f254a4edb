//! From a pid to a target that can be profiled: is it there, may we, is it a Python that we know, where is everything?
//!
//! [`process`] has the facts of any process, [`module`] and [`elf`] read the files that are mapped there,
//! [`interpreter`] finds CPython in them, [`preflight`] puts all of it together into one answer, and [`candidates`] lists who can be asked.
//!
//! What it refuses to do: touch. Nothing in this module stops a process or writes to it.

pub mod candidates;
pub mod cgroup;
pub mod condition;
pub mod crowd;
pub mod debug_file;
pub mod doctor;
pub mod elf;
pub mod family;
pub mod find_error;
pub mod frozen;
pub mod headroom;
pub mod interpreter;
pub mod module;
pub mod native;
pub mod native_stacks;
mod own_state;
pub mod pages;
pub mod place;
pub mod preflight;
pub mod privileges;
pub mod process;
pub mod rooted;
pub mod session;
pub mod slots;
pub mod symbols;
pub mod thread_number;

pub use candidates::Candidate;
pub use find_error::FindError;
pub use interpreter::Interpreter;
pub use preflight::{Refusal, Target};
pub use session::{AttachError, Session};
pub use symbols::Symbols;

/// `error` and its causes in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
