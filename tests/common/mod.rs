//! What the integration tests share: interpreters, target programs, the built binary, pictures of /proc, and the exact
//! statistics of a sampler.
//!
//! Nothing here sleeps and hopes: whatever is waited for is a line on a pipe or a state that is polled, with a deadline
//! after which the test fails and shows everything that was said until then.
//!
//! Environment (all optional; `scripts/test` sets them):
//! `PYHEAP_INTERPRETERS` NAME=PATH:NAME=PATH… (else the usual places are searched), `PYHEAP_BINARY` another binary than
//! the one cargo built, `PYHEAP_SKIPS` a file that collects
//! what was skipped, `PYHEAP_BLESS=1` writes golden files anew instead of comparing.

pub mod binomial;
pub mod cgroup;
pub mod chromium;
pub mod every_record;
pub mod golden;
pub mod interpreters;
pub mod lines;
pub mod picture;
pub mod pprof;
pub mod pyheap;
pub mod python;
pub mod report;
pub mod target;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; only ever reached by a failure.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The folder `tests/`.
pub fn tests_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// The path of a target program.
pub fn target_script(name: &str) -> String {
    tests_dir()
        .join("targets")
        .join(name)
        .to_str()
        .expect("the checkout's path is UTF-8")
        .to_owned()
}

/// A fresh folder, readable by everybody (some tests run pyheap as another user).
pub fn scratch() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::Builder::new()
        .prefix("pyheap-test-")
        .tempdir()
        .expect("a temporary folder");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("chmod of our own folder");
    dir
}

/// Says that a test (or the named part of it) did not run, where `scripts/test` finds it.
pub fn skipped(test: &str, why: &str) {
    let line = format!("SKIPPED: {test}: {why}");
    println!("{line}");
    if let Some(path) = std::env::var_os("PYHEAP_SKIPS") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        if let Ok(mut file) = file {
            let _ = writeln!(file, "{line}");
        }
    }
}

/// Copies a program that will be run. A process of its own does it: of ours, a child that another test starts at this moment
/// would inherit the descriptor that is open for writing, and until it executes its own program this one is busy.
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let copied = Command::new("cp").arg(from.as_ref()).arg(to.as_ref()).status();
    assert!(
        copied.is_ok_and(|status| status.success()),
        "cp {}",
        from.as_ref().display()
    );
}

/// Ends the test that it stands in, and says why.
macro_rules! skip {
    ($test:expr, $($why:tt)*) => {{
        $crate::common::skipped($test, &format!($($why)*));
        return;
    }};
}
pub(crate) use skip;

/// Held by tests that measure time or load the machine, so that they run one after the other.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `check` for all `rows`, `at_once` of them at a time: nearly all of it is waiting. The problems, a line each.
pub fn in_parallel<T: Sync>(at_once: usize, rows: &[T], check: impl Fn(&T) -> Result<(), String> + Sync) -> String {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let (next, problems) = (AtomicUsize::new(0), Mutex::new(String::new()));
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(problem) = check(row) {
                        let mut problems = problems.lock().unwrap_or_else(PoisonError::into_inner);
                        problems.push_str(&problem);
                        problems.push('\n');
                    }
                }
            });
        }
    });
    problems.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// [`in_parallel`] for a check that panics by itself when something is wrong.
pub fn each_of<T: Sync>(at_once: usize, rows: &[T], check: impl Fn(&T) + Sync) {
    in_parallel(at_once, rows, |row| {
        check(row);
        Ok(())
    });
}

pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Whether a program is in PATH.
pub fn have(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// Polls until `ready` has a value; panics with `what` after the deadline.
pub fn until<T>(what: &str, deadline: Duration, mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + deadline;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < end, "{what}: not within {deadline:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
