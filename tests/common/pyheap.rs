//! The built binary, run as a user runs it.

use super::lines::Lines;
use super::{DEADLINE, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsStr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// The binary that cargo built, or `PYHEAP_BINARY`.
pub fn binary() -> String {
    std::env::var("PYHEAP_BINARY").unwrap_or_else(|_| env!("CARGO_BIN_EXE_pyheap").to_owned())
}

/// A run that is not over.
pub struct Running {
    child: Child,
    pub out: Lines,
    pub err: Lines,
    what: String,
}

/// One that is.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    what: String,
}

pub fn start<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Running {
    let mut command = Command::new(binary());
    command.args(args);
    start_command(command)
}

pub fn start_command(mut command: Command) -> Running {
    let what = format!("{command:?}").replace(&binary(), "pyheap");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    Running {
        out: Lines::new(&what, child.stdout.take().expect("piped above")),
        err: Lines::new(&what, child.stderr.take().expect("piped above")),
        child,
        what,
    }
}

/// Whether this is the line `recording 4242 …`, which says that the hooks are in place.
pub fn is_recording(line: &str, pid: &str) -> bool {
    line.starts_with("recording ") && line.split_whitespace().take(3).any(|word| word == pid)
}

/// Runs to the end.
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Finished {
    start(args).finish(DEADLINE)
}

/// `pyheap record PID --duration 10m -o BASE MORE…`, returned when the hooks are in place.
pub fn record(pid: i32, base: &str, more: &[&str]) -> Running {
    let pid = pid.to_string();
    let mut args = vec!["record", &pid, "-o", base];
    if !more.contains(&"--duration") {
        args.extend(["--duration", "10m"]);
    }
    // By default the period adapts to the load, and this machine's load is anything.
    if !more.contains(&"--period") {
        args.extend(["--period", "128KiB"]);
    }
    args.extend(more);
    let mut running = start(args);
    running.wait_until_recording(&pid);
    running
}

impl Running {
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("pids are below 2^22")
    }

    /// Until the line that says that the hooks are in place.
    pub fn wait_until_recording(&mut self, pid: &str) {
        let wanted = |line: &str| is_recording(line, pid);
        if let Err(e) = self.err.wait_for("the line `recording PID`", DEADLINE, wanted) {
            panic!("{e}\n{:?}; stdout:\n{}", self.child.try_wait(), self.out.text());
        }
    }

    /// The next line on stderr that contains `text`.
    pub fn wait_stderr(&mut self, text: &str) -> String {
        match self.err.wait_for(text, DEADLINE, |line| line.contains(text)) {
            Ok(line) => line,
            Err(e) => panic!("{e}\n{:?}; stdout:\n{}", self.child.try_wait(), self.out.text()),
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap_or_else(|e| panic!("{}: kill: {e}", self.what));
    }

    /// SIGINT, then the end, which must be a clean one.
    pub fn interrupt(self) -> Finished {
        self.signal(Signal::SIGINT);
        self.finish(DEADLINE).expect_code(0)
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    pub fn finish(mut self, deadline: Duration) -> Finished {
        let child = &mut self.child;
        let status = until(&format!("{}: end", self.what), deadline, || {
            child.try_wait().expect("our own child")
        });
        Finished {
            status,
            stdout: self.out.all(Duration::from_secs(5)),
            stderr: self.err.all(Duration::from_secs(5)),
            what: std::mem::take(&mut self.what),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_running() {
            // A test has failed. Let pyheap cure the target before it goes; it may not, so do not wait for long.
            let _ = kill(Pid::from_raw(self.pid()), Signal::SIGTERM);
            for _ in 0..1000 {
                if !self.is_running() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Finished {
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }

    #[track_caller]
    pub fn expect_code(self, code: i32) -> Finished {
        assert!(
            self.status.code() == Some(code),
            "{}: {} instead of exit code {code}\nstdout:\n{}\nstderr:\n{}",
            self.what,
            self.status,
            self.stdout,
            self.stderr
        );
        self
    }

    #[track_caller]
    pub fn expect_stderr(self, text: &str) -> Finished {
        assert!(
            self.stderr.contains(text),
            "{}: no {text:?} on stderr:\n{}",
            self.what,
            self.stderr
        );
        self
    }

    #[track_caller]
    pub fn expect_stdout(self, text: &str) -> Finished {
        assert!(
            self.stdout.contains(text),
            "{}: no {text:?} on stdout:\n{}",
            self.what,
            self.stdout
        );
        self
    }
}
