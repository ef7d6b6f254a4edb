//! A flame graph as one HTML file that needs nothing else: stacks grow downwards, with search, four metrics, error bars,
//! and everything by keyboard.
//!
//! The names in it come from the target. They are in a block of JSON in which `<` is escaped, the script shows them as
//! text only, and the page's policy lets no other script run and nothing be loaded, even if both failed.

use serde_json::json;

use super::json::plain;
use super::tree::Tree;
use super::{Export, Metric};
use crate::report::human::{Human, clean, count};
use crate::report::info::{describe_losses, describe_sampling};

const STYLE: &str = include_str!("html/style.css");
const SCRIPT: &str = include_str!("html/graph.js");
const BODY: &str = include_str!("html/body.html");

/// SHA-256 of [`STYLE`] and [`SCRIPT`], by which the page's policy knows them. A test says what they must be.
const STYLE_HASH: &str = "ZFOjUqsartIoGKA77R0fkRhlexpshe2da310GXZDofs=";
const SCRIPT_HASH: &str = "aCnAGr55g2Tx9p6q0od0s/Phs5Tfeumoychk0zeyAbY=";

/// The page; it shows `metric` first.
///
/// # Errors
/// None in practice: it is made of plain data.
pub fn html(export: &Export<'_>, metric: Metric) -> serde_json::Result<String> {
    let data = plain(&data(export, metric))?;
    let title = escaped(&clean(&export.name));
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-{SCRIPT_HASH}'; \
         style-src 'sha256-{STYLE_HASH}'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}: heap</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{BODY}\
         <script type=\"application/json\" id=\"data\">{data}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    ))
}

/// What the script draws. `nodes` has eight numbers a node: frame, depth, the four metrics, margins of the first two.
fn data(export: &Export<'_>, metric: Metric) -> serde_json::Value {
    let tree = Tree::new(export);
    let frames: Vec<_> = tree
        .frames
        .iter()
        .map(|frame| {
            let file = clean(&frame.file);
            let site = if file.is_empty() {
                String::new()
            } else {
                format!("{file}:{}", frame.line)
            };
            match frame.function {
                Some(function) => json!([clean(function), site]),
                None => json!([site, ""]),
            }
        })
        .collect();
    let nodes: Vec<u64> = tree
        .nodes
        .iter()
        .flat_map(|node| {
            let [bytes, objects, alloc_bytes, alloc_objects] = node.values;
            let margins = [node.live.bytes_margin(), node.live.objects_margin()].map(|margin| margin.round() as u64);
            let place = [u64::from(node.frame), u64::from(node.depth)];
            [place, [bytes, objects], [alloc_bytes, alloc_objects], margins]
        })
        .flatten()
        .collect();
    json!({
        "name": clean(&export.name),
        "facts": facts(export),
        "notes": notes(export),
        "metrics": Metric::ALL.map(|metric| json!([metric.title(), metric.is_bytes()])),
        "first": Metric::ALL.iter().position(|found| *found == metric),
        "frames": frames,
        "nodes": nodes,
    })
}

/// One line about the recording.
fn facts(export: &Export<'_>) -> String {
    let mut line = format!("at {} of the recording", Human(export.at));
    if let Some(facts) = export.facts {
        line.extend(facts.python.iter().map(|python| format!(", Python {}", clean(python))));
        line.extend(facts.pid.map(|pid| format!(", pid {pid}")));
        if !facts.cmdline.is_empty() {
            line += &format!(", {}", clean(&facts.cmdline.join(" ")));
        }
    }
    let samples = count(export.total.sampled as f64);
    line + &format!(
        "; {samples} live samples, {}",
        describe_sampling(export.period_bytes, export.sampling_ranges)
    )
}

fn notes(export: &Export<'_>) -> Vec<String> {
    let losses = export.losses.filter(|losses| !losses.is_empty());
    let lost = losses.map(|losses| format!("lost while recording: {}", describe_losses(losses)));
    let warnings = export.warnings.iter().map(|warning| format!("warning: {warning}"));
    lost.into_iter()
        .chain(warnings)
        .map(|line| clean(&line).into_owned())
        .collect()
}

/// For HTML's text.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{EVIL, assert_clean, evil, export, sample};
    use super::*;
    use crate::report::base64::base64;
    use sha2::{Digest as _, Sha256};

    /// The page's script and style are known by these; a browser runs no others.
    #[test]
    fn the_policy_knows_our_script_and_style() {
        let hashes = [SCRIPT, STYLE].map(|text| base64(&Sha256::digest(text.as_bytes())));
        assert_eq!([SCRIPT_HASH, STYLE_HASH], hashes.each_ref().map(String::as_str));
        assert!(!SCRIPT.contains("</") && !STYLE.contains("</"));
    }

    fn data_of(page: &str) -> serde_json::Value {
        let begin = page.find("id=\"data\">").unwrap() + 10;
        let end = page[begin..].find("</script>").unwrap();
        serde_json::from_str(&page[begin..begin + end]).unwrap()
    }

    #[test]
    fn the_data_is_the_tree() {
        let page = html(&sample(), Metric::AllocBytes).unwrap();
        let data = data_of(&page);
        assert_eq!(data["frames"][3], json!(["grow", "leak.py:7"]));
        assert_eq!(data["frames"][5], json!(["old.py:0", ""]));
        let nodes = data["nodes"].as_array().unwrap();
        assert_eq!(nodes.len(), 6 * 8);
        assert_eq!(nodes[24..32], [3, 2, 1000, 10, 2000, 20, 196, 1].map(|n: u64| json!(n)));
        assert_eq!((&data["first"], &data["notes"]), (&json!(2), &json!([])));
        assert!(page.contains("<title>run: heap</title>"));
    }

    #[test]
    fn nothing_is_a_page_too() {
        let data = data_of(&html(&export(vec![]), Metric::LiveBytes).unwrap());
        assert_eq!(data["nodes"], json!([0, 0, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn names_are_data_and_nothing_else() {
        let page = html(&evil(), Metric::LiveBytes).unwrap();
        let plain = html(&sample(), Metric::LiveBytes).unwrap();
        let tags = |page: &str| page.matches('<').count();
        assert_eq!(tags(&page), tags(&plain), "no name makes an element");
        assert!(!page.contains("alert(1)</script>"));
        assert_clean(&page);
        let frames = data_of(&page)["frames"].to_string();
        assert!(frames.contains(EVIL[0]), "the name is shown as it is: {frames}");
    }
}
