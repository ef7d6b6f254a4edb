//! A failure with its exit code.

pub use crate::attach::chain;
use std::error::Error;
use std::fmt;

/// Exit codes of pyheap, as `--help` and the README list them.
pub mod code {
    /// Something failed on the way; what was recorded is kept.
    pub const FAILED: u8 = 1;
    /// Wrong usage, or nothing (or too much) to choose from.
    pub const USAGE: u8 = 2;
    /// There is no such process.
    pub const NO_PROCESS: u8 = 3;
    /// The process belongs to somebody else.
    pub const NOT_PERMITTED: u8 = 4;
    /// The process is in no state for it.
    pub const REFUSED: u8 = 7;
}

/// An error that ends the command with `code`.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    source: Box<dyn Error>,
}

impl Failure {
    /// Ends the command with `code` because of `source`.
    pub fn new(code: u8, source: impl Into<Box<dyn Error>>) -> Self {
        Self {
            code,
            source: source.into(),
        }
    }

    /// Something failed on the way.
    pub fn failed(source: impl Into<Box<dyn Error>>) -> Self {
        Self::new(code::FAILED, source)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}

impl From<crate::attach::Refusal> for Failure {
    fn from(refusal: crate::attach::Refusal) -> Self {
        Self::new(refusal.exit_code(), refusal)
    }
}

impl From<crate::attach::AttachError> for Failure {
    fn from(error: crate::attach::AttachError) -> Self {
        Self::new(error.exit_code(), error)
    }
}
