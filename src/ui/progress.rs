//! A progress line on standard error, for work that takes long enough to ask whether it goes on.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::report::human::count;

/// Work that is done sooner shows nothing.
const QUIET: Duration = Duration::from_millis(500);
/// Time between two lines.
const PAUSE: Duration = Duration::from_millis(100);

/// The line. Shows nothing unless standard error is a terminal.
#[derive(Debug)]
pub struct Bar {
    name: &'static str,
    is_terminal: bool,
    started: Instant,
    shown: Option<Instant>,
}

impl Bar {
    /// Nothing is done yet.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            is_terminal: io::stderr().is_terminal(),
            started: Instant::now(),
            shown: None,
        }
    }

    /// So much of so much is done.
    pub fn show(&mut self, done: u64, all: u64, events: u64) {
        let is_due = self
            .shown
            .map_or(self.started.elapsed() > QUIET, |shown| shown.elapsed() > PAUSE);
        if !self.is_terminal || !is_due {
            return;
        }
        self.shown = Some(Instant::now());
        let percent = 100.0 * done as f64 / all.max(1) as f64;
        let events = count(events as f64);
        let _ = write!(io::stderr(), "\r{}: {percent:3.0} %, {events} events\x1b[K", self.name);
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}
