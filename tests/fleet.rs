//! Promise: one pyheap records all processes of a tree, of a cgroup, or that match, also those that come later; nothing is lost and
//! nothing is left behind; their recordings can be read as one.

use crate::common::interpreters;
use crate::common::pyheap::{run, start};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, pyheap, scratch, skip, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The recordings in `dir`, by the name after `run.`.
fn recorded(dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(dir).expect("our own folder").flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter_map(|name| Some(name.strip_prefix("run.")?.strip_suffix("._hpm")?.to_owned()))
        .collect()
}

fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("our own folder").flatten();
    let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    // What a shell makes of `run.*`.
    all.retain(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("run."))
    });
    all.sort();
    all.into_iter()
        .map(|path| path.to_str().expect("UTF-8").to_owned())
        .collect()
}

fn workers(status: &Value) -> Vec<i32> {
    let list = status["workers"].as_array().expect("a list");
    list.iter()
        .filter_map(|pid| i32::try_from(pid.as_i64()?).ok())
        .collect()
}

/// Sees that nothing of ours is in a process, if it is there.
fn is_clean(pid: i32) {
    let info = run(["info", &pid.to_string()]);
    assert!(
        info.stdout.contains("nothing of pyheap is in it") || info.code() == 3,
        "{pid}: {info:?}"
    );
}

/// What `top --json` says of several recordings together.
fn top(bases: &[String]) -> Value {
    let mut args = vec!["top".to_owned(), "--json".to_owned()];
    args.extend(bases.iter().cloned());
    serde_json::from_str(&run(args).expect_code(0).stdout).expect("JSON")
}

fn row<'a>(told: &'a Value, function: &str) -> &'a Value {
    let rows = told["rows"].as_array().expect("a list");
    let found = rows.iter().find(|row| row["site"]["function"] == function);
    found.unwrap_or_else(|| panic!("no {function} in {told}"))
}

/// A tree whose workers come and go.
#[test]
fn a_tree_is_recorded_and_left_clean() {
    const TEST: &str = "a_tree_is_recorded_and_left_clean";
    let pythons = interpreters::some(&["pyenv-3.8", "pyenv-3.12"]);
    if pythons.is_empty() {
        skip!(TEST, "no CPython found");
    }
    common::each_of(2, &pythons, |python| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let audit = dir.path().join("audit").to_str().expect("UTF-8").to_owned();
        // Each keeps 1 % of 10 MB a second: 10 samples of 16 KiB in about two seconds.
        let mut target = Target::start(python, "fleet.py", &["4", "10", "1"]);
        let root = target.pid.to_string();
        let args = [
            "record", "--tree", &root, "--period", "16KiB", "-o", &base, "--audit", &audit,
        ];
        let mut recording = start(args);
        recording.wait_stderr(&format!("recording {root} "));
        // Until workers that came later are recorded as well, with what they keep.
        let first = workers(&target.facts);
        let kept = |pid: i32| std::fs::metadata(format!("{base}.{pid}._hpd")).is_ok_and(|file| file.len() > 2000);
        let mut later = BTreeSet::new();
        until(
            &format!("{}: later workers are recorded", python.name),
            DEADLINE,
            || {
                let now = workers(&target.ask("STATUS", "STATUS"));
                later.extend(now.into_iter().filter(|pid| !first.contains(pid)));
                (later.iter().filter(|&&pid| kept(pid)).count() >= 2).then_some(())
            },
        );
        let end = recording.interrupt();
        assert!(
            end.stderr.contains("have ended") && !end.stderr.contains("lost or late"),
            "{}",
            end.stderr
        );
        let now = workers(&target.ask("STATUS", "STATUS"));
        now.iter().chain([&target.pid]).for_each(|&pid| is_clean(pid));
        let names = recorded(dir.path());
        assert!(names.contains(&root) && names.len() > 5, "{names:?}");
        // Every file is complete, and every attach has its detach.
        for name in &names {
            let info = run(["info", &format!("{base}.{name}"), "--json"]).expect_code(0);
            let info: Value = serde_json::from_str(&info.stdout).expect("JSON");
            assert!(!info["end"].is_null(), "{name}: {info}");
        }
        let text = std::fs::read_to_string(&audit).expect("it was written");
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        let deeds = |what: &str| {
            let of = lines.iter().filter(|line| line["event"] == what);
            of.filter_map(|line| line["pid"].as_i64()).collect::<BTreeSet<i64>>()
        };
        assert_eq!(deeds("attach"), deeds("detach"), "{text}");
        let pids: BTreeSet<String> = deeds("attach").iter().map(ToString::to_string).collect();
        assert_eq!(pids, names, "{text}");
        assert!(
            lines
                .iter()
                .all(|line| line["command"].as_str().is_some_and(|c| c.contains("fleet.py"))),
            "{text}"
        );
        // Nobody was harmed: every worker has ended as it was told to.
        let done = target.ask("EXIT", "DONE");
        assert!(
            done["ended"]
                .as_object()
                .is_some_and(|ended| ended.values().all(|status| status == 0)),
            "{done}"
        );
        assert!(target.wait().success());

        // All together. Those that had ended by then hold nothing.
        let told = top(&files(dir.path()));
        let there = told["processes"].as_array().map_or(0, Vec::len);
        assert!(there >= 3 && told["not_there"].as_u64() >= Some(1), "{told}");
        let keep = row(&told, "keep");
        let each: f64 = told["processes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(|name| common::report::top(name, &[]))
            .flat_map(|top| top.rows)
            .filter(|row| row.function == "keep")
            .map(|row| row.bytes)
            .sum();
        let sum = keep["live_bytes"]["value"].as_f64().unwrap_or_default();
        assert!((sum - each).abs() < 1.0, "{sum} is not the sum {each} of all: {told}");
        assert!(
            keep["least_bytes"].as_f64() <= keep["most_bytes"].as_f64() && keep["processes"].as_u64() >= Some(2),
            "{keep}"
        );
        let mut args = vec!["leaks".to_owned()];
        args.extend(files(dir.path()));
        run(args).expect_code(0).expect_stdout("too short");
    });
}

/// Those whose command line matches, and nobody else; when a condition holds, and not before.
#[test]
fn all_that_match_when_they_are_large() {
    const TEST: &str = "all_that_match_when_they_are_large";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    // Other tests run at the same time: the rate makes this one unmistakable.
    let mut target = Target::start(&python, "fleet.py", &["2", "0.123457"]);
    let mut other = Target::start(&python, "fleet.py", &["1", "0.123458"]);
    let (root, others) = (target.pid.to_string(), other.pid.to_string());
    // A condition that cannot hold: nobody is attached to.
    let args = [
        "record",
        "--all",
        "--match",
        "fleet[.]py 2 0.123457",
        "--when-rss",
        "1TiB",
        "--duration",
        "600ms",
    ];
    let none = run(args.iter().copied().chain(["-o", &base])).expect_code(0);
    assert!(
        none.stderr.contains("recorded 0 processes") && recorded(dir.path()).is_empty(),
        "{none:?}"
    );
    let args = [
        "record",
        "--all",
        "--match",
        "fleet[.]py 2 0.123457",
        "--when-rss",
        "1MiB",
        "-o",
        &base,
    ];
    let mut recording = start(args);
    let pids: BTreeSet<String> = workers(&target.facts)
        .iter()
        .map(ToString::to_string)
        .chain([root.clone()])
        .collect();
    until("all of them", DEADLINE, || (recorded(dir.path()) == pids).then_some(()));
    for _ in &pids {
        recording.wait_stderr("audit: ");
    }
    let end = recording.interrupt();
    assert!(
        end.stderr.contains("recorded 3 processes") && end.stderr.contains("attach"),
        "{end:?}"
    );
    assert!(!end.stderr.contains(&format!(" {others} ")), "{end:?}");
    pids.iter().filter_map(|pid| pid.parse().ok()).for_each(is_clean);

    // A single one, which waits as well.
    let args = ["record", &root, "--when-growth", "1TiB/1m", "-o", &base];
    let mut waiting = start(args);
    waiting.wait_stderr("waiting before attaching");
    is_clean(target.pid);
    kill(Pid::from_raw(waiting.pid()), Signal::SIGINT).expect("our own child");
    waiting.finish(DEADLINE).expect_code(1).expect_stderr("before process");
    let one = run([
        "record",
        &root,
        "--when-rss",
        "1MiB",
        "--duration",
        "50ms",
        "-o",
        &base,
        "--log-format",
        "json",
    ]);
    let one = one.expect_code(0);
    let lines: Vec<Value> = one
        .stderr
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let said = |level: &str, text: &str| {
        lines
            .iter()
            .any(|line| line["level"] == level && line["message"].as_str().is_some_and(|m| m.contains(text)))
    };
    assert!(
        said("info", "attaching to") && said("audit", "attach") && said("audit", "detach"),
        "{}",
        one.stderr
    );
    for target in [&mut target, &mut other] {
        target.ask("EXIT", "DONE");
        assert!(target.wait().success());
    }
}

/// New files by time and by SIGHUP; old ones go; each is complete by itself.
#[test]
fn files_are_rotated() {
    const TEST: &str = "files_are_rotated";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "fleet.py", &["1", "10"]);
    let worker = *workers(&target.facts).first().expect("it has one");
    let recording = pyheap::record(worker, &base, &["--rotate", "1h", "--keep", "2", "--period", "16KiB"]);
    for number in 2..5 {
        let before = std::fs::metadata(if number == 2 {
            format!("{base}._hpd")
        } else {
            format!("{base}.{}._hpd", number - 1)
        });
        assert!(before.is_ok(), "{number}");
        recording.signal(Signal::SIGHUP);
        until("new files", DEADLINE, || {
            Path::new(&format!("{base}.{number}._hpm")).exists().then_some(())
        });
    }
    let end = recording.interrupt();
    assert!(end.stderr.contains("several files"), "{end:?}");
    // Of four the last two are there.
    assert_eq!(recorded(dir.path()), ["3", "4"].map(str::to_owned).into());
    assert!(!Path::new(&format!("{base}._hpm")).exists() && !Path::new(&format!("{base}._hpd")).exists());
    // The last one holds what was kept before it began, too: it goes on where the one before has ended.
    let bytes = |name: &str| {
        let rows = common::report::top(&format!("{base}.{name}"), &[]).rows;
        rows.iter()
            .filter(|row| row.function == "keep")
            .map(|row| row.bytes)
            .sum::<f64>()
    };
    assert!(bytes("4") >= bytes("3"), "{} < {}", bytes("4"), bytes("3"));
    is_clean(worker);

    // By time.
    let recording = pyheap::record(worker, &base, &["--rotate", "1s"]);
    until("new files", DEADLINE, || {
        Path::new(&format!("{base}.2._hpm")).exists().then_some(())
    });
    recording.interrupt();
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
    for wrong in [
        &["--keep", "2"][..],
        &["--rotate", "5"],
        &["--tree", "1", "--all"],
        &["--cgroup", "/no/such/group"],
    ] {
        run([&["record", "1"][..], wrong].concat()).expect_code(2);
    }
}

/// The processes of a cgroup.
#[test]
fn a_cgroup_is_recorded() {
    const TEST: &str = "a_cgroup_is_recorded";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let Some(group) = common::cgroup::Cgroup::make() else {
        skip!(TEST, "no cgroup can be made here")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "fleet.py", &["2", "1"]);
    let [one, other] = workers(&target.facts)[..] else {
        panic!("it has two")
    };
    if !group.add(&one.to_string()) {
        skip!(TEST, "the cgroup takes nobody");
    }
    let mut recording = start(["record", "--cgroup", group.path(), "-o", &base]);
    recording.wait_stderr(&format!("recording {one} "));
    // One that joins it later.
    assert!(group.add(&other.to_string()));
    recording.wait_stderr(&format!("recording {other} "));
    recording.interrupt();
    assert_eq!(recorded(dir.path()), [one, other].map(|pid| pid.to_string()).into());
    [one, other].into_iter().for_each(is_clean);
    // By the path that the kernel shows, which has no folder of a controller.
    let shown = std::fs::read_to_string(format!("/proc/{one}/cgroup")).expect("our own child");
    let own = std::path::Path::new(group.path()).file_name().expect("a folder");
    let own = own.to_str().expect("UTF-8");
    let mut shown = shown.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let shown = shown.find(|path| path.ends_with(own));
    let again = dir.path().join("again").to_str().expect("UTF-8").to_owned();
    let shown = shown.expect("it is in the group");
    let mut recording = start(["record", "--cgroup", shown, "-o", &again]);
    recording.wait_stderr(&format!("recording {one} "));
    recording.interrupt();
    [one, other].into_iter().for_each(is_clean);
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
}

/// A tree that ends ends the recording, and one that is not there is said.
#[test]
fn the_end_of_a_tree() {
    const TEST: &str = "the_end_of_a_tree";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(&python, "fleet.py", &["2", "1"]);
    let recording = start(["record", "--tree", &target.pid.to_string(), "-o", &base]);
    let all: BTreeSet<String> = workers(&target.facts)
        .iter()
        .chain([&target.pid])
        .map(ToString::to_string)
        .collect();
    until("all of them", DEADLINE, || (recorded(dir.path()) == all).then_some(()));
    target.ask("EXIT", "DONE");
    assert!(target.wait().success());
    let end = recording.finish(DEADLINE).expect_code(0);
    assert!(end.stderr.contains("(3 of them have ended)"), "{end:?}");
    // Each is shown as it was when it ended.
    let told = top(&files(dir.path()));
    assert_eq!(told["processes"].as_array().map(Vec::len), Some(3), "{told}");
    run(["record", "--tree", "1073741824", "-o", &base]).expect_code(3);
}
