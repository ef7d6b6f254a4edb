//! What is known of the process, and what is not.

use serde_json::{Value, json};

use super::collect::{Collected, Kind};
use super::stacks::shown;
use crate::profile::reader::Reader;
use crate::profile::sidecar::Sidecar;
use crate::report::human::{bytes, count, exact_bytes, share};
use crate::report::info::{Info, describe_losses};
use crate::report::leaks::Report;

/// Points of a line over time.
const MAX_POINTS: u128 = 400;

/// The resident set over time: seconds and bytes, the last value of each of the parts of time.
pub(super) fn memory(sidecar: Option<&Sidecar>, end: u64) -> Vec<Value> {
    let samples = sidecar.map_or(&[][..], |sidecar| &sidecar.memory);
    let part = |at: u64| u128::from(at) * MAX_POINTS / u128::from(end.max(1));
    let mut points: Vec<(u64, u64)> = Vec::new();
    for (at, sample) in samples.iter().filter(|(at, _)| *at <= end) {
        match points.last_mut() {
            // What damage has put out of order is left out.
            Some(last) if *at < last.0 => {}
            Some(last) if part(last.0) == part(*at) => *last = (*at, sample.rss),
            _ => points.push((*at, sample.rss)),
        }
    }
    points.iter().map(|(at, rss)| json!([*at as f64 / 1e6, rss])).collect()
}

/// What these numbers cannot tell, a sentence each; what is special to this recording first.
pub(super) fn unknown(reader: &Reader, report: &Report, info: &Info, collected: &Collected) -> Vec<String> {
    let mut lines = of_this_recording(reader, info);
    if !report.domains.is_empty() {
        let names = report.domains.join(", ");
        lines.push(format!(
            "Only what these allocator domains hold is on this page: {names}."
        ));
    }
    lines.extend(left_out(collected));
    lines.push(sampling(reader));
    lines.push(format!(
        "Time is told to {}: what came and went between two moments counts as allocated, not as live. Sizes are rounded to \
         whole bytes a stack.",
        crate::report::human::Human(std::time::Duration::from_micros(collected.clock.width)),
    ));
    lines.push(
        "The ± of a change since a moment after the start is an upper limit: a free does not tell which of several blocks \
         it ended (pyheap diff looks more closely)."
            .to_owned(),
    );
    lines.push("What was allocated before the recording began is not in these numbers, nor are its frees.".to_owned());
    let outside = match report.has_native {
        true => {
            "Memory that --native does not see (small mappings, thread stacks, mapped files, calls by copied pointers)"
        }
        false => {
            "Memory that does not come from Python's allocators (malloc or mmap in C code, thread stacks, mapped files)"
        }
    };
    lines.push(format!("{outside} is in the resident set, but not in live memory."));
    lines.push(
        "It is told where memory was allocated, not what keeps it alive. Child processes are not in it.".to_owned(),
    );
    lines
}

fn of_this_recording(reader: &Reader, info: &Info) -> Vec<String> {
    let mut lines = Vec::new();
    if !info.losses.is_empty() {
        let losses = describe_losses(&info.losses);
        lines.push(format!(
            "Lost while recording: {}. A lost record costs a time or a stack, it makes no leak; what was allocated meanwhile \
             may be missing in allocated bytes.",
            shown(&losses)
        ));
    }
    match (reader.sidecar(), &info.end) {
        (None, _) => lines.push(
            "There is no ._hpx file beside the profile: functions, threads, the process's memory and losses are not known."
                .to_owned(),
        ),
        (Some(_), None) => lines.push(
            "The recording had not ended when this page was made, or pyheap was killed: nothing is known of what came later."
                .to_owned(),
        ),
        (_, Some(end)) => lines.extend(end.next.as_ref().map(|next| {
            format!(
                "The recording goes on in {}; that is not in this page.",
                shown(next)
            )
        })),
    }
    lines.extend(
        info.warnings
            .iter()
            .map(|warning| format!("Warning: {}", shown(warning))),
    );
    lines
}

fn sampling(reader: &Reader) -> String {
    match reader.period_bytes() {
        Some(0 | 1) => "Every allocation was recorded: sizes have no sampling error.".to_owned(),
        Some(period) => format!(
            "Sizes are estimates from one sample per {}; the intervals hold the truth in 19 of 20 cases. Of what has no sample there may \
             be up to {}.",
            exact_bytes(period),
            bytes(3.69 * period as f64),
        ),
        None => "Sizes are estimates by the profile's own table of probabilities; ± is by the normal approximation, which says \
                 too little where there are few samples."
            .to_owned(),
    }
}

/// Stacks that are not told apart.
fn left_out(collected: &Collected) -> Option<String> {
    let sum = |kinds: &[Kind]| {
        let groups = collected.groups.iter().filter(|group| kinds.contains(&group.kind));
        groups.fold((0u64, 0.0), |(members, live), group| {
            (members + u64::from(group.members), live + group.series.live_bytes())
        })
    };
    let all = sum(&[Kind::Stack, Kind::Line, Kind::Rest]);
    let (lines, rest) = (sum(&[Kind::Line]), sum(&[Kind::Rest]));
    if lines.0 + rest.0 == 0 {
        return None;
    }
    let mut text = format!(
        "To keep the page small, the callers of the {} smallest of {} stacks are left out: these count for their allocating line \
         ({} live at the end, {} of all).",
        count((lines.0 + rest.0) as f64),
        count(all.0 as f64),
        bytes(lines.1 + rest.1),
        share(lines.1 + rest.1, all.1),
    );
    if rest.0 > 0 {
        text += &format!(
            " Of {} of them the line is left out, too ({}).",
            count(rest.0 as f64),
            bytes(rest.1)
        );
    }
    Some(text)
}
