//! The files of the original heapprof, made anew from what could be read: whole records only, so that its strict reader
//! gets through files of a recording that was killed, still runs, or is damaged.
//!
//! Numbers of traces and events stay what they are. Names that are no UTF-8 have U+FFFD for what is not.

use std::io::{self, Write};

use crate::profile::format::{
    HEAD_FREE, HEAD_NEGATIVE, MAX_EVENT_BYTES, MAX_TRACE_INDEX, VERSION, put_u32, put_u64, put_varint,
};
use crate::profile::hpd::RawEvent;
use crate::profile::reader::Reader;

/// A larger size is written as it is: it is probably damage, and must not fill a disk with its pieces.
const MAX_SPLIT_BYTES: u64 = 1 << 38;

/// The .hpm: start, sampling table, traces.
///
/// # Errors
/// Those of `out`.
pub fn traces(reader: &Reader, out: &mut dyn Write) -> io::Result<()> {
    let mut record = Vec::new();
    put_u32(&mut record, VERSION);
    put_u64(&mut record, reader.start().as_secs());
    put_u64(&mut record, u64::from(reader.start().subsec_nanos()));
    let ranges = reader.sampling_table().ranges();
    put_varint(&mut record, ranges.len() as u64);
    for range in ranges {
        put_u64(&mut record, range.bound);
        put_u32(&mut record, range.fixed);
    }
    for index in 1..=reader.trace_count() {
        for (file, line) in reader.raw_trace(index).unwrap_or_default().into_iter().rev() {
            put_varint(&mut record, u64::from(line) + 1);
            put_varint(&mut record, file.len() as u64);
            record.extend_from_slice(file.as_bytes());
        }
        put_varint(&mut record, 0);
        out.write_all(&record)?;
        record.clear();
    }
    out.write_all(&record)
}

/// Whether events of this profile may be cut in pieces: all pieces must be so large that they are always recorded.
fn may_split(reader: &Reader) -> bool {
    reader.sampling_table().largest_bound() <= MAX_EVENT_BYTES / 2
}

/// The .hpd. Sizes from 2^31 on become several events, as the original's numbers have 31 bits. Returns how many events
/// were read and how many written.
///
/// # Errors
/// Those of `out`.
pub fn events(reader: &Reader, records: impl Iterator<Item = RawEvent>, out: &mut dyn Write) -> io::Result<(u64, u64)> {
    let may_split = may_split(reader);
    let mut record = Vec::new();
    let (mut read, mut written) = (0, 0);
    for event in records {
        read += 1;
        let pieces = match event.size {
            size if size > MAX_EVENT_BYTES && size <= MAX_SPLIT_BYTES && may_split => size.div_ceil(MAX_EVENT_BYTES),
            _ => 1,
        };
        for piece in 0..pieces {
            let size = event.size / pieces + u64::from(piece < event.size % pieces);
            let (secs, micros) = if piece == 0 { (event.secs, event.micros) } else { (0, 0) };
            let head = event.head & (HEAD_FREE | MAX_TRACE_INDEX | if piece == 0 { HEAD_NEGATIVE } else { 0 });
            put_u32(&mut record, head);
            put_varint(&mut record, secs);
            put_varint(&mut record, micros);
            put_varint(&mut record, size);
            written += 1;
        }
        out.write_all(&record)?;
        record.clear();
    }
    Ok((read, written))
}
