//! What the survivors are: types of objects by the group that allocated them, at the end of the recording.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde_json::{Value, json};

use super::collect::Collected;
use super::stacks::{shown, written};
use crate::profile::model::Live;
use crate::profile::reader::{ReadError, Reader};
use crate::report::human::{Human, bytes, count};
use crate::report::types::Types;

/// Parts, each the objects of one type in one group, on a page. One takes some 80 bytes.
const MAX_PARTS: usize = 5000;
/// Bytes of the names of types on a page.
const NAME_BYTES: usize = 100_000;
/// What is younger than this needs no words.
const RECENT: Duration = Duration::from_millis(1500);

/// `names`; `parts`, each a group, the number of a name, and bytes, objects, samples, variance of bytes and of objects; and a `note`
/// on what is not there.
///
/// # Errors
/// When the length of the recording cannot be read.
pub(super) fn types(reader: &Reader, collected: &mut Collected) -> Result<Value, ReadError> {
    let (Some(types), Some(sidecar)) = (Types::of(reader), reader.sidecar()) else {
        return Ok(json!({"names": [], "parts": [], "note": why_none(reader)}));
    };
    let mut by_group: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for trace in sidecar.types.iter().flat_map(|types| types.traces.keys()) {
        if let Some(group) = collected.group(*trace) {
            by_group.entry(group).or_default().push(*trace);
        }
    }
    let mut parts: Vec<(usize, &str, Live)> = Vec::new();
    for (group, traces) in by_group {
        let found = types.live(traces).into_iter();
        parts.extend(found.map(|(name, live)| (group, name, live)));
    }
    parts.sort_by(|a, b| {
        b.2.bytes
            .total_cmp(&a.2.bytes)
            .then_with(|| (a.0, a.1).cmp(&(b.0, b.1)))
    });
    let mut names = Names::default();
    let mut left_out = (0_usize, 0.0);
    let mut kept = Vec::new();
    for (group, name, live) in parts {
        match names.number(name).filter(|_| kept.len() < MAX_PARTS) {
            Some(number) => kept.push(part(group, number, &live)),
            None => left_out = (left_out.0 + 1, left_out.1 + live.bytes),
        }
    }
    let behind = reader.elapsed()?.saturating_sub(Duration::from_micros(types.at()));
    let late = (behind > RECENT).then(|| {
        format!(
            "As of {} before the end: pyheap had not looked later.",
            Human(Duration::from_millis(behind.as_millis() as u64))
        )
    });
    let small = (left_out.0 > 0).then(|| {
        format!(
            "{} smaller parts are left out, {} in all; pyheap top --types lists them.",
            count(left_out.0 as f64),
            bytes(left_out.1)
        )
    });
    let note: Vec<String> = late.into_iter().chain(small).collect();
    Ok(json!({"names": names.names, "parts": kept, "note": note.join(" ")}))
}

fn part(group: usize, name: usize, live: &Live) -> Value {
    json!([
        group,
        name,
        live.bytes,
        live.objects,
        live.sampled,
        live.bytes_variance,
        live.objects_variance,
    ])
}

fn why_none(reader: &Reader) -> &'static str {
    if reader.sidecar().is_none() {
        "Types are not known: there is no ._hpx file beside the profile, as of the original heapprof."
    } else {
        "Types are not known: pyheap looks after ten seconds for the first time, and at the end. The recording has not come so far, \
         or its recorder was killed before, or is an older one."
    }
}

/// Names of types by number.
#[derive(Default)]
struct Names {
    names: Vec<String>,
    numbers: HashMap<String, usize>,
    bytes: usize,
}

impl Names {
    /// The number of a name, while there is room.
    fn number(&mut self, name: &str) -> Option<usize> {
        if let Some(number) = self.numbers.get(name) {
            return Some(*number);
        }
        let text = shown(name);
        let bytes = self.bytes + written(&text);
        if bytes > NAME_BYTES {
            return None;
        }
        self.bytes = bytes;
        self.numbers.insert(name.to_owned(), self.names.len());
        self.names.push(text);
        Some(self.names.len() - 1)
    }
}
