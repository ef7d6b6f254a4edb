//! Flow graphs as text for graphviz: a box for each line or chain of lines, the larger the more it allocates itself, the
//! redder the more goes through it.

use std::collections::HashMap;
use std::fmt::Write;

use super::flow::{FlowGraph, FlowNode};
use super::original::{bytes_string, colour, font_size};
use super::{Mode, ReaderError};

/// A box that allocates this part of what goes through it by itself is worth being seen alone.
const BORING: f64 = 0.01;

/// How a graph is drawn. The defaults are the original's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DotOptions {
    /// Lines with less than this fraction of the total, in every graph, are left out. 0 to 1.
    pub min_node_fraction: f64,
    /// Calls with less than this fraction of what the calling line holds are left out. 0 to 1.
    pub min_edge_fraction: f64,
    /// Whether chains of lines that allocate next to nothing become one box.
    pub collapse_nodes: bool,
    /// Whether boxes are sized by what they allocate themselves; else all are of one size.
    pub size_nodes_based_on_local_usage: bool,
    /// [`Mode::Compat`] draws what the original draws, its mistakes included.
    pub mode: Mode,
}

impl Default for DotOptions {
    fn default() -> Self {
        Self {
            min_node_fraction: 0.01,
            min_edge_fraction: 0.05,
            collapse_nodes: true,
            size_nodes_based_on_local_usage: true,
            mode: Mode::Exact,
        }
    }
}

impl FlowGraph {
    /// The graph as text for `dot`.
    ///
    /// # Errors
    /// [`ReaderError::Fraction`] if a fraction is not between 0 and 1.
    pub fn as_dot(&self, options: DotOptions) -> Result<String, ReaderError> {
        Self::compare(&[self], options)
    }

    /// One picture of several graphs: each box has a cell for each of them, in their order.
    ///
    /// # Errors
    /// [`ReaderError::Fraction`] if a fraction is not between 0 and 1.
    pub fn compare(graphs: &[&Self], options: DotOptions) -> Result<String, ReaderError> {
        for fraction in [options.min_node_fraction, options.min_edge_fraction] {
            if !(0.0..=1.0).contains(&fraction) {
                return Err(ReaderError::Fraction(fraction));
            }
        }
        let mut drawing = Drawing::new(graphs, options);
        drawing.add_root();
        if options.collapse_nodes {
            drawing.collapse();
        }
        Ok(drawing.text())
    }
}

/// What a box shows of one graph, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    cumulative: u64,
    local: u64,
    begins: u64,
}

#[derive(Debug)]
struct Node {
    rows: Vec<String>,
    cells: Vec<Cell>,
}

struct Drawing {
    options: DotOptions,
    totals: Vec<u64>,
    /// In order of appearance; `None` is too small to be drawn.
    nodes: Vec<Option<Node>>,
    root: Option<usize>,
    /// Sources in the order of their first edge, and their different targets.
    sources: Vec<usize>,
    targets: Vec<Vec<usize>>,
    callers: Vec<Vec<usize>>,
    weights: HashMap<(usize, usize), Vec<u64>>,
    /// The box that a node was merged into.
    merged: Vec<Option<usize>>,
}

fn part(size: u64, whole: u64, of_nothing: f64) -> f64 {
    if whole == 0 {
        of_nothing
    } else {
        size as f64 / whole as f64
    }
}

impl Drawing {
    fn new(graphs: &[&FlowGraph], options: DotOptions) -> Self {
        let mut drawing = Self {
            options,
            totals: graphs.iter().map(|graph| graph.total_usage).collect(),
            nodes: Vec::new(),
            root: None,
            sources: Vec::new(),
            targets: Vec::new(),
            callers: Vec::new(),
            weights: HashMap::new(),
            merged: Vec::new(),
        };
        let places = drawing.add_nodes(graphs);
        for ((at, graph), places) in graphs.iter().enumerate().zip(&places) {
            for edge in &graph.edges {
                let (from, to) = (places[edge.from], places[edge.to]);
                let (Some(source), Some(_)) = (&drawing.nodes[from], &drawing.nodes[to]) else {
                    continue;
                };
                if part(edge.usage, source.cells[at].cumulative, 1.0) >= options.min_edge_fraction {
                    drawing.add_edge(from, to, at, edge.usage);
                }
            }
        }
        drawing
    }

    /// Makes a box for each line, drops the small ones, and says where each graph's nodes are.
    fn add_nodes(&mut self, graphs: &[&FlowGraph]) -> Vec<Vec<usize>> {
        let mut known: HashMap<(&str, u32, Option<&str>), usize> = HashMap::new();
        let mut places = Vec::new();
        for (at, graph) in graphs.iter().enumerate() {
            let of_graph = graph.nodes.iter().map(|node| {
                let key = (node.line.filename.as_str(), node.line.lineno, node.function.as_deref());
                let place = *known.entry(key).or_insert_with(|| {
                    let cells = vec![Cell::default(); graphs.len()];
                    let rows = vec![self.row(node)];
                    self.add_node(Node { rows, cells })
                });
                if let Some(drawn) = &mut self.nodes[place] {
                    drawn.cells[at] = Cell {
                        cumulative: node.cumulative,
                        local: node.local.unwrap_or(0),
                        begins: node.begins,
                    };
                }
                place
            });
            places.push(of_graph.collect());
        }
        let minimum = self.options.min_node_fraction;
        for node in &mut self.nodes {
            let is_small = |(cell, total): (&Cell, &u64)| (cell.cumulative as f64) < minimum * *total as f64;
            if node
                .as_ref()
                .is_some_and(|node| node.cells.iter().zip(&self.totals).all(is_small))
            {
                *node = None;
            }
        }
        places
    }

    fn row(&self, node: &FlowNode) -> String {
        let mut text = node.line.to_string();
        if let Some(function) = &node.function {
            let _ = write!(text, " {function}");
        }
        let mut row = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '&' => row.push_str("&amp;"),
                '<' => row.push_str("&lt;"),
                '>' => row.push_str("&gt;"),
                '"' => row.push_str("&quot;"),
                '\'' => row.push_str("&#x27;"),
                // Graphviz reads labels as XML, which has no such characters.
                c if c.is_control() && self.options.mode == Mode::Exact => row.push('\u{FFFD}'),
                c => row.push(c),
            }
        }
        row
    }

    fn add_node(&mut self, node: Node) -> usize {
        self.nodes.push(Some(node));
        self.targets.push(Vec::new());
        self.callers.push(Vec::new());
        self.merged.push(None);
        self.nodes.len() - 1
    }

    fn add_edge(&mut self, from: usize, to: usize, graph: usize, usage: u64) {
        let weights = self.weights.entry((from, to)).or_insert_with(|| {
            if self.targets[from].is_empty() {
                self.sources.push(from);
            }
            self.targets[from].push(to);
            self.callers[to].push(from);
            vec![0; self.totals.len()]
        });
        weights[graph] = usage;
    }

    /// Adds the box that everything comes from, if it is not there already.
    fn add_root(&mut self) {
        let exact = self.options.mode == Mode::Exact;
        let mut entries: Vec<(usize, Vec<u64>)> = Vec::new();
        for (place, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let is_root = self.callers[place].is_empty();
            let size = |cell: &Cell| if is_root { cell.cumulative } else { cell.begins };
            let sizes: Vec<u64> = node.cells.iter().map(size).collect();
            let is_entry =
                |(size, total): (&u64, &u64)| part(*size, *total, 0.0) >= self.options.min_edge_fraction && *size > 0;
            // The original forgets traces that begin with a line which is called from elsewhere, too.
            if is_root || exact && sizes.iter().zip(&self.totals).any(is_entry) {
                entries.push((place, sizes));
            }
        }
        let holds_all = |(_, sizes): &(usize, Vec<u64>)| *sizes == self.totals;
        if entries.len() >= 2 || exact && entries.first().is_some_and(|entry| !holds_all(entry)) {
            let cell = |total: &u64| Cell {
                cumulative: *total,
                ..Cell::default()
            };
            let name = if exact { "Program Root" } else { "Program Root:0" };
            let root = self.add_node(Node {
                rows: vec![name.to_owned()],
                cells: self.totals.iter().map(cell).collect(),
            });
            self.root = Some(root);
            for (place, sizes) in entries {
                for (graph, usage) in sizes.into_iter().enumerate() {
                    self.add_edge(root, place, graph, usage);
                }
            }
        }
    }

    /// The box that stands for a node. The original looks only one step far.
    fn representative(&self, place: usize) -> usize {
        let Some(mut into) = self.merged[place] else {
            return place;
        };
        if self.options.mode == Mode::Exact {
            // Merging never closes a circle in this mode, so this ends.
            while let Some(further) = self.merged[into] {
                into = further;
            }
        }
        into
    }

    fn collapse(&mut self) {
        for place in 0..self.nodes.len() {
            let Some(node) = &self.nodes[place] else { continue };
            let local = node.cells.iter().map(|cell| part(cell.local, cell.cumulative, 0.0));
            if local.fold(0.0, f64::max) >= BORING {
                continue;
            }
            let [target] = self.targets[place][..] else { continue };
            if target == place || self.callers[target].len() != 1 {
                continue;
            }
            let (into, from) = (self.representative(place), self.representative(target));
            if into == from && self.options.mode == Mode::Exact {
                continue;
            }
            self.merge(into, from);
        }
        let mut weights: HashMap<(usize, usize), Vec<u64>> = HashMap::new();
        for ((from, to), sizes) in &self.weights {
            let key = (self.representative(*from), self.representative(*to));
            let sums = weights.entry(key).or_insert_with(|| vec![0; sizes.len()]);
            for (sum, size) in sums.iter_mut().zip(sizes) {
                *sum = (*sum).max(*size);
            }
        }
        self.weights = weights;
    }

    fn merge(&mut self, into: usize, from: usize) {
        self.merged[from] = Some(into);
        // In a closed circle the original merges a box into itself, which then is not drawn; its text does not matter.
        if into == from {
            return;
        }
        let Some(taken) = &self.nodes[from] else { return };
        let (rows, cells) = (taken.rows.clone(), taken.cells.clone());
        if let Some(node) = &mut self.nodes[into] {
            node.rows.extend(rows);
            for (mine, theirs) in node.cells.iter_mut().zip(cells) {
                mine.local = mine.local.saturating_add(theirs.local);
            }
        }
    }

    fn id(&self, place: usize) -> String {
        if self.root == Some(place) {
            "root".to_owned()
        } else {
            format!("n{place:016x}")
        }
    }

    fn text(&self) -> String {
        let mut text = "digraph {\n  node [shape=none margin=0]\n".to_owned();
        for (place, node) in self.nodes.iter().enumerate() {
            if let (Some(node), None) = (node, self.merged[place]) {
                self.put_node(&mut text, place, node);
            }
        }
        let mut sources = self.sources.clone();
        if let Some(root) = self.root {
            sources.retain(|source| *source != root);
            sources.push(root);
        }
        let mut drawn = std::collections::HashSet::new();
        for source in sources {
            for target in &self.targets[source] {
                let ends = (self.representative(source), self.representative(*target));
                if ends.0 != ends.1 && (self.options.mode == Mode::Compat || drawn.insert(ends)) {
                    self.put_edge(&mut text, ends);
                }
            }
        }
        text.push_str("}\n");
        text
    }

    fn put_node(&self, text: &mut String, place: usize, node: &Node) {
        let compat = self.options.mode == Mode::Compat;
        let cells = || node.cells.iter().zip(&self.totals);
        let largest = cells()
            .map(|(cell, total)| part(cell.local, *total, 0.0))
            .fold(0.0, f64::max);
        let font = if self.options.size_nodes_based_on_local_usage {
            font_size(largest)
        } else {
            15
        };
        let id = self.id(place);
        let _ = write!(
            text,
            "  {id} [fontsize={font} label=< <table border=\"1\" cellborder=\"0\" cellspacing=\"0\">"
        );
        for row in &node.rows {
            let _ = write!(
                text,
                "<tr><td colspan=\"{}\" bgcolor=\"white\">{row}</td></tr>",
                self.totals.len()
            );
        }
        text.push_str("<tr>");
        for (cell, total) in cells() {
            let fraction = part(cell.cumulative, *total, 0.0);
            let percent = if *total == 0 {
                0.0
            } else {
                100.0 * cell.cumulative as f64 / *total as f64
            };
            let _ = write!(
                text,
                "<td color=\"white\" bgcolor=\"{}\" cellspacing=\"4\">{} / {} = {:>2}%</td>",
                colour(fraction),
                bytes_string(cell.local, compat),
                bytes_string(cell.cumulative, compat),
                percent as u64,
            );
        }
        text.push_str("</tr></table> >]\n");
    }

    fn put_edge(&self, text: &mut String, (from, to): (usize, usize)) {
        let (Some(sizes), Some(source)) = (self.weights.get(&(from, to)), &self.nodes[from]) else {
            return;
        };
        let fractions = sizes.iter().zip(&source.cells);
        let fraction = fractions
            .map(|(size, cell)| part(*size, cell.cumulative, 0.0))
            .fold(0.0, f64::max);
        let minimum = self.options.min_edge_fraction;
        if fraction < minimum {
            return;
        }
        let black = minimum.max(0.5);
        let grey = if fraction >= black {
            0
        } else {
            ((black - fraction) * 180.0 / (black - minimum)) as u8
        };
        let compat = self.options.mode == Mode::Compat;
        let labels: Vec<String> = sizes.iter().map(|size| bytes_string(*size, compat)).collect();
        let _ = writeln!(
            text,
            "  {} -> {} [color=\"#{grey:02x}{grey:02x}{grey:02x}\" label=\"{}\"];",
            self.id(from),
            self.id(to),
            labels.join(" / "),
        );
    }
}
