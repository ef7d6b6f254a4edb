//! Who has attached to what, and when: a line for every attach and detach, on standard error or in a file.
//!
//! In a file it is a line of JSON, appended in one write, so that several pyheaps can share it; it is opened for each line, so
//! that it may be rotated by anybody. When it cannot be written, an attach is refused before it begins.

use crate::profile::place;
use crate::ui::output::note;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// The file; standard error without one.
static FILE: OnceLock<PathBuf> = OnceLock::new();

/// Lets audit lines go to `path` from now on.
///
/// # Errors
/// With a sentence, when nothing can be appended there.
pub fn to_file(path: &Path) -> Result<(), String> {
    append(path, "").map_err(|error| format!("cannot write the audit file {}: {error}", path.display()))?;
    let _ = FILE.set(path.to_owned());
    Ok(())
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let place = place::writable(path, true)?;
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o640)
        .open(place)?;
    file.write_all(line.as_bytes())
}

/// What was done to whom.
#[derive(Debug, Clone)]
pub struct Deed<'a> {
    /// `attach` or `detach`.
    pub what: &'static str,
    /// The process.
    pub pid: i32,
    /// Its command line.
    pub command: &'a str,
    /// Why, or how it ended, if that is to be said.
    pub why: Option<&'a str>,
}

/// Leaves a line on it.
pub fn leave(deed: &Deed<'_>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let time = timestamp(now.as_secs());
    let who = Who::now();
    let Some(path) = FILE.get() else {
        let Deed {
            what,
            pid,
            command,
            why,
        } = deed;
        let why = why.map_or_else(String::new, |why| format!(" ({why})"));
        let command = crate::report::human::clean(command);
        note(&format!(
            "audit: {time} {what} {pid}{why} by {} (pyheap {}): {command}",
            who.name(),
            who.pid
        ));
        return;
    };
    let line = serde_json::json!({
        "time": time,
        "event": deed.what,
        "pid": deed.pid,
        "command": deed.command,
        "why": deed.why,
        "uid": who.uid,
        "user": who.user,
        "login": who.login,
        "pyheap_pid": who.pid,
        "pyheap_version": crate::VERSION,
    });
    if let Err(error) = append(path, &format!("{line}\n")) {
        note(&format!(
            "warning: cannot write the audit file {}: {error}",
            path.display()
        ));
        note(&format!("audit: {line}"));
    }
}

/// Who we are.
struct Who {
    pid: u32,
    uid: u32,
    user: Option<String>,
    /// Who has logged in, if that is another one: who used sudo.
    login: Option<String>,
}

impl Who {
    fn now() -> Self {
        let name = |uid: u32| {
            let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid));
            user.ok().flatten().map(|user| user.name)
        };
        let uid = nix::unistd::getuid().as_raw();
        // The kernel's own note of it, which no program can change; -1 where nobody has logged in.
        let login = std::fs::read_to_string("/proc/self/loginuid").unwrap_or_default();
        let login = login
            .trim()
            .parse::<u32>()
            .ok()
            .filter(|login| *login != u32::MAX && *login != uid);
        Self {
            pid: std::process::id(),
            uid,
            user: name(uid),
            login: login.map(|login| name(login).unwrap_or_else(|| login.to_string())),
        }
    }

    fn name(&self) -> String {
        let user = self
            .user
            .as_ref()
            .map_or_else(|| format!("uid {}", self.uid), Clone::clone);
        match &self.login {
            Some(login) => format!("{user}, logged in as {login}"),
            None => user,
        }
    }
}

/// Seconds since 1970 as `2026-01-31T12:00:00Z`.
#[must_use]
pub fn timestamp(seconds: u64) -> String {
    let text = crate::report::info::utc(seconds as f64);
    text.replace(" UTC", "Z").replace(' ', "T")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(timestamp(1_769_860_800), "2026-01-31T12:00:00Z");
        assert_eq!(timestamp(4_107_542_399), "2100-02-28T23:59:59Z");
        assert_eq!(timestamp(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
