//! Encodes a .hpc under a temporary name.

use super::place;
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::PathBuf;

use super::digest::DigestError;
use super::format::{
    INDEX_MAGIC, MAX_VARINT_LEN, SNAPSHOT_MAGIC, VERSION, put_u32, put_u64, put_varint, two_varints_word,
};
use super::ranking::Ranked;

/// What a precision leaves of a snapshot's entries.
#[derive(Debug, PartialEq, Eq)]
struct Joined {
    /// So many of the first entries are kept, except one of index 0 if there is another below.
    kept: usize,
    /// The entry of index 0 and its place among them, if it is another than before.
    other: Option<(usize, u64)>,
}

/// Joins the smallest entries, up to the fraction `precision` of the total, under index 0. They are sorted, largest first.
fn join(entries: &[Ranked], precision: f64) -> Joined {
    let mut kept = entries.len();
    if precision == 0.0 {
        return Joined { kept, other: None };
    }
    let total = entries
        .iter()
        .fold(0u64, |sum, entry| sum.saturating_add(entry.bytes()));
    let slop = (total as f64 * precision) as u64;
    let mut other = 0u64;
    let mut unknown = None;
    for (place, entry) in entries.iter().enumerate().rev() {
        match other.checked_add(entry.bytes()) {
            _ if entry.index() == 0 => unknown = Some((place, entry.bytes())),
            Some(sum) if sum <= slop => (other, kept) = (sum, place),
            _ => break,
        }
    }
    let passed = unknown.filter(|(place, _)| *place >= kept);
    if other == 0 {
        // What was joined, if anything, was of 0 bytes; the unknown that was passed over comes last.
        let other = passed.map(|(_, bytes)| (kept, bytes));
        return Joined { kept, other };
    }
    let unknown = unknown.map(|(_, bytes)| bytes).or_else(|| {
        let found = entries.iter().find(|entry| entry.index() == 0);
        found.map(|entry| entry.bytes())
    });
    other = other.saturating_add(unknown.unwrap_or(0));
    let place = entries[..kept].partition_point(|entry| entry.bytes() > other);
    Joined {
        kept,
        other: Some((place, other)),
    }
}

/// The entries that are written, in order, in up to five runs. `other` is the one that was joined, and its place.
fn arranged<'a>(entries: &'a [Ranked], other: &'a Option<(usize, Ranked)>) -> [&'a [Ranked]; 5] {
    let Some((place, other)) = other else {
        return [entries, &[], &[], &[], &[]];
    };
    // The joined one has taken the unknown in.
    let without_unknown = |run: &'a [Ranked]| match run.iter().position(|entry| entry.index() == 0) {
        Some(at) => [&run[..at], &run[at + 1..]],
        None => [run, &[]],
    };
    let [a, b] = without_unknown(&entries[..*place]);
    let [c, d] = without_unknown(&entries[*place..]);
    [a, b, std::slice::from_ref(other), c, d]
}

/// No entry is longer.
const MAX_ENTRY_LEN: usize = 2 * MAX_VARINT_LEN;

/// Encodes entries at the start of `out`, which only grows, and tells how many bytes they are.
fn encode(runs: &[&[Ranked]], out: &mut Vec<u8>) -> usize {
    let count: usize = runs.iter().map(|run| run.len()).sum();
    let room = count * MAX_ENTRY_LEN + 8;
    if out.len() < room {
        out.resize(room, 0);
    }
    let mut len = 0;
    let mut before = None;
    for run in runs {
        for entry in *run {
            let (index, bytes) = (u64::from(entry.index()), entry.bytes());
            let step = before.map_or(bytes, |before: u64| before - bytes);
            before = Some(bytes);
            if let Some((word, word_len)) = two_varints_word(index, step) {
                out[len..len + 8].copy_from_slice(&word.to_le_bytes());
                len += word_len;
            } else {
                let mut long = Vec::with_capacity(MAX_ENTRY_LEN);
                put_varint(&mut long, index);
                put_varint(&mut long, step);
                out[len..len + long.len()].copy_from_slice(&long);
                len += long.len();
            }
        }
    }
    len
}

/// The digest under its temporary name; removed again unless it is finished.
pub(super) struct DigestFile {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    len: u64,
    index_slot: u64,
    offsets: Vec<u64>,
    precision: f64,
    buffer: Vec<u8>,
    /// Room for the entries of a snapshot.
    encoded: Vec<u8>,
}

impl DigestFile {
    /// Begins a digest that will be `path`.
    pub(super) fn create(path: PathBuf, start: (u64, u64), interval_millis: u64, precision: f64) -> io::Result<Self> {
        let path = place::writable(&path, false)?;
        let (file, temporary) = place::temporary(&path)?;
        let mut buffer = Vec::new();
        put_u32(&mut buffer, VERSION);
        put_u64(&mut buffer, start.0);
        put_u64(&mut buffer, start.1);
        put_varint(&mut buffer, interval_millis);
        let index_slot = buffer.len() as u64;
        put_u64(&mut buffer, 0);
        let file = BufWriter::with_capacity(1 << 18, file);
        let mut output = Self {
            path,
            temporary,
            file,
            len: 0,
            index_slot,
            offsets: Vec::new(),
            precision,
            buffer,
            encoded: Vec::new(),
        };
        output.put()?;
        Ok(output)
    }

    fn put(&mut self) -> io::Result<()> {
        self.file.write_all(&self.buffer)?;
        self.len += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Number of snapshots so far.
    pub(super) fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Writes a snapshot of these traces and bytes, largest first and equal ones by index.
    pub(super) fn snapshot(&mut self, entries: &[Ranked]) -> Result<(), DigestError> {
        let Joined { kept, other } = join(entries, self.precision);
        let other = other.map(|(place, bytes)| (place, Ranked::new(0, bytes)));
        let runs = arranged(&entries[..kept], &other);
        self.offsets.push(self.len);
        put_u32(&mut self.buffer, SNAPSHOT_MAGIC);
        put_varint(&mut self.buffer, runs.iter().map(|run| run.len() as u64).sum());
        let len = encode(&runs, &mut self.encoded);
        self.put()
            .and_then(|()| self.file.write_all(&self.encoded[..len]))
            .map_err(|source| DigestError::Write {
                path: self.path.clone(),
                source,
            })?;
        self.len += len as u64;
        Ok(())
    }

    /// Writes the index and gives the file its name; its length is the answer.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        let index_at = self.len;
        put_u32(&mut self.buffer, INDEX_MAGIC);
        put_varint(&mut self.buffer, self.offsets.len() as u64);
        let mut before = 0;
        for offset in &self.offsets {
            put_varint(&mut self.buffer, offset - before);
            before = *offset;
        }
        self.put()?;
        self.file.seek(SeekFrom::Start(self.index_slot))?;
        self.file.write_all(&index_at.to_be_bytes())?;
        self.file.flush()?;
        std::fs::rename(&self.temporary, &self.path)?;
        Ok(self.len)
    }
}

impl Drop for DigestFile {
    fn drop(&mut self) {
        // After `finish` there is nothing of this name.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::Cursor;
    use super::*;

    fn arranged(entries: Vec<(u32, u64)>, precision: f64) -> Vec<(u32, u64)> {
        let mut entries: Vec<_> = entries
            .into_iter()
            .map(|(index, bytes)| Ranked::new(index, bytes))
            .collect();
        entries.sort_unstable();
        let Joined { kept, other } = join(&entries, precision);
        let other = other.map(|(place, bytes)| (place, Ranked::new(0, bytes)));
        let runs = super::arranged(&entries[..kept], &other);
        let runs = runs.iter().copied().flatten();
        runs.map(|entry| (entry.index(), entry.bytes())).collect()
    }

    #[test]
    fn entries_of_any_size_are_encoded() {
        let sizes = (0..64).flat_map(|shift| [1u64 << shift, (1 << shift) - 1, u64::MAX >> shift]);
        let indices = (0..30).map(|shift| (1u32 << shift) - 1);
        let mut entries: Vec<_> = sizes
            .flat_map(|bytes| indices.clone().map(move |index| Ranked::new(index, bytes)))
            .collect();
        entries.sort_unstable();
        let mut out = Vec::new();
        let len = encode(&[&entries[..7], &[], &entries[7..]], &mut out);
        let mut cursor = Cursor::new(&out[..len], 0);
        let mut before = None;
        for entry in entries {
            assert_eq!(cursor.varint(), Ok(u64::from(entry.index())));
            let step = before.map_or(entry.bytes(), |before: u64| before - entry.bytes());
            assert_eq!(cursor.varint(), Ok(step));
            before = Some(entry.bytes());
        }
        assert_eq!(cursor.remaining(), 0);
    }

    #[test]
    fn largest_first_and_ties_by_index() {
        assert_eq!(
            arranged(vec![(3, 5), (1, 5), (2, 9), (4, 0)], 0.0),
            [(2, 9), (1, 5), (3, 5), (4, 0)]
        );
        assert_eq!(arranged(vec![], 0.5), []);
    }

    #[test]
    fn precision_keeps_the_total() {
        assert_eq!(arranged(vec![(1, 98_900), (2, 1100)], 0.01), [(1, 98_900), (2, 1100)]);
        assert_eq!(arranged(vec![(1, 99_000), (2, 1000)], 0.01), [(1, 99_000), (0, 1000)]);
        assert_eq!(arranged(vec![(1, 10)], 0.99), [(1, 10)]);
        let many: Vec<_> = (1..=1000).map(|index| (index, u64::from(index))).collect();
        let total: u64 = many.iter().map(|(_, bytes)| bytes).sum();
        let result = arranged(many, 0.01);
        assert_eq!(result.iter().map(|(_, bytes)| bytes).sum::<u64>(), total);
        // 1 + 2 + ... + 99 = 4950 is within 1 % of 500500, and 100 more is not.
        assert_eq!((result[0], result.len()), ((0, 4950), 902));
    }

    #[test]
    fn the_unknown_and_the_small_ones_are_one_entry() {
        assert_eq!(
            arranged(vec![(0, 2), (1, 900), (2, 1), (3, 3), (4, 94)], 0.005),
            [(1, 900), (4, 94), (0, 6)]
        );
        assert_eq!(
            arranged(vec![(0, 2), (1, 900), (3, 3)], 0.0),
            [(1, 900), (3, 3), (0, 2)]
        );
        assert_eq!(arranged(vec![(0, 500), (1, 500), (2, 1)], 0.01), [(0, 501), (1, 500)]);
        assert_eq!(arranged(vec![(1, 500), (0, 3), (2, 0)], 0.001), [(1, 500), (0, 3)]);
    }
}
