//! Promise: `info`, `digest`, `top` and `flame` answer for every profile, in text that a pipe and a script can use.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use pyheap::profile::facts::{EndReason, Facts, Losses, MemorySample};
use pyheap::profile::hpc::Digest;
use pyheap::profile::names::SuffixStyle;
use pyheap::profile::reader::Reader;
use pyheap::profile::writer::{AllocDetail, Frame, ProfileWriter};
use pyheap::report::flame::collapsed;
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/heapprof")
        .join(name)
}

fn pyheap(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pyheap")).args(args).output().unwrap()
}

fn text(args: &[&str]) -> String {
    let output = pyheap(args);
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(args)).unwrap()
}

/// A recording of 100 s: 64 KiB a second from a leak, and 1 MiB from 20 s to 40 s.
fn record(base: &Path, period: u64) {
    let facts = Facts {
        pid: Some(4242),
        cmdline: vec!["python3".into(), "app.py".into()],
        ..Facts::default()
    };
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let mut writer = ProfileWriter::create(base, SuffixStyle::Underscore, start, period, &facts).unwrap();
    let outer = Frame {
        file: "app.py",
        line: 3,
        function: "main",
    };
    let import = Frame {
        file: "<frozen importlib>",
        line: 9,
        function: "_load",
    };
    let leak = writer
        .add_trace(&[
            Frame {
                file: "leak.py",
                line: 7,
                function: "grow",
            },
            import,
            outer,
        ])
        .unwrap();
    let burst = writer
        .add_trace(&[
            Frame {
                file: "a;b\u{1b}.py",
                line: 8,
                function: "burst",
            },
            outer,
        ])
        .unwrap();
    for second in 1..=100 {
        let at = Duration::from_secs(second);
        writer.alloc(at, leak, 65_536, AllocDetail::default());
        match second {
            20 => writer.alloc(at, burst, 1 << 20, AllocDetail::default()),
            40 => writer.free(at, burst, 1 << 20),
            _ => {}
        }
        writer.memory(
            at,
            &MemorySample {
                rss: second << 20,
                ..MemorySample::default()
            },
        );
    }
    writer.losses(
        Duration::from_secs(100),
        &Losses([("samples_dropped".to_owned(), 2)].into()),
    );
    writer.end(Duration::from_secs(100), &EndReason::Stopped);
    writer.flush().unwrap();
}

#[test]
fn top_answers_first_and_at_any_moment() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base, 1);
    let base = base.to_str().unwrap();
    let whole = text(&["top", base]);
    let lines: Vec<_> = whole.lines().collect();
    assert_eq!(
        lines[0],
        "6.2 MiB ± 0 B live in 100 ± 0 objects at 1m40s, the end (100 samples, every allocation)"
    );
    assert_eq!(
        lines[2].split_whitespace().collect::<Vec<_>>(),
        ["6.2", "MiB", "±", "0", "B", "100.0%", "100", "leak.py:7", "grow"]
    );
    assert_eq!((lines.len(), lines[3]), (4, "lost while recording: 2 samples_dropped"));
    for at in ["30s", "-70s", "-1m10s"] {
        let then = json(&["top", base, "--at", at, "--json"]);
        assert_eq!(
            (&then["at_seconds"], &then["live_bytes"]),
            (&30.0.into(), &((1 << 20) as f64 + 30.0 * 65_536.0).into())
        );
        assert_eq!(then["rows"][0]["site"]["function"], "grow");
        assert_eq!(
            then["rows"][1]["site"],
            serde_json::json!({"file": "a;b\u{1b}.py", "line": 8, "function": "burst"})
        );
    }
    let rows = json(&[
        "top",
        base,
        "--at=30s",
        "--cumulative",
        "--by",
        "function",
        "--limit",
        "1",
        "--json",
    ]);
    assert_eq!(
        (&rows["rows"][0]["site"]["function"], &rows["omitted_rows"]),
        (&"main".into(), &3.into())
    );
    assert!(
        text(&["top", base, "--at", "30s"]).contains("a;b\\u{1b}.py:8 burst"),
        "no escape sequence reaches the terminal"
    );
    let traces = text(&["top", base, "--by", "trace"]);
    assert!(traces.contains("< <frozen importlib>:9 _load\n") && traces.contains("< app.py:3 main\n"));
    // Before anything happened there is nothing, and it is said.
    assert_eq!(
        text(&["top", base, "--at", "0"])
            .lines()
            .next()
            .unwrap()
            .split(" live")
            .next()
            .unwrap(),
        "0 B ± 0 B"
    );

    // Without the sidecar, functions are unknown, and that is said.
    std::fs::remove_file(format!("{base}._hpx")).unwrap();
    let output = pyheap(&["top", base, "--by", "function"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no function names"));
    assert!(String::from_utf8_lossy(&output.stdout).contains("leak.py:7\n"));
}

#[test]
fn sampled_totals_have_honest_margins() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base, 131_072);
    let top = json(&["top", base.to_str().unwrap(), "--json"]);
    let p = 1.0 - (-0.5f64).exp();
    let bytes = 100.0 * 65_536.0 / p;
    let margin = 1.96 * (100.0 * 65_536.0f64.powi(2) * (1.0 - p) / (p * p)).sqrt();
    assert!((top["live_bytes"].as_f64().unwrap() / bytes - 1.0).abs() < 1e-9);
    assert!((top["live_bytes_margin"].as_f64().unwrap() / margin - 1.0).abs() < 1e-9);
}

#[test]
fn flame_names_functions_and_is_safe_to_split() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base, 1);
    let base = base.to_str().unwrap();
    let expected = "main (app.py:3);_load (<frozen importlib>:9);grow (leak.py:7) 1966080\nmain (app.py:3);burst (a,b .py:8) 1048576\n";
    assert_eq!(text(&["flame", base, "--at", "30s"]), expected);
    let objects = text(&["flame", base, "--at", "30s", "--value", "objects"]);
    assert_eq!(
        objects
            .lines()
            .map(|line| line.rsplit(' ').next().unwrap())
            .collect::<Vec<_>>(),
        ["30", "1"]
    );
    let file = dir.path().join("out.txt");
    assert_eq!(text(&["flame", base, "--at", "30s", "-o", file.to_str().unwrap()]), "");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    let output = pyheap(&["flame", base, "-o", "/nonexistent/x"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: cannot write /nonexistent/x: No such file"));
}

/// Without a sidecar the text is that of the original, except in names that would break it.
#[test]
fn collapsed_stacks_are_those_of_the_original() {
    for name in ["json_parse", "deep_recursion", "threads_sqlite", "unicode_paths"] {
        let want: Value =
            serde_json::from_str(&std::fs::read_to_string(golden(name).with_extension("expected.json")).unwrap())
                .unwrap();
        let reader = Reader::open(&golden(name)).unwrap();
        let digest = Digest::parse(std::fs::read(golden(name).with_extension("hpc")).unwrap()).unwrap();
        let snapshot = digest.snapshot(want["midSnapshot"].as_u64().unwrap() as usize).unwrap();
        let mine = collapsed(
            snapshot
                .entries
                .iter()
                .map(|(index, bytes)| (reader.frames(*index), *bytes)),
        );
        let wanted = want["flameGraph"].as_str().unwrap();
        if name == "unicode_paths" {
            // There is a `;` in a name; the original leaves it in.
            assert_eq!(mine.replace([',', ';'], ""), wanted.replace([',', ';'], ""));
        } else {
            assert_eq!(mine, wanted, "{name}");
        }
    }
}

#[test]
fn info_tells_facts_losses_and_damage() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base, 131_072);
    let name = base.to_str().unwrap();
    let info = text(&["info", name]);
    for line in [
        "target     pid 4242",
        "command    python3 app.py",
        "start      2020-09-13 12:26:40 UTC",
        "sampling   one sample per 128 KiB",
        "events     101 allocations, 1 frees",
        "rss        1.0 MiB at first, 100.0 MiB at last",
        "lost       2 samples_dropped",
        "end        stopped by the user",
    ] {
        assert!(info.contains(line), "{line}\n{info}");
    }
    assert!(!info.contains("warning"));
    let data = json(&["info", name, "--json"]);
    assert_eq!(
        (&data["target"]["pid"], &data["end"]["reason"]),
        (&4242.into(), &"stopped".into())
    );
    assert_eq!(
        (&data["events"], &data["elapsed_seconds"], &data["is_cut"]),
        (&102.into(), &100.0.into(), &false.into())
    );

    let events = std::fs::read(base.with_extension("_hpd")).unwrap();
    std::fs::write(
        base.with_extension("_hpd"),
        [&events[..events.len() / 2], &[0xFF; 64]].concat(),
    )
    .unwrap();
    std::fs::write(base.with_extension("_hpx"), "no json\n").unwrap();
    let info = text(&["info", name]);
    assert!(info.contains("warning    events are damaged from byte "), "{info}");
    assert!(
        info.contains("_hpx is not used: its first line is not that of a pyheap sidecar"),
        "{info}"
    );
    // A sidecar of another recording is not believed.
    record(&dir.path().join("other"), 1);
    let other = std::fs::read_to_string(dir.path().join("other._hpx")).unwrap();
    std::fs::write(base.with_extension("_hpx"), other.replace("1600000000", "1600000001")).unwrap();
    assert!(text(&["info", name]).contains("it belongs to another recording"));
}

#[test]
fn digest_writes_what_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base, 1);
    let name = base.to_str().unwrap();
    let said = text(&["digest", name, "--interval", "10s", "--precision", "0"]);
    assert!(
        said.contains("run._hpc: 10 snapshots, one every 10s, of 102 events"),
        "{said}"
    );
    let digest = Digest::parse(std::fs::read(base.with_extension("_hpc")).unwrap()).unwrap();
    assert_eq!(digest.snapshot(2).unwrap().entries, [(1, 30 * 65_536), (2, 1 << 20)]);
    assert_eq!(digest.snapshot(9).unwrap().total(), 100 * 65_536);
    assert!(text(&["info", name]).contains("digest     10 snapshots"));
    text(&["digest", name, "--interval", "10s", "--compat"]);
    for bad in [["--interval", "0"], ["--precision", "1"], ["--interval", "500us"]] {
        let output = pyheap(&[&["digest", name][..], &bad].concat());
        assert!(
            !output.status.success() && output.stderr.starts_with(b"error: the "),
            "{bad:?}"
        );
    }
}

/// Whoever reads our output may stop at any time.
#[test]
fn a_closed_pipe_is_no_error() {
    let base = golden("deep_recursion");
    for args in [&["flame"][..], &["top", "--by", "trace"], &["info", "--json"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_pyheap"))
            .args(args)
            .arg(&base)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert!(
            child.wait().unwrap().success() && !errors.contains("error"),
            "{args:?}: {errors}"
        );
    }
}

#[test]
fn a_missing_profile_is_said_in_one_line() {
    let output = pyheap(&["info", "/nonexistent/run"]);
    assert_eq!(output.status.code(), Some(1));
    let wanted =
        "error: /nonexistent/run is no profile: there is neither /nonexistent/run._hpm nor /nonexistent/run.hpm\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), wanted);
}
