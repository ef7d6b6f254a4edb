//! Writing to standard output, which may be a pipe that somebody closes.

use std::io::{self, ErrorKind, Write};

/// Writes `text` to standard output. A closed pipe (`pyheap top run | head`) is no error: whoever read has enough.
pub fn to_stdout(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    quiet(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// Writes `text` to standard output; false if nobody reads it any more.
pub fn to_reader(text: &str) -> io::Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        other => other.map(|()| true),
    }
}

/// The same, for what is too long to be held in memory. What fails because of the closed pipe ends the writing.
pub fn to_stdout_with(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut stdout = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
    quiet(write(&mut stdout).and_then(|()| stdout.flush()))
}

/// Writes a line to standard error, in one piece: recordings of children write there, too. There is nobody to tell if that
/// fails.
pub fn note(text: &str) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

fn quiet(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
