//! One file a subcommand.

pub mod digest;
pub mod flame;
pub mod info_run;
pub mod top;

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
