//! A reader of pprof's profile.proto, written from its schema and not from our writer.
//!
//! Field numbers are those of proto/profile.proto in <https://github.com/google/pprof>.

use std::collections::{BTreeMap, HashMap};
use std::io::Read as _;

/// One sample.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Function names, innermost first.
    pub stack: Vec<String>,
    /// One of each kind.
    pub values: Vec<i64>,
    /// Texts only.
    pub labels: BTreeMap<String, String>,
}

/// A profile.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// What the values are.
    pub kinds: Vec<String>,
    pub samples: Vec<Sample>,
    pub duration_nanos: i64,
    pub period: i64,
    pub comments: Vec<String>,
    pub shown_first: String,
}

impl Profile {
    /// Reads a gzipped one; panics if it is none.
    #[track_caller]
    pub fn read(gzipped: &[u8]) -> Profile {
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(gzipped)
            .read_to_end(&mut bytes)
            .expect("a gzipped profile");
        parse(&bytes)
    }

    /// The sum of a kind over samples of the allocator domain `obj` (or all, where samples have no labels) that pass
    /// through a function.
    pub fn sum(&self, kind: &str, function: &str) -> i64 {
        let place = self
            .kinds
            .iter()
            .position(|name| name == kind)
            .expect("a kind of value");
        let is_counted = |sample: &&Sample| {
            let is_object = sample.labels.get("domain").is_none_or(|domain| domain == "obj");
            is_object && sample.stack.iter().any(|name| name.starts_with(function))
        };
        self.samples
            .iter()
            .filter(is_counted)
            .map(|sample| sample.values[place])
            .sum()
    }

    /// The sum of a kind over all samples.
    pub fn total(&self, kind: &str) -> i64 {
        self.sum_of(kind, |_| true)
    }

    pub fn sum_of(&self, kind: &str, wanted: impl Fn(&Sample) -> bool) -> i64 {
        let place = self
            .kinds
            .iter()
            .position(|name| name == kind)
            .expect("a kind of value");
        let wanted = self.samples.iter().filter(|sample| wanted(sample));
        wanted.map(|sample| sample.values[place]).sum()
    }
}

/// A field: its number, and a number or bytes.
enum Field<'a> {
    Number(u64, u64),
    Bytes(u64, &'a [u8]),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0u64, 0);
    loop {
        let (first, rest) = bytes.split_first().expect("a varint ends within its message");
        *bytes = rest;
        value |= u64::from(first & 0x7F) << shift;
        if first & 0x80 == 0 {
            return value;
        }
        shift += 7;
        assert!(shift < 70, "a varint is no longer than ten bytes");
    }
}

fn fields(mut bytes: &[u8]) -> Vec<Field<'_>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        match key & 7 {
            0 => found.push(Field::Number(key >> 3, varint(&mut bytes))),
            2 => {
                let len = usize::try_from(varint(&mut bytes)).expect("a length");
                let (inner, rest) = bytes.split_at(len);
                found.push(Field::Bytes(key >> 3, inner));
                bytes = rest;
            }
            other => panic!("kind {other} does not occur in a profile.proto"),
        }
    }
    found
}

fn number(message: &[u8], wanted: u64) -> u64 {
    let found = fields(message).into_iter().find_map(|field| match field {
        Field::Number(field, value) if field == wanted => Some(value),
        _ => None,
    });
    found.unwrap_or(0)
}

fn packed(message: &[u8], wanted: u64) -> Vec<u64> {
    let mut values = Vec::new();
    for field in fields(message) {
        match field {
            Field::Bytes(field, mut bytes) if field == wanted => {
                while !bytes.is_empty() {
                    values.push(varint(&mut bytes));
                }
            }
            Field::Number(field, value) if field == wanted => values.push(value),
            _ => {}
        }
    }
    values
}

fn messages(message: &[u8], wanted: u64) -> Vec<&[u8]> {
    let found = fields(message).into_iter().filter_map(|field| match field {
        Field::Bytes(field, bytes) if field == wanted => Some(bytes),
        _ => None,
    });
    found.collect()
}

fn parse(bytes: &[u8]) -> Profile {
    let texts: Vec<String> = messages(bytes, 6)
        .into_iter()
        .map(|text| String::from_utf8(text.to_vec()).expect("texts are UTF-8"))
        .collect();
    assert_eq!(texts.first().map(String::as_str), Some(""), "the first text is empty");
    let text = |place: u64| texts[usize::try_from(place).expect("a place")].clone();
    let functions: HashMap<u64, String> = messages(bytes, 5)
        .into_iter()
        .map(|function| (number(function, 1), text(number(function, 2))))
        .collect();
    let mappings: Vec<u64> = messages(bytes, 3)
        .into_iter()
        .map(|mapping| number(mapping, 1))
        .collect();
    let mut locations: HashMap<u64, String> = HashMap::new();
    for location in messages(bytes, 4) {
        let lines = messages(location, 4);
        assert_eq!(lines.len(), 1, "one function a location");
        assert!(mappings.contains(&number(location, 2)), "a location's mapping is there");
        let is_new = locations.insert(number(location, 1), functions[&number(lines[0], 1)].clone());
        assert!(is_new.is_none(), "locations have numbers of their own");
    }
    let samples = messages(bytes, 2).into_iter().map(|sample| {
        let labels = messages(sample, 3).into_iter().filter(|label| number(label, 2) != 0);
        Sample {
            stack: packed(sample, 1)
                .iter()
                .map(|location| locations[location].clone())
                .collect(),
            values: packed(sample, 2).into_iter().map(|value| value as i64).collect(),
            labels: labels
                .map(|label| (text(number(label, 1)), text(number(label, 2))))
                .collect(),
        }
    });
    let profile = Profile {
        kinds: messages(bytes, 1)
            .into_iter()
            .map(|kind| text(number(kind, 1)))
            .collect(),
        samples: samples.collect(),
        duration_nanos: number(bytes, 10) as i64,
        period: number(bytes, 12) as i64,
        comments: packed(bytes, 13).into_iter().map(text).collect(),
        shown_first: text(number(bytes, 14)),
    };
    for sample in &profile.samples {
        assert_eq!(sample.values.len(), profile.kinds.len(), "a value of each kind");
    }
    profile
}
