//! Keeps traces sorted by size while few of them change: what has not changed since the last time is in order already, so
//! only the changed ones are sorted and merged in.

use super::live::TraceMap;

/// A trace and its bytes as one number: the larger the bytes the smaller it is, and of equal bytes the smaller the index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ranked(u128);

impl Ranked {
    pub(super) fn new(index: u32, bytes: u64) -> Self {
        Self(u128::from(!bytes) << 32 | u128::from(index))
    }

    #[inline]
    pub(super) fn index(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(super) fn bytes(self) -> u64 {
        !((self.0 >> 32) as u64)
    }
}

impl std::fmt::Debug for Ranked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (self.index(), self.bytes()).fmt(f)
    }
}

/// Traces with bytes, largest first and equal ones by index.
#[derive(Debug)]
pub(super) struct Ranking {
    entries: Vec<Ranked>,
    spare: Vec<Ranked>,
    /// The first `changed_count` of these have changed.
    changed: Vec<u32>,
    changed_count: usize,
    is_changed: TraceMap<bool>,
    fresh: Vec<Ranked>,
}

impl Ranking {
    /// An empty one for a profile of so many traces.
    pub(super) fn new(trace_count: u32) -> Self {
        Self {
            entries: Vec::new(),
            spare: Vec::new(),
            changed: Vec::new(),
            changed_count: 0,
            is_changed: TraceMap::new(trace_count),
            fresh: Vec::new(),
        }
    }

    /// Says that the bytes of a trace may be others than at the last [`update`](Self::update).
    #[inline]
    pub(super) fn touch(&mut self, index: u32) {
        if self.changed_count == self.changed.len() {
            self.changed.resize(2 * self.changed_count + 64, 0);
        }
        // Written in any case, and counted if it is new: nothing that a processor would have to guess.
        self.changed[self.changed_count] = index;
        let was_changed = std::mem::replace(self.is_changed.entry(index), true);
        self.changed_count += usize::from(!was_changed);
    }

    /// The order as it was at the last [`update`](Self::update).
    pub(super) fn entries(&self) -> &[Ranked] {
        &self.entries
    }

    /// Brings the order up to date, by the bytes that `bytes` gives for the traces that were touched; `None` is not in it.
    pub(super) fn update(&mut self, mut bytes: impl FnMut(u32) -> Option<u64>) {
        let changed = &self.changed[..self.changed_count];
        if changed.is_empty() {
            return;
        }
        self.fresh.clear();
        let fresh = changed
            .iter()
            .filter_map(|index| Some(Ranked::new(*index, bytes(*index)?)));
        self.fresh.extend(fresh);
        self.fresh.sort_unstable();
        // What has not changed moves to the front.
        let mut kept = 0;
        for place in 0..self.entries.len() {
            let entry = self.entries[place];
            self.entries[kept] = entry;
            kept += usize::from(!*self.is_changed.entry(entry.index()));
        }
        self.entries.truncate(kept);
        merge(&self.entries, &self.fresh, &mut self.spare);
        std::mem::swap(&mut self.entries, &mut self.spare);
        for index in changed {
            *self.is_changed.entry(*index) = false;
        }
        self.changed_count = 0;
    }
}

/// Merges two sorted lists into one.
fn merge(a: &[Ranked], b: &[Ranked], out: &mut Vec<Ranked>) {
    out.clear();
    out.reserve(a.len() + b.len());
    let (mut from_a, mut from_b) = (0, 0);
    while let (Some(next_a), Some(next_b)) = (a.get(from_a), b.get(from_b)) {
        let is_a = next_a < next_b;
        out.push(if is_a { *next_a } else { *next_b });
        from_a += usize::from(is_a);
        from_b += usize::from(!is_a);
    }
    out.extend_from_slice(&a[from_a..]);
    out.extend_from_slice(&b[from_b..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_orders_as_its_parts_do() {
        let all = [(7, u64::MAX), (u32::MAX, 9), (0, 8), (3, 8), (u32::MAX, 8), (5, 0)];
        let ranked = all.map(|(index, bytes)| Ranked::new(index, bytes));
        assert!(ranked.is_sorted());
        assert_eq!(ranked.map(|entry| (entry.index(), entry.bytes())), all);
    }
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
            sorted.sort_by_key(|(index, bytes)| (std::cmp::Reverse(*bytes), *index));
            ranking.update(|index| truth.get(&index).copied());
            let entries = ranking.entries().iter().map(|entry| (entry.index(), entry.bytes()));
            assert_eq!(entries.collect::<Vec<_>>(), sorted);
        }
    }
}
