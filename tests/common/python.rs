//! A Python that runs a script from `tests/targets/` and stays there until dropped.

use super::interpreters::Python;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// The folder of scripts.
pub fn targets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/targets")
}

/// A running script. It is killed on drop.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Running {
    /// Starts `script` with `args`.
    pub fn start(python: &Python, script: &str, args: &[&str]) -> Self {
        let mut command = Command::new(&python.path);
        command.arg(targets().join(script)).args(args);
        Self::spawn(command)
    }

    /// Starts any program whose stdout is of interest.
    pub fn spawn(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the target starts");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
        Self { child, stdout }
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a pid")
    }

    /// The next line that it prints, without the end of the line; `None` at the end.
    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line).expect("the target's output is UTF-8");
        (read > 0).then(|| line.trim_end().to_owned())
    }

    /// Reads lines up to one that is `end`.
    pub fn lines_until(&mut self, end: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            match self.line() {
                Some(line) if line == end => return lines,
                Some(line) => lines.push(line),
                None => panic!("the target ended before {end:?}: {lines:?}"),
            }
        }
    }
}

impl Running {
    /// Closes its stdin and waits, at most 10 s, until it ends by itself.
    pub fn end_by_eof(mut self) {
        drop(self.child.stdin.take());
        for _ in 0..500 {
            if self.child.try_wait().expect("a child").is_some() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("process {} does not end", self.pid());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
