//! The golden file of refusals: `name: exit code: line`, what varies replaced by PID, DIR and the like.
//! `PYHEAP_BLESS=1` writes it anew.

use super::pyheap::Finished;
use super::tests_dir;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Compares one refusal with the golden file, or writes it there.
pub fn check(name: &str, code: i32, run: Finished, replace: &[(&str, &str)]) {
    assert!(
        run.stdout.is_empty(),
        "{name}: a refusal has nothing to say on stdout: {}",
        run.stdout
    );
    let mut text = run.stderr.trim_end().to_owned();
    assert!(
        !text.contains('\n') && !text.is_empty(),
        "{name}: a refusal is one line, not:\n{text}"
    );
    assert!(!text.contains("panicked"), "{name}: {text}");
    for (what, with) in replace {
        text = text.replace(what, with);
    }
    run.expect_code(code);
    compare(name, &format!("{code}: {text}"));
}

/// The same for a refusal that somebody else has started: its exit code, and what it said.
pub fn check_line(name: &str, code: i32, exit_code: Option<i64>, said: &str, replace: &[(&str, &str)]) {
    assert_eq!(exit_code, Some(i64::from(code)), "{name}: {said}");
    let mut text = said.trim_end().to_owned();
    assert!(!text.contains('\n') && !text.is_empty(), "{name}: {text}");
    for (what, with) in replace {
        text = text.replace(what, with);
    }
    compare(name, &format!("{code}: {text}"));
}

fn compare(name: &str, line: &str) {
    static FILE: Mutex<()> = Mutex::new(());
    let path = tests_dir().join("golden/refusals.txt");
    let _file = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    let mut all: BTreeMap<&str, &str> = old.lines().filter_map(|line| line.split_once(": ")).collect();
    if std::env::var_os("PYHEAP_BLESS").is_some() {
        all.insert(name, line);
        let text: String = all.iter().map(|(name, line)| format!("{name}: {line}\n")).collect();
        std::fs::write(&path, text).expect("the golden file");
        return;
    }
    let wanted = all
        .get(name)
        .unwrap_or_else(|| panic!("{name} is not in {}; now: {line}", path.display()));
    assert_eq!(*wanted, line, "{name}; PYHEAP_BLESS=1 accepts it");
}
