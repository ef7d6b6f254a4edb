//! Promise: profiles that the original heapprof recorded are read with its own answers, and a compatible digest of them
//! is its digest. The expectations (`*.expected.json`) are what the original's reader said.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pyheap::profile::digest::{DigestMode, make_digest};
use pyheap::profile::hpc::{Digest, Snapshot};
use pyheap::profile::names::Part;
use pyheap::profile::reader::Reader;
use serde_json::Value;

const NAMES: [&str; 4] = ["json_parse", "deep_recursion", "threads_sqlite", "unicode_paths"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/heapprof")
        .join(name)
}

fn each(check: impl Fn(&str, &Reader, &Value)) {
    for name in NAMES {
        let text = std::fs::read_to_string(golden(name).with_extension("expected.json")).unwrap();
        check(
            name,
            &Reader::open(&golden(name)).unwrap(),
            &serde_json::from_str(&text).unwrap(),
        );
    }
}

fn original_digest(name: &str) -> Digest {
    Digest::parse(std::fs::read(golden(name).with_extension("hpc")).unwrap()).unwrap()
}

/// Equal up to the last digit, which the JSON parser may miss.
fn same(a: f64, b: f64) -> bool {
    (a - b).abs() <= a.abs() * 2.0 * f64::EPSILON
}

/// The original's scale factor of a size.
fn scale(reader: &Reader, size: u64) -> f64 {
    let probability = reader.sampling_table().probability(size);
    if probability == 0.0 { 0.0 } else { 1.0 / probability }
}

#[test]
fn headers_and_tables_agree() {
    each(|name, reader, want| {
        assert!(
            same(reader.initial_time(), want["initialTime"].as_f64().unwrap()),
            "{name}"
        );
        assert_eq!(u64::from(reader.trace_count()), want["traceCount"].as_u64().unwrap());
        let table: Vec<_> = reader
            .sampling_table()
            .ranges()
            .iter()
            .map(|r| (r.bound, r.probability()))
            .collect();
        let wanted: Vec<_> = want["samplingRate"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair[0].as_u64().unwrap(), pair[1].as_f64().unwrap()))
            .collect();
        assert_eq!(table.len(), wanted.len());
        assert!(
            table
                .iter()
                .zip(&wanted)
                .all(|(mine, want)| mine.0 == want.0 && same(mine.1, want.1)),
            "{name}"
        );
        for pair in want["scaleFactors"].as_array().unwrap() {
            let factor = scale(reader, pair[0].as_i64().unwrap().unsigned_abs());
            assert!(same(factor, pair[1].as_f64().unwrap()), "{name} {pair}");
        }
        assert!(reader.warnings().unwrap().is_empty() && reader.sidecar().is_none());
    });
}

#[test]
fn events_agree() {
    each(|name, reader, want| {
        let mut clock = reader.initial_time();
        let raw = reader.raw_events().unwrap();
        let events: Vec<_> = reader
            .events()
            .unwrap()
            .zip(raw)
            .map(|(event, raw)| {
                let step = raw.secs as f64 + 1e-6 * raw.micros as f64;
                clock += if raw.is_negative() { -step } else { step };
                let time = reader.initial_time() + event.micros as f64 * 1e-6;
                // The original adds up seconds since 1970, and loses up to 0.12 us at each step.
                assert!(
                    (time - clock).abs() < 0.12e-6 * (event.number + 2) as f64,
                    "{name}: {time} {clock}"
                );
                (clock, event.trace, event.signed_size(), scale(reader, event.size))
            })
            .collect();
        assert_eq!(events.len() as u64, want["eventCount"].as_u64().unwrap());
        assert_eq!(
            events.iter().filter(|e| e.2 > 0).count() as u64,
            want["allocations"].as_u64().unwrap()
        );
        assert_eq!(
            events.iter().filter(|e| e.2 < 0).count() as u64,
            want["frees"].as_u64().unwrap()
        );
        let first = want["firstEvents"].as_array().unwrap();
        let last = want["lastEvents"].as_array().unwrap();
        let ends = events[..first.len()]
            .iter()
            .zip(first)
            .chain(events[events.len() - last.len()..].iter().zip(last));
        for (event, want) in ends {
            assert!(
                same(event.0, want[0].as_f64().unwrap()) && same(event.3, want[3].as_f64().unwrap()),
                "{name}"
            );
            let integers = (want[1].as_u64().unwrap() as u32, i128::from(want[2].as_i64().unwrap()));
            assert_eq!((event.1, event.2), integers, "{name}");
        }
        let scan = reader.scan().unwrap();
        assert_eq!(
            (scan.events, scan.unknown_traces, scan.is_cut),
            (events.len() as u64, 0, false)
        );
    });
}

#[test]
fn traces_agree() {
    each(|name, reader, want| {
        for (index, frames) in want["rawTraces"].as_object().unwrap() {
            let mine = reader.raw_trace(index.parse().unwrap());
            let wanted = frames.as_array().map(|frames| {
                frames
                    .iter()
                    .map(|f| (f[0].as_str().unwrap(), f[1].as_u64().unwrap() as u32))
                    .collect::<Vec<_>>()
            });
            assert_eq!(mine, wanted, "{name} {index}");
        }
        assert_eq!(
            (reader.raw_trace(0), reader.frames(reader.trace_count() + 1)),
            (None, None)
        );
    });
}

fn check_snapshot(name: &str, snapshot: &Snapshot, want: &Value) {
    assert_eq!(snapshot.total(), want["totalUsage"].as_u64().unwrap(), "{name}");
    assert_eq!(snapshot.entries.len() as u64, want["traces"].as_u64().unwrap());
    for (mine, top) in snapshot.entries.iter().zip(want["top"].as_array().unwrap()) {
        assert_eq!(mine.1, top[1].as_u64().unwrap());
    }
}

#[test]
fn digests_of_the_original_are_read() {
    each(|name, reader, want| {
        let digest = original_digest(name);
        let snapshots = want["snapshots"].as_array().unwrap();
        assert!(!digest.is_rebuilt && digest.len() == snapshots.len());
        let interval = (1e-3 * digest.interval_millis as f64) as f32;
        assert_eq!(f64::from(interval), want["snapshotInterval"].as_f64().unwrap());
        assert_eq!(digest.start.0, reader.start().as_secs());
        assert!(digest.start.1.abs_diff(u64::from(reader.start().subsec_nanos())) < 200);
        for (place, want) in snapshots.iter().enumerate() {
            let snapshot = digest.snapshot(place).unwrap();
            check_snapshot(name, &snapshot, want);
            for (mine, top) in snapshot.entries.iter().zip(want["top"].as_array().unwrap()) {
                assert_eq!(u64::from(mine.0), top[0].as_u64().unwrap());
            }
        }
    });
}

/// Entries by index, so that the order of equal sizes does not matter.
fn maps(digest: &Digest) -> Vec<BTreeMap<u32, u64>> {
    (0..digest.len())
        .map(|place| digest.snapshot(place).unwrap().entries.into_iter().collect())
        .collect()
}

#[test]
fn compatible_digests_are_those_of_the_original() {
    each(|name, _, want| {
        let dir = tempfile::tempdir().unwrap();
        for suffix in ["hpm", "hpd"] {
            std::fs::copy(
                golden(name).with_extension(suffix),
                dir.path().join(format!("run.{suffix}")),
            )
            .unwrap();
        }
        let reader = Reader::open(&dir.path().join("run")).unwrap();
        let interval = Duration::from_secs_f64(want["digest"]["timeInterval"].as_f64().unwrap());
        let summary = make_digest(&reader, interval, 0.0, DigestMode::Compatible).unwrap();
        let bytes = std::fs::read(reader.names().path(Part::Digest)).unwrap();
        let original = std::fs::read(golden(name).with_extension("hpc")).unwrap();
        assert_eq!(summary.len, bytes.len() as u64);
        assert_eq!(bytes.len(), original.len(), "{name}");
        assert_eq!(bytes[..30], original[..30]);
        let mine = Digest::parse(bytes).unwrap();
        assert!(!mine.is_rebuilt);
        assert_eq!(maps(&mine), maps(&original_digest(name)));
        for (place, want) in want["snapshots"].as_array().unwrap().iter().enumerate() {
            check_snapshot(name, &mine.snapshot(place).unwrap(), want);
        }
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            3,
            "no temporary file is left"
        );
    });
}

/// An exact digest says at its last snapshot what is alive at the end, and at tick k what is alive then.
#[test]
fn exact_digests_agree_with_the_live_set() {
    each(|name, _, _| {
        let dir = tempfile::tempdir().unwrap();
        for suffix in ["hpm", "hpd"] {
            std::fs::copy(
                golden(name).with_extension(suffix),
                dir.path().join(format!("run._{suffix}")),
            )
            .unwrap();
        }
        let reader = Reader::open(&dir.path().join("run")).unwrap();
        let interval = Duration::from_millis(100);
        make_digest(&reader, interval, 0.0, DigestMode::Exact).unwrap();
        let digest = Digest::parse(std::fs::read(dir.path().join("run._hpc")).unwrap()).unwrap();
        assert_eq!(
            digest.len() as u128,
            reader.elapsed().unwrap().as_micros().div_ceil(100_000),
            "{name}"
        );
        for (place, snapshot) in maps(&digest).into_iter().enumerate() {
            let at = (place + 1 < digest.len()).then(|| interval * (place as u32 + 1));
            let live = reader.live_at(at).unwrap();
            let estimates = live
                .traces
                .iter()
                .map(|(index, live)| (*index, live.bytes.round() as u64));
            assert_eq!(
                snapshot,
                estimates.filter(|(_, bytes)| *bytes > 0).collect::<BTreeMap<_, _>>(),
                "{name} {place}"
            );
        }
    });
}
