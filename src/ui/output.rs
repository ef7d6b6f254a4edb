//! Writing to standard output, which may be a pipe that somebody closes.

use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

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

/// Whether lines on standard error are JSON.
static AS_JSON: AtomicBool = AtomicBool::new(false);

/// Makes lines on standard error JSON objects, or text.
pub fn notes_as_json(yes: bool) {
    AS_JSON.store(yes, Ordering::Relaxed);
}

/// Whether they are.
#[must_use]
pub fn are_notes_json() -> bool {
    AS_JSON.load(Ordering::Relaxed)
}

/// Writes a line to standard error, in one piece: others may write there, too. There is nobody to tell if that fails.
pub fn note(text: &str) {
    let line = if are_notes_json() {
        as_json(text)
    } else {
        text.to_owned()
    };
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// A line as JSON; its first word tells how grave it is.
fn as_json(text: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let words = [
        ("error: ", "error"),
        ("warning: ", "warning"),
        ("audit: ", "audit"),
        ("note: ", "info"),
    ];
    let found = words
        .iter()
        .find_map(|(word, level)| Some((text.strip_prefix(word)?, *level)));
    let (message, level) = found.unwrap_or((text, "info"));
    let time = super::audit::timestamp(now.as_secs());
    serde_json::json!({ "time": time, "level": level, "message": message }).to_string()
}

fn quiet(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_json_has_its_level() {
        let line: serde_json::Value = serde_json::from_str(&as_json("warning: a \"b\"\nc")).unwrap();
        assert_eq!(
            (&line["level"], &line["message"]),
            (&"warning".into(), &"a \"b\"\nc".into())
        );
        assert!(line["time"].as_str().unwrap().ends_with('Z'));
    }
}
