//! Promise: a forked child of a recorded process is not harmed by the shim that it inherits, and can be rid of it.

mod common;

use common::interpreters::{self, Interpreter};
use common::target::Target;
use common::{pyheap, scratch};

/// Up to 3.11 and from 3.12 on the hooks are taken out in different ways.
fn representative() -> Vec<Interpreter> {
    interpreters::some(&["3.8", "3.11", "3.12", "3.13", "deb-3.11"])
}

fn child_of(target: &mut Target) -> i32 {
    let child = target.ask("FORK", "CHILD");
    i32::try_from(child["pid"].as_i64().expect("a pid")).expect("pids are below 2^22")
}

#[test]
fn a_child_runs_on_and_can_be_cured() {
    for python in representative() {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(&python, "forking.py", &[]);
        let recording = pyheap::record(target.pid, &base, &[]);
        let child = child_of(&mut target).to_string();
        let info = pyheap::run(["info", &child]).expect_code(0);
        info.expect_stdout("inherited by fork");
        recording.interrupt();
        pyheap::run(["cure", &child]).expect_code(0);
        let info = pyheap::run(["info", &child]).expect_code(0);
        info.expect_stdout("nothing of pyheap is in it");
        let end = target.ask("END", "ENDED");
        assert_eq!(end["status"], 0, "{}: the child's end", python.name);
        target.exit_cleanly();
    }
}

#[test]
fn a_child_can_be_recorded_while_its_parent_is() {
    for python in representative() {
        let dir = scratch();
        let base = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(&python, "forking.py", &[]);
        let parent = pyheap::record(target.pid, &base("parent"), &[]);
        let child = child_of(&mut target);
        let recording = pyheap::record(child, &base("child"), &["--duration", "1s"]);
        recording.finish(common::DEADLINE).expect_code(0);
        let rows = common::report::top(&base("child"), &[]).rows;
        assert!(
            rows.iter().any(|row| row.file.ends_with("forking.py")),
            "{}: {rows:?}",
            python.name
        );
        let end = target.ask("END", "ENDED");
        assert_eq!(end["status"], 0, "{}: the child's end", python.name);
        parent.interrupt();
        target.exit_cleanly();
    }
}
