//! Encodes a .hpc under a temporary name.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::digest::DigestError;
use super::format::{INDEX_MAGIC, SNAPSHOT_MAGIC, VERSION, put_u32, put_u64, put_varint};

/// What a precision leaves of a snapshot's entries.
#[derive(Debug, PartialEq, Eq)]
struct Joined {
    /// So many of the first entries are kept, except one of index 0 if there is another below.
    kept: usize,
    /// The entry of index 0 and its place among them, if it is another than before.
    other: Option<(usize, u64)>,
}

/// Joins the smallest entries, up to the fraction `precision` of the total, under index 0. They are sorted, largest first.
fn join(entries: &[(u32, u64)], precision: f64) -> Joined {
    let total = entries.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let slop = (total as f64 * precision) as u64;
    let mut other = 0u64;
    let mut unknown = None;
    let mut kept = entries.len();
    if precision > 0.0 {
        for (place, (index, bytes)) in entries.iter().enumerate().rev() {
            match other.checked_add(*bytes) {
                _ if *index == 0 => unknown = Some((place, *bytes)),
                Some(sum) if sum <= slop => (other, kept) = (sum, place),
                _ => break,
            }
        }
    }
    let passed = unknown.filter(|(place, _)| *place >= kept);
    if other == 0 {
        // What was joined, if anything, was of 0 bytes; the unknown that was passed over comes last.
        let other = passed.map(|(_, bytes)| (kept, bytes));
        return Joined { kept, other };
    }
    let unknown = unknown.or_else(|| {
        entries
            .iter()
            .copied()
            .enumerate()
            .find_map(|(place, (index, bytes))| (index == 0).then_some((place, bytes)))
    });
    other = other.saturating_add(unknown.map_or(0, |(_, bytes)| bytes));
    let place = entries[..kept].partition_point(|(_, bytes)| *bytes > other);
    Joined {
        kept,
        other: Some((place, other)),
    }
}

/// The entries that are written, in order.
fn arranged(entries: &[(u32, u64)], precision: f64) -> impl Iterator<Item = (u32, u64)> + Clone {
    let Joined { kept, other } = join(entries, precision);
    let (place, other) = other.map_or((kept, None), |(place, bytes)| (place, Some((0, bytes))));
    let is_kept = move |entry: &&(u32, u64)| other.is_none() || entry.0 != 0;
    let before = entries[..place].iter().filter(is_kept).copied();
    let after = entries[place..kept].iter().filter(is_kept).copied();
    before.chain(other).chain(after)
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
}

impl DigestFile {
    /// Begins a digest that will be `path`.
    pub(super) fn create(path: PathBuf, start: (u64, u64), interval_millis: u64, precision: f64) -> io::Result<Self> {
        let mut temporary = path.clone().into_os_string();
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
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
    pub(super) fn snapshot(&mut self, entries: &[(u32, u64)]) -> Result<(), DigestError> {
        let arranged = arranged(entries, self.precision);
        self.offsets.push(self.len);
        self.buffer.reserve(entries.len() * 8);
        put_u32(&mut self.buffer, SNAPSHOT_MAGIC);
        put_varint(&mut self.buffer, arranged.clone().count() as u64);
        let mut before = None;
        for (index, bytes) in arranged {
            put_varint(&mut self.buffer, u64::from(index));
            put_varint(&mut self.buffer, before.map_or(bytes, |before: u64| before - bytes));
            before = Some(bytes);
        }
        self.put().map_err(|source| DigestError::Write {
            path: self.path.clone(),
            source,
        })
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
    fn arranged(mut entries: Vec<(u32, u64)>, precision: f64) -> Vec<(u32, u64)> {
        entries.sort_unstable_by_key(|(index, bytes)| (std::cmp::Reverse(*bytes), *index));
        super::arranged(&entries, precision).collect()
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
