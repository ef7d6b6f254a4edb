//! One file a subcommand.

pub mod attach;
pub mod choose;
pub mod cure;
pub mod demo;
pub mod diff;
pub mod digest;
pub mod failure;
pub mod flame;
pub mod flow;
pub mod info;
pub mod info_run;
pub mod plot;
pub mod record;
pub mod select;
pub mod top;
pub mod whence;

use crate::profile::reader::{LiveSet, Reader};
use crate::report::TraceUsage;

/// What is alive, with the stacks of the traces.
fn usages<'a>(reader: &'a Reader, live: &LiveSet) -> Vec<TraceUsage<'a>> {
    let usage = |(index, live): &(u32, _)| TraceUsage {
        index: *index,
        frames: reader.frames(*index),
        live: *live,
    };
    live.traces.iter().map(usage).collect()
}
