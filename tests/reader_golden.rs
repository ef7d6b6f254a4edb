//! Promise: in compat mode the library answers what the original's reader answers, to the last digit and letter (the
//! identifiers in .dot files and the order of equal sizes aside). The expectations are what the original said.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use pyheap::reader::{DotOptions, FlowGraph, Mode, RawTraceLine, Reader, ReaderError};
use serde_json::Value;
use sha2::{Digest, Sha256};

const NAMES: [&str; 4] = ["json_parse", "deep_recursion", "threads_sqlite", "unicode_paths"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/heapprof")
        .join(name)
}

fn each(check: impl Fn(&str, &Reader, &Value)) {
    for name in NAMES {
        let text = std::fs::read_to_string(golden(name).with_extension("expected.json")).unwrap();
        let reader = Reader::open_as(golden(name), Mode::Compat).unwrap();
        check(name, &reader, &serde_json::from_str(&text).unwrap());
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// Equal up to the last digit, which the JSON parser may miss.
fn same(a: f64, b: f64) -> bool {
    (a - b).abs() <= a.abs() * 2.0 * f64::EPSILON
}

#[test]
fn times_and_tables() {
    each(|name, reader, want| {
        assert!(reader.has_digest() && reader.warnings().unwrap().is_empty());
        for (mine, key) in [
            (reader.initial_time(), "initialTime"),
            (reader.final_time().unwrap(), "finalTime"),
            (reader.elapsed_time().unwrap(), "elapsedTime"),
            (reader.snapshot_interval().unwrap(), "snapshotInterval"),
            (reader.hpc().unwrap().initial_time(), "hpcInitialTime"),
        ] {
            assert!(same(mine, number(&want[key])), "{name} {key}: {mine} {}", want[key]);
        }
        for pair in want["scaleFactors"].as_array().unwrap() {
            let factor = reader.hpm().scale_factor(pair[0].as_i64().unwrap().unsigned_abs());
            assert!(same(factor, number(&pair[1])), "{name} {pair}");
        }
        let rates = reader.sampling_rate();
        assert_eq!(rates.len(), want["samplingRate"].as_array().unwrap().len());
        for pair in want["snapshotAt"].as_array().unwrap() {
            let snapshot = reader.snapshot_at(number(&pair[0])).unwrap();
            assert!(same(snapshot.relative_time, number(&pair[1])), "{name} {pair}");
        }
        for (place, want) in want["snapshots"].as_array().unwrap().iter().enumerate() {
            let snapshot = reader.snapshots().unwrap().get(place).unwrap();
            assert!(same(snapshot.relative_time, number(&want["relativeTime"])));
            assert_eq!(snapshot.total_usage(), want["totalUsage"].as_u64().unwrap());
            assert_eq!(snapshot.usage_map().len() as u64, want["traces"].as_u64().unwrap());
        }
    });
}

#[test]
fn events() {
    each(|name, reader, want| {
        let events: Vec<_> = reader.hpd().unwrap().collect();
        assert_eq!(events.len() as u64, want["eventCount"].as_u64().unwrap());
        let first = want["firstEvents"].as_array().unwrap();
        let last = want["lastEvents"].as_array().unwrap();
        let ends = events
            .iter()
            .zip(first)
            .chain(events[events.len() - last.len()..].iter().zip(last));
        for (event, want) in ends {
            assert!(same(event.timestamp, number(&want[0])), "{name} {event:?} {want}");
            assert_eq!(u64::from(event.traceindex), want[1].as_u64().unwrap());
            assert_eq!(event.size, want[2].as_i64().unwrap());
            assert!(same(event.scale_factor, number(&want[3])));
        }
    });
}

fn line(text: &Value) -> RawTraceLine {
    text.as_str().unwrap().parse().unwrap()
}

#[test]
fn usage_of_lines() {
    each(|name, reader, want| {
        let mut asked = 0;
        for want in want["fastGetUsage"].as_array().unwrap() {
            if want.get("upstreamRaises").is_some() {
                continue;
            }
            asked += 1;
            let place = want["snapshot"].as_u64().unwrap() as usize;
            let snapshot = reader.snapshots().unwrap().get(place).unwrap();
            let lines: Vec<_> = want["lines"].as_array().unwrap().iter().map(line).collect();
            let usage = reader.fast_get_usage(&snapshot, &lines, want["cumulative"].as_bool().unwrap());
            let wanted: Vec<_> = want["usage"]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_u64().unwrap())
                .collect();
            assert_eq!(usage.lines, wanted, "{name} {want}");
            assert_eq!(usage.total, want["total"].as_u64().unwrap());
        }
        assert!(asked > 0);
        let want = &want["timePlot"];
        let lines = want["lines"].as_object().unwrap();
        let lines: Vec<_> = lines.iter().map(|(label, text)| (label.clone(), line(text))).collect();
        let plot = reader.time_plot(&lines).unwrap();
        let numbers =
            |value: &Value| -> Vec<u64> { value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect() };
        assert_eq!(serde_json::json!(plot.labels), want["labels"]);
        assert_eq!(plot.total_usage, numbers(&want["totalUsage"]), "{name}");
        let values: Vec<_> = want["values"].as_array().unwrap().iter().map(numbers).collect();
        assert_eq!(plot.lines, values, "{name}");
        let times = want["times"].as_array().unwrap();
        assert!(plot.times.len() == times.len() && plot.times.iter().zip(times).all(|(a, b)| same(*a, number(b))));
    });
}

/// What a line holds over time is the same from the events, at every tick but in the original's silences.
#[test]
fn flame_graphs() {
    each(|name, reader, want| {
        let place = want["midSnapshot"].as_u64().unwrap() as usize;
        let snapshot = reader.snapshots().unwrap().get(place).unwrap();
        assert_eq!(
            reader.flame_graph(&snapshot),
            want["flameGraph"].as_str().unwrap(),
            "{name}"
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flame.txt");
        reader.write_flame_graph(&path, &snapshot).unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            want["flameGraph"].as_str().unwrap()
        );
        assert_eq!(
            reader.flame_graph_at(snapshot.relative_time + 1e-6).unwrap(),
            want["flameGraph"].as_str().unwrap()
        );
    });
}

/// A .dot file without what is random in it: its node lines with identifiers replaced by the rows of the box, sorted, and
/// its edge lines in the same way.
fn canonical(text: &str) -> (Vec<String>, Vec<String>) {
    let body: Vec<&str> = text.lines().collect();
    assert_eq!((body[0], body[1]), ("digraph {", "  node [shape=none margin=0]"));
    assert_eq!(body.last(), Some(&"}"));
    let mut names: HashMap<&str, String> = HashMap::new();
    let (edges, nodes): (Vec<&str>, Vec<&str>) = body[2..body.len() - 1].iter().partition(|line| line.contains(" -> "));
    let mut boxes = Vec::new();
    for node in nodes {
        let (id, rest) = node.trim_start().split_once(' ').unwrap();
        let rows = rest.split("bgcolor=\"white\">").skip(1);
        let rows: Vec<_> = rows.map(|row| row.split("</td>").next().unwrap()).collect();
        names.insert(id, rows.join("\n"));
        boxes.push(rest.to_owned());
    }
    let mut arrows: Vec<_> = edges
        .iter()
        .map(|edge| {
            let (from, rest) = edge.trim_start().split_once(" -> ").unwrap();
            let (to, rest) = rest.split_once(' ').unwrap();
            format!("{:?} {:?} {rest}", names.get(from), names.get(to))
        })
        .collect();
    boxes.sort();
    arrows.sort();
    (boxes, arrows)
}

/// The same from the expectation's canonical form, where the text is not kept.
fn canonical_of(want: &Value) -> (Vec<String>, Vec<String>) {
    let list = |value: &Value| -> Vec<String> {
        let items = value.as_array().unwrap();
        items.iter().map(|item| item.as_str().unwrap().to_owned()).collect()
    };
    let mut boxes: Vec<String> = Vec::new();
    for node in want["nodes"].as_array().unwrap() {
        let cells = node["cells"].as_array().unwrap();
        let rows: String = list(&node["lines"])
            .iter()
            .map(|row| format!("<tr><td colspan=\"{}\" bgcolor=\"white\">{row}</td></tr>", cells.len()))
            .collect();
        let cells: String = cells
            .iter()
            .map(|cell| {
                let cell = list(cell);
                format!(
                    "<td color=\"white\" bgcolor=\"{}\" cellspacing=\"4\">{}</td>",
                    cell[0], cell[1]
                )
            })
            .collect();
        boxes.push(format!(
            "[fontsize={} label=< <table border=\"1\" cellborder=\"0\" cellspacing=\"0\">{rows}<tr>{cells}</tr></table> >]",
            node["fontsize"]
        ));
    }
    let end = |value: &Value| value.as_array().map(|_| list(value).join("\n"));
    let mut arrows: Vec<_> = want["edges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|edge| {
            let (color, label) = (edge["color"].as_str().unwrap(), edge["label"].as_str().unwrap());
            format!(
                "{:?} {:?} [color=\"{color}\" label=\"{label}\"];",
                end(&edge["from"]),
                end(&edge["to"])
            )
        })
        .collect();
    boxes.sort();
    arrows.sort();
    (boxes, arrows)
}

/// A .dot file as the expectation's canonical form: boxes and arrows sorted, boxes named by their rows.
fn canonical_json(text: &str) -> String {
    type Cells = Vec<(String, String)>;
    let between = |text: &str, begin: &str, end: &str| -> Vec<String> {
        let parts = text.split(begin).skip(1);
        parts.map(|part| part.split(end).next().unwrap().to_owned()).collect()
    };
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let (arrows, boxes): (Vec<&str>, Vec<&str>) =
        lines[2..lines.len() - 1].iter().partition(|line| line.contains(" -> "));
    let mut names: HashMap<&str, Vec<String>> = HashMap::new();
    let mut nodes: Vec<(Vec<String>, Cells, u64)> = Vec::new();
    for node in boxes {
        let rows = between(node, "bgcolor=\"white\">", "</td>");
        let cells = between(node, "<td color=\"white\" bgcolor=\"", "</td>");
        let cells = cells.iter().map(|cell| {
            let (colour, text) = cell.split_once("\" cellspacing=\"4\">").unwrap();
            (colour.to_owned(), text.to_owned())
        });
        names.insert(node.split(' ').next().unwrap(), rows.clone());
        let size = between(node, "[fontsize=", " ")[0].parse().unwrap();
        nodes.push((rows, cells.collect(), size));
    }
    let mut edges: Vec<_> = arrows
        .iter()
        .map(|arrow| {
            let (from, rest) = arrow.split_once(" -> ").unwrap();
            let (to, rest) = rest.split_once(' ').unwrap();
            let colour = between(rest, "color=\"", "\"").remove(0);
            let label = between(rest, "label=\"", "\"").remove(0);
            (names[from].clone(), names[to].clone(), colour, label)
        })
        .collect();
    nodes.sort();
    edges.sort();
    fn json(value: &impl serde::Serialize) -> String {
        serde_json::to_string(value).unwrap()
    }
    let nodes: Vec<String> = nodes
        .iter()
        .map(|(rows, cells, size)| {
            format!(
                r#"{{"lines":{},"cells":{},"fontsize":{size}}}"#,
                json(rows),
                json(cells)
            )
        })
        .collect();
    let edges: Vec<String> = edges
        .iter()
        .map(|(from, to, colour, label)| {
            let (from, to, colour, label) = (json(from), json(to), json(colour), json(label));
            format!(r#"{{"from":{from},"to":{to},"color":{colour},"label":{label}}}"#)
        })
        .collect();
    let (nodes, edges) = (nodes.join(","), edges.join(","));
    format!(r#"{{"nodes":[{nodes}],"edges":[{edges}],"danglingEnds":0}}"#)
}

/// JSON with `\u` escapes for what is not ASCII.
fn ascii(text: &str) -> String {
    let mut out = String::new();
    for unit in text.encode_utf16() {
        match u8::try_from(unit) {
            Ok(byte) if byte.is_ascii() => out.push(char::from(byte)),
            _ => out.push_str(&format!("\\u{unit:04x}")),
        }
    }
    out
}

fn options(kwargs: &Value) -> DotOptions {
    let mut options = DotOptions {
        mode: Mode::Compat,
        ..DotOptions::default()
    };
    for (name, value) in kwargs.as_object().unwrap() {
        match name.as_str() {
            "minNodeFraction" => options.min_node_fraction = number(value),
            "minEdgeFraction" => options.min_edge_fraction = number(value),
            "collapseNodes" => options.collapse_nodes = value.as_bool().unwrap(),
            "sizeNodesBasedOnLocalUsage" => options.size_nodes_based_on_local_usage = value.as_bool().unwrap(),
            other => panic!("{other}"),
        }
    }
    options
}

#[test]
fn flow_graphs() {
    each(|name, reader, want| {
        let place = want["midSnapshot"].as_u64().unwrap() as usize;
        let graph = reader.flow_graph(&reader.snapshots().unwrap().get(place).unwrap());
        let flow = &want["flowGraph"];
        assert_eq!(graph.total_usage, flow["totalUsage"].as_u64().unwrap());
        if let Some(nodes) = flow["nodes"].as_array() {
            let local: HashMap<_, _> = graph.node_local_usage().collect();
            let mut mine: Vec<_> = graph
                .node_cumulative_usage()
                .map(|(line, bytes)| {
                    (
                        &line.filename,
                        line.lineno,
                        local.get(line).copied().unwrap_or(0),
                        bytes,
                    )
                })
                .collect();
            mine.sort();
            assert_eq!(serde_json::json!(mine), Value::from(nodes.clone()), "{name}");
            let mut edges: Vec<_> = graph
                .edge_usage()
                .map(|((a, b), bytes)| (a.clone(), b.clone(), bytes))
                .collect();
            edges.sort();
            let edges: Vec<_> = edges
                .iter()
                .map(|(a, b, bytes)| (a.to_string(), b.to_string(), bytes))
                .collect();
            assert_eq!(serde_json::json!(edges), flow["edges"], "{name}");
        }
        for key in ["dot", "dotSome"] {
            let text = graph.as_dot(options(&want[key]["kwargs"])).unwrap();
            assert_eq!(canonical(&text), canonical_of(&want[key]["canonical"]), "{name} {key}");
            if let Some(original) = want[key]["text"].as_str() {
                assert_eq!(canonical(&text), canonical(original), "{name} {key}");
                assert_eq!(text.len(), original.len(), "{name} {key}: not a letter more");
            }
        }
        let all = &want["dotAll"];
        let text = graph.as_dot(options(&all["kwargs"])).unwrap();
        let (boxes, arrows) = canonical(&text);
        assert_eq!(
            (boxes.len() as u64, arrows.len() as u64),
            (all["nodeCount"].as_u64().unwrap(), all["edgeCount"].as_u64().unwrap())
        );
        let hash: String = Sha256::digest(ascii(&canonical_json(&text)))
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hash, all["canonicalSha256"].as_str().unwrap(), "{name} dotAll");
        for key in ["compare", "compareNoCollapse"] {
            let times: Vec<_> = want[key]["times"].as_array().unwrap().iter().map(number).collect();
            let text = reader
                .compare_flow_graphs(&times, options(&want[key]["kwargs"]))
                .unwrap();
            assert_eq!(canonical(&text), canonical_of(&want[key]["canonical"]), "{name} {key}");
        }
        let wrong = DotOptions {
            min_edge_fraction: 1.5,
            ..DotOptions::default()
        };
        assert!(matches!(graph.as_dot(wrong), Err(ReaderError::Fraction(_))));
        assert!(FlowGraph::compare(&[], DotOptions::default()).unwrap().ends_with("}\n"));
    });
}
