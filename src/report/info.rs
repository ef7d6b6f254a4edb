//! What a profile is: target, times, sizes, what was lost, what is wrong with it.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::human::{Human, bytes, clean, count, exact_bytes};
use crate::profile::facts::{End, Facts, Losses, MemorySample};
use crate::profile::model::Live;

/// A file of the profile.
#[derive(Debug, Clone, Serialize)]
pub struct FileInfo {
    /// Its path.
    pub path: PathBuf,
    /// Its length.
    pub len_bytes: u64,
}

/// All that `pyheap info` says of a profile. Estimates are named so; margins are half the width of the 95 % interval.
#[derive(Debug, Clone, Serialize)]
pub struct Info {
    /// The files that are there.
    pub files: Vec<FileInfo>,
    /// About the target; `None` without a sidecar.
    pub target: Option<Facts>,
    /// How long a thread of it stood still while the hooks were taken out, in microseconds.
    pub detach_stop_micros: Option<u64>,
    /// Start, in seconds since 1970.
    pub start_seconds: f64,
    /// Length of the recording.
    pub elapsed_seconds: f64,
    /// Mean distance of samples in bytes; 1 if everything is recorded; `None` if only a table is known.
    pub period_bytes: Option<u64>,
    /// Ranges in the sampling table.
    pub sampling_ranges: usize,
    /// Events in the file.
    pub events: u64,
    /// Those that are allocations.
    pub allocations: u64,
    /// Stack traces.
    pub traces: u32,
    /// Snapshots in the digest, if there is one.
    pub digest_snapshots: Option<usize>,
    /// The moment of what is said to be alive: the end, unless another was asked for.
    pub live_at_seconds: f64,
    /// Live at that moment, by estimate; of what was asked for.
    pub estimated_live_bytes: f64,
    /// Margin of that.
    pub estimated_live_bytes_margin: f64,
    /// Live objects then, by estimate.
    pub estimated_live_objects: f64,
    /// Margin of that.
    pub estimated_live_objects_margin: f64,
    /// Bytes allocated until then, by estimate.
    pub estimated_allocated_bytes: f64,
    /// The target's memory at first and at last.
    pub memory: Option<(MemorySample, MemorySample)>,
    /// What was lost, by reason.
    pub losses: Losses,
    /// When and why it ended; `None` if it still runs, was killed, or there is no sidecar.
    pub end: Option<End>,
    /// Whether the last event is cut, as in a recording that goes on.
    pub is_cut: bool,
    /// What is wrong with the files.
    pub warnings: Vec<String>,
}

impl Info {
    /// Takes over the estimates of all that is alive.
    pub fn set_live(&mut self, total: &Live) {
        self.estimated_live_bytes = total.bytes;
        self.estimated_live_bytes_margin = total.bytes_margin();
        self.estimated_live_objects = total.objects;
        self.estimated_live_objects_margin = total.objects_margin();
        self.estimated_allocated_bytes = total.alloc_bytes;
    }

    /// How the profile was sampled.
    pub fn sampling(&self) -> String {
        describe_sampling(self.period_bytes, self.sampling_ranges)
    }

    /// The text of `pyheap info`: what is alive first, then a line for each fact.
    pub fn render(&self) -> String {
        let mut text = format!(
            "{} ± {} live in {} ± {} objects after {}\n",
            bytes(self.estimated_live_bytes),
            bytes(self.estimated_live_bytes_margin),
            count(self.estimated_live_objects),
            count(self.estimated_live_objects_margin),
            Human(Duration::try_from_secs_f64(self.live_at_seconds).unwrap_or_default()),
        );
        for (name, value) in self.lines() {
            let _ = writeln!(text, "{name:<10} {}", clean(&value));
        }
        text
    }

    /// Its facts, each with its name. Values are not yet [`clean`].
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let target = self.target.as_ref();
        let mut lines = target.map_or_else(Vec::new, |target| target_lines(target, self.detach_stop_micros));
        let mut line = |name, value| lines.push((name, value));
        line("start", utc(self.start_seconds));
        line("sampling", self.sampling());
        let frees = self.events - self.allocations;
        let (allocations, frees) = (count(self.allocations as f64), count(frees as f64));
        line("events", format!("{allocations} allocations, {frees} frees"));
        line("traces", count(f64::from(self.traces)));
        line("allocated", format!("{} in all", bytes(self.estimated_allocated_bytes)));
        if let Some((first, last)) = &self.memory {
            let (first, last) = (bytes(first.rss as f64), bytes(last.rss as f64));
            line("rss", format!("{first} at first, {last} at last"));
        }
        if self.target.is_some() {
            line("lost", describe_losses(&self.losses));
        }
        let end = match &self.end {
            Some(end) => end.describe(),
            None if self.target.is_some() => "not recorded: it still runs, or pyheap was killed".to_owned(),
            None => "not recorded: there is no sidecar (._hpx)".to_owned(),
        };
        line("end", end);
        if let Some(snapshots) = self.digest_snapshots {
            line("digest", format!("{} snapshots", count(snapshots as f64)));
        }
        for file in &self.files {
            let length = bytes(file.len_bytes as f64);
            line("file", format!("{} ({length})", file.path.display()));
        }
        for warning in &self.warnings {
            line("warning", warning.clone());
        }
        lines
    }
}

fn target_lines(target: &Facts, detach_stop_micros: Option<u64>) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    let mut line = |name, value: String| {
        if !value.is_empty() {
            lines.push((name, value));
        }
    };
    let pid = target.pid.map(|pid| format!("pid {pid}")).unwrap_or_default();
    let host = target
        .host
        .as_ref()
        .map(|host| format!(" on {host}"))
        .unwrap_or_default();
    line("target", format!("{pid}{host}"));
    line("command", target.cmdline.join(" "));
    line("exe", target.exe.clone().unwrap_or_default());
    line("python", target.python.clone().unwrap_or_default());
    line("libc", target.libc.clone().unwrap_or_default());
    line("domains", target.domains.join(", "));
    let stops = [(target.attach_stop_micros, "attach"), (detach_stop_micros, "detach")];
    let stops: Vec<String> = stops
        .iter()
        .filter_map(|(micros, what)| micros.map(|micros| format!("{micros} µs to {what}")))
        .collect();
    line("stopped", stops.join(", "));
    line("pyheap", target.pyheap_version.clone().unwrap_or_default());
    for (name, value) in &target.more {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        lines.push(("also", format!("{name} = {text}")));
    }
    lines
}

/// How a profile was sampled, for people.
pub fn describe_sampling(period_bytes: Option<u64>, ranges: usize) -> String {
    match period_bytes {
        Some(0 | 1) => "every allocation".to_owned(),
        Some(period) => format!("one sample per {}", exact_bytes(period)),
        None if ranges == 0 => "every allocation".to_owned(),
        None => format!("by a table of {ranges} sizes"),
    }
}

/// What was lost, for people.
pub fn describe_losses(losses: &Losses) -> String {
    let counts = losses.0.iter().filter(|(_, count)| **count > 0);
    let texts: Vec<_> = counts
        .map(|(name, lost)| format!("{} {name}", count(*lost as f64)))
        .collect();
    if texts.is_empty() {
        "nothing".to_owned()
    } else {
        texts.join(", ")
    }
}

/// A time in the calendar, without a time zone database: UTC.
pub(crate) fn utc(seconds: f64) -> String {
    let since = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_secs();
    let (days, rest) = (since / 86_400, since % 86_400);
    // Howard Hinnant's civil_from_days: years begin in March, so that the leap day is the last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calendar() {
        assert_eq!(utc(0.0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(1_600_000_000.25), "2020-09-13 12:26:40 UTC");
        assert_eq!(utc(951_782_400.0), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(4_107_542_399.0), "2100-02-28 23:59:59 UTC");
        assert_eq!(utc(f64::NAN), "1970-01-01 00:00:00 UTC");
    }

    #[test]
    fn losses_and_sampling() {
        assert_eq!(describe_losses(&Losses::default()), "nothing");
        let losses = Losses([("frees_late".to_owned(), 0), ("samples_dropped".to_owned(), 1200)].into());
        assert_eq!(describe_losses(&losses), "1,200 samples_dropped");
        assert_eq!(describe_sampling(Some(131_072), 9), "one sample per 128 KiB");
        assert_eq!(describe_sampling(None, 2), "by a table of 2 sizes");
    }
}
