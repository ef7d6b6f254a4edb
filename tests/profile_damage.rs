//! Promise: whatever is in a file, the reader does not panic, uses everything before the damage, and says what it
//! skipped. The bytes are made here, by an encoder that shares nothing with the writer.

use std::path::Path;
use std::time::Duration;

use pyheap::profile::digest::{DigestError, DigestMode, make_digest};
use pyheap::profile::hpc::Digest;
use pyheap::profile::hpm::HeaderError;
use pyheap::profile::reader::{ReadError, Reader};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let value = |digit: u8| (digit as char).to_digit(16).unwrap() as u8;
    digits
        .chunks(2)
        .map(|pair| value(pair[0]) * 16 + value(pair[1]))
        .collect()
}

fn varint(value: u128) -> Vec<u8> {
    let groups = (1..=10).find(|groups| value >> (7 * groups) == 0).unwrap();
    (0..groups)
        .map(|i| ((value >> (7 * i)) & 0x7F) as u8 | if i + 1 < groups { 0x80 } else { 0 })
        .collect()
}

fn event(head: u32, secs: u128, micros: u128, size: u128) -> Vec<u8> {
    [head.to_be_bytes().to_vec(), varint(secs), varint(micros), varint(size)].concat()
}

fn header() -> Vec<u8> {
    hex("00000001 000000005f5e1000 000000000ee6b280 00")
}

/// The worked example of docs/format.md.
fn example() -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let hpm = hex("00000001 000000005f5e1000 000000000ee6b280 02
        0000000000000080 00068db8  0000000000002000 19999999
        04 077574696c2e7079  0b 066170702e7079  00
        c901 0664c3a92e7079  0d 066170702e7079  00");
    let hpd = hex("00000001 00 80b518 64  00000002 00 a0f736 8827  40000001 01 c09a0c 64  00000002 00 a08d06 904e");
    let hpc = hex("00000001 000000005f5e1000 000000000ee6b280 e807 0000000000000034
        5379a0bd 02 01 c1843d 02 f1fd39  5379a0bd 01 02 d08603  ab935776 02 1e 0d");
    (hpm, hpd, hpc)
}

fn with<T>(hpm: &[u8], hpd: &[u8], check: impl FnOnce(&Path) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("run.hpm"), hpm).unwrap();
    std::fs::write(dir.path().join("run.hpd"), hpd).unwrap();
    check(&dir.path().join("run"))
}

fn open<T>(hpm: &[u8], hpd: &[u8], check: impl FnOnce(&Reader) -> T) -> T {
    with(hpm, hpd, |base| check(&Reader::open(base).unwrap()))
}

#[test]
fn the_worked_example_is_read_as_documented() {
    let (hpm, hpd, hpc) = example();
    open(&hpm, &hpd, |reader| {
        assert_eq!(reader.initial_time(), 1_600_000_000.25);
        assert_eq!(reader.raw_trace(1).unwrap(), [("app.py", 10), ("util.py", 3)]);
        assert_eq!(reader.raw_trace(2).unwrap(), [("app.py", 12), ("dé.py", 200)]);
        assert_eq!((reader.raw_trace(0), reader.raw_trace(3)), (None, None));
        let events: Vec<_> = reader
            .events()
            .unwrap()
            .map(|e| (e.micros, e.trace, e.signed_size()))
            .collect();
        assert_eq!(
            events,
            [
                (400_000, 1, 100),
                (1_300_000, 2, 5000),
                (2_500_000, 1, -100),
                (2_600_000, 2, 10_000)
            ]
        );
        assert_eq!(reader.elapsed().unwrap(), Duration::from_millis(2600));

        let live = reader.live_at(Some(Duration::from_secs(2))).unwrap();
        let bytes: Vec<_> = live
            .traces
            .iter()
            .map(|(index, live)| (*index, live.bytes.round()))
            .collect();
        assert_eq!(
            bytes,
            [(1, 1_000_002.0), (2, 50_000.0)],
            "f64, and trace 1 is alive at 2 s"
        );

        make_digest(reader, Duration::from_secs(1), 0.0, DigestMode::Compatible).unwrap();
        assert_eq!(
            std::fs::read(reader.names().path(pyheap::profile::names::Part::Digest)).unwrap(),
            hpc
        );
        let summary = make_digest(reader, Duration::from_secs(1), 0.0, DigestMode::Exact).unwrap();
        let exact = Digest::parse(std::fs::read(&summary.path).unwrap()).unwrap();
        let snapshots: Vec<_> = (0..summary.snapshots)
            .map(|place| exact.snapshot(place).unwrap().entries)
            .collect();
        assert_eq!(
            snapshots,
            [
                vec![(1, 1_000_002)],
                vec![(1, 1_000_002), (2, 50_000)],
                vec![(2, 60_000)]
            ]
        );
    });
}

#[test]
fn files_cut_at_any_byte_give_what_is_before_the_cut() {
    let (hpm, hpd, _) = example();
    let ends = [0, 9, 19, 28, 38];
    for cut in 0..=hpd.len() {
        open(&hpm, &hpd[..cut], |reader| {
            let whole = ends.iter().filter(|end| **end <= cut).count() - 1;
            let scan = reader.scan().unwrap();
            assert_eq!(
                (scan.events, scan.is_cut),
                (whole as u64, !ends.contains(&cut)),
                "cut at {cut}"
            );
            assert_eq!(
                reader.warnings().unwrap(),
                Vec::<String>::new(),
                "a cut record is normal"
            );
        });
    }
    let (table_end, first_end) = (45, 63);
    for cut in 0..=hpm.len() {
        with(&hpm[..cut], &hpd, |base| match Reader::open(base) {
            Err(ReadError::Header { source, .. }) => {
                assert!(cut < table_end && source == HeaderError::Cut, "cut at {cut}")
            }
            Err(other) => panic!("{other}"),
            Ok(reader) => {
                let traces = u32::from(cut >= first_end) + u32::from(cut == hpm.len());
                assert!(cut >= table_end && reader.trace_count() == traces, "cut at {cut}");
                // Nothing of a trace is lost from the sums, only its name.
                assert_eq!(reader.live_at(None).unwrap().total.bytes.round(), 60_000.0);
                let unknown = [4, 2, 0][traces as usize];
                assert_eq!(reader.scan().unwrap().unknown_traces, unknown);
                assert_eq!(reader.warnings().unwrap().len(), usize::from(unknown > 0));
            }
        });
    }
}

#[test]
fn corners_of_events() {
    let events = [
        event(1, 0, 300_000, 7000),
        event(0x8000_0003, 0, 300_000, 7000),
        event(0, 0, 0, 0),
        event(0x3FFF_FFFF, 0, 0, (1 << 31) + 0x7F),
        event(1, 1, 999_999, u128::from(u64::MAX)),
        event(0x4000_0001, 0, 0, u128::from(u64::MAX)),
    ];
    open(&header(), &events.concat(), |reader| {
        let events: Vec<_> = reader
            .events()
            .unwrap()
            .map(|e| (e.micros, e.clock.as_micros(), e.trace, e.signed_size()))
            .collect();
        let huge = i128::from(u64::MAX);
        let big = (1 << 31) + 0x7F;
        assert_eq!(
            events[..3],
            [(300_000, 300_000, 1, 7000), (0, 300_000, 3, 7000), (0, 300_000, 0, 0)]
        );
        assert_eq!(
            events[3..5],
            [(0, 300_000, 0x3FFF_FFFF, big), (1_999_999, 2_299_999, 1, huge)]
        );
        assert_eq!(events[5], (1_999_999, 2_299_999, 1, -huge));
        let live = reader.live_at(None).unwrap();
        assert_eq!(
            live.traces.iter().map(|(index, _)| *index).collect::<Vec<_>>(),
            [0, 1, 3, 0x3FFF_FFFF]
        );
        for mode in [DigestMode::Exact, DigestMode::Compatible] {
            make_digest(reader, Duration::from_secs(1), 0.01, mode).unwrap();
        }
    });
    // As documented, and as the original would have written the same step.
    let bytes = hex("80000003 00 e0a712 d836  80000003 01 e0dc2a d836");
    open(&header(), &bytes, |reader| {
        assert_eq!(
            reader.events().unwrap().map(|e| e.micros).collect::<Vec<_>>(),
            [-300_000, -2_000_000]
        );
    });
}

#[test]
fn damage_is_said_and_what_is_before_it_is_used() {
    let (hpm, hpd, _) = example();
    let overlong = [vec![0, 0, 0, 1], vec![0xFF; 40]].concat();
    open(&hpm, &[&hpd[..], &overlong].concat(), |reader| {
        assert_eq!(reader.scan().unwrap().events, 4);
        assert_eq!(
            reader.warnings().unwrap(),
            ["events are damaged from byte 38 on; all after it is skipped"]
        );
    });
    open(&[&hpm[..], &[0xFF; 40]].concat(), &hpd, |reader| {
        assert_eq!(reader.trace_count(), 2);
        assert!(
            reader.warnings().unwrap()[0].starts_with("stack traces are damaged from byte 81 on: 40 bytes skipped")
        );
    });
    let mut bad_name = hpm.clone();
    bad_name[47] = 0xFF;
    open(&bad_name, &hpd, |reader| {
        assert_eq!(reader.raw_trace(1).unwrap()[1], ("\u{FFFD}til.py", 3));
        assert_eq!(
            reader.raw_trace(2).unwrap()[1],
            ("dé.py", 200),
            "later traces are not lost"
        );
        assert!(reader.warnings().unwrap()[0].starts_with("1 file names are not UTF-8"));
    });
    let orphan = [event(0x4000_0001, 0, 1, 100), event(1, 0, 1, 20_000)].concat();
    open(&hpm, &orphan, |reader| {
        let live = reader.live_at(None).unwrap();
        assert_eq!((live.total.bytes, live.unmatched_frees), (20_000.0, 1));
    });
    with(&[0, 0, 0, 2, 0], &hpd, |base| {
        let error = Reader::open(base).unwrap_err();
        assert!(matches!(
            error,
            ReadError::Header {
                source: HeaderError::Version(2),
                ..
            }
        ));
    });
    assert!(matches!(
        Reader::open(Path::new("/nonexistent/run")),
        Err(ReadError::NotFound(_))
    ));
}

/// Times that are damaged must not fill the disk with snapshots.
#[test]
fn absurd_times_are_refused_and_keep_the_old_digest() {
    let bytes = [
        event(1, 0, 0, 10),
        event(1, 1 << 63, 0, 10),
        event(1, u128::from(u64::MAX), 0, 10),
    ]
    .concat();
    open(&header(), &bytes, |reader| {
        let path = reader.names().path(pyheap::profile::names::Part::Digest);
        std::fs::write(&path, b"old").unwrap();
        for mode in [DigestMode::Exact, DigestMode::Compatible] {
            let error = make_digest(reader, Duration::from_secs(60), 0.0, mode).unwrap_err();
            assert!(matches!(error, DigestError::TooManySnapshots(_)), "{error}");
        }
        assert!(matches!(
            make_digest(reader, Duration::from_micros(999), 0.0, DigestMode::Exact),
            Err(DigestError::Interval)
        ));
        for precision in [1.0, -0.1, f64::NAN] {
            let error = make_digest(reader, Duration::from_secs(1), precision, DigestMode::Exact).unwrap_err();
            assert!(matches!(error, DigestError::Precision(_)));
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 3);
        assert!(reader.live_at(None).unwrap().total.bytes > 0.0);
    });
}

#[test]
fn digests_without_an_index_are_walked() {
    let (_, _, hpc) = example();
    let whole = Digest::parse(hpc.clone()).unwrap();
    let snapshots = |digest: &Digest| {
        (0..digest.len())
            .filter_map(|place| digest.snapshot(place))
            .collect::<Vec<_>>()
    };
    assert!(!whole.is_rebuilt && whole.len() == 2);
    assert_eq!(snapshots(&whole)[0].total(), 1_050_001);
    let mut unfinished = hpc.clone();
    unfinished[22..30].fill(0);
    for cut in 30..=52 {
        let digest = Digest::parse(unfinished[..cut].to_vec()).unwrap();
        assert!(digest.is_rebuilt);
        let expected = usize::from(cut >= 43) + usize::from(cut == 52);
        assert_eq!(snapshots(&digest), snapshots(&whole)[..expected], "cut at {cut}");
    }
    for cut in 0..30 {
        assert_eq!(Digest::parse(hpc[..cut].to_vec()).unwrap_err(), HeaderError::Cut);
    }
}

/// Every file with every byte changed: no panic, and no endless loop.
#[test]
fn any_changed_byte_is_survived() {
    let (hpm, hpd, hpc) = example();
    for (place, value) in
        (0..hpm.len().max(hpd.len()).max(hpc.len())).flat_map(|p| [0x00, 0x7F, 0x80, 0xFF].map(|v| (p, v)))
    {
        let changed = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            if let Some(byte) = bytes.get_mut(place) {
                *byte = value;
            }
            bytes
        };
        if let Ok(digest) = Digest::parse(changed(&hpc)) {
            for place in 0..digest.len() {
                digest.snapshot(place);
            }
        }
        with(&changed(&hpm), &changed(&hpd), |base| {
            let Ok(reader) = Reader::open(base) else { return };
            reader.warnings().unwrap();
            let live = reader.live_at(None).unwrap();
            assert!(live.traces.iter().all(|(_, live)| live.bytes >= 0.0));
            for index in 0..5 {
                reader.frames(index);
            }
            for mode in [DigestMode::Exact, DigestMode::Compatible] {
                let _ = make_digest(&reader, Duration::from_secs(100_000), 0.01, mode);
            }
        });
    }
}
