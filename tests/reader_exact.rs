//! Promise: in exact mode the library is right where the original's reader is wrong, each of its known defects with a test
//! here; and what it cannot answer (windows, ages, rates) is answered truthfully.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use pyheap::profile::facts::{EndReason, Facts};
use pyheap::profile::names::SuffixStyle;
use pyheap::profile::writer::{AllocDetail, Frame, ProfileWriter};
use pyheap::reader::tracemalloc::{Filter, GroupBy};
use pyheap::reader::{DotOptions, FlowGraph, Mode, RawTraceLine, Reader, ReaderError};

const NONE: AllocDetail = AllocDetail { domain: 255, thread: 0 };

fn frame(file: &'static str, line: u32) -> Frame<'static> {
    Frame {
        file,
        line,
        function: "f",
    }
}

fn seconds(value: f64) -> Duration {
    Duration::from_secs_f64(value)
}

/// A recording of every allocation, with the traces given innermost frame first.
fn record(base: &Path, traces: &[&[Frame<'static>]], events: impl FnOnce(&mut ProfileWriter)) {
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let mut writer = ProfileWriter::create(base, SuffixStyle::Underscore, start, 1, &Facts::default()).unwrap();
    for trace in traces {
        writer.add_trace(trace).unwrap();
    }
    events(&mut writer);
    writer.flush().unwrap();
}

fn line(text: &str) -> RawTraceLine {
    text.parse().unwrap()
}

fn go_on(_: pyheap::profile::digest::Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// 100 bytes at 0.4 s, freed at 2.5 s; 5000 at 1.3 s and 1000 at 2.6 s, which is the end.
fn sample(base: &Path) {
    let traces: [&[_]; 3] = [
        &[frame("leaf.py", 1), frame("app.py", 3)],
        &[
            frame("rec.py", 5),
            frame("rec.py", 5),
            frame("rec.py", 5),
            frame("app.py", 4),
        ],
        &[],
    ];
    record(base, &traces, |writer| {
        writer.alloc(seconds(0.4), 1, 100, NONE);
        writer.alloc(seconds(1.3), 2, 5000, NONE);
        writer.free(seconds(2.5), 1, 100);
        writer.alloc(seconds(2.6), 3, 1000, NONE);
        writer.end(seconds(2.6), &EndReason::Stopped);
    });
}

#[test]
fn digests_show_the_past_and_the_end_and_times_are_right() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    sample(&base);
    let mut exact = Reader::open(&base).unwrap();
    assert!(!exact.has_digest() && matches!(exact.snapshot_at(0.0), Err(ReaderError::NoDigest)));
    let summary = exact.make_digest(seconds(1.0), 0.0, go_on).unwrap();
    assert!((summary.snapshots, summary.is_interrupted) == (3, false) && exact.has_digest());
    let all: Vec<_> = exact.snapshots().unwrap().iter().map(Result::unwrap).collect();
    let short: Vec<_> = all.iter().map(|s| (s.relative_time, s.total_usage())).collect();
    assert_eq!(short, [(1.0, 100), (2.0, 5100), (2.6, 6000)]);
    // A moment is answered by what was known then, the last one by the end.
    for (time, place) in [
        (-1.0, 0),
        (0.5, 0),
        (1.0, 0),
        (1.9, 0),
        (2.0, 1),
        (2.59, 1),
        (2.6, 2),
        (1e9, 2),
    ] {
        assert_eq!(exact.snapshot_at(time).unwrap(), all[place], "{time}");
    }
    assert_eq!(
        (exact.elapsed_time().unwrap(), exact.snapshot_interval().unwrap()),
        (2.6, 1.0)
    );
    assert!((exact.final_time().unwrap() - 1_600_000_002.6).abs() < 1e-6);
    for at in [0.3, 0.4, 1.0, 2.5] {
        let live = exact.live_snapshot(Some(seconds(at))).unwrap();
        assert_eq!(live.relative_time, at);
        assert_eq!(
            live.total_usage(),
            [(0.3, 0), (0.4, 100), (1.0, 100), (2.5, 5000)]
                .iter()
                .find(|x| x.0 == at)
                .unwrap()
                .1
        );
    }
    // The original sees the future in a silence, drops the tail, and is an interval early.
    let mut compat = Reader::open_as(&base, Mode::Compat).unwrap();
    compat.make_digest(seconds(1.0), 0.0, go_on).unwrap();
    let all: Vec<_> = compat.snapshots().unwrap().iter().map(Result::unwrap).collect();
    let short: Vec<_> = all.iter().map(|s| (s.relative_time, s.total_usage())).collect();
    assert_eq!(short, [(0.0, 5100), (1.0, 5000)]);
    // A run shorter than an interval has a snapshot, too.
    exact.make_digest(seconds(60.0), 0.01, go_on).unwrap();
    assert_eq!(exact.snapshot_at(0.0).unwrap().relative_time, 2.6);
}

#[test]
fn an_interrupted_digest_is_a_valid_one() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base, &[&[frame("a.py", 1)]], |writer| {
        for event in 0..600_000u64 {
            writer.alloc(Duration::from_micros(event * 10), 1, 1, NONE);
        }
    });
    let mut reader = Reader::open(&base).unwrap();
    let mut calls = 0;
    let summary = reader.make_digest(seconds(0.5), 0.0, |progress| {
        calls += 1;
        assert!(progress.bytes <= progress.bytes_total && progress.events > 0);
        if calls == 2 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    let summary = summary.unwrap();
    assert!(summary.is_interrupted && summary.events < 600_000 && summary.snapshots == 10);
    let usages: Vec<_> = reader
        .snapshots()
        .unwrap()
        .iter()
        .map(|s| s.unwrap().total_usage())
        .collect();
    assert_eq!(usages, (1..=10).map(|tick| tick * 50_000 + 1).collect::<Vec<_>>());
    assert!(!reader.snapshots().unwrap().is_empty() && reader.warnings().unwrap().is_empty());
    // What it says of the whole file was not learned from a part of it.
    assert_eq!(reader.profile().scan().unwrap().events, 600_000);
}

#[test]
fn recursion_counts_once_and_lines_that_are_asked_twice_have_one_value() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    sample(&base);
    let exact = Reader::open(&base).unwrap();
    let compat = Reader::open_as(&base, Mode::Compat).unwrap();
    let snapshot = exact.live_snapshot(None).unwrap();
    let cumulative = |graph: FlowGraph| {
        graph
            .node_cumulative_usage()
            .find(|(l, _)| l.filename == "rec.py")
            .unwrap()
            .1
    };
    assert_eq!(cumulative(exact.flow_graph(&snapshot)), 5000);
    assert_eq!(cumulative(compat.flow_graph(&snapshot)), 15_000);
    let asked = [line("rec.py:5"), line("rec.py:5"), line("app.py:4"), line("no.py:1")];
    assert_eq!(
        exact.fast_get_usage(&snapshot, &asked, true).lines,
        [5000, 5000, 5000, 0]
    );
    assert_eq!(
        compat.fast_get_usage(&snapshot, &asked, true).lines,
        [10_000, 10_000, 5000, 0]
    );
    // Not cumulative, with an empty trace in the snapshot: the original fails.
    let usage = exact.fast_get_usage(&snapshot, &asked, false);
    assert_eq!((usage.lines, usage.total), (vec![5000, 5000, 0, 0], 6000));
    assert_eq!((exact.trace(3), compat.trace(3)), (Some(vec![]), None));
    assert_eq!((exact.raw_trace(3), exact.raw_trace(0)), (Some(vec![]), None));
    assert_eq!(exact.trace(1).unwrap()[0].function.as_deref(), Some("f"));
    assert_eq!(
        exact.flame_graph(&snapshot),
        "f (app.py:4);f (rec.py:5);f (rec.py:5);f (rec.py:5) 5000\nOTHER 1000\n"
    );
}

/// Boxes and arrows by their rows.
fn picture(text: &str) -> (Vec<String>, Vec<String>) {
    let rows = |line: &str| -> String {
        let rows = line
            .split("bgcolor=\"white\">")
            .skip(1)
            .map(|row| row.split("</td>").next().unwrap());
        rows.collect::<Vec<_>>().join("+")
    };
    let (arrows, boxes): (Vec<&str>, Vec<&str>) = text
        .lines()
        .skip(2)
        .filter(|l| *l != "}")
        .partition(|l| l.contains(" -> "));
    let name = |id: &str| {
        let found = boxes.iter().find(|b| b.trim_start().starts_with(&format!("{id} [")));
        found.map_or_else(|| "DANGLING".to_owned(), |b| rows(b))
    };
    let arrows = arrows.iter().map(|arrow| {
        let mut words = arrow.split_whitespace();
        format!("{} -> {}", name(words.next().unwrap()), name(words.nth(1).unwrap()))
    });
    (boxes.iter().map(|b| rows(b)).collect(), arrows.collect())
}

#[test]
fn pictures_have_no_holes() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    // One root does not hold all (1), a chain whose inner pair is merged first because its lines come first (2), a
    // closed circle (3).
    let a = |l| frame("a.py", l);
    let traces: [&[_]; 4] = [
        &[a(14), a(13), a(12)],
        &[a(14), a(13), a(12), a(11), a(10)],
        &[a(21), a(20), a(21), a(20)],
        &[],
    ];
    record(&base, &traces, |writer| {
        for (trace, size) in [(1, 4000), (2, 3000), (3, 2000), (4, 1000)] {
            writer.alloc(seconds(1.0), trace, size, NONE);
        }
    });
    let reader = Reader::open(&base).unwrap();
    let snapshot = reader.live_snapshot(None).unwrap();
    let graph = reader.flow_graph(&snapshot);
    let (boxes, arrows) = picture(&graph.as_dot(DotOptions::default()).unwrap());
    assert!(arrows.iter().all(|arrow| !arrow.contains("DANGLING")), "{arrows:?}");
    // Names have functions here; every line is in exactly one box.
    for l in [10, 11, 12, 13, 14, 20, 21] {
        let holding = boxes.iter().filter(|b| b.contains(&format!("a.py:{l} f"))).count();
        assert_eq!(holding, 1, "a.py:{l} in {boxes:?}");
    }
    assert!(boxes.contains(&"Program Root".to_owned()));
    // Traces that begin with a line which is called from elsewhere too come from the root.
    assert!(
        arrows
            .iter()
            .any(|arrow| arrow.starts_with("Program Root -> a.py:12 f")),
        "{arrows:?}"
    );

    // Compared with nothing, nothing is divided by.
    let empty = reader.flow_graph(&reader.live_snapshot(Some(Duration::ZERO)).unwrap());
    let text = FlowGraph::compare(&[&empty, &graph], DotOptions::default()).unwrap();
    assert!(text.contains("0.0B / 0.0B =  0%</td>") && !text.contains("NaN"));
    let none = FlowGraph::compare(&[&empty], DotOptions::default()).unwrap();
    assert_eq!(none, "digraph {\n  node [shape=none margin=0]\n}\n");
    let path = dir.path().join("x.dot");
    graph.write_dot_file(&path, DotOptions::default()).unwrap();
    assert!(std::fs::read_to_string(path).unwrap().starts_with("digraph {"));
}

#[test]
fn windows_know_what_they_do_not_know() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base, &[&[frame("a.py", 1)], &[frame("b.py", 1)]], |writer| {
        // Two blocks of one kind before the window, three in it, then two are freed: any of the five.
        for second in [1.0, 2.0, 4.0, 5.0, 6.0] {
            writer.alloc(seconds(second), 1, 100, NONE);
        }
        writer.alloc(seconds(5.0), 2, 70, NONE);
        writer.alloc(seconds(6.0), 2, 30, NONE);
        writer.free(seconds(8.0), 1, 100);
        writer.free(seconds(8.0), 1, 100);
        writer.free(seconds(8.0), 2, 30);
    });
    let reader = Reader::open(&base).unwrap();
    let window = reader.window(Some(seconds(2.0)), seconds(6.0), None).unwrap();
    let short: Vec<_> = window
        .traces
        .iter()
        .map(|(i, b)| (*i, b.least.bytes, b.most.bytes, b.most.alloc_bytes))
        .collect();
    assert_eq!(short, [(1, 100.0, 300.0, 300.0), (2, 70.0, 70.0, 100.0)]);
    assert_eq!((window.total.least.bytes, window.total.most.objects), (170.0, 4.0));
    // Before the frees there is no doubt; half open: 2 s is not in it, 6 s is.
    let earlier = reader
        .window(Some(seconds(2.0)), seconds(6.0), Some(seconds(7.0)))
        .unwrap();
    assert_eq!((earlier.total.least.bytes, earlier.total.most.bytes), (400.0, 400.0));
    // From the beginning to the end it is what is alive.
    let all = reader.window(None, seconds(8.0), None).unwrap();
    assert_eq!((all.total.least.bytes, all.total.most.bytes), (370.0, 370.0));

    let ages = reader.ages(Some(seconds(8.0))).unwrap();
    // The oldest are freed first: 4, 5, 6 are left, aged 4, 3, 2; or the youngest: 1, 2, 4 are.
    assert_eq!((ages[0].trace, ages[0].sampled), (1, 3));
    assert!((ages[0].mean_seconds.0 - 3.0).abs() < 1e-9 && (ages[0].mean_seconds.1 - 17.0 / 3.0).abs() < 1e-9);
    assert_eq!(ages[0].oldest_seconds, (4.0, 7.0));
    // The writer's clock does not go back: what came after 6 s is of 6 s.
    assert_eq!(ages[1].mean_seconds, (2.0, 2.0));

    let sizes = reader.size_histogram(None).unwrap();
    let sizes: Vec<_> = sizes
        .iter()
        .map(|c| (c.low, c.high, c.live.objects, c.live.alloc_objects))
        .collect();
    assert_eq!(sizes, [(17, 32, 0.0, 1.0), (65, 128, 4.0, 6.0)]);

    let series = reader
        .series(seconds(2.0), &[("a".to_owned(), line("a.py:1"))])
        .unwrap();
    let points: Vec<_> = series
        .points
        .iter()
        .map(|p| (p.at, p.total.bytes, p.lines[0].bytes))
        .collect();
    assert_eq!(
        points,
        [
            (2.0, 200.0, 200.0),
            (4.0, 300.0, 300.0),
            (6.0, 600.0, 500.0),
            (8.0, 370.0, 300.0)
        ]
    );
    assert_eq!(series.allocation_rates()[2], (150.0, 2.0));
    let traces = reader.trace_series(seconds(8.0), &[2]).unwrap();
    assert_eq!(traces.points[0].lines[0].bytes, 70.0);
    assert!(reader.series(Duration::from_nanos(1), &[]).is_err());
}

/// A change is as certain as what has changed, not as what was there all along.
#[test]
fn what_stays_does_not_blur_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let mut writer = ProfileWriter::create(&base, SuffixStyle::Underscore, start, 1000, &Facts::default()).unwrap();
    writer.add_trace(&[frame("a.py", 1)]).unwrap();
    for _ in 0..50 {
        writer.alloc(seconds(1.0), 1, 500, NONE);
    }
    for _ in 0..4 {
        writer.alloc(seconds(3.0), 1, 200, NONE);
    }
    writer.free(seconds(4.0), 1, 500);
    writer.flush().unwrap();
    let reader = Reader::open(&base).unwrap();
    let changes = reader.changes(seconds(2.0), None).unwrap();
    let change = &changes.traces[0].1;
    let weight = |size: f64| 1.0 / (1.0 - (-size / 1000.0f64).exp());
    let variance = |size: f64| size * size * (weight(size) - 1.0) * weight(size);
    let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    assert!(close(
        change.bytes(),
        4.0 * 200.0 * weight(200.0) - 500.0 * weight(500.0)
    ));
    assert!(close(change.objects(), 4.0 * weight(200.0) - weight(500.0)));
    assert!(close(change.bytes_variance, 4.0 * variance(200.0) + variance(500.0)));
}

#[test]
fn the_words_of_tracemalloc() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    sample(&base);
    let reader = Reader::open(&base).unwrap();
    let snapshot = reader.take_snapshot(None).unwrap();
    assert_eq!(reader.traced_memory(None).unwrap(), (6000.0, 6000.0));
    assert_eq!(reader.traced_memory(Some(seconds(2.55))).unwrap(), (5000.0, 5100.0));
    let files = snapshot.statistics(GroupBy::File, true);
    let short: Vec<_> = files
        .iter()
        .map(|row| (row.site.file.as_deref(), row.live_bytes))
        .collect();
    assert_eq!(
        short,
        [(Some("app.py"), 5000.0), (Some("rec.py"), 5000.0), (None, 1000.0)]
    );
    let old = reader.take_snapshot(Some(seconds(1.0))).unwrap();
    let diff = snapshot.compare_to(&old, GroupBy::Line, false);
    let short: Vec<_> = diff
        .iter()
        .map(|row| (row.site.file.as_deref(), row.size_diff, row.count_diff))
        .collect();
    assert_eq!(
        short,
        [
            (Some("rec.py"), 5000.0, 1.0),
            (None, 1000.0, 1.0),
            (Some("leaf.py"), -100.0, -1.0)
        ]
    );
    // Only the allocating frame is looked at, unless all are.
    let filter = |inclusive, pattern, line, all| Filter::new(inclusive, pattern, line, all).unwrap();
    let bytes = |filters: &[Filter]| snapshot.filter_traces(filters).total().bytes;
    assert_eq!(bytes(&[filter(true, "app.py", None, false)]), 0.0);
    assert_eq!(bytes(&[filter(true, "app.pyc", None, true)]), 5000.0);
    assert_eq!(bytes(&[filter(true, "*.py", Some(6), false)]), 0.0);
    assert_eq!(bytes(&[filter(false, "r?c.*", None, false)]), 1000.0);
    assert_eq!(
        bytes(&[filter(true, "*", None, false), filter(false, "*", Some(5), false)]),
        0.0
    );
    assert!(Filter::new(true, "[", None, false).is_err());
}

/// A digest that is no digest does not keep a profile from being opened.
#[test]
fn damaged_digests_are_as_none() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    sample(&base);
    let mut reader = Reader::open(&base).unwrap();
    reader.make_digest(seconds(1.0), 0.0, go_on).unwrap();
    let path = dir.path().join("run._hpc");
    let whole = std::fs::read(&path).unwrap();
    for cut in 0..whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let reader = Reader::open(&base).unwrap();
        assert_eq!(reader.has_digest(), cut >= 30, "{cut}");
        assert_eq!(reader.warnings().unwrap().len(), 1, "{cut}");
        if reader.has_digest() {
            let kept = reader.snapshots().unwrap();
            assert!(kept.len() <= 3 && kept.iter().all(|snapshot| snapshot.is_ok()));
        }
    }
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0xFF;
        std::fs::write(&path, &bytes).unwrap();
        let reader = Reader::open(&base).unwrap();
        if let Ok(snapshots) = reader.snapshots() {
            for snapshot in snapshots.iter().take(10).flatten() {
                reader.flow_graph(&snapshot);
                reader.flame_graph(&snapshot);
            }
            let _ = reader.time_plot(&[("x".to_owned(), line("a.py:1"))]);
        }
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(!Reader::open(&base).unwrap().has_digest());
}
