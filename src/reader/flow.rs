//! Flow graphs: the lines of all live traces as nodes, calls as edges, live bytes on both.

use foldhash::HashMap as FastMap;

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
        let mut graph = Self::default();
        // Place + 1 of a line's node, and in which trace it was last counted.
        let mut places = vec![0u32; lines.len()];
        let mut node_seen: Vec<u32> = Vec::new();
        let mut edges: FastMap<(u32, u32), u32> = FastMap::default();
        let mut edge_seen: Vec<u32> = Vec::new();
        let once = recursion == Recursion::Once;
        for (trace, (index, bytes)) in snapshot.entries.iter().enumerate() {
            let trace = trace as u32 + 1;
            graph.total_usage = graph.total_usage.saturating_add(*bytes);
            let mut caller = None;
            for number in lines.trace(*index).unwrap_or_default() {
                let place = &mut places[*number as usize];
                if *place == 0 {
                    let (line, function) = lines.line(*number).clone();
                    graph.nodes.push(FlowNode {
                        line,
                        function,
                        local: None,
                        cumulative: 0,
                        begins: 0,
                    });
                    node_seen.push(0);
                    *place = graph.nodes.len() as u32;
                }
                let at = *place as usize - 1;
                if !once || node_seen[at] != trace {
                    node_seen[at] = trace;
                    let node = &mut graph.nodes[at];
                    node.cumulative = node.cumulative.saturating_add(*bytes);
                }
                match caller {
                    None => graph.nodes[at].begins = graph.nodes[at].begins.saturating_add(*bytes),
                    Some(from) => {
                        let edge = *edges.entry((from, at as u32)).or_insert_with(|| {
                            graph.edges.push(FlowEdge {
                                from: from as usize,
                                to: at,
                                usage: 0,
                            });
                            edge_seen.push(0);
                            graph.edges.len() as u32 - 1
                        }) as usize;
                        if !once || edge_seen[edge] != trace {
                            edge_seen[edge] = trace;
                            graph.edges[edge].usage = graph.edges[edge].usage.saturating_add(*bytes);
                        }
                    }
                }
                caller = Some(at as u32);
            }
            if let Some(last) = caller {
                let local = &mut graph.nodes[last as usize].local;
                *local = Some(local.unwrap_or(0).saturating_add(*bytes));
            }
        }
        graph
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
