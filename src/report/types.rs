//! What the survivors are: types of objects, with how many there are of each.

use std::collections::HashMap;

use serde::Serialize;

use super::human::{bytes, clean, count};
use crate::profile::model::Live;
use crate::profile::reader::Reader;
use crate::profile::sampling::Weights;
use crate::profile::sidecar::LiveTypes;

/// A type that nobody has looked at.
pub const UNKNOWN: &str = "(unknown)";

/// Objects of one type. Sizes are estimates; margins are half the width of the 95 % interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TypeRow {
    /// The type, with its module unless that is `builtins`; or `buffer (mem)` and the like, or `(unknown)`.
    #[serde(rename = "type")]
    pub name: String,
    /// Live objects.
    pub objects: f64,
    /// Margin of `objects`.
    pub objects_margin: f64,
    /// Live bytes.
    pub bytes: f64,
    /// Margin of `bytes`.
    pub bytes_margin: f64,
    /// Samples that the estimates are made of.
    pub samples: u64,
}

/// The types of a recording's survivors.
#[derive(Debug)]
pub struct Types<'a> {
    types: &'a LiveTypes,
    weights: Weights,
}

impl<'a> Types<'a> {
    /// Those that are in a profile, if there are any.
    pub fn of(reader: &'a Reader) -> Option<Self> {
        let types = reader.sidecar()?.types.as_ref()?;
        let weights = reader.weights();
        Some(Self { types, weights })
    }

    /// When they were looked at, in microseconds since the start.
    pub fn at(&self) -> u64 {
        self.types.at
    }

    /// What is alive of some traces, by type.
    pub fn live(&self, traces: impl IntoIterator<Item = u32>) -> HashMap<&'a str, Live> {
        let counts = traces
            .into_iter()
            .flat_map(|trace| self.types.traces.get(&trace).into_iter().flatten());
        let name = |kind: u32| self.types.names.get(kind as usize).map_or(UNKNOWN, String::as_str);
        by_name(
            counts.map(|&(kind, size, samples)| (name(kind), size, samples)),
            &self.weights,
        )
    }

    /// The same as rows, that with the most bytes first.
    pub fn rows(&self, traces: impl IntoIterator<Item = u32>) -> Vec<TypeRow> {
        rows(self.live(traces))
    }
}

/// What is alive by type, of samples counted by type and size.
pub fn by_name<'a>(counts: impl Iterator<Item = (&'a str, u64, u64)>, weights: &Weights) -> HashMap<&'a str, Live> {
    let mut types: HashMap<&str, Live> = HashMap::new();
    for (name, size, samples) in counts {
        let weight = weights.of(size);
        let (bytes, many) = (size as f64, samples as f64);
        let live = Live {
            bytes: many * bytes * weight.objects,
            objects: many * weight.objects,
            bytes_variance: many * bytes * bytes * weight.variance,
            objects_variance: many * weight.variance,
            sampled: samples,
            sampled_bytes: size.saturating_mul(samples),
            ..Live::default()
        };
        types.entry(name).or_default().add(&live);
    }
    types
}

/// Rows, that with the most bytes first.
pub fn rows(types: HashMap<&str, Live>) -> Vec<TypeRow> {
    let row = |(name, live): (&str, Live)| TypeRow {
        name: name.to_owned(),
        objects: live.objects,
        objects_margin: live.objects_margin(),
        bytes: live.bytes,
        bytes_margin: live.bytes_margin(),
        samples: live.sampled,
    };
    let mut rows: Vec<TypeRow> = types.into_iter().map(row).collect();
    rows.sort_by(|a, b| b.bytes.total_cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    rows
}

/// `dict ×41,000 ± 1,200 (9.4 MiB), str ×300 ± 90 (20.0 KiB), 3 more types`: the first `limit` rows.
pub fn line(rows: &[TypeRow], limit: usize) -> String {
    let text = |row: &TypeRow| {
        let (objects, margin) = (count(row.objects), count(row.objects_margin));
        format!("{} ×{objects} ± {margin} ({})", clean(&row.name), bytes(row.bytes))
    };
    let mut parts: Vec<String> = rows.iter().take(limit).map(text).collect();
    match rows.len().saturating_sub(limit) {
        0 => {}
        1 => parts.push("1 more type".to_owned()),
        more => parts.push(format!("{} more types", count(more as f64))),
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_weighed_by_their_size() {
        let types = LiveTypes {
            at: 0,
            names: vec!["dict".to_owned(), "buffer (mem)".to_owned()],
            traces: [(1, vec![(0, 64, 10), (1, 1 << 20, 2)]), (2, vec![(0, 64, 30)])].into(),
        };
        let weights = Weights::Period(1024);
        let types = Types { types: &types, weights };
        let rows = types.rows([1, 2, 3]);
        assert_eq!((rows[0].name.as_str(), rows[0].samples), ("buffer (mem)", 2));
        assert_eq!((rows[0].bytes, rows[0].bytes_margin), (f64::from(2 << 20), 0.0));
        // 40 / (1 - e^(-1/16)), and 1.96 times the root of 40 (1 - p) / p^2.
        assert!((rows[1].objects - 660.208).abs() < 0.001, "{rows:?}");
        assert!((rows[1].objects_margin - 198.306).abs() < 0.01, "{rows:?}");
        assert_eq!(line(&rows, 1), "buffer (mem) ×2 ± 0 (2.0 MiB), 1 more type");
        assert_eq!(types.rows([1])[1].samples, 10);
    }
}
