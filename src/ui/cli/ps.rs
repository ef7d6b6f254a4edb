//! `pyheap ps`: which Python processes there are, and whether pyheap can attach to them.

use crate::attach::candidates::{self, Candidate};
use crate::attach::place::Place;
use crate::attach::process::MemoryUse;
use crate::report::human::{Human, bytes, clean};
use crate::ui::output::{note, to_stdout};
use crate::ui::units;
use regex_lite::Regex;
use serde::Serialize;
use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

/// List all Python processes: where they live, how much memory they have, whether pyheap can attach to them or why not.
///
/// The largest come first, with --watch those that grow most. Nothing is stopped or changed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Look twice, so long apart, and show by how much memory has grown meanwhile.
    #[arg(long, short, value_name = "TIME", value_parser = units::parse_duration, num_args = 0..=1, default_missing_value = "5s")]
    pub watch: Option<Duration>,

    /// Only processes whose command line matches this regular expression.
    #[arg(long = "match", value_name = "REGEX")]
    pub pattern: Option<Regex>,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// A process, as it is shown.
#[derive(Debug, Serialize)]
struct Row {
    pid: i32,
    /// Its number in its own pid namespace; the same outside of containers.
    inside_pid: i32,
    user: String,
    uid: u32,
    #[serde(flatten)]
    place: Place,
    python: Option<String>,
    rss_bytes: u64,
    /// How much it has grown while it was watched.
    growth_bytes: Option<i64>,
    /// For how long it was watched, in seconds.
    watched_seconds: Option<f64>,
    threads: u64,
    age_seconds: Option<f64>,
    attachable: bool,
    why_not: Option<String>,
    recorded_by: Option<u32>,
    command: String,
}

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mut all = candidates::list();
    all.retain(|one| {
        args.pattern
            .as_ref()
            .is_none_or(|pattern| pattern.is_match(&one.whole_command))
    });
    let watched = args.watch.map(|time| watch(&mut all, time));
    let mut users = Users::default();
    let mut rows: Vec<Row> = all
        .into_iter()
        .map(|one| row(one, watched.as_ref(), &mut users))
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse((row.growth_bytes.unwrap_or(0), row.rss_bytes)));
    let text = if args.json {
        serde_json::to_string_pretty(&serde_json::json!({ "processes": rows }))? + "\n"
    } else if rows.is_empty() {
        note("no Python process was found; those of other users are only seen with their rights (sudo)");
        String::new()
    } else {
        render(&rows, watched.is_some())
    };
    Ok(to_stdout(&text)?)
}

/// What two looks have shown.
struct Watched {
    time: Duration,
    /// Resident memory at first, by pid.
    first: BTreeMap<i32, u64>,
}

/// Waits, and takes those who are gone by then away.
fn watch(all: &mut Vec<Candidate>, time: Duration) -> Watched {
    let first = all.iter().map(|one| (one.pid, one.rss_bytes)).collect();
    let begun = Instant::now();
    std::thread::sleep(time);
    all.retain_mut(|one| {
        let now = MemoryUse::of(one.pid).ok().filter(|_| one.id.is_alive());
        one.rss_bytes = now.map_or(one.rss_bytes, |now| now.rss_bytes);
        now.is_some()
    });
    Watched {
        time: begun.elapsed(),
        first,
    }
}

fn row(one: Candidate, watched: Option<&Watched>, users: &mut Users) -> Row {
    let growth = watched.and_then(|watched| {
        let first = i64::try_from(*watched.first.get(&one.pid)?).ok()?;
        Some(i64::try_from(one.rss_bytes).ok()?.saturating_sub(first))
    });
    Row {
        pid: one.pid,
        inside_pid: one.inside_pid,
        user: users.name(one.uid),
        uid: one.uid,
        place: one.place,
        python: one.version.map(|version| version.to_string()),
        rss_bytes: one.rss_bytes,
        growth_bytes: growth,
        watched_seconds: watched.map(|watched| watched.time.as_secs_f64()),
        threads: one.threads,
        age_seconds: one.age.map(|age| age.as_secs_f64()),
        attachable: one.attachable.is_ok(),
        why_not: one.attachable.err(),
        recorded_by: one.recorded_by,
        command: one.command,
    }
}

/// Names of users, each asked for once.
#[derive(Default)]
struct Users(BTreeMap<u32, String>);

impl Users {
    fn name(&mut self, uid: u32) -> String {
        let name = self.0.entry(uid).or_insert_with(|| {
            let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid));
            let name = user.ok().flatten().map(|user| user.name);
            name.unwrap_or_else(|| uid.to_string())
        });
        name.clone()
    }
}

fn render(rows: &[Row], watched: bool) -> String {
    let has_inside = rows.iter().any(|row| row.inside_pid != row.pid);
    let mut heads = vec!["PID"];
    heads.extend(has_inside.then_some("INSIDE"));
    heads.extend(["USER", "WHERE", "PYTHON", "RSS"]);
    heads.extend(watched.then_some("GROWTH/MIN"));
    heads.extend(["THREADS", "AGE", "ATTACH", "COMMAND"]);
    let mut table = vec![heads.into_iter().map(str::to_owned).collect::<Vec<String>>()];
    let mut reasons = Vec::new();
    for row in rows {
        let mut cells = vec![row.pid.to_string()];
        cells.extend(has_inside.then(|| row.inside_pid.to_string()));
        cells.push(clean(&row.user).into_owned());
        cells.push(cut(&row.place.short(), 28));
        cells.push(row.python.clone().unwrap_or_else(|| "?".to_owned()));
        cells.push(bytes(row.rss_bytes as f64));
        if watched {
            cells.push(growth(row));
        }
        cells.push(row.threads.to_string());
        let age = row.age_seconds.map(|seconds| Duration::from_secs(seconds as u64));
        cells.push(age.map_or_else(|| "?".to_owned(), |age| Human(age).to_string()));
        cells.push(match (&row.why_not, row.recorded_by) {
            (Some(why), _) => {
                reasons.push(format!("{}: {}", row.pid, clean(why)));
                "no".to_owned()
            }
            (None, Some(owner)) => format!("recorded by {owner}"),
            (None, None) => "yes".to_owned(),
        });
        cells.push(clean(&row.command).into_owned());
        table.push(cells);
    }
    let mut text = columns(&table);
    for reason in reasons {
        text += &format!("{reason}\n");
    }
    text
}

/// Growth a minute, as it was while it was watched.
fn growth(row: &Row) -> String {
    let (Some(growth), Some(seconds)) = (row.growth_bytes, row.watched_seconds) else {
        return "?".to_owned();
    };
    let rate = growth as f64 / seconds.max(1e-3) * 60.0;
    let sign = if growth < 0 { "-" } else { "+" };
    format!("{sign}{}", bytes(rate.abs()))
}

/// At most `most` characters, of a cgroup's or pod's name the last ones: those differ.
fn cut(text: &str, most: usize) -> String {
    let clean = clean(text);
    let len = clean.chars().count();
    if len <= most {
        return clean.into_owned();
    }
    let tail: String = clean.chars().skip(len - most + 1).collect();
    format!("…{tail}")
}

/// Cells under one another, the last one as it is.
pub(super) fn columns(table: &[Vec<String>]) -> String {
    let count = table.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = table.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for row in table {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let pad = width.saturating_sub(cell.chars().count());
            line += cell;
            line += &" ".repeat(pad + 2);
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_one_another() {
        let row = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
        let text = columns(&[row(&["PID", "NAME"]), row(&["4242", "ä"]), row(&["1", ""])]);
        assert_eq!(text, "PID   NAME\n4242  ä\n1\n");
        assert_eq!(cut("abcdef", 4), "…def");
        assert_eq!(cut("abc", 4), "abc");
    }
}
