//! The live view where there is no terminal: text, or JSON a line, at every interval. Its form is in `docs/live.md`.

use super::rows::{Choice, Line, Lines, lines};
use super::view::margin;
use super::watch::{Picture, Watch};
use crate::profile::facts::Losses;
use crate::profile::interval::of_bytes;
use crate::report::human::{self, Human};
use crate::report::info::describe_losses;
use crate::report::leaks::render::headline;
use crate::report::leaks::{Overall, Report, Site};
use crate::report::top::interval_text;
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;

/// Rows of the table as text, unless more are asked for.
pub const ROWS: usize = 15;

/// What there is to tell beside the picture.
#[derive(Debug)]
pub struct Beside<'a> {
    /// The process.
    pub pid: i32,
    /// The version of its Python.
    pub python: &'a str,
    /// Its command line.
    pub command: &'a str,
    /// Resident bytes at the attach.
    pub rss_first: u64,
    /// And now.
    pub rss: u64,
    /// What was lost.
    pub losses: &'a Losses,
    /// The verdict.
    pub report: &'a Report,
}

/// The first line of the text: the answer.
#[must_use]
pub fn first_line(picture: &Picture, beside: &Beside<'_>) -> String {
    let live = &picture.total.live;
    format!(
        "live since the attach: {} ± {} in {} samples of {}  (RSS {} -> {})",
        human::bytes(live.bytes),
        human::bytes(margin(&picture.total, picture.period)),
        human::count(live.samples as f64),
        human::count(picture.sampled as f64),
        human::bytes(beside.rss_first as f64),
        human::bytes(beside.rss as f64),
    )
}

/// All of it: what is alive, the verdict, the process, the first `rows` lines.
#[must_use]
pub fn text(picture: &Picture, beside: &Beside<'_>, watch: &Watch, rows: usize) -> String {
    let mut text = first_line(picture, beside) + "\n";
    let lost = if beside.losses.is_empty() {
        String::new()
    } else {
        format!("  lost: {}", describe_losses(beside.losses))
    };
    let _ = writeln!(
        text,
        "PID {}  Python {}  attached for {}  {}{lost}",
        beside.pid,
        human::clean(beside.python),
        Human(Duration::from_secs(picture.at.as_secs())),
        human::clean(beside.command),
    );
    if beside.report.is_long_enough {
        let _ = writeln!(text, "{}", headline(beside.report));
    }
    let _ = writeln!(
        text,
        "{:>10} {:>21} {:>7} {:>10}  SITE",
        "LIVE", "95 % INTERVAL", "SHARE", "OBJECTS"
    );
    let Lines { lines, .. } = lines(picture, &Choice::default(), watch);
    for line in lines.iter().filter(|line| line.amount.live.samples > 0).take(rows) {
        let live = &line.amount.live;
        let limits = of_bytes(live.bytes, live.variance, live.samples, picture.period);
        let _ = writeln!(
            text,
            "{:>10} {:>21} {:>7} {:>10}  {}",
            human::bytes(live.bytes),
            interval_text(live.bytes, live.error95(), limits.low, limits.high, live.samples),
            human::share(live.bytes, picture.total.live.bytes),
            human::count(live.objects),
            human::clean(&line.label),
        );
    }
    text
}

/// A line of JSON.
#[derive(Debug, Serialize)]
struct Json<'a> {
    pid: i32,
    python: &'a str,
    elapsed_seconds: f64,
    period_bytes: u64,
    samples: u64,
    samples_per_second: f64,
    live_bytes: f64,
    live_bytes_margin: f64,
    objects: f64,
    rss_first_bytes: u64,
    rss_bytes: u64,
    losses: &'a Losses,
    verdict: Option<Overall>,
    headline: Option<String>,
    window_seconds: f64,
    sites: Vec<JsonSite>,
    leaks: &'a [Site],
}

#[derive(Debug, Serialize)]
struct JsonSite {
    file: String,
    line: u32,
    function: String,
    live_bytes: f64,
    live_bytes_margin: f64,
    objects: f64,
    growth_bytes_per_min: Option<f64>,
    growth_margin: Option<f64>,
    alloc_bytes_per_second: f64,
    age_seconds: Option<f64>,
}

/// The same as one line of JSON.
#[must_use]
pub fn json(picture: &Picture, beside: &Beside<'_>, watch: &Watch, rows: usize) -> String {
    let report = Some(beside.report).filter(|report| report.is_long_enough);
    let Lines { lines, .. } = lines(picture, &Choice::default(), watch);
    let line = Json {
        pid: beside.pid,
        python: beside.python,
        elapsed_seconds: picture.at.as_secs_f64(),
        period_bytes: picture.period,
        samples: picture.sampled,
        samples_per_second: picture.samples_per_second,
        live_bytes: picture.total.live.bytes,
        live_bytes_margin: margin(&picture.total, picture.period),
        objects: picture.total.live.objects,
        rss_first_bytes: beside.rss_first,
        rss_bytes: beside.rss,
        losses: beside.losses,
        verdict: report.map(|report| report.verdict),
        headline: report.map(headline),
        window_seconds: picture.window,
        sites: lines.iter().take(rows).map(|line| site(line, picture)).collect(),
        leaks: &beside.report.leaks[..beside.report.leaks.len().min(rows)],
    };
    // Plain numbers and strings: nothing in it can fail.
    serde_json::to_string(&line).unwrap_or_default() + "\n"
}

fn site(line: &Line, picture: &Picture) -> JsonSite {
    let amount = &line.amount;
    let minutes = Some(picture.window / 60.0).filter(|minutes| *minutes > 0.0);
    let frame = line.frame.as_ref();
    JsonSite {
        file: frame.map_or_else(|| line.label.clone(), |frame| frame.file.to_string()),
        line: frame.map_or(0, |frame| frame.line),
        function: frame.map_or_else(|| line.label.clone(), |frame| frame.function.to_string()),
        live_bytes: amount.live.bytes,
        live_bytes_margin: margin(amount, picture.period),
        objects: amount.live.objects,
        growth_bytes_per_min: minutes.map(|minutes| amount.growth.value / minutes),
        growth_margin: minutes.map(|minutes| amount.growth.margin() / minutes),
        alloc_bytes_per_second: amount.allocated / picture.window.max(1.0),
        age_seconds: amount.age(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::resolve::Event;
    use crate::collect::tree::NamedFrame;
    use crate::report::leaks::OwnCode;

    /// A site that keeps 10 KiB a second for a minute, in a thread with a name.
    #[test]
    fn a_line_of_json_has_the_leaks_as_the_leaks_command_says_them() {
        let mut watch = Watch::new(1, OwnCode::default(), None);
        let frame = NamedFrame {
            file: "app.py".into(),
            line: 12,
            function: "keep".into(),
        };
        watch.events(&[Event::Trace(vec![frame]), Event::Thread(7, "worker".to_owned())]);
        for second in 0..60 {
            watch.events(&[Event::Alloc {
                at: Duration::from_secs(second),
                trace: 1,
                size: 10_240,
                born: second * 1000,
                domain: 2,
                thread: 7,
            }]);
        }
        let at = Duration::from_secs(60);
        let report = watch.judge(at);
        let beside = Beside {
            pid: 1,
            python: "3.12.1",
            command: "python app.py",
            rss_first: 0,
            rss: 0,
            losses: &Losses::default(),
            report: &report,
        };
        let line = |rows| -> serde_json::Value {
            let line = json(&watch.picture(at), &beside, &watch, rows);
            assert!(line.ends_with('\n') && line.lines().count() == 1);
            serde_json::from_str(&line).unwrap()
        };
        let leaks = &line(5)["leaks"];
        assert_eq!(*leaks, serde_json::to_value(&report.leaks).unwrap());
        let leak = &leaks[0];
        assert_eq!(
            (&leak["verdict"], &leak["thread"], &leak["domain"]),
            (&"leak".into(), &"worker".into(), &"obj".into())
        );
        assert_eq!(leak["stack"][0]["function"], "keep");
        assert_eq!(line(0)["leaks"], serde_json::json!([]));
    }
}
