//! One file a subcommand.

pub mod attach;
pub mod census;
pub mod choose;
pub mod collectors;
pub mod cure;
pub mod demo;
pub mod diff;
pub mod digest;
pub mod doctor;
pub mod dump;
pub mod events;
pub mod export;
pub mod failure;
pub mod flame;
pub mod fleet;
pub mod flow;
pub mod heap;
pub mod html;
pub mod info;
pub mod info_run;
pub mod leaks;
pub mod manual;
pub mod merged;
pub mod plot;
pub mod ps;
pub mod push;
pub mod record;
pub mod record_many;
pub mod recording;
pub mod rss;
pub mod sampling;
pub mod select;
pub mod serve;
pub mod top;
pub mod whence;
pub mod which;

use crate::profile::reader::{LiveSet, Reader};
use crate::report::TraceUsage;
use crate::report::export::Export;
use crate::ui::output::note;
use crate::ui::units::Moment;
use std::error::Error;

/// What is alive, with the stacks of the traces.
fn usages<'a>(reader: &'a Reader, live: &LiveSet) -> Vec<TraceUsage<'a>> {
    let usage = |(index, live): &(u32, _)| TraceUsage {
        index: *index,
        frames: reader.frames(*index),
        live: *live,
    };
    live.traces.iter().map(usage).collect()
}

/// The profile at a moment, ready to be exported. What is wrong with it is said on standard error.
fn exported<'a>(reader: &'a Reader, at: Moment, filter: &select::FilterArgs) -> Result<Export<'a>, Box<dyn Error>> {
    let at = select::moment(reader, at)?;
    let export = Export::of(reader, &select::live(reader, at, &filter.filters(reader)?)?)?;
    for warning in &export.warnings {
        note(&format!("warning: {warning}"));
    }
    Ok(export)
}
