//! pprof's profile.proto, gzipped: for `go tool pprof`, Pyroscope, Parca, Grafana and their like.
//!
//! The schema, to which the field numbers here belong, is proto/profile.proto in <https://github.com/google/pprof>. A
//! profile has Go's four kinds of values, in its order and by its names; `inuse_space` is what a viewer shows first.
//! Values are estimates, already scaled: `period` says how they were sampled and is not to be applied again.
//!
//! Functions are numbered by file and name, locations by function and line. Where a function's name is unknown (a file
//! of the original heapprof) it is called `file:line`, as `pyheap top --by function` does.

use std::collections::HashMap;
use std::io::{self, Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::protobuf::Message;
use super::{Export, Metric, NO_STACK, Numbering, Origin, Trace};
use crate::profile::model::StackFrame;
use crate::report::human::clean;
use crate::report::info::describe_losses;

/// Type, unit and value of each number of a sample.
const VALUES: [(&str, &str, Metric); 4] = [
    ("alloc_objects", "count", Metric::AllocObjects),
    ("alloc_space", "bytes", Metric::AllocBytes),
    ("inuse_objects", "count", Metric::LiveObjects),
    ("inuse_space", "bytes", Metric::LiveBytes),
];

/// The gzipped profile. The time in it is that of the moment, not of the export: the same profile gives the same bytes.
pub fn pprof(export: &Export<'_>) -> io::Result<Vec<u8>> {
    gzip(&message(export))
}

/// `bytes`, gzipped.
pub fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(bytes)?;
    gzip.finish()
}

/// The profile as it is within the gzip.
fn message(export: &Export<'_>) -> Vec<u8> {
    let mut merged = Merged::new();
    let values = VALUES.map(|(_, _, metric)| {
        let whole = export.whole(metric).into_iter();
        whole.map(|value| i64::try_from(value).unwrap_or(i64::MAX)).collect()
    });
    merged.samples(export, &values, Labels::More(&[]));
    merged.finish(&End {
        time: export.start.saturating_add(export.at),
        duration: export.at,
        period_bytes: export.period_bytes,
        comments: comments(export).collect(),
        shown_first: "inuse_space",
    })
}

/// What stands behind the samples of a profile.
#[derive(Debug, Clone, Default)]
pub struct End {
    /// The moment, since 1970.
    pub time: std::time::Duration,
    /// What time the profile is of.
    pub duration: std::time::Duration,
    /// Mean distance of samples, if known.
    pub period_bytes: Option<u64>,
    /// A line each.
    pub comments: Vec<String>,
    /// The kind of value that a viewer shows first.
    pub shown_first: &'static str,
}

/// What each sample says of itself.
#[derive(Debug, Clone, Copy)]
pub enum Labels<'a> {
    /// Nothing: of each combination of labels some engines make a series of its own.
    None,
    /// Its thread, allocator domain and Python, and this.
    More(&'a [(&'a str, &'a str)]),
}

/// A profile made of one export or of several, one process each: their samples have labels that tell them apart.
#[derive(Debug)]
pub struct Merged(Builder);

impl Default for Merged {
    fn default() -> Self {
        Self::new()
    }
}

impl Merged {
    /// Nothing yet.
    pub fn new() -> Self {
        let mut builder = Builder::new();
        for (kind, unit, _) in VALUES {
            let value = builder.value_type(kind, unit);
            builder.profile.message(1, &value);
        }
        Self(builder)
    }

    /// Adds an export whose values may be differences.
    pub fn add(&mut self, export: &Export<'_>, labels: Labels<'_>) {
        let values = VALUES.map(|(_, _, metric)| export.whole_signed(metric));
        self.samples(export, &values, labels);
    }

    fn samples(&mut self, export: &Export<'_>, values: &[Vec<i64>; 4], labels: Labels<'_>) {
        for (place, trace) in export.traces.iter().enumerate() {
            let values = [0, 1, 2, 3].map(|kind: usize| values[kind][place]);
            if values.iter().any(|value| *value != 0) {
                self.0.sample(export, trace, values, labels);
            }
        }
        self.0.mapping(export);
    }

    /// The profile, not gzipped.
    pub fn finish(self, end: &End) -> Vec<u8> {
        let mut builder = self.0;
        let nanos = |time: std::time::Duration| i64::try_from(time.as_nanos()).map_or(0, i64::unsigned_abs);
        let period = builder.value_type("space", "bytes");
        let comments: Vec<_> = end.comments.iter().map(|line| builder.text(&clean(line))).collect();
        let shown_first = builder.text(end.shown_first);
        let profile = &mut builder.profile;
        profile.number(9, nanos(end.time)).number(10, nanos(end.duration));
        if let Some(bytes) = end.period_bytes {
            profile.message(11, &period).number(12, bytes);
        }
        for comment in comments {
            profile.number(13, comment);
        }
        profile.number(14, shown_first);
        builder.finish()
    }
}

/// What `go tool pprof -comments` shows.
pub fn comments(export: &Export<'_>) -> impl Iterator<Item = String> {
    let mut lines = vec![format!("exported by pyheap {}", crate::VERSION)];
    if let Some(facts) = export.facts {
        let known = [
            ("recorded by pyheap", &facts.pyheap_version),
            ("python", &facts.python),
            ("host", &facts.host),
        ];
        lines.extend(
            known
                .into_iter()
                .filter_map(|(name, fact)| Some(format!("{name} {}", fact.as_ref()?))),
        );
        lines.extend(facts.pid.map(|pid| format!("pid {pid}")));
        if !facts.cmdline.is_empty() {
            lines.push(format!("command {}", facts.cmdline.join(" ")));
        }
    }
    lines.push("values are estimates; the 95 % intervals are in `pyheap top`".to_owned());
    if let Some(losses) = export.losses.filter(|losses| !losses.is_empty()) {
        lines.push(format!("lost while recording: {}", describe_losses(losses)));
    }
    lines.extend(export.warnings.iter().map(|warning| format!("warning: {warning}")));
    lines.into_iter()
}

/// Puts a profile together; texts, functions and locations are written once each.
#[derive(Debug)]
struct Builder {
    profile: Message,
    has_mapping: bool,
    texts: Vec<String>,
    text_numbers: HashMap<String, u64>,
    functions: Numbering<(u64, u64)>,
    locations: Numbering<(u32, u32)>,
}

impl Builder {
    fn new() -> Self {
        let mut builder = Self {
            profile: Message::default(),
            has_mapping: false,
            texts: Vec::new(),
            text_numbers: HashMap::new(),
            functions: Numbering::new(),
            locations: Numbering::new(),
        };
        // Text 0 must be the empty one.
        builder.text("");
        builder
    }

    fn text(&mut self, text: &str) -> u64 {
        if let Some(number) = self.text_numbers.get(text) {
            return *number;
        }
        let number = self.texts.len() as u64;
        self.texts.push(text.to_owned());
        self.text_numbers.insert(text.to_owned(), number);
        number
    }

    fn value_type(&mut self, kind: &str, unit: &str) -> Message {
        let mut message = Message::default();
        message.number(1, self.text(kind)).number(2, self.text(unit));
        message
    }

    fn sample(&mut self, export: &Export<'_>, trace: &Trace<'_>, values: [i64; 4], labels: Labels<'_>) {
        let mut locations: Vec<_> = trace.frames.iter().rev().map(|frame| self.location(frame)).collect();
        if locations.is_empty() {
            locations.push(self.named_location(NO_STACK, "", 0));
        }
        let mut sample = Message::default();
        // A negative number is written as its two's complement.
        sample.packed(1, locations).packed(2, values.map(|value| value as u64));
        self.labels(export, &trace.origin, labels, &mut sample);
        self.profile.message(2, &sample);
    }

    fn labels(&mut self, export: &Export<'_>, origin: &Origin<'_>, labels: Labels<'_>, sample: &mut Message) {
        let Labels::More(more) = labels else { return };
        let python = export.facts.and_then(|facts| facts.python.as_deref());
        let known = [
            ("pyheap", Some(env!("CARGO_PKG_VERSION"))),
            ("python", python),
            ("domain", origin.domain),
            ("thread", origin.thread_name),
        ];
        let more = more.iter().map(|(key, value)| (*key, Some(*value)));
        for (key, value) in known.into_iter().chain(more) {
            if let Some(value) = value {
                let mut label = Message::default();
                label.number(1, self.text(key)).number(2, self.text(&clean(value)));
                sample.message(3, &label);
            }
        }
        if let Some(thread) = origin.thread {
            let mut label = Message::default();
            label.number(1, self.text("thread_id")).number(3, u64::from(thread));
            sample.message(3, &label);
        }
    }

    fn location(&mut self, frame: &StackFrame<'_>) -> u64 {
        let file = clean(&frame.file);
        match frame.function {
            Some(function) => self.named_location(&clean(function), &file, frame.line),
            None => self.named_location(&format!("{file}:{}", frame.line), &file, frame.line),
        }
    }

    fn named_location(&mut self, function: &str, file: &str, line: u32) -> u64 {
        let (name, file) = (self.text(function), self.text(file));
        let (function, is_new) = self.functions.number((name, file));
        // Ids begin with 1.
        let function_id = u64::from(function) + 1;
        if is_new {
            let mut message = Message::default();
            // Without a system name (field 3) no viewer tries to demangle.
            message.number(1, function_id).number(2, name).number(4, file);
            self.profile.message(5, &message);
        }
        let (location, is_new) = self.locations.number((function, line));
        let id = u64::from(location) + 1;
        if is_new {
            let mut at = Message::default();
            at.number(1, function_id).number(2, u64::from(line));
            let mut message = Message::default();
            message.number(1, id).number(2, 1).message(4, &at);
            self.profile.message(4, &message);
        }
        id
    }

    /// The one mapping: the (first) executable, with the word that everything has its name already.
    fn mapping(&mut self, export: &Export<'_>) {
        if self.has_mapping {
            return;
        }
        self.has_mapping = true;
        let exe = export.facts.and_then(|facts| facts.exe.as_deref()).unwrap_or_default();
        let mut message = Message::default();
        message.number(1, 1).number(5, self.text(&clean(exe)));
        for known in 7..=10 {
            message.number(known, 1);
        }
        self.profile.message(3, &message);
    }

    fn finish(mut self) -> Vec<u8> {
        for text in &self.texts {
            self.profile.bytes(6, text.as_bytes());
        }
        self.profile.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{EVIL, assert_clean, evil, sample};
    use super::*;
    use crate::profile::format::Cursor;

    /// Field number and content of everything in a message.
    fn fields(bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
        let mut cursor = Cursor::new(bytes, 0);
        let mut fields = Vec::new();
        while cursor.remaining() > 0 {
            let key = cursor.varint().unwrap();
            let value = cursor.varint().unwrap();
            let bytes = if key & 7 == 2 { cursor.take(value).unwrap() } else { &[] };
            fields.push((key >> 3, value, bytes));
        }
        fields
    }

    fn numbers(bytes: &[u8]) -> Vec<u64> {
        let mut cursor = Cursor::new(bytes, 0);
        std::iter::from_fn(|| cursor.varint().ok()).collect()
    }

    fn texts(profile: &[u8]) -> Vec<String> {
        let texts = fields(profile).into_iter().filter(|(field, ..)| *field == 6);
        texts
            .map(|(_, _, bytes)| String::from_utf8(bytes.to_vec()).unwrap())
            .collect()
    }

    #[test]
    fn a_profile_can_be_followed_from_sample_to_name() {
        let profile = message(&sample());
        let texts = texts(&profile);
        let all = fields(&profile);
        let of = |field| all.iter().filter(move |found| found.0 == field).map(|found| found.2);
        assert_eq!((texts[0].as_str(), of(1).count()), ("", 4));
        let samples: Vec<_> = of(2).map(fields).collect();
        assert_eq!(samples.len(), 4);
        // main > leak.py:7 grow: innermost first.
        let (locations, values) = (numbers(samples[1][0].2), numbers(samples[1][1].2));
        assert_eq!((locations.len(), values), (2, vec![20, 2000, 10, 1000]));
        let location = fields(of(4).nth(locations[0] as usize - 1).unwrap());
        assert_eq!((location[0].1, location[1].1), (locations[0], 1));
        let line = fields(location[2].2);
        assert_eq!(line[1].1, 7);
        let function = fields(of(5).nth(line[0].1 as usize - 1).unwrap());
        assert_eq!(
            (
                texts[function[1].1 as usize].as_str(),
                texts[function[2].1 as usize].as_str()
            ),
            ("grow", "leak.py")
        );
        assert_eq!(
            (of(4).count(), of(5).count()),
            (5, 4),
            "grow is one function with two lines"
        );
        let number = |field| all.iter().find(|found| found.0 == field).unwrap().1;
        assert_eq!(number(9), 1_600_000_010_000_000_000);
        assert_eq!((number(10), number(12)), (10_000_000_000, 131_072));
        assert_eq!(texts[number(14) as usize], "inuse_space");
    }

    #[test]
    fn what_has_no_name_says_so() {
        let texts = texts(&message(&sample()));
        assert!(texts.contains(&NO_STACK.to_owned()) && texts.contains(&"old.py:0".to_owned()));
    }

    #[test]
    fn names_cannot_command_a_terminal() {
        let texts = texts(&message(&evil()));
        texts.iter().for_each(|text| {
            assert_clean(text);
            assert!(!text.contains('\n'));
        });
        assert!(texts.contains(&"right\\u{202e}to left\\u{2066}".to_owned()));
        assert!(texts.contains(&EVIL[1].to_owned()), "what is harmless stays as it is");
    }

    #[test]
    fn an_absurd_time_is_left_out() {
        let mut export = sample();
        export.start = std::time::Duration::MAX;
        let profile = message(&export);
        assert!(fields(&profile).iter().all(|(field, ..)| *field != 9));
    }
}
