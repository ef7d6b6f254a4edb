//! Promise: a forked child of a recorded process is not harmed by the shim that it inherits, and can be rid of it.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{self, each_of, pyheap, scratch};

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
    each_of(4, &representative(), |python| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(python, "forking.py", &[]);
        let recording = pyheap::record(target.pid, &base, &[]);
        let child = child_of(&mut target).to_string();
        let info = pyheap::run(["info", &child]).expect_code(0);
        info.expect_stdout("inherited by fork");
        pyheap::run(["cure", &child]).expect_code(0);
        recording.interrupt();
        let info = pyheap::run(["info", &child]).expect_code(0);
        info.expect_stdout("nothing of pyheap is in it");
        let end = target.ask("END", "ENDED");
        assert_eq!(end["status"], 0, "{}: the child's end", python.name);
        target.exit_cleanly();
    });
}

#[test]
fn a_child_can_be_recorded_while_its_parent_is() {
    each_of(4, &representative(), |python| {
        let dir = scratch();
        let base = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(python, "forking.py", &[]);
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
    });
}

/// The one who records leaves the children clean, too, whether it has recorded them or not.
#[test]
fn a_detach_cures_the_children() {
    each_of(4, &representative(), |python| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(python, "forking.py", &[]);
        let recording = pyheap::record(target.pid, &base, &[]);
        let child = child_of(&mut target).to_string();
        recording.interrupt();
        for pid in [&child, &target.pid.to_string()] {
            let info = pyheap::run(["info", pid]).expect_code(0);
            info.expect_stdout("nothing of pyheap is in it");
        }
        let end = target.ask("END", "ENDED");
        assert_eq!(end["status"], 0, "{}: the child's end", python.name);
        target.exit_cleanly();
    });
}

#[test]
fn a_tree_can_be_cured_by_hand() {
    each_of(4, &interpreters::some(&["3.8", "3.12"]), |python| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(python, "forking.py", &[]);
        let pid = target.pid.to_string();
        let recording = pyheap::record(target.pid, &base, &[]);
        let child = child_of(&mut target).to_string();
        recording.signal(nix::sys::signal::Signal::SIGKILL);
        recording.finish(common::DEADLINE);
        pyheap::run(["cure", "--tree", &pid]).expect_code(0);
        for pid in [&child, &pid] {
            let info = pyheap::run(["info", pid]).expect_code(0);
            info.expect_stdout("nothing of pyheap is in it");
        }
        let end = target.ask("END", "ENDED");
        assert_eq!(end["status"], 0, "{}: the child's end", python.name);
        target.exit_cleanly();
    });
}

#[test]
fn children_are_recorded_into_files_of_their_own() {
    each_of(4, &interpreters::some(&["3.8", "3.12"]), |python| {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let mut target = Target::start(python, "forking.py", &[]);
        let recording = pyheap::record(target.pid, &base, &["--children", "--period", "16KiB"]);
        let child = child_of(&mut target);
        let files = format!("{base}.{child}");
        // It holds up to 400 lists of a hundred blocks of 200 to 900 bytes, some MiB.
        common::until("events of the child", common::DEADLINE, || {
            std::fs::metadata(format!("{files}._hpd"))
                .is_ok_and(|m| m.len() > 100)
                .then_some(())
        });
        // The copy of the hooks that it was forked with does not keep it waiting: it goes with the child's own.
        let info = pyheap::run(["info", &child.to_string()]).expect_code(0);
        assert_eq!(info.stdout.matches("pyheap at ").count(), 2, "{info:?}");
        recording.interrupt();
        let rows = common::report::top(&files, &[]).rows;
        assert!(
            rows.iter().any(|row| row.file.ends_with("forking.py")),
            "{}: {rows:?}",
            python.name
        );
        let info = pyheap::run(["info", &child.to_string()]).expect_code(0);
        info.expect_stdout("nothing of pyheap is in it");
        let end = target.ask("END", "ENDED");
        assert_eq!(end["status"], 0, "{}: the child's end", python.name);
        target.exit_cleanly();
    });
}
