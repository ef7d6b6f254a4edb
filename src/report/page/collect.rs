//! Reads the events twice: first to see which stacks matter and how closely time can be told, then to follow them.

use std::collections::HashMap;

use super::clock::Clock;
use super::series::Series;
use super::stacks::{LEFT_OUT, REST, Room, Stacks, UNKNOWN};
use crate::profile::live::{Tally, TraceMap};
use crate::profile::model::{Event, StackFrame};
use crate::profile::reader::{ReadError, Reader};
use crate::reader::bin_of;
use crate::report::filter::Counted;

/// Moments of a page, the closest that there is room for.
const MOMENTS: [u32; 3] = [240, 120, 60];
/// Classes of sizes; one more than a size has bits.
const CLASSES: usize = 65;

/// What a page has room for. A cell takes some 20 bytes; `docs/report.md` tells what comes out.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Cells of stacks that are followed one by one.
    pub stack_cells: usize,
    /// Cells of allocating lines, of stacks that are not.
    pub line_cells: usize,
    /// The tree, of stacks and of such lines.
    pub stacks: Room,
    /// Places of the tree that are kept for such lines.
    pub line_nodes: usize,
}

impl Limits {
    /// A part of the room, for what changes over time.
    pub fn scaled(self, part: f64) -> Self {
        let part_of = |cells: usize| (cells as f64 * part) as usize;
        Self {
            stack_cells: part_of(self.stack_cells),
            line_cells: part_of(self.line_cells),
            ..self
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            stack_cells: 240_000,
            line_cells: 80_000,
            stacks: Room {
                nodes: 240_000,
                name_bytes: 1_200_000,
            },
            line_nodes: 20_000,
        }
    }
}

/// What a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One stack.
    Stack,
    /// All small stacks that allocate in one line.
    Line,
    /// All that is smaller still.
    Rest,
}

/// What is followed over time.
#[derive(Debug, Clone)]
pub struct Group {
    /// What it is.
    pub kind: Kind,
    /// Its place in the tree.
    pub node: u32,
    /// The number of traces in it.
    pub members: u32,
    /// One of them.
    pub trace: u32,
    /// Over time.
    pub series: Series,
}

/// A recording, from moment to moment.
#[derive(Debug)]
pub struct Collected {
    /// The moments.
    pub clock: Clock,
    /// The tree.
    pub stacks: Stacks,
    /// All that was ever allocated is in exactly one of them.
    pub groups: Vec<Group>,
    /// The group of each trace, plus 1.
    places: TraceMap<u32>,
    /// All again, by size: the classes of the histogram.
    pub classes: Vec<(usize, Series)>,
}

impl Collected {
    /// The group of a trace.
    pub fn group(&mut self, trace: u32) -> Option<usize> {
        (*self.places.entry(trace) as usize).checked_sub(1)
    }

    /// The group of a trace, if it has one to itself.
    pub fn own_group(&mut self, trace: u32) -> Option<usize> {
        let place = self.group(trace)?;
        (self.groups[place].kind == Kind::Stack).then_some(place)
    }
}

/// What the first pass sees of a trace.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// The most that was alive of it.
    peak: f64,
    allocated: f64,
    /// Of each of [`MOMENTS`]: the last moment at which it changed, plus 1, and how many there were.
    changes: [(u32, u32); 3],
}

/// Follows a recording. Traces in `first` come first when there is not room for all.
///
/// # Errors
/// When the events cannot be opened.
pub fn collect(counted: &Counted<'_>, first: &[u32], limits: Limits) -> Result<Collected, ReadError> {
    let reader = counted.reader();
    let elapsed = reader.elapsed()?;
    let clocks = MOMENTS.map(|most| Clock::new(elapsed, most));
    let seen = survey(counted, &clocks)?;
    let cells = |clock: usize| {
        seen.iter()
            .map(|(_, seen)| seen.changes[clock].1 as usize)
            .sum::<usize>()
    };
    let choice = (0..MOMENTS.len()).find(|clock| cells(*clock) <= limits.stack_cells);
    let choice = choice.unwrap_or(MOMENTS.len() - 1);
    let mut plan = Plan::new(reader, limits, clocks[choice], choice);
    for trace in ranked(&seen, first) {
        plan.place(trace.0, &trace.1);
    }
    let mut collected = plan.finish();
    follow(counted, &mut collected)?;
    Ok(collected)
}

fn survey(counted: &Counted<'_>, clocks: &[Clock; 3]) -> Result<Vec<(u32, Seen)>, ReadError> {
    let reader = counted.reader();
    let mut tally = Tally::new(reader.weights(), reader.trace_count());
    let mut seen: TraceMap<Seen> = TraceMap::new(reader.trace_count());
    counted.visit(|event| {
        tally.apply(event);
        let live = tally.live(event.trace);
        let entry = seen.entry(event.trace);
        entry.peak = entry.peak.max(live.bytes);
        entry.allocated = live.alloc_bytes;
        for (clock, (last, count)) in clocks.iter().zip(&mut entry.changes) {
            let moment = clock.moment(event.clock) + 1;
            if *last != moment {
                (*last, *count) = (moment, *count + 1);
            }
        }
    })?;
    let touched = seen.iter().filter(|(_, seen)| seen.changes[0].1 > 0);
    Ok(touched.map(|(trace, seen)| (trace, *seen)).collect())
}

/// Those in `first`, then by what was alive of them at most and what they allocated, as parts of all.
fn ranked(seen: &[(u32, Seen)], first: &[u32]) -> Vec<(u32, Seen)> {
    let sum = |value: fn(&Seen) -> f64| seen.iter().map(|(_, seen)| value(seen)).sum::<f64>().max(1.0);
    let (peaks, allocated) = (sum(|seen| seen.peak), sum(|seen| seen.allocated));
    let is_first: std::collections::HashSet<u32> = first.iter().copied().collect();
    let mut ranked: Vec<_> = seen
        .iter()
        .map(|(trace, seen)| {
            let part = seen.peak / peaks + seen.allocated / allocated;
            (is_first.contains(trace), part, *trace, *seen)
        })
        .collect();
    ranked.sort_by(|a, b| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)).then(a.2.cmp(&b.2)));
    ranked.into_iter().map(|(_, _, trace, seen)| (trace, seen)).collect()
}

/// Which trace goes into which group.
struct Plan<'a> {
    reader: &'a Reader,
    limits: Limits,
    /// Which of [`MOMENTS`] was chosen.
    choice: usize,
    clock: Clock,
    stacks: Stacks,
    groups: Vec<Group>,
    places: TraceMap<u32>,
    stack_cells: usize,
    line_cells: usize,
    lines: HashMap<(String, u32, String), Option<u32>>,
    rest: Option<u32>,
}

impl<'a> Plan<'a> {
    fn new(reader: &'a Reader, limits: Limits, clock: Clock, choice: usize) -> Self {
        Self {
            reader,
            limits,
            choice,
            clock,
            stacks: Stacks::new(limits.stacks),
            groups: Vec::new(),
            places: TraceMap::new(reader.trace_count()),
            stack_cells: 0,
            line_cells: 0,
            lines: HashMap::new(),
            rest: None,
        }
    }

    fn place(&mut self, trace: u32, seen: &Seen) {
        let frames = self.reader.frames(trace).unwrap_or_default();
        let cells = seen.changes[self.choice].1 as usize;
        let group = self
            .own(trace, &frames, cells)
            .or_else(|| self.line(trace, frames.last()?))
            .unwrap_or_else(|| self.rest(trace));
        self.groups[group as usize].members += 1;
        *self.places.entry(trace) = group + 1;
    }

    /// A group to itself, while there is room.
    fn own(&mut self, trace: u32, frames: &[StackFrame<'_>], cells: usize) -> Option<u32> {
        if self.stack_cells + cells > self.limits.stack_cells {
            return None;
        }
        // A part of the room is for lines.
        self.stacks.set_room(Room {
            nodes: self.limits.stacks.nodes - self.limits.line_nodes,
            name_bytes: self.limits.stacks.name_bytes / 4 * 3,
        });
        let node = if frames.is_empty() {
            self.stacks.special(UNKNOWN)
        } else {
            self.stacks.insert(0, frames)?
        };
        self.stack_cells += cells;
        Some(self.add(Kind::Stack, node, trace))
    }

    /// That of its allocating line.
    fn line(&mut self, trace: u32, leaf: &StackFrame<'_>) -> Option<u32> {
        let key = (
            leaf.file.to_string(),
            leaf.line,
            leaf.function.unwrap_or_default().to_owned(),
        );
        if let Some(found) = self.lines.get(&key) {
            return *found;
        }
        self.stacks.set_room(self.limits.stacks);
        let cells = self.clock.last as usize + 1;
        let has_room = self.line_cells + cells <= self.limits.line_cells;
        let parent = self.stacks.special(LEFT_OUT);
        let node = has_room.then(|| self.stacks.insert(parent, std::slice::from_ref(leaf)));
        let group = node.flatten().map(|node| self.add(Kind::Line, node, trace));
        if group.is_some() {
            self.line_cells += cells;
        }
        self.lines.insert(key, group);
        group
    }

    fn rest(&mut self, trace: u32) -> u32 {
        if let Some(rest) = self.rest {
            return rest;
        }
        let node = self.stacks.special(REST);
        let group = self.add(Kind::Rest, node, trace);
        *self.rest.insert(group)
    }

    fn add(&mut self, kind: Kind, node: u32, trace: u32) -> u32 {
        self.groups.push(Group {
            kind,
            node,
            members: 0,
            trace,
            series: Series::default(),
        });
        self.groups.len() as u32 - 1
    }

    fn finish(self) -> Collected {
        Collected {
            clock: self.clock,
            stacks: self.stacks,
            groups: self.groups,
            places: self.places,
            classes: Vec::new(),
        }
    }
}

fn follow(counted: &Counted<'_>, collected: &mut Collected) -> Result<(), ReadError> {
    let reader = counted.reader();
    let mut tally = Tally::new(reader.weights(), reader.trace_count());
    let mut sizes = Tally::new(reader.weights(), CLASSES as u32);
    let mut classes = vec![Series::default(); CLASSES];
    counted.visit(|event| {
        let moment = collected.clock.moment(event.clock);
        let before = tally.live(event.trace);
        tally.apply(event);
        let group = (*collected.places.entry(event.trace) as usize).checked_sub(1);
        // Nothing is missing: both passes see the same events.
        if let Some(group) = group.and_then(|group| collected.groups.get_mut(group)) {
            group.series.change(moment, &before, &tally.live(event.trace));
        }
        let class = bin_of(event.size);
        let before = sizes.live(class as u32);
        sizes.apply(&Event {
            trace: class as u32,
            ..*event
        });
        classes[class].change(moment, &before, &sizes.live(class as u32));
    })?;
    collected.classes = classes
        .into_iter()
        .enumerate()
        .filter(|(_, series)| series.cell_count() > 0)
        .collect();
    Ok(())
}
