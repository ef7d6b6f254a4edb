//! Options of `record` for many processes, for waiting, and for long runs.

use super::failure::{Failure, code};
use crate::attach::condition::Condition;
use crate::attach::crowd::Selection;
use crate::collect::Rotation;
use crate::ui::units;
use regex_lite::Regex;
use std::path::PathBuf;
use std::time::Duration;

/// Which processes, if it is not a single one.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Which {
    /// This process and all its descendants, present and future, as far as they are Python.
    #[arg(long, value_name = "PID", conflicts_with = "process")]
    pub tree: Option<i32>,

    /// All Python processes of this host, present and future. Best with --match.
    #[arg(long, conflicts_with_all = ["process", "tree"])]
    pub all: bool,

    /// All Python processes of this cgroup and of those below it, present and future: a folder below /sys/fs/cgroup, or a path as
    /// /proc/PID/cgroup shows it.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["process", "tree", "all"])]
    pub cgroup: Option<PathBuf>,

    /// Of these, only processes whose command line matches this regular expression; alone it means: of all.
    #[arg(long = "match", value_name = "REGEX", conflicts_with = "process")]
    pub pattern: Option<Regex>,
}

/// When it is attached to.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct When {
    /// Attach only when the process has this much resident memory: 3GiB.
    #[arg(long, value_name = "BYTES", value_parser = units::parse_size, conflicts_with = "command")]
    pub when_rss: Option<u64>,

    /// Attach only when its resident memory has grown by so much within a time: 100MiB/10m.
    #[arg(long, value_name = "BYTES/TIME", value_parser = parse_growth, conflicts_with = "command")]
    pub when_growth: Option<(u64, Duration)>,
}

/// What is said, and where.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Told {
    /// Append a line of JSON for every attach and detach to this file (who, when, which process), instead of saying so on standard error.
    #[arg(long, value_name = "FILE")]
    pub audit: Option<PathBuf>,

    /// How lines on standard error look.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Long recordings.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Long {
    /// Begin new files (BASE.2, BASE.3 …) after this time or size, or both: 1h, 256MiB, 1h/256MiB. Each begins with what is alive, and
    /// is complete by itself. SIGHUP then begins new files, too, instead of ending the recording.
    #[arg(long, value_name = "TIME/BYTES", value_parser = parse_rotate)]
    pub rotate: Option<Rotate>,

    /// With --rotate: keep so many recordings in a row, the present one included; older files are removed.
    #[arg(long, value_name = "N", requires = "rotate", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: Option<u32>,

    /// Keep all files of a process together below this size; older ones are removed.
    #[arg(long, value_name = "BYTES", value_parser = units::parse_size)]
    pub max_disk: Option<u64>,

    /// What is said.
    #[command(flatten)]
    pub told: Told,
}

/// How lines on standard error look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// A JSON object a line: time, level, message.
    Json,
}

/// When new files begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rotate {
    every: Option<Duration>,
    bytes: Option<u64>,
}

impl Which {
    /// Which processes are meant, if it is not a single one.
    ///
    /// # Errors
    /// When there is no such cgroup, or options do not go together.
    pub fn selection(&self) -> Result<Option<Selection>, Failure> {
        let found = match (self.tree, self.all, &self.cgroup) {
            (Some(root), ..) => Selection::Tree(root),
            (None, true, _) => Selection::All,
            (None, false, Some(path)) => Selection::cgroup(path).map_err(|text| Failure::new(code::USAGE, text))?,
            // A pattern alone means: of all.
            (None, false, None) if self.pattern.is_some() => Selection::All,
            (None, false, None) => return Ok(None),
        };
        Ok(Some(found))
    }

    /// They, for people; `None` if a single one is meant.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        let what = match (self.tree, self.all, &self.cgroup, &self.pattern) {
            (Some(root), ..) => format!("the tree of {root}"),
            (.., Some(path), _) => format!("the Python processes of {}", path.display()),
            (None, true, ..) | (.., Some(_)) => "all Python processes".to_owned(),
            _ => return None,
        };
        let like = self.pattern.as_ref().map(|pattern| format!(" like {pattern}"));
        Some(what + &like.unwrap_or_default())
    }
}

impl When {
    /// What is waited for.
    #[must_use]
    pub fn condition(&self) -> Condition {
        Condition {
            rss: self.when_rss,
            growth: self.when_growth,
        }
    }
}

impl Long {
    /// How files are rotated.
    #[must_use]
    pub fn rotation(&self) -> Rotation {
        let rotate = self.rotate.unwrap_or_default();
        Rotation {
            every: rotate.every,
            bytes: rotate.bytes,
            keep: self.keep,
            disk: self.max_disk,
        }
    }
}

impl Told {
    /// Makes lines on standard error, and those of the audit, what was asked for.
    ///
    /// # Errors
    /// When the audit file cannot be written.
    pub fn apply(&self) -> Result<(), Failure> {
        crate::ui::output::notes_as_json(self.log_format == LogFormat::Json);
        match &self.audit {
            Some(path) => crate::ui::audit::to_file(path).map_err(Failure::failed),
            None => Ok(()),
        }
    }
}

fn parse_growth(text: &str) -> Result<(u64, Duration), String> {
    let (bytes, time) = text.split_once('/').ok_or("must be BYTES/TIME, such as 100MiB/10m")?;
    let bytes = units::parse_size(bytes).map_err(|error| error.to_string())?;
    let time = units::parse_duration(time).map_err(|error| error.to_string())?;
    if bytes == 0 || time.is_zero() {
        return Err("must both be more than nothing".to_owned());
    }
    Ok((bytes, time))
}

fn parse_rotate(text: &str) -> Result<Rotate, String> {
    let mut found = Rotate::default();
    for part in text.split('/') {
        // A bare number could be either.
        let is_bare = part.trim().parse::<f64>().is_ok();
        match (units::parse_duration(part), units::parse_size(part)) {
            // `10m` is ten minutes.
            (Ok(time), _) if !is_bare && found.every.is_none() && time >= LEAST_ROTATE => found.every = Some(time),
            (Err(_), Ok(bytes)) if !is_bare && found.bytes.is_none() && bytes >= LEAST_BYTES => {
                found.bytes = Some(bytes)
            }
            _ => return Err("must be a time from 1s, a size from 64KiB, or both: 1h, 256MiB, 1h/256MiB".to_owned()),
        }
    }
    Ok(found)
}

const LEAST_ROTATE: Duration = Duration::from_secs(1);
const LEAST_BYTES: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_parsed() {
        assert_eq!(parse_growth("100MiB/10m"), Ok((100 << 20, Duration::from_secs(600))));
        assert!(parse_growth("100MiB").is_err() && parse_growth("0/10m").is_err() && parse_growth("1/x").is_err());
        let rotate = |every, bytes| Ok(Rotate { every, bytes });
        let hour = Some(Duration::from_secs(3600));
        assert_eq!(parse_rotate("1h/256MiB"), rotate(hour, Some(256 << 20)));
        assert_eq!(parse_rotate("256MiB/1h"), rotate(hour, Some(256 << 20)));
        assert_eq!(parse_rotate("1h"), rotate(hour, None));
        assert_eq!(parse_rotate("1GiB"), rotate(None, Some(1 << 30)));
        for wrong in ["", "5", "1h/2h", "1h/5", "1KiB", "10ms", "1h/1GiB/2GiB"] {
            assert!(parse_rotate(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_rotate("10m"), rotate(Some(Duration::from_secs(600)), None));
    }
}
