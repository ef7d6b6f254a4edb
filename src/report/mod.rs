//! Answers made of a profile. Pure functions from plain data to plain data and text: nothing here opens a file, knows a
//! process, or prints.

use crate::profile::model::{Live, StackFrame};

pub(crate) mod base64;
pub mod diff;
pub mod export;
pub mod filter;
pub mod flame;
pub mod human;
pub mod info;
pub mod leaks;
pub mod merged;
pub mod page;
pub mod plot;
pub mod top;
pub mod types;

/// What is alive of one trace, and its stack.
#[derive(Debug, Clone)]
pub struct TraceUsage<'a> {
    /// Index of the trace, 0 if none was recorded.
    pub index: u32,
    /// Its frames, outermost first; `None` if they are unknown.
    pub frames: Option<Vec<StackFrame<'a>>>,
    /// Estimates of what is alive.
    pub live: Live,
}
