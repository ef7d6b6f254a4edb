//! Answers made of what is known of the processes. All of it is work for one thread that nobody's records wait for.

use super::heap::{Heap, Span};
use super::route::Wanted;
use super::served::{Attached, Served, Set, lock};
use crate::attach::process::ProcessId;
use crate::profile::model::Live;
use crate::report::export::pprof::{End, Labels, Merged, comments, gzip};
use crate::report::export::{Export, Metric};
use crate::report::human::{Human, clean};
use crate::report::info::utc;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Stacks that `debug=1` shows.
const TEXT_STACKS: usize = 1000;
/// A heap that was held for longer than this is left alone for as long again.
const LONG_HELD: Duration = Duration::from_millis(2);

/// What goes back to a client.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Content type.
    pub kind: &'static str,
    /// Since when allocations were seen, where the answer depends on that.
    pub since: Option<String>,
    /// The content.
    pub body: Vec<u8>,
}

impl Answer {
    /// Text.
    #[must_use]
    pub fn text(status: u16, text: impl Into<String>) -> Self {
        Self {
            status,
            kind: "text/plain; charset=utf-8",
            since: None,
            body: text.into().into_bytes(),
        }
    }
}

/// The sums of each process at a moment, and of which attach they are.
#[derive(Debug, Default)]
pub struct Before {
    sums: HashMap<ProcessId, (u64, Vec<Live>)>,
    /// When they were taken.
    pub at: Option<SystemTime>,
}

impl Before {
    /// The sums now.
    #[must_use]
    pub fn now(served: &[Arc<Served>]) -> Self {
        let sums = served.iter().filter_map(|served| {
            let attached = served.attached()?;
            let sums = held(&attached, Heap::sums);
            Some((served.id, (attached.times, sums)))
        });
        Self {
            sums: sums.collect(),
            at: Some(SystemTime::now()),
        }
    }

    fn of(&self, served: &Served, attached: &Attached) -> Option<&[Live]> {
        let (times, sums) = self.sums.get(&served.id)?;
        (*times == attached.times).then_some(sums.as_slice())
    }
}

/// Does something with the heap while nobody changes it. What comes from the process meanwhile waits in our memory; so that
/// requests without end cannot hold it up, the heap is left alone afterwards for as long as it was held.
fn held<T>(attached: &Attached, work: impl FnOnce(&Heap) -> T) -> T {
    let begun = Instant::now();
    let done = work(&lock(&attached.heap));
    let time = begun.elapsed();
    if time > LONG_HELD {
        std::thread::sleep(time);
    }
    done
}

/// What the numbers of a profile are of.
#[derive(Debug, Clone, Copy)]
pub enum Of<'a> {
    /// What is alive now, and what was allocated since the attach.
    Now,
    /// What has changed since then.
    Change(&'a Before),
    /// What is alive now, and what was allocated since then.
    Pushed(&'a Before),
}

/// A pprof profile, not gzipped, of those processes that have hooks.
#[derive(Debug)]
pub struct Profile {
    /// The message.
    pub bytes: Vec<u8>,
    /// Since when allocations were seen.
    pub since: String,
    /// How many processes are in it.
    pub processes: usize,
    /// With [`Of::Pushed`]: the sums at the very moment of the profile, with which the next one begins.
    pub sums: Before,
}

/// Makes a profile.
#[must_use]
pub fn profile(served: &[Arc<Served>], shown_first: &'static str, has_labels: bool, of: Of<'_>) -> Profile {
    let mut merged = Merged::new();
    let now = SystemTime::now();
    let (mut since, mut lines, mut facts_lines) = (Vec::new(), Vec::new(), Vec::new());
    let mut duration = Duration::ZERO;
    let (mut period, mut processes) = (None, 0);
    let mut next = Before::default();
    for one in served {
        let Some(attached) = one.attached() else {
            let why = one.why_not().unwrap_or_else(|| "not attached yet".to_owned());
            lines.push(format!("process {} is not in here: {why}", one.id.pid));
            continue;
        };
        processes += 1;
        let pid = one.id.pid.to_string();
        let age = attached.begun.elapsed();
        let begun = time(attached.since);
        since.push(if served.len() == 1 {
            begun.clone()
        } else {
            format!("{pid} {begun}")
        });
        lines.push(format!(
            "process {pid}: allocations are seen since {begun} ({})",
            Human(age)
        ));
        let (before, is_change) = match of {
            Of::Now => (None, false),
            Of::Change(before) => (Some(before), true),
            Of::Pushed(before) => (Some(before), false),
        };
        let sums = before.map(|before| before.of(one, &attached).unwrap_or_default());
        let from = before.and_then(|before| before.at);
        duration = duration.max(match from {
            Some(at) => now.duration_since(at).unwrap_or_default(),
            None => age,
        });
        if is_change && before.is_some_and(|before| before.of(one, &attached).is_none()) {
            lines.push(format!(
                "process {pid} was attached to meanwhile: all of it counts as change"
            ));
        }
        let add = |heap: &Heap| {
            let span = match sums {
                None => Span::Whole,
                Some(sums) if is_change => Span::Change(sums),
                Some(sums) => Span::Pushed(sums),
            };
            let export = export(heap, &attached, span, age);
            let more = [("pid", pid.as_str())];
            let labels = if has_labels { Labels::More(&more) } else { Labels::None };
            merged.add(&export, labels);
            facts_lines.extend(comments(&export));
            period = period.max(Some(heap.period()));
            if matches!(of, Of::Pushed(_)) {
                next.sums.insert(one.id, (attached.times, heap.sums()));
            }
        };
        held(&attached, add);
    }
    lines.extend(facts_lines);
    // Several processes say much the same.
    let mut known = std::collections::HashSet::new();
    lines.retain(|line| known.insert(line.clone()));
    let bytes = merged.finish(&End {
        time: now.duration_since(UNIX_EPOCH).unwrap_or_default(),
        duration,
        period_bytes: period,
        comments: lines,
        shown_first,
    });
    Profile {
        bytes,
        since: since.join(", "),
        processes,
        sums: Before { at: Some(now), ..next },
    }
}

/// The answer to a request for a profile; `before` are the sums that a difference begins with.
#[must_use]
pub fn answer(served: &[Arc<Served>], wanted: &Wanted, before: Option<&Before>) -> Answer {
    if wanted.is_text {
        return text(served);
    }
    let of = before.map_or(Of::Now, Of::Change);
    let profile = profile(served, wanted.shown_first, wanted.has_labels, of);
    if profile.processes == 0 {
        return unavailable(served);
    }
    match gzip(&profile.bytes) {
        Ok(body) => Answer {
            status: 200,
            kind: "application/octet-stream",
            since: Some(profile.since),
            body,
        },
        Err(error) => Answer::text(500, format!("cannot compress the profile: {error}\n")),
    }
}

/// Nobody has hooks.
#[must_use]
pub fn unavailable(served: &[Arc<Served>]) -> Answer {
    if served.is_empty() {
        return Answer::text(404, "no process is served; / lists those that are\n");
    }
    let why = |one: &Arc<Served>| {
        let why = one.why_not().unwrap_or_else(|| "not attached yet".to_owned());
        format!("process {}: {}\n", one.id.pid, clean(&why))
    };
    Answer::text(503, served.iter().map(why).collect::<String>())
}

fn export<'a>(heap: &'a Heap, attached: &'a Attached, span: Span<'_>, age: Duration) -> Export<'a> {
    let traces = heap.traces(span);
    let mut total = Live::default();
    traces.iter().for_each(|trace| total.add(&trace.live));
    Export {
        name: String::new(),
        start: attached.since.duration_since(UNIX_EPOCH).unwrap_or_default(),
        at: age,
        period_bytes: Some(heap.period()),
        sampling_ranges: 0,
        facts: Some(&attached.facts),
        losses: Some(&attached.losses),
        total,
        traces,
        warnings: Vec::new(),
    }
}

/// `debug=1`: for people, in the form that Go has for them, with names where Go has addresses.
fn text(served: &[Arc<Served>]) -> Answer {
    let (mut out, mut since) = (String::new(), Vec::new());
    for one in served {
        let Some(attached) = one.attached() else { continue };
        let begun = time(attached.since);
        since.push(if served.len() == 1 {
            begun.clone()
        } else {
            format!("{} {begun}", one.id.pid)
        });
        held(&attached, |heap| {
            let age = attached.begun.elapsed();
            let export = export(heap, &attached, Span::Whole, age);
            let values = Metric::ALL.map(|metric| export.whole_signed(metric));
            let sum = |kind: usize| values[kind].iter().sum::<i64>();
            let _ = writeln!(
                out,
                "heap profile: {}: {} [{}: {}] @ heap/{}",
                sum(1),
                sum(0),
                sum(3),
                sum(2),
                heap.period()
            );
            let _ = writeln!(
                out,
                "# process {}: objects: bytes alive [allocated] since {begun} ({}), estimated from samples",
                one.id.pid,
                Human(age)
            );
            let mut order: Vec<usize> = (0..export.traces.len()).collect();
            order.sort_by_key(|place| std::cmp::Reverse(values[0][*place]));
            for place in order.iter().take(TEXT_STACKS) {
                let of = |kind: usize| values[kind][*place];
                let _ = writeln!(out, "{}: {} [{}: {}] @", of(1), of(0), of(3), of(2));
                for frame in export.traces[*place].frames.iter().rev() {
                    let function = clean(frame.function.unwrap_or("?"));
                    let _ = writeln!(out, "#\t{function}\t{}:{}", clean(&frame.file), frame.line);
                }
                out.push('\n');
            }
            if order.len() > TEXT_STACKS {
                let _ = writeln!(out, "# {} smaller stacks are left out", order.len() - TEXT_STACKS);
            }
        });
    }
    if since.is_empty() {
        return unavailable(served);
    }
    Answer {
        since: Some(since.join(", ")),
        ..Answer::text(200, out)
    }
}

/// The command lines, as Go has them: words with zeros between; a line for each of several processes.
#[must_use]
pub fn cmdline(served: &[Arc<Served>]) -> Answer {
    if served.is_empty() {
        return unavailable(served);
    }
    let lines: Vec<_> = served.iter().map(|served| served.command.join("\0")).collect();
    Answer::text(200, lines.join("\n"))
}

/// The page that lists what there is.
#[must_use]
pub fn index(set: &Set, served: &[Arc<Served>]) -> Answer {
    let mut out = String::from(
        "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>pyheap</title>\
         <style>body{font:14px sans-serif;margin:2em}td{padding:.2em 1em .2em 0;vertical-align:top}</style></head><body>\
         <h1>pyheap: heap profiles</h1>",
    );
    if served.is_empty() {
        out += "<p>No process is served at present.</p>";
    }
    out += "<table>";
    for one in served {
        let pid = one.id.pid;
        let state = match one.attached() {
            Some(attached) => format!(
                "allocations are seen since {} ({})",
                time(attached.since),
                Human(attached.begun.elapsed())
            ),
            None => one.why_not().unwrap_or_else(|| "not attached yet".to_owned()),
        };
        let command: String = one.command.join(" ").chars().take(200).collect();
        let _ = write!(
            out,
            "<tr><td>{pid}</td><td><code>{}</code><br>{}</td><td><a href=\"/{pid}/debug/pprof/heap\">heap</a> \
             <a href=\"/{pid}/debug/pprof/heap?debug=1\">as text</a> \
             <a href=\"/{pid}/debug/pprof/heap?seconds=10\">10 s</a> \
             <a href=\"/{pid}/debug/pprof/allocs\">allocs</a> \
             <a href=\"/{pid}/debug/pprof/cmdline\">cmdline</a></td></tr>",
            html(&command),
            html(&state),
        );
    }
    let _ = writeln!(
        out,
        "</table><p>All together: <a href=\"/debug/pprof/heap\">/debug/pprof/heap</a>, \
         <a href=\"/debug/pprof/allocs\">/debug/pprof/allocs</a>; <a href=\"/metrics\">/metrics</a>.</p>\
         <p>Look at them with <code>go tool pprof -http=: http://HOST:PORT/debug/pprof/heap</code>. Numbers are estimates from \
         samples; what was allocated before the attach is not in them.</p><p>pyheap {}, {} connections</p></body></html>",
        html(crate::VERSION),
        set.open(),
    );
    Answer {
        kind: "text/html; charset=utf-8",
        ..Answer::text(200, out)
    }
}

/// Text as HTML shows it.
fn html(text: &str) -> String {
    clean(text)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A moment in the calendar, as RFC 3339 has it.
#[must_use]
pub fn time(at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    utc(seconds as f64).replacen(' ', "T", 1).replace(" UTC", "Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::resolve::Event;
    use crate::collect::tree::NamedFrame;
    use crate::profile::facts::Facts;
    use std::sync::Mutex;

    const EVIL: &str = "</code><script>\u{202e}\"&\n";

    fn served(pid: i32) -> Arc<Served> {
        let id = ProcessId { pid, start_time: 1 };
        let served = Arc::new(Served::new(id, vec!["python3".to_owned(), EVIL.to_owned()]));
        let heap = Arc::new(Mutex::new(Heap::new(1)));
        lock(&heap).events(&[
            Event::Trace(vec![NamedFrame {
                file: EVIL.into(),
                line: 3,
                function: EVIL.into(),
            }]),
            Event::Alloc {
                at: Duration::ZERO,
                trace: 1,
                size: 100,
                born: 0,
                domain: 2,
                thread: 0,
            },
        ]);
        served.attach(heap, Facts::default());
        served
    }

    #[test]
    fn names_of_the_target_are_no_commands() {
        let all = [served(7)];
        let page = String::from_utf8(index(&Set::default(), &all).body).unwrap();
        assert!(
            !page.contains("<script") && page.contains("&lt;/code&gt;&lt;script&gt;\\u{202e}&quot;&amp;\\n"),
            "{page}"
        );
        let text = String::from_utf8(text(&all).body).unwrap();
        let bad = text
            .chars()
            .find(|c| *c != '\n' && *c != '\t' && crate::report::human::is_unsafe(*c));
        assert_eq!((bad, text.lines().count()), (None, 5), "{text}");
    }

    #[test]
    fn who_is_not_attached_to_is_named_and_nobody_is_no_profile() {
        let (here, gone) = (served(7), served(8));
        gone.detach("it has ended", false);
        let profile = profile(&[Arc::clone(&here), Arc::clone(&gone)], "inuse_space", true, Of::Now);
        assert_eq!(profile.processes, 1);
        let text = String::from_utf8_lossy(&profile.bytes).into_owned();
        assert!(text.contains("process 8 is not in here: it has ended"));
        let answer = unavailable(&[gone]);
        assert_eq!(
            (answer.status, answer.body),
            (503, b"process 8: it has ended\n".to_vec())
        );
        assert_eq!(unavailable(&[]).status, 404);
    }

    #[test]
    fn what_was_attached_anew_meanwhile_has_no_before() {
        let one = served(7);
        let before = Before::now(std::slice::from_ref(&one));
        let attached = one.attached().unwrap();
        assert!(before.of(&one, &attached).is_some());
        one.attach(Arc::new(Mutex::new(Heap::new(1))), Facts::default());
        assert!(before.of(&one, &one.attached().unwrap()).is_none());
    }

    #[test]
    fn times_are_as_rfc_3339_has_them() {
        assert_eq!(
            time(UNIX_EPOCH + Duration::from_secs(1_769_860_800)),
            "2026-01-31T12:00:00Z"
        );
    }
}
