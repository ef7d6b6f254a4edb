//! Does it leak, where, how fast, and how sure is that? Pure functions from what was recorded to a verdict; the words, the
//! numbers and the reasons are in `docs/leaks.md`.
//!
//! [`Tracker`] takes events and can be asked at any time, so that a live view and a finished recording get their answers
//! from the same code.

pub mod memory;
pub mod own;
pub mod render;
pub mod series;
#[cfg(test)]
mod simulated;
pub mod stats;
pub mod tracker;
pub mod trend;

use std::collections::HashMap;
use std::time::Duration;

use serde::Serialize;

use crate::profile::facts::MemorySample;
use crate::profile::model::StackFrame;
use crate::report::types::TypeRow;
use memory::{Forecast, Limit, ProcessTrend, forecast, own_bytes, process_trend, resident_bytes};
pub use own::OwnCode;
pub use tracker::Tracker;
use tracker::{ALL, Group, Kind};
use trend::{Trend, trend};

/// The odds that a recording of a program that does not leak names any leak, as far as sampling and steady fluctuation go.
pub(super) const FALSE_ALARM: f64 = 0.01;
/// Slower growth than this, in bytes a second, is no leak: 4 KiB a minute are 6 MiB a day.
const LEAST_RATE: f64 = 4096.0 / 60.0;
/// Sites in a report.
const MAX_SITES: usize = 100;
/// Allocating lines of a site in a report.
const MAX_LINES: usize = 5;
/// Leaks that explain less than this part of the growth are not what it is about.
const LEAST_EXPLAINED: f64 = 0.1;

/// What a site does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It grows, beyond chance, and goes on.
    Leak,
    /// It has grown and stopped.
    Plateau,
    /// Nothing says that it grows.
    Steady,
    /// It came at once, and stays.
    OneOff,
}

/// What the process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Overall {
    /// At least one site leaks.
    Leak,
    /// The process grows, Python's heap does not.
    Native,
    /// The process grows as far as Python's heap has been larger meanwhile: freed memory was not given back.
    Fragmentation,
    /// Nothing grows beyond chance.
    NoLeak,
}

/// A frame in a report.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Frame {
    /// File.
    pub file: String,
    /// Line, 0 if there is none.
    pub line: u32,
    /// Function, if known.
    pub function: Option<String>,
}

/// An allocating line of a site.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Where.
    #[serde(flatten)]
    pub frame: Frame,
    /// Its part of the site's growth, in bytes a minute.
    pub growth_bytes_per_min: f64,
}

/// How old the survivors of a site are at the end, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ages {
    /// The age that half of their bytes have not reached.
    pub median: f64,
    /// The oldest sample.
    pub oldest: f64,
}

/// One site: what grows together, and where.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Site {
    /// What it does.
    pub verdict: Verdict,
    /// Growth over the whole recording at its rate.
    pub growth_bytes: f64,
    /// Rate of growth.
    pub growth_bytes_per_min: f64,
    /// 95 % interval of the rate, in bytes a minute.
    pub ci95: (f64, f64),
    /// Part of the growth of all leaks; `None` for what is none.
    pub share: Option<f64>,
    /// Rate in the last third of the recording, in bytes a minute.
    pub last_third_bytes_per_min: f64,
    /// Live at the end, of what was allocated since the start.
    pub live_bytes: f64,
    /// Half the width of the 95 % interval of that.
    pub live_bytes_margin: f64,
    /// Live objects.
    pub objects: f64,
    /// Ages of the survivors; `None` if they were not recorded.
    pub age_seconds: Option<Ages>,
    /// Allocator domain of most of the growth, if known: `raw`, `mem` or `obj`.
    pub domain: Option<String>,
    /// The thread that allocated at least half of what is live, if it is known.
    pub thread: Option<String>,
    /// What the live objects are, the type with the most bytes first; empty if that is not known.
    pub types: Vec<TypeRow>,
    /// The innermost frame of own code.
    pub own: Option<Frame>,
    /// The stack with most of the growth, innermost first.
    pub stack: Vec<Frame>,
    /// The number of stacks that were taken together.
    pub stacks: usize,
    /// The allocating lines with most of the growth.
    pub lines: Vec<Line>,
    /// The traces that it is made of.
    #[serde(skip)]
    pub traces: Vec<u32>,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// In a word.
    pub verdict: Overall,
    /// Growth of the resident set over the whole recording at its rate; `None` if it was not recorded, or too briefly.
    pub rss_growth_bytes: Option<f64>,
    /// 95 % interval of the rate of that, in bytes a minute.
    pub rss_ci95: Option<(f64, f64)>,
    /// Growth of Python's heap, in the same way.
    pub explained_bytes: f64,
    /// The allocator domains that alone were judged; empty if all that were recorded were.
    pub domains: Vec<String>,
    /// Whether memory of native code was recorded.
    pub has_native: bool,
    /// Length of the recording.
    pub elapsed_seconds: f64,
    /// Whether it was long enough for a verdict.
    pub is_long_enough: bool,
    /// Resident set at the start and at the end.
    pub rss_bytes: Option<(u64, u64)>,
    /// Live at the end, of what was allocated since the start.
    pub live_bytes: f64,
    /// Half the width of the 95 % interval of that.
    pub live_bytes_margin: f64,
    /// When the limit is hit, if there is one.
    pub limit: Option<Forecast>,
    /// The number of sites that leak.
    pub leaking_sites: usize,
    /// Growth of all of them together, in bytes a minute.
    pub leaking_bytes_per_min: f64,
    /// Sites, those that leak first, then by growth; a hundred at most.
    pub leaks: Vec<Site>,
    /// What else one should know.
    pub notes: Vec<String>,
}

/// What a tracker does not know.
pub trait Facts {
    /// The frames of a trace, outermost first.
    fn frames(&self, trace: u32) -> Vec<StackFrame<'_>>;
    /// Names of its domain and thread.
    fn origin(&self, trace: u32) -> (Option<String>, Option<String>);
    /// Memory of native code was recorded.
    fn has_native(&self) -> bool {
        false
    }
    /// The allocator domains that the tracker has seen, by name; empty if it has seen all that were recorded.
    fn only(&self) -> Vec<String> {
        Vec::new()
    }
    /// What the survivors of these traces are.
    fn types(&self, _traces: &[u32]) -> Vec<TypeRow> {
        Vec::new()
    }
    /// When the survivors of a trace were allocated, in milliseconds since the start, and their sizes; `None` if that is not
    /// known.
    fn births(&self, trace: u32) -> Option<&[(u64, u64)]>;
    /// Estimated live bytes of a trace; `weigh` gives what a sample of a size stands for.
    fn live_bytes(&self, trace: u32, weigh: &dyn Fn(u64) -> f64) -> f64 {
        let births = self.births(trace).unwrap_or_default();
        births.iter().map(|(_, size)| weigh(*size)).sum()
    }
    /// The process's memory over time, microseconds since the start first.
    fn memory(&self) -> &[(u64, MemorySample)];
}

/// A group that is looked at, with its trend.
struct Candidate {
    group: u32,
    trend: Trend,
    is_leak: bool,
}

/// Judges all that `tracker` has seen in `elapsed`.
pub fn judge(tracker: &mut Tracker, elapsed: Duration, facts: &dyn Facts, limit: Option<Limit>) -> Report {
    tracker.advance(elapsed);
    let width = tracker.bins().width_seconds();
    let bins = tracker.bins().whole(elapsed);
    let groups = tracker.groups();
    let traffic = groups[ALL as usize].series.floors(bins).allocated;
    let trends: Vec<Option<Trend>> = groups
        .iter()
        .map(|group| trend(&group.series.floors(bins), width, &group.series.now, &traffic))
        .collect();
    let memory = facts.memory();
    let process = process_trend(memory, elapsed, own_bytes);
    let resident = process_trend(memory, elapsed, resident_bytes);
    let mut notes = Vec::new();
    let candidates = candidates(groups, &trends, process.as_ref(), facts.has_native(), &mut notes);
    let chosen = choose(groups, &trends, candidates);
    let leaking: f64 = chosen.iter().filter(|c| c.is_leak).map(|c| c.trend.rate).sum();
    let context = Context {
        groups,
        trends: &trends,
        facts,
        tracker,
        elapsed: elapsed.as_secs_f64(),
    };
    let leaks: Vec<Site> = chosen
        .iter()
        .take(MAX_SITES)
        .map(|c| context.site(c, leaking))
        .collect();
    let all = trends.first().and_then(Option::as_ref);
    let peaks = Peaks::of(tracker.peaks(), bins);
    let only = facts.only();
    // What the process does is not to be explained by a part of what it has asked for.
    let whole = process.as_ref().filter(|_| only.is_empty());
    let verdict = overall(whole, all, leaking, &peaks, width * bins as f64);
    let growth = match (&process, verdict) {
        (_, Overall::NoLeak) => None,
        (Some(process), _) if process.is_growth => Some((process.rate, process.interval)),
        _ => leaks_together(&chosen),
    };
    let now = groups[ALL as usize].series.now;
    Report {
        verdict,
        rss_growth_bytes: resident.map(|trend| trend.rate * elapsed.as_secs_f64()),
        domains: only,
        has_native: facts.has_native(),
        rss_ci95: resident.map(|trend| per_minute(trend.interval)),
        explained_bytes: all.map_or(0.0, |trend| trend.rate * elapsed.as_secs_f64()),
        elapsed_seconds: elapsed.as_secs_f64(),
        is_long_enough: all.is_some(),
        rss_bytes: memory
            .first()
            .zip(memory.last())
            .map(|(first, last)| (first.1.rss, last.1.rss)),
        live_bytes: now.bytes,
        live_bytes_margin: stats::Z_975 * now.variance.sqrt(),
        limit: limit
            .zip(memory.last())
            .map(|(limit, (_, last))| forecast(limit, last, growth)),
        leaking_sites: chosen.iter().filter(|c| c.is_leak).count(),
        leaking_bytes_per_min: leaking * 60.0,
        leaks,
        notes,
    }
}

fn per_minute((low, high): (f64, f64)) -> (f64, f64) {
    (low * 60.0, high * 60.0)
}

/// Every group that is not the same as another, and whether it leaks.
fn candidates(
    groups: &[Group],
    trends: &[Option<Trend>],
    process: Option<&ProcessTrend>,
    has_native: bool,
    notes: &mut Vec<String>,
) -> Vec<Candidate> {
    let mut own_of: HashMap<u32, u32> = HashMap::new();
    for (at, group) in groups.iter().enumerate().filter(|(_, group)| group.kind == Kind::Own) {
        own_of.extend(group.stacks.iter().map(|stack| (*stack, at as u32)));
    }
    let size = |group: &u32| groups[*group as usize].stacks.len();
    let is_distinct = |at: u32, group: &Group| match group.kind {
        Kind::All => false,
        Kind::Own => true,
        Kind::Stack => own_of.get(&at).is_none_or(|own| size(own) > 1),
        Kind::Leaf => {
            let first = group.stacks.first().and_then(|stack| own_of.get(stack));
            let is_one_own = group.stacks.iter().all(|stack| own_of.get(stack) == first);
            group.stacks.len() > 1 && !(is_one_own && first.is_some_and(|own| size(own) == group.stacks.len()))
        }
    };
    let mut found: Vec<Candidate> = groups
        .iter()
        .enumerate()
        .filter(|(at, group)| is_distinct(*at as u32, group))
        .filter_map(|(at, _)| {
            Some(Candidate {
                group: at as u32,
                trend: trends[at].clone()?,
                is_leak: false,
            })
        })
        .collect();
    let family: Vec<(f64, f64)> = found.iter().map(|c| (c.trend.p, c.trend.least_p)).collect();
    let mut refuted = 0.0;
    for (candidate, is_significant) in found.iter_mut().zip(stats::holm(&family, FALSE_ALARM)) {
        let trend = &candidate.trend;
        let grows = is_significant && trend.goes_on && trend.rate >= LEAST_RATE;
        // The process would have to grow at least half as fast as a site in it that grows. Native code asks for much that it never
        // touches.
        let is_refuted = process.is_some_and(|process| {
            let touched = if has_native && process.is_growth {
                LEAST_TOUCHED
            } else {
                0.5
            };
            touched * trend.interval.0 > process.interval.1.max(0.0)
        });
        candidate.is_leak = grows && !is_refuted;
        if grows && is_refuted {
            refuted = f64::max(refuted, trend.rate);
        }
    }
    if refuted > 0.0 {
        notes.push(format!(
            "live memory that was allocated since the start grows by {} a minute at a site, but the process does not grow: it \
             replaces what was allocated before, or fills memory that the process had already; a longer recording tells",
            super::human::bytes(refuted * 60.0)
        ));
    }
    found
}

/// Of groups that share stacks one each. Leaks come first: those by own code, then stacks and allocating lines that no leak
/// by own code covers; then the other lines of own code, and what has none. Each sort by growth.
fn choose(groups: &[Group], trends: &[Option<Trend>], mut found: Vec<Candidate>) -> Vec<Candidate> {
    let rank = |candidate: &Candidate| match (candidate.is_leak, groups[candidate.group as usize].kind) {
        (true, Kind::Own) => 0,
        (true, _) => 1,
        (false, Kind::Own) => 2,
        (false, Kind::Leaf) => 3,
        (false, _) => 4,
    };
    // Of a stack and a line that grow about alike, the stack says more.
    let weight = |candidate: &Candidate| {
        let precise = groups[candidate.group as usize].kind == Kind::Stack;
        candidate.trend.rate * if precise { 1.1 } else { 1.0 }
    };
    found.sort_by(|a, b| {
        let by_growth = weight(b).total_cmp(&weight(a));
        rank(a).cmp(&rank(b)).then(by_growth).then(a.group.cmp(&b.group))
    });
    let mut covered = vec![false; groups.len()];
    let mut chosen = Vec::new();
    for candidate in found {
        let group = &groups[candidate.group as usize];
        if group.series.now.samples == 0 {
            continue;
        }
        let own = [candidate.group];
        let stacks = if group.stacks.is_empty() {
            &own[..]
        } else {
            &group.stacks
        };
        let weigh = |stack: &u32| match &trends[*stack as usize] {
            Some(trend) if candidate.is_leak => trend.rate.max(0.0),
            _ => groups[*stack as usize].series.now.bytes,
        };
        let total: f64 = stacks.iter().map(weigh).sum();
        let free: f64 = stacks
            .iter()
            .filter(|stack| !covered[**stack as usize])
            .map(weigh)
            .sum();
        if free > 0.5 * total {
            stacks.iter().for_each(|stack| covered[*stack as usize] = true);
            chosen.push(candidate);
        }
    }
    chosen.sort_by(|a, b| {
        let by_growth = b.trend.rate.total_cmp(&a.trend.rate);
        b.is_leak.cmp(&a.is_leak).then(by_growth).then(a.group.cmp(&b.group))
    });
    chosen
}

/// The growth of all leaks with its interval, in bytes a second; margins add up in squares.
fn leaks_together(chosen: &[Candidate]) -> Option<(f64, (f64, f64))> {
    let leaks: Vec<&Trend> = chosen.iter().filter(|c| c.is_leak).map(|c| &c.trend).collect();
    let rate: f64 = leaks.iter().map(|trend| trend.rate).sum();
    let margin = |side: fn(&Trend) -> f64| leaks.iter().map(|trend| side(trend).powi(2)).sum::<f64>().sqrt();
    let below = margin(|trend| trend.rate - trend.interval.0);
    let above = margin(|trend| trend.interval.1 - trend.rate);
    (rate > 0.0).then_some((rate, (rate - below, rate + above)))
}

/// The most that was ever live, after the warm-up and at the end.
struct Peaks {
    start: f64,
    end: f64,
}

impl Peaks {
    fn of(peaks: &[f64], bins: usize) -> Self {
        let most = |count: usize| peaks.iter().take(count).copied().fold(0.0, f64::max);
        Self {
            start: most(bins / 4),
            end: most(bins),
        }
    }
}

fn overall(process: Option<&ProcessTrend>, all: Option<&Trend>, leaking: f64, peaks: &Peaks, seconds: f64) -> Overall {
    let leaks = leaking > 0.0;
    let Some(process) = process.filter(|process| process.is_growth) else {
        return if leaks { Overall::Leak } else { Overall::NoLeak };
    };
    let explained = all.map_or(0.0, |all| all.rate);
    if leaks && leaking >= LEAST_EXPLAINED * process.rate {
        Overall::Leak
    } else if explained >= 0.5 * process.rate {
        // Python's heap grows, but no site of it for sure.
        if leaks { Overall::Leak } else { Overall::NoLeak }
    } else if peaks.end - peaks.start >= 0.5 * process.rate * seconds {
        Overall::Fragmentation
    } else {
        Overall::Native
    }
}

/// Share of what native code asks for that it uses at least, where it leaks.
const LEAST_TOUCHED: f64 = 0.125;

/// What is needed to describe a site.
struct Context<'a> {
    groups: &'a [Group],
    trends: &'a [Option<Trend>],
    facts: &'a dyn Facts,
    tracker: &'a Tracker,
    elapsed: f64,
}

impl Context<'_> {
    fn site(&self, candidate: &Candidate, leaking: f64) -> Site {
        let group = &self.groups[candidate.group as usize];
        let trend = &candidate.trend;
        let itself = [candidate.group];
        let stacks = if group.stacks.is_empty() {
            &itself[..]
        } else {
            &group.stacks
        };
        let growth = |stack: u32| self.trends[stack as usize].as_ref().map_or(0.0, |trend| trend.rate);
        let live = |stack: u32| self.groups[stack as usize].series.now.bytes;
        let largest = stacks.iter().copied().max_by(|a, b| {
            let by_growth = growth(*a).total_cmp(&growth(*b));
            by_growth.then(live(*a).total_cmp(&live(*b))).then(b.cmp(a))
        });
        let trace = largest
            .and_then(|stack| self.groups[stack as usize].traces.first())
            .copied();
        let stack: Vec<Frame> = trace.map(|trace| self.frames(trace)).unwrap_or_default();
        let domain = trace.and_then(|trace| self.facts.origin(trace).0);
        let now = group.series.now;
        Site {
            verdict: verdict(candidate),
            growth_bytes: trend.rate * self.elapsed,
            growth_bytes_per_min: trend.rate * 60.0,
            ci95: per_minute(trend.interval),
            share: (candidate.is_leak && leaking > 0.0).then(|| trend.rate / leaking),
            last_third_bytes_per_min: trend.last_third * 60.0,
            live_bytes: now.bytes,
            live_bytes_margin: stats::Z_975 * now.variance.sqrt(),
            objects: now.objects,
            age_seconds: self.ages(&group.traces),
            domain,
            thread: self.thread(&group.traces),
            types: self.facts.types(&group.traces),
            own: stack.iter().find(|frame| self.tracker.own().has(&frame.file)).cloned(),
            stack,
            stacks: stacks.len(),
            lines: self.lines(stacks),
            traces: group.traces.clone(),
        }
    }

    /// The frames of a trace, innermost first.
    fn frames(&self, trace: u32) -> Vec<Frame> {
        let frame = |frame: &StackFrame<'_>| Frame {
            file: frame.file.to_string(),
            line: frame.line,
            function: frame.function.map(str::to_owned),
        };
        self.facts.frames(trace).iter().rev().map(frame).collect()
    }

    fn lines(&self, stacks: &[u32]) -> Vec<Line> {
        let mut lines: HashMap<Frame, f64> = HashMap::new();
        for stack in stacks {
            let rate = self.trends[*stack as usize].as_ref().map_or(0.0, |trend| trend.rate);
            let trace = self.groups[*stack as usize].traces.first();
            // The few that matter: a recursion may have a thousand stacks of a thousand frames.
            if rate > 0.0
                && let Some(frame) = trace.and_then(|trace| self.frames(*trace).into_iter().next())
            {
                *lines.entry(frame).or_default() += rate * 60.0;
            }
        }
        let mut lines: Vec<Line> = lines
            .into_iter()
            .map(|(frame, growth_bytes_per_min)| Line {
                frame,
                growth_bytes_per_min,
            })
            .collect();
        lines.sort_by(|a, b| {
            let by_growth = b.growth_bytes_per_min.total_cmp(&a.growth_bytes_per_min);
            by_growth.then_with(|| a.frame.cmp(&b.frame))
        });
        lines.truncate(MAX_LINES);
        lines
    }

    /// The thread that allocated half or more of what is live of these traces.
    fn thread(&self, traces: &[u32]) -> Option<String> {
        let mut threads: HashMap<Option<String>, f64> = HashMap::new();
        let mut all = 0.0;
        for trace in traces {
            let bytes = self.facts.live_bytes(*trace, &|size| self.tracker.weigh(size));
            all += bytes;
            *threads.entry(self.facts.origin(*trace).1).or_default() += bytes;
        }
        match threads.len() {
            1 => threads.into_keys().next().flatten(),
            _ => threads
                .into_iter()
                .find_map(|(thread, bytes)| thread.filter(|_| bytes >= 0.5 * all)),
        }
    }

    fn ages(&self, traces: &[u32]) -> Option<Ages> {
        let mut births: Vec<(u64, f64)> = Vec::new();
        for trace in traces {
            let of_trace = self.facts.births(*trace)?.iter();
            births.extend(of_trace.map(|(born, size)| (*born, self.tracker.weigh(*size))));
        }
        ages(births, self.elapsed)
    }
}

/// Ages at the time `elapsed`, in seconds since the start, of what was allocated at these milliseconds since then, with the
/// bytes that it stands for; `None` if that is nothing.
pub fn ages(mut births: Vec<(u64, f64)>, elapsed: f64) -> Option<Ages> {
    births.sort_unstable_by_key(|(born, _)| *born);
    let age = |born: u64| (elapsed - born as f64 / 1000.0).max(0.0);
    let half = births.iter().map(|(_, bytes)| bytes).sum::<f64>() / 2.0;
    let mut sum = 0.0;
    let middle = births.iter().find(|(_, bytes)| {
        sum += bytes;
        sum >= half
    });
    Some(Ages {
        median: age(middle?.0),
        oldest: age(births.first()?.0),
    })
}

fn verdict(candidate: &Candidate) -> Verdict {
    match &candidate.trend {
        _ if candidate.is_leak => Verdict::Leak,
        trend if trend.came_at_once => Verdict::OneOff,
        trend if trend.came_early && !trend.goes_on => Verdict::Plateau,
        _ => Verdict::Steady,
    }
}
