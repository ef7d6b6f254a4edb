//! `pyheap info`: what a profile is and whether it is whole.

use std::error::Error;

use super::info::Args;
use super::select;
use crate::profile::hpc::Digest;
use crate::profile::names::Part;
use crate::profile::reader::{ReadError, Reader};
use crate::report::info::{FileInfo, Info};
use crate::ui::output::to_stdout;

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let reader = Reader::open(&args.what)?;
    let mut info = collect(&reader)?;
    let at = select::moment(&reader, args.at)?;
    if at.is_some() || !args.filter.is_empty() {
        info.set_live(&select::live(&reader, at, &args.filter.filters(&reader)?)?.total);
        info.live_at_seconds = at.map_or(info.elapsed_seconds, |at| at.as_secs_f64());
    }
    let text = if args.json {
        serde_json::to_string_pretty(&info)? + "\n"
    } else {
        info.render()
    };
    Ok(to_stdout(&text)?)
}

/// All that is to be said of a profile.
///
/// # Errors
/// When it cannot be read.
pub fn collect(reader: &Reader) -> Result<Info, ReadError> {
    let names = reader.names();
    let files = Part::ALL.into_iter().filter_map(|part| {
        let path = names.path(part);
        let len_bytes = std::fs::metadata(&path).ok()?.len();
        Some(FileInfo { path, len_bytes })
    });
    let mut warnings = reader.warnings()?;
    let digest_snapshots = match Digest::open(&names.path(Part::Digest)) {
        Ok(digest) => {
            if digest.is_rebuilt {
                warnings.push("the digest has no index: its maker was interrupted".to_owned());
            }
            Some(digest.len())
        }
        Err(why) => {
            warnings.extend(why.map(|why| format!("the digest is not usable: {why}")));
            None
        }
    };
    let live = reader.live_at(None)?;
    if live.unmatched_frees > 0 {
        warnings.push(format!(
            "{} frees have no allocation in the file; they are ignored",
            live.unmatched_frees
        ));
    }
    if reader.sidecar().is_none() && (1..100).contains(&reader.sampling_table().ranges().len()) {
        warnings.push(
            "if the original heapprof recorded this on Linux, it ignored its sampling probabilities, and estimates are too \
             large"
                .to_owned(),
        );
    }
    let scan = reader.scan()?;
    let sidecar = reader.sidecar();
    let memory = sidecar.and_then(|sidecar| Some((sidecar.memory.first()?.1, sidecar.memory.last()?.1)));
    let mut info = Info {
        files: files.collect(),
        target: sidecar.map(|sidecar| sidecar.header.facts.clone()),
        detach_stop_micros: sidecar.and_then(|sidecar| sidecar.detach_stop_micros),
        start_seconds: reader.initial_time(),
        elapsed_seconds: reader.elapsed()?.as_secs_f64(),
        period_bytes: reader.period_bytes(),
        sampling_ranges: reader.sampling_table().ranges().len(),
        events: scan.events,
        allocations: scan.allocations,
        traces: reader.trace_count(),
        digest_snapshots,
        live_at_seconds: reader.elapsed()?.as_secs_f64(),
        estimated_live_bytes: 0.0,
        estimated_live_bytes_margin: 0.0,
        estimated_live_objects: 0.0,
        estimated_live_objects_margin: 0.0,
        estimated_allocated_bytes: 0.0,
        memory,
        losses: sidecar.map(|sidecar| sidecar.losses.clone()).unwrap_or_default(),
        end: sidecar.and_then(|sidecar| sidecar.end.clone()),
        is_cut: scan.is_cut,
        warnings,
    };
    info.set_live(&live.total);
    Ok(info)
}
