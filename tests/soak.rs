//! Promise: whatever becomes of pyheap, the target does not notice. Short runs of what `scripts/soak` does at length; one
//! after the other, since their targets keep all processors busy.

use crate::common::{self, have, interpreters, pyheap, skip};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

static ALONE: Mutex<()> = Mutex::new(());

/// pyheap and its tracer are killed at random moments; a short run of the sweep that docs/safety.md tells of.
#[test]
fn killed_at_any_moment() {
    soak(
        "killed_at_any_moment",
        &["pyenv-3.8", "many-3.10", "deb-3.11", "3.12", "3.13"],
        &["kill", "--kills", "200", "--jobs", "3", "--quiet"],
    );
}

/// The same while a frozen copy is made, read and reaped.
#[test]
fn killed_while_it_freezes() {
    soak(
        "killed_while_it_freezes",
        &["pyenv-3.8", "3.13"],
        &["freeze", "--kills", "12", "--jobs", "2", "--batch", "6", "--quiet"],
    );
}

/// tracemalloc is started and stopped before, during and after recordings.
#[test]
fn tracemalloc_comes_and_goes() {
    soak(
        "tracemalloc_comes_and_goes",
        &["3.8", "3.13"],
        &["tracemalloc", "--rounds", "4"],
    );
}

fn soak(test: &str, versions: &[&str], args: &[&str]) {
    let list = interpreters::some(versions);
    if list.is_empty() || !have("python3") {
        skip!(test, "no CPython found, or no python3 to run scripts/soak");
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let list: Vec<String> = list
        .iter()
        .map(|python| format!("{}={}", python.name, python.path))
        .collect();
    let script = common::tests_dir().join("../scripts/soak");
    let mut command = Command::new("python3");
    command.arg(script).args(args).args(["--pyheap", &pyheap::binary()]);
    command.args(["--interpreters", &list.join(",")]);
    let out = command.output().expect("python3 runs");
    let said = String::from_utf8_lossy(&out.stdout);
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}\n{err}");
}
