//! Promise: what leaves pyheap says what pyheap says, in forms that other tools read, and nothing in a name can harm
//! whoever looks at it.

use std::collections::BTreeMap;
use std::io::{Read, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use crate::common::{self, have, interpreters, scratch, tests_dir};
use pyheap::profile::facts::{EndReason, Facts, Losses};
use pyheap::profile::names::SuffixStyle;
use pyheap::profile::reader::Reader;
use pyheap::profile::writer::{AllocDetail, Frame, ProfileWriter};
use serde_json::Value;

/// What a terminal, browser, spreadsheet or parser might obey.
const EVIL: [&str; 6] = [
    "</script><script>alert(1)</script>",
    "\"quo'ted\" & <b>",
    "new\nline\r\t",
    "right\u{202E}to left\u{2066}",
    "\u{1b}[2J\u{9b}31m\u{7}",
    "=cmd|' /C calc'!A0;semi 12",
];

fn pyheap<S: AsRef<str>>(args: &[S]) -> Output {
    let args = args.iter().map(AsRef::as_ref);
    Command::new(common::pyheap::binary())
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the binary runs")
}

#[track_caller]
fn bytes(args: &[&str]) -> Vec<u8> {
    let output = pyheap(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    output.stdout
}

#[track_caller]
fn text(args: &[&str]) -> String {
    String::from_utf8(bytes(args)).expect("UTF-8")
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(args)).expect("JSON")
}

#[track_caller]
fn fails(args: &[&str], code: i32, why: &str) {
    let output = pyheap(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        (output.status.code(), output.stdout.len()),
        (Some(code), 0),
        "{args:?}: {errors}"
    );
    assert!(errors.starts_with("error: ") && errors.lines().count() == 1, "{errors}");
    assert!(errors.contains(why), "{errors}");
}

/// 30 s of allocations of many sizes from 60 stacks of 9 functions, sampled with a period of 128 KiB: every estimate is a
/// fraction, some of it is freed.
fn sampled(base: &Path) {
    let facts = Facts {
        pid: Some(4242),
        exe: Some("/usr/bin/python3.11".to_owned()),
        python: Some("3.11.7".to_owned()),
        cmdline: vec!["python3".to_owned(), "app.py".to_owned()],
        ..Facts::default()
    };
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let mut writer = ProfileWriter::create(base, SuffixStyle::Underscore, start, 131_072, &facts).expect("our folder");
    let functions = ["grow", "parse", "fill", "copy", "join", "read", "load", "keep", "drop"];
    for (place, function) in (0..60u32).map(|place| (place, functions[place as usize % functions.len()])) {
        let frame = |file, line, function| Frame { file, line, function };
        let stack = [
            frame("lib.py", place, function),
            frame("app.py", place % 7, "handle"),
            frame("app.py", 1, "<module>"),
        ];
        let trace = writer.add_trace(&stack).expect("it is buffered");
        let detail = AllocDetail {
            domain: 2,
            thread: 100 + place % 3,
        };
        for step in 0..(place % 11 + 1) {
            let at = Duration::from_millis(u64::from(place) * 500 + u64::from(step));
            let size = 40 + u64::from(place * 977 % 300_000 + step * 13);
            writer.alloc(at, trace, size, detail);
            if step % 4 == 1 {
                writer.free(at, trace, size);
            }
        }
    }
    writer.alloc(Duration::from_secs(30), 0, 50_000, AllocDetail::default());
    writer.thread(100, "MainThread");
    writer.losses(
        Duration::from_secs(30),
        &Losses([("frames_not_named".to_owned(), 2)].into()),
    );
    writer.end(Duration::from_secs(30), &EndReason::Stopped);
    writer.flush().expect("there is room");
}

/// A profile in which every name is evil.
fn evil(base: &Path) {
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let facts = Facts {
        cmdline: EVIL.map(str::to_owned).into(),
        exe: Some(EVIL.concat()),
        ..Facts::default()
    };
    let mut writer = ProfileWriter::create(base, SuffixStyle::Underscore, start, 1, &facts).expect("our folder");
    for (place, name) in EVIL.into_iter().enumerate() {
        let frame = Frame {
            file: name,
            line: 7,
            function: name,
        };
        let trace = writer.add_trace(&[frame, frame]).expect("it is buffered");
        let thread = place as u32 + 1;
        writer.thread(thread, name);
        writer.alloc(Duration::from_secs(1), trace, 1000, AllocDetail { domain: 0, thread });
    }
    writer.flush().expect("there is room");
}

fn profile(make: fn(&Path)) -> (tempfile::TempDir, String) {
    let dir = scratch();
    let base = dir.path().join("run");
    make(&base);
    let base = base.to_str().expect("UTF-8").to_owned();
    (dir, base)
}

/// `go tool pprof`, or why not.
fn go_pprof(test: &str) -> Option<()> {
    if !have("go") {
        common::skipped(test, "no go (Debian: golang-go)");
        return None;
    }
    Some(())
}

#[track_caller]
fn go(home: &Path, file: &Path, args: &[&str]) -> String {
    let output = Command::new("go")
        .args(["tool", "pprof", "-symbolize=none"])
        .args(args)
        .arg(file)
        .env("HOME", home)
        .env("PPROF_TMPDIR", home)
        .env("GOTOOLCHAIN", "local")
        .stdin(Stdio::null())
        .output()
        .expect("go is in PATH");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "go tool pprof {args:?}: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Function → (flat, cumulative), and the total, of `-top`.
fn go_top(home: &Path, file: &Path, index: &str) -> (BTreeMap<String, (f64, f64)>, f64) {
    let sample_index = format!("-sample_index={index}");
    let args = [
        "-top",
        "-unit=B",
        "-nodecount=100000",
        "-nodefraction=0",
        "-edgefraction=0",
        &sample_index,
    ];
    let text = go(home, file, &args);
    let number = |word: &str| -> f64 {
        let digits = word.trim_end_matches('B').trim_end_matches(',');
        digits
            .parse()
            .unwrap_or_else(|_| panic!("no number: {word} in\n{text}"))
    };
    let total = text
        .lines()
        .find(|line| line.starts_with("Showing nodes"))
        .unwrap_or_else(|| panic!("{text}"));
    let total = total
        .strip_suffix(" total")
        .and_then(|line| line.split_whitespace().last())
        .map(number);
    let rows = text
        .lines()
        .skip_while(|line| !line.contains("flat%"))
        .skip(1)
        .map(|line| {
            let mut words = line.split_whitespace();
            let mut next = || words.next().unwrap_or_default();
            let (flat, _, _, cumulative, _) = (number(next()), next(), next(), number(next()), next());
            (words.collect::<Vec<_>>().join(" "), (flat, cumulative))
        });
    (rows.collect(), total.expect("a total"))
}

#[test]
fn go_tool_pprof_shows_what_pyheap_shows() {
    if go_pprof("go_tool_pprof_shows_what_pyheap_shows").is_none() {
        return;
    }
    let (dir, base) = profile(sampled);
    let file = dir.path().join("run.pb.gz");
    for at in ["12s", "end"] {
        bytes(&[
            "export",
            &base,
            "--to",
            "pprof",
            "--at",
            at,
            "-o",
            file.to_str().expect("UTF-8"),
        ]);
        let object = json(&["export", &base, "--to", "json", "--at", at]);
        for (index, key) in [
            ("alloc_objects", "allocated_objects"),
            ("alloc_space", "allocated_bytes"),
            ("inuse_objects", "live_objects"),
            ("inuse_space", "live_bytes"),
        ] {
            let (rows, total) = go_top(dir.path(), &file, index);
            // Rounded sums: off by half, or by one where it is the sum of two.
            let wanted = object["total"][key].as_f64().expect("a number");
            assert!(
                (total - wanted).abs() <= 1.0,
                "{index} at {at}: {total} instead of {wanted}"
            );
            if key.starts_with("allocated") {
                continue;
            }
            for (cumulative, more) in [(false, &[][..]), (true, &["--cumulative"])] {
                let mut args = vec![
                    "top", &base, "--json", "--by", "function", "--limit", "1000", "--at", at,
                ];
                args.extend(more);
                for row in json(&args)["rows"].as_array().expect("rows") {
                    let name = row["site"]["function"].as_str().unwrap_or("(no Python stack)");
                    let (flat, cum) = rows[name];
                    let (mine, theirs) = (
                        row[key].as_f64().expect("a number"),
                        if cumulative { cum } else { flat },
                    );
                    // Less than one for each run of neighbouring stacks that is in the row.
                    assert!(
                        (mine - theirs).abs() <= 61.0,
                        "{index} of {name} at {at}: {theirs} instead of {mine}"
                    );
                    assert!(mine < 61.0 || theirs > 0.0);
                }
            }
        }
    }
    // What is not in numbers: names, lines, labels, comments.
    let raw = go(dir.path(), &file, &["-raw"]);
    for part in [
        "PeriodType: space bytes",
        "Period: 131072",
        "lib.py:59",
        "thread:[MainThread]",
        "domain:[obj]",
    ] {
        assert!(
            raw.contains(part) || raw.replace(" s=0", "").contains(part),
            "{part}\n{raw}"
        );
    }
    assert!(
        raw.contains("python:[3.11.7]") && raw.contains("thread_id:[101]"),
        "{raw}"
    );
    let comments = go(dir.path(), &file, &["-comments"]);
    for part in [
        "python 3.11.7",
        "pid 4242",
        "command python3 app.py",
        "2 frames_not_named",
    ] {
        assert!(comments.contains(part), "{comments}");
    }
    let lines = go(
        dir.path(),
        &file,
        &["-top", "-lines", "-nodefraction=0", "-nodecount=1000"],
    );
    assert!(lines.contains("lib.py:24"), "{lines}");
}

#[test]
fn a_harmful_name_reaches_nobody_through_pprof() {
    if go_pprof("a_harmful_name_reaches_nobody_through_pprof").is_none() {
        return;
    }
    let (dir, base) = profile(evil);
    let file = dir.path().join("run.pb.gz");
    bytes(&["export", &base, "--to", "pprof", "-o", file.to_str().expect("UTF-8")]);
    for args in [&["-top"][..], &["-raw"], &["-comments"], &["-tags"]] {
        assert_harmless(&go(dir.path(), &file, args), &args.concat());
    }
}

/// No control characters but line ends, no reordering.
#[track_caller]
fn assert_harmless(text: &str, what: &str) {
    let bad = text.chars().find(|c| {
        c.is_control() && !matches!(c, '\n' | '\t') || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
    });
    assert_eq!(bad, None, "{what}: {text}");
}

#[test]
fn harmful_names_are_harmless_in_every_format() {
    let (_dir, base) = profile(evil);
    for args in [
        &["export", "--to", "speedscope"][..],
        &["export", "--to", "collapsed"],
        &["export", "--to", "csv"],
        &["export", "--to", "json"],
        &["flame", "--format", "svg"],
        &["flame", "--format", "html"],
        &["events"],
        &["events", "--json", "--stacks"],
    ] {
        let text = text(&[args, &[&base]].concat());
        assert_harmless(&text.replace("\r\n", "\n"), &args.concat());
        // Within JSON `<` is escaped or there is no browser; elsewhere it must not begin an element.
        let is_markup = args[0] == "flame";
        assert!(
            !is_markup || !text.contains("<script>alert") && !text.contains("<b>"),
            "{args:?}"
        );
    }
    let rows = text(&["export", &base, "--to", "csv"]);
    assert_eq!(rows.split_terminator("\r\n").count(), 1 + EVIL.len());
}

/// All formats are of one profile, so they say the same.
#[test]
fn formats_agree() {
    let (_dir, base) = profile(sampled);
    let object = json(&["export", &base, "--to", "json"]);
    let total = object["total"]["live_bytes"].as_f64().expect("a number");
    let top = json(&["top", &base, "--json"]);
    for key in ["live_bytes", "live_bytes_margin", "live_objects", "live_objects_margin"] {
        assert_eq!(object["total"][key], top[key]);
    }
    let traces = object["traces"].as_array().expect("traces");
    let frames = object["frames"].as_array().expect("frames");
    let sum: f64 = traces.iter().filter_map(|trace| trace["live_bytes"].as_f64()).sum();
    assert!((sum - total).abs() < 1e-3);
    let first = traces.iter().find(|trace| trace["trace"] == 25).expect("trace 25");
    let frame = &frames[first["stack"][2].as_u64().expect("a place") as usize];
    assert_eq!(
        frame,
        &serde_json::json!({"file": "lib.py", "line": 24, "function": "load"})
    );
    assert_eq!((&first["thread"], &first["domain"]), (&100.into(), &"obj".into()));
    assert_eq!(first["thread_name"], "MainThread");
    assert_eq!(
        (&object["target"]["pid"], &object["start_seconds"]),
        (&4242.into(), &1.6e9.into())
    );

    let collapsed = text(&["export", &base, "--to", "collapsed"]);
    let values = collapsed
        .lines()
        .map(|line| line.rsplit(' ').next().and_then(|word| word.parse::<f64>().ok()));
    let sum: f64 = values.map(|value| value.expect("a number")).sum();
    assert!((sum - total).abs() <= 0.5, "{sum} {total}");
    assert_eq!(text(&["flame", &base]), collapsed);

    let speedscope = json(&["export", &base, "--to", "speedscope"]);
    assert!((speedscope["profiles"][0]["endValue"].as_f64().expect("a number") - total).abs() <= 0.5);
    assert_eq!(json(&["flame", &base, "--format", "speedscope"]), speedscope);

    let csv = text(&["export", &base, "--to", "csv"]);
    let column = |row: &str| row.split(',').nth(1).and_then(|cell| cell.parse::<f64>().ok());
    let sum: f64 = csv.lines().skip(1).filter_map(column).sum();
    assert!((sum - total).abs() < 1e-3);
    assert!(
        csv.contains(
            ",obj,100,MainThread,lib.py,24,load,<module> (app.py:1) > handle (app.py:3) > load (lib.py:24)\r\n"
        )
    );
}

#[test]
fn any_moment_can_be_exported() {
    let (_dir, base) = profile(sampled);
    let at = |at: &str| json(&["export", &base, "--to", "json", "--at", at])["total"].clone();
    assert_eq!(at("12s"), at("-18s"));
    assert_eq!(at("12s"), at("2020-09-13T12:26:52Z"));
    assert_eq!(at("12s"), at("@1600000012"));
    assert_ne!(at("12s"), at("end"));
    let bytes = json(&["top", &base, "--json", "--at", "12s"])["live_bytes"].clone();
    assert_eq!(at("12s")["live_bytes"], bytes);
    let picture = text(&[
        "flame",
        &base,
        "--format",
        "svg",
        "--at",
        "12s",
        "--value",
        "allocated-objects",
    ]);
    assert!(
        picture.contains("allocated objects: ") && picture.contains(" at 12s"),
        "{picture}"
    );
    let wrong = pyheap(&["flame", &base, "--at", "soon"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("; examples: 90s"));
}

#[test]
fn files_are_whole_and_private() {
    let (dir, base) = profile(sampled);
    for (name, begins) in [
        ("a.svg", "<?xml"),
        ("a.html", "<!DOCTYPE html>"),
        ("a.json", "{\"$schema\""),
        ("a.txt", "<module> (app.py:1);handle"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, "old").expect("our folder");
        let name = path.to_str().expect("UTF-8");
        assert_eq!(text(&["flame", &base, "-o", name]), "");
        let content = std::fs::read_to_string(&path).expect("it was written");
        assert!(content.starts_with(begins), "{name}: {content}");
        let mode = std::fs::metadata(&path).expect("it was written").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let temporary = std::fs::read_dir(dir.path()).expect("our folder").flatten();
    assert!(
        temporary
            .into_iter()
            .all(|entry| !entry.file_name().to_string_lossy().ends_with(".tmp"))
    );
    fails(
        &["export", &base, "--to", "csv", "-o", "/nonexistent/x"],
        1,
        "cannot write /nonexistent/x: No such file",
    );
    let (_other, later) = profile(evil);
    fails(
        &["flame", &later, "--format", "svg", "--at", "0"],
        1,
        "there are no live bytes at 0ms, so there is nothing to draw",
    );
}

/// Whoever reads our output may stop at any time.
#[test]
fn a_closed_pipe_is_no_error() {
    let (_dir, base) = profile(sampled);
    for args in [
        &["export", "--to", "pprof"][..],
        &["export", "--to", "json"],
        &["flame", "--format", "html"],
        &["events"],
        &["events", "--json"],
    ] {
        let mut child = Command::new(common::pyheap::binary())
            .args(args)
            .arg(&base)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        drop(child.stdout.take());
        let mut errors = String::new();
        let mut stderr = child.stderr.take().expect("piped above");
        stderr.read_to_string(&mut errors).expect("text");
        assert!(
            child.wait().is_ok_and(|status| status.success()) && errors.is_empty(),
            "{args:?}: {errors}"
        );
    }
    assert_eq!(
        bytes(&["export", &base, "--to", "pprof"])[..2],
        [0x1F, 0x8B],
        "gzip, in a pipe"
    );
}

#[test]
fn the_log_has_every_event() {
    let (_dir, base) = profile(sampled);
    let reader = Reader::open(Path::new(&base)).expect("it was just written");
    let all: Vec<_> = reader.events().expect("it can be read").collect();
    let lines: Vec<Value> = text(&["events", &base, "--json"])
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), all.len());
    for (line, event) in lines.iter().zip(&all) {
        let what = if event.is_free { "free" } else { "alloc" };
        let wanted = (event.number, event.micros, event.size, u64::from(event.trace), what);
        let number = |key: &str| line[key].as_u64().expect("a number");
        let found = (
            number("event"),
            line["at_micros"].as_i64().expect("a number"),
            number("bytes"),
            number("trace"),
            line["what"].as_str().expect("a word"),
        );
        assert_eq!(found, wanted);
        let weight = 1.0 / -(-(event.size as f64) / 131_072.0).exp_m1();
        assert!((line["weight"].as_f64().expect("a number") / weight - 1.0).abs() < 1e-9);
    }
    assert_eq!(
        (&lines[0]["function"], &lines[0]["thread"]),
        (&"grow".into(), &100.into())
    );
    let plain = text(&["events", &base]);
    assert_eq!(plain.lines().count(), all.len() + 1);
    assert!(
        plain.lines().nth(1).is_some_and(|line| line.ends_with("lib.py:0 grow")),
        "{plain}"
    );
    let some = text(&[
        "events", &base, "--from", "10s", "--to", "10s", "--trace", "21", "--limit", "5",
    ]);
    let words: Vec<_> = some
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().take(2).collect::<Vec<_>>())
        .collect();
    assert_eq!(words, [["10.000000", "alloc"]]);
    let stack = json(&["events", &base, "--json", "--stacks", "--limit", "1"]);
    assert_eq!(stack["stack"][1]["function"], "handle");
}

/// The model of the format accepts no partial record, so it is as strict as the original.
fn strict_model(base: &Path) -> Option<Value> {
    let python = interpreters::any()?;
    let output = Command::new(python.path)
        .arg(tests_dir().join("support/hpmodel.py"))
        .arg(base)
        .output()
        .expect("an interpreter that runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    Some(serde_json::from_slice(&output.stdout).expect("JSON"))
}

/// A recording that was killed in the middle of a record, and damaged after that.
#[test]
fn the_originals_files_are_made_of_a_broken_run() {
    let (dir, base) = profile(sampled);
    let whole = Reader::open(Path::new(&base)).expect("it was just written");
    let count = whole.scan().expect("it can be read").events;
    for (suffix, damage) in [("_hpd", &[0, 0, 0, 1, 0xFF][..]), ("_hpm", &[5, 200, b'x'])] {
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .open(format!("{base}.{suffix}"))
            .expect("it was just written");
        file.write_all(damage).expect("there is room");
    }
    let copy: PathBuf = dir.path().join("copy");
    let name = copy.to_str().expect("UTF-8");
    // A digest of an older profile of this name must not stay: it would be taken for the new one's.
    std::fs::write(copy.with_extension("hpc"), "old").expect("our folder");
    let said = text(&["export", &base, "--to", "heapprof", "-o", name]);
    assert!(
        said.contains("copy.hpd: ") && said.contains(&format!(": {count} events, ")),
        "{said}"
    );
    assert!(!copy.with_extension("hpc").exists());
    let copied = Reader::open(&copy).expect("it is whole");
    assert_eq!(copied.scan().expect("it can be read").events, count);
    assert_eq!(
        copied.live_at(None).expect("it can be read").total,
        whole.live_at(None).expect("it can be read").total
    );
    let object = |base: &str| {
        let mut object = json(&["export", base, "--to", "json"]);
        object["name"] = Value::Null;
        object
    };
    assert_eq!(object(name), object(&base), "the sidecar came with it");
    match strict_model(&copy) {
        Some(model) => {
            assert_eq!(model["events"].as_array().map(Vec::len), Some(count as usize));
            assert_eq!(model["traces"].as_array().map(Vec::len), Some(60));
        }
        None => common::skipped("the_originals_files_are_made_of_a_broken_run", "no Python"),
    }

    fails(
        &["export", name, "--to", "heapprof"],
        2,
        "copy.hpm is the profile itself",
    );
    fails(&["export", &base, "--to", "heapprof", "-o", "-"], 2, "several files");
    fails(
        &["export", &base, "--to", "heapprof", "-o", name, "--at", "5s"],
        2,
        "leave out --at",
    );
    let recorded = std::fs::File::open(copy.with_extension("hpd")).expect("it was just written");
    recorded.try_lock().expect("nobody else has it");
    fails(
        &["export", &base, "--to", "heapprof", "-o", name],
        2,
        "a recording is writing to ",
    );
}

/// Everything before the damage is used, and a line says what was skipped.
#[test]
fn damage_is_said() {
    let (_dir, base) = profile(sampled);
    let path = format!("{base}._hpd");
    let mut events = std::fs::read(&path).expect("it was just written");
    events.extend_from_slice(&[0, 0, 0, 1]);
    events.extend_from_slice(&[0xFF; 30]);
    std::fs::write(&path, &events).expect("there is room");
    let whole = json(&["export", &base, "--to", "json"]);
    let wanted = format!(
        "warning: events are damaged from byte {} on; all after it is skipped\n",
        events.len() - 34
    );
    for args in [
        &["export", &base, "--to", "json"][..],
        &["export", &base, "--to", "pprof"],
        &["flame", &base],
        &["events", &base],
    ] {
        let output = pyheap(args);
        assert!(output.status.success());
        assert_eq!(String::from_utf8_lossy(&output.stderr), wanted, "{args:?}");
    }
    assert!(whole["total"]["live_bytes"].as_f64().is_some_and(|bytes| bytes > 0.0));
    assert_eq!(whole["warnings"].as_array().map(Vec::len), Some(1));
}
