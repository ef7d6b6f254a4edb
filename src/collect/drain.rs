//! Copies the ring out of the target, and the table of live samples when the ring has lost something.

use super::files::SaveRequest;
use crate::attach::Session;
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory};
use pyheap_protocol::control::{Control, Counters, Doubled};
use pyheap_protocol::record::kind;
use pyheap_protocol::table::Entry;
use pyheap_protocol::{record, ring};
use std::collections::HashSet;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Shortest pause between two looks at the ring: it is taken when some 800,000 samples a second come, and a ring of the usual size is
/// full after 18 ms.
const SHORTEST: Duration = Duration::from_millis(1);
/// The first pause.
pub const PAUSE: Duration = Duration::from_millis(10);
/// A look should find this share of the ring in use: then what comes may become ten times as much at once.
const CALM_SHARE: u64 = 16;
/// The table is copied this often at most: it can be tens of MiB, and when the ring overflows it does so all the time.
const RECONCILE: Duration = Duration::from_millis(200);
/// The ring is looked at again after the shortest pause when this share of it was in use: how much came is not known if it was full.
const BUSY_SHARE: u64 = 4;
/// Most bytes that may wait for the resolver, rings of more than this size excepted. A target that scribbles over its ring
/// can offer gigabytes a second.
const MOST_WAITING: u64 = 16 << 20;
/// A chunk counts as so many bytes at least, so that not too many small ones wait either.
const LEAST_CHUNK: u64 = 64 << 10;
/// The table is copied in pieces of so many entries, and only the live ones are kept.
const PIECE: u64 = 16 << 10;

/// What the resolver gets.
#[derive(Debug)]
pub enum Chunk {
    /// Records, with the time at which they were found.
    Records {
        /// Since the start of the recording.
        at: Duration,
        /// Whole records.
        bytes: Vec<u8>,
        /// Whole pieces of stacks: those of the records that are there, unless they were lost, and perhaps of some that come later.
        pieces: Vec<u8>,
    },
    /// From now on samples stand for more: the period is longer.
    Period {
        /// Since the start of the recording.
        at: Duration,
        /// In bytes.
        period: u64,
    },
    /// From now on all is written into new files, which begin with what is alive.
    Save(Box<SaveRequest>),
    /// These files are complete.
    SaveEnds {
        /// Since the start of the recording.
        at: Duration,
    },
    /// Samples of native memory that were found to be free.
    Missed {
        /// Since the start of the recording.
        at: Duration,
        /// Their ids.
        ids: Vec<u64>,
    },
    /// The live samples, because events were lost.
    Table {
        /// Since the start of the recording.
        at: Duration,
        /// All live entries.
        live: Vec<Entry>,
        /// Ids whose allocation comes in the records that follow.
        coming: HashSet<u64>,
        /// Ids whose free comes there.
        going: HashSet<u64>,
        /// The last id that was given before the entries were copied.
        last_id: u64,
    },
}

impl Chunk {
    /// How much memory it counts as.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Records { bytes, pieces, .. } => ((bytes.len() + pieces.len()) as u64).max(LEAST_CHUNK),
            Self::Table { live, .. } => ((live.len() * size_of::<Entry>()) as u64).max(LEAST_CHUNK),
            Self::Period { .. } | Self::Save(_) | Self::SaveEnds { .. } | Self::Missed { .. } => 0,
        }
    }

    /// Whether files begin or end with it.
    #[must_use]
    pub const fn concerns_files(&self) -> bool {
        matches!(self, Self::Period { .. } | Self::Save(_) | Self::SaveEnds { .. })
    }
}

/// Addresses of what the drain reads.
#[derive(Debug, Clone)]
pub struct Drain {
    memory: ProcessMemory,
    head: RemoteAddr,
    tail: RemoteAddr,
    counters: RemoteAddr,
    slab_used: RemoteAddr,
    last_id: RemoteAddr,
    pieces_head: RemoteAddr,
    pieces_tail: RemoteAddr,
    /// Where the ring of pieces is, and our position in it.
    pieces: Range<u64>,
    pieces_position: u64,
    ring: u64,
    ring_len: u64,
    slab: u64,
    slab_entries: u64,
    position: u64,
    seen: Counters,
    reconciled: Option<Instant>,
    started: Instant,
    waiting: Arc<AtomicU64>,
}

/// Why draining ended.
#[derive(Debug)]
pub enum Ended {
    /// It was asked to.
    Asked,
    /// The target's memory is not there any more.
    Gone(MemoryError),
    /// What stands in the ring makes no sense.
    Damaged,
}

impl Drain {
    /// A drain of `session`'s ring; times count from `started`.
    #[must_use]
    pub fn new(session: &Session, started: Instant) -> Self {
        let places = session.places();
        Self {
            memory: session.memory(),
            head: session.control(offset_of!(Control, ring_head)),
            tail: session.control(offset_of!(Control, ring_tail)),
            counters: session.control(offset_of!(Control, counters)),
            slab_used: session.control(offset_of!(Control, slab_used)),
            last_id: session.control(offset_of!(Control, last_id)),
            pieces_head: session.control(offset_of!(Control, pieces_head)),
            pieces_tail: session.control(offset_of!(Control, pieces_tail)),
            pieces: session.pieces(),
            pieces_position: 0,
            ring: places.ring,
            ring_len: places.ring_len,
            slab: places.slab,
            slab_entries: places.slab_entries,
            position: 0,
            seen: Counters::default(),
            reconciled: None,
            started,
            waiting: Arc::default(),
        }
    }

    /// The bytes that have been sent: who takes a chunk subtracts its [`Chunk::bytes`].
    #[must_use]
    pub fn waiting(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.waiting)
    }

    /// Drains until `stop` is set, then once more to the end.
    /// The less comes, the longer are the pauses, up to `calm`.
    pub fn run(mut self, out: &SyncSender<Chunk>, stop: &AtomicBool, calm: Duration) -> Ended {
        let (mut pause, mut last) = (PAUSE, Instant::now());
        loop {
            let stopping = stop.load(Ordering::Acquire);
            // A resolver that is behind leaves the rest in the ring: that is what the ring is for.
            let full = !stopping && self.waiting.load(Ordering::Acquire) > MOST_WAITING;
            if !full {
                let since = last.elapsed();
                last += since;
                match self.round(out, stopping) {
                    Ok(bytes) => pause = next_pause(pause, since, bytes, self.ring_len, calm),
                    Err(ended) => return ended,
                }
            }
            if stopping {
                return Ended::Asked;
            }
            std::thread::park_timeout(pause);
        }
    }

    /// One look: how many bytes there were.
    fn round(&mut self, out: &SyncSender<Chunk>, last: bool) -> Result<u64, Ended> {
        let at = self.started.elapsed();
        let head = self.memory.read_u64(self.head).map_err(Ended::Gone)?;
        let bytes = self.take(head)?;
        // After the records: the piece of each is there before its record is.
        let pieces = self.take_pieces()?;
        let room = (self.pieces.end - self.pieces.start).max(1);
        let found = (bytes.len() as u64).max(pieces.len() as u64 * self.ring_len / room);
        self.send(out, Chunk::Records { at, bytes, pieces })?;
        let counters = self.read_counters().map_err(Ended::Gone)?;
        let lost = |c: &Counters| (c.lost_allocs, c.lost_frees, c.dropped_frees);
        let due = last || self.reconciled.is_none_or(|then| then.elapsed() >= RECONCILE);
        if due && lost(&counters) != lost(&self.seen) {
            self.seen = counters;
            self.reconciled = Some(Instant::now());
            self.reconcile(out)?;
        }
        Ok(found)
    }

    /// What the shim has counted.
    ///
    /// # Errors
    /// When the target's memory cannot be read.
    pub fn read_counters(&self) -> Result<Counters, MemoryError> {
        let bytes: [u8; size_of::<Counters>()] = self.memory.read_array(self.counters)?;
        Ok(Counters::read_from_bytes(&bytes).unwrap_or_default())
    }

    /// Copies the bytes from our position to `head` and gives their room back.
    fn take(&mut self, head: u64) -> Result<Vec<u8>, Ended> {
        let len = head
            .checked_sub(self.position)
            .filter(|&len| len <= self.ring_len)
            .ok_or(Ended::Damaged)?;
        let bytes = self.copy(self.ring..self.ring + self.ring_len, self.position, len)?;
        if len != 0 {
            self.position = head;
            let tail = Doubled { a: head, b: head };
            self.memory.write(self.tail, tail.as_bytes()).map_err(Ended::Gone)?;
        }
        Ok(bytes)
    }

    /// The same of the ring of pieces, up to its end. What makes no sense there is left out: it costs native frames only.
    fn take_pieces(&mut self) -> Result<Vec<u8>, Ended> {
        let size = self.pieces.end - self.pieces.start;
        if size == 0 {
            return Ok(Vec::new());
        }
        let head = self.memory.read_u64(self.pieces_head).map_err(Ended::Gone)?;
        let len = head.checked_sub(self.pieces_position).filter(|&len| len <= size);
        let bytes = self.copy(self.pieces.clone(), self.pieces_position, len.unwrap_or(0))?;
        if len != Some(0) {
            self.pieces_position = head;
            let tail = Doubled { a: head, b: head };
            self.memory
                .write(self.pieces_tail, tail.as_bytes())
                .map_err(Ended::Gone)?;
        }
        Ok(bytes)
    }

    /// Copies `len` bytes from `position` on out of a ring.
    fn copy(&self, ring: Range<u64>, position: u64, len: u64) -> Result<Vec<u8>, Ended> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let size = ring.end - ring.start;
        let offset = position % size;
        let mut bytes = vec![0; len as usize];
        let (left, right) = bytes.split_at_mut(len.min(size - offset) as usize);
        self.memory
            .read_into(RemoteAddr(ring.start + offset), left)
            .map_err(Ended::Gone)?;
        self.memory
            .read_into(RemoteAddr(ring.start), right)
            .map_err(Ended::Gone)?;
        Ok(bytes)
    }

    /// Sends the table, and then what came while it was copied.
    ///
    /// The order of the reads matters: the loss counters (by the caller), the last id, the table, the ring's head. A sample
    /// with an id up to that one was entered before the table was copied; if it is not in the copy it has been freed, and
    /// if the record of that free is not in the ring it was lost. What was lost after the counters were read changes them
    /// again, and is found the next time.
    fn reconcile(&mut self, out: &SyncSender<Chunk>) -> Result<(), Ended> {
        let last_id = self.memory.read_u64(self.last_id).map_err(Ended::Gone)?;
        let used = self
            .memory
            .read_u64(self.slab_used)
            .map_err(Ended::Gone)?
            .min(self.slab_entries);
        let mut live = Vec::new();
        for first in (0..used).step_by(PIECE as usize) {
            let len = PIECE.min(used - first) as usize * size_of::<Entry>();
            let at = RemoteAddr(self.slab + first * size_of::<Entry>() as u64);
            let bytes = self.memory.read_vec(at, len).map_err(Ended::Gone)?;
            let entries = bytes.chunks_exact(size_of::<Entry>());
            let entries = entries.filter_map(|bytes| Entry::read_from_bytes(bytes).ok());
            live.extend(entries.filter(Entry::is_live));
        }
        let at = self.started.elapsed();
        let head = self.memory.read_u64(self.head).map_err(Ended::Gone)?;
        let bytes = self.take(head)?;
        let (mut coming, mut going) = (HashSet::new(), HashSet::new());
        let mut rest = bytes.as_slice();
        while let Some((head, record, more)) = ring::split(rest) {
            match head.kind {
                kind::ALLOC => coming.extend(record::Alloc::read_from_bytes(record).map(|alloc| alloc.id).ok()),
                kind::FREE => going.extend(record::Free::read_from_bytes(record).map(|free| free.id).ok()),
                _ => {}
            }
            rest = more;
        }
        let table = Chunk::Table {
            at,
            live,
            coming,
            going,
            last_id,
        };
        let pieces = self.take_pieces()?;
        self.send(out, table)?;
        self.send(out, Chunk::Records { at, bytes, pieces })
    }

    /// Sends, waiting if it must: the caller has looked that there is room, but a round may send several.
    fn send(&self, out: &SyncSender<Chunk>, chunk: Chunk) -> Result<(), Ended> {
        if matches!(&chunk, Chunk::Records { bytes, pieces, .. } if bytes.is_empty() && pieces.is_empty()) {
            return Ok(());
        }
        self.waiting.fetch_add(chunk.bytes(), Ordering::AcqRel);
        match out.try_send(chunk) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(chunk)) => out.send(chunk).map_err(|_| Ended::Asked),
            Err(TrySendError::Disconnected(_)) => Err(Ended::Asked),
        }
    }
}

/// The pause after one of `pause` when so many bytes came in `since`: it may be twice as long at most.
fn next_pause(pause: Duration, since: Duration, bytes: u64, ring_len: u64, calm: Duration) -> Duration {
    if bytes > ring_len / BUSY_SHARE {
        return SHORTEST;
    }
    let wanted = since.mul_f64((ring_len / CALM_SHARE) as f64 / bytes.max(1) as f64);
    wanted.min(pause * 2).clamp(SHORTEST, calm.max(PAUSE))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: u64 = 1 << 20;
    const CALM: Duration = Duration::from_millis(100);

    #[test]
    fn pauses_follow_what_comes() {
        let after = |pause, bytes| {
            let pause = Duration::from_millis(pause);
            next_pause(pause, pause, bytes, RING, CALM).as_millis()
        };
        assert_eq!(after(10, 0), 20);
        assert_eq!(after(80, 0), 100);
        // A sixteenth of the ring is what a look should find.
        assert_eq!(after(40, RING / 16), 40);
        assert_eq!(after(80, RING / 8), 40);
        assert_eq!(after(80, RING), 1);
        assert_eq!(after(10, u64::MAX), 1);
    }

    /// 800,000 samples and frees a second are 58 MB: the ring is full after 18 ms. However the looks began, after some of them there
    /// is room for as much again.
    #[test]
    fn what_comes_at_a_steady_rate_finds_room() {
        const RATE: f64 = 58e6;
        for first in [1, 10, 100] {
            let mut pause = Duration::from_millis(first);
            for look in 0..50 {
                let late = Duration::from_micros(200);
                let bytes = ((pause + late).as_secs_f64() * RATE) as u64;
                assert!(look == 0 || bytes < RING / 2, "{first}: {bytes} at look {look}");
                pause = next_pause(pause, pause + late, bytes, RING, CALM);
            }
        }
    }
}
