//! Decodes a .hpc: the snapshots of a digest.
//!
//! A digest whose index is missing or wrong (its maker was killed) is read by walking its snapshots; a last one that is
//! cut short is dropped.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::format::{Cursor, DecodeError, INDEX_MAGIC, MAX_VARINT_LEN, SNAPSHOT_MAGIC, VERSION};
use super::hpm::HeaderError;

/// No header is longer: version, two words of start, interval, offset of the index.
const MAX_HEADER_LEN: usize = 4 + 8 + 8 + MAX_VARINT_LEN + 8;

/// A longer index, or snapshot, is damage: nobody has so many traces or waits for so many snapshots.
const MAX_PART_LEN: u64 = 512 << 20;
/// A longer digest without its index is not searched.
const MAX_SEARCHED_LEN: u64 = 4 << 30;

/// Why a digest cannot be used; `None` if there is none.
pub type OpenError = Option<String>;

/// A digest; snapshots are decoded when asked for.
#[derive(Debug)]
pub struct Digest {
    /// Start time as the digest has it: up to 120 ns off the .hpm's in digests of the original and compatible ones.
    pub start: (u64, u64),
    /// Milliseconds between snapshots.
    pub interval_millis: u64,
    /// Whether the index was missing or damaged, so that the snapshots were looked for.
    pub is_rebuilt: bool,
    /// Where each snapshot begins.
    offsets: Vec<usize>,
    /// Where the last one ends.
    end: usize,
    data: Data,
}

#[derive(Debug)]
enum Data {
    Memory(Vec<u8>),
    /// Read, not mapped: a file that shrinks under a mapping would kill the reader.
    File(File),
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

/// What comes before the snapshots.
struct Header {
    start: (u64, u64),
    interval_millis: u64,
    index_at: u64,
    len: usize,
}

impl Header {
    fn parse(data: &[u8]) -> Result<Self, HeaderError> {
        let mut cursor = Cursor::new(data, 0);
        let version = cursor.u32()?;
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        let start = (cursor.u64()?, cursor.u64()?);
        let interval_millis = cursor.varint()?;
        if interval_millis == 0 {
            return Err(HeaderError::Damaged);
        }
        Ok(Self {
            start,
            interval_millis,
            index_at: cursor.u64()?,
            len: cursor.pos(),
        })
    }
}

impl Digest {
    /// Takes the bytes of a file.
    pub fn parse(data: Vec<u8>) -> Result<Self, HeaderError> {
        let header = Header::parse(&data)?;
        let index_at = usize::try_from(header.index_at).unwrap_or(usize::MAX);
        let indexed = data
            .get(index_at.min(data.len())..)
            .and_then(|index| read_index(index, header.len, index_at));
        let is_rebuilt = indexed.is_none();
        let (offsets, end) = match indexed {
            Some(offsets) => (offsets, index_at),
            None => walk(&data, header.len),
        };
        Ok(Self {
            start: header.start,
            interval_millis: header.interval_millis,
            is_rebuilt,
            offsets,
            end,
            data: Data::Memory(data),
        })
    }

    /// Opens a file and reads its header and index. The file is read whole only if the index is missing.
    ///
    /// # Errors
    /// With the reason, or none if there is no such file.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let failed = |error: io::Error| (error.kind() != io::ErrorKind::NotFound).then(|| error.to_string());
        let damaged = |error: HeaderError| Some(error.to_string());
        let mut file = File::open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() {
            return Err(Some("it is no plain file".to_owned()));
        }
        let mut head = Vec::new();
        let head_len = MAX_HEADER_LEN as u64;
        file.by_ref().take(head_len).read_to_end(&mut head).map_err(failed)?;
        let header = Header::parse(&head).map_err(damaged)?;
        let index_len = found.len().checked_sub(header.index_at);
        if let Some(index_len) = index_len.filter(|len| *len <= MAX_PART_LEN && header.index_at >= header.len as u64) {
            let index_at = header.index_at as usize;
            let mut index = vec![0; index_len as usize];
            if file.read_exact_at(&mut index, header.index_at).is_ok()
                && let Some(offsets) = read_index(&index, header.len, index_at)
            {
                return Ok(Self {
                    start: header.start,
                    interval_millis: header.interval_millis,
                    is_rebuilt: false,
                    offsets,
                    end: index_at,
                    data: Data::File(file),
                });
            }
        }
        if found.len() > MAX_SEARCHED_LEN {
            return Err(Some("it has no index and is too large to be searched".to_owned()));
        }
        Self::parse(std::fs::read(path).map_err(failed)?).map_err(damaged)
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
        let mut entries = Vec::new();
        self.visit(place, |index, bytes| entries.push((index, bytes)))?;
        Some(Snapshot { entries })
    }

    /// Calls `see` for each entry of a snapshot in order, without keeping any. `None` as for [`snapshot`](Self::snapshot);
    /// entries before the damage have been seen then.
    pub fn visit(&self, place: usize, see: impl FnMut(u32, u64)) -> Option<()> {
        let begin = *self.offsets.get(place)?;
        let end = self.offsets.get(place + 1).copied().unwrap_or(self.end).max(begin);
        let bytes;
        let data = match &self.data {
            Data::Memory(data) => data.get(begin..end.min(data.len()))?,
            Data::File(_) if (end - begin) as u64 > MAX_PART_LEN => return None,
            Data::File(file) => {
                let mut buffer = vec![0; end - begin];
                file.read_exact_at(&mut buffer, begin as u64).ok()?;
                bytes = buffer;
                &bytes
            }
        };
        read_snapshot(&mut Cursor::new(data, 0), see).ok()
    }
}

/// The offsets in the index, which is at `at` in the file, if it is one and all of them point into the snapshots.
fn read_index(index: &[u8], first: usize, at: usize) -> Option<Vec<usize>> {
    if at < first {
        return None;
    }
    let mut cursor = Cursor::new(index, 0);
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

/// Where the snapshots begin, and where the last whole one ends.
fn walk(data: &[u8], first: usize) -> (Vec<usize>, usize) {
    let mut cursor = Cursor::new(data, first);
    let mut offsets = Vec::new();
    loop {
        let offset = cursor.pos();
        if read_snapshot(&mut cursor, |_, _| {}).is_err() {
            return (offsets, offset);
        }
        offsets.push(offset);
    }
}

fn read_snapshot(cursor: &mut Cursor<'_>, mut see: impl FnMut(u32, u64)) -> Result<(), DecodeError> {
    if cursor.u32()? != SNAPSHOT_MAGIC {
        return Err(DecodeError::Overlong);
    }
    let count = cursor.varint()?;
    // An entry has two bytes at least.
    if count > cursor.remaining() as u64 / 2 {
        return Err(DecodeError::Cut);
    }
    if count == 0 {
        return Ok(());
    }
    // The first is the largest, the others are less by their steps.
    let (first, mut bytes) = cursor.two_varints()?;
    see(trace_index(first)?, bytes);
    for _ in 1..count {
        let (index, step) = cursor.two_varints()?;
        bytes = bytes.checked_sub(step).ok_or(DecodeError::Overlong)?;
        see(trace_index(index)?, bytes);
    }
    Ok(())
}

fn trace_index(value: u64) -> Result<u32, DecodeError> {
    u32::try_from(value).map_err(|_| DecodeError::Overlong)
}
