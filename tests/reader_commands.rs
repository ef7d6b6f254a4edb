//! Promise: `diff`, `plot`, `flow`, `compare`, windows, filters and moments on the command line say what is true, in forms
//! that people, scripts and graphviz read.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use pyheap::profile::facts::{EndReason, Facts};
use pyheap::profile::names::SuffixStyle;
use pyheap::profile::writer::{AllocDetail, Frame, ProfileWriter};
use serde_json::Value;

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
    serde_json::from_str(&text(&[args, &["--json"]].concat())).unwrap()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/heapprof")
        .join(name)
}

/// 100 s: 64 KiB a second from the main thread, and 1 MiB from 20 s to 40 s from a worker.
fn record(base: &Path) {
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let mut writer = ProfileWriter::create(base, SuffixStyle::Underscore, start, 1, &Facts::default()).unwrap();
    let frame = |file, line, function| Frame { file, line, function };
    let leak = writer
        .add_trace(&[frame("/srv/leak.py", 7, "grow"), frame("/srv/app.py", 3, "main")])
        .unwrap();
    let burst = writer
        .add_trace(&[frame("/srv/lib/burst.py", 8, "burst"), frame("/srv/app.py", 3, "main")])
        .unwrap();
    writer.thread(11, "MainThread");
    writer.thread(12, "worker-1");
    let detail = |thread| AllocDetail { domain: 2, thread };
    for second in 1..=100 {
        let at = Duration::from_secs(second);
        writer.alloc(at, leak, 65_536, detail(11));
        match second {
            20 => writer.alloc(at, burst, 1 << 20, detail(12)),
            40 => writer.free(at, burst, 1 << 20),
            _ => {}
        }
    }
    writer.end(Duration::from_secs(100), &EndReason::Stopped);
    writer.flush().unwrap();
}

#[test]
fn diff_tells_what_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base);
    let base = base.to_str().unwrap();
    let at = |time: &str| format!("{base}@{time}");
    let answer = json(&["diff", &at("30s"), &at("50s")]);
    assert_eq!(answer["live_bytes_diff"], 20.0 * 65_536.0 - 1_048_576.0);
    let rows = answer["rows"].as_array().unwrap();
    assert_eq!(
        (rows.len(), &rows[0]["site"]["function"], &rows[0]["size_diff"]),
        (2, &"grow".into(), &1_310_720.0.into())
    );
    assert_eq!(
        (&rows[1]["size_diff"], &rows[1]["count_diff"]),
        (&(-1_048_576.0).into(), &(-1.0).into())
    );
    // Backwards, with an absolute moment, cumulative.
    let back = json(&[
        "diff",
        &at("-50s"),
        &at("@1600000030"),
        "--cumulative",
        "--by",
        "filename",
    ]);
    assert_eq!(
        (&back["rows"][0]["site"]["file"], &back["rows"][0]["size_diff"]),
        (&"/srv/leak.py".into(), &(-1_310_720.0).into())
    );
    let whole = text(&["diff", &at("2020-09-13T12:27:10Z"), base]);
    assert!(
        whole.starts_with("+3.4 MiB ± 0 B from 2.9 MiB at 30s to 6.2 MiB at 1m40s\n"),
        "{whole}"
    );
    assert!(whole.contains("/srv/leak.py:7 grow"));
    let other = dir.path().join("other");
    record(&other);
    let other = other.to_str().unwrap();
    assert_eq!(
        text(&["diff", base, other]),
        "+0 B ± 0 B from 6.2 MiB at 1m40s to 6.2 MiB at 1m40s\n".replace("+0", "0")
    );
    let same = pyheap(&["diff", base, base]);
    assert_eq!(same.status.code(), Some(2));
}

#[test]
fn top_filters_by_file_function_thread_and_time() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base);
    let base = base.to_str().unwrap();
    let bytes = |args: &[&str]| {
        json(&[&["top", base, "--at", "30s"][..], args].concat())["live_bytes"]
            .as_f64()
            .unwrap()
    };
    let (leak, burst) = (30.0 * 65_536.0, 1_048_576.0);
    assert_eq!(bytes(&[]), leak + burst);
    assert_eq!(bytes(&["--file", "leak.py"]), leak);
    assert_eq!(bytes(&["--file", "!*/lib/*"]), leak);
    assert_eq!(bytes(&["--file", "app.py"]), 0.0);
    assert_eq!(bytes(&["--file", "app.py", "--all-frames"]), leak + burst);
    assert_eq!(bytes(&["--function", "bur*"]), burst);
    assert_eq!(bytes(&["--thread", "worker-*"]), burst);
    assert_eq!(bytes(&["--thread", "11"]), leak);
    assert_eq!(bytes(&["--since", "15s"]), 15.0 * 65_536.0 + burst);
    assert_eq!(bytes(&["--since", "5s", "--until", "10s"]), 5.0 * 65_536.0);
    for by in ["traceback", "filename", "lineno", "function"] {
        assert!(text(&["top", base, "--by", by]).contains("/srv/leak.py"));
    }
    // A recording that is over is shown once.
    assert_eq!(text(&["top", base, "--follow"]), text(&["top", base]));
    assert_eq!(pyheap(&["top", base, "--at", "noon"]).status.code(), Some(2));
    // `info` means the same by the same words.
    for filter in [&[][..], &["--file", "burst.py"], &["--thread", "12"]] {
        let info = json(&[&["info", base, "--at", "30s"][..], filter].concat());
        let top = json(&[&["top", base, "--at", "30s"][..], filter].concat());
        assert_eq!(info["estimated_live_bytes"], top["live_bytes"], "{filter:?}");
        assert_eq!(info["live_at_seconds"], 30.0);
    }
    assert_eq!(pyheap(&["top", base, "--file", "["]).status.code(), Some(2));
    let flame = text(&["flame", base, "--at", "30s", "--function", "burst"]);
    assert_eq!(flame, "main (/srv/app.py:3);burst (/srv/lib/burst.py:8) 1048576\n");
}

#[test]
fn plots_as_tables_and_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base);
    let base = base.to_str().unwrap();
    let table = text(&[
        "plot",
        base,
        "--interval",
        "20s",
        "--line",
        "b=/srv/lib/burst.py:8",
        "--top",
        "1",
    ]);
    let lines: Vec<_> = table.lines().collect();
    assert_eq!(lines[0], "seconds,total_bytes,b,/srv/leak.py:7");
    assert_eq!(
        lines[1],
        format!("20,{},1048576,{}", 20 * 65_536 + 1_048_576, 20 * 65_536)
    );
    assert_eq!((lines.len(), lines[5]), (6, "100,6553600,0,6553600"));
    let data = json(&["plot", base, "--interval", "50s"]);
    assert_eq!(data["seconds"], serde_json::json!([50.0, 100.0]));
    assert_eq!(data["allocated_bytes_per_second"][1], 65_536.0);
    for (name, begin) in [("p.svg", &b"<svg "[..]), ("p.png", b"\x89PNG")] {
        let path = dir.path().join(name);
        text(&["plot", base, "--top", "2", "-o", path.to_str().unwrap()]);
        assert!(std::fs::read(&path).unwrap().starts_with(begin));
    }
    let svg = std::fs::read_to_string(dir.path().join("p.svg")).unwrap();
    assert_eq!(svg.matches("<polyline").count() > 5, svg.contains("part of all, %"));
    assert_eq!(pyheap(&["plot", base, "--line", "nowhere"]).status.code(), Some(2));
    assert_eq!(
        pyheap(&["plot", base, "--compat"]).status.code(),
        Some(1),
        "there is no digest"
    );
    // As the original says it, from its own digest.
    let name = golden("unicode_paths");
    let name = name.to_str().unwrap();
    let compat = text(&["plot", name, "--compat"]);
    assert!(
        compat.starts_with("seconds,total_bytes\n0,12432\n0.10000000149011612,"),
        "{compat}"
    );
}

#[test]
fn flow_graphs_as_text_and_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base);
    let base = base.to_str().unwrap();
    let one = text(&["flow", base, "--at", "30s"]);
    assert!(one.starts_with("digraph {\n") && one.contains("/srv/lib/burst.py:8 burst") && one.ends_with("}\n"));
    let graph = json(&["flow", base, "--at", "30s"]);
    assert_eq!(
        (
            graph["nodes"].as_array().unwrap().len(),
            graph["edges"].as_array().unwrap().len()
        ),
        (3, 2)
    );
    assert!(!text(&["flow", base, "--file", "leak.py"]).contains("burst.py"));
    let many = text(&["compare", base, "10s", "30s", "end-10s"]);
    assert!(many.contains("colspan=\"3\"") && many.contains("0.0B / 0.0B =  0%"));
    assert_eq!(json(&["compare", base, "10s", "30s"]).as_array().unwrap().len(), 2);
    assert_eq!(pyheap(&["flow", base, "--min-node", "2"]).status.code(), Some(2));
    // The original's picture, from the original's digest.
    let name = golden("json_parse");
    let compat = text(&["flow", name.to_str().unwrap(), "--compat", "--at", "1s"]);
    assert!(compat.contains("fontsize=") && !compat.contains("Program Root</td>"));

    let svg = dir.path().join("flow.svg");
    let output = pyheap(&["flow", base, "-o", svg.to_str().unwrap()]);
    let installed = Command::new("dot").arg("-V").stderr(Stdio::null()).status().is_ok();
    if installed {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let drawn = std::fs::read_to_string(&svg).unwrap();
        assert!(drawn.contains("<svg ") && drawn.contains("/srv/leak.py:7 grow"));
    } else {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            said.contains("install graphviz") && output.status.code() == Some(1),
            "{said}"
        );
    }
}

#[test]
fn digests_for_scripts_and_closed_pipes() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base);
    let base = base.to_str().unwrap();
    let answer = json(&["digest", base, "--interval", "10s"]);
    assert_eq!(
        (&answer["snapshots"], &answer["interval_seconds"]),
        (&10.into(), &10.0.into())
    );
    for args in [
        &["flow", base][..],
        &["compare", base, "end"],
        &["plot", base],
        &["events", base],
        &["flame", base, "--json"],
        &["diff", base, &format!("{base}@30s")],
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_pyheap"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn plots_and_logs_of_some_traces_up_to_a_moment() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("run");
    record(&base);
    let base = base.to_str().unwrap();
    let plot = |more: &[&str]| json(&[&["plot", base, "--interval", "10s"], more].concat());
    let numbers =
        |value: &Value| -> Vec<u64> { value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect() };
    const MIB: u64 = 1 << 20;
    for filter in [
        ["--file", "burst.py"],
        ["--function", "burst"],
        ["--thread", "worker-1"],
    ] {
        let answer = plot(&[&filter[..], &["--at", "45s"]].concat());
        assert_eq!(numbers(&answer["total_bytes"]), [0, MIB, MIB, 0, 0], "{filter:?}");
        assert_eq!(answer["seconds"].as_array().unwrap().last(), Some(&45.0.into()));
    }
    let leak = plot(&["--file", "!burst.py", "--at", "30s", "--top", "1"]);
    assert_eq!(numbers(&leak["total_bytes"]), [655_360, 2 * 655_360, 3 * 655_360]);
    assert_eq!(
        leak["lines"].as_object().unwrap().keys().collect::<Vec<_>>(),
        ["/srv/leak.py:7"]
    );
    // Up to the moment, and not beyond: what was largest then, though it is gone at the end.
    let largest = plot(&["--at", "20s", "--top", "1", "--thread", "12"]);
    assert_eq!(numbers(&largest["lines"]["/srv/lib/burst.py:8"]), [0, MIB]);
    assert_eq!(
        pyheap(&["plot", base, "--compat", "--file", "x"]).status.code(),
        Some(2)
    );

    let log = |more: &[&str]| text(&[&["events", base, "--json"], more].concat()).lines().count();
    assert_eq!(
        (log(&[]), log(&["--file", "burst.py"]), log(&["--thread", "MainThread"])),
        (102, 2, 100)
    );
    assert_eq!(
        (log(&["--function", "burst", "--at", "30s"]), log(&["--file", "!*"])),
        (1, 0)
    );
    let speedscope = json(&["flame", base, "--thread", "worker-1", "--at", "30s"]);
    assert_eq!(
        speedscope["$schema"],
        "https://www.speedscope.app/file-format-schema.json"
    );
}

/// 60 s: 64 KiB a second of Python's objects, 128 KiB of malloc, and one mapping of 8 MiB.
fn record_domains(base: &Path, domains: &[&str]) {
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let facts = Facts {
        domains: domains.iter().map(|name| (*name).to_owned()).collect(),
        ..Facts::default()
    };
    let mut writer = ProfileWriter::create(base, SuffixStyle::Underscore, start, 1, &facts).unwrap();
    let frame = |file, line, function| Frame { file, line, function };
    let main = frame("/srv/app.py", 3, "main");
    let object = writer.add_trace(&[frame("/srv/object.py", 7, "keep"), main]).unwrap();
    let tree = [
        frame("libxylem.so", 0, "grow"),
        frame("/srv/xylem.py", 8, "parse"),
        main,
    ];
    let tree = writer.add_trace(&tree).unwrap();
    let mapping = writer.add_trace(&[frame("/srv/arena.py", 9, "map"), main]).unwrap();
    writer.thread(11, "MainThread");
    let detail = |domain| AllocDetail { domain, thread: 11 };
    for second in 1..=60 {
        let at = Duration::from_secs(second);
        writer.alloc(at, object, 65_536, detail(2));
        writer.alloc(at, tree, 131_072, detail(3));
        if second == 10 {
            writer.alloc(at, mapping, 8 << 20, detail(4));
        }
    }
    writer.end(Duration::from_secs(60), &EndReason::Stopped);
    writer.flush().unwrap();
}

#[test]
fn every_report_shows_what_some_domains_hold() {
    let dir = tempfile::tempdir().unwrap();
    let base = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (run, other) = (base("run"), base("other"));
    let native = ["raw", "mem", "obj", "malloc", "mmap"];
    record_domains(Path::new(&run), &native);
    record_domains(Path::new(&other), &native);
    let early = format!("{run}@5s");
    // Every report that has lines, and what they are of the three domains.
    let reports: [&[&str]; 16] = [
        &["top", &run],
        &["top", &run, "--since", "1s"],
        &["top", &run, &other],
        &["leaks", &run, "--verbose"],
        &["leaks", &run, "--json"],
        &["leaks", &run, &other, "--json"],
        &["diff", &early, &run],
        &["diff", &early, &other],
        &["flow", &run, "--json"],
        &["compare", &run, "20s", "50s"],
        &["flame", &run],
        &["flame", &run, "--json"],
        &["export", &run, "--to", "csv"],
        &["export", &run, "--to", "json"],
        &["events", &run],
        &["html", &run],
    ];
    for report in reports {
        for (domains, files) in [
            ("obj", &["object.py"][..]),
            ("malloc", &["xylem"]),
            ("mmap", &["arena.py"]),
            ("malloc,mmap", &["xylem", "arena.py"]),
        ] {
            let text = text(&[report, &["--domain", domains]].concat());
            for file in ["object.py", "xylem", "arena.py"] {
                assert_eq!(
                    text.contains(file),
                    files.contains(&file),
                    "{report:?} --domain {domains}: {file} in\n{text}"
                );
            }
        }
    }
    const MIB: f64 = 1_048_576.0;
    for (domains, held) in [
        ("obj", 3.75),
        ("malloc", 7.5),
        ("mmap", 8.0),
        ("obj,mmap", 11.75),
        ("raw", 0.0),
    ] {
        let with = |args: &[&str]| json(&[args, &["--domain", domains]].concat());
        assert_eq!(with(&["top", &run])["live_bytes"], held * MIB, "{domains}");
        assert_eq!(with(&["info", &run])["estimated_live_bytes"], held * MIB, "{domains}");
        assert_eq!(with(&["leaks", &run])["live_bytes"], held * MIB, "{domains}");
        let plot = with(&["plot", &run, "--interval", "30s"]);
        assert_eq!(
            plot["total_bytes"].as_array().unwrap().last().unwrap(),
            held * MIB,
            "{domains}"
        );
    }
    let pprof = |domain: &[&str]| pyheap(&[&["export", &run, "--to", "pprof", "-o", "-"], domain].concat()).stdout;
    assert!(pprof(&["--domain", "mmap"]).len() < pprof(&[]).len());
    // A verdict on a part says so.
    let quiet = text(&["leaks", &run, "--quiet", "--domain", "mmap"]);
    assert!(
        quiet.starts_with("no leak: ") && quiet.ends_with(", in mmap\n"),
        "{quiet}"
    );
    assert!(text(&["html", &run, "--domain", "mmap"]).contains("allocator domains hold is on this page: mmap"));
    assert!(!text(&["html", &run]).contains("is on this page: "));
}

#[test]
fn domains_that_are_not_known_are_no_empty_report() {
    let dir = tempfile::tempdir().unwrap();
    let base = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (run, bare) = (base("run"), base("bare"));
    record_domains(Path::new(&run), &["raw", "mem", "obj"]);
    for part in ["hpm", "hpd"] {
        std::fs::copy(format!("{run}._{part}"), format!("{bare}._{part}")).unwrap();
    }
    let refused = |args: &[&str], domain: &str, why: &str| {
        let output = pyheap(&[args, &["--domain", domain]].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), said.lines().count()),
            (Some(2), 1),
            "{args:?}: {said}"
        );
        assert!(said.contains(why) && output.stdout.is_empty(), "{args:?}: {said}");
    };
    let commands: [&[&str]; 11] = [
        &["top"],
        &["leaks"],
        &["info"],
        &["plot"],
        &["flow"],
        &["compare"],
        &["flame"],
        &["export", "--to", "csv"],
        &["events"],
        &["html"],
        &["diff", &run],
    ];
    for command in commands {
        let with = |base| {
            let more = match command[0] {
                "compare" => &["10s"][..],
                _ => &[],
            };
            [command, &[base], more].concat()
        };
        refused(&with(&bare), "obj", "has no ._hpx file, so its domains are not known");
        let run = match command[0] {
            "diff" => format!("{run}@5s"),
            _ => run.clone(),
        };
        refused(
            &with(&run),
            "malloc,mmap",
            "was recorded without malloc, mmap: it has raw, mem, obj; record with --native",
        );
    }
    assert_eq!(pyheap(&["top", &run, "--domain", "heap"]).status.code(), Some(2));
    assert_eq!(
        pyheap(&["flow", &run, "--compat", "--domain", "obj"]).status.code(),
        Some(2)
    );
    assert_eq!(
        pyheap(&["plot", &run, "--compat", "--domain", "obj"]).status.code(),
        Some(2)
    );
}

#[test]
fn where_needs_a_recording() {
    assert_eq!(pyheap(&["where", "999999999", "0x1000"]).status.code(), Some(3));
    let own = std::process::id().to_string();
    let output = pyheap(&["where", &own, "0x1000"]);
    assert_eq!(output.status.code(), Some(7));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not being recorded"));
    assert_eq!(pyheap(&["where", &own, "zero"]).status.code(), Some(2));
}
