//! Decodes a .hpc: the snapshots of a digest.
//!
//! A digest whose index is missing or wrong (its maker was killed) is read by walking its snapshots; a last one that is
//! cut short is dropped.

use super::format::{Cursor, DecodeError, INDEX_MAGIC, SNAPSHOT_MAGIC, VERSION};
use super::hpm::HeaderError;

/// A digest with its bytes in memory; snapshots are decoded when asked for.
#[derive(Debug, Clone)]
pub struct Digest {
    /// Start time as the digest has it: up to 120 ns off the .hpm's in digests of the original and compatible ones.
    pub start: (u64, u64),
    /// Milliseconds between snapshots.
    pub interval_millis: u64,
    /// Whether the index was missing or damaged, so that the snapshots were looked for.
    pub is_rebuilt: bool,
    offsets: Vec<usize>,
    data: Vec<u8>,
}

/// Live bytes of each trace at one moment, largest first; index 0 is "no trace" and "all others".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Trace index and bytes.
    pub entries: Vec<(u32, u64)>,
}

impl Snapshot {
    /// Live bytes of all traces.
    pub fn total(&self) -> u64 {
        self.entries
            .iter()
            .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

impl Digest {
    /// Takes the bytes of a file.
    pub fn parse(data: Vec<u8>) -> Result<Self, HeaderError> {
        let mut cursor = Cursor::new(&data, 0);
        let version = cursor.u32()?;
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        let start = (cursor.u64()?, cursor.u64()?);
        let interval_millis = cursor.varint()?;
        let index_at = cursor.u64()?;
        let first = cursor.pos();
        let indexed = usize::try_from(index_at)
            .ok()
            .and_then(|at| read_index(&data, first, at));
        let is_rebuilt = indexed.is_none();
        let offsets = indexed.unwrap_or_else(|| walk(&data, first));
        Ok(Self {
            start,
            interval_millis,
            is_rebuilt,
            offsets,
            data,
        })
    }

    /// Number of snapshots.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Whether there is no snapshot.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// A snapshot: the state at (`place` + 1) intervals, or at the end if that came first. (The original's reader gives
    /// its time as `place` intervals.) `None` beyond the last, and if it is damaged.
    pub fn snapshot(&self, place: usize) -> Option<Snapshot> {
        read_snapshot(&mut Cursor::new(&self.data, *self.offsets.get(place)?)).ok()
    }
}

/// The offsets in the index at `at`, if it is one and all of them point into the snapshots.
fn read_index(data: &[u8], first: usize, at: usize) -> Option<Vec<usize>> {
    if at < first {
        return None;
    }
    let mut cursor = Cursor::new(data, at);
    if cursor.u32().ok()? != INDEX_MAGIC {
        return None;
    }
    let count = cursor.varint().ok()?;
    if count > cursor.remaining() as u64 {
        return None;
    }
    let mut offset = 0u64;
    (0..count)
        .map(|_| {
            offset = offset.checked_add(cursor.varint().ok()?)?;
            usize::try_from(offset)
                .ok()
                .filter(|offset| (first..at).contains(offset))
        })
        .collect()
}

fn walk(data: &[u8], first: usize) -> Vec<usize> {
    let mut cursor = Cursor::new(data, first);
    let mut offsets = Vec::new();
    loop {
        let offset = cursor.pos();
        if read_snapshot(&mut cursor).is_err() {
            return offsets;
        }
        offsets.push(offset);
    }
}

fn read_snapshot(cursor: &mut Cursor<'_>) -> Result<Snapshot, DecodeError> {
    if cursor.u32()? != SNAPSHOT_MAGIC {
        return Err(DecodeError::Overlong);
    }
    let count = cursor.varint()?;
    // An entry has two bytes at least.
    if count > cursor.remaining() as u64 / 2 {
        return Err(DecodeError::Cut);
    }
    let mut entries = Vec::with_capacity(count as usize);
    let mut bytes = 0u64;
    for place in 0..count {
        let index = u32::try_from(cursor.varint()?).map_err(|_| DecodeError::Overlong)?;
        let step = cursor.varint()?;
        bytes = if place == 0 {
            step
        } else {
            bytes.checked_sub(step).ok_or(DecodeError::Overlong)?
        };
        entries.push((index, bytes));
    }
    Ok(Snapshot { entries })
}
