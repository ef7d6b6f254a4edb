//! Flow graphs: the lines of all live traces as nodes, calls as edges, live bytes on both.

use super::line::{LineTable, RawTraceLine};
use crate::profile::hpc::Snapshot;

/// How often a line counts that is on a stack several times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recursion {
    /// Once a trace: no line holds more than there is.
    #[default]
    Once,
    /// Once a frame, as the original does: recursion 500 deep holds 500 times the memory.
    EachFrame,
}

/// A line of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowNode {
    /// Where.
    pub line: RawTraceLine,
    /// Function, if a sidecar tells it.
    pub function: Option<String>,
    /// Live bytes allocated by the line itself; `None` if no trace ends there.
    pub local: Option<u64>,
    /// Live bytes of the traces that the line is on.
    pub cumulative: u64,
    /// Live bytes of the traces that begin with the line.
    pub begins: u64,
}

/// A call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowEdge {
    /// Place of the calling line in [`FlowGraph::nodes`].
    pub from: usize,
    /// Place of the called line.
    pub to: usize,
    /// Live bytes of the traces with this call.
    pub usage: u64,
}

/// A flow graph. Nodes and edges are in the order in which the entries of the snapshot, and the frames of their traces from
/// the outermost on, name them first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowGraph {
    /// Live bytes of all traces, those of unknown stacks included.
    pub total_usage: u64,
    /// The lines.
    pub nodes: Vec<FlowNode>,
    /// The calls.
    pub edges: Vec<FlowEdge>,
}

impl FlowGraph {
    /// The graph of a snapshot; time and memory in proportion to the frames of its traces.
    pub(super) fn new(lines: &LineTable, snapshot: &Snapshot, recursion: Recursion) -> Self {
        let entries = each_once(&snapshot.entries, lines.trace_count());
        let mut counting = Counting {
            lines,
            entries: &entries,
            once: recursion == Recursion::Once,
            places: vec![0; lines.len()],
            nodes: Vec::new(),
        };
        counting.count_nodes();
        Self {
            total_usage: snapshot.total(),
            edges: counting.edges(),
            nodes: counting.nodes.into_iter().map(|node| node.named(lines)).collect(),
        }
    }

    /// Live bytes allocated by each line that allocated any.
    pub fn node_local_usage(&self) -> impl Iterator<Item = (&RawTraceLine, u64)> {
        self.nodes.iter().filter_map(|node| Some((&node.line, node.local?)))
    }

    /// Live bytes of the traces that each line is on.
    pub fn node_cumulative_usage(&self) -> impl Iterator<Item = (&RawTraceLine, u64)> {
        self.nodes.iter().map(|node| (&node.line, node.cumulative))
    }

    /// Live bytes of each call: calling line, called line.
    pub fn edge_usage(&self) -> impl Iterator<Item = ((&RawTraceLine, &RawTraceLine), u64)> {
        let ends = |edge: &FlowEdge| (&self.nodes[edge.from].line, &self.nodes[edge.to].line);
        self.edges.iter().map(move |edge| (ends(edge), edge.usage))
    }
}

/// The entries with a trace each, those of unknown traces left out: a damaged digest may name one again and again.
fn each_once(entries: &[(u32, u64)], trace_count: u32) -> Vec<(u32, u64)> {
    let mut places = vec![0usize; trace_count as usize + 1];
    let mut once: Vec<(u32, u64)> = Vec::new();
    for (index, bytes) in entries {
        match places.get_mut(*index as usize) {
            None => {}
            Some(0) => {
                once.push((*index, *bytes));
                places[*index as usize] = once.len();
            }
            Some(place) => once[*place - 1].1 = once[*place - 1].1.saturating_add(*bytes),
        }
    }
    once
}

/// A graph on its way. There may be ten times as many calls as lines, too many for a processor's cache, and a hash table of
/// them would wait for memory at every frame. So the calls of each line are brought together first.
struct Counting<'a> {
    lines: &'a LineTable,
    entries: &'a [(u32, u64)],
    once: bool,
    /// Place + 1 of a line's node.
    places: Vec<u32>,
    nodes: Vec<NodeSum>,
}

/// What a node will be, without its name.
struct NodeSum {
    number: u32,
    /// The trace in which it was last counted.
    seen: u32,
    /// How many frames there are below it.
    calls: u32,
    cumulative: u64,
    begins: u64,
    local: Option<u64>,
}

/// A frame below another: the line called, in which trace (from 1 on), and the how manieth of all calls it is.
#[derive(Clone, Copy, Default)]
struct Call {
    to: u32,
    trace: u32,
    number: u32,
}

/// An edge, and the first call of it.
struct EdgeSum {
    from: u32,
    first: Call,
    /// The trace in which it was last counted.
    seen: u32,
    usage: u64,
}

impl Counting<'_> {
    fn count_nodes(&mut self) {
        for (trace, (index, bytes)) in (1u32..).zip(self.entries) {
            let mut caller: Option<usize> = None;
            for number in self.lines.trace(*index).unwrap_or_default() {
                let place = &mut self.places[*number as usize];
                if *place == 0 {
                    self.nodes.push(NodeSum::new(*number));
                    *place = self.nodes.len() as u32;
                }
                let at = *place as usize - 1;
                let node = &mut self.nodes[at];
                if !self.once || node.seen != trace {
                    node.seen = trace;
                    node.cumulative = node.cumulative.saturating_add(*bytes);
                }
                match caller {
                    None => node.begins = node.begins.saturating_add(*bytes),
                    Some(from) => self.nodes[from].calls += 1,
                }
                caller = Some(at);
            }
            if let Some(last) = caller {
                let local = &mut self.nodes[last].local;
                *local = Some(local.unwrap_or(0).saturating_add(*bytes));
            }
        }
    }

    /// All calls, those of one node together and in the order of the traces, and where the ones of each node end.
    fn calls(&self) -> (Vec<Call>, Vec<usize>) {
        let mut ends = Vec::with_capacity(self.nodes.len());
        let mut count = 0;
        for node in &self.nodes {
            ends.push(count);
            count += node.calls as usize;
        }
        let mut calls = vec![Call::default(); count];
        let mut count = 0;
        for (trace, (index, _)) in (1u32..).zip(self.entries) {
            let frames = self.lines.trace(*index).unwrap_or_default();
            let mut places = frames.iter().map(|number| self.places[*number as usize] - 1);
            let Some(mut from) = places.next() else { continue };
            for to in places {
                let end = &mut ends[from as usize];
                calls[*end] = Call {
                    to,
                    trace,
                    number: count,
                };
                *end += 1;
                count += 1;
                from = to;
            }
        }
        (calls, ends)
    }

    /// The edges in the order of their first calls.
    fn edges(&self) -> Vec<FlowEdge> {
        let (calls, ends) = self.calls();
        let mut edges: Vec<EdgeSum> = Vec::new();
        // Place + 1 of the edge to a node; what is not above `known` is of another caller.
        let mut edge_to = vec![0usize; self.nodes.len()];
        let mut begin = 0;
        for (from, end) in (0u32..).zip(ends) {
            let known = edges.len();
            for call in &calls[begin..end] {
                let place = &mut edge_to[call.to as usize];
                if *place <= known {
                    edges.push(EdgeSum::new(from, *call));
                    *place = edges.len();
                }
                let edge = &mut edges[*place - 1];
                if !self.once || edge.seen != call.trace {
                    edge.seen = call.trace;
                    edge.usage = edge.usage.saturating_add(self.entries[call.trace as usize - 1].1);
                }
            }
            begin = end;
        }
        let mut by_first = vec![0u32; calls.len()];
        for (place, edge) in (1u32..).zip(&edges) {
            by_first[edge.first.number as usize] = place;
        }
        let places = by_first.into_iter().filter(|place| *place > 0);
        places.map(|place| edges[place as usize - 1].edge()).collect()
    }
}

impl NodeSum {
    fn new(number: u32) -> Self {
        Self {
            number,
            seen: 0,
            calls: 0,
            cumulative: 0,
            begins: 0,
            local: None,
        }
    }

    fn named(self, lines: &LineTable) -> FlowNode {
        let (line, function) = lines.line(self.number).clone();
        FlowNode {
            line,
            function,
            local: self.local,
            cumulative: self.cumulative,
            begins: self.begins,
        }
    }
}

impl EdgeSum {
    fn new(from: u32, first: Call) -> Self {
        Self {
            from,
            first,
            seen: 0,
            usage: 0,
        }
    }

    fn edge(&self) -> FlowEdge {
        FlowEdge {
            from: self.from as usize,
            to: self.first.to as usize,
            usage: self.usage,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_counts_once() {
        assert_eq!(each_once(&[(2, 9), (7, 8), (1, 5), (2, 4)], 2), [(2, 13), (1, 5)]);
    }
}
