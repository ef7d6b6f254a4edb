//! Promise: a prefork server under load is recorded without one wrong answer, with its workers if that is wanted, and afterwards
//! no process of it maps anything of pyheap. The server is gunicorn, from PyPI.

use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::tracer;
use crate::common::target::Target;
use crate::common::{self, DEADLINE, each_of, pyheap, scratch, skip, skipped, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const GUNICORN: &[&str] = &["gunicorn==23.0.0", "packaging==24.2"];

/// A folder with gunicorn in it; `None` if there is none to be had.
fn gunicorn(python: &Interpreter) -> Option<PathBuf> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("target/test")
        .join(format!("gunicorn-{}", python.name));
    if place.join("gunicorn/arbiter.py").exists() && place.join("packaging/version.py").exists() {
        return Some(place);
    }
    let mut pip = Command::new(&python.path);
    pip.args([
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "--target",
    ]);
    let done = pip.arg(&place).args(GUNICORN).stdin(Stdio::null()).output().ok()?;
    done.status.success().then_some(place)
}

/// A server, killed on drop with all its workers.
struct Server {
    arbiter: Child,
    log: PathBuf,
    port: u16,
}

impl Server {
    /// Workers come and go: each is replaced after some 150 requests.
    fn start(python: &Interpreter, gunicorn: &Path, dir: &Path) -> Self {
        let more = ["--workers", "3", "--max-requests", "150", "--max-requests-jitter", "50"];
        Self::start_app(python, gunicorn, dir, "prefork_app:application", &more)
    }

    fn start_app(python: &Interpreter, gunicorn: &Path, dir: &Path, app: &str, more: &[&str]) -> Self {
        // A port that was free a moment ago.
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let port = free.expect("a free port").port();
        let log = dir.join("log");
        let mut command = Command::new(&python.path);
        command
            .args(["-m", "gunicorn", "--preload", "--timeout", "120"])
            .args(more);
        command.args(["--bind", &format!("127.0.0.1:{port}"), app]);
        command.current_dir(common::tests_dir().join("targets"));
        command
            .env("PYTHONPATH", gunicorn)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env_remove("PYTHONMALLOC");
        let file = std::fs::File::create(&log).expect("our own folder");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let arbiter = command.spawn().expect("it is there");
        let mut server = Self { arbiter, log, port };
        until("the server", DEADLINE, || {
            assert!(
                server.arbiter.try_wait().expect("our own child").is_none(),
                "{}",
                server.said()
            );
            std::net::TcpStream::connect(("127.0.0.1", port)).ok()
        });
        server
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.arbiter.id()).expect("pids are below 2^22")
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The arbiter and its workers.
    fn tree(&self) -> Vec<i32> {
        let pid = self.pid();
        let workers = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let workers = workers.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(pid).chain(workers).collect()
    }

    /// Sees that nothing of ours is in any process of the server.
    fn is_clean(&self, what: &str) {
        for pid in self.tree() {
            let info = pyheap::run(["info", &pid.to_string()]);
            // A worker may have ended meanwhile.
            assert!(
                info.stdout.contains("nothing of pyheap is in it") || info.code() == 3,
                "{what}: {pid}: {info:?}"
            );
            assert_eq!(tracer(pid), 0, "{what}: {pid} is traced");
        }
    }

    fn end(mut self, what: &str) {
        kill(Pid::from_raw(self.pid()), Signal::SIGTERM).expect("our own child");
        let arbiter = &mut self.arbiter;
        let status = until("the server's end", DEADLINE, || {
            arbiter.try_wait().expect("our own child")
        });
        let said = self.said();
        assert!(status.success(), "{what}: {status}: {said}");
        for word in ["Traceback", "[ERROR]", "[CRITICAL]", "was sent SIG"] {
            // What a worker is told at the end.
            let bad: Vec<&str> = said
                .lines()
                .filter(|line| line.contains(word) && !line.contains("SIGTERM"))
                .collect();
            assert!(bad.is_empty(), "{what}: {bad:?}");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for pid in self.tree().into_iter().rev() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.arbiter.wait();
    }
}

/// Waits until the clients have had so many more answers, all of them right; who has given them.
fn answers(load: &mut Target, more: u64, what: &str) -> BTreeSet<u64> {
    let first = load.ask("STATUS", "STATUS")["answers"].as_u64().unwrap_or_default();
    let mut pids = BTreeSet::new();
    until(&format!("{what}: answers"), DEADLINE, || {
        let now = load.ask("STATUS", "STATUS");
        assert_eq!(now["wrong"], Value::Array(vec![]), "{what}");
        pids.extend(now["pids"].as_array().into_iter().flatten().filter_map(Value::as_u64));
        now["answers"].as_u64().filter(|&now| now >= first + more)
    });
    pids
}

#[test]
fn gunicorn_under_load() {
    const TEST: &str = "gunicorn_under_load";
    /// So many answers that workers have been replaced meanwhile, which each is after 200 at most.
    const MANY: u64 = 900;
    let servers = interpreters::some(&["pyenv-3.8", "pyenv-3.12"]);
    each_of(2, &servers, |python| {
        let Some(place) = gunicorn(python) else {
            return skipped(TEST, &format!("{}: gunicorn cannot be had from PyPI", python.name));
        };
        let dir = scratch();
        let base = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
        let server = Server::start(python, &place, dir.path());
        let name = &python.name;
        let mut load = Target::start(python, "prefork_load.py", &[&server.port.to_string(), "4"]);
        answers(&mut load, 20, name);

        // The arbiter only: its workers are forked with an inert copy.
        let recording = pyheap::record(server.pid(), &base("arbiter"), &[]);
        let workers = answers(&mut load, MANY, &format!("{name}, the arbiter"));
        assert!(workers.len() > 3, "{name}: no worker was replaced: {workers:?}");
        recording.interrupt();
        server.is_clean(&format!("{name}, the arbiter"));

        // With the workers, each into files of its own.
        let recording = pyheap::record(server.pid(), &base("all"), &["--children", "--period", "16KiB"]);
        answers(&mut load, MANY, &format!("{name}, all"));
        let files = until(&format!("{name}: a worker's events"), DEADLINE, || {
            let entries = std::fs::read_dir(dir.path()).expect("our own folder").flatten();
            let mut events = entries.filter(|entry| {
                let file = entry.file_name().to_string_lossy().into_owned();
                // Those of the arbiter have no pid in their names, or the number of a segment.
                let middle = file.strip_prefix("all.").and_then(|rest| rest.strip_suffix("._hpd"));
                let is_workers = middle.is_some_and(|middle| middle.parse().is_ok_and(|pid: i32| pid > 100));
                is_workers && entry.metadata().is_ok_and(|m| m.len() > 1000)
            });
            events.next().map(|entry| entry.path())
        });
        let end = recording.interrupt();
        assert!(!end.stderr.contains("not recorded"), "{name}: {end:?}");
        server.is_clean(&format!("{name}, all"));
        let events = files.to_str().expect("UTF-8").trim_end_matches("._hpd");
        let rows = pyheap::run(["events", events]).expect_code(0);
        rows.expect_stdout("prefork_app.py");

        // One worker. It may end under us; then another one.
        until(&format!("{name}: a recorded worker"), DEADLINE, || {
            let worker = server.tree().get(1..)?.last()?.to_string();
            let end = pyheap::run(["record", &worker, "--duration", "50ms", "-o", &base("worker")]);
            assert!(!end.stderr.contains("panicked"), "{name}: {end:?}");
            (end.code() == 0).then_some(())
        });
        answers(&mut load, 50, &format!("{name}, workers"));
        server.is_clean(&format!("{name}, workers"));
        pyheap::run(["cure", "--tree", &server.pid().to_string()]).expect_code(0);
        load.exit_cleanly();
        server.end(name);
    });
}

/// What the README begins with: from a list of processes to the line that leaks, in three commands and a minute.
#[test]
fn from_a_list_of_processes_to_the_leak() {
    const TEST: &str = "from_a_list_of_processes_to_the_leak";
    let Some(python) = interpreters::some(&["pyenv-3.12", "pyenv-3.11"]).into_iter().next() else {
        skip!(TEST, "no CPython found")
    };
    let Some(place) = gunicorn(&python) else {
        skip!(TEST, "gunicorn cannot be had from PyPI")
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let app = "prefork_leak:application";
    let server = Server::start_app(&python, &place, dir.path(), app, &["--workers", "4"]);
    let mut load = Target::start(&python, "prefork_load.py", &[&server.port.to_string(), "8"]);
    // Each worker has had its first request: from now on it leaks.
    let mut seen = BTreeSet::new();
    until("an answer of each worker", DEADLINE, || {
        seen.extend(answers(&mut load, 1, TEST));
        (seen.len() >= 4).then_some(())
    });
    // 1. The one that has started the others is the one to name.
    let told = pyheap::run(["ps", "--match", "prefork_leak", "--watch", "1s"])
        .expect_code(0)
        .stdout;
    for pid in server.tree() {
        assert!(
            told.lines().any(|line| line.starts_with(&format!("{pid} "))),
            "{pid}: {told}"
        );
    }
    // 2. It and its workers.
    let arbiter = server.pid().to_string();
    let end = pyheap::run([
        "record",
        "--tree",
        &arbiter,
        "--duration",
        "32s",
        "--period",
        "128KiB",
        "-o",
        &base,
    ])
    .expect_code(0);
    let named = |text: &str| {
        text.starts_with("leak: ")
            && text.contains("prefork_leak.py:11 open_session")
            && text.contains("of 5 processes")
    };
    assert!(end.stderr.lines().any(named), "{}", end.stderr);
    // 3. `pyheap leaks run.*`
    let files = std::fs::read_dir(dir.path())
        .expect("our own folder")
        .flatten()
        .map(|entry| entry.path());
    let mut args: Vec<_> = files
        .filter(|path| path.to_string_lossy().contains("/run."))
        .map(PathBuf::into_os_string)
        .collect();
    args.insert(0, "leaks".into());
    let told = pyheap::run(args).expect_code(0).stdout;
    assert!(told.lines().next().is_some_and(named), "{told}");
    server.is_clean(TEST);
    load.exit_cleanly();
    server.end(TEST);
}
