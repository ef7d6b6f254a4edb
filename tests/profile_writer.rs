//! Promise: what the writer writes is read back as it was meant, by our reader and by a model of the format that shares
//! no code with it (`support/hpmodel.py`); and a full disk leaves whole records.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use pyheap::profile::digest::{DigestMode, make_digest};
use pyheap::profile::facts::{EndReason, Facts, Losses, MemorySample};
use pyheap::profile::hpc::Digest;
use pyheap::profile::names::{Part, SuffixStyle};
use pyheap::profile::reader::Reader;
use pyheap::profile::sampling::Weights;
use pyheap::profile::writer::{AllocDetail, Frame, ProfileWriter, WriteError};
use serde_json::Value;

const PERIOD: u64 = 131_072;

fn start() -> std::time::SystemTime {
    UNIX_EPOCH + Duration::new(1_600_000_000, 250_000_001)
}

fn create(base: &Path, style: SuffixStyle, period: u64) -> ProfileWriter {
    let facts = Facts {
        pid: Some(42),
        python: Some("3.11.7".to_owned()),
        ..Facts::default()
    };
    ProfileWriter::create(base, style, start(), period, &facts).unwrap()
}

fn frame<'a>(file: &'a str, line: u32, function: &'a str) -> Frame<'a> {
    Frame { file, line, function }
}

/// A repeatable sequence of numbers.
fn numbers() -> impl FnMut(u64) -> u64 {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    }
}

/// 5000 events of 50 traces over some minutes, with nanoseconds, large and empty blocks.
fn fill(writer: &mut ProfileWriter) {
    let mut next = numbers();
    let mut live = Vec::new();
    let mut at = Duration::ZERO;
    for number in 0..5000u64 {
        if number % 100 == 0 {
            let file = format!("dir;{number}/é.py");
            let stack = [
                frame("<string>", 1, "<module>"),
                frame(&file, number as u32, "inner"),
                frame("<frozen runpy>", 88, "_run_code"),
                frame("app.py", 10, "main"),
            ];
            let kept = if number == 300 { &stack[..1] } else { &stack[..] };
            writer.add_trace(kept).unwrap();
        }
        at += Duration::from_nanos(next(100_000_000));
        if number % 3 == 2 && !live.is_empty() {
            let (trace, size) = live.swap_remove(next(live.len() as u64) as usize);
            writer.free(at, trace, size);
        } else {
            let trace = next(u64::from(writer.trace_count()) + 1) as u32;
            let size = match number % 50 {
                0 => 0,
                7 => 1 << 31,
                9 => (5 << 31) + 3,
                other => next(1 << (other % 24 + 1)),
            };
            writer.alloc(
                at,
                trace,
                size,
                AllocDetail {
                    domain: 2,
                    thread: 1 + trace % 2,
                },
            );
            live.push((trace, size));
        }
        if number % 700 == 0 {
            writer.memory(
                at,
                &MemorySample {
                    rss: number << 10,
                    pss: Some(1),
                    ..MemorySample::default()
                },
            );
            writer.flush().unwrap();
        }
    }
    writer.losses(at, &Losses([("samples_dropped".to_owned(), 3)].into()));
    writer.end(at, &EndReason::TargetExited { code: Some(0) });
    writer.flush().unwrap();
}

fn model(base: &Path, millis: u32) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/hpmodel.py");
    let output = Command::new("python3")
        .arg(script)
        .arg(base)
        .arg(millis.to_string())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn an_independent_reader_finds_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    fill(&mut create(&base, SuffixStyle::Plain, PERIOD));
    let reader = Reader::open(&base).unwrap();
    let model = model(&base, 10_000);
    assert_eq!(model["start"], serde_json::json!([1_600_000_000, 250_000_001]));
    assert_eq!(
        model["table"].as_array().unwrap().len(),
        reader.sampling_table().ranges().len()
    );

    let traces: Vec<_> = (1..=reader.trace_count())
        .map(|index| reader.raw_trace(index).unwrap())
        .collect();
    assert_eq!(model["traces"], serde_json::to_value(&traces).unwrap());
    assert_eq!(
        (traces[0].as_slice(), traces[3].len()),
        (&[("app.py", 10), ("dir;0/é.py", 0)][..], 0)
    );

    let events: Vec<_> = reader
        .events()
        .unwrap()
        .map(|e| (e.micros, e.trace, e.signed_size() as i64))
        .collect();
    assert_eq!(model["events"], serde_json::to_value(&events).unwrap());
    assert!(
        events.iter().all(|event| event.2.unsigned_abs() < 1 << 31),
        "the original reads sizes up to here"
    );

    // The model scales by the table, we by the exact period.
    assert_eq!(reader.weights(), Weights::Period(PERIOD));
    let live = reader.live_at(None).unwrap();
    for pair in model["live"].as_array().unwrap() {
        let (index, bytes) = (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap());
        let mine = live.traces.iter().find(|(trace, _)| *trace == index).unwrap().1.bytes;
        assert!(
            (mine - bytes).abs() <= mine.max(bytes) * 0.0025 + 1.0,
            "trace {index}: {mine} {bytes}"
        );
    }
    assert_eq!(live.unmatched_frees, 0);

    make_digest(&reader, Duration::from_secs(10), 0.0, DigestMode::Compatible).unwrap();
    let digest = Digest::parse(std::fs::read(reader.names().path(Part::Digest)).unwrap()).unwrap();
    let snapshots: Vec<_> = (0..digest.len())
        .map(|place| digest.snapshot(place).unwrap().entries)
        .collect();
    assert!(snapshots.len() > 10);
    assert_eq!(model["digest"].as_array().unwrap().len(), snapshots.len());
    for (mine, model) in snapshots.iter().zip(model["digest"].as_array().unwrap()) {
        assert_eq!(&serde_json::to_value(mine).unwrap(), model);
    }
}

#[test]
fn the_sidecar_has_what_the_others_cannot_hold() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    fill(&mut create(&base, SuffixStyle::Underscore, PERIOD));
    let reader = Reader::open(&base).unwrap();
    let sidecar = reader.sidecar().unwrap();
    assert_eq!(reader.warnings().unwrap(), Vec::<String>::new());
    assert_eq!(
        (sidecar.header.period_bytes, sidecar.header.facts.pid),
        (PERIOD, Some(42))
    );
    let frames = reader.frames(2).unwrap();
    let texts: Vec<_> = frames.iter().map(|f| (&*f.file, f.line, f.function.unwrap())).collect();
    let wanted = [
        ("app.py", 10, "main"),
        ("<frozen runpy>", 88, "_run_code"),
        ("dir;100/é.py", 100, "inner"),
        ("<string>", 1, "<module>"),
    ];
    assert_eq!(texts, wanted);
    assert_eq!(reader.frames(4).unwrap().len(), 1, "a trace that is empty in the .hpm");
    assert_eq!(sidecar.origins[&1].len(), 1);
    assert_eq!((sidecar.origins[&1][0].domain, sidecar.origins[&1][0].thread), (2, 2));
    assert_eq!((sidecar.memory.len(), sidecar.losses.0["samples_dropped"]), (8, 3));
    assert_eq!(
        sidecar.end.as_ref().unwrap().describe(),
        "the target exited with code 0"
    );

    // Blocks in pieces count as one object: as many are alive as were allocated and not freed.
    let (mut objects, mut pieces) = (0i64, 0);
    for event in reader.events().unwrap() {
        pieces += i64::from(event.continues);
        objects += if event.continues {
            0
        } else if event.is_free {
            -1
        } else {
            1
        };
    }
    assert!(pieces > 100);
    assert_eq!(reader.live_at(None).unwrap().total.sampled as i64, objects);

    // Without it, the same traces and about the same numbers.
    let with = reader.live_at(None).unwrap().total;
    std::fs::remove_file(reader.names().path(Part::Sidecar)).unwrap();
    let bare = Reader::open(&base).unwrap();
    assert!(bare.frames(1).unwrap().iter().all(|frame| frame.function.is_none()));
    assert!((bare.live_at(None).unwrap().total.bytes / with.bytes - 1.0).abs() < 0.0025);
}

#[test]
fn time_does_not_drift() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    let mut writer = create(&base, SuffixStyle::Underscore, 1);
    let steps = 200_000u64;
    for number in 1..=steps {
        writer.alloc(Duration::from_nanos(number * 700), 0, 1, AllocDetail::default());
        if number == 1000 {
            writer.alloc(Duration::ZERO, 0, 1, AllocDetail::default());
        }
    }
    writer.flush().unwrap();
    let reader = Reader::open(&base).unwrap();
    assert_eq!(reader.elapsed().unwrap(), Duration::from_nanos(steps * 700));
    assert!(reader.events().unwrap().all(|event| event.micros >= 0));
}

#[test]
fn files_are_private_fresh_and_exclusive() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    for part in Part::ALL {
        let path = dir.path().join(format!("run._{}", part.letters()));
        std::fs::write(&path, [0xEE; 5000]).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    }
    let mut writer = create(&base, SuffixStyle::Underscore, PERIOD);
    assert!(
        !writer.names().path(Part::Digest).exists(),
        "a digest of an older profile"
    );
    for part in [Part::Traces, Part::Events, Part::Sidecar] {
        assert_eq!(
            std::fs::metadata(writer.names().path(part)).unwrap().mode() & 0o777,
            0o600
        );
    }
    assert_eq!(Reader::open(&base).unwrap().scan().unwrap().events, 0);
    writer.alloc(Duration::ZERO, 0, 5, AllocDetail::default());
    writer.flush().unwrap();
    let second = ProfileWriter::create(&base, SuffixStyle::Underscore, start(), 1, &Facts::default());
    assert!(matches!(second, Err(WriteError::Busy { .. })));
    assert_eq!(
        Reader::open(&base).unwrap().scan().unwrap().events,
        1,
        "the first recording is unharmed"
    );
    drop(writer);
    create(&base, SuffixStyle::Underscore, 1);

    let missing = ProfileWriter::create(
        &dir.path().join("no/run"),
        SuffixStyle::Plain,
        start(),
        1,
        &Facts::default(),
    );
    let error = missing.unwrap_err();
    assert!(error.to_string().ends_with("no/run.hpm"), "{error}");
    assert!(std::error::Error::source(&error).is_some());
}

/// Runs in a child whose files may grow to 64 KiB (see below), as on a disk that is full then.
fn fill_until_full(base: &Path) {
    let mut writer = create(base, SuffixStyle::Plain, 1);
    let trace = writer.add_trace(&[frame("a.py", 1, "f")]).unwrap();
    let mut added = 0u64;
    let error = loop {
        for _ in 0..777 {
            writer.alloc(
                Duration::from_micros(added),
                trace,
                1000 + added,
                AllocDetail::default(),
            );
            added += 1;
        }
        match writer.flush() {
            Ok(()) => assert!(added < 100_000, "the limit has no effect"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().ends_with("run.hpd"), "{error}");
    assert!(std::error::Error::source(&error).is_some());
    let len = std::fs::metadata(base.with_extension("hpd")).unwrap().len();
    assert!(
        (65_536 - 40..=65_536).contains(&len),
        "as many whole records as fit: {len}"
    );
    // Strict: any partial record fails there.
    let events = model(base, 1000)["events"].as_array().unwrap().len() as u64;
    assert!(events < added);
    let reader = Reader::open(base).unwrap();
    assert_eq!(
        (reader.scan().unwrap().events, reader.scan().unwrap().is_cut),
        (events, false)
    );
    // What did not fit is still there, and goes in once there is room.
    assert!(writer.flush().is_err() && writer.buffered_bytes() > 0);
    std::fs::write(base.with_extension("state"), format!("{events} {added}")).unwrap();
}

#[test]
fn a_full_disk_leaves_whole_records() {
    if let Some(base) = std::env::var_os("PYHEAP_TEST_FULL_DISK") {
        return fill_until_full(&PathBuf::from(base));
    }
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    // An ignored signal stays ignored over exec, so that the limit shows as an error of `write`. 128 blocks of 512.
    let output = Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f $2 && exec \"$0\" --exact \"$1\" --nocapture",
        ])
        .arg(std::env::current_exe().unwrap())
        .args([
            "profile_writer::a_full_disk_leaves_whole_records",
            if sh_counts_kibibytes() { "64" } else { "128" },
        ])
        .env("PYHEAP_TEST_FULL_DISK", &base)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}{text}",
        String::from_utf8_lossy(&output.stdout)
    );
    assert!(base.with_extension("state").exists(), "the child did its work");
}

/// `ulimit -f` is in blocks of 512 bytes, except in bash.
fn sh_counts_kibibytes() -> bool {
    let output = Command::new("sh").args(["-c", "echo $BASH_VERSION"]).output().unwrap();
    output.stdout.len() > 1
        && !Command::new("sh")
            .args(["-c", "set -o | grep -q 'posix *on'"])
            .status()
            .unwrap()
            .success()
}

/// A reader that is open while the recording goes on sees one consistent state.
#[test]
fn a_growing_profile_is_read_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    let mut writer = create(&base, SuffixStyle::Underscore, 1);
    let mut readers = Vec::new();
    for number in 1..=20 {
        let trace = writer.add_trace(&[frame("a.py", number, "f")]).unwrap();
        writer.alloc(
            Duration::from_secs(u64::from(number)),
            trace,
            100,
            AllocDetail::default(),
        );
        writer.flush().unwrap();
        readers.push(Reader::open(&base).unwrap());
    }
    for (reader, number) in readers.iter().zip(1..) {
        let scan = reader.scan().unwrap();
        assert_eq!(
            (scan.events, reader.trace_count(), scan.unknown_traces),
            (number, number as u32, 0)
        );
        assert_eq!((reader.elapsed().unwrap().as_secs(), scan.is_cut), (number, false));
        assert_eq!(reader.live_at(None).unwrap().total.bytes, 100.0 * number as f64);
        assert!(reader.sidecar().unwrap().end.is_none());
    }
}
