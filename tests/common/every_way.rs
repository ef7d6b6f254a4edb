//! Bytes through everything that reads or exports a profile: the mutation test and the fuzz targets do the same.
//!
//! Nothing here may panic but for a broken promise, whatever the bytes are.
#![allow(dead_code, reason = "each fuzz target uses a part of this")]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use pyheap::profile::digest::{DigestMode, make_digest};
use pyheap::profile::hpc::Digest;
use pyheap::profile::hpd::{Events, RawEvents};
use pyheap::profile::hpm::TraceFile;
use pyheap::profile::live::Tally;
use pyheap::profile::reader::Reader;
use pyheap::profile::sampling::Weights;
use pyheap::profile::sidecar::Sidecar;
use pyheap::report::export::log::Log;
use pyheap::report::export::{Export, Metric, collapsed, csv, heapprof, html, json, pprof, speedscope, svg};

/// So long between snapshots that a damaged time cannot ask for millions of them.
const INTERVAL: Duration = Duration::from_secs(100_000_000_000);

/// As a .hpm.
pub fn hpm(bytes: &[u8]) {
    let Ok(file) = TraceFile::parse(bytes) else { return };
    let frames: usize = (0..=file.trace_count() + 1)
        .filter_map(|index| Some(file.trace(index)?.count()))
        .sum();
    assert!(
        frames + file.trace_count() as usize <= bytes.len(),
        "no frame is made up"
    );
    assert!((0..64).all(|shift| (0.0..=1.0).contains(&file.table.probability(1 << shift))));
}

/// As a .hpd.
pub fn hpd(bytes: &[u8]) {
    let count = RawEvents::new(bytes).count();
    assert!(count * 7 <= bytes.len(), "no event is made up");
    let mut tally = Tally::new(Weights::Period(131_072), 10);
    let pieces: BTreeMap<u64, u32> = [(1, 3), (2, u32::MAX)].into();
    let mut before = Duration::ZERO;
    for event in Events::new(bytes, pieces) {
        assert!(event.clock >= before);
        before = event.clock;
        tally.apply(&event);
    }
    assert!(tally.traces().all(|(_, live)| live.bytes >= 0.0 && live.objects >= 0.0));
}

/// As a .hpc.
pub fn hpc(bytes: &[u8]) {
    let Ok(digest) = Digest::parse(bytes.to_vec()) else {
        return;
    };
    // Each of many snapshots may be the same large one: a few of them tell.
    for place in (0..digest.len()).take(100) {
        if let Some(snapshot) = digest.snapshot(place) {
            assert!(snapshot.entries.len() <= bytes.len());
            snapshot.total();
        }
    }
}

/// As a .hpx.
pub fn hpx(bytes: &[u8]) {
    let Ok(sidecar) = Sidecar::parse(bytes) else { return };
    let functions = sidecar.functions.len();
    assert!(
        sidecar
            .traces
            .values()
            .flatten()
            .all(|(function, _)| (*function as usize) < functions)
    );
    if let Some(end) = &sidecar.end {
        end.describe();
    }
}

/// As a profile that has these files.
pub fn profile(base: &Path) {
    let Ok(reader) = Reader::open(base) else { return };
    let elapsed = reader.elapsed().expect("the files can be read");
    for at in [None, Some(elapsed / 2)] {
        exports(&Export::new(&reader, at).expect("the files can be read"));
    }
    log(&reader);
    original(&reader, base);
    for mode in [DigestMode::Exact, DigestMode::Compatible] {
        // What it refuses (a year of snapshots) it may.
        if let Ok(summary) = make_digest(&reader, INTERVAL, 0.01, mode) {
            hpc(&std::fs::read(summary.path).expect("it was just written"));
        }
    }
}

fn exports(export: &Export<'_>) {
    for metric in Metric::ALL {
        let sum: u128 = export.whole(metric).into_iter().map(u128::from).sum();
        let total = metric.of(&export.total).min((1u64 << 62) as f64);
        let slack = 2.0 + total * 1e-9;
        assert!(
            (sum as f64 - total).abs() <= slack,
            "{metric:?}: {sum} instead of {total}"
        );
        for line in collapsed::collapsed(export, metric).lines() {
            let value = line.rsplit_once(' ').and_then(|(_, value)| value.parse::<u64>().ok());
            assert!(value.is_some(), "{line}");
        }
    }
    let page = html::html(export, Metric::LiveBytes).expect("plain data");
    assert_eq!(page.matches("<script").count(), 2);
    if let Ok(picture) = svg::svg(export, Metric::AllocBytes) {
        assert!(std::str::from_utf8(&picture).is_ok_and(|text| text.trim_end().ends_with("</svg>")));
    }
    let is_json = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).is_ok();
    assert!(is_json(&speedscope::speedscope(export).expect("plain data")));
    assert!(is_json(json::json(export).expect("plain data").as_bytes()));
    assert_eq!(csv::csv(export).lines().count(), export.traces.len() + 1);
    assert!(pprof::pprof(export).is_ok());
}

fn log(reader: &Reader) {
    let mut log = Log::new(reader, true);
    let mut line = String::new();
    for event in reader.events().expect("the files can be read") {
        line.clear();
        log.text(&event, &mut line);
        log.json(&event, &mut line).expect("plain data");
        assert_eq!(line.lines().count(), 2);
    }
}

/// What is written for the original is whole, and says the same.
fn original(reader: &Reader, base: &Path) {
    let copy = base.with_file_name("copy");
    let create = |suffix| std::fs::File::create(copy.with_extension(suffix)).expect("room for a small file");
    let mut out = std::io::BufWriter::new(create("hpm"));
    heapprof::traces(reader, &mut out).expect("room for a small file");
    drop(out);
    let mut out = std::io::BufWriter::new(create("hpd"));
    let records = reader.raw_events().expect("the files can be read");
    let (_, written) = heapprof::events(reader, records, &mut out).expect("room for a small file");
    drop(out);
    let copy = Reader::open(&copy).expect("it is whole");
    let scan = copy.scan().expect("the files can be read");
    assert_eq!(
        (scan.events, scan.is_cut, copy.trace_count()),
        (written, false, reader.trace_count())
    );
    assert!((0..=reader.trace_count()).all(|index| copy.raw_trace(index) == reader.raw_trace(index)));
    assert_eq!(copy.sampling_table(), reader.sampling_table());
}
