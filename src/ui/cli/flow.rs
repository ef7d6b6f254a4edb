//! `pyheap flow` and `pyheap compare`: flow graphs, as text for graphviz or as pictures.

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::failure::{Failure, code};
use super::select::{self, FilterArgs};
use crate::reader::{DotOptions, FlowGraph, Mode, Reader, Recursion};
use crate::threads;
use crate::ui::output::{note, to_stdout};
use crate::ui::save::save;
use crate::ui::units::Moment;

/// Draw which lines call which, and how much live memory comes from where: a flow graph for graphviz.
///
/// A box is a line of the program (or a chain of lines that allocate next to nothing themselves); it says what the line
/// allocated itself / what all stacks through it allocated = its part of everything. Arrows are calls.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// The moment: time since the start (`90s`), before the end (`-1m`), or absolute (`2026-01-31T12:00:00Z`, `@1769860800`).
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// How to draw.
    #[command(flatten)]
    pub draw: DrawArgs,
}

/// Draw the flow graphs of several moments in one picture: each box has a cell for each of them.
#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// The moments: time since the start (`90s`), before the end (`end-1m`), `end`, or absolute (`2026-01-31T12:00:00Z`).
    #[arg(value_name = "TIME", required = true, num_args = 1..)]
    pub times: Vec<Moment>,

    /// How to draw.
    #[command(flatten)]
    pub draw: DrawArgs,
}

/// How a flow graph is drawn.
#[derive(Debug, Clone, clap::Args)]
pub struct DrawArgs {
    /// Write to this file: `.dot` is text, `.svg`, `.png` and `.pdf` are drawn by graphviz's `dot`. `-` is text on standard
    /// output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,

    /// Leave out lines with less than this fraction of everything.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.01)]
    pub min_node: f64,

    /// Leave out calls with less than this fraction of what goes through the calling line.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.05)]
    pub min_edge: f64,

    /// Give every line a box of its own.
    #[arg(long)]
    pub no_collapse: bool,

    /// Draw all boxes in one size, not by what they allocated themselves.
    #[arg(long)]
    pub same_size: bool,

    /// Count a line once for each frame, so that recursion multiplies it, as the original heapprof does.
    #[arg(long)]
    pub each_frame: bool,

    /// Draw what the original heapprof draws, to the letter, from the snapshots of the digest.
    #[arg(long, conflicts_with_all = ["files", "functions", "threads", "domains"])]
    pub compat: bool,

    /// Print nodes and edges as one JSON object instead.
    #[arg(long)]
    pub json: bool,

    /// Which traces count.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// Runs `pyheap flow`.
///
/// # Errors
/// When the profile cannot be read or the picture not written.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    draw(&args.base, &[args.at], &args.draw)
}

/// Runs `pyheap compare`.
///
/// # Errors
/// As for [`run`].
pub fn run_compare(args: &CompareArgs) -> Result<(), Box<dyn Error>> {
    draw(&args.base, &args.times, &args.draw)
}

fn draw(base: &Path, times: &[Moment], args: &DrawArgs) -> Result<(), Box<dyn Error>> {
    let mode = if args.compat { Mode::Compat } else { Mode::Exact };
    let reader = Reader::open_as(base, mode)?;
    let graphs: Vec<FlowGraph> = times
        .iter()
        .map(|time| graph(&reader, *time, args))
        .collect::<Result<_, _>>()?;
    select::warn(reader.profile(), 0)?;
    if args.json {
        let graphs: Vec<_> = graphs.iter().map(json).collect();
        let answer = match &graphs[..] {
            [one] => one.clone(),
            _ => serde_json::json!(graphs),
        };
        return Ok(to_stdout(&(serde_json::to_string_pretty(&answer)? + "\n"))?);
    }
    let options = DotOptions {
        min_node_fraction: args.min_node,
        min_edge_fraction: args.min_edge,
        collapse_nodes: !args.no_collapse,
        size_nodes_based_on_local_usage: !args.same_size,
        mode,
    };
    let text = FlowGraph::compare(&graphs.iter().collect::<Vec<_>>(), options)
        .map_err(|error| Failure::new(code::USAGE, error))?;
    match args.output.extension().and_then(|extension| extension.to_str()) {
        Some(format @ ("svg" | "png" | "pdf")) => save(&args.output, &render(&text, format)?)?,
        _ => save(&args.output, text.as_bytes())?,
    }
    Ok(())
}

fn graph(reader: &Reader, time: Moment, args: &DrawArgs) -> Result<FlowGraph, Box<dyn Error>> {
    let at = select::moment(reader.profile(), time)?;
    if args.compat {
        let seconds = match at {
            Some(at) => at.as_secs_f64(),
            None => f64::MAX,
        };
        return Ok(reader.flow_graph_at(seconds)?);
    }
    let live = select::live(reader.profile(), at, &args.filter.filters(reader.profile())?)?;
    let recursion = if args.each_frame {
        Recursion::EachFrame
    } else {
        Recursion::Once
    };
    Ok(reader.flow_graph_with(&reader.snapshot_of(&live), recursion))
}

fn json(graph: &FlowGraph) -> serde_json::Value {
    let nodes = graph.nodes.iter().map(|node| {
        serde_json::json!({
            "file": node.line.filename,
            "line": node.line.lineno,
            "function": node.function,
            "local_bytes": node.local.unwrap_or(0),
            "cumulative_bytes": node.cumulative,
        })
    });
    let edges = graph
        .edges
        .iter()
        .map(|edge| serde_json::json!({"from": edge.from, "to": edge.to, "bytes": edge.usage}));
    serde_json::json!({
        "total_bytes": graph.total_usage,
        "nodes": nodes.collect::<Vec<_>>(),
        "edges": edges.collect::<Vec<_>>(),
    })
}

/// What graphviz makes of a text.
fn render(text: &str, format: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut child = Command::new("dot")
        .arg(format!("-T{format}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| {
            Failure::failed(format!(
                "graphviz's `dot` cannot be run ({error}): install graphviz, or write a .dot file"
            ))
        })?;
    let stdin = child.stdin.take();
    let text = text.to_owned();
    let feeder = threads::start("dot", move || stdin.map(|mut stdin| stdin.write_all(text.as_bytes())))?;
    let output = child.wait_with_output()?;
    let _ = feeder.join();
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() || output.stdout.is_empty() {
        let said = crate::report::human::clean(said.trim()).into_owned();
        return Err(Failure::failed(format!("graphviz's `dot` failed: {said}")).into());
    }
    for line in said.lines().take(3) {
        note(&format!("note: graphviz says: {}", crate::report::human::clean(line)));
    }
    Ok(output.stdout)
}
