//! Keeps traces sorted by size while few of them change: what has not changed since the last time is in order already, so
//! only the changed ones are sorted and merged in.

use std::cmp::Reverse;

use super::live::TraceMap;

/// Traces with bytes, largest first and equal ones by index.
#[derive(Debug)]
pub(super) struct Ranking {
    entries: Vec<(u32, u64)>,
    spare: Vec<(u32, u64)>,
    changed: Vec<u32>,
    is_changed: TraceMap<bool>,
    fresh: Vec<(u32, u64)>,
}

fn key(entry: &(u32, u64)) -> (Reverse<u64>, u32) {
    (Reverse(entry.1), entry.0)
}

impl Ranking {
    /// An empty one for a profile of so many traces.
    pub(super) fn new(trace_count: u32) -> Self {
        Self {
            entries: Vec::new(),
            spare: Vec::new(),
            changed: Vec::new(),
            is_changed: TraceMap::new(trace_count),
            fresh: Vec::new(),
        }
    }

    /// Says that the bytes of a trace may be others than at the last [`update`](Self::update).
    #[inline]
    pub(super) fn touch(&mut self, index: u32) {
        let is_changed = self.is_changed.entry(index);
        if !*is_changed {
            *is_changed = true;
            self.changed.push(index);
        }
    }

    /// The order as it was at the last [`update`](Self::update).
    pub(super) fn entries(&self) -> &[(u32, u64)] {
        &self.entries
    }

    /// Brings the order up to date, by the bytes that `bytes` gives for the traces that were touched; `None` is not in it.
    pub(super) fn update(&mut self, mut bytes: impl FnMut(u32) -> Option<u64>) {
        if self.changed.is_empty() {
            return;
        }
        self.fresh.clear();
        self.fresh
            .extend(self.changed.iter().filter_map(|index| Some((*index, bytes(*index)?))));
        self.fresh.sort_unstable_by_key(key);
        self.spare.clear();
        let mut fresh = self.fresh.iter().copied().peekable();
        for entry in &self.entries {
            if *self.is_changed.entry(entry.0) {
                continue;
            }
            while let Some(new) = fresh.next_if(|new| key(new) < key(entry)) {
                self.spare.push(new);
            }
            self.spare.push(*entry);
        }
        self.spare.extend(fresh);
        std::mem::swap(&mut self.entries, &mut self.spare);
        for index in self.changed.drain(..) {
            *self.is_changed.entry(index) = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn it_is_what_sorting_everything_gives() {
        let mut ranking = Ranking::new(50);
        let mut truth: BTreeMap<u32, u64> = BTreeMap::new();
        let mut state = 7u64;
        for round in 0..200 {
            for _ in 0..round % 7 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Some beyond those that the profile knows.
                let index = (state >> 33) as u32 % 60;
                match (state >> 40) % 4 {
                    0 => truth.remove(&index),
                    _ => truth.insert(index, (state >> 50) % 5),
                };
                ranking.touch(index);
            }
            let mut sorted: Vec<_> = truth.iter().map(|(index, bytes)| (*index, *bytes)).collect();
            sorted.sort_by_key(key);
            ranking.update(|index| truth.get(&index).copied());
            assert_eq!(ranking.entries(), sorted);
        }
    }
}
