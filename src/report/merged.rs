//! Several processes as one: their rows and leaks added up, with how far they are spread.
//!
//! Estimates of different processes are independent, so their errors add up as squares: the distance from an estimate to the
//! lower limit of its interval, and to the upper one, each for itself.

use super::human::{bytes, clean, count};
use super::leaks::{FALSE_ALARM, Frame, Overall, Report, Verdict};
use super::top::{Site, TopRow, interval_text};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// An estimate with its 95 % interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Sum {
    /// The estimate.
    pub value: f64,
    /// Lower limit.
    pub low: f64,
    /// Upper limit.
    pub high: f64,
    #[serde(skip)]
    squares: (f64, f64),
}

impl Sum {
    /// Adds an estimate with its limits.
    pub fn add(&mut self, value: f64, (low, high): (f64, f64)) {
        self.value += value;
        self.squares.0 += (value - low).powi(2);
        self.squares.1 += (high - value).powi(2);
        self.low = self.value - self.squares.0.sqrt();
        self.high = self.value + self.squares.1.sqrt();
    }

    /// Half the width of the interval.
    #[must_use]
    pub fn margin(&self) -> f64 {
        (self.high - self.low) / 2.0
    }
}

/// A row of several processes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What it stands for.
    pub site: Site,
    /// Live bytes of all together.
    pub live_bytes: Sum,
    /// Live objects of all together.
    pub live_objects: f64,
    /// Records that this is made of.
    pub samples: u64,
    /// In how many processes there are any.
    pub processes: usize,
    /// Live bytes in the process that has least of it; 0 where one has none.
    pub least_bytes: f64,
    /// In the process that has most of it.
    pub most_bytes: f64,
}

/// Adds rows up; one list of them for each process. The largest come first.
#[must_use]
pub fn rows(of_each: &[Vec<TopRow>]) -> Vec<Row> {
    let mut found: BTreeMap<&Site, Row> = BTreeMap::new();
    for row in of_each.iter().flatten() {
        let sum = found.entry(&row.site).or_insert_with(|| Row {
            site: row.site.clone(),
            live_bytes: Sum::default(),
            live_objects: 0.0,
            samples: 0,
            processes: 0,
            least_bytes: f64::INFINITY,
            most_bytes: 0.0,
        });
        sum.live_bytes
            .add(row.live_bytes, (row.live_bytes_low, row.live_bytes_high));
        sum.live_objects += row.live_objects;
        sum.samples += row.samples;
        sum.processes += 1;
        sum.least_bytes = sum.least_bytes.min(row.live_bytes);
        sum.most_bytes = sum.most_bytes.max(row.live_bytes);
    }
    let mut rows: Vec<Row> = found.into_values().collect();
    for row in &mut rows {
        if row.processes < of_each.len() {
            row.least_bytes = 0.0;
        }
    }
    rows.sort_by(|a, b| {
        b.live_bytes
            .value
            .total_cmp(&a.live_bytes.value)
            .then_with(|| a.site.cmp(&b.site))
    });
    rows
}

/// The table of the first `limit` rows.
#[must_use]
pub fn render_rows(rows: &[Row], processes: usize, limit: usize) -> String {
    let mut text = String::new();
    if rows.is_empty() {
        return text;
    }
    let _ = writeln!(
        text,
        "{:>10} {:>21} {:>11} {:>9} {:>21}  SITE",
        "LIVE", "95 % INTERVAL", "OBJECTS", "IN", "LEAST – MOST"
    );
    for row in rows.iter().take(limit) {
        let Sum { value, low, high, .. } = row.live_bytes;
        let _ = writeln!(
            text,
            "{:>10} {:>21} {:>11} {:>9} {:>21}  {}",
            bytes(value),
            interval_text(value, row.live_bytes.margin(), low.max(0.0), high, row.samples),
            count(row.live_objects),
            format!("{} of {processes}", row.processes),
            format!("{} – {}", bytes(row.least_bytes), bytes(row.most_bytes)),
            row.site.text(),
        );
    }
    if rows.len() > limit {
        let _ = writeln!(text, "{} more", count((rows.len() - limit) as f64));
    }
    text
}

/// A site that leaks in some processes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Leak {
    /// The innermost line of own code, else the allocating one.
    pub place: Frame,
    /// Growth of all together, in bytes a minute.
    pub growth_bytes_per_min: Sum,
    /// Growth in the slowest of the processes in which it leaks, and in the fastest.
    pub spread_bytes_per_min: (f64, f64),
    /// The processes in which it leaks.
    pub processes: Vec<String>,
}

/// The verdict on several processes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fleet {
    /// In a word.
    pub verdict: Overall,
    /// Processes that were recorded long enough to be judged.
    pub judged: usize,
    /// Those that were not.
    pub too_short: usize,
    /// A leak is named when it was found in so many processes: so many would, by chance, find one that is none in less than 1 % of
    /// all cases.
    pub needed: usize,
    /// Sites that leak.
    pub leaks: Vec<Leak>,
    /// Sites that were found in too few processes to exclude chance.
    pub perhaps: Vec<Leak>,
    /// Growth of the processes of which the verdict is, in bytes a minute, if it is not a leak.
    pub growth_bytes_per_min: Option<f64>,
    /// How many processes have that verdict.
    pub having: usize,
    /// The allocator domains that alone were judged; empty if all that were recorded were.
    pub domains: Vec<String>,
}

/// Judges several processes, each with its name.
#[must_use]
pub fn judge(reports: &[(String, Report)]) -> Fleet {
    let judged: Vec<_> = reports.iter().filter(|(_, report)| report.is_long_enough).collect();
    let needed = needed(judged.len());
    let mut found: BTreeMap<Frame, Leak> = BTreeMap::new();
    for (name, report) in &judged {
        for site in report.leaks.iter().filter(|site| site.verdict == Verdict::Leak) {
            let place = site.own.as_ref().or(site.stack.first()).cloned().unwrap_or_default();
            let leak = found.entry(place.clone()).or_insert_with(|| Leak {
                place,
                growth_bytes_per_min: Sum::default(),
                spread_bytes_per_min: (f64::INFINITY, 0.0),
                processes: Vec::new(),
            });
            let rate = site.growth_bytes_per_min;
            leak.growth_bytes_per_min.add(rate, site.ci95);
            let (least, most) = leak.spread_bytes_per_min;
            leak.spread_bytes_per_min = (least.min(rate), most.max(rate));
            if leak.processes.last() != Some(name) {
                leak.processes.push(name.clone());
            }
        }
    }
    let mut all: Vec<Leak> = found.into_values().collect();
    all.sort_by(|a, b| b.growth_bytes_per_min.value.total_cmp(&a.growth_bytes_per_min.value));
    let (leaks, perhaps): (Vec<_>, Vec<_>) = all.into_iter().partition(|leak| leak.processes.len() >= needed);
    let with = |verdict| judged.iter().filter(move |(_, report)| report.verdict == verdict);
    let other = [Overall::Native, Overall::Fragmentation]
        .into_iter()
        .max_by_key(|verdict| with(*verdict).count())
        .filter(|verdict| with(*verdict).count() >= needed);
    let verdict = match (leaks.is_empty(), other) {
        (false, _) => Overall::Leak,
        (true, Some(other)) => other,
        (true, None) => Overall::NoLeak,
    };
    let rate = |report: &Report| report.rss_growth_bytes.unwrap_or(0.0) / report.elapsed_seconds.max(1e-3) * 60.0;
    Fleet {
        verdict,
        judged: judged.len(),
        too_short: reports.len() - judged.len(),
        needed,
        leaks,
        perhaps,
        growth_bytes_per_min: other.map(|verdict| with(verdict).map(|(_, report)| rate(report)).sum()),
        having: with(verdict).count(),
        domains: reports
            .first()
            .map_or_else(Vec::new, |(_, report)| report.domains.clone()),
    }
}

/// Of `count` processes that do not leak, so many are named as leaking by chance in less than 1 % of all cases.
fn needed(count: usize) -> usize {
    let (p, q) = (FALSE_ALARM, 1.0 - FALSE_ALARM);
    // From the odds that none is named upwards.
    let mut term = q.powi(i32::try_from(count).unwrap_or(i32::MAX));
    let mut below = term;
    for k in 1..=count {
        if 1.0 - below <= FALSE_ALARM + 1e-12 {
            return k;
        }
        term *= (count - k + 1) as f64 / k as f64 * p / q;
        below += term;
    }
    count.max(1)
}

/// The first line: the answer.
#[must_use]
pub fn headline(fleet: &Fleet) -> String {
    let judged = fleet.judged;
    if judged == 0 {
        return format!(
            "too short: none of {} recordings tells what grows; record at least 30s",
            fleet.too_short
        );
    }
    let rate = fleet.growth_bytes_per_min.map_or_else(String::new, bytes);
    match (fleet.verdict, fleet.leaks.first()) {
        (Overall::Leak, Some(worst)) => {
            let more = match fleet.leaks.len() {
                1 => String::new(),
                sites => format!("; {sites} sites leak"),
            };
            format!("leak: {}{more}", describe(worst, judged))
        }
        (Overall::Native, _) => format!(
            "native: {} of {judged} processes grow, by {rate} a minute together, and the allocators that were recorded do not hold it",
            fleet.having
        ),
        (Overall::Fragmentation, _) => format!(
            "fragmentation: {} of {judged} processes grow, by {rate} a minute together, as Python's heap has been that much larger \
             meanwhile",
            fleet.having
        ),
        _ if !fleet.domains.is_empty() => format!(
            "no leak: nothing grows steadily beyond chance in {judged} processes, in {}",
            fleet.domains.join(", ")
        ),
        _ => format!("no leak: nothing grows steadily beyond chance in {judged} processes"),
    }
}

/// `app.py:31 f grows by 12.3 MiB ± 1.0 MiB a minute, in 4 of 4 processes (2.9 MiB to 3.3 MiB each)`.
fn describe(leak: &Leak, judged: usize) -> String {
    let Frame { file, line, function } = &leak.place;
    let function = function
        .as_ref()
        .map_or_else(String::new, |name| format!(" {}", clean(name)));
    let place = if file.is_empty() {
        "(no Python stack)".to_owned()
    } else {
        format!("{}:{line}{function}", clean(file))
    };
    let (least, most) = leak.spread_bytes_per_min;
    format!(
        "{place} grows by {} ± {} a minute, in {} of {judged} processes ({} to {} each)",
        bytes(leak.growth_bytes_per_min.value),
        bytes(leak.growth_bytes_per_min.margin()),
        leak.processes.len(),
        bytes(least),
        bytes(most),
    )
}

/// All of it, at most `limit` sites.
#[must_use]
pub fn render(fleet: &Fleet, limit: usize) -> String {
    let mut text = headline(fleet) + "\n";
    for leak in fleet.leaks.iter().skip(1).take(limit.saturating_sub(1)) {
        let _ = writeln!(text, "leak: {}", describe(leak, fleet.judged));
    }
    for leak in fleet.perhaps.iter().take(limit) {
        let names = leak.processes.join(", ");
        let _ = writeln!(text, "perhaps: {}: {}", describe(leak, fleet.judged), clean(&names));
    }
    if !fleet.perhaps.is_empty() {
        let _ = writeln!(
            text,
            "note: of {} processes, {} must agree before chance is excluded; look at those named, or record longer",
            fleet.judged, fleet.needed
        );
    }
    if fleet.too_short > 0 && fleet.judged > 0 {
        let _ = writeln!(text, "note: {} recordings are too short to be judged", fleet.too_short);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_many_may_be_chance() {
        let counts = [0, 1, 2, 4, 15, 16, 32, 44, 45, 256];
        assert_eq!(counts.map(needed), [1, 1, 2, 2, 2, 3, 3, 3, 4, 8]);
    }

    #[test]
    fn errors_add_up_as_squares() {
        let mut sum = Sum::default();
        sum.add(100.0, (97.0, 106.0));
        sum.add(100.0, (96.0, 108.0));
        assert_eq!((sum.value, sum.low, sum.high), (200.0, 195.0, 210.0));
    }

    fn row(line: u32, live: f64) -> TopRow {
        TopRow {
            live_bytes: live,
            live_bytes_margin: 1.0,
            live_bytes_low: live - 1.0,
            live_bytes_high: live + 1.0,
            share: 0.0,
            live_objects: 1.0,
            live_objects_margin: 0.0,
            allocated_bytes: 0.0,
            allocated_objects: 0.0,
            samples: 100,
            site: Site {
                file: Some("a.py".to_owned()),
                line: Some(line),
                ..Site::default()
            },
            types: Vec::new(),
        }
    }

    #[test]
    fn rows_are_added_and_their_spread_is_kept() {
        let found = rows(&[vec![row(1, 10.0), row(2, 500.0)], vec![row(1, 30.0)]]);
        let short: Vec<_> = found
            .iter()
            .map(|row| {
                (
                    row.site.line,
                    row.live_bytes.value,
                    row.processes,
                    row.least_bytes,
                    row.most_bytes,
                )
            })
            .collect();
        assert_eq!(short, [(Some(2), 500.0, 1, 0.0, 500.0), (Some(1), 40.0, 2, 10.0, 30.0)]);
        assert!(
            render_rows(&found, 2, 1).contains("1 of 2"),
            "{}",
            render_rows(&found, 2, 1)
        );
    }
}
