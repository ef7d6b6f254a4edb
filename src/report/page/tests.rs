use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use sha2::{Digest as _, Sha256};

use super::series::tests::{decode, get};
use super::*;
use crate::profile::facts::{EndReason, Facts, Losses, MemorySample};
use crate::profile::names::SuffixStyle;
use crate::profile::writer::{AllocDetail, Frame, ProfileWriter};
use crate::reader::Reader as Analysis;
use crate::report::export::tests::{EVIL, assert_clean};
use crate::report::filter::{Counted, Filters};
use crate::report::leaks::{Facts as LeakFacts, OwnCode, Tracker, judge};
use crate::report::page::stacks::Room;

/// The page's script and style are known by these; a browser runs no others.
#[test]
fn the_policy_knows_our_script_and_style() {
    let hashes = [SCRIPT, STYLE].map(|text| base64(&Sha256::digest(text.as_bytes())));
    assert_eq!([SCRIPT_HASH, STYLE_HASH], hashes.each_ref().map(String::as_str));
    assert!(!SCRIPT.contains("</") && !STYLE.contains("</"));
}

struct Nothing;
impl LeakFacts for Nothing {
    fn frames(&self, _: u32) -> Vec<crate::profile::model::StackFrame<'_>> {
        Vec::new()
    }
    fn origin(&self, _: u32) -> (Option<String>, Option<String>) {
        (None, None)
    }
    fn births(&self, _: u32) -> Option<&[(u64, u64)]> {
        None
    }
    fn memory(&self) -> &[(u64, MemorySample)] {
        &[]
    }
}

/// A verdict and facts, as far as they matter here.
fn parts(reader: &Reader) -> (Report, Info) {
    let mut tracker = Tracker::new(reader.weights(), reader.trace_count(), OwnCode::default());
    let report = judge(&mut tracker, reader.elapsed().unwrap(), &Nothing, None);
    let scan = reader.scan().unwrap();
    let info = Info {
        files: Vec::new(),
        target: reader.sidecar().map(|sidecar| sidecar.header.facts.clone()),
        start_seconds: reader.initial_time(),
        elapsed_seconds: reader.elapsed().unwrap().as_secs_f64(),
        period_bytes: reader.period_bytes(),
        sampling_ranges: reader.sampling_table().ranges().len(),
        events: scan.events,
        allocations: scan.allocations,
        traces: reader.trace_count(),
        digest_snapshots: None,
        live_at_seconds: 0.0,
        estimated_live_bytes: 0.0,
        estimated_live_bytes_margin: 0.0,
        estimated_live_objects: 0.0,
        estimated_live_objects_margin: 0.0,
        estimated_allocated_bytes: 0.0,
        memory: None,
        losses: Losses::default(),
        end: None,
        is_cut: false,
        detach_stop_micros: None,
        warnings: Vec::new(),
    };
    (report, info)
}

fn of(base: &Path, limits: Limits) -> (Reader, Value) {
    let reader = Reader::open(base).unwrap();
    let (report, info) = parts(&reader);
    let data = data(&Counted::new(&reader, &Filters::default()), &report, &info, limits).unwrap();
    (reader, data)
}

fn writer(base: &Path, period: u64) -> ProfileWriter {
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    ProfileWriter::create(base, SuffixStyle::Underscore, start, period, &Facts::default()).unwrap()
}

/// 40 stacks that end in 12 lines, and blocks of many sizes that come and go for a minute. It starts with some at time 0.
fn busy(base: &Path) {
    let mut writer = writer(base, 4096);
    let traces: Vec<u32> = (0..40u32)
        .map(|number| {
            let frame = |file, line, function| Frame { file, line, function };
            let stack = [
                frame("leaf.py", number % 12, "leaf"),
                frame("mid.py", number, "mid"),
                frame("app.py", 1, "main"),
            ];
            writer.add_trace(&stack).unwrap()
        })
        .collect();
    let mut state = 1u64;
    let mut random = |most: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut live: Vec<(u32, u64)> = Vec::new();
    let mut now = 0;
    for step in 0..6000u64 {
        now += if step < 50 { 0 } else { random(19_000) };
        let at = Duration::from_micros(now);
        if random(5) < 3 || live.is_empty() {
            let (trace, size) = (traces[(random(40) * random(41) / 40) as usize], 1 << random(18));
            live.push((trace, size));
            writer.alloc(at, trace, size, AllocDetail { domain: 2, thread: 7 });
        } else {
            let (trace, size) = live.swap_remove(random(live.len() as u64) as usize);
            writer.free(at, trace, size);
        }
    }
    assert!(now < 60_000_000);
    writer.end(Duration::from_secs(60), &EndReason::Stopped);
    writer.flush().unwrap();
}

/// A group as the page has it.
struct Found {
    kind: u64,
    stack: Vec<String>,
    cells: Vec<(u64, [f64; 5])>,
}

impl Found {
    fn at(&self, moment: u64) -> [f64; 5] {
        let cell = self.cells.iter().rev().find(|(at, _)| *at <= moment);
        cell.map_or([0.0; 5], |(_, values)| *values)
    }
}

/// Everything in the blob: groups, and classes with their largest size.
fn decoded(data: &Value) -> (Vec<Found>, Vec<(u64, Found)>) {
    let blob = unbase64(data["blob"].as_str().unwrap());
    let mut rest = &blob[..];
    let rest = &mut rest;
    let mut nodes = vec![(0u64, 0u64)];
    for place in 1..get(rest) {
        nodes.push((place - get(rest), get(rest)));
    }
    let field = |frame: u64, place: u64| data["frames"][(frame * 3 + place) as usize].as_u64().unwrap();
    let name = |number: u64| data["strings"][number as usize].as_str().unwrap();
    let text = |frame: u64| match frame {
        0..4 => format!("#{frame}"),
        _ => format!(
            "{}:{} {}",
            name(field(frame, 0)),
            field(frame, 1),
            name(field(frame, 2))
        ),
    };
    let groups = (0..get(rest)).map(|_| {
        let [kind, mut node, _thread, _members] = [get(rest), get(rest), get(rest), get(rest)];
        let mut stack = Vec::new();
        while node > 0 {
            stack.insert(0, text(nodes[node as usize].1));
            node = nodes[node as usize].0;
        }
        Found {
            kind,
            stack,
            cells: decode(rest),
        }
    });
    let groups: Vec<Found> = groups.collect();
    let classes = (0..get(rest)).map(|_| {
        let (_, high) = (get(rest), get(rest));
        let found = Found {
            kind: 3,
            stack: Vec::new(),
            cells: decode(rest),
        };
        (high, found)
    });
    let classes = classes.collect();
    assert!(rest.is_empty(), "nothing is left over");
    (groups, classes)
}

fn unbase64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let text = text.trim_end_matches('=').as_bytes();
    let whole = text.chunks(4).flat_map(|four| {
        let bits = four.iter().fold(0u32, |bits, byte| bits << 6 | u32::from(digit(*byte))) << (6 * (4 - four.len()));
        bits.to_be_bytes()[1..four.len()].to_vec()
    });
    whole.collect()
}

fn moments(data: &Value) -> Vec<(u64, Duration)> {
    let clock = &data["clock"];
    let (width, end) = (clock["width"].as_f64().unwrap(), clock["end"].as_f64().unwrap());
    let last = clock["last"].as_u64().unwrap();
    let time = |moment: u64| Duration::from_micros(((moment as f64 * width).min(end) * 1e6).round() as u64);
    (0..=last).map(|moment| (moment, time(moment))).collect()
}

fn assert_near(found: [f64; 5], truth: [f64; 5], groups: f64, what: &str) {
    assert!(
        (found[0] - truth[0]).abs() <= groups,
        "{what}: bytes {found:?} {truth:?}"
    );
    assert!(
        (found[1] - truth[1]).abs() <= groups / 256.0,
        "{what}: objects {found:?} {truth:?}"
    );
    assert_eq!(found[2], truth[2], "{what}: samples");
    for place in [3, 4] {
        // A unit is 256 here, and what is not whole is rounded up.
        let off = found[place] - truth[place];
        assert!(
            -1.0 <= off && off <= 257.0 * groups,
            "{what}: variance {found:?} {truth:?}"
        );
    }
}

fn values(live: &crate::profile::model::Live) -> [f64; 5] {
    [
        live.bytes,
        live.objects,
        live.sampled as f64,
        live.bytes_variance,
        live.objects_variance,
    ]
}

/// At every moment and of every stack the page says what `pyheap top --at` says.
#[test]
fn every_stack_at_every_moment_is_what_the_reader_says() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    busy(&base);
    let (reader, data) = of(&base, Limits::default());
    let (groups, classes) = decoded(&data);
    let places: HashMap<&[String], &Found> = groups.iter().map(|group| (&group.stack[..], group)).collect();
    assert_eq!((groups.len(), places.len()), (40, 40));
    let analysis = Analysis::open(&base).unwrap();
    assert_eq!(moments(&data).len(), 121, "half a second apart");
    for (moment, time) in moments(&data) {
        let live = reader.live_at(Some(time)).unwrap();
        for (trace, live) in &live.traces {
            let frames = reader.frames(*trace).unwrap();
            let text = |frame: &crate::profile::model::StackFrame<'_>| {
                format!("{}:{} {}", frame.file, frame.line, frame.function.unwrap())
            };
            let stack: Vec<String> = frames.iter().map(text).collect();
            assert_near(
                places[&stack[..]].at(moment),
                values(live),
                1.0,
                &format!("{trace} at {time:?}"),
            );
        }
        for class in analysis.size_histogram(Some(time)).unwrap() {
            let (_, found) = classes.iter().find(|(high, _)| *high == class.high).unwrap();
            let truth = values(&class.live);
            let found = found.at(moment);
            assert!(
                (found[0] - truth[0]).abs() <= 1.0 && found[2] == truth[2],
                "{found:?} {truth:?}"
            );
        }
    }
}

/// With little room callers are left out, then lines; totals stay what they are.
#[test]
fn what_is_left_out_is_counted_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    busy(&base);
    let small = |stack_cells, line_cells, nodes| Limits {
        stack_cells,
        line_cells,
        stacks: Room {
            nodes,
            name_bytes: 1000,
        },
        line_nodes: 20,
    };
    for (limits, kinds, moments_after_the_first) in [
        (small(600, 61 * 5, 1000), [true, true, true], 60),
        (small(10_000, 121 * 12, 40), [true, true, false], 120),
        (small(0, 0, 25), [false, false, true], 60),
    ] {
        let (reader, data) = of(&base, limits);
        let (groups, _) = decoded(&data);
        assert_eq!(
            [0, 1, 2].map(|kind| groups.iter().any(|group| group.kind == kind)),
            kinds
        );
        let cells = |kind| {
            groups
                .iter()
                .filter(|group| group.kind == kind)
                .map(|group| group.cells.len())
                .sum::<usize>()
        };
        assert!(cells(0) <= limits.stack_cells && cells(1) <= limits.line_cells);
        let moments = moments(&data);
        assert!(moments.len() <= moments_after_the_first + 1, "{}", moments.len());
        for (moment, time) in moments.into_iter().step_by(7) {
            let live = reader.live_at(Some(time)).unwrap();
            let found = groups.iter().fold([0.0; 5], |mut sum, group| {
                sum.iter_mut()
                    .zip(group.at(moment))
                    .for_each(|(sum, value)| *sum += value);
                sum
            });
            assert_near(
                found,
                values(&live.total),
                groups.len() as f64,
                &format!("all at {time:?}"),
            );
        }
        // A line has all that is allocated in it, with callers or without, unless it is too small for that.
        if !kinds[2] {
            let live = reader.live_at(None).unwrap();
            let of_line = live
                .traces
                .iter()
                .filter(|(trace, _)| reader.frames(*trace).unwrap().last().unwrap().line == 3);
            let truth: f64 = of_line.map(|(_, live)| live.bytes).sum();
            let ending = groups
                .iter()
                .filter(|group| group.stack.last().unwrap() == "leaf.py:3 leaf");
            let found: f64 = ending.map(|group| group.at(u64::MAX)[0]).sum();
            assert!((truth - found).abs() < 10.0, "{truth} {found}");
        }
        let text = data["unknown"].to_string();
        assert!(text.contains("smallest of 40 stacks"), "{text}");
    }
}

fn whole(base: &Path) -> String {
    let reader = Reader::open(base).unwrap();
    let (report, info) = parts(&reader);
    page(&Counted::new(&reader, &Filters::default()), &report, &info).unwrap()
}

#[test]
fn names_are_data_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let page_of = |names: &[&str; 8], base: &Path| {
        let mut writer = writer(base, 1);
        for (place, name) in names.iter().enumerate() {
            let frame = Frame {
                file: name,
                line: 7,
                function: name,
            };
            let thread = place as u32 + 1;
            let trace = writer.add_trace(&[frame, frame]).unwrap();
            writer.thread(thread, name);
            writer.alloc(Duration::from_secs(1), trace, 1000, AllocDetail { domain: 0, thread });
        }
        writer.flush().unwrap();
        whole(base)
    };
    let evil = page_of(&EVIL, &dir.path().join("run\u{202E}&<b>'\""));
    let plain = page_of(&["a", "b", "c", "d", "e", "f", "g", "h"], &dir.path().join("run"));
    let tags = |page: &str| page.matches('<').count();
    // In the title it is escaped.
    assert_eq!(tags(&evil), tags(&plain), "no name makes an element");
    assert!(!evil.contains("alert(1)</script>") && evil.contains("\\u003c/script"));
    assert_clean(&evil);
    assert!(evil.contains("<title>run\\u{202e}&amp;&lt;b>'\": heap report</title>"));
}

#[test]
fn nothing_and_damage_are_pages_too() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("none");
    std::fs::write(base.with_extension("_hpm"), [&[0, 0, 0, 1][..], &[0; 17]].concat()).unwrap();
    std::fs::write(base.with_extension("_hpd"), b"").unwrap();
    let (_, data) = of(&base, Limits::default());
    assert_eq!(data["clock"], json!({"width": 0.001, "last": 1, "end": 0.0}));
    assert!(decoded(&data).0.is_empty());
    assert!(data["unknown"].to_string().contains("no ._hpx file"));
    let run = dir.path().join("run");
    busy(&run);
    let events = std::fs::read(run.with_extension("_hpd")).unwrap();
    let cut = events.len() / 2 + 1;
    for (place, bytes) in [
        &events[..cut],
        &[&events[..cut], &[0xFF; 99][..]].concat(),
        &[0x7F; 500],
    ]
    .iter()
    .enumerate()
    {
        std::fs::write(run.with_extension("_hpd"), bytes).unwrap();
        let (reader, data) = of(&run, Limits::default());
        let (groups, _) = decoded(&data);
        let live = reader.live_at(None).unwrap();
        let found: f64 = groups.iter().map(|group| group.at(u64::MAX)[0]).sum();
        let truth = live.total.bytes;
        assert!(
            (found - truth).abs() <= 1e-9 * truth + 100.0 || truth > 1e15,
            "{place}: {found} {truth}"
        );
    }
}
