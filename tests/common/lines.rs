//! The lines of a pipe, with deadlines.

use std::io::{BufRead as _, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Reads a pipe on a thread of its own, so that the writer never blocks on us.
pub struct Lines {
    name: String,
    incoming: Receiver<String>,
    /// Everything that was read, for the message of a failure.
    pub seen: Vec<String>,
}

impl Lines {
    pub fn new(name: &str, pipe: impl Read + Send + 'static) -> Lines {
        let (sender, incoming) = channel();
        std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
                if sender.send(text).is_err() {
                    return;
                }
                line.clear();
            }
        });
        Lines {
            name: name.to_owned(),
            incoming,
            seen: Vec::new(),
        }
    }

    /// The next line that is wanted; `Err` tells what came instead.
    pub fn wait_for(
        &mut self,
        what: &str,
        deadline: Duration,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<String, String> {
        let end = Instant::now() + deadline;
        loop {
            let why = match self
                .incoming
                .recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if wanted(&line) {
                        return Ok(line);
                    }
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => format!("not within {deadline:?}"),
                Err(RecvTimeoutError::Disconnected) => "the pipe was closed".to_owned(),
            };
            return Err(format!(
                "{}: {what}: {why}; it said:\n{}",
                self.name,
                self.seen.join("\n")
            ));
        }
    }

    /// What has come until now, without waiting.
    pub fn poll(&mut self) -> &[String] {
        self.seen.extend(self.incoming.try_iter());
        &self.seen
    }

    /// Everything up to the end of the pipe (or the deadline: a grandchild may hold it open).
    pub fn all(&mut self, deadline: Duration) -> String {
        let _ = self.wait_for("its end", deadline, |_| false);
        self.text()
    }

    pub fn text(&self) -> String {
        self.seen.iter().map(|line| format!("{line}\n")).collect()
    }
}
