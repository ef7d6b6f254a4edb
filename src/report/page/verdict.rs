//! The verdict, as the page shows it: what `pyheap leaks` says, bounded, with the groups that a site is made of.

use serde_json::{Value, json};

use super::collect::Collected;
use super::stacks::{shown, written};
use crate::report::leaks::render::{headline, hits, process};
use crate::report::leaks::{Frame, Report, Site, Verdict};

/// Sites on the page.
const MAX_SITES: usize = 50;
/// Frames of a site's stack on the page.
const MAX_FRAMES: usize = 30;
/// Bytes of all these frames; real programs have some kilobytes.
const STACK_BYTES: usize = 300_000;

/// Traces of sites that leak.
pub(super) fn leaking_traces(report: &Report) -> Vec<u32> {
    let leaks = report.leaks.iter().filter(|site| site.verdict == Verdict::Leak);
    leaks.flat_map(|site| site.traces.iter().copied()).collect()
}

/// The answer, and what belongs to it, a line each.
pub(super) fn lines(report: &Report) -> Vec<String> {
    let limit = report.limit.as_ref().map(hits);
    let lines = [headline(report), process(report)].into_iter().chain(limit);
    lines.map(|line| shown(&line)).collect()
}

/// The sites, each with the groups it is made of, or `null` if they are not told apart.
pub(super) fn sites(report: &Report, collected: &mut Collected) -> Vec<Value> {
    let sites = report.leaks.iter().take(MAX_SITES);
    let mut room = STACK_BYTES;
    sites.map(|site| self::site(site, collected, &mut room)).collect()
}

fn site(site: &Site, collected: &mut Collected, room: &mut usize) -> Value {
    let frames = site.stack.iter().take(MAX_FRAMES).map(text);
    let stack: Vec<String> = frames
        .take_while(|frame| {
            *room = room.saturating_sub(written(frame));
            *room > 0
        })
        .collect();
    let groups: Option<Vec<usize>> = site.traces.iter().map(|trace| collected.own_group(*trace)).collect();
    let place = site.own.as_ref().or(site.stack.first());
    json!({
        "verdict": site.verdict,
        "place": place.map_or_else(|| "(no Python stack)".to_owned(), text),
        "rate": site.growth_bytes_per_min,
        "low": site.ci95.0,
        "high": site.ci95.1,
        "share": site.share,
        "last_third": site.last_third_bytes_per_min,
        "live": site.live_bytes,
        "margin": site.live_bytes_margin,
        "objects": site.objects,
        "age": site.age_seconds.map(|ages| [ages.median, ages.oldest]),
        "domain": site.domain,
        "thread": site.thread.as_deref().map(shown),
        "stacks": site.stacks,
        "more_frames": site.stack.len() - stack.len(),
        "stack": stack,
        "lines": site.lines.iter().map(|line| json!([text(&line.frame), line.growth_bytes_per_min])).collect::<Vec<_>>(),
        "groups": groups,
    })
}

/// `file:line function`.
fn text(frame: &Frame) -> String {
    let function = frame.function.iter().map(|function| format!(" {}", shown(function)));
    format!("{}:{}", shown(&frame.file), frame.line) + &function.collect::<String>()
}
